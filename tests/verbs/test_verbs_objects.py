"""Contexts, domains, doorbell pages, completion queues and queue pairs: what they ask of a device, and their lives."""

import copy
import os
import pickle
import warnings
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_device import CREATE_CQ, CREATE_QP, GID, QPC_AT, FakeProvider, be
from gpunetio import verbs
from gpunetio.enums import CqOverrun, LinkLayer, QpSendDbrMode, QpState, QpType, UarAllocationType
from gpunetio.errors import BadStateError, DriverError, InUseError, InvalidValueError, NotSupportedError
from gpunetio.memory import HostMemory
from gpunetio.verbs import CQ, PD, QP, Context, QpInitAttr
from gpunetio.verbs.qp_init import queue_sizes


@pytest.fixture
def fake() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
def ctx(fake: FakeProvider) -> Context:
    return Context(fake)


@pytest.fixture
def pd(ctx: Context) -> PD:
    return ctx.create_pd()


@pytest.fixture
def cq(ctx: Context) -> CQ:
    return ctx.create_cq(16)


def words(address: int, count: int) -> np.ndarray:
    """Bytes at an address, while their owner lives."""
    interface = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 3}
    return np.asarray(type("Memory", (), {"__array_interface__": interface})())


# --- device


def test_device_attributes(fake, ctx):
    device = ctx.query_device()
    known = asdict(fake.query_device())
    assert {name: getattr(device, name) for name in known} == known
    assert (device.link_layer, device.gid_table_size) == (LinkLayer.ETHERNET, 255)
    assert (device.log_max_qp_sz, device.log_max_cq_sz) == (15, 22)
    assert (device.max_wqe_sz_sq, device.max_wqe_sz_rq) == (1024, 512)
    assert (device.min_udp_sport, device.max_udp_sport) == (0xC000, 0xFFFF)
    assert (device.roce_version, device.rts2rts_qp_dscp, device.send_dbr_mode_no_dbr_ext) == (5, True, False)
    assert device.is_qp_type_supported(QpType.RC)
    assert not device.is_qp_type_supported(QpType.UD)  # as its capabilities say
    assert ctx.query_device() is device
    assert [be(mailbox, 6, 2) for mailbox in fake.sent(0x100)] == [0x01, 0x09, 0x41]
    assert all(len(mailbox) == 16 for mailbox in fake.mailboxes)


def test_no_dbr_capability_and_infiniband():
    provider = FakeProvider(ethernet=False)
    provider.no_dbr_ext = True
    device = Context(provider).query_device()
    assert device.send_dbr_mode_no_dbr_ext
    assert (device.link_layer, device.gid_table_size) == (LinkLayer.INFINIBAND, 32)


def test_refused_capability_query(fake, ctx):
    fake.refused = {0x100}
    with pytest.raises(DriverError, match=r"^QUERY_HCA_CAP GENERAL: refused"):
        ctx.query_device()
    fake.refused = set()
    assert ctx.query_device().rc


def test_port_and_gid(ctx):
    assert ctx.query_port().active_mtu == 4096
    assert ctx.query_gid(1, 0) == GID
    assert not any(ctx.query_gid(1, 254))
    for port in (0, 2):
        with pytest.raises(InvalidValueError, match=f"port {port}: context fake0 has the ports 1 to 1"):
            ctx.query_port(port)
    for index in (-1, 255):
        with pytest.raises(InvalidValueError, match=f"GID index {index}: .* 0 to 254"):
            ctx.query_gid(1, index)


def test_open_by_name(monkeypatch):
    provider = FakeProvider()
    monkeypatch.setattr(verbs.context, "open_device", lambda name, port: {"soft0": provider}[name])
    with verbs.open("soft0") as ctx:
        assert ctx.provider is provider
        assert ctx.name == "fake0"
    assert provider.gone == ["channel", "device"]


def test_uar(fake, ctx):
    with ctx.create_uar(UarAllocationType.NONCACHE_DEDICATED) as uar:
        base = fake.pages[uar.page_id].address
        assert (uar.reg_addr, uar.dbr_less_addr) == (base + 0x800, base + 0x600)
        assert uar.kind == UarAllocationType.NONCACHE_DEDICATED
    assert fake.left() == []
    fake.refused = {"alloc_uar NONCACHE_DEDICATED"}
    with pytest.raises(DriverError, match=r"^allocate a UAR of kind NONCACHE_DEDICATED: refused"):
        ctx.create_uar(UarAllocationType.NONCACHE_DEDICATED)


# --- completion queues

CQC = 0x10


def test_cq(fake, ctx):
    mine = object()
    cq = ctx.create_cq(64, context=mine)
    (mailbox,) = fake.sent(CREATE_CQ)
    umem_id, uar = fake.live["umem"][0], fake.live["uar"][0]
    assert len(mailbox) == 272
    assert mailbox[CQC] == 1 << 1  # dbr_umem_valid
    assert mailbox[CQC + 1] == 0  # 64-byte entries, neither collapsed nor overrun
    assert be(mailbox, CQC + 4, 4) == umem_id
    assert mailbox[CQC + 0xC] == 6  # log_cq_size
    assert be(mailbox, CQC + 0xD, 3) == uar
    assert mailbox[CQC + 0x17] == 5  # EQN
    assert be(mailbox, CQC + 0x38, 8) == 64 * 64  # dbr_addr
    assert be(mailbox, 0x50, 8) == 0
    assert be(mailbox, 0x58, 4) == umem_id
    assert mailbox[0x5C] == 0x80  # cq_umem_valid
    assert (cq.cqn, cq.entries, cq.cqe_size) == (fake.live["cq"][0], 64, 64)
    assert cq.uar.page_id == uar
    assert cq.uar.kind == UarAllocationType.NONCACHE
    assert cq.context is mine
    assert cq.ring_address % 4096 == 0
    assert (cq.dbr_address, cq.arm_address) == (cq.ring_address + 4096, cq.ring_address + 4100)
    ring = words(cq.ring_address, 64 * 64 + 64).copy()
    assert (ring[63:4096:64] == 0xF1).all()
    assert np.count_nonzero(ring) == 64
    cq.close()
    assert fake.gone == ["cq", "umem"]  # the page is the context's


@pytest.mark.parametrize("overrun, collapsed, byte", [(1, False, 0x02), (0, True, 0x10), (1, True, 0x12)])
def test_cq_modes(fake, ctx, overrun, collapsed, byte):
    ctx.create_cq(cqe=1, overrun=CqOverrun(overrun), collapsed=collapsed)
    assert fake.sent(CREATE_CQ)[0][CQC + 1] == byte


@pytest.mark.parametrize("cqe", [0, -4, 1 << 23])
def test_cq_size(fake, ctx, cqe):
    with pytest.raises(InvalidValueError, match=f"cqe = {cqe}: it must be 1 to 4194304"):
        ctx.create_cq(cqe)
    assert fake.left() == []


def test_cq_in_memory_of_the_user(fake, ctx):
    memory, records = HostMemory(8192), HostMemory(4096)
    ring, dbr, uar = ctx.register_umem(memory), ctx.register_umem(records), ctx.create_uar()
    cq = ctx.create_cq(64, external_umem=(ring, 4096), external_dbr_umem=(dbr, 24), external_uar=uar)
    (mailbox,) = fake.sent(CREATE_CQ)
    assert (be(mailbox, 0x58, 4), be(mailbox, 0x50, 8)) == (ring.umem_id, 4096)
    assert (be(mailbox, CQC + 4, 4), be(mailbox, CQC + 0x38, 8)) == (dbr.umem_id, 24)
    assert be(mailbox, CQC + 0xD, 3) == uar.page_id
    assert cq.ring_address == memory.address + 4096
    assert (cq.dbr_address, cq.arm_address) == (records.address + 24, records.address + 28)
    assert not memory.array.any()  # its owner presets it
    for used in (ring, dbr, uar):
        with pytest.raises(InUseError, match=rf"^{used} is still used by {cq}: close that first$"):
            used.close()
    cq.close()
    for used in (ring, dbr, uar):
        used.close()
    assert fake.left() == []


@pytest.mark.parametrize(
    "places, message",
    [
        (lambda umem: {"external_umem": (umem, 0)}, "external_umem without external_dbr_umem: give both, or neither"),
        (lambda umem: {"external_dbr_umem": (umem, 0)}, "external_dbr_umem without external_umem"),
        (lambda umem: {"external_umem": (umem, 8), "external_dbr_umem": (umem, 4096)}, "offset 8 is no multiple of 64"),
        (lambda umem: {"external_umem": (umem, -64), "external_dbr_umem": (umem, 4096)}, "offset -64"),
        (lambda umem: {"external_umem": (umem, 64), "external_dbr_umem": (umem, 12)}, "offset 12 is no multiple of 8"),
        (lambda umem: {"external_umem": (umem, 4160), "external_dbr_umem": (umem, 0)}, "4096 bytes at offset 4160"),
        (lambda umem: {"external_umem": (umem, 64), "external_dbr_umem": (umem, 8192)}, "8 bytes at offset 8192"),
    ],
)
def test_cq_places(fake, ctx, places, message):
    umem = ctx.register_umem(HostMemory(8192))
    with pytest.raises(InvalidValueError) as caught:
        ctx.create_cq(64, **places(umem))
    assert message in str(caught.value)
    assert fake.left() == ["umem"]


# --- queue pairs


def test_qp(fake, ctx, pd, cq):
    receives = ctx.create_cq(16)
    qp = pd.create_qp(sq_wr=10, rq_wr=5, send_cq=cq, receive_cq=receives, receive_max_sges=3, user_index=0xABCDEF)
    (mailbox,) = fake.sent(CREATE_QP)
    qpc = mailbox[QPC_AT:]
    umem_id = fake.live["umem"][-1]
    assert len(mailbox) == 272
    assert qpc[1] == 0  # RC
    assert be(qpc, 5, 3) == pd.pdn
    assert qpc[9] == 3 << 3 | 2  # 8 receive entries of 16 << 2 bytes
    assert qpc[0xA] == 4 << 3  # 16 basic blocks; there is a send queue
    assert be(qpc, 0xD, 3) == qp.uar.page_id
    assert qpc[0x10] == 0
    assert be(qpc, 0x11, 3) == 0xABCDEF
    assert be(qpc, 0x7D, 3) == cq.cqn
    assert qpc[0x93] == 0  # no cd_master
    assert (qpc[0xC6], qpc[0xC7]) == (0, 0)  # cs_req, cs_res
    assert be(qpc, 0x9D, 3) == receives.cqn
    assert be(qpc, 0xA0, 8) == 512 + 1024  # dbr_addr
    assert qpc[0xAC] == 0  # rq_type
    assert qpc[0xD0] == 1 << 4  # dbr_umem_valid
    assert be(qpc, 0xE4, 4) == umem_id
    assert be(mailbox, 0x100, 8) == 0  # wq_umem_offset
    assert be(mailbox, 0x108, 4) == umem_id
    assert mailbox[0x10C] == 0x80  # wq_umem_valid
    assert qp.qpn == fake.live["qp"][0]
    assert qp.state == QpState.RST
    assert (qp.rq_entries, qp.rq_stride, qp.sq_entries) == (8, 64, 16)
    assert qp.rq_address % 4096 == 0
    assert qp.sq_address == qp.rq_address + 512
    assert qp.dbr_address == qp.rq_address + 1536
    assert qp.doorbell_register == qp.uar.reg_addr
    assert qp.uar.kind == UarAllocationType.BLUEFLAME
    assert qp.init_attr.max_inline_data == 64 - 36
    assert (qp.init_attr.sq_wr, qp.init_attr.rq_wr, qp.init_attr.send_cq) == (10, 5, cq)
    qp.close()
    assert fake.gone == ["qp", "umem"]


def test_qp_that_only_sends(fake, pd, cq):
    qp = pd.create_qp(sq_wr=1, send_cq=cq)
    qpc = fake.sent(CREATE_QP)[0][QPC_AT:]
    assert qpc[0xAC] == 3
    assert be(qpc, 0x9D, 3) == 0
    assert (qp.rq_entries, qp.rq_stride, qp.sq_address) == (0, 0, qp.rq_address)


def test_qp_that_only_receives(fake, pd, cq):
    qp = pd.create_qp(rq_wr=1, receive_cq=cq)
    qpc = fake.sent(CREATE_QP)[0][QPC_AT:]
    assert qpc[0xA] == 0x80
    assert be(qpc, 0x7D, 3) == 0
    assert (qp.sq_entries, qp.rq_entries, qp.rq_stride) == (0, 4, 16)


def test_passive_qp(fake, pd):
    qp = pd.create_qp()
    qpc = fake.sent(CREATE_QP)[0][QPC_AT:]
    assert (qpc[0xA], qpc[0xAC]) == (0x80, 3)
    assert qp.dbr_address == qp.sq_address == qp.rq_address


def test_core_direct_master(fake, pd, cq):
    pd.create_qp(sq_wr=1, send_cq=cq, core_direct_master=True)
    qpc = fake.sent(CREATE_QP)[0][QPC_AT:]
    assert qpc[0x93] == 1
    assert be(qpc, 0x95, 3) == 0  # the bit is not in next_rcv_psn


def test_payload_in_completions(fake, pd, cq):
    with pytest.raises(NotSupportedError, match="cqe_inline: the device puts no payload into completions"):
        pd.create_qp(rq_wr=1, receive_cq=cq, cqe_inline=True)
    assert not pd.ctx.query_device().is_cqe_inline_supported
    fake.cqe_inline = True
    ctx = Context(fake)
    assert ctx.query_device().is_cqe_inline_supported
    qp = ctx.create_pd().create_qp(rq_wr=1, receive_cq=ctx.create_cq(4), cqe_inline=True)
    qpc = fake.sent(CREATE_QP)[0][QPC_AT:]
    assert (qpc[0xC6], qpc[0xC7]) == (0, 1)  # cs_req, cs_res: MLX5_RES_SCAT_DATA32_CQE
    assert qp.init_attr.cqe_inline


@pytest.mark.parametrize("size, responses, received", [(64, 0x11, 1), (128, 0x22, 2)])
def test_payload_that_others_poll(fake, pd, size, responses, received):
    """The values of MLX5_REQ_SCAT_DATA32_CQE and its relatives, by the size of entries."""
    with pytest.raises(NotSupportedError, match="cqe_inline_responses: the device puts no payload into completions"):
        pd.create_qp(cqe_inline_responses=True, external_datapath=True)
    fake.cqe_inline = True
    ctx = Context(fake)
    cq = ctx.create_cq(4, cqe_size=size)
    queues = {"sq_wr": 1, "send_cq": cq, "rq_wr": 1, "receive_cq": cq, "cqe_inline": True}
    one = ctx.create_pd().create_qp(**queues, cqe_inline_responses=True, external_datapath=True)
    other = ctx.create_pd().create_qp(**queues)
    assert (one.closed, other.closed) == (False, False)
    external, own = (mailbox[QPC_AT:] for mailbox in fake.sent(CREATE_QP))
    assert (external[0xC6], external[0xC7]) == (responses, received)
    assert (own[0xC6], own[0xC7]) == (0, 1)  # `CQ.poll` reads 32 bytes


def test_queue_pairs_that_copy_memory(fake, pd, cq):
    with pytest.raises(NotSupportedError, match="memcpy: the device's queue pairs do not copy memory"):
        pd.create_qp(sq_wr=1, send_cq=cq, memcpy=True)
    assert pd.ctx.query_device().max_wr_memcpy_length == 0
    assert not fake.mrs
    fake.memcpy = True
    ctx = Context(fake)
    assert ctx.query_device().max_wr_memcpy_length == 1 << 21
    qp = ctx.create_pd().create_qp(sq_wr=1, send_cq=ctx.create_cq(4), memcpy=True)
    mailbox = fake.sent(CREATE_QP)[0]
    assert (len(mailbox), mailbox[8], mailbox[0x110]) == (464, 1 << 7, 1 << 5)  # qpc_ext, qpc_data_extension.mmo
    assert not any(mailbox[0x111:])
    assert qp.opaque.nbytes >= 64
    with pytest.raises(InUseError, match="is still used by QP"):
        qp.opaque.close()
    qp.close()
    assert qp.opaque.closed


def test_doorbells_without_a_record(fake, pd, cq):
    with pytest.raises(NotSupportedError, match="NO_DBR_EXT: the device needs doorbell records"):
        pd.create_qp(sq_wr=1, send_cq=cq, send_dbr_mode=QpSendDbrMode.NO_DBR_EXT)
    fake.no_dbr_ext = True
    ctx = Context(fake)
    pd, cq = ctx.create_pd(), ctx.create_cq(4)
    qp = pd.create_qp(sq_wr=1, send_cq=cq, send_dbr_mode=QpSendDbrMode.NO_DBR_EXT)
    assert qp.doorbell_register == qp.uar.dbr_less_addr
    assert fake.sent(CREATE_QP)[0][QPC_AT + 0x10] == 1 << 6
    with pytest.raises(InvalidValueError, match="choose one of the two"):
        pd.create_qp(sq_wr=1, send_cq=cq, send_dbr_mode=QpSendDbrMode.NO_DBR_EXT, emulate_no_dbr_ext=True)
    qp = pd.create_qp(sq_wr=1, send_cq=cq, emulate_no_dbr_ext=True)
    assert (qp.emulate_no_dbr_ext, qp.send_dbr_mode) == (True, QpSendDbrMode.DBR_VALID)
    assert qp.doorbell_register == qp.uar.reg_addr


def test_qp_in_memory_of_the_user(fake, ctx, pd, cq):
    memory, records = HostMemory(4096), HostMemory(4096)
    ring, dbr, uar = ctx.register_umem(memory), ctx.register_umem(records), ctx.create_uar()
    places = {"external_umem": (ring, 192), "external_dbr_umem": (dbr, 16), "external_uar": uar}
    qp = pd.create_qp(sq_wr=32, rq_wr=64, send_cq=cq, receive_cq=cq, **places)
    (mailbox,) = fake.sent(CREATE_QP)
    assert (be(mailbox, 0x108, 4), be(mailbox, 0x100, 8)) == (ring.umem_id, 192)
    assert (be(mailbox, QPC_AT + 0xE4, 4), be(mailbox, QPC_AT + 0xA0, 8)) == (dbr.umem_id, 16)
    assert (qp.rq_address, qp.sq_address) == (memory.address + 192, memory.address + 192 + 1024)
    assert qp.dbr_address == records.address + 16
    assert qp.uar is uar
    records.array[16:24] = 9
    qp.reset()
    assert (records.array[16:24] == 9).all()
    for used in (ring, dbr, uar, cq):
        with pytest.raises(InUseError, match=f"is still used by {qp}"):
            used.close()
    with pytest.raises(InvalidValueError, match=r"external_umem: 2112 bytes at offset 2048 do not fit in the 4096 byt"):
        pd.create_qp(sq_wr=32, rq_wr=1, send_cq=cq, receive_cq=cq, **places | {"external_umem": (ring, 2048)})
    with pytest.raises(InvalidValueError, match="external_umem: offset 32 is no multiple of 64"):
        pd.create_qp(sq_wr=1, send_cq=cq, **places | {"external_umem": (ring, 32)})


def test_reset_zeroes_the_record(pd, cq):
    qp = pd.create_qp(sq_wr=1, send_cq=cq)
    record = words(qp.dbr_address, 8)
    record[:] = 0xFF
    qp.to_error()
    assert record.all()
    qp.reset()
    assert not record.any()


@pytest.mark.parametrize(
    "values, message",
    [
        ({"sq_wr": 4}, "sq_wr = 4 without send_cq: sends need a completion queue"),
        ({"rq_wr": 4}, "rq_wr = 4 without receive_cq"),
        ({"sq_wr": -1}, "none may be negative"),
        ({"rq_wr": -1}, "none may be negative"),
        ({"max_inline_data": -1}, "none may be negative"),
        ({"qp_type": 4}, "qp_type = 4: it must be RC"),
        ({"user_index": 1 << 24}, "user_index = 0x1000000 does not fit in 24 bits"),
        ({"user_index": -1}, "user_index"),
        ({"sq_wr": 1, "send_cq": True, "send_max_sges": 0}, "send_max_sges = 0"),
        ({"rq_wr": 1, "receive_cq": True, "receive_max_sges": 0}, "receive_max_sges = 0"),
        ({"rq_wr": 32769, "receive_cq": True}, "rq_wr = 32769: the device holds at most 32768"),
        (
            {"rq_wr": 1, "receive_cq": True, "receive_max_sges": 33},
            "a receive WQE of 1024 bytes: the device takes at most 512",
        ),
        ({"sq_wr": 1, "send_cq": True, "send_max_sges": 62}, "a send WQE of 1024 bytes: the device takes at most 1008"),
        ({"sq_wr": 1, "send_cq": True, "max_inline_data": 1000}, "max_inline_data = 1000"),
        ({"sq_wr": 32769, "send_cq": True}, "65536 basic blocks of 64 bytes: the device holds at most 32768"),
        ({"sq_wr": 32768, "send_cq": True, "send_max_sges": 2}, "65536 basic blocks"),
    ],
)
def test_qp_rules(fake, pd, cq, values, message):
    fake.mailboxes.clear()
    with pytest.raises(InvalidValueError) as caught:
        pd.create_qp(**{name: cq if name.endswith("_cq") else value for name, value in values.items()})
    assert message in str(caught.value)
    assert fake.sent(CREATE_QP) == []
    assert len(fake.live["umem"]) == 1  # the completion queue's


def pow2(n: int) -> int:
    size = 1
    while size < n:
        size *= 2
    return size


@given(
    sq_wr=st.integers(1, 3000), sges=st.integers(1, 20), inline=st.integers(0, 600),
    rq_wr=st.integers(0, 3000), rq_sges=st.integers(1, 32),
)
def test_sizes(sq_wr, sges, inline, rq_wr, rq_sges):
    provider = FakeProvider()
    ctx = Context(provider)
    cq = ctx.create_cq(4)
    wqe = max(48 + 16 * sges, 32 + (4 + inline + 15) // 16 * 16)
    wqe = (wqe + 63) // 64 * 64
    sq_bytes = pow2(sq_wr * wqe)
    attributes = {
        "sq_wr": sq_wr, "rq_wr": rq_wr, "send_max_sges": sges, "receive_max_sges": rq_sges, "max_inline_data": inline,
        "send_cq": cq, "receive_cq": cq,
    }
    if sq_bytes // 64 > 32768:
        with pytest.raises(InvalidValueError, match="basic blocks"):
            queue_sizes(QpInitAttr(**attributes), ctx.query_device())
        return
    stride = 16 * pow2(rq_sges)
    rq_bytes = max(pow2(rq_wr * stride), 64) if rq_wr else 0
    qp = ctx.create_pd().create_qp(**attributes)
    assert qp.sq_entries == sq_bytes // 64
    assert qp.rq_entries == rq_bytes // stride
    assert qp.init_attr.max_inline_data == wqe - 36
    assert qp.sq_address - qp.rq_address == rq_bytes
    assert qp.dbr_address - qp.sq_address == sq_bytes
    qpc = provider.sent(CREATE_QP)[0][QPC_AT:]
    assert 1 << (qpc[0xA] >> 3 & 15) == qp.sq_entries
    if rq_wr:
        assert 1 << (qpc[9] >> 3 & 15) == qp.rq_entries
        assert 16 << (qpc[9] & 7) == stride
    qp.close()


# --- failures half-way


@pytest.mark.parametrize("refused", ["reg_umem", CREATE_CQ, "both UARs"])
def test_failed_cq_leaves_nothing(fake, ctx, refused):
    fake.refused = {refused} if refused != "both UARs" else {"alloc_uar NONCACHE", "alloc_uar BLUEFLAME"}
    with pytest.raises(DriverError) as caught:
        ctx.create_cq(16)
    assert (caught.value.status, caught.value.syndrome) == (3, 0xABCD)
    assert set(fake.left()) <= {"uar"}  # the context keeps its shared page
    fake.refused = set()
    ctx.create_cq(16).close()
    ctx.close()


@pytest.mark.parametrize("refused", ["reg_umem", CREATE_QP, "doorbell_register", "both UARs"])
def test_failed_qp_leaves_nothing(fake, ctx, pd, cq, refused):
    def live():
        return sum(len(made) for kind, made in fake.live.items() if kind != "uar")  # the context keeps its shared pages

    before = live()
    fake.refused = {refused} if refused != "both UARs" else {"alloc_uar NONCACHE", "alloc_uar BLUEFLAME"}
    with pytest.raises(DriverError):
        pd.create_qp(sq_wr=1, send_cq=cq)
    assert live() == before
    cq.close()  # no queue pair holds it


def test_refused_command_is_named(fake, ctx, pd, cq):
    fake.refused = {CREATE_CQ, CREATE_QP}
    with pytest.raises(DriverError, match=r"^CREATE_CQ: refused 1024$"):
        ctx.create_cq(1)
    with pytest.raises(DriverError, match=r"^CREATE_QP: refused 1280$"):
        pd.create_qp()


def test_queues_share_a_doorbell_page(fake, ctx, pd):
    cqs = [ctx.create_cq(4) for _ in range(3)]
    qps = [pd.create_qp(sq_wr=1, send_cq=cq) for cq in cqs]
    assert len({cq.uar for cq in cqs}) == len({qp.uar for qp in qps}) == 1
    assert len(fake.live["uar"]) == 2
    for queue in (*qps, *cqs):
        queue.close()
    cqs[0].uar.close()
    assert not ctx.create_cq(4).uar.closed  # a closed page is replaced


@pytest.mark.parametrize("first, second", [("NONCACHE", "BLUEFLAME"), ("BLUEFLAME", "NONCACHE")])
def test_doorbell_page_of_the_other_kind(fake, ctx, pd, first, second):
    fake.refused = {f"alloc_uar {first}"}
    made = ctx.create_cq(1) if first == "NONCACHE" else pd.create_qp()
    assert made.uar.kind == UarAllocationType[second]


# --- lives


def everything(ctx: Context) -> dict[str, verbs.Handle]:
    pd = ctx.create_pd()
    umem, uar, cq = ctx.register_umem(bytearray(64)), ctx.create_uar(), ctx.create_cq(16)
    mr, qp = pd.register(bytearray(8)), pd.create_qp(sq_wr=4, send_cq=cq, external_uar=uar)
    return {"pd": pd, "umem": umem, "uar": uar, "cq": cq, "mr": mr, "qp": qp, "ctx": ctx}


def test_context_closes_all_in_order(fake, ctx):
    handles = everything(ctx)
    ctx.close()
    ctx.close()
    assert all(handle.closed for handle in handles.values())
    assert fake.left() == []
    order = [kind for kind in fake.gone if kind in ("qp", "cq", "mr", "pd", "device")]
    assert order == ["qp", "cq", "mr", "pd", "device"]
    assert fake.gone.index("pd") > max(i for i, kind in enumerate(fake.gone) if kind in ("umem", "uar", "mr"))


def test_pd_closes_its_own(fake, ctx):
    handles = everything(ctx)
    handles["pd"].close()
    assert [name for name, handle in handles.items() if handle.closed] == ["pd", "mr", "qp"]
    assert fake.live["cq"]


def test_with(fake):
    with Context(fake) as ctx, ctx.create_pd() as pd, ctx.create_cq(4) as cq, pd.create_qp(sq_wr=1, send_cq=cq) as qp:
        pass
    assert qp.closed
    assert fake.left() == []


def test_in_use(ctx, pd, cq):
    qp = pd.create_qp(sq_wr=1, send_cq=cq)
    with pytest.raises(InUseError, match=rf"^CQ {cq.cqn:#x} of fake0 is still used by QP {qp.qpn:#x} of fake0: close"):
        cq.close()
    with pytest.raises(InUseError, match="is still used by QP"):
        qp.uar.close()
    assert not cq.closed
    qp.close()
    cq.close()


def test_all_are_closed_even_if_one_fails(fake, ctx, monkeypatch):
    everything(ctx)

    def stuck(handle: int) -> None:
        raise DriverError("stuck", 8, 0)

    monkeypatch.setattr(fake, "devx_obj_destroy", stuck)
    with pytest.raises(DriverError, match=r"^DESTROY_CQ: stuck"):
        ctx.close()
    assert fake.left() == ["cq", "qp"]
    assert ctx.closed


CALLS = {
    "ctx": [
        lambda ctx: ctx.provider, lambda ctx: ctx.query_device(), lambda ctx: ctx.query_port(), Context.create_pd,
        lambda ctx: ctx.query_gid(1, 0), lambda ctx: ctx.create_cq(4), Context.create_uar,
        lambda ctx: ctx.register_umem(bytearray(4)),
    ],
    "pd": [lambda pd: pd.register(bytearray(4)), lambda pd: pd.create_qp()],
    "qp": [
        lambda qp: qp.state, lambda qp: qp.query(), lambda qp: qp.modify(verbs.QpAttr(), 0), QP.reset, QP.to_error,
        QP.endpoint, lambda qp: qp.connect(verbs.QpEndpoint(1, GID, 0, 1024)),
    ],
}
EVERY_CALL = [(kind, call) for kind, calls in CALLS.items() for call in calls]


@pytest.mark.parametrize("kind, call", EVERY_CALL)
def test_closed_handles_say_so(ctx, kind, call):
    ctx.query_device()
    handles = everything(ctx)
    handle = handles[kind]
    handle.close()
    with pytest.raises(BadStateError, match=f"^{handle} is closed$"):
        call(handle)


@pytest.mark.parametrize("argument", ["cq", "uar", "umem"])
def test_closed_arguments_are_named(fake, ctx, pd, cq, argument):
    uar, umem = ctx.create_uar(), ctx.register_umem(bytearray(4096))
    {"cq": cq, "uar": uar, "umem": umem}[argument].close()
    before = sum(map(len, fake.live.values()))
    with pytest.raises(BadStateError, match=rf"^{argument.upper()} 0x\w+ of fake0 is closed"):
        pd.create_qp(sq_wr=1, send_cq=cq, external_uar=uar, external_umem=(umem, 0), external_dbr_umem=(umem, 1024))
    assert sum(map(len, fake.live.values())) == before


def test_objects_of_two_contexts_do_not_mix(ctx, pd):
    cq = Context(FakeProvider()).create_cq(4)
    with pytest.raises(InvalidValueError, match=r"CQ 0x.* belongs to another context"):
        pd.create_qp(sq_wr=1, send_cq=cq)


def test_no_copies(ctx):
    for handle in everything(ctx).values():
        for copying in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(BadStateError, match=f"^{handle} cannot be pickled"):
                copying(handle)
    endpoint = verbs.QpEndpoint(1, GID, 0, 1024, 5)
    assert pickle.loads(pickle.dumps(endpoint)) == endpoint


@pytest.mark.parametrize("kind, call", EVERY_CALL)
def test_handles_of_another_process(ctx, monkeypatch, kind, call):
    handles = everything(ctx)
    handle = handles[kind]
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(BadStateError, match=f"^{handle} was opened in process {parent}: open anew, or use spawn$"):
        call(handle)


def test_fork(fake, ctx):
    handles = everything(ctx)
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other tests may have left threads; the child needs none
        child = os.fork()
    if child == 0:
        try:
            ctx.close()  # the parent's objects stay
            handles["qp"].reset()
        except BadStateError as error:
            os.write(theirs, f"{error}, {fake.gone}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        expected = f"{handles['qp']} was opened in process {os.getpid()}: open anew, or use spawn, []"
        assert pipe.read().decode() == expected
    ctx.close()
    assert fake.left() == []


def test_repr(ctx, cq):
    assert repr(cq) == f"<CQ {cq.cqn:#x} of fake0, 16 entries>"
    cq.close()
    assert repr(cq) == f"<CQ {cq.cqn:#x} of fake0, closed>"
    assert repr(ctx) == "<context fake0>"


def test_names_of_the_package():
    assert all(hasattr(verbs, name) for name in verbs.__all__)
