"""A facade for everything that is read of a machine: files, folders, links, commands and questions.

A `Host` remembers each reading. Checks can ask again at no cost, and all readings can be saved.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The kind of a reading."""

    FILE = "file"  # bytes
    FOLDER = "folder"  # sorted names
    LINK = "link"  # the target of a path after all links
    COMMAND = "command"  # standard output
    QUESTION = "question"  # an answer of `questions.QUESTIONS`; any JSON value


class Trouble(StrEnum):
    """Why a reading has no value."""

    NONE = ""
    ABSENT = "absent"  # no such file or command
    DENIED = "denied"  # root may read it
    TIMEOUT = "timeout"
    FAILED = "failed"  # any other error; a command that fails may still have a value
    UNRECORDED = "unrecorded"  # the recording does not have it


@dataclass(frozen=True)
class Reading:
    """The content of a path, the output of a command, or the answer to a question."""

    kind: Kind
    key: tuple[str, ...]  # the path, the command line, or the question and its arguments
    value: object = None  # its type depends on the kind
    trouble: Trouble = Trouble.NONE
    error: str = ""  # the system's error message

    @property
    def source(self) -> str:
        """The path, or the command line."""
        return " ".join(self.key)

    @property
    def ok(self) -> bool:
        """Whether there is a value and no error."""
        return self.trouble is Trouble.NONE

    @property
    def text(self) -> str:
        """The text of a file or a command, without leading and trailing white space; "" if there is none."""
        if isinstance(self.value, bytes):
            return self.value.decode(errors="replace").replace("\0", " ").strip()
        return str(self.value).strip() if isinstance(self.value, str) else ""

    @property
    def number(self) -> int | None:
        """The text as a number, decimal or 0x…; None if it is not a number."""
        try:
            return int(self.text, 0)
        except ValueError:
            return None

    @property
    def names(self) -> tuple[str, ...]:
        """The names in a folder; empty if it cannot be read."""
        return tuple(map(str, self.value)) if isinstance(self.value, list | tuple) else ()


class Host(ABC):
    """A machine. Each reading is fetched once, by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readings: dict[tuple[Kind, tuple[str, ...]], Future[Reading]] = {}

    @abstractmethod
    def fetch(self, kind: Kind, key: tuple[str, ...]) -> Reading:
        """Read now. Errors are part of the reading; nothing is raised."""

    def get(self, kind: Kind, *key: str) -> Reading:
        """Return a reading; the first call fetches it."""
        with self._lock:
            future = self._readings.get((kind, key))
            first = future is None
            if future is None:
                future = self._readings[kind, key] = Future()
        if first:
            try:
                future.set_result(self.fetch(kind, key))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def read(self, path: str) -> Reading:
        """Return a file's bytes, at most `live.LARGEST`."""
        return self.get(Kind.FILE, path)

    def names(self, folder: str) -> Reading:
        """Return the sorted names in a folder."""
        return self.get(Kind.FOLDER, folder)

    def follow(self, path: str) -> Reading:
        """Resolve all links of a path. The text is an absolute path without links."""
        return self.get(Kind.LINK, path)

    def run(self, *command: str) -> Reading:
        """Return a command's standard output. The command must change nothing."""
        return self.get(Kind.COMMAND, *command)

    def ask(self, question: str, *args: str) -> Reading:
        """Ask one of `questions.QUESTIONS`, for facts that no file holds."""
        return self.get(Kind.QUESTION, question, *args)

    def readings(self) -> list[Reading]:
        """Return all readings, sorted."""
        with self._lock:
            futures = sorted(self._readings.items())
        return [future.result() for _, future in futures]
