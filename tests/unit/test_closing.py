"""What a `with` block raises is what the program is told, whatever its end does."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

import gpunetio as gn
from gpunetio import eth, flow, verbs
from gpunetio.core import BufInventory, MemoryMap
from gpunetio.errors import DocaError, InUseError, TimedOutError
from gpunetio.flow import match
from gpunetio.memory import HostMemory


@pytest.fixture
def ctx() -> Iterator[verbs.Context]:
    with verbs.open("soft0") as ctx:
        yield ctx


def use_a_queue(ctx: verbs.Context, error: BaseException | None, held: list[verbs.Handle]) -> None:
    """A block whose completion queue cannot close at the end: a queue pair that it leaves open needs the queue."""
    with ctx.create_cq(16) as cq:
        held += [cq, ctx.create_pd().create_qp(sq_wr=4, send_cq=cq)]
        if error:
            raise error


@pytest.mark.parametrize("error", [AssertionError("what failed"), KeyboardInterrupt(), InUseError("of the block")])
def test_the_error_of_the_block_is_raised_with_a_note(ctx, error):
    held: list[verbs.Handle] = []
    with pytest.raises(type(error)) as caught:
        use_a_queue(ctx, error, held)
    assert caught.value is error
    (note,) = error.__notes__
    assert note.startswith("Then close() failed: InUseError: CQ ")
    assert note.endswith("close that first")
    assert error.__context__ is None
    assert not held[0].closed


def test_a_refusal_to_close_is_raised_after_a_block_that_succeeded(ctx):
    with pytest.raises(InUseError, match="is still used by QP"):
        use_a_queue(ctx, None, [])


def test_the_error_of_a_block_that_closes_is_as_it_was(ctx):
    error = AssertionError()
    with pytest.raises(AssertionError), ctx.create_cq(16) as cq:
        raise error
    assert cq.closed
    assert not hasattr(error, "__notes__")


def steer_to_a_queue(ctx: verbs.Context, error: BaseException, held: list[verbs.Handle]) -> None:
    with flow.FlowPort(ctx) as port, ctx.create_cq(16) as cq:
        held.append(ctx.create_pd().create_qp(sq_wr=4, send_cq=cq))
        with eth.RegularRxq(ctx.create_pd(), 8, 1600) as queue:
            port.steer(match.udp(dst=7), to=queue)
            raise error


def test_each_block_that_cannot_close_adds_its_note(ctx):
    error = AssertionError()
    with pytest.raises(AssertionError):
        steer_to_a_queue(ctx, error, [])
    assert ["receive queue" in note for note in error.__notes__] == [True, False]


def blocks(undo: ExitStack) -> list[object]:
    """One object of each class that a `with` block can hold."""
    ctx, gpu = undo.enter_context(verbs.open("soft0")), undo.enter_context(gn.Gpu("host"))
    pd, memory = ctx.create_pd(), gpu.alloc(4096, gn.MemType.CPU_GPU)
    here = MemoryMap(pd, undo.enter_context(closing(HostMemory(4096))))
    qp = gpu.create_qp(pd, 16)
    return [ctx, gpu, pd, memory, qp, gpu.export_qps([qp]), gpu.create_qp_group(pd, 16), gpu.create_semaphore(4),
            gpu.create_service(), BufInventory(1).buf(here)]


def test_asyncio(monkeypatch):
    def refuse(self: verbs.Context) -> None:
        raise TimedOutError("it does not end")

    async def fail(error: Exception) -> None:
        async with verbs.open_async("soft0") as opened:
            held.append(opened)
            monkeypatch.setattr(verbs.Context, "close", refuse)
            raise error

    held: list[verbs.Context] = []
    error = AssertionError("first")
    with pytest.raises(AssertionError, match="first"):
        asyncio.run(fail(error))
    monkeypatch.undo()
    held[0].close()
    assert error.__notes__ == ["Then close() failed: TimedOutError: it does not end"]


@pytest.mark.parametrize("number", range(10))
def test_every_class(number, monkeypatch):
    """Whatever is held by the block: its own refusal, for whatever reason, does not hide the block's error."""
    with ExitStack() as undo:
        made = blocks(undo)
        held = made[number]

        def refuse(self: object) -> None:
            raise TimedOutError("it does not end")

        name = "close" if hasattr(held, "close") else "release"
        with monkeypatch.context() as patch:
            patch.setattr(type(held), name, refuse)
            with pytest.raises(AssertionError, match="first") as caught, held:  # type: ignore[attr-defined]
                raise AssertionError("first")
            assert caught.value.__notes__ == ["Then close() failed: TimedOutError: it does not end"]
            with pytest.raises(DocaError, match="it does not end"), held:  # type: ignore[attr-defined]
                pass
