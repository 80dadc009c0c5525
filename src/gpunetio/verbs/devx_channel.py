"""Completion channels of DEVX: event channels that CQs made by mailboxes are subscribed to."""

from __future__ import annotations

from contextlib import ExitStack

from .channel import CompChannel
from .events import EventReader


class DevxCompChannel(CompChannel):
    """See `CompChannel`."""

    reader: EventReader

    def _create(self, undo: ExitStack) -> None:
        self.reader = EventReader(self.ctx.provider, undo)
