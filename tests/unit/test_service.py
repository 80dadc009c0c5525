"""Threads that serve."""

import signal
import threading
from pathlib import Path

from gpunetio.service import ServiceThread


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
