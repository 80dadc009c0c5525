"""The operands of a task: buffers, memory maps, regions, or plain memory such as a NumPy array or a tensor."""

from __future__ import annotations

from contextlib import ExitStack

from ..enums import Access
from ..errors import InvalidValueError
from ..verbs import MR, PD, Sge
from .buf import Buf
from .remote_memory import RemoteMemory


def sources(pd: PD, operand: object, held: ExitStack) -> tuple[Sge, ...]:
    """Return the bytes that a task reads as scatter/gather entries. Plain memory is registered until `held` closes."""
    if isinstance(operand, Buf):
        return operand.sources()
    return _whole(_region_of(pd, operand, Access.LOCAL_READ, held))


def destinations(pd: PD, operand: object, held: ExitStack) -> tuple[Sge, ...]:
    """Return the bytes that a task may write. Plain memory stays registered until `held` closes."""
    if isinstance(operand, Buf):
        return operand.destinations()
    return _whole(_region_of(pd, operand, Access.LOCAL_WRITE, held))


def _region_of(pd: PD, operand: object, access: Access, held: ExitStack) -> MR:
    if isinstance(operand, RemoteMemory):
        raise InvalidValueError(f"{operand} is memory of a peer: give memory of this process")
    if isinstance(operand, MR):
        operand.check_open()
        return operand
    return held.enter_context(pd.register(operand, access))


def _whole(region: MR) -> tuple[Sge, ...]:
    return (Sge(region.iova, region.nbytes, region.lkey),)
