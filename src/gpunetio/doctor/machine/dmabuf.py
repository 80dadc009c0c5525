"""Find out whether a NIC can get GPU memory as a dmabuf: the needs of kernel, driver and libraries."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

from ..finding import Evidence, evidence
from . import peer_mapping, topology
from .devices import Gpu, Machine
from .host import Reading
from .nvidia_driver import attribute, is_open, on_superchip

_LARGEST = 4 << 20  # bytes of a kernel's configuration, which usually has some 300 KiB
_GZIP = 31  # zlib's wbits for a gzip header and any window
_OPEN_DRIVER = "sudo apt install nvidia-open, in place of cuda-drivers"
_TOPO_CHECK = "GrdmaPciTopoCheckOverride"
_NO_TOPO_CHECK = (
    f"echo 'options nvidia NVreg_{_TOPO_CHECK}=1' | sudo tee /etc/modprobe.d/zz-nvidia-topo-check.conf; "
    f"then {peer_mapping.LOAD}"
)
_OTHER_GROUP = frozenset({topology.Distance.NODE, topology.Distance.SYS})
_KERNEL = "install a kernel of at least 6.2"
_OTHER_KERNEL = "use a distribution's kernel, or build one with "
_RDMA_CORE = "update rdma-core (ibverbs-providers, libibverbs1) to 44 or newer"
_REGIONS, _QUEUES = ("libibverbs.so.1", "ibv_reg_dmabuf_mr"), ("libmlx5.so.1", "mlx5dv_devx_umem_reg_ex")


@dataclass(frozen=True)
class Need:
    """Something that dmabuf needs."""

    holds: bool | None  # None if unknown
    without: str  # says what is missing
    read: Evidence
    cure: str
    reboot: bool = False
    for_all: bool = True  # False: needed only for queues
    doubt: str = ""  # why it may not hold after all


def needs(machine: Machine, gpu: Gpu) -> tuple[Need, ...]:
    """Return everything that dmabuf needs. If kernel or driver do not show something, libcuda's answer counts."""
    supported, answer = attribute(machine, gpu, "dma_buf_supported")
    told = True if supported else None
    release, new = kernel_can(machine)
    # The driver needs functions of Linux 5.12, which some distributions have in older kernels. libcuda knows.
    doubt = "NVIDIA's guide asks for Linux 6.2" if new is False and told else ""
    old = f"Linux {release.text[:20]} is older than 6.2"
    config, options = kernel_config(machine)
    # The configuration does not list options that depend on disabled ones.
    shared = config.get("DMA_SHARED_BUFFER", False if config else told)
    p2p = config.get("PCI_P2PDMA", False if config else None)
    flavour, module = is_open(machine)
    flavour = told if flavour is None else flavour
    libcuda = None if supported is None else supported != 0
    return (
        Need(told or new, old, evidence(release), _KERNEL, True, doubt=doubt),
        Need(shared, "no CONFIG_DMA_SHARED_BUFFER", options, f"{_OTHER_KERNEL}CONFIG_DMA_SHARED_BUFFER=y", True),
        Need(flavour, "closed driver", module, _OPEN_DRIVER, True),
        Need(libcuda, "libcuda says not supported", answer, _OPEN_DRIVER, True),
        *_topology_checks(machine, gpu),
        _symbol(machine, *_REGIONS),
        Need(p2p, "no CONFIG_PCI_P2PDMA", options, f"{_OTHER_KERNEL}CONFIG_PCI_P2PDMA=y", True, for_all=False),
        _symbol(machine, *_QUEUES, for_all=False),
    )


def _topology_checks(machine: Machine, gpu: Gpu) -> list[Need]:
    """Doubt whether the driver, without its option, maps GPU memory to a NIC in another IOMMU group, as on Grace.

    Azure's azhpc-images (pull request 589) and NVIDIA's AICR (validators/performance) set it for this.
    """
    nic = topology.nearest(machine, gpu) if on_superchip(gpu) else None
    apart = topology.apart(machine, gpu, nic) if nic else None
    file = machine.host.read(peer_mapping.PARAMS)
    if apart not in _OTHER_GROUP or peer_mapping.parameters(file.text).get(_TOPO_CHECK) != "0":
        return []
    off = f"{_TOPO_CHECK} is 0"
    return [Need(True, off, evidence(file, f"{_TOPO_CHECK}: 0"), _NO_TOPO_CHECK, True, doubt=off)]


def kernel_can(machine: Machine) -> tuple[Reading, bool | None]:
    """Return the kernel's version, and whether it is new enough; None if unknown."""
    release = machine.host.read("/proc/sys/kernel/osrelease")
    version = re.match(r"(\d{1,6})\.(\d{1,6})", release.text)
    return release, (int(version[1]), int(version[2])) >= (6, 2) if version else None


def doubts(found: tuple[Need, ...]) -> list[Need]:
    """Return the needs that are not certain to hold."""
    return [need for need in found if need.doubt]


def works(found: tuple[Need, ...]) -> bool | None:
    """Return whether dmabuf works for memory regions; None if unknown."""
    holds = {need.holds for need in found if need.for_all}
    return False if False in holds else None if None in holds else True


def _symbol(machine: Machine, library: str, name: str, for_all: bool = True) -> Need:
    reading = machine.host.ask("symbols", library, name)
    has = name in reading.value if isinstance(reading.value, list) else None
    read = evidence(reading, None if has is None else f"has {name}" if has else f"has no {name}")
    return Need(has, f"{library.partition('.')[0]} has no {name}", read, _RDMA_CORE, for_all=for_all)


def kernel_config(machine: Machine) -> tuple[dict[str, bool], Evidence]:
    """Return the running kernel's options: True for y and m, {} if no file has them."""
    packed = machine.host.read("/proc/config.gz")
    release = machine.host.read("/proc/sys/kernel/osrelease").text
    if text := unpacked(packed.value if isinstance(packed.value, bytes) else b""):
        return options(text), Evidence(packed.source, _shown(text))
    for path in (f"/boot/config-{release}", f"/lib/modules/{release}/config"):
        reading = machine.host.read(path)
        if found := options(reading.text):
            return found, Evidence(path, _shown(reading.text))
    return {}, evidence(machine.host.read(f"/boot/config-{release}"))


def unpacked(packed: bytes) -> str:
    """Return the text of a gzip file; "" for anything else."""
    try:
        data = zlib.decompressobj(_GZIP).decompress(packed, _LARGEST)
    except zlib.error:
        return ""
    return data.decode(errors="replace")


def options(text: str) -> dict[str, bool]:
    """Parse a kernel's configuration: CONFIG_X=y or =m, # CONFIG_Y is not set (kernel Documentation/kbuild)."""
    on = re.findall(r"^CONFIG_(\w+)=[ym]$", text, re.MULTILINE)
    off = re.findall(r"^# CONFIG_(\w+) is not set$", text, re.MULTILINE)
    return dict.fromkeys(off, False) | dict.fromkeys(on, True)


def _shown(text: str) -> str:
    wanted = (line.removeprefix("# ") for line in asked_for(text).splitlines())
    return ", ".join(wanted) or "(neither of the two options)"


def asked_for(text: str) -> str:
    """Return the lines of a kernel's configuration that matter for dmabuf."""
    lines = text.splitlines()
    return "".join(f"{line}\n" for line in lines if re.search(r"CONFIG_(DMA_SHARED_BUFFER|PCI_P2PDMA)\b", line))
