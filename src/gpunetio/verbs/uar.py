"""User access regions: pages of doorbell registers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..arguments import member
from ..enums import UarAllocationType
from ..formats.doorbell import UAR_NO_DBR_OFFSET
from .commands import command
from .handle import Handle

if TYPE_CHECKING:
    from ..providers.provider import UarPage
    from .context import Context


class UAR(Handle):
    """A page of doorbell registers (`doca_verbs_uar`); `page_id` is the device's number for it.

    `reg_addr` is the address of the ordinary register, `dbr_less_addr` that for queues in mode NO_DBR_EXT.
    """

    _rank = 2
    page: UarPage
    page_id: int
    reg_addr: int
    dbr_less_addr: int

    def __init__(self, ctx: Context, kind: UarAllocationType):
        super().__init__(ctx)
        self._use(ctx)
        kind = member("kind", kind, UarAllocationType)
        provider = ctx.provider
        with ExitStack() as undo:
            with command(f"allocate a UAR of kind {kind.name}"):
                self.page = provider.alloc_uar(kind)
            undo.callback(provider.free_uar, self.page)
            self.kind = kind
            self.page_id, self.reg_addr = self.page.page_id, self.page.reg_addr
            self.dbr_less_addr = self.page.base_addr + UAR_NO_DBR_OFFSET
            self._opened(f"UAR {self.page_id:#x} of {ctx.name}", undo)

    def _details(self) -> Iterable[str]:
        return self.kind.name, f"register at {self.reg_addr:#x}"
