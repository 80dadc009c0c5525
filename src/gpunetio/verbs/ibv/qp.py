"""Queue pairs of libibverbs."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from ...enums import Access, AddrType, LinkLayer, QpAtomicType, QpAttrMask, QpSendDbrMode, QpState, QpType
from ...errors import DriverError, InvalidValueError
from ...providers.plain_verbs import QpCap, QpInit, QpValues, Route
from ..ah import route_of
from ..ah_attr import AhAttr, ip_type
from ..events import OF_QP
from ..qp import QP
from ..qp_init import QpInitAttr
from ..qp_state import QpAttr, Transition
from .device import needs_devx, plain_verbs, ring_attributes
from .queues import PlainPosting

_M = QpAttrMask
_RIGHTS = {
    _M.ALLOW_REMOTE_WRITE: ("allow_remote_write", Access.REMOTE_WRITE),
    _M.ALLOW_REMOTE_READ:  ("allow_remote_read", Access.REMOTE_READ),
    _M.ATOMIC_MODE:        ("allow_remote_atomic", Access.REMOTE_ATOMIC),
}
_NUMBERS = {
    _M.RQ_PSN: "rq_psn", _M.SQ_PSN: "sq_psn", _M.DEST_QP_NUM: "dest_qp_num", _M.PKEY_INDEX: "pkey_index",
    _M.PORT_NUM: "port_num", _M.ACK_TIMEOUT: "ack_timeout", _M.RETRY_CNT: "retry_cnt", _M.RNR_RETRY: "rnr_retry",
    _M.MIN_RNR_TIMER: "min_rnr_timer", _M.MAX_QP_RD_ATOMIC: "max_rd_atomic",
    _M.MAX_DEST_RD_ATOMIC: "max_dest_rd_atomic", _M.QKEY: "qkey",
}
_PSN_MASK = 0xFF_FFFF
_OF_RC = _M.MIN_RNR_TIMER | _M.ACK_TIMEOUT | _M.RETRY_CNT | _M.RNR_RETRY | _M.MAX_QP_RD_ATOMIC | _M.MAX_DEST_RD_ATOMIC
# ibv_modify_qp(3) requires more attributes than doca_verbs_qp_modify. The default is one READ or atomic, as in a QPC.
_ALSO = {QpState.RTR: _M.MAX_DEST_RD_ATOMIC, QpState.RTS: _M.MAX_QP_RD_ATOMIC}
_TO_INIT = _M.NEXT_STATE | _M.PKEY_INDEX | _M.PORT_NUM | _M.ALLOW_REMOTE_WRITE
_DATAGRAMS_TO_INIT = _M.NEXT_STATE | _M.PKEY_INDEX | _M.PORT_NUM | _M.QKEY
_ONE_AT_A_TIME = {"max_rd_atomic": 1, "max_dest_rd_atomic": 1}


class PlainQP(QP):
    """A queue pair of libibverbs. `sq_entries` and `rq_entries` count requests."""

    sq_address, rq_address, rq_stride, dbr_address, doorbell_register, uar, ring = ring_attributes(7)
    handle: int

    def _check(self, attr: QpInitAttr) -> None:
        for what, asked in (
            ("external_datapath", attr.external_datapath), ("external_umem", attr.external_umem),
            ("external_uar", attr.external_uar), ("core_direct_master", attr.core_direct_master),
            ("send_dbr_mode NO_DBR_EXT", attr.send_dbr_mode == QpSendDbrMode.NO_DBR_EXT),
            ("emulate_no_dbr_ext", attr.emulate_no_dbr_ext), ("cqe_inline", attr.cqe_inline),
            ("cqe_inline_responses", attr.cqe_inline_responses), ("memcpy", attr.memcpy),
        ):
            if asked:
                raise needs_devx(self.ctx, what)
        if attr.qp_type == QpType.GSI:
            raise needs_devx(self.ctx, "qp_type GSI, which belongs to the kernel")
        super()._check(attr)
        if attr.user_index:
            raise needs_devx(self.ctx, f"user_index = {attr.user_index}")
        device = self.ctx.query_device()
        for requests, sges, has_queue in (
            ("sq_wr", "send_max_sges", attr.sq_wr), ("rq_wr", "receive_max_sges", attr.rq_wr and not attr.srq),
        ):
            for name, least, most in ((requests, 0, device.max_qp_wr), (sges, 1, device.max_sge)):
                if has_queue and not least <= (value := getattr(attr, name)) <= most:
                    raise InvalidValueError(f"{name} = {value}: it must be {least} to {most} on {self.ctx.name}")

    def _create(self, undo: ExitStack) -> None:
        attr = self.init_attr
        self._plain = plain_verbs(self.ctx)
        self._has_path = False
        receives = 0 if attr.srq else attr.rq_wr
        wanted = QpCap(attr.sq_wr, receives, attr.send_max_sges, attr.receive_max_sges, attr.max_inline_data)
        send_cq, recv_cq = self._cq_handles(undo)
        init = QpInit(QpType(attr.qp_type), send_cq, recv_cq, attr.srq.srqn if attr.srq else None, wanted)
        undo.callback(self._step(PlainQP.forget))
        self.handle, self.qpn, cap = self._plain.create_qp(self.pd.pdn, init)
        undo.callback(self._plain.destroy_qp, self.handle)
        self.ctx.async_events.subscribe(self, self.handle, OF_QP, undo)
        self.init_attr = replace(attr, max_inline_data=cap.max_inline_data)
        self.sq_entries = cap.max_send_wr if attr.sq_wr else 0
        self.rq_entries = cap.max_recv_wr if receives else 0
        self._serve(PlainPosting(self, self._plain))

    def _cq_handles(self, undo: ExitStack) -> tuple[int, int]:
        """Return the handles of the CQs for sends and receives. Even a queue without slots needs a CQ."""
        cqs = [cq.cqn for cq in (self.send_cq, self.receive_cq) if cq]
        if cqs:
            return cqs[0], cqs[-1]
        spare = self._plain.create_cq(1, None).handle
        undo.callback(self._plain.destroy_cq, spare)
        return spare, spare

    @property
    def used(self) -> bool:
        return self.posting.used

    # --- attributes --------------------------------------------------------------------------------------------------

    def _ask(self) -> QpAttr:
        found = self._plain.query_qp(self.handle)
        numbers = {name: getattr(found, name) for name in _NUMBERS.values()}
        attr = QpAttr(next_state=found.state, current_state=found.state, **numbers)
        for name, right in _RIGHTS.values():
            setattr(attr, name, right in found.access)
        attr.allow_remote_atomic = QpAtomicType.IB_SPEC if attr.allow_remote_atomic else QpAtomicType.NONE
        if self._has_path and found.route:
            attr.path_mtu = found.path_mtu
            attr.ah_attr = self._ah(found.route)
        return attr

    def _ah(self, route: Route) -> AhAttr:
        if self.ctx.query_device().link_layer == LinkLayer.ETHERNET:
            addr_type = ip_type(route.dgid)
        else:
            addr_type = AddrType.IB_GRH if route.is_global else AddrType.IB_NO_GRH
        return AhAttr(
            route.dgid, addr_type, route.dlid, route.sl, route.sgid_index, route.static_rate, route.hop_limit,
            route.traffic_class, route.flow_label,
        )

    def _move(self, move: Transition, attr: QpAttr, mask: QpAttrMask, now: QpAttr) -> None:
        if _M.CURRENT_STATE in mask and attr.current_state != now.current_state:
            # With IBV_QP_CUR_STATE, a driver does not check the state, so check it here.
            raise DriverError(
                f"{self} is in {now.current_state.name}, but current_state says {QpState(attr.current_state).name}"
            )
        following = QpState(attr.next_state) if _M.NEXT_STATE in mask else now.current_state
        if (now.current_state, following) == (QpState.RST, QpState.ERR):
            # Linux does not allow this transition (ib_modify_qp_is_ok), but allows INIT to ERR.
            self._plain.modify_qp(self.handle, QpValues(QpState.INIT, port_num=1), self._to_init)
        values = self._values(following, attr, mask, now)
        self._plain.modify_qp(self.handle, values, self._taken(following, attr, mask, now))
        if following != QpState.ERR:
            self._has_path = following in (QpState.RTR, QpState.RTS, QpState.SQD)

    @property
    def _to_init(self) -> QpAttrMask:
        return _DATAGRAMS_TO_INIT if self.type.datagrams else _TO_INIT

    def _set_udp_sport(self, port: int) -> None:
        raise needs_devx(self.ctx, "modify_udp_sport()")

    def _taken(self, following: QpState, attr: QpAttr, mask: QpAttrMask, now: QpAttr) -> QpAttrMask:
        """Return the mask for this transition, as in ibv_modify_qp(3)."""
        if following in (QpState.RST, QpState.ERR):
            return _M.NEXT_STATE
        mask &= ~_M.CURRENT_STATE
        if following == now.current_state:
            self._check_path(attr, mask, now)
            return mask & ~_M.AH_ATTR
        if self.type.datagrams:
            return mask
        mask |= _ALSO.get(following, _M(0))
        return mask & ~_OF_RC if self.init_attr.qp_type == QpType.UC else mask

    def _check_path(self, attr: QpAttr, mask: QpAttrMask, now: QpAttr) -> None:
        """Raise NotSupportedError for a new path: libibverbs cannot change the path of a connected queue pair."""
        wanted, there = attr.ah_attr, now.ah_attr
        if _M.AH_ATTR in mask and wanted and there:
            if (wanted.sgid_index, wanted.traffic_class) != (there.sgid_index, there.traffic_class):
                raise needs_devx(self.ctx, f"another sgid_index or traffic_class in {now.current_state.name}")

    def _values(self, state: QpState, attr: QpAttr, mask: QpAttrMask, now: QpAttr) -> QpValues:
        """Return the attributes in the mask. libibverbs sets access rights together, so others keep their values."""
        if _M.ATOMIC_MODE in mask and attr.allow_remote_atomic == QpAtomicType.UP_TO_8BYTES:
            raise needs_devx(self.ctx, "allow_remote_atomic UP_TO_8BYTES in place of IB_SPEC")
        access = Access.LOCAL_WRITE
        for bit, (name, right) in _RIGHTS.items():
            access |= right if getattr(attr if bit in mask else now, name) else Access(0)
        chosen = {name: int(getattr(attr, name)) for bit, name in _NUMBERS.items() if bit in mask}
        numbers: dict[str, int] = {**_ONE_AT_A_TIME, "port_num": now.port_num, **chosen}
        for psn in chosen.keys() & {"rq_psn", "sq_psn"}:
            numbers[psn] &= _PSN_MASK
        if _M.PATH_MTU in mask:
            numbers["path_mtu"] = attr.path_mtu
        route = route_of(attr.ah_attr) if _M.AH_ATTR in mask and attr.ah_attr else None
        return QpValues(state, access=access, route=route, **numbers)
