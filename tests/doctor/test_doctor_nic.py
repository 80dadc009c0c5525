"""The doctor's checks of network cards: which there are, drivers, firmware, device nodes."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doctor_rig import READY, answer, changed, file, folder, found, link, of_cause, report, without
from gpunetio.doctor import LiveHost, Status, Use, Wanted, examine
from gpunetio.doctor.finding import Readiness
from gpunetio.doctor.machine.host import Kind, Reading, Trouble
from gpunetio.errors import InvalidValueError

OK, WARN, FAIL, SKIP = Status
CHECKS = ("nic-present", "nic-model", "nic-driver", "nic-firmware", "uverbs")
IB, PCI = "/sys/class/infiniband", "/sys/bus/pci/devices"
CARD, DRIVERS = f"{PCI}/0000:b5:00.0", "/sys/bus/pci/drivers"
NODE = "/dev/infiniband/uverbs0"
NO_RDMA = folder(IB)


def refused(path: str, error: str, trouble: Trouble = Trouble.DENIED) -> Reading:
    return Reading(Kind.QUESTION, ("opens", path), None, trouble, error)


def test_ready_machine():
    for id in CHECKS:
        some = found(id)
        assert {f.status for f in some} == {OK}, id
        assert all(f.read for f in some if f.status is OK), id


# cause: what is changed, which check tells, how, and words of its summary and cure
CAUSES = {
    "no hardware at all": ([NO_RDMA, folder(PCI)], "nic-present", FAIL, "no RDMA device", "ConnectX-6 Dx"),
    "nothing may be seen": (
        [without(Kind.FOLDER, IB, trouble=Trouble.DENIED), folder(PCI)], "nic-present", SKIP, "cannot find out", "",
    ),
    "ConnectX-5": ([file(f"{CARD}/device", "0x1017")], "nic-model", WARN, "ConnectX-5: mlx5, but older", "6 Dx"),
    "BlueField-1": ([file(f"{CARD}/device", "0xa2d2")], "nic-model", WARN, "BlueField (ConnectX-5)", "BlueField-2"),
    "ConnectX-3": ([file(f"{CARD}/device", "0x1003")], "nic-model", FAIL, "not mlx5", "ConnectX-6 Dx"),
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
    "iWARP": ([file(f"{IB}/mlx5_0/node_type", "4: RNIC\n")], "nic-model", FAIL, "iWARP (RNIC): neither", "6 Dx"),
    "Elastic Fabric Adapter": (
        [file(f"{IB}/mlx5_0/node_type", "7: unspecified\n"), file(f"{CARD}/vendor", "0x1d0f")],
        "nic-model", FAIL, "a vendor's own transport: neither InfiniBand nor RoCE", "ConnectX-6 Dx",
    ),
    "kind of RDMA is hidden": ([without(Kind.FILE, f"{IB}/mlx5_0/node_type")], "nic-model", OK, "ConnectX-6 Dx", ""),
    "Soft-RoCE": (
        [without(Kind.LINK, f"{IB}/mlx5_0/device")], "nic-model", FAIL, "not a PCI device", "the software NIC work",
    ),
    "device's link is hidden": (
        [without(Kind.LINK, f"{IB}/mlx5_0/device", trouble=Trouble.DENIED)], "nic-model", SKIP, "not visible", "",
    ),
    "PCI ids cannot be read": ([without(Kind.FILE, f"{CARD}/vendor")], "nic-model", SKIP, "vendor", ""),
    "mlx5_ib is not loaded": (
        [NO_RDMA, without(Kind.FOLDER, "/sys/module/mlx5_ib"), link(f"{CARD}/driver", f"{DRIVERS}/mlx5_core")],
        "nic-driver", FAIL, "mlx5_ib not loaded", "sudo modprobe -a mlx5_ib",
    ),
    "the card is given to a guest": (
        [NO_RDMA, link(f"{CARD}/driver", f"{DRIVERS}/vfio-pci")],
        "nic-driver", FAIL, "the driver vfio-pci", f"echo 0000:b5:00.0 | sudo tee {CARD}/driver/unbind; ",
    ),
    "the driver gave up": (
        [NO_RDMA, link(f"{CARD}/driver", f"{DRIVERS}/mlx5_core")],
        "nic-driver", FAIL, "although the modules are loaded", "dmesg",
    ),
    "the kernel's own driver": (
        [without(Kind.FILE, f"/sys/module/{name}/version") for name in ("mlx5_core", "mlx5_ib", "ib_uverbs")],
        "nic-driver", OK, "the mlx5 driver of kernel 6.8.0", "",
    ),
    "firmware's version is hidden": ([without(Kind.FILE, f"{IB}/mlx5_0/fw_ver")], "nic-firmware", SKIP, "version", ""),
    "ib_uverbs is not loaded": (
        [without(Kind.FOLDER, "/sys/class/infiniband_verbs")], "uverbs", FAIL, "ib_uverbs", "sudo modprobe ib_uverbs",
    ),
    "docker without the device": (
        [refused(NODE, "No such file or directory", Trouble.ABSENT), file("/.dockerenv", "")], "uverbs", FAIL,
        "this container has no", "docker run --device=/dev/infiniband/uverbs0 --cap-add=IPC_LOCK",
    ),
    "a pod without the device": (
        [refused(NODE, "No such file or directory", Trouble.ABSENT),
         answer("environment", "KUBERNETES_SERVICE_HOST", value="10.0.0.1")],
        "uverbs", FAIL, "this container has no", "--device=/dev/infiniband/uverbs0",
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
        "uverbs", FAIL, "this user may not open /dev/infiniband/uverbs0", f"sudo chmod 666 {NODE}, as rdma-core's udev",
    ),
    "node is a group's": (
        [refused(NODE, "Permission denied"),
         answer("permissions", NODE, value={"owner": "root", "group": "rdma", "mode": "660"})],
        "uverbs", FAIL, "this user may not open /dev/infiniband/uverbs0", "sudo usermod -aG rdma $USER",
    ),
    "card hangs": ([refused(NODE, "no answer within 5 s", Trouble.TIMEOUT)], "uverbs", FAIL, "does not open", "dmesg"),
    "card is dead": ([refused(NODE, "No such device", Trouble.FAILED)], "uverbs", FAIL, "does not open", "dmesg"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_causes(cause):
    first, *others = of_cause(*CAUSES[cause])
    assert bool(first.cure) == (first.status in (WARN, FAIL))
    assert not any(finding.reboot for finding in (first, *others))


def test_device_nodes_are_found_by_their_devices():
    """Their numbers are in the order in which drivers came."""
    names = "/sys/class/infiniband_verbs/uverbs0/ibdev", "/sys/class/infiniband_verbs/uverbs1/ibdev"
    findings = found("uverbs", file(names[0], "mlx5_1\n"), file(names[1], "mlx5_0\n"))
    assert [(f.nic, f.summary) for f in findings] == [
        ("mlx5_0", "/dev/infiniband/uverbs1 opens"), ("mlx5_1", "/dev/infiniband/uverbs0 opens"),
    ]


def test_machine_without_nics():
    some = report(NO_RDMA, folder(PCI), answer("user", value={"uid": 0, "gid": 0}))
    statuses = {f.check.id: f.status for f in some.findings if f.check.id in CHECKS}
    assert statuses.pop("nic-present") is FAIL
    assert set(statuses.values()) == {SKIP}
    assert some.ready(Use.VERBS).readiness is Readiness.NOT_READY
    assert some.ready(Use.SOFTWARE).readiness is Readiness.READY


@pytest.mark.parametrize("name", ["mlx5_1", "ens6f1", "b5:00.1"])
def test_nic_that_is_asked_about(name):
    assert found("nic-model", wanted=Wanted(nic=name))[0].nic == "mlx5_1"
    assert len(found("uverbs", refused(NODE, "Permission denied"), wanted=Wanted(nic=name))) == 1


def test_nic_that_there_is_not():
    with pytest.raises(InvalidValueError, match="no NIC is 'mlx5_7'; there is mlx5_0"):
        report(wanted=Wanted(nic="mlx5_7"))


JUNK = st.recursive(
    st.none() | st.integers() | st.text(max_size=8), lambda some: st.lists(some, max_size=3) | st.dictionaries(
        st.sampled_from(["file", "lacks", "lacks_optional", "uid", "group", "mode"]), some, max_size=4,
    ),
    max_leaves=6,
)
GARBAGE = {
    Kind.FILE: st.binary(max_size=24), Kind.COMMAND: st.binary(max_size=64), Kind.LINK: st.text(max_size=24),
    Kind.FOLDER: st.lists(st.text(max_size=8), max_size=3), Kind.QUESTION: JUNK,
}


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_garbage_is_survived(data):
    """Each reading of the ready machine may be anything."""
    keys = data.draw(st.lists(st.sampled_from(sorted(READY.recorded)), min_size=1, max_size=12, unique=True))
    garbage = [
        Reading(kind, key, data.draw(GARBAGE[kind]), data.draw(st.sampled_from([Trouble.NONE, Trouble.FAILED])))
        for kind, key in keys
    ]
    for finding in examine(changed(READY, *garbage)).findings:
        assert "a bug in this check" not in finding.summary, (finding, garbage)


def test_another_file_system(tmp_path):
    """Below a folder device nodes cannot be tried and commands not be run: that is no fault of its machine."""
    for path, text in {
        f"{IB}/mlx5_0/fw_ver": "22.39.2048", "/sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_0",
        f"{CARD}/vendor": "0x15b3", f"{CARD}/device": "0x101d", f"{CARD}/class": "0x020000",
    }.items():
        (tmp_path / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path[1:]).write_text(text)
    (tmp_path / f"{IB}/mlx5_0/device"[1:]).symlink_to(tmp_path / CARD[1:])
    some = {f.check.id: f for f in examine(LiveHost(str(tmp_path))).findings}
    assert some["nic-model"].summary == "ConnectX-6 Dx"
    assert some["nic-firmware"].summary == "22.39.2048"
    assert some["uverbs"].status is SKIP
    assert some["accurate-send"].summary.startswith("mlxconfig: not asked: the root folder is")


def test_permissions_of_a_file(tmp_path):
    path = tmp_path / "node"
    path.touch()
    path.chmod(0o640)
    told = LiveHost().ask("permissions", str(path)).value
    assert told == {"owner": path.owner(), "group": path.group(), "mode": "640"}
    assert LiveHost().ask("permissions", str(tmp_path / "none")).trouble is Trouble.ABSENT
