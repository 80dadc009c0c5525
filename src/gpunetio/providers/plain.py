"""A provider for devices driven only by libibverbs: Soft-RoCE and any other device without DEVX."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from ctypes import POINTER, addressof, byref, c_void_p, pointer, sizeof
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

from ..enums import Access, QpAttrMask, QpState, QpType
from ..errors import (
    DocaError,
    DriverError,
    FullError,
    InvalidValueError,
    NotFoundError,
    NotSupportedError,
    UnexpectedError,
)
from ..formats.events import EventType, eqe
from .event_queue import EventQueue
from .mlx5 import structs as s
from .mlx5.device import VerbsDevice, ah_attr_of, of_port_or_device
from .mlx5.errors import errno_of
from .mlx5.inline import ibv_poll_cq, ibv_post_recv, ibv_post_send, ibv_post_srq_recv, ibv_req_notify_cq
from .plain_verbs import Entries, NewCq, NewQp, QpCap, QpInit, QpValues, Refused, Route, Send, SrqValues, Wc
from .provider import Event

if TYPE_CHECKING:
    from .mlx5.structs import Pointer

_Object = TypeVar("_Object", s.ibv_cq, s.ibv_qp, s.ibv_srq)
_Wr = TypeVar("_Wr", s.ibv_send_wr, s.ibv_recv_wr)
_M = QpAttrMask
_TYPE = {QpType.RC: s.IBV_QPT_RC, QpType.UC: s.IBV_QPT_UC, QpType.UD: s.IBV_QPT_UD}
_STATE = {
    QpState.RST: s.IBV_QPS_RESET, QpState.INIT: s.IBV_QPS_INIT, QpState.RTR: s.IBV_QPS_RTR, QpState.RTS: s.IBV_QPS_RTS,
    QpState.ERR: s.IBV_QPS_ERR, QpState.SQD: s.IBV_QPS_SQD,
}
_STATE_OF_IBV = {code: state for state, code in _STATE.items()}
_MASK = {
    _M.NEXT_STATE:         s.IBV_QP_STATE,
    _M.ALLOW_REMOTE_WRITE: s.IBV_QP_ACCESS_FLAGS,
    _M.ALLOW_REMOTE_READ:  s.IBV_QP_ACCESS_FLAGS,
    _M.ATOMIC_MODE:        s.IBV_QP_ACCESS_FLAGS,
    _M.PKEY_INDEX:         s.IBV_QP_PKEY_INDEX,
    _M.PORT_NUM:           s.IBV_QP_PORT,
    _M.PATH_MTU:           s.IBV_QP_PATH_MTU,
    _M.RQ_PSN:             s.IBV_QP_RQ_PSN,
    _M.SQ_PSN:             s.IBV_QP_SQ_PSN,
    _M.DEST_QP_NUM:        s.IBV_QP_DEST_QPN,
    _M.AH_ATTR:            s.IBV_QP_AV,
    _M.ACK_TIMEOUT:        s.IBV_QP_TIMEOUT,
    _M.RETRY_CNT:          s.IBV_QP_RETRY_CNT,
    _M.RNR_RETRY:          s.IBV_QP_RNR_RETRY,
    _M.MIN_RNR_TIMER:      s.IBV_QP_MIN_RNR_TIMER,
    _M.MAX_QP_RD_ATOMIC:   s.IBV_QP_MAX_QP_RD_ATOMIC,
    _M.MAX_DEST_RD_ATOMIC: s.IBV_QP_MAX_DEST_RD_ATOMIC,
    _M.QKEY:               s.IBV_QP_QKEY,
}
_ALL = sum(set(_MASK.values()))
_UNREACHED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
# Event types of ibv_get_async_event(3), and the PRM's, which the provider interface uses.
_EVENTS = {
    s.IBV_EVENT_CQ_ERR:              EventType.CQ_ERROR,
    s.IBV_EVENT_QP_FATAL:            EventType.WQ_CATAS_ERROR,
    s.IBV_EVENT_QP_REQ_ERR:          EventType.WQ_INVAL_REQ_ERROR,
    s.IBV_EVENT_QP_ACCESS_ERR:       EventType.WQ_ACCESS_ERROR,
    s.IBV_EVENT_COMM_EST:            EventType.COMM_EST,
    s.IBV_EVENT_SQ_DRAINED:          EventType.SQ_DRAINED,
    s.IBV_EVENT_PATH_MIG:            EventType.PATH_MIGRATED,
    s.IBV_EVENT_PATH_MIG_ERR:        EventType.PATH_MIGRATE_FAILED,
    s.IBV_EVENT_SRQ_ERR:             EventType.SRQ_CATAS_ERROR,
    s.IBV_EVENT_SRQ_LIMIT_REACHED:   EventType.SRQ_RQ_LIMIT,
    s.IBV_EVENT_QP_LAST_WQE_REACHED: EventType.SRQ_LAST_WQE,
}


class _Subscription(NamedTuple):
    channel: int
    types: frozenset[EventType]
    cookie: int


def open_device(name: str) -> PlainProvider:
    """Open a device by name (`ibv_open_device`)."""
    return PlainProvider.open(name)


def adopt_context(address: int) -> PlainProvider:
    """Return a provider that uses the `ibv_context` at this address. Its owner opened it and closes it.

    For `verbs.import_context` (`doca_verbs_bridge_verbs_context_import`): pyverbs and C++ programs have such contexts.
    """
    return PlainProvider.adopt(address)


def _devx_only(what: str) -> Callable[..., NoReturn]:
    """Return a method of `Provider` that raises NotSupportedError, because it needs DEVX."""

    def refuse(self: PlainProvider, *arguments: object) -> NoReturn:
        raise NotSupportedError(
            f"{self.name} has no {what}: libibverbs alone drives it. Use a ConnectX (libmlx5's DEVX) or a software NIC"
        )

    return refuse


class PlainProvider(VerbsDevice):
    """One open of a device, with `PlainVerbs` for its objects."""

    def __init__(self, name: str, context: Pointer[s.ibv_context], borrowed: bool = False):
        super().__init__(name, context, borrowed)
        self.plain = self
        self._handles: dict[int, int] = {}  # address of a CQ, QP or SRQ → handle
        self._subscriptions: defaultdict[int | None, list[_Subscription]] = defaultdict(list)  # by handle
        self._reading = threading.Lock()

    reg_umem: Callable[..., NoReturn] = _devx_only("UMEMs to place queues in")
    reg_dmabuf_umem: Callable[..., NoReturn] = reg_umem
    dereg_umem: Callable[..., NoReturn] = reg_umem
    alloc_uar: Callable[..., NoReturn] = _devx_only("UARs, doorbell pages")
    free_uar: Callable[..., NoReturn] = alloc_uar
    doorbell_register: Callable[..., NoReturn] = alloc_uar
    near_register: Callable[..., NoReturn] = alloc_uar
    query_eqn: Callable[..., NoReturn] = _devx_only("event queues to name")
    resolve_mac: Callable[..., NoReturn] = _devx_only("address vectors to look at")
    query_clock: Callable[..., NoReturn] = _devx_only("clock that timestamps are taken from")
    devx_obj_create: Callable[..., NoReturn] = _devx_only("mailboxes")
    devx_obj_modify: Callable[..., NoReturn] = devx_obj_create
    devx_obj_query: Callable[..., NoReturn] = devx_obj_create
    devx_obj_destroy: Callable[..., NoReturn] = devx_obj_create
    general_cmd: Callable[..., NoReturn] = devx_obj_create
    attach_flow_table: Callable[..., NoReturn] = _devx_only("flow tables")
    detach_flow_table: Callable[..., NoReturn] = attach_flow_table
    open_kernel_path: Callable[..., NoReturn] = attach_flow_table
    close_kernel_path: Callable[..., NoReturn] = attach_flow_table

    def devx_objects(self) -> list[int]:
        """Return an empty list: there are no DEVX objects."""
        return []

    def doorbell_rung(self) -> None:
        """Do nothing: libibverbs rings doorbells."""

    def explain(self, qpn: int, vendor_syndrome: int | None) -> str | None:
        """Return None: libibverbs gives no explanations."""
        return None

    # --- asynchronous events -----------------------------------------------------------------------------------------

    def create_event_channel(self) -> int:
        """Create an event channel.

        The context has only one event queue, so whichever channel reads it passes events on to the others.
        """
        queue = EventQueue[Event](self.context.contents.async_fd)
        return self.hold("event channel", self.new_handle(), lambda queue: queue.close(), queue)

    def event_fd(self, channel: int) -> int:
        return self.get("event channel", channel).fd

    def subscribe(self, channel: int, handle: int | None, types: Iterable[EventType], cookie: int) -> None:
        """Subscribe to events of a CQ, QP or SRQ, or of the port and the device."""
        self.get("event channel", channel)
        with self._reading:
            self._subscriptions[handle].append(_Subscription(channel, frozenset(types), cookie))

    def get_event(self, channel: int) -> Event | None:
        """Return the next event.

        It is acknowledged to libibverbs at once, because `verbs` itself keeps objects open until events are
        acknowledged.
        """
        queue = self.get("event channel", channel)
        with self._reading:
            while event := self.async_event():
                self._pass_on(event)
                self.verbs.ibv_ack_async_event(byref(event))
        return queue.get()

    def _pass_on(self, event: s.ibv_async_event) -> None:
        target = None
        if (told := of_port_or_device(event)) is None:
            target = self._handles.get(ctypes.cast(event.element.qp, c_void_p).value or 0)
            kind = _EVENTS.get(event.event_type)
            if target is None or kind is None:  # the event concerns no object, or a destroyed one
                return
            told = kind, target
        for each in self._subscriptions[target]:
            if told[0] in each.types:
                self.get("event channel", each.channel).put(Event(each.cookie, *told, eqe(*told)))

    def destroy_event_channel(self, channel: int) -> None:
        with self._reading:
            for handle, told in self._subscriptions.items():
                self._subscriptions[handle] = [each for each in told if each.channel != channel]
            self.give_back("event channel", channel)

    # --- objects -----------------------------------------------------------------------------------------------------

    def _made(self, kind: str, what: str, made: Pointer[_Object], destroy: Callable[[Pointer[_Object]], int]) -> int:
        """Hold a new object, and return its handle."""
        handle = self.hold(kind, self.new_handle(), destroy, self.pointer(what, made))
        self._handles[addressof(made.contents)] = handle
        return handle

    def _destroy(self, kind: str, handle: int) -> None:
        address = addressof(self.get(kind, handle).contents)
        del self._handles[address]  # before another object can have this address
        try:
            self.give_back(kind, handle)
        except BaseException:
            self._handles[address] = handle
            raise
        with self._reading:
            self._subscriptions.pop(handle, None)

    # --- completion queues and channels ------------------------------------------------------------------------------

    def create_comp_channel(self) -> int:
        channel = self.pointer("ibv_create_comp_channel", self.verbs.ibv_create_comp_channel(self.context))
        os.set_blocking(channel.contents.fd, False)
        return self.hold("completion channel", self.new_handle(), self.verbs.ibv_destroy_comp_channel, channel)

    def comp_channel_fd(self, channel: int) -> int:
        return self.get("completion channel", channel).contents.fd

    def get_cq_event(self, channel: int) -> int | None:
        source, cq, context = self.get("completion channel", channel), POINTER(s.ibv_cq)(), c_void_p()
        while not self.verbs.ibv_get_cq_event(source, byref(cq), byref(context)):
            self.verbs.ibv_ack_cq_events(cq, 1)
            if handle := self._handles.get(addressof(cq.contents)):
                return handle
        if (code := ctypes.get_errno()) in (errno.EAGAIN, errno.EINTR):
            return None
        raise self.refused("ibv_get_cq_event", code)

    def destroy_comp_channel(self, channel: int) -> None:
        self.give_back("completion channel", channel)

    def create_cq(self, cqe: int, channel: int | None, vector: int = 0) -> NewCq:
        told = None if channel is None else self.get("completion channel", channel)
        cq = self.verbs.ibv_create_cq(self.context, cqe, None, told, vector)
        handle = self._made("CQ", f"ibv_create_cq of {cqe} entries", cq, self.verbs.ibv_destroy_cq)
        return NewCq(handle, cq.contents.cqe)

    def resize_cq(self, cq: int, cqe: int) -> int:
        pointer = self.get("CQ", cq)
        self._check(f"ibv_resize_cq to {cqe} entries", self.verbs.ibv_resize_cq(pointer, cqe))
        return pointer.contents.cqe

    def poll_cq(self, cq: int, most: int) -> list[Wc]:
        found = (s.ibv_wc * most)()
        count = ibv_poll_cq(self.get("CQ", cq), most, found)
        if count < 0:
            raise self.refused(f"ibv_poll_cq of CQ {cq}", errno_of(count))
        return [
            Wc(wc.wr_id, wc.status, wc.opcode, wc.byte_len,
               socket.ntohl(wc.imm_data) if wc.wc_flags & s.IBV_WC_WITH_IMM else None, wc.qp_num, wc.vendor_err,
               wc.src_qp, wc.wc_flags, wc.slid, wc.sl)
            for wc in found[:count]
        ]

    def req_notify_cq(self, cq: int, solicited_only: bool) -> None:
        self._check(f"ibv_req_notify_cq of CQ {cq}", ibv_req_notify_cq(self.get("CQ", cq), solicited_only))

    def destroy_cq(self, cq: int) -> None:
        self._destroy("CQ", cq)

    # --- queue pairs -------------------------------------------------------------------------------------------------

    def create_qp(self, pdn: int, init: QpInit) -> NewQp:
        attr = s.ibv_qp_init_attr(
            send_cq=self.get("CQ", init.send_cq), recv_cq=self.get("CQ", init.recv_cq), cap=s.ibv_qp_cap(*init.cap),
            srq=None if init.srq is None else self.get("SRQ", init.srq), qp_type=_TYPE[init.qp_type],
        )
        qp = self.verbs.ibv_create_qp(self.get("PD", pdn), byref(attr))
        handle = self._made("QP", f"ibv_create_qp of {init.cap}", qp, self.verbs.ibv_destroy_qp)
        cap = QpCap(*(getattr(attr.cap, name) for name in QpCap._fields))
        return NewQp(handle, qp.contents.qp_num, cap)

    def modify_qp(self, qp: int, values: QpValues, mask: QpAttrMask) -> None:
        """Modify a queue pair. NotFoundError if the peer's address does not answer."""
        attr = s.ibv_qp_attr(
            qp_state=_STATE[values.state], path_mtu=_mtu_code(values.path_mtu), rq_psn=values.rq_psn,
            sq_psn=values.sq_psn, dest_qp_num=values.dest_qp_num, qp_access_flags=int(values.access),
            pkey_index=values.pkey_index, port_num=values.port_num, timeout=values.ack_timeout,
            retry_cnt=values.retry_cnt, rnr_retry=values.rnr_retry, min_rnr_timer=values.min_rnr_timer,
            max_rd_atomic=values.max_rd_atomic, max_dest_rd_atomic=values.max_dest_rd_atomic, qkey=values.qkey,
        )
        route = values.route
        if route:
            attr.ah_attr = ah_attr_of(route, values.port_num)
        bits = 0
        for bit in mask:
            bits |= _MASK[bit]
        if not (code := self.verbs.ibv_modify_qp(self.get("QP", qp), byref(attr), bits)):
            return
        code = errno_of(code)
        if route and _M.AH_ATTR in mask and code in _UNREACHED:
            raise NotFoundError(
                f"ibv_modify_qp on {self.name}: {route.dgid.hex(':', 2)} is not reached from GID index "
                f"{route.sgid_index} ({os.strerror(code)}): check with a ping"
            )
        raise self.refused(f"ibv_modify_qp to {values.state.name}", code)

    def query_qp(self, qp: int) -> QpValues:
        attr, init = s.ibv_qp_attr(), s.ibv_qp_init_attr()
        code = self.verbs.ibv_query_qp(self.get("QP", qp), byref(attr), _ALL, byref(init))
        self._check("ibv_query_qp", code)
        if attr.qp_state not in _STATE_OF_IBV:
            raise UnexpectedError(
                f"{self.name} reports the unknown queue pair state {attr.qp_state}"
            )
        ah = attr.ah_attr
        return QpValues(
            _STATE_OF_IBV[attr.qp_state], 128 << attr.path_mtu if attr.path_mtu else 0, attr.rq_psn, attr.sq_psn,
            attr.dest_qp_num, Access(attr.qp_access_flags & sum(Access)), attr.pkey_index, attr.port_num, attr.timeout,
            attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer, attr.max_rd_atomic, attr.max_dest_rd_atomic,
            Route(
                bytes(ah.grh.dgid.raw), ah.dlid, ah.sl, ah.grh.sgid_index, ah.static_rate, ah.grh.hop_limit,
                ah.grh.traffic_class, bool(ah.is_global), ah.grh.flow_label,
            ),
            attr.qkey,
        )

    def destroy_qp(self, qp: int) -> None:
        self._destroy("QP", qp)

    # --- requests ----------------------------------------------------------------------------------------------------

    def post_send(self, qp: int, requests: Sequence[Send], first: int) -> Refused | None:
        chain = (s.ibv_send_wr * len(requests))()
        kept = []  # keeps the payloads alive that the chain points to
        for number, (wr, request) in enumerate(zip(chain, requests, strict=True)):
            wr.wr_id, wr.opcode, wr.send_flags, wr.imm_data = (
                first + number, request.opcode, request.flags, socket.htonl(request.imm),
            )
            entries = request.entries
            if request.inline:
                kept.append(payload := ctypes.create_string_buffer(request.inline, len(request.inline)))
                entries = ((addressof(payload), len(request.inline), 0),)
            wr.sg_list, wr.num_sge = _sges(entries), len(entries)
            if request.opcode in (s.IBV_WR_ATOMIC_CMP_AND_SWP, s.IBV_WR_ATOMIC_FETCH_AND_ADD):
                atomic = wr.wr.atomic
                atomic.remote_addr, atomic.rkey = request.remote_addr, request.rkey
                atomic.compare_add, atomic.swap = request.compare_add, request.swap
            elif request.ah:
                ud = wr.wr.ud
                ud.ah = self.get("AH", request.ah)
                ud.remote_qpn, ud.remote_qkey = request.remote_qpn, request.remote_qkey
            else:
                wr.wr.rdma.remote_addr, wr.wr.rdma.rkey = request.remote_addr, request.rkey
        return self._post(ibv_post_send, self.get("QP", qp), chain)

    def post_recv(self, qp: int, requests: Sequence[Entries], first: int) -> Refused | None:
        return self._post(ibv_post_recv, self.get("QP", qp), _receives(requests, first))

    def _post(
        self, post: Callable[[Pointer[_Object], ctypes.Array[_Wr], object], int], queue: Pointer[_Object],
        chain: ctypes.Array[_Wr],
    ) -> Refused | None:
        for wr, following in pairwise(chain):
            wr.next = pointer(following)
        bad = POINTER(chain._type_)()
        if not (code := post(queue, chain, byref(bad))):
            return None
        index = (addressof(bad.contents) - addressof(chain)) // sizeof(chain._type_) if bad else 0
        return Refused(index, self._post_refused(errno_of(code)))

    def _post_refused(self, code: int) -> DocaError:
        if code == errno.ENOMEM:
            return FullError(f"{self.name} has no room for the request: poll the CQ first")
        name = errno.errorcode.get(code, code)
        kind = InvalidValueError if code == errno.EINVAL else DriverError
        return kind(f"{self.name} refuses the request: {os.strerror(code)} ({name})")

    # --- shared receive queues ---------------------------------------------------------------------------------------

    def create_srq(self, pdn: int, max_wr: int, max_sge: int) -> int:
        attr = s.ibv_srq_init_attr(attr=s.ibv_srq_attr(max_wr, max_sge, 0))
        srq = self.verbs.ibv_create_srq(self.get("PD", pdn), byref(attr))
        what = f"ibv_create_srq of {max_wr} receives of {max_sge} entries"
        return self._made("SRQ", what, srq, self.verbs.ibv_destroy_srq)

    def post_srq_recv(self, srq: int, requests: Sequence[Entries], first: int) -> Refused | None:
        return self._post(ibv_post_srq_recv, self.get("SRQ", srq), _receives(requests, first))

    def query_srq(self, srq: int) -> SrqValues:
        attr = s.ibv_srq_attr()
        self._check("ibv_query_srq", self.verbs.ibv_query_srq(self.get("SRQ", srq), byref(attr)))
        return SrqValues(attr.max_wr, attr.max_sge, attr.srq_limit)

    def arm_srq(self, srq: int, srq_limit: int) -> None:
        attr = s.ibv_srq_attr(srq_limit=srq_limit)
        code = self.verbs.ibv_modify_srq(self.get("SRQ", srq), byref(attr), s.IBV_SRQ_LIMIT)
        self._check(f"ibv_modify_srq to a limit of {srq_limit}", code)

    def resize_srq(self, srq: int, max_wr: int) -> None:
        attr = s.ibv_srq_attr(max_wr=max_wr)
        code = self.verbs.ibv_modify_srq(self.get("SRQ", srq), byref(attr), s.IBV_SRQ_MAX_WR)
        self._check(f"ibv_modify_srq to {max_wr} receives", code)

    def destroy_srq(self, srq: int) -> None:
        self._destroy("SRQ", srq)


def _mtu_code(nbytes: int) -> int:
    """Convert an MTU in bytes to an enum ibv_mtu."""
    return max(0, nbytes.bit_length() - 8)


def _sges(entries: Entries) -> ctypes.Array[s.ibv_sge]:
    """Convert entries to an array of `ibv_sge`."""
    return (s.ibv_sge * len(entries))(*entries)


def _receives(requests: Sequence[Entries], first: int) -> ctypes.Array[s.ibv_recv_wr]:
    """Convert requests to an array of `ibv_recv_wr`."""
    chain = (s.ibv_recv_wr * len(requests))()
    for number, (wr, entries) in enumerate(zip(chain, requests, strict=True)):
        wr.wr_id, wr.sg_list, wr.num_sge = first + number, _sges(entries), len(entries)
    return chain
