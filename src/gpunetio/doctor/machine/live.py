"""The local machine, or one whose file system is below a folder."""

from __future__ import annotations

import os
import stat

from . import process
from .host import Host, Kind, Reading, Trouble
from .questions import QUESTIONS

LARGEST = 1 << 20  # bytes read of a file
DEADLINE = 5.0  # seconds for a command
# Without persistence mode, NVIDIA's driver first initialises each GPU. A card's firmware answers slowly.
DEADLINES = {"nvidia-smi": 30.0, "mlxconfig": 30.0, "mstconfig": 30.0}
# lspci and setpci are in sbin, which is not in every user's PATH.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LiveHost(Host):
    """Read files below `root`. Commands and questions are about the local machine: they need `root` = "/"."""

    root: str

    def __init__(self, root: str = "/"):
        super().__init__()
        self.root = root.rstrip("/")

    def fetch(self, kind: Kind, key: tuple[str, ...]) -> Reading:
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
                return Reading(kind, key, _bytes_of(self.root + key[0]))
            case Kind.FOLDER:
                return Reading(kind, key, sorted(os.listdir(self.root + key[0] or "/")))
            case Kind.LINK:
                found = os.path.realpath(self.root + key[0], strict=True)
                return Reading(kind, key, found.removeprefix(os.path.realpath(self.root or "/").rstrip("/")) or "/")
            case Kind.QUESTION:
                return Reading(kind, key, QUESTIONS[key[0]](*key[1:]))
            case Kind.COMMAND:
                return _run(key)


def _bytes_of(path: str) -> bytes:
    """Read a regular file. A pipe or a device in its place must not block the doctor."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a regular file")
        return file.read(LARGEST)


def _refused(kind: Kind, key: tuple[str, ...], trouble: Trouble, error: Exception) -> Reading:
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return Reading(kind, key, None, trouble, said or type(error).__name__)


def _run(command: tuple[str, ...]) -> Reading:
    path = ":".join(filter(None, (os.environ.get("PATH"), _PATH)))
    deadline = DEADLINES.get(command[0], DEADLINE)
    ended = process.run(command, deadline, os.environ | {"LC_ALL": "C", "PATH": path})
    if ended.status is None:
        return Reading(Kind.COMMAND, command, ended.out, Trouble.TIMEOUT, f"no answer within {deadline:g} s")
    if ended.status == 0:
        return Reading(Kind.COMMAND, command, ended.out)
    error = f"exit status {ended.status}" + (f": {ended.last_words}" if ended.last_words else "")
    return Reading(Kind.COMMAND, command, ended.out, Trouble.FAILED, error)
