"""The wires of a NIC in its control path. Connecting a QP to a new peer creates a wire, which stays while in use."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Container, Hashable
from importlib import import_module
from typing import Protocol, runtime_checkable

import numpy as np

from ....errors import NoMemoryError, NotFoundError
from ....fabric.claims import claimant
from ....fabric.faults import Faults
from ....fabric.frames import pipe_size
from ....fabric.injector import Injector
from ....fabric.inprocess import CAPACITY, LinkEnd
from ....fabric.link import Link
from ....fabric.link_limits import MAX_LINKS
from ....memory import HostMemory
from ... import wires
from ...engine.hardware import Hardware
from ...engine.port import IPAddress, address_of, can_reach, gid_of
from ...state.tables import Table
from ...state.wire import WIRE
from ...state.worker import WORKER
from ...turn.commands import EngineCommand
from ...wires.pipes import Pipes
from ...wires.wire import Wire
from ..regions.grants import Grants
from .lan import Lan

logger: logging.Logger = logging.getLogger("gpunetio.nic")

MAX_WIRES = MAX_LINKS
DRAIN_PATIENCE = 0.05  # seconds
_INJECTED = ("lost", "duplicated", "reordered", "corrupted", "passed")  # the counters of an injector


@runtime_checkable
class LocalNic(Protocol):
    """The part of a NIC of this process that the NICs at the other ends of its wires use."""

    @property
    def mac(self) -> bytes: ...

    def has_gid(self, gid: bytes) -> bool: ...

    def is_at(self, gid: bytes, lid: int) -> bool:
        """Return whether the NIC has this GID or, on InfiniBand, this LID."""
        ...

    def lose(self, peer: Hashable) -> None:
        """Mark the wire to `peer`, which is gone, as dead."""
        ...


class Connect(Protocol):
    """Create a link from an own address to the NIC at an address of this host. None if there is no such NIC."""

    def __call__(self, address: IPAddress, source: IPAddress) -> Link | None: ...


class LinkToLan(Protocol):
    """Create links to the NICs of other processes that are on this host's LAN. Return all such links."""

    def __call__(self) -> list[Link]: ...


class Links:
    """The wires over which a NIC's QPs reach their peers. `memory` contains the wires' rows.

    `lan` is the NIC's membership in the LAN, or None if its type of wire has no LAN.

    Before a dead wire's row is reused, the functions in `on_removed` are called with the wire's address.
    """

    memory: HostMemory
    lan: Lan | None
    on_removed: list[Callable[[int], None]]

    def __init__(self, hardware: Hardware, qps: Table, grants: Grants, connect: Connect, link_to_lan: LinkToLan):
        self._hardware, self._name, self._port, self._engine = hardware, hardware.name, hardware.port, hardware.engine
        self._record, self._qps, self._grants, self._connect = hardware.record, qps, grants, connect
        self._link_to_lan = link_to_lan
        self.memory = HostMemory(MAX_WIRES * WIRE.size, shared=True)
        self._wires: list[Wire] = []
        self._injected_before = Counter[str](dict.fromkeys(_INJECTED, 0))  # of wires that are already closed
        self._wire_to_itself = 0
        self.on_removed = []
        self._kind = self._port.config.wire_kind
        self.lan = Lan(hardware) if self._kind.neighbours and not self._port.infiniband else None
        self._wire_to_others: Wire = import_module(f"{wires.__name__}.{self._kind.module}").make(self._port)

    def close(self) -> None:
        """Release all wires. The engine must have stopped."""
        for wire in self._wires:
            self._release(wire)
        self._wires.clear()
        if self.lan is not None:
            self.lan.close()
        self.memory.close()

    def _release(self, wire: Wire) -> None:
        self._injected_before.update(self._injected_by(wire))
        wire.close()
        if wire.injector:
            wire.injector.close()

    @staticmethod
    def _injected_by(wire: Wire) -> dict[str, int]:
        record = wire.injector.record if wire.injector else None
        return {kind: 0 if record is None else int(record[kind]) for kind in _INJECTED}

    def injected(self) -> dict[str, int]:
        """Return how many faults the wires have injected, by type. Closed wires are included."""
        counts = self._injected_before.copy()
        for wire in self._wires:
            counts.update(self._injected_by(wire))
        return dict(counts)

    # --- adding and removing wires ---------------------------------------------------------------------------------

    def add(self, wire: Wire) -> int:
        """Open a wire and add it to the engine's wires. Return the address of its row."""
        address, row = self._free_slot(), wire.row()
        tx = wire.open(row)
        if isinstance(faults := self._port.config.faults, Faults):
            wire.injector = Injector(faults, tx, *wire.gids, make_icrc=not wire.adds_icrc)
            row["faults"] = wire.injector.address
            tx = wire.injector.from_nic
        row["tx"] = np.void(tx.tobytes())
        self._engine.post(EngineCommand.WRITE_ROW, address, row)
        wire.address = address
        self._wires.append(wire)
        self._write_wire_list()
        return wire.address

    def add_pipes(
        self, end: LinkEnd, peer: Hashable, gids: tuple[bytes, bytes], release: Callable[[], None], on_lan: bool = False
    ) -> int:
        """Add a wire of two pipes, and return the address of its row. `gids` are the GIDs of this end and of the peer.

        `on_lan`: the wire belongs to the LAN, if the NIC has one.
        """
        wire = Pipes(end, peer, gids, self._port.infiniband, on_lan and self.lan is not None, release)
        address = self.add(wire)
        if self.lan is not None and wire.on_lan:
            self.lan.add(wire)
        return address

    def _write_wire_list(self) -> None:
        """Write the list of wires to the engine. The count must never exceed the entries that are in the list."""
        record = self._record
        ends = np.zeros(MAX_WIRES, np.int64)
        ends[: len(self._wires)] = [wire.address for wire in self._wires]
        writes = [
            (int(record["wires"]), ends),
            (self._hardware.address + WORKER.wire_count, np.array(len(self._wires), np.int64)),
        ]
        if len(self._wires) < record["wire_count"]:
            writes.reverse()
        for address, values in writes:
            self._engine.post(EngineCommand.WRITE_ROW, address, values)
        events = [fd for wire in self._wires if not wire.dead for fd in wire.events]
        self._engine.watch(events, [fd for wire in self._wires for fd in wire.sockets])

    def _free_slot(self) -> int:
        """Return a free slot. A dead wire's slot becomes free once no QP refers to the wire."""
        named = set(self._qps.given["wire"].tolist())
        gone = [wire for wire in self._wires if wire.dead and wire.address not in named]
        if gone:
            self._wires = [wire for wire in self._wires if wire not in gone]
            self._write_wire_list()
            for wire in gone:
                for callback in self.on_removed:
                    callback(wire.address)
                self._engine.post(EngineCommand.WRITE_ROW, wire.address, np.zeros((), WIRE.dtype))
                self._release(wire)
        used = {wire.address for wire in self._wires}
        for i in range(MAX_WIRES):
            if (slot := self.memory.address + i * WIRE.size) not in used:
                return slot
        raise NoMemoryError(f"{self._name} has wires to {MAX_WIRES} NICs: close queue pairs to some of them")

    def lose(self, peer: Hashable) -> None:
        """Mark the wire to `peer`, which is gone, as dead. Frames sent there are lost."""
        for wire in self._wires:
            if wire.peer == peer and not wire.dead:
                wire.dead = True
                self._hardware.write(wire.address + WIRE.wake_fd, 0)
                self._hardware.write(wire.address + WIRE.broken, 1)
                self._hardware.write(wire.address + WIRE.grants, 0)
                if isinstance(peer, Link):
                    self._grants.remove_peer(peer)
                if self.lan is not None and isinstance(wire, Pipes) and wire.on_lan:
                    self.lan.remove(wire)
                self._write_wire_list()

    def drain(self, address: int) -> None:
        """Wait until the engine has dropped what arrived on a wire before a QP entered RTR (transport/delivery.py).

        Otherwise the engine might drop the QP's first packet along with it. If other traffic keeps the sockets full, or
        if the NIC is paused, stop waiting after DRAIN_PATIENCE or at once: the peer retransmits that packet.
        """
        wire, end = self._wire_at(address), time.monotonic() + DRAIN_PATIENCE
        while wire and not wire.drained and not self._record["paused"] and time.monotonic() < end:
            os.sched_yield()

    def _wire_at(self, address: int) -> Wire | None:
        """Return the wire whose row is at an address, or None: a QP whose peer is on its own NIC has no wire."""
        return next((wire for wire in self._wires if wire.address == address), None)

    def peers(self) -> list[LocalNic]:
        """Return the NICs of this process at the other ends of live wires."""
        return [wire.peer for wire in self._wires if not wire.dead and isinstance(wire.peer, LocalNic)]

    # --- finding wires ---------------------------------------------------------------------------------------------

    def wire_to(self, gid: bytes, lid: int, source: int) -> int:
        """Return the address of the wire to the NIC with this GID or, on InfiniBand, this LID. Create it if needed.

        `source` is this NIC's GID index. NotFoundError if there is no such NIC.
        """
        port, kind = self._port, self._kind
        if kind.neighbours and (address := self._wire_to_neighbour(gid, lid, source)):
            return address
        if port.infiniband and not kind.infiniband:
            raise NotFoundError(
                f"{self._name} reaches no NIC with LID {lid:#x} (at {port.address_of_lid(lid)}): an InfiniBand "
                "port reaches only software NICs of this host; open the peer first"
            )
        if port.config.on_gpu:
            raise NotFoundError(
                f"{self._name} reaches no NIC at {address_of(gid)}: its engine is on a GPU, and reaches only software "
                "NICs of this host; open the peer first"
            )
        self._wire_to_others.path(gid, source)
        return self.wire_to_others().address

    def _wire_to_neighbour(self, gid: bytes, lid: int, source: int) -> int:
        """Return the address of the wire to a NIC of this host, or 0 if there is no such NIC."""
        port = self._port
        for wire in self._wires:
            if not wire.dead and isinstance(wire.peer, LocalNic) and wire.peer.is_at(gid, lid):
                return wire.address
        address = port.address_of_lid(lid) if port.infiniband else address_of(gid)
        link = None if address.is_link_local else self._connect(address, port.source_address(source))
        return 0 if link is None else self.add_link(link)

    @property
    def takes_own(self) -> bool:
        """Whether packets from the NIC to itself use its wire."""
        return self._wire_to_others.takes_own

    def wire_to_others(self) -> Wire:
        """Return the wire to all peers without a wire of their own, and open it on first use."""
        if self._wire_to_others.address == 0:
            self.add(self._wire_to_others)
        return self._wire_to_others

    def listen(self) -> None:
        """Open the wire to all peers without a wire of their own, if the port has one, because any peer may send."""
        reaches_others = self._kind.infiniband or not self._port.infiniband
        if reaches_others and not self._port.config.on_gpu:
            self.wire_to_others()

    def wire_to_itself(self) -> int:
        """Return the address of the NIC's wire to itself, for datagrams: a pipe that the engine writes and reads."""
        if self._wire_to_itself == 0:
            memory, gid = HostMemory(pipe_size(CAPACITY)), self._port.gids[0]
            end = LinkEnd(memory.address, memory.address, CAPACITY, 0)
            try:
                self._wire_to_itself = self.add_pipes(end, "itself", (gid, gid), memory.close)
            except NoMemoryError:
                memory.close()
                raise
        return self._wire_to_itself

    def add_link(self, link: Link) -> int:
        """Return the address of the wire over a link to a NIC of another process. Add the wire if the link has none."""
        for wire in self._wires:
            if wire.peer is link:
                return wire.address
        end = LinkEnd(link.tx, link.rx, link.capacity, link.peer_notify_fd)

        def release() -> None:
            self._grants.remove_peer(link)
            link.close()

        gids = gid_of(link.own_address), gid_of(link.peer_address)
        try:
            wire = self.add_pipes(end, link, gids, release, on_lan=self.is_of_lan(link))
        except NoMemoryError:
            link.close()
            raise
        self._grants.add_peer(link, wire)
        return wire

    # --- the LAN of Ethernet frames --------------------------------------------------------------------------------

    def enter_lan(self) -> None:
        """Add an Ethernet queue. With the first one, the NIC enters the LAN, if there is one.

        The NIC then creates links to all members of the LAN. NICs that enter later create links to it.
        """
        if self.lan is not None and self.lan.enter():
            for link in self._link_to_lan():
                try:
                    self.add_link(link)
                except NoMemoryError as error:
                    logger.warning("%s: Ethernet frames do not reach %s: %s", self._name, link, error)

    def leave_lan(self) -> None:
        """Remove an Ethernet queue. With the last one, the NIC leaves the LAN."""
        if self.lan is not None:
            self.lan.leave()

    def is_of_lan(self, link: Link) -> bool:
        """Return whether Ethernet frames may use a link. Only one of the links between two NICs carries frames.

        Each NIC uses links from its own first address, so only the link between both first addresses remains.
        """
        return link.own_address == self._port.control_addresses[0]

    # --- paths -----------------------------------------------------------------------------------------------------

    def path(self, address: int, gid: bytes, source: int) -> tuple[bytes, int]:
        """Return the peer's GID and this end's GID index as used in frames on a wire (`Wire.path`)."""
        wire = self._wire_at(address)
        return (gid, source) if wire is None else wire.path(gid, source)

    def egress(self, address: int, gid: bytes, source: int, port: int, used: Container[int]) -> int:
        """Return the egress of a QP's frames to `gid`, from GID index `source` and, on UDP, from `port` (0: any).

        `used` contains the egresses of the other QPs.
        """
        wire = self._wire_at(address)
        return source if wire is None else wire.egress(gid, source, port, used, self._engine.synchronize)

    def mac_of(self, gid: bytes) -> bytes:
        """Return the MAC of the NIC with a GID. Sockets do not use it: the kernel resolves another host's real MAC.

        NotFoundError if there is no route to the GID, or if no neighbour answers on the Ethernet.
        """
        if self._kind.ethernet:
            return self._wire_to_others.mac_of(gid)
        for peer in self.peers():
            if peer.has_gid(gid):
                return peer.mac
        address = address_of(gid)
        if self._kind.routed and not can_reach(address) and claimant(address) is None:
            raise NotFoundError(f"{self._name} has no route to {address}: see `ip route get {address}`")
        return self._wire_to_others.mac_of(gid)

    def seek_mac(self, gid: bytes) -> bool:
        """Return whether the MAC of a GID is known. If not, start to resolve it (`mac_of` would wait)."""
        return not self._kind.ethernet or self._wire_to_others.seek_mac(gid)
