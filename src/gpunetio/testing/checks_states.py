"""The state machine of a queue pair: its path, the attributes of each step, queries, and what each state allows."""

from __future__ import annotations

from dataclasses import replace

from ..enums import Access, LinkLayer, MtuSize, QpAtomicType, QpAttrMask, QpState, WcStatus, WrOpcode
from ..errors import BadStateError, DocaError, DriverError, InvalidValueError
from ..verbs import QP, AhAttr, QpAttr, RecvWr, SendWr
from .kit import check
from .rig import Rig, refused, same, true

_M = QpAttrMask
_RST, _INIT, _RTR, _RTS, _ERR = QpState.RST, QpState.INIT, QpState.RTR, QpState.RTS, QpState.ERR
_RIGHTS = _M.ALLOW_REMOTE_WRITE | _M.ALLOW_REMOTE_READ
_NEEDED = {
    (_RST, _INIT): _M.PKEY_INDEX | _M.PORT_NUM | _RIGHTS,
    (_INIT, _INIT): _M(0),
    (_INIT, _RTR): _M.RQ_PSN | _M.DEST_QP_NUM | _M.PATH_MTU | _M.AH_ATTR | _M.MIN_RNR_TIMER,
    (_RTR, _RTS): _M.SQ_PSN | _M.ACK_TIMEOUT | _M.RETRY_CNT | _M.RNR_RETRY,
    (_RTS, _RTS): _M(0),
}
_OPTIONAL = {
    (_RST, _INIT): _M.ATOMIC_MODE,
    (_INIT, _INIT): _M.PKEY_INDEX | _M.PORT_NUM | _RIGHTS | _M.ATOMIC_MODE,
    (_INIT, _RTR): _M.PKEY_INDEX | _RIGHTS | _M.MAX_DEST_RD_ATOMIC | _M.ATOMIC_MODE,
    (_RTR, _RTS): _M.MIN_RNR_TIMER | _M.ALLOW_REMOTE_WRITE | _M.MAX_QP_RD_ATOMIC | _M.ATOMIC_MODE,
    (_RTS, _RTS): _M.MIN_RNR_TIMER | _RIGHTS | _M.AH_ATTR | _M.ATOMIC_MODE,
}
_PATH = (_INIT, _RTR, _RTS)
_STATES = (_RST, *_PATH, _ERR)  # those of DOCA Verbs


def _attr(qp: QP, peer: QP | None = None, **values: object) -> QpAttr:
    """Return attributes that connect a queue pair to a peer, or to itself."""
    end, port = (peer or qp).endpoint(), qp.ctx.query_port()
    attr = QpAttr(
        dest_qp_num=end.qpn, rq_psn=end.psn, sq_psn=qp.psn, path_mtu=min(port.active_mtu, end.mtu),
        ah_attr=AhAttr(gid=end.gid, dlid=end.lid), allow_remote_write=True,
    )
    return replace(attr, **values)


def _move(qp: QP, to: QpState, mask: QpAttrMask | None = None, peer: QP | None = None, **values: object) -> None:
    """Make one transition, with the attributes that it needs."""
    needed = _NEEDED.get((qp.state, to), _M(0)) if mask is None else mask
    qp.modify(_attr(qp, peer, next_state=to, **values), needed | _M.NEXT_STATE)


def _in_state(rig: Rig, state: QpState) -> QP:
    """Return a queue pair in this state."""
    qp = rig.side(rig.near, size=64).qp
    for step in (_ERR,) if state == _ERR else _PATH[: int(state)]:
        _move(qp, step)
    return qp


@check
def state_path(rig: Rig) -> None:
    """The path is RST, INIT, RTR, RTS; the device reports each state after its step, and then ERR and RST.

    Source: IBTA 10.3.1; doca_verbs_qp_modify.
    """
    qp = rig.side(rig.near, size=64).qp
    for state in (*_PATH, _ERR, _RST, *_PATH, _RST):
        _move(qp, state)
        same("state", qp.state, state)
        attr, _ = qp.query()
        same("states that a query tells", (attr.current_state, attr.next_state), (state, state))


@check
def transitions_that_are_refused(rig: Rig) -> None:
    """Every transition outside that path is refused, and the state stays.

    Source: IBTA 10.3.1; doca_verbs_qp_modify (INVALID_VALUE).
    """
    for state in _STATES:
        qp = _in_state(rig, state)
        for to in _STATES:
            if (state, to) in _NEEDED or to in (_RST, _ERR):
                continue
            mask = _M.NEXT_STATE | (_NEEDED.get((_PATH[int(to) - 2], to), _M(0)) if to > _INIT else _M(0))
            attr = _attr(qp, next_state=to)
            refused(f"{state.name} to {to.name}", DocaError, lambda qp=qp, attr=attr, mask=mask: qp.modify(attr, mask))
            same("state after a refused transition", qp.state, state)


@check
def error_and_reset_from_every_state(rig: Rig) -> None:
    """ERR and RST can be reached from every state, and a queue pair can be connected again after a reset.

    Source: IBTA 10.3.1; doca_verbs_qp_modify.
    """
    for state in _STATES:
        qp = _in_state(rig, state)
        qp.to_error()
        same(f"state after {state.name} to ERR", qp.state, _ERR)
        qp.reset()
        qp = _in_state(rig, state)
        qp.reset()
        same(f"state after {state.name} to RST", qp.state, _RST)
        qp.connect(qp)
        same("state after connecting again", qp.state, _RTS)


@check
def attributes_of_each_transition(rig: Rig) -> None:
    """Each transition takes its required and optional attributes; a missing or a foreign attribute is refused.

    Source: the masks of doca_verbs_qp_modify; ibv_modify_qp(3).
    """
    for (state, to), needed in _NEEDED.items():
        every = needed | _OPTIONAL[state, to]
        qp = _in_state(rig, state)
        attr = _attr(qp, next_state=to)
        for bit in QpAttrMask:
            if bit in _M.NEXT_STATE | _M.CURRENT_STATE or bit in _OPTIONAL[state, to] & ~needed:
                continue
            what = f"{state.name} to {to.name} {'without' if bit in needed else 'with'} {bit.name}"
            mask = _M.NEXT_STATE | needed ^ bit
            refused(what, InvalidValueError, lambda qp=qp, attr=attr, mask=mask: qp.modify(attr, mask))
        same("state after refused transitions", qp.state, state)
        _move(qp, to, every)
        same("state after all attributes were given", qp.state, to)


@check
def values_out_of_range(rig: Rig) -> None:
    """Attribute values that the device cannot have are refused, and the state stays.

    Source: doca_verbs_qp_modify; ibv_modify_qp(3).
    """
    device = rig.near.query_device()
    bad: tuple[tuple[QpState, QpState, dict[str, object]], ...] = (
        (_RST, _INIT, {"port_num": 0}),
        (_RST, _INIT, {"port_num": device.phys_port_cnt + 1}),
        (_RST, _INIT, {"pkey_index": device.max_pkeys}),
        (_INIT, _RTR, {"path_mtu": MtuSize.RAW_ETHERNET}),
        (_INIT, _RTR, {"dest_qp_num": 1 << 24}),
        (_INIT, _RTR, {"min_rnr_timer": 32}),
        (_INIT, _RTR, {"ah_attr": None}),
        (_INIT, _RTR, {"ah_attr": AhAttr(sgid_index=device.gid_table_size)}),
        (_INIT, _RTR, {"max_dest_rd_atomic": 2 * device.max_qp_rd_atom}),
        (_RTR, _RTS, {"ack_timeout": 32}),
        (_RTR, _RTS, {"retry_cnt": 8}),
        (_RTR, _RTS, {"rnr_retry": 8}),
        (_RTR, _RTS, {"max_rd_atomic": 2 * device.max_qp_init_rd_atom}),
    )
    for state, to, values in bad:
        qp = _in_state(rig, state)
        mask = _NEEDED[state, to] | _OPTIONAL[state, to]
        refused(f"{values} on the way to {to.name}", InvalidValueError,
                lambda qp=qp, to=to, mask=mask, values=values: _move(qp, to, mask, None, **values))
        same("state after refused values", qp.state, state)
        qp.close()


@check
def a_wrong_current_state(rig: Rig) -> None:
    """With CURRENT_STATE in the mask, the device itself refuses a transition from a state that it is not in.

    Source: ibv_modify_qp(3) (IBV_QP_CUR_STATE); PRM, status BAD_QP_STATE.
    """
    for state, claimed, to in ((_RST, _RTR, _RTS), (_INIT, _RTS, _RTS), (_ERR, _RST, _INIT), (_RTS, _RTR, _RTS)):
        qp = _in_state(rig, state)
        attr = _attr(qp, next_state=to, current_state=claimed)
        mask = _NEEDED[claimed, to] | _M.NEXT_STATE | _M.CURRENT_STATE
        refused(f"{claimed.name} to {to.name} in {state.name}", DriverError,
                lambda qp=qp, attr=attr, mask=mask: qp.modify(attr, mask))
        same("state after a refused transition", qp.state, state)


@check
def query_tells_what_was_set(rig: Rig) -> None:
    """A query returns the values set by every transition so far; attributes outside of its mask are defaults.

    Source: ibv_query_qp(3); doca_verbs_qp_query.
    """
    qp = rig.side(rig.near, size=64).qp
    device = rig.near.query_device()
    wanted = {
        "allow_remote_write": True, "allow_remote_read": False, "allow_remote_atomic": QpAtomicType.IB_SPEC,
        "rq_psn": 0x123456, "dest_qp_num": 0x0ABCDE, "min_rnr_timer": 9,
        "path_mtu": rig.near.query_port().active_mtu,
        "max_dest_rd_atomic": 1 << device.max_qp_rd_atom.bit_length() - 1,
        "sq_psn": 0xFEDCBA, "ack_timeout": 17, "retry_cnt": 5, "rnr_retry": 3, "max_rd_atomic": 1,
        "pkey_index": 0, "port_num": 1,
    }
    for state, to in ((_RST, _INIT), (_INIT, _RTR), (_RTR, _RTS)):
        optional = _OPTIONAL[state, to] & (_M.ATOMIC_MODE | _M.MAX_QP_RD_ATOMIC | _M.MAX_DEST_RD_ATOMIC)
        _move(qp, to, _NEEDED[state, to] | optional, **wanted)
    attr, _ = qp.query()
    same("attributes", {name: getattr(attr, name) for name in wanted}, wanted)
    true("an address handle is told", attr.ah_attr is not None)
    if rig.near.query_device().link_layer == LinkLayer.ETHERNET and attr.ah_attr:
        same("the peer's GID", bytes(attr.ah_attr.gid), qp.endpoint().gid)
    part, _ = qp.query(_M.RETRY_CNT)
    same("a query for one attribute", part, QpAttr(retry_cnt=5))


@check
def attributes_change_in_rts(rig: Rig) -> None:
    """The rights and the RNR timer of a connected queue pair can be changed, and apply from then on.

    Source: IBTA 10.3.1, 11.2.4.2; ibv_modify_qp(3).
    """
    a, b = rig.pair()
    a.post(WrOpcode.RDMA_WRITE, a.memory.sge(), **b.memory.remote())
    a.succeed(0)
    b.qp.modify(QpAttr(allow_remote_write=False, allow_remote_read=True, min_rnr_timer=12), _RIGHTS | _M.MIN_RNR_TIMER)
    attr, _ = b.qp.query()
    same("rights and timer", (attr.allow_remote_write, attr.allow_remote_read, attr.min_rnr_timer), (False, True, 12))
    a.post(WrOpcode.RDMA_READ, a.memory.sge(), **b.memory.remote())
    a.succeed(0)
    a.post(WrOpcode.RDMA_WRITE, a.memory.sge(), **b.memory.remote())
    a.fail(WcStatus.REM_INV_REQ_ERR, 0)


@check
def what_each_state_takes(rig: Rig) -> None:
    """A queue pair accepts receives from INIT on, and sends from RTS on; requests posted in ERR are flushed.

    Source: IBTA 10.3.1; ibv_post_send(3), ibv_post_recv(3).
    """
    for state in _STATES:
        side = rig.side(rig.near, size=64)
        for step in (_ERR,) if state == _ERR else _PATH[: int(state)]:
            _move(side.qp, step)
        receive, send = RecvWr(wr_id=1), SendWr(opcode=WrOpcode.RDMA_WRITE, wr_id=2)
        if state == _RST:
            refused("a receive in RST", BadStateError, lambda side=side, receive=receive: side.qp.post_recv(receive))
        else:
            side.qp.post_recv(receive)
        if state < _RTS:
            refused(f"a send in {state.name}", BadStateError, lambda side=side, send=send: side.qp.post_send(send))
        elif state == _ERR:
            side.qp.post_send(send)
            side.fail(WcStatus.WR_FLUSH_ERR, 2)
            side.fail_receiving(WcStatus.WR_FLUSH_ERR, 1)
        side.qp.close()


@check
def receives_of_init_are_used(rig: Rig) -> None:
    """A receive that was posted in INIT takes the first message after the connection.

    Source: IBTA 10.3.1 (Initialized State).
    """
    a, b = rig.sides()
    for state in _PATH:
        for one, other in ((b, a), (a, b)):
            _move(one.qp, state, peer=other.qp)
        if state == _INIT:
            b.receive(b.memory.sge(100, 50), wr_id=4)
    a.post(WrOpcode.SEND, a.memory.sge(0, 50))
    a.succeed(0)
    b.arrive(4)
    b.memory.expect_copy(100, a.memory, 0, 50)
    b.memory.verify("a receive posted in INIT")


@check
def reset_forgets(rig: Rig) -> None:
    """After a reset, nothing that was posted or completed before is reported, and the queues start again.

    Source: IBTA 10.3.1 (Reset State: work requests are removed without completions); ibv_modify_qp(3).
    """
    a, b = rig.pair()
    for _ in range(3):
        for number in range(3):
            b.receive(b.memory.sge(), wr_id=number)
        a.post(WrOpcode.SEND, a.memory.sge(), wr_id=7)
        b.arrive(0)
        for side in (a, b):
            side.qp.reset()
        rig.quiet("completions of queue pairs that were reset", lambda: a.sent.poll() + b.received.poll())
        rig.connect(a, b)
        b.receive(b.memory.sge(), wr_id=9)
        a.post(WrOpcode.SEND, a.memory.sge(), wr_id=8)
        a.succeed(8)
        b.arrive(9)
        for side in (a, b):
            side.qp.reset()
        rig.connect(a, b)


@check
def connect_starts_from_reset(rig: Rig) -> None:
    """`connect` is refused in states other than RST and INIT, and leaves the queue pair in RST if it fails.

    Source: gpunetio.verbs.QP.connect.
    """
    a, b = rig.pair()
    refused("connecting a connected queue pair", BadStateError, lambda: a.qp.connect(b.qp))
    same("states after a refused connect", (a.qp.state, b.qp.state), (_RTS, _RTS))
    a, b = rig.sides()
    refused("a retry count of 8", InvalidValueError, lambda: a.qp.connect(b.qp, retry_cnt=8))
    same("states after a failed connect", (a.qp.state, b.qp.state), (_RST, _RST))
    a.qp.connect(b.qp)


@check
def connect_goes_on_from_init(rig: Rig) -> None:
    """A queue pair accepts receives in INIT; `connect` keeps them and the access rights.

    Source: IBTA 10.3.1 (Initialized State); gpunetio.verbs.QP.connect, to_init.
    """
    a, b = rig.sides()
    b.qp.to_init(remote_access=Access.REMOTE_READ)
    b.receive(b.memory.sge(0, 100))
    same("state after to_init", b.qp.state, _INIT)
    a.qp.connect(b.qp)
    same("states after connect", (a.qp.state, b.qp.state), (_RTS, _RTS))
    attr, _ = b.qp.query(_M.ALLOW_REMOTE_READ | _M.ALLOW_REMOTE_WRITE)
    same("rights to read and write", (attr.allow_remote_read, attr.allow_remote_write), (True, False))
    a.post(WrOpcode.SEND, a.memory.sge(0, 100))
    same("bytes of the message", b.arrive(0)[0].byte_len, 100)


@check
def messages_before_rtr(rig: Rig) -> None:
    """A queue pair in INIT receives nothing; messages that the peer retransmits arrive when it is in RTR.

    Source: IBTA 10.3.1 (Initialized State: incoming messages are dropped), 9.7.6.1.3 (retries).
    """
    a, b = rig.sides()
    for state in _PATH:
        _move(a.qp, state, peer=b.qp, ack_timeout=16)  # a quarter of a second, and seven retries
    _move(b.qp, _INIT, peer=a.qp)
    a.post(WrOpcode.RDMA_WRITE, a.memory.sge(0, 100), **b.memory.remote(0))
    rig.quiet("completions of a WRITE to a queue pair in INIT", a.sent.poll)
    b.memory.verify("a WRITE to a queue pair in INIT")
    _move(b.qp, _RTR, peer=a.qp)
    a.succeed(0)
    b.memory.expect_copy(0, a.memory, 0, 100)
    b.memory.verify("a WRITE to a queue pair in RTR")
