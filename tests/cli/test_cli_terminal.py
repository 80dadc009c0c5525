"""What a benchmark shows on a terminal: no line wraps, and the progress bar leaves the results alone."""

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace

import pytest

from gpunetio.bench.options import BENCHMARKS, Options
from gpunetio.bench.report import Table
from gpunetio.bench.results import BwResult, Check, LatResult
from tools import new_terminal

_CONTROLS = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)")
_UP = re.compile(r"\x1b\[(\d*)A")


def on_a_terminal(columns, *args):
    """The lines that `gpunetio …` leaves on a terminal of so many columns, which is its stdout and stderr."""
    leader, follower = new_terminal()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 50, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    with subprocess.Popen(
        [sys.executable, "-m", "gpunetio", *args], stdin=follower, stdout=follower, stderr=follower, env=environment
    ) as child:
        os.close(follower)
        written = bytearray()
        try:
            while chunk := os.read(leader, 1 << 16):
                written += chunk
        except OSError:  # EIO: the child has closed its end
            pass
        os.close(leader)
        assert child.wait(timeout=60) == 0
    return rendered(written.decode())


def rendered(written):
    """Lines as a terminal shows them: what a carriage return, an erased line and a step upwards do to them."""
    lines, y, x = [""], 0, 0
    for token in _CONTROLS.split(written):
        if token == "\n":
            y, x = y + 1, 0
            lines += [""] * (y + 1 - len(lines))
        elif token == "\r":
            x = 0
        elif up := _UP.fullmatch(token):
            y = max(0, y - int(up[1] or 1))
        elif token == "\x1b[2K":
            lines[y] = ""
        elif not token.startswith("\x1b"):
            lines[y] = f"{lines[y]:<{x}}"[:x] + token + lines[y][x + len(token) :]
            x += len(token)
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.slow)])
def test_rows_on_a_terminal_stand_alone(columns):
    lines = on_a_terminal(columns, "put_bw", "--loopback", "--target", "cpu", "-i", "5000", "-s", "64,4096")
    assert max(map(len, lines)) <= columns
    heading = next(i for i, line in enumerate(lines) if line.startswith(" #bytes"))
    assert [re.split(" +", line)[:3] for line in lines[heading + 1 : heading + 3]] == [
        ["", "64", "5000"],
        ["", "4096", "5000"],
    ]
    assert lines[heading + 3].startswith("Validation successful!")
    assert not any("━" in line for line in lines)


BW = BwResult(1 << 20, 1_000_000, 123456e6, 123456e6, 12.345678e6, 12.345678, Check())
LAT = LatResult(1 << 20, 100_000, *[123_456.789] * 7, 12.345678, Check())


@pytest.mark.parametrize("name, result", [("put_bw", BW), ("write_lat", LAT)])
def test_a_table_fits_80_columns(name, result):
    table = Table(Options(benchmark=BENCHMARKS[name]), width=80)
    assert len(table.heading) <= 80
    assert len(table.row(result)) <= 80
    assert len(table.row(result).split()) == len(re.split("  +| (?=[a-z9KM])", table.heading.strip()))


@pytest.mark.parametrize("name", ["put_bw", "write_lat"])
def test_perftests_columns_where_they_fit(name):
    """A terminal exactly as wide as perftest's table shows it; one column less, and headings are shorter."""
    options = Options(benchmark=BENCHMARKS[name])
    full = Table(options).heading
    width = Table(options)._layout.width
    assert len(full) <= width
    assert Table(options, width=width).heading == full
    assert Table(options, width=width - 1).heading != full


def test_long_times_lose_their_decimals_only():
    table = Table(Options(benchmark=BENCHMARKS["write_lat"]), width=80)
    assert table.row(replace(LAT, least=9999.99, most=10000.04)).split()[2:4] == ["9999.99", "10000"]


def test_several_sizes_in_one_option():
    def run(*args):
        return subprocess.run(
            [sys.executable, "-m", "gpunetio", "put_bw", "--loopback", "--target", "cpu", "-i", "10", *args],
            capture_output=True, text=True, timeout=60, check=False,
        )

    sizes = [line.split()[0] for line in run("-s", "64,65536", "-s", "8").stdout.splitlines() if line[1:2].isdigit()]
    assert sizes == ["64", "65536", "8"]
    wrong = run("-s", "64,x")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "'x' is not a valid integer range" in wrong.stderr


@pytest.mark.slow
@pytest.mark.soft_nic
def test_messages_stay_above_the_dashboard(tmp_path):
    """The last table is below what was said at the end."""
    wire = f"unix:{tmp_path / 'cable'}"
    shown = on_a_terminal(
        100, "packet_processing", "-g", "host", "-n", "soft0", "-q", "2", "--dashboard", "--seconds", "2.5",
        "--wire", wire, "--address", "192.0.2.1",
    )
    end = shown.index("GPU work ended")
    assert shown[end + 1] == "Application finished successfully"
    assert [line.split("  ")[0] for line in shown[end + 3 : end + 9]] == [
        "queue", "UDP 0", "UDP 1", "TCP 0", "TCP 1", "ICMP 0",
    ]
    assert sum(line.startswith("UDP 0") for line in shown) == 1
