"""Connections of queue pairs on software NICs: two NICs of one process, and a NIC with itself."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import ip_address

import numpy as np
import pytest

from cm_sent import wait_until_sent
from gpunetio import cm, verbs
from gpunetio.cm.agent import Agent
from gpunetio.cm.communication import Communication
from gpunetio.enums import QpState, QpType, SendFlags, WcStatus, WrOpcode
from gpunetio.errors import (
    BadStateError,
    ConnectionRejectedError,
    InUseError,
    InvalidValueError,
    NotSupportedError,
    TimedOutError,
    TooBigError,
)
from gpunetio.verbs import QP, Context, RecvWr, SendWr, Sge
from nic_rig import until

PORT = 7174
BRIEF = cm.Times(packet_life=8, ack_delay=8)  # TIMEWAIT takes milliseconds
QUICK = cm.Times(response_timeout=12, packet_life=8, retries=2)  # so does giving up
PATIENCE = 30.0


@dataclass
class End:
    """A NIC, and what programs create on it."""

    ctx: Context

    def __post_init__(self) -> None:
        self.pd = self.ctx.create_pd()
        self.cq = self.ctx.create_cq(64)
        self.memory = np.zeros(256, np.uint8)
        self.region = self.pd.register(self.memory)

    def qp(self, qp_type: QpType = QpType.RC) -> QP:
        return self.pd.create_qp(qp_type=qp_type, sq_wr=8, rq_wr=8, send_cq=self.cq, receive_cq=self.cq)

    def piece(self, at: int, nbytes: int) -> Sge:
        return Sge(self.region.address + at, nbytes, self.region.lkey)

    def completions(self, count: int) -> list:
        found = []
        while len(found) < count:
            found += self.cq.poll(count - len(found))
        return found

    def forgets_everything(self) -> None:
        """Wait until no connection is in TIMEWAIT."""
        agent = Agent.of(self.ctx)
        with agent.machine() as machine:
            agent.wait(lambda: True if len(machine) == 0 else None, PATIENCE, "the end of all connections")

    def users(self) -> int:
        """Return how many objects the context has when no connection is in TIMEWAIT and no datagram in flight."""
        self.forgets_everything()
        wait_until_sent(self.ctx, PATIENCE)
        return len(self.ctx.users)


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[End, End]]:
    with ExitStack() as stack:
        yield tuple(End(stack.enter_context(verbs.open(name))) for name in ("soft0", "soft1"))  # type: ignore[misc]


@pytest.fixture(params=["two NICs", "one NIC"])
def both(ends, request) -> tuple[End, End]:
    return ends if request.param == "two NICs" else (ends[0], ends[0])


def gid_text(end: End) -> str:
    return str(ip_address(end.ctx.query_gid()[12:]))


def connected(client: End, server: End, **options) -> tuple[cm.Connection, cm.Connection]:
    with cm.listen(server.ctx, PORT) as listener:
        there = cm.start_connecting(client.qp(), listener.address, PORT, **options)
        here = listener.accept(PATIENCE).accept(server.qp())
    for connection in (there, here):
        connection.established(PATIENCE)
    return there, here


def closed(*connections: cm.Connection) -> None:
    for connection in connections:
        connection.close()
        connection.qp.close()


def test_queue_pairs_connect_exchange_messages_and_disconnect(both):
    client, server = both
    qp, theirs = client.qp(), server.qp()
    with cm.listen(server.pd, PORT) as listener:
        there = cm.start_connecting(qp, listener.address, PORT, b"hello")
        assert qp.state == QpState.INIT
        request = listener.accept(PATIENCE)
        assert request.private_data == b"hello".ljust(56, b"\0")
        assert (request.peer, request.port) == (gid_text(client), PORT)
        here = request.accept(theirs, b"welcome")
        there.established(PATIENCE)
        here.established(PATIENCE)
    assert there.private_data == b"welcome".ljust(196, b"\0")
    assert qp.state == theirs.state == QpState.RTS
    theirs.post_recv(RecvWr(sges=[server.piece(128, 64)]))
    client.memory[:5] = np.frombuffer(b"12345", np.uint8)
    qp.post_send(SendWr(opcode=WrOpcode.SEND, sges=[client.piece(0, 5)], flags=SendFlags.SIGNALED))
    done = client.completions(1) + server.completions(1) if client is not server else client.completions(2)
    assert [completion.status for completion in done] == [WcStatus.SUCCESS] * 2
    assert bytes(server.memory[128:133]) == b"12345"
    there.disconnect(b"bye", PATIENCE)
    here.disconnected(PATIENCE)
    assert qp.state == theirs.state == QpState.ERR
    kinds = [here.get_event(PATIENCE).type for _ in range(2)]
    assert kinds == [cm.EventType.ESTABLISHED, cm.EventType.DISCONNECTED]
    closed(there, here)


def test_attributes_of_the_queue_pairs_are_what_both_ends_want(ends):
    client, server = ends
    qp, theirs = client.qp(), server.qp()
    wants = cm.Parameters(responder_resources=4, initiator_depth=2, rnr_retry=3, retry_count=5, ack_timeout=11)
    with cm.listen(server.ctx, PORT) as listener:
        there = cm.start_connecting(qp, listener.address, PORT, parameters=wants)
        request = listener.accept(PATIENCE)
        assert (request.responder_resources, request.initiator_depth) == (2, 4)
        here = request.accept(theirs, parameters=cm.Parameters(initiator_depth=1, rnr_retry=6))
        there.established(PATIENCE)
    one, other = qp.query()[0], theirs.query()[0]
    assert (one.dest_qp_num, other.dest_qp_num) == (theirs.qpn, qp.qpn)
    assert (one.max_rd_atomic, one.max_dest_rd_atomic) == (2, 1)
    assert (other.max_rd_atomic, other.max_dest_rd_atomic) == (1, 2)
    assert (one.rnr_retry, other.rnr_retry) == (6, 3)
    assert (one.retry_cnt, other.retry_cnt) == (5, 5)
    assert (one.ack_timeout, other.ack_timeout) == (11, 19)
    closed(there, here)


def test_a_refused_queue_pair_can_try_again(ends):
    client, server = ends
    qp = client.qp()
    with cm.listen(server.ctx, PORT) as listener:
        there = cm.start_connecting(qp, listener.address, PORT)
        with listener.accept(PATIENCE) as request:
            request.reject(b"later", 77)
        with pytest.raises(ConnectionRejectedError, match=r"port 7174: unknown \(77\)") as error:
            there.established(PATIENCE)
        assert (error.value.reason, error.value.private_data[:5]) == (77, b"later")
        with server.qp() as theirs, pytest.raises(BadStateError, match="waits no more"):
            request.accept(theirs)
        there.close()
        assert qp.state == QpState.RST
        with pytest.raises(ConnectionRejectedError, match="INVALID_SERVICE_ID"):
            cm.connect(qp, listener.address, PORT + 1, timeout=PATIENCE)
        assert qp.state == QpState.RST
        there = cm.start_connecting(qp, listener.address, PORT)
        here = listener.accept(PATIENCE).accept(server.qp())
        there.established(PATIENCE)
    closed(there, here)


def test_nobody_answers(ends):
    client, server = ends
    qp = client.qp()
    with cm.listen(server.ctx, PORT, backlog=1) as listener:
        first = cm.start_connecting(client.qp(), listener.address, PORT)
        waiting = listener.accept(PATIENCE)
        with pytest.raises(TimedOutError, match="does not answer at port 7174"):
            cm.connect(qp, listener.address, PORT, timeout=PATIENCE, times=QUICK)
        with pytest.raises(TimedOutError, match="did not come within"):
            cm.connect(qp, listener.address, PORT, timeout=0.01)
        assert qp.state == QpState.RST
        first.close()
        until(lambda: not waiting.waits, "the end of the request")
        with pytest.raises(TimedOutError):
            listener.accept(timeout=0.01)
        with pytest.raises(BadStateError, match="has given up"):
            waiting.accept(qp)
    closed(first)
    qp.close()


def test_what_cannot_connect_is_refused_in_words(ends):
    client, server = ends
    qp = client.qp()
    with cm.listen(server.ctx, PORT) as listener:
        with pytest.raises(InUseError, match="port 7174 has a listener"):
            cm.listen(server.ctx, PORT)
        with pytest.raises(TooBigError, match="57 bytes"):
            cm.connect(qp, listener.address, PORT, bytes(57))
        with pytest.raises(InvalidValueError, match="port = 70000"):
            cm.connect(qp, listener.address, 70000)
        with pytest.raises(InvalidValueError, match="'nowhere' is not an IPv4 or IPv6 address"):
            cm.connect(qp, "nowhere", PORT)
        with client.qp(QpType.UC) as other, pytest.raises(NotSupportedError, match="is UC"):
            cm.connect(other, listener.address, PORT)
        assert qp.state == QpState.RST
        with pytest.raises(TimedOutError):
            listener.accept(timeout=0)
    with pytest.raises(BadStateError, match="closed"):
        listener.accept()
    qp.close()


def test_objects_close_in_any_order(ends):
    client, server = ends
    there, here = connected(client, server)
    with pytest.raises(InUseError, match="still used by connection"):
        there.qp.close()
    there.close()
    there.close()
    here.disconnected(PATIENCE)
    here.qp.close_with_owner()
    assert here.closed
    with pytest.raises(BadStateError, match="closed"):
        here.start_disconnecting()
    there.qp.close()


def test_a_context_that_closes_disconnects(ends):
    _, server = ends
    with verbs.open("soft2") as ctx:
        _, here = connected(End(ctx), server)
    here.disconnected(PATIENCE)
    closed(here)


def test_coroutines_connect_and_accept(ends):
    client, server = ends

    async def serve(listener: cm.Listener, count: int) -> list[cm.Connection]:
        return [(await listener.accept_async()).accept(server.qp()) for _ in range(count)]

    async def main() -> None:
        with cm.listen(server.ctx, PORT) as listener:
            serving = asyncio.create_task(serve(listener, 8))
            calls = (cm.connect_async(client.qp(), listener.address, PORT) for _ in range(8))
            there = await asyncio.gather(*calls)
            here = await serving
            for connection in here:
                await connection.established_async()
            await there[0].disconnect_async()
            await here[0].get_event_async()
            closed(*there)
            for connection in here:
                await connection.disconnected_async()
            closed(*here)

    asyncio.run(main())


def test_datagrams_find_a_queue_pair(both):
    client, server = both
    qp = server.qp(QpType.UD)
    qp.to_rts(qkey=0x1234567)
    with cm.listen_datagrams(server.ctx, PORT) as listener:
        served = threading.Thread(target=lambda: listener.accept(PATIENCE).accept(qp, b"here"))
        served.start()
        found = cm.resolve(client.ctx, listener.address, PORT, b"where")
        served.join()
        assert (found.qpn, found.qkey, found.private_data[:5]) == (qp.qpn, 0x1234567, b"here\0")
        with pytest.raises(ConnectionRejectedError, match="SERVICE_NOT_SUPPORTED"):
            cm.resolve(client.ctx, listener.address, PORT + 1)
    client.pd.create_ah(found.ah_attr).close()
    qp.close()


def up_and_down(client: End, server: End, count: int) -> None:
    qps = client.qp(), server.qp()
    with cm.listen(server.ctx, PORT, times=BRIEF) as listener:
        for number in range(1 + count):
            if number == 1:  # each end has an address handle of the other
                before = client.users(), server.users()
            there = cm.start_connecting(qps[0], listener.address, PORT, times=BRIEF)
            here = listener.accept(PATIENCE).accept(qps[1])
            there.established(PATIENCE)
            there.disconnect(timeout=PATIENCE)
            here.disconnected(PATIENCE)
            there.close()
            here.close()
            for qp in qps:
                qp.reset()
        assert (client.users(), server.users()) == before
    for end in (client, server):
        end.forgets_everything()
    for qp in qps:
        qp.close()
    del there, here
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Communication]


def test_connections_up_and_down_leave_nothing(ends):
    up_and_down(*ends, 50)


@pytest.mark.slow
def test_a_thousand_connections_up_and_down_leave_nothing(ends):
    up_and_down(*ends, 1000)
