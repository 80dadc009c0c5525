"""A received packet, as a CPU program sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..closing import end_block
from ..errors import BadStateError
from ..formats.cqe import FLOW_TAG_MASK, RxChecksum
from .failure import QueueError

_CHECKS = int(sum(RxChecksum))


@dataclass(frozen=True, slots=True)
class PacketInfo:
    """What the device reports about a packet. VLAN tags stay in the packet.

    `timestamp`   time of arrival: cycles, or with `caps.real_time_receive` seconds << 32 | nanoseconds
    `rx_hash`     the hash by which RSS chose the queue
    `flow_tag`    tag of the flow rule that matched; 0 for none
    `metadata`    register that flow rules have set
    `checks`      the checksums that the device has verified
    """

    timestamp: int
    rx_hash: int
    flow_tag: int
    metadata: int
    checks: RxChecksum

    @classmethod
    def of(cls, cqe: np.void) -> PacketInfo:
        """Read the information from a CQE."""
        return cls(
            int(cqe["timestamp"]), int(cqe["rss_hash_result"]), int(cqe["sop_drop_qpn"]) & FLOW_TAG_MASK,
            int(cqe["imm_inval_pkey"]), RxChecksum(int(cqe["hds_ip_ext"]) & _CHECKS),
        )


@dataclass(frozen=True, slots=True)
class Received:
    """A completed receive (`doca_eth_rxq_task_recv_get_*`).

    `context` was given to `post`, `nbytes` is the length of the packet. With an `error`, there is no packet: `nbytes`
    is 0 and `info` is None.
    """

    context: object
    nbytes: int
    info: PacketInfo | None
    error: QueueError | None


class ManagedPacket:
    """A packet in a buffer of a `ManagedRxq`, until it is released (`doca_eth_rxq_event_managed_recv`).

    `data` is the packet's bytes, `buffer` the same with headroom and tailroom; both can be changed in place. The packet
    is a context manager that releases it.
    """

    nbytes: int
    info: PacketInfo

    __slots__ = ("_buffer", "_release", "_start", "info", "nbytes")

    def __init__(
        self, buffer: NDArray[np.uint8], start: int, nbytes: int, info: PacketInfo, release: Callable[[], None]
    ):
        self._buffer: NDArray[np.uint8] | None = buffer
        self._start, self._release = start, release
        self.nbytes, self.info = nbytes, info

    @property
    def buffer(self) -> NDArray[np.uint8]:
        """Return the whole slot. BadStateError after `release()`."""
        if self._buffer is None:
            raise BadStateError("this packet was released: its buffer receives others")
        return self._buffer

    @property
    def data(self) -> NDArray[np.uint8]:
        """Return the packet's bytes, from its Ethernet header on."""
        return self.buffer[self._start : self._start + self.nbytes]

    @property
    def address(self) -> int:
        """Return the packet's address, for work requests with the key of the queue's `region`."""
        return int(self.data.ctypes.data)

    def release(self) -> None:
        """Give the buffer back to the queue (`doca_buf_dec_refcount`). Idempotent."""
        if self._buffer is not None:
            self._buffer = None
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        end_block(error, self.release)

    def __repr__(self) -> str:
        return f"<packet of {self.nbytes} bytes{', released' if self._buffer is None else ''}>"
