"""Check the operating system and this process: kernel, limits, rights, containers, processors."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..finding import EVERY_USE, GUIDE, HARDWARE, Evidence, Finding, Use, check, evidence, fail, ok, skip, warn
from ..machine import peer_mapping
from ..machine.containers import container_kind
from ..machine.devices import Machine
from ..machine.dmabuf import kernel_can
from ..machine.host import Host, Reading, Trouble
from ..machine.nvidia_driver import attribute, integrated, peermem_carries, peermem_cure

AREA = "Operating system and process"
_ETHERNET, _VERBS = frozenset({Use.ETHERNET}), frozenset({Use.VERBS, Use.DMA})


@check(
    "kernel", "Linux kernel",
    why="Linux 6.2 and later share GPU memory with a NIC as a dmabuf. Older kernels need nvidia-peermem.",
    cure="sudo modprobe nvidia-peermem; or install a kernel of at least 6.2, and reboot",
    source=f"{GUIDE}: GPU Memory Mapping", uses=HARDWARE,
)
def kernel(machine: Machine) -> Iterator[Finding]:
    """Check the kernel's version."""
    reading, new = kernel_can(machine)
    if new is None:
        yield skip("the kernel's version is unknown", reading)
    elif new:
        yield ok(f"Linux {reading.text} can share GPU memory as a dmabuf", reading)
    elif (by_peermem := peermem_carries(machine))[0]:
        yield ok(f"Linux {reading.text} is older than 6.2, but nvidia-peermem is loaded", reading, by_peermem[1])
    elif says := next((read for value, read in _dmabuf_by_libcuda(machine) if value), None):
        yield warn(
            f"Linux {reading.text} is older than 6.2; libcuda says that dmabuf works", reading, says,
            cure="NVIDIA's guide asks for 6.2; try this one: gpunetio doctor --probe", reboot=False,
        )
    else:
        cure = f"{peermem_cure(machine)}; or install a kernel of at least 6.2, and reboot"
        yield warn(f"Linux {reading.text} is older than 6.2: no dmabuf; load nvidia-peermem", reading, cure=cure)


def _dmabuf_by_libcuda(machine: Machine) -> list[tuple[int | None, Evidence]]:
    return [attribute(machine, gpu, "dma_buf_supported") for gpu in machine.gpus]


# --- Rights -----------------------------------------------------------------------------------------------------------

_NET_RAW, _IPC_LOCK = 13, 14  # capabilities(7), numbers of linux/capability.h


def _capabilities(host: Host) -> tuple[Reading, int | None]:
    """Return the effective capabilities as bits, or None if they are unknown."""
    status = host.read("/proc/self/status")
    found = re.search(r"^CapEff:\s*([0-9a-fA-F]{1,16})$", status.text, re.MULTILINE)
    return status, int(found[1], 16) if found else None


@check(
    "root", "Root",
    why="Packet steering needs root or CAP_NET_RAW. Without root, kernels ring doorbells only if the driver allows it.",
    cure=f"run with sudo; for Verbs and DMA: {peer_mapping.CURE}",
    source=f"{GUIDE}: Running without Root Privileges", uses=HARDWARE,
)
def root(machine: Machine) -> Iterator[Finding]:
    """Check the user, and what it may do without root."""
    user = machine.host.ask("user")
    number = user.value.get("uid") if isinstance(user.value, dict) else None
    who = evidence(user, f"uid {number}")
    if not isinstance(number, int):
        yield skip("the user is unknown", user)
    elif number == 0:
        yield ok("this is root", who)
    else:
        yield _steering(machine.host, who)
        yield _doorbells(machine, who)


def _steering(host: Host, who: Evidence) -> Finding:
    """Check steering without root: the guide asks for root, but the drivers need only the capability."""
    status, found = _capabilities(host)
    more = {"cure": "sudo <command>", "uses": _ETHERNET}
    if found is None:
        return skip("not root; capabilities are unknown", who, status, uses=_ETHERNET)
    told = evidence(status, f"CapEff {found:#018x}")
    if found >> _NET_RAW & 1:
        return warn("not root, but CAP_NET_RAW: DOCA's own programs need root", who, told, **more)
    return fail("neither root nor CAP_NET_RAW: no Ethernet", who, told, **more)


def _doorbells(machine: Machine, who: Evidence) -> Finding:
    """Check without root whether kernels reach the NIC's doorbells."""
    if machine.gpus and all(integrated(machine, gpu)[0] for gpu in machine.gpus):
        return skip("not root; integrated: the CPU proxy rings for all users", who, uses=_VERBS)
    words, told = peer_mapping.driver_has(machine.host)
    if peer_mapping.overrides(words or ""):
        return ok("not root, but Verbs and DMA do not need it here", who, told[0], uses=_VERBS)
    return warn(
        "not root, and no PeerMappingOverride: the CPU proxy rings for kernels", who, told[0],
        cure=peer_mapping.remedy(machine.host), uses=_VERBS, reboot=True,
    )


_TINY = 1 << 20  # bytes; the rings of a few queue pairs


@check(
    "memlock", "Locked memory",
    why="Queues and buffers for a NIC are locked in memory, and a process may lock no more than this limit.",
    cure="ulimit -l unlimited; for all logins: '* soft memlock unlimited' and '* hard memlock unlimited' in "
         "/etc/security/limits.d/rdma.conf; in a container: docker run --ulimit memlock=-1",
    source="getrlimit(2), RLIMIT_MEMLOCK; limits.conf(5)", uses=HARDWARE,
)
def memlock(machine: Machine) -> Iterator[Finding]:
    """Check RLIMIT_MEMLOCK. It does not bind a process with CAP_IPC_LOCK."""
    limit = machine.host.ask("limit", "MEMLOCK")
    soft = limit.value[0] if isinstance(limit.value, list) and limit.value else None
    status, capabilities = _capabilities(machine.host)
    exempt = evidence(status, f"CapEff {capabilities:#x}" if capabilities is not None else None)
    if not isinstance(soft, int):
        yield skip("the limit is unknown", limit)
    elif soft < 0:
        yield ok("no limit", limit)
    elif capabilities is not None and capabilities >> _IPC_LOCK & 1:
        yield ok(f"{_size(soft)}, but CAP_IPC_LOCK exempts this process", limit, exempt)
    elif soft < _TINY:
        yield fail(f"only {_size(soft)}: too little for queues", limit, exempt)
    else:
        yield warn(f"only {_size(soft)}", limit, exempt)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1024:g} KiB" if nbytes < _TINY else f"{min(nbytes, 1 << 62) / _TINY:g} MiB"


@check(
    "capabilities", "Linux capabilities",
    why="The mlx5 driver requires CAP_NET_RAW for raw packets. CAP_IPC_LOCK lifts the limit of locked memory.",
    cure="sudo <command>; in a container: docker run --cap-add=NET_RAW --cap-add=IPC_LOCK",
    source="capabilities(7); kernel drivers/infiniband/hw/mlx5/devx.c: mlx5_ib_devx_create", uses=HARDWARE,
)
def capabilities(machine: Machine) -> Iterator[Finding]:
    """Check CAP_NET_RAW and CAP_IPC_LOCK."""
    status, found = _capabilities(machine.host)
    if found is None:
        yield skip("this process's capabilities are unknown", status)
        return
    told = evidence(status, f"CapEff {found:#018x}")
    if found >> _NET_RAW & 1:
        yield ok("CAP_NET_RAW" + (" and CAP_IPC_LOCK" if found >> _IPC_LOCK & 1 else ""), told)
    else:
        yield fail("no CAP_NET_RAW: no queues for Ethernet packets", told, uses=_ETHERNET)


# --- Containers and virtual machines ----------------------------------------------------------------------------------


@check(
    "container", "Container",
    why="A container has only the devices and limits that it was started with.",
    cure="docker run --gpus all --device=/dev/infiniband --ulimit memlock=-1 --cap-add=IPC_LOCK --cap-add=NET_RAW "
         "--network=host …",
    source=f"{GUIDE}: introduction; docker-run(1)", uses=HARDWARE,
)
def container(machine: Machine) -> Iterator[Finding]:
    """Check whether this is a container, and whether it has the device nodes of the machine's GPUs and NICs."""
    host = machine.host
    kind, told = container_kind(host)
    if not kind:
        known = host.read("/proc/1/cgroup").ok
        yield ok("not in a container", told) if known else skip("whether this is a container is unknown", told)
        return
    verbs = host.names("/dev/infiniband")
    missing = []
    if machine.all_gpus and host.follow("/dev/nvidiactl").trouble is Trouble.ABSENT:
        missing.append("/dev/nvidiactl")
    if machine.all_nics and not any(name.startswith("uverbs") for name in verbs.names):
        missing.append("/dev/infiniband/uverbs*")
    if missing:
        yield warn(f"in a container ({kind}) that lacks {' and '.join(missing)}", told)
    else:
        yield ok(f"in a container ({kind})", told)


_GUESTS = re.compile(r"KVM|QEMU|VMware|Virtual Machine|HVM")  # product names; Arm processors have no flag


@check(
    "virtual-machine", "Virtual machine",
    why="In a guest, the hypervisor's IOMMU is between GPU and NIC, and the PCI tree is made up. This is experimental.",
    cure="run on bare metal; for a guest, pass both devices through, with ATS or an IOMMU in passthrough mode",
    source=f"{GUIDE}: introduction", uses=HARDWARE,
)
def virtual_machine(machine: Machine) -> Iterator[Finding]:
    """Check whether this is a guest of a hypervisor."""
    host = machine.host
    flag, xen = host.ask("hypervisor"), host.read("/sys/hypervisor/type")
    product = host.read("/sys/class/dmi/id/product_name")
    read = (evidence(flag), evidence(product))
    if flag.value is True or xen.text or _GUESTS.search(product.text):
        yield warn(f"a virtual machine ({product.text[:40] or xen.text[:40] or 'product unknown'})", *read)
    elif flag.value is not False:
        yield skip("whether this is a virtual machine is unknown", *read)
    else:
        yield ok("not a virtual machine", *read)


# --- Memory and processors --------------------------------------------------------------------------------------------


@check(
    "hugepages", "Huge pages",
    why="DPDK programs on the same machine need huge pages. gpunetio itself needs none.",
    cure="echo 1024 | sudo tee /proc/sys/vm/nr_hugepages",
    source="kernel Documentation/admin-guide/mm/hugetlbpage.rst", uses=HARDWARE,
)
def hugepages(machine: Machine) -> Iterator[Finding]:
    """Count huge pages."""
    reading = machine.host.read("/proc/meminfo")
    fields = dict(
        re.findall(r"^(HugePages_Total|HugePages_Free|Hugepagesize):\s*(\d{1,12})", reading.text, re.MULTILINE)
    )
    if len(fields) < 3:
        yield skip("huge pages are unknown", evidence(reading, "no HugePages_Total") if reading.ok else reading)
        return
    total, free, size = fields["HugePages_Total"], fields["HugePages_Free"], fields["Hugepagesize"]
    yield ok(f"{total} huge pages of {size} kB, {free} of them free", evidence(reading, f"HugePages_Total: {total}"))


_CONTAINERS = 64 << 20  # bytes of /dev/shm in a container by default


@check(
    "shared-memory", "/dev/shm",
    why="MPI and NCCL, which often run together with gpunetio, use /dev/shm. A container has 64 MiB by default.",
    cure="docker run --shm-size=1g …, or: sudo mount -o remount,size=1g /dev/shm",
    source="shm_overview(7); docker run reference: --shm-size", uses=HARDWARE,
)
def shared_memory(machine: Machine) -> Iterator[Finding]:
    """Check the size of /dev/shm."""
    reading = machine.host.ask("filesystem", "/dev/shm")
    total = reading.value.get("total") if isinstance(reading.value, dict) else None
    if not isinstance(total, int) or not 0 <= total < 1 << 63:
        yield skip("its size is unknown", reading)
    else:
        say = warn if total <= _CONTAINERS else ok
        yield say(f"{total >> 20} MiB", evidence(reading, f"{total} bytes"))


@check(
    "cpu-governor", "Processor frequency",
    why="A processor that clocks down when idle adds microseconds to the work of a CPU proxy or a software NIC.",
    cure="sudo cpupower frequency-set -g performance; BIOS: power profile Maximum Performance",
    source="kernel Documentation/admin-guide/pm/cpufreq.rst", uses=EVERY_USE,
)
def cpu_governor(machine: Machine) -> Iterator[Finding]:
    """Check the governor of the first processor."""
    reading = machine.host.read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if reading.text == "performance":
        yield ok("governor performance", reading)
    elif reading.text:
        yield warn(f"governor {reading.text[:40]}, not performance", reading)
    else:
        yield skip("the kernel does not scale frequencies here", reading)


CHECKS = (kernel, root, memlock, capabilities, container, virtual_machine, hugepages, shared_memory, cpu_governor)
