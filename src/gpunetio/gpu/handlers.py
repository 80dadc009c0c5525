"""How the doorbells of an exported queue reach the NIC: which handlers are possible, and which one is chosen."""

from __future__ import annotations

import logging

from ..arguments import member
from ..enums import MemType, NicHandler, QpSendDbrMode, SendDbrModeExt, UarAllocationType
from ..errors import DriverError, InvalidValueError
from ..verbs import QP
from .device import GpuDevice
from .spans import Sender

logger: logging.Logger = logging.getLogger("gpunetio.gpu")

_VALID, _HW, _EMULATED = SendDbrModeExt
_OF_QP = {_VALID: QpSendDbrMode.DBR_VALID, _HW: QpSendDbrMode.NO_DBR_EXT, _EMULATED: QpSendDbrMode.DBR_VALID}
_DIRECT = {
    _VALID: (NicHandler.GPU_SM_DB, "kernels ring the doorbell and keep its record"),
    _HW: (NicHandler.GPU_SM_NO_DBR, "kernels ring the doorbell, and the NIC needs no record"),
    _EMULATED: (NicHandler.GPU_SM_NO_DBR, "kernels ring the doorbell, and the CPU keeps its record"),
}


def mode_of(qp: QP, asked: SendDbrModeExt | None) -> SendDbrModeExt:
    """Return which side keeps a queue pair's doorbell record: `asked`, or if None, as the queue pair was created.

    InvalidValueError if `asked` does not fit the queue pair.
    """
    if asked is None:
        if qp.send_dbr_mode == QpSendDbrMode.NO_DBR_EXT:
            return _HW
        return _EMULATED if qp.emulate_no_dbr_ext else _VALID
    mode = member("send_dbr_mode", asked, SendDbrModeExt)
    if _OF_QP[mode] != qp.send_dbr_mode:
        raise InvalidValueError(
            f"send_dbr_mode {mode.name} needs a queue pair with {_OF_QP[mode].name}, but {qp} has "
            f"{QpSendDbrMode(qp.send_dbr_mode).name}"
        )
    return mode


def check(gpu: GpuDevice, qp: QP, handler: NicHandler, mode: SendDbrModeExt, cpu_gpu: bool) -> None:
    """Raise InvalidValueError for a handler that cannot drive this queue."""
    if handler is NicHandler.GPU_SM_NO_DBR and mode is _VALID:
        raise InvalidValueError(
            f"NIC handler GPU_SM_NO_DBR leaves the doorbell record alone, but {qp} needs it: create it with "
            "send_dbr_mode NO_DBR_HW or NO_DBR_SW_EMULATED"
        )
    if handler is NicHandler.GPU_SM_BF and qp.uar.kind != UarAllocationType.BLUEFLAME:
        raise InvalidValueError(
            f"NIC handler GPU_SM_BF writes to a BlueFlame register, but {qp} has a {qp.uar.kind.name} page: give it "
            "external_uar=ctx.create_uar(UarAllocationType.BLUEFLAME)"
        )
    if mode is _EMULATED and not (cpu_gpu or gpu.backend.maps_memory):
        raise InvalidValueError(
            "send_dbr_mode NO_DBR_SW_EMULATED: the CPU must see the indices in the queue's structure, and without "
            "GDRCopy it sees no GPU memory; use queue_memory='cpu_gpu', VALID_DBR or NO_DBR_HW"
        )


def check_record(qp: QP, handler: NicHandler, mode: SendDbrModeExt) -> None:
    """Raise InvalidValueError when the CPU must keep a doorbell record that it does not reach."""
    kept = mode is _EMULATED or (handler is NicHandler.CPU_PROXY and mode is not _HW)
    if kept and qp.ring.dbr_lies_in.in_gpu:
        raise InvalidValueError(
            f"with NIC handler {handler.name} and send_dbr_mode {mode.name} the CPU keeps the doorbell record of {qp}, "
            "which is in GPU memory: give the queue pair an external_dbr_umem in host memory"
        )


def structure_kind(modes: list[SendDbrModeExt], cpu_gpu: bool) -> MemType:
    """Return the memory type for queues' structures: with a CPU mapping if a CPU thread follows their indices."""
    if cpu_gpu:
        return MemType.CPU_GPU
    return MemType.GPU_CPU if _EMULATED in modes else MemType.GPU


def choose(
    gpu: GpuDevice, qp: Sender, asked: NicHandler, mode: SendDbrModeExt, cpu_gpu: bool, why: str
) -> tuple[NicHandler, int | None]:
    """Return the handler, and the GPU address of the doorbell register, which is mapped unless the CPU rings.

    `why` is the reason that the log gives for a handler other than AUTO. DriverError when such a handler needs a
    register that cannot be mapped; AUTO then becomes the CPU proxy.
    """
    level, handler, register = logging.INFO, asked, None
    if asked is NicHandler.AUTO and cpu_gpu:
        handler, why = NicHandler.CPU_PROXY, "as its queues are in CPU_GPU memory"
    elif asked is not NicHandler.CPU_PROXY:
        try:
            near = qp.ctx.provider.near_register(qp.doorbell_register, gpu.backend.engine)
            register = gpu.registers.export(qp.doorbell_register, near)
            if asked is NicHandler.AUTO:
                handler, why = _DIRECT[mode]
        except DriverError as error:
            if asked is not NicHandler.AUTO:
                raise DriverError(
                    f"NIC handler {asked.name}: the doorbell register of {qp} cannot be mapped into GPU {gpu.name} "
                    f"({error}); use AUTO or CPU_PROXY", error.status, error.syndrome,
                ) from error
            level, handler = logging.WARNING, NicHandler.CPU_PROXY
            why = f"as its doorbell register cannot be mapped ({error}): enabling CPU proxy mode"
    rings = qp.ring.lies_in.text
    logger.log(level, "%s on GPU %s: NIC handler %s, %s; rings in %s", qp, gpu.name, handler.name, why, rings)
    return handler, register
