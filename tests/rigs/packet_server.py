"""`gpunetio packet_processing` in a separate process, and pages for it to serve."""

import random
import signal
from pathlib import Path
from typing import Any

from gpunetio.nic.host.engine import compile_engine, compile_extensions
from tools import Tool

SERVER, CLIENT = "10.77.9.1", "10.77.9.2"
READY = "Ctrl+C ends the application"
SIZES = (0, 1, 100, 1460, 1461, 10_000, 60_000)


class PacketServer(Tool):
    """The command with this wire, by default on the host target."""

    limit = 200  # seconds: with a cold cache, it compiles all kernels before it is ready

    def __init__(
        self, wire: str, *options: Any, http: bool = True, queues: int = 1, gpu: str = "host", **start: Any
    ):
        compile_engine()  # once, for all processes
        compile_extensions()
        super().__init__(
            "packet_processing", "-g", gpu, "-n", "soft0", "-q", queues, *["-s"] * http, "--wire", wire,
            "--address", SERVER, *options, **start,
        )

    def stop(self) -> str:
        """End it by Ctrl+C: what it has said."""
        self.signal(signal.SIGINT)
        status, out, err = self.end()
        assert (status, err) == (0, ""), err
        self.said = out
        return out


def make_pages(folder: Path) -> dict[str, bytes]:
    """Write pages of these sizes: the bytes of each path."""
    draw = random.Random(1)
    pages = {f"/{nbytes}.html": draw.randbytes(nbytes) for nbytes in SIZES}
    pages["/index.html"] = b"<html><title>GPUNetIO index page</title></html>"
    for path, data in pages.items():
        (folder / path[1:]).write_bytes(data)
    return pages
