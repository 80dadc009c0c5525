"""The layout of a receive queue's packets in its buffer, and the WQEs that point there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arguments import whole, within
from ..errors import InvalidValueError, NotSupportedError
from ..formats.commands import WqType
from ..formats.layout import Fields
from ..formats.wqe import DATA_SEG, MIN_STRIDE_LOG, MIN_STRIDES_LOG, SEGMENT, STRIDING_WQE
from ..memory import PAGE, round_up
from .caps import EthCaps

_LEAST_WQES = 2  # the NIC fills one while the packets of the other are taken


@dataclass(frozen=True)
class CyclicLayout:
    """A ring of `packets` slots of 2^`slot_log` bytes. `strides_log` is the logarithm of the slots per WQE.

    In a striding queue, a WQE's buffer has many slots, one stride each. In other queues it has one slot.
    """

    packets: int
    slot_log: int
    strides_log: int
    striding: bool

    @property
    def nbytes(self) -> int:
        """Return the bytes of all slots, rounded up to whole pages."""
        return round_up(self.packets << self.slot_log, PAGE)

    @property
    def wqes(self) -> int:
        """Return the number of WQEs."""
        return self.packets >> self.strides_log

    @property
    def wqe_bytes(self) -> int:
        """Return the bytes of a WQE."""
        return STRIDING_WQE if self.striding else SEGMENT

    def fields(self) -> Fields:
        """Return the WQ context's fields for this layout."""
        found: Fields = {
            "wq_type": WqType.CYCLIC_STRIDING if self.striding else WqType.CYCLIC,
            "log_wq_sz": self.wqes.bit_length() - 1, "log_wq_stride": self.wqe_bytes.bit_length() - 1,
        }
        if self.striding:  # log_wqe_num_of_strides is a signed 4-bit number
            found["log_wqe_num_of_strides"] = self.strides_log - MIN_STRIDES_LOG & 0xF
            found["log_wqe_stride_size"] = self.slot_log - MIN_STRIDE_LOG
        return found

    def ring(self, address: int, lkey: int) -> np.ndarray:
        """Return the WQEs of a buffer that starts at `address`. Each points to the next part of the buffer."""
        size = 1 << self.slot_log + self.strides_log
        wqes = np.zeros((self.wqes, self.wqe_bytes), np.uint8)
        rows = wqes[:, -SEGMENT:].copy().view(DATA_SEG.dtype)[:, 0]
        rows["byte_count"], rows["lkey"] = size, lkey
        rows["addr"] = address + size * np.arange(self.wqes, dtype=np.uint64)
        wqes[:, -SEGMENT:] = rows.view(np.uint8).reshape(self.wqes, SEGMENT)
        return wqes.reshape(-1)


def cyclic_layout(caps: EthCaps, max_burst: int, max_packet: int) -> CyclicLayout:
    """Return the layout of a ring of at least `max_burst` packets of up to `max_packet` bytes.

    Packets that fit into a stride share WQEs. NotSupportedError for more than the device supports.
    """
    if (max_burst := whole("max_burst", max_burst)) < 1:
        raise InvalidValueError(f"max_burst = {max_burst}: a queue has room for one packet at least")
    slots = 1 << (max_burst - 1).bit_length()
    slot_log = max(MIN_STRIDE_LOG, (within("max_packet", max_packet, 1, 1 << 31) - 1).bit_length())
    striding = 1 << slot_log <= caps.max_stride
    most = caps.max_cyclic_burst if striding else caps.max_rx_burst
    if slots > most:
        raise NotSupportedError(f"max_burst = {max_burst}: a queue has {most} packets of this size at most")
    if not striding:
        return CyclicLayout(slots, slot_log, 0, False)
    return CyclicLayout(max(slots, _LEAST_WQES << MIN_STRIDES_LOG), slot_log, MIN_STRIDES_LOG, True)


@dataclass(frozen=True)
class PoolLayout:
    """A pool of `slots` slots of `slot` bytes, each with headroom, a packet and tailroom."""

    slots: int
    slot: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of all slots, rounded up to whole pages."""
        return round_up(self.slots * self.slot, PAGE)


def pool_layout(
    max_burst: int, max_packet: int, rate: int, max_time: int, headroom: int, tailroom: int
) -> PoolLayout:
    """Return the layout of a managed pool: room for a burst, and for what arrives while the program holds packets.

    `rate` is in Mbit/s and `max_time` in microseconds, so their product is in bits.
    """
    max_packet = within("max_packet", max_packet, 1, 1 << 31)
    slot = round_up(headroom + max_packet + tailroom, 1 << MIN_STRIDE_LOG)
    held = -(-within("rate", rate, 0, 1 << 32) * within("max_time", max_time, 0, 1 << 32) // (8 * max_packet))
    return PoolLayout(whole("max_burst", max_burst) + held, slot)
