"""A card whose queues the DOCA SDK creates. Commands for queues become calls of the SDK; rdma-core does the rest.

Rings and doorbell records lie in the caller's memory, because the SDK's queues have an external data path. So kernels
and the CPU use these queues like any others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from ctypes import byref, c_int, c_uint8, c_uint32, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from ...enums import Access, QpAttrMask, QpState, SrqType, UarAllocationType
from ...errors import UnexpectedError
from ...formats import commands as cmd
from ...formats.commands import Opcode, RqType, ScatterToCqe, ServiceType, WqType
from ...formats.contexts import QPC, RMPC
from ...formats.cqe import CQE_SIZE
from ...formats.doorbell import UAR_REG_OFFSET
from ...formats.events import EventType
from ...formats.layout import Fields
from ...formats.wqe import SEGMENT
from ...memory import round_up
from ..provider import Provider, UarPage
from . import transitions
from .libraries import Sdk, not_in_sdk_mode, sdk
from .signatures import DEVICE

_NO_FLAGS = 0  # DOCA_VERBS_CONTEXT_CREATE_FLAGS_NONE
_ON = 1
_RECORD_ALIGNMENT = 64  # of the doorbell record, which the SDK expects after the ring of a CQ or SRQ
# Open GPUNetIO passes `ibv_access_flags` as `doca_access_flag`. The order of the remote rights there is unknown, so
# remote rights are only requested all together.
_ACCESS = {Access.LOCAL_READ: 0x0, Access.LOCAL_WRITE: 0x1, Access.all(): 0xF}
_CREATED_OUT = cmd.CREATE_QP_OUT  # the number has the same offset in all of them


class RdmaCoreProvider(Provider, Protocol):
    """A provider whose device and PDs were opened by rdma-core, so that the SDK can import them by their addresses."""

    @property
    def ibv_context(self) -> int:
        """Return the address of the `ibv_context`."""
        ...

    def ibv_pd(self, pdn: int) -> int:
        """Return the address of a protection domain's `ibv_pd`."""
        ...


_AnyProvider = TypeVar("_AnyProvider", bound=RdmaCoreProvider)


def through_sdk(provider: _AnyProvider) -> _AnyProvider:
    """Return the same device. If the SDK is in use, the SDK creates the queues of the returned device.

    If the SDK cannot open the device, close it and raise the error.
    """
    found = sdk()
    if found is None or not found.use(*DEVICE):
        return provider
    return cast(_AnyProvider, SdkProvider(provider, found))  # it forwards all other methods of the provider


@dataclass
class _Umem:
    pointer: int
    address: int


@dataclass
class _Queue:
    """A CQ, QP or SRQ of the SDK.

    `qpc` holds the fields that commands have set in a QP so far; `initial` those of the first command.
    """

    kind: str
    number: int
    pointer: int
    undo: ExitStack
    initial: bytes = b""
    qpc: bytearray | None = None


class SdkProvider:
    """One open of a card in SDK mode. All other methods are those of the underlying provider."""

    carries_mailboxes = False  # it understands only the mailboxes that `verbs` sends

    def __init__(self, provider: RdmaCoreProvider, sdk: Sdk):
        self._provider, self._sdk = provider, sdk
        self._umems: dict[int, _Umem] = {}  # by UMEM id
        self._uars: dict[int, list[int]] = {}  # page id → pointers; all non-cached UARs share one page
        self._queues: dict[int, _Queue] = {}  # by handle, which is the pointer
        self._numbers: dict[tuple[str, int], _Queue] = {}
        self._pid = os.getpid()
        with ExitStack() as undo:
            undo.callback(provider.close)
            pdn = provider.alloc_pd()
            undo.callback(provider.dealloc_pd, pdn)
            self._dev = self._make(
                undo, "doca_dev_close",
                "doca_rdma_bridge_open_dev_from_pd", provider.ibv_pd(pdn),
            )
            self._context = self._make(
                undo, "doca_verbs_context_destroy",
                "doca_verbs_bridge_verbs_context_import", provider.ibv_context, _NO_FLAGS,
            )
            self._undo = undo.pop_all()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    def close(self) -> None:
        """Release the device, after everything created on it."""
        if self._pid == os.getpid():
            self._undo.close()

    def _make(self, undo: ExitStack, destroy: str, create: str, *args: object) -> int:
        pointer = self._sdk.make(create, *args)
        undo.callback(self._sdk.call, destroy, pointer)
        return pointer

    def _values(self, getter: str, pointer: int, *types: type[c_uint8 | c_uint32 | c_void_p]) -> list[int]:
        """Return the values that a getter stores through its trailing arguments."""
        values = [kind() for kind in types]
        self._sdk.call(getter, pointer, *map(byref, values))
        return [value.value or 0 for value in values]

    # --- memory and doorbells of queues ------------------------------------------------------------------------------

    def reg_umem(self, address: int, nbytes: int, access: Access) -> int:
        if access not in _ACCESS:
            raise not_in_sdk_mode(f"a UMEM with access {access!r}", "as the values of doca_access_flag are not known")
        with ExitStack() as undo:
            pointer = self._make(
                undo, "doca_umem_destroy",
                "doca_umem_create", self._dev, address, nbytes, _ACCESS[access],
            )
            (umem_id,) = self._values("doca_umem_get_id", pointer, c_uint32)
            undo.pop_all()
        self._umems[umem_id] = _Umem(pointer, address)
        return umem_id

    def reg_dmabuf_umem(self, fd: int, offset: int, nbytes: int, access: Access) -> int:
        raise not_in_sdk_mode("a UMEM in a dmabuf", "as doca_umem_gpu_create takes GPU memory and no descriptor")

    def dereg_umem(self, umem_id: int) -> None:
        self._sdk.call("doca_umem_destroy", self._umems[umem_id].pointer)
        del self._umems[umem_id]

    def alloc_uar(self, kind: UarAllocationType) -> UarPage:
        with ExitStack() as undo:
            pointer = self._make(undo, "doca_uar_destroy", "doca_uar_create", self._dev, kind)
            (page_id,) = self._values("doca_uar_id_get", pointer, c_uint32)
            (register,) = self._values("doca_uar_reg_addr_get", pointer, c_void_p)
            undo.pop_all()
        self._uars.setdefault(page_id, []).append(pointer)
        return UarPage(page_id, register - UAR_REG_OFFSET, register)

    def free_uar(self, page: UarPage) -> None:
        pointers = self._uars[page.page_id]
        self._sdk.call("doca_uar_destroy", pointers[-1])
        pointers.pop()

    def doorbell_register(self, uar: UarPage, qpn: int) -> int:
        """Return the register for `qpn`. The SDK knows which one the queue pair's send_dbr_mode needs."""
        return self._sdk.get("doca_verbs_qp_get_uar_addr", self._queue("QP", qpn))

    def near_register(self, register: int, engine: str) -> int | None:
        """Return None: a card's registers are never in GPU memory."""
        return None

    # --- queues ------------------------------------------------------------------------------------------------------

    def devx_obj_create(self, mailbox: bytes, out_size: int) -> tuple[int, bytes]:
        """Create a queue from a mailbox. The UMEMs, UARs and queues that it names were created by this provider."""
        create = {
            Opcode.CREATE_CQ: self._create_cq, Opcode.CREATE_QP: self._create_qp, Opcode.CREATE_RMP: self._create_srq,
        }[_opcode(mailbox)]
        with ExitStack() as undo:
            queue = create(mailbox, undo)
            queue.undo = undo.pop_all()
        self._queues[queue.pointer] = self._numbers[queue.kind, queue.number] = queue
        return queue.pointer, bytes(_CREATED_OUT.pack(qpn=queue.number))

    def devx_objects(self) -> list[int]:
        return list(self._queues)

    def devx_obj_destroy(self, handle: int) -> None:
        queue = self._queues.pop(handle)
        del self._numbers[queue.kind, queue.number]
        queue.undo.close()

    def _create_cq(self, mailbox: bytes, undo: ExitStack) -> _Queue:
        cqc = cmd.CREATE_CQ_IN.get(mailbox, "cq_context")
        if cqc["cqe_sz"]:
            raise not_in_sdk_mode("a CQ with entries of 128 bytes", "whose queues have entries of 64")
        entries = 1 << cqc["log_cq_size"]
        umem_id, offset = (cmd.CREATE_CQ_IN.get(mailbox, name) for name in ("cq_umem_id", "cq_umem_offset"))
        ring, record = self._ring_and_record(umem_id, offset, entries * CQE_SIZE, cqc)
        wanted = {
            "cq_size": entries,
            "external_datapath_en": _ON,
            "external_umem": (self._umems[umem_id].pointer, offset),
            "external_uar": self._uars[cqc["uar_page"]][0],
            "cq_overrun": cqc["oi"],
        } | ({"cq_collapsed": _ON} if cqc["cc"] else {})
        with self._sdk.attributes("doca_verbs_cq_attr", **wanted) as attr:
            pointer = self._make(undo, "doca_verbs_cq_destroy", "doca_verbs_cq_create", self._context, attr)
        found = self._values("doca_verbs_cq_get_wq", pointer, c_void_p, c_uint32, c_uint8)
        _, consumer, _ = self._values("doca_verbs_cq_get_dbr_addr", pointer, c_void_p, c_void_p, c_void_p)
        _agree("CQ", [*found, consumer], [ring, entries, CQE_SIZE, record])
        return _Queue("CQ", self._sdk.get("doca_verbs_cq_get_cqn", pointer), pointer, undo)

    def _create_srq(self, mailbox: bytes, undo: ExitStack) -> _Queue:
        wq = RMPC.get(mailbox, "wq", cmd.CREATE_RMP_IN.offset("ctx"))
        entries, stride = 1 << wq["log_wq_sz"], 1 << wq["log_wq_stride"]
        umem_id, offset = wq["wq_umem_id"], wq["wq_umem_offset"]
        ring, record = self._ring_and_record(umem_id, offset, entries * stride, wq)
        linked = wq["wq_type"] == WqType.LINKED_LIST  # then each WQE has one more segment, and one WQE stays unused
        with self._sdk.attributes(
            "doca_verbs_srq_init_attr",
            srq_wr=entries - linked,
            receive_max_sges=stride // SEGMENT - linked,
            type=SrqType.LINKED_LIST if linked else SrqType.CONTIGUOUS,
            pd=self._import_pd(undo, wq["pd"]),
            external_datapath_en=_ON,
            external_umem=(self._umems[umem_id].pointer, offset),
        ) as attr:
            pointer = self._make(undo, "doca_verbs_srq_destroy", "doca_verbs_srq_create", self._context, attr)
        found = self._values("doca_verbs_srq_get_wq", pointer, c_void_p, c_uint32, c_uint32)
        _agree(
            "SRQ", [*found, self._sdk.get("doca_verbs_srq_get_dbr_addr", pointer)], [ring, entries, stride, record]
        )
        return _Queue("SRQ", self._sdk.get("doca_verbs_srq_get_srqn", pointer), pointer, undo)

    def _create_qp(self, mailbox: bytes, undo: ExitStack) -> _Queue:
        at = cmd.CREATE_QP_IN.offset("qpc")
        qpc = mailbox[at : at + QPC.size]
        q = QPC.unpack(qpc)
        if q["st"] not in (ServiceType.RC, ServiceType.UC):
            raise not_in_sdk_mode("a queue pair for datagrams", "as it has only RC and UC")
        if cmd.CREATE_QP_IN.get(mailbox, "qpc_ext"):
            raise not_in_sdk_mode("a queue pair that copies memory", "as its queue pairs have no such attribute")
        if q["cs_req"]:
            raise not_in_sdk_mode("responses in completions", "as its queue pairs have no such attribute")
        umem_id, offset = (cmd.CREATE_QP_IN.get(mailbox, name) for name in ("wq_umem_id", "wq_umem_offset"))
        ring, record = self._umems[umem_id], self._umems[q["dbr_umem_id"]]
        wanted: Fields = {
            "pd": self._import_pd(undo, q["pd"]),
            "qp_type": q["st"],
            "user_index": q["user_index"],
            "send_dbr_mode": q["send_dbr_mode"],
            "core_direct_master": q["cd_master"],
            "external_datapath_en": _ON,
            "external_umem": (ring.pointer, offset),
            "external_dbr_umem": (record.pointer, q["dbr_addr"]),
            "external_uar": self._uars[q["uar_page"]][0],
        }
        # Only the size of the rings matters: these requests give rings of that size.
        sq_entries, rq_entries, stride = 0, 0, SEGMENT << q["log_rq_stride"]
        if not q["no_sq"]:
            sq_entries = 1 << q["log_sq_size"]
            wanted |= {"send_cq": self._queue("CQ", q["cqn_snd"]), "sq_wr": sq_entries, "send_max_sges": 1}
        if q["rq_type"] == RqType.REGULAR:
            rq_entries = 1 << q["log_rq_size"]
            wanted |= {"rq_wr": rq_entries, "receive_max_sges": stride // SEGMENT}
        if q["rq_type"] == RqType.SRQ_RMP:
            wanted |= {"srq": self._queue("SRQ", q["srqn_rmpn_xrqn"])}
        if q["rq_type"] != RqType.ZERO_SIZE:
            wanted |= {"receive_cq": self._queue("CQ", q["cqn_rcv"])}
        if q["cs_res"] == ScatterToCqe.DATA_32:
            wanted |= {"cqe_inline": _ON}
        with self._sdk.attributes("doca_verbs_qp_init_attr", **wanted) as attr:
            pointer = self._make(undo, "doca_verbs_qp_destroy", "doca_verbs_qp_create", self._context, attr)
        receives, sends = ring.address + offset, ring.address + offset + rq_entries * stride
        sq, sq_found, rq, rq_found, stride_found = self._values(
            "doca_verbs_qp_get_wq", pointer, c_void_p, c_uint32, c_void_p, c_uint32, c_uint32
        )
        found = [sq_found, rq_found, self._sdk.get("doca_verbs_qp_get_dbr_addr", pointer)]
        expected = [sq_entries, rq_entries, record.address + q["dbr_addr"]]
        if sq_entries:
            found, expected = [*found, sq], [*expected, sends]
        if rq_entries:
            found, expected = [*found, rq, stride_found], [*expected, receives, stride]
        _agree("QP", found, expected)
        return _Queue("QP", self._sdk.get("doca_verbs_qp_get_qpn", pointer), pointer, undo, qpc, bytearray(qpc))

    def _queue(self, kind: str, number: int) -> int:
        return self._numbers[kind, number].pointer

    def _import_pd(self, undo: ExitStack, pdn: int) -> int:
        """Import a protection domain into the SDK, for one queue."""
        pd = self._provider.ibv_pd(pdn)
        return self._make(undo, "doca_verbs_pd_destroy", "doca_verbs_bridge_verbs_pd_import", pd)

    def _ring_and_record(self, umem_id: int, offset: int, nbytes: int, named: Fields) -> tuple[int, int]:
        """Return the addresses of a CQ's or SRQ's ring and record.

        The SDK is given the ring's address, and derives the record's from it.
        """
        behind = offset + round_up(nbytes, _RECORD_ALIGNMENT)
        if (named["dbr_umem_id"], named["dbr_addr"]) != (umem_id, behind):
            raise not_in_sdk_mode(
                f"a doorbell record at offset {named['dbr_addr']:#x} of UMEM {named['dbr_umem_id']:#x}",
                f"where it has to be at offset {behind:#x} of UMEM {umem_id:#x}, behind its ring",
            )
        address = self._umems[umem_id].address
        return address + offset, address + behind

    # --- states of a queue pair --------------------------------------------------------------------------------------

    def devx_obj_modify(self, handle: int, mailbox: bytes, out_size: int) -> bytes:
        queue, opcode = self._queues[handle], _opcode(mailbox)
        if opcode in (Opcode.MODIFY_CQ, Opcode.RTS2SQD_QP, Opcode.SQD2RTS_QP) or _names_udp_sport(mailbox):
            raise not_in_sdk_mode(f"{Opcode(opcode).name} of {queue.kind} {queue.number:#x}", "as it has no such call")
        if queue.qpc is None:
            raise not_in_sdk_mode(f"the limit of {queue.kind} {queue.number:#x}", "as it has no call to set it")
        qpc = bytearray(queue.initial if opcode == Opcode.QP_2RST else queue.qpc)
        mask = transitions.carried(mailbox, QPC.get(qpc, "st"))
        transitions.take_over(qpc, mailbox, mask)
        wanted = {"next_state": transitions.STATE_AFTER[opcode], **transitions.attributes(qpc, mask)}
        with ExitStack() as given:
            if QpAttrMask.AH_ATTR in mask:
                port = self._provider.query_port(QPC.get(qpc, "primary_address_path.vhca_port_num"))
                address = transitions.address(qpc, port.link_layer)
                ah = self._sdk.attributes("doca_verbs_ah_attr", self._context, **address)
                wanted["ah_attr"] = given.enter_context(ah)
            attr = given.enter_context(self._sdk.attributes("doca_verbs_qp_attr", **wanted))
            self._sdk.call("doca_verbs_qp_modify", queue.pointer, attr, mask | QpAttrMask.NEXT_STATE)
        queue.qpc = qpc
        return bytes(out_size)

    def devx_obj_query(self, handle: int, mailbox: bytes, out_size: int) -> bytes:
        """Query a queue pair. The SDK reports only the state; all other fields are those that commands have set."""
        queue = self._queues[handle]
        if queue.qpc is None:
            raise not_in_sdk_mode(f"asking about {queue.kind} {queue.number:#x}", "as it does not report limits")
        mask = c_int(sum(QpAttrMask))
        with (
            self._sdk.attributes("doca_verbs_qp_attr") as attr,
            self._sdk.attributes("doca_verbs_qp_init_attr") as init_attr,
        ):
            self._sdk.call("doca_verbs_qp_query", queue.pointer, attr, init_attr, byref(mask))
            state = self._sdk.get("doca_verbs_qp_attr_get_current_state", attr)
        if state not in transitions.STATE_IN_QPC:
            raise UnexpectedError(f"the DOCA SDK reports state {state} of QP {queue.number:#x}, which does not exist")
        out, at = cmd.QUERY_QP_OUT.pack(), cmd.QUERY_QP_OUT.offset("qpc")
        out[at : at + QPC.size] = queue.qpc
        QPC.update(out, at, state=transitions.STATE_IN_QPC[QpState(state)])
        return bytes(out)

    # --- events ------------------------------------------------------------------------------------------------------

    def subscribe(self, channel: int, handle: int | None, types: Iterable[EventType], cookie: int) -> None:
        """Subscribe to events. DEVX reports neither completions nor errors of the SDK's queues."""
        if handle is None:
            self._provider.subscribe(channel, handle, types, cookie)
        elif EventType.COMPLETION in types:
            raise not_in_sdk_mode("a completion channel", "as the SDK's queues have no DEVX events")


def _opcode(mailbox: bytes) -> Opcode:
    return Opcode(int.from_bytes(mailbox[:2], "big"))


def _agree(kind: str, found: list[int], wanted: list[int]) -> None:
    """Raise UnexpectedError unless the SDK has laid out a queue as requested."""
    if found != wanted:
        raise UnexpectedError(
            f"the DOCA SDK has laid out a {kind} as {[hex(value) for value in found]}, not as "
            f"{[hex(value) for value in wanted]}"
        )


def _names_udp_sport(mailbox: bytes) -> bool:
    """Return whether the command sets a UDP source port, which has its bit in a second mask."""
    return _opcode(mailbox) == Opcode.RTS2RTS_QP and cmd.RTS2RTS_QP_IN.get(mailbox, "opt_param_mask_95_32") != 0
