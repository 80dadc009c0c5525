"""What programs in C see of the calls beneath libibverbs and librdmacm: what the kernel would do, and nothing else."""

from pathlib import Path

import pytest
from scapy.contrib.roce import GRH
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether

import c_programs
from gpunetio.fabric.pcap import ERF_HEADER
from gpunetio.formats.packet import LRH
from pcap_rig import records
from programs import run
from rdma_core import skip_without_run

pytestmark = [pytest.mark.soft_nic, pytest.mark.host_memory]


@pytest.fixture(autouse=True)
def _needs() -> None:
    skip_without_run()


def test_calls_that_succeed_leave_errno_alone(tmp_path: Path):
    """C11 7.5p3: no function of the library sets errno to 0; the kernel does not touch it unless a call fails."""
    done = run(c_programs.build("calls", tmp_path))
    assert (done.returncode, done.stdout) == (0, "status 0, x\n"), done.stderr


def test_errors_of_librdmacm(tmp_path: Path, port: int):
    """Linux: mlx5 refuses such a queue pair with EINVAL, and ib_cm has no attributes of a connection that ended."""
    done = run(c_programs.build("client_left", tmp_path), port)
    assert (done.returncode, done.stdout) == (0, "rdma_create_qp: -1, EINVAL\nrdma_accept: -1, EINVAL\n"), done.stderr


def test_descriptors_of_devices(tmp_path: Path):
    """close(2), dup(2), close_range(2), vfork(2): a file ends with its last descriptor, and NICs with their files."""
    done = run(c_programs.build("descriptors", tmp_path))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_attributes_that_mlx5_takes(tmp_path: Path):
    """Capabilities: those of a ConnectX-7 (0xed721c36) that do not need what is missing, such as memory windows.

    mlx5_ib rounds both depths of READs up to powers of two. libmlx5 has no receive in a shared queue of 1.
    """
    done = run(c_programs.build("attributes", tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "device_cap_flags 0x1c06", "max_rd_atomic 16, max_dest_rd_atomic 16", "max_wr 0, post: refused",
    ]


def test_flow_labels(tmp_path: Path):
    """mlx5: a queue pair has the lower 20 bits of a label in its context, a datagram in its address vector."""
    capture = tmp_path / "capture.pcap"
    options = "--nics", "1", "--address", "::1", "--pcap", str(capture)
    done = run(c_programs.build("flow_label", tmp_path), options=options)
    assert (done.returncode, done.stdout) == (0, "flow_label 0x12345\nstatus 0\n"), done.stderr
    assert {Ether(frame)[IPv6].fl for frame in records(capture)} == {0x12345}


def test_flow_labels_on_infiniband(tmp_path: Path):
    """libmlx5 makes address handles without the kernel there."""
    capture = tmp_path / "capture.pcap"
    options = "--nics", "1", "--link-layer", "infiniband", "--pcap", str(capture)
    done = run(c_programs.build("flow_label", tmp_path), options=options)
    assert (done.returncode, done.stdout) == (0, "flow_label 0x12345\nstatus 0\n"), done.stderr
    assert {GRH(record[ERF_HEADER + LRH.size :]).flowlabel for record in records(capture)} == {0x12345}


def test_what_is_missing_is_told(tmp_path: Path):
    """Of each thing that docs/programs.md says is not supported, there is a line on stderr."""
    done = run(c_programs.build("missing", tmp_path))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    told = "\n".join(line.partition("software NICs do not have: ")[2] for line in done.stderr.splitlines())
    for what in "raw packets", "DC", "OPEN_XRCD", "ALLOC_MW", "ATTACH_MCAST", "CREATE_FLOW":
        assert what in told, done.stderr


@pytest.mark.slow
def test_events_that_nobody_reads_yet(tmp_path: Path):
    """All come, in order, but for those of what was destroyed. A pipe of the kernel holds 16."""
    done = run(c_programs.build("unread_events", tmp_path))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_counters_in_sysfs(tmp_path: Path):
    """They count for all programs that have had the device, also for one that has ended without closing it."""
    program = c_programs.build("counters", tmp_path)
    done = run("sh", "-c", f"{program} && {program} && cat /sys/class/infiniband/soft0/ports/1/hw_counters/rx_w*")
    assert done.returncode == 0, done.stderr
    assert [line.split("/")[-1] for line in done.stdout.splitlines()] == [
        "rx_write_requests 5", "req_remote_access_errors 1", "resp_remote_access_errors 1", "lifespan 10",
        "link_downed 0",
        "rx_write_requests 11", "req_remote_access_errors 2", "resp_remote_access_errors 2", "lifespan 10",
        "link_downed 0",
        "12",
    ]


@pytest.mark.parametrize(("how", "when"), [
    ("exit", "before"), ("cancel", "after"), pytest.param("exit", "after", marks=pytest.mark.slow),
    pytest.param("cancel", "before", marks=pytest.mark.slow),
])
def test_a_process_ends_with_its_last_thread(tmp_path: Path, how: str, when: str):
    """pthread_exit(3): it performs exit(3) with 0. The first thread ends, before or after a device is opened."""
    done = run(c_programs.build("first_thread_ends", tmp_path), how, when)
    assert (done.returncode, done.stdout) == (0, "status 0\nexit handlers run\n"), done.stderr
