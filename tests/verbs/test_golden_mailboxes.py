"""Every mailbox that is sent, byte for byte, against what data/golden_mailboxes.txt has worked out by hand."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from fake_device import ERR, INIT, RST, RTR, RTS, be
from golden import dwords, tables
from gpunetio.enums import (
    Access,
    AddrType,
    CqOverrun,
    MtuSize,
    QpAtomicType,
    QpAttrMask,
    QpSendDbrMode,
    QpState,
    QpType,
    SrqType,
    UarAllocationType,
)
from gpunetio.formats import commands
from gpunetio.formats.commands import Opcode
from gpunetio.memory import HostMemory
from gpunetio.nic.control.control_path import ControlPath
from gpunetio.providers.soft import SoftProvider
from gpunetio.verbs import QP, AhAttr, Context, QpAttr, QpEndpoint
from gpunetio.verbs import open as open_device
from recorder import FIRST, LIMIT, UDP_SPORT, Recorder

SQD = 5  # qpc.state of a drained send queue

GOLDEN = tables("golden_mailboxes.txt")
FIVE_AT_LEAST = ("CREATE", "RST2INIT", "INIT2INIT", "INIT2RTR", "RTR2RTS", "RTS2RTS")

Configuration = Callable[[Recorder, Context], Any]


def umem(ctx: Context, nbytes: int = 1 << 16):
    return ctx.register_umem(HostMemory(nbytes))


# --- queues


def cq(*args: Any, **values: Any) -> Configuration:
    return lambda device, ctx: ctx.create_cq(*args, **values)


def cq_in_two_umems(device: Recorder, ctx: Context):
    ctx.create_cq(
        16, external_umem=(umem(ctx), 0x1040), external_dbr_umem=(umem(ctx), 0x18), external_uar=ctx.create_uar()
    )


def cq_of_the_largest_size(device: Recorder, ctx: Context):
    large = umem(ctx, (1 << 28) + 4096)
    ctx.create_cq(1 << 22, external_umem=(large, 0), external_dbr_umem=(large, 1 << 28))


def cq_with_a_page(device: Recorder, ctx: Context):
    pages = [ctx.create_uar(kind) for kind in (UarAllocationType.BLUEFLAME, UarAllocationType.NONCACHE_DEDICATED)]
    ctx.create_cq(2, external_uar=pages[1])


CREATE_CQ = {
    "plain":     cq(64),
    "collapsed": cq(1, collapsed=True),
    "overrun":   cq(4096, overrun=CqOverrun.ENABLE),
    "both":      cq(32, collapsed=True, overrun=CqOverrun.ENABLE, external_datapath=True),
    "external":  cq_in_two_umems,
    "largest":   cq_of_the_largest_size,
    "own_page":  cq_with_a_page,
}


def qp(**values: Any) -> Configuration:
    """A queue pair with one CQ for both directions."""

    def create(device: Recorder, ctx: Context) -> QP:
        pd, completions = ctx.create_pd(), ctx.create_cq(4)
        return pd.create_qp(send_cq=completions, receive_cq=completions, **values)

    return create


def qp_with_two_cqs(device: Recorder, ctx: Context):
    ctx.create_pd().create_qp(
        sq_wr=10, rq_wr=5, receive_max_sges=3, user_index=0xABCDEF,
        send_cq=ctx.create_cq(4), receive_cq=ctx.create_cq(4),
    )


def qp_with_srq(device: Recorder, ctx: Context):
    pd, completions = ctx.create_pd(), ctx.create_cq(4)
    pd.create_qp(sq_wr=4, rq_wr=99, srq=pd.create_srq(8), send_cq=completions, receive_cq=completions)


def qp_in_two_umems(device: Recorder, ctx: Context):
    pd, completions = ctx.create_pd(), ctx.create_cq(4)
    pd.create_qp(
        sq_wr=2, send_cq=completions,
        external_umem=(umem(ctx), 0xC0), external_dbr_umem=(umem(ctx), 0x10), external_uar=ctx.create_uar(),
    )


def qp_in_one_umem(device: Recorder, ctx: Context):
    pd, completions, memory = ctx.create_pd(), ctx.create_cq(4), umem(ctx)
    pd.create_qp(
        sq_wr=2, send_cq=completions, external_umem=(memory, 0), external_dbr_umem=(memory, 0xFF8),
        core_direct_master=True, send_dbr_mode=QpSendDbrMode.NO_DBR_EXT,
    )


CREATE_QP_RINGS = {
    "sends":    qp(sq_wr=16),
    "both":     qp_with_two_cqs,
    "receives": qp(rq_wr=1),
    "passive":  lambda device, ctx: ctx.create_pd().create_qp(),
    "srq":      qp_with_srq,
    "sges":     qp(sq_wr=8, send_max_sges=6, rq_wr=32, receive_max_sges=16),
    "inline":   qp(sq_wr=3, max_inline_data=200, sq_sig_all=True, user_index=1),
}

CREATE_QP_MODES = {
    "uc":       qp(sq_wr=2, qp_type=QpType.UC),
    "master":   qp(sq_wr=2, core_direct_master=True),
    "payload":  qp(sq_wr=2, rq_wr=4, cqe_inline=True),
    "no_dbr":   qp(sq_wr=2, send_dbr_mode=QpSendDbrMode.NO_DBR_EXT),
    "emulated": qp(sq_wr=2, emulate_no_dbr_ext=True),
    "external": qp_in_two_umems,
    "one_umem": qp_in_one_umem,
}


def srq(srq_wr: int, **values: Any) -> Configuration:
    return lambda device, ctx: ctx.create_pd().create_srq(srq_wr, **values)


def srq_in_two_umems(device: Recorder, ctx: Context):
    ctx.create_pd().create_srq(31, external_umem=(umem(ctx), 0x2000), external_dbr_umem=(umem(ctx), 0x28))


def srq_of_an_imported_pd(device: Recorder, ctx: Context):
    memory = umem(ctx)
    ctx.import_pd(0x123456).create_srq(
        4, srq_type=SrqType.CONTIGUOUS, external_umem=(memory, 0x1000), external_dbr_umem=(memory, 8)
    )


CREATE_RMP = {
    "plain":      srq(15),
    "smallest":   srq(1),
    "sges":       srq(100, receive_max_sges=7),
    "contiguous": srq(64, srq_type=SrqType.CONTIGUOUS, external_datapath=True),
    "wide":       srq(9, receive_max_sges=3, srq_type=SrqType.CONTIGUOUS, external_datapath=True),
    "external":   srq_in_two_umems,
    "imported":   srq_of_an_imported_pd,
}

# --- transitions

GID_IPV4 = bytes.fromhex("00000000 00000000 0000ffff 0a010203")
GID_IPV6 = bytes.fromhex("20010db8 00112233 44556677 8899aabb")
GID_ROCE_V1 = bytes.fromhex("fe800000 00000000 021b44ff fe112233")
GID_IB = bytes.fromhex("fe800000 00000000 0002c903 00a1b2c3")
PEER = QpEndpoint(0x222333, bytes.fromhex("00000000 00000000 0000ffff 0a000002"), 0, 1024, 0x777)


def transition(before: int, after: QpState, mask: str, qp_type: QpType = QpType.RC, **values: Any) -> Configuration:
    """A modify of a queue pair that the device has in the state `before`, with these attributes in the mask."""

    def modify(device: Recorder, ctx: Context) -> None:
        made = ctx.create_pd().create_qp(qp_type=qp_type)
        device.state = before
        bits = QpAttrMask.NEXT_STATE
        for name in mask.split():
            bits |= QpAttrMask[name]
        made.modify(QpAttr(next_state=after, **values), bits)

    return modify


def on(configuration: Configuration, **settings: Any) -> Configuration:
    """The same, on a device that is different."""

    def configure(device: Recorder, ctx: Context) -> None:
        vars(device).update(settings)
        configuration(device, ctx)

    return configure


def connect(device: Recorder, ctx: Context) -> None:
    qp(sq_wr=1)(device, ctx).connect(
        PEER, port=2, pkey_index=3, psn=0xFEDCBA, remote_access=Access.REMOTE_READ | Access.REMOTE_ATOMIC,
        atomic_type=QpAtomicType.UP_TO_8BYTES, max_rd_atomic=8, retry_cnt=5, rnr_retry=4, ack_timeout=19,
        min_rnr_timer=9, traffic_class=0x20, hop_limit=32,
    )


NEEDED = "PKEY_INDEX PORT_NUM ALLOW_REMOTE_WRITE ALLOW_REMOTE_READ"
to_init = partial(transition, RST, QpState.INIT, NEEDED)
to_init_with_atomics = partial(transition, RST, QpState.INIT, f"{NEEDED} ATOMIC_MODE")

RST2INIT = {
    "nothing":  to_init(),
    "write":    to_init(pkey_index=0x12, allow_remote_write=True),
    "read":     to_init(port_num=2, allow_remote_read=True),
    "atomics":  to_init_with_atomics(pkey_index=5, allow_remote_atomic=QpAtomicType.IB_SPEC),
    "all":      to_init_with_atomics(
        pkey_index=0x7F, port_num=2, allow_remote_write=True, allow_remote_read=True,
        allow_remote_atomic=QpAtomicType.UP_TO_8BYTES,
    ),
    "unmasked": to_init(allow_remote_atomic=QpAtomicType.UP_TO_8BYTES, rq_psn=1, min_rnr_timer=9, path_mtu=4),
    "connect":  connect,
}

in_init = partial(transition, INIT, QpState.INIT)

INIT2INIT = {
    "nothing":   in_init("", pkey_index=1, port_num=2, allow_remote_write=True),
    "pkey":      in_init("PKEY_INDEX", pkey_index=0x7E, allow_remote_read=True),
    "port":      in_init("PORT_NUM", port_num=2),
    "write":     in_init("ALLOW_REMOTE_WRITE", allow_remote_write=True),
    "withdrawn": in_init("ALLOW_REMOTE_WRITE ALLOW_REMOTE_READ"),
    "atomics":   in_init("ATOMIC_MODE", allow_remote_atomic=QpAtomicType.UP_TO_8BYTES),
    "all":       in_init(
        f"{NEEDED} ATOMIC_MODE CURRENT_STATE", current_state=QpState.INIT, pkey_index=1, port_num=1,
        allow_remote_write=True, allow_remote_read=True, allow_remote_atomic=QpAtomicType.IB_SPEC,
    ),
}

PATH = "RQ_PSN DEST_QP_NUM PATH_MTU AH_ATTR"
to_rtr = partial(transition, INIT, QpState.RTR, f"{PATH} MIN_RNR_TIMER")
IPV4 = AhAttr(gid=GID_IPV4)

INIT2RTR = {
    "ipv4": to_rtr(
        rq_psn=0xABCDEF, dest_qp_num=0x123456, path_mtu=MtuSize.MTU_1K, min_rnr_timer=12,
        ah_attr=AhAttr(gid=GID_IPV4, sgid_index=3, hop_limit=64, traffic_class=0b101101_10, dlid=9, sl=5),
    ),
    "ipv6": to_rtr(
        dest_qp_num=0xFFFFFF, path_mtu=MtuSize.MTU_4K, min_rnr_timer=31,
        ah_attr=AhAttr(gid=GID_IPV6, addr_type=AddrType.IPv6, sgid_index=0xFE, static_rate=2, traffic_class=0xFF),
    ),
    "roce_v1": on(to_rtr(
        rq_psn=1, dest_qp_num=1, path_mtu=MtuSize.MTU_512, min_rnr_timer=0,
        ah_attr=AhAttr(gid=GID_ROCE_V1, addr_type=AddrType.IPv6, sgid_index=6, hop_limit=1, traffic_class=0xFF),
    ), roce_version=0),
    "ib_grh": on(to_rtr(
        rq_psn=0x800000, dest_qp_num=2, path_mtu=MtuSize.MTU_2K,
        ah_attr=AhAttr(
            gid=GID_IB, addr_type=AddrType.IB_GRH, dlid=0xBEEF, sl=5, sgid_index=1, static_rate=7, hop_limit=9,
            traffic_class=0x77,
        ),
    ), ethernet=False),
    "ib_no_grh": on(to_rtr(
        rq_psn=0x7F, dest_qp_num=3, path_mtu=MtuSize.MTU_256,
        ah_attr=AhAttr(
            gid=GID_IB, addr_type=AddrType.IB_NO_GRH, dlid=7, sl=15, sgid_index=1, static_rate=8, hop_limit=9,
            traffic_class=0x12,
        ),
    ), ethernet=False),
    "rights": transition(
        INIT, QpState.RTR,
        f"{PATH} MIN_RNR_TIMER PKEY_INDEX ALLOW_REMOTE_WRITE ALLOW_REMOTE_READ ATOMIC_MODE MAX_DEST_RD_ATOMIC",
        rq_psn=2, dest_qp_num=4, path_mtu=MtuSize.MTU_4K, ah_attr=IPV4, pkey_index=42, allow_remote_write=True,
        allow_remote_read=True, allow_remote_atomic=QpAtomicType.IB_SPEC, max_dest_rd_atomic=16,
    ),
    "uc": transition(
        INIT, QpState.RTR, PATH, QpType.UC,
        rq_psn=3, dest_qp_num=5, path_mtu=MtuSize.MTU_4K, ah_attr=IPV4, min_rnr_timer=9, max_dest_rd_atomic=8,
    ),
    "connect": connect,
}

to_rts = partial(transition, RTR, QpState.RTS)
SENDING = "SQ_PSN ACK_TIMEOUT RETRY_CNT RNR_RETRY"

RTR2RTS = {
    "plain":     to_rts(SENDING, sq_psn=0x123456, ack_timeout=14, retry_cnt=7, rnr_retry=1),
    "impatient": to_rts(SENDING, sq_psn=1, ack_timeout=0, retry_cnt=0, rnr_retry=0, min_rnr_timer=5, max_rd_atomic=8),
    "options":   to_rts(
        f"{SENDING} MIN_RNR_TIMER ALLOW_REMOTE_WRITE ATOMIC_MODE MAX_QP_RD_ATOMIC",
        sq_psn=0x800000, ack_timeout=31, retry_cnt=1, rnr_retry=6, min_rnr_timer=30, allow_remote_write=True,
        allow_remote_read=True, allow_remote_atomic=QpAtomicType.UP_TO_8BYTES, max_rd_atomic=8,
    ),
    "reads":     to_rts(
        f"{SENDING} MAX_QP_RD_ATOMIC", sq_psn=0xFFFFFF, ack_timeout=18, retry_cnt=7, rnr_retry=7, max_rd_atomic=16
    ),
    "long_psn":  to_rts(SENDING, sq_psn=0x1_ABCDEF, ack_timeout=1, retry_cnt=1, rnr_retry=1),  # is cut, and logged
    "uc":        to_rts("SQ_PSN", QpType.UC, sq_psn=2, ack_timeout=14),
    "connect":   connect,
}

in_rts = partial(transition, RTS, QpState.RTS)
MOVED = AhAttr(gid=GID_IPV4, sgid_index=7, traffic_class=0b101110_01, hop_limit=3, static_rate=4)

MOVED_V1 = AhAttr(gid=GID_ROCE_V1, sgid_index=0xFE, traffic_class=0xFF)
MOVED_IB = AhAttr(gid=GID_IB, addr_type=AddrType.IB_GRH, sgid_index=4, dlid=8, traffic_class=0xFF)

def asked(question: Callable[[QP], Any]) -> Configuration:
    return lambda device, ctx: question(ctx.create_pd().create_qp())


RTS2RTS = {
    "nothing":   in_rts("", min_rnr_timer=9, allow_remote_write=True),
    "rights":    in_rts("ALLOW_REMOTE_WRITE ALLOW_REMOTE_READ", allow_remote_write=True, allow_remote_read=True),
    "withdrawn": in_rts("ALLOW_REMOTE_WRITE ALLOW_REMOTE_READ ATOMIC_MODE"),
    "atomics":   in_rts("ATOMIC_MODE", allow_remote_atomic=QpAtomicType.IB_SPEC),
    "timer":     in_rts("MIN_RNR_TIMER", min_rnr_timer=31),
    "roce_v2":   in_rts("AH_ATTR", ah_attr=MOVED),
    "roce_v1":   on(in_rts("AH_ATTR", ah_attr=MOVED_V1), roce_version=0),
    "no_dscp":   on(in_rts("AH_ATTR", ah_attr=AhAttr(gid=GID_IPV4, sgid_index=1, traffic_class=8)), rts2rts_dscp=False),
    "ib":        on(in_rts("AH_ATTR", ah_attr=MOVED_IB), ethernet=False),
    "udp_sport": asked(lambda qp: qp.modify_udp_sport(UDP_SPORT)),
}

TO_SQD = {"plain": transition(RTS, QpState.SQD, "")}
FROM_SQD = {
    "plain": transition(SQD, QpState.RTS, ""),
    "timer": transition(SQD, QpState.RTS, "MIN_RNR_TIMER", min_rnr_timer=31),
}
TO_ERR = {
    "from_rst": transition(RST, QpState.ERR, ""),
    "from_rts": transition(RTS, QpState.ERR, "CURRENT_STATE", current_state=QpState.RTS),
}
TO_RST = {"from_rts": transition(RTS, QpState.RST, ""), "from_err": transition(ERR, QpState.RST, "")}

# --- queries, and what is changed of a receive pool


def limited(limit: int) -> Configuration:
    return lambda device, ctx: ctx.create_pd().create_srq(0x7FFF).modify(srq_limit=limit)


def pool_of_known_limit(device: Recorder, ctx: Context) -> None:
    assert ctx.create_pd().create_srq(4).query().srq_limit == LIMIT


QUERY_QP = {"state": asked(lambda qp: qp.state), "all": asked(QP.query)}
MODIFY_RMP = {"limit": limited(5), "none": limited(0), "all": limited(0x4000)}
QUERY_RMP = {"query": pool_of_known_limit}
QUERY_ROCE_ADDRESS = {
    "first": to_rtr(ah_attr=IPV4),
    "last": to_rtr(ah_attr=AhAttr(gid=GID_IPV4, sgid_index=0xFE)),
    "update": in_rts("AH_ATTR", ah_attr=MOVED),
}


def capabilities(number: int) -> Configuration:
    """The query of that number, of those that become one answer."""

    def query(device: Recorder, ctx: Context) -> None:
        ctx.query_device()
        device.commands = device.commands[number : number + 1]

    return query


QUERY_HCA_CAP = {"general": capabilities(0), "roce": capabilities(1), "general_2": capabilities(2)}


class StubNic:
    """A software NIC that knows its commands, and carries them out without a look at them."""

    name = "stub0"

    def __init__(self, device: Recorder, control: ControlPath):
        self._device, self.control = device, control

    def execute(self, mailbox: bytes, out_size: int, command: object = None) -> tuple[bytes, str]:
        self._device.commands.append((mailbox, out_size))
        kind = {0x400: "cq", 0x500: "qp", 0x90C: "rmp"}.get(be(mailbox, 0, 2))
        number = FIRST[kind] if kind else 0
        return bytes(9) + number.to_bytes(3, "big") + bytes(4), ""


def destroyed(create: int) -> Configuration:
    """Destroys are commands in the software NIC only: a card gets them from its driver."""

    def destroy(device: Recorder, ctx: Context) -> None:
        with open_device("soft0") as real:
            provider = SoftProvider(StubNic(device, real.provider.nic.control))
            handle, _ = provider.devx_obj_create(create.to_bytes(2, "big") + bytes(270), 16)
            provider.devx_obj_destroy(handle)

    return destroy


def resized(cqe: int, **values: Any) -> Configuration:
    return lambda device, ctx: ctx.create_cq(64, **values).resize(cqe)


MODIFY_CQ = {"small": resized(3), "large": resized(1000, cqe_size=128)}

CONFIGURATIONS = {
    "CREATE_CQ": CREATE_CQ,
    "MODIFY_CQ": MODIFY_CQ,
    "CREATE_QP rings": CREATE_QP_RINGS,
    "CREATE_QP modes": CREATE_QP_MODES,
    "CREATE_RMP": CREATE_RMP,
    "RST2INIT_QP": RST2INIT,
    "INIT2INIT_QP": INIT2INIT,
    "INIT2RTR_QP": INIT2RTR,
    "RTR2RTS_QP": RTR2RTS,
    "RTS2RTS_QP": RTS2RTS,
    "RTS2SQD_QP": TO_SQD,
    "SQD2RTS_QP": FROM_SQD,
    "QP_2ERR": TO_ERR,
    "QP_2RST": TO_RST,
    "QUERY_QP": QUERY_QP,
    "MODIFY_RMP": MODIFY_RMP,
    "QUERY_RMP": QUERY_RMP,
    "QUERY_HCA_CAP": QUERY_HCA_CAP,
    "QUERY_ROCE_ADDRESS": QUERY_ROCE_ADDRESS,
    "DESTROY_CQ": {"destroy": destroyed(0x400)},
    "DESTROY_QP": {"destroy": destroyed(0x500)},
    "DESTROY_RMP": {"destroy": destroyed(0x90C)},
}


@pytest.mark.parametrize(
    "table, name",
    [pytest.param(table, name, id=f"{table}-{name}") for table, names in CONFIGURATIONS.items() for name in names],
)
def test_mailbox(table, name):
    golden = GOLDEN[table]
    expected = golden.bytes_of[name]
    device = Recorder()
    with Context(device) as ctx:
        CONFIGURATIONS[table][name](device, ctx)
        (sent,) = device.answers_to(be(expected, 0, 2))
    mailbox, answer = sent
    assert dwords(mailbox) == dwords(expected)
    assert answer == golden.answer


def test_every_command_has_its_table():
    opcodes = {be(mailbox, 0, 2) for golden in GOLDEN.values() for mailbox in golden.bytes_of.values()}
    ours = {opcode for opcode in Opcode if hasattr(commands, f"{opcode.name}_IN")}  # Ethernet is of another library
    others = {Opcode.QUERY_HCA_VPORT_CONTEXT, Opcode.QUERY_LAG, Opcode.CREATE_MKEY, Opcode.DESTROY_MKEY}
    assert opcodes == ours - others  # none here asks


def test_every_column_has_its_configuration():
    assert {name: list(golden.bytes_of) for name, golden in GOLDEN.items()} == {
        name: list(configurations) for name, configurations in CONFIGURATIONS.items()
    }
    for name, golden in GOLDEN.items():
        if name.startswith(FIVE_AT_LEAST):
            assert len(set(golden.bytes_of.values())) >= 5, name
