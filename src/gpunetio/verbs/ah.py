"""Address handles, and the address path of a queue pair: how packets reach a peer."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from ..arguments import instance, within
from ..enums import AddrType, LinkLayer, WcFlags
from ..errors import NotFoundError
from ..formats.commands import (
    QUERY_ROCE_ADDRESS_IN,
    QUERY_ROCE_ADDRESS_OUT,
    ROCE_VERSION_2,
    Opcode,
    OptParam,
)
from ..formats.contexts import ROCE_ADDR_LAYOUT
from ..formats.layout import Fields
from ..formats.packet import GRH, IPV4, IPV4_MAPPED
from ..providers.plain_verbs import Route
from .ah_attr import AhAttr, ip_type
from .commands import command
from .handle import Handle

if TYPE_CHECKING:
    from .context import Context
    from .pd import PD
    from .work import Completion

_SUBNET_PREFIX = 8  # bytes of an InfiniBand GID
_DSCP_SHIFT = 2  # a traffic class is 6 bits of DSCP, then 2 of ECN


def sender_of(ctx: Context, port: int, done: Completion, header: bytes) -> AhAttr:
    """Return the path to the sender of a datagram. `header` is the first 40 bytes in the buffers of its receive."""
    if ctx.query_device().link_layer == LinkLayer.INFINIBAND:
        path = AhAttr(dlid=done.slid, sl=done.sl, addr_type=AddrType.IB_NO_GRH)
        if WcFlags.GRH not in done.flags:
            return path
        source, target = header[GRH.sgid : GRH.dgid], header[GRH.dgid : GRH.size]
        path = replace(path, addr_type=AddrType.IB_GRH)
    elif header[0] >> 4 == 6:
        path, source, target = AhAttr(), header[GRH.sgid : GRH.dgid], header[GRH.dgid : GRH.size]
    else:
        ends = header[GRH.size - IPV4.size + IPV4.source : GRH.size]
        path, source, target = AhAttr(), IPV4_MAPPED + ends[:4], IPV4_MAPPED + ends[4:]
    for index in range(ctx.query_device().gid_table_size):
        if ctx.query_gid(port, index) == target:
            return replace(path, gid=source, sgid_index=index)
    raise NotFoundError(f"port {port} of {ctx.name} has no GID {target.hex(':', 2)}, to which the datagram was sent")


class AddressHandle(Handle):
    """The path to a destination of datagrams (`ibv_ah`), created by `PD.create_ah`. Its PD closes it.

    `attr` is the path it was created from. `av` is the address vector (formats.wqe.AV_SEG) that a WQE to this
    destination contains; it is empty on a device without DEVX.
    """

    _rank = 0
    attr: AhAttr
    av: bytes
    handle: int

    def __init__(self, pd: PD, attr: AhAttr, port: int):
        ctx = pd.ctx
        super().__init__(ctx)
        self._use(pd, ctx)
        device = ctx.query_device()
        instance("attr", attr, AhAttr).check(device)
        within("port", port, 1, device.phys_port_cnt)
        self.attr = attr = with_type(ctx, port, attr)
        route = route_of(attr)
        with ExitStack() as undo:
            made = ctx.provider.create_ah(pd.pdn, port, route)
            undo.callback(ctx.provider.destroy_ah, made.handle)
            self.handle, self.av = made.handle, made.av
            where = route.dgid.hex(":", 2) if route.is_global else f"LID {attr.dlid:#x}"
            self._opened(f"address handle to {where} of {ctx.name}", undo)


def route_of(ah: AhAttr) -> Route:
    """Return the path in libibverbs' form. The address handle must have an address type."""
    return Route(
        bytes(ah.gid), ah.dlid, ah.sl, ah.sgid_index, ah.static_rate, ah.hop_limit, ah.traffic_class,
        ah.addr_type != AddrType.IB_NO_GRH, ah.flow_label,
    )


def with_type(ctx: Context, port: int, ah: AhAttr) -> AhAttr:
    """Return the address handle with an address type: the one it has, or the one that its GID implies.

    On InfiniBand, a packet needs a global route (GRH) only when it leaves its subnet (IBTA 1.2.1, 8.3).
    """
    if ah.addr_type is not None:
        return ah
    if ctx.query_device().link_layer == LinkLayer.ETHERNET:
        return replace(ah, addr_type=ip_type(ah.gid))
    here = ctx.provider.query_gid(port, ah.sgid_index)
    is_local = not any(ah.gid) or ah.gid[:_SUBNET_PREFIX] == here[:_SUBNET_PREFIX]
    return replace(ah, addr_type=AddrType.IB_NO_GRH if is_local else AddrType.IB_GRH)


def path_to(ctx: Context, port: int, ah: AhAttr) -> Fields:
    """Return the primary_address_path for a queue pair whose peer is `ah`. On RoCE, it contains the peer's MAC."""
    path: Fields = {"stat_rate": ah.static_rate}
    if ah.addr_type in (AddrType.IB_GRH, AddrType.IB_NO_GRH):
        path |= {"tclass": ah.traffic_class, "rlid": ah.dlid, "sl": ah.sl, "grh": ah.addr_type == AddrType.IB_GRH}
    if ah.addr_type != AddrType.IB_NO_GRH:
        path |= {"rgid_rip": bytes(ah.gid), "hop_limit": ah.hop_limit, "src_addr_index": ah.sgid_index}
        path["flow_label"] = ah.flow_label
    if ah.addr_type in (AddrType.IPv4, AddrType.IPv6):
        mac = ctx.provider.resolve_mac(port, ah.sgid_index, bytes(ah.gid))
        path |= {"rmac_47_32": int.from_bytes(mac[:2], "big"), "rmac_31_0": int.from_bytes(mac[2:], "big")}
        if _is_roce_v2(ctx, ah.sgid_index):
            device = ctx.query_device()
            path["udp_sport"] = random.randint(device.min_udp_sport, device.max_udp_sport)
            path["dscp"] = ah.traffic_class >> _DSCP_SHIFT
    return path


def path_update(ctx: Context, ah: AhAttr) -> tuple[Fields, OptParam]:
    """Return the part of the path that a connected queue pair can change: the source address and the DSCP."""
    path, opt = {"src_addr_index": ah.sgid_index}, OptParam.SGID_INDEX
    device = ctx.query_device()
    if device.rts2rts_qp_dscp and device.link_layer == LinkLayer.ETHERNET and _is_roce_v2(ctx, ah.sgid_index):
        path["dscp"] = ah.traffic_class >> _DSCP_SHIFT
        opt |= OptParam.DSCP
    return path, opt


def ah_of(path: Fields, link_layer: LinkLayer) -> AhAttr:
    """Convert a primary_address_path to an address handle."""
    gid = path["rgid_rip"]
    if link_layer == LinkLayer.ETHERNET:
        addr_type, traffic_class = ip_type(gid), path["dscp"] << _DSCP_SHIFT
    else:
        addr_type, traffic_class = AddrType.IB_GRH if path["grh"] else AddrType.IB_NO_GRH, path["tclass"]
    return AhAttr(
        gid=gid,
        addr_type=addr_type,
        dlid=path["rlid"],
        sl=path["sl"],
        sgid_index=path["src_addr_index"],
        static_rate=path["stat_rate"],
        hop_limit=path["hop_limit"],
        traffic_class=traffic_class,
        flow_label=path["flow_label"],
    )


def _is_roce_v2(ctx: Context, sgid_index: int) -> bool:
    mailbox = QUERY_ROCE_ADDRESS_IN.pack(opcode=Opcode.QUERY_ROCE_ADDRESS, roce_address_index=sgid_index)
    size = QUERY_ROCE_ADDRESS_OUT.size + ROCE_ADDR_LAYOUT.size
    with command("QUERY_ROCE_ADDRESS"):
        out = ctx.provider.general_cmd(bytes(mailbox), size)
    return ROCE_ADDR_LAYOUT.get(out, "roce_version", QUERY_ROCE_ADDRESS_OUT.offset("roce_address")) == ROCE_VERSION_2
