"""One end of a connection in a separate process, which dies at a step of the handshake.

    cm_peer.py ROLE STEP NIC ADDRESS SERVER PORT

ROLE: connect, listen, or "many COUNT AT_ONCE" to connect and disconnect often. STEP: a method of the machine and when
the process dies, as in accept:before, or "" for never. It prints a line when it listens, and one when it is connected;
then it waits for its input to end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from cm_sent import wait_until_sent
from gpunetio import PortConfig, cm, verbs
from gpunetio.cm.machine import Machine
from gpunetio.verbs import QP, Context

FAST = cm.Times(response_timeout=16, packet_life=8, retries=3)  # 0.27 s, four times
_LOOKS = 5


class Peer:
    """Starts it, in the test."""

    def __init__(self, role: str, step: str, nic: str, address: str, server: str, port: int):
        argv = [sys.executable, __file__, role, step, nic, address, server, str(port)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def said(self) -> str:
        """Wait for its next line; "" when it has died."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def wait(self) -> int:
        """Wait for its end. Return its status."""
        return self._process.wait(60)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        if kind is not None:
            self._process.kill()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


@contextlib.contextmanager
def short_lived_qp(ctx: Context) -> Iterator[QP]:
    """A queue pair that nothing has to last longer than."""
    with (
        ctx.create_pd() as pd, ctx.create_cq(8) as cq,
        pd.create_qp(sq_wr=4, rq_wr=4, send_cq=cq, receive_cq=cq) as qp,
    ):
        yield qp


def new_qp(ctx: Context) -> QP:
    """Return a queue pair of its own domain and completion queue."""
    cq = ctx.create_cq(8)
    return ctx.create_pd().create_qp(sq_wr=4, rq_wr=4, send_cq=cq, receive_cq=cq)


def _die_at(step: str, ctx: Context) -> None:
    """Make a method of the machine end the process, before it does its work, or after, when its messages are sent."""
    name, _, when = step.partition(":")
    original = getattr(Machine, name)

    def die() -> None:
        wait_until_sent(ctx, 30)
        os.kill(os.getpid(), signal.SIGKILL)

    def dying(self: Machine, *args: Any, **kwargs: Any) -> Any:
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        Machine.receive = lambda *arrived: None  # type: ignore[method-assign]  # it hears nothing any more
        try:
            return original(self, *args, **kwargs)
        finally:
            threading.Thread(target=die, daemon=True).start()

    setattr(Machine, name, dying)


def _descriptors() -> int:
    """How many this process has. For a moment, a thread may have one more: the least of several looks counts."""
    return min(len(os.listdir("/proc/self/fd")) for _ in range(_LOOKS) if not time.sleep(0.01))


def _connect_often(ctx: Context, server: str, port: int, count: int, at_once: int) -> None:
    """Connect and disconnect; see that nothing is left."""
    qps, before = [new_qp(ctx) for _ in range(at_once)], 0
    for number in range(count // at_once):
        connections = [cm.start_connecting(qp, server, port) for qp in qps]
        for connection in connections:
            connection.established()
        for connection in connections:
            connection.start_disconnecting()
        for connection in connections:
            connection.disconnected()
            connection.close()
        for qp in qps:
            qp.reset()
        descriptors = _descriptors()
        assert number <= count // at_once // 2 or descriptors == before, "descriptors are left"
        before = descriptors
    print("done", flush=True)


def main() -> None:
    role, step, nic, address, server, port = sys.argv[1:]
    with verbs.open(nic, port=PortConfig(addresses=(address,))) as ctx:
        if step:
            _die_at(step, ctx)
        if role.startswith("many"):
            _, count, at_once = role.split()
            _connect_often(ctx, server, int(port), int(count), int(at_once))
            return
        if role == "connect":
            connection = cm.connect(new_qp(ctx), server, int(port), times=FAST)
        else:
            listener = cm.listen(ctx, int(port), times=FAST)
            print("listens", flush=True)
            connection = listener.accept().accept(new_qp(ctx))
            connection.established()
        print("connected", flush=True)
        sys.stdin.read()
        connection.disconnect()


if __name__ == "__main__":
    main()
