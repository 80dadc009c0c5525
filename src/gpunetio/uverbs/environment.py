"""The environment that lets a program's libibverbs find software NICs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

from ..embed import building, python
from ..errors import DocaError, InUseError, NotSupportedError, OperatingSystemError
from ..nic.engine.port import Port, PortConfig
from ..trusted import make_trusted_folder
from . import ports as ports_file
from . import sysfs
from .remover import remove_after_this_process

FOLDER = "GPUNETIO_UVERBS"  # the variable with the path of the folder of sysfs.py (preload.c)
INTERPRETER = "GPUNETIO_PYTHON"  # the variable with the path of this Python
PORTS = "ports"  # a file in the folder
_WRITABLE_BY_OTHERS = 0o022  # preload.c refuses a folder with one of these bits
_QUIET_END = "RDMAV_ALLOW_DISASSOC_DESTROY"  # libibverbs: destroying an object of a device that is gone is no error
_DESCRIPTION = {  # variable of preload.c → member of python.h's structure
    "GPUNETIO_LIBPYTHON": "library", "GPUNETIO_PYTHONHOME": "home", "GPUNETIO_PYTHONVERSION": "version",
    "GPUNETIO_PATH": "path",
}


def library() -> Path:
    """Return the library that stands in for the kernel. It is compiled once per machine (embed/building.py)."""
    source = Path(__file__).with_name("preload.c")
    return building.library("libgpunetio-uverbs.so", source, "gpunetio run")


def _need_shared_library() -> None:
    """Raise NotSupportedError if this Python has no shared library, which a program needs to load the NICs."""
    if python.shared_library() is None:
        raise NotSupportedError(
            f"this Python ({sys.executable}) has no shared library, by which a program gets its NICs: "
            f"{python.how_to_get_one()}"
        )


def prepare(root: Path, ports: Sequence[tuple[str, PortConfig]]) -> dict[str, str]:
    """Return the environment variables with which a program sees these devices, as long as the folder `root` exists.

    `ports` has a name and a configuration for each device. InUseError if the folder has files already;
    NotPermittedError if another user may change it, and with it the behaviour of such programs.
    """
    _need_shared_library()
    preloaded = ":".join(filter(None, (str(library()), os.environ.get("LD_PRELOAD"))))
    try:
        make_trusted_folder(root)
        root.chmod(root.stat().st_mode & ~_WRITABLE_BY_OTHERS)
        if any(root.iterdir()):
            raise InUseError(f"{root} is not empty: name a folder that is, or one that does not exist")
        sysfs.build(root, {name: Port(port, f"127.0.0.{n + 1}") for n, (name, port) in enumerate(ports)})
        ports_file.write(root / PORTS, ports)
    except DocaError:
        raise
    except OSError as error:
        raise OperatingSystemError(f"{error.filename} cannot be written: {error.strerror}") from None
    how = python.description(os.pathsep.join(part for part in sys.path if part))
    return {
        "LD_PRELOAD": preloaded,
        FOLDER: str(root.absolute()),
        _QUIET_END: "1",
        INTERPRETER: sys.executable,
        **{variable: how[member] for variable, member in _DESCRIPTION.items()},
    }


def lasting_environment(ports: Sequence[tuple[str, PortConfig]]) -> dict[str, str]:
    """Return the variables of `prepare` for a new folder, which lasts as long as this process and its programs."""
    _need_shared_library()  # before there is something to remove
    folder = Path(mkdtemp(prefix="gpunetio-"))
    try:
        remove_after_this_process(folder, FOLDER)
    except BaseException:
        folder.rmdir()
        raise
    return prepare(folder, ports)


def ports_of_this_program() -> list[tuple[str, PortConfig]]:
    """Return the devices of the program that this process runs."""
    return ports_file.read(Path(os.environ[FOLDER]) / PORTS)
