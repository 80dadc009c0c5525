"""The agent of a port: its queue pair 1, what is sent there by others, and what callers see when it fails."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from gpunetio import PortConfig, cm, verbs
from gpunetio.cm.gsi import _PATHS
from gpunetio.enums import QpType, SendFlags, WrOpcode
from gpunetio.errors import BadStateError, DriverError, InUseError
from gpunetio.formats.cm import MAD_BYTES
from gpunetio.formats.packet import GSI_Q_KEY, GSI_QPN, IPV4_MAPPED
from gpunetio.verbs import AddressHandle, AhAttr, Context, SendWr
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


def new_qp(ctx: Context) -> verbs.QP:
    cq = ctx.create_cq(8)
    return ctx.create_pd().create_qp(sq_wr=4, rq_wr=4, send_cq=cq, receive_cq=cq)


def connected(listener: cm.Listener, a: Context) -> None:
    """Connect, and disconnect."""
    qp = new_qp(a)
    with cm.start_connecting(qp, listener.address, PORT) as asking:
        request = listener.accept()
        with request.accept(new_qp(listener.ctx)) as connection:
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


def test_a_queue_pair_1_that_fails(two):
    """Whoever waits has the reason, and so has whoever comes later. The context closes all the same."""
    a, b = two
    listener = cm.listen(b, PORT)
    (gsi,) = (user for user in b.users if isinstance(user, verbs.QP) and user.type == QpType.GSI)
    gsi.to_error()
    for _ in range(2):
        with pytest.raises(DriverError, match="WR_FLUSH_ERR"):
            listener.accept(timeout=10)
    with pytest.raises(DriverError, match="WR_FLUSH_ERR"):
        asyncio.run(listener.accept_async(timeout=10))
    with pytest.raises(DriverError, match="WR_FLUSH_ERR"):
        cm.connect(new_qp(b), address(a), PORT)
    listener.close()
    b.close()
    with pytest.raises((BadStateError, DriverError)):
        listener.accept()


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
            ))  # fmt: skip
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
            agent.reach(cm.path.Path(gid))
        assert sum(isinstance(user, AddressHandle) for user in a.users) <= _PATHS
        connected(listener, a)
