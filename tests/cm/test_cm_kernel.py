"""What the kernel's connection manager tells by librdmacm becomes events and states: each event, told by a stand-in.

Numbers of events are those of `enum rdma_cm_event_type` (rdma_cma.h); what follows each is in the manual pages
rdma_get_cm_event(3), rdma_resolve_addr(3), rdma_init_qp_attr(3) and rdma_disconnect(3).
"""

from types import SimpleNamespace
from typing import Any

import pytest

from gpunetio import LinkLayer
from gpunetio.cm import EventType, rdmacm
from gpunetio.cm.address import gid_of
from gpunetio.cm.communication import Communication, Listening, State, Terms
from gpunetio.cm.event import Event
from gpunetio.cm.path import Path
from gpunetio.cm.rdmacm import KernelMachine
from gpunetio.errors import DriverError, NotSupportedError
from gpunetio.formats.cm import PortSpace
from gpunetio.providers.mlx5.rdmacm import CmEvent

ADDR_RESOLVED, ADDR_ERROR, ROUTE_RESOLVED, ROUTE_ERROR, CONNECT_REQUEST, CONNECT_RESPONSE = range(6)
CONNECT_ERROR, UNREACHABLE, REJECTED, ESTABLISHED, DISCONNECTED, DEVICE_REMOVAL = range(6, 12)
MULTICAST_JOIN, MULTICAST_ERROR, ADDR_CHANGE, TIMEWAIT_EXIT = range(12, 16)
HERE, PEER = gid_of("10.0.0.1"), gid_of("10.0.0.2")
OWN = Terms(qpn=0x17, psn=5, responder_resources=3, initiator_depth=2)


class Kernel:
    """What the kernel was asked, and has to tell. `fails` are the calls that it refuses."""

    def __init__(self) -> None:
        self.events: list[CmEvent] = []
        self.calls: list[tuple[object, ...]] = []
        self.fails: set[str] = set()
        self.devices: dict[int, str] = {}  # by id; of those that are not here, mlx5_0

    def channel(self) -> Any:
        return SimpleNamespace(fd=0, get=lambda: self.events.pop(0) if self.events else None, close=lambda: None)

    def cm_id(self, channel: object, number: int = 0) -> "Id":
        return Id(self, number or 1 + sum(call[0] == "create" for call in self.calls))

    def tell(self, kind: int, number: int, **more: Any) -> None:
        self.events.append(CmEvent(kind, **{
            "status": 0, "number": number, "listener": 0, "private_data": b"", "responder_resources": 4,
            "initiator_depth": 6, **more,
        }))


class Id:
    """An `rdma_cm_id` of the stand-in."""

    def __init__(self, kernel: Kernel, number: int):
        self._kernel, self.number = kernel, number
        self.peer = PEER, 4000
        kernel.calls.append(("create", number))

    @property
    def device(self) -> str:
        return self._kernel.devices.get(self.number, "mlx5_0")

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> Any:
            if name in self._kernel.fails:
                raise DriverError(f"{name} is refused")
            self._kernel.calls.append((name, self.number))
            if name == "attributes":
                grh = SimpleNamespace(
                    dgid=SimpleNamespace(raw=PEER), sgid_index=3, hop_limit=64, traffic_class=0x68, flow_label=0
                )
                return SimpleNamespace(
                    dest_qp_num=0x99, rq_psn=0x111, sq_psn=0x222, path_mtu=3, timeout=14, rnr_retry=6, retry_cnt=5,
                    ah_attr=SimpleNamespace(grh=grh, sl=2),
                )
            return None

        return call


class World:
    """A machine on the stand-in, and what it has told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.kernel = Kernel()
        monkeypatch.setattr(rdmacm, "CmChannel", self.kernel.channel)
        monkeypatch.setattr(rdmacm, "CmId", self.kernel.cm_id)
        device: Any = SimpleNamespace(
            name="mlx5_0", query_device=lambda: SimpleNamespace(link_layer=LinkLayer.ETHERNET),
            query_gid=lambda port, index: HERE,
        )
        self.machine = KernelMachine(device, 1)
        self.told: list[tuple[Communication, Event]] = []

    def notify(self, communication: Communication, event: Event) -> None:
        self.told.append((communication, event))

    def connecting(self) -> Communication:
        made = self.machine.connect(Path(PEER), 4000, OWN, self.notify, private_data=b"hello")
        self.kernel.calls.clear()
        return made

    def listening(self) -> Listening:
        made = self.machine.listen(PortSpace.TCP, 4000, HERE, 8, self.notify)
        self.kernel.calls.clear()
        return made

    def take(self, kind: int, number: int = 1, **more: Any) -> tuple[list[str], list[EventType]]:
        """Tell one event. Return what the kernel was asked then, and what the program was told."""
        self.kernel.tell(kind, number, **more)
        self.kernel.calls.clear()
        self.told.clear()
        self.machine.take()
        return [str(name) for name, *_ in self.kernel.calls], [event.type for _, event in self.told]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


TERMS = ["attributes", "attributes"]  # for RTR and RTS


@pytest.mark.parametrize(("kind", "asked", "told", "state"), [
    (ADDR_RESOLVED,    ["resolve_route"], [],                        State.REQ_SENT),
    (ROUTE_RESOLVED,   ["connect"],       [],                        State.REQ_SENT),
    (CONNECT_RESPONSE, TERMS,             [EventType.RESPONSE],      State.REP_RECEIVED),
    (ESTABLISHED,      [],                [EventType.ESTABLISHED],   State.ESTABLISHED),
    (DISCONNECTED,     ["disconnect"],    [EventType.DISCONNECTED],  State.TIMEWAIT),
    (TIMEWAIT_EXIT,    ["close"],         [EventType.TIMEWAIT_EXIT], State.IDLE),
    (REJECTED,         ["close"],         [EventType.REJECTED],      State.IDLE),
    (ADDR_ERROR,       ["close"],         [EventType.UNREACHABLE],   State.IDLE),
    (ROUTE_ERROR,      ["close"],         [EventType.UNREACHABLE],   State.IDLE),
    (CONNECT_ERROR,    ["close"],         [EventType.UNREACHABLE],   State.IDLE),
    (UNREACHABLE,      ["close"],         [EventType.UNREACHABLE],   State.IDLE),
    (DEVICE_REMOVAL,   [],                [],                        State.REQ_SENT),
    (MULTICAST_JOIN,   [],                [],                        State.REQ_SENT),
    (MULTICAST_ERROR,  [],                [],                        State.REQ_SENT),
    (ADDR_CHANGE,      [],                [],                        State.REQ_SENT),
])
def test_an_event_of_who_connects(world, kind, asked, told, state):
    made = world.connecting()
    assert world.take(kind) == (asked, told)
    assert made.state is state
    assert len(world.machine) == (state is not State.IDLE)


def test_the_way_of_a_connection(world):
    """The kernel shows both numbers of READs from the side of who is told."""
    made = world.connecting()
    for kind in (ADDR_RESOLVED, ROUTE_RESOLVED, CONNECT_RESPONSE):
        world.take(kind, private_data=b"welcome")
    ((_, event),) = world.told
    assert event.private_data == b"welcome"
    assert made.peer == Terms(
        qpn=0x99, psn=0x222, mtu=1024, responder_resources=6, initiator_depth=4, rnr_retry=6, retry_count=5
    )
    assert (made.psn, made.ack_timeout) == (0x111, 14)
    assert made.data_path == Path(PEER, 3, 64, 0x68, 2)
    world.machine.confirm(made)
    assert made.state is State.ESTABLISHED
    world.machine.disconnect(made)
    assert world.take(DISCONNECTED) == ([], [EventType.DISCONNECTED])  # this end has begun: there is nothing to answer
    assert world.take(TIMEWAIT_EXIT) == (["close"], [EventType.TIMEWAIT_EXIT])


def test_a_refusal_says_why(world):
    world.connecting()
    world.take(REJECTED, status=28, private_data=b"no")
    ((_, event),) = world.told
    assert (event.reason, event.private_data) == (28, b"no")


def test_an_address_behind_another_device(world):
    made = world.connecting()
    world.kernel.devices[1] = "mlx5_1"
    assert world.take(ADDR_RESOLVED) == (["close"], [EventType.UNREACHABLE])
    assert made.state is State.IDLE


@pytest.mark.parametrize(("kind", "call"), [
    (ADDR_RESOLVED, "resolve_route"), (ROUTE_RESOLVED, "connect"), (CONNECT_RESPONSE, "attributes"),
])
def test_a_step_that_the_kernel_refuses(world, kind, call):
    made = world.connecting()
    world.kernel.fails.add(call)
    assert world.take(kind) == (["close"], [EventType.UNREACHABLE])
    assert made.state is State.IDLE


def test_a_request(world):
    listener = world.listening()
    asked, told = world.take(CONNECT_REQUEST, 7, listener=1, private_data=b"hello")
    assert (asked, told) == (["create", *TERMS], [EventType.REQUEST])
    ((made, event),) = world.told
    assert (made.state, made.listener, event.private_data) == (State.REQ_RECEIVED, listener, b"hello")
    assert list(listener.waiting) == [made]
    world.machine.accept(made, OWN)
    assert (made.state, list(listener.waiting)) == (State.REP_SENT, [])
    assert world.take(ESTABLISHED, 7) == ([], [EventType.ESTABLISHED])


@pytest.mark.parametrize("what", ["its listener is gone", "it came by another device", "its attributes are refused"])
def test_a_request_that_leads_nowhere(world, what):
    """Its id is destroyed, which refuses it, and nobody is told."""
    listener = world.listening()
    if what == "it came by another device":
        world.kernel.devices[7] = "mlx5_1"
    if what == "its attributes are refused":
        world.kernel.fails.add("attributes")
    asked, told = world.take(CONNECT_REQUEST, 7, listener=2 if what == "its listener is gone" else 1)
    assert (asked, told) == (["create", "close"], [])
    assert (len(world.machine), len(listener.waiting)) == (0, 0)


def test_the_end_of_a_listener_refuses_who_waits(world):
    listener = world.listening()
    world.take(CONNECT_REQUEST, 7, listener=1)
    world.kernel.calls.clear()
    world.machine.stop_listening(listener)
    assert world.kernel.calls == [("close", 7), ("close", 1)]


@pytest.mark.parametrize("call", ["resolve_address", "listen"])
def test_what_the_kernel_refuses_leaves_nothing(world, call):
    world.kernel.fails.add(call)
    with pytest.raises(DriverError, match=f"{call} is refused"):
        world.connecting() if call == "resolve_address" else world.listening()
    assert world.kernel.calls == [("create", 1), ("close", 1)]
    assert len(world.machine) == 0


def test_datagrams_are_for_software_nics(world):
    with pytest.raises(NotSupportedError, match="SIDR"):
        world.machine.listen(PortSpace.UDP, 4000, HERE, 8, world.notify)
    with pytest.raises(NotSupportedError, match="SIDR"):
        world.machine.resolve(Path(PEER), 4000, world.notify)
