"""The examples run as they stand, each in a process of its own."""

import ast
import ctypes
import importlib.util
import itertools
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.l2 import ARP, Ether

from example import EXAMPLES, run
from gpunetio import Gpu
from gpunetio.gpu import cuda_backend
from repository import ROOT
from stream_end import StreamEnd
from tools import Tool, running

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
# Below, in test_nccl_examples.py, and in test_device_lib.py.
ELSEWHERE = {
    "all_to_all", "answer_pings", "balance_load", "count_flows", "cpp_put", "echo_udp", "forward_packets",
    "halo_exchange", "nccl_all_to_all", "nccl_dispatch", "torch_all_to_all",
}
# Too large to be installed for every run of the tests.
PACKAGES = {"cupy_put": "cupy", "torch_all_to_all": "torch", "torch_tensor": "torch"}


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
    ("torch_all_to_all", "torch", "'.[torch,cuda]'"),
])
def test_what_is_missing_is_told_in_a_line(tmp_path, name, module, cure):
    (tmp_path / "cupy.py").touch()  # found, unless it is what is missing
    path = str(EXAMPLES / f"{name}.py")
    program = f"import runpy, sys; sys.modules[{module!r}] = None; runpy.run_path({path!r}, run_name='__main__')"
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": path},
    )
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
    """Starts both halves: the options that both get, and those of one."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = ("-W", "error", EXAMPLES / "halo_exchange.py")

    with ExitStack() as stack:

        def start(*options, upper=(), lower=()):
            upper = Tool("--port", port, *options, *upper, program=program)
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
@pytest.mark.parametrize(
    "gpus", [("twin", "twin"), pytest.param(("0", "1"), marks=pytest.mark.gpu)], ids=["twin", "cuda"]
)
def test_halo_exchange_on_gpus(halves, gpus):
    """With all memory there, and the engines of both NICs."""
    if gpus[1].isdigit() and cuda_backend.device_count() < 2:
        pytest.skip("needs two GPUs")
    upper, lower = halves("--steps", 50, upper=("--gpu", gpus[0]), lower=("--gpu", gpus[1]))
    for half, tool in (("upper", upper), ("lower", lower)):
        status, out, err = tool.end()
        assert status == 0, err
        assert re.match(f"{half} half: 50 steps of 64 × 64 cells on .*, equal to NumPy's", out.splitlines()[-1])


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
    )
    reply, found = Ether(end.hear()), Ether(end.hear())
    back = Ether(src=ether.dst, dst=ether.src)
    assert bytes(reply) == bytes(back / IP(**there) / ICMP(type="echo-reply", id=3, seq=7) / bytes(range(100)))
    answer = ARP(op="is-at", hwsrc=ether.dst, psrc="10.9.0.1", hwdst=ether.src, pdst="10.9.0.2")
    assert bytes(found) == bytes(back / answer)
    tool.signal(signal.SIGINT)
    status, out, err = tool.end()
    assert (status, out.splitlines()[-1]) == (0, "1 ARP requests and 1 pings answered on host"), err


def test_echo_udp(started):
    """What it does not echo: other ports and addresses, fragments, and lengths that cannot be."""
    tool, (end,) = started("echo_udp", "echoes", 1, "10.9.0.1")
    ether, here = Ether(src="02:00:00:00:00:05", dst="02:00:0a:09:00:01"), IP(src="10.9.0.2", dst="10.9.0.1")
    end.send(
        ether / here / UDP(sport=9, dport=8) / b"x", ether / IP(dst="10.9.0.9") / UDP(sport=9, dport=7) / b"x",
        ether / IP(src="10.9.0.2", dst="10.9.0.1", flags="MF") / UDP(sport=9, dport=7) / b"x",
        ether / here / UDP(sport=9, dport=7, len=40) / b"x",
        *(ether / here / UDP(sport=1000 + i, dport=7) / bytes(i) for i in range(200)),
    )
    for i in range(200):
        back = IP(src="10.9.0.1", dst="10.9.0.2") / UDP(sport=7, dport=1000 + i) / bytes(i)
        assert end.hear() == bytes(Ether(src=ether.dst, dst=ether.src) / back)
    tool.signal(signal.SIGINT)
    status, out, err = tool.end()
    assert (status, out) == (0, "10.9.0.1 echoes UDP to port 7, on host. Ctrl+C ends it\n"), err


@pytest.mark.slow
def test_count_flows(started):
    """The largest flows come first, and everything is counted once, by four threads."""
    tool, (end,) = started("count_flows", "are counted", 1)
    ether = Ether(src="02:00:00:00:00:05", dst="02:00:0a:09:00:01")
    flows = [IP(src=f"192.168.1.{i % 7 + 1}", dst="10.9.0.1") / UDP(sport=2000 + i, dport=53) for i in range(20)]
    frames = [ether / one / bytes(100) for i, one in enumerate(flows) for _ in range(i + 1)]
    frames += [ether / IP(src="200.0.0.1", dst="250.0.0.2") / ICMP(), ether / IP(frag=5) / b"fragment"]
    random.Random(1).shuffle(frames)
    end.send(*frames)
    tool.until("211 packets")
    tool.signal(signal.SIGINT)
    status, out, err = tool.end()
    assert status == 0, err
    lines = out.splitlines()
    assert lines[-11] == "192.168.1.6:2019 to 10.9.0.1:53, protocol 17: 20 packets, 2840 bytes"
    assert [int(line.split()[-4]) for line in lines[-11:-1]] == list(range(20, 10, -1))
    assert lines[-1] == "211 packets of 21 flows on host"


def test_balance_load(started):
    """Clients are spread over both back ends, each keeps its own, and what comes back looks as if from the balancer."""
    us, macs = "02:00:0a:09:00:01", {f"10.9.0.{i}": f"02:00:00:00:00:0{i}" for i in (2, 3)}
    back_ends = [f"{ip}={mac}" for ip, mac in macs.items()]
    tool, (end,) = started("balance_load", "leads to", 1, "10.9.0.1", "80", *back_ends)
    seen: dict[str, int] = {}
    for i in range(40):
        l4 = (UDP, TCP)[i % 2]
        client = {"src": f"10.9.1.{i // 2 + 1}", "mac": f"02:00:00:00:01:{i // 2:02x}", "sport": 5000 + i // 2}
        frame = Ether(src=client["mac"], dst=us) / IP(src=client["src"], dst="10.9.0.1", ttl=9)
        end.send(frame / l4(sport=client["sport"], dport=80) / bytes(range(i)))
        asked = Ether(end.hear())
        back_end = asked[IP].dst
        seen[client["src"]] = seen.get(client["src"]) or asked[l4].sport
        assert asked[l4].sport == seen[client["src"]], "a client keeps its port"
        there = IP(src="10.9.0.1", dst=back_end, ttl=8) / l4(sport=asked[l4].sport, dport=80) / bytes(range(i))
        assert bytes(asked) == bytes(Ether(src=us, dst=macs[back_end]) / there)
        answer = IP(src=back_end, dst="10.9.0.1") / l4(sport=80, dport=asked[l4].sport) / b"answer"
        end.send(Ether(src=macs[back_end], dst=us) / answer)
        here = IP(src="10.9.0.1", dst=client["src"], ttl=63) / l4(sport=80, dport=client["sport"]) / b"answer"
        assert end.hear() == bytes(Ether(src=us, dst=client["mac"]) / here)
    assert len(set(seen.values())) == 20
    assert {port % 2 for port in seen.values()} == {0, 1}
    wrong = Ether(src=macs["10.9.0.2"], dst=us)  # a stranger, a port of nobody, and no hop left
    end.send(
        wrong / IP(src="10.9.0.7", dst="10.9.0.1") / UDP(sport=80, dport=min(seen.values())),
        wrong / IP(src="10.9.0.2", dst="10.9.0.1") / UDP(sport=80, dport=1024),
        wrong / IP(src="10.9.1.1", dst="10.9.0.1", ttl=1) / UDP(sport=5000, dport=80),
        wrong / IP(src="10.9.1.1", dst="10.9.0.1") / UDP(sport=5000, dport=80) / b"right",
    )
    assert end.hear().endswith(b"right")
    tool.signal(signal.SIGINT)
    status, out, err = tool.end()
    assert (status, out) == (0, "10.9.0.1 leads to 2 back ends, on host. Ctrl+C ends it\n"), err


@pytest.mark.slow
def test_balance_load_of_more_clients_than_ports(started):
    """A new client takes the port of one that was silent for longer; in a burst, each client has a port of its own."""
    us, macs = "02:00:0a:09:00:01", {f"10.9.0.{i}": f"02:00:00:00:00:0{i}" for i in (2, 3)}
    back_ends = [f"{ip}={mac}" for ip, mac in macs.items()]
    tool, (end,) = started("balance_load", "leads to", 1, "10.9.0.1", "80", *back_ends)
    ether, port, burst = Ether(src="02:00:00:00:01:00", dst=us), UDP(sport=5000, dport=80, chksum=0), 50
    whole = bytes(ether / IP(src="10.9.1.0", dst="10.9.0.1", chksum=0) / port / b"question")
    head, tail = whole[:26], whole[30:]  # the address of the client is between them
    clients = [(0x0A0A_0000 + i).to_bytes(4, "big") for i in range(40_000)]
    taken = set()
    for first in range(0, len(clients), burst):
        group = clients[first : first + burst]
        end.send(*(head + client + tail for client in group))
        asked = [end.hear() for _ in group]
        ports = [frame[34:36] for frame in asked]
        assert len(set(ports)) == burst
        taken.update(ports)
        end.send(*(turned(frame) for frame in asked))
        assert [end.hear()[30:34] for _ in group] == group
    assert len(taken) > 32_000
    tool.signal(signal.SIGINT)
    assert tool.end()[0] == 0


def turned(frame: bytes) -> bytes:
    """The answer to a UDP packet: source and destination are swapped."""
    macs, middle, (source, destination) = frame[6:12] + frame[:6], frame[12:26], (frame[26:30], frame[30:34])
    return macs + middle + destination + source + frame[36:38] + frame[34:36] + frame[38:]


def test_forward_packets(started):
    """Whatever arrives at one end leaves at the other, in order and unchanged; frames to all, too, and once."""
    tool, ends = started("forward_packets", "are joined", 2)
    macs = ("02:00:00:00:00:05", "ff:ff:ff:ff:ff:ff"), ("02:00:00:00:00:06", "02:00:00:00:00:05")
    sent = []
    for (src, dst), (here, there) in zip(macs, (ends, ends[::-1]), strict=True):
        first, probes = bytes(Ether(src=src, dst=dst, type=0x88B5) / b"the way is free"), 0
        while not select.select([there.sock], [], [], 0.2)[0]:  # a NIC may not have taken the other end yet
            here.send(first)
            probes += 1
        frames = [bytes(Ether(src=src, dst=dst, type=0x88B5) / bytes([i % 251]) / bytes(5 * i)) for i in range(250)]
        here.send(*frames)
        heard = (frame for frame in iter(there.hear, b"") if frame != first)
        assert list(itertools.islice(heard, len(frames))) == frames
        sent.append(probes + len(frames))
    tool.signal(signal.SIGINT)
    status, out, err = tool.end()
    assert (status, out.splitlines()[-1]) == (0, f"{sent[0]} packets forth and {sent[1]} back on host"), err


BACK_END = "10.9.0.2=02:00:00:00:00:02"


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "wrong"), [
    ("answer_pings unix:x 10.9.0", "address: invalid IPv4Address value: '10.9.0'"),
    (f"balance_load unix:x 10.9.0.1 http {BACK_END}", "port: invalid int value: 'http'"),
    (f"balance_load unix:x 10.9.0.1 80 {BACK_END} 10.9.0.3", "backend: invalid back_end value: '10.9.0.3'"),
    ("balance_load unix:x 10.9.0.1 80 10.9.0.2=02:00", "backend: invalid back_end value: '10.9.0.2=02:00'"),
    ("count_flows", "required: wire"), ("echo_udp unix:x", "required: address"), ("forward_packets", "required: wire"),
])
def test_wrong_arguments_end_in_the_usage(arguments, wrong):
    name, *others = arguments.split()
    status, lines, err = run(name, *others)
    assert (status, lines) == (2, [])
    assert err.startswith(f"usage: {name}.py")
    assert wrong in err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "wrong"), [
    ("answer_pings cable 10.9.0.1", "wire = 'cable': it must be one of"),
    (f"balance_load cable 10.9.0.1 80 {BACK_END}", "wire = 'cable': it must be one of"),
    ("count_flows cable", "wire = 'cable'"), ("echo_udp cable 10.9.0.1", "wire = 'cable'"),
    ("forward_packets unix:x cable", "wire = 'cable'"),
])
def test_a_nic_that_cannot_be_opened_is_told_in_a_line(arguments, wrong):
    status, lines, err = run(*arguments.split())
    assert (status, lines, err.count("\n")) == (1, [], 1)
    assert err.startswith("error: ")
    assert wrong in err


def test_balance_load_refuses_a_port_that_cannot_be(tmp_path):
    status, _, err = run("balance_load", f"unix:{tmp_path}/cable", "10.9.0.1", "70000", BACK_END)
    assert (status, err.splitlines()[-1]) == (1, "error: dst = 70000: it must be 0 to 65535")


def all_to_all(*starter: str | Path, size: int) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # Open MPI refuses otherwise
    done = subprocess.run(
        [*starter, EXAMPLES / "all_to_all.py", "--target", "cpu"], capture_output=True, text=True, timeout=100,
        env={**os.environ, **root, "PYTHONPATH": path, "PYTHONWARNINGS": "error"},
    )
    assert done.returncode == 0, done.stderr
    for rank in range(size):
        assert f"rank {rank} of {size}: 4096 right numbers from each rank, by kernels on host" in done.stdout


@pytest.mark.slow
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


# --- the all-to-all of tensors, which starts its ranks itself ---------------------------------------------------------


def torch_all_to_all(port: int, *arguments: str) -> list[str]:
    status, lines, err = run("torch_all_to_all", "--ranks", "2", "--port", str(port), *arguments)
    assert status == 0, err
    return lines


@pytest.mark.slow
def test_torch_all_to_all_on_twins(port):
    """Without a GPU, PyTorch and NCCL. Each rank compares what it has received with what it should be."""
    lines = torch_all_to_all(port, "--gpu", "twin", "--largest", "64", "--steps", "5", "--launches", "3")
    assert lines[1] == "all slices are right, of 2 ranks on twin"
    assert [line.split()[0] for line in lines[2:5]] == ["bytes", "8", "64"]
    assert lines[-1] == "NCCL: not available: the twin of a GPU is no CUDA device"


@pytest.mark.slow
@pytest.mark.gpu
def test_torch_all_to_all_on_gpus(port):
    """With tensors of PyTorch, beside NCCL."""
    skip_without_package("torch_all_to_all")
    if cuda_backend.device_count() < 2:
        pytest.skip("needs two GPUs")
    lines = torch_all_to_all(port, "--steps", "50")
    assert re.fullmatch("all slices are right, of 2 ranks on .*", lines[1])
    assert [line.split()[0] for line in lines[2:11]] == ["bytes", *(str(8**i) for i in range(1, 9))]
    assert lines[-1] == "ratio: NCCL's time divided by that of the kernel"


@pytest.mark.slow
def test_torch_all_to_all_with_a_rank_that_dies(port, monkeypatch):
    """The other ranks end, and the program says which one has died."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))))
    program = ("-W", "error", EXAMPLES / "torch_all_to_all.py")
    tool = Tool("--gpu", "twin", "--largest", 8, "--steps", 10**9, "--port", port, program=program)
    with running(tool):
        tool.until("all ranks begin")
        tasks = Path(f"/proc/{tool.process.pid}/task/{tool.process.pid}/children").read_text().split()
        ranks = [int(task) for task in tasks if b"spawn_main" in Path(f"/proc/{task}/cmdline").read_bytes()]
        os.kill(ranks[1], signal.SIGKILL)
        status, out, err = tool.end()
    assert (status, out) == (1, "all ranks begin\n")
    assert "error: rank 1 has ended with status -9\n" in err
    assert re.search("^rank 0: (the kernel ended with|error:) .*\nerror: rank 0 has", err, re.MULTILINE), err


@pytest.mark.parametrize(("arguments", "wrong"), [
    ("--gpu twin --ranks 33", "--ranks 33: give 1 to 32"), ("--gpu twin --ranks 0", "--ranks 0: give 1 to 32"),
    ("--gpu twin --largest 7", "--largest is at least 8, and --steps and --launches are at least 1"),
])
def test_torch_all_to_all_refuses_numbers_that_cannot_be(arguments, wrong):
    status, lines, err = run("torch_all_to_all", *arguments.split())
    assert (status, lines, err.splitlines()[-1]) == (2, [], f"torch_all_to_all.py: error: {wrong}")


# --- no GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "nbytes"), [(0, 0, 32768), (0, 0, 32767), (0, 0xFF, 32768), (719, 0, 32768)],
    ids=["right", "byte", "status", "error"],
)
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
from gpunetio.jit.cubin import ptx_of
from gpunetio.jit.kinds import INT, ArrayType
import answer_packets, answer_pings, balance_load, count_flows, echo_udp, first_put, halo_exchange, torch_all_to_all
for kernel, types in (
    (first_put.put_pieces, [INT] * 7), (halo_exchange.diffuse, [ArrayType("float64", 3, True)] + [INT] * 9),
    (torch_all_to_all.all_to_all, [INT] * 13),
    (answer_packets.answer, [INT] * 5), (answer_pings.answer, [INT] * 7), (balance_load.balance, [INT] * 9),
    (count_flows.count, [INT] * 4), (echo_udp.echo, [INT] * 4),
):
    ptx, _ = ptx_of(kernel, types, (9, 0))
    assert f".entry {kernel.name}(" in ptx
"""


@pytest.mark.slow
def test_kernels_compile_for_a_gpu_that_is_not_there():
    ran = subprocess.run([sys.executable, "-c", COMPILES, EXAMPLES], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr


def test_all_are_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SAID, *ON_A_GPU, *ELSEWHERE}
