"""Probes try out a NIC and a GPU. Files only hint at what works; probes decide.

They run in a separate process (process.py), because a driver or a kernel may hang or crash.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..finding import EVERY_USE, GUIDE, HARDWARE, Check, Evidence, Finding, Status, Use, check, fail, skip
from ..machine import peer_mapping, topology
from ..machine.devices import SOFTWARE_NIC, Machine
from ..machine.nics import is_nvidia

AREA = "Probes"
_VERBS = frozenset({Use.VERBS, Use.SOFTWARE})
_OF_NIC = ("probe-open", "probe-loopback-host")  # probes without a GPU
_SOFTWARE = "soft0"
_CLOSE = "close"  # the step after the last probe
_HUNG = "look for a failure of the GPU, the NIC or a driver: sudo dmesg | tail"


def _probe(
    id: str, title: str, *, why: str, cure: str, source: str, uses: frozenset[Use], reboot: bool = False,
    essential: bool = False, settles: str = "",
) -> Check:
    """Declare a probe. `probe_process.TRIALS` implements it."""
    declare = check(
        id, title, why=why, cure=cure, source=source, uses=uses, reboot=reboot, essential=essential,
        settles=frozenset(settles.split()),
    )
    return declare(lambda machine: iter([one for one in run_probes(machine) if one.check.id == id]))


PROBES = (
    _probe(
        "probe-open", "The NIC opens",
        why="A device that is listed but does not open lacks a user-space driver or permissions.",
        cure="gpunetio devices -l; sudo modprobe ib_uverbs; ls -l /dev/infiniband",
        source="ibv_open_device(3)", uses=EVERY_USE, essential=True, settles="uverbs nic-driver",
    ),
    _probe(
        "probe-loopback-host", "The CPU writes through the NIC",
        why="If the NIC fails to carry out a write that the CPU posts, it will also fail for a kernel.",
        cure="gpunetio devices -d <device> -v: an active port with a GID; sudo dmesg | tail",
        source="ibv_post_send(3); PRM: Completion with Error Syndromes", uses=_VERBS,
    ),
    _probe(
        "probe-gpu", "The GPU opens",
        why="Kernels need the CUDA driver, its Python bindings and a GPU that this process may use.",
        cure="pip install 'gpunetio[cuda]'; nvidia-smi; echo $CUDA_VISIBLE_DEVICES",
        source="CUDA Runtime API: cudaSetDevice", uses=HARDWARE, essential=True,
        settles="gpu-driver cuda-version cuda-stack visible-devices",
    ),
    _probe(
        "probe-uar", "Kernels reach the NIC's doorbell",
        why="A kernel rings the NIC itself only if CUDA maps the doorbell page. Otherwise a CPU thread rings for it.",
        cure=f"run as root, or: {peer_mapping.CURE}",
        source=f"{GUIDE}: NVIDIA driver; CUDA Runtime API: cudaHostRegister with cudaHostRegisterIoMemory",
        uses=EVERY_USE, reboot=True, settles="peer-mapping gpu-host-register",
    ),
    _probe(
        "probe-dmabuf", "The NIC takes GPU memory for data",
        why="The NIC accesses GPU memory directly only if its driver can map this memory, by dmabuf or nvidia-peermem.",
        cure="sudo modprobe nvidia-peermem; or Linux 6.2 and the open kernel modules of the GPU's driver",
        source=f"{GUIDE}: GPU Memory Mapping; ibv_reg_dmabuf_mr(3); CUDA Driver API: cuMemGetHandleForAddressRange",
        uses=EVERY_USE, settles="gpu-memory-path gpu-direct-rdma dmabuf peermem",
    ),
    _probe(
        "probe-umem", "The NIC takes GPU memory for queues",
        why="With queues in GPU memory, a kernel polls without crossing PCIe. Otherwise queues are in host memory.",
        cure="sudo modprobe nvidia-peermem; or Linux 6.2, rdma-core 44 and the GPU driver's open kernel modules",
        source=f"{GUIDE}: GPU Memory Mapping; mlx5dv_devx_umem_reg(3)", uses=HARDWARE,
    ),
    _probe(
        "probe-loopback-gpu", "A kernel writes through the NIC",
        why="This tests the complete path: a kernel's request, a doorbell, the data and a completion.",
        cure="see the first probe that failed; if only the kernel's own doorbell fails: NicHandler.CPU_PROXY",
        source=f"{GUIDE}; PRM: Completion with Error Syndromes", uses=_VERBS, essential=True,
    ),
)


def device_to_probe(machine: Machine) -> str:
    """Return the NIC that the user asks about, or else the first card, or else a software NIC."""
    if wanted := machine.wanted.nic:
        return next((nic.name for nic in machine.nics if nic.rdma), wanted)
    return next((nic.name for nic in machine.all_nics if nic.rdma and is_nvidia(nic)), _SOFTWARE)


def run_probes(machine: Machine, device: str = "", gpu: str = "") -> list[Finding]:
    """Probe a device (default: `device_to_probe`) with a GPU (default: the nearest)."""
    device = device or device_to_probe(machine)
    gpu = gpu or next((gpu for gpu, nic in topology.pairs(machine) if nic == device), "")
    return [finding.of(probe) for probe in PROBES for finding in _found(machine, probe.id, probe.uses, device, gpu)]


def _found(machine: Machine, id: str, uses: frozenset[Use], device: str, wanted: str) -> Iterator[Finding]:
    """Return the findings of one probe, with their devices and uses."""
    gpu = next((gpu for gpu in machine.gpus if gpu.name == wanted or not wanted), None)
    reading = machine.host.ask("probe", device, gpu.address if gpu else machine.wanted.gpu or "auto")
    nic, on = "", ""
    if any(each.name == device and each.rdma for each in machine.all_nics):
        nic, on, uses = device, gpu.name if gpu and id not in _OF_NIC else "", uses & HARDWARE
    elif SOFTWARE_NIC.fullmatch(device):
        uses &= {Use.SOFTWARE}
    for finding in _of_answer(id, reading.value) if reading.ok else [skip(f"not run: {reading.error}")]:
        yield replace(finding, nic=nic, gpu=on, uses=uses)


def _of_answer(id: str, answer: object) -> list[Finding]:
    """Parse the findings of one probe from the answer of `probe_watch.watch`, and ignore malformed lines."""
    said, ended = (answer.get("said"), answer.get("ended")) if isinstance(answer, dict) else (None, None)
    lines = [line for line in said if isinstance(line, dict)] if isinstance(said, list) else []
    steps = [step for line in lines if isinstance(step := line.get("begin"), str)]
    last = steps[-1] if steps else PROBES[0].id
    findings = [found for line in lines if line.get("probe") == id and (found := _of_line(line))]
    if ended and last == id:
        return [*findings, fail(f"no answer: {ended}", cure=_HUNG)]
    if ended and last == _CLOSE and id == PROBES[0].id:
        return [*findings, fail(f"closing failed: {ended}", cure=_HUNG)]
    if findings:
        return findings
    if id in steps:
        return [skip("no result")]
    return [skip(f"not run: {last} {'did not answer' if ended else 'failed'}")]


def _of_line(line: dict[str, object]) -> Finding | None:
    """Parse a finding that `probe_process` has printed."""
    match line:
        case {"status": str(status), "summary": str(summary), "read": list(read), "cure": str(cure)}:
            if status in list(Status):
                shown = tuple(Evidence(*one) for one in read if _is_pair(one))
                reboot = told if isinstance(told := line.get("reboot"), bool) else None
                return Finding(Status(status), summary, shown, cure=cure, reboot=reboot)
    return None


def _is_pair(one: object) -> bool:
    return isinstance(one, list) and len(one) == 2 and all(isinstance(part, str) for part in one)
