"""Threads that serve."""

import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from gpunetio import Gpu, PortConfig, cm, device, kernel, verbs
from gpunetio.enums import NicHandler
from gpunetio.errors import NoMemoryError
from gpunetio.service import ServiceThread
from usage import Usage


def blocked(native_id: int) -> set[int]:
    """The signals that a thread does not take (proc(5): SigBlk)."""
    status = Path(f"/proc/self/task/{native_id}/status").read_text()
    mask = int(next(line for line in status.splitlines() if line.startswith("SigBlk:")).split()[1], 16)
    return {number for number in range(1, 65) if mask >> number - 1 & 1}


def test_a_thread_takes_no_signals():
    """But those of its own faults, of which a handler may tell."""
    begun, end = threading.Event(), threading.Event()
    before = blocked(threading.get_native_id())

    def serve() -> None:
        begun.set()
        end.wait(10)

    thread = ServiceThread("served", serve)
    thread.start()
    assert begun.wait(10)
    assert thread.native_id
    found = blocked(thread.native_id)
    end.set()
    assert thread.join()
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGALRM, signal.SIGCHLD} <= found
    assert not found & {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
    assert blocked(threading.get_native_id()) == before


# --- threads that cannot start ---------------------------------------------------------------------------------------


class Starts:
    """Let only the first `room` threads of Python start, as at a limit of the system (pthread_create(3): EAGAIN)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int):
        self.room, self.refused = room, 0
        start = threading.Thread.start

        def limited(thread: threading.Thread) -> None:
            if self.room <= 0:
                self.refused += 1
                raise RuntimeError("can't start new thread")
            self.room -= 1
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", limited)


def test_a_service_that_cannot_start(monkeypatch):
    served: list[bool] = []
    thread = ServiceThread("served", lambda: served.append(True))
    with monkeypatch.context() as patch:
        Starts(patch, 0)
        with pytest.raises(NoMemoryError, match="cannot start the thread 'served': the system starts no more threads"):
            thread.start()
    assert not thread.running
    assert thread.join(0)
    assert served == []
    thread.start()
    assert thread.join()
    assert served == [True]


def a_nic(tmp_path: Path) -> None:
    with verbs.open("soft0", port=PortConfig(workers=2, capture=tmp_path)):
        pass


def a_wire(tmp_path: Path) -> None:
    with verbs.open("soft0", port=PortConfig(addresses="10.9.0.1", wire=f"unix:{tmp_path}/cable")):
        pass


def a_link(tmp_path: Path) -> None:
    with verbs.open("soft0") as one, verbs.open("soft1") as other:
        queues = [ctx.create_pd().create_qp(sq_wr=4, send_cq=ctx.create_cq(16)) for ctx in (one, other)]
        queues[0].connect(queues[1])


def a_connection_manager(tmp_path: Path) -> None:
    with verbs.open("soft0") as ctx:
        cm.listen(ctx, 7176)


def exported_queues(tmp_path: Path) -> None:
    with verbs.open("soft0") as ctx, Gpu("host") as gpu:
        queues = [gpu.create_qp(ctx.create_pd(), 16)]
        queues.append(gpu.create_qp(ctx.create_pd(), 16, nic_handler=NicHandler.CPU_PROXY))


@pytest.mark.soft_nic
@pytest.mark.host_memory
@pytest.mark.parametrize("make", [a_nic, a_wire, a_link, a_connection_manager, exported_queues])
def test_what_needs_threads_that_cannot_start(monkeypatch, tmp_path, make):
    """Each of its threads in turn does not start: NoMemoryError, nothing is left, and then it works again."""
    make(tmp_path)
    before = Usage.now()
    room = 0
    while True:
        with monkeypatch.context() as patch:
            starts = Starts(patch, room)
            try:
                make(tmp_path)
            except NoMemoryError as error:
                assert "the system starts no more threads" in str(error)  # noqa: PT017 - any of several threads
            if not starts.refused:
                break
        before.check()
        room += 1
    assert room >= 1
    make(tmp_path)
    before.check()


@kernel
def count(place):
    device.fetch_add_gpu64(place, 1)


@pytest.mark.host_memory
def test_a_kernel_whose_threads_do_not_all_start(monkeypatch):
    with Gpu("host") as gpu, gpu.alloc(8) as counted:
        count[1, 1, gpu](counted).wait(60)
        for room in range(3):
            with monkeypatch.context() as patch:
                Starts(patch, room)
                launch = count[1, 3, gpu](counted)
                with pytest.raises(NoMemoryError, match=rf"thread {room} of 3 did not start: the system starts no"):
                    launch.wait(60)
            assert launch.ended
        assert counted.read().view(np.int64)[0] == 1 + 0 + 1 + 2
