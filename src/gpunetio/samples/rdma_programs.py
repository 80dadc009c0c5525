"""rdma_…: two processes read, write, send and set events by tasks of the RDMA library, on the CPU.

    1. resources    device, protection domain, a memory map of 4096 bytes or a sync event, an Rdma
    2. exchange     by files: each end's description of its connection, and one of what the requester accesses; or the
                    connection manager connects them by address, and carries the latter
    3. data path    the tasks of the program: PROGRAMS names them all
    4. end          the end that is accessed or receives waits until the other end is done

Strings end with a zero byte in memory and messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from ..core import MemoryMap, RemoteMemory, Task
from ..enums import Access
from ..interrupts import until_terminated
from ..nic.engine.port import PortConfig
from ..rdma import Rdma, RdmaConnection, Read, Receive, Send, SyncEvent, SyncEventGet, SyncEventSet, Write
from ..verbs import PD
from ..verbs import open as open_device
from .descriptor_files import PERSON_SECONDS, Enter, Exchange
from .rdma_meeting import ByAddress, ByFiles, Meeting

REGION_BYTES = 4096
IMMEDIATE = 0xABCD
SET, COMPLETION = 0xD0CA, (1 << 64) - 1  # values of the sync event
PORT = 13579  # of the connection manager
WAIT_SECONDS = 10.0  # for a task, once both ends are connected

_log = logging.getLogger(__name__)
AnyTask = TypeVar("AnyTask", bound=Task)


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """The files of both connections and of the resource, and the text to send, write or read.

    With `by_address`, the connection manager connects the ends, and no files are used. The end with a `server` connects
    to it, the other end listens; both use `cm_port`.
    """

    device: str | None = None
    nic_port: PortConfig | None = None
    gid_index: int = 0
    transport: str = "RC"
    local: Path = Path("/tmp/local_connection_desc_path.txt")
    remote: Path = Path("/tmp/remote_connection_desc_path.txt")
    resource: Path = Path("/tmp/remote_resource_desc_path.txt")
    text: str = "Hi DOCA RDMA!"
    connections: int = 1
    by_address: bool = False
    server: str | None = None
    cm_port: int = PORT


class End:
    """One end of a sample: its memory, and its connections with the other end, made through `meeting`."""

    options: SampleOptions
    pd: PD
    memory: MemoryMap
    rdma: Rdma

    def __init__(self, options: SampleOptions, permissions: Access, meeting: Meeting, stack: ExitStack):
        self.options, self._meeting = options, meeting
        ctx = stack.enter_context(open_device(options.device, port=options.nic_port))
        self.pd = ctx.create_pd()
        self.memory = MemoryMap(self.pd, np.zeros(REGION_BYTES, np.uint8), Access.LOCAL_WRITE | permissions)
        self.rdma = Rdma(
            self.pd, permissions=Access.LOCAL_WRITE | permissions, gid_index=options.gid_index,
            max_connections=options.connections, transport=options.transport,
        )
        stack.enter_context(self.rdma)

    def share(self, description: bytes) -> None:
        """Tell the requester what it may access, before `connect`."""
        self._meeting.share(description)

    def connect(self) -> None:
        """Make all connections, and wait until both ends are connected."""
        self._meeting.connect(self.rdma)

    def find(self) -> RemoteMemory:
        """Return what the responder has shared."""
        return self._meeting.find()

    def finish(self) -> None:
        """Tell the other end that this end is done, or wait until it is."""
        self._meeting.finish(self.rdma)

    @property
    def connections(self) -> list[RdmaConnection]:
        """Return the connections."""
        return self._meeting.connections

    @property
    def connection(self) -> RdmaConnection:
        """Return the only connection."""
        return self.connections[0]

    @property
    def text(self) -> bytes:
        """Return the string as it is in memory."""
        return self.options.text.encode() + b"\0"

    def wait(self, done: Callable[[], bool], what: str, seconds: float) -> None:
        """Make progress until `done()` is true, or raise an error as soon as the other end has failed or left.

        TimedOutError after `seconds`; it says that `what` did not come.
        """
        self.rdma.engine.progress_until(lambda: self._is_done(done), seconds, what)

    def _is_done(self, done: Callable[[], bool]) -> bool:
        gone = self._meeting.gone()
        if gone is not None:
            self.rdma.engine.progress()  # the other end may have done its part before
        if not done() and gone is not None:
            raise gone
        return done()

    def complete(self, task: AnyTask, seconds: float = WAIT_SECONDS) -> AnyTask:
        """Wait until a submitted task has ended, and return it. Raise its error."""
        self.wait(lambda: task.done, f"the end of a {type(task).__name__} with the {self._meeting.peer}", seconds)
        return task.wait(0)


def _string(memory: MemoryMap) -> str:
    """Return the string at the start of a memory map."""
    return memory.array().tobytes().partition(b"\0")[0].decode(errors="replace")


# --- the programs ----------------------------------------------------------------------------------------------------


def _read(end: End) -> None:
    end.connect()
    end.complete(Read(end.connection, end.find(), end.memory).submit())
    _log.info('Read from responder: "%s"', _string(end.memory))


def _let_read(end: End) -> None:
    end.memory.array()[: len(end.text)] = np.frombuffer(end.text, np.uint8)
    end.share(end.memory.export_rdma())
    end.connect()


def _write(end: End, immediate: int | None = None) -> None:
    end.connect()
    end.complete(Write(end.connection, end.text, end.find(), immediate).submit())
    value = "" if immediate is None else f" with immediate value {immediate}"
    _log.info('Written to responder "%s"%s', end.options.text, value)


def _let_write(end: End) -> None:
    end.share(end.memory.export_rdma())
    end.connect()
    end.finish()
    _log.info('Requester has written: "%s"', _string(end.memory))


def _let_write_immediate(end: End) -> None:
    end.share(end.memory.export_rdma())
    end.connect()
    task = end.complete(Receive(end.rdma).submit(), PERSON_SECONDS)
    end.finish()
    _log.info('Requester has written: "%s" with immediate data: %d', _string(end.memory), task.immediate)


def _send(end: End, immediate: int | None = None) -> None:
    end.connect()
    for task in [Send(connection, end.text, immediate).submit() for connection in end.connections]:
        end.complete(task)
        _log.info("RDMA send%s task was done successfully", "" if immediate is None else " with immediate")


def _receive(end: End) -> None:
    end.connect()
    places = [MemoryMap(end.pd, np.zeros(REGION_BYTES, np.uint8), Access.LOCAL_WRITE) for _ in end.connections]
    for task, place in [(Receive(end.rdma, place).submit(), place) for place in places]:
        end.complete(task, PERSON_SECONDS)
        immediate = "" if task.immediate is None else f" with immediate: {task.immediate}"
        _log.info('Got from sender: "%s"%s', _string(place), immediate)


def _set_event(end: End) -> None:
    end.connect()
    event = end.find()
    _log.info("Signaling remote sync event")
    end.complete(SyncEventSet(end.connection, event, SET).submit())
    get = SyncEventGet(end.connection, event)
    while end.complete(get.submit()).value == SET:
        pass
    _log.info("Received sync event value 0x%X", get.value)
    _log.info("Notifying remote sync event for completion")
    end.complete(SyncEventSet(end.connection, event, COMPLETION).submit())


def _wait_for_event(end: End) -> None:
    with SyncEvent(end.pd) as event:
        end.share(event.export())
        end.connect()
        _log.info("Waiting for sync event to be signaled from remote")
        _wait_gt(end, event, SET - 1)
        _log.info("Signaling sync event")
        event.value = SET + 1
        _log.info("Waiting for sync event to be notified for completion")
        _wait_gt(end, event, COMPLETION - 1)


def _wait_gt(end: End, event: SyncEvent, value: int) -> None:
    end.wait(lambda: event.value > value, f"a sync event above {value:#x}", PERSON_SECONDS)


@dataclass(frozen=True)
class Program:
    """A program: its function, the program at the other end, and the accesses that it allows to the memory here."""

    run: Callable[[End], None]
    peer: str
    permissions: Access = Access.LOCAL_READ

    @property
    def acts(self) -> bool:
        """Return whether this end accesses or sends."""
        return self.peer in ("responder", "receiver")


PROGRAMS = {
    "read_requester":            Program(_read, "responder"),
    "read_responder":            Program(_let_read, "requester", Access.REMOTE_READ),
    "write_requester":           Program(_write, "responder"),
    "write_responder":           Program(_let_write, "requester", Access.REMOTE_WRITE),
    "write_immediate_requester": Program(partial(_write, immediate=IMMEDIATE), "responder"),
    "write_immediate_responder": Program(_let_write_immediate, "requester", Access.REMOTE_WRITE),
    "send":                      Program(_send, "receiver"),
    "receive":                   Program(_receive, "sender"),
    "send_immediate":            Program(partial(_send, immediate=IMMEDIATE), "receiver"),
    "receive_immediate":         Program(_receive, "sender"),
    "sync_event_requester":      Program(_set_event, "responder"),
    "sync_event_responder":      Program(_wait_for_event, "requester", Access.REMOTE_WRITE | Access.REMOTE_ATOMIC),
    "multi_conn_send":           Program(_send, "receiver"),
    "multi_conn_receive":        Program(_receive, "sender"),
}


def run(name: str, options: SampleOptions, enter: Enter = lambda: False) -> None:
    """Run a program. `enter` returns whether Enter was pressed, for ends that are on different hosts."""
    _log.info("Starting the sample")
    program = PROGRAMS[name]
    with until_terminated(), ExitStack() as stack:
        meeting = _meeting(options, program, enter, stack)
        end = End(options, program.permissions, meeting, stack)
        program.run(end)
        end.finish()
    _log.info("Sample finished successfully")


def _meeting(options: SampleOptions, program: Program, enter: Enter, stack: ExitStack) -> Meeting:
    if options.by_address:
        return ByAddress(options.server, options.cm_port, options.connections, program.peer, program.acts)
    files = stack.enter_context(Exchange(options.local, options.remote, options.connections, program.peer, enter))
    return ByFiles(files, options.resource, program.peer, program.acts)
