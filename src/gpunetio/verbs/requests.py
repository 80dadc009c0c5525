"""Rules for requests, for every data path: the meaning of each opcode, and the values it takes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..enums import QpType, WcOpcode, WrOpcode
from ..errors import InvalidValueError
from ..formats.wqe import MAX_TRANSFER
from .arguments import instance
from .work import RecvWr, SendWr, Sge

U24, U32, U64 = 1 << 24, 1 << 32, 1 << 64
_ATOMIC_BYTES = 8


@dataclass(frozen=True)
class Kind:
    """What an opcode does."""

    completion: WcOpcode
    remote: bool = False  # it names memory of the peer
    reads: bool = False  # it returns data
    imm: bool = False

    @cached_property
    def atomic(self) -> bool:
        return self.completion in (WcOpcode.COMP_SWAP, WcOpcode.FETCH_ADD)


_KINDS = {
    WrOpcode.SEND:                 Kind(WcOpcode.SEND),
    WrOpcode.SEND_WITH_IMM:        Kind(WcOpcode.SEND, imm=True),
    WrOpcode.RDMA_WRITE:           Kind(WcOpcode.RDMA_WRITE, remote=True),
    WrOpcode.RDMA_WRITE_WITH_IMM:  Kind(WcOpcode.RDMA_WRITE, remote=True, imm=True),
    WrOpcode.RDMA_READ:            Kind(WcOpcode.RDMA_READ, remote=True, reads=True),
    WrOpcode.ATOMIC_CMP_AND_SWP:   Kind(WcOpcode.COMP_SWAP, remote=True, reads=True),
    WrOpcode.ATOMIC_FETCH_AND_ADD: Kind(WcOpcode.FETCH_ADD, remote=True, reads=True),
    WrOpcode.WAIT_CQ_PI:           Kind(WcOpcode.WAIT_CQ_PI),
}  # fmt: skip


def kind_of(request: SendWr, qp_type: QpType) -> Kind:
    """Return the kind of a request for the send queue."""
    kind = _KINDS.get(instance("request", request, SendWr).opcode)
    if kind is None:
        raise InvalidValueError(f"opcode = {request.opcode}: it must be a WrOpcode")
    if kind.reads and qp_type != QpType.RC:
        raise InvalidValueError(f"{request.opcode.name} on a UC queue pair: only RC has READs and atomics")
    return kind


def entries_of(request: SendWr | RecvWr, most: int, limit: str) -> tuple[Sequence[Sge], int]:
    """Return the scatter/gather entries of a request and their bytes. `limit` names the attribute that limits them.

    Empty entries are left out: for some devices 0 means 2^31 bytes.
    """
    sges, total = request.sges, 0
    if len(sges) > most:
        raise InvalidValueError(f"{len(sges)} scatter/gather entries: the queue takes {most} ({limit})")
    for sge in sges:
        if not 0 <= sge.length <= MAX_TRANSFER:
            raise InvalidValueError(f"length = {sge.length}: a scatter/gather entry has 0 to {MAX_TRANSFER} bytes")
        total += sge.length
    return [sge for sge in sges if sge.length], total


def check_size(kind: Kind, nbytes: int) -> None:
    """Raise InvalidValueError unless a request of this kind may have entries of `nbytes` bytes."""
    if kind.atomic and nbytes != _ATOMIC_BYTES:
        raise InvalidValueError(f"{nbytes} bytes for the result of an atomic: give one entry of {_ATOMIC_BYTES}")
    if nbytes > MAX_TRANSFER:
        raise InvalidValueError(f"{nbytes} bytes: a request has {MAX_TRANSFER} at most")


def inline_payload(request: SendWr, kind: Kind, most: int) -> bytes:
    """Return the inline bytes of a request, at most `most`."""
    if kind.reads:
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
    """Return a number from 0 to less than `most`."""
    if not 0 <= value < most:
        raise InvalidValueError(f"{name} = {value:#x} does not fit in {(most - 1).bit_length()} bits")
    return value


def check_entry(sge: Sge) -> None:
    """Raise InvalidValueError for an entry whose address or key has too many bits."""
    check_range("address", sge.address, U64)
    check_range("lkey", sge.lkey, U32)


def remote_of(request: SendWr) -> tuple[int, int]:
    """Return the checked address and key of the peer's memory.

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
