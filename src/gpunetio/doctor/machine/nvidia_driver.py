"""NVIDIA's driver: its version, flavour and modules, and libcuda's attributes of each GPU."""

from __future__ import annotations

import re

from ..finding import Evidence, evidence
from . import nvidia_smi
from .devices import Gpu, Machine
from .host import Kind, Reading, Trouble

VERSION = "/proc/driver/nvidia/version"
SHARES_MEMORY = "integrated: the NIC uses host memory"  # why checks of peer traffic are skipped
_PEER_CLIENT, _RDMA_CLIENT = "ib_register_peer_memory_client", "ib_register_client"  # functions of ib_core
_SUPERCHIP = re.compile(r"\b(GH|GB|VR)[23]00\b")
_NUMBER = re.compile(r"\b(\d{3,5}(?:\.\d{1,5}){1,3})\b")


def loaded(machine: Machine, module: str) -> tuple[bool | None, Evidence]:
    """Return whether a kernel module is loaded, by sysfs or by /proc/modules; None if neither can be read."""
    folder, modules = machine.host.names(f"/sys/module/{module}"), machine.host.read("/proc/modules")
    listed = next((line for line in modules.text.splitlines() if line.split(" ", 1)[0] == module), "")
    if listed and not folder.ok:
        return True, evidence(modules, listed)
    if folder.ok:
        return True, evidence(folder, "(loaded)")
    return (False if modules.ok or folder.trouble is Trouble.ABSENT else None), evidence(folder)


def version(machine: Machine) -> tuple[str, Reading]:
    """Return the driver's version, such as "580.65.06"; "" if unknown. NVRM's line also has a date and a compiler."""
    reading = machine.host.read(VERSION)
    if found := _NUMBER.search(reading.text.partition("\n")[0]):
        return found[1], reading
    module = machine.host.read("/sys/module/nvidia/version")
    found = _NUMBER.fullmatch(module.text)
    return (found[1], module) if found else ("", reading)


def is_open(machine: Machine) -> tuple[bool | None, Evidence]:
    """Return whether the kernel modules are the open ones; None if unknown."""
    reading = machine.host.read(VERSION)
    if "Open Kernel Module" in reading.text or "Kernel Module" in reading.text:
        return "Open Kernel Module" in reading.text, evidence(reading)
    license = machine.host.run("modinfo", "-F", "license", "nvidia")
    known = {"Dual MIT/GPL": True, "NVIDIA": False}
    return known.get(license.text), evidence(license if license.ok else reading)


def cuda(machine: Machine) -> tuple[Reading, dict[str, object]]:
    """Return libcuda's answer; {} without one. Starting libcuda also needs the device node of nvidia-uvm."""
    if why := nvidia_smi.asleep(machine.host, nvidia_smi.MEMORY):
        return Reading(Kind.QUESTION, ("cuda",), None, Trouble.FAILED, why), {}
    reading = machine.host.ask("cuda")
    return reading, reading.value if isinstance(reading.value, dict) else {}


def number(value: object) -> int | None:
    """Return a C int of an answer; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 31 else None


def cuda_devices(machine: Machine) -> list[dict[str, object]]:
    """Return libcuda's devices in libcuda's order."""
    devices = cuda(machine)[1].get("devices")
    return [one if isinstance(one, dict) else {} for one in devices] if isinstance(devices, list) else []


def address(device: dict[str, object]) -> str:
    """Return the PCI address of a libcuda device. A GPU is always function 0."""
    numbers = [number(device.get(f"pci_{part}_id")) for part in ("domain", "bus", "device")]
    domain, bus, slot = (-1 if one is None else one for one in numbers)
    return "" if min(domain, bus, slot) < 0 else f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def device_of(machine: Machine, gpu: Gpu) -> dict[str, object]:
    """Return libcuda's name and attributes of a GPU; {} if libcuda does not show it."""
    return next((one for one in cuda_devices(machine) if address(one) == gpu.address), {})


def attribute(machine: Machine, gpu: Gpu, name: str) -> tuple[int | None, Evidence]:
    """Return a `CUdevice_attribute` of a GPU; None if libcuda does not report it."""
    value = number(device_of(machine, gpu).get(name))
    reading = cuda(machine)[0]
    if value is None and reading.ok:
        return None, Evidence("libcuda", f"(does not show {gpu.address})")
    return value, Evidence("libcuda", f"({reading.error})" if value is None else f"{name} = {value}")


def unseen(machine: Machine, gpu: Gpu) -> bool:
    """Return whether nvidia-smi shows other GPUs, but not this one."""
    return not gpu.smi and any(other.smi for other in machine.all_gpus)


def integrated(machine: Machine, gpu: Gpu) -> tuple[bool | None, Evidence]:
    """Return whether a GPU shares the processor's memory. If libcuda does not answer, the model decides."""
    value, read = attribute(machine, gpu, "integrated")
    if value is None and "GB10" in gpu.model:
        return True, Evidence(nvidia_smi.SOURCE, gpu.model)
    return None if value is None else value != 0, read


def on_superchip(gpu: Gpu) -> bool:
    """Return whether a GPU is attached to an Arm processor by NVLink-C2C: Grace Hopper, Grace Blackwell, Vera Rubin."""
    return _SUPERCHIP.search(gpu.model) is not None


def discrete(machine: Machine) -> list[Gpu]:
    """Return the GPUs that have their own memory, as far as known."""
    return [gpu for gpu in machine.gpus if not integrated(machine, gpu)[0]]


def peermem_carries(machine: Machine) -> tuple[bool, Evidence]:
    """Return whether nvidia-peermem is loaded and can share a GPU's memory, so that dmabuf is not needed."""
    there, read = loaded(machine, "nvidia_peermem")
    direct = [attribute(machine, gpu, "gpu_direct_rdma_supported")[0] for gpu in machine.gpus]
    return bool(there) and any(value != 0 for value in direct), read


def can_take_peermem(machine: Machine) -> tuple[bool | None, Evidence]:
    """Return whether the loaded ib_core has the function that nvidia-peermem registers with; None if unknown.

    Only DOCA-OFED's ib_core and some distributions' kernels have it. Without it, modprobe says "Invalid argument".
    """
    reading = machine.host.ask("kernel_symbols", _PEER_CLIENT, _RDMA_CLIENT)
    has = reading.value if isinstance(reading.value, list) else []
    known = _RDMA_CLIENT in has  # ib_core is loaded, and /proc/kallsyms shows names
    read = evidence(reading, f"has {_PEER_CLIENT}" if _PEER_CLIENT in has else f"has no {_PEER_CLIENT}")
    return (_PEER_CLIENT in has, read) if known else (None, evidence(reading))


def peermem_cure(machine: Machine) -> str:
    """Return how to load nvidia-peermem on this machine."""
    load = "sudo modprobe nvidia-peermem"
    return f"install DOCA-OFED, then {load}" if can_take_peermem(machine)[0] is False else load


def smi(gpu: Gpu, name: str) -> tuple[str, Evidence]:
    """Return a value of `nvidia-smi -q`; "" if it has none."""
    value = gpu.smi.get(name, "")
    return value, Evidence(nvidia_smi.SOURCE, f"{name.replace('/', ' ')} : {value}" if value else f"(no {name})")
