"""The effect of every operation of a reliable connection, byte for byte."""

from __future__ import annotations

from ..enums import Access, SendFlags, WcFlags, WcOpcode, WcStatus, WrOpcode
from ..verbs import Completion, Sge
from .kit import check
from .rig import Remote, Rig, Side, same

_LONG = 1 << 16
_WORD = 1 << 64
_IMM = 0x89ABCDEF


def _sizes(a: Side, b: Side) -> tuple[int, ...]:
    """Return sizes around the boundaries of packets."""
    mtu = min(side.ctx.query_port().active_mtu for side in (a, b))
    return (0, 1, mtu - 1, mtu, mtu + 1, _LONG)


def _is(done: Completion, wr_id: int, opcode: WcOpcode, byte_len: int | None = None, imm: int | None = None) -> None:
    """Check that a completion is a success of this request. `byte_len` of a send or a WRITE means nothing."""
    found = (done.wr_id, done.status, done.opcode, done.imm, bool(done.flags & WcFlags.WITH_IMM))
    same("completion", found, (wr_id, WcStatus.SUCCESS, opcode, imm, imm is not None))
    if byte_len is not None:
        same("byte_len", done.byte_len, byte_len)


def _one_way(rig: Rig, opcode: WrOpcode, completion: WcOpcode, received: WcOpcode | None, with_imm: bool) -> None:
    """Check SENDs or WRITEs of all sizes, each to another place."""
    a, b = rig.pair()
    imm = _IMM if with_imm else None
    remote = received != WcOpcode.RECV
    for number, nbytes in enumerate(_sizes(a, b)):
        here, there = 3 + 17 * number, 70_001 + 1000 * number
        if received is not None:
            b.receive(*(() if remote else (b.memory.sge(there, nbytes + 5),)), wr_id=100 + number)
        to = b.memory.remote(there) if remote else Remote()
        a.post(opcode, a.memory.sge(here, nbytes), wr_id=number, imm=imm or 0, **to)
        (done,) = a.sends()
        _is(done, number, completion)
        same("queue pair of the completion", done.qp_num, a.qp.qpn)
        if received is not None:
            (arrived,) = b.receives()
            _is(arrived, 100 + number, received, nbytes, imm)
            same("queue pair of the receive", arrived.qp_num, b.qp.qpn)
        b.memory.expect_copy(there, a.memory, here, nbytes)
        b.memory.verify(f"{opcode.name} of {nbytes} bytes")
    same("completions of receives", b.received.poll(), [])
    a.memory.verify(opcode.name)


@check
def send(rig: Rig) -> None:
    """A SEND of any size goes into the oldest receive, and its completion has the length.

    Source: IBTA 9.4.1; ibv_post_send(3), ibv_poll_cq(3).
    """
    _one_way(rig, WrOpcode.SEND, WcOpcode.SEND, WcOpcode.RECV, False)


@check
def send_with_immediate(rig: Rig) -> None:
    """A SEND with immediate data does the same, and the completion has the same 32 bits.

    Source: IBTA 9.4.1; ibv_post_send(3).
    """
    _one_way(rig, WrOpcode.SEND_WITH_IMM, WcOpcode.SEND, WcOpcode.RECV, True)


@check
def write(rig: Rig) -> None:
    """A WRITE of any size goes to its address and key, and the responder gets no completion.

    Source: IBTA 9.4.3; ibv_post_send(3).
    """
    _one_way(rig, WrOpcode.RDMA_WRITE, WcOpcode.RDMA_WRITE, None, False)


@check
def write_with_immediate(rig: Rig) -> None:
    """A WRITE with immediate data also uses up a receive: its memory is unchanged, its completion has the length.

    Source: IBTA 9.4.3; ibv_poll_cq(3) (IBV_WC_RECV_RDMA_WITH_IMM).
    """
    _one_way(rig, WrOpcode.RDMA_WRITE_WITH_IMM, WcOpcode.RDMA_WRITE, WcOpcode.RECV_RDMA_WITH_IMM, True)


@check
def read(rig: Rig) -> None:
    """A READ of any size returns the responder's bytes and their number.

    Source: IBTA 9.4.4; ibv_post_send(3).
    """
    a, b = rig.pair()
    for number, nbytes in enumerate(_sizes(a, b)):
        here, there = 70_003 + 1000 * number, 1 + 17 * number
        a.post(WrOpcode.RDMA_READ, a.memory.sge(here, nbytes), wr_id=number, **b.memory.remote(there))
        _is(a.sends()[0], number, WcOpcode.RDMA_READ, nbytes)
        a.memory.expect_copy(here, b.memory, there, nbytes)
        a.memory.verify(f"READ of {nbytes} bytes")
    b.memory.verify("READ")


@check
def fetch_and_add(rig: Rig) -> None:
    """A fetch and add returns the old word and leaves the sum, modulo 2^64.

    Source: IBTA 9.4.5; ibv_post_send(3).
    """
    a, b = rig.pair()
    value = _WORD - 2
    b.memory.set_word(64, value)
    for number, add in enumerate((1, 1, 1, 1 << 63, _WORD - 7)):
        a.post(WrOpcode.ATOMIC_FETCH_AND_ADD, a.memory.sge(8 * number, 8), add=add, **b.memory.remote(64))
        _is(a.sends()[0], 0, WcOpcode.FETCH_ADD, 8)
        a.memory.expect_word(8 * number, value)
        value = (value + add) % _WORD
        b.memory.expect_word(64, value)
        for side in (a, b):
            side.memory.verify(f"adding {add:#x}")


@check
def compare_and_swap(rig: Rig) -> None:
    """A compare and swap returns the old word, and changes it only if it has the expected value.

    Source: IBTA 9.4.5; ibv_post_send(3).
    """
    a, b = rig.pair()
    value = 0x0123456789ABCDEF
    b.memory.set_word(128, value)
    for number, (compare, swap) in enumerate(((value, 5), (value, 6), (5, _WORD - 1), (_WORD - 1, 0))):
        to = b.memory.remote(128)
        a.post(WrOpcode.ATOMIC_CMP_AND_SWP, a.memory.sge(8 * number, 8), compare=compare, swap=swap, **to)
        _is(a.sends()[0], 0, WcOpcode.COMP_SWAP, 8)
        a.memory.expect_word(8 * number, value)
        value = swap if value == compare else value
        b.memory.expect_word(128, value)
        for side in (a, b):
            side.memory.verify(f"swapping {compare:#x} for {swap:#x}")


@check
def atomics_of_several_queue_pairs(rig: Rig) -> None:
    """Adds of several queue pairs to one word are each executed once: all old values differ.

    Source: IBTA 9.4.5 (atomic against each other within an HCA).
    """
    a, b = rig.pair()
    c, d = rig.pair(near={"pd": a.pd}, far={"pd": b.pd})
    each, old = 12, []
    b.memory.set_word(0, 0)
    for number in range(each):
        for one in (a, c):
            to = b.memory.remote(0)
            one.post(WrOpcode.ATOMIC_FETCH_AND_ADD, one.memory.sge(8 * number, 8), add=1, wr_id=number, **to)
    for one in (a, c):
        one.succeed(*range(each))
        old += [one.memory.word(8 * number) for number in range(each)]
    same("old values", sorted(old), list(range(2 * each)))
    same("the sum", b.memory.word(0), 2 * each)
    d.memory.verify("adds to other memory")


@check
def gather_and_scatter(rig: Rig) -> None:
    """Bytes are gathered from the entries of a request and scattered to those of a receive, in order.

    Source: IBTA 10.7; ibv_post_send(3), ibv_post_recv(3).
    """
    a, b = rig.pair()
    for sources, targets in (
        (((0, 1), (5001, 4999), (20_000, 3)), ((0, 7), (1000, 5000), (9000, 100))),
        (((0, 8), (64, 0), (128, 8)), ((0, 0), (32, 16), (64, 1))),
        (((7, 10_000),), ((0, 4096), (50_000, 4096), (60_001, 4096))),
    ):
        message = b"".join(bytes(a.memory.bytes[at : at + nbytes]) for at, nbytes in sources)
        b.receive(*(b.memory.sge(at, nbytes) for at, nbytes in targets))
        a.post(WrOpcode.SEND, *(a.memory.sge(at, nbytes) for at, nbytes in sources))
        a.succeed(0)
        (arrived,) = b.receives()
        _is(arrived, 0, WcOpcode.RECV, len(message))
        _scatter(b, targets, message)
        b.memory.verify(f"a SEND from {sources} into {targets}")
    places = ((100_000, 5), (101_000, 0), (102_000, 9000))
    message = bytes(b.memory.bytes[11 : 11 + 9005])
    a.post(WrOpcode.RDMA_READ, *(a.memory.sge(at, nbytes) for at, nbytes in places), **b.memory.remote(11))
    a.succeed(0)
    _scatter(a, places, message)
    a.memory.verify("a READ into several entries")


def _scatter(side: Side, places: tuple[tuple[int, int], ...], message: bytes) -> None:
    for at, nbytes in places:
        part, message = message[:nbytes], message[nbytes:]
        side.memory.image[at : at + len(part)] = list(part)


@check
def inline(rig: Rig) -> None:
    """Inline bytes need no key, and may change as soon as the request is posted.

    Source: ibv_post_send(3) (IBV_SEND_INLINE).
    """
    a, b = rig.pair(near={"max_inline_data": 60})
    for nbytes in (0, 1, 28, 60, a.qp.init_attr.max_inline_data):
        payload = bytes(range(1, nbytes + 1))
        b.receive(b.memory.sge(0, 1000))
        a.post(WrOpcode.RDMA_WRITE, inline=payload, wr_id=1, **b.memory.remote(2000))
        a.post(WrOpcode.SEND, inline=payload, wr_id=2)
        for place in (0, 2000):
            b.memory.image[place : place + nbytes] = list(payload)
        a.succeed(1, 2)
        _is(b.receives()[0], 0, WcOpcode.RECV, nbytes)
        b.memory.verify(f"{nbytes} bytes inline")
    source = rig.memory(a.pd, 64)
    by_address = Sge(source.mr.address, 50, 0)  # an invalid key
    a.post(WrOpcode.RDMA_WRITE, by_address, flags=SendFlags.INLINE, **b.memory.remote(0))
    source.bytes[:] = 0
    a.succeed(0)
    b.memory.expect_copy(0, source, 0, 50)
    b.memory.verify("inline bytes by address")


@check
def both_directions(rig: Rig) -> None:
    """Both ends send at the same time.

    Source: IBTA 9.7.
    """
    a, b = rig.pair()
    for side in (a, b):
        for number in range(8):
            side.receive(side.memory.sge(100_000 + 5000 * number, 5000), wr_id=number)
    for number in range(8):
        for one, other in ((a, b), (b, a)):
            one.post(WrOpcode.SEND, one.memory.sge(5000 * number, 5000), wr_id=number)
            other.memory.expect_copy(100_000 + 5000 * number, one.memory, 5000 * number, 5000)
    for side in (a, b):
        side.succeed(*range(8))
        side.arrive(*range(8))
        side.memory.verify("SENDs in both directions")


@check
def connected_to_itself(rig: Rig) -> None:
    """A queue pair that is connected to itself works.

    Source: IBTA 10.2.4; ibv_modify_qp(3).
    """
    a = rig.side(rig.near)
    rig.connect(a, a)
    a.receive(a.memory.sge(100_000, 5000), wr_id=1)
    a.post(WrOpcode.SEND, a.memory.sge(0, 5000), wr_id=2)
    a.succeed(2)
    a.arrive(1)
    a.memory.expect_copy(100_000, a.memory, 0, 5000)
    a.memory.verify("a SEND to itself")


@check
def packet_numbers_wrap(rig: Rig) -> None:
    """Packet sequence numbers have 24 bits and wrap to 0, in both directions.

    Source: IBTA 9.7.1.
    """
    a, b = rig.pair(psn=0xFFFFFE)
    a.post(WrOpcode.RDMA_WRITE, a.memory.sge(0, _LONG), wr_id=1, **b.memory.remote(0))
    a.post(WrOpcode.RDMA_READ, a.memory.sge(100_000, _LONG), wr_id=2, flags=SendFlags.FENCE, **b.memory.remote(7))
    a.succeed(1, 2)
    b.memory.expect_copy(0, a.memory, 0, _LONG)
    a.memory.expect_copy(100_000, b.memory, 7, _LONG)
    for side in (a, b):
        side.memory.verify("packets around number 0")


@check
def relaxed_ordering(rig: Rig) -> None:
    """A region may be registered for relaxed ordering; the bytes are there when the completion is.

    Source: ibv_reg_mr(3) (IBV_ACCESS_RELAXED_ORDERING).
    """
    a, b = rig.pair(far={"access": Access.all() | Access.RELAXED_ORDERING})
    b.receive()
    a.post(WrOpcode.RDMA_WRITE_WITH_IMM, a.memory.sge(0, _LONG), **b.memory.remote(0))
    a.succeed(0)
    b.arrive(0)
    b.memory.expect_copy(0, a.memory, 0, _LONG)
    b.memory.verify("a WRITE with immediate data")
