"""Checks of GPUs and their driver: there, loaded, of which flavour, and how they are set."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

from . import nvidia_smi, pci
from .containers import container_kind
from .finding import GUIDE, HARDWARE, Evidence, Finding, check, evidence, fail, ok, skip, warn
from .machine import Gpu, Machine
from .nvidia_driver import is_open, loaded, peermem_carries, smi, unseen, version

AREA = "GPUs"
CUDA_13_DRIVER = "580.65.06"  # CUDA release notes: minimum driver versions
_OLDEST_DRIVER = "525.60.13"  # for CUDA 12, likewise


def each_gpu(ask: Callable[[Machine, Gpu], Finding]) -> Callable[[Machine], Iterator[Finding]]:
    """Ask for each GPU; where there is none, there is nothing to look at."""

    @functools.wraps(ask)
    def ask_all(machine: Machine) -> Iterator[Finding]:
        if not machine.gpus:
            yield skip("no GPU")
        for gpu in machine.gpus:
            yield replace(ask(machine, gpu), gpu=gpu.name)

    return ask_all


@check(
    "gpu-present", "GPU",
    why="Kernels that drive a NIC without the processor run on an NVIDIA GPU.",
    cure="lspci -d 10de: shows what is plugged in; pass the GPU to a virtual machine, or to a container: --gpus all",
    source=GUIDE, uses=HARDWARE, essential=True,
)  # fmt: skip
def gpu_present(machine: Machine) -> Iterator[Finding]:
    """By PCI, or by nvidia-smi where sysfs does not show it."""
    devices, told = machine.host.names(pci.FOLDER), nvidia_smi.query(machine.host)
    if not machine.all_gpus and not devices.ok and not told.ok:
        yield skip("neither PCI devices nor nvidia-smi can be read", devices, told)
    elif not machine.all_gpus:
        yield fail(f"no NVIDIA GPU among {len(machine.pci)} PCI functions", evidence(devices, "none of vendor 0x10de"))
    for gpu in machine.gpus:
        source = gpu.pci.folder if gpu.pci else nvidia_smi.SOURCE
        model = gpu.model or "an NVIDIA GPU, whose model no driver tells"
        yield ok(f"{model} at {gpu.address}", Evidence(source, model), gpu=gpu.name)


@check(
    "gpu-driver", "GPU driver",
    why="NVIDIA's kernel module runs the GPU, and gives its memory to other devices.",
    cure="sudo apt install nvidia-open && sudo modprobe nvidia",
    source=f"{GUIDE}: CUDA Dependency; CUDA release notes: minimum driver versions", uses=HARDWARE, reboot=True,
    essential=True,
)  # fmt: skip
def gpu_driver(machine: Machine) -> Iterator[Finding]:
    """Loaded, of which version, and whether it has every GPU."""
    if not machine.gpus:
        yield skip("no GPU")
        return
    text, reading = version(machine)
    there, module = loaded(machine, "nvidia")
    if not text and there:
        yield skip("nvidia is loaded, and does not tell its version", reading, module)
    elif not text and there is None:
        yield skip("nothing tells whether nvidia is loaded", reading, module)
    elif not text:
        yield fail("the kernel module nvidia is not loaded", reading, module, reboot=False)
    elif _parts(text) < _parts(_OLDEST_DRIVER):
        cure = f"install a driver of at least {_OLDEST_DRIVER}, better {CUDA_13_DRIVER}: sudo apt install nvidia-open"
        yield warn(f"driver {text} is older than CUDA 12 needs ({_OLDEST_DRIVER})", reading, cure=cure)
    else:
        yield ok(f"driver {text}", reading)
    for gpu in machine.gpus:
        yield from _own_driver(machine, gpu)


def _own_driver(machine: Machine, gpu: Gpu) -> Iterator[Finding]:
    bound = machine.host.follow(f"{pci.FOLDER}/{gpu.address}/driver")
    name = bound.text.rpartition("/")[2]
    other = bound.ok and name not in ("", "nvidia")
    hidden, told = unseen(machine, gpu), Evidence(nvidia_smi.SOURCE, f"(has no GPU {gpu.address})")
    kind, mark = container_kind(machine.host)
    if hidden and kind:
        yield skip(f"not given to this container ({kind})", told, mark, gpu=gpu.name)
    elif other:
        cure = f"take it from {name}: see /etc/modprobe.d for what binds {gpu.address}, then sudo update-initramfs -u"
        yield fail(f"its driver is {name}, not nvidia", bound, gpu=gpu.name, cure=cure)
    elif hidden:
        cure = f"sudo dmesg | grep -i -e xid -e {gpu.address[5:]} says why it is lost"
        yield fail("nvidia-smi shows other GPUs, but not this one", told, gpu=gpu.name, cure=cure, reboot=False)


def _parts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


@check(
    "gpu-driver-open", "Open kernel modules",
    why="Only the open flavour of the driver gives GPU memory as a dmabuf; the closed one leaves nvidia-peermem.",
    cure="sudo apt install nvidia-open, in place of cuda-drivers (for CUDA 12.5 and older: the installer's "
    "-m=kernel-open); until then sudo modprobe nvidia-peermem",
    source=f"{GUIDE}: Using dmabuf", uses=HARDWARE, reboot=True,
)  # fmt: skip
def gpu_driver_open(machine: Machine) -> Iterator[Finding]:
    """Its flavour."""
    flavour, read = is_open(machine)
    if not machine.gpus:
        yield skip("no GPU")
    elif flavour is None:
        yield skip("the driver does not tell whether it is the open one", read)
    elif flavour:
        yield ok("open kernel modules: they give dmabufs", read)
    elif (by_peermem := peermem_carries(machine))[0]:
        yield ok("closed kernel modules: no dmabuf, and nvidia-peermem does instead", read, by_peermem[1])
    else:
        yield warn("closed kernel modules: no dmabuf, nvidia-peermem is needed", read)


@check(
    "gpu-persistence", "Persistence mode",
    why="Without it the driver sets the GPU up anew for each first program, which takes seconds.",
    cure="sudo nvidia-smi -i <GPU> -pm 1, or for good: sudo systemctl enable --now nvidia-persistenced",
    source=f"{GUIDE}: CUDA Dependency; man nvidia-smi", uses=HARDWARE,
)  # fmt: skip
@each_gpu
def gpu_persistence(machine: Machine, gpu: Gpu) -> Finding:
    """As nvidia-smi says."""
    mode, read = smi(gpu, "Persistence Mode")
    if mode == "Enabled":
        return ok("on", read)
    if mode == "Disabled":
        return warn("off: programs start seconds later", read, cure=_for(gpu, gpu_persistence.cure))
    return skip("nvidia-smi does not tell", read)


@check(
    "gpu-mig", "Multi-Instance GPU",
    why="A GPU that is cut into instances gives a program one of them, with a part of its memory and processors.",
    cure="sudo nvidia-smi -i <GPU> -mig 0, or name an instance: CUDA_VISIBLE_DEVICES=MIG-<uuid> (nvidia-smi -L)",
    source="NVIDIA Multi-Instance GPU user guide", uses=HARDWARE,
)  # fmt: skip
@each_gpu
def gpu_mig(machine: Machine, gpu: Gpu) -> Finding:
    """Now, and after the next reset."""
    (now, read), (then, _) = smi(gpu, "MIG Mode/Current"), smi(gpu, "MIG Mode/Pending")
    cure = _for(gpu, gpu_mig.cure)
    if now == "Enabled":
        return warn("on: programs get one instance", read, cure=cure)
    if then == "Enabled":
        return warn("off, and on after the next reset of the GPU", read, cure=cure)
    if now in ("Disabled", "N/A"):
        return ok("off", read)
    return skip("nvidia-smi does not tell", read)


# What slows clocks down though there is work, in `nvidia-smi -q`; older drivers say "Throttle" for "Event".
_SLOWED = ("HW Slowdown", "HW Thermal Slowdown", "HW Power Brake Slowdown", "SW Thermal Slowdown")


@check(
    "gpu-clocks", "Clocks",
    why="A GPU that is too hot or lacks power runs at a part of its speed, and latencies double.",
    cure="look at fans, air flow and power cables: nvidia-smi -i <GPU> -q -d TEMPERATURE,POWER,PERFORMANCE",
    source="man nvidia-smi: Clocks Event Reasons", uses=HARDWARE,
)  # fmt: skip
@each_gpu
def gpu_clocks(machine: Machine, gpu: Gpu) -> Finding:
    """Whether something slows them down now. At rest they are low, which is as it should be."""
    reasons = {
        name: smi(gpu, f"Clocks {kind} Reasons/{name}") for name in _SLOWED for kind in ("Event", "Throttle")
        if smi(gpu, f"Clocks {kind} Reasons/{name}")[0]
    }  # fmt: skip
    slowed = {name: read for name, (value, read) in reasons.items() if value == "Active"}
    (now, read_now), (most, read_most) = smi(gpu, "Clocks/SM"), smi(gpu, "Max Clocks/SM")
    if slowed:
        return warn(f"slowed down: {', '.join(slowed)}", *slowed.values(), cure=_for(gpu, gpu_clocks.cure))
    if not reasons:
        return skip("nvidia-smi does not tell", smi(gpu, f"Clocks Event Reasons/{_SLOWED[0]}")[1])
    read = [read for _, read in reasons.values()]
    return ok(f"SM at {now} of {most}" if now and most else "nothing slows them down", *read, read_now, read_most)


def _for(gpu: Gpu, cure: str) -> str:
    return cure.replace("<GPU>", gpu.address)


CHECKS = (gpu_present, gpu_driver, gpu_driver_open, gpu_persistence, gpu_mig, gpu_clocks)
