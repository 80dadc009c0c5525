"""What is left of connections with other processes, which die at a step of the handshake, or come and go: nothing.

The other end has its error soon.
"""

import contextlib
import functools
import operator
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from cm_peer import FAST, Peer, new_qp
from gpunetio import PortConfig, cm, verbs
from gpunetio.cm import ConnectionState
from gpunetio.enums import QpState
from gpunetio.errors import TimedOutError
from gpunetio.verbs import Context
from udp_rig import own_address

pytestmark = [pytest.mark.slow, pytest.mark.soft_nic]

PORT = 7300
AT_ONCE = 20
LOOKS = 10


@pytest.fixture
def here() -> Iterator[Context]:
    with verbs.open("soft0", port=PortConfig(addresses=(own_address(),))) as ctx:
        yield ctx


def descriptors() -> Counter[str]:
    """What a process has open, by kind. For a moment, a thread may have one more: only what stays counts."""
    looks = []
    for _ in range(LOOKS):
        looks.append(Counter[str]())
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                looks[-1][re.sub(r"[0-9]+", "N", os.readlink(f"/proc/self/fd/{number}"))] += 1
        time.sleep(0.02)
    return functools.reduce(operator.and_, looks)


def left(ctx: Context) -> tuple[Counter[str], tuple[object, ...]]:
    """What a process has open, and what else it and a NIC have."""
    nic = ctx.provider.nic
    threads = sorted(thread.name for thread in threading.enumerate())
    return descriptors(), (threads, sorted(map(str, ctx.users)), len(nic.qps), len(nic.mkeys))


def nothing_more(first: tuple[Counter[str], object], last: tuple[Counter[str], object]) -> None:
    """The last look finds nothing that the first one did not. What earlier tests left behind may go meanwhile."""
    assert last[0] - first[0] == Counter()
    assert last[1] == first[1]


def peer(ctx: Context, role: str, step: str, address: str) -> Peer:
    """Start a peer at an address. A client connects to here."""
    return Peer(role, step, "soft1", address, str(ctx.provider.nic.port.addresses[0]), PORT)


def many(ctx: Context, address: str, count: int) -> Peer:
    """Start a client that connects and disconnects so often, AT_ONCE at a time."""
    return Peer(f"many {count} {AT_ONCE}", "", "soft1", address, str(ctx.provider.nic.port.addresses[0]), PORT)


@pytest.mark.parametrize("step", ["connect:after", "confirm:before", "confirm:after", ""])
def test_the_client_dies(here: Context, step: str) -> None:
    """After its REQ; before its RTU, and after that; connected."""
    there, qp, found = own_address(), new_qp(here), []
    with cm.listen(here, PORT, times=FAST) as listener:
        for _ in range(2):  # the first one leaves what the agent keeps: an address handle, a wire
            with peer(here, "connect", step, there) as child:
                connection = listener.accept().accept(qp)
                if step in ("", "confirm:after"):
                    connection.established()
                    if not step:
                        assert child.said() == "connected"
                        os.kill(child.pid, signal.SIGKILL)
                    assert child.wait() == -signal.SIGKILL
                    connection.disconnect()
                    assert (connection.state, qp.state) == (ConnectionState.DISCONNECTED, QpState.ERR)
                else:
                    assert child.wait() == -signal.SIGKILL
                    with pytest.raises(TimedOutError, match="does not answer"):
                        connection.established()
                    assert (connection.state, qp.state) == (ConnectionState.FAILED, QpState.ERR)
            connection.close()
            qp.reset()
            found.append(left(here))
    nothing_more(*found)


@pytest.mark.parametrize("step", ["listen:before", "accept:before", "accept:after", ""])
def test_the_server_dies(here: Context, step: str) -> None:
    """Before it listens; before its REP, and after that; connected."""
    there, qp, found = own_address(), new_qp(here), []
    for _ in range(2):
        with peer(here, "listen", step, there) as child:
            if step == "listen:before":
                assert child.wait() == -signal.SIGKILL
            else:
                assert child.said() == "listens"
            if step in ("", "accept:after"):
                connection = cm.connect(qp, there, PORT, times=FAST)
                if not step:
                    assert child.said() == "connected"
                    os.kill(child.pid, signal.SIGKILL)
                assert child.wait() == -signal.SIGKILL
                connection.disconnect()
                assert (connection.state, qp.state) == (ConnectionState.DISCONNECTED, QpState.ERR)
                connection.close()
                qp.reset()
            else:
                with pytest.raises(TimedOutError, match="does not answer"):
                    cm.connect(qp, there, PORT, times=FAST)
                assert child.wait() == -signal.SIGKILL
                assert qp.state == QpState.RST
        found.append(left(here))
    nothing_more(*found)


def test_a_thousand_connections(here: Context) -> None:
    """Up and down between two processes: nothing more is left than of the first hundred."""
    there, found = own_address(), []
    with cm.listen(here, PORT) as listener, many(here, there, 1000) as child:
        qps = [new_qp(here) for _ in range(AT_ONCE)]
        for number in range(1000 // AT_ONCE):
            connections = [listener.accept().accept(qp) for qp in qps]
            for connection in connections:
                connection.disconnected()
                connection.close()
            for qp in qps:
                qp.reset()
            if number in (4, 1000 // AT_ONCE - 1):
                found.append(left(here))
        assert (child.said(), child.wait()) == ("done", 0)
    nothing_more(*found)
