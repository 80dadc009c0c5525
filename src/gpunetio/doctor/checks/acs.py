"""Check PCIe Access Control Services: whether bridges let a GPU and a NIC write to each other directly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..finding import GUIDE, HARDWARE, Evidence, Finding, Subject, check, evidence, few, ok, skip, warn
from ..machine import pci_config, topology
from ..machine.devices import Gpu, Machine, Nic
from ..machine.host import Host, Trouble
from ..machine.nvidia_driver import SHARES_MEMORY, integrated
from ..machine.pci import short

AREA = "PCI Express"
_CONNECTX8 = 0x1023
_SHOWN = 3  # bridges that a summary names


@check(
    "acs", "PCIe Access Control Services (ACS)",
    why="With ACS on, bridges redirect writes between a GPU and a NIC to the root complex, or drop them.",
    cure='BIOS: set "ACS Control" to Disabled; or, until the next reboot: sudo setpci -s <bridge> ECAP_ACS+0x6.w=0000',
    source=f"{GUIDE}: BlueField NIC; PCI Express Base Specification: ACS Extended Capability", uses=HARDWARE,
)
def acs(machine: Machine) -> Iterator[Finding]:
    """Check the bridges between each GPU and the nearest NIC."""
    pairs = [(gpu, nic) for gpu in machine.gpus if (nic := topology.nearest(machine, gpu))]
    if not pairs:
        yield skip("no pair of a GPU and a NIC")
    for gpu, nic in pairs:
        yield _pair(machine, gpu, nic, {"gpu": gpu.name, "nic": nic.name})


def _pair(machine: Machine, gpu: Gpu, nic: Nic, about: Subject) -> Finding:
    shares, read = integrated(machine, gpu)
    if shares:
        return skip(SHARES_MEMORY, read, **about)
    if topology.distance(gpu.pci, nic.pci) is None:
        return skip(topology.hidden(gpu, nic), **about)
    if _wants_acs(gpu, nic):
        return _what_rdma_topo_says(machine, about)
    return _bridges(machine.host, _between(gpu, nic), about)


def _between(gpu: Gpu, nic: Nic) -> tuple[str, ...]:
    """Return the bridges on the path between a GPU and a NIC: those above only one of the two."""
    above_gpu, above_nic = (one.pci.bridges if one.pci else () for one in (gpu, nic))
    return tuple(bridge for bridge in (*above_gpu, *above_nic) if (bridge in above_gpu) != (bridge in above_nic))


def _bridges(host: Host, bridges: Iterable[str], about: Subject) -> Finding:
    """Judge the ACS bits in force at the bridges."""
    found = [(bridge, *_acs_of(host, bridge)) for bridge in bridges]
    on = [(short(bridge), read, one) for bridge, read, one in found if one and one.on]
    if on:
        redirect = any(one.redirects for _, _, one in on)
        names = [name for name, _, _ in on]
        shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        does = "redirects peer traffic" if redirect else "is on, but redirects nothing"
        return warn(f"ACS {does} at {shown}", *few([read for _, read, _ in on]), cure=_cure(names), **about)
    unknown = [read for _, read, one in found if one is None]
    if unknown:
        why = f"cannot read ACS of {len(unknown)} bridges; this {pci_config.ROOT}"
        return skip(why, *few(unknown), needs_root=True, **about)
    if not found:
        return ok("no bridge between GPU and NIC", **about)
    reads = few([read for _, read, _ in found])
    return ok(f"ACS is off at all {len(found)} bridges between GPU and NIC", *reads, **about)


def _cure(bridges: list[str]) -> str:
    off = "sudo setpci -s {} ECAP_ACS+0x6.w=0000".format
    pause = "; " if len(bridges) <= _SHOWN else "\n"  # a shell takes either; a report must not fold a long line
    command = off(*bridges) if len(bridges) == 1 else f"for b in {' '.join(bridges)}{pause}do {off('$b')}; done"
    return f'BIOS: set "ACS Control" to Disabled; or, until the next reboot:\n{command}'


def _acs_of(host: Host, bridge: str) -> tuple[Evidence, pci_config.Acs | None]:
    """Return the ACS bits in force at a bridge, from its registers or from lspci; None if neither shows them."""
    reading, config = pci_config.read(host, bridge)
    if pci_config.has_extended(config):
        found = pci_config.acs(config)
        return evidence(reading, found or "no ACS"), found or pci_config.Acs(0)
    if len(config) == pci_config.CONVENTIONAL:  # without PCI Express there are no extended capabilities
        return evidence(reading, "no ACS"), pci_config.Acs(0)
    if config:
        return evidence(reading, f"{len(config)} bytes"), None
    told = host.run("lspci", "-s", short(bridge), "-vvv")
    if lines := pci_config.parse_acs(told.text):
        return evidence(told, lines[0]), lines[0]
    if "Capabilities:" in told.text and "<access denied>" not in told.text:
        return evidence(told, "no ACS"), pci_config.Acs(0)
    return evidence(reading), None


def _wants_acs(gpu: Gpu, nic: Nic) -> bool:
    """Return whether the pair needs ACS on: a ConnectX-8 has a second, direct path to a Blackwell GPU."""
    told = f"{gpu.smi.get('Product Architecture', '')} {gpu.model}".strip()
    return bool(nic.pci and nic.pci.device == _CONNECTX8) and ("Blackwell" in told or not told)


def _what_rdma_topo_says(machine: Machine, about: Subject) -> Finding:
    """Ask rdma_topo, which knows the ACS settings of such machines (rdma-core, kernel-boot/rdma_topo)."""
    told = machine.host.run("rdma_topo", "check")
    wrong = [evidence(told, line) for line in told.text.splitlines() if line.startswith(("FAIL", "ERROR"))]
    more = "run: sudo rdma_topo check" if told.trouble is not Trouble.ABSENT else "install rdma_topo (rdma-core)"
    if wrong:
        return warn(
            "rdma_topo: ACS is wrong for a ConnectX-8 with a Blackwell GPU", *few(wrong),
            cure="sudo rdma_topo write-grub-acs && sudo reboot", reboot=True, **about,
        )
    if told.ok:
        return ok("rdma_topo: ACS is right for a ConnectX-8 with a Blackwell GPU", told, **about)
    return skip(f"ConnectX-8 and Blackwell need their own settings; {more}", told, **about)


CHECKS = (acs,)
