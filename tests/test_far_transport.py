"""Payload in memory that the engine cannot touch, packet by packet, against a peer made by hand."""

from collections.abc import Iterator
from typing import Any

import pytest

from fake_gpu import LAUNCH_FAILURE, FakeGpus, FarBuffer
from gpunetio.nic.staging import SLOT_BYTES
from gpunetio.nic.tables import PACKET_FATES
from nic_rig import READ, raddr
from transport_rig import (
    ACKNOWLEDGE,
    NAK_OPERATION,
    READ_REQUEST,
    RNR_NAK,
    WRITE_MIDDLE,
    Lab,
    Packet,
    Peer,
    peer,
    response_packets,
    send_packets,
    write_packets,
)  # fmt: skip

__all__ = ["peer"]  # a fixture

KIB = 1 << 10
MTU = 1024
VA, RKEY = 0x1122334455667788, 0x99AABBCC  # at the peer, which the NIC cannot check
TIMEOUT = 4096 << 14  # nanoseconds; ack_timeout 14
LONG_RNR = RNR_NAK  # of 655 ms


class FarLab(Lab):
    """A lab with GPU memory: `far_here` is what the NIC sends, `far_there` what it receives into."""

    def __init__(self) -> None:
        super().__init__()
        gpus = FakeGpus()
        gpus.serve(self.ctx)
        self.far_here, self.far_there = FarBuffer(gpus, self.pd, 2 * SLOT_BYTES, 1), FarBuffer(gpus, self.pd, 64 * KIB)
        self.gpu: Any = gpus.streams[0].row


@pytest.fixture(scope="module")
def lab() -> Iterator[FarLab]:
    opened = FarLab()
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def healthy(lab: FarLab) -> Iterator[None]:
    yield
    lab.gpu["hangs"] = lab.gpu["copy_error"] = 0


# --- copies that fail ------------------------------------------------------------------------------------------------


def bad_request(p: Peer) -> list[Packet]:
    return [Packet(WRITE_MIDDLE, p.own + 1, payload=bytes(MTU))]


def send_that_does_not_fit(p: Peer) -> list[Packet]:
    p.queue.receive(p.lab.there.at(0, 1))
    return send_packets(bytes(2), MTU, p.own + 1)


def write_to_the_host(p: Peer) -> list[Packet]:
    return write_packets(bytes(8), MTU, p.own + 1, p.lab.there.address, p.lab.there.key)


def read_request(p: Peer) -> list[Packet]:
    return [Packet(READ_REQUEST, p.own + 1, reth=(p.lab.there.address, p.lab.there.key, 8))]


def response(p: Peer) -> list[Packet]:
    return response_packets(bytes(8), MTU, p.psn)


@pytest.mark.parametrize(
    "next_packets", [bad_request, send_that_does_not_fit, write_to_the_host, read_request, response]
)
def test_bytes_that_have_not_come_are_not_acknowledged(peer, lab, next_packets):
    """Whatever comes behind them: the NAK is for the first packet whose bytes are not where they belong."""
    p = peer()
    if next_packets is response:
        p.queue.post(READ, raddr(VA, RKEY), lab.far_there.at(0, 8))
        assert p.receive().opcode == READ_REQUEST
    lab.gpu["copies_left"], lab.gpu["copy_error"] = 0, LAUNCH_FAILURE
    p.send(write_packets(bytes(64), MTU, p.own, lab.far_there.address, lab.far_there.key), next_packets(p))
    answer = p.receive()
    assert (answer.opcode, answer.psn, answer.aeth[0]) == (ACKNOWLEDGE, p.own, NAK_OPERATION)
    assert p.silent()
    assert sum(p.counted(*PACKET_FATES)) == p.counted("rdma_rx_packets")
