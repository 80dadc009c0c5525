"""Contexts: what a library's object has in common with those of other libraries (`doca_ctx`)."""

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

CLOSE_TIMEOUT = 30.0  # seconds: the longest that closing waits for tasks that are in flight


class ContextState(IntEnum):
    """enum doca_ctx_states. The numbers are ours."""

    IDLE     = 0
    STARTING = 1
    RUNNING  = 2
    STOPPING = 3


class _Configuration(NamedTuple):
    """What the program wants of a type of task."""

    on_done: Callable[..., None] | None = None
    on_error: Callable[..., None] | None = None
    most: int | None = None


class CoreContext(Handle, ABC):
    """An object of a library that is started, runs, and is stopped (`doca_ctx`).

    It is configured while it is IDLE. `start` makes it RUNNING. `stop` makes it STOPPING, ends the tasks in flight with
    an error, and makes it IDLE when the last one has ended. A with block starts it, and closes it at the end.

    `on_state_changed` is None or a function of the context, the state before and the state now.

    With a Gpu, kernels drive it (`doca_ctx_set_datapath_on_gpu`), and it has no tasks of the CPU.
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
        """Mark the context as open, as the last step of a constructor."""
        with ExitStack() as undo:
            undo.callback(self._abandon)
            self._opened(label, undo)

    @abstractmethod
    def _start(self, undo: ExitStack) -> None:
        """Create what a running context needs. `undo` destroys it when the context has stopped."""

    def _flush(self) -> None:
        """Let what is in flight end with an error."""

    def _busy(self) -> bool:
        """Return whether something other than tasks must end before the context has stopped."""
        return False

    def _poll(self) -> None:
        """Look at the device, and report tasks that have ended to `_finish`, and other events to `_call`."""

    def _finish(self, task: Task, error: DocaError | None = None) -> None:
        """Note that the device has ended a task; the program is told in the next step of progress."""
        if task in self._in_flight:
            self._calls.append(partial(self._end, task, error))

    def _call(self, function: Callable[..., None], *args: object) -> None:
        """Call a callback of the program in the next step of progress. Any thread may ask for it."""
        self._calls.append(partial(function, *args))

    # --- configuration -----------------------------------------------------------------------------------------------

    def check_idle(self, what: str) -> None:
        """Raise BadStateError unless the context is open and IDLE, as `what` needs it."""
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
        """Set what tasks of the class `kind` call when they end, well or not (`doca_…_task_…_set_conf`).

        Both functions take the task; `on_done` is not called for one that failed. `most` limits how many tasks of the
        class exist that were not freed; None does not.
        """
        self.check_idle("the callbacks")
        instance("kind", kind, type)
        self._configurations[kind] = _Configuration(on_done, on_error, None if most is None else whole("most", most))

    @property
    def gpu(self) -> Gpu | None:
        """Return the Gpu whose kernels drive the context, or None."""
        return self._gpu

    def set_datapath_on_gpu(self, gpu: Gpu) -> None:
        """Let kernels drive the context, in place of tasks (`doca_ctx_set_datapath_on_gpu`)."""
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
        """Note the engine. Called by `ProgressEngine.connect`."""
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
        """Return how many tasks were submitted and have not ended (`doca_ctx_get_num_inflight_tasks`)."""
        return len(self._in_flight)

    def _move(self, state: ContextState) -> None:
        before, self._state = self._state, state
        if self.on_state_changed:
            with self.engine.calling():
                self.on_state_changed(self, before, state)

    @deferred()
    def start(self) -> None:
        """Start the context (`doca_ctx_start`): from IDLE to RUNNING. If that fails, it is IDLE."""
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

        Tasks in flight end with an error. If there are any, or in a callback, progress of the engine does the rest.
        BadStateError for an idle context, or while a kernel that was given the context runs.
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
        """Become IDLE if the context is to stop and nothing is left."""
        if self._state is ContextState.STOPPING and not self._in_flight and not self._calls and not self._busy():
            resources, self._resources = self._resources, ExitStack()
            resources.close()
            self._move(ContextState.IDLE)

    def progress(self) -> bool:
        """Take what has completed, and call callbacks. Return whether there was anything. Called by the engine."""
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
        """Forget a task that was freed. Called by the task."""
        self._allocated[type(task)] -= 1

    def check_tasks(self) -> None:
        """Raise an error unless a task may be submitted now."""
        self.check_open()
        if self._gpu is not None:
            raise NotSupportedError(f"kernels of GPU {self._gpu.name} drive {self}: it has no tasks of the CPU")
        if self._state is not ContextState.RUNNING:
            raise BadStateError(f"{self} is {self._state.name}: start() it before you submit tasks")

    def submitted(self, task: Task) -> None:
        """Note a task in flight. Called by the task."""
        self._in_flight[task] = None

    def _end(self, task: Task, error: DocaError | None) -> None:
        del self._in_flight[task]
        wanted = self._configurations.get(type(task), _Configuration())
        task.end(error, wanted.on_done if error is None else wanted.on_error)

    # --- kernels -----------------------------------------------------------------------------------------------------

    def check_launch(self) -> None:
        """Raise BadStateError unless the context runs. Called before a launch with it as an argument."""
        self.check_open()
        if self._state is not ContextState.RUNNING:
            raise BadStateError(f"{self} is {self._state.name}: start() it before you launch kernels with it")

    def used_by(self, launch: Launch) -> None:
        """Keep the context running while `launch`, which has it as an argument, runs."""
        self._launches.add(launch)

    def wait_idle(self) -> None:
        self._launches.wait(LAUNCH_TIMEOUT, str(self))
        super().wait_idle()

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the context and close it. Idempotent. Waits for kernels, and for what is in flight to end.

        TimedOutError if that does not happen, BadStateError in a callback: call `stop()` there.
        """
        if not self.closed and self._pid == os.getpid() and self._state is not ContextState.IDLE:
            if self.engine.in_callback:
                raise BadStateError(f"{self} cannot be closed in a callback: stop() it there, and close it afterwards")
            self.wait_idle()
            self.stop()
            self.engine.progress_until(lambda: self._state is ContextState.IDLE, CLOSE_TIMEOUT, f"the stop of {self}")
        super().close()

    def _abandon(self) -> None:
        """Let go of everything at once: closed by its owner, or by itself when it is idle."""
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
