"""The table of operations in compiled code: what the row of an opcode says (formats/operations.py)."""

from __future__ import annotations

import numpy as np

from ...formats.operations import Operation, Packet, column, packet_column
from ...formats.wqe import EXTENDED_ATOMIC_8
from ...jit.compile import device_function


def _services(operation: Operation) -> int:
    return sum(1 << service for service in operation.services)


def _segments(operation: Operation, form: int) -> int:
    return 1 + len(operation.forms[form]) + (operation.data or 0)


def _opcode(packet: Packet) -> int:
    return packet.operation.opcode


_SERVICES, _CARRIED = column(_services), packet_column(lambda packet: _services(packet.operation))
_LOCAL, _RETURNS = column(lambda row: row.local), column(lambda row: row.returns)
_ATOMIC, _MASKED = column(lambda row: row.atomic), column(lambda row: row.masked)
_SEGMENTS, _WIDE = column(lambda row: _segments(row, 0)), column(lambda row: _segments(row, -1))
_RIGHT, _IMM = column(lambda row: row.right), column(lambda row: row.imm)
_RECEIVES, _COMPLETES = column(lambda row: row.receives or 0), packet_column(lambda packet: packet.receives or 0)
_ON_WIRE = column(lambda row: row.packets is not None)
_FIRST, _MIDDLE = (column(lambda row, i=i: row.packets[i] if row.packets else 0) for i in (0, 1))
_LAST, _ONLY = (column(lambda row, i=i: row.packets[i] if row.packets else 0) for i in (2, 3))
_OPERATION, _IMM_IN_PACKET = packet_column(_opcode), packet_column(lambda packet: packet.imm)
_BEGINS, _ENDS = packet_column(lambda packet: packet.first), packet_column(lambda packet: packet.last)
_HEADERS = packet_column(lambda packet: sum(header.size for header in packet.headers))


# --- by the opcode of a WQE ------------------------------------------------------------------------------------------


@device_function
def is_offered(opcode, service):
    """Return whether a QP of this service type has the operation."""
    return np.int64(_SERVICES[opcode]) >> service & 1


@device_function
def is_local(opcode):
    """Return whether the operation concerns this NIC only."""
    return np.int64(_LOCAL[opcode])


@device_function
def returns_data(opcode):
    """Return whether a response of its own completes the request, rather than an acknowledgement."""
    return np.int64(_RETURNS[opcode])


@device_function
def is_atomic(opcode):
    """Return whether the operation is an atomic, masked or plain."""
    return np.int64(_ATOMIC[opcode])


@device_function
def is_masked(opcode):
    """Return whether the operation is a masked atomic, which mlx5 calls extended."""
    return np.int64(_MASKED[opcode])


@device_function
def segments_of(opcode, opmod):
    """Return how many segments come before the data: the control segment and the operation's.

    Those of a local operation include its data segments.
    """
    return np.int64(_WIDE[opcode]) if opmod == EXTENDED_ATOMIC_8 else np.int64(_SEGMENTS[opcode])


@device_function
def right_of(opcode):
    """Return the remote right that the operation needs, or 0 if it names no memory of the peer."""
    return np.int64(_RIGHT[opcode])


@device_function
def receive_cqe(opcode):
    """Return the opcode of the CQE with which the operation completes a receive, or 0 if it completes none."""
    return np.int64(_RECEIVES[opcode])


@device_function
def carries_imm(opcode):
    """Return whether the operation carries immediate data."""
    return np.int64(_IMM[opcode])


@device_function
def has_packets(opcode):
    """Return whether the operation may go to a QP of another NIC."""
    return np.int64(_ON_WIRE[opcode])


@device_function
def packet_of(opcode, first, last):
    """Return the packet opcode for a place in the operation's message."""
    if first:
        return np.int64(_ONLY[opcode]) if last else np.int64(_FIRST[opcode])
    return np.int64(_LAST[opcode]) if last else np.int64(_MIDDLE[opcode])


# --- by the opcode of a packet, its lower five bits ------------------------------------------------------------------


@device_function
def is_request(packet, service):
    """Return whether the packet is a request that a QP of this service type has."""
    return np.int64(_CARRIED[packet]) >> service & 1


@device_function
def operation_of(packet):
    """Return the WQE opcode of a request packet's operation, without immediate data; NOP if it is no request packet."""
    return np.int64(_OPERATION[packet])


@device_function
def begins(packet):
    """Return whether the packet is the first of its message."""
    return np.int64(_BEGINS[packet])


@device_function
def ends(packet):
    """Return whether the packet is the last of its message."""
    return np.int64(_ENDS[packet])


@device_function
def has_imm(packet):
    """Return whether the packet has immediate data."""
    return np.int64(_IMM_IN_PACKET[packet])


@device_function
def receive_cqe_of(packet):
    """Return the opcode of the CQE with which the packet completes a receive, or 0 if it completes none."""
    return np.int64(_COMPLETES[packet])


@device_function
def header_bytes(packet):
    """Return the bytes of extended transport headers between the BTH and the payload."""
    return np.int64(_HEADERS[packet])
