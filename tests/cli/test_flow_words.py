"""The words in which `gpunetio flow` shows masks and values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio.cli.flow_words import Compared, compared
from gpunetio.flow import Match, TcpFlag, match
from gpunetio.nic.control.flow.match import PARAM_BYTES, words_of


def words(shown: Match) -> list[Compared]:
    """What a rule with this match compares, as the software NIC has it."""
    mask, value = (words_of(bits.to_bytes(PARAM_BYTES, "big")).tobytes() for bits in (shown.mask, shown.value))
    return compared(mask, value)


@pytest.mark.parametrize("shown, text", [
    (match.everything(), ""),
    (match.udp(dst=53), "ip_protocol 17, frag 0, udp_dport 53"),
    (match.tcp(dst=(0x1200, 0xFF00)), "ip_protocol 6, frag 0, tcp_dport 0x1200 & 0xff00"),
    (match.tcp(flags=TcpFlag.SYN), "ip_protocol 6, frag 0, tcp_flags 0x2 & 0x2"),
    (match.ipv4(src="10.0.0.1", dst="10.1.0.0/16"), "ip_version 4, src_ipv4 10.0.0.1, dst_ipv4 10.1.0.0 & 255.255.0.0"),
    (match.ipv6(src="::1", dst="2001:db8::/32"), "ip_version 6, src_ipv6 ::1, dst_ipv6 2001:db8:: & ffff:ffff::"),
    (match.ipv6(src=("::1", "::1")), "ip_version 6, src_ipv6 ::1 & ::1"),
    (match.eth(src="02:00:00:00:00:01", ether_type=0x0806), "smac 02:00:00:00:00:01, ethertype 0x806"),
    (match.eth(dst=("01:00:5e:00:00:00", "ff:ff:ff:00:00:00")), "dmac 01:00:5e:00:00:00 & ff:ff:ff:00:00:00"),
    (match.eth(dst=("00:00:00:00:00:07", "00:00:00:00:00:ff")), "dmac 00:00:00:00:00:07 & 00:00:00:00:00:ff"),
    (match.vlan(5) & match.second_vlan(6), "first_vid 5, cvlan_tag 1, outer_second_vid 6, outer_second_cvlan_tag 1"),
])
def test_matches_in_words(shown, text):
    assert ", ".join(map(str, words(shown))) == text


def test_masks_in_words():
    shown = words(match.ipv4(dst="10.1.0.0/16") & match.udp(dst=53))
    assert [field.field for field in shown] == [
        "ip_protocol", "frag", "ip_version", "udp_dport", "dst_ipv4 & 255.255.0.0"
    ]
    assert [field.values for field in shown][-2:] == [(53, 0xFFFF), ("10.1.0.0", "255.255.0.0")]


FIELDS = {  # first bit in fte_match_param and width, in the order of a packet
    "smac": (0x000, 48), "ethertype": (0x030, 16), "dmac": (0x040, 48), "ip_protocol": (0x080, 8),
    "ip_dscp": (0x088, 6), "tcp_flags": (0x097, 9), "udp_dport": (0x0F0, 16), "src_ipv6": (0x100, 128),
    "dst_ipv6": (0x180, 128),
}


@given(st.data())
def test_nothing_is_lost_or_invented(data):
    mask = value = 0
    expected: list[tuple[str, int, int]] = []
    for name, (first, width) in FIELDS.items():
        bits = data.draw(st.integers(0, (1 << width) - 1), name)
        wanted = data.draw(st.integers(0, (1 << width) - 1), name) & bits
        shift = 8 * PARAM_BYTES - first - width
        mask, value = mask | bits << shift, value | wanted << shift
        if bits:
            expected.append((name, wanted, bits))
    found = [(field.name.replace("ipv4", "ipv6"), field.value, field.mask) for field in words(Match(mask, value))]
    assert found == expected
