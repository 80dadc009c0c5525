"""Waiting with an end: every loop of the device library that waits for somebody else steps through `patience`."""

from __future__ import annotations

from .compile import device_function
from .ops import clock_ns, on_host, pause, yield_thread

# A host thread spins this often before it lets others run: there are more threads than cores.
HOST_SPINS = 16
CLOCK_EVERY = 256  # polls between looks at the clock


@device_function
def patience(polls, start, timeout_ns):
    """One step of a wait. Returns the time the wait began (0 until the clock was first read), or -1 at the deadline."""
    if on_host():
        if polls < HOST_SPINS:
            pause()
        else:
            yield_thread()
    if polls & (CLOCK_EVERY - 1) == CLOCK_EVERY - 1:
        now = clock_ns()
        if start == 0:
            return now
        if now - start > timeout_ns:
            return -1
    return start
