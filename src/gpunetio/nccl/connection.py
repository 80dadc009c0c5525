"""How ranks meet. A rank listens, NCCL passes its handle to all ranks, and each rank connects with the handles of all.

All ranks connect to rank 0, and exchange values through it (`TcpRendezvous`).
"""

from __future__ import annotations

import reprlib
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import IPv6Address, ip_address
from typing import Protocol

from ..errors import DocaError, InvalidValueError, NotSupportedError, TimedOutError, again
from ..formats.layout import Entry
from ..rendezvous import Message, PeerError, TcpRendezvous, listen, own_address
from .abi import HANDLE_BYTES
from .device import Device
from .settings import Settings

_MAGIC, _PROTOCOL = b"gpunetio", 1
_KEY_BYTES = 16
# The handle that NCCL passes to the other ranks: where this rank listens, and the key that a caller must know.
HANDLE = Entry("handle", HANDLE_BYTES, f"""
    magic     0  raw[8]
    protocol  8  be32
    port     12  be16
    address  16  raw[16]
    key      32  raw[{_KEY_BYTES}]
""")


class Part(Protocol):
    """A context or a window of a collective."""

    def close(self) -> None:
        """Close it. Idempotent."""
        ...


class Listener:
    """The result of `listen`: an open device, and a socket to which other ranks connect if this one becomes rank 0.

    `handle` is what the other ranks need. NotSupportedError if the NIC has no address of this host, where ranks could
    meet.
    """

    handle: bytes

    def __init__(self, settings: Settings):
        self.settings = settings
        with ExitStack() as undo:
            self._device: Device | None = Device(settings)
            undo.callback(self._close_device)
            address = ip_address(own_address(self._device.ctx))
            if address.is_unspecified:
                raise NotSupportedError(
                    f"{self._device.ctx.name} has no IP address of this host, at which ranks could meet: give one to "
                    "its network interface, or name another NIC in GPUNETIO_NCCL_DEVICE"
                )
            self.socket = undo.enter_context(listen(str(address), 0))
            mapped = address if isinstance(address, IPv6Address) else IPv6Address(f"::ffff:{address}")
            self.handle = HANDLE.pack(
                magic=_MAGIC, protocol=_PROTOCOL, port=self.socket.getsockname()[1], address=mapped.packed,
                key=secrets.token_bytes(_KEY_BYTES),
            )
            self._undo = undo.pop_all()

    def take_device(self) -> Device:
        """Return the device, which the caller closes."""
        if self._device is None:
            raise InvalidValueError("this listener has connected already: listen again")
        device, self._device = self._device, None
        return device

    def give_back(self, device: Device) -> None:
        """Keep the device for another attempt to connect."""
        self._device = device

    def _close_device(self) -> None:
        if self._device is not None:
            self._device.close()

    def close(self) -> None:
        """Close the socket, and the device if no collective uses it. Idempotent."""
        self._undo.close()


def _place(rank: int, handle: bytes) -> tuple[str, int, str]:
    """Return address, port and key of a rank's handle. InvalidValueError if it is no handle of this plugin."""
    fields = HANDLE.at(handle)
    if fields["magic"].tobytes() != _MAGIC:
        raise InvalidValueError(
            f"the handle of rank {rank} is not gpunetio's: all ranks must load this plugin, so set NCCL_GIN_PLUGIN "
            "for each"
        )
    if int(fields["protocol"]) != _PROTOCOL:
        raise InvalidValueError(
            f"the handle of rank {rank} is of protocol {int(fields['protocol'])} and this rank's of {_PROTOCOL}: run "
            "the same gpunetio everywhere"
        )
    address = IPv6Address(fields["address"].tobytes())
    return str(address.ipv4_mapped or address), int(fields["port"]), fields["key"].tobytes().hex()


class Collective:
    """The result of `connect`: the connected ranks of a communicator.

    `parts` are its open contexts and windows, which `close` closes.
    """

    device: Device
    rank: int
    size: int

    def __init__(self, listener: Listener, handles: Sequence[bytes], rank: int):
        if not 0 <= rank < len(handles):
            raise InvalidValueError(f"rank {rank}: the ranks of {len(handles)} handles are 0 to {len(handles) - 1}")
        places = [_place(n, handle) for n, handle in enumerate(handles)]
        if handles[rank] != listener.handle:
            raise InvalidValueError(f"the handle of rank {rank} is not the one that this rank has listened with")
        address, port, key = places[0]
        self.device = listener.take_device()
        with ExitStack() as undo:
            undo.callback(listener.give_back, self.device)
            self.ranks = TcpRendezvous(
                rank, len(handles), address, port, timeout=listener.settings.timeout, key=key,
                listener=listener.socket if rank == 0 else None,
            )
            undo.pop_all()
        self.rank, self.size = rank, len(handles)
        self.parts: list[Part] = []
        self._failed: DocaError | None = None

    @contextmanager
    def telling(self, call: str) -> Iterator[None]:
        """Prepare for `gather` in this block. If that fails, the call fails on all ranks, so that they need not wait.
        """
        try:
            yield
        except DocaError as error:
            with suppress(DocaError):
                self._exchange({"call": call, "error": str(error)})
            raise

    def gather(self, call: str, **values: object) -> list[Message]:
        """Return the values of all ranks, which make the same call. PeerError if one of them fails or has ended."""
        found = []
        for rank, value in enumerate(self._exchange({"call": call, **values})):
            if not isinstance(value, dict):
                raise PeerError(f"rank {rank} sent {reprlib.repr(value):.40} for {call}")
            message = Message(f"rank {rank}", {**value, "kind": call})
            if "error" in message:
                raise PeerError(f"{call} failed on rank {rank}: {message.text('error')[:400]}")
            if message.text("call") != call:
                raise message.wrong("call", f"{call!r}, as all ranks make the same calls in the same order")
            found.append(message)
        return found

    def barrier(self) -> None:
        """Return once all ranks have called this. Errors are those of `gather`."""
        self._exchange(None)

    def _exchange(self, value: object) -> Sequence[object]:
        """Return the values of all ranks. Once a rank has ended or was too late, each call fails for that reason."""
        if self._failed is not None:
            raise again(self._failed)
        try:
            return self.ranks.allgather(value)
        except (PeerError, TimedOutError) as error:
            self._failed = error
            raise

    @property
    def failure(self) -> DocaError | None:
        """Return why the ranks can no longer work together, or None if they can: one has ended, or was too late."""
        return self._failed or self.ranks.failure

    def close(self) -> None:
        """Close contexts and windows, leave the other ranks, and close the device. Idempotent."""
        with ExitStack() as steps:
            steps.callback(self.device.close)
            steps.callback(self.ranks.leave)
            while self.parts:
                steps.callback(self.parts.pop(0).close)
