"""Reach: requests without packets to a NIC of another process, if GPUs make the turns of both NICs.

A NIC announces its regions in GPU memory and its queue pairs in RTS to the NIC at the other end of a link. The other
NIC's engine then executes WRITEs, READs and atomics to them by itself, as between two queue pairs of one NIC
(gpu/warp_batches.py): it checks keys, bounds and rights, and copies over NVLink. All other requests, and all requests
that fail a check, are sent as packets.

An announced object is withdrawn before it is destroyed. Because a message to the other process may take long, two words
in the pipe do this (fabric/frames.py, PIPE). The NIC increments `withdrawn`, and waits for `answered`. The other engine
answers between its turns, when it has no request in progress. From then on it sends requests as packets, until its host
has handled the message that lists the withdrawn objects. An engine also checks `withdrawn` before it makes new turns,
so an engine that does not answer has no request in progress. A queue pair that fails increments `failed`, which has the
same effect without the wait.

Messages over a link have an `op`. "reach" comes first, and says how memory is shared. "key" and "queue" announce an
object. "forget" lists withdrawn `keys` and `queues`. "queue" and "forget" contain the values of the pipe's words as of
the message. grants.py shares the memory itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ....errors import InvalidValueError
from ....fabric.control_message import Body
from ....fabric.frames import PIPE
from ....fabric.link import Link
from ....formats.commands import QpState, ServiceType
from ...engine.hardware import Hardware, SharedMapping
from ...state.objects import MKEY_ROW
from ...state.qp import QP_ROW
from ...state.tables import MkeyTable, Row, Table
from ...state.wire import WIRE
from ...turn.commands import EngineCommand
from ..components import Components

logger: logging.Logger = logging.getLogger("gpunetio.nic")

_PATIENCE = 1.0  # seconds to wait for an answer: an engine that makes turns answers within a slice
_POLL_INTERVAL = 20e-6
_TAG_SHIFT = 32
_KEY = ("key", "pdn", "access", "iova", "nbytes")  # of a MKEY_ROW, in messages
_QUEUE = ("qpn", "remote_qpn", "pdn", "rights", "msg_max")  # of a QP_ROW


@dataclass
class _Peer:
    """A NIC at the other end of a link: its wire, the PIPE to it, and the objects announced by it and to it."""

    link: Link
    wire: int
    tag: int
    tx: np.void
    shares: bool = False  # whether the peer shares memory as this NIC does
    keys: MkeyTable | None = None  # of the peer's regions
    queues: dict[int, dict[str, int]] = field(default_factory=dict)  # fields of the peer's queue pairs, by number
    announced_keys: set[int] = field(default_factory=set)
    announced_queues: set[int] = field(default_factory=set)
    unanswered: int = 0  # the value of `withdrawn` that the peer's engine did not answer in time


class Reach:
    """The objects of peers that a NIC accesses without packets, and its own that peers access. Callers hold its lock.

    `qps` and `mkeys` are the NIC's tables.
    """

    peers: dict[Link, _Peer]
    qps: Table
    mkeys: Table

    def __init__(self, hardware: Hardware, components: Components, enabled: bool):
        self._hardware, self._engine, self._components = hardware, hardware.engine, components
        self._enabled = enabled and bool(self._engine.sharing)
        self.peers = {}

    def shares(self, link: Link) -> bool:
        """Return whether a peer shares memory as this NIC does."""
        return link in self.peers and self.peers[link].shares

    # --- peers -----------------------------------------------------------------------------------------------------

    def add_peer(self, link: Link, wire: int) -> None:
        """Add the peer of a new wire over a link."""
        if link.talks and self._enabled:
            tags = {peer.tag for peer in self.peers.values()}
            tag = next(tag for tag in range(1, len(tags) + 2) if tag not in tags)
            self.peers[link] = _Peer(link, wire, tag, _pipe_at(link.tx))
            self._send(link, {"op": "reach", "sharing": self._engine.sharing})

    def remove_peer(self, link: Link) -> None:
        """Remove a peer. Idempotent."""
        if (peer := self.peers.pop(link, None)) is not None:
            if self._engine.running:
                for row in self._rows_of(peer):
                    self._write(row, 0, 0, 0, 0, 0)
            if peer.keys:
                peer.keys.close()

    def close(self) -> None:
        """Free the tables of peers' keys. The engine must have stopped."""
        for peer in self.peers.values():
            if peer.keys:
                peer.keys.close()
        self.peers.clear()

    def _rows_of(self, peer: _Peer) -> list[np.void]:
        """Return the rows of this NIC's queue pairs that access a peer without packets."""
        return [row for row in self.qps.given if row["wire"] == peer.wire and row["peer_keys"]]

    def _send(self, link: Link, message: Body) -> None:
        try:
            link.send(message)
        except OSError as error:  # the peer does not read its messages, or is gone
            logger.info("%s cannot send %s the message %s: %s", self._hardware.name, link, message, error)

    # --- announcing objects of this NIC ----------------------------------------------------------------------------

    def announce_key(self, row: Row, number: int, offset: int) -> None:
        """Announce a region, which lies at `offset` in the memory of the grant `number`, to all peers."""
        for peer in self.peers.values():
            if peer.shares:
                self._send_key(peer, row, number, offset)

    def announce_key_to(self, link: Link, row: Row, number: int, offset: int) -> None:
        """Announce a region to one peer. See `announce_key`."""
        self._send_key(self.peers[link], row, number, offset)

    def _send_key(self, peer: _Peer, row: Row, number: int, offset: int) -> None:
        fields = {name: int(row[name]) for name in _KEY}
        peer.announced_keys.add(fields["key"])
        self._send(peer.link, {"op": "key", **fields, "number": number, "offset": offset})

    def withdraw_key(self, key: int) -> None:
        """Withdraw a region whose key is no longer valid. Afterwards no peer accesses the region without packets."""
        self._withdraw({key}, set())

    def update_queue(self, qpn: int) -> None:
        """Announce or withdraw a queue pair after its state may have changed, or after it was created or destroyed."""
        row = self.qps[qpn] if qpn in self.qps else None
        ready = row is not None and row["state"] == QpState.RTS and row["service"] == ServiceType.RC
        announced = [peer for peer in self.peers.values() if qpn in peer.announced_queues]
        if announced:
            self._withdraw(set(), {qpn})
        if row is not None and ready:
            for peer in self.peers.values():
                if peer.wire == row["wire"] and peer.shares:
                    self._send_queue(peer, row)
                    self._connect(peer, row)

    def _send_queue(self, peer: _Peer, row: np.void) -> None:
        peer.announced_queues.add(int(row["qpn"]))
        fields = {name: int(row[name]) for name in _QUEUE}
        self._send(peer.link, {"op": "queue", **fields, **self._words(peer)})

    def _words(self, peer: _Peer) -> dict[str, int]:
        return {"withdrawn": int(peer.tx["withdrawn"]), "failed": int(peer.tx["failed"])}

    def _withdraw(self, keys: set[int], queues: set[int]) -> None:
        concerned = [
            peer for peer in self.peers.values() if peer.announced_keys & keys or peer.announced_queues & queues
        ]
        for peer in concerned:
            peer.tx["withdrawn"] += 1
        self._engine.write_back()
        for peer in concerned:
            words = self._words(peer)
            failed = {
                qpn for qpn in peer.announced_queues
                if qpn not in self.qps or self.qps[qpn]["state"] != QpState.RTS
            }
            peer.announced_keys -= keys
            peer.announced_queues -= queues | failed
            self._send(peer.link, {"op": "forget", "keys": sorted(keys), "queues": sorted(queues | failed), **words})
            with contextlib.suppress(OSError):  # the notifier's queue is full, or the peer is gone
                os.write(peer.link.peer_notify_fd, b"\0")
        end = time.monotonic() + _PATIENCE
        for peer in concerned:
            self._await_answer(peer, end)

    @staticmethod
    def _await_answer(peer: _Peer, end: float) -> None:
        """Wait until a peer's engine has answered, or cannot have a request in progress."""
        if peer.tx["answered"] < peer.unanswered:  # the engine has made no turn since the last wait
            return
        while peer.tx["answered"] < peer.tx["withdrawn"] and not peer.link.gone:
            if time.monotonic() > end:
                peer.unanswered = int(peer.tx["withdrawn"])
                break
            time.sleep(_POLL_INTERVAL)

    # --- handling announcements of peers ---------------------------------------------------------------------------

    def handle_message(self, link: Link, message: Body, borrowed: Callable[[int], SharedMapping | None]) -> bool:
        """Handle a message that arrived over a link. Return False if its `op` is not one of this module.

        `borrowed` returns the mapped memory of a peer's grant by number.
        """
        peer, op = self.peers.get(link), message.get("op")
        handle = {
            "reach": self._handle_reach, "key": self._handle_key, "queue": self._handle_queue,
            "forget": self._handle_forget,
        }.get(str(op))
        if handle is None:
            return False
        if peer is not None:
            try:
                handle(peer, message, borrowed)
            except (OverflowError, InvalidValueError) as error:
                logger.warning("%s ignores a message from %s: %s", self._hardware.name, link, error)
        return True

    def _handle_reach(self, peer: _Peer, message: Body, borrowed: object) -> None:
        peer.shares = message.get("sharing") == self._engine.sharing
        if peer.shares:
            for number in self.qps.given["qpn"][self.qps.given["wire"] == peer.wire].tolist():
                self.update_queue(number)

    def _handle_key(self, peer: _Peer, message: Body, borrowed: Callable[[int], SharedMapping | None]) -> None:
        fields = _numbers(message, *_KEY, "number", "offset")
        key, memory, offset = fields["key"], borrowed(fields["number"]), fields["offset"]
        if memory is None or key == 0:  # the memory could not be mapped, so requests to it go as packets
            return
        if not 0 <= offset <= offset + fields["nbytes"] <= memory.nbytes:
            raise InvalidValueError(f"{fields['nbytes']} bytes at {offset} are not in {memory.nbytes} bytes of a grant")
        row = np.zeros((), MKEY_ROW.dtype)
        for name in _KEY:
            row[name] = fields[name]
        row["key"] = key | peer.tag << _TAG_SHIFT
        row["delta"] = signed(memory.address + offset - fields["iova"])
        self._write_at(self._keys_of(peer).row_address(key), row)

    def _keys_of(self, peer: _Peer) -> MkeyTable:
        """Return the table of a peer's keys. It has the size and hence the row positions of this NIC's table."""
        if peer.keys is None:
            peer.keys = MkeyTable("key of a peer", MKEY_ROW, self.mkeys.mask + 1, shared=False)
        return peer.keys

    def _handle_queue(self, peer: _Peer, message: Body, borrowed: object) -> None:
        fields = _numbers(message, *_QUEUE)
        peer.queues[fields["qpn"]] = fields
        self._write_words(peer, message)
        if (ours := fields["remote_qpn"]) in self.qps:
            self._connect(peer, self.qps[ours])

    def _write_words(self, peer: _Peer, message: Body) -> None:
        words = np.array(list(_numbers(message, "withdrawn", "failed").values()), np.int64)
        self._write_at(peer.wire + WIRE.withdrawn, words)

    def _connect(self, peer: _Peer, row: np.void) -> None:
        """Let a queue pair access its peer without packets, if the peer is announced and connected to it."""
        fields = peer.queues.get(int(row["remote_qpn"]))
        if fields is None or fields["remote_qpn"] != row["qpn"]:
            return
        if row["wire"] != peer.wire or row["state"] != QpState.RTS:
            return
        tag = peer.tag << _TAG_SHIFT
        self._write(row, self._keys_of(peer).address, tag, fields["pdn"], fields["rights"], fields["msg_max"])

    def _handle_forget(self, peer: _Peer, message: Body, borrowed: object) -> None:
        keys, queues = _list(message, "keys"), _list(message, "queues")
        for key in keys:
            self._write_at(self._keys_of(peer).row_address(key), np.zeros((), MKEY_ROW.dtype))
        gone = {qpn for qpn in queues if peer.queues.pop(qpn, None)}
        for row in self._rows_of(peer):
            if int(row["remote_qpn"]) in gone:
                self._write(row, 0, 0, 0, 0, 0)
        self._write_words(peer, message)

    def _write(self, row: np.void, *words: int) -> None:
        """Write the words about the peer, from `peer_keys` on, into a queue pair's row."""
        address = self.qps.row_address(int(row["qpn"]))
        worker = self._components.worker_of(address)
        self._write_at(address + QP_ROW.peer_keys, np.array(words, np.int64), worker)

    def _write_at(self, address: int, data: np.void | np.ndarray, worker: int = 0) -> None:
        self._engine.post(EngineCommand.WRITE_ROW, address, data, worker=worker)


def _pipe_at(address: int) -> np.void:
    """Return a writable view of the PIPE at an address."""
    return np.frombuffer(memoryview((ctypes.c_ubyte * PIPE.size).from_address(address)), PIPE.dtype)[0]


def _numbers(message: Body, *names: str) -> dict[str, int]:
    """Return the named fields of a message. InvalidValueError if one is not a whole number."""
    numbers: dict[str, int] = {}
    for name in names:
        value = message.get(name)
        if not isinstance(value, int):
            raise InvalidValueError(f"{name} is {value!r}, not a whole number")
        numbers[name] = value
    return numbers


def _list(message: Body, name: str) -> list[int]:
    """Return a field of a message. InvalidValueError if it is not a list of whole numbers."""
    value = message.get(name)
    if not isinstance(value, list) or not all(isinstance(number, int) for number in value):
        raise InvalidValueError(f"{name} is {value!r}, not a list of whole numbers")
    return value


def signed(value: int) -> int:
    """Convert an unsigned 64-bit address or difference to the int64 with the same bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
