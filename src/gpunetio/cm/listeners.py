"""The listeners of a port, by service ID."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import InUseError
from ..formats.cm import PORT_SPACE_SHIFT
from .communication import Listening
from .ip_service import IpHeader

_PORT_MASK = (1 << PORT_SPACE_SHIFT) - 1


class Listeners:
    """The listeners of a port: per service ID one listener, or several with different addresses."""

    def __init__(self) -> None:
        self._listeners: dict[int, list[Listening]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._listeners.values()))

    def add(self, listener: Listening) -> None:
        """Add a listener. InUseError if it overlaps with another one."""
        there = self.at(listener.service_id)
        if any(listener.overlaps(other) for other in there):
            raise InUseError(f"port {listener.service_id & _PORT_MASK} has a listener already: choose another port")
        self._listeners[listener.service_id] = [*there, listener]

    def remove(self, listener: Listening) -> None:
        """Remove a listener."""
        others = [other for other in self.at(listener.service_id) if other is not listener]
        if others:
            self._listeners[listener.service_id] = others
        else:
            self._listeners.pop(listener.service_id, None)

    def at(self, service_id: int) -> list[Listening]:
        """Return all listeners of a service ID."""
        return self._listeners.get(service_id, [])

    def find(self, service_id: int, address: IpHeader | None, gids: Collection[bytes]) -> Listening | None:
        """Return the listener for the destination of `address`, or None. The destination must be in `gids`."""
        if address is None or address.destination not in gids:
            return None
        return next((it for it in self.at(service_id) if it.takes(address.destination)), None)
