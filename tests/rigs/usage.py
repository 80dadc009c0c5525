"""Measure everything that a process can leak: threads, descriptors, memory, and objects of the package."""

import gc
import os
import threading
from collections import Counter
from dataclasses import dataclass, field

from gpunetio import Gpu, memory
from gpunetio.providers import soft

BLOCK = 64 << 20  # bytes of a large region that is hardly touched: malloc and Python grow by less in a test


@dataclass(frozen=True)
class Usage:
    """What this process has of everything that can leak."""

    threads: tuple[str, ...]
    descriptors: int
    shared: dict[str, int]  # mappings of shared memory and of devices: how many of each name
    live: int  # pieces of memory that are kept for a NIC
    anonymous: int = field(compare=False)  # bytes of mappings without a name

    @classmethod
    def now(cls) -> "Usage":
        gc.collect()
        shared: Counter[str] = Counter()
        anonymous = 0
        with open("/proc/self/maps") as maps:
            for line in maps:
                span, permissions, _, _, _, *name = line.rstrip().split(maxsplit=5)
                low, high = (int(bound, 16) for bound in span.split("-"))
                if name and name[0].startswith(("/memfd:", "/dev/")):
                    shared[name[0]] += 1
                elif not name and permissions.startswith("rw"):
                    anonymous += high - low
        return cls(
            threads=tuple(sorted(t.name for t in threading.enumerate() if t.name.startswith("gpunetio"))),
            descriptors=len(os.listdir("/proc/self/fd")),
            shared=dict(shared),
            live=len(memory.live()),
            anonymous=anonymous,
        )

    def check(self) -> None:
        """Nothing has been added since."""
        now = Usage.now()
        assert now == self
        assert now.anonymous - self.anonymous < BLOCK


def objects_of_the_package() -> Counter[str]:
    """Return how many objects of each class of the package the garbage collector knows."""
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
    return Counter(name for name in names if name.startswith("gpunetio."))


def opens() -> dict[str, int]:
    """Return how often each software NIC is open. A NIC whose close failed is open 0 times."""
    return {name: count for name, (_, count) in list(soft._nics.items())}


def allocations(gpu: Gpu) -> int:
    """Return how many pieces of memory a GPU handle has allocated and not yet freed."""
    return len(gpu._memory)


def resident() -> int:
    """Return the bytes of memory that this process has for itself, without pages of files (proc(5): status)."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
