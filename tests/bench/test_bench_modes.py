"""The ways in which benchmarks post: scopes, handlers, memory, data in completions; and what counts their messages."""

import numpy as np
import pytest

from gpunetio.bench import side as sides
from gpunetio.bench.ends import ROW
from gpunetio.bench.kernels.catalog import KERNELS
from gpunetio.bench.kernels.parts import RECORD_WORDS
from gpunetio.bench.loopback import Loopback
from gpunetio.bench.measure import measure
from gpunetio.bench.options import BENCHMARKS, HOST_WARP, INLINE_SIZES, Options
from gpunetio.bench.words import Order, Words
from gpunetio.enums import ExecScope, MemType, NicHandler, SendDbrModeExt
from gpunetio.errors import DriverError, InvalidValueError

TARGETS = ["host", pytest.param("auto", marks=pytest.mark.gpu, id="cuda")]
SCOPED = [name for name, benchmark in BENCHMARKS.items() if ExecScope.WARP in benchmark.scopes]
COUNTING = [name for name, benchmark in BENCHMARKS.items() if benchmark.counts]
THREAD, WARP, BLOCK = ExecScope.THREAD, ExecScope.WARP, ExecScope.BLOCK
VALID, HW, EMULATED = SendDbrModeExt


def options(name, **values):
    return Options(benchmark=BENCHMARKS[name], **{"gpu": "host", "sizes": (64,), "iterations": 301, **values})


def run_all(wanted):
    """A run of all sizes that has to find nothing wrong: what it was."""
    with Loopback(wanted) as run:
        for index, size in enumerate(wanted.sizes):
            result = measure(run, index, size)
            assert (result.iterations, result.check.problem) == (wanted.iterations, None)
        return run, run.queue.nic_handler, run.queue.send_dbr_mode


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "payload"
    path.write_bytes(np.random.default_rng(1).bytes(30_003))
    return path


# --- every benchmark, everywhere -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize("memory", [MemType.CPU_GPU, MemType.GPU], ids=lambda kind: kind.name)
def test_on_a_gpu(name, memory, file):
    run_all(options(name, gpu="auto", sizes=(1, 64, 4096, 65536), iterations=2048, payload_memory=memory))
    with Loopback(options(name, gpu="auto", sizes=(100,), iterations=2048, payload=file, payload_memory=memory)) as run:
        assert measure(run, 0, 100).check.problem is None


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "name, scope",
    [
        pytest.param(name, scope, marks=[pytest.mark.slow] if scope is WARP and name != "put_counter_bw" else [])
        for name in SCOPED for scope in (WARP, BLOCK)
    ],
)
def test_scopes(name, scope, target, file):
    """Whose threads do not divide the messages; and the bytes of a file, which lie where they belong."""
    with Loopback(options(name, gpu=target, scope=scope, sizes=(1000,), payload=file)) as run:
        assert run.options.together(run.gpu.target) > 1
        result = measure(run, 0, 1000)
    assert (result.iterations, result.check.problem) == (31, None)
    assert result.check.payload_bytes == 30_003


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name, scope, qps", [
    ("put_bw", WARP, 3), ("put_bw", BLOCK, 3), ("put_counter_bw", WARP, 2), ("twosided_bw", BLOCK, 2),
    ("put_signal_bw", BLOCK, 2), ("twosided_bw", THREAD, 3),
])
def test_scopes_on_several_queues(name, scope, qps, target):
    with Loopback(options(name, gpu=target, scope=scope, qps=qps)) as run:
        result = measure(run, 0, 64)
        assert (result.iterations, result.check.problem) == (301, None)
        assert all(queue.indices()["completed"] > 1 for queue in run.clients)


def test_threads_that_post_together():
    for target, warp in (("cpu", HOST_WARP), ("cuda", 32)):
        for qps in (1, 2, 3, 31):
            wanted = options("put_bw", scope=WARP, qps=qps)
            threads = wanted.kernel_threads(target)
            assert threads // 2 % warp == 0
            assert threads // warp % qps == 0
            wanted.check_threads(target)
    with pytest.raises(InvalidValueError, match="a block has 1024 at most: use fewer queue pairs"):
        options("put_bw", scope=WARP, qps=63).check_threads("cuda")
    with pytest.raises(InvalidValueError, match="512 threads post 512 requests together, for which --tx-depth 64"):
        options("put_bw", scope=BLOCK, threads=1024, depth=64).check_threads("cuda")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name, handler, mode, taken", [
    ("put_bw", NicHandler.CPU_PROXY, VALID, NicHandler.CPU_PROXY),
    ("put_counter_bw", NicHandler.CPU_PROXY, VALID, NicHandler.CPU_PROXY),
    ("twosided_bw", NicHandler.CPU_PROXY, VALID, NicHandler.CPU_PROXY),
    ("twosided_bw", NicHandler.GPU_SM_DB, HW, NicHandler.GPU_SM_NO_DBR),
    ("put_signal_lat", NicHandler.CPU_PROXY, VALID, NicHandler.CPU_PROXY),
    ("write_lat", NicHandler.GPU_SM_BF, VALID, NicHandler.GPU_SM_BF),
    ("write_lat", NicHandler.GPU_SM_BF, HW, NicHandler.GPU_SM_BF),
    ("put_counter_lat", NicHandler.AUTO, HW, NicHandler.GPU_SM_NO_DBR),
    ("write_bw", NicHandler.GPU_SM_DB, HW, NicHandler.GPU_SM_NO_DBR),
])
def test_handlers(name, handler, mode, taken, target):
    _, found, found_mode = run_all(options(name, gpu=target, nic_handler=handler, send_dbr_mode=mode))
    assert (found, found_mode) == (taken, mode)


@pytest.mark.parametrize("name", ["put_bw", "twosided_bw", "write_lat"])
def test_emulated_records(name):
    """On the host: a GPU needs GDRCopy for it, or queues in CPU_GPU memory."""
    assert run_all(options(name, send_dbr_mode=EMULATED))[1:] == (NicHandler.GPU_SM_NO_DBR, EMULATED)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["put_bw", "put_counter_bw", "twosided_bw", "write_lat"])
def test_queues_in_pinned_memory(name, target):
    assert run_all(options(name, gpu=target, queue_memory="cpu_gpu"))[1] is NicHandler.CPU_PROXY


@pytest.mark.parametrize("name", BENCHMARKS)
def test_data_that_are_copied(name, file, monkeypatch):
    """What memory of a GPU is: no view of it in the process that validates."""
    kinds = []

    class Opaque:
        def __init__(self, memory):
            self.read, self.write = memory.read, memory.write
            self.device_address, self.nbytes = memory.device_address, memory.nbytes

    def buffer(side, pd, nbytes, kind):
        memory, mr = before(side, pd, nbytes, kind)
        kinds.append(kind)
        return (Opaque(memory) if kind is MemType.GPU else memory), mr

    before = sides.Side._buffer
    monkeypatch.setattr(sides.Side, "_buffer", buffer)
    run_all(options(name, payload_memory=MemType.GPU))
    with Loopback(options(name, sizes=(1000,), payload=file, payload_memory=MemType.GPU)) as run:
        assert measure(run, 0, 1000).check.problem is None
    assert MemType.GPU in kinds


@pytest.mark.parametrize("scope", [THREAD, BLOCK])
def test_get_bw_dumps_where_the_gpu_needs_it(scope, monkeypatch):
    """One thread or block at a time waits for its last message, and for a read of its memory behind it."""
    posted = {}
    for needed in (False, True):
        monkeypatch.setattr(sides, "_before_hopper", lambda gpu, needed=needed: needed)
        for name, memory in (("get_bw", MemType.GPU), ("get_bw", MemType.CPU_GPU), ("put_bw", MemType.GPU)):
            with Loopback(options(name, threads=2, scope=scope, payload_memory=memory)) as run:
                assert measure(run, 0, 64).check.problem is None
                posted[needed, name, memory] = run.queue.indices()["completed"]
    expected = 2 * 2  # of two threads, in the warm-up and the launch
    more = {key[1:]: posted[key] - posted[False, *key[1:]] for key in posted if key[0]}
    assert more == {("get_bw", MemType.GPU): expected, ("get_bw", MemType.CPU_GPU): 0, ("put_bw", MemType.GPU): 0}


def test_write_lat_collapses_its_completions():
    with Loopback(options("write_lat")) as run:
        assert run.queue.cq.collapsed


# --- data in completions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_inline(target, file):
    run_all(options("twosided_bw", gpu=target, inline=True, sizes=INLINE_SIZES))
    with Loopback(options("twosided_bw", gpu=target, inline=True, sizes=(30,), iterations=2000, payload=file)) as run:
        assert measure(run, 0, 30).check.payload_bytes == 30_003


def test_a_completion_without_its_data_is_an_error(monkeypatch):
    """The queue's completions carry none."""
    make = Loopback._open_side

    def open_side(run, client):
        wanted, run.options = run.options, options("twosided_bw", sizes=(16,))
        made = make(run, client)
        made.options = run.options = wanted
        return made

    monkeypatch.setattr(Loopback, "_open_side", open_side)
    with (
        Loopback(options("twosided_bw", inline=True, sizes=(16,))) as run,
        pytest.raises(DriverError, match="a completion without its inline data"),
    ):
        measure(run, 0, 16)


def test_a_receive_of_another_length_is_an_error():
    """The client sends the last message without its last byte, and the server knows nothing of that."""
    with Loopback(options("twosided_bw", iterations=10, threads=1)) as run:
        measure(run, 0, 64)
        run.lay_out(run.data(64, 1), 0, 10)
        kernel, ends = KERNELS["twosided_bw"], run._ends.device_address
        with run.gpu.alloc(8, MemType.CPU_GPU) as stop, run.gpu.alloc(8 * RECORD_WORDS, MemType.CPU_GPU) as out:
            client = kernel[1, 1, run.gpu](ends, 1, 0, 64, 639, 10, 0, 10, 0, stop, out)
            with pytest.raises(DriverError, match="ended with 'a receive with a different length than was sent'"):
                run.launch(kernel, 1, 1, ends + ROW, 1, 0, 64, 640, 10, 0, 10, 0)
            assert client.wait(60)
            assert out.array.view(np.int64)[2] == 0


# --- what counts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COUNTING)
def test_flags_are_what_was_sent(name):
    threads = 1 if BENCHMARKS[name].latency else 3
    with Loopback(options(name, iterations=1001, threads=3)) as run:
        assert measure(run, 0, 64).check.problem is None
        for words in run.counts:
            assert isinstance(words, Words)
            counted = words.array - words.before
            assert counted.sum() == 1001
            assert counted.astype(bool).tolist() == [True] * threads + [False] * (len(counted) - threads)


@pytest.mark.parametrize("name", [*COUNTING, "twosided_bw"])
def test_a_wrong_word_is_seen(name, monkeypatch):
    """A word of each kind changes after the transfer."""
    with Loopback(options(name, threads=1)) as run:
        for words in list(run.counts):
            assert measure(run, 0, 64).check.problem is None
            run.lay_out(data := run.data(64, 1), 0, 100)
            run.send(data, 0, 100)
            words.array[0] += 1
            run.collect(data, 0, 100)
            expected = "messages of a launch did not come" if isinstance(words, Order) else f"{words.what} 0 is "
            assert expected in (words.problem() or "")
            problem = run.check(data).problem
            assert problem is not None
            assert problem.startswith("message size 64: ")


def test_words():
    array = np.zeros(8, np.int64)
    words = Words("flag", array, -1)
    assert array.tolist() == [-1] * 8
    words.collect(10, 4)
    assert words.problem() == "flag 0 is -1 instead of 2 (4 of 8 are wrong)"
    array[:4] += [3, 3, 2, 2]
    assert words.problem() is None
    words.lay_out(10)  # a later launch: they go on
    words.collect(1, 4)
    assert words.problem() == "flag 0 is 2 instead of 3 (1 of 8 are wrong)"


def test_order():
    array = np.zeros(4, np.int64)
    order = Order(array)
    order.lay_out(0)
    array[:3] = 2, 0, 1
    order.collect(3, 1)
    assert order.problem() is None
    order.lay_out(3)
    array[:3] = 2, 0, 2
    order.collect(3, 1)
    assert order.problem() == "1 messages of a launch did not come, the first 1"
