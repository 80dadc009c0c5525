"""Which GPUs and NICs the doctor sees, on machines whose sysfs is not plain."""

import pytest

from doctor_rig import READY, changed, file, folder, link
from gpunetio.doctor import Machine, Wanted
from gpunetio.errors import InvalidValueError

INFINIBAND, PCI, NET = "/sys/class/infiniband", "/sys/bus/pci/devices", "/sys/class/net"
CARD = "/sys/devices/pci0000:b0/0000:b0:02.0/0000:b1:00.0/0000:b2:00.0/0000:b5:00.0"
VF = "0000:b5:00.2"
VIRTUAL = (
    folder(PCI, *READY.names(PCI).names, VF),
    file(f"{PCI}/{VF}/vendor", "0x15b3\n"), file(f"{PCI}/{VF}/device", "0x101e\n"),
    file(f"{PCI}/{VF}/class", "0x020000\n"), link(f"{PCI}/{VF}", f"{CARD[:-12]}{VF}"),
    link(f"{PCI}/{VF}/physfn", CARD),
)


def machine(*changes, wanted: Wanted | None = None) -> Machine:
    return Machine(changed(READY, *changes), wanted or Wanted())


def names(some: Machine) -> list[tuple[str, str]]:
    return [(nic.name, nic.address) for nic in some.nics]


PLAIN = [("mlx5_0", "0000:b5:00.0"), ("mlx5_1", "0000:b5:00.1")]


def test_plain():
    assert names(machine()) == PLAIN


def test_a_sub_function_is_below_its_card():
    sub = link(f"{INFINIBAND}/mlx5_2/device", f"{CARD}/mlx5_core.sf.4")
    assert names(machine(folder(INFINIBAND, "mlx5_0", "mlx5_1", "mlx5_2"), sub)) == [*PLAIN, ("mlx5_2", "0000:b5:00.0")]


def test_a_software_device_is_no_card_though_it_shows_one():
    """As kernels before 5.11 do."""
    here = machine(
        folder(INFINIBAND, "mlx5_0", "mlx5_1", "rxe0"), link(f"{INFINIBAND}/rxe0/device", CARD),
        file(f"{INFINIBAND}/rxe0/parent", "ens6f0\n"),
    )
    assert names(here) == [*PLAIN, ("rxe0", "")]
    assert here.nics[2].interfaces == ("ens6f0",)


def test_a_virtual_function_of_a_guest_is_not_ours():
    assert names(machine(*VIRTUAL)) == PLAIN


def test_a_virtual_function_with_a_driver_is():
    ours = (folder(INFINIBAND, "mlx5_0", "mlx5_1", "mlx5_2"), link(f"{INFINIBAND}/mlx5_2/device", f"{CARD[:-12]}{VF}"))
    assert names(machine(*VIRTUAL, *ours)) == [*PLAIN, ("mlx5_2", VF)]


def test_a_bond_stands_for_both_ports():
    bond = (
        folder(INFINIBAND, "mlx5_bond_0"), link(f"{INFINIBAND}/mlx5_bond_0/device", CARD),
        folder(f"{INFINIBAND}/mlx5_bond_0/device/net", "ens6f0"), folder(f"{PCI}/0000:b5:00.1/net", "ens6f1"),
        link(f"{NET}/ens6f0/master", "/sys/devices/virtual/net/bond0"),
    )
    assert names(machine(*bond)) == [("mlx5_bond_0", "0000:b5:00.0"), ("0000:b5:00.1", "0000:b5:00.1")]
    both = link(f"{NET}/ens6f1/master", "/sys/devices/virtual/net/bond0")
    assert names(machine(*bond, both)) == [("mlx5_bond_0", "0000:b5:00.0")]


@pytest.mark.parametrize("wanted", ["mlx5_9", "soft", "b6:00.0", " "])
def test_a_nic_that_is_not_there(wanted):
    software = (folder(INFINIBAND, "mlx5_0", "rxe0"), file(f"{INFINIBAND}/rxe0/parent", "ens6f0\n"))
    here = machine(*software, wanted=Wanted(nic=wanted))
    assert here.nics == ()
    with pytest.raises(InvalidValueError, match="no NIC is"):
        here.require_wanted()


def test_a_software_nic_can_be_wanted():
    here = machine(wanted=Wanted(nic="soft1"))
    here.require_wanted()
    assert here.nics == ()
