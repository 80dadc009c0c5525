"""Opening a device from asyncio: the loop goes on, and a cancelled task leaves nothing open."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import gpunetio as gn
from gpunetio.dropped import held
from gpunetio.errors import InvalidValueError, NotFoundError
from gpunetio.verbs import opening

PATIENCE = 30.0


class Gate:
    """Holds up the thread that opens, at one of its steps."""

    def __init__(self, step: Callable):
        self._step = step
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, *args, **options):
        self.reached.set()
        assert self.open.wait(PATIENCE), "the loop does not go on"
        return self._step(*args, **options)


@pytest.fixture
def compiling(monkeypatch) -> Iterator[Gate]:
    yield from gate(monkeypatch, "compile_for")


@pytest.fixture
def opens(monkeypatch) -> Iterator[Gate]:
    yield from gate(monkeypatch, "open")


def gate(monkeypatch, step: str) -> Iterator[Gate]:
    before = open_contexts()
    gated = Gate(getattr(opening, step))
    monkeypatch.setattr(opening, step, gated)
    yield gated
    gated.open.set()
    opener_has_ended()
    assert open_contexts() == before


def open_contexts() -> list[str]:
    return sorted(ctx.name for ctx in held() if isinstance(ctx, gn.Context))


def opener_has_ended() -> None:
    end = time.monotonic() + PATIENCE
    while any(thread.name == "gpunetio open" for thread in threading.enumerate()):
        assert time.monotonic() < end, "the thread that opens does not end"
        time.sleep(1e-3)


async def until(event: threading.Event) -> None:
    end = time.monotonic() + PATIENCE
    while not event.is_set():
        assert time.monotonic() < end
        await asyncio.sleep(1e-3)


async def some_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(1e-3)


def test_the_loop_goes_on_while_a_device_is_opened(compiling: Gate):
    async def program() -> None:
        task = asyncio.ensure_future(wait_for_it())
        await until(compiling.reached)
        await some_turns()
        compiling.open.set()
        ctx = await task
        assert ctx.name == "soft0"
        assert ctx.query_port().active_mtu == 4096
        ctx.close()

    async def wait_for_it() -> gn.Context:
        return await gn.open_async("soft0")

    asyncio.run(program())


def test_a_context_is_closed_behind_its_block():
    async def program() -> None:
        async with gn.open_async("soft0") as ctx:
            ctx.create_pd()
        assert ctx.closed
        with pytest.raises(ZeroDivisionError):
            async with gn.open_async("soft0") as again:
                raise ZeroDivisionError
        assert again.closed

    asyncio.run(program())


async def cancelled(task: asyncio.Future) -> None:
    with pytest.raises(asyncio.CancelledError):
        await task


def test_cancelled_while_it_compiles(compiling: Gate):
    """It ends at once, and nothing is opened later."""

    async def program() -> None:
        before = open_contexts()
        task = asyncio.ensure_future(gn.open_async("soft0").__aenter__())
        await until(compiling.reached)
        task.cancel()
        await cancelled(task)
        compiling.open.set()
        await asyncio.to_thread(opener_has_ended)
        assert open_contexts() == before

    asyncio.run(program())


def test_cancelled_while_it_opens(opens: Gate):
    """It ends when what was opened is closed again, however often it is cancelled."""

    async def program() -> None:
        before = open_contexts()
        task = asyncio.ensure_future(gn.open_async("soft0").__aenter__())
        await until(opens.reached)
        for _ in range(3):
            task.cancel()
            await some_turns()
            assert not task.done()
        opens.open.set()
        await cancelled(task)
        await asyncio.to_thread(opener_has_ended)
        assert open_contexts() == before

    asyncio.run(program())


def test_a_loop_that_is_closed_gets_nothing(opens: Gate):
    before = open_contexts()
    loop = asyncio.new_event_loop()
    task = loop.create_task(gn.open_async("soft0").__aenter__())
    loop.run_until_complete(until(opens.reached))
    loop.close()
    opens.open.set()
    opener_has_ended()
    assert open_contexts() == before
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_errors_are_those_of_open():
    async def program() -> None:
        with pytest.raises(NotFoundError, match="no device 'hard0'"):
            await gn.open_async("hard0")
        with pytest.raises(InvalidValueError, match="port"):
            gn.open_async("soft0", port="10.0.0.1")  # type: ignore[arg-type]

    asyncio.run(program())
