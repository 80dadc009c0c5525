"""The doctor's checks of what is set in a card's firmware."""

import pytest

from doctor_rig import DATA, READY, answer, changed, command, file, folder, found, link, of_cause, report, without
from gpunetio.doctor import Machine, Status, Use, Wanted, examine, lines_of
from gpunetio.doctor.finding import Readiness
from gpunetio.doctor.machine import mlxconfig
from gpunetio.doctor.machine.host import Kind, Reading
from gpunetio.doctor.machine.recording import ReplayHost

OK, WARN, FAIL, SKIP = Status
PCI = "/sys/bus/pci/devices"
QUERY = "mlxconfig -d 0000:b5:00.0 -e q"
TABLE = READY.run(*QUERY.split()).text
LAYER = "/sys/class/infiniband/mlx5_0/ports/1/link_layer"
BLUEFIELD = [file(f"{PCI}/0000:b5:00.{port}/device", "0xa2dc") for port in (0, 1)]
# The guide's NIC mode, and what mst tells where the card is a BlueField.
NIC_MODE = (DATA / "seed" / "mlxconfig_bluefield.txt").read_text()
BLUEFIELD_MST = (DATA / "seed" / "mst_status_bluefield.txt").read_text().replace("9f:", "b5:")
MST = command("mst status -v", BLUEFIELD_MST)
NO_TOOL = [without(Kind.COMMAND, *QUERY.replace("mlxconfig", name).split()) for name in ("mlxconfig", "mstconfig")]
BLUEFIELD_2 = [file(f"{PCI}/0000:b5:00.{port}/device", "0xa2d6") for port in (0, 1)]
OF_ARM = NIC_MODE.replace("EXT_HOST_PF(1)", "ECPF(0)").replace("DISABLED(1)", "ENABLED(0)")
VIRTUAL = file(f"{PCI}/0000:b5:00.0/device", "0x101e")
COLD = "cold reboot: ipmitool power cycle"


def table(**values: str) -> Reading:
    """The ready card's settings with other values: "next" or "current next"."""
    lines = []
    for line in TABLE.splitlines():
        name = line.lstrip("* ").split(" ")[0]
        now = values.get(name, "").split()
        lines.append(f"        {name:<44}{'-':<20} {now[0]:<20} {now[-1]:<20}" if now else line)
    return command(QUERY, "\n".join(lines))


def test_ready_machine():
    assert [f.status for f in found("nic-link-type")] == [OK, OK]
    assert [f.status for f in found("accurate-send")] == [OK, OK]
    assert [f.summary for f in found("bluefield-mode")] == ["not a BlueField"] * 2


# cause: what is changed, which check tells, how, and words of its summary and cure
CAUSES = {
    "port is InfiniBand": (
        [file(LAYER, "InfiniBand")], "nic-link-type", FAIL, "no Ethernet queues",
        f"sudo mlxconfig -d /dev/mst/mt4125_pciconf0 --yes set LINK_TYPE_P1=2, then a {COLD}",
    ),
    "mst is not started": (
        [file(LAYER, "InfiniBand"), without(Kind.FOLDER, "/dev/mst")], "nic-link-type", FAIL, "no Ethernet queues",
        "sudo mlxconfig -d 0000:b5:00.0 --yes set LINK_TYPE_P1=2,",
    ),
    "link goes down with its driver": (
        [table(KEEP_ETH_LINK_UP_P1="False(0)")], "nic-link-type", WARN, "KEEP_ETH_LINK_UP_P1 is False(0)",
        f"--yes set KEEP_ETH_LINK_UP_P1=1, then a {COLD}",
    ),
    "InfiniBand after the next boot": (
        [table(LINK_TYPE_P1="ETH(2) IB(1)")], "nic-link-type", WARN, "LINK_TYPE_P1 is IB(1)", "LINK_TYPE_P1=2",
    ),
    "set, and not yet rebooted": (
        [table(KEEP_IB_LINK_UP_P1="True(1) False(0)")], "nic-link-type", WARN, "the next cold reboot", f"a {COLD}",
    ),
    "user is not root": (
        [command(QUERY, "", error="exit status 1: -E- Failed to open the device"),
         answer("user", value={"uid": 1000, "gid": 1000})],
        "nic-link-type", SKIP, "sudo gpunetio doctor", "",
    ),
    "no firmware tools": (NO_TOOL, "nic-link-type", SKIP, "mlxconfig is not installed", ""),
    "mlxconfig fails": (
        [command(QUERY, "", error="exit status 3: -E- Unsupported FW"), answer("user", value={"uid": 0, "gid": 0})],
        "nic-link-type", SKIP, "no settings", "",
    ),
    "BlueField in NIC mode": ([*BLUEFIELD, command(QUERY, NIC_MODE), MST], "bluefield-mode", OK, "NIC mode", ""),
    "BlueField in DPU mode": (
        [*BLUEFIELD, command(QUERY, NIC_MODE.replace("DISABLED(1)", "ENABLED(0)")), MST], "bluefield-mode", FAIL,
        "DPU mode: INTERNAL_CPU_OFFLOAD_ENGINE is ENABLED(0)",
        f"sudo mlxconfig -d /dev/mst/mt41692_pciconf0 --yes set INTERNAL_CPU_OFFLOAD_ENGINE=1, then a {COLD}",
    ),
    "BlueField-2 that the Arm cores supply": (
        [*BLUEFIELD_2, command(QUERY, NIC_MODE.replace("EXT_HOST_PF(1)", "ECPF(0)")), MST], "bluefield-mode", FAIL,
        "INTERNAL_CPU_PAGE_SUPPLIER is ECPF(0), and 2 more",
        "INTERNAL_CPU_PAGE_SUPPLIER=1 INTERNAL_CPU_ESWITCH_MANAGER=1 INTERNAL_CPU_IB_VPORT0=1,",
    ),
    "BlueField set to NIC mode, and not yet rebooted": (
        [*BLUEFIELD, command(QUERY, "Configurations:  Default Current Next Boot\n"
                                    "* INTERNAL_CPU_OFFLOAD_ENGINE ENABLED(0) ENABLED(0) DISABLED(1)\n")],
        "bluefield-mode", FAIL, "DPU mode: right only after the next cold reboot", f"a {COLD}",
    ),
    "BlueField's mode needs root": (
        [*BLUEFIELD, command(QUERY, "", error="exit status 1"), answer("user", value={"uid": 7, "gid": 7})],
        "bluefield-mode", SKIP, "sudo gpunetio doctor", "",
    ),
    "no real-time clock": (
        [table(REAL_TIME_CLOCK_ENABLE="False(0)")], "accurate-send", OK, "off; only wait_on_time needs it",
        f"--yes set REAL_TIME_CLOCK_ENABLE=1, then a {COLD}",
    ),
    "real-time clock from the next boot on": (
        [table(REAL_TIME_CLOCK_ENABLE="False(0) True(1)")], "accurate-send", OK, "next cold reboot", f"a {COLD}",
    ),
    "firmware without scheduling": (
        [command(QUERY, "LINK_TYPE_P1 ETH(2)")], "accurate-send", SKIP, "does not have it; only", "ConnectX-7",
    ),
    "BlueField-3 in NIC mode, with other settings": (
        [*BLUEFIELD, command(QUERY, NIC_MODE.replace("EMBEDDED_CPU(1)", "SEPARATED(0)")), MST],
        "bluefield-mode", OK, "NIC mode", "",
    ),
    "BlueField-3 in DPU mode, with other settings": (
        [*BLUEFIELD, command(QUERY, OF_ARM), MST], "bluefield-mode", FAIL,
        "DPU mode: INTERNAL_CPU_OFFLOAD_ENGINE is ENABLED(0), and 3 more",
        "set INTERNAL_CPU_OFFLOAD_ENGINE=1 INTERNAL_CPU_PAGE_SUPPLIER=1",
    ),
    "BlueField-3 of which the engine is unknown": (
        [*BLUEFIELD, command(QUERY, "INTERNAL_CPU_MODEL EMBEDDED_CPU(1)")],
        "bluefield-mode", SKIP, "no INTERNAL_CPU_OFFLOAD_ENGINE", "",
    ),
    "PCI device is hidden": ([without(Kind.FILE, f"{PCI}/0000:b5:00.0/device")], "bluefield-mode", SKIP, "read", ""),
    "another maker's card": ([file(f"{PCI}/0000:b5:00.0/vendor", "0x14e4")], "bluefield-mode", OK, "not a Blue", ""),
    "virtual function": ([VIRTUAL], "bluefield-mode", OK, "not a BlueField", ""),
    "another maker's InfiniBand": (
        [file(f"{PCI}/0000:b5:00.0/vendor", "0x1077"), file(LAYER, "InfiniBand")],
        "nic-link-type", FAIL, "no Ethernet queues", "use a port of an Ethernet card",
    ),
    "no scheduling on InfiniBand": ([file(LAYER, "InfiniBand")], "accurate-send", SKIP, "only for Ethernet", ""),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_causes(cause):
    first = of_cause(*CAUSES[cause])[0]
    cure = CAUSES[cause][-1]
    assert bool(first.cure) == (bool(cure) or first.status in (WARN, FAIL))
    assert first.reboot == (first.status in (WARN, FAIL) and COLD in first.cure)


def test_infiniband_port_serves_verbs():
    findings = found("nic-link-type", file(LAYER, "InfiniBand"), table(
        LINK_TYPE_P1="IB(1)", KEEP_ETH_LINK_UP_P1="False(0)", KEEP_IB_LINK_UP_P1="True(1)",
    ))
    assert [(f.status, f.nic) for f in findings] == [(FAIL, "mlx5_0"), (OK, "mlx5_0"), (OK, "mlx5_1")]
    assert findings[0].uses == {Use.ETHERNET}
    assert Use.ETHERNET not in (findings[1].uses or ())


def test_second_port_has_settings_of_its_own():
    first, second = found("nic-link-type", table(KEEP_ETH_LINK_UP_P2="False(0)"))
    assert (first.status, second.status) == (OK, WARN)
    assert "KEEP_ETH_LINK_UP_P2=1" in second.cure


def test_keep_link_up_is_asked_of_connectx_only():
    findings = found("nic-link-type", *BLUEFIELD, table(KEEP_ETH_LINK_UP_P1="False(0)"))
    assert [f.status for f in findings] == [OK, OK]


def test_mstflint_tells_the_same():
    other = command(QUERY.replace("mlxconfig", "mstconfig"), TABLE.replace("True(1)", "False(0)"))
    finding, _ = found("accurate-send", *NO_TOOL, other)
    assert finding.cure.startswith("sudo mstconfig -d 0000:b5:00.0 --yes set ACCURATE_TX_SCHEDULER=1 REAL_TIME_CLOCK_")


class Counting(ReplayHost):
    """Remembers what is fetched."""

    def __init__(self, host: ReplayHost):
        super().__init__(host.recorded)
        self.fetched: list[tuple[str, ...]] = []

    def fetch(self, kind: Kind, key: tuple[str, ...]) -> Reading:
        self.fetched.append(key)
        return super().fetch(kind, key)


def test_a_card_is_asked_once_for_all_its_functions():
    host = Counting(READY)
    examine(host)
    assert [key for key in host.fetched if key[0] == "mlxconfig"] == [tuple(QUERY.split())]
    assert ("mst", "status", "-v") not in host.fetched, "nothing is wrong, so no cure names a device"


def test_each_card_is_asked():
    cards = [f"0000:{bus}:00.0" for bus in ("01", "02", "03")]
    links = [link(f"{PCI}/{card}", f"/sys/devices/pci0000:00/{card}") for card in cards]
    ids = {"vendor": "0x15b3", "device": "0x1021", "class": "0x020000"}
    files = [file(f"{PCI}/{card}/{name}", value) for card in cards for name, value in ids.items()]
    host = Counting(changed(READY, folder("/sys/class/infiniband"), folder(PCI, *cards), *links, *files))
    mlxconfig.ask_all(Machine(host, Wanted()))
    assert sorted(key[2] for key in host.fetched if key[0] == "mlxconfig") == cards


def test_a_virtual_function_is_not_asked_but_its_link_layer_counts():
    assert found("accurate-send", VIRTUAL)[0].summary == "a virtual function has no settings of its own"
    first, second, _ = found("nic-link-type", VIRTUAL, file(LAYER, "InfiniBand"))
    assert (first.status, first.uses, first.reboot) == (FAIL, {Use.ETHERNET}, False)
    assert first.cure.endswith("set it on the hypervisor's physical function")
    assert "mlxconfig" not in first.cure
    assert second.status is SKIP


def test_a_wanted_infiniband_port_is_left_alone():
    first, *_ = found("nic-link-type", file(LAYER, "InfiniBand"))
    assert first.summary == "InfiniBand: no Ethernet queues"
    assert first.cure.startswith("RDMA needs no change; for Ethernet: sudo mlxconfig")


@pytest.mark.parametrize(
    ("changes", "readiness"),
    [([command(QUERY, NIC_MODE)], Readiness.READY), (NO_TOOL, Readiness.UNKNOWN),
     ([command(QUERY, OF_ARM)], Readiness.NOT_READY)],
)
def test_verdicts_hang_on_a_bluefields_mode(changes, readiness):
    assert report(*BLUEFIELD, MST, *changes).ready(Use.VERBS).readiness is readiness


def test_verdicts_on_other_cards_need_no_firmware_tools():
    assert report(*NO_TOOL).ready(Use.VERBS).readiness is Readiness.READY


def test_how_to_get_what_few_need_is_told_when_all_is():
    some = report(table(REAL_TIME_CLOCK_ENABLE="False(0)"))
    (how,) = [f.cure for f in some.findings if f.check.id == "accurate-send" and f.nic == "mlx5_0"]
    plain, verbose = (" ".join(" ".join(lines_of(some, verbose)).split()) for verbose in (False, True))
    assert how in verbose
    assert how not in plain
