"""Send DEVX commands with random contents, one after another, to one software NIC.

    python tests/rigs/foreign_commands.py N [SEED]   sends N commands, and prints each exception that is our mistake

The commands are those of a small program that uses every kind of object, with fields or bytes changed. They come
through the provider, as from Python, or by ioctl(2), as from a program under `gpunetio run`. What they create lives on
for a while, so that other commands name it. In the end none of it may be left, and the NIC must work.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from typing import Any, NamedTuple
from unittest.mock import patch

from ethernet_rig import Maker, nic_of
from gpunetio import verbs
from gpunetio.enums import Access, LinkLayer, QpAttrMask, QpState, QpType, WrOpcode
from gpunetio.errors import DocaError
from gpunetio.formats.commands import OUT, CapClass, MkeyAccessMode, Opcode
from gpunetio.formats.contexts import KLM, ROCE_ADDR_LAYOUT
from gpunetio.formats.ethernet_queues import ModifyRq, ModifyRqt, ModifyTir, ModifyTis, QueueState, rq_list
from gpunetio.formats.flow import (
    DEST_FORMAT,
    FLOW_COUNTER_LIST,
    DestinationType,
    EntryModify,
    FlowAction,
    MatchCriteria,
    RootChange,
)
from gpunetio.formats.layout import BitStruct
from gpunetio.formats.mailboxes import mailboxes
from gpunetio.nic.control.command import Call
from gpunetio.nic.control.objects import MailboxObjects, Objects
from gpunetio.nic.engine.port import PortConfig
from gpunetio.providers.soft import SoftProvider, open_device
from gpunetio.uverbs import abi, call
from gpunetio.uverbs.abi import Object
from gpunetio.uverbs.call import Refused
from gpunetio.uverbs.calls import Calls
from gpunetio.verbs import DevxObject, QpAttr, SendWr, Sge
from mistake_kinds import print_kinds
from mutations import mutated
from nic_rig import until

_MOST_OBJECTS = 60
_STEP = 10_000
ETHERNET = PortConfig()
PORTS = {"ethernet": ETHERNET, "udp": PortConfig("127.0.0.1", wire="udp"),
         "infiniband": PortConfig(link_layer=LinkLayer.INFINIBAND)}
_ROOMS = [0, 1, 15, 16, 17, 64, 272, 1024, 0xFFFF]


class Sample(NamedTuple):
    """A command that is right: the call that carries it, its input, and the bytes of its answer."""

    kind: Call
    mailbox: bytes
    room: int

    @property
    def opcode(self) -> int:
        return int.from_bytes(self.mailbox[:2], "big")


# --- a program that is right -----------------------------------------------------------------------------------------


def _recorded(provider: SoftProvider, run: Callable[[], None]) -> list[Sample]:
    """Return the commands that a device gets during a call, and those that would destroy what it makes."""
    found: list[Sample] = []

    def note(kind: Call) -> AbstractContextManager[object]:
        method = getattr(provider, kind.value)

        def noted(*arguments: Any) -> object:
            *_, mailbox, room = arguments
            found.append(Sample(kind, bytes(mailbox), room))
            return method(*arguments)

        return patch.object(provider, kind.value, noted)

    with ExitStack() as patches:
        for kind in (Call.CREATE, Call.MODIFY, Call.QUERY, Call.GENERAL):
            patches.enter_context(note(kind))
        run()
    made = [provider._objects[handle].destroy_mailbox for handle in provider.devx_objects()]
    return [*found, *(Sample(Call.DESTROY, mailbox, OUT.size) for mailbox in made)]


class Program:
    """The program. Its objects stay until it closes."""

    def __init__(self, ctx: verbs.Context):
        self.ctx, self.maker, self.pd = ctx, Maker(ctx), ctx.create_pd()
        self.region = self.pd.register(bytearray(1 << 16), Access.LOCAL_WRITE | Access.REMOTE_WRITE)
        self.kept: list[object] = []

    def run(self) -> None:
        self._verbs()
        self._indirect_key()
        if not nic_of(self.ctx).port.no_ethernet:
            self._ethernet()
            self._flow()
        self._general()

    def _verbs(self) -> None:
        cq = self.ctx.create_cq(16)
        cq.resize(32)
        srq = self.pd.create_srq(15)
        srq.modify(srq_limit=3)
        srq.query()
        self.kept += [cq, srq]
        for kind in QpType.RC, QpType.UC, QpType.UD:
            qp = self.pd.create_qp(qp_type=kind, send_cq=cq, receive_cq=cq, sq_wr=4, rq_wr=4)
            self.kept.append(qp)
            qp.to_init()
            qp.modify(QpAttr(pkey_index=0), QpAttrMask.PKEY_INDEX)
            if kind is QpType.UD:
                qp.to_rts()
            else:
                qp.connect(qp)
            for state in QpState.SQD, QpState.RTS, QpState.ERR, QpState.RST:
                qp.modify(QpAttr(next_state=state), QpAttrMask.NEXT_STATE)
            qp.query()
        pooled = self.pd.create_qp(send_cq=cq, receive_cq=cq, sq_wr=4, srq=srq)
        pooled.connect(pooled)
        pooled.modify(QpAttr(min_rnr_timer=3), QpAttrMask.MIN_RNR_TIMER)
        self.kept.append(pooled)

    def _indirect_key(self) -> None:
        box = mailboxes(Opcode.CREATE_MKEY).request.pack(
            opcode=Opcode.CREATE_MKEY, translations_octword_actual_size=2, memory_key_mkey_entry={
                "access_mode_1_0": MkeyAccessMode.KSM, "pd": self.pd.pdn, "lw": 1, "rw": 1, "log_entity_size": 12,
                "start_addr": self.region.address, "len": 8192, "translations_octword_size": 2,
            },
        )
        for n in range(2):
            box += KLM.pack(mkey=self.region.lkey, address=self.region.address + n * 4096)
        self.kept.append(self.ctx.devx.create_raw(box, 16))

    def _ethernet(self) -> None:
        make = self.maker
        self.domain, cq, counter = make.domain(), make.cq(), make.counter()
        tis = make.tis(self.domain.number)
        tis.modify(Opcode.MODIFY_TIS, ctx={"prio": 1}, bitmask=ModifyTis.PRIO)
        sq = make.sq(cq.number, tis.number)
        rq, striding = make.rq(cq.number, counter_set_id=counter.number), make.rq(
            cq.number, wq={"wq_type": 3, "log_wq_stride": 5, "log_wqe_stride_size": 0}
        )
        pooled = make.rq(cq.number, mem_rq_type=1, rmpn=make.rmp().number)
        sq.modify(Opcode.MODIFY_SQ, sq_state=QueueState.RST, ctx={"state": QueueState.RDY})
        rq.modify(Opcode.MODIFY_RQ, rq_state=QueueState.RST, ctx={"state": QueueState.RDY})
        rq.modify(
            Opcode.MODIFY_RQ, rq_state=QueueState.RDY, modify_bitmask=ModifyRq.VSD | ModifyRq.COUNTER_SET_ID,
            ctx={"state": QueueState.RDY, "counter_set_id": counter.number},
        )
        rqt = make.rqt([rq.number, striding.number])
        rqt.modify(
            Opcode.MODIFY_RQT, bitmask=ModifyRqt.RQN_LIST, ctx={"rqt_max_size": 8, "rqt_actual_size": 2},
            rq_num=rq_list([pooled.number, rq.number]),
        )
        self.direct, hashed = make.direct(self.domain.number, rq.number), make.hashed(self.domain.number, rqt.number)
        hashed.modify(Opcode.MODIFY_TIR, bitmask=ModifyTir.INDIRECT_TABLE, ctx={"indirect_table": rqt.number})
        for one in (counter, tis, sq, rq, rqt, self.direct, hashed):
            one.query()

    def _flow(self) -> None:
        create = self.ctx.devx.create
        last = create(Opcode.CREATE_FLOW_TABLE, flow_table_context={"level": 3, "log_size": 4})
        first = create(Opcode.CREATE_FLOW_TABLE, flow_table_context={"level": 1, "log_size": 4})
        behind = {"table_miss_action": 1, "table_miss_id": last.number}
        first.modify(Opcode.MODIFY_FLOW_TABLE, modify_field_select=1, flow_table_context=behind)
        criteria = {"outer_headers": {"ethertype": 0xFFFF, "udp_dport": 0xFFFF}}
        group = create(
            Opcode.CREATE_FLOW_GROUP, table_id=first.number, start_flow_index=0, end_flow_index=7,
            match_criteria_enable=MatchCriteria.OUTER_HEADERS, match_criteria=criteria,
        )
        counter = create(Opcode.ALLOC_FLOW_COUNTER)
        entry, box = self._entry(first, group, 1, DestinationType.TIR, self.direct, counter)
        self._entry(first, group, 2, DestinationType.FLOW_TABLE, last, counter)
        request = mailboxes(Opcode.SET_FLOW_TABLE_ENTRY).request
        request.update(box, op_mod=1, modify_enable_mask=EntryModify.FLOW_TAG)
        entry.modify_raw(box, OUT.size)
        for one in (first, group, entry, counter):
            one.query()
        for table, change in ((first, RootChange.SET), (last, RootChange.RESET)):
            self.ctx.devx.command(Opcode.SET_FLOW_TABLE_ROOT, op_mod=change, table_id=table.number)

    def _entry(
        self, table: DevxObject, group: DevxObject, index: int, kind: DestinationType, to: DevxObject,
        counter: DevxObject,
    ) -> tuple[DevxObject, bytearray]:
        """Make an entry of a flow table. Return it, and the input of the command."""
        box = mailboxes(Opcode.SET_FLOW_TABLE_ENTRY).request.pack(
            opcode=Opcode.SET_FLOW_TABLE_ENTRY, table_id=table.number, flow_index=index, flow_context={
                "group_id": group.number, "action": FlowAction.FWD_DEST | FlowAction.COUNT, "flow_tag": 7,
                "destination_list_size": 1, "flow_counter_list_size": 1,
                "match_value": {"outer_headers": {"ethertype": 0x800, "udp_dport": index}},
            },
        )
        box += DEST_FORMAT.pack(destination_type=kind, destination_id=to.number)
        box += FLOW_COUNTER_LIST.pack(flow_counter_id=counter.number)
        return self.ctx.devx.create_raw(box, OUT.size), box

    def _general(self) -> None:
        devx = self.ctx.devx
        for kind in CapClass:
            devx.command(Opcode.QUERY_HCA_CAP, op_mod=kind << 1 | 1)
        devx.command(Opcode.QUERY_NIC_VPORT_CONTEXT)
        devx.command(Opcode.QUERY_HCA_VPORT_CONTEXT)
        devx.command(Opcode.QUERY_LAG)
        address = mailboxes(Opcode.QUERY_ROCE_ADDRESS).request.pack(opcode=Opcode.QUERY_ROCE_ADDRESS)
        devx.command_raw(address, OUT.size + ROCE_ADDR_LAYOUT.size)


# --- ways to a device ------------------------------------------------------------------------------------------------


class ByIoctl:
    """The calls of a device file, as libmlx5 makes them, with the handles of the provider."""

    def __init__(self, calls: Calls, number: int):
        self._calls, self._number = calls, number
        self._file = calls.files[number]
        self._known: dict[int, int] = {}  # the file's handles, by the provider's

    def devx_obj_create(self, mailbox: bytes, room: int) -> None:
        handle = self._file._next
        self._call(Object.DEVX_OBJ, abi.DEVX_OBJ_CREATE, abi.DevxObject, mailbox, room, 0)
        self._known[self._file.get(Object.DEVX_OBJ, handle)] = handle

    def devx_obj_modify(self, handle: int, mailbox: bytes, room: int) -> None:
        self._call(Object.DEVX_OBJ, abi.DEVX_OBJ_MODIFY, abi.DevxObject, mailbox, room, handle)

    def devx_obj_query(self, handle: int, mailbox: bytes, room: int) -> None:
        self._call(Object.DEVX_OBJ, abi.DEVX_OBJ_QUERY, abi.DevxObject, mailbox, room, handle)

    def general_cmd(self, mailbox: bytes, room: int) -> None:
        self._call(Object.DEVX, abi.DEVX_OTHER, abi.Devx, mailbox, room, None)

    def devx_obj_destroy(self, handle: int) -> None:
        if handle in self._known:
            self._file.remove(Object.DEVX_OBJ, self._known[handle])
            del self._known[handle]
        else:
            self._file.provider.devx_obj_destroy(handle)

    def _call(
        self, kind: int, method: int, names: type[abi.Devx | abi.DevxObject], mailbox: bytes, room: int,
        handle: int | None,
    ) -> None:
        given, answer = ctypes.create_string_buffer(mailbox, len(mailbox) or 1), ctypes.create_string_buffer(room or 1)
        # Short attributes hold the bytes themselves.
        place = ctypes.addressof(given) if len(mailbox) > 8 else int.from_bytes(mailbox, "little")
        attributes = [(int(names.IN), len(mailbox), place), (int(names.OUT), room, ctypes.addressof(answer))]
        if handle is not None:
            if handle and handle not in self._known:  # the program's own
                self._known[handle] = self._file.add(Object.DEVX_OBJ, handle)
            attributes.append((abi.DevxObject.HANDLE, 0, self._known.get(handle, 0)))
        size = call.HEADER.size + len(attributes) * call.ATTRIBUTE.size
        header = call.HEADER.pack(
            length=size, object_id=kind, method_id=method, num_attrs=len(attributes), driver_id=abi.DRIVER_MLX5
        )
        packed = (call.ATTRIBUTE.pack(attr_id=name, len=nbytes, data=data) for name, nbytes, data in attributes)
        whole = ctypes.create_string_buffer(b"".join([header, *packed]), size)
        self._calls.control(self._number, ctypes.addressof(whole))


# --- what is changed -------------------------------------------------------------------------------------------------


def _leaves(struct: BitStruct, at: int = 0) -> Iterator[tuple[int, int]]:
    """Yield first bit and width of each field that is a number."""
    for field in struct.fields.values():
        if field.struct:
            yield from _leaves(field.struct, at + field.offset)
        elif 0 < field.width <= 64:
            yield at + field.offset, field.width


def _with_fields_changed(chance: random.Random, mailbox: bytes) -> bytes:
    """Return a command with other numbers in some of its fields."""
    changed, opcode = bytearray(mailbox), int.from_bytes(mailbox[:2], "big")
    fields = [place for place in _leaves(mailboxes(Opcode(opcode)).request) if place[0] >= 16]
    for bit, width in chance.choices(fields, k=chance.choice([1, 1, 1, 2, 3])):
        end = (bit + width + 7) // 8
        shift, mask = end * 8 - bit - width, (1 << width) - 1
        value = chance.choice([0, 1, 2, 3, chance.randrange(40), chance.getrandbits(width), mask, mask >> 1, mask - 1])
        around = int.from_bytes(changed[bit // 8 : end], "big") & ~(mask << shift) | (value & mask) << shift
        changed[bit // 8 : end] = around.to_bytes(end - bit // 8, "big")
    return bytes(changed)


class Commands:
    """An open software NIC, the program, and what changed commands have made."""

    way: SoftProvider | ByIoctl

    def __init__(self, seed: int, by_ioctl: bool = False, port: PortConfig = ETHERNET):
        self.chance = random.Random(seed)
        self._calls = Calls([("soft6", port)], lambda descriptor: True)
        self._file = self._calls.open(b"uverbs0", 0)
        self.ctx, self.provider = self._calls.files[self._file].ctx, self._calls.files[self._file].provider
        self.nic = self.provider.nic
        self.way = ByIoctl(self._calls, self._file) if by_ioctl else self.provider
        self._program = Program(self.ctx)
        self.samples: dict[int, list[Sample]] = {}  # by opcode
        for sample in _recorded(self.provider, self._program.run):
            self.samples.setdefault(sample.opcode, []).append(sample)
        self._own = set(self.provider.devx_objects())

    def send(self) -> None:
        """Send a command. Destroy something if there is too much."""
        opcode = self.chance.choice(list(self.samples))
        kind, mailbox, room = self.chance.choice(self.samples[opcode])
        if self.chance.random() < 0.05:
            kind = self.chance.choice(list(Call))
        if self.chance.random() < 0.05:
            room = self.chance.choice(_ROOMS)
        handle = self._target(mailbox)
        if handle and self.chance.random() < 0.7:
            mailbox = self._about(handle, mailbox)
        if self.chance.random() < 0.6:
            mailbox = _with_fields_changed(self.chance, mailbox)
        elif self.chance.random() < 0.9:
            mailbox = mutated(self.chance, mailbox)
        try:
            self._carry_out(kind, handle, mailbox, room)
        except (DocaError, Refused):
            pass
        finally:
            made = [handle for handle in self.provider.devx_objects() if handle not in self._own]
            if len(made) > _MOST_OBJECTS:
                self._destroy(self.chance.sample(made, _MOST_OBJECTS // 2))

    def _carry_out(self, kind: Call, handle: int, mailbox: bytes, room: int) -> None:
        if kind is Call.CREATE:
            self.way.devx_obj_create(mailbox, room)
        elif kind is Call.GENERAL:
            self.way.general_cmd(mailbox, room)
        elif kind is Call.DESTROY:
            if self.way is self.provider:  # otherwise the file keeps what is gone
                self._destroy_past_devx(mailbox, room)
        else:
            getattr(self.way, kind.value)(handle, mailbox, room)

    def _destroy_past_devx(self, mailbox: bytes, room: int) -> None:
        """Send a mailbox that destroys, which DEVX makes itself, and have the provider forget what is gone."""
        command = self.nic.control.interpreter.find(mailbox)
        if command is None or command.call is not Call.DESTROY:
            return
        named = command.named(mailbox) if len(mailbox) >= command.mailbox.size else {}
        gone = [
            handle for handle, made in self.provider._objects.items()
            if made.named == named and made.kind.command(Call.DESTROY).opcode == command.opcode
        ]
        if not self._own.isdisjoint(gone):
            return
        answer, _ = self.nic.execute(mailbox, room)
        if answer[:1] == b"\0" and gone:
            del self.provider._objects[gone[0]], self.provider._held[self.provider._destroy, gone[0]]

    def _target(self, mailbox: bytes) -> int:
        """Return an object that a command could be about, or 0."""
        named = mailboxes(Opcode(int.from_bytes(mailbox[:2], "big"))).named(mailbox)
        fits = [handle for handle, made in self.provider._objects.items() if made.named.keys() == named.keys()]
        return self.chance.choice(fits) if fits else 0

    def _about(self, handle: int, mailbox: bytes) -> bytes:
        """Return a command that names this object."""
        changed = bytearray(mailbox)
        request = mailboxes(Opcode(int.from_bytes(mailbox[:2], "big"))).request
        names = self.provider._objects[handle].named
        request.update(changed, **{name: number for name, number in names.items() if name in request.fields})
        return bytes(changed)

    # --- whether all is well -----------------------------------------------------------------------------------------

    def _destroy(self, handles: list[int]) -> list[int]:
        """Destroy objects, each after those that use it. Return those that are left."""
        before = None
        while handles != before:
            before = handles
            for handle in reversed(before):
                with suppress(DocaError):
                    self.way.devx_obj_destroy(handle)
            handles = [handle for handle in before if handle in self.provider._objects]
        return handles

    def check(self) -> None:
        """Destroy what was made. Raise AssertionError if something is left of it, or the NIC does not work."""
        if not self.nic.port.no_ethernet:
            self.ctx.devx.command(Opcode.SET_FLOW_TABLE_ROOT, op_mod=RootChange.RESET)
        left = self._destroy([handle for handle in self.provider.devx_objects() if handle not in self._own])
        assert not left, [str(self.provider._objects[handle]) for handle in left]
        assert not self.nic.control.interpreter.failed
        pd, memory = self._program.pd, bytearray(b"works" + bytes(5))
        with (
            self.ctx.create_cq(4) as cq,
            pd.register(memory, Access.LOCAL_WRITE | Access.REMOTE_WRITE) as region,
            pd.create_qp(send_cq=cq, receive_cq=cq, sq_wr=1, rq_wr=1) as qp,
        ):
            qp.connect(qp)
            qp.post_send(SendWr(
                opcode=WrOpcode.RDMA_WRITE, sges=[Sge(region.address, 5, region.lkey)],
                remote_addr=region.address + 5, rkey=region.lkey,
            ))
            until(lambda: cq.poll(1), "the completion")
        assert bytes(memory) == b"worksworks"

    def close(self) -> None:
        """Close the device. Raise AssertionError if something is left on the NIC."""
        with closing(open_device("soft6")):
            self._calls.close(self._file)
            parts = [part for part in self.nic.control.handlers if isinstance(part, Objects)]
            left = {part.table.name: len(part.table) for part in parts if len(part.table)}
            assert left.keys() <= {"EQ", "GID"}, left
            assert not [part for part in parts if isinstance(part, MailboxObjects) and part._users]


def mistakes(times: int, seed: int, by_ioctl: bool = False, port: PortConfig = ETHERNET) -> Iterator[Exception]:
    """Send so many commands. Yield what is raised that is no error of the package."""
    commands = Commands(seed, by_ioctl, port)
    try:
        for _ in range(times):
            try:
                commands.send()
            except Exception as error:
                yield error
        commands.check()
    finally:
        commands.close()


def main(times: int, seed: int = 0) -> None:
    """Send commands, and print each kind of mistake once."""
    logging.getLogger("gpunetio").setLevel(logging.ERROR)  # refused keys are logged, because UCX needs them
    ways = itertools.cycle(itertools.product(PORTS.values(), (False, True)))
    runs = (
        mistakes(min(_STEP, times - step), seed + step, by_ioctl, port)
        for step, (port, by_ioctl) in zip(range(0, times, _STEP), ways)
    )
    print_kinds(itertools.chain.from_iterable(runs), f"{times} commands")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
