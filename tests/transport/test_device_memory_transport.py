"""Payload in memory that the engine cannot touch, packet by packet, against a peer made by hand."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fake_gpu import LAUNCH_FAILURE, DeviceBuffer, FakeGpus
from gpunetio.nic.memory.staging import ABANDONED, SLOT_BYTES, SLOTS
from gpunetio.nic.state.counters import PACKET_FATES
from gpunetio.nic.state.dma_stream import SLOT
from gpunetio.nic.state.reasons import Reason
from nic_rig import LOCAL_QP_OP, READ, REMOTE_ACCESS, REQ, WRITE, error_of, raddr, until, view
from transport_rig import (
    ACK,
    ACKNOWLEDGE,
    NAK_ACCESS,
    NAK_OPERATION,
    READ_REQUEST,
    RESPONSE_ONLY,
    RNR_NAK,
    WRITE_MIDDLE,
    Lab,
    Packet,
    Peer,
    response_packets,
    send_packets,
    write_packets,
)
from transport_steps import RKEY, TIMEOUT, VA

KIB = 1 << 10
MTU = 1024
LONG_RNR = RNR_NAK  # of 655 ms


class DeviceLab(Lab):
    """A lab with GPU memory: `device_here` is what the NIC sends, `device_there` what it receives into."""

    def __init__(self) -> None:
        super().__init__()
        gpus = FakeGpus()
        gpus.serve(self.ctx)
        self.device_here = DeviceBuffer(gpus, self.pd, 2 * SLOT_BYTES, 1)
        self.device_there = DeviceBuffer(gpus, self.pd, 64 * KIB)
        self.gpu: Any = gpus.streams[0].row

    def hang(self) -> None:
        """From now on copies are begun, but not carried out."""
        self.gpu["hangs"] = 1

    def copy_begun(self, before: int) -> None:
        """Wait until the GPU has been given more copies than `before`."""
        until(lambda: self.gpu["given"] > before, "a copy")

    def pass_hanging(self, nanoseconds: int) -> None:
        """Move the NIC's clock while the GPU hangs: no command is served, which could tell that the NIC has seen it."""
        self.nic.record["now"] += nanoseconds

    def held(self) -> int:
        """How many slots are held for somebody who will come for them."""
        slots = view(int(self.nic.record["slots"]), SLOTS * SLOT.size, SLOT.dtype)
        return sum(int(slot["row"]) != 0 and int(slot["tag"]) != ABANDONED for slot in slots)


@pytest.fixture(scope="module")
def lab() -> Iterator[DeviceLab]:
    opened = DeviceLab()
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def healthy(lab: DeviceLab) -> Iterator[None]:
    yield
    lab.gpu["hangs"] = lab.gpu["copy_error"] = 0


def write_from_gpu(lab: DeviceLab, p: Peer, nbytes: int) -> None:
    p.queue.post(WRITE, raddr(VA, RKEY), lab.device_here.at(0, nbytes))


def send_again(lab: DeviceLab) -> None:
    """Let the ack timeout pass, and the GPU hang as soon as it is asked for the bytes again."""
    before = int(lab.gpu["given"])
    lab.hang()
    lab.pass_hanging(TIMEOUT)
    lab.copy_begun(before)


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
        p.queue.post(READ, raddr(VA, RKEY), lab.device_there.at(0, 8))
        assert p.receive().opcode == READ_REQUEST
    lab.gpu["copies_left"], lab.gpu["copy_error"] = 0, LAUNCH_FAILURE
    p.send(write_packets(bytes(64), MTU, p.own, lab.device_there.address, lab.device_there.key), next_packets(p))
    answer = p.receive()
    assert (answer.opcode, answer.psn, answer.aeth[0]) == (ACKNOWLEDGE, p.own, NAK_OPERATION)
    assert p.silent()
    assert sum(p.counted(*PACKET_FATES)) == p.counted("rdma_rx_packets")


def test_a_read_fails_when_nothing_of_it_is_on_its_way(peer, lab):
    p = peer()
    p.queue.post(READ, raddr(VA, RKEY), lab.device_there.at(0, 2 * MTU))
    assert p.receive().opcode == READ_REQUEST
    first, _ = response_packets(b"\7" * 2 * MTU, MTU, p.psn)
    lab.device_there.bytes[:] = 0
    before = int(lab.gpu["given"])
    lab.hang()
    p.send(first, Packet(ACKNOWLEDGE, p.psn + 1, aeth=(NAK_ACCESS, 0)))
    lab.copy_begun(before)
    assert p.queue.done.none_for()
    lab.gpu["hangs"] = 0
    assert error_of(p.queue.done.next()) == (REMOTE_ACCESS, Reason.NAK_REMOTE_ACCESS)
    assert np.all(lab.device_there.bytes[:MTU] == 7)


@pytest.mark.parametrize("changed", [2 * SLOT_BYTES - 8, SLOT_BYTES, 8])
def test_a_wqe_that_is_changed_while_its_bytes_are_staged(peer, lab, changed):
    """A message that is longer than a staging slot is fetched in parts, and its WQE is read again for each."""
    p = peer(mtu=MTU)
    write_from_gpu(lab, p, 2 * SLOT_BYTES)
    sent = p.drain()
    assert sent
    p.queue.sq[32:36] = list(changed.to_bytes(4, "big"))  # byte_count, behind control segment and remote address
    while not (done := p.queue.done.poll()):
        p.ack(sent[-1].psn)
        sent += p.drain()
        assert len(sent) < 2 * SLOT_BYTES // MTU, "the changed WQE was sent to its end"
    assert error_of(done) == (LOCAL_QP_OP, Reason.WQE_MALFORMED)


# --- slots -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acked", [1, 100, 128])
def test_slots_of_what_is_acknowledged_while_it_is_fetched_again(peer, lab, acked):
    """An acknowledgement that comes late: nobody will ask for those bytes."""
    p = peer(mtu=4096)
    write_from_gpu(lab, p, 128 * 4096)
    p.take(128)
    send_again(lab)
    p.ack(p.psn + acked - 1)
    until(lambda: int(p.row["una_psn"]) == p.psn + acked, "the acknowledgement to be heard")
    lab.gpu["hangs"] = 0
    assert all(packet.psn >= p.psn + acked for packet in p.drain())
    p.ack(p.psn + 127)
    assert p.queue.done.next().opcode == REQ
    lab.settle()
    assert not lab.held()


def test_slots_of_a_response_that_nobody_waits_for_any_more(peer, lab):
    """A new request takes the place of one whose response is fetched again for a duplicate."""
    p = peer(max_rd_atomic=1)
    here = lab.device_here
    read = Packet(READ_REQUEST, p.own, reth=(here.address, here.key, 8))
    p.send(read)
    assert p.receive().opcode == RESPONSE_ONLY
    before = int(lab.gpu["given"])
    lab.hang()
    p.send(read)
    lab.copy_begun(before)
    p.send(Packet(READ_REQUEST, p.own + 1, reth=(here.address + 8, here.key, 8)))
    lab.copy_begun(before + 1)
    lab.gpu["hangs"] = 0
    assert p.receive().payload == here.bytes[8:16].tobytes()
    lab.settle()
    assert not lab.held()


def test_a_slot_is_given_up_by_those_who_do_not_come_for_it(peer, lab):
    """Their bytes were asked for again when the peer said that it was not ready; all slots are theirs."""
    waiting = [peer(rnr_retry=7) for _ in range(SLOTS)]
    late = peer()
    for p in waiting:
        write_from_gpu(lab, p, 8)
        p.receive()
    before = int(lab.gpu["given"])
    lab.hang()
    lab.pass_hanging(TIMEOUT)
    lab.copy_begun(before + SLOTS - 1)
    for p in waiting:
        p.ack(p.psn, LONG_RNR)
    until(lambda: all(int(p.row["retry_at"]) for p in waiting), "all to wait")
    lab.gpu["hangs"] = 0
    assert lab.held() == SLOTS
    write_from_gpu(lab, late, 8)
    assert late.silent()
    lab.pass_time(1_000_000)
    assert late.receive().psn == late.psn


# --- timers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True])
def test_the_ack_timer_does_not_run_while_the_gpu_is_waited_for(peer, lab, again):
    """Nothing is on its way to the peer, who has nothing to acknowledge."""
    p = peer(retry_cnt=1)
    before = int(lab.gpu["given"])
    lab.hang()
    write_from_gpu(lab, p, 8)
    lab.copy_begun(before)
    if again:
        lab.gpu["hangs"] = 0
        p.receive()
        send_again(lab)
    for _ in range(10):
        lab.pass_hanging(4 * TIMEOUT)
        time.sleep(0.002)
    lab.gpu["hangs"] = 0
    assert p.receive().psn == p.psn
    p.ack(p.psn, ACK)
    assert p.queue.done.next().opcode == REQ
    assert p.counted("local_ack_timeout_err") == int(again)
