"""The options that configure the NIC's port."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import InvalidValueError
from ..nic.engine.port import CPU, ENGINES, MOST_COPIERS, WIRES, check_engine, check_wire, wire_syntax
from .click_types import Decorated, Values

if TYPE_CHECKING:
    from ..nic.engine.port import PortConfig


class Wire(click.ParamType):
    """A wire that leads to other processes."""

    name = "wire"
    choices: tuple[str, ...] = tuple(wire_syntax(name) for name, kind in WIRES.items() if not kind.file)

    def get_metavar(self, *_: object, **__: object) -> str:
        """Return the placeholder for the help. The arguments depend on click's version."""
        return f"[{'|'.join(self.choices)}]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the wire. A usage error if there is none of this kind."""
        try:
            check_wire(value)
        except InvalidValueError as error:
            self.fail(str(error), param, ctx)
        if WIRES[value.partition(":")[0]].file:
            self.fail(f"{value!r} leads to a file: use `gpunetio replay`", param, ctx)
        return value


_AUTO = "auto"


class NicEngine(click.ParamType):
    """The place where a software NIC's engine runs."""

    name = "engine"

    def get_metavar(self, *_: object, **__: object) -> str:
        """Return the placeholder for the help. The arguments depend on click's version."""
        return f"[{'|'.join((*ENGINES, _AUTO))}]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the engine. A usage error if there is none of this kind."""
        try:
            if value != _AUTO:
                check_engine(value)
        except InvalidValueError as error:
            self.fail(str(error), param, ctx)
        return value


ADDRESS = click.option(
    "--address", "addresses", metavar="IP", multiple=True,
    help="An IP address of the NIC; may be given several times.  [default: softN has 127.0.0.(N+1)]",
)
_OPTIONS = (
    click.option(
        "--wire", type=Wire(), default="auto", show_default=True,
        help="How NICs of different processes are connected.",
    ),
    ADDRESS,
    click.option(
        "--link-layer", type=click.Choice(["ethernet", "infiniband"]), default="ethernet", show_default=True,
        help="What the port speaks: RoCE v2, or InfiniBand to NICs of this host.",
    ),
    click.option(
        "--promiscuous/--no-promiscuous", default=True, show_default=True,
        help="Whether flow rules see Ethernet frames to any MAC, or only those to the port's MAC and to groups.",
    ),
    click.option(
        "--nic-engine", "engine", type=NicEngine(), default="cpu", show_default=True,
        help="Where the software NIC makes its turns: cpu; gpu or gpuN, a GPU; twin, the twin of a GPU (-g twin); "
        "auto, the GPU whose memory the queues lie in.",
    ),
    click.option(
        "--nic-copiers", "copiers", type=click.IntRange(0, MOST_COPIERS), default=0, show_default=True,
        help="SMs that only copy, for each worker of a NIC on a GPU.",
    ),
    click.option(
        "--pcap", "capture", type=click.Path(path_type=Path), metavar="FILE",
        help="Write all sent and received packets to FILE, for Wireshark. In a folder, each NIC has a file of its own.",
    ),
    click.option(
        "--faults", metavar="NAME=VALUE,…",
        help="Disturb what the NIC sends: loss, duplication, reordering, corruption (0 to 1), delay_us, seed.",
    ),
)
MTU = click.option("--mtu", type=click.IntRange(256), metavar="BYTES", help="MTU.  [default: the wire's largest]")


def port_options(command: Decorated) -> Decorated:
    """Decorate a command with the options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def tcp_port(*names: str, default: int = 18515) -> Callable[[Decorated], Decorated]:
    """Return the option for the TCP port where the two ends meet."""
    return click.option(
        *names, "tcp_port", type=click.IntRange(1, 65535), default=default, show_default=True, metavar="PORT",
        help="TCP port where the two ends meet.",
    )


def _engine(values: Values) -> str:
    """Return the place where the NIC's engine runs."""
    if values["engine"] != _AUTO:
        return values["engine"]
    if not WIRES[values["wire"].partition(":")[0]].neighbours:
        return CPU
    from ..gpu.device import engine_of

    which = values.get("gpu") or ("host" if values.get("target") == "cpu" else "auto")
    return engine_of(which, values.get("queue_memory") or "auto")


def nic_port(values: Values) -> PortConfig | None:
    """Return the port configuration to open the device with; None if no option was given."""
    link_layer, capture, faults = values["link_layer"], values["capture"], values["faults"]
    addresses, wire, mtu = values["addresses"], values["wire"], values.get("mtu") or 0
    promiscuous, engine = values["promiscuous"], _engine(values)
    copiers = values["copiers"]
    given = addresses or mtu or capture or faults or copiers or not promiscuous
    if not given and (wire, link_layer, engine) == ("auto", "ethernet", "cpu"):
        return None
    from ..enums import LinkLayer
    from ..fabric.faults import Faults
    from ..nic.engine.port import PortConfig

    return PortConfig(
        addresses=addresses, wire=wire, mtu=mtu, link_layer=LinkLayer[link_layer.upper()],
        faults=Faults.parse(faults) if faults else None, capture=capture, promiscuous=promiscuous,
        engine=engine, copiers=copiers,
    )
