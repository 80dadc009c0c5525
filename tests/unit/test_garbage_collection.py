"""While much is made that is kept, garbage is collected seldom; afterwards as the program has it."""

import gc
from collections.abc import Iterator

import pytest

from gpunetio.compiler import little_garbage_collection


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_it_is_rare_inside_and_as_before_outside() -> None:
    gc.set_threshold(700, 11, 12)
    first, second = little_garbage_collection(), little_garbage_collection()  # of two threads
    with first:
        assert gc.get_threshold() == (100_000, 11, 12)
        second.__enter__()
    assert gc.get_threshold() == (700, 11, 12)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 11, 12)


@pytest.mark.parametrize("own", [(0, 10, 10), (1_000_000, 10, 10)], ids=["none", "rarer"])
def test_a_program_that_collects_none_or_seldom_keeps_that(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with little_garbage_collection():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own
