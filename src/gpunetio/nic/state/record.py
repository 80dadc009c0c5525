"""Declare internal structures: offsets are computed, and each field has a writer and a meaning."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from ...formats.layout import Record, field_type, kinds_of

LINE = 64  # bytes of a cache line


class Declared(NamedTuple):
    """A field as its class declares it."""

    meaning: str
    line: bool


def _declare(meaning: str, line: bool = False) -> Any:  # for type checkers, the field is the integer in it
    """Declare a field. `line`: it begins a group of fields, on a cache line of its own."""
    return Declared(meaning, line)


# Who writes a field, once the structure is in use.
command = _declare    # the command path (control/), by way of the engine, which copies what the command has prepared
host = _declare       # Python code of the NIC's process, directly, while the engine may read
engine = _declare     # the engine's thread, in more than one role
requester = _declare  # the engine's thread, for the send queue
responder = _declare  # the engine's thread, for what the peer sends and for receive queues
dma = _declare        # the engine's thread, for payload that a GPU copies (memory/streams.py)
nobody = _declare     # set once, before the engine knows the structure


class State(Record, size=0):
    """The address of a structure of the NIC's state, with its fields as attributes.

        class CqRow(State):
            cqn: I64 = command("number of the CQ; 0 in a free row")
            pi: I64 = engine("CQEs that were written", line=True)

    Fields follow each other without holes. The size is a multiple of `align` bytes. `meanings` maps the name of a field
    to its meaning.
    """

    meanings: ClassVar[Mapping[str, str]] = MappingProxyType({})
    _end: ClassVar[int] = 0  # of the last field

    def __init_subclass__(cls, align: int = LINE) -> None:
        end, meanings = cls._end, dict(cls.meanings)
        for name, kind in kinds_of(cls).items():
            declared = vars(cls).get(name)
            if not isinstance(declared, Declared) or not declared.meaning:
                raise TypeError(f"{cls.__name__}.{name} needs a writer and a meaning, such as engine('CQEs written')")
            if declared.line:
                end = -(-end // LINE) * LINE
            meanings[name] = declared.meaning
            setattr(cls, name, end)
            end += field_type(kind).itemsize
        cls._end, cls.meanings = end, MappingProxyType(meanings)
        super().__init_subclass__(size=-(-end // align) * align)
