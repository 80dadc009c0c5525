"""Shared receive queues: whose receives are used in what order, by many queue pairs, on one NIC and between two."""

import signal
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunetio import verbs
from gpunetio.enums import AsyncEventType, QpState, SrqType, WcOpcode, WcStatus, WrOpcode
from gpunetio.errors import BadStateError, InUseError, InvalidValueError, NotSupportedError
from gpunetio.memory import HostMemory
from gpunetio.verbs import CQ, QP, SRQ, BadWrError, Completion, QpEndpoint, RecvWr, SendWr, Sge
from gpunetio.verbs.devx.srq import FreeList
from nic_rig import Buffer, until, view
from transport_rig import PEER_GID, PEER_QPN, Lab, send_packets
from transport_rig import lab as lab  # a fixture

BOTH = pytest.mark.parametrize("names", [("soft0", "soft0"), ("soft0", "soft1")], ids=["loopback", "wire"])
SIZE = 1 << 18


@dataclass
class Shop:
    """Senders, each connected to a QP of its own that receives from one SRQ and completes into one CQ."""

    senders: list[QP]
    sent: CQ
    source: Buffer
    receivers: list[QP]
    received: CQ
    srq: SRQ
    target: Buffer

    def receive(self, *slots: int, nbytes: int = 8192) -> None:
        self.srq.post_recv(*(self.request(slot, nbytes) for slot in slots))

    def request(self, slot: int, nbytes: int = 8192) -> RecvWr:
        return RecvWr(sges=[Sge(self.target.address + slot * 8192, nbytes, self.target.key)], wr_id=slot)

    def send(self, sender: int, offset: int, nbytes: int, **more: object) -> None:
        sge = Sge(self.source.address + offset, nbytes, self.source.key)
        self.senders[sender].post_send(SendWr(opcode=WrOpcode.SEND, sges=[sge], wr_id=offset, **more))

    def take(self, count: int, cq: CQ | None = None) -> list[Completion]:
        found: list[Completion] = []
        until(lambda: len(found.__iadd__((cq or self.received).poll(count))) >= count, f"{count} completions")
        return found


@pytest.fixture
def shop(names: tuple[str, str]) -> Iterator[Shop]:
    with ExitStack() as stack:
        here, there = (stack.enter_context(verbs.open(name)) for name in names)
        near, far = here.create_pd(), there.create_pd()
        sent, received, srq = here.create_cq(256), there.create_cq(256), far.create_srq(16, receive_max_sges=2)
        senders = [near.create_qp(sq_wr=32, send_cq=sent) for _ in range(4)]
        receivers = [far.create_qp(receive_cq=received, srq=srq, user_index=i) for i in range(4)]
        for a, b in zip(senders, receivers, strict=True):
            a.connect(b, min_rnr_timer=1)
        source, target = Buffer(near, SIZE), Buffer(far, SIZE)
        target.bytes[:] = 9
        source.bytes[:] = np.random.default_rng(1).integers(0, 256, SIZE)
        yield Shop(senders, sent, source, receivers, received, srq, target)


@BOTH
def test_every_queue_pair_takes_from_it(shop):
    shop.receive(*range(16))
    for round_ in range(4):
        for sender in range(4):
            shop.send(sender, 1000 * (4 * round_ + sender), 700)
    done = shop.take(16)
    assert sorted(one.wr_id for one in done) == list(range(16))
    offsets: dict[int, list[int]] = {qp.qpn: [1000 * (4 * n + i) for n in range(4)] for i, qp in
                                     enumerate(shop.receivers)}
    for one in done:
        assert (one.status, one.opcode, one.byte_len) == (WcStatus.SUCCESS, WcOpcode.RECV, 700)
        at = offsets[one.qp_num].pop(0)  # of one sender in order
        slot = one.wr_id * 8192
        assert bytes(shop.target.bytes[slot : slot + 700]) == bytes(shop.source.bytes[at : at + 700])
        assert not (shop.target.bytes[slot + 700 : slot + 8192] != 9).any()
    assert shop.received.poll() == []


@BOTH
def test_receives_are_used_in_the_order_of_posting(shop):
    for round_ in range(5):  # several laps, so that the chain of free WQEs is out of order
        slots = [(7 * round_ + i) % 31 for i in range(11)]
        shop.receive(*slots)
        for _ in slots:
            shop.send(0, 0, 10)
        assert [one.wr_id for one in shop.take(11)] == slots
        shop.take(11, shop.sent)


@BOTH
def test_a_long_message_holds_its_receive_while_others_go_on(shop):
    shop.receive(*range(8))
    shop.send(0, 0, 8192)
    for sender in (1, 2, 3):
        shop.send(sender, 100, 5)
    done = shop.take(4)
    assert sorted(one.wr_id for one in done) == [0, 1, 2, 3]
    assert sorted(one.byte_len for one in done) == [5, 5, 5, 8192]


@BOTH
def test_immediate_data_uses_a_receive_up(shop):
    shop.receive(3, 4)
    to = {"remote_addr": shop.target.address + 100_000, "rkey": shop.target.mr.rkey}
    sge = Sge(shop.source.address, 20, shop.source.key)
    shop.senders[1].post_send(SendWr(opcode=WrOpcode.RDMA_WRITE_WITH_IMM, sges=[sge], imm=77, **to))
    shop.send(1, 0, 4)
    first, second = shop.take(2)
    assert (first.opcode, first.imm, first.wr_id) == (WcOpcode.RECV_RDMA_WITH_IMM, 77, 3)
    assert (second.opcode, second.imm, second.wr_id) == (WcOpcode.RECV, None, 4)


@BOTH
def test_scatter(shop):
    address, key = shop.target.address, shop.target.key
    shop.srq.post_recv(RecvWr(sges=[Sge(address + 5, 3, key), Sge(address + 1000, 100, key)]))
    shop.send(2, 0, 50)
    shop.take(1)
    whole = bytes(shop.target.bytes[5:8]) + bytes(shop.target.bytes[1000:1047])
    assert whole == bytes(shop.source.bytes[:50])


@BOTH
def test_receiver_not_ready(shop):
    """An empty queue makes senders wait, and none is forgotten."""
    for sender in range(4):
        shop.send(sender, 10 * sender, 10)
    context = shop.srq.ctx.provider
    until(lambda: context.nic.counters["out_of_buffer"] >= 4, "refusals")  # type: ignore[attr-defined]
    assert shop.received.poll() == []
    for slot in range(4):
        shop.receive(slot)
        assert [one.wr_id for one in shop.take(1)] == [slot]
    assert {one.status for one in shop.take(4, shop.sent)} == {WcStatus.SUCCESS}


@BOTH
def test_too_small(shop):
    """The message that does not fit takes its own queue pair along, and no other."""
    shop.receive(0, nbytes=10)
    shop.receive(1)
    shop.send(0, 0, 11)
    (failed,) = shop.take(1)
    assert (failed.status, failed.wr_id, failed.qp_num) == (WcStatus.LOC_LEN_ERR, 0, shop.receivers[0].qpn)
    assert shop.receivers[0].state == QpState.ERR
    shop.send(1, 0, 11)
    assert [(one.status, one.wr_id) for one in shop.take(1)] == [(WcStatus.SUCCESS, 1)]


@BOTH
def test_fair(shop):
    """Where receives are scarce, each sender has its share."""
    each = 24
    for sender in range(4):
        for _ in range(each):
            shop.send(sender, 0, 8)
    counts = dict.fromkeys((qp.qpn for qp in shop.receivers), 0)
    for number in range(4 * each):
        shop.receive(number % 16)
        (one,) = shop.take(1)
        counts[one.qp_num] += 1
        if number == 2 * each - 1:
            halfway = list(counts.values())
    assert list(counts.values()) == [each] * 4
    assert min(halfway) > 0


# --- limit and events


@BOTH
def test_limit(shop):
    ctx, srq = shop.srq.ctx, shop.srq
    shop.receive(*range(6))
    srq.modify(srq_limit=4)
    assert srq.query().srq_limit == 4
    shop.send(0, 0, 1)
    shop.send(0, 0, 1)
    shop.take(2)
    assert ctx.get_async_event(0) is None  # 4 are left, which is not fewer
    shop.send(1, 0, 1)
    event = ctx.get_async_event(10)
    assert event
    assert (event.type, event.element) == (AsyncEventType.SRQ_LIMIT_REACHED, srq)
    assert srq.query().srq_limit == 0
    event.ack()
    shop.send(1, 0, 1)
    shop.take(2)
    assert ctx.get_async_event(0) is None  # once
    srq.modify(srq_limit=2)
    shop.send(1, 0, 1)
    again = ctx.get_async_event(10)
    assert again
    assert again.type == AsyncEventType.SRQ_LIMIT_REACHED
    again.ack()


@BOTH
def test_limit_that_is_passed_already(shop):
    """Arming raises no event. The next message that takes a receive does.

    The context of an SRQ in Mellanox's description of its devices (InfiniHost, MT25408 PRM) says when: a WQE is taken
    from the queue, and fewer than the limit are left. So do Linux's rxe and siw.
    """
    ctx, srq = shop.srq.ctx, shop.srq
    shop.receive(0, 1, 2)
    srq.modify(srq_limit=8)
    assert ctx.get_async_event(0.02) is None
    assert srq.query().srq_limit == 8
    shop.receive(3)  # posting a receive raises none, either
    assert ctx.get_async_event(0.02) is None
    shop.send(0, 0, 1)
    event = ctx.get_async_event(10)
    assert event
    assert event.type == AsyncEventType.SRQ_LIMIT_REACHED
    event.ack()
    assert srq.query().srq_limit == 0


@BOTH
def test_last_wqe_reached(shop):
    ctx, qp = shop.srq.ctx, shop.receivers[2]
    shop.receive(0, 1)
    qp.to_error()
    event = ctx.get_async_event(10)
    assert event
    assert (event.type, event.element) == (AsyncEventType.QP_LAST_WQE_REACHED, qp)
    event.ack()
    assert shop.received.poll() == []  # the receives are not this queue pair's: nothing is flushed
    shop.send(0, 0, 1)
    assert [one.wr_id for one in shop.take(1)] == [0]


def test_a_receive_that_was_taken_is_flushed_or_comes_back(lab: Lab):
    """Half a message has come when its queue pair ends: with a completion, or with none."""
    srq, cq = lab.pd.create_srq(4), lab.ctx.create_cq(16)
    memory = Buffer(lab.pd, 8192)

    def connected() -> QP:
        qp = lab.pd.create_qp(receive_cq=cq, srq=srq)
        qp.connect(QpEndpoint(PEER_QPN, PEER_GID, 0, 256, 500), psn=100)
        return qp

    def begin(qp: QP) -> None:
        first, _ = send_packets(bytes(300), 256, 500)
        lab.send_raw(type(first)(**{**first.__dict__, "qpn": qp.qpn}).build())
        lab.settle()

    srq.post_recv(*(RecvWr(sges=[Sge(memory.address, 8192, memory.key)], wr_id=number) for number in range(3)))
    flushed, reset, gone, last = (connected() for _ in range(4))
    begin(flushed)
    flushed.to_error()
    lab.settle()
    assert [(one.status, one.wr_id) for one in cq.poll()] == [(WcStatus.WR_FLUSH_ERR, 0)]
    begin(reset)
    reset.reset()
    begin(gone)
    gone.close()
    begin(last)
    lab.send_raw(type(p := send_packets(bytes(300), 256, 500)[1])(**{**p.__dict__, "qpn": last.qpn}).build())
    lab.settle()
    (done,) = cq.poll()
    assert (done.status, done.wr_id, done.byte_len) == (WcStatus.SUCCESS, 1, 300)
    while (event := lab.ctx.get_async_event(0)) is not None:
        event.ack()
    for handle in (flushed, reset, last, srq, cq, memory.mr):
        handle.close()
    while lab.receive_raw() is not None:
        pass


# --- bad use


@pytest.fixture
def ctx() -> Iterator[verbs.Context]:
    with verbs.open("soft0") as opened:
        yield opened


def test_full(ctx):
    srq = ctx.create_pd().create_srq(3)
    most = srq.query().max_wr
    assert most >= 3
    srq.post_recv(*(RecvWr(wr_id=i) for i in range(most - 1)))
    with pytest.raises(BadWrError, match=r"request 1 .* no room") as caught:
        srq.post_recv(RecvWr(), RecvWr(wr_id=5))
    assert caught.value.request.wr_id == 5


@pytest.mark.parametrize(
    "step, call",
    [
        ("_post", lambda srq: srq.post_recv(RecvWr())),
        ("_resize", lambda srq: srq.modify(max_wr=31)),
        ("_arm", lambda srq: srq.modify(srq_limit=1)),
    ],
    ids=["post", "resize", "arm"],
)
def test_an_interrupt_waits_for_the_end(ctx, monkeypatch, step, call):
    srq = ctx.create_pd().create_srq(4)
    taken, ended = getattr(type(srq), step), []

    def interrupted(self, argument):
        signal.raise_signal(signal.SIGINT)
        taken(self, argument)
        ended.append(step)

    monkeypatch.setattr(type(srq), step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(srq)
    assert ended == [step]


def test_bad_arguments(ctx):
    pd, cq = ctx.create_pd(), ctx.create_cq(16)
    device = ctx.query_device()
    for arguments, error, words in (
        ({"srq_wr": 0}, InvalidValueError, "srq_wr = 0"),
        ({"srq_wr": device.max_srq_wr + 1}, NotSupportedError, f"at most {device.max_srq_wr}"),
        ({"srq_wr": 1, "receive_max_sges": 0}, InvalidValueError, "max_sges = 0"),
        ({"srq_wr": 1, "receive_max_sges": 31}, NotSupportedError, "max_sges = 31"),
        ({"srq_wr": 1, "srq_type": 7}, InvalidValueError, "srq_type = 7"),
        ({"srq_wr": 1, "srq_type": SrqType.CONTIGUOUS}, InvalidValueError, "external_datapath"),
    ):
        with pytest.raises(error, match=words):
            pd.create_srq(**arguments)
    srq = pd.create_srq(4)
    with pytest.raises(InvalidValueError, match="srq without receive_cq"):
        pd.create_qp(srq=srq)
    with pytest.raises(InvalidValueError, match="srq_limit = 99"):
        srq.modify(srq_limit=99)
    qp = pd.create_qp(receive_cq=cq, srq=srq)
    with pytest.raises(InvalidValueError, match="receives from SRQ"):
        qp.post_recv(RecvWr())
    with pytest.raises(InUseError, match="QP"):
        srq.close()
    qp.close()
    srq.close()
    with pytest.raises(BadStateError, match="is closed"):
        srq.post_recv(RecvWr())
    with pytest.raises(BadStateError, match="is closed"):
        pd.create_qp(receive_cq=cq, srq=srq)


# --- a contiguous one, filled as a kernel would


@pytest.mark.parametrize("offset", [0, 256])
def test_contiguous(ctx, offset):
    pd, cq = ctx.create_pd(), ctx.create_cq(64)
    rings, records = HostMemory(4096), HostMemory(4096)
    srq = pd.create_srq(
        4, receive_max_sges=2, srq_type=SrqType.CONTIGUOUS, external_umem=(ctx.register_umem(rings), offset),
        external_dbr_umem=(ctx.register_umem(records), 64),
    )
    assert (srq.entries, srq.stride, srq.ring_address) == (4, 32, rings.address + offset)
    with pytest.raises(BadStateError, match="external data path"):
        srq.post_recv(RecvWr())
    a, b = pd.create_qp(sq_wr=16, send_cq=cq), pd.create_qp(receive_cq=ctx.create_cq(64), srq=srq)
    a.connect(b, min_rnr_timer=1)
    memory = Buffer(pd, 4096)
    ring, record = view(srq.ring_address, 4 * 32).reshape(4, 32), view(srq.dbr_address, 4, ">u4")
    for number in range(10):
        segments = struct.pack(">IIQ", 8, memory.key, memory.address + 8 * number) + struct.pack(">IIQ", 0, 0x100, 0)
        ring[number % 4] = np.frombuffer(segments, np.uint8)
        record[0] = number + 1
        memory.bytes[2000] = number + 1
        a.post_send(SendWr(opcode=WrOpcode.SEND, sges=[Sge(memory.address + 2000, 1, memory.key)]))
        until(lambda: cq.poll(), "the send")
        assert memory.bytes[8 * number] == number + 1
    cqes = view(b.init_attr.receive_cq.ring_address, 10 * 64).reshape(10, 64)
    assert [int(cqe[60]) << 8 | int(cqe[61]) for cqe in cqes] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


# --- the chain of free WQEs


class Ring:
    """What a FreeList needs of an SRQ, and a device that follows the chain as the PRM says."""

    def __init__(self, entries: int):
        self.stride, self.max_sge = 32, 1
        self.wqes = np.zeros((entries, self.stride), np.uint8)
        self.record = np.zeros(1, np.uint32)
        self.dbr_address = self.record.ctypes.data
        self.next, self.taken = 0, 0

    def waiting(self) -> int:
        return (int(self.record.byteswap()[0]) - self.taken) & 0xFFFF

    def take(self) -> int:
        index = self.next
        self.next = int(self.wqes[index, 2]) << 8 | int(self.wqes[index, 3])
        self.taken += 1
        return index


@settings(max_examples=200)
@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from("ptc"), st.integers(0, 15)), max_size=200))
def test_chain(log_entries, steps):
    """Whatever the order of completing, the device finds what was posted, in that order, and never anything else."""
    ring = Ring(1 << log_entries)
    free = FreeList(ring, ring.wqes)  # type: ignore[arg-type]
    posted, taken, number = [], [], 0
    for action, choice in steps:
        if action == "p" and len(posted) + len(taken) < len(ring.wqes) - 1:
            free.post((RecvWr(sges=[Sge(number, 1, 1)], wr_id=number),))
            posted.append(number)
            number += 1
        elif action == "t" and posted:
            index = ring.take()
            expected = posted.pop(0)
            assert int.from_bytes(ring.wqes[index, 24:32].tobytes(), "big") == expected
            taken.append((index, expected))
        elif action == "c" and taken:
            index, expected = taken.pop(choice % len(taken))
            assert free.complete(index) == expected
        assert ring.waiting() == len(posted)


# --- growing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("soft0", "soft0"), ("soft0", "soft1")], ids=["loopback", "wire"])
def test_it_grows_while_receives_are_posted_and_used(names):
    with ExitStack() as stack:
        here, there = (stack.enter_context(verbs.open(name)) for name in names)
        near, far = here.create_pd(), there.create_pd()
        cq, sent = there.create_cq(256), here.create_cq(256)
        srq = far.create_srq(3)
        a = near.create_qp(sq_wr=64, send_cq=sent)
        b = far.create_qp(srq=srq, receive_cq=cq)
        a.connect(b)
        target = Buffer(far, 4096)
        posted = done = 0

        def post(count: int) -> None:
            nonlocal posted
            for _ in range(count):
                srq.post_recv(RecvWr(sges=[Sge(target.address + 8 * posted, 8, target.key)], wr_id=posted))
                posted += 1

        def message() -> None:
            nonlocal done
            a.post_send(SendWr(opcode=WrOpcode.SEND, inline=done.to_bytes(8, "little"), wr_id=done))
            found: list[Completion] = []
            until(lambda: bool(found.extend(cq.poll()) or found), "a message")
            assert [(one.wr_id, one.status) for one in found] == [(done, WcStatus.SUCCESS)]
            until(sent.poll, "its acknowledgement")
            done += 1

        for room in (3, 7, 15, 63):
            srq.modify(max_wr=room)
            assert srq.query().max_wr == room
            post(room - (posted - done))
            with pytest.raises(BadWrError, match=f"all its {room} receives"):
                post(1)
            message()
            message()
        while done < posted:
            message()
        assert target.bytes.view(np.int64)[:done].tolist() == list(range(done))


def test_it_does_not_shrink(ctx):
    srq = ctx.create_pd().create_srq(15)
    srq.modify(max_wr=10)  # there is room for as many
    assert srq.query().max_wr == 15
    with pytest.raises(InvalidValueError, match="can only grow"):
        srq.modify(max_wr=3)


def test_one_that_kernels_fill_stays(ctx):
    srq = ctx.create_pd().create_srq(15, external_datapath=True)
    with pytest.raises(BadStateError, match="external data path"):
        srq.modify(max_wr=31)


def test_a_device_that_does_not_resize_says_so(ctx):
    srq = ctx.create_pd().create_srq(15)
    ctx.__dict__["_device"] = replace(ctx.query_device(), can_resize_srq=False)
    with pytest.raises(NotSupportedError, match="does not resize"):
        srq.modify(max_wr=31)


def test_memory_of_rings_that_it_has_left_goes_with_it(ctx):
    nic = ctx.provider.nic
    srq = ctx.create_pd().create_srq(3)
    for room in (7, 15, 31):
        srq.modify(max_wr=room)
    srq.close()
    assert (len(nic.umems), len(nic.srqs)) == (0, 0)
