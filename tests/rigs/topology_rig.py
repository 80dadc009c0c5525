"""Machines for tests of the topology, composed of cards."""

from __future__ import annotations

from dataclasses import dataclass

from doctor_rig import DATA, Change, changed, command, file, folder, link
from gpunetio.doctor import Machine, ReplayHost, Wanted
from gpunetio.doctor.machine.pci import FOLDER, PciDevice

_KINDS = {"gpu": (0x10DE, 0x2330, 0x030200), "nic": (0x15B3, 0x1021, 0x020700), "bridge": (0x1000, 0xC030, 0x060400)}


@dataclass(frozen=True)
class Card:
    """A GPU or a NIC and where it is plugged in: "pci0000:b0/b0:02.0/b1:00.0"."""

    kind: str
    where: str
    numa: int = 0
    name: str = ""  # of the RDMA device

    @property
    def root(self) -> str:
        return self.where.partition("/")[0]

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(f"{self.root[3:7]}:{step}" for step in self.where.split("/")[1:])

    @property
    def pci(self) -> PciDevice:
        """What the doctor should make of it."""
        vendor, device, class_code = _KINDS[self.kind]
        return PciDevice(self.path[-1], vendor, device, class_code >> 16, self.numa, self.root, self.path)


def gpu(where: str, numa: int = 0) -> Card:
    return Card("gpu", where, numa)


def nic(name: str, where: str, numa: int = 0) -> Card:
    return Card("nic", where, numa, name)


def built(*cards: Card, topo_m: str = "") -> ReplayHost:
    """A machine with these, and with what `nvidia-smi topo -m` prints there."""
    said = [link("/dev/nvidiactl", "/dev/nvidiactl"), command("nvidia-smi topo -m", topo_m)] if topo_m else []
    nics = {card.name: card for card in cards if card.name}
    places = {}
    for card in cards:
        for depth, address in enumerate(card.path):
            kind = card.kind if address == card.path[-1] else "bridge"
            places[address] = kind, "/".join(("/sys/devices", card.root, *card.path[: depth + 1])), card.numa
    return changed(
        ReplayHost({}), *said, folder(FOLDER, *places), folder("/sys/class/infiniband", *nics),
        *(change for address, place in places.items() for change in _function(address, *place)),
        *(link(f"/sys/class/infiniband/{name}/device", places[one.path[-1]][1]) for name, one in nics.items()),
    )


def _function(address: str, kind: str, target: str, numa: int) -> list[Change]:
    at = f"{FOLDER}/{address}"
    values = dict(zip(("vendor", "device", "class"), map(hex, _KINDS[kind]))) | {"numa_node": str(numa)}
    return [link(at, target), *(file(f"{at}/{name}", f"{value}\n") for name, value in values.items())]


def machine(host: ReplayHost, gpu: str = "", nic: str = "") -> Machine:
    return Machine(host, Wanted(gpu, nic))


# The converged card whose lspci the set-up guide prints: a BlueField-2 and a GPU behind switches of one card.
CONVERGED = built(
    nic("mlx5_0", "pci0000:b0/b0:02.0/b1:00.0/b2:00.0/b3:00.0"),
    nic("mlx5_1", "pci0000:b0/b0:02.0/b1:00.0/b2:00.0/b3:00.1"),
    gpu("pci0000:b0/b0:02.0/b1:00.0/b2:01.0/b4:00.0/b5:08.0/b6:00.0"),
)

EIGHT_TOPO_M = (DATA / "topo_m_eight_gpus.txt").read_text()


def _pair(number: int) -> tuple[Card, Card]:
    """A GPU behind a switch of its own, and a NIC behind a second switch below that."""
    bus, numa = 0x10 * number, number // 4
    switch = f"pci{0:04x}:{bus:02x}/{bus:02x}:01.0/{bus + 1:02x}:00.0"
    below = f"{switch}/{bus + 2:02x}:01.0/{bus + 4:02x}:00.0/{bus + 5:02x}:00.0"
    return (
        gpu(f"{switch}/{bus + 2:02x}:00.0/{bus + 3:02x}:00.0", numa),
        nic(f"mlx5_{10 + number}", f"{below}/{bus + 6:02x}:00.0", numa),
    )


# Two sockets with four GPUs each, and a ninth NIC for storage: the machine of `topo_m_eight_gpus.txt`.
EIGHT = built(
    *(card for number in range(8) for card in _pair(number)), nic("mlx5_bond_0", "pci0000:f0/f0:01.0/f1:00.0", 1),
    topo_m=EIGHT_TOPO_M,
)
