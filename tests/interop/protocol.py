"""What the two ends of an interop test have in common: the control connection, patterns, the commands of a session.

Standard library only, and no import of ours: the guest runs it too.

A control connection carries frames: 4 bytes of length (big-endian), then a JSON object with `version`. A request has
`command` and its arguments, the answer `result` or `error`. A session answers one request after the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

VERSION = 1
PORT = 7471  # of the agent in the guest
NAP = 50e-6  # seconds between two looks at a completion queue
FRAME_LIMIT = 1 << 20
SHOWN = 4096  # bytes of memory that `read` returns; of more it returns the hash only

OPCODES = ("SEND", "SEND_IMM", "WRITE", "WRITE_IMM", "READ", "CS", "FA")
ACCESS = ("local_write", "remote_write", "remote_read", "remote_atomic")
STATES = ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")


class Connection:
    """Frames of JSON over a stream socket."""

    def __init__(self, sock: socket.socket):
        self.sock = sock

    def send(self, **message: Any) -> None:
        body = json.dumps({"version": VERSION, **message}).encode()
        self.sock.sendall(struct.pack(">I", len(body)) + body)

    def receive(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next message, or None when the other side has closed; TimeoutError after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        head = self._bytes(4, end)
        if not head:
            return None
        (length,) = struct.unpack(">I", head)
        if length > FRAME_LIMIT:
            raise ValueError(f"a frame of {length} bytes")
        message = json.loads(self._bytes(length, end))
        if message.get("version") != VERSION:
            raise ValueError(f"version {message.get('version')}, and this side speaks {VERSION}")
        return message

    def _bytes(self, count: int, end: float | None) -> bytes:
        got = bytearray()
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        while len(got) < count:
            if end is not None and not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                raise TimeoutError("no answer on the control connection")
            part = self.sock.recv(count - len(got))
            if not part:
                if got:
                    raise ConnectionError("the control connection ended inside a frame")
                return b""
            got += part
        return bytes(got)

    def close(self) -> None:
        self.sock.close()


def listening(port: int, timeout: float, process: int | str = "self") -> bool:
    """Wait until a TCP port listens in the network namespace of a process: whether it does."""
    until = time.monotonic() + timeout
    while True:
        for name in ("tcp", "tcp6"):
            with open(f"/proc/{process}/net/{name}") as table:
                rows = [line.split() for line in table.readlines()[1:]]
            if any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows):
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.01)


# --- contents --------------------------------------------------------------------------------------------------------


def pattern(seed: int, nbytes: int) -> bytes:
    """Bytes that a seed determines."""
    return hashlib.shake_128(seed.to_bytes(8, "little")).digest(nbytes)


def digest(contents: bytes | memoryview) -> str:
    return hashlib.sha256(contents).hexdigest()


class Messages:
    """Numbered messages, no two alike: a number, then a slice of one block, cheaper than a pattern for each."""

    STEP = 4093

    def __init__(self, seed: int, nbytes: int):
        self.nbytes, self.block = nbytes, pattern(seed, nbytes + self.STEP)

    def __getitem__(self, number: int) -> bytes:
        at = number % self.STEP
        return (struct.pack("<I", number) + self.block[at + 4 : at + self.nbytes])[: self.nbytes]


# --- a session -------------------------------------------------------------------------------------------------------


class End(ABC):
    """One queue pair with memory of its own: what each side of a test has to provide.

    Statuses and opcodes of completions carry the names of verbs.h, without prefix.
    """

    qpn: int
    memory: memoryview

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """qp, psn, gid (hex), lid, mtu (of the port, in bytes), address, rkey, size."""

    @abstractmethod
    def connect(self, remote: dict[str, Any], **attributes: Any) -> None:
        """To RTS; `remote` is what the other end is `about`."""

    @abstractmethod
    def post(self, op: str, sges: Sequence[Sequence[int]], **request: Any) -> None:
        """Post one of OPCODES; a segment is [offset, nbytes] or, with a wrong key on purpose, [offset, nbytes, lkey].

        `request`: wr_id, signaled, remote, rkey, imm, swap_add, compare.
        """

    @abstractmethod
    def receive(self, sges: Sequence[Sequence[int]], wr_id: int = 0) -> None:
        """Post a receive."""

    @abstractmethod
    def poll(self, queue: str) -> dict[str, Any] | None:
        """The next completion of the "send" or "receive" queue: status, opcode, byte_len, imm (or None), wr_id."""

    @abstractmethod
    def events(self, timeout: float) -> list[str]:
        """Asynchronous events of this queue pair: those that are there when the first one has come."""

    @abstractmethod
    def state(self) -> str:
        """One of STATES."""

    @abstractmethod
    def to_error(self) -> None: ...

    @abstractmethod
    def destroy(self) -> None: ...

    def wait(self, queue: str, until: float) -> dict[str, Any]:
        """The next completion; TimeoutError when the clock passes `until`."""
        while (completion := self.poll(queue)) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"no completion of QP {self.qpn:#x} ({queue} queue)")
            time.sleep(NAP)  # two interpreters, two vCPUs and our engine share few cores: spinning costs all of them
        return completion


class PingPong:
    """Messages to and fro, each with contents of its own, compared where they arrive."""

    RECEIVES = 4

    def __init__(self, end: End, first: bool, nbytes: int, seed: int):
        self.end, self.first, self.nbytes = end, first, nbytes
        self.outgoing, self.incoming = (Messages(seed + (first == theirs), nbytes) for theirs in (False, True))
        if (2 + self.RECEIVES) * nbytes > len(end.memory):
            raise ValueError(f"{len(end.memory)} bytes of memory are too few for messages of {nbytes}")
        for number in range(self.RECEIVES):
            self._receive(number)

    def _receive(self, number: int) -> None:
        self.end.receive([[(2 + number % self.RECEIVES) * self.nbytes, self.nbytes]], wr_id=number)

    def run(self, count: int, timeout: float) -> dict[str, Any]:
        """`count` messages each way: the seconds that they took. ValueError at the first wrong one."""
        start = time.monotonic()
        until, n, memory = start + timeout, self.nbytes, self.end.memory

        def completed(queue: str, number: int) -> dict[str, Any]:
            completion = self.end.wait(queue, until)
            if completion["status"] != "SUCCESS" or completion["wr_id"] != number:
                raise ValueError(f"message {number}: {completion}")
            return completion

        def send(number: int) -> None:
            at = number % 2 * n
            memory[at : at + n] = self.outgoing[number]
            self.end.post("SEND", [[at, n]], wr_id=number)

        if self.first:
            send(0)
        for number in range(count):
            arrived = completed("receive", number)
            at = (2 + number % self.RECEIVES) * n
            if arrived["byte_len"] != n or memory[at : at + n] != self.incoming[number]:
                raise ValueError(f"message {number} has wrong contents: {arrived}")
            if number + self.RECEIVES < count:
                self._receive(number + self.RECEIVES)
            if not self.first:
                send(number)
            # The peer has answered, or has all it needs to complete this one.
            completed("send", number)
            if self.first and number + 1 < count:
                send(number + 1)
        return {"seconds": time.monotonic() - start}


class Session:
    """Carries out the commands of a control connection. A subclass says how to make an `End`."""

    def __init__(self) -> None:
        self.ends: dict[int, End] = {}
        self.pingpongs: dict[int, PingPong] = {}

    def open(self, **arguments: Any) -> End:
        """Make a queue pair. Arguments: see `command_create`."""
        raise NotImplementedError

    def serve(self, connection: Connection) -> None:
        """Answer requests until the other side closes."""
        try:
            while request := connection.receive():
                del request["version"]
                try:
                    answer = {"result": getattr(self, "command_" + request.pop("command"))(**request)}
                except Exception as error:
                    answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
                connection.send(**answer)
        finally:
            for end in self.ends.values():
                end.destroy()

    def command_hello(self, timeout: float = 0.0) -> int:
        """The first command: answered when the session is ready."""
        return VERSION

    # --- queue pairs

    def command_create(
        self,
        ip: str = "ipv4",
        transport: str = "RC",
        size: int = 1 << 16,
        depth: int = 64,
        psn: int = 0,
        access: Sequence[str] = ACCESS,
    ) -> dict[str, Any]:
        """Make a queue pair and register memory: what `End.about` says. `ip`: which GID (ipv4, ipv6, link_local)."""
        end = self.open(ip=ip, transport=transport, size=size, depth=depth, psn=psn, access=access)
        self.ends[end.qpn] = end
        return end.about()

    def command_connect(self, qp: int, remote: dict[str, Any], **attributes: Any) -> None:
        """Attributes: mtu, ack_timeout, retry_cnt, rnr_retry, min_rnr_timer, max_rd_atomic, access (of the QP)."""
        self.ends[qp].connect(remote, **attributes)

    def command_state(self, qp: int) -> str:
        return self.ends[qp].state()

    def command_to_error(self, qp: int) -> None:
        self.ends[qp].to_error()

    def command_destroy(self, qp: int) -> None:
        self.pingpongs.pop(qp, None)
        self.ends.pop(qp).destroy()

    # --- work

    def command_post(self, qp: int, requests: Sequence[dict[str, Any]]) -> None:
        for request in requests:
            self.ends[qp].post(**request)

    def command_receive(self, qp: int, requests: Sequence[dict[str, Any]]) -> None:
        for request in requests:
            self.ends[qp].receive(**request)

    def command_poll(self, qp: int, queue: str, count: int = 1, timeout: float = 0.0) -> list[dict[str, Any]]:
        """Up to `count` completions; fewer when the time is over."""
        until, found = time.monotonic() + timeout, []
        while len(found) < count:
            try:
                found.append(self.ends[qp].wait(queue, until))
            except TimeoutError:
                break
        return found

    def command_events(self, qp: int, timeout: float = 0.0) -> list[str]:
        return self.ends[qp].events(timeout)

    # --- memory

    def command_fill(self, qp: int, seed: int, offset: int = 0, nbytes: int | None = None) -> None:
        """Write the pattern of a seed, by default over everything."""
        memory = self.ends[qp].memory
        nbytes = len(memory) - offset if nbytes is None else nbytes
        memory[offset : offset + nbytes] = pattern(seed, nbytes)

    def command_store(self, qp: int, offset: int, data: str) -> None:
        """Write bytes, given in hex."""
        contents = bytes.fromhex(data)
        self.ends[qp].memory[offset : offset + len(contents)] = contents

    def command_read(self, qp: int, offset: int = 0, nbytes: int | None = None) -> dict[str, str]:
        """SHA-256 of memory, and the bytes in hex when they are few."""
        memory = self.ends[qp].memory
        part = memory[offset:] if nbytes is None else memory[offset : offset + nbytes]
        return {"sha256": digest(part), **({"data": part.hex()} if len(part) <= SHOWN else {})}

    # --- loops

    def command_prepare(self, qp: int, first: bool, nbytes: int, seed: int = 0) -> None:
        """Make ready for `pingpong`: post receives. One of the two ends is the first to send."""
        self.pingpongs[qp] = PingPong(self.ends[qp], first, nbytes, seed)

    def command_pingpong(self, qp: int, count: int, timeout: float) -> dict[str, Any]:
        """Send `count` messages each way and compare what arrives. Both ends must be prepared."""
        return self.pingpongs.pop(qp).run(count, timeout)

    def command_run(self, argv: Sequence[str], timeout: float) -> dict[str, Any]:
        """Run a program: status and output. One that takes too long is ended with all that it has started."""
        program = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            output, _ = program.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            program.communicate()
            raise
        return {"status": program.returncode, "output": output.decode(errors="replace")}
