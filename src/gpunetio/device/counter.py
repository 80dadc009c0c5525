"""Counted operations: the NIC adds to a counter when an operation is complete, so no kernel polls for it.

The operation goes to the main queue. Its companion, a queue with `core_direct_master` (`Gpu.create_qp_group`), gets a
WAIT for the operation's completion and an atomic that adds to the counter. The NIC executes the atomic once the
completion exists. So the counter may be in the memory of any peer that the companion is connected to.

The WAIT counts completions in the main queue's CQ, so no other queue may use that CQ. Tickets are those of the main
queue.
"""

from __future__ import annotations

from ..formats.device_structs import VerbsCq, VerbsQp
from ..formats.wqe import MAX_TRANSFER
from ..jit.compile import device_function
from .cq import cq_of
from .modes import DEFAULT, GPU, THREAD
from .onesided import chunks, fill, fill_nops
from ..jit.ops import ld_fixed32, ld_fixed64
from .scope import ALONE, group_of, post_own, reserve_own
from .status import EINVAL
from .wqe import ATOMIC_FA, prepare_atomic, prepare_nop, prepare_wait, prepare_write_value

_WQES = 2  # on the companion, for each operation


@device_function
def _reserve_both(
    qp: VerbsQp, count: int, companion: VerbsQp, sharing: int, code_opt: int, scope: int, lanes: int
) -> tuple[int, int]:
    """Reserve slots in both queues. Return the first slot of each; the main queue's is a negative status on failure.

    After a failure, only NOPs are posted. The companion's slots are reserved first: a thread that already held slots of
    the main queue might wait for room in the companion behind operations that cannot start before its own.
    """
    beside = reserve_own(companion, _WQES, sharing, code_opt, scope, lanes)
    if beside < 0:
        return beside, beside
    first = reserve_own(qp, count, sharing, code_opt, scope, lanes)
    if first < 0:
        fill_nops(companion, beside, _WQES)
        post_own(companion, beside, _WQES, sharing, code_opt, scope, lanes)
    return first, beside


@device_function
def _post_counted(
    qp: VerbsQp, first: int, count: int, companion: VerbsQp, beside: int, counter_raddr: int, counter_rkey: int,
    counter_laddr: int, counter_lkey: int, counter_value: int, valid: int, sharing: int, code_opt: int, scope: int,
    lanes: int,
) -> int:
    """Post the filled slots, then the companion's WQEs. Return the ticket, or a negative status."""
    if valid:
        cq = cq_of(qp)
        position = first + count - 1 + ld_fixed64(cq + VerbsCq.cqe_rsvd)
        prepare_wait(companion, beside, position, ld_fixed32(cq + VerbsCq.cq_num))
        prepare_atomic(
            companion, beside + 1, ATOMIC_FA, counter_raddr, counter_rkey, counter_laddr, counter_lkey, 0,
            counter_value,
        )
    else:
        fill_nops(companion, beside, _WQES)
    ticket = post_own(qp, first, count, sharing, code_opt, scope, lanes)
    counted = post_own(companion, beside, _WQES, sharing, code_opt, scope, lanes)
    if not valid:
        return EINVAL
    return ticket if counted >= 0 or ticket < 0 else counted


@device_function
def _transfer_counter(
    reading: int, qp: VerbsQp, raddr: int, rkey: int, laddr: int, lkey: int, nbytes: int, companion: VerbsQp,
    counter_raddr: int, counter_rkey: int, counter_laddr: int, counter_lkey: int, counter_value: int, sharing: int,
    code_opt: int, scope: int,
) -> int:
    valid = nbytes >= 0 and (scope == THREAD or nbytes <= MAX_TRANSFER)
    if scope == THREAD and not valid:
        return EINVAL
    count = chunks(nbytes) if scope == THREAD else 1
    lanes = group_of(qp, companion, sharing, code_opt, scope) if count == 1 else ALONE
    first, beside = _reserve_both(qp, count, companion, sharing, code_opt, scope, lanes)
    if first < 0:
        return first
    fill(reading, qp, first, raddr, rkey, laddr, lkey, nbytes if valid else 0)
    return _post_counted(
        qp, first, count, companion, beside, counter_raddr, counter_rkey, counter_laddr, counter_lkey, counter_value,
        valid, sharing, code_opt, scope, lanes,
    )


@device_function
def put_counter(
    qp: VerbsQp, raddr: int, rkey: int, laddr: int, lkey: int, nbytes: int, companion: VerbsQp, counter_raddr: int,
    counter_rkey: int, counter_laddr: int, counter_lkey: int, counter_value: int, sharing: int = GPU,
    code_opt: int = DEFAULT, scope: int = THREAD,
) -> int:
    """Post a `put`. When it is complete, the NIC adds `counter_value` at `counter_raddr`
    (`doca_gpu_dev_verbs_put_counter`)."""
    return _transfer_counter(
        0, qp, raddr, rkey, laddr, lkey, nbytes, companion, counter_raddr, counter_rkey, counter_laddr, counter_lkey,
        counter_value, sharing, code_opt, scope,
    )


@device_function
def get_counter(
    qp: VerbsQp, raddr: int, rkey: int, laddr: int, lkey: int, nbytes: int, companion: VerbsQp, counter_raddr: int,
    counter_rkey: int, counter_laddr: int, counter_lkey: int, counter_value: int, sharing: int = GPU,
    code_opt: int = DEFAULT, scope: int = THREAD,
) -> int:
    """Post a `get`. When it is complete, the NIC adds `counter_value` at `counter_raddr`
    (`doca_gpu_dev_verbs_get_counter`)."""
    return _transfer_counter(
        1, qp, raddr, rkey, laddr, lkey, nbytes, companion, counter_raddr, counter_rkey, counter_laddr, counter_lkey,
        counter_value, sharing, code_opt, scope,
    )


@device_function
def p_counter(
    qp: VerbsQp, raddr: int, rkey: int, value: int, nbytes: int, companion: VerbsQp, counter_raddr: int,
    counter_rkey: int, counter_laddr: int, counter_lkey: int, counter_value: int, sharing: int = GPU,
    code_opt: int = DEFAULT, scope: int = THREAD,
) -> int:
    """Post a `p`. When it is complete, the NIC adds `counter_value` at `counter_raddr`
    (`doca_gpu_dev_verbs_p_counter`)."""
    valid = 1 <= nbytes <= 8
    if scope == THREAD and not valid:
        return EINVAL
    lanes = group_of(qp, companion, sharing, code_opt, scope)
    first, beside = _reserve_both(qp, 1, companion, sharing, code_opt, scope, lanes)
    if first < 0:
        return first
    if valid:
        prepare_write_value(qp, first, raddr, rkey, value, nbytes)
    else:
        prepare_nop(qp, first)
    return _post_counted(
        qp, first, 1, companion, beside, counter_raddr, counter_rkey, counter_laddr, counter_lkey, counter_value, valid,
        sharing, code_opt, scope, lanes,
    )


@device_function
def signal_counter(
    qp: VerbsQp, sig_raddr: int, sig_rkey: int, sig_laddr: int, sig_lkey: int, sig_value: int, companion: VerbsQp,
    counter_raddr: int, counter_rkey: int, counter_laddr: int, counter_lkey: int, counter_value: int,
    sharing: int = GPU, code_opt: int = DEFAULT, scope: int = THREAD,
) -> int:
    """Post a `signal`. When it is complete, the NIC adds `counter_value` at `counter_raddr`
    (`doca_gpu_dev_verbs_signal_counter`)."""
    lanes = group_of(qp, companion, sharing, code_opt, scope)
    first, beside = _reserve_both(qp, 1, companion, sharing, code_opt, scope, lanes)
    if first < 0:
        return first
    prepare_atomic(qp, first, ATOMIC_FA, sig_raddr, sig_rkey, sig_laddr, sig_lkey, 0, sig_value)
    return _post_counted(
        qp, first, 1, companion, beside, counter_raddr, counter_rkey, counter_laddr, counter_lkey, counter_value, True,
        sharing, code_opt, scope, lanes,
    )


@device_function
def put_signal_counter(
    qp: VerbsQp, raddr: int, rkey: int, laddr: int, lkey: int, nbytes: int, sig_raddr: int, sig_rkey: int,
    sig_laddr: int, sig_lkey: int, sig_value: int, companion: VerbsQp, counter_raddr: int, counter_rkey: int,
    counter_laddr: int, counter_lkey: int, counter_value: int, sharing: int = GPU, code_opt: int = DEFAULT,
    scope: int = THREAD,
) -> int:
    """Post a `put_signal`. When it is complete, the NIC adds `counter_value` at `counter_raddr`
    (`doca_gpu_dev_verbs_put_signal_counter`)."""
    valid = nbytes >= 0 and (scope == THREAD or nbytes <= MAX_TRANSFER)
    if scope == THREAD and not valid:
        return EINVAL
    writes = chunks(nbytes) if scope == THREAD else 1
    lanes = group_of(qp, companion, sharing, code_opt, scope) if writes == 1 else ALONE
    first, beside = _reserve_both(qp, writes + 1, companion, sharing, code_opt, scope, lanes)
    if first < 0:
        return first
    if valid:
        fill(0, qp, first, raddr, rkey, laddr, lkey, nbytes)
        prepare_atomic(qp, first + writes, ATOMIC_FA, sig_raddr, sig_rkey, sig_laddr, sig_lkey, 0, sig_value)
    else:
        fill_nops(qp, first, writes + 1)
    return _post_counted(
        qp, first, writes + 1, companion, beside, counter_raddr, counter_rkey, counter_laddr, counter_lkey,
        counter_value, valid, sharing, code_opt, scope, lanes,
    )
