"""Formats of capture files. tshark, editcap and scapy write them and say what is in them."""

import contextlib
import gzip
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import ARP, CookedLinux, CookedLinuxV2, Ether
from scapy.packet import Packet, Raw
from scapy.utils import PcapNgWriter, RawPcapWriter, rdpcap

from gpunetio.errors import InvalidValueError
from gpunetio.fabric.capture_formats import records
from gpunetio.fabric.pcap_reader import PcapFile

DATA = Path(__file__).parents[1] / "data"
FRAMES = [
    bytes(Ether(src="02:00:00:00:00:05", dst="02:00:00:00:00:06") / layers)
    for layers in (ARP(), IP() / UDP(dport=53) / Raw(bytes(999)), IPv6() / TCP() / Raw(b"x"))
]


def read(path: Path) -> list[bytes]:
    """Return the bytes of each record, as the wire gets them."""
    with PcapFile(path) as file:
        return [data for _, data, _ in file.raw_records()]


def plain(path: Path, frames: list[bytes] = FRAMES, link: int = 1) -> Path:
    with RawPcapWriter(str(path), linktype=link) as writer:
        writer.write_header(None)
        for n, frame in enumerate(frames):
            writer.write_packet(frame, sec=1_700_000_000, usec=n)
    return path


def need(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


# --- compressed ------------------------------------------------------------------------------------------------------


def test_gzip(tmp_path):
    """Also in several members, as `cat a.gz b.gz` makes them, and padded."""
    data = plain(tmp_path / "a").read_bytes()
    for packed in (gzip.compress(data), gzip.compress(data[:70]) + gzip.compress(data[70:]) + bytes(512)):
        (tmp_path / "b").write_bytes(packed)
        assert read(tmp_path / "b") == FRAMES


def test_a_compressed_file_that_is_cut_or_damaged(tmp_path):
    """What comes before a cut is read."""
    whole = gzip.compress(plain(tmp_path / "a", FRAMES * 1000).read_bytes())
    (tmp_path / "b").write_bytes(whole[: len(whole) // 2])
    got: list[bytes] = []
    with PcapFile(tmp_path / "b") as file, pytest.raises(InvalidValueError, match="ends in the middle"):
        got.extend(data for _, data, _ in file.raw_records())
    assert got == (FRAMES * 1000)[: len(got)]
    assert len(got) > 100
    (tmp_path / "b").write_bytes(whole[:-8] + bytes(4) + whole[-4:])  # the checksum of the data
    with PcapFile(tmp_path / "b") as file, pytest.raises(InvalidValueError, match="cannot be decompressed"):
        list(file.raw_records())


# --- pcapng ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pcapng", "nsecpcap", "pcap"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "gzip"])
def test_what_editcap_writes(tmp_path, kind, packed):
    need("editcap")
    plain(tmp_path / "a")
    subprocess.run(["editcap", "-F", kind, tmp_path / "a", tmp_path / "b"], check=True, timeout=30)
    if packed:
        (tmp_path / "b").write_bytes(gzip.compress((tmp_path / "b").read_bytes()))
    with PcapFile(tmp_path / "b") as file:
        found = list(file.raw_records())
    assert [data for _, data, _ in found] == FRAMES
    assert [time for time, _, _ in found] == [1_700_000_000 * 10**9 + 1000 * n for n in range(len(FRAMES))]


def test_what_scapy_writes_as_pcapng(tmp_path):
    with PcapNgWriter(str(tmp_path / "a")) as writer:
        for frame in FRAMES:
            writer.write(Ether(frame))
    assert read(tmp_path / "a") == FRAMES == [bytes(frame) for frame in rdpcap(str(tmp_path / "a"))]


def block(kind: int, body: bytes, order: str = "<") -> bytes:
    """A block, as draft-ietf-opsawg-pcapng 3.1 describes it."""
    body += bytes(-len(body) % 4)
    return struct.pack(f"{order}II", kind, 12 + len(body)) + body + struct.pack(f"{order}I", 12 + len(body))


def section(order: str = "<") -> bytes:
    return block(0x0A0D0D0A, struct.pack(f"{order}IHHq", 0x1A2B3C4D, 1, 0, -1), order)


def interface(link: int = 1, options: bytes = b"", snap: int = 0, order: str = "<") -> bytes:
    return block(1, struct.pack(f"{order}HHI", link, 0, snap) + options, order)


def packet(data: bytes, number: int = 0, time: int = 0, whole: int | None = None, order: str = "<") -> bytes:
    head = struct.pack(f"{order}IIIII", number, time >> 32, time & 0xFFFF_FFFF, len(data), whole or len(data))
    return block(6, head + data, order)


def test_sections_interfaces_and_blocks_of_all_kinds(tmp_path):
    """In both byte orders; what is no packet is skipped."""
    old = block(2, struct.pack("<HHIIII", 0, 0, 0, 5, len(FRAMES[0]), len(FRAMES[0])) + FRAMES[0])
    simple = block(3, struct.pack("<I", len(FRAMES[1])) + FRAMES[1][:100])
    data = (
        section() + interface(snap=100) + interface(105) + block(4, b"names") + old + simple + block(0xBAD, b"12345")
        + section(">") + interface(order=">") + packet(FRAMES[2], order=">")
    )
    (tmp_path / "a").write_bytes(data)
    assert read(tmp_path / "a") == [FRAMES[0], FRAMES[1][:100], FRAMES[2]]
    with PcapFile(tmp_path / "a") as file:
        assert [whole for _, _, whole in file.raw_records()] == list(map(len, FRAMES))


@pytest.mark.parametrize(("resolution", "units"), [(6, 10**6), (9, 10**9), (0x80 | 10, 1024), (3, 1000)])
def test_resolutions_of_time_stamps(tmp_path, resolution, units):
    """if_tsresol, if_tsoffset."""
    options = struct.pack("<HHB3x", 9, 1, resolution) + struct.pack("<HHq", 14, 8, 1000) + bytes(4)
    data = section() + interface(options=options) + packet(b"x" * 60, time=7 * units + units // 2)
    (tmp_path / "a").write_bytes(data)
    with PcapFile(tmp_path / "a") as file:
        assert [time for time, _, _ in file.raw_records()] == [1_007_500_000_000]


@pytest.mark.parametrize("data", [
    section()[:11], section()[:20], b"\x0a\x0d\x0d\x0a" + bytes(60), section() + packet(b"x"),
    section() + block(1, b"123")[:12], section() + interface() + block(6, bytes(8)),
    section() + interface() + packet(b"x" * 60)[:-1], section() + struct.pack("<II", 6, 13) + bytes(13),
    section() + struct.pack("<II", 6, 1 << 30), section() + interface(options=struct.pack("<HH", 9, 0)) + packet(b"x"),
    section() + interface() + block(6, struct.pack("<IIIII", 0, 0, 0, 1 << 20, 1 << 20)),
    section() + interface() + struct.pack("<I", 6),
])
def test_blocks_that_are_damaged(tmp_path, data):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(InvalidValueError, match=r"is damaged at byte \d+|ends in the middle of the record at byte \d+"):
        read(tmp_path / "a")


def test_any_cut_and_any_changed_byte_is_reported_in_words(tmp_path):
    """The parsers raise errors of their own only, whatever the bytes are."""
    whole = section() + interface() + packet(FRAMES[0]) + interface(113) + packet(bytes(80), 1) + packet(FRAMES[2])
    for at in range(len(whole)):
        for data in (whole[:at], whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]):
            (tmp_path / "a").write_bytes(data)
            with (tmp_path / "a").open("rb") as file, contextlib.suppress(InvalidValueError):
                assert len(list(records(tmp_path / "a", file))) <= 3


# --- link types ------------------------------------------------------------------------------------------------------


def test_frame_check_sequences_are_no_payload(tmp_path):
    """A flag of the link-type word says that there are some. The case, and each length in both byte orders."""
    found = read(DATA / "captures" / "fcs_flag.pcap")
    assert [len(frame) for frame in found] == [14 + IP(frame[14:]).len for frame in found] == [114, 115, 116]
    for order in "<>":
        for pairs in range(4):
            data = struct.pack(f"{order}IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 1 << 16, pairs << 28 | 1 << 26 | 1)
            size = len(FRAMES[1]) + 2 * pairs
            for kept in (size, size - 1, 100):
                frame = (FRAMES[1] + b"FCS!??")[:kept]
                (tmp_path / "a").write_bytes(data + struct.pack(f"{order}IIII", 1, 2, kept, size) + frame)
                assert read(tmp_path / "a") == [FRAMES[1][:kept]]
    options = struct.pack("<HHB3x", 13, 1, 4) + bytes(4)
    (tmp_path / "a").write_bytes(section() + interface(options=options) + packet(FRAMES[1] + b"FCS!"))
    assert read(tmp_path / "a") == [FRAMES[1]]


SENDER = {"lladdrtype": 1, "lladdrlen": 6, "src": b"\2\0\0\0\0\5\0\0"}
COOKED = {
    113: lambda payload, kind: CookedLinux(pkttype=kind, **SENDER) / payload,
    276: lambda payload, kind: CookedLinuxV2(pkttype=kind, ifindex=2, **SENDER) / payload,
}


@pytest.mark.parametrize("link", COOKED)
def test_linux_cooked(tmp_path, link):
    """As by `tcpdump -i any`. Who has sent a packet is known; of groups, that it is one."""
    payloads: list[Packet] = [IP(src="192.0.2.1") / UDP() / Raw(b"x" * 30), IPv6() / TCP(), ARP()]
    frames = [bytes(COOKED[link](payload, kind)) for payload in payloads for kind in (0, 1, 4)]
    plain(tmp_path / "a", frames, link)
    found = [Ether(data) for data in read(tmp_path / "a")]
    for frame, payload in zip(found, [payload for payload in payloads for _ in range(3)], strict=True):
        assert frame.src == "02:00:00:00:00:05"
        assert bytes(frame.payload) == bytes(payload)
    assert [frame.dst[0] == "f" for frame in found] == [False, True, False] * 3
    if shutil.which("tshark"):
        out = subprocess.run(["tshark", "-r", tmp_path / "a", "-T", "fields", "-e", "frame.protocols"], check=True,
                             timeout=60, capture_output=True, text=True).stdout.split()
        names = {"ip": IP, "ipv6": IPv6, "arp": ARP}
        for line, frame in zip(out, found, strict=True):
            assert names[line.split(":")[2]] in frame


@pytest.mark.parametrize("link", [101, 228, 229])
def test_ip_without_a_link_header(tmp_path, link):
    payloads = [IP() / UDP() / Raw(b"abc"), IPv6() / UDP() / Raw(b"abc")]
    plain(tmp_path / "a", [bytes(payload) for payload in payloads], link)
    assert [bytes(Ether(data).payload) for data in read(tmp_path / "a")] == [bytes(payload) for payload in payloads]


def test_a_packet_whose_link_header_makes_it_too_long_for_a_file(tmp_path):
    """A record says in 32 bits how long its packet was. The header of Ethernet that IP gets here would not fit."""
    head = struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 1 << 16, 101)
    data = FRAMES[1][14:]
    (tmp_path / "a").write_bytes(head + struct.pack("<IIII", 1, 2, len(data), (1 << 32) - 1) + data)
    with PcapFile(tmp_path / "a") as file:
        assert [(len(frame), whole) for _, frame, whole in file.raw_records()] == [(14 + len(data), (1 << 32) - 1)]


def test_a_cooked_packet_without_a_whole_header_is_cut(tmp_path):
    plain(tmp_path / "a", [bytes(10), bytes(16)], 113)
    with PcapFile(tmp_path / "a") as file:
        assert [(len(data), len(data) < whole) for _, data, whole in file.raw_records()] == [(0, True), (14, False)]


@pytest.mark.parametrize(("link", "name"), [(105, "IEEE 802.11"), (249, "USBPcap"), (147, "147")])
@pytest.mark.parametrize("form", ["pcap", "pcapng"])
def test_other_link_types_are_refused_by_name(tmp_path, link, name, form):
    if form == "pcap":
        plain(tmp_path / "a", FRAMES, link)
    else:
        (tmp_path / "a").write_bytes(section() + interface(link) + packet(FRAMES[0]))
    with pytest.raises(InvalidValueError) as caught:
        PcapFile(tmp_path / "a")
    assert f"link type {link}" in str(caught.value)
    assert name in str(caught.value)
    assert "tcpdump -i any" in str(caught.value)


def test_ethernet_and_infiniband_in_one_file(tmp_path):
    (tmp_path / "a").write_bytes(
        section() + interface() + interface(197) + packet(FRAMES[0]) + packet(b"\x15" * 40, 1) + packet(FRAMES[1])
    )
    got: list[bytes] = []
    with PcapFile(tmp_path / "a") as file, pytest.raises(InvalidValueError, match="Ethernet and of ERF"):
        got.extend(data for _, data, _ in file.raw_records())
    assert got == FRAMES[:1]
