"""Probe a NIC without a GPU: a queue pair that is connected to itself writes between two host buffers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

from ...enums import WcStatus, WrOpcode
from ...verbs import CQ, QP, Completion, SendWr, Sge
from ..finding import Evidence, Finding, fail, ok
from .bench import SIZE, Bench, Way, differences, pattern
from .explain import SYNDROME_OF, completion_failed

_DEPTH = 16
_LOOK_SECONDS = 50e-6  # between two polls: a software NIC may need this core
_HOST = "the host rings"


def host(bench: Bench) -> Iterator[Finding]:
    """Let the host write a WQE, ring, and poll."""
    way, wanted = bench.way(), pattern()
    target = bytearray(SIZE)
    with ExitStack() as made:
        here, there = (made.enter_context(bench.pd.register(memory)) for memory in (bytearray(wanted), target))
        cq = made.enter_context(bench.ctx.create_cq(_DEPTH))
        qp = made.enter_context(bench.pd.create_qp(sq_wr=_DEPTH, rq_wr=1, send_cq=cq, receive_cq=cq))
        way.connect(qp)
        data = [Sge(here.address, SIZE, here.lkey)]
        qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE, sges=data, remote_addr=there.address, rkey=there.rkey))
        yield _finding(bench, way, qp, _completion(cq, bench.patience), differences(wanted, target))


def _completion(cq: CQ, seconds: float) -> Completion | None:
    """Return the first completion; None if none arrives in time."""
    end = time.monotonic() + seconds
    while not (found := cq.poll(1)):
        if time.monotonic() > end:
            return None
        time.sleep(_LOOK_SECONDS)
    return found[0]


def _finding(bench: Bench, way: Way, qp: QP, completion: Completion | None, wrong: str) -> Finding:
    connected = Evidence("connected to itself", way.text)
    if completion is None:
        return fail(
            f"{bench.name} completes nothing: {_HOST}, and no CQE comes in {bench.patience:g} s",
            connected, Evidence("queue pair", f"{qp.state.name} after the doorbell"),
        )
    if completion.status != WcStatus.SUCCESS:
        syndrome = SYNDROME_OF.get(completion.status, 0)
        said = bench.ctx.provider.explain(qp.qpn, completion.vendor_err)
        return completion_failed(bench.name, _HOST, syndrome, completion.vendor_err, said, connected)
    if wrong:
        return fail(f"{bench.name} reports success, and {wrong}", connected)
    return ok(f"{bench.name} writes {SIZE >> 10} KiB to itself: {_HOST}", connected)
