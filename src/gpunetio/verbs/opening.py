"""Opening a device from asyncio without blocking its event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator

from ..arguments import instance
from ..closing import end_block
from ..limits import within_limits
from ..providers import PortConfig, compile_for
from .context import Context, open


def open_async(name: str | None = None, *, port: PortConfig | None = None) -> Opening:
    """Open a device in a thread, as `open` does, because the first open may compile for a while.

        async with gn.open_async("soft0") as ctx:
            ...
        ctx = await gn.open_async("soft0")

    `async with` also closes the context in a thread. If the task is cancelled, nothing stays open. A compilation that
    has begun continues in the background, for the next open; the process does not exit before it ends.
    """
    if port is not None:
        instance("port", port, PortConfig)
    return Opening(name, port)


class Opening:
    """A device that is being opened. Await it to get the context, or use it in `async with`."""

    def __init__(self, name: str | None, port: PortConfig | None):
        self._name, self._port = name, port
        self._context: Context | None = None
        self._abandoned = self._begun = False  # the task was cancelled; `open` has begun
        self._deciding = threading.Lock()

    def __await__(self) -> Generator[object, None, Context]:
        return self._open().__await__()

    async def __aenter__(self) -> Context:
        self._context = await self._open()
        return self._context

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        assert self._context is not None
        await asyncio.shield(asyncio.to_thread(end_block, error, self._context.close))

    async def _open(self) -> Context:
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[Context | None] = loop.create_future()

        def run() -> None:
            ctx, error = None, None
            try:
                ctx = self._open_unless_abandoned()
            except BaseException as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(settle, ctx, error)
            except RuntimeError:  # the loop is closed
                if ctx is not None:
                    ctx.close()

        def settle(ctx: Context | None, error: BaseException | None) -> None:
            if error is None:
                opened.set_result(ctx)
            else:
                opened.set_exception(error)

        with within_limits("a device"):
            threading.Thread(target=run, name="gpunetio open").start()
        try:
            ctx = await asyncio.shield(opened)
        except asyncio.CancelledError:
            await self._abandon(opened)
            raise
        assert ctx is not None
        return ctx

    def _open_unless_abandoned(self) -> Context | None:
        compile_for(self._name, self._port)
        with self._deciding:
            if self._abandoned:
                return None
            self._begun = True
        return open(self._name, port=self._port)

    async def _abandon(self, opened: asyncio.Future[Context | None]) -> None:
        """Prevent the opening or, if it has begun, wait for it and close the context."""
        with self._deciding:
            self._abandoned = True
            begun = self._begun
        opened.add_done_callback(lambda done: done.exception())  # its error no longer matters
        if not begun:
            return
        while not opened.done():
            try:
                await asyncio.wait((opened,))
            except asyncio.CancelledError:  # the task is already being cancelled, and opening takes only a moment
                continue
        if opened.exception() is None and (ctx := opened.result()) is not None:
            await asyncio.shield(asyncio.to_thread(ctx.close))
