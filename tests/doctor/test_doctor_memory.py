"""The doctor's checks of how GPU memory reaches a NIC: one machine for each cause."""

import gzip
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doctor_rig import READY, answer, command, data, file, folder, found, report, statuses, without
from gpunetio.doctor import Status, Trouble, Use, Wanted
from gpunetio.doctor.checks.catalog import all_checks
from gpunetio.doctor.checks.memory import CHECKS, bar1_mib
from gpunetio.doctor.machine.dmabuf import options, unpacked
from gpunetio.doctor.machine.host import Kind, Reading
from gpunetio.doctor.machine.peer_mapping import CURE, beside, overrides, parameters
from gpunetio.doctor.probes.trying import PROBES

OK, WARN, FAIL, SKIP = Status.OK, Status.WARN, Status.FAIL, Status.SKIP
RESOURCE = "/sys/bus/pci/devices/0000:ca:00.0/resource"
PARAMS, CONFIG = "/proc/driver/nvidia/params", "/boot/config-6.8.0-60-generic"
A100, H100, RTX = (
    "".join(f"0x{start:016x} 0x{end:016x} 0x{flags:016x}\n" for start, end, flags in regions + [(0, 0, 0)] * 7)
    for regions in (
        [(0xE900_0000, 0xE9FF_FFFF, 0x40200), (0x2060 << 32, 0x207F_FFFF_FFFF, 0x14220C), (0, 0, 0),
         (0x2080 << 32, 0x2080_01FF_FFFF, 0x14220C), (0, 0, 0), (0, 0, 0)],
        [(0x2404_2000_0000, 0x2404_20FF_FFFF, 0x14220C), (0, 0, 0), (0x2200 << 32, 0x221F_FFFF_FFFF, 0x14220C),
         (0, 0, 0), (0x2404_0000_0000, 0x2404_01FF_FFFF, 0x14220C), (0, 0, 0)],
        [(0xF600_0000, 0xF6FF_FFFF, 0x40200), (0xE000_0000, 0xEFFF_FFFF, 0x14220C), (0, 0, 0),
         (0xF000_0000, 0xF1FF_FFFF, 0x14220C), (0, 0, 0), (0xE000, 0xE07F, 0x40101)],
    )
)
CLOSED = file("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\n")
NO_PEERMEM = without(Kind.FOLDER, "/sys/module/nvidia_peermem")
OLD_PEERMEM = folder("/sys/module/nv_peer_mem", "version")
NO_GDRDRV = without(Kind.FOLDER, "/sys/module/gdrdrv")
NO_CUDA = Reading(Kind.QUESTION, ("cuda",), None, Trouble.FAILED, "libcuda did not answer within 5 s")
OLD_KERNEL = file("/proc/sys/kernel/osrelease", "5.15.0-60-generic\n")
_IB_CORE = ("kernel_symbols", "ib_register_peer_memory_client", "ib_register_client")
INBOX_IB_CORE = answer(*_IB_CORE, value=["ib_register_client"])
PEER_IB_CORE = answer(*_IB_CORE, value=["ib_register_peer_memory_client", "ib_register_client"])
NO_REGIONS = answer("symbols", "libibverbs.so.1", "ibv_reg_dmabuf_mr", value=[])
NO_QUEUES = answer("symbols", "libmlx5.so.1", "mlx5dv_devx_umem_reg_ex", value=[])
NO_GDRAPI = Reading(Kind.QUESTION, ("symbols", "libgdrapi.so.2", "gdr_open"), None, Trouble.FAILED, "cannot open")
NO_DEVICE = without(Kind.QUESTION, "opens", "/dev/gdrdrv")
NOT_ALLOWED = without(Kind.QUESTION, "opens", "/dev/gdrdrv", trouble=Trouble.DENIED)
NO_BAR1_FILE = without(Kind.FILE, RESOURCE, trouble=Trouble.DENIED)
NO_SMI = without(Kind.COMMAND, "nvidia-smi", "-q")
OFF = file(PARAMS, 'EnableStreamMemOPs: 0\nRegistryDwords: ""\n')
OPTIONS = data("seed/modprobe-nvidia.conf")
NVIDIA_CONF, COMMANDED_OFF = "/etc/modprobe.d/nvidia.conf", 'ro nvidia.NVreg_RegistryDwords="RmX=1" quiet\n'
CMDLINE = file("/proc/cmdline", COMMANDED_OFF.replace("RmX=1", "RmX=1;PeerMappingOverride=1"))
HAS_FILE = folder("/etc/modprobe.d", "nvidia.conf")
SMALL = "GPU 00000000:CA:00.0\n" + data("seed/nvidia-smi-q-bar1.txt")


def cuda(**attributes: int):
    """libcuda shows the ready GPU with these attributes."""
    told = READY.recorded[Kind.QUESTION, ("cuda",)].value
    return answer("cuda", value=told | {"devices": [told["devices"][0] | attributes]})


def config(text: str):
    """The kernel's configuration."""
    return file(CONFIG, "CONFIG_64BIT=y\n" + text)


# cause, changes, check, how it ends, words of the summary, words of the cure
CAUSES = [
    ("small BAR1", [file(RESOURCE, RTX)], "bar1", WARN, "256 MiB", "Resizable BAR"),
    ("smaller BAR1", [file(RESOURCE, RTX.replace("efffffff", "e3ffffff"))], "bar1", WARN, "64 MiB", "Resizable BAR"),
    ("the guide's small BAR1", [NO_BAR1_FILE, command("nvidia-smi -q", SMALL)],
        "bar1", WARN, "256 MiB, 250 MiB free", "Above 4G Decoding"),
    ("the guide's A100", [NO_BAR1_FILE, command("nvidia-smi -q", data("seed/nvidia-smi-q.txt"))],
        "bar1", OK, "131072 MiB, 131071 MiB free", ""),
    ("BAR1 without nvidia-smi", [NO_SMI], "bar1", OK, "131072 MiB", ""),
    ("64-bit BAR0", [file(RESOURCE, H100)], "bar1", OK, "131072 MiB", ""),
    ("not a resource file", [file(RESOURCE, "0x0 0x0 0x0\n")], "bar1", OK, "131072 MiB, 131071 MiB free", ""),
    ("BAR1 without addresses", [file(RESOURCE, A100.replace("0014220c", "2014220c"))],
        "bar1", FAIL, "no addresses", "Above 4G Decoding"),
    ("no BAR1 to read", [NO_BAR1_FILE, NO_SMI], "bar1", SKIP, "neither", ""),
    ("BAR1 of an integrated GPU", [cuda(integrated=1)], "bar1", SKIP, "integrated", ""),
    ("the guide's option", [file(PARAMS, data("seed/params.txt"))], "peer-mapping", OK, "on", ""),
    ("no option", [OFF], "peer-mapping", WARN, "off",
        "| sudo tee -a /etc/modprobe.d/zz-nvidia-peer-mapping.conf; then sudo update-initramfs -u (Debian"),
    ("beside others", [file(PARAMS, 'RegistryDwords: "RMForceStaticBar1=1"\n')],
        "peer-mapping", WARN, "off", '"RMForceStaticBar1=1;PeerMappingOverride=1;"'),
    ("option is 0", [file(PARAMS, 'RegistryDwords: "PeerMappingOverride=0;"\n')], "peer-mapping", WARN, "off", "tee"),
    ("the guide's file, no reboot yet", [OFF, HAS_FILE, file("/etc/modprobe.d/nvidia.conf", OPTIONS)],
        "peer-mapping", WARN, "nvidia.conf, but not yet in the driver", "update-initramfs"),
    ("file of another module", [OFF, HAS_FILE, file("/etc/modprobe.d/nvidia.conf", "options nouveau modeset=0\n")],
        "peer-mapping", WARN, "off", "tee"),
    ("not a .conf", [OFF, folder("/etc/modprobe.d", "nvidia.bak"), file("/etc/modprobe.d/nvidia.bak", OPTIONS)],
        "peer-mapping", WARN, "off", "tee"),
    ("its file has 0", [HAS_FILE, file(NVIDIA_CONF, OPTIONS.replace("=1;", "=0;RMForceStaticBar1=1;"))],
        "peer-mapping", WARN, "nvidia.conf turns it off",
        '"RMForceStaticBar1=1;PeerMappingOverride=1;"'),
    ("a later file drops it", [folder("/etc/modprobe.d", "nvidia.conf", "zfs.conf"), file(NVIDIA_CONF, OPTIONS),
        file("/etc/modprobe.d/zfs.conf", "options nvidia NVreg_RegistryDwords=RMForceStaticBar1=1 NVreg_X=0\n")],
        "peer-mapping", WARN, "zfs.conf turns it off", '"RMForceStaticBar1=1;PeerMappingOverride=1;"'),
    ("an earlier file without", [folder("/etc/modprobe.d", "a.conf", "nvidia.conf"), file(NVIDIA_CONF, OPTIONS),
        file("/etc/modprobe.d/a.conf", "options nvidia NVreg_RegistryDwords=RMForceStaticBar1=1\n")],
        "peer-mapping", OK, "on", ""),
    ("a file that another hides", [HAS_FILE, folder("/usr/lib/modprobe.d", "nvidia.conf"), file(NVIDIA_CONF, OPTIONS),
        file("/usr/lib/modprobe.d/nvidia.conf", OPTIONS.replace("=1", "=0"))], "peer-mapping", OK, "on", ""),
    ("a file of other options", [HAS_FILE, file(NVIDIA_CONF, "options nvidia NVreg_EnableStreamMemOPs=1\n")],
        "peer-mapping", OK, "on", ""),
    ("the command line has it", [HAS_FILE, file(NVIDIA_CONF, OPTIONS.replace("=1", "=0")), CMDLINE],
        "peer-mapping", OK, "on", ""),
    ("the command line drops it", [HAS_FILE, file(NVIDIA_CONF, OPTIONS), file("/proc/cmdline", COMMANDED_OFF)],
        "peer-mapping", WARN, "cmdline turns it off", "RmX=1;PeerMappingOverride=1;, sudo update-grub"),
    ("no parameters", [without(Kind.FILE, PARAMS)], "peer-mapping", SKIP, "no parameters", ""),
    ("no peermem, dmabuf works", [NO_PEERMEM], "peermem", OK, "not needed", ""),
    ("no peermem, no dmabuf", [NO_PEERMEM, CLOSED], "peermem", WARN, "not loaded", "sudo modprobe nvidia-peermem"),
    ("both", [OLD_PEERMEM, CLOSED], "peermem", FAIL, "in conflict", "sudo rmmod nv_peer_mem"),
    ("both, dmabuf works", [OLD_PEERMEM], "peermem", WARN, "in conflict", "sudo rmmod nv_peer_mem"),
    ("the old one", [OLD_PEERMEM, NO_PEERMEM, CLOSED], "peermem", WARN, "instead", "sudo rmmod nv_peer_mem"),
    ("the old one, dmabuf works", [OLD_PEERMEM, NO_PEERMEM], "peermem", WARN, "instead", "sudo rmmod nv_peer_mem"),
    ("listed", [without(Kind.FOLDER, "/sys/module/nvidia_peermem", trouble=Trouble.DENIED),
        file("/proc/modules", "nvidia_peermem 20480 0 - Live 0x0\n")], "peermem", OK, "loaded", ""),
    ("modules unreadable", [without(Kind.FOLDER, "/sys/module/nvidia_peermem", trouble=Trouble.DENIED)],
        "peermem", SKIP, "cannot find out", ""),
    ("doorbells of an integrated GPU", [OFF, cuda(integrated=1)], "peer-mapping", SKIP, "its own memory", ""),
    ("gdrcopy of an integrated GPU", [NO_GDRDRV, cuda(integrated=1)], "gdrcopy", SKIP, "its own memory", ""),
    ("integrated, no peermem", [NO_PEERMEM, cuda(integrated=1)], "peermem", SKIP, "its own memory", ""),
    ("closed driver", [CLOSED], "dmabuf", WARN, "closed driver", "nvidia-open, in place of cuda-drivers"),
    ("old kernel", [OLD_KERNEL, without(Kind.FILE, CONFIG), cuda(dma_buf_supported=0)],
        "dmabuf", WARN, "5.15.0-60-generic is older", "6.2"),
    ("old kernel that can", [OLD_KERNEL, NO_PEERMEM],
        "dmabuf", WARN, "libcuda says that dmabuf works; NVIDIA's guide asks for Linux 6.2", "doctor --probe"),
    ("old kernel that can, no peermem", [OLD_KERNEL, NO_PEERMEM],
        "gpu-memory-path", WARN, "libcuda says that dmabuf works", "doctor --probe"),
    ("old kernel that can, peermem needed no more", [OLD_KERNEL, NO_PEERMEM], "peermem", OK, "not needed", ""),
    ("old kernel that can, closed driver", [OLD_KERNEL, NO_PEERMEM, CLOSED], "gpu-memory-path", FAIL, "neither", ""),
    ("old kernel, libcuda says nothing", [OLD_KERNEL, NO_PEERMEM, NO_CUDA],
        "gpu-memory-path", FAIL, "neither dmabuf", "modprobe nvidia-peermem, or"),
    ("ib_core takes no peermem", [NO_PEERMEM, CLOSED, INBOX_IB_CORE],
        "peermem", WARN, "this kernel's ib_core has no support for it", "install DOCA-OFED, then sudo modprobe"),
    ("ib_core takes peermem", [NO_PEERMEM, CLOSED, PEER_IB_CORE], "peermem", WARN, "not loaded", "sudo modprobe"),
    ("ib_core takes no peermem, nor dmabuf", [NO_PEERMEM, CLOSED, INBOX_IB_CORE],
        "gpu-memory-path", FAIL, "neither dmabuf nor nvidia-peermem", "install DOCA-OFED, then sudo modprobe"),
    ("new enough kernel", [file("/proc/sys/kernel/osrelease", "6.2.0\n"), without(Kind.FILE, CONFIG)],
        "dmabuf", OK, "support it", ""),
    ("no shared buffers", [config("CONFIG_PCI_P2PDMA=y\n")],
        "dmabuf", WARN, "no CONFIG_DMA_SHARED_BUFFER", "CONFIG_DMA_SHARED_BUFFER=y"),
    ("no P2PDMA", [config("CONFIG_DMA_SHARED_BUFFER=y\n# CONFIG_PCI_P2PDMA is not set\n")],
        "dmabuf", WARN, "no CONFIG_PCI_P2PDMA", "CONFIG_PCI_P2PDMA=y"),
    ("a GPU without", [cuda(dma_buf_supported=0)], "dmabuf", WARN, "libcuda says not supported", "nvidia-open"),
    ("libibverbs too old", [NO_REGIONS], "dmabuf", WARN, "libibverbs has no ibv_reg_dmabuf_mr", "rdma-core"),
    ("libmlx5 too old", [NO_QUEUES], "dmabuf", WARN, "libmlx5 has no mlx5dv_devx_umem_reg_ex", "44"),
    ("several", [CLOSED, cuda(dma_buf_supported=0), NO_QUEUES],
        "dmabuf", WARN, "closed driver, and 2 more", "; update rdma-core"),
    ("no configuration", [without(Kind.FILE, CONFIG)], "dmabuf", OK, "support it", ""),
    ("no libcuda", [NO_CUDA], "dmabuf", SKIP, "cannot read everything", ""),
    ("dmabuf of an integrated GPU", [cuda(integrated=1)], "dmabuf", SKIP, "integrated", ""),
    ("by dmabuf", [NO_PEERMEM], "gpu-memory-path", OK, "dmabuf", ""),
    ("queues alone without", [NO_PEERMEM, NO_QUEUES], "gpu-memory-path", OK, "dmabuf", ""),
    ("by peermem", [CLOSED], "gpu-memory-path", OK, "nvidia-peermem", ""),
    ("by peermem, libcuda hangs", [NO_CUDA], "gpu-memory-path", OK, "nvidia-peermem", ""),
    ("neither", [CLOSED, NO_PEERMEM],
        "gpu-memory-path", FAIL, "neither dmabuf nor nvidia-peermem", "modprobe nvidia-peermem"),
    ("peermem, and a GPU without GPUDirect", [cuda(gpu_direct_rdma_supported=0, dma_buf_supported=0)],
        "gpu-memory-path", FAIL, "neither", "nvidia-peermem"),
    ("old peermem alone", [OLD_KERNEL, NO_PEERMEM, OLD_PEERMEM], "gpu-memory-path", OK, "nv_peer_mem", ""),
    ("integrated", [cuda(integrated=1)], "gpu-memory-path", WARN, "CPU_GPU", "nothing to set"),
    ("unknown", [NO_PEERMEM, NO_CUDA], "gpu-memory-path", SKIP, "cannot find out", ""),
    ("no gdrcopy", [NO_GDRDRV, NO_GDRAPI, file("/proc/modules", "")], "gdrcopy", OK, "not installed; optional", ""),
    ("no gdrdrv", [NO_GDRDRV, file("/proc/modules", "")],
        "gdrcopy", WARN, "gdrdrv is not loaded", "sudo apt install -y check kmod && git clone"),
    ("no device node", [NO_DEVICE], "gdrcopy", WARN, "/dev/gdrdrv cannot be opened", "./insmod.sh"),
    ("node not for users", [NOT_ALLOWED], "gdrcopy", WARN, "this user may not open", "sudo chmod 666 /dev/gdrdrv"),
    ("no library", [NO_GDRAPI], "gdrcopy", WARN, "libgdrapi.so.2 is not found", "GDRCOPY_PATH_L"),
    ("library by GDRCOPY_PATH_L", [NO_GDRAPI, answer("environment", "GDRCOPY_PATH_L", value="/opt/gdr/"),
        answer("symbols", "/opt/gdr/libgdrapi.so.2", "gdr_open", value=["gdr_open"])], "gdrcopy", OK, "there", ""),
    ("the guide's modules", [NO_GDRDRV, file("/proc/modules", data("seed/lsmod.txt"))], "gdrcopy", OK, "there", ""),
]


@pytest.mark.parametrize(
    ("changes", "check", "status", "said", "cure"), [pytest.param(*row, id=i) for i, *row in CAUSES]
)
def test_cause(changes, check, status, said, cure):
    (finding,) = found(check, *changes)
    assert finding.status is status
    assert said in finding.summary
    assert len(finding.summary) < 80
    assert cure in finding.cure
    assert bool(finding.cure) == (status in (WARN, FAIL))
    assert finding.read or "integrated" in finding.summary or "own" in finding.summary


def test_the_ready_machine():
    findings = [f for f in report().findings if f.check in CHECKS]
    assert [f.check for f in findings] == list(CHECKS)
    assert [f for f in findings if f.status is not OK] == []


def test_without_a_gpu():
    gone = folder("/sys/bus/pci/devices"), NO_SMI
    assert {(f.status, f.summary) for f in report(*gone).findings if f.check in CHECKS} == {(SKIP, "no GPU")}


@pytest.mark.parametrize(("wanted", "status"), [(0, WARN), (250, WARN), (251, FAIL), (4096, FAIL)])
def test_bar1_against_what_is_wanted(wanted, status):
    small = [NO_BAR1_FILE, command("nvidia-smi -q", SMALL)]
    (finding,) = found("bar1", *small, wanted=Wanted(bar1_mib=wanted))
    assert finding.status is status
    assert ("wanted" in finding.summary) == (status is FAIL)
    assert finding.reboot


def test_bar1_that_others_use():
    used = READY.recorded[Kind.COMMAND, ("nvidia-smi", "-q")].text.replace(": 131071 MiB", ": 100 MiB")
    assert statuses("bar1", command("nvidia-smi -q", used), wanted=Wanted(bar1_mib=101)) == [FAIL]
    assert statuses("bar1", wanted=Wanted(bar1_mib=131071)) == [OK]


def test_each_gpu_has_its_own_bar1():
    two = command("nvidia-smi -q", data("nvidia-smi-q-two.txt"))
    assert [(f.gpu, f.status) for f in found("bar1", two)] == [("GPU0", OK), ("GPU1", WARN), ("GPU2", OK)]


def test_what_takes_a_reboot():
    reboot = {f.check.id: f.reboot for f in report(CLOSED, NO_PEERMEM, NO_GDRDRV, OFF, file(RESOURCE, RTX)).findings}
    assert {name for name, needed in reboot.items() if needed} >= {"bar1", "peer-mapping", "dmabuf"}
    assert not reboot["peermem"]
    (finding,) = found("dmabuf", NO_REGIONS)
    assert finding.summary == "libibverbs has no ibv_reg_dmabuf_mr"
    assert not finding.reboot


def test_no_way_to_gpu_memory_is_not_ready_for_hardware_alone():
    result = report(CLOSED, NO_PEERMEM)
    assert "gpu-memory-path (GPU0)" in result.ready(Use.VERBS).why
    assert "gpu-memory-path" not in result.ready(Use.SOFTWARE).why


def test_the_kernels_own_configuration_is_taken_first():
    packed = file("/proc/config.gz", gzip.compress(b"CONFIG_64BIT=y\n# CONFIG_PCI_P2PDMA is not set\n"))
    (finding,) = found("dmabuf", packed)
    assert finding.summary == "no CONFIG_DMA_SHARED_BUFFER, and 1 more"
    assert {one.source for one in finding.read} == {"/proc/config.gz"}
    assert "CONFIG_PCI_P2PDMA is not set" in finding.read[0].value


def test_the_version_of_peermem():
    (finding,) = found("peermem")
    assert [(one.source, one.value) for one in finding.read][1:] == [
        ("/sys/module/nvidia_peermem/version", "580.65.06")
    ]


def test_bar1_mib():
    assert [bar1_mib(text) for text in (A100, H100, RTX)] == [131072, 131072, 256]
    assert bar1_mib("".join(A100.splitlines(keepends=True)[:5])) is None
    assert bar1_mib("".join(A100.splitlines(keepends=True)[4:])) == 0


@given(st.integers(20, 40), st.booleans(), st.integers(1, 1 << 20))
def test_bar1_mib_of_any_size(bits, wide, base):
    size = 1 << bits
    bar0 = [(0xE900_0000, 0xE9FF_FFFF, 0x40200)] + [(0, 0, 0)] * wide
    regions = [*bar0, (base * size, (base + 1) * size - 1, 0x14220C), *[(0, 0, 0)] * 11]
    text = "".join(f"0x{start:016x} 0x{end:016x} 0x{flags:016x}\n" for start, end, flags in regions)
    assert bar1_mib(text) == size >> 20


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("PeerMappingOverride=1;", True), ("PeerMappingOverride=0x1", True), ("peermappingoverride=1", True),
        ("RMForceStaticBar1=1; PeerMappingOverride = 1", True), ("PeerMappingOverride=0", False), ("", False),
        ("PeerMappingOverride=0x0;", False), ("PeerMappingOverride", False), ("NotPeerMappingOverride=1", False),
        ("PeerMappingOverride=on", False),
    ],
)
def test_overrides(words, expected):
    assert overrides(words) is expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "PeerMappingOverride=1;"), ("peermappingoverride=0;", "PeerMappingOverride=1;"),
        ("A=1; B=0x2;", "A=1;B=0x2;PeerMappingOverride=1;"), ("A='$(x)';B", "PeerMappingOverride=1;"),
    ],
)
def test_beside(words, expected):
    assert beside(words) == expected


@given(st.text())
def test_what_is_put_beside_others_overrides(words):
    assert overrides(beside(words))
    assert "'" not in beside(words)


def test_one_cure_in_all_places():
    cures = {one.id: one.cure for one in (*all_checks(), *PROBES)}
    assert cures["peer-mapping"] == CURE
    assert CURE in cures["root"]
    assert CURE in cures["probe-uar"]
    assert "<" not in CURE


NAMES = st.text(string.ascii_letters, min_size=1)


@given(st.dictionaries(NAMES, st.integers(0, (1 << 32) - 1).map(str) | NAMES.map('"{}"'.format)))
def test_parameters_that_are_printed_are_found(table):
    assert parameters("".join(f"{name}: {value}\n" for name, value in table.items())) == table


@given(st.dictionaries(st.text(string.ascii_uppercase + "_0123456789", min_size=1), st.sampled_from("ymn")))
def test_options_that_are_printed_are_found(table):
    forms = {"y": "CONFIG_{}=y", "m": "CONFIG_{}=m", "n": "# CONFIG_{} is not set"}
    lines = [forms[value].format(name) for name, value in table.items()]
    text = "\n".join(["# Linux/x86 Kernel Configuration", 'CONFIG_CC_VERSION_TEXT="gcc"', *lines, ""])
    assert options(unpacked(gzip.compress(text.encode()))) == {name: value != "n" for name, value in table.items()}


@given(st.text() | st.binary().map(lambda b: b.decode(errors="replace")))
def test_any_text(text):
    assert bar1_mib(text) is None
    assert all(isinstance(value, str) for value in parameters(text).values())
    assert overrides(text) in (True, False)
    assert set(options(text).values()) <= {True, False}


@given(st.binary())
def test_any_bytes_are_unpacked(data):
    assert isinstance(unpacked(data), str)
    assert isinstance(unpacked(gzip.compress(data)[: len(data)]), str)


def test_a_small_file_of_many_zeros_is_not_unpacked_whole():
    assert len(unpacked(gzip.compress(bytes(64 << 20), 9))) == 4 << 20
