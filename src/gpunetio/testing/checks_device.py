"""The attributes of a device and its ports."""

from __future__ import annotations

from ..enums import PortState, QpType
from ..errors import InvalidValueError
from .kit import check
from .rig import Rig, refused, same, true

_MTUS = (256, 512, 1024, 2048, 4096)
_POSITIVE = (
    "phys_port_cnt", "node_guid", "max_mr_size", "max_qp", "max_qp_wr", "max_sge", "max_cq", "max_cqe", "max_mr",
    "max_pd", "max_qp_rd_atom", "max_qp_init_rd_atom", "max_pkeys", "gid_table_size", "max_wqe_sz_sq", "max_wqe_sz_rq",
)


@check
def device_attributes(rig: Rig) -> None:
    """Limits are above 0, RC is supported, and every context of a device reports the same attributes.

    Source: ibv_query_device(3); doca_verbs_query_device.
    """
    device = rig.near.query_device()
    for name in _POSITIVE:
        true(f"{name} = {getattr(device, name)} is above 0", getattr(device, name) > 0)
    true("RC queue pairs are supported", device.is_qp_type_supported(QpType.RC))
    true("UDP source ports are in order", device.min_udp_sport <= device.max_udp_sport)
    same("the device, asked by another context,", rig.another().query_device(), device)


@check
def port_attributes(rig: Rig) -> None:
    """Each port has a state, valid MTUs, an active MTU not above the largest, and at least one GID.

    Source: IBTA 11.2.1 (Query HCA); ibv_query_port(3).
    """
    device = rig.near.query_device()
    for number in range(1, device.phys_port_cnt + 1):
        port = rig.near.query_port(number)
        true(f"state {port.state!r} of port {number} is one of ibv_port_state", isinstance(port.state, PortState))
        for mtu in (port.active_mtu, port.max_mtu):
            true(f"MTU {mtu} of port {number} is one of {_MTUS}", mtu in _MTUS)
        true(f"active MTU {port.active_mtu} is at most {port.max_mtu}", port.active_mtu <= port.max_mtu)
        true(f"port {number} has GIDs", port.gid_tbl_len > 0)
    same("link layer of port 1", rig.near.query_port(1).link_layer, device.link_layer)
    for number in (0, device.phys_port_cnt + 1):
        refused(f"port {number}", InvalidValueError, lambda number=number: rig.near.query_port(number))


@check
def gid_table(rig: Rig) -> None:
    """A GID has 16 bytes, the table is not empty, and an index outside the table is refused.

    Source: IBTA 4.1.1; ibv_query_gid(3).
    """
    size = rig.near.query_device().gid_table_size
    gids = [rig.near.query_gid(1, index) for index in range(size)]
    same("lengths of GIDs", {len(gid) for gid in gids}, {16})
    used = [bytes(gid) for gid in gids if any(gid)]
    true("port 1 has a GID that is not zero", used)
    for index in (-1, size):
        refused(f"GID {index} of {size}", InvalidValueError, lambda index=index: rig.near.query_gid(1, index))


@check
def ports_are_active(rig: Rig) -> None:
    """The ports that the checks use are active; without that, most of the later checks cannot pass.

    Source: ibv_query_port(3).
    """
    for ctx in (rig.near, rig.far):
        same(f"state of port 1 of {ctx}", ctx.query_port(1).state, PortState.ACTIVE)
