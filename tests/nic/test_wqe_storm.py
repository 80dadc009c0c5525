"""WQEs that nobody should post to a send queue of packets: it alone fails, and nothing else is touched or told."""

import contextlib
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.l2 import Ether

from eth_receive_rig import Buffer, Cq, opened
from eth_send_rig import CHECKSUMS, Sq, error_of, eth, inlined, opcode_of, pointer, stamp, wait_cq, wait_time
from ethernet_rig import Maker, nic_of
from frame_fuzz import V4
from gpunetio import PortConfig, verbs
from gpunetio.errors import DriverError
from gpunetio.eth import ManagedRxq
from gpunetio.flow import FlowPort, match
from gpunetio.formats.cqe import CqeOpcode, Syndrome
from gpunetio.formats.ethernet_queues import QueueState, TimestampFormat
from gpunetio.formats.wqe import WQEBB, WaitMode, WqeOpcode
from gpunetio.jit.compile import engine_function
from gpunetio.nic.state.reasons import Reason
from gpunetio.nic.transport.eth_frame import leave
from lan import End, exchange, join
from nic_rig import until, view
from stream_end import StreamEnd

SECRET = bytes.fromhex("5ec7e70ff5ec7e71")  # what fills all memory that the queue may not read
STILL = ("qps", "mkeys", "umems", "pds", "srqs", "rqts", "tirs", "tiss", "rqs", "uar_pages")
BESIDE = b"from the other queue"
EACH = 4  # WQEs at a time, at most


class Listener(threading.Thread):
    """Takes what the NIC sends apart, as the other end of the wire, where nothing but whole frames may arrive."""

    def __init__(self, end: StreamEnd):
        super().__init__()
        self.end, self.secrets = end, 0
        self.frames: list[bytes] = []  # that tests look for
        self.start()

    def run(self) -> None:
        data = bytearray()
        with contextlib.suppress(OSError):
            while more := self.end.sock.recv(1 << 16):
                data += more
                while len(data) >= 4 and len(data) >= (size := 4 + int.from_bytes(data[:4], "big")):
                    assert 14 <= size - 4 <= 1500 + 22
                    frame = bytes(data[4:size])
                    self.secrets += SECRET in frame
                    if frame.endswith(BESIDE):
                        self.frames.append(frame)
                    del data[:size]

    def close(self) -> None:
        self.end.hang_up()
        self.join(30)
        assert not self.is_alive()
        self.end.close()


class Storm:
    """A send queue that gets anything, beside another one, queue pairs, and memory of other domains."""

    def __init__(self, ctx: verbs.Context, source: random.Random):
        self.ctx, self.nic, self.source = ctx, nic_of(ctx), source
        self.ends = End(ctx, fill=0), End(ctx, fill=1)
        join(*self.ends)
        exchange(*self.ends)
        make, other = Maker(ctx), Maker(ctx)
        self.sq = Sq(make, Cq(make, log=10), log=5, allow_multi_pkt_send_wqe=1, ts_format=TimestampFormat.REAL_TIME)
        self.beside = Sq(other, Cq(other))
        self.out, self.hidden, self.sent = Buffer(make, 1 << 14), Buffer(other, 1 << 14), Buffer(other, 4096)
        gone = Buffer(make, 4096)
        for buffer in (self.hidden, gone):
            buffer.memory.array[:] = np.frombuffer(SECRET * (buffer.memory.nbytes // 8), np.uint8)
        gone.region.close()
        self.out.memory.array[:] = np.arange(1 << 14) % 251
        self.places = [self.out.at(0, 1 << 14), self.hidden.at(0, 1 << 14), gone.at(0, 4096)]
        self.places += [(end.here.address, end.here.key, 64) for end in self.ends]
        self.l2 = Ether(src=self.nic.mac.hex(":"), dst="02:00:00:00:00:06")
        self.head = bytes(self.l2 / IP(src="1.2.3.4", dst="5.6.7.8", len=500) / TCP())
        self.completed = self.failed = self.number = 0
        self.still = self._still()

    def _still(self) -> list[bytes]:
        images = [getattr(self.nic, name).given.tobytes() for name in STILL]
        images += [buffer.whole.tobytes() for end in self.ends for buffer in (end.here, end.there)]
        return images + [buffer.memory.array.tobytes() for buffer in (self.out, self.hidden)]

    def _data(self) -> bytes:
        """A data segment: of its own memory, of others', beyond the end, or of keys that do not exist."""
        r = self.source
        address, lkey, room = r.choice(self.places) if r.random() < 0.3 else self.places[0]
        at, nbytes = r.randrange(room), r.choice((0, 1, 13, 14, 60, 600, 1500))
        if r.random() < 0.1:
            lkey = r.randrange(1 << 32)
        if r.random() < 0.1:
            address, nbytes = r.choice((0, 1 << 63, (1 << 64) - 8, address - 8)), r.choice((16, 1 << 31, 0x7FFF_FFFF))
            return pointer(address, lkey, nbytes)
        if r.random() < 0.2:
            return inlined(r.randbytes(r.randrange(60)))
        return pointer(address + at, lkey, nbytes if r.random() < 0.1 else min(nbytes, room - at))

    def _wqe(self) -> tuple[list[bytes], dict[str, Any]]:
        """Segments and fields of a WQE that is right in its form."""
        r = self.source
        kind = r.randrange(6)
        if kind == 0:
            far = r.choice((-(10**9), 10**5, 10**8, 5 * 10**9))
            return [wait_time(stamp(1_600_000_000 * 10**9 + far))], {"opcode": WqeOpcode.WAIT, "opmod": WaitMode.TIME}
        if kind == 1:
            return [wait_cq(self.beside.cq.made.number, r.randrange(8))], {"opcode": WqeOpcode.WAIT}
        data = [self._data() for _ in range(r.randrange(1, 5))]
        if kind == 2:
            return [eth(flags=CHECKSUMS), *data], {"opcode": WqeOpcode.ENHANCED_MPSW}
        inline = self.head[: r.choice((0, 5, 14, 18, 34, 54))]
        flags = r.choice((0, CHECKSUMS, r.randrange(256)))
        if kind == 3:
            return [eth(self.head, flags, mss=r.choice((0, 1, 100, 1400))), *data], {"opcode": WqeOpcode.TSO}
        return [eth(inline, flags, vlan=r.choice((None, 5)) if not inline else None), *data], {}

    def _spoil(self, begin: int) -> None:
        """Change bytes of the WQE that was written last, or all of them."""
        r, ring = self.source, self.sq.memory.array
        size = WQEBB << self.sq.log
        places = [(begin * WQEBB + i) % size for i in range((self.sq.pi - begin) * WQEBB)]
        if r.random() < 0.1:
            keep = places[:8] if r.random() < 0.8 else []  # index, opcode, number: what follows is read
            for at in places[len(keep) :]:
                ring[at] = r.randrange(256)
        for _ in range(r.choice((0, 1, 1, 2, 4))):
            at = r.choice(places)
            ring[at] = r.choice((0, 1, 0xFF, int(ring[at]) ^ 1 << r.randrange(8), r.randrange(256)))

    def round(self) -> None:
        """Post some WQEs, see what becomes of them, and start the queue again if it has failed or stands still."""
        r, sq = self.source, self.sq
        for _ in range(r.randrange(1, EACH)):
            begin = sq.pi
            segments, fields = self._wqe()
            sq.write(*segments, ask=r.choice((0, 8, 8)), **fields)
            self._spoil(begin)
        sq.ring(r.choice(("register", "uar", "record")))
        self.nic.engine.synchronize()
        for cqe in sq.cq.take():
            if opcode_of(cqe) == CqeOpcode.REQ:
                self.completed += 1
                continue
            syndrome, reason = error_of(cqe)
            assert Syndrome(syndrome) in (
                Syndrome.LOCAL_LENGTH, Syndrome.LOCAL_QP_OP, Syndrome.LOCAL_PROT, Syndrome.WR_FLUSH
            )
            assert Reason(reason)
            self.failed += Syndrome(syndrome) != Syndrome.WR_FLUSH
        if sq.state == QueueState.ERR or int(sq.row["sq_ci"]) != sq.pi:
            with contextlib.suppress(DriverError):  # it has failed by itself
                sq.modify(QueueState.RDY, QueueState.ERR)
            sq.modify(QueueState.ERR, QueueState.RST)
            sq.record[1] = sq.pi = 0
            sq.modify(QueueState.RST, QueueState.RDY)
            sq.cq.take()

    def check(self, listener: Listener) -> None:
        """The other queue sends what it is to, the queue pairs move data, and all else is as it was."""
        self.number += 1
        frame = bytes(self.l2 / IP(id=self.number & 0xFFFF) / UDP(sport=9) / BESIDE)
        self.sent.memory.array[: len(frame)] = list(frame)
        self.beside.post(eth(), pointer(*self.sent.at(0, len(frame))))
        assert opcode_of(self.beside.done()[0]) == CqeOpcode.REQ
        assert self.beside.state == QueueState.RDY
        until(lambda: frame in listener.frames, "the frame of the other queue")
        assert self._still() == self.still
        assert listener.secrets == 0


def storm_of(tmp_path: Path, rounds: int, seed: int) -> Storm:
    path = tmp_path / "s"
    with opened(port=PortConfig(addresses=V4[0], wire=f"unix:{path}")) as ctx:
        listener = Listener(StreamEnd(path))
        try:
            storm = Storm(ctx, random.Random(seed))
            for i in range(1, rounds + 1):
                storm.round()
                if i % 250 == 0:
                    storm.check(listener)
            exchange(*storm.ends)
        finally:
            listener.close()
        return storm


def test_a_storm(tmp_path):
    storm = storm_of(tmp_path, 500, seed=1)
    assert min(storm.completed, storm.failed) > 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_long_storm(tmp_path):
    storm = storm_of(tmp_path, 12_000, seed=2)
    assert min(storm.completed, storm.failed) > 600


@engine_function
def _leave(nic, row, frame, nbytes):
    leave(nic, row, frame, nbytes, 1, 0)


def test_a_mac_that_changes_while_the_packet_is_sent(tmp_path):
    """The packet comes back all the same: nothing was reserved for it on the wire."""
    path = tmp_path / "s"
    with opened(port=PortConfig(addresses=V4[0], wire=f"unix:{path}")) as ctx, FlowPort(ctx) as port:
        nic, listener = nic_of(ctx), Listener(StreamEnd(path))
        make = Maker(ctx)
        rxq, sq = ManagedRxq(make.pd, 4, 64), Sq(make, Cq(make))
        port.steer(match.everything(), rxq)
        packet = b"\2\0\0\0\0\6" + nic.mac + b"\x88\xb5" + BESIDE  # to somebody else, by now
        room = int(nic.record["frame"])
        view(room, len(packet))[:] = list(packet)
        _leave(nic.control_address, nic.sqs.row_address(sq.number), room, len(packet))
        (back,) = rxq.receive(timeout=30)
        assert back.data.tobytes() == packet
        out = Buffer(sq.make, 64)
        out.memory.array[: len(packet)] = list(packet)
        sq.post(eth(), pointer(*out.at(0, len(packet))))
        until(lambda: listener.frames, "the next packet")
        assert listener.frames == [packet]
        listener.close()
