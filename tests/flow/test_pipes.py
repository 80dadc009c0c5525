"""Pipes: values that rules give, priorities, what they lead to, misses; and random rules against plain Python."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import ARP, Dot1Q, Ether

from flow_port_rig import Setup, steered
from gpunetio.errors import InUseError, InvalidValueError
from gpunetio.flow import DROP, KERNEL, PER_ENTRY, Match, PipeType, Rss, TcpFlag, match
from gpunetio.nic.state.flow import Fate
from steering_model import fields_of, mutated, number

BASIC, CONTROL = PipeType
L2 = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
MISS, DROPPED = (Fate.MISS, 0, 0), (Fate.DROP, 0, 0)


@pytest.fixture
def flows():
    with steered() as flows:
        yield flows


def taken(rq: Any, tag: int = 0) -> tuple[Fate, int, int]:
    return Fate.TIR, rq.number, tag


def tcp(flags: str = "A", **fields: int) -> bytes:
    return bytes(L2 / IP(src="10.0.0.1", dst="10.0.0.2") / TCP(flags=flags, **fields))


UDP_FRAME, ICMP_FRAME = bytes(L2 / IP() / UDP(dport=53)), bytes(L2 / IP() / ICMP())


def test_pipes_of_a_packet_processing_program(flows):
    """A root that tells protocols apart by priority, and pipes behind it; connections come and go."""
    gpu_udp, gpu_icmp, gpu_tcp, cpu = [flows.rq(), flows.rq()], flows.rq(), flows.rq(), flows.rq()
    port = flows.port
    udp = port.create_pipe("udp", match=match.ipv4() & match.udp() & match.whole(), to=Rss(gpu_udp))
    icmp = port.create_pipe("icmp", match=match.icmp(), to=gpu_icmp)
    handshakes = port.create_pipe("cpu tcp", match=match.ipv4() & match.tcp(), to=[cpu])
    connection = match.ipv4(src=PER_ENTRY, dst=PER_ENTRY) & match.tcp(src=PER_ENTRY, dst=PER_ENTRY)
    connections = port.create_pipe("gpu tcp", match=connection, to=gpu_tcp, miss=handshakes)
    for pipe in (udp, icmp, handshakes):
        pipe.add()
    root = port.create_pipe("root", CONTROL, root=True)
    root.add(match.udp(), udp, priority=0)
    for flag in (TcpFlag.SYN, TcpFlag.FIN, TcpFlag.RST):
        root.add(match.tcp(flags=flag), handshakes, priority=1)
    root.add(match.icmp(), icmp, priority=3)
    root.add(match.tcp(), connections, priority=3)
    arp = bytes(L2 / ARP())
    data = tcp(sport=1000, dport=80)
    assert flows.met([ICMP_FRAME, tcp("S"), tcp("FR"), data, arp]) == [
        taken(gpu_icmp), taken(cpu), taken(cpu), taken(cpu), MISS
    ]
    assert flows.met([UDP_FRAME])[0][1] in {queue.number for queue in gpu_udp}
    known = match.ipv4(src="10.0.0.1", dst="10.0.0.2") & match.tcp(src=1000, dst=80)
    with connections.add(known) as rule:
        assert flows.met([data, tcp("S", sport=1000, dport=80), tcp(sport=1001, dport=80)]) == [
            taken(gpu_tcp), taken(cpu), taken(cpu)
        ]
        assert rule.counter == (1, len(data))
    assert flows.met([data]) == [taken(cpu)]
    assert (connections.missed.packets, root.missed.packets) == (3, 1)


def test_the_longest_prefix(flows):
    """Networks in a control pipe, with 32 less the length of the prefix as priority, in any order."""
    port, networks = flows.port, ["10.1.0.0/16", "10.1.2.3/32", "0.0.0.0/0", "10.0.0.0/8", "10.1.2.0/24", "10.2.0.0/16"]
    queues = {network: flows.rq() for network in networks}
    routes = port.create_pipe("routes", CONTROL, root=True)
    for network, queue in queues.items():
        routes.add(match.ipv4(dst=network), queue, priority=32 - int(network.partition("/")[2]))
    expected = {
        "10.1.2.3": "10.1.2.3/32", "10.1.2.4": "10.1.2.0/24", "10.1.3.3": "10.1.0.0/16", "10.2.2.3": "10.2.0.0/16",
        "10.3.2.3": "10.0.0.0/8", "11.1.2.3": "0.0.0.0/0",
    }
    frames = [bytes(L2 / IP(dst=address) / UDP()) for address in expected]
    assert flows.met(frames) == [taken(queues[network]) for network in expected.values()]


def test_misses(flows):
    queue, port = flows.rq(), flows.port
    leaf = port.create_pipe("leaf", match=match.udp(dst=PER_ENTRY), to=queue, miss=DROP, root=True)
    leaf.add(match.udp(dst=53))
    leaf.add(match.udp(dst=54), to=DROP, tag=0, count=False)
    other = bytes(L2 / IP() / UDP(dport=1))
    assert flows.met([UDP_FRAME, other, ICMP_FRAME]) == [taken(queue), DROPPED, DROPPED]
    leaf.update_miss(KERNEL)
    assert flows.met([UDP_FRAME, other, ICMP_FRAME]) == [taken(queue), MISS, MISS]
    leaf.update_miss(queue)
    assert flows.met([other]) == [taken(queue)]
    with pytest.raises(InUseError, match=r"still used by rule .*, pipe leaf: close that first"):
        queue.close()
    leaf.update_miss(DROP)
    assert leaf.missed.packets == 5
    leaf.close()
    assert flows.met([UDP_FRAME]) == [MISS]
    queue.close()


def test_entries_that_do_not_fit(flows):
    pipe = flows.port.create_pipe("leaf", match=match.ipv4(src=PER_ENTRY) & match.udp(dst=53), to=DROP)
    pipe.add(match.ipv4(src="10.0.0.1"))
    pipe.add(match.ipv4(src="10.0.0.2") & match.udp(dst=53))
    for wrong, words in (
        (None, r"everything: pipe leaf matches .*: give src_ipv4_src_ipv6"),
        (match.ipv4(src="10.0.0.0/8"), r"give src_ipv4_src_ipv6"),
        (match.ipv4(src="10.0.0.3") & match.udp(dst=54), r"udp_dport is not that of pipe leaf"),
        (match.ipv4(src="10.0.0.3", ttl=1), r"pipe leaf does not compare ttl_hoplimit"),
        (match.ipv4(src=PER_ENTRY), r"a rule has values, not PER_ENTRY"),
        (match.ipv4(src="10.0.0.1"), r"matches just that already"),
    ):
        with pytest.raises(InvalidValueError, match=words):
            pipe.add(wrong)
    with pytest.raises(InvalidValueError, match="only rules of a CONTROL pipe have one"):
        pipe.add(match.ipv4(src="10.0.0.4"), priority=1)
    assert len(pipe.rules) == 2


def test_pipes_that_do_not_fit(flows):
    port = flows.port
    for arguments, words in (
        ({}, "a BASIC pipe takes a match, a CONTROL pipe none"),
        ({"kind": CONTROL, "match": match.udp()}, "a BASIC pipe takes a match, a CONTROL pipe none"),
        ({"kind": 7}, "kind = 7"), ({"match": 53}, "match = 53 is of type int"),
    ):
        with pytest.raises(InvalidValueError, match=words):
            port.create_pipe("wrong", **arguments)
    root = port.create_pipe("root", CONTROL, root=True)
    with pytest.raises(InUseError, match="has a root pipe already, pipe root: close it first"):
        port.create_pipe("another", CONTROL, root=True)
    with pytest.raises(InvalidValueError, match="has no target of its own"):
        root.add(match.udp())
    with pytest.raises(InvalidValueError, match="PER_ENTRY belongs into the match of a BASIC pipe"):
        root.add(match.udp(dst=PER_ENTRY), DROP)


def test_pipes_go_in_the_right_order(flows):
    port = flows.port
    first = port.create_pipe("first", CONTROL, root=True)
    second = port.create_pipe("second", CONTROL, miss=DROP)
    rule = first.add(match.udp(), second)
    for back in (lambda: second.add(match.tcp(), first), lambda: second.update_miss(first)):
        with pytest.raises(InvalidValueError, match="pipe second cannot lead to pipe first, which leads back to it"):
            back()
    with pytest.raises(InUseError, match=r"pipe second is still used by rule udp\(\) → pipe second: close that first"):
        second.close()
    rule.close()
    first.update_miss(second)
    with pytest.raises(InUseError, match="pipe second is still used by pipe first"):
        second.close()
    first.close()
    second.update_miss(KERNEL)
    second.close()
    port.create_pipe("root", CONTROL, root=True)  # which closes with the port


def test_a_port_closes_pipes_that_lead_to_newer_ones():
    with steered() as flows:
        old = flows.port.create_pipe("old", CONTROL, root=True)
        new = flows.port.create_pipe("new", CONTROL)
        old.update_miss(new)
        new.add(match.udp(), flows.rq(), priority=5)
    assert (old.closed, new.closed) == (True, True)


# --- random rules


@dataclass
class Spec:
    """A match in the form of this library, and as a function of a frame's fields."""

    match: Match
    fits: Callable[[dict], bool]


def prefix(rng: random.Random) -> tuple[str, Callable[[int], bool]]:
    length = rng.choice((0, 8, 16, 31, 32))
    bits = rng.choice((0x0A010203, 0xC0A80709, 0x0A010204)) >> (32 - length) << (32 - length)
    text = f"{'.'.join(str(bits >> shift & 255) for shift in (24, 16, 8, 0))}/{length}"
    return text, lambda address: address >> (32 - length) == bits >> (32 - length)


def spec(rng: random.Random) -> Spec:
    """A random match of headers that go together."""
    parts, tests = [match.everything()], []
    if rng.random() < 0.2:
        vid = rng.choice((5, 6))
        parts.append(match.vlan(vid))
        tests.append(lambda f: f.get("cvlan_tag") == 1 and f["first_vid"] == vid)
    if rng.random() < 0.3:
        source = rng.choice((1, 2))
        parts.append(match.eth(src=bytes((2, 0, 0, 0, 0, source))))
        tests.append(lambda f: (f["smac_47_16"], f["smac_15_0"]) == (0x02000000, source))
    version = rng.choice((None, None, 4, 6))
    if version == 4:
        (src, in_src), (dst, in_dst) = prefix(rng), prefix(rng)
        parts.append(match.ipv4(src=src, dst=dst))
        tests.append(
            lambda f: f.get("ip_version") == 4 and in_src(number(f["src_ipv4_src_ipv6"]))
            and in_dst(number(f["dst_ipv4_dst_ipv6"]))
        )
    elif version == 6:
        limit = rng.choice((1, 64))
        parts.append(match.ipv6(hop_limit=limit))
        tests.append(lambda f: f.get("ip_version") == 6 and f["ttl_hoplimit"] == limit)
    kind = rng.choice((None, "udp", "tcp"))
    if kind == "udp":
        value, mask = rng.choice(((53, 0xFFFF), (54, 0xFFFF), (48, 0xFFF0)))
        parts.append(match.udp(dst=(value, mask)))
        tests.append(
            lambda f: f.get("ip_protocol") == 17 and not f.get("frag") and f.get("udp_dport", 0) & mask == value
        )
    elif kind == "tcp":
        flag = rng.choice((TcpFlag.SYN, TcpFlag.ACK, TcpFlag.SYN | TcpFlag.ACK))
        parts.append(match.tcp(flags=flag))
        tests.append(lambda f: f.get("ip_protocol") == 6 and not f.get("frag") and f.get("tcp_flags", 0) & flag == flag)
    whole = parts[0]
    for part in parts[1:]:
        whole = whole & part
    return Spec(whole, lambda f: all(test(f) for test in tests))


def random_frame(rng: random.Random) -> bytes:
    frame = Ether(src=f"02:00:00:00:00:0{rng.choice((1, 2, 3))}", dst="02:00:00:00:00:09")
    if rng.random() < 0.3:
        frame = frame / Dot1Q(vlan=rng.choice((5, 6, 7)))
    addresses = ("10.1.2.3", "192.168.7.9", "10.1.2.4", "11.0.0.1")
    if rng.random() < 0.7:
        frame = frame / IP(src=rng.choice(addresses), dst=rng.choice(addresses))
    else:
        frame = frame / IPv6(src="fe80::1", dst="fe80::2", hlim=rng.choice((1, 64, 65)))
    l4 = rng.choice((UDP(dport=rng.choice((48, 53, 54, 99))), TCP(flags=rng.choice(("S", "A", "SA", "F"))), ICMP()))
    return bytes(frame / l4 / b"payload")


@functools.cache
def pool() -> list[bytes]:
    rng = random.Random(5)
    return [random_frame(rng) for _ in range(1000)]


def compare(flows: Setup, seed: int, rules: int, frames: int) -> None:
    """Random rules in the two forms and at three priorities, some of which go again, against plain Python."""
    rng = random.Random(seed)
    port = flows.port
    queues = [flows.rq() for _ in range(3)]
    targets = [(queue, taken(queue)) for queue in queues] + [(DROP, DROPPED), (KERNEL, MISS)]
    miss, default = rng.choice(((DROP, DROPPED), (KERNEL, MISS)))
    root = port.create_pipe("root", CONTROL, root=True, miss=miss)
    stages: tuple[list, list] = ([], [])  # of `steer`, and of the root pipe
    for _ in range(rules):
        made, stage, priority = spec(rng), rng.randrange(2), rng.randrange(3)
        to, verdict = rng.choice(targets)
        tag = rng.choice((0, 7)) if verdict[0] == Fate.TIR else 0
        try:
            add = (port.steer, root.add)[stage]
            rule = add(made.match, to, priority=priority, tag=tag)
        except InvalidValueError:  # it contradicts another one
            continue
        stages[stage].append((priority, made, (verdict[0], verdict[1], tag), rule))
    for stage in stages:
        for entry in rng.sample(stage, len(stage) // 3):
            stage.remove(entry)
            entry[3].close()
    given = [mutated(rng.choice(pool()), rng) for _ in range(frames)]
    found = flows.met(given)
    for frame, verdict in zip(given, found, strict=True):
        fields = fields_of(frame)
        if fields is None:
            assert verdict[0] == Fate.RUNT
            continue
        decided = default
        for stage in stages:
            fitting = [entry for entry in stage if entry[1].fits(fields[0])]
            if fitting:
                best = min(entry[0] for entry in fitting)
                verdicts = {entry[2] for entry in fitting if entry[0] == best}
                assert len(verdicts) == 1, "rules of one priority that decide differently were let in"
                (decided,) = verdicts
                break
        assert verdict == decided, frame.hex()


@settings(max_examples=5)
@given(seed=st.integers(0, 1 << 32))
def test_random_rules(seed):
    with steered() as flows:
        compare(flows, seed, rules=20, frames=200)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_many_random_rules(seed):
    with steered() as flows:
        compare(flows, seed, rules=60, frames=4000)
