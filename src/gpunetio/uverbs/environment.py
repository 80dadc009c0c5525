"""The environment in which a program's libibverbs finds software NICs."""

from __future__ import annotations

import os
import pickle
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import NotSupportedError
from ..nic.control.port import Port, PortConfig
from . import sysfs
from .building import library

FOLDER = "GPUNETIO_UVERBS"  # the variable that names the folder of sysfs.py (preload.c)
PORTS = "ports"  # a file in it


def _libpython() -> str:
    """Return the shared library of this Python. NotSupportedError if there is none."""
    get = sysconfig.get_config_var
    names = {get("INSTSONAME"), get("LDLIBRARY")} - {None}
    folders = [get("LIBDIR"), str(Path(sys.base_prefix) / "lib"), f"/usr/lib/{get('MULTIARCH')}"]
    for folder in folders:
        for name in sorted(names):
            path = Path(str(folder)) / name
            if ".so" in name and path.exists():
                return str(path)
    raise NotSupportedError(
        f"this Python ({sys.executable}) has no shared library, by which a program gets its NICs: on Debian or Ubuntu, "
        f"apt install libpython{sysconfig.get_python_version()}; else build Python with --enable-shared"
    )


@contextmanager
def environment(ports: Sequence[tuple[str, PortConfig]]) -> Iterator[dict[str, str]]:
    """Return what to add to the environment of a program that is to see these devices, while the block lasts.

    `ports` has a name and a configuration for each device.
    """
    with TemporaryDirectory(prefix="gpunetio-") as folder:
        root = Path(folder)
        sysfs.build(root, {name: Port(port, f"127.0.0.{n + 1}") for n, (name, port) in enumerate(ports)})
        (root / PORTS).write_bytes(pickle.dumps(list(ports)))
        before = os.environ.get("LD_PRELOAD")
        yield {
            "LD_PRELOAD": f"{library()}:{before}" if before else str(library()),
            FOLDER: folder,
            "GPUNETIO_LIBPYTHON": _libpython(),
            "GPUNETIO_PYTHONHOME": sys.base_prefix,
            "GPUNETIO_PYTHONVERSION": sysconfig.get_python_version(),
            "GPUNETIO_PATH": os.pathsep.join(part for part in sys.path if part),
        }


def ports_of_this_program() -> list[tuple[str, PortConfig]]:
    """Return the devices of the program that this process runs."""
    ports: list[tuple[str, PortConfig]] = pickle.loads((Path(os.environ[FOLDER]) / PORTS).read_bytes())
    return ports
