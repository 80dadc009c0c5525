"""Connections: descriptions that are checked, limits, states, and what closing waits for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio import Access, Gpu, LinkLayer, PortConfig, QpState, WcStatus, WrOpcode, device, verbs
from gpunetio.core import ContextState
from gpunetio.enums import AddrType
from gpunetio.errors import BadStateError, DocaError, FullError, InvalidValueError, NotSupportedError
from gpunetio.rdma import ConnectionState, Rdma
from gpunetio.rdma.description import endpoint_of
from gpunetio.verbs import SendWr, Sge
from nic_rig import until
from rdma_rig import Ends

WRITE = [{"what": "value_strong", "value": 9}, {"what": "commit_strong"}, {"what": "wait_all"}]
DONE = [device.OK, device.OK, 1]


@pytest.mark.parametrize("transport", ["DC", "UD"])
def test_only_rc(pd, transport):
    with pytest.raises(NotSupportedError, match="transport"):
        Rdma(pd, transport=transport)


@pytest.mark.parametrize(
    "wrong",
    [{"gid_index": -1}, {"send_queue_size": 0}, {"send_queue_size": 1 << 20}, {"recv_queue_size": -1},
     {"max_connections": 0}, {"timeout": 0}, {"permissions": 1 << 30}, {"grh": False}, {"port": 2}],
    ids=str,
)
def test_arguments_that_no_queue_can_have(pd, wrong):
    with pytest.raises(InvalidValueError, match=next(iter(wrong))):
        Rdma(pd, **wrong)


def test_the_last_gid_of_the_table(pd):
    last = pd.ctx.query_device().gid_table_size - 1
    with Rdma(pd, gid_index=last) as rdma:
        assert rdma.gid_index == last
    with pytest.raises(InvalidValueError, match=f"gid_index = {last + 1}: it must be 0 to {last}"):
        Rdma(pd, gid_index=last + 1)


def test_a_connection_has_no_marks_of_an_earlier_one(pd):
    """Which would tell kernels of the ends of requests that they have not made."""
    with Gpu("host") as gpu, Rdma(pd, gpu=gpu) as a, Rdma(pd, gpu=gpu) as b:
        memory, marks = a._path._memory, a._path._marks_at(0)
        memory.write(b"\xff" * (memory.nbytes - marks), marks)
        (here, near), (there, far) = a.export(), b.export()
        near.connect(there)
        far.connect(here)
        assert not memory.read(marks, memory.nbytes - marks).any()


def test_descriptions_are_checked(pd):
    """Every byte counts: whatever is changed, cut off or added is noticed, and the connection stays new."""
    with Rdma(pd) as one, Rdma(pd) as two:
        good, connection = two.export()
        mine, peer = one.export()

        @given(st.integers(0, len(good) - 1), st.integers(1, 255))
        def changed(at: int, by: int) -> None:
            bad = bytearray(good)
            bad[at] ^= by
            with pytest.raises(InvalidValueError):
                peer.connect(bad)

        changed()

        @given(st.binary(max_size=100))
        def others(bad: bytes) -> None:
            with pytest.raises(InvalidValueError):
                peer.connect(bad)

        others()
        assert peer.state is ConnectionState.NEW
        peer.connect(good)
        connection.connect(mine)
        assert peer.qp.state == connection.qp.state == QpState.RTS
        assert endpoint_of(good).qpn == connection.qp.qpn
        with pytest.raises(BadStateError, match="CONNECTED"):
            peer.connect(good)


def test_connections_of_the_cpu(pd):
    """Each has a queue pair of verbs, connected with the rights of its context; all complete in one CQ."""
    memory = np.zeros(64, np.uint8)
    with (
        Rdma(pd, max_connections=2) as one,
        Rdma(pd, max_connections=2, permissions=Access.REMOTE_WRITE) as two,
        pd.register(memory) as mr,
    ):
        for _ in range(2):
            (there, b), (here, a) = two.export(), one.export()
            a.connect(there)
            b.connect(here)
        cq = one.connections[0].qp.send_cq
        outcomes = {WrOpcode.RDMA_WRITE: WcStatus.SUCCESS, WrOpcode.RDMA_READ: WcStatus.REM_INV_REQ_ERR}
        for opcode, wanted in outcomes.items():
            place = {"remote_addr": mr.address + 32, "rkey": mr.rkey}
            for connection in one.connections:
                connection.qp.post_send(SendWr(opcode=opcode, sges=[Sge(mr.address, 8, mr.lkey)], **place))
                (done,) = until(cq.poll, "a completion")
                assert done.status == wanted
        assert "read" in one.connections[0].last_error().cause.lower()
        with pytest.raises(BadStateError, match="gpu="):
            _ = one.device_address


def test_a_number_is_given_again(ends):
    """There are as many connections as configured; the number of one that was closed is free, with a new queue."""
    made = ends(connections=2)
    with pytest.raises(FullError, match="2 connections"):
        made.a.rdma.export()
    assert made.alone(*WRITE, *WRITE) == DONE * 2
    for end in (made.a, made.b):
        end.connections.pop(0).close()
    assert made.alone(*WRITE)[0] == device.EINVAL
    assert made.alone(*[{**call, "conn": 1} for call in WRITE]) == DONE
    made.connect()
    assert [connection.id for connection in made.a.connections] == [1, 0]
    assert made.alone(*WRITE) == DONE
    assert made.b.bytes[0] == 9


def test_it_stops_and_starts(ends):
    """Its connections are closed with it, and it makes others when it runs again."""
    made = ends()
    connection = made.a.connections.pop()
    made.a.rdma.stop()
    assert made.a.rdma.state is ContextState.IDLE
    assert connection.state is ConnectionState.CLOSED
    for call in (made.a.rdma.export, lambda: made.a.rdma.device_address):
        with pytest.raises(BadStateError, match="start"):
            call()
    made.b.connections.pop().close()
    made.a.rdma.start()
    made.connect()
    assert made.alone(*WRITE) == DONE


def test_nothing_goes_away_under_a_kernel(ends):
    made = ends()
    flag = made.a.memory.device_address
    ended = made.start([[{"what": "await", "position": flag, "value": 1}]])
    try:
        for end in (made.a.connections[0].close, made.a.rdma.stop):
            with pytest.raises(BadStateError, match="kernel"):
                end()
    finally:
        made.a.bytes[0] = 1
        ended()
    made.a.connections[0].close()


def test_a_device_that_refuses(pd):
    """The connection has failed, and its number can be given again."""
    with Rdma(pd) as one, Rdma(pd) as two:
        good, _ = two.export()
        _, peer = one.export()
        peer.qp.connect(endpoint_of(good))  # behind the library's back
        with pytest.raises(DocaError):
            peer.connect(good)
        assert peer.state is ConnectionState.FAILED
        peer.close()
        one.export()


@pytest.mark.parametrize("grh", [False, True])
def test_infiniband(gpu, grh):
    """Ports of InfiniBand, whose packets have a global route only if that is asked for."""
    with verbs.open("soft2", port=PortConfig(link_layer=LinkLayer.INFINIBAND)) as ctx:
        pd = ctx.create_pd()
        with Ends(gpu, pd, grh=grh) as made:
            attr = made.a.connections[0].qp.query()[0].ah_attr
            assert attr.addr_type is (AddrType.IB_GRH if grh else AddrType.IB_NO_GRH)
            assert made.alone(*WRITE) == DONE
