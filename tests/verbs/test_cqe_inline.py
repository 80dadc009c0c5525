"""Payload in completions (scatter to CQE): what the NIC writes, and how it gets into the receive's buffers."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunetio import verbs
from gpunetio.enums import Access, QpState, QpType, SrqType, WcFlags, WcOpcode, WcStatus, WrOpcode
from gpunetio.errors import InvalidValueError
from gpunetio.memory import HostMemory
from gpunetio.verbs import CQ, PD, QP, SRQ, Completion, RecvWr, SendWr, Sge
from nic_rig import (
    RESP_SEND,
    RESP_SEND_IMM,
    RESP_WRITE_IMM,
    SEND,
    SEND_IMM,
    WRITE_IMM,
    Buffer,
    Completions,
    Ends,
    Queue,
    connect,
    data,
    inline,
    until,
    view,
)

WHERE = [("soft0",), ("soft0", "soft1")]
IDS = ["loopback", "wire"]
BYTES = bytes(range(1, 251))


# --- what the NIC writes ---------------------------------------------------------------------------------------------


@pytest.fixture(params=WHERE, ids=IDS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Two QPs whose completions may carry payload; those of the usual fixture do not."""
    names = request.param
    pds = [verbs.open(name).create_pd() for name in names]
    a, b = Queue(pds[0], cqe_inline=True), Queue(pds[-1], cqe_inline=True)
    opened = Ends(a, b, Buffer(pds[0], 4096, fill=1), Buffer(pds[-1], 4096))
    connect(opened.a, opened.b)
    yield opened
    opened.close()


@pytest.mark.parametrize("nbytes", [1, 4, 8, 12, 16, 20, 24, 28, 30, 31, 32])
def test_short_sends_are_in_the_cqe(ends, nbytes):
    """The first 32 bytes, with zeros behind the payload; the receive's buffer is left alone, and its key."""
    for receive in ([ends.there.at()], [data(0, 0xBAD, 1)], []):
        index = ends.b.receive(*receive)
        ends.a.post(SEND, inline(BYTES[:nbytes]))
        cqe = ends.b.arrived.next()
        assert (cqe.opcode, cqe.counter, cqe.byte_cnt) == (RESP_SEND, index, nbytes)
        raw = ends.b.arrived.ring[index].tobytes()
        assert raw[63] & 0x0C == 0x04
        assert raw[:32] == BYTES[:nbytes].ljust(32, b"\0")
        assert cqe.payload == BYTES[:nbytes]
        assert not ends.there.bytes.any()
    assert ends.b.qp.state == QpState.RTS


def test_pieces_are_put_together(ends):
    ends.b.receive(ends.there.at())
    ends.a.post(SEND_IMM, ends.here.at(7, 3), inline(b"and"), ends.here.at(100, 26), imm=0xCAFE)
    cqe = ends.b.arrived.next()
    expected = ends.here.bytes[7:10].tobytes() + b"and" + ends.here.bytes[100:126].tobytes()
    assert (cqe.opcode, cqe.imm, cqe.payload) == (RESP_SEND_IMM, 0xCAFE, expected)


def test_all_else_goes_to_the_buffer(ends):
    """Longer messages, empty ones, and what a WRITE brings."""
    ends.b.receive(ends.there.at(0, 33))
    ends.b.receive(ends.there.at())
    ends.b.receive()
    ends.a.put(SEND, ends.here.at(0, 33))
    ends.a.put(SEND)
    ends.a.put(WRITE_IMM, ends.there.remote(64), ends.here.at(64, 32))
    ends.a.ring()
    cqes = ends.b.arrived.take(3)
    assert [cqe.opcode for cqe in cqes] == [RESP_SEND, RESP_SEND, RESP_WRITE_IMM]
    assert [(cqe.byte_cnt, cqe.payload) for cqe in cqes] == [(33, b""), (0, b""), (32, b"")]
    for part in (slice(0, 33), slice(64, 96)):
        assert np.array_equal(ends.there.bytes[part], ends.here.bytes[part])


def test_owner_bit_through_laps(ends):
    """The format stands beside it in one byte."""
    received = ends.b.qp.ctx.create_cq(4)
    queue = Queue(ends.b.qp.pd, rq=8, recv_cq=received, cqe_inline=True)
    ends.a.reset()
    connect(ends.a, queue)
    for n in range(13):
        queue.receive(ends.there.at())
        ends.a.post(SEND, inline(BYTES[: 1 + n % 4 * 12]))
        cqe = queue.arrived.next()
        assert (cqe.owner, cqe.byte_cnt, cqe.payload != b"") == (n >> 2 & 1, 1 + n % 4 * 12, n % 4 != 3)


def test_other_queues_have_none(ends):
    """It is the receiver that asks for it."""
    plain = Queue(ends.b.qp.pd)
    ends.a.reset()
    connect(ends.a, plain)
    plain.receive(ends.there.at())
    ends.a.post(SEND, ends.here.at(0, 8))
    assert plain.arrived.next().payload == b""
    assert np.array_equal(ends.there.bytes[:8], ends.here.bytes[:8])


def test_unreliable_connections(ends):
    a, b = (Queue(queue.qp.pd, qp_type=QpType.UC, cqe_inline=True) for queue in (ends.a, ends.b))
    connect(a, b)
    b.receive(ends.there.at())
    a.post(SEND, inline(b"unreliable"))
    assert b.arrived.next().payload == b"unreliable"


def test_it_outlives_a_reset(ends):
    ends.again()
    ends.b.receive(ends.there.at())
    ends.a.post(SEND, inline(b"again"))
    assert ends.b.arrived.next().payload == b"again"


def test_receive_errors_carry_nothing(ends):
    ends.b.receive(ends.there.at())
    ends.b.receive(ends.there.at(0, 4))
    ends.a.put(SEND, inline(b"first"))
    ends.a.put(SEND, ends.here.at(0, 40))
    ends.a.ring()
    first, second = ends.b.arrived.take(2)
    assert (first.payload, second.payload) == (b"first", b"")
    assert second.syndrome != 0


# --- into the buffers of the receive ---------------------------------------------------------------------------------


@dataclass
class Mailbox:
    """A QP that sends, and one that receives with payload in its completions; `memory` is the receiver's."""

    sender: QP
    sent: CQ
    receiver: QP
    received: CQ
    pd: PD
    srq: SRQ | None
    memory: Buffer

    def post(self, *sges: Sge, wr_id: int = 0) -> None:
        (self.srq or self.receiver).post_recv(RecvWr(sges=sges, wr_id=wr_id))

    def sge(self, offset: int, nbytes: int) -> Sge:
        return Sge(self.memory.address + offset, nbytes, self.memory.key)

    def send(self, payload: bytes, imm: int | None = None) -> Completion:
        """What completes at the receiver."""
        opcode = WrOpcode.SEND if imm is None else WrOpcode.SEND_WITH_IMM
        self.sender.post_send(SendWr(opcode=opcode, inline=payload, imm=imm or 0))
        (one,) = until(self.received.poll, "the message")
        until(self.sent.poll, "the send")
        return one


@pytest.fixture(params=WHERE, ids=IDS)
def names(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param


@pytest.fixture(params=[False, True], ids=["receive queue", "shared"])
def mailbox(names: tuple[str, ...], request: pytest.FixtureRequest) -> Iterator[Mailbox]:
    with ExitStack() as stack:
        contexts = [stack.enter_context(verbs.open(name)) for name in names]
        near, far = contexts[0].create_pd(), contexts[-1].create_pd()
        sent, received = contexts[0].create_cq(16), contexts[-1].create_cq(16)
        srq = far.create_srq(8, receive_max_sges=3) if request.param else None
        own = {} if srq else {"rq_wr": 8, "receive_max_sges": 3}
        receiver = far.create_qp(receive_cq=received, srq=srq, cqe_inline=True, **own)  # type: ignore[arg-type]
        sender = near.create_qp(sq_wr=8, send_cq=sent, max_inline_data=200)
        sender.connect(receiver)
        yield Mailbox(sender, sent, receiver, received, far, srq, Buffer(far, 1024))


@pytest.mark.parametrize("nbytes", [0, 1, 31, 32, 33, 200])
def test_completion_and_bytes(mailbox, nbytes):
    """Nobody who posts and polls sees how the bytes came."""
    mailbox.post(mailbox.sge(10, 5), mailbox.sge(100, 3), mailbox.sge(200, 500), wr_id=7)
    one = mailbox.send(BYTES[:nbytes], imm=3)
    assert one == Completion(
        wr_id=7, status=WcStatus.SUCCESS, opcode=WcOpcode.RECV, byte_len=nbytes, imm=3, qp_num=mailbox.receiver.qpn,
        flags=WcFlags.WITH_IMM,
    )
    expected = bytearray(1024)
    for at, start, end in ((10, 0, 5), (100, 5, 8), (200, 8, 508)):
        part = BYTES[:nbytes][start:end]
        expected[at : at + len(part)] = part
    assert mailbox.memory.bytes.tobytes() == expected
    assert not mailbox.memory.whole[: mailbox.memory.start].any()


def test_any_scatter_list(mailbox):
    """The bytes are those that the NIC would have put there: those of a receive without payload in its completion."""

    @settings(max_examples=25)
    @given(st.lists(st.integers(0, 12), max_size=3), st.binary(min_size=1, max_size=32))
    def any_list(sizes, payload):
        mailbox.memory.bytes[:] = 0
        offsets = [300 * i for i in range(len(sizes))]
        mailbox.post(*(mailbox.sge(at, nbytes) for at, nbytes in zip(offsets, sizes, strict=True)))
        one = mailbox.send(payload)
        assert one.status == (WcStatus.SUCCESS if len(payload) <= sum(sizes) else WcStatus.LOC_LEN_ERR)
        whole = b"".join(
            mailbox.memory.bytes[at : at + nbytes].tobytes() for at, nbytes in zip(offsets, sizes, strict=True)
        )
        assert whole == payload[: sum(sizes)].ljust(sum(sizes), b"\0")

    any_list()


def test_addresses_are_those_of_the_key(mailbox):
    """Of a region that counts from elsewhere, too."""
    target = np.zeros(64, np.uint8)
    with mailbox.pd.register(target, iova=0x7000) as mr:
        mailbox.post(Sge(0x7000 + 8, 56, mr.lkey))
        assert mailbox.send(b"offsets").status == WcStatus.SUCCESS
        assert target.tobytes() == bytes(8) + b"offsets" + bytes(49)


def test_keys_are_checked(mailbox):
    """The NIC has not looked at them: what it would have refused is an error of the completion alone."""
    memory = np.zeros(64, np.uint8)
    address = int(memory.ctypes.data)
    readonly = mailbox.pd.register(memory, Access.LOCAL_READ)
    foreign = mailbox.pd.ctx.create_pd().register(memory)
    short = mailbox.pd.register(memory[:8])
    gone = mailbox.pd.register(memory)
    gone.close()
    bad = [(readonly.lkey, 0), (foreign.lkey, 0), (short.lkey, 4), (short.lkey, -1), (gone.lkey, 0), (0xBAD00, 0)]
    for lkey, offset in bad:
        mailbox.post(Sge(address + offset, 8, lkey), wr_id=5)
        one = mailbox.send(b"12345678")
        assert (one.status, one.wr_id) == (WcStatus.LOC_PROT_ERR, 5)
        assert not memory.any()
    assert mailbox.receiver.state == QpState.RTS
    mailbox.post(Sge(address, 8, short.lkey))
    assert mailbox.send(b"12345678").status == WcStatus.SUCCESS
    assert memory.tobytes()[:8] == b"12345678"


def test_many_in_a_row(mailbox):
    """Laps of both rings; each message has its own place."""
    for lap in range(5):
        mailbox.memory.bytes[:] = 0
        for n in range(8):
            mailbox.post(mailbox.sge(32 * n, 32), wr_id=n)
        for n in range(8):
            mailbox.sender.post_send(SendWr(opcode=WrOpcode.SEND, inline=bytes([lap + 1]) * (4 * n + 4)))
        found: list[Completion] = []
        until(lambda found=found: len(found.__iadd__(mailbox.received.poll())) == 8, "8 messages")
        assert [(one.wr_id, one.byte_len) for one in found] == [(n, 4 * n + 4) for n in range(8)]
        sent: list[Completion] = []
        until(lambda sent=sent: len(sent.__iadd__(mailbox.sent.poll())) == 8, "8 sends")
        rows = mailbox.memory.bytes[:256].reshape(8, 32)
        assert [int((row == lap + 1).sum()) for row in rows] == [4 * n + 4 for n in range(8)]


# --- creation --------------------------------------------------------------------------------------------------------


def test_a_ring_that_nobody_posts_to_here():
    """With receives of somebody else's there is no list to copy the bytes to."""
    with verbs.open("soft0") as ctx:
        assert ctx.query_device().is_cqe_inline_supported
        pd, cq = ctx.create_pd(), ctx.create_cq(4)
        srq = pd.create_srq(4, srq_type=SrqType.CONTIGUOUS, external_datapath=True)
        with pytest.raises(InvalidValueError, match="whose receives are not posted here: set external_datapath"):
            pd.create_qp(receive_cq=cq, srq=srq, cqe_inline=True)
        assert pd.create_qp(receive_cq=cq, srq=srq, cqe_inline=True, external_datapath=True).init_attr.cqe_inline


def test_payload_of_a_queue_that_somebody_else_drives():
    """With an external data path the completions are left as they are, for a kernel to read."""
    with verbs.open("soft0") as ctx:
        pd, cq, umem = ctx.create_pd(), ctx.create_cq(4, external_datapath=True), ctx.register_umem(HostMemory(8192))
        qp = pd.create_qp(
            rq_wr=4, receive_cq=cq, cqe_inline=True, external_umem=(umem, 0), external_dbr_umem=(umem, 4096)
        )
        sender = Queue(pd)
        sender.qp.connect(qp)
        view(qp.dbr_address, 4, ">u4")[0] = 1  # one receive
        sender.post(SEND, inline(b"for a kernel"))
        assert Completions(cq).next().payload == b"for a kernel"
