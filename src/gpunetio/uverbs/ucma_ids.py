"""Open files of /dev/infiniband/rdma_cm: the `rdma_cm_id`s in them, and the events that the program has not taken."""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import socket
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from ..cm.agent import Agent
from ..cm.communication import Communication, Listening
from ..cm.event import Event as Told
from ..cm.path import Path
from ..errors import DocaError
from ..formats.cm import PortSpace
from . import ucma_abi
from .call import Refused
from .sockaddr import Address
from .ucma_abi import Option
from .ucma_devices import Device, Devices
from .ucma_watch import PeerWatch

_PSN_BITS = 24
_LAST_WORDS = 1.0  # seconds that peers have to answer when a program ends


@dataclass(eq=False)
class CmId:
    """An identifier, librdmacm's `rdma_cm_id`.

    `uid` is the program's name for it. While that is 0, the program gets no events. `source` and `peer` are addresses
    as far as they are known, `path` leads to the peer. `psn` is that of the first packet that its queue pair expects.
    """

    number: int
    uid: int
    file: CmFile
    space: PortSpace
    source: Address | None = None
    peer: Address | None = None
    device: Device | None = None
    path: Path | None = None
    resolving: bool = False  # the peer's address is being resolved
    routed: bool = False
    passive: bool = False  # made for a peer's request
    communication: Communication | None = None
    listenings: list[tuple[Device, Listening]] = field(default_factory=list)
    options: dict[ucma_abi.Option, int] = field(default_factory=dict)
    psn: int = field(default_factory=lambda: secrets.randbits(_PSN_BITS))
    reported: int = 0  # events that the program has taken

    def __str__(self) -> str:
        return f"rdma_cm_id {self.number}"

    def only(self, source: Address) -> int | None:
        """Return the only family that it takes at an address (Linux: rdma_bind_addr), or None for IPv6 with IPv4."""
        return source.family if source.family == socket.AF_INET or Option.AFONLY in self.options else None

    def the_device(self) -> Device:
        """Return its device. Refused with EINVAL if it has none yet."""
        if self.device is None:
            raise Refused(errno.EINVAL, f"{self} belongs to no device yet: its address is not resolved")
        return self.device

    def the_communication(self) -> Communication:
        """Return its communication. Refused with EINVAL if it has none."""
        if self.communication is None:
            raise Refused(errno.EINVAL, f"{self} is not connected, and no peer has asked for it")
        return self.communication


@dataclass
class Pending:
    """An event that the program has not taken. For a request to the listener `about`, `made` is its new identifier."""

    about: CmId
    event: ucma_abi.Event
    status: int = 0
    param: bytes = b""
    made: CmId | None = None


class CmFile:
    """One open of the device file. The program's `descriptor` becomes readable when there is an event."""

    def __init__(self, manager: Manager, descriptor: int):
        self._manager, self.descriptor = manager, descriptor
        self._pending: deque[Pending] = deque()
        self._event = os.eventfd(0, os.EFD_CLOEXEC)
        os.dup2(self._event, descriptor, inheritable=False)

    # The descriptor counts 1 while something is pending. It is read only then, so the read never blocks, whatever
    # flags the program has set.

    def add(self, pending: Pending) -> None:
        """Add an event, and take over the identifier that it brings. The manager's queue lock is held."""
        if pending.made is not None:
            pending.made.file = self  # the listener may have moved since the peer's request
        if not self._pending:
            os.eventfd_write(self._event, 1)
        self._pending.append(pending)

    def take(self) -> Pending | None:
        """Take the oldest event, if there is one."""
        with self._manager.queue_lock:
            if not self._pending:
                return None
            taken = self._pending.popleft()
            if not self._pending:
                os.eventfd_read(self._event)
            return taken

    def extract(self, about: CmId) -> list[Pending]:
        """Remove and return the events about an identifier. The manager's queue lock is held."""
        taken = [pending for pending in self._pending if pending.about is about]
        if taken:
            self._pending = deque(pending for pending in self._pending if pending.about is not about)
            if not self._pending:
                os.eventfd_read(self._event)
        return taken

    def withdraw(self, made: CmId) -> bool:
        """Remove the request that made an identifier. Return whether it was there. The manager's queue lock is held."""
        left = deque(pending for pending in self._pending if pending.made is not made)
        found = len(left) < len(self._pending)
        self._pending = left
        if found and not left:
            os.eventfd_read(self._event)
        return found

    def close(self) -> None:
        """Destroy its identifiers, and give peers a moment to answer, because the process may end now."""
        with self._manager.lock:
            for cm_id in self._manager.ids_of(self):
                self._manager.destroy(cm_id)
        self._manager.say_goodbye()
        os.close(self._event)


class Manager:
    """All identifiers of this process.

    `lock` serializes commands. `queue_lock` protects identifiers' names and events, which agents' threads also use;
    nothing is called while it is held.
    """

    def __init__(self, devices: Devices):
        self.devices = devices
        self.lock = threading.RLock()
        self.queue_lock = threading.Lock()
        self._ids: dict[int, CmId] = {}
        self._numbers = itertools.count(1)
        self._watch: PeerWatch | None = None

    def new(self, file: CmFile, uid: int, space: PortSpace) -> CmId:
        """Return a new identifier."""
        with self.queue_lock:
            made = CmId(next(self._numbers), uid, file, space)
            self._ids[made.number] = made
        return made

    def get(self, number: int, file: CmFile | None = None) -> CmId:
        """Return an identifier. Refused with ENOENT if there is none, and with EINVAL if another file has it."""
        found = self._ids.get(number)
        if found is None:
            raise Refused(errno.ENOENT, f"there is no rdma_cm_id {number}")
        if file is not None and found.file is not file:
            raise Refused(errno.EINVAL, f"{found} belongs to another channel")
        return found

    def ids(self) -> list[CmId]:
        """Return all identifiers."""
        with self.queue_lock:
            return list(self._ids.values())

    def ids_of(self, file: CmFile) -> list[CmId]:
        """Return the identifiers of a file."""
        return [cm_id for cm_id in self.ids() if cm_id.file is file]

    def add(self, pending: Pending) -> None:
        """Queue an event for the program, unless the program has no name for the identifier yet."""
        with self.queue_lock:
            if pending.about.uid and pending.about.number in self._ids:
                pending.about.file.add(pending)

    def withdraw(self, made: CmId) -> bool:
        """Take back the request of a peer that has given up. Return False if the program has taken it.

        Otherwise strangers who ask and give up could fill memory while the program does something else.
        """
        with self.queue_lock:
            withdrawn = made.file.withdraw(made)
            if withdrawn:
                self._ids.pop(made.number, None)
            return withdrawn

    def move(self, cm_id: CmId, file: CmFile) -> None:
        """Move an identifier and its events to another file."""
        with self.queue_lock:
            for pending in cm_id.file.extract(cm_id):
                file.add(pending)
            cm_id.file = file

    def destroy(self, cm_id: CmId) -> None:
        """Stop and forget an identifier, and those that were made for it and that the program has not taken."""
        for device, listening in cm_id.listenings:
            with suppress(DocaError), device.agent.machine() as machine:
                machine.stop_listening(listening)
        communication = cm_id.communication
        if communication is not None:
            with suppress(DocaError), cm_id.the_device().agent.machine() as machine:
                communication.notify = _ignore
                machine.give_up(communication)
        with self.queue_lock:
            left = cm_id.file.extract(cm_id)
            self._ids.pop(cm_id.number, None)
        for pending in left:
            if pending.made is not None:
                self.destroy(pending.made)

    def watch(self, communication: Communication) -> None:
        """From now on, notice when the peer's process ends."""
        if self._watch is None:
            self._watch = PeerWatch(self._connections)
        self._watch.begin(communication)

    def _connections(self) -> list[tuple[Agent, Communication]]:
        return [
            (cm_id.device.agent, cm_id.communication) for cm_id in self.ids()
            if cm_id.device is not None and cm_id.communication is not None
        ]

    def say_goodbye(self) -> None:
        """Wait up to a second for peers that have to answer."""
        for device in self.devices.opened:
            with suppress(DocaError):
                device.agent.quiet(_LAST_WORDS)

    def close(self) -> None:
        """End everything, because the program ends."""
        if self._watch is not None:
            self._watch.stop()
        with self.lock:
            for cm_id in self.ids():
                self.destroy(cm_id)
            self.devices.close()


def _ignore(communication: Communication, told: Told) -> None:
    """Ignore an event of a communication that the program has left."""
