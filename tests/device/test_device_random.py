"""Random programs of device calls, valid and not: results, memory, counters and errors are those of a model.

The model says what WQEs a call must post, and tests/rigs/nic_model.py, which shares nothing with the software NIC, what
becomes of them. Programs run inside one NIC, between two, and between two with a bad network in between.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nic_model
from device_programs import GIB, GPU, Call, run
from gpunetio import CqOverrun, ExportedQp, Faults, Gpu, MemType, PortConfig, device, verbs
from gpunetio.enums import Access
from gpunetio.nic.nic import SoftNic
from nic_model import FETCH_ADD, NOP, RDMA_WRITE, READ, REQ_ERR, SEND, SEND_IMM
from nic_rig import atomic, control, data, inline, raddr

DEPTH, RECEIVES = 16, 8
SIZE = 2048  # bytes of the memory of each end
COUNTERS = SIZE - 256  # where counters are; the old values come to the same places here
OK, EIO, EINVAL, ENOBUFS = device.OK, device.EIO, device.EINVAL, device.ENOBUFS
WAIT = 5.0  # seconds for a message that does not come, because its sender has failed
OFF_CORE_NS, TRIES = 5_000_000, 5
DUMP, FENCE = nic_model.DUMP, 2 << 5
SHARING = (device.EXCLUSIVE, device.CTA, device.GPU)
ALONE = (device.THREAD, device.THREAD, device.BLOCK)  # scopes that one thread may choose, where warps have 32 lanes
RETURNS = ("get", "signal", "put_signal", "p_signal", "get_counter", "signal_counter", "put_signal_counter")
COUNTED = ("put_counter", "get_counter", "p_counter", "signal_counter", "put_signal_counter")
POSTS = ("put", "get", "p", "signal", "put_signal", "p_signal", "mcst", "fence", *COUNTED)
Wqe = tuple[int, bytes, int, int]  # opcode, segments, flags, immediate


# --- the machine -----------------------------------------------------------------------------------------------------


@dataclass
class Machine:
    """A queue with a companion here, a peer of each there, and regions of several rights."""

    gpu: Gpu
    wired: bool
    main: ExportedQp
    companion: ExportedQp
    peer: ExportedQp  # of the main queue: it receives
    other: ExportedQp  # of the companion
    here: np.ndarray
    there: np.ndarray
    here_mr: verbs.MR
    there_mr: verbs.MR
    weak_mr: verbs.MR  # of the same memory there, for READs only
    dead_key: int
    met: Counter = field(default_factory=Counter, repr=False)

    def begin_anew(self, random: Random) -> None:
        for queue in (self.main, self.companion, self.peer, self.other):
            queue.qp.reset()
            queue.reset()
        quick = {"ack_timeout": 8, "retry_cnt": 7 if self.wired else 1, "rnr_retry": 7, "min_rnr_timer": 1}
        for ours, theirs in ((self.main, self.peer), (self.companion, self.other)):
            ours.connect(theirs, **quick)
        for memory in (self.here, self.there):
            memory[:] = list(random.randbytes(SIZE))
        self.there[COUNTERS:] = 0


    @property
    def nics(self) -> list[SoftNic]:
        return [queue.qp.ctx.provider.nic for queue in (self.main, self.peer)]  # type: ignore[attr-defined]


@contextmanager
def watched(nics: list[SoftNic]) -> Iterator[list[int]]:
    """Collect for how many nanoseconds engines have begun no turn, where that is longer than on an idle machine."""
    gaps: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            now = time.monotonic_ns()
            turns = [now - int(nic.record["now"]) for nic in nics if not nic.record["asleep"]]
            gaps.extend(gap for gap in turns if gap > OFF_CORE_NS)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield gaps
    finally:
        done.set()
        watcher.join()


def patiently(run: Callable[..., None]) -> Callable[..., None]:
    """Run a program again that went wrong while an engine was off its core for longer than its peer's timeouts.

    A busy machine may take a thread off for seconds, and retries end after 28 ms. Longer timeouts would make each lost
    packet that nothing follows slow.
    """

    def run_again(machine: Machine, *arguments: object) -> None:
        for left in reversed(range(TRIES)):
            with watched(machine.nics if machine.wired else []) as gaps:
                try:
                    return run(machine, *arguments)
                except AssertionError:
                    if not gaps or not left:
                        raise

    return run_again


def export_receiver(gpu: Gpu, pd: verbs.PD) -> ExportedQp:
    ctx = pd.ctx
    send_cq, receive_cq = (
        ctx.create_cq(n, overrun=CqOverrun.ENABLE, external_datapath=True) for n in (DEPTH, RECEIVES)
    )
    return gpu.export_qp(
        pd.create_qp(sq_wr=DEPTH, send_cq=send_cq, rq_wr=RECEIVES, receive_cq=receive_cq, external_datapath=True),
        timeout=WAIT,
    )


# On a GPU the first test compiles the engine and a kernel with all of the device library: two minutes.
pytestmark = pytest.mark.timeout(300)

FAULTS = Faults(loss=0.03, duplication=0.05, reordering=0.05, corruption=0.01, seed=5)
MACHINES = {"loopback": ("host", ()), "wire": ("host", (None, None)), "bad network": ("host", (FAULTS, FAULTS))}


def make(stack: ExitStack, place: str, faults: tuple[Faults | None, ...]) -> Machine:
    gpu = stack.enter_context(Gpu(place))
    names = ("soft0", "soft1")[: max(1, len(faults))]
    ports = [PortConfig(faults=one) if one else None for one in faults or (None,)]
    ctxs = [stack.enter_context(verbs.open(name, port=port)) for name, port in zip(names, ports)]
    pd = ctxs[0].create_pd()
    peer_pd = ctxs[1].create_pd() if faults else pd
    group = gpu.create_qp_group(pd, DEPTH)
    peer, other = export_receiver(gpu, peer_pd), gpu.create_qp(peer_pd, DEPTH)
    for queue in (group, peer, other):
        stack.callback(queue.close)
    here, there = gpu.alloc(SIZE, MemType.CPU_GPU), gpu.alloc(SIZE, MemType.CPU_GPU)
    gone = peer_pd.register(there)
    dead_key = gone.rkey
    gone.close()
    return Machine(
        gpu, bool(faults), group.main, group.companion, peer, other, here.array, there.array, pd.register(here),
        peer_pd.register(there), peer_pd.register(there, access=Access.REMOTE_READ), dead_key,
    )


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    logger = logging.getLogger("gpunetio.nic")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # of what fails on purpose
    yield
    logger.setLevel(level)


@pytest.fixture(
    scope="module",
    params=[*MACHINES.values(), pytest.param(("auto", ()), marks=pytest.mark.gpu, id="cuda")],
    ids=[*MACHINES, "cuda"],
)
def machine(request: pytest.FixtureRequest, quiet: None) -> Iterator[Machine]:
    with ExitStack() as stack:
        yield make(stack, *request.param)


# --- the model -------------------------------------------------------------------------------------------------------


class Model:
    """Memory of both ends, the main queue's ring and receives, and what calls of one thread after another return."""

    def __init__(self, machine: Machine):
        m = self.machine = machine
        self.here, self.there = bytearray(m.here.tobytes()), bytearray(m.there.tobytes())
        nics = nic_model.Nic(), nic_model.Nic()
        for nic, memory, mr in (
            (nics[0], self.here, m.here_mr), (nics[1], self.there, m.there_mr), (nics[1], self.there, m.weak_mr),
        ):
            access = int(mr.access) & 0xF
            nic.register(nic_model.Region(mr.rkey, 1, access, mr.iova, memory, 0, SIZE))
        self.done, self.arrived = nic_model.Cq(4), nic_model.Cq(3)
        rights = int(Access.all())
        self.main = nic_model.Qp(
            nics[0], m.main.qpn, 1, DEPTH, 0, 16, self.done, nic_model.Cq(0), wired=m.wired
        )
        self.peer = nic_model.Qp(
            nics[1], m.peer.qpn, 1, DEPTH, RECEIVES, m.peer.qp.rq_stride, nic_model.Cq(0), self.arrived, wired=m.wired
        )
        self.main.connect(self.peer, rights, False)
        self.peer.connect(self.main, rights, False)
        self.ring = bytearray(DEPTH * 64)
        self.reserved = self.receives = self.taken = 0
        self.companion: list[int] = []  # what its WQEs end with

    def failed(self, index: int) -> bool:
        return self.done.cqes[index].opcode == REQ_ERR

    def post(self, wqes: list[Wqe], skip: bool = False) -> int:
        """The ticket, or EIO when a slot's last WQE has failed."""
        previous = self.reserved + len(wqes) - 1 - DEPTH
        if previous >= 0 and self.failed(previous):
            return EIO
        for opcode, segments, flags, imm in wqes:
            head = bytearray(control(opcode, self.reserved, self.main.qpn, 1 + len(segments) // 16, imm=imm))
            head[11] |= flags
            at = self.reserved % DEPTH * 64
            self.ring[at : at + 64] = (bytes(head) + segments).ljust(64, b"\0")
            self.reserved += 1
        if not skip:
            self.main.post(bytes(self.ring), self.reserved & 0xFFFF)
        return self.reserved - 1

    def wait(self, ticket: int) -> int:
        if ticket < 0:
            return ticket
        return EIO if self.failed(ticket) else OK

    def wait_all(self) -> int:
        return self.wait(self.reserved - 1) if self.reserved else OK

    def companion_has_room(self) -> bool:
        """Whether the slots of the companion's next two WQEs are free: what was in them has not failed."""
        previous = len(self.companion) + 1 - DEPTH
        return previous < 0 or self.companion[previous] == OK

    def fill_companion(self, failed: bool = False) -> None:
        """Two WQEs of the companion, a WAIT and an atomic, or NOPs. Once one has failed, all do."""
        self.companion += [EIO if failed or EIO in self.companion else OK] * 2

    def count(self, ticket: int, at: int, value: int) -> None:
        """The companion's WAIT, and its atomic unless an operation up to this one has failed."""
        self.fill_companion(any(cqe.opcode == REQ_ERR for cqe in self.done.cqes[: ticket + 1]))
        if self.companion[-1] == EIO:
            return
        old = self.there[at : at + 8]
        self.here[at : at + 8] = old
        self.there[at : at + 8] = (int.from_bytes(old, "little") + value & (1 << 64) - 1).to_bytes(8, "little")

    # --- receives

    def receive(self, address: int, key: int, nbytes: int) -> int:
        if self.receives - self.taken == RECEIVES:
            return ENOBUFS
        self.peer.post_receive(data(address, key, nbytes) if nbytes else data(0, nic_model.LIST_END, 0))
        self.receives += 1
        return self.receives - 1

    def come(self, ticket: int) -> bool:
        """Whether that receive is complete."""
        return ticket < len(self.arrived.cqes)

    def receive_wait(self, ticket: int) -> int:
        cqe = self.arrived.cqes[ticket]
        if cqe.opcode == nic_model.RESP_ERR:
            return EIO
        self.taken = max(self.taken, ticket + 1)
        assert cqe.byte_cnt is not None
        return cqe.byte_cnt


def number(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


class Writer:
    """Writes a program of one thread: calls, and what they must return (None: it is not said)."""

    def __init__(self, model: Model, random: Random, bad: float, span: tuple[int, int], thread: int = 0):
        self.model, self.random, self.bad = model, random, bad
        self.machine = model.machine
        self.start, self.size = span[0], span[1] - span[0]
        self.counter = COUNTERS + 8 * thread
        self.scopes = (*ALONE, device.WARP) if self.machine.gpu.warp == 1 else ALONE
        self.calls: list[Call] = []
        self.results: list[int | None] = []
        self.tickets: list[int] = []  # calls whose results are tickets of the main queue
        self.receives: list[int] = []
        self.unfenced = False  # something that returns data may be under way

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def add(self, what: str, result: int | None, **fields: object) -> int:
        r = self.random
        call: Call = {
            "what": what, "qp": self.machine.main, "companion": self.machine.companion,
            "sharing": r.choice(SHARING), "scope": r.choice(self.scopes), **fields,
        }
        self.calls.append(call)
        self.results.append(result)
        self.machine.met[what, "ok" if result is None or result >= 0 else result] += 1
        return len(self.calls) - 1

    # --- arguments, now and then bad ones

    def local(self, prefix: str, nbytes: int, memory: str = "here") -> Call:
        r, m = self.random, self.machine
        mr = m.here_mr if memory == "here" else m.there_mr
        at = self.start + r.randint(0, self.size - nbytes)
        if nbytes == 8 and prefix == "sig_l":
            at &= ~7
        key = mr.lkey
        if self.chance(self.bad / 3):
            at, key = r.choice(((at, r.getrandbits(32)), (SIZE - nbytes + 1 + r.randrange(9), key), (-1, key)))
        return {f"{prefix}addr": mr.iova + at, f"{prefix}key": key}

    def remote(self, prefix: str, nbytes: int, aligned: bool = False) -> Call:
        r, m = self.random, self.machine
        at = self.start + r.randint(0, self.size - nbytes)
        if aligned:
            at &= ~7
        mr, key = m.there_mr, m.there_mr.rkey
        if self.chance(self.bad):
            at, key = r.choice((
                (at, m.dead_key), (SIZE - nbytes + 8, key), (at, m.weak_mr.rkey), (at + 3, key),
            ))
            if key == m.weak_mr.rkey:
                mr = m.weak_mr
        return {f"{prefix}addr": mr.iova + at, f"{prefix}key": key}

    # --- calls that post

    def transfer(self, what: str) -> tuple[Call, list[Wqe], bool]:
        """Arguments, the WQEs that they call for, and whether they are such that a WQE can express."""
        r = self.random
        base = what.removesuffix("_counter")
        nbytes = r.choice((0, 1, 8, r.randint(1, 64), r.randint(1, self.size)))
        if base in ("p", "p_signal"):
            nbytes = r.randint(1, 8)
        valid = not self.chance(3 * self.bad) or base in ("signal", "mcst", "fence")
        call: Call = {"value": r.getrandbits(63)}
        wqes: list[Wqe] = []
        if base in ("put", "get", "put_signal"):
            call |= self.remote("r", nbytes) | self.local("l", nbytes)
            segments = raddr(call["raddr"], call["rkey"]) + data(call["laddr"], call["lkey"], nbytes)
            wqes.append((READ if base == "get" else RDMA_WRITE, segments, 0, 0) if nbytes else (NOP, b"", 0, 0))
        elif base in ("p", "p_signal"):
            call |= self.remote("r", nbytes)
            value = call["value"]
            if base == "p_signal":
                call["laddr"] = value = r.getrandbits(63)
            wqes.append((RDMA_WRITE, raddr(call["raddr"], call["rkey"]) + inline(number(value)[:nbytes]), 0, 0))
        if "signal" in base:
            call |= self.remote("sig_r", 8, True) | self.local("sig_l", 8)
            segments = raddr(call["sig_raddr"], call["sig_rkey"]) + atomic(call["value"])
            wqes.append((FETCH_ADD, segments + data(call["sig_laddr"], call["sig_lkey"], 8), 0, 0))
        if base == "mcst" or (base == what == "get" and self.chance(0.3)):
            call |= self.local("d", 1)
            call["daddr"], call["dlkey"] = call["daddr"], call.pop("dkey")
            wqes.append((DUMP, data(call["daddr"], call["dlkey"], 1), 0, 0))
        if base == "fence":
            wqes.append((NOP, b"", FENCE, 0))
        if not valid:
            nbytes = r.choice((0, 9, -1)) if base in ("p", "p_signal") else r.choice((-1, -GIB))
        return call | {"nbytes": nbytes}, wqes, valid

    def posting(self, what: str, skip: bool = False) -> None:
        m, model, r = self.machine, self.model, self.random
        if m.wired and self.unfenced and what != "fence":
            self.posting("fence")
        call, wqes, valid = self.transfer(what)
        scope = r.choice(self.scopes)
        blocking = what == "get" and not skip and self.chance(0.3)
        if what == "get":
            call["blocking"] = int(blocking)
        if what in COUNTED:
            value = r.choice((0, 1, r.getrandbits(62), -r.getrandbits(40)))
            call |= {
                "counter_raddr": m.there_mr.iova + self.counter, "counter_rkey": m.there_mr.rkey,
                "counter_laddr": m.here_mr.iova + self.counter, "counter_lkey": m.here_mr.lkey, "counter_value": value,
            }
        if not valid and scope == device.THREAD:
            self.add(what, EINVAL, scope=scope, **call)
            return
        if not valid:  # in a group of one thread it takes its slots all the same
            wqes = [(NOP, b"", 0, 0)] * (1 if what == "get" else len(wqes)) + (
                wqes[1:] if what == "get" else []
            )
        result = EIO if what in COUNTED and not model.companion_has_room() else model.post(wqes, skip)
        if what in COUNTED and result >= 0 and valid:
            model.count(result, self.counter, value)
        elif what in COUNTED and model.companion_has_room():
            model.fill_companion()
        if result >= 0 and not valid:
            result = EINVAL
        if result >= 0 and blocking and model.failed(result):
            result = EIO
        if skip:
            call["code_opt"] = device.SKIP_DB_RINGING
        at = self.add(what, result, scope=scope, **call)
        self.tickets.append(at)
        self.unfenced = what in RETURNS if what != "fence" else False

    def send(self) -> None:
        """A message for which there is a receive."""
        m, model, r = self.machine, self.model, self.random
        if m.wired and self.unfenced:
            self.posting("fence")
        nbytes = r.choice((1, 8, r.randint(1, 64)))
        call = self.local("l", nbytes)
        what, imm = r.choice((("send", 0), ("send_imm", r.getrandbits(32))))
        wqe = (SEND if what == "send" else SEND_IMM, data(call["laddr"], call["lkey"], nbytes), 0, imm)
        result = model.post([wqe])
        self.tickets.append(self.add(what, result, nbytes=nbytes, value=imm, **call))

    def recv(self) -> None:
        m, model, r = self.machine, self.model, self.random
        nbytes = r.choice((64, 64, 100)) if not self.chance(self.bad) else r.choice((0, 1, 30))
        call = self.local("l", max(nbytes, 1), "there")
        result = model.receive(call["laddr"], call["lkey"], nbytes)
        at = self.add("recv", result, **call | {"qp": m.peer, "nbytes": nbytes})
        if result >= 0:
            self.receives.append(at)

    def waiting(self) -> None:
        model, r = self.model, self.random
        what = r.choice(("wait", "wait", "wait_all", "get_wait", "poll_one"))
        if what == "wait_all":
            self.add(what, model.wait_all())
            return
        if not self.tickets:
            return
        ref = r.choice(self.tickets[-20:])
        ticket = self.results[ref]
        assert ticket is not None
        status = model.wait(ticket)
        if what == "get_wait" and self.chance(0.5) and not (self.machine.wired and self.unfenced):
            call = self.local("d", 1)
            call["dlkey"] = call.pop("dkey")
            scope = r.choice(self.scopes)
            if ticket >= 0 or scope != device.THREAD:
                after = model.post([(DUMP, data(call["daddr"], call["dlkey"], 1), 0, 0)])
                status = model.wait(after) if ticket >= 0 else ticket
            self.add(what, status, ref=ref, scope=scope, **call)
        elif what == "poll_one":
            if ticket >= 0 and status == OK:
                self.add("wait", status, ref=ref)  # and then it is known
                self.add(what, status, ref=ref)
        else:
            self.add(what, status, ref=ref, daddr=0)
        if status == OK and ref == self.tickets[-1]:
            self.unfenced = False

    def arrival(self) -> None:
        """Wait for a receive that has its message, or look at one that was waited for."""
        m, model, r = self.machine, self.model, self.random
        come = [at for at in self.receives if model.come(self.results[at] or 0)]
        come = [at for at in come if (self.results[at] or 0) >= len(model.arrived.cqes) - RECEIVES]
        if not come:
            return
        ref = r.choice(come)
        ticket = self.results[ref]
        assert ticket is not None
        # The newest one decides: a wait is for all before it.
        result = model.receive_wait(ticket)
        self.add("recv_wait", result, ref=ref, qp=m.peer, daddr=0)
        cqe = model.arrived.cqes[ticket]
        if cqe.opcode == nic_model.RESP_SEND_IMM:
            self.add("recv_imm", cqe.imm, ref=ref, qp=m.peer)

    def write(self, length: int, two_sided: bool) -> None:
        r, model = self.random, self.model
        while len(self.calls) < length:
            match r.randrange(12):
                case 0 | 1 | 2:
                    self.waiting()
                case 3 if two_sided:
                    self.recv()
                case 4 if (two_sided and model.peer.receives) or model.main.state == "ERR":
                    self.send()
                case 5 if two_sided:
                    self.arrival()
                case 6 if model.main.state == "RTS":  # announced by the one behind it
                    self.posting(r.choice(POSTS[:-len(COUNTED)]), skip=True)
                    self.posting("fence")
                    model.main.post(bytes(model.ring), model.reserved & 0xFFFF)
                case _:
                    self.posting(r.choice(POSTS))

    def finish(self) -> None:
        self.add("wait_all", self.model.wait_all())
        self.add("wait_all", self.model.companion[-1] if self.model.companion else OK, qp=self.machine.companion)


def compare(machine: Machine, model: Model) -> None:
    for name, memory, expected in (("here", machine.here, model.here), ("there", machine.there, model.there)):
        wrong = np.flatnonzero(memory != np.frombuffer(expected, np.uint8))
        assert not len(wrong), f"{len(wrong)} bytes {name} are wrong from {wrong[0]} on"


def compare_errors(queue: ExportedQp, cq: nic_model.Cq, opcode: int, state: str) -> None:
    """`last_error` names the first error completion of the queue pair."""
    assert queue.qp.state.name == state
    error = queue.last_error()
    failures = [(i, cqe.syndrome) for i, cqe in enumerate(cq.cqes) if cqe.opcode == opcode]
    if not failures:
        assert error is None or error.index is None
        return
    assert error is not None
    if error.index is not None:  # unless its completion was overwritten before anybody saw it
        assert (error.index, error.syndrome) == failures[0]


@patiently
def run_program(machine: Machine, seed: int, length: int, bad: float) -> None:
    """One thread, in all ways that a program can go wrong."""
    random = Random(seed)
    machine.begin_anew(random)
    model = Model(machine)
    writer = Writer(model, random, bad, (0, COUNTERS))
    writer.write(length, two_sided=True)
    writer.finish()
    results = run(machine.gpu, [[call] for call in writer.calls])[:, 0].tolist()
    for i, (got, expected) in enumerate(zip(results, writer.results)):
        assert expected in (None, got), f"call {i} of {len(results)}, {writer.calls[i]}, returned {got}, not {expected}"
    compare(machine, model)
    compare_errors(machine.main, model.done, REQ_ERR, model.main.state)
    compare_errors(machine.peer, model.arrived, nic_model.RESP_ERR, model.peer.state)
    assert machine.main.indices()["reserved"] == model.reserved


@patiently
def run_threads(machine: Machine, seed: int, length: int, threads: int) -> None:
    """Several threads, without errors, each with bytes of its own: whatever the order, memory is the same."""
    random = Random(seed)
    machine.begin_anew(random)
    share = COUNTERS // threads & ~7
    model = Model(machine)
    writers = [Writer(model, random, 0.0, (share * t, share * (t + 1)), t) for t in range(threads)]
    scopes = (device.THREAD, device.WARP) if machine.gpu.warp == 1 else (device.THREAD,)
    for writer in writers:
        writer.write(length, two_sided=False)
    longest = max(len(writer.calls) for writer in writers)
    columns = [[*writer.calls, *[{"what": "skip"}] * (longest - len(writer.calls))] for writer in writers]
    program = [[call | {"sharing": GPU, "scope": random.choice(scopes)} for call in step] for step in zip(*columns)]
    for queue in (machine.main, machine.companion):
        program += [[{"what": "barrier"}] * threads, [{"what": "wait_all", "qp": queue}] * threads]
    results = run(machine.gpu, program)
    assert not results[-3].any()
    assert not results[-1].any()
    tickets: list[int] = []
    for t, writer in enumerate(writers):
        for i, expected in enumerate(writer.results):
            if writer.calls[i]["what"] in POSTS:
                tickets.append(int(results[i, t]))
                assert tickets[-1] >= 0
            else:
                assert results[i, t] == expected == OK, writer.calls[i]
    assert len(set(tickets)) == len(tickets)
    compare(machine, model)
    assert set(machine.main.indices().values()) == {model.reserved}


def bad_of(machine: Machine, share: float) -> float:
    """No errors where packets are lost: a NAK comes once, and a queue pair in ERR does not repeat it."""
    faulty = machine.nics[0].port.config.faults
    return 0.0 if faulty else share


def test_programs(machine: Machine):
    """Long ones, for a start: each kind of call has succeeded, and failed in each way that it can."""
    machine.met.clear()
    bad = bad_of(machine, 0.02)
    for seed in range(40):
        run_program(machine, seed, 150, bad if seed % 4 else 0.0)
    nics = machine.nics
    disturbed = sum(int(nic.counters[name]) for nic in nics for name in ("out_of_sequence", "duplicate_request"))
    assert disturbed or not nics[0].port.config.faults
    others = ("send", "send_imm", "recv", "recv_wait", "recv_imm", "wait", "get_wait")
    wanted = {(what, "ok") for what in (*POSTS, *others)}
    if bad:
        wanted |= {(what, EIO) for what in (*POSTS, "wait", "wait_all", "get_wait", "recv_wait")}
        wanted |= {(what, EINVAL) for what in POSTS if what not in ("signal", "mcst", "fence", "signal_counter")}
        wanted |= {("recv", ENOBUFS)}
    assert set(machine.met) >= wanted


@settings(max_examples=40)
@given(st.integers(0, 1 << 32), st.integers(1, 40))
def test_small_programs(machine: Machine, seed, length):
    """The same for Hypothesis, which finds the smallest program that goes wrong."""
    run_program(machine, seed, length, bad_of(machine, 0.1))


@settings(max_examples=20)
@given(st.integers(0, 1 << 32), st.integers(1, 60), st.integers(2, 5))
def test_programs_of_threads(machine: Machine, seed, length, threads):
    run_threads(machine, seed, length, threads)


@pytest.mark.slow
@pytest.mark.timeout(450)  # half a minute on an idle machine
def test_many_programs(machine: Machine):
    for seed in range(1000, 1080):
        run_program(machine, seed, 300, bad_of(machine, random_share(seed)))
        run_threads(machine, seed, 200, 2 + seed % 5)


def random_share(seed: int) -> float:
    return (0.0, 0.005, 0.02, 0.2)[seed % 4]
