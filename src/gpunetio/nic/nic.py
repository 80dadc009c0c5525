"""The software NIC: an engine, wires and a control path, behind the calls that a driver makes."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Hashable, Iterable, Iterator
from typing import Protocol, TypeVar

import numpy as np

from ..enums import Access, UarAllocationType
from ..errors import BadStateError
from ..fabric.control_message import Body
from ..fabric.control_socket import ControlSocket
from ..fabric.ethernet_records import ARRIVED, BATCH as FRAME_BATCH
from ..fabric.frames import PIPE
from ..fabric.icrc import HEADER_ROOM
from ..fabric.inprocess import InProcessWire
from ..fabric.lan import ON_LAN, LanSearch
from ..fabric.link import Link
from ..fabric.pcap import Pcap, capture_file
from ..fabric.udp import check_own
from ..formats.events import EventType, PortSubtype
from ..interrupts import deferred
from ..jit.launch import observers
from ..memory import HostMemory, round_up
from .control.command import Call, Command
from .control.components import Components
from .control.control_path import ControlPath
from .control.event_channels import MAX_CHANNELS
from .control.links.links import MAX_WIRES, Links
from .control.links.paths import Destination
from .control.objects import EventSources
from .control.queues.qp import MAX_QP
from .control.queues.sq import MAX_SQ
from .control.regions import mkey, umem
from .control.regions.device_memory import DeviceMemory
from .control.regions.grants import Grants
from .control.regions.reach import Reach
from .control.vport import longest_frame
from .engine.hardware import Engine, Hardware
from .engine.port import IPAddress, Port, PortConfig
from .gpu.slice_backends import slice_backend_of
from .host.engine import ThreadEngine, default_workers, few_cores
from .observe.publish import TABLES, Publication, copies
from .observe.receivers import why_not_ready
from .observe.reports import Report, ReportService
from .observe.rules import rules_of
from .observe.running import Observed
from .observe.starved import Starved
from .queues.channels import EventChannel
from .state.counters import COUNTERS, Counters
from .state.flow import PACKET
from .state.message import MESSAGE
from .state.nic import NIC
from .state.reasons import EXPLAIN
from .state.record import LINE
from .state.tables import MkeyTable, Table
from .state.work_queue import WORK_QUEUE
from .state.worker import WORKER
from .turn.commands import EngineCommand
from .wires.wire import Wire

MIN_ACK_TIMEOUT_NS = 1_000_000  # an engine is a thread, which may be off its core for that long
# File descriptors of an open NIC with one address and one worker, and of each further worker.
_DESCRIPTORS, _WORKER_DESCRIPTORS = 33, 2  # tables twice, events, the control socket; a notifier
_RULES_PATIENCE = 0.05  # seconds that a request for rules waits for commands, and the requests behind it
BUDGET = 256  # WQEs of one QP before the next QP's turn
_SLEEP_MS_ON_GPU = 10
_NAP_NS, _PATIENT_SPIN_NS = 10_000, 1_000_000_000  # for programs that poll
SYNDROMES = 256
MAX_WORK_QUEUES = MAX_QP + MAX_SQ
_WORKER_BYTES = (
    WORKER.size + COUNTERS.size + WORK_QUEUE.size * MAX_WORK_QUEUES + 8 * (MAX_QP + MAX_WIRES + MAX_CHANNELS)
    + MESSAGE.size + round_up(HEADER_ROOM, LINE) + (PACKET.size + ARRIVED.size) * FRAME_BATCH
)


def workers_of(config: PortConfig) -> int:
    """Return how many workers a NIC with this port has."""
    return config.workers or default_workers()


def descriptors_of(config: PortConfig) -> int:
    """Return how many file descriptors an open NIC with this port, which has one address, takes."""
    return _DESCRIPTORS + _WORKER_DESCRIPTORS * (workers_of(config) - 1)


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)

class SoftNic:
    """One software NIC. `nic.qps[qpn]`, `.cqs`, `.srqs`, `.mkeys`, `.pds`, `.umems`, `.uar_pages`, `.eqs`, `.gids`,
    `.tiss`, `.sqs`, `.rqs`, `.rqts`, `.tirs` and `.counters` are its tables. `nic.control` has the objects in them.
    `nic.reports` says in words what it has refused.

    `spin_us` is how long an idle engine spins before it sleeps: longer than a Python program takes from one command or
    batch to the next. `sleep_ms` is how long it sleeps at most.
    """

    name: str
    port: Port
    pid: int
    qps: Table
    cqs: Table
    mkeys: MkeyTable
    pds: Table
    srqs: Table
    umems: Table
    uar_pages: Table
    eqs: Table
    gids: Table
    tiss: Table
    sqs: Table
    rqs: Table
    rqts: Table
    tirs: Table
    control: ControlPath
    links: Links
    grants: Grants
    device_memory: DeviceMemory
    grants_memory: bool
    control_address: int
    record: np.void
    engine: Engine
    control_socket: ControlSocket
    records: np.ndarray
    components: Components
    counters: Counters
    starved: Starved

    def __init__(self, name: str, port: Port, spin_us: int = 1000, sleep_ms: int = 1, budget: int = BUDGET):
        self.name, self.port = name, port
        self.pid = os.getpid()
        self._started = False  # the engine
        self._undo, self._outside = contextlib.ExitStack(), contextlib.ExitStack()
        try:
            self._open(self._undo, self._outside, spin_us, sleep_ms, budget)
        except BaseException:
            self._close()
            raise
        atexit.register(self.close)

    def __repr__(self) -> str:
        return f"<software NIC {self.name}, {', '.join(map(str, self.port.addresses))}>"

    def _open(
        self, undo: contextlib.ExitStack, outside: contextlib.ExitStack, spin_us: int, sleep_ms: int, budget: int
    ) -> None:
        """Create all parts. `outside` closes those that use the engine, `undo` those that the engine uses."""
        name, port = self.name, self.port
        kind, workers = port.config.wire_kind, workers_of(port.config)
        if kind.routed and not kind.neighbours:  # the sockets open with the first wire, perhaps much later
            for address in port.addresses:
                check_own(address)

        def kept(part: C) -> C:
            undo.callback(part.close)
            return part

        self._lock = threading.RLock()
        # Faults and captures need the bytes of every packet.
        self.grants_memory = not port.config.faults and not port.config.capture
        self._control = kept(HostMemory(workers * _WORKER_BYTES + SYNDROMES + LINE, shared=True))
        self.control_address = self._control.address
        self.records = self._control.view(WORKER.dtype, 0, workers)
        self.record = self.records[0]
        self._lay_out(spin_us, sleep_ms, budget)
        self.mkeys, self.umems = kept(mkey.new_table()), kept(umem.new_table())
        backend = kept(slice_backend_of(port.config)) if port.config.on_gpu else None
        self.engine = ThreadEngine(name, self.records, self.control_address, (self.mkeys, self.umems), backend)
        self._started = True
        hardware = Hardware(name, port, self.record, self.control_address, self.engine)
        self.components = Components(self.engine, self.records)
        self.reach = Reach(hardware, self.components, self.grants_memory)
        self.grants = kept(Grants(hardware, self.grants_memory, self.reach))
        self.device_memory = kept(DeviceMemory(hardware, self.components.gather))
        self.control = ControlPath(
            hardware, self.components, (self.mkeys, self.umems), self.grants, self.device_memory, self._connect,
            self._link_to_lan, undo,
        )
        self.links = self.control.links
        self.reach.qps, self.reach.mkeys = self.control.qps.table, self.mkeys
        self.qps, self.cqs, self.srqs = (of.table for of in (self.control.qps, self.control.cqs, self.control.pools))
        self.tiss, self.sqs, self.rqs, self.rqts, self.tirs = (
            of.table for of in
            (self.control.tiss, self.control.sqs, self.control.rqs, self.control.rqts, self.control.tirs)
        )
        self.pds, self.uar_pages = self.control.pds.table, self.control.uars.table
        self.eqs, self.gids = self.control.eqs.table, self.control.gids.table
        if port.config.capture:
            file = capture_file(port.config.capture, name)
            named = str(file) == str(port.config.capture)  # by the user, who will look for it
            pcap = kept(Pcap(file, port.infiniband, keeps_empty=named))
            self.record["capture"] = pcap.address
            pcap.start(name, port.gids, self.control.routes.mac_in_capture)
        self.starved = Starved(name, self.qps, self.counters)
        self._service = kept(
            ReportService(
                name, lambda key: key in self.mkeys, self.device_memory.explain, self._look,
                lambda qpn: why_not_ready(self.qps, qpn),
            )
        )
        self.record["errors"], self.record["service_fd"] = self._service.ring, self._service.event
        for i in range(1, workers):
            self._control.array[i * WORKER.size :][: NIC.size] = self._control.array[: NIC.size]
        self.engine.start()
        if kind.ethernet:  # others look for the port's addresses from now on
            self.links.wire_to_others()
        self._publication = Publication(
            {table: getattr(self, table) for table in TABLES},
            (self._control, workers * WORKER.size, workers),
            self.links.memory,
        )
        outside.callback(self._leave_peers)
        outside.callback(self._publication.close)
        on_link = self._take_link if kind.neighbours else None
        on_message = self._hear if self.grants_memory else None
        self.control_socket = ControlSocket(
            port.control_addresses, name, self._published, on_link, self._lose_link, medium=port.link_layer.name,
            on_message=on_message, prepare=self._prepare_link, rules=self._rules,
        )
        self._lan_search = LanSearch(self.control_socket)
        outside.callback(self._lan_search.close)
        outside.callback(self.control_socket.close)
        observers.append(self.engine.count_kernels)
        outside.callback(observers.remove, self.engine.count_kernels)

    def _lay_out(self, spin_us: int, sleep_ms: int, budget: int) -> None:
        """Give every part of the control memory its place, and tell the workers."""
        workers = len(self.records)
        place = self.control_address + workers * WORKER.size

        def take(nbytes: int) -> int:
            nonlocal place
            place += round_up(nbytes, LINE)
            return place - round_up(nbytes, LINE)

        counters = take(workers * COUNTERS.size)
        self.counters = Counters(self._control.view(COUNTERS.dtype, counters - self.control_address, workers))
        self.record["syndromes"], self.record["lives"] = take(SYNDROMES), take(LINE)
        for i, r in enumerate(self.records):
            r["counters"], r["pause_at"], r["arrived_at"] = counters + i * COUNTERS.size, -1, -1
            r["active"], r["pending"] = take(WORK_QUEUE.size * MAX_WORK_QUEUES), take(8 * MAX_QP)
            r["wires"], r["ringing"] = take(8 * MAX_WIRES), take(8 * MAX_CHANNELS)
            r["message"], r["scratch"] = take(MESSAGE.size), take(HEADER_ROOM)
            r["packets"] = r["packet"] = take(PACKET.size * FRAME_BATCH)
            r["arrived"] = take(ARRIVED.size * FRAME_BATCH)
        r = self.record
        r["lid"], r["min_timeout"] = self.port.lid, MIN_ACK_TIMEOUT_NS
        r["mac"] = int.from_bytes(self.port.mac, "little")
        r["longest_frame"] = longest_frame(self.port)
        config = self.port.config
        r["wait_on_time"] = config.send_scheduling and not self.port.no_ethernet and not config.on_cuda
        self._set_clock()
        # A look costs a slice there. Launches of this process wake the NIC (`Engine.busy`), so looks are for others.
        sleep_ms = max(sleep_ms, _SLEEP_MS_ON_GPU) if config.on_cuda else sleep_ms
        r["spin_ns"], r["sleep_ms"], r["budget"] = spin_us * 1000, sleep_ms, budget
        syndromes = self._control.view(np.uint8, int(r["syndromes"]) - self.control_address, SYNDROMES)
        for reason, text in EXPLAIN.items():
            syndromes[reason] = text.requester

    def _set_clock(self) -> None:
        """Tell the engine what the time of day is by its clock. The former may be slewed or set at any time.

        A thread that is interrupted between both readings finds too small an offset: WAITs would end late, never early.
        """
        self.record["utc_offset"] = max(time.time_ns() - time.monotonic_ns() for _ in range(5))

    def _look(self) -> None:
        """Do what the report thread does once a second."""
        self.starved.check()
        self._set_clock()

    # --- identity --------------------------------------------------------------------------------------------------

    @property
    def mac(self) -> bytes:
        """Return the port's MAC."""
        return self.port.mac

    def has_gid(self, gid: bytes) -> bool:
        """Return whether `gid` is one of this NIC's."""
        return self.control.gids.has(gid)

    def is_at(self, gid: bytes, lid: int) -> bool:
        """Return whether this NIC has a GID or, on InfiniBand, a LID."""
        return self.control.routes.is_here(gid, lid)

    def open_path(self, gid: bytes, lid: int, source: int) -> Destination:
        """Lay the path of an address handle (`Paths.open`)."""
        with self._guard():
            return self.control.paths.open(gid, lid, source)

    def release_path(self, destination: Destination) -> None:
        """Note that an address handle is gone."""
        with self._guard():
            self.control.paths.release(destination)

    # --- wires -----------------------------------------------------------------------------------------------------

    def join(self, other: SoftNic) -> None:
        """Lay an in-process wire to another NIC of this process. No wire leads from Ethernet to InfiniBand."""
        if self.port.link_layer is not other.port.link_layer:
            return
        gids = self.port.gids[0], other.port.gids[0]
        wire = InProcessWire((self.engine.kick_fd, other.engine.kick_fd))
        with self._guard(), other._guard():
            self.links.add_pipes(wire.ends[0], other, gids, wire.drop, on_lan=True)
            other.links.add_pipes(wire.ends[1], self, (gids[1], gids[0]), wire.drop, on_lan=True)

    def wire_to_others(self) -> Wire:
        """Return the wire to all peers that have none of their own."""
        with self._guard():
            return self.links.wire_to_others()

    def _connect(self, address: IPAddress, source: IPAddress) -> Link | None:
        return self.control_socket.connect(address, source=source)

    @property
    def _on_lan(self) -> bool:
        return self.links.lan is not None and self.links.lan.joined

    def _published(self) -> tuple[Body, list[int]]:
        """Return what a process gets that looks at this NIC."""
        description, fds = self._publication()
        return {**description, ON_LAN: self._on_lan}, fds

    def _rules(self) -> tuple[Body, list[int]] | None:
        """Return copies of the flow rules for a process that asks; None while a command takes long.

        The engine has no part in this.
        """
        if not self._lock.acquire(timeout=_RULES_PATIENCE):
            return None
        try:
            tables = rules_of(self.control)
        finally:
            self._lock.release()
        description, fds = copies(tables)
        return {**description, "no_ethernet": self.port.no_ethernet}, fds

    def _link_to_lan(self) -> list[Link]:
        return self._lan_search.link()

    def _prepare_link(self, link: Link) -> None:
        """Take frames over a new link from its first moment on, although its wire is not there yet."""
        if self._on_lan and self.links.is_of_lan(link):
            ctypes.c_int64.from_address(link.rx + PIPE.takes_frames).value = 1

    def lose(self, peer: Hashable) -> None:
        """Mark the wire to a peer that is gone as dead."""
        with self._guard():
            self.links.lose(peer)

    def _take_link(self, link: Link) -> None:
        with contextlib.suppress(BadStateError), self._guard():  # the NIC may be closing
            self.links.add_link(link)

    def _lose_link(self, link: Link) -> None:
        with contextlib.suppress(BadStateError):
            self.lose(link)

    def _hear(self, link: Link, message: Body, fds: list[int]) -> None:
        try:
            with contextlib.suppress(BadStateError), self._guard():
                self.grants.handle_message(link, message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    # --- objects: the calls of a driver ----------------------------------------------------------------------------

    def execute(self, mailbox: bytes, out_size: int, command: Command | None = None) -> tuple[bytes, str]:
        """Execute a command (`CommandInterpreter.execute`)."""
        command = command or self.control.interpreter.find(mailbox)
        if command:
            command.before()
        with self._guard():
            answer = self.control.interpreter.execute(mailbox, out_size, command)
            if command and command.call in (Call.MODIFY, Call.DESTROY) and self.reach.peers:
                if qpn := command.named(mailbox).get("qpn"):
                    self.reach.update_queue(qpn)
            return answer

    def alloc_pd(self) -> int:
        """Allocate a PD and return its number."""
        with self._guard():
            return self.control.pds.alloc()

    def dealloc_pd(self, pdn: int) -> None:
        """Free a PD. InUseError while a QP or a region belongs to it."""
        with self._guard():
            self.control.pds.dealloc(pdn)

    def reg_mr(self, pdn: int, address: int, nbytes: int, iova: int, access: Access, cuda: bool) -> int:
        """Register memory. Return its key, which is both lkey and rkey."""
        with self._guard():
            return self.control.mkeys.register(pdn, address, nbytes, iova, access, cuda)

    def rereg_mr(
        self, key: int, pdn: int | None, place: tuple[int, int, bool] | None, access: Access | None
    ) -> None:
        """Change a region between two WQEs, and keep its key (`MemoryKeys.reregister`)."""
        with self._guard():
            self.control.mkeys.reregister(key, pdn, place, access)

    def dereg_mr(self, key: int) -> None:
        """Deregister a region. After this returns, the NIC touches no byte of it."""
        with self._guard():
            self.control.mkeys.deregister(key)

    def reg_umem(self, address: int, nbytes: int, access: Access) -> int:
        """Register a UMEM and return its id."""
        with self._guard():
            return self.control.umems.register(address, nbytes, access)

    def dereg_umem(self, umem_id: int) -> None:
        """Deregister a UMEM. InUseError while a queue lies in it."""
        with self._guard():
            self.control.umems.deregister(umem_id)

    def alloc_uar(self, kind: UarAllocationType) -> tuple[int, int]:
        """Allocate a UAR page. Return its id and its address."""
        with self._guard():
            return self.control.uars.alloc(kind)

    def free_uar(self, page_id: int) -> None:
        """Free a UAR page. InUseError while a queue uses it. The page stays mapped: a late doorbell does no harm."""
        with self._guard():
            self.control.uars.free(page_id)

    def doorbell_line(self, number: int) -> int:
        """Return the address of the own doorbell register of a QP or SQ, a cache line."""
        queues = self.control.sqs if number in self.sqs else self.control.qps
        return queues.doorbell_line(number)

    def wake_at(self, cqn: int, word: int) -> None:
        """Wake the thread that naps at a word (device/waiting.py) for CQEs of a CQ. 0: the engine uses no word more."""
        with self._guard():
            self.cqs[cqn]["wakeup"] = word
            if not word:
                self.engine.synchronize()  # it may be waking the thread

    # --- events ----------------------------------------------------------------------------------------------------

    def create_event_channel(self) -> EventChannel:
        """Create a channel, which is not subscribed to anything yet."""
        with self._guard():
            return self.control.channels.create()

    def destroy_event_channel(self, channel: EventChannel) -> None:
        """Destroy a channel. It gets no more events, and the events in it are lost."""
        with self._guard():
            self.control.channels.destroy(channel)

    def subscribe(
        self, channel: EventChannel, queue: tuple[EventSources, int] | None, types: Iterable[EventType], cookie: int
    ) -> None:
        """Subscribe a channel to these events of a QP, CQ or SRQ; with None, to those of the port and the device."""
        with self._guard():
            if queue is None:
                self.control.channels.subscribe(channel, cookie)
            else:
                queues, number = queue
                queues.subscribe(number, channel, types, cookie)

    def set_link(self, up: bool) -> None:
        """Plug the cable in, or pull it: then no packet comes or goes over any wire. This raises a port event."""
        with self._guard():
            if up == self.control.hca.link_up:
                return
            down = np.array([not up], np.int64)
            self.engine.post(EngineCommand.WRITE_ROW, self.control_address + WORKER.link_down, down)
            subtype = PortSubtype.ACTIVE if up else PortSubtype.DOWN
            self.control.channels.broadcast(EventType.PORT_CHANGE, 1 << 8 | subtype)

    def fail(self) -> None:
        """Fail like a card whose firmware has crashed: nothing is executed any more, objects can only be destroyed.

        This raises a device event. The failure lasts until the NIC is closed.
        """
        with self._guard():
            self.pause()
            self.control.interpreter.failed = True
            self.control.channels.broadcast(EventType.INTERNAL_ERROR)

    # --- for tests and inspection ----------------------------------------------------------------------------------

    @property
    def reports(self) -> list[Report]:
        """Return what the NIC has refused lately, oldest first."""
        self._service.drain()
        return list(self._service.reports)

    def injected(self) -> dict[str, int]:
        """Return how many frames the NIC has lost, duplicated, reordered, corrupted and passed on, by its `faults`."""
        with self._guard():
            return self.links.injected()

    def observed(self) -> Observed:
        """Return the NIC as other processes observe it. Close the result."""
        description, fds = self._published()
        addresses = [*map(str, self.port.addresses)]
        return Observed(self.pid, {**description, "name": self.name, "addresses": addresses}, fds)

    def pause(self, after: int = 0) -> None:
        """Stop executing WQEs after `after` more of them. Commands are still served.

        With `after` 0, the NIC has stopped when this returns.
        """
        with self._guard():
            if after == 0:
                for i, worker in enumerate(self.engine.workers):
                    self.engine.post(EngineCommand.WRITE_ROW, worker + WORKER.paused, np.ones(1, np.int64), worker=i)
            else:
                self.components.gather()  # so that one worker counts them
                self.engine.write_back()
                pause_at = np.array([int(self.counters.rows[0]["sq_wqes"]) + after], np.int64)
                # Between two turns: the one at hand may already have looked.
                self.engine.post(EngineCommand.WRITE_ROW, self.engine.workers[0] + WORKER.pause_at, pause_at)

    def resume(self) -> None:
        """Undo `pause`. TimedOutError if an engine takes no command in time."""
        with self._guard():
            for i, worker in enumerate(self.engine.workers):  # between two turns, as in `pause`
                self.engine.post(EngineCommand.WRITE_ROW, worker + WORKER.pause_at, -np.ones(1, np.int64), worker=i)
                self.engine.post(EngineCommand.WRITE_ROW, worker + WORKER.paused, np.zeros(1, np.int64), worker=i)
            self.engine.kick()

    def expect_polling(self) -> None:
        """Serve threads that poll for long, and give up their core to nobody, as C programs do.

        An engine that yields to such a thread gets the core back some milliseconds later. One that naps gets it when it
        wakes. With cores for all, spinning is faster.
        """
        self.records["spin_ns"] = _PATIENT_SPIN_NS
        self.records["nap_ns"] = self.records["trust"] = _NAP_NS if few_cores() else 0
        self.engine.synchronize()  # from its next turn on, others may make turns

    def to_help(self) -> int:
        """Return the address of the worker for which threads that poll may make turns (host/loop.py), or 0.

        There is none where cores are many, where several workers share the queues, and where a GPU makes the turns.
        """
        polled = self.records["nap_ns"][0] and len(self.records) == 1 and not self.records["slices"][0]
        return self.engine.workers[0] if polled and not self.records["twin"][0] else 0

    # --- life cycle ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the engine. Afterwards nothing touches any memory. Idempotent.

        TimedOutError if the engine does not stop. Then nothing that it uses is freed, and the next call tries again.
        """
        if self.pid == os.getpid():
            with deferred():
                self._close()
            atexit.unregister(self.close)

    def _close(self) -> None:
        try:
            self._outside.close()
        finally:
            if self._started:
                with self._lock:
                    self.records["pause_at"], self.records["paused"] = -1, 0
                    self.engine.stop()
                self._started = False
            self._undo.close()

    def _leave_peers(self) -> None:
        for peer in self.links.peers():
            with contextlib.suppress(BadStateError):  # it is closing, too
                peer.lose(self)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Keep others from changing the NIC. BadStateError if it is closed, or of another process."""
        if self.pid != os.getpid():  # where the lock's owner may not exist
            raise BadStateError(
                f"{self.name} was opened in process {self.pid}: open it again here, or use spawn, not fork"
            )
        with self._lock:
            if not self.engine.running:  # from now on it is: `_close` stops it with the lock
                raise BadStateError(f"{self.name} is closed")
            yield
