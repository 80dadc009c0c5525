"""Completion channels and asynchronous events: pipes from which libibverbs reads what the NIC has told."""

from __future__ import annotations

import errno
from typing import Any

from ..enums import AsyncEventType
from ..verbs import CompChannel, Handle
from ..verbs.devx.channel import DevxCompChannel
from . import abi
from .abi import Object, Write
from .call import Call, Refused
from .files import OpenFile
from .methods import command, method


def _user_handle(target: Handle | None) -> int:
    """Return what the program calls an object by."""
    context: Any = getattr(target, "context", 0)
    return int(context or 0)


@command(Write.CREATE_COMP_CHANNEL)
def create_comp_channel(file: OpenFile, call: Call) -> None:
    channel = file.ctx.create_comp_channel()
    assert isinstance(channel, DevxCompChannel)  # the software NIC's

    def take() -> tuple[Handle | None, bytes] | None:
        found = channel.reader.take()
        return None if found is None else (found[0], _user_handle(found[0]).to_bytes(8, "little"))

    fd = file.pump.open_pipe(channel.reader.fd, take, completions=True)
    file.channels[fd] = channel
    call.put_number(abi.Invoke.OUT, fd)


def channel_of(file: OpenFile, fd: int) -> CompChannel:
    """Return a completion channel by its descriptor."""
    if fd not in file.channels:
        raise Refused(errno.EBADF, f"descriptor {fd} is not a completion channel of this device")
    return file.channels[fd]


@method(Object.ASYNC_EVENT, abi.ALLOC)
def alloc_async_events(file: OpenFile, call: Call) -> None:
    events = file.ctx.async_events

    def take() -> tuple[Handle | None, bytes] | None:
        event = events.get(0)
        if event is None:
            return None
        event.ack()  # libibverbs waits for acknowledgements itself
        if isinstance(event.element, Handle):
            return event.element, _message(_user_handle(event.element), event.type)
        return None, _message(event.element or 0, event.type)

    call.name(abi.ASYNC_EVENT_FD, file.pump.open_pipe(events.fd, take, completions=False))


def _message(element: int, kind: AsyncEventType) -> bytes:
    return abi.ASYNC_EVENT.pack(element=element, event_type=kind)

