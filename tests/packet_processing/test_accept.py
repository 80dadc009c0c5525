"""The kernel that accepts connections, on a software NIC: what it hears, what it answers, and how it ends."""

from contextlib import ExitStack
from ipaddress import IPv4Address

import pytest
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import Ether

import gpunetio as gn
from gpunetio import flow
from gpunetio.errors import DriverError
from gpunetio.eth import CpuTxq, query_caps
from gpunetio.flow import match
from gpunetio.formats.commands import Opcode
from gpunetio.formats.ethernet_queues import QueueState
from gpunetio.memory import HostMemory
from gpunetio.packet_processing.app import accepter
from gpunetio.packet_processing.http_host import HttpServer
from gpunetio.packet_processing.pages import BUILT_IN
from gpunetio.samples.until_stopped import StopWord
from nic_rig import until

PATIENCE = 30.0  # seconds
ADDRESS = "192.0.2.1"


@pytest.fixture
def server():
    with gn.open("soft0") as ctx, ExitStack() as undo:
        gpu = undo.enter_context(gn.Gpu("host"))
        yield HttpServer(gpu, ctx.create_pd(), IPv4Address(ADDRESS), 1, BUILT_IN, undo)


@pytest.fixture
def accepting(server):
    """Its queue, whose kernel runs."""
    (queue,) = server.accepting
    stop, worker = StopWord(queue.gpu), accepter(queue)
    worker.launch(stop)
    yield queue, worker
    stop.set()
    assert worker.wait(PATIENCE)


def test_only_frames_with_right_checksums_are_heard(accepting):
    """Others would be answered, though nobody knows what they should have been."""
    queue, _ = accepting
    ctx = queue.rxq.ctx
    mac = query_caps(ctx).mac.hex(":")
    right = bytes(Ether(src="02:00:00:00:00:02", dst=mac) / IP(src="192.0.2.2", dst=ADDRESS) / TCP(dport=80, flags="S"))
    wrong = right[:-1] + b"?"
    with gn.open("soft1") as far, flow.FlowPort(ctx) as port, port.steer(match.tcp(), to=queue.rxq):
        region = (pd := far.create_pd()).register(memory := HostMemory(4096))
        with CpuTxq(pd) as txq:
            for frame in (wrong, right):
                memory.array[: len(frame)] = memoryview(frame)
                txq.send(region, 0, len(frame))
                assert txq.completions(timeout=PATIENCE)
            until(lambda: queue.acceptor.counts()["syns"] > 0, "a SYN", PATIENCE)
    assert queue.acceptor.counts()["syns"] == 1


def test_a_queue_that_fails_ends_its_kernel_which_says_why(accepting):
    queue, worker = accepting
    queue.rxq.rq.modify(Opcode.MODIFY_RQ, rq_state=QueueState.RDY, ctx={"state": QueueState.ERR})
    assert worker.wait(PATIENCE)
    assert isinstance(worker.failure, DriverError)


def test_rules_that_cannot_be_made_are_a_failure_of_the_server(server, caplog):
    """It is reported once, and the server goes on without rules."""

    class Broken:
        def follow(self):
            raise DriverError("no more rules")

    server._rules = Broken()
    for _ in range(3):
        server.follow_rules()
    assert "no more rules" in str(server.failure)
    assert caplog.text.count("no more rules") == 1
