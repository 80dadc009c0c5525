"""Completion queues."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..arguments import instance, member, whole, within
from ..enums import CqOverrun
from ..errors import BadStateError, InvalidValueError
from ..formats.cqe import CQE_SIZES
from ..interrupts import deferred
from .channel import CompChannel
from .devx.ring import Ring, check_places
from .handle import Handle
from .uar import UAR
from .umem import UMEM
from .work import Completion

if TYPE_CHECKING:
    from .context import Context
    from .devx.posting import Posting
    from .qp import QP


@dataclass(frozen=True)
class CqAttr:
    """The capacity of a completion queue, the bytes per entry, and the completion vector of its events."""

    cqe: int
    cqe_size: int
    comp_vector: int


@dataclass(frozen=True, kw_only=True)
class CqInitAttr:
    """Attributes of a new completion queue (`doca_verbs_cq_attr`), as `Context.create_cq` describes them."""

    cqe: int
    cqe_size: int
    channel: CompChannel | None
    comp_vector: int
    external_datapath: bool
    overrun: CqOverrun
    collapsed: bool
    external_umem: tuple[UMEM, int] | None
    external_dbr_umem: tuple[UMEM, int] | None
    external_uar: UAR | None
    context: object

    def checked(self, ctx: Context) -> CqInitAttr:
        """Return the attributes as ints and enumeration members. An impossible value raises an error that names it."""
        if whole("cqe_size", self.cqe_size) not in CQE_SIZES:
            raise InvalidValueError(
                f"cqe_size = {self.cqe_size}: completion queue entries have {' or '.join(map(str, CQE_SIZES))} bytes"
            )
        check_places(self.external_umem, self.external_dbr_umem)
        overrun = member("overrun", self.overrun, CqOverrun)
        collapsed = bool(within("collapsed", self.collapsed, 0, 1))
        external_datapath = bool(within("external_datapath", self.external_datapath, 0, 1))
        device = ctx.query_device()
        cqe = within("cqe", self.cqe, 1, device.max_cqe)
        vector = within("comp_vector", self.comp_vector, 0, device.num_comp_vectors - 1)
        return replace(self, cqe=cqe, comp_vector=vector, overrun=overrun, collapsed=collapsed,
                       external_datapath=external_datapath)


class CQ(Handle, ABC):
    """A completion queue (`doca_verbs_cq`), number `cqn`.

    `ring_address` is the address of `entries` CQEs of `cqe_size` bytes (`doca_verbs_cq_get_wq`). In the doorbell
    record, the consumer index is at `dbr_address` and the arm word at `arm_address` (`doca_verbs_cq_get_dbr_addr`).
    `ring` says in which memory ring and record lie.
    """

    _rank = 1
    cqn: int
    cqe_size: int
    entries: int
    ring_address: int
    dbr_address: int
    arm_address: int
    ring: Ring
    uar: UAR
    overrun: CqOverrun
    collapsed: bool
    channel: CompChannel | None
    external_datapath: bool
    context: object
    comp_vector: int

    def __init__(self, ctx: Context, attr: CqInitAttr):
        super().__init__(ctx)
        self._use(ctx)
        if attr.external_uar is not None:
            self._use(instance("external_uar", attr.external_uar, UAR))
        if attr.channel is not None:
            self._use(instance("channel", attr.channel, CompChannel))
        attr = attr.checked(ctx)
        self.cqe_size, self.overrun, self.collapsed = attr.cqe_size, attr.overrun, attr.collapsed
        self.comp_vector = attr.comp_vector
        self.channel, self.external_datapath, self.context = attr.channel, attr.external_datapath, attr.context
        self._queues: dict[int, Posting] = {}  # by QPN: the queue pairs that complete here
        self._consumer = 0  # completions polled so far; never wraps
        self._lock = threading.Lock()
        with ExitStack() as undo:
            self._create(attr, undo)
            self._opened(f"CQ {self.cqn:#x} of {ctx.name}", undo)

    def _details(self) -> Iterable[str]:
        yield f"{self.entries} entries"
        if self.collapsed:
            yield "collapsed"

    @abstractmethod
    def _create(self, attr: CqInitAttr, undo: ExitStack) -> None:
        """Create the queue on the device, and set `cqn` and `entries`, which is at least as many as requested."""

    def query(self) -> CqAttr:
        """Return the queue's attributes. `cqe` is its real capacity, which may be more than requested."""
        self.check_open()
        return CqAttr(self.entries, self.cqe_size, self.comp_vector)

    @deferred()
    def resize(self, cqe: int) -> None:
        """Change the capacity to at least `cqe` entries (`ibv_resize_cq`). Completions not polled yet are kept.

        FullError if they would not fit. BadStateError if the queue has an external data path, is collapsed, or lies in
        your own UMEM: such a queue cannot be resized.
        """
        self.check_open()
        if not self._polled:
            raise self._not_ours("resized")
        cqe = within("cqe", cqe, 1, self.ctx.query_device().max_cqe)
        with self._lock:
            self._resize(cqe)

    @abstractmethod
    def _resize(self, cqe: int) -> None:
        """Resize the ring. The caller holds the lock."""

    # --- the CPU data path -------------------------------------------------------------------------------------------

    def serve(self, qpn: int, posting: Posting) -> None:
        """Add a queue pair whose requests complete here."""
        self._queues[qpn] = posting

    @abstractmethod
    def forget(self, qp: QP) -> None:
        """Remove a destroyed queue pair, and those of its completions that were not polled."""

    @abstractmethod
    def drop(self, qp: QP) -> None:
        """Drop the completions of a queue pair that was reset: their requests no longer exist."""

    @property
    def _polled(self) -> bool:
        """Return whether `poll()` can read the queue."""
        return not self.collapsed and not self.external_datapath

    def _not_ours(self, what: str) -> BadStateError:
        why = "is collapsed" if self.collapsed else "has an external data path: its entries are yours to read"
        return BadStateError(f"{self} {why}: it cannot be {what} here")

    @property
    def consumer_index(self) -> int:
        """Return how many completions have been polled so far (`doca_verbs_bridge_get_current_cq_ci`)."""
        self.check_open()
        return self._consumer

    def req_notify(self, solicited_only: bool = False) -> None:
        """Request one event on the channel, for the next completion that has not been polled (`ibv_req_notify_cq`).

        If such a completion is already in the queue, the event comes at once, so no completion is missed. With
        `solicited_only`, only errors and requests whose sender set SOLICITED count.
        """
        self.check_open()
        if self.channel is None:
            raise BadStateError(f"{self} has no completion channel: give create_cq() one")
        if not self._polled:
            raise self._not_ours("asked for events")
        with self._lock:
            self._request_event(self.channel, solicited_only)

    @abstractmethod
    def _request_event(self, channel: CompChannel, solicited_only: bool) -> None:
        """Request the event. The caller holds the lock."""

    def event_taken(self) -> None:
        """Record that the channel has delivered an event of this queue."""
        self.hold_for_event()

    def ack_events(self, count: int = 1) -> None:
        """Acknowledge events from the channel (`doca_verbs_ack_cq_events`). The queue cannot be closed until then."""
        self.check_open()
        self.acknowledge(count)

    def poll(self, most: int = 16) -> list[Completion]:
        """Return up to `most` completions, oldest first; an empty list if there are none (`doca_verbs_bridge_poll_cq`).

        Completions of queue pairs with an external data path are skipped.
        """
        self.check_open()
        if whole("most", most) < 1:
            raise InvalidValueError(f"most = {most}: ask for one completion at least")
        if not self._polled:
            raise self._not_ours("polled")
        with self._lock:
            return self._poll(most)

    @abstractmethod
    def _poll(self, most: int) -> list[Completion]:
        """Poll. The caller holds the lock."""
