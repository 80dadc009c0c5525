"""A context of DOCA Core whose device is the test: the test decides when tasks end, and how."""

from contextlib import ExitStack

from gpunetio.core import CoreContext, Task
from gpunetio.errors import DocaError, DocaErrorCode, error_of
from gpunetio.verbs import PD


class Errand(Task):
    """A task that ends when the test says so."""

    context: "Errands"

    def _post(self, held: ExitStack) -> None:
        self.context.waiting.append(self)


class Errands(CoreContext):
    """Tasks in `waiting` have not ended; `resources` counts what a started context holds."""

    def __init__(self, pd: PD):
        super().__init__(pd)
        self.waiting: list[Errand] = []
        self.resources = 0
        self.busy = False
        self._created("context of errands")

    def end(self, task: Errand, error: DocaError | None = None) -> None:
        """Let a task end, as a device would."""
        self.waiting.remove(task)
        self._finish(task, error)

    def _start(self, undo: ExitStack) -> None:
        self.resources += 1
        undo.callback(self._release_resources)

    def _release_resources(self) -> None:
        self.resources -= 1

    def _flush(self) -> None:
        for task in list(self.waiting):
            self.end(task, error_of(DocaErrorCode.SHUTDOWN, "flushed"))

    def _busy(self) -> bool:
        return self.busy
