"""Several workers serve one NIC: each queue has one, tied queues have the same, and nothing else can be told."""

import random
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunetio import verbs
from gpunetio.enums import QpType, SendFlags, WrOpcode
from gpunetio.errors import InvalidValueError, TimedOutError
from gpunetio.nic.engine.port import PortConfig
from gpunetio.nic.host import engine
from gpunetio.nic.nic import SoftNic
from gpunetio.nic.observe.running import running
from gpunetio.nic.state.reasons import Reason
from gpunetio.nic.state.work_queue import WORK_QUEUE
from gpunetio.verbs import PD, AhAttr, Context, RecvWr, SendWr, Sge
from nic_rig import READ, REQ, REQ_ERR, RESP_SEND, SEND, WRITE, Buffer, Queue, connect, until, view
from udp_rig import own_address

PAIRS = 6


@contextmanager
def opened(workers: int, name: str = "soft0") -> Iterator[tuple[Context, SoftNic, PD]]:
    """A NIC with so many workers at an address of its own."""
    with verbs.open(name, port=PortConfig(addresses=(own_address(),), workers=workers)) as ctx:
        yield ctx, ctx.provider.nic, ctx.create_pd()  # type: ignore[attr-defined]


def served(nic: SoftNic) -> dict[int, int]:
    """QPN → number of its worker, from the lists that the workers go through. Each QP is in one of them, once."""
    found: dict[int, int] = {}
    names = {nic.qps.row_address(int(row["qpn"])): int(row["qpn"]) for row in nic.qps}
    for number, record in enumerate(nic.records):
        queues = view(int(record["active"]), int(record["active_count"]) * WORK_QUEUE.size, WORK_QUEUE.dtype)
        for queue in queues if record["active_count"] else ():
            qpn = names[int(queue["row"])]
            assert qpn not in found, f"QP {qpn:#x} is served twice"
            assert nic.qps[qpn]["work_queue"] == queue.__array_interface__["data"][0]
            found[qpn] = number
    assert set(found) == set(names.values())
    return found


def check(nic: SoftNic) -> dict[int, int]:
    """Check that one worker serves all that is tied. Return `served`."""
    workers, found = nic.engine.workers, served(nic)
    owners: dict[int, int] = {}  # CQs and SRQs → worker
    for qpn, number in found.items():
        row = nic.qps[qpn]
        assert row["worker"] == workers[number]
        for queue in {int(row[name]) for name in ("send_cq", "recv_cq", "srq")} - {0}:
            assert owners.setdefault(queue, number) == number, f"QPs of two workers share {queue:#x}"
        if row["remote_qpn"] in nic.qps and row["remote_row"]:
            assert found[int(row["remote_qpn"])] == number, f"QP {qpn:#x} and its peer have two workers"
        assert not row["wire"] or number == 0
    for cq in nic.cqs:
        at = nic.cqs.row_address(int(cq["cqn"]))
        assert cq["worker"] == workers[owners.get(at, workers.index(int(cq["worker"])))]
    return found


class Pair:
    """Two connected QPs with memory, and what they have been through."""

    def __init__(self, pd: PD, nbytes: int = 4096, a: Queue | None = None, b: Queue | None = None):
        self.a, self.b = a or Queue(pd), b or Queue(pd)
        connect(self.a, self.b)
        self.here, self.there = Buffer(pd, nbytes, fill=1), Buffer(pd, nbytes)
        self.rounds = 0

    def post(self) -> None:
        """Post a WRITE of new bytes."""
        self.rounds += 1
        self.here.bytes[:] = np.random.default_rng(self.rounds).integers(0, 256, self.here.nbytes, np.uint8)
        self.a.post(WRITE, self.there.remote(), self.here.at())

    def finish(self) -> None:
        """Check the WRITE that was posted last."""
        cqe = self.a.done.next()
        assert (cqe.opcode, cqe.qpn, cqe.counter) == (REQ, self.a.qp.qpn, (self.a.index - 1) & 0xFFFF)
        assert np.array_equal(self.here.bytes, self.there.bytes)

    def write(self) -> None:
        self.post()
        self.finish()


def on_all_workers(pd: PD, nic: SoftNic, count: int = PAIRS, nbytes: int = 4096) -> list[Pair]:
    """Pairs that are spread over all workers."""
    pairs = [Pair(pd, nbytes) for _ in range(count)]
    assert set(check(nic).values()) == set(range(len(nic.records)))
    return pairs


# --- who serves what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_pairs_are_spread(workers):
    with opened(workers) as (_, nic, pd):
        pairs = on_all_workers(pd, nic, 2 * workers)
        load = list(check(nic).values())
        assert len(load) == 2 * len(pairs)
        assert [load.count(number) for number in range(workers)] == [4] * workers


def test_queues_that_share_a_cq_have_one_worker():
    with opened(3) as (ctx, nic, pd):
        cq = ctx.create_cq(256)
        queues = [Queue(pd, send_cq=cq, recv_cq=cq) for _ in range(4)]
        others = [Queue(pd) for _ in range(4)]
        assert len({check(nic)[queue.qp.qpn] for queue in queues}) == 1
        for queue, other in zip(queues, others):
            connect(queue, other)
            check(nic)
        assert len({check(nic)[queue.qp.qpn] for queue in (*queues, *others)}) == 1


def test_two_components_become_one_and_part():
    """A QP with two CQs of different workers joins them. What is destroyed or reset leaves no tie."""
    with opened(2) as (_, nic, pd):
        a, b = Pair(pd), Pair(pd)
        assert check(nic)[a.a.qp.qpn] != check(nic)[b.a.qp.qpn]
        bridge = Queue(pd, send_cq=a.a.send_cq, recv_cq=b.a.send_cq)
        assert set(check(nic).values()) == {check(nic)[bridge.qp.qpn]}
        bridge.qp.close()
        lone = Queue(pd)
        assert check(nic)[lone.qp.qpn] != check(nic)[a.a.qp.qpn]
        peer = Queue(pd)
        connect(lone, peer)
        lone.reset()
        assert len(nic.components._peers) == 5
        for pair in (a, b):
            pair.write()


def test_queue_pairs_over_a_wire_have_the_first_worker():
    with opened(3) as (_, nic, pd), opened(2, "soft1") as (_, other, far):
        near = [Queue(pd) for _ in range(4)]
        assert set(check(nic).values()) == {0, 1, 2}
        there = [Queue(far) for _ in range(4)]
        here, target = Buffer(pd, 4096, fill=1), Buffer(far, 4096)
        for queue, peer in zip(near, there):
            connect(queue, peer)
        assert set(check(nic).values()) == set(check(other).values()) == {0}
        for queue in near:
            target.bytes[:] = 0
            queue.post(WRITE, target.remote(), here.at())
            assert queue.done.next().opcode == REQ
            assert np.array_equal(here.bytes, target.bytes)
        local = [Pair(pd) for _ in range(4)]
        spread = check(nic)
        assert {spread[pair.a.qp.qpn] for pair in local} == {1, 2}  # those with the fewest
        bridge = Queue(pd, send_cq=local[0].a.send_cq, recv_cq=near[0].recv_cq)
        assert check(nic)[local[0].b.qp.qpn] == check(nic)[bridge.qp.qpn] == 0
        for pair in local:
            pair.write()


@pytest.mark.parametrize("order", ["here, there", "there, here", "all here, all there"])
def test_wires_push_other_queue_pairs_to_other_workers(order):
    """As NCCL does it: all queue pairs are created, then each is connected to itself or to another NIC."""
    count, workers = 24, 4
    with opened(workers) as (_, nic, pd), opened(1, "soft1") as (_, _, far):
        if order == "all here, all there":
            here = [Queue(pd) for _ in range(count)]
            there = [Queue(pd) for _ in range(count)]
        else:
            queues = [Queue(pd) for _ in range(2 * count)]
            here, there = queues[order == "there, here" :: 2], queues[order == "here, there" :: 2]
        peers = [Queue(far) for _ in there]
        for own, away, peer in zip(here, there, peers):
            connect(own, own)
            connect(away, peer)
        spread = check(nic)
        assert {spread[away.qp.qpn] for away in there} == {0}
        load = [list(spread.values()).count(number) for number in range(workers)]
        assert load == [count, *[count // (workers - 1)] * (workers - 1)]
        target, data = Buffer(pd, 64), Buffer(pd, 64, fill=7)
        for own in here:
            target.bytes[:] = 0
            own.post(WRITE, target.remote(), data.at())
            assert own.done.next().opcode == REQ
            assert np.array_equal(target.bytes, data.bytes)
        there[0].reset()
        assert check(nic)[there[0].qp.qpn] == 0  # it stays until there is a reason to move it
        one, other = Queue(pd), Queue(far)
        connect(one, other)
        assert check(nic)[there[0].qp.qpn] != 0


def test_datagrams_have_the_first_worker():
    """A UD queue pair that becomes ready to receive moves there: any of the wires may bring something for it."""
    with opened(3) as (ctx, nic, pd):
        queues = [Queue(pd, qp_type=QpType.UD) for _ in range(6)]
        assert set(check(nic).values()) == {0, 1, 2}
        for queue in queues:
            queue.qp.to_rts(qkey=1)
            check(nic)
        assert set(check(nic).values()) == {0}
        here, there = Buffer(pd, 64, fill=1), Buffer(pd, 40 + 64)
        handle = pd.create_ah(AhAttr(gid=ctx.query_gid()))
        for a, b in zip(queues, (*queues[1:], queues[0])):
            there.bytes[:] = 0
            b.receive(there.at())
            a.post(SEND, struct.pack(">III", 1, 0, b.qp.qpn | 1 << 31) + handle.av[12:], here.at())
            assert a.done.next().opcode == REQ
            assert b.arrived.next().byte_cnt == 40 + 64
            assert np.array_equal(there.bytes[40:], here.bytes)
        for queue in queues:
            queue.qp.close()
            check(nic)


def test_a_core_direct_queue_brings_all_to_one_worker():
    """A WAIT may name any CQ."""
    with opened(3) as (_, nic, pd):
        pairs = on_all_workers(pd, nic)
        master = Queue(pd, core_direct_master=True)
        assert set(check(nic).values()) == {check(nic)[master.qp.qpn]} == {0}
        pairs.append(Pair(pd))
        assert set(check(nic).values()) == {0}
        for pair in pairs:
            pair.write()


# --- random programs -------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(workers=st.integers(1, 4), seed=st.integers(0, 1 << 32), steps=st.integers(10, 40))
def test_random_objects_and_traffic(workers, seed, steps):
    """Queues come, share, are connected, carry bytes, are reset and go. Ties are kept, and every byte arrives."""
    chance = random.Random(seed)
    with opened(workers) as (ctx, nic, pd):
        cqs, pool = [ctx.create_cq(1024) for _ in range(3)], pd.create_srq(4)
        free: list[Queue] = []
        pairs: list[Pair] = []
        parted: list[Pair] = []  # whose memory and CQs stay

        def create() -> None:
            shared: dict[str, Any] = {"recv_cq": chance.choice(cqs)} if chance.random() < 0.3 else {}
            if chance.random() < 0.2:
                shared |= {"rq": 0, "srq": pool}
            free.append(Queue(pd, sq=16, **shared))

        def join() -> None:
            if len(free) >= 2:
                pairs.append(Pair(pd, 512, *(free.pop(chance.randrange(len(free))) for _ in range(2))))

        def carry() -> None:
            for pair in pairs:
                pair.post()
            for pair in pairs:
                pair.finish()

        def part() -> None:
            if pairs:
                pair = pairs.pop(chance.randrange(len(pairs)))
                parted.append(pair)
                for queue in (pair.a, pair.b):
                    if chance.random() < 0.5:
                        queue.qp.close()
                    else:
                        queue.reset()
                        free.append(queue)

        for _ in range(steps):
            chance.choice((create, create, join, join, carry, part))()
            check(nic)
        carry()


def test_components_move_under_load():
    """Queues move from worker to worker while they carry bytes: every WQE completes once, in order."""
    with opened(3) as (ctx, nic, pd):
        pairs = on_all_workers(pd, nic)
        stop = threading.Event()
        failed: list[BaseException] = []

        def load(pair: Pair) -> None:
            try:
                while not stop.is_set():
                    pair.write()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=load, args=(pair,)) for pair in pairs]
        for thread in threads:
            thread.start()
        seen = {pair.a.qp.qpn: {check(nic)[pair.a.qp.qpn]} for pair in pairs}
        for i in range(60):
            a, b = random.Random(i).sample(pairs, 2)
            heavy = ctx.create_cq(16)  # of a component that outweighs both
            weight = [pd.create_qp(sq_wr=1, send_cq=heavy) for _ in range(4 * (i % 2))]
            bridges = [pd.create_qp(sq_wr=1, rq_wr=1, send_cq=pair.b.send_cq, receive_cq=heavy) for pair in (a, b)]
            for qpn, number in check(nic).items():
                if qpn in seen:
                    seen[qpn].add(number)
            for qp in (*bridges, *weight):
                qp.close()
            heavy.close()
        stop.set()
        for thread in threads:
            thread.join()
        assert not failed
        assert any(len(numbers) > 1 for numbers in seen.values())
        for pair in pairs:
            assert pair.rounds > 0
            pair.write()
        nic.engine.synchronize()
        assert nic.counters["sq_wqes"] == sum(pair.rounds for pair in pairs)


def test_a_worker_that_sleeps_gets_queues():
    """Without queues it sleeps until it is woken, and kernels' doorbells wake nobody."""
    with opened(2) as (_, nic, pd):
        pair, components = Pair(pd), nic.components
        rows = set(components._component(nic.qps.row_address(pair.a.qp.qpn)))
        components._move(rows, 0)
        until(lambda: nic.records[1]["asleep"] and nic.records[1]["active_count"] == 0, "the empty worker to sleep")
        components._move(rows, 1)
        assert set(check(nic).values()) == {1}
        for _ in range(20):
            time.sleep(0.005)  # far longer than an idle engine spins
            pair.a.post(WRITE, pair.there.remote(), pair.here.at(), how="record")
            assert pair.a.done.next().opcode == REQ


# --- what all workers share ------------------------------------------------------------------------------------------


def test_nothing_is_read_or_written_after_dereg():
    """Once a region is deregistered, none of the workers touches it, in the middle of whatever the others are."""
    part = 8 << 20
    with opened(3) as (_, nic, pd):
        pairs = [Pair(pd) for _ in range(3)]
        at_work = [pair for pair in pairs if check(nic)[pair.a.qp.qpn] != 0]
        assert len(at_work) == 2
        source = Buffer(pd, part, fill=3)
        for turn in range(10):
            target = Buffer(pd, 2 * part)
            for i, pair in enumerate(at_work):
                for _ in range(16):
                    pair.a.put(WRITE, target.remote(i * part), source.at())
                pair.a.ring()
            until(lambda: any(pair.a.row["sq_ci"] for pair in at_work), "a worker to begin")
            target.mr.close()
            target.bytes[:] = turn
            for pair in at_work:
                assert pair.a.done.take(16)[-1].opcode == (REQ_ERR if pair.a.row["failed"] else REQ)
            assert (target.bytes == turn).all()
            for pair in at_work:
                pair.a.reset()
                pair.b.reset()
                connect(pair.a, pair.b)


def test_counters_add_up():
    with opened(3) as (_, nic, pd):
        pairs = on_all_workers(pd, nic)
        for pair in pairs:
            for _ in range(5):
                pair.write()
            pair.a.post(READ, pair.there.remote(), pair.here.at())
            pair.a.done.next()
        nic.engine.synchronize()
        assert all(row["sq_wqes"] > 0 for row in nic.counters.rows)
        expected = {"sq_wqes": 36, "cqes": 36, "rx_write_requests": 30, "rx_read_requests": 6}
        assert {name: nic.counters[name] for name in expected} == expected
        (observed,) = (seen for seen in running("soft0") if seen.addresses == [str(nic.port.addresses[0])])
        with observed:
            assert {name: observed.counters[name] for name in expected} == expected
            assert observed.counters["rdma_rx_bytes"] == 36 * 4096


def test_errors_of_all_workers_are_reported():
    with opened(3) as (_, nic, pd):
        pairs = on_all_workers(pd, nic)
        for pair in pairs:
            pair.a.post(WRITE, pair.there.remote(1), pair.here.at())
        for pair in pairs:
            assert pair.a.done.next().vendor == Reason.RKEY_BOUNDS
        refused = sorted(report.qpn for report in nic.reports if report.reason is Reason.RKEY_BOUNDS)
        assert refused == sorted(queue.qp.qpn for pair in pairs for queue in (pair.a, pair.b))


def test_events_of_all_workers_reach_one_channel():
    """CQs of several workers tell one channel; the first worker hears their arm registers."""
    count, rounds = 6, 50
    with opened(3) as (ctx, nic, pd):
        channel = ctx.create_comp_channel()
        memory = Buffer(pd, 64)
        ends = []
        for _ in range(count):
            received = ctx.create_cq(64, channel=channel)
            a, b = pd.create_qp(sq_wr=8, send_cq=ctx.create_cq(64)), pd.create_qp(rq_wr=8, receive_cq=received)
            a.connect(b, min_rnr_timer=1)
            ends.append((a, b, received))
        assert set(check(nic).values()) == {0, 1, 2}
        sge = Sge(memory.address, 8, memory.key)
        for _ in range(rounds):
            for _, b, received in ends:
                b.post_recv(RecvWr(sges=[sge]))
                received.req_notify()
            for a, _, _ in ends:
                a.post_send(SendWr(opcode=WrOpcode.SEND, sges=[sge], flags=SendFlags.SIGNALED))
            told = [channel.get_event(20.0) for _ in ends]
            assert {cq.cqn for cq in told if cq} == {received.cqn for _, _, received in ends}
            for a, _, received in ends:
                received.ack_events()
                for cq in (received, a.send_cq):
                    until(lambda cq=cq: cq.poll(), "a completion")
        assert channel.get_event(0) is None


def test_a_busy_worker_hears_the_arm_registers_of_the_first():
    """It looks at arm records when it is idle. It need not be: a request behind its completion is heard in between."""
    with opened(2) as (ctx, nic, pd):
        pairs = [Pair(pd, 16 << 20) for _ in range(2)]
        (pair,) = (pair for pair in pairs if check(nic)[pair.a.qp.qpn] == 1)
        channel = ctx.create_comp_channel()
        received = ctx.create_cq(16, channel=channel)
        receiver = pd.create_qp(sq_wr=1, rq_wr=1, send_cq=pair.a.send_cq, receive_cq=received)
        sender = pd.create_qp(sq_wr=1, send_cq=ctx.create_cq(16))
        sender.connect(receiver, min_rnr_timer=1)
        assert check(nic)[receiver.qpn] == check(nic)[pair.a.qp.qpn] == 1
        sge = Sge(pair.here.address, 8, pair.here.key)
        receiver.post_recv(RecvWr(sges=[sge]))
        sender.post_send(SendWr(opcode=WrOpcode.SEND, sges=[sge], flags=SendFlags.SIGNALED))
        until(lambda: view(received.ring_address, 64)[63] == RESP_SEND << 4, "the message")
        nic.records["budget"] = 1  # so that turns are short
        for _ in range(63):
            pair.a.put(WRITE, pair.there.remote(), pair.here.at())
        pair.a.ring()
        until(lambda: pair.a.row["sq_ci"], "the worker to begin")
        received.req_notify()
        told = channel.get_event(20.0)
        assert pair.a.row["sq_ci"] < pair.a.index
        assert told is received
        received.ack_events()
        pair.a.done.take(63)


@pytest.mark.parametrize("how", ["uar", "other half", "uar blueflame", "register", "record"])
def test_doorbells_of_all_workers(how):
    """The first worker looks at the registers of UAR pages, and hands on what is for others."""
    with opened(3) as (_, nic, pd):
        for pair in on_all_workers(pd, nic):
            for _ in range(3):
                pair.a.post(WRITE, pair.there.remote(), pair.here.at(), how=how)
                assert pair.a.done.next().opcode == REQ
            assert np.array_equal(pair.here.bytes, pair.there.bytes)


# --- life ------------------------------------------------------------------------------------------------------------


def test_pause_stops_all_workers():
    with opened(3) as (_, nic, pd):
        pairs = on_all_workers(pd, nic)
        nic.pause()
        for pair in pairs:
            pair.post()
        assert all(pair.a.done.none_for(0.005) for pair in pairs)
        nic.resume()
        for pair in pairs:
            pair.finish()
        before = nic.counters["sq_wqes"]
        nic.pause(after=4)
        for pair in pairs:
            pair.post()
        until(lambda: nic.record["paused"], "the NIC to stand still")
        assert nic.counters["sq_wqes"] == before + 4
        nic.resume()
        for pair in pairs:
            pair.finish()


def test_close_stops_all_workers():
    with ExitStack() as stack:
        _, nic, pd = stack.enter_context(opened(3))
        pairs = on_all_workers(pd, nic, nbytes=1 << 20)
        names = sorted(thread.name for thread in threading.enumerate() if "soft0 engine" in thread.name)
        assert names == ["gpunetio soft0 engine", "gpunetio soft0 engine 1", "gpunetio soft0 engine 2"]
        for pair in pairs:
            for _ in range(32):
                pair.a.put(WRITE, pair.there.remote(), pair.here.at())
            pair.a.ring()
        stack.close()
        assert not [thread for thread in threading.enumerate() if "soft0 engine" in thread.name]
        target = pairs[0].there.bytes
        target[:] = 7
        assert (target == 7).all()


def test_workers_without_queues_sleep():
    """Neither doorbells nor kernels concern them."""
    with opened(3) as (_, nic, pd):
        pair = Pair(pd)
        (busy,) = set(check(nic).values())
        nic.engine.count_kernels(+1)
        for number, record in enumerate(nic.records):
            if number not in (0, busy):
                until(lambda record=record: record["asleep"], f"worker {number} to sleep")
        pair.write()
        nic.engine.count_kernels(-1)


def test_kernels_wake_only_workers_that_sleep(monkeypatch):
    """One that spins sees a launch without a system call. When the last kernel has ended, it falls asleep itself."""
    kicked: list[int] = []
    with opened(2) as (_, nic, pd):
        pairs = on_all_workers(pd, nic)
        kick = engine.Worker.kick
        monkeypatch.setattr(engine.Worker, "kick", lambda self: kicked.append(self.address) or kick(self))
        for _ in range(3):
            until(lambda: all(nic.records["asleep"]), "all workers to sleep")
            kicked.clear()
            nic.engine.count_kernels(+1)
            assert kicked == nic.engine.workers
            until(lambda: not any(nic.records["asleep"]), "all workers to wake")
            nic.engine.count_kernels(+1)
            nic.engine.count_kernels(-1)
            assert kicked == nic.engine.workers
            assert all(nic.records["busy"] == 1)
            nic.engine.count_kernels(-1)
            assert kicked == nic.engine.workers
        for pair in pairs:
            pair.write()


def test_no_launch_is_missed_by_a_worker_that_falls_asleep():
    """Whenever it comes: the worker is awake soon, long before it would look by itself."""
    with opened(1) as (_, nic, pd):
        Pair(pd)
        nic.record["sleep_ms"] = 60_000
        for _ in range(300):
            nic.engine.count_kernels(+1)
            until(lambda: not nic.record["asleep"], "the worker to wake")
            nic.engine.count_kernels(-1)
            time.sleep(random.uniform(0.8, 1.3) * nic.record["spin_ns"] / 1e9)


@pytest.mark.host_memory  # on the twin, a command waits for one request at most
def test_a_worker_in_a_long_turn(monkeypatch):
    """What all workers share is not changed if one of them does not come out of its turn in time."""
    with opened(2) as (_, nic, pd):
        pairs = [Pair(pd, 32 << 20) for _ in range(2)]
        (long,) = (pair for pair in pairs if check(nic)[pair.a.qp.qpn] == 1)
        for _ in range(63):
            long.a.put(WRITE, long.there.remote(), long.here.at())
        long.a.ring()
        until(lambda: long.a.row["sq_ci"], "the turn to begin")
        post = nic.engine.post_alone
        monkeypatch.setattr(nic.engine, "post_alone", lambda *commands: post(*commands, timeout=0.005))
        keys = len(nic.mkeys)
        with pytest.raises(TimedOutError, match=r"^worker 1 of the engine of soft0 did not answer .* within 0\.005 s"):
            pd.register(bytearray(64))
        monkeypatch.undo()
        assert len(nic.mkeys) == keys
        assert [int(record["hold"]) for record in nic.records] == [0, 0]
        pd.register(bytearray(64))
        assert len(long.a.done.take(63)) == 63
        for pair in pairs:
            pair.write()


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (4, 1), (7, 1), (8, 2), (16, 4), (128, 4)])
def test_the_default_follows_the_cores(monkeypatch, cores, workers):
    monkeypatch.setattr(engine.os, "sched_getaffinity", lambda _: set(range(cores)))
    assert engine.default_workers() == workers


@pytest.mark.parametrize("workers", [-1, 17])
def test_number_of_workers_is_checked(workers):
    with pytest.raises(InvalidValueError, match=f"workers = {workers}: a NIC has 1 to 16 threads"):
        PortConfig(workers=workers)
