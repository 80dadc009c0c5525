"""Small C programs for libibverbs and librdmacm, in the folder c_programs."""

import subprocess
from pathlib import Path

import pytest

from rdma_core import skip_without_headers
from repository import RIGS
from stand_in.building import compiler

CM_HEADER = Path("/usr/include/rdma/rdma_cma.h")


def build(name: str, folder: Path) -> Path:
    """Compile c_programs/NAME.c in `folder`. The test is skipped without rdma-core's headers."""
    skip_without_headers()
    source, made = RIGS / "c_programs" / f"{name}.c", folder / name
    libraries = ["-libverbs", "-lmlx5"]
    if f"<{CM_HEADER.relative_to('/usr/include')}>" in source.read_text():
        if not CM_HEADER.exists():
            pytest.skip("the headers of librdmacm are not installed (librdmacm-dev)")
        libraries.insert(0, "-lrdmacm")
    command = (
        compiler() or "cc", "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function",
        source, "-o", made, "-pthread", *libraries,
    )
    subprocess.run(command, check=True, timeout=60)
    return made
