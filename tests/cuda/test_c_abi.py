"""Kernels built with GPUNetIO's own headers take our exported queue: a peer written from their description drives it.

tests/rigs/c_abi is one source, compiled by g++ for threads of the host and by nvcc for a GPU. Bytes that its WQE
builders leave alone hold garbage, as there.
"""

import ctypes
import logging
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gpunetio import Gpu, MemType, SharingMode, device, kernel, verbs
from gpunetio.device.library import foreign_kernels
from gpunetio.enums import CqOverrun, NicHandler, QpSendDbrMode, QpState
from gpunetio.formats.device_structs import DEV_CQ, DEV_QP
from gpunetio.gpu import ExportedQp
from nvcc import path_with_nvcc
from pair import NBYTES, Pair, make_pair
from repository import RIGS
from structures import changed, structure

SOURCE = RIGS / "c_abi/peer.cpp"
# Names and order of struct Job and of the enumerations there.
FIELDS = (
    "qp", "companion", "raddr", "rkey", "laddr", "lkey", "nbytes", "rounds", "batch", "sig_raddr", "sig_laddr", "op",
    "sharing", "rule", "ready", "submit", "code_opt",
)
PUT, GET, P, PUT_SIGNAL, PUT_COUNTER, PUT_COLLAPSED = range(6)
EXCLUSIVE, CTA, GPU = map(int, SharingMode)
RULES = {"below sm_90": 0, "sm_90": 1}
ATOMIC_CAS, LD_ST = 1, 2
DB, NO_DBR, PROXY = range(3)
SKIP_AVAILABILITY_CHECK, CPU_PROXY_UPDATE_PI = 2, 8
EIO = -5

DEPTH = 16  # so that rings go round many times
SIGNAL = NBYTES - 4096  # where `there` has the word that is counted in
FOUR_THREADS = {EXCLUSIVE: (1, 1), CTA: (1, 4), GPU: (2, 2)}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
every_sharing = pytest.mark.parametrize("sharing", list(SharingMode), ids=[mode.name for mode in SharingMode])


@pytest.fixture(scope="session")
def host_peer(tmp_path_factory) -> ctypes.CDLL:
    """The peer for threads of the host."""
    if shutil.which("g++") is None:
        pytest.skip("the peer is compiled by g++, which is not installed")
    built = tmp_path_factory.mktemp("peer") / "peer.so"
    command = ["g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]
    subprocess.run([*command, SOURCE, "-o", built], check=True, timeout=100)
    peer = ctypes.CDLL(str(built))
    peer.peer.argtypes = [ctypes.c_uint64] * 3
    peer.proxy.argtypes = [ctypes.c_uint64] * 3 + [ctypes.c_uint32, ctypes.c_uint64]
    peer.proxy.restype = ctypes.c_uint64
    return peer


def compile_for_cuda(folder: Path, arch: str) -> Path:
    """The peer as a cubin."""
    nvcc = shutil.which("nvcc", path=path_with_nvcc(folder / "cuda"))
    assert nvcc is not None
    command = [nvcc, "-std=c++17", "-x", "cu", "-cubin", f"-arch={arch}", SOURCE, "-o", folder / "peer.cubin"]
    subprocess.run(command, check=True, timeout=100)
    return folder / "peer.cubin"


class Peer:
    """Runs jobs on the threads of the host, or on the GPU."""

    def __init__(self, gpu: Gpu, host_peer: ctypes.CDLL, folder: Path):
        self.gpu, self.host = gpu, host_peer
        if gpu.target == "cuda":
            from cuda.core import Device, ObjectCode

            self.device = Device(0)
            self.device.set_current()
            cubin = compile_for_cuda(folder, f"sm_{self.device.arch}")
            self.kernel = ObjectCode.from_cubin(str(cubin)).get_kernel("peer")
            self.stream = self.device.create_stream()

    def run(self, pair: Pair, grid: int = 1, block: int = 1, **fields: int) -> list[int]:
        """What each thread returns. Fields that are left out are those of a put from `here` to `there`."""
        job = {
            "qp": pair.a.device_address, "companion": 0, "raddr": pair.there.address, "rkey": pair.there_mr.rkey,
            "laddr": pair.here.address, "lkey": pair.here_mr.lkey, "nbytes": 100, "rounds": 1, "batch": 1,
            "sig_raddr": pair.there.address + SIGNAL, "sig_laddr": pair.here.address + SIGNAL, "op": PUT,
            "sharing": EXCLUSIVE, "rule": 0, "ready": ATOMIC_CAS, "submit": DB, "code_opt": 0,
        } | fields
        with (
            self.gpu.alloc(8 * len(FIELDS), MemType.CPU_GPU) as words,
            self.gpu.alloc(8 * grid * block, MemType.CPU_GPU) as status,
            foreign_kernels(),
        ):
            words.array.view(np.int64)[:] = [job[name] for name in FIELDS]
            status.array[:] = 0xEE
            self._launch(words.device_address, status.device_address, grid, block)
            return status.array.view(np.int64).tolist()

    def _launch(self, job: int, status: int, grid: int, block: int) -> None:
        if self.gpu.target == "cpu":
            self.host.peer(job, status, grid * block)
            return
        from cuda.core import LaunchConfig, launch

        launch(self.stream, LaunchConfig(grid=grid, block=block), self.kernel, job, status)
        self.stream.sync()


@pytest.fixture
def peer(gpu: Gpu, host_peer, tmp_path) -> Peer:
    return Peer(gpu, host_peer, tmp_path)


@pytest.fixture
def pair(gpu: Gpu) -> Iterator[Pair]:
    """As everywhere, with a small ring and room for signals behind the data."""
    with verbs.open("soft0") as ctx:
        opened = make_pair(ctx, gpu, DEPTH)
        opened.here.array[SIGNAL:] = 0
        yield opened
        opened.a.close()
        opened.b.close()


def another(pair: Pair, depth: int = DEPTH, **options) -> ExportedQp:
    """Instead of `a` a queue of another kind, connected to a new `b`."""
    pair.a.close()
    pair.b.close()
    pair.a, pair.b = pair.gpu.create_qp(pair.pd, depth, **options), pair.gpu.create_qp(pair.pd, DEPTH)
    pair.a.connect(pair.b)
    return pair.a


def arrived(pair: Pair, nbytes: int) -> bool:
    """The first `nbytes`, and none behind them."""
    there = pair.there.array[:SIGNAL]
    return bool((there[:nbytes] == pair.here.array[:nbytes]).all()) and not there[nbytes:].any()


def signalled(pair: Pair) -> int:
    return int(pair.there.array[SIGNAL:].view(np.int64)[0])


def all_at(count: int) -> dict[str, int]:
    return dict.fromkeys(("reserved", "ready", "submitted", "completed"), count)


def test_it_compiles_for_cuda(tmp_path):
    """The offsets, which it asserts, are those of nvcc too."""
    assert compile_for_cuda(tmp_path, "sm_90").read_bytes().startswith(b"\x7fELF")


# --- put, in all its modes -----------------------------------------------------------------------------------------


@every_rule
@every_sharing
@pytest.mark.parametrize("ready", [ATOMIC_CAS, LD_ST], ids=["cas", "ld_st"])
def test_put(pair: Pair, peer: Peer, sharing, rule, ready):
    grid, block = FOUR_THREADS[sharing]
    threads, rounds = grid * block, 100
    statuses = peer.run(pair, grid, block, sharing=sharing, rule=rule, ready=ready, rounds=rounds, batch=3)
    assert statuses == [0] * threads
    assert arrived(pair, threads * rounds * 100)
    assert pair.a.indices() == all_at(threads * rounds)


@pytest.mark.parametrize("nbytes", [0, 1, 4097, SIGNAL])
def test_put_of_any_size(pair: Pair, peer: Peer, nbytes):
    assert peer.run(pair, nbytes=nbytes) == [0]
    assert arrived(pair, nbytes)
    assert pair.a.indices() == all_at(1)


@every_rule
@pytest.mark.parametrize("begin", [0, (1 << 32) - (1 << 16)], ids=["0", "2^32"])
def test_indices_go_through_2_to_the_16(pair: Pair, peer: Peer, rule, begin):
    """The NIC and CQEs know 16 bits of an index, doorbells 24 and the peer 64."""
    if begin:
        set_indices(pair.a, begin)
    threads, rounds = 4, 17_000
    assert peer.run(pair, 2, 2, sharing=GPU, rule=rule, op=P, nbytes=8, rounds=rounds, batch=4) == [0] * threads
    assert arrived(pair, threads * rounds * 8)
    assert pair.a.indices() == all_at(begin + threads * rounds)


def set_indices(exported: ExportedQp, index: int) -> None:
    """Have the owner's side of a new queue count from a multiple of 2^16."""
    with changed(exported) as (image, _):
        for name in ("sq_rsvd_index", "sq_ready_index", "sq_wqe_pi"):
            DEV_QP.at(image)[name] = index
        DEV_CQ.at(image, DEV_QP.cq_sq)["cqe_ci"] = index


@every_rule
def test_after_a_reset_completions_go_on(pair: Pair, peer: Peer, rule):
    """WQEs count from 0 again, the CQ does not: `cqe_rsvd` tells the difference."""
    for rounds in (5, DEPTH + 6, 1, 3 * DEPTH):
        pair.there.array[:] = 0
        assert peer.run(pair, rule=rule, rounds=rounds, batch=2) == [0]
        assert arrived(pair, rounds * 100)
        assert pair.a.indices() == all_at(rounds)
        for exported in (pair.a, pair.b):
            exported.qp.reset()
            exported.reset()
        pair.a.connect(pair.b)


# --- the other operations ------------------------------------------------------------------------------------------


@every_sharing
def test_get(pair: Pair, peer: Peer, sharing):
    grid, block = FOUR_THREADS[sharing]
    pair.there.array[:] = pair.here.array[::-1]
    total = grid * block * 30 * 64
    assert peer.run(pair, grid, block, sharing=sharing, op=GET, nbytes=64, rounds=30, batch=2) == [0] * grid * block
    assert (pair.here.array[:total] == pair.there.array[:total]).all()


@every_sharing
def test_put_with_a_signal(pair: Pair, peer: Peer, sharing):
    """Two WQEs at a time, of which the second counts at the target and brings back what was there."""
    grid, block = FOUR_THREADS[sharing]
    threads, rounds = grid * block, 60
    assert peer.run(pair, grid, block, sharing=sharing, op=PUT_SIGNAL, rounds=rounds, batch=2) == [0] * threads
    assert arrived(pair, threads * rounds * 100)
    assert signalled(pair) == threads * rounds
    last = pair.here.array[SIGNAL:].view(np.int64)[:threads]
    assert len(set(last.tolist())) == threads
    assert last.max() == threads * rounds - 1


@every_sharing
def test_put_with_a_counter(pair: Pair, peer: Peer, sharing):
    """A companion queue waits for the main queue's completions, by WAIT, and counts them, with no poll by a kernel."""
    cq = pair.ctx.create_cq(DEPTH, overrun=CqOverrun.ENABLE)
    master = pair.pd.create_qp(sq_wr=DEPTH, send_cq=cq, core_direct_master=True)
    companion, far = pair.gpu.export_qp(master), pair.gpu.create_qp(pair.pd, DEPTH)
    companion.connect(far)
    grid, block = FOUR_THREADS[sharing]
    threads, rounds = grid * block, 40
    statuses = peer.run(
        pair, grid, block, sharing=sharing, op=PUT_COUNTER, companion=companion.device_address, rounds=rounds
    )
    assert statuses == [0] * threads
    assert arrived(pair, threads * rounds * 100)
    end = companion.indices()["submitted"]
    assert end == 2 * threads * rounds
    assert peer.run(pair, qp=companion.device_address, nbytes=0) == [0]  # behind all adds
    assert signalled(pair) == threads * rounds
    companion.close()


def test_an_error_completion(pair: Pair, peer: Peer, caplog):
    caplog.set_level(logging.CRITICAL, "gpunetio.nic")
    assert peer.run(pair, rkey=pair.there_mr.rkey ^ 0x100, rounds=3, batch=3) == [EIO]
    assert pair.a.qp.state is QpState.ERR
    assert pair.a.indices()["completed"] == 0


# --- other doorbells, other completion queues ----------------------------------------------------------------------


@every_sharing
def test_a_queue_without_a_doorbell_record(pair: Pair, peer: Peer, sharing):
    another(pair, send_dbr_mode=QpSendDbrMode.NO_DBR_EXT)
    grid, block = FOUR_THREADS[sharing]
    threads, rounds = grid * block, 60
    assert peer.run(pair, grid, block, sharing=sharing, submit=NO_DBR, rounds=rounds, batch=2) == [0] * threads
    assert arrived(pair, threads * rounds * 100)


@pytest.mark.timeout(300)
def test_no_ring_is_lost_without_a_record(pair: Pair, peer: Peer):
    """Threads ring as they come, with plain stores. Each launch goes on where the last one has ended."""
    another(pair, 512, send_dbr_mode=QpSendDbrMode.NO_DBR_EXT)
    grid, block, rounds, launches = (4, 64, 400, 1000) if pair.gpu.target == "cuda" else (2, 2, 100, 3)
    threads, nbytes = grid * block, 8
    for launch in range(launches):
        pair.there.array[:SIGNAL] = 0
        statuses = peer.run(
            pair, grid, block, sharing=GPU, rule=RULES["sm_90"], submit=NO_DBR, rounds=rounds, nbytes=nbytes
        )
        assert statuses == [0] * threads
        assert arrived(pair, threads * rounds * nbytes)
        assert pair.a.indices() == all_at((launch + 1) * threads * rounds)


@contextmanager
def with_a_word_for_a_doorbell(pair: Pair) -> Iterator[tuple[int, np.ndarray]]:
    """Address of a copy of `a`'s structure that rings in ordinary memory, and that memory: the doorbell, and a word."""
    with pair.gpu.alloc(DEV_QP.size) as copy, pair.gpu.alloc(16, MemType.CPU_GPU) as words:
        image = structure(pair.a)
        q = DEV_QP.at(image)
        q["sq_db"], q["nic_handler"] = words.device_address, NicHandler.CPU_PROXY
        copy.write(image)
        yield copy.device_address, words.array.view(np.int64)


def test_the_record_alone_is_enough(pair: Pair, peer: Peer):
    """A NIC that has missed the rings looks at the record when it is idle."""
    with with_a_word_for_a_doorbell(pair) as (qp, words):
        assert peer.run(pair, qp=qp, rounds=2 * DEPTH, batch=DEPTH) == [0]
        assert words[0] != 0
    assert arrived(pair, 2 * DEPTH * 100)


@contextmanager
def proxied(pair: Pair, peer: Peer) -> Iterator[int]:
    """Address of a structure whose doorbell is a word that a thread beside it carries to the NIC, and to the record."""
    qp = pair.a.qp
    swapped_qpn = int.from_bytes((qp.qpn << 8 & 0xFFFF_FFFF).to_bytes(4, "big"), "little")
    with with_a_word_for_a_doorbell(pair) as (address, words):
        word, stop = words.ctypes.data, words.ctypes.data + 8
        where = (word, qp.dbr_address + 4, qp.doorbell_register, swapped_qpn, stop)
        carried: list[int] = []
        thread = threading.Thread(target=lambda: carried.append(peer.host.proxy(*where)))
        thread.start()
        try:
            yield address
        finally:
            words[1] = 1
            thread.join()
        assert carried[0] > 0


@pytest.mark.host_memory  # the proxy, a thread of the CPU, writes the doorbell record
@every_sharing
@pytest.mark.parametrize("code_opt", [0, CPU_PROXY_UPDATE_PI], ids=["", "update_pi"])
def test_a_proxy_rings(pair: Pair, peer: Peer, sharing, code_opt):
    grid, block = FOUR_THREADS[sharing]
    threads, rounds = grid * block, 30
    with proxied(pair, peer) as qp:
        statuses = peer.run(
            pair, grid, block, qp=qp, sharing=sharing, submit=PROXY, code_opt=code_opt, rounds=rounds, batch=2
        )
    assert statuses == [0] * threads
    assert arrived(pair, threads * rounds * 100)


@every_sharing
def test_a_collapsed_completion_queue(pair: Pair, peer: Peer, sharing):
    """One CQE for all; the index's upper bits come from what has been submitted."""
    another(pair, cq_collapsed=True)
    grid, block = FOUR_THREADS[sharing]
    threads, rounds = grid * block, 66_000 // (grid * block)
    statuses = peer.run(
        pair, grid, block, sharing=sharing, op=PUT_COLLAPSED, code_opt=SKIP_AVAILABILITY_CHECK, nbytes=8,
        rounds=rounds, batch=DEPTH // threads,
    )
    assert statuses == [0] * threads
    assert arrived(pair, threads * rounds * 8)


# --- beside our own functions --------------------------------------------------------------------------------------


@kernel
def put_each(qp, raddr, rkey, laddr, lkey, nbytes, rounds, out):
    """Every thread puts its own pieces, one after another, and waits for each."""
    me = device.global_id()
    threads = device.grid_dim() * device.block_dim()
    status = 0
    for i in range(rounds):
        at = (i * threads + me) * nbytes
        status = device.wait(qp, device.put(qp, raddr + at, rkey, laddr + at, lkey, nbytes))
        if status != 0:
            break
    device.st64(out + 8 * me, status)


@every_rule
@pytest.mark.parametrize("ready", [ATOMIC_CAS, LD_ST], ids=["cas", "ld_st"])
def test_the_peer_shares_a_queue_with_our_functions(pair: Pair, peer: Peer, rule, ready):
    """At the same time: the same reservations, the same lock, the same consumer index."""
    rounds, nbytes, half = 500, 64, SIGNAL // 2
    with pair.gpu.alloc(16, MemType.CPU_GPU) as out:
        launch = put_each[1, 2, pair.gpu](
            pair.a, pair.there.address, pair.there_mr.rkey, pair.here.address, pair.here_mr.lkey, nbytes, rounds, out
        )
        statuses = peer.run(
            pair, 1, 2, sharing=GPU, rule=rule, ready=ready, rounds=rounds, nbytes=nbytes,
            raddr=pair.there.address + half, laddr=pair.here.address + half,
        )
        assert launch.wait(60)
        assert statuses + out.array.view(np.int64).tolist() == [0] * 4
    total = 2 * rounds * nbytes
    for at in (0, half):
        assert (pair.there.array[at : at + total] == pair.here.array[at : at + total]).all()
    assert pair.a.indices() == all_at(4 * rounds)
