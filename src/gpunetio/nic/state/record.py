"""Declare a structure that no other program knows: its offsets are computed, and each field says who writes it."""

from __future__ import annotations

from ...formats.layout import Entry, field_type

LINE = 64  # bytes of a cache line

# Who writes a field, once the structure is in use.
WRITERS = {
    "command": "the command path (control/), by way of the engine, which copies what the command has prepared",
    "host": "Python code of the NIC's process, directly, while the engine may read",
    "engine": "the engine's thread, in more than one role",
    "requester": "the engine's thread, for the send queue",
    "responder": "the engine's thread, for what the peer sends and for receive queues",
    "dma": "the engine's thread, for payload that a GPU copies (dma/)",
    "nobody": "set once, before the engine knows the structure",
}


_meanings: dict[str, dict[str, str]] = {}  # by name of the record, and field


def meanings(declared: Entry) -> dict[str, str]:
    """Return what the fields of a record mean, by name."""
    return _meanings[type(declared).__name__]


def record(name: str, table: str, align: int = LINE) -> Entry:
    """Return the `Entry` that rows of `field  type  writer  meaning` declare, without holes.

    A line `# …` begins a group of fields, on a cache line of its own. The size is a multiple of `align` bytes.
    ValueError if a field has no writer or no meaning.
    """
    rows: list[str] = []
    told = _meanings[name] = {}
    end = 0
    for line in map(str.strip, table.strip().splitlines()):
        if line.startswith("#"):
            end = -(-end // LINE) * LINE
        else:
            field, kind, writer, meaning = (*line.split(maxsplit=3), "", "", "")[:4]
            if writer not in WRITERS or not meaning:
                raise ValueError(f"{name}.{field} needs a type, one of the writers {', '.join(WRITERS)}, and a meaning")
            rows.append(f"{field} {end} {kind}")
            told[field] = meaning
            end += field_type(kind).itemsize
    return Entry(name, -(-end // align) * align, "\n".join(rows))
