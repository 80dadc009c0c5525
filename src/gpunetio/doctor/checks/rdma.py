"""Check the RDMA software: libibverbs, libmlx5 and DOCA."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..finding import GUIDE, HARDWARE, Evidence, Finding, check, fail, ok, skip, warn
from ..machine.devices import Machine
from ..machine.host import Reading, Trouble

AREA = "RDMA libraries and device nodes"
_PACKAGES = {"libibverbs": "libibverbs1", "libmlx5": "ibverbs-providers"}  # of Debian; elsewhere both are libibverbs
_DMABUF_VERSION = (1, 14, 44)  # of libibverbs: the guide's minimum for dmabuf
_WITHOUT = {
    "ibv_reg_dmabuf_mr": "GPU memory needs nvidia-peermem",
    "mlx5dv_devx_umem_reg_ex": "GPU queues need nvidia-peermem",
    "ibv_reg_mr_iova2": "no memory regions with their own addresses",
    "_ibv_query_gid_ex": "the types of GIDs are unknown",
    "mlx5dv_devx_create_event_channel": "no events from DEVX objects",
}


@check(
    "rdma-core", "libibverbs and libmlx5",
    why="The host uses a card only through these two libraries.",
    cure="sudo apt install libibverbs1 ibverbs-providers, or rdma-core and libibverbs on RHEL; release 44 or later",
    source=f"{GUIDE}: GPU Memory Mapping; rdma-core releases", uses=HARDWARE,
)
def rdma_core(machine: Machine) -> Iterator[Finding]:
    """Check that both libraries have the functions that gpunetio calls, and the version of libibverbs."""
    for name, package in _PACKAGES.items():
        yield _library(name, package, machine.host.ask("verbs_library", name))


def _library(name: str, package: str, reading: Reading) -> Finding:
    if reading.trouble is Trouble.FAILED:
        return fail(f"{name} cannot be loaded", reading, cure=f"sudo apt install {package}, or on RHEL libibverbs")
    answer: dict[str, object] = reading.value if isinstance(reading.value, dict) else {}
    needed, optional = _names(answer.get("lacks")), _names(answer.get("lacks_optional"))
    if needed is None or optional is None:
        return skip(f"{name} was not checked", reading)
    file = str(answer.get("file") or name)
    lacks = [*needed, *optional]
    shown = Evidence(file, f"lacks {' '.join(lacks)}" if lacks else "has all functions that gpunetio calls")
    version = tuple(int(part) for part in re.findall(r"[0-9]{1,9}", file.partition(".so.")[2]))
    if needed:
        more = f" and {len(needed) - 1} more" if len(needed) > 1 else ""
        return fail(f"{name} lacks {needed[0]}{more}", shown)
    if optional:
        means = "; ".join(dict.fromkeys(_WITHOUT[one] for one in optional if one in _WITHOUT))
        return warn(f"{name} lacks {optional[0]}: {means or 'an optional function'}", shown)
    if name == "libibverbs" and len(version) > 1 and version[:3] < _DMABUF_VERSION:
        return warn(f"libibverbs {'.'.join(map(str, version[:3]))} is older than 1.14.44, which dmabuf needs", shown)
    return ok(file.rpartition("/")[2], shown)


def _names(value: object) -> list[str] | None:
    return [str(one) for one in value] if isinstance(value, list) else None


@check(
    "doca-version", "DOCA and OFED",
    why="gpunetio needs neither, but NVIDIA's guide assumes their kernel modules and firmware tools.",
    cure="sudo apt install doca-all doca-sdk-gpunetio libdoca-sdk-gpunetio-dev, or on RHEL: sudo yum install doca-all "
         "doca-sdk-gpunetio doca-sdk-gpunetio-devel; gpunetio itself needs only rdma-core and the driver",
    source=GUIDE, uses=HARDWARE,
)
def doca_version(machine: Machine) -> Iterator[Finding]:
    """Report the installed versions."""
    doca = machine.host.read("/opt/mellanox/doca/applications/VERSION")
    ofed = machine.host.run("ofed_info", "-s")
    # ofed_info prints a colon after the version: "OFED-internal-24.10-0.7.0:", "MLNX_OFED_LINUX-5.8-1.0.1.1:".
    versions = [f"DOCA {doca.text}" if doca.text else "", ofed.text.rstrip(":")]
    if any(versions):
        yield ok(", ".join(version.partition("\n")[0] for version in versions if version), doca, ofed)
    else:
        yield skip("neither is installed; rdma-core and the kernel's driver suffice", doca, ofed)


CHECKS = (rdma_core, doca_version)
