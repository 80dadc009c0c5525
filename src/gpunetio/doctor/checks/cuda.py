"""Check CUDA: its version, the attributes of each GPU, and the environment variables that it reads."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..finding import GUIDE, HARDWARE, Evidence, Finding, check, evidence, fail, ok, skip, warn
from ..machine import nvidia_smi
from ..machine.devices import Gpu, Machine
from ..machine.nvidia_driver import address, attribute, cuda, cuda_devices, integrated, number, smi, unseen
from .gpu import CUDA_13_DRIVER, each_gpu

AREA = "CUDA"
_CUDA = f"{GUIDE}: CUDA Dependency"
_ATTRIBUTES = "CUDA driver API: CUdevice_attribute"
_VARIABLES = "CUDA programming guide: environment variables"

_CUDA_13, _CUDA_RECOMMENDED, _CUDA_OLDEST = 13000, 12060, 12000  # as cuDriverGetVersion counts
_OLDEST_COMPUTE = (8, 0)  # what kernels are compiled for
_OLD_ARCHITECTURES = ("Kepler", "Maxwell", "Pascal", "Volta", "Turing")  # before 8.0

_MISMATCH = 803
# CUresult of cuInit in cuda.h: its name and the cure.
_CUINIT = {
    2: ("OUT_OF_MEMORY", "free memory of the GPU or of the host: nvidia-smi, free -m"),
    34: ("STUB_LIBRARY", "take the toolkit's lib64/stubs out of LD_LIBRARY_PATH"),
    46: ("DEVICE_UNAVAILABLE", "sudo nvidia-smi -c 0, and end the process that uses the GPU exclusively"),
    100: ("NO_DEVICE", "unset CUDA_VISIBLE_DEVICES; in a container: docker run --gpus all"),
    101: ("INVALID_DEVICE", "unset CUDA_VISIBLE_DEVICES: it names a device that does not exist"),
    304: ("OPERATING_SYSTEM", "sudo modprobe nvidia-uvm; ls -l /dev/nvidia*: the user must be allowed to open them"),
    802: ("SYSTEM_NOT_READY", "sudo systemctl start nvidia-fabricmanager: GPUs behind an NVSwitch need it"),
    _MISMATCH: ("SYSTEM_DRIVER_MISMATCH", "reboot: libcuda and the loaded kernel module have different versions"),
    804: ("COMPAT_NOT_SUPPORTED_ON_DEVICE", "take the cuda-compat folder out of LD_LIBRARY_PATH"),
    999: ("UNKNOWN", "sudo modprobe nvidia-uvm; then look at: sudo dmesg | grep -i -e nvrm -e xid"),
}


@check(
    "cuda-version", "CUDA",
    why="Device code needs CUDA 12.6 or later. The static device library and gpunetio[cuda] need CUDA 13.0.",
    cure=f"install a driver of at least {CUDA_13_DRIVER}, which has CUDA 13: sudo apt install nvidia-open",
    source=f"{_CUDA}; CUDA release notes: minimum driver versions", uses=HARDWARE, reboot=True,
)
def cuda_version(machine: Machine) -> Iterator[Finding]:
    """Report the CUDA version that libcuda supports, or why libcuda does not start."""
    reading, told = cuda(machine)
    error, can = number(told.get("error")), number(told.get("driver_version"))
    text = f"CUDA {can // 1000}.{can % 1000 // 10}" if can is not None else ""
    where = [Evidence("libcuda", file)] if isinstance(file := told.get("file"), str) else []
    version = evidence(reading, can), *where
    if not machine.gpus:
        yield skip("no GPU")
    elif why := nvidia_smi.asleep(machine.host, nvidia_smi.MEMORY):
        yield skip(f"libcuda is not asked: {why}", reading)
    elif error is not None:
        name, cure = _CUINIT.get(error, ("an error", f"see {error} in cuda.h, and sudo dmesg | grep -i nvrm"))
        read = evidence(reading, f"cuInit = {error}"), *where
        yield fail(f"cuInit fails: {name} ({error})", *read, cure=cure, reboot=error == _MISMATCH)
    elif "libcuda.so.1" in reading.error:
        cure = "install the driver's libraries; for a container: -e NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        yield fail("libcuda.so.1 cannot be loaded", reading, cure=cure, reboot=False)
    elif can is None:
        yield skip("libcuda does not report its version", reading)
    elif can < _CUDA_OLDEST:
        yield fail(f"{text} is older than 12.0", *version)
    elif can < _CUDA_RECOMMENDED:
        yield warn(f"{text}: 12.6 or newer is recommended, 13.0 for gpunetio[cuda]", *version)
    elif can < _CUDA_13:
        yield warn(f"{text}: the static device library and gpunetio[cuda] need 13.0", *version)
    else:
        yield ok(text, *version)


@check(
    "gpu-compute", "Compute capability",
    why="Kernels are compiled for sm_80 and later. Older GPUs lack instructions that they use.",
    cure="use a GPU of Ampere or a later architecture",
    source=_ATTRIBUTES, uses=HARDWARE,
)
@each_gpu
def gpu_compute(machine: Machine, gpu: Gpu) -> Finding:
    """Check the compute capability from libcuda, or else the architecture from nvidia-smi."""
    major, read = attribute(machine, gpu, "compute_capability_major")
    minor, _ = attribute(machine, gpu, "compute_capability_minor")
    architecture, named = smi(gpu, "Product Architecture")
    if major is not None and minor is not None:
        make = ok if (major, minor) >= _OLDEST_COMPUTE else fail
        return make(f"sm_{major}{minor}", Evidence(read.source, f"{major}.{minor}"))
    if architecture in ("", "N/A"):
        return skip("neither libcuda nor nvidia-smi reports it", read, named)
    return (fail if architecture in _OLD_ARCHITECTURES else ok)(architecture, named)


@check(
    "gpu-exec-timeout", "Kernel run time limit",
    why="On a GPU with a display, the driver kills kernels after some seconds. Kernels that serve queues run longer.",
    cure="use another GPU, or stop the display: sudo systemctl isolate multi-user.target; or set the X driver's "
    'Option "Interactive" "0"',
    source=f"{_ATTRIBUTES} KERNEL_EXEC_TIMEOUT; NVIDIA Linux driver README: X options", uses=HARDWARE,
)
@each_gpu
def gpu_exec_timeout(machine: Machine, gpu: Gpu) -> Finding:
    """Check whether the driver limits the run time of kernels."""
    limited, read = attribute(machine, gpu, "kernel_exec_timeout")
    if limited is None:
        return skip("libcuda does not report it", read)
    if limited:
        return warn("it has a display: the driver kills kernels after some seconds", read)
    return ok("no run time limit", read)


@check(
    "gpu-integrated", "Integrated GPU",
    why="A GPU that shares the processor's memory, such as that of DGX Spark, has no GPUDirect RDMA.",
    cure="nothing to set: queues and data go to CPU_GPU memory, and the CPU proxy rings (--queue-memory cpu_gpu)",
    source=f"{GUIDE}: Running without Root Privileges (DGX Spark); {_ATTRIBUTES} INTEGRATED", uses=HARDWARE,
)
@each_gpu
def gpu_integrated(machine: Machine, gpu: Gpu) -> Finding:
    """Check the attribute, or else the model."""
    shares, read = integrated(machine, gpu)
    if shares is None:
        return skip("libcuda does not report it", read)
    if shares:
        return warn("integrated: uses CPU_GPU memory and the CPU proxy", read)
    return ok("it has its own memory", read)


@check(
    "gpu-direct-rdma", "GPUDirect RDMA",
    why="A NIC can reach GPU memory only if the driver offers this memory to other devices.",
    cure="use a data-center or professional GPU, or host memory: --queue-memory cpu_gpu --payload-memory host",
    source=f"{_ATTRIBUTES} GPU_DIRECT_RDMA_SUPPORTED; NVIDIA GPUDirect RDMA guide", uses=HARDWARE,
)
@each_gpu
def gpu_direct_rdma(machine: Machine, gpu: Gpu) -> Finding:
    """Check the attribute, and that of dmabuf."""
    peer, read = attribute(machine, gpu, "gpu_direct_rdma_supported")
    dmabuf, read_dmabuf = attribute(machine, gpu, "dma_buf_supported")
    if peer is None:
        return skip("libcuda does not report it", read)
    if peer:
        order, read_order = attribute(machine, gpu, "gpu_direct_rdma_writes_ordering")
        return ok("supported", read, *([read_order] if order is not None else []))
    if integrated(machine, gpu)[0]:
        return warn("none, because the GPU is integrated", read, cure="nothing to set: host memory is used")
    if dmabuf:
        return warn("only by dmabuf, not by nvidia-peermem", read, read_dmabuf)
    return fail("not supported, and no dmabuf", read, read_dmabuf)


@check(
    "gpu-host-register", "Registration of other memory",
    why="A kernel can use the NIC's doorbell page, and queues in host memory, only after CUDA has registered them.",
    cure="nothing to set: CUDA allocates the memory instead, and the CPU proxy rings (--nic-handler 1)",
    source=f"{_ATTRIBUTES} HOST_REGISTER_SUPPORTED", uses=HARDWARE,
)
@each_gpu
def gpu_host_register(machine: Machine, gpu: Gpu) -> Finding:
    """Check the attribute, and show how GPUDirect RDMA writes are flushed."""
    supported, read = attribute(machine, gpu, "host_register_supported")
    flush, read_flush = attribute(machine, gpu, "gpu_direct_rdma_flush_writes_options")
    if supported is None:
        return skip("libcuda does not report it", read)
    return (ok if supported else warn)("supported" if supported else "not supported", read,
                                       *([read_flush] if flush is not None else []))


_TOOLKIT = "/usr/local/cuda/version.json"


@check(
    "cuda-toolkit", "CUDA toolkit",
    why="It compiles programs in C++. They need CUDA 12.6 or later, and 13.0 for the SDK's static device library.",
    cure="sudo apt install cuda-toolkit-13-0; export PATH=/usr/local/cuda/bin:$PATH",
    source=_CUDA, uses=HARDWARE,
)
def cuda_toolkit(machine: Machine) -> Iterator[Finding]:
    """Check the toolkit in /usr/local/cuda. Kernels in Python need none."""
    reading = machine.host.read(_TOOLKIT)
    found = re.search(r'"cuda"\s*:\s*\{[^{}]*"version"\s*:\s*"(\d{1,4})\.(\d{1,4})', reading.text)
    if not machine.gpus:
        yield skip("no GPU")
        return
    if not found:
        yield skip("none in /usr/local/cuda; only programs in C++ need it", reading)
        return
    version = (int(found[1]), int(found[2]))
    text, read = f"CUDA {version[0]}.{version[1]}", evidence(reading, ".".join(map(str, version)))
    if version < (12, 6):
        yield warn(f"{text} is older than 12.6", read)
    else:
        yield ok(text if version >= (13, 0) else f"{text}; the static device library needs 13.0", read)


@check(
    "module-loading", "Loading of kernels",
    why="With lazy loading, a kernel's first launch waits for running kernels. Kernels that serve queues do not end.",
    cure="export CUDA_MODULE_LOADING=EAGER",
    source=f"{_VARIABLES} (CUDA_MODULE_LOADING); CUDA programming guide: lazy loading", uses=HARDWARE,
)
def module_loading(machine: Machine) -> Iterator[Finding]:
    """Check CUDA_MODULE_LOADING. If it is not set, gpunetio sets it."""
    reading = machine.host.ask("environment", "CUDA_MODULE_LOADING")
    if not machine.gpus:
        yield skip("no GPU")
    elif not reading.ok:
        yield skip("the environment is unknown", reading)
    elif not reading.text:
        yield ok("not set: gpunetio sets EAGER if it loads CUDA first", reading)
    elif reading.text == "EAGER":
        yield ok("EAGER", reading)
    else:
        yield warn(f"{reading.text[:20]}: CUDA loads each kernel at its first launch", reading)


@check(
    "visible-devices", "GPUs that CUDA shows",
    why="CUDA_VISIBLE_DEVICES hides GPUs from a program. CUDA numbers the others in its own order.",
    cure="unset CUDA_VISIBLE_DEVICES; export CUDA_DEVICE_ORDER=PCI_BUS_ID; name GPUs by PCI address",
    source=f"{_VARIABLES} (CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER)", uses=HARDWARE,
)
@each_gpu
def visible_devices(machine: Machine, gpu: Gpu) -> Finding:
    """Check whether CUDA shows each GPU, and under which number."""
    variables = [machine.host.ask("environment", f"CUDA_{name}") for name in ("VISIBLE_DEVICES", "DEVICE_ORDER")]
    hides = variables[0].text
    reading, told = cuda(machine)
    shown = [address(device) for device in cuda_devices(machine)]
    if "driver_version" not in told or not all(shown):
        return skip("libcuda does not report its devices", reading, *variables)
    if gpu.address not in shown and unseen(machine, gpu):
        return skip("neither libcuda nor nvidia-smi shows it", reading, *variables)
    if gpu.address not in shown:
        why = f"CUDA_VISIBLE_DEVICES={hides[:30]} hides it" if hides else "CUDA does not show it"
        return fail(why, *variables, Evidence("libcuda", f"shows {', '.join(shown) or 'none'}"))
    ordinal = shown.index(gpu.address)
    read = Evidence("libcuda", f"device {ordinal} is {gpu.address}")
    if ordinal != gpu.number:
        cure = f"name it {gpu.address}; or: unset CUDA_VISIBLE_DEVICES; export CUDA_DEVICE_ORDER=PCI_BUS_ID"
        return warn(f"CUDA's device {ordinal}, which is another number", *variables, read, cure=cure)
    return ok(f"CUDA's device {ordinal}", *variables, read)


CHECKS = (
    cuda_version, cuda_toolkit, gpu_compute, gpu_exec_timeout, gpu_integrated, gpu_direct_rdma, gpu_host_register,
    module_loading, visible_devices,
)
