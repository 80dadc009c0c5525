"""Receive queues of Ethernet frames: where the NIC places a frame, and what its completion says. scapy is the judge."""

import ipaddress
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP, TCP, UDP, fragment
from scapy.layers.inet6 import IPv6, IPv6ExtHdrDestOpt, IPv6ExtHdrFragment
from scapy.layers.l2 import ARP, Dot1AD, Dot1Q, Ether

from eth_receive_rig import Buffer, Cq, Rq, lead, opened, remove_rules, take
from ethernet_rig import KEY, Maker, nic_of
from flow_rig import TABLE, Steering
from gpunetio import PortConfig, verbs
from gpunetio.enums import Access
from gpunetio.errors import DriverError
from gpunetio.formats.commands import Opcode, WqType
from gpunetio.formats.cqe import FILLER, CqeOpcode, RxChecksum, RxHeaders
from gpunetio.formats.ethernet_queues import ModifyRq, QueueState
from gpunetio.formats.events import EventType
from gpunetio.formats.wqe import MIN_STRIDE_LOG, MIN_STRIDES_LOG, STRIDING_WQE
from gpunetio.nic.control.syndromes import CommandSyndrome
from gpunetio.nic.state.reasons import Reason
from lan import Station, cabled, nics
from nic_rig import until
from stream_end import StreamEnd

RST, RDY, ERR = QueueState.RST, QueueState.RDY, QueueState.ERR
L2 = Ether(src="02:00:00:00:00:05", dst="02:00:00:00:00:06")
DELIVERED, NO_BUFFER, TOO_LONG, NOT_READY = (
    f"rx_frame_{fate}" for fate in ("delivered", "no_buffer", "too_long", "queue_state")
)
LENGTH, PROTECTION, FLUSHED = 1, 4, 5  # syndromes


@pytest.fixture
def ctx() -> Iterator[verbs.Context]:
    with opened() as ctx:
        yield ctx


@pytest.fixture
def make(ctx) -> Maker:
    return Maker(ctx)


def opcode(cqe: Any) -> CqeOpcode:
    return CqeOpcode(int(cqe["op_own"]) >> 4)


def syndrome(cqe: Any) -> int:
    """The byte in which error CQEs have their syndrome."""
    return int(cqe["timestamp"]) & 0xFF


def striding(
    strides_log: int, stride_log: int, wq_type: WqType = WqType.CYCLIC_STRIDING, pad: int = 0
) -> dict[str, int]:
    return {
        "wq_type": wq_type, "log_wqe_num_of_strides": strides_log - MIN_STRIDES_LOG & 0xF,
        "log_wqe_stride_size": stride_log - MIN_STRIDE_LOG, "two_byte_shift_en": pad,
    }


class Direct:
    """A receive queue that gets all frames."""

    def __init__(self, make: Maker, tag: int = 0, nbytes: int = 1 << 16, cq_log: int = 8, **queue: Any):
        self.make, self.ctx = make, make.ctx
        self.cq, self.buffer = Cq(make, cq_log), Buffer(make, nbytes)
        self.counter = make.counter()
        self.rq = Rq(make, self.cq, **({"counter_set_id": self.counter.number} | queue))
        self.domain = make.domain()
        self.tir = make.direct(self.domain.number, self.rq.made.number)
        self.steering = lead(make.ctx, self.tir.number, tag)

    def close(self) -> None:
        remove_rules(self.ctx)
        for made in (self.tir, self.domain, self.rq.made, self.counter, self.cq.made):
            made.close()
        for ring in (self.rq, self.cq):
            ring.umem.close()

    def take(self, *frames: Any) -> list[str]:
        return take(self.ctx, frames)

    @property
    def dropped(self) -> int:
        return self.counter.query()["out_of_buffer"]


# --- cyclic queues ---------------------------------------------------------------------------------------------------


def test_frames_in_order(make):
    """Each takes a receive; the CQE has its length, the index of the receive, the tag, and the time."""
    end = Direct(make, tag=0xABCDE, user_index=0x123456)
    frames = [bytes(L2 / IP() / UDP() / bytes(n * 100)) for n in range(6)]
    for n in range(4):
        end.rq.post(end.buffer.at(n * 2048, 2048))
    assert end.take(*frames) == [DELIVERED] * 4 + [NO_BUFFER] * 2
    cqes = end.cq.take()
    assert [opcode(cqe) for cqe in cqes] == [CqeOpcode.RESP_SEND] * 4
    assert [int(cqe["byte_cnt"]) for cqe in cqes] == [len(frame) for frame in frames[:4]]
    assert [int(cqe["wqe_counter"]) for cqe in cqes] == [0, 1, 2, 3]
    assert {int(cqe["sop_drop_qpn"]) for cqe in cqes} == {0xABCDE}
    assert {int(cqe["srqn_uidx"]) for cqe in cqes} == {0x123456}
    assert all(int(cqe["timestamp"]) > 0 for cqe in cqes)
    for n, frame in enumerate(frames[:4]):
        assert end.buffer.bytes(n * 2048, 2048) == frame + b"\xee" * (2048 - len(frame))
    assert end.dropped == 2
    assert nic_of(make.ctx).counters["out_of_buffer"] == 0


@pytest.mark.slow
def test_the_ring_is_used_again_and_again(make):
    """Indices in CQEs have 16 bits and do not wrap with the ring; doorbell records wrap at 2^16."""
    end = Direct(make, log=8, cq_log=9)
    for lap in range(258):
        for n in range(256):
            end.rq.post(end.buffer.at(n * 64, 64))
        assert end.take(*[bytes(L2) + bytes([lap & 0xFF, n]) for n in range(256)]) == [DELIVERED] * 256
        assert [int(cqe["wqe_counter"]) for cqe in end.cq.take()] == [lap * 256 + n & 0xFFFF for n in range(256)]
        assert end.buffer.bytes(77 * 64 + 14, 2) == bytes([lap & 0xFF, 77])
    assert end.take(L2) == [NO_BUFFER]


@pytest.mark.parametrize("split", [(100,), (1, 99), (14, 20, 66), (30, 30, 30, 30)])
def test_a_receive_of_several_segments(make, split):
    end = Direct(make, wqe=64)
    end.rq.post(*(end.buffer.at(n * 1000, nbytes) for n, nbytes in enumerate(split)))
    frame = bytes(L2) + random.Random(1).randbytes(86)
    assert end.take(frame) == [DELIVERED]
    got = b"".join(end.buffer.bytes(n * 1000, nbytes) for n, nbytes in enumerate(split))
    assert got == frame + b"\xee" * (sum(split) - 100)


@pytest.mark.parametrize("kind", [WqType.LINKED_LIST, WqType.LINKED_LIST_STRIDING])
def test_linked_receives_come_in_the_order_of_their_links(make, kind):
    wq = striding(3, 6, kind) if kind == WqType.LINKED_LIST_STRIDING else {"wq_type": kind}
    end = Direct(make, log=2, wqe=STRIDING_WQE, wq=wq)
    for at, following in ((0, 2), (2, 1), (1, 3), (3, 0)):
        end.rq.write(end.buffer.at(at * 512, 512), at=at, following=following)
    end.rq.announce(4)
    assert end.take(*[L2 / bytes(486)] * 5) == [DELIVERED] * 4 + [NO_BUFFER]
    field = "wqe_counter" if kind == WqType.LINKED_LIST else "wqe_id"
    assert [int(cqe[field]) for cqe in end.cq.take()] == [0, 2, 1, 3]


@pytest.mark.parametrize("wq_type", [WqType.LINKED_LIST, WqType.CYCLIC])
def test_receives_of_a_pool(make, wq_type):
    """Two queues take them from a receive memory pool in turn. A cyclic pool's links are not followed."""
    cq, buffer = Cq(make), Buffer(make, 4096)
    pool = make.rmp(wq_type=wq_type)
    record = make.memory.view(">u4", 0x8000 + 64, 1)
    for n in range(4):
        slot = make.memory.view(">u4", n * 32 + 16, 4)
        slot[0], slot[1] = 1024, buffer.region.lkey
        make.memory.view(">u8", n * 32 + 24, 1)[0] = buffer.memory.address + n * 1024
        make.memory.view(">u2", n * 32 + 2, 1)[0] = n + 1 if wq_type == WqType.LINKED_LIST else 0
    record[0] = 3
    domain, tirs = make.domain().number, []
    for n in range(2):
        rq = make.rq(cq.made.number, mem_rq_type=1, rmpn=pool.number, user_index=n, wq=None)
        rq.modify(Opcode.MODIFY_RQ, rq_state=RST, ctx={"state": RDY})
        tirs.append(make.direct(domain, rq.number))
    steering = lead(make.ctx, tirs[0].number)
    assert take(make.ctx, [L2 / b"one"]) == [DELIVERED]
    steering.root(0)
    lead(make.ctx, tirs[1].number)
    assert take(make.ctx, [L2 / b"two", L2 / b"three", L2 / b"four"]) == [DELIVERED, DELIVERED, NO_BUFFER]
    told = [(int(cqe["srqn_uidx"]), int(cqe["wqe_counter"])) for cqe in cq.take()]
    assert told == [(0, 0), (1, 1), (1, 2)]
    assert [buffer.bytes(n * 1024 + 14, 3) for n in range(3)] == [b"one", b"two", b"thr"]


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_frame_that_is_too_long(make):
    """Its receive completes with an error, and the queue goes on."""
    end = Direct(make)
    for n in range(3):
        end.rq.post(end.buffer.at(n * 100, 100))
    assert end.take(L2 / bytes(86), L2 / bytes(87), L2 / bytes(10)) == [DELIVERED, TOO_LONG, DELIVERED]
    cqes = end.cq.take()
    assert [opcode(cqe) for cqe in cqes] == [CqeOpcode.RESP_SEND, CqeOpcode.RESP_ERR, CqeOpcode.RESP_SEND]
    assert (syndrome(cqes[1]), int(cqes[1]["wqe_counter"])) == (LENGTH, 1)
    assert int(cqes[1]["sop_drop_qpn"]) & 0xFF_FFFF == end.rq.made.number
    assert end.buffer.bytes(100, 100) == b"\xee" * 100
    assert (end.rq.state, nic_of(make.ctx).counters["resp_local_length_error"]) == (RDY, 1)


def other_pd(end: Direct) -> tuple[int, int, int]:
    other = Maker(end.ctx)
    return Buffer(other, 4096).at(0, 1024)


REFUSED: list[tuple[Callable[[Direct], tuple[int, int, int]], Reason, str]] = [
    (lambda end: (end.buffer.memory.address, 0x7777_7700, 1024), Reason.LKEY_UNKNOWN, "no memory region has lkey"),
    (lambda end: end.buffer.at((1 << 16) - 10, 1024), Reason.LKEY_BOUNDS, "is outside the region"),
    (lambda end: Buffer(end.make, 4096, Access(0)).at(0, 1024), Reason.LKEY_RIGHTS, "needs 0x1"),
    (other_pd, Reason.LKEY_PD, "belongs to PD"),
]


@pytest.mark.parametrize(("segment", "reason", "words"), REFUSED, ids=[str(row[1].name) for row in REFUSED])
@pytest.mark.parametrize("strides", [False, True])
def test_memory_that_the_queue_may_not_write(make, segment, reason, words, strides, caplog):
    """The receive fails, the queue is in ERR, and what else was posted is flushed."""
    shape = {"wqe": STRIDING_WQE, "wq": striding(3, 7)} if strides else {}
    end = Direct(make, **shape)
    end.rq.post(segment(end))
    end.rq.post(end.buffer.at(0, 1024))
    assert end.take(L2 / bytes(100), L2) == [NOT_READY, NOT_READY]
    cqes = end.cq.take()
    assert [(opcode(cqe), syndrome(cqe)) for cqe in cqes] == [
        (CqeOpcode.RESP_ERR, PROTECTION), (CqeOpcode.RESP_ERR, FLUSHED)
    ]
    assert end.rq.state == ERR
    until(lambda: words in caplog.text, "the log says why")
    assert f"RQ {end.rq.made.number:#x}, receive at index 0" in caplog.text


def test_a_queue_is_used_again_after_a_failure(make):
    """ERR, RST, RDY: it begins with the first receive again."""
    end = Direct(make)
    end.rq.post((0, 0x7777_7700, 1024))
    end.take(L2)
    end.cq.take()
    end.rq.modify(ERR, RST)
    end.rq.posted = 0
    end.rq.announce(0)
    end.rq.modify(RST, RDY)
    assert end.take(L2) == [NO_BUFFER]
    end.rq.post(end.buffer.at(0, 64))
    assert end.take(L2) == [DELIVERED]
    assert int(end.cq.take()[0]["wqe_counter"]) == 0


@pytest.mark.parametrize("flush", [0, 1])
def test_error_by_command(make, flush):
    """Receives are flushed if the queue is to do so. Frames are dropped and counted in each state but RDY."""
    end = Direct(make, flush_in_error_en=flush)
    for _ in range(3):
        end.rq.post(end.buffer.at(0, 1024))
    end.rq.modify(RDY, ERR)
    assert [(opcode(cqe), syndrome(cqe)) for cqe in end.cq.take()] == [(CqeOpcode.RESP_ERR, FLUSHED)] * 3 * flush
    assert end.take(L2) == [NOT_READY]
    end.rq.modify(ERR, RST)
    assert end.take(L2) == [NOT_READY]
    assert end.dropped == 0


def test_a_full_cq_fails_the_queue(make, caplog):
    end = Direct(make, cq_log=1, flush_in_error_en=0)
    for _ in range(4):
        end.rq.post(end.buffer.at(0, 1024))
    assert end.take(L2, L2, L2, L2) == [DELIVERED, DELIVERED, NOT_READY, NOT_READY]
    assert end.rq.state == ERR
    until(lambda: "completions have not been consumed" in caplog.text, "the log says why")


def test_a_command_that_the_queue_has_overtaken(make):
    """MODIFY names the state from which it goes on: RDY is no longer true after a failure."""
    end = Direct(make)
    end.rq.post((0, 0x7777_7700, 1024))
    end.take(L2)
    with pytest.raises(DriverError) as caught:
        end.rq.modify(RDY, RDY)
    assert caught.value.syndrome == CommandSyndrome.QUEUE_STATE
    assert end.rq.state == ERR


# --- steering --------------------------------------------------------------------------------------------------------


def test_what_no_rule_takes_is_left_to_the_port(make):
    end = Direct(make)
    end.rq.post(end.buffer.at(0, 1024))
    end.steering.root(0)
    assert end.take(L2) == [""]
    table = end.steering.table(log=1)
    end.steering.set(table, end.steering.group(table, 0, 0, enable=0), 0)
    end.steering.root(table)
    assert end.take(L2, bytes(13)) == ["rx_frame_rule_dropped", ""]
    end.steering.delete(table, 0)
    assert end.take(L2) == [""]
    assert end.cq.take() == []


def test_rules_that_lead_round_in_circles(make):
    steering = Steering(nic_of(make.ctx))
    tables = [steering.table(level=level, log=1) for level in (0, 1)]
    for n, table in enumerate(tables):
        group = steering.group(table, 0, 0, enable=0)
        steering.set(table, group, 0, to=(TABLE, tables[1 - n]), context={}, ignore_flow_level=1)
    steering.root(tables[0])
    assert take(make.ctx, [L2]) == ["rx_frame_rule_loop"]


def toeplitz(data: bytes) -> int:
    """The hash bit by bit, as its specification has it."""
    key, result = int.from_bytes(KEY, "big"), 0
    for i in range(8 * len(data)):
        if data[i // 8] >> 7 - i % 8 & 1:
            result ^= key >> 320 - 32 - i & 0xFFFF_FFFF
    return result


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("kind", [TCP, UDP])
def test_rss(make, version, kind):
    """The hash selects the queue, and CQEs have it. Frames of other kinds have the hash 0, and go to the first."""
    cq, buffer = Cq(make, 9), Buffer(make, 2048)
    rqs = [Rq(make, cq, log=8, user_index=n) for n in range(4)]
    for rq in rqs:
        for _ in range(100):
            rq.post(buffer.at(0, 2048))
    selector = {"l3_prot_type": int(version == 6), "l4_prot_type": int(kind is UDP), "selected_fields": 0xF}
    domain, table = make.domain().number, make.rqt(rq.made.number for rq in rqs).number
    lead(make.ctx, make.hashed(domain, table, rx_hash_field_selector_outer=selector).number)
    source, frames, hashes = random.Random(3), [], []
    for _ in range(60):
        addresses = [ipaddress.ip_address(source.randbytes(4 if version == 4 else 16)) for _ in range(2)]
        ports = [source.randrange(1 << 16) for _ in range(2)]
        names = [str(address) for address in addresses]
        ip = IP(src=names[0], dst=names[1]) if version == 4 else IPv6(src=names[0], dst=names[1])
        frames.append(L2 / ip / kind(sport=ports[0], dport=ports[1]))
        packed = b"".join(a.packed for a in addresses) + b"".join(p.to_bytes(2, "big") for p in ports)
        hashes.append(toeplitz(packed))
    other = [L2 / IP() / ICMP(), L2 / ARP(), L2 / IP() / (UDP if kind is TCP else TCP)()]
    assert take(make.ctx, frames + other) == [DELIVERED] * 63
    cqes = cq.take()
    assert [int(cqe["rss_hash_result"]) for cqe in cqes] == hashes + [0] * 3
    assert [int(cqe["srqn_uidx"]) for cqe in cqes] == [value % 4 for value in hashes] + [0] * 3
    told = (1 if version == 4 else 2) << 2 | (1 if kind is TCP else 2) << 6
    assert [int(cqe["rss_hash_type"]) for cqe in cqes] == [told] * 60 + [0] * 3
    assert {int(cqe["srqn_uidx"]) for cqe in cqes} == {0, 1, 2, 3}


# --- what CQEs say ---------------------------------------------------------------------------------------------------

L2_OK, L3_OK, L4_OK = RxChecksum.L2_OK, RxChecksum.L3_OK, RxChecksum.L4_OK
ALL_OK = L2_OK | L3_OK | L4_OK
V6, V4, OPTIONS, FRAGMENT = 1 << 2, 2 << 2, RxHeaders.IP_OPTIONS, RxHeaders.FRAGMENT
TCP_, UDP_, PURE_ACK, ACK_DATA = (n << 4 for n in (1, 2, 3, 4))
V6_PAIR = IPv6(src="fd00::1", dst="fd00::2")
FRAMES = [
    ("udp", L2 / IP() / UDP() / b"odd", ALL_OK, V4 | UDP_),
    ("udp6", L2 / V6_PAIR / UDP() / b"even", ALL_OK, V6 | UDP_),
    ("syn", L2 / IP() / TCP(flags="S"), ALL_OK, V4 | TCP_),
    ("ack", L2 / IP() / TCP(flags="A"), ALL_OK, V4 | PURE_ACK),
    ("data", L2 / V6_PAIR / TCP(flags="PA", options=[("MSS", 1460)]) / b"abc", ALL_OK, V6 | ACK_DATA),
    ("padded", L2 / IP() / TCP(flags="A") / bytes(0), ALL_OK, V4 | PURE_ACK),
    ("icmp", L2 / IP() / ICMP(), L2_OK | L3_OK, V4),
    ("arp", L2 / ARP(), L2_OK, 0),
    ("tagged", L2 / Dot1Q(vlan=5) / IP() / UDP() / b"x", ALL_OK, V4 | UDP_),
    ("options", L2 / IP(options=b"\x01\x01\x01\x00") / UDP(), ALL_OK, V4 | UDP_ | OPTIONS),
    ("extension", L2 / V6_PAIR / IPv6ExtHdrDestOpt() / UDP() / b"x", ALL_OK, V6 | UDP_ | OPTIONS),
    ("fragment", L2 / fragment(IP() / UDP() / bytes(100), 64)[0], L2_OK | L3_OK, V4 | FRAGMENT),
    ("fragment6", L2 / V6_PAIR / IPv6ExtHdrFragment(m=1, nh=17) / bytes(64), L2_OK | L3_OK, V6 | FRAGMENT | OPTIONS),
    ("header", L2 / IP(chksum=1) / UDP() / b"x", L2_OK | L4_OK, V4 | UDP_),
    ("udp sum", L2 / IP() / UDP(chksum=1) / b"x", L2_OK | L3_OK, V4 | UDP_),
    ("no udp sum", L2 / IP() / UDP(chksum=0) / b"x", L2_OK | L3_OK, V4 | UDP_),
    ("tcp sum", L2 / V6_PAIR / TCP(chksum=1, flags="S"), L2_OK | L3_OK, V6 | TCP_),
    ("udp length", L2 / IP() / UDP(len=900) / b"x", L2_OK | L3_OK, V4 | UDP_),
]


def ones_sum(data: bytes) -> int:
    """RFC 1071, word by word."""
    total = 0
    for at in range(0, len(data), 2):
        total += int.from_bytes(data[at : at + 2].ljust(2, b"\0"), "big")
        total = (total & 0xFFFF) + (total >> 16)
    return total


@pytest.mark.parametrize(("frame", "checked", "types"), [row[1:] for row in FRAMES], ids=[row[0] for row in FRAMES])
def test_headers_and_checksums(make, frame, checked, types):
    end = Direct(make)
    end.rq.post(end.buffer.at(0, 4096))
    data = bytes(frame)
    if frame is FRAMES[5][1]:
        data = data.ljust(60, b"\x55")  # what a card's driver may leave in the padding
    assert end.take(data) == [DELIVERED]
    (cqe,) = end.cq.take()
    assert RxChecksum(int(cqe["hds_ip_ext"])) == checked
    assert int(cqe["l4_hdr_type_etc"]) == types
    assert int(cqe["check_sum"]) == ones_sum(data[14:])
    assert end.buffer.bytes(0, len(data)) == data


@settings(max_examples=150, deadline=None)
@given(payload=st.binary(max_size=300), kind=st.sampled_from([TCP, UDP]), six=st.booleans(), flip=st.integers(0, 5000))
def test_a_changed_bit_is_seen(payload, kind, six, flip):
    """What the NIC says of a checksum is what scapy says of it."""
    good = bytes(L2 / (V6_PAIR if six else IP()) / kind() / payload)
    start = 14 + (40 if six else 20)
    bad = bytearray(good)
    bit = flip % (8 * (len(good) - start))
    bad[start + bit // 8] ^= 1 << bit % 8
    with opened() as ctx:
        end = Direct(Maker(ctx))
        for _ in range(2):
            end.rq.post(end.buffer.at(0, 4096))
        assert end.take(good, bytes(bad)) == [DELIVERED] * 2
        right, wrong = (int(cqe["hds_ip_ext"]) for cqe in end.cq.take())
    assert right == ALL_OK
    assert not wrong & L4_OK


@pytest.mark.parametrize("keep", [0, 1])
def test_vlan_tags(make, keep):
    """Without `vsd`, the customer tag leaves the frame and is in the CQE. A service tag stays."""
    end = Direct(make, vsd=keep)
    tag = Dot1Q(vlan=0x123, prio=5)
    inner = IP() / UDP(sport=7) / b"payload"
    frames = [
        bytes(L2 / tag / inner), bytes(L2 / inner), bytes(L2 / Dot1AD(vlan=9) / inner), bytes(L2 / tag / tag / inner)
    ]
    plain = [bytes(L2 / inner), bytes(L2 / inner), frames[2], bytes(L2 / tag / inner)]
    for n in range(4):
        end.rq.post(end.buffer.at(n * 512, 512))
    assert end.take(*frames) == [DELIVERED] * 4
    cqes = end.cq.take()
    for n, cqe in enumerate(cqes):
        wanted = frames[n] if keep else plain[n]
        assert end.buffer.bytes(n * 512, int(cqe["byte_cnt"])) == wanted
        assert int(cqe["check_sum"]) == ones_sum(wanted[14:])
        assert int(cqe["hds_ip_ext"]) == ALL_OK
    stripped = [False] * 4 if keep else [True, False, False, True]
    assert [bool(int(cqe["l4_hdr_type_etc"]) & RxHeaders.VLAN_STRIPPED) for cqe in cqes] == stripped
    assert [int(cqe["vlan_info"]) for cqe in cqes] == [0xA123 if there else 0 for there in stripped]
    end.rq.made.modify(Opcode.MODIFY_RQ, rq_state=RDY, modify_bitmask=ModifyRq.VSD, ctx={"state": RDY, "vsd": 1 - keep})
    end.rq.post(end.buffer.at(0, 512))
    assert end.take(frames[0]) == [DELIVERED]
    assert int(end.cq.take()[0]["byte_cnt"]) == len(frames[0]) - 4 * keep


# --- striding queues -------------------------------------------------------------------------------------------------


class Model:
    """A striding queue in plain Python: fates, CQEs (kind, WQE, stride, strides, bytes), and what memory holds."""

    def __init__(self, strides: int, stride: int, pad: int):
        self.strides, self.stride, self.pad = strides, stride, pad
        self.fates: list[str] = []
        self.cqes: list[Any] = []
        self.memory = bytearray()
        self.free = self.wqe = self.at = 0

    def post(self) -> None:
        self.free += 1
        self.memory += b"\xee" * (self.strides * self.stride)

    def _next(self) -> None:
        self.free, self.wqe, self.at = self.free - 1, self.wqe + 1, 0

    def take(self, frame: bytes) -> None:
        need = -(-(len(frame) + self.pad) // self.stride)
        if self.free and self.at and self.at + need > self.strides:
            self.cqes.append(("filler", self.wqe, self.at, self.strides - self.at, 0))
            self._next()
        if not self.free:
            self.fates.append(NO_BUFFER)
        elif need > self.strides:
            self.fates.append(TOO_LONG)
            self.cqes.append(("error", self.wqe, 0, self.strides, 0))
            self._next()
        else:
            self.fates.append(DELIVERED)
            self.cqes.append(("frame", self.wqe, self.at, need, len(frame)))
            place = (self.wqe * self.strides + self.at) * self.stride + self.pad
            self.memory[place : place + len(frame)] = frame
            self.at += need
            if self.at == self.strides:
                self._next()


def read(cqe: Any) -> tuple[str, int, int, int, int]:
    count, place = int(cqe["byte_cnt"]), (int(cqe["wqe_id"]), int(cqe["wqe_counter"]))
    kind = "filler" if count & FILLER else "frame"
    if opcode(cqe) == CqeOpcode.RESP_ERR:
        kind = "error"
        assert syndrome(cqe) == LENGTH
    return kind, *place, count >> 16 & 0x7FFF, count & 0xFFFF


def test_a_striding_queue_is_as_its_model(make):
    """Any frames, with receives that come late, and never more of them than the ring has room for."""

    @settings(max_examples=200, deadline=None)
    @given(
        strides_log=st.integers(3, 5), stride_log=st.integers(6, 8), pad=st.booleans(), log=st.integers(1, 3),
        steps=st.lists(st.tuples(st.integers(0, 3), st.integers(14, 1100)), min_size=1, max_size=30),
    )
    def run(strides_log: int, stride_log: int, pad: bool, log: int, steps: list[tuple[int, int]]) -> None:
        model = Model(1 << strides_log, 1 << stride_log, 2 * pad)
        each = model.strides * model.stride
        end = Direct(
            make, log=log, wqe=STRIDING_WQE, wq=striding(strides_log, stride_log, pad=int(pad)),
            nbytes=sum(more for more, _ in steps) * each + 64,
        )
        got = []
        for n, (more, size) in enumerate(steps):
            for _ in range(min(more, (1 << log) - model.free)):
                end.rq.post(end.buffer.at(end.rq.posted * each, each))
                model.post()
            frame = bytes(L2) + random.Random(n).randbytes(size - 14)
            model.take(frame)
            got += end.take(frame)
        assert got == model.fates
        assert [read(cqe) for cqe in end.cq.take()] == model.cqes
        assert end.buffer.bytes(0, len(model.memory)) == bytes(model.memory)
        assert end.dropped == model.fates.count(NO_BUFFER)
        end.close()
        end.buffer.region.close()

    run()


def test_a_segment_that_is_shorter_than_its_strides(make):
    """Nothing is written behind it."""
    end = Direct(make, wqe=STRIDING_WQE, wq=striding(3, 6))
    end.rq.post(end.buffer.at(0, 100))
    assert end.take(L2 / bytes(40), L2 / bytes(40)) == [DELIVERED, TOO_LONG]
    assert end.buffer.bytes(64, 448) == b"\xee" * 448
    assert [read(cqe)[0] for cqe in end.cq.take()] == ["frame", "error"]


def test_flushed_receives_of_a_striding_queue_tell_of_all_their_strides(make):
    end = Direct(make, wqe=STRIDING_WQE, wq=striding(3, 6))
    for _ in range(2):
        end.rq.post(end.buffer.at(0, 512))
    end.take(L2 / bytes(100))
    end.rq.modify(RDY, ERR)
    counts = [int(cqe["byte_cnt"]) >> 16 for cqe in end.cq.take()]
    assert counts == [2, 6, 8]


def test_the_first_worker_serves_the_completion_queue():
    """Frames come to the first worker: a CQ of another one is brought there, with the queue pairs that use it."""
    with opened(port=PortConfig(workers=3)) as ctx:
        make, nic = Maker(ctx), nic_of(ctx)
        first = nic.engine.workers[0]
        cqs = [ctx.create_cq(8) for _ in range(3)]
        qps = [make.pd.create_qp(send_cq=cq, sq_wr=4) for cq in cqs]
        assert len({int(nic.cqs[cq.cqn]["worker"]) for cq in cqs}) == 3
        made = [make.rq(cq.cqn) for cq in cqs]
        assert {int(nic.cqs[cq.cqn]["worker"]) for cq in cqs} == {first}
        assert {int(nic.qps[qp.qpn]["worker"]) for qp in qps} == {first}
        for rq in made:
            rq.close()


@pytest.mark.parametrize("strip", [False, True])
def test_damaged_frames_are_delivered_as_they_are(make, strip):
    """Changed bits, wrong lengths and cut ends change what a CQE says of a frame, and nothing else."""
    source, good = random.Random(5), [bytes(row[1]) for row in FRAMES]
    end = Direct(make, vsd=int(not strip), log=8, cq_log=9)
    for _ in range(40):
        frames = []
        for _ in range(256):
            frame = bytearray(source.choice(good))
            for _ in range(source.randrange(4)):
                frame[source.randrange(len(frame))] = source.choice((0, 1, 0x45, 0x81, 0xFF, source.randrange(256)))
            frames.append(bytes(frame[: source.choice((len(frame), source.randrange(14, len(frame) + 1)))]))
        for n in range(256):
            end.rq.post(end.buffer.at(n * 256, 200))
        assert end.take(*frames) == [DELIVERED] * 256
        for n, (frame, cqe) in enumerate(zip(frames, end.cq.take(), strict=True)):
            if int(cqe["l4_hdr_type_etc"]) & RxHeaders.VLAN_STRIPPED:
                assert strip
                assert frame[12:14] == b"\x81\0"
                assert int(cqe["vlan_info"]) == int.from_bytes(frame[14:16], "big")
                frame = frame[:12] + frame[16:]
            assert end.buffer.bytes(n * 256, int(cqe["byte_cnt"])) == frame
            assert int(cqe["check_sum"]) == ones_sum(frame[14:])
            assert end.buffer.bytes(n * 256 + 200, 56) == b"\xee" * 56


# --- from a wire -----------------------------------------------------------------------------------------------------


@pytest.fixture
def wired(tmp_path) -> Iterator[tuple[verbs.Context, StreamEnd]]:
    config = PortConfig(addresses="10.9.0.1", wire=f"unix:{tmp_path / 's'}")
    with opened(port=config) as ctx:
        peer = StreamEnd(tmp_path / "s")
        yield ctx, peer
        peer.close()


def test_frames_from_a_wire(wired):
    """They reach the queue whatever their MAC, each counts once, and without a root the port goes on as before."""
    ctx, peer = wired
    end = Direct(Maker(ctx))
    for n in range(8):
        end.rq.post(end.buffer.at(n * 2048, 2048))
    frames = [bytes(L2 / IP() / UDP(dport=n) / bytes(n)) for n in range(10)]
    peer.send(*frames)
    counters = nic_of(ctx).counters
    until(lambda: counters["rx_frames"] == 10, "all have arrived")
    until(lambda: end.dropped == 2, "two found no receive")
    nic_of(ctx).engine.synchronize()
    assert (counters[DELIVERED], counters[NO_BUFFER]) == (8, 2)
    assert [int(cqe["byte_cnt"]) for cqe in end.cq.take()] == [len(frame) for frame in frames[:8]]
    assert [end.buffer.bytes(n * 2048, len(frames[n])) for n in range(8)] == frames[:8]
    end.steering.root(0)
    peer.send(frames[0])
    until(lambda: counters["rx_frame_other_mac"] == 1, "the port has dropped it")


def test_a_completion_from_a_wire_raises_an_event(wired):
    ctx, peer = wired
    end = Direct(Maker(ctx))
    end.rq.post(end.buffer.at(0, 2048))
    channel = ctx.provider.create_event_channel()
    ctx.provider.subscribe(channel, end.cq.made.devx_handle, [EventType.COMPLETION], 77)
    end.cq.record[1] = 1 << 28  # the first request: any CQE from index 0 on
    peer.send(L2)
    event = until(lambda: ctx.provider.get_event(channel), "the event")
    assert event.cookie == 77
    assert len(end.cq.take()) == 1
    ctx.provider.destroy_event_channel(channel)


def test_a_rule_comes_before_roce(wired):
    """UDP 4791 goes to the queue pairs unless a rule takes it."""
    ctx, peer = wired
    end = Direct(Maker(ctx))
    end.rq.post(end.buffer.at(0, 2048))
    mac = nic_of(ctx).mac.hex(":")
    roce = Ether(src=L2.src, dst=mac) / IP(src="10.9.0.5", dst="10.9.0.1") / UDP(dport=4791) / bytes(32)
    peer.send(roce)
    counters = nic_of(ctx).counters
    until(lambda: counters[DELIVERED] == 1, "the rule has taken it")
    before = counters["rdma_rx_packets"]
    end.steering.root(0)
    peer.send(roce)
    until(lambda: counters["rdma_rx_packets"] == before + 1, "the port has taken it")


def test_objects_come_and_go_under_traffic(wired):
    """A rule leads to one queue after another. Each frame counts once, and a queue that is closed gets none."""
    ctx, peer = wired
    make = Maker(ctx)
    counters, sent = nic_of(ctx).counters, 0
    frame = bytes(L2 / bytes(50))
    for _ in range(20):
        end = Direct(make, nbytes=64, log=6)
        for _ in range(64):
            end.rq.post(end.buffer.at(0, 64))
        peer.send(*[frame] * 40)
        sent += 40
        end.close()
        end.buffer.memory.array[:] = 0
        peer.send(*[frame] * 5)
        sent += 5
        until(lambda wanted=sent: counters["rx_frames"] == wanted, "all have arrived")
        nic_of(ctx).engine.synchronize()
        assert not end.buffer.memory.array.any()
        end.buffer.region.close()
    assert counters[DELIVERED] + counters["rx_frame_other_mac"] == sent


@pytest.mark.root
def test_a_tag_that_the_kernel_has_taken_out_is_put_back():
    """A packet socket tells it beside the frame (packet(7))."""
    with cabled() as where, nics(where, {"wire": "packet:here", "addresses": "10.9.0.1"}) as (nic,):
        end, station = Direct(Maker(nic.ctx)), Station(where, "there")
        frames = [bytes(L2 / tag(vlan=0x123, prio=5) / IP() / UDP() / bytes(40)) for tag in (Dot1Q, Dot1AD)]
        for n, frame in enumerate(frames):
            end.rq.post(end.buffer.at(n * 512, 512))
            station.send(frame)
        until(lambda: nic.count(DELIVERED) == 2, "both have arrived")
        assert [end.buffer.bytes(n * 512, len(frame)) for n, frame in enumerate(frames)] == frames
        remove_rules(nic.ctx)
        station.send(Ether(dst=nic.nic.mac.hex(":")) / Dot1Q(vlan=1) / IP())
        until(lambda: nic.count("rx_frame_vlan") == 1, "the port takes no tagged frames")
        station.close()
