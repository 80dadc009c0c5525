"""Completion queues of any size: rounded up, of larger entries, resized while completions wait; and when they came."""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gpunetio import Gpu, verbs
from gpunetio.enums import AsyncEventType, CqOverrun, SendFlags, WcStatus, WrOpcode
from gpunetio.errors import BadStateError, DriverError, FullError, InvalidValueError, NotSupportedError
from gpunetio.formats import commands as cmd
from gpunetio.formats.commands import Opcode, Status
from gpunetio.formats.events import EQE, EventType
from gpunetio.providers.provider import ClockInfo
from gpunetio.verbs import CQ, Completion, Context, RecvWr, SendWr, Sge
from nic_rig import Buffer, until

PATIENCE = 20.0
SIZES = pytest.mark.parametrize("cqe_size", [64, 128])


@pytest.fixture
def ctx() -> Iterator[Context]:
    with verbs.open("soft0") as ctx:
        yield ctx


class Sender:
    """A queue pair connected to itself, whose WRITEs complete in a CQ, and what has been polled there."""

    def __init__(self, ctx: Context, cq: CQ, depth: int = 64):
        self.cq, self.sent, self.polled = cq, 0, 0
        self.pd = ctx.create_pd()
        self.buffer = Buffer(self.pd, 4096)
        self.qp = self.pd.create_qp(sq_wr=depth, send_cq=cq)
        self.qp.connect(self.qp)

    def send(self, count: int) -> None:
        sge = Sge(self.buffer.address, 8, self.buffer.key)
        write = {"remote_addr": self.buffer.address + 64, "rkey": self.buffer.key}
        for _ in range(count):
            self.qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[sge], wr_id=self.sent, **write))
            self.sent += 1

    def wait(self) -> None:
        """Until all has completed, polled or not."""
        row = self.cq.ctx.provider.nic.qps[self.qp.qpn]  # type: ignore[attr-defined]
        until(lambda: int(row["sq_ci"]) == self.sent, "completions")

    def poll(self, count: int) -> list[Completion]:
        """The next `count` completions, which are in order."""
        found: list[Completion] = []
        end = time.monotonic() + PATIENCE
        while len(found) < count and time.monotonic() < end:
            found += self.cq.poll(count - len(found))
        assert [done.wr_id for done in found] == list(range(self.polled, self.polled + count))
        assert {done.status for done in found} <= {WcStatus.SUCCESS}
        self.polled += count
        return found


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked, has", [(1, 1), (2, 2), (3, 4), (100, 128), (1 << 22, 1 << 22)])
def test_a_size_is_rounded_up_and_told(ctx, asked, has):
    with ctx.create_cq(asked) as cq:
        assert (cq.query().cqe, cq.query().cqe_size, cq.entries) == (has, 64, has)


@pytest.mark.parametrize("asked", [0, -1, (1 << 22) + 1])
def test_sizes_that_no_device_has(ctx, asked):
    with pytest.raises(InvalidValueError, match="cqe = "):
        ctx.create_cq(asked)


@pytest.mark.parametrize("cqe_size", [0, 32, 100, 256])
def test_entries_have_64_or_128_bytes(ctx, cqe_size):
    with pytest.raises(InvalidValueError, match=f"cqe_size = {cqe_size}: .* 64 or 128"):
        ctx.create_cq(16, cqe_size=cqe_size)


def test_entries_of_128_bytes_end_in_what_one_of_64_is(ctx):
    cq = ctx.create_cq(8, cqe_size=128)
    assert cq.query() == verbs.CqAttr(8, 128, 0)
    sender = Sender(ctx, cq)
    for _ in range(5):  # more than the ring holds
        sender.send(7)
        sender.poll(7)


def test_a_message_in_an_entry_of_128_bytes(ctx):
    cq = ctx.create_cq(8, cqe_size=128)
    pd = ctx.create_pd()
    buffer = Buffer(pd, 4096)
    qp = pd.create_qp(sq_wr=8, rq_wr=8, send_cq=cq, receive_cq=cq, cqe_inline=True)
    qp.connect(qp)
    qp.post_recv(RecvWr(sges=[Sge(buffer.address, 64, buffer.key)]))
    qp.post_send(SendWr(opcode=WrOpcode.SEND, inline=b"in the completion", flags=SendFlags(0)))
    found: list[Completion] = []
    until(lambda: bool(found.extend(cq.poll()) or found), "the message")
    assert (found[0].status, found[0].byte_len) == (WcStatus.SUCCESS, 17)
    assert bytes(buffer.bytes[:17]) == b"in the completion"


def test_kernels_read_entries_of_64_bytes(ctx):
    with Gpu("host") as gpu:
        pd = ctx.create_pd()
        cq = ctx.create_cq(16, cqe_size=128, external_datapath=True)
        qp = pd.create_qp(sq_wr=16, send_cq=cq, external_datapath=True)
        qp.connect(qp)
        with pytest.raises(NotSupportedError, match="128 bytes"):
            gpu.export_qp(qp)


# --- resizing --------------------------------------------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("before, after", [(8, 64), (64, 8), (8, 8), (16, 5)])
@pytest.mark.parametrize("lap", [0, 5, 8, 13])
def test_completions_that_wait_are_kept(ctx, cqe_size, before, after, lap):
    cq = ctx.create_cq(before, cqe_size=cqe_size)
    sender = Sender(ctx, cq)
    for _ in range(lap):
        sender.send(1)
        sender.poll(1)
    sender.send(5)
    sender.wait()
    cq.resize(after)
    assert cq.query().cqe == max(8, after)
    sender.poll(2)
    for _ in range(4):
        sender.send(2)
        sender.poll(2)
    sender.poll(3)
    assert cq.poll() == []


def test_a_queue_can_be_resized_again_and_again(ctx):
    nic = ctx.provider.nic
    cq = ctx.create_cq(4)
    sender = Sender(ctx, cq)
    umems = len(nic.umems)
    for entries in (8, 32, 4, 128, 8) * 3:
        sender.send(3)
        sender.poll(1)
        cq.resize(entries)
        sender.poll(2)
    assert len(nic.umems) == umems + 1  # the first one has the doorbell record
    sender.qp.close()
    cq.close()
    assert len(nic.umems) == 0


def test_resizing_beside_completions(ctx):
    cq = ctx.create_cq(256)
    sender = Sender(ctx, cq, depth=256)
    for entries in (512, 256, 1024) * 5:
        sender.send(100)
        cq.resize(entries)
        sender.poll(100)


def test_a_ring_without_room_for_what_waits_stays(ctx):
    cq = ctx.create_cq(16)
    sender = Sender(ctx, cq)
    sender.send(8)
    sender.wait()
    with pytest.raises(FullError, match="8 completions wait"):
        cq.resize(8)
    assert cq.query().cqe == 16
    sender.poll(8)
    cq.resize(8)
    sender.send(8)
    sender.wait()
    with pytest.raises(FullError, match="poll first"):  # the old ring has no room for its last entry
        cq.resize(64)
    sender.poll(8)


def test_the_device_itself_refuses_a_ring_that_is_too_small(ctx):
    cq = ctx.create_cq(16)
    sender = Sender(ctx, cq)
    sender.send(8)
    sender.wait()
    cq._arrived = lambda most: 0  # look away
    with pytest.raises(DriverError, match="BAD_OUTS_CQES") as caught:
        cq.resize(8)
    assert caught.value.status == Status.BAD_OUTS_CQES
    del cq._arrived
    sender.poll(8)


@pytest.mark.parametrize("late", [False, True])
def test_an_event_that_was_asked_for_comes_after_a_resize(ctx, late):
    """Also if the engine hears the request when it resizes: what tells of the move is no completion."""
    channel = ctx.create_comp_channel()
    cq = ctx.create_cq(8, channel=channel)
    sender = Sender(ctx, cq)
    if late:
        ctx.provider.nic.pause()
    cq.req_notify()
    cq.resize(32)
    if late:
        ctx.provider.nic.resume()
        ctx.provider.nic.engine.synchronize()
    assert channel.get_event(0) is None
    sender.send(1)
    assert channel.get_event(PATIENCE) is cq
    cq.ack_events()
    sender.poll(1)


@pytest.mark.parametrize("what", [{"collapsed": True}, {"external_datapath": True}])
def test_rings_that_others_read_stay(ctx, what):
    with pytest.raises(BadStateError, match="cannot be resized"):
        ctx.create_cq(8, **what).resize(16)


def test_moderation_is_not_there(ctx):
    cq = ctx.create_cq(8)
    mailbox = cmd.MODIFY_CQ_IN.pack(opcode=Opcode.MODIFY_CQ, cqn=cq.cqn)
    with pytest.raises(DriverError, match="op_mod 0"):
        ctx.provider.devx_obj_modify(cq.devx_handle, bytes(mailbox), 16)


# --- when completions came -------------------------------------------------------------------------------------------


def test_timestamps_are_of_the_devices_clock(ctx):
    sender = Sender(ctx, ctx.create_cq(64))
    before = ctx.raw_clock()
    sender.send(10)
    stamps = [done.timestamp for done in sender.poll(10)]
    assert before - 10**9 < stamps[0]  # a turn of the engine has one time, that of its beginning
    assert stamps == sorted(stamps)
    assert stamps[-1] <= ctx.raw_clock()


def test_timestamps_become_the_time_of_day(ctx):
    assert ctx.query_device().hca_core_clock == 1_000_000  # kHz
    sender = Sender(ctx, ctx.create_cq(64))
    clock = ctx.query_clock()
    sender.send(1)
    (done,) = sender.poll(1)
    assert done.timestamp is not None
    assert clock.ns(done.timestamp) - clock.nsec == done.timestamp - clock.last_cycles
    assert abs(clock.ns(done.timestamp) - time.time_ns()) < 60 * 10**9


def test_an_error_has_no_timestamp(ctx):
    sender = Sender(ctx, ctx.create_cq(64))
    sender.qp.to_error()
    sender.qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE))
    found: list[Completion] = []
    until(lambda: bool(found.extend(sender.cq.poll()) or found), "the flush")
    assert (found[0].status, found[0].timestamp) == (WcStatus.WR_FLUSH_ERR, None)


def test_conversion_is_that_of_mlx5dv():
    """312.5 MHz: 16 ns are 5 cycles. mlx5dv_ts_to_ns, by hand."""
    clock = ClockInfo(nsec=10**9, last_cycles=1000, frac=3, mult=16 << 20, shift=20, mask=(1 << 32) - 1)
    assert clock.ns(1000) == 10**9
    assert clock.ns(1010) == 10**9 + 160
    assert clock.ns(990) == 10**9 - 160 + 1  # what was rounded off counts the other way
    assert clock.ns((1 << 32) - 24) == 10**9 - 16 * 1024 + 1  # around the end


# --- what is told of an overrun --------------------------------------------------------------------------------------


def test_an_overrun_tells_its_syndrome(ctx):
    cq = ctx.create_cq(4, overrun=CqOverrun.DISABLE)
    sender = Sender(ctx, cq)
    sender.send(8)
    event = ctx.get_async_event(PATIENCE)
    assert event is not None
    event.ack()
    assert (event.type, event.element, event.syndrome) == (AsyncEventType.CQ_ERR, cq, 1)
    assert len(event.eqe) == EQE.size
    entry = EQE.at(event.eqe)
    assert (entry["type"], entry["cqn"], entry["syndrome"]) == (EventType.CQ_ERROR, cq.cqn, 1)


def test_events_of_ports_and_queue_pairs_have_entries(ctx):
    sender = Sender(ctx, ctx.create_cq(4))
    nic = ctx.provider.nic
    nic.set_link(False)
    nic.set_link(True)
    with ExitStack() as acks:
        down, up = (ctx.get_async_event(PATIENCE) for _ in range(2))
        assert down is not None
        assert up is not None
        for event in (down, up):
            acks.callback(event.ack)
    assert [(event.eqe[EQE.type], event.eqe[EQE.sub_type], event.eqe[EQE.port] >> 4) for event in (down, up)] == [
        (EventType.PORT_CHANGE, 1, 1), (EventType.PORT_CHANGE, 4, 1),
    ]
    assert (up.syndrome, sender.qp.qpn != 0) == (0, True)
