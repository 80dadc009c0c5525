"""A device without DEVX that needs no kernel module: libibverbs' calls, carried out by a software NIC.

So `verbs` takes the same way as for Soft-RoCE, and the software NIC determines the expected results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from gpunetio import verbs
from gpunetio.enums import AddrType, AsyncEventType, QpAtomicType, QpAttrMask, QpState, SendFlags, WrOpcode
from gpunetio.errors import DocaError, NotSupportedError
from gpunetio.formats.events import EventType
from gpunetio.providers import open_device
from gpunetio.providers.plain_verbs import Entries, NewCq, NewQp, QpInit, QpValues, Refused, Route, Send, SrqValues, Wc
from gpunetio.providers.provider import Event, NewAh
from gpunetio.verbs import AhAttr, QpAttr, RecvWr, SendWr, Sge
from gpunetio.verbs.ah_attr import ip_type

EVENTS = {
    AsyncEventType.CQ_ERR: EventType.CQ_ERROR,
    AsyncEventType.QP_REQ_ERR: EventType.WQ_INVAL_REQ_ERROR,
    AsyncEventType.QP_ACCESS_ERR: EventType.WQ_ACCESS_ERROR,
    AsyncEventType.QP_FATAL: EventType.WQ_CATAS_ERROR,
    AsyncEventType.SRQ_LIMIT_REACHED: EventType.SRQ_RQ_LIMIT,
    AsyncEventType.QP_LAST_WQE_REACHED: EventType.SRQ_LAST_WQE,
}
DEVX = (
    "reg_umem", "reg_dmabuf_umem", "dereg_umem", "alloc_uar", "free_uar", "doorbell_register", "query_eqn",
    "resolve_mac", "devx_obj_create", "devx_obj_modify", "devx_obj_query", "devx_obj_destroy", "general_cmd",
)
NUMBERS = (
    "rq_psn", "sq_psn", "dest_qp_num", "pkey_index", "port_num", "ack_timeout", "retry_cnt", "rnr_retry",
    "min_rnr_timer", "max_rd_atomic", "max_dest_rd_atomic", "qkey",
)


def _release(pd: verbs.PD, made: verbs.Handle) -> None:
    """Let the import of a PD end before an object in it, which belongs to the provider."""
    pd._users.pop(id(made))
    made._uses = tuple(used for used in made._uses if used is not pd)


class PlainSoft:
    """One open of a software NIC, as libibverbs alone would show it. `refuse`: wr_ids that a post does not take.

    As with Soft-RoCE, completions of a queue pair stay in their CQ when it is reset or destroyed.
    """

    has_dpa = carries_mailboxes = reaches_gpu_memory = False

    def __init__(self, name: str):
        self._device: Any = open_device(name)
        self._ctx = verbs.open(name)
        self.name, self.plain = f"plain-{name}", self
        self.refuse: dict[int, DocaError] = {}
        self.modified: list[QpAttrMask] = []  # the masks of modify_qp
        self._objects: dict[int, Any] = {}
        self._kept: dict[int, list[Wc]] = {}  # completions by CQ
        self._numbers = itertools.count(1)
        self._subscriptions: list[tuple[int, Any, frozenset[EventType], int]] = []
        self._waiting: list[tuple[int, Event]] = []

    def __getattr__(self, name: str) -> Any:
        if name in DEVX:
            raise NotSupportedError(f"{self.name} has no {name}: use a ConnectX or a software NIC")
        return getattr(self._device, name)

    def _made(self, thing: Any) -> int:
        handle = next(self._numbers)
        self._objects[handle] = thing
        return handle

    def _close(self, handle: int) -> None:
        self._objects.pop(handle).close()

    def waiting(self, cq: verbs.CQ) -> int:
        """How many completions there are that nobody has fetched."""
        inner = self._objects[cq.cqn]
        return inner._arrived(inner.entries)

    def close(self) -> None:
        self._ctx.close()
        self._device.close()

    # --- events

    def create_event_channel(self) -> int:
        return self._made(None)

    def event_fd(self, channel: int) -> int:
        return self._ctx.async_events.fd

    def subscribe(self, channel: int, handle: int | None, types: Iterable[EventType], cookie: int) -> None:
        target = None if handle is None else self._objects[handle]
        self._subscriptions.append((channel, target, frozenset(types), cookie))

    def get_event(self, channel: int) -> Event | None:
        while event := self._ctx.get_async_event(0):
            event.ack()
            for to, target, types, cookie in self._subscriptions:
                if event.element is target and EVENTS[event.type] in types:
                    self._waiting.append((to, Event(cookie, EVENTS[event.type], 0)))
        for number, (to, event) in enumerate(self._waiting):
            if to == channel:
                del self._waiting[number]
                return event
        return None

    def destroy_event_channel(self, channel: int) -> None:
        self._subscriptions = [each for each in self._subscriptions if each[0] != channel]

    # --- completion queues

    def create_comp_channel(self) -> int:
        return self._made(self._ctx.create_comp_channel())

    def comp_channel_fd(self, channel: int) -> int:
        return self._objects[channel].fileno()

    def get_cq_event(self, channel: int) -> int | None:
        if (cq := self._objects[channel].get_event(0)) is None:
            return None
        cq.ack_events()
        return next(handle for handle, thing in self._objects.items() if thing is cq)

    def create_cq(self, cqe: int, channel: int | None, vector: int = 0) -> NewCq:
        told = None if channel is None else self._objects[channel]
        cq = self._ctx.create_cq(cqe, channel=told, comp_vector=vector)
        handle = self._made(cq)
        self._kept[handle] = []
        return NewCq(handle, cq.entries)

    def resize_cq(self, cq: int, cqe: int) -> int:
        self._objects[cq].resize(cqe)
        return self._objects[cq].entries

    def poll_cq(self, cq: int, most: int) -> list[Wc]:
        found = self._kept[cq][:most]
        self._kept[cq] = self._kept[cq][most:]
        if left := most - len(found):
            found += [
                Wc(one.wr_id, one.status, one.opcode, one.byte_len, one.imm, one.qp_num, one.vendor_err,
                   one.src_qp, one.flags, one.slid, one.sl)
                for one in self._objects[cq].poll(left)
            ]
        return found

    def _keep(self) -> None:
        for cq in self._kept:
            self._kept[cq] = self.poll_cq(cq, 1 << 10)

    def destroy_cq(self, cq: int) -> None:
        del self._kept[cq]
        self._close(cq)

    def req_notify_cq(self, cq: int, solicited_only: bool) -> None:
        self._objects[cq].req_notify(solicited_only)

    # --- queue pairs

    def create_ah(self, pdn: int, port: int, route: Route) -> NewAh:
        attr = AhAttr(gid=route.dgid, dlid=route.dlid, sl=route.sl, sgid_index=route.sgid_index)
        with self._ctx.import_pd(pdn) as pd:
            ah = pd.create_ah(attr, port=port)
            _release(pd, ah)
        return NewAh(self._made(ah), b"")

    def create_qp(self, pdn: int, init: QpInit) -> NewQp:
        cap = init.cap
        send_cq, receive_cq = self._objects[init.send_cq], self._objects[init.recv_cq]
        with self._ctx.import_pd(pdn) as pd:
            qp = pd.create_qp(
                sq_wr=cap.max_send_wr, rq_wr=cap.max_recv_wr, send_cq=send_cq, receive_cq=receive_cq,
                send_max_sges=cap.max_send_sge, receive_max_sges=cap.max_recv_sge, qp_type=init.qp_type,
                max_inline_data=cap.max_inline_data, srq=None if init.srq is None else self._objects[init.srq],
            )
            _release(pd, qp)
        return NewQp(self._made(qp), qp.qpn, cap._replace(max_inline_data=qp.init_attr.max_inline_data))

    def modify_qp(self, qp: int, values: QpValues, mask: QpAttrMask) -> None:
        self.modified.append(mask)
        if values.state == QpState.RST:
            self._keep()
        attr = QpAttr(next_state=values.state, **{name: getattr(values, name) for name in NUMBERS})
        attr.allow_remote_write = bool(values.access & values.access.REMOTE_WRITE)
        attr.allow_remote_read = bool(values.access & values.access.REMOTE_READ)
        atomics = bool(values.access & values.access.REMOTE_ATOMIC)
        attr.allow_remote_atomic = QpAtomicType.IB_SPEC if atomics else QpAtomicType.NONE
        if QpAttrMask.PATH_MTU in mask:
            attr.path_mtu = values.path_mtu
        if route := values.route:
            kind = ip_type(route.dgid) if self._ctx.query_port().link_layer.name == "ETHERNET" else AddrType.IB_GRH
            attr.ah_attr = AhAttr(gid=route.dgid, addr_type=kind, dlid=route.dlid, sl=route.sl,
                                  sgid_index=route.sgid_index, hop_limit=route.hop_limit,
                                  flow_label=route.flow_label)
        rights = QpAttrMask.ALLOW_REMOTE_WRITE | QpAttrMask.ALLOW_REMOTE_READ | QpAttrMask.ATOMIC_MODE
        if mask & rights:  # libibverbs only knows both together
            mask |= rights
        if values.state == QpState.RTS and mask & rights and self._objects[qp].state == QpState.RTR:
            mask &= ~QpAttrMask.ALLOW_REMOTE_READ  # the software NIC's transition does not take it
        self._objects[qp].modify(attr, mask)

    def query_qp(self, qp: int) -> QpValues:
        attr, _ = self._objects[qp].query()
        access = QpValues(attr.current_state).access
        for right, given in (
            (access.REMOTE_WRITE, attr.allow_remote_write), (access.REMOTE_READ, attr.allow_remote_read),
            (access.REMOTE_ATOMIC, attr.allow_remote_atomic),
        ):
            access |= right if given else access.LOCAL_READ
        route = None
        if ah := attr.ah_attr:
            route = Route(ah.gid, ah.dlid, ah.sl, ah.sgid_index, ah.static_rate, ah.hop_limit, ah.traffic_class, True,
                          ah.flow_label)
        return QpValues(
            attr.current_state, attr.path_mtu, access=access, route=route,
            **{name: getattr(attr, name) for name in NUMBERS},
        )

    def post_send(self, qp: int, requests: Sequence[Send], first: int) -> Refused | None:
        sends = [_send(one, first + n, self._objects.get(one.ah)) for n, one in enumerate(requests)]
        return self._post(self._objects[qp].post_send, sends)

    def post_recv(self, qp: int, requests: Sequence[Entries], first: int) -> Refused | None:
        return self._post(self._objects[qp].post_recv, [_receive(one, first + n) for n, one in enumerate(requests)])

    def _post(self, post: Any, requests: Sequence[Any]) -> Refused | None:
        for number, request in enumerate(requests):
            if request.wr_id in self.refuse:
                return Refused(number, self.refuse[request.wr_id])
            post(request)
        return None

    def destroy_qp(self, qp: int) -> None:
        self._keep()
        self._close(qp)

    # --- shared receive queues

    def create_srq(self, pdn: int, max_wr: int, max_sge: int) -> int:
        with self._ctx.import_pd(pdn) as pd:
            srq = pd.create_srq(max_wr, receive_max_sges=max_sge)
            _release(pd, srq)
        return self._made(srq)

    def post_srq_recv(self, srq: int, requests: Sequence[Entries], first: int) -> Refused | None:
        return self._post(self._objects[srq].post_recv, [_receive(one, first + n) for n, one in enumerate(requests)])

    def query_srq(self, srq: int) -> SrqValues:
        found = self._objects[srq].query()
        return SrqValues(found.max_wr, found.max_sge, found.srq_limit)

    def resize_srq(self, srq: int, max_wr: int) -> None:
        self._objects[srq].modify(max_wr=max_wr)

    def arm_srq(self, srq: int, srq_limit: int) -> None:
        self._objects[srq].modify(srq_limit=srq_limit)

    destroy_comp_channel = destroy_srq = destroy_ah = _close


def _send(request: Send, wr_id: int, ah: verbs.AddressHandle | None) -> SendWr:
    return SendWr(
        opcode=WrOpcode(request.opcode), sges=[Sge(*entry) for entry in request.entries], inline=request.inline,
        wr_id=wr_id, flags=SendFlags(request.flags), remote_addr=request.remote_addr, rkey=request.rkey,
        imm=request.imm, compare=request.compare_add, add=request.compare_add, swap=request.swap,
        ah=ah, remote_qpn=request.remote_qpn, remote_qkey=request.remote_qkey,
    )


def _receive(entries: Entries, wr_id: int) -> RecvWr:
    return RecvWr(sges=[Sge(*entry) for entry in entries], wr_id=wr_id)
