"""Steps of a wait with a deadline, and naps for threads that have nothing to do."""

from __future__ import annotations

from ..jit.compile import device_function
from ..jit.ops import (
    clock_ns, exchange64, futex_wait, futex_wake, ld_relaxed64, on_host, pause, sleep_ns, yield_thread,
)

# A host thread spins for this many polls before it yields: there may be more threads than cores.
HOST_SPINS = 16
CLOCK_EVERY = 256  # polls between reads of the clock
# A host thread naps after this many polls in a row that found nothing: 20 to 50 us if no other thread needs the core.
# A nap costs about 15 us of CPU time in a virtual machine, so naps without a word to wake at get longer.
NAP_AFTER = 64
SHORTEST_NAP_NS, LONGEST_NAP_NS = 100_000, 1_000_000


@device_function
def relax(polls: int) -> None:
    """Let other threads run between two polls, on the host."""
    if on_host():
        if polls < HOST_SPINS:
            pause()
        else:
            yield_thread()


@device_function
def patience(polls: int, start: int, timeout_ns: int) -> int:
    """Do one step of a wait. Return its start time (0 until the clock was first read), or -1 after the deadline."""
    relax(polls)
    if polls & (CLOCK_EVERY - 1) == CLOCK_EVERY - 1:
        now = clock_ns()
        if start == 0:
            return now
        if now - start > timeout_ns:
            return -1
    return start


@device_function
def nap(polls: int, word: int = 0, longest_ns: int = LONGEST_NAP_NS) -> None:
    """Do one step of a loop that has found nothing to do. Host threads sleep, so that other threads get the core.

    `polls` counts the turns of the loop since it last found something; in the first turns, the thread spins. A nap ends
    after `longest_ns`, or earlier by `wake(word)`: `word` is the address of 8 bytes of this thread, 0 at first. Without
    a word, each nap is longer than the one before. On CUDA a thread waits for some ns.
    """
    if not on_host():
        yield_thread()
    elif polls < NAP_AFTER:
        relax(polls)
    elif word == 0:
        sleep_ns(min(SHORTEST_NAP_NS * (polls - NAP_AFTER + 1), longest_ns))
    elif ld_relaxed64(word) == 0:
        exchange64(word, 1)  # the caller polls once more before it sleeps: work may have come before this was visible
    else:
        futex_wait(word, 1, longest_ns)


@device_function
def wake(word: int) -> None:
    """Wake the thread that sleeps at a word. It sees everything stored before this call. Do nothing on CUDA."""
    if on_host() and exchange64(word, 0) != 0:
        futex_wake(word)
