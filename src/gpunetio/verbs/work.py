"""Work requests and completions of the CPU data path, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..enums import SendFlags, WcFlags, WcOpcode, WcStatus, WrOpcode
from ..errors import DocaError, DocaErrorCode

if TYPE_CHECKING:
    from .ah import AddressHandle
    from .cq import CQ

_NO_FLAGS = WcFlags(0)


@dataclass(frozen=True, slots=True)
class Sge:
    """`length` bytes at `address`, as the region with key `lkey` addresses them (`ibv_sge`)."""

    address: int
    length: int
    lkey: int


class _Request:
    """`packed` is the request as a queue has packed it, reused when the request is posted there again (posting.py).

    It is not a field, so equality, `repr` and pickling ignore it.
    """

    __slots__ = ("packed",)
    packed: tuple[object, object, tuple[object, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendWr(_Request):
    """A request for the send queue (`ibv_send_wr`).

    `sges`                   data to gather; for a READ or an atomic, the place of the result; for a MEMCPY, source and
                             target. Kept as a tuple
    `inline`                 the bytes themselves, instead of `sges`: no region is needed, and they may change after the
                             post
    `wr_id`                  returned in the completion
    `flags`                  unlike in C, every request makes a completion by default
    `remote_addr`, `rkey`    for WRITE, READ and atomics, unless there are no bytes: the peer's memory
    `imm`                    32 bits, for the opcodes WITH_IMM
    `compare`, `swap`        of a compare and swap: 64 bits in the responder's byte order
    `add`                    of a fetch and add
    `wait_cqn`, `wait_pi`    of a WAIT; `wait_cq_pi` sets them
    `ah`                     on a UD queue pair: the address handle of the destination (`PD.create_ah`), which must stay
                             open until the request has completed
    `remote_qpn`             the destination's queue pair
    `remote_qkey`            the destination's Q_Key; if the highest bit is set, the queue pair's own is sent instead
    """

    opcode: WrOpcode
    sges: Sequence[Sge] = ()
    inline: bytes | None = None
    wr_id: int = 0
    flags: SendFlags = SendFlags.SIGNALED
    remote_addr: int | None = None
    rkey: int | None = None
    imm: int = 0
    compare: int = 0
    swap: int = 0
    add: int = 0
    wait_cqn: int = 0
    wait_pi: int = 0
    ah: AddressHandle | None = None
    remote_qpn: int = 0
    remote_qkey: int = 0

    def __post_init__(self) -> None:
        if type(self.sges) is not tuple:
            _keep_entries(self)


def wait_cq_pi(cq: CQ, pi: int, *, wr_id: int = 0, flags: SendFlags = SendFlags.SIGNALED) -> SendWr:
    """Return a WAIT until a CQ's producer index passes `pi` (`doca_verbs_bridge_set_wait_cq_pi_wr`).

    The WAIT holds its queue until entry number `pi` of the CQ has been written. Entries count from 0 and never wrap.
    `cq.consumer_index` entries have been polled, so with none in flight, `consumer_index + 1` waits for two
    completions. The queue pair must be created with `core_direct_master`.
    """
    return SendWr(opcode=WrOpcode.WAIT_CQ_PI, wait_cqn=cq.cqn, wait_pi=pi, wr_id=wr_id, flags=flags)


def memcpy(target: Sge, source: Sge, *, wr_id: int = 0, flags: SendFlags = SendFlags.SIGNALED) -> SendWr:
    """Return a MEMCPY: the device copies local memory to local memory (`mlx5dv_wr_memcpy`).

    Source and target have the same length, from 1 byte to the device's `max_wr_memcpy_length`, and should not overlap.
    The queue pair must be created with `memcpy`; it may be connected to itself.
    """
    return SendWr(opcode=WrOpcode.MEMCPY, sges=(source, target), wr_id=wr_id, flags=flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecvWr(_Request):
    """A request for the receive queue (`ibv_recv_wr`): the buffers of a SEND. `sges` is kept as a tuple."""

    sges: Sequence[Sge] = ()
    wr_id: int = 0

    def __post_init__(self) -> None:
        if type(self.sges) is not tuple:
            _keep_entries(self)


def _keep_entries(request: SendWr | RecvWr) -> None:
    """Keep the entries as a tuple, so that later changes to the caller's list have no effect."""
    if isinstance(request.sges, Iterable):  # posting refuses anything else
        object.__setattr__(request, "sges", tuple(request.sges))


class Sender(NamedTuple):
    """The sender of a datagram: its queue pair and, on InfiniBand, its LID and the service level."""

    src_qp: int = 0
    slid: int = 0
    sl: int = 0


_NOBODY = Sender()


@dataclass(slots=True)  # not frozen: creating a frozen one takes five times as long
class Completion:
    """The result of a request (`ibv_wc`).

    `timestamp` is the time of completion on the device's clock (`Context.query_clock`), or None. With a status other
    than SUCCESS, only `wr_id`, `status`, `qp_num` and `vendor_err` are valid. `byte_len` is valid for a receive, a READ
    or an atomic; `imm` is None without immediate data.

    For a received datagram, `src_qp` is the sender's queue pair, and `flags` say whether there is a GRH; `slid` and
    `sl` are for InfiniBand. `byte_len` includes the 40 bytes before the payload, which are reserved for the GRH.
    """

    wr_id: int
    status: WcStatus
    opcode: WcOpcode
    byte_len: int
    imm: int | None
    qp_num: int
    vendor_err: int = 0
    flags: WcFlags = _NO_FLAGS
    timestamp: int | None = field(default=None, compare=False)
    sender: Sender = _NOBODY  # one field, because each field costs time in every completion

    @property
    def src_qp(self) -> int:
        """Return the number of the queue pair that sent a datagram; 0 for anything else."""
        return self.sender.src_qp

    @property
    def slid(self) -> int:
        """Return the LID that sent a datagram on InfiniBand; 0 for anything else."""
        return self.sender.slid

    @property
    def sl(self) -> int:
        """Return the service level of a datagram on InfiniBand; 0 for anything else."""
        return self.sender.sl


class BadWrError(DocaError):
    """A request was refused. The requests before it are posted, those after it are not (`bad_wr`).

    `index` is the request's place in the list, `request` is the request; `code` and `__cause__` give the reason.
    """

    index: int
    request: SendWr | RecvWr
    code: DocaErrorCode

    def __init__(self, index: int, request: SendWr | RecvWr, cause: DocaError):
        super().__init__(f"request {index} (wr_id {getattr(request, 'wr_id', None)}): {cause}")
        self.index, self.request, self.code = index, request, cause.code
