"""Counters in sysfs: what programs read in the folders `counters` and `hw_counters` of a port.

A card counts for all programs, but here each program has a NIC of its own. So each of the programs that share a folder
of devices adds the new counts of its NIC to the files. A program with a NIC always finds the files up to date
(preload.c); in other programs, the counts are a moment old.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..service import ServiceThread

if TYPE_CHECKING:
    from ..nic.nic import SoftNic

_PERIOD = 0.25  # seconds
_PATIENCE, _LAST_PATIENCE, _LOOK = 0.5, 10.0, 0.01  # seconds
_WORD = 4  # bytes: the unit of a port's data (IBTA 16.1.3.5)
_LIFESPAN = 10  # milliseconds for which the kernel caches what it has read (ib_core)

# Names: Linux, drivers/infiniband/core/sysfs.c and drivers/infiniband/hw/mlx5/counters.c. Each file is the sum of some
# of the NIC's counters, divided by a unit. Files without counters stay 0: software NICs have nothing to count there.
_PORT: dict[str, tuple[tuple[str, ...], int]] = {
    "port_xmit_data":                  (("rdma_tx_bytes",), _WORD),
    "port_rcv_data":                   (("rdma_rx_bytes",), _WORD),
    "port_xmit_packets":               (("rdma_tx_packets",), 1),
    "port_rcv_packets":                (("rdma_rx_packets",), 1),
    "unicast_xmit_packets":            (("rdma_tx_packets",), 1),
    "unicast_rcv_packets":             (("rdma_rx_packets",), 1),
    "port_xmit_discards":              (("tx_dropped",), 1),
    "port_rcv_errors":                 (("rx_malformed", "rx_icrc_encapsulated"), 1),
    "multicast_xmit_packets":          ((), 1),
    "multicast_rcv_packets":           ((), 1),
    "symbol_error":                    ((), 1),
    "link_error_recovery":             ((), 1),
    "link_downed":                     ((), 1),
    "port_rcv_remote_physical_errors": ((), 1),
    "port_rcv_switch_relay_errors":    ((), 1),
    "port_rcv_constraint_errors":      ((), 1),
    "port_xmit_constraint_errors":     ((), 1),
    "local_link_integrity_errors":     ((), 1),
    "excessive_buffer_overrun_errors": ((), 1),
    "port_xmit_wait":                  ((), 1),
    "VL15_dropped":                    ((), 1),
}
_COUNTED = (
    "rx_write_requests", "rx_read_requests", "rx_atomic_requests", "out_of_buffer", "out_of_sequence",
    "duplicate_request", "rnr_nak_retry_err", "packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err",
    "resp_local_length_error", "resp_cqe_error", "req_cqe_error", "req_remote_invalid_request",
    "req_remote_access_errors", "resp_remote_access_errors", "resp_cqe_flush_error", "req_cqe_flush_error",
    "req_transport_retries_exceeded", "req_rnr_retries_exceeded", "rx_icrc_encapsulated",
)
_CONGESTION = (  # software NICs have no congestion control
    "np_cnp_sent", "np_ecn_marked_roce_packets", "rp_cnp_handled", "rp_cnp_ignored", "roce_adp_retrans",
    "roce_adp_retrans_to", "roce_slow_restart", "roce_slow_restart_cnps", "roce_slow_restart_trans",
)
_FILES = {
    **{f"counters/{name}": source for name, source in _PORT.items()},
    **{f"hw_counters/{name}": ((name,), 1) for name in _COUNTED},
    **{f"hw_counters/{name}": ((), 1) for name in _CONGESTION},
}


def build(port: Path) -> None:
    """Write the files of a port, with counts of 0."""
    for folder in "counters", "hw_counters":
        (port / folder).mkdir(parents=True)
    for name in _FILES:
        (port / name).write_text("0\n")
    (port / "hw_counters/lifespan").write_text(f"{_LIFESPAN}\n")


class _Counted:
    """The counts of a NIC, and how much of them is in the files."""

    def __init__(self, port: Path):
        self._port = port
        self._told = dict.fromkeys(_FILES, 0)

    def tell(self, counters: Mapping[str, int], patience: float = _PATIENCE) -> None:
        """Add to the files what was counted since the last successful call, within `patience` seconds.

        The folder may be gone by now.
        """
        now = {name: sum(counters[part] for part in parts) // unit for name, (parts, unit) in _FILES.items()}
        changes = {name: now[name] - told for name, told in self._told.items() if now[name] != told}
        if not changes:
            return
        with suppress(OSError):
            folder = os.open(self._port, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _lock(folder, patience)
                for name, more in changes.items():
                    with open(self._port / name, "r+b", buffering=0) as file:
                        count = int(file.read(32)) + more
                        os.pwrite(file.fileno(), b"%d\n" % count, 0)  # in one write, which never shortens the text
                    self._told[name] = now[name]
            finally:
                os.close(folder)


def _lock(folder: int, patience: float) -> None:
    """Lock a folder. BlockingIOError if another process keeps it locked; normally, it only adds numbers meanwhile."""
    end = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:  # the other process may be stopped
                raise
            time.sleep(_LOOK)


class CounterFiles:
    """The files of all devices of this program, which a thread keeps up to date. `classes` is /sys/class/infiniband."""

    def __init__(self, classes: Path):
        self._classes = classes
        self._counted: weakref.WeakKeyDictionary[SoftNic, _Counted] = weakref.WeakKeyDictionary()
        self._opens: Counter[SoftNic] = Counter()  # the counters of other NICs are gone
        self._lock = threading.Lock()
        self._thread = ServiceThread("gpunetio counters", self._serve)

    def begin(self, nic: SoftNic) -> None:
        """From now on, write what a NIC counts, until `end` was called equally often."""
        with self._lock:
            self._opens[nic] += 1
            if nic not in self._counted:
                self._counted[nic] = _Counted(self._classes / nic.name / "ports/1")
            if not self._thread.running:
                self._thread.start()

    def end(self, nic: SoftNic) -> None:
        """Write what a NIC has counted, before the NIC may close."""
        self.tell(_LAST_PATIENCE)
        with self._lock:
            self._opens[nic] -= 1
            if not self._opens[nic]:
                del self._opens[nic]

    def tell(self, patience: float = _PATIENCE) -> None:
        """Write what open NICs have counted."""
        with self._lock:
            for nic in self._opens:
                self._counted[nic].tell(nic.counters, patience)

    def _serve(self) -> None:
        while True:
            time.sleep(_PERIOD)
            self.tell()
