"""Tasks: operations of a context that complete asynchronously."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import ExitStack
from enum import IntEnum
from typing import Protocol, Self

from ..errors import BadStateError, DocaError, again
from ..interrupts import deferred
from .engine import ProgressEngine


class TaskState(IntEnum):
    """The state of a task. The numbers are gpunetio's."""

    NEW       = 0
    IN_FLIGHT = 1
    DONE      = 2
    FREED     = 3


class TaskOwner(Protocol):
    """The interface of a context that its tasks use."""

    @property
    def engine(self) -> ProgressEngine:
        """Return the progress engine that completes the task."""
        ...

    def note_task(self, task: Task) -> None:
        """Count a new task. NoMemoryError if the configured number of tasks exists already."""

    def forget_task(self, task: Task) -> None:
        """Stop counting a task that was freed."""

    def check_tasks(self) -> None:
        """Raise an error unless a task can be submitted now."""

    def submitted(self, task: Task) -> None:
        """Record a task in flight."""


class Task(ABC):
    """An asynchronous operation of a context (`doca_task`).

    `submit` starts it. The engine's progress completes it: `status` is then None or the error, and the callback
    configured for the task's type is called with the task. After that, it can be submitted again. Programs without
    callbacks use `await task` or `wait`.

    `user_data` is an arbitrary object.
    """

    context: TaskOwner
    user_data: object
    status: DocaError | None

    def __init__(self, context: TaskOwner, user_data: object = None):
        self.context, self.user_data, self.status = context, user_data, None
        self._state = TaskState.NEW
        self._held = ExitStack()  # what the task needs only while it is in flight
        context.note_task(self)

    @abstractmethod
    def _post(self, held: ExitStack) -> None:
        """Post the task to the device. When it completes, the context calls `end`, which closes `held`."""

    @property
    def state(self) -> TaskState:
        """Return the state of the task."""
        return self._state

    @property
    def done(self) -> bool:
        """Return whether the task has ended since it was last submitted."""
        return self._state is TaskState.DONE

    @deferred()  # Ctrl+C must not release what the device is already using
    def submit(self) -> Self:
        """Start the task (`doca_task_submit`, `doca_task_try_submit`), and return it.

        BadStateError unless the context is running and the task is not in flight. FullError if the context's queue has
        no room for another task: make progress, and try again.
        """
        if self._state in (TaskState.IN_FLIGHT, TaskState.FREED):
            raise BadStateError(f"{self} cannot be submitted: it is {self._state.name}")
        self.context.check_tasks()
        with ExitStack() as held:
            self._post(held)
            self._held = held.pop_all()
        self.status, self._state = None, TaskState.IN_FLIGHT
        self.context.submitted(self)
        return self

    def end(self, error: DocaError | None, callback: Callable[..., None] | None) -> None:
        """Store the result, and call the program's callback. Called by the context."""
        self.status, self._state = error, TaskState.DONE
        self._held.close()
        if callback:
            callback(self)

    def free(self) -> None:
        """Give the task back to its context (`doca_task_free`). Idempotent. Callbacks may call this.

        Only needed if the number of tasks is limited for its type. BadStateError while the task is in flight.
        """
        if self._state is TaskState.IN_FLIGHT:
            raise BadStateError(f"{self} is in flight: it can be freed when it has ended")
        if self._state is not TaskState.FREED:
            self._state = TaskState.FREED
            self.context.forget_task(self)

    def wait(self, timeout: float) -> Self:
        """Make progress until the task has ended, and return it. If the task failed, raise its error.

        TimedOutError after `timeout` seconds; the task is then still in flight.
        """
        self._check_submitted()
        self.context.engine.progress_until(
            lambda: self._state is not TaskState.IN_FLIGHT, timeout, f"the end of {self}"
        )
        return self._result()

    def __await__(self) -> Generator[object, None, Self]:
        """Submit the task if it is new, make progress until it ends, and return it. Raise its error if it failed."""
        return self._awaited().__await__()

    async def _awaited(self) -> Self:
        if self._state is TaskState.NEW:
            self.submit()
        self._check_submitted()
        await self.context.engine.progress_until_async(lambda: self._state is not TaskState.IN_FLIGHT)
        return self._result()

    def _check_submitted(self) -> None:
        if self._state is TaskState.NEW:
            raise BadStateError(f"{self} was not submitted: submit() it first")

    def _result(self) -> Self:
        if self.status is not None:
            raise again(self.status)
        return self

    def __str__(self) -> str:
        return f"{type(self).__name__} of {self.context}"

    def __repr__(self) -> str:
        return f"<{self}, {self._state.name}{f', {self.status}' if self.status else ''}>"
