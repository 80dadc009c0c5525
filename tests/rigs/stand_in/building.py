"""Compile stand_in.c."""

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent
HEADER = Path("/usr/include/infiniband/mlx5dv.h")
VARIABLE = "GPUNETIO_STAND_IN"


def why_not() -> str | None:
    """Why it cannot be built here, or None when it can."""
    return None if os.environ.get(VARIABLE) else why_no_headers()


def why_no_headers() -> str | None:
    """Why nothing can be compiled against rdma-core here, or None when it can."""
    if compiler() is None:
        return "no C compiler"
    return None if HEADER.exists() else "the headers of rdma-core are not installed (libibverbs-dev)"


def compiler() -> str | None:
    """The C compiler."""
    return shutil.which(os.environ.get("CC", "cc"))


def build(folder: Path, without: Iterable[str] = ()) -> Path:
    """A new shared object in `folder`, which does not export the functions in `without`: older rdma-core for one."""
    missing = {f"{name};" for name in without}
    lines = (FOLDER / "exports.map").read_text().splitlines()
    kept = [line for line in lines if line.strip() not in missing]
    if len(lines) - len(kept) != len(missing):
        raise ValueError(f"not all of {', '.join(without)} are exported")
    exports, made = folder / "exports.map", folder / "stand_in.so"
    exports.write_text("\n".join(kept))
    subprocess.run(
        [
            compiler() or "cc", "-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter",
            "-Wno-cast-function-type", "-fPIC", "-shared", "-pthread", f"-Wl,--version-script={exports}",
            FOLDER / "stand_in.c", "-o", made,
        ],
        check=True, timeout=100,
    )
    return made


def built(folder: Path) -> Path:
    """The file that GPUNETIO_STAND_IN names, or else a new one in `folder`."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path else build(folder)
