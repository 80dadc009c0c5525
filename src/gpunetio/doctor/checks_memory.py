"""Checks of how GPU memory reaches a NIC: BAR1, doorbells in kernels, dmabuf, nvidia-peermem, GDRCopy."""

from __future__ import annotations

import re
from collections.abc import Iterator

from . import dmabuf as by_dmabuf
from . import pci
from . import peer_mapping as by_peer_mapping
from .checks_gpu import each_gpu
from .finding import GUIDE, HARDWARE, Finding, check, evidence, fail, ok, skip, warn
from .host import Trouble
from .machine import Gpu, Machine
from .nvidia_driver import SHARES_MEMORY, attribute, discrete, integrated, loaded, smi

AREA = "GPU memory and the NIC"
_MAPPING = f"{GUIDE}: GPU Memory Mapping"
_SMALL_BAR1 = 256  # MiB: what GPUs have without Resizable BAR
_UNSET = 0x2000_0000  # IORESOURCE_UNSET in the kernel's linux/ioport.h: a size without an address


def _none(machine: Machine) -> str:
    """Why there is no GPU whose memory or kernels could reach a NIC; "" when there is one."""
    if discrete(machine):
        return ""
    return "no GPU with memory of its own" if machine.gpus else "no GPU"


@check(
    "bar1", "BAR1 size",
    why="All GPU memory that a NIC reaches is mapped in the GPU's BAR1, which must be large enough for it.",
    cure="in the BIOS: Above 4G Decoding on, Resizable BAR (Re-Size BAR Support) on",
    source=f"{GUIDE}: GPU BAR1 Size; PCIe base specification: Resizable BAR capability", uses=HARDWARE, reboot=True,
)  # fmt: skip
@each_gpu
def bar1(machine: Machine, gpu: Gpu) -> Finding:
    """Its size, what of it is free, and what is wanted."""
    file = machine.host.read(f"{pci.FOLDER}/{gpu.address}/resource")
    assigned, wanted = bar1_mib(file.text), machine.wanted.bar1_mib
    (told, free), used = (_smi_mib(gpu, name) for name in ("Total", "Free")), smi(gpu, "BAR1 Memory Usage/Used")[1]
    total = told if assigned is None else assigned
    read = [evidence(file, None if assigned is None else f"{assigned} MiB"), used]
    if integrated(machine, gpu)[0]:
        return skip(SHARES_MEMORY)
    if total is None:
        return skip("neither sysfs nor nvidia-smi tell", *read)
    room = total if free is None else free
    text = f"{total} MiB" if free is None else f"{total} MiB, {free} MiB free"
    if total == 0:
        return fail("the firmware gave BAR1 no addresses", *read)
    if wanted > room:
        return fail(f"{text}; {wanted} MiB are wanted", *read)
    return (warn if total <= _SMALL_BAR1 else ok)(text, *read)


def _smi_mib(gpu: Gpu, name: str) -> int | None:
    found = re.fullmatch(r"(\d{1,9}) MiB", smi(gpu, f"BAR1 Memory Usage/{name}")[0])
    return int(found[1]) if found else None


def bar1_mib(text: str) -> int | None:
    """Size of BAR1 by a GPU's `resource` in sysfs; 0 when it has no addresses, None when the file is something else.

    It is the second region that there is: on some GPUs BAR0 has 64 bits, too, and takes two lines.
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
    why="A kernel rings the NIC's register itself when the driver maps it: always for root, else with this option.",
    cure=by_peer_mapping.CURE,
    source=f"{GUIDE}: Running without Root Privileges; man modprobe.d", uses=HARDWARE, reboot=True,
)  # fmt: skip
def peer_mapping(machine: Machine) -> Iterator[Finding]:
    """What the driver was loaded with, and what it will be loaded with."""
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
        yield ok("on: kernels of all users ring the NIC", *read)
    elif on:
        yield warn(f"on, and off after the next reboot by {name}", *read, cure=cure)
    elif on_then:
        yield warn(f"on in {name}, not yet in the driver", *read, cure=cure)
    else:
        yield warn("off: kernels ring for root only, others take the CPU proxy", *read, cure=cure)


_REPLACE = "sudo rmmod nv_peer_mem && sudo modprobe nvidia-peermem; sudo apt remove nvidia-peer-memory-dkms"


@check(
    "peermem", "nvidia-peermem",
    why="Where there is no dmabuf, this kernel module tells the NIC's driver where GPU memory is.",
    cure="sudo modprobe nvidia-peermem; at each boot: echo nvidia-peermem | sudo tee /etc/modules-load.d/"
    "nvidia-peermem.conf (Invalid argument: install DOCA-OFED, whose ib_core takes it)",
    source=f"{GUIDE}: Using nvidia-peermem; NVIDIA GPUDirect RDMA guide", uses=HARDWARE,
)  # fmt: skip
def peermem(machine: Machine) -> Iterator[Finding]:
    """Loaded or not needed, and not the module that it replaced."""
    (there, read), (old, read_old) = loaded(machine, "nvidia_peermem"), loaded(machine, "nv_peer_mem")
    works = all(by_dmabuf.works(by_dmabuf.needs(machine, gpu)) for gpu in discrete(machine))
    told = [read, *([machine.host.read("/sys/module/nvidia_peermem/version")] if there else [])]
    if missing := _none(machine):
        yield skip(missing)
    elif old and there:
        yield (warn if works else fail)("loaded, and in conflict with it nv_peer_mem", read_old, *told, cure=_REPLACE)
    elif old:
        yield warn("in place of it nv_peer_mem, which it has replaced", read_old, *told, cure=_REPLACE)
    elif there:
        yield ok("loaded", *told)
    elif there is None:
        yield skip("nothing tells whether it is loaded", *told)
    elif works:
        yield ok("not loaded, and not needed: there is dmabuf", *told)
    else:
        yield warn("not loaded", *told)


@check(
    "dmabuf", "dmabuf",
    why="As a dmabuf the NIC's driver gets GPU memory by the kernel's own means, for regions and for queues.",
    cure="install a kernel of at least 6.2, nvidia-open in place of cuda-drivers, and rdma-core 44 or newer",
    source=f"{GUIDE}: Using dmabuf; kernel Documentation/driver-api/dma-buf.rst", uses=HARDWARE,
)  # fmt: skip
@each_gpu
def dmabuf(machine: Machine, gpu: Gpu) -> Finding:
    """All that it needs."""
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
        return skip("not all that it needs can be read", *(need.read for need in needs if need.holds is None))
    return ok("kernel, driver and libraries have it", *(need.read for need in needs))


_PEERMEMS = ("nvidia-peermem", "nv_peer_mem")  # and what it replaced


@check(
    "gpu-memory-path", "From GPU memory to the NIC",
    why="A NIC reaches GPU memory by dmabuf or by nvidia-peermem; with neither, data and queues must be the host's.",
    cure="sudo modprobe nvidia-peermem, or what the check dmabuf names",
    source=f"{_MAPPING}: Implementation and Fallback Logic", uses=HARDWARE, essential=True,
)  # fmt: skip
@each_gpu
def gpu_memory_path(machine: Machine, gpu: Gpu) -> Finding:
    """The first that can work."""
    shares, read = integrated(machine, gpu)
    if shares:
        return warn("integrated: CPU_GPU memory and the CPU proxy", read, cure="nothing to set: it is chosen by itself")
    needs = by_dmabuf.needs(machine, gpu)
    works = by_dmabuf.works(needs)
    modules = [(name, *loaded(machine, name.replace("-", "_"))) for name in _PEERMEMS]
    name, there, module = next((one for one in modules if one[1]), modules[0])
    direct, attributed = attribute(machine, gpu, "gpu_direct_rdma_supported")
    lacks = [need.read for need in needs if need.for_all and need.holds is not True]
    if works:
        return ok("dmabuf", *(need.read for need in needs if need.for_all))
    if there and direct != 0:
        return ok(name, module, *lacks)
    if works is False and (there is False or direct == 0):
        return fail("neither dmabuf nor nvidia-peermem", *lacks, module, attributed)
    return skip("nothing tells whether there is dmabuf or nvidia-peermem", *lacks, module)


@check(
    "gdrcopy", "GDRCopy",
    why="DOCA programs map GPU memory to the processor with it (GPU_CPU memory); gpunetio takes CPU_GPU memory.",
    cure="sudo apt install -y check kmod && git clone https://github.com/NVIDIA/gdrcopy && cd gdrcopy && "
    "make && sudo ./insmod.sh && export GDRCOPY_PATH_L=$PWD/src LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$PWD/src",
    source=f"{GUIDE}: GDRCopy Installation", uses=HARDWARE,
)  # fmt: skip
def gdrcopy(machine: Machine) -> Iterator[Finding]:
    """Optional: its module, its device and its library."""
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
        yield skip("nothing tells whether it is loaded", module)
    elif not there and not has:
        yield ok("not installed: optional, only DOCA's GPU_CPU memory uses it", module, *found)
    elif not there:
        yield warn("optional: gdrdrv is not loaded", module)
    elif device.trouble is Trouble.DENIED:
        yield warn("optional: /dev/gdrdrv is not for this user", device, cure="sudo chmod 666 /dev/gdrdrv")
    elif not device.ok:
        yield warn("optional: /dev/gdrdrv cannot be opened", device)
    elif not has:
        cure = "export GDRCOPY_PATH_L=<folder of libgdrapi.so.2> LD_LIBRARY_PATH=$LD_LIBRARY_PATH:<the same>"
        yield warn(f"optional: {library} is not found", *found, *folders, cure=cure)
    else:
        yield ok("module, device and library are there", module, device, *found, *folders)


CHECKS = (bar1, peer_mapping, peermem, dmabuf, gpu_memory_path, gdrcopy)
