"""The commands that librdmacm writes to the kernel's connection manager, /dev/infiniband/rdma_cm.

`gpunetio.cm` has the messages and their states. librdmacm moves the queue pair itself: it only asks here for the
attributes. As in Linux, anything that takes time ends with an event.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..errors import BadStateError, InUseError, TooBigError
from ..formats.layout import Entry
from . import ucma_abi
from .call import Refused, bytes_at, store_at
from .ucma_abi import Command
from .ucma_ids import CmFile, CmId, Manager

logger: logging.Logger = logging.getLogger("gpunetio.uverbs")

_ERRNO = ((BadStateError, errno.EINVAL), (InUseError, errno.EADDRINUSE), (TooBigError, errno.EINVAL))


_MOST_WRITTEN = 0x7FFF_F000  # bytes that one write(2) transfers at most
_MOST_BYTES = (1 << 16) - 1  # bytes that a header can announce at most


class Channel(NamedTuple):
    """The sender of a command: an open file, and the manager of all."""

    manager: Manager
    file: CmFile

    def get(self, request: np.ndarray) -> CmId:
        """Return the identifier that a command names."""
        return self.manager.get(int(request["id"]), self.file)


Answer = Callable[[Channel, np.ndarray], "bytes | None"]


class _Known(NamedTuple):
    """How to answer a command: the function, the command's layout, and the least room that its answer needs."""

    answer: Answer
    layout: Entry
    room: int


_commands: dict[int, _Known] = {}


def command(number: Command, layout: Entry, room: int = 0) -> Callable[[Answer], Answer]:
    """Make a function answer a command. With `room`, it returns at least that many bytes for the program."""

    def register(answer: Answer) -> Answer:
        _commands[number] = _Known(answer, layout, room)
        return answer

    return register


def write(manager: Manager, file: CmFile, address: int, nbytes: int) -> int:
    """Execute a command that the program has written. Return `nbytes`, or -EAGAIN if there is no event."""
    if nbytes < ucma_abi.HEADER.size:
        raise Refused(errno.EINVAL, f"a command of {nbytes} bytes has no header")
    nbytes = min(nbytes, _MOST_WRITTEN)
    raw = bytes_at(address, min(nbytes, ucma_abi.HEADER.size + _MOST_BYTES))
    header = ucma_abi.HEADER.at(raw)
    number, size, room = int(header["cmd"]), int(header["in"]), int(header["out"])
    if number not in list(Command) or ucma_abi.HEADER.size + size > nbytes:
        raise Refused(errno.EINVAL, f"there is no command {number} of {size} bytes in {nbytes}")
    known = _commands.get(number)
    if known is None:
        raise Refused(errno.EOPNOTSUPP, f"{Command(number).name} is not supported")
    if room < known.room:
        raise Refused(errno.ENOSPC, f"{Command(number).name} leaves {room} bytes for an answer of {known.room}")
    # Older programs pass a shorter structure: the rest is 0.
    request = known.layout.at(raw[ucma_abi.HEADER.size :][:size].ljust(known.layout.size, b"\0"))
    if known.room:
        store_at(int(request["response"]), bytes(known.room))  # fail first if no answer could be stored
    if number != Command.GET_EVENT:
        logger.debug("%s", Command(number).name)
    try:
        with manager.lock:
            answer = known.answer(Channel(manager, file), request)
    except tuple(kind for kind, _ in _ERRNO) as error:
        code = next(code for kind, code in _ERRNO if isinstance(error, kind))
        raise Refused(code, f"{Command(number).name}: {error}") from error
    if answer:
        store_at(int(request["response"]), answer[:room])
    return -errno.EAGAIN if number == Command.GET_EVENT and not answer else nbytes
