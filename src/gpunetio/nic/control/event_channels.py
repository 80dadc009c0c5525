"""The event channels of a NIC, and their subscriptions to events of the port and of the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...errors import NoMemoryError
from ...formats.events import EventType
from ..engine.hardware import Hardware
from ..queues.channels import EventChannel
from ..state.cq import EVENT
from ..turn.commands import EngineCommand
from .objects import EventSources

MAX_CHANNELS = 1024


class EventChannels:
    """The event channels of a NIC. `queues` are the types of objects that raise events."""

    def __init__(self, hardware: Hardware, queues: Sequence[EventSources]):
        self._owner, self._engine, self._queues = hardware.name, hardware.engine, queues
        self._open: set[EventChannel] = set()
        self._unaffiliated: dict[EventChannel, int] = {}  # channel → cookie of its port and device events

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """Close all channels. The engine must have stopped."""
        for channel in self._open:
            channel.close()

    def create(self) -> EventChannel:
        """Create a channel without subscriptions."""
        if len(self._open) == MAX_CHANNELS:
            raise NoMemoryError(f"{self._owner} has no free event channel: all {MAX_CHANNELS} are in use")
        channel = EventChannel()
        self._open.add(channel)
        return channel

    def destroy(self, channel: EventChannel) -> None:
        """Destroy a channel. Its pending events are lost."""
        for queues in self._queues:
            queues.unsubscribe(channel)
        self._unaffiliated.pop(channel, None)
        self._engine.synchronize()  # the engine may be writing to the channel's descriptor
        self._open.discard(channel)
        channel.close()

    def subscribe(self, channel: EventChannel, cookie: int) -> None:
        """Subscribe a channel to the events of the port and of the device."""
        self._unaffiliated[channel] = cookie

    def broadcast(self, kind: EventType, number: int = 0) -> None:
        """Send an event of the port or of the device to all channels that are subscribed to them."""
        for channel, cookie in self._unaffiliated.items():
            event = np.zeros((), EVENT.dtype)
            event["cookie"], event["type"], event["number"] = cookie, int(kind), number
            self._engine.post(EngineCommand.RAISE_EVENT, channel.address, event)
