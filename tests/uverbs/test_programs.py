"""Programs that nobody here wrote, on software NICs, by the system's own libibverbs and libmlx5."""

import gzip
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import later
from gpunetio.embed.python import shared_library
from gpunetio.fabric.pcap_reader import PcapFile
from nic_rig import until
from programs import LIMIT, RUN, both, iterations, run, serving
from rdma_core import skip_without, skip_without_run
from repository import environment

pytestmark = [pytest.mark.soft_nic, pytest.mark.host_memory]


@pytest.fixture(autouse=True)
def _needs():
    skip_without_run()


def test_devices():
    skip_without("ibv_devinfo")
    done = run("ibv_devinfo", "-v", options=("--nics", "3"))
    assert done.returncode == 0, done.stderr
    assert re.findall(r"hca_id:\s+(\S+)", done.stdout) == ["soft0", "soft1", "soft2"]
    assert done.stdout.count("PORT_ACTIVE (4)") == 3
    assert done.stdout.count("vendor_part_id:			4129") == 3
    assert "GID[  0]:		::ffff:127.0.0.1, RoCE v2" in done.stdout


def test_a_nic_for_each_address():
    skip_without("ibv_devinfo")
    done = run("ibv_devinfo", "-v", options=("--address", "127.0.0.77"))
    assert re.findall(r"hca_id:\s+(\S+)", done.stdout) == ["soft0"], done.stderr
    done = run("ibv_devinfo", "-v", options=("--address", "127.0.0.77", "--address", "127.0.0.78"))
    assert re.findall(r"::ffff:(\S+), RoCE v2", done.stdout) == ["127.0.0.77", "127.0.0.78"], done.stderr


def test_pingpong(port):
    _, client = both("ibv_rc_pingpong", "-g", 0, "-n", 200, "-p", port, "-c")
    assert "200 iters in" in client
    assert "invalid data" not in client


@pytest.mark.slow
def test_a_write(port):
    out, _ = both("ib_write_bw", "-F", "-n", 100, "-s", 4096, "-p", port)
    assert "PCIe relax order: ON" in out
    assert "Link type       : Ethernet" in out


PERFTEST = [
    "ib_write_lat -n 100", "ib_write_bw -n 200 -q 8", "ib_write_bw -n 50 -a --use_old_post_send",
    "ib_write_bw -n 200 -b -c UC", "ib_read_lat -n 100", "ib_read_bw -n 100 -e", "ib_send_lat -n 100 -I 64",
    "ib_send_lat -n 100 -e", "ib_read_lat -n 100 -e",
    "ib_send_lat -n 100 -c UD -s 1024", "ib_send_bw -n 200 -e", "ib_send_bw -n 200 -q 4 --use-srq",
    "ib_send_bw -n 200 -c UD", "ib_atomic_bw -n 200 -A CMP_AND_SWAP",
]


@pytest.mark.slow
@pytest.mark.parametrize("command", PERFTEST)
def test_perftest(port, command):
    _, client = both(*command.split(), "-F", "-p", port)
    assert iterations(client) >= 50


# --- UCX

# UCX posts and polls by its own code for mlx5 (rc_x, ud_x) or by libibverbs (rc_v, ud_v). It asks for payload in CQEs.
# With relaxed ordering, its default on AMD processors, puts take an indirect key.
UCX = {
    "UCX_NET_DEVICES": "soft0:1", "UCX_IB_PCI_RELAXED_ORDERING": "y", "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_LOG_LEVEL": "warn",
}


@pytest.mark.slow
@pytest.mark.parametrize("how, test", [
    ("rc_x", "tag_lat"), ("rc_x", "ucp_get"), ("rc_x", "ucp_fadd"), ("rc_x", "ucp_put_lat"), ("ud_x", "tag_bw"),
    ("rc_v", "tag_lat"), ("rc_v", "ucp_put_lat"), ("ud_v", "tag_lat"),
])
@pytest.mark.parametrize("devx", ["y", "n"])
def test_ucx(port, how, test, devx):
    _, client = both(
        "ucx_perftest", "-t", test, "-n", 100, "-w", 10, "-s", 8, "-p", port,
        UCX_TLS=how, UCX_IB_MLX5_DEVX=devx, **UCX,
    )
    assert re.search(r"Final:\s+100 ", client), client


@pytest.mark.slow
@pytest.mark.parametrize("devx", ["y", "n"])
@pytest.mark.parametrize("nbytes", [4, 8])
@pytest.mark.parametrize("test", ["ucp_add", "ucp_fadd", "ucp_swap", "ucp_cswap"])
def test_atomics_of_ucx(port, test, nbytes, devx):
    """Words of 4 bytes, and swaps, are masked atomics."""
    _, client = both(
        "ucx_perftest", "-t", test, "-n", 100, "-w", 10, "-s", nbytes, "-p", port,
        UCX_TLS="rc_x", UCX_IB_MLX5_DEVX=devx, **UCX,
    )
    assert re.search(r"Final:\s+100 ", client), client


@pytest.mark.slow
def test_what_ucx_finds():
    """Also after it has put a jump to itself into mmap."""
    skip_without("ucx_info")
    done = run("ucx_info", "-d", **UCX)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"Transport: (\w+)\n#\s+Device: soft0:1", done.stdout) == [
        "rc_verbs", "rc_mlx5", "ud_verbs", "ud_mlx5",
    ]
    of_rc_mlx5 = done.stdout.partition("Transport: rc_mlx5\n")[2].partition("Transport: ")[0]
    assert len(re.findall(r"atomic_\w+: 32, 64 bit", of_rc_mlx5)) == 10
    assert "failed" not in re.sub("# < failed to open connection manager rdmacm >", "", done.stdout)


@pytest.mark.slow
def test_pingpong_with_events(port):
    both("ibv_rc_pingpong", "-g", 0, "-n", 100, "-e", "-p", port, "-c")


@pytest.mark.slow
@pytest.mark.parametrize("program", ["ibv_uc_pingpong", "ibv_ud_pingpong", "ibv_srq_pingpong"])
def test_other_pingpongs(port, program):
    both(program, "-g", 0, "-n", 100, "-p", port)


@pytest.mark.slow
def test_datagrams_on_infiniband(port):
    """libmlx5 makes address handles there without a call of the kernel, also to answer who has sent."""
    both("ibv_ud_pingpong", "-n", 100, "-p", port, options=("--link-layer", "infiniband"))


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_a_program_under_valgrind():
    """Its NIC is compiled outside: under valgrind, that would take longer than this test may."""
    command = [*RUN, "--nics", "1", "--", "valgrind", "-q", "ibv_devinfo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment(), check=False)
    assert done.stdout.startswith("hca_id:\tsoft0\n"), done.stderr
    assert "outside, it failed" not in done.stderr


# Of rdma-core's own tests, those of what software NICs have. They skip what a device says that it does not have.
PYVERBS = [
    "test_addr", "test_atomic", "test_cq", "test_cq_events", "test_cqex", "test_device", "test_mr", "test_pd",
    "test_qp", "test_qpex", "test_parent_domain", "test_relaxed_ordering", "test_mlx5_uar", "test_mlx5_devx",
    "test_mlx5_udp_sport", "test_mlx5_raw_wqe",
]
PYTHON, SUITE = "/usr/bin/python3", Path("/usr/share/doc/rdma-core/tests")


@pytest.fixture(scope="module")
def pyverbs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rdma-core's tests, which Debian compresses."""
    if not (SUITE / "run_tests.py").exists():
        pytest.skip("the tests of rdma-core are not installed (python3-pyverbs)")
    version = subprocess.run(
        [PYTHON, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True, check=True
    )
    if tuple(map(int, version.stdout.split())) != sys.version_info[:2]:
        pytest.skip("pyverbs is for another version of Python")
    folder = tmp_path_factory.mktemp("pyverbs")
    (folder / "tests").mkdir()
    for path in SUITE.iterdir():
        data = path.read_bytes()
        packed = path.suffix == ".gz"
        (folder / "tests" / (path.stem if packed else path.name)).write_bytes(gzip.decompress(data) if packed else data)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("module", PYVERBS)
def test_pyverbs(pyverbs, module):
    command = [*RUN, "--nics", "2", "--", PYTHON, "tests/run_tests.py", "--dev", "soft0", "-v", f"tests.{module}"]
    done = subprocess.run(
        command, cwd=pyverbs, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ok\n") > 0


@pytest.mark.slow
def test_the_conformance_kit_on_a_card():
    """gpunetio's own provider of cards, libmlx5, and the NIC behind it."""
    done = run(sys.executable, "-m", "gpunetio", "conformance", "-d", "soft0")
    assert done.returncode == 0, done.stdout
    assert re.fullmatch(r"(\d+) checks: \1 passed, 0 FAILED, 0 not supported", done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_faults_are_retried(port):
    """A wire that loses packets: the program does not notice."""
    both("ibv_rc_pingpong", "-g", 0, "-n", 100, "-p", port, "-c", options=("--faults", "loss=0.02,seed=3"))


@pytest.mark.slow
def test_captures_of_all_nics(port, tmp_path):
    """In a folder, each NIC of each process has a file: that of the server and that of the client."""
    both("ibv_rc_pingpong", "-g", 0, "-n", 10, "-p", port, "-c", options=("--pcap", str(tmp_path)))
    packets = []
    for path in tmp_path.iterdir():
        assert path.name.startswith("soft0-")
        with PcapFile(path) as capture:
            packets.append(len([*capture]))
    assert len([count for count in packets if count >= 10]) == 2  # others are of clients that came too early


def test_one_capture_file_for_several_nics(tmp_path):
    done = run("true", options=("--pcap", str(tmp_path / "x.pcap")))
    assert done.returncode == 2
    assert "x.pcap is one file for 2 NICs: give a folder that exists, or --nics 1" in done.stderr


# What a program finds out about its process: descriptors, children, session, signals, working directory.
# The shell reads its status itself: while it starts a program, fork(3) has its signals blocked.
SURROUNDINGS = (
    "echo $$ /proc/$$/fd/*; read children < /proc/$$/task/$$/children; echo \"$children\";"
    "cut -d' ' -f5,6 /proc/$$/stat;"
    "while read -r line; do case $line in Sig[!Q]*) echo \"$line\";; esac; done < /proc/$$/status;"
    "pwd; umask"
)


def test_run_is_like_exec():
    """Its process becomes the program's: make's job server, systemd's sockets (LISTEN_PID) and mpiexec rely on that."""
    reading, writing = os.pipe()
    found = []
    for command in (), (*RUN, "--"):
        with subprocess.Popen(
            [*command, "sh", "-c", SURROUNDINGS], stdout=subprocess.PIPE, text=True, env=environment(),
            pass_fds=(reading,),
        ) as started:
            out, _ = started.communicate(timeout=LIMIT)
        found.append(out.replace(str(started.pid), "PID"))
    os.close(reading)
    os.close(writing)
    assert found[1] == found[0]
    assert f"/proc/PID/fd/{reading} " in found[0]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_process_substitution():
    command = f"exec {' '.join(RUN)} -- cat <(echo one) <(echo two)"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=LIMIT, env=environment(), check=False
    )
    assert (done.stdout, done.stderr) == ("one\ntwo\n", "")


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_job_server_of_make(tmp_path):
    """A make that is run like this shares the jobs of the one above. Otherwise it warns, and takes one job."""
    (tmp_path / "Makefile").write_text(f"all:\n\t+{' '.join(RUN)} -- $(MAKE) -f inner\n")
    (tmp_path / "inner").write_text("all: a b\na b: ; @echo $@\n")
    env = environment() | {"MAKEFLAGS": ""}
    done = subprocess.run(
        ["make", "-j2"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, env=env, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {"a", "b"} <= set(done.stdout.splitlines())


def test_the_status_is_the_programs():
    assert run("sh", "-c", "exit 7").returncode == 7
    assert run("sh", "-c", "kill -9 $$").returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_nothing_is_left_of_a_run(number):
    """Its folder is removed when the program has ended, even by SIGKILL, and also a daemon that it has left behind."""
    daemon = "setsid sleep 1000 >/dev/null 2>&1 &"
    with serving("sh", "-c", f"{daemon} echo $GPUNETIO_UVERBS $!; exec sleep 1000") as started:
        assert started.stdout
        folder, left = started.stdout.readline().split()
        assert Path(folder).is_dir()
        started.send_signal(number)
        started.communicate(timeout=LIMIT)
    assert started.returncode == -number
    time.sleep(0.5)
    assert Path(folder).is_dir()
    os.kill(int(left), signal.SIGKILL)
    until(lambda: not Path(folder).exists(), "the folder is removed", LIMIT)


def drop_in(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpunetio", "drop-in", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment(), check=False)


def test_an_environment_without_run(tmp_path):
    """For shells and launchers: it has the same as that of `gpunetio run`."""
    skip_without("ibv_devices")
    made = drop_in("--path", tmp_path / "my nics", "--nics", 3)
    assert (made.returncode, made.stderr) == (0, "")
    done = subprocess.run(
        ["sh", "-c", 'eval "$MADE"; ibv_devices'], capture_output=True, text=True, timeout=LIMIT,
        env=environment() | {"MADE": made.stdout}, check=True,
    )
    assert re.findall(r"soft\d", done.stdout) == ["soft0", "soft1", "soft2"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("change", [
    lambda folder: os.chown(folder, 65534, 65534), lambda folder: folder.chmod(0o777),
    lambda folder: folder.symlink_to(folder.rename(folder.with_name("other"))),
])
def test_an_environment_that_another_user_may_change(tmp_path, change):
    """The program sees no device, and is told why: another user would decide what it executes."""
    skip_without("ibv_devices")
    made = drop_in("--path", tmp_path / "nics")
    change(tmp_path / "nics")
    done = subprocess.run(
        ["sh", "-c", 'eval "$MADE"; ibv_devices'], capture_output=True, text=True, timeout=LIMIT,
        env=environment() | {"MADE": made.stdout}, check=False,
    )
    assert "soft0" not in done.stdout
    why = "no software NICs, as another user may change the folder that stands for them"
    assert done.stderr.splitlines().count(f"gpunetio run: {why}: {tmp_path}/nics") == 1


def test_an_environment_where_something_else_is(tmp_path):
    (tmp_path / "file").touch()
    for folder, said in (
        (tmp_path, f"{tmp_path} is not empty: name a folder that is, or one that does not exist"),
        (Path("/dev/null/x"), "cannot be written: Not a directory"),
    ):
        done = drop_in("--path", folder)
        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_program_that_is_not_there():
    done = run("/nowhere/at-all")
    assert done.returncode != 0
    assert done.stderr == "gpunetio: error: /nowhere/at-all cannot be started: No such file or directory\n"


def test_what_a_shell_sees():
    """By links, relative paths and patterns; `ls` and `find` ask by calls of their own."""
    look = (
        "ls -lR /sys/class/infiniband/soft0/ >/dev/null; find /sys/class/infiniband/soft0/ -name state;"
        "cd /sys/class/infiniband; echo *; cat soft0/ports/1/gids/0; cat */ports/1/state; [ -r soft0/node_guid ]"
    )
    done = run("sh", "-c", look, options=("--nics", "1", "--address", "127.0.0.9"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "/sys/class/infiniband/soft0/ports/1/state", "soft0", "0000:0000:0000:0000:0000:ffff:7f00:0009", "4: ACTIVE",
    ]


def test_status_of_infiniband_diags():
    skip_without("ibstat")
    done = run("ibstat", options=("--nics", "1", "--address", "127.0.0.9"))
    assert done.returncode == 0, done.stderr
    assert re.search(r"State: Active\n\s+Physical state: LinkUp\n\s+Rate: \d+ ", done.stdout), done.stdout
    assert "Port GUID: 0x0000ffff7f000009\n" in done.stdout
    done = run("ibstatus")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"device '(\w+)' port 1", done.stdout) == ["soft0", "soft1"]
    assert done.stdout.count(f"default gid:\t {bytes(16).hex(':', 2)}\n") == 2  # none until a program has one


LATE = """
import ctypes, sys
verbs, later = ctypes.CDLL("libibverbs.so.1"), ctypes.CDLL(sys.argv[1]).later
for name in "ibv_get_device_list", "ibv_open_device", "ibv_alloc_pd":
    getattr(verbs, name).restype = ctypes.c_void_p
device = ctypes.c_void_p.from_address(verbs.ibv_get_device_list(None))
context = ctypes.c_void_p(verbs.ibv_open_device(device))
later(verbs.ibv_dealloc_pd, ctypes.c_void_p(verbs.ibv_alloc_pd(context)))
later(verbs.ibv_close_device, context)
later(verbs.ibv_open_device, device)
"""


def test_calls_after_pythons_end(tmp_path):
    """As by destructors in C++, or MPI_Finalize of mpi4py. The NIC is gone by then."""
    done = run(sys.executable, "-c", LATE, later.build(tmp_path))
    assert (done.returncode, done.stdout) == (0, "0\n0\n0\n"), done.stderr  # destroyed, closed, not opened


COMPILES = """
import threading, time

def compile_again_and_again():
    while not any("soft0 engine" in thread.name for thread in threading.enumerate()):
        time.sleep(0.01)
    from gpunetio.compiler import compiling
    from gpunetio.jit import roots
    from gpunetio.uverbs.pump_loop import _fill_eqe
    while True:
        with compiling():
            roots._compile(_fill_eqe, (roots.INT, roots.INT), (), "again-0.o")
        time.sleep(0.001)  # or who waits for the lock would never get it

threading.Thread(target=compile_again_and_again, daemon=True).start()
"""


@pytest.mark.parametrize("attempt", range(2))
def test_the_end_of_a_program_while_python_compiles(tmp_path, attempt):
    """As when an error is explained for the first time, because of which the program ends."""
    skip_without("ibv_devinfo")
    (tmp_path / "sitecustomize.py").write_text(COMPILES)
    path = os.pathsep.join(filter(None, [str(tmp_path), environment().get("PYTHONPATH")]))
    done = run("ibv_devinfo", PYTHONPATH=path)
    assert (done.returncode, done.stdout[:7]) == (0, "hca_id:"), done.stderr


WAITS = """
import ctypes, os, signal
verbs = ctypes.CDLL("libibverbs.so.1")
for name in "ibv_get_device_list", "ibv_open_device":
    getattr(verbs, name).restype = ctypes.c_void_p
context = verbs.ibv_open_device(ctypes.c_void_p.from_address(verbs.ibv_get_device_list(None)))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
for _ in range(100):
    os.kill(os.getpid(), signal.SIGUSR2)
    assert signal.sigwait([signal.SIGUSR2]) == signal.SIGUSR2
print("all", context is not None)
"""


def test_a_program_that_waits_for_signals():
    """The NIC's threads get none, or they would end the program."""
    done = run(sys.executable, "-c", WAITS)
    assert (done.returncode, done.stdout) == (0, "all True\n"), done.stderr


AT_ONCE = """
import ctypes, faulthandler, sys, threading, time
faulthandler.dump_traceback_later(40, exit=True)
assert "gpunetio" not in sys.modules
devices = ctypes.CDLL("libibverbs.so.1").ibv_get_device_list
devices.restype = ctypes.POINTER(ctypes.c_void_p)
both, opened = devices(None), []

def open_device(library, number, begins):
    call = library("libibverbs.so.1").ibv_open_device
    call.restype, device = ctypes.c_void_p, ctypes.c_void_p(both[number])
    while not begins():
        time.sleep(0.0005)
    opened.append(call(device) is not None)

first, at_once = getattr(ctypes, sys.argv[1]), sys.argv[2] == "at once"
threads = [
    threading.Thread(target=open_device, args=(first, 0, lambda: True)),
    threading.Thread(target=open_device, args=(ctypes.PyDLL, 1, lambda: at_once or "gpunetio" in sys.modules)),
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(opened)
"""


@pytest.mark.parametrize(("first", "when"), [
    ("PyDLL", "at once"), ("CDLL", "while gpunetio is imported"),
    pytest.param("CDLL", "at once", marks=pytest.mark.slow),
    pytest.param("PyDLL", "while gpunetio is imported", marks=pytest.mark.slow),
])
def test_two_threads_that_open_the_first_devices(first, when):
    """With Python's lock, as pyverbs does, or without. The second one waits while the first call runs Python."""
    done = run(sys.executable, "-c", AT_ONCE, first, when)
    assert (done.returncode, done.stdout) == (0, "[True, True]\n"), done.stderr


def test_other_programs_see_no_difference():
    """Paths that only begin like those of devices, files, memory, sockets."""
    text = (
        "import mmap, os, socket, tempfile; f = tempfile.TemporaryFile(); f.write(b'x' * 4096); f.flush();"
        "m = mmap.mmap(f.fileno(), 4096); assert m[:1] == b'x'; m.close(); socket.socket().close();"
        "assert os.path.exists('/dev/infiniband/uverbs0') and not os.path.exists('/dev/infiniband/uverbs9');"
        "assert os.path.exists('/sys/module/nvidia_peermem/version') and not os.path.exists('/sys/module/nvidia_pee');"
        "assert os.listdir('/sys/class/infiniband') == ['soft0']; print(os.stat('/dev/infiniband/uverbs0').st_rdev)"
    )
    done = run(sys.executable, "-c", text, options=("--nics", "1"))
    assert (done.returncode, done.stderr) == (0, "")


def test_the_library_of_this_python_is_found():
    assert ".so" in (shared_library() or "")
