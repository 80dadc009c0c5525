"""gpu_packet_processing: kernels receive, count and answer packets, and the CPU reports, until Ctrl+C.

    1. resources    device, GPU, receive queues of UDP, TCP and ICMP, a send queue for answers
    2. steering     pipes lead each protocol to its queues, spread by RSS
    3. data path    one kernel per queue. It hands its counts to the CPU through a semaphore
    4. end          Ctrl+C sets a word that the kernels check after each burst. A kernel whose queue fails ends alone
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from ipaddress import IPv4Address, ip_address

from .. import __version__
from ..errors import InvalidValueError, TimedOutError
from ..eth import EthTxq, query_caps
from ..formats.packet import IPV4_MAPPED
from ..gpu import Gpu
from ..jit.launch import Kernel
from ..providers.soft import SoftProvider
from ..samples.until_stopped import END_SECONDS, StopWord, on_signals
from ..verbs import PD, Context
from ..verbs import open as open_device
from .accept_tcp import accept_tcp
from .http_host import AcceptQueue, HttpServer
from .http_server import serve_http
from .options import Options
from .pages import BUILT_IN, read_folder
from .playback import Player, playing, port_of
from .queues import TXQ_DEPTH, Protocol, ReceiveQueue
from .reassembly import Reassembly
from .receive_icmp import receive_icmp
from .receive_tcp import receive_tcp
from .receive_udp import receive_udp
from .statistics import REPLAY, RULES, QueueCounts, Report
from .steering import Steering
from .worker import Worker

TURN_SECONDS = 0.05  # of the CPU: between two checks of semaphores and kernels
_COMPILE_SECONDS = 600.0

# Functions to call with a report, and the seconds between two calls of each.
Watchers = Sequence[tuple[float, Callable[[Report], None]]]

_log = logging.getLogger(__name__)


class Application:
    """The queues, rules and kernels of a run. `undo` closes them."""

    ctx: Context
    address: IPv4Address
    gpu: Gpu
    pd: PD
    http: HttpServer | None
    workers: list[Worker]
    queues: tuple[ReceiveQueue, ...]
    counts: list[QueueCounts]
    stop: StopWord
    steering: Steering
    player: Player | None = None

    def __init__(self, options: Options, undo: ExitStack):
        self.options = options
        port = options.nic_port if options.replay is None else port_of(options.replay, options.nic_port)
        self.ctx = undo.enter_context(open_device(options.device, port=port))
        caps = query_caps(self.ctx)  # refuses a port without Ethernet
        self.address = address_of(self.ctx)
        provider = self.ctx.provider
        self._nic = undo.enter_context(provider.nic.observed()) if isinstance(provider, SoftProvider) else None
        self.gpu = undo.enter_context(Gpu(options.gpu))
        self.pd = self.ctx.create_pd()
        numbers = range(options.queues)
        udp, tcp, icmp = (
            [ReceiveQueue(self.gpu, self.pd, protocol, number, undo) for number in which]
            for protocol, which in ((Protocol.UDP, numbers), (Protocol.TCP, numbers), (Protocol.ICMP, (0,)))
        )
        self.http: HttpServer | None = None
        if options.http:
            pages = BUILT_IN if options.pages is None else read_folder(options.pages)
            if not pages:
                _log.warning("%s has no files to serve, so every request gets the status 404", options.pages)
            self.http = HttpServer(self.gpu, self.pd, self.address, options.queues, pages, undo)
        tables = self.http.tables if self.http else 0
        txq = undo.enter_context(EthTxq(self.gpu, self.pd, TXQ_DEPTH))
        self.workers = [
            *(_receiver(self.gpu, queue, receive_udp) for queue in udp),
            *(_receiver(self.gpu, queue, receive_tcp, tables, queue.number) for queue in tcp),
            _receiver(
                self.gpu, icmp[0], receive_icmp, txq, int.from_bytes(caps.mac, "big"), int(self.address),
                Reassembly(self.gpu, self.pd, caps.mtu, undo), txq=txq,
            ),
        ]
        self.queues = (*udp, *tcp, *icmp)
        self.counts = [QueueCounts(queue) for queue in self.queues]
        self.stop = StopWord(self.gpu)
        if self.http:
            self.workers += [_server(self.gpu, self.http), *map(accepter, self.http.accepting)]
        self._warm_up()
        tcp_queues = [queue.rxq for queue in tcp]
        cpu_queues = [each.rxq for each in self.http.accepting] if self.http else []
        self.steering = Steering(
            self.ctx, [queue.rxq for queue in udp], tcp_queues, icmp[0].rxq, cpu_queues, undo
        )
        if self.http and self.steering.connections:
            self.http.start(self.steering.connections, tcp_queues, undo)

    def other_addresses(self) -> list[str]:
        """Return the addresses that the options give to the port, but at which nothing answers."""
        given = self.options.nic_port.addresses if self.options.nic_port else ()
        return [address for address in given if ip_address(address) != self.address]

    def _warm_up(self) -> None:
        """Launch each kernel with nothing to do, because a GPU loads no kernel while others run."""
        stopped = StopWord(self.gpu)
        stopped.set()
        for worker in self.workers:
            worker.launch(stopped)
            if not worker.wait(_COMPILE_SECONDS):
                raise TimedOutError(f"the kernel of {worker.name} did not end within {_COMPILE_SECONDS:g} s")

    def run(self, watchers: Watchers) -> Report:
        """Run until Ctrl+C, SIGTERM, the end of the time or file, or the end of all kernels. Return the counts.

        Each watcher gets a report at its interval, and the last one. An error in the file is in the last one.
        """
        with on_signals(self.stop.set):
            try:
                for worker in self.workers:
                    worker.launch(self.stop)
                with self._source() as self.player:
                    self._follow(watchers)
            finally:
                self.stop.set()
                self._finish()
        report = self.report()
        for _, watch in watchers:
            watch(report)
        return report

    def _source(self) -> AbstractContextManager[Player | None]:
        """Return a context in which the packets of the file arrive, if there is a file."""
        if self.options.replay is None:
            return nullcontext()
        nic, rqns = self.ctx.provider.nic, [queue.rxq.rqn for queue in self.queues]  # type: ignore[attr-defined]
        return playing(nic, rqns, lambda: sum(queue.packets for queue in self.queues), self.stop)

    def _follow(self, watchers: Watchers) -> None:
        self._start = time.monotonic()
        seconds = self.options.seconds
        end = None if seconds is None else self._start + seconds
        due = [self._start + interval for interval, _ in watchers]
        running = list(self.workers)
        while running and not self.stop.is_set and (end is None or time.monotonic() < end):
            time.sleep(TURN_SECONDS)
            running = [worker for worker in running if not self._has_ended(worker)]
            for each in self.counts:
                each.collect()
            if self.http:
                self.http.follow_rules()
            for i, (interval, watch) in enumerate(watchers):
                if time.monotonic() >= due[i]:
                    due[i] += interval
                    watch(self.report())

    def _has_ended(self, worker: Worker) -> bool:
        if not worker.wait(0):
            return False
        if worker.failure is not None:
            _log.error("%s kernel error: %s", worker.title, worker.failure)
        return True

    def _finish(self) -> None:
        """Wait for all kernels, and take their last counts."""
        end = time.monotonic() + END_SECONDS
        for worker in self.workers:
            if not worker.wait(max(0.0, end - time.monotonic())):
                raise TimedOutError(f"the kernel of {worker.name} did not end within {END_SECONDS:g} s")
        for each in self.counts:
            each.finish()

    def report(self) -> Report:
        """Return what was counted so far."""
        failures = {worker.name: str(worker.failure) for worker in self.workers if worker.failure is not None}
        if self.player and (lacks := self.player.failure()):
            failures[REPLAY] = lacks
        queues = tuple(each.report(self._dropped(each.queue.rxq.rqn)) for each in self.counts)
        http, kernels = None, ()
        if self.http:
            http, kernels = self.http.counts(), tuple(self.http.kernels(self._dropped))
            queues = tuple(map(self.http.with_handed_over, queues))
            if self.http.failure is not None:
                failures[RULES] = str(self.http.failure)
        replay = self.player.counts() if self.player else None
        return Report(time.monotonic() - self._start, queues, failures, http, kernels, self.ctx.name, replay)

    def _dropped(self, rqn: int) -> int | None:
        """Return the packets that the NIC has dropped for lack of room, or None for a card, which does not report them.
        """
        if self._nic is None:
            return None
        counts = self._nic.queues["rq", rqn]
        return sum(counts[name] for name in ("no_buffer", "too_long", "not_ready"))


def _receiver(
    gpu: Gpu, queue: ReceiveQueue, kernel: Kernel, *more: object, txq: EthTxq | None = None
) -> Worker:
    """Return the kernel of a queue. `more` are arguments that only this kernel has."""

    def explain() -> object:
        return queue.rxq.last_error() or (txq and txq.last_error())

    arguments = *queue.arguments, *more
    return Worker(str(queue), f"Receive {queue}", gpu, kernel, queue.shape.threads, arguments, queue.work, explain)


def _server(gpu: Gpu, http: HttpServer) -> Worker:
    """Return the kernel that serves HTTP."""
    return Worker(http.name, http.name, gpu, serve_http, http.threads, http.arguments, http.work, http.txq.last_error)


def accepter(queue: AcceptQueue) -> Worker:
    """Return the kernel of host threads that accepts connections."""

    def explain() -> object:
        return queue.rxq.last_error() or queue.txq.last_error()

    return Worker(queue.name, queue.name, queue.gpu, accept_tcp, 1, queue.arguments, queue.work, explain)


def address_of(ctx: Context) -> IPv4Address:
    """Return the first IPv4 address of a device's port."""
    for index in range(ctx.query_device().gid_table_size):
        gid = bytes(ctx.query_gid(1, index))
        if gid.startswith(IPV4_MAPPED):
            return IPv4Address(gid[-4:])
    raise InvalidValueError(f"{ctx} has no IPv4 address, so it cannot answer: give it one with --address")


def run(options: Options, watchers: Watchers = ()) -> Report:
    """Run the application. Return the counts and the failures."""
    _log.info("gpunetio version: %s", __version__)
    _log.info(
        "Options enabled:\n\tGPU %s\n\tNIC %s\n\tGPU Rx queues %d\n\tGPU HTTP server enabled %s",
        options.gpu, options.device, options.queues, "Yes" if options.http else "No",
    )
    with ExitStack() as undo:
        application = Application(options, undo)
        if unanswered := application.other_addresses():
            _log.warning("The application answers only at %s, not at %s", application.address, ", ".join(unanswered))
        _log.info("Address %s. Ctrl+C ends the application", application.address)
        report = application.run(watchers)
        _log.info("GPU work ended")
    if not report.failures:
        _log.info("Application finished successfully")
    return report
