"""Tasks that send messages to a peer or access its memory."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from ..arguments import within
from ..core import Buf, RemoteMemory
from ..core.operand import destinations, sources
from ..enums import Access, WrOpcode
from ..errors import BadStateError, InvalidValueError, NotPermittedError
from ..verbs import PD, Completion, SendWr, Sge
from .connection import ConnectionState, Owner, RdmaConnection
from .cpu_datapath import CpuDataPath, RdmaTask

_WORD = 8  # bytes of an atomic
_MOST_IMMEDIATE = (1 << 32) - 1


def path_of(rdma: Owner) -> CpuDataPath:
    """Return the data path of an `Rdma` whose tasks run on the CPU."""
    path = rdma.datapath
    if not isinstance(path, CpuDataPath):
        raise BadStateError(f"kernels drive {rdma}: it has no tasks")
    return path


def place(remote: RemoteMemory | Buf, right: Access) -> RemoteMemory:
    """Return the peer's memory that a task accesses. NotPermittedError unless the peer grants this right."""
    memory = remote.memory if isinstance(remote, Buf) else remote
    if not isinstance(memory, RemoteMemory):
        raise InvalidValueError(f"{memory} is no memory of a peer: give a RemoteMemory, or a buffer of one")
    if not memory.access & right:
        raise NotPermittedError(f"the peer does not give {right.name} for {memory}: it must export with that right")
    if isinstance(remote, Buf):
        return RemoteMemory(remote.data_address, remote.data_nbytes, memory.rkey, memory.access)
    return memory


class ConnectionTask(RdmaTask):
    """A task on a connection, which must be connected when the task is submitted."""

    connection: RdmaConnection

    def __init__(self, connection: RdmaConnection, user_data: object = None):
        super().__init__(connection.rdma, user_data)
        self.connection = connection

    def _send(self, opcode: WrOpcode, sges: tuple[Sge, ...] = (), *, inline: bytes | None = None,
              remote: RemoteMemory | None = None, imm: int = 0, compare: int = 0, swap: int = 0,
              add: int = 0) -> None:
        """Post a request."""
        connection = self.connection
        if connection.state is not ConnectionState.CONNECTED:
            raise BadStateError(f"{connection} is {connection.state.name}: connect it before you submit tasks")
        path = path_of(connection.rdma)
        nbytes = len(inline) if inline is not None else sum(sge.length for sge in sges)
        if remote is not None and nbytes > remote.nbytes:
            raise InvalidValueError(f"{nbytes} bytes, and the peer's memory has {remote.nbytes}: give a shorter source")
        path.send(self, connection.qp, SendWr(
            opcode=opcode, sges=sges, inline=inline, wr_id=path.number(), imm=imm, compare=compare, swap=swap, add=add,
            remote_addr=remote.address if remote else None, rkey=remote.rkey if remote else None,
        ))

    def _gather(self, source: object, held: ExitStack) -> tuple[tuple[Sge, ...], bytes | None]:
        """Return a source as scatter/gather entries, or as bytes to put into the WQE if they fit."""
        qp = self.connection.qp
        if isinstance(source, bytes) and len(source) <= qp.init_attr.max_inline_data:
            return (), source
        return sources(qp.pd, source, held), None

    @property
    def _pd(self) -> PD:
        return self.connection.qp.pd

    def note(self, done: Completion) -> None:
        """Store the result of a request that completed successfully."""


class Send(ConnectionTask):
    """Send the bytes of `source`, optionally with the number `immediate` (`doca_rdma_task_send`, `…_send_imm`).

    `source` is a `core.Buf`, a memory map, or plain memory: bytes, a NumPy array, a tensor.
    """

    source: object
    immediate: int | None

    def __init__(
        self, connection: RdmaConnection, source: object, immediate: int | None = None, *, user_data: object = None
    ):
        super().__init__(connection, user_data)
        self.source, self.immediate = source, checked(immediate)

    def _post(self, held: ExitStack) -> None:
        sges, inline = self._gather(self.source, held)
        opcode = WrOpcode.SEND if self.immediate is None else WrOpcode.SEND_WITH_IMM
        self._send(opcode, sges, inline=inline, imm=self.immediate or 0)


class Write(ConnectionTask):
    """Write the bytes of `source` to the start of a peer's memory (`doca_rdma_task_write`).

    With `immediate`, the write also completes one of the peer's receives, which gets this number (`…_write_imm`).
    `remote` is a `core.RemoteMemory`, or a buffer in one.
    """

    source: object
    remote: RemoteMemory | Buf
    immediate: int | None

    def __init__(
        self,
        connection: RdmaConnection,
        source: object,
        remote: RemoteMemory | Buf,
        immediate: int | None = None,
        *,
        user_data: object = None,
    ):
        super().__init__(connection, user_data)
        self.source, self.remote, self.immediate = source, remote, checked(immediate)

    def _post(self, held: ExitStack) -> None:
        sges, inline = self._gather(self.source, held)
        opcode = WrOpcode.RDMA_WRITE if self.immediate is None else WrOpcode.RDMA_WRITE_WITH_IMM
        remote = place(self.remote, Access.REMOTE_WRITE)
        self._send(opcode, sges, inline=inline, remote=remote, imm=self.immediate or 0)


class Read(ConnectionTask):
    """Read from the start of a peer's memory into `destination` (`doca_rdma_task_read`).

    It reads as many bytes as the shorter of the two has. `nbytes` is that number afterwards.
    """

    remote: RemoteMemory | Buf
    destination: object
    nbytes: int | None

    def __init__(
        self, connection: RdmaConnection, remote: RemoteMemory | Buf, destination: object, *, user_data: object = None
    ):
        super().__init__(connection, user_data)
        self.remote, self.destination, self.nbytes = remote, destination, None

    def _post(self, held: ExitStack) -> None:
        remote, self.nbytes = place(self.remote, Access.REMOTE_READ), None
        self._send(WrOpcode.RDMA_READ, first(destinations(self._pd, self.destination, held), remote.nbytes),
                   remote=remote)

    def note(self, done: Completion) -> None:
        self.nbytes = done.byte_len
        if isinstance(self.destination, Buf):
            self.destination.fill(done.byte_len)


class AtomicTask(ConnectionTask):
    """A task that changes an aligned 8-byte word of a peer's memory. `value` is the word's old value.

    The word is in the peer's byte order. The change is atomic with respect to other atomics of the peer's device.
    """

    remote: RemoteMemory | Buf
    value: int | None

    def __init__(self, connection: RdmaConnection, remote: RemoteMemory | Buf, user_data: object):
        super().__init__(connection, user_data)
        self.remote, self.value = remote, None
        self._before = np.zeros(1, np.uint64)

    def _change(self, opcode: WrOpcode, held: ExitStack, *, compare: int = 0, swap: int = 0, add: int = 0) -> None:
        self.value = None
        self._send(opcode, destinations(self._pd, self._before, held), compare=compare, swap=swap, add=add,
                   remote=place(self.remote, Access.REMOTE_ATOMIC))

    def note(self, done: Completion) -> None:
        self.value = int(self._before[0])


class FetchAdd(AtomicTask):
    """Add to a word of a peer's memory, modulo 2^64 (`doca_rdma_task_atomic_fetch_add`)."""

    add: int

    def __init__(
        self, connection: RdmaConnection, remote: RemoteMemory | Buf, add: int, *, user_data: object = None
    ):
        super().__init__(connection, remote, user_data)
        self.add = word("add", add)

    def _post(self, held: ExitStack) -> None:
        self._change(WrOpcode.ATOMIC_FETCH_AND_ADD, held, add=self.add)


class CompareSwap(AtomicTask):
    """Replace a word of a peer's memory with `swap` if it equals `compare` (`doca_rdma_task_atomic_cmp_swp`)."""

    compare: int
    swap: int

    def __init__(
        self, connection: RdmaConnection, remote: RemoteMemory | Buf, compare: int, swap: int, *,
        user_data: object = None,
    ):
        super().__init__(connection, remote, user_data)
        self.compare, self.swap = word("compare", compare), word("swap", swap)

    def _post(self, held: ExitStack) -> None:
        self._change(WrOpcode.ATOMIC_CMP_AND_SWP, held, compare=self.compare, swap=self.swap)


def checked(immediate: int | None) -> int | None:
    """Return `immediate`, checked to be None or a 32-bit number."""
    return None if immediate is None else within("immediate", immediate, 0, _MOST_IMMEDIATE)


def word(name: str, value: int) -> int:
    """Return `value`, checked to be a 64-bit number."""
    return within(name, value, 0, (1 << 64) - 1)


def first(sges: tuple[Sge, ...], nbytes: int) -> tuple[Sge, ...]:
    """Return scatter/gather entries for only the first `nbytes` bytes."""
    found = []
    for sge in sges:
        found.append(Sge(sge.address, min(sge.length, nbytes), sge.lkey))
        nbytes -= found[-1].length
    return tuple(found)
