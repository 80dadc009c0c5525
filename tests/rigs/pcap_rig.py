"""For tests of packets: a capture file read by tshark, and the packets that posted operations must cause in it."""

import os
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scapy.contrib.roce import BTH
from scapy.layers.l2 import Ether

from nic_rig import CS, FA, READ, SEND, SEND_IMM, WRITE, WRITE_IMM

FIELDS = {
    "malformed": "_ws.malformed", "severity": "_ws.expert.severity", "message": "_ws.expert.message",
    "bytes": "frame.len", "ip_checksum": "ip.checksum.status", "udp_checksum": "udp.checksum.status", "id": "ip.id",
    "ttl": "ip.ttl", "src": "ip.src", "dst": "ip.dst", "src6": "ipv6.src", "dst6": "ipv6.dst", "eth_src": "eth.src",
    "eth_dst": "eth.dst", "time": "frame.time_epoch",
    "vl": "infiniband.lrh.vl", "lver": "infiniband.lrh.lver", "sl": "infiniband.lrh.sl", "lnh": "infiniband.lrh.lnh",
    "dlid": "infiniband.lrh.dlid", "slid": "infiniband.lrh.slid", "words": "infiniband.lrh.pktlen",
    "ipver": "infiniband.grh.ipver", "paylen": "infiniband.grh.paylen", "next": "infiniband.grh.nxthdr",
    "sgid": "infiniband.grh.sgid", "dgid": "infiniband.grh.dgid",
    "opcode": "infiniband.bth.opcode", "pad": "infiniband.bth.padcnt", "qpn": "infiniband.bth.destqp",
    "ack": "infiniband.bth.a", "psn": "infiniband.bth.psn", "pkey": "infiniband.bth.p_key",
    "va": "infiniband.reth.va", "rkey": "infiniband.reth.r_key", "nbytes": "infiniband.reth.dmalen",
    "swap": "infiniband.atomiceth.swapdt", "compare": "infiniband.atomiceth.cmpdt",
    "syndrome": "infiniband.aeth.syndrome", "msn": "infiniband.aeth.msn",
    "old": "infiniband.atomicacketh.origremdt", "imm": "infiniband.immdt",
    "icrc": "infiniband.invariant.crc", "vcrc": "infiniband.variant.crc",
}
_TEXTS = {
    "malformed", "severity", "message", "time", "src", "dst", "src6", "dst6", "eth_src", "eth_dst", "sgid", "dgid",
}
_ERROR = 0x0080_0000  # PI_ERROR
GOOD = 1  # tshark's value for a right checksum


def need_tshark() -> None:
    """Skip without tshark, but not in CI, which must not lose these tests silently."""
    if shutil.which("tshark") is None:
        assert not os.environ.get("CI"), "tshark is not installed (Debian, Ubuntu: apt-get install tshark)"
        pytest.skip("needs tshark")


@dataclass
class Packet:
    """One packet of a file: its bytes, and what tshark makes of them. A field that it lacks is None."""

    raw: bytes
    fields: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.fields[name]

    def has(self, **wanted: Any) -> None:
        """Compare fields, and tell all that differ."""
        found = {name: self.fields[name] for name in wanted}
        different = {name: (found[name], wanted[name]) for name in wanted if found[name] != wanted[name]}
        assert different == {}, f"found and wanted: {different}; {self.fields}"


def records(path: Path) -> list[bytes]:
    """The frames of a pcap file, read without help."""
    data = path.read_bytes()
    magic, major, minor, zone, digits, _, _ = struct.unpack_from("<IHHiIII", data)
    assert (magic, major, minor, zone, digits) == (0xA1B23C4D, 2, 4, 0, 0)
    found, at = [], 24
    while at < len(data):
        _, nanoseconds, captured, length = struct.unpack_from("<IIII", data, at)
        assert nanoseconds < 1_000_000_000
        assert captured == length
        found.append(data[at + 16 : at + 16 + captured])
        at += 16 + captured
    assert at == len(data)
    return found


def _value(name: str, text: str) -> Any:
    if text == "":
        return None
    if name == "imm":
        return int(text.replace(":", ""), 16)
    if name in _TEXTS:
        return text
    return {"True": 1, "False": 0}[text] if text in ("True", "False") else int(text, 0)


def dissect(path: Path) -> list[Packet]:
    """The packets of a file, none of which may be malformed or worth an error to tshark."""
    need_tshark()
    command = [
        "tshark", "-n", "-r", str(path), "-o", "ip.check_checksum:TRUE", "-o", "udp.check_checksum:TRUE",
        "-o", "udp.ignore_ipv6_zero_checksum:TRUE",  # RoCE v2 may leave it out (annex A17.4.5)
        "--disable-protocol", "rpcordma",  # would take SENDs as its own, and empty ones as malformed
        "-T", "fields", "-E", "separator=|", "-E", "occurrence=f",
    ]
    for field in FIELDS.values():
        command += ["-e", field]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines, raws = done.stdout.splitlines(), records(path)
    assert len(lines) == len(raws)
    packets = []
    for line, raw in zip(lines, raws, strict=True):
        texts = line.split("|")
        fields = {name: _value(name, text) for name, text in zip(FIELDS, texts, strict=True)}
        assert fields["malformed"] is None, line
        assert fields["severity"] is None or int(fields["severity"]) < _ERROR, line
        packets.append(Packet(raw, fields))
    return packets


def check_roce(packets: list[Packet], version: int) -> None:
    """Headers below the BTH: checksums by tshark, the ICRC by scapy."""
    for packet in packets:
        if version == 4:
            packet.has(ip_checksum=GOOD)
            # The path's hop limit, DOCA's default, or 64: for paths without one, and where a receiver does not see it.
            assert packet.fields["ttl"] in (64, 255)
        packet.has(udp_checksum=GOOD, pkey=0xFFFF)
        assert icrc_fits(packet.raw), packet.fields


def icrc_fits(frame: bytes) -> bool:
    """What scapy says."""
    return Ether(frame)[BTH].compute_icrc(b"") == frame[-4:]


# --- what must be there ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """A WQE that was posted, and what its packets carry."""

    opcode: int
    nbytes: int
    va: int = 0
    rkey: int = 0
    imm: int = 0
    swap: int = 0
    compare: int = 0
    old: int = 0

    @property
    def on_the_wire(self) -> int:
        """Bytes of the request's payload."""
        return self.nbytes if self.opcode in (SEND, SEND_IMM, WRITE, WRITE_IMM) else 0

    def packets(self, mtu: int) -> int:
        """How many packet sequence numbers it takes (IBTA 9.7.2)."""
        return 1 if self.opcode in (CS, FA) else max(1, -(-self.nbytes // mtu))

    def requests(self, mtu: int, psn: int, uc: bool = False) -> list[dict[str, int | None]]:
        """The fields of its request packets (IBTA 9.2, 9.3, table 38)."""
        service = 0x20 if uc else 0
        reth: dict[str, int | None] = {"va": self.va, "rkey": self.rkey}
        if self.opcode == READ:
            return [{"opcode": 0x0C, "psn": psn, "pad": 0, **reth, "nbytes": self.nbytes, "imm": None}]
        if self.opcode in (CS, FA):
            words: dict[str, int | None] = {"swap": self.swap, "compare": self.compare}
            return [{"opcode": 0x13 if self.opcode == CS else 0x14, "psn": psn, "pad": 0, **reth, **words}]
        count = self.packets(mtu)
        writes, with_imm = self.opcode in (WRITE, WRITE_IMM), self.opcode in (WRITE_IMM, SEND_IMM)
        found = []
        for i in range(count):
            last = i == count - 1
            if count == 1:
                opcode = 4 + with_imm
            else:
                opcode = 0 if i == 0 else 2 + with_imm if last else 1
            part = self.nbytes - i * mtu if last else mtu
            begins = writes and i == 0
            found.append({
                "opcode": service | opcode + 6 * writes, "psn": psn + i & 0xFF_FFFF, "pad": -part & 3,
                "va": self.va if begins else None, "rkey": self.rkey if begins else None,
                "nbytes": self.nbytes if begins else None, "imm": self.imm if last and with_imm else None,
            })
        return found

    def responses(self, mtu: int, psn: int, msn: int) -> list[dict[str, int | None]]:
        """The fields of its answer, where nothing is refused (IBTA 9.5, 9.7.5): an ACK has no credits to tell, 0x1f."""
        aeth: dict[str, int | None] = {"syndrome": 0x1F, "msn": msn}
        last = psn + self.packets(mtu) - 1 & 0xFF_FFFF
        if self.opcode in (CS, FA):
            return [{"opcode": 0x12, "psn": last, **aeth, "old": self.old}]
        if self.opcode != READ:
            return [{"opcode": 0x11, "psn": last, **aeth, "old": None}]
        count = self.packets(mtu)
        found = []
        for i in range(count):
            ends = i in (0, count - 1)
            opcode = 0x10 if count == 1 else 0x0D if i == 0 else 0x0F if ends else 0x0E
            part = min(mtu, self.nbytes - i * mtu)
            found.append({
                "opcode": opcode, "psn": psn + i & 0xFF_FFFF, "pad": -part & 3,
                "syndrome": 0x1F if ends else None, "msn": msn if ends else None,
            })
        return found
