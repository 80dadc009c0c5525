"""The results of one message size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Part = tuple[int, int, float]  # messages, bytes and seconds of one launch


@dataclass(frozen=True)
class Check:
    """Whether the receiver's data equal the sender's. `problem` describes the first difference.

    `payload_bytes` and `sha256` describe the receiver's data when a file was sent. `flag` is the count of the server's
    flags, for benchmarks whose original prints it.
    """

    problem: str | None = None
    payload_bytes: int | None = None
    sha256: str | None = None
    flag: int | None = None

    def as_json(self) -> dict[str, object]:
        """Return the fields of a JSON result."""
        fields: dict[str, object] = {"validated": self.problem is None}
        if self.payload_bytes is not None:
            fields |= {"payload_bytes": self.payload_bytes, "sha256": self.sha256}
        if self.flag is not None:
            fields["flag_value"] = self.flag
        return fields


@dataclass(frozen=True)
class BwResult:
    """Rates in bytes and messages per second. The peak is the best launch's rate; the average is that of all launches.

    `kernel` is the time that all launches spent in the kernel, in seconds.
    """

    size: int
    iterations: int
    peak: float
    average: float
    rate: float
    kernel: float
    check: Check

    @classmethod
    def of(cls, size: int, parts: Sequence[Part], check: Check) -> BwResult:
        """Return the result of the launches of one size."""
        messages, nbytes, seconds = (sum(column) for column in zip(*parts)) if parts else (0, 0, 0.0)
        return cls(
            size=size,
            iterations=int(messages),
            peak=max((part[1] / part[2] for part in parts), default=0.0),
            average=nbytes / seconds if parts else 0.0,
            rate=messages / seconds if parts else 0.0,
            kernel=float(seconds),
            check=check,
        )

    def as_json(self) -> dict[str, object]:
        """Return one entry of "results"."""
        return {
            "size": self.size,
            "iterations": self.iterations,
            "bw_peak_gbps": self.peak * 8 / 1e9,
            "bw_avg_gbps": self.average * 8 / 1e9,
            "msg_rate_mpps": self.rate / 1e6,
            "kernel_ms": self.kernel * 1e3,
            **self.check.as_json(),
        }


@dataclass(frozen=True)
class LatResult:
    """Microseconds of half a round trip. `kernel` is the time that all launches spent in the kernel, in seconds."""

    size: int
    iterations: int
    least: float
    most: float
    median: float
    average: float
    stdev: float
    p99: float
    p999: float
    kernel: float
    check: Check
    times: np.ndarray | None = field(default=None, repr=False, compare=False)  # each round trip, if measured

    @classmethod
    def of(cls, size: int, round_trips_ns: np.ndarray, kernel: float, check: Check) -> LatResult:
        """Return the result of the round trips of one size."""
        if len(round_trips_ns) == 0:
            return cls(size, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, check)
        half = round_trips_ns / 2000
        least, median, p99, p999, most = (float(value) for value in np.percentile(half, [0, 50, 99, 99.9, 100]))
        mean, stdev = float(half.mean()), float(half.std())
        return cls(size, len(half), least, most, median, mean, stdev, p99, p999, kernel, check, half)

    def as_json(self) -> dict[str, object]:
        """Return one entry of "results"."""
        return {
            "size": self.size,
            "iterations": self.iterations,
            "lat_min_us": self.least,
            "lat_max_us": self.most,
            "lat_median_us": self.median,
            "lat_avg_us": self.average,
            "lat_stdev_us": self.stdev,
            "lat_p99_us": self.p99,
            "lat_p999_us": self.p999,
            "kernel_us": self.kernel * 1e6,
            **self.check.as_json(),
        }


Result = BwResult | LatResult
