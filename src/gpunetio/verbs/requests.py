"""Rules for requests on every data path: the meaning of each opcode, and the values it takes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ..arguments import instance
from ..enums import QpType, WrOpcode
from ..errors import InvalidValueError
from ..formats.commands import ServiceType
from ..formats.operations import OPERATIONS, Operation
from ..formats.wqe import MAX_TRANSFER
from .ah import AddressHandle
from .work import RecvWr, SendWr, Sge

U24, U32, U64 = 1 << 24, 1 << 32, 1 << 64
_ATOMIC_BYTES = 8


# By the queue pair's type, then by opcode.
OPERATIONS_OF: dict[QpType, dict[WrOpcode, Operation]] = {
    qp_type: {
        operation.request: operation
        for operation in OPERATIONS.values()
        if operation.request is not None and ServiceType[qp_type.service] in operation.services
    }
    for qp_type in QpType
}


def operation_of(request: SendWr, qp_type: QpType) -> Operation:
    """Return the operation of a send request."""
    operation = OPERATIONS_OF[qp_type].get(instance("request", request, SendWr).opcode)
    if operation is None:
        raise no_operation(request.opcode, qp_type)
    return operation


def no_operation(opcode: WrOpcode, qp_type: QpType) -> InvalidValueError:
    """Return the error for an opcode that a queue pair of this type does not have."""
    if not isinstance(opcode, WrOpcode):
        return InvalidValueError(f"opcode = {opcode}: it must be a WrOpcode")
    has = "it sends only datagrams" if QpType(qp_type).datagrams else "only RC has READs and atomics"
    return InvalidValueError(f"{opcode.name} on a {QpType(qp_type).name} queue pair: {has}")


def entries_of(request: SendWr | RecvWr, most: int, limit: str) -> tuple[Sequence[Sge], int]:
    """Return the scatter/gather entries of a request and their total bytes. `limit` names the limiting attribute.

    Empty entries are left out: some devices take a length of 0 as 2^31 bytes.
    """
    sges, total, empty = request.sges, 0, False
    if len(sges) > most:
        raise InvalidValueError(f"{len(sges)} scatter/gather entries: the queue takes {most} ({limit})")
    for sge in sges:
        length = sge.length
        if not 0 <= length <= MAX_TRANSFER:
            raise InvalidValueError(f"length = {length}: a scatter/gather entry has 0 to {MAX_TRANSFER} bytes")
        total += length
        empty = empty or length == 0
    return [sge for sge in sges if sge.length] if empty else sges, total


def check_size(operation: Operation, nbytes: int) -> None:
    """Raise InvalidValueError unless a request for this operation may have `nbytes` bytes in its entries."""
    if operation.atomic and nbytes != _ATOMIC_BYTES:
        raise InvalidValueError(f"{nbytes} bytes for the result of an atomic: give one entry of {_ATOMIC_BYTES}")
    if nbytes > MAX_TRANSFER:
        raise InvalidValueError(f"{nbytes} bytes: a request has {MAX_TRANSFER} at most")


def inline_payload(request: SendWr, operation: Operation, most: int) -> bytes:
    """Return the inline bytes of a request. InvalidValueError if there are more than `most`."""
    if operation.returns:
        raise InvalidValueError(f"{request.opcode.name} brings data here: it cannot be inline")
    if request.inline is not None and request.sges:
        raise InvalidValueError("inline bytes and scatter/gather entries: give one of the two")
    payload = request.inline
    if payload is None:
        payload = b"".join(ctypes.string_at(sge.address, sge.length) for sge in request.sges)
    elif not isinstance(payload, bytes):
        payload = memoryview(payload).tobytes()
    if len(payload) > most:
        raise InvalidValueError(f"{len(payload)} bytes inline: the queue takes {most} (max_inline_data)")
    return payload


def check_range(name: str, value: int, most: int) -> int:
    """Return `value`. InvalidValueError unless it is at least 0 and less than `most`."""
    if not 0 <= value < most:
        raise InvalidValueError(f"{name} = {value:#x} does not fit in {(most - 1).bit_length()} bits")
    return value


def check_entry(sge: Sge) -> None:
    """Raise InvalidValueError for an entry whose address or key is out of range."""
    check_range("address", sge.address, U64)
    check_range("lkey", sge.lkey, U32)


def remote_of(request: SendWr) -> tuple[int, int]:
    """Check and return the address and key of the peer's memory.

    A request without bytes needs neither (IBTA 9.7.4.1.6).
    """
    place = {"remote_addr": request.remote_addr, "rkey": request.rkey}
    missing = [name for name, value in place.items() if value is None]
    if missing and (request.inline or any(sge.length for sge in request.sges)):
        raise InvalidValueError(
            f"{request.opcode.name} without {' and '.join(missing)}: it needs the peer's memory, as the peer tells it: "
            "remote_addr = mr.address, rkey = mr.rkey"
        )
    address, key = (value or 0 for value in place.values())
    return check_range("remote_addr", address, U64), check_range("rkey", key, U32)


def memcpy_of(request: SendWr, most: int) -> tuple[Sge, Sge]:
    """Check and return the source and target of a MEMCPY, which copies at most `most` bytes."""
    if len(request.sges) != 2 or request.inline is not None:
        raise InvalidValueError("MEMCPY takes two scatter/gather entries, source and target: memcpy(target, source)")
    source, target = request.sges
    if source.length != target.length:
        raise InvalidValueError(f"MEMCPY of {source.length} bytes to {target.length} bytes: the lengths must be equal")
    if not 1 <= source.length <= most:
        raise InvalidValueError(f"MEMCPY of {source.length} bytes: the device copies 1 to {most} at a time")
    check_entry(source)
    check_entry(target)
    return source, target


def destination_of(request: SendWr) -> AddressHandle:
    """Check the destination of a datagram, and return its address handle."""
    if request.ah is None:
        raise InvalidValueError(
            f"{request.opcode.name} of a datagram without ah: give ah = pd.create_ah(…), remote_qpn and remote_qkey"
        )
    instance("ah", request.ah, AddressHandle).check_open()
    check_range("remote_qpn", request.remote_qpn, U24)
    check_range("remote_qkey", request.remote_qkey, U32)
    return request.ah
