"""Read CQEs in the CPU data path."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...enums import WcFlags, WcOpcode, WcStatus
from ...formats.cqe import CQE64, FORMAT_MASK, GRH_SHIFT, OPCODE_SHIFT, SL_SHIFT, CqeOpcode
from ..syndromes import MEANINGS
from ..work import Completion, Sender

if TYPE_CHECKING:
    from .queues import RingPosting

QPN_MASK = 0xFF_FFFF
_STATUS = {int(syndrome): meaning.status for syndrome, meaning in MEANINGS.items()}  # plain ints, as in OF_SENDS
OF_SENDS = (int(CqeOpcode.REQ), int(CqeOpcode.REQ_ERR))  # plain ints: an IntEnum is slower to compare
_FAILED = (int(CqeOpcode.REQ_ERR), int(CqeOpcode.RESP_ERR))
_WITH_IMM = (int(CqeOpcode.RESP_WR_IMM), int(CqeOpcode.RESP_SEND_IMM))
_RECEIVED = {int(CqeOpcode.RESP_WR_IMM): WcOpcode.RECV_RDMA_WITH_IMM}
_SUCCESS, _RECV, _NO_FLAGS = WcStatus.SUCCESS, WcOpcode.RECV, WcFlags(0)


# Fields of CQE64 and ERR_CQE64: payload, imm, byte_cnt, timestamp, WQE opcode and QPN, wqe_counter, op_own. In an error
# CQE, vendor_err_synd and syndrome are the end of the timestamp. The format bits say whether there is a payload.
_SENDER = struct.Struct(">HI")  # of CQE64: slid, flags_rqpn
_CQE = struct.Struct(">32s4xI4xIQIHxB")


def _name_sender(done: Completion, head: bytes, infiniband: bool) -> None:
    """Add the sender to a received datagram's completion, from the first 32 bytes of its CQE."""
    slid, flags = _SENDER.unpack_from(head, CQE64.slid)
    if flags >> GRH_SHIFT & 3:
        done.flags |= WcFlags.GRH
    done.sender = Sender(flags & QPN_MASK, *((slid, flags >> SL_SHIFT & 0xF) if infiniband else ()))


def completions(cqes: bytes, queues: Mapping[int, RingPosting]) -> list[Completion]:
    """Return the completions of these CQEs, and complete their requests.

    `queues` maps QPNs to the queue pairs that complete here. CQEs of other queues are skipped. This is one loop with
    few calls, because it limits the message rate.
    """
    found = []
    last, posting = -1, None
    for payload, imm, nbytes, timestamp, opcode_qpn, counter, op_own in _CQE.iter_unpack(cqes):
        qpn, kind = opcode_qpn & QPN_MASK, op_own >> OPCODE_SHIFT
        if qpn != last:
            last, posting = qpn, queues.get(qpn)
        if posting is None:
            continue
        if kind in OF_SENDS:
            wr_id, opcode, reads = posting.send.complete(counter)
            done = Completion(wr_id, _SUCCESS, opcode, nbytes if reads else 0, None, qpn, 0, _NO_FLAGS, timestamp)
        else:
            status = posting.deliver(counter, payload[:nbytes]) if op_own & FORMAT_MASK else _SUCCESS
            wr_id = posting.complete_receive(counter)
            opcode = _RECEIVED.get(kind, _RECV)
            done = Completion(wr_id, status, opcode, nbytes, None, qpn, 0, _NO_FLAGS, timestamp)
            if kind in _WITH_IMM:
                done.imm, done.flags = imm, WcFlags.WITH_IMM
            if posting.datagrams:
                _name_sender(done, payload, posting.infiniband)
        if kind in _FAILED:
            done.status, done.byte_len = _STATUS.get(timestamp & 0xFF, WcStatus.GENERAL_ERR), 0
            done.vendor_err, done.timestamp = timestamp >> 8 & 0xFF, None
        found.append(done)
    return found
