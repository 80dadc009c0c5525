"""Steering of frames by flow tables, against a model in plain Python, and frames against scapy's idea of them."""

import random
import threading
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import (
    ICMPv6EchoRequest,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
    PadN,
)
from scapy.layers.ipsec import AH
from scapy.layers.l2 import ARP, Dot1AD, Dot1Q, Ether
from scapy.packet import Packet, Raw

from ethernet_rig import Maker, nic_of
from flow_rig import TABLE, TIR, Refused, Steering, match
from gpunetio import PortConfig, verbs
from gpunetio.errors import TimedOutError
from gpunetio.formats.commands import Opcode
from gpunetio.formats.ethernet_queues import HashField, L3Prot, ModifyTir
from gpunetio.formats.flow import FTE_MATCH_PARAM, EntryModify
from gpunetio.nic.control.flow.entries import FlowEntries
from gpunetio.nic.control.flow.rules import hash_of
from gpunetio.nic.nic import SoftNic
from gpunetio.nic.state.ethernet_queues import TIR_ROW
from gpunetio.nic.state.flow import MATCHED, Fate
from gpunetio.nic.steering.hashing import _FACTOR, START
from gpunetio.nic.steering.rss import toeplitz_table
from steering_kernels import Frames, steer_and_serve
from steering_model import Rule, Table, fields_of, mutated, number, param_of, steered, toeplitz
from virtual_nics import stop_engine

L2 = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
V4 = IP(src="10.1.2.3", dst="192.168.7.9", tos=0xB9, ttl=7)
V6 = IPv6(src="2001:db8::5", dst="fe80::77", tc=0x35, hlim=3)
KEY = bytes.fromhex("6d5a56da255b0ec24167253d43a38fb0d0ca2bcbae7b30b477cb2da38030f20c6a42b73bbeac01fa")


class AnyTir:
    """TIRs of every number, without a hash: steering only hands them on."""

    def __init__(self) -> None:
        self._rows: dict[int, np.ndarray] = {}

    def need(self, number: int) -> int:
        row = self._rows.setdefault(number, np.zeros((), TIR_ROW.dtype))
        row["tirn"] = number
        return row.ctypes.data

    def hold(self, number: int, user: str) -> None: ...

    def release(self, number: int, user: str) -> None: ...


def with_any_tir(nic: SoftNic) -> Steering:
    (entries,) = (part for part in nic.control.handlers if isinstance(part, FlowEntries))
    entries._tirs = AnyTir()  # type: ignore[assignment]
    return Steering(nic)


@pytest.fixture(scope="module")
def flows() -> Iterator[Steering]:
    with verbs.open("soft0") as ctx:
        yield with_any_tir(ctx.provider.nic)  # type: ignore[attr-defined]


@pytest.fixture
def clean(flows) -> Iterator[Steering]:
    """Flow tables that are gone after the test."""
    yield flows
    wipe(flows)


def wipe(flows: Steering) -> None:
    flows.root(0)
    control = flows.nic.control
    (entries,) = (part for part in control.handlers if isinstance(part, FlowEntries))
    for table, index in list(entries._known):
        flows.delete(table, index)
    tables = sorted(control.flow_tables.known.values(), key=lambda table: table.level)
    for table in tables:
        for group in list(table.groups):
            flows.execute(Opcode.DESTROY_FLOW_GROUP, table_id=table.number, group_id=group)
        flows.execute(Opcode.DESTROY_FLOW_TABLE, table_id=table.number)
    for counter in list(control.flow_counters._bulks):
        flows.execute(Opcode.DEALLOC_FLOW_COUNTER, flow_counter_id=counter)


# --- frames


def packets() -> list[Packet]:
    tcp, udp = TCP(sport=4321, dport=443, flags="SPN", seq=1), UDP(sport=53, dport=4791)
    fragment, later = IPv6ExtHdrFragment(m=1, offset=0, id=7), IPv6ExtHdrFragment(m=0, offset=9, id=7)
    data = Raw(b"payload of a packet")
    hop, options = IPv6ExtHdrHopByHop(options=[PadN(optdata=b"\0" * 12)]), IPv6ExtHdrDestOpt(options=[PadN()])
    return [
        L2 / V4 / udp / data, L2 / V4 / tcp / data, L2 / V6 / udp / data, L2 / V6 / tcp / data,
        L2 / V4 / ICMP() / data, L2 / V6 / ICMPv6EchoRequest(), L2 / ARP(), L2 / Raw(b"x" * 50), L2,
        L2 / Dot1Q(vlan=5, prio=3, dei=1) / V4 / udp, L2 / Dot1AD(vlan=9, prio=7) / Dot1Q(vlan=4095) / V6 / tcp,
        L2 / Dot1Q(vlan=1) / Dot1Q(vlan=2) / Dot1Q(vlan=3) / V4 / udp, L2 / Dot1Q(vlan=8) / Dot1AD(vlan=6) / V4 / tcp,
        L2 / IP(src="1.2.3.4", dst="5.6.7.8", options=b"\x01" * 40) / udp / data,
        L2 / IP(src="1.2.3.4", dst="5.6.7.8", flags="MF", frag=0) / udp / data,
        L2 / IP(src="1.2.3.4", dst="5.6.7.8", flags="DF", frag=0) / udp / data,
        L2 / IP(src="1.2.3.4", dst="5.6.7.8", frag=100, proto=17) / data,
        L2 / V4 / TCP(sport=1, dport=2, options=[("MSS", 1460), ("NOP", None)]) / data,
        L2 / V6 / hop / udp / data, L2 / V6 / options / IPv6ExtHdrRouting(addresses=["::1"]) / tcp / data,
        L2 / V6 / fragment / udp / data, L2 / V6 / later / data, L2 / V6 / hop / fragment / tcp / data,
        L2 / V6 / IPv6ExtHdrFragment(id=3) / udp / data,
        L2 / V6 / options / options / options / options / udp, L2 / V6 / Raw(b""),
    ]


DISSECTED = [bytes(packet) for packet in packets()]
AUTHENTICATED = bytes(L2 / V6 / AH(nh=17, payloadlen=4, icv=b"\0" * 12) / UDP(sport=5, dport=6))  # opaque to scapy
FRAMES = [*DISSECTED, AUTHENTICATED]


def words(param: bytes) -> bytes:
    return b"".join(param[first : first + size] for first, size in MATCHED)


def test_frames_are_read_as_the_model_reads_them():
    """And what lies behind a frame in memory, or is cut off from it, does not matter."""
    rng = random.Random(1)
    frames = FRAMES + [mutated(rng.choice(FRAMES), rng) for _ in range(5000)]
    frames += [frame[:length] for frame in FRAMES for length in range(len(frame))]
    expected = [param_of(frame) for frame in frames]
    for behind in (0, 0xFF, 0x45):
        for frame, packet, param in zip(frames, Frames(frames, behind).parse(), expected, strict=True):
            known = bytes(512) if param is None else param.to_bytes(512, "big")
            assert packet["words"].tobytes() == words(known), (fields_of(frame), frame.hex())


def scapy_fields(frame: bytes) -> dict:
    """Return fields of a frame as scapy dissects it. It says nothing about damaged ones."""
    packet = Ether(frame)
    found = {
        "dmac": number(bytes.fromhex(packet.dst.replace(":", ""))),
        "smac": number(bytes.fromhex(packet.src.replace(":", ""))), "ethertype": packet.type,
    }
    tags = []
    layer = packet.payload
    while isinstance(layer, Dot1Q) and len(tags) < 2:
        tags.append((isinstance(layer, Dot1AD), layer.prio, layer.dei, layer.vlan))
        found["ethertype"], layer = layer.type, layer.payload
    if isinstance(layer, IP):
        found |= {"version": 4, "tos": layer.tos, "ttl": layer.ttl, "src": layer.src, "protocol": layer.proto,
                  "frag": int(layer.flags.MF or layer.frag != 0)}
    if isinstance(layer, IPv6):
        found |= {"version": 6, "tos": layer.tc, "ttl": layer.hlim, "src": layer.src}
        fragment = layer.getlayer(IPv6ExtHdrFragment)
        found["frag"] = int(fragment is not None and bool(fragment.m or fragment.offset))
    if isinstance(layer, IP | IPv6) and not found["frag"]:
        for kind in (TCP, UDP):
            if (header := layer.getlayer(kind)) is not None:
                found[kind.__name__] = (header.sport, header.dport, int(header.flags) if kind is TCP else 0)
    return found | {"tags": tags}


def our_fields(frame: bytes) -> dict:
    """Return the same of a frame as the NIC reads it."""
    (packet,) = Frames([frame]).parse()
    param = bytearray(512)
    for (first, size), at in zip(MATCHED, (0, 64), strict=True):
        param[first : first + size] = packet["words"].tobytes()[at : at + size]
    fields = FTE_MATCH_PARAM.unpack(param)
    outer, misc = fields["outer_headers"], fields["misc_parameters"]
    found = {
        "dmac": outer["dmac_47_16"] << 16 | outer["dmac_15_0"], "smac": outer["smac_47_16"] << 16 | outer["smac_15_0"],
        "ethertype": outer["ethertype"],
    }
    tags = []
    for part, mark, field in ((outer, "", "first"), (misc, "outer_second_", "outer_second")):
        if part[f"{mark}cvlan_tag"] or part[f"{mark}svlan_tag"]:
            tags.append((bool(part[f"{mark}svlan_tag"]), *(part[f"{field}_{name}"] for name in ("prio", "cfi", "vid"))))
    if outer["ip_version"]:
        source, version = outer["src_ipv4_src_ipv6"], outer["ip_version"]
        found |= {
            "version": version, "tos": outer["ip_dscp"] << 2 | outer["ip_ecn"], "ttl": outer["ttl_hoplimit"],
            "src": (IP(src=".".join(map(str, source[12:]))) if version == 4 else IPv6(source + bytes(24))).src,
            "frag": outer["frag"],
        }
        if version == 4:
            found["protocol"] = outer["ip_protocol"]
        else:
            found["src"] = IPv6(bytes(8) + source + bytes(16)).src
        if packet["l4"]:
            kind = {6: "tcp", 17: "udp"}[outer["ip_protocol"]]
            ports = outer[f"{kind}_sport"], outer[f"{kind}_dport"], outer["tcp_flags"]
            found[kind.upper()] = ports
    return found | {"tags": tags}


@pytest.mark.parametrize("frame", DISSECTED, ids=lambda frame: Ether(frame).summary()[:60])
def test_frames_are_read_as_scapy_reads_them(frame):
    assert our_fields(frame) == scapy_fields(frame)


def test_an_authentication_header():
    assert our_fields(AUTHENTICATED)["UDP"] == (5, 6, 0)


def test_places_of_headers():
    (udp, tagged, extended, fragment, short) = Frames([
        bytes(L2 / V4 / UDP() / Raw(b"1234")) + bytes(14), bytes(L2 / Dot1Q() / V6 / TCP()),
        bytes(L2 / V6 / IPv6ExtHdrDestOpt() / UDP()), bytes(L2 / IP(frag=5, proto=6) / Raw(b"x" * 40)), bytes(13),
    ]).parse()
    assert [tuple(p[["l3", "l4", "end"]].tolist()) for p in (udp, tagged, extended, fragment, short)] == [
        (14, 34, 46), (18, 58, 78), (14, 62, 70), (14, 0, 74), (0, 0, 0),
    ]


# --- one table


def verdicts(flows: Steering, *frames: bytes) -> list[tuple[Fate, int, int]]:
    return Frames(frames).steer(flows.nic)


def test_without_tables_nothing_is_decided(clean):
    assert verdicts(clean, FRAMES[0], b"short", b"") == [(Fate.MISS, 0, 0), (Fate.RUNT, 0, 0), (Fate.RUNT, 0, 0)]


def test_what_entries_do(clean):
    table, behind, counter = clean.table(), clean.table(level=7), clean.counter()
    ports, everything = clean.group(table, 0, 9, match({"udp_dport": 0xFFFF})), clean.group(behind, 0, 0)
    udp = [bytes(L2 / V4 / UDP(dport=port) / Raw(b"x" * port)) for port in range(5)]
    clean.set(table, ports, 0, match({"udp_dport": 1}), to=(TIR, 77), tag=5)
    clean.set(table, ports, 1, match({"udp_dport": 2}), counter=counter)
    clean.set(table, ports, 2, match({"udp_dport": 3}), to=(TABLE, behind), tag=9, counter=counter)
    clean.root(table)
    assert verdicts(clean, *udp) == [
        (Fate.MISS, 0, 0), (Fate.TIR, 77, 5), (Fate.DROP, 0, 0), (Fate.MISS, 0, 9), (Fate.MISS, 0, 0),
    ]
    assert clean.counts(counter) == (2, len(udp[2]) + len(udp[3]))
    clean.set(behind, everything, 0, to=(TIR, 78))
    clean.execute(
        Opcode.MODIFY_FLOW_TABLE, table_id=table, modify_field_select=1,
        flow_table_context={"table_miss_action": 1, "table_miss_id": behind},
    )
    assert verdicts(clean, *udp) == [
        (Fate.TIR, 78, 0), (Fate.TIR, 77, 5), (Fate.DROP, 0, 0), (Fate.TIR, 78, 9), (Fate.TIR, 78, 0),
    ]
    change = {"op_mod": 1, "modify_enable_mask": EntryModify.FLOW_TAG | EntryModify.DEST_LIST}
    clean.set(behind, everything, 0, to=(TIR, 79), tag=1, **change)
    assert verdicts(clean, udp[0], udp[3]) == [(Fate.TIR, 79, 1)] * 2
    clean.root(0)
    assert verdicts(clean, *udp) == [(Fate.MISS, 0, 0)] * 5


def test_a_query_can_clear_a_counter(clean):
    table, counter = clean.table(), clean.counter()
    clean.set(table, clean.group(table, 0, 0), 0, counter=counter)
    clean.root(table)
    verdicts(clean, FRAMES[0], FRAMES[0])
    assert clean.counts(counter, clear=1) == (2, 2 * len(FRAMES[0]))
    assert clean.counts(counter) == (0, 0)
    verdicts(clean, FRAMES[1])
    assert clean.counts(counter) == (1, len(FRAMES[1]))
    clean.delete(table, 0)
    clean.execute(Opcode.DEALLOC_FLOW_COUNTER, flow_counter_id=counter)
    first = clean.counter(flow_counter_bulk=1)
    assert counter in range(first, first + 128)
    assert clean.counts(counter) == (0, 0)


def test_the_lowest_index_decides(clean):
    """Within a group, among groups with one mask, and among masks; also when entries come and go."""
    table = clean.table(log=10)
    port, protocol = match({"udp_dport": 0xFFFF}), match({"ip_protocol": 0xFF})
    groups = {
        start: clean.group(table, start, start + 99, mask)
        for start, mask in ((100, port), (0, protocol), (300, port), (200, bytes(512)))
    }
    dns = match({"udp_dport": 53})
    values = {0: match({"ip_protocol": 17}), 100: dns, 300: dns, 200: bytes(512)}
    clean.root(table)
    frame = bytes(L2 / V4 / UDP(dport=53))
    present: set[int] = set()
    rng = random.Random(4)
    indices = [start + rng.randrange(100) for start in groups for _ in range(8)]
    for index in [*indices, *rng.sample(indices, len(indices))] * 2:
        start = index // 100 * 100
        if index in present:
            clean.delete(table, index)
            present.remove(index)
        else:
            clean.set(table, groups[start], index, values[start], to=(TIR, index + 1))
            present.add(index)
        expected = (Fate.TIR, min(present) + 1, 0) if present else (Fate.MISS, 0, 0)
        assert verdicts(clean, frame) == [expected]


def test_many_entries(clean):
    """The hash table of a mask grows, and is cleared of what was deleted."""
    table = clean.table(log=13)
    group = clean.group(table, 0, 8191, match({"udp_dport": 0xFFFF, "dst_ipv4_dst_ipv6": bytes(12) + b"\xff" * 4}))
    clean.root(table)
    frames = [bytes(L2 / IP(dst="10.0.0.1") / UDP(dport=1))]
    template = bytearray(frames[0])

    def frame(n: int) -> bytes:
        template[30:34], template[36:38] = (n * 7919).to_bytes(4, "big"), (n & 0xFFFF).to_bytes(2, "big")
        return bytes(template)

    def value(n: int) -> bytes:
        address = bytes(12) + (n * 7919).to_bytes(4, "big")
        return match({"udp_dport": n & 0xFFFF, "dst_ipv4_dst_ipv6": address})

    count = 2000
    everything = Frames([frame(n) for n in range(count)])
    for n in range(count):
        clean.set(table, group, n, value(n), to=(TIR, n + 1))
    assert everything.steer(clean.nic) == [(Fate.TIR, n + 1, 0) for n in range(count)]
    for n in range(0, count, 2):
        clean.delete(table, n)
    assert everything.steer(clean.nic) == [(Fate.TIR, n + 1, 0) if n % 2 else (Fate.MISS, 0, 0) for n in range(count)]
    for n in range(count):
        if n % 2:
            clean.delete(table, n)
        else:
            clean.set(table, group, 4000 + n, value(n), to=(TIR, n + 2))
    assert everything.steer(clean.nic) == [(Fate.MISS, 0, 0) if n % 2 else (Fate.TIR, n + 2, 0) for n in range(count)]


FIELDS = ("src_ipv4_src_ipv6", "dst_ipv4_dst_ipv6", "udp_sport", "udp_dport")


def with_sixteen_masks(flows: Steering, rng: random.Random, rules: int) -> int:
    """Return the number of a table of `rules` entries for each choice of addresses and ports; their values are few."""
    table = flows.table(log=14)
    for k, names in enumerate(names for n in range(len(FIELDS) + 1) for names in combinations(FIELDS, n)):
        ones = {name: bytes(12) + b"\xff" * 4 if "ip" in name else 0xFFFF for name in names}
        group = flows.group(table, k * rules, (k + 1) * rules - 1, match(ones))
        for index in range(k * rules, (k + 1) * rules if names else 0):
            values = dict(zip(FIELDS, few(rng), strict=True))
            flows.set(table, group, index, match({name: values[name] for name in names}), to=(TIR, index + 1))
    return table


def few(rng: random.Random) -> tuple[bytes, bytes, int, int]:
    """Return addresses and ports, of few different ones."""
    source, destination = (bytes((*bytes(12), 10, 0, rng.randrange(4), rng.randrange(60))) for _ in range(2))
    return source, destination, rng.randrange(300), rng.randrange(300)


def test_what_is_remembered_is_what_a_search_finds(clean):
    """Also if more flows come than are remembered, and when entries come, change and go."""
    rng = random.Random(5)
    table = with_sixteen_masks(clean, rng, 40)
    clean.root(table)
    template, frames = bytearray(bytes(L2 / IP(src="1.2.3.4", dst="5.6.7.8") / UDP(sport=1, dport=2))), []
    for _ in range(30_000):
        source, destination, *ports = few(rng)
        template[26:38] = source[12:] + destination[12:] + b"".join(port.to_bytes(2, "big") for port in ports)
        frames.append(bytes(template))
    given = Frames(frames)
    for _ in range(3):
        assert given.differences(clean.nic) == 0
        assert given.differences(clean.nic) == 0
        seen = {tir for _, tir, _ in given.steer(clean.nic)}
        assert len(seen) > 60
        for index in rng.sample(sorted(seen - {0}), 20):
            clean.delete(table, index - 1)
    assert given.steer(clean.nic) == given.steer(clean.nic, together=True)


SPREAD = [("udp_dport", 1), ("udp_sport", 256), ("tcp_sport", 1), ("first_vid", 1), ("dmac_47_16", 1),
          ("smac_15_0", 1), ("tcp_dport", 17)]
ADDRESSES = [("src_ipv4_src_ipv6", 1), ("dst_ipv4_dst_ipv6", 1 << 96), ("dst_ipv4_dst_ipv6", 1 << 8)]


def test_an_entry_that_an_engine_could_not_remove_remains(clean, monkeypatch):
    """Removing it again is refused for the same reason, and works once the engine answers."""
    packed = match({"ethertype": 0x88B5})
    table = clean.table()
    clean.set(table, clean.group(table, 0, 3, packed), 0, packed)
    rules = clean.nic.control.flow_tables.known[table].rules

    def refuse(*_: object) -> None:
        raise TimedOutError("the engine does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(rules, "_write", refuse)
        for _ in range(2):
            with pytest.raises(Refused, match="the engine does not answer"):
                clean.delete(table, 0)
    assert len(rules.read()[0]) == 1
    clean.delete(table, 0)
    assert len(rules.read()[0]) == 0


@pytest.mark.parametrize(("name", "step"), SPREAD + ADDRESSES)
def test_values_in_a_row_spread_over_the_slots(clean, name, step):
    """A search is short wherever the bits that differ lie in a word. Without collisions, it looks at one slot."""
    width = FTE_MATCH_PARAM.fields["outer_headers"].struct.fields[name].width  # type: ignore[union-attr]

    def packed(value: int) -> bytes:
        return match({name: value if width <= 64 else value.to_bytes(width // 8, "big")})

    table, count = clean.table(log=10), min(1 << width, 1 << 16) // (step if width <= 64 else 128)
    count = min(count, 512)
    group = clean.group(table, 0, 1023, packed((1 << width) - 1))
    for n in range(count):
        clean.set(table, group, n, packed(n * step))
    (mask,) = clean.nic.control.flow_tables.known[table].rules._masks.values()
    slots = np.flatnonzero(mask.table)
    assert len(slots) == count
    entries = clean.nic.control.flow_tables.known[table].rules._rows[(mask.table[slots] & 0xFFFFFFFF) - 1]
    distances = (slots - hash_of(entries["value"][:, : len(mask.compared)])) % len(mask.table)
    assert distances.mean() < 1


def test_a_deleted_slot_leads_to_no_entry(clean):
    """Not even for a packet whose hash has the same upper half, which is 0: the address is computed backwards."""
    modulus = 1 << 64
    product = 5  # a hash whose upper half is 0, before it is folded
    both = product * pow(int(_FACTOR), -1, modulus) % modulus
    word = (both ^ both >> 32) ^ START
    half = word.to_bytes(8, "little")
    assert hash_of(np.array([[np.frombuffer(half, np.int64)[0]]])) == [5]
    table = clean.table()
    group = clean.group(table, 0, 9, match({"src_ipv4_src_ipv6": b"\xff" * 8 + bytes(8)}))
    clean.root(table)
    frame = bytearray(FRAMES[2])
    frame[22:30] = half
    clean.set(table, group, 0, match({"src_ipv4_src_ipv6": half + bytes(8)}), to=(TIR, 1))
    assert verdicts(clean, bytes(frame)) == [(Fate.TIR, 1, 0)]
    clean.delete(table, 0)
    assert verdicts(clean, bytes(frame)) == [(Fate.MISS, 0, 0)]


def test_jumps_end(clean):
    """Entries that ignore levels can lead a packet round in circles."""
    one, other, counter = clean.table(), clean.table(), clean.counter()
    groups = [clean.group(table, 0, 0) for table in (one, other)]
    clean.set(one, groups[0], 0, to=(TABLE, other), ignore_flow_level=1, counter=counter)
    clean.set(other, groups[1], 0, to=(TABLE, one), ignore_flow_level=1)
    clean.root(one)
    assert verdicts(clean, FRAMES[0]) == [(Fate.LOOP, 0, 0)]
    assert clean.counts(counter)[0] == 32
    clean.delete(one, 0)
    clean.delete(other, 0)


def test_a_chain_through_all_levels(clean):
    tables = [clean.table(level=level) for level in range(64)]
    for table, behind in pairwise(tables):
        clean.set(table, clean.group(table, 0, 0), 0, to=(TABLE, behind))
    clean.set(tables[-1], clean.group(tables[-1], 0, 0), 0, to=(TIR, 5))
    clean.root(tables[0])
    assert verdicts(clean, FRAMES[0]) == [(Fate.TIR, 5, 0)]


def test_flows_that_are_remembered_in_one_place(clean):
    """They differ in their source MAC, which does not choose the place."""
    root, behind, counter = clean.table(), clean.table(level=1), clean.counter()
    clean.set(root, clean.group(root, 0, 0), 0, to=(TABLE, behind), counter=counter)
    macs = clean.group(behind, 0, 9, match({"smac_15_0": 0xFFFF}))
    frames = [bytes(Ether(src=f"02:00:00:00:00:0{i}") / V4 / UDP(sport=1, dport=2)) for i in range(3)]
    for i in range(3):
        clean.set(behind, macs, i, match({"smac_15_0": i}), to=(TIR, 10 + i), tag=20 + i)
    clean.root(root)
    order = [0] * 20 + random.Random(1).choices((0, 1, 2), k=20_000) + [2] * 20
    assert verdicts(clean, *(frames[i] for i in order)) == [(Fate.TIR, 10 + i, 20 + i) for i in order]
    assert clean.counts(counter) == (len(order), len(order) * len(frames[0]))
    clean.delete(behind, 2)
    assert verdicts(clean, frames[2], frames[1]) == [(Fate.MISS, 0, 0), (Fate.TIR, 11, 21)]


# --- against the model

MATCHABLE = {
    "outer_headers": [
        "smac_47_16", "smac_15_0", "ethertype", "dmac_47_16", "dmac_15_0", "first_prio", "first_cfi", "first_vid",
        "ip_protocol", "ip_dscp", "ip_ecn", "cvlan_tag", "svlan_tag", "frag", "ip_version", "tcp_flags", "tcp_sport",
        "tcp_dport", "ttl_hoplimit", "udp_sport", "udp_dport", "src_ipv4_src_ipv6", "dst_ipv4_dst_ipv6",
    ],
    "misc_parameters": [
        "outer_second_prio", "outer_second_cfi", "outer_second_vid", "outer_second_cvlan_tag", "outer_second_svlan_tag",
    ],
}
NAMES = [(part, name) for part, names in MATCHABLE.items() for name in names]


def random_mask(rng: random.Random) -> bytes:
    """Return a mask of up to four fields, mostly of whole ones."""
    fields: dict = {part: {} for part in MATCHABLE}
    for part, name in rng.sample(NAMES, rng.choice((0, 1, 1, 2, 2, 3, 4))):
        width = FTE_MATCH_PARAM.fields[part].struct.fields[name].width  # type: ignore[union-attr]
        ones = (1 << width) - 1
        bits = ones if rng.random() < 0.7 else rng.randrange(ones + 1)
        fields[part][name] = bits if width <= 64 else bits.to_bytes(width // 8, "big")
    return match(fields["outer_headers"], fields["misc_parameters"])


class Twin:
    """Tables of the NIC, and the model of them."""

    def __init__(self, flows: Steering, rng: random.Random):
        self.flows, self.rng = flows, rng
        self.params = [number(match(*fields_of(frame))) for frame in FRAMES]  # type: ignore[misc]
        self.tables: list[Table] = []
        self.groups: list[tuple[Table, int, int, int]] = []
        self.counters = [flows.counter() for _ in range(3)]
        self.counts: dict[int, tuple[int, int]] = {}
        for level in range(rng.randrange(1, 4)):
            miss = rng.choice([None, *self.tables])
            table = Table(flows.table(level=9 - level, log=6, miss=miss.number if miss else 0), 9 - level, miss)
            self.tables.append(table)
            starts = rng.sample(range(0, 64, 8), rng.randrange(1, 7))
            masks = [random_mask(rng) for _ in range(rng.choice((3, 7)))]
            for start in starts:
                mask = rng.choice(masks)
                group = flows.group(table.number, start, start + 7, mask)
                self.groups.append((table, group, start, number(mask)))
        self.root = rng.choice(self.tables)
        flows.root(self.root.number)

    def change(self) -> None:
        """Add, change or remove an entry."""
        rng = self.rng
        table, group, start, mask = rng.choice(self.groups)
        index = start + rng.randrange(8)
        if index in table.rules and rng.random() < 0.5:
            self.flows.delete(table.number, index)
            del table.rules[index]
            return
        behind = [other for other in self.tables if other.level > table.level]
        kind = rng.choice([Fate.TIR, Fate.TIR, Fate.DROP, Fate.JUMP if behind else Fate.TIR])
        to: int | Table = {Fate.TIR: rng.randrange(1, 1 << 24), Fate.DROP: 0}.get(kind) or 0
        if kind is Fate.JUMP:
            to = rng.choice(behind)
        value = rng.choice(self.params) & mask if rng.random() < 0.9 else rng.randrange(1 << 4096) & mask
        rule = Rule(mask, value, kind, to, rng.choice((0, 0, rng.randrange(1 << 24))), rng.choice((0, *self.counters)))
        changed = index in table.rules
        if changed:
            rule.value = table.rules[index].value
        where = (TABLE, to.number) if isinstance(to, Table) else (TIR, to) if to else None
        self.flows.set(
            table.number, group, index, rule.value.to_bytes(512, "big"), to=where, tag=rule.tag, counter=rule.counter,
            op_mod=int(changed), modify_enable_mask=15 if changed else 0,
        )
        table.rules[index] = rule

    def compare(self, frames: list[bytes]) -> None:
        frames = [*frames, *frames]  # the second time, tables remember
        got = Frames(frames).steer(self.flows.nic, together=self.rng.random() < 0.5)
        for frame, verdict in zip(frames, got, strict=True):
            assert verdict == steered(self.root, frame, self.counts), (fields_of(frame), frame.hex())
        assert [self.flows.counts(c) for c in self.counters] == [self.counts.get(c, (0, 0)) for c in self.counters]


def against_the_model(flows: Steering, rng: random.Random, rounds: int, frames: int) -> None:
    try:
        twin = Twin(flows, rng)
        for _ in range(rounds):
            for _ in range(rng.randrange(25)):
                twin.change()
            twin.compare([mutated(rng.choice(FRAMES), rng) for _ in range(frames)])
    finally:
        wipe(flows)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_random_tables(flows, seed):
    against_the_model(flows, random.Random(seed), 4, 100)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_random_tables_at_length(flows, seed):
    against_the_model(flows, random.Random(seed), 10, 100)


# --- changes under traffic


@pytest.mark.parametrize("masks", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_changes_under_traffic(masks):
    """A frame sees an entry before a change or after it: never half of it, and never that of another frame."""
    with verbs.open("soft3", port=PortConfig(workers=1)) as ctx:
        flows = with_any_tir(ctx.provider.nic)  # type: ignore[attr-defined]
        nic = flows.nic
        table = flows.table(log=13)
        group = flows.group(table, 0, 4094, match({"udp_dport": 0xFFFF}))
        for n in range(1, masks):  # masks without entries: with several, tables remember
            flows.group(table, 4095 + n, 4095 + n, match({"udp_dport": 0xFFFF, "ttl_hoplimit": n}))
        flows.root(table)
        ports = range(1, 65)
        frames = Frames([bytes(L2 / V4 / UDP(dport=port)) for port in ports])
        frames.rows["expected"] = ports
        stop, wrong = np.zeros(1, np.int64), []
        stop_engine(nic)
        execute: Callable[..., object] = nic.control.interpreter.execute
        nic.execute = execute  # type: ignore[method-assign]
        arguments = nic.control_address, frames.address, len(frames), stop.ctypes.data
        loop = threading.Thread(target=lambda: wrong.append(steer_and_serve(*arguments)))
        loop.start()
        try:
            for generation in range(1, 12):
                for port in ports:
                    if generation % 3 == 0:
                        flows.delete(table, port)
                    else:
                        change = {"op_mod": 1, "modify_enable_mask": 6} if generation % 3 == 2 else {}
                        target = generation << 16 | port
                        flows.set(
                            table, group, port, match({"udp_dport": port}), to=(TIR, target), tag=target, **change
                        )
        finally:
            stop[0] = 1
            loop.join(10)
            nic.engine.start()
        assert wrong == [0]
        assert verdicts(flows, *frames.frames) == [(Fate.TIR, 11 << 16 | port, 11 << 16 | port) for port in ports]


# --- RSS

VECTORS = [  # Microsoft, "Verifying the RSS Hash Calculation": source, destination, ports, hash without and with ports
    ("66.9.149.187", "161.142.100.80", 2794, 1766, 0x323E8FC2, 0x51CCC178),
    ("199.92.111.2", "65.69.140.83", 14230, 4739, 0xD718262A, 0xC626B0EA),
    ("24.19.198.95", "12.22.207.184", 12898, 38024, 0xD2D0A5DE, 0x5C2B394A),
    ("38.27.205.30", "209.142.163.6", 48228, 2217, 0x82989176, 0xAFC7327F),
    ("153.39.163.191", "202.188.127.2", 44251, 1303, 0x5D1809C5, 0x10E828A2),
    ("3ffe:2501:200:1fff::7", "3ffe:2501:200:3::1", 2794, 1766, 0x2CC18CD5, 0x40207D3D),
    ("3ffe:501:8::260:97ff:fe40:efab", "ff02::1", 14230, 4739, 0x0F0C461C, 0xDDE51BBF),
    ("3ffe:1900:4545:3:200:f8ff:fe21:67cf", "fe80::200:f8ff:fe21:67cf", 44251, 38024, 0x4B61E985, 0x02D1FEEF),
]


def rss(table: np.ndarray, fields: int, version: int, protocol: int = 6, symmetric: int = 0) -> np.ndarray:
    row = np.zeros((), TIR_ROW.dtype)
    row["toeplitz"], row["fields"], row["symmetric"] = table.ctypes.data, fields, symmetric
    row["l3_prot"], row["l4_prot"] = L3Prot.IPV6 if version == 6 else L3Prot.IPV4, protocol == 17
    return row


@pytest.mark.parametrize(("source", "destination", "sport", "dport", "without", "with_ports"), VECTORS)
@pytest.mark.parametrize("kind", [TCP, UDP])
def test_published_hashes(kind, source, destination, sport, dport, without, with_ports):
    version = 6 if ":" in source else 4
    ip = (IPv6 if version == 6 else IP)(src=source, dst=destination)
    frame, table = bytes(L2 / ip / kind(sport=sport, dport=dport)), toeplitz_table(KEY)
    ips, ports = HashField.SRC_IP | HashField.DST_IP, HashField.L4_SPORT | HashField.L4_DPORT
    protocol = 6 if kind is TCP else 17
    assert Frames([frame]).hashes(rss(table, ips, version)) == [without]
    assert Frames([frame]).hashes(rss(table, ips | ports, version, protocol)) == [with_ports]
    for other in (rss(table, ips, 10 - version), rss(table, ips | ports, version, 23 - protocol)):
        assert Frames([frame]).hashes(other) == [0]


@settings(max_examples=50, deadline=None)
@given(key=st.binary(min_size=40, max_size=40), fields=st.integers(0, 15), seed=st.integers(0, 1 << 32))
def test_hashes_of_any_fields(key, fields, seed):
    rng = random.Random(seed)
    for frame in rng.sample(FRAMES[:4], 2):
        outer = fields_of(frame)[0]  # type: ignore[index]
        version, kind = outer["ip_version"], "tcp" if outer["ip_protocol"] == 6 else "udp"
        skipped = 12 if version == 4 else 0
        parts = [
            outer["src_ipv4_src_ipv6"][skipped:], outer["dst_ipv4_dst_ipv6"][skipped:],
            outer[f"{kind}_sport"].to_bytes(2, "big"), outer[f"{kind}_dport"].to_bytes(2, "big"),
        ]
        data = b"".join(part for bit, part in enumerate(parts) if fields >> bit & 1)
        table = toeplitz_table(key)
        row = rss(table, fields, version, outer["ip_protocol"])
        assert Frames([frame]).hashes(row) == [toeplitz(key, data)]


def test_the_hash_of_a_tir():
    """The TIRs that commands make hash what is steered to them, also after they were modified."""
    with verbs.open("soft2") as ctx:
        make, nic = Maker(ctx), nic_of(ctx)
        flows = Steering(nic)
        domain = make.domain().number
        table = make.rqt([make.rq(make.cq().number).number]).number
        selector = {"l3_prot_type": 0, "l4_prot_type": 1, "selected_fields": 15}
        hashed = {"rx_hash_fn": 2, "rx_hash_field_selector_outer": selector}
        tirs = [make.hashed(domain, table, rx_hash_toeplitz_key=KEY, **hashed) for _ in range(2)]
        rules = flows.table()
        ports = flows.group(rules, 0, 9, match({"udp_dport": 0xFFFF}))
        frames = [bytes(L2 / IP(src="1.2.3.4", dst="5.6.7.8") / UDP(sport=9, dport=port)) for port in (1, 2)]
        data = [bytes([1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 0, port]) for port in (1, 2)]
        for index, tir in enumerate(tirs):
            flows.set(rules, ports, index, match({"udp_dport": index + 1}), to=(TIR, tir.number))
        flows.root(rules)
        steered_frames = Frames(frames)
        assert steered_frames.steer(nic) == [(Fate.TIR, tir.number, 0) for tir in tirs]
        assert steered_frames.rows["hash"].tolist() == [toeplitz(KEY, part) for part in data]
        other = bytes(reversed(KEY))
        tirs[0].modify(
            Opcode.MODIFY_TIR, bitmask=ModifyTir.HASH, ctx={"rx_hash_toeplitz_key": other, **hashed}
        )
        steered_frames.steer(nic)
        assert steered_frames.rows["hash"].tolist() == [toeplitz(other, data[0]), toeplitz(KEY, data[1])]
        with pytest.raises(Refused, match=f"TIR {tirs[1].number:#x} is used by entry 1 of flow table {rules:#x}"):
            flows.execute(Opcode.DESTROY_TIR, tirn=tirs[1].number)
        flows.delete(rules, 1)
        tirs[1].close()
        steered_frames.steer(nic)
        assert steered_frames.rows["hash"].tolist() == [toeplitz(other, data[0]), 0]
        flows.delete(rules, 0)


def test_the_hash_of_a_header_that_is_cut_off():
    """It has no ports, and is not remembered as one with the ports 0."""
    with verbs.open("soft2") as ctx:
        make, flows = Maker(ctx), Steering(nic_of(ctx))
        rq = make.rq(make.cq().number).number
        tir = make.hashed(
            make.domain().number, make.rqt([rq]).number, rx_hash_fn=2, rx_hash_toeplitz_key=KEY,
            rx_hash_field_selector_outer={"l3_prot_type": 0, "l4_prot_type": 1, "selected_fields": 15},
        )
        root, behind = flows.table(), flows.table(level=1)
        flows.set(root, flows.group(root, 0, 0), 0, to=(TABLE, behind))
        flows.set(behind, flows.group(behind, 0, 0), 0, to=(TIR, tir.number))
        flows.root(root)
        ip = IP(src="1.2.3.4", dst="5.6.7.8", proto=17)
        steered_frames = Frames([bytes(L2 / ip / Raw(bytes(nbytes))) for nbytes in (8, 4, 8, 4)])
        steered_frames.steer(flows.nic)
        hashed = toeplitz(KEY, bytes([1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0]))
        assert steered_frames.rows["hash"].tolist() == [hashed, 0] * 2
        flows.root(0)
        flows.delete(behind, 0)
        flows.delete(root, 0)


def test_fragments_have_no_ports_to_hash():
    table = toeplitz_table(KEY)
    fragment = bytes(L2 / IP(src="1.2.3.4", dst="5.6.7.8", flags="MF") / UDP(sport=1, dport=2))
    assert Frames([fragment]).hashes(rss(table, 15, 4, 17)) == [0]
    assert Frames([fragment]).hashes(rss(table, 3, 4, 17)) == [toeplitz(KEY, bytes([1, 2, 3, 4, 5, 6, 7, 8]))]


def test_symmetric_hashes():
    table = toeplitz_table(KEY)
    for ip, kind, a, b in ((IP, UDP, "1.2.3.4", "5.6.7.8"), (IPv6, TCP, "::5", "::9")):
        version, protocol = (4 if ip is IP else 6), (17 if kind is UDP else 6)
        there, back = ip(src=a, dst=b) / kind(sport=1, dport=2), ip(src=b, dst=a) / kind(sport=2, dport=1)
        one, other = (Frames([bytes(L2 / packet)]) for packet in (there, back))
        symmetric, plain = (rss(table, 15, version, protocol, how) for how in (1, 0))
        assert one.hashes(symmetric) == other.hashes(symmetric) != [0]
        assert one.hashes(plain) != other.hashes(plain)

