"""Machines of the connection manager, on a wire and a clock that the test controls, and the programs that use them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from gpunetio.cm.communication import Communication, State, Terms
from gpunetio.cm.event import Event, EventType
from gpunetio.cm.machine import Machine
from gpunetio.cm.messages import Message, parse
from gpunetio.cm.path import Path
from gpunetio.cm.times import LINUX, Times
from gpunetio.formats.cm import Attribute, PortSpace

PORT = 7174
FOREVER = 1e6  # seconds


def gid(host: int) -> bytes:
    return bytes(10) + b"\xff\xff" + bytes([10, 77, 9, host])


@dataclass
class Flying:
    """A MAD under way: from which GID, and to which."""

    source: bytes
    destination: bytes
    mad: bytes

    @property
    def message(self) -> Message:
        message = parse(self.mad)
        assert message is not None
        return message


@dataclass(eq=False)
class Host:
    """A machine and its programs: one answers every request by `decide`, one notes every event."""

    gid: bytes
    machine: Machine
    decide: Callable[["Host", Communication, Event], None]
    qpn: int
    events: dict[Communication, list[Event]] = field(default_factory=dict)

    def listen(self, **options) -> None:
        space = options.pop("space", PortSpace.TCP)
        self.listening = self.machine.listen(
            space, options.pop("port", PORT), options.pop("gid", None), options.pop("backlog", 64), self.notify,
            **options,
        )

    def terms(self) -> Terms:
        self.qpn += 1
        return Terms(qpn=self.qpn, psn=self.qpn * 7 & 0xFFFFFF)

    def connect(self, to: "Host", *, own: Terms | None = None, times: Times = LINUX, port: int = PORT,
                private_data: bytes = b"") -> Communication:
        return self.machine.connect(
            Path(to.gid), port, own or self.terms(), self.notify, private_data=private_data, times=times
        )

    def notify(self, communication: Communication, event: Event) -> None:
        self.events.setdefault(communication, []).append(event)
        self.decide(self, communication, event)

    def told(self, communication: Communication) -> list[EventType]:
        return [event.type for event in self.events.get(communication, [])]

    def established(self) -> set[tuple[int, int, int, int]]:
        """Both IDs and queue pairs of each connection that is established here, the active end's first."""
        ends = set()
        for communication in self.machine.communications():
            if communication.state is State.ESTABLISHED:
                assert communication.own is not None
                assert communication.peer is not None
                here = communication.local_id, communication.own.qpn
                there = communication.remote_id, communication.peer.qpn
                ends.add((*here, *there) if communication.listener is None else (*there, *here))
        return ends

    def holds_nothing(self) -> bool:
        """Whether the machine has forgotten everything but its listeners."""
        common = self.machine._common
        waiting = any(there.waiting for those in self.machine._listeners._listeners.values() for there in those)
        return not (
            len(self.machine) or len(common.timers) or common.by_remote or common.by_qpn or waiting
            or len(self.machine._datagrams)
        )


def accept_all(host: Host, communication: Communication, event: Event) -> None:
    """Be a program that accepts, and confirms."""
    if event.type is EventType.REQUEST and communication.state is State.SIDR_REQ_RECEIVED:
        return
    if event.type is EventType.REQUEST:
        host.machine.accept(communication, host.terms(), b"welcome")
    elif event.type is EventType.RESPONSE and communication.state is State.REP_RECEIVED:
        host.machine.confirm(communication)


def watch(host: Host, communication: Communication, event: Event) -> None:
    """Be a program that does nothing."""


class World:
    """Hosts, and what is under way between them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.flying: list[Flying] = []
        self.hosts: dict[bytes, Host] = {}

    def host(self, number: int, decide: Callable[[Host, Communication, Event], None] = accept_all) -> Host:
        own = gid(number)

        def send(path: Path, mad: bytes) -> None:
            self.flying.append(Flying(own, path.gid, mad))

        machine = Machine(number, [own, bytes(16)], lambda: self.now, send)
        made = self.hosts[own] = Host(own, machine, decide, qpn=number << 12)
        return made

    def deliver(self, flying: Flying) -> None:
        host = self.hosts.get(flying.destination)
        if host is not None:
            host.machine.receive(Path(flying.source), flying.mad)

    def run(self, lose: Callable[[Flying], bool] = lambda flying: False) -> list[Attribute]:
        """Deliver everything but what gets lost. Return which messages arrived."""
        arrived = []
        while self.flying:
            flying = self.flying.pop(0)
            if not lose(flying):
                arrived.append(flying.message.attribute)
                self.deliver(flying)
        return arrived

    def advance(self) -> bool:
        """Let the clock go on to when something is due. Return whether something was."""
        dues = [due for host in self.hosts.values() if (due := host.machine.tick()) is not None]
        if not dues:
            return False
        self.now = max(self.now, min(dues))
        for host in self.hosts.values():
            host.machine.tick()
        return True

    def settle(self, lose: Callable[[Flying], bool] = lambda flying: False) -> None:
        """Deliver, and let the clock go on, until nothing is under way and nothing due."""
        self.run(lose)
        while self.advance():
            assert self.now < FOREVER, "the hosts never come to rest"
            self.run(lose)
