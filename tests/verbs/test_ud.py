"""Datagrams: UD queue pairs, address handles, and queue pair 1, over every kind of wire."""

import shutil
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_gpu import DeviceBuffer, FakeGpus
from gpunetio import verbs
from gpunetio.enums import (
    AddrType,
    LinkLayer,
    QpAttrMask,
    QpState,
    QpType,
    SendFlags,
    WcFlags,
    WcOpcode,
    WcStatus,
    WrOpcode,
)
from gpunetio.errors import (
    BadStateError,
    DriverError,
    InvalidValueError,
    NoMemoryError,
    NotFoundError,
    NotSupportedError,
)
from gpunetio.nic.engine.port import PortConfig, gid_of
from gpunetio.nic.state import path
from gpunetio.nic.state.counters import PACKET_FATES
from gpunetio.verbs import (
    AhAttr,
    BadWrError,
    Completion,
    Context,
    QpAttr,
    QpEndpoint,
    RecvWr,
    Sender,
    SendWr,
    Sge,
    wait_cq_pi,
)
from nic_rig import PATIENCE, until
from plain_soft import PlainSoft
from udp_rig import own_address

QKEY, OWN, GRH = 0x1234_5678, 0x8000_0000, 40
M = QpAttrMask
TO_INIT = M.NEXT_STATE | M.PKEY_INDEX | M.PORT_NUM | M.QKEY


@dataclass
class End:
    """A queue pair in RTS with its memory: what is sent begins at 0, receives are of 4136 bytes from 8192 on.

    `options` are those of `PD.create_qp`; `shared`: receives are in a shared queue.
    """

    ctx: Context
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pd = self.ctx.create_pd()
        self.cq = self.ctx.create_cq(64)
        self.memory = np.zeros(1 << 14, np.uint8)
        self.memory[:8192] = np.arange(8192) * 7 + 1
        self.mr = self.pd.register(self.memory)
        init = {"sq_wr": 16, "rq_wr": 16, "receive_max_sges": 2, "qp_type": QpType.UD, **self.options}
        if init.pop("shared", False):
            init["srq"] = self.pd.create_srq(16)
        self.qp = self.pd.create_qp(send_cq=self.cq, receive_cq=self.cq, **init)
        self.qp.to_rts(qkey=QKEY)
        self.receives: Any = self.qp.init_attr.srq or self.qp
        self.done: list[Completion] = []

    @property
    def gid(self) -> bytes:
        return bytes(self.ctx.query_gid(1, 0))

    def handle_to(self, other: "End") -> verbs.AddressHandle:
        return self.pd.create_ah(AhAttr(gid=other.gid, dlid=other.ctx.query_port(1).lid))

    def expect(self, nbytes: int = GRH + 4096, wr_id: int = 0) -> None:
        self.memory[8192:] = 0
        self.receives.post_recv(RecvWr(sges=[Sge(self.mr.address + 8192, nbytes, self.mr.lkey)], wr_id=wr_id))

    def send(self, other: "End", ah: verbs.AddressHandle, nbytes: int, **fields: Any) -> None:
        request = {"opcode": WrOpcode.SEND, "remote_qpn": other.qp.qpn, "remote_qkey": QKEY, **fields}
        if "inline" not in fields:
            request["sges"] = [Sge(self.mr.address, nbytes, self.mr.lkey)] if nbytes else []
        self.qp.post_send(SendWr(ah=ah, **request))

    def next(self) -> Completion:
        def arrived() -> bool:
            self.done += self.cq.poll()
            return bool(self.done)

        until(arrived, f"a completion of {self.qp}")
        return self.done.pop(0)

    def received(self, nbytes: int) -> bytes:
        return self.memory[8192 + GRH : 8192 + GRH + nbytes].tobytes()


WIRES = {
    "one NIC":    {"same": True},
    "process":    {},
    "udp":        {"wire": "udp"},
    "workers":    {"workers": 3},
    "one NIC of workers": {"workers": 3, "same": True},
    "infiniband": {"link_layer": LinkLayer.INFINIBAND},
    "one infiniband": {"link_layer": LinkLayer.INFINIBAND, "same": True},
}


def open_two(same: bool = False, **config: Any) -> list[Context]:
    ports = [PortConfig(addresses=(own_address(),), **config) for _ in range(2)]
    contexts = [verbs.open("soft0", port=ports[0])]
    contexts.append(verbs.open("soft0") if same else verbs.open("soft1", port=ports[1]))
    return contexts


@pytest.fixture(params=WIRES)
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[End, End]]:
    contexts = open_two(**WIRES[request.param])
    yield End(contexts[0]), End(contexts[1])
    for ctx in contexts:
        ctx.close()


@pytest.fixture
def two() -> Iterator[Callable[..., list[End]]]:
    opened: list[Context] = []

    def make(options: dict[str, Any] | None = None, **config: Any) -> list[End]:
        opened.extend(open_two(**config))
        return [End(ctx, options or {}) for ctx in opened]

    yield make
    for ctx in opened:
        ctx.close()


@pytest.fixture
def end() -> Iterator[End]:
    with verbs.open("soft0", port=PortConfig(addresses=(own_address(),))) as ctx:
        yield End(ctx)


# --- between queue pairs ---------------------------------------------------------------------------------------------


def test_datagrams(ends):
    """Of all sizes, both ways, with and without immediate data. Completions name the sender."""
    a, b = ends
    mtu = min(end.ctx.query_port(1).active_mtu for end in ends)
    ethernet = a.ctx.query_device().link_layer == LinkLayer.ETHERNET
    for here, there in ((a, b), (b, a)):
        with here.handle_to(there) as ah:
            for nbytes in (0, 1, 2, 3, 4, 100, mtu):
                for opcode in (WrOpcode.SEND, WrOpcode.SEND_WITH_IMM):
                    imm = 0xFEDCBA98 if opcode == WrOpcode.SEND_WITH_IMM else None
                    there.expect(wr_id=nbytes)
                    here.send(there, ah, nbytes, opcode=opcode, imm=imm or 0, wr_id=7)
                    sent, done = here.next(), there.next()
                    assert (sent.wr_id, sent.status, sent.opcode) == (7, WcStatus.SUCCESS, WcOpcode.SEND)
                    assert (done.wr_id, done.status, done.opcode) == (nbytes, WcStatus.SUCCESS, WcOpcode.RECV)
                    assert (done.byte_len, done.imm, done.src_qp) == (GRH + nbytes, imm, here.qp.qpn)
                    assert (WcFlags.GRH in done.flags) == ethernet
                    assert done.slid == here.ctx.query_port(1).lid
                    assert there.received(nbytes) == here.memory[:nbytes].tobytes()
                    assert not there.memory[8192 + GRH + nbytes :].any()
    for nic in {end.qp.ctx.provider.nic for end in ends}:
        nic.engine.synchronize()
        counters = nic.counters
        assert counters["rdma_rx_packets"] == sum(counters[fate] for fate in PACKET_FATES)
        assert counters["rx_accepted"] == counters["rdma_tx_packets"]


def test_address_handles_that_are_made_at_once(monkeypatch):
    """Each keeps the path of its own."""
    with verbs.open("soft0") as ctx:
        pd, nic, meet = ctx.create_pd(), ctx.provider.nic, threading.Barrier(4)
        find, attr = nic.open_path, AhAttr(gid=ctx.query_gid())

        def found(*args: Any) -> Any:
            meet.wait(PATIENCE)
            return find(*args)

        monkeypatch.setattr(nic, "open_path", found)
        with ThreadPoolExecutor(4) as pool:
            handles = [made.result(PATIENCE) for made in [pool.submit(pd.create_ah, attr) for _ in range(4)]]
        assert len(ctx.provider._paths) == 4
        for handle in handles:
            handle.close()
        assert not ctx.provider._paths


def test_an_address_vector_outlives_its_handle(ends, monkeypatch):
    """To a card, a WQE with an address vector is complete. UCX 1.23 destroys the handle before it sends."""
    a, b = ends
    ah = a.handle_to(b)
    ah.close()
    monkeypatch.setattr(ah, "check_open", lambda: None)
    b.expect(wr_id=3)
    a.send(b, ah, 100)
    done = b.next()
    while done.opcode == WcOpcode.SEND:  # its own, if both are one
        done = b.next()
    assert (done.status, done.wr_id, done.byte_len) == (WcStatus.SUCCESS, 3, GRH + 100)
    assert b.received(100) == a.memory[:100].tobytes()


def test_many_at_a_time(ends):
    """More than fits in the rings, in order: nothing is lost on these wires while receives are posted."""
    a, b = ends
    ah = a.handle_to(b)
    got = []
    for first in range(0, 200, 8):
        for i in range(8):
            b.expect(wr_id=first + i)
        for i in range(8):
            a.send(b, ah, 64, opcode=WrOpcode.SEND_WITH_IMM, imm=first + i)
        for _ in range(8):
            got.append(b.next())
            assert a.next().status == WcStatus.SUCCESS
    assert [done.wr_id for done in got] == [done.imm for done in got] == list(range(200))


def test_the_header_names_the_sender(two):
    """The 40 bytes end with the IPv4 header, from which the way back follows."""
    a, b = two(wire="udp")
    ah = a.handle_to(b)
    b.expect()
    a.send(b, ah, 10)
    done = b.next()
    version, _, _, _, _, _, protocol, _, source, target = struct.unpack(
        ">BBHHHBBH4s4s", b.memory[8192 + 20 : 8192 + 40].tobytes()
    )
    assert (version, protocol) == (0x45, 17)
    assert (gid_of(ip_address(source)), gid_of(ip_address(target))) == (a.gid, b.gid)
    assert b.pd.create_ah_to_sender(done, b.memory[8192 : 8192 + GRH].tobytes()).attr.gid == a.gid
    other = replace(done, sender=Sender())
    with pytest.raises(InvalidValueError, match="39 bytes"):
        b.pd.create_ah_to_sender(other, bytes(39))
    with pytest.raises(NotFoundError, match="has no GID 0000:"):
        b.pd.create_ah_to_sender(other, bytes(40))


def test_answers(ends):
    """The way back follows from the completion and the header, on each kind of wire."""
    a, b = ends
    ah = a.handle_to(b)
    b.expect()
    a.send(b, ah, 10)
    done = b.next()
    assert a.next().opcode == WcOpcode.SEND
    back = b.pd.create_ah_to_sender(done, b.memory[8192 : 8192 + GRH].tobytes())
    a.expect()
    b.qp.post_send(SendWr(opcode=WrOpcode.SEND, ah=back, remote_qpn=done.src_qp, remote_qkey=QKEY, inline=b""))
    assert a.next().src_qp == b.qp.qpn


def test_infiniband_with_a_grh(two):
    """A global route puts a GRH into the packet, and the receive begins with it (8.3)."""
    a, b = two(link_layer=LinkLayer.INFINIBAND)
    attr = AhAttr(gid=b.gid, addr_type=AddrType.IB_GRH, dlid=b.ctx.query_port(1).lid, sl=5)
    ah = a.pd.create_ah(attr)
    b.expect()
    a.send(b, ah, 100)
    done = b.next()
    assert (WcFlags.GRH in done.flags, done.sl, done.byte_len) == (True, 5, GRH + 100)
    header = b.memory[8192 : 8192 + GRH].tobytes()
    assert (header[0] >> 4, header[6]) == (6, 0x1B)
    assert (header[8:24], header[24:]) == (a.gid, b.gid)
    back = b.pd.create_ah_to_sender(done, header).attr
    assert (back.gid, back.dlid, back.sl, back.addr_type) == (a.gid, a.ctx.query_port(1).lid, 5, AddrType.IB_GRH)


def test_inline_wait_and_shared_receives(two):
    """A WAIT holds datagrams back; receives come from a shared queue."""
    a, b = two()
    c = End(b.ctx, {"shared": True})
    d = End(a.ctx, {"core_direct_master": True, "max_inline_data": 64})
    ah, waited = d.handle_to(c), a.ctx.create_cq(16)
    trigger = a.pd.create_qp(sq_wr=4, send_cq=waited, qp_type=QpType.UD)
    trigger.to_rts(qkey=QKEY)
    c.expect(wr_id=3)
    d.qp.post_send(wait_cq_pi(waited, 0, wr_id=1))
    d.send(c, ah, 0, inline=b"a datagram", wr_id=2)
    assert c.cq.poll() == []
    trigger.post_send(SendWr(opcode=WrOpcode.SEND, ah=ah, remote_qpn=0xABCDEF, remote_qkey=QKEY, inline=b""))
    assert [d.next().wr_id for _ in range(2)] == [1, 2]
    assert (c.next().wr_id, c.received(10)) == (3, b"a datagram")


def test_completion_modes(two):
    a, b = two()
    ah = a.handle_to(b)
    for i in range(4):
        b.expect()
        a.send(b, ah, 8, wr_id=i, flags=SendFlags.SIGNALED if i == 3 else SendFlags(0))
        b.next()
    assert a.next().wr_id == 3
    assert a.cq.poll() == []


@pytest.mark.parametrize("wire", ["auto", "udp"])
def test_memory_of_a_gpu(two, wire):
    """Datagrams leave device memory, and arrive in it behind their GRH."""
    a, b = two(wire=wire)
    gpus = FakeGpus()
    for end in (a, b):
        gpus.serve(end.ctx)
    here, there = DeviceBuffer(gpus, a.pd, 4096, 3), DeviceBuffer(gpus, b.pd, 8192)
    ah = a.handle_to(b)
    for nbytes in (1, 1000, 4096):
        b.qp.post_recv(RecvWr(sges=[Sge(there.address, 30, there.key), Sge(there.address + 1000, 5000, there.key)]))
        sges = [Sge(here.address, nbytes, here.key)]
        a.qp.post_send(SendWr(opcode=WrOpcode.SEND, ah=ah, remote_qpn=b.qp.qpn, remote_qkey=QKEY, sges=sges))
        assert a.next().status == WcStatus.SUCCESS
        assert b.next().byte_len == GRH + nbytes
        assert there.bytes[1010 : 1010 + nbytes].tobytes() == here.bytes[:nbytes].tobytes()
        assert there.bytes[20] == 0x45


def test_a_closed_queue_pair_gets_nothing(two):
    a, b = two()
    ah, qpn = a.handle_to(b), b.qp.qpn
    b.qp.close()
    a.qp.post_send(SendWr(opcode=WrOpcode.SEND, ah=ah, remote_qpn=qpn, remote_qkey=QKEY))
    assert a.next().status == WcStatus.SUCCESS
    nic = b.ctx.provider.nic  # type: ignore[attr-defined]
    until(lambda: nic.counters["rx_no_qp"] == 1, "the packet to be dropped")


def test_a_nic_that_is_gone(two):
    """Datagrams to it are lost; the address handles stay usable, and can be closed."""
    a, b = two()
    ah = a.handle_to(b)
    b.ctx.close()
    for _ in range(3):
        a.qp.post_send(SendWr(opcode=WrOpcode.SEND, ah=ah, remote_qpn=5, remote_qkey=QKEY))
        assert a.next().status == WcStatus.SUCCESS
    ah.close()


def test_a_datagram_too_long_for_a_shared_receive(two):
    """It is dropped, and the receive is there for whoever comes next: another queue pair of the same shared queue."""
    a, b = two()
    c = End(b.ctx, {"shared": True})
    other = c.pd.create_qp(
        qp_type=QpType.UD, sq_wr=1, send_cq=c.cq, receive_cq=c.cq, srq=c.qp.init_attr.srq, rq_wr=0
    )
    other.to_rts(qkey=QKEY)
    ah = a.handle_to(c)
    c.expect(GRH + 100, wr_id=7)
    before = b.ctx.provider.nic.counters["resp_local_length_error"]
    for _ in range(3):
        a.send(c, ah, 101)
        assert a.next().status == WcStatus.SUCCESS
    until(lambda: b.ctx.provider.nic.counters["resp_local_length_error"] == before + 3, "three datagrams")
    assert c.qp.state == QpState.RTS
    a.send(c, ah, 100, remote_qpn=other.qpn)
    done = c.next()
    assert (done.status, done.wr_id, done.byte_len, done.qp_num) == (WcStatus.SUCCESS, 7, GRH + 100, other.qpn)
    other.close()


def test_shared_with_a_connection(two):
    """An RC queue pair of the same NICs uses the same wire."""
    a, b = two()
    ah = a.handle_to(b)
    rc = [end.pd.create_qp(sq_wr=4, rq_wr=4, send_cq=end.cq, receive_cq=end.cq) for end in (a, b)]
    rc[0].connect(rc[1])
    rc[1].post_recv(RecvWr(sges=[Sge(b.mr.address, 8, b.mr.lkey)], wr_id=1))
    rc[0].post_send(SendWr(opcode=WrOpcode.SEND, sges=[Sge(a.mr.address, 8, a.mr.lkey)]))
    assert b.next().wr_id == 1
    a.next()
    b.expect(wr_id=2)
    a.send(b, ah, 8)
    assert b.next().wr_id == 2


def test_faults(two):
    """Lost datagrams are lost, damaged ones are dropped, the rest arrives as it was sent."""
    from gpunetio import Faults

    a, b = two(faults=Faults(loss=0.2, corruption=0.2, duplication=0.1, seed=7))
    ah = a.handle_to(b)
    count = 100
    got: list[Completion] = []
    for i in range(count):
        b.expect(wr_id=i)
        b.done.clear()
        while len(b.cq.poll()):
            pass
        a.send(b, ah, 500, opcode=WrOpcode.SEND_WITH_IMM, imm=i)
        assert a.next().status == WcStatus.SUCCESS
        nic = b.ctx.provider.nic  # type: ignore[attr-defined]
        if i % 10 == 9:
            b.qp.reset()
            b.qp.to_rts(qkey=QKEY)
        got += b.cq.poll()
    counters = nic.counters
    taken = counters["rdma_rx_packets"]
    assert 0 < taken < count * 1.1
    assert counters["rx_icrc_encapsulated"] > 0
    assert taken == sum(counters[fate] for fate in PACKET_FATES)
    assert all(done.status in (WcStatus.SUCCESS, WcStatus.WR_FLUSH_ERR) for done in got)


@pytest.mark.skipif(not shutil.which("tshark"), reason="needs tshark")
@pytest.mark.parametrize("layer", [LinkLayer.ETHERNET, LinkLayer.INFINIBAND])
def test_capture(two, tmp_path: Path, layer: LinkLayer):
    """Wireshark finds the DETH, and no mistake."""
    files = [tmp_path / f"{n}.pcap" for n in range(2)]
    ports = [PortConfig(addresses=(own_address(),), link_layer=layer, capture=file) for file in files]
    contexts = [verbs.open(f"soft{n}", port=port) for n, port in enumerate(ports)]
    a, b = (End(ctx) for ctx in contexts)
    ah = a.handle_to(b)
    b.expect()
    a.send(b, ah, 100, opcode=WrOpcode.SEND_WITH_IMM, imm=5)
    b.next()
    qpns = a.qp.qpn, b.qp.qpn
    for ctx in contexts:
        ctx.close()
    names = ("opcode", "destqp")
    fields = [f"infiniband.bth.{name}" for name in names] + ["infiniband.deth.q_key", "infiniband.deth.srcqp"]
    for file in files:
        shown = subprocess.run(
            ["tshark", "-r", file, "-T", "fields", *(word for name in fields for word in ("-e", name))],
            capture_output=True, text=True, check=True,
        ).stdout.split()
        assert [int(word, 0) for word in shown] == [0x65, qpns[1], QKEY, qpns[0]]


# --- the API ---------------------------------------------------------------------------------------------------------


def test_states_and_attributes(end):
    qp = end.pd.create_qp(sq_wr=4, send_cq=end.cq, qp_type=QpType.UD)
    assert (qp.type, qp.state) == (QpType.UD, QpState.RST)
    qp.modify(QpAttr(next_state=QpState.INIT, qkey=5), TO_INIT)
    qp.modify(QpAttr(qkey=6), M.QKEY)
    qp.modify(QpAttr(next_state=QpState.RTR, qkey=7), M.NEXT_STATE | M.QKEY)
    qp.modify(QpAttr(next_state=QpState.RTS, sq_psn=9), M.NEXT_STATE | M.SQ_PSN)
    attr, _ = qp.query()
    assert (attr.current_state, attr.qkey, attr.sq_psn, attr.ah_attr) == (QpState.RTS, 7, 9, None)
    qp.modify(QpAttr(qkey=8), M.QKEY)
    assert qp.query(M.QKEY)[0].qkey == 8
    assert end.ctx.provider.nic.qps[qp.qpn]["q_key"] == 8
    qp.modify(QpAttr(next_state=QpState.SQD), M.NEXT_STATE)
    until(lambda: not qp.query()[0].sq_draining, "the queue to drain")
    qp.modify(QpAttr(next_state=QpState.RTS), M.NEXT_STATE)
    qp.reset()
    assert qp.query()[0].qkey == 0


@pytest.mark.parametrize("mask, message", [
    (M.NEXT_STATE | M.PKEY_INDEX | M.PORT_NUM, "needs QKEY"),
    (TO_INIT | M.ALLOW_REMOTE_WRITE, "does not take ALLOW_REMOTE_WRITE"),
    (TO_INIT | M.AH_ATTR, "does not take AH_ATTR"),
])
def test_attributes_of_others(end, mask, message):
    qp = end.pd.create_qp(sq_wr=4, send_cq=end.cq, qp_type=QpType.UD)
    with pytest.raises(InvalidValueError, match=message):
        qp.modify(QpAttr(next_state=QpState.INIT, ah_attr=AhAttr()), mask)


def test_a_connected_queue_pair_has_no_q_key(end):
    qp = end.pd.create_qp(sq_wr=4, send_cq=end.cq)
    rights = M.ALLOW_REMOTE_WRITE | M.ALLOW_REMOTE_READ
    with pytest.raises(InvalidValueError, match="does not take QKEY"):
        qp.modify(QpAttr(next_state=QpState.INIT), TO_INIT | rights)
    with pytest.raises(BadStateError, match="connect"):
        qp.to_rts()


def test_it_is_not_connected(end):
    with pytest.raises(BadStateError, match="to_rts"):
        end.qp.connect(QpEndpoint(5, end.gid, 0, 1024))


def test_to_rts_from_init(end):
    qp = end.pd.create_qp(sq_wr=4, rq_wr=4, send_cq=end.cq, receive_cq=end.cq, qp_type=QpType.UD)
    qp.to_init(qkey=3)
    qp.post_recv(RecvWr(sges=[Sge(end.mr.address, 100, end.mr.lkey)]))
    qp.to_rts()
    assert (qp.state, qp.query()[0].qkey) == (QpState.RTS, 3)
    with pytest.raises(InvalidValueError):
        qp.to_rts()
    assert qp.state == QpState.RST


def test_requests(end):
    ah = end.handle_to(end)
    good: dict[str, Any] = {"opcode": WrOpcode.SEND, "ah": ah, "remote_qpn": 1, "remote_qkey": 1}
    for wrong, message in (
        ({"ah": None}, "without ah"), ({"ah": 5}, "AddressHandle"), ({"remote_qpn": 1 << 24}, "24 bits"),
        ({"remote_qkey": 1 << 32}, "32 bits"), ({"opcode": WrOpcode.RDMA_WRITE}, "only datagrams"),
        ({"opcode": WrOpcode.RDMA_READ}, "only datagrams"),
    ):
        with pytest.raises(BadWrError, match=message):
            end.qp.post_send(SendWr(**{**good, **wrong}))
    ah.close()
    with pytest.raises(BadWrError, match="closed"):
        end.qp.post_send(SendWr(**good))


def test_longer_than_the_mtu(end):
    ah = end.handle_to(end)
    end.send(end, ah, end.ctx.query_port(1).active_mtu + 1)
    assert end.next().status == WcStatus.LOC_LEN_ERR
    assert end.qp.state == QpState.ERR


def test_room_for_inline_data(end):
    """A WQE has 48 bytes of address; what is left of its blocks takes inline data."""
    qp = end.pd.create_qp(sq_wr=4, send_cq=end.cq, qp_type=QpType.UD, max_inline_data=61)
    assert qp.init_attr.max_inline_data >= 61
    other = End(end.ctx, {"max_inline_data": 60})
    end.expect()
    other.send(end, other.handle_to(end), 0, inline=bytes(range(60)))
    end.next()
    assert end.received(60) == bytes(range(60))


@pytest.mark.host_memory
@pytest.mark.parametrize("attr, error, message", [
    (AhAttr(gid=b"short"), InvalidValueError, "16"),
    (AhAttr(gid=bytes(16), sgid_index=99), InvalidValueError, "sgid_index"),
    (AhAttr(gid=bytes(16), addr_type=AddrType.IB_GRH), InvalidValueError, "IPv4 or IPv6"),
    (AhAttr(gid=gid_of(ip_address("255.255.255.255"))), NotFoundError, "no route"),
    (AhAttr(gid=gid_of(ip_address("::1"))), InvalidValueError, "cannot be reached"),
])
def test_impossible_addresses(end, attr, error, message):
    with pytest.raises(error, match=message):
        end.pd.create_ah(attr)
    assert end.ctx.provider.nic.control.paths._paths == {}


def test_address_handles_close_with_their_pd(end):
    ah = end.handle_to(end)
    assert "address handle to 0000:" in str(ah)
    assert len(ah.av) == 48
    assert ah.attr.addr_type == AddrType.IPv4
    end.qp.close()
    end.pd.close()
    assert ah.closed


def test_infiniband_address_without_a_route(two):
    a, _ = two(link_layer=LinkLayer.INFINIBAND)
    with pytest.raises(NotFoundError, match="0x7777"):
        a.pd.create_ah(AhAttr(dlid=0x7777))


@pytest.mark.host_memory
def test_more_destinations_than_there_is_room_for(end, monkeypatch):
    """Destinations share rows. A new one takes the row whose path is unused for longest; without such a row, it is an
    error, and nothing is left half-made.
    """
    monkeypatch.setattr("gpunetio.nic.control.links.paths.path_slot", _Everything)

    def to(address: str) -> verbs.AddressHandle:
        return end.pd.create_ah(AhAttr(gid=gid_of(ip_address(address))))

    handles = {address: to(address) for address in (f"127.9.1.{n + 1}" for n in range(path.PROBES))}
    with pytest.raises(NoMemoryError, match="close address handles"):
        to("127.9.2.1")
    for address in ("127.9.1.6", "127.9.1.8", "127.9.1.7"):
        handles.pop(address).close()
    handles |= {address: to(address) for address in ("127.9.1.6", "127.9.2.1")}
    lows = {low for _, low, _ in end.ctx.provider.nic.control.paths._paths}
    expected = [*handles, "127.9.1.7"]
    assert lows == {int.from_bytes(gid_of(ip_address(address))[8:], "little", signed=True) for address in expected}
    for ah in handles.values():
        ah.close()


class _Everything:
    """A hash by which all destinations begin at the same row."""

    @staticmethod
    def py_func(*destination: int) -> int:
        return path.MAX_PATHS - 3


def test_kernels_have_no_datagrams(end):
    from gpunetio import Gpu

    with Gpu("host") as gpu, pytest.raises(NotSupportedError, match="UD"):
        gpu.export_qp(end.qp)


# --- queue pair 1 ----------------------------------------------------------------------------------------------------


def test_general_services(two):
    """Queue pair 1 of two ports; there is one of each, with a Q_Key that no other has (3.9.4)."""
    a, b = two({"qp_type": QpType.GSI})
    assert (a.qp.qpn, b.qp.qpn) == (1, 1)
    with a.ctx.create_cq(4) as cq, pytest.raises(DriverError, match="only one"):
        a.pd.create_qp(sq_wr=4, send_cq=cq, qp_type=QpType.GSI)
    ah = a.handle_to(b)
    b.expect()
    a.send(b, ah, 256, remote_qkey=0x8001_0000)
    done = b.next()
    assert (done.src_qp, done.byte_len) == (1, GRH + 256)
    a.qp.close()
    again = End(a.ctx, {"qp_type": QpType.GSI})
    assert again.qp.qpn == 1


def test_other_queue_pairs_leave_its_place(end):
    """No other queue pair gets the row that number 1 selects, while there is another."""
    queues = [end.pd.create_qp(sq_wr=1, send_cq=end.cq) for _ in range(20)]
    assert 1 not in {queue.qpn & end.ctx.provider.nic.qps.mask for queue in queues}
    End(end.ctx, {"qp_type": QpType.GSI})


# --- a device without DEVX -------------------------------------------------------------------------------------------


def test_libibverbs():
    """The same by libibverbs' calls, as for Soft-RoCE."""
    plain = PlainSoft("soft3")
    with verbs.Context(plain) as ctx:  # type: ignore[arg-type]
        a, b = End(ctx, {"max_inline_data": 32}), End(ctx)
        assert plain.modified[:3] == [TO_INIT, M.NEXT_STATE, M.NEXT_STATE | M.SQ_PSN]
        ah = a.handle_to(b)
        assert ah.av == b""
        b.expect(wr_id=4)
        a.send(b, ah, 100, opcode=WrOpcode.SEND_WITH_IMM, imm=6, wr_id=5)
        sent, done = a.next(), b.next()
        assert (sent.wr_id, sent.opcode) == (5, WcOpcode.SEND)
        assert (done.wr_id, done.imm, done.src_qp, done.byte_len) == (4, 6, a.qp.qpn, GRH + 100)
        assert done.flags == WcFlags.GRH | WcFlags.WITH_IMM
        assert b.received(100) == a.memory[:100].tobytes()
        with pytest.raises(NotSupportedError, match="GSI"):
            End(ctx, {"qp_type": QpType.GSI})

