"""The wires of a NIC, as its control path keeps them. A QP that names a new peer lays a wire, and QPs keep it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...errors import InvalidValueError, NoMemoryError, NotFoundError
from ...fabric.injector import Injector
from ...fabric.frames import PIPE_END, pipe_end, pipe_size
from ...fabric.inprocess import LinkEnd
from ...fabric.link import Link
from ...fabric.neighbours import MAX_LINKS, claimant
from ...fabric.udp import UdpWire
from ...memory import HostMemory
from .. import step
from .port import address_of, can_reach, gid_of, mac_of
from ..state.tables import NIC, PIPES, UDP, WIRE

if TYPE_CHECKING:
    from ..nic import SoftNic

MAX_WIRES = MAX_LINKS
PIPE_WINDOW = 128  # packets that a QP has in flight between NICs of one host
UDP_PIPE = 1 << 20
DRAIN_PATIENCE = 0.05  # seconds
UDP_WINDOW = 128  # the same to another host: half a megabyte at the largest MTU, which fits into socket buffers


@dataclass
class _Wire:
    """A wire in its slot. `peer` is at the other end; `release` frees the wire's memory."""

    address: int
    peer: Hashable
    release: Callable[[], None]
    injector: Injector | None
    dead: bool = False
    udp: UdpWire | None = None


class Links:
    """The wires over which a NIC's QPs reach their peers. `memory` holds the wires' rows."""

    memory: HostMemory

    def __init__(self, nic: SoftNic):
        self._nic = nic
        self.memory = HostMemory(MAX_WIRES * WIRE.size, shared=True)
        self._wires: list[_Wire] = []

    def close(self) -> None:
        """Release all wires. The engine must have stopped."""
        for wire in self._wires:
            self._release(wire)
        self._wires.clear()
        self.memory.close()

    @staticmethod
    def _release(wire: _Wire) -> None:
        wire.release()
        if wire.injector:
            wire.injector.close()

    # --- laying and leaving ----------------------------------------------------------------------------------------

    def add_pipes(
        self, end: LinkEnd, peer: Hashable, gids: tuple[bytes, bytes], release: Callable[[], None]
    ) -> int:
        """Add a wire of two pipes and return its address. `gids` are this end's and the peer's, known to both."""
        row = self._row(PIPES, PIPE_WINDOW, *gids)
        injector = self._inject(row, pipe_end(end.tx, end.capacity), make_icrc=True)
        row["rx"] = np.void(pipe_end(end.rx, end.capacity).tobytes())
        row["wake_fd"], row["infiniband"] = end.peer_rope, self._nic.port.infiniband
        return self._publish(row, _Wire(self._free_slot(), peer, release, injector))

    @staticmethod
    def _row(kind: int, window: int, here: bytes, peer: bytes) -> np.ndarray:
        row = np.zeros((), WIRE.dtype)
        row["kind"], row["window"] = kind, window
        row["here_high"], row["here_low"] = np.frombuffer(here, np.int64)
        row["peer_high"], row["peer_low"] = np.frombuffer(peer, np.int64)
        return row

    def _inject(self, row: np.ndarray, tx: np.ndarray, make_icrc: bool) -> Injector | None:
        """Set the pipe that the NIC fills: the wire's `tx`, or the pipe to an injector in front of it."""
        port = self._nic.port
        injector = None
        if port.config.faults:
            here, peer = (row[f"{end}_high"].tobytes() + row[f"{end}_low"].tobytes() for end in ("here", "peer"))
            injector = Injector(port.config.faults, tx, here, peer, make_icrc)
            row["faults"] = injector.address
            tx = injector.from_nic
        row["tx"] = np.void(tx.tobytes())
        return injector

    def _publish(self, row: np.ndarray, wire: _Wire) -> int:
        self._nic.engine.post(step.WRITE_ROW, wire.address, row)
        self._wires.append(wire)
        self._list()
        return wire.address

    def _list(self) -> None:
        """Tell the engine which wires there are. The count must never include an entry that is not there."""
        record = self._nic.record
        ends = np.zeros(MAX_WIRES, np.int64)
        ends[: len(self._wires)] = [wire.address for wire in self._wires]
        writes = [
            (int(record["wires"]), ends),
            (self._nic.control_address + NIC.wire_count, np.array(len(self._wires), np.int64)),
        ]
        if len(self._wires) < record["wire_count"]:
            writes.reverse()
        for address, values in writes:
            self._nic.engine.post(step.WRITE_ROW, address, values)
        links = [wire.peer for wire in self._wires if isinstance(wire.peer, Link) and not wire.dead]
        sockets = [fd for wire in self._wires if wire.udp for fd in wire.udp.fds]
        self._nic.engine.watch([link.bell for link in links], sockets)

    def _free_slot(self) -> int:
        """Return a free slot. A dead wire's slot becomes free when no QP names the wire any more."""
        named = set(self._nic.qps.given["wire"].tolist())
        gone = [wire for wire in self._wires if wire.dead and wire.address not in named]
        if gone:
            self._wires = [wire for wire in self._wires if wire not in gone]
            self._list()
            for wire in gone:
                self._nic.engine.post(step.WRITE_ROW, wire.address, np.zeros((), WIRE.dtype))
                self._release(wire)
        used = {wire.address for wire in self._wires}
        for i in range(MAX_WIRES):
            if (slot := self.memory.address + i * WIRE.size) not in used:
                return slot
        raise NoMemoryError(f"{self._nic.name} has wires to {MAX_WIRES} NICs: close queue pairs to some of them")

    def lose(self, peer: Hashable) -> None:
        """Mark the wire to a peer that is gone as dead. What is sent there is lost."""
        for wire in self._wires:
            if wire.peer == peer and not wire.dead:
                wire.dead = True
                self._nic.engine.post(step.WRITE_ROW, wire.address + WIRE.wake_fd, np.zeros(1, np.int64))
                self._nic.engine.post(step.WRITE_ROW, wire.address + WIRE.broken, np.ones(1, np.int64))
                self._nic.engine.post(step.WRITE_ROW, wire.address + WIRE.loans, np.zeros(1, np.int64))
                if isinstance(peer, Link):
                    self._nic.loans.leave(peer)
                self._list()

    def drain(self, address: int) -> None:
        """Have the engine take, and drop, what arrived on a UDP wire before a QP entered RTR (wires.py).

        Otherwise the engine might find the QP's first packet behind that, and drop it, too. If others keep the sockets
        full, or the NIC is paused, this does not wait for long: the peer retransmits that packet.
        """
        udp = next((wire.udp for wire in self._wires if wire.address == address and wire.udp), None)
        end = time.monotonic() + DRAIN_PATIENCE
        while udp and udp.record["marked"] and not self._nic.record["paused"] and time.monotonic() < end:
            os.sched_yield()

    def peers(self) -> list[SoftNic]:
        """Return the NICs of this process at the other ends."""
        return [wire.peer for wire in self._wires if not wire.dead and isinstance(wire.peer, type(self._nic))]

    # --- finding ---------------------------------------------------------------------------------------------------

    def towards(self, gid: bytes, lid: int, source: int) -> int:
        """Return the wire to the NIC with this GID or, on InfiniBand, this LID. `source` is this NIC's GID index."""
        port = self._nic.port
        if port.config.wire == "udp":
            return self._udp(gid, source)
        for wire in self._wires:
            if not wire.dead and isinstance(wire.peer, type(self._nic)) and _is(wire.peer, gid, lid):
                return wire.address
        address = port.address_of_lid(lid) if port.infiniband else address_of(gid)
        link = None if address.is_link_local else self._nic.door.connect(address, source=port.source_address(source))
        if link is not None:
            return self.add_link(link)
        if port.infiniband:
            raise NotFoundError(
                f"{self._nic.name} reaches no NIC with LID {lid:#x} (at {address}): an InfiniBand port reaches "
                "only software NICs of this host; open the peer first"
            )
        return self._udp(gid, source)

    def add_link(self, link: Link) -> int:
        """Return the address of the wire over a link to a NIC of another process. A link has one wire."""
        for wire in self._wires:
            if wire.peer is link:
                return wire.address
        end = LinkEnd(link.tx, link.rx, link.capacity, link.peer_rope)

        def release() -> None:
            self._nic.loans.leave(link)
            link.close()

        gids = gid_of(link.own_address), gid_of(link.peer_address)
        try:
            wire = self.add_pipes(end, link, gids, release)
        except NoMemoryError:
            link.close()
            raise
        self._nic.loans.join(link, wire)
        return wire

    def _udp(self, gid: bytes, source: int) -> int:
        """Return the wire to all other peers, from GID index `source`. Its sockets open when it is first needed."""
        port = self._nic.port
        here, there = port.source_address(source), address_of(gid)
        if here.version != there.version:
            raise InvalidValueError(
                f"GID {there} cannot be reached from GID index {source} ({here}): use the index of an address of the "
                f"same IP version, one of {', '.join(map(str, port.addresses))}"
            )
        if there.version == 6 and (there.is_link_local or port.is_link_local(source)) and not here.is_link_local:
            raise InvalidValueError(
                f"GID {there} cannot be reached from GID index {source}: over UDP, a link-local GID must stand for an "
                f"IPv4 address, or both ends must be link-local. Use GIDs of addresses, as at index 0 ({here})"
            )
        for wire in self._wires:
            if wire.udp:
                return wire.address
        return self._open_udp()

    def egress(self, wire: int, source: int, port: int, used: Container[int]) -> int:
        """Return the egress of a QP's packets: GID index `source` and, on the UDP wire, this UDP port; 0 is any.

        `used` are the egresses of the other QPs.
        """
        udp = next((known.udp for known in self._wires if known.udp and known.address == wire), None)
        if udp is None or port == 0:
            return source
        return udp.egress(source, port, used, self._nic.engine.settle)

    def _open_udp(self) -> int:
        port = self._nic.port
        memory = HostMemory(PIPE_END.size + pipe_size(UDP_PIPE))
        consumer = memory.view(PIPE_END.dtype)
        tx = consumer[0] = pipe_end(memory.address + PIPE_END.size, UDP_PIPE)
        indices = [port.gids.index(gid_of(address)) for address in port.addresses]
        try:
            udp = UdpWire(port.addresses, memory.address, indices)
        except BaseException:
            memory.close()
            raise

        def release() -> None:
            udp.close()
            memory.close()

        row = self._row(UDP, UDP_WINDOW, port.gids[0], bytes(16))
        injector = self._inject(row, tx, make_icrc=False)
        row["udp"] = udp.address
        return self._publish(row, _Wire(self._free_slot(), "udp", release, injector, udp=udp))

    def is_udp(self, address: int) -> bool:
        """Return whether a wire is the UDP wire."""
        return any(wire.udp and wire.address == address for wire in self._wires)

    def mac_of(self, gid: bytes) -> bytes:
        """Return the MAC behind a GID. The kernel resolves the real MAC of another host; sockets do not need it."""
        for peer in self.peers():
            if peer.has_gid(gid):
                return peer.mac
        address = address_of(gid)
        if not can_reach(address) and claimant(address) is None:
            raise NotFoundError(f"{self._nic.name} has no route to {address}: see `ip route get {address}`")
        return mac_of(address)


def _is(nic: SoftNic, gid: bytes, lid: int) -> bool:
    """Return whether a NIC of the same link layer has this GID or, on InfiniBand, this LID."""
    return nic.port.lid == lid if nic.port.infiniband else nic.has_gid(gid)
