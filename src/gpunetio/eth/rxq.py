"""The base class of the three types of receive queues for Ethernet packets."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable
from contextlib import ExitStack

from ..arguments import instance, within
from ..errors import InUseError, NotFoundError
from ..formats.commands import Opcode
from ..formats.ethernet_queues import QueueState, TimestampFormat
from ..formats.layout import Fields
from ..verbs import CQ, PD, Context, DevxObject, Handle
from ..verbs.devx.ring import Ring
from ..verbs.devx.tir import create_tir
from .caps import EthCaps, query_caps

SHORTEST_PACKET = 64  # IEEE 802.3: the minimum frame, with its check sequence
_LAST_QUEUE_ID = 0xFFFF


class EthRxq(Handle, ABC):
    """A receive queue of Ethernet packets (`doca_eth_rxq`): RQ number `rqn`, reached through the TIR number `tirn`.

    It receives the packets that flow rules direct to its TIR. The queue cannot be closed before those rules.

    `max_packet`   bytes of the longest packet that it receives
    `cq`           the CQ where packets complete
    `caps`         the device's capabilities
    """

    _rank = 0
    rqn: int
    tirn: int
    pd: PD
    cq: CQ
    caps: EthCaps
    max_packet: int

    def __init__(self, pd: PD, max_packet: int, queue_id: int | None):
        super().__init__(instance("pd", pd, PD).ctx)
        self._use(pd, pd.ctx)
        self.pd, self.caps = pd, query_caps(pd.ctx)
        self.max_packet = within("max_packet", max_packet, SHORTEST_PACKET, self.caps.max_packet)
        self._queue_id: int | None = None
        if queue_id is not None:
            self._queue_id = self._free_id(queue_id)

    def _details(self) -> Iterable[str]:
        yield f"RQ {self.rqn:#x}, TIR {self.tirn:#x}"
        yield f"packets up to {self.max_packet} bytes"
        if self._queue_id is not None:
            yield f"queue_id {self._queue_id}"

    def _create(self, cq: CQ, ring: Ring, wq: Fields, undo: ExitStack) -> None:
        """Create the RQ, in RST, and its TIR. `wq` has the WQ context's fields for the ring's WQEs."""
        devx, self.cq, self._ring = self.ctx.devx, cq, ring
        real_time = self.caps.real_time_receive
        self._rq = devx.create(
            Opcode.CREATE_RQ, uses=(cq,),
            ctx={
                "cqn": cq.cqn, "vsd": 1, "flush_in_error_en": 1,
                "ts_format": TimestampFormat.REAL_TIME if real_time else TimestampFormat.FREE_RUNNING,
                "wq": {
                    "pd": self.pd.pdn, "wq_umem_valid": 1, "wq_umem_id": ring.umem_id, "wq_umem_offset": ring.offset,
                    "dbr_umem_valid": 1, "dbr_umem_id": ring.dbr_umem_id, "dbr_addr": ring.dbr_offset, **wq,
                },
            },
        )
        undo.callback(self._rq.close)
        self._tir = create_tir(self.ctx, (self._rq,), inline_rqn=self._rq.number)
        undo.callback(self._tir.close)
        self.rqn, self.tirn = self._rq.number, self._tir.number

    def _stop(self) -> None:
        """Move the RQ to RST, where it receives nothing and the device forgets its position."""
        self._rq.modify(Opcode.MODIFY_RQ, rq_state=self.state, ctx={"state": QueueState.RST})

    def _ready(self) -> None:
        """Move the RQ from RST to RDY."""
        self._rq.modify(Opcode.MODIFY_RQ, rq_state=QueueState.RST, ctx={"state": QueueState.RDY})

    def close_with_owner(self) -> None:
        if self.closed:
            return
        if not (self._tir.destroyed or self._tir.destroy_if_unused()):
            raise InUseError(f"{self}: a rule of {self.ctx} still leads to its TIR {self.tirn:#x}: remove that first")
        super().close_with_owner()

    @property
    def rq(self) -> DevxObject:
        """Return the RQ, for commands of your choice."""
        self.check_open()
        return self._rq

    @property
    def state(self) -> QueueState:
        """Return the RQ's state on the device. A write to memory that the RQ may not access moves it to ERR."""
        self.check_open()
        return QueueState(self._rq.query()["ctx"]["state"])

    @property
    def queue_id(self) -> int | None:
        """Return the number by which flow rules name the queue (`doca_eth_rxq_apply_queue_id`), or None.

        Set it to a number from 0 to 65535. InUseError if another open queue of the context has that number.
        """
        return self._queue_id

    @queue_id.setter
    def queue_id(self, queue_id: int) -> None:
        self.check_open()
        self._queue_id = self._free_id(queue_id)

    def _free_id(self, queue_id: int) -> int:
        queue_id = within("queue_id", queue_id, 0, _LAST_QUEUE_ID)
        for other in _queues(self.ctx):
            if other is not self and other.queue_id == queue_id:
                raise InUseError(f"queue_id = {queue_id} is that of {other}: choose another, or close that queue first")
        return queue_id


def rxq_of(ctx: Context, queue_id: int) -> EthRxq:
    """Return the context's open receive queue with this `queue_id`. NotFoundError if there is none."""
    for queue in _queues(ctx):
        if queue.queue_id == queue_id:
            return queue
    known = sorted(queue.queue_id for queue in _queues(ctx) if queue.queue_id is not None)
    raise NotFoundError(f"no receive queue of {ctx} has queue_id {queue_id}; there are {known or 'none with an id'}")


def _queues(ctx: Context) -> Iterable[EthRxq]:
    return (user for user in ctx.users if isinstance(user, EthRxq))
