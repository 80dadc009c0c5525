"""`Context.devx`: commands of the PRM for programs, on the software NIC and, with a stand-in, through libmlx5."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpunetio import verbs
from gpunetio.enums import AddrType, SrqType, UarAllocationType
from gpunetio.errors import BadStateError, DriverError, InUseError, InvalidValueError, NotSupportedError
from gpunetio.formats import commands as c
from gpunetio.formats import ethernet_queues as eth
from gpunetio.formats.commands import Opcode, PrmMtu, QpState, RmpState, ServiceType, WqType
from gpunetio.formats.contexts import CMD_HCA_CAP
from gpunetio.formats.cqe import CQE64, INIT_OP_OWN
from gpunetio.formats.mailboxes import mailboxes
from gpunetio.memory import HostMemory
from gpunetio.verbs import AhAttr, DevxObject, Handle
from nic_rig import REQ, RESP_SEND, SEND, WRITE, control, data, parse_cqe, raddr, until
from plain_soft import PlainSoft

PATH = "primary_address_path"
QUERY_LAG = bytes(c.QUERY_LAG_IN.pack(opcode=Opcode.QUERY_LAG))
ENTRIES = 8
ETHERNET = ("TRANSPORT_DOMAIN", "TIS", "TIR", "RQT", "SQ", "RQ", "Q_COUNTER")  # what Ethernet queues are made of


@pytest.fixture(params=["soft0", "mlx5_0"])
def ctx(request: pytest.FixtureRequest) -> Iterator[verbs.Context]:
    if request.param != "soft0":
        request.getfixturevalue("stand_in")
    with verbs.open(request.param) as opened:
        yield opened


@pytest.fixture
def soft() -> Iterator[verbs.Context]:
    with verbs.open("soft0") as opened:
        yield opened


class End:
    """A CQ and an RC QP of DEVX, in memory of ours, that the test fills and reads by hand."""

    def __init__(self, pd: verbs.PD):
        self.ctx, devx = pd.ctx, pd.ctx.devx
        self.cq_layout, self.qp_layout = devx.cq_layout(ENTRIES), devx.qp_layout(sq_wr=4, rq_wr=4)
        self.cq_memory, self.qp_memory = HostMemory(self.cq_layout.nbytes), HostMemory(self.qp_layout.nbytes)
        self.cqes = self.cq_memory.view(CQE64.dtype, count=ENTRIES)
        self.cqes["op_own"] = INIT_OP_OWN
        self.uar = devx.alloc_uar()
        self.cq_umem, self.qp_umem = devx.register_umem(self.cq_memory), devx.register_umem(self.qp_memory)
        self.cq = devx.create(
            Opcode.CREATE_CQ, cq_umem_valid=1, cq_umem_id=self.cq_umem,
            cq_context={
                "uar_page": self.uar, "c_eqn": devx.query_eqn(), "dbr_umem_valid": 1, "dbr_umem_id": self.cq_umem,
                "dbr_addr": self.cq_layout.record, **self.cq_layout.fields,
            },
        )
        self.qp = devx.create(
            Opcode.CREATE_QP, wq_umem_valid=1, wq_umem_id=self.qp_umem,
            qpc={
                "st": ServiceType.RC, "pd": pd, "uar_page": self.uar, "cqn_snd": self.cq, "cqn_rcv": self.cq,
                "dbr_umem_valid": 1, "dbr_umem_id": self.qp_umem, "dbr_addr": self.qp_layout.record,
                **self.qp_layout.fields,
            },
        )
        self.buffer = np.zeros(256, np.uint8)
        self.mr = pd.register(self.buffer)
        self.sent = self.received = self.seen = 0

    def connect(self, peer: "End") -> None:
        path = self.ctx.devx.address_path(AhAttr(gid=peer.ctx.query_gid()))
        self.qp.modify(
            Opcode.RST2INIT_QP, qpc={"pm_state": c.PM_STATE_MIGRATED, "rwe": 1, PATH: {"vhca_port_num": 1}}
        )
        self.qp.modify(
            Opcode.INIT2RTR_QP,
            qpc={"mtu": PrmMtu.MTU_1K, "log_msg_max": 30, "remote_qpn": peer.qp.number, "min_rnr_nak": 1, PATH: path},
        )
        self.qp.modify(Opcode.RTR2RTS_QP, qpc={"retry_count": 7, "rnr_retry": 7, PATH: {"ack_timeout": 14}})

    @property
    def record(self) -> int:
        return self.qp_memory.address + self.qp_layout.record

    def receive(self, offset: int, nbytes: int) -> None:
        segment = data(self.mr.address + offset, self.mr.lkey, nbytes)
        stride = 16 << self.qp_layout.fields["log_rq_stride"]
        at = self.received % (1 << self.qp_layout.fields["log_rq_size"]) * stride
        self.qp_memory.array[at : at + 16] = np.frombuffer(segment, np.uint8)
        self.received += 1
        self.ctx.devx.ring_receives(self.record, self.received)

    def send(self, opcode: int, *segments: bytes) -> None:
        body = b"".join(segments)
        wqe = control(opcode, self.sent, self.qp.number, 1 + len(body) // 16) + body
        at = self.qp_layout.sends + self.sent % (1 << self.qp_layout.fields["log_sq_size"]) * 64
        self.qp_memory.array[at : at + len(wqe)] = np.frombuffer(wqe, np.uint8)
        self.sent += 1
        self.ctx.devx.ring_sends(self.uar, self.qp, self.record, self.sent)

    def completion(self) -> Any:
        lap, slot = self.seen // ENTRIES & 1, self.seen % ENTRIES

        def there() -> bool:
            op_own = int(self.cqes[slot]["op_own"])
            return op_own >> 4 != 15 and op_own & 1 == lap

        until(there, "a CQE")
        self.seen += 1
        self.cq_memory.view(">u4", self.cq_layout.record)[0] = self.seen
        return parse_cqe(self.cqes[slot].tobytes())


def test_two_queue_pairs_move_data(ctx):
    with ctx.create_pd() as pd:
        a, b = End(pd), End(pd)
        a.connect(b)
        b.connect(a)
        assert [end.qp.query()["qpc"]["state"] for end in (a, b)] == [QpState.RTS, QpState.RTS]
        for n in range(12):  # around all rings
            a.buffer[:100] = n + 1
            b.receive(0, 100)
            a.send(SEND, data(a.mr.address, a.mr.lkey, 100))
            assert a.completion().opcode == REQ
            done = b.completion()
            assert (done.opcode, done.byte_cnt, done.qpn) == (RESP_SEND, 100, b.qp.number)
            assert set(b.buffer[:100]) == {n + 1}
        a.send(WRITE, raddr(b.mr.address + 128, b.mr.rkey), data(a.mr.address, a.mr.lkey, 64))
        assert a.completion().opcode == REQ
        assert set(b.buffer[128:192]) == {12}


def test_what_is_used_cannot_be_closed_first(ctx):
    pd = ctx.create_pd()
    end = End(pd)
    for used, user in ((end.cq, end.qp), (end.qp_umem, end.qp), (end.cq_umem, end.cq), (end.uar, end.cq)):
        with pytest.raises(InUseError, match=rf"is still used by .*{user}.*: close that first"):
            used.close()
        assert not used.closed
    assert repr(end.cq) == f"<DEVX CQ {end.cq.number:#x} of {ctx.name}>"
    end.qp.close()
    end.cq.close()
    end.cq_umem.close()
    assert end.cq_umem.closed
    with pytest.raises(BadStateError, match="is closed"):
        end.qp.query()


def test_a_context_closes_in_order(ctx, monkeypatch):
    order: list[Handle] = []
    release = Handle._release
    monkeypatch.setattr(Handle, "_release", lambda self, undo: (order.append(self), release(self, undo)))
    end = End(ctx.create_pd())
    ctx.close()
    made = [end.qp, end.cq, end.mr, end.qp_umem, end.cq_umem, end.uar, end.mr.pd, ctx]
    assert all(each.closed for each in made)
    places = [order.index(each) for each in made]
    assert places[:2] == [0, 1]  # the latest first
    assert max(places[2:6]) < places[6] < places[7]


def test_a_pd_closes_the_queue_pair_that_names_it(soft):
    pd = soft.create_pd()
    end = End(pd)
    pd.close()
    assert (end.qp.closed, end.cq.closed) == (True, False)


def test_objects_in_uses_stay_open(soft):
    devx = soft.devx
    memory = HostMemory(devx.cq_layout(4).nbytes)
    umem, uar = devx.register_umem(memory), devx.alloc_uar(UarAllocationType.BLUEFLAME)
    layout = devx.cq_layout(4)
    context = {
        "uar_page": uar.page_id, "c_eqn": devx.query_eqn(), "dbr_umem_valid": 1, "dbr_umem_id": umem.umem_id,
        "dbr_addr": layout.record, **layout.fields,
    }
    mailbox = c.CREATE_CQ_IN.pack(
        opcode=Opcode.CREATE_CQ, cq_context=context, cq_umem_valid=1, cq_umem_id=umem.umem_id
    )
    cq = devx.create_raw(mailbox, c.CREATE_CQ_OUT.size, uses=[umem, uar])
    assert cq.number == c.CREATE_CQ_OUT.get(cq.answer, "cqn")
    assert umem.users == uar.users == (cq,)


@pytest.mark.parametrize("cqe", [1, 3, 64])
def test_a_cq_fits_in_its_layout_and_in_nothing_smaller(soft, cqe):
    devx, memory = soft.devx, HostMemory(1 << 14)
    layout, uar = devx.cq_layout(cqe), devx.alloc_uar()

    def create(nbytes: int) -> None:
        with devx.register_umem(memory.address, nbytes=nbytes) as umem:
            devx.create(
                Opcode.CREATE_CQ, cq_umem_valid=1, cq_umem_id=umem,
                cq_context={"uar_page": uar, "c_eqn": 1, "dbr_umem_valid": 1, "dbr_umem_id": umem,
                            "dbr_addr": layout.record, **layout.fields},
            ).close()

    assert 1 << layout.fields["log_cq_size"] >= cqe
    create(layout.nbytes)
    with pytest.raises(DriverError, match="outside UMEM"):
        create(layout.nbytes - 1)


@pytest.mark.parametrize("sizes", [
    {"sq_wr": 1}, {"rq_wr": 1}, {"sq_wr": 5, "rq_wr": 5}, {"sq_wr": 3, "send_max_sges": 7, "max_inline_data": 200},
    {"rq_wr": 9, "receive_max_sges": 3}, {"sq_wr": 64, "rq_wr": 1},
], ids=str)
def test_a_qp_fits_in_its_layout_and_in_nothing_smaller(soft, sizes):
    devx, memory, pd, cq = soft.devx, HostMemory(1 << 16), soft.create_pd(), soft.create_cq(16)
    layout, uar = devx.qp_layout(**sizes), devx.alloc_uar()

    def create(nbytes: int) -> None:
        with devx.register_umem(memory.address, nbytes=nbytes) as umem:
            devx.create(
                Opcode.CREATE_QP, wq_umem_valid=1, wq_umem_id=umem,
                qpc={"pd": pd, "uar_page": uar, "cqn_snd": cq, "cqn_rcv": cq, "dbr_umem_valid": 1, "dbr_umem_id": umem,
                     "dbr_addr": layout.record, **layout.fields},
            ).close()

    qp = pd.create_qp(send_cq=cq, receive_cq=cq, **sizes)
    assert layout.sends == qp.sq_address - (qp.rq_address if qp.rq_entries else qp.sq_address)
    create(layout.nbytes)
    with pytest.raises(DriverError, match="outside UMEM"):
        create(layout.nbytes - 1)


@pytest.mark.parametrize("kind, wq_type", [
    (SrqType.LINKED_LIST, WqType.LINKED_LIST), (SrqType.CONTIGUOUS, WqType.CYCLIC),
    (SrqType.LINKED_LIST, WqType.CYCLIC),  # UCX: WQEs have the segment of a list, and are taken in turn
])
def test_an_rmp_fits_in_its_layout_and_in_nothing_smaller(soft, kind, wq_type):
    devx, memory, pd = soft.devx, HostMemory(1 << 14), soft.create_pd()
    layout = devx.srq_layout(20, receive_max_sges=2, srq_type=kind)

    def create(nbytes: int) -> DevxObject:
        umem = devx.register_umem(memory.address, nbytes=nbytes)
        return devx.create(
            Opcode.CREATE_RMP,
            ctx={"state": RmpState.RDY, "basic_cyclic_rcv_wqe": kind == SrqType.CONTIGUOUS, "wq": {
                "wq_type": wq_type, "pd": pd, "end_padding_mode": 1, "wq_umem_valid": 1, "wq_umem_id": umem,
                "dbr_umem_valid": 1, "dbr_umem_id": umem, "dbr_addr": layout.record, **layout.fields,
            }},
        )

    rmp = create(layout.nbytes)
    assert rmp.query()["ctx"]["wq"]["log_wq_sz"] == layout.fields["log_wq_sz"]
    rmp.modify(Opcode.MODIFY_RMP, rmp_state=RmpState.RDY, modify_lwm=1, ctx={"state": RmpState.RDY, "wq": {"lwm": 3}})
    assert rmp.query()["ctx"]["wq"]["lwm"] == 3
    rmp.modify(Opcode.MODIFY_RMP, rmp_state=RmpState.RDY, ctx={"state": RmpState.RDY, "wq": {"lwm": 2}})
    assert rmp.query()["ctx"]["wq"]["lwm"] == 3  # without modify_lwm, it is not looked at
    rmp.close()
    with pytest.raises(DriverError, match="outside UMEM"):
        create(layout.nbytes - 1)


def test_commands_about_no_object(ctx):
    answer = ctx.devx.command(Opcode.QUERY_HCA_CAP, op_mod=c.CapClass.GENERAL << 1 | 1)
    assert CMD_HCA_CAP.unpack(answer["capability"])["rc"] == 1
    raw = ctx.devx.command_raw(
        c.QUERY_HCA_CAP_IN.pack(opcode=Opcode.QUERY_HCA_CAP, op_mod=c.CapClass.GENERAL << 1 | 1),
        c.QUERY_HCA_CAP_OUT.size,
    )
    assert c.QUERY_HCA_CAP_OUT.unpack(raw) == answer


def test_an_address_path(ctx):
    path = ctx.devx.address_path(AhAttr(gid=ctx.query_gid(), sgid_index=0, hop_limit=9))
    mac = ctx.provider.resolve_mac(1, 0, ctx.query_gid())
    assert path["rgid_rip"] == ctx.query_gid()
    assert (path["rmac_47_32"] << 32 | path["rmac_31_0"]).to_bytes(6, "big") == mac
    assert (path["hop_limit"], path["vhca_port_num"]) == (9, 1)
    with pytest.raises(InvalidValueError, match="IB_GRH on a port of ETHERNET"):
        ctx.devx.address_path(AhAttr(addr_type=AddrType.IB_GRH))


@pytest.mark.parametrize("call, message", [
    (lambda d: d.create(Opcode.CREATE_CQ, nonsense=1), r"^CREATE_CQ: create_cq_in has no field 'nonsense'; it has "),
    (lambda d: d.create(Opcode.CREATE_CQ, cq_context={"log_cq_size": 32}), "cqc.log_cq_size = 0x20 does not fit in 5"),
    (lambda d: d.create(Opcode.CREATE_CQ, cq_context=1), "CREATE_CQ: "),
    (lambda d: d.create(Opcode.CREATE_CQ, cq_umem_id=float("inf")), "CREATE_CQ: cannot convert float infinity"),
    (lambda d: d.create(Opcode.QUERY_QP, qpn=1), r"QUERY_QP creates no object: use command\(\), or modify\(\)"),
    (lambda d: d.create(0x123), "opcode = 291: it is one of "),
    (lambda d: d.create(Opcode.CREATE_CQ, cq_umem_id=d._ctx), "cq_umem_id = context soft0: no command names an obj"),
    (lambda d: d.cq_layout(0), "cqe = 0: it must be 1 to"),
    (lambda d: d.qp_layout(sq_wr="4"), "sq_wr = '4' is of type str"),
    (lambda d: d.query_eqn(8), "completion vector 8: the software NIC has 0 to 7"),
    (lambda d: d.command_raw(c.DESTROY_CQ_IN.pack(opcode=Opcode.DESTROY_CQ), 16), "concerns an object"),
    (lambda d: d.command_raw(QUERY_LAG, -1), "out_size = -1: it must be 0 to 65535"),
    (lambda d: d.command_raw(QUERY_LAG, 1 << 62), f"out_size = {1 << 62}: it must be 0 to 65535"),
    (lambda d: d.command_raw(QUERY_LAG.ljust(1 << 16), 16), "the bytes of mailbox = 65536: it must be 0 to 65535"),
    (lambda d: d.transport_domain().query_raw(b"", 1 << 16), "out_size = 65536: "),
    (lambda d: d.transport_domain().modify_raw(b"", 1 << 16), "out_size = 65536: "),
])
def test_mistakes(soft, call, message):
    with pytest.raises(InvalidValueError, match=message):
        call(soft.devx)


@pytest.mark.soft_nic
@pytest.mark.parametrize("out_size", [1 << 16, 1 << 62, 1 << 70])
def test_an_answer_that_is_too_large(soft, out_size):
    """It was found to be so when the object was there already, of which nobody then knew the handle."""
    domain = eth.ALLOC_TRANSPORT_DOMAIN_IN.pack(opcode=Opcode.ALLOC_TRANSPORT_DOMAIN)
    with pytest.raises(InvalidValueError, match=f"out_size = {out_size}: it must be 0 to 65535"):
        soft.devx.create_raw(domain, out_size)
    assert len(soft.provider.nic.control.tds.table) == 0


def test_what_the_device_refuses(soft):
    devx = soft.devx
    uar, umem = devx.alloc_uar(), devx.register_umem(HostMemory(4096))
    with pytest.raises(DriverError, match=r"^CREATE_CQ: .*there is no UMEM 0x7777") as caught:
        devx.create(
            Opcode.CREATE_CQ, cq_umem_valid=1, cq_umem_id=0x7777,
            cq_context={"uar_page": uar, "c_eqn": 1, "dbr_umem_valid": 1, "dbr_umem_id": umem},
        )
    assert caught.value.status
    assert umem.users == uar.users == ()  # nothing is half made


def test_a_closed_object_is_not_named(soft):
    umem = soft.devx.register_umem(HostMemory(4096))
    umem.close()
    with pytest.raises(BadStateError, match=f"{umem} is closed"):
        soft.devx.create(Opcode.CREATE_CQ, cq_umem_id=umem)


def test_a_query_that_is_not_declared(soft):
    end = End(soft.create_pd())
    if "QUERY_CQ" not in Opcode.__members__:
        with pytest.raises(InvalidValueError, match=r"QUERY_CQ is not declared here: .* query_raw"):
            end.cq.query()
    raw = end.qp.query_raw(c.QUERY_QP_IN.pack(opcode=Opcode.QUERY_QP, qpn=end.qp.number), c.QUERY_QP_OUT.size)
    assert c.QUERY_QP_OUT.get(raw, "qpc.pd") == end.qp.query()["qpc"]["pd"]


def test_without_devx():
    refusal = pytest.raises(NotSupportedError, match=r"^Context\.devx: that needs DEVX")
    with verbs.Context(PlainSoft("soft0")) as ctx, refusal:
        _ = ctx.devx


def test_every_command_has_mailboxes():
    for opcode in Opcode:
        boxes = mailboxes(opcode)
        assert {"opcode"} <= boxes.request.fields.keys()
        kind = opcode.name.split("_", 1)[1]
        about_object = kind in ("QP", "CQ", "RMP", "MKEY", *ETHERNET) or "2" in opcode.name or "FLOW" in kind
        assert bool(boxes.numbers) == about_object, opcode.name
