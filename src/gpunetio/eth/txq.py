"""Send queues on the GPU data path, to which kernels post packets."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from ..arguments import deadline, instance, member, number, whole
from ..enums import CqOverrun, MemRegType, NicHandler, SendDbrModeExt
from ..errors import BadStateError, InvalidValueError, NotSupportedError
from ..formats.cqe import CQE_SIZE, INIT_OP_OWN, OPCODE_SHIFT, CqeOpcode
from ..formats.device_structs import DEV_CQ, DEV_QP, DEV_SIDE
from ..formats.doorbell import PI_MASK
from ..formats.eth_device import DEV_ETH_TXQ
from ..formats.ethernet_queues import InlineMode
from ..formats.wqe import CTRL_SEG, WQEBB
from ..gpu import Gpu
from ..gpu.completions import Completions
from ..gpu.handlers import choose
from ..gpu.proxy import Forwarding
from ..gpu.spans import cq_ring, send_ring
from ..gpu.structure import fill_sender, restart_cq, restart_sender
from ..interrupts import deferred
from ..verbs import PD
from .caps import WaitOnTime
from .failure import QueueError
from .kernel_queue import KernelQueue
from .place import Places
from .reader import CqReader
from .sq import SendQueue

_HANDLERS = (NicHandler.AUTO, NicHandler.GPU_SM_DB, NicHandler.CPU_PROXY)
_SECONDS_SHIFT = 32
_NS = 10**9
_LONGEST_TIMEOUT = 1e9  # seconds
_RANGE_MS = 8000  # a WAIT compares times modulo this range, of which half counts as the future
_REAL_TIME_MASK = (_RANGE_MS // 1000 << _SECONDS_SHIFT) - 1
_NOTIFY = 1  # a flag in the upper byte of a WQE's immediate, set by kernels
_SIDE_AT = DEV_ETH_TXQ.size


class SentEvent(NamedTuple):
    """A sent packet with NOTIFY (`doca_eth_txq_gpu_event_notify_send_packet`), or the queue's error.

    `position` is the 16-bit index of its WQE, `timestamp` the device's clock, or None for an error. The error is the
    one that ended the queue (`…_error_send_packet`).
    """

    position: int
    timestamp: int | None
    error: QueueError | None


class EthTxq(KernelQueue, SendQueue):
    """A send queue for kernels (`doca_eth_txq_create`, `doca_ctx_set_datapath_on_gpu`).

    Pass the queue or its `device_address` (`doca_gpu_eth_txq`) to a kernel.

    `depth`              basic blocks of the ring; rounded up to a power of two, at least 64
    `checksum`           the device computes L3 and L4 checksums of every packet (`…_set_l3_chksum_offload`, `…_l4_…`)
    `wait_on_time`       kernels may post WAITs for a time (`doca_eth_txq_set_wait_on_time_offload`)
    `completion_on_gpu`  True: kernels poll for completions. False: `events()` returns completions and frees slots, so
                         call it continually; kernels must not poll
    `nic_handler`        how doorbells reach the NIC: AUTO, GPU_SM_DB or CPU_PROXY (`doca_eth_txq_gpu_set_uar_on_cpu`)
    `proxy_service`      True: a thread of the Gpu forwards doorbells. False: the program calls `progress()` for that
    `queue_memory`, `mem_reg_type`   as in `Gpu.create_qp`
    `timeout`            seconds after which any device wait on this queue ends with ETIMEDOUT

    NotSupportedError for a feature that the device does not report.
    """

    gpu: Gpu
    nic_handler: NicHandler
    timeout: float

    def __init__(
        self,
        gpu: Gpu,
        pd: PD,
        depth: int = 1024,
        *,
        checksum: bool = False,
        wait_on_time: bool = False,
        completion_on_gpu: bool = True,
        nic_handler: NicHandler = NicHandler.AUTO,
        proxy_service: bool = True,
        queue_memory: str | None = None,
        mem_reg_type: MemRegType = MemRegType.DEFAULT,
        timeout: float = 30.0,
    ):
        super().__init__(pd, depth, checksum, InlineMode.NONE)
        self.gpu, self.timeout = instance("gpu", gpu, Gpu), timeout
        handler = member("nic_handler", nic_handler, NicHandler)
        if handler not in _HANDLERS:
            raise InvalidValueError(
                f"nic_handler {handler.name}: an Ethernet queue has {', '.join(h.name for h in _HANDLERS)}"
            )
        if not 0 < number("timeout", timeout) < _LONGEST_TIMEOUT:
            raise InvalidValueError(f"timeout = {timeout} s: a device wait lasts more than 0 s and ends one day")
        if wait_on_time and self.caps.wait_on_time is WaitOnTime.NONE:
            raise NotSupportedError(
                f"wait_on_time: send scheduling of {self.ctx} is off (mode NONE); a card needs ACCURATE_TX_SCHEDULER=1 "
                "and REAL_TIME_CLOCK_ENABLE=1 in its settings, and must be a ConnectX-7 or later"
            )
        self._waits, self._longest_wait = bool(wait_on_time), timeout
        self._forwarding: Forwarding | None = None
        self._reader: CqReader | None = None
        self._completed = 0
        with ExitStack() as undo:
            self._open_queue(completion_on_gpu, handler, proxy_service, queue_memory, mem_reg_type, undo)
            self._attach(undo)
            self._opened(f"send queue {self.sqn:#x} of {self.ctx.name} on GPU {gpu.name}", undo)

    def _open_queue(
        self, on_gpu: bool, handler: NicHandler, service: bool, queue_memory: str | None, mem_reg_type: MemRegType,
        undo: ExitStack,
    ) -> None:
        gpu, uar = self.gpu, self._shared_uar()
        places = Places(gpu, self.pd, queue_memory, mem_reg_type, undo)
        if on_gpu:
            cq = places.cq("the CQ of a send queue", self.depth, CqOverrun.ENABLE, uar)
        else:
            self._reader = CqReader(self.ctx, self.depth, None)
            cq = self._reader.cq
            undo.callback(cq.close)
        proxied = handler is NicHandler.CPU_PROXY or places.cpu_gpu or not gpu.registers.can_map(uar.reg_addr)
        self._create(cq, places.ring("a send queue", self.depth * WQEBB, proxied), uar, undo)
        mode = SendDbrModeExt.VALID_DBR
        self.nic_handler, register = choose(gpu, self, handler, mode, places.cpu_gpu, "as asked")
        if register is not None:
            undo.callback(gpu.registers.unexport, register)
        else:
            self._forwarding = Forwarding(gpu, self, mode)
            undo.callback(self._forwarding.close)
            register = self._forwarding.device_address
        image = np.zeros(_SIDE_AT + DEV_SIDE.size, np.uint8)
        self._sends = Completions(cq, cq_ring(gpu.backend, cq))
        fill_sender(
            image, image[_SIDE_AT:], gpu.backend, self, self._sends, self.nic_handler, register, self.timeout, undo
        )
        row = DEV_ETH_TXQ.at(image)
        row["wait_mask"] = self._wait_mask if self._waits else 0
        row["cs_flags"], row["signal_mask"] = self.cs_flags, self.depth // 4 - 1
        row["max_lso"] = self.caps.max_lso
        self._allocate(image.nbytes + CQE_SIZE, places, undo)
        at = self._structure.device_address
        DEV_QP.at(image)["side"] = at + _SIDE_AT
        if not on_gpu:  # kernels get a CQ where nothing ever arrives: `events` writes `completed` for them
            self._structure.write(np.full(CQE_SIZE, INIT_OP_OWN, np.uint8), image.nbytes)
            c = DEV_CQ.at(image, DEV_QP.cq_sq)
            c["cqe_daddr"], c["cqe_num"], c["cqe_mask"] = at + image.nbytes, 1, 0
        self._structure.write(image)
        if self._forwarding and service:
            gpu.own_service().add(self._forwarding)

    @deferred()
    def reset(self) -> None:
        """Move the queue from ERR back to RDY, with nothing posted. Events that were not taken are lost.

        Indices restart at 0. BadStateError while a kernel that was given the queue runs.
        """
        self._check_reset()
        self._stop()
        service = self._forwarding.service if self._forwarding else None
        with ExitStack() as undo:
            if self._forwarding and service:
                service.drop(self._forwarding)
                undo.callback(service.add, self._forwarding)
            self._begin_anew()
        self._ready()

    def _begin_anew(self) -> None:
        """Set the counters of kernels and of the CPU to 0."""
        image = self._structure.read(0, _SIDE_AT + DEV_SIDE.size)
        if self._reader:
            while len(self._reader.take(self.depth)):
                pass
        else:
            cq = DEV_CQ.at(image, DEV_QP.cq_sq)
            restart_cq(self._sends, cq, int(cq["cqe_ci"]))
        restart_sender(image, image[_SIDE_AT:], self.gpu.backend, self)
        row = DEV_ETH_TXQ.at(image)
        for name in ("completed", "notified", "taken"):
            row[name] = 0
        self._structure.write(image)
        self._completed = 0
        if self._forwarding:
            self._forwarding.reset()

    # --- times -------------------------------------------------------------------------------------------------------

    @property
    def _wait_mask(self) -> int:
        """Return the mask of the bits of a time that a WAIT compares."""
        if self.caps.real_time_send:
            return _REAL_TIME_MASK
        return (1 << (_RANGE_MS * self.caps.clock_khz - 1).bit_length()) - 1

    def calculate_timestamp(self, utc_ns: int) -> int:
        """Convert a time of day, in nanoseconds since 1970, to a time for a WAIT (`doca_eth_txq_calculate_timestamp`).

        A WAIT does not wait for a time that has passed when the WAIT is reached. A card treats a time more than 4 s
        ahead as passed; the software NIC refuses it, and the queue fails. InvalidValueError for a time before 1970 or
        after 2106. BadStateError unless the queue was created with `wait_on_time`.
        """
        self.check_open()
        if not self._waits:
            raise BadStateError(f"{self} does not wait for a time: create it with wait_on_time=True")
        seconds, ns = divmod(whole("utc_ns", utc_ns), _NS)
        if not 0 <= seconds < 1 << _SECONDS_SHIFT:
            raise InvalidValueError(f"utc_ns = {utc_ns}: it must be nanoseconds from 1970 to 2106")
        if self.caps.real_time_send:
            return seconds << _SECONDS_SHIFT | ns
        clock = self.ctx.query_clock()
        return clock.last_cycles + ((utc_ns - clock.nsec << clock.shift) // clock.mult) & clock.mask

    # --- CPU data path -----------------------------------------------------------------------------------------------

    def progress(self) -> bool:
        """Forward what kernels have submitted (`doca_eth_txq_gpu_cpu_proxy_progress`). Return whether any was new.

        For a queue with `proxy_service=False`. Only one thread at a time may call this. NotSupportedError if kernels
        ring the doorbell themselves, BadStateError while a service forwards it.
        """
        self.check_open()
        if self._forwarding is None:
            raise NotSupportedError(f"{self} has NIC handler {self.nic_handler.name}, which needs no CPU")
        if self._forwarding.service:
            raise BadStateError(f"a service forwards the doorbells of {self}: create it with proxy_service=False")
        return self._forwarding.progress()

    @deferred()
    def events(self, most: int = 64) -> list[SentEvent]:
        """Return the packets with NOTIFY sent since the last call, oldest first. Free the slots of all sent packets.

        For a queue with completion_on_gpu=False. Only one thread at a time may call this.
        """
        self.check_open()
        if self._reader is None:
            raise BadStateError(f"kernels poll the completions of {self}: create it with completion_on_gpu=False")
        found = []
        for cqe in self._reader.take(most):
            position = int(cqe["wqe_counter"])
            index = self._completed + (position - self._completed & PI_MASK)
            if int(cqe["op_own"]) >> OPCODE_SHIFT == CqeOpcode.REQ_ERR:
                found.append(SentEvent(position, None, QueueError.in_cqe(self.ctx, self.sqn, cqe, index)))
                continue
            if self._notifies(index):
                found.append(SentEvent(position, int(cqe["timestamp"]), None))
            self._completed = index + 1
        done = np.array([self._completed], "<i8").view(np.uint8)
        self._structure.write(done, DEV_ETH_TXQ.completed)
        return found

    def wait_events(self, timeout: float, most: int = 64) -> list[SentEvent]:
        """Wait for such events, and return at least one, or an empty list after `timeout` seconds."""
        end = deadline(timeout)
        while not (found := self.events(most)):
            if self._reader is None or not self._reader.wait(end):
                break
        return found

    def _notifies(self, index: int) -> bool:
        """Return whether a kernel set NOTIFY in a WQE. Its slot must not have been reused yet."""
        ring = send_ring(self.gpu.backend, self)
        wqe = ring.read((index & self.depth - 1) * WQEBB, CTRL_SEG.size)
        return bool(int(CTRL_SEG.at(wqe)["imm"]) >> 24 & _NOTIFY)

    def indices(self) -> dict[str, int]:
        """Return the indices reserved, submitted and completed; `notified` counts packets with NOTIFY."""
        image = self._read()
        q, t = DEV_QP.at(image), DEV_ETH_TXQ.at(image)
        return {
            "reserved": int(q["sq_rsvd_index"]), "submitted": int(q["sq_wqe_pi"]), "completed": int(t["completed"]),
            "notified": int(t["notified"]),
        }

    def last_error(self) -> QueueError | None:
        """Return the first error completion that a kernel has seen, or None. `index` is the index of its WQE.

        `reset()` restarts the queue.
        """
        return self._seen_error(self.sqn, DEV_SIDE.at(self._read(), _SIDE_AT))
