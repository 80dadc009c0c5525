"""Queues made for kernels, with all that they need: one, or one with a companion that waits for its completions."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..enums import CqOverrun, NicHandler, QpSendDbrMode, SendDbrModeExt, UarAllocationType
from ..errors import InvalidValueError
from ..verbs import PD, UAR
from ..verbs.arguments import whole
from .export import ExportedQp, ExportOptions

if TYPE_CHECKING:
    from .gpu import Gpu

_KINDS = UarAllocationType
_NON_CACHED = _KINDS.NONCACHE_DEDICATED, _KINDS.NONCACHE  # the second when there is no more of the first
_QUEUE = (NicHandler.AUTO, NicHandler.CPU_PROXY, NicHandler.GPU_SM_DB, NicHandler.GPU_SM_BF)
_GROUP = (NicHandler.AUTO, NicHandler.CPU_PROXY, NicHandler.GPU_SM_DB)


def create_qp(gpu: Gpu, pd: PD, depth: int, collapsed: bool, options: ExportOptions) -> ExportedQp:
    """See `Gpu.create_qp`."""
    options = _resolve(options, _QUEUE)
    blueflame = options.nic_handler is NicHandler.GPU_SM_BF
    uar = pd.ctx.shared_uar(*((_KINDS.BLUEFLAME,) * 2 if blueflame else _NON_CACHED))
    return _create(gpu, pd, depth, collapsed, options, uar)


@dataclass(frozen=True)
class QpGroup:
    """A queue and its companion, which waits for the queue's completions in the NIC (`doca_gpu_verbs_qp_group_hl`).

    The companion is core-direct: WAIT requests there name the CQ of `main`, so that it can count completed operations
    with atomics. Both ring the same doorbell page. Connect each to a peer of its own.
    """

    main: ExportedQp
    companion: ExportedQp

    def close(self) -> None:
        """`doca_gpu_verbs_destroy_qp_group_hl`: main, then the companion. Idempotent."""
        with ExitStack() as steps:
            steps.callback(self.companion.close)
            steps.callback(self.main.close)

    def __enter__(self) -> QpGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def create_group(gpu: Gpu, pd: PD, depth: int, collapsed: bool, options: ExportOptions) -> QpGroup:
    """See `Gpu.create_qp_group`."""
    options = _resolve(options, _GROUP)
    uar = pd.ctx.shared_uar(*_NON_CACHED)
    with ExitStack() as undo:
        main = _create(gpu, pd, depth, collapsed, options, uar)
        undo.callback(main.close)
        companion = _create(gpu, pd, depth, collapsed, options, uar, core_direct_master=True)
        undo.pop_all()
    return QpGroup(main, companion)


def _resolve(options: ExportOptions, possible: tuple[NicHandler, ...]) -> ExportOptions:
    """The handler to export with, or InvalidValueError for one that such a queue cannot have."""
    handler = options.nic_handler
    if handler not in possible:
        cure = ": NO_DBR is what GPU_SM_DB and AUTO become with send_dbr_mode NO_DBR_HW or NO_DBR_SW_EMULATED"
        raise InvalidValueError(
            f"NIC handler {handler.name} is not for these queues, but {', '.join(h.name for h in possible)}"
            + (cure if handler is NicHandler.GPU_SM_NO_DBR else "")
        )
    if handler is NicHandler.GPU_SM_DB and options.send_dbr_mode:
        why = "which GPU_SM_DB is for a queue whose kernels keep no doorbell record"
        return replace(options, nic_handler=NicHandler.GPU_SM_NO_DBR, why=why)
    return options


def _create(
    gpu: Gpu, pd: PD, depth: int, collapsed: bool, options: ExportOptions, uar: UAR, **attributes: Any
) -> ExportedQp:
    """A queue pair of at least `depth` slots with a CQ of as many entries, which the export owns."""
    depth = whole("depth", depth)
    if depth < 1:
        raise InvalidValueError(f"a send queue of {depth} slots is not possible: give at least 1")
    slots = 1 << (depth - 1).bit_length()
    mode = options.send_dbr_mode
    with ExitStack() as undo:
        cq = pd.ctx.create_cq(
            slots, overrun=CqOverrun.ENABLE, collapsed=collapsed, external_uar=uar, external_datapath=True
        )
        undo.callback(cq.close)
        qp = pd.create_qp(
            sq_wr=slots,
            send_cq=cq,
            external_uar=uar,
            external_datapath=True,
            send_dbr_mode=QpSendDbrMode.NO_DBR_EXT if mode == SendDbrModeExt.NO_DBR_HW else QpSendDbrMode.DBR_VALID,
            emulate_no_dbr_ext=mode == SendDbrModeExt.NO_DBR_SW_EMULATED,
            **attributes,
        )
        undo.callback(qp.close)
        exported = gpu.export(qp, options)
        exported.own()
        undo.pop_all()
    return exported
