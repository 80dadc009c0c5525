"""Receive queues on the GPU data path: kernels take packets from a ring that the NIC fills continuously."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from ..arguments import instance
from ..enums import CqOverrun, MemRegType, MemType
from ..formats.device_structs import DEV_CQ
from ..formats.doorbell import QP_DBREC
from ..formats.eth_device import DEV_ETH_RXQ
from ..gpu import Gpu, GpuMemory
from ..gpu.completions import Completions
from ..gpu.spans import cq_ring
from ..gpu.structure import fill_cq, restart_cq
from ..interrupts import deferred
from ..verbs import CQ, MR, PD, Context
from .caps import query_caps
from .failure import QueueError
from .kernel_queue import KernelQueue
from .layout import cyclic_layout
from .place import PacketBuffer, Places
from .rxq import EthRxq

_WORD = 4  # bytes of the doorbell record's counter of receives
_MCST_DEPTH = 64


class CyclicRxq(KernelQueue, EthRxq):
    """A receive queue for kernels, of type CYCLIC (`doca_eth_rxq_create`, `doca_ctx_set_datapath_on_gpu`).

    Pass the queue or its `device_address` (`doca_gpu_eth_rxq`) to a kernel. Packet i is in slot i of the buffer, modulo
    `packets`. `rxq_recv` gives the slots back as soon as it has seen the packets, so a kernel must read them before the
    NIC has gone once around the ring and overwrites them.

    `max_burst`      packets of the ring; rounded up to a power of two, and with strides to at least 1024
    `max_packet`     bytes of the longest packet: at least the MTU and the headers before it. A longer packet is lost,
                     and others with it
    `buffer`         memory for the packets: memory of this Gpu, or a region of `pd` with LOCAL_WRITE, with
                     `estimate_buffer()` bytes from `offset` on. A dmabuf region's iova must be the memory's address.
                     None: new memory of type `memory`; by default GPU memory if the NIC reaches it, else CPU_GPU
    `queue_memory`   overrides the Gpu's own setting
    `mem_reg_type`   how rings in GPU memory are registered with the NIC, as in `Gpu.create_qp`
    `mcst`           on GPUs before Hopper: before kernels use packets, the NIC reads them through a separate queue pair
                     (`doca_eth_rxq_gpu_enable_mcst_qp`)
    `queue_id`       the number by which flow rules name the queue

    NotSupportedError if the device has no Ethernet queues, or no queue of this size.
    """

    gpu: Gpu
    region: MR
    packets: int
    packet_stride: int

    def __init__(
        self,
        gpu: Gpu,
        pd: PD,
        max_burst: int,
        max_packet: int,
        *,
        buffer: MR | GpuMemory | None = None,
        offset: int = 0,
        memory: MemType | None = None,
        queue_memory: str | None = None,
        mem_reg_type: MemRegType = MemRegType.DEFAULT,
        mcst: bool = False,
        queue_id: int | None = None,
    ):
        super().__init__(pd, max_packet, queue_id)
        self.gpu = instance("gpu", gpu, Gpu)
        layout = cyclic_layout(self.caps, max_burst, self.max_packet)
        self.packets, self.packet_stride = layout.packets, 1 << layout.slot_log
        if isinstance(buffer, MR):
            self._use(buffer)
        with ExitStack() as undo:
            packets = PacketBuffer(gpu, pd, layout.nbytes, buffer, offset, memory, undo)
            self.region = packets.region
            places = Places(gpu, pd, queue_memory, mem_reg_type, undo)
            cq = places.cq("the CQ of a receive queue", layout.packets, CqOverrun.ENABLE)
            nbytes = layout.wqes * layout.wqe_bytes
            ring = places.ring("a receive queue", nbytes, False)
            self._create(cq, ring, layout.fields(), undo)
            places.span(ring, nbytes).write(layout.ring(packets.address, packets.region.lkey))
            self._record = places.record(ring, QP_DBREC.rcv, _WORD)
            self._wqes = layout.wqes
            image = np.zeros(DEV_ETH_RXQ.size, np.uint8)
            row = DEV_ETH_RXQ.at(image)
            row["packet_address"], row["dbrec"] = packets.device_address, self._record.map(undo)
            row["packet_mask"], row["stride_shift"] = layout.packets - 1, layout.slot_log
            row["strides_shift"], row["striding"] = layout.strides_log, layout.striding
            row["wqe_num"], row["lkey"] = layout.wqes, packets.region.lkey
            row["real_time"] = self.caps.real_time_receive
            if mcst:
                row["mcst_qp"] = self._companion(undo)
            self._receives = Completions(cq, cq_ring(gpu.backend, cq))
            fill_cq(DEV_CQ.at(image, DEV_ETH_RXQ.cq), gpu.backend, self._receives, undo)
            self._allocate(image.nbytes, places, undo)
            if not gpu.backend.has_memory:  # kernels are CPU threads, which can sleep at a word that the NIC reaches
                row["wakes"] = self._wake_at(cq, self._structure.device_address + DEV_ETH_RXQ.wakeup, undo)
            self._structure.write(image)
            self._attach(undo)
            self._begin()
            self._opened(f"cyclic receive queue {self.rqn:#x} of {self.ctx.name} on GPU {gpu.name}", undo)

    @staticmethod
    def estimate_buffer(ctx: Context, max_burst: int, max_packet: int) -> int:
        """Return the bytes of a buffer for such a queue (`doca_eth_rxq_estimate_packet_buf_size`)."""
        return cyclic_layout(query_caps(ctx), max_burst, max_packet).nbytes

    def _wake_at(self, cq: CQ, word: int, undo: ExitStack) -> bool:
        """Make the device wake a thread that sleeps at `word` for packets, until `undo`. Return whether it can."""
        provider = self.ctx.provider
        wakes = provider.wake_at(cq.cqn, word)
        if wakes:
            undo.callback(provider.wake_at, cq.cqn, 0)
        return wakes

    def _companion(self, undo: ExitStack) -> int:
        """Create a queue pair that is its own peer, for reads by the NIC. Return its structure's address."""
        companion = self.gpu.create_qp(self.pd, _MCST_DEPTH)
        undo.callback(companion.close)
        companion.connect(companion)
        return companion.device_address

    def _begin(self) -> None:
        """Give all WQEs to the NIC, and start receiving."""
        self._record.write(np.array([self._wqes], ">u4").view(np.uint8))
        self._ready()

    @deferred()
    def reset(self) -> None:
        """Move the queue from ERR back to RDY, with all slots free. Packets that no kernel has received are lost.

        Indices restart at 0. BadStateError while a kernel that was given the queue runs.
        """
        self._check_reset()
        self._stop()
        image = self._read()
        row, cq = DEV_ETH_RXQ.at(image), DEV_CQ.at(image, DEV_ETH_RXQ.cq)
        restart_cq(self._receives, cq, int(cq["cqe_ci"]))
        for name in ("next", "first", "too_long", "given_back", "quiet", "err_index", "err_syndrome", "err_vendor"):
            row[name] = 0
        self._structure.write(image)
        self._begin()

    # --- what the host can read --------------------------------------------------------------------------------------

    def indices(self) -> dict[str, int]:
        """Return the counts kept by kernels: packets received, packets too long, WQEs given back to the NIC."""
        row = DEV_ETH_RXQ.at(self._read())
        return {"received": int(row["next"]), "too_long": int(row["too_long"]), "given_back": int(row["given_back"])}

    def last_error(self) -> QueueError | None:
        """Return the error completion that ended a kernel's receive, or None. `index` counts completions.

        `reset()` restarts the queue.
        """
        return self._seen_error(self.rqn, DEV_ETH_RXQ.at(self._read()))
