"""Queues made for kernels, with everything they need: a single queue, or a queue and a core-direct companion."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TypedDict

from ..arguments import instance, member, whole, within
from ..closing import Closing
from ..enums import CqOverrun, MemRegType, NicHandler, QpSendDbrMode, SendDbrModeExt, UarAllocationType
from ..errors import InvalidValueError, NotSupportedError
from ..verbs import CQ, PD, SRQ, UAR, Context, QpInitAttr
from ..verbs.qp_init import queue_sizes
from .export import ExportedQp, Exporter, ExportOptions
from .rings import Rings, ways

_KINDS = UarAllocationType
_NON_CACHED = _KINDS.NONCACHE_DEDICATED, _KINDS.NONCACHE  # the second is used when the device runs out of the first
_QUEUE = (NicHandler.AUTO, NicHandler.CPU_PROXY, NicHandler.GPU_SM_DB, NicHandler.GPU_SM_BF)
_GROUP = (NicHandler.AUTO, NicHandler.CPU_PROXY, NicHandler.GPU_SM_DB)


class QpOptions(TypedDict, total=False):
    """The options of `Gpu.create_qp`."""

    depth: int
    receives: int
    cq_collapsed: bool
    cqe_inline: bool
    srq: SRQ | None
    memcpy: bool
    send_dbr_mode: SendDbrModeExt | QpSendDbrMode
    nic_handler: NicHandler
    queue_memory: str | None
    mem_reg_type: MemRegType
    proxy_service: bool
    timeout: float


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """The queue that `Gpu.create_qp` is to create."""

    depth: int
    receives: int = 0
    cq_collapsed: bool
    cqe_inline: bool = False
    srq: SRQ | None = None
    memcpy: bool = False
    mem_reg_type: MemRegType


def create_qp(gpu: Exporter, pd: PD, queue: QueueOptions, options: ExportOptions) -> ExportedQp:
    """Create a QP as `Gpu.create_qp` describes it."""
    options = _resolve(instance("pd", pd, PD).ctx, options, _QUEUE)
    blueflame = options.nic_handler is NicHandler.GPU_SM_BF
    uar = pd.ctx.shared_uar(*((_KINDS.BLUEFLAME,) * 2 if blueflame else _NON_CACHED))
    return _create(gpu, pd, queue, options, uar)


@dataclass(frozen=True)
class QpGroup(Closing):
    """A queue and its companion, which waits in the NIC for the queue's completions (`doca_gpu_verbs_qp_group_hl`).

    The companion is core-direct: its WAIT requests name the CQ of `main`, so that it can count completed operations
    with atomics. Both ring the same doorbell page. Connect each to its own peer.
    """

    main: ExportedQp
    companion: ExportedQp

    def close(self) -> None:
        """Close main, then the companion (`doca_gpu_verbs_destroy_qp_group_hl`). Idempotent."""
        with ExitStack() as steps:
            steps.callback(self.companion.close)
            steps.callback(self.main.close)


def create_group(gpu: Exporter, pd: PD, queue: QueueOptions, options: ExportOptions) -> QpGroup:
    """Create a queue and its companion as `Gpu.create_qp_group` describes them."""
    options = _resolve(instance("pd", pd, PD).ctx, options, _GROUP)
    uar = pd.ctx.shared_uar(*_NON_CACHED)
    with ExitStack() as undo:
        main = _create(gpu, pd, queue, options, uar)
        undo.callback(main.close)
        companion = _create(gpu, pd, queue, options, uar, core_direct_master=True)
        undo.pop_all()
    return QpGroup(main, companion)


def _resolve(ctx: Context, options: ExportOptions, possible: tuple[NicHandler, ...]) -> ExportOptions:
    """Return `options` with the handler to export with. Raise an error if the queue or device does not support them."""
    handler = options.nic_handler
    if handler not in possible:
        cure = "; GPU_SM_DB and AUTO become GPU_SM_NO_DBR with send_dbr_mode NO_DBR_HW or NO_DBR_SW_EMULATED"
        raise InvalidValueError(
            f"NIC handler {handler.name} cannot drive these queues: use {', '.join(h.name for h in possible)}"
            + (cure if handler is NicHandler.GPU_SM_NO_DBR else "")
        )
    if options.send_dbr_mode == SendDbrModeExt.NO_DBR_HW and not ctx.query_device().send_dbr_mode_no_dbr_ext:
        raise NotSupportedError(
            f"send_dbr_mode NO_DBR_HW: {ctx.name} needs doorbell records; use VALID_DBR or NO_DBR_SW_EMULATED"
        )
    if handler is NicHandler.GPU_SM_DB and options.send_dbr_mode:
        why = "as kernels keep no doorbell record"
        return replace(options, nic_handler=NicHandler.GPU_SM_NO_DBR, why=why)
    return options


def _create(
    gpu: Exporter, pd: PD, queue: QueueOptions, options: ExportOptions, uar: UAR, core_direct_master: bool = False
) -> ExportedQp:
    """Create and export a queue pair with at least `depth` slots and one CQ per side; the export owns them."""
    depth, device = whole("depth", queue.depth), pd.ctx.query_device()
    if depth < 1:
        raise InvalidValueError(f"a send queue of {depth} slots is not possible: give at least 1")
    slots, mode = 1 << (depth - 1).bit_length(), options.send_dbr_mode
    receives = 0 if queue.srq else within("receives", queue.receives, 0, device.max_qp_wr)
    sizes = queue_sizes(QpInitAttr(sq_wr=slots, rq_wr=receives), device)
    to_try = ways(gpu, pd.ctx, options.cpu_gpu, member("mem_reg_type", queue.mem_reg_type, MemRegType))
    with ExitStack() as undo:
        rings = Rings(gpu, pd.ctx, to_try, undo)

        def create_cq(what: str, entries: int, collapsed: bool) -> CQ:
            place = rings.cq(what, entries)
            cq = pd.ctx.create_cq(
                entries,
                overrun=CqOverrun.ENABLE,
                collapsed=collapsed,
                external_uar=uar,
                external_datapath=True,
                **place,
            )
            undo.callback(cq.close)
            return cq

        if queue.srq is not None:
            instance("srq", queue.srq, SRQ)
        send_cq = create_cq("the send CQ", slots, queue.cq_collapsed)
        entries = queue.srq.entries if queue.srq else sizes.rq_entries
        receive_cq = create_cq("the receive CQ", entries, False) if entries else None
        record_in_host = not rings.made_by_verbs and _cpu_keeps_record(gpu, uar, options)
        qp = pd.create_qp(
            sq_wr=slots,
            rq_wr=receives,
            send_cq=send_cq,
            receive_cq=receive_cq,
            external_uar=uar,
            external_datapath=True,
            send_dbr_mode=QpSendDbrMode.NO_DBR_EXT if mode == SendDbrModeExt.NO_DBR_HW else QpSendDbrMode.DBR_VALID,
            emulate_no_dbr_ext=mode == SendDbrModeExt.NO_DBR_SW_EMULATED,
            cqe_inline=queue.cqe_inline,
            srq=queue.srq,
            memcpy=queue.memcpy,
            core_direct_master=core_direct_master,
            **rings.qp("the queue pair", sizes.rq_bytes + sizes.sq_bytes, record_in_host),
        )
        undo.callback(qp.close_with_owner)
        exported = gpu.export(qp, options)
        exported.own(undo.pop_all())
    return exported


def _cpu_keeps_record(gpu: Exporter, uar: UAR, options: ExportOptions) -> bool:
    """Return whether the CPU will write the doorbell record of a queue with this page."""
    handler, mode = options.nic_handler, options.send_dbr_mode
    if handler is NicHandler.AUTO and mode != SendDbrModeExt.NO_DBR_HW and not gpu.registers.can_map(uar.reg_addr):
        return True  # AUTO becomes the proxy
    return handler is NicHandler.CPU_PROXY or mode == SendDbrModeExt.NO_DBR_SW_EMULATED
