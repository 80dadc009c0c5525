"""The examples run as they stand, each in a process of its own."""

import ast
import ctypes
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from scapy.layers.inet import ICMP, IP
from scapy.layers.l2 import ARP, Ether

from gpunetio import Gpu
from repository import ROOT
from stream_end import StreamEnd
from tools import Tool, running

EXAMPLES = ROOT / "examples"

# What they say, with numbers of queue pairs left out, in lines that come in any order, and last.
SAID = {
    "completion_epoll": (
        {f"queue {i % 3}: message {i}" for i in range(12)} | {"QP of soft1: QP_ACCESS_ERR"},
        "12 messages on 3 queues, then QP_ACCESS_ERR",
    ),
    "completion_asyncio": (
        {f"client {i}: 10 replies" for i in range(3)},
        "30 right replies of 30",
    ),
    "answer_packets": (set(), "1000 answers to 1000 questions on host"),
    "first_put": (set(), "4 threads put 256 of 256 bytes on host"),
    "see_packets": (
        {f"52 bytes from 192.0.2.1: question {i}" for i in range(5)},
        "5 of 5 packets seen on host",
    ),
    "torch_tensor": (set(), "1048576 numbers have arrived in a cpu tensor"),
}
ARRIVED = "0 failed puts, 32768 of 32768 bytes arrived"
ON_A_GPU = {
    "cuda_core_put": ARRIVED,
    "cupy_put": ARRIVED,
    "answer_packets": r"1000 answers to 1000 questions on [\da-f:.]+",
    "first_put": r"4 threads put 256 of 256 bytes on [\da-f:.]+",
    "see_packets": r"5 of 5 packets seen on [\da-f:.]+",
    "torch_tensor": "1048576 numbers have arrived in a cuda tensor",
}
# Below, and in test_device_lib.py.
ELSEWHERE = {"all_to_all", "answer_pings", "cpp_put", "forward_packets", "halo_exchange"}
PACKAGES = {"cupy_put": "cupy", "torch_tensor": "torch"}  # too large to be installed for every run of the tests


def run(name: str, *arguments: str) -> tuple[int, list[str], str]:
    """Exit status, lines of stdout with warnings as errors, stderr."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py", *arguments], capture_output=True, text=True,
        timeout=100, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    return done.returncode, re.sub(r"QP 0x\w+", "QP", done.stdout).splitlines(), done.stderr


def skip_without_package(name: str) -> None:
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"needs {PACKAGES[name]}, which is not installed")


@pytest.mark.parametrize("name", SAID)
def test_example(name, monkeypatch):
    skip_without_package(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    status, lines, err = run(name)
    assert status == 0, err
    said, last = SAID[name]
    assert said <= set(lines)
    assert lines[-1] == last
    if name == "completion_asyncio":
        assert any(line.startswith("server: SRQ_LIMIT_REACHED, ") for line in lines)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_example_on_a_gpu(name):
    skip_without_package(name)
    status, lines, err = run(name)
    assert status == 0, err
    assert re.fullmatch(ON_A_GPU[name], lines[-1])


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_each_says_how_to_run_it_and_what_it_needs(path):
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"python examples/{path.name}" in said
    assert re.search("^Needs (no extra|.*pip install)", said, re.MULTILINE)


@pytest.mark.parametrize(("name", "module", "cure"), [
    ("cuda_core_put", "cuda.core", "'.[cuda]'"), ("cupy_put", "cupy", "'.[cuda]' cupy-cuda13x"),
    ("cupy_put", "cuda.core", "'.[cuda]' cupy-cuda13x"), ("torch_tensor", "torch", "'.[torch]'"),
])  # fmt: skip
def test_what_is_missing_is_told_in_a_line(tmp_path, name, module, cure):
    (tmp_path / "cupy.py").touch()  # found, unless it is what is missing
    program = f"import runpy, sys; sys.modules[{module!r}] = None; runpy.run_path({str(EXAMPLES / name) + '.py'!r})"
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == f"no module {module}: pip install -e {cure}\n"


def test_cpp_put_without_arguments_tells_its_usage():
    status, lines, err = run("cpp_put")
    assert (status, lines) == (2, [])
    assert "usage: cpp_put.py" in err
    assert "required: library" in err


def test_cpp_put_tells_that_there_is_no_such_library():
    status, _, err = run("cpp_put", "not_there.so")
    assert status == 1
    assert re.fullmatch(r"/.*not_there\.so: .*; cpp_put\.cu has the command lines that build it\n", err)


# --- the halo exchange, whose ends are started one by one -------------------------------------------------------------


@pytest.fixture
def halves(monkeypatch):
    """Starts both halves: the options that both get, and those of the lower one."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = ("-W", "error", EXAMPLES / "halo_exchange.py")

    with ExitStack() as stack:

        def start(*options, lower=()):
            upper = Tool("--port", port, *options, program=program)
            stack.enter_context(running(upper))
            (address,) = re.findall(r"on ([\d.]+) port", upper.until("waiting for the lower half"))
            other = Tool("--port", port, "--peer", address, *options, *lower, program=program)
            stack.enter_context(running(other))
            return upper, other

        yield start


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_halo_exchange(halves, target):
    """Each half compares its result with NumPy's."""
    for half, tool in zip(("upper", "lower"), halves("--target", target, "--steps", 50), strict=True):
        status, out, err = tool.end()
        assert status == 0, err
        last = out.splitlines()[-1]
        assert re.fullmatch(rf"{half} half: 50 steps of 64 × 64 cells on [\w:.]+, equal to NumPy's", last)


@pytest.mark.slow
def test_halo_exchange_of_unequal_halves(halves):
    for tool in halves("--target", "cpu", lower=("--rows", 32)):
        status, _, err = tool.end()
        assert status == 1
        assert re.search("error: the upper half has .*64.*, the lower one .*32.*: give both the same", err)


@pytest.mark.slow
def test_halo_exchange_with_a_half_that_dies(halves):
    """The other one's kernel ends by itself."""
    upper, lower = halves("--target", "cpu", "--steps", 10**9)
    lower.until("both halves begin")
    lower.signal(signal.SIGKILL)
    status, _, err = upper.end()
    assert status == 1
    put_was_lost, put_had_arrived = "error completion: WQE ", "deadline passed: the other half is silent"
    assert re.search(f"the kernel ended with ({put_was_lost}|{put_had_arrived})", err)


# --- those that run until Ctrl+C, on sockets whose other ends are here ------------------------------------------------

PATIENCE = 30


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts a program on wires that lead to this test. Returns it, and the other ends."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    with ExitStack() as stack:

        def start(name, ready, cables, *arguments):
            paths = [tmp_path / str(i) for i in range(cables)]
            wires = [f"unix:{path}" for path in paths]
            tool = Tool(*wires, *arguments, program=("-W", "error", EXAMPLES / f"{name}.py"))
            stack.enter_context(running(tool))
            tool.until(ready)
            return tool, [stack.enter_context(closing(StreamEnd(path, PATIENCE))) for path in paths]

        yield start


def test_answer_pings(started):
    """What it does not answer: other addresses, other types of ICMP, and fragments."""
    tool, (end,) = started("answer_pings", "answers on", 1, "10.9.0.1")
    ether, ping = Ether(src="02:00:00:00:00:05", dst="02:00:0a:09:00:01"), ICMP(id=3, seq=7) / bytes(range(100))
    asked = ARP(hwsrc="02:00:00:00:00:05", psrc="10.9.0.2", pdst="10.9.0.1")
    here, there = {"src": "10.9.0.2", "dst": "10.9.0.1"}, {"src": "10.9.0.1", "dst": "10.9.0.2"}
    end.send(
        ether / IP(src="10.9.0.2", dst="10.9.0.9") / ping, ether / IP(**here) / ICMP(type="echo-reply"),
        ether / IP(**here, flags="MF") / ping, ether / IP(**here) / ping, ether / asked.copy(),
    )  # fmt: skip
    reply, found = Ether(end.hear()), Ether(end.hear())
    back = Ether(src=ether.dst, dst=ether.src)
    assert bytes(reply) == bytes(back / IP(**there) / ICMP(type="echo-reply", id=3, seq=7) / bytes(range(100)))
    answer = ARP(op="is-at", hwsrc=ether.dst, psrc="10.9.0.1", hwdst=ether.src, pdst="10.9.0.2")
    assert bytes(found) == bytes(back / answer)
    tool.signal(signal.SIGINT)
    status, out, err = tool.end()
    assert (status, out.splitlines()[-1]) == (0, "1 ARP requests and 1 pings answered on host"), err


def test_forward_packets(started):
    """Whatever arrives at one end leaves at the other, in order and unchanged; frames to all, too, and once."""
    tool, ends = started("forward_packets", "are joined", 2)
    macs = ("02:00:00:00:00:05", "ff:ff:ff:ff:ff:ff"), ("02:00:00:00:00:06", "02:00:00:00:00:05")
    for (src, dst), (here, there) in zip(macs, (ends, ends[::-1]), strict=True):
        frames = [bytes(Ether(src=src, dst=dst, type=0x88B5) / bytes([i % 251]) / bytes(5 * i)) for i in range(250)]
        here.send(*frames)
        assert [there.hear() for _ in frames] == frames
    tool.signal(signal.SIGINT)
    status, out, err = tool.end()
    assert (status, out.splitlines()[-1]) == (0, "250 packets forth and 250 back on host"), err


@pytest.mark.parametrize("name", ["answer_pings", "forward_packets"])
def test_usage(name):
    status, lines, err = run(name)
    assert (status, lines) == (1, [])
    assert err.startswith(f"usage: {name}.py WIRE")


def all_to_all(*starter: str | Path, size: int) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # Open MPI refuses otherwise
    done = subprocess.run(
        [*starter, EXAMPLES / "all_to_all.py", "--target", "cpu"], capture_output=True, text=True, timeout=100,
        env={**os.environ, **root, "PYTHONPATH": path, "PYTHONWARNINGS": "error"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in range(size):
        assert f"rank {rank} of {size}: 4096 right numbers from each rank, by kernels on host" in done.stdout


def test_all_to_all():
    """It starts four processes itself."""
    all_to_all(sys.executable, size=4)


@pytest.mark.slow
def test_all_to_all_of_mpirun():
    pytest.importorskip("mpi4py", reason="needs mpi4py (extra 'mpi')")
    mpirun = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if mpirun is None:
        pytest.skip("needs mpirun, of the package mpich or openmpi")
    all_to_all(mpirun, "-n", "3", sys.executable, size=3)


def test_all_to_all_of_torchrun():
    skip_without_package("torch_tensor")
    all_to_all(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", size=2)


# --- no GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "nbytes"), [(0, 0, 32768), (0, 0, 32767), (0, 0xFF, 32768), (719, 0, 32768)],
    ids=["right", "byte", "status", "error"],
)  # fmt: skip
def test_cpp_put_fails_unless_all_is_right(monkeypatch, capsys, error, status, nbytes):
    """The shared object is replaced by a function that leaves what is to be judged."""
    monkeypatch.syspath_prepend(EXAMPLES)
    cpp_put = importlib.import_module("cpp_put")
    monkeypatch.setattr(cpp_put.gn, "Gpu", lambda _: Gpu("host"))

    def run_put_pieces(blocks, threads, qp, raddr, rkey, laddr, lkey, piece, statuses):
        ctypes.memmove(raddr, laddr, nbytes)
        ctypes.memset(statuses, status, 8 * blocks * threads)
        return error

    library = SimpleNamespace(run_put_pieces=run_put_pieces)
    monkeypatch.setattr(cpp_put, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": lambda _: library}))
    said = f"CUDA error {error}, {128 if status else 0} failed puts, {nbytes} of 32768 bytes arrived"
    if (error, status, nbytes) == (0, 0, 32768):
        cpp_put.main("cpp_put.so")
        assert capsys.readouterr().out == said + "\n"
    else:
        with pytest.raises(SystemExit) as caught:
            cpp_put.main("cpp_put.so")
        assert caught.value.code == said


COMPILES = """
import sys
sys.path.insert(0, sys.argv[1])
from numba import cuda, float64, int64, void
from gpunetio.jit.launch import offline
import first_put, halo_exchange
for kernel, types in (
    (first_put.put_pieces, [int64] * 7), (halo_exchange.diffuse, [float64[:, :, ::1]] + [int64] * 9),
):
    with offline((9, 0)):
        cuda.compile(kernel.py_func, void(*types), device=False, cc=(9, 0), output="ptx", abi="numba")
"""


@pytest.mark.slow
def test_kernels_compile_for_a_gpu_that_is_not_there():
    pytest.importorskip("numba_cuda", reason="needs numba-cuda (extra 'cuda')")
    ran = subprocess.run([sys.executable, "-c", COMPILES, EXAMPLES], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr


def test_all_are_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SAID, *ON_A_GPU, *ELSEWHERE}
