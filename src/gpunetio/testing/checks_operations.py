"""What every operation of a reliable connection does, byte for byte, and the order in which requests complete."""

from __future__ import annotations

from collections.abc import Callable

from ..enums import Access, SendFlags, WcFlags, WcOpcode, WcStatus, WrOpcode
from ..errors import DocaErrorCode, InvalidValueError
from ..verbs import BadWrError, Completion, RecvWr, SendWr, Sge, wait_cq_pi
from .kit import check
from .rig import Rig, Side, Violation, same

_QUIET = SendFlags(0)
_LONG = 1 << 16
_WORD = 1 << 64
_IMM = 0x89ABCDEF


def _sizes(a: Side, b: Side) -> tuple[int, ...]:
    """Around the boundaries of packets."""
    mtu = min(side.ctx.query_port().active_mtu for side in (a, b))
    return (0, 1, mtu - 1, mtu, mtu + 1, _LONG)


def _is(done: Completion, wr_id: int, opcode: WcOpcode, byte_len: int | None = None, imm: int | None = None) -> None:
    """A success of this request. `byte_len` of a send or a WRITE means nothing."""
    found = (done.wr_id, done.status, done.opcode, done.imm, bool(done.flags & WcFlags.WITH_IMM))
    same("completion", found, (wr_id, WcStatus.SUCCESS, opcode, imm, imm is not None))
    if byte_len is not None:
        same("byte_len", done.byte_len, byte_len)


def _one_way(rig: Rig, opcode: WrOpcode, completion: WcOpcode, received: WcOpcode | None, with_imm: bool) -> None:
    """SENDs and WRITEs of all sizes, each to another place."""
    a, b = rig.pair()
    imm = _IMM if with_imm else None
    remote = received != WcOpcode.RECV
    for number, nbytes in enumerate(_sizes(a, b)):
        here, there = 3 + 17 * number, 70_001 + 1000 * number
        if received is not None:
            b.receive(*(() if remote else (b.memory.sge(there, nbytes + 5),)), wr_id=100 + number)
        to = b.memory.remote(there) if remote else {}
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
    """A SEND of any size goes into the oldest receive, whose completion tells the length.

    Source: IBTA 9.4.1; ibv_post_send(3), ibv_poll_cq(3).
    """
    _one_way(rig, WrOpcode.SEND, WcOpcode.SEND, WcOpcode.RECV, False)


@check
def send_with_immediate(rig: Rig) -> None:
    """The same, with 32 bits that come out of the completion as they went in.

    Source: IBTA 9.4.1; ibv_post_send(3).
    """
    _one_way(rig, WrOpcode.SEND_WITH_IMM, WcOpcode.SEND, WcOpcode.RECV, True)


@check
def write(rig: Rig) -> None:
    """A WRITE of any size goes where its address and key say, and the responder gets no completion.

    Source: IBTA 9.4.3; ibv_post_send(3).
    """
    _one_way(rig, WrOpcode.RDMA_WRITE, WcOpcode.RDMA_WRITE, None, False)


@check
def write_with_immediate(rig: Rig) -> None:
    """The same, and it uses a receive up, whose memory stays as it is and whose completion tells the length.

    Source: IBTA 9.4.3; ibv_poll_cq(3) (IBV_WC_RECV_RDMA_WITH_IMM).
    """
    _one_way(rig, WrOpcode.RDMA_WRITE_WITH_IMM, WcOpcode.RDMA_WRITE, WcOpcode.RECV_RDMA_WITH_IMM, True)


@check
def read(rig: Rig) -> None:
    """A READ of any size brings the responder's bytes, and tells their number.

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
    """A fetch and add brings the old word and leaves the sum, modulo 2^64.

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
    """A compare and swap brings the old word, and changes it only if it was the one that was expected.

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
    """Adds of several queue pairs to one word are each carried out once: all old values differ.

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
    """Bytes are gathered from the entries of a request and scattered over those of a receive, in order.

    Source: IBTA 10.7.2; ibv_post_send(3), ibv_post_recv(3).
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
    by_address = Sge(source.mr.address, 50, 0)  # a key that is none
    a.post(WrOpcode.RDMA_WRITE, by_address, flags=SendFlags.INLINE, **b.memory.remote(0))
    source.bytes[:] = 0
    a.succeed(0)
    b.memory.expect_copy(0, source, 0, 50)
    b.memory.verify("inline bytes by address")


@check
def unsignalled_requests(rig: Rig) -> None:
    """What is not signalled makes no completion, is done when a later one completes, and frees its slot then.

    Source: IBTA 10.8.6; ibv_post_send(3) (IBV_SEND_SIGNALED).
    """
    a, b = rig.pair()
    for lap in range(4):
        for number in range(7):
            at = 64 * number + lap
            a.post(WrOpcode.RDMA_WRITE, a.memory.sge(at, 30), signaled=False, **b.memory.remote(at))
            b.memory.expect_copy(at, a.memory, at, 30)
        a.post(WrOpcode.RDMA_WRITE, a.memory.sge(600, 1), wr_id=lap, **b.memory.remote(600))
        b.memory.expect_copy(600, a.memory, 600, 1)
        a.succeed(lap)
        b.memory.verify("unsignalled WRITEs")


@check
def all_requests_signalled(rig: Rig) -> None:
    """With sq_sig_all every request makes a completion.

    Source: ibv_create_qp(3); doca_verbs_qp_init_attr_set_sq_sig_all.
    """
    a, b = rig.pair(near={"sq_sig_all": True})
    for number in range(3):
        a.post(WrOpcode.RDMA_WRITE, a.memory.sge(), signaled=False, wr_id=number, **b.memory.remote())
    a.succeed(0, 1, 2)


@check
def fence(rig: Rig) -> None:
    """A request with a fence starts after the READs and atomics before it: it sends on what they brought.

    Source: IBTA 10.8.3.3, table of ordering rules; ibv_post_send(3) (IBV_SEND_FENCE).
    """
    a, b = rig.pair()
    b.memory.set_word(30_000, 0x1122334455667788)
    for number in range(4):
        here, there = 1000 * number, 40_000 + 10_000 * number
        a.post(WrOpcode.RDMA_READ, a.memory.sge(here, 9000), signaled=False, **b.memory.remote(500))
        a.post(WrOpcode.ATOMIC_FETCH_AND_ADD, a.memory.sge(100_000, 8), signaled=False, add=1,
               **b.memory.remote(30_000))  # fmt: skip
        parts = (a.memory.sge(here, 9000), a.memory.sge(100_000, 8))
        a.post(WrOpcode.RDMA_WRITE, *parts, flags=SendFlags.FENCE, wr_id=number, **b.memory.remote(there))
        a.succeed(number)
        a.memory.expect_copy(here, b.memory, 500, 9000)
        a.memory.expect_copy(100_000, b.memory, 30_000, 8)
        b.memory.expect_copy(there, a.memory, here, 9000)
        b.memory.expect_copy(there + 9000, a.memory, 100_000, 8)
        b.memory.expect_word(30_000, 0x1122334455667788 + number + 1)
        for side in (a, b):
            side.memory.verify("a fenced WRITE")


@check
def completion_order(rig: Rig) -> None:
    """Requests of one queue complete in the order of posting, whatever they are and however long they take.

    Source: IBTA 9.5, 10.8.3 (completions in the order of the queue); ibv_poll_cq(3).
    """
    a, b = rig.pair(near={"sq_wr": 32})
    old = b.memory.word(200_000)
    for number in range(3):
        b.receive(b.memory.sge(100_000, _LONG), wr_id=number)
    for turn in range(3):
        first = 5 * turn
        a.post(WrOpcode.RDMA_READ, a.memory.sge(70_000, _LONG), wr_id=first, **b.memory.remote())
        a.post(WrOpcode.RDMA_WRITE, a.memory.sge(0, 1), wr_id=first + 1, **b.memory.remote(210_000))
        a.post(WrOpcode.ATOMIC_FETCH_AND_ADD, a.memory.sge(0, 8), add=1, wr_id=first + 2, **b.memory.remote(200_000))
        a.post(WrOpcode.SEND, a.memory.sge(0, 100), wr_id=first + 3)
        a.post(WrOpcode.RDMA_WRITE, a.memory.sge(0, 10_000), wr_id=first + 4, **b.memory.remote(210_000))
    done = a.succeed(*range(15))
    kinds = [WcOpcode.RDMA_READ, WcOpcode.RDMA_WRITE, WcOpcode.FETCH_ADD, WcOpcode.SEND, WcOpcode.RDMA_WRITE]
    same("opcodes", [one.opcode for one in done], kinds * 3)
    b.arrive(0, 1, 2)
    same("the word", b.memory.word(200_000), (old + 3) % _WORD)


@check
def receives_complete_in_order(rig: Rig) -> None:
    """Messages use receives up in the order of posting, and arrive in the order of sending.

    Source: IBTA 9.5, 10.8.3; ibv_post_recv(3).
    """
    a, b = rig.pair()
    for lap in range(3):
        for number in range(8):
            b.receive(b.memory.sge(8000 * number, 8000), wr_id=100 * lap + number)
        lengths = (8000, 0, 1, 4097, 7, 4096, 100, 8000)
        for number, nbytes in enumerate(lengths):
            a.post(WrOpcode.SEND_WITH_IMM, a.memory.sge(9000 * number, nbytes), imm=number, wr_id=number)
            b.memory.expect_copy(8000 * number, a.memory, 9000 * number, nbytes)
        a.succeed(*range(8))
        done = b.arrive(*(100 * lap + number for number in range(8)))
        same("lengths and immediate data", [(one.byte_len, one.imm) for one in done],
             [(nbytes, number) for number, nbytes in enumerate(lengths)])  # fmt: skip
        b.memory.verify("SENDs")


@check
def many_in_flight(rig: Rig) -> None:
    """A queue pair carries out what was posted at once, several times around its ring.

    Source: ibv_post_send(3).
    """
    a, b = rig.pair(near={"sq_wr": 64, "send_cq": rig.near.create_cq(256)})
    nbytes, places = 2000, 40
    for lap in range(6):
        requests = []
        for number in range(places):
            sges, to = [a.memory.sge((nbytes + lap) * number, nbytes)], b.memory.remote(nbytes * number)
            requests.append(SendWr(opcode=WrOpcode.RDMA_WRITE, sges=sges, wr_id=number, **to))
        a.qp.post_send(*requests)
        a.succeed(*range(places))
        for number in range(places):
            b.memory.expect_copy(nbytes * number, a.memory, (nbytes + lap) * number, nbytes)
        b.memory.verify(f"lap {lap}")


@check
def many_reads_in_flight(rig: Rig) -> None:
    """More READs and atomics than the responder keeps at a time are carried out all the same, each once.

    Source: IBTA 9.7.3.1, 10.3.1; ibv_modify_qp(3) (max_rd_atomic, max_dest_rd_atomic).
    """
    for most in (1, 4):
        a, b = rig.pair(near={"sq_wr": 32}, max_rd_atomic=most)
        b.memory.set_word(0, 0)
        for number in range(12):
            a.post(WrOpcode.ATOMIC_FETCH_AND_ADD, a.memory.sge(8 * number, 8), add=1, wr_id=2 * number,
                   **b.memory.remote(0))  # fmt: skip
            at = 1000 + 6000 * number
            a.post(WrOpcode.RDMA_READ, a.memory.sge(at, 6000), wr_id=2 * number + 1, **b.memory.remote(at))
            a.memory.expect_word(8 * number, number)
            a.memory.expect_copy(at, b.memory, at, 6000)
        a.succeed(*range(24))
        a.memory.verify(f"{most} READs and atomics at a time")
        same("the sum", b.memory.word(0), 12)


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
    """A queue pair whose peer it is itself works.

    Source: IBTA 10.2.4, 17.2.6 (loopback); ibv_modify_qp(3).
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
    """Packet sequence numbers have 24 bits and go on from 0, in either direction.

    Source: IBTA 9.2.2, 9.7.1.
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
def bad_requests(rig: Rig) -> None:
    """The first request that is refused is named; those before it are carried out, those behind it are not posted.

    Source: ibv_post_send(3), ibv_post_recv(3) (bad_wr).
    """
    a, b = rig.pair(near={"max_inline_data": 28})
    good = SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[a.memory.sge()], wr_id=1, **b.memory.remote())
    too_long = bytes(a.qp.init_attr.max_inline_data + 1)
    for what, bad in (
        ("more entries than the queue has", SendWr(opcode=WrOpcode.SEND, sges=[a.memory.sge(0, 1)] * 4)),
        ("more inline bytes than the queue takes", SendWr(opcode=WrOpcode.SEND, inline=too_long)),
        ("a READ that is inline", SendWr(opcode=WrOpcode.RDMA_READ, inline=b"", **b.memory.remote())),
        ("an atomic of 4 bytes", SendWr(opcode=WrOpcode.ATOMIC_FETCH_AND_ADD, sges=[a.memory.sge(0, 4)])),
        ("a WAIT of an ordinary queue pair", wait_cq_pi(a.sent, 0)),
    ):
        error = _bad_wr(what, lambda bad=bad: a.qp.post_send(good, bad, good))
        same("the request that was named", (error.index, error.code), (1, InvalidValueError.code))
        a.succeed(1)
    error = _bad_wr("a receive of 4 entries", lambda: b.qp.post_recv(RecvWr(), RecvWr(sges=[b.memory.sge()] * 4)))
    same("the receive that was named", error.index, 1)


def _bad_wr(what: str, call: Callable[[], None]) -> BadWrError:
    try:
        call()
    except BadWrError as error:
        return error
    raise Violation(f"{what} was not refused")


@check
def full_queues(rig: Rig) -> None:
    """A queue takes as many requests as it has room for; the next is refused, until completions were polled.

    Source: ibv_post_send(3), ibv_post_recv(3) (ENOMEM); DOCA_ERROR_FULL.
    """
    a, b = rig.pair(near={"sq_wr": 4, "send_max_sges": 1})
    room = a.qp.sq_entries
    writes = [SendWr(opcode=WrOpcode.RDMA_WRITE, wr_id=number, **b.memory.remote()) for number in range(room + 1)]
    for _ in range(3):
        error = _bad_wr("one request more than there is room", lambda: a.qp.post_send(*writes))
        same("the request that was named", (error.index, error.code), (room, DocaErrorCode.FULL))
        a.succeed(*range(room))
    room = b.qp.rq_entries
    receives = [RecvWr(wr_id=number) for number in range(room + 1)]
    error = _bad_wr("one receive more than there is room", lambda: b.qp.post_recv(*receives))
    same("the receive that was named", (error.index, error.code), (room, DocaErrorCode.FULL))


@check
def wait_for_a_completion(rig: Rig) -> None:
    """A WAIT holds its queue until the CQ has so many completions, and then what is behind it goes.

    Source: doca_verbs_bridge_set_wait_cq_pi_wr; PRM, Core-Direct (WAIT).
    """
    pd = rig.near.create_pd()
    a, b = rig.pair(near={"core_direct_master": True, "pd": pd})
    c, d = rig.pair(near={"pd": pd})
    a.qp.post_send(
        wait_cq_pi(c.sent, 1, wr_id=1),
        SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[a.memory.sge(0, 64)], wr_id=2, **b.memory.remote(0)),
    )
    for number in range(2):
        rig.quiet(f"completions while {number} of 2 are there", a.sent.poll)
        b.memory.verify("a WRITE behind a WAIT")
        c.post(WrOpcode.RDMA_WRITE, c.memory.sge(), wr_id=number, **d.memory.remote())
        c.succeed(number)
    done = a.succeed(1, 2)
    same("opcodes", [one.opcode for one in done], [WcOpcode.WAIT_CQ_PI, WcOpcode.RDMA_WRITE])
    b.memory.expect_copy(0, a.memory, 0, 64)
    b.memory.verify("a WRITE behind a WAIT that is over")
    a.qp.post_send(wait_cq_pi(c.sent, 0, wr_id=3))
    a.succeed(3)


@check
def wait_for_a_receive(rig: Rig) -> None:
    """A WAIT for a receive passes a message on when it has come, with no program in between.

    Source: doca_verbs_bridge_set_wait_cq_pi_wr; PRM, Core-Direct (WAIT).
    """
    a, b = rig.pair(far={"core_direct_master": True})
    b.receive(b.memory.sge(0, 3000), wr_id=1)
    b.qp.post_send(
        wait_cq_pi(b.received, 0, flags=_QUIET),
        SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[b.memory.sge(0, 3000)], wr_id=2, **a.memory.remote(100_000)),
    )
    a.post(WrOpcode.SEND, a.memory.sge(0, 3000))
    a.succeed(0)
    b.succeed(2)
    b.arrive(1)
    a.memory.expect_copy(100_000, a.memory, 0, 3000)
    a.memory.verify("a message that was passed back")


@check
def writes_and_sends_in_order(rig: Rig) -> None:
    """When a SEND has arrived, the bytes of the WRITEs before it are there.

    Source: IBTA 9.5 (ordering of RDMA WRITE before SEND); 10.8.3.
    """
    a, b = rig.pair()
    for number in range(8):
        b.receive(wr_id=number)
        a.post(WrOpcode.RDMA_WRITE, a.memory.sge(number, _LONG), signaled=False, **b.memory.remote(0))
        a.post(WrOpcode.SEND, wr_id=number)
        b.arrive(number)
        b.memory.expect_copy(0, a.memory, number, _LONG)
        b.memory.verify("WRITEs before a SEND")
        a.succeed(number)


@check
def relaxed_ordering(rig: Rig) -> None:
    """A region may be registered for relaxed ordering: when the completion is there, so are the bytes.

    Source: ibv_reg_mr(3) (IBV_ACCESS_RELAXED_ORDERING).
    """
    a, b = rig.pair(far={"access": Access.all() | Access.RELAXED_ORDERING})
    b.receive()
    a.post(WrOpcode.RDMA_WRITE_WITH_IMM, a.memory.sge(0, _LONG), **b.memory.remote(0))
    a.succeed(0)
    b.arrive(0)
    b.memory.expect_copy(0, a.memory, 0, _LONG)
    b.memory.verify("a WRITE with immediate data")
