"""Submit: tell the NIC, through the handler of the queue, that it may execute all slots below an index.

| handler       | what is written                                                                        |
|---------------|----------------------------------------------------------------------------------------|
| GPU_SM_DB     | doorbell register, doorbell record, register again                                     |
| GPU_SM_BF     | the same; `submit_bf` first writes the last WQE to the register                        |
| GPU_SM_NO_DBR | doorbell register                                                                      |
| CPU_PROXY     | the producer index, to a word in memory; a CPU thread polls it and rings               |

For latency, the register is rung before the record is written. It is rung again afterwards, because a NIC that missed
the first ring looks at the record.

A software NIC that runs on the kernels' GPU (`is_near`) misses no ring. For it, the record is written first, the
register is rung once, and all fences have GPU scope.

On a shared queue, one thread at a time rings. The others leave their index in a word, which the ringing thread checks
again before it stops. So no thread waits for another thread's doorbell, and under contention one doorbell announces the
slots of many threads. The word is 2p − 1 while p is wanted or is being announced, and 2p once everything below p is
announced.
"""

from __future__ import annotations

from ..formats.device_structs import VerbsQp, VerbsSide
from ..formats.doorbell import PI_MASK, WQE_IDX_SHIFT
from ..jit.compile import device_function
from .cq import load_index
from .modes import (
    ASYNC_STORE_RELEASE, CPU_PROXY, CTA, DEFAULT, EXCLUSIVE, GPU, GPU_SM_BF, GPU_SM_DB, GPU_SM_NO_DBR,
    SKIP_DB_RINGING, SYNC_CTA, SYNC_GPU, SYNC_SYS, SYNC_THREAD,
)
from ..jit.ops import (
    be32, cas_acq_rel_gpu64, copy_to_register, fence_gpu, fence_release_cta, fence_release_gpu, fence_release_sys,
    fence_sys, fetch_max_gpu64, has_bulk_copy, lane_id, ld64, ld_fixed32, ld_fixed64, pack64, st64, st_mmio64,
    st_mmio_release64, st_relaxed32, st_relaxed64, st_relaxed_gpu64, warp_broadcast, warp_size, warp_sync,
)
from .qp import READY, RSVD, hand_on, mark_ready
from .status import OK

PI = VerbsQp.sq_wqe_pi
_REGISTER_WORDS = 8  # of 64 bits, in a BlueFlame register
_COVERED = -1
_BF = GPU_SM_BF & ~GPU_SM_DB  # the flag of this handler


@device_function
def fence_release(sync: int = SYNC_SYS) -> None:
    """Order earlier accesses before later stores, within a scope (`doca_gpu_dev_verbs_fence_release`).

    Before a doorbell, use SYNC_SYS: the queue and the payload may be in host memory, and a GPU-scope fence does not
    wait until stores arrive there. The C function's default, SYNC_GPU, is for queues in GPU memory.
    """
    if sync == SYNC_SYS:
        fence_release_sys()
    elif sync == SYNC_GPU:
        fence_release_gpu()
    elif sync == SYNC_CTA:
        fence_release_cta()


@device_function
def is_near(qp: VerbsQp) -> bool:
    """Return whether the NIC runs on this GPU. Fences of GPU scope are then enough, wherever the memory is."""
    return ld_fixed64(ld_fixed64(qp + VerbsQp.side) + VerbsSide.near) != 0


@device_function
def _fence_for_nic(qp: VerbsQp) -> None:
    """Order all accesses before later ones, for the NIC."""
    if is_near(qp):
        fence_gpu()
    else:
        fence_sys()


@device_function
def update_dbr(qp: VerbsQp, producer: int) -> None:
    """Write the doorbell record (`doca_gpu_dev_verbs_update_dbr`, without its fence)."""
    st_relaxed32(ld_fixed64(qp + VerbsQp.sq_dbrec), be32(producer & PI_MASK))


@device_function
def _doorbell(qp: VerbsQp, producer: int) -> int:
    """Return the eight bytes that announce an index."""
    return pack64(be32((producer & PI_MASK) << WQE_IDX_SHIFT), ld_fixed32(qp + VerbsQp.sq_num_shift8_be))


@device_function
def ring_db(qp: VerbsQp, producer: int, sync: int = SYNC_SYS, code_opt: int = DEFAULT) -> None:
    """Ring the doorbell register after a release fence of scope `sync` (`doca_gpu_dev_verbs_ring_db`).

    With ASYNC_STORE_RELEASE, the store is its own fence from sm_100 on. Elsewhere this fences and stores.
    """
    value = _doorbell(qp, producer)
    if code_opt & ASYNC_STORE_RELEASE:
        st_mmio_release64(ld_fixed64(qp + VerbsQp.sq_db), value)
    else:
        fence_release(sync)
        st_mmio64(ld_fixed64(qp + VerbsQp.sq_db), value)


@device_function
def _ring_near(qp: VerbsQp, producer: int, handler: int, sync: int) -> None:
    """Ring the register of a NIC that runs on this GPU. It misses no ring, so the record is written first."""
    if handler != GPU_SM_NO_DBR:
        update_dbr(qp, producer)
    if sync != SYNC_THREAD:
        fence_release_gpu()
    st_relaxed_gpu64(ld_fixed64(qp + VerbsQp.sq_db), _doorbell(qp, producer))


@device_function
def ring_proxy(qp: VerbsQp, producer: int, sync: int = SYNC_SYS) -> None:
    """Store the index for the CPU proxy after a release fence of scope `sync` (`doca_gpu_dev_verbs_ring_proxy`)."""
    fence_release(sync)
    st_relaxed64(ld_fixed64(qp + VerbsQp.sq_db), producer)


@device_function
def _record_and_ring(qp: VerbsQp, producer: int, code_opt: int) -> None:
    if code_opt & ASYNC_STORE_RELEASE:
        fence_release()  # a doorbell that was its own fence orders no later stores
    update_dbr(qp, producer)
    ring_db(qp, producer, SYNC_GPU, code_opt)  # orders only the record: the NIC knows the index already


@device_function
def _announce(qp: VerbsQp, producer: int, sync: int, code_opt: int) -> None:
    handler = ld_fixed32(qp + VerbsQp.nic_handler)
    if handler == CPU_PROXY:
        ring_proxy(qp, producer, sync)
    elif is_near(qp):
        _ring_near(qp, producer, handler, sync)
    else:
        ring_db(qp, producer, sync, code_opt)
        if handler != GPU_SM_NO_DBR:
            _record_and_ring(qp, producer, code_opt)


@device_function
def _let_it_ring(qp: VerbsQp) -> None:
    """Wait until a doorbell without a record is on its way: 0.2 µs on an H200, 0.4 µs with a proxy.

    Usually a poll for the completion follows. A poll of host memory takes 1.2 µs, and a poll that comes before the NIC
    has answered costs as much again. Queues with a record and shared queues already have such a fence.
    """
    handler = ld_fixed32(qp + VerbsQp.nic_handler)
    if handler == CPU_PROXY:
        fence_release_sys()
    elif handler == GPU_SM_NO_DBR:
        fence_release_gpu()


@device_function
def _word(qp: VerbsQp) -> int:
    return ld_fixed64(qp + VerbsQp.side) + VerbsSide.submit


@device_function
def _begin(qp: VerbsQp, producer: int, sharing: int) -> int:
    """Return the index to announce, or _COVERED if another thread has announced it or will announce it."""
    if sharing == EXCLUSIVE:
        return _COVERED if ld64(qp + PI) >= producer else producer
    if producer <= 0:
        return _COVERED  # nothing was posted; the word is compared as unsigned
    wanted = 2 * producer - 1
    word = fetch_max_gpu64(_word(qp), wanted)
    return _COVERED if word & 1 or word >= wanted else producer


@device_function
def _end(qp: VerbsQp, producer: int, sharing: int, code_opt: int) -> None:
    """Record what was announced, and announce what other threads have left in the meantime."""
    st_relaxed_gpu64(qp + PI, producer)
    if sharing == EXCLUSIVE:
        return
    found = cas_acq_rel_gpu64(_word(qp), 2 * producer - 1, 2 * producer)
    while found != 2 * producer - 1:
        producer = (found + 1) >> 1
        _announce(qp, producer, SYNC_SYS, code_opt)
        st_relaxed_gpu64(qp + PI, producer)
        found = cas_acq_rel_gpu64(_word(qp), 2 * producer - 1, 2 * producer)


@device_function
def submit(qp: VerbsQp, producer: int, sharing: int = GPU, sync: int = SYNC_SYS, code_opt: int = DEFAULT) -> int:
    """Tell the NIC that it may execute all slots below `producer` (`doca_gpu_dev_verbs_submit`).

    `sync` is the scope of the fence before the doorbell. With SKIP_DB_RINGING, do nothing: a later call also announces
    these slots.
    """
    if code_opt & SKIP_DB_RINGING:
        return OK
    target = _begin(qp, producer, sharing)
    if target != _COVERED:
        _announce(qp, target, sync, code_opt)
        _end(qp, target, sharing, code_opt)
    return OK


@device_function
def submit_bf(qp: VerbsQp, producer: int, wqe: int, sharing: int = GPU, code_opt: int = DEFAULT) -> int:
    """Submit, and write the last WQE to the BlueFlame register (`doca_gpu_dev_verbs_submit_bf`).

    `wqe` is the address of a copy of that WQE: 64 bytes in the block's shared memory (`block_slot`). The WQE must also
    be in the ring. The register needs all 64 bytes in one write, which a thread cannot do before sm_90. There, and on
    queues with another handler, this is `submit`.
    """
    if code_opt & SKIP_DB_RINGING:
        return OK
    if has_bulk_copy() == 0 or ld_fixed32(qp + VerbsQp.nic_handler) & _BF == 0:
        return submit(qp, producer, sharing, SYNC_SYS, code_opt)
    target = _begin(qp, producer, sharing)
    if target != _COVERED:
        fence_release()
        copy_to_register(ld_fixed64(qp + VerbsQp.sq_db), wqe)
        _record_and_ring(qp, target, code_opt)
        _end(qp, target, sharing, code_opt)
    return OK


@device_function
def submit_bf_warp(qp: VerbsQp, producer: int, wqe: int, sharing: int = GPU, code_opt: int = DEFAULT) -> int:
    """Submit like `submit_bf`, but by a whole warp: the first eight lanes write 8 bytes each
    (`doca_gpu_dev_verbs_submit_bf_warp`).

    Lane 0 provides `producer` and `wqe`, which may be in any memory of the GPU.
    """
    if code_opt & SKIP_DB_RINGING:
        return OK
    target = _COVERED
    if lane_id() == 0:
        target = _begin(qp, producer, sharing)
    target = warp_broadcast(target, 0)
    if target == _COVERED:
        return OK
    if ld_fixed32(qp + VerbsQp.nic_handler) & _BF:
        wqe = warp_broadcast(wqe, 0)
        warp_sync()  # all lanes may now read what lane 0 has stored there
        register = ld_fixed64(qp + VerbsQp.sq_db)
        fence_release()
        for i in range(lane_id(), _REGISTER_WORDS, warp_size()):
            st_mmio64(register + 8 * i, ld64(wqe + 8 * i))
        warp_sync()
        if lane_id() == 0:
            _record_and_ring(qp, target, code_opt)
            _end(qp, target, sharing, code_opt)
    elif lane_id() == 0:
        _announce(qp, target, SYNC_SYS, code_opt)
        _end(qp, target, sharing, code_opt)
    return OK


@device_function
def submit_multi(
    qps: int, producers: int, count: int, sharing: int = GPU, sync: int = SYNC_SYS, code_opt: int = DEFAULT
) -> int:
    """Submit several queues (`doca_gpu_dev_verbs_submit_multi_qps`).

    `qps` and `producers` are addresses of `count` 64-bit words: the queues, and the index of each.
    """
    fence_release(sync)
    for i in range(count):
        submit(ld64(qps + 8 * i), ld64(producers + 8 * i), sharing, SYNC_THREAD, code_opt)
    return OK


@device_function
def announce_alone(qp: VerbsQp, producer: int, sync: int, code_opt: int) -> None:
    """Submit on a shared queue where no other thread can ring, and pass the turn to the next thread."""
    _announce(qp, producer, sync, code_opt)
    st_relaxed_gpu64(qp + PI, producer)
    st_relaxed_gpu64(_word(qp), 2 * producer)
    fence_release_gpu()
    st_relaxed_gpu64(qp + READY, producer)


@device_function
def _post_shared(qp: VerbsQp, first: int, last: int, sharing: int, code_opt: int) -> int:
    ready = load_index(qp + READY, GPU)
    word = load_index(_word(qp), GPU)
    reserved = load_index(qp + RSVD, GPU)
    _fence_for_nic(qp)
    if ready == first and word == 2 * first and reserved == last + 1:
        # It is our turn, everything before us is announced, and no thread has reserved slots after us.
        announce_alone(qp, last + 1, SYNC_THREAD, code_opt)
        return last
    status = hand_on(qp, qp + READY, ready, first, last + 1, sharing)
    if status == OK:
        # With CTA, the threads before us may have ordered their stores for the block only (`mark_ready`).
        status = submit(qp, last + 1, sharing, SYNC_SYS if sharing == CTA else SYNC_THREAD, code_opt)
    return last if status == OK else status


@device_function
def post(qp: VerbsQp, first: int, last: int, sharing: int = GPU, code_opt: int = DEFAULT) -> int:
    """Mark slots `first` to `last` ready and submit them. Return `last` as the ticket, or a negative status."""
    if code_opt & SKIP_DB_RINGING:
        status = mark_ready(qp, first, last, sharing)
        return last if status == OK else status
    if sharing != EXCLUSIVE:
        return _post_shared(qp, first, last, sharing, code_opt)
    # Nobody has submitted these slots yet, so the indices can wait until the doorbell has been rung.
    _announce(qp, last + 1, SYNC_SYS, code_opt)
    st64(qp + PI, last + 1)
    mark_ready(qp, first, last, sharing)
    _let_it_ring(qp)
    return last
