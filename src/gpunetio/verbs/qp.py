"""Queue pairs."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

from ..arguments import flags, instance, member, whole, within
from ..enums import Access, AddrType, QpAtomicType, QpAttrMask, QpSendDbrMode, QpState, QpType
from ..errors import BadStateError, InvalidValueError, NotFoundError, NotSupportedError
from ..interrupts import deferred
from .ah import with_type
from .ah_attr import AhAttr
from .devx.posting import Posting
from .devx.ring import Ring
from .dpa import AnyDpa
from .handle import Handle
from .qp_dpa import for_dpa
from .qp_init import QpInitAttr
from .qp_state import ATTRIBUTES, QpAttr, Transition, check_values, mtu_bytes, transition
from .uar import UAR
from .work import RecvWr, SendWr

if TYPE_CHECKING:
    from .cq import CQ
    from .mr import MR
    from .pd import PD

_M = QpAttrMask
_TO_INIT = _M.NEXT_STATE | _M.PKEY_INDEX | _M.PORT_NUM | _M.ALLOW_REMOTE_WRITE | _M.ALLOW_REMOTE_READ | _M.ATOMIC_MODE
_TO_RTR = (
    _M.NEXT_STATE | _M.RQ_PSN | _M.DEST_QP_NUM | _M.PATH_MTU | _M.AH_ATTR | _M.MIN_RNR_TIMER | _M.MAX_DEST_RD_ATOMIC
)
_DATAGRAMS_TO_INIT = _M.NEXT_STATE | _M.PKEY_INDEX | _M.PORT_NUM | _M.QKEY
_TO_RTS = _M.NEXT_STATE | _M.SQ_PSN | _M.ACK_TIMEOUT | _M.RETRY_CNT | _M.RNR_RETRY | _M.MAX_QP_RD_ATOMIC
_REMOTE = Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
_ONLY_RC = (
    _M.MIN_RNR_TIMER | _M.ACK_TIMEOUT | _M.RETRY_CNT | _M.RNR_RETRY | _M.MAX_QP_RD_ATOMIC | _M.MAX_DEST_RD_ATOMIC
    | _M.ATOMIC_MODE
)


def _new_psn() -> int:
    """Return a random PSN, so that packets from an earlier connection or a vanished peer don't match."""
    return secrets.randbits(24)


@dataclass(frozen=True)
class QpEndpoint:
    """What a peer needs to connect to a queue pair: plain values, which you can send by any means.

    `gid` is 16 raw bytes, `mtu` the port's active MTU in bytes, `psn` the number of the first packet sent.
    """

    qpn: int
    gid: bytes
    lid: int
    mtu: int
    psn: int = 0


class ConnectOptions(TypedDict, total=False):
    """The options of `QP.connect`."""

    port: int | None
    sgid_index: int
    pkey_index: int | None
    psn: int | None
    remote_access: Access | None
    atomic_type: QpAtomicType
    max_rd_atomic: int
    retry_cnt: int
    rnr_retry: int
    ack_timeout: int
    min_rnr_timer: int
    sl: int
    traffic_class: int
    hop_limit: int
    flow_label: int
    addr_type: AddrType | None


class QP(Handle, ABC):
    """A queue pair (`doca_verbs_qp`), number `qpn`.

    `psn` is the random number of its first packet. Each reset draws a new one.

    `sq_address`, `sq_entries`                 send ring, in WQE basic blocks of 64 bytes (`doca_verbs_qp_get_wq`)
    `rq_address`, `rq_entries`, `rq_stride`    receive ring, in WQEs of `rq_stride` bytes
    `dbr_address`                              doorbell record: receive word, send word (`doca_verbs_qp_get_dbr_addr`)
    `ring`                                     the memory in which rings and record lie
    `doorbell_register`                        register that a post rings (`doca_verbs_qp_get_uar_addr`)
    `send_cq`, `receive_cq`                    CQs of the rings, also if they belong to DPA completions
    """

    _rank = 0
    qpn: int
    sq_address: int
    sq_entries: int
    rq_address: int
    rq_entries: int
    rq_stride: int
    dbr_address: int
    ring: Ring
    doorbell_register: int
    uar: UAR
    pd: PD
    init_attr: QpInitAttr
    send_dbr_mode: QpSendDbrMode
    emulate_no_dbr_ext: bool
    send_cq: CQ | None
    receive_cq: CQ | None
    context: object
    psn: int
    asked_state: QpState
    rules: Callable[[QpState, QpState, QpType], Transition]  # returns the attributes that a transition takes
    opaque: MR | None = None  # with `memcpy`: the buffer that its MEMCPY requests name

    def __init__(self, pd: PD, attr: QpInitAttr):
        ctx = pd.ctx
        super().__init__(ctx)
        self._use(pd, ctx)
        attr = attr.typed()
        self._dpa, wired = for_dpa(attr)
        self._use(wired.send_cq, wired.receive_cq, attr.srq, attr.external_uar)
        self._use(self._dpa, attr.send_dpa_completion, attr.receive_dpa_completion)
        self._check(wired)
        self.pd, self.init_attr = pd, attr
        self.send_dbr_mode, self.emulate_no_dbr_ext = attr.send_dbr_mode, attr.emulate_no_dbr_ext
        self.send_cq, self.receive_cq = wired.send_cq, wired.receive_cq
        self.context = attr.context
        self._posting: Posting | None = None
        self.asked_state = QpState.RST  # the last state requested here; the device may be in another
        self.psn = _new_psn()
        self.rules = transition
        with ExitStack() as undo:
            self._create(undo)
            self._opened(f"QP {self.qpn:#x} of {ctx.name}", undo)

    @property
    def type(self) -> QpType:
        """Return the service type of the queue pair: RC, UC, UD or GSI."""
        return QpType(self.init_attr.qp_type)

    def _details(self) -> Iterable[str]:
        attr = self.init_attr
        yield self.type.name
        if attr.sq_wr:
            yield f"{attr.sq_wr} sends"
        if attr.srq or attr.rq_wr:
            yield f"receives from {attr.srq}" if attr.srq else f"{attr.rq_wr} receives"

    def _check(self, attr: QpInitAttr) -> None:
        """Raise an error unless the device can create this queue pair."""
        attr.check(self.ctx.query_device())

    @abstractmethod
    def _create(self, undo: ExitStack) -> None:
        """Create the queue pair on the device, and set `qpn`, and `_posting` if the CPU posts."""

    @property
    def state(self) -> QpState:
        """Return the state that the device reports. After an error, this may be ERR."""
        self.check_open()
        return self._now(_M(0), None).current_state

    @abstractmethod
    def _ask(self) -> QpAttr:
        """Return all attributes that the device reports. `ah_attr` is None before RTR."""

    @property
    @abstractmethod
    def used(self) -> bool:
        """Return whether anything has posted requests since the queue pair was in RST, be it the CPU or a kernel."""

    @deferred()
    def modify(self, attr: QpAttr, mask: QpAttrMask | int) -> None:
        """Move to another state, or change attributes in the current state (`doca_verbs_qp_modify`).

        Only attributes in `mask` count; without NEXT_STATE, the state stays the same. The transition starts from the
        state that the device reports, or from `attr.current_state` if the mask has CURRENT_STATE; if that is wrong, the
        device refuses.

        The right to remote atomics changes only with ATOMIC_MODE in the mask. The transition to RTR resolves the path
        to the peer.
        """
        self.check_open()
        mask, attr = QpAttrMask(whole("mask", mask)), instance("attr", attr, QpAttr)
        wanted = member("next_state", attr.next_state, QpState) if _M.NEXT_STATE in mask else None
        now = self._now(mask, wanted)
        claimed = _M.CURRENT_STATE in mask
        current = member("current_state", attr.current_state, QpState) if claimed else now.current_state
        following = current if wanted is None else wanted
        move = self.rules(current, following, self.type)
        move.check(mask, self.type)
        if _M.PATH_MTU in mask:
            attr = replace(attr, path_mtu=mtu_bytes("path_mtu", attr.path_mtu))
        check_values(attr, mask, self.ctx.query_device())
        if _M.AH_ATTR in mask and attr.ah_attr:
            attr = replace(attr, ah_attr=with_type(self.ctx, now.port_num or 1, attr.ah_attr))
        self._move(move, attr, mask, now)
        self.asked_state = following
        if self._posting:
            self._posting.state = following
        if following == QpState.RST:
            self.psn = _new_psn()
            self._restart()

    @abstractmethod
    def _move(self, move: Transition, attr: QpAttr, mask: QpAttrMask, now: QpAttr) -> None:
        """Make this transition on the device. The attributes are already checked; `now` is the result of `_now`."""

    def _now(self, mask: QpAttrMask, following: QpState | None) -> QpAttr:
        """Return the attributes that the device reports, or at least those that a change to state `following` needs.

        The state may be missing if the transition is possible from every state, or if the mask gives the state.
        """
        return self._ask()

    def query(self, mask: QpAttrMask | None = None) -> tuple[QpAttr, QpInitAttr]:
        """Query the attributes in `mask`, by default all (`doca_verbs_qp_query`).

        Attributes outside the mask, and those that no transition has set yet, have the defaults of `QpAttr`.
        """
        self.check_open()
        attr = self._ask()
        if mask is not None:
            mask = flags("mask", mask, QpAttrMask)
            attr = QpAttr(**{name: getattr(attr, name) for bit, name in ATTRIBUTES.items() if bit in mask})
        return attr, self.init_attr

    def modify_udp_sport(self, port: int) -> None:
        """Set the UDP source port, from `min_udp_sport` to `max_udp_sport` of the device, in state RTS.

        Only for RoCE v2, where switches choose paths by this port (`mlx5dv_modify_qp_udp_sport`).
        """
        self.check_open()
        device = self.ctx.query_device()
        if not device.can_modify_udp_sport:
            raise NotSupportedError(f"{self.ctx.name} does not change the UDP source port of a queue pair")
        self._set_udp_sport(within("port", port, device.min_udp_sport, device.max_udp_sport))

    @abstractmethod
    def _set_udp_sport(self, port: int) -> None:
        """Set the UDP source port on the device."""

    def reset(self) -> None:
        """Move to RST from any state. A doorbell record in your own UMEM must be zeroed by you."""
        self.modify(QpAttr(next_state=QpState.RST), _M.NEXT_STATE)

    def _serve(self, posting: Posting) -> None:
        """Deliver completions to `posting`, because the CPU posts."""
        self._posting = posting
        for cq in self._cqs():
            cq.serve(self.qpn, posting)

    def forget(self) -> None:
        """Forget completions that were not polled, after the device has destroyed the queue pair."""
        for cq in self._cqs() if self._posting else ():
            cq.forget(self)

    def _cqs(self) -> set[CQ]:
        return {cq for cq in (self.init_attr.send_cq, self.init_attr.receive_cq) if cq}

    def _restart(self) -> None:
        """Forget posted requests and their completions, after the transition to RST."""
        if self._posting and self._posting.used:
            for cq in self._cqs():
                cq.drop(self)
            self._posting.reset()

    @property
    def posting(self) -> Posting:
        """Return the rings of the CPU data path. BadStateError if they belong to a DPA or lie in your own UMEM."""
        self.check_open()
        if self._dpa:
            raise BadStateError(
                f"{self} has an external data path: kernels of {self._dpa} drive it, by get_dpa_handle(); create it "
                "without a DPA to post from the CPU"
            )
        if self._posting is None:
            raise BadStateError(
                f"{self} has an external data path: its rings are yours to fill; leave out external_datapath and "
                "external_umem to post from the CPU"
            )
        return self._posting

    def post_send(self, *requests: SendWr) -> None:
        """Post requests to the send queue, in order, and ring the doorbell once (`doca_verbs_bridge_post_send`).

        BadWrError names the first refused request; those before it are posted. In ERR, requests complete with a flush
        error. Before RTS, requests are refused.
        """
        posting = self.posting
        posting.check("sends", QpState.RTS)
        posting.post(posting.send, requests)

    def post_recv(self, *requests: RecvWr) -> None:
        """Post requests to the receive queue, from INIT on (`doca_verbs_bridge_post_recv`).

        Errors are as in `post_send`.
        """
        posting = self.posting
        if self.init_attr.srq:
            raise InvalidValueError(f"{self} receives from {self.init_attr.srq}: post there")
        posting.check("receives", QpState.INIT)
        posting.post(posting.receive, requests)

    def get_dpa_handle(self, dpa: AnyDpa) -> int:
        """Return the pointer that kernels of `dpa` pass to `put`, `wait`, … (`doca_verbs_qp_get_dpa_handle`).

        The pointer never changes, not even after a reset. InvalidValueError unless the queue pair was created for this
        DPA.
        """
        self.check_open()
        if dpa is not self._dpa:
            raise InvalidValueError(f"{self} was not made for {dpa}: create a queue pair with dpa = that DPA")
        return dpa.handle(self)

    def wait_idle(self) -> None:
        """Wait until no kernel uses the queue pair. If it belongs to a DPA, wait until no kernel runs there."""
        if self._dpa:
            self._dpa.wait_for_kernels(str(self))
        super().wait_idle()

    def to_error(self) -> None:
        """Move to ERR: posted requests complete with an error."""
        self.modify(QpAttr(next_state=QpState.ERR), _M.NEXT_STATE)

    def endpoint(self, *, port: int = 1, sgid_index: int = 0, psn: int | None = None) -> QpEndpoint:
        """Return what the peer's `connect` needs. Give this end's `connect` the same port, GID index and PSN."""
        self.check_open()
        gid = self.ctx.query_gid(port, sgid_index)
        if not any(gid):
            raise NotFoundError(
                f"port {port} of {self.ctx.name} has no GID at index {sgid_index}: choose one that "
                "`gpunetio devices -v` shows, or give the port's interface an address"
            )
        about = self.ctx.query_port(port)
        psn = self.psn if psn is None else whole("psn", psn)
        return QpEndpoint(self.qpn, bytes(gid), about.lid, about.active_mtu, psn)

    def to_init(
        self,
        *,
        port: int = 1,
        pkey_index: int = 0,
        remote_access: Access = _REMOTE,
        atomic_type: QpAtomicType = QpAtomicType.IB_SPEC,
        qkey: int = 0,
    ) -> None:
        """Move a queue pair from RST to INIT. From then on receives can be posted; `connect()` or `to_rts()` follows.

        `remote_access` gives the peer's rights. A queue pair for datagrams has a `qkey` instead.
        """
        attr = QpAttr(next_state=QpState.INIT, port_num=port, pkey_index=pkey_index, qkey=qkey)
        if self.type.datagrams:
            self.modify(attr, _DATAGRAMS_TO_INIT)
            return
        self.modify(replace(attr, **_rights(remote_access, atomic_type)), _TO_INIT & ~self._left_out)

    @deferred()
    def to_rts(self, *, qkey: int = 0, port: int = 1, pkey_index: int = 0, psn: int | None = None) -> None:
        """Move a queue pair for datagrams from RST or INIT to RTS. On failure, the queue pair is in RST.

        It accepts datagrams with this `qkey`; a GSI queue pair always has 0x80010000. In INIT, the attributes given to
        `to_init` stay. `psn` numbers the first packet sent; by default it is the queue pair's own `psn`.
        """
        if not self.type.datagrams:
            raise BadStateError(f"{self} is {self.type.name}, which has one peer: connect() it")
        try:
            if self.state == QpState.RST:
                self.to_init(port=port, pkey_index=pkey_index, qkey=qkey)
            self.modify(QpAttr(next_state=QpState.RTR), _M.NEXT_STATE)
            first = self.psn if psn is None else psn
            self.modify(QpAttr(next_state=QpState.RTS, sq_psn=first), _M.NEXT_STATE | _M.SQ_PSN)
        except BaseException:
            self.reset()
            raise

    @deferred()
    def connect(
        self,
        remote: QpEndpoint | QP,
        *,
        port: int | None = None,
        sgid_index: int = 0,
        pkey_index: int | None = None,
        psn: int | None = None,
        remote_access: Access | None = None,
        atomic_type: QpAtomicType = QpAtomicType.IB_SPEC,
        max_rd_atomic: int = 16,
        retry_cnt: int = 7,
        rnr_retry: int = 7,
        ack_timeout: int = 14,
        min_rnr_timer: int = 1,
        sl: int = 0,
        traffic_class: int = 0,
        hop_limit: int = 255,
        flow_label: int = 0,
        addr_type: AddrType | None = None,
    ) -> None:
        """Move a queue pair from RST or INIT to RTS. On failure, it is in RST, and posted requests are lost.

        Given the peer's QpEndpoint, connect this end; the peer connects to `self.endpoint()` itself. Given a QP of this
        process, connect both ends, with the same arguments.

        `remote_access` gives the peer's rights, by default all. A queue pair in INIT keeps its port, P_Key index and
        access rights unless they are given; in RST, the port is 1 and the P_Key index 0 by default.

        The path MTU is the smaller active MTU of the two ports. Up to `max_rd_atomic` reads and atomics, limited by the
        device, are in flight in each direction (see `QpAttr`); 0 refuses them. `psn` numbers the first packet sent. By
        default it is the queue pair's own `psn`, which changes with each reset: give the peer a new `endpoint()` then.
        UC ignores the parameters of acknowledgements, READs and atomics. By default, `addr_type` follows from the
        peer's GID and the port; IB_GRH gives packets on InfiniBand a global route, even within a subnet.
        """
        instance("remote", remote, QP, QpEndpoint)
        if self.type.datagrams:
            raise BadStateError(f"{self} is {self.type.name}, and its requests name their destinations: to_rts() it")
        given: dict[str, object] = {} if remote_access is None else {**_rights(remote_access, atomic_type)}
        if port is not None:
            given["port_num"] = port
        if pkey_index is not None:
            given["pkey_index"] = pkey_index
        limits = {
            "ack_timeout": ack_timeout, "retry_cnt": retry_cnt, "rnr_retry": rnr_retry, "min_rnr_timer": min_rnr_timer,
            "max_rd_atomic": max_rd_atomic, "max_dest_rd_atomic": max_rd_atomic,
        }
        path = AhAttr(
            sgid_index=sgid_index, sl=sl, traffic_class=traffic_class, hop_limit=hop_limit, flow_label=flow_label,
            addr_type=addr_type,
        )
        qps = [self, remote] if isinstance(remote, QP) and remote is not self else [self]
        wanted = [replace(qp._before_connect(atomic_type), **given, **limits) for qp in qps]
        peers: list[QpEndpoint]
        if isinstance(remote, QP):
            peers = [
                qp.endpoint(port=attr.port_num, sgid_index=sgid_index, psn=psn)
                for qp, attr in zip(qps, wanted, strict=True)
            ][::-1]
        else:
            peers = [remote]
        try:
            for qp, attr, peer in zip(qps, wanted, peers, strict=True):
                qp._connect(peer, replace(attr, sq_psn=qp.psn if psn is None else psn), path)
        except BaseException:
            for qp in qps:
                qp.reset()
            raise

    def _before_connect(self, atomic_type: QpAtomicType) -> QpAttr:
        """Return the port, P_Key index and rights: those of INIT, or the defaults of `connect` in RST."""
        self.check_open()
        now = self._ask()
        if now.current_state == QpState.INIT:
            return now
        if now.current_state == QpState.RST:
            return QpAttr(**_rights(_REMOTE, atomic_type))
        raise BadStateError(
            f"{self} is in state {now.current_state.name}, but connect() starts from RST or INIT: reset() it first"
        )

    @property
    def _left_out(self) -> QpAttrMask:
        """Return the attributes that queue pairs of this type do not have."""
        return _ONLY_RC if self.init_attr.qp_type == QpType.UC else _M(0)

    def _connect(self, remote: QpEndpoint, wanted: QpAttr, path: AhAttr) -> None:
        """Connect one end: add to the requested attributes what the peer and the two ports determine."""
        device = self.ctx.query_device()
        if not (state := self.ctx.query_port(wanted.port_num).state).is_active:
            raise BadStateError(
                f"port {wanted.port_num} of {self.ctx.name} is not active ({state.name}), so no peer can be "
                "reached: check its cable, `rdma link` and `ip link`, and on InfiniBand the subnet manager"
            )
        local = self.endpoint(port=wanted.port_num, sgid_index=path.sgid_index)
        most = whole("max_rd_atomic", wanted.max_rd_atomic)
        attr = replace(
            wanted,
            path_mtu=min(local.mtu, mtu_bytes("remote.mtu", remote.mtu)),
            rq_psn=remote.psn,
            dest_qp_num=remote.qpn,
            max_rd_atomic=min(most, device.max_qp_init_rd_atom),
            max_dest_rd_atomic=min(most, device.max_qp_rd_atom),
            ah_attr=replace(path, gid=bytes(instance("remote.gid", remote.gid, bytes, bytearray)), dlid=remote.lid),
        )
        for state, mask in ((QpState.INIT, _TO_INIT), (QpState.RTR, _TO_RTR), (QpState.RTS, _TO_RTS)):
            self.modify(replace(attr, next_state=state), mask & ~self._left_out)


class _Rights(TypedDict):
    """A peer's rights, as attributes of QpAttr."""

    allow_remote_write: bool
    allow_remote_read: bool
    allow_remote_atomic: QpAtomicType


def _rights(remote_access: Access, atomic_type: QpAtomicType) -> _Rights:
    """Convert a peer's rights to attributes."""
    access = flags("remote_access", remote_access, Access)
    return {
        "allow_remote_write": Access.REMOTE_WRITE in access,
        "allow_remote_read": Access.REMOTE_READ in access,
        "allow_remote_atomic": atomic_type if Access.REMOTE_ATOMIC in access else QpAtomicType.NONE,
    }
