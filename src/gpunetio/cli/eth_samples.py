"""DOCA's samples of Ethernet as commands: `simple_receive`, `simple_send`, `send_wait_time`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from .click_types import Decorated
from .failures import guarded
from .ports import nic_port, port_options
from .samples import common, messages

_MOST_NS = 3_999_999_999  # as in samples/send_wait_time.py, which would load the NIC


def ends(command: Decorated) -> Decorated:
    """Add the options that name GPU and NIC, and those of the NIC's port."""
    command = port_options(command)
    command = click.option(
        "-n", "--nic", "device", required=True, metavar="NIC", help="The NIC; `gpunetio devices` names them."
    )(command)
    return click.option(
        "-g", "--gpu", required=True, metavar="GPU", help="PCI address or number of a GPU, or host."
    )(command)


def _scope(who: str) -> Callable[[Decorated], Decorated]:
    return click.option(
        "-e", "--exec-scope", "scope", type=click.Choice(["0", "1", "2"]), default="2", show_default=True,
        help=f"Who {who} together: 0 each thread alone, 1 a warp, 2 a block.",
    )


@click.command("simple_receive", context_settings={"max_content_width": 120})
@ends
@_scope("receives")
@common
@guarded
def simple_receive(**values: Any) -> None:
    """Receive UDP packets in a kernel until Ctrl+C, and count them.

    Read the program in gpunetio/samples/simple_receive.py.
    """
    from ..enums import ExecScope
    from ..samples.simple_receive import SampleOptions, run

    options = SampleOptions(
        gpu=values["gpu"], device=values["device"], nic_port=nic_port(values), scope=ExecScope(int(values["scope"]))
    )
    with messages(values):
        run(options)


@click.command("simple_send", context_settings={"max_content_width": 120})
@ends
@click.option(
    "-s", "--size", type=click.IntRange(14, 1 << 14), required=True, metavar="BYTES",
    help="Bytes of a packet, without its check sequence.",
)
@click.option(
    "-t", "--threads", type=click.IntRange(32, 2048), required=True,
    help="Threads that send: a multiple of 32, with --shared-qp of 64.",
)
@click.option("-q", "--shared-qp", "shared", metavar="0|1", default="0", show_default=True,
              help="1: two blocks share the send queue.")
@_scope("posts, with --shared-qp,")
@click.option("-p", "--proxy", metavar="0|1", default="0", show_default=True,
              help="Not 0: a thread of the CPU rings the NIC for the kernel.")
@click.option("--original-frame", is_flag=True, help="Send zeros behind the EtherType, as DOCA's sample does.")
@common
@guarded
def simple_send(**values: Any) -> None:
    """Send UDP packets from the threads of a kernel until Ctrl+C, and count them.

    Read the program in gpunetio/samples/simple_send.py.
    """
    from ..enums import ExecScope
    from ..samples.simple_send import SampleOptions, run

    options = SampleOptions(
        gpu=values["gpu"], device=values["device"], nic_port=nic_port(values), size=values["size"],
        threads=values["threads"], shared=values["shared"] == "1", scope=ExecScope(int(values["scope"])),
        proxy=values["proxy"] != "0", original_frame=values["original_frame"],
    )
    with messages(values):
        run(options)


@click.command("send_wait_time", context_settings={"max_content_width": 120})
@ends
@click.option(
    "-t", "--time", "interval_ns", type=click.IntRange(1, _MOST_NS), required=True, metavar="NS",
    help="Nanoseconds from one burst to the next, less than 4 s.",
)
@common
@guarded
def send_wait_time(**values: Any) -> None:
    """Send 8 bursts of 32 packets at times that the NIC waits for.

    Read the program in gpunetio/samples/send_wait_time.py.
    """
    from ..samples.send_wait_time import SampleOptions, run

    options = SampleOptions(
        gpu=values["gpu"], device=values["device"], nic_port=nic_port(values), interval_ns=values["interval_ns"]
    )
    with messages(values):
        run(options)
