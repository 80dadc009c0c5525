"""Kernels that announce posted WQEs in every possible way, in a separate file to be compiled seldom."""

from gpunetio import device, kernel

BY_SUBMIT, BY_FLAME, BY_WARP_FLAME, BY_HAND = range(4)


@kernel
def submit_each(qp, raddr, rkey, laddr, lkey, nbytes, rounds, how, sharing, code_opt, sync, out):
    """Each warp writes `rounds` pieces of its own, by its first lane, and announces each in the way `how` says."""
    warps = device.grid_dim() * device.block_dim() // device.warp_size()
    warp, lane = device.global_id() // device.warp_size(), device.lane_id()
    status = 0
    for i in range(rounds):
        at = (i * warps + warp) * nbytes
        index = 0
        if lane == 0:
            index = device.reserve(qp, 1, sharing, code_opt)
        index = device.warp_broadcast(index, 0)
        if index < 0:
            status = index
            break
        copy = device.block_slot() if how == BY_FLAME else device.wqe_address(qp, index)
        if lane == 0:
            device.prepare_write(qp, index, raddr + at, rkey, laddr + at, lkey, nbytes)
            if how == BY_FLAME:
                device.prepare_write(qp, index, raddr + at, rkey, laddr + at, lkey, nbytes, at=copy)
            status = device.mark_ready(qp, index, index, sharing)
            if how == BY_SUBMIT:
                device.submit(qp, index + 1, sharing, sync, code_opt)
            elif how == BY_FLAME:
                device.submit_bf(qp, index + 1, copy, sharing, code_opt)
            elif how == BY_HAND:
                device.ring_db(qp, index + 1, sync, code_opt)
                device.update_dbr(qp, index + 1)
        if how == BY_WARP_FLAME:
            device.submit_bf_warp(qp, index + 1, copy, sharing, code_opt)
    if status == 0 and lane == 0 and code_opt & device.SKIP_DB_RINGING == 0 and how != BY_HAND:
        status = device.wait_all(qp, sharing)
    device.st64(out + 8 * device.global_id(), status)


@kernel
def submit_together(qps, producers, count, raddr, rkey, laddr, lkey, nbytes, sharing, sync, code_opt, out):
    """A piece for each of `count` queues, announced by one call; `producers` has room for their indices."""
    for i in range(count):
        qp = device.ld64(qps + 8 * i)
        index = device.reserve(qp, 1, sharing)
        device.prepare_write(qp, index, raddr + i * nbytes, rkey, laddr + i * nbytes, lkey, nbytes)
        device.mark_ready(qp, index, index, sharing)
        device.st64(producers + 8 * i, index + 1)
    device.submit_multi(qps, producers, count, sharing, sync, code_opt)
    status = 0
    for i in range(count):
        status = min(status, device.wait(device.ld64(qps + 8 * i), device.ld64(producers + 8 * i) - 1, sharing))
    device.st64(out, status)


@kernel
def submit_now(qp, raddr, rkey, laddr, lkey, producer, sharing, out):
    """Announce what is ready, and wait for it."""
    device.submit(qp, producer, sharing)
    device.st64(out, device.poll_at(qp, producer - 1, sharing))
