"""Another process with a software NIC, for tests that need two. It has a `Side`, like this process.

`Farm` starts a process in which everything is compiled and loaded, and forks that for each `Farm.spawn`. The fork is an
independent process from the first open on.
"""

import array
import contextlib
import json
import operator
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Any, Self

import numpy as np

from crowd import Crowd
from gpunetio import verbs
from gpunetio.enums import Access
from gpunetio.fabric import udp
from gpunetio.fabric.frames import PIPE, pipe_size
from gpunetio.nic.engine.port import PortConfig
from gpunetio.nic.nic import SoftNic
from gpunetio.nic.state.wire import WIRE
from gpunetio.verbs import QpEndpoint
from neighbour import address
from nic_rig import PATIENCE, WRITE, Buffer, Cqe, Queue, raddr, until, view
from usage import resident

DEADLINE = 60.0  # for an answer, even on a busy machine
START = 120.0  # for the first process, which may have to compile
_EVERYTHING = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC


class Side:
    """What one process has: a NIC at `address`, and queue pairs with memory, named by their place in the lists.

    Arguments and answers are such as JSON can carry.
    """

    def __init__(self, address: str, wire: str = "auto", name: str = "soft0", socket_buffer: int = 0):
        """With `socket_buffer` the UDP sockets of this process receive into so many bytes."""
        if socket_buffer:
            udp.RX_SOCKET_BUFFER = socket_buffer
        self.ctx = verbs.open(name, port=PortConfig(addresses=(address,), wire=wire))
        self.pd = self.ctx.create_pd()
        self.queues: list[Queue] = []
        self.buffers: list[Buffer] = []
        self.crowd = Crowd(self)

    @property
    def nic(self) -> SoftNic:
        return self.ctx.provider.nic  # type: ignore[attr-defined]

    def pid(self) -> int:
        return os.getpid()

    # --- queue pairs

    def open(self, nbytes: int = 4096, **options: Any) -> dict[str, Any]:
        """A queue pair with memory: what the other side must know of them."""
        self.queues.append(Queue(self.pd, **options))
        self.buffers.append(Buffer(self.pd, nbytes, access=_EVERYTHING))
        return self.shown(len(self.queues) - 1)

    def shown(self, index: int) -> dict[str, Any]:
        end, buffer = self.queues[index].qp.endpoint(), self.buffers[index]
        return {
            "qpn": end.qpn, "gid": end.gid.hex(), "lid": end.lid, "mtu": end.mtu, "psn": end.psn,
            "address": buffer.address, "rkey": buffer.key,
        }

    def connect(self, index: int, to: dict[str, Any], **attributes: Any) -> None:
        quick: dict[str, Any] = {"ack_timeout": 14, "retry_cnt": 3, "rnr_retry": 7, "min_rnr_timer": 1}
        peer = QpEndpoint(to["qpn"], bytes.fromhex(to["gid"]), to["lid"], to["mtu"], to["psn"])
        self.queues[index].qp.connect(peer, **{**quick, **attributes})

    def reset(self, index: int) -> None:
        self.queues[index].reset()

    def state(self, index: int) -> str:
        return self.queues[index].qp.state.name

    def take(self, index: int, count: int, timeout: float = PATIENCE) -> list[Cqe]:
        """Completions of sends."""
        return self.queues[index].done.take(count, timeout)

    def receive(self, index: int, nbytes: int, count: int = 1) -> None:
        for _ in range(count):
            self.queues[index].receive(self.buffers[index].at(0, nbytes))

    def arrived(self, index: int, count: int, timeout: float = PATIENCE) -> list[Cqe]:
        """Completions of receives."""
        return self.queues[index].arrived.take(count, timeout)

    def fill(self, index: int, value: int) -> None:
        self.buffers[index].bytes[:] = value

    def byte(self, index: int, offset: int) -> int:
        return int(self.buffers[index].bytes[offset])

    def write(self, index: int, to: dict[str, Any], count: int, nbytes: int) -> None:
        """WRITEs that arrive."""
        write_all(self, index, to, count, nbytes)
        assert {cqe.opcode for cqe in self.take(index, count, DEADLINE)} == {0}

    def wire_kind(self, index: int) -> int:
        """PIPES, UDP, or 0 when the peer is on this NIC."""
        wire = int(self.queues[index].row["wire"])
        return int(view(wire + WIRE.kind, 8, "<i8")[0]) if wire else 0

    def close_queue(self, index: int) -> None:
        queue = self.queues[index]
        for part in (queue.qp, queue.send_cq, queue.recv_cq):
            part.close()

    def deregister(self, index: int) -> None:
        self.buffers[index].mr.close()

    def close(self) -> None:
        self.ctx.close()

    # --- the NIC and the process

    def counter(self, name: str) -> int:
        return int(self.nic.counters[name])

    def wires(self) -> int:
        return int(self.nic.record["wire_count"])

    def sleep_for(self, milliseconds: int) -> None:
        """How long the idle engine sleeps when nobody wakes it."""
        self.nic.record["sleep_ms"] = milliseconds
        self.nic.engine.kick()

    def asleep(self) -> bool:
        """Whether the engine has told its neighbours that it sleeps."""
        links = [wire.peer for wire in self.nic.links._wires if not wire.dead and hasattr(wire.peer, "rx")]
        return all(view(link.rx + PIPE.asleep, 8, "<i8")[0] == 1 for link in links)  # type: ignore[union-attr]

    def scribble(self, seed: int) -> None:
        """Write nonsense into everything that is shared with neighbours, where the other side reads it, and stop."""
        noise = np.random.default_rng(seed)
        self.nic.pause()  # the engine would repair it
        for link in self.nic.control_socket.links:
            pipe = view(link.tx, pipe_size(link.capacity))
            pipe[PIPE.size :] = noise.integers(0, 256, len(pipe) - PIPE.size, np.uint8)
            view(link.rx + PIPE.tail, 8, "<i8")[0] = noise.integers(-(1 << 63), 1 << 63)
            pipe[: PIPE.size].view("<i8")[:] = noise.integers(-(1 << 63), 1 << 63, PIPE.size // 8, np.int64)

    def jam(self) -> None:
        """Stop the engine as if it slept, fill the sockets that wake it, and make writing to them wait."""
        self.nic.record["stop"] = 1
        self.nic.engine.kick()
        for link in self.nic.control_socket.links:
            notify_fd = link._parts.notifier.notify_fd
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(notify_fd, b"\0")
            os.set_blocking(notify_fd, True)
            view(link.rx + PIPE.asleep, 8, "<i8")[0] = 1

    def resources(self) -> dict[str, int]:
        """Descriptors, mappings of shared memory, threads, and resident bytes."""
        with open("/proc/self/maps") as maps:
            shared = sum("memfd:gpunetio" in line for line in maps)
        # For a moment, a thread may have one descriptor more, and a thread that has ended is still listed.
        looks = []
        for _ in range(5):
            looks.append([len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")])
            sleep(0.01)
        descriptors, threads = map(min, zip(*looks, strict=True))
        return {"descriptors": descriptors, "mappings": shared, "threads": threads, "resident": resident()}

    def fork(self) -> int:
        """A child that stays, touches nothing, and ends when it is told to, as any child of a user's might."""
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        return child

    def fork_and_close(self) -> str:
        """A child that tries to use and to close what is its parent's, and exits: what it was told."""
        ends, write = os.pipe()
        if os.fork() == 0:
            try:
                self.ctx.create_pd()
            except Exception as error:
                os.write(write, f"{type(error).__name__}: {error}".encode())
            self.ctx.close()
            sys.exit()  # including everything that runs at exit
        os.close(write)
        with open(ends) as told:
            text = told.read()
        os.wait()
        return text

    def exit(self) -> None:
        """The end of the program, with everything open."""
        sys.exit()


def write_all(near: Side, index: int, to: dict[str, Any], count: int, nbytes: int, offset: int = 0) -> None:
    """Post `count` WRITEs of `nbytes` each, and ring once."""
    queue, buffer = near.queues[index], near.buffers[index]
    for _ in range(count):
        queue.put(WRITE, raddr(to["address"] + offset, to["rkey"]), buffer.at(0, nbytes))
    queue.ring()


# --- the other process -----------------------------------------------------------------------------------------------


class Far:
    """A `Side` in another process: call its methods, and those of its parts ("crowd.open")."""

    def __init__(self, sock: socket.socket, deadline: float):
        self._socket, self._answers = sock, sock.makefile()
        sock.settimeout(deadline)
        self.pid: int = self("pid")

    def __call__(self, method: str, *args: Any, **options: Any) -> Any:
        self.start(method, *args, **options)
        return self.answer(method)

    def start(self, method: str, *args: Any, **options: Any) -> None:
        """Have it done while this process does something else."""
        self._socket.sendall(json.dumps([method, args, options]).encode() + b"\n")

    def answer(self, method: str = "it") -> Any:
        line = self._answers.readline()
        assert line, f"the other process has ended instead of answering {method}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        """Stop the process, until `kill(SIGCONT)`: afterwards none of its threads runs."""
        self.kill(signal.SIGSTOP)
        threads = list(Path(f"/proc/{self.pid}/task").glob("*/stat"))
        until(lambda: all(t.read_text().rpartition(")")[2].split()[0] == "T" for t in threads), "the threads to stop")

    def ended(self) -> None:
        """Wait until the process is gone."""
        with contextlib.suppress(ConnectionResetError):
            assert self._answers.read() == ""
        until(lambda: not Path(f"/proc/{self.pid}").exists(), f"process {self.pid} to end", DEADLINE)
        self._close()

    def end(self) -> None:
        """Kill it, whatever it does, and wait."""
        if self._socket.fileno() >= 0:
            with contextlib.suppress(ProcessLookupError):
                self.kill()
            self.ended()

    def _close(self) -> None:
        self._answers.close()
        self._socket.close()


class Farm:
    """Where other processes come from."""

    def __init__(self):
        here, there = socket.socketpair()
        self._process = subprocess.Popen([sys.executable, __file__, str(there.fileno())], pass_fds=[there.fileno()])
        there.close()
        self._socket = here
        here.settimeout(START)
        assert here.recv(1) == b"+", "the first process did not start"
        self._spawned: list[Far] = []

    def spawn(self, *args: Any, deadline: float = DEADLINE, **options: Any) -> Far:
        """A process with `Side(*args, **options)`, which has so many seconds for an answer."""
        here, there = socket.socketpair()
        fds = array.array("i", [there.fileno()])
        self._socket.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        there.close()
        here.sendall(json.dumps([args, options]).encode() + b"\n")
        far = Far(here, deadline)
        self._spawned.append(far)
        return far

    def clear(self) -> None:
        """End all of them."""
        while self._spawned:
            self._spawned.pop().end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.clear()
        self._socket.close()
        self._process.wait(DEADLINE)


@contextlib.contextmanager
def side(wire: str = "auto", name: str = "soft0") -> Iterator[Side]:
    """A `Side` of this process, at an address of its own."""
    opened = Side(address(), wire, name)
    try:
        yield opened
    finally:
        opened.close()


def _serve(sock: socket.socket) -> None:
    """Do what is asked until the asker is gone."""
    lines = sock.makefile()
    args, options = json.loads(lines.readline())
    served = Side(*args, **options)
    for line in lines:
        method, args, options = json.loads(line)
        try:
            answer = {"value": operator.attrgetter(method)(served)(*args, **options)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sock.sendall(json.dumps(answer).encode() + b"\n")
    os._exit(0)


def main() -> None:
    """Fork for every socket that comes."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    with verbs.open("soft7", port=PortConfig(addresses=(address(),))):
        pass  # loads the engine for all
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    sock.send(b"+")
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 1, 1)
        if not data:
            return
        if os.fork() == 0:
            sock.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _serve(socket.socket(fileno=fds[0]))
        os.close(fds[0])


if __name__ == "__main__":
    main()
