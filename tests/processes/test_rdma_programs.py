"""gpunetio rdma …: DOCA's programs of RDMA on the CPU, in pairs of processes and of threads."""

import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpunetio import log
from gpunetio.cli import app, rdma
from gpunetio.errors import (
    ConnectionEndedError,
    ConnectionRejectedError,
    DocaError,
    InvalidValueError,
    NotSupportedError,
    TimedOutError,
)
from gpunetio.nic.host.engine import compile_engine
from gpunetio.rendezvous import PeerError, PeerInterrupted
from gpunetio.samples import descriptor_files
from gpunetio.samples.descriptor_files import Exchange
from gpunetio.samples.rdma_programs import PROGRAMS, SampleOptions, run
from nic_rig import until
from tools import LIMIT, Tool, running

SLOW = pytest.mark.slow  # two processes each: the quick suite has one
START, END = "Starting the sample", "Sample finished successfully"

# The two programs, the options of each, and what they say between the first two lines and the last one.
PAIRS = {
    "read": (
        ("read_responder", ("-r", "to read"), []),
        ("read_requester", (), ['Read from responder: "to read"']),
    ),
    "write": (
        ("write_responder", (), ['Requester has written: "Hi DOCA RDMA!"']),
        ("write_requester", (), ['Written to responder "Hi DOCA RDMA!"']),
    ),
    "write_immediate": (
        ("write_immediate_responder", (), ['Requester has written: "x" with immediate data: 43981']),
        ("write_immediate_requester", ("-w", "x"), ['Written to responder "x" with immediate value 43981']),
    ),
    "send": (
        ("receive", (), ['Got from sender: "Hi DOCA RDMA!"']),
        ("send", (), ["RDMA send task was done successfully"]),
    ),
    "send_immediate": (
        ("receive_immediate", (), ['Got from sender: "ü" with immediate: 43981']),
        ("send_immediate", ("-s", "ü"), ["RDMA send with immediate task was done successfully"]),
    ),
    "sync_event": (
        ("sync_event_responder", (), ["Waiting for sync event to be signaled from remote", "Signaling sync event",
                                      "Waiting for sync event to be notified for completion"]),
        ("sync_event_requester", (), ["Signaling remote sync event", "Received sync event value 0xD0CB",
                                      "Notifying remote sync event for completion"]),
    ),
    "multi_conn": (
        ("multi_conn_receive", ("-nc", 8), ['Got from sender: "Hi DOCA RDMA!"'] * 8),
        ("multi_conn_send", ("-nc", 8), ["RDMA send task was done successfully"] * 8),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def compiled():
    compile_engine()  # once, for all processes


def files(folder: Path, first: bool) -> tuple[object, ...]:
    """The options of an end that name its files."""
    local, remote = (folder / name for name in (("a", "b") if first else ("b", "a")))
    resource = folder / "resource"
    return "-ld", local, "-re", remote, "-m", resource


@pytest.mark.parametrize("pair", [pytest.param(name, marks=() if name == "read" else SLOW) for name in PAIRS])
def test_pairs_of_processes(pair, tmp_path):
    tools = []
    for n, (name, options, _) in enumerate(PAIRS[pair]):
        tools.append(Tool("rdma", name, "-d", f"soft{n}", *files(tmp_path, n == 0), *options))
    with running(*tools):
        for tool, (_, _, said) in zip(tools, PAIRS[pair], strict=True):
            status, out, err = tool.end()
            assert (status, err) == (0, "")
            start, waits, *lines, end = out.splitlines()
            assert (start, end) == (START, END)
            assert waits.startswith("Wrote ")
            assert lines == said
    assert not list(tmp_path.iterdir())  # nobody leaves a file


@pytest.mark.parametrize("backwards", [False, True], ids=["", "the one that acts listens"])
@pytest.mark.parametrize("pair", ["sync_event", "send", "multi_conn", "write"])
def test_pairs_by_address(pair, backwards, tmp_path, caplog):
    """Both ends as threads: one listens, and the other one asks at its address. There are no files."""
    caplog.set_level(logging.INFO, log.logger.name)
    (server, _, server_says), (client, _, client_says) = reversed(PAIRS[pair]) if backwards else PAIRS[pair]
    others = {"by_address": True, "cm_port": 13580, "connections": 8 if pair == "multi_conn" else 1}
    listens = threading.Thread(target=run, args=(server, options(tmp_path, True, **others)))
    listens.start()
    until(lambda: "port 13580" in caplog.text, "the server listens", LIMIT)
    run(client, options(tmp_path, False, **others, server="127.0.0.1"))
    listens.join(LIMIT)
    assert not listens.is_alive()
    assert {*server_says, *client_says} <= set(caplog.messages)
    assert caplog.messages.count(END) == 2
    assert not list(tmp_path.iterdir())


def test_every_program_has_a_command_and_a_pair():
    paired = {name for pair in PAIRS.values() for name, _, _ in pair}
    assert paired == set(PROGRAMS) == set(rdma.commands)
    assert len(paired) == 14


# --- what goes wrong -------------------------------------------------------------------------------------------------


def options(folder: Path, first: bool, **others: object) -> SampleOptions:
    _, local, _, remote, _, resource = files(folder, first)
    return SampleOptions(device=f"soft{0 if first else 1}", local=local, remote=remote, resource=resource, **others)  # type: ignore[arg-type]


def test_a_person_copies_the_files(tmp_path, caplog):
    """Two folders, as on two hosts: Enter says that the other end has its copy, or is done."""
    caplog.set_level(logging.INFO, log.logger.name)
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    responder_enters, requester_enters = threading.Semaphore(0), threading.Semaphore(0)
    ends = responder, requester = [
        threading.Thread(target=run, args=(name, given, partial(enters.acquire, blocking=False)))
        for name, given, enters in (
            ("read_responder", options(here, True, text="far"), responder_enters),
            ("read_requester", options(there, False), requester_enters),
        )
    ]
    for end in ends:
        end.start()
    for name, source, target in (("resource", here, there), ("a", here, there), ("b", there, here)):
        until((source / name).exists, f"{name} is written", LIMIT)
        (target / f"{name}.part").write_bytes((source / name).read_bytes())
        (target / f"{name}.part").rename(target / name)
    until(lambda: not (here / "b").exists(), "the responder is connected", LIMIT)
    requester_enters.release()
    requester.join(LIMIT)
    responder_enters.release()  # the requester is done
    responder.join(LIMIT)
    assert not any(end.is_alive() for end in ends)
    assert 'Read from responder: "far"' in caplog.messages
    assert not list(here.iterdir())
    assert [path.name for path in there.iterdir()] == ["resource"]  # the copy of the person


def test_nobody_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(descriptor_files, "PERSON_SECONDS", 0.05)
    with pytest.raises(TimedOutError, match=r"the sender has not written .*b: start it"):
        run("receive", options(tmp_path, True))
    assert not list(tmp_path.iterdir())


def test_dc_is_refused(tmp_path):
    with pytest.raises(NotSupportedError, match="DC"):
        run("send", options(tmp_path, True, transport="DC"))


def errors_of(*ends: tuple[str, SampleOptions]) -> list[DocaError]:
    """Run both ends as threads, and return the error of each."""
    errors: list[DocaError] = []

    def end(name, given):
        with pytest.raises(DocaError) as error:
            run(name, given)
        errors.append(error.value)

    threads = [threading.Thread(target=end, args=each) for each in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads)
    return sorted(errors, key=lambda error: isinstance(error, PeerError))


def test_the_other_end_learns_of_a_failure(tmp_path):
    refused, learned = errors_of(
        ("write_responder", options(tmp_path, True)), ("read_requester", options(tmp_path, False))
    )
    assert "does not give REMOTE_READ" in str(refused)
    assert str(learned) == f"the requester has failed: {refused}"
    assert not list(tmp_path.iterdir())


def test_different_numbers_of_connections(tmp_path):
    errors = errors_of(
        ("multi_conn_receive", options(tmp_path, True, connections=2)),
        ("multi_conn_send", options(tmp_path, False, connections=3)),
    )
    assert all("give both ends the same -nc" in str(error) for error in errors)


def test_an_end_that_cannot_begin(tmp_path):
    """It tells an end that waits already."""
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(run, "write_responder", options(tmp_path, True))
        until((tmp_path / "a").exists, "the responder waits", LIMIT)
        with pytest.raises(InvalidValueError, match="gid_index"):
            run("write_requester", options(tmp_path, False, gid_index=9999))
        with pytest.raises(PeerError, match="the requester has failed: gid_index"):
            waits.result(LIMIT)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_disconnect_ends_a_wait_for_a_sync_event(tmp_path):
    with ThreadPoolExecutor() as pool:
        others = {"by_address": True, "cm_port": 13581}
        waits = pool.submit(run, "sync_event_responder", options(tmp_path, True, **others))
        end = time.monotonic() + LIMIT
        while True:
            with pytest.raises(DocaError) as error:
                run("read_requester", options(tmp_path, False, **others, server="127.0.0.1"))
            if not isinstance(error.value, ConnectionRejectedError):
                break
            assert time.monotonic() < end  # it does not listen yet
        assert "does not give REMOTE_READ" in str(error.value)
        with pytest.raises(ConnectionEndedError, match="the requester has disconnected"):
            waits.result(LIMIT)


def test_the_other_end_shares_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO, log.logger.name)
    with ThreadPoolExecutor() as pool:
        others = {"by_address": True, "cm_port": 13582}
        waits = pool.submit(run, "receive", options(tmp_path, True, **others))
        until(lambda: "port 13582" in caplog.text, "the receiver listens", LIMIT)
        with pytest.raises(PeerError, match=r"the other end at 127\.0\.0\.1 is not a responder: "):
            run("read_requester", options(tmp_path, False, **others, server="127.0.0.1"))
        with pytest.raises(ConnectionEndedError, match="has disconnected"):
            waits.result(LIMIT)


# --- files -----------------------------------------------------------------------------------------------------------


def exchange(folder: Path, first: bool) -> Exchange:
    local, remote = (folder / name for name in (("a", "b") if first else ("b", "a")))
    return Exchange(local, remote, 1, "peer", lambda: False)


@contextlib.contextmanager
def another_process(folder: Path):
    """A process that has written b, and waits."""
    script = (
        "import sys; from pathlib import Path; from gpunetio.samples.descriptor_files import Exchange\n"
        "folder = Path(sys.argv[1]); end = Exchange(folder / 'b', folder / 'a', 1, 'peer', lambda: False)\n"
        "end.publish(end.mine[0], b'of another process'); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process
        process.kill()


def test_a_file_of_a_process_that_has_ended(tmp_path, monkeypatch):
    with another_process(tmp_path):
        assert exchange(tmp_path, True).read(tmp_path / "b") == b"of another process"
    assert (tmp_path / "b").exists()
    monkeypatch.setattr(descriptor_files, "PERSON_SECONDS", 0.05)
    with exchange(tmp_path, True) as reader, exchange(tmp_path, False) as writer:
        with pytest.raises(TimedOutError, match="has not written"):
            reader.read(tmp_path / "b")
        writer.publish(tmp_path / "b", b"new")
        assert reader.read(tmp_path / "b") == b"new"


def test_the_other_process_is_killed(tmp_path):
    with exchange(tmp_path, True) as end, another_process(tmp_path) as process:
        end.publish(tmp_path / "a", b"")
        end.read(tmp_path / "b")
        process.kill()
        with pytest.raises(PeerError, match=f"the peer, process {process.pid}, has ended"):
            end.wait_until_taken(tmp_path / "a")


def test_an_interrupted_end_says_so(tmp_path):
    with exchange(tmp_path, True) as end:
        end.publish(tmp_path / "a", b"")
        with pytest.raises(KeyboardInterrupt), exchange(tmp_path, False):
            raise KeyboardInterrupt
        with pytest.raises(PeerInterrupted, match="the peer was interrupted"):
            end.wait_until_taken(tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_a_note_is_for_one_process(tmp_path):
    """A later run of the other end is not ended by it. Without another end, there is no note."""
    with another_process(tmp_path), pytest.raises(KeyboardInterrupt), exchange(tmp_path, True):
        raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    with exchange(tmp_path, False) as end:
        assert end.gone() is None
        end.publish(tmp_path / "b", b"")
    with pytest.raises(KeyboardInterrupt), exchange(tmp_path, True):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_that_is_being_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(descriptor_files, "PERSON_SECONDS", 0.02)
    with exchange(tmp_path, True) as reader, exchange(tmp_path, False) as writer:
        writer.publish(tmp_path / "b", b"all of it")
        whole = (tmp_path / "b").read_bytes()
        for nbytes in (0, 5, 40, len(whole) - 1):
            (tmp_path / "b").write_bytes(whole[:nbytes])
            with pytest.raises(TimedOutError):
                reader.read(tmp_path / "b")
        (tmp_path / "b").write_bytes(whole)
        assert reader.read(tmp_path / "b") == b"all of it"


@pytest.mark.parametrize("contents", [bytes(100), b"gpunetio-rdma 2\n"])
def test_another_file(tmp_path, contents):
    (tmp_path / "b").write_bytes(contents)
    with pytest.raises(InvalidValueError, match=f"^{tmp_path / 'b'} is "):
        run("receive", options(tmp_path, True))
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_wrong_description_is_named(tmp_path):
    """The description of memory, where that of a connection belongs."""
    with exchange(tmp_path, False) as writer:
        writer.publish(tmp_path / "b", bytes(100))
        with pytest.raises(InvalidValueError, match=f"^{tmp_path / 'b'}: 100 bytes describe no connection"):
            run("receive", options(tmp_path, True))


def test_a_folder_that_is_not_there(tmp_path):
    result = CliRunner().invoke(app, ["rdma", "send", "-d", "soft0", "-ld", str(tmp_path / "x" / "a")])
    assert result.exit_code == 1
    assert f"{tmp_path / 'x' / 'a'}: No such file or directory" in result.output


@SLOW
def test_sigterm_leaves_no_files(tmp_path):
    with running(Tool("rdma", "write_responder", "-d", "soft0", *files(tmp_path, True))) as (tool,):
        tool.until("Wrote")
        tool.signal(signal.SIGTERM)
        assert tool.end()[0] == 130
    assert not list(tmp_path.iterdir())


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("send",), "Missing option '-d'"),
        (("send", "-d", "soft0", "-s", "x" * 257), "257 bytes: 256 at most"),
        (("send", "-d", "soft0", "-s", "ü" * 129), "258 bytes"),
        (("multi_conn_send", "-d", "soft0", "-nc", "9"), "9 is not in the range"),
        (("receive", "-d", "soft0", "-ld", "x", "-re", "./x"), "-ld and -re are both x"),
        (("send", "-d", "soft0", "-tt", "UD"), "'UD' is not one of 'RC', 'DC'"),
        (("send", "-d", "soft0", "-sa", "127.0.0.1"), "give -cm, too"),
        (("send", "-d", "soft0", "-cm", "-sa", "localhost"), "is no address"),
        (("send", "-d", "soft0", "-cm", "-sa", "::1"), "no IPv4 address"),
        (("send", "-d", "soft0", "-cm", "-sa", "127.0.0.1", "-sat", "GID"), "no GID address"),
        (("send", "-d", "soft0", "-cm", "-sa", "127.0.0.1", "-sat", "ip6"), "no IP6 address"),
        (("send", "-d", "soft0", "-cm", "-sa", "::1", "-sat", "IPV4"), "no IPv4 address"),
    ],
)
def test_usage(args, words):
    result = CliRunner().invoke(app, ["rdma", *args])
    assert result.exit_code == 2
    assert words in result.output
