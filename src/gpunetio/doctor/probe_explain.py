"""Errors that probes meet, with what is likely behind them: completions of the NIC, and answers of CUDA."""

from __future__ import annotations

from typing import NamedTuple

from ..formats.cqe import Syndrome
from ..verbs.syndromes import MEANINGS, meaning_of
from .finding import Evidence, Finding, fail

SYNDROME_OF = {meaning.status: syndrome for syndrome, meaning in MEANINGS.items()}


class Likely(NamedTuple):
    """The cause on one machine, where both ends are ours and ask for nothing wrong; and what to do."""

    cause: str
    cure: str


_LOOK_AT_PATH = "look at acs, iommu and topology in `gpunetio doctor`; or place data in host memory (MemType.CPU_GPU)"
_LOOK_AT_RINGS = "look at acs and iommu in `gpunetio doctor`; or place queues in host memory (queue_memory='cpu_gpu')"
_LOOK_AT_GIDS = "gpunetio devices -d <device> -v, and connect with the index of a RoCE v2 GID that its network has"
_TELL = "update the firmware of <device>, and report this with `gpunetio doctor --record`"

_S = Syndrome
LIKELY: dict[int, Likely] = {
    _S.LOCAL_LENGTH: Likely("the NIC has read another WQE than was written: it does not see the ring", _LOOK_AT_RINGS),
    _S.LOCAL_QP_OP: Likely("the NIC has read a WQE before it was written, or from other memory", _LOOK_AT_RINGS),
    _S.LOCAL_PROT: Likely("memory path or lkey: ACS or the IOMMU leads the NIC's reads astray", _LOOK_AT_PATH),
    _S.WR_FLUSH: Likely("an earlier error took the queue pair down: look at its first one", "sudo dmesg | tail"),
    _S.MW_BIND: Likely("no probe binds memory windows: the firmware is at fault", _TELL),
    _S.BAD_RESP: Likely("the path MTU is not what both ends use", "compare active_mtu in `ibv_devinfo -d <device>` "
                                                                  "with the MTU in `ip link`"),
    _S.LOCAL_ACCESS: Likely("memory path or rkey: the NIC cannot write to the target", _LOOK_AT_PATH),
    _S.REMOTE_INVAL_REQ: Likely("the path MTU is not what both ends use, or a packet was changed", _LOOK_AT_GIDS),
    _S.REMOTE_ACCESS: Likely("rkey or address: the region is not the one that the NIC knows", _TELL),
    _S.REMOTE_OP: Likely("memory path: ACS or the IOMMU leads the NIC's writes to the target astray", _LOOK_AT_PATH),
    _S.TRANSPORT_RETRY_EXC: Likely("wrong GID index, an MTU above the link's, or its own address is not reachable",
                                   _LOOK_AT_GIDS),
    _S.RNR_RETRY_EXC: Likely("no probe sends without a receive: packets of somebody else reach it", _LOOK_AT_GIDS),
    _S.REMOTE_ABORTED: Likely("the queue pair was reset or destroyed meanwhile", "sudo dmesg | tail"),
}  # fmt: skip
_UNKNOWN = Likely("a number of this firmware's own", _TELL)


def completion_failed(
    device: str, where: str, syndrome: int, vendor: int, said: str | None, *read: Evidence
) -> Finding:
    """An error completion; `said` is what the device itself says of it, `read` what else is known."""
    name = Syndrome(syndrome).name if syndrome in list(Syndrome) else "unknown error"
    likely = LIKELY.get(syndrome, _UNKNOWN)
    numbers = f"{syndrome:#04x}/{vendor:#04x}"
    return fail(
        f"{where}: {name} ({numbers})",
        *read, Evidence(f"syndrome {numbers}", said or meaning_of(syndrome)), Evidence("likely cause", likely.cause),
        cure=likely.cure.replace("<device>", device),
    )  # fmt: skip


class CudaError(NamedTuple):
    """A `cudaError_t` that registering a doorbell register may give. `cure` "": the check's own."""

    name: str
    cause: str
    cure: str = ""
    reboot: bool = False


CUDA_ERRORS = {
    1:   CudaError("cudaErrorInvalidValue", "the driver does not take the page for a device's register",
                   "update the GPU's driver; until then the CPU proxy rings"),
    2:   CudaError("cudaErrorMemoryAllocation", "the driver has no memory left for the mapping",
                   "end other programs on the GPU: nvidia-smi"),
    304: CudaError("cudaErrorOperatingSystem", "the kernel refused it", "sudo dmesg | tail"),
    712: CudaError("cudaErrorHostMemoryAlreadyRegistered", "something else in this process has mapped the page",
                   _TELL),
    800: CudaError("cudaErrorNotPermitted", "only root may map registers, unless PeerMappingOverride is set",
                   reboot=True),
    801: CudaError("cudaErrorNotSupported", "this GPU, driver or platform maps no registers of other devices",
                   "update the GPU's driver, and use its open kernel modules; until then the CPU proxy rings"),
    999: CudaError("cudaErrorUnknown", "the driver has failed", "sudo dmesg | grep -i nvrm"),
}  # fmt: skip


def cuda_error(number: int) -> CudaError:
    """What is known of it."""
    return CUDA_ERRORS.get(number, CudaError(f"CUDA error {number}", "not one that is known here", "sudo dmesg | tail"))
