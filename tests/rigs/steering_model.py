"""A model of steering in plain Python: a parser of frames, a matcher of entries, and the Toeplitz hash."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from flow_rig import match
from gpunetio.nic.state.flow import Fate

TAGS = {0x8100: "cvlan_tag", 0x88A8: "svlan_tag"}


def number(data: bytes) -> int:
    return int.from_bytes(data, "big")


def fields_of(frame: bytes) -> tuple[dict, dict] | None:
    """Return outer headers and misc parameters of a frame, or None if it is too short to be one."""
    if len(frame) < 14:
        return None
    outer = {
        "dmac_47_16": number(frame[0:4]), "dmac_15_0": number(frame[4:6]), "smac_47_16": number(frame[6:10]),
        "smac_15_0": number(frame[10:12]),
    }
    misc: dict = {}
    kind, rest = number(frame[12:14]), frame[14:]
    for target, prefix, marks in ((outer, "first_", ""), (misc, "outer_second_", "outer_second_")):
        if kind not in TAGS or len(rest) < 4:
            break
        target[marks + TAGS[kind]] = 1
        tci = number(rest[:2])
        target |= {f"{prefix}prio": tci >> 13, f"{prefix}cfi": tci >> 12 & 1, f"{prefix}vid": tci & 0xFFF}
        kind, rest = number(rest[2:4]), rest[4:]
    outer["ethertype"] = kind
    if kind == 0x0800:
        _ipv4(outer, rest)
    elif kind == 0x86DD:
        _ipv6(outer, rest)
    return outer, misc


def _ipv4(outer: dict, rest: bytes) -> None:
    if len(rest) < 20:
        return
    header, total = 4 * (rest[0] & 15), number(rest[2:4])
    if rest[0] >> 4 != 4 or header < 20 or not header <= total <= len(rest):
        return
    outer |= {
        "ip_version": 4, "ip_dscp": rest[1] >> 2, "ip_ecn": rest[1] & 3, "ttl_hoplimit": rest[8],
        "ip_protocol": rest[9], "src_ipv4_src_ipv6": bytes(12) + rest[12:16],
        "dst_ipv4_dst_ipv6": bytes(12) + rest[16:20],
    }
    if number(rest[6:8]) & 0x3FFF:
        outer["frag"] = 1
    else:
        _ports(outer, rest[header:total])


def _ipv6(outer: dict, rest: bytes) -> None:
    if len(rest) < 40 or rest[0] >> 4 != 6 or len(rest) < 40 + number(rest[4:6]):
        return
    traffic = number(rest[:2]) >> 4 & 0xFF
    outer |= {
        "ip_version": 6, "ip_dscp": traffic >> 2, "ip_ecn": traffic & 3, "ttl_hoplimit": rest[7],
        "src_ipv4_src_ipv6": rest[8:24], "dst_ipv4_dst_ipv6": rest[24:40],
    }
    protocol, rest = rest[6], rest[40 : 40 + number(rest[4:6])]
    for _ in range(8):
        if protocol not in (0, 43, 44, 51, 60) or len(rest) < 8:
            break
        size = {44: 8, 51: 4 * (rest[1] + 2)}.get(protocol, 8 * (rest[1] + 1))
        fragment = protocol == 44 and number(rest[2:4]) & 0xFFF9
        if fragment:
            outer["frag"] = 1
        if len(rest) < size:
            break
        protocol, rest = rest[0], rest[size:]
        if fragment:
            break
    outer["ip_protocol"] = protocol
    if "frag" not in outer:
        _ports(outer, rest)


def _ports(outer: dict, rest: bytes) -> None:
    if outer["ip_protocol"] == 17 and len(rest) >= 8:
        outer |= {"udp_sport": number(rest[:2]), "udp_dport": number(rest[2:4])}
    elif outer["ip_protocol"] == 6 and len(rest) >= 20 and 20 <= rest[12] // 16 * 4 <= len(rest):
        outer |= {"tcp_sport": number(rest[:2]), "tcp_dport": number(rest[2:4]), "tcp_flags": number(rest[12:14]) & 511}


def param_of(frame: bytes) -> int | None:
    """Return the match parameters of a frame as a number."""
    fields = fields_of(frame)
    return None if fields is None else number(match(*fields))


@dataclass
class Rule:
    """An entry: what it matches, and what it does. `to` is the number of a TIR, or a table."""

    mask: int
    value: int
    fate: Fate
    to: int | Table = 0
    tag: int = 0
    counter: int = 0


@dataclass
class Table:
    """A table: entries by index, and the table behind it."""

    number: int
    level: int
    miss: Table | None = None
    rules: dict[int, Rule] = field(default_factory=dict)

    def find(self, param: int) -> Rule | None:
        return next((r for _, r in sorted(self.rules.items()) if param & r.mask == r.value), None)


def steered(root: Table | None, frame: bytes, counts: dict[int, tuple[int, int]]) -> tuple[Fate, int, int]:
    """Return fate, TIR and tag of a frame, and count it in `counts`: counter → packets and octets."""
    param = param_of(frame)
    if param is None:
        return Fate.RUNT, 0, 0
    table, tag = root, 0
    for _ in range(64):
        if table is None:
            return Fate.MISS, 0, tag
        rule = table.find(param)
        if rule is None:
            table = table.miss
            continue
        if rule.counter:
            packets, octets = counts.get(rule.counter, (0, 0))
            counts[rule.counter] = packets + 1, octets + len(frame)
        tag = rule.tag or tag
        if isinstance(rule.to, Table):
            table = rule.to
        else:
            return rule.fate, rule.to, tag
    return Fate.MISS if table is None else Fate.LOOP, 0, tag


def toeplitz(key: bytes, data: bytes) -> int:
    """Return the hash of RSS: each 1 bit of the input adds the 32 bits of the key that begin at its place."""
    bits, size, result = number(key), len(key) * 8, 0
    for i in range(len(data) * 8):
        if data[i // 8] >> (7 - i % 8) & 1:
            result ^= bits >> (size - 32 - i) & 0xFFFFFFFF
    return result


def mutated(frame: bytes, rng: random.Random) -> bytes:
    """Return a frame with some bytes changed, cut off or appended."""
    changed = bytearray(frame)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 8))):
        changed[rng.randrange(min(len(changed), 80))] = rng.randrange(256)
    cut = rng.random()
    if cut < 0.15:
        return bytes(changed[: rng.randrange(len(changed) + 1)])
    return bytes(changed) + bytes(rng.randrange(20)) if cut < 0.3 else bytes(changed)
