"""`gpunetio doctor`: what it prints, records, replays, and its exit status."""

import contextlib
import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
import threading

import pytest
from click.testing import CliRunner, Result

from doctor_rig import READY, answer, changed, file, without
from gpunetio.cli import app
from gpunetio.doctor import ReplayHost, Trouble, save
from gpunetio.doctor.machine.host import Kind
from tools import new_terminal

UUID = "GPU-3d4c1c8e-aaaa-4bcd-9e55-0123456789ab"


def doctor(*args: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, args)], prog_name="gpunetio")


@pytest.fixture
def recorded(tmp_path):
    """Save a machine and give its file."""

    def write(host: ReplayHost, name: str = "machine.json") -> str:
        save(list(host.recorded.values()), tmp_path / name)
        return str(tmp_path / name)

    return write


def test_a_machine_with_nothing_wrong(recorded):
    result = doctor("--replay", recorded(READY))
    assert result.exit_code == 0, result.output
    assert "FAIL" not in result.output
    assert re.search(r"^  RDMA Verbs    yes      GPU0 with mlx5_0$", result.output, re.MULTILINE)


def test_here():
    """Whatever this machine is: the software NIC runs on it, as the other tests show."""
    result = doctor("--for", "software")
    assert result.exit_code == 0, result.output
    assert re.search(r"^  software NIC  yes$", result.output, re.MULTILINE)
    assert max(map(len, result.output.splitlines())) <= 100
    assert "\x1b" not in result.output


NOTHING = ReplayHost({})
DOWN = [file(f"/sys/class/infiniband/mlx5_{n}/ports/1/state", "1: DOWN\n") for n in (0, 1)]
UNREADABLE = [
    without(Kind.FILE, f"/sys/class/infiniband/mlx5_{n}/ports/1/state", trouble=Trouble.DENIED) for n in (0, 1)
]


@pytest.mark.parametrize(
    ("changes", "options", "status"),
    [
        ([], [], 0),
        ([], ["--for", "verbs"], 0),
        ([], ["--for", "ethernet"], 0),
        ([], ["--for", "software"], 0),
        ([], ["--gpu", "0", "--nic", "mlx5_1"], 0),
        ([], ["--gpu", "ca:00.0", "--nic", "ens6f0"], 0),
        (DOWN, [], 1),
        (DOWN[:1], [], 0),
        (DOWN[:1], ["--nic", "mlx5_0"], 1),
        (DOWN, ["--for", "software"], 0),
        (UNREADABLE, [], 2),
        (UNREADABLE, ["--for", "software"], 0),
    ],
    ids=str,
)
def test_exit_status(recorded, changes, options, status):
    result = doctor("--replay", recorded(changed(READY, *changes)), *options)
    assert result.exit_code == status, result.output


def test_json(recorded):
    told = json.loads(doctor("--replay", recorded(changed(READY, *DOWN)), "--json").output)
    assert told["ready"]["verbs"]["answer"] == "no"
    assert "port-state" in told["ready"]["verbs"]["why"]
    (wrong,) = [one for one in told["findings"] if one["id"] == "port-state" and one["nic"] == "mlx5_0"]
    assert wrong["status"] == "FAIL"
    assert wrong["read"][0] == {"source": "/sys/class/infiniband/mlx5_0/ports/1/state", "value": "1: DOWN"}
    assert all(one[key] for one in told["findings"] for key in ("id", "area", "status", "summary", "why", "source"))
    assert all(one["cure"] for one in told["findings"] if one["status"] in ("WARN", "FAIL"))


def test_verbose_tells_why_of_all(recorded):
    path = recorded(READY)
    plain, verbose = doctor("--replay", path).output, doctor("--replay", path, "-v").output
    findings = json.loads(doctor("--replay", path, "--json").output)["findings"]
    assert len(re.findall(r"^        why ", verbose, re.MULTILINE)) >= len({one["id"] for one in findings})
    assert len(plain.splitlines()) < len(verbose.splitlines()) / 2


def test_record_here_and_replay(tmp_path):
    first = doctor("--record", tmp_path / "a.json")
    again = doctor("--replay", tmp_path / "a.json")
    assert (again.output, again.exit_code) == (first.output, first.exit_code)
    assert doctor("--replay", tmp_path / "a.json", "--record", tmp_path / "b.json").output == first.output
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


def test_redact(recorded, tmp_path):
    host = changed(
        READY, answer("system", value={"nodename": "node17", "release": "6.8.0", "python": "3.12.3"}),
        file("/proc/driver/nvidia/gpus/0000:ca:00.0/information", f"Model: NVIDIA A100\nGPU UUID: {UUID}\n"),
    )
    plain = doctor("--replay", recorded(host), "--record", tmp_path / "p.json").output
    masked = doctor("--replay", recorded(host), "--record", tmp_path / "m.json", "--redact").output
    assert plain == masked
    assert UUID in (tmp_path / "p.json").read_text()
    assert UUID not in (tmp_path / "m.json").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--redact"], "--redact changes the file of --record: give --record FILE, too"),
        (["--replay", "no-such-file"], "no-such-file: No such file or directory"),
        (["--replay", __file__], "is not a recording of `gpunetio doctor --record`"),
        (["--record", "no/such/folder/r.json"], "no/such/folder/r.json: No such file or directory"),
        (["--for", "fun"], "'fun' is not one of"),
        (["--bar1-mib", "-1"], "-1 is not in the range"),
        (["--gpu", "7"], "no GPU is '7'; there is GPU0 (0000:ca:00.0)"),
        (["--nic", "mlx5_9"], "no NIC is 'mlx5_9'; there is mlx5_0 (0000:b5:00.0), mlx5_1 (0000:b5:00.1)"),
    ],
    ids=str,
)
def test_mistakes(recorded, options, message):
    which = [] if "--replay" in options else ["--replay", recorded(READY)]
    result = doctor(*which, *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_it_needs_no_compiler():
    """Quick to start, and at home where llvmlite is not."""
    program = (
        "import sys; sys.modules['llvmlite'] = None; sys.modules['gpunetio.device'] = None\n"
        "from gpunetio.cli import app; app(['doctor', '--for', 'software', '--json'], standalone_mode=False)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(done.stdout)["findings"], done.stderr


@pytest.mark.parametrize("columns", [72, 140])
@pytest.mark.parametrize("command", ["doctor", "topo"])
def test_lines_fit_the_terminal(recorded, command, columns):
    ours, theirs = new_terminal()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))  # ioctl_tty(2)
    told = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while piece := os.read(ours, 1 << 16):
                told.extend(piece)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    line = [command, "--replay", recorded(READY), *(["-v"] if command == "doctor" else [])]
    subprocess.run([sys.executable, "-m", "gpunetio", *line], stdout=theirs, env=environment, timeout=60)
    os.close(theirs)
    reader.join(10)
    os.close(ours)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", told.decode()).splitlines()
    longest = max(map(len, lines))
    assert longest <= columns
    assert command == "topo" or longest > columns - 12
