"""User memory for queues: rings and doorbell records are placed in it by UMEM id and offset."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..enums import Access
from ..memory import Region
from .handle import Handle, command
from .mr import Dmabuf, check_access

if TYPE_CHECKING:
    from .context import Context


class UMEM(Handle):
    """`nbytes` of memory at `address`, known to the device as `umem_id` (`doca_verbs_umem`). It keeps them alive."""

    _rank = 2

    def __init__(self, ctx: Context, obj: Any, access: Access):
        super().__init__(ctx)
        self._use(ctx)
        region = obj.region if isinstance(obj, Dmabuf) else Region.of(obj)
        access = check_access(region, access)
        self.address, self.nbytes = region.address, region.nbytes
        provider = ctx.provider
        with ExitStack() as undo:
            undo.callback(setattr, self, "_region", None)
            self._region: Region | None = region
            with command("register a UMEM"):
                if isinstance(obj, Dmabuf):
                    self.umem_id = provider.reg_dmabuf_umem(obj.fd, obj.offset, obj.nbytes, access)
                else:
                    self.umem_id = provider.reg_umem(self.address, self.nbytes, access)
            undo.callback(provider.dereg_umem, self.umem_id)
            self._opened(f"UMEM {self.umem_id:#x} of {ctx.name}", undo)
