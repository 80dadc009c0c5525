"""Each cause that the set-up guide names, on a machine with nothing else wrong: what is said of it, and of each use.

Outputs of tools are the guide's own, from data/doctor/seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from doctor_rig import READY, Change, answer, changed, command, data, file, folder, link, without
from gpunetio.doctor import ReplayHost, Status, Trouble, Use, Wanted, examine, lines_of
from gpunetio.doctor.finding import HARDWARE
from gpunetio.doctor.machine.host import Kind
from gpunetio.doctor.report.text import WIDTH
from pci_rig import bridge

OK, WARN, FAIL, SKIP = Status
PCI, MODULES, PORT = "/sys/bus/pci/devices", "/sys/module", "/sys/class/infiniband/mlx5_{}/ports/1"
RDMA = frozenset({Use.VERBS, Use.DMA})
NETWORK = frozenset({Use.VERBS, Use.ETHERNET})
CLOSED = file(
    "/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 2024\n"
)
NO_PEERMEM = (
    without(Kind.FOLDER, f"{MODULES}/nvidia_peermem"), file("/proc/modules", "nvidia 55726080 4 - Live 0x0\n"),
)
USER = answer("user", value={"uid": 1000, "gid": 1000})
CUDA = READY.recorded[Kind.QUESTION, ("cuda",)].value
NODES = ("/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1")
BLUEFIELD = [file(f"{PCI}/0000:b5:00.{n}/device", "0xa2dc\n") for n in (0, 1)]


def cuda(**attributes: int) -> Change:
    return answer("cuda", value=CUDA | {"devices": [CUDA["devices"][0] | attributes]})


def of_both(path: str, text: str) -> list[Change]:
    return [file(f"{PORT.format(n)}/{path}", text) for n in (0, 1)]


def mlxconfig(text: str) -> Change:
    return command("mlxconfig -d 0000:b5:00.0 -e q", text)


@dataclass(frozen=True)
class Cause:
    """What differs, which checks tell of it and how, and for what the machine is not ready then."""

    changes: Sequence[Change]
    told: dict[str, Status]
    hinders: frozenset[Use] = frozenset()
    cure: str = ""  # words of it
    wanted: Wanted = field(default_factory=Wanted)


CAUSES = {
    "BAR1 of 256 MiB": Cause(
        [without(Kind.FILE, f"{PCI}/0000:ca:00.0/resource"),
         command("nvidia-smi -q", "GPU 00000000:CA:00.0\n" + data("seed/nvidia-smi-q-bar1.txt"))],
        {"bar1": WARN}, cure="Resizable BAR",
    ),
    "BAR1 too small for what is wanted": Cause(
        [without(Kind.FILE, f"{PCI}/0000:ca:00.0/resource"),
         command("nvidia-smi -q", "GPU 00000000:CA:00.0\n" + data("seed/nvidia-smi-q-bar1.txt"))],
        {"bar1": FAIL}, HARDWARE, "Above 4G Decoding", Wanted(bar1_mib=512),
    ),
    "closed driver": Cause(
        [CLOSED, cuda(dma_buf_supported=0)], {"gpu-driver-open": OK, "dmabuf": WARN}, cure="nvidia-open",
    ),
    "closed driver without peermem": Cause(
        [CLOSED, cuda(dma_buf_supported=0), *NO_PEERMEM],
        {"gpu-driver-open": WARN, "dmabuf": WARN, "peermem": WARN, "gpu-memory-path": FAIL}, HARDWARE, "nvidia-peermem",
    ),
    "peermem missing, dmabuf there": Cause(NO_PEERMEM, {"peermem": OK}),
    "override not set": Cause(
        [USER, file("/proc/driver/nvidia/params", 'RegistryDwords: ""\n'), folder("/etc/modprobe.d")],
        {"peer-mapping": WARN, "root": WARN}, cure="PeerMappingOverride=1",
    ),
    "ACS on": Cause(
        [bridge("b2:00.0", 0x1D), bridge("b2:01.0", 0x1D)], {"acs": WARN}, cure="ECAP_ACS+0x6.w=0000",
    ),
    "IOMMU on": Cause(
        [folder("/sys/class/iommu", "dmar0"),
         *(file(f"/sys/kernel/iommu_groups/{n}/type", "DMA-FQ\n") for n in range(200))],
        {"iommu": WARN}, cure="GRUB_CMDLINE_LINUX_DEFAULT",
    ),
    "BlueField in NIC mode": Cause(
        [*BLUEFIELD, mlxconfig(data("seed/mlxconfig_bluefield.txt"))], {"bluefield-mode": OK},
    ),
    "BlueField in DPU mode": Cause(
        [*BLUEFIELD, mlxconfig(data("seed/mlxconfig_bluefield.txt").replace("DISABLED(1)", "ENABLED(0)"))],
        {"bluefield-mode": FAIL}, HARDWARE, "INTERNAL_CPU_OFFLOAD_ENGINE=1",
    ),
    "InfiniBand": Cause(
        of_both("link_layer", "InfiniBand\n"), {"nic-link-type": FAIL}, frozenset({Use.ETHERNET}), "LINK_TYPE_P1=2",
    ),
    "integrated GPU": Cause(
        [cuda(integrated=1, gpu_direct_rdma_supported=0, dma_buf_supported=0)],
        {"gpu-integrated": WARN, "gpu-memory-path": WARN, "gpu-direct-rdma": WARN}, cure="CPU_GPU memory",
    ),
    "no uverbs in a container": Cause(
        [file("/.dockerenv", ""), folder("/dev/infiniband"),
         *(without(Kind.QUESTION, "opens", node) for node in NODES)],
        {"uverbs": FAIL, "container": WARN}, HARDWARE, "--device=/dev/infiniband/uverbs0",
    ),
    "uverbs for root only": Cause(
        [USER, *(without(Kind.QUESTION, "opens", node, trouble=Trouble.DENIED) for node in NODES)],
        {"uverbs": FAIL}, HARDWARE, "chmod 666",
    ),
    "ports down": Cause(of_both("state", "1: DOWN\n"), {"port-state": FAIL}, NETWORK, "cable"),
    "MTU of 1500": Cause(
        [file(f"/sys/class/net/ens6f{n}/mtu", "1500\n") for n in (0, 1)], {"mtu": WARN}, cure="mtu 4200",
    ),
    "no address": Cause(
        [file(f"{PORT.format(n)}/gids/{i}", ":".join(["0000"] * 8)) for n in (0, 1) for i in range(4)],
        {"gid": FAIL}, frozenset({Use.VERBS}), "ip addr add",
    ),
    "far NIC": Cause(
        [without(Kind.LINK, f"{PCI}/0000:ca:00.0"), command("nvidia-smi topo -m", data("seed/topo_m.txt"))],
        {"topology": WARN}, cure="behind the PCIe switch",
    ),
    "old kernel": Cause(
        [file("/proc/sys/kernel/osrelease", "5.15.0-122-generic\n"), *NO_PEERMEM, cuda(dma_buf_supported=0)],
        {"kernel": WARN, "gpu-memory-path": FAIL}, HARDWARE, "6.2",
    ),
    "no persistence": Cause(
        [command("nvidia-smi -q", READY.run("nvidia-smi", "-q").text.replace(
            "Persistence Mode                      : Enabled", "Persistence Mode                      : Disabled"))],
        {"gpu-persistence": WARN}, cure="-pm 1",
    ),
    "CUDA 12.4": Cause(
        [answer("cuda", value=CUDA | {"driver_version": 12040})], {"cuda-version": WARN}, cure="580.65.06",
    ),
    "no GDRCopy": Cause([without(Kind.FOLDER, f"{MODULES}/gdrdrv")], {}),
    "little locked memory": Cause(
        [USER, answer("limit", "MEMLOCK", value=[65536, 65536]),
         file("/proc/self/status", "CapEff:\t0000000000002000\n")],
        {"memlock": FAIL}, HARDWARE, "ulimit -l unlimited",
    ),
    "lazy loading": Cause(
        [answer("environment", "CUDA_MODULE_LOADING", value="LAZY")], {"module-loading": WARN},
        cure="CUDA_MODULE_LOADING=EAGER",
    ),
    "no GPU": Cause(
        [link(f"{PCI}/0000:ca:00.0", "/x"), file(f"{PCI}/0000:ca:00.0/vendor", "0x1002\n"),
         command("nvidia-smi -q", "No devices were found\n", "exit status 6")],
        {"gpu-present": FAIL}, HARDWARE, "lspci -d 10de:",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_cause(name):
    cause = CAUSES[name]
    report = examine(changed(READY, *cause.changes), cause.wanted)
    for id, status in cause.told.items():
        found = {finding.status for finding in report.findings if finding.check.id == id}
        assert status in found, (id, found)
    wrong = {f.check.id for f in report.findings if f.status is FAIL}
    assert wrong == {id for id, status in cause.told.items() if status is FAIL}
    cures = " ".join(f.cure for f in report.findings if f.check.id in cause.told)
    assert cause.cure in cures
    not_ready = {use for use in Use if report.ready(use).readiness.name != "READY"}
    assert not_ready == cause.hinders
    assert max(map(len, lines_of(report, verbose=True))) <= WIDTH


def test_nothing_is_wrong_before():
    report = examine(READY)
    assert {finding.status for finding in report.findings} <= {OK, SKIP}
    assert all(report.ready(use).readiness.name == "READY" for use in Use)


def test_nothing_can_be_read():
    report = examine(ReplayHost({}))
    said = {finding.check.id for finding in report.findings if finding.status is not SKIP}
    assert said == set()
    assert all(report.ready(use).readiness.name == "UNKNOWN" for use in Use)
