"""Waiting for tasks: with a deadline, in asyncio, and without a callback."""

import asyncio

import pytest

from errands import Errand, Errands
from gpunetio.core import ContextState, ProgressEngine
from gpunetio.errors import BadStateError, DocaError, TimedOutError


class Prompt(Errands):
    """A device that ends a task at each look, the oldest one first."""

    def _poll(self):
        if self.waiting:
            task = self.waiting[0]
            self.end(task, DocaError("it was told to fail") if task.user_data == "fail" else None)


def test_wait_returns_the_task_or_raises_its_error(pd):
    with Prompt(pd) as context:
        task = Errand(context)
        assert task.submit().wait(5) is task
        with pytest.raises(DocaError, match="told to fail"):
            Errand(context, "fail").submit().wait(5)
        with pytest.raises(BadStateError, match="was not submitted"):
            Errand(context).wait(5)


def test_wait_has_a_deadline(pd):
    with Errands(pd) as context:
        task = Errand(context).submit()
        with pytest.raises(TimedOutError, match=r"^the end of Errand of context of .* did not come within 0\.01 s$"):
            task.wait(0.01)
        context.end(task)
        assert task.wait(5).done


def test_coroutines_wait_at_the_same_time(pd):
    engine = ProgressEngine()
    order = []

    async def one(context, n):
        await Errand(context, n)
        order.append(n)

    async def both():
        with Prompt(pd) as a, Prompt(pd) as b:  # two engines
            await asyncio.gather(*(one(context, n) for n in range(5) for context in (a, b)))
            with pytest.raises(DocaError, match="told to fail"):
                await Errand(a, "fail")

    asyncio.run(both())
    assert sorted(order) == sorted([*range(5), *range(5)])
    assert not engine.progress()


def test_one_engine_for_several_contexts(pd):
    engine, a, b = ProgressEngine(), Prompt(pd), Prompt(pd)
    for context in (a, b):
        engine.connect(context)
        with pytest.raises(BadStateError, match="connected"):
            ProgressEngine().connect(context)
    with a, b:
        tasks = [Errand(context).submit() for context in (a, b)]
        assert engine.progress()
        assert all(task.done for task in tasks)
        with pytest.raises(BadStateError, match="before start"):
            engine.connect(a)
    assert a.state is b.state is ContextState.IDLE
