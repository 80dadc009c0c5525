"""eth_txq_…: a CPU program sends one Ethernet frame or a batch of them, as they are or with LSO.

    1. resources    device, protection domain, memory with the frame, a send queue
    2. data path    post, with one doorbell for a batch, and wait for the completions

Frames have EtherType 0x88b5, which IEEE 802 reserves for experiments, and a payload of one byte, repeated. LSO needs
TCP: the sample sends a payload that the device cuts into packets.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..errors import DriverError, TimedOutError
from ..eth import CpuTxq, Packet, Sent, query_caps
from ..formats.packet import ETHER_TYPE_IPV4, ETHERNET, IP_PROTOCOL_TCP, IPV4, TCP
from ..memory import HostMemory
from ..nic.engine.port import PortConfig
from ..verbs import open as open_device

BURST = 256  # packets that the queue has room for
FRAME_BYTES, FRAME_BYTE, EXPERIMENTAL = 1500, 0x11, 0x88B5
LSO_BYTES, LSO_BYTE, MSS, LSO_HEADERS = 4000, 0x22, 1500, 64
BATCH = 32
WAIT_SECONDS = 10.0  # for completions
_VERSION_IHL, _TTL, _OFFSET = 0x45, 64, 5 << 12  # headers without options
_ADDRESS, _PEER, _PORT = bytes([192, 0, 2, 1]), bytes([192, 0, 2, 2]), 9  # RFC 5737, RFC 863

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """`destination` is the MAC of the frames, of 6 bytes. `lso` and `batch` say how they are sent."""

    device: str | None = None
    nic_port: PortConfig | None = None
    destination: bytes = b"\xff" * 6
    lso: bool = False
    batch: bool = False


def run(options: SampleOptions) -> None:
    """Send, and wait until all was sent."""
    _log.info("Starting the sample")
    with open_device(options.device, port=options.nic_port) as ctx:
        pd = ctx.create_pd()
        caps = query_caps(ctx)
        headers, body = (_lso if options.lso else _frame)(options.destination, caps.mac)
        mss = min(MSS, caps.mtu - IPV4.size - TCP.size) if options.lso else 0
        memory = HostMemory(len(body))
        memory.array[: len(body)] = list(body)
        region = pd.register(memory)
        count = BATCH if options.batch else 1
        with CpuTxq(pd, BURST, checksum=options.lso, max_lso_headers=LSO_HEADERS if options.lso else 0) as txq:
            txq.post([Packet(region, 0, len(body), n, headers, mss) for n in range(count)])
            _check(txq.completions(count, least=count, timeout=WAIT_SECONDS), count)
    kind = "an LSO" if options.lso else "a regular"
    for _ in range(count):
        _log.info("Sent %s packet of size %d successfully", kind, len(body))
    _log.info("Sample finished successfully")


def _frame(destination: bytes, source: bytes) -> tuple[bytes, bytes]:
    """Return empty headers, and a frame."""
    head = ETHERNET.pack(destination=destination, source=source, ether_type=EXPERIMENTAL)
    return b"", bytes(head).ljust(FRAME_BYTES, bytes([FRAME_BYTE]))


def _lso(destination: bytes, source: bytes) -> tuple[bytes, bytes]:
    """Return the headers of Ethernet, IPv4 and TCP, and a payload."""
    headers = ETHERNET.pack(destination=destination, source=source, ether_type=ETHER_TYPE_IPV4)
    headers += IPV4.pack(
        version_ihl=_VERSION_IHL, total_length=IPV4.size + TCP.size + LSO_BYTES, ttl=_TTL, protocol=IP_PROTOCOL_TCP,
        source=_ADDRESS, destination=_PEER,
    )
    headers += TCP.pack(source_port=_PORT, destination_port=_PORT, offset_flags=_OFFSET)
    return bytes(headers), bytes([LSO_BYTE]) * LSO_BYTES


def _check(sent: list[Sent], count: int) -> None:
    """Raise an error unless `count` packets were sent."""
    for one in sent:
        if one.error:
            raise DriverError(f"a packet was not sent: WQE {one.error}", one.error.syndrome, one.error.vendor_syndrome)
    if len(sent) < count:
        raise TimedOutError(f"{len(sent)} of {count} packets were sent within {WAIT_SECONDS:g} s")
