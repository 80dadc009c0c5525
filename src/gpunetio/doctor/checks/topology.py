"""Check the distances between GPUs and NICs."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import GUIDE, HARDWARE, Evidence, Finding, Subject, check, evidence, ok, skip, warn
from ..machine import topo_m, topology
from ..machine.devices import Gpu, Machine, Nic
from ..machine.host import Reading
from ..machine.nvidia_driver import SHARES_MEMORY, integrated, on_superchip
from ..machine.topology import Distance

AREA = "Topology"
BETWEEN = {
    Distance.PIX: "at most one PCIe switch between them",
    Distance.PXB: "several PCIe switches between them, no host bridge",
    Distance.PHB: "through their host bridge; the speed depends on the platform",
    Distance.NODE: "through two host bridges of a NUMA node",
    Distance.SYS: "through the link between NUMA nodes",
}


def nothing(machine: Machine) -> str:
    """Return what a pair lacks, "no GPU" or "no NIC"; "" if there is a pair."""
    return "no GPU" if not machine.gpus else "no NIC" if not machine.nics else ""


@check(
    "topology", "Distance between GPU and NIC",
    why="A PCIe switch forwards between a GPU and a NIC at full speed. Host bridges and the link between NUMA nodes "
    "can cost most of the bandwidth and add latency.",
    cure="use the NIC that `gpunetio topo` names for <GPU>, or move the card to a slot behind the GPU's PCIe switch",
    source=f"{GUIDE}: Installation and Setup, nvidia-smi topo -m", uses=HARDWARE,
)
def distances(machine: Machine) -> Iterator[Finding]:
    """Check the distance from each GPU to the nearest of the NICs that the user asks about."""
    if missing := nothing(machine):
        yield skip(missing)
        return
    for gpu in machine.gpus:
        if nic := topology.nearest(machine, gpu):
            yield _pair(machine, gpu, nic)


def _pair(machine: Machine, gpu: Gpu, nic: Nic) -> Finding:
    about: Subject = {"gpu": gpu.name, "nic": nic.name}
    shares, told = integrated(machine, gpu)
    if shares:
        return skip(SHARES_MEMORY, told, **about)
    apart = topology.apart(machine, gpu, nic)
    if apart is None:
        return skip(topology.hidden(gpu, nic), **about)
    read = _places(machine, gpu, nic, apart)
    summary = f"{apart}: {BETWEEN[apart]}"
    if apart.rank <= Distance.PHB.rank:
        return ok(summary, *read, **about)
    nearer = _nearer(machine, gpu, apart)
    if not _has_slots(machine, gpu):
        if nearer is None:
            return ok(f"{summary}; the GPU's own has no slot", *read, **about)
        cure = f"use {nearer.name} ({topology.apart(machine, gpu, nearer)}) with {gpu.name}"
        return warn(f"{summary}; {nearer.name} is nearer", *read, cure=cure, **about)
    move = f"move the card of {nic.name} to a slot {_near(gpu)}"
    if nearer is None:
        return warn(summary, *read, cure=move, reboot=True, **about)
    return warn(
        f"{summary}; {nearer.name} is nearer", *read,
        cure=f"use {nearer.name} ({topology.apart(machine, gpu, nearer)}) with {gpu.name}, or {move}",
        reboot=False, **about,
    )


def _places(machine: Machine, gpu: Gpu, nic: Nic, apart: Distance) -> list[Reading | Evidence]:
    """Return the evidence for the distance."""
    if topology.distance(gpu.pci, nic.pci) is None:
        return [evidence(topo_m.query(machine.host), f"{gpu.name} to {nic.name}: {apart}")]
    return [machine.host.follow(one.pci.folder) for one in (gpu, nic) if one.pci]


def _nearer(machine: Machine, gpu: Gpu, apart: Distance) -> Nic | None:
    """Return a nearer RDMA device, even if the user did not ask about it; None if there is none."""
    best = topology.nearest(machine, gpu, (nic for nic in machine.all_nics if nic.rdma))
    found = topology.apart(machine, gpu, best) if best else None
    return best if found is not None and found.rank < apart.rank else None


def _has_slots(machine: Machine, gpu: Gpu) -> bool:
    """Return whether the GPU's host bridge may have a slot.

    On Grace, each GPU has a host bridge of its own, whose only root port leads to it.
    """
    if not on_superchip(gpu) or gpu.pci is None or not gpu.pci.root or len(gpu.pci.bridges) != 1:
        return True
    return any(one.root == gpu.pci.root and one.path[0] != gpu.pci.path[0] for one in machine.pci.values())


def _near(gpu: Gpu) -> str:
    """Return the best place for a NIC. A switch's upstream port is above the downstream port that leads to the GPU."""
    if gpu.pci is None or not gpu.pci.root:
        return f"behind the PCIe switch of {gpu.name}, or of its host bridge"
    if len(gpu.pci.bridges) >= 3:
        return f"behind the PCIe switch {gpu.pci.bridges[-2]}, which {gpu.name} is behind"
    return f"of {gpu.pci.root}, the host bridge of {gpu.name}"


@check(
    "topology-agrees", "sysfs and nvidia-smi see the same topology",
    why="The kernel and NVIDIA's driver each detect the topology. NCCL and other libraries rely on one or the other.",
    cure="compare `lspci -tv` with `nvidia-smi topo -m`; in a virtual machine, let the hypervisor show the host's PCIe "
    "switches; otherwise update the GPU driver",
    source="nvidia-smi manual page: topo", uses=HARDWARE,
)
def agrees(machine: Machine) -> Iterator[Finding]:
    """Compare the distances from each GPU to other GPUs and to NICs, except where NVLinks hide them."""
    reading = topo_m.query(machine.host)
    if not machine.gpus:
        yield skip("no GPU")
    elif not reading.ok:
        yield skip(f"nvidia-smi topo -m does not run: {reading.error}", reading)
    else:
        yield from (_compared(machine, gpu, machine.topo_m, reading) for gpu in machine.gpus)


def _compared(machine: Machine, gpu: Gpu, told: dict[tuple[str, str], str], reading: Reading) -> Finding:
    seen = {
        other.name: (apart, told[gpu.name, other.name])
        for other in (*machine.gpus, *machine.nics)
        if (apart := topology.distance(gpu.pci, other.pci)) and told.get((gpu.name, other.name)) in set(Distance)
    }
    if not seen:
        return skip("no distance is known to both sysfs and nvidia-smi topo -m", reading, gpu=gpu.name)
    differ = {name: both for name, both in seen.items() if both[0] != both[1]}
    if not differ:
        return ok(f"both agree about {', '.join(_first(seen))}", reading, gpu=gpu.name)
    name, (ours, theirs) = next(iter(differ.items()))
    more = f", and {len(differ) - 1} more differ" if len(differ) > 1 else ""
    read = [Evidence(f"{gpu.name} to {name}", f"sysfs: {a}, nvidia-smi: {b}") for name, (a, b) in differ.items()]
    return warn(f"to {name}: {ours} in sysfs, {theirs} in nvidia-smi{more}", reading, *read, gpu=gpu.name)


def _first(names: dict[str, tuple[Distance, str]]) -> list[str]:
    """Return up to four names, and "…" if there are more."""
    return [*list(names)[:4], *(["…"] if len(names) > 4 else [])]


CHECKS = (distances, agrees)
