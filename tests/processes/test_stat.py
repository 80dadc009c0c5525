"""Running NICs seen from another process: `observe`, `gpunetio stat`, `gpunetio show` and `gpunetio devices -v`."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner

from far import Farm, side, write_all
from gpunetio import verbs
from gpunetio.cli import app
from gpunetio.enums import Access
from gpunetio.errors import InvalidValueError, NotFoundError
from gpunetio.fabric.control_socket import ControlSocket
from gpunetio.memory import PAGE, HostMemory
from gpunetio.nic.observe.kinds import KINDS
from gpunetio.nic.observe.publish import Publication, describe_dtype
from gpunetio.nic.observe.running import Observed, running
from gpunetio.nic.state.counters import COUNTERS
from gpunetio.nic.state.cq import CQ_ROW
from gpunetio.nic.state.objects import GID_ROW
from gpunetio.nic.state.tables import Table
from neighbour import address
from nic_rig import until
from tools import new_terminal

DERIVED = ("port_xmit_data", "port_rcv_data", "port_xmit_packets", "port_rcv_packets")
TIMEOUT = 60.0  # the other process may have to compile the engine

# A process with soft0 open and objects in it; then lines `COUNTER VALUE` set counters.
OTHER = """
import json, sys
import gpunetio
from gpunetio.enums import Access
with gpunetio.open("soft0") as ctx, gpunetio.Gpu("host") as gpu:
    pd = ctx.create_pd()
    a, b = gpu.create_qp(pd, 64), gpu.create_qp(pd, 64)
    a.connect(b)
    memory = bytearray(5000)
    mr = pd.register(memory, Access.LOCAL_WRITE | Access.REMOTE_READ)
    nic = ctx.provider.nic
    print(json.dumps({
        "a": a.qp.qpn, "b": b.qp.qpn, "key": mr.rkey, "address": mr.address, "pdn": pd.pdn,
        "cqns": [int(row["cqn"]) for row in nic.cqs],
    }), flush=True)
    for line in sys.stdin:
        counter, value = line.split()
        nic.counters.rows[0][counter] = int(value)
        print("set", flush=True)
"""


class Other:
    """That process, and what it has."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid
        assert self.process.stdout is not None
        self.has = json.loads(self.process.stdout.readline())

    def set(self, counter: str, value: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(counter, value, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "set\n"

    def look(self) -> Observed:
        (nic,) = running(pid=self.pid)
        return nic

    def stop(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=TIMEOUT)
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def other():
    started = Other()
    started.set("rx_write_requests", 7)
    started.set("rdma_tx_bytes", 1 << 40)
    yield started
    started.stop()


def run(*args, expect=0):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == expect, result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def error(*args, expect=1):
    (line,) = run(*args, expect=expect).stderr.splitlines()
    return line.removeprefix("gpunetio: error: ")


# --- observe -------------------------------------------------------------------------------------------------------


def test_tables_of_another_process(other):
    with other.look() as nic:
        assert (nic.name, nic.pid) == ("soft0", other.pid)
        assert nic.addresses[0] == "127.0.0.1"
        qps = nic.tables["qps"]
        assert {int(row["qpn"]): int(row["remote_qpn"]) for row in qps} == {
            other.has["a"]: other.has["b"], other.has["b"]: other.has["a"]
        }
        assert {nic.tables.number_at("cqs", int(row["send_cq"])) for row in qps} <= {*other.has["cqns"]}
        assert nic.tables.number_at("cqs", 12345) == 0
        (key,) = (row for row in nic.tables["mkeys"] if row["key"] == other.has["key"])
        assert (key["nbytes"], key["pdn"]) == (5000, other.has["pdn"])
        assert key["access"] == Access.LOCAL_WRITE | Access.REMOTE_READ
        assert len(nic.tables["gids"]) >= 2
        assert bytes(nic.tables["gids"][0]["gid"]).endswith(b"\x7f\0\0\1")
        assert set(nic.tables) == {
            "qps", "cqs", "srqs", "mkeys", "pds", "umems", "uar_pages", "eqs", "gids", "sqs", "rqs", "wires"
        }
        with pytest.raises(NotFoundError, match="has no table 'counters'"):
            nic.tables["counters"]
        assert nic.counters["rx_write_requests"] == 7
        assert set(nic.counters) == {*COUNTERS.offsets, *DERIVED}
        other.set("cqes", 5)
        assert nic.counters["cqes"] == 5  # the same memory
        assert running(name="soft0", pid=other.pid)
        assert running(name="soft1", pid=other.pid) == []


def test_the_reader_cannot_write(other):
    with other.look() as nic:
        with pytest.raises(ValueError, match="read-only"):
            nic._counters["cqes"] = 1
        nic.tables["pds"]["users"] = 99  # a copy
        assert not (nic.tables["pds"]["users"] == 99).any()


def test_this_process_too(other):
    with verbs.open("soft0") as ctx:
        (nic,) = running(pid=os.getpid())
        provider = ctx.provider.nic
        assert (nic.name, nic.counters["cqes"]) == ("soft0", int(provider.counters["cqes"]))
        pd = ctx.create_pd()
        assert pd.pdn in nic.tables["pds"]["pdn"]
        assert {nic.pid for nic in running("soft0")} >= {other.pid, os.getpid()}
    assert running(pid=os.getpid()) == []
    assert len(nic.tables["eqs"]) == 8  # its last state
    nic.close()
    nic.close()


def test_the_dead_vanish():
    gone = Other()
    try:
        nic = gone.look()
        gone.process.kill()
        gone.process.wait(TIMEOUT)
        assert running(pid=gone.pid) == []
        assert len(nic.tables["qps"]) == 2
    finally:
        gone.stop()


def test_the_stopped_are_left_out(other):
    os.kill(other.pid, signal.SIGSTOP)
    os.waitpid(other.pid, os.WUNTRACED)  # now it stands still
    try:
        assert running(pid=other.pid, timeout=0.1) == []
    finally:
        os.kill(other.pid, signal.SIGCONT)
    assert running(pid=other.pid, timeout=TIMEOUT)


def test_nothing_stays_open(other):
    with contextlib.suppress(IndexError):
        running(pid=other.pid)[0].close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        other.look().close()
        other.look()  # and forgotten
    assert len(os.listdir("/proc/self/fd")) == before


def described() -> tuple[Publication, dict]:
    memory = HostMemory(PAGE, shared=True)
    publication = Publication({"cqs": Table("CQ", CQ_ROW, 16), "gids": Table("GID", GID_ROW, 16)}, (memory, 64, 1))
    description, fds = publication()
    assert len(fds) == 3
    return publication, {"name": "soft0", "addresses": ["127.0.0.1"], **json.loads(json.dumps(description))}


def test_description():
    publication, description = described()
    with Observed(1, description, publication.fds) as nic:
        assert nic.tables["cqs"].dtype == CQ_ROW.dtype
        assert len(nic.tables["cqs"]) == len(nic.tables["gids"]) == 0
        assert set(nic.counters.values()) == {0}
    publication.close()
    mixed = np.dtype({"names": ["a", "b"], "formats": ["(3,)>u2", "V5"], "offsets": [8, 20], "itemsize": 64})
    layout = json.loads(json.dumps(describe_dtype(mixed)))
    assert np.dtype(layout) == mixed


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 33}, {"rows": 0}, {"rows": -1}, {"offset": -8}, {"offset": PAGE - 8}, {"rows": 1 << 70}, {"fd": 3},
        {"fd": "x"}, {"dtype": {}}, {"dtype": None}, {"number": "none"}, {"used": "nothing"}, {"rows": "many"},
    ],
)
def test_wrong_descriptions(change):
    publication, description = described()
    description["tables"]["cqs"].update(change)
    with pytest.raises(InvalidValueError, match="process 9 sent an invalid description of its NIC"):
        Observed(9, description, publication.fds)
    publication.close()


@pytest.mark.parametrize(
    ("formats", "offsets", "itemsize"),
    [(["O"], [0], 8), (["<i8"], [8], 8), (["<i8"], [-8], 8), (["<f8"], [0], 8), (["<i8"], [0], 0), ([[1]], [0], 8)],
)
def test_wrong_layouts(formats, offsets, itemsize):
    publication, description = described()
    layout = {"names": ["cqn"], "formats": formats, "offsets": offsets, "itemsize": itemsize}
    description["tables"]["cqs"].update(dtype=layout, number="cqn", used="cqn")
    with pytest.raises(InvalidValueError, match="sent an invalid description of its NIC"):
        Observed(9, description, publication.fds)
    publication.close()


def test_liars_and_mere_doors_are_left_out(other, caplog):
    with ControlSocket([address()], "soft0"), ControlSocket([address()], "soft0", lambda: ({"tables": 5}, [])):
        assert running(pid=os.getpid()) == []
        assert running(pid=other.pid)
    assert "sent an invalid description of its NIC" in caplog.text


# --- gpunetio stat -------------------------------------------------------------------------------------------------


def test_stat(other):
    output = run("stat", "--pid", other.pid).stdout
    assert output.split("\n")[0].split() == ["device", "pid", "counter", "value", "per", "second"]
    assert [line.split() for line in output.splitlines()[1:3]] == [
        ["soft0", str(other.pid), "rx_write_requests", "7"], ["rdma_tx_bytes", str(1 << 40)],
    ]
    assert "rx_read_requests" not in output
    assert "rx_read_requests" in run("stat", "--all", "-d", "soft0", "--once").stdout


def test_stat_rates(other):
    watch = run("stat", "--json", "--pid", other.pid, "--count", 2, "--interval", 0.1).stdout
    first, second = ([nic for nic in json.loads(line) if nic["pid"] == other.pid] for line in watch.splitlines())
    assert first[0]["device"] == "soft0"
    assert first[0]["counters"]["rx_write_requests"] == 7
    assert first[0]["rates"] is None
    assert second[0]["rates"]["rx_write_requests"] == 0
    table = run("stat", "--pid", other.pid, "--count", 2, "--interval", 0.1).stdout.splitlines()
    assert [line.split()[-2:] for line in table if "rx_write" in line] == [["rx_write_requests", "7"], ["7", "0"]]


def test_stat_without_a_nic():
    text = error("stat", "-d", "soft7", "--pid", 1)
    assert text.startswith("no software NIC soft7 runs in process 1")
    assert run("stat", "-d", "soft7", "--pid", 1, "--json").stdout == "[]\n"
    assert run("stat", "-d", "soft7", "--pid", 1, "--prometheus").stdout == ""
    assert "exclude each other" in error("stat", "--json", "--prometheus", expect=2)
    assert "exclude each other" in error("stat", "--once", "--count", 2, expect=2)


def test_stat_on_a_terminal(other):
    """It refreshes until Ctrl+C, and shows how fast counters grow."""
    master, slave = new_terminal()
    process = subprocess.Popen(
        [sys.executable, "-m", "gpunetio", "stat", "--pid", str(other.pid), "--interval", "0.1"],
        stdout=slave, stderr=subprocess.PIPE, env={**os.environ, "COLUMNS": "120", "TERM": "xterm"},
    )
    os.close(slave)
    poll = select.poll()
    poll.register(master, select.POLLIN)
    seen, value, end = "", 7, time.monotonic() + TIMEOUT
    try:
        while not re.search(r"rx_write_requests +\d+ +[1-9]", seen):
            assert time.monotonic() < end, seen
            value += 100
            other.set("rx_write_requests", value)
            if poll.poll(100):
                seen += os.read(master, 65536).decode()
        process.send_signal(signal.SIGINT)
        while poll.poll(1000 * TIMEOUT):  # its last words must have room
            try:
                if not os.read(master, 65536):
                    break
            except OSError:
                break
        _, stderr = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert (process.returncode, stderr) == (130, b"")
    os.close(master)
    other.set("rx_write_requests", 7)


NAME, LABEL = r"[a-zA-Z_:][a-zA-Z0-9_:]*", r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
SAMPLE = re.compile(rf"({NAME})\{{({LABEL}(?:,{LABEL})*)\}} (\d+)")


def parse_exposition(text: str) -> dict[tuple[str, str], int]:
    """The samples of a text in Prometheus' format 0.0.4, strictly: HELP, TYPE, then all samples of that metric."""
    assert text.endswith("\n")
    samples: dict[tuple[str, str], int] = {}
    seen: set[str] = set()
    lines = text.removesuffix("\n").split("\n")
    while lines:
        helped = re.fullmatch(rf"# HELP ({NAME}) ((?:[^\\]|\\[\\n])+)", lines.pop(0))
        assert helped
        metric = helped[1]
        assert metric not in seen
        seen.add(metric)
        assert lines.pop(0) == f"# TYPE {metric} counter"
        assert metric.endswith("_total")
        before = len(samples)
        while lines and not lines[0].startswith("#"):
            sample = SAMPLE.fullmatch(lines.pop(0))
            assert sample
            assert sample[1] == metric
            assert (metric, sample[2]) not in samples
            samples[metric, sample[2]] = int(sample[3])
        assert len(samples) > before
    return samples


def test_prometheus(other):
    with verbs.open("soft1"):
        samples = parse_exposition(run("stat", "--prometheus").stdout)
    labels = f'device="soft0",port="1",pid="{other.pid}"'
    assert samples["gpunetio_rx_write_requests_total", labels] == 7
    assert samples["gpunetio_rdma_tx_bytes_total", labels] == 1 << 40
    assert samples["gpunetio_port_xmit_data_total", labels] == 1 << 38  # words of four bytes
    own = f'device="soft1",port="1",pid="{os.getpid()}"'
    assert {name for name, label in samples if label == own} == {
        f"gpunetio_{name}_total" for name in (*COUNTERS.offsets, *DERIVED)
    }


# --- gpunetio show -------------------------------------------------------------------------------------------------


def test_show_qp(other):
    output = run("show", "qp", "--wide", "--pid", other.pid).stdout
    heading, *lines = output.splitlines()
    assert re.split(r"  +", heading.strip())[:5] == ["device", "pid", "qpn", "state", "type"]
    rows = {line.split()[2]: line.split() for line in lines}
    a, b = hex(other.has["a"]), hex(other.has["b"])
    assert set(rows) == {a, b}
    assert rows[a][:5] == ["soft0", str(other.pid), a, "RTS", "RC"]
    assert b in rows[a][5:]
    assert {"none", "::ffff:127.0.0.1"} <= set(rows[a][5:])  # the peer is on this NIC
    details = run("show", "qp", a, "--pid", other.pid).stdout
    assert re.search(rf"^ +qpn: +{a}$", details, re.M)
    assert re.search(rf"^ +remote_qpn: +{b}$", details, re.M)
    assert re.search(r"^ +state: +RTS$", details, re.M)
    (cqn,) = re.findall(r"send_cq: +(0x\w+)", details)
    assert int(cqn, 0) in other.has["cqns"]
    assert run("show", "qp", other.has["a"], "--pid", other.pid).stdout == details


def test_show_others(other):
    rows = [line.split() for line in run("show", "mr", "--wide", "--pid", other.pid).stdout.splitlines()]
    assert rows[0] == ["device", "pid", "key", "iova", "length", "pd", "rights", "address"]
    (row,) = (row for row in rows if row[2] == hex(other.has["key"]))
    assert row[4:] == ["5000", str(other.has["pdn"]), "LOCAL_WRITE", "|", "REMOTE_READ", hex(other.has["address"])]
    gids = [line.split() for line in run("show", "gid", "--pid", other.pid).stdout.splitlines()]
    assert gids[1][2:6] == ["0", "::ffff:127.0.0.1", "RoCE", "v2"]
    assert "version:         RoCE v2" in run("show", "gid", "0", "--pid", other.pid).stdout
    cqs = [line.split() for line in run("show", "cq", "--pid", other.pid).stdout.splitlines()]
    assert {int(row[2], 0) for row in cqs[1:]} == {*other.has["cqns"]}
    for kind in ("pd", "umem", "uar", "eq"):
        assert len(run("show", kind, "--pid", other.pid).stdout.splitlines()) > 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mr"])  # whose rights are folded on a terminal
def test_what_matters_fits_80_characters(other, kind):
    lines = run("show", kind, "--pid", other.pid).stdout.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert len(re.split(r"  +", lines[0].strip())) <= 7


def test_show_json(other):
    rows = json.loads(run("show", "qp", "--pid", other.pid, "--json").stdout)
    assert {row["qpn"] for row in rows} == {other.has["a"], other.has["b"]}
    assert rows[0]["device"] == "soft0"
    (gid,) = json.loads(run("show", "gid", "0", "--pid", other.pid, "--json").stdout)
    assert gid["gid"] == "::ffff:127.0.0.1"
    assert gid["pid"] == other.pid


def test_show_mistakes(other):
    text = error("show", "qp", "0xfffff1", "--pid", other.pid)
    assert text.startswith(f"there is no qp 0xfffff1: soft0 in process {other.pid} has 0x")
    assert error("show", "gid", 9, "--pid", other.pid).endswith("has 0, 1")
    assert "'seven' is not a number" in error("show", "qp", "seven", "--pid", other.pid, expect=2)
    assert "is not one of 'qp'" in error("show", "nonsense", expect=2)
    text = error("show", "qp", "-d", "soft99")
    assert text.startswith("no software NIC soft99 runs; there are: ")
    assert f"soft0 in process {other.pid}" in text


def test_devices_shows_counters(other):
    output = run("devices", "-v", "-d", "soft0").stdout
    assert f"counters of soft0 in process {other.pid}:" in output
    assert re.search(r"rx_write_requests:\t+7\n", output)
    assert "counters of" not in run("devices", "-d", "soft0").stdout


# --- beside a transfer ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def farm():
    with Farm() as opened:
        yield opened


def shown_qp(pid):
    """The one QP of a process as `show qp` lists it, by heading."""
    heading, line = run("show", "qp", "--wide", "--pid", pid).stdout.splitlines()
    ends = [match.end() for match in re.finditer(r"\S+(?: \S+)*", heading)]
    starts = [match.start() for match in re.finditer(r"\S+(?: \S+)*", heading)]
    cells = re.split(r"  +", line.strip())
    assert len(cells) == len(starts) == len(ends)
    return {heading[start:end]: cell for start, end, cell in zip(starts, ends, cells)}


def counters_of(pid):
    (nic,) = (nic for nic in json.loads(run("stat", "--json", "--pid", pid).stdout) if nic["pid"] == pid)
    return nic["counters"]


@pytest.mark.parametrize(("wire", "kind"), [("auto", "memory"), ("udp", "udp")])
def test_beside_a_transfer(farm, wire, kind):
    """WRITEs under way to a NIC that stands still, and then to one that takes them."""
    count, nbytes, where = 8, 1 << 20, address()
    with side(wire) as near:
        far = farm.spawn(where, wire)
        here, there = near.open(nbytes), far("open", nbytes)
        near.connect(0, there, ack_timeout=20)
        far("connect", 0, here)
        far("nic.pause")
        write_all(near, 0, there, count, nbytes)
        until(lambda: near.queues[0].row["tx_psn"] > near.queues[0].row["una_psn"], "packets under way")
        row = shown_qp(os.getpid())
        assert (row["state"], row["type"], row["wire"], row["peer"]) == ("RTS", "RC", kind, f"::ffff:{where}")
        assert (row["sq producer"], row["sq consumer"], row["mtu"]) == (str(count), "0", "4096")
        assert int(row["unacked psn"]) == here["psn"]
        assert 0 < (int(row["next psn"]) - here["psn"]) % (1 << 24) < count * nbytes // 4096
        assert shown_qp(far.pid)["remote qpn"] == hex(here["qpn"])
        details = run("show", "qp", here["qpn"], "--pid", os.getpid()).stdout
        assert re.search(rf"^ +wire: +{kind}$", details, re.M)
        assert counters_of(far.pid)["rdma_rx_bytes"] == 0
        far("nic.resume")
        assert {cqe.opcode for cqe in near.take(0, count, TIMEOUT)} == {0}
        after = counters_of(far.pid)
        assert (after["rx_write_requests"], after["rdma_rx_bytes"]) == (count, count * nbytes)
        assert after["port_rcv_data"] == count * nbytes // 4
        assert counters_of(os.getpid())["rdma_tx_bytes"] >= count * nbytes  # what was sent again counts too
        output = run("devices", "-v", "-d", "soft0").stdout
        assert re.search(rf"counters of soft0 in process {far.pid}:(\n\t+\w+:\t+\d+)*\n\t+rdma_rx_bytes:", output)
        row = shown_qp(os.getpid())
        assert row["unacked psn"] == row["next psn"]
        assert row["sq consumer"] == str(count)
        farm.clear()
