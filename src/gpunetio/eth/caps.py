"""The Ethernet capabilities of a device (`doca_eth_rxq_cap_*`, `doca_eth_txq_cap_*`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from ..arguments import instance
from ..enums import LinkLayer
from ..errors import NotSupportedError
from ..formats.commands import CapClass, Opcode
from ..formats.contexts import CMD_HCA_CAP, ETHERNET_OFFLOAD_CAPS
from ..formats.ethernet_queues import VPORT_FRAMING, InlineMode, InlineModeCap, TimestampFormats
from ..formats.wqe import MIN_STRIDES_LOG
from ..verbs import Context
from ..verbs.device_attr import query_cap
from ..verbs.ibv.device import needs_devx

LONGEST_PACKET = 1 << 14  # no Ethernet frame is longer


class WaitOnTime(IntEnum):
    """enum doca_eth_wait_on_time_type: whether a send queue can wait for a time. The numbers are gpunetio's."""

    NONE   = 0
    NATIVE = 1


@dataclass(frozen=True, kw_only=True)
class EthCaps:
    """The Ethernet capabilities of a device. Counts are of packets or basic blocks, sizes in bytes.

    `max_rx_burst`       packets of a receive queue on the CPU data path, or of a cyclic one without strides
    `max_cyclic_burst`   packets of a cyclic receive queue with strides; 0 without strides
    `max_packet`         the longest packet
    `max_stride`         the longest packet of a queue with strides
    `max_send_depth`     basic blocks of a send queue
    `checksum`           whether the device can compute L3 and L4 checksums of sent packets
    `max_lso`            maximum bytes that one LSO WQE sends; 0 without LSO
    `multi_packet`       whether a WQE can hold several packets
    `wait_on_time`       whether, and how, a send queue can wait for a time
    `min_inline`         the headers that every send WQE must contain
    `mtu`                the port's MTU: maximum bytes of a frame after its MAC header and VLAN tags
    `mac`                the port's MAC, 6 bytes
    `real_time_receive`  timestamps of received packets are seconds and nanoseconds; otherwise they are clock cycles
    `real_time_send`     the same for timestamps of sent packets, and for the times to wait for
    `clock_khz`          frequency of the clock that counts the cycles
    """

    max_rx_burst: int
    max_cyclic_burst: int
    max_packet: int
    max_stride: int
    max_send_depth: int
    checksum: bool
    max_lso: int
    multi_packet: bool
    wait_on_time: WaitOnTime
    min_inline: InlineMode
    mtu: int
    mac: bytes
    real_time_receive: bool
    real_time_send: bool
    clock_khz: int


def query_caps(ctx: Context) -> EthCaps:
    """Query the Ethernet capabilities of a device.

    NotSupportedError if it has no Ethernet queues: without DEVX, on an InfiniBand port, or on a wire without Ethernet.
    """
    if not instance("ctx", ctx, Context).has_devx:
        raise needs_devx(ctx, "Ethernet queues")
    general = query_cap(ctx.provider, CapClass.GENERAL, CMD_HCA_CAP)
    if ctx.query_device().link_layer is LinkLayer.INFINIBAND:
        raise NotSupportedError(f"{ctx} has an InfiniBand port: Ethernet queues need link_layer ETHERNET")
    if not general["eth_net_offloads"]:
        raise NotSupportedError(
            f"{ctx} has no Ethernet queues: it does not announce them; on a software NIC, choose a wire that carries "
            "Ethernet frames"
        )
    offloads = query_cap(ctx.provider, CapClass.ETHERNET_OFFLOADS, ETHERNET_OFFLOAD_CAPS)
    most_wqes = 1 << general["log_max_wq_sz"]
    striding = bool(general["striding_rq"])
    vport = ctx.devx.command(Opcode.QUERY_NIC_VPORT_CONTEXT)["nic_vport_context"]
    inline = {
        InlineModeCap.L2: InlineMode.L2, InlineModeCap.VPORT_CONTEXT: InlineMode(vport["min_wqe_inline_mode"]),
    }
    return EthCaps(
        max_rx_burst=most_wqes,
        max_cyclic_burst=most_wqes << MIN_STRIDES_LOG if striding else 0,
        max_packet=LONGEST_PACKET,
        max_stride=1 << general["log_max_stride_sz_rq"] if striding else 0,
        max_send_depth=most_wqes,
        checksum=bool(offloads["csum_cap"]),
        max_lso=1 << offloads["max_lso_cap"] if offloads["max_lso_cap"] else 0,
        multi_packet=bool(offloads["enhanced_multi_pkt_send_wqe"]),
        wait_on_time=WaitOnTime.NATIVE if general["wait_on_time"] else WaitOnTime.NONE,
        min_inline=inline.get(offloads["wqe_inline_mode"], InlineMode.NONE),
        mtu=vport["mtu"] - VPORT_FRAMING if vport["mtu"] else LONGEST_PACKET,  # 0: the device does not report an MTU
        mac=vport["permanent_address"].to_bytes(8, "big")[2:],
        real_time_receive=general["rq_ts_format"] != TimestampFormats.FREE_RUNNING,
        real_time_send=general["sq_ts_format"] != TimestampFormats.FREE_RUNNING,
        clock_khz=general["device_frequency_khz"],
    )
