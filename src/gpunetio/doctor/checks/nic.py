"""Check the NICs: presence, model, driver, firmware and permissions."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import GUIDE, HARDWARE, Finding, check, evidence, fail, ok, skip, warn
from ..machine.containers import container_kind
from ..machine.devices import INFINIBAND, Machine, Nic
from ..machine.host import Reading, Trouble
from ..machine.nics import Grade, each_nic, is_nvidia, model_of
from ..machine.pci import FOLDER

AREA = "NICs"
_VERBS = "/sys/class/infiniband_verbs"
_MODULES = ("mlx5_core", "mlx5_ib", "ib_uverbs")


@check(
    "nic-present", "Network card",
    why="A GPU sends and receives through a ConnectX or BlueField card in the same machine.",
    cure="plug in a ConnectX-6 Dx or later and load its driver: sudo modprobe mlx5_ib; or use the software NIC",
    source=f"{GUIDE}: ConnectX NIC", uses=HARDWARE, essential=True,
)
def present(machine: Machine) -> Iterator[Finding]:
    """Find RDMA devices, and cards without a driver."""
    readings = [machine.host.names(INFINIBAND), machine.host.names(FOLDER)]
    unreadable = [r for r in readings if r.trouble not in (Trouble.NONE, Trouble.ABSENT)]
    if machine.nics:
        yield ok(", ".join(nic.name for nic in machine.nics), evidence(readings[0], " ".join(readings[0].names)))
    elif unreadable:
        yield skip("cannot find out whether there is a NIC", *unreadable)
    else:
        yield fail("no RDMA device and no NVIDIA/Mellanox card", *readings)


# RDMA that is neither InfiniBand nor RoCE, so mlx5 peers do not understand it: `node_type_show` and `enum
# rdma_node_type` in Linux drivers/infiniband/core/sysfs.c and include/rdma/ib_verbs.h. "1: CA" stands for either.
_OTHER_RDMA = {
    "2": "a switch", "3": "a router", "4": "iWARP (RNIC)", "5": "usNIC", "6": "usNIC", "7": "a vendor's own transport",
}


@check(
    "nic-model", "Model of the network card",
    why="A GPU can drive the work queues of mlx5 cards by itself. Cards of other kinds have no such queues.",
    cure="use a ConnectX-6 Dx or later, or BlueField-2 or later",
    source=f"{GUIDE}: ConnectX NIC; Linux mlx5_core_pci_table", uses=HARDWARE,
)
@each_nic
def model(machine: Machine, nic: Nic) -> Iterator[Finding]:
    """Look up the model by its PCI ids."""
    node = machine.host.read(f"{nic.folder}/node_type")
    if other := _OTHER_RDMA.get(node.text.partition(":")[0]):
        yield fail(f"{other}: neither InfiniBand nor RoCE", node)
        return
    elsewhere = "for GPUs use a ConnectX-6 Dx or later; CPU-driven verbs and the software NIC work on this machine"
    if nic.pci is None:
        link = machine.host.follow(f"{nic.folder}/device")
        if nic.address or link.trouble not in (Trouble.NONE, Trouble.ABSENT):
            yield skip("its PCI device is not visible here", link)
        else:
            yield fail("a software device, not a PCI device: no doorbells for a GPU", link, cure=elsewhere)
        return
    ids = [machine.host.read(f"{nic.pci.folder}/{name}") for name in ("vendor", "device")]
    name = f"{nic.pci.vendor:04x}:{nic.pci.device:04x}" if min(nic.pci.vendor, nic.pci.device) >= 0 else "?"
    found = model_of(machine, nic.pci) if is_nvidia(nic) else None
    if nic.pci.vendor < 0:
        yield skip("cannot read its PCI vendor", *ids)
    elif not is_nvidia(nic):
        yield fail(f"PCI {name} is not an NVIDIA card: no DEVX, no doorbells for a GPU", *ids, cure=elsewhere)
    elif found is None:
        yield skip(f"PCI {name} is not a known model", *ids)
    else:
        say = {Grade.RECOMMENDED: ok, Grade.OLD: warn, Grade.NONE: fail, Grade.UNKNOWN: skip}[found.grade]
        yield say(f"{found.name}: {found.grade.value}" if say is not ok else found.name, *ids)


@check(
    "nic-driver", "Driver of the network card",
    why="Programs reach a card through the RDMA device that the driver mlx5_ib creates for it.",
    cure="sudo modprobe -a mlx5_core mlx5_ib ib_uverbs",
    source="Linux drivers/infiniband/hw/mlx5", uses=HARDWARE,
)
@each_nic
def driver(machine: Machine, nic: Nic) -> Iterator[Finding]:
    """Check that a card has an RDMA device, which needs mlx5_core, mlx5_ib and ib_uverbs."""
    if not is_nvidia(nic):
        yield skip("not an NVIDIA card")
        return
    modules = {name: machine.host.names(f"/sys/module/{name}") for name in _MODULES}
    if nic.rdma:
        versions = {name: machine.host.read(f"/sys/module/{name}/version") for name in _MODULES}
        told = [r for r in versions.values() if r.ok]
        kernel = machine.host.read("/proc/sys/kernel/osrelease")
        yield ok(f"mlx5 {told[0].text}" if told else f"the mlx5 driver of kernel {kernel.text}", *(told or [kernel]))
        return
    link = machine.host.follow(f"{FOLDER}/{nic.address}/driver")
    bound = link.text.rpartition("/")[2]
    missing = [name for name, reading in modules.items() if reading.trouble is Trouble.ABSENT]
    if bound and bound != "mlx5_core":
        yield fail(
            f"no RDMA device: it is bound to the driver {bound}", link,
            cure=f"echo {nic.address} | sudo tee {FOLDER}/{nic.address}/driver/unbind; "
                 f"echo {nic.address} | sudo tee /sys/bus/pci/drivers/mlx5_core/bind",
        )
    elif missing:
        cure = f"sudo modprobe -a {' '.join(missing)}"
        yield fail(f"no RDMA device: {', '.join(missing)} not loaded", *(modules[m] for m in missing), cure=cure)
    else:
        cure = f"look for the error: sudo dmesg | grep -i -e mlx5 -e {nic.address}; update its firmware and driver"
        yield fail("no RDMA device, although the modules are loaded", link, cure=cure)


@check(
    "nic-firmware", "Firmware of the network card",
    why="NVIDIA tests a DOCA release with the firmware of its time. Bug reports and comparisons need the version.",
    cure="sudo mlxfwmanager --online -u -d <PCI address>",
    source=f"{GUIDE}: ConnectX NIC", uses=HARDWARE,
)
@each_nic
def firmware(machine: Machine, nic: Nic) -> Iterator[Finding]:
    """Report the firmware's version and the board."""
    readings = [machine.host.read(f"{nic.folder}/{name}") for name in ("fw_ver", "hca_type", "board_id")]
    if not nic.rdma:
        yield skip("no RDMA device")
    elif not readings[0].text:
        yield skip("cannot read its version", readings[0])
    else:
        board = ", ".join(r.text for r in readings[1:] if r.text)
        yield ok(f"{readings[0].text} ({board})" if board else readings[0].text, *readings)


@check(
    "uverbs", "Device node of the network card",
    why="Every program that uses the card first opens /dev/infiniband/uverbsN.",
    cure="sudo modprobe ib_uverbs",
    source="Linux Documentation/infiniband/user_verbs.rst", uses=HARDWARE, essential=True,
)
@each_nic
def uverbs(machine: Machine, nic: Nic) -> Iterator[Finding]:
    """Check that the device node exists and that this user may open it."""
    if not nic.rdma:
        yield skip("no RDMA device")
        return
    folder = machine.host.names(_VERBS)
    owners = {name: machine.host.read(f"{_VERBS}/{name}/ibdev") for name in folder.names if name.startswith("uverbs")}
    name = next((name for name, owner in owners.items() if owner.text == nic.name), "")
    if not name:
        if folder.trouble in (Trouble.NONE, Trouble.ABSENT):
            yield fail("no device node: the module ib_uverbs is not loaded", folder, *owners.values())
        else:
            yield skip("cannot find its device node", folder)
        return
    node = f"/dev/infiniband/{name}"
    opened = machine.host.ask("opens", node)
    if opened.ok:
        yield ok(f"{node} opens", opened)
    elif opened.trouble is Trouble.ABSENT or "not permitted" in opened.error:
        yield _hidden(machine, node, opened)
    elif opened.trouble is Trouble.DENIED:
        who = machine.host.ask("permissions", node)
        yield fail(
            f"this user may not open {node}", opened, who,
            cure=f"sudo chmod 666 {node}, as rdma-core's udev rules do, or run as root{_also(who)}",
        )
    elif opened.trouble in (Trouble.FAILED, Trouble.TIMEOUT):
        yield fail(f"{node} does not open", opened, cure="look for errors of the card: sudo dmesg | tail")
    else:
        yield skip(f"{node} was not tried", opened)


def _hidden(machine: Machine, node: str, opened: Reading) -> Finding:
    """Judge a node that does not exist, or that the container's device list hides."""
    kind, told = container_kind(machine.host)
    if kind or opened.trouble is not Trouble.ABSENT:
        return fail(
            f"this container has no {node}", opened, *([told] if kind else []),
            cure=f"docker run --device={node} --cap-add=IPC_LOCK …",
        )
    return fail(f"{node} does not exist", opened, cure="sudo udevadm trigger --subsystem-match=infiniband_verbs")


def _also(who: Reading) -> str:
    """Return a cure by the node's group; "" if the group does not help."""
    group = who.value.get("group") if isinstance(who.value, dict) else None
    may = who.value.get("mode", "") if isinstance(who.value, dict) else ""
    readable = isinstance(may, str) and may[-2:-1] in ("6", "7")
    return f", or join its group: sudo usermod -aG {group} $USER" if group not in (None, "root") and readable else ""


CHECKS = (present, model, driver, firmware, uverbs)
