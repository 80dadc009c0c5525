"""The control path of the LAN between a host's software NICs: whether this NIC is a member, and its wires."""

from __future__ import annotations

import numpy as np

from ....fabric.ethernet_records import ETHERNET_WIRE, FRAME_ROOM
from ....memory import HostMemory
from ...engine.hardware import Hardware
from ...state.lan import LAN, MAC_ROW, MACS
from ...wires.pipes import Pipes


class Lan:
    """A NIC's membership in the LAN. The NIC is a member while it has Ethernet queues, which `enter` and `leave` count.

    NICs of this host send each other frames over the pipes that their queue pairs use. In each pipe, the consumer
    announces whether it accepts frames.
    """

    def __init__(self, hardware: Hardware):
        self._hardware = hardware
        self._queues = 0
        self._wires: list[Pipes] = []
        self._memory = HostMemory(LAN.size + ETHERNET_WIRE.size + MACS * MAC_ROW.size + FRAME_ROOM)
        at = self._memory.address
        port = self._memory.view(ETHERNET_WIRE.dtype, LAN.size)[0]
        port["mac"] = int.from_bytes(hardware.port.mac, "little")
        port["promiscuous"] = hardware.port.config.promiscuous
        macs = LAN.size + ETHERNET_WIRE.size
        self._rows = self._memory.view(MAC_ROW.dtype, macs, MACS)
        lan = self._memory.view(LAN.dtype)[0]
        lan["port"], lan["macs"], lan["room"] = at + LAN.size, at + macs, at + macs + MACS * MAC_ROW.size
        hardware.record["lan"] = at

    def close(self) -> None:
        """Free the memory. The engine must have stopped."""
        self._memory.close()

    @property
    def joined(self) -> bool:
        """Whether the NIC is on the LAN."""
        return self._queues != 0

    def enter(self) -> bool:
        """Add a queue. With the first one, the NIC enters the LAN. Return whether it was the first."""
        self._queues += 1
        if self._queues == 1:
            self._announce(self._wires, 1)
        return self._queues == 1

    def leave(self) -> None:
        """Remove a queue. With the last one, the NIC leaves the LAN."""
        self._queues -= 1
        if self._queues == 0:
            self._announce(self._wires, 0)

    def add(self, wire: Pipes) -> None:
        """Add a wire to another NIC, which is or will be on the LAN."""
        self._wires.append(wire)
        self._announce([wire], int(self.joined))

    def remove(self, wire: Pipes) -> None:
        """Remove a wire that the engine no longer uses, and the MACs learned on it."""
        self._wires.remove(wire)
        for row in np.flatnonzero(self._rows["wire"] == wire.address).tolist():
            self._hardware.write(self._rows[row : row + 1].ctypes.data, *[0] * (MAC_ROW.size // 8))

    def _announce(self, wires: list[Pipes], taken: int) -> None:
        """Announce to the NICs at the other ends whether this NIC accepts frames."""
        for wire in wires:
            self._hardware.write(wire.takes_frames, taken)
