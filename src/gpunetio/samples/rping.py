"""rping: a client has a server read its memory and write it back, over a connection by address and port.

Both ends speak the protocol of rdma-core's `rping`, so either of them can be that program:

    1. connection   the client connects to the server's port; both have one READ in flight at most
    2. a ping       the client SENDs where its data are; the server READs them, and SENDs that it has
                    the client SENDs where it wants them; the server WRITEs them there, and SENDs that it has
    3. end          the client disconnects

The data are text: the number of the ping, then letters, starting with another letter in each ping.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from .. import cm
from ..enums import WcOpcode, WrOpcode
from ..errors import DocaError, DriverError, InvalidValueError, UnexpectedError
from ..formats.rping import RPING_INFO
from ..providers import PortConfig
from ..verbs import PD
from ..verbs import open as open_device
from .cm_end import End, gid_index_of

PORT = 7174
SMALLEST, LARGEST, SIZE = 23, 65536, 64  # bytes of a ping, with the 0 at its end
_FIRST, _LAST = ord("A"), ord("z")
_READS = 1  # in flight
_log = logging.getLogger(__name__)

# Places in the memory of an end: the incoming message, the outgoing message, and the data of both directions.
_INBOX, _OUTBOX, _DATA = 0, RPING_INFO.size, 2 * RPING_INFO.size


@dataclass(frozen=True, kw_only=True)
class RpingOptions:
    """`address` is the server's: to connect to or, at the server, to listen at; None means all of the NIC's.

    `source` is the client's own address. `size` is the bytes of a ping, `count` how many the client sends; 0 means
    without end. `persistent` servers continue with the next clients. `say` gets the line of each ping, if it is not
    None.
    """

    address: str | None = None
    source: str | None = None
    device: str | None = None
    nic_port: PortConfig | None = None
    port: int = PORT
    size: int = SIZE
    count: int = 0
    validate: bool = False
    persistent: bool = False
    say: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        if not SMALLEST <= self.size <= LARGEST:
            raise InvalidValueError(f"size = {self.size}: a ping has {SMALLEST} to {LARGEST} bytes")


def data_of(number: int, size: int) -> bytes:
    """Return the data of a ping."""
    head = f"rdma-ping-{number}: ".encode()
    letters = _LAST - _FIRST + 1
    first = number % letters
    tail = bytes(_FIRST + (first + i) % letters for i in range(size - 1 - len(head)))
    return (head + tail)[: size - 1] + b"\0"


def connect(options: RpingOptions) -> None:
    """Run the client: connect to the server, send pings, disconnect. UnexpectedError if other data come back."""
    if options.address is None:
        raise InvalidValueError("the client needs the server's address")
    with ExitStack() as stack:
        ctx = stack.enter_context(open_device(options.device, port=options.nic_port))
        end = stack.enter_context(_Pinger(ctx.create_pd(), options))
        gid_index = gid_index_of(ctx, options.source, options.address)
        connection = stack.enter_context(cm.connect(end.qp, options.address, options.port, gid_index=gid_index))
        end.ping()
        connection.disconnect()


def serve(options: RpingOptions) -> None:
    """Serve one client or, if persistent, all clients."""
    with ExitStack() as stack:
        ctx = stack.enter_context(open_device(options.device, port=options.nic_port))
        gid_index = gid_index_of(ctx, options.address)
        pd = ctx.create_pd()
        listener = stack.enter_context(cm.listen(ctx, options.port, gid_index=gid_index))
        _log.info("listening at port %d", options.port)
        while True:
            request = listener.accept(timeout=math.inf)
            if not options.persistent:
                _answer(pd, options, request, listener)
                return
            threading.Thread(target=_guarded, args=(pd, options, request), daemon=True).start()


def _guarded(pd: PD, options: RpingOptions, request: cm.Request) -> None:
    """Answer one client of many. Its errors affect no other client."""
    try:
        _answer(pd, options, request)
    except DocaError as error:
        _log.error("%s: %s", request.peer, error)


def _answer(pd: PD, options: RpingOptions, request: cm.Request, listener: cm.Listener | None = None) -> None:
    """Answer one client. With a `listener`, refuse all others from now on."""
    with _Ponger(pd, options) as end, request.accept(end.qp):
        if listener is not None:
            listener.close()
        try:
            while True:
                end.pong()
        except DriverError:
            if not end.peer_left:
                raise
            _log.info("server DISCONNECT EVENT...")


class _RpingEnd(End):
    """The common part of client and server: messages that say where memory is."""

    def __init__(self, pd: PD, options: RpingOptions, buffers: int):
        super().__init__(pd, _DATA + buffers * options.size)
        self.options = options
        self.receive(_INBOX, RPING_INFO.size)  # before the connection exists, because the peer may send at once

    def tell(self, offset: int, nbytes: int) -> None:
        """Send the place of a part of the memory. `tell(0, 0)` only reports that something is done."""
        self.memory.array[_OUTBOX : _OUTBOX + RPING_INFO.size] = bytearray(
            RPING_INFO.pack(address=self.region.address + offset, rkey=self.region.rkey, nbytes=nbytes)
        )
        self.post(WrOpcode.SEND, _OUTBOX, RPING_INFO.size)
        self.wait(WcOpcode.SEND)

    def hear(self) -> tuple[int, int, int]:
        """Wait for the peer's message: an address, its rkey, and the number of bytes."""
        self.wait(WcOpcode.RECV)
        heard = RPING_INFO.unpack(self.memory.array[_INBOX : _INBOX + RPING_INFO.size].tobytes())
        self.receive(_INBOX, RPING_INFO.size)
        return heard["address"], heard["rkey"], heard["nbytes"]

    def text(self, offset: int) -> str:
        """Return the data of a ping up to the 0, which comes early if the other end has shorter pings."""
        data = self.memory.array[offset : offset + self.options.size].tobytes()
        return data.partition(b"\0")[0].decode("latin-1")


class _Pinger(_RpingEnd):
    """The client."""

    def __init__(self, pd: PD, options: RpingOptions):
        super().__init__(pd, options, 2)
        self._back = _DATA + options.size  # where the server writes

    def ping(self) -> None:
        """Send all pings."""
        size, number = self.options.size, 0
        here, back = slice(_DATA, _DATA + size), slice(self._back, self._back + size)
        while number < (self.options.count or math.inf):
            data = data_of(number, size)
            self.memory.array[here] = bytearray(data)
            self.memory.array[back] = 0
            self.tell(_DATA, size)
            self.hear()
            self.tell(self._back, size)
            self.hear()
            came = self.memory.array[back].tobytes()
            if self.options.validate and came != data:
                raise UnexpectedError(f"ping {number} came back with other data: {came[:64]!r}, not {data[:64]!r}")
            if self.options.say is not None:
                self.options.say(f"ping data: {self.text(self._back)}")
            number += 1


class _Ponger(_RpingEnd):
    """The server."""

    def __init__(self, pd: PD, options: RpingOptions):
        super().__init__(pd, options, 1)

    def pong(self) -> None:
        """Answer one ping. DriverError, with `peer_left` set, if the client has disconnected."""
        address, rkey, nbytes = self._place()
        self.post(WrOpcode.RDMA_READ, _DATA, nbytes, address, rkey)
        self.wait(WcOpcode.RDMA_READ)
        if self.options.say is not None:
            self.options.say(f"server ping data: {self.text(_DATA)}")
        self.tell(0, 0)
        address, rkey, nbytes = self._place()
        self.post(WrOpcode.RDMA_WRITE, _DATA, nbytes, address, rkey)
        self.wait(WcOpcode.RDMA_WRITE)
        self.tell(0, 0)

    def _place(self) -> tuple[int, int, int]:
        """Return the place of the client's data."""
        address, rkey, nbytes = self.hear()
        if nbytes > self.options.size:
            raise InvalidValueError(f"the client has pings of {nbytes} bytes: give the server the same -S")
        return address, rkey, nbytes
