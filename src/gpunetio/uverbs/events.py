"""Completion channels and asynchronous events: pipes from which libibverbs reads what the NIC has told."""

from __future__ import annotations

import errno
from collections.abc import Iterable

from ..formats.doorbell import CQ_DBREC
from ..formats.events import EventType
from ..verbs import Handle
from . import abi
from .abi import Object, Write
from .call import Call, Refused, store_at
from .files import OpenFile
from .methods import command, method

_NO_REQUEST = b"\xff" * 4  # in the record that arms a completion queue: with reserved bits
_OF_DEVICE = EventType.PORT_CHANGE, EventType.INTERNAL_ERROR


@command(Write.CREATE_COMP_CHANNEL)
def create_comp_channel(file: OpenFile, call: Call) -> None:
    channel = file.provider.create_event_channel()
    fd = file.pump.open_pipe(file.provider.event_channel(channel))
    file.channels[fd] = channel
    call.put_number(abi.Invoke.OUT, fd)


def mark_unarmed(record: int) -> None:
    """Let the doorbell record of a new completion queue contain no request to arm it.

    The first request of a program may be 0, as an empty record is, and equal to what an earlier queue has left there.
    """
    store_at(record + CQ_DBREC.arm, _NO_REQUEST)


def tell_completions(file: OpenFile, fd: int, cq: Handle, subscriber: int) -> None:
    """Have a completion channel, named by its descriptor, hear of a CQ. Refused with EBADF if it is none."""
    if fd not in file.channels:
        raise Refused(errno.EBADF, f"descriptor {fd} is not a completion channel of this device")
    file.provider.subscribe(file.channels[fd], cq.devx_handle, (EventType.COMPLETION,), subscriber)


def tell_errors(file: OpenFile, what: Handle, kinds: Iterable[EventType], subscriber: int) -> None:
    """Have the asynchronous events of the file hear of an object."""
    if file.asynchronous is not None:
        file.provider.subscribe(file.asynchronous, what.devx_handle, kinds, subscriber)


@method(Object.ASYNC_EVENT, abi.ALLOC, (abi.ASYNC_EVENT_FD,))
def alloc_async_events(file: OpenFile, call: Call) -> None:
    file.asynchronous = file.provider.create_event_channel()
    file.provider.subscribe(file.asynchronous, None, _OF_DEVICE, file.pump.subscriber(0))
    call.name(abi.ASYNC_EVENT_FD, file.pump.open_pipe(file.provider.event_channel(file.asynchronous)))
