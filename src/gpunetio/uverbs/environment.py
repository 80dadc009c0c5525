"""The environment in which a program's libibverbs finds software NICs."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ..embed import building, python
from ..errors import InUseError, NotSupportedError, OperatingSystemError
from ..nic.control.port import Port, PortConfig
from . import sysfs

FOLDER = "GPUNETIO_UVERBS"  # the variable that names the folder of sysfs.py (preload.c)
PORTS = "ports"  # a file in it
_QUIET_END = "RDMAV_ALLOW_DISASSOC_DESTROY"  # libibverbs: to destroy an object of a device that is gone is no error
_DESCRIPTION = {  # variable of preload.c → member of python.h's structure
    "GPUNETIO_LIBPYTHON": "library", "GPUNETIO_PYTHONHOME": "home", "GPUNETIO_PYTHONVERSION": "version",
    "GPUNETIO_PATH": "path",
}  # fmt: skip


def library() -> Path:
    """Return the library that stands in for the kernel, which is compiled once for this machine (embed/building.py)."""
    source = Path(__file__).with_name("preload.c")
    return building.library("libgpunetio-uverbs.so", source, "gpunetio run")


def _need_shared_library() -> None:
    """Raise NotSupportedError if this Python has no shared library, by which a program gets its NICs."""
    if python.shared_library() is None:
        raise NotSupportedError(
            f"this Python ({sys.executable}) has no shared library, by which a program gets its NICs: "
            f"{python.how_to_get_one()}"
        )


def prepare(root: Path, ports: Sequence[tuple[str, PortConfig]]) -> dict[str, str]:
    """Return what to add to the environment of a program that is to see these devices, while the folder `root` lasts.

    `ports` has a name and a configuration for each device. InUseError if the folder has files already.
    """
    _need_shared_library()
    preloaded = ":".join(filter(None, (str(library()), os.environ.get("LD_PRELOAD"))))
    if root.exists() and any(root.iterdir()):
        raise InUseError(f"{root} is not empty: name a folder that is, or one that does not exist")
    try:
        sysfs.build(root, {name: Port(port, f"127.0.0.{n + 1}") for n, (name, port) in enumerate(ports)})
        (root / PORTS).write_bytes(pickle.dumps(list(ports)))
    except OSError as error:
        raise OperatingSystemError(f"{error.filename} cannot be written: {error.strerror}") from None
    how = python.description(os.pathsep.join(part for part in sys.path if part))
    return {
        "LD_PRELOAD": preloaded,
        FOLDER: str(root.absolute()),
        _QUIET_END: "1",
        **{variable: how[member] for variable, member in _DESCRIPTION.items()},
    }


@contextmanager
def environment(ports: Sequence[tuple[str, PortConfig]]) -> Iterator[dict[str, str]]:
    """Return what `prepare` does, for a folder that lasts as long as the block."""
    with TemporaryDirectory(prefix="gpunetio-") as folder:
        yield prepare(Path(folder), ports)


def ports_of_this_program() -> list[tuple[str, PortConfig]]:
    """Return the devices of the program that this process runs."""
    ports: list[tuple[str, PortConfig]] = pickle.loads((Path(os.environ[FOLDER]) / PORTS).read_bytes())
    return ports
