"""ibv_rc_pingpong for all devices. It speaks the same protocol over TCP and verbs, so either end may be the original.

ibv_uc_pingpong and ibv_ud_pingpong can be the other end as well.

    client → server    "%04x:%06x:%06x:%032x\\0": LID, QPN, PSN, GID
    server → client    the same for the server, once it can receive
    client → server    "done\\0"

Then the client SENDs, the server SENDs back, and so on. All bytes are 0x7b; with validation, each page starts with 0.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

from ..enums import LinkLayer
from ..errors import InvalidValueError, TimedOutError
from ..rendezvous.link import STEP_SECONDS, Greeting, PeerError, accept, dial, listen, own_address
from ..verbs import Context, QpEndpoint
from ..verbs import open as open_device
from .pingpong_cpu import CpuPlayer
from .pingpong_player import PingPongOptions, Played, Player

ADDRESS_BYTES = 52
DONE = b"done\0"
MTUS = (256, 512, 1024, 2048, 4096)

_ADDRESS = re.compile(rb"([0-9a-fA-F]{4}):([0-9a-fA-F]{6}):([0-9a-fA-F]{6}):([0-9a-fA-F]{32})\0")
_GREETING = Greeting(5, re.compile(rb"[0-9a-fA-F]{4}:"))  # the LID in its address


# --- the talk --------------------------------------------------------------------------------------------------------


def pack_address(end: QpEndpoint) -> bytes:
    """Return the address of an end as text in ibv_rc_pingpong's format."""
    return b"%04x:%06x:%06x:%s\0" % (end.lid, end.qpn, end.psn, end.gid.hex().encode())


def unpack_address(text: bytes, mtu: int, peer: str) -> QpEndpoint:
    """Parse an address in that format, which does not contain the MTU."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise PeerError(f"{peer} is no rc_pingpong: it sent {text!r} instead of LID:QPN:PSN:GID")
    lid, qpn, psn = (int(digits, 16) for digits in match.groups()[:3])
    return QpEndpoint(qpn, bytes.fromhex(match[4].decode()), lid, mtu, psn)


def show_address(whose: str, end: QpEndpoint) -> str:
    """Return the line that both tools print for an end."""
    gid = socket.inet_ntop(socket.AF_INET6, end.gid)
    label = f"{whose} address:".ljust(15)
    return f"  {label} LID 0x{end.lid:04x}, QPN 0x{end.qpn:06x}, PSN 0x{end.psn:06x}, GID {gid}"


def read_exactly(sock: socket.socket, count: int, peer: str, what: str, seconds: float = STEP_SECONDS) -> bytes:
    """Read `count` bytes within `seconds`."""
    data, end = b"", time.monotonic() + seconds
    while len(data) < count:
        try:
            sock.settimeout(max(1e-3, end - time.monotonic()))
            part = sock.recv(count - len(data))
        except TimeoutError:
            raise TimedOutError(f"{peer} did not send {what} within {seconds:g} s") from None
        except OSError as error:
            raise PeerError(f"the connection to {peer} was lost before {what}: {error.strerror}") from None
        if not part:
            raise PeerError(f"{peer} closed the connection before {what}: it died or was killed")
        data += part
    return data


def write_all(sock: socket.socket, data: bytes, peer: str, seconds: float = STEP_SECONDS) -> None:
    """Send `data` within `seconds`."""
    sock.settimeout(seconds)
    try:
        sock.sendall(data)
    except TimeoutError:
        raise TimedOutError(f"{peer} did not read within {seconds:g} s") from None
    except OSError as error:
        raise PeerError(f"the connection to {peer} was lost: {error.strerror}") from None


def talk(
    sock: socket.socket, peer: str, own: QpEndpoint, mtu: int, client: bool, connect: Callable[[QpEndpoint], None],
    seconds: float = STEP_SECONDS,
) -> QpEndpoint:
    """Exchange addresses and return the peer's. `connect` gets it before the client learns this end's address."""
    what = "its address"
    if client:
        write_all(sock, pack_address(own), peer, seconds)
        far = unpack_address(read_exactly(sock, ADDRESS_BYTES, peer, what, seconds), mtu, peer)
        write_all(sock, DONE, peer, seconds)
        connect(far)
        return far
    far = unpack_address(read_exactly(sock, ADDRESS_BYTES, peer, what, seconds), mtu, peer)
    connect(far)
    write_all(sock, pack_address(own), peer, seconds)
    done = read_exactly(sock, len(DONE), peer, "'done'", seconds)
    if done != DONE:
        raise PeerError(f"{peer} sent {done!r} instead of {DONE!r}")
    return far


# --- one end ---------------------------------------------------------------------------------------------------------


class PingPong:
    """One end, for a `with` statement: `meet` the other end, then `play`."""

    ctx: Context
    own: QpEndpoint

    def __init__(self, options: PingPongOptions):
        self.options = options
        if options.mtu not in MTUS:
            raise InvalidValueError(f"MTU {options.mtu}: it must be one of {', '.join(map(str, MTUS))}")
        self.ctx = open_device(options.device, port=options.nic_port)
        with contextlib.ExitStack() as undo:
            undo.callback(self.ctx.close)
            port = self.ctx.query_port(options.port)
            self._ethernet = port.link_layer == LinkLayer.ETHERNET
            if options.qp_type.datagrams and options.size > port.active_mtu:
                raise InvalidValueError(
                    f"a datagram of {options.size} bytes: a packet of port {options.port} of {self.ctx.name} has up to "
                    f"{port.active_mtu}"
                )
            self._player = _player(self.ctx, options)
            undo.callback(self._player.close)
            self.own = self._own_end()
            undo.pop_all()

    def _own_end(self) -> QpEndpoint:
        options = self.options
        index = options.gid_index
        end = self._player.qp.endpoint(port=options.port, sgid_index=index or 0)
        if index is None and not self._ethernet:
            end = replace(end, gid=bytes(16))
        return end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._player.close()

    def meet(self, waiting: Callable[[str, int], None] = lambda address, port: None) -> QpEndpoint:
        """Exchange addresses and connect; return the other end's address.

        `waiting` is called when a client can connect.
        """
        options = self.options
        self.compile()  # so that neither end compiles while the other waits
        if options.server is None:
            listener = listen(own_address(self.ctx, options.gid_index or 0), options.tcp_port)
            with contextlib.ExitStack() as undo:
                undo.callback(listener.close)
                waiting(*listener.getsockname()[:2])
                undo.pop_all()
            sock, caller = accept(listener, _GREETING)
            peer = f"the client {caller}"
        else:
            sock, peer = dial(options.server, options.tcp_port), f"the server {options.server}"
        with sock:
            return talk(sock, peer, self.own, options.mtu, options.server is not None, self._connect)

    def _connect(self, far: QpEndpoint) -> None:
        """Connect the queue pair, and post the receives."""
        options, index = self.options, self.options.gid_index or 0
        if not any(far.gid):
            if self._ethernet:
                raise PeerError("the other end sent no GID, but Ethernet needs one: give it -g 0")
            far = replace(far, gid=bytes(self.ctx.query_gid(options.port, index)))
        self._player.connect(far)
        self._player.post()

    def compile(self) -> None:
        """Compile the code that plays, unless it is compiled."""
        self._player.compile()

    def play(self) -> Played:
        """Run all exchanges."""
        return self._player.play()


def _player(ctx: Context, options: PingPongOptions) -> Player:
    if options.cpu or options.events or options.qp_type.datagrams or not ctx.has_devx:
        return CpuPlayer(ctx, options)
    from .pingpong_launch import KernelPlayer  # needs the compiler; the CPU player does not

    return KernelPlayer(ctx, options)
