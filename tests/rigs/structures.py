"""The structures that kernels find behind an exported queue pair, as a test reads and changes them."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from gpunetio import ExportedQp
from gpunetio.formats.device_structs import DEV_RQ


def structure(queue: ExportedQp) -> np.ndarray:
    """Return a copy of a queue pair's structure (`DEV_QP`)."""
    return queue._place.read()


@contextmanager
def changed(queue: ExportedQp) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield copies of a queue pair's structure (`DEV_QP`) and of its side structure (`DEV_SIDE`). Write both back."""
    place = queue._place
    image, side = place.read(), place.read_side()
    yield image, side
    place.write(image, side)


@contextmanager
def changed_srq(queue: ExportedQp) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield copies of the structure (`DEV_RQ`) of a queue pair's SRQ and of the words of its slots. Write both back."""
    shared = queue._srq
    assert shared is not None
    image = np.array(shared.read_all())
    yield DEV_RQ.at(image), image[DEV_RQ.size :].view("<i8")
    shared._memory.write(image)
