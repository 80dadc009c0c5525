"""Address handles of the connection manager: one for each path, as long as it is fresh."""

import threading
from contextlib import ExitStack
from typing import Any

import pytest

from gpunetio.cm import ways
from gpunetio.cm.address import gid_of
from gpunetio.cm.path import Path
from gpunetio.cm.ways import Ways
from gpunetio.errors import DocaError
from nic_rig import until


class Handle:
    """An address handle that says whether it is closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


class Services:
    """A queue pair 1 that notes what it sends, and by which handle. `flying` are those that are under way."""

    def __init__(self) -> None:
        self.made: list[Handle] = []
        self.sent: list[tuple[Handle, bytes]] = []
        self.flying: set[Any] = set()

    def seek(self, path: Path) -> bool:
        return True

    def handle(self, path: Path) -> Handle:
        self.made.append(Handle())
        return self.made[-1]

    def send(self, handle: Handle, mad: bytes) -> None:
        self.sent.append((handle, mad))

    def reap(self) -> None: ...

    def in_flight(self) -> set[Any]:
        return self.flying


@pytest.fixture
def services():
    return Services()


@pytest.fixture
def lock():
    return threading.RLock()


@pytest.fixture
def found(services, lock, monkeypatch):
    monkeypatch.setattr(ways, "AddressHandle", Handle)
    with ExitStack() as undo:
        yield Ways("a NIC", services, lock, lambda: None, lambda mad: mad.startswith(b"no"), undo)


def paths(count: int) -> list[Path]:
    return [Path(gid_of(f"10.0.{number >> 8}.{number & 255}")) for number in range(count)]


def send(found: Ways, services: Services, lock: threading.RLock, path: Path, mad: bytes) -> Handle:
    """Send a message, and wait until it has left: by which handle?"""
    before = len(services.sent)
    with lock:
        found.send(path, mad)
    until(lambda: len(services.sent) > before, "the message")
    return services.sent[-1][0]


def test_a_fresh_handle_is_used_again(found, services, lock):
    one, other = paths(2)
    handles = [send(found, services, lock, path, b"%d" % i) for i, path in enumerate((one, one, other, one))]
    assert handles == [services.made[0], services.made[0], services.made[1], services.made[0]]
    assert [mad for _, mad in services.sent] == [b"0", b"1", b"2", b"3"]


def test_an_old_one_is_made_anew_and_closed(found, services, lock, monkeypatch):
    """The address may be another program's by now. What is under way keeps its handle."""
    monkeypatch.setattr(ways, "_FRESH", -1.0)
    (path,) = paths(1)
    services.flying.add(first := send(found, services, lock, path, b"a"))
    second = send(found, services, lock, path, b"b")
    assert first is not second
    assert not first.closed
    services.flying.clear()
    third = send(found, services, lock, path, b"c")
    until(lambda: first.closed and second.closed, "the old ones' end")
    assert not third.closed


def test_refusals_take_no_room_of_others(found, services, lock):
    kept = send(found, services, lock, paths(1)[0], b"yes")
    for path in paths(40)[1:]:
        send(found, services, lock, path, b"no")
    assert send(found, services, lock, paths(1)[0], b"yes") is kept
    until(lambda: sum(handle.closed for handle in services.made) == 39 - 32, "the end of the oldest refusals")
    assert not kept.closed


def test_a_path_that_cannot_be_found_is_told(found, services, lock, monkeypatch):
    def refuse(path: Path) -> Handle:
        raise DocaError("no way")

    monkeypatch.setattr(services, "handle", refuse)
    told: list[Any] = []
    with lock:
        found.find(paths(1)[0], 5, told.append)
    until(lambda: told, "an answer")
    assert str(told[0]) == "no way"
