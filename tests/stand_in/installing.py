"""Lets gpunetio find the stand-in where it looks for libibverbs and libmlx5."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock
from weakref import WeakSet

from gpunetio.enums import QpSendDbrMode, UarAllocationType
from gpunetio.providers.mlx5 import libraries
from gpunetio.verbs.pd import PD
from gpunetio.verbs.qp import QP
from gpunetio.verbs.qp_init import QpInitAttr
from gpunetio.verbs.uar import UAR

from .nics import StandIn

_VARIABLES = ("GPUNETIO_LIBIBVERBS", "GPUNETIO_LIBMLX5")


def _forget_libraries() -> None:
    for library in (libraries.libibverbs, libraries.libmlx5):
        library.cache_clear()


@contextmanager
def installed(path: Path) -> Iterator[StandIn]:
    """The stand-in, which gpunetio takes for both libraries meanwhile."""
    with ExitStack() as undo:
        undo.enter_context(mock.patch.dict(os.environ, dict.fromkeys(_VARIABLES, str(path))))
        undo.callback(_forget_libraries)
        undo.enter_context(own_registers())
        _forget_libraries()
        yield StandIn(path)


@contextmanager
def own_registers() -> Iterator[None]:
    """Meanwhile no two queue pairs without a doorbell record share a UAR: its register is their only doorbell."""
    create = QP.__init__
    rung: WeakSet[UAR] = WeakSet()

    def created(self: QP, pd: PD, attr: QpInitAttr) -> None:
        if attr.send_dbr_mode == QpSendDbrMode.NO_DBR_EXT:
            given = attr.external_uar
            if given is None or given in rung:
                kind = UarAllocationType.NONCACHE_DEDICATED if given else UarAllocationType.BLUEFLAME
                attr = replace(attr, external_uar=pd.ctx.create_uar(kind))
            rung.add(attr.external_uar)
        create(self, pd, attr)

    with mock.patch.object(QP, "__init__", created):
        yield
