"""DOCA's samples of the RDMA library on the CPU: `gpunetio rdma read_requester` and its relatives."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import click

from .click_types import Values
from .failures import OneLineUsage, guarded
from .ports import nic_port, port_options
from .samples import IP_VERSIONS, common, messages, server_address_type

_MOST_CONNECTIONS, _MOST_BYTES = 8, 256
_Command = Callable[..., object]
_Option = Callable[[_Command], _Command]


@click.group(cls=OneLineUsage)
def rdma() -> None:
    """Read, write, send and set events by tasks of the CPU: DOCA's samples rdma_….

    Each program has a partner, such as read_requester and read_responder. They exchange files: -ld of one is -re of the
    other, and -m is the same. Between hosts, copy the files, and press Enter when the other end has them. With -cm, one
    end connects to the address of the other, and there are no files.
    """


class Text(click.ParamType):
    """A string of at most 256 bytes."""

    name = "string"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the string."""
        if len(value.encode()) > _MOST_BYTES:
            self.fail(f"it has {len(value.encode())} bytes: {_MOST_BYTES} at most", param, ctx)
        return str(value)


def _file(*names: str, default: str, of: str) -> _Option:
    return click.option(
        *names, type=click.Path(path_type=Path, dir_okay=False), default=f"/tmp/{default}_desc_path.txt",
        show_default=True, metavar="FILE", help=f"File of the description of {of}.",
    )


def _string(letter: str, what: str) -> _Option:
    return click.option(
        letter, f"--{what}-string", "text", type=Text(), default="Hi DOCA RDMA!", show_default=True, metavar="STRING",
        help=f"What to {what}; {_MOST_BYTES} bytes at most.",
    )


_COMMON = (
    click.option("-d", "--device", required=True, metavar="NIC", help="The NIC; `gpunetio devices` names them."),
    _file("-ld", "--local-descriptor-path", "local", default="local_connection", of="this end's connection"),
    _file("-re", "--remote-descriptor-path", "remote", default="remote_connection", of="the other end's connection"),
    _file("-m", "--remote-resource-descriptor-path", "resource", default="remote_resource",
          of="the responder's memory, which programs that send and receive do not need"),
    click.option("-g", "-gid", "--gid-index", type=click.IntRange(0), default=0, show_default=True,
                 help="Index of the NIC's address."),
    click.option("-tt", "--transport-type", "transport", type=click.Choice(["RC", "DC"]), default="RC",
                 show_default=True, help="Transport. DC is not supported."),
    click.option("-cm", "--use-rdma-cm", "by_address", is_flag=True,
                 help="Connect by address, in place of files. The end without -sa listens."),
    click.option("-lp", "--listen-port", "cm_port", type=click.IntRange(1, 65535), default=13579, show_default=True,
                 metavar="PORT", help="Port of the end that listens, with -cm."),
    click.option("-sa", "--server-addr", "server", metavar="ADDRESS",
                 help="With -cm, connect to the end that listens at this address of its NIC."),
    server_address_type("kind"),
)
_SEVERAL = click.option(
    "-nc", "--num-connections", "connections", type=click.IntRange(1, _MOST_CONNECTIONS), default=2, show_default=True,
    help="Connections; files of all but the first have a number at the end.",
)
_FIELDS = (
    "device", "gid_index", "transport", "local", "remote", "resource", "text", "connections", "by_address", "server",
    "cm_port",
)
_SENT, _READ, _WRITTEN = _string("-s", "send"), _string("-r", "read"), _string("-w", "write")


def _program(name: str, what: str, *own: _Option) -> None:
    """Add the command of a program, with the options of its own."""

    def command(**values: Any) -> None:
        from ..samples.rdma_programs import SampleOptions, run

        _check_files(values)
        _check_server(values)
        given = {name: values[name] for name in _FIELDS if name in values}
        with messages(values):
            run(name, SampleOptions(nic_port=nic_port(values), **given), _enter_pressed)

    decorated: _Command = port_options(common(guarded(command)))
    for option in (*reversed(own), *reversed(_COMMON)):
        decorated = option(decorated)
    text = f"{what}\n\nRead the program in gpunetio/samples/rdma_programs.py."
    rdma.command(name, context_settings={"max_content_width": 120}, help=text)(decorated)


def _check_files(values: Values) -> None:
    """Raise UsageError if both ends would write the same file."""
    if not values["by_address"] and values["local"].absolute() == values["remote"].absolute():
        raise click.UsageError(f"-ld and -re are both {values['local']}: each end has a file of its own")


def _check_server(values: Values) -> None:
    """Raise UsageError unless the server's address fits the other options."""
    server, kind = values["server"], values["kind"]
    if server is None:
        return
    if not values["by_address"]:
        raise click.UsageError("-sa is for connections by address: give -cm, too")
    try:
        version = ip_address(server).version
    except ValueError:
        raise click.UsageError(f"-sa {server}: it is no address; names are not looked up") from None
    if version != IP_VERSIONS[kind]:
        raise click.UsageError(f"-sa {server} is no {kind} address: -sat must say what it is")


def _enter_pressed() -> bool:
    """Return whether Enter was pressed since the last call, if stdin is a terminal."""
    if sys.stdin is None or not sys.stdin.isatty() or not select.select([sys.stdin], [], [], 0)[0]:
        return False
    sys.stdin.readline()
    return True


_program("read_requester", "Read a string from the memory of the responder.")
_program("read_responder", "Let the requester read a string.", _READ)
_program("write_requester", "Write a string to the memory of the responder.", _WRITTEN)
_program("write_responder", "Let the requester write a string, and show it.")
_program("write_immediate_requester", "Write a string, and hand over a number with it.", _WRITTEN)
_program("write_immediate_responder", "Show a string when its number has come.")
_program("send", "Send a string to the receiver.", _SENT)
_program("receive", "Receive a string, and show it.")
_program("send_immediate", "Send a string and a number to the receiver.", _SENT)
_program("receive_immediate", "Receive a string and a number, and show them.")
_program("sync_event_requester", "Set the responder's sync event, and wait for an answer in it.")
_program("sync_event_responder", "Wait until the requester sets a sync event, and answer.")
_program("multi_conn_send", "Send a string on several connections.", _SEVERAL, _SENT)
_program("multi_conn_receive", "Receive a string from each connection.", _SEVERAL)
