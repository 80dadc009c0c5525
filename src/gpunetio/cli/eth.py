"""DOCA's samples of Ethernet on the CPU: `gpunetio eth txq_send_ethernet_frames` and its relatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from .click_types import Decorated
from .failures import OneLineUsage, guarded
from .ports import nic_port, port_options
from .samples import common, messages
from .seconds import Seconds

_WIDTH = {"max_content_width": 120}


@click.group(cls=OneLineUsage)
def eth() -> None:
    """Send and receive Ethernet packets on the CPU: DOCA's samples eth_txq_… and eth_rxq_…."""


class Mac(click.ParamType):
    """A MAC address, as in 02:00:00:00:00:01."""

    name = "mac"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        """Return its 6 bytes."""
        if isinstance(value, bytes):
            return value
        parts = value.replace("-", ":").split(":")
        try:
            address = bytes(int(part, 16) for part in parts)
        except ValueError:
            address = b""
        if len(address) != 6 or any(len(part) != 2 for part in parts):
            self.fail(f"{value!r} is no MAC address: it has six bytes, as in 02:00:00:00:00:01", param, ctx)
        return address


def _ends(command: Decorated) -> Decorated:
    """Add the options that name the NIC, those of its port, and those of every sample."""
    named = click.option(
        "-d", "--device", metavar="NIC", help="The NIC.  [default: the first that no other process uses]"
    )
    return named(port_options(common(command)))


def _room(*names: str, where: str) -> Callable[[Decorated], Decorated]:
    return click.option(
        *names, type=click.IntRange(0, 4096), default=0, show_default=True, metavar="BYTES",
        help=f"Bytes that stay free {where} each packet.",
    )


_MAC = click.option(
    "-m", "--mac", "--mac-addr", "destination", type=Mac(), default="FF:FF:FF:FF:FF:FF", show_default=True,
    help="Destination of the frames.",
)
_TIMESTAMP = click.option(
    "-ts", "--timestamp", is_flag=True, help="Show when each packet has arrived, by the device's clock."
)
_SECONDS = click.option(
    "--seconds", type=Seconds(0, min_open=True), default=30.0, show_default=True, help="How long to receive."
)
_ROOMS = _room("-hr", "--headroom", where="before"), _room("-tr", "--tailroom", where="behind")


def _sending(name: str, what: str, **how: bool) -> None:
    """Add the command of a sample that sends."""

    @eth.command(name, context_settings=_WIDTH, help=f"{what}\n\nRead the program in gpunetio/samples/eth_txq.py.")
    @_MAC
    @_ends
    @guarded
    def command(**values: Any) -> None:
        from ..samples.eth_txq import SampleOptions, run

        options = SampleOptions(
            device=values["device"], nic_port=nic_port(values), destination=values["destination"], **how
        )
        with messages(values):
            run(options)


def _receiving(name: str, what: str, kind: str) -> None:
    """Add the command of a sample that receives."""

    def command(**values: Any) -> None:
        from ..samples.eth_rxq import Kind, SampleOptions, run

        given = {name: values[name] for name in ("timestamp", "headroom", "tailroom", "seconds") if name in values}
        options = SampleOptions(kind=Kind(kind), device=values["device"], nic_port=nic_port(values), **given)
        with messages(values):
            run(options)

    decorated: Callable[..., None] = _ends(guarded(command))
    for option in (_SECONDS, *(() if kind == "regular" else reversed(_ROOMS)), _TIMESTAMP):
        decorated = option(decorated)
    text = f"{what}\n\nRead the program in gpunetio/samples/eth_rxq.py."
    eth.command(name, context_settings=_WIDTH, help=text)(decorated)


_sending("txq_send_ethernet_frames", "Send one frame.")
_sending("txq_batch_send_ethernet_frames", "Send 32 frames with one doorbell.", batch=True)
_sending("txq_lso_send_ethernet_frames", "Send a payload that the NIC cuts into packets.", lso=True)
_sending(
    "txq_batch_lso_send_ethernet_frames", "Send 32 payloads that the NIC cuts into packets.", batch=True, lso=True
)
_receiving("rxq_regular_receive", "Receive one packet in a buffer of the program.", "regular")
_receiving("rxq_managed_mempool_receive", "Receive packets from a pool that the queue manages.", "managed")
_receiving(
    "rxq_batch_managed_mempool_receive", "Receive packets from such a pool, up to 16 at a time.", "batch"
)
