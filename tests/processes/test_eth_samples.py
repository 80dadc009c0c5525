"""gpunetio simple_send, simple_receive and send_wait_time as processes: what arrives, and how they end."""

import re
import signal

import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether
from scapy.utils import PcapReader

from gpunetio.nic.host.engine import compile_engine, compile_extensions
from gpunetio.nic.observe.running import running as running_nics
from nic_rig import until
from tools import LIMIT, Tool, error_line, running

SLOW = pytest.mark.slow  # two processes each: the quick suite has one of a kind
HOST = ("-g", "host")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    compile_engine()  # once, for all processes
    compile_extensions()


def receiver(*options):
    return Tool("simple_receive", *HOST, "-n", "soft0", *options)


def sender(*options, size=64, threads=32):
    return Tool("simple_send", *HOST, "-n", "soft1", "-s", size, "-t", threads, *options)


def wait_for(tool, counter, count):
    """Wait until a counter of a process' NIC has reached `count`."""
    (nic,) = running_nics(pid=tool.process.pid, timeout=LIMIT)
    with nic:
        until(lambda: nic.counters[counter] >= count, f"{count} {counter}", LIMIT)


def stop(tool, number, last):
    """End a sample by a signal. Return the number with which it says goodbye."""
    tool.signal(number)
    status, out, err = tool.end()
    assert (status, err) == (0, "")
    *_, said, end = out.splitlines()
    assert end == "Sample finished successfully"
    found = re.fullmatch(last, said)
    assert found, out
    return int(found[1])


RECEIVED = r"Exiting from simple receive sample\. Total number of received packets: (\d+)"
SENT = r"Exiting from simple send sample\. Total number of sent packets: (\d+)"


@pytest.mark.parametrize("receive, send", [
    ((), {}),
    pytest.param(("-e", "0"), {"options": ("-q", "1", "-e", "0"), "threads": 64}, marks=SLOW),
    pytest.param(("-e", "1"), {"options": ("-q", "1", "-e", "1"), "threads": 64}, marks=SLOW),
    pytest.param((), {"options": ("-q", "1", "-e", "2"), "threads": 128}, marks=SLOW),
    pytest.param((), {"options": ("-p", "1"), "size": 1500}, marks=SLOW),
])
@pytest.mark.slow
def test_one_kernel_sends_and_another_receives(receive, send):
    with running(receiver(*receive)) as (there,):
        there.until("Receiving")
        send = dict(send)
        with running(sender(*send.pop("options", ()), **send)) as (here,):
            here.until("Sending")
            wait_for(there, "rx_frame_delivered", 1000)
            sent = stop(here, signal.SIGINT, SENT)
        received = stop(there, signal.SIGTERM, RECEIVED)
    assert 1000 <= received <= sent


def test_the_frames_are_valid(tmp_path):
    capture = tmp_path / "sent.pcap"
    with running(sender("--pcap", capture, size=100)) as (here,):
        here.until("Sending")
        wait_for(here, "tx_frames", 32)
        sent = stop(here, signal.SIGINT, SENT)
    with PcapReader(str(capture)) as frames:
        first = next(iter(frames))
    assert sent >= 32
    assert len(first) == 100
    assert first.dst == "10:11:12:13:14:15"
    right = Ether(bytes(first))
    del right[IP].chksum, right[UDP].chksum
    assert bytes(Ether(bytes(right))) == bytes(first)


@SLOW
def test_the_frames_of_the_original_reach_no_queue():
    with running(receiver()) as (there,):
        there.until("Receiving")
        with running(sender("--original-frame")) as (here,):
            here.until("Sending")
            wait_for(there, "rx_frames", 100)
            assert stop(here, signal.SIGINT, SENT) > 0
        assert stop(there, signal.SIGINT, RECEIVED) == 0


def test_bursts_leave_in_order(tmp_path):
    capture = tmp_path / "bursts.pcap"
    with running(Tool("send_wait_time", *HOST, "-n", "soft0", "-t", 20_000_000, "--pcap", capture)) as (tool,):
        status, out, err = tool.end()
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "Starting the sample", "Wait on time supported mode: Native", "Waiting 10 sec for 256 packets to be sent",
        "Sent 256 packets in 8 bursts", "Sample finished successfully",
    ]
    with PcapReader(str(capture)) as reader:
        frames = [frame for frame in reader if UDP in frame]
    texts = [bytes(frame[UDP].payload).rstrip(b"\0").decode() for frame in frames]
    assert texts == [f"Sent from DOCA GPUNetIO {i}" for i in range(256)]
    assert {len(frame) for frame in frames} == {1024}


@pytest.mark.slow
@pytest.mark.parametrize("command, words", [
    (("simple_send", *HOST, "-n", "soft0", "-s", 41, "-t", 32), ["41 bytes", "--original-frame"]),
    (("simple_send", *HOST, "-n", "soft0", "-s", 64, "-t", 48), ["--threads 48", "multiple of 32"]),
    (("simple_send", *HOST, "-n", "soft0", "-s", 64, "-t", 32, "-q", 1), ["--threads 32", "multiple of 64"]),
    (("simple_receive", *HOST, "-n", "soft0", "--link-layer", "infiniband"), ["InfiniBand", "Ethernet queues"]),
    (("send_wait_time", *HOST, "-n", "soft0", "-t", 10**9, "--wire", "udp"), ["no Ethernet queues"]),
])
def test_errors_have_one_line(command, words):
    with running(Tool(*command)) as (tool,):
        status, _, err = tool.end()
    assert status == 1
    assert all(word in error_line(err) for word in words)
