"""Refusals: each function leaves the values that the error record shows, and returns the reason (reasons.py)."""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from .reasons import Reason
from .worker import worker_at


@device_function
def _because(nic, reason, key, addr, nbytes, extra0, extra1):
    n = worker_at(nic)
    n.why_key, n.why_addr, n.why_nbytes, n.why_extra0, n.why_extra1 = key, addr, nbytes, extra0, extra1
    return reason


# --- the requester: work queue elements ------------------------------------------------------------------------------


@engine_function
def stale_wqe(nic, index, qpn):
    """Refuse a WQE whose slot holds WQE `index` of `qpn` instead."""
    return _because(nic, Reason.WQE_STALE, 0, 0, 0, index, qpn)


@engine_function
def wqe_of_other_qp(nic, qpn):
    """Refuse a WQE that names another queue pair."""
    return _because(nic, Reason.WQE_QPN, 0, 0, 0, qpn, 0)


@engine_function
def malformed_wqe(nic, ds):
    """Refuse a WQE whose number of segments does not fit it."""
    return _because(nic, Reason.WQE_MALFORMED, 0, 0, 0, ds, 0)


@engine_function
def unsupported_operation(nic):
    """Refuse an opcode that this NIC or the type of the queue pair does not have."""
    return _because(nic, Reason.WQE_OPCODE, 0, 0, 0, 0, 0)


@engine_function
def unknown_opmod(nic, opmod):
    """Refuse a masked atomic of another size than 4 or 8 bytes."""
    return _because(nic, Reason.WQE_OPMOD, 0, 0, 0, opmod, 0)


@engine_function
def too_long_to_send(nic, nbytes, most):
    """Refuse to send a message of more bytes than the queue pair sends."""
    return _because(nic, Reason.LENGTH, 0, 0, nbytes, most, 0)


@engine_function
def atomic_length(nic, nbytes, word):
    """Refuse an atomic whose local memory is not as long as its word."""
    return _because(nic, Reason.ATOMIC_LENGTH, 0, 0, nbytes, word, 0)


@engine_function
def doorbell_range(nic, depth, producer, consumer):
    """Refuse a producer index that is not in the ring."""
    return _because(nic, Reason.DOORBELL_RANGE, 0, 0, depth, producer, consumer)


@engine_function
def not_sending(nic, state):
    """Refuse a doorbell of a queue pair in a state that does not send."""
    return _because(nic, Reason.QP_STATE, 0, 0, 0, state, 0)


@engine_function
def flushed(nic):
    """Refuse what is posted to a queue pair in ERR."""
    return _because(nic, Reason.FLUSH, 0, 0, 0, 0, 0)


# --- send queues of Ethernet packets ---------------------------------------------------------------------------------


@engine_function
def frame_length(nic, nbytes, least, most):
    """Refuse to send a frame that is shorter or longer than the port sends them."""
    return _because(nic, Reason.FRAME_LENGTH, 0, 0, nbytes, least, most)


@engine_function
def inline_headers(nic, inline, needed):
    """Refuse a WQE that does not contain the headers that the SQ's min_wqe_inline_mode asks for."""
    return _because(nic, Reason.INLINE_HEADERS, 0, 0, 0, inline, needed)


@engine_function
def checksum_flags(nic, flags):
    """Refuse a WQE that asks for the checksums of inner headers."""
    return _because(nic, Reason.CHECKSUM_FLAGS, 0, 0, 0, flags, 0)


@engine_function
def wait_mode(nic, opmod, operation):
    """Refuse a WAIT for something that the queue cannot wait for."""
    return _because(nic, Reason.WAIT_MODE, 0, 0, 0, opmod, operation)


@engine_function
def failed_wait(nic, cqn, index):
    """Refuse a WAIT for a CQ that has an error CQE instead, or that has overrun, at `index`."""
    return _because(nic, Reason.WAIT_FAILED, 0, 0, 0, cqn, index)


@engine_function
def wait_too_far(nic, left):
    """Refuse a WAIT for a time that is so far ahead."""
    return _because(nic, Reason.WAIT_TOO_FAR, 0, 0, 0, left, 0)


@engine_function
def segmentation_headers(nic, mss, inline):
    """Refuse to cut a packet whose headers cannot be repeated."""
    return _because(nic, Reason.TSO_HEADERS, 0, 0, 0, mss, inline)


# --- memory ----------------------------------------------------------------------------------------------------------
#
# `side` is Reason.LKEY_UNKNOWN or Reason.RKEY_UNKNOWN. The reasons after both are in the order of these functions.


@engine_function
def unknown_key(nic, side, key, addr, nbytes):
    """Refuse a key that no memory region has."""
    return _because(nic, side, key, addr, nbytes, 0, 0)


@engine_function
def key_of_other_pd(nic, side, key, addr, nbytes, pdn, own_pdn):
    """Refuse a key of another protection domain."""
    return _because(nic, side + 1, key, addr, nbytes, pdn, own_pdn)


@engine_function
def key_rights(nic, side, key, addr, nbytes, granted, needed):
    """Refuse an access that the memory region does not grant."""
    return _because(nic, side + 2, key, addr, nbytes, granted, needed)


@engine_function
def key_bounds(nic, side, key, addr, nbytes, start, length):
    """Refuse a range that is not inside the memory region."""
    return _because(nic, side + 3, key, addr, nbytes, start, length)


@engine_function
def copy_failed(nic, addr, nbytes, error, timeout_ns):
    """Refuse a request whose bytes CUDA did not copy."""
    return _because(nic, Reason.COPY_FAILED, 0, addr, nbytes, error, timeout_ns)


# --- the responder: requests (IBTA 9.7.4.1) --------------------------------------------------------------------------


@engine_function
def bad_request(nic, nbytes, kind, done):
    """Refuse a packet that does not fit its message, `done` bytes of which have been taken."""
    return _because(nic, Reason.BAD_REQUEST, 0, 0, nbytes, kind, done)


@engine_function
def message_too_long(nic, nbytes, most):
    """Refuse a message of more bytes than the queue pair receives."""
    return _because(nic, Reason.MESSAGE_TOO_LONG, 0, 0, nbytes, most, 0)


@engine_function
def remote_access(nic, key, addr, nbytes, granted, needed):
    """Refuse a request for which the queue pair grants no right."""
    return _because(nic, Reason.QP_RIGHTS, key, addr, nbytes, granted, needed)


@engine_function
def misaligned_atomic(nic, key, addr, nbytes):
    """Refuse an atomic whose word is not aligned to its size."""
    return _because(nic, Reason.ATOMIC_ALIGNMENT, key, addr, nbytes, 0, 0)


@engine_function
def device_atomic(nic, key, addr, nbytes):
    """Refuse an atomic whose word is in the memory of a GPU."""
    return _because(nic, Reason.ATOMIC_FAR, key, addr, nbytes, 0, 0)


@engine_function
def receive_too_small(nic, nbytes, room):
    """Refuse a message that is longer than the receive."""
    return _because(nic, Reason.RECV_TOO_SMALL, 0, 0, nbytes, room, 0)


@engine_function
def full_cq(nic, cqn, entries):
    """Refuse a completion for which the completion queue has no room."""
    return _because(nic, Reason.CQ_OVERRUN, 0, 0, 0, cqn, entries)


# --- the requester: answers (IBTA 9.7.5) -----------------------------------------------------------------------------


@engine_function
def receiver_not_ready(nic, retries):
    """Give up a request for which the peer had no receive through all retries."""
    return _because(nic, Reason.RNR, 0, 0, 0, retries, 0)


@engine_function
def no_response(nic, remote_qpn, retries):
    """Give up a request that the peer did not answer through all retries."""
    return _because(nic, Reason.NO_RESPONSE, 0, 0, 0, remote_qpn, retries)


@engine_function
def negative_acknowledgement(nic, reason, remote_qpn, code):
    """Give up a request that the peer has refused with a NAK of this code."""
    return _because(nic, reason, 0, 0, 0, remote_qpn, code)


@engine_function
def bad_response(nic, remote_qpn, nbytes):
    """Refuse a response that is not what the request asked for."""
    return _because(nic, Reason.BAD_RESPONSE, 0, 0, 0, remote_qpn, nbytes)
