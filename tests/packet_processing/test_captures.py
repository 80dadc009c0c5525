"""Captures of other formats, cut ones and long ones: each record is in a total, and scapy says in which."""

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.l2 import CookedLinux, Ether
from scapy.packet import Raw
from scapy.utils import PcapNgWriter, RawPcapReader, RawPcapWriter

from gpunetio.cli import app
from gpunetio.packet_processing.statistics import REPLAY
from json_schema import mistakes, schema
from packet_processing_rig import ip, l2

pytestmark = pytest.mark.soft_nic

CAPTURES = Path(__file__).parents[1] / "data" / "captures"
ARGUMENTS = ["packet_processing", "-g", "host", "-n", "soft0", "-q", "1", "--replay"]


def counted(path: Path) -> tuple[int, dict, dict[str, int]]:
    """Return the exit status, the document, and the totals of each protocol."""
    done = CliRunner().invoke(app, [*ARGUMENTS, str(path), "--json"])
    document = json.loads(done.stdout)
    assert mistakes(document, schema("packet_processing")) == []
    assert bool(document["failures"]) == (done.exit_code != 0)
    return done.exit_code, document, {queue["protocol"]: queue["counts"]["total"] for queue in document["queues"]}


def test_a_capture_of_beginnings():
    """2,000 frames by `tcpdump -s 96`: those that are whole count, and how many are not is said."""
    protocols, cut = {17: 0, 6: 0, 1: 0}, 0
    with RawPcapReader(str(CAPTURES / "snap96.pcap")) as reader:
        for data, (_, _, whole, captured) in reader:
            cut += captured < whole
            protocols[data[23]] += captured == whole
    status, document, totals = counted(CAPTURES / "snap96.pcap")
    assert totals == {"UDP": protocols[17], "TCP": protocols[6], "ICMP": protocols[1]}
    assert cut + sum(totals.values()) == 2000
    assert document["replay"] == {"records": 2000, "cut_short": cut}
    assert status == 1
    assert f"{cut} of 2000 frames" in document["failures"][REPLAY]
    text = CliRunner().invoke(app, [*ARGUMENTS, str(CAPTURES / "snap96.pcap")])
    assert text.exit_code == 1
    assert f"[REPLAY] RECORDS: 2000 CUT SHORT: {cut}\n" in text.stdout
    assert f"{cut} of 2000 frames" in text.stderr


def test_frame_check_sequences():
    """They are no payload: the frames are whole, and each counts."""
    status, document, totals = counted(CAPTURES / "fcs_flag.pcap")
    assert (status, totals) == (0, {"UDP": 0, "TCP": 3, "ICMP": 0})
    assert document["replay"] == {"records": 3, "cut_short": 0}


@pytest.mark.parametrize("form", ["pcapng", "gzip", "cooked"])
def test_other_formats(tmp_path, form):
    frames = [l2() / ip() / UDP(dport=53), l2() / ip() / TCP(flags="S"), l2() / ip() / UDP(dport=54) / Raw(b"x" * 99)]
    if form == "pcapng":
        with PcapNgWriter(str(tmp_path / "a")) as writer:
            writer.write(frames)
    else:
        with RawPcapWriter(str(tmp_path / "a"), linktype=113 if form == "cooked" else 1) as writer:
            writer.write_header(None)
            for frame in frames:
                writer.write_packet(bytes(CookedLinux() / frame[IP] if form == "cooked" else frame))
    if form == "gzip":
        (tmp_path / "a").write_bytes(gzip.compress((tmp_path / "a").read_bytes()))
    status, document, totals = counted(tmp_path / "a")
    assert (status, totals) == (0, {"UDP": 2, "TCP": 1, "ICMP": 0})
    assert document["replay"] == {"records": 3, "cut_short": 0}
    assert document["queues"][0]["counts"]["total_bytes"] == sum(14 + len(bytes(frame[IP])) for frame in frames[::2])


def test_frames_that_offloads_have_made(tmp_path):
    """Up to what an IPv4 header can say they count. A longer one is longer than a queue can say, and that is told."""
    sizes = [9000, 16_385, 65_534, 65_535, 65_536, 100_000]
    with RawPcapWriter(str(tmp_path / "a"), linktype=1) as writer:
        writer.write_header(None)
        for size in sizes:
            packet = bytes(ip() / UDP(dport=53) / bytes(min(size, 65_535) - 14 - 28))
            writer.write_packet(bytes(Ether(bytes(l2())[:12] + b"\x08\0")) + packet.ljust(size - 14, b"\0"))
    status, document, totals = counted(tmp_path / "a")
    assert (status, totals["UDP"]) == (1, 4)
    assert document["queues"][0]["dropped"] == 2
    assert document["replay"] == {"records": 6, "cut_short": 0, "rx_frame_too_long": 2}
    assert "2 of 6 frames" in document["failures"][REPLAY]
