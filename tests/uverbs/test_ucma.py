"""The connection manager as programs write to it: whatever they write, they get an errno, and nothing is left over."""

import contextlib
import errno
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from ctypes import addressof, create_string_buffer, string_at
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio.cm.communication import State
from gpunetio.errors import DocaError
from gpunetio.formats.cm import PortSpace, RejectReason, SidrStatus
from gpunetio.formats.layout import Entry
from gpunetio.nic.engine.port import Port, PortConfig
from gpunetio.uverbs import sysfs, ucma_abi
from gpunetio.uverbs.call import Refused
from gpunetio.uverbs.calls import Calls, _guarded
from gpunetio.uverbs.environment import FOLDER
from gpunetio.uverbs.sockaddr import Address, of_gid, parse
from gpunetio.uverbs.ucma_abi import Command, Event, Level, Option
from gpunetio.uverbs.ucma_ids import CmId
from nic_rig import until

pytestmark = [pytest.mark.soft_nic, pytest.mark.host_memory]

ROOM = 4096
NAMES = "soft6", "soft7"
HERE = socket.inet_aton("127.0.0.7")
DEADLINE = 10.0
CLIENTS_QP, SERVERS_QP = 0x77, 0x88
IPOIB = 2  # RDMA_PS_IPOIB
Q_KEY = 0x1234567


class Program:
    """A program that has the device file open, and another one with the same calls if `calls` is given."""

    def __init__(self, calls: Calls):
        self.calls = calls
        self.descriptor = os.open("/dev/null", os.O_RDWR)
        self.file = calls.open(b"rdma_cm", self.descriptor)
        self.memory = create_string_buffer(ROOM)

    def write(self, number: int, layout: Entry, room: int = 0, **fields: int | bytes) -> int:
        if "response" in layout.offsets:
            fields.setdefault("response", addressof(self.memory))
        data = struct.pack("<IHH", number, layout.size, room) + layout.pack(**fields)
        return self.write_raw(data)

    def write_raw(self, data: bytes) -> int:
        self.command = create_string_buffer(data, len(data))
        result = _guarded(self.calls.write)(self.file, addressof(self.command), len(data))
        return 0 if result == len(data) else result

    def answer(self, layout: Entry) -> dict[str, int]:
        found = layout.at(string_at(addressof(self.memory), layout.size))
        return {name: int(found[name]) for name in layout.offsets if found[name].dtype.kind == "u"}

    def create(self, uid: int = 1, space: PortSpace = PortSpace.TCP) -> int:
        done = self.write(Command.CREATE_ID, ucma_abi.CREATE_ID, ucma_abi.CREATE_ID_RESP.size, uid=uid, ps=space)
        assert done == 0
        return self.answer(ucma_abi.CREATE_ID_RESP)["id"]

    def destroy(self, cm_id: int) -> int:
        """How many events the program had taken."""
        done = self.write(Command.DESTROY_ID, ucma_abi.DESTROY_ID, ucma_abi.DESTROY_ID_RESP.size, id=cm_id)
        assert done == 0
        return self.answer(ucma_abi.DESTROY_ID_RESP)["events_reported"]

    def bind(self, cm_id: int, address: bytes = HERE, port: int = 0) -> int:
        return self.write(Command.BIND_IP, ucma_abi.BIND_IP, addr=in4(address, port), id=cm_id)

    def choose(self, cm_id: int, option: Option) -> None:
        value = create_string_buffer(struct.pack("<I", 1), 4)
        done = self.write(
            Command.SET_OPTION, ucma_abi.SET_OPTION, id=cm_id, level=Level.ID, optname=option, optlen=4,
            optval=addressof(value),
        )
        assert done == 0

    def listen(self, cm_id: int, port: int, address: bytes = HERE) -> None:
        assert self.bind(cm_id, address, port) == 0
        assert self.write(Command.LISTEN, ucma_abi.LISTEN, id=cm_id, backlog=3) == 0

    def event(self) -> tuple[Event, dict[str, int], dict[str, int]]:
        """The next event, and what it says of the connection."""
        assert self.waits_for_event(DEADLINE)
        assert self.write(Command.GET_EVENT, ucma_abi.GET_EVENT, ucma_abi.EVENT_RESP.size) == 0
        found = self.answer(ucma_abi.EVENT_RESP)
        param = ucma_abi.CONN_PARAM.at(string_at(addressof(self.memory) + ucma_abi.EVENT_RESP.param, 272))
        return Event(found["event"]), found, {"qp_num": int(param["qp_num"])}

    def waits_for_event(self, seconds: float) -> bool:
        return bool(select.select([self.descriptor], [], [], seconds)[0])

    def resolve(self, cm_id: int, port: int, address: bytes = HERE) -> None:
        done = self.write(
            Command.RESOLVE_IP, ucma_abi.RESOLVE_IP, dst_addr=in4(address, port), id=cm_id, timeout_ms=1000
        )
        assert (done, self.event()[0]) == (0, Event.ADDR_RESOLVED)
        assert self.write(Command.RESOLVE_ROUTE, ucma_abi.RESOLVE_ROUTE, id=cm_id, timeout_ms=1000) == 0
        assert self.event()[0] is Event.ROUTE_RESOLVED

    def connect(self, cm_id: int) -> int:
        return self.write(Command.CONNECT, ucma_abi.CONNECT, id=cm_id, conn_param=param(CLIENTS_QP))

    def accept(self, cm_id: int, uid: int = 0) -> int:
        return self.write(Command.ACCEPT, ucma_abi.ACCEPT, id=cm_id, uid=uid, conn_param=param(SERVERS_QP))

    def close(self) -> None:
        os.close(self.descriptor)
        assert _guarded(self.calls.close)(self.file) == 0


def param(qp_number: int) -> bytes:
    return ucma_abi.CONN_PARAM.pack(
        qp_num=qp_number, responder_resources=1, initiator_depth=1, retry_count=7, rnr_retry_count=7, valid=1
    )


def in4(address: bytes, port: int) -> bytes:
    return struct.pack("<H", socket.AF_INET) + struct.pack(">H", port) + address + bytes(20)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calls]:
    root = tmp_path_factory.mktemp("uverbs")
    ports = [(name, PortConfig()) for name in NAMES]
    sysfs.build(root, {name: Port(port, f"127.0.0.{n + 7}") for n, (name, port) in enumerate(ports)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(root))
        made = Calls(ports, lambda descriptor: True)
        yield made
        made.manager.close()


@pytest.fixture
def program(calls: Calls) -> Iterator[Program]:
    opened = Program(calls)
    yield opened
    opened.close()
    assert calls.manager.ids() == []


def connected(program: Program, port: int) -> tuple[int, int, int]:
    """A listener, and the identifiers of both ends of a connection to it."""
    listener, client = program.create(uid=1), program.create(uid=2)
    program.listen(listener, port)
    program.resolve(client, port)
    assert program.connect(client) == 0
    event, found, said = program.event()
    assert (event, found["uid"], said) == (Event.CONNECT_REQUEST, 1, {"qp_num": CLIENTS_QP})
    there = found["id"]
    assert program.accept(there, uid=3) == 0
    event, found, said = program.event()
    assert (event, found["uid"], said) == (Event.CONNECT_RESPONSE, 2, {"qp_num": SERVERS_QP})
    assert program.accept(client) == 0
    event, found, _ = program.event()
    assert (event, found["uid"], found["id"]) == (Event.ESTABLISHED, 3, there)
    return listener, client, there


def test_a_connection_comes_about_and_ends(program, port):
    listener, client, there = connected(program, port)
    assert program.write(Command.DISCONNECT, ucma_abi.DISCONNECT, id=client) == 0
    told = [program.event()[:2] for _ in range(2)]
    assert {(event, found["uid"]) for event, found in told} == {(Event.DISCONNECTED, 2), (Event.DISCONNECTED, 3)}
    assert program.write(Command.DISCONNECT, ucma_abi.DISCONNECT, id=there) == 0
    assert not program.waits_for_event(0)
    assert [program.destroy(cm_id) for cm_id in (there, client, listener)] == [2, 4, 1]


def test_attributes_of_queue_pairs(program, port):
    """Each end is told the number and the PSN of the other."""
    _, client, there = connected(program, port)
    seen = {}
    for cm_id in client, there:
        for state in 1, 2, 3:
            done = program.write(
                Command.INIT_QP_ATTR, ucma_abi.INIT_QP_ATTR, ucma_abi.QP_ATTR.size, id=cm_id, qp_state=state
            )
            assert done == 0
            seen[cm_id, state] = program.answer(ucma_abi.QP_ATTR)
    for one, other, number in (client, there, SERVERS_QP), (there, client, CLIENTS_QP):
        assert seen[one, 2]["dest_qp_num"] == number
        assert seen[one, 2]["rq_psn"] == seen[other, 3]["sq_psn"]
        assert [seen[one, state]["qp_state"] for state in (1, 2, 3)] == [1, 2, 3]
    again = program.write(
        Command.INIT_QP_ATTR, ucma_abi.INIT_QP_ATTR, ucma_abi.QP_ATTR.size, id=client, qp_state=6
    )
    assert again == -errno.EINVAL


def test_datagrams(program, port):
    """The client learns where they go: nothing is connected, and nothing ends."""
    listener, client = program.create(uid=1, space=PortSpace.UDP), program.create(uid=2, space=PortSpace.UDP)
    program.listen(listener, port)
    assert program.bind(program.create(), port=port) == 0  # connections have ports of their own
    program.resolve(client, port)
    assert program.connect(client) == 0
    event, found, _ = program.event()
    assert (event, found["uid"]) == (Event.CONNECT_REQUEST, 1)
    assert program.accept(found["id"], uid=3) == 0
    event, found, _ = program.event()
    assert (event, found["uid"], found["status"]) == (Event.ESTABLISHED, 2, 0)
    said = ucma_abi.UD_PARAM.at(string_at(addressof(program.memory) + ucma_abi.EVENT_RESP.param, 304))
    assert (int(said["qp_num"]), int(said["qkey"])) == (SERVERS_QP, Q_KEY)
    assert said["ah_attr"].tobytes()[:16] == bytes(10) + b"\xff\xff" + HERE
    done = program.write(
        Command.INIT_QP_ATTR, ucma_abi.INIT_QP_ATTR, ucma_abi.QP_ATTR.size, id=client, qp_state=1
    )
    assert (done, program.answer(ucma_abi.QP_ATTR)["qkey"]) == (0, Q_KEY)


@pytest.mark.parametrize("listens, status", [
    (True, SidrStatus.REJECTED), (False, SidrStatus.SERVICE_NOT_SUPPORTED),
])
def test_datagrams_for_nobody(program, port, listens, status):
    listener, client = program.create(uid=1, space=PortSpace.UDP), program.create(uid=2, space=PortSpace.UDP)
    if listens:
        program.listen(listener, port)
    program.resolve(client, port)
    assert program.connect(client) == 0
    if listens:
        assert program.write(Command.REJECT, ucma_abi.REJECT, id=program.event()[1]["id"]) == 0
    event, found, _ = program.event()
    assert (event, found["status"]) == (Event.UNREACHABLE, status)


def test_nobody_listens(program, port):
    client = program.create()
    program.resolve(client, port)
    assert program.connect(client) == 0
    event, found, _ = program.event()
    assert (event, found["status"]) == (Event.REJECTED, RejectReason.INVALID_SERVICE_ID)


def test_a_request_is_rejected(program, port):
    listener, client = program.create(uid=1), program.create(uid=2)
    program.listen(listener, port)
    program.resolve(client, port)
    assert program.connect(client) == 0
    there = program.event()[1]["id"]
    assert program.write(Command.REJECT, ucma_abi.REJECT, id=there, reason=8) == -errno.EINVAL
    assert program.write(Command.REJECT, ucma_abi.REJECT, id=there, private_data_len=3) == 0
    event, found, _ = program.event()
    assert (event, found["status"], found["uid"]) == (Event.REJECTED, RejectReason.CONSUMER, 2)
    assert program.accept(there, uid=3) == -errno.EINVAL


def test_a_listener_that_leaves_rejects(program, port):
    """Also what the program has not seen."""
    listener, client = program.create(uid=1), program.create(uid=2)
    program.listen(listener, port)
    program.resolve(client, port)
    assert program.connect(client) == 0
    assert program.waits_for_event(DEADLINE)
    assert program.destroy(listener) == 0
    assert program.event()[0] is Event.REJECTED


def test_requests_that_are_given_up_are_withdrawn(calls, program, port):
    """Strangers who ask and give up fill no memory while the program takes no events."""
    listener = Program(calls)
    listener.listen(listener.create(uid=1), port)
    for _ in range(5):
        client = program.create(uid=2)
        program.resolve(client, port)
        assert program.connect(client) == 0
        assert listener.waits_for_event(DEADLINE)
        assert program.destroy(client) == 2  # events: its address and its route
        until(lambda: not listener.waits_for_event(0), "the request to be withdrawn")
    assert len(calls.manager.ids()) == 1
    listener.close()


def test_a_closed_channel_disconnects(calls, program, port):
    other = Program(calls)
    listener = other.create(uid=1)
    other.listen(listener, port)
    client = program.create(uid=2)
    program.resolve(client, port)
    assert program.connect(client) == 0
    assert other.accept(other.event()[1]["id"], uid=3) == 0
    assert program.event()[0] is Event.CONNECT_RESPONSE
    assert program.accept(client) == 0
    assert other.event()[0] is Event.ESTABLISHED
    other.close()
    assert program.event()[0] is Event.DISCONNECTED


def test_a_peer_whose_process_has_ended(calls, program, port):
    """The watch asks who has the peer's address: another process, now."""
    _, client, there = connected(program, port)
    watch = calls.manager._watch
    communications = {calls.manager.get(number).communication for number in (client, there)}
    watch._owners.update(dict.fromkeys(communications, os.getpid() + 1))
    watch.look()
    assert {program.event()[0] for _ in range(2)} == {Event.DISCONNECTED}
    assert {communication.state for communication in communications} == {State.TIMEWAIT}


def test_a_wildcard_listens_at_all_devices(program, port):
    listener, client = program.create(uid=1), program.create(uid=2)
    program.listen(listener, port, address=bytes(4))
    program.resolve(client, port, address=socket.inet_aton("127.0.0.8"))
    assert program.connect(client) == 0
    event, found, _ = program.event()
    assert (event, found["uid"]) == (Event.CONNECT_REQUEST, 1)
    done = program.write(
        Command.QUERY_ROUTE, ucma_abi.QUERY, ucma_abi.QUERY_ROUTE_RESP.size, id=found["id"]
    )
    assert done == 0
    route = ucma_abi.QUERY_ROUTE_RESP.at(string_at(addressof(program.memory), ucma_abi.QUERY_ROUTE_RESP.size))
    folder = Path(os.environ[FOLDER], "sys/class/infiniband", NAMES[1])
    assert route["node_guid"].tobytes().hex(":", 2) == (folder / "node_guid").read_text().strip()
    assert parse(route["src_addr"].tobytes()) == Address(
        socket.AF_INET, bytes(10) + b"\xff\xff" + socket.inet_aton("127.0.0.8"), port
    )


def test_a_port_is_used_once(program, port):
    first, second = program.create(), program.create()
    assert program.bind(first, port=port) == 0
    assert program.bind(second, port=port) == -errno.EADDRINUSE
    assert program.bind(second, address=bytes(4), port=port) == -errno.EADDRNOTAVAIL
    assert program.bind(second) == 0
    assert program.bind(second) == -errno.EINVAL


def test_ports_that_may_be_shared(program, port):
    """Both allow it, and nobody listens."""
    first, second, third = program.create(), program.create(), program.create()
    for cm_id in first, second, third:
        program.choose(cm_id, Option.REUSEADDR)
    assert program.bind(first, port=port) == program.bind(second, port=port) == 0
    assert program.write(Command.LISTEN, ucma_abi.LISTEN, id=first) == 0
    assert program.write(Command.LISTEN, ucma_abi.LISTEN, id=second) == -errno.EADDRINUSE
    assert program.bind(third, port=port) == -errno.EADDRINUSE


V4, V6 = bytes(10) + b"\xff\xff\x7f\0\0\1", bytes(15) + b"\1"


def test_wildcards_of_both_families(calls, program, port):
    """IPv6's takes IPv4's addresses, too, unless it is told not to."""
    four, six, both = (program.create() for _ in range(3))
    program.choose(six, Option.AFONLY)
    anything = Address(socket.AF_INET6, bytes(16), port).pack()
    assert program.bind(four, bytes(4), port) == 0
    assert program.write(Command.BIND_IP, ucma_abi.BIND_IP, addr=anything, id=both) == -errno.EADDRNOTAVAIL
    assert program.write(Command.BIND_IP, ucma_abi.BIND_IP, addr=anything, id=six) == 0
    for cm_id in four, six:
        assert program.write(Command.LISTEN, ucma_abi.LISTEN, id=cm_id, backlog=3) == 0
    taken = [[listening.takes(gid) for gid in (V4, V6)]
             for cm_id in calls.manager.ids() for _, listening in cm_id.listenings[:1]]
    assert sorted(taken) == [[False, True], [True, False]]


def test_an_address_of_nobody_here(program):
    assert program.bind(program.create(), address=socket.inet_aton("192.0.2.1")) == -errno.EADDRNOTAVAIL
    infiniband = struct.pack("<H", 27).ljust(128, b"\0")
    done = program.write(Command.BIND, ucma_abi.BIND, id=program.create(), addr_size=48, addr=infiniband)
    assert done == -errno.EAFNOSUPPORT


def test_a_peer_that_no_device_reaches(calls, program, port):
    """The program is told by an event, and may ask for another one. It keeps the port that it has chosen.

    A route of this machine to IPv6 addresses is no way from a NIC without one.
    """
    client = program.create()
    assert program.bind(client, address=bytes(4), port=port) == 0
    six = Address(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, "2001:db8::1"), 7).pack()
    assert calls.manager.devices.toward(parse(six).gid) is None
    assert program.write(Command.RESOLVE_IP, ucma_abi.RESOLVE_IP, dst_addr=six, id=client) == 0
    event, found, _ = program.event()
    assert (event, found["status"]) == (Event.ADDR_ERROR, (1 << 32) - errno.EHOSTUNREACH)
    program.resolve(client, 7)
    program.write(Command.QUERY_ROUTE, ucma_abi.QUERY, ucma_abi.QUERY_ROUTE_RESP.size, id=client)
    route = ucma_abi.QUERY_ROUTE_RESP.at(string_at(addressof(program.memory), ucma_abi.QUERY_ROUTE_RESP.size))
    source, peer = (parse(route[name].tobytes()) for name in ("src_addr", "dst_addr"))
    assert (source.gid[-4:], source.port, peer) == (HERE, port, of_gid(source.gid, 7))


@pytest.mark.parametrize("name, value, nbytes, expected", [
    (Option.TOS, 0x20, 1, 0), (Option.TOS, 0x20, 4, -errno.EINVAL), (Option.ACK_TIMEOUT, 14, 1, 0),
    (Option.ACK_TIMEOUT, 32, 1, -errno.EINVAL), (Option.AFONLY, 1, 4, 0), (9, 1, 4, -errno.ENOSYS),
])
def test_options(program, name, value, nbytes, expected):
    room = create_string_buffer(struct.pack("<I", value), 4)
    done = program.write(
        Command.SET_OPTION, ucma_abi.SET_OPTION, id=program.create(), level=Level.ID, optname=name, optlen=nbytes,
        optval=addressof(room),
    )
    assert done == expected


def test_commands_that_are_wrong(program):
    assert program.write(Command.DESTROY_ID, ucma_abi.DESTROY_ID, 4, id=999) == -errno.ENOENT
    assert program.write(Command.CREATE_ID, ucma_abi.CREATE_ID, 0, ps=PortSpace.TCP) == -errno.ENOSPC
    assert program.write(Command.CREATE_ID, ucma_abi.CREATE_ID, 4, ps=PortSpace.TCP, response=8) == -errno.EFAULT
    assert program.write(Command.CREATE_ID, ucma_abi.CREATE_ID, 4, ps=IPOIB) == -errno.EOPNOTSUPP
    assert program.write(Command.JOIN_MCAST, ucma_abi.BIND) == -errno.EOPNOTSUPP
    assert program.write(Command.GET_EVENT, ucma_abi.GET_EVENT, ucma_abi.EVENT_RESP.size) == -errno.EAGAIN
    assert program.write(99, ucma_abi.BIND) == -errno.EINVAL
    assert program.write_raw(b"1234") == -errno.EINVAL
    client = program.create()
    assert program.connect(client) == program.accept(client) == -errno.EINVAL
    assert program.write(Command.DISCONNECT, ucma_abi.DISCONNECT, id=client) == -errno.EINVAL


def test_an_identifier_of_another_channel(calls, program):
    """It is for that channel only, until it is moved with its events."""
    other = Program(calls)
    client = program.create(uid=5)
    program.write(Command.RESOLVE_IP, ucma_abi.RESOLVE_IP, dst_addr=in4(HERE, 7), id=client)
    assert other.bind(client) == -errno.EINVAL
    moving = {"id": client, "fd": other.descriptor}
    assert other.write(Command.MIGRATE_ID, ucma_abi.MIGRATE_ID, 4, **moving) == -errno.ENOENT
    moving["fd"] = program.descriptor
    assert other.write(Command.MIGRATE_ID, ucma_abi.MIGRATE_ID, 4, **moving) == 0
    assert not program.waits_for_event(0)
    assert other.event()[0] is Event.ADDR_RESOLVED
    assert other.destroy(client) == 1
    other.close()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_listener_that_is_migrated_with_a_request(calls, program, port, monkeypatch, when):
    """Who has asked belongs to the channel on which the program hears of it: the old one may close."""
    old, new = Program(calls), Program(calls)
    listener, client = old.create(uid=1), program.create(uid=2)
    moving = {"id": listener, "fd": old.descriptor}
    old.listen(listener, port)
    program.resolve(client, port)
    if when == "meanwhile":
        make, manager = calls.manager.new, calls.manager

        def make_late(*of: Any) -> CmId:
            made = make(*of)
            manager.move(manager.get(listener), calls._cm_files[new.file])
            return made

        monkeypatch.setattr(manager, "new", make_late)
    assert program.connect(client) == 0
    if when == "before":
        assert old.waits_for_event(DEADLINE)
        assert new.write(Command.MIGRATE_ID, ucma_abi.MIGRATE_ID, 4, **moving) == 0
    event, found, _ = new.event()
    assert (event, found["uid"]) == (Event.CONNECT_REQUEST, 1)
    old.close()
    assert new.accept(found["id"], uid=3) == 0
    assert program.event()[0] is Event.CONNECT_RESPONSE
    assert program.accept(client) == 0
    event, told, _ = new.event()
    assert (event, told["id"]) == (Event.ESTABLISHED, found["id"])
    new.close()


@given(
    st.sampled_from([*Command, 99]), st.binary(max_size=300), st.sampled_from([0, 4, 144, 208, 336]),
    st.integers(0, 400),
)
def test_anything(calls, number, data, room, size):
    """An errno, and a channel that goes on."""
    program = Program(calls)
    data = data[:8] and struct.pack("<Q", addressof(program.memory)) + data[8:]
    with contextlib.suppress(Refused, DocaError):  # anything else is a mistake of ours
        command = create_string_buffer(struct.pack("<IHH", number, size, room) + data)
        calls.write(program.file, addressof(command), len(command) - 1)
    assert program.destroy(program.create()) == 0
    program.close()


def test_the_manager_can_be_closed_at_any_time(calls, port):
    """Connections end, and channels can be closed afterwards."""
    program = Program(calls)
    connected(program, port)
    closing = threading.Thread(target=calls.manager.close)
    closing.start()
    closing.join(DEADLINE)
    assert not closing.is_alive()
    assert calls.manager.ids() == []
    program.close()


def test_addresses():
    four, six = of_gid(V4, 7), of_gid(V6, 8)
    assert [parse(one.pack()) for one in (four, six)] == [four, six]
    assert parse(bytes(28)) is None
