"""Completion queues of libibverbs."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ...enums import CqOverrun, WcFlags, WcOpcode, WcStatus
from ...formats.cqe import CQE_SIZE
from ...interrupts import deferred
from ...providers.plain_verbs import Wc
from ..channel import CompChannel
from ..cq import CQ, CqInitAttr
from ..events import OF_CQ
from ..work import Completion, Sender
from .channel import PlainCompChannel
from .device import RECEIVED, needs_devx, plain_verbs, ring_attributes

if TYPE_CHECKING:
    from ..qp import QP

_STATUS = {int(status): status for status in WcStatus}
_SUCCESS = WcStatus.SUCCESS
_AT_A_TIME = 64
_WITH_IMM = int(WcOpcode.RECV_RDMA_WITH_IMM)


class PlainCQ(CQ):
    """A completion queue of libibverbs. Its number is the provider's `handle`; libibverbs reports no other."""

    ring_address, dbr_address, arm_address, uar, ring = ring_attributes(5)
    handle: int

    def _create(self, attr: CqInitAttr, undo: ExitStack) -> None:
        for what, asked in (
            ("external_datapath", attr.external_datapath), ("collapsed", attr.collapsed),
            ("overrun ENABLE", attr.overrun == CqOverrun.ENABLE), ("external_umem", attr.external_umem),
            ("external_uar", attr.external_uar), (f"cqe_size {attr.cqe_size}", attr.cqe_size != CQE_SIZE),
        ):
            if asked:
                raise needs_devx(self.ctx, what)
        self._plain = plain_verbs(self.ctx)
        told = attr.channel.reader if isinstance(attr.channel, PlainCompChannel) else None
        made = self._plain.create_cq(attr.cqe, told.handle if told else None, attr.comp_vector)
        self.handle = self.cqn = made.handle
        self.entries = made.cqe
        undo.callback(self._plain.destroy_cq, self.handle)
        if told:
            told.subscribe(self, undo)
        self.ctx.async_events.subscribe(self, self.handle, OF_CQ, undo)
        self._found: deque[Wc] = deque()  # taken from libibverbs, but not polled yet

    def _resize(self, cqe: int) -> None:
        self.entries = self._plain.resize_cq(self.handle, cqe)

    def forget(self, qp: QP) -> None:
        self.drop(qp)
        self._queues.pop(qp.qpn, None)

    def drop(self, qp: QP) -> None:
        with self._lock:
            self._fetch()
            for wc in self._found:
                if wc.qp_num == qp.qpn and wc.wr_id & RECEIVED and qp.init_attr.srq:
                    qp.init_attr.srq.complete(wc.wr_id & ~RECEIVED)
            self._found = deque(wc for wc in self._found if wc.qp_num != qp.qpn)

    def _fetch(self) -> None:
        """Take all completions from libibverbs."""
        while found := self._plain.poll_cq(self.handle, min(_AT_A_TIME, self.entries)):
            self._found += found

    def _request_event(self, channel: CompChannel, solicited_only: bool) -> None:
        if not isinstance(channel, PlainCompChannel) or not channel.reader.ask(self):
            return
        self._plain.req_notify_cq(self.handle, solicited_only)
        self._fetch()
        # A success does not show whether it was solicited, so with `solicited_only` only failures found here count.
        if any(not solicited_only or wc.status != _SUCCESS for wc in self._found):
            channel.reader.tell(self.handle)

    @deferred()
    def _poll(self, most: int) -> list[Completion]:
        found = [self._found.popleft() for _ in range(min(most, len(self._found)))]
        if len(found) < most:
            found += self._plain.poll_cq(self.handle, min(most - len(found), self.entries))
        self._consumer += len(found)
        return [done for wc in found if (done := self._completion(wc))]

    def _completion(self, wc: Wc) -> Completion | None:
        """Return the completion of a request, or None if its queue pair no longer exists."""
        posting = self._queues.get(wc.qp_num)
        if posting is None:
            return None
        status = _STATUS.get(wc.status, WcStatus.GENERAL_ERR)
        if wc.wr_id & RECEIVED:
            wr_id = posting.complete_receive(wc.wr_id & ~RECEIVED)
            opcode = WcOpcode.RECV_RDMA_WITH_IMM if wc.opcode == _WITH_IMM else WcOpcode.RECV
            done = Completion(wr_id, status, opcode, wc.byte_len, wc.imm, wc.qp_num)
            if wc.imm is not None:
                done.flags = WcFlags.WITH_IMM
            if posting.datagrams:
                done.sender = Sender(wc.src_qp, wc.slid, wc.sl)
                done.flags |= WcFlags(wc.wc_flags) & WcFlags.GRH
        else:
            wr_id, opcode, reads = posting.send.complete(wc.wr_id)
            done = Completion(wr_id, status, opcode, wc.byte_len if reads else 0, None, wc.qp_num)
        if status != _SUCCESS:
            return Completion(wr_id, status, opcode, 0, None, wc.qp_num, wc.vendor_err)
        return done
