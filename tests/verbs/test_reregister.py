"""Regions that change while their keys are known: other memory, another domain, other rights."""

from collections.abc import Iterator

import numpy as np
import pytest

from gpunetio import verbs
from gpunetio.enums import Access, WcStatus, WrOpcode
from gpunetio.errors import InvalidValueError, NotSupportedError
from gpunetio.verbs import MR, PD, Completion, SendWr, Sge
from nic_rig import until


@pytest.fixture
def pd() -> Iterator[PD]:
    with verbs.open("soft0") as ctx:
        yield ctx.create_pd()


def write(pd: PD, target: MR, payload: bytes) -> WcStatus:
    """Write to the start of a region, by a queue pair of this domain."""
    with pd.ctx.create_cq(4) as cq, pd.create_qp(sq_wr=4, send_cq=cq) as qp:
        qp.connect(qp)
        qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE, inline=payload, remote_addr=target.iova, rkey=target.rkey))
        found: list[Completion] = []
        until(lambda: bool(found.extend(cq.poll()) or found), "the completion")
    return found[0].status


def test_other_memory_under_the_same_key(pd):
    before, after = np.zeros(64, np.uint8), np.zeros(4096, np.uint8)
    mr = pd.register(before)
    key = mr.rkey
    mr.reregister(after)
    assert (mr.rkey, mr.address, mr.nbytes, mr.iova) == (key, after.ctypes.data, 4096, after.ctypes.data)
    assert write(pd, mr, b"here") == WcStatus.SUCCESS
    assert after[:4].tobytes() == b"here"
    assert not before.any()


def test_memory_that_was_left_is_not_reached_any_more(pd):
    before, after = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    mr = pd.register(before, iova=before.ctypes.data)
    old = mr.iova
    mr.reregister(after)
    mr.iova = old  # as a peer has it that was told before
    assert write(pd, mr, b"there") == WcStatus.REM_ACCESS_ERR
    assert not before.any()


def test_another_domain(pd):
    mr = pd.register(np.zeros(64, np.uint8))
    other = pd.ctx.create_pd()
    assert write(other, mr, b"x") == WcStatus.REM_ACCESS_ERR
    mr.reregister(pd=other)
    assert (mr.pd, other.users) == (other, (mr,))
    assert write(other, mr, b"x") == WcStatus.SUCCESS
    assert write(pd, mr, b"x") == WcStatus.REM_ACCESS_ERR
    pd.close()
    assert not mr.closed
    other.close()
    assert mr.closed


def test_other_rights(pd):
    mr = pd.register(np.zeros(64, np.uint8), Access.LOCAL_WRITE)
    assert write(pd, mr, b"x") == WcStatus.REM_ACCESS_ERR
    mr.reregister(access=Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    assert write(pd, mr, b"x") == WcStatus.SUCCESS
    assert mr.access == Access.LOCAL_WRITE | Access.REMOTE_WRITE


def test_a_payload_comes_from_the_new_memory(pd):
    """The local key, too, and the CPU's own view of it."""
    mr = pd.register(np.zeros(64, np.uint8))
    mr.reregister(np.full(64, 7, np.uint8))
    target = np.zeros(64, np.uint8)
    to, cq = pd.register(target), pd.ctx.create_cq(4)
    qp = pd.create_qp(sq_wr=4, send_cq=cq)
    qp.connect(qp)
    qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[Sge(mr.address, 8, mr.lkey)], remote_addr=to.iova,
                        rkey=to.rkey))
    found: list[Completion] = []
    until(lambda: bool(found.extend(cq.poll()) or found), "the completion")
    assert target.tolist() == [7] * 8 + [0] * 56


def test_a_region_closes_as_it_was_made(pd):
    nic = pd.ctx.provider.nic  # type: ignore[attr-defined]
    other = pd.ctx.create_pd()
    mr = pd.register(np.zeros(64, np.uint8))
    mr.reregister(np.zeros(128, np.uint8), pd=other, access=Access.LOCAL_WRITE)
    mr.close()
    assert len(nic.mkeys) == 0
    assert [int(row["users"]) for row in nic.pds] == [0, 0]


def test_what_is_refused_changes_nothing(pd):
    readonly = np.zeros(64, np.uint8)
    readonly.flags.writeable = False
    array = np.zeros(64, np.uint8)
    mr = pd.register(array)
    with verbs.open("soft1") as elsewhere:
        foreign = elsewhere.create_pd()
        for arguments, why in (
            ({"obj": readonly}, "read-only"),
            ({"access": Access.REMOTE_WRITE}, "without LOCAL_WRITE"),
            ({"pd": foreign}, "another context"),
            ({"nbytes": 64}, "without memory"),
            ({"obj": 0x1000, "nbytes": 64, "access": Access.LOCAL_READ}, "memory"),
        ):
            with pytest.raises((InvalidValueError, NotSupportedError), match=why):
                mr.reregister(**arguments)
    assert (mr.address, mr.access, mr.pd) == (array.ctypes.data, Access.all(), pd)
    assert write(pd, mr, b"x") == WcStatus.SUCCESS
