"""Connections with a process that is killed on the way: errors in time, nothing half-made, and life goes on."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import cm_child
from cm_child import PATIENCE, PORT, TIMES
from gpunetio import cm, verbs
from gpunetio.enums import QpState, QpType
from gpunetio.errors import DocaError, NotFoundError, TimedOutError
from gpunetio.verbs import QP

PEER = "127.0.0.2"


@contextmanager
def child(role: str, last: str = "never") -> Iterator[subprocess.Popen]:
    command = [sys.executable, str(Path(cm_child.__file__)), role, last]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
            process.wait(PATIENCE)
        finally:
            process.kill()


def reaches(process: subprocess.Popen, step: str) -> None:
    """Wait until the process has reached a step."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == step:
            return
    pytest.fail(f"the process has ended before {step!r}")


@pytest.fixture(scope="module")
def ctx() -> Iterator[verbs.Context]:
    with verbs.open("soft0") as opened:
        yield opened


@pytest.fixture
def qp(ctx) -> Iterator[QP]:
    cq = ctx.create_cq(16)
    with ctx.create_pd() as pd:
        yield pd.create_qp(qp_type=QpType.RC, sq_wr=4, rq_wr=4, send_cq=cq, receive_cq=cq)
    cq.close()


def ends(connection: cm.Connection) -> None:
    """Disconnect from a peer that is gone: that ends, and leaves the queue pair in ERR."""
    connection.disconnect(timeout=PATIENCE)
    assert connection.qp.state == QpState.ERR
    connection.close()
    connection.qp.reset()


def works(ctx: verbs.Context, qp: QP) -> None:
    """Connect with a new process, as if nothing had happened."""
    with cm.listen(ctx, PORT, times=TIMES) as listener, child("client"):
        connection = listener.accept(PATIENCE).accept(qp)
        connection.established(PATIENCE)
        connection.disconnected(PATIENCE)
        connection.close()
    qp.reset()


def test_processes_connect_both_ways(ctx, qp):
    with child("server") as process:
        reaches(process, "listening")
        with cm.connect(qp, PEER, PORT, timeout=PATIENCE) as connection:
            connection.disconnect(timeout=PATIENCE)
    assert process.returncode == 0
    qp.reset()
    works(ctx, qp)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["asked", "accepted", "established"])
def test_a_server_is_killed(ctx, qp, step):
    with child("server", step) as process:
        reaches(process, "listening")
        try:
            connection = cm.connect(qp, PEER, PORT, timeout=PATIENCE, times=TIMES)
        except (TimedOutError, NotFoundError):
            assert step != "established"
            assert qp.state == QpState.RST
        else:
            process.wait(PATIENCE)
            ends(connection)
    works(ctx, qp)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["asking", "established", "disconnecting"])
def test_a_client_is_killed(ctx, qp, step):
    last = "never" if step == "asking" else step  # its request has to come before it is killed
    with cm.listen(ctx, PORT, times=TIMES) as listener, child("client", last) as process:
        request = listener.accept(PATIENCE)
        if step == "asking":
            process.kill()
            process.wait(PATIENCE)
        try:
            connection = request.accept(qp)
            connection.established(PATIENCE)
        except DocaError:
            assert step == "asking"
            if not qp.users:  # its address did not answer any more
                assert qp.state == QpState.RST
                request.reject()
            else:
                assert qp.state == QpState.ERR
                connection.close()
            qp.reset()
        else:
            process.wait(PATIENCE)
            ends(connection)
    works(ctx, qp)
