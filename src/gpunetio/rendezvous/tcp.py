"""Ranks that meet over TCP: all connect to rank 0, which distributes the values."""

from __future__ import annotations

import contextlib
import socket
import time
from hmac import compare_digest

from ..errors import DocaError, InvalidValueError, OperatingSystemError, TimedOutError
from ..interrupts import deferred
from .group import TIMEOUT, Rendezvous
from .link import MAX_BODY, Callers, Link, Message, PeerError, listen

PORT = 18516  # next to the benchmarks' port
MOST_BYTES = MAX_BODY // 4  # in all values of one exchange, which are sent as hexadecimal digits
_LOOK_SECONDS = 0.05  # between two checks for handed-in values
_RETRY_SECONDS = 0.1  # between two attempts to reach a rank 0 that does not listen yet


class TcpRendezvous(Rendezvous):
    """Ranks that meet over TCP. They may start in any order.

    Rank 0 listens on `address` and `port`; the others connect to it. Callers that are not ranks of this rendezvous are
    rejected. Anyone who reaches the port and knows `key` can join, so choose an address of a network that you trust.
    `timeout` is that of `Rendezvous`; all ranks must connect within that time. All ranks notice when a rank ends.

    `key` is any text; all ranks must give the same one. With `listener`, rank 0 accepts on that socket, and closes it
    when all ranks have connected.

    One exchange carries at most 4 MiB in total.
    """

    def __init__(
        self, rank: int, size: int, address: str = "127.0.0.1", port: int = PORT, *, timeout: float = TIMEOUT,
        key: str = "", listener: socket.socket | None = None,
    ) -> None:
        super().__init__(rank, size, timeout)
        try:
            key.encode()
        except UnicodeEncodeError:
            raise InvalidValueError(f"key = {key!r} has bytes that are not UTF-8: give all ranks another one") from None
        self._links: dict[int, Link] = {}  # by rank: rank 0 has one to each rank, the others one to rank 0
        self._turn, self._key, self._listener = 0, key, listener
        if size == 1:
            return
        try:
            if rank == 0:
                self._wait_for_all(address, port)
            else:
                self._call(address, port)
        except BaseException as error:
            self.close(error)
            raise

    # --- how it begins -----------------------------------------------------------------------------------------------

    def _call(self, address: str, port: int) -> None:
        end = time.monotonic() + self.timeout
        link = self._links[0] = Link(_dialled(address, port, end), f"rank 0 ({address} port {port})")
        link.send("join", rank=self.rank, size=self.size, key=self._key)
        link.expect("welcome", timeout=max(0.0, end - time.monotonic()))

    def _wait_for_all(self, address: str, port: int) -> None:
        end = time.monotonic() + self.timeout
        with contextlib.ExitStack() as undo:
            listener = self._listener or undo.enter_context(listen(address, port))
            callers = undo.enter_context(Callers(listener))
            while len(self._links) < self.size - 1:
                if time.monotonic() >= end:
                    raise TimedOutError(self._missing(address, port))
                if caller := callers.look(end):
                    sock, host = caller
                    self._admit(Link(sock, f"the caller {host}"), host)
        listener.close()
        for link in self._links.values():
            link.send("welcome")

    def _admit(self, link: Link, host: str) -> None:
        """Admit a caller as the rank that it names, or tell the caller why it is rejected."""
        try:
            join = link.expect("join")
            if not compare_digest(_bytes_of(join.text("key")), _bytes_of(self._key)):
                raise PeerError(f"{link.peer} gave another key: it belongs to another rendezvous")
            size = join.integer("size", 2, 1 << 30)
            if size != self.size:
                raise PeerError(f"{link.peer} takes part in a rendezvous of {size} ranks, but this one has {self.size}")
            rank = join.integer("rank", 1, size - 1)
            if rank in self._links:
                raise PeerError(f"{link.peer} wants to be rank {rank}, which has joined already")
        except DocaError as error:
            link.close(error)
        else:
            link.peer = f"rank {rank} ({host})"
            self._links[rank] = link

    def _missing(self, address: str, port: int) -> str:
        missing = [str(rank) for rank in range(1, self.size) if rank not in self._links]
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(missing)}"
        return f"{who} of {self.size} did not connect to {address} port {port} within {self.timeout:g} s"

    # --- exchanges ---------------------------------------------------------------------------------------------------

    def _allgather(self, data: bytes) -> list[bytes]:
        if len(data) > MOST_BYTES // self.size:
            raise InvalidValueError(
                f"a value of {len(data)} bytes: with {self.size} ranks, {MOST_BYTES // self.size} is the limit"
            )
        self._turn += 1
        if self.rank != 0:
            self._links[0].send("value", turn=self._turn, data=data.hex())
            answer = self._links[0].expect("values", timeout=self.timeout)
            values = answer.parts("values", self.size)
            if len(values) != self.size:
                raise answer.wrong("values", f"a list of {self.size} objects")
            return [value.raw("data", MOST_BYTES) for value in values]
        try:
            parts = self._gathered(data)
            values = [{"data": part.hex()} for part in parts]
            for link in self._links.values():
                link.send("values", values=values)
        except DocaError as error:
            self.close(error)  # the others wait for an answer
            raise
        return parts

    def _gathered(self, data: bytes) -> list[bytes]:
        """Return the values of all ranks, at rank 0. A rank that ends is noticed while others are waited for."""
        end = time.monotonic() + self.timeout
        found = {0: data}
        while len(found) < self.size:
            before = len(found)
            for rank, link in self._links.items():
                if rank in found:
                    continue
                try:
                    value: Message = link.expect("value", timeout=0.0)
                except TimedOutError:
                    if failure := link.failure:  # the link may have failed since
                        raise failure from None
                    continue
                value.integer("turn", self._turn, self._turn)
                found[rank] = value.raw("data", MOST_BYTES)
            if len(found) > before:
                continue
            if time.monotonic() > end:
                missing = ", ".join(self._links[rank].peer for rank in self._links if rank not in found)
                raise TimedOutError(f"no value came from {missing} within {self.timeout:g} s")
            first = next(rank for rank in self._links if rank not in found)
            self._links[first].wait_for_news(_LOOK_SECONDS)
        return [found[rank] for rank in range(self.size)]

    @property
    def failure(self) -> DocaError | None:
        """Return why a rank has ended, or None. A rank that has left in good order has not failed.

        Rank 0 sees all ranks, and the others see rank 0.
        """
        return next((link.failure for link in self._links.values() if link.failure and not link.left), None)

    @deferred()
    def leave(self) -> None:
        """Tell the other ranks that this one no longer needs the rendezvous, and close it."""
        for link in self._links.values():
            if link.failure is None:
                with contextlib.suppress(DocaError):  # the rendezvous has ended in the meantime
                    link.leave()
        self.close()

    @deferred()  # so that every rank is told
    def close(self, error: BaseException | None = None) -> None:
        super().close(error)
        for link in self._links.values():
            link.close(error)


def _bytes_of(key: str) -> bytes:
    """Return the bytes of a key, which may have lone surrogates: JSON can carry them (RFC 8259 8.2)."""
    return key.encode(errors="surrogatepass")


def _dialled(address: str, port: int, end: float) -> socket.socket:
    """Return a connection to rank 0, which may not listen yet."""
    while (left := end - time.monotonic()) > 0:
        try:
            return socket.create_connection((address, port), left)
        except ConnectionRefusedError:
            time.sleep(min(_RETRY_SECONDS, left))
        except TimeoutError:
            break
        except (OSError, UnicodeError) as error:
            raise OperatingSystemError(f"cannot connect to rank 0 at {address!r} port {port}: {error}") from None
    raise TimedOutError(f"rank 0 did not answer at {address} port {port} in time: was it started, with this address?")
