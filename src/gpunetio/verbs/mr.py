"""Memory regions: memory that work requests can access, and its keys."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np

from ..arguments import flags, instance, whole, within
from ..enums import Access
from ..errors import BadStateError, InvalidValueError
from ..interrupts import deferred
from ..memory import Region, is_accessible
from .commands import command
from .handle import Handle

if TYPE_CHECKING:
    from .pd import PD

_WRITING = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
_NEED_LOCAL_WRITE = Access.REMOTE_WRITE | Access.REMOTE_ATOMIC

_regions: WeakValueDictionary[tuple[str, int], MR] = WeakValueDictionary()  # those of this process, by device and lkey


def region_of(device: str, lkey: int) -> MR | None:
    """Return the region with this lkey, or None if this process has not registered it."""
    return _regions.get((device, lkey))


@dataclass(frozen=True)
class Dmabuf:
    """A range of a dmabuf, which may have no address in this process. The caller owns the descriptor."""

    fd: int
    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        within("fd", self.fd, 0, (1 << 31) - 1)
        for name in ("offset", "nbytes"):
            within(name, getattr(self, name), 0, 1 << 63)

    @property
    def region(self) -> Region:
        """Return the range as a `Region` whose addresses are offsets in the dmabuf."""
        return Region(self.offset, self.nbytes, readonly=False, cuda=False, owner=None)


def region_at(obj: object, nbytes: int | None) -> Region:
    """Return the memory of `obj`, or `nbytes` at the address `obj`."""
    if isinstance(obj, bool) or not isinstance(obj, (int, np.integer)):
        if nbytes is not None:
            raise InvalidValueError(f"nbytes = {nbytes} beside a {type(obj).__name__}: only an address needs a length")
        return Region.of(obj)
    if nbytes is None:
        raise InvalidValueError(f"{int(obj):#x} is an address: give the length of the memory too, nbytes = …")
    address, nbytes = int(obj), whole("nbytes", nbytes)
    if address < 0 or nbytes < 0 or address + nbytes > 1 << 64:
        raise InvalidValueError(f"{nbytes} bytes at address {address:#x} are no range of memory")
    # Memory that the CPU cannot read may belong to a GPU: registering it shows whether it does.
    return Region(address, nbytes, readonly=False, cuda=not is_accessible(address, nbytes, False), owner=None)


class MR(Handle):
    """A memory region (`ibv_mr`): `nbytes` at `address`. With its keys, requests address it from `iova` on.

    The region keeps the memory alive, unless it was given as an address. For a dmabuf, `address` is the offset in it.
    """

    _rank = 2
    pd: PD
    access: Access
    address: int
    nbytes: int
    iova: int
    lkey: int
    rkey: int

    def __init__(
        self, pd: PD, obj: object, access: Access | None = None, iova: int | None = None, nbytes: int | None = None
    ):
        super().__init__(pd.ctx)
        self._use(pd, pd.ctx)
        region = obj.region if isinstance(obj, Dmabuf) else region_at(obj, nbytes)
        if access is None:
            access = Access.LOCAL_READ | Access.REMOTE_READ if region.readonly else Access.all()
        access = check_access(region, access)
        self.pd, self.access = pd, access
        self.address, self.nbytes = region.address, region.nbytes
        self.iova = region.address if iova is None else whole("iova", iova)
        if not 0 <= self.iova <= (1 << 64) - self.nbytes:
            raise InvalidValueError(f"iova {self.iova:#x}: {self.nbytes} bytes from there do not fit in 64 bits")
        provider = pd.ctx.provider
        with ExitStack() as undo:
            undo.callback(self._step(MR._let_go))
            self._region: Region | None = region
            with command("register a memory region"):
                if isinstance(obj, Dmabuf):
                    keys = provider.reg_dmabuf_mr(pd.pdn, obj.fd, obj.offset, obj.nbytes, self.iova, access)
                else:
                    keys = provider.reg_mr(pd.pdn, self.address, self.nbytes, self.iova, access, region.cuda)
            self._mr = keys.handle
            undo.callback(provider.dereg_mr, keys.handle)
            self.lkey, self.rkey = keys.lkey, keys.rkey
            self._dmabuf = isinstance(obj, Dmabuf)
            undo.callback(self._step(MR._forget))
            _regions[pd.ctx.name, self.lkey] = self
            self._opened(f"MR {self.lkey:#x} of {pd.ctx.name}", undo)

    def _forget(self) -> None:
        _regions.pop((self.ctx.name, self.lkey), None)

    def _let_go(self) -> None:
        self._region = None

    def _details(self) -> Iterable[str]:
        return f"{self.nbytes} bytes at {self.address:#x}", _names(self.access)

    @deferred()
    def reregister(
        self, obj: object = None, *, nbytes: int | None = None, pd: PD | None = None, access: Access | None = None
    ) -> None:
        """Change the region's memory, protection domain or rights; None keeps a value (`ibv_rereg_mr`).

        `obj` and `nbytes` are as in `PD.register`. Requests then address the new memory by its own address. On a card
        the keys may change: read `lkey` and `rkey` again. No request may be using the region.
        """
        self.check_open()
        if pd is not None and instance("pd", pd, type(self.pd)).ctx is not self.ctx:
            raise InvalidValueError(f"{pd} belongs to another context: use one made from {self.ctx}")
        region = self._region if obj is None else region_at(obj, nbytes)
        if region is None:
            raise BadStateError(f"{self} is closed")
        if obj is None and nbytes is not None:
            raise InvalidValueError(f"nbytes = {nbytes} without memory: give its address, too")
        rights = check_access(region, self.access if access is None else access)
        place = None if obj is None else (region.address, region.nbytes, region.cuda)
        with command("re-register a memory region"):
            keys = self.ctx.provider.rereg_mr(
                self._mr, None if pd is None else pd.pdn, place, None if access is None else rights
            )
        _regions.pop((self.ctx.name, self.lkey), None)
        self.lkey, self.rkey, self.access, self._region = keys.lkey, keys.rkey, rights, region
        _regions[self.ctx.name, self.lkey] = self
        if place is not None:
            self.address, self.nbytes = self.iova, _ = place[:2]
            self._dmabuf = False
            vars(self).pop("_of_the_cpu", None)
        if pd is not None:
            self._exchange([self.pd], [pd])
            self.pd = pd

    @cached_property
    def _of_the_cpu(self) -> bool:
        """Return whether this process can write to the memory at `address`."""
        cuda = self._region is not None and self._region.cuda
        return not self._dmabuf and (not cuda or is_accessible(self.address, self.nbytes, True))

    def writable_at(self, address: int, nbytes: int, pdn: int) -> int | None:
        """Return the CPU address of `nbytes` at a key's `address`, or None unless PD and process may write there."""
        inside = self.iova <= address and address + nbytes <= self.iova + self.nbytes
        allowed = self.pd.pdn == pdn and Access.LOCAL_WRITE in self.access
        return self.address + address - self.iova if inside and allowed and self._of_the_cpu else None


def check_access(region: Region, access: Access) -> Access:
    """Return the rights. InvalidValueError for rights that the memory or the rules of verbs do not allow."""
    access = flags("access", access, Access)
    if region.nbytes == 0:
        raise InvalidValueError("the memory has 0 bytes: only a region of at least one byte can be registered")
    if region.readonly and access & _WRITING:
        raise InvalidValueError(
            f"the memory is read-only, and the rights include {_names(access & _WRITING)}: "
            "ask for LOCAL_READ and REMOTE_READ only, or register writable memory"
        )
    if access & _NEED_LOCAL_WRITE and not access & Access.LOCAL_WRITE:
        raise InvalidValueError(f"{_names(access & _NEED_LOCAL_WRITE)} without LOCAL_WRITE: add LOCAL_WRITE")
    return access


def _names(access: Access) -> str:
    return " and ".join(str(right.name) for right in access) or "LOCAL_READ"
