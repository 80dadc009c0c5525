"""Warnings about sends that the NIC keeps retrying because the peer has no receive posted.

With rnr_retry 7, the default of `QP.connect`, the retries may go on forever without a completion.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from ...enums import QpState
from ..transport.loopback import ENDLESS_RNR
from ..state.tables import Table
from .receivers import why_not_ready

logger: logging.Logger = logging.getLogger("gpunetio.nic")


class Starved:
    """Checks a NIC's QPs periodically, and warns once about each request that waits at two checks in a row."""

    def __init__(self, name: str, qps: Table, counters: Mapping[str, int]):
        self._name, self._qps, self._counters = name, qps, counters
        self._refusals = 0
        self._waiting: set[tuple[int, int]] = set()  # at the last check: QPN and index of each waiting request
        self._warned: set[tuple[int, int]] = set()

    def check(self) -> None:
        """Warn about the requests that have waited since the last check."""
        refusals = int(self._counters["rnr_nak_retry_err"])
        if refusals == self._refusals:  # no send was refused, so no QP needs a check
            self._waiting.clear()
            return
        self._refusals = refusals
        rows = self._qps.given
        rows = rows[(rows["rnr_retries"] > 0) & (rows["state"] == QpState.RTS)].copy()
        waiting = {(int(row["qpn"]), int(row["sq_ci"])): row for row in rows}
        for key in (self._waiting & waiting.keys()) - self._warned:
            self._warn(*key, waiting[key])
        self._warned &= waiting.keys()
        self._warned |= self._waiting & waiting.keys()
        self._waiting = set(waiting)

    def _warn(self, qpn: int, index: int, row: np.void) -> None:
        most = int(row["rnr_retry"])
        until = "forever (rnr_retry 7)" if most == ENDLESS_RNR else f"up to {most} times"
        logger.warning(
            f"{self._name}: QP {qpn:#x} (requester), WQE {index} waits: QP {int(row['remote_qpn']):#x} of the peer has "
            f"no receive posted. The NIC has retried {int(row['rnr_retries'])} times, and goes on {until}. "
            f"Likely cause: {why_not_ready(self._qps, qpn)}."
        )
