"""The host side of the HTTP server: pages, connections, the CPU's queues, and the arguments of kernels."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from ipaddress import IPv4Address

import numpy as np

from .. import device as dev
from ..enums import MemType
from ..errors import DocaError
from ..eth import CyclicRxq, EthTxq, query_caps
from ..flow import FlowPipe
from ..formats.packet import ETHERNET, VLAN_TAG
from ..gpu import Gpu, GpuMemory
from ..verbs import PD
from .accept_tcp import BURST, DEPTH, PLACE_BYTES
from .acceptor import Acceptor, SlotTable
from .connection import Tables
from .connection_rules import ConnectionRules, Rules
from .counts import WORK
from .pages import Page, Pages
from .queues import CPU_FIRST_ID, TXQ_DEPTH, Protocol
from .station import Station
from .statistics import KernelReport, QueueReport
from .tcp_frames import MOST_ANSWER

_LANES_ON_GPU = 32  # of a queue: a warp

_log = logging.getLogger(__name__)


class AcceptQueue:
    """A queue of the CPU, which gets the first packets of clients, and the memory of its kernel. `undo` closes it.

    The kernel, `accept_tcp`, runs on a thread of the host, even if the other kernels run on a GPU.
    """

    name: str
    gpu: Gpu
    rxq: CyclicRxq
    txq: EthTxq
    work: GpuMemory
    acceptor: Acceptor

    def __init__(self, host: Gpu, pd: PD, longest: int, number: int, acceptor: Acceptor, undo: ExitStack):
        self.name, self.gpu, self.acceptor = f"TCP handshakes {number}", host, acceptor
        place = min(PLACE_BYTES, longest)
        self.rxq = undo.enter_context(CyclicRxq(host, pd, DEPTH, place, queue_id=CPU_FIRST_ID + number))
        self.txq = undo.enter_context(EthTxq(host, pd, TXQ_DEPTH, checksum=True))
        self.work = undo.enter_context(host.alloc(WORK.size))
        self._attrs = undo.enter_context(host.alloc(BURST * dev.ATTR_BYTES))
        self._answer = undo.enter_context(host.alloc(MOST_ANSWER))

    @property
    def arguments(self) -> tuple[object, ...]:
        """Return the arguments of `accept_tcp` after `stop`."""
        return self.acceptor.address, self.rxq, self.txq, self._attrs, self._answer, self.work


class HttpServer:
    """The HTTP server, which works alongside the receive kernels. `undo` ends and closes it.

    Pass `tables` to receive kernels. Pass `arguments` to `serve_http`, which runs as a block of `threads`.
    """

    name: str = "HTTP server"
    pages: Pages
    tables: Tables
    txq: EthTxq
    threads: int
    accepting: list[AcceptQueue]
    failure: DocaError | None

    def __init__(
        self, gpu: Gpu, pd: PD, address: IPv4Address, queues: int, pages: dict[bytes, Page], undo: ExitStack
    ):
        caps = query_caps(pd.ctx)
        self._address, self.failure = address, None
        self.pages = Pages(gpu, pd, pages, undo)
        width = _LANES_ON_GPU if gpu.target == "cuda" else 1  # host threads are OS threads
        self.tables = Tables(gpu, queues, width, self.pages.device_address, self.pages.lkey, undo)
        self.txq = undo.enter_context(EthTxq(gpu, pd, TXQ_DEPTH, checksum=True))
        self.work: GpuMemory = undo.enter_context(gpu.alloc(WORK.size, MemType.CPU_GPU))
        self.work.write(np.zeros(WORK.size, np.uint8))
        self.threads = self.tables.lanes
        host = gpu if gpu.target == "cpu" else undo.enter_context(Gpu("host"))
        station = Station(int.from_bytes(caps.mac, "big"), int(address), caps.mtu)
        longest = caps.mtu + ETHERNET.size + VLAN_TAG.size
        self._slots = SlotTable()
        self.accepting = [
            AcceptQueue(host, pd, longest, number, Acceptor(self.tables, self._slots, number, station), undo)
            for number in range(queues)
        ]
        self._rules: ConnectionRules | None = None

    @property
    def arguments(self) -> tuple[object, ...]:
        """Return the arguments of `serve_http` after `stop`."""
        return self.tables, self.txq, self.work

    def start(self, pipe: FlowPipe, queues: Sequence[CyclicRxq], undo: ExitStack) -> None:
        """Put rules of connections into `pipe` from now on, which lead to the receive `queues`. `undo` ends that."""
        self._rules = ConnectionRules(self._slots, Rules(pipe, queues, self._address, undo).add)
        undo.callback(self._rules.close)

    def follow_rules(self) -> None:
        """Make the flow rules that connections now need, and remove others. Call this repeatedly."""
        if self._rules is None or self.failure is not None:
            return
        try:
            self._rules.follow()
        except DocaError as error:
            self.failure = error
            _log.error("Connections get no flow rules any more: %s", error)

    def with_handed_over(self, queue: QueueReport) -> QueueReport:
        """Return a report of a TCP queue that also counts the segments of its connections that had no rule."""
        if queue.protocol is not Protocol.TCP:
            return queue
        more = self.accepting[queue.number].acceptor.tcp_counts()
        return replace(queue, counts={name: count + more[name] for name, count in queue.counts.items()})

    def counts(self) -> dict[str, int]:
        """Return the server's counts so far. `open` and `half_open` are connections at this moment."""
        found = Counter(self.tables.counts())
        found["open"] = found["opened"] - found["ended"]
        for queue in self.accepting:
            found.update(queue.acceptor.counts())
        return dict(found)

    def kernels(self, dropped: Callable[[int], int | None]) -> Iterator[KernelReport]:
        """Yield a report of each kernel. `dropped` returns what the NIC dropped for a receive queue, by its RQN."""
        segments, busy_seconds = self.tables.work()
        yield KernelReport(self.name, segments, self.counts()["dropped"], busy_seconds)
        for queue in self.accepting:
            work = WORK.at(queue.work.array)
            yield KernelReport(
                queue.name, int(work["packets"]), dropped(queue.rxq.rqn), int(work["busy_ns"]) / 1e9
            )
