"""What kernels know of one end of a benchmark: a row of 64-bit words in the memory of the place where they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class End(NamedTuple):
    """One queue's row; fields that a benchmark has no use for stay 0. Addresses and keys, but for those of `far`, are
    this end's own.

    `qp`, `companion`       the queue, and what counts its completions
    `client`                1 at the end that begins, else 0
    `laddr`, `lkey`         the data
    `raddr`, `rkey`         the far end's
    `inbox`                 where a latency test's messages arrive
    `flags`                 words that the far end adds to: its signals, counters or credits
    `far_flags`, `far_rkey` those of the far end
    `old`, `words_lkey`     where what they were before arrives
    `marks`                 a latency test's last bytes of messages, or 0 for the number of each
    `notes`                 a word a message: times of round trips, or which message a receive has got
    `receives`              slots of the receive queue
    `inline`                1 when data come in completions
    `dump`                  a byte that the NIC is to read before what it has fetched is looked at, or 0
    """

    qp: int
    companion: int = 0
    client: int = 1
    laddr: int = 0
    lkey: int = 0
    raddr: int = 0
    rkey: int = 0
    inbox: int = 0
    flags: int = 0
    far_flags: int = 0
    far_rkey: int = 0
    old: int = 0
    words_lkey: int = 0
    marks: int = 0
    notes: int = 0
    receives: int = 0
    inline: int = 0
    dump: int = 0


AT = End(*range(0, 8 * len(End._fields), 8))
ROW = 8 * len(End._fields)


def table(ends: Sequence[End]) -> np.ndarray:
    """The rows, one behind the other."""
    return np.array(ends, np.int64)
