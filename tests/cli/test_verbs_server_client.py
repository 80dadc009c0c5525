"""gpunetio verbs_server_client: both ends as threads, where most can be looked at, and as processes."""

import contextlib
import functools
import logging
import os
import re
import signal
import subprocess
import threading
from dataclasses import dataclass, replace

import pytest
from click.testing import CliRunner

from gpunetio import log
from gpunetio.cli import app
from gpunetio.enums import LinkLayer
from gpunetio.errors import DocaError, DriverError, InvalidValueError, UnexpectedError
from gpunetio.fabric.faults import Faults
from gpunetio.nic.engine.port import PortConfig
from gpunetio.rendezvous import PeerError, link
from gpunetio.samples import verbs_server_client as sample
from gpunetio.samples.verbs_server_client import SampleOptions
from gpunetio.verbs import QP
from tools import Tool, error_line, running
from udp_rig import own_address

NAME = "verbs_server_client"
OPERATIONS = ("Send", "Write", "Read")
SLOW = pytest.mark.slow  # two processes each: the quick suite has one of a kind
PATIENCE = 60.0
FINISHED = "Sample finished successfully"


def one_by_one(link, left):
    return 1


# --- both ends in this process ---------------------------------------------------------------------------------------


class Log(logging.Handler):
    """What each end says. `waiting` is set when the server can be called."""

    def __init__(self):
        super().__init__()
        self.lines, self.waiting = {"server": [], "client": []}, threading.Event()

    def emit(self, record):
        text = record.getMessage()
        self.lines[record.threadName].append(text)
        if text.startswith("Waiting for a client"):
            self.waiting.set()


@dataclass
class Outcome:
    """How an end has ended, and what it has said; the first lines are about the start."""

    error: BaseException | None
    lines: list[str]


@pytest.fixture
def play(port):
    """Play both ends with the same options, except for those of `server` and `client`: the two outcomes."""
    logger, handler = logging.getLogger("gpunetio.samples"), Log()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    errors: dict[str, BaseException] = {}

    def end(options, ask):
        try:
            sample.run(options, ask)
        except DocaError as error:
            errors[threading.current_thread().name] = error
            handler.waiting.set()

    def played(ask=None, server=(), client=(), config=(), **options):
        where, here = own_address(), own_address()
        common = SampleOptions(tcp_port=port, **options)
        ports = [PortConfig(addresses=(address,), **dict(config)) for address in (where, here)]
        server = replace(common, device="soft0", nic_port=ports[0], **dict(server))
        if ports[0].link_layer == LinkLayer.INFINIBAND:
            where = "127.0.0.1"
        client = replace(common, device="soft1", nic_port=ports[1], **{"server": where, **dict(client)})
        threads = [
            threading.Thread(target=end, args=(server, None), name="server"),
            threading.Thread(target=end, args=(client, ask), name="client"),
        ]
        threads[0].start()
        assert handler.waiting.wait(PATIENCE)
        threads[1].start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"the {thread.name} hangs"
        return [Outcome(errors.get(name), handler.lines[name]) for name in ("server", "client")]

    yield played
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def check(outcomes, operation, count):
    """Both ends are content, and the one that validates has said so of every message."""
    valid = [[], []]
    if operation == "Read":
        valid[1] = [f"Received a valid message #{i + 1} from server" for i in range(count)]
    else:
        valid[0] = [f"Received a valid message #{i + 1} from client" for i in range(count)]
    for outcome, lines in zip(outcomes, valid):
        assert outcome.error is None
        said = [line for line in outcome.lines if not line.startswith("Waiting for a client on ")]
        assert said == ["Starting the sample", *lines, FINISHED]


@pytest.mark.parametrize("wire", ["auto", "udp"])
@pytest.mark.parametrize("ask", [None, one_by_one, lambda link, left: min(left, 3)], ids=["burst", "single", "threes"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations(play, operation, ask, wire):
    check(play(ask, operation=operation, iterations=10, config={"wire": wire}), operation, 10)


@pytest.mark.parametrize("size, iterations", [(4, 1), (5, 300), (1023, 5), (300_001, 3)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_sizes(play, operation, size, iterations):
    check(play(operation=operation, size=size, iterations=iterations), operation, iterations)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_as_many_as_there_may_be(play, operation):
    check(play(operation=operation, iterations=10_000), operation, 10_000)


@pytest.mark.parametrize("operation", ["Send", *(pytest.param(other, marks=SLOW) for other in OPERATIONS[1:])])
def test_a_bad_network(play, operation):
    faults = Faults(loss=0.05, duplication=0.05, reordering=0.05, corruption=0.02, seed=3)
    outcomes = play(operation=operation, size=5000, iterations=50, config={"faults": faults})
    check(outcomes, operation, 50)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_infiniband(play, operation):
    check(play(operation=operation, iterations=3, config={"link_layer": LinkLayer.INFINIBAND}), operation, 3)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_contents_that_are_wrong(play, monkeypatch, operation):
    """A bit is wrong in what is sent: the receiver says where, and tells the other end."""
    fill = sample.End.fill

    def wrong(self):
        fill(self)
        self.buffer[2 * 64 + 9] ^= 0x40

    monkeypatch.setattr(sample.End, "fill", wrong)
    monkeypatch.setattr(sample, "WAIT_SECONDS", 3.0)  # a WRITE that does not come
    outcomes = play(operation=operation, iterations=5)
    receiver, sender = reversed(outcomes) if operation == "Read" else outcomes
    who = "server" if operation == "Read" else "client"
    text = f"message #3 from {who} is wrong: its byte 9 is 0x40, not 0x00"
    assert isinstance(receiver.error, UnexpectedError)
    assert str(receiver.error) == text
    assert sender.error is not None
    assert text in str(sender.error)
    assert receiver.lines[-2:] == [f"Received a valid message #{n} from {who}" for n in (1, 2)]
    assert FINISHED not in receiver.lines + sender.lines


@pytest.mark.parametrize("operation", OPERATIONS)
def test_bytes_that_do_not_come(play, monkeypatch, operation):
    """A request that is one byte short: what was there before is no message."""
    sge = sample.End.sge
    monkeypatch.setattr(sample.End, "sge", lambda self, i: replace(sge(self, i), length=63))
    monkeypatch.setattr(sample, "WAIT_SECONDS", 3.0)
    outcomes = play(operation=operation)
    receiver = outcomes[operation == "Read"]
    assert isinstance(receiver.error, UnexpectedError)
    assert "message #1" in str(receiver.error)
    assert "its byte 63 is 0xff, not 0x00" in str(receiver.error)


@pytest.mark.parametrize("operation", ["Write", "Read"])
def test_rights_that_are_not_given(play, monkeypatch, operation):
    """The rights of the queue pair come from the table of operations, as those of the region do."""
    monkeypatch.setattr(link, "WHY_SECONDS", 0.2)  # the server has nothing to say about it
    opcode = sample.OPERATIONS[operation][0]
    monkeypatch.setitem(sample.OPERATIONS, operation, (opcode, sample.Access.LOCAL_WRITE))
    server, client = play(operation=operation)
    assert isinstance(client.error, DriverError)
    assert "request 1 failed: REM_INV_REQ_ERR" in str(client.error)
    assert server.error is not None
    assert "REM_INV_REQ_ERR" in str(server.error)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_requests_that_are_lost(play, monkeypatch, operation):
    """The client says that it has posted, and has not: no wait is for ever."""
    monkeypatch.setattr(sample, "WAIT_SECONDS", 0.3)
    monkeypatch.setattr(QP, "post_send", lambda self, *requests: None)
    for outcome in play(operation=operation):
        assert re.search(r"did not come within 0\.3 s|message #1 from client is wrong", str(outcome.error))
        assert FINISHED not in outcome.lines


@pytest.mark.parametrize("count", [0, 2])
def test_bursts_that_make_no_sense(play, monkeypatch, count):
    monkeypatch.setattr(QP, "post_send", lambda self, *requests: None)
    server, client = play(lambda link, left: count)
    text = f"sent 'burst' with count {count}: it must be an integer from 1 to 1"
    assert isinstance(server.error, PeerError)
    assert text in str(server.error)
    assert client.error is not None
    assert text in str(client.error)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_burst_of_more_than_is_left(play, monkeypatch, operation):
    """The client announces one message and then four, but posts only the four that were agreed on."""
    post_send = QP.post_send
    monkeypatch.setattr(QP, "post_send", lambda self, *all: post_send(self, *(wr for wr in all if wr.wr_id < 4)))
    server, client = play(lambda link, left: 1 if left == 4 else 4, operation=operation, iterations=4)
    for outcome in (server, client):
        assert "sent 'burst' with count 4: it must be an integer from 1 to 3" in str(outcome.error)
        assert FINISHED not in outcome.lines


@pytest.mark.parametrize("term, value", [("operation", "Read"), ("size", 65), ("iterations", 2)])
def test_ends_that_want_different_things(play, term, value):
    outcomes = play(server={term: value})
    name = {"operation": "--rdma-oper-type", "size": "--buffer-size", "iterations": "--iters"}[term]
    for outcome in outcomes:
        assert outcome.error is not None
        assert name in str(outcome.error)
        assert "give both the same" in str(outcome.error)


def test_too_many_bytes():
    with pytest.raises(InvalidValueError, match=r"10000 messages of 1000000 bytes.*--buffer-size"):
        SampleOptions(iterations=10_000, size=1_000_000)


# --- the command line ------------------------------------------------------------------------------------------------


def invoke(*args):
    return CliRunner().invoke(app, [NAME, *map(str, args)])


@pytest.fixture
def asked(monkeypatch):
    """What the command makes of its options, which it would run with."""
    calls = []
    monkeypatch.setattr(sample, "run", lambda *args: calls.append(args))

    def parse(*args):
        result = invoke(*args)
        assert result.exit_code == 0, result.output
        return calls.pop()

    return parse


def test_defaults(asked):
    options, ask = asked()
    assert options == SampleOptions(
        server=None, tcp_port=5000, device=None, nic_port=None, gid_index=0, operation="Send", size=64, iterations=1
    )
    assert ask is not None


LONG = (
    "--client", "10.0.0.1", "--device", "soft1", "--gid-index", 2, "--rdma-oper-type", "Write", "--buffer-size", 100,
    "--qp-type", "RC", "--iters", 7, "--send-burst", "--port", 5001,
)
SHORT = (
    "-c", "10.0.0.1", "-d", "soft1", "-gid", 2, "-ro", "write", "-s", 100, "-qt", "RC", "-n", 7, "-b", "--port", 5001,
)
JOINED = ("-c10.0.0.1", "-dsoft1", "-gid=2", "-ro=Write", "-s100", "-qt=RC", "-bn7", "--port=5001")


@pytest.mark.parametrize("args", [LONG, SHORT, JOINED], ids=["long", "short", "joined"])
def test_spellings(asked, args):
    options, ask = asked(*args)
    assert options == SampleOptions(
        server="10.0.0.1", tcp_port=5001, device="soft1", gid_index=2, operation="Write", size=100, iterations=7
    )
    assert ask is None


def test_options_of_the_nic(asked, tmp_path):
    options, _ = asked(
        "--address", "127.1.2.3", "--wire", "udp", "--faults", "loss=0.5,seed=4", "--pcap", tmp_path / "x.pcap",
        "--no-promiscuous",
    )
    assert options.nic_port == PortConfig(
        addresses=("127.1.2.3",), wire="udp", faults=Faults(loss=0.5, seed=4), capture=tmp_path / "x.pcap",
        promiscuous=False,
    )
    options, _ = asked("--no-promiscuous")
    assert options.nic_port == PortConfig(promiscuous=False)


@pytest.mark.parametrize(
    "args, status, text",
    [
        (["-n", 0], 2, "'-n' / '--iters': 0"), (["-n", 10_001], 2, "10001"), (["-n", "x"], 2, "'x'"),
        (["-s", 3], 2, "'--buffer-size': 3"), (["-ro", "Atomic"], 2, "'Atomic'"), (["-qt", "UC"], 2, "'UC'"),
        (["-gid", -1], 2, "'--gid-index': -1"), (["-gid"], 2, "requires an argument"),
        (["-gidd", 1], 2, "No such option"),
        (["-l", 55], 2, "'55'"), (["--sdk-log-level", 0], 2, "'0'"), (["-c", ""], 2, "--client needs"),
        (["extra"], 2, "extra"), (["-s", 1 << 30, "-n", 2], 1, "--buffer-size"),
        (["-d", "soft99"], 1, "no device 'soft99'"), (["-gid", 9], 1, "no GID at index 9"),
        (["-c", "127.0.0.1", "--port", 1], 1, "no server at 127.0.0.1 port 1"),
        (["--address", "1.2.3"], 1, "1.2.3"),
    ],
)
def test_mistakes(args, status, text):
    result = invoke("--address", own_address(), *args)
    assert result.exit_code == status
    (line,) = result.stderr.splitlines()
    assert line.startswith("gpunetio: error: ")
    assert text in line


def test_help_and_version():
    for name in ("-h", "--help"):
        assert "--rdma-oper-type [Send|Write|Read]" in invoke(name).stdout
    for name in ("-v", "--version"):
        assert re.fullmatch(r"gpunetio \d+\.\d+\.\d+\n", invoke(name).stdout)


@pytest.mark.parametrize(
    "level, shown", [(10, 0), (20, 1), (30, 2), (40, 3), (50, 4), (60, 5), (70, 6), (None, 4)]
)
def test_log_levels(monkeypatch, level, shown):
    """The numbers are DOCA's; the sample speaks to stdout."""
    levels = (logging.CRITICAL, logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG, logging.DEBUG - 1)

    def speak(options, ask):
        for each in levels:
            sample._log.log(each, "%d", each)
        effective.append(log.logger.getEffectiveLevel())

    effective: list[int] = []
    monkeypatch.setattr(sample, "run", speak)
    before, usual = log.logger.level, log.logger.getEffectiveLevel()
    result = invoke(*([] if level is None else ["-l", level, "--sdk-log-level", level]))
    assert result.exit_code == 0
    assert result.stdout.split() == [str(each) for each in levels[:shown]]
    assert effective == [usual if level is None else log.DOCA_LEVELS[level]]
    assert log.logger.level == before


# --- two processes ---------------------------------------------------------------------------------------------------


def pair(port, *common, server=(), client=()):
    """A server and its client, whose stdin is a pipe, each at an address of its own."""
    where = own_address()
    first = Tool(NAME, "--port", port, "--address", where, *common, *server)
    first.until(f"Waiting for a client on {where} port {port}")
    start = functools.partial(subprocess.Popen, stdin=subprocess.PIPE)
    return first, Tool(NAME, "--port", port, "--address", own_address(), "-c", where, *common, *client, start=start)


def enter(tool, text):
    """Type this."""
    with contextlib.suppress(BrokenPipeError):
        tool.process.stdin.write(text)
        tool.process.stdin.flush()


def contents(operation, count):
    """What the server and the client say of so many messages."""
    lines = {who: "".join(f"Received a valid message #{i + 1} from {who}\n" for i in range(count))
             for who in ("client", "server")}
    return ("", lines["server"]) if operation == "Read" else (lines["client"], "")


@pytest.mark.parametrize(
    "operation, wire",
    [
        ("Send", "auto"), pytest.param("Write", "auto", marks=SLOW), pytest.param("Read", "auto", marks=SLOW),
        pytest.param("Send", "udp", marks=SLOW), pytest.param("Write", "udp", marks=SLOW),
        pytest.param("Read", "udp", marks=SLOW),
    ],
)
def test_bursts(port, operation, wire):
    with running(*pair(port, "-ro", operation, "-n", 20, "--wire", wire, client=["-b"])) as tools:
        for tool, said in zip(tools, contents(operation, 20)):
            status, out, err = tool.end()
            assert (status, err) == (0, "")
            assert out.endswith(f"{said}{FINISHED}\n")
            assert out.count("valid") == said.count("valid")


PROMPT = "Enter the required burst size and press enter"


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["auto", "udp"])
@pytest.mark.parametrize("operation", ["Send", "Write", "Read"])
def test_bursts_that_are_entered(port, operation, wire):
    """Also several lines at once, and some that are wrong."""
    with running(*pair(port, "-ro", operation, "-n", 4, "--wire", wire)) as (server, client):
        assert client.until(PROMPT) == f"{PROMPT} (1 to 4)\n"
        enter(client, "2\n")
        assert client.until(PROMPT) == f"{PROMPT} (1 to 2)\n"
        enter(client, "0\n3\n\nmany\n-1\n 1 \n1\n")
        status, out, err = client.end()
        assert (status, err) == (0, "")
        refused = re.findall(r"^(.*) is not a number from 1 to 2$", out, re.MULTILINE)
        assert refused == ["'0'", "'3'", "''", "'many'", "'-1'"]
        assert out.count(PROMPT) == 2 + 5 + 1
        assert out.endswith(f"{FINISHED}\n")
        status, heard, err = server.end()
        assert (status, err) == (0, "")
        assert [text.count("valid message") for text in (heard, out)] == ([0, 4] if operation == "Read" else [4, 0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [pytest.param("", marks=SLOW), pytest.param("1\n", marks=SLOW), "1\n2"],
    ids=["nothing", "too little", "no end of line"],
)
def test_an_input_that_ends(port, text):
    with running(*pair(port, "-n", 5)) as (server, client):
        client.until(PROMPT)
        enter(client, text)
        status, _, err = client.end()
        assert status == 1
        assert "standard input has ended. Enter one for each burst, or give -b" in error_line(err)
        status, _, err = server.end()
        assert status == 1
        assert "ended with an error: no burst size: standard input" in error_line(err)


@pytest.mark.slow
def test_no_input_at_all(port):
    """Descriptor 0 is closed, and another file takes its number."""
    where = own_address()
    closed = functools.partial(subprocess.Popen, preexec_fn=functools.partial(os.close, 0))
    with running(Tool(NAME, "--port", port, "--address", where)) as (server,):
        server.until("Waiting")
        client = Tool(NAME, "--port", port, "--address", own_address(), "-c", where, start=closed)
        with running(client):
            status, _, err = client.end()
            assert status == 1
            assert "standard input" in error_line(err)
        assert server.end()[0] == 1


@pytest.mark.parametrize(
    "victim, number, status",
    [
        (0, signal.SIGKILL, 1), pytest.param(0, signal.SIGINT, 130, marks=SLOW),
        pytest.param(1, signal.SIGKILL, 1, marks=SLOW), pytest.param(1, signal.SIGINT, 130, marks=SLOW),
    ],
)
def test_an_end_that_goes_away(port, victim, number, status):
    """While the client asks, and nothing is posted."""
    with running(*pair(port)) as tools:
        tools[1].until(PROMPT)
        tools[victim].signal(number)
        ended, _, err = tools[1 - victim].end() if victim else _end_without_closing(tools[1])
        assert ended == status
        assert re.search("closed the connection|was lost|was interrupted", error_line(err))


def _end_without_closing(tool):
    """The end of a tool whose stdin stays open: `Tool.end` would close it."""
    status = tool.process.wait(PATIENCE)
    return status, tool.process.stdout.read(), re.sub(r"gpunetio: compiling .*\n", "", tool.process.stderr.read())
