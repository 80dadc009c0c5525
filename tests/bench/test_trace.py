"""Traces of single operations: what is noted, and files that follow the Trace Event Format."""

import itertools
import json

import numpy as np
import pytest
from click.testing import CliRunner

from gpunetio.bench import timestamps, trace_plot
from gpunetio.bench.loopback import Loopback
from gpunetio.bench.measure import measure
from gpunetio.bench.options import BENCHMARKS, TRACED, Options
from gpunetio.bench.trace import Trace
from gpunetio.cli import app
from gpunetio.errors import InvalidValueError

TARGETS = ["host", pytest.param("auto", marks=pytest.mark.gpu, id="cuda")]
HOST = ("--loopback", "--target", "cpu")


def options(name, **values):
    return Options(benchmark=BENCHMARKS[name], **{"gpu": "host", "sizes": (64,), "iterations": 300, **values})


def check_format(document):
    """The rules of the format for what we write: complete events that do not overlap, and names of processes and
    threads. Returns the complete events by process and thread."""
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    lanes, names = {}, set()
    for event in document["traceEvents"]:
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            names.add((event["name"], event["pid"], event["tid"] if event["name"] == "thread_name" else None))
        else:
            assert event["ph"] == "X"
            assert isinstance(event["cat"], str)
            assert isinstance(event["ts"], float)
            assert isinstance(event["dur"], float)
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    for (pid, tid), events in lanes.items():
        assert {("process_name", pid, None), ("thread_name", pid, tid)} <= names
        for one, other in itertools.pairwise(events):  # in order, and none begins before the one before has ended
            assert other["ts"] >= one["ts"] + one["dur"] - 1e-3
    return lanes


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", BENCHMARKS)
def test_what_is_noted(name, target):
    """The first messages of each thread, each posted after it began and complete after it was posted."""
    benchmark = BENCHMARKS[name]
    with Loopback(options(name, gpu=target, sizes=(64, 4096), threads=2, traced=5)) as run:
        assert all(measure(run, index, size).check.problem is None for index, size in enumerate((64, 4096)))
        trace = run.trace
    assert trace is not None
    assert list(trace.sizes) == [64, 4096]
    for threads in trace.sizes.values():
        ends = [thread.name.split()[0] for thread in threads]
        assert set(ends) == ({"client", "server"} if benchmark.answers else {"client"})
        assert all((thread.operation == "receive") == (end == "server" and name == "twosided_bw")
                   for thread, end in zip(threads, ends))
        for end in set(ends):
            messages = np.concatenate([thread.rows[:, 0] for thread in threads if thread.name.startswith(end)])
            assert len(messages) == len(set(messages)) > 0
            if name != "write_bw":
                assert set(messages) <= set(range(300))
            if name == "write_bw":  # the last thread of the block
                assert [thread.name for thread in threads] == ["client block 0 thread 1"]
            if end == "client":  # which receives come first is for the threads to settle
                assert 0 in messages
        for thread in threads:
            assert 1 <= len(thread.rows) <= 5
            assert (np.diff(thread.rows[:, 1:], axis=1) >= 0).all()
            assert (np.diff(thread.rows[:, 1]) > 0).all()


def test_nothing_is_noted_unless_asked():
    with Loopback(options("put_bw")) as run:
        measure(run, 0, 64)
        assert run.trace is None


@pytest.mark.parametrize("threads, limit", [(1, TRACED), (512, 2), (2000, 1)])
def test_memory_is_bounded(threads, limit):
    assert options("put_bw", traced=0).traced_of(threads) == limit
    assert options("put_bw", traced=77).traced_of(threads) == 77
    assert timestamps.prepared(threads, limit).nbytes == threads * timestamps.part_bytes(limit)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_what_is_noted_is_bounded(name):
    wanted = options(name, threads=1024, qps=1 if BENCHMARKS[name].latency else 4, traced=1 << 21)
    with pytest.raises(InvalidValueError, match=r"--trace-ops 2097152 of \d+ threads are too many: 1048576 in all"):
        wanted.check_threads("cpu")


@pytest.mark.parametrize("name, noting", [
    ("write_lat", [(0, 0)]), ("write_bw", [(0, 3), (1, 3)]), ("put_bw", [divmod(i, 4) for i in range(8)]),
])
def test_who_notes(name, noting):
    wanted = options(name, threads=8, qps=1 if name == "write_lat" else 2, traced=0)
    threads = wanted.kernel_threads("cpu")
    assert wanted.noting(threads) == noting
    assert wanted.traced_of(threads) == TRACED // len(noting)


@pytest.mark.parametrize("name", ["put_bw", "twosided_bw", "put_counter_lat"])
def test_file(name, tmp_path):
    path = tmp_path / "trace.json"
    args = (name, *HOST, "-s", "64", "-s", "4096", "-i", "300", "--trace", str(path), "--trace-ops", "7")
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    lanes = check_format(json.loads(path.read_text()))
    assert {pid for pid, _ in lanes} == {1, 2}
    for events in lanes.values():
        assert 1 <= len(events) <= 7
    ends = [e for events in lanes.values() for e in events if e["name"].endswith("complete")]
    assert all(event["args"]["us from begin to completion"] >= event["dur"] - 1e-3 for event in ends)
    assert {event["args"]["bytes"] for event in ends} == {64, 4096}


def test_times_are_microseconds(tmp_path):
    trace = Trace(BENCHMARKS["put_bw"], 4)
    rows = np.array([[0, 5_000_000, 5_001_500, 5_004_000], [1, 5_001_500, 5_002_000, 5_006_500]])
    trace.add(64, True, [(0, 0), (0, 1)], [rows, np.zeros((0, 4), np.int64)])
    trace.write(tmp_path / "trace.json", "test")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in spans] == [
        ("put", 0.0, 1.5), ("put complete", 1.5, 2.5), ("put", 1.5, 0.5), ("put complete", 4.0, 2.5),
    ]
    assert spans[3]["args"] == {"message": 1, "bytes": 64, "us from begin to completion": 5.0}
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == [
        "test, 64 bytes", "client block 0 thread 0: post", "client block 0 thread 0: completion",
    ]


def test_the_last_launch_of_a_size_counts():
    trace = Trace(BENCHMARKS["twosided_bw"], 4)
    for message in (1, 2):
        for client in (False, True):
            trace.add(64, client, [(0, 0)], [np.array([[message, 1, 2, 3]])])
    assert [(t.name, t.operation, t.rows.tolist()) for t in trace.sizes[64]] == [
        ("client block 0 thread 0", "send", [[2, 1, 2, 3]]), ("server block 0 thread 0", "receive", [[2, 1, 2, 3]]),
    ]


@pytest.mark.parametrize("suffix, start", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_picture(suffix, start, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra 'plot')")
    path = tmp_path / f"trace.{suffix}"
    args = ("put_bw", *HOST, "-s", "64", "-s", "4096", "-i", "100", "--trace-plot", str(path))
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(start)


def test_picture_of_nothing(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra 'plot')")
    trace_plot.draw(tmp_path / "trace.png", "nothing", Trace(BENCHMARKS["put_bw"], 4))
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "args, status, text",
    [
        (("put_bw", *HOST, "--trace", "/none/trace.json"), 1, "--trace /none/trace.json: there is no directory /none"),
        (("put_bw", *HOST, "--trace", "."), 2, "is a directory"),
        (("put_bw", *HOST, "--trace-plot", "x.jpg"), 1, "--trace-plot x.jpg: the suffix names the format"),
        (("put_bw", "--trace", "x.json"), 2, "--trace belongs to the client: the server of put_bw runs no kernel"),
        (("get_bw", "--trace-plot", "x.png"), 2, "--trace-plot belongs to the client"),
    ],
)
def test_refused_before_anything_runs(args, status, text):
    result = CliRunner().invoke(app, args)
    assert result.exit_code == status
    assert text in result.stderr
    assert result.stdout == ""
