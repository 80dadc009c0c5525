"""Transitions of a queue pair: which are legal with which attributes, and the mailboxes that they send."""

import logging
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_device import ERR, GID, INIT, MAC, RST, RTR, RTS, FakeProvider, be
from gpunetio.enums import Access, AddrType, MtuSize, QpAtomicType, QpAttrMask, QpState
from gpunetio.errors import BadStateError, DriverError, InvalidValueError, NotFoundError, UnexpectedError
from gpunetio.verbs import QP, AhAttr, Context, QpAttr, QpEndpoint
from gpunetio.verbs.ah import with_type

M = QpAttrMask
PRM_STATE = {"RST": RST, "INIT": INIT, "RTR": RTR, "RTS": RTS, "ERR": ERR}
BITS = {
    "ALLOW_REMOTE_WRITE": 0, "ALLOW_REMOTE_READ": 1, "PKEY_INDEX": 2, "MIN_RNR_TIMER": 3, "PORT_NUM": 4,
    "NEXT_STATE": 5, "CURRENT_STATE": 6, "PATH_MTU": 7, "RQ_PSN": 8, "SQ_PSN": 9, "DEST_QP_NUM": 10, "ACK_TIMEOUT": 11,
    "RETRY_CNT": 12, "RNR_RETRY": 13, "AH_ATTR": 14, "ATOMIC_MODE": 15, "MAX_QP_RD_ATOMIC": 16,
    "MAX_DEST_RD_ATOMIC": 17,
}

# from, to: opcode, required, optional (besides CURRENT_STATE and NEXT_STATE)
LEGAL = {
    ("RST", "INIT"): (0x502, "PKEY_INDEX PORT_NUM ALLOW_REMOTE_WRITE ALLOW_REMOTE_READ", "ATOMIC_MODE"),
    ("INIT", "INIT"): (0x50E, "", "PKEY_INDEX PORT_NUM ALLOW_REMOTE_WRITE ALLOW_REMOTE_READ ATOMIC_MODE"),
    ("INIT", "RTR"): (
        0x503, "RQ_PSN DEST_QP_NUM PATH_MTU AH_ATTR MIN_RNR_TIMER",
        "PKEY_INDEX ALLOW_REMOTE_WRITE ALLOW_REMOTE_READ MAX_DEST_RD_ATOMIC ATOMIC_MODE",
    ),
    ("RTR", "RTS"): (
        0x504, "SQ_PSN ACK_TIMEOUT RETRY_CNT RNR_RETRY",
        "MIN_RNR_TIMER ALLOW_REMOTE_WRITE MAX_QP_RD_ATOMIC ATOMIC_MODE",
    ),
    ("RTS", "RTS"): (0x505, "", "ALLOW_REMOTE_WRITE ALLOW_REMOTE_READ MIN_RNR_TIMER AH_ATTR ATOMIC_MODE"),
    **{(state, "RST"): (0x50A, "", "") for state in PRM_STATE},
    **{(state, "ERR"): (0x507, "", "") for state in PRM_STATE},
}


def bits(names: str) -> int:
    return sum(1 << BITS[name] for name in names.split())


def make_qp(provider: FakeProvider, state: str = "RST") -> QP:
    ctx = Context(provider)
    qp = ctx.create_pd().create_qp(sq_wr=16, send_cq=ctx.create_cq(16))
    provider.set_state(qp.qpn, PRM_STATE[state])
    provider.mailboxes.clear()
    return qp


def full_attr(provider: FakeProvider, **values) -> QpAttr:
    ah = AhAttr(gid=GID) if provider.ethernet else AhAttr(addr_type=AddrType.IB_NO_GRH, dlid=7)
    return QpAttr(ah_attr=ah, **values)


@pytest.fixture
def fake() -> FakeProvider:
    return FakeProvider()


def check_modify(current: str, following: str, mask: int) -> None:
    """A modify must send the one right command, or raise and send none."""
    provider = FakeProvider()
    qp = make_qp(provider, current)
    if not mask & bits("NEXT_STATE"):
        following = current
    opcode, required, optional = LEGAL.get((current, following), (0, "", ""))
    allowed = bits(required) | bits(optional) | bits("NEXT_STATE CURRENT_STATE")
    legal = opcode and bits(required) & ~mask == 0 and mask & ~allowed == 0
    attr = full_attr(provider, current_state=QpState[current], next_state=QpState[following])
    if legal:
        qp.modify(attr, M(mask))
        assert [be(mailbox, 0, 2) for mailbox in provider.mailboxes if be(mailbox, 0, 2) >= 0x500][-1] == opcode
        assert qp.state == QpState[following]
    else:
        with pytest.raises(InvalidValueError):
            qp.modify(attr, M(mask))
        assert provider.mailboxes == []
        assert qp.state == QpState[current]


def test_mask_values():
    bits = {name: 1 << n for name, n in BITS.items()}
    assert {name: bit.value for name, bit in M.__members__.items()} == {**bits, "QKEY": 1 << 28}  # of UD


@pytest.mark.parametrize("current", PRM_STATE)
@pytest.mark.parametrize("following", PRM_STATE)
def test_every_transition(current, following):
    """With what is required, then with each attribute taken away or added."""
    _, required, optional = LEGAL.get((current, following), (0, "", ""))
    base = bits(required) | bits("NEXT_STATE")
    for mask in (base, base | bits(optional), base | bits("CURRENT_STATE"), (1 << 18) - 1, base | 1 << 20):
        check_modify(current, following, mask)
    for bit in BITS.values():
        check_modify(current, following, base ^ 1 << bit)


@given(st.sampled_from(list(PRM_STATE)), st.sampled_from(list(PRM_STATE)), st.integers(0, (1 << 18) - 1))
def test_any_mask(current, following, mask):
    check_modify(current, following, mask)


@given(st.sampled_from(list(LEGAL)), st.data())
def test_any_legal_mask(states, data):
    _, required, optional = LEGAL[states]
    names = data.draw(st.sets(st.sampled_from([*optional.split(), "CURRENT_STATE"])))
    check_modify(*states, bits(required) | bits("NEXT_STATE") | bits(" ".join(names)))


def test_what_is_wrong_with_a_mask_is_said(fake):
    qp = make_qp(fake)
    attr = QpAttr(next_state=QpState.INIT)
    with pytest.raises(InvalidValueError, match=r"^RST2INIT_QP needs ALLOW_REMOTE_READ, PORT_NUM: add to the mask$"):
        qp.modify(attr, M.NEXT_STATE | M.PKEY_INDEX | M.ALLOW_REMOTE_WRITE)
    with pytest.raises(InvalidValueError, match=r"^QP_2RST does not take SQ_PSN: remove from the mask$"):
        qp.modify(attr, M.SQ_PSN)
    with pytest.raises(InvalidValueError, match=r"^QP_2RST does not take bits 0x100000: remove"):
        qp.modify(attr, M(1 << 20))
    with pytest.raises(InvalidValueError, match=r"^no transition from RST to RTS: the way is RST, INIT, RTR, RTS"):
        qp.modify(QpAttr(next_state=QpState.RTS), M.NEXT_STATE)


def test_the_current_state_is_the_device_s(fake):
    qp = make_qp(fake, "RTS")
    assert qp.state == QpState.RTS
    fake.set_state(qp.qpn, ERR)  # as an error completion does
    assert qp.state == QpState.ERR
    with pytest.raises(InvalidValueError, match="no transition from ERR to RTS"):
        qp.modify(QpAttr(next_state=QpState.RTS), M.NEXT_STATE)
    qp.reset()
    assert qp.state == QpState.RST


def test_the_device_refuses_a_wrong_current_state(fake):
    qp = make_qp(fake, "INIT")
    mask = M(bits(LEGAL["RTR", "RTS"][1])) | M.NEXT_STATE | M.CURRENT_STATE
    with pytest.raises(DriverError, match=r"^RTR2RTS_QP: bad state") as caught:
        qp.modify(QpAttr(current_state=QpState.RTR, next_state=QpState.RTS), mask)
    assert caught.value.status == 0x10


@pytest.mark.parametrize("state", [4, 8, 9])
def test_states_without_a_name_here(fake, state):
    qp = make_qp(fake)
    fake.set_state(qp.qpn, state)
    with pytest.raises(UnexpectedError, match=f"state {state}"):
        _ = qp.state


# --- values

BAD_VALUES = [
    ("RST", "INIT", {"pkey_index": 128}, "pkey_index = 128: it must be 0 to 127"),
    ("RST", "INIT", {"port_num": 0}, "port_num = 0: it must be 1 to 1"),
    ("RST", "INIT", {"port_num": 2}, "port_num = 2"),
    ("RST", "INIT", {"allow_remote_write": 2}, "allow_remote_write = 2: it must be 0 to 1"),
    ("RST", "INIT", {"allow_remote_atomic": 2}, "allow_remote_atomic = 2: it is one of NONE (0), IB_SPEC (1)"),
    ("RST", "INIT", {"allow_remote_atomic": 4}, "allow_remote_atomic = 4"),
    ("INIT", "RTR", {"path_mtu": MtuSize.RAW_ETHERNET}, "path_mtu = 8192: it must be 256, 512, 1024, 2048, 4096"),
    ("INIT", "RTR", {"path_mtu": -1}, "path_mtu = -1"),
    ("INIT", "RTR", {"path_mtu": 4}, "path_mtu = 4: it must be 256, 512"),
    ("INIT", "RTR", {"path_mtu": 1500}, "path_mtu = 1500"),
    ("INIT", "RTR", {"dest_qp_num": 1 << 24}, "dest_qp_num = 16777216: it must be 0 to 16777215"),
    ("INIT", "RTR", {"min_rnr_timer": 32}, "min_rnr_timer = 32: it must be 0 to 31"),
    ("INIT", "RTR", {"max_dest_rd_atomic": -1}, "max_dest_rd_atomic = -1: it must be 0 to 16"),
    ("INIT", "RTR", {"max_dest_rd_atomic": 17}, "max_dest_rd_atomic = 17: it must be 0 to 16"),
    ("INIT", "RTR", {"ah_attr": None}, "ah_attr is None"),
    ("INIT", "RTR", {"ah_attr": AhAttr(gid=bytes(15))}, "15 bytes"),
    ("INIT", "RTR", {"ah_attr": AhAttr(sgid_index=255)}, "sgid_index = 255: the device has the GIDs 0 to 254"),
    ("INIT", "RTR", {"ah_attr": AhAttr(addr_type=7)}, "addr_type = 7"),
    ("INIT", "RTR", {"ah_attr": AhAttr(addr_type=AddrType.IB_GRH)}, "IB_GRH on a port of ETHERNET: use IPv4 or IPv6"),
    ("INIT", "RTR", {"ah_attr": AhAttr(hop_limit=256)}, "hop_limit = 256: it must be 0 to 255"),
    ("INIT", "RTR", {"ah_attr": AhAttr(traffic_class=-1)}, "traffic_class = -1"),
    ("INIT", "RTR", {"ah_attr": AhAttr(sl=16)}, "sl = 16"),
    ("RTR", "RTS", {"ack_timeout": 32}, "ack_timeout = 32: it must be 0 to 31"),
    ("RTR", "RTS", {"retry_cnt": 8}, "retry_cnt = 8: it must be 0 to 7"),
    ("RTR", "RTS", {"rnr_retry": 8}, "rnr_retry = 8: it must be 0 to 7"),
    ("RTR", "RTS", {"max_rd_atomic": 17}, "max_rd_atomic = 17: it must be 0 to 16"),
]


@pytest.mark.parametrize("current, following, values, message", BAD_VALUES)
def test_values_out_of_range(fake, current, following, values, message):
    qp = make_qp(fake, current)
    _, required, optional = LEGAL[current, following]
    attr = full_attr(fake, next_state=QpState[following])
    for name, value in values.items():
        setattr(attr, name, value)
    with pytest.raises(InvalidValueError) as caught:
        qp.modify(attr, M(bits(required) | bits(optional)) | M.NEXT_STATE)
    assert message in str(caught.value)
    assert fake.mailboxes == []


def test_values_outside_the_mask_do_not_count(fake):
    qp = make_qp(fake)
    qp.modify(QpAttr(port_num=77, path_mtu=MtuSize.RAW_ETHERNET, next_state=QpState.ERR), M.NEXT_STATE)


def test_a_psn_has_24_bits(fake, caplog):
    qp = make_qp(fake, "RTR")
    with caplog.at_level(logging.ERROR, "gpunetio"):
        qp.modify(QpAttr(sq_psn=0x1_234567, next_state=QpState.RTS), M(bits(LEGAL["RTR", "RTS"][1])) | M.NEXT_STATE)
    assert be(fake.mailboxes[-1], 0x18 + 0x79, 3) == 0x234567
    assert "sq_psn = 0x1234567 has more than 24 bits" in caplog.text


# --- mailboxes, at the byte offsets of the specification

QPC, PATH = 0x18, 0x18 + 0x18
RRE, RWE, RAE = 0x80, 0x40, 0x20  # byte 0x92 of the QPC
OPT_RRE, OPT_RAE, OPT_RWE, OPT_PKEY, OPT_RNR, OPT_PORT, OPT_DSCP, OPT_SGID = (
    1 << n for n in (1, 2, 3, 4, 6, 16, 17, 23)
)


def rest_is_zero(mailbox: bytes, *ranges: tuple[int, int]) -> bool:
    left = bytearray(mailbox)
    for at, count in ranges:
        left[at : at + count] = bytes(count)
    return not any(left)


def test_rst2init(fake):
    qp = make_qp(fake)
    attr = QpAttr(
        next_state=QpState.INIT, pkey_index=0x12, port_num=1, allow_remote_write=True, allow_remote_read=True,
        allow_remote_atomic=QpAtomicType.UP_TO_8BYTES,
    )
    mask = M.NEXT_STATE | M.PKEY_INDEX | M.PORT_NUM | M.ALLOW_REMOTE_WRITE | M.ALLOW_REMOTE_READ
    qp.modify(attr, mask)  # without ATOMIC_MODE, atomics are not carried
    qp.reset()
    qp.modify(attr, mask | M.ATOMIC_MODE)
    plain, atomic = fake.sent(0x502)
    for mailbox in plain, atomic:
        assert len(mailbox) == 272
        assert be(mailbox, 9, 3) == qp.qpn
        assert mailbox[QPC + 2] == 3 << 3  # pm_state MIGRATED
        assert be(mailbox, PATH + 2, 2) == 0x12
        assert mailbox[PATH + 0x25] == 1
        assert be(mailbox, 0x10, 4) == 0  # no opt_param_mask
        used = (0, 2), (9, 3), (QPC + 2, 1), (PATH + 2, 2), (PATH + 0x25, 1), (QPC + 0x91, 2)
        assert rest_is_zero(mailbox, *used)
    assert plain[QPC + 0x91 : QPC + 0x93] == bytes([0, RRE | RWE])
    assert atomic[QPC + 0x91 : QPC + 0x93] == bytes([3, RRE | RWE | RAE])


def test_init2init(fake):
    qp = make_qp(fake, "INIT")
    qp.modify(QpAttr(pkey_index=3), M.PKEY_INDEX)
    qp.modify(QpAttr(allow_remote_read=True), M.PORT_NUM | M.ALLOW_REMOTE_WRITE | M.ALLOW_REMOTE_READ | M.ATOMIC_MODE)
    first, second = fake.mailboxes
    assert len(first) == 464
    assert be(first, 0x10, 4) == OPT_PKEY
    assert be(first, PATH + 2, 2) == 3
    assert rest_is_zero(first, (0, 2), (9, 3), (0x10, 4), (PATH + 2, 2))
    assert be(second, 0x10, 4) == OPT_PORT | OPT_RWE | OPT_RRE | OPT_RAE
    assert second[QPC + 0x92] == RRE
    assert second[PATH + 0x25] == 1


RTR_MASK = M(bits(LEGAL["INIT", "RTR"][1])) | M.NEXT_STATE


def test_init2rtr_over_roce_v2(fake):
    fake.udp_sports = (0xC123, 0xC125)
    qp = make_qp(fake, "INIT")
    fake.qpcs[qp.qpn][0x18 + 0x25] = 1  # the port that RST2INIT set
    gid = bytes(range(16))
    ah = AhAttr(
        gid=gid, addr_type=AddrType.IPv6, sgid_index=5, static_rate=2, hop_limit=64, traffic_class=0b101011_01, dlid=9
    )
    attr = QpAttr(
        next_state=QpState.RTR, rq_psn=0xABCDEF, dest_qp_num=0x123456, path_mtu=MtuSize.MTU_4K, min_rnr_timer=12,
        ah_attr=ah, max_dest_rd_atomic=16, allow_remote_write=True, pkey_index=2,
    )
    qp.modify(attr, RTR_MASK | M.MAX_DEST_RD_ATOMIC | M.ALLOW_REMOTE_WRITE | M.PKEY_INDEX)
    (mailbox,) = fake.sent(0x503)
    (asked,) = fake.sent(0x760)
    assert be(asked, 8, 2) == 5  # roce_address_index
    assert fake.mac_queries == [(1, 5, gid)]
    assert be(mailbox, 9, 3) == qp.qpn
    assert be(mailbox, 0x10, 4) == OPT_RWE | OPT_PKEY
    assert mailbox[QPC + 8] == 5 << 5 | 30  # mtu, log_msg_max
    assert be(mailbox, QPC + 0x15, 3) == 0x123456
    assert mailbox[QPC + 0x91 : QPC + 0x93] == bytes([4 << 5, RWE])  # log_rra_max
    assert mailbox[QPC + 0x94] == 12
    assert be(mailbox, QPC + 0x95, 3) == 0xABCDEF
    assert be(mailbox, PATH + 2, 2) == 2
    assert mailbox[PATH + 9] == 5
    assert mailbox[PATH + 0xA] == 2  # stat_rate
    assert mailbox[PATH + 0xB] == 64
    assert mailbox[PATH + 0x10 : PATH + 0x20] == gid
    assert mailbox[PATH + 0x21] == 0b101011  # dscp
    assert 0xC123 <= be(mailbox, PATH + 0x22, 2) <= 0xC125
    assert mailbox[PATH + 0x26 : PATH + 0x2C] == MAC
    assert rest_is_zero(
        mailbox, (0, 2), (9, 3), (0x10, 4), (QPC + 8, 1), (QPC + 0x15, 3), (QPC + 0x91, 2), (QPC + 0x94, 4),
        (PATH + 2, 2), (PATH + 9, 3), (PATH + 0x10, 16), (PATH + 0x21, 3), (PATH + 0x26, 6),
    )


def test_udp_source_ports_are_spread_over_the_device_s_range(fake):
    fake.udp_sports = (100, 103)
    random.seed(1)
    seen = set()
    for _ in range(60):
        qp = make_qp(fake, "INIT")
        qp.modify(full_attr(fake, next_state=QpState.RTR), RTR_MASK)
        seen.add(be(fake.mailboxes[-1], PATH + 0x22, 2))
    assert seen == {100, 101, 102, 103}


def test_init2rtr_over_roce_v1_has_no_udp(fake):
    fake.roce_version = 0
    qp = make_qp(fake, "INIT")
    ah = AhAttr(gid=GID, traffic_class=0xFF)
    qp.modify(QpAttr(next_state=QpState.RTR, ah_attr=ah), RTR_MASK)
    assert be(fake.mailboxes[-1], PATH + 0x21, 3) == 0
    assert fake.mailboxes[-1][PATH + 0x26 : PATH + 0x2C] == MAC


@pytest.mark.parametrize("addr_type, global_route", [(AddrType.IB_GRH, True), (AddrType.IB_NO_GRH, False)])
def test_init2rtr_over_infiniband(addr_type, global_route):
    fake = FakeProvider(ethernet=False)
    qp = make_qp(fake, "INIT")
    gid = bytes(range(16, 32))
    ah = AhAttr(
        gid=gid, addr_type=addr_type, dlid=0x1234, sl=5, sgid_index=3, hop_limit=9, traffic_class=0x77,
        flow_label=0xABCDE,
    )
    qp.modify(QpAttr(next_state=QpState.RTR, ah_attr=ah), RTR_MASK)
    (mailbox,) = fake.sent(0x503)
    assert fake.sent(0x760) == []
    assert fake.mac_queries == []
    assert be(mailbox, PATH + 6, 2) == 0x1234
    assert be(mailbox, PATH + 0xC, 4) == 0x77 << 20 | (0xABCDE if global_route else 0)  # tclass, flow_label
    assert mailbox[PATH + 0x24] == 5  # sl
    assert mailbox[PATH + 5] == global_route << 7
    assert mailbox[PATH + 9] == (3 if global_route else 0)
    assert mailbox[PATH + 0xB] == (9 if global_route else 0)
    assert mailbox[PATH + 0x10 : PATH + 0x20] == (gid if global_route else bytes(16))
    assert mailbox[PATH + 0x26 : PATH + 0x2C] == bytes(6)
    with pytest.raises(InvalidValueError, match="IPv4 on a port of INFINIBAND: use IB_GRH or IB_NO_GRH"):
        make_qp(fake, "INIT").modify(QpAttr(next_state=QpState.RTR, ah_attr=AhAttr(addr_type=AddrType.IPv4)), RTR_MASK)


def test_infiniband_gid_table(fake):
    fake.ethernet = False
    qp = make_qp(fake, "INIT")
    attr = QpAttr(next_state=QpState.RTR, ah_attr=AhAttr(addr_type=AddrType.IB_GRH, sgid_index=32))
    with pytest.raises(InvalidValueError, match="0 to 31"):  # code 2 stands for 32 entries
        qp.modify(attr, RTR_MASK)


@pytest.mark.parametrize("refused, error", [("resolve_mac", NotFoundError), (0x760, DriverError)])
def test_unresolved_address(fake, refused, error):
    qp = make_qp(fake, "INIT")
    fake.refused = {refused}
    with pytest.raises(error):
        qp.modify(full_attr(fake, next_state=QpState.RTR), RTR_MASK)
    assert qp.state == QpState.INIT


def test_rtr2rts(fake):
    qp = make_qp(fake, "RTR")
    attr = QpAttr(
        next_state=QpState.RTS, sq_psn=0x112233, ack_timeout=18, retry_cnt=5, rnr_retry=6, min_rnr_timer=7,
        max_rd_atomic=8, allow_remote_atomic=QpAtomicType.IB_SPEC,
    )
    mask = M(bits(LEGAL["RTR", "RTS"][1])) | M.NEXT_STATE
    qp.modify(attr, mask | M.MIN_RNR_TIMER | M.MAX_QP_RD_ATOMIC | M.ATOMIC_MODE)
    (mailbox,) = fake.mailboxes
    assert be(mailbox, 0x10, 4) == OPT_RNR | OPT_RAE
    assert mailbox[PATH + 8] == 18 << 3
    assert be(mailbox, QPC + 0x70, 2) == 3 << 5 | 5  # log_ack_req_freq 0, log_sra_max, retry_count
    assert mailbox[QPC + 0x72] == 6 << 5
    assert be(mailbox, QPC + 0x79, 3) == 0x112233
    assert mailbox[QPC + 0x91 : QPC + 0x95] == bytes([1, RAE, 0, 7])


def test_rts2rts(fake):
    qp = make_qp(fake, "RTS")
    ah = AhAttr(gid=GID, sgid_index=4, traffic_class=0b111000_11)
    qp.modify(QpAttr(ah_attr=ah), M.AH_ATTR)
    (mailbox,) = fake.sent(0x505)
    assert len(mailbox) == 464
    assert be(mailbox, 0x10, 4) == OPT_SGID | OPT_DSCP
    assert (mailbox[PATH + 9], mailbox[PATH + 0x21]) == (4, 0b111000)
    assert rest_is_zero(mailbox, (0, 2), (9, 3), (0x10, 4), (PATH + 9, 1), (PATH + 0x21, 1))
    qp.modify(QpAttr(allow_remote_write=True, min_rnr_timer=3), M.ALLOW_REMOTE_WRITE | M.MIN_RNR_TIMER)
    assert be(fake.mailboxes[-1], 0x10, 4) == OPT_RWE | OPT_RNR


@pytest.mark.parametrize("setting", [{"rts2rts_dscp": False}, {"roce_version": 0}])
def test_rts2rts_without_dscp(fake, setting):
    for name, value in setting.items():
        setattr(fake, name, value)
    qp = make_qp(fake, "RTS")
    qp.modify(QpAttr(ah_attr=AhAttr(gid=GID, traffic_class=0xFF)), M.AH_ATTR)
    (mailbox,) = fake.sent(0x505)
    assert be(mailbox, 0x10, 4) == OPT_SGID
    assert mailbox[PATH + 0x21] == 0


@pytest.mark.parametrize("call, opcode", [("reset", 0x50A), ("to_error", 0x507)])
def test_helpers(fake, call, opcode):
    qp = make_qp(fake, "RTS")
    getattr(qp, call)()
    (mailbox,) = fake.mailboxes
    assert mailbox == opcode.to_bytes(2, "big") + bytes(7) + qp.qpn.to_bytes(3, "big") + bytes(4)


# --- query and connect


def test_query(fake):
    ctx = Context(fake)
    pd = ctx.create_pd()
    a, b = (pd.create_qp(sq_wr=16, send_cq=ctx.create_cq(16), user_index=7) for _ in range(2))
    attr, init = a.query()
    assert (attr.current_state, attr.ah_attr) == (QpState.RST, None)
    assert init is a.init_attr
    a.connect(b, psn=0x55, traffic_class=0b110000_00, ack_timeout=20, remote_access=Access.REMOTE_READ)
    attr, _ = a.query()
    assert attr == QpAttr(
        current_state=QpState.RTS, next_state=QpState.RTS, path_mtu=4096, rq_psn=0x55, sq_psn=0x55,
        dest_qp_num=b.qpn, allow_remote_read=True, port_num=1, ack_timeout=20, retry_cnt=7, rnr_retry=7,
        min_rnr_timer=1, max_rd_atomic=16, max_dest_rd_atomic=16,
        ah_attr=AhAttr(gid=GID, addr_type=AddrType.IPv4, hop_limit=255, traffic_class=0b110000_00),
    )
    attr, _ = a.query(M.DEST_QP_NUM | M.AH_ATTR)
    assert attr == QpAttr(dest_qp_num=b.qpn, ah_attr=attr.ah_attr)
    assert attr.ah_attr


def test_query_of_codes_without_a_name(fake):
    qp = make_qp(fake)
    fake.qpcs[qp.qpn][8] = 6 << 5
    with pytest.raises(UnexpectedError, match="MTU code 6"):
        qp.query()
    fake.qpcs[qp.qpn][8] = 0
    fake.qpcs[qp.qpn][0x91:0x93] = bytes([2, RAE])
    with pytest.raises(UnexpectedError, match="atomic mode 2"):
        qp.query()


def two_qps(fake: FakeProvider) -> tuple[QP, QP]:
    ctx = Context(fake)
    pd = ctx.create_pd()
    cq = ctx.create_cq(16)
    return pd.create_qp(sq_wr=16, send_cq=cq), pd.create_qp(sq_wr=16, send_cq=cq)


def test_connect_both_ends(fake):
    a, b = two_qps(fake)
    a.connect(b)
    assert a.state == b.state == QpState.RTS
    for qp, peer in ((a, b), (b, a)):
        attr, _ = qp.query()
        assert attr.dest_qp_num == peer.qpn
        assert attr.allow_remote_write
        assert attr.allow_remote_read
        assert attr.allow_remote_atomic == QpAtomicType.IB_SPEC


def test_connect_one_end(fake):
    a, b = two_qps(fake)
    assert b.endpoint(psn=9) == QpEndpoint(b.qpn, GID, 0, 4096, 9)
    a.connect(QpEndpoint(0x77, GID, 0, 1024, 9), psn=4, remote_access=Access.LOCAL_READ)
    attr, _ = a.query()
    assert (attr.dest_qp_num, attr.rq_psn, attr.sq_psn) == (0x77, 9, 4)
    assert attr.path_mtu == 1024  # the smaller one
    assert not attr.allow_remote_write
    assert not attr.allow_remote_read
    assert attr.allow_remote_atomic == QpAtomicType.NONE
    assert b.state == QpState.RST


@pytest.mark.parametrize("local, remote, path", [(1024, 4096, 1024), (4096, 256, 256), (2048, 2048, 2048)])
def test_path_mtu_is_the_smaller_active_mtu(fake, local, remote, path):
    fake.active_mtu = local
    a, _ = two_qps(fake)
    a.connect(QpEndpoint(1, GID, 0, remote))
    assert a.query()[0].path_mtu == path


def test_connect_to_itself(fake):
    a, _ = two_qps(fake)
    a.connect(a)
    assert a.state == QpState.RTS
    assert a.query()[0].dest_qp_num == a.qpn
    assert len(fake.sent(0x502)) == 1


@pytest.mark.parametrize("subnet, addr_type", [(GID[:8], AddrType.IB_NO_GRH), (b"other-su", AddrType.IB_GRH)])
def test_connect_over_infiniband(subnet, addr_type):
    fake = FakeProvider(ethernet=False)
    a, _ = two_qps(fake)
    a.connect(QpEndpoint(5, subnet + bytes(8), 0x42, 4096))
    ah = a.query()[0].ah_attr
    assert ah
    assert (ah.addr_type, ah.dlid) == (addr_type, 0x42)


@pytest.mark.parametrize("gid, kind", [
    (bytes(10) + b"\xff\xff" + bytes(4), AddrType.IPv4), (b"\xfe\x80" + bytes(14), AddrType.IPv6),
])
def test_the_address_type_of_a_gid_on_ethernet(fake, gid, kind):
    ctx = Context(fake)
    assert with_type(ctx, 1, AhAttr(gid=gid)).addr_type == kind
    other = AhAttr(gid=gid, addr_type=AddrType.IPv6)
    assert with_type(ctx, 1, other) is other  # what is given counts


@pytest.mark.parametrize("gid, kind", [
    (GID, AddrType.IB_NO_GRH), (b"other-su" + bytes(8), AddrType.IB_GRH), (bytes(16), AddrType.IB_NO_GRH),
])
def test_the_address_type_of_a_gid_on_infiniband(gid, kind):
    fake = FakeProvider(ethernet=False)
    qp = make_qp(fake, "INIT")
    qp.modify(QpAttr(next_state=QpState.RTR, dest_qp_num=5, ah_attr=AhAttr(gid=gid, dlid=7)), RTR_MASK)
    ah = qp.query()[0].ah_attr
    assert ah
    assert (ah.addr_type, ah.dlid) == (kind, 7)


def test_a_path_mtu_in_bytes_or_as_an_mtu_size(fake):
    sent = []
    for mtu in (2048, MtuSize.MTU_2K, np.int64(2048)):
        qp = make_qp(fake, "INIT")
        qp.modify(full_attr(fake, next_state=QpState.RTR, path_mtu=mtu), RTR_MASK)
        sent.append(fake.mailboxes[-1][QPC + 8] >> 5)
        assert qp.query()[0].path_mtu == 2048
    assert sent == [4, 4, 4]  # IBV_MTU_2048


def test_connect_from_init_keeps_what_init_was_given(fake):
    a, b = two_qps(fake)
    a.to_init(remote_access=Access.REMOTE_READ)
    a.modify(QpAttr(pkey_index=3), M.PKEY_INDEX)
    assert a.state == QpState.INIT
    a.connect(b)
    attr, _ = a.query()
    assert (attr.current_state, attr.allow_remote_read, attr.allow_remote_write) == (QpState.RTS, True, False)
    assert (attr.allow_remote_atomic, attr.pkey_index) == (QpAtomicType.NONE, 3)
    other, _ = b.query()  # which was in RST
    assert (other.current_state, other.allow_remote_write, other.pkey_index) == (QpState.RTS, True, 0)


def test_what_connect_is_given_counts_in_init_too(fake):
    a, b = two_qps(fake)
    a.to_init(remote_access=Access.REMOTE_READ, pkey_index=3)
    a.connect(b, remote_access=Access.REMOTE_WRITE, pkey_index=5)
    attr, _ = a.query()
    assert (attr.allow_remote_read, attr.allow_remote_write, attr.pkey_index) == (False, True, 5)


def test_connect_starts_from_rst_or_init(fake):
    a, b = two_qps(fake)
    fake.set_state(b.qpn, ERR)
    with pytest.raises(BadStateError, match=rf"^QP {b.qpn:#x} of fake0 is in state ERR, .*reset\(\) it first"):
        a.connect(b)
    assert a.state == QpState.RST


def test_failed_connect_leaves_both_ends_in_rst(fake):
    a, b = two_qps(fake)
    fake.refused = {0x504}
    with pytest.raises(DriverError, match=r"^RTR2RTS_QP: refused"):
        a.connect(b)
    assert a.state == b.state == QpState.RST
    fake.refused = set()
    a.connect(b)
    assert b.state == QpState.RTS


@pytest.mark.parametrize("mtu", [0, 1500, 8192])
def test_connect_with_a_strange_mtu(fake, mtu):
    fake.active_mtu = 1 << 20
    a, _ = two_qps(fake)
    with pytest.raises(InvalidValueError, match=f"remote.mtu = {mtu}: it must be 256"):
        a.connect(QpEndpoint(1, GID, 0, mtu))
    assert a.state == QpState.RST


def test_endpoint_needs_a_gid(fake):
    a, _ = two_qps(fake)
    with pytest.raises(NotFoundError, match="port 1 of fake0 has no GID at index 3"):
        a.endpoint(sgid_index=3)
    with pytest.raises(InvalidValueError, match="GID index 300"):
        a.endpoint(sgid_index=300)
    with pytest.raises(InvalidValueError, match="port 2"):
        a.endpoint(port=2)
