"""Ports whose link layer is InfiniBand: LIDs, GRHs, one GID, and no UDP; between NICs of one process and of two."""

import os
import re
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from gpunetio import Faults, LinkLayer, PortConfig, verbs
from gpunetio.cli import app
from gpunetio.enums import AddrType, QpAtomicType, QpAttrMask, QpState, QpType
from gpunetio.errors import InvalidValueError, NotFoundError
from gpunetio.verbs import AhAttr, QpAttr, QpEndpoint
from nic_child import Child
from nic_rig import (
    CS,
    FA,
    READ,
    REQ,
    RETRY_EXCEEDED,
    SEND,
    SEND_IMM,
    SIZE,
    WRITE,
    WRITE_IMM,
    Buffer,
    Cqe,
    Ends,
    Queue,
    atomic,
    connect,
    raddr,
    until,
)

IB = LinkLayer.INFINIBAND
M = QpAttrMask
TO_INIT = M.NEXT_STATE | M.PKEY_INDEX | M.PORT_NUM | M.ALLOW_REMOTE_WRITE | M.ALLOW_REMOTE_READ | M.ATOMIC_MODE
TO_RTR = M.NEXT_STATE | M.RQ_PSN | M.DEST_QP_NUM | M.PATH_MTU | M.AH_ATTR | M.MIN_RNR_TIMER | M.MAX_DEST_RD_ATOMIC
TO_RTS = M.NEXT_STATE | M.SQ_PSN | M.ACK_TIMEOUT | M.RETRY_CNT | M.RNR_RETRY | M.MAX_QP_RD_ATOMIC


def place(n: int) -> str:
    """An address that no other run of these tests uses, whose last 16 bits are a LID."""
    pid = os.getpid()
    return f"127.{64 + pid % 128}.{pid >> 7 & 127}.{n}"


def lid_of(address: str) -> int:
    return int.from_bytes(ip_address(address).packed[2:], "big")


def port(n: int, **config: Any) -> PortConfig:
    return PortConfig(addresses=(place(n),), link_layer=IB, **config)


def connect_by(queue: Queue, ah: AhAttr, end: QpEndpoint, ack_timeout: int = 16) -> None:
    """To RTS along a path of the caller's."""
    attr = QpAttr(
        port_num=1, allow_remote_write=True, allow_remote_read=True, allow_remote_atomic=QpAtomicType.IB_SPEC,
        rq_psn=end.psn, dest_qp_num=end.qpn, path_mtu=end.mtu, ah_attr=ah, min_rnr_timer=1,
        max_dest_rd_atomic=4, max_rd_atomic=4, sq_psn=queue.qp.psn, ack_timeout=ack_timeout, retry_cnt=1, rnr_retry=1,
    )
    for state, mask in ((QpState.INIT, TO_INIT), (QpState.RTR, TO_RTR), (QpState.RTS, TO_RTS)):
        attr.next_state = state
        queue.qp.modify(attr, mask)


def path_to(end: QpEndpoint, addr_type: AddrType, **changes: Any) -> AhAttr:
    return AhAttr(**{"gid": end.gid, "addr_type": addr_type, "dlid": end.lid, "sl": 3, **changes})


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Two QPs of two NICs, not connected."""
    contexts = [verbs.open(f"soft{i}", port=port(1 + i)) for i in range(2)]
    pds = [ctx.create_pd() for ctx in contexts]
    yield Ends(Queue(pds[0]), Queue(pds[1]), Buffer(pds[0], SIZE, fill=1), Buffer(pds[1], SIZE))
    for ctx in contexts:
        ctx.close()


def exchange(
    a: Queue, here: Buffer, remote: Callable[[int], bytes], receive: Callable[[], None], arrived: Callable[[], Any],
    there: Callable[[int], bytes],
) -> None:
    """All operations of RC from `a` to a peer, whose memory `there` reads."""
    for opcode in (WRITE, WRITE_IMM, SEND, SEND_IMM):
        for nbytes in (1, 1024, 5000):
            here.bytes[:] = np.random.default_rng(opcode + nbytes).integers(0, 256, here.nbytes, np.uint8)
            segments = [here.at(0, nbytes)]
            if opcode in (WRITE, WRITE_IMM):
                segments.insert(0, remote(0))
            if opcode != WRITE:
                receive()
            a.post(opcode, *segments, imm=7 if opcode in (WRITE_IMM, SEND_IMM) else 0)
            assert a.done.next().opcode == REQ
            if opcode != WRITE:
                cqe = arrived()
                assert (cqe.byte_cnt, cqe.imm) == (nbytes, 7 if opcode in (WRITE_IMM, SEND_IMM) else 0)
            assert there(nbytes) == here.bytes[:nbytes].tobytes()
    here.bytes[:] = 0
    a.post(READ, remote(8), here.at(0, 4000))
    assert a.done.next().opcode == REQ
    assert here.bytes[:4000].tobytes() == there(4008)[8:]
    old = int.from_bytes(there(8), "little")
    a.post(FA, remote(0), atomic(5), here.at(0, 8))
    a.post(CS, remote(0), atomic(9, old + 5), here.at(8, 8))
    assert [cqe.opcode for cqe in a.done.take(2)] == [REQ] * 2
    assert [here.word(0), here.word(8), int.from_bytes(there(8), "little")] == [old, old + 5 & (1 << 64) - 1, 9]


@pytest.mark.parametrize("addr_type", [AddrType.IB_NO_GRH, AddrType.IB_GRH])
def test_all_operations(ends, addr_type):
    one, two = ends.a.qp.endpoint(), ends.b.qp.endpoint()
    connect_by(ends.a, path_to(two, addr_type), two)
    connect_by(ends.b, path_to(one, addr_type), one)
    exchange(
        ends.a, ends.here, ends.there.remote, lambda: ends.b.receive(ends.there.at()), ends.b.arrived.next,
        lambda nbytes: ends.there.bytes[:nbytes].tobytes(),
    )
    ah = ends.a.qp.query()[0].ah_attr
    assert (ah.addr_type, ah.dlid, ah.sl) == (addr_type, lid_of(place(2)), 3)
    assert (ends.b.nic.counters["rx_malformed"], ends.a.nic.counters["rx_malformed"]) == (0, 0)


def test_connect_needs_no_grh_inside_a_subnet(ends):
    connect(ends.a, ends.b)
    ends.write()
    ends.a.ring()
    assert ends.a.done.next().opcode == REQ
    assert ends.written()
    assert ends.a.qp.query()[0].ah_attr.addr_type == AddrType.IB_NO_GRH


def test_inside_one_nic(ends):
    other = Queue(ends.a.qp.pd)
    connect(ends.a, other)
    assert int(ends.a.row["wire"]) == 0
    target = Buffer(ends.a.qp.pd, 100)
    ends.a.post(WRITE, target.remote(), ends.here.at(0, 100))
    assert ends.a.done.next().opcode == REQ
    assert target.bytes.tobytes() == ends.here.bytes[:100].tobytes()


def test_uc(ends):
    a, b = (Queue(queue.qp.pd, qp_type=QpType.UC) for queue in (ends.a, ends.b))
    connect(a, b)
    b.receive(ends.there.at())
    a.post(SEND, ends.here.at(0, 5000))
    assert a.done.next().opcode == REQ
    assert b.arrived.next().byte_cnt == 5000
    assert ends.there.bytes[:5000].tobytes() == ends.here.bytes[:5000].tobytes()


# --- what is not for this port -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gid",
    [bytes(16), bytes(range(16)), None],
    ids=["none", "other", "one bit"],
)
def test_a_wrong_dgid_is_dropped_and_counted(ends, gid):
    """The port has one GID, and no packet may come for an empty entry of its table (IBTA 8.3, 9.6.1.2)."""
    one, two = ends.a.qp.endpoint(), ends.b.qp.endpoint()
    wrong = bytes([*two.gid[:15], two.gid[15] ^ 1]) if gid is None else gid
    connect_by(ends.a, path_to(two, AddrType.IB_GRH, gid=wrong), two, ack_timeout=8)
    connect_by(ends.b, path_to(one, AddrType.IB_GRH), one)
    ends.write()
    ends.a.ring()
    assert ends.a.done.next().syndrome == RETRY_EXCEEDED
    until(lambda: ends.b.nic.counters["rx_malformed"] >= 2, "both packets")  # its engine may come late
    assert not ends.there.bytes.any()


def test_a_wrong_dlid_is_dropped_and_counted(ends):
    connect(ends.a, ends.b, ack_timeout=8)
    ends.a.row["dlid"] = 77
    ends.write()
    ends.a.ring()
    assert ends.a.done.next().syndrome == RETRY_EXCEEDED
    until(lambda: ends.b.nic.counters["rx_malformed"] >= 2, "both packets")  # its engine may come late
    assert not ends.there.bytes.any()


def test_a_lid_of_nobody(ends):
    end = ends.b.qp.endpoint()
    nobody = place(99)
    with pytest.raises(NotFoundError, match=rf"soft0 reaches no NIC with LID {lid_of(nobody):#x} \(at {nobody}\)"):
        ends.a.qp.connect(QpEndpoint(end.qpn, end.gid, lid_of(nobody), end.mtu, end.psn))
    assert ends.a.qp.state == QpState.RST


def test_no_wire_leads_from_ethernet_to_infiniband():
    """Neither finds the other, though both are in one process and the numbers would fit."""
    roce = PortConfig(addresses=(place(2),))
    with verbs.open("soft0", port=port(1)) as ib, verbs.open("soft1", port=roce) as ethernet:
        pds = ib.create_pd(), ethernet.create_pd()
        a, b = (Queue(pd) for pd in pds)
        with pytest.raises(InvalidValueError, match="use IB_GRH or IB_NO_GRH"):
            connect_by(a, AhAttr(gid=ethernet.query_gid(1, 0), addr_type=AddrType.IPv4), b.qp.endpoint())
        a.reset()
        end = b.qp.endpoint()
        with pytest.raises(NotFoundError, match="soft0 reaches no NIC"):
            a.qp.connect(QpEndpoint(end.qpn, end.gid, lid_of(place(2)), end.mtu, end.psn))
        assert ib.provider.nic.links.peers() == []


# --- identity ------------------------------------------------------------------------------------------------------


def test_the_port_says_what_it_is():
    with verbs.open("soft3", port=PortConfig(link_layer=IB, mtu=2200)) as ctx:  # has 127.0.0.4
        device, port = ctx.query_device(), ctx.query_port(1)
        assert (device.link_layer, device.gid_table_size, port.gid_tbl_len) == (IB, 16, 16)
        assert (port.link_layer, port.lid, port.active_mtu) == (IB, 4, 2048)
        gid = ctx.query_gid(1, 0)
        guid = device.node_guid ^ 1 << 57  # the bit that says how a GUID was made (RFC 4291 2.5.1)
        assert gid == bytes.fromhex("fe80000000000000") + guid.to_bytes(8, "big")
        assert [ctx.query_gid(1, index) for index in range(1, 16)] == [bytes(16)] * 15
        result = CliRunner().invoke(app, ["devices", "-v", "-d", "soft3"])
    assert result.exit_code == 0, result.output
    assert re.search(r"port_lid:\s+4\n", result.output)
    assert re.search(r"link_layer:\s+InfiniBand\n", result.output)
    assert re.findall(r"GID\[ *(\d+)\]:\t(.*)", result.output) == [("0", "fe80::7fff:fe00:4")]


def test_no_udp():
    with pytest.raises(InvalidValueError, match="an InfiniBand port has no UDP wire: RoCE v2 is for link_layer ETHER"):
        PortConfig(link_layer=IB, wire="udp")
    result = CliRunner().invoke(app, ["pingpong", "--link-layer", "infiniband", "--wire", "udp"])
    assert result.exit_code == 1
    assert "an InfiniBand port has no UDP wire" in result.stderr


# --- two processes -------------------------------------------------------------------------------------------------


def exchange_with(child: Child, ctx: verbs.Context, addr_type: AddrType | None = None) -> None:
    pd = ctx.create_pd()
    a, here = Queue(pd), Buffer(pd, SIZE, fill=1)
    end = a.qp.endpoint()
    quick = {"ack_timeout": 14, "retry_cnt": 7, "rnr_retry": 7}
    child.connect(end, **quick)
    if addr_type is None:
        a.qp.connect(child.endpoint, **quick)
    else:
        connect_by(a, path_to(child.endpoint, addr_type), child.endpoint)
    exchange(
        a, here, lambda offset: raddr(child.address + offset, child.key), lambda: child.ask("receive"),
        lambda: Cqe(*child.ask("arrived")), lambda nbytes: bytes.fromhex(child.ask("bytes", nbytes)),
    )


@pytest.mark.parametrize(
    "addr_type", [pytest.param(None, marks=pytest.mark.slow), AddrType.IB_GRH], ids=["local", "grh"]
)
@pytest.mark.parametrize(
    "lids", [pytest.param(None, marks=pytest.mark.slow), (0x1234, 0xBFFF)], ids=["of the addresses", "given"]
)
def test_between_two_processes(lids, addr_type):
    """What `lid` says counts, and the address's bits without it."""
    one, two = lids or (0, 0)
    child = Child("soft1", link_layer="INFINIBAND", lid=two, addresses=[place(2)])
    try:
        with verbs.open("soft0", port=port(1, lid=one)) as ctx:
            assert child.endpoint.lid == (two or lid_of(place(2)))
            assert ctx.query_port(1).lid == (one or lid_of(place(1)))
            exchange_with(child, ctx, addr_type)
    finally:
        child.close()


def test_between_two_processes_on_a_bad_network():
    """The two ends agree on what the ICRC covers."""
    faults = {"loss": 0.02, "corruption": 0.02, "seed": 3}
    child = Child("soft1", link_layer="INFINIBAND", faults=faults, addresses=[place(2)])
    try:
        with verbs.open("soft0", port=port(1, faults=Faults(**faults))) as ctx:
            exchange_with(child, ctx)
    finally:
        child.close()


def test_an_ethernet_neighbour_is_not_reached():
    """It has the address that belongs to the LID, and refuses the link."""
    child = Child("soft1", addresses=[place(2)])
    try:
        with verbs.open("soft0", port=port(1)) as ctx:
            a = Queue(ctx.create_pd())
            end = child.endpoint
            with pytest.raises(NotFoundError, match="soft0 reaches no NIC"):
                a.qp.connect(QpEndpoint(end.qpn, end.gid, lid_of(place(2)), end.mtu, end.psn))
    finally:
        child.close()
