"""eth_rxq_…: a CPU program receives Ethernet packets in its own buffer, or from a pool, one by one or in batches.

    1. resources    device, protection domain, a receive queue
    2. steering     a flow rule leads all packets of the port to the queue, with a tag
    3. data path    take packets for a while, and give their buffers back
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from enum import Enum

from ..errors import TimedOutError
from ..eth import ManagedRxq, PacketInfo, RegularRxq
from ..flow import FlowPort, match
from ..memory import HostMemory
from ..nic.engine.port import PortConfig
from ..verbs import PD, Context
from ..verbs import open as open_device

BURST, BATCH_BURST, PACKET_BYTES = 256, 2048, 1600
RATE, MAX_TIME = 10_000, 10  # Mbit/s, microseconds
SECONDS = 30.0
LEAST, MOST = 1, 16  # packets of a batch
TAG = 1234

_log = logging.getLogger(__name__)


class Kind(Enum):
    """How the sample receives."""

    REGULAR = "regular"
    MANAGED = "managed"
    BATCH   = "batch"


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """`headroom` and `tailroom` are bytes around each packet of a pool; `seconds` is how long the sample receives."""

    kind: Kind
    device: str | None = None
    nic_port: PortConfig | None = None
    timestamp: bool = False
    headroom: int = 0
    tailroom: int = 0
    seconds: float = SECONDS


def run(options: SampleOptions) -> int:
    """Receive one packet into a buffer, or packets from a pool for some time. Return the number of packets."""
    _log.info("Starting the sample")
    with open_device(options.device, port=options.nic_port) as ctx:
        pd = ctx.create_pd()
        count = (_regular if options.kind is Kind.REGULAR else _managed)(ctx, pd, options)
    _log.info("Sample finished successfully")
    return count


def _regular(ctx: Context, pd: PD, options: SampleOptions) -> int:
    """Receive one packet in a buffer that is posted."""
    region = pd.register(HostMemory(PACKET_BYTES))
    with RegularRxq(pd, BURST, PACKET_BYTES) as rxq, FlowPort(ctx) as port:
        port.steer(match.everything(), to=rxq, tag=TAG)
        rxq.post(region, 0, PACKET_BYTES)
        _log.info("Receiving")
        received = rxq.receive(1, timeout=options.seconds)
        if not received:
            raise TimedOutError(f"no packet arrived within {options.seconds:g} s")
        (one,) = received
        if one.error or one.info is None:
            _log.info("Failed to receive a packet: %s", one.error)
            return 0
        _tell(one.nbytes, one.info, options)
    return 1


def _managed(ctx: Context, pd: PD, options: SampleOptions) -> int:
    """Receive packets from a pool, one by one or in batches."""
    batches = options.kind is Kind.BATCH
    most = MOST if batches else 1
    packets = calls = 0
    with (
        ManagedRxq(
            pd, BATCH_BURST if batches else BURST, PACKET_BYTES, rate=RATE, max_time=MAX_TIME,
            headroom=options.headroom, tailroom=options.tailroom,
        ) as rxq,
        FlowPort(ctx) as port,
    ):
        port.steer(match.everything(), to=rxq, tag=TAG)
        _log.info("Receiving for %g seconds", options.seconds)
        end = time.monotonic() + options.seconds
        while (left := end - time.monotonic()) > 0:
            received = rxq.receive(most, least=LEAST, timeout=left)
            calls += bool(received)
            for packet in received:
                with packet:
                    packets += 1
                    _tell(packet.nbytes, packet.info, options)
    _log.info("Total packets received: %d", packets)
    if batches:
        _log.info("Total call-backs invoked: %d", calls)
    return packets


def _tell(nbytes: int, info: PacketInfo, options: SampleOptions) -> None:
    _log.info("Received a packet of size %d successfully", nbytes)
    _log.debug("flow tag %d, checksums right: %r", info.flow_tag, info.checks)
    if options.timestamp:
        _log.info("Timestamp: %d", info.timestamp)
