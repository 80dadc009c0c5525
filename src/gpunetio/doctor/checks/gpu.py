"""Check the GPUs and their driver: presence, version, flavour and settings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..finding import GUIDE, HARDWARE, Evidence, Finding, check, evidence, fail, ok, skip, warn
from ..machine import nvidia_smi, pci
from ..machine.containers import container_kind
from ..machine.devices import Gpu, Machine
from ..machine.nvidia_driver import is_open, loaded, peermem_carries, peermem_cure, smi, unseen, version

AREA = "GPUs"
CUDA_13_DRIVER = "580.65.06"  # CUDA release notes: minimum driver versions
_OLDEST_DRIVER = "525.60.13"  # for CUDA 12, likewise


def each_gpu(ask: Callable[[Machine, Gpu], Finding]) -> Callable[[Machine], Iterator[Finding]]:
    """Turn a check of one GPU into a check of all GPUs. Without a GPU, the check is skipped."""

    @functools.wraps(ask)
    def ask_all(machine: Machine) -> Iterator[Finding]:
        if not machine.gpus:
            yield skip("no GPU")
        for gpu in machine.gpus:
            yield replace(ask(machine, gpu), gpu=gpu.name)

    return ask_all


@check(
    "gpu-present", "GPU",
    why="A kernel that drives a NIC without the processor runs on an NVIDIA GPU.",
    cure="lspci -d 10de: lists the GPUs; pass the GPU through to a virtual machine, or to a container: --gpus all",
    source=GUIDE, uses=HARDWARE, essential=True,
)
def gpu_present(machine: Machine) -> Iterator[Finding]:
    """Find GPUs in sysfs, or by nvidia-smi if sysfs does not show them."""
    devices, told = machine.host.names(pci.FOLDER), nvidia_smi.query(machine.host)
    if not machine.all_gpus and not devices.ok and not told.ok:
        yield skip("cannot read PCI devices or ask nvidia-smi", devices, told)
    elif not machine.all_gpus:
        yield fail(f"no NVIDIA GPU among {len(machine.pci)} PCI functions", evidence(devices, "none has vendor 0x10de"))
    for gpu in machine.gpus:
        source = gpu.pci.folder if gpu.pci else nvidia_smi.SOURCE
        model = gpu.model or "an NVIDIA GPU of unknown model"
        yield ok(f"{model} at {gpu.address}", Evidence(source, model), gpu=gpu.name)


@check(
    "gpu-driver", "GPU driver",
    why="NVIDIA's kernel module drives the GPU and shares its memory with other devices.",
    cure="sudo apt install nvidia-open && sudo modprobe nvidia",
    source=f"{GUIDE}: CUDA Dependency; CUDA release notes: minimum driver versions", uses=HARDWARE, reboot=True,
    essential=True,
)
def gpu_driver(machine: Machine) -> Iterator[Finding]:
    """Check that the driver is loaded, its version, and that it drives every GPU."""
    if not machine.gpus:
        yield skip("no GPU")
        return
    text, reading = version(machine)
    there, module = loaded(machine, "nvidia")
    if not text and there:
        yield skip("nvidia is loaded, but does not report its version", reading, module)
    elif not text and there is None:
        yield skip("cannot find out whether nvidia is loaded", reading, module)
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
        cure = f"unbind it from {name}: find what binds {gpu.address} in /etc/modprobe.d, then sudo update-initramfs -u"
        yield fail(f"its driver is {name}, not nvidia", bound, gpu=gpu.name, cure=cure)
    elif hidden:
        cure = f"look for the reason: sudo dmesg | grep -i -e xid -e {gpu.address[5:]}"
        yield fail("nvidia-smi shows other GPUs, but not this one", told, gpu=gpu.name, cure=cure, reboot=False)


def _parts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


_OPEN = (
    "sudo apt install nvidia-open, in place of cuda-drivers (for CUDA 12.5 and older: the installer's -m=kernel-open)"
)


@check(
    "gpu-driver-open", "Open kernel modules",
    why="Only the open kernel modules export GPU memory as a dmabuf. The closed ones need nvidia-peermem.",
    cure=f"{_OPEN}; until then sudo modprobe nvidia-peermem",
    source=f"{GUIDE}: Using dmabuf", uses=HARDWARE, reboot=True,
)
def gpu_driver_open(machine: Machine) -> Iterator[Finding]:
    """Check whether the kernel modules are the open ones."""
    flavour, read = is_open(machine)
    if not machine.gpus:
        yield skip("no GPU")
    elif flavour is None:
        yield skip("the driver does not report whether it is the open one", read)
    elif flavour:
        yield ok("open kernel modules, with dmabuf", read)
    elif (by_peermem := peermem_carries(machine))[0]:
        yield ok("closed kernel modules: no dmabuf, but nvidia-peermem is loaded", read, by_peermem[1])
    else:
        cure = f"{_OPEN}; until then {peermem_cure(machine)}"
        yield warn("closed kernel modules: no dmabuf; load nvidia-peermem", read, cure=cure)


@check(
    "gpu-persistence", "Persistence mode",
    why="Without it, the driver initialises the GPU again for each program on an idle GPU. This takes seconds.",
    cure="sudo nvidia-smi -i <GPU> -pm 1, or permanently: sudo systemctl enable --now nvidia-persistenced",
    source=f"{GUIDE}: CUDA Dependency; man nvidia-smi", uses=HARDWARE,
)
@each_gpu
def gpu_persistence(machine: Machine, gpu: Gpu) -> Finding:
    """Check the mode in nvidia-smi."""
    mode, read = smi(gpu, "Persistence Mode")
    if mode == "Enabled":
        return ok("on", read)
    if mode == "Disabled":
        return warn("off: programs start seconds later", read, cure=_for(gpu, gpu_persistence.cure))
    return skip("nvidia-smi does not report it", read)


@check(
    "gpu-mig", "Multi-Instance GPU",
    why="A program gets one instance of a partitioned GPU, with a part of its memory and multiprocessors.",
    cure="sudo nvidia-smi -i <GPU> -mig 0, or name an instance: CUDA_VISIBLE_DEVICES=MIG-<uuid> (nvidia-smi -L)",
    source="NVIDIA Multi-Instance GPU user guide", uses=HARDWARE,
)
@each_gpu
def gpu_mig(machine: Machine, gpu: Gpu) -> Finding:
    """Check the mode now and after the next reset."""
    (now, read), (then, _) = smi(gpu, "MIG Mode/Current"), smi(gpu, "MIG Mode/Pending")
    cure = _for(gpu, gpu_mig.cure)
    if now == "Enabled":
        return warn("on: a program gets one instance", read, cure=cure)
    if then == "Enabled":
        return warn("off, but on after the next reset of the GPU", read, cure=cure)
    if now in ("Disabled", "N/A"):
        return ok("off", read)
    return skip("nvidia-smi does not report it", read)


# Reasons in `nvidia-smi -q` for slow clocks under load; older drivers say "Throttle" for "Event".
_SLOWED = ("HW Slowdown", "HW Thermal Slowdown", "HW Power Brake Slowdown", "SW Thermal Slowdown")


@check(
    "gpu-clocks", "Clocks",
    why="A GPU that is too hot or lacks power runs at a part of its speed, and latencies double.",
    cure="check fans, air flow and power cables: nvidia-smi -i <GPU> -q -d TEMPERATURE,POWER,PERFORMANCE",
    source="man nvidia-smi: Clocks Event Reasons", uses=HARDWARE,
)
@each_gpu
def gpu_clocks(machine: Machine, gpu: Gpu) -> Finding:
    """Check whether something slows the clocks down now. Clocks of an idle GPU are low, which is normal."""
    reasons = {
        name: smi(gpu, f"Clocks {kind} Reasons/{name}") for name in _SLOWED for kind in ("Event", "Throttle")
        if smi(gpu, f"Clocks {kind} Reasons/{name}")[0]
    }
    slowed = {name: read for name, (value, read) in reasons.items() if value == "Active"}
    (now, read_now), (most, read_most) = smi(gpu, "Clocks/SM"), smi(gpu, "Max Clocks/SM")
    if slowed:
        return warn(f"slowed down: {', '.join(slowed)}", *slowed.values(), cure=_for(gpu, gpu_clocks.cure))
    if not reasons:
        return skip("nvidia-smi does not report them", smi(gpu, f"Clocks Event Reasons/{_SLOWED[0]}")[1])
    read = [read for _, read in reasons.values()]
    return ok(f"SM at {now} of {most}" if now and most else "nothing slows them down", *read, read_now, read_most)


def _for(gpu: Gpu, cure: str) -> str:
    return cure.replace("<GPU>", gpu.address)


CHECKS = (gpu_present, gpu_driver, gpu_driver_open, gpu_persistence, gpu_mig, gpu_clocks)
