"""Contexts: the common part of the libraries' main objects (`doca_ctx`)."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from enum import IntEnum
from functools import partial
from typing import NamedTuple, Self

from ..arguments import instance, whole
from ..errors import BadStateError, DocaError, DocaErrorCode, NoMemoryError, NotSupportedError, error_of
from ..gpu import Gpu
from ..gpu.memory import LAUNCH_TIMEOUT, RunningLaunches
from ..interrupts import deferred
from ..jit.code import Launch
from ..verbs import PD, Handle
from .engine import ProgressEngine
from .task import Task

CLOSE_TIMEOUT = 30.0  # seconds that closing waits at most for tasks in flight


class ContextState(IntEnum):
    """enum doca_ctx_states. The numbers are gpunetio's."""

    IDLE     = 0
    STARTING = 1
    RUNNING  = 2
    STOPPING = 3


class _Configuration(NamedTuple):
    """The program's configuration for one type of task."""

    on_done: Callable[..., None] | None = None
    on_error: Callable[..., None] | None = None
    most: int | None = None


class CoreContext(Handle, ABC):
    """A library's object that is started, runs, and is stopped (`doca_ctx`).

    A context is configured while it is IDLE. `start` makes it RUNNING. `stop` makes it STOPPING and ends the tasks in
    flight with an error; when the last one has ended, the context is IDLE again. A with block starts the context, and
    closes it at the end.

    `on_state_changed` is None or a function of the context, its old state and its new state.

    With a Gpu, kernels drive the context (`doca_ctx_set_datapath_on_gpu`), and it runs no CPU tasks.
    """

    _rank = -1
    _has_gpu_datapath = False
    pd: PD
    on_state_changed: Callable[..., None] | None
    user_data: object

    def __init__(self, pd: PD, gpu: Gpu | None = None):
        super().__init__(instance("pd", pd, PD).ctx)
        self._use(pd, pd.ctx)
        self.pd = pd
        self.on_state_changed = self.user_data = None
        self._state = ContextState.IDLE
        self._engine: ProgressEngine | None = None
        self._configurations: dict[Callable[..., Task], _Configuration] = {}
        self._allocated: Counter[type[Task]] = Counter()
        self._in_flight: dict[Task, None] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._resources = ExitStack()
        self._launches = RunningLaunches()
        self._gpu: Gpu | None = None
        if gpu is not None:
            self._set_gpu(gpu)

    # --- what a library implements -----------------------------------------------------------------------------------

    def _created(self, label: str) -> None:
        """Mark the context as open. This is the last step of a constructor."""
        with ExitStack() as undo:
            undo.callback(self._abandon)
            self._opened(label, undo)

    @abstractmethod
    def _start(self, undo: ExitStack) -> None:
        """Create what a running context needs. `undo` destroys it after the context has stopped."""

    def _flush(self) -> None:
        """Make the device end everything in flight with an error."""

    def _busy(self) -> bool:
        """Return whether something other than tasks must end before the context is IDLE."""
        return False

    def _poll(self) -> None:
        """Poll the device. Report ended tasks to `_finish`, and other events to `_call`."""

    def _finish(self, task: Task, error: DocaError | None = None) -> None:
        """Record that the device has ended a task. The next `progress` notifies the program."""
        if task in self._in_flight:
            self._calls.append(partial(self._end, task, error))

    def _call(self, function: Callable[..., None], *args: object) -> None:
        """Schedule a callback of the program for the next `progress`. Any thread may call this."""
        self._calls.append(partial(function, *args))

    # --- configuration -----------------------------------------------------------------------------------------------

    def check_idle(self, what: str) -> None:
        """Raise BadStateError unless the context is open and IDLE. The message names `what`, which was to be set."""
        self.check_open()
        if self._state is not ContextState.IDLE:
            raise BadStateError(f"{self} is {self._state.name}: set {what} before start()")

    def configure(
        self,
        kind: Callable[..., Task],
        on_done: Callable[..., None] | None = None,
        on_error: Callable[..., None] | None = None,
        *,
        most: int | None = None,
    ) -> None:
        """Set the callbacks for tasks of the class `kind` (`doca_…_task_…_set_conf`).

        Each takes the task: `on_done` is called after a success, `on_error` after a failure. `most` limits the number
        of tasks of this class that exist and are not freed; None means no limit.
        """
        self.check_idle("the callbacks")
        instance("kind", kind, type)
        self._configurations[kind] = _Configuration(on_done, on_error, None if most is None else whole("most", most))

    @property
    def gpu(self) -> Gpu | None:
        """Return the Gpu whose kernels drive the context, or None."""
        return self._gpu

    def set_datapath_on_gpu(self, gpu: Gpu) -> None:
        """Let kernels drive the context instead of CPU tasks (`doca_ctx_set_datapath_on_gpu`)."""
        self.check_idle("the data path")
        self._set_gpu(gpu)

    def _set_gpu(self, gpu: Gpu) -> None:
        if not self._has_gpu_datapath:
            raise NotSupportedError(f"{type(self).__name__} has no data path for kernels")
        self._gpu = instance("gpu", gpu, Gpu)

    @property
    def engine(self) -> ProgressEngine:
        """Return the progress engine of the context."""
        if self._engine is None:
            ProgressEngine().connect(self)
        assert self._engine is not None
        return self._engine

    def attach_engine(self, engine: ProgressEngine) -> None:
        """Record the engine. Called by `ProgressEngine.connect`."""
        self.check_idle("the progress engine")
        if self._engine is not None:
            raise BadStateError(f"{self} is connected to a progress engine already")
        self._engine = engine

    # --- states ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> ContextState:
        """Return the state (`doca_ctx_get_state`)."""
        return self._state

    @property
    def num_inflight(self) -> int:
        """Return the number of submitted tasks that have not ended (`doca_ctx_get_num_inflight_tasks`)."""
        return len(self._in_flight)

    def _move(self, state: ContextState) -> None:
        before, self._state = self._state, state
        if self.on_state_changed:
            with self.engine.calling():
                self.on_state_changed(self, before, state)

    @deferred()
    def start(self) -> None:
        """Start the context, from IDLE to RUNNING (`doca_ctx_start`). On failure, it is IDLE again."""
        self.check_open()
        if self._state is not ContextState.IDLE:
            raise BadStateError(f"{self} is {self._state.name}: only an idle context can be started")
        _ = self.engine
        self._move(ContextState.STARTING)
        try:
            with ExitStack() as undo:
                if self._gpu is not None:
                    self._gpu.attach(self)
                    undo.callback(self._gpu.detach, self)
                self._start(undo)
                self._resources = undo.pop_all()
        except BaseException:
            self._move(ContextState.IDLE)
            raise
        self._move(ContextState.RUNNING)

    @deferred()
    def stop(self) -> ContextState:
        """Stop the context (`doca_ctx_stop`), and return its state: IDLE, or STOPPING (`DOCA_ERROR_IN_PROGRESS`).

        Tasks in flight end with an error. If there are any, or if called from a callback, the engine's progress
        completes the stop. BadStateError for an idle context, or while a kernel that was given the context runs.
        """
        self.check_open()
        if self._state is ContextState.STOPPING:
            return self._state
        if self._state is not ContextState.RUNNING:
            raise BadStateError(f"{self} is {self._state.name}: only a running context can be stopped")
        self._launches.check_none(f"{self} cannot be stopped")
        self._move(ContextState.STOPPING)
        self._flush()
        if not self.engine.in_callback:
            self._settle()
        return self._state

    def _settle(self) -> None:
        """Become IDLE if the context is stopping and nothing is left to wait for."""
        if self._state is ContextState.STOPPING and not self._in_flight and not self._calls and not self._busy():
            resources, self._resources = self._resources, ExitStack()
            resources.close()
            self._move(ContextState.IDLE)

    def progress(self) -> bool:
        """Process completions, and call callbacks. Return whether there were any. Called by the engine."""
        if self._state is ContextState.IDLE:
            return False
        self._poll()
        waiting = len(self._calls)
        with self.engine.calling():
            for _ in range(waiting):
                self._calls.popleft()()
        before = self._state
        self._settle()
        return waiting > 0 or self._state is not before

    # --- tasks -------------------------------------------------------------------------------------------------------

    def note_task(self, task: Task) -> None:
        """Count a new task. Called by the task."""
        self.check_open()
        kind, most = type(task), self._configurations.get(type(task), _Configuration()).most
        if most is not None and self._allocated[kind] >= most:
            raise NoMemoryError(f"{self} has {most} {kind.__name__}s, as configured: free() one, or configure more")
        self._allocated[kind] += 1

    def forget_task(self, task: Task) -> None:
        """Stop counting a task that was freed. Called by the task."""
        self._allocated[type(task)] -= 1

    def check_tasks(self) -> None:
        """Raise an error unless a task can be submitted now."""
        self.check_open()
        if self._gpu is not None:
            raise NotSupportedError(f"kernels of GPU {self._gpu.name} drive {self}: it has no tasks of the CPU")
        if self._state is not ContextState.RUNNING:
            raise BadStateError(f"{self} is {self._state.name}: start() it before you submit tasks")

    def submitted(self, task: Task) -> None:
        """Record a task in flight. Called by the task."""
        self._in_flight[task] = None

    def _end(self, task: Task, error: DocaError | None) -> None:
        del self._in_flight[task]
        wanted = self._configurations.get(type(task), _Configuration())
        task.end(error, wanted.on_done if error is None else wanted.on_error)

    # --- kernels -----------------------------------------------------------------------------------------------------

    def check_launch(self) -> None:
        """Raise BadStateError unless the context is RUNNING. Called before a launch with it as an argument."""
        self.check_open()
        if self._state is not ContextState.RUNNING:
            raise BadStateError(f"{self} is {self._state.name}: start() it before you launch kernels with it")

    def used_by(self, launch: Launch) -> None:
        """Keep the context running while `launch` runs, which has it as an argument."""
        self._launches.add(launch)

    def wait_idle(self) -> None:
        self._launches.wait(LAUNCH_TIMEOUT, str(self))
        super().wait_idle()

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the context and close it. Idempotent. Waits for kernels, and for everything in flight to end.

        TimedOutError if something does not end. BadStateError in a callback: call `stop()` there.
        """
        if not self.closed and self._pid == os.getpid() and self._state is not ContextState.IDLE:
            if self.engine.in_callback:
                raise BadStateError(f"{self} cannot be closed in a callback: stop() it there, and close it afterwards")
            self.wait_idle()
            self.stop()
            self.engine.progress_until(lambda: self._state is ContextState.IDLE, CLOSE_TIMEOUT, f"the stop of {self}")
        super().close()

    def _abandon(self) -> None:
        """Release everything at once: the owner closes the context, or the context is idle and closes itself."""
        if self._state is not ContextState.IDLE:
            self._state = ContextState.STOPPING
            self._resources.close()
            for task in list(self._in_flight):
                self._end(task, error_of(DocaErrorCode.SHUTDOWN, f"{task} has not ended: {self} was closed"))
            self._calls.clear()
            self._state = ContextState.IDLE
        if self._engine is not None:
            self._engine.disconnect(self)

    def __enter__(self) -> Self:
        if self._state is ContextState.IDLE:
            self.start()
        return self
