"""Access to memory: rights, bounds, keys and address bases of memory regions, and the rights of queue pairs."""

from __future__ import annotations

from typing import Unpack

from ..enums import Access, SendFlags, WcStatus, WrOpcode
from ..verbs import Sge
from .kit import check
from .rig import Remote, Rig, Side, same

_WRITE, _READ, _ADD = WrOpcode.RDMA_WRITE, WrOpcode.RDMA_READ, WrOpcode.ATOMIC_FETCH_AND_ADD
_OPERATIONS = (  # an operation for each remote right, and its bytes
    (_WRITE, Access.REMOTE_WRITE, 100),
    (_READ, Access.REMOTE_READ, 100),
    (_ADD, Access.REMOTE_ATOMIC, 8),
)
_FENCE = SendFlags.FENCE
_SIZE = 4096


def _refused(a: Side, b: Side, status: WcStatus, opcode: WrOpcode, nbytes: int, **remote: Unpack[Remote]) -> None:
    """Check that a request fails with this status, the next one is flushed, and neither memory changes."""
    for number in range(2):
        a.post(opcode, a.memory.sge(0, nbytes), wr_id=number, **remote)
    a.fail(status, 0, 1)
    for side in (a, b):
        side.memory.verify(f"a refused {opcode.name}")


def _succeeds(a: Side, b: Side, opcode: WrOpcode, nbytes: int, at: int = 0) -> None:
    a.post(opcode, a.memory.sge(0, nbytes), add=0, **b.memory.remote(at))
    a.succeed(0)


def _one_right(rig: Rig, opcode: WrOpcode, right: Access, nbytes: int) -> None:
    """Check that a right suffices alone, and is missed when all others are present."""
    needed = Access.LOCAL_WRITE if right in (Access.REMOTE_WRITE, Access.REMOTE_ATOMIC) else Access.LOCAL_READ
    a, b = rig.pair(far={"access": right | needed, "size": _SIZE})
    _succeeds(a, b, opcode, nbytes)
    a, b = rig.pair(far={"access": Access.all() & ~right, "size": _SIZE})
    _refused(a, b, WcStatus.REM_ACCESS_ERR, opcode, nbytes, **b.memory.remote())


@check
def right_remote_write(rig: Rig) -> None:
    """A WRITE needs REMOTE_WRITE of the region, and no other right.

    Source: IBTA 9.4.3, 10.6; ibv_reg_mr(3).
    """
    _one_right(rig, *_OPERATIONS[0])


@check
def right_remote_read(rig: Rig) -> None:
    """A READ needs REMOTE_READ of the region, and no other right.

    Source: IBTA 9.4.4, 10.6; ibv_reg_mr(3).
    """
    _one_right(rig, *_OPERATIONS[1])


@check
def right_remote_atomic(rig: Rig) -> None:
    """An atomic needs REMOTE_ATOMIC of the region, and no other right.

    Source: IBTA 9.4.5, 10.6; ibv_reg_mr(3).
    """
    _one_right(rig, *_OPERATIONS[2])


@check
def right_local_write_for_results(rig: Rig) -> None:
    """The result of a READ or an atomic is written only with LOCAL_WRITE; sending needs no right.

    Source: IBTA 10.6, 11.6.2 (Local Protection Error); ibv_reg_mr(3).
    """
    for opcode, nbytes in ((_READ, 100), (_ADD, 8)):
        a, b = rig.pair(near={"access": Access.REMOTE_READ, "size": _SIZE})
        a.post(_WRITE, a.memory.sge(0, 100), **b.memory.remote(1000))
        a.succeed(0)
        for number in range(2):
            a.post(opcode, a.memory.sge(0, nbytes), wr_id=number, add=0, **b.memory.remote())
        a.fail(WcStatus.LOC_PROT_ERR, 0, 1)
        a.memory.verify(f"{opcode.name} into memory that is not to be written")


@check
def right_local_write_for_receives(rig: Rig) -> None:
    """A SEND into memory without LOCAL_WRITE fails at both ends, and the requests behind it are flushed.

    Source: IBTA 9.7.5.2, 9.9.3, 11.6.2 (Local Protection Error, Remote Operation Error); ibv_poll_cq(3).
    """
    a, b = rig.pair(far={"access": Access.REMOTE_READ, "size": _SIZE})
    for number in range(2):
        b.receive(b.memory.sge(0, 64), wr_id=10 + number)
        a.post(WrOpcode.SEND, a.memory.sge(0, 64), wr_id=number)
    a.fail(WcStatus.REM_OP_ERR, 0, 1)
    b.fail_receiving(WcStatus.LOC_PROT_ERR, 10, 11)
    b.memory.verify("a receive into memory that is not to be written")


@check
def rights_of_the_queue_pair(rig: Rig) -> None:
    """A request that the responder's queue pair does not allow fails, whatever the region allows.

    Source: IBTA 9.7.4.1, 9.9.3, 11.6.2 (Remote Invalid Request Error); ibv_modify_qp(3).
    """
    for opcode, right, nbytes in _OPERATIONS:
        a, b = rig.pair(far={"size": _SIZE}, remote_access=right)
        _succeeds(a, b, opcode, nbytes)
        a, b = rig.pair(far={"size": _SIZE}, remote_access=Access.all() & ~(right | Access.LOCAL_WRITE))
        _refused(a, b, WcStatus.REM_INV_REQ_ERR, opcode, nbytes, **b.memory.remote())


@check
def bounds_of_remote_regions(rig: Rig) -> None:
    """The first and the last byte of a region can be reached; the bytes before and behind it cannot.

    Source: IBTA 9.7.4.1, 10.6; ibv_poll_cq(3) (IBV_WC_REM_ACCESS_ERR).
    """
    nbytes = 100
    a, b = rig.pair(far={"size": _SIZE})
    for at in (0, _SIZE - nbytes):
        a.post(_WRITE, a.memory.sge(0, nbytes), **b.memory.remote(at))
        a.post(_READ, a.memory.sge(1000 + at, nbytes), **b.memory.remote(at))
        a.succeed(0, 0)
        b.memory.expect_copy(at, a.memory, 0, nbytes)
        a.memory.expect_copy(1000 + at, b.memory, at, nbytes)
        for side in (a, b):
            side.memory.verify(f"{nbytes} bytes at offset {at} of a region")
    for opcode in (_WRITE, _READ):
        for at in (-1, _SIZE - nbytes + 1):
            a, b = rig.pair(far={"size": _SIZE})
            _refused(a, b, WcStatus.REM_ACCESS_ERR, opcode, nbytes, **b.memory.remote(at))


@check
def bounds_of_local_regions(rig: Rig) -> None:
    """A request that names one byte before or behind a local region fails, and sends nothing to the peer.

    Source: IBTA 10.6, 11.6.2 (Local Protection Error); ibv_poll_cq(3) (IBV_WC_LOC_PROT_ERR).
    """
    for at in (-1, _SIZE - 99):
        a, b = rig.pair(near={"size": _SIZE}, far={"size": _SIZE})
        for number in range(2):
            a.post(_WRITE, a.memory.sge(at, 100), wr_id=number, **b.memory.remote())
        a.fail(WcStatus.LOC_PROT_ERR, 0, 1)
        b.memory.verify("a WRITE from outside of a region")


@check
def bounds_of_atomics(rig: Rig) -> None:
    """An atomic reaches the last 8 bytes of a region and none behind; an address not aligned to 8 is refused.

    Source: IBTA 9.4.5 and 9.7.4.1 (Remote Access Error; Remote Invalid Request Error for the alignment).
    """
    a, b = rig.pair(far={"size": _SIZE})
    _succeeds(a, b, _ADD, 8, _SIZE - 8)
    for at, status in ((_SIZE, WcStatus.REM_ACCESS_ERR), (4, WcStatus.REM_INV_REQ_ERR)):
        a, b = rig.pair(far={"size": _SIZE})
        _refused(a, b, status, _ADD, 8, **b.memory.remote(at))


def _based(rig: Rig, iova: int) -> None:
    """Check keys that count from `iova`, at both ends, and their bounds. The memory's own addresses mean nothing."""
    (a, b), nbytes = rig.pair(), 1000
    near, far = rig.memory(a.pd, nbytes, iova=iova), rig.memory(b.pd, nbytes, iova=iova)
    same("the region's base", (near.mr.iova, far.mr.iova), (iova, iova))
    a.post(_WRITE, near.sge(10, 990), **far.remote(0))
    a.post(_READ, near.sge(0, 10), **far.remote(990), flags=_FENCE)
    a.succeed(0, 0)
    far.expect_copy(0, near, 10, 990)
    near.expect_copy(0, far, 990, 10)
    for memory in (near, far):
        memory.verify(f"regions that count from {iova:#x}")
    for past_the_end in (False, True):
        a, b = rig.pair()
        far = rig.memory(b.pd, nbytes, iova=iova)
        outside = iova + nbytes - 99 if past_the_end else far.mr.address
        _refused(a, b, WcStatus.REM_ACCESS_ERR, _WRITE, 100, remote_addr=outside, rkey=far.mr.rkey)
        far.verify("a WRITE outside of a region")


@check
def zero_based_regions(rig: Rig) -> None:
    """The keys of a region with iova 0 count offsets from its start.

    Source: IBTA 10.6 (zero based virtual addresses); ibv_reg_mr_iova(3).
    """
    _based(rig, 0)


@check
def shifted_regions(rig: Rig) -> None:
    """The keys of a region with another iova count addresses from there.

    Source: ibv_reg_mr_iova(3).
    """
    _based(rig, 0x7654_3210_0008)


@check
def keys_of_closed_regions(rig: Rig) -> None:
    """A deregistered key reaches no memory, at either end.

    Source: IBTA 10.6; ibv_dereg_mr(3).
    """
    a, b = rig.pair()
    gone = rig.memory(b.pd, _SIZE)
    remote = gone.remote()
    gone.mr.close()
    _refused(a, b, WcStatus.REM_ACCESS_ERR, _WRITE, 100, **remote)
    gone.verify("a WRITE under a closed key")
    a, b = rig.pair()
    gone = rig.memory(a.pd, _SIZE)
    entry = gone.sge(0, 64)
    gone.mr.close()
    a.post(_WRITE, entry, **b.memory.remote())
    a.fail(WcStatus.LOC_PROT_ERR, 0)
    b.memory.verify("a WRITE from under a closed key")


@check
def keys_of_other_domains(rig: Rig) -> None:
    """Keys work only with queue pairs of their own PD, at either end.

    Source: IBTA 10.2.3; ibv_alloc_pd(3).
    """
    a, b = rig.pair()
    foreign = rig.memory(b.ctx.create_pd(), _SIZE)
    _refused(a, b, WcStatus.REM_ACCESS_ERR, _WRITE, 100, **foreign.remote())
    foreign.verify("a WRITE under a key of another PD")
    a, b = rig.pair()
    own = rig.memory(a.ctx.create_pd(), _SIZE)
    a.post(_WRITE, own.sge(), **b.memory.remote())
    a.fail(WcStatus.LOC_PROT_ERR, 0)
    b.memory.verify("a WRITE from under a key of another PD")


@check
def requests_of_no_bytes_need_no_key(rig: Rig) -> None:
    """A WRITE or READ of 0 bytes checks neither key nor address.

    Source: IBTA 9.7.4.1 (the R_Key of a request with a DMA length of 0 is not checked).
    """
    a, b = rig.pair()
    for opcode in (_WRITE, _READ):
        a.post(opcode, remote_addr=0, rkey=0)
        a.post(opcode, Sge(0, 0, 0), remote_addr=0, rkey=0)
        a.succeed(0, 0)
    for side in (a, b):
        side.memory.verify("requests of 0 bytes")


@check
def read_only_memory(rig: Rig) -> None:
    """Read-only memory can be registered for reading, and be read.

    Source: ibv_reg_mr(3); gpunetio.verbs.PD.register.
    """
    a, b = rig.pair()
    content = bytes(range(200))
    mr = b.pd.register(content)
    same("its rights", mr.access, Access.REMOTE_READ)
    a.post(_READ, a.memory.sge(0, 200), remote_addr=mr.iova, rkey=mr.rkey)
    a.succeed(0)
    same("what was read", a.memory.bytes[:200].tobytes(), content)
    a.post(_WRITE, a.memory.sge(0, 8), remote_addr=mr.iova, rkey=mr.rkey)
    a.fail(WcStatus.REM_ACCESS_ERR, 0)
