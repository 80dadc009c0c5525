"""WAIT, which holds a send queue until a completion queue has what it names, and DOCA's sample of it."""

import logging
import re
import struct
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from click.testing import CliRunner

from gpunetio import verbs
from gpunetio.cli import app
from gpunetio.enums import CqOverrun, LinkLayer, QpAttrMask, QpState, SendFlags, WcOpcode, WcStatus, WrOpcode
from gpunetio.errors import DriverError, InvalidValueError, TimedOutError, UnexpectedError
from gpunetio.nic.engine.port import PortConfig
from gpunetio.nic.state.reasons import Reason
from gpunetio.samples import verbs_wait_cq_wr as sample
from gpunetio.samples.verbs_wait_cq_wr import SampleOptions
from gpunetio.verbs import CQ, BadWrError, Completion, QpAttr, SendWr, Sge, wait_cq_pi
from nic_rig import LOCAL_QP_OP, NOP, SEND, WRITE, Buffer, Queue, connect, error_of, until
from udp_rig import own_address

WAIT = 0x0F
PART = 64  # bytes of a write
BOTH = pytest.mark.parametrize("names", [("soft0", "soft0"), ("soft0", "soft1")], ids=["loopback", "wire"])
OK, WAITED, WRITTEN = WcStatus.SUCCESS, WcOpcode.WAIT_CQ_PI, WcOpcode.RDMA_WRITE


def take(cq: CQ, count: int) -> list[Completion]:
    """So many completions."""
    found: list[Completion] = []
    until(lambda: found.extend(cq.poll()) or len(found) >= count, f"{count} completions")
    assert len(found) == count
    return found


def outcomes(cq: CQ, count: int) -> list[tuple[WcStatus, WcOpcode]]:
    return [(completion.status, completion.opcode) for completion in take(cq, count)]


def statuses(cq: CQ, count: int) -> list[WcStatus]:
    return [completion.status for completion in take(cq, count)]


class Bench:
    """A core-direct queue that writes to the far end, and the gate: a CQ beside it where the far end's SENDs arrive."""

    def __init__(self, here: verbs.Context, there: verbs.Context):
        self.near, self.far = here.create_pd(), there.create_pd()
        self.here, self.there = Buffer(self.near, 4096, fill=1), Buffer(self.far, 4096)
        self.queue, self.target = Queue(self.near, sq=16, core_direct_master=True), Queue(self.far)
        self.gate = here.create_cq(16, overrun=CqOverrun.ENABLE)  # nobody polls it
        self.opener, self.gated = Queue(self.far), Queue(self.near, recv_cq=self.gate)
        self.other, self.others_target = Queue(self.near), Queue(self.far)
        for a, b in (self.queue, self.target), (self.opener, self.gated), (self.other, self.others_target):
            connect(a, b)
        self.cq, self.qp = self.queue.send_cq, self.queue.qp
        self.written = 0

    @property
    def gate_row(self):
        return self.queue.nic.cqs[self.gate.cqn]

    def open(self, count: int = 1) -> None:
        """Make completions in the gate."""
        before = int(self.gate_row["pi"])
        for _ in range(count):
            self.gated.receive(self.here.at(2048, 8))
            self.opener.post(SEND)
        until(lambda: self.gate_row["pi"] == before + count, "completions in the gate")

    def wait(self, pi: int, cqn: int | None = None, **fields: object) -> None:
        request = wait_cq_pi(self.gate, pi, **fields)  # type: ignore[arg-type]
        if cqn is not None:
            request = SendWr(opcode=WrOpcode.WAIT_CQ_PI, wait_cqn=cqn, wait_pi=pi)
        self.qp.post_send(request)

    def write(self) -> None:
        """Write the next part."""
        at = self.written * PART
        self.written += 1
        sge = Sge(self.here.address + at, PART, self.here.key)
        address, rkey = self.there.address + at, self.there.key
        self.qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[sge], remote_addr=address, rkey=rkey))

    def arrived(self) -> int:
        """How many parts have been written, and nothing behind them."""
        same = self.here.bytes[:2048] == self.there.bytes[:2048]
        parts = same.reshape(-1, PART).all(axis=1)
        count = int(np.argmin(parts))
        assert not self.there.bytes[count * PART : 2048].any()
        return count

    def held(self, parts: int = 0) -> bool:
        """Whether the queue stays where it is, while another one of the same NIC does a hundred writes."""
        for _ in range(100):
            self.other.post(WRITE, self.there.remote(3072), self.here.at(3072, 8))
            assert self.other.done.next().opcode == 0
        return not self.cq.poll() and self.arrived() == parts


@pytest.fixture
def bench(names: tuple[str, str]) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(*(stack.enter_context(verbs.open(name)) for name in names))


# --- waiting ---------------------------------------------------------------------------------------------------------


@BOTH
def test_it_holds_back_what_is_behind_it(bench):
    bench.write()
    bench.wait(bench.gate.consumer_index + 1)
    bench.write()
    assert outcomes(bench.cq, 1) == [(OK, WRITTEN)]
    assert bench.held(1)
    bench.open()  # entry 0: it waits for entry 1
    assert bench.held(1)
    bench.open()
    assert outcomes(bench.cq, 2) == [(OK, WAITED), (OK, WRITTEN)]
    assert bench.arrived() == 2


@BOTH
def test_what_has_passed_is_not_waited_for(bench):
    bench.open(3)
    for pi in (0, 2, 1):
        bench.wait(pi)
        bench.write()
    assert outcomes(bench.cq, 6) == [(OK, WAITED), (OK, WRITTEN)] * 3
    bench.wait(3)
    bench.write()
    assert bench.held(3)
    bench.open()
    assert outcomes(bench.cq, 2) == [(OK, WAITED), (OK, WRITTEN)]


WRAP = 1 << 32


@BOTH
@pytest.mark.parametrize(
    "ahead, more",
    [(-3, 0), (-1, 0), (0, 1), (1, 2), (2, 3), (5, 6), (-(1 << 31) + 1, 0)],
)
def test_indices_have_32_bits(bench, ahead, more):
    """The producer is just before the wrap; half of all indices are behind it."""
    start = WRAP - 2
    bench.gate_row["pi"] = start
    bench.wait(start + ahead)
    bench.write()
    for _ in range(more):
        assert bench.held()
        bench.open()
    assert outcomes(bench.cq, 2) == [(OK, WAITED), (OK, WRITTEN)]


@BOTH
def test_the_index_before_the_first(bench):
    bench.wait(-1)
    bench.wait(WRAP - 1)
    assert outcomes(bench.cq, 2) == [(OK, WAITED)] * 2
    bench.wait(WRAP)  # is 0
    assert bench.held()


@BOTH
def test_unsignalled(bench):
    """Only the write tells; the slots of both are free again."""
    bench.open()
    for _ in range(3 * bench.qp.sq_entries):
        bench.written = 0
        bench.wait(0, flags=SendFlags(0))
        bench.write()
        assert outcomes(bench.cq, 1) == [(OK, WRITTEN)]
    assert not bench.cq.poll()


@BOTH
def test_a_wr_id_comes_back(bench):
    bench.open()
    bench.wait(0, wr_id=77)
    assert [completion.wr_id for completion in take(bench.cq, 1)] == [77]


@BOTH
def test_for_its_own_queue(bench):
    """The second write starts when the first has completed."""
    bench.write()
    bench.qp.post_send(wait_cq_pi(bench.cq, 0))
    bench.write()
    assert outcomes(bench.cq, 3) == [(OK, WRITTEN), (OK, WAITED), (OK, WRITTEN)]


# --- failures --------------------------------------------------------------------------------------------------------


FLUSHED = WcStatus.WR_FLUSH_ERR


def fail_in_gate(bench: Bench) -> None:
    """Complete a receive in the gate with an error: it is too short for its message."""
    before = int(bench.gate_row["pi"])
    bench.gated.receive(bench.here.at(2048, 4))
    bench.opener.post(SEND, bench.there.at(3072, 8))
    until(lambda: bench.gate_row["pi"] > before, "an error in the gate")


def connect_gated(bench: Bench) -> None:
    for queue in (bench.gated, bench.opener):
        queue.reset()
    connect(bench.opener, bench.gated)


@BOTH
@pytest.mark.parametrize("posted_first", [True, False])
def test_what_waits_for_a_failure_is_flushed(bench, posted_first):
    """A ConnectX-7 flushes the queue (NVIDIA/nccl#2383): nothing behind the WAIT is executed."""
    bench.open()
    if not posted_first:
        fail_in_gate(bench)
    bench.wait(1)
    bench.write()
    if posted_first:
        assert bench.held()
        fail_in_gate(bench)
    assert statuses(bench.cq, 2) == [FLUSHED] * 2
    assert bench.qp.state == QpState.ERR
    assert bench.arrived() == 0


@BOTH
def test_completions_before_the_failure(bench):
    """What was complete is a success, whatever has failed since. An index that will never be there does not hang."""
    bench.open(2)
    fail_in_gate(bench)
    bench.wait(1)
    bench.write()
    bench.wait(900)
    assert statuses(bench.cq, 3) == [OK, OK, FLUSHED]
    assert bench.arrived() == 1


@BOTH
@pytest.mark.parametrize("start", [0, (1 << 32) - 2])
def test_completions_after_a_reset(bench, start):
    """The reset of the queue that failed ends it; what completed as an error stays one."""
    bench.gate_row["pi"] = start
    fail_in_gate(bench)
    connect_gated(bench)
    failed = int(bench.gate_row["pi"]) - start
    bench.open(3)
    bench.wait(start + failed + 1)
    bench.write()
    assert statuses(bench.cq, 2) == [OK, OK]
    bench.wait(start)
    assert statuses(bench.cq, 1) == [FLUSHED]


@BOTH
def test_for_a_cq_that_has_overrun(names):
    """No completion follows an overrun, so nothing that is behind the WAIT is executed."""
    with ExitStack() as stack:
        near, far = (stack.enter_context(verbs.open(name)) for name in names)
        bench = Bench(near, far)
        full = near.create_cq(1, overrun=CqOverrun.DISABLE)
        queue = Queue(bench.near, send_cq=full)
        connect(queue, Queue(bench.far))
        bench.qp.post_send(wait_cq_pi(full, 2 * full.entries))
        bench.write()
        for _ in range(full.entries + 1):
            queue.post(NOP)
        assert statuses(bench.cq, 2) == [FLUSHED] * 2
        assert bench.arrived() == 0


@BOTH
def test_a_chain_of_queues(names):
    """Each copies what the one before it has written; they are posted last to first."""
    count = 6
    with ExitStack() as stack:
        contexts = [stack.enter_context(verbs.open(name)) for name in names]
        near, far = (ctx.create_pd() for ctx in contexts)
        queues = [Queue(near, core_direct_master=True) for _ in range(count)]
        peers = [Queue(far) for _ in range(count)]
        for queue, peer in zip(queues, peers):
            connect(queue, peer)
        # A WRITE goes to the far end, a READ comes back from it, in turn.
        here, there = Buffer(near, PART * count), Buffer(far, PART * count)
        here.bytes[:PART] = 0x11
        for i in reversed(range(count)):
            if i > 0:
                queues[i].qp.post_send(wait_cq_pi(queues[i - 1].send_cq, 0 if i == 1 else 1))
            local = Sge(here.address + (i + 1) // 2 * PART, PART, here.key)
            remote = {"remote_addr": there.address + i // 2 * PART, "rkey": there.key}
            opcode = WrOpcode.RDMA_READ if i % 2 else WrOpcode.RDMA_WRITE
            queues[i].qp.post_send(SendWr(opcode=opcode, sges=[local], **remote))
        for i, queue in enumerate(queues):
            assert statuses(queue.send_cq, 1 if i == 0 else 2) == [OK] * (1 if i == 0 else 2)
        assert (here.bytes[: PART * (count // 2 + 1)] == 0x11).all()


def test_numbers_belong_to_a_nic():
    """What completes in the CQ of that number on another NIC does not count; a number that only it has is unknown."""
    with verbs.open("soft0") as here, verbs.open("soft1") as there:
        bench = Bench(here, there)
        gate, twin = here.create_cq(16), there.create_cq(16)
        assert gate.cqn == twin.cqn
        gated, foreign = Queue(bench.near, send_cq=gate), Queue(bench.far, send_cq=twin)
        for queue in (gated, foreign):
            connect(queue, queue)
        bench.wait(0, cqn=gate.cqn)
        foreign.post(NOP)
        foreign.done.next()
        assert bench.held()
        gated.post(NOP)
        assert outcomes(bench.cq, 1) == [(OK, WAITED)]
        bench.wait(0, cqn=there.create_cq(16).cqn)
        assert statuses(bench.cq, 1) == [WcStatus.LOC_QP_OP_ERR]


# --- what is refused -------------------------------------------------------------------------------------------------


def wait_segment(pi: int, cqn: int) -> bytes:
    return struct.pack(">8xII", pi, cqn)


@BOTH
def test_a_queue_that_was_not_created_for_it(bench):
    """The library refuses it, and if it is posted by hand the NIC."""
    plain = bench.other
    data = Sge(bench.here.address, PART, bench.here.key)
    write = SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[data], remote_addr=bench.there.address, rkey=bench.there.key)
    with pytest.raises(BadWrError, match="core_direct_master") as caught:
        plain.qp.post_send(write, wait_cq_pi(bench.gate, 0), write)
    assert (caught.value.index, type(caught.value.__cause__)) == (1, InvalidValueError)
    assert plain.done.next().opcode == 0  # the one before it
    plain.index = 1
    plain.post(WAIT, wait_segment(0, bench.gate.cqn))
    assert error_of(plain.done.next()) == (LOCAL_QP_OP, Reason.WQE_OPCODE)
    assert plain.qp.state == QpState.ERR


@BOTH
@pytest.mark.parametrize("cqn", [0, 0x123, 0xFFFFFF])
def test_a_cq_that_does_not_exist(bench, cqn):
    bench.write()
    bench.wait(0, cqn=cqn)
    bench.write()
    assert statuses(bench.cq, 3) == [OK, WcStatus.LOC_QP_OP_ERR, WcStatus.WR_FLUSH_ERR]
    assert bench.arrived() == 1


@BOTH
def test_a_cq_that_is_closed_meanwhile(bench):
    bench.wait(0)
    bench.write()
    assert bench.held()
    bench.gated.qp.close()
    bench.gate.close()
    assert statuses(bench.cq, 2) == [WcStatus.LOC_QP_OP_ERR, WcStatus.WR_FLUSH_ERR]
    assert bench.arrived() == 0


@BOTH
def test_a_wqe_of_the_wrong_size(bench):
    bench.queue.post(WAIT, wait_segment(0, bench.gate.cqn), bytes(16))
    assert error_of(bench.queue.done.next()) == (LOCAL_QP_OP, Reason.WQE_MALFORMED)


@BOTH
@pytest.mark.parametrize("fields", [{"inline": b"x"}, {"sges": [Sge(0, 1, 1)]}, {"wait_cqn": 1 << 24}])
def test_requests_that_make_no_sense(bench, fields):
    with pytest.raises(BadWrError):
        bench.qp.post_send(SendWr(**{"opcode": WrOpcode.WAIT_CQ_PI, "wait_cqn": bench.gate.cqn, **fields}))
    bench.write()
    assert outcomes(bench.cq, 1) == [(OK, WRITTEN)]


# --- waits that never end --------------------------------------------------------------------------------------------


@BOTH
def test_err_flushes_it(bench):
    bench.wait(9)
    bench.write()
    assert bench.held()
    bench.qp.modify(QpAttr(next_state=QpState.ERR), QpAttrMask.NEXT_STATE)
    assert statuses(bench.cq, 2) == [WcStatus.WR_FLUSH_ERR] * 2
    bench.open(10)
    assert bench.held()


@BOTH
def test_reset_forgets_it(bench):
    bench.wait(0)
    bench.write()
    assert bench.held()
    bench.queue.reset()
    bench.target.reset()
    connect(bench.queue, bench.target)
    bench.open()
    assert bench.held()
    bench.written = 0
    bench.write()
    assert outcomes(bench.cq, 1) == [(OK, WRITTEN)]


@BOTH
def test_a_queue_closes_while_it_waits(bench):
    bench.wait(0)
    bench.qp.close()
    bench.open()
    assert not bench.cq.poll()


# --- the sample ------------------------------------------------------------------------------------------------------

NAME = "verbs_wait_cq_wr"
SAID = [
    "Starting the sample", "Data in buffer3 is identical to the data in buffer1", "Sample finished successfully",
]


def invoke(*args):
    return CliRunner().invoke(app, [NAME, *map(str, args)])


def address(text=None):
    return PortConfig(addresses=(text or own_address(),))


@pytest.mark.parametrize(
    "options",
    [
        SampleOptions(nic_port=address()), SampleOptions(nic_port=address(), gid_index=1, ipv6=True),
        SampleOptions(nic_port=address("::1"), ipv6=True), SampleOptions(device="soft3", nic_port=address()),
        SampleOptions(nic_port=PortConfig(addresses=(own_address(),), link_layer=LinkLayer.INFINIBAND)),
    ],
    ids=["ipv4", "link-local", "ipv6", "named", "infiniband"],
)
def test_sample(caplog, options):
    caplog.set_level(logging.INFO, "gpunetio.samples")
    sample.run(options)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("gpunetio.samples")] == SAID


def test_command():
    result = invoke("--address", own_address())
    assert (result.exit_code, result.stdout.splitlines()) == (0, SAID)
    result = invoke("-l", 60, "-d", "soft2", "-gi", 1, "--ipv6", "--address", own_address())
    assert result.exit_code == 0
    said = re.findall(r"^CQ \S+ of soft2: (\S+) of QP", result.stdout, re.MULTILINE)
    assert sorted(said[:2]) == ["RECV", "SEND"]
    assert said[2] == "WAIT_CQ_PI"
    assert sorted(said[3:]) == ["RECV", "SEND"]


@pytest.mark.parametrize(
    "args, status, text",
    [
        (["--ipv6"], 1, "not an IPv6 address: choose another --gid-index"), (["-gi", 1], 1, "give --ipv6"),
        (["-gi", 9], 1, "no GID at index 9"), (["-gi", -1], 2, "'--gid-index': -1"), (["-d", "soft99"], 1, "soft99"),
        (["--sdk-log-level", 1], 2, "'1'"), (["extra"], 2, "extra"),
    ],
)
def test_mistakes(args, status, text):
    result = invoke("--address", own_address(), *args)
    assert result.exit_code == status
    (line,) = result.stderr.splitlines()
    assert line.startswith("gpunetio: error: ")
    assert text in line


def test_ipv6_on_infiniband():
    port = PortConfig(addresses=(own_address(),), link_layer=LinkLayer.INFINIBAND)
    with pytest.raises(InvalidValueError, match="InfiniBand"):
        sample.run(SampleOptions(nic_port=port, ipv6=True))


def test_help_and_version():
    for name in ("-h", "--help"):
        assert "--device-name" in invoke(name).stdout
    for name in ("-v", "--version"):
        assert re.fullmatch(r"gpunetio \d+\.\d+\.\d+\n", invoke(name).stdout)


OPTIONS = SampleOptions(nic_port=address())


def test_without_the_wait_the_data_is_wrong(monkeypatch):
    """So the WAIT is what the sample shows: with an index that has passed, buffer 3 gets what buffer 2 had before."""
    monkeypatch.setattr(sample, "wait_cq_pi", lambda cq, pi: wait_cq_pi(cq, pi - 2))
    post_send = sample.QP.post_send

    def slowly(qp, *requests):
        """The NIC has done what was posted before the next request is."""
        post_send(qp, *requests)
        row = qp.ctx.provider.nic.qps[qp.qpn]
        until(lambda: row["sq_ci"] == qp.posting.send.producer, "the NIC")

    monkeypatch.setattr(sample.QP, "post_send", slowly)
    with pytest.raises(UnexpectedError, match=f"buffer3 differs .* buffer1: {'00' * 64}, not {'11' * 64}"):
        sample.run(OPTIONS)


def test_a_wait_for_too_many_ends_by_its_deadline(monkeypatch):
    monkeypatch.setattr(sample, "wait_cq_pi", lambda cq, pi: wait_cq_pi(cq, pi + 1))
    monkeypatch.setattr(sample, "WAIT_SECONDS", 0.2)
    with pytest.raises(TimedOutError, match="no completion of WAIT_CQ_PI, SEND, RECV after"):
        sample.run(OPTIONS)


def test_a_request_that_fails(monkeypatch):
    monkeypatch.setattr(sample, "wait_cq_pi", lambda cq, pi: SendWr(opcode=WrOpcode.WAIT_CQ_PI, wait_cqn=0x999))
    with pytest.raises(DriverError, match="failed: LOC_QP_OP_ERR"):
        sample.run(OPTIONS)
