"""The doctor's checks of the operating system and of the process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from doctor_rig import answer, file, folder, found, link, report, without
from gpunetio.doctor import LiveHost, Status, Trouble, Use
from gpunetio.doctor.finding import Readiness
from gpunetio.doctor.machine.host import Kind

OK, WARN, FAIL, SKIP = Status.OK, Status.WARN, Status.FAIL, Status.SKIP
GOVERNOR = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
USER = answer("user", value={"uid": 1000, "gid": 1000})
PARAMS, OPTION = "/proc/driver/nvidia/params", 'options nvidia NVreg_RegistryDwords="PeerMappingOverride=1;"\n'
OVERRIDE = file(PARAMS, 'RmMsg: ""\nRegistryDwords: "PeerMappingOverride=1;"\n')
NO_OVERRIDE = file(PARAMS, 'RmMsg: ""\nRegistryDwords: ""\n')
INTEGRATED = answer("cuda", value={"devices": [{"integrated": 1} | dict.fromkeys(
    ("pci_domain_id", "pci_device_id"), 0) | {"pci_bus_id": 0xCA}]})
DOCKER = file("/.dockerenv", "")
NO_PEERMEM = without(Kind.FOLDER, "/sys/module/nvidia_peermem")
NO_CUDA = without(Kind.QUESTION, "cuda", trouble=Trouble.FAILED)
KUBERNETES = answer("environment", "KUBERNETES_SERVICE_HOST", value="10.0.0.1")
NODES = (link("/dev/nvidiactl", "/dev/nvidiactl"), folder("/dev/infiniband", "rdma_cm", "uverbs0", "uverbs1"))


def limit(soft: int):
    return answer("limit", "MEMLOCK", value=[soft, soft])


def rights(capabilities: int):
    return file("/proc/self/status", f"Name:\tpython3\nCapPrm:\t{-1 % 2**41:016x}\nCapEff:\t{capabilities:016x}\n")


def shm(total: int):
    return answer("filesystem", "/dev/shm", value={"total": total, "free": 0})


def product(name: str):
    return file("/sys/class/dmi/id/product_name", f"{name}\n")


@pytest.mark.parametrize(
    ("release", "status"),
    [
        ("6.2.0", Status.OK), ("6.18.44-fc-v595", Status.OK), ("10.0", Status.OK), ("6.1.0-44-amd64", Status.WARN),
        ("5.15.0-122-generic", Status.WARN), ("", Status.SKIP), ("six", Status.SKIP),
    ],
)
def test_kernel(release, status):
    (finding,) = found("kernel", file("/proc/sys/kernel/osrelease", release + "\n"), NO_PEERMEM, NO_CUDA)
    assert finding.status is status
    assert not finding.reboot
    assert release in finding.summary or status is Status.SKIP
    assert ("nvidia-peermem" in finding.cure) == (status is Status.WARN)


def test_an_old_kernel_of_which_libcuda_says_that_it_can():
    """RHEL 8 has the functions of Linux 5.12 that dmabuf needs in its 4.18."""
    (finding,) = found("kernel", file("/proc/sys/kernel/osrelease", "4.18.0-553.el8_10.x86_64\n"), NO_PEERMEM)
    assert finding.status is Status.WARN
    assert "libcuda says that dmabuf works" in finding.summary
    assert "gpunetio doctor --probe" in finding.cure
    assert not finding.reboot


def test_an_old_kernel_with_nvidia_peermem():
    (finding,) = found("kernel", file("/proc/sys/kernel/osrelease", "5.15.0-122-generic\n"))
    assert finding.status is OK
    assert "nvidia-peermem is loaded" in finding.summary


@pytest.mark.parametrize(
    ("check", "changes", "expected", "words"),
    [
        ("root", [], [OK], "root"),
        ("root", [USER, NO_OVERRIDE], [WARN, WARN], "PeerMappingOverride=1"),
        ("root", [USER, OVERRIDE], [WARN, OK], "sudo <command>"),
        ("root", [USER, OVERRIDE, rights(1 << 14)], [FAIL, OK], "neither root nor CAP_NET_RAW"),
        ("root", [USER, OVERRIDE, rights(1 << 13)], [WARN, OK], "not root, but CAP_NET_RAW"),
        ("root", [USER, OVERRIDE, file("/proc/self/status", "")], [SKIP, OK], "capabilities are unknown"),
        ("root", [USER, file(PARAMS, 'RegistryDwords: "peermappingoverride=0x1"\n')], [WARN, OK], "not need it here"),
        ("root", [USER, file(PARAMS, 'RegistryDwords: "A=1;PeerMappingOverride=0"\n')], [WARN, WARN],
            '"A=1;PeerMappingOverride=1;"'),
        ("root", [USER, file(PARAMS, 'RegistryDwords: "NotPeerMappingOverride=1"\n')], [WARN, WARN], "CPU proxy"),
        ("root", [USER, NO_OVERRIDE, folder("/etc/modprobe.d", "a.conf"), file("/etc/modprobe.d/a.conf", OPTION)],
            [WARN, WARN], "sudo update-initramfs -u (Debian, Ubuntu)"),
        ("root", [USER, without(Kind.FILE, "/proc/driver/nvidia/params")], [WARN, WARN], "CPU proxy"),
        ("root", [USER, NO_OVERRIDE, INTEGRATED], [WARN, SKIP], "integrated: the CPU proxy"),
        ("root", [answer("user", value="me")], [SKIP], "unknown"),
        ("memlock", [], [OK], "no limit"),
        ("memlock", [limit(8 << 20)], [OK], "CAP_IPC_LOCK"),
        ("memlock", [limit(8 << 20), rights(0)], [WARN], "only 8 MiB"),
        ("memlock", [limit(1 << 20), rights(0)], [WARN], "only 1 MiB"),
        ("memlock", [limit(1 << 62), rights(0)], [WARN], "only 4.39805e+12 MiB"),
        ("memlock", [limit(10**400), rights(0)], [WARN], "only 4.39805e+12 MiB"),  # no float is that large
        ("memlock", [limit(64 << 10), rights(0)], [FAIL], "only 64 KiB"),
        ("memlock", [limit(64 << 10), rights(1 << 13)], [FAIL], "ulimit -l unlimited"),
        ("memlock", [limit(64 << 10), rights(0)], [FAIL], "/etc/security/limits.d"),
        ("memlock", [limit(64 << 10), rights(0)], [FAIL], "--ulimit memlock=-1"),
        ("memlock", [limit(64 << 10), rights(1 << 14)], [OK], "64 KiB"),
        ("memlock", [answer("limit", "MEMLOCK", value=[])], [SKIP], "unknown"),
        ("memlock", [answer("limit", "MEMLOCK", value=["much", None])], [SKIP], "unknown"),
        ("capabilities", [], [OK], "CAP_NET_RAW and CAP_IPC_LOCK"),
        ("capabilities", [rights(0xA80425FB)], [OK], "CAP_NET_RAW"),  # those of Docker
        ("capabilities", [rights(0)], [FAIL], "--cap-add=NET_RAW"),
        ("capabilities", [rights(1 << 14), USER], [FAIL], "no CAP_NET_RAW"),
        ("capabilities", [file("/proc/self/status", "CapEff:\tall\n")], [SKIP], "unknown"),
        ("container", [], [OK], "not in"),
        ("container", [DOCKER, *NODES], [OK], "Docker"),
        ("container", [DOCKER, *NODES, without(Kind.LINK, "/dev/nvidiactl")], [WARN], "/dev/nvidiactl"),
        ("container", [DOCKER, NODES[0], folder("/dev/infiniband", "rdma_cm")], [WARN], "--device=/dev/infiniband"),
        ("container", [file("/run/.containerenv", 'engine="podman-4.9"\n'), *NODES], [OK], "Podman"),
        ("container", [answer("container", value="lxc"), *NODES], [OK], "lxc"),
        ("container", [file("/proc/1/cgroup", "0::/kubepods.slice/kubepods-pod1.slice\n"), *NODES], [OK], "Kubernetes"),
        ("container", [file("/proc/1/cgroup", "0::/\n"), KUBERNETES, *NODES], [OK], "Kubernetes"),
        ("container", [folder("/.singularity.d", "env", "runscript"), *NODES], [OK], "Apptainer"),
        ("container", [answer("root_filesystem", value="overlay"), *NODES], [OK], "its root is an overlay"),
        ("container", [answer("root_filesystem", value=["overlay"])], [OK], "not in"),
        ("shared-memory", [], [OK], "64423 MiB"),
        ("shared-memory", [shm(64 << 20)], [WARN], "--shm-size"),
        ("shared-memory", [shm((64 << 20) + 1)], [OK], "64 MiB"),
        ("shared-memory", [answer("filesystem", "/dev/shm", value={"total": "much"})], [SKIP], "unknown"),
        ("virtual-machine", [], [OK], "not a virtual machine"),
        ("virtual-machine", [answer("hypervisor", value=True), product("p5.48xlarge")], [WARN], "p5.48xlarge"),
        ("virtual-machine", [file("/sys/hypervisor/type", "xen\n")], [WARN], "bare metal"),
        ("virtual-machine", [product("KVM Virtual Machine")], [WARN], "KVM"),
        ("virtual-machine", [product("GB200 NVL")], [OK], "not a virtual machine"),
        ("virtual-machine", [answer("hypervisor", value=None)], [SKIP], "unknown"),
        ("hugepages", [], [OK], "1024 huge pages of 2048 kB, 1024"),
        ("hugepages", [file("/proc/meminfo", "MemTotal:  1 kB\n")], [SKIP], "unknown"),
        ("cpu-governor", [], [OK], "performance"),
        ("cpu-governor", [file(GOVERNOR, "powersave\n")], [WARN], "cpupower frequency-set -g performance"),
        ("cpu-governor", [without(Kind.FILE, GOVERNOR)], [SKIP], "does not scale"),
    ],
)
def test_causes(check, changes, expected, words):
    findings = found(check, *changes)
    assert [finding.status for finding in findings] == expected
    assert any(words in f"{f.summary} {f.cure}" for f in findings)
    assert all(bool(f.cure) is (f.status in (WARN, FAIL)) and len(f.summary) < 80 for f in findings)


def test_who_is_not_root():
    ethernet, others = found("root", USER, NO_OVERRIDE)
    assert (ethernet.uses, others.uses) == ({Use.ETHERNET}, {Use.VERBS, Use.DMA})
    assert (ethernet.reboot, others.reboot) == (False, True)


@pytest.mark.parametrize(
    ("changes", "readiness"),
    [
        ([USER], Readiness.READY),
        ([USER, rights(1 << 14)], Readiness.NOT_READY),
        ([rights(1 << 14)], Readiness.NOT_READY),  # root of a container
        ([rights(1 << 13 | 1 << 14)], Readiness.READY),
    ],
)
def test_ethernet_takes_the_right_to_send_raw_packets(changes, readiness):
    assert report(*changes).ready(Use.ETHERNET).readiness is readiness
    assert report(*changes).ready(Use.VERBS).readiness is Readiness.READY


def test_too_little_locked_memory_is_not_ready():
    tiny = (limit(64 << 10), rights(0))
    assert report(*tiny).ready(Use.VERBS).readiness is Readiness.NOT_READY
    assert report(*tiny).ready(Use.SOFTWARE).readiness is Readiness.READY


def test_a_container_without_devices_lacks_none():
    """What the machine does not have, a container need not be given."""
    bare = (folder("/sys/bus/pci/devices"), folder("/sys/class/infiniband"))
    (finding,) = found("container", DOCKER, *bare, without(Kind.COMMAND, "nvidia-smi", "-q"))
    assert finding.status is OK


def test_a_mark_that_may_not_be_read_is_a_mark():
    (finding,) = found("container", without(Kind.FILE, "/.dockerenv", trouble=Trouble.DENIED), *NODES)
    assert "Docker" in finding.summary


def test_of_this_machine():
    """What the kernel prints here can be read."""
    host = LiveHost()
    assert set(host.ask("user").value) == {"uid", "gid"}
    assert "CapEff:" in host.read("/proc/self/status").text
    assert host.ask("hypervisor").value is (" hypervisor" in Path("/proc/cpuinfo").read_text())
    mounted = re.findall(r"^(?:\S+ ){4}/ .* - (\S+)", Path("/proc/self/mountinfo").read_text(), re.MULTILINE)
    assert host.ask("root_filesystem").value in (mounted or [""])  # "" where the root is no mount, as in a chroot
    assert host.ask("container").trouble in (Trouble.NONE, Trouble.DENIED)
