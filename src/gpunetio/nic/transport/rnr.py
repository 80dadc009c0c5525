"""The delay that an RNR NAK asks for (IBTA table 45, RNR NAK timer field)."""

from __future__ import annotations

from ...jit.compile import device_function

_UNIT_NS = 10_000
_LONGEST_NS = 655_360_000


@device_function
def rnr_delay_ns(code: int) -> int:
    """Return the delay of timer code 0 … 31 in nanoseconds.

    From code 2 on, the delay doubles every two codes: 20, 30, 40, 60, 80, 120 µs and so on. Code 0 is the longest.
    """
    if code == 0:
        return _LONGEST_NS
    if code == 1:
        return _UNIT_NS
    return ((2 if code & 1 == 0 else 3) << (code >> 1) - 1) * _UNIT_NS
