"""What a rule matches: values and their types, what headers bring with them, and what is refused."""

import ipaddress

import pytest

from gpunetio.errors import InvalidValueError
from gpunetio.flow import PER_ENTRY, Match, TcpFlag, match
from gpunetio.formats.flow import FTE_MATCH_PARAM
from steering_model import number


def fields(found: Match) -> dict[str, tuple[int, int]]:
    """Value and mask of each field that is compared, by its name without the part."""
    values, masks = (FTE_MATCH_PARAM.unpack(bits.to_bytes(512, "big")) for bits in (found.value, found.mask))
    names = {}
    for part in ("outer_headers", "misc_parameters"):
        for name, mask in masks[part].items():
            value = values[part][name]
            if isinstance(mask, bytes):
                value, mask = number(value), number(mask)
            if mask:
                names[name] = value, mask
    return names


UDP, V4, V6, WHOLE = {"ip_protocol": (17, 0xFF)}, {"ip_version": (4, 15)}, {"ip_version": (6, 15)}, {"frag": (0, 1)}
TCP = {"ip_protocol": (6, 0xFF)}
ALL = (1 << 128) - 1
MAC = {"dmac_47_16": (0x02000000, 0xFFFFFFFF), "dmac_15_0": (7, 0xFFFF)}


@pytest.mark.parametrize(
    "found, expected",
    [
        (match.everything(), {}),
        (match.udp(), UDP),
        (match.udp(dst=53), {**UDP, **WHOLE, "udp_dport": (53, 0xFFFF)}),
        (match.udp(src=(0x100, 0xFF00)), {**UDP, **WHOLE, "udp_sport": (0x100, 0xFF00)}),
        (match.tcp(dst=80, flags=TcpFlag.SYN), {**TCP, **WHOLE, "tcp_dport": (80, 0xFFFF), "tcp_flags": (2, 2)}),
        (match.tcp(flags=0x12), {**TCP, **WHOLE, "tcp_flags": (0x12, 0x1FF)}),
        (match.tcp(flags=(2, 0x12)), {**TCP, **WHOLE, "tcp_flags": (2, 0x12)}),
        (match.ipv4(src="10.0.0.0/8"), {**V4, "src_ipv4_src_ipv6": (10 << 24, 0xFF000000)}),
        (match.ipv4(dst="10.1.2.3"), {**V4, "dst_ipv4_dst_ipv6": (0x0A010203, 0xFFFFFFFF)}),
        (match.ipv4(dst=b"\x0a\x01\x02\x03"), {**V4, "dst_ipv4_dst_ipv6": (0x0A010203, 0xFFFFFFFF)}),
        (match.ipv4(src="0.0.0.0/0"), V4),
        (match.ipv4(src=ipaddress.IPv4Network("10.2.0.0/16")), {**V4, "src_ipv4_src_ipv6": (0x0A020000, 0xFFFF0000)}),
        (match.ipv4(src=("10.0.0.5", "255.0.0.255")), {**V4, "src_ipv4_src_ipv6": (0x0A000005, 0xFF0000FF)}),
        (match.ipv4(protocol=89, dscp=46, ecn=1, ttl=255),
         {**V4, "ip_protocol": (89, 255), "ip_dscp": (46, 63), "ip_ecn": (1, 3), "ttl_hoplimit": (255, 255)}),
        (match.ipv6(src="2001:db8::/32", hop_limit=1),
         {**V6, "src_ipv4_src_ipv6": (0x20010DB8 << 96, 0xFFFFFFFF << 96), "ttl_hoplimit": (1, 255)}),
        (match.ipv6(dst=ipaddress.ip_address("::1")), {**V6, "dst_ipv4_dst_ipv6": (1, ALL)}),
        (match.icmp(), {**V4, "ip_protocol": (1, 0xFF)}),
        (match.icmpv6(), {**V6, "ip_protocol": (58, 0xFF)}),
        (match.eth(dst="02:00:00:00:00:07"), MAC),
        (match.eth(dst=b"\x02\0\0\0\0\x07", ether_type=0x0806), {**MAC, "ethertype": (0x806, 0xFFFF)}),
        (match.eth(dst=("01:00:00:00:00:00", "01:00:00:00:00:00")), {"dmac_47_16": (1 << 24, 1 << 24)}),
        (match.vlan(5, prio=3), {"cvlan_tag": (1, 1), "first_vid": (5, 0xFFF), "first_prio": (3, 7)}),
        (match.vlan(service=True) & match.second_vlan(9),
         {"svlan_tag": (1, 1), "outer_second_cvlan_tag": (1, 1), "outer_second_vid": (9, 0xFFF)}),
        (match.ipv4() & match.udp() & match.whole(), {**V4, **UDP, **WHOLE}),
    ],
    ids=lambda found: str(found) if isinstance(found, Match) else "",
)
def test_fields(found, expected):
    assert fields(found) == expected
    assert found.enable == ((1 if set(expected) - {"outer_second_cvlan_tag", "outer_second_vid"} else 0)
                            | (2 if "outer_second_vid" in expected else 0))


def test_values_of_entries():
    found = match.ipv4(src=PER_ENTRY) & match.udp(dst=PER_ENTRY, src=7)
    assert fields(found)["udp_dport"] == (0, 0xFFFF)
    assert found.open.bit_count() == 32 + 16
    assert str(found) == "ipv4(src=PER_ENTRY) & udp(src=7, dst=PER_ENTRY)"


def test_both_of_two_matches():
    both = match.ipv4(src="10.0.0.0/8") & match.udp(dst=53)
    assert both == match.udp(dst=53) & match.ipv4(src="10.0.0.0/8")
    assert both & both == both == both & match.everything()
    assert str(match.everything() & both) == "ipv4(src='10.0.0.0/8') & udp(dst=53)"
    assert repr(both) == "<match ipv4(src='10.0.0.0/8') & udp(dst=53)>"


@pytest.mark.parametrize(
    "first, second, field",
    [
        (match.udp(dst=53), match.tcp(dst=53), r"ip_protocol cannot be 17 and 6 at once"),
        (match.ipv4(), match.ipv6(), r"ip_version cannot be 4 and 6 at once"),
        (match.udp(dst=1), match.udp(dst=2), r"udp_dport cannot be 1 and 2 at once"),
        (match.icmpv6(), match.ipv4(), r"ip_version cannot be 6 and 4 at once"),
        (match.udp(dst=PER_ENTRY), match.udp(dst=2), r"udp_dport cannot be PER_ENTRY and 2 at once"),
        (match.udp(dst=PER_ENTRY), match.udp(dst=1), r"udp_dport cannot be PER_ENTRY and 1 at once"),
    ],
)
def test_contradictions(first, second, field):
    with pytest.raises(InvalidValueError, match=field):
        first & second


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: match.udp(dst=65536), r"dst = 65536: it must be 0 to 65535"),
        (lambda: match.udp(dst="53"), r"dst = '53' is of type str: it must be a whole number"),
        (lambda: match.udp(dst=range(1000, 2000)), r"dst = range\(1000, 2000\): devices match values under masks, not"),
        (lambda: match.udp(dst="1000-2000"), r"not ranges or lists"),
        (lambda: match.udp(dst=[1, 2]), r"not ranges or lists"),
        (lambda: match.udp(dst=(3, 1)), r"dst = \(0x3, 0x1\): the value has bits outside the mask"),
        (lambda: match.udp(dst=(0, 0)), r"dst has the mask 0, which compares nothing"),
        (lambda: match.udp(dst=(1, 2, 3)), r"dst = \(1, 2, 3\): a pair is \(value, mask\)"),
        (lambda: match.ipv4(src="10.0.0.1/8"), r"src = '10.0.0.1/8' is no network: .*host bits set"),
        (lambda: match.ipv4(src="::1"), r"src = '::1' is an IPv6 address: IPv4 is matched"),
        (lambda: match.ipv6(src="10.0.0.0/8"), r"src = '10.0.0.0/8' is an IPv4 network: IPv6 is matched"),
        (lambda: match.ipv4(src="10.0.0"), r"src = '10.0.0' is no IP address"),
        (lambda: match.ipv4(src="10.0.0.1-10.0.0.9"), r"not ranges or lists"),
        (lambda: match.ipv4(src=5), r"src = 5: an IP address is text, 4 bytes, or an object of ipaddress"),
        (lambda: match.eth(src="02:00"), r"src = '02:00': a MAC is text such as"),
        (lambda: match.eth(dst=b"\0" * 5), r"a MAC is text such as .*, or 6 bytes"),
        (lambda: match.vlan(4096), r"vid = 4096: it must be 0 to 4095"),
        (lambda: match.ipv4(ttl=-1), r"ttl = -1: it must be 0 to 255"),
    ],
)
def test_refused_values(make, words):
    with pytest.raises(InvalidValueError, match=words):
        make()
