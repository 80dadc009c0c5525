"""The table of operations (formats/operations.py) for compiled code: the attributes of each opcode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ...formats.operations import Operation, Packet, column, packet_column
from ...formats.packet import SERVICE_SHIFT
from ...formats.wqe import EXTENDED_ATOMIC_8
from ...jit.compile import device_function


def _services(operation: Operation) -> int:
    return sum(1 << service for service in operation.services)


def _segments(operation: Operation, form: int) -> int:
    return 1 + len(operation.forms[form]) + (operation.data or 0)


def _upper_bits(packet: Packet) -> int:
    packets = packet.operation.packets
    return packets.only >> SERVICE_SHIFT if packets else 0


def _opcode(packet: Packet) -> int:
    return packet.operation.opcode


_Row = TypeVar("_Row", Operation, Packet)


class _Field(NamedTuple):
    """Some bits of a word."""

    shift: int
    mask: int


class _Words(Generic[_Row]):
    """One word per opcode with all attributes of its row, so compiled code needs one load for any of them."""

    def __init__(self, column: Callable[[Callable[[_Row], int]], np.ndarray]):
        self._column = column
        self.words = np.zeros(len(column(lambda row: 0)), np.int64)
        self._end = 0

    def field(self, bits: int, value: Callable[[_Row], int]) -> _Field:
        """Give a column the next bits."""
        values = self._column(value).astype(np.int64)
        if values.min() < 0 or values.max() >> bits or self._end + bits > 63:
            raise ValueError(f"values up to {values.max()} do not fit in {bits} bits from {self._end} on")
        self.words |= values << self._end
        self._end += bits
        return _Field(self._end - bits, (1 << bits) - 1)


_by_wqe = _Words(column)
_SERVICES  = _by_wqe.field(4, _services)
_LOCAL     = _by_wqe.field(1, lambda row: row.local)
_RETURNS   = _by_wqe.field(1, lambda row: row.returns)
_ATOMIC    = _by_wqe.field(1, lambda row: row.atomic)
_MASKED    = _by_wqe.field(1, lambda row: row.masked)
_SEGMENTS  = _by_wqe.field(4, lambda row: _segments(row, 0))
_WIDE      = _by_wqe.field(4, lambda row: _segments(row, -1))
_RIGHT     = _by_wqe.field(7, lambda row: row.right)
_RECEIVES  = _by_wqe.field(4, lambda row: row.receives or 0)
_FIRST     = _by_wqe.field(8, lambda row: row.packets.first if row.packets else 0)
_MIDDLE    = _by_wqe.field(8, lambda row: row.packets.middle if row.packets else 0)
_LAST      = _by_wqe.field(8, lambda row: row.packets.last if row.packets else 0)
_ONLY      = _by_wqe.field(8, lambda row: row.packets.only if row.packets else 0)
_WQES      = _by_wqe.words

_by_packet = _Words(packet_column)
_UPPER     = _by_packet.field(3, _upper_bits)
_CARRIED   = _by_packet.field(4, lambda packet: _services(packet.operation))
_OPERATION = _by_packet.field(7, _opcode)
_BEGINS    = _by_packet.field(1, lambda packet: packet.first)
_ENDS      = _by_packet.field(1, lambda packet: packet.last)
_WITH_IMM  = _by_packet.field(1, lambda packet: packet.imm)
_COMPLETES = _by_packet.field(4, lambda packet: packet.receives or 0)
_HEADERS   = _by_packet.field(7, lambda packet: sum(header.size for header in packet.headers))
_PACKETS   = _by_packet.words


# --- by the opcode of a WQE ------------------------------------------------------------------------------------------


@device_function
def is_offered(opcode: int, service: int) -> int:
    """Return whether a QP of this service type has the operation."""
    return _WQES[opcode] >> _SERVICES.shift + service & 1


@device_function
def is_local(opcode: int) -> int:
    """Return whether the operation concerns this NIC only."""
    return _WQES[opcode] >> _LOCAL.shift & _LOCAL.mask


@device_function
def returns_data(opcode: int) -> int:
    """Return whether a response completes the request, rather than an acknowledgement."""
    return _WQES[opcode] >> _RETURNS.shift & _RETURNS.mask


@device_function
def is_atomic(opcode: int) -> int:
    """Return whether the operation is an atomic, masked or plain."""
    return _WQES[opcode] >> _ATOMIC.shift & _ATOMIC.mask


@device_function
def is_masked(opcode: int) -> int:
    """Return whether the operation is a masked atomic, which mlx5 calls extended."""
    return _WQES[opcode] >> _MASKED.shift & _MASKED.mask


@device_function
def segments_of(opcode: int, opmod: int) -> int:
    """Return how many segments come before the data: the control segment and the operation's.

    Those of a local operation include its data segments.
    """
    field = _WIDE if opmod == EXTENDED_ATOMIC_8 else _SEGMENTS
    return _WQES[opcode] >> field.shift & field.mask


@device_function
def right_of(opcode: int) -> int:
    """Return the remote right that the operation needs, or 0 if it names no memory of the peer."""
    return _WQES[opcode] >> _RIGHT.shift & _RIGHT.mask


@device_function
def receive_cqe(opcode: int) -> int:
    """Return the opcode of the CQE with which the operation completes a receive, or 0 if it completes none."""
    return _WQES[opcode] >> _RECEIVES.shift & _RECEIVES.mask


@device_function
def packet_opcode_of(opcode: int, first: int, last: int) -> int:
    """Return the packet opcode for a place in the operation's message, with the upper bits that it has for RC."""
    if first:
        return (_WQES[opcode] >> _ONLY.shift & _ONLY.mask) if last else (_WQES[opcode] >> _FIRST.shift & _FIRST.mask)
    return (_WQES[opcode] >> _LAST.shift & _LAST.mask) if last else (_WQES[opcode] >> _MIDDLE.shift & _MIDDLE.mask)


# --- by the opcode of a packet, its lower five bits ------------------------------------------------------------------


@device_function
def service_bits(packet: int) -> int:
    """Return the upper three bits of the opcode if the packet is of RC."""
    return _PACKETS[packet] >> _UPPER.shift & _UPPER.mask


@device_function
def is_request(packet: int, service: int) -> int:
    """Return whether the packet is a request that a QP of this service type has."""
    return _PACKETS[packet] >> _CARRIED.shift + service & 1


@device_function
def wqe_opcode_of(packet: int) -> int:
    """Return the WQE opcode, without immediate data, of a request packet's operation; NOP for other packets."""
    return _PACKETS[packet] >> _OPERATION.shift & _OPERATION.mask


@device_function
def is_first(packet: int) -> int:
    """Return whether the packet is the first of its message."""
    return _PACKETS[packet] >> _BEGINS.shift & _BEGINS.mask


@device_function
def is_last(packet: int) -> int:
    """Return whether the packet is the last of its message."""
    return _PACKETS[packet] >> _ENDS.shift & _ENDS.mask


@device_function
def has_imm(packet: int) -> int:
    """Return whether the packet has immediate data."""
    return _PACKETS[packet] >> _WITH_IMM.shift & _WITH_IMM.mask


@device_function
def receive_cqe_of(packet: int) -> int:
    """Return the opcode of the CQE with which the packet completes a receive, or 0 if it completes none."""
    return _PACKETS[packet] >> _COMPLETES.shift & _COMPLETES.mask


@device_function
def header_bytes(packet: int) -> int:
    """Return the bytes of extended transport headers between the BTH and the payload."""
    return _PACKETS[packet] >> _HEADERS.shift & _HEADERS.mask
