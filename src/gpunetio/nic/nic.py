"""The software NIC: tables, engine and command interpreter, behind the calls that a driver makes."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ..jit.launch import observers
from ..enums import Access, UarAllocationType
from ..errors import (
    BadStateError, InUseError, InvalidValueError, NoMemoryError, NotSupportedError,
)  # fmt: skip
from ..fabric.icrc import HEADER_ROOM
from ..fabric.inprocess import InProcessWire
from ..fabric.link import Link
from ..fabric.neighbours import Door
from ..fabric.pcap import Pcap
from ..fabric.udp import check_own
from ..formats import contexts
from ..formats.commands import PORT_TYPE_ETH, PORT_TYPE_IB, ROCE_VERSION_2, AtomicOperation, CapClass
from ..formats.doorbell import REGISTER_BYTES, UAR_PAGE
from ..formats.events import EventType, PortSubtype
from ..interrupts import deferred
from ..memory import HostMemory, is_accessible
from . import step
from .queues.channels import EventChannel
from .control.commands import CommandInterpreter
from .engine import Engine
from .dma.far_memory import FarMemory
from .control.links import MAX_WIRES, Links
from .dma.loans import Loans
from .state.message import MESSAGE
from .dma.movers import MOVER_SHIFT
from .control.port import WIRES, Port, address_of, mac_of
from .observe.publish import TABLES, Publication
from .observe.reasons import EXPLAIN
from .observe.reports import Report, ReportService
from .observe.starved import Starved
from .state.tables import (
    COUNTERS, CQ_ROW, EQ_ROW, EVENT, FLIGHT, GID_ROW, MAX_RD_ATOMIC, MKEY_ROW, NIC, PD_ROW, QP_ROW, RESOURCE, SRQ_ROW,
    UAR_ROW, UMEM_ROW, WATCH, MkeyTable, Table,
)  # fmt: skip

MAX_QP, MAX_CQ, MAX_MR, MAX_PD, MAX_UMEM, MAX_UAR, MAX_GID = 16384, 4096, 65536, 1024, 32768, 512, 16
MAX_SRQ = 1024
MAX_CHANNELS = 1024
COMP_VECTORS = 8  # event queues, numbered from 1; they only count, because nothing interrupts a CPU
MAX_LOG_QUEUE, MAX_LOG_CQ, LOG_MAX_MSG = 15, 22, 30
UDP_SPORTS = 0xC000, 0xFFFF  # IBTA annex A17.4.3
CLOCK_KHZ = 1_000_000  # of timestamps: the engine's clock counts nanoseconds
_LOG_ADDRESSES = 47  # the largest region: all that a process can address
_ATOMIC_BYTES = 8
_GID_TABLE_CODE = (MAX_GID // 8).bit_length() - 1  # as the capability encodes it: 8 << code entries
MIN_ACK_TIMEOUT_NS = 1_000_000  # an engine is a thread, which may be off its core for that long
DESCRIPTORS = 29  # file descriptors of an open NIC with one address: tables twice, events, the door
BUDGET = 256  # WQEs of one QP before the next QP's turn

class SoftNic:
    """One software NIC. `nic.qps[qpn]`, `.cqs`, `.srqs`, `.mkeys`, `.pds`, `.umems`, `.uar_pages`, `.eqs`, `.gids` and
    `.counters` are its tables. `nic.reports` says in words what it has refused.

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
    capabilities: dict[int, bytes]
    links: Links
    loans: Loans
    far_memory: FarMemory
    lends: bool
    control_address: int
    record: Any
    engine: Engine
    interpreter: CommandInterpreter
    door: Door
    counters: Any
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
        kind = WIRES[port.config.wire]
        if kind.routed and not kind.neighbours:  # the sockets open with the first wire, perhaps much later
            for address in port.addresses:
                check_own(address)
        self._queue_memory: dict[int, HostMemory] = {}
        self._shared_memory: dict[int, HostMemory] = {}
        for memories in (self._queue_memory, self._shared_memory):
            undo.callback(lambda memories=memories: [memory.close() for memory in memories.values()])

        def kept(part: Any) -> Any:
            undo.callback(part.close)
            return part

        self.qps, self.cqs = kept(Table("QP", QP_ROW, MAX_QP)), kept(Table("CQ", CQ_ROW, MAX_CQ))
        self.mkeys, self.pds = kept(MkeyTable("key", MKEY_ROW, MAX_MR)), kept(Table("PD", PD_ROW, MAX_PD))
        self.srqs = kept(Table("SRQ", SRQ_ROW, MAX_SRQ))
        self.channels: set[EventChannel] = set()
        self._unaffiliated: dict[EventChannel, int] = {}  # channel → cookie of its port and device events
        undo.callback(lambda: [channel.close() for channel in self.channels])
        self.umems, self.uar_pages = kept(Table("UMEM", UMEM_ROW, MAX_UMEM)), kept(Table("UAR page", UAR_ROW, MAX_UAR))
        self.eqs, self.gids = kept(Table("EQ", EQ_ROW, 2 * COMP_VECTORS)), kept(Table("GID", GID_ROW, MAX_GID))
        self._uar_memory, self._lines = kept(HostMemory(MAX_UAR * UAR_PAGE)), kept(HostMemory(MAX_QP * REGISTER_BYTES))
        self.eqs.rows["eqn"][1 : COMP_VECTORS + 1] = range(1, COMP_VECTORS + 1)
        self._fill_gids()
        self.capabilities = self._capabilities()
        self.links = Links(self)
        self.loans, self.far_memory = kept(Loans(self)), kept(FarMemory(self))
        undo.callback(self.links.close)
        # Faults and captures need the bytes of every packet.
        self.lends = not port.config.faults and not port.config.capture
        self._lock = threading.RLock()
        self._pcap = Pcap(port.config.capture, port.infiniband) if port.config.capture else None
        if self._pcap:
            undo.callback(self._pcap.close)
        self._service = kept(
            ReportService(name, lambda key: key in self.mkeys, self.far_memory.explain, self._look)
        )
        self._control = HostMemory(
            NIC.size + COUNTERS.size + 256 + (WATCH.size + 8) * MAX_QP
            + 8 * (MAX_UAR + MAX_WIRES + MAX_CQ + MAX_CHANNELS) + MESSAGE.size + 64 + HEADER_ROOM,
            shared=True,
        )
        undo.callback(self._control.close)
        self.control_address = self._control.address
        self.record = self._control.view(NIC.dtype)[0]
        self._lay_out(spin_us, sleep_ms, budget)
        self.starved = Starved(name, self.qps, self.counters)
        if self._pcap:
            self.record["capture"] = self._pcap.address
            self._pcap.start(name, port.gids, self._mac_for_capture, self._path_of)
        self.engine = Engine(name, self.record, self._control.address, (self.mkeys, self.umems))
        self._started = True
        self.engine.start()
        self.interpreter = CommandInterpreter(self)
        self._publication = Publication(
            {table: getattr(self, table) for table in TABLES},
            (self._control, int(self.record["counters"]) - self._control.address),
            self.links.memory,
        )
        outside.callback(self._leave_peers)
        outside.callback(self._publication.close)
        on_link = self._take_link if kind.neighbours else None
        on_letter = self._hear if self.lends else None
        self.door = Door(
            port.door_addresses, name, self._publication, on_link, self._lose_link, medium=port.link_layer.name,
            on_letter=on_letter,
        )  # fmt: skip
        outside.callback(self.door.close)
        observers.append(self.engine.busy)
        outside.callback(observers.remove, self.engine.busy)

    def _look(self) -> None:
        """Look for starved QPs. The service thread does this when there is nothing to report."""
        if self._started:
            self.starved.look()

    def _lay_out(self, spin_us: int, sleep_ms: int, budget: int) -> None:
        """Give every part of the control memory its place, and tell the engine."""
        place = self._control.address + NIC.size

        def take(nbytes: int) -> int:
            nonlocal place
            place += nbytes
            return place - nbytes

        r = self.record
        r["qps"], r["qp_mask"] = self.qps.address, self.qps.mask
        r["mkeys"], r["mkey_mask"] = self.mkeys.address, self.mkeys.mask
        r["cqs"], r["cq_mask"] = self.cqs.address, self.cqs.mask
        r["armable"], r["ringing"] = take(8 * MAX_CQ), take(8 * MAX_CHANNELS)
        r["eqs"], r["errors"], r["service_fd"] = self.eqs.address, self._service.ring, self._service.event
        r["counters"], r["syndromes"] = take(COUNTERS.size), take(256)
        r["active"], r["uars"], r["wires"] = take(WATCH.size * MAX_QP), take(8 * MAX_UAR), take(8 * MAX_WIRES)
        r["due"], r["message"], r["scratch"] = take(8 * MAX_QP), take(MESSAGE.size), take(HEADER_ROOM)
        r["gids"], r["lid"], r["min_timeout"] = self.gids.address, self.port.lid, MIN_ACK_TIMEOUT_NS
        r["spin_ns"], r["sleep_ms"], r["budget"], r["pause_at"] = spin_us * 1000, sleep_ms, budget, -1
        base = self._control.address
        self.counters = self._control.view(COUNTERS.dtype, int(r["counters"]) - base)[0]
        syndromes = self._control.view(np.uint8, int(r["syndromes"]) - base, 256)
        for reason, text in EXPLAIN.items():
            syndromes[reason] = text.requester
        self._armable = self._control.view(np.int64, int(r["armable"]) - base, MAX_CQ)
        self._uar_list = self._control.view(np.int64, int(r["uars"]) - base, MAX_UAR)

    # --- identity --------------------------------------------------------------------------------------------------

    @property
    def mac(self) -> bytes:
        """Return the port's MAC."""
        return self.port.mac

    @property
    def guid(self) -> int:
        """Return the node GUID, an EUI-64 of the MAC. Port GUID and system image GUID are the same."""
        return int.from_bytes(self.mac[:3] + b"\xff\xfe" + self.mac[3:], "big")

    @property
    def udp_sports(self) -> tuple[int, int]:
        """Return the lowest and the highest UDP source port that can be set for a QP."""
        return UDP_SPORTS

    def _fill_gids(self) -> None:
        for index, gid in enumerate(self.port.gids):
            row = self.gids.rows[index]
            row["index"], row["gid"] = index, np.void(gid)
            row["version"] = 0 if self.port.infiniband else ROCE_VERSION_2
            row["mac"] = np.void(self.mac + b"\0\0")

    def gid(self, index: int) -> bytes:
        """Return entry `index` of the GID table; zeros if it is empty."""
        if not 0 <= index < MAX_GID:
            raise InvalidValueError(f"GID index {index} is outside the table of {MAX_GID}")
        return bytes(self.gids.rows[index]["gid"])

    def has_gid(self, gid: bytes) -> bool:
        """Return whether `gid` is one of this NIC's."""
        return any(gid) and any(bytes(row["gid"]) == gid for row in self.gids.rows)

    def _capabilities(self) -> dict[int, bytes]:
        general = contexts.CMD_HCA_CAP.pack(
            port_type=PORT_TYPE_IB if self.port.infiniband else PORT_TYPE_ETH,
            num_ports=1, roce=not self.port.infiniband, cqe_version=1, hca_cap_2=1,
            gid_table_size=_GID_TABLE_CODE, rc=1, uc=1, rts2rts_qp_dscp=1, max_wqe_sz_sq=1024, max_wqe_sz_rq=512,
            rts2rts_qp_udp_sport=not self.port.infiniband, log_max_msg=LOG_MAX_MSG, cd=1,
            log_max_qp=_log(MAX_QP), log_max_qp_sz=MAX_LOG_QUEUE, log_max_srq=_log(MAX_SRQ),
            log_max_srq_sz=MAX_LOG_QUEUE, log_max_rmp=_log(MAX_SRQ), basic_cyclic_rcv_wqe=1, log_max_cq=_log(MAX_CQ),
            log_max_cq_sz=MAX_LOG_CQ, cq_oi=1, cq_resize=1, sctr_data_cqe=1,
            log_max_pd=_log(MAX_PD), log_max_mkey=_log(MAX_MR), log_max_mrw_sz=_LOG_ADDRESSES,
            log_max_eq=_log(COMP_VECTORS), max_num_eqs=COMP_VECTORS,
            atomic=1, log_max_atomic_size_qp=_log(_ATOMIC_BYTES),
            log_max_ra_req_qp=_log(MAX_RD_ATOMIC), log_max_ra_res_qp=_log(MAX_RD_ATOMIC),
            device_frequency_khz=CLOCK_KHZ, device_frequency_mhz=CLOCK_KHZ // 1000,
        )  # fmt: skip
        # Masked atomics have no packets. They work between QPs of one NIC, and are not advertised. Results are in host
        # order.
        atomic = contexts.ATOMIC_CAPS.pack(
            atomic_operations=AtomicOperation.COMPARE_SWAP | AtomicOperation.FETCH_ADD, atomic_size_qp=_ATOMIC_BYTES,
            atomic_req_8B_endianness_mode=1, supported_atomic_req_8B_endianness_mode_1=1,
        )  # fmt: skip
        roce = contexts.ROCE_CAP.pack(
            roce_version=1 << ROCE_VERSION_2, r_roce_min_src_udp_port=UDP_SPORTS[0],
            r_roce_max_src_udp_port=UDP_SPORTS[1],
            roce_address_table_size=MAX_GID, r_roce_dest_udp_port=4791,
        )  # fmt: skip
        general_2 = contexts.CMD_HCA_CAP_2.pack(send_dbr_mode_no_dbr_ext=1)
        size = 4096
        return {
            kind: bytes(capability).ljust(size, b"\0")
            for kind, capability in (
                (CapClass.GENERAL, general), (CapClass.ATOMIC, atomic), (CapClass.ROCE, roce),
                (CapClass.GENERAL_2, general_2),
            )
        }  # fmt: skip

    # --- wires -----------------------------------------------------------------------------------------------------

    def join(self, other: SoftNic) -> None:
        """Lay an in-process wire to another NIC of this process. No wire leads from Ethernet to InfiniBand."""
        if self.port.link_layer is not other.port.link_layer:
            return
        gids = self.port.gids[0], other.port.gids[0]
        wire = InProcessWire((self.engine.kick_fd, other.engine.kick_fd))
        with self._guard(), other._guard():
            self.links.add_pipes(wire.ends[0], other, gids, wire.drop)
            other.links.add_pipes(wire.ends[1], self, (gids[1], gids[0]), wire.drop)

    def route(self, gid: bytes, lid: int, source: int, qpn: int) -> tuple[int, int, bytes, int]:
        """Return where a QP's peer is: (row address, 0, …) on this NIC, (0, wire, …) elsewhere.

        `source` is this NIC's GID index. The last two values are the peer's GID and this NIC's index as the wire knows
        them: on UDP, those of the addresses that link-local GIDs stand for.
        """
        if lid == self.port.lid if self.port.infiniband else self.has_gid(gid):
            return self.qps.row_address(qpn), 0, gid, source
        wire = self.links.towards(gid, lid, source)
        return 0, wire, *self.links.path(wire, gid, source)

    def _take_link(self, link: Link) -> None:
        with contextlib.suppress(BadStateError), self._guard():  # the NIC may be closing
            self.links.add_link(link)

    def _lose_link(self, link: Link) -> None:
        with contextlib.suppress(BadStateError), self._guard():
            self.links.lose(link)

    def _hear(self, link: Link, letter: dict[str, Any], fds: list[int]) -> None:
        try:
            with contextlib.suppress(BadStateError), self._guard():
                self.loans.hear(link, letter, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def mac_of(self, gid: bytes) -> bytes:
        """Return the MAC behind a GID that can be reached."""
        return self.mac if self.has_gid(gid) else self.links.mac_of(gid)

    def _mac_for_capture(self, gid: bytes) -> bytes:
        return self.mac if self.has_gid(gid) else mac_of(address_of(gid))

    def _path_of(self, qpn: int) -> tuple[bytes, int] | None:
        """Return the peer's GID and the source GID index of a QP that is connected over a wire, else None."""
        row = self.qps.rows[qpn & self.qps.mask]
        if row["qpn"] != qpn or row["wire"] == 0:
            return None
        return row["peer_high"].tobytes() + row["peer_low"].tobytes(), int(row["source"])

    def queue_memory(self, qpn: int, sq_entries: int) -> tuple[int, int]:
        """Allocate a QP's flights and its READ and atomic resources. Return both addresses."""
        memory = HostMemory(sq_entries * FLIGHT.size + MAX_RD_ATOMIC * RESOURCE.size)
        self._queue_memory[qpn] = memory
        return memory.address, memory.address + sq_entries * FLIGHT.size

    def shared_queue_memory(self, srqn: int, entries: int) -> int:
        """Allocate room for the indices of an SRQ's WQEs that come back unused. Return its address."""
        self._shared_memory[srqn] = memory = HostMemory(8 * entries)
        return memory.address

    @contextlib.contextmanager
    def larger_shared_queue_memory(self, srqn: int, entries: int) -> Iterator[int]:
        """Allocate larger room for these indices. The SRQ owns it once the block has ended."""
        memory = HostMemory(8 * entries)
        try:
            yield memory.address
        except BaseException:
            memory.close()
            raise
        self._shared_memory[srqn].close()
        self._shared_memory[srqn] = memory

    def free_shared_queue_memory(self, srqn: int) -> None:
        """Free the memory of an SRQ. No QP may take WQEs from it any more."""
        self._shared_memory.pop(srqn).close()

    def free_queue_memory(self, qpn: int) -> None:
        """Free the memory of a QP. The engine must have forgotten the QP."""
        self._queue_memory.pop(qpn).close()

    # --- protection domains, memory, registers ---------------------------------------------------------------------

    def alloc_pd(self) -> int:
        """Allocate a PD and return its number."""
        with self._guard():
            pdn = self._slot(self.pds)
            self.pds.rows[pdn]["pdn"] = pdn
            return pdn

    def dealloc_pd(self, pdn: int) -> None:
        """Free a PD. InUseError while a QP or a region belongs to it."""
        with self._guard():
            row = self._unused(self.pds, pdn)
            row["pdn"] = 0

    def reg_mr(self, pdn: int, address: int, nbytes: int, iova: int, access: Access, cuda: bool) -> int:
        """Register memory. Return its key, which is both lkey and rkey."""
        with self._guard():
            pd = self.pds[pdn]
            place = self._place(address, nbytes, access, cuda)
            # Index and tag are random, so that a key cannot be guessed from another.
            index = self.mkeys.free_slot(1 + secrets.randbelow(MAX_MR - 1))
            if index is None:
                raise NoMemoryError(f"{self.name} has no free memory key: all {MAX_MR - 1} are in use; close one first")
            key = index << 8 | 1 + secrets.randbelow(255)  # never 0x100, which ends a scatter list
            row = np.zeros((), MKEY_ROW.dtype)
            row["key"], row["pdn"], row["access"], row["iova"] = key, pdn, int(access), _signed(iova)
            row["nbytes"], row["delta"] = nbytes, _signed(place - iova)
            row["lent"] = self.loans.lend(address, nbytes)
            self.engine.post(step.WRITE_ROW, self.mkeys.row_address(key), row)
            pd["users"] += 1
            return key

    def _place(self, address: int, nbytes: int, access: Access, cuda: bool) -> int:
        """Return the address that the engine uses for a range. The CUDA driver says whose it is, not the caller."""
        place = self.far_memory.mark(address, nbytes) if cuda else None
        if place is None and is_accessible(address, nbytes, bool(access & Access.LOCAL_WRITE)):
            return address
        if place is None and not cuda:
            place = self.far_memory.mark(address, nbytes)
        if place is not None:
            return place
        if cuda:
            raise NotSupportedError(
                f"[{address:#x}, +{nbytes}) is neither memory of this process's CPU nor, according to its CUDA "
                "driver, of one GPU: register an allocation of this process"
            )
        raise InvalidValueError(_inaccessible(address, nbytes, access))

    def rereg_mr(
        self, key: int, pdn: int | None, place: tuple[int, int, bool] | None, access: Access | None
    ) -> None:
        """Change a region between two WQEs, and keep its key (`Provider.rereg_mr`).

        After this returns, the NIC touches no byte of memory that the region has left.
        """
        with self._guard():
            row = self.mkeys[key].copy()
            before, lent = self.pds[int(row["pdn"])], int(row["lent"])
            after = before if pdn is None else self.pds[pdn]
            rights = Access(int(row["access"])) if access is None else access
            if place is None:
                at, nbytes = (int(row["iova"]) + int(row["delta"])) % (1 << 64), int(row["nbytes"])
                if at >> MOVER_SHIFT == 0 and not is_accessible(at, nbytes, bool(rights & Access.LOCAL_WRITE)):
                    raise InvalidValueError(_inaccessible(at, nbytes, rights))
            else:
                address, nbytes, cuda = place
                row["delta"] = _signed(self._place(address, nbytes, rights, cuda) - address)
                row["iova"], row["nbytes"] = _signed(address), nbytes
                row["lent"] = self.loans.lend(address, nbytes)
            row["pdn"], row["access"] = after["pdn"], int(rights)
            self.engine.post(step.WRITE_ROW, self.mkeys.row_address(key), row)
            before["users"] -= 1
            after["users"] += 1
            if lent and place is not None:
                self.loans.take_back(lent)

    def dereg_mr(self, key: int) -> None:
        """Deregister a region. After this returns, the NIC touches no byte of it."""
        with self._guard():
            pdn, lent = int(self.mkeys[key]["pdn"]), int(self.mkeys[key]["lent"])
            self.engine.post(step.WRITE_ROW, self.mkeys.row_address(key), np.zeros((), MKEY_ROW.dtype))
            self.pds[pdn]["users"] -= 1
            if lent:
                self.loans.take_back(lent)

    def reg_umem(self, address: int, nbytes: int, access: Access) -> int:
        """Register a UMEM and return its id."""
        with self._guard():
            if not is_accessible(address, nbytes, bool(access & Access.LOCAL_WRITE)):
                raise InvalidValueError(_inaccessible(address, nbytes, access))
            umem_id = self._slot(self.umems)
            row = self.umems.rows[umem_id]
            row["umem_id"], row["addr"], row["nbytes"], row["access"] = umem_id, address, nbytes, int(access)
            return umem_id

    def dereg_umem(self, umem_id: int) -> None:
        """Deregister a UMEM. InUseError while a queue lies in it."""
        with self._guard():
            self._unused(self.umems, umem_id)["umem_id"] = 0

    def alloc_uar(self, kind: UarAllocationType) -> tuple[int, int]:
        """Allocate a UAR page. Return its id and its address."""
        with self._guard():
            page_id = self._slot(self.uar_pages)
            address = self._uar_memory.address + page_id * UAR_PAGE
            row = self.uar_pages.rows[page_id]
            row["page_id"], row["addr"], row["kind"] = page_id, address, int(kind)
            self._uar_list[int(self.record["uar_count"])] = address
            self.record["uar_count"] += 1
            return page_id, address

    def free_uar(self, page_id: int) -> None:
        """Free a UAR page. InUseError while a queue uses it. The page stays mapped: a late doorbell does no harm."""
        with self._guard():
            row = self._unused(self.uar_pages, page_id)
            count = int(self.record["uar_count"])
            at = int(np.flatnonzero(self._uar_list[:count] == int(row["addr"]))[0])
            self._uar_list[at] = self._uar_list[count - 1]
            self.record["uar_count"] = count - 1
            row["page_id"] = 0

    def doorbell_line(self, qpn: int) -> int:
        """Return the address of the QP's own doorbell register, a cache line."""
        return self._lines.address + (qpn & self.qps.mask) * REGISTER_BYTES

    def execute(self, mailbox: bytes, out_size: int) -> tuple[bytes, str]:
        """Execute a command (`CommandInterpreter.execute`)."""
        with self._guard():
            return self.interpreter.execute(mailbox, out_size)

    # --- events ----------------------------------------------------------------------------------------------------

    def create_event_channel(self) -> EventChannel:
        """Create a channel, which is not subscribed to anything yet."""
        with self._guard():
            if len(self.channels) == MAX_CHANNELS:
                raise NoMemoryError(f"{self.name} has no free event channel: all {MAX_CHANNELS} are in use")
            channel = EventChannel()
            self.channels.add(channel)
            return channel

    def subscribe(self, channel: EventChannel, target: np.void | None, types: Iterable[EventType], cookie: int) -> None:
        """Subscribe a channel to these events of a QP, CQ or SRQ; with None, to those of the port and the device."""
        with self._guard():
            if target is None:
                self._unaffiliated[channel] = cookie
                return
            is_cq = "cqn" in (target.dtype.names or ())
            errors = is_cq and EventType.COMPLETION not in types
            names = ("error_channel", "error_cookie") if errors else ("channel", "cookie")
            if "events" in (target.dtype.names or ()):
                known = int(target["events"]) if int(target["channel"]) == channel.address else 0
                target["events"] = known | sum(1 << int(kind) for kind in set(types))
            target[names[1]] = cookie  # before the channel: the engine may look at any moment
            target[names[0]] = channel.address
            if is_cq and not errors:
                count = int(self.record["armable_count"])
                self._armable[count] = self.cqs.row_address(int(target["cqn"]))
                self.record["armable_count"] = count + 1

    def forget_armable(self, cq: int) -> None:
        """Forget the CQ with this row, which will not be armed any more."""
        count = int(self.record["armable_count"])
        found = np.flatnonzero(self._armable[:count] == cq)
        if len(found):
            self._armable[int(found[0])] = self._armable[count - 1]
            self.record["armable_count"] = count - 1

    def destroy_event_channel(self, channel: EventChannel) -> None:
        """Destroy a channel. It gets no more events, and the events in it are lost."""
        with self._guard():
            for table, names in ((self.qps, ("channel",)), (self.srqs, ("channel",)),
                                 (self.cqs, ("channel", "error_channel"))):  # fmt: skip
                for name in names:
                    for index in np.flatnonzero(table.given[name] == channel.address):
                        table.rows[index][name] = 0
                        if table is self.cqs and name == "channel":
                            self.forget_armable(table.row_address(int(index)))
            self._unaffiliated.pop(channel, None)
            self.engine.settle()  # the engine may be writing to the channel's descriptor
            self.channels.discard(channel)
            channel.close()

    def set_link(self, up: bool) -> None:
        """Plug the cable in, or pull it: then no packet comes or goes over any wire. This raises a port event."""
        with self._guard():
            if up == self.link_up:
                return
            down = np.array([not up], np.int64)
            self.engine.post(step.WRITE_ROW, self.control_address + NIC.link_down, down)
            self.tell_all(EventType.PORT_CHANGE, 1 << 8 | (PortSubtype.ACTIVE if up else PortSubtype.DOWN))

    @property
    def link_up(self) -> bool:
        """Return whether the cable is plugged in."""
        return int(self.record["link_down"]) == 0

    def fail(self) -> None:
        """Fail like a card whose firmware has crashed: nothing is executed any more, objects can only be destroyed.

        This raises a device event. The failure lasts until the NIC is closed.
        """
        with self._guard():
            self.pause()
            self.interpreter.failed = True
            self.tell_all(EventType.INTERNAL_ERROR)

    def tell_all(self, kind: EventType, number: int = 0) -> None:
        """Send an event of the port or of the device to all channels that have subscribed to those."""
        with self._guard():
            for channel, cookie in self._unaffiliated.items():
                event = np.zeros((), EVENT.dtype)
                event["cookie"], event["type"], event["number"] = cookie, int(kind), number
                self.engine.post(step.RAISE_EVENT, channel.address, event)

    # --- for tests and inspection ----------------------------------------------------------------------------------

    @property
    def reports(self) -> list[Report]:
        """Return what the NIC has refused lately, oldest first."""
        self._service.drain()
        return list(self._service.reports)

    def pause(self, after: int = 0) -> None:
        """Stop executing WQEs after `after` more of them. Commands are still served.

        With `after` 0, the NIC has stopped when this returns.
        """
        with self._guard():
            if after == 0:
                self.engine.post(step.WRITE_ROW, self.control_address + NIC.paused, np.ones(1, np.int64))
            else:
                self.record["pause_at"] = int(self.counters["sq_wqes"]) + after
                self.engine.kick()

    def resume(self) -> None:
        """Undo `pause`."""
        with self._guard():
            self.record["pause_at"] = -1
            self.record["paused"] = 0
            self.engine.kick()

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
                    self.record["pause_at"], self.record["paused"] = -1, 0
                    self.engine.stop()
                self._started = False
            self._undo.close()

    def _leave_peers(self) -> None:
        for peer in self.links.peers():
            with peer._guard():
                peer.links.lose(self)

    def _guard(self) -> threading.RLock:
        if self.pid != os.getpid():
            raise BadStateError(
                f"{self.name} was opened in process {self.pid}: open it again here, or use spawn, not fork"
            )
        if not self.engine.running:
            raise BadStateError(f"{self.name} is closed")
        return self._lock

    def _slot(self, table: Table) -> int:
        slot = table.free_slot()
        if slot is None:
            raise NoMemoryError(
                f"{self.name} has no free {table.name}: all {table.mask} are in use; close one first"
            )
        table.rows[slot]["users"] = 0
        return slot

    @staticmethod
    def _unused(table: Table, number: int) -> np.void:
        row = table[number]
        if row["users"]:
            users = int(row["users"])
            raise InUseError(f"{table.name} {number:#x} is still used by {users} object(s): close them first")
        return row


def _inaccessible(address: int, nbytes: int, access: Access) -> str:
    what = "readable and writable" if access & Access.LOCAL_WRITE else "readable"
    return f"[{address:#x}, +{nbytes}) is not {what} memory of this process"


def _log(count: int) -> int:
    """Return the logarithm of a power of two."""
    return count.bit_length() - 1


def _signed(value: int) -> int:
    """Return an address or a difference as the int64 with the same bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
