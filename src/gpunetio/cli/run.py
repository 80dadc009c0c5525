"""`gpunetio run` and `gpunetio drop-in`: run programs of libibverbs, with software NICs in place of RDMA devices."""

from __future__ import annotations

import os
import shlex
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ..errors import NotFoundError
from .failures import guarded
from .ports import MTU, nic_port, port_options

if TYPE_CHECKING:
    from ..nic.engine.port import PortConfig

MOST_NICS, _NICS_BY_DEFAULT = 8, 2
_IGNORED_BY_PYTHON = signal.SIGPIPE, signal.SIGXFSZ


_NICS = click.option(
    "--nics", type=click.IntRange(1, MOST_NICS), default=None, show_default="one for each --address, or else 2",
    metavar="N", help="How many software NICs the program sees: soft0, soft1, …",
)


@click.command(context_settings={"allow_interspersed_args": False})
@_NICS
@port_options
@MTU
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@guarded
def run(nics: int | None, program: tuple[str, ...], **values: Any) -> None:
    """Run PROGRAM so that its libibverbs, libmlx5 and librdmacm find software NICs, as if they were ConnectX cards.

    \b
        gpunetio run -- ibv_devinfo
        gpunetio run -- ib_write_bw                  in one terminal, and in another
        gpunetio run -- ib_write_bw 127.0.0.1

    The program is not changed, and its libraries are those of the system (rdma-core). It runs in place of this command,
    as with exec, and the NICs run in its process. Programs that it starts have NICs of their own. softN has the address
    127.0.0.(N+1) or, if another process has that, the first free one from 127.0.0.9 on.
    """
    from ..uverbs.environment import lasting_environment

    _become(program, {**os.environ, **lasting_environment(_ports(nics, values))})


@click.command("drop-in")
@click.option(
    "--path", "folder", type=click.Path(path_type=Path, file_okay=False), required=True, metavar="FOLDER",
    help="Where to put what stands for the devices. It must be empty, or not exist.",
)
@_NICS
@port_options
@MTU
@guarded
def drop_in(folder: Path, nics: int | None, **values: Any) -> None:
    """Print the environment in which programs find software NICs, for launchers that `gpunetio run` cannot wrap.

    \b
        eval "$(gpunetio drop-in --path /tmp/nics)"
        ibv_devinfo

    FOLDER must stay for as long as such programs run. Otherwise this is as `gpunetio run`.
    """
    from ..uverbs.environment import prepare

    for name, value in prepare(folder, _ports(nics, values)).items():
        click.echo(f"export {name}={shlex.quote(value)}")


def _ports(nics: int | None, values: dict[str, Any]) -> list[tuple[str, PortConfig]]:
    """Return name and port of each NIC."""
    from ..nic.engine.port import PortConfig

    port = nic_port(values) or PortConfig()
    nics = nics or min(len(port.addresses), MOST_NICS) or _NICS_BY_DEFAULT
    if nics > 1 and len(port.addresses) not in (0, nics):
        raise click.UsageError(f"--address is given {len(port.addresses)} times: give it once for each of {nics} NICs")
    if nics > 1 and port.capture and not Path(port.capture).is_dir():
        raise click.UsageError(
            f"--pcap {port.capture} is one file for {nics} NICs: give a folder that exists, or --nics 1"
        )
    return [(f"soft{n}", _port(port, n, nics)) for n in range(nics)]


def _port(port: PortConfig, n: int, nics: int) -> PortConfig:
    """Return the port of one of the NICs."""
    return replace(port, addresses=port.addresses[n : n + 1]) if nics > 1 else port


def _become(program: tuple[str, ...], variables: dict[str, str]) -> NoReturn:
    """Execute the program in place of this process, so that it has the usual parent, descriptors and signals.

    NotFoundError if it cannot be executed.
    """
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(program[0], program, variables)
    except OSError as error:
        raise NotFoundError(f"{program[0]} cannot be started: {error.strerror}") from None
