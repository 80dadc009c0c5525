"""The host's side of the harness: the guest, sessions in it and beside it, and the two ends that a test holds."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from protocol import PORT, Connection, digest, pattern

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]  # what the guest has as /share
OURS = (  # runs Python there with this package, from the source, and keeps what it compiles
    "env", "PYTHONPATH=/share/src:/share/tests/interop", "PYTHONPYCACHEPREFIX=/tmp/pycache", "python3",
)
BOTH_ROLES = [("ours", "theirs"), ("theirs", "ours")]  # server and client; each start of Python there takes seconds
LINK_MTU = {1024: 1500, 4096: 9000}  # by path MTU
BUILD, BOOT, START = 600.0, 60.0, 120.0  # seconds; our side compiles when it starts for the first time
MARGIN = 20.0  # what an answer may take beyond the time that its command was given
ROCE = 4791  # UDP port
LIFE = 3600  # after this the guest ends by itself

T = TypeVar("T")


class Failed(Exception):
    """The other side answered with an error."""


class Remote:
    """A session on the other end of a control connection: one command after the other."""

    def __init__(
        self,
        name: str,
        connection: Connection,
        process: subprocess.Popen[bytes] | None = None,
        log: Callable[[], str] = str,
    ):
        self.name, self.connection, self.process, self._log = name, connection, process, log
        self._until = 0.0
        self.usable = True

    def begin(self, command: str, /, **arguments: Any) -> None:
        """Send a command. `timeout` among its arguments also bounds the wait for the answer."""
        self._until = time.monotonic() + float(arguments.get("timeout", 0.0)) + MARGIN
        self.usable = False  # until the answer is there: after a failure, what comes next could answer anything
        self.connection.send(command=command, **arguments)

    def finish(self) -> Any:
        """The answer to what was begun."""
        try:
            answer = self.connection.receive(max(0.0, self._until - time.monotonic()))
        except OSError as error:
            raise Failed(f"{self.name}: {error}\n{self._log()}") from error
        if answer is None:
            raise Failed(f"{self.name} closed the control connection\n{self._log()}")
        self.usable = True
        if "error" in answer:
            raise Failed(f"{self.name}: {answer['error']}\n{answer['traceback']}")
        return answer["result"]

    def call(self, command: str, /, **arguments: Any) -> Any:
        self.begin(command, **arguments)
        return self.finish()

    def run(self, *argv: str, timeout: float, status: int = 0) -> str:
        """Run a program there: its output. Failed if it ends with another status."""
        self.begin_run(*argv, timeout=timeout)
        return self.finish_run(status)

    def begin_run(self, *argv: str, timeout: float) -> None:
        """Start it, for `finish_run` to wait for."""
        self.begin("run", argv=argv, timeout=timeout)

    def finish_run(self, status: int = 0) -> str:
        """What it has printed."""
        done = self.finish()
        if done["status"] != status:
            raise Failed(f"{self.name}: status {done['status']}, not {status}: {done['output']}")
        return done["output"]

    def create(self, **arguments: Any) -> Party:
        """A queue pair in this session."""
        return Party(self, self.call("create", **arguments))

    def close(self) -> None:
        self.usable = False
        self.connection.close()
        if self.process:
            end(self.process)


class Party:
    """One end of a connection. `image` is what its memory must hold."""

    def __init__(self, remote: Remote, about: dict[str, Any]):
        self.remote, self.about = remote, about
        self.qpn, self.address, self.rkey, self.size = (about[name] for name in ("qp", "address", "rkey", "size"))
        self.image = bytearray(self.size)

    def __repr__(self) -> str:
        return f"QP {self.qpn:#x} of {self.remote.name}"

    def call(self, command: str, /, **arguments: Any) -> Any:
        return self.remote.call(command, qp=self.qpn, **arguments)

    def begin(self, command: str, /, **arguments: Any) -> None:
        self.remote.begin(command, qp=self.qpn, **arguments)

    def post(self, op: str, sges: Sequence[Sequence[int]], **request: Any) -> None:
        self.call("post", requests=[{"op": op, "sges": sges, **request}])

    def receive(self, *sges: Sequence[int], wr_id: int = 0) -> None:
        self.call("receive", requests=[{"sges": sges, "wr_id": wr_id}])

    def poll(self, queue: str, count: int = 1, timeout: float = 10.0) -> list[dict[str, Any]]:
        return self.call("poll", queue=queue, count=count, timeout=timeout)

    def sent(self, timeout: float = 10.0) -> dict[str, Any]:
        """The next completion of the send queue."""
        return self._one("send", timeout)

    def received(self, timeout: float = 10.0) -> dict[str, Any]:
        """The next completion of the receive queue."""
        return self._one("receive", timeout)

    def _one(self, queue: str, timeout: float) -> dict[str, Any]:
        found = self.poll(queue, 1, timeout)
        assert found, f"{self}: nothing completed on the {queue} queue within {timeout:g} s"
        return found[0]

    def events(self, timeout: float = 2.0) -> list[str]:
        return self.call("events", timeout=timeout)

    @property
    def state(self) -> str:
        return self.call("state")

    # --- memory

    def fill(self, seed: int) -> None:
        self.call("fill", seed=seed)
        self.image[:] = pattern(seed, self.size)

    def store(self, offset: int, data: bytes) -> None:
        self.call("store", offset=offset, data=data.hex())
        self.image[offset : offset + len(data)] = data

    def memory(self, offset: int, nbytes: int) -> bytes:
        """Bytes of its memory."""
        step = 4096
        parts = (self.call("read", offset=at, nbytes=min(step, offset + nbytes - at))["data"]
                 for at in range(offset, offset + nbytes, step))
        return bytes.fromhex("".join(parts))

    def verify(self, what: str = "") -> None:
        """The memory holds what it must, and nothing else has changed."""
        if self.call("read")["sha256"] != digest(bytes(self.image)):
            memory = self.memory(0, self.size)
            wrong = [at for at in range(self.size) if memory[at] != self.image[at]]
            raise AssertionError(
                f"{what}: {len(wrong)} wrong bytes at {self}, between offsets {wrong[0]:#x} and {wrong[-1]:#x}: "
                f"{memory[wrong[0] : wrong[0] + 16].hex()} instead of {self.image[wrong[0] : wrong[0] + 16].hex()}"
            )


def connect(a: Party, b: Party, **attributes: Any) -> None:
    """Connect two ends to each other, with the same attributes."""
    a.call("connect", remote=b.about, **attributes)
    b.call("connect", remote=a.about, **attributes)


def both(a: Party, b: Party, command: str, /, **arguments: Any) -> tuple[Any, Any]:
    """The same command at both ends at once."""
    a.begin(command, **arguments)
    b.begin(command, **arguments)
    try:
        first = a.remote.finish()
    finally:
        second = b.remote.finish()
    return first, second


class Guest:
    """A booted guest in a network namespace of its own, with the agent (`peer.py`) running in it."""

    HOST, ADDRESS = "10.77.0.1", "10.77.0.2"
    HOST6, ADDRESS6 = "fd77::1", "fd77::2"
    LOSSY_HOST, LOSSY_HOST6 = "10.77.0.3", "fd77::3"  # two NICs cannot share an address

    def __init__(self, path_mtu: int):
        self.path_mtu = path_mtu
        self.namespace = f"gn-{os.getpid()}-{path_mtu}"
        self.logs = Path(tempfile.mkdtemp(prefix="gpunetio-guest-"))
        self._remotes: dict[str, Remote] = {}
        files = [flag for name in ("peer.py", "protocol.py") for flag in ("-f", str(HERE / name))]
        argv = [
            HERE / "run_guest.sh", *files, "-S", str(REPOSITORY), "-M", str(LINK_MTU[path_mtu]),
            "-N", self.namespace, "-o", self.logs, "-t", str(LIFE), "-P", str(os.getpid()),
            "--", "exec python3 peer.py",
        ]
        with (self.logs / "run.log").open("wb") as log:
            # In a session of its own: what interrupts or kills the tests leaves it to tidy up behind them.
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        until = time.monotonic() + BOOT
        while True:
            try:
                self._dial().close()
                return
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise Failed(f"the guest did not come up ({error})\n{self.log()}") from error
                time.sleep(0.1)

    def _dial(self, timeout: float = 5.0) -> socket.socket:
        return inside(self.namespace, lambda: socket.create_connection((self.ADDRESS, PORT), timeout))

    def log(self) -> str:
        """What the guest and its emulator have said."""
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-4000:]}" for path in sorted(self.logs.glob("*.log"))
        )

    def session(self, name: str) -> Remote:
        """The session of this name: a process in the guest. A new one when the last one went wrong."""
        return self._remote(name, self._new_session)

    def ours(self, loss: float = 0.0) -> Remote:
        """A process of our side, in the guest's network namespace; `loss` is the share of its packets that get lost."""
        addresses = [self.LOSSY_HOST, self.LOSSY_HOST6] if loss else [self.HOST, self.HOST6]
        name = f"ours, losing {loss:.0%}" if loss else "ours"
        for other in [other for other in self._remotes if loss and other.startswith("ours, losing") and other != name]:
            self._remotes.pop(other).close()  # it has the addresses
        return self._remote(name, lambda name: self._new_ours(name, str(loss), "udp", *addresses))

    def ours_alone(self) -> Remote:
        """The process `ours`, when no other of our side runs.

        One on Ethernet looks at all packets, and one with queue pairs wakes a thousand times a second: too much on two
        cores, beside an emulated CPU that polls.
        """
        self.without_ours("ours")
        return self.ours()

    def without_ours(self, *kept: str) -> None:
        """End the processes of our side, but for some: another program may need their addresses."""
        for name in [name for name in self._remotes if name.startswith("ours") and name not in kept]:
            self._remotes.pop(name).close()

    def ours_on_ethernet(self) -> Remote:
        """A process of our side that speaks Ethernet with the guest, with addresses that the kernel does not have."""
        arguments = "0", "packet:tap0", "10.77.0.4", "fd77::4"
        return self._remote("ours on Ethernet", lambda name: self._new_ours(name, *arguments))

    @contextmanager
    def losing(self, loss: float) -> Iterator[None]:
        """Lose a share of what rxe sends, for a while."""
        tc = self.session("tc")
        ports = [["match", version, "dport", str(ROCE), "0xffff"] for version in ("ip", "ip6")]

        def run(*words: str) -> str:
            done = tc.call("run", argv=["tc", *words], timeout=10)
            if done["status"]:
                raise Failed(f"tc {' '.join(words)}: {done['output']}")
            return done["output"]

        run(*["qdisc", "add", "dev", "eth0", "root", "handle", "1:", "prio"])
        try:
            run(*f"qdisc add dev eth0 parent 1:3 handle 30: netem limit 100000 loss {loss:%}".split())
            for number, (protocol, match) in enumerate(zip(("ip", "ipv6"), ports, strict=True), 1):
                run(*f"filter add dev eth0 parent 1: protocol {protocol} pref {number} u32".split(), *match,
                    "flowid", "1:3")
            yield
            found = re.search(r"netem.*dropped (\d+)", run(*["-s", "qdisc", "show", "dev", "eth0"]), re.DOTALL)
            if not found or found[1] == "0":
                raise Failed("nothing was lost")
        finally:
            run(*["qdisc", "del", "dev", "eth0", "root"])

    def _remote(self, name: str, make: Callable[[str], Remote]) -> Remote:
        found = self._remotes.get(name)
        if found is None or not found.usable:
            if found:
                found.close()
            found = self._remotes[name] = make(name)
            found.call("hello", timeout=START)
        return found

    def _new_session(self, name: str) -> Remote:
        sock = self._dial()
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Remote(f"guest {name}", Connection(sock), log=self.log)

    def _new_ours(self, name: str, *arguments: str) -> Remote:
        here, there = socket.socketpair()
        log = self.logs / f"{name}.log"
        argv = ["ip", "netns", "exec", self.namespace, sys.executable, str(HERE / "ours.py"), *arguments]
        with there, log.open("ab") as out:
            process = subprocess.Popen(argv, stdin=there.fileno(), stdout=out, stderr=out)
        return Remote(name, Connection(here), process, self.log)

    def stop(self) -> None:
        """End all that was started."""
        for remote in self._remotes.values():
            remote.close()
        end(self._process)
        shutil.rmtree(self.logs, ignore_errors=True)


def end(process: subprocess.Popen[bytes], patience: float = 10.0) -> None:
    """End a process: by closed input or a signal, then by force."""
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(patience)


def build() -> None:
    """Build the guest, unless it is there."""
    done = subprocess.run([HERE / "build_guest.sh"], capture_output=True, text=True, timeout=BUILD, check=False)
    if done.returncode:
        raise Failed(f"build_guest.sh: {done.stderr[-4000:]}")


def inside(namespace: str, what: Callable[[], T]) -> T:
    """Call `what` in a network namespace: a thread enters it, and ends. A socket made there stays there."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        new_net = 0x40000000
        try:
            with open(f"/run/netns/{namespace}", "rb") as entry:
                if libc.setns(entry.fileno(), new_net):
                    raise OSError(ctypes.get_errno(), f"setns {namespace}")
            result.append(what())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
