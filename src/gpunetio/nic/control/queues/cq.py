"""Completion queues: CREATE_CQ, MODIFY_CQ, DESTROY_CQ, and subscriptions to their events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ....errors import FullError
from ....formats import commands as cmd
from ....formats.commands import CapClass, Opcode, Status
from ....formats.cqe import CQE_SIZE, CQE_SIZES
from ....formats.doorbell import CQ_DBREC
from ....formats.events import EventType
from ....formats.layout import BitStruct, Fields
from ....memory import HostMemory
from ...engine.hardware import Hardware
from ...queues.channels import EventChannel
from ...state.cq import CQ_ROW
from ...state.tables import Row
from ...turn.commands import EngineCommand
from ..command import DONE, Call, Capabilities, Command
from ..components import Components
from ..objects import QueueObjects
from ..regions.umem import Umems
from ..syndromes import CommandError, CommandSyndrome
from ..uar import UarPages
from .eq import EventQueues

MAX_CQ = 4096
MAX_LOG_CQ = 22


@dataclass
class _Resources:
    """The objects that a CQ uses: the UMEMs of its ring and of its doorbell record, and its UAR page."""

    ring_umem: int
    record_umem: int
    uar_page: int


class CompletionQueues(QueueObjects):
    """The completion queues of a NIC. The engine checks only the CQs in the list of armable CQs for arm requests."""

    def __init__(
        self, hardware: Hardware, components: Components, umems: Umems, uars: UarPages, eqs: EventQueues
    ):
        super().__init__("CQ", CQ_ROW, MAX_CQ, CommandSyndrome.NO_SUCH_CQ)
        self._engine, self._components = hardware.engine, components
        self._umems, self._uars, self._eqs = umems, uars, eqs
        self._list = HostMemory(8 + 8 * MAX_CQ)
        self._armable_count, self._armable = self._list.view(np.int64), self._list.view(np.int64, 8, MAX_CQ)
        self._resources: dict[int, _Resources] = {}
        hardware.record["cqs"], hardware.record["cq_mask"] = self.table.address, self.table.mask
        hardware.record["armable"] = self._list.address

    def close(self) -> None:
        self._list.close()
        super().close()

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.CREATE,  Opcode.CREATE_CQ,  cmd.CREATE_CQ_IN,  self._create),
            Command(Call.MODIFY,  Opcode.MODIFY_CQ,  cmd.MODIFY_CQ_IN,  self._modify),
            Command(Call.DESTROY, Opcode.DESTROY_CQ, cmd.DESTROY_CQ_IN, self._destroy),
        )

    def capabilities(self) -> Capabilities:
        return {
            CapClass.GENERAL: {
                "cqe_version": 1, "log_max_cq": self.log_max, "log_max_cq_sz": MAX_LOG_CQ, "cq_oi": 1, "cq_resize": 1,
            },
        }

    def _create(self, mailbox: bytes) -> bytes:
        get = cmd.CREATE_CQ_IN.get
        context = get(mailbox, "cq_context")
        _check_size(context)
        self._eqs.need(context["c_eqn"])
        self._uars.need(context["uar_page"])
        self._umems.need_valid(get(mailbox, "cq_umem_valid") and context["dbr_umem_valid"], "cq_umem_valid")
        row = self.new_row()
        ring_umem, record_umem = self._set_ring(cmd.CREATE_CQ_IN, mailbox, row), context["dbr_umem_id"]
        record = self._umems.record(record_umem, context["dbr_addr"], "the CQ doorbell record")
        cqn = self.free_number()
        row["cqn"], row["dbrec"] = cqn, record
        row["overrun"], row["collapsed"] = context["oi"], context["cc"]
        # The present content of the record is no arm request. 0 becomes -1, because the first request may be 0.
        row["arm_seen"] = int.from_bytes(self._engine.read(record + CQ_DBREC.arm, 4), "big") or -1
        row["eqn"], row["uar_page"] = context["c_eqn"], context["uar_page"]
        row["worker"] = self._engine.workers[0]
        self._engine.post(EngineCommand.WRITE_ROW, self.table.row_address(cqn), row)
        self._components.add_cq(self.table.row_address(cqn))
        self._resources[cqn] = _Resources(ring_umem, record_umem, context["uar_page"])
        self._umems.hold(ring_umem, record_umem)
        self._uars.hold(context["uar_page"])
        return bytes(cmd.CREATE_CQ_OUT.pack(cqn=cqn))

    def _set_ring(self, struct: BitStruct, mailbox: bytes, row: Row) -> int:
        """Set the ring in a CQ's row to the ring that a mailbox names. Return the ring's UMEM."""
        umem, context = struct.get(mailbox, "cq_umem_id"), struct.get(mailbox, "cq_context")
        size, log = CQE_SIZES[context["cqe_sz"]], context["log_cq_size"]
        ring = self._umems.ring(umem, struct.get(mailbox, "cq_umem_offset"), size << log, "the CQE ring")
        self._umems.need_writable(umem)
        row["addr"], row["log"], row["shift"] = ring + size - CQE_SIZE, log, size.bit_length() - 1
        row["near"] = self._engine.is_near(ring, size << log)
        return umem

    def _modify(self, mailbox: bytes) -> bytes:
        """Resize a CQ by moving it to another ring. No other modification is supported."""
        get = cmd.MODIFY_CQ_IN.get
        cqn, op_mod, context = get(mailbox, "cqn"), get(mailbox, "op_mod"), get(mailbox, "cq_context")
        row_address = self.need(cqn)
        if op_mod != cmd.CQ_RESIZE:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.UNKNOWN_OP_MOD,
                f"op_mod {op_mod} is not supported: the software NIC only resizes CQs (1)",
            )
        _check_size(context)
        row = self.table.copy(cqn)
        if row["collapsed"] or CQE_SIZES[context["cqe_sz"]] != 1 << int(row["shift"]):
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.CQ_SIZE,
                f"CQ {cqn:#x}, collapsed {row['collapsed']}, CQEs of {1 << int(row['shift'])} bytes: a collapsed CQ "
                "cannot be resized, and the size of CQEs cannot change",
            )
        self._umems.need_valid(get(mailbox, "cq_umem_valid"), "cq_umem_valid")
        umem = self._set_ring(cmd.MODIFY_CQ_IN, mailbox, row)
        try:
            self._engine.post(
                EngineCommand.RESIZE_CQ, row_address, row, worker=self._components.worker_of(row_address)
            )
        except FullError as error:
            raise CommandError(
                Status.BAD_OUTS_CQES, CommandSyndrome.CQ_SIZE,
                f"CQ {cqn:#x} cannot be resized to {1 << int(row['log'])} entries: {error}",
            ) from None
        resources = self._resources[cqn]
        before, resources.ring_umem = resources.ring_umem, umem
        self._umems.hold(umem)
        self._umems.release(before)
        return DONE

    def _destroy(self, mailbox: bytes) -> bytes:
        cqn = cmd.DESTROY_CQ_IN.get(mailbox, "cqn")
        row_address = self.need(cqn)
        self.need_unused(cqn)
        self._remove_armable(row_address)
        worker = self._components.worker_of(row_address)
        self._engine.post(EngineCommand.WRITE_ROW, row_address, self.new_row(), worker=worker)
        self._components.remove(row_address)
        resources = self._resources.pop(cqn)
        self._umems.release(resources.ring_umem, resources.record_umem)
        self._uars.release(resources.uar_page)
        return DONE

    # --- events ----------------------------------------------------------------------------------------------------

    def subscribe(self, number: int, channel: EventChannel, types: Iterable[EventType], cookie: int) -> None:
        """Subscribe a channel to completions of a CQ or, if `types` does not contain COMPLETION, to its errors."""
        if EventType.COMPLETION in types:
            super().subscribe(number, channel, types, cookie)
            count = int(self._armable_count[0])
            self._armable[count] = self.table.row_address(number)
            self._armable_count[0] = count + 1
        else:
            row = self.table[number]
            row["error_cookie"] = cookie  # before the channel, because the engine may read the row at any moment
            row["error_channel"] = channel.address

    def unsubscribe(self, channel: EventChannel) -> None:
        for index in self.subscribed("error_channel", channel):
            self.table.rows[index]["error_channel"] = 0
        completions = self.subscribed("channel", channel)
        super().unsubscribe(channel)
        for index in completions:
            self._remove_armable(self.table.row_address(index))

    def _remove_armable(self, row_address: int) -> None:
        """Remove a CQ from the list of armable CQs."""
        count = int(self._armable_count[0])
        found = np.flatnonzero(self._armable[:count] == row_address)
        if len(found):
            self._armable[int(found[0])] = self._armable[count - 1]
            self._armable_count[0] = count - 1


def _check_size(context: Fields) -> None:
    """Refuse a CQ size or a CQE size that is not supported."""
    if (log := context["log_cq_size"]) > MAX_LOG_CQ:
        raise CommandError(Status.BAD_PARAM, CommandSyndrome.CQ_SIZE, f"log_cq_size {log} is above {MAX_LOG_CQ}")
    if context["cqe_sz"] >= len(CQE_SIZES):
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.CQ_SIZE,
            f"cqe_sz {context['cqe_sz']} is not supported: only CQEs of 64 bytes (0) and of 128 bytes (1)",
        )
