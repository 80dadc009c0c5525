"""verbs on devices without DEVX: the conformance kit, what is refused, and what libibverbs is asked."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpunetio import Gpu, QpType, testing, verbs
from gpunetio.enums import (
    Access,
    CqOverrun,
    QpAtomicType,
    QpAttrMask,
    QpSendDbrMode,
    QpState,
    SrqType,
    UarAllocationType,
    WcOpcode,
    WcStatus,
    WrOpcode,
)
from gpunetio.errors import DriverError, FullError, InvalidValueError, NotSupportedError
from gpunetio.providers.plain_verbs import PlainVerbs
from gpunetio.testing import Outcome
from gpunetio.verbs import PD, QP, AhAttr, BadWrError, QpAttr, RecvWr, SendWr, Sge
from nic_rig import until
from plain_soft import PlainSoft

_M = QpAttrMask
NOT_SUPPORTED = [
    "umem_life", "uar_life", "rings_of_a_queue_pair", "wait_for_a_completion", "wait_for_a_receive",
    "memcpy_copies", "memcpy_between_regions", "memcpy_outside_of_a_region", "memcpy_needs_its_queue_pair",
    "cq_overrun_allowed", "collapsed_cq", "cq_of_an_external_data_path",
]


def opener(name: str) -> Callable[[], verbs.Context]:
    return lambda: verbs.Context(PlainSoft(name))


@pytest.mark.parametrize(
    "names",
    [pytest.param(["soft0"], id="loopback"), pytest.param(["soft0", "soft1"], id="wire", marks=pytest.mark.slow)],
)
def test_conformance(names):
    report = testing.run(*map(opener, names))
    assert report.passed, str(report)
    assert [result.check.name for result in report.of(Outcome.NOT_SUPPORTED)] == NOT_SUPPORTED


@pytest.fixture
def device() -> PlainSoft:
    return PlainSoft("soft0")


@pytest.fixture
def ctx(device: PlainSoft) -> Iterator[verbs.Context]:
    with verbs.Context(device) as opened:
        yield opened


@pytest.fixture
def pd(ctx: verbs.Context) -> PD:
    return ctx.create_pd()


def pair(pd: PD, **options: Any) -> tuple[QP, QP]:
    cq = pd.ctx.create_cq(64)
    a, b = (pd.create_qp(**{"sq_wr": 8, "rq_wr": 8, "send_cq": cq, "receive_cq": cq, **options}) for _ in range(2))
    a.connect(b)
    return a, b


def take(cq: verbs.CQ, count: int) -> list[verbs.Completion]:
    found: list[verbs.Completion] = []
    until(lambda: len(found.__iadd__(cq.poll(count - len(found)))) >= count, f"{count} completions of {cq}")
    return found


def test_the_rig_has_the_interface():
    for name in vars(PlainVerbs):
        assert name.startswith("_") or callable(getattr(PlainSoft, name))


def test_what_kind_of_device(ctx):
    assert not ctx.has_devx
    with verbs.open("soft0") as other:
        assert other.has_devx
    device = ctx.query_device()
    assert (device.rc, device.uc, device.is_cqe_inline_supported, device.send_dbr_mode_no_dbr_ext) == (1, 1, 0, 0)
    assert device.max_wqe_sz_sq >= 16 * device.max_sge


# --- what takes DEVX -------------------------------------------------------------------------------------------------

REFUSED: dict[str, Callable[[verbs.Context, PD], object]] = {
    "reg_umem": lambda ctx, pd: ctx.register_umem(bytearray(4096)),
    "alloc_uar": lambda ctx, pd: ctx.create_uar(UarAllocationType.NONCACHE),
    "CQ: external_datapath": lambda ctx, pd: ctx.create_cq(4, external_datapath=True),
    "CQ: collapsed": lambda ctx, pd: ctx.create_cq(4, collapsed=True),
    "CQ: overrun ENABLE": lambda ctx, pd: ctx.create_cq(4, overrun=CqOverrun.ENABLE),
    "QP: external_datapath": lambda ctx, pd: pd.create_qp(external_datapath=True),
    "QP: core_direct_master": lambda ctx, pd: pd.create_qp(core_direct_master=True),
    "QP: send_dbr_mode NO_DBR_EXT": lambda ctx, pd: pd.create_qp(send_dbr_mode=QpSendDbrMode.NO_DBR_EXT),
    "QP: emulate_no_dbr_ext": lambda ctx, pd: pd.create_qp(emulate_no_dbr_ext=True),
    "QP: cqe_inline": lambda ctx, pd: pd.create_qp(cqe_inline=True),
    "QP: cqe_inline_responses": lambda ctx, pd: pd.create_qp(cqe_inline_responses=True),
    "QP: memcpy": lambda ctx, pd: pd.create_qp(memcpy=True),
    "QP: user_index = 3": lambda ctx, pd: pd.create_qp(user_index=3),
    "SRQ: srq_type CONTIGUOUS": lambda ctx, pd: pd.create_srq(4, srq_type=SrqType.CONTIGUOUS, external_datapath=True),
    "SRQ: external_datapath": lambda ctx, pd: pd.create_srq(4, external_datapath=True),
    **{name: lambda ctx, pd, name=name: getattr(pd.create_qp(), name)
       for name in ("sq_address", "rq_address", "rq_stride", "dbr_address", "doorbell_register", "uar")},
    **{f"CQ: {name}": lambda ctx, pd, name=name: getattr(ctx.create_cq(4), name)
       for name in ("ring_address", "dbr_address", "arm_address", "uar")},
    **{f"SRQ: {name}": lambda ctx, pd, name=name: getattr(pd.create_srq(4), name)
       for name in ("ring_address", "dbr_address", "stride")},
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(ctx, pd, what):
    with pytest.raises(NotSupportedError) as caught:
        REFUSED[what](ctx, pd)
    assert what.rpartition(": ")[2] in str(caught.value)
    assert "ConnectX" in str(caught.value)
    assert "software NIC" in str(caught.value)


def test_exports_are_refused(ctx, pd):
    qp = pd.create_qp(sq_wr=4, send_cq=ctx.create_cq(4))
    with Gpu("host") as gpu, pytest.raises(NotSupportedError, match="libibverbs keeps its queues to itself"):
        gpu.export_qp(qp)
    assert not qp.users


@pytest.mark.parametrize(
    "call", ["create_comp_channel", "comp_channel_fd", "create_cq", "create_srq", "query_srq", "create_qp", "subscribe"]
)
def test_nothing_is_left_of_what_fails(device, ctx, pd, monkeypatch, call):
    channel = ctx.create_comp_channel()
    cq = ctx.create_cq(4, channel=channel)
    before, users = set(device._objects), set(ctx.users)

    def refuse(*arguments: object) -> None:
        raise DriverError("refused")

    monkeypatch.setattr(device, call, refuse)
    failed = 0
    for make in (
        ctx.create_comp_channel, lambda: ctx.create_cq(4, channel=channel), lambda: pd.create_srq(4),
        lambda: pd.create_qp(sq_wr=1, send_cq=cq), pd.create_qp,
    ):
        try:
            make().close()
        except DriverError:
            failed += 1
        assert (set(device._objects), set(ctx.users)) == (before, users)
    assert failed


# --- requests --------------------------------------------------------------------------------------------------------


def test_a_device_that_refuses_a_request(device, ctx, pd):
    """Those before it are posted, and the next post goes on with its number."""
    a, b = pair(pd)
    b.post_recv(*(RecvWr(wr_id=n) for n in range(3)))
    requests = [SendWr(opcode=WrOpcode.SEND, wr_id=100 + n) for n in range(3)]
    device.refuse = {1: InvalidValueError("not this one")}
    with pytest.raises(BadWrError, match="not this one") as caught:
        a.post_send(*requests)
    assert (caught.value.index, caught.value.request.wr_id, a.posting.send.producer) == (1, 101, 1)
    device.refuse = {}
    a.post_send(*requests[1:])
    assert sorted(one.wr_id for one in take(a.send_cq, 6)) == [0, 1, 2, 100, 101, 102]


def test_the_first_that_is_refused_is_named(device, ctx, pd):
    """By the device, though another one behind it is wrong in itself."""
    a, _ = pair(pd, max_inline_data=8)
    good = SendWr(opcode=WrOpcode.RDMA_WRITE)
    device.refuse = {1: FullError("no room")}
    with pytest.raises(BadWrError, match="no room") as caught:
        a.post_send(good, good, SendWr(opcode=WrOpcode.SEND, inline=bytes(1000)))
    assert caught.value.index == 1


def test_an_srq_that_refuses_a_receive(device, ctx, pd):
    srq = pd.create_srq(3)
    device.refuse = {(1 << 63) + 1: InvalidValueError("not this one")}
    with pytest.raises(BadWrError, match="not this one") as caught:
        srq.post_recv(*(RecvWr(wr_id=n) for n in range(3)))
    assert caught.value.index == 1
    device.refuse = {}
    srq.post_recv(RecvWr(), RecvWr())  # one is there, and there is room for two
    with pytest.raises(BadWrError, match="no room"):
        srq.post_recv(RecvWr())


@pytest.mark.parametrize("how", [QP.close, QP.reset])
def test_receives_of_a_queue_pair_that_is_gone_are_free(device, ctx, pd, how):
    """Those of an SRQ whose completions nobody has polled."""
    cq = ctx.create_cq(64)
    srq = pd.create_srq(3)
    a, b = (pd.create_qp(sq_wr=8, send_cq=ctx.create_cq(64), receive_cq=cq, srq=srq) for _ in range(2))
    a.connect(b)
    srq.post_recv(*[RecvWr()] * 3)
    a.post_send(*[SendWr(opcode=WrOpcode.SEND)] * 2)
    until(lambda: device.waiting(cq) == 2, "two messages")
    how(b)
    assert cq.poll() == []
    srq.post_recv(*[RecvWr()] * 2)
    with pytest.raises(BadWrError, match="no room"):
        srq.post_recv(RecvWr())


def test_failed_requests_are_known(ctx, pd):
    """libibverbs tells neither opcode nor queue of what has failed."""
    a, b = pair(pd)
    b.post_recv(RecvWr(wr_id=7))
    word = pd.register(bytearray(8))
    sge = Sge(word.address, 8, word.lkey)
    a.post_send(SendWr(opcode=WrOpcode.RDMA_READ, sges=[sge], wr_id=8, remote_addr=0, rkey=1))
    done = {one.wr_id: one for one in take(a.send_cq, 2)}
    assert (done[8].opcode, done[8].status, done[8].byte_len) == (WcOpcode.RDMA_READ, WcStatus.REM_ACCESS_ERR, 0)
    assert (done[7].opcode, done[7].status, done[7].qp_num) == (WcOpcode.RECV, WcStatus.WR_FLUSH_ERR, b.qpn)


# --- transitions -----------------------------------------------------------------------------------------------------


def test_masks_are_those_of_libibverbs(device, ctx, pd):
    """ibv_modify_qp(3) has attributes that doca_verbs_qp_modify can leave out, and none of an RC on UC."""
    ends = pair(pd)
    init, rtr, rts = device.modified[:3]
    assert init == _M.NEXT_STATE | _M.PKEY_INDEX | _M.PORT_NUM | _M.ALLOW_REMOTE_WRITE | _M.ALLOW_REMOTE_READ | (
        _M.ATOMIC_MODE
    )
    assert _M.MAX_DEST_RD_ATOMIC in rtr
    assert _M.MAX_QP_RD_ATOMIC in rts
    for end in ends:
        end.close()
    device.modified.clear()
    uc = pd.create_qp(qp_type=QpType.UC)
    uc.connect(uc)
    assert device.modified[1:] == [
        _M.NEXT_STATE | _M.RQ_PSN | _M.DEST_QP_NUM | _M.PATH_MTU | _M.AH_ATTR, _M.NEXT_STATE | _M.SQ_PSN,
    ]


def test_what_is_left_out_is_one(ctx, pd):
    """Without MAX_DEST_RD_ATOMIC in the mask one READ is answered at a time, whatever the attribute says."""
    qp = pd.create_qp()
    end = qp.endpoint()
    qp.modify(QpAttr(next_state=QpState.INIT), _M.NEXT_STATE | _M.PKEY_INDEX | _M.PORT_NUM | _M.ALLOW_REMOTE_WRITE
              | _M.ALLOW_REMOTE_READ)
    qp.modify(
        QpAttr(next_state=QpState.RTR, dest_qp_num=end.qpn, ah_attr=AhAttr(gid=end.gid), max_dest_rd_atomic=8),
        _M.NEXT_STATE | _M.RQ_PSN | _M.DEST_QP_NUM | _M.PATH_MTU | _M.AH_ATTR | _M.MIN_RNR_TIMER,
    )
    assert qp.query()[0].max_dest_rd_atomic == 1


def test_rights_that_the_mask_leaves_out_stay(ctx, pd):
    a, _ = pair(pd)
    a.modify(QpAttr(allow_remote_read=False), _M.ALLOW_REMOTE_READ)
    attr, _ = a.query()
    assert (attr.allow_remote_write, attr.allow_remote_read) == (True, False)
    assert attr.allow_remote_atomic == QpAtomicType.IB_SPEC


def test_error_from_reset(device, ctx, pd):
    """By INIT, as Linux knows no way from RST to ERR."""
    qp = pd.create_qp()
    qp.to_error()
    assert qp.state == QpState.ERR
    assert len(device.modified) == 2


def test_a_wrong_current_state(device, ctx, pd):
    """It is not handed on: drivers believe it."""
    qp = pd.create_qp()
    with pytest.raises(DriverError, match="is in RST, but current_state says INIT"):
        qp.modify(QpAttr(next_state=QpState.INIT, current_state=QpState.INIT), _M.NEXT_STATE | _M.CURRENT_STATE)
    assert device.modified == []


def test_the_path_of_a_connected_queue_pair(device, ctx, pd):
    a, _ = pair(pd)
    before = len(device.modified)
    there = a.query()[0].ah_attr
    a.modify(QpAttr(ah_attr=there, min_rnr_timer=5), _M.AH_ATTR | _M.MIN_RNR_TIMER)
    assert device.modified[before:] == [_M.MIN_RNR_TIMER]
    with pytest.raises(NotSupportedError, match="another sgid_index or traffic_class in RTS"):
        a.modify(QpAttr(ah_attr=AhAttr(gid=there.gid, sgid_index=1)), _M.AH_ATTR)
    with pytest.raises(NotSupportedError, match="UP_TO_8BYTES"):
        a.modify(QpAttr(allow_remote_atomic=QpAtomicType.UP_TO_8BYTES), _M.ATOMIC_MODE)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"sq_wr": 1 << 20}, "sq_wr = 1048576: it must be 0 to"), ({"rq_wr": 1 << 20}, "rq_wr = 1048576"),
        ({"send_max_sges": 0, "sq_wr": 1}, "send_max_sges = 0: it must be 1 to"),
        ({"receive_max_sges": 1000, "rq_wr": 1}, "receive_max_sges = 1000: it must be 1 to"),
    ],
)
def test_sizes(ctx, pd, options, words):
    cq = ctx.create_cq(4)
    with pytest.raises(InvalidValueError) as caught:
        pd.create_qp(send_cq=cq, receive_cq=cq, **options)
    assert words in str(caught.value)
    assert set(ctx.users) == {pd, cq}


# --- events ----------------------------------------------------------------------------------------------------------


def test_one_event_though_the_device_makes_two(device, ctx, pd):
    """One for what was there when the CQ was asked, found here; what the device tells then was not asked for."""
    channel = ctx.create_comp_channel()
    cq = ctx.create_cq(64, channel=channel)
    qp = pd.create_qp(sq_wr=8, send_cq=cq)
    qp.connect(qp)
    memory = pd.register(bytearray(8), Access.all())
    write = SendWr(opcode=WrOpcode.RDMA_WRITE, remote_addr=memory.address, rkey=memory.rkey)
    for _ in range(3):
        qp.post_send(write)
        until(lambda: device.waiting(cq) == 1, "a completion")
        cq.req_notify()
        assert channel.get_event(10) is cq
        cq.ack_events()
        qp.post_send(write)
        assert len(take(cq, 2)) == 2
        assert channel.get_event(0.02) is None


def test_events_of_closed_queues_are_dropped(device, ctx, pd):
    channel = ctx.create_comp_channel()
    cqs = [ctx.create_cq(4, channel=channel) for _ in range(2)]
    qps = [pd.create_qp(sq_wr=1, send_cq=cq) for cq in cqs]
    memory = pd.register(bytearray(8))
    for qp, cq in zip(qps, cqs):
        qp.connect(qp)
        cq.req_notify()
        qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE, remote_addr=memory.address, rkey=memory.rkey))
    until(lambda: all(device.waiting(cq) for cq in cqs), "both completions")
    qps[0].close()
    cqs[0].close()
    assert channel.get_event(10) is cqs[1]
    cqs[1].ack_events()
    assert channel.get_event(0.02) is None
