"""The identity, limits and capabilities of a device, gathered from its attributes and capability pages."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..enums import LinkLayer, QpType
from ..errors import UnexpectedError
from ..formats.commands import PORT_TYPE_ETH, QUERY_HCA_CAP_IN, QUERY_HCA_CAP_OUT, CapClass, Opcode
from ..formats.contexts import CMD_HCA_CAP, CMD_HCA_CAP_2, ROCE_CAP
from ..formats.layout import BitStruct, Fields
from ..formats.wqe import ATOMIC_SEG, CTRL_SEG, DATA_SEG, MAX_MMO, RADDR_SEG
from ..providers.provider import DeviceAttr, Provider
from .commands import command

_ROCE_V2 = 1 << 2  # PRM, roce_cap.roce_version: one bit per version
_UDP_SPORTS = 0xC000, 0xFFFF  # IBTA annex A17
_CURRENT = 1  # op_mod bit 0 of QUERY_HCA_CAP: the capabilities enabled now, not the maximum


@dataclass(frozen=True, kw_only=True)
class DeviceAttributes(DeviceAttr):
    """Identity, limits and capabilities of a device (`doca_verbs_device_attr`; its fields are the getters).

    Sizes are in bytes, and `log_*` are powers of two. `hca_core_clock` is the frequency of timestamps in kHz, or 0
    without timestamps. `min_udp_sport` to `max_udp_sport` are the RoCE v2 source ports. A MEMCPY copies at most
    `max_wr_memcpy_length` bytes; 0 means that the device has no MEMCPY.
    """

    link_layer: LinkLayer
    gid_table_size: int
    rc: bool
    uc: bool
    ud: bool
    log_max_qp_sz: int
    log_max_cq_sz: int
    max_wqe_sz_sq: int
    max_wqe_sz_rq: int
    rts2rts_qp_dscp: bool
    send_dbr_mode_no_dbr_ext: bool
    is_cqe_inline_supported: bool
    roce_version: int
    min_udp_sport: int
    max_udp_sport: int
    hca_core_clock: int
    can_modify_udp_sport: bool
    max_wr_memcpy_length: int = 0

    def is_qp_type_supported(self, qp_type: QpType) -> bool:
        """Return whether the device has this type (`doca_verbs_device_attr_get_is_qp_type_supported`)."""
        return {QpType.RC: self.rc, QpType.UC: self.uc, QpType.UD: self.ud, QpType.GSI: self.ud}.get(qp_type, False)


def query_device(provider: Provider) -> DeviceAttributes:
    """Query all attributes of a device (`doca_verbs_query_device`)."""
    return _by_libibverbs(provider) if provider.plain else _by_mailboxes(provider)


def _by_libibverbs(provider: Provider) -> DeviceAttributes:
    """Return the attributes that libibverbs reports.

    The others have the specifications' values, and every optional feature is absent.
    """
    known, port = provider.query_device(), provider.query_port(1)
    ethernet = port.link_layer == LinkLayer.ETHERNET
    return DeviceAttributes(
        **_fields_of(known),
        link_layer=port.link_layer,
        gid_table_size=port.gid_tbl_len,
        rc=True,
        uc=True,  # devices with RC usually have it; if not, creating a UC queue pair fails
        ud=True,
        log_max_qp_sz=known.max_qp_wr.bit_length() - 1,
        log_max_cq_sz=known.max_cqe.bit_length() - 1,
        max_wqe_sz_sq=CTRL_SEG.size + RADDR_SEG.size + ATOMIC_SEG.size + DATA_SEG.size * known.max_sge,
        max_wqe_sz_rq=DATA_SEG.size * known.max_sge,
        rts2rts_qp_dscp=False,
        send_dbr_mode_no_dbr_ext=False,
        is_cqe_inline_supported=False,
        roce_version=_ROCE_V2 if ethernet else 0,
        min_udp_sport=_UDP_SPORTS[0],
        max_udp_sport=_UDP_SPORTS[1],
        hca_core_clock=0,
        can_modify_udp_sport=False,
    )


def _fields_of(known: DeviceAttr) -> Fields:
    return {field.name: getattr(known, field.name) for field in fields(DeviceAttr)}


def _by_mailboxes(provider: Provider) -> DeviceAttributes:
    general = query_cap(provider, CapClass.GENERAL, CMD_HCA_CAP)
    roce = query_cap(provider, CapClass.ROCE, ROCE_CAP)
    more = query_cap(provider, CapClass.GENERAL_2, CMD_HCA_CAP_2) if general["hca_cap_2"] else {}
    ethernet = general["port_type"] == PORT_TYPE_ETH
    known = provider.query_device()
    return DeviceAttributes(
        **_fields_of(known),
        link_layer=LinkLayer.ETHERNET if ethernet else LinkLayer.INFINIBAND,
        gid_table_size=roce["roce_address_table_size"] if ethernet else _ib_gids(general["gid_table_size"]),
        rc=bool(general["rc"]),
        uc=bool(general["uc"]),
        ud=bool(general["ud"]),
        log_max_qp_sz=general["log_max_qp_sz"],
        log_max_cq_sz=general["log_max_cq_sz"],
        max_wqe_sz_sq=general["max_wqe_sz_sq"],
        max_wqe_sz_rq=general["max_wqe_sz_rq"],
        rts2rts_qp_dscp=bool(general["rts2rts_qp_dscp"]),
        send_dbr_mode_no_dbr_ext=bool(more.get("send_dbr_mode_no_dbr_ext", 0)),
        is_cqe_inline_supported=bool(general["sctr_data_cqe"]),
        roce_version=roce["roce_version"],
        min_udp_sport=roce["r_roce_min_src_udp_port"],
        max_udp_sport=roce["r_roce_max_src_udp_port"],
        hca_core_clock=general["device_frequency_khz"],
        can_modify_udp_sport=bool(general["rts2rts_qp_udp_sport"]),
        max_wr_memcpy_length=_longest_memcpy(general),
    )


def _longest_memcpy(general: Fields) -> int:
    if not (general["dma_mmo_qp"] and general["qpc_extension"]):
        return 0
    return min(1 << general["log_dma_mmo_max_size"], MAX_MMO)


def query_cap(provider: Provider, cap: CapClass, layout: BitStruct) -> Fields:
    """Query a capability page, with the values enabled now."""
    mailbox = QUERY_HCA_CAP_IN.pack(opcode=Opcode.QUERY_HCA_CAP, op_mod=cap << 1 | _CURRENT)
    with command(f"QUERY_HCA_CAP {cap.name}"):
        out = provider.general_cmd(bytes(mailbox), QUERY_HCA_CAP_OUT.size)
    return layout.unpack(out, QUERY_HCA_CAP_OUT.offset("capability"))


def _ib_gids(code: int) -> int:
    """Decode an InfiniBand port's gid_table_size into a number of entries."""
    if code > 4:
        raise UnexpectedError(f"the device reports gid_table_size code {code}: only 0 to 4 are defined")
    return 8 << code
