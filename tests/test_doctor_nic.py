"""The doctor's checks of network cards, of their firmware's settings, and of RDMA software."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doctor_rig import DATA, READY, answer, changed, command, file, folder, found, link, report, without
from gpunetio.doctor import LiveHost, Machine, Status, Use, Wanted, examine
from gpunetio.doctor import mlxconfig as tool
from gpunetio.doctor.finding import Readiness
from gpunetio.doctor.host import Kind, Reading, Trouble
from gpunetio.doctor.recording import ReplayHost

OK, WARN, FAIL, SKIP = Status
CHECKS = (
    "nic-present", "nic-model", "nic-driver", "nic-firmware", "uverbs", "nic-link-type", "bluefield-mode",
    "accurate-send", "rdma-core", "doca-version",
)  # fmt: skip
IB, PCI = "/sys/class/infiniband", "/sys/bus/pci/devices"
CARD, DRIVERS = f"{PCI}/0000:b5:00.0", "/sys/bus/pci/drivers"
QUERY = "mlxconfig -d 0000:b5:00.0 -e q"
TABLE = READY.run(*QUERY.split()).text
LAYER = f"{IB}/mlx5_0/ports/1/link_layer"
NODE = "/dev/infiniband/uverbs0"
NO_RDMA = folder(IB)
BLUEFIELD = [file(f"{PCI}/0000:b5:00.{port}/device", "0xa2dc") for port in (0, 1)]
# The guide's NIC mode, and what mst tells where the card is a BlueField.
NIC_MODE = (DATA / "seed" / "mlxconfig_bluefield.txt").read_text()
BLUEFIELD_MST = (DATA / "seed" / "mst_status_bluefield.txt").read_text().replace("9f:", "b5:")
MST = command("mst status -v", BLUEFIELD_MST)
NO_TOOL = [without(Kind.COMMAND, *QUERY.replace("mlxconfig", name).split()) for name in ("mlxconfig", "mstconfig")]
COLD = "cold reboot: ipmitool power cycle"


def refused(path: str, error: str, trouble: Trouble = Trouble.DENIED) -> Reading:
    return Reading(Kind.QUESTION, ("opens", path), None, trouble, error)


def table(**values: str) -> Reading:
    """The ready card's settings with other values: "next" or "current next"."""
    lines = []
    for line in TABLE.splitlines():
        name = line.lstrip("* ").split(" ")[0]
        now = values.get(name, "").split()
        lines.append(f"        {name:<44}{'-':<20} {now[0]:<20} {now[-1]:<20}" if now else line)
    return command(QUERY, "\n".join(lines))


def library(name: str, **other: object) -> Reading:
    value = {"file": f"/usr/lib/{name}.so.1.14.50.0", "lacks": [], "lacks_optional": []} | other
    return answer("verbs_library", name, value=value)


def test_ready_machine():
    for id in CHECKS:
        some = found(id)
        expected = SKIP if id == "bluefield-mode" else OK
        assert [f.status for f in some] == [expected] * len(some), id
        assert all(f.read for f in some if f.status is OK), id


# cause: what is changed, which check tells, how, and words of its summary and cure
CAUSES = {
    "no hardware at all": ([NO_RDMA, folder(PCI)], "nic-present", FAIL, "no RDMA device", "ConnectX-6 Dx"),
    "nothing may be seen": (
        [without(Kind.FOLDER, IB, trouble=Trouble.DENIED), folder(PCI)], "nic-present", SKIP, "cannot see", "",
    ),
    "ConnectX-5": ([file(f"{CARD}/device", "0x1017")], "nic-model", WARN, "ConnectX-5: mlx5, but older", "6 Dx"),
    "BlueField-1": ([file(f"{CARD}/device", "0xa2d2")], "nic-model", WARN, "BlueField (ConnectX-5)", "BlueField-2"),
    "ConnectX-3": ([file(f"{CARD}/device", "0x1003")], "nic-model", FAIL, "no mlx5", "ConnectX-6 Dx"),
    "ConnectX-8": ([file(f"{CARD}/device", "0x1023")], "nic-model", OK, "ConnectX-8", ""),
    "model of the future": ([file(f"{CARD}/device", "0x1fff")], "nic-model", SKIP, "15b3:1fff", ""),
    "virtual function in a guest": (
        [file(f"{CARD}/device", "0x101e")], "nic-model", SKIP, "ConnectX virtual function", "",
    ),
    "virtual function of the second port": (
        [file(f"{CARD}/device", "0x101e"), link(f"{CARD}/physfn", f"{PCI}/0000:b5:00.1")],
        "nic-model", OK, "ConnectX-6 Dx", "",
    ),
    "card of another maker": ([file(f"{CARD}/vendor", "0x14e4")], "nic-model", FAIL, "14e4:101d", "software NIC"),
    "Soft-RoCE": (
        [without(Kind.LINK, f"{IB}/mlx5_0/device")], "nic-model", FAIL, "no PCI device", "work, and the software NIC",
    ),
    "device's link is hidden": (
        [without(Kind.LINK, f"{IB}/mlx5_0/device", trouble=Trouble.DENIED)], "nic-model", SKIP, "not visible", "",
    ),
    "PCI ids cannot be read": ([without(Kind.FILE, f"{CARD}/vendor")], "nic-model", SKIP, "vendor", ""),
    "mlx5_ib is not loaded": (
        [NO_RDMA, without(Kind.FOLDER, "/sys/module/mlx5_ib"), link(f"{CARD}/driver", f"{DRIVERS}/mlx5_core")],
        "nic-driver", FAIL, "not loaded: mlx5_ib", "sudo modprobe -a mlx5_ib",
    ),
    "the card is given to a guest": (
        [NO_RDMA, link(f"{CARD}/driver", f"{DRIVERS}/vfio-pci")],
        "nic-driver", FAIL, "the driver vfio-pci", f"echo 0000:b5:00.0 | sudo tee {CARD}/driver/unbind; ",
    ),
    "the driver gave up": (
        [NO_RDMA, link(f"{CARD}/driver", f"{DRIVERS}/mlx5_core")],
        "nic-driver", FAIL, "though its modules are loaded", "dmesg",
    ),
    "the kernel's own driver": (
        [without(Kind.FILE, f"/sys/module/{name}/version") for name in ("mlx5_core", "mlx5_ib", "ib_uverbs")],
        "nic-driver", OK, "mlx5 of the kernel, 6.8.0", "",
    ),
    "firmware's version is hidden": ([without(Kind.FILE, f"{IB}/mlx5_0/fw_ver")], "nic-firmware", SKIP, "version", ""),
    "ib_uverbs is not loaded": (
        [without(Kind.FOLDER, "/sys/class/infiniband_verbs")], "uverbs", FAIL, "ib_uverbs", "sudo modprobe ib_uverbs",
    ),
    "docker without the device": (
        [refused(NODE, "No such file or directory", Trouble.ABSENT), file("/.dockerenv", "")], "uverbs", FAIL,
        "this container has no", "docker run --device=/dev/infiniband/uverbs0 --cap-add=IPC_LOCK",
    ),
    "docker's list of devices": (
        [refused(NODE, "Operation not permitted")], "uverbs", FAIL, "this container has no", f"--device={NODE}",
    ),
    "udev did not make the node": (
        [refused(NODE, "No such file or directory", Trouble.ABSENT), without(Kind.FILE, "/.dockerenv")],
        "uverbs", FAIL, "does not exist", "udevadm trigger",
    ),
    "node is root's": (
        [refused(NODE, "Permission denied"),
         answer("permissions", NODE, value={"owner": "root", "group": "root", "mode": "600"})],
        "uverbs", FAIL, "may not be opened by this user", f"sudo chmod 666 {NODE}, as udev",
    ),
    "node is a group's": (
        [refused(NODE, "Permission denied"),
         answer("permissions", NODE, value={"owner": "root", "group": "rdma", "mode": "660"})],
        "uverbs", FAIL, "may not be opened by this user", "sudo usermod -aG rdma $USER",
    ),
    "card is dead": ([refused(NODE, "No such device", Trouble.FAILED)], "uverbs", FAIL, "does not open", "dmesg"),
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
        [table(KEEP_IB_LINK_UP_P1="True(1) False(0)")], "nic-link-type", WARN, "next boot", f"a {COLD}",
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
    "BlueField that the Arm cores supply": (
        [*BLUEFIELD, command(QUERY, NIC_MODE.replace("EXT_HOST_PF(1)", "ECPF(0)")), MST], "bluefield-mode", FAIL,
        "INTERNAL_CPU_PAGE_SUPPLIER is ECPF(0), and 2 more",
        "INTERNAL_CPU_PAGE_SUPPLIER=1 INTERNAL_CPU_ESWITCH_MANAGER=1 INTERNAL_CPU_IB_VPORT0=1,",
    ),
    "BlueField set to NIC mode, and not yet rebooted": (
        [*BLUEFIELD, command(QUERY, "Configurations:  Default Current Next Boot\n"
                                    "* INTERNAL_CPU_OFFLOAD_ENGINE ENABLED(0) ENABLED(0) DISABLED(1)\n")],
        "bluefield-mode", FAIL, "DPU mode: set rightly", f"a {COLD}",
    ),
    "BlueField's mode needs root": (
        [*BLUEFIELD, command(QUERY, "", error="exit status 1"), answer("user", value={"uid": 7, "gid": 7})],
        "bluefield-mode", SKIP, "sudo gpunetio doctor", "",
    ),
    "no real-time clock": (
        [table(REAL_TIME_CLOCK_ENABLE="False(0)")], "accurate-send", WARN, "REAL_TIME_CLOCK_ENABLE is False(0)",
        f"--yes set REAL_TIME_CLOCK_ENABLE=1, then a {COLD}",
    ),
    "firmware without scheduling": (
        [command(QUERY, "LINK_TYPE_P1 ETH(2)")], "accurate-send", WARN, "no accurate send", "ConnectX-7",
    ),
    "no scheduling on InfiniBand": ([file(LAYER, "InfiniBand")], "accurate-send", SKIP, "only Ethernet", ""),
    "libibverbs is missing": (
        [Reading(Kind.QUESTION, ("verbs_library", "libibverbs"), None, Trouble.FAILED, "libibverbs.so.1: cannot open")],
        "rdma-core", FAIL, "libibverbs cannot be loaded", "apt install libibverbs1",
    ),
    "libibverbs of long ago": (
        [library("libibverbs", lacks=["ibv_a", "ibv_b"])], "rdma-core", FAIL, "lacks ibv_a and 1 more", "release 44",
    ),
    "libibverbs without dmabuf": (
        [library("libibverbs", lacks_optional=["ibv_reg_dmabuf_mr"])], "rdma-core", WARN,
        "lacks ibv_reg_dmabuf_mr: GPU memory needs nvidia-peermem", "release 44",
    ),
    "libibverbs before the guide's": (
        [library("libibverbs", file="/usr/lib/libibverbs.so.1.14.39.0")], "rdma-core", WARN, "1.14.39 is older", "44",
    ),
    "neither DOCA nor OFED": (
        [without(Kind.FILE, "/opt/mellanox/doca/applications/VERSION"), without(Kind.COMMAND, "ofed_info", "-s")],
        "doca-version", SKIP, "neither DOCA nor OFED", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_causes(cause):
    changes, check, status, summary, cure = CAUSES[cause]
    first, *others = found(check, *changes)
    assert first.status is status, first
    assert summary in first.summary
    assert cure in first.cure
    assert bool(first.cure) == (status in (WARN, FAIL))
    for finding in (first, *others):
        assert len(finding.summary) < 80
        assert finding.status in (WARN, FAIL) or not finding.reboot


def test_reboot_only_where_firmware_is_set():
    (finding, _) = found("bluefield-mode", *BLUEFIELD, command(QUERY, NIC_MODE.replace("DISABLED(1)", "ENABLED(0)")))
    assert finding.reboot
    assert not found("uverbs", refused(NODE, "Permission denied"))[0].reboot


def test_infiniband_port_serves_verbs():
    findings = found("nic-link-type", file(LAYER, "InfiniBand"), table(
        LINK_TYPE_P1="IB(1)", KEEP_ETH_LINK_UP_P1="False(0)", KEEP_IB_LINK_UP_P1="True(1)",
    ))  # fmt: skip
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


def test_machine_without_nics():
    some = report(NO_RDMA, folder(PCI), answer("user", value={"uid": 0, "gid": 0}))
    statuses = {f.check.id: f.status for f in some.findings if f.check.id in CHECKS[:8]}
    assert statuses.pop("nic-present") is FAIL
    assert set(statuses.values()) == {SKIP}
    assert some.ready(Use.VERBS).readiness is Readiness.NOT_READY
    assert not any("nic" in f.check.id and f.uses and Use.SOFTWARE in f.uses for f in some.findings)


@pytest.mark.parametrize("name", ["mlx5_1", "ens6f1", "b5:00.1"])
def test_nic_that_is_asked_about(name):
    assert found("nic-model", wanted=Wanted(nic=name))[0].nic == "mlx5_1"
    assert len(found("uverbs", refused(NODE, "Permission denied"), wanted=Wanted(nic=name))) == 1


def test_nic_that_there_is_not():
    (finding,) = found("nic-present", wanted=Wanted(nic="mlx5_7"))
    assert finding.status is FAIL
    assert "mlx5_7" in finding.summary
    assert "mlx5_0, mlx5_1" in finding.cure


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
    links = [link(f"{PCI}/0000:{bus}:00.0", f"/sys/devices/pci0000:00/0000:{bus}:00.0") for bus in ("01", "02", "03")]
    ids = [
        file(f"{PCI}/0000:{bus}:00.0/{name}", value)
        for bus in ("01", "02", "03")
        for name, value in (("vendor", "0x15b3"), ("device", "0x1021"), ("class", "0x020000"))
    ]
    host = Counting(changed(READY, NO_RDMA, folder(PCI, "0000:01:00.0", "0000:02:00.0", "0000:03:00.0"), *links, *ids))
    tool.ask_all(Machine(host, Wanted()))
    assert sorted(key[2] for key in host.fetched if key[0] == "mlxconfig") == [
        "0000:01:00.0", "0000:02:00.0", "0000:03:00.0",
    ]  # fmt: skip


JUNK = st.recursive(
    st.none() | st.integers() | st.text(max_size=8), lambda some: st.lists(some, max_size=3) | st.dictionaries(
        st.sampled_from(["file", "lacks", "lacks_optional", "uid", "group", "mode"]), some, max_size=4,
    ),
    max_leaves=6,
)  # fmt: skip
GARBAGE = {
    Kind.FILE: st.binary(max_size=24), Kind.COMMAND: st.binary(max_size=64), Kind.LINK: st.text(max_size=24),
    Kind.FOLDER: st.lists(st.text(max_size=8), max_size=3), Kind.QUESTION: JUNK,
}  # fmt: skip


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_garbage_is_survived(data):
    """Each reading of the ready machine may be anything."""
    keys = data.draw(st.lists(st.sampled_from(sorted(READY.recorded)), min_size=1, max_size=12, unique=True))
    garbage = [
        Reading(kind, key, data.draw(GARBAGE[kind]), data.draw(st.sampled_from([Trouble.NONE, Trouble.FAILED])))
        for kind, key in keys
    ]
    for finding in examine(changed(READY, *garbage)).findings:
        assert "mistake of its own" not in finding.summary, (finding, garbage)


def test_permissions_of_a_file(tmp_path):
    path = tmp_path / "node"
    path.touch()
    path.chmod(0o640)
    told = LiveHost().ask("permissions", str(path)).value
    assert told == {"owner": path.owner(), "group": path.group(), "mode": "640"}
    assert LiveHost().ask("permissions", str(tmp_path / "none")).trouble is Trouble.ABSENT


def test_libraries_that_lack_functions(monkeypatch):
    monkeypatch.setenv("GPUNETIO_LIBIBVERBS", "libc.so.6")
    told = LiveHost().ask("verbs_library", "libibverbs").value
    assert "ibv_open_device" in told["lacks"]
    assert "ibv_reg_dmabuf_mr" in told["lacks_optional"]
    monkeypatch.setenv("GPUNETIO_LIBMLX5", "libnone.so.1")
    assert LiveHost().ask("verbs_library", "libmlx5").trouble is Trouble.FAILED
