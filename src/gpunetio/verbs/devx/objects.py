"""DEVX for programs: commands of the PRM, and the objects they create."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...arguments import instance, member, octets, whole, within
from ...enums import Access, QpType, SrqType, UarAllocationType
from ...errors import DocaError, InvalidValueError
from ...formats.commands import Opcode, RqType
from ...formats.cqe import CQE_SIZE
from ...formats.doorbell import PI_MASK, QP_DBREC
from ...formats.layout import BitStruct, Fields
from ...formats.mailboxes import created_by, mailboxes
from ...formats.wqe import SEGMENT
from ...memory import round_up
from ..ah import path_to, with_type
from ..ah_attr import AhAttr
from ..commands import command
from ..cq import CQ
from ..handle import Handle
from ..mr import MR
from ..pd import PD
from ..qp import QP
from ..qp_init import QpInitAttr, queue_sizes
from ..srq import SRQ
from ..uar import UAR
from ..umem import UMEM
from .ring import ALIGNMENT, RECORD, doorbells
from .srq import srq_sizes

if TYPE_CHECKING:
    from ..context import Context

_NAMES = {int(opcode): opcode.name for opcode in Opcode}
_NUMBER = slice(9, 12)  # where most commands' outputs hold the number of the new object (PRM)
_MOST_BYTES = 0xFFFF  # of an input or output: the kernel's attributes have 16-bit lengths (struct ib_uverbs_attr)


@dataclass(frozen=True)
class RingLayout:
    """The layout of a queue in `nbytes` of memory: its ring, followed by its doorbell record.

    `sends` is the offset of the send ring, which follows the receive ring at offset 0. `record` is the offset of the
    doorbell record. `fields` are the fields of the queue's context (CQC, QPC, or the WQ of an RMPC) that set the sizes
    of the rings.
    """

    nbytes: int
    record: int
    fields: dict[str, int]
    sends: int = 0

    @classmethod
    def behind(cls, ring_bytes: int, fields: dict[str, int], sends: int = 0) -> RingLayout:
        """Return a layout with the doorbell record on its own cache line after the ring."""
        record = round_up(ring_bytes, ALIGNMENT)
        return cls(record + RECORD, record, fields, sends)


class DevxObject(Handle):
    """An object created by a DEVX command (`mlx5dv_devx_obj_create`). Closing it destroys the object.

    Until then the context keeps it alive: commands name objects only by number, so any other object may be using it.

    `number` is the device's number for the object, for example its CQN; `answer` is the command's output.
    """

    _rank = 0
    _kept = True
    answer: bytes
    number: int

    def __init__(self, ctx: Context, name: str, mailbox: bytes, out_size: int, uses: Iterable[Handle]):
        super().__init__(ctx)
        self._use(ctx, *(instance("uses", used, Handle) for used in instance("uses", uses, Iterable)))
        self.name = name
        self._destroyed = False
        provider = ctx.provider
        with ExitStack() as undo:
            with command(name):
                self._handle, self.answer = provider.devx_obj_create(mailbox, out_size)
            undo.callback(self._step(DevxObject._destroy))
            declared = name in Opcode.__members__
            self._named = mailboxes(Opcode[name]).named(mailbox, self.answer) if declared else {}
            self.number = [int.from_bytes(self.answer[_NUMBER], "big"), *self._named.values()][-1]
            self._opened(f"DEVX {created_by(name) or name} {self.number:#x} of {ctx.name}", undo)

    def _destroy(self) -> None:
        if not self._destroyed:
            with command(f"destroying what {self.name} made"):
                self.ctx.provider.devx_obj_destroy(self._handle)

    @property
    def destroyed(self) -> bool:
        """Return whether the device has destroyed the object, even if the object is not closed yet."""
        return self._destroyed or self.closed

    def destroy_if_unused(self) -> bool:
        """Destroy the object while its owner closes. Return whether this call destroyed it.

        The device refuses while another object uses this one.
        """
        if self.destroyed:
            return False
        with suppress(DocaError):
            self.ctx.provider.devx_obj_destroy(self._handle)
            self._destroyed = True
        return self._destroyed

    def modify(self, opcode: Opcode, **fields: object) -> Fields:
        """Run a command that changes the object, and return its output (`mlx5dv_devx_obj_modify`).

        The fields that name the object are filled in. `fields` are as in `Devx.create`.
        """
        return self._carry_out(opcode, fields, self.modify_raw)

    def query(self, opcode: Opcode | None = None, **fields: object) -> Fields:
        """Query the object's state (`mlx5dv_devx_obj_query`), with its own QUERY command or with `opcode`."""
        if opcode is None:
            kind = created_by(self.name)
            asked = f"QUERY_{kind}" if kind else self.name
            if asked not in Opcode.__members__:
                raise InvalidValueError(f"{asked} is not declared here: pack its mailbox yourself, and use query_raw()")
            opcode = Opcode[asked]
        return self._carry_out(opcode, fields, self.query_raw)

    def modify_raw(self, mailbox: bytes | bytearray, out_size: int) -> bytes:
        """Change the object with mailboxes that you pack and unpack yourself."""
        self.check_open()
        return self.ctx.provider.devx_obj_modify(self._handle, _input(mailbox), _room(out_size))

    def query_raw(self, mailbox: bytes | bytearray, out_size: int) -> bytes:
        """Query the object's state with mailboxes that you pack and unpack yourself."""
        self.check_open()
        return self.ctx.provider.devx_obj_query(self._handle, _input(mailbox), _room(out_size))

    def _carry_out(self, opcode: Opcode, fields: Fields, call: Callable[[bytes, int], bytes]) -> Fields:
        opcode = member("opcode", opcode, Opcode)
        boxes = mailboxes(opcode)
        names = {name: number for name, number in self._named.items() if name in boxes.request.fields}
        fields = {**names, **fields}
        mailbox, uses = _packed(opcode, fields)
        for used in uses:
            used.check_open()
        with command(opcode.name):
            return boxes.answer.unpack(call(mailbox, boxes.answer.size))


class Devx:
    """DEVX of a device, `Context.devx`: commands of the PRM, passed to the device unchanged (mlx5dv_devx_*(3)).

    Its objects close with the context, newest first, and only after the objects created from them. Mailboxes have the
    PRM's names: `gpunetio.formats.commands` declares them, `formats.contexts` the structures inside them, and
    `formats.ethernet_queues` both for Ethernet queues.
    """

    def __init__(self, ctx: Context):
        self._ctx = ctx
        self._domain: DevxObject | None = None
        self._allocating = threading.Lock()

    def __repr__(self) -> str:
        return f"<DEVX of {self._ctx}>"

    # --- commands ----------------------------------------------------------------------------------------------------

    def create(self, opcode: Opcode, *, uses: Iterable[Handle] = (), **fields: object) -> DevxObject:
        """Create an object (`mlx5dv_devx_obj_create`).

        `fields` are those of the command's input; a dict stands for a structure. Where a field holds the number of a
        UMEM, UAR, PD, CQ or DEVX object, give the object itself. Such an object cannot be closed before the new one;
        the same holds for the objects in `uses`. InvalidValueError for an unknown field or a value that is too large,
        DriverError if the device refuses.
        """
        opcode = member("opcode", opcode, Opcode)
        if created_by(opcode.name) is None:
            raise InvalidValueError(f"{opcode.name} creates no object: use command(), or modify() of the object")
        mailbox, used = _packed(opcode, fields)
        return DevxObject(self._ctx, opcode.name, mailbox, mailboxes(opcode).answer.size, [*used, *uses])

    def create_raw(self, mailbox: bytes | bytearray, out_size: int, *, uses: Iterable[Handle] = ()) -> DevxObject:
        """Create an object from an input that you pack yourself. The output has `out_size` bytes."""
        mailbox = _input(mailbox)
        opcode = int.from_bytes(mailbox[:2], "big")
        name = _NAMES.get(opcode) or f"command {opcode:#05x}"
        return DevxObject(self._ctx, name, mailbox, _room(out_size), uses)

    def command(self, opcode: Opcode, **fields: object) -> Fields:
        """Run a command that acts on no object, and return its output (`mlx5dv_devx_general_cmd`)."""
        opcode = member("opcode", opcode, Opcode)
        mailbox, _ = _packed(opcode, fields)
        answer = mailboxes(opcode).answer
        with command(opcode.name):
            return answer.unpack(self.command_raw(mailbox, answer.size))

    def command_raw(self, mailbox: bytes | bytearray, out_size: int) -> bytes:
        """Run such a command with mailboxes that you pack and unpack yourself."""
        return self._ctx.provider.general_cmd(_input(mailbox), _room(out_size))

    # --- what commands refer to --------------------------------------------------------------------------------------

    def register_umem(self, obj: object, access: Access = Access.LOCAL_WRITE, *, nbytes: int | None = None) -> UMEM:
        """Register memory for a queue (`mlx5dv_devx_umem_reg`): that of `obj`, or `nbytes` at the address `obj`."""
        return self._ctx.register_umem(obj, access, nbytes=nbytes)

    def alloc_uar(self, kind: UarAllocationType = UarAllocationType.NONCACHE) -> UAR:
        """Allocate a page of doorbell registers (`mlx5dv_devx_alloc_uar`)."""
        return self._ctx.create_uar(kind)

    def query_eqn(self, vector: int = 0) -> int:
        """Return the number of a completion vector's event queue (`mlx5dv_devx_query_eqn`). The driver owns it."""
        return self._ctx.provider.query_eqn(whole("vector", vector))

    def transport_domain(self) -> DevxObject:
        """Return the transport domain that the TIRs and TISs of this context share (ALLOC_TRANSPORT_DOMAIN).

        The first call allocates it. It closes with the context.
        """
        with self._allocating:
            if self._domain is None or self._domain.closed:
                self._domain = self.create(Opcode.ALLOC_TRANSPORT_DOMAIN)
            return self._domain

    def address_path(self, ah: AhAttr, port: int = 1) -> Fields:
        """Return the address path (ADS) to a peer for a QPC, with the MAC of the peer's GID.

        NotFoundError if that address does not answer.
        """
        instance("ah", ah, AhAttr).check(self._ctx.query_device())
        return path_to(self._ctx, port, with_type(self._ctx, port, ah)) | {"vhca_port_num": port}

    # --- rings -------------------------------------------------------------------------------------------------------

    def cq_layout(self, cqe: int) -> RingLayout:
        """Return the memory layout of a CQ of at least `cqe` entries. `fields` are for the CQC."""
        log = (within("cqe", cqe, 1, 1 << self._ctx.query_device().log_max_cq_sz) - 1).bit_length()
        return RingLayout.behind(CQE_SIZE << log, {"log_cq_size": log})

    def qp_layout(
        self, *, sq_wr: int = 0, rq_wr: int = 0, send_max_sges: int = 1, receive_max_sges: int = 1,
        max_inline_data: int = 0, qp_type: QpType = QpType.RC,
    ) -> RingLayout:
        """Return the memory layout of a QP's rings for this many requests. `fields` are for the QPC."""
        wanted = QpInitAttr(
            sq_wr=sq_wr, rq_wr=rq_wr, send_max_sges=send_max_sges, receive_max_sges=receive_max_sges,
            max_inline_data=max_inline_data, qp_type=qp_type,
        ).typed()
        sizes = queue_sizes(wanted, self._ctx.query_device())
        if sizes.rq_entries:
            log_stride = (sizes.rq_stride // SEGMENT).bit_length() - 1
            fields = {"log_rq_size": sizes.rq_entries.bit_length() - 1, "log_rq_stride": log_stride}
        else:
            fields = {"rq_type": int(RqType.ZERO_SIZE)}
        fields |= {"log_sq_size": sizes.sq_entries.bit_length() - 1} if sizes.sq_entries else {"no_sq": 1}
        return RingLayout.behind(sizes.rq_bytes + sizes.sq_bytes, fields, sends=sizes.rq_bytes)

    def srq_layout(
        self, srq_wr: int, *, receive_max_sges: int = 1, srq_type: SrqType = SrqType.LINKED_LIST
    ) -> RingLayout:
        """Return the memory layout of an RMP for this many receives. `fields` are for the WQ in its RMPC."""
        entries, stride = srq_sizes(
            whole("srq_wr", srq_wr), whole("receive_max_sges", receive_max_sges), member("srq_type", srq_type, SrqType)
        )
        fields = {"log_wq_sz": entries.bit_length() - 1, "log_wq_stride": stride.bit_length() - 1}
        return RingLayout.behind(entries * stride, fields)

    # --- doorbells ---------------------------------------------------------------------------------------------------

    def doorbell_register(self, uar: UAR, qp: DevxObject) -> int:
        """Return the address of a QP's send doorbell, which is rung with 8 bytes or through BlueFlame."""
        page, number = instance("uar", uar, UAR).page, instance("qp", qp, DevxObject).number
        return self._ctx.provider.doorbell_register(page, number)

    def ring_sends(self, uar: UAR, qp: DevxObject, record: int, producer: int) -> None:
        """Announce all WQEs of a send ring up to index `producer`.

        Write the QP's doorbell record at `record`, then ring the register. Earlier stores to the ring become visible to
        the device before that.
        """
        register = self.doorbell_register(uar, qp)
        doorbells().ring_send(record + QP_DBREC.snd, producer & PI_MASK, register, qp.number)
        self._ctx.provider.doorbell_rung()

    def ring_receives(self, record: int, producer: int) -> None:
        """Announce all WQEs of a receive ring up to index `producer` in the doorbell record of its QP or RMP."""
        doorbells().ring_receive(record + QP_DBREC.rcv, producer & PI_MASK)
        self._ctx.provider.doorbell_rung()


def _input(mailbox: object) -> bytes:
    """Return an input that a program has packed. InvalidValueError if no command takes an input of that size."""
    data = octets("mailbox", mailbox)
    within("the bytes of mailbox", len(data), 0, _MOST_BYTES)
    return data


def _room(out_size: object) -> int:
    """Return the bytes of an output. InvalidValueError if no command has an output of that size."""
    return within("out_size", out_size, 0, _MOST_BYTES)


_NUMBERS: dict[type[Handle], str] = {
    UMEM: "umem_id", UAR: "page_id", PD: "pdn", CQ: "cqn", QP: "qpn", SRQ: "srqn", MR: "lkey", DevxObject: "number",
}


def _packed(opcode: Opcode, fields: Fields) -> tuple[bytes, list[Handle]]:
    """Return the input of a command, and the objects that its fields refer to."""
    used: list[Handle] = []
    numbers = _numbered(fields, used)
    layout: BitStruct = mailboxes(opcode).request
    try:
        return bytes(layout.pack(opcode=opcode, **numbers)), used
    except (TypeError, ValueError, OverflowError) as error:  # an infinite float raises OverflowError
        raise InvalidValueError(f"{opcode.name}: {error}") from error


def _numbered(fields: Fields, used: list[Handle]) -> Fields:
    """Return the fields with each object replaced by its number."""
    found = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            value = _numbered(value, used)
        elif isinstance(value, Handle):
            used.append(value)
            value.check_open()
            value = getattr(value, _number_of(name, value))
        found[name] = value
    return found


def _number_of(field: str, value: Handle) -> str:
    for kind, name in _NUMBERS.items():
        if isinstance(value, kind):
            return name
    raise InvalidValueError(f"{field} = {value}: no command names an object of type {type(value).__name__}")
