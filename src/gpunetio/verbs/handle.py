"""The base class of all verbs objects. Each has an owning process, a closing order, and errors that name it."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, ClassVar, NoReturn, TypeVar, cast
from weakref import ref

from ..arguments import whole
from ..closing import Closing
from ..dropped import Droppable
from ..errors import BadStateError, InUseError, InvalidValueError, NoMemoryError
from ..interrupts import Whole, deferred

if TYPE_CHECKING:
    from .context import Context


_LISTED = 5  # how many users an error names
Owner = TypeVar("Owner", bound="Handle")


def listed(users: Collection[Handle]) -> str:
    """Return the names of the first few users, and how many more there are."""
    more = f" and {len(users) - _LISTED} more" if len(users) > _LISTED else ""
    return ", ".join(map(str, itertools.islice(users, _LISTED))) + more


class _Made(Whole):
    """The metaclass of handles. If the device has no room, it closes dropped objects and tries again (dropped.py)."""

    if not TYPE_CHECKING:

        def __call__(cls, *args: object, **kwargs: object) -> object:
            try:
                return super().__call__(*args, **kwargs)
            except NoMemoryError:
                contexts = [ctx for given in (*args, *kwargs.values()) if (ctx := getattr(given, "ctx", None))]
                if not contexts or not contexts[0].dropped.found():
                    raise
            return super().__call__(*args, **kwargs)


class _Itself:
    """A reference to a handle for its closing steps. It is set only while they run, because the handle owns them."""

    handle: Handle | None = None


class Handle(Closing, Droppable, metaclass=_Made):
    """An object on a device. It is a context manager, and lives until it or its parent is closed.

    A context or PD closes what was created from it. Any other object refuses to close while another object needs it.
    Closing waits for kernels that were given the object, or an object that closes with it. Ctrl+C never leaves an
    object half created or half closed.

    An object keeps the objects that it needs alive; they refer to it weakly. An object that nothing refers to any more
    is closed when the next object is created from its context, with a ResourceWarning (dropped.py).
    """

    _rank: ClassVar[int]  # a parent closes objects of the lowest rank first
    _closes_users: bool = False
    _kept: ClassVar[bool] = False  # whether the context keeps it alive until it is closed
    _handle: int = 0  # the provider's handle of an object created with a DEVX command

    _undo: ExitStack | None = None  # the steps of close(); None unless the object is open

    def __init__(self, ctx: Context):
        self.ctx = ctx
        self._label = type(self).__name__
        self._pid = os.getpid()
        self._itself = _Itself()
        self._uses: tuple[Handle, ...] = ()
        self._users: dict[int, ref[Handle]] = {}  # by id()
        self._unacknowledged = 0  # events delivered but not acknowledged
        self._acknowledging = threading.Lock()
        if ctx is not self and ctx.open_here:
            ctx.dropped.close_all()

    @property
    def open_here(self) -> bool:
        """Return whether the object is open, and this process opened it."""
        return self._undo is not None and self._pid == os.getpid()

    def when_dropped(self) -> None:
        self._unacknowledged = 0  # nothing can acknowledge them any more
        self.know()  # the collector clears weak references before it calls finalizers
        self.ctx.dropped.note(self)

    def know(self) -> None:
        """Register this object with the objects that it needs."""
        for used in self._uses:
            used._users[id(self)] = ref(self)

    def _use(self, *handles: Handle | None) -> None:
        """Record objects that this object needs. They must be open and belong to the same context."""
        for handle in handles:
            if handle is None or handle in self._uses:
                continue
            handle.check_open()
            if handle.ctx is not self.ctx:
                raise InvalidValueError(f"{handle} belongs to another context: use one made from {self.ctx}")
            self._uses += (handle,)

    def _exchange(self, before: Iterable[Handle], after: Iterable[Handle]) -> None:
        """Replace objects that this open object needs with others."""
        before, after = tuple(before), tuple(after)
        for used in after:
            used.check_open()
        self._uses = (*(used for used in self._uses if used not in before), *after)
        for used in before:
            used._users.pop(id(self), None)
        self.know()

    def _step(self, close: Callable[[Owner], None]) -> Callable[[], None]:
        """Return a method of the object as a step for `undo`. A bound method would keep the object alive."""
        itself = self._itself
        itself.handle = self
        return lambda: close(cast("Owner", itself.handle))

    def _opened(self, label: str, undo: ExitStack) -> None:
        """Mark the object as open. `undo` destroys it; the objects that it needs stay open until then."""
        self._label, self._undo = label, undo.pop_all()
        self._itself.handle = None
        self.know()
        if self._kept:
            self.ctx.kept[self] = None

    def check_open(self) -> None:
        """Raise BadStateError unless the object is open and this process opened it."""
        if self._pid != os.getpid():
            raise BadStateError(f"{self} was opened in process {self._pid}: open anew, or use spawn")
        if self._undo is None:
            raise BadStateError(f"{self} is closed")

    @property
    def closed(self) -> bool:
        """Return whether `close()` was called on the object or a parent."""
        return self._undo is None

    @property
    def users(self) -> tuple[Handle, ...]:
        """Return the objects that need this object."""
        return tuple(user for known in tuple(self._users.values()) if (user := known()) is not None)

    @property
    def devx_handle(self) -> int:
        """Return the provider's handle of an object created with a DEVX command; 0 for any other object."""
        return self._handle

    def close(self) -> None:
        """Destroy the object. Idempotent. In a forked child, do nothing: the object belongs to the parent process."""
        if not self.open_here:
            return
        if self.users and not self._closes_users:
            self.ctx.dropped.close_all()
            if users := self.users:
                raise InUseError(f"{self} is still used by {listed(users)}: close that first")
        if self._unacknowledged:
            raise InUseError(f"{self} has {self._unacknowledged} event(s) that were not acknowledged: do that first")
        self.wait_idle()
        with deferred(), self.ctx.dropped.closing if self._closes_users else nullcontext():
            self.close_with_owner()

    def wait_idle(self) -> None:
        """Wait until no kernel uses the object or anything closed with it. TimedOutError if a kernel does not end."""
        for user in self.users:
            user.wait_idle()

    def close_with_owner(self) -> None:
        """Close the object without checks, for `close()` or for an owner that closes. No kernel uses it any more."""
        if self._undo is None:
            return
        with ExitStack() as steps:  # in reverse order; every step runs, even if others raise
            steps.callback(self._release, self._undo)
            for user in sorted(self.users, key=lambda user: user._rank, reverse=True):
                steps.callback(user.close_with_owner)

    def _release(self, undo: ExitStack) -> None:
        self._undo = None
        self.ctx.kept.pop(self, None)
        for used in self._uses:
            used._users.pop(id(self), None)
        self._itself.handle = self
        try:
            undo.close()
        finally:
            self._itself.handle = None

    def hold_for_event(self) -> None:
        """Keep the object open until a delivered event about it is acknowledged."""
        with self._acknowledging:
            self._unacknowledged += 1

    def acknowledge(self, count: int) -> None:
        """Acknowledge `count` events about the object."""
        with self._acknowledging:
            if not 1 <= whole("count", count) <= self._unacknowledged:
                raise InvalidValueError(f"{count} events acknowledged: {self} waits for {self._unacknowledged}")
            self._unacknowledged -= count

    def __str__(self) -> str:
        return self._label

    def __repr__(self) -> str:
        return f"<{', '.join([self._label, *(['closed'] if self.closed else self._details())])}>"

    def _details(self) -> Iterable[str]:
        """Return what `repr()` shows after the name, without querying the device."""
        return ()

    def __reduce__(self) -> NoReturn:
        raise BadStateError(f"{self} cannot be pickled: it belongs to this process; open the device there")
