"""The benchmarks underneath the commands: what is sent arrives, and what does not arrive is seen."""

import hashlib
import io

import numpy as np
import pytest

from gpunetio.bench import launches
from gpunetio.bench import run as running
from gpunetio.bench.data import Ends, Pattern, Payload
from gpunetio.bench.kernels import catalog as kernels
from gpunetio.bench.kernels import parts as kernel_parts
from gpunetio.bench.kernels import pingpong as pingpong_kernel
from gpunetio.bench.loopback import Loopback
from gpunetio.bench.measure import _timed_plan, measure
from gpunetio.bench.options import BENCHMARKS, Options
from gpunetio.bench.results import BwResult, Check, LatResult
from gpunetio.enums import SendDbrModeExt
from gpunetio.errors import DriverError, TimedOutError
from gpunetio.jit.cubin import ptx_of
from gpunetio.jit.kinds import INT

ALL = list(BENCHMARKS)
BANDWIDTH = [name for name, benchmark in BENCHMARKS.items() if not benchmark.latency]
LATENCY = [name for name, benchmark in BENCHMARKS.items() if benchmark.latency]


class Plain:
    """A buffer that is an array."""

    def __init__(self, nbytes):
        self.array = np.zeros(nbytes, np.uint8)

    def read(self, offset=0, nbytes=None):
        return self.array[offset:][:nbytes].copy()

    def write(self, data, offset=0):
        self.array[offset : offset + len(data)] = data


def options(name, **values):
    return Options(benchmark=BENCHMARKS[name], **{"gpu": "host", "sizes": (64,), "iterations": 300, **values})


def flag(name, messages):
    """What a result has as the flags' value."""
    return messages if name in ("put_signal_bw", "put_counter_bw") else None


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "payload"
    path.write_bytes(np.random.default_rng(1).bytes(100_003))
    return path


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "put_bw" else pytest.mark.slow) for name in ALL]
)
def test_pattern_arrives_at_all_sizes(name):
    sizes = (1, 7, 64, 4096, 100_000)
    with Loopback(options(name, sizes=sizes)) as run:
        for index, size in enumerate(sizes):
            result = measure(run, index, size)
            assert (result.size, result.iterations, result.check.problem) == (size, 300, None)
        sink = (run.near if name == "get_bw" else run.far).array
        assert set(sink[8:99_999]) == {len(sizes)}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [100, 200_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4096, 99_999))])
def test_payload_arrives_in_order(name, size, file):
    data = file.read_bytes()
    with Loopback(options(name, sizes=(size,), payload=file)) as run:
        result = measure(run, 0, size)
    sent = min(len(data), 300 * size)
    assert result.iterations == -(-sent // size)
    assert result.check == Check(None, sent, hashlib.sha256(data[:sent]).hexdigest(), flag(name, result.iterations))


@pytest.mark.parametrize("name", ALL)
def test_a_payload_larger_than_the_buffers_goes_in_parts(name, file, monkeypatch):
    monkeypatch.setattr(running, "BUFFER_BYTES", 4096)
    with Loopback(options(name, sizes=(1000,), payload=file)) as run:
        result = measure(run, 0, 1000)
    assert result.iterations == 101
    assert result.check == Check(None, 100_003, hashlib.sha256(file.read_bytes()).hexdigest(), flag(name, 101))


@pytest.mark.parametrize("name", ALL)
def test_an_empty_payload_is_nothing_received(name, tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    with Loopback(options(name, payload=empty)) as run:
        result = measure(run, 0, 64)
    assert (result.iterations, result.check) == (0, Check(None, 0, hashlib.sha256(b"").hexdigest(), flag(name, 0)))


@pytest.mark.parametrize("name", BANDWIDTH)
@pytest.mark.parametrize("qps, threads", [(2, None), (3, 4), (1, 3)])
def test_queues_and_threads_share_the_messages(name, qps, threads, file):
    with Loopback(options(name, sizes=(500,), qps=qps, threads=threads, depth=16, payload=file)) as run:
        assert run.threads % qps == 0
        assert measure(run, 0, 500).check.problem is None
        used = [client.indices()["completed"] for client in run.clients]
    assert sum(used) >= 201
    assert all(used)


@pytest.mark.parametrize("name", ALL)
def test_queues_without_doorbell_record(name):
    with Loopback(options(name, send_dbr_mode=SendDbrModeExt.NO_DBR_HW, iterations=2000)) as run:
        assert measure(run, 0, 64).check.problem is None


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("with_payload", [False, True])
def test_a_wrong_byte_is_seen(name, with_payload, file, monkeypatch):
    """A byte of the receiver changes after the transfer."""
    launch, at = Loopback.launch, 20_007

    def corrupting(run, *args, **named):
        records = launch(run, *args, **named)
        sink = (run.near if name == "get_bw" else run.far).array
        sink[at if name != "write_lat" or with_payload else 7] ^= 0x10
        return records

    monkeypatch.setattr(Loopback, "launch", corrupting)
    with Loopback(options(name, sizes=(100,), iterations=2000, threads=1,
                          payload=file if with_payload else None)) as run:
        problem = measure(run, 0, 100).check.problem
    offset = at if name != "write_lat" or with_payload else 7
    assert problem is not None
    assert problem.startswith(f"message size 100: the byte at offset {offset} of the receiver is")


@pytest.mark.parametrize("name", [name for name in ALL if name != "write_lat"])  # which has one slot
def test_messages_in_each_others_slots_are_seen(name, monkeypatch):
    """What a kernel does that posts with wrong addresses."""
    launch = Loopback.launch

    def exchanging(run, *args, **named):
        records = launch(run, *args, **named)
        sink = (run.near if name == "get_bw" else run.far).array
        sink[300:500] = np.roll(sink[300:500], 100)
        return records

    monkeypatch.setattr(Loopback, "launch", exchanging)
    with Loopback(options(name, sizes=(100,), iterations=1000)) as run:
        problem = measure(run, 0, 100).check.problem
    assert problem is not None
    assert "(2 of 100000 bytes are wrong)" in problem


@pytest.mark.parametrize("name", BANDWIDTH)
def test_a_message_that_nobody_sent_is_seen(name, monkeypatch):
    """A kernel that forgets its last message."""
    kernel = kernels.KERNELS[name]

    class Forgetful:
        def __getitem__(self, config):
            # …, count, trace, stop, out
            return lambda *args: kernel[config](*args[:-4], max(1, args[-4] - 1), *args[-3:])

    monkeypatch.setitem(kernels.KERNELS, name, Forgetful())
    with Loopback(options(name, iterations=100)) as run:
        problem = measure(run, 0, 64).check.problem
    assert problem is not None
    assert "offset 6336 " in problem
    assert "64 of 6400 bytes are wrong" in problem


@pytest.mark.parametrize("name", ["put_bw", "write_bw", "get_bw"])
@pytest.mark.parametrize("size", [64, 65536])
def test_a_launch_that_transfers_nothing_is_seen(name, size, monkeypatch):
    """One in the middle of eight, whose slots the launches before have filled."""
    send, launches_sent = Loopback.send, []

    def forgetting(run, data, first, count):
        launches_sent.append(first)
        return run.launch_for(1, 1, 1, 0, 0) if len(launches_sent) == 5 else send(run, data, first, count)

    monkeypatch.setattr(Loopback, "send", forgetting)
    with Loopback(options(name, sizes=(size,), iterations=2048)) as run:
        problem = measure(run, 0, size).check.problem
    assert len(launches_sent) == 9  # and the warm-up
    assert problem is not None
    assert f"message size {size}: the byte at offset " in problem


@pytest.mark.parametrize("name", ALL)
def test_a_refused_request_is_an_error_that_says_why(name):
    with Loopback(options(name)) as run:
        run.far_mr.close()
        with pytest.raises(DriverError, match=r"error completion.*WQE \d+ failed: (REMOTE_ACCESS|LOCAL)"):
            measure(run, 0, 64)


@pytest.mark.parametrize("name", LATENCY)
def test_a_kernel_that_waits_in_vain_is_an_error(name, monkeypatch):
    monkeypatch.setattr(launches, "WAIT_SECONDS", 2.0)
    with Loopback(options(name)) as run:
        nic = run.clients[0].qp.ctx.provider.nic
        measure(run, 0, 64)
        nic.pause()
        try:
            with pytest.raises(TimedOutError, match="deadline passed"):
                measure(run, 0, 64)
        finally:
            nic.resume()


@pytest.mark.parametrize("name", ["put_bw", "put_signal_bw", "put_counter_lat"])
def test_a_kernel_ends_when_it_is_told_to_stop(name):
    """Long before its messages are sent."""
    with Loopback(options(name)) as run:
        measure(run, 0, 64)
        if BENCHMARKS[name].latency:  # which have room for so many times
            run.lay_out(run.data(64, 1), 0, 1)
        count = running.PART_MESSAGES if BENCHMARKS[name].latency else 1 << 32
        with pytest.raises(DriverError, match="the kernel ended with 'stopped'"):
            run.launch_for(64, 1 << 40, 100, 0, count, launched=run._tell_to_stop)


def test_host_threads_suit_the_cores(monkeypatch):
    for cores, threads in ((1, 1), (2, 1), (4, 3), (64, 8)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert options("put_bw").kernel_threads("cpu") == threads
    assert options("put_bw").kernel_threads("cuda") == 512
    assert options("put_bw", qps=3, threads=4).kernel_threads("cuda") == 6
    assert options("write_lat", qps=1).kernel_threads("cuda") == 1
    assert kernel_parts.MOST_THREADS >= 64 * 32


def test_a_file_that_shrinks_is_an_error():
    ends = Ends(Plain(64), [Plain(64)], np.zeros(8, np.uint8))
    file = io.BytesIO(b"short")
    file.name = "short"
    with pytest.raises(OSError, match="short was truncated"):
        Payload(ends, 64, 1, 1, file, 64).lay_out(0, 1)


class TestPattern:
    """Launches of four messages over six slots, after a first one that was right."""

    @pytest.fixture(params=[1, 8, 100], ids="{} bytes".format)
    def size(self, request):
        return request.param

    def carry(self, size, moves, order=None):
        """What is wrong when slots of the second launch are copied as `moves` says: its own are 4, 5, 0, 1."""
        source, sink = Plain(6 * size), Plain(6 * size)
        noted = None if order is None else np.arange(4)
        pattern = Pattern(Ends(source, [sink], np.zeros(0, np.uint8), noted), size, 8, 6, 0xA5, counting=False)
        for first, copies in ((0, {0: 0, 1: 1, 2: 2, 3: 3}), (4, moves)):
            pattern.lay_out(first, 4)
            for there, here in copies.items():
                sink.array[there * size :][:size] = source.array[here * size :][:size]
            if noted is not None and first > 0:
                noted[:] = order
            pattern.collect(first, 4)
        return pattern.check().problem

    def test_all_is_where_it_belongs(self, size):
        assert self.carry(size, {4: 4, 5: 5, 0: 0, 1: 1}) is None

    def test_nothing_came(self, size):
        problem = self.carry(size, {})
        assert problem is not None
        assert f"message size {size}: the byte at offset 0 " in problem
        assert f"({4 * size} of {6 * size} bytes are wrong)" in problem

    def test_one_did_not_come(self, size):
        assert f"offset {5 * size} " in (self.carry(size, {4: 4, 0: 0, 1: 1}) or "")

    def test_two_have_changed_places(self, size):
        assert f"offset {4 * size} " in (self.carry(size, {4: 5, 5: 4, 0: 0, 1: 1}) or "")

    def test_a_slot_that_is_not_the_launchs(self, size):
        assert f"offset {2 * size} " in (self.carry(size, {4: 4, 5: 5, 0: 0, 1: 1, 2: 2}) or "")

    def test_any_order(self, size):
        """The second launch's receives have got messages 2, 3, 0, 1 of it."""
        moves = {4: 0, 5: 1, 0: 4, 1: 5}
        assert self.carry(size, moves, [2, 3, 0, 1]) is None
        assert "offset 0 " in (self.carry(size, moves, [0, 1, 2, 3]) or "")


def test_rates():
    result = BwResult.of(1000, [(10, 10_000, 0.25), (10, 10_000, 0.75)], Check())
    assert (result.iterations, result.peak, result.average, result.rate) == (20, 40_000.0, 20_000.0, 20.0)
    assert (result.as_json()["bw_avg_gbps"], result.as_json()["kernel_ms"]) == (160e-6, 1000.0)


def test_latencies_are_half_round_trips():
    result = LatResult.of(8, np.arange(2000, 202_000, 2000), 0.5, Check())
    assert result.as_json()["kernel_us"] == 500_000
    assert (result.iterations, result.least, result.most, result.median) == (100, 1.0, 100.0, 50.5)
    assert result.p99 == pytest.approx(99.01)
    assert result.stdev == pytest.approx(np.std(np.arange(1, 101)))


def test_a_duration_is_kept(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    sent = 0
    for first, count, share in _timed_plan(1.0, 1 << 16):
        assert first == sent
        assert 0 <= share < 1
        sent += count
        now[0] += count * 1e-6
    assert now[0] == pytest.approx(1.0, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [*kernels.KERNELS.values(), pingpong_kernel.pingpong, pingpong_kernel.post_receives],
    ids=lambda kernel: kernel.name,
)
def test_kernels_compile_for_a_gpu(kernel):
    ptx, _ = ptx_of(kernel, (INT,) * kernel.py_func.__code__.co_argcount, (9, 0))
    assert ".f64" not in ptx
    assert ".extern .func" not in ptx
