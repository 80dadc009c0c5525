"""One end of a benchmark as kernels see it: a row of 64-bit words in the memory of the place where they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class End(NamedTuple):
    """The row of one queue. Fields that a benchmark does not use stay 0.

    Addresses and keys are this end's own, except where the far end is named.

    `qp`, `companion`       the queue, and what counts its completions
    `client`                1 at the end that begins, else 0
    `laddr`, `lkey`         the data
    `raddr`, `rkey`         the far end's data
    `inbox`                 where a latency test's messages arrive
    `flags`                 words that the far end adds to: its signals, counters or credits
    `far_flags`, `far_rkey` the flags of the far end
    `old`, `words_lkey`     where the previous values of the far end's flags arrive
    `marks`                 the last bytes of a latency test's messages, or 0 if each is the message's number
    `notes`                 one word per message: the time of a round trip, or which message a receive got
    `receives`              slots of the receive queue
    `inline`                1 when data come in completions
    `dump`                  a byte that the NIC must read before fetched data are looked at, or 0
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
    """Return the rows as one array."""
    return np.array(ends, np.int64)
