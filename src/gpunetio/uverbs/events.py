"""Completion channels and asynchronous events: pipes from which libibverbs reads the NIC's events."""

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

_NO_REQUEST = b"\xff" * 4  # in the record that arms a completion queue: it has reserved bits set
_OF_DEVICE = EventType.PORT_CHANGE, EventType.INTERNAL_ERROR


@command(Write.CREATE_COMP_CHANNEL)
def create_comp_channel(file: OpenFile, call: Call) -> None:
    channel = file.provider.create_event_channel()
    fd = file.pump.open_pipe(file.provider.event_channel(channel))
    file.channels[fd] = channel
    call.put_number(abi.Invoke.OUT, fd)


def mark_unarmed(record: int) -> None:
    """Make sure that the doorbell record of a new completion queue contains no request to arm it.

    A program's first request may be 0, like an empty record, or equal to what an earlier queue has left there.
    """
    store_at(record + CQ_DBREC.arm, _NO_REQUEST)


def tell_completions(file: OpenFile, fd: int, cq: Handle, subscriber: int) -> None:
    """Send events of a CQ to a completion channel, named by its descriptor. Refused with EBADF if it is no channel."""
    if fd not in file.channels:
        raise Refused(errno.EBADF, f"descriptor {fd} is not a completion channel of this device")
    file.provider.subscribe(file.channels[fd], cq.devx_handle, (EventType.COMPLETION,), subscriber)


def tell_errors(file: OpenFile, what: Handle, kinds: Iterable[EventType], subscriber: int) -> None:
    """Send an object's events to the file's channel of asynchronous events."""
    if file.asynchronous is not None:
        file.provider.subscribe(file.asynchronous, what.devx_handle, kinds, subscriber)


@method(Object.ASYNC_EVENT, abi.ALLOC, (abi.ASYNC_EVENT_FD,))
def alloc_async_events(file: OpenFile, call: Call) -> None:
    file.asynchronous = file.provider.create_event_channel()
    file.provider.subscribe(file.asynchronous, None, _OF_DEVICE, file.pump.subscriber(0))
    call.name(abi.ASYNC_EVENT_FD, file.pump.open_pipe(file.provider.event_channel(file.asynchronous)))
