"""Completion channels: wait for completions instead of polling for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import TYPE_CHECKING

from .events import Reader
from .handle import Handle

if TYPE_CHECKING:
    from .context import Context
    from .cq import CQ


class CompChannel(Handle, ABC):
    """A completion channel (`doca_verbs_comp_channel`): reports which of its CQs has a requested completion.

    A CQ's `req_notify()` requests one event. After the event, poll the CQ, request the next event, and poll once more.
    Acknowledge each event with the CQ's `ack_events()`. `async for cq in channel` waits in asyncio.
    """

    _rank = 2
    reader: Reader

    def __init__(self, ctx: Context):
        super().__init__(ctx)
        self._use(ctx)
        with ExitStack() as undo:
            self._create(undo)
            self._opened(f"completion channel of {ctx.name}", undo)

    @abstractmethod
    def _create(self, undo: ExitStack) -> None:
        """Create the channel on the device, and set `reader`."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while events wait (`doca_verbs_comp_channel_get_handle`)."""
        self.check_open()
        return self.reader.fd

    def get_event(self, timeout: float) -> CQ | None:
        """Return the CQ of the next event, or None after `timeout` seconds (`doca_verbs_get_cq_event`).

        The C function also returns the CQ's `context`; here it is an attribute of the CQ.
        """
        self.check_open()
        found = self.reader.wait(timeout)
        return None if found is None else self._told(found[0])

    @staticmethod
    def _told(cq: Handle | None) -> CQ:
        cq.event_taken()  # type: ignore[union-attr]
        return cq  # type: ignore[return-value]

    def __aiter__(self) -> CompChannel:
        return self

    async def __anext__(self) -> CQ:
        self.check_open()
        found, _ = await self.reader.wait_in_loop()
        return self._told(found)
