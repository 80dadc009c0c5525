"""A wire that carries Ethernet frames: the memory that the engine and the neighbour thread share, and the egresses.

The engine reads and writes frames through a descriptor (ethernet_receive.py, ethernet_transmit.py). It passes frames of
ARP and of neighbour discovery to a thread (neighbours.py), through a socket, and sends what that thread puts into a
pipe.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Container, Sequence

import numpy as np

from ..errors import NoMemoryError
from ..formats.packet import IPV4_MAPPED, ROCE_UDP_PORT
from ..jit.compile import engine_function
from ..jit.ops import copy
from ..memory import HostMemory, round_up
from .claims import close_after_fork
from .ethernet_records import (
    ARRIVED, BATCH, CONTROL_ROOM, EGRESS, EGRESSES, ETHERNET_WIRE, FRAME_ROOM, FRAME_SLOT, FRAME_START, FRAME_STRIDE,
    LENGTH, OWN_GID, READ_ROOM, SCRATCH, SENDING, SEND_SLOT, STREAM, VIRTIO_NET,
)
from .frames import ETHERNET_FRAME, PACKET, PIPE_END, Frame, PipeEnd, commit, pipe_end, pipe_size, publish, reserve
from .neighbours import Gid, Neighbours
from .notifier import Notifier
from .offloads import LARGE_FRAME
from .udp_records import IOVEC, MMSGHDR

PACKETS, REPLIES = 1 << 20, 1 << 16  # bytes of the pipes
REST = LENGTH + SCRATCH + FRAME_ROOM  # bytes of an outgoing frame


@engine_function
def _put(end: PipeEnd, frame: int, nbytes: int) -> int:
    """Put a frame into the pipe. Return 1, or 0 if the pipe is full."""
    place = Frame(reserve(end, nbytes))
    if place == 0:
        return 0
    place.nbytes, place.reference = nbytes, ETHERNET_FRAME
    copy(place + PACKET, frame, nbytes)
    commit(end)
    publish(end)
    return 1


class EthernetWire:
    """A wire for frames through the descriptor `fd`: `address` is the record for compiled code, `record` a view of it.

    `reading` is FILE, SOCKET, STREAM or DATAGRAM_SOCKET (ethernet_records.py); the last one sends to the socket address
    `send_to`. With `offloads`, a VIRTIO_NET precedes each frame in both directions. `name` is the wire's name in
    messages. `tx` is the end of the pipe that takes packets. `events` are descriptors that wake the engine. A thread
    calls `on_gone` when the other end of the descriptor turns out to be gone.
    """

    record: np.void
    address: int
    tx: np.ndarray
    events: tuple[int, ...]
    neighbours: Neighbours

    def __init__(
        self, name: str, fd: int, reading: int, mac: bytes, gids: Sequence[Gid],
        on_gone: Callable[[], None] = lambda: None, promiscuous: bool = True, send_to: bytes = b"",
        offloads: bool = False,
    ):
        self._name, self._mac, self._gids = name, mac, tuple(gids)
        self._egresses: dict[tuple[bytes, int, int], int] = {}  # by MAC, GID index, and UDP port
        self._lock, self._on_gone = threading.Lock(), on_gone
        self._closed = self._lost = False
        _put.compile()
        with contextlib.ExitStack() as undo:
            self._lay_out(fd, reading, send_to, VIRTIO_NET.size if offloads else 0)
            self.record["promiscuous"] = promiscuous
            undo.callback(self._memory.close)
            self._bell = Notifier()
            undo.callback(self._close_bell)
            self.events = (self._bell.fd,)
            engine, thread = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(thread.close)
            self._silent, *others = socket.socketpair()
            for end in (self._silent, *others):
                undo.callback(end.close)
            self.record["thread"] = engine.fileno()
            undo.enter_context(contextlib.closing(engine))
            self.neighbours = Neighbours(name, mac, gids, thread, self.send, self._look)
            undo.callback(self.neighbours.join)
            undo.callback(engine.close)  # closing it ends the thread
            for end in (engine, thread):
                close_after_fork(end)
            self._undo = undo.pop_all()

    def _lay_out(self, fd: int, reading: int, send_to: bytes, virtio: int) -> None:
        sizes = (
            ETHERNET_WIRE.size, 3 * PIPE_END.size, pipe_size(PACKETS), pipe_size(REPLIES), SCRATCH, FRAME_ROOM,
            SENDING * MMSGHDR.size, SENDING * SEND_SLOT.size, REST, len(self._gids) * OWN_GID.size,
            EGRESSES * EGRESS.size, 2 * BATCH * ARRIVED.size, BATCH * MMSGHDR.size, BATCH * FRAME_SLOT.size,
            (2 if virtio else 1) * BATCH * FRAME_STRIDE + FRAME_START, LARGE_FRAME.size, len(send_to),
        )
        places = np.cumsum([0, *(round_up(size, 64) for size in sizes)])
        self._memory = HostMemory(int(places[-1]))
        self.address = self._memory.address
        (_, ends, packets, replies, scratch, outgoing, messages, sending, rest, gids, egresses, arrived, vector, slots,
         buffers, cutting, address) = (int(place) for place in places[:-1])

        def at(place: int) -> int:
            return self.address + place

        three = self._memory.view(PIPE_END.dtype, ends, 3)
        self.tx = pipe_end(at(packets), PACKETS)
        three[0], three[1], three[2] = self.tx, pipe_end(at(replies), REPLIES), pipe_end(at(replies), REPLIES)
        self._replies = at(ends) + 2 * PIPE_END.size
        self._outgoing, self._outgoing_at = self._memory.array[outgoing : outgoing + FRAME_ROOM], at(outgoing)
        own = self._memory.view(OWN_GID.dtype, gids, len(self._gids))
        for row, gid in zip(own, self._gids, strict=True):
            row["high"], row["low"] = np.frombuffer(gid, np.int64)
        self._rows = self._memory.view(EGRESS.dtype, egresses, EGRESSES)
        rows = self._memory.view(ARRIVED.dtype, arrived, 2 * BATCH if virtio else BATCH)
        headers_of, slot_of = (
            self._memory.view(entry.dtype, place, BATCH) for entry, place in ((MMSGHDR, vector), (FRAME_SLOT, slots))
        )
        rows["frame"] = at(buffers) + FRAME_START + FRAME_STRIDE * np.arange(len(rows))
        starts = at(slots) + FRAME_SLOT.size * np.arange(BATCH)
        headers_of["control"], headers_of["control_length"] = starts + FRAME_SLOT.control, CONTROL_ROOM
        headers_of["iov"], headers_of["iov_length"] = starts + FRAME_SLOT.iov, 1
        slot_of["iov"][:, 0], slot_of["iov"][:, 1] = rows["frame"][:BATCH] - virtio, READ_ROOM

        self.record = record = self._memory.view(ETHERNET_WIRE.dtype)[0]
        record["tx"], record["replies"] = at(ends), at(ends) + PIPE_END.size
        record["fd"], record["reading"] = fd, reading
        record["mac"] = int.from_bytes(self._mac, "little")
        record["gids"], record["gid_count"] = at(gids), len(self._gids)
        record["egresses"], record["scratch"], record["virtio"] = at(egresses), at(scratch), virtio
        record["messages"], record["sending"], record["rest"] = at(messages), at(sending), at(rest)
        record["arrived"], record["first"], record["vector"] = at(arrived), at(arrived), at(vector)
        record["segments"], record["cutting"] = at(arrived) + BATCH * ARRIVED.size, at(cutting)
        record["buffer"] = at(buffers)
        message = self._memory.view(MMSGHDR.dtype, messages, SENDING)
        first = 0 if reading == STREAM else 1  # of the pieces
        message["iov"] = at(sending) + SEND_SLOT.iov + IOVEC.size * first + SEND_SLOT.size * np.arange(SENDING)
        if send_to:
            self._memory.array[address : address + len(send_to)] = np.frombuffer(send_to, np.uint8)
            message["name"], message["name_length"] = at(address), len(send_to)

    def send(self, frame: bytes) -> None:
        """Have the engine send a frame. It is lost if the pipe is full: the engine is paused, or the wire is slow."""
        with self._lock:  # threads that look for a neighbour may call this while the wire closes
            if self._closed:
                return
            self._outgoing[: len(frame)] = np.frombuffer(frame, np.uint8)
            _put(self._replies, self._outgoing_at, len(frame))
            self._bell.notify()

    def _close_bell(self) -> None:
        with self._lock:
            self._closed = True
            self._bell.close()

    def unplug(self) -> None:
        """Replace a descriptor whose other end is gone by a silent socket: `poll` would return at once for the old one.

        Call this only while `gone` is set. Everything that is sent afterwards is lost.
        """
        os.dup2(self._silent.fileno(), int(self.record["fd"]), inheritable=False)

    def plug(self, fd: int) -> None:
        """Have the engine use a duplicate of another descriptor. Call this only while `gone` is set."""
        os.dup2(fd, int(self.record["fd"]), inheritable=False)
        for field in ("begin", "end", "rest_at", "rest_end", "read_at", "read_end"):
            self.record[field] = 0
        self.record["gone"] = 0
        self._lost = False
        self._bell.notify()

    def _look(self) -> None:
        """Unplug the wire and call `on_gone` if the other end is gone, once each time."""
        if self.record["gone"] and not self._lost:
            self._lost = True
            self.unplug()
            self._on_gone()

    # --- egresses --------------------------------------------------------------------------------------------------

    def egress(self, gid: Gid, index: int, port: int, used: Container[int], synchronize: Callable[[], None]) -> int:
        """Return the source for frames to the neighbour `gid`, from the GID with this index and this UDP port.

        Port 0 means RoCE's. If all sources are taken, one that is not in `used` is replaced, but never one for RoCE's
        port, because address handles use those. `synchronize` must return only once no thread is in `transmit_frames`.
        NotFoundError if the neighbour's MAC was never learned: the caller resolves it first, because the NIC is locked
        now.
        """
        key = self.neighbours.last(gid), index, port or ROCE_UDP_PORT
        if (known := self._egresses.get(key)) is not None:
            return known
        if len(self._egresses) < EGRESSES:
            egress = len(self._egresses)
        else:
            old = next((k for k, e in self._egresses.items() if k[2] != ROCE_UDP_PORT and e not in used), None)
            if old is None:
                raise NoMemoryError(f"{self._name}: {EGRESSES} pairs of a peer and a UDP source port are in use")
            egress = self._egresses.pop(old)
            self._rows[egress]["version"] = 0
            synchronize()
        row, own = self._rows[egress], self._gids[index]
        row["mac"], row["port"] = int.from_bytes(key[0], "little"), key[2]
        row["gid_high"], row["gid_low"] = np.frombuffer(own, np.int64)
        row["version"] = 4 if own.startswith(IPV4_MAPPED) else 6
        self._egresses[key] = egress
        return egress

    def close(self) -> None:
        """End the thread, and free the memory. The engine must not use it any more. `fd` stays open."""
        self._undo.close()
