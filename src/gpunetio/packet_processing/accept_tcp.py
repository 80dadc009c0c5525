"""The kernel that accepts connections, in one thread of the CPU per queue."""

from __future__ import annotations

from .. import device as dev
from ..device import kernel
from ..formats.cqe import RxChecksum
from ..jit.compile import device_function
from ..jit.ops import ld_fixed64
from .acceptor import ACCEPTOR, AcceptorState
from .connection import LANE
from .counts import WORK, Work, note_turn, wait_for_packets
from .handshake import HANDED_OVER, look_at_ends, take_frame

DEPTH, BURST = 2048, 128  # packets: of the queue, and of a turn
PLACE_BYTES = 2048  # room for the longest segment that is accepted, with all options of its headers
_RIGHT = int(RxChecksum.L3_OK | RxChecksum.L4_OK)
_PATIENCE_NS = 20_000_000


@device_function
def _wake_lanes(acceptor: AcceptorState) -> None:
    """Wake the server's lanes for this queue."""
    number, queues = ld_fixed64(acceptor + ACCEPTOR.number), ld_fixed64(acceptor + ACCEPTOR.queues)
    for lane in range(number, ld_fixed64(acceptor + ACCEPTOR.lanes_num), queues):
        dev.wake(ld_fixed64(acceptor + ACCEPTOR.lanes) + lane * LANE.size + LANE.nap)


@kernel
def accept_tcp(
    stop: int, acceptor: AcceptorState, rxq: dev.EthRxq, txq: dev.EthTxq, attrs: int, answer: int, work: Work
) -> None:
    """Process the CPU's segments until the word at `stop` is not 0, or a queue fails. `attrs` has room for BURST.

    Answers are built at `answer`. Segments of connections go to the server.
    """
    received, status = 0, dev.OK
    while status >= 0 and dev.ld_relaxed64(stop) == 0:
        received = wait_for_packets(work, rxq, BURST, _PATIENCE_NS, attrs, dev.THREAD)
        first, now = dev.rxq_first(rxq), dev.clock_ns()
        handed_over = False
        for i in range(received):
            attr = dev.attr_at(attrs + i * dev.ATTR_BYTES)
            if attr.checks & _RIGHT != _RIGHT:
                continue
            nbytes = take_frame(acceptor, dev.rxq_packet(rxq, first + i), attr.bytes, answer, now)
            if nbytes == HANDED_OVER:
                handed_over = True
            elif nbytes > 0:
                status = min(status, dev.txq_send_headers(txq, answer, nbytes, 0, 0, 0))
        if handed_over:
            _wake_lanes(acceptor)
        if received > 0:
            dev.rxq_give_back(rxq, first + received)
        look_at_ends(acceptor, now)
        note_turn(work, received, dev.clock_ns())
        status = min(status, received)
    dev.st64(work + WORK.status, min(status, 0))
