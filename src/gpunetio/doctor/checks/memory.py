"""Check how a NIC reaches GPU memory, and kernels the NIC: BAR1, doorbells, dmabuf, nvidia-peermem, GDRCopy."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..finding import GUIDE, HARDWARE, Finding, check, evidence, fail, ok, skip, warn
from ..machine import dmabuf as by_dmabuf
from ..machine import pci
from ..machine import peer_mapping as by_peer_mapping
from ..machine.devices import Gpu, Machine
from ..machine.host import Trouble
from ..machine.nvidia_driver import (
    SHARES_MEMORY,
    attribute,
    can_take_peermem,
    discrete,
    integrated,
    loaded,
    peermem_cure,
    smi,
)
from .gpu import each_gpu

AREA = "GPU memory and the NIC"
_MAPPING = f"{GUIDE}: GPU Memory Mapping"
_SMALL_BAR1 = 256  # MiB: the usual size without Resizable BAR
_UNSET = 0x2000_0000  # IORESOURCE_UNSET in the kernel's linux/ioport.h: a size without an address


def _none(machine: Machine) -> str:
    """Return why no GPU can share its memory with a NIC; "" if one can."""
    if discrete(machine):
        return ""
    return "no GPU with its own memory" if machine.gpus else "no GPU"


@check(
    "bar1", "BAR1 size",
    why="A NIC reaches GPU memory through the GPU's BAR1. BAR1 must be large enough for all memory mapped to the NIC.",
    cure="in the BIOS: Above 4G Decoding on, Resizable BAR (Re-Size BAR Support) on",
    source=f"{GUIDE}: GPU BAR1 Size; PCIe base specification: Resizable BAR capability", uses=HARDWARE, reboot=True,
)
@each_gpu
def bar1(machine: Machine, gpu: Gpu) -> Finding:
    """Check the size of BAR1 and its free part against the size that the user asks for."""
    file = machine.host.read(f"{pci.FOLDER}/{gpu.address}/resource")
    assigned, wanted = bar1_mib(file.text), machine.wanted.bar1_mib
    (told, free), used = (_smi_mib(gpu, name) for name in ("Total", "Free")), smi(gpu, "BAR1 Memory Usage/Used")[1]
    total = told if assigned is None else assigned
    read = [evidence(file, None if assigned is None else f"{assigned} MiB"), used]
    if integrated(machine, gpu)[0]:
        return skip(SHARES_MEMORY)
    if total is None:
        return skip("neither sysfs nor nvidia-smi reports it", *read)
    room = total if free is None else free
    text = f"{total} MiB" if free is None else f"{total} MiB, {free} MiB free"
    if total == 0:
        return fail("the firmware has assigned no addresses to BAR1", *read)
    if wanted > room:
        return fail(f"{text}; {wanted} MiB are wanted", *read)
    return (warn if total <= _SMALL_BAR1 else ok)(text, *read)


def _smi_mib(gpu: Gpu, name: str) -> int | None:
    found = re.fullmatch(r"(\d{1,9}) MiB", smi(gpu, f"BAR1 Memory Usage/{name}")[0])
    return int(found[1]) if found else None


def bar1_mib(text: str) -> int | None:
    """Return the MiB of BAR1 in a GPU's sysfs file `resource`: 0 if it has no addresses, None for any other text.

    BAR1 is the second region in use. On some GPUs BAR0 also has 64 bits, and takes two lines.
    """
    lines = [re.fullmatch(r"0x([0-9a-f]{16}) 0x([0-9a-f]{16}) 0x([0-9a-f]{16})", line) for line in text.splitlines()]
    regions = [[int(part, 16) for part in line.groups()] for line in lines[:6] if line]
    if len(regions) < 6:
        return None
    there = [(start, end, flags) for start, end, flags in regions if flags]
    if len(there) < 2 or there[1][2] & _UNSET:
        return 0
    start, end, _ = there[1]
    return max(end + 1 - start, 0) >> 20


@check(
    "peer-mapping", "Doorbells of kernels without root",
    why="A kernel rings the NIC itself if the driver maps the doorbell: always for root, else with this option.",
    cure=by_peer_mapping.CURE,
    source=f"{GUIDE}: Running without Root Privileges; man modprobe.d", uses=HARDWARE, reboot=True,
)
def peer_mapping(machine: Machine) -> Iterator[Finding]:
    """Check the options of the loaded driver, and those for its next load."""
    now, read = by_peer_mapping.driver_has(machine.host)
    if missing := _none(machine):
        yield skip(missing)
        return
    if now is None:
        yield skip("the driver shows no parameters", *read)
        return
    then, file = by_peer_mapping.next_load_has(machine.host)
    name = file.source.rpartition("/")[2] if file else ""
    read += [file] if file else []
    on, on_then = by_peer_mapping.overrides(now), by_peer_mapping.overrides(now if then is None else then)
    cure = by_peer_mapping.remedy(machine.host)
    if on and on_then:
        yield ok("on: kernels of all users can ring the NIC", *read)
    elif on:
        yield warn(f"on, but {name} turns it off at the next reboot", *read, cure=cure)
    elif on_then:
        yield warn(f"on in {name}, but not yet in the driver", *read, cure=cure)
    else:
        yield warn("off: kernels can ring only for root; other users need the CPU proxy", *read, cure=cure)


_REPLACE = "sudo rmmod nv_peer_mem && sudo modprobe nvidia-peermem; sudo apt remove nvidia-peer-memory-dkms"


@check(
    "peermem", "nvidia-peermem",
    why="Without dmabuf, this kernel module tells the NIC's driver where GPU memory is.",
    cure="sudo modprobe nvidia-peermem; at each boot: echo nvidia-peermem | sudo tee /etc/modules-load.d/"
    "nvidia-peermem.conf (if modprobe says Invalid argument: install DOCA-OFED, whose ib_core supports it)",
    source=f"{GUIDE}: Using nvidia-peermem; NVIDIA GPUDirect RDMA guide", uses=HARDWARE,
)
def peermem(machine: Machine) -> Iterator[Finding]:
    """Check that the module is loaded or not needed, and that its predecessor nv_peer_mem is not loaded."""
    (there, read), (old, read_old) = loaded(machine, "nvidia_peermem"), loaded(machine, "nv_peer_mem")
    works = all(by_dmabuf.works(by_dmabuf.needs(machine, gpu)) for gpu in discrete(machine))
    told = [read, *([machine.host.read("/sys/module/nvidia_peermem/version")] if there else [])]
    if missing := _none(machine):
        yield skip(missing)
    elif old and there:
        yield (warn if works else fail)("loaded, but in conflict with nv_peer_mem", read_old, *told, cure=_REPLACE)
    elif old:
        yield warn("its old predecessor nv_peer_mem is loaded instead", read_old, *told, cure=_REPLACE)
    elif there:
        yield ok("loaded", *told)
    elif there is None:
        yield skip("cannot find out whether it is loaded", *told)
    elif works:
        yield ok("not loaded, and not needed: dmabuf works", *told)
    elif (can := can_take_peermem(machine))[0] is False:
        yield warn("not loaded: this kernel's ib_core has no support for it", *told, can[1], cure=peermem_cure(machine))
    else:
        yield warn("not loaded", *told)


@check(
    "dmabuf", "dmabuf",
    why="dmabuf is the kernel's own way to share GPU memory with the NIC's driver, for memory regions and for queues.",
    cure="install a kernel of at least 6.2, nvidia-open in place of cuda-drivers, and rdma-core 44 or newer",
    source=f"{GUIDE}: Using dmabuf; kernel Documentation/driver-api/dma-buf.rst", uses=HARDWARE,
)
@each_gpu
def dmabuf(machine: Machine, gpu: Gpu) -> Finding:
    """Check everything that dmabuf needs."""
    if integrated(machine, gpu)[0]:
        return skip(SHARES_MEMORY)
    needs = by_dmabuf.needs(machine, gpu)
    lacks = [need for need in needs if need.holds is False]
    if lacks:
        more = f", and {len(lacks) - 1} more" if len(lacks) > 1 else ""
        cure = "; ".join(dict.fromkeys(need.cure for need in lacks))
        reboot = any(need.reboot for need in lacks)
        return warn(f"{lacks[0].without}{more}", *(need.read for need in lacks), cure=cure, reboot=reboot)
    if by_dmabuf.works(needs) is None:
        return skip("cannot read everything that it needs", *(need.read for need in needs if need.holds is None))
    if doubts := by_dmabuf.doubts(needs):
        return _doubtful(machine, gpu, doubts)
    return ok("kernel, driver and libraries support it", *(need.read for need in needs))


def _doubtful(machine: Machine, gpu: Gpu, doubts: list[by_dmabuf.Need]) -> Finding:
    """Warn that there is a reason to doubt libcuda's word."""
    read = (*(need.read for need in doubts), attribute(machine, gpu, "dma_buf_supported")[1])
    cure = f"try it: gpunetio doctor --probe; if that fails: {'; '.join(need.cure for need in doubts)}"
    return warn(f"libcuda says that dmabuf works; {doubts[0].doubt}", *read, cure=cure)


_PEERMEMS = ("nvidia-peermem", "nv_peer_mem")  # the second is its predecessor


@check(
    "gpu-memory-path", "From GPU memory to the NIC",
    why="A NIC reaches GPU memory by dmabuf or nvidia-peermem. Without both, data and queues must be in host memory.",
    cure="sudo modprobe nvidia-peermem, or the cure of the check dmabuf",
    source=f"{_MAPPING}: Implementation and Fallback Logic", uses=HARDWARE, essential=True,
)
@each_gpu
def gpu_memory_path(machine: Machine, gpu: Gpu) -> Finding:
    """Report the first way that can work."""
    shares, read = integrated(machine, gpu)
    if shares:
        return warn("integrated: uses CPU_GPU memory and the CPU proxy", read, cure="nothing to set: this is automatic")
    needs = by_dmabuf.needs(machine, gpu)
    works = by_dmabuf.works(needs)
    modules = [(name, *loaded(machine, name.replace("-", "_"))) for name in _PEERMEMS]
    name, there, module = next((one for one in modules if one[1]), modules[0])
    direct, attributed = attribute(machine, gpu, "gpu_direct_rdma_supported")
    lacks = [need.read for need in needs if need.for_all and need.holds is not True]
    doubts = by_dmabuf.doubts(needs)
    if works and not doubts:
        return ok("dmabuf", *(need.read for need in needs if need.for_all))
    if there and direct != 0:
        return ok(name, module, *lacks)
    if works:
        return _doubtful(machine, gpu, doubts)
    if works is False and (there is False or direct == 0):
        cure = f"{peermem_cure(machine)}, or the cure of the check dmabuf"
        return fail("neither dmabuf nor nvidia-peermem", *lacks, module, attributed, cure=cure)
    return skip("cannot find out whether dmabuf or nvidia-peermem works", *lacks, module)


@check(
    "gdrcopy", "GDRCopy",
    why="DOCA programs use it to map GPU memory to the processor (GPU_CPU memory). gpunetio uses CPU_GPU memory.",
    cure="sudo apt install -y check kmod && git clone https://github.com/NVIDIA/gdrcopy && cd gdrcopy && "
    "make && sudo ./insmod.sh && export GDRCOPY_PATH_L=$PWD/src LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$PWD/src",
    source=f"{GUIDE}: GDRCopy Installation", uses=HARDWARE,
)
def gdrcopy(machine: Machine) -> Iterator[Finding]:
    """Check GDRCopy's module, device and library, which are optional."""
    there, module = loaded(machine, "gdrdrv")
    device = machine.host.ask("opens", "/dev/gdrdrv")
    folders = [machine.host.ask("environment", name) for name in ("GDRCOPY_PATH_L", "LD_LIBRARY_PATH")]
    library = "libgdrapi.so.2"
    tried = [f"{folders[0].text.rstrip('/')}/{library}"] if folders[0].text else []
    found = [machine.host.ask("symbols", name, "gdr_open") for name in (*tried, library)]
    has = any("gdr_open" in one.value for one in found if isinstance(one.value, list))
    if missing := _none(machine):
        yield skip(missing)
    elif there is None:
        yield skip("cannot find out whether it is loaded", module)
    elif not there and not has:
        yield ok("not installed; optional: only DOCA's GPU_CPU memory uses it", module, *found)
    elif not there:
        yield warn("optional: gdrdrv is not loaded", module)
    elif device.trouble is Trouble.DENIED:
        yield warn("optional: this user may not open /dev/gdrdrv", device, cure="sudo chmod 666 /dev/gdrdrv")
    elif not device.ok:
        yield warn("optional: /dev/gdrdrv cannot be opened", device)
    elif not has:
        cure = "export GDRCOPY_PATH_L=<folder of libgdrapi.so.2> LD_LIBRARY_PATH=$LD_LIBRARY_PATH:<the same>"
        yield warn(f"optional: {library} is not found", *found, *folders, cure=cure)
    else:
        yield ok("module, device and library are there", module, device, *found, *folders)


CHECKS = (bar1, peer_mapping, peermem, dmabuf, gpu_memory_path, gdrcopy)
