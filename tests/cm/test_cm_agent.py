"""The agent of a port: its queue pair 1, what is sent there by others, and what callers see when it fails."""

import asyncio
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cm_peer import short_lived_qp
from gpunetio import PortConfig, cm, verbs
from gpunetio.cm import agent
from gpunetio.cm.gsi import GeneralServices
from gpunetio.cm.ways import _PATHS
from gpunetio.enums import QpState, QpType, SendFlags, WrOpcode
from gpunetio.errors import BadStateError, DriverError, InUseError
from gpunetio.formats.cm import MAD_BYTES
from gpunetio.formats.packet import GSI_Q_KEY, GSI_QPN, IPV4_MAPPED
from gpunetio.verbs import AddressHandle, AhAttr, Context, SendWr, Sge
from nic_rig import until
from udp_rig import own_address

pytestmark = pytest.mark.soft_nic

PORT = 7400


@pytest.fixture
def two() -> Iterator[tuple[Context, Context]]:
    with (
        verbs.open("soft0", port=PortConfig(addresses=(own_address(),))) as a,
        verbs.open("soft1", port=PortConfig(addresses=(own_address(),))) as b,
    ):
        yield a, b


def address(ctx: Context) -> str:
    return str(ctx.provider.nic.port.addresses[0])


def connected(listener: cm.Listener, a: Context) -> None:
    """Connect, and disconnect."""
    with (
        short_lived_qp(a) as qp, short_lived_qp(listener.ctx) as theirs,
        cm.start_connecting(qp, listener.address, PORT) as asking,
    ):
        request = listener.accept()
        with request.accept(theirs) as connection:
            asking.established()
            connection.established()


def manager(ctx: Context) -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name == f"gpunetio {ctx.name} CM"}


def test_one_agent_of_a_nic(two):
    """All of a context share it. Another context is told, and has its turn when the first one is closed."""
    a, b = two
    with cm.listen(b, PORT) as listener, cm.listen(b, PORT + 1):
        connected(listener, a)
        with verbs.open(b.name) as other:
            with pytest.raises(InUseError, match=f"{b.name} gives out its queue pair 1 once"):
                cm.listen(other, PORT + 2)
            assert all(isinstance(user, verbs.UAR) for user in other.users)
    b.close()
    assert not manager(b)
    with verbs.open(b.name) as other, cm.listen(other, PORT):
        assert manager(b)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # beside threads, since Python 3.12
def test_a_child_that_is_forked_while_an_agent_opens(two, monkeypatch):
    """It has none of its parent's agents, and opens its own."""
    a, b = two
    opens, forked, own, parent = threading.Event(), threading.Event(), agent._Own, os.getpid()

    def open_late(*arguments):
        if os.getpid() == parent:
            opens.set()
            assert forked.wait(60)
        return own(*arguments)

    with cm.listen(a, PORT), ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(agent, "_Own", open_late)
        opening = pool.submit(cm.listen, b, PORT)
        assert opens.wait(20)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            try:
                assert not agent._agents
                port = PortConfig(addresses=(own_address(),))
                with verbs.open("soft2", port=port) as mine, cm.listen(mine, PORT), cm.listen(mine, PORT + 1):
                    assert len(agent._agents) == 1
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        forked.set()
        opening.result(20).close()
    assert status == 0


def test_a_queue_pair_1_that_fails(two, caplog):
    """It begins anew, and connections come about again."""
    a, b = two
    with cm.listen(b, PORT) as listener:
        connected(listener, a)
        for _ in range(3):
            gsi_of(b).to_error()
            until(lambda: gsi_of(b).state == QpState.RTS, "another life of queue pair 1")
            connected(listener, a)
    assert "WR_FLUSH_ERR" in caplog.text
    assert "works again" in caplog.text


def test_a_queue_pair_1_that_does_not_recover(two, monkeypatch):
    """Whoever waits has the reason, and so has whoever comes later, each in an error of its own."""
    a, b = two
    listener = cm.listen(b, PORT)

    def restart(services: GeneralServices) -> None:
        raise DriverError("the device does not answer")

    with monkeypatch.context() as broken:
        broken.setattr(GeneralServices, "restart", restart)
        gsi_of(b).to_error()
        errors = []
        for _ in range(50):
            with pytest.raises(DriverError) as caught:
                listener.accept(timeout=10)
            errors.append(caught.value)
        assert len(set(map(id, errors))) == 50
        assert len({len(traceback.extract_tb(error.__traceback__)) for error in errors}) == 1
        with pytest.raises(DriverError, match=r"WR_FLUSH_ERR|the device does not answer"):
            asyncio.run(listener.accept_async(timeout=10))
        with short_lived_qp(b) as qp, pytest.raises(DriverError, match=r"WR_FLUSH_ERR|the device does not answer"):
            cm.connect(qp, address(a), PORT)
    until(lambda: gsi_of(b).state == QpState.RTS, "another life of queue pair 1")
    connected(listener, a)
    gsi_of(b).to_error()
    listener.close()
    b.close()
    with pytest.raises(BadStateError, match="closed"):
        listener.accept()


def gsi_of(ctx: Context) -> verbs.QP:
    (gsi,) = (user for user in ctx.users if isinstance(user, verbs.QP) and user.type == QpType.GSI)
    return gsi


@pytest.mark.parametrize("nbytes", [257, 1000, 4096])
def test_datagrams_that_no_receive_holds(two, nbytes):
    """A UD SEND of a stranger with the public Q_Key, which is longer than a MAD (IBTA 13.5.3.1: 256 bytes)."""
    a, b = two
    with cm.listen(b, PORT) as listener:
        cq, pd = a.create_cq(64), a.create_pd()
        memory = np.ones(nbytes, np.uint8)
        region = pd.register(memory)
        qp = pd.create_qp(qp_type=QpType.UD, sq_wr=8, send_cq=cq, receive_cq=cq)
        qp.to_rts(qkey=GSI_Q_KEY)
        ah = pd.create_ah(AhAttr(gid=b.query_gid()))
        before = b.provider.nic.counters["resp_local_length_error"]
        qp.post_send(SendWr(
            opcode=WrOpcode.SEND, sges=(Sge(region.address, nbytes, region.lkey),), ah=ah, remote_qpn=GSI_QPN,
            remote_qkey=GSI_Q_KEY, flags=SendFlags.SIGNALED,
        ))
        until(lambda: b.provider.nic.counters["resp_local_length_error"] == before + 1, "the datagram")
        assert gsi_of(b).state == QpState.RTS
        connected(listener, a)


def test_what_is_no_message(two):
    """Datagrams of other lengths, of another class, and zeros, more than there are receives: connections still work."""
    a, b = two
    with cm.listen(b, PORT) as listener:
        cq = a.create_cq(64)
        pd = a.create_pd()
        qp = pd.create_qp(qp_type=QpType.GSI, sq_wr=8, send_cq=cq, receive_cq=cq, max_inline_data=MAD_BYTES)
        qp.to_rts()
        ah = pd.create_ah(AhAttr(gid=b.query_gid()))
        for number in range(2200):
            mad = (b"\x01\x04\x01\x01", bytes(MAD_BYTES), b"", bytes(100))[number % 4]
            qp.post_send(SendWr(
                opcode=WrOpcode.SEND, inline=mad, ah=ah, remote_qpn=GSI_QPN, remote_qkey=GSI_Q_KEY,
                flags=SendFlags.SIGNALED,
            ))
            while not cq.poll():
                pass
        qp.close()
        connected(listener, a)


@pytest.mark.host_memory  # handles of hosts that only a NIC on the CPU reaches
def test_address_handles_are_not_kept_for_ever(two):
    a, b = two
    with cm.listen(b, PORT) as listener:
        connected(listener, a)
        agent = next(user for user in a.users if str(user).startswith("connection manager"))
        for number in range(_PATHS + 300):
            gid = IPV4_MAPPED + bytes([127, 200, number >> 8, number & 0xFF])
            found: list[object] = []
            agent.find(cm.path.Path(gid), found.append, lambda: found.append(None))  # noqa: B023
            until(lambda: found, "the way")  # noqa: B023
        assert sum(isinstance(user, AddressHandle) for user in a.users) <= _PATHS
        connected(listener, a)
