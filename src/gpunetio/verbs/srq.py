"""Shared receive queues: one pool of receives for many queue pairs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..arguments import instance, member, whole, within
from ..enums import SrqType
from ..errors import InvalidValueError, NotSupportedError
from ..interrupts import deferred
from .devx.ring import Ring, check_places
from .handle import Handle
from .umem import UMEM
from .work import RecvWr

if TYPE_CHECKING:
    from .device_attr import DeviceAttributes
    from .pd import PD


@dataclass(frozen=True)
class SrqAttr:
    """The capacity of a shared receive queue, the entries per receive, and the armed limit (`ibv_srq_attr`)."""

    max_wr: int
    max_sge: int
    srq_limit: int


@dataclass(frozen=True, kw_only=True)
class SrqInitAttr:
    """Attributes of a new shared receive queue (`doca_verbs_srq_init_attr`), as `PD.create_srq` describes them."""

    srq_wr: int
    receive_max_sges: int
    srq_type: SrqType
    external_umem: tuple[UMEM, int] | None
    external_dbr_umem: tuple[UMEM, int] | None
    external_datapath: bool
    context: object

    def checked(self, device: DeviceAttributes) -> SrqInitAttr:
        """Return the attributes as ints and enumeration members. An impossible value raises an error that names it."""
        check_places(self.external_umem, self.external_dbr_umem)
        attr = replace(
            self,
            srq_wr=whole("srq_wr", self.srq_wr),
            receive_max_sges=whole("receive_max_sges", self.receive_max_sges),
            srq_type=member("srq_type", self.srq_type, SrqType),
            external_datapath=bool(within("external_datapath", self.external_datapath, 0, 1)),
        )
        if attr.srq_type == SrqType.CONTIGUOUS and not (attr.external_datapath or attr.external_umem is not None):
            raise InvalidValueError(
                "a CONTIGUOUS shared receive queue needs an external data path: set external_datapath, or choose "
                "LINKED_LIST"
            )
        for name, most in (("srq_wr", device.max_srq_wr), ("receive_max_sges", device.max_srq_sge)):
            value = getattr(attr, name)
            if value < 1:
                raise InvalidValueError(f"{name} = {value}: it must be 1 to {most}")
            if value > most:
                raise NotSupportedError(f"{name} = {value}: the device has at most {most}")
        return attr


class SRQ(Handle, ABC):
    """A shared receive queue (`doca_verbs_srq`), number `srqn`.

    `ring_address` is the address of `entries` WQEs of `stride` bytes (`doca_verbs_srq_get_wq`). `dbr_address` is the
    address of the doorbell record, whose first word counts posted receives (`doca_verbs_srq_get_dbr_addr`). `ring` says
    in which memory they lie. In a linked list, WQEs are used in the order of posting, and become free in any order, as
    their messages complete.
    """

    _rank = 1
    srqn: int
    entries: int
    stride: int
    ring_address: int
    dbr_address: int
    ring: Ring
    pd: PD
    type: SrqType
    max_sge: int
    context: object

    def __init__(self, pd: PD, attr: SrqInitAttr):
        ctx = pd.ctx
        super().__init__(ctx)
        self._use(pd, ctx)
        attr = attr.checked(ctx.query_device())
        self.pd, self.type, self.max_sge, self.context = pd, attr.srq_type, attr.receive_max_sges, attr.context
        with ExitStack() as undo:
            self._create(attr, undo)
            self._opened(f"SRQ {self.srqn:#x} of {ctx.name}", undo)

    def _details(self) -> Iterable[str]:
        return f"{self.entries} entries", SrqType(self.type).name

    @abstractmethod
    def _create(self, attr: SrqInitAttr, undo: ExitStack) -> None:
        """Create the queue on the device, and set `srqn` and `entries`."""

    @deferred()
    def post_recv(self, *requests: RecvWr) -> None:
        """Post receives, in order (`doca_verbs_bridge_post_srq_recv`).

        BadWrError names the first refused request; those before it are posted.
        """
        self.check_open()
        for request in requests:
            instance("request", request, RecvWr)
        self._post(requests)

    @abstractmethod
    def _post(self, requests: tuple[RecvWr, ...]) -> None: ...

    @property
    @abstractmethod
    def external_datapath(self) -> bool:
        """Return whether something other than `post_recv` fills the ring."""

    @abstractmethod
    def complete(self, index: int) -> int:
        """Complete the receive that a completion names by `index`, free its slot, and return its wr_id."""

    def query(self) -> SrqAttr:
        """Return the queue's attributes. The limit is 0 after its event (`doca_verbs_srq_query`)."""
        self.check_open()
        return self._query()

    @abstractmethod
    def _query(self) -> SrqAttr: ...

    @deferred()
    def modify(self, *, max_wr: int | None = None, srq_limit: int | None = None) -> None:
        """Change the limit or the capacity (`ibv_modify_srq`). None keeps a value.

        `srq_limit` requests one SRQ_LIMIT_REACHED event for when fewer receives are left; 0 requests none. `max_wr`
        makes room for at least that many receives, and keeps posted ones; NotSupportedError if the device cannot resize
        (`can_resize_srq`).
        """
        self.check_open()
        if max_wr is not None:
            device = self.ctx.query_device()
            max_wr = within("max_wr", max_wr, 1, device.max_srq_wr)
            if not device.can_resize_srq:
                raise NotSupportedError(f"{self.ctx.name} does not resize shared receive queues: create another one")
            self._resize(max_wr)
        if srq_limit is not None:
            self._arm(within("srq_limit", srq_limit, 0, self.entries))

    @abstractmethod
    def _resize(self, max_wr: int) -> None: ...

    @abstractmethod
    def _arm(self, srq_limit: int) -> None: ...
