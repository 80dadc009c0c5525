"""`gpunetio run` and `gpunetio drop-in`: programs of libibverbs, with software NICs in place of RDMA devices."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import NotFoundError
from .failures import guarded
from .ports import MTU, nic_port, port_options

if TYPE_CHECKING:
    from ..nic.control.port import PortConfig

MOST_NICS, _NICS_BY_DEFAULT = 8, 2
_PR_SET_PDEATHSIG = 1
_PASSED_ON = signal.SIGTERM, signal.SIGHUP


_NICS = click.option(
    "--nics", type=click.IntRange(1, MOST_NICS), default=None, show_default="one for each --address, or else 2",
    metavar="N", help="How many software NICs the program sees: soft0, soft1, …",
)  # fmt: skip


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

    The program is not changed, and its libraries are those of the system (rdma-core). The NICs run in the program's own
    process. Programs that it starts have NICs of their own. softN has the address 127.0.0.(N+1) or, if another process
    has that, the first free one from 127.0.0.9 on.
    """
    from ..uverbs.environment import environment

    with environment(_ports(nics, values)) as more:
        child: subprocess.Popen[bytes] | None = None

        def pass_on(number: int, _: object) -> None:
            if child is None:
                sys.exit(128 + number)
            child.send_signal(number)

        for number in _PASSED_ON:
            signal.signal(number, pass_on)
        child = _start(program, {**os.environ, **more})
        sys.exit(_wait(child, program[0]))


@click.command("drop-in")
@click.option(
    "--path", "folder", type=click.Path(path_type=Path, file_okay=False), required=True, metavar="FOLDER",
    help="Where to put what stands for the devices. It must be empty, or not exist.",
)  # fmt: skip
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
    from ..nic.control.port import PortConfig

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


def _start(program: tuple[str, ...], variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the program, which ends when this process is killed: its files go with this process."""
    prctl = ctypes.CDLL(None).prctl  # found before the fork

    def end_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    try:
        return subprocess.Popen(program, env=variables, preexec_fn=end_with_parent)
    except OSError as error:
        raise NotFoundError(f"{program[0]} cannot be started: {error.strerror}") from None


def _wait(child: subprocess.Popen[bytes], name: str) -> int:
    """Return the status with which a shell would tell how the program ended. Ctrl+C is the program's business."""
    while True:
        try:
            status = child.wait()
        except KeyboardInterrupt:
            continue
        if status < 0:
            click.echo(f"{name} was ended by {signal.Signals(-status).name}", err=True)
        return status if status >= 0 else 128 - status
