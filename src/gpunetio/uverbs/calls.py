"""The functions that preload.c calls: open, ioctl, mmap, write and close on the device files of a program."""

from __future__ import annotations

import atexit
import ctypes
import errno
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .. import log
from ..errors import (
    BadStateError,
    DocaError,
    DriverError,
    FullError,
    InUseError,
    InvalidValueError,
    NoMemoryError,
    NotFoundError,
    NotSupportedError,
    TimedOutError,
)
from ..nic.engine.port import PortConfig
from ..nic.host import helping
from ..providers import soft
from ..verbs import Context
from . import device, devx, events, memory, queues, ucma, ucma_addresses, ucma_connections, valgrind
from .call import Call, Refused
from .counter_files import CounterFiles
from .environment import FOLDER, ports_of_this_program
from .files import OpenFile
from .methods import execute
from .sysfs import CM_DEVICE
from .ucma_devices import Devices
from .ucma_ids import CmFile, Manager

logger: logging.Logger = logging.getLogger("gpunetio.uverbs")

_ERRNO: tuple[tuple[type[Exception], int], ...] = (
    (InvalidValueError, errno.EINVAL), (NoMemoryError, errno.ENOMEM), (InUseError, errno.EBUSY),
    (NotSupportedError, errno.EOPNOTSUPP), (NotFoundError, errno.EHOSTUNREACH), (FullError, errno.EOVERFLOW),
    (TimedOutError, errno.ETIMEDOUT), (BadStateError, errno.EIO), (DriverError, errno.EINVAL),
)
# Modules whose functions answer calls.
ANSWERING = device, devx, events, memory, queues, ucma_addresses, ucma_connections


class Calls:
    """The open files of this process: `files` of devices, by number. `manager` answers the files of rdma_cm."""

    def __init__(self, ports: list[tuple[str, PortConfig]], end_help: Callable[[int], bool]):
        self._ports = ports  # of uverbs0, uverbs1, …
        self._end_help = end_help
        self.files: dict[int, OpenFile] = {}
        self._cm_files: dict[int, CmFile] = {}
        self._next = 1
        self._lock = threading.Lock()
        self._exiting = False
        self._counters = CounterFiles(Path(os.environ.get(FOLDER, os.devnull), "sys/class/infiniband"))
        self.manager = Manager(Devices([name for name, _ in ports], self._open_for_cm))
        atexit.register(self._exit)

    def _exit(self) -> None:
        """Note that Python ends. NICs have closed, and pyverbs closes its remaining objects after this."""
        self._exiting = True

    def _open_for_cm(self, number: int) -> Context:
        """Open a device for the connection manager, which ends before the NIC."""
        opened = Context(soft.open_beside_others(*self._ports[number]))  # type: ignore[arg-type]
        atexit.register(self.manager.close)
        return opened

    def open(self, name: bytes, descriptor: int) -> int:
        if name == CM_DEVICE:
            with self._lock:
                self._next += 1
                self._cm_files[self._next] = CmFile(self.manager, descriptor)
                return self._next
        number = int(name.removeprefix(b"uverbs"))
        if number >= len(self._ports):
            return -errno.ENODEV
        file = OpenFile(*self._ports[number], partial(self._end_help, descriptor), self._counters)
        with self._lock:
            self._next += 1
            self.files[self._next] = file
            return self._next

    def write(self, file: int, address: int, nbytes: int) -> int:
        if (written := self._cm_files.get(file)) is None:
            raise Refused(errno.EBADF, "commands are written to rdma_cm only, while it is open")
        return ucma.write(self.manager, written, address, nbytes)

    def control(self, file: int, header: int) -> int:
        if file not in self.files:
            raise Refused(errno.ENOTTY, "rdma_cm has no calls of ioctl")
        call = Call(header)
        if self._exiting:
            self.files[file].bury(call)
            return 0
        with self.files[file].whole_call():
            execute(self.files[file], call)
        return 0

    def map(self, file: int, offset: int, nbytes: int) -> int:
        return device.map_page(self.files[file], offset, nbytes)

    def worker(self, file: int) -> int:
        return self.files[file].worker if file in self.files else 0

    def reach(self, file: int, attributes: int) -> int:
        """Lay the path for an address handle that is about to be made."""
        with self.files[file].whole_call():
            queues.reach(self.files[file], attributes)
        return 0

    def refresh(self) -> int:
        """Bring the counters in sysfs up to date."""
        self._counters.tell()
        return 0

    def close(self, file: int) -> int:
        if self._exiting:
            return 0
        with self._lock:
            closed = self._cm_files.pop(file) if file in self._cm_files else self.files.pop(file)
        closed.close()
        return 0


# The errors for operations that software NICs do not have. The user is told about each of them once.
_MISSING = errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.ENOSYS
_MOST_TOLD = 1000
_told: set[str] = set()


def _refuse(code: int, why: Exception, expected: bool = False) -> int:
    """Return the result of a refused call. Log the reason as a warning if the program may not find out by itself."""
    text = str(why)
    tell = code in _MISSING and not expected and text not in _told and len(_told) < _MOST_TOLD
    if tell:
        _told.add(text)
        logger.warning("the program asks for what software NICs do not have: %s", text)
    else:
        logger.info("refused with %s: %s", errno.errorcode[code], text)
    return -code


def _guarded(function: Callable[..., int]) -> Callable[..., int]:
    def call(*arguments: Any) -> int:
        try:
            return function(*arguments)
        except Refused as refused:
            return _refuse(refused.code, refused, refused.expected)
        except DocaError as error:
            return _refuse(next((code for kind, code in _ERRNO if isinstance(error, kind)), errno.EIO), error)
        except Exception:
            logger.exception("a call of the program has failed")
            return -errno.EIO

    return call


_long, _u64 = ctypes.c_long, ctypes.c_uint64  # an address of 0 is passed as a number
_TYPES = {
    "open": (ctypes.c_char_p, _long), "control": (_long, _u64), "map": (_long, _u64, _u64),
    "write": (_long, _u64, _u64), "close": (_long,), "worker": (_long,), "refresh": (), "reach": (_long, _u64),
}
_kept: list[object] = []


def install(table: int, started: int, end_help: int) -> None:
    """Fill the table of functions in preload.c, and set `started` when it is filled. `end_help` is a function there."""
    log.configure()
    valgrind.compile_elsewhere()
    calls = Calls(ports_of_this_program(), ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int)(end_help))
    functions = [
        ctypes.CFUNCTYPE(_long, *types)(_guarded(getattr(calls, name))) for name, types in _TYPES.items()
    ]
    _kept.extend(functions)
    places = (ctypes.c_void_p * (len(functions) + 1)).from_address(table)
    for i, function in enumerate(functions):
        places[i] = ctypes.cast(function, ctypes.c_void_p).value
    places[len(functions)] = helping.address()
    ctypes.c_int.from_address(started).value = 1
