"""`gpunetio replay`: a software NIC takes the place of the NIC that got the packets of a capture file.

The queue pairs and memory regions of that NIC had numbers that a NIC chooses itself. So the software NIC gets a queue
pair for each one that took requests, and a region for each remote key, and the packets are readdressed to them. Nothing
else in a packet changes. A region has the bytes that requests name, all of them 0.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Self

from .. import __version__
from ..enums import LinkLayer, QpType
from ..errors import InvalidValueError, NotFoundError
from ..fabric.pcap_reader import Address, Packet, PcapFile
from ..flow import FlowPort, match
from ..formats.operations import PACKETS
from ..formats.operations import Packet as Meaning
from ..formats.packet import (
    BTH,
    GRH,
    LRH,
    OPERATION_MASK,
    PAD_SHIFT,
    PSN_MASK,
    QPN_MASK,
    RETH,
    SERVICE_SHIFT,
    PacketOpcode,
)
from ..nic.engine.port import MAX_HEADERS, MTUS, PortConfig, address_of
from ..nic.wires.pcap import replay_frames
from ..nic.wires.replay import TIMEOUT, Replayed, replay
from ..verbs import QP, Context, Handle, QpEndpoint, RecvWr, Sge
from ..verbs import open as open_device
from .frame_sink import FrameSink

MAX_REGION = 1 << 28  # bytes; a key whose requests lie farther apart gets no region
MAX_RECEIVES = 1 << 14  # of a queue pair
_SERVICES = {0: QpType.RC, 1: QpType.UC}  # by the upper bits of a packet opcode (IBTA table 38)
_OPERATIONS = {member.value for member in PacketOpcode}
ALL = "all"  # all addresses
_NOBODY = "192.0.2.1"  # the address of the NIC that gets frames (RFC 5737)
_DEFAULT_ADDRESS = "127.0.0.1"  # the address of an InfiniBand port whose packets do not name its GID


@dataclass(frozen=True)
class ReplayOptions:
    """What to replay, to which address or LID (by default the one with most requests), and how.

    `timeout` is in seconds. `capture` is a file for the packets that the NIC takes and sends. With `frames`, all
    Ethernet frames go to a receive queue, whatever they contain, and `address` is not used.
    """

    path: Path
    address: str | None = None
    fast: bool = False
    timeout: float = TIMEOUT
    device: str | None = "soft0"
    capture: Path | None = None
    frames: bool = False


# --- what a capture file asks for ------------------------------------------------------------------------------------


def _field(packet: Packet, offset: int, nbytes: int) -> int:
    """Return a big-endian field at this offset from the BTH."""
    start = packet.bth + offset
    return int.from_bytes(packet.data[start : start + nbytes], "big")


def _meaning(packet: Packet) -> Meaning | None:
    """Return the meaning of a request packet; None for responses, and for opcodes that no connected queue pair has."""
    opcode = packet.data[packet.bth]
    if opcode not in _OPERATIONS or opcode >> SERVICE_SHIFT not in _SERVICES:
        return None
    return PACKETS.get(PacketOpcode(opcode & OPERATION_MASK))


@dataclass
class _Region:
    """The range of addresses that requests with one remote key name."""

    start: int
    end: int

    def include(self, start: int, nbytes: int) -> None:
        self.start, self.end = min(self.start, start), max(self.end, start + nbytes)


@dataclass
class _Queue:
    """A queue pair that took requests: their source, first PSN, largest payload per packet, and the number of SENDs."""

    service: QpType
    source: Address
    gid: bytes
    psn: int
    mtu: int = MTUS[0]
    receives: int = 0
    longest: int = 0
    message: int = 0  # bytes of the message at hand

    def add(self, packet: Packet, meaning: Meaning) -> None:
        """Count a request."""
        headers = BTH.size + sum(header.size for header in meaning.headers)
        pad = packet.data[packet.bth + BTH.se_m_pad_tver] >> PAD_SHIFT & 3
        payload = max(0, len(packet.data) - packet.bth - headers - pad)
        self.message = payload if meaning.first else self.message + payload
        if not meaning.last and payload in MTUS:  # all packets of a message except the last are full
            self.mtu = payload
        if meaning.last and (meaning.imm or meaning.operation.receives is not None):
            self.receives += 1
            self.longest = max(self.longest, self.message)


@dataclass
class Survey:
    """The requests to one address."""

    queues: dict[int, _Queue] = field(default_factory=dict)  # by QP number
    regions: dict[int, _Region] = field(default_factory=dict)  # by remote key
    gid: bytes = bytes(16)  # of the port, where packets name it

    def add(self, packet: Packet) -> None:
        """Count a packet."""
        if packet.bth > LRH.size:
            self.gid = packet.data[LRH.size + GRH.dgid : LRH.size + GRH.size]
        meaning = _meaning(packet)
        if meaning is None:
            return
        qpn = _field(packet, BTH.resv_dest_qp, 4) & QPN_MASK
        if qpn not in self.queues:
            service = _SERVICES[packet.data[packet.bth] >> SERVICE_SHIFT]
            psn = _field(packet, BTH.ack_psn, 4) & PSN_MASK
            self.queues[qpn] = _Queue(service, packet.source, packet.gid, psn)
        self.queues[qpn].add(packet, meaning)
        if (named := _named(packet, meaning)) is not None:
            key, start, nbytes = named
            self.regions.setdefault(key, _Region(start, start)).include(start, nbytes)


def _named(packet: Packet, meaning: Meaning) -> tuple[int, int, int] | None:
    """Return the remote key, address and length that a request names, or None if it names none."""
    if not (meaning.operation.remote and meaning.first) or len(packet.data) < packet.bth + BTH.size + RETH.size:
        return None
    va, key = _field(packet, BTH.size + RETH.va, 8), _field(packet, BTH.size + RETH.rkey, 4)
    nbytes = 8 if meaning.operation.atomic else _field(packet, BTH.size + RETH.dma_length, 4)
    return key, va, nbytes


def survey(file: PcapFile, address: Address | None) -> tuple[Address, Survey]:
    """Read the whole file. Return the address, by default the one with most requests, and the requests to it."""
    found: dict[Address, Survey] = {}
    requests: Counter[Address] = Counter()
    for packet in file:
        found.setdefault(packet.destination, Survey()).add(packet)
        requests[packet.destination] += _meaning(packet) is not None
    if not found:
        why = ", ".join(f"{count} are {reason}" for reason, count in file.skipped.items()) or "it is empty"
        raise NotFoundError(f"{file.path} has no packet to replay: of {file.records} records, {why}")
    chosen = requests.most_common(1)[0][0] if address is None else address
    if chosen not in found:
        raise NotFoundError(
            f"{file.path} has no packet to {shown(chosen)}: its packets go to {', '.join(map(shown, found))}"
        )
    return chosen, found[chosen]


def shown(address: Address | str) -> str:
    """Return an address as text, or ALL."""
    return f"LID {address:#x}" if isinstance(address, int) else str(address)


# --- the NIC ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The outcome of a replay.

    `address` is ALL for frames. `elsewhere` counts packets to other addresses; `skipped` counts records that are no
    packets, by reason. `reasons` are the NIC's explanations of the requests that it refused.
    """

    path: Path
    address: Address | str
    records: int
    skipped: dict[str, int]
    elsewhere: int
    queues: int
    replayed: Replayed
    reasons: list[str]

    def document(self) -> dict[str, object]:
        """Return the document that --json prints."""
        done = self.replayed
        return {
            "version": __version__, "file": str(self.path), "address": shown(self.address), "records": self.records,
            "skipped": self.skipped, "elsewhere": self.elsewhere, "queues": self.queues, "replayed": done.packets,
            "seconds": done.seconds, "accepted": done.accepted, "answers": done.answered, "refused": done.refused,
            "reasons": self.reasons,
        }


class Stage:
    """A software NIC with the address of a survey, its queue pairs and its regions, for a `with` statement."""

    ctx: Context

    def __init__(self, address: Address, wanted: Survey, options: ReplayOptions):
        self._address = address
        self.ctx = open_device(options.device, port=_port(address, wanted, options))
        self._qpns: dict[int, int] = {}
        self._keys: dict[int, int] = {}
        self._made: list[Handle] = []
        try:
            self._pd = self.ctx.create_pd()
            for key, region in wanted.regions.items():
                if (nbytes := region.end - region.start) <= MAX_REGION:
                    made = self._pd.register(bytearray(max(nbytes, 1)), iova=region.start)
                    self._made.append(made)
                    self._keys[key] = made.rkey
            for qpn, queue in wanted.queues.items():
                self._qpns[qpn] = self._queue(qpn, queue).qpn
        except BaseException:
            self.ctx.close()
            raise

    def _queue(self, qpn: int, queue: _Queue) -> QP:
        receives = min(max(queue.receives, 1), MAX_RECEIVES)
        cq = self.ctx.create_cq(receives)
        made = self._pd.create_qp(sq_wr=1, rq_wr=receives, send_cq=cq, receive_cq=cq, qp_type=queue.service)
        buffer = self._pd.register(bytearray(max(queue.longest, 1)))
        self._made += [made, buffer]
        lid = queue.source if isinstance(queue.source, int) else 0
        made.connect(QpEndpoint(qpn, queue.gid, lid, queue.mtu, queue.psn))
        if queue.receives:
            made.post_recv(*[RecvWr(sges=[Sge(buffer.address, buffer.nbytes, buffer.lkey)])] * receives)
        return made

    def readdress(self, packet: Packet) -> Packet:
        """Return a packet with the numbers of this NIC's queue pair and region."""
        data = bytearray(packet.data)
        at = packet.bth + BTH.resv_dest_qp
        word = _field(packet, BTH.resv_dest_qp, 4)
        qpn = self._qpns.get(word & QPN_MASK, word & QPN_MASK)
        data[at : at + 4] = (word & ~QPN_MASK | qpn).to_bytes(4, "big")
        meaning = _meaning(packet)
        if meaning is not None and (named := _named(packet, meaning)) is not None and named[0] in self._keys:
            at = packet.bth + BTH.size + RETH.rkey
            data[at : at + 4] = self._keys[named[0]].to_bytes(4, "big")
        return replace(packet, data=bytes(data))

    def play(self, file: PcapFile, options: ReplayOptions) -> Result:
        """Replay the packets of a file that went to this NIC's address."""
        nic = self.ctx.provider.nic  # type: ignore[attr-defined]
        mine = (self.readdress(packet) for packet in file if packet.destination == self._address)
        done = replay(nic, mine, options.fast, options.timeout)
        elsewhere = file.records - sum(file.skipped.values()) - done.packets
        reasons = list(dict.fromkeys(report.message for report in nic.reports))
        return Result(
            file.path, self._address, file.records, dict(file.skipped), elsewhere, len(self._qpns), done, reasons
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ctx.close()


def _port(address: Address, wanted: Survey, options: ReplayOptions) -> PortConfig:
    """Return a port with the address."""
    mtu = MTUS[0] + MAX_HEADERS
    if isinstance(address, int):
        own = address_of(wanted.gid) if any(wanted.gid) else _DEFAULT_ADDRESS
        return PortConfig(
            (str(own),), "replay", mtu, link_layer=LinkLayer.INFINIBAND, lid=address, capture=options.capture
        )
    return PortConfig((str(address),), "replay", mtu, capture=options.capture)


def _asked(text: str, infiniband: bool) -> Address:
    """Parse the address that a user has given: an IP address or, on InfiniBand, a LID."""
    try:
        return int(text, 0) if infiniband else ip_address(text)
    except ValueError:
        kind = "LID, such as 0x2: the capture is of InfiniBand" if infiniband else "IP address: the capture is of RoCE"
        raise InvalidValueError(f"{text!r} is no {kind}") from None


def _run_frames(options: ReplayOptions) -> Result:
    """Replay all frames to a receive queue."""
    port = PortConfig(_NOBODY, f"pcap:{options.path}", capture=options.capture)
    with open_device(options.device, port=port) as ctx, FrameSink(ctx.create_pd()) as sink:
        nic = ctx.provider.nic  # type: ignore[attr-defined]
        with FlowPort(ctx) as flows:
            flows.steer(match.everything(), to=sink)
            done = replay_frames(nic, options.fast, options.timeout, (sink.rqn,), sink.empty)
        file = nic.wire_to_others().file
        return Result(options.path, ALL, file.records, dict(file.skipped), 0, 1, done, [])


def run(options: ReplayOptions) -> Result:
    """Replay a capture file to a software NIC of this process."""
    if options.frames:
        return _run_frames(options)
    with PcapFile(options.path) as file:
        asked = None if options.address is None else _asked(options.address, file.infiniband)
        address, wanted = survey(file, asked)
        with Stage(address, wanted, options) as stage:
            return stage.play(file, options)
