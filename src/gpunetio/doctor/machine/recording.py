"""Save the readings of a machine to a file, and replay them.

The file is JSON that people can read and edit. It has the readings of each kind by path, command or question. Text is
a string, other bytes are {"hex": …}, and failed readings are {"trouble": …, "error": …}.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

from ...errors import InvalidValueError
from ..checks.catalog import examine
from ..report import tree
from . import topology
from .devices import Machine, Wanted
from .host import Host, Kind, Reading, Trouble
from .redact import redact

FORMAT = "gpunetio-doctor 1"


class ReplayHost(Host):
    """A recorded machine."""

    def __init__(self, recorded: dict[tuple[Kind, tuple[str, ...]], Reading]):
        super().__init__()
        self.recorded = recorded

    def fetch(self, kind: Kind, key: tuple[str, ...]) -> Reading:
        """Return the recorded reading."""
        return self.recorded.get(
            (kind, key), Reading(kind, key, None, Trouble.UNRECORDED, "this recording does not have it")
        )


def record(host: Host, wanted: Wanted, path: Path, masked: bool = False) -> None:
    """Save everything that the doctor and `gpunetio topo` may read, for all GPUs and NICs.

    `masked` replaces everything that identifies the machine, see `redact`.
    """
    wanted = replace(wanted, gpu="", nic="")
    examine(host, wanted)
    machine = Machine(host, wanted)
    topology.matrix(machine)
    tree.build(machine, everything=True)
    readings = host.readings()
    save(redact(readings) if masked else readings, path)


def save(readings: list[Reading], path: Path) -> None:
    """Write readings to a file."""
    packed: dict[str, dict[str, object]] = {}
    for reading in readings:
        packed.setdefault(reading.kind, {})[shlex.join(reading.key)] = _packed(reading)
    path.write_text(json.dumps({"format": FORMAT, **packed}, indent=1, sort_keys=True) + "\n", encoding="ascii")


def load(path: Path) -> ReplayHost:
    """Load a recorded machine. Raises InvalidValueError for a file that `save` has not written."""
    try:
        packed = json.loads(path.read_bytes())
        if packed.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        found = [
            _unpacked(kind, tuple(shlex.split(key)), entry)
            for kind, entries in [(Kind(kind), entries) for kind, entries in packed.items()]
            for key, entry in entries.items()
        ]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else error
        raise InvalidValueError(f"{path} is not a recording of `gpunetio doctor --record`: {said}") from error
    return ReplayHost({(reading.kind, reading.key): reading for reading in found})


def _packed(reading: Reading) -> object:
    value = reading.value
    if isinstance(value, bytes):
        value = _text_or_hex(value)
    if reading.ok:
        return {"answer": value} if reading.kind is Kind.QUESTION else value
    trouble: dict[str, object] = {"trouble": reading.trouble, "error": reading.error}
    return trouble if value is None else trouble | {"value": value}


def _text_or_hex(value: bytes) -> str | dict[str, str]:
    text = value.decode(errors="replace")
    printable = all(c.isprintable() or c in "\n\t" for c in text)
    return text if printable and text.encode() == value else {"hex": value.hex()}


def _unpacked(kind: Kind, key: tuple[str, ...], entry: object) -> Reading:
    if isinstance(entry, dict) and "trouble" in entry:
        value = _value(kind, entry["value"]) if "value" in entry else None
        return Reading(kind, key, value, Trouble(entry["trouble"]), str(entry["error"]))
    if kind is not Kind.QUESTION:
        return Reading(kind, key, _value(kind, entry))
    if not isinstance(entry, dict):
        raise ValueError(f"a {kind} is {entry!r}")
    return Reading(kind, key, entry["answer"])


def _value(kind: Kind, entry: object) -> bytes | str | list[str]:
    if isinstance(entry, dict):
        return bytes.fromhex(entry["hex"])
    if kind is Kind.FOLDER and isinstance(entry, list):
        return [str(name) for name in entry]
    if kind is Kind.FOLDER or not isinstance(entry, str):
        raise ValueError(f"a {kind} is {entry!r}")
    return entry if kind is Kind.LINK else entry.encode()
