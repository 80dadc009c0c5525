"""Connect the two ends of a sample over TCP, and let them agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..nic.engine.port import PortConfig
from ..rendezvous.link import PORT, Link, PeerError, accept, dial, listen, own_address
from ..verbs import Context

if TYPE_CHECKING:
    from ..core import ProgressEngine


@dataclass(frozen=True, kw_only=True)
class EndOptions:
    """The options of an end of any sample. Without `server`, this end is the server."""

    server: str | None = None
    tcp_port: int = PORT
    device: str | None = None
    nic_port: PortConfig | None = None
    gid_index: int = 0


def meet(ctx: Context, options: EndOptions, say: Callable[[str], None]) -> Link:
    """Return the connection to the other end: a client connects to its server, a server waits for its client."""
    if options.server is not None:
        return Link(dial(options.server, options.tcp_port), f"the server {options.server}")
    with listen(own_address(ctx, options.gid_index), options.tcp_port) as listener:
        say("Waiting for a client on {} port {} …".format(*listener.getsockname()[:2]))
        sock, caller = accept(listener)
    return Link(sock, f"the client {caller}")


def compare(link: Link, sample: str, terms: dict[str, object]) -> None:
    """Check that both ends have the same options of the sample. PeerError names the first difference."""
    link.send(sample, **terms)
    theirs = link.expect(sample)
    for name, value in terms.items():
        if theirs.get(name) != value:
            raise PeerError(f"{link.peer} has {name} {theirs.get(name)!r:.40}, this end {value!r}: give both the same")


class _Watch:
    """Checks the connection to the other end in each step of a progress engine."""

    def __init__(self, link: Link):
        self._link = link

    def attach_engine(self, engine: ProgressEngine) -> None:
        pass  # any engine may run it at any time

    def progress(self) -> bool:
        if self._link.failure is not None:
            raise self._link.failure
        return False


@contextmanager
def watching(link: Link, engine: ProgressEngine) -> Iterator[None]:
    """Let waits on `engine` end when the other end is gone: they raise the error that ended it."""
    watch = _Watch(link)
    engine.connect(watch)
    try:
        yield
    finally:
        engine.disconnect(watch)


def meet_in(link: Link, kind: str, seconds: float) -> None:
    """Wait until both ends have come to this point."""
    link.send(kind)
    link.expect(kind, timeout=seconds)
