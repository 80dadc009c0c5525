"""Sending Ethernet packets from kernels: the WQEs in the ring, read by a plain-Python device that completes them."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eth_kernels import by_hand, poll_each, prepare, send_at, send_each, send_multi, wait_for
from eth_rxq_rig import Crew
from eth_txq_rig import RING, SIDE, TxDevice
from gpunetio import device
from gpunetio.enums import NicHandler
from gpunetio.formats.device_structs import DEV_SIDE

SEND, MULTI, WAIT, NOP = 0x0A, 0x29, 0x0F, 0x00
SCOPES = {"thread": device.THREAD, "warp": device.WARP, "block": device.BLOCK}
SHARING = {"exclusive": device.EXCLUSIVE, "cta": device.CTA, "gpu": device.GPU}
LADDR, LKEY = 0x7000_0000, 0x0BAD_F00D
every_scope = pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)
every_sharing = pytest.mark.parametrize("sharing", SHARING.values(), ids=SHARING)
HANDLERS = (NicHandler.GPU_SM_DB, NicHandler.GPU_SM_NO_DBR, NicHandler.CPU_PROXY)


@pytest.fixture(scope="module", params=["host", pytest.param("auto", marks=pytest.mark.gpu, id="cuda")])
def crew(request) -> Iterator[Crew]:
    with Crew.opened(request.param) as opened:
        yield opened


@pytest.fixture
def tx(crew) -> Iterator[TxDevice]:
    opened = TxDevice(crew, depth=256)
    yield opened
    opened.close()


def sent(tx: TxDevice) -> dict[int, int]:
    """Address by index of each packet that was sent alone."""
    return {wqe.index: wqe.packets[0][0] for wqe in tx.seen if wqe.opcode == SEND}


def send(
    tx: TxDevice, count: int, every: int = 0, nbytes: int = 64, sharing: int = device.GPU,
    scope: int = device.THREAD, grid: int = 1, block: int = 0, code_opt: int = device.DEFAULT,
) -> list[int]:
    """Tickets, of call i of thread t at i · threads + t."""
    threads = grid * (block or tx.crew.by(scope)[1])
    return tx.run(
        send_each, count, LADDR, LKEY, nbytes, every, sharing, scope, code_opt, count=count * threads, scope=scope,
        grid=grid, block=block,
    )


@every_scope
@every_sharing
def test_each_thread_sends(tx, scope, sharing):
    """Each packet once, at the index of its ticket; the packets of a group together; for several laps of the ring."""
    tickets = send(tx, 300 if scope == device.THREAD else 100, sharing=sharing, scope=scope)
    assert sorted(tickets) == list(range(len(tickets)))
    assert sent(tx) == {ticket: LADDR + 16 * number for number, ticket in enumerate(tickets)}
    assert {wqe.packets[0][1:] for wqe in tx.seen} == {(LKEY, 64)}
    assert [wqe.index for wqe in tx.seen if wqe.signalled] == list(range(63, len(tickets), 64))
    assert tx.structure["notified"] == 0
    if scope != device.THREAD:
        size = tx.crew.by(scope)[1]
        groups = [tickets[at : at + size] for at in range(0, len(tickets), size)]
        assert all(group == list(range(group[0], group[0] + size)) for group in groups)


@pytest.mark.parametrize("handler", HANDLERS)
def test_threads_that_share_a_queue(crew, handler):
    """Two blocks, whatever they ring, around a short ring."""
    tx = TxDevice(crew, handler=handler)
    tickets = send(tx, 60, grid=2, block=4)
    assert sorted(tickets) == list(range(480))
    assert sent(tx) == {ticket: LADDR + 16 * number for number, ticket in enumerate(tickets)}
    tx.close()


@pytest.mark.slow
def test_indices_beyond_16_bits(tx):
    """The count of WQEs in CQEs and doorbells wraps."""
    tickets = send(tx, 17_000, every=1000, scope=device.BLOCK)
    assert tickets[-1] == 67_999
    assert len(tx.seen) == 68_000
    assert tx.run(wait_for, 67_999, device.GPU, 1, count=1) == [device.OK]
    assert tx.run(poll_each, 1000, 1, device.GPU, 0, count=1) == [68]


@every_sharing
def test_completions_are_counted_and_taken_once(tx, sharing):
    """Those with `notify`, and not those that free slots, also where they are the same."""
    send(tx, 192, every=3, sharing=sharing)
    signalled = {wqe.index for wqe in tx.seen if wqe.signalled}
    assert signalled == set(range(2, 192, 3)) | {63, 127, 191}
    assert tx.run(poll_each, 10, 6, sharing, 1, count=6) == [10] * 6
    assert tx.run(poll_each, 10, 2, sharing, 0, count=2) == [4, 0]
    assert tx.structure["completed"] == 192
    assert tx.run(poll_each, 0, 1, sharing, 1, count=1) == [0]
    assert tx.run(poll_each, -1, 1, sharing, 1, count=1) == [device.EINVAL]


@every_sharing
def test_completions_that_a_wait_has_passed_are_still_there(tx, sharing):
    tickets = send(tx, 12, every=2, sharing=sharing)
    assert tx.run(wait_for, tickets[-1], sharing, 1, count=1) == [device.OK]
    assert tx.structure["notified"] == 6
    assert tx.run(poll_each, 2, 3, sharing, 1, count=3) == [2, 2, 2]
    assert tx.structure["taken"] == 6


def test_threads_take_different_completions(tx):
    send(tx, 64, every=2)
    found = tx.run(poll_each, 1, 8, device.GPU, 1, count=32, block=4)
    assert found == [1] * 32
    assert tx.structure["taken"] == tx.structure["notified"] == 32


@every_sharing
def test_a_wait_for_a_ticket(tx, sharing):
    tickets = send(tx, 10, every=10, sharing=sharing)
    assert tx.run(wait_for, tickets[4], sharing, 1, count=1) == [device.OK]
    assert tx.run(wait_for, device.EIO, sharing, 1, count=1) == [device.EIO]


@every_sharing
def test_a_look_for_a_ticket(tx, sharing):
    (ticket,) = tx.run(send_each, 1, LADDR, LKEY, 64, 1, sharing, device.THREAD, device.DEFAULT, count=1, most=0)
    assert tx.run(wait_for, ticket, sharing, 0, count=1, most=0) == [device.EBUSY]
    while tx.step():
        pass
    assert tx.run(wait_for, ticket, sharing, 0, count=1) == [device.OK]


def test_waits_end_at_the_deadline(crew):
    tx = TxDevice(crew, timeout=0.05)
    send(tx, 1)
    assert tx.run(wait_for, 0, device.GPU, 1, count=1) == [device.ETIMEDOUT]  # nothing was to complete
    assert tx.run(poll_each, 1, 1, device.GPU, 1, count=1) == [device.ETIMEDOUT]
    tx.close()


def test_a_full_ring(crew):
    """A device that stops: what does not fit ends at the deadline, and leaves no hole."""
    tx = TxDevice(crew, timeout=0.05)
    tickets = tx.run(
        send_each, 66, LADDR, LKEY, 64, 1, device.GPU, device.THREAD, device.DEFAULT, count=66, most=0
    )
    assert tickets == [*range(64), device.ETIMEDOUT, device.ETIMEDOUT]
    assert (tx.index("sq_rsvd_index"), tx.index("sq_wqe_pi")) == (64, 64)
    while tx.step():
        pass
    assert send(tx, 2) == [64, 65]
    tx.close()


def test_a_failed_queue(crew):
    tx = TxDevice(crew, fail_at=5)
    send(tx, 8, every=2)
    assert tx.run(poll_each, 2, 2, device.GPU, 1, count=2) == [2, device.EIO]
    assert tx.run(wait_for, 7, device.GPU, 1, count=1) == [device.EIO]
    side = DEV_SIDE.at(tx.array, SIDE)
    assert (side["err_index"], side["err_syndrome"], side["err_vendor"]) == (5, 4, 0x77)
    assert send(tx, 70, every=1)[-1] == device.EIO
    tx.close()


@every_scope
@pytest.mark.parametrize("nbytes", [13, 0, -1, 65536])
def test_packets_that_cannot_be(tx, scope, nbytes):
    """A thread by itself posts nothing; a group's slots have NOPs."""
    tickets = send(tx, 2, nbytes=nbytes, scope=scope)
    assert set(tickets) == {device.EINVAL}
    assert {wqe.opcode for wqe in tx.seen} == (set() if scope == device.THREAD else {NOP})


def test_a_group_that_is_larger_than_half_of_the_ring(crew):
    tx = TxDevice(crew)
    assert set(send(tx, 1, scope=device.BLOCK, block=32)) == set(range(32))
    assert set(send(tx, 1, scope=device.BLOCK, block=33)) == {device.EINVAL}
    tx.close()


def test_without_a_doorbell(tx):
    send(tx, 3, code_opt=device.SKIP_DB_RINGING)
    assert tx.announced == 0
    assert send(tx, 1) == [3]
    assert len(tx.seen) == 4


# --- times ---------------------------------------------------------------------------------------------------------


@every_scope
@every_sharing
def test_packets_wait_for_a_time(tx, scope, sharing):
    """One WAIT for the group, and its packets behind it."""
    threads = tx.crew.by(scope)[1]
    stamp = 1_700_000_000 << 32 | 123_456_789
    tickets = tx.run(send_at, stamp, LADDR, LKEY, 64, sharing, scope, count=threads, scope=scope)
    assert tickets == list(range(1, threads + 1))
    assert [(wqe.opcode, wqe.until, wqe.signalled) for wqe in tx.seen] == [
        (WAIT, stamp, False), *[(SEND, 0, True)] * threads
    ]
    assert sent(tx) == {n + 1: LADDR + 16 * n for n in range(threads)}


@every_scope
def test_a_queue_that_cannot_wait(tx, scope):
    tx.structure["wait_mask"] = 0
    threads = tx.crew.by(scope)[1]
    tickets = tx.run(send_at, 1, LADDR, LKEY, 64, device.GPU, scope, count=threads, scope=scope)
    assert set(tickets) == {device.EINVAL}
    assert {wqe.opcode for wqe in tx.seen} <= {NOP}


# --- by hand -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packets", [1, 2, 3, 30, 61])
def test_several_packets_in_one_wqe(tx, packets):
    """Their segments are written by many threads, and go on at the beginning of the ring."""
    blocks = 1 + (packets + 1) // 4
    for turn in range(2 * 256 // blocks):
        (first,) = tx.run(send_multi, packets, LADDR, LKEY, 100, 1, device.GPU, count=1, block=4)
        assert first == turn * blocks
    assert [wqe.index for wqe in tx.seen] == [n * blocks for n in range(len(tx.seen))]
    for wqe in tx.seen:
        assert (wqe.opcode, wqe.signalled) == (MULTI, True)
        assert wqe.packets == tuple((LADDR + 16 * n, LKEY, 100) for n in range(packets))
    assert tx.run(poll_each, len(tx.seen), 1, device.GPU, 0, count=1)[0] <= len(tx.seen)


def test_a_long_wqe_completes_if_the_end_of_a_quarter_is_within_it(tx):
    for _ in range(32):
        tx.run(send_multi, 57, LADDR, LKEY, 64, 0, device.GPU, count=1, block=4)
    blocks = 15
    assert [wqe.index for wqe in tx.seen] == [n * blocks for n in range(32)]
    signalled = [wqe.index for wqe in tx.seen if wqe.signalled]
    assert signalled == [n * blocks for n in range(32) if (n * blocks + blocks) // 64 > n * blocks // 64]


@pytest.mark.parametrize(("packets", "rank"), [(0, 0), (62, 0), (5, 5), (5, -1)])
def test_packets_that_no_wqe_holds(tx, packets, rank):
    assert tx.run(prepare, 0, packets, rank, LADDR, count=1) == [device.EINVAL]
    assert not tx.array[RING : RING + 64 * 256].any()


def test_indices_that_the_kernel_keeps(tx):
    for turn in range(6):
        gpu, _ = tx.crew.by(device.BLOCK)
        assert by_hand[1, 4, gpu](tx.at, 100 * turn, 100, LADDR, LKEY, 64).wait(60)
        while tx.step():
            pass
        assert tx.run(poll_each, 1, 1, device.EXCLUSIVE, 1, count=1) == [1]
        assert tx.structure["completed"] == 100 * (turn + 1)
    assert sent(tx) == {n: LADDR + 16 * (n % 100) for n in range(600)}


PLANS = st.lists(
    st.tuples(
        st.sampled_from(["send", "multi", "wait", "poll"]), st.integers(1, 40), st.integers(0, 3),
        st.sampled_from(sorted(SCOPES)),
    ),
    min_size=3, max_size=12,
)


@settings(max_examples=10)
@given(PLANS, st.sampled_from(sorted(SHARING)))
def test_random_programs(crew, plan, sharing):
    """Packets of all kinds around a short ring: each is sent once, in order of the tickets, and counted once."""
    tx = TxDevice(crew, depth=128)  # a warp with a wait takes 33 slots, and at most half of the ring
    mode = SHARING[sharing]
    expected: dict[int, tuple[int, ...]] = {}
    notified = taken = 0
    for what, count, every, name in plan:
        scope = SCOPES[name]
        threads = tx.crew.by(scope)[1]
        if what == "send":
            tickets = send(tx, count, every=every, sharing=mode, scope=scope)
            expected |= {ticket: (LADDR + 16 * n,) for n, ticket in enumerate(tickets)}
            notified += threads * (count // every) if every else 0
        elif what == "multi":
            (first,) = tx.run(send_multi, count, LADDR, LKEY, 64, every & 1, mode, count=1, block=4)
            expected[first] = tuple(LADDR + 16 * n for n in range(count))
            notified += every & 1
        elif what == "wait":
            tickets = tx.run(send_at, 5, LADDR, LKEY, 64, mode, scope, count=threads, scope=scope)
            expected |= {ticket: (LADDR + 16 * n,) for n, ticket in enumerate(tickets)}
            notified += threads
        else:
            (found,) = tx.run(poll_each, count, 1, mode, 0, count=1)
            assert found == min(count, notified - taken)
            taken += found
    assert {w.index: tuple(p[0] for p in w.packets) for w in tx.seen if w.packets} == expected
    (found,) = tx.run(poll_each, 10_000, 1, mode, 0, count=1)
    assert taken + found == notified
    assert tx.structure["notified"] == tx.structure["taken"] == notified
    tx.close()
