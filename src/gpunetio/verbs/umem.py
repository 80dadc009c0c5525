"""User memory for queues: rings and doorbell records are placed by UMEM id and offset."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..enums import Access, RingMemory
from ..errors import InvalidValueError
from ..memory import Region, is_accessible
from .commands import command
from .handle import Handle
from .mr import Dmabuf, check_access, region_at

if TYPE_CHECKING:
    from .context import Context


class UMEM(Handle):
    """`nbytes` of memory at `address`, registered as `umem_id` (`doca_verbs_umem`). It keeps the memory alive.

    `lies_in` says what kind of memory it is. For a dmabuf without `memory`, `address` is the offset in the dmabuf.
    """

    _rank = 2
    address: int
    nbytes: int
    lies_in: RingMemory
    umem_id: int

    def __init__(
        self, ctx: Context, obj: object, access: Access, dmabuf: Dmabuf | None = None, nbytes: int | None = None
    ):
        super().__init__(ctx)
        self._use(ctx)
        region = dmabuf.region if dmabuf and obj is None else region_at(obj, nbytes)
        access = check_access(region, access)
        self.address, self.nbytes = region.address, dmabuf.nbytes if dmabuf else region.nbytes
        if self.nbytes > region.nbytes:
            raise InvalidValueError(f"{self.nbytes} bytes of a dmabuf, whose memory here has {region.nbytes} only")
        self.lies_in = _where(region, obj is not None, dmabuf is not None, ctx.provider.software)
        provider = ctx.provider
        with ExitStack() as undo:
            undo.callback(self._step(UMEM._let_go))
            self._region: Region | None = region
            with command("register a UMEM"):
                if dmabuf:
                    self.umem_id = provider.reg_dmabuf_umem(dmabuf.fd, dmabuf.offset, dmabuf.nbytes, access)
                else:
                    self.umem_id = provider.reg_umem(self.address, self.nbytes, access)
            undo.callback(provider.dereg_umem, self.umem_id)
            self._opened(f"UMEM {self.umem_id:#x} of {ctx.name}", undo)

    def _let_go(self) -> None:
        self._region = None

    def _details(self) -> Iterable[str]:
        return f"{self.nbytes} bytes at {self.address:#x}", self.lies_in.text


def _where(region: Region, has_address: bool, has_dmabuf: bool, software: bool) -> RingMemory:
    if not has_address:
        return RingMemory.DMABUF
    if not region.cuda or is_accessible(region.address, region.nbytes, not region.readonly):
        return RingMemory.HOST  # CUDA also reports pinned host memory
    if software:
        return RingMemory.NEAR
    return RingMemory.CUDA_DMABUF if has_dmabuf else RingMemory.CUDA_PEERMEM
