"""What the connection manager's state machine says to each message, as Linux does where it was tried."""

import pytest

from cm_machines import PORT, Flying, Host, World, accept_all, gid, watch
from gpunetio.cm.communication import Communication, Service, State, Terms
from gpunetio.cm.event import EventType
from gpunetio.cm.ip_service import IpHeader
from gpunetio.cm.messages import pack, parse
from gpunetio.cm.path import Path
from gpunetio.cm.times import Times
from gpunetio.errors import BadStateError, InUseError, NotFoundError, TooBigError
from gpunetio.formats.cm import (
    DREP_PRIVATE,
    DREQ_PRIVATE,
    REJ_PRIVATE,
    REP_PRIVATE,
    REQ_PRIVATE,
    RTU_PRIVATE,
    SIDR_REP_PRIVATE,
    SIDR_REQ_PRIVATE,
    Answered,
    Attribute,
    PortSpace,
    RejectReason,
    SidrStatus,
)
from gpunetio.formats.packet import IPV4_MAPPED

A = Attribute


@pytest.fixture
def world():
    return World()


def pair(world, decide=accept_all, **listening):
    """A client, a server that listens, and the connection that the client asks for."""
    client, server = world.host(1), world.host(2, decide)
    server.listen(**listening)
    return client, server, client.connect(server, private_data=b"hello")


def request_of(world, **changes):
    """The REQ that is under way, with changes of its fields."""
    flying = world.flying.pop()
    message = flying.message
    fields = message.fields | changes
    private_data = fields.pop("private_data")
    return Flying(flying.source, flying.destination, pack(A.REQ, message.transaction_id, private_data, **fields))


def answer_to(world, flying):
    """The one message that a MAD is answered with."""
    world.deliver(flying)
    assert len(world.flying) == 1
    return world.flying.pop().message


# --- connections that come about, and end


def test_a_request_names_the_path_of_its_answers(world):
    _client, server, _made = pair(world)
    answer_to(world, request_of(
        world, primary_flow_label=0x12345, primary_hop_limit=9, primary_traffic_class=0x68, primary_sl=3
    ))
    (there,) = server.events
    assert there.data_path == Path(gid(1), hop_limit=9, traffic_class=0x68, sl=3, flow_label=0x12345)


def test_a_connection_comes_about_and_ends(world):
    client, server, made = pair(world)
    assert world.run() == [A.REQ, A.REP, A.RTU]
    (there,) = server.events
    assert client.told(made) == [EventType.RESPONSE]
    assert server.told(there) == [EventType.REQUEST, EventType.ESTABLISHED]
    assert server.events[there][0].private_data == b"hello".ljust(REQ_PRIVATE, b"\0")
    assert client.events[made][0].private_data == b"welcome".ljust(REP_PRIVATE, b"\0")
    assert (made.peer.qpn, made.peer.psn, there.peer.qpn, there.peer.psn) == (
        there.own.qpn, there.own.psn, made.own.qpn, made.own.psn,
    )
    assert client.established() == server.established() != set()
    client.machine.disconnect(made, b"bye")
    assert world.run() == [A.DREQ, A.DREP]
    assert server.events[there][-1].private_data == b"bye".ljust(DREQ_PRIVATE, b"\0")
    world.settle()
    assert client.told(made)[1:] == server.told(there)[2:] == [EventType.DISCONNECTED, EventType.TIMEWAIT_EXIT]
    assert client.holds_nothing()
    assert server.holds_nothing()


def test_a_host_connects_with_itself(world):
    host = world.host(1)
    host.listen()
    made = host.connect(host)
    assert world.run() == [A.REQ, A.REP, A.RTU]
    assert len(host.established()) == 1
    host.machine.disconnect(made)
    world.settle()
    assert host.holds_nothing()


def test_both_disconnect_at_once(world):
    client, server, made = pair(world)
    world.run()
    (there,) = server.events
    client.machine.disconnect(made)
    server.machine.disconnect(there)
    world.settle()
    assert client.told(made).count(EventType.DISCONNECTED) == server.told(there).count(EventType.DISCONNECTED) == 1
    assert client.holds_nothing()
    assert server.holds_nothing()


def test_a_peer_that_is_gone(world):
    """Nobody is asked for an answer, not even if a DREQ is under way already."""
    client, server, made = pair(world)
    world.run()
    (there,) = server.events
    client.machine.disconnect(made)
    world.flying.clear()
    for host, communication in (client, made), (server, there):
        host.machine.peer_gone(communication)
        host.machine.peer_gone(communication)
        assert host.told(communication)[-1] is EventType.DISCONNECTED
        assert host.told(communication).count(EventType.DISCONNECTED) == 1
    assert not world.flying
    world.settle()
    assert client.holds_nothing()
    assert server.holds_nothing()


@pytest.mark.parametrize("lost", [A.REQ, A.REP, A.RTU, A.DREQ, A.DREP])
def test_a_lost_message_is_sent_again(world, lost):
    client, server, made = pair(world)
    gone = set()

    def lose(flying):
        attribute = flying.message.attribute
        first = attribute is lost and attribute not in gone
        gone.add(attribute)
        return first

    world.run(lose)
    world.advance()
    world.run(lose)
    assert client.established() == server.established() != set()
    client.machine.disconnect(made)
    world.settle(lose)
    assert client.told(made)[-1] is EventType.TIMEWAIT_EXIT
    assert client.holds_nothing()
    assert server.holds_nothing()


def test_a_peer_that_never_answers_is_asked_as_often_as_the_times_say(world):
    client, _, made = pair(world, times=Times())
    sent = []
    world.settle(lambda flying: bool(sent.append(flying.message)) or True)
    assert [message.attribute for message in sent] == [A.REQ] * 16 + [A.REJ]
    assert client.told(made) == [EventType.UNREACHABLE]
    assert world.now == pytest.approx(16 * 6.144)
    assert sent[-1].fields["reason"] == RejectReason.TIMEOUT
    assert client.holds_nothing()


def test_a_client_that_never_confirms_is_given_up(world):
    client, server, _ = pair(world)
    client.decide = watch
    world.settle(lambda flying: flying.message.attribute is A.RTU)
    (there,) = server.events
    assert server.told(there) == [EventType.REQUEST, EventType.UNREACHABLE]
    assert client.told(next(iter(client.events))) == [EventType.RESPONSE, EventType.REJECTED, EventType.TIMEWAIT_EXIT]
    assert client.holds_nothing()
    assert server.holds_nothing()


def test_a_message_on_the_queue_pair_establishes_the_connection(world):
    client, server, _ = pair(world)
    world.run(lambda flying: flying.message.attribute is A.RTU)
    (there,) = server.events
    server.machine.establish(there)
    assert client.established() == server.established() != set()
    world.settle()
    assert client.established() == server.established() != set()


def test_a_program_that_takes_its_time_is_waited_for(world):
    client, server, made = pair(world, decide=watch)
    world.run()
    world.advance()
    assert world.run() == [A.REQ, A.MRA]
    assert made.state is State.MRA_REQ_RECEIVED
    before = world.now
    world.advance()
    assert world.now - before == pytest.approx(65.536 + 6.144)
    (there,) = server.events
    server.machine.accept(there, server.terms())
    world.run()
    assert client.established() == server.established() != set()


# --- refusals


def test_a_program_refuses(world):
    def refuse(host, communication, event):
        if event.type is EventType.REQUEST:
            host.machine.reject(communication, b"no", 99)

    client, server, made = pair(world, refuse)
    world.run()
    (event,) = client.events[made]
    assert (event.type, event.reason) == (EventType.REJECTED, 99)
    assert event.private_data == b"no".ljust(REJ_PRIVATE, b"\0")
    assert client.holds_nothing()
    assert server.holds_nothing()


def test_a_client_gives_up(world):
    client, server, made = pair(world, decide=watch)
    world.run()
    client.machine.give_up(made)
    world.run()
    (there,) = server.events
    assert server.told(there) == [EventType.REQUEST, EventType.REJECTED]
    assert server.events[there][1].reason == RejectReason.TIMEOUT
    assert client.holds_nothing()
    assert server.holds_nothing()


def test_a_client_refuses_an_answer(world):
    client, server, _made = pair(world)
    client.decide = lambda host, communication, event: host.machine.reject(communication)
    world.settle()
    (there,) = server.events
    assert server.told(there) == [EventType.REQUEST, EventType.REJECTED]
    assert client.holds_nothing()
    assert server.holds_nothing()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"service_id": 1 << 40}, RejectReason.INVALID_SERVICE_ID),
        ({"transport_service_type": 1}, RejectReason.INVALID_SERVICE_ID),
        ({"primary_remote_gid": gid(3)}, RejectReason.INVALID_GID),
        ({"primary_remote_gid": bytes(16)}, RejectReason.INVALID_GID),
        ({"path_packet_payload_mtu": 0}, RejectReason.INVALID_MTU),
        ({"path_packet_payload_mtu": 6}, RejectReason.INVALID_MTU),
        ({"private_data": b"\x01" + IpHeader(gid(1), gid(2), 1).pack()[1:]}, RejectReason.CONSUMER),
        ({"private_data": b"\x00\x50" + IpHeader(gid(1), gid(2), 1).pack()[2:]}, RejectReason.CONSUMER),
        ({"private_data": IpHeader(gid(1), gid(3), 1).pack()}, RejectReason.CONSUMER),
    ],
    ids=lambda it: it.name if isinstance(it, RejectReason) else next(iter(it)),
)
def test_a_wrong_request_is_refused(world, changes, reason):
    _client, server, made = pair(world)
    reject = answer_to(world, request_of(world, **changes))
    assert (reject.attribute, reject.fields["reason"]) == (A.REJ, reason)
    assert (reject.fields["message_rejected"], reject.fields["remote_comm_id"]) == (Answered.REQ, made.local_id)
    info = reject.fields["additional_reject_info"][: reject.fields["reject_info_length"]]
    assert info == (server.gid if reason is RejectReason.INVALID_GID else b"")
    assert not server.events
    assert server.holds_nothing()


@pytest.mark.parametrize(
    "changes",
    [{"partition_key": 0x7FFF}, {"path_packet_payload_mtu": 5}, {"primary_hop_limit": 1, "primary_subnet_local": 1},
     {"vendor_id": 1}, {"responder_resources": 255, "initiator_depth": 255}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_linux_does_not_check_is_accepted(world, changes):
    pair(world)
    assert answer_to(world, request_of(world, **changes)).attribute is A.REP


def test_a_full_backlog_leaves_requests_unanswered_and_peers_ask_again(world):
    client, server, _ = pair(world, decide=watch, backlog=1)
    second = client.connect(server)
    world.run()
    assert len(server.events) == 1
    (first,) = server.events
    server.machine.accept(first, server.terms())
    server.decide = accept_all
    world.run()
    world.advance()
    world.run()
    assert second.state is State.ESTABLISHED


@pytest.mark.parametrize("space", [PortSpace.TCP, PortSpace.UDP])
def test_no_source_keeps_others_out_of_a_backlog(world, space):
    """One that has most of a full backlog makes room. Its peer asks again, and others are left alone."""
    host, flood, honest = world.host(1, watch), world.host(2), world.host(3)
    host.listen(backlog=8, space=space)

    def ask(source: Host) -> Communication:
        if space is PortSpace.TCP:
            return source.connect(host)
        return source.machine.resolve(Path(host.gid), PORT, source.notify)

    for _ in range(20):
        ask(flood)
    world.run()
    assert len(host.machine) == len(host.listening.waiting) == 8
    ask(honest)
    world.run()
    waiting = {communication.path.gid for communication in host.listening.waiting}
    assert waiting == {flood.gid, honest.gid}
    assert len(host.machine) == len(host.listening.waiting) == 8
    assert [told[-1].type for told in host.events.values() if len(told) > 1] == [EventType.UNREACHABLE]
    ask(honest)  # it has one already
    world.run()
    assert sum(communication.path.gid == honest.gid for communication in host.listening.waiting) == 1
    host.machine.stop_listening(host.listening)
    assert len(host.machine) == len(host.listening.waiting) == 0


def test_a_way_that_does_not_exist(world):
    host = world.host(1)
    nobody = Path(gid(9))
    connection = host.machine.connect(nobody, PORT, host.terms(), host.notify)
    question = host.machine.resolve(nobody, PORT, host.notify)
    for made in (connection, question):
        host.machine.no_way(made, NotFoundError("nobody answers"))
        (event,) = host.events[made]
        assert (event.type, str(event.why)) == (EventType.UNREACHABLE, "nobody answers")
    host.machine.no_way(connection, NotFoundError("twice"))
    assert host.holds_nothing()


def test_who_stops_listening_refuses_who_waits(world):
    client, server, made = pair(world, decide=watch)
    world.run()
    server.machine.stop_listening(server.listening)
    world.run()
    assert client.told(made) == [EventType.REJECTED]
    assert server.holds_nothing()
    server.listen()  # the port is free again


def test_a_port_has_one_listener_for_each_address(world):
    _, server, _ = pair(world)
    with pytest.raises(InUseError, match="port 7174 has a listener"):
        server.listen(gid=server.gid)
    server.listen(port=PORT + 1, gid=gid(2))
    server.listen(port=PORT + 1, gid=gid(4))


def test_listeners_for_families(world):
    """One for IPv4, one for IPv6. One for both takes what either takes, as does one with an address of its family."""
    _, server, _ = pair(world)
    four, six = IPV4_MAPPED + bytes([127, 0, 0, 2]), bytes(15) + b"\1"
    server.listen(port=PORT + 1, ipv4=True)
    for others in ({}, {"ipv4": True}, {"gid": four}):
        with pytest.raises(InUseError, match="has a listener"):
            server.listen(port=PORT + 1, **others)
    assert (server.listening.takes(four), server.listening.takes(six)) == (True, False)
    server.listen(port=PORT + 1, ipv4=False)
    assert (server.listening.takes(four), server.listening.takes(six)) == (False, True)
    server.listen(port=PORT + 2, gid=four)
    server.listen(port=PORT + 2, ipv4=False)
    with pytest.raises(InUseError, match="has a listener"):
        server.listen(port=PORT + 2, gid=six)


# --- duplicates, and connections that one side has forgotten


def test_a_request_that_comes_twice_is_one(world):
    _client, server, _ = pair(world)
    request = world.flying[0]
    world.run()
    world.deliver(request)
    assert not world.flying
    assert len(server.events) == 1


def test_an_answer_that_comes_twice_is_confirmed_twice(world):
    _, server, _ = pair(world)
    answers = []
    world.run(lambda flying: flying.message.attribute is A.REP and answers.append(flying))
    confirmation = answer_to(world, answers[0])
    assert confirmation.attribute is A.RTU
    assert len(server.established()) == 1


def test_a_request_of_a_connection_that_is_over_is_stale(world):
    client, _server, made = pair(world)
    request = world.flying[0]
    world.run()
    client.machine.disconnect(made)
    world.run()
    reject = answer_to(world, request)
    assert (reject.attribute, reject.fields["reason"]) == (A.REJ, RejectReason.STALE_CONNECTION)


def test_a_queue_pair_that_connects_again_ends_its_old_connection(world):
    """The client has restarted: same device and queue pair, new names."""
    client, server, made = pair(world)
    world.run()
    client.machine._common.forget(made)
    again = client.connect(server, own=made.own)
    assert world.run() == [A.REQ, A.REJ, A.DREQ, A.DREP]
    assert client.events[again][0].reason == RejectReason.STALE_CONNECTION
    (there,) = server.events
    assert server.told(there)[-1] is EventType.DISCONNECTED
    client.connect(server, own=made.own)
    world.run()
    assert client.established() == server.established() != set()


def test_disconnecting_what_is_not_known_is_answered(world):
    client, server, _ = pair(world)
    dreq = pack(A.DREQ, 77, local_comm_id=5, remote_comm_id=6, remote_qpn=7)
    world.flying.clear()
    answer = answer_to(world, Flying(client.gid, server.gid, dreq))
    assert (answer.attribute, answer.transaction_id) == (A.DREP, 77)
    assert (answer.fields["local_comm_id"], answer.fields["remote_comm_id"]) == (6, 5)


@pytest.mark.parametrize("attribute", [A.REP, A.RTU, A.REJ, A.DREP, A.MRA, A.SIDR_REP])
def test_answers_to_nothing_are_ignored(world, attribute):
    client, server, _ = pair(world)
    world.flying.clear()
    world.deliver(Flying(client.gid, server.gid, pack(attribute, 1)))
    assert not world.flying


def test_messages_from_elsewhere_are_not_heard(world):
    """A third host sees everything and repeats it at once: it changes nothing."""
    client, server, made = pair(world)
    spoofed = []

    def overhear(flying):
        if flying.source != gid(9):
            spoofed.append(flying.message.attribute)
            if flying.message.attribute is not A.REQ:  # a request is the first that is heard of its sender
                world.deliver(Flying(gid(9), flying.destination, flying.mad))
        return flying.source == gid(9) or flying.message.attribute in (A.DREQ, A.DREP)

    world.run(overhear)
    (there,) = server.events
    assert spoofed == [A.REQ, A.REP, A.RTU]
    client.machine.disconnect(made)
    world.run(overhear)
    assert (there.state, made.state) == (State.ESTABLISHED, State.DREQ_SENT)


def test_a_wrong_queue_pair_does_not_disconnect(world):
    client, server, made = pair(world)
    world.run()
    (there,) = server.events
    wrong = pack(
        A.DREQ, 1, local_comm_id=made.local_id, remote_comm_id=there.local_id, remote_qpn=there.own.qpn + 1
    )
    world.deliver(Flying(client.gid, server.gid, wrong))
    assert there.state is State.ESTABLISHED
    assert not world.flying


def test_ids_are_not_used_again_at_once(world):
    client, server = world.host(1), world.host(2)
    seen = set()
    for _ in range(1000):
        made = client.connect(server)
        seen.add(made.local_id)
        client.machine.give_up(made)
    assert len(seen) == 1000


# --- where datagrams go


def test_datagrams_find_their_queue_pair(world):
    client, server = world.host(1), world.host(2)
    server.listen(space=PortSpace.UDP)
    asked = client.machine.resolve(Path(server.gid), PORT, client.notify, private_data=b"where")
    request = world.flying[0]
    world.run()
    world.deliver(request)  # asked twice, told once
    (there,) = server.events
    assert server.events[there][0].private_data == b"where".ljust(SIDR_REQ_PRIVATE, b"\0")
    server.machine.answer(there, Service(0x123456, 0x1234567), b"here")
    world.run()
    (event,) = client.events[asked]
    assert event.type is EventType.RESPONSE
    assert event.private_data == b"here".ljust(SIDR_REP_PRIVATE, b"\0")
    assert asked.service == Service(0x123456, 0x1234567)
    assert client.holds_nothing()
    assert server.holds_nothing()


@pytest.mark.parametrize(
    ("to", "status"), [(PORT, SidrStatus.REJECTED), (PORT + 1, SidrStatus.SERVICE_NOT_SUPPORTED)]
)
def test_datagrams_are_refused(world, to, status):
    client = world.host(1)
    server = world.host(2, lambda host, communication, event: host.machine.give_up(communication))
    server.listen(space=PortSpace.UDP)
    asked = client.machine.resolve(Path(server.gid), to, client.notify)
    world.run()
    (event,) = client.events[asked]
    assert (event.type, event.reason) == (EventType.REJECTED, status)
    assert client.holds_nothing()
    assert server.holds_nothing()


def test_datagrams_to_nobody_are_unreachable(world):
    client = world.host(1)
    asked = client.machine.resolve(Path(gid(2)), PORT, client.notify)
    world.settle()
    assert client.told(asked) == [EventType.UNREACHABLE]
    assert client.holds_nothing()


# --- what programs may not do


def test_private_data_that_are_too_long_are_refused(world):
    client, server, made = pair(world)
    most = {"REQ": REQ_PRIVATE, "REP": REP_PRIVATE, "RTU": RTU_PRIVATE, "DREQ": DREQ_PRIVATE, "REJ": REJ_PRIVATE}
    assert most == {"REQ": 56, "REP": 196, "RTU": 224, "DREQ": 220, "REJ": 148}
    assert DREP_PRIVATE == 224
    world.run()
    (there,) = server.events
    with pytest.raises(TooBigError, match="57 bytes of private data: a REQ carries at most 56"):
        client.connect(server, private_data=bytes(57))
    with pytest.raises(TooBigError, match="221"):
        client.machine.disconnect(made, bytes(221))
    assert (made.state, there.state, len(client.machine)) == (State.ESTABLISHED, State.ESTABLISHED, 1)


def test_programs_cannot_skip_a_step(world):
    client, _server, made = pair(world, decide=watch)
    for step in (
        lambda: client.machine.confirm(made),
        lambda: client.machine.disconnect(made),
        lambda: client.machine.accept(made, Terms(qpn=1, psn=1)),
        lambda: client.machine.answer(made, Service(1, 1)),
    ):
        with pytest.raises(BadStateError, match="REQ_SENT"):
            step()
    world.run()
    assert made.state is State.REQ_SENT


def test_a_mad_parses_as_it_was_packed():
    mad = pack(A.RTU, 1 << 63, b"x", local_comm_id=1, remote_comm_id=2)
    message = parse(mad)
    assert message is not None
    assert (message.transaction_id, message.fields["private_data"]) == (1 << 63, b"x".ljust(224, b"\0"))
