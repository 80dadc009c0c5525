"""Reach: requests without packets to a NIC of another process, where GPUs make the turns of both.

A NIC tells the NIC at the other end of a link which regions lie in GPU memory, and which queue pairs are in RTS. The
other NIC's engine then executes WRITEs, READs and atomics to them by itself, as between two queue pairs of one NIC
(gpu/runs.py): it checks keys, bounds and rights, and copies over NVLink. All other requests, and all that fail a check,
go as packets.

What was told is withdrawn before it ends. Two words in the pipe do that (fabric/frames.py, PIPE), because a message to
the other process may take long. The NIC counts up `withdrawn`, and waits for `answered`. The other engine answers
between its turns, and has no request under way then. From then on its requests go as packets, until its host has taken
in the message that says what was withdrawn. An engine also looks at `withdrawn` before it takes new turns, so if there
is no answer, none is at work. A queue pair that fails counts up `failed`, for the same effect without the wait.

Messages over a link have `op`: "reach", with how memory is shared, begins; "key" and "queue" tell of one; "forget"
lists `keys` and `queues` that end. "queue" and "forget" carry the words of the pipe that they know of. Of the memory
itself tells grants.py.
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
from ...engine.hardware import Hardware, Opened
from ...state.objects import MKEY_ROW
from ...state.qp import QP_ROW
from ...state.tables import MkeyTable, Row, Table
from ...state.wire import WIRE
from ...turn.commands import EngineCommand
from ..components import Components

logger: logging.Logger = logging.getLogger("gpunetio.nic")

_PATIENCE = 1.0  # seconds: an engine that makes turns answers within a slice
_LOOK = 20e-6
_TAG_SHIFT = 32
_KEY = ("key", "pdn", "access", "iova", "nbytes")  # of a MKEY_ROW, in messages
_QUEUE = ("qpn", "remote_qpn", "pdn", "rights", "msg_max")  # of a QP_ROW


@dataclass
class _Peer:
    """A NIC at the other end of a link: its wire, the PIPE to it, and what is known of it."""

    link: Link
    wire: int
    tag: int
    tx: np.void
    shares: bool = False  # its memory as we do
    keys: MkeyTable | None = None  # of its regions
    queues: dict[int, dict[str, int]] = field(default_factory=dict)  # of its queue pairs, by number
    told_keys: set[int] = field(default_factory=set)
    told_queues: set[int] = field(default_factory=set)
    unanswered: int = 0  # what its engine did not answer in time


class Reach:
    """What a NIC reaches of others without packets, and what others reach of it. Callers hold the NIC's lock.

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

    def join(self, link: Link, wire: int) -> None:
        """Begin with the peer of a new wire over a link."""
        if link.talks and self._enabled:
            tags = {peer.tag for peer in self.peers.values()}
            tag = next(tag for tag in range(1, len(tags) + 2) if tag not in tags)
            self.peers[link] = _Peer(link, wire, tag, _pipe_at(link.tx))
            self._send(link, {"op": "reach", "sharing": self._engine.sharing})

    def leave(self, link: Link) -> None:
        """Forget a peer. Idempotent."""
        if (peer := self.peers.pop(link, None)) is not None:
            if self._engine.running:
                for row in self._rows_of(peer):
                    self._write(row, 0, 0, 0, 0, 0)
            if peer.keys:
                peer.keys.close()

    def close(self) -> None:
        """Release what is known of others. The engine has stopped."""
        for peer in self.peers.values():
            if peer.keys:
                peer.keys.close()
        self.peers.clear()

    def _rows_of(self, peer: _Peer) -> list[np.void]:
        """Return the rows of our queue pairs that reach a peer."""
        return [row for row in self.qps.given if row["wire"] == peer.wire and row["peer_keys"]]

    def _send(self, link: Link, message: Body) -> None:
        try:
            link.send(message)
        except OSError as error:  # the peer does not read its messages, or is gone
            logger.info("%s cannot send %s the message %s: %s", self._hardware.name, link, message, error)

    # --- what we tell ----------------------------------------------------------------------------------------------

    def tell_key(self, row: Row, number: int, offset: int) -> None:
        """Tell of a region that lies at `offset` in the memory of the grant `number`."""
        for peer in self.peers.values():
            if peer.shares:
                self._tell_key(peer, row, number, offset)

    def tell_key_to(self, link: Link, row: Row, number: int, offset: int) -> None:
        """Do what `tell_key` does, for one peer."""
        self._tell_key(self.peers[link], row, number, offset)

    def _tell_key(self, peer: _Peer, row: Row, number: int, offset: int) -> None:
        facts = {name: int(row[name]) for name in _KEY}
        peer.told_keys.add(facts["key"])
        self._send(peer.link, {"op": "key", **facts, "number": number, "offset": offset})

    def withdraw_key(self, key: int) -> None:
        """Withdraw a region, whose key is not valid any more. Afterwards no peer touches it without packets."""
        self._withdraw({key}, set())

    def look_at(self, qpn: int) -> None:
        """Take in that the state of a queue pair, or whether it exists, may have changed."""
        row = self.qps[qpn] if qpn in self.qps else None
        ready = row is not None and row["state"] == QpState.RTS and row["service"] == ServiceType.RC
        told = [peer for peer in self.peers.values() if qpn in peer.told_queues]
        if told:
            self._withdraw(set(), {qpn})
        if row is not None and ready:
            for peer in self.peers.values():
                if peer.wire == row["wire"] and peer.shares:
                    self._tell_queue(peer, row)
                    self._connect(peer, row)

    def _tell_queue(self, peer: _Peer, row: np.void) -> None:
        peer.told_queues.add(int(row["qpn"]))
        facts = {name: int(row[name]) for name in _QUEUE}
        self._send(peer.link, {"op": "queue", **facts, **self._words(peer)})

    def _words(self, peer: _Peer) -> dict[str, int]:
        return {"withdrawn": int(peer.tx["withdrawn"]), "failed": int(peer.tx["failed"])}

    def _withdraw(self, keys: set[int], queues: set[int]) -> None:
        concerned = [peer for peer in self.peers.values() if peer.told_keys & keys or peer.told_queues & queues]
        for peer in concerned:
            peer.tx["withdrawn"] += 1
        self._engine.recall()
        for peer in concerned:
            words = self._words(peer)
            failed = {qpn for qpn in peer.told_queues if qpn not in self.qps or self.qps[qpn]["state"] != QpState.RTS}
            peer.told_keys -= keys
            peer.told_queues -= queues | failed
            self._send(peer.link, {"op": "forget", "keys": sorted(keys), "queues": sorted(queues | failed), **words})
            with contextlib.suppress(OSError):  # its queue is full, or it is gone
                os.write(peer.link.peer_notify_fd, b"\0")
        end = time.monotonic() + _PATIENCE
        for peer in concerned:
            self._await_answer(peer, end)

    @staticmethod
    def _await_answer(peer: _Peer, end: float) -> None:
        """Wait until a peer's engine has answered, or until it cannot be at work."""
        if peer.tx["answered"] < peer.unanswered:  # it has taken no turn since the last wait
            return
        while peer.tx["answered"] < peer.tx["withdrawn"] and not peer.link.gone:
            if time.monotonic() > end:
                peer.unanswered = int(peer.tx["withdrawn"])
                break
            time.sleep(_LOOK)

    # --- what we are told ------------------------------------------------------------------------------------------

    def hear(self, link: Link, message: Body, borrowed: Callable[[int], Opened | None]) -> bool:
        """Handle a message that came over a link. Return False if it is about something else.

        `borrowed` gives the memory of a peer's grant, as it is mapped here.
        """
        peer, op = self.peers.get(link), message.get("op")
        handle = {"reach": self._begin, "key": self._learn_key, "queue": self._learn_queue, "forget": self._forget}.get(
            str(op)
        )
        if handle is None:
            return False
        if peer is not None:
            try:
                handle(peer, message, borrowed)
            except (OverflowError, InvalidValueError) as error:
                logger.warning("%s ignores a message from %s: %s", self._hardware.name, link, error)
        return True

    def _begin(self, peer: _Peer, message: Body, borrowed: object) -> None:
        peer.shares = message.get("sharing") == self._engine.sharing
        if peer.shares:
            for number in self.qps.given["qpn"][self.qps.given["wire"] == peer.wire].tolist():
                self.look_at(number)

    def _learn_key(self, peer: _Peer, message: Body, borrowed: Callable[[int], Opened | None]) -> None:
        facts = _numbers(message, *_KEY, "number", "offset")
        key, memory, offset = facts["key"], borrowed(facts["number"]), facts["offset"]
        if memory is None or key == 0:  # its memory could not be mapped, so packets bring it
            return
        if not 0 <= offset <= offset + facts["nbytes"] <= memory.nbytes:
            raise InvalidValueError(f"{facts['nbytes']} bytes at {offset} are not in {memory.nbytes} bytes of a grant")
        row = np.zeros((), MKEY_ROW.dtype)
        for name in _KEY:
            row[name] = facts[name]
        row["key"] = key | peer.tag << _TAG_SHIFT
        row["delta"] = signed(memory.address + offset - facts["iova"])
        self._write_at(self._keys_of(peer).row_address(key), row)

    def _keys_of(self, peer: _Peer) -> MkeyTable:
        """Return the table of a peer's keys, whose rows are where those of our own are."""
        if peer.keys is None:
            peer.keys = MkeyTable("key of a peer", MKEY_ROW, self.mkeys.mask + 1, shared=False)
        return peer.keys

    def _learn_queue(self, peer: _Peer, message: Body, borrowed: object) -> None:
        facts = _numbers(message, *_QUEUE)
        peer.queues[facts["qpn"]] = facts
        self._learn_words(peer, message)
        if (ours := facts["remote_qpn"]) in self.qps:
            self._connect(peer, self.qps[ours])

    def _learn_words(self, peer: _Peer, message: Body) -> None:
        words = np.array(list(_numbers(message, "withdrawn", "failed").values()), np.int64)
        self._write_at(peer.wire + WIRE.withdrawn, words)

    def _connect(self, peer: _Peer, row: np.void) -> None:
        """Have a queue pair reach its peer, if that is known and connected to it."""
        facts = peer.queues.get(int(row["remote_qpn"]))
        if facts is None or facts["remote_qpn"] != row["qpn"]:
            return
        if row["wire"] != peer.wire or row["state"] != QpState.RTS:
            return
        tag = peer.tag << _TAG_SHIFT
        self._write(row, self._keys_of(peer).address, tag, facts["pdn"], facts["rights"], facts["msg_max"])

    def _forget(self, peer: _Peer, message: Body, borrowed: object) -> None:
        keys, queues = _list(message, "keys"), _list(message, "queues")
        for key in keys:
            self._write_at(self._keys_of(peer).row_address(key), np.zeros((), MKEY_ROW.dtype))
        gone = {qpn for qpn in queues if peer.queues.pop(qpn, None)}
        for row in self._rows_of(peer):
            if int(row["remote_qpn"]) in gone:
                self._write(row, 0, 0, 0, 0, 0)
        self._learn_words(peer, message)

    def _write(self, row: np.void, *words: int) -> None:
        """Have the engine write what a queue pair knows of its peer."""
        address = self.qps.row_address(int(row["qpn"]))
        worker = self._components.worker_of(address)
        self._write_at(address + QP_ROW.peer_keys, np.array(words, np.int64), worker)

    def _write_at(self, address: int, data: np.void | np.ndarray, worker: int = 0) -> None:
        self._engine.post(EngineCommand.WRITE_ROW, address, data, worker=worker)


def _pipe_at(address: int) -> np.void:
    """Return the PIPE at an address, to read and write."""
    return np.frombuffer(memoryview((ctypes.c_ubyte * PIPE.size).from_address(address)), PIPE.dtype)[0]


def _numbers(message: Body, *names: str) -> dict[str, int]:
    """Return whole numbers of a message. InvalidValueError if one is none."""
    numbers: dict[str, int] = {}
    for name in names:
        value = message.get(name)
        if not isinstance(value, int):
            raise InvalidValueError(f"{name} is {value!r}, not a whole number")
        numbers[name] = value
    return numbers


def _list(message: Body, name: str) -> list[int]:
    """Return a list of whole numbers of a message. InvalidValueError if it is none."""
    value = message.get(name)
    if not isinstance(value, list) or not all(isinstance(number, int) for number in value):
        raise InvalidValueError(f"{name} is {value!r}, not a list of whole numbers")
    return value


def signed(value: int) -> int:
    """Return an address or a difference as the int64 with the same bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
