"""A network namespace in which ordinary programs talk to a server, `gpunetio packet_processing`."""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nic_rig import until
from packet_server import CLIENT, READY, SERVER, PacketServer, make_pages
from tools import running
from udp_rig import Namespace

INTERFACE = "gpu0"
PACKAGES = {"ab": "apache2-utils", "curl": "curl", "ip": "iproute2", "ping": "iputils-ping", "unshare": "util-linux"}


def need(*programs: str) -> None:
    """Skip a test if one of these programs is not installed."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program} ({PACKAGES[program]})")


class Lab:
    """A namespace whose only way out is the server's wire."""

    def __init__(self, where: Namespace, pages: dict[str, bytes]):
        self.where, self.pages = where, pages

    def join(self, interface: str) -> None:
        """Give the kernel's end of the wire an address."""
        until(lambda: interface in self.run("ip", "-br", "link"), interface, 60)
        self.where.ip(f"addr add {CLIENT}/24 dev {interface}")
        self.where.ip(f"link set {interface} up")

    def start(self, argv: list[str], **options: object) -> subprocess.Popen[str]:
        return self.where.run(subprocess.Popen, argv, **options)

    def run(self, *argv: object, seconds: float = 250) -> str:
        """Run a program to its end: what it has said."""
        need(str(argv[0]))
        with self.start([*map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                said, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert process.returncode == 0, said
        return said

    def curl(self, folder: Path, *options: str) -> None:
        """Get all pages, one after the other, by one process: byte for byte."""
        argv = ["curl", "-sS", "--fail", "--max-time", "120", *options]
        for path in self.pages:
            argv += [f"http://{SERVER}{path}", "-o", str(folder / path[1:])]
        self.run(*argv)
        for path, data in self.pages.items():
            assert (folder / path[1:]).read_bytes() == data, path

    def ab(self, path: str, count: int, at_once: int, *options: str) -> str:
        """Requests by ab(1): none lost, none wrong."""
        said = self.run("ab", "-q", "-s", 60, "-n", count, "-c", at_once, *options, f"http://{SERVER}{path}")
        assert re.search(rf"Complete requests: +{count}\n", said), said
        assert re.search(r"Failed requests: +0\n", said), said
        assert "Non-2xx" not in said, said
        assert re.search(rf"HTML transferred: +{count * len(self.pages[path])} bytes", said), said
        return said


@contextlib.contextmanager
def laboratory(folder: Path) -> Iterator[Lab]:
    (folder / "pages").mkdir()
    where = Namespace()
    try:
        yield Lab(where, make_pages(folder / "pages"))
    finally:
        where.close()


@contextlib.contextmanager
def on_a_tap(
    folder: Path, *options: str, http: bool = True, queues: int = 1
) -> Iterator[tuple[Lab, PacketServer]]:
    """A server on a TAP device, which comes and goes with it."""
    with laboratory(folder) as lab:
        pages = ("--pages", folder / "pages") if http else ()
        server = PacketServer(f"tap:{INTERFACE}", *pages, *options, http=http, queues=queues, start=lab.start)
        with running(server):
            server.until(READY)
            lab.join(INTERFACE)
            yield lab, server
            server.stop()
