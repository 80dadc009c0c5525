"""The counts of all queues, as collected by the CPU, and the lines in which the application prints them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from .. import __version__
from ..formats.eth_device import SemaphoreStatus
from .counts import ITEMS, WORK
from .queues import Protocol, ReceiveQueue, queue_name

PRINT_SECONDS = 5.0
RULES, REPLAY = "Flow rules of connections", "Replay"  # failures that are not of kernels
_GIGA = 1e9


class QueueCounts:
    """The counts of a queue's kernel since it began, by name."""

    queue: ReceiveQueue

    def __init__(self, queue: ReceiveQueue):
        self.queue = queue
        self.counts: dict[str, int] = dict.fromkeys(queue.protocol.counts.offsets, 0)
        self._item = 0

    def collect(self) -> None:
        """Take all items that the kernel has filled, and free them."""
        semaphore = self.queue.semaphore
        while semaphore.status(self._item) == SemaphoreStatus.READY:
            self._add(semaphore.read_info(self._item))
            semaphore.set_status(self._item, SemaphoreStatus.FREE)
            self._item = (self._item + 1) % ITEMS

    def finish(self) -> None:
        """Take the counts that the kernel, which has ended, has left in its sums."""
        self.collect()
        sums = self.queue.sums
        self._add(self.queue.protocol.counts.at(sums.read()))
        sums.write(np.zeros(sums.nbytes, np.uint8))

    def _add(self, info: np.ndarray) -> None:
        for name in self.counts:
            self.counts[name] += int(info[name])

    def report(self, dropped: int | None) -> QueueReport:
        """Return a report of this moment. `dropped` is the NIC's count."""
        queue, work = self.queue, WORK.at(self.queue.work.array)
        return QueueReport(
            queue.protocol, queue.number, queue.rxq.rqn, dict(self.counts), dropped, int(work["busy_ns"]) / 1e9
        )


@dataclass(frozen=True)
class QueueReport:
    """The counts of one queue.

    `dropped` are packets that the NIC had to drop, or None if it does not report them. `busy_seconds` is how long the
    kernel had packets to work on.
    """

    protocol: Protocol
    number: int
    rqn: int
    counts: Mapping[str, int]
    dropped: int | None
    busy_seconds: float

    @property
    def name(self) -> str:
        """Return the name of the queue's kernel."""
        return queue_name(self.protocol, self.number)


@dataclass(frozen=True)
class KernelReport:
    """The work of a kernel of the HTTP server: the one that serves, or one that accepts connections.

    `dropped` are packets for which there was no room: in the ring of the server, or in the receive queue of the other
    kernels, which a card does not report. `busy_seconds` is how long the kernel had packets to work on, or its busiest
    thread, if it has several.
    """

    name: str
    packets: int
    dropped: int | None
    busy_seconds: float


@dataclass(frozen=True)
class Report:
    """The counts of a run of `seconds`.

    `failures` has the error of each kernel that has failed, by its name, and those of RULES and REPLAY. `http` has the
    counts of the HTTP server (`HttpServer.counts`), or None if there is none, and `kernels` are its kernels. `device`
    is the name of the NIC. `replay` says what became of a capture's records (`Player.counts`).
    """

    seconds: float
    queues: tuple[QueueReport, ...]
    failures: Mapping[str, str]
    http: Mapping[str, int] | None = None
    kernels: tuple[KernelReport, ...] = ()
    device: str = ""
    replay: Mapping[str, int] | None = None

    def document(self) -> dict[str, object]:
        """Return the document that --json prints."""
        return {
            "version": __version__, "seconds": self.seconds, "failures": dict(self.failures),
            "queues": [
                {
                    "protocol": queue.protocol.name, "number": queue.number, "rqn": queue.rqn,
                    "counts": dict(queue.counts), "dropped": queue.dropped, "busy_seconds": queue.busy_seconds,
                }
                for queue in self.queues
            ],
            "http": None if self.http is None else dict(self.http),
            "kernels": [asdict(kernel) for kernel in self.kernels],
            "replay": None if self.replay is None else dict(self.replay),
        }

    def kernel_names(self) -> list[str]:
        """Return the names of all kernels, as `failures` has them."""
        return [*(queue.name for queue in self.queues), *(kernel.name for kernel in self.kernels)]

    def of_protocol(self, protocol: Protocol) -> list[QueueReport]:
        """Return the queues of a protocol."""
        return [queue for queue in self.queues if queue.protocol is protocol]


def lines(report: Report) -> Iterator[str]:
    """Yield the statistics as the original prints them. Bandwidths are means since the beginning."""
    yield ""
    yield f"Seconds {report.seconds:.0f}"
    for queue in report.of_protocol(Protocol.UDP):
        n, bandwidth = queue.counts, {
            name: queue.counts[f"{name}_bytes"] * 8 / report.seconds / _GIGA for name in ("dns", "others", "total")
        }
        yield (
            f"[UDP] QUEUE: {queue.number} DNS: {n['dns']} DNS_BW: {bandwidth['dns']:.3f} Gbps "
            f"OTHER: {n['others']} OTHER_BW: {bandwidth['others']:.3f} Gbps "
            f"TOTAL: {n['total']} TOTAL_BW: {bandwidth['total']:.3f} Gbps"
        )
    for queue in report.of_protocol(Protocol.TCP):
        n = queue.counts
        yield (
            f"[TCP] QUEUE: {queue.number} HTTP: {n['http']} HTTP HEAD: {n['http_head']} "
            f"HTTP GET: {n['http_get']} HTTP POST: {n['http_post']} "
            f"TCP [SYN: {n['tcp_syn']} FIN: {n['tcp_fin']} ACK: {n['tcp_ack']}] "
            f"OTHER: {n['others']} TOTAL: {n['total']}"
        )
    if report.http is not None:
        n = report.http
        yield (
            f"[HTTP] REQUESTS: {n['requests']} [200: {n['ok']} 400: {n['bad_request']} 404: {n['not_found']} "
            f"405: {n['not_allowed']} 431: {n['too_large']}] "
            f"CONNECTIONS [OPEN: {n['open']} HALF-OPEN: {n['half_open']} ENDED: {n['ended']} REFUSED: {n['refused']}] "
            f"RETRANSMITTED: {n['retransmitted']} DROPPED: {n['dropped']}"
        )
    if report.replay is not None:
        n = dict(report.replay)
        line = f"[REPLAY] RECORDS: {n.pop('records')} CUT SHORT: {n.pop('cut_short')}"
        yield " ".join((line, *(f"{name}: {count}" for name, count in n.items())))
