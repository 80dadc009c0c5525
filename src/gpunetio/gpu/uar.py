"""Doorbell registers that kernels ring. Each is mapped into the GPU once, even if several queues share it."""

from __future__ import annotations

import threading

from ..arguments import whole
from ..errors import DriverError, InvalidValueError
from .backend import Backend

_BYTES = 8


class RegisterTable:
    """The registers that are mapped into one GPU, and the number of users of each."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._device: dict[int, int] = {}  # address of a register → its device address
        self._users: dict[int, list[int]] = {}  # device address → address of the register, users
        self._near: set[int] = set()  # device addresses of registers that are on the GPU itself
        self._lock = threading.Lock()

    def can_map(self, address: int) -> bool:
        """Return whether the register can be mapped. The call leaves it mapped only if it was before."""
        try:
            self.unexport(self.export(address))
        except DriverError:
            return False
        return True

    def export(self, address: int, near: int | None = None) -> int:
        """Map the register or count another user, and return its device address. DriverError if it cannot be mapped.

        `near` is the device address of a register that is on the GPU itself; nothing is mapped then.
        """
        address = whole("address", address)
        if address <= 0 or address % _BYTES:
            raise InvalidValueError(f"{address:#x} is not a doorbell register: give an aligned address of 8 bytes")
        with self._lock:
            if address not in self._device:
                device_address = near or self._backend.map(address, _BYTES, io=True)
                if near:
                    self._near.add(near)
                self._device[address] = device_address
                self._users[device_address] = [address, 0]
            device_address = self._device[address]
            self._users[device_address][1] += 1
            return device_address

    def is_near(self, device_address: int) -> bool:
        """Return whether the register at this device address is on the GPU itself."""
        return device_address in self._near

    def unexport(self, device_address: int) -> None:
        """Remove a user. The last one unmaps the register."""
        with self._lock:
            if device_address not in self._users:
                raise InvalidValueError(f"nothing is mapped at {device_address:#x}: give what export_uar() returned")
            entry = self._users[device_address]
            entry[1] -= 1
            if entry[1] == 0:
                del self._users[device_address], self._device[entry[0]]
                if device_address not in self._near:
                    self._backend.unmap(entry[0], _BYTES)
                self._near.discard(device_address)
