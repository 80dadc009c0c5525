"""The kernels of the benchmarks, by name."""

from __future__ import annotations

from .counting import put_counter_bw, put_signal_bw
from .latency import put_counter_lat, put_signal_lat, write_lat
from .onesided import get_bw, put_bw, write_bw
from .twosided import twosided_bw

KERNELS = {
    kernel.name: kernel
    for kernel in (
        put_bw, get_bw, write_bw, put_signal_bw, put_counter_bw, twosided_bw, write_lat, put_signal_lat,
        put_counter_lat,
    )
}
