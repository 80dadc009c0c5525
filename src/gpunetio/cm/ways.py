"""Address handles for messages to peers, created by a thread because a neighbour may take seconds to answer."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import DocaError, DriverError, FullError, NotFoundError
from ..service import ServiceThread
from ..verbs.ah import AddressHandle
from .address import text_of
from .gsi import GeneralServices
from .path import Path

logger: logging.Logger = logging.getLogger("gpunetio.cm")

PATIENCE = 3.0  # seconds that a neighbour has to answer
_LOOK = 0.005  # seconds between two checks whether neighbours have answered
_PATHS = 32  # cached address handles of each kind: a NIC does not have many
_FRESH = 1.0  # seconds that a handle stays in use
_REFUSED = 64  # peers that wait to be refused
_REFUSALS = 2  # of these get a handle per check: at most 400 a second, whatever strangers send
_FEW = 64  # neighbours that are checked at full rate; with more, checks become rarer
_WAITING = 64  # messages that may wait for one path

Tell: TypeAlias = "Callable[[AddressHandle | DocaError], None]"
_Handles: TypeAlias = "OrderedDict[Path, tuple[float, AddressHandle]]"  # expiry and handle; the newest is last


@dataclass
class _Search:
    """A search for an address handle. Each of `tell` is called when it is found, or at its own deadline.

    `refusal` says that only refusals wait for it.
    """

    refusal: bool = True
    tell: list[tuple[float, Tell]] = field(default_factory=list)


@dataclass
class _Neighbour:
    """A neighbour that was asked, and its deadline to answer."""

    path: Path
    until: float
    reached: Callable[[], None]
    silent: Callable[[DocaError], None]


class Ways:
    """The address handles for peers, by path. Callers hold `lock`, which is free during waits for a neighbour.

    `told` is called after those waiting for a path were called. `refuses` says whether a message only refuses a
    stranger's request, or only confirms the end of an unknown connection.

    A handle leads to the program that had the address when the handle was created, so handles are renewed regularly.
    Handles for refusals are created at a limited rate and cached separately, because strangers can provoke any number.
    """

    def __init__(
        self, name: str, services: GeneralServices, lock: threading.RLock, told: Callable[[], None],
        refuses: Callable[[bytes], bool], undo: ExitStack,
    ):
        self._services, self._told, self._refuses = services, told, refuses
        self._changed = threading.Condition(lock)
        self._handles: dict[bool, _Handles] = {False: OrderedDict(), True: OrderedDict()}  # True: only for refusals
        self._left: set[AddressHandle] = set()
        self._searches: OrderedDict[Path, _Search] = OrderedDict()
        self._neighbours: list[_Neighbour] = []
        self._urgent = self._stopping = False
        self._thread = ServiceThread(f"gpunetio {name} CM ways", self._serve)
        self._thread.start()
        undo.callback(self._stop)

    def send(self, path: Path, mad: bytes) -> None:
        """Send a 256-byte datagram to queue pair 1 at the end of a path, at once or when the address handle is found.

        It may get lost here, as on the wire: if the send queue is full, or if the destination does not answer.
        """

        def tell(found: AddressHandle | DocaError) -> None:
            if isinstance(found, AddressHandle):
                self._services.send(found, mad)
            else:
                logger.info("a datagram to %s is lost: %s", text_of(path.gid), found)

        self._find(path, PATIENCE, tell, self._refuses(mad))

    def find(self, path: Path, patience: float, tell: Tell) -> None:
        """Call `tell` with the address handle of a path, at once or when it is found, or with the error.

        The error is NotFoundError if the neighbour does not answer within `patience` seconds.
        """
        self._find(path, patience, tell, False)

    def reach(self, path: Path, reached: Callable[[], None], silent: Callable[[DocaError], None]) -> None:
        """Call `reached` when the neighbour of a path is known, at once or later, or `silent` if it does not answer.

        This creates no address handle. There may be as many neighbours as there are requests in backlogs.
        """
        try:
            if self._services.seek(path):
                reached()
                return
        except DocaError as error:
            silent(error)
            return
        self._neighbours.append(_Neighbour(path, time.monotonic() + PATIENCE, reached, silent))
        self._changed.notify_all()

    def _find(self, path: Path, patience: float, tell: Tell, refusal: bool) -> None:
        now = time.monotonic()
        for handles in self._handles.values():
            until, handle = handles.get(path, (0.0, None))
            if handle is not None and now < until:
                tell(handle)
                return
        search = self._searches.get(path)
        if search is None:
            refused = [other for other, waits in self._searches.items() if waits.refusal] if refusal else []
            if len(refused) >= _REFUSED:
                del self._searches[refused[0]]  # a peer that exists asks again
            search = self._searches[path] = _Search()
        if not refusal:
            search.refusal, self._urgent = False, True
        if len(search.tell) < _WAITING:
            search.tell.append((now + patience, tell))
        elif not refusal:
            tell(FullError(f"{_WAITING} messages wait for the way to {text_of(path.gid)}: try again when it is found"))
        self._changed.notify_all()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (paths := self._wanted()) is not None:
            refusals = 0  # that got a handle or an error
            for path, refusal in paths:
                if refusal and refusals == _REFUSALS:
                    continue
                found = self._look(path)
                refusals += refusal and found is not None
                with self._changed:
                    self._settle(path, found)

    def _wanted(self) -> list[tuple[Path, bool]] | None:
        """Wait until it is time for a check. Return the paths to search, refusals last, or None once closed."""
        with self._changed:
            if (self._searches or self._neighbours) and not self._urgent:
                pause = _LOOK * (1 + len(self._neighbours) // _FEW)
                self._changed.wait_for(lambda: self._urgent or self._stopping, pause)
            self._changed.wait_for(lambda: self._searches or self._neighbours or self._stopping)
            if self._stopping:
                return None
            self._urgent = False
            self._look_for_neighbours()
            return sorted(((path, search.refusal) for path, search in self._searches.items()), key=lambda way: way[1])

    def _look_for_neighbours(self) -> None:
        """Call those waiting for neighbours that have answered or are past their deadline. The lock is held."""
        asked, self._neighbours = self._neighbours, []
        for one in asked:
            try:
                if self._services.seek(one.path):
                    one.reached()
                elif time.monotonic() < one.until:
                    self._neighbours.append(one)
                else:
                    one.silent(_silence(one.path))
            except DocaError as error:
                one.silent(error)
        if len(self._neighbours) < len(asked):
            self._told()

    def _look(self, path: Path) -> AddressHandle | DocaError | None:
        """Return the address handle of a path, or an error, or None if the neighbour has not answered yet."""
        try:
            return self._services.handle(path) if self._services.seek(path) else None
        except DocaError as error:
            return error
        except Exception as error:
            logger.exception("no way to %s", text_of(path.gid))
            return DriverError(f"no way to {text_of(path.gid)}: {error!r}")

    def _settle(self, path: Path, found: AddressHandle | DocaError | None) -> None:
        search = self._searches.get(path)
        if isinstance(found, AddressHandle):
            self._keep(path, found, search is None or search.refusal)
        if search is None:  # the search was dropped in favour of others
            return
        now = time.monotonic()
        over = [waits for waits in search.tell if found is not None or waits[0] <= now]
        search.tell = [waits for waits in search.tell if waits not in over]
        if not search.tell:
            del self._searches[path]
        for _, tell in over:
            tell(_silence(path) if found is None else found)
        self._told()

    # --- handles -----------------------------------------------------------------------------------------------------

    def _keep(self, path: Path, handle: AddressHandle, refusal: bool) -> None:
        handles = self._handles[refusal]
        before = handles.pop(path, None)
        if before is not None:
            self._left.add(before[1])
        handles[path] = time.monotonic() + _FRESH, handle
        if len(handles) > _PATHS:
            _, (_, oldest) = handles.popitem(last=False)
            self._left.add(oldest)
        self.sweep()

    def sweep(self) -> None:
        """Close replaced address handles that no datagram in flight needs any more."""
        self._services.reap()
        for unused in self._left.difference(self._services.in_flight()):
            self._left.remove(unused)
            unused.close()

    def _stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()


def _silence(path: Path) -> NotFoundError:
    return NotFoundError(
        f"nobody answers for {text_of(path.gid)}: open the peer first, with this address, on the same network"
    )
