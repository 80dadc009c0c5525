"""Install the stand-in where gpunetio looks for libibverbs and libmlx5."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock
from weakref import WeakSet

from gpunetio.enums import QpSendDbrMode, UarAllocationType
from gpunetio.nic.engine.port import PortConfig
from gpunetio.nic.nic import SoftNic
from gpunetio.providers import Provider
from gpunetio.providers.mlx5 import libraries
from gpunetio.providers.mlx5.provider import Mlx5Provider
from gpunetio.verbs import context
from gpunetio.verbs.pd import PD
from gpunetio.verbs.qp import QP
from gpunetio.verbs.qp_init import QpInitAttr
from gpunetio.verbs.uar import UAR

from .nics import StandIn

_OF_ITS_OWN = {UarAllocationType.NONCACHE: UarAllocationType.NONCACHE_DEDICATED}
_VARIABLES = ("GPUNETIO_LIBIBVERBS", "GPUNETIO_LIBMLX5")


def _forget_libraries() -> None:
    for library in (libraries.libibverbs, libraries.libmlx5):
        library.cache_clear()


@contextmanager
def installed(path: Path, prefix: str = "mlx5_") -> Iterator[StandIn]:
    """The stand-in, which gpunetio takes for both libraries meanwhile. Devices are named `prefix` and a number.

    With prefix "soft" they come before the software NICs of the same names: what opens soft0 gets a card.
    """
    with ExitStack() as undo:
        undo.enter_context(mock.patch.dict(os.environ, dict.fromkeys(_VARIABLES, str(path))))
        undo.callback(_forget_libraries)
        undo.enter_context(own_registers())
        _forget_libraries()
        yield StandIn(path, prefix)


@contextmanager
def own_registers() -> Iterator[None]:
    """Meanwhile no two queue pairs without a doorbell record share a UAR: its register is their only doorbell."""
    create = QP.__init__
    rung: WeakSet[UAR] = WeakSet()

    def created(self: QP, pd: PD, attr: QpInitAttr) -> None:
        if attr.send_dbr_mode == QpSendDbrMode.NO_DBR_EXT:
            given = attr.external_uar
            if given is None or given in rung:
                kind = given.kind if given else UarAllocationType.BLUEFLAME
                attr = replace(attr, external_uar=pd.ctx.create_uar(_OF_ITS_OWN.get(kind, kind)))
            rung.add(attr.external_uar)
        create(self, pd, attr)

    with mock.patch.object(QP, "__init__", created):
        yield


@contextmanager
def nics_of_cards(stand_in: StandIn) -> Iterator[None]:
    """Meanwhile cards are looked at and attached as software NICs are: by `provider.nic`, and by `port`."""
    opened = context.open_device

    def nic(self: Mlx5Provider) -> SoftNic:
        return stand_in.nic(self.name)

    def open_device(name: str | None = None, port: PortConfig | None = None) -> Provider:
        if name is None or port is None or not stand_in.attach(name, port):
            return opened(name, port)
        return opened(name)

    with (
        mock.patch.object(Mlx5Provider, "nic", property(nic), create=True),
        mock.patch.object(context, "open_device", open_device),
    ):
        yield
