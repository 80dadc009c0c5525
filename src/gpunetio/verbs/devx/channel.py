"""Completion channels of DEVX: event channels that subscribe to CQs created with DEVX commands."""

from __future__ import annotations

from contextlib import ExitStack

from ..channel import CompChannel
from ..events import EventReader


class DevxCompChannel(CompChannel):
    """A completion channel of DEVX."""

    reader: EventReader

    def _create(self, undo: ExitStack) -> None:
        self.reader = EventReader(self.ctx.provider, undo)
