"""Shared receive queues of libibverbs."""

from __future__ import annotations

import itertools
import threading
from contextlib import ExitStack

from ...enums import SrqType
from ...errors import DocaError, FullError
from ..events import OF_SRQ
from ..srq import SRQ, SrqAttr, SrqInitAttr
from ..work import BadWrError, RecvWr
from .device import RECEIVED, needs_devx, plain_verbs, ring_attributes
from .queues import entries_for


class PlainSRQ(SRQ):
    """A shared receive queue of libibverbs. Its number is the provider's `handle`."""

    ring_address, dbr_address, stride, ring = ring_attributes(4)
    handle: int

    def _create(self, attr: SrqInitAttr, undo: ExitStack) -> None:
        for what, asked in (
            ("srq_type CONTIGUOUS", attr.srq_type == SrqType.CONTIGUOUS),
            ("external_datapath", attr.external_datapath), ("external_umem", attr.external_umem),
        ):
            if asked:
                raise needs_devx(self.ctx, what)
        self._plain = plain_verbs(self.ctx)
        self.handle = self.srqn = self._plain.create_srq(self.pd.pdn, attr.srq_wr, attr.receive_max_sges)
        undo.callback(self._plain.destroy_srq, self.handle)
        self.ctx.async_events.subscribe(self, self.handle, OF_SRQ, undo)
        self.entries = self._plain.query_srq(self.handle).max_wr
        self._posted: dict[int, int] = {}  # number of a receive → its wr_id
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    @property
    def external_datapath(self) -> bool:
        return False

    def _post(self, requests: tuple[RecvWr, ...]) -> None:
        with self._lock:
            for index, request in enumerate(requests):
                try:
                    self._put(request)
                except DocaError as error:
                    raise BadWrError(index, request, error) from error

    def _put(self, request: RecvWr) -> None:
        if len(self._posted) == self.entries:
            raise FullError(f"{self} has no room: all its {self.entries} receives are posted; poll the CQ")
        entries, _ = entries_for(request, self.max_sge, "receive_max_sges")
        number = next(self._numbers)
        self._posted[number] = request.wr_id
        if refused := self._plain.post_srq_recv(self.handle, [entries], RECEIVED | number):
            del self._posted[number]
            raise refused.error

    def complete(self, index: int) -> int:
        with self._lock:
            return self._posted.pop(index)

    def _query(self) -> SrqAttr:
        return SrqAttr(*self._plain.query_srq(self.handle))

    def _resize(self, max_wr: int) -> None:
        with self._lock:
            self._plain.resize_srq(self.handle, max_wr)
            self.entries = self._plain.query_srq(self.handle).max_wr

    def _arm(self, srq_limit: int) -> None:
        self._plain.arm_srq(self.handle, srq_limit)
