"""Convert commands that move a queue pair between states to attributes of the DOCA SDK."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...enums import AddrType, LinkLayer, QpAttrMask, QpState, QpType
from ...formats import commands as cmd
from ...formats.commands import Opcode, OptParam, PrmMtu
from ...formats.contexts import QPC
from ...formats.layout import Fields
from ...formats.packet import IPV4_MAPPED
from .libraries import not_in_sdk_mode
from .signatures import Gid

_M = QpAttrMask
_PATH = "primary_address_path"
_TRANSITION_IN = cmd.RST2INIT_QP_IN  # opt_param_mask and QPC have the same offsets in all transitions
_DSCP_SHIFT = 2  # a traffic class is 6 bits of DSCP, then 2 of ECN

STATE_AFTER = {
    Opcode.RST2INIT_QP: QpState.INIT, Opcode.INIT2INIT_QP: QpState.INIT, Opcode.INIT2RTR_QP: QpState.RTR,
    Opcode.RTR2RTS_QP: QpState.RTS, Opcode.RTS2RTS_QP: QpState.RTS, Opcode.QP_2ERR: QpState.ERR,
    Opcode.QP_2RST: QpState.RST,
}
STATE_IN_QPC = {
    QpState.RST: cmd.QpState.RST, QpState.INIT: cmd.QpState.INIT, QpState.RTR: cmd.QpState.RTR,
    QpState.RTS: cmd.QpState.RTS, QpState.ERR: cmd.QpState.ERR,
}
# The attributes that a transition always carries, and those selected by opt_param_mask. RST2INIT has no such mask.
_CARRIED = {
    Opcode.RST2INIT_QP:
        _M.PKEY_INDEX | _M.PORT_NUM | _M.ALLOW_REMOTE_WRITE | _M.ALLOW_REMOTE_READ | _M.ATOMIC_MODE,
    Opcode.INIT2RTR_QP:
        _M.RQ_PSN | _M.DEST_QP_NUM | _M.PATH_MTU | _M.AH_ATTR | _M.MIN_RNR_TIMER | _M.MAX_DEST_RD_ATOMIC,
    Opcode.RTR2RTS_QP:
        _M.SQ_PSN | _M.ACK_TIMEOUT | _M.RETRY_CNT | _M.RNR_RETRY | _M.MAX_QP_RD_ATOMIC,
}
_OPTIONAL = {
    OptParam.RRE: _M.ALLOW_REMOTE_READ, OptParam.RWE: _M.ALLOW_REMOTE_WRITE, OptParam.RAE: _M.ATOMIC_MODE,
    OptParam.PKEY_INDEX: _M.PKEY_INDEX, OptParam.PORT_NUM: _M.PORT_NUM, OptParam.MIN_RNR_NAK: _M.MIN_RNR_TIMER,
    OptParam.SGID_INDEX: _M.AH_ATTR,
}
_NOT_OF_UC = (
    _M.MIN_RNR_TIMER | _M.ACK_TIMEOUT | _M.RETRY_CNT | _M.RNR_RETRY | _M.MAX_QP_RD_ATOMIC | _M.MAX_DEST_RD_ATOMIC
    | _M.ATOMIC_MODE
)


@dataclass(frozen=True)
class _Attribute:
    """An attribute of the SDK, and where it comes from: `field` of the QPC, or `path.field`."""

    mask: QpAttrMask
    name: str
    field: str
    decode: Callable[[int], int] = int


def _power(log: int) -> int:
    return 1 << log


def _mtu(code: int) -> int:
    """Convert the PRM's MTU code to `enum doca_verbs_mtu_size`, which counts from 0."""
    return code - PrmMtu.MTU_256


_ATTRIBUTES = (
    _Attribute(_M.PKEY_INDEX,         "pkey_index",         f"{_PATH}.pkey_index"),
    _Attribute(_M.PORT_NUM,           "port_num",           f"{_PATH}.vhca_port_num"),
    _Attribute(_M.ALLOW_REMOTE_WRITE, "allow_remote_write", "rwe"),
    _Attribute(_M.ALLOW_REMOTE_READ,  "allow_remote_read",  "rre"),
    _Attribute(_M.ATOMIC_MODE,        "atomic_mode",        "atomic_mode"),
    _Attribute(_M.MIN_RNR_TIMER,      "min_rnr_timer",      "min_rnr_nak"),
    _Attribute(_M.RQ_PSN,             "rq_psn",             "next_rcv_psn"),
    _Attribute(_M.SQ_PSN,             "sq_psn",             "next_send_psn"),
    _Attribute(_M.DEST_QP_NUM,        "dest_qp_num",        "remote_qpn"),
    _Attribute(_M.PATH_MTU,           "path_mtu",           "mtu",                    _mtu),
    _Attribute(_M.ACK_TIMEOUT,        "ack_timeout",        f"{_PATH}.ack_timeout"),
    _Attribute(_M.RETRY_CNT,          "retry_cnt",          "retry_count"),
    _Attribute(_M.RNR_RETRY,          "rnr_retry",          "rnr_retry"),
    _Attribute(_M.MAX_QP_RD_ATOMIC,   "max_rd_atomic",      "log_sra_max",            _power),
    _Attribute(_M.MAX_DEST_RD_ATOMIC, "max_dest_rd_atomic", "log_rra_max",            _power),
)
# Fields of the address handle. On a connected queue pair, only the first two can change.
_NEW_ADDRESS = ("src_addr_index", "dscp")
_ADDRESS = (*_NEW_ADDRESS, "rgid_rip", "rlid", "sl", "stat_rate", "hop_limit", "tclass", "grh", "flow_label")


def carried(mailbox: bytes, qp_type: int) -> QpAttrMask:
    """Return the attributes that a transition carries, except the states."""
    opcode = Opcode(int.from_bytes(mailbox[:2], "big"))
    if opcode in (Opcode.QP_2ERR, Opcode.QP_2RST):
        return _M(0)
    mask, given = _CARRIED.get(opcode, _M(0)), _TRANSITION_IN.get(mailbox, "opt_param_mask")
    for opt, attribute in _OPTIONAL.items():
        if given & opt:
            mask |= attribute
    return mask & ~_NOT_OF_UC if qp_type == QpType.UC else mask


def take_over(qpc: bytearray, mailbox: bytes, mask: QpAttrMask) -> None:
    """Copy the attributes that a transition carries into a QPC."""
    opcode, base = int.from_bytes(mailbox[:2], "big"), _TRANSITION_IN.offset("qpc")
    names = [attribute.field for attribute in _ATTRIBUTES if attribute.mask in mask]
    if _M.ATOMIC_MODE in mask:
        names.append("rae")
    if _M.AH_ATTR in mask:
        names += [f"{_PATH}.{name}" for name in (_ADDRESS if opcode == Opcode.INIT2RTR_QP else _NEW_ADDRESS)]
    for name in names:
        path, _, inner = name.rpartition(".")
        value = QPC.get(mailbox, name, base)
        QPC.update(qpc, **({path: {inner: value}} if path else {name: value}))


def attributes(qpc: bytes | bytearray, mask: QpAttrMask) -> dict[str, int]:
    """Return the values for `doca_verbs_qp_attr`, except the address handle."""
    return {
        attribute.name: attribute.decode(QPC.get(qpc, attribute.field))
        for attribute in _ATTRIBUTES
        if attribute.mask in mask
    }


def address(qpc: bytes | bytearray, link_layer: LinkLayer) -> Fields:
    """Return the values for `doca_verbs_ah_attr`. NotSupportedError for a flow label."""
    path = QPC.get(qpc, _PATH)
    if path["flow_label"]:
        raise not_in_sdk_mode(f"flow_label = {path['flow_label']:#x}", "as doca_verbs_ah_attr has no flow label")
    gid = path["rgid_rip"]
    if link_layer == LinkLayer.ETHERNET:
        kind = AddrType.IPv4 if gid.startswith(IPV4_MAPPED) else AddrType.IPv6
        traffic_class = path["dscp"] << _DSCP_SHIFT
    else:
        kind, traffic_class = AddrType.IB_GRH if path["grh"] else AddrType.IB_NO_GRH, path["tclass"]
    return {
        "gid": Gid.from_buffer_copy(gid), "addr_type": kind, "dlid": path["rlid"], "sl": path["sl"],
        "sgid_index": path["src_addr_index"], "static_rate": path["stat_rate"], "hop_limit": path["hop_limit"],
        "traffic_class": traffic_class,
    }
