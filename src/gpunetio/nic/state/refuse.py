"""Refusals: each function leaves the values that the error record shows, and returns the reason (reasons.py)."""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from .reasons import Reason
from .worker import WorkerState


@device_function
def _because(worker: WorkerState, reason: int, key: int, addr: int, nbytes: int, extra0: int, extra1: int) -> int:
    worker.why_key, worker.why_addr, worker.why_nbytes = key, addr, nbytes
    worker.why_extra0, worker.why_extra1 = extra0, extra1
    return reason


# --- the requester: work queue elements ------------------------------------------------------------------------------


@engine_function
def stale_wqe(worker: WorkerState, index: int, qpn: int) -> int:
    """Refuse a WQE whose slot holds WQE `index` of `qpn` instead."""
    return _because(worker, Reason.WQE_STALE, 0, 0, 0, index, qpn)


@engine_function
def wqe_of_other_qp(worker: WorkerState, qpn: int) -> int:
    """Refuse a WQE that names another queue pair."""
    return _because(worker, Reason.WQE_QPN, 0, 0, 0, qpn, 0)


@engine_function
def malformed_wqe(worker: WorkerState, ds: int) -> int:
    """Refuse a WQE whose number of segments does not fit it."""
    return _because(worker, Reason.WQE_MALFORMED, 0, 0, 0, ds, 0)


@engine_function
def unsupported_operation(worker: WorkerState) -> int:
    """Refuse an opcode that this NIC or the type of the queue pair does not have."""
    return _because(worker, Reason.WQE_OPCODE, 0, 0, 0, 0, 0)


@engine_function
def unknown_opmod(worker: WorkerState, opmod: int) -> int:
    """Refuse a masked atomic of another size than 4 or 8 bytes."""
    return _because(worker, Reason.WQE_OPMOD, 0, 0, 0, opmod, 0)


@engine_function
def too_long_to_send(worker: WorkerState, nbytes: int, most: int) -> int:
    """Refuse to send a message of more bytes than the queue pair sends."""
    return _because(worker, Reason.LENGTH, 0, 0, nbytes, most, 0)


@engine_function
def atomic_length(worker: WorkerState, nbytes: int, word: int) -> int:
    """Refuse an atomic whose local memory is not as long as its word."""
    return _because(worker, Reason.ATOMIC_LENGTH, 0, 0, nbytes, word, 0)


@engine_function
def doorbell_range(worker: WorkerState, depth: int, producer: int, consumer: int) -> int:
    """Refuse a producer index that is not in the ring."""
    return _because(worker, Reason.DOORBELL_RANGE, 0, 0, depth, producer, consumer)


@engine_function
def not_sending(worker: WorkerState, state: int) -> int:
    """Refuse a doorbell of a queue pair in a state that does not send."""
    return _because(worker, Reason.QP_STATE, 0, 0, 0, state, 0)


@engine_function
def flushed(worker: WorkerState) -> int:
    """Refuse what is posted to a queue pair in ERR."""
    return _because(worker, Reason.FLUSH, 0, 0, 0, 0, 0)


# --- send queues of Ethernet packets ---------------------------------------------------------------------------------


@engine_function
def frame_length(worker: WorkerState, nbytes: int, least: int, most: int) -> int:
    """Refuse to send a frame that is shorter or longer than the port sends them."""
    return _because(worker, Reason.FRAME_LENGTH, 0, 0, nbytes, least, most)


@engine_function
def inline_headers(worker: WorkerState, inline: int, needed: int) -> int:
    """Refuse a WQE that does not contain the headers that the SQ's min_wqe_inline_mode asks for."""
    return _because(worker, Reason.INLINE_HEADERS, 0, 0, 0, inline, needed)


@engine_function
def checksum_flags(worker: WorkerState, flags: int) -> int:
    """Refuse a WQE that asks for the checksums of inner headers."""
    return _because(worker, Reason.CHECKSUM_FLAGS, 0, 0, 0, flags, 0)


@engine_function
def wait_mode(worker: WorkerState, opmod: int, operation: int) -> int:
    """Refuse a WAIT for something that the queue cannot wait for."""
    return _because(worker, Reason.WAIT_MODE, 0, 0, 0, opmod, operation)


@engine_function
def failed_wait(worker: WorkerState, cqn: int, index: int) -> int:
    """Refuse a WAIT for a CQ that has an error CQE instead, or that has overrun, at `index`."""
    return _because(worker, Reason.WAIT_FAILED, 0, 0, 0, cqn, index)


@engine_function
def wait_too_far(worker: WorkerState, left: int) -> int:
    """Refuse a WAIT for a time that is so far ahead."""
    return _because(worker, Reason.WAIT_TOO_FAR, 0, 0, 0, left, 0)


@engine_function
def segmentation_headers(worker: WorkerState, mss: int, inline: int) -> int:
    """Refuse to cut a packet whose headers cannot be repeated."""
    return _because(worker, Reason.TSO_HEADERS, 0, 0, 0, mss, inline)


# --- memory ----------------------------------------------------------------------------------------------------------
#
# `side` is Reason.LKEY_UNKNOWN or Reason.RKEY_UNKNOWN. The reasons after both are in the order of these functions.


@engine_function
def unknown_key(worker: WorkerState, side: int, key: int, addr: int, nbytes: int) -> int:
    """Refuse a key that no memory region has."""
    return _because(worker, side, key, addr, nbytes, 0, 0)


@engine_function
def key_of_other_pd(worker: WorkerState, side: int, key: int, addr: int, nbytes: int, pdn: int, own_pdn: int) -> int:
    """Refuse a key of another protection domain."""
    return _because(worker, side + 1, key, addr, nbytes, pdn, own_pdn)


@engine_function
def key_rights(worker: WorkerState, side: int, key: int, addr: int, nbytes: int, granted: int, needed: int) -> int:
    """Refuse an access that the memory region does not grant."""
    return _because(worker, side + 2, key, addr, nbytes, granted, needed)


@engine_function
def key_bounds(worker: WorkerState, side: int, key: int, addr: int, nbytes: int, start: int, length: int) -> int:
    """Refuse a range that is not inside the memory region."""
    return _because(worker, side + 3, key, addr, nbytes, start, length)


@engine_function
def copy_failed(worker: WorkerState, addr: int, nbytes: int, error: int, timeout_ns: int) -> int:
    """Refuse a request whose bytes CUDA did not copy."""
    return _because(worker, Reason.COPY_FAILED, 0, addr, nbytes, error, timeout_ns)


# --- the responder: requests (IBTA 9.7.4.1) --------------------------------------------------------------------------


@engine_function
def bad_request(worker: WorkerState, nbytes: int, kind: int, done: int) -> int:
    """Refuse a packet that does not fit its message, `done` bytes of which have been taken."""
    return _because(worker, Reason.BAD_REQUEST, 0, 0, nbytes, kind, done)


@engine_function
def message_too_long(worker: WorkerState, nbytes: int, most: int) -> int:
    """Refuse a message of more bytes than the queue pair receives."""
    return _because(worker, Reason.MESSAGE_TOO_LONG, 0, 0, nbytes, most, 0)


@engine_function
def remote_access(worker: WorkerState, key: int, addr: int, nbytes: int, granted: int, needed: int) -> int:
    """Refuse a request for which the queue pair grants no right."""
    return _because(worker, Reason.QP_RIGHTS, key, addr, nbytes, granted, needed)


@engine_function
def misaligned_atomic(worker: WorkerState, key: int, addr: int, nbytes: int) -> int:
    """Refuse an atomic whose word is not aligned to its size."""
    return _because(worker, Reason.ATOMIC_ALIGNMENT, key, addr, nbytes, 0, 0)


@engine_function
def device_atomic(worker: WorkerState, key: int, addr: int, nbytes: int) -> int:
    """Refuse an atomic whose word is in the memory of a GPU."""
    return _because(worker, Reason.ATOMIC_FAR, key, addr, nbytes, 0, 0)


@engine_function
def receive_too_small(worker: WorkerState, nbytes: int, room: int) -> int:
    """Refuse a message that is longer than the receive."""
    return _because(worker, Reason.RECV_TOO_SMALL, 0, 0, nbytes, room, 0)


@engine_function
def full_cq(worker: WorkerState, cqn: int, entries: int) -> int:
    """Refuse a completion for which the completion queue has no room."""
    return _because(worker, Reason.CQ_OVERRUN, 0, 0, 0, cqn, entries)


# --- the requester: answers (IBTA 9.7.5) -----------------------------------------------------------------------------


@engine_function
def receiver_not_ready(worker: WorkerState, retries: int) -> int:
    """Give up a request for which the peer had no receive through all retries."""
    return _because(worker, Reason.RNR, 0, 0, 0, retries, 0)


@engine_function
def no_response(worker: WorkerState, remote_qpn: int, retries: int) -> int:
    """Give up a request that the peer did not answer through all retries."""
    return _because(worker, Reason.NO_RESPONSE, 0, 0, 0, remote_qpn, retries)


@engine_function
def negative_acknowledgement(worker: WorkerState, reason: int, remote_qpn: int, code: int) -> int:
    """Give up a request that the peer has refused with a NAK of this code."""
    return _because(worker, reason, 0, 0, 0, remote_qpn, code)


@engine_function
def bad_response(worker: WorkerState, remote_qpn: int, nbytes: int) -> int:
    """Refuse a response that is not what the request asked for."""
    return _because(worker, Reason.BAD_RESPONSE, 0, 0, 0, remote_qpn, nbytes)
