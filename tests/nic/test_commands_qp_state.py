"""States of a queue pair in the software NIC: every transition, what it carries, and how it is refused."""

from collections.abc import Iterator
from typing import Any

import pytest

from command_rig import ERR, GID, INIT, PATH, RST, RTR, RTS, Device
from gpunetio.enums import Access
from gpunetio.errors import DriverError, TimedOutError
from gpunetio.formats.commands import Opcode, OptParam, PrmMtu, Status
from gpunetio.formats.contexts import QPC_EXT
from gpunetio.nic.control.syndromes import CommandSyndrome
from gpunetio.nic.state.wire import WIRE
from gpunetio.nic.transport.wire_kinds import PIPES, UDP
from nic_rig import view


def wire_kind(address: int) -> int:
    """What the wire of a QP's row is made of."""
    return int(view(int(address), WIRE.size, WIRE.dtype)[0]["kind"])


@pytest.fixture
def device() -> Iterator[Device]:
    opened = Device()
    yield opened
    opened.close()


MOVES = {
    Opcode.RST2INIT_QP: (RST, INIT), Opcode.INIT2INIT_QP: (INIT, INIT), Opcode.INIT2RTR_QP: (INIT, RTR),
    Opcode.RTR2RTS_QP: (RTR, RTS), Opcode.RTS2RTS_QP: (RTS, RTS),
}
GOOD = {  # contexts that each of them takes
    Opcode.RST2INIT_QP: {PATH: {"vhca_port_num": 1}},
    Opcode.INIT2RTR_QP: {"mtu": 5, PATH: {"rgid_rip": GID}},
}


@pytest.mark.parametrize("state", [RST, INIT, RTR, RTS, ERR], ids=lambda state: state.name)
@pytest.mark.parametrize("opcode", [*MOVES, Opcode.QP_2ERR, Opcode.QP_2RST], ids=lambda opcode: opcode.name)
def test_every_transition_from_every_state(device, state, opcode):
    qp = device.qp()
    device.bring(qp, state)
    assert device.state(qp) == state

    def move() -> None:
        device.modify(opcode, qp, qpc=GOOD.get(opcode))

    before, after = MOVES.get(opcode, (state, ERR if opcode == Opcode.QP_2ERR else RST))
    if state == before:
        move()
        assert device.state(qp) == after
    else:
        device.refuses(
            move, Status.BAD_QP_STATE, CommandSyndrome.QP_STATE,
            f"{opcode.name}: QP {qp[1]:#x} is in {state.name}, not in {before.name}",
        )
        assert device.state(qp) == state


def test_query_after_each_transition(device):
    _, cqn = device.cq()
    created = {"no_sq": 0, "log_sq_size": 2, "cqn_snd": cqn, "user_index": 5}
    qp = device.qp(created)
    blank = device.query(qp[1])
    assert blank["mtu"] == PrmMtu.MTU_256  # DOCA's export, right after the creation, refuses 0
    row = device.nic.qps[qp[1]]

    def now(**fields: Any) -> dict[str, Any]:
        context = device.query(qp[1])
        assert {name: context[name] for name in created} == created
        return {name: context[name] for name in fields}

    first = {"state": INIT, "pm_state": 3, "rwe": 1, "rre": 0, "rae": 1, "atomic_mode": 1}
    device.init(qp, rwe=1, rae=1, atomic_mode=1, mtu=5, remote_qpn=7)
    assert now(**first) == first
    assert row["rights"] == Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
    assert now(mtu=0, remote_qpn=0) == {"mtu": PrmMtu.MTU_256, "remote_qpn": 0}  # RST2INIT does not carry them

    path = {
        "tclass": 1, "rlid": 2, "sl": 3, "stat_rate": 4, "rgid_rip": GID, "hop_limit": 6, "src_addr_index": 1,
        "rmac_47_32": 8, "rmac_31_0": 9, "grh": 1, "udp_sport": 0xC123, "dscp": 11, "flow_label": 0xFFFFF,
    }
    second = {
        "state": RTR, "next_rcv_psn": 0xABCDE, "remote_qpn": qp[1], "log_msg_max": 30, "mtu": 2, "min_rnr_nak": 17,
        "log_rra_max": 4,
    }
    device.rtr(qp, path, **{name: value for name, value in second.items() if name != "state"}, rre=1, retry_count=3)
    assert now(**second) == second
    assert now(**first | second) == first | second
    got = device.query(qp[1])[PATH]
    assert {name: got[name] for name in path} == path
    assert got["vhca_port_num"] == 1
    assert now(retry_count=0) == {"retry_count": 0}
    assert (row["mtu"], row["rq_psn"], row["remote_qpn"], row["min_rnr"]) == (512, 0xABCDE, qp[1], 3_840_000)
    assert (row["remote_row"], row["wire"]) == (device.nic.qps.row_address(qp[1]), 0)

    third = {"state": RTS, "next_send_psn": 0x12345, "retry_count": 6, "rnr_retry": 5, "log_sra_max": 3,
             "log_ack_req_freq": 2}
    device.rts(qp, {"ack_timeout": 13}, **{name: value for name, value in third.items() if name != "state"}, rwe=0)
    assert now(**first | second | third) == first | second | third
    assert device.query(qp[1])[PATH]["ack_timeout"] == 13
    assert (row["timeout_ns"], row["retry_cnt"], row["rnr_retry"], row["sq_psn"]) == (4096 << 13, 6, 5, 0x12345)

    device.modify(Opcode.QP_2ERR, qp)
    assert now(**first | second | third | {"state": ERR}) == first | second | third | {"state": ERR}

    device.modify(Opcode.QP_2RST, qp)
    assert device.query(qp[1]) == blank
    assert (row["rights"], row["remote_qpn"], row["remote_row"], row["mtu"], row["timeout_ns"]) == (0,) * 5
    device.bring(qp, RTS)


def test_messages_of_more_than_a_gigabyte(device):
    qp = device.qp()
    device.init(qp)
    device.refuses(
        lambda: device.rtr(qp, log_msg_max=31), Status.BAD_PARAM, CommandSyndrome.MSG_MAX, "log_msg_max 31 is above 30",
    )
    device.rtr(qp, log_msg_max=0)
    assert device.nic.qps[qp[1]]["msg_max"] == 1


@pytest.mark.parametrize(("code", "ms"), [(0, 655.36), (1, 0.01), (7, 0.12), (20, 10.24), (31, 491.52)])
def test_rnr_timer(device, code, ms):
    qp = device.qp()
    device.init(qp)
    device.rtr(qp, min_rnr_nak=code)
    assert device.nic.qps[qp[1]]["min_rnr"] == round(ms * 1e6)


def test_no_timeout(device):
    qp = device.qp()
    device.bring(qp, RTR)
    device.rts(qp, {"ack_timeout": 0})
    assert device.nic.qps[qp[1]]["timeout_ns"] == 0


def test_error_twice(device):
    qp = device.qp()
    device.bring(qp, ERR)
    device.modify(Opcode.QP_2ERR, qp)
    assert device.state(qp) == ERR


OPTIONAL = {  # bit → fields that it makes a command carry
    OptParam.RRE: {"rre": 1}, OptParam.RWE: {"rwe": 1}, OptParam.RAE: {"rae": 1, "atomic_mode": 3},
    OptParam.PKEY_INDEX: {PATH: {"pkey_index": 0}}, OptParam.PORT_NUM: {PATH: {"vhca_port_num": 1}},
    OptParam.MIN_RNR_NAK: {"min_rnr_nak": 9}, OptParam.SGID_INDEX: {PATH: {"src_addr_index": 1}},
    OptParam.DSCP: {PATH: {"dscp": 33}},
}
ALLOWED = {
    Opcode.RST2INIT_QP: "",
    Opcode.INIT2INIT_QP: "RRE RWE RAE PKEY_INDEX PORT_NUM",
    Opcode.INIT2RTR_QP: "RRE RWE RAE PKEY_INDEX",
    Opcode.RTR2RTS_QP: "RRE RWE RAE MIN_RNR_NAK",
    Opcode.RTS2RTS_QP: "RRE RWE RAE MIN_RNR_NAK SGID_INDEX DSCP",
}


@pytest.mark.parametrize("opcode", MOVES, ids=lambda opcode: opcode.name)
@pytest.mark.parametrize("bit", OPTIONAL, ids=lambda bit: bit.name)
def test_optional_parameters(device, opcode, bit):
    qp = device.qp()
    device.bring(qp, MOVES[opcode][0])
    good = GOOD.get(opcode, {})
    extra = OPTIONAL[bit]
    qpc = {**good, **extra, PATH: {**good.get(PATH, {}), **extra.get(PATH, {})}}
    if bit.name not in ALLOWED[opcode].split():
        device.refuses(
            lambda: device.modify(opcode, qp, bit, qpc), Status.BAD_PARAM, CommandSyndrome.OPT_PARAM,
            f"{opcode.name} cannot carry optional parameters {int(bit):#x}", bit.name,
        )
        return
    device.modify(opcode, qp, bit, qpc)
    context = device.query(qp[1])
    flat = {**context, **context[PATH]}
    for name, value in {**extra, **extra.get(PATH, {})}.items():
        assert name == PATH or flat[name] == value, name


@pytest.mark.parametrize("bit", OPTIONAL, ids=lambda bit: bit.name)
def test_what_no_bit_names_is_not_carried(device, bit):
    qp = device.qp()
    device.bring(qp, RTS)
    before = device.query(qp[1])
    device.modify(Opcode.RTS2RTS_QP, qp, 0, OPTIONAL[bit])
    assert device.query(qp[1]) == before


def test_rights_change_on_the_way(device):
    qp = device.qp()
    device.bring(qp, RTS)
    row = device.nic.qps[qp[1]]
    device.modify(Opcode.RTS2RTS_QP, qp, OptParam.RRE | OptParam.RAE, {"rre": 1, "rae": 1, "atomic_mode": 0})
    assert row["rights"] == Access.REMOTE_READ  # atomics need a mode
    device.modify(Opcode.RTS2RTS_QP, qp, OptParam.RRE | OptParam.RAE, {"rre": 0, "rae": 1, "atomic_mode": 1})
    assert row["rights"] == Access.REMOTE_ATOMIC


@pytest.mark.parametrize("bit", [0, 5, 24, 31])
def test_unknown_optional_parameters(device, bit):
    qp = device.qp()
    device.bring(qp, RTS)
    device.refuses(
        lambda: device.modify(Opcode.RTS2RTS_QP, qp, 1 << bit | OptParam.RRE), Status.BAD_PARAM,
        CommandSyndrome.OPT_PARAM, f"RTS2RTS_QP cannot carry optional parameters {1 << bit:#x}",
    )


@pytest.mark.parametrize(("opcode", "state"), [(Opcode.INIT2INIT_QP, INIT), (Opcode.RTS2RTS_QP, RTS)])
def test_extended_optional_parameters(device, opcode, state):
    qp = device.qp()
    device.bring(qp, state)
    device.refuses(
        lambda: device.modify(opcode, qp, qpc_ext=1, opt_param_mask_95_32=1 << 4),
        Status.BAD_PARAM, CommandSyndrome.OPT_PARAM, f"{1 << 36:#x}",
    )
    device.modify(opcode, qp, qpc_ext=0, opt_param_mask_95_32=1 << 4)  # then the field is not there
    device.modify(opcode, qp, qpc_ext=1)


@pytest.mark.parametrize("created", [0, 1])
def test_mmo_in_the_extension(device, created):
    """It is set by CREATE_QP or INIT2INIT, and 2RST returns to what CREATE_QP said."""
    qp = device.qp(qpc_ext=1, pas=QPC_EXT.pack(mmo=created))
    row = device.nic.qps[qp[1]]
    device.init(qp)
    assert row["mmo"] == created
    for mmo in (1, 0, 1):
        device.modify(Opcode.INIT2INIT_QP, qp, qpc_ext=1, opt_param_mask_95_32=1 << 3, qpc_data_ext={"mmo": mmo})
        assert row["mmo"] == mmo
    device.modify(Opcode.INIT2INIT_QP, qp, qpc_ext=1, qpc_data_ext={"mmo": 0})  # the mask does not name it
    device.modify(Opcode.INIT2INIT_QP, qp, opt_param_mask_95_32=1 << 3, qpc_data_ext={"mmo": 0})
    assert row["mmo"] == 1
    device.modify(Opcode.QP_2RST, qp)
    assert row["mmo"] == created


def test_mmo_is_refused(device):
    short = bytes(QPC_EXT.size - 1)
    device.refuses(lambda: device.qp(qpc_ext=1, pas=short), Status.BAD_INPUT_LEN, CommandSyndrome.SHORT_INPUT,
                   "CREATE_QP with qpc_ext takes 464 bytes, the input has 463")
    device.refuses(lambda: device.qp({"st": 1}, qpc_ext=1, pas=QPC_EXT.pack(mmo=1)), Status.BAD_PARAM,
                   CommandSyndrome.SERVICE_TYPE, "mmo on a queue pair of service type 1")
    uc = device.qp({"st": 1})
    device.init(uc)
    fields = {"qpc_ext": 1, "opt_param_mask_95_32": 1 << 3, "qpc_data_ext": {"mmo": 1}}
    device.refuses(lambda: device.modify(Opcode.INIT2INIT_QP, uc, **fields), Status.BAD_PARAM,
                   CommandSyndrome.SERVICE_TYPE, "mmo on a queue pair of service type 1")


@pytest.mark.parametrize(
    ("path", "status", "syndrome", "words"),
    [
        ({"vhca_port_num": 0}, Status.BAD_PARAM, CommandSyndrome.PORT_NUMBER, "port 0 does not exist"),
        ({"vhca_port_num": 2}, Status.BAD_PARAM, CommandSyndrome.PORT_NUMBER, "port 2 does not exist"),
        ({"pkey_index": 1}, Status.BAD_INDEX, CommandSyndrome.PKEY_INDEX, "pkey_index 1 is outside the table of 1"),
    ],
)
def test_port_and_pkey(device, path, status, syndrome, words):
    qp = device.qp()
    device.refuses(lambda: device.init(qp, path), status, syndrome, "RST2INIT_QP failed", words)
    device.init(qp)
    bit = OptParam.PORT_NUM if "vhca_port_num" in path else OptParam.PKEY_INDEX
    device.refuses(lambda: device.modify(Opcode.INIT2INIT_QP, qp, bit, {PATH: path}), status, syndrome, words)


@pytest.mark.parametrize("mtu", [0, 6, 7])
def test_bad_mtu(device, mtu):
    qp = device.qp()
    device.init(qp)
    device.refuses(lambda: device.rtr(qp, mtu=mtu), Status.BAD_PARAM, CommandSyndrome.MTU, f"MTU code {mtu} is not 1")
    assert device.state(qp) == INIT


@pytest.mark.parametrize("index", [2, 15, 16, 255])
def test_bad_source_address(device, index):
    qp = device.qp()
    device.init(qp)
    words = f"src_addr_index {index}: the GID table has no such entry"
    device.refuses(
        lambda: device.rtr(qp, {"src_addr_index": index}), Status.BAD_INDEX, CommandSyndrome.NO_SUCH_GID, words
    )
    device.rtr(qp)
    device.rts(qp)
    device.refuses(
        lambda: device.modify(Opcode.RTS2RTS_QP, qp, OptParam.SGID_INDEX, {PATH: {"src_addr_index": index}}),
        Status.BAD_INDEX, CommandSyndrome.NO_SUCH_GID, words,
    )


@pytest.mark.host_memory
def test_peer_on_another_nic_and_nowhere(device):
    other = Device("soft3")
    try:
        qp = device.qp()
        device.init(qp)
        device.rtr(qp, {"rgid_rip": GID[:15] + b"\x04"}, remote_qpn=77)
        row = device.nic.qps[qp[1]]
        assert row["remote_row"] == 0
        assert wire_kind(row["wire"]) == PIPES
        lost = device.qp()
        device.init(lost)
        device.rtr(lost, {"rgid_rip": GID[:15] + b"\x05"})
        row = device.nic.qps[lost[1]]
        assert row["remote_row"] == 0
        assert wire_kind(row["wire"]) == UDP  # whoever has no NIC on this host may have one on another
    finally:
        other.close()


# --- the engine does not follow


def test_engine_that_does_not_answer(device, monkeypatch):
    def post(*args, **kwargs):
        raise TimedOutError("the engine is stuck")

    qp = device.qp()
    device.bring(qp, RTS)
    monkeypatch.setattr(device.nic.engine, "post", post)
    for call in (
        device.cq, device.qp, lambda: device.modify(Opcode.QP_2RST, qp), lambda: device.modify(Opcode.QP_2ERR, qp),
        lambda: device.modify(Opcode.RTS2RTS_QP, qp, OptParam.RRE, {"rre": 1}),
        lambda: device.provider.devx_obj_destroy(qp[0]),
    ):
        device.refuses(call, Status.INTERNAL_ERR, CommandSyndrome.ENGINE_TIMEOUT, "the engine is stuck")
    monkeypatch.undo()
    device.modify(Opcode.QP_2RST, qp)


@pytest.mark.host_memory  # it writes what only the engine does
def test_error_between_look_and_change(device, monkeypatch):
    qp = device.qp()
    device.bring(qp, RTS)
    post = device.nic.engine.post

    def late(*args, **kwargs):
        device.nic.qps[qp[1]]["state"] = ERR  # what the engine does when a WQE fails
        return post(*args, **kwargs)

    monkeypatch.setattr(device.nic.engine, "post", late)
    with pytest.raises(DriverError, match=f"RTS2RTS_QP: QP {qp[1]:#x} is in ERR, not in RTS") as caught:
        device.modify(Opcode.RTS2RTS_QP, qp, OptParam.RRE, {"rre": 1})
    assert (caught.value.status, caught.value.syndrome) == (Status.BAD_QP_STATE, CommandSyndrome.QP_STATE)
    assert device.query(qp[1])["rre"] == 0
