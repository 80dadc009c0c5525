"""The doctor's checks of PCI Express."""

from __future__ import annotations

import struct

import pytest

from doctor_rig import DATA, READY, answer, changed, command, file, folder, found, link, statuses, without
from gpunetio.doctor import ReplayHost, Status, Trouble, Wanted, examine
from gpunetio.doctor.machine.host import Kind
from pci_rig import bridge, config, from_lspci
from topology_rig import EIGHT, built, gpu, nic

OK, WARN, SKIP = Status.OK, Status.WARN, Status.SKIP
FOLDER = "/sys/bus/pci/devices"
GPU, NIC, ROOT_PORT = f"{FOLDER}/0000:ca:00.0", f"{FOLDER}/0000:b5:00.0", f"{FOLDER}/0000:b0:02.0"
ALL_ON = 0x1D  # SrcValid, ReqRedir, CmpltRedir, UpstreamFwd: what Linux sets with an IOMMU
HEADER_ONLY = bytes(64)


def nic_control(control: int):
    return file(f"{NIC}/config", config({0x60: (0x10, struct.pack("<HIH", 2, 0, control))}, {}))


def translating(*devices: str, how: str = "DMA-FQ"):
    groups = {"0000:b5:00.0": 41, "0000:b5:00.1": 42, "0000:ca:00.0": 57}
    return [file(f"/sys/kernel/iommu_groups/{groups[device]}/type", f"{how}\n") for device in devices]


def upstream(width: str, speed: str):
    """The link above the switch, as its upstream port sees it."""
    at = f"{FOLDER}/0000:b1:00.0"
    return [file(f"{at}/current_link_width", width), file(f"{at}/current_link_speed", f"{speed} GT/s PCIe\n")]


NOT_ROOT = [file(f"{FOLDER}/{name}/config", HEADER_ONLY) for name in READY.names(FOLDER).names]
CX8 = (file(f"{NIC}/device", "0x1023\n"), file(f"{FOLDER}/0000:b5:00.1/device", "0x1023\n"))
BLACKWELL = file(
    "/proc/driver/nvidia/gpus/0000:ca:00.0/information", "Model: \t\t NVIDIA RTX PRO 6000 Blackwell Server Edition\n"
)
IOMMU_OFF = (folder("/sys/class/iommu"), file("/proc/cmdline", "ro quiet intel_iommu=off\n"))
AMD = folder("/sys/class/iommu", "ivhd0", "ivhd1")
ARM = folder("/sys/class/iommu", "smmu3.0x0000000005000000")
NO_DRIVER = (
    without(Kind.FILE, "/proc/driver/nvidia/gpus/0000:ca:00.0/information"),
    without(Kind.COMMAND, "nvidia-smi", "-q"),
    without(Kind.COMMAND, "rdma_topo", "check"),
)
FAILS = "OK\tall of NIC 1\nFAIL\tACS for grace_rp 0008:00:00.0 has incorrect values 0011101 != xx111x0 (0x1d != 0x1c)\n"
LOOP = "reboot:\nfor b in b2:01.0 b2:00.0; do sudo setpci -s $b ECAP_ACS+0x6.w=0000; done"
INTEGRATED = file("/proc/driver/nvidia/gpus/0000:ca:00.0/information", "Model: \t\t NVIDIA GB10\n")
NO_CUDA = without(Kind.QUESTION, "cuda", trouble=Trouble.FAILED)
LSPCI = (DATA / "lspci-bridge.txt").read_text()
NO_CONFIG = without(Kind.FILE, f"{FOLDER}/0000:b2:00.0/config")


@pytest.mark.parametrize(
    ("check", "changes", "expected", "words"),
    [
        ("acs", [], [OK], "off at all 2 bridges"),
        ("acs", [bridge("b2:00.0", ALL_ON)], [WARN], "sudo setpci -s b2:00.0 ECAP_ACS+0x6.w=0000"),
        ("acs", [bridge("b2:00.0", ALL_ON)], [WARN], "ACSCtl: SrcValid+ TransBlk- ReqRedir+"),
        ("acs", [bridge("b2:00.0", 4), bridge("b2:01.0", 8)], [WARN], LOOP),
        ("acs", [bridge("b2:01.0", 0x20)], [WARN], "redirects peer traffic at b2:01.0"),
        ("acs", [bridge("b2:01.0", 1)], [WARN], "redirects nothing at b2:01.0"),
        ("acs", [bridge("b0:02.0", ALL_ON), bridge("b1:00.0", ALL_ON)], [OK], "off"),  # packets turn below these
        ("acs", [INTEGRATED, NO_CUDA, bridge("b2:00.0", ALL_ON)], [SKIP], "integrated: the NIC uses host memory"),
        ("acs", [without(Kind.LINK, GPU)], [SKIP], "sysfs does not show where GPU0"),
        ("acs", NOT_ROOT, [SKIP], "sudo gpunetio doctor"),
        ("acs", [*NOT_ROOT, bridge("b2:00.0", ALL_ON)], [WARN], "at b2:00.0"),
        ("acs", [NO_CONFIG, command("lspci -s b2:00.0 -vvv", LSPCI)], [WARN], "ReqRedir+"),
        ("acs", [NO_CONFIG, command("lspci -s b2:00.0 -vvv", LSPCI.replace("ACS", ""))], [OK], "off"),
        ("acs", [NO_CONFIG, command("lspci -s b2:00.0 -vvv", "\tCapabilities: <access denied>")], [SKIP], "needs root"),
        ("acs", [NO_CONFIG, without(Kind.COMMAND, "lspci", "-s", "b2:00.0", "-vvv")], [SKIP], "needs root"),
        ("acs", [*CX8, BLACKWELL, without(Kind.COMMAND, "rdma_topo", "check")], [SKIP], "rdma_topo"),
        ("acs", [*CX8, BLACKWELL, command("rdma_topo check", FAILS, "exit status 100")], [WARN], "write-grub-acs"),
        ("acs", [*CX8, BLACKWELL, command("rdma_topo check", "OK\tall\n")], [OK], "rdma_topo"),
        ("acs", [*CX8, *NO_DRIVER, bridge("b2:00.0", ALL_ON)], [SKIP], "rdma_topo"),  # it may be a Blackwell
        ("acs", [*CX8, bridge("b2:00.0", ALL_ON)], [WARN], "setpci"),  # an A100 has no direct path
        ("iommu", [], [OK], "pass"),
        ("iommu", IOMMU_OFF, [OK], "intel_iommu=off"),
        ("iommu", translating("0000:ca:00.0"), [WARN], '"iommu=pt <more options>", or "iommu=off intel_iommu=off'),
        ("iommu", translating("0000:b5:00.0", how="DMA"), [WARN], "mlx5_0"),
        ("iommu", [AMD, *translating("0000:ca:00.0")], [WARN], "iommu=off amd_iommu=off"),
        ("iommu", [ARM, *translating("0000:ca:00.0")], [WARN], "iommu.passthrough=1"),
        ("iommu", [without(Kind.FILE, "/sys/kernel/iommu_groups/57/type")], [SKIP], "unknown"),
        ("iommu", [without(Kind.LINK, f"{GPU}/iommu_group")], [SKIP], "no IOMMU group"),
        ("iommu", [without(Kind.FOLDER, "/sys/class/iommu", trouble=Trouble.DENIED)], [SKIP], "unknown"),
        ("iommu", [without(Kind.FOLDER, "/sys/class/iommu")], [OK], "no IOMMU"),
        ("pcie-link", [], [OK, OK, OK], "x16 at 16 GT/s"),
        ("pcie-link", [file(f"{GPU}/current_link_width", "8\n")], [WARN, OK, OK], "8 of 16 lanes"),
        ("pcie-link", [file(f"{GPU}/current_link_speed", "2.5 GT/s PCIe\n")], [OK, OK, OK], "idle GPU"),
        ("pcie-link", [file(f"{NIC}/current_link_speed", "8.0 GT/s PCIe\n")], [OK, WARN, OK], "than its 16 GT/s"),
        ("pcie-link", [file(f"{NIC}/current_link_width", "255\n")], [OK, SKIP, OK], "unknown"),
        ("pcie-link", [file(f"{NIC}/max_link_speed", "Unknown\n")], [OK, SKIP, OK], "unknown"),
        ("pcie-link", [file(f"{NIC}/current_link_speed", "Unknown\n")], [OK, SKIP, OK], "unknown"),
        ("pcie-link", [file(f"{NIC}/{which}_link_width", "63\n") for which in ("current", "max")], [OK, SKIP, OK], ""),
        ("pcie-link", [file(f"{NIC}/current_link_width", "0\n")], [OK, SKIP, OK], "unknown"),
        ("pcie-link", upstream("8", "16.0"), [OK, OK, OK, WARN], "switch b1:00.0 above GPU0, mlx5_0, …: x8 at 16 GT/s"),
        ("pcie-link", upstream("8", "16.0"), [OK, OK, OK, WARN], "only 8 of 16 lanes"),
        ("pcie-link", upstream("16", "8.0"), [OK, OK, OK, WARN], "slower than its 16 GT/s"),
        ("pcie-link", upstream("16", "8.0"), [OK, OK, OK, WARN], "cable above the switch b1:00.0"),
        ("pcie-link", [*upstream("8", "16.0"), file(f"{ROOT_PORT}/max_link_width", "8\n"),
                       file(f"{ROOT_PORT}/current_link_width", "8\n")],
            [OK, OK, OK], "x16 at 16 GT/s; x8 at 16 GT/s above b1:00.0"),  # more than that its slot cannot
        ("pcie-link", [file(f"{FOLDER}/0000:b1:00.0/current_link_width", "255\n")], [OK, OK, OK], "x16 at 16 GT/s"),
        ("pcie-link", [file(f"{FOLDER}/0000:b2:00.0/current_link_width", "8\n")], [OK, OK, OK], "x16 at 16 GT/s"),
        ("pcie-read-request", [], [OK, OK], "MaxReadReq is 4096 bytes "),
        ("pcie-read-request", [nic_control(0x2000)], [OK, OK], "4096 may be faster"),
        ("pcie-read-request", [nic_control(0x1010)], [WARN, OK], "sudo setpci -s b5:00.0 CAP_EXP+8.w=5000:7000"),
        ("pcie-read-request", [nic_control(0x1010)], [WARN, OK], "MaxReadReq 256 bytes, RlxdOrd+"),
        ("pcie-read-request", NOT_ROOT, [SKIP, SKIP], "sudo gpunetio doctor"),
        ("numa", [], [OK, OK, OK], "24 of this process's 48"),
        ("numa", [answer("affinity", value=[0, 1, 24])], [WARN, WARN, WARN], "taskset -c 12-23,36-47"),
        ("numa", [answer("affinity", value=[0, 47])], [OK, OK, OK], "1 of this process's 2"),
        ("numa", [file(f"{GPU}/local_cpulist", "12,40\n")], [OK, OK, OK], "2 of this process's 48"),
        ("numa", [answer("affinity", value={"": None})], [SKIP, SKIP, SKIP], "unknown"),
        ("numa", [file(f"{GPU}/numa_node", "-1\n")], [OK, OK, OK], "node unknown"),
        ("numa", [file(f"{GPU}/local_cpulist", "\n")], [SKIP, OK, OK], "unknown"),
    ],
)
def test_causes(check, changes, expected, words):
    findings = found(check, *changes)
    assert [finding.status for finding in findings] == expected
    assert any(words in f"{f.summary} {f.cure} {[one.value for one in f.read]}" for f in findings)
    assert all(bool(f.cure) is (f.status is WARN) and len(f.summary) < 80 for f in findings)


@pytest.mark.parametrize("check", ["acs", "iommu", "pcie-link", "pcie-read-request", "numa"])
def test_without_devices(check):
    assert statuses(check, folder(FOLDER), folder("/sys/class/infiniband")) == [SKIP]


def test_a_reboot_is_said_where_one_is_needed():
    assert not found("acs", bridge("b2:00.0", ALL_ON))[0].reboot
    assert found("acs", *CX8, BLACKWELL, command("rdma_topo check", FAILS, "exit status 100"))[0].reboot
    assert found("iommu", *translating("0000:ca:00.0"))[0].reboot


def test_devices_at_two_host_bridges():
    """All bridges above either count when packets turn at the root complex."""
    elsewhere = link(f"{FOLDER}/0000:ca:00.0", "/sys/devices/pci0000:c8/0000:c8:01.0/0000:ca:00.0")
    (finding,) = found("acs", elsewhere, bridge("c8:01.0", 0), bridge("b0:02.0", ALL_ON))
    assert finding.status is WARN
    assert "at b0:02.0" in finding.summary
    assert "all 4 bridges" in found("acs", elsewhere, bridge("c8:01.0", 0))[0].summary


@pytest.mark.parametrize("text", ["seed/lspci-tvvv.txt", "lspci-tree.txt"])
def test_the_guides_machine(text):
    """A BlueField with a GPU behind it: packets pass four bridges, of which b2:00.0 is where they enter the card."""
    devices = from_lspci((DATA / text).read_text())
    paths = {device.path[-1]: device.path for device in devices}
    above = ("0000:b0:02.0", "0000:b1:00.0")
    assert paths["0000:b3:00.1"] == (*above, "0000:b2:00.0", "0000:b3:00.1")
    assert paths["0000:b6:00.0"] == (*above, "0000:b2:01.0", "0000:b4:00.0", "0000:b5:08.0", "0000:b6:00.0")
    changes = [change for device in devices for change in device.readings()]
    between = ("b2:00.0", "b2:01.0", "b4:00.0", "b5:08.0")
    host = changed(ReplayHost({}), *changes, *(bridge(name, 0) for name in between))
    host = changed(host, folder(FOLDER, *paths), bridge("b2:00.0", ALL_ON))
    (finding,) = (f for f in examine(host, Wanted()).findings if f.check.id == "acs")
    assert finding.summary == "ACS redirects peer traffic at b2:00.0"
    assert finding.cure.endswith("sudo setpci -s b2:00.0 ECAP_ACS+0x6.w=0000")
    host = changed(host, *(bridge(name, ALL_ON) for name in between))
    (finding,) = (f for f in examine(host).findings if f.check.id == "acs")
    assert finding.summary == "ACS redirects peer traffic at b2:01.0, b4:00.0, b5:08.0, …"
    assert finding.cure.splitlines()[1:] == [
        "for b in b2:01.0 b4:00.0 b5:08.0 b2:00.0", "do sudo setpci -s $b ECAP_ACS+0x6.w=0000; done",
    ]


def test_each_gpu_has_its_own_bridges():
    """Those to the NIC that is nearest to it: what is wrong elsewhere does not matter to it."""
    host = changed(EIGHT, *(bridge(name[5:], 0) for name in EIGHT.names(FOLDER).names))
    host = changed(host, bridge("12:00.0", ALL_ON))
    findings = [f for f in examine(host).findings if f.check.id == "acs"]
    assert [f.subject for f in findings] == [f"GPU{i} mlx5_{10 + i}" for i in range(8)]
    assert [f.gpu for f in findings if f.status is WARN] == ["GPU1"]
    far = [f for f in examine(host, Wanted(nic="mlx5_bond_0")).findings if f.check.id == "acs"]
    assert [f.subject for f in far] == [f"GPU{i} mlx5_bond_0" for i in range(8)]
    (finding,) = (f for f in far if f.gpu == "GPU0")
    assert finding.summary == "ACS is off at all 4 bridges between GPU and NIC"


def test_reads_are_few():
    """Of six bridges that redirect, four are shown."""
    deep = gpu("pci0000:b0/b0:02.0/b1:00.0/b2:01.0/b4:00.0/b5:08.0/b6:00.0/b7:01.0/ca:00.0")
    host = built(deep, nic("mlx5_0", "pci0000:b0/b0:02.0/b1:00.0/b2:00.0/b3:00.0"))
    names = ("b2:00.0", "b2:01.0", "b4:00.0", "b5:08.0", "b6:00.0", "b7:01.0")
    (finding,) = (
        f for f in examine(changed(host, *(bridge(n, ALL_ON) for n in names))).findings if f.check.id == "acs"
    )
    assert [one.source for one in finding.read][3:] == [f"{FOLDER}/0000:b6:00.0/config", "…"]
    assert finding.read[-1].value == "and 2 more"


def test_a_function_without_an_iommu_group():
    (finding,) = found("iommu", without(Kind.LINK, f"{GPU}/iommu_group"))
    assert (f"{GPU}/iommu_group", "no IOMMU group") in [(one.source, one.value) for one in finding.read]


@pytest.mark.parametrize(
    ("nic", "changes", "names"),
    [
        ("mlx5_0", [without(Kind.LINK, GPU)], "mlx5_0"),
        ("mlx5_0", [], "GPU0, mlx5_0"),
        ("", [], "GPU0, mlx5_0, …"),
    ],
    ids=["one", "two", "three"],
)
def test_a_slow_link_names_two_devices_below_it(nic, changes, names):
    """There are more only where it says "…"."""
    finding = found("pcie-link", *upstream("8", "16.0"), *changes, wanted=Wanted(nic=nic))[-1]
    assert finding.summary.startswith(f"switch b1:00.0 above {names}: x8 at 16 GT/s")


def test_what_root_would_see():
    """Without root the first 64 bytes of configuration spaces are read."""
    bridges = [f"{FOLDER}/0000:b2:0{n}.0/config" for n in (0, 1)]
    headers = [file(path, READY.read(path).value[:64]) for path in (*bridges, f"{FOLDER}/0000:b5:00.0/config")]
    (acs,) = found("acs", *headers)
    request, _ = found("pcie-read-request", *headers)
    assert (acs.status, acs.needs_root) == (Status.SKIP, True)
    assert (request.status, request.needs_root) == (Status.SKIP, True)


def test_bridges_without_extended_configuration():
    """Conventional PCI has 256 bytes, in which there is no ACS."""
    bridges = [f"{FOLDER}/0000:b2:0{n}.0/config" for n in (0, 1)]
    (acs,) = found("acs", *(file(path, READY.read(path).value[:256]) for path in bridges))
    assert (acs.status, acs.summary[:10]) == (Status.OK, "ACS is off")


def test_a_virtual_function_has_no_read_request_size():
    physical = link(f"{NIC}/physfn", "/sys/devices/pci0000:b0/0000:b5:00.1")
    of_vf, _ = found("pcie-read-request", physical)
    assert (of_vf.status, of_vf.nic) == (Status.SKIP, "mlx5_0")
