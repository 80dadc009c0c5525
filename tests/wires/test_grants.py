"""Payloads in memory that one NIC has granted to another: copied once, and never believed."""

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import neighbour
from gpunetio import MemType, QpType, verbs
from gpunetio.fabric.faults import Faults
from gpunetio.fabric.frames import FRAME, GRANT_SHIFT, GRANTED_SHIFT, MAX_GRANTED, PACKET, PIPE
from gpunetio.gpu import Gpu
from gpunetio.gpu.host_backend import SHARED_FROM
from gpunetio.memory import PAGE, HostMemory, open_shared
from gpunetio.nic.control.regions import grants
from gpunetio.nic.engine.port import PortConfig
from gpunetio.nic.nic import SoftNic
from gpunetio.nic.state.wire import GRANT, GRANTS, WIRE
from nic_rig import (
    READ,
    RESP_SEND,
    SEND,
    WRITE,
    Buffer,
    Queue,
    connect,
    data,
    inline,
    raddr,
    until,
    view,
)
from repository import environment

MTU = 4096
SIZE = 1 << 18


class End:
    """A NIC with a QP, and memory that is shared unless said otherwise."""

    def __init__(self, name, port=None, shared=True, **options):
        self.ctx = verbs.open(name, port=port)
        self.pd = self.ctx.create_pd()
        self.queue = Queue(self.pd, **options)
        self.memory = HostMemory(SIZE, shared)
        self.mr = self.pd.register(self.memory)
        self.nic = self.queue.nic

    def at(self, offset, nbytes):
        return data(self.mr.address + offset, self.mr.lkey, nbytes)

    def remote(self, offset):
        return raddr(self.mr.address + offset, self.mr.rkey)

    @property
    def peers(self):
        """The NICs with which this one exchanges grants, by link."""
        return self.nic.grants._peers

    @property
    def borrowed(self):
        """What the NIC has mapped, by the number of the grant."""
        return {number: m for peer in self.peers.values() for number, m in peer.borrowed.items()}

    @property
    def table(self):
        (peer,) = self.peers.values()
        return peer.table.view(GRANT.dtype, 0, GRANTS)

    @property
    def granted(self):
        return {int(number) for number in self.table["mapped"] if number} if self.peers else set()

    @property
    def wire(self):
        return view(int(self.queue.row["wire"]), WIRE.size, np.int64)

    def tx_bytes(self):
        """Bytes that have gone through the pipe to the peer."""
        return int(view(int(self.wire[WIRE.tx // 8]), PIPE.size, np.int64)[0])

    def counter(self, name):
        return int(self.nic.counters[name])


@contextlib.contextmanager
def two(monkeypatch, first=None, second=None, connected=True, **attributes):
    """Two ends whose NICs take each other for NICs of different processes."""
    monkeypatch.setattr(SoftNic, "join", lambda self, other: None)
    with contextlib.ExitStack() as stack:
        opened = []
        for options in (first or {}, second or {}):
            name = f"soft{6 + len(opened)}"
            address = neighbour.address()
            config = PortConfig(**{"addresses": (address,), "mtu": 9000, **options.get("port", {})})
            opened.append(End(name, **{**options, "port": config}))
            stack.callback(opened[-1].ctx.close)
        if connected:
            connect(opened[0].queue, opened[1].queue, **attributes)
        yield opened


@pytest.fixture
def ends(monkeypatch):
    """Two ends, each of which has granted the other its memory."""
    with two(monkeypatch) as opened:
        until(lambda: all(end.granted == {1} for end in opened), "both to have mapped the other's memory")
        yield opened


def fill(a, b, seed):
    a.memory.array[:] = np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)
    b.memory.array[:] = 0xA5


def done(end):
    cqe = end.queue.done.next()
    assert (cqe.opcode, cqe.syndrome) == (0, 0)


def granted_bytes(end, nbytes):
    """Whether nearly nothing of `nbytes` has gone through the pipe since the last call."""
    before, end.before = getattr(end, "before", 0), end.tx_bytes()
    return end.before - before < max(nbytes // 8, 1024)


# --- contents --------------------------------------------------------------------------------------------------------

SIZES = (0, 1, 3, 511, 512, 513, 514, 515, MTU - 1, MTU, MTU + 1, MTU + 511, MTU + 513, 3 * MTU + 7, 100_001, SIZE - 64)


@pytest.mark.parametrize("way", [0, 1], ids=["there", "back"])
@pytest.mark.parametrize("operation", [WRITE, SEND, READ], ids=["write", "send", "read"])
def test_contents(ends, operation, way):
    """Every size, at odd offsets, arrives whole and touches nothing else; only READs go through the pipe when large."""
    a, b = ends[way], ends[1 - way]
    source, sink = (b, a) if operation == READ else (a, b)
    for i, nbytes in enumerate(SIZES):
        fill(source, sink, i)
        here, there = (i * 7) % 32, (i * 13) % 32
        offset = there if operation == READ else here
        segments = [a.at(offset, nbytes)] if nbytes else []
        if operation == SEND:
            b.queue.receive(b.at(there, nbytes or 16))
            a.queue.post(SEND, *segments)
            assert b.queue.arrived.next().opcode == RESP_SEND
        else:
            a.queue.post(operation, b.remote(here if operation == READ else there), *segments)
        done(a)
        assert np.array_equal(sink.memory.array[there : there + nbytes], source.memory.array[here : here + nbytes])
        assert np.all(sink.memory.array[:there] == 0xA5)
        assert np.all(sink.memory.array[there + nbytes :] == 0xA5)
        # A READ's bytes are those of the moment at which it is answered, so they do go through the pipe.
        if operation != READ:
            assert granted_bytes(source, nbytes), f"{nbytes} bytes went through the pipe"
    assert a.counter("rx_malformed") == b.counter("rx_malformed") == 0


def test_many_messages_at_once(ends):
    """More than the window and the pipe hold, around the pipe's end many times."""
    a, b = ends
    fill(a, b, 1)
    for turn in range(64):
        for i in range(32):
            a.queue.post(WRITE, b.remote(i * 8000), a.at(i * 8000, 7900 + i), ce=0)
        a.queue.post(WRITE, b.remote(0), a.at(0, 100))
        done(a)
        for i in range(32):
            span = slice(i * 8000, i * 8000 + 7900 + i)
            assert np.array_equal(a.memory.array[span], b.memory.array[span])
        b.memory.array[:] = turn


def test_what_is_copied(ends):
    """Inline data, several segments and ordinary memory go through the pipe as before, beside granted memory."""
    a, b = ends
    fill(a, b, 2)
    plain = Buffer(a.pd, 5000, fill=3)
    granted_bytes(a, 0)
    a.queue.post(WRITE, b.remote(0), plain.at())
    done(a)
    assert np.array_equal(b.memory.array[:5000], plain.bytes)
    assert not granted_bytes(a, 5000)
    a.queue.post(WRITE, b.remote(100), a.at(7, 3000), plain.at(0, 2000), a.at(5000, 4000))
    done(a)
    wanted = np.concatenate((a.memory.array[7:3007], plain.bytes[:2000], a.memory.array[5000:9000]))
    assert np.array_equal(b.memory.array[100:9100], wanted)
    assert not granted_bytes(a, 9000)
    payload = bytes(range(256)) * 3
    a.queue.post(WRITE, b.remote(1), inline(payload[:700]))
    done(a)
    assert b.memory.array[1:701].tobytes() == payload[:700]


def test_unreliable_connections_copy(monkeypatch):
    """UC completes before the peer has read anything."""
    options = {"qp_type": QpType.UC}
    with two(monkeypatch, options, options) as (a, b):
        until(lambda: a.granted == {1}, "the grant")
        fill(a, b, 3)
        a.queue.post(WRITE, b.remote(0), a.at(0, 3 * MTU))
        done(a)
        until(lambda: np.array_equal(a.memory.array[: 3 * MTU], b.memory.array[: 3 * MTU]), "the bytes")
        assert a.tx_bytes() > 3 * MTU


@pytest.mark.parametrize("config", [{"faults": Faults(duplication=0.1)}, {"capture": "packets.pcap"}], ids=str)
@pytest.mark.parametrize("side", [0, 1])
def test_who_needs_the_bytes_gets_them(monkeypatch, config, side, tmp_path):
    """Where packets are captured or mistreated on either side, nothing is granted."""
    monkeypatch.chdir(tmp_path)
    options = [{}, {}]
    options[side] = {"port": config}
    with two(monkeypatch, options[0], options[1], retry_cnt=7) as (a, b):
        fill(a, b, 4)
        a.queue.post(WRITE, b.remote(0), a.at(0, 3 * MTU))
        done(a)
        assert np.array_equal(a.memory.array[: 3 * MTU], b.memory.array[: 3 * MTU])
        assert a.wire[WIRE.grants // 8] == b.wire[WIRE.grants // 8] == 0
        assert not a.peers
        assert not b.peers


def test_checks_come_first(ends):
    """A payload that is granted is refused like any other, and nothing is touched."""
    a, b = ends
    fill(a, b, 5)
    a.queue.post(WRITE, raddr(b.mr.address + SIZE - 1000, b.mr.rkey), a.at(0, MTU))
    cqe = a.queue.done.next()
    assert (cqe.opcode, cqe.syndrome) == (13, 0x13)
    assert np.all(b.memory.array == 0xA5)


# --- which memory is granted ------------------------------------------------------------------------------------------


def test_before_and_after_the_link(ends):
    a, b = ends
    more = HostMemory(PAGE, shared=True)
    mr = a.pd.register(more)
    again = a.pd.register(more)
    until(lambda: a.granted == {1, 2}, "the second grant")
    assert set(b.borrowed) == {1, 2}
    more.array[:] = 9
    a.queue.post(WRITE, b.remote(0), data(again.address, again.lkey, PAGE))
    done(a)
    assert np.all(b.memory.array[:PAGE] == 9)
    mr.close()
    assert set(b.borrowed) == {1, 2}
    again.close()
    until(lambda: set(b.borrowed) == {1}, "the end of the grant")
    a.pd.register(more)
    until(lambda: set(b.borrowed) == {1, 3}, "a grant with a new number")
    assert b.table["number"][2] == 0


def test_memory_that_is_closed(ends):
    """It stays where it is, granted, until its region goes; then both sides give it back."""
    a, b = ends
    fill(a, b, 6)
    wanted = a.memory.array.copy()
    address = a.memory.address
    a.memory.close()
    assert open_shared(address, SIZE) is None
    a.queue.post(WRITE, b.remote(0), a.at(0, SIZE))
    done(a)
    assert np.array_equal(b.memory.array, wanted)
    assert granted_bytes(a, SIZE)
    a.mr.close()
    gc.collect()
    until(lambda: not b.borrowed, "the end of the grant")
    assert f"\n{address:x}-" not in Path("/proc/self/maps").read_text()


def test_more_than_can_be_granted(ends):
    """All of it works; what has no number is copied."""
    a, b = ends
    memories = [HostMemory(PAGE, shared=True) for _ in range(GRANTS + 3)]
    regions = []
    for i, memory in enumerate(memories):
        memory.array[:] = i % 251
        regions.append(a.pd.register(memory))
        until(lambda: len(a.granted) == min(len(regions) + 1, GRANTS), "the grant")
    assert [int(a.nic.mkeys[mr.lkey]["granted"]) == 0 for mr in regions[-5:]] == [False] + [True] * 4
    for i, mr in enumerate(regions):
        a.queue.post(WRITE, b.remote(0), data(mr.address, mr.lkey, PAGE))
        done(a)
        assert np.all(b.memory.array[:PAGE] == i % 251)
    regions[100].close()
    until(lambda: len(b.borrowed) == GRANTS - 1, "the end of the grant")
    region = a.pd.register(memories[-1])
    until(lambda: len(b.borrowed) == GRANTS, "a grant in the place of another")
    a.queue.post(WRITE, b.remote(0), data(region.address, region.lkey, PAGE))
    done(a)
    assert np.all(b.memory.array[:PAGE] == (len(memories) - 1) % 251)


def test_memory_of_the_host_target():
    """Large allocations can be granted, small ones need no descriptor; memory without one is as good."""
    with Gpu("host") as gpu:
        large = gpu.alloc(SHARED_FROM, MemType.CPU_GPU, alignment=1 << 16)
        found = open_shared(large.address, SHARED_FROM)
        assert found is not None
        os.close(found[2])
        assert open_shared(gpu.alloc(100).address, 100) is None
        address = large.address
        large.close()
        del large
        gc.collect()
        assert open_shared(address, SHARED_FROM) is None


# --- what comes through the pipe -------------------------------------------------------------------------------------


def forged(number, nbytes, offset):
    return number << GRANT_SHIFT | nbytes << GRANTED_SHIFT | offset


FORGED = {
    "no such grant": forged(2, MTU, 0),
    "another of its row": forged(1 + GRANTS, MTU, 0),
    "no number": forged(0, MTU, 0),
    "negative": -2,
    "behind the end": forged(1, MTU, SIZE - MTU + 1),
    "far away": forged(1, 1, MAX_GRANTED - 1),
    "no bytes": forged(1, 0, 0),
}


def forge(a, b, reference, psn, behind=b""):
    """Put a WRITE of one packet into the pipe from a to b."""
    a.nic.pause()
    until(lambda: a.nic.record["paused"], "the NIC to stand still")
    pipe, base, capacity, position = map(int, a.wire[WIRE.tx // 8 : WIRE.tx // 8 + 4])
    bth = bytes([0x0A, 0x40, 0xFF, 0xFF]) + int(b.queue.qp.qpn).to_bytes(4, "big") + psn.to_bytes(4, "big")
    reth = b.mr.address.to_bytes(8, "big") + b.mr.rkey.to_bytes(4, "big") + MTU.to_bytes(4, "big")
    packet = bth + reth + behind
    frame = base + position % capacity
    ctypes.memmove(frame + PACKET, packet, len(packet))
    record = np.ndarray((), FRAME.dtype, buffer=view(frame, FRAME.size))
    record["stride"], record["nbytes"], record["icrc"], record["reference"] = 128, len(packet), 0, reference
    view(pipe, 8, np.int64)[0] = position + 128


def test_a_reference_by_hand(ends):
    """What the others forge: this one is good."""
    a, b = ends
    fill(a, b, 7)
    forge(a, b, forged(1, MTU, SIZE - MTU), int(b.queue.row["expect_psn"]))
    until(lambda: np.array_equal(b.memory.array[:MTU], a.memory.array[-MTU:]), "the bytes")
    assert np.all(b.memory.array[MTU:] == 0xA5)


@pytest.mark.parametrize("reference", FORGED.values(), ids=FORGED)
def test_forged_references(ends, reference):
    """They are dropped, counted, and touch nothing."""
    a, b = ends
    fill(a, b, 7)
    forge(a, b, reference, int(b.queue.row["expect_psn"]))
    until(lambda: b.counter("rx_malformed"), "the packet to be counted")
    assert b.counter("rx_malformed") == 1
    assert np.all(b.memory.array == 0xA5)
    assert b.queue.row["state"] == a.queue.row["state"]


@pytest.mark.parametrize("nbytes", [1, MTU - 1, MTU + 1, 8191])
def test_a_reference_of_another_length(ends, nbytes):
    """The length is the packet's, and is refused like a packet's."""
    a, b = ends
    fill(a, b, 8)
    forge(a, b, forged(1, nbytes, 0), int(b.queue.row["expect_psn"]))
    until(lambda: b.queue.row["state"] != a.queue.row["state"], "the QP to fail")
    assert np.all(b.memory.array == 0xA5)


def test_a_payload_in_both_places(ends):
    """A packet that carries bytes and refers to others is of a wrong length, too."""
    a, b = ends
    fill(a, b, 8)
    forge(a, b, forged(1, MTU, 0), int(b.queue.row["expect_psn"]), bytes(4))
    until(lambda: b.queue.row["state"] != a.queue.row["state"], "the QP to fail")
    assert np.all(b.memory.array == 0xA5)


# --- messages ---------------------------------------------------------------------------------------------------------


def test_letters_that_make_no_sense(ends, caplog):
    """They are logged and change nothing; the link stays, and the next message is heard."""
    a, b = ends
    (link,) = a.peers
    good, small = HostMemory(PAGE, shared=True), HostMemory(PAGE)
    loose = os.memfd_create("loose")
    os.ftruncate(loose, PAGE)
    free = len(os.listdir("/proc/self/fd"))
    lend = {"op": "lend", "number": 7, "nbytes": PAGE}
    messages = [
        ({}, []), ({"op": "sing", "number": 7}, []), ({"op": "lend", "number": "7"}, []), (lend, []),
        (lend | {"number": 0}, [good.fd]), (lend | {"number": True}, [good.fd]),
        (lend | {"number": 1 << 16}, [good.fd]), (lend | {"nbytes": -1}, [good.fd]),
        (lend | {"nbytes": MAX_GRANTED + 1}, [good.fd]),
        (lend | {"nbytes": 2 * PAGE}, [good.fd]), (lend | {"nbytes": None}, [good.fd]), (lend, [good.fd, good.fd]),
        (lend, [loose]), (lend | {"number": 1}, [good.fd]), (lend | {"number": 1 + GRANTS}, [good.fd]),
    ]
    for message, fds in messages:
        link.send(message, fds)
    for message in ({"op": "lent", "number": 99}, {"op": "end", "number": 99}):
        link.send(message)
    link.send(lend, [good.fd])
    until(lambda: set(b.borrowed) == {1, 7}, "the good one")
    assert sum("ignores a message" in record.message for record in caplog.records) == len(messages)
    assert b.granted == {1}
    link.send({"op": "end", "number": 7})
    until(lambda: set(b.borrowed) == {1}, "its end")
    until(lambda: len(os.listdir("/proc/self/fd")) <= free, "all descriptors to be closed")
    os.close(loose)
    small.close()


def test_too_much_is_not_borrowed(ends, monkeypatch):
    a, b = ends
    monkeypatch.setattr(grants, "MAX_BORROWED", SIZE + PAGE)
    regions = [a.pd.register(HostMemory(nbytes, shared=True)) for nbytes in (2 * PAGE, PAGE)]
    until(lambda: a.granted == {1, 3}, "the one that fits")
    for mr in regions:
        a.queue.post(WRITE, b.remote(0), data(mr.address, mr.lkey, PAGE))
        done(a)
    assert set(b.borrowed) == {1, 3}


def test_a_broken_letter_ends_the_link(ends, caplog):
    a, b = ends
    (link,) = a.peers
    link.heartbeat.sendall(b"\xff" * 8)
    until(lambda: not b.peers and not a.peers, "the link to end")
    assert any("it announces" in record.message for record in caplog.records)


def test_out_of_descriptors(ends, monkeypatch):
    """What cannot be granted is copied."""
    a, b = ends

    def none_left(address, nbytes):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(grants, "open_shared", none_left)
    memory = HostMemory(PAGE, shared=True)
    memory.array[:] = 5
    mr = a.pd.register(memory)
    a.queue.post(WRITE, b.remote(0), data(mr.address, mr.lkey, PAGE))
    done(a)
    assert np.all(b.memory.array[:PAGE] == 5)
    assert a.granted == {1}


def test_letters_that_nobody_reads(ends):
    """The owner is not held up, and copies."""
    a, b = ends
    (link,) = a.peers
    with b.nic._lock:  # its messages wait
        for _ in range(10_000):
            try:
                link.send({"op": "end", "number": 99})
            except BlockingIOError:
                break
        else:
            raise AssertionError("the socket takes everything")
        a.pd.register(HostMemory(PAGE, shared=True))
    a.queue.post(WRITE, b.remote(0), a.at(0, PAGE))
    done(a)
    assert a.granted == {1}


# --- two processes ---------------------------------------------------------------------------------------------------


def child():
    """The other process: grants its memory, says who it is, and waits."""
    end = End("soft7", PortConfig(addresses=(sys.argv[1],), mtu=9000))
    end.nic.control_socket.connect(sys.argv[2])
    until(lambda: end.granted == {1}, "its memory to be mapped", neighbour.TIMEOUT)
    print("lent", flush=True)
    sys.stdin.read()


def mappings():
    """How many bytes of memory that is named like ours are mapped read-only and shared."""
    with open("/proc/self/maps") as maps:
        return sum(" r--s " in line and "gpunetio" in line for line in maps)


def test_a_peer_that_dies():
    """Its memory is unmapped at once."""
    before = mappings()
    place, there = neighbour.address(), neighbour.address()
    own = End("soft6", PortConfig(addresses=(place,), mtu=9000))
    process = subprocess.Popen(
        [sys.executable, __file__, there, place], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "lent\n"
        until(lambda: own.granted == {1}, "our memory to be mapped")
        assert mappings() == before + 1
        process.send_signal(signal.SIGKILL)
        until(lambda: not own.peers, "the grant to end")
        until(lambda: mappings() == before, "the memory to be unmapped")  # by the thread that has heard of it
    finally:
        process.kill()
        process.communicate()
        own.ctx.close()


if __name__ == "__main__":
    child()
