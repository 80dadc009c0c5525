"""For tests of the application: frames with their expected counts, and a run over a capture of them."""

import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from scapy.layers.inet import IP
from scapy.layers.l2 import Ether
from scapy.packet import Packet

from gpunetio import PortConfig
from gpunetio.packet_processing.app import run
from gpunetio.packet_processing.options import Options
from gpunetio.packet_processing.queues import Protocol
from gpunetio.packet_processing.statistics import Report

MAC, ADDRESS = "02:00:c0:00:02:01", "192.0.2.1"  # of the NIC
PEER_MAC, PEER = "02:00:00:00:00:02", "192.0.2.2"

Counted = tuple[str, str, int]  # protocol, class of the count, bytes
NOTHING: Counted = ("", "", 0)


def l2(dst: str = MAC) -> Ether:
    return Ether(src=PEER_MAC, dst=dst)


def ip(**fields: object) -> IP:
    return IP(**{"src": PEER, "dst": ADDRESS, **fields})


def totals(report: Report, protocol: Protocol) -> Counter[str]:
    """Return what the queues of a protocol have counted together, without zeros."""
    found: Counter[str] = Counter()
    for queue in report.of_protocol(protocol):
        found.update({name: count for name, count in queue.counts.items() if count})
    return found


def expected(frames: Iterable[tuple[Packet, Counted]]) -> dict[str, Counter[str]]:
    """Return what frames count together, by the name of the protocol."""
    found: dict[str, Counter[str]] = {protocol.name: Counter() for protocol in Protocol}
    for _, (protocol, kind, nbytes) in frames:
        if protocol:
            found[protocol][kind] += 1
            found[protocol]["total"] += 1
            if nbytes:
                found[protocol][f"{kind}_bytes"] += nbytes
                found[protocol]["total_bytes"] += nbytes
    return found


def options_for(
    frames: Iterable[Packet], folder: Path, queues: int = 1, times: int = 1, gpu: str = "host"
) -> Options:
    """Return options for a run over frames, all of them so many times."""
    path = folder / "frames.pcap"
    # libpcap's format: 2.4, frames up to 64 KiB, Ethernet. A record has its time, and its length twice.
    records = b"".join(struct.pack("<4I", 0, 0, len(data), len(data)) + data for data in map(bytes, frames))
    with path.open("wb") as file:
        file.write(struct.pack("<I2H4I", 0xA1B2C3D4, 2, 4, 0, 0, 1 << 16, 1))
        for _ in range(times):
            file.write(records)
    port = PortConfig(addresses=(ADDRESS,), mtu=1500, capture=folder / "sent.pcap" if times == 1 else None)
    return Options(gpu=gpu, device="soft0", queues=queues, replay=path, nic_port=port)


def replayed(
    frames: Iterable[Packet], folder: Path, queues: int = 1, times: int = 1, gpu: str = "host"
) -> Report:
    """Run the application over frames. The capture `sent.pcap` then also has what the NIC has sent."""
    report = run(options_for(frames, folder, queues, times, gpu))
    assert not report.failures
    return report
