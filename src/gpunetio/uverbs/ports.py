"""A file that describes the NICs of a program: the names and ports of its devices, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..enums import LinkLayer
from ..errors import InvalidValueError
from ..fabric.faults import Faults
from ..nic.engine.port import PortConfig
from ..trusted import read_trusted, write_trusted

Ports = Sequence[tuple[str, PortConfig]]


def write(file: Path, ports: Ports) -> None:
    """Write the file, in a folder that only this user may write to."""
    devices = [{"name": name, "port": asdict(port)} for name, port in ports]
    write_trusted(file, json.dumps(devices, default=str).encode())  # default=str: a path becomes text


def read(file: Path) -> list[tuple[str, PortConfig]]:
    """Return names and ports. NotPermittedError if others may have written the file, InvalidValueError if it is bad.

    The ports decide where the program's packets go and which files its captures overwrite.
    """
    contents = read_trusted(file)
    try:
        return [(str(device["name"]), _port(device["port"])) for device in json.loads(contents)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidValueError(
            f"{file} does not describe the ports of software NICs ({error}): make the folder anew with this release's "
            "`gpunetio drop-in`"
        ) from None


def _port(told: dict[str, Any]) -> PortConfig:
    faults = told["faults"]
    return PortConfig(
        **told | {"link_layer": LinkLayer(told["link_layer"]), "faults": None if faults is None else Faults(**faults)}
    )
