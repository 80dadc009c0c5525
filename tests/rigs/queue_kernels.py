"""Kernels that the tests of exported queues share."""

from gpunetio import device, kernel

EXCLUSIVE = device.EXCLUSIVE


@kernel
def puts(qp, raddr, rkey, laddr, lkey, nbytes, count, waits, out):
    """`count` puts of `nbytes`, from and to consecutive places; `waits`: each is waited for, and none otherwise."""
    code_opt = 0 if waits else device.SKIP_AVAILABILITY_CHECK
    status = 0
    for i in range(count):
        at = i * nbytes
        ticket = device.put(qp, raddr + at, rkey, laddr + at, lkey, nbytes, EXCLUSIVE, code_opt)
        status = min(ticket, 0)
        if waits:
            status = device.wait(qp, ticket, EXCLUSIVE)
        if status != 0:
            break
    device.st64(out, status)


@kernel
def puts_in_turn(qps, stride, queues, raddr, rkey, laddr, lkey, nbytes, count, out):
    """Message i of `count` goes over queue i mod `queues`, whose structures are `stride` apart."""
    status = 0
    for i in range(count):
        qp = qps + stride * (i % queues)
        at = i * nbytes
        status = device.wait(qp, device.put(qp, raddr + at, rkey, laddr + at, lkey, nbytes, EXCLUSIVE), EXCLUSIVE)
        if status != 0:
            break
    device.st64(out, status)


@kernel
def count_when_complete(qp, cqn, number, raddr, rkey, laddr, lkey, out):
    """On a companion: WAIT for CQE `number` of a CQ, then add 1 to the word at `raddr`."""
    index = device.reserve(qp, 2, EXCLUSIVE)
    device.prepare_wait(qp, index, number, cqn)
    device.prepare_atomic(qp, index + 1, device.ATOMIC_FA, raddr, rkey, laddr, lkey, 0, 1)
    device.st64(out, device.wait(qp, device.post(qp, index, index + 1, EXCLUSIVE), EXCLUSIVE))


@kernel
def receive(qp, laddr, lkey, nbytes, out):
    """Post a receive and wait for it."""
    device.st64(out, device.recv_wait(qp, device.recv(qp, laddr, lkey, nbytes)))
