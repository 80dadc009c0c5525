"""Run unmodified third-party programs under `gpunetio run`: alone, and as server and client."""

import contextlib
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gpunetio.fabric.claims import claimant
from rdma_core import skip_without
from repository import environment

LIMIT = 60
ATTEMPTS = 20  # until the server listens
RUN = sys.executable, "-m", "gpunetio", "run"


def run(*arguments: object, options: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    command, env = [*RUN, *options, "--", *map(str, arguments)], environment() | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=env, check=False)


@contextlib.contextmanager
def serving(*arguments: object, options: tuple[str, ...] = (), **variables: str) -> Iterator[subprocess.Popen[str]]:
    command, env = [*RUN, *options, "--", *map(str, arguments)], environment() | variables
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    ) as server:
        try:
            yield server
        finally:
            server.kill()


def both(*program: object, options: tuple[str, ...] = (), **variables: str) -> tuple[str, str]:
    """Run a program as server and as client. Return what both have printed."""
    skip_without(str(program[0]))
    with serving(*program, options=options, **variables) as server:
        for _ in range(ATTEMPTS):
            client = run(*program, "127.0.0.1", options=options, **variables)
            if not re.search("Couldn't connect to|Connection refused", client.stdout + client.stderr):
                break
        return printed(server, client)


def printed(server: subprocess.Popen[str], client: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """What a server, when it has ended, and its client have printed. Both must have ended well."""
    if client.returncode:
        server.terminate()  # it may wait for another client
    out, _ = server.communicate(timeout=LIMIT)
    assert client.returncode == 0, client.stdout + client.stderr + out
    assert server.returncode == 0, out
    return out, client.stdout


def iterations(out: str) -> int:
    """The second column of perftest's last row of results.

    The others are times and rates. They are "inf" and "-nan" where perftest could not measure the CPU's clock, as on a
    busy machine: "Correlation coefficient r^2 < 0.9".
    """
    return int(re.findall(r"^\s*\d+\s+(\d+)\s+\S", out, re.MULTILINE)[-1])


# --- by librdmacm: clients need the address of the server's NIC

NOBODY_LISTENS = "Connection refused|RDMA_CM_EVENT_(REJECTED|UNREACHABLE)|Unexpected CM event bl blka 8"


@contextlib.contextmanager
def serving_at(address: str, *program: object) -> Iterator[subprocess.Popen[str]]:
    """Run a server whose NIC has an address. It has that when this returns."""
    skip_without(str(program[0]))
    with serving(*program, options=("--nics", "1", "--address", address)) as server:
        end = time.monotonic() + LIMIT
        while claimant(address) is None and server.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        yield server


def both_at(address: str, listen: tuple[object, ...], connect: tuple[object, ...]) -> tuple[str, str]:
    """Run a server whose NIC has an address, and a client. Return what both have printed.

    Both begin anew if the server does not listen yet. perftest connects twice, and its server may be late the second
    time: then its client crashes, and the server takes the first connection of the next client for the second one.
    Also, `rstream -T a` takes its peer's end for an error, POLLHUP, if it hears of that together with the last bytes.
    fio's client ends with 0 in any case.
    """
    for _ in range(ATTEMPTS):
        with serving_at(address, *listen) as server:
            client = run(*connect)
            too_early = re.search(NOBODY_LISTENS, client.stdout + client.stderr)
            if not too_early and client.returncode != select.POLLHUP:
                return printed(server, client)
            server.terminate()
            out, _ = server.communicate(timeout=LIMIT)
    pytest.fail(f"in {ATTEMPTS} attempts, none was in time: {client.stdout + client.stderr + out}")
