"""States of contexts and tasks: random programs, with callbacks that do things, against a plain model."""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from errands import Errand, Errands
from gpunetio import verbs
from gpunetio.core import ContextState, ProgressEngine, TaskState
from gpunetio.errors import BadStateError, DocaError, DocaErrorCode, NoMemoryError, error_of

IDLE, STARTING, RUNNING, STOPPING = ContextState
NEW, IN_FLIGHT, DONE, FREED = TaskState
MOST = 5  # tasks at a time
IN_CALLBACK = ("nothing", "stop", "again", "free", "progress", "close", "raise")


class Oops(Exception):
    """What a callback of the program raises."""


class Model:
    """What the documents say, in dictionaries: tasks by number."""

    def __init__(self):
        self.state, self.moves, self.log = IDLE, [], []
        self.tasks: dict[int, TaskState] = {}
        self.waiting: list[int] = []  # the device has not ended them
        self.ended: deque[tuple[int, str]] = deque()  # the program has not been told

    def move(self, *states):
        for state in states:
            self.moves.append((self.state, state))
            self.state = state

    def stop(self, in_callback):
        if self.state is RUNNING:
            self.move(STOPPING)
            self.ended += [(task, "SHUTDOWN") for task in self.waiting]
            self.waiting = []
            if not in_callback:
                self.settle()

    def settle(self):
        if self.state is STOPPING and IN_FLIGHT not in self.tasks.values():
            self.move(IDLE)

    def submit(self, task):
        self.tasks[task] = IN_FLIGHT
        self.waiting.append(task)

    def progress(self, actions):
        """Whether there was anything, and whether a callback has raised."""
        told = len(self.ended) if self.state is not IDLE else 0
        for _ in range(told):
            task, result = self.ended.popleft()
            self.tasks[task] = DONE
            self.log.append((task, result))
            match actions[task]:
                case "stop":
                    self.stop(in_callback=True)
                case "again" if self.state is RUNNING:
                    self.submit(task)
                case "free":
                    self.tasks[task] = FREED
                case "raise":
                    return True, True
        before = self.state
        self.settle()
        return told > 0 or self.state is not before, False


class LifeCycle(RuleBasedStateMachine):
    pd: verbs.PD

    @initialize()
    def make(self):
        self.model, self.context, self.engine = Model(), Errands(self.pd), ProgressEngine()
        self.engine.connect(self.context)
        self.moves, self.log = [], []
        self.context.on_state_changed = lambda _, before, after: self.moves.append((before, after))
        self.context.configure(Errand, self.called, self.called, most=MOST)
        self.tasks: list[Errand] = []
        self.actions: list[str] = []

    def called(self, task):
        """The program's callback: it notes the result, and does what the task is for."""
        number = task.user_data
        self.log.append((number, task.status.code.name if task.status else "ok"))
        match self.actions[number]:
            case "stop":
                assert self.context.stop() is STOPPING
            case "again" if self.context.state is RUNNING:
                task.submit()
            case "again":
                with pytest.raises(BadStateError, match="STOPPING"):
                    task.submit()
            case "free":
                task.free()
            case "progress":
                with pytest.raises(BadStateError, match="in a callback"):
                    self.engine.progress()
            case "close":
                with pytest.raises(BadStateError, match="in a callback"):
                    self.context.close()
            case "raise":
                raise Oops

    @rule()
    def start(self):
        if self.model.state is IDLE:
            self.context.start()
            self.model.move(STARTING, RUNNING)
        else:
            with pytest.raises(BadStateError, match="only an idle context"):
                self.context.start()

    @rule()
    def stop(self):
        if self.model.state is IDLE:
            with pytest.raises(BadStateError, match="only a running context"):
                self.context.stop()
        else:
            self.model.stop(in_callback=False)
            assert self.context.stop() is self.model.state

    @rule(action=st.sampled_from(IN_CALLBACK))
    def new_task(self, action):
        if sum(state is not FREED for state in self.model.tasks.values()) == MOST:
            with pytest.raises(NoMemoryError, match="as configured"):
                Errand(self.context)
        else:
            self.model.tasks[len(self.tasks)] = NEW
            self.tasks.append(Errand(self.context, len(self.tasks)))
            self.actions.append(action)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def submit(self, data):
        task = data.draw(st.sampled_from(range(len(self.tasks))))
        if self.model.state is RUNNING and self.model.tasks[task] in (NEW, DONE):
            assert self.tasks[task].submit() is self.tasks[task]
            self.model.submit(task)
        else:
            with pytest.raises(BadStateError):
                self.tasks[task].submit()

    @precondition(lambda self: self.model.waiting)
    @rule(data=st.data(), well=st.booleans())
    def device_ends(self, data, well):
        task = data.draw(st.sampled_from(self.model.waiting))
        self.context.end(self.tasks[task], None if well else error_of(DocaErrorCode.IO_FAILED, "the device says so"))
        self.model.waiting.remove(task)
        self.model.ended.append((task, "ok" if well else "IO_FAILED"))

    @rule()
    def progress(self):
        anything, raises = self.model.progress(self.actions)
        if raises:
            with pytest.raises(Oops):
                self.engine.progress()
        else:
            assert self.engine.progress() == anything

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def free(self, data):
        task = data.draw(st.sampled_from(range(len(self.tasks))))
        if self.model.tasks[task] is IN_FLIGHT:
            with pytest.raises(BadStateError, match="in flight"):
                self.tasks[task].free()
        else:
            self.tasks[task].free()
            self.model.tasks[task] = FREED

    @rule()
    def configure(self):
        if self.model.state is IDLE:
            self.context.configure(Errand, self.called, self.called, most=MOST)
        else:
            with pytest.raises(BadStateError, match="before start"):
                self.context.configure(Errand)

    @invariant()
    def same(self):
        if not hasattr(self, "model"):
            return
        model = self.model
        assert self.context.state is model.state
        assert self.moves == model.moves
        assert self.log == model.log
        assert {n: task.state for n, task in enumerate(self.tasks)} == model.tasks
        assert self.context.num_inflight == list(model.tasks.values()).count(IN_FLIGHT)
        assert self.context.resources == (model.state in (RUNNING, STOPPING))

    def teardown(self):
        """Closing ends all tasks, whatever the state."""
        if not hasattr(self, "model"):
            return
        self.actions = ["nothing"] * len(self.tasks)
        self.context.close()
        assert self.context.closed
        assert not self.context.resources
        assert IN_FLIGHT not in {task.state for task in self.tasks}
        assert not self.engine.progress()


def test_random_programs(pd):
    LifeCycle.pd = pd
    case = LifeCycle.TestCase()
    case.settings = settings(settings.get_profile("gpunetio"), max_examples=60, stateful_step_count=40)
    case.runTest()


def test_a_stop_in_a_callback_is_in_progress(pd):
    states = []
    with Errands(pd) as context:
        context.stop()
        context.configure(Errand, on_done=lambda task: states.append(task.context.stop()))
        context.start()
        context.end(Errand(context).submit())
        assert context.engine.progress()
    assert states == [STOPPING]
    assert context.state is IDLE


def test_a_context_waits_for_what_is_no_task(pd):
    with Errands(pd) as context:
        context.busy = True
        assert context.stop() is STOPPING
        assert not context.engine.progress()
        context.busy = False
        assert context.engine.progress()
        assert context.state is IDLE


def test_an_owner_that_closes_ends_the_tasks(pd):
    domain = pd.ctx.create_pd()
    context, ended = Errands(domain), []
    context.configure(Errand, on_error=ended.append)
    context.start()
    task = Errand(context).submit()
    domain.close()
    assert ended == [task]
    assert task.status is not None
    assert task.status.code is DocaErrorCode.SHUTDOWN
    assert context.closed
    assert not context.resources


def test_a_start_that_fails_leaves_an_idle_context(pd):
    class Broken(Errands):
        def _start(self, undo):
            super()._start(undo)
            raise DocaError("no queue today")

    context = Broken(pd)
    with pytest.raises(DocaError, match="no queue today"):
        context.start()
    assert (context.state, context.resources) == (IDLE, 0)
    context.close()
