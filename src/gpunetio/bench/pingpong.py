"""ibv_rc_pingpong for this package's NICs: the same talk over TCP, the same messages, so that it may be the other end.

    client → server    "%04x:%06x:%06x:%032x\\0": LID, QPN, PSN, GID
    server → client    the same of its own, once it can receive
    client → server    "done\\0"

Then the client SENDs, the server SENDs back, and so on. Every message is 0x7b; with validation each page starts with 0.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np

from ..device.status import EIO, ETIMEDOUT
from ..enums import Access, CqOverrun, LinkLayer
from ..errors import DriverError, InvalidValueError, TimedOutError
from ..formats.cqe import Syndrome
from ..formats.doorbell import QP_DBREC
from ..gpu import Gpu
from ..nic.port import PortConfig
from ..verbs import QpEndpoint
from ..verbs import open as open_device
from . import launches
from .exchange import PORT, STEP_SECONDS, PeerError, accept, dial, listen, own_address
from .kernel_parts import RECORD_WORDS
from .launches import Launcher
from .pingpong_kernel import OUT, RECEIVE_SIDE, pingpong, post_receives

ADDRESS_BYTES = 52
DONE = b"done\0"
FILL = 0x7B
MTUS = (256, 512, 1024, 2048, 4096)
SECONDS_A_MESSAGE = 0.01  # allowed for, on top of what a launch may last

_ADDRESS = re.compile(rb"([0-9a-fA-F]{4}):([0-9a-fA-F]{6}):([0-9a-fA-F]{6}):([0-9a-fA-F]{32})\0")
_SEND_SLOTS = 16
_MIN_RNR_TIMER = 12


@dataclass(frozen=True, kw_only=True)
class PingPongOptions:
    """ibv_rc_pingpong's options and defaults. `gid_index` None: 0 on Ethernet, and no GID on InfiniBand."""

    server: str | None = None
    tcp_port: int = PORT
    device: str | None = None
    nic_port: PortConfig | None = None
    port: int = 1
    size: int = 4096
    mtu: int = 1024
    rx_depth: int = 500
    iterations: int = 1000
    sl: int = 0
    gid_index: int | None = None
    validate: bool = False


@dataclass(frozen=True)
class Played:
    """How it went. `problem` is what validation found."""

    size: int
    iterations: int
    seconds: float
    problem: str | None = None

    def lines(self) -> list[str]:
        """ibv_rc_pingpong's two lines."""
        nbytes, usec = 2 * self.size * self.iterations, self.seconds * 1e6
        return [
            f"{nbytes} bytes in {self.seconds:.2f} seconds = {nbytes * 8 / usec:.2f} Mbit/sec",
            f"{self.iterations} iters in {self.seconds:.2f} seconds = {usec / self.iterations:.2f} usec/iter",
        ]


# --- the talk --------------------------------------------------------------------------------------------------------


def pack_address(end: QpEndpoint) -> bytes:
    """An end as the text that goes over the wire."""
    return b"%04x:%06x:%06x:%s\0" % (end.lid, end.qpn, end.psn, end.gid.hex().encode())


def unpack_address(text: bytes, mtu: int, peer: str) -> QpEndpoint:
    """An end from that text, which does not speak of the MTU."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise PeerError(f"{peer} is no rc_pingpong: it sent {text!r} where LID:QPN:PSN:GID was due")
    lid, qpn, psn = (int(digits, 16) for digits in match.groups()[:3])
    return QpEndpoint(qpn, bytes.fromhex(match[4].decode()), lid, mtu, psn)


def show_address(whose: str, end: QpEndpoint) -> str:
    """The line that both tools print."""
    gid = socket.inet_ntop(socket.AF_INET6, end.gid)
    label = f"{whose} address:".ljust(15)
    return f"  {label} LID 0x{end.lid:04x}, QPN 0x{end.qpn:06x}, PSN 0x{end.psn:06x}, GID {gid}"


def read_exactly(sock: socket.socket, count: int, peer: str, what: str, seconds: float = STEP_SECONDS) -> bytes:
    """So many bytes, all within the time."""
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
            raise PeerError(f"{peer} closed the connection before {what}: it died, or it was ended")
        data += part
    return data


def write_all(sock: socket.socket, data: bytes, peer: str, seconds: float = STEP_SECONDS) -> None:
    """Send bytes."""
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
) -> QpEndpoint:  # fmt: skip
    """Swap addresses: the peer's. `connect` is called as soon as it is known; the client is told only afterwards."""
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
        raise PeerError(f"{peer} sent {done!r} where {DONE!r} was due")
    return far


# --- one end ---------------------------------------------------------------------------------------------------------


class PingPong(Launcher):
    """One end, in a `with` statement: `meet` the other one, then `play`. Its kernel runs on a thread of the host."""

    def __init__(self, options: PingPongOptions):
        super().__init__()
        self.options = options
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise

    def _open(self) -> None:
        options = self.options
        if options.mtu not in MTUS:
            raise InvalidValueError(f"MTU {options.mtu}: it must be one of {', '.join(map(str, MTUS))}")
        self.ctx = self._stack.enter_context(open_device(options.device, port=options.nic_port))
        self._ethernet = self.ctx.query_port(options.port).link_layer == LinkLayer.ETHERNET
        self.gpu = self._stack.enter_context(Gpu("host"))
        pd = self.ctx.create_pd()
        self._buffer = self._alloc(options.size * (2 if options.validate else 1))
        self._mr = pd.register(self._buffer)
        self._received = self._buffer.device_address + (options.size if options.validate else 0)
        self._buffer.array[:] = FILL ^ 0xFF
        sent = self._buffer.array[: options.size]
        sent[:] = FILL
        if options.validate:
            sent[:: mmap.PAGESIZE] = 0  # as ibv_rc_pingpong marks its pages
        self._sends = self.ctx.create_cq(_SEND_SLOTS, overrun=CqOverrun.ENABLE)
        self._receives = self.ctx.create_cq(1 << options.rx_depth.bit_length())
        self._qp = pd.create_qp(
            sq_wr=_SEND_SLOTS, rq_wr=options.rx_depth, send_cq=self._sends, receive_cq=self._receives
        )
        self._exported = self.gpu.export_qp(self._qp, timeout=launches.WAIT_SECONDS)
        self._stack.callback(self._exported.close)
        self._qps.append(self._exported)
        self._open_records(-(-len(OUT) // RECORD_WORDS))
        self._rq = self._alloc(8 * len(RECEIVE_SIDE))
        qp, cq = self._qp, self._receives
        self._rq.write(np.array([
            qp.rq_address, qp.rq_stride, qp.rq_entries, qp.dbr_address + QP_DBREC.rcv, cq.ring_address, cq.entries,
            cq.dbr_address,
        ], np.int64))  # fmt: skip
        self.own = self._own_end()

    def _own_end(self) -> QpEndpoint:
        options = self.options
        index = options.gid_index
        end = self._qp.endpoint(port=options.port, sgid_index=index or 0)
        if index is None and not self._ethernet:
            end = replace(end, gid=bytes(16))
        return end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._close()

    def meet(self, waiting: Callable[[str, int], None] = lambda address, port: None) -> QpEndpoint:
        """Swap addresses with the other end and connect: its address. `waiting` is called when a server can be."""
        options = self.options
        self.compile()  # so that neither end does while the other waits
        if options.server is None:
            listener = listen(own_address(self.ctx, options.gid_index or 0), options.tcp_port)
            with contextlib.ExitStack() as undo:
                undo.callback(listener.close)
                waiting(*listener.getsockname()[:2])
                undo.pop_all()
            sock, caller = accept(listener)
            peer = f"the client {caller}"
        else:
            sock, peer = dial(options.server, options.tcp_port), f"the server {options.server}"
        with sock:
            return talk(sock, peer, self.own, options.mtu, options.server is not None, self._connect)

    def _connect(self, far: QpEndpoint) -> None:
        """Connect, and post the receives."""
        options, index = self.options, self.options.gid_index or 0
        if not any(far.gid):
            if self._ethernet:
                raise PeerError("the other end has sent no GID, which Ethernet needs: give it -g 0")
            far = replace(far, gid=bytes(self.ctx.query_gid(options.port, index)))
        self._qp.connect(
            far, port=options.port, sgid_index=index, sl=options.sl, min_rnr_timer=_MIN_RNR_TIMER, max_rd_atomic=1,
            remote_access=Access.LOCAL_READ,
        )  # fmt: skip
        self._post(options.rx_depth)

    def compile(self) -> None:
        """Compile the kernels, if they are not."""
        self._launch_kernel(0)
        self._post(0)

    def _post(self, depth: int) -> None:
        job = (self._rq, depth, self._received, self._mr.lkey, self.options.size)
        if not post_receives[1, 1, self.gpu](*job).wait(launches.LAUNCH_SECONDS):
            raise TimedOutError("the receives were not posted: the kernel that does it hangs")

    def play(self) -> Played:
        """All exchanges."""
        options = self.options
        words = self._launch_kernel(options.iterations)
        problem = None
        if words["bad_message"]:
            problem = (
                f"the byte at offset {words['bad_offset']} of message {words['bad_message']} is wrong: both ends need "
                "--chk and the same --size"
            )
        seconds = max(1, words["end"] - words["start"]) / 1e9
        return Played(options.size, options.iterations, seconds, problem)

    def _launch_kernel(self, iterations: int) -> dict[str, int]:
        options = self.options
        records = self.launch(
            pingpong, 1, 1, int(options.server is not None), self._exported, self._rq, self._buffer, self._received,
            self._mr.lkey, options.size, options.rx_depth, iterations, int(options.validate),
            seconds=launches.LAUNCH_SECONDS + SECONDS_A_MESSAGE * iterations,
        )  # fmt: skip
        return self._words(records)

    @staticmethod
    def _words(records: np.ndarray) -> dict[str, int]:
        return {name: int(word) for name, word in zip(OUT, records.ravel())}

    def _raise_for(self, statuses: np.ndarray) -> None:
        """Raise what the kernel's status says; it has one only, whatever a table of threads would have."""
        words = self._words(self._out.array.view(np.int64))
        if words["status"] == EIO and words["syndrome"]:
            syndrome = words["syndrome"]
            name = Syndrome(syndrome).name if syndrome in list(Syndrome) else "unknown"
            raise DriverError(
                f"a receive failed after {words['received']} messages: {name} (syndrome {syndrome:#04x}, vendor "
                f"{words['vendor']:#04x})"
            )
        if words["status"] == ETIMEDOUT:
            raise TimedOutError(
                f"nothing came for {launches.WAIT_SECONDS:g} s, after {words['received']} messages: the other end has "
                "died, or another number of --iters"
            )
        super()._raise_for(np.array([words["status"]]))
