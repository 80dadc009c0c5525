"""Feed foreign bytes to the parsers of the package: whatever the bytes are, only errors of the package may be raised.

    python tests/rigs/foreign_bytes.py               prints the names of the parsers
    python tests/rigs/foreign_bytes.py NAME N [SEED] runs one N times, and prints each exception that is our mistake

Each parser has valid samples. It gets one of them with something changed (mutations.py). Checksums are corrected, or
nothing after them would be reached.
"""

from __future__ import annotations

import atexit
import dataclasses
import gzip
import json
import logging
import random
import shutil
import struct
import sys
import tempfile
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import described_nics
import foreign_links
from foreign_links import body_of
from gpunetio.bench.agreement import agree, swap_ends, swap_words
from gpunetio.bench.options import BENCHMARKS, Options
from gpunetio.bench.pingpong import pack_address, unpack_address
from gpunetio.bench.remote import _result_of
from gpunetio.bench.replay import ReplayOptions, _port, survey
from gpunetio.bench.results import BwResult, Check, LatResult
from gpunetio.cm import messages
from gpunetio.cm.messages import Attribute
from gpunetio.core.remote_memory import RemoteMemory
from gpunetio.doctor.machine import recording
from gpunetio.enums import LinkLayer
from gpunetio.errors import DocaError
from gpunetio.fabric.control_message import BadMessage
from gpunetio.fabric.faults import Faults
from gpunetio.fabric.pcap_reader import PcapFile
from gpunetio.formats.rdma_device import CONNECTION_EXPORT
from gpunetio.kept import DamagedError, unsealed, write_kept
from gpunetio.nccl import connection as nccl
from gpunetio.nic.engine.port import PortConfig
from gpunetio.rdma import description
from gpunetio.rendezvous import endpoints, link, tcp
from gpunetio.rendezvous.group import Rendezvous
from gpunetio.samples import descriptor_files
from gpunetio.uverbs import ports, sockaddr
from gpunetio.uverbs.call import Refused
from gpunetio.verbs import QpEndpoint
from mutations import mutated

_IN_MEMORY = Path("/dev/shm")  # where a file takes a tenth of the time
_FOLDER = Path(tempfile.mkdtemp(prefix="gpunetio-foreign-bytes-", dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
_ENDPOINT = QpEndpoint(5, bytes(10) + b"\xff\xff\x7f\x00\x00\x01", 0, 1024, 7)


class Parser(NamedTuple):
    """A function that reads foreign bytes, bytes that are right, and its errors besides those of the package.

    `seal` makes a checksum right.
    """

    parse: Callable[[bytes], object]
    samples: list[bytes]
    errors: tuple[type[Exception], ...] = ()
    seal: Callable[[bytes], bytes] = bytes


# --- what reads ------------------------------------------------------------------------------------------------------


def _in_a_file(parse: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Return a parser of bytes that puts them into a file first."""

    def put(data: bytes) -> object:
        path = _FOLDER / "file"
        path.write_bytes(data)
        return parse(path)

    return put


def _capture(path: Path) -> None:
    """Read a capture as `gpunetio replay` does, up to the port that it asks for."""
    with PcapFile(path) as file:
        address, wanted = survey(file, None)
        _port(address, wanted, ReplayOptions(path))


def _captures() -> list[bytes]:
    """Captures of RoCE v2 over IPv4 and IPv6, with tags, and of InfiniBand, in all formats and link types."""
    bth = bytes.fromhex("0a40ffff 00000005 80000001")  # an RDMA WRITE Only, to queue pair 5
    roce = bth + struct.pack(">QII", 0x1000, 7, 8) + bytes(8) + bytes(4)
    udp = struct.pack(">HHHH", 0xC000, 4791, 8 + len(roce), 0) + roce
    v4 = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0, bytes(4), bytes([10, 0, 0, 1])) + udp
    v6 = struct.pack(">IHBB", 6 << 28, len(udp), 17, 64) + bytes(15) + b"\1" + bytes(15) + b"\2" + udp
    frames = [bytes(12) + kind + ip for kind, ip in (
        (b"\x08\x00", v4), (b"\x86\xdd", v6), (b"\x81\x00\x00\x05\x08\x00", v4),
    )]
    packet = bytes.fromhex("0002 0002 0011 0001".replace(" ", "")) + roce
    lrh = bytearray(packet)
    lrh[4:6] = (len(packet) // 4).to_bytes(2, "big")
    erf = bytes(8) + bytes([21, 4]) + struct.pack(">HHH", 16 + len(lrh) + 2, 0, len(lrh) + 2) + bytes(lrh) + bytes(2)
    cooked = [struct.pack(">HHH6s2sH", 0, 1, 6, bytes(6), bytes(2), 0x800) + v4]
    cooked_v2 = [struct.pack(">HHIHBB8s", 0x86DD, 0, 1, 1, 0, 6, bytes(8)) + v6]
    kinds = (1, frames), (197, [erf]), (113, cooked), (276, cooked_v2), (101, [v4, v6])
    made = [_pcap(link_type, records) for link_type, records in kinds]
    with_fcs = _pcap(1 | 0x24000000, [frame + bytes(4) for frame in frames])
    return [*made, with_fcs, _pcapng(frames), gzip.compress(made[0])]


def _pcap(link_type: int, records: list[bytes]) -> bytes:
    """A file of libpcap's: pcap-savefile(5)."""
    return struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 1 << 16, link_type) + b"".join(
        struct.pack("<IIII", 1, 2, len(record), len(record)) + record for record in records
    )


def _pcapng(frames: list[bytes]) -> bytes:
    """A file with a block of each kind that has packets: draft-ietf-opsawg-pcapng."""

    def block(kind: int, body: bytes) -> bytes:
        body += bytes(-len(body) % 4)
        return struct.pack("<II", kind, 12 + len(body)) + body + struct.pack("<I", 12 + len(body))

    options = struct.pack("<HHB3xHHqHH", 9, 1, 9, 14, 8, 5, 0, 0)  # nanoseconds, and an offset of 5 s
    sizes = [(len(frame), len(frame)) for frame in frames]
    return b"".join((
        block(0x0A0D0D0A, struct.pack("<IHHq", 0x1A2B3C4D, 1, 0, -1)), block(1, struct.pack("<HHI", 1, 0, 0) + options),
        block(1, struct.pack("<HHIHHB3x", 101, 0, 0, 13, 1, 4)), block(4, b"names"),
        block(6, struct.pack("<IIIII", 0, 0, 7, *sizes[0]) + frames[0]),
        block(2, struct.pack("<HHIIII", 0, 0, 0, 7, *sizes[1]) + frames[1]),
        block(3, struct.pack("<I", sizes[2][0]) + frames[2]),
        block(6, struct.pack("<IIIII", 1, 0, 7, sizes[0][0] - 14, sizes[0][1] - 10) + frames[0][14:]),
    ))


_WAYS: tuple[Callable[[link.Message, str], object], ...] = (
    lambda message, name: message.integer(name, 1, 5), lambda message, name: message.number(name, 0, 1),
    link.Message.text, lambda message, name: message.raw(name, 16), link.Message.part,
    lambda message, name: message.parts(name, 4), lambda message, _: endpoints.endpoint_of(message),
    lambda message, _: endpoints.memory_of(message),
)


def _exchange(data: bytes) -> None:
    """Read what a peer of a rendezvous may send, and each value by each way to read one."""
    for message in link.Decoder("the peer").feed(data):
        for name in [*list(message)[:9], "missing"]:
            for way in _WAYS:
                try:
                    way(message, name)
                except link.PeerError as error:
                    str(error).encode()  # the text is shown


_OPTIONS = Options(benchmark=BENCHMARKS["write_bw"])


class _OtherEnd:
    """What a benchmark takes for a connection: it gets a message, whatever it waits for."""

    def __init__(self, message: link.Message):
        self.peer, self._message = message.peer, message

    def send(self, kind: str, **values: object) -> None: ...

    def expect(self, *kinds: str) -> link.Message:
        return self._message


_READERS: tuple[Callable[[Any, link.Message], object], ...] = (
    lambda end, _: agree(end, _OPTIONS, None, True), lambda end, _: swap_ends(end, [_ENDPOINT], 0, 0, 64, 64),
    lambda end, _: swap_words(end, 0, 0), lambda _, message: _result_of(message, 8, True),
    lambda _, message: _result_of(message, 8, False),
)


def _benchmark(data: bytes) -> None:
    """Read what the other end of a benchmark may send, by each way to read a message."""
    for message in link.Decoder("the other end").feed(data):
        for read in _READERS:
            try:
                str(read(_OtherEnd(message), message)).encode()
            except DocaError as error:
                str(error).encode()  # the text is sent, and shown


class _Caller:
    """What `TcpRendezvous._admit` takes for a connection."""

    def __init__(self, message: link.Message):
        self.peer, self._message = message.peer, message

    def expect(self, *kinds: str) -> link.Message:
        return self._message

    def close(self, error: BaseException) -> None:
        str(error).encode()  # the text is sent


def _join(data: bytes) -> None:
    """Let a stranger join."""
    ranks = tcp.TcpRendezvous(0, 1, key="the key")
    ranks.size = 4
    for message in link.Decoder("the caller").feed(data):
        ranks._admit(_Caller(message), "10.0.0.1")  # type: ignore[arg-type]


def _sealed_connection(raw: bytes) -> bytes:
    return raw[: CONNECTION_EXPORT.checksum] + zlib.crc32(raw[: CONNECTION_EXPORT.checksum]).to_bytes(4, "big")


def _samples_of_ports() -> bytes:
    ports.write(_FOLDER / "file", [
        ("soft0", PortConfig("10.0.0.1", faults=Faults(loss=0.1), capture="x")),
        ("soft1", PortConfig(link_layer=LinkLayer.INFINIBAND)),
    ])
    return (_FOLDER / "file").read_bytes()


def _sample_of_kept() -> bytes:
    write_kept(_FOLDER / "file", b"machine code")
    return (_FOLDER / "file").read_bytes()


_JOIN = link.encode("join", rank=1, size=4, key="the key")
_MESSAGES = [
    link.encode("endpoint", **endpoints.endpoint_values(_ENDPOINT)),
    link.encode("memory", gid="00", address=4096, rkey=7, nbytes=64), link.encode("values", values=[{"data": "00ff"}]),
]
_BENCHMARK_MESSAGES = [
    link.encode("hello", benchmark="write_bw", asked={"sizes": [8, 64], "iterations": 5, "qps": 1, "inline": True},
                payload={"nbytes": 5, "sha256": "00" * 32}),
    link.encode("hello", benchmark="write_bw", asked={"duration": 0.5}, payload=None),
    link.encode("ends", address=4096, rkey=7, nbytes=64, receives=1, qps=[endpoints.endpoint_values(_ENDPOINT)]),
    link.encode("words", address=4096, rkey=7),
    *(link.encode("result", **dataclasses.asdict(result)) for result in (
        BwResult(8, 5, 1.0, 1.0, 1.0, 1.0, Check("lost", 5, "00" * 32, 5)),
        LatResult(8, 5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, Check()),
    )),
]
_RECORDING = {"format": recording.FORMAT, "file": {"/sys/a": "1", "/b": {"hex": "00ff"}, "c": {"trouble": "absent",
              "error": "no"}}, "question": {"system": {"answer": 1}}}
_NICS = described_nics.Reader()
_DESCRIPTION = b"gpunetio-rdma here:1:2 - description 1 4\nabcd"

PARSERS: dict[str, Parser] = {
    "benchmark":         Parser(_benchmark, _BENCHMARK_MESSAGES),
    "capture":           Parser(_in_a_file(_capture), _captures()),
    "cm":                Parser(messages.parse, [messages.pack(kind, 7, b"data") for kind in Attribute]),
    "connection":        Parser(description.endpoint_of, [description.describe(_ENDPOINT)], seal=_sealed_connection),
    "control message":   Parser(body_of, [foreign_links.CONNECT], (BadMessage, EOFError)),
    "description file":  Parser(_in_a_file(descriptor_files._parse), [_DESCRIPTION]),
    "doctor recording":  Parser(_in_a_file(recording.load), [json.dumps(_RECORDING).encode()]),
    "exchange":          Parser(_exchange, _MESSAGES),
    "flow rules":        Parser(_NICS.flow_rules, [described_nics.flow_rules()]),
    "faults":            Parser(lambda raw: Faults.parse(raw.decode(errors="replace")), [b"loss=0.1,seed=7"]),
    "join":              Parser(_join, [_JOIN]),
    "kept":              Parser(unsealed, [_sample_of_kept()], (DamagedError,)),
    "link":              Parser(foreign_links.connect, [foreign_links.CONNECT], (BadMessage, EOFError)),
    "link's message":    Parser(foreign_links.Peer().hear, foreign_links.LETTERS, (BadMessage, EOFError)),
    "memory":            Parser(RemoteMemory.from_export, [RemoteMemory(4096, 64, 7).export()]),
    "NCCL handle":       Parser(lambda raw: nccl._place(0, raw.ljust(nccl.HANDLE.size, b"\0")[: nccl.HANDLE.size]),
                                [nccl.HANDLE.pack(magic=b"gpunetio", protocol=1, port=5, address=bytes(16))]),
    "neighbour":         Parser(foreign_links.neighbour, foreign_links.frames(), seal=foreign_links.checksummed),
    "NIC":               Parser(_NICS.nic, [described_nics.nic()]),
    "ping-pong":         Parser(lambda raw: unpack_address(raw, 1024, "the other end"), [pack_address(_ENDPOINT)]),
    "ports":             Parser(_in_a_file(ports.read), [_samples_of_ports()]),
    "rank's value":      Parser(lambda raw: Rendezvous._decoded(1, raw), [b"b123", b'j{"a": [1, 2]}']),
    "socket address":    Parser(lambda raw: sockaddr.parse(raw.ljust(28, b"\0")),
                                [sockaddr.of_gid(_ENDPOINT.gid, 5).pack()], (Refused,)),
}


# --- runs ------------------------------------------------------------------------------------------------------------


class Mistake(NamedTuple):
    """Bytes after which something else than an error of the package came."""

    data: bytes
    error: BaseException


def mistakes(name: str, times: int, seed: int) -> Iterator[Mistake]:
    """Give a parser its samples, then changed ones, so many times. Yield what it makes a mistake of."""
    parser, chance = PARSERS[name], random.Random(seed)
    given = [*parser.samples, *(parser.seal(mutated(chance, chance.choice(parser.samples))) for _ in range(times))]
    for data in given:
        try:
            parser.parse(data)
        except (DocaError, *parser.errors):
            pass
        except Exception as error:
            yield Mistake(data, error)


def main(arguments: list[str]) -> None:
    """Run one parser, or print the names of all."""
    if not arguments:
        print("\n".join(PARSERS))
        return
    name, times, *seed = arguments
    logging.getLogger("gpunetio").setLevel(logging.CRITICAL)  # of messages that are ignored
    seen: Counter[str] = Counter()
    for step in range(0, int(times), 1000):
        for data, error in mistakes(name, min(1000, int(times) - step), int(seed[0] if seed else 0) + step):
            where = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} in {where.filename}:{where.lineno}: {str(error)[:100]}"
            if not seen[kind]:
                print(f"{kind}\n    {data[:200]!r}", flush=True)
            seen[kind] += 1
    print(f"{name}: {times} times, {sum(seen.values())} mistakes of {len(seen)} kinds")


if __name__ == "__main__":
    main(sys.argv[1:])
