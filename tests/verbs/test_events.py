"""Completion channels and asynchronous events: what is told, when, and to whom."""

import asyncio
import itertools
import select
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunetio import verbs
from gpunetio.enums import Access, AsyncEventType, CqOverrun, PortState, QpState, SendFlags, WcStatus, WrOpcode
from gpunetio.errors import BadStateError, DriverError, FullError, InUseError, InvalidValueError
from gpunetio.formats.events import EventType
from gpunetio.nic.queues import channels
from gpunetio.verbs import CQ, QP, CompChannel, RecvWr, SendWr, Sge
from nic_rig import Buffer, until, view

PATIENCE = 20.0
BOTH = pytest.mark.parametrize("names", [("soft0", "soft0"), ("soft0", "soft1")], ids=["loopback", "wire"])


@dataclass
class Pair:
    """A sender, and a receiver whose completions a channel tells of."""

    a: QP
    sent: CQ
    source: Buffer
    b: QP
    received: CQ
    target: Buffer
    channel: CompChannel

    def receive(self, count: int = 1) -> None:
        sge = Sge(self.target.address, 64, self.target.key)
        self.b.post_recv(*(RecvWr(sges=[sge], wr_id=i) for i in range(count)))

    def send(self, nbytes: int = 8, solicited: bool = False, **more: object) -> None:
        flags = SendFlags.SIGNALED | (SendFlags.SOLICITED if solicited else SendFlags(0))
        sge = Sge(self.source.address, nbytes, self.source.key)
        self.a.post_send(SendWr(opcode=more.pop("opcode", WrOpcode.SEND), sges=[sge], flags=flags, **more))

    def arrived(self, count: int = 1) -> None:
        """Wait until so many completions are in the receiving CQ, without polling them."""
        ring = view(self.received.ring_address, self.received.entries * 64).reshape(-1, 64)
        size = self.received.entries
        at = self.received.consumer_index + count - 1
        until(lambda: ring[at % size, 63] >> 4 != 15 and ring[at % size, 63] & 1 == at // size & 1, "completions")

    def event(self, timeout: float = PATIENCE) -> CQ | None:
        cq = self.channel.get_event(timeout)
        if cq is not None:
            cq.ack_events()
        return cq


@pytest.fixture
def pair(names: tuple[str, str]) -> Iterator[Pair]:
    with ExitStack() as stack:
        here, there = (stack.enter_context(verbs.open(name)) for name in names)
        near, far = here.create_pd(), there.create_pd()
        channel = there.create_comp_channel()
        sent, received = here.create_cq(64), there.create_cq(64, channel=channel)
        a = near.create_qp(sq_wr=32, send_cq=sent)
        b = far.create_qp(rq_wr=32, receive_cq=received)
        a.connect(b, min_rnr_timer=1)
        yield Pair(a, sent, Buffer(near, 4096), b, received, Buffer(far, 4096), channel)


# --- completion channels ---------------------------------------------------------------------------------------------


@BOTH
def test_one_event_for_one_request(pair):
    pair.receive(3)
    assert pair.event(0) is None
    pair.received.req_notify()
    assert pair.event(0) is None
    pair.send()
    assert pair.event() is pair.received
    pair.send()
    pair.arrived(2)
    assert pair.event(0.05) is None  # it was not asked for again
    assert len(pair.received.poll()) == 2


@BOTH
def test_what_is_there_already_makes_an_event_at_once(pair):
    """So that nothing is missed between the last poll and the request."""
    pair.receive(2)
    pair.send()
    pair.arrived()
    pair.received.req_notify()
    assert pair.event() is pair.received
    assert len(pair.received.poll()) == 1
    pair.received.req_notify()
    assert pair.event(0.05) is None  # but what was polled does not count
    pair.send()
    assert pair.event() is pair.received


@BOTH
def test_asking_twice_is_asking_once(pair):
    pair.receive(4)
    pair.received.req_notify()
    pair.received.req_notify()
    pair.send()
    assert pair.event() is pair.received
    assert pair.event(0.05) is None


@BOTH
def test_solicited_only(pair):
    pair.receive(6)
    pair.received.req_notify(solicited_only=True)
    pair.send()
    pair.arrived()
    assert pair.event(0.05) is None
    pair.send(2000 // 50, solicited=True)
    assert pair.event() is pair.received
    pair.received.poll()
    pair.received.req_notify(solicited_only=True)
    pair.received.req_notify()  # any completion: asks for more, and wins
    pair.send()
    assert pair.event() is pair.received
    pair.received.poll()
    pair.received.req_notify()
    pair.received.req_notify(solicited_only=True)  # asks for less: changes nothing
    pair.send()
    assert pair.event() is pair.received


@BOTH
def test_solicited_that_is_there_already(pair):
    pair.receive(3)
    pair.send()
    pair.arrived()
    pair.received.req_notify(solicited_only=True)
    assert pair.event(0.05) is None
    pair.send(solicited=True)
    assert pair.event() is pair.received
    pair.received.req_notify(solicited_only=True)
    assert pair.event(0.05) is None  # neither has been polled, but the event has told of both
    pair.send(solicited=True)
    assert pair.event() is pair.received


@BOTH
def test_one_event_tells_once(pair):
    """A program asks for the next event before it polls: what the last one told of brings no other."""
    pair.receive(3)
    pair.received.req_notify()
    for _ in range(3):
        pair.send()
        assert pair.event() is pair.received
        pair.received.req_notify()
        assert len(pair.received.poll(16)) == 1
        assert pair.event(0.02) is None


@BOTH
def test_immediate_data_can_be_solicited(pair):
    pair.receive(1)
    pair.received.req_notify(solicited_only=True)
    pair.send(opcode=WrOpcode.RDMA_WRITE_WITH_IMM, imm=1, remote_addr=pair.target.address,
              rkey=pair.target.mr.rkey, solicited=True)
    assert pair.event() is pair.received


@BOTH
def test_errors_are_solicited(pair):
    pair.receive(1)
    pair.received.req_notify(solicited_only=True)
    pair.b.to_error()
    assert pair.event() is pair.received
    assert [one.status for one in pair.received.poll()] == [WcStatus.WR_FLUSH_ERR]


@pytest.mark.parametrize("names", [("soft0", "soft0")])
def test_many_queues_on_one_channel(pair):
    """They share a doorbell register, and all ask at once: each is heard."""
    ctx, pd = pair.b.ctx, pair.b.pd
    cqs = [ctx.create_cq(4, channel=pair.channel) for _ in range(40)]
    qps = [pd.create_qp(sq_wr=1, send_cq=cq) for cq in cqs]
    sink = pd.create_qp(rq_wr=1, receive_cq=ctx.create_cq(4))
    del sink
    for qp in qps:
        qp.connect(qp)
    for cq in cqs:
        cq.req_notify()
    for qp in qps:
        qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE))
    told = {pair.event() for _ in cqs}
    assert told == set(cqs)
    assert pair.event(0) is None


@BOTH
def test_events_must_be_acknowledged(pair):
    pair.receive(2)
    pair.received.req_notify()
    pair.send()
    cq = pair.channel.get_event(PATIENCE)
    assert cq is pair.received
    pair.b.close()
    with pytest.raises(InUseError, match="1 event"):
        cq.close()
    with pytest.raises(InvalidValueError, match="2 events"):
        cq.ack_events(2)
    cq.ack_events()
    with pytest.raises(InvalidValueError, match="waits for 0"):
        cq.ack_events()
    with pytest.raises(InvalidValueError, match="0 events"):
        cq.ack_events(0)
    cq.close()


@pytest.mark.parametrize("names", [("soft0", "soft0")])
def test_misuse(pair):
    with pytest.raises(BadStateError, match="no completion channel"):
        pair.sent.req_notify()
    collapsed = pair.b.ctx.create_cq(4, channel=pair.channel, collapsed=True)
    external = pair.b.ctx.create_cq(4, channel=pair.channel, external_datapath=True)
    for cq in (collapsed, external):
        with pytest.raises(BadStateError, match="cannot be"):
            cq.req_notify()
        with pytest.raises(BadStateError, match="cannot be polled"):
            cq.poll()
    with pytest.raises(InUseError, match="CQ"):
        pair.channel.close()
    with pytest.raises(InvalidValueError, match="timeout = -1"):
        pair.channel.get_event(-1)
    with verbs.open("soft1") as other, pytest.raises(InvalidValueError, match="another context"):
        other.create_cq(4, channel=pair.channel)
    alone = pair.b.ctx.create_comp_channel()
    alone.close()
    with pytest.raises(BadStateError, match="is closed"):
        alone.get_event(0)


@BOTH
def test_epoll(pair):
    """The descriptor is readable while events wait, and only then."""
    pair.receive(2)
    with select.epoll() as poll:
        poll.register(pair.channel, select.EPOLLIN)
        pair.received.req_notify()
        assert poll.poll(0) == []
        pair.send()
        assert [fd for fd, _ in poll.poll(PATIENCE)] == [pair.channel.fileno()]
        assert pair.event(0) is pair.received
        assert poll.poll(0) == []


@BOTH
def test_asyncio(pair):
    count = 20
    pair.receive(count)

    async def consume() -> int:
        done = 0
        pair.received.req_notify()
        async for cq in pair.channel:
            cq.ack_events()
            cq.req_notify()
            done += len(cq.poll(64))
            if done == count:
                return done
        raise AssertionError

    async def produce() -> None:
        for _ in range(count):
            pair.send()
            await asyncio.sleep(0.001)

    async def both() -> int:
        done, _ = await asyncio.gather(asyncio.wait_for(consume(), PATIENCE), produce())
        return done

    assert asyncio.run(both()) == count


def test_two_tasks_wait_for_one_channel():
    """A loop has one reader of a descriptor; each of the tasks goes on nevertheless."""
    with verbs.open("soft5") as ctx:
        channel, pd = ctx.create_comp_channel(), ctx.create_pd()
        cqs = [ctx.create_cq(4, channel=channel) for _ in range(2)]

        async def both() -> list[CQ]:
            tasks = [asyncio.create_task(anext(channel)) for _ in cqs]
            await asyncio.sleep(0)
            for cq in cqs:
                qp = pd.create_qp(sq_wr=1, send_cq=cq)
                qp.connect(qp)
                cq.req_notify()
                qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE))
            return await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)

        assert set(asyncio.run(both())) == set(cqs)
        for cq in cqs:
            cq.ack_events()


def test_lost_events_are_told(monkeypatch):
    monkeypatch.setattr(channels, "CAPACITY", 4)
    with verbs.open("soft5") as ctx:
        channel = ctx.create_comp_channel()
        cqs = [ctx.create_cq(4, channel=channel) for _ in range(6)]
        pd = ctx.create_pd()
        qps = [pd.create_qp(sq_wr=1, send_cq=cq) for cq in cqs]
        for qp, cq in zip(qps, cqs):
            qp.connect(qp)
            cq.req_notify()
            qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE))
        nic = ctx.provider.nic
        until(lambda: nic.counters["cqes"] == 6, "the completions")
        nic.engine.synchronize()
        with pytest.raises(FullError, match="2 events were lost"):
            channel.get_event(0)
        assert [channel.get_event(0) for _ in range(5)] == [*cqs[:4], None]


# --- no wake-up is lost ----------------------------------------------------------------------------------------------
#
# The consumer: take the event, ask for the next, poll until empty, wait. Whatever the interleaving with a device that
# writes completions, hears requests late, and loses a register write now and then (but not the record), the consumer
# must never wait for ever while a completion lies there. And each event brings a completion that no earlier one did.


@dataclass(frozen=True)
class Model:
    """All there is: the device's side, then the consumer's. `record` holds (sn, ci) or None."""

    pi: int = 0
    told: int = 0
    armed: bool = False
    seen: tuple[int, int] | None = None
    events: int = 0
    record: tuple[int, int] | None = None
    register: bool = False
    ci: int = 0
    sn: int = 1
    step: str = "arm"

    def hear(self) -> "Model":
        """The device looks at the record."""
        word = self.record
        if word is None or word == self.seen:
            return self
        if self.pi > max(word[1], self.told):
            return replace(self, seen=word).event()
        return replace(self, seen=word, armed=True)

    def event(self) -> "Model":
        """The device raises the event."""
        return replace(self, armed=False, told=self.pi, events=self.events + 1)

    def moves(self, most: int) -> Iterator["Model"]:
        """Every next state."""
        if self.pi < most:
            written = replace(self, pi=self.pi + 1)
            yield written.event() if self.armed else written
        if self.register:
            yield replace(self, register=False).hear()
            yield replace(self, register=False)  # another CQ's doorbell has overwritten it
        if self.hear() != self:
            yield self.hear()  # the scan
        if self.step == "arm":
            word = (self.sn % 4, self.ci)
            yield replace(self, record=word, step="ring")
        elif self.step == "ring":
            yield replace(self, register=True, step="poll")
        elif self.step == "poll":
            yield replace(self, ci=self.pi, step="wait")
            if self.ci < self.pi:
                yield replace(self, ci=self.ci + 1)
        elif self.events:
            yield replace(self, events=self.events - 1, sn=self.sn + 1, step="arm")


def test_every_state_of_the_protocol():
    """Exhaustively: from every state that can be reached, one is reached in which all completions are polled."""
    most = 5
    reached, edges, todo = {Model()}, {}, [Model()]
    while todo:
        state = todo.pop()
        edges[state] = list(state.moves(most))
        for after in edges[state]:
            if after not in reached:
                assert after.events <= 2
                reached.add(after)
                todo.append(after)
    good = {state for state in reached if state.ci == most}
    while True:
        more = {state for state in reached - good if any(after in good for after in edges[state])}
        if not more:
            break
        good |= more
    assert reached - good == set()
    # And nothing waits in vain: with no move left, nothing is left to poll.
    assert all(state.ci == state.pi for state in reached if not edges[state])
    assert len(reached) > 1000


@pytest.mark.parametrize(
    "rounds", [3_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_no_wake_up_is_lost(rounds):
    """The real thing, with random delays on both sides."""
    random = np.random.default_rng(7)
    with verbs.open("soft0") as ctx:
        channel = ctx.create_comp_channel()
        cq, pd = ctx.create_cq(256, channel=channel), ctx.create_pd()
        quiet = ctx.create_cq(4, overrun=CqOverrun.ENABLE)
        a = pd.create_qp(sq_wr=128, send_cq=cq)
        del quiet
        a.connect(a)
        pauses = (random.exponential(3e-6, rounds) * (random.random(rounds) < 0.3)).tolist()
        room = threading.Semaphore(100)

        def produce() -> None:
            for pause in pauses:
                room.acquire()
                end = time.perf_counter() + pause
                while time.perf_counter() < end:
                    pass
                a.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE))

        producer = threading.Thread(target=produce, daemon=True)
        producer.start()
        done = events = 0
        cq.req_notify()
        while done < rounds:
            got = channel.get_event(PATIENCE)
            assert got is cq, f"a wake-up was lost after {done} completions"
            events += 1
            cq.ack_events()
            cq.req_notify(solicited_only=False)
            while found := cq.poll(16):
                done += len(found)
                room.release(len(found))
        producer.join(PATIENCE)
        assert done == rounds
        assert 0 < events <= rounds + 1


# --- asynchronous events ---------------------------------------------------------------------------------------------


def told(ctx: verbs.Context) -> list[tuple[AsyncEventType, object]]:
    """All events that wait, acknowledged."""
    found = []
    while (event := ctx.get_async_event(0.05)) is not None:
        found.append((event.type, event.element))
        event.ack()
    return found


@BOTH
@pytest.mark.parametrize("wrong", ["key", "right", "queue_pair"])
def test_refused_requests(names, wrong):
    with verbs.open(names[0]) as here, verbs.open(names[1]) as there:
        near, far = here.create_pd(), there.create_pd()
        a, b = near.create_qp(sq_wr=4, send_cq=here.create_cq(4)), far.create_qp()
        rights = Access.REMOTE_READ if wrong == "queue_pair" else Access.REMOTE_WRITE
        a.connect(b, remote_access=rights)
        source = Buffer(near, 64)
        target = Buffer(far, 64, access=Access.LOCAL_WRITE if wrong == "right" else None)
        key = target.mr.rkey ^ 0x55 if wrong == "key" else target.mr.rkey
        a.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[Sge(source.address, 8, source.key)],
                           remote_addr=target.address, rkey=key))
        event = there.get_async_event(PATIENCE)
        assert event is not None
        wanted = AsyncEventType.QP_REQ_ERR if wrong == "queue_pair" else AsyncEventType.QP_ACCESS_ERR
        assert (event.type, event.element, b.state) == (wanted, b, QpState.ERR)
        with pytest.raises(InUseError, match="1 event"):
            b.close()
        event.ack()
        with pytest.raises(InvalidValueError, match="already acknowledged"):
            event.ack()
        b.close()
        assert told(there) == []
        assert told(here) == []  # the requester has its completion


@pytest.mark.parametrize("names", [("soft0", "soft0")])
def test_cq_overrun(names):
    with verbs.open(names[0]) as ctx:
        pd, small = ctx.create_pd(), ctx.create_cq(2)
        qp = pd.create_qp(sq_wr=8, send_cq=small)
        qp.connect(qp)
        qp.post_send(*(SendWr(opcode=WrOpcode.RDMA_WRITE) for _ in range(4)))
        events = []
        until(lambda: events.extend(told(ctx)) or len(events) >= 2, "both events")
        assert sorted(events, key=lambda one: one[0]) == [(AsyncEventType.CQ_ERR, small), (AsyncEventType.QP_FATAL, qp)]


def test_port():
    with verbs.open("soft0") as one, verbs.open("soft0") as other, verbs.open("soft1") as far:
        nic = one.provider.nic
        assert one.query_port().state == PortState.ACTIVE
        a, b = (ctx.create_pd().create_qp(sq_wr=1, send_cq=ctx.create_cq(2)) for ctx in (one, far))
        a.connect(b)
        nic.set_link(False)
        nic.set_link(False)
        for ctx in (one, other):  # each context of the device hears of it
            assert told(ctx) == [(AsyncEventType.PORT_ERR, 1)]
            assert ctx.query_port().state == PortState.DOWN
        assert told(far) == []
        a.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE))
        b.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE))
        time.sleep(0.05)
        assert a.init_attr.send_cq.poll() == []
        assert b.init_attr.send_cq.poll() == []
        nic.set_link(True)
        for qp in (a, b):
            until(lambda qp=qp: qp.init_attr.send_cq.poll(), "what was on its way")
        assert told(one) == [(AsyncEventType.PORT_ACTIVE, 1)]


def test_device_fatal():
    with verbs.open("soft4") as ctx:
        pd = ctx.create_pd()
        cq = ctx.create_cq(4)
        qp = pd.create_qp(sq_wr=1, send_cq=cq)
        ctx.provider.nic.fail()
        assert told(ctx) == [(AsyncEventType.DEVICE_FATAL, None)]
        for call in (lambda: ctx.create_cq(4), lambda: qp.state, lambda: qp.connect(qp)):
            with pytest.raises(DriverError, match="the device has failed"):
                call()
        qp.close()
        cq.close()


def test_async_for_and_fd():
    with verbs.open("soft0") as ctx:
        nic = ctx.provider.nic

        async def watch() -> list[AsyncEventType]:
            found = []
            async for event in ctx.async_events:
                event.ack()
                found.append(event.type)
                if len(found) == 2:
                    return found
            raise AssertionError

        async def both() -> list[AsyncEventType]:
            watching = asyncio.create_task(watch())
            await asyncio.sleep(0.01)
            nic.set_link(False)
            nic.set_link(True)
            return await asyncio.wait_for(watching, PATIENCE)

        assert asyncio.run(both()) == [AsyncEventType.PORT_ERR, AsyncEventType.PORT_ACTIVE]
        ready, *_ = select.select([ctx.async_events.fd], [], [], 0)
        assert ready == []


def test_events_of_closed_objects_are_not_told():
    with verbs.open("soft0") as ctx:
        cq, pd = ctx.create_cq(2), ctx.create_pd()
        qp = pd.create_qp(sq_wr=8, send_cq=cq)
        qp.connect(qp)
        qp.post_send(*(SendWr(opcode=WrOpcode.RDMA_WRITE) for _ in range(4)))
        until(lambda: qp.state == QpState.ERR, "the overrun")
        time.sleep(0.01)
        qp.close()
        cq.close()
        assert told(ctx) == []


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(["open", "close", "cq", "down"]), max_size=30))
def test_channels_come_and_go(steps):
    """Channels of several contexts in any order: the engine tells none that is gone."""
    with ExitStack() as stack:
        ctx = stack.enter_context(verbs.open("soft0"))
        nic, up = ctx.provider.nic, True
        others: list[verbs.Context] = []
        cqs: list[verbs.CQ] = []
        for step in steps:
            if step == "open":
                others.append(stack.enter_context(verbs.open("soft0")))
            elif step == "close" and others:
                others.pop(0).close()
            elif step == "cq" and others:
                cqs.append(others[-1].create_cq(2, channel=others[-1].create_comp_channel()))
            elif step == "down":
                up = not up
                nic.set_link(up)
        wanted = [AsyncEventType.PORT_ERR, AsyncEventType.PORT_ACTIVE]
        expected = list(itertools.islice(itertools.cycle(wanted), steps.count("down")))
        assert [kind for kind, _ in told(ctx)] == expected
        nic.set_link(True)


def test_types_of_the_prm():
    numbers = {"COMPLETION": 0, "COMM_EST": 2, "CQ_ERROR": 4, "WQ_CATAS_ERROR": 5, "INTERNAL_ERROR": 8,
               "PORT_CHANGE": 9, "WQ_INVAL_REQ_ERROR": 0x10, "WQ_ACCESS_ERROR": 0x11, "SRQ_LAST_WQE": 0x13,
               "SRQ_RQ_LIMIT": 0x14}
    assert {name: EventType[name].value for name in numbers} == numbers
