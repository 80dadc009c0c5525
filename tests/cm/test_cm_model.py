"""Random programs of two hosts that connect, on a wire that loses, repeats, delays and reorders what they say.

The model is what both ends must come to: the same connections, or none. It knows nothing of messages.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cm_machines import FOREVER, Host, World
from gpunetio.cm.communication import Communication, State
from gpunetio.cm.event import Event, EventType

_REQUEST = State.REQ_RECEIVED, State.MRA_REQ_SENT
_OVER = State.IDLE, State.TIMEWAIT
# A message is sent 16 times. A wire that loses fewer than these, or holds them back for shorter, cannot separate two
# ends: only programs can end a connection.
_PATIENCE = 10
_MOST = 5  # connections: each may have to ask once more for every one that has filled a backlog before it


class Connections(RuleBasedStateMachine):
    """Both hosts ask and are asked. Their programs answer requests when a rule says so."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.hosts = [self.world.host(number, self.decide) for number in (1, 2)]
        self.waiting: list[tuple[Host, Communication]] = []  # requests
        self.asked: list[tuple[Host, Communication]] = []
        self.refused: set[int] = set()  # asking queue pairs of connections that a program has refused: it may ask again
        self.ended: set[int] = set()  # of those that a program has ended
        self.hurt = 0

    @initialize(backlog=st.integers(2, 4))
    def listen(self, backlog: int) -> None:
        for host in self.hosts:
            host.listen(backlog=backlog)

    def decide(self, host: Host, communication: Communication, event: Event) -> None:
        if event.type is EventType.REQUEST:
            self.waiting.append((host, communication))
        elif event.type is EventType.RESPONSE:
            host.machine.confirm(communication)

    # --- programs

    @precondition(lambda self: len(self.asked) < _MOST)
    @rule(who=st.integers(0, 1))
    def connect(self, who: int) -> None:
        host, peer = self.hosts[who], self.hosts[1 - who]
        self.asked.append((host, host.connect(peer)))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), accept=st.sampled_from([True, True, True, False]))
    def answer(self, data: st.DataObject, accept: bool) -> None:
        host, communication = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        if communication.state not in _REQUEST:
            return
        if accept:
            host.machine.accept(communication, host.terms())
        else:
            self.end(communication)
            host.machine.reject(communication)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """The program closes a connection of any state, at either end."""
        everything = [(host, one) for host in self.hosts for one in host.machine.communications()]
        if everything:
            host, communication = everything[data.draw(st.integers(0, len(everything) - 1))]
            self.end(communication)
            host.machine.give_up(communication)

    def end(self, communication: Communication) -> None:
        """Note that a program ends a connection, by the queue pair that has asked for it."""
        asking = communication.own if communication.listener is None else communication.peer
        assert asking is not None
        (self.refused if communication.state in _REQUEST else self.ended).add(asking.qpn)

    # --- the wire and the clock

    @precondition(lambda self: self.world.flying)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        self.world.deliver(self.world.flying.pop(data.draw(st.integers(0, len(self.world.flying) - 1))))

    @precondition(lambda self: self.world.flying)
    @rule()
    def deliver_all(self) -> None:
        self.world.run()

    @precondition(lambda self: self.world.flying)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self.world.flying.append(self.world.flying[data.draw(st.integers(0, len(self.world.flying) - 1))])

    @precondition(lambda self: self.world.flying and self.hurt < _PATIENCE)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.hurt += 1
        self.world.flying.pop(data.draw(st.integers(0, len(self.world.flying) - 1)))

    @precondition(lambda self: self.hurt < _PATIENCE)
    @rule()
    def wait(self) -> None:
        self.hurt += bool(self.world.flying or self.waiting)  # who has asked gives up some time
        self.world.advance()

    # --- what must be true

    @invariant()
    def backlogs_are_bounded(self) -> None:
        for host in self.hosts:
            listening = getattr(host, "listening", None)
            assert listening is None or len(listening.waiting) <= listening.backlog

    @invariant()
    def no_program_hears_of_an_end_twice(self) -> None:
        for host in self.hosts:
            for communication in host.events:
                told = host.told(communication)
                ends = sum(kind in (EventType.DISCONNECTED, EventType.REJECTED, EventType.UNREACHABLE) for kind in told)
                assert ends <= 1
                assert told.count(EventType.TIMEWAIT_EXIT) <= 1

    def teardown(self) -> None:
        """Let the wire be perfect and the programs answer: both ends agree, and in the end nothing is left."""
        working = True
        while working:
            while self.waiting:
                host, communication = self.waiting.pop()
                if communication.state in _REQUEST:
                    host.machine.accept(communication, host.terms())
            self.world.run()
            working = bool(self.waiting) or self.world.advance()
            assert self.world.now < FOREVER
        one, other = self.hosts
        assert one.established() == other.established()
        for host, communication in self.asked:
            assert communication.own is not None
            qpn, over = communication.own.qpn, communication.state in _OVER
            if qpn in self.ended:
                assert over
            elif qpn not in self.refused:
                assert communication.state is State.ESTABLISHED, host.told(communication)
        for communication in one.machine.communications():
            one.machine.give_up(communication)
        self.world.settle()
        assert all(host.holds_nothing() for host in self.hosts)


TestConnections = Connections.TestCase
TestConnections.settings = settings(stateful_step_count=40)
