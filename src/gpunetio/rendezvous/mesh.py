"""A mesh: each of N processes has a connected queue pair to every other, and the keys of its memory."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

import numpy as np

from ..closing import end_block
from ..enums import MemType
from ..errors import InvalidValueError
from ..verbs import MR, PD
from .endpoints import endpoint_of, endpoint_values, memory_of
from .environment import from_environment
from .group import TIMEOUT, Rendezvous
from .link import Message, PeerError
from .tcp import PORT, TcpRendezvous

if TYPE_CHECKING:
    from ..gpu import ExportedQp, Gpu
    from ..gpu.group import QpOptions
    from ..jit.code import Launch


@dataclass(frozen=True)
class Peer:
    """A rank of a mesh: the queue pair to it, and its memory. For this rank itself `qp` is None."""

    rank: int
    qp: ExportedQp | None
    address: int
    rkey: int
    nbytes: int


class Mesh:
    """Connected queue pairs to every rank. `gpunetio.mesh` makes it; use it in a `with` statement.

    `peers`         one `Peer` per rank
    `memory`        the memory region that this rank exposes to the others, or None
    `rendezvous`    where the ranks meet, for more values or a barrier

    A kernel takes the mesh as an argument and gets the address of a table. The table has `ROW` bytes per rank: the
    queue, the address and the rkey of that rank's memory, and its size in bytes, 8 bytes each. This rank's own queue is
    0.
    """

    ROW = 32
    rendezvous: Rendezvous
    rank: int
    size: int
    sgid_index: int
    memory: MR | None
    peers: tuple[Peer, ...]

    def __init__(
        self, rendezvous: Rendezvous, pd: PD, gpu: Gpu, memory: object, sgid_index: int, options: QpOptions,
        owns: bool = False,
    ):
        self.rendezvous, self.rank, self.size = rendezvous, rendezvous.rank, rendezvous.size
        self.sgid_index, self._owns, self._pid = sgid_index, owns, os.getpid()
        with ExitStack() as parts:
            self.memory = self._registered(pd, memory, parts)
            queues = [None if rank == self.rank else gpu.create_qp(pd, **options) for rank in range(self.size)]
            for queue in filter(None, queues):
                parts.callback(queue.close)
            self.peers = self._connected(queues)
            self._table = gpu.alloc(self.ROW * self.size, MemType.CPU_GPU)
            parts.callback(self._table.close)
            rows = [
                (peer.qp.device_address if peer.qp else 0, peer.address, peer.rkey, peer.nbytes) for peer in self.peers
            ]
            self._table.write(np.array(rows, np.int64))
            self.barrier()  # a peer that is not connected yet drops packets
            self._parts = parts.pop_all()

    @staticmethod
    def _registered(pd: PD, memory: object, parts: ExitStack) -> MR | None:
        if memory is None or isinstance(memory, MR):
            return memory
        mr = pd.register(memory)
        parts.callback(mr.close)
        return mr

    def _connected(self, queues: list[ExportedQp | None]) -> tuple[Peer, ...]:
        own = self.memory
        values = self.rendezvous.allgather({
            "address": own.address if own else 0, "rkey": own.rkey if own else 0, "nbytes": own.nbytes if own else 0,
            "qps": [
                endpoint_values(queue.qp.endpoint(sgid_index=self.sgid_index)) if queue else {} for queue in queues
            ],
        })
        peers = []
        for rank, (queue, value) in enumerate(zip(queues, values)):
            if not isinstance(value, dict):
                raise PeerError(f"rank {rank} sent {value!r:.40} instead of its queue pairs")
            told = Message(f"rank {rank}", {**value, "kind": "mesh"})
            if queue is not None:
                qps = told.parts("qps", self.size)
                if len(qps) != self.size:
                    raise told.wrong("qps", f"a list of {self.size} queue pairs")
                queue.connect(endpoint_of(qps[self.rank]), sgid_index=self.sgid_index)
            peers.append(Peer(rank, queue, *memory_of(told)))
        return tuple(peers)

    def barrier(self) -> None:
        """Return once all ranks have called this: processes, not kernels."""
        self.rendezvous.barrier()

    @property
    def closed(self) -> bool:
        """Whether `close()` was called. A launch refuses a closed mesh."""
        return self._parts is None

    @property
    def device_address(self) -> int:
        """Return the device address of the table."""
        return self._table.device_address

    def used_by(self, launch: Launch) -> None:
        """Keep the mesh open while `launch`, which takes it as an argument, runs. Closing waits for the kernel."""
        self._table.used_by(launch)
        for peer in self.peers:
            if peer.qp is not None:
                peer.qp.used_by(launch)

    def close(self, error: BaseException | None = None) -> None:
        """Close queues and table, and leave the rendezvous if `gpunetio.mesh` made it. Idempotent.

        Without `error`, this first waits until all ranks close: the last messages of a rank may need another rank's
        NIC.
        """
        if self._pid != os.getpid() or self._parts is None:
            return
        parts, self._parts = self._parts, None
        with ExitStack() as steps:
            if self._owns:
                steps.callback(self.rendezvous.close, error)
            steps.push(parts)
            if error is None:
                self.barrier()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        end_block(error, lambda: self.close(error))

    def __repr__(self) -> str:
        return f"<Mesh rank {self.rank} of {self.size}{', closed' if self.closed else ''}>"


def mesh(
    rank: int | None = None,
    size: int | None = None,
    *,
    pd: PD,
    gpu: Gpu,
    memory: object = None,
    via: Rendezvous | None = None,
    address: str = "127.0.0.1",
    port: int = PORT,
    join_timeout: float = TIMEOUT,
    sgid_index: int = 0,
    **options: Unpack[QpOptions],
) -> Mesh:
    """Connect this process, number `rank` of `size`, to every other rank.

    `pd`, `gpu`     where queue pairs are created; `options` are those of `Gpu.create_qp`, for example `depth`
    `memory`        what the others may write and read: a memory region, or an argument of `PD.register`. The ranks'
                    memory may differ in size. None exposes nothing
    `sgid_index`    the GID index of the NIC's address to use
    `via`           the `Rendezvous` to meet in. Without it, the ranks meet over TCP, at `address` and `port` of rank 0.
                    Without `rank` and `size`, `mpirun` or `torchrun` gives them
    `join_timeout`  seconds that this rank waits for the others

    Errors are those of `Rendezvous`, `Gpu.create_qp` and `QP.connect`. A mesh that fails leaves nothing open.
    """
    if via is not None and (rank is not None or size is not None):
        raise InvalidValueError("mesh: give rank and size, or the rendezvous (via), which knows them")
    if (rank is None) != (size is None):
        raise InvalidValueError(f"mesh: rank {rank!r} and size {size!r} go together: give both or neither")
    if via is not None:
        return Mesh(via, pd, gpu, memory, sgid_index, options)
    if rank is None or size is None:
        rendezvous = from_environment(timeout=join_timeout)
    else:
        rendezvous = TcpRendezvous(rank, size, address, port, timeout=join_timeout)
    try:
        return Mesh(rendezvous, pd, gpu, memory, sgid_index, options, owns=True)
    except BaseException as error:
        rendezvous.close(error)
        raise
