"""The doctor's checks of GPUs, their driver and CUDA: one machine for each cause."""

from pathlib import Path
from typing import Any

import pytest

from doctor_rig import READY, answer, changed, command, data, file, folder, found, link, report, statuses, without
from gpunetio.doctor import Machine, Status, Trouble, Use, Wanted, examine
from gpunetio.doctor.checks.cuda import CHECKS as CUDA_CHECKS
from gpunetio.doctor.checks.gpu import CHECKS as GPU_CHECKS
from gpunetio.doctor.machine import cuda_attributes
from gpunetio.doctor.machine.cuda_attributes import file_of
from gpunetio.doctor.machine.host import Kind, Reading
from gpunetio.doctor.machine.nvidia_driver import address, version
from gpunetio.doctor.machine.topology import matrix
from gpunetio.errors import InvalidValueError

OK, WARN, FAIL, SKIP = Status.OK, Status.WARN, Status.FAIL, Status.SKIP
TOOLKIT = "/usr/local/cuda/version.json"
VERSION, PCI = "/proc/driver/nvidia/version", "/sys/bus/pci/devices"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for {}  {}  Release Build  (dvs-builder@U16)  Thu Jan 2 2025\n"
SMI = READY.recorded[Kind.COMMAND, ("nvidia-smi", "-q")].text
DEVICE = READY.recorded[Kind.QUESTION, ("cuda",)].value["devices"][0]
NO_DRIVER = (
    without(Kind.FILE, VERSION), without(Kind.FOLDER, "/sys/module/nvidia"), without(Kind.FILE, "/proc/modules"),
    folder("/sys/module", "kernel", "mlx5_core"),
)
NO_PEERMEM = without(Kind.FOLDER, "/sys/module/nvidia_peermem")
NO_GPU = (
    folder(PCI, "0000:b5:00.0", "0000:b5:00.1"),
    command("nvidia-smi -q", "No devices were found\n", "exit status 6: No devices were found"),
)


def cuda(*more: dict[str, Any], version: int = 13000, **attributes: Any):
    """libcuda shows the ready GPU with these attributes, then more devices."""
    return answer("cuda", value={"driver_version": version, "devices": [DEVICE | attributes, *more]})


def smi(old: str, new: str):
    """nvidia-smi says something else."""
    assert old in SMI
    return command("nvidia-smi -q", SMI.replace(old, new))


def cuda_fails(said: str):
    """The question has no answer."""
    return Reading(Kind.QUESTION, ("cuda",), None, Trouble.FAILED, said)


NO_CUDA = cuda_fails("libcuda did not answer within 5 s")
NO_LIBRARY = cuda_fails("libcuda: exit status 1: libcuda.so.1: cannot open shared object file: No such file")
ANOTHER = DEVICE | {"pci_bus_id": 0x17, "name": "NVIDIA T400"}
HIDDEN = answer("environment", "CUDA_VISIBLE_DEVICES", value="7")

# cause, changes, check, how it ends, words of the summary, words of the cure
CAUSES = [
    ("too hot", [smi("HW Thermal Slowdown           : Not Active", "HW Thermal Slowdown           : Active")],
        "gpu-clocks", WARN, "HW Thermal Slowdown", "nvidia-smi -i 0000:ca:00.0 -q -d TEMPERATURE,POWER"),
    ("no power", [smi("HW Power Brake Slowdown       : Not", "HW Power Brake Slowdown       :")],
        "gpu-clocks", WARN, "HW Power Brake Slowdown", "power cables"),
    ("older driver", [smi("Clocks Event", "Clocks Throttle")], "gpu-clocks", OK, "SM at 210 MHz", ""),
    ("at rest", [], "gpu-clocks", OK, "SM at 210 MHz of 1410 MHz", ""),
    ("clocks are not told", [smi("Clocks Event Reasons", "Clocks")], "gpu-clocks", SKIP, "does not report", ""),
    ("no registration", [cuda(host_register_supported=0)], "gpu-host-register", WARN, "not supported", "CPU proxy"),
    ("registration", [cuda(host_register_supported=1)], "gpu-host-register", OK, "supported", ""),
    ("toolkit of C++", [], "cuda-toolkit", OK, "CUDA 13.0", ""),
    ("old toolkit", [file(TOOLKIT, '{"cuda": {"name": "CUDA SDK", "version": "12.5.1"}}')],
        "cuda-toolkit", WARN, "CUDA 12.5 is older than 12.6", "cuda-toolkit-13-0"),
    ("toolkit before 13", [file(TOOLKIT, '{"cuda": {"version": "12.6.0"}}')], "cuda-toolkit", OK, "needs 13.0", ""),
    ("no toolkit", [without(Kind.FILE, TOOLKIT)], "cuda-toolkit", SKIP, "only programs in C++", ""),
    ("another vendor's", [file(f"{PCI}/0000:ca:00.0/vendor", "0x1002\n"), command("nvidia-smi -q", "", "none")],
        "gpu-present", FAIL, "7 PCI functions", "lspci -d 10de:"),
    ("driver not loaded", NO_DRIVER, "gpu-driver", FAIL, "not loaded", "modprobe nvidia"),
    ("driver of CUDA 11", [file(VERSION, CLOSED.replace("535.183.01", "470.82.01"))],
        "gpu-driver", WARN, "470.82.01", "580.65.06"),
    ("just too old", [file(VERSION, OPEN.format("x86_64", "525.60.12"))], "gpu-driver", WARN, "525.60.12", "525.60.13"),
    ("just new enough", [file(VERSION, OPEN.format("x86_64", "525.60.13"))], "gpu-driver", OK, "525.60.13", ""),
    ("Arm", [file(VERSION, OPEN.format("aarch64", "580.95.05"))], "gpu-driver", OK, "580.95.05", ""),
    ("version in sysfs only", [without(Kind.FILE, VERSION), file("/sys/module/nvidia/version", "570.86.15\n")],
        "gpu-driver", OK, "570.86.15", ""),
    ("no version", [without(Kind.FILE, VERSION)], "gpu-driver", SKIP, "does not report", ""),
    ("closed driver", [file(VERSION, CLOSED), NO_PEERMEM],
        "gpu-driver-open", WARN, "closed", "nvidia-open, in place"),
    ("closed driver, peermem", [file(VERSION, CLOSED)], "gpu-driver-open", OK, "nvidia-peermem is loaded", ""),
    ("closed driver, peermem for a GPU without", [file(VERSION, CLOSED), cuda(gpu_direct_rdma_supported=0)],
        "gpu-driver-open", WARN, "closed", "nvidia-open, in place"),
    ("closed by modinfo", [without(Kind.FILE, VERSION), NO_PEERMEM, command("modinfo -F license nvidia", "NVIDIA\n")],
        "gpu-driver-open", WARN, "load nvidia-peermem", "modprobe nvidia-peermem"),
    ("open by modinfo", [without(Kind.FILE, VERSION), command("modinfo -F license nvidia", "Dual MIT/GPL\n")],
        "gpu-driver-open", OK, "open", ""),
    ("flavour unknown", [without(Kind.FILE, VERSION), command("modinfo -F license nvidia", "", "not found")],
        "gpu-driver-open", SKIP, "does not report", ""),
    ("CUDA 12.8", [cuda(version=12080)], "cuda-version", WARN, "CUDA 12.8: the static device library", "580.65.06"),
    ("CUDA 12.5", [cuda(version=12050)], "cuda-version", WARN, "12.6 or newer is recommended", "nvidia-open"),
    ("CUDA 12.6", [cuda(version=12060)], "cuda-version", WARN, "CUDA 12.6: the static device library", "nvidia-open"),
    ("CUDA 12.0", [cuda(version=12000)], "cuda-version", WARN, "CUDA 12.0: 12.6 or newer", "nvidia-open"),
    ("CUDA 11.8", [cuda(version=11080)], "cuda-version", FAIL, "CUDA 11.8", "580.65.06"),
    ("CUDA 13.1", [cuda(version=13010)], "cuda-version", OK, "CUDA 13.1", ""),
    ("no libcuda", [NO_LIBRARY], "cuda-version", FAIL, "libcuda.so.1", "NVIDIA_DRIVER_CAPABILITIES"),
    ("libcuda hangs", [NO_CUDA], "cuda-version", SKIP, "does not report", ""),
    ("no device shown", [answer("cuda", value={"error": 100})], "cuda-version", FAIL, "NO_DEVICE (100)", "--gpus all"),
    ("no fabric", [answer("cuda", value={"error": 802})], "cuda-version", FAIL, "SYSTEM_NOT_READY", "fabricmanager"),
    ("other versions", [answer("cuda", value={"error": 803})], "cuda-version", FAIL, "DRIVER_MISMATCH (803)", "reboot"),
    ("no nvidia-uvm", [answer("cuda", value={"error": 999})], "cuda-version", FAIL, "UNKNOWN (999)", "nvidia-uvm"),
    ("another error", [answer("cuda", value={"error": 719})], "cuda-version", FAIL, "719", "cuda.h"),
    ("Turing", [cuda(compute_capability_major=7, compute_capability_minor=5)], "gpu-compute", FAIL, "sm_75", "Ampere"),
    ("Blackwell", [cuda(compute_capability_major=12)], "gpu-compute", OK, "sm_120", ""),
    ("Volta by nvidia-smi", [NO_CUDA, smi("Ampere", "Volta")], "gpu-compute", FAIL, "Volta", "Ampere"),
    ("Ampere by nvidia-smi", [NO_CUDA], "gpu-compute", OK, "Ampere", ""),
    ("no persistence", [smi("Persistence Mode                      : Enabled", "Persistence Mode : Disabled")],
        "gpu-persistence", WARN, "off", "nvidia-smi -i 0000:ca:00.0 -pm 1"),
    ("display", [cuda(kernel_exec_timeout=1)], "gpu-exec-timeout", WARN, "after some seconds", "multi-user.target"),
    ("MIG", [smi("Current                           : Disabled", "Current : Enabled")],
        "gpu-mig", WARN, "one instance", "nvidia-smi -i 0000:ca:00.0 -mig 0"),
    ("MIG pending", [smi("Pending                           : Disabled", "Pending : Enabled")],
        "gpu-mig", WARN, "after the next reset", "-mig 0"),
    ("MIG on a GPU without", [smi("Current                           : Disabled", "Current : N/A")],
        "gpu-mig", OK, "off", ""),
    ("integrated", [cuda(integrated=1)], "gpu-integrated", WARN, "CPU proxy", "--queue-memory cpu_gpu"),
    ("DGX Spark without CUDA",
        [NO_CUDA, file("/proc/driver/nvidia/gpus/0000:ca:00.0/information", "Model: NVIDIA GB10\n")],
        "gpu-integrated", WARN, "integrated", "cpu_gpu"),
    ("no GPUDirect", [cuda(gpu_direct_rdma_supported=0, dma_buf_supported=0)],
        "gpu-direct-rdma", FAIL, "no dmabuf", "--payload-memory host"),
    ("dmabuf alone", [cuda(gpu_direct_rdma_supported=0)], "gpu-direct-rdma", WARN, "only by dmabuf", ""),
    ("integrated, no GPUDirect", [cuda(gpu_direct_rdma_supported=0, dma_buf_supported=0, integrated=1)],
        "gpu-direct-rdma", WARN, "integrated", "nothing to set"),
    ("lazy loading", [answer("environment", "CUDA_MODULE_LOADING", value="LAZY")],
        "module-loading", WARN, "LAZY", "export CUDA_MODULE_LOADING=EAGER"),
    ("loading not set", [answer("environment", "CUDA_MODULE_LOADING", value="")],
        "module-loading", OK, "gpunetio sets EAGER", ""),
    ("hidden", [answer("cuda", value={"driver_version": 13000, "devices": []}), HIDDEN],
        "visible-devices", FAIL, "CUDA_VISIBLE_DEVICES=7 hides it", "unset CUDA_VISIBLE_DEVICES"),
    ("renumbered", [answer("cuda", value={"driver_version": 13000, "devices": [ANOTHER, DEVICE]})],
        "visible-devices", WARN, "device 1", "name it 0000:ca:00.0"),
]


@pytest.mark.parametrize(
    ("changes", "check", "status", "said", "cure"), [pytest.param(*row, id=i) for i, *row in CAUSES]
)
def test_cause(changes, check, status, said, cure):
    finding = found(check, *changes)[0]
    assert finding.status is status
    assert said in finding.summary
    assert len(finding.summary) < 80
    assert cure in finding.cure
    assert bool(finding.cure) == (status in (WARN, FAIL))
    assert "<" not in finding.cure.replace("MIG-<uuid>", "")
    assert finding.read


@pytest.mark.parametrize("order", [100, None])
def test_the_order_of_writes_is_shown_if_it_is_known(order):
    (finding,) = found("gpu-direct-rdma", cuda(gpu_direct_rdma_writes_ordering=order))
    assert finding.status is OK
    shown = [each.value for each in finding.read if "writes_ordering" in each.value]
    assert shown == ([] if order is None else ["gpu_direct_rdma_writes_ordering = 100"])


def test_the_ready_machine():
    findings = [f for f in report().findings if f.check in (*GPU_CHECKS, *CUDA_CHECKS)]
    assert {f.check for f in findings} == {*GPU_CHECKS, *CUDA_CHECKS}
    assert [f for f in findings if f.status is not OK] == []


def test_without_a_gpu_only_that_is_wrong():
    findings = [f for f in report(*NO_GPU).findings if f.check in (*GPU_CHECKS, *CUDA_CHECKS)]
    assert [f.check.id for f in findings if f.status is FAIL] == ["gpu-present"]
    others = {(f.status, f.summary) for f in findings if f.check.id != "gpu-present"}
    assert others == {(SKIP, "no GPU")}
    verdict = report(*NO_GPU).ready(Use.VERBS)
    assert (verdict.readiness, verdict.why.split(",")[0]) == ("1", "gpu-present")


def test_nothing_is_known_of_gpus_where_nothing_can_be_read():
    unreadable = without(Kind.FOLDER, PCI, trouble=Trouble.DENIED), without(Kind.COMMAND, "nvidia-smi", "-q")
    assert statuses("gpu-present", *unreadable) == [SKIP]


def test_a_gpu_that_is_not_there():
    with pytest.raises(InvalidValueError, match=r"no GPU is '3'; there is GPU0 \(0000:ca:00\.0\)"):
        found("gpu-present", wanted=Wanted(gpu="3"))


def test_areas():
    assert {one.area for one in GPU_CHECKS}.isdisjoint(one.area for one in CUDA_CHECKS)


@pytest.mark.parametrize("wanted", ["0", "GPU0", "ca:00.0", "0000:ca:00.0", "00000000:CA:00.0"])
def test_a_gpu_by_any_name(wanted):
    assert statuses("gpu-present", wanted=Wanted(gpu=wanted)) == [OK]


@pytest.mark.parametrize("other", ["vfio-pci", "nouveau"])
def test_a_gpu_of_another_driver(other):
    driver, own = found("gpu-driver", link(f"{PCI}/0000:ca:00.0/driver", f"/sys/bus/pci/drivers/{other}"))
    assert (driver.status, driver.gpu) == (OK, "")
    assert (own.status, own.gpu) == (FAIL, "GPU0")
    assert other in own.summary
    assert other in own.cure


TWO = command("nvidia-smi -q", data("nvidia-smi-q-two.txt"))  # it has no ca:00.0


def test_gpus_are_numbered_as_nvidia_smi_does():
    """GPU0 is its GPU0, though sysfs shows another before it."""
    devices = READY.recorded[Kind.FOLDER, (PCI,)].names
    first = [
        folder(PCI, "0000:01:00.0", *devices), file(f"{PCI}/0000:01:00.0/vendor", "0x10de\n"),
        file(f"{PCI}/0000:01:00.0/class", "0x030200\n"),
    ]
    gpus = Machine(changed(READY, *first), Wanted()).all_gpus
    assert [(gpu.name, gpu.address) for gpu in gpus] == [("GPU0", "0000:ca:00.0"), ("GPU1", "0000:01:00.0")]
    gpus = Machine(changed(READY, *first, without(Kind.LINK, "/dev/nvidiactl")), Wanted()).all_gpus
    assert [gpu.address for gpu in gpus] == ["0000:01:00.0", "0000:ca:00.0"]


def test_a_gpu_that_the_driver_lost():
    findings = found("gpu-driver", TWO)
    assert [(f.status, f.gpu, f.reboot) for f in findings] == [(OK, "", False), (FAIL, "GPU2", False)]
    assert "ca:00.0" in findings[1].cure
    assert statuses("gpu-persistence", TWO) == [OK, WARN, SKIP]
    assert statuses("gpu-mig", TWO) == [WARN, OK, SKIP]


@pytest.mark.parametrize("bound", [False, True])
def test_a_gpu_that_a_container_was_not_given(bound):
    shown = answer("cuda", value={"driver_version": 13000, "devices": [DEVICE | {"pci_bus_id": 0x18}]})
    vfio = link(f"{PCI}/0000:ca:00.0/driver", "/sys/bus/pci/drivers/vfio-pci")
    result = report(TWO, shown, file("/.dockerenv", ""), *([vfio] if bound else []))
    (own,) = (f for f in result.findings if f.check.id == "gpu-driver" and f.gpu == "GPU2")
    assert (own.status, own.summary) == (SKIP, "not given to this container (Docker)")
    assert [f.check.id for f in result.findings if f.gpu == "GPU2" and f.status is FAIL] == []


def asked(*changes):
    """What a machine with these changes was asked."""
    host = changed(READY, *changes)
    examine(host)
    matrix(Machine(host, Wanted()))
    return {reading.source for reading in host.readings()}


NO_MODULES = *NO_DRIVER, without(Kind.FOLDER, "/sys/module")
ASKED = {"nvidia-smi -q", "nvidia-smi topo -m", "cuda"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], ASKED),
        (NO_DRIVER, set()),  # its nodes outlive a module that was removed
        (NO_MODULES, ASKED),  # a sandbox that shows no module, and has the nodes
        ([*NO_DRIVER, folder("/sys/module")], ASKED),  # likewise
        ([without(Kind.FILE, VERSION)], ASKED),
        ([without(Kind.FOLDER, "/sys/module/nvidia")], ASKED),
        ([without(Kind.LINK, "/dev/nvidiactl")], set()),
        ([*NO_MODULES, without(Kind.LINK, "/dev/nvidiactl")], set()),
        ([without(Kind.LINK, "/dev/nvidia-uvm")], ASKED - {"cuda"}),
    ],
)
def test_nothing_is_asked_that_would_load_a_module_or_make_a_node(changes, expected):
    assert asked(*changes) & ASKED == expected


def test_what_is_said_instead():
    (finding,) = found("cuda-version", without(Kind.LINK, "/dev/nvidia-uvm"))
    assert (finding.status, finding.summary) == (SKIP, "libcuda is not asked: this would create /dev/nvidia-uvm")
    (finding,) = found("topology-agrees", *NO_DRIVER)
    assert finding.summary == "nvidia-smi topo -m does not run: this would load nvidia"


def test_the_guides_gpu():
    guides = command("nvidia-smi -q", data("seed/nvidia-smi-q.txt"))
    assert statuses("gpu-persistence", guides) == [OK]
    assert statuses("gpu-compute", guides, NO_CUDA) == [OK]
    assert statuses("gpu-mig", guides) == [SKIP]


def test_where_libcuda_was_found():
    (finding,) = found("cuda-version")
    assert [one.value for one in finding.read] == ["13000", "/usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06"]
    compat = "/usr/local/cuda/compat/libcuda.so.535.54.03"
    (finding,) = found("cuda-version", answer("cuda", value={"error": 803, "file": compat}))
    assert [one.value for one in finding.read] == ["cuInit = 803", compat]


# cuda.h, CUresult.
CUINIT = {
    2: "OUT_OF_MEMORY", 34: "STUB_LIBRARY", 46: "DEVICE_UNAVAILABLE", 100: "NO_DEVICE", 101: "INVALID_DEVICE",
    304: "OPERATING_SYSTEM", 802: "SYSTEM_NOT_READY", 803: "SYSTEM_DRIVER_MISMATCH",
    804: "COMPAT_NOT_SUPPORTED_ON_DEVICE", 999: "UNKNOWN",
}


@pytest.mark.parametrize(("error", "name"), CUINIT.items(), ids=CUINIT.values())
def test_errors_of_cuinit_are_named(error, name):
    (finding,) = found("cuda-version", answer("cuda", value={"error": error}))
    assert f"{name} ({error})" in finding.summary
    assert finding.cure


def test_the_file_of_a_library():
    maps = [
        "7f1e64a00000-7f1e64a21000 rw-p 00000000 00:00 0 \n",
        "7ffc1b5f9000-7ffc1b61a000 rw-p 00000000 00:00 0 [stack]\n",
        "7f1e66c00000-7f1e66c2a000 r--p 00000000 08:01 12 /usr/lib/libcudart.so.13.0.48\n",
        "7f1e66e00000-7f1e66e2a000 r--p 00000000 08:01 77 /opt/my libs/libcuda.so.580.65.06\n",
    ]
    assert file_of("libcuda", maps) == "/opt/my libs/libcuda.so.580.65.06"
    assert file_of("libibverbs", maps) == ""
    with open("/proc/self/maps") as lines:
        assert Path(file_of("libc", lines)).is_file()


@pytest.mark.parametrize("error", [100, 803])
def test_only_another_library_than_the_module_takes_a_reboot(error):
    (finding,) = found("cuda-version", answer("cuda", value={"error": error}))
    assert finding.reboot == (error == 803)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CLOSED, "535.183.01"), (OPEN.format("x86_64", "565.57.01"), "565.57.01"),
        (OPEN.format("aarch64", "555.58"), "555.58"), ("NVRM version: ?\nGCC version:  gcc version 13.3.0\n", ""),
    ],
)
def test_version(text, expected):
    host = changed(READY, file(VERSION, text), without(Kind.FILE, "/sys/module/nvidia/version"))
    assert version(Machine(host, Wanted()))[0] == expected


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ({"pci_domain_id": 15, "pci_bus_id": 1, "pci_device_id": 0}, "000f:01:00.0"), ({"pci_bus_id": 1}, ""),
        ({"pci_domain_id": -1, "pci_bus_id": 1, "pci_device_id": 0}, ""), ({}, ""),
        ({"pci_domain_id": 0, "pci_bus_id": "ca", "pci_device_id": True}, ""),
    ],
)
def test_address(device, expected):
    assert address(device) == expected


@pytest.mark.parametrize("value", [None, [], "13.0", 7, {"devices": 3}, {"devices": [None, 1, {}]}, {"error": "x"}])
def test_answers_of_any_shape(value):
    findings = [f for f in report(answer("cuda", value=value)).findings if f.check in CUDA_CHECKS]
    assert {f.check for f in findings} == set(CUDA_CHECKS)
    assert {f.status for f in findings} <= {OK, SKIP}
    assert not any("a bug in" in f.summary for f in findings)


class Libcuda:
    """A driver with two devices, of which the second has no attribute 124."""

    def cuInit(self, flags):
        return 0

    def cuDriverGetVersion(self, version):
        version._obj.value = 13000
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = 70 + ordinal
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = f"device {device.value}".encode()
        return 0

    def cuDeviceGetAttribute(self, value, number, device):
        if device.value == 71 and number == 124:
            return 1  # CUDA_ERROR_INVALID_VALUE
        value._obj.value = 1000 * device.value + number
        return 0


def test_attributes_that_a_driver_tells_and_one_that_it_does_not_know(monkeypatch):
    monkeypatch.setattr(cuda_attributes.ctypes, "CDLL", lambda name: Libcuda())
    told = cuda_attributes.describe()
    assert told["driver_version"] == 13000
    numbers = cuda_attributes.ATTRIBUTES
    all_of_it = {name: 70_000 + number for name, number in numbers.items()}
    but_one = {name: 71_000 + number for name, number in numbers.items() if number != 124}
    assert told["devices"] == [{"name": "device 70"} | all_of_it, {"name": "device 71"} | but_one]
