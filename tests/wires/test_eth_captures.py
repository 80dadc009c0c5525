"""Packets of send queues as tshark sees them: headers, checksums, tags, and the segments of a TSO as one stream."""

import subprocess
from pathlib import Path

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1Q

from eth_receive_rig import opened
from eth_send_rig import CHECKSUMS, Port, eth, opcode_of, pointer
from gpunetio import PortConfig
from gpunetio.formats.cqe import CqeOpcode
from gpunetio.formats.wqe import WqeOpcode
from pcap_rig import GOOD, need_tshark

MSS, NBYTES = 1000, 9500
FIELDS = (
    "frame.number", "ip.checksum.status", "tcp.checksum.status", "udp.checksum.status", "vlan.id", "ip.id", "tcp.len",
    "tcp.seq", "tcp.flags.fin", "tcp.flags.push", "tcp.analysis.flags", "_ws.malformed", "_ws.expert.message",
)
V4, V6 = IP(src="192.0.2.1", dst="192.0.2.2", id=5), IPv6(src="2001:db8::1", dst="2001:db8::2")


def seen(path: Path) -> list[dict[str, str]]:
    """What tshark makes of each frame of a capture."""
    checks = [word for name in ("ip", "tcp", "udp") for word in ("-o", f"{name}.check_checksum:TRUE")]
    fields = [word for name in FIELDS for word in ("-e", name)]
    done = subprocess.run(
        ["tshark", "-r", str(path), *checks, "-T", "fields", "-E", "separator=|", *fields],
        capture_output=True, text=True, timeout=60, check=True,
    )
    return [dict(zip(FIELDS, line.split("|"), strict=True)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("l3", [V4, V6], ids=["ipv4", "ipv6"])
def test_what_tshark_sees(tmp_path, l3):
    need_tshark()
    path, tags = tmp_path / "sent.pcap", 7
    with opened(port=PortConfig(mtu=1500, capture=path)) as ctx:
        port = Port(ctx, receives=64, allow_multi_pkt_send_wqe=1)
        # Checksums and lengths are wrong wherever the NIC computes them.
        tcp = TCP(sport=1, dport=2, seq=100, ack=1, flags="FPA", chksum=1, options=[("NOP", None)])
        head = bytes(port.l2 / l3 / tcp)
        payload = bytes(i * 11 & 0xFF for i in range(NBYTES))
        port.sq.write(eth(head, CHECKSUMS, mss=MSS), port.put(0, payload), opcode=WqeOpcode.TSO, ask=0)
        datagram = bytes(port.l2 / l3 / UDP(sport=3, dport=4, chksum=1) / bytes(99))
        port.sq.write(eth(vlan=tags, flags=CHECKSUMS), port.put(10000, datagram), ask=0)
        port.sq.write(eth(datagram[:60], CHECKSUMS), pointer(*port.out.at(10060, len(datagram) - 60)), ask=0)
        tagged = bytes(port.l2 / Dot1Q(vlan=tags) / l3 / UDP(sport=3, dport=4, chksum=1) / bytes(98))
        port.sq.post(
            eth(flags=CHECKSUMS), port.put(11000, tagged), port.put(12000, datagram), opcode=WqeOpcode.ENHANCED_MPSW
        )
        assert opcode_of(port.sq.done()[0]) == CqeOpcode.REQ
        sent = port.frames(14)
    found = seen(path)
    assert len(found) == len(sent) == 14
    segments, others = found[:10], found[10:]
    for kind, frames in (("tcp", segments), ("udp", others), *([("ip", found)] if l3 is V4 else [])):
        assert {frame[f"{kind}.checksum.status"] for frame in frames} == {str(GOOD)}
    for frame in found:
        assert (frame["_ws.malformed"], frame["_ws.expert.message"].count("hecksum")) == ("", 0), frame
    assert [int(one["tcp.len"]) for one in segments] == [MSS] * 9 + [NBYTES - 9 * MSS]
    assert [int(one["tcp.seq"]) - int(segments[0]["tcp.seq"]) for one in segments] == [MSS * n for n in range(10)]
    assert [one["tcp.analysis.flags"] for one in segments] == [""] * 10  # nothing lost, repeated or out of order
    assert [one["tcp.flags.fin"] + one["tcp.flags.push"] for one in segments] == ["00"] * 9 + ["11"]
    if l3 is V4:
        assert [int(one["ip.id"], 16) for one in segments] == list(range(5, 15))
    assert [one["vlan.id"] for one in others] == [str(tags), "", str(tags), ""]
