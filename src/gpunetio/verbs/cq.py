"""Completion queues."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..enums import CqOverrun
from ..errors import BadStateError, InvalidValueError
from ..formats.cqe import CQE_SIZES
from ..interrupts import deferred
from .arguments import instance, member, whole, within
from .channel import CompChannel
from .handle import Handle
from .ring import Ring, check_places
from .uar import UAR
from .umem import UMEM
from .work import Completion

if TYPE_CHECKING:
    from .context import Context
    from .posting import Posting
    from .qp import QP


@dataclass(frozen=True)
class CqAttr:
    """What a completion queue holds: entries, the bytes of each, and the completion vector whose events it makes."""

    cqe: int
    cqe_size: int
    comp_vector: int


@dataclass(frozen=True, kw_only=True)
class CqInitAttr:
    """Attributes of a new completion queue (`doca_verbs_cq_attr`); see `Context.create_cq`."""

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
    context: Any

    def checked(self, ctx: Context) -> CqInitAttr:
        """The same, numbers as ints and enumerations as their members; or an error that names what cannot be had."""
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
                       external_datapath=external_datapath)  # fmt: skip


class CQ(Handle, ABC):
    """A completion queue (`doca_verbs_cq`), number `cqn`.

    `entries` CQEs of `cqe_size` bytes are at `ring_address` (`doca_verbs_cq_get_wq`); the words of the doorbell record
    are at `dbr_address`, the consumer index, and `arm_address` (`doca_verbs_cq_get_dbr_addr`). `ring` says in which
    memory they lie.
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
    context: Any

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
        self._queues: dict[int, Any] = {}  # by number: whose completions come here
        self._consumer = 0  # counts completions for ever
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
        """Have the device make it: `cqn`, and `entries`, as many as were asked for at least."""

    def query(self) -> CqAttr:
        """What it holds: `cqe` is its true capacity, which may be more than was asked for."""
        self.check_open()
        return CqAttr(self.entries, self.cqe_size, self.comp_vector)

    @deferred()
    def resize(self, cqe: int) -> None:
        """Change the capacity to `cqe` entries, or more (`ibv_resize_cq`). Completions that wait are kept.

        FullError when more wait than there will be room for. With an external data path, collapsed or in memory of
        yours it stays as it is: BadStateError.
        """
        self.check_open()
        if not self._polled:
            raise self._not_ours("resized")
        cqe = within("cqe", cqe, 1, self.ctx.query_device().max_cqe)
        with self._lock:
            self._resize(cqe)

    @abstractmethod
    def _resize(self, cqe: int) -> None:
        """Do that, under the lock."""

    # --- the CPU data path -------------------------------------------------------------------------------------------

    def serve(self, qpn: int, posting: Posting) -> None:
        """A queue pair completes here."""
        self._queues[qpn] = posting

    @abstractmethod
    def forget(self, qp: QP) -> None:
        """It is gone, and with it what of it has not been polled."""

    @abstractmethod
    def drop(self, qp: QP) -> None:
        """It was reset: what has completed so far belongs to requests that are forgotten, and is nobody's from now."""

    @property
    def _polled(self) -> bool:
        """Whether it can be polled here."""
        return not self.collapsed and not self.external_datapath

    def _not_ours(self, what: str) -> BadStateError:
        why = "is collapsed" if self.collapsed else "has an external data path: its entries are yours to read"
        return BadStateError(f"{self} {why}: it cannot be {what} here")

    @property
    def consumer_index(self) -> int:
        """How many completions have been polled so far (`doca_verbs_bridge_get_current_cq_ci`)."""
        self.check_open()
        return self._consumer

    def req_notify(self, solicited_only: bool = False) -> None:
        """Ask the channel for one event: at the next completion that has not been polled (`ibv_req_notify_cq`).

        It comes at once when there is such a completion already, so that none is missed. `solicited_only`: only those
        of requests whose sender set SOLICITED, and errors.
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
        """Do that, under the lock."""

    def event_taken(self) -> None:
        """The channel has given an event of this queue away."""
        self.hold_for_event()

    def ack_events(self, count: int = 1) -> None:
        """Done with events from the channel (`doca_verbs_ack_cq_events`): the queue cannot be closed before."""
        self.check_open()
        self.acknowledge(count)

    def poll(self, most: int = 16) -> list[Completion]:
        """Up to `most` completions, oldest first; an empty list when there are none (`doca_verbs_bridge_poll_cq`).

        What queue pairs with an external data path complete here is passed over.
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
        """Do that, under the lock."""
