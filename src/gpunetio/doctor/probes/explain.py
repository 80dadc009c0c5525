"""Explain errors of probes by their likely causes: error completions of the NIC, and CUDA errors."""

from __future__ import annotations

from typing import NamedTuple

from ...formats.cqe import Syndrome
from ...verbs.syndromes import MEANINGS, meaning_of
from ..finding import Evidence, Finding, fail

SYNDROME_OF = {meaning.status: syndrome for syndrome, meaning in MEANINGS.items()}


class Likely(NamedTuple):
    """The likely cause, given that both ends are on one machine and their requests are right; and the cure."""

    cause: str
    cure: str


_LOOK_AT_PATH = "look at acs, iommu and topology in `gpunetio doctor`; or place data in host memory (MemType.CPU_GPU)"
_LOOK_AT_RINGS = "look at acs and iommu in `gpunetio doctor`; or place queues in host memory (queue_memory='cpu_gpu')"
_LOOK_AT_GIDS = "gpunetio devices -d <device> -v, and connect with the index of a RoCE v2 GID that its network has"
_TELL = "update the firmware of <device>, and report this with `gpunetio doctor --record`"

_S = Syndrome
LIKELY: dict[int, Likely] = {
    _S.LOCAL_LENGTH: Likely("the NIC has read another WQE than was written: it does not see the queue", _LOOK_AT_RINGS),
    _S.LOCAL_QP_OP: Likely("the NIC has read a WQE before it was written, or from other memory", _LOOK_AT_RINGS),
    _S.LOCAL_PROT: Likely("memory path or lkey: ACS or the IOMMU misdirects the NIC's reads", _LOOK_AT_PATH),
    _S.WR_FLUSH: Likely("an earlier error has stopped the queue pair: look at the first error", "sudo dmesg | tail"),
    _S.MW_BIND: Likely("no probe binds memory windows: the firmware is at fault", _TELL),
    _S.BAD_RESP: Likely("the ends use different path MTUs", "compare active_mtu in `ibv_devinfo -d <device>` "
                                                                  "with the MTU in `ip link`"),
    _S.LOCAL_ACCESS: Likely("memory path or rkey: the NIC cannot write to the target", _LOOK_AT_PATH),
    _S.REMOTE_INVAL_REQ: Likely("the ends use different path MTUs, or a packet was changed", _LOOK_AT_GIDS),
    _S.REMOTE_ACCESS: Likely("rkey or address: the NIC knows another region", _TELL),
    _S.REMOTE_OP: Likely("memory path: ACS or the IOMMU misdirects the NIC's writes to the target", _LOOK_AT_PATH),
    _S.TRANSPORT_RETRY_EXC: Likely("wrong GID index, an MTU above the link's, or its own address is not reachable",
                                   _LOOK_AT_GIDS),
    _S.RNR_RETRY_EXC: Likely("no probe sends without a receive: packets of another sender reach it", _LOOK_AT_GIDS),
    _S.REMOTE_ABORTED: Likely("the queue pair was reset or destroyed in the meantime", "sudo dmesg | tail"),
}
_UNKNOWN = Likely("an error code of this firmware only", _TELL)


def completion_failed(
    device: str, where: str, syndrome: int, vendor: int, said: str | None, *read: Evidence
) -> Finding:
    """Return a finding for an error completion. `said` is the device's own explanation, `read` is other evidence."""
    name = Syndrome(syndrome).name if syndrome in list(Syndrome) else "unknown error"
    likely = LIKELY.get(syndrome, _UNKNOWN)
    numbers = f"{syndrome:#04x}/{vendor:#04x}"
    return fail(
        f"{where}: {name} ({numbers})",
        *read, Evidence(f"syndrome {numbers}", said or meaning_of(syndrome)), Evidence("likely cause", likely.cause),
        cure=likely.cure.replace("<device>", device),
    )


class CudaError(NamedTuple):
    """A `cudaError_t` of registering a doorbell register. An empty `cure` stands for the check's own."""

    name: str
    cause: str
    cure: str = ""
    reboot: bool = False


CUDA_ERRORS = {
    1:   CudaError("cudaErrorInvalidValue", "the driver does not accept the page as a device's register",
                   "update the GPU's driver; until then the CPU proxy rings"),
    2:   CudaError("cudaErrorMemoryAllocation", "the driver has no memory left for the mapping",
                   "end other programs on the GPU: nvidia-smi"),
    304: CudaError("cudaErrorOperatingSystem", "the kernel refused it", "sudo dmesg | tail"),
    712: CudaError("cudaErrorHostMemoryAlreadyRegistered", "something else in this process has mapped the page",
                   _TELL),
    800: CudaError("cudaErrorNotPermitted", "only root may map registers, unless PeerMappingOverride is set",
                   reboot=True),
    801: CudaError("cudaErrorNotSupported", "this GPU, driver or platform cannot map registers of other devices",
                   "update the GPU's driver, and use its open kernel modules; until then the CPU proxy rings"),
    999: CudaError("cudaErrorUnknown", "the driver has failed", "sudo dmesg | grep -i nvrm"),
}


def cuda_error(number: int) -> CudaError:
    """Return the name, likely cause and cure of a CUDA error."""
    return CUDA_ERRORS.get(number, CudaError(f"CUDA error {number}", "unknown error code", "sudo dmesg | tail"))
