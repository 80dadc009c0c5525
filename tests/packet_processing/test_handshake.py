"""Connections begin and end on the CPU: every segment by scapy, no NIC, and a server that says what the test wants."""

from contextlib import ExitStack

import numpy as np
import pytest
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import Dot1AD, Dot1Q, Ether

import gpunetio as gn
from gpunetio.packet_processing.connection import (
    ENDED,
    LAST_GENERATION,
    OPEN,
    REQUEST_BYTES,
    SEGMENT,
    SLOT_BITS,
    SLOTS,
)
from gpunetio.packet_processing.handshake import (
    HALF_OPEN_NS,
    RULE_SEGMENTS,
)
from gpunetio.packet_processing.siphash import siphash
from gpunetio.packet_processing.tcp_frames import NO_SHIFT, read_options
from handshake_bench import ADDRESS, MAC, PEER, PEER_MAC, HandshakeBench, segment


@pytest.fixture
def bench():
    with gn.Gpu("host") as gpu, ExitStack() as undo:
        yield HandshakeBench(gpu, undo)


def opened(bench, port=5000, segments=1):
    """Return the tag of a connection whose client has answered, with so many segments."""
    before = bench.tags
    (answer,) = bench.take(segment("S", port))
    (tag,) = bench.tags - before
    for _ in range(segments):
        assert not bench.take(segment("A", port, seq=1001, ack=answer[TCP].seq + 1))
        bench.handed()
    bench.say(tag, OPEN)
    return tag


def with_rule(bench, port=5000):
    """Return the tag of a connection that has its rule."""
    tag = opened(bench, port, RULE_SEGMENTS)
    bench.connection_rules.follow()
    assert tag in bench.rules
    return tag


# --- begins ----------------------------------------------------------------------------------------------------------


def test_a_syn_gets_a_slot_and_an_answer(bench):
    (answer,) = bench.take(segment("S", options=[("MSS", 1400), ("WScale", 7), ("SAckOK", b""), ("Timestamp", (1, 0))]))
    (tag,) = bench.tags
    assert (answer.src, answer.dst, answer[IP].src, answer[IP].dst) == (MAC, PEER_MAC, ADDRESS, PEER)
    tcp = answer[TCP]
    assert (tcp.sport, tcp.dport, str(tcp.flags), tcp.ack, tcp.window) == (80, 5000, "SA", 1001, REQUEST_BYTES)
    assert tcp.options == [("MSS", 1460), ("NOP", None), ("WScale", 0)]  # others would be promises of data segments
    row = bench.tables.connections[tag & SLOTS - 1]
    assert [int(row[name]) for name in ("generation", "first_sequence", "peer_sequence", "mss", "window_shift")] == [
        tag >> SLOT_BITS, tcp.seq, 1000, 1400, 7
    ]
    header = Ether(row["header"].tobytes()[8:])
    assert (header.src, header.dst, header[IP].dst, header[TCP].dport) == (MAC, PEER_MAC, PEER, 5000)
    assert (header[TCP].dataofs, header[IP].proto) == (5, 6)


def test_an_answer_is_what_scapy_makes(bench):
    """All fields but checksums, which the device computes."""
    (answer,) = bench.take(segment("S"))
    made = Ether(src=MAC, dst=PEER_MAC) / IP(src=ADDRESS, dst=PEER, flags="DF", id=0, chksum=0) / TCP(
        sport=80, dport=5000, flags="SA", seq=answer[TCP].seq, ack=1001, window=REQUEST_BYTES, chksum=0,
        options=[("MSS", 1460)],
    )
    assert bytes(answer) == bytes(made)


@pytest.mark.parametrize("tags", [Dot1Q(vlan=5, prio=3), Dot1AD(vlan=7) / Dot1Q(vlan=5)], ids=["one", "two"])
def test_an_answer_has_the_vlan_tags_of_the_syn(bench, tags):
    """So do the headers for the server, whose IP header is where it is without tags; and a RST."""
    untagged = bytes(segment("S", options=[("MSS", 1400), ("WScale", 7)]))
    tagged = Ether(untagged[:12] + bytes(Ether() / tags)[12:-2] + untagged[12:])
    (answer,) = bench.take(tagged)
    (plain,) = HandshakeBench.take(bench, untagged)  # the same client, so the answer is the same
    middle = bytes(tagged)[12 : 12 + 4 * len(tagged.layers()[1:-2])]
    assert bytes(answer) == bytes(plain)[:12] + middle + bytes(plain)[12:]
    (tag,) = bench.tags
    row = bench.tables.connections[tag & SLOTS - 1]
    header = Ether(row["header"].tobytes()[8 - int(row["tags"]) :])
    assert int(row["tags"]) == len(middle)
    assert bytes(header)[12 : 12 + len(middle)] == middle
    assert (header.src, header.dst, header[IP].dst, header[TCP].dport) == (MAC, PEER_MAC, PEER, 5000)
    stray = bytes(segment("A", 6000, ack=7))
    (reset,) = bench.take(stray[:12] + middle + stray[12:])
    assert bytes(reset)[12 : 12 + len(middle)] == middle
    assert (str(reset[TCP].flags), reset[TCP].seq) == ("R", 7)


def test_a_repeated_syn_gets_the_same_answer(bench):
    first, second = bench.take(segment("S", options=[("WScale", 7)]), segment("S"))
    assert bytes(first) == bytes(second)
    assert len(bench.tags) == 1


def test_another_syn_of_the_same_client_begins_anew(bench):
    (first,) = bench.take(segment("S"))
    bench.now += 1_000_000
    (second,) = bench.take(segment("S", seq=7))
    assert second[TCP].ack == 8
    assert len(bench.tags) == 1
    assert first[TCP].seq != second[TCP].seq
    assert bench.count("half_open") == 1


def test_first_sequence_numbers_cannot_be_guessed(bench):
    """RFC 6528: neighbours get numbers that have nothing to do with each other."""
    numbers = [answer[TCP].seq for answer in bench.take(*(segment("S", port) for port in range(1000, 1064)))]
    steps = np.abs(np.diff(np.array(numbers)))
    assert len(set(numbers)) == 64
    assert np.count_nonzero(steps > 1 << 20) > 48


# --- the share of a client -------------------------------------------------------------------------------------------

SHARE = 1024  # docs/packet-processing.md


def syn_ack(bench, port, peer=PEER):
    """Return the first sequence number of the server, or None if there is no answer."""
    answers = bench.take(segment("S", port, ip={"src": peer}))
    return answers[0][TCP].seq if answers else None


def answer_syn_ack(bench, port, seq, peer=PEER):
    """Return the flags of the answers."""
    answers = bench.take(segment("A", port, seq=1001, ack=seq + 1, ip={"src": peer}))
    while bench.handed() is not None:
        pass
    return [str(answer[TCP].flags) for answer in answers]


def test_a_client_has_a_share_of_the_connections(bench):
    """And no more: others still get theirs. When one of its connections ends, it may begin another one."""
    for port in range(1, SHARE + 1):
        assert not answer_syn_ack(bench, port, syn_ack(bench, port))
    tags = bench.tags
    assert syn_ack(bench, 2000) is None
    assert (bench.count("refused"), len(bench.tags)) == (1, SHARE)
    assert not answer_syn_ack(bench, 1, syn_ack(bench, 1, "192.0.2.3"), "192.0.2.3")
    bench.say(min(tags), ENDED)
    bench.look()
    assert not answer_syn_ack(bench, 2000, syn_ack(bench, 2000))
    assert syn_ack(bench, 2001) is None


def test_connections_that_were_half_open_count(bench):
    """What is above the share is reset. SYNs alone count for nobody: anyone can send them in another's name."""
    bench.table.clients[:] = SHARE - 2
    numbers = {port: syn_ack(bench, port) for port in range(2000, 2005)}
    assert None not in numbers.values()
    found = [answer_syn_ack(bench, port, seq) for port, seq in numbers.items()]
    assert found == [[], [], ["R"], ["R"], ["R"]]
    assert (bench.count("refused"), bench.count("half_open"), len(bench.tags)) == (3, 0, 2)


def test_the_share_is_that_of_all_queues():
    with gn.Gpu("host") as gpu, ExitStack() as undo:
        first = HandshakeBench(gpu, undo, 2, 0)
        second = HandshakeBench(gpu, undo, 2, 1, first.table)
        first.table.clients[:] = SHARE - 2
        for port, bench in ((1, first), (2, second)):
            assert not answer_syn_ack(bench, port, syn_ack(bench, port))
        assert syn_ack(first, 2000) is None
        assert syn_ack(second, 2000) is None


def test_siphash():
    """The vectors of its authors: keys and words of bytes that count from 0."""
    low, high, word = (int.from_bytes(bytes(range(first, first + 8)), "little") for first in (0, 8, 0))
    assert siphash(low, high, word) & (1 << 64) - 1 == 0x93F5F5799A932462


@pytest.mark.parametrize(
    ("flags", "fields", "payload", "expected"),
    [
        ("A", {"ack": 77}, b"", ("R", 77, 0)),
        ("PA", {"ack": 77}, b"abc", ("R", 77, 0)),
        ("FA", {"ack": 77}, b"", ("R", 77, 0)),
        ("SA", {"ack": 77}, b"", ("R", 77, 0)),
        ("P", {}, b"abc", ("RA", 0, 1003)),
        ("F", {"seq": (1 << 32) - 1}, b"", ("RA", 0, 0)),
    ],
)
def test_what_belongs_to_no_connection_is_reset(bench, flags, fields, payload, expected):
    """RFC 9293 3.10.7.1."""
    (answer,) = bench.take(segment(flags, payload=payload, **fields))
    tcp = answer[TCP]
    assert (str(tcp.flags), tcp.seq, tcp.ack) == expected
    assert not bench.tags


def test_a_rst_for_no_connection_gets_no_answer(bench):
    assert not bench.take(segment("R"), segment("RA", ack=1))


@pytest.mark.parametrize(
    "frame",
    [
        segment("S", ip={"dst": "192.0.2.9"}), segment("S", ip={"src": "224.0.0.1"}),
        segment("S", ip={"src": "0.0.0.0"}),
        segment("S", ip={"src": ADDRESS}), segment("S", ip={"flags": "MF"}), segment("S", ip={"frag": 8}),
        segment("S", ip={"len": 200}), segment("S", ip={"ihl": 4}), segment("S", dataofs=4), segment("S", dataofs=15),
        segment("S", ip={"proto": 17}), bytes(segment("S"))[:40], b"",
        Ether(src=PEER_MAC, dst="02:00:00:00:00:09") / bytes(segment("S"))[14:],
        Ether(src="ff:ff:ff:ff:ff:ff", dst=MAC, type=0x800) / bytes(segment("S"))[14:],
    ],
)
def test_what_is_not_for_the_station_is_ignored(bench, frame):
    assert not bench.take(frame)
    assert not bench.tags


# --- segments of connections -----------------------------------------------------------------------------------------


def test_a_fin_with_its_data_goes_to_the_server(bench):
    tag = opened(bench)
    assert not bench.take(segment("FPA", seq=1001, ack=5, window=99, payload=b"GET /"))
    row = bench.handed()
    assert [int(row[name]) for name in ("tag", "sequence", "acknowledgement", "window", "flags", "nbytes")] == [
        tag, 1001, 5, 99, 0x19, 5
    ]
    assert row["payload"].tobytes()[:5] == b"GET /"


@pytest.mark.parametrize("flags", ["R", "S", "A"])
def test_the_server_decides_about_segments_of_its_connections(bench, flags):
    opened(bench)
    assert not bench.take(segment(flags, seq=5))
    assert int(bench.handed()["sequence"]) == 5


def test_segments_without_a_rule_count_as_those_that_kernels_receive(bench):
    """FIN, SYN and RST do not, as these never come to the kernels; nor does what belongs to no connection."""
    opened(bench)
    bench.take(segment("PA", payload=b"GET / HTTP"), segment("PA", payload=b"POST /"), segment("A"), segment("FPA"))
    bench.take(segment("R"), segment("S"), segment("PA", 7777, payload=b"GET / HTTP"))
    counts = {name: count for name, count in bench.acceptor.tcp_counts().items() if count}
    assert counts == {"http_get": 1, "http_post": 1, "tcp_ack": 2, "total": 4}


def test_a_segment_for_which_the_ring_has_no_room_is_dropped(bench):
    opened(bench)
    items = bench.tables.from_cpu.items
    frame, at = bytes(segment("FA")), 38  # of the sequence number
    bench.take(*(frame[:at] + i.to_bytes(4, "big") + frame[at + 4 :] for i in range(items + 3)))
    bench.take(segment("PA", seq=9, payload=bytes(SEGMENT.size)))
    assert bench.count("dropped") == 4
    assert [int(bench.handed()["sequence"]) for _ in range(items)] == list(range(items))
    bench.take(segment("FA", seq=9))
    assert int(bench.handed()["sequence"]) == 9


# --- rules -----------------------------------------------------------------------------------------------------------


def test_a_connection_that_has_sent_some_segments_gets_a_rule(bench):
    early = opened(bench, 6000, RULE_SEGMENTS - 1)
    tag = with_rule(bench)
    assert bench.rules == {tag: (0xC0000202, 5000, 80)}
    bench.take(segment("A", 6000))
    bench.connection_rules.follow()
    assert bench.rules.keys() == {tag, early}


def test_a_client_that_has_not_answered_gets_no_rule(bench):
    """Whatever it sends: it may be somebody else."""
    bench.take(segment("S"), *(segment("A", ack=5) for _ in range(2 * RULE_SEGMENTS)))
    bench.connection_rules.follow()
    assert not bench.rules
    assert bench.count("half_open") == 1


def test_the_rule_of_a_connection_that_has_ended_goes_before_its_slot_is_used_again(bench):
    bench.leave(1)
    tag = with_rule(bench)
    bench.say(tag, ENDED)
    bench.look()
    assert not bench.take(segment("S", 7000))
    assert bench.count("refused") == 1
    bench.connection_rules.follow()
    assert not bench.rules
    assert opened(bench, 7000) & SLOTS - 1 == tag & SLOTS - 1


def test_a_connection_that_ends_before_its_rule_is_made_gets_none(bench):
    bench.say(opened(bench, segments=RULE_SEGMENTS), ENDED)
    bench.look()
    bench.connection_rules.follow()
    assert not bench.rules
    assert np.array_equal(bench.table.wanted, bench.table.made)


def test_connections_that_end_while_rules_are_made(bench):
    """Theirs are made for their own addresses, and removed later."""
    tags = [opened(bench, port, RULE_SEGMENTS) for port in (1, 2, 3)]

    def add(*arguments):
        for tag in tags:
            bench.say(tag, ENDED)
        bench.look()
        return bench.add(*arguments)

    bench.connection_rules._add = add
    bench.connection_rules.follow()
    assert [sport for _, sport, _ in bench.rules.values()] == [1, 2, 3]
    bench.connection_rules.follow()
    assert not bench.rules


def test_a_client_that_begins_anew_has_one_rule(bench):
    """The old one goes first: there cannot be two with the same addresses."""
    for _ in range(3):
        tag = with_rule(bench)
        assert list(bench.rules) == [tag]
        bench.say(tag, ENDED)


def test_without_room_for_a_rule_segments_still_reach_the_server(bench):
    bench.room = False
    tag = opened(bench, segments=RULE_SEGMENTS)
    bench.connection_rules.follow()
    assert not bench.take(segment("A", seq=7))
    assert int(bench.handed()["sequence"]) == 7
    bench.say(tag, ENDED)
    bench.look()
    bench.connection_rules.follow()
    assert np.array_equal(bench.table.wanted, bench.table.made)


def test_closing_removes_all_rules(bench):
    for port in range(1, 6):
        with_rule(bench, port)
    bench.connection_rules.close()
    assert not bench.rules


# --- ends ------------------------------------------------------------------------------------------------------------


def test_the_slot_of_a_connection_that_has_ended_is_free_for_others(bench):
    tag = opened(bench)
    bench.look()
    assert bench.tags == {tag}
    bench.say(tag, ENDED)
    bench.look()
    assert not bench.tags
    assert int(bench.tables.connections["generation"][tag & SLOTS - 1]) == 0
    assert str(bench.take(segment("FA", ack=1))[0][TCP].flags) == "R"


def test_the_next_connection_of_a_slot_has_another_tag(bench):
    """And the slot that was used longest ago is the next."""
    bench.leave(3)
    tags = []
    for _ in range(7):
        tags.append(opened(bench))
        bench.say(tags[-1], ENDED)
    assert len(set(tags)) == 7
    assert [SLOTS - (tag & SLOTS - 1) for tag in tags] == [3, 2, 1, 3, 2, 1, 3]


def test_generations_begin_again_and_never_give_no_tag(bench):
    bench.leave(1)
    bench.table.slots["generation"] = LAST_GENERATION - 1
    found = []
    for _ in range(2):
        found.append(opened(bench) >> SLOT_BITS)
        bench.say(*bench.tags, ENDED)
    assert found == [LAST_GENERATION, 1]


def test_a_client_begins_anew_at_once_when_its_connection_has_ended(bench):
    tag = opened(bench)
    bench.say(tag, ENDED)
    assert len(bench.take(segment("S", seq=9))) == 1
    (again,) = bench.tags
    assert again != tag


def test_clients_that_do_not_answer_are_forgotten(bench):
    kept = opened(bench)
    bench.take(segment("S", 6000))
    bench.now += HALF_OPEN_NS
    bench.look()
    assert bench.tags == {kept}
    assert bench.count("expired") == 1


def test_a_flood_of_syns_takes_no_slot_of_others(bench):
    """As many half-open connections as are allowed: the oldest makes room."""
    bench.acceptor.row["most"] = 8
    kept = {opened(bench, port) for port in range(1, 5)}
    answers = bench.take(*(segment("S", port) for port in range(1000, 1100)))
    assert len(answers) == 100
    assert kept < bench.tags
    ports = {int(bench.table.slots["key"][tag & SLOTS - 1]) >> 16 & 0xFFFF for tag in bench.tags}
    assert ports == {1, 2, 3, 4, *range(1092, 1100)}
    assert (bench.count("half_open"), bench.count("expired")) == (8, 92)
    bench.connection_rules.follow()
    assert not bench.rules


def test_without_a_free_slot_a_syn_gets_no_answer(bench):
    bench.leave(2)
    assert len(bench.take(segment("S", 1), segment("S", 2))) == 2
    assert not bench.take(segment("S", 6000))
    assert bench.count("refused") == 1


def test_clients_with_the_same_hash_are_told_apart(bench):
    """All in one chain: they are found there, and leave it from any place."""
    bench.acceptor.row["key_low"] = bench.acceptor.row["key_high"] = 0
    ports = [port for port in range(1, 1 << 16) if bucket_of(port) == 0][:5]
    tags = {port: opened(bench, port) for port in ports}
    for port in (ports[2], ports[4], ports[0], ports[1], ports[3]):
        bench.say(tags.pop(port), ENDED)
        bench.look()
        assert bench.tags == set(tags.values())
        for other in tags:
            assert not bench.take(segment("A", other))
            assert int(bench.handed()["tag"]) == tags[other]


def bucket_of(port):
    """Where a client is looked for, if the secret is 0."""
    return siphash(0, 0, (0xC0000202 << 32 | port << 16 | 80) - (1 << 64)) >> 32 & SLOTS - 1


def test_queues_share_no_slots():
    with gn.Gpu("host") as gpu, ExitStack() as undo:
        bench = HandshakeBench(gpu, undo, queues=4, number=3)
        tags = [opened(bench, port) for port in range(1, 20)]
        assert {tag % 4 for tag in tags} == {3}
        bench.say(tags[5], ENDED)
        bench.look()
        assert bench.tags == set(tags) - {tags[5]}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (b"", (536, NO_SHIFT)), (b"\x02\x04\x05\xb4", (1460, NO_SHIFT)),
        (b"\x01\x03\x03\x07\x01\x02\x04\x00\x01", (64, 7)), (b"\x03\x03\xff", (536, 14)),
        (b"\x00\x02\x04\x05\xb4", (536, NO_SHIFT)), (b"\x02\x04\x05", (536, NO_SHIFT)), (b"\x02", (536, NO_SHIFT)),
        (b"\x05\x00\x02\x04\x05\xb4", (536, NO_SHIFT)), (b"\x08\x0a" + bytes(8), (536, NO_SHIFT)),
    ],
)
def test_options_of_a_syn(options, expected):
    data = np.frombuffer(options + b"\xff", np.uint8)
    assert read_options(data.ctypes.data, len(options)) == expected
