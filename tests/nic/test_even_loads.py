"""Loads at even addresses: the same on a CPU and on a GPU, which loads a word only from a multiple of its size."""

import ctypes

import pytest

from gpunetio.nic.memory import even_loads
from gpunetio.nic.transport import lan

BYTES = bytes(range(0x81, 0x81 + 32))


def aligned_load(size):
    def load(address):
        assert address % size == 0, f"a GPU refuses {size} bytes at {address:#x}"
        return int.from_bytes(ctypes.string_at(address, size), "little")

    return load


@pytest.fixture
def memory(monkeypatch):
    """Memory that begins at a multiple of 64, and functions that load from it as a GPU does."""
    for module in (even_loads, lan):
        monkeypatch.setattr(module, "on_host", lambda: False)
        for size in (1, 2, 4, 8):
            monkeypatch.setattr(module, f"ld{8 * size}", aligned_load(size), raising=False)
    monkeypatch.setattr(even_loads, "ld32_even", even_loads.ld32_even.py_func)
    buffer = ctypes.create_string_buffer(64 + len(BYTES))
    start = -(-ctypes.addressof(buffer) // 64) * 64
    ctypes.memmove(start, BYTES, len(BYTES))
    yield start
    del buffer


@pytest.mark.parametrize("at", range(0, 24, 2))
def test_words(memory, at):
    assert even_loads.ld32_even(memory + at) == int.from_bytes(BYTES[at : at + 4], "little")
    assert even_loads.ld64_even.py_func(memory + at) == int.from_bytes(BYTES[at : at + 8], "little")


@pytest.mark.parametrize("at", range(8))
def test_macs_may_be_anywhere(memory, at):
    assert lan.load_mac.py_func(memory + at) == int.from_bytes(BYTES[at : at + 6], "little")
