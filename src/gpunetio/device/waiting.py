"""Waits with a deadline: every loop of the device library that waits for another agent calls `patience`."""

from __future__ import annotations

from ..jit.compile import device_function
from ..jit.ops import clock_ns, on_host, pause, yield_thread

# A host thread spins this often before it yields, because there are more threads than cores.
HOST_SPINS = 16
CLOCK_EVERY = 256  # polls between reads of the clock


@device_function
def relax(polls):
    """Let others run between two polls, on the host."""
    if on_host():
        if polls < HOST_SPINS:
            pause()
        else:
            yield_thread()


@device_function
def patience(polls, start, timeout_ns):
    """Do one step of a wait. Return its start time (0 until the clock was first read), or -1 after the deadline."""
    relax(polls)
    if polls & (CLOCK_EVERY - 1) == CLOCK_EVERY - 1:
        now = clock_ns()
        if start == 0:
            return now
        if now - start > timeout_ns:
            return -1
    return start
