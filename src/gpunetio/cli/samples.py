"""DOCA's samples as commands: `gpunetio verbs_server_client`, `gpunetio verbs_wait_cq_wr`."""

from __future__ import annotations

import logging
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from .click_types import Decorated, Values
from .failures import guarded
from .ports import ADDRESS, nic_port, port_options, tcp_port
from .version import version_option

if TYPE_CHECKING:
    from ..rendezvous.link import Link

_LEVELS = "10=DISABLE, 20=CRITICAL, 30=ERROR, 40=WARNING, 50=INFO, 60=DEBUG, 70=TRACE"
_LOOK_SECONDS = 0.1


def _level(*names: str, whose: str, default: str | None = None) -> Callable[[Decorated], Decorated]:
    """Return an option that takes one of DOCA's log levels."""
    shown = default or "what DOCA_GPUNETIO_LOG says"
    return click.option(
        *names, type=click.Choice(["10", "20", "30", "40", "50", "60", "70"]), metavar="LEVEL", default=default,
        help=f"Log level of {whose}: {_LEVELS}.  [default: {shown}]",
    )


def common(command: Decorated) -> Decorated:
    """Add the options of every sample: two log levels and the version."""
    command = version_option("-v", "--version")(command)
    command = _level("--sdk-log-level", whose="the NIC and the library")(command)
    return _level("-l", "--log-level", whose="the sample itself", default="50")(command)


IP_VERSIONS = {"IPv4": 4, "IP4": 4, "IPv6": 6, "IP6": 6, "GID": 6}  # by -sat; a GID is written as an IPv6 address


def server_address_type(name: str) -> Callable[[Decorated], Decorated]:
    """Return the option -sat, whose value is a key of IP_VERSIONS."""
    return click.option(
        "-sat", "--server-addr-type", name, type=click.Choice(list(IP_VERSIONS), case_sensitive=False), default="IPv4",
        show_default=True, help="What kind of address -sa is.",
    )


def _device(*names: str) -> Callable[[Decorated], Decorated]:
    """Return the option that names the NIC."""
    return click.option(
        *names, "device", metavar="NIC", help="The NIC.  [default: the first that no other process uses]"
    )


def _gid_index(*names: str) -> Callable[[Decorated], Decorated]:
    """Return the option that chooses the NIC's address."""
    return click.option(
        *names, type=click.IntRange(0), default=0, show_default=True, help="Index of the NIC's address."
    )


@click.command("verbs_server_client", context_settings={"max_content_width": 120})
@click.option(
    "-c", "--client", "server", metavar="IP", help="Be the client of the server at IP.  [default: be the server]"
)
@tcp_port("--port", default=5000)
@_device("-d", "--device")
@_gid_index("-gid", "--gid-index")
@click.option(
    "-ro", "--rdma-oper-type", "operation", type=click.Choice(["Send", "Write", "Read"], case_sensitive=False),
    default="Send", show_default=True, metavar="[Send|Write|Read]", help="RDMA operation.",
)
@click.option(
    "-s", "--buffer-size", "size", type=click.IntRange(4, 1 << 30), default=64, show_default=True,
    help="Bytes per message.",
)
@click.option("-qt", "--qp-type", type=click.Choice(["RC"]), default="RC", show_default=True, help="QP type.")
@click.option(
    "-n", "--iters", "iterations", type=click.IntRange(1, 10_000), default=1, show_default=True, help="Messages."
)
@click.option("-b", "--send-burst", is_flag=True, help="Send all messages at once instead of asking for each burst.")
@port_options
@common
@guarded
def verbs_server_client(**values: Any) -> None:
    """SEND, WRITE or READ from one process to another with DOCA Verbs on the CPU, one message per iteration.

    The server waits; the client, with -c, posts the operations. Give both the same -ro, -s and -n. Read the program in
    gpunetio/samples/verbs_server_client.py.
    """
    if values["server"] == "":
        raise click.UsageError("--client needs the server's address")
    from ..samples.verbs_server_client import SampleOptions, run

    names = ("server", "tcp_port", "device", "gid_index", "operation", "size", "iterations")
    options = SampleOptions(nic_port=nic_port(values), **{name: values[name] for name in names})
    with messages(values):
        run(options, None if values["send_burst"] else _ask)


@click.command("verbs_wait_cq_wr", context_settings={"max_content_width": 120})
@_device("-d", "--device-name")
@_gid_index("-gi", "--gid-index")
@click.option("--ipv6", is_flag=True, help="Use IPv6 instead of IPv4: the address must be an IPv6 address.")
@ADDRESS
@common
@guarded
def verbs_wait_cq_wr(**values: Any) -> None:
    """Hold the SEND of one queue pair back with a WAIT until another queue pair has completed, in one process.

    Read the program in gpunetio/samples/verbs_wait_cq_wr.py.
    """
    from ..nic.engine.port import PortConfig
    from ..samples.verbs_wait_cq_wr import SampleOptions, run

    options = SampleOptions(
        device=values["device"], gid_index=values["gid_index"], ipv6=values["ipv6"],
        nic_port=PortConfig(addresses=values["addresses"]) if values["addresses"] else None,
    )
    with messages(values):
        run(options)


# --- the sample's messages -------------------------------------------------------------------------------------------


class _Echo(logging.Handler):
    """Prints messages on stdout without a prefix."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message. Unlike a StreamHandler, let a broken pipe end the program.

        While a dashboard is on the screen, stdout is a file of rich's, which prints above it.
        """
        click.echo(self.format(record), file=sys.stdout)


@contextmanager
def messages(values: Values, package: str = "samples") -> Iterator[None]:
    """Show the messages of the sample, which is in `package`, and set both log levels, as the options say."""
    from .. import log

    level, sdk_level = values["log_level"], values["sdk_log_level"]
    sample, handler = log.logger.getChild(package), _Echo()
    levels = [(logger, logger.level) for logger in (sample, log.logger)]
    sample.addHandler(handler)
    sample.propagate = False
    sample.setLevel(log.DOCA_LEVELS[int(level)])
    if sdk_level is not None:
        log.logger.setLevel(log.DOCA_LEVELS[int(sdk_level)])
    try:
        yield
    finally:
        sample.removeHandler(handler)
        sample.propagate = True
        for logger, before in levels:
            logger.setLevel(before)


# --- bursts ----------------------------------------------------------------------------------------------------------


def _ask(link: Link, left: int) -> int:
    """Ask for the size of the next burst until the answer is a number from 1 to `left`."""
    while True:
        click.echo(f"Enter the required burst size and press enter (1 to {left})")
        answer = _line(link).strip()
        if answer.isdecimal() and 1 <= int(answer) <= left:
            return int(answer)
        click.echo(f"{answer!r} is not a number from 1 to {left}")


def _line(link: Link) -> str:
    """Return a line of stdin while the other end is alive.

    Reads the descriptor, because select does not see Python's buffer.
    """
    from ..errors import InvalidValueError, TimedOutError
    from ..samples.verbs_server_client import PERSON_SECONDS

    line, end = b"", time.monotonic() + PERSON_SECONDS
    while not line.endswith(b"\n"):
        if link.failure is not None:
            raise link.failure
        if time.monotonic() > end:
            raise TimedOutError(f"no burst size was entered within {PERSON_SECONDS:g} s")
        if sys.stdin is not None and not select.select([sys.stdin], [], [], _LOOK_SECONDS)[0]:
            continue
        byte = b"" if sys.stdin is None else os.read(sys.stdin.fileno(), 1)
        if not byte:
            raise InvalidValueError(
                "no burst size: standard input has ended. Enter one for each burst, or give -b to send all at once"
            )
        line += byte
    return line.decode(errors="replace")
