"""One facade for all that is read of a machine: files, folders, links, commands and questions.

A `Host` remembers each reading, so that a check may ask again at no cost, and so that all of them can be saved.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What a reading is of."""

    FILE = "file"  # bytes
    FOLDER = "folder"  # sorted names
    LINK = "link"  # where a path leads, all links followed
    COMMAND = "command"  # standard output
    QUESTION = "question"  # what `questions.QUESTIONS` answers; anything that JSON has


class Trouble(StrEnum):
    """Why there is no value."""

    NONE = ""
    ABSENT = "absent"  # no such file or command
    DENIED = "denied"  # root would see it
    TIMEOUT = "timeout"
    FAILED = "failed"  # any other error; a command that fails may have a value all the same
    UNRECORDED = "unrecorded"  # a replay is asked what was not recorded


@dataclass(frozen=True)
class Reading:
    """What was found at a path, or what a command or a question gave."""

    kind: Kind
    key: tuple[str, ...]  # the path, the command line, or the question and its arguments
    value: Any = None  # by kind
    trouble: Trouble = Trouble.NONE
    error: str = ""  # the trouble in the system's words

    @property
    def source(self) -> str:
        """The path, or the command line."""
        return " ".join(self.key)

    @property
    def ok(self) -> bool:
        """Whether there is a value and nothing went wrong."""
        return self.trouble is Trouble.NONE

    @property
    def text(self) -> str:
        """A file's or a command's text without blanks at the ends; "" when there is none."""
        if isinstance(self.value, bytes):
            return self.value.decode(errors="replace").replace("\0", " ").strip()
        return str(self.value).strip() if isinstance(self.value, str) else ""

    @property
    def number(self) -> int | None:
        """The text as a number, decimal or 0x…, or None."""
        try:
            return int(self.text, 0)
        except ValueError:
            return None

    @property
    def names(self) -> tuple[str, ...]:
        """A folder's names; none when it cannot be read."""
        return tuple(map(str, self.value)) if isinstance(self.value, list | tuple) else ()


class Host:
    """A machine. Subclasses say how to fetch; fetching is done once, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readings: dict[tuple[Kind, tuple[str, ...]], Future[Reading]] = {}

    def fetch(self, kind: Kind, key: tuple[str, ...]) -> Reading:
        """Read it now; troubles are part of the answer, and never raised."""
        raise NotImplementedError

    def get(self, kind: Kind, *key: str) -> Reading:
        """The reading, fetched at the first time."""
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
        """A file's bytes, at most `live.LARGEST`."""
        return self.get(Kind.FILE, path)

    def names(self, folder: str) -> Reading:
        """A folder's sorted names."""
        return self.get(Kind.FOLDER, folder)

    def follow(self, path: str) -> Reading:
        """Where a path leads: the text is absolute and has no links in it."""
        return self.get(Kind.LINK, path)

    def run(self, *command: str) -> Reading:
        """A command's standard output. It must change nothing."""
        return self.get(Kind.COMMAND, *command)

    def ask(self, question: str, *args: str) -> Reading:
        """What is in no file: see `questions.QUESTIONS`."""
        return self.get(Kind.QUESTION, question, *args)

    def readings(self) -> list[Reading]:
        """All that was read, sorted."""
        with self._lock:
            futures = sorted(self._readings.items())
        return [future.result() for _, future in futures]
