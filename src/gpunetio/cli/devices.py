"""`gpunetio devices`: describe NICs as ibv_devinfo does."""

from __future__ import annotations

import dataclasses
import json
from ipaddress import IPv6Address
from typing import TYPE_CHECKING

import click

from ..enums import GidType
from .failures import guarded

if TYPE_CHECKING:
    from ..nic.observe.running import Observed
    from ..verbs import Context

_GID_TYPES = {GidType.IB: "", GidType.ROCE_V1: ", RoCE v1", GidType.ROCE_V2: ", RoCE v2"}
_ROCE_VERSIONS = {1 << 0: "RoCE v1", 1 << 2: "RoCE v2"}  # PRM, roce_cap.roce_version
_LIMITS = (
    "max_qp", "max_qp_wr", "max_sge", "max_cq", "max_cqe", "max_mr", "max_pd", "max_qp_rd_atom", "max_qp_init_rd_atom",
    "max_ah", "max_srq", "max_srq_wr", "max_srq_sge", "max_pkeys",
)


@click.command()
@click.option("-d", "--device", "--ib-dev", "wanted", metavar="NIC", help="Show only this device.")
@click.option("-l", "--list", "names_only", is_flag=True, help="Print only the names.")
@click.option("-v", "--verbose", is_flag=True, help="Also print limits, GIDs and live counters.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with limits and GIDs.")
@guarded
def devices(wanted: str | None, names_only: bool, verbose: bool, as_json: bool) -> None:
    """Describe the NICs as ibv_devinfo does."""
    from ..providers import device_list, no_hardware, no_software
    from ..verbs import open as open_device

    if not wanted and (why := no_hardware()):
        without = no_software()
        click.echo(f"no devices: {why}; {without}" if without else f"only software NICs: {why}", err=True)
    listed = {info.name: info for info in device_list()}
    if names_only:
        names = [dataclasses.asdict(info) for info in listed.values()]
        click.echo(json.dumps(names, indent=2) if as_json else "\n".join(listed))
        return
    live: list[Observed] = []
    if verbose and not as_json and any(info.provider == "soft" for info in listed.values()):
        from ..nic.observe.running import running

        live = running()  # of all names at once, because some may not answer
    documents = []
    for name in [wanted] if wanted else listed:
        with open_device(name) as ctx:
            if as_json:
                documents.append({**dataclasses.asdict(listed[name]), **_document(ctx)})
                continue
            click.echo(_describe(ctx, verbose))
        _live_counters([nic for nic in live if nic.name == name])
    if as_json:
        click.echo(json.dumps(documents, indent=2))


def _document(ctx: Context) -> dict[str, object]:
    """Return the document that --json prints for a device: its attributes, and its ports with their GIDs."""
    device = ctx.query_device()
    attributes = dataclasses.asdict(device) | {
        "node_guid": _guid(device.node_guid),
        "sys_image_guid": _guid(device.sys_image_guid),
        "link_layer": device.link_layer.name,
        "roce_version": [name for bit, name in _ROCE_VERSIONS.items() if device.roce_version & bit],
    }
    return {**attributes, "ports": [_port_document(ctx, port) for port in range(1, device.phys_port_cnt + 1)]}


def _port_document(ctx: Context, port: int) -> dict[str, object]:
    attr = ctx.query_port(port)
    gids = ((index, ctx.query_gid(port, index)) for index in range(attr.gid_tbl_len))
    return {
        "port": port,
        **dataclasses.asdict(attr),
        "state": attr.state.name,
        "link_layer": attr.link_layer.name,
        "gids": [
            {"index": index, "gid": _gid(gid), "type": ctx.gid_type(port, index).name}
            for index, gid in gids
            if any(gid)
        ],
    }


def _describe(ctx: Context, verbose: bool) -> str:
    device = ctx.query_device()
    lines = [
        f"hca_id:\t{ctx.name}",
        _field("transport", "InfiniBand (0)"),  # as for any RDMA card: IBV_TRANSPORT_IB, on any link
        _field("fw_ver", device.fw_ver),
        _field("node_guid", _guid(device.node_guid)),
        _field("sys_image_guid", _guid(device.sys_image_guid)),
        _field("vendor_id", f"{device.vendor_id:#06x}"),
        _field("vendor_part_id", device.vendor_part_id),
        _field("hw_ver", f"{device.hw_ver:#x}"),
        *([_field("board_id", device.board_id)] if device.board_id else []),
        _field("phys_port_cnt", device.phys_port_cnt),
    ]
    if verbose:
        lines.append(_field("max_mr_size", f"{device.max_mr_size:#x}"))
        lines += [_field(name, getattr(device, name)) for name in _LIMITS]
    for port in range(1, device.phys_port_cnt + 1):
        lines += _port(ctx, port, verbose)
    return "\n".join(lines) + "\n"


def _live_counters(nics: list[Observed]) -> None:
    """Print the counters of NICs that run in other processes."""
    for nic in nics:
        with nic:
            counters = [_field(counter, value, 3) for counter, value in nic.counters.items() if value]
        lines = [f"\t\tcounters of {nic.name} in process {nic.pid}:", *(counters or ["\t\t\t(all are 0)"])]
        click.echo("\n".join(lines) + "\n")


def _port(ctx: Context, port: int, verbose: bool) -> list[str]:
    attr = ctx.query_port(port)
    lines = [
        f"\t\tport:\t{port}",
        _field("state", f"PORT_{attr.state.name} ({attr.state})", 3),
        _field("max_mtu", _mtu(attr.max_mtu), 3),
        _field("active_mtu", _mtu(attr.active_mtu), 3),
        _field("sm_lid", attr.sm_lid, 3),
        _field("port_lid", attr.lid, 3),
        _field("port_lmc", f"{attr.lmc:#04x}", 3),
        _field("link_layer", "InfiniBand" if attr.link_layer.name == "INFINIBAND" else "Ethernet", 3),
    ]
    if verbose:
        gids = ((index, ctx.query_gid(port, index)) for index in range(attr.gid_tbl_len))
        lines += [
            _field(f"GID[{index:3}]", _gid(gid) + _GID_TYPES[ctx.gid_type(port, index)], 3)
            for index, gid in gids
            if any(gid)
        ]
    return lines


def _field(name: str, value: object, indent: int = 1) -> str:
    """Return `name:` and its value with tabs as ibv_devinfo prints them."""
    label = f"{name}:"
    return "\t" * indent + label + "\t" * max(1, (5 - indent) - len(label) // 8) + str(value)


def _guid(guid: int) -> str:
    return guid.to_bytes(8, "big").hex(":", 2)


def _mtu(nbytes: int) -> str:
    """Return the bytes, and the code of enum ibv_mtu."""
    return f"{nbytes} ({nbytes.bit_length() - 8})"


def _gid(gid: bytes) -> str:
    address = IPv6Address(gid)
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else address.compressed
