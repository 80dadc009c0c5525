"""Receive queues on the CPU data path, with the program's buffers or with a managed pool of buffers."""

from __future__ import annotations

import ctypes
import threading
from abc import abstractmethod
from contextlib import ExitStack
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..arguments import whole, within
from ..errors import BadStateError, FullError, InvalidValueError, NotSupportedError
from ..formats.commands import WqType
from ..formats.cqe import OPCODE_SHIFT, CqeOpcode, Syndrome
from ..formats.doorbell import PI_MASK, QP_DBREC
from ..formats.wqe import DATA_SEG, SEGMENT
from ..interrupts import deferred
from ..memory import HostMemory, is_accessible
from ..verbs import MR, PD, CompChannel
from ..verbs.devx.ring import doorbells, internal_ring
from .failure import QueueError
from .layout import PoolLayout, pool_layout
from .place import check_buffer
from .reader import CqReader
from .received import ManagedPacket, PacketInfo, Received
from .rxq import EthRxq

_LONGEST_ROOM = 1 << 12  # maximum bytes of headroom and of tailroom
_What = TypeVar("_What")  # what the queue stores about a posted receive
_Packet = TypeVar("_Packet")


class CpuRxq(EthRxq, Generic[_What, _Packet]):
    """A receive queue whose ring this process fills, with one buffer per packet.

    `max_burst` is the maximum number of posted receives.
    """

    max_burst: int

    def __init__(self, pd: PD, max_burst: int, max_packet: int, queue_id: int | None):
        super().__init__(pd, max_packet, queue_id)
        if (max_burst := whole("max_burst", max_burst)) < 1:
            raise InvalidValueError(f"max_burst = {max_burst}: a queue has room for one packet at least")
        if max_burst > self.caps.max_rx_burst:
            raise NotSupportedError(
                f"max_burst = {max_burst}: a queue of {self.ctx} has {self.caps.max_rx_burst} receives at most"
            )
        self.max_burst = 1 << (max_burst - 1).bit_length()
        self._lock = threading.RLock()
        self._posted: list[_What | None] = [None] * self.max_burst
        self._producer = self._consumer = 0
        self._failure: QueueError | None = None

    def _open_queue(self, channel: CompChannel | None, undo: ExitStack) -> None:
        self._reader = CqReader(self.ctx, self.max_burst, channel)
        undo.callback(self._reader.cq.close)
        ring = internal_ring(self.ctx, undo, self.max_burst * SEGMENT)
        log = self.max_burst.bit_length() - 1
        fields = {"wq_type": WqType.CYCLIC, "log_wq_sz": log, "log_wq_stride": SEGMENT.bit_length() - 1}
        self._create(self._reader.cq, ring, fields, undo)
        assert ring.memory
        self._wqes, self._doorbells = ring.memory.view(DATA_SEG.dtype, 0, self.max_burst), doorbells()
        self._ready()

    def _put(self, what: _What, address: int, lkey: int, nbytes: int) -> None:
        """Write a WQE into the next slot of the ring, which must be free. The caller holds the lock."""
        slot = self._producer & self.max_burst - 1
        self._wqes[slot] = nbytes, lkey, address
        self._posted[slot] = what
        self._producer += 1

    def _announce(self) -> None:
        self._doorbells.ring_receive(self._ring.dbr_address + QP_DBREC.rcv, self._producer & PI_MASK)

    @property
    def posted(self) -> int:
        """Return how many receives are posted and have not been taken as completed."""
        return self._producer - self._consumer

    def receive(self, most: int = 64, *, least: int = 1, timeout: float) -> list[_Packet]:
        """Return up to `most` packets, oldest first: at least `least`, or as many as came in `timeout` seconds.

        A batch of managed receives (`doca_eth_rxq_event_batch_managed_recv`) is `least` to `most` packets.
        """
        self.check_open()
        return self._reader.collect(self._take, most, least, timeout)

    @deferred()
    def _take(self, most: int) -> list[_Packet]:
        """Take completed receives. A failed receive of the pool yields no packet."""
        found = []
        with self._lock:
            for cqe in self._reader.take(most):
                what = self._posted[self._consumer & self.max_burst - 1]
                assert what is not None
                self._consumer += 1
                failed = self._failed(cqe) if int(cqe["op_own"]) >> OPCODE_SHIFT != CqeOpcode.RESP_SEND else None
                packet = self._packet(what, cqe, failed)
                if packet is not None:
                    found.append(packet)
        return found

    def _failed(self, cqe: np.void) -> QueueError:
        failed = QueueError.in_cqe(self.ctx, self.rqn, cqe)
        if failed.syndrome != Syndrome.LOCAL_LENGTH:  # the queue keeps running after a packet that is too long
            self._failure = self._failure or failed
        return failed

    @abstractmethod
    def _packet(self, what: _What, cqe: np.void, failed: QueueError | None) -> _Packet | None:
        """Return the result of a receive, or None. The caller holds the lock."""

    def last_error(self) -> QueueError | None:
        """Return the first error found among the completions taken, which moved the queue to ERR, or None."""
        return self._failure

    def req_notify(self) -> None:
        """Request one event on the channel for the next completion not taken (`doca_pe_request_notification`).

        The channel's `get_event()` returns the queue's `cq`: acknowledge the event there. BadStateError without a
        channel.
        """
        self.check_open()
        self._reader.request_event(self)

    @deferred()
    def reset(self) -> None:
        """Move the queue from ERR back to RDY, with nothing posted. Completions that were not taken are lost."""
        self.check_open()
        with self._lock:
            self._stop()
            while len(self._reader.take(self.max_burst)):
                pass
            self._posted = [None] * self.max_burst
            self._producer = self._consumer = 0
            self._failure = None
            self._announce()
            self._ready()
            self._start()

    def _start(self) -> None:
        """Post the receives that the queue posts by itself. The caller holds the lock."""


class RegularRxq(CpuRxq[tuple[object, int], Received]):
    """A receive queue with the program's buffers, of type REGULAR: `post` one buffer per packet, then `receive`.

    `max_burst`    maximum number of waiting receives; rounded up to a power of two
    `max_packet`   minimum bytes of a buffer
    `channel`      reports completions after `req_notify()`
    `queue_id`     the number by which flow rules name the queue
    """

    def __init__(
        self, pd: PD, max_burst: int, max_packet: int, *, channel: CompChannel | None = None,
        queue_id: int | None = None,
    ):
        super().__init__(pd, max_burst, max_packet, queue_id)
        with ExitStack() as undo:
            self._open_queue(channel, undo)
            self._opened(f"regular receive queue {self.rqn:#x} of {self.ctx.name}", undo)

    @deferred()
    def post(self, region: MR, offset: int = 0, nbytes: int | None = None, *, context: object = None) -> None:
        """Post a buffer of `nbytes`, by default `max_packet`, at `offset` in a region (`doca_eth_rxq_task_recv`).

        Keep the region open until the receive has completed. InvalidValueError for a buffer that is outside the region
        or shorter than `max_packet`, or for a region of another protection domain; FullError if `max_burst` receives
        are posted; BadStateError if the queue has failed.
        """
        self.check_open()
        nbytes = self.max_packet if nbytes is None else whole("nbytes", nbytes)
        if nbytes < self.max_packet:
            raise InvalidValueError(f"nbytes = {nbytes}: a packet of {self} may have {self.max_packet}")
        check_buffer(self.pd, region, offset, nbytes)
        with self._lock:
            if self._failure:
                raise BadStateError(f"{self} is in ERR: {self._failure}; reset() it")
            if self.posted == self.max_burst:
                raise FullError(f"{self} has no room: {self.max_burst} receives are posted; receive() first")
            self._put((context, nbytes), region.iova + offset, region.lkey, nbytes)
            self._announce()

    def _packet(self, what: tuple[object, int], cqe: np.void, failed: QueueError | None) -> Received:
        if failed:
            return Received(what[0], 0, None, failed)
        return Received(what[0], int(cqe["byte_cnt"]), PacketInfo.of(cqe), None)


class ManagedRxq(CpuRxq[int, ManagedPacket]):
    """A receive queue that manages a pool of buffers, of type MANAGED_MEMPOOL.

    `receive` returns packets, and the program releases each one.

    `max_burst`, `max_packet`, `channel`, `queue_id` are as for `RegularRxq`, and:

    `headroom`, `tailroom`   bytes that stay free before and after each packet
    `rate`, `max_time`       expected Mbit/s, and microseconds for which the program holds a packet: the pool has room
                             for the packets that arrive in that time, in addition to a burst
    `buffer`                 a region of `pd` in CPU memory, with LOCAL_WRITE and `estimate_buffer()` bytes from
                             `offset` on; None: new memory

    Packets that are too long are dropped. `region` holds all packets, so that they can be sent on.
    """

    region: MR
    slots: int

    def __init__(
        self,
        pd: PD,
        max_burst: int,
        max_packet: int,
        *,
        headroom: int = 0,
        tailroom: int = 0,
        rate: int = 0,
        max_time: int = 0,
        buffer: MR | None = None,
        offset: int = 0,
        channel: CompChannel | None = None,
        queue_id: int | None = None,
    ):
        super().__init__(pd, max_burst, max_packet, queue_id)
        layout = _pool(self.max_burst, self.max_packet, headroom, tailroom, rate, max_time)
        self.slots, self._headroom = layout.slots, headroom
        with ExitStack() as undo:
            if buffer is None:
                memory, offset = HostMemory(layout.nbytes), 0
                undo.callback(memory.close)
                self.region, array = pd.register(memory), memory.array
                undo.callback(self.region.close)
            else:
                self.region = check_buffer(pd, buffer, offset, layout.nbytes)
                self._use(buffer)
                array = _bytes(buffer, offset, layout.nbytes)
            self._first = self.region.iova + offset
            self._slots = array[: layout.slots * layout.slot].reshape(-1, layout.slot)
            self._held: set[int] = set()  # slots of packets that are not released yet
            self._open_queue(channel, undo)
            self._start()
            self._opened(f"managed receive queue {self.rqn:#x} of {self.ctx.name}", undo)

    @staticmethod
    def estimate_buffer(
        max_burst: int, max_packet: int, *, headroom: int = 0, tailroom: int = 0, rate: int = 0, max_time: int = 0
    ) -> int:
        """Return the bytes of a buffer for such a queue (`doca_eth_rxq_estimate_packet_buf_size`)."""
        burst = 1 << (whole("max_burst", max_burst) - 1).bit_length()
        return _pool(burst, whole("max_packet", max_packet), headroom, tailroom, rate, max_time).nbytes

    def _start(self) -> None:
        self._free = [slot for slot in range(self.slots) if slot not in self._held]
        self._fill()

    def _fill(self) -> None:
        """Post as many free slots as the ring has room for, unless the queue has failed."""
        room = 0 if self._failure else min(self.max_burst - self.posted, len(self._free))
        for slot in self._free[:room]:
            at = self._first + slot * self._slots.shape[1] + self._headroom
            self._put(slot, at, self.region.lkey, self.max_packet)
        if room:
            del self._free[:room]
            self._announce()

    def _packet(self, what: int, cqe: np.void, failed: QueueError | None) -> ManagedPacket | None:
        if failed:
            self._free.append(what)
            self._fill()
            return None
        self._held.add(what)
        self._fill()  # the ring has room again for a slot that was left over
        return ManagedPacket(
            self._slots[what], self._headroom, int(cqe["byte_cnt"]), PacketInfo.of(cqe),
            lambda: self._release_slot(what),
        )

    @deferred()
    def _release_slot(self, slot: int) -> None:
        with self._lock:
            self._held.remove(slot)
            if not self.closed:
                self._free.append(slot)
                self._fill()


def _pool(burst: int, packet: int, headroom: int, tailroom: int, rate: int, max_time: int) -> PoolLayout:
    for name, room in (("headroom", headroom), ("tailroom", tailroom)):
        within(name, room, 0, _LONGEST_ROOM)
    return pool_layout(burst, packet, rate, max_time, headroom, tailroom)


def _bytes(region: MR, offset: int, nbytes: int) -> NDArray[np.uint8]:
    """Return part of a region that the CPU can access. InvalidValueError if the CPU cannot."""
    address = region.address + offset
    if not is_accessible(address, nbytes, True):
        raise InvalidValueError(f"buffer = {region}: packets of a CPU program lie in memory of the CPU")
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
