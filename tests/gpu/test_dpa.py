"""The DPA: queue pairs whose rings and completions belong to kernels on DPA threads, in one process and in two."""

import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fake_device import FakeProvider
from gpunetio import Dpa, DpaCompletion, Gpu, GpuMemory, device, kernel, verbs
from gpunetio import dpa as dpa_module
from gpunetio.enums import CqOverrun, QpState, UarAllocationType, WrOpcode
from gpunetio.errors import BadStateError, InUseError, InvalidValueError, NotSupportedError, TimedOutError
from gpunetio.formats.cqe import Syndrome
from gpunetio.verbs import PD, QP, Context, RecvWr, SendWr, Sge
from neighbour import address as own_address
from nic_rig import until
from tools import Tool, error_line, running

# A DPA is the software NIC's, and its threads share memory with kernels on the host.
pytestmark = [pytest.mark.soft_nic, pytest.mark.host_memory]

SLOTS, RECEIVES = 8, 4
NBYTES = 1 << 16
MODES = ("simple", "advanced", "by completion")


@kernel
def put(qp, raddr, rkey, laddr, lkey, nbytes, rounds, out):
    """Every thread puts its own pieces and waits for each."""
    me, threads = device.global_id(), device.grid_dim() * device.block_dim()
    status = 0
    for i in range(rounds):
        at = (i * threads + me) * nbytes
        status = device.wait(qp, device.put(qp, raddr + at, rkey, laddr + at, lkey, nbytes))
        if status != 0:
            break
    device.st64(out + 8 * me, status)


@kernel
def send(qp, laddr, lkey, nbytes, count, out):
    """`count` messages of `nbytes`, one behind the other in memory."""
    status = 0
    for i in range(count):
        status = device.wait(qp, device.send(qp, laddr + i * nbytes, lkey, nbytes))
        if status != 0:
            break
    device.st64(out, status)


@kernel
def post(qp, laddr, lkey, nbytes, count, out):
    """Post `count` receives, one behind the other in memory; `out` gets the last result."""
    result = 0
    for i in range(count):
        result = device.recv(qp, laddr + i * nbytes, lkey, nbytes)
    device.st64(out, result)


@kernel
def take(qp, ticket, out):
    """Wait for a receive."""
    device.st64(out, device.recv_wait(qp, ticket))


@kernel
def take_and_post(qp, laddr, lkey, nbytes, first, count, ahead, out):
    """Wait for receives first … first + count − 1, `ahead` of which are posted; each posts its successor."""
    result = 0
    for i in range(count):
        result = device.recv_wait(qp, first + i)
        if result < 0:
            break
        if i + ahead < count:
            device.recv(qp, laddr + (i + ahead) * nbytes, lkey, nbytes)
    device.st64(out, result)


@kernel
def until_told(word, out):
    """Wait until the word is not 0."""
    while device.ld_relaxed64(word) == 0:
        device.yield_thread()
    device.st64(out, 1)


class Bench:
    """A DPA with memory on it, and queue pairs of it."""

    def __init__(self, ctx: Context, timeout: float = 10.0):
        self.ctx, self.dpa = ctx, Dpa(ctx, timeout=timeout)
        self.pd = ctx.create_pd()
        self.memory = [self.dpa.alloc(NBYTES) for _ in range(2)]
        self.mrs = [self.pd.register(memory) for memory in self.memory]
        self.memory[0].array[:] = np.random.default_rng(3).integers(0, 256, NBYTES, np.uint8)
        self.kept: list[object] = []  # for kernels, and what a queue pair does not take

    def completions(self) -> dict[str, DpaCompletion]:
        made = {
            "send_dpa_completion": self.dpa.create_completion(SLOTS),
            "receive_dpa_completion": self.dpa.create_completion(RECEIVES),
        }
        self.kept.append(made)
        return made

    def external(self) -> dict[str, object]:
        """A ring, a doorbell record and a page, in memory of the DPA."""
        ring, record = self.ctx.register_umem(self.dpa.alloc(8192)), self.ctx.register_umem(self.dpa.alloc(64))
        uar = self.ctx.create_uar(UarAllocationType.NONCACHE)
        return {"external_umem": (ring, 128), "external_dbr_umem": (record, 8), "external_uar": uar}

    def qp(self, mode: str = "simple", **attr: object) -> QP:
        wanted = {"sq_wr": SLOTS, "rq_wr": RECEIVES, **self.completions(), **attr}
        if mode != "by completion":
            wanted["dpa"] = self.dpa
        if mode != "simple":
            wanted |= self.external()
        return self.pd.create_qp(**wanted)  # type: ignore[arg-type]

    def pair(self, mode: str = "simple", **attr: object) -> tuple[QP, QP]:
        a, b = self.qp(mode, **attr), self.qp(mode, **attr)
        a.connect(b)
        return a, b

    def start(self, body, *args, threads=1) -> tuple[Any, GpuMemory]:
        out = self.dpa.alloc(8 * threads)
        self.kept.append(out)
        plain = [arg.get_dpa_handle(self.dpa) if isinstance(arg, QP) else arg for arg in args]
        return body[1, threads, self.dpa](*plain, out), out

    def run(self, body, *args, threads=1):
        return self.end(self.start(body, *args, threads=threads))

    @staticmethod
    def end(started) -> list[int]:
        launch, out = started
        assert launch.wait(60)
        return out.array.view(np.int64).tolist()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with verbs.open("soft0") as ctx:
        yield Bench(ctx)


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_kernels_write_in_both_directions(bench: Bench, mode):
    a, b = bench.pair(mode)
    (here, there), (here_mr, there_mr) = bench.memory, bench.mrs
    there.array[NBYTES // 2 :] = here.array[::-2]
    before = there.array.copy()
    half, threads, rounds, nbytes = NBYTES // 2, 4, 8, 1024
    both = [
        bench.start(put, a, there.address, there_mr.rkey, here, here_mr.lkey, nbytes, rounds, threads=threads),
        bench.start(
            put, b, here.address + half, here_mr.rkey, there.address + half, there_mr.lkey, nbytes, rounds,
            threads=threads,
        ),
    ]
    assert [bench.end(started) for started in both] == [[0] * threads] * 2
    assert np.array_equal(there.array[:half], here.array[:half])
    assert np.array_equal(here.array[half:], before[half:])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sges", [1, 3])
def test_kernels_send_and_receive(bench: Bench, mode, sges):
    a, b = bench.pair(mode, receive_max_sges=sges)
    (here, there), (here_mr, there_mr) = bench.memory, bench.mrs
    nbytes, count = 300, 5 * SLOTS + 3
    assert bench.run(post, b, there, there_mr.lkey, nbytes, RECEIVES) == [RECEIVES - 1]
    receiving = bench.start(take_and_post, b, there, there_mr.lkey, nbytes, 0, count, RECEIVES)
    assert bench.run(send, a, here, here_mr.lkey, nbytes, count) == [0]
    assert bench.end(receiving) == [nbytes]
    assert np.array_equal(there.array[: count * nbytes], here.array[: count * nbytes])
    assert not there.array[count * nbytes :].any()


def test_a_dpa_queue_and_a_cpu_queue(bench: Bench):
    """Either end of a connection may be driven by either."""
    dpa_qp = bench.qp(receive_max_sges=2)
    cq = bench.ctx.create_cq(16)
    cpu_qp = bench.pd.create_qp(sq_wr=4, rq_wr=4, send_cq=cq, receive_cq=cq)
    dpa_qp.connect(cpu_qp)
    (here, there), (here_mr, there_mr) = bench.memory, bench.mrs
    assert bench.run(post, dpa_qp, there, there_mr.lkey, 100, 1) == [0]
    assert bench.run(post, dpa_qp, 0, 0, 0, 1) == [1]  # for the immediate, which brings nothing here
    source = [Sge(here.address, 70, here_mr.lkey)]
    cpu_qp.post_send(
        SendWr(opcode=WrOpcode.SEND, sges=source),
        SendWr(opcode=WrOpcode.RDMA_WRITE_WITH_IMM, sges=source, remote_addr=there.address + 1000, rkey=there_mr.rkey),
    )
    assert bench.run(take, dpa_qp, 1) == [70]
    assert bench.run(take, dpa_qp, 0) == [70]  # told again
    assert np.array_equal(there.array[:70], here.array[:70])
    assert np.array_equal(there.array[1000:1070], here.array[:70])
    cpu_qp.post_recv(RecvWr(sges=[Sge(there.address + 2000, 50, there_mr.lkey)]))
    assert bench.run(send, dpa_qp, here, here_mr.lkey, 50, 1) == [0]
    found: list[verbs.Completion] = []
    until(lambda: len(found.__iadd__(cq.poll())) == 3, "two sends and a receive")
    assert [each.byte_len for each in found] == [0, 0, 50]
    assert np.array_equal(there.array[2000:2050], here.array[:50])


def test_a_plain_cq_may_take_a_side(bench: Bench):
    attr = {"send_dpa_completion": None, "send_cq": bench.ctx.create_cq(SLOTS, overrun=CqOverrun.ENABLE)}
    a, b = bench.qp(**attr), bench.qp()
    a.connect(b)
    (here, there), (here_mr, there_mr) = bench.memory, bench.mrs
    assert bench.run(put, a, there.address, there_mr.rkey, here, here_mr.lkey, 100, 3 * SLOTS) == [0]
    assert np.array_equal(there.array[: 300 * SLOTS], here.array[: 300 * SLOTS])


@pytest.mark.parametrize("sent", [1, SLOTS - 1, SLOTS, SLOTS + 3, 2 * SLOTS, 3 * SLOTS + 1])
def test_after_a_reset_kernels_begin_anew(bench: Bench, sent):
    """The device's indices are 0 again, those of the completion rings are not."""
    a, b = bench.pair()
    (here, there), (here_mr, there_mr) = bench.memory, bench.mrs
    for _ in range(3):
        handle = a.get_dpa_handle(bench.dpa)
        assert bench.run(post, b, there, there_mr.lkey, 10, 2) == [1]
        assert bench.run(send, a, here, here_mr.lkey, 10, 2) == [0]
        assert bench.run(take, b, 1) == [10]
        assert bench.run(put, a, there.address, there_mr.rkey, here, here_mr.lkey, 10, sent) == [0]
        for qp in (a, b):
            qp.reset()
        assert a.get_dpa_handle(bench.dpa) == handle
        a.connect(b)
    assert np.array_equal(there.array[: 10 * sent], here.array[: 10 * sent])


def test_a_completion_serves_one_queue_after_another(bench: Bench):
    completions = bench.completions()
    _, there = bench.memory
    here_mr, there_mr = bench.mrs
    for i in range(5):
        with bench.qp(**completions) as a, bench.qp() as b:
            a.connect(b)
            work = (there.address + 1000 * i, there_mr.rkey, bench.memory[0].address + 1000 * i, here_mr.lkey)
            assert bench.run(put, a, *work, 100, 5) == [0]
    wanted = bench.memory[0].array[:5000].reshape(5, 1000)[:, :500]
    assert np.array_equal(there.array[:5000].reshape(5, 1000)[:, :500], wanted)


# --- what kernels are told -------------------------------------------------------------------------------------------


def test_statuses_of_receives(bench: Bench):
    _, b = bench.pair()
    _, there = bench.memory
    key = bench.mrs[1].lkey
    assert bench.run(post, b, there, key, 10, RECEIVES + 1) == [device.ENOBUFS]
    assert bench.run(post, b, there, key, -1, 1) == [device.EINVAL]
    assert bench.run(send, b, there, key, 0, 1) == [device.EINVAL]
    assert bench.run(take, b, device.EINVAL) == [device.EINVAL]
    sender = bench.qp(rq_wr=0, receive_dpa_completion=None)
    assert bench.run(post, sender, there, key, 10, 1) == [device.EINVAL]


def test_a_wait_has_a_deadline():
    with verbs.open("soft0") as ctx:
        bench = Bench(ctx, timeout=0.2)
        _, b = bench.pair()
        assert bench.run(post, b, bench.memory[1], bench.mrs[1].lkey, 10, 1) == [0]
        assert bench.run(take, b, 0) == [device.ETIMEDOUT]


def test_errors_of_sends_and_receives_are_told(bench: Bench):
    a, b = bench.pair()
    (here, there), (here_mr, there_mr) = bench.memory, bench.mrs
    assert bench.dpa.last_error(a) is None
    assert bench.run(post, b, there, there_mr.lkey, 10, 2) == [1]
    assert bench.run(send, a, here, here_mr.lkey, 10, 1) == [0]
    assert bench.run(send, a, here, here_mr.lkey, 11, 1) == [device.EIO]  # too long for the receive
    assert bench.run(take, b, 1) == [device.EIO]
    sent, received = bench.dpa.last_error(a), bench.dpa.last_error(b)
    assert sent is not None
    assert received is not None
    assert (sent.index, sent.syndrome) == (1, Syndrome.REMOTE_INVAL_REQ)
    assert (received.index, received.syndrome) == (1, Syndrome.LOCAL_LENGTH)
    a.reset()
    assert bench.dpa.last_error(a) is None


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_device_without_a_dpa():
    with pytest.raises(NotSupportedError, match=r"fake0 has no DPA: export .* or open a software NIC"):
        Dpa(Context(FakeProvider()))


def test_a_dpa_needs_a_deadline(bench: Bench):
    with pytest.raises(InvalidValueError, match="deadline"):
        Dpa(bench.ctx, timeout=0)


def test_sizes(bench: Bench):
    with pytest.raises(InvalidValueError, match="cqe = 0: it must be 1 to"):
        bench.dpa.create_completion(0)
    with pytest.raises(InvalidValueError, match="cannot allocate 0 bytes"):
        bench.dpa.alloc(0)


def test_attributes_that_contradict_each_other(bench: Bench):
    ctx = bench.ctx
    cq, umem, uar = ctx.create_cq(SLOTS), ctx.register_umem(bench.dpa.alloc(8192)), ctx.create_uar()
    other, used = Dpa(ctx), bench.dpa.create_completion(SLOTS)
    with verbs.open("soft1") as far, Dpa(far) as elsewhere:
        user = bench.qp(send_dpa_completion=used)
        shared = bench.dpa.create_completion(SLOTS)
        external = {"external_umem": (umem, 0), "external_dbr_umem": (umem, 4096), "external_uar": uar}
        for error, match, attr in (
            (InvalidValueError, "send_cq and send_dpa_completion exclude .*: leave out send_cq", {"send_cq": cq}),
            (InvalidValueError, "receive_cq and receive_dpa_completion exclude each other", {"receive_cq": cq}),
            (InvalidValueError, "8 send requests without send_dpa_completion", {"send_dpa_completion": None}),
            (InvalidValueError, "4 receive requests without receive_dpa_comp", {"receive_dpa_completion": None}),
            (InvalidValueError, "sq_wr = 0: .* needs a send queue", {"sq_wr": 0}),
            (InvalidValueError, "belongs to another DPA: create it from DPA", {"dpa": other}),
            (InvalidValueError, "belongs to another DPA", {"send_dpa_completion": other.create_completion(8)}),
            (InvalidValueError, "belongs to another context", {
                "dpa": elsewhere, "send_dpa_completion": elsewhere.create_completion(8),
                "receive_dpa_completion": elsewhere.create_completion(8),
            }),
            (InvalidValueError, "for sends and for receives: create a completion for each", {
                "send_dpa_completion": shared, "receive_dpa_completion": shared,
            }),
            (InUseError, f"is used by {user}: create another completion", {"send_dpa_completion": used}),
            (InvalidValueError, "without dpa: give it too, or external_umem, .* of your own", {"dpa": None}),
            *((InvalidValueError, f"without {name}: give (all three|both)", {**external, name: None})
              for name in external),
        ):
            wanted = {"dpa": bench.dpa, "sq_wr": SLOTS, "rq_wr": RECEIVES, **bench.completions(), **attr}
            with pytest.raises(error, match=match):
                bench.pd.create_qp(**wanted)
        shared.close()  # nothing was left half-made
        umem.close()


def test_the_cpu_neither_posts_nor_polls(bench: Bench):
    qp = bench.qp()
    for call in (qp.post_send, qp.post_recv):
        with pytest.raises(BadStateError, match=r"external data path: kernels of DPA of soft0 .* without a DPA"):
            call()
    assert not hasattr(DpaCompletion, "poll")


def test_a_handle_is_for_its_dpa(bench: Bench):
    qp = bench.qp()
    plain = bench.pd.create_qp(sq_wr=4, send_cq=bench.ctx.create_cq(4))
    with Dpa(bench.ctx) as other:
        for wrong, made_for in ((qp, other), (plain, bench.dpa)):
            with pytest.raises(InvalidValueError, match="was not made for DPA of soft0: create a queue pair with dpa"):
                wrong.get_dpa_handle(made_for)
    with pytest.raises(InvalidValueError, match="is not a queue pair of"):
        bench.dpa.last_error(plain)


# --- lives -----------------------------------------------------------------------------------------------------------


def test_a_completion_outlives_its_queue(bench: Bench):
    completion = bench.dpa.create_completion(SLOTS)
    qp = bench.qp(send_dpa_completion=completion)
    with pytest.raises(InUseError, match="is still used by QP"):
        completion.close()
    with pytest.raises(InUseError, match="is still used by DPA completion"):
        completion.cq.close()
    qp.close()
    completion.close()
    assert completion.cq.closed


def test_a_dpa_closes_what_was_made_for_it(bench: Bench):
    memory, qp = bench.dpa.alloc(64), bench.qp("advanced")
    completion = qp.init_attr.send_dpa_completion
    bench.dpa.close()
    bench.dpa.close()
    assert completion is not None
    assert (qp.closed, completion.closed, completion.cq.closed, memory.closed) == (True,) * 4
    for call in (
        lambda: bench.dpa.alloc(8), lambda: bench.dpa.create_completion(8), lambda: qp.get_dpa_handle(bench.dpa),
        lambda: until_told[1, 1, bench.dpa](0, 0), lambda: bench.dpa.last_error(qp),
    ):
        with pytest.raises(BadStateError, match="is closed"):
            call()


@pytest.mark.parametrize("parent", [PD, Context])
def test_parents_close_queue_pairs_of_a_dpa(parent):
    with verbs.open("soft0") as ctx:
        bench = Bench(ctx)
        qp = bench.qp()
        (ctx if parent is Context else bench.pd).close()
        assert qp.closed
        assert bench.dpa.closed == (parent is Context)


@pytest.mark.parametrize("what", ["qp", "dpa", "pd", "ctx"])
def test_closing_waits_for_kernels(bench: Bench, what):
    word = bench.dpa.alloc(8)
    handles = {"qp": bench.qp(), "dpa": bench.dpa, "pd": bench.pd, "ctx": bench.ctx}
    launch, _ = bench.start(until_told, word.device_address)  # as a number, like the handle of a queue pair
    word_array = word.array
    closing = threading.Thread(target=handles[what].close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    assert handles["qp"].state == QpState.RST
    word_array[:] = 1
    closing.join(30)
    assert not closing.is_alive()
    assert launch.wait(0)
    assert handles[what].closed


def test_a_kernel_that_does_not_end_keeps_its_queue(bench: Bench, monkeypatch):
    monkeypatch.setattr(dpa_module, "LAUNCH_TIMEOUT", 0.1)
    bench.dpa.timeout = 0.1
    word, qp = bench.dpa.alloc(8), bench.qp()
    launch, _ = bench.start(until_told, word.device_address)
    for handle in (qp, bench.dpa):
        with pytest.raises(TimedOutError, match=r"cannot be closed: kernel until_told\[1, 1\] on the host still"):
            handle.close()
    assert qp.state == QpState.RST
    word.array[:] = 1
    assert launch.wait(30)
    bench.dpa.close()
    assert qp.closed


def test_two_sided_functions_on_a_gpu(bench: Bench, gpu: Gpu):
    """Exported queues have the same structure as those of a DPA."""
    cqs = [bench.ctx.create_cq(8, overrun=CqOverrun.ENABLE) for _ in range(4)]
    a, b = (
        gpu.export_qp(bench.pd.create_qp(sq_wr=8, rq_wr=4, send_cq=sends, receive_cq=receives))
        for sends, receives in (cqs[:2], cqs[2:])
    )
    a.connect(b)
    (here, there), (here_mr, there_mr), out = bench.memory, bench.mrs, gpu.alloc(8)
    for body, args in (
        (post, (b, there.address, there_mr.lkey, 100, 1, out)), (send, (a, here.address, here_mr.lkey, 100, 1, out)),
        (take, (b, 0, out)),
    ):
        assert body[1, 1, gpu](*args).wait(60)
    assert out.read().view(np.int64)[0] == 100
    assert np.array_equal(there.array[:100], here.array[:100])
    a.close()
    b.close()


# --- two processes ---------------------------------------------------------------------------------------------------


def ends(port, server=(), client=()):
    where = own_address()
    first = Tool("verbs_dpa", "--port", port, "--address", where, *server)
    first.until(f"Waiting for a client on {where} port {port}")
    return first, Tool("verbs_dpa", "-c", where, "--port", port, "--address", own_address(), *client)


@pytest.mark.parametrize(
    "options",
    [
        ("-s", 5000, "-i", 300),
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("-s", 1, "-i", 1000, "--wire", "udp"), marks=pytest.mark.slow),
    ],
)
def test_the_sample(port, options):
    with running(*ends(port, options, options)) as tools:
        outputs = [tool.end() for tool in tools]
    for (status, out, err), peer in zip(outputs, ("client", "server"), strict=True):
        assert (status, err) == (0, "")
        assert f"The DPA kernel wrote to the {peer}'s buffer" in out
        assert f"The {peer}'s DPA kernel wrote to this end's buffer as often, and all bytes are right" in out


@pytest.mark.slow
def test_the_ends_of_the_sample_must_agree(port):
    with running(*ends(port, ("-s", 10), ("-s", 20))) as tools:
        for status, _, err in [tool.end() for tool in tools]:
            assert status == 1
            assert "--size" in error_line(err)


@pytest.mark.slow
def test_an_end_of_the_sample_that_dies_is_noticed(port):
    with running(*ends(port, ("-i", 1 << 20), ("-i", 1 << 20))) as (server, client):
        server.until("Launching the DPA kernel")
        client.signal(signal.SIGKILL)
        status, _, err = server.end()
        assert status == 1
        assert "the client" in error_line(err)
