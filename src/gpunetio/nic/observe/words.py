"""Format the rows of a NIC's tables: columns and cells for people, documents for JSON."""

from __future__ import annotations

import functools
from ipaddress import IPv6Address

import numpy as np

from ...enums import Access, UarAllocationType
from ...formats.commands import QpState, ResponsesToCqe, ScatterToCqe, ServiceType
from ...formats.ethernet_queues import QueueState
from .kinds import KINDS
from .running import Observed, number_in

DEFAULT_COLUMNS = 5  # number of columns shown by default: with device and process, they fit 80 characters
# Heading and field of each column, the most important first. Fields that a table lacks are left out. Object types that
# are missing here show all fields.
_COLUMNS = {
    "qp": (
        ("qpn", "qpn"), ("state", "state"), ("type", "service"), ("type", "type"), ("peer", "peer_high"),
        ("remote qpn", "remote_qpn"), ("sq producer", "sq_pi"), ("sq consumer", "sq_ci"), ("unacked psn", "una_psn"),
        ("next psn", "tx_psn"), ("rq consumer", "rq_ci"), ("send cq", "send_cq"), ("recv cq", "recv_cq"), ("pd", "pdn"),
        ("wire", "wire"), ("mtu", "mtu"),
    ),
    "cq": (("cqn", "cqn"), ("entries", "log"), ("producer", "pi"), ("eq", "eqn"), ("error", "error")),
    "srq": (
        ("srqn", "srqn"), ("entries", "log"), ("linked", "linked"), ("taken", "taken"), ("limit", "limit"),
        ("pd", "pdn"),
    ),
    "mr": (
        ("key", "key"), ("iova", "iova"), ("length", "nbytes"), ("pd", "pdn"), ("rights", "access"),
        ("address", "addr"),
    ),
    "sq": (
        ("sqn", "qpn"), ("state", "state"), ("producer", "sq_pi"), ("consumer", "sq_ci"), ("frames", "frames"),
        ("bytes", "frame_bytes"), ("cq", "send_cq"), ("pd", "pdn"),
    ),
    "rq": (
        ("rqn", "rqn"), ("state", "state"), ("consumed", "consumed"), ("frames", "frames"), ("no buffer", "no_buffer"),
        ("too long", "too_long"), ("not ready", "not_ready"), ("bytes", "frame_bytes"), ("cq", "cq"), ("pd", "pdn"),
    ),
    "gid": (("index", "index"), ("gid", "gid"), ("version", "version"), ("mac", "mac")),
}
WIRE_KINDS = {0: "gone", 1: "memory", 2: "udp", 3: "ethernet"}  # nic/transport/wire_kinds.py
QUEUE_KINDS = {1: "CONNECTED_SEND", 2: "DATAGRAM_SEND", 3: "ETHERNET_SEND"}  # nic/state/work_queue.py
PSN_MASK = 0xFF_FFFF
_HEX = {
    "qpn", "cqn", "srqn", "rqn", "srq", "cq", "send_cq", "recv_cq", "returned", "channel", "error_channel", "rx_wqe",
    "key", "remote_qpn", "iova", "address", "addr", "sq_addr", "rq_addr", "dbrec", "doorbell", "delta",
    "remote_row", "wire", "user_index", "peer_high", "peer_low", "flights", "resources", "rx_addr", "rx_key",
}


def number_of(nic: Observed, kind: str, row: np.void) -> int:
    """Return the row's own number."""
    return int(row[nic.tables.number_field(KINDS[kind])])


def columns(kind: str, nic: Observed) -> list[tuple[str, str]]:
    """Return heading and field of each column for a type of object."""
    names = nic.tables[KINDS[kind]].dtype.names or ()
    found = [(heading, field) for heading, field in _COLUMNS.get(kind, ((n, n) for n in names)) if field in names]
    if kind == "mr" and "addr" not in names and "delta" in names:
        found.append(("address", "address"))
    if kind == "qp" and not any(heading == "type" for heading, _ in found):
        found.insert(2, ("type", ""))
    return found


def is_right_aligned(heading: str) -> bool:
    """Return whether a column contains numbers, which are aligned right."""
    return heading not in _LEFT


def cells(kind: str, nic: Observed, row: np.void, fields: list[tuple[str, str]]) -> list[str]:
    """Return the text of each column for an object."""
    return [_cell(kind, field, nic, row) for _, field in fields]


_LEFT = {"state", "type", "wire", "peer", "rights", "gid", "version", "mac"}


def _cell(kind: str, field: str, nic: Observed, row: np.void) -> str:
    if field == "":
        return "RC"  # a table without a type field contains only RC queue pairs
    if (kind, field) == ("cq", "log"):
        log = number_in(row, field)
        return str(1 << log) if 0 <= log < 64 else f"2^{log}"  # an invalid value: no ring is that large
    if (kind, field) == ("mr", "address"):
        from ..memory.streams import DEVICE_ADDRESS  # imports the compiler, which nothing else here needs

        address = number_in(row, "iova") + number_in(row, "delta")
        return f"{_unsigned(address) & DEVICE_ADDRESS:#x}"  # without the number of the DMA stream
    if (kind, field) == ("qp", "peer_high"):
        return _peer(row)
    if (kind, field) in (("qp", "una_psn"), ("qp", "tx_psn")):
        return str(number_in(row, field) & PSN_MASK)  # 24 bits, as in packets; the NIC's own counter is wider
    return _text(kind, field, nic, row)


def _peer(row: np.void) -> str:
    """Return the peer's GID, or its LID if the path has no GID."""
    gid = b"".join(_unsigned(number_in(row, half)).to_bytes(8, "little") for half in ("peer_high", "peer_low"))
    if any(gid):
        return _bytes("gid", gid)
    lid = number_in(row, "dlid")
    return f"LID {lid:#x}" if lid else ""


def details(kind: str, nic: Observed, row: np.void) -> str:
    """Return all fields of an object, one per line."""
    lines = [f"{kind} of {nic.name}, process {nic.pid}"]
    lines += [f"    {field + ':':<16} {_text(kind, field, nic, row)}" for field in row.dtype.names or ()]
    return "".join(f"{line}\n" for line in lines)


def _text(kind: str, field: str, nic: Observed, row: np.void) -> str:
    """Return one field as text."""
    value = _value_of(kind, field, nic, row)
    if isinstance(value, int):
        return f"{_unsigned(value):#x}" if field in _HEX else str(value)
    return value if isinstance(value, str) else (" | " if field in _RIGHTS else " ").join(map(str, value))


def _value_of(kind: str, field: str, nic: Observed, row: np.void) -> str | int | list[str] | list[int]:
    """Return the value of a field: the name that its number stands for, or the number."""
    cell = row[field]
    if row.dtype[field].kind == "V":
        return _bytes(field, bytes(cell))
    if row.dtype[field].shape:
        return cell.tolist()
    value = int(cell)
    if names := _names().get((kind, field)):
        return names.get(value, value)
    if field in _RIGHTS and kind in ("mr", "umem", *_SENDING):
        return [right.name or "" for right in Access if value & right] or ["LOCAL_READ"]
    if field == "wire" and kind in _SENDING:
        return _wire(nic, value)
    if (kind, field) in _ROWS:
        return nic.tables.number_at(_ROWS[kind, field], value) or value  # `value` is a row's address, or a number
    return value


_RIGHTS = ("access", "rights")
_SENDING = "qp", "sq"  # an SQ row has the fields of a QP row, and uses some of them
_ROWS = {
    ("qp", "send_cq"): "cqs", ("qp", "recv_cq"): "cqs", ("qp", "srq"): "srqs", ("sq", "send_cq"): "cqs",
    ("rq", "cq"): "cqs", ("rq", "srq"): "srqs",
}


@functools.cache
def _names() -> dict[tuple[str, str], dict[int, str]]:
    """Return, by object type and field, the names that numbers stand for."""
    fields = {
        ("qp", "state"): QpState, ("qp", "service"): ServiceType, ("qp", "cs_res"): ScatterToCqe,
        ("qp", "cs_req"): ResponsesToCqe, ("sq", "service"): ServiceType, ("sq", "cs_res"): ScatterToCqe,
        ("sq", "cs_req"): ResponsesToCqe, ("rq", "state"): QueueState, ("uar", "kind"): UarAllocationType,
    }
    return {field: {member.value: member.name for member in kind} for field, kind in fields.items()} | {
        ("gid", "version"): {1: "RoCE v1", 2: "RoCE v2"}, ("qp", "kind"): QUEUE_KINDS, ("sq", "kind"): QUEUE_KINDS,
        ("sq", "state"): {QpState.RST: "RST", QpState.RTS: "RDY", QpState.ERR: "ERR"},
    }


def _wire(nic: Observed, address: int) -> str:
    """Return the type of a queue pair's wire; "none" without a peer, or with a peer on the same NIC."""
    if address == 0 or "wires" not in nic.tables:
        return f"{_unsigned(address):#x}" if address else "none"
    kind = nic.tables.number_at("wires", address)
    return WIRE_KINDS.get(kind, f"kind {kind}")


def _bytes(field: str, value: bytes) -> str:
    if field == "gid" and len(value) == 16:
        address = IPv6Address(value)
        return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else address.compressed
    if field == "mac":
        return value[:6].hex(":")
    return value.hex()


def _unsigned(value: int) -> int:
    return value & (1 << 64) - 1


def document(kind: str, nic: Observed, row: np.void) -> dict[str, object]:
    """Return what --json prints for an object: all fields, and a queue pair's peer as text."""
    fields: dict[str, object] = {name: _value_of(kind, name, nic, row) for name in row.dtype.names or ()}
    if "peer_high" in fields:
        fields["peer"] = _peer(row)
    return {"device": nic.name, "pid": nic.pid, **fields}
