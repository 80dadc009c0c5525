"""One-sided operations in thread scope: each posts its WQEs, signalled, and returns a ticket for `wait`.

A ticket is the index of the last WQE posted. A negative result is a status (device/status.py), and `wait` hands a
negative ticket back, so that `wait(qp, put(…))` tells the whole story. Addresses and keys are in host byte order.
"""

from __future__ import annotations

from ..formats.wqe import MAX_TRANSFER, MAX_TRANSFER_SHIFT
from .compile import device_function
from .cq import load_index, poll_at
from .modes import DEFAULT, GPU
from .qp import (
    ATOMIC_FA, _RSVD, post, prepare_atomic, prepare_nop, prepare_read, prepare_write, prepare_write_value, reserve,
)  # fmt: skip
from .status import EINVAL, OK


@device_function
def _chunks(nbytes):
    """WQEs for a transfer: one per GiB, and one NOP for nothing."""
    return max(1, (nbytes + MAX_TRANSFER - 1) >> MAX_TRANSFER_SHIFT)


@device_function
def _fill(reading, qp, first, raddr, rkey, laddr, lkey, nbytes):
    """Fill the slots from `first` on with READs or WRITEs of the range, or with a NOP for an empty one."""
    if nbytes == 0:
        prepare_nop(qp, first)
    done = 0
    index = first
    while done < nbytes:
        part = min(nbytes - done, MAX_TRANSFER)
        if reading:
            prepare_read(qp, index, raddr + done, rkey, laddr + done, lkey, part)
        else:
            prepare_write(qp, index, raddr + done, rkey, laddr + done, lkey, part)
        done += part
        index += 1


@device_function
def _transfer(reading, qp, raddr, rkey, laddr, lkey, nbytes, sharing, code_opt):
    if nbytes < 0:
        return EINVAL
    count = _chunks(nbytes)
    first = reserve(qp, count, sharing, code_opt)
    if first < 0:
        return first
    _fill(reading, qp, first, raddr, rkey, laddr, lkey, nbytes)
    return post(qp, first, first + count - 1, sharing, code_opt)


@device_function
def put(qp, raddr, rkey, laddr, lkey, nbytes, sharing=GPU, code_opt=DEFAULT):
    """Write `nbytes` from `laddr` to `raddr`; 0 bytes post a NOP (`doca_gpu_dev_verbs_put`)."""
    return _transfer(0, qp, raddr, rkey, laddr, lkey, nbytes, sharing, code_opt)


@device_function
def get(qp, raddr, rkey, laddr, lkey, nbytes, sharing=GPU, code_opt=DEFAULT):
    """Read `nbytes` from `raddr` into `laddr`; 0 bytes post a NOP (`doca_gpu_dev_verbs_get`, as corrected in 2.0.2)."""
    return _transfer(1, qp, raddr, rkey, laddr, lkey, nbytes, sharing, code_opt)


@device_function
def p(qp, raddr, rkey, value, nbytes=8, sharing=GPU, code_opt=DEFAULT):
    """Write the low `nbytes` (1 to 8) of `value` to `raddr`, inline (`doca_gpu_dev_verbs_p`)."""
    if nbytes < 1 or nbytes > 8:
        return EINVAL
    index = reserve(qp, 1, sharing, code_opt)
    if index < 0:
        return index
    prepare_write_value(qp, index, raddr, rkey, value, nbytes)
    return post(qp, index, index, sharing, code_opt)


@device_function
def signal(qp, sig_raddr, sig_rkey, sig_laddr, sig_lkey, value, sharing=GPU, code_opt=DEFAULT):
    """Add `value` to the 64-bit word at `sig_raddr`; the old one lands at `sig_laddr` (`doca_gpu_dev_verbs_signal`)."""
    index = reserve(qp, 1, sharing, code_opt)
    if index < 0:
        return index
    prepare_atomic(qp, index, ATOMIC_FA, sig_raddr, sig_rkey, sig_laddr, sig_lkey, 0, value)
    return post(qp, index, index, sharing, code_opt)


@device_function
def put_signal(
    qp, raddr, rkey, laddr, lkey, nbytes, sig_raddr, sig_rkey, sig_laddr, sig_lkey, value, sharing=GPU, code_opt=DEFAULT
):
    """`put`, then `signal`, in this order at the target (`doca_gpu_dev_verbs_put_signal`)."""
    if nbytes < 0:
        return EINVAL
    count = _chunks(nbytes)
    first = reserve(qp, count + 1, sharing, code_opt)
    if first < 0:
        return first
    _fill(0, qp, first, raddr, rkey, laddr, lkey, nbytes)
    prepare_atomic(qp, first + count, ATOMIC_FA, sig_raddr, sig_rkey, sig_laddr, sig_lkey, 0, value)
    return post(qp, first, first + count, sharing, code_opt)


@device_function
def wait(qp, ticket, sharing=GPU):
    """Wait for a ticket and all before it: OK or a negative status (`doca_gpu_dev_verbs_wait`)."""
    if ticket < 0:
        return ticket
    return poll_at(qp, ticket, sharing)


@device_function
def wait_all(qp, sharing=GPU):
    """Wait for everything reserved so far, by any thread (`doca_gpu_dev_verbs_wait` without a ticket)."""
    reserved = load_index(qp + _RSVD, sharing)
    return OK if reserved == 0 else poll_at(qp, reserved - 1, sharing)
