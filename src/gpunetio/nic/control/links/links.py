"""The wires of a NIC, as its control path keeps them. A QP that names a new peer lays a wire, and QPs keep it."""

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
_INJECTED = ("lost", "duplicated", "reordered", "corrupted", "passed")  # what an injector counts


@runtime_checkable
class LocalNic(Protocol):
    """A NIC of this process, as the NICs at the other ends of its wires see it."""

    @property
    def mac(self) -> bytes: ...

    def has_gid(self, gid: bytes) -> bool: ...

    def is_at(self, gid: bytes, lid: int) -> bool:
        """Return whether the NIC has this GID or, on InfiniBand, this LID."""
        ...

    def lose(self, peer: Hashable) -> None:
        """Mark the wire to a peer that is gone as dead."""
        ...


class Connect(Protocol):
    """Lay a link to the NIC at an address of this host, from one of our addresses. None if there is no such NIC."""

    def __call__(self, address: IPAddress, source: IPAddress) -> Link | None: ...


class LinkToLan(Protocol):
    """Lay links to the NICs of other processes of this host that are on the LAN. Return those that there are."""

    def __call__(self) -> list[Link]: ...


class Links:
    """The wires over which a NIC's QPs reach their peers. `memory` holds the wires' rows.

    `lan` is the NIC's part in the LAN; None if its wire has none.

    `lost` are called with the address of a wire whose row is needed for another wire.
    """

    memory: HostMemory
    lan: Lan | None
    lost: list[Callable[[int], None]]

    def __init__(self, hardware: Hardware, qps: Table, grants: Grants, connect: Connect, link_to_lan: LinkToLan):
        self._hardware, self._name, self._port, self._engine = hardware, hardware.name, hardware.port, hardware.engine
        self._record, self._qps, self._grants, self._connect = hardware.record, qps, grants, connect
        self._link_to_lan = link_to_lan
        self.memory = HostMemory(MAX_WIRES * WIRE.size, shared=True)
        self._wires: list[Wire] = []
        self._injected_before = Counter[str](dict.fromkeys(_INJECTED, 0))  # by wires that are released
        self._to_itself = 0
        self.lost = []
        self._kind = self._port.config.wire_kind
        self.lan = Lan(hardware) if self._kind.neighbours and not self._port.infiniband else None
        self._to_others: Wire = import_module(f"{wires.__name__}.{self._kind.module}").make(self._port)

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
        """Return how many faults the wires have injected, by kind: also those to NICs that have left."""
        counts = self._injected_before.copy()
        for wire in self._wires:
            counts.update(self._injected_by(wire))
        return dict(counts)

    # --- laying and leaving ----------------------------------------------------------------------------------------

    def add(self, wire: Wire) -> int:
        """Open a wire and give it to the engine. Return its address."""
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
        self._list()
        return wire.address

    def add_pipes(
        self, end: LinkEnd, peer: Hashable, gids: tuple[bytes, bytes], release: Callable[[], None], on_lan: bool = False
    ) -> int:
        """Add a wire of two pipes and return its address. `gids` are this end's and the peer's, known to both.

        `on_lan`: the wire is of the LAN, if the NIC has one.
        """
        wire = Pipes(end, peer, gids, self._port.infiniband, on_lan and self.lan is not None, release)
        address = self.add(wire)
        if self.lan is not None and wire.on_lan:
            self.lan.add(wire)
        return address

    def _list(self) -> None:
        """Tell the engine which wires there are. The count must never include an entry that is not there."""
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
        """Return a free slot. A dead wire's slot becomes free when no QP names the wire any more."""
        named = set(self._qps.given["wire"].tolist())
        gone = [wire for wire in self._wires if wire.dead and wire.address not in named]
        if gone:
            self._wires = [wire for wire in self._wires if wire not in gone]
            self._list()
            for wire in gone:
                for forget in self.lost:
                    forget(wire.address)
                self._engine.post(EngineCommand.WRITE_ROW, wire.address, np.zeros((), WIRE.dtype))
                self._release(wire)
        used = {wire.address for wire in self._wires}
        for i in range(MAX_WIRES):
            if (slot := self.memory.address + i * WIRE.size) not in used:
                return slot
        raise NoMemoryError(f"{self._name} has wires to {MAX_WIRES} NICs: close queue pairs to some of them")

    def lose(self, peer: Hashable) -> None:
        """Mark the wire to a peer that is gone as dead. What is sent there is lost."""
        for wire in self._wires:
            if wire.peer == peer and not wire.dead:
                wire.dead = True
                self._hardware.write(wire.address + WIRE.wake_fd, 0)
                self._hardware.write(wire.address + WIRE.broken, 1)
                self._hardware.write(wire.address + WIRE.grants, 0)
                if isinstance(peer, Link):
                    self._grants.leave(peer)
                if self.lan is not None and isinstance(wire, Pipes) and wire.on_lan:
                    self.lan.remove(wire)
                self._list()

    def drain(self, address: int) -> None:
        """Have the engine take, and drop, what arrived on a wire before a QP entered RTR (transport/delivery.py).

        Otherwise the engine might find the QP's first packet behind that, and drop it, too. If others keep the sockets
        full, or the NIC is paused, this does not wait for long: the peer retransmits that packet.
        """
        wire, end = self._at(address), time.monotonic() + DRAIN_PATIENCE
        while wire and not wire.drained and not self._record["paused"] and time.monotonic() < end:
            os.sched_yield()

    def _at(self, address: int) -> Wire | None:
        """Return the wire with this row, or None: a QP whose peer is on its own NIC has none."""
        return next((wire for wire in self._wires if wire.address == address), None)

    def peers(self) -> list[LocalNic]:
        """Return the NICs of this process at the other ends."""
        return [wire.peer for wire in self._wires if not wire.dead and isinstance(wire.peer, LocalNic)]

    # --- finding ---------------------------------------------------------------------------------------------------

    def towards(self, gid: bytes, lid: int, source: int) -> int:
        """Return the wire to the NIC with this GID or, on InfiniBand, this LID. `source` is this NIC's GID index."""
        port, kind = self._port, self._kind
        if kind.neighbours and (address := self._to_neighbour(gid, lid, source)):
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
        self._to_others.path(gid, source)
        return self.to_others().address

    def _to_neighbour(self, gid: bytes, lid: int, source: int) -> int:
        """Return the wire to a NIC of this host, or 0 if there is no such NIC."""
        port = self._port
        for wire in self._wires:
            if not wire.dead and isinstance(wire.peer, LocalNic) and wire.peer.is_at(gid, lid):
                return wire.address
        address = port.address_of_lid(lid) if port.infiniband else address_of(gid)
        link = None if address.is_link_local else self._connect(address, port.source_address(source))
        return 0 if link is None else self.add_link(link)

    @property
    def take_own(self) -> bool:
        """Whether packets from the NIC to itself come over its wire."""
        return self._to_others.takes_own

    def to_others(self) -> Wire:
        """Return the wire to all peers that have none of their own. It opens when it is first needed."""
        if self._to_others.address == 0:
            self.add(self._to_others)
        return self._to_others

    def listen(self) -> None:
        """Open the wire to all peers that have none of their own, if this port has one, because any may send."""
        reaches_others = self._kind.infiniband or not self._port.infiniband
        if reaches_others and not self._port.config.on_gpu:
            self.to_others()

    def to_itself(self) -> int:
        """Return the wire from this NIC to itself, which datagrams take: a pipe that the engine fills and empties."""
        if self._to_itself == 0:
            memory, gid = HostMemory(pipe_size(CAPACITY)), self._port.gids[0]
            end = LinkEnd(memory.address, memory.address, CAPACITY, 0)
            try:
                self._to_itself = self.add_pipes(end, "itself", (gid, gid), memory.close)
            except NoMemoryError:
                memory.close()
                raise
        return self._to_itself

    def add_link(self, link: Link) -> int:
        """Return the address of the wire over a link to a NIC of another process. A link has one wire."""
        for wire in self._wires:
            if wire.peer is link:
                return wire.address
        end = LinkEnd(link.tx, link.rx, link.capacity, link.peer_notify_fd)

        def release() -> None:
            self._grants.leave(link)
            link.close()

        gids = gid_of(link.own_address), gid_of(link.peer_address)
        try:
            wire = self.add_pipes(end, link, gids, release, on_lan=self.is_of_lan(link))
        except NoMemoryError:
            link.close()
            raise
        self._grants.join(link, wire)
        return wire

    # --- the LAN of Ethernet frames --------------------------------------------------------------------------------

    def enter_lan(self) -> None:
        """Note that the NIC has a queue of Ethernet frames more. With the first one, it enters the LAN, if it has one.

        Then it has links to all NICs of this host that are on the LAN; those that enter later lay theirs.
        """
        if self.lan is not None and self.lan.enter():
            for link in self._link_to_lan():
                try:
                    self.add_link(link)
                except NoMemoryError as error:
                    logger.warning("%s: Ethernet frames do not reach %s: %s", self._name, link, error)

    def leave_lan(self) -> None:
        """Note that the NIC has a queue of Ethernet frames less."""
        if self.lan is not None:
            self.lan.leave()

    def is_of_lan(self, link: Link) -> bool:
        """Return whether frames may go over a link. Of all links between two NICs, that is one: both do as this one.

        A link from our first address is for them to send and to take frames, so one between both first addresses
        remains.
        """
        return link.own_address == self._port.control_addresses[0]

    # --- paths -----------------------------------------------------------------------------------------------------

    def path(self, address: int, gid: bytes, source: int) -> tuple[bytes, int]:
        """Return the peer's GID and the index of this end's as frames on a wire name them."""
        wire = self._at(address)
        return (gid, source) if wire is None else wire.path(gid, source)

    def egress(self, address: int, gid: bytes, source: int, port: int, used: Container[int]) -> int:
        """Return the `source` of a QP's frames to `gid`: GID index `source` and, on UDP, this source port; 0 is any.

        `used` are those of the other QPs.
        """
        wire = self._at(address)
        return source if wire is None else wire.egress(gid, source, port, used, self._engine.settle)

    def mac_of(self, gid: bytes) -> bytes:
        """Return the MAC behind a GID. Sockets do not need it: the kernel resolves the real MAC of another host.

        NotFoundError if there is no way there, or if nobody answers on the Ethernet.
        """
        if self._kind.ethernet:
            return self._to_others.mac_of(gid)
        for peer in self.peers():
            if peer.has_gid(gid):
                return peer.mac
        address = address_of(gid)
        if self._kind.routed and not can_reach(address) and claimant(address) is None:
            raise NotFoundError(f"{self._name} has no route to {address}: see `ip route get {address}`")
        return self._to_others.mac_of(gid)

    def seek_mac(self, gid: bytes) -> bool:
        """Return whether `mac_of` would not wait for a neighbour, and have the neighbour asked if it would."""
        return not self._kind.ethernet or self._to_others.seek_mac(gid)
