"""The `gpunetio` command: columns, JSON, exit statuses, and one line for every mistake."""

import errno
import hashlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import click
import numpy as np
import pytest
from click.testing import CliRunner

from gpunetio import gpu
from gpunetio.bench import pingpong
from gpunetio.bench.loopback import Loopback
from gpunetio.bench.measure import measure
from gpunetio.bench.options import BENCHMARKS, Options
from gpunetio.bench.pingpong_player import Played
from gpunetio.bench.remote import Client, Server
from gpunetio.cli import app, benchmarks
from gpunetio.cli.failures import Failure, writing
from gpunetio.errors import InUseError
from gpunetio.jit import roots
from gpunetio.nic.engine.port import WIRES, wire_syntax
from gpunetio.providers import device_list
from gpunetio.rendezvous import PeerInterrupted
from gpunetio.verbs import QpEndpoint
from json_schema import mistakes, schema
from repository import ROOT

HOST = ("--loopback", "--target", "cpu")
SOFTWARE_NICS = {device.name for device in device_list()}
BANDWIDTH = [name for name, benchmark in BENCHMARKS.items() if not benchmark.latency]
LATENCY = [name for name, benchmark in BENCHMARKS.items() if benchmark.latency]
BW_COLUMNS = ["#bytes", "#iterations", "BW peak[MiB/sec]", "BW average[MiB/sec]", "MsgRate[Mpps]", "Kernel[ms]"]
LAT_COLUMNS = [
    "#bytes", "#iterations", "t_min[usec]", "t_max[usec]", "t_typical[usec]", "t_avg[usec]", "t_stdev[usec]",
    "99% percentile[usec]", "99.9% percentile[usec]", "Kernel[usec]",
]
needs_no_gpu = pytest.mark.skipif(gpu.gpu_list()[0] != "host", reason="this machine has a GPU")


def run(*args, expect=0):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == expect, result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def options_of(command, *names):
    """Every option of a command and of those below it, with the words that lead there."""
    for below, one in getattr(command, "commands", {}).items():
        yield from options_of(one, *names, below)
    for option in command.params:
        yield pytest.param(option, id=" ".join((*names, str(option.name))))


RANGES = [each for each in options_of(app) if isinstance(each.values[0].type, click.IntRange)]


@pytest.mark.parametrize("option", RANGES)
def test_ranges_of_options(option):
    """Whole numbers on both sides, and what is taken without the option is one of them."""
    limits = [limit for limit in (option.type.min, option.type.max) if limit is not None]
    assert limits
    assert all(type(limit) is int for limit in limits)
    for taken in (*limits, *([option.default] if isinstance(option.default, int) else [])):
        assert option.type.convert(str(taken), option, None) == taken


def rows(output):
    return [line.split() for line in output.splitlines() if re.match(r" \d", line)]


def error(*args, expect=1):
    """The one line on stderr of a command that fails."""
    result = run(*args, expect=expect)
    (line,) = result.stderr.splitlines()
    assert line.startswith("gpunetio: error: ")
    assert result.stdout == ""
    return line.removeprefix("gpunetio: error: ")


def gpunetio(*args):
    return subprocess.run(
        [sys.executable, "-m", "gpunetio", *map(str, args)], capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "payload.bin"
    path.write_bytes(np.random.default_rng(2).bytes(50_001))
    return path


@pytest.mark.slow
def test_warm():
    """What the set-up runs first: it compiles, or loads, what all commands run on the host."""
    done = gpunetio("warm")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ready: the NIC, put_bw, ")


# --- output --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BANDWIDTH)
def test_bandwidth_columns(name):
    output = run(name, *HOST, "-i", 100, "-s", 64, "-s", 4096).stdout
    heading = next(line for line in output.splitlines() if "#bytes" in line)
    assert re.split(r"  +", heading.strip()) == BW_COLUMNS
    assert [row[:2] for row in rows(output)] == [["64", "100"], ["4096", "100"]]
    for row in rows(output):
        peak, average, rate, kernel = map(float, row[2:])
        assert peak >= average > 0
        assert 100 / (kernel * 1000) == pytest.approx(rate, rel=0.01)
        assert rate * 1e6 * int(row[0]) / 2**20 == pytest.approx(average, abs=0.01)


@pytest.mark.parametrize("name", LATENCY)
def test_latency_columns(name):
    output = run(name, *HOST, "-i", 100, "-s", 8).stdout
    heading = next(line for line in output.splitlines() if "#bytes" in line)
    assert re.split(r"  +", heading.strip()) == LAT_COLUMNS
    ((size, iterations, *times),) = rows(output)
    least, most, typical, average, _, p99, p999, kernel = map(float, times)
    assert (size, iterations) == ("8", "100")
    assert 0 < least <= typical <= p99 <= p999 <= most
    assert kernel >= 100 * 2 * (average - 0.01)


def test_default_sizes_are_the_originals():
    small = [1, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    large = [*small, 32768, 65536, 131072, 262144, 524288, 1048576]
    for name, benchmark in BENCHMARKS.items():
        assert list(benchmark.sizes) == (large if name in ("put_bw", "write_bw") else small)
    for name in ("put_bw", "get_bw", "write_lat"):
        assert [int(row[0]) for row in rows(run(name, *HOST, "-i", 2).stdout)] == list(BENCHMARKS[name].sizes)
    inline = [int(row[0]) for row in rows(run("twosided_bw", *HOST, "-i", 2, "-x").stdout)]
    assert inline == [1, 4, 8, 12, 16, 20, 24, 28, 30, 32]


def test_all_sizes():
    assert [int(row[0]) for row in rows(run("put_bw", *HOST, "-a", "-i", 2).stdout)] == [1 << n for n in range(1, 24)]


def test_gbits():
    args = ("put_bw", *HOST, "-s", 65536, "-i", 50)
    output = run(*args, "--report_gbits").stdout
    assert "BW average[Gb/sec]" in output
    (row,) = rows(output)
    assert float(row[3]) == pytest.approx(float(row[4]) * 65536 * 8 / 1000, abs=0.1)


def test_duration():
    start = time.monotonic()
    (row,) = rows(run("put_bw", *HOST, "-D", 0.3, "-s", 64).stdout)
    assert time.monotonic() - start >= 0.3
    assert int(row[1]) > 2048
    (row,) = rows(run("write_lat", *HOST, "-D", 0.1, "-s", 64).stdout)
    assert int(row[1]) > 0


@pytest.mark.parametrize(
    "letters",
    [("-q", 2), ("--qp", 3), ("-t", 2), ("-r", 1), ("-r", 2), ("-gid", 1), ("-l", 1), ("-x", 1), ("-p", 2), ("-n", 1),
     ("-e", 1), ("-e", 2), ("--queue-memory", "cpu_gpu"), ("--payload-memory", "gpu")],
)
def test_options_of_the_originals(letters):
    assert rows(run("put_bw", *HOST, "-s", 64, "-i", 64, *letters).stdout)


def test_the_named_gid_is_used():
    assert "GID index 1" in run("put_bw", *HOST, "-s", 64, "-i", 64, "-gid", 1).stdout


@pytest.mark.parametrize("depth, entries", [((), 2048), (("--tx-depth", 100), 128)])
def test_the_preamble_says_what_the_queue_has(depth, entries):
    assert f"Send queue  : {entries} slots" in run("put_bw", *HOST, "-s", 64, "-i", 64, *depth).stdout


@pytest.mark.parametrize("name", BENCHMARKS)
def test_flag_values(name):
    """Are shown where the original shows them."""
    args = (name, *HOST, "-s", 64, "-s", 128, "-i", 300)
    lines = [line for line in run(*args).stdout.splitlines() if line.startswith("Flag value")]
    shown = name in ("put_signal_bw", "put_counter_bw")
    assert lines == ([f"Flag value for message size {size} is 300" for size in (64, 128)] if shown else [])
    flags = [result.get("flag_value") for result in json.loads(run(*args, "--json").stdout)["results"]]
    assert flags == [300 if shown else None] * 2


@pytest.mark.parametrize("name", BENCHMARKS)
def test_json(name):
    document = json.loads(run(name, *HOST, "--json", "-i", 64, "-s", 64, "-s", 128).stdout)
    assert mistakes(document, schema("benchmark")) == []
    assert (document["test"], document["target"]) == (name, "cpu")
    assert document["nic"] in SOFTWARE_NICS  # the first that no other process has
    assert [result["size"] for result in document["results"]] == [64, 128]
    latency = ["lat_min_us", "lat_median_us", "lat_p99_us"]
    names = [*latency, "kernel_us"] if name in LATENCY else ["bw_avg_gbps", "msg_rate_mpps", "kernel_ms"]
    for result in document["results"]:
        assert result["iterations"] == 64
        assert result["validated"] is True
        assert all(isinstance(result[key], float) and result[key] > 0 for key in names)


# --- pictures ------------------------------------------------------------------------------------------------------

PICTURES = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.parametrize("name", ["put_bw", "write_lat"])
@pytest.mark.parametrize("suffix", ["png", *(pytest.param(other, marks=pytest.mark.slow) for other in ("svg", "pdf"))])
def test_plot(name, suffix, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra 'plot')")
    path = tmp_path / f"figure.{suffix}"
    run(name, *HOST, "-i", 100, "-s", 64, "-s", 4096, "--plot", path)
    assert path.read_bytes().startswith(PICTURES[suffix])


def test_plot_of_nothing(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra 'plot')")
    empty = tmp_path / "empty"
    empty.touch()
    for name in ("put_bw", "write_lat"):
        run(name, *HOST, "-s", 64, "--payload", empty, "--plot", tmp_path / "figure.png")


def test_plot_is_refused_before_anything_runs(tmp_path, monkeypatch):
    assert "the suffix names the format, one of .png, .svg, .pdf" in error("put_bw", *HOST, "--plot", "figure.jpg")
    assert "there is no directory" in error("put_bw", *HOST, "--plot", tmp_path / "none" / "figure.png")
    assert "belongs to the client" in error("write_lat", "--plot", tmp_path / "figure.png", expect=2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'gpunetio[plot]'" in error("put_bw", *HOST, "--plot", tmp_path / "figure.png")


# --- payload -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BENCHMARKS)
def test_payload(name, file):
    document = json.loads(run(name, *HOST, "--json", "--payload", file, "-s", 7, "-s", 1000, "-s", 65536).stdout)
    assert mistakes(document, schema("benchmark")) == []
    assert document["payload"] == {"file": str(file), "bytes": 50_001}
    data = file.read_bytes()
    for result, sent in zip(document["results"], (2048 * 7, 50_001, 50_001)):
        assert result["iterations"] == -(-sent // result["size"])
        assert result["payload_bytes"] == sent
        assert result["sha256"] == hashlib.sha256(data[:sent]).hexdigest()
        assert result["validated"] is True


def test_payload_says_how_many_bytes(file):
    output = run("put_bw", *HOST, "--payload", file, "-s", 7, "-s", 1000, "-s", 65536).stdout
    digests = [hashlib.sha256(file.read_bytes()[:n]).hexdigest() for n in (14_336, 50_001)]
    assert output.splitlines()[-3:] == [
        f"payload.bin: the first 14336 of 50001 bytes arrived with message size 7, SHA-256 {digests[0]}",
        f"payload.bin: all 50001 bytes arrived with message size 1000, 65536, SHA-256 {digests[1]}",
        "Validation successful! Data received correctly.",
    ]


def test_empty_payload(tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    output = run("put_bw", *HOST, "--payload", empty, "-s", 64).stdout
    assert f"empty: all 0 bytes arrived with message size 64, SHA-256 {hashlib.sha256(b'').hexdigest()}" in output


def test_a_corrupted_byte_fails_the_run(file, monkeypatch):
    launch = Loopback.launch

    def corrupting(loopback, *args, **named):
        records = launch(loopback, *args, **named)
        loopback.far.array[4321] ^= 1
        return records

    monkeypatch.setattr(Loopback, "launch", corrupting)
    result = run("put_bw", *HOST, "--payload", file, "-s", 1000, expect=1)
    assert len(rows(result.stdout)) == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("gpunetio: error: validation failed: message size 1000: the byte at offset 4321 of the ")
    document = json.loads(run("put_bw", *HOST, "--payload", file, "--json", "-s", 1000, expect=1).stdout)
    assert document["results"][0]["validated"] is False
    assert document["results"][0]["sha256"] != hashlib.sha256(file.read_bytes()).hexdigest()


class PingPong:
    """The end of a ping-pong that has been played, whatever its options."""

    own = QpEndpoint(qpn=1, gid=bytes(16), lid=0, mtu=1024)
    problem: str | None = None

    def __init__(self, options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def meet(self):
        return self.own

    def play(self):
        return Played(64, 1, 1e-6, self.problem)


def test_wrong_contents_fail_a_ping_pong(monkeypatch):
    monkeypatch.setattr(pingpong, "PingPong", PingPong)
    assert run("pingpong").stderr == ""
    monkeypatch.setattr(PingPong, "problem", "the byte at offset 0 of message 1 is wrong")
    result = run("pingpong", expect=1)
    assert result.stderr == "gpunetio: error: validation failed: the byte at offset 0 of message 1 is wrong\n"
    assert "128 bytes in" in result.stdout


# --- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ("put_bw", "--frob"), ("put_bw", "-s", "0"), ("put_bw", "-s", "x"), ("put_bw", "-i", "0"),
        ("put_bw", "-p", "3"), ("put_bw", "-q", "0"), ("write_lat", "-q", "2"), ("put_bw", "-D", "0"),
        ("put_bw", "--target", "tpu"), ("put_bw", "-s", "64", "-a"), ("put_bw", "-D", "1", "-i", "5"),
        ("put_bw", "-D", "1", "--payload", "x"), ("put_bw", "--json", "--report_gbits"),
        ("put_bw", "-g", "host", "--target", "cuda"), ("put_bw", "-g", "0", "--target", "cpu"), ("put_bw", "stray"),
        ("put_bw", "-e", "3"), ("put_bw", "-r", "3"), ("twosided_bw", "-x", "-a"), ("put_bw", "--inline"),
        ("put_bw", "--trace-ops", "0"), ("put_bw", "--queue-memory", "here"), ("put_bw", "--payload-memory", "disk"),
        ("put_bw", "-c", "127.0.0.1"), ("put_bw", "-c", ""), ("put_bw", "--port", "65536"), ("put_bw", "--wire", "tcp"),
        ("put_bw", "-D", "inf"), ("put_bw", "-D", "nan"), ("stat", "--interval", "nan"), ("stat", "--interval", "inf"),
        ("put_bw", "--faults", "loss=0.1"), ("put_bw", "--wire", "udp"), ("selftest", "litmus", "--seconds", "nan"),
        ("nonsense",), ("devices", "--frob"),
    ],
)
def test_wrong_options(args):
    extra = ("--loopback",) if args[0].endswith(("_bw", "_lat")) else ()
    assert "--help)" in error(*args, *extra, expect=2)


@pytest.mark.parametrize(
    "args, text",
    [
        *(((name, "-p", 6), f"-p 6: {name} has no NIC handler GPU_SM_BF, but 0 (AUTO), 1 (CPU_PROXY), 2 (GPU_SM_DB)")
          for name in BENCHMARKS if name != "write_lat"),
        (("write_bw", "-e", 1), "-e 1: write_bw has no execution scope WARP: a block's last thread submits for all"),
        *(((name, "-e", 2), f"-e 2: {name} has no execution scope BLOCK: one thread posts at each end")
          for name in LATENCY),
        (("twosided_bw", "-x", "-s", 8, "-s", 33), "--inline: a completion carries at most 32 bytes, not 33"),
        (("put_bw", "-e", 2, "-t", 64, "--tx-depth", 16), "32 threads post 32 requests together, for which --tx-depth"),
        (("put_signal_bw", "-e", 2, "-t", 64, "--tx-depth", 32), "is too small: give 64 or more"),
        (("twosided_bw", "-e", 2, "-t", 32, "--tx-depth", 32), "32 slots, of which half are posted at a time: give"),
        (("put_bw", "-t", 32, "--trace", "/dev/null", "--trace-ops", 65536), "of 32 threads are too many"),
        (("write_bw", "-q", 64, "--trace", "/dev/null", "--trace-ops", 65536), "of 64 threads are too many"),
    ],
)
def test_what_a_benchmark_cannot_do(args, text):
    assert text in error(*args, *HOST)


def test_unknown_device():
    assert error("put_bw", *HOST, "-d", "mlx5_0").startswith("no device 'mlx5_0'; there are: soft0, ")
    assert error("devices", "-d", "mlx5_0").startswith("no device 'mlx5_0'; there are: soft0, ")


@pytest.mark.parametrize("gpu", ["77", "ff:1f.0", "nonsense"])
def test_unknown_gpu(gpu):
    assert gpu in error("put_bw", "--loopback", "-gpu", gpu)


@needs_no_gpu
def test_no_cuda():
    assert error("put_bw", "--loopback", "--target", "cuda").startswith("--target cuda: this machine has no CUDA")


def test_unreadable_files(tmp_path, file):
    missing = tmp_path / "missing"
    assert error("put_bw", *HOST, "--payload", missing) == f"{missing}: No such file or directory"
    assert error("put_bw", *HOST, "--payload", tmp_path) == f"{tmp_path} is not a regular file: a payload must be one"
    if os.geteuid() != 0:  # root may read everything
        file.chmod(0)
        assert error("put_bw", *HOST, "--payload", file) == f"{file}: Permission denied"


def test_unknown_gid():
    assert "GID index 99" in error("put_bw", *HOST, "-gid", 99)
    assert "no GID at index 9" in error("put_bw", *HOST, "-gid", 9)


def test_busy_device(monkeypatch):
    def busy(name, port):
        raise InUseError("soft0 is used by\nprocess 42")

    monkeypatch.setattr("gpunetio.bench.run.open_device", busy)
    assert error("put_bw", *HOST) == "soft0 is used by process 42"


def test_interrupt_during_set_up_is_quiet(monkeypatch):
    def interrupted(name, port):
        raise KeyboardInterrupt

    monkeypatch.setattr("gpunetio.bench.run.open_device", interrupted)
    assert run("put_bw", *HOST, expect=130).output == ""


# --- the list of commands --------------------------------------------------------------------------------------------


def listed(columns):
    """The commands that `gpunetio --help` lists on a terminal of so many columns: title → [(name, text)]."""
    formatter = click.HelpFormatter(width=columns - 2)  # as a context makes it
    app.format_commands(click.Context(app), formatter)
    title, found = "", {}
    for line in formatter.getvalue().splitlines():
        if line.endswith(":"):
            title = line.removesuffix(":")
        elif line:
            name, text = line.split(maxsplit=1)
            found.setdefault(title, []).append((name, text))
    return found


def test_help_lists_each_command_once_in_one_line():
    found = listed(80)
    rows = [row for rows in found.values() for row in rows]
    assert sorted(name for name, _ in rows) == app.list_commands(click.Context(app))
    assert all(text.endswith(".") and not text.endswith("...") for _, text in rows)
    assert [name for name, _ in next(iter(found.values()))] == ["run", "doctor"]
    assert listed(200) == found


def test_help_is_as_wide_as_the_terminal():
    lines = CliRunner().invoke(app, ["--help"], terminal_width=150).stdout.splitlines()
    assert max(map(len, lines)) > 80
    assert max(map(len, lines)) <= 150


def test_the_readme_has_the_same_subjects():
    _, _, below = (ROOT / "README.md").read_text().partition("\n| command | what it does |\n|---|---|\n")
    subjects = {}
    for row in below.partition("\n\n")[0].splitlines():
        first = row.split("|")[1]
        if title := re.search(r"\*\*(.*)\*\*", first):
            names = subjects[title[1]] = []
        else:
            names += re.findall(r"`(?:gpunetio )?([\w-]+)", first)
    assert list(subjects) == list(app.subjects)
    assert {title: sorted(names) for title, names in subjects.items()} == {
        title: sorted(names) for title, names in app.subjects.items()
    }


# --- client and server -----------------------------------------------------------------------------------------------


class ServerThread(threading.Thread):
    """A server on soft0 in this process: its results, and where it can be called."""

    def __init__(self, options):
        super().__init__()
        self.up, self.results = threading.Event(), []
        self._options = options

    def run(self):
        with Server(self._options, self._waiting) as server:
            self.results = list(server.results())

    def _waiting(self, *address):
        self.address = address
        self.up.set()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_client(name):
    server = ServerThread(Options(benchmark=BENCHMARKS[name], device="soft0", gpu="host", tcp_port=0))
    server.start()
    assert server.up.wait(60)
    host, port = server.address
    args = ("-c", host, "--port", port, "-d", "soft1", "--target", "cpu", "-s", 64, "-s", 1000, "-i", 100)
    output = run(name, *args).stdout
    server.join(30)
    assert f"client of {host}" in output
    assert [row[:2] for row in rows(output)] == [["64", "100"], ["1000", "100"]]
    word = "from" if name == "get_bw" else "by"
    assert output.endswith(f"Validation successful! Data received correctly {word} server.\n")
    assert [result.size for result in server.results] == [64, 1000]


@pytest.mark.parametrize("name", ["put_bw", "write_lat"])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_server(name, as_json, monkeypatch):
    """The command is the server; its client calls as soon as it can."""
    clients = []

    def call(output, address, port):
        options = Options(
            benchmark=BENCHMARKS[name], device="soft1", gpu="host", tcp_port=port, server=address, sizes=(64,),
            iterations=100, asked=frozenset({"sizes", "iterations"}),
        )
        clients.append(threading.Thread(target=client, args=(options,)))
        clients[0].start()
        waiting(output, address, port)

    def client(options):
        with Client(options) as end:
            end.tell(measure(end, 0, 64))
            end.finish()

    waiting = benchmarks._Output.waiting
    monkeypatch.setattr(benchmarks._Output, "waiting", call)
    result = run(name, "-d", "soft0", "--target", "cpu", "--port", free_port(), *(["--json"] if as_json else []))
    clients[0].join(30)
    if as_json:
        document = json.loads(result.stdout)
        assert mistakes(document, schema("benchmark")) == []
        assert (document["role"], document["nic"]) == ("server of 127.0.0.1", "soft0")
        assert [each["iterations"] for each in document["results"]] == [100]
        assert result.stderr.startswith("Waiting for a client on 127.0.0.1 port ")
    else:
        assert result.stdout.startswith("Waiting for a client on 127.0.0.1 port ")
        assert [row[:2] for row in rows(result.stdout)] == [["64", "100"]]
        assert result.stdout.endswith("Validation successful! Data received correctly from client.\n")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_ctrl_c_at_the_other_end(monkeypatch):
    def interrupted(*args, **kwargs):
        raise PeerInterrupted("the server was interrupted (Ctrl+C)")

    monkeypatch.setattr("gpunetio.bench.remote.dial", interrupted)
    assert error("put_bw", "-c", "127.0.0.1", "--target", "cpu", expect=130) == "the server was interrupted (Ctrl+C)"


def test_nobody_to_call():
    args = ("-c", "127.0.0.1", "--target", "cpu", "--port", free_port())
    assert "Start the same command there, as the server, first" in error("put_bw", *args)


def test_another_address_to_call():
    """The error names where a server of this host waits."""
    with socket.create_server(("127.0.0.7", 0)) as server:
        port = server.getsockname()[1]
        told = error("put_bw", "-c", "127.0.0.1", "--target", "cpu", "--port", port)
    assert told.endswith("Connection refused. A server on this host listens at 127.0.0.7: use that address")


@pytest.mark.parametrize("option", ["--trace", "--plot"])
def test_a_full_disk(option, tmp_path):
    """The results are printed all the same, and the file is named."""
    path = tmp_path / "file.svg"
    path.symlink_to("/dev/full")
    if option == "--plot":
        pytest.importorskip("matplotlib", reason="needs matplotlib (extra 'plot')")
    result = run("put_bw", *HOST, "-s", 64, "-i", 100, option, path, expect=1)
    assert "Validation successful!" in result.stdout
    assert result.stderr == f"gpunetio: error: cannot write {option} {path}: No space left on device\n"


def test_half_a_file_is_taken_away(tmp_path):
    path = tmp_path / "trace.json"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing fails
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.raises(Failure, match=f"cannot write --trace {path}: File too large"), writing("--trace", path):
            path.write_bytes(bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not path.exists()


def test_a_file_that_cannot_be_opened_stays(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("old")
    with pytest.raises(Failure, match=f"cannot write --trace {path}: Permission denied"), writing("--trace", path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    assert path.read_text() == "old"


# --- the other commands --------------------------------------------------------------------------------------------


def test_devices():
    output = run("devices", "-d", "soft0").stdout
    fields = dict(line.strip().split(":", 1) for line in output.splitlines() if line)
    fields = {name: value.strip() for name, value in fields.items()}
    assert fields["hca_id"] == "soft0"
    assert fields["transport"] == "InfiniBand (0)"
    assert re.fullmatch(r"([0-9a-f]{4}:){3}[0-9a-f]{4}", fields["node_guid"])
    assert fields["vendor_id"] == "0x02c9"
    assert fields["state"] == "PORT_ACTIVE (4)"
    assert fields["active_mtu"] == "4096 (5)"
    assert fields["link_layer"] == "Ethernet"
    assert "GID[" not in output


def test_the_wires_that_lead_to_other_processes_are_offered():
    (option,) = (one for one in app.commands["put_bw"].params if one.name == "wire")
    assert [*option.type.choices] == [wire_syntax(name) for name in WIRES if name not in ("replay", "pcap")]


def test_devices_verbose_and_listed():
    output = run("devices", "-v", "-d", "soft1").stdout
    assert "max_qp:" in output
    assert re.search(r"GID\[  0\]:\t::ffff:127\.0\.0\.2, RoCE v2", output)
    names = run("devices", "-l").stdout.split()
    assert names[:2] == ["soft0", "soft1"]
    assert re.findall(r"hca_id:\t(\w+)", run("devices").stdout) == names


@pytest.mark.slow
def test_warm_and_version():
    text = run("warm").stdout
    assert text.startswith("ready: the NIC, put_bw, ")
    assert "selftest litmus, " in text
    assert {"read_rings", "post_stamped"} <= {function.__name__ for function, *_ in roots._roots}
    assert re.fullmatch(r"gpunetio \d+\.\d+\.\d+\n", run("--version").stdout)


# --- processes of their own ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_of_its_own(file):
    done = gpunetio("put_bw", *HOST, "-s", "4096", "--payload", file)
    assert done.returncode == 0
    assert "all 50001 bytes arrived" in done.stdout
    assert gpunetio("put_bw", "-c", "127.0.0.1", "--port", "1").returncode == 1


def test_what_is_refused_is_explained(tmp_path):
    """The NIC's own explanation goes to stderr, before the one line of the command."""
    script = tmp_path / "broken.py"
    script.write_text(
        "from gpunetio import cli\n"
        "from gpunetio.bench.loopback import Loopback\n"
        "before = Loopback._open\n"
        "Loopback._open = lambda run: (before(run), run.far_mr.close())\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, script, "put_bw", *HOST, "-s", "64"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "RKEY_UNKNOWN" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("gpunetio: error: the kernel ended with 'error completion': WQE ")


@pytest.mark.parametrize(
    "args", [("put_bw", "-s", "64"), pytest.param(("write_lat", "-s", "1048576"), marks=pytest.mark.slow)]
)
def test_ctrl_c(args):
    run(*args, *HOST, "-i", 4)  # so that nothing has to be compiled when the signal comes
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "gpunetio", *args, *HOST, "-D", "30"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    assert process.stdout is not None
    while "#bytes" not in process.stdout.readline():
        pass
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (130, "")


def test_closed_output_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m gpunetio put_bw --loopback --target cpu -i 8 | head -n 1",
        shell=True, capture_output=True, text=True, timeout=60, check=False,
    )
    assert done.stderr == ""


# --- shell completion ----------------------------------------------------------------------------------------------


def completing(instruction, **words):
    """What the program answers to a shell."""
    environment = {**os.environ, "_GPUNETIO_COMPLETE": instruction, **words}
    command = [sys.executable, "-m", "gpunetio"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_readme_says_how_shells_complete():
    readme = (ROOT / "README.md").read_text()
    shells = re.findall(r"_GPUNETIO_COMPLETE=(\w+)_source gpunetio\b", readme)
    assert shells == ["bash", "fish"]
    assert "`zsh_source`" in readme
    for shell in (*shells, "zsh"):
        assert "gpunetio" in completing(f"{shell}_source")


@pytest.mark.parametrize(("words", "index", "expected"), [
    ("gpunetio put_s", 1, {"put_signal_bw", "put_signal_lat"}), ("gpunetio devices --js", 2, {"--json"}),
    ("gpunetio show s", 2, {"sq", "srq"}),
])
def test_shells_complete(words, index, expected):
    answer = completing("bash_complete", COMP_WORDS=words, COMP_CWORD=str(index))
    assert {line.partition(",")[2] for line in answer.splitlines()} == expected
