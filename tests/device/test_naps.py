"""Naps: kernels with nothing to do sleep, and wake for `wake`, for the end of the nap, and for signals."""

import os
import resource
import signal
import threading
import time

import numpy as np
import pytest

from gpunetio import Gpu, MemType, device, kernel

SECOND = 1_000_000_000
PATIENCE = 60 * SECOND  # ns
WORK, WORD, STOP = 0, 8, 16  # offsets


@kernel
def consume(work, words, count, longest_ns, out):
    """Take `count` pieces of work, one at a time: each is the next number at `work`. Return how often it has looked."""
    taken = 0
    polls = 0
    looks = 0
    begin = device.clock_ns()
    while taken < count and device.clock_ns() - begin < PATIENCE:
        looks += 1
        if device.ld_acquire64(work + WORK) > taken:
            taken += 1
            polls = 0
        else:
            device.nap(polls, words, longest_ns)
            polls += 1
    device.st64(out, taken)
    device.st64(out + 8, looks)


@kernel
def produce(work, words, sleepers, count, gap_ns):
    """Announce pieces of work, with time enough between them that the others sleep."""
    for i in range(count):
        begin = device.clock_ns()
        while device.clock_ns() - begin < gap_ns:
            device.yield_thread()
        device.st_release64(work + WORK, i + 1)
        for j in range(sleepers):
            device.wake(words + 64 * j)


def memory(gpu: Gpu):
    found = gpu.alloc(4096, MemType.CPU_GPU)
    found.array[:] = 0
    return found


@pytest.mark.parametrize("sleepers", [1, 3])
@pytest.mark.parametrize("gap_ns", [0, 300_000])
def test_naps_end_when_somebody_wakes(gpu, sleepers, gap_ns):
    """Each nap could last a minute: only `wake` can end it in time."""
    count = 200
    with memory(gpu) as work, memory(gpu) as words, memory(gpu) as out:
        assert produce[1, 1, gpu](work, words, 0, 0, 0).wait(60)  # loads it, which waits for kernels that run
        launches = [
            consume[1, 1, gpu](work, words.device_address + 64 * i, count, PATIENCE, out.device_address + 64 * i)
            for i in range(sleepers)
        ]
        assert produce[1, 1, gpu](work, words, sleepers, count, gap_ns).wait(60)
        assert all(launch.wait(60) for launch in launches)
        assert out.array.view(np.int64).reshape(-1, 8)[:sleepers, 0].tolist() == [count] * sleepers


@pytest.mark.parametrize("word", [False, True])
def test_naps_end_by_themselves(gpu, word):
    """Nobody wakes the kernel: it looks again after each nap."""
    with memory(gpu) as work, memory(gpu) as words, memory(gpu) as out:
        launch = consume[1, 1, gpu](work, words if word else 0, 3, 2_000_000, out)
        for i in range(3):
            time.sleep(0.02)
            work.array.view(np.int64)[0] = i + 1
        assert launch.wait(60)
        assert out.array.view(np.int64)[0] == 3


@pytest.mark.parametrize("word", [False, True])
def test_an_idle_kernel_takes_next_to_no_cpu_time(word):
    """It naps for 50 ms at a time, and other threads of the process do nothing: a tenth of a core is far more."""
    with Gpu("host") as gpu, memory(gpu) as work, memory(gpu) as words, memory(gpu) as out:
        launch = consume[1, 1, gpu](work, words if word else 0, 1, 50_000_000, out)
        time.sleep(0.3)  # without a word, naps get longer
        before, begin = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        time.sleep(1)
        after, took = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - begin
        work.array.view(np.int64)[0] = 1
        assert launch.wait(60)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5 * took


def test_ctrl_c_reaches_a_program_whose_kernel_naps():
    with Gpu("host") as gpu, memory(gpu) as work, memory(gpu) as words, memory(gpu) as out:
        launch = consume[1, 1, gpu](work, words, 1, 1_000_000, out)
        timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            launch.wait(60)
        timer.join()
        work.array.view(np.int64)[0] = 1
        assert launch.wait(60)


def test_a_wake_without_sleepers_is_forgotten(gpu):
    with memory(gpu) as work, memory(gpu) as words:
        assert produce[1, 1, gpu](work, words, 1, 5, 0).wait(60)
        assert not words.array.any()
