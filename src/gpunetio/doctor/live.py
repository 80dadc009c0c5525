"""The machine that we are on, or one whose file system lies below a folder."""

from __future__ import annotations

import os

from .children import output
from .host import Host, Kind, Reading, Trouble
from .questions import QUESTIONS

LARGEST = 1 << 20  # bytes that are read of a file, and of a command's output
DEADLINE = 5.0  # seconds for a command
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # lspci and setpci are in sbin, which users lack


class LiveHost(Host):
    """Reads files below `root`. Commands and questions are answered by this machine, so only when `root` is "/"."""

    def __init__(self, root: str = "/"):
        super().__init__()
        self.root = root.rstrip("/")

    def fetch(self, kind: Kind, key: tuple[str, ...]) -> Reading:
        """Read it now."""
        if kind in (Kind.COMMAND, Kind.QUESTION) and self.root:
            return Reading(kind, key, None, Trouble.UNRECORDED, f"not asked: the root folder is {self.root}")
        try:
            return self._fetch(kind, key)
        except FileNotFoundError as error:
            return _refused(kind, key, Trouble.ABSENT, error)
        except PermissionError as error:
            return _refused(kind, key, Trouble.DENIED, error)
        except TimeoutError as error:
            return _refused(kind, key, Trouble.TIMEOUT, error)
        except (OSError, ValueError, LookupError, ImportError, AttributeError) as error:
            return _refused(kind, key, Trouble.FAILED, error)

    def _fetch(self, kind: Kind, key: tuple[str, ...]) -> Reading:
        match kind:
            case Kind.FILE:
                with open(self.root + key[0], "rb") as file:
                    return Reading(kind, key, file.read(LARGEST))
            case Kind.FOLDER:
                return Reading(kind, key, sorted(os.listdir(self.root + key[0] or "/")))
            case Kind.LINK:
                found = os.path.realpath(self.root + key[0], strict=True)
                return Reading(kind, key, found.removeprefix(os.path.realpath(self.root or "/").rstrip("/")) or "/")
            case Kind.QUESTION:
                return Reading(kind, key, QUESTIONS[key[0]](*key[1:]))
            case Kind.COMMAND:
                return _run(key)


def _refused(kind: Kind, key: tuple[str, ...], trouble: Trouble, error: Exception) -> Reading:
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return Reading(kind, key, None, trouble, said or type(error).__name__)


def _run(command: tuple[str, ...]) -> Reading:
    environment = os.environ | {"LC_ALL": "C", "PATH": f"{os.environ.get('PATH', '')}:{_PATH}"}
    done = output(command, DEADLINE, environment)
    if done.returncode == 0:
        return Reading(Kind.COMMAND, command, done.stdout[:LARGEST])
    said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
    error = f"exit status {done.returncode}" + (f": {said[-1].strip()}" if said else "")
    return Reading(Kind.COMMAND, command, done.stdout[:LARGEST], Trouble.FAILED, error)
