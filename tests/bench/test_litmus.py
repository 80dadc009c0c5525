"""The litmus test of doorbell fences: what it counts, that it notices a lost order, and what it says."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

from gpunetio import Gpu, kernel
from gpunetio.bench import litmus
from gpunetio.bench.litmus import DEPTH, FENCES, RING, Litmus, read_ring
from gpunetio.cli import app
from gpunetio.cli.selftest import FENCES as CHOICES
from gpunetio.device import clock_ns, ld_acquire64, st64
from gpunetio.errors import InvalidValueError
from gpunetio.formats.wqe import WQEBB
from gpunetio.jit.cubin import ptx_of
from gpunetio.jit.kinds import INT
from gpunetio.memory import HostMemory

WORDS = (WQEBB + 64) // 8  # of a slot: a WQE, and a payload as large


@pytest.fixture
def ring():
    """(its head, its slots as a row of words each, its memory)"""
    memory = HostMemory(RING.size + DEPTH * 8 * WORDS)
    words = memory.array.view(np.int64)[RING.size // 8 :][: DEPTH * WORDS]
    yield RING.at(memory.array), words.reshape(DEPTH, WORDS), memory
    memory.close()


@pytest.mark.parametrize("torn_word", range(WORDS))
def test_what_is_read_is_judged(ring, torn_word):
    """One word of a WQE or payload that is old makes it torn; all of them, stale."""
    head, slots, memory = ring
    for lap in (0, 1):  # in the first one, old is zero
        begin = lap * DEPTH
        slots[:] = np.arange(begin + 1, begin + DEPTH + 1)[:, None]
        slots[3] -= DEPTH if lap else slots[3]
        slots[5, torn_word] -= DEPTH if lap else slots[5, torn_word]
        slots[9] += 1  # what is due nowhere
        head["torn"] = head["stale"] = 0
        head["doorbell"] = begin + DEPTH
        assert read_ring(memory.address) == DEPTH
        assert (head["consumed"], head["torn"], head["stale"]) == (begin + DEPTH, 2, 1)
        assert read_ring(memory.address) == 0


def test_nothing_is_read_before_the_doorbell(ring):
    head, slots, memory = ring
    slots[:4] = np.arange(1, 5)[:, None]
    head["doorbell"] = 3
    assert read_ring(memory.address) == 3
    assert (head["torn"], head["stale"]) == (0, 0)


@pytest.mark.parametrize("warp", [1, 4])
def test_the_fence_of_the_library_keeps_the_order(warp):
    with Gpu("host", warp=warp) as host:
        outcome = Litmus(host, 2).run("product", 0.1)
    assert outcome.ordered
    assert outcome.posts > 2 * DEPTH
    assert outcome.rate == outcome.posts / outcome.seconds


@kernel
def rings_early(rings, control, fence, timeout_ns):
    """A poster that rings first, and fills its slots when they were read, or a while later."""
    first = litmus.dev.ld64(rings + RING.doorbell)
    for index in range(first, first + 100):
        litmus.st_mmio64(rings + RING.doorbell, index + 1)
        start = clock_ns()
        while ld_acquire64(rings + RING.consumed) <= index and clock_ns() - start < 50_000_000:
            litmus.dev.yield_thread()
        for at in range(0, 8 * WORDS, 8):
            st64(rings + RING.size + (index & (DEPTH - 1)) * 8 * WORDS + at, index + 1)


def test_a_doorbell_that_overtakes_is_seen(monkeypatch):
    monkeypatch.setattr(litmus, "post_stamped", rings_early)
    result = CliRunner().invoke(app, ["selftest", "litmus", "-g", "host", "--seconds", "0.1", "--json"])
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert not report["passed"]
    assert [one["fence"] for one in report["fences"]] == list(FENCES)
    assert all(one["torn"] + one["stale"] > 0 for one in report["fences"])
    result = CliRunner().invoke(app, ["selftest", "litmus", "-g", "host", "--seconds", "0.1", "--fence", "product"])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("FAILED: ")


def test_the_command_reports_each_fence():
    result = CliRunner().invoke(app, ["selftest", "litmus", "-g", "host", "-w", "1", "--seconds", "0.05"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "1 warp(s) of 1 on host, 1 reader(s)"
    assert [line.split()[0] for line in lines[1:-1]] == ["fence", *FENCES]
    assert lines[-1].startswith("passed: the library's fence keeps the order; without a fence, ")
    result = CliRunner().invoke(app, ["selftest", "litmus", "-g", "host", "--seconds", "0.05", "--fence", "none"])
    assert result.stdout.splitlines()[-1].startswith("without a fence, ")
    assert CHOICES == FENCES


def test_mistakes_are_named():
    with Gpu("host") as host:
        with pytest.raises(InvalidValueError, match="0 warps"):
            Litmus(host, 0)
        with pytest.raises(InvalidValueError, match="no fence 'strong': the fences are product, gpu, sys, none"):
            Litmus(host, 1).run("strong", 0.1)


def test_the_kernel_has_each_fence_on_cuda():
    ptx, _ = ptx_of(litmus.post_stamped, (INT,) * 4, (9, 0))
    assert "fence.release.gpu" in ptx
    assert "fence.release.sys" in ptx
    assert "st.mmio.relaxed.sys.global.u64" in ptx
    assert not re.search(r"\.f(64|32)\b", ptx)


@pytest.mark.gpu
def test_on_a_gpu_the_fence_is_needed_and_is_enough():
    with Gpu("auto") as gpu:
        test = Litmus(gpu, 8)
        assert test.run("product", 2).ordered
        assert test.run("sys", 2).ordered
        assert any(not test.run("none", 2).ordered for _ in range(10))
