"""Many queue pairs of one process that share completion queues and memory, and SENDs with numbered contents."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from gpunetio.verbs import QpEndpoint
from nic_rig import RESP_SEND, SEND, Buffer, Completions, Queue, data, until

if TYPE_CHECKING:
    from far import Side

SLOTS, SLOT = 4, 8192  # of each queue pair: messages under way, and bytes for each
SIZES = (0, 8, 9, 100, 1024, 4095, 4096, 4097, 6001)
LIMIT = 100.0
_PATTERN = (np.arange(SLOT) % 251).astype(np.uint8)


def message(queue: int, number: int) -> np.ndarray:
    """What the queue sends as its message of this number."""
    size = SIZES[(5 * queue + number) % len(SIZES)]
    made = _PATTERN[:size] ^ np.uint8((31 * queue + number) & 0xFF)
    if size >= 8:
        made[:8] = np.array([queue, number], "<u4").view(np.uint8)
    return made


class Crowd:
    """The queue pairs 0 … n − 1 of a `Side`, each with `SLOTS` slots of memory."""

    def __init__(self, side: Side):
        self._side = side
        self.queues: list[Queue] = []

    def open(self, count: int) -> list[dict[str, Any]]:
        """So many queue pairs: what the other side must know of them."""
        pd = self._side.pd
        entries = 1 << (count * SLOTS - 1).bit_length()
        self._cqs = [self._side.ctx.create_cq(entries) for _ in range(2)]
        self._done, self._arrived = map(Completions, self._cqs)
        self._memory = Buffer(pd, count * SLOTS * SLOT)
        self._memory.bytes[:] = 0xEE
        for _ in range(count):
            self.queues.append(
                Queue(pd, sq=SLOTS, rq=SLOTS, rq_sges=1, send_cq=self._cqs[0], recv_cq=self._cqs[1])
            )
        self._of_qpn = {queue.qp.qpn: index for index, queue in enumerate(self.queues)}
        self._taken = [0] * count
        ends = [queue.qp.endpoint() for queue in self.queues]
        return [{"qpn": e.qpn, "gid": e.gid.hex(), "lid": e.lid, "mtu": e.mtu, "psn": e.psn} for e in ends]

    def connect(self, peers: list[dict[str, Any]]) -> None:
        for queue, peer in zip(self.queues, peers, strict=True):
            end = QpEndpoint(peer["qpn"], bytes.fromhex(peer["gid"]), peer["lid"], peer["mtu"], peer["psn"])
            queue.qp.connect(end, ack_timeout=16, retry_cnt=7, rnr_retry=7, min_rnr_timer=10)

    def _slot(self, queue: int, number: int) -> int:
        return (queue * SLOTS + number % SLOTS) * SLOT

    # --- sending

    def send(self, first: int, last: int) -> None:
        """Send messages first … last − 1 of every queue, and wait until all are acknowledged."""
        count, end = len(self.queues), time.monotonic() + LIMIT
        following, left = [first] * count, count * (last - first)
        for queue in range(count):
            for _ in range(min(SLOTS, last - first)):
                self._send_one(queue, following)
        while left:
            cqe = self._done.poll()
            if cqe is None:
                assert time.monotonic() < end, f"{left} messages are not acknowledged after {LIMIT:g} s"
                time.sleep(1e-4)
                continue
            queue = self._of_qpn[cqe.qpn]
            assert cqe.opcode == 0, (queue, cqe)
            left -= 1
            if following[queue] < last:
                self._send_one(queue, following)

    def _send_one(self, queue: int, following: list[int]) -> None:
        number = following[queue]
        following[queue] += 1
        made, at = message(queue, number), self._slot(queue, number)
        self._memory.bytes[at : at + len(made)] = made
        sender = self.queues[queue]
        # byte_count 0 in a data segment means 2 GiB: an empty message has no segment.
        segments = [data(self._memory.address + at, self._memory.key, len(made))] if len(made) else []
        sender.post(SEND, *segments)

    # --- receiving

    def receive(self, first: int, last: int) -> int:
        """Take messages first … last − 1 of every queue, each a while after it came: how many receives were late.

        There is no receive posted when this begins, and later some are missing at any time.
        """
        rng = random.Random(7)
        count, end = len(self.queues), time.monotonic() + LIMIT
        refused = self._side.counter("out_of_buffer")
        until(lambda: self._side.counter("out_of_buffer") > refused, "messages for which no receive is posted", LIMIT)
        missing = [queue for queue in range(count) for _ in range(min(SLOTS, last - first))]
        wanted = dict.fromkeys(range(count), last - first - SLOTS)
        left = count * (last - first)
        while left:
            rng.shuffle(missing)
            for queue in missing[: (len(missing) + 1) // 2]:
                self._receive_one(queue)
            del missing[: (len(missing) + 1) // 2]
            while (cqe := self._arrived.poll()) is not None:
                queue = self._of_qpn[cqe.qpn]
                self._check(queue, cqe)
                left -= 1
                if wanted[queue] > 0:
                    wanted[queue] -= 1
                    missing.append(queue)
            assert time.monotonic() < end, f"{left} messages have not come after {LIMIT:g} s"
            time.sleep(1e-3)
        return self._side.counter("out_of_buffer") - refused

    def _receive_one(self, queue: int) -> None:
        receiver = self.queues[queue]
        at = self._slot(queue, receiver.received)
        receiver.receive(data(self._memory.address + at, self._memory.key, SLOT))

    def _check(self, queue: int, cqe: Any) -> None:
        """The queue's next message has come whole."""
        number = self._taken[queue]
        self._taken[queue] += 1
        assert cqe.opcode == RESP_SEND, (queue, number, cqe)
        assert cqe.counter == number & 0xFFFF, (queue, number, cqe)
        wanted, at = message(queue, number), self._slot(queue, number)
        assert cqe.byte_cnt == len(wanted), (queue, number, cqe)
        slot = self._memory.bytes[at : at + SLOT]
        assert np.array_equal(slot[: len(wanted)], wanted), f"message {number} of queue {queue}"
        assert (slot[len(wanted) :] == 0xEE).all(), f"bytes behind message {number} of queue {queue}"
        slot[: len(wanted)] = 0xEE

    def nothing_left(self) -> bool:
        """Whether no completion is left that nobody expected."""
        return self._done.poll() is None and self._arrived.poll() is None
