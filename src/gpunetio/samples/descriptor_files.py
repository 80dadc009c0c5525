"""Descriptions that the two ends of a sample exchange through files, as DOCA's samples of RDMA do.

An end writes a file, the other end reads it, and deletes it when it has done what the writer waits for. That tells the
writer, if both run on one host. Between hosts, a person copies the files and presses Enter.

The first line of a file names the process that wrote it. If that process ran on this machine and has ended, the file is
left over from an earlier run, and is ignored. An end that fails leaves a note for the other end in place of its first
file.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import TracebackType
from typing import Self

from ..errors import InvalidValueError, NotSupportedError, TimedOutError
from ..interrupts import deferred
from ..rendezvous import PeerError, PeerInterrupted
from ..trusted import open_input

PERSON_SECONDS = 600.0  # for a person to start the other end, or to copy a file
LOOK_SECONDS = 0.01
_MOST_BYTES = 4096  # of a file
_MOST_TEXT = 1000  # bytes of an error in a note

_DESCRIPTION, _FAILURE, _INTERRUPTION = "description", "failure", "interruption"
_MAGIC = b"gpunetio-rdma "
_NOBODY = "unknown:0:0"
_PROCESS = r"[\w.-]{1,64}:\d{1,10}:\d{1,20}"
# The process that writes, the process that it writes for or "-", the kind, how many connections the writer has, and how
# many bytes follow.
_FIRST_LINE = re.compile(
    rf"({_PROCESS}) ({_PROCESS}|-) ({_DESCRIPTION}|{_FAILURE}|{_INTERRUPTION}) (\d{{1,4}}) (\d{{1,4}})\n".encode()
)


Enter = Callable[[], bool]  # whether Enter was pressed since the last call


@dataclass(frozen=True)
class _File:
    """The contents of a file."""

    writer: str
    reader: str
    kind: str
    connections: int
    body: bytes


class Exchange:
    """The files of one end. As a context manager, it deletes its own files at the end.

    `mine` and `theirs` are the files of this end's connections and of the other end's. `who` is the other end.
    """

    mine: list[Path]
    theirs: list[Path]

    def __init__(self, local: Path, remote: Path, connections: int, who: str, enter: Enter):
        self.mine, self.theirs = ([_numbered(path, n) for n in range(connections)] for path in (local, remote))
        self._connections, self._who, self._enter = connections, who, enter
        self._me = _process(os.getpid()) or _NOBODY
        self._peer = ""  # the process that has written the files that this end has read
        self._written: list[Path] = []
        self._gone: PeerError | None = None
        self._next_look = 0.0

    def __enter__(self) -> Self:
        return self

    @deferred()
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for path in self._written:
            path.unlink(missing_ok=True)
        with suppress(OSError, InvalidValueError):
            found = _parse(self.theirs[0])
            if found is not None and found.reader == self._me:
                self.theirs[0].unlink()  # the other end has failed as well, and will not read it
            elif error is not None:
                self._leave_note(error, self._peer or (found.writer if found else ""))

    def _leave_note(self, error: BaseException, peer: str) -> None:
        """Tell the other end, if it runs on this machine, that this end has failed."""
        if not _runs_here(peer):
            return
        if isinstance(error, Exception):
            kind, text = _FAILURE, str(error) or type(error).__name__
        else:
            kind, text = _INTERRUPTION, ""
        _write(self.mine[0], self._file(kind, text.encode(errors="replace")[:_MOST_TEXT], peer))

    def _file(self, kind: str, body: bytes, reader: str = "-") -> bytes:
        return b"%s%s %s %s %d %d\n%s" % (
            _MAGIC, self._me.encode(), reader.encode(), kind.encode(), self._connections, len(body), body
        )

    # --- files -------------------------------------------------------------------------------------------------------

    @deferred()
    def publish(self, path: Path, description: bytes) -> None:
        """Write a file. It appears with its complete contents, and replaces one of an earlier run."""
        _write(path, self._file(_DESCRIPTION, description))
        self._written.append(path)

    def read(self, path: Path) -> bytes:
        """Wait until the other end has written a file, and return the description.

        InvalidValueError for any other file, and if the other end has a different number of connections.
        """
        end = time.monotonic() + PERSON_SECONDS
        while (found := self._description(path)) is None:
            if (gone := self.gone()) is not None:
                raise gone
            self._nap(end, f"has not written {path}: start it, and give both ends the same paths")
        if found.connections != self._connections:
            raise InvalidValueError(
                f"{path} is of an end with {found.connections} connections, and this end has {self._connections}: give "
                "both ends the same -nc"
            )
        self._peer = found.writer
        return found.body

    def _description(self, path: Path) -> _File | None:
        """Return what the other end has written, or None if it has not written it yet."""
        found = _parse(path)
        if found is None or found.kind != _DESCRIPTION or _has_ended(found.writer):
            return None
        return found if self._peer in ("", found.writer) else None

    def take(self, path: Path) -> None:
        """Tell the other end that what it waits for is done, by deleting its file."""
        path.unlink(missing_ok=True)

    def wait_until_taken(self, path: Path) -> None:
        """Wait until the other end takes a file, or Enter is pressed."""
        end = time.monotonic() + PERSON_SECONDS
        gone = self.gone()  # check before the file, because taking it may be the last act of the other end
        while path.exists() and not self._enter():
            if gone is not None:
                raise gone
            self._nap(end, f"has not taken {path}, and Enter was not pressed")
            gone = self.gone()

    def _nap(self, end: float, otherwise: str) -> None:
        """Sleep briefly. TimedOutError after `end`."""
        if time.monotonic() > end:
            raise TimedOutError(f"after {PERSON_SECONDS:g} s the {self._who} {otherwise}")
        time.sleep(LOOK_SECONDS)

    def gone(self) -> PeerError | None:
        """Return why the other end does nothing more, or None if it may. It may have done its part before."""
        if self._gone is None and time.monotonic() >= self._next_look:
            self._gone = self._look()
            self._next_look = time.monotonic() + LOOK_SECONDS
        return self._gone

    def _look(self) -> PeerError | None:
        with suppress(InvalidValueError):  # `read` reports it
            found = _parse(self.theirs[0])
            if found is not None and found.reader == self._me:
                if found.kind == _INTERRUPTION:
                    return PeerInterrupted(f"the {self._who} was interrupted")
                return PeerError(f"the {self._who} has failed: {found.body.decode(errors='replace')}")
        if _has_ended(self._peer):
            return PeerError(f"the {self._who}, process {self._peer.split(':')[1]}, has ended")
        return None


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the name of a file to an error about its contents."""
    try:
        yield
    except (InvalidValueError, NotSupportedError) as error:
        raise type(error)(f"{path}: {error}") from error


def _numbered(path: Path, n: int) -> Path:
    """Return the path for connection n. If there are several, the path has a number at the end."""
    return path if n == 0 else path.with_name(f"{path.name}.{n}")


def _write(path: Path, contents: bytes) -> None:
    """Write a file that appears with its complete contents. OSError names it."""
    part = None
    try:
        with NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
            part = Path(file.name)
            file.write(contents)
        part.replace(path)
    except OSError as error:
        if part is not None:
            part.unlink(missing_ok=True)
        error.filename, error.filename2 = str(path), None
        raise


def _parse(path: Path) -> _File | None:
    """Return the contents of a file, or None if it is missing or incomplete. InvalidValueError for any other file.

    NotPermittedError for a file of another user: its connection would lead to that user's process.
    """
    try:
        with open(open_input(path), "rb") as file:
            raw = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return None
    if not _MAGIC.startswith(raw[: len(_MAGIC)]):
        raise InvalidValueError(f"{path} is not a file of `gpunetio rdma`: it begins with {raw[:16].hex()}")
    line, newline, body = raw[len(_MAGIC) :].partition(b"\n")
    if not newline:
        return None  # it is being copied
    fields = _FIRST_LINE.fullmatch(line + newline)
    if fields is None:
        raise InvalidValueError(f"{path} is not a file of this version of gpunetio: use the same version at both ends")
    writer, reader, kind, connections, nbytes = (field.decode() for field in fields.groups())
    if len(body) < int(nbytes):
        return None
    return _File(writer, reader, kind, int(connections), body)


# --- processes: MACHINE:PID:START ------------------------------------------------------------------------------------


@cache
def _machine() -> str:
    """Return a name for the scope of process numbers: the boot of the machine, and the PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return re.sub(r"[^\w.-]", "_", platform.node())[:64] or "unknown"


def _process(pid: int) -> str | None:
    """Return a name of a process that stays unique when its number is reused, or None if the process does not run."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else f"{_machine()}:{pid}:{fields[18]}"  # [18]: its start time


def _runs_here(process: str) -> bool:
    """Return whether a process runs on this machine."""
    machine, _, rest = process.partition(":")
    return machine == _machine() and _process(int(rest.partition(":")[0])) == process


def _has_ended(process: str) -> bool:
    """Return whether a process of this machine has ended."""
    return process.partition(":")[0] == _machine() and not _runs_here(process)
