"""DOCA Ethernet: packets in and out of kernels and CPU programs.

Flow rules direct packets to receive queues, and kernels receive them with `device.rxq_recv`:

    with gn.open() as ctx, gn.Gpu() as gpu:
        rxq = eth.CyclicRxq(gpu, ctx.create_pd(), max_burst=16384, max_packet=2048)
"""

from .caps import EthCaps, WaitOnTime, query_caps
from .cyclic import CyclicRxq
from .failure import QueueError
from .receive import ManagedRxq, RegularRxq
from .received import ManagedPacket, PacketInfo, Received
from .rxq import EthRxq, rxq_of
from .send import CpuTxq, Packet, Sent
from .txq import EthTxq, SentEvent

__all__ = [
    "CpuTxq", "CyclicRxq", "EthCaps", "EthRxq", "EthTxq", "ManagedPacket", "ManagedRxq", "Packet", "PacketInfo",
    "QueueError", "Received", "RegularRxq", "Sent", "SentEvent", "WaitOnTime", "query_caps", "rxq_of",
]
