"""The parts of the engine that a process loads with the first object that needs them."""

from __future__ import annotations

from ...jit.extension import Extension

ETHERNET_QUEUES = Extension("the NIC's Ethernet queues")
ETHERNET_WIRES = Extension("the NIC's Ethernet wires")
ALL = (ETHERNET_QUEUES, ETHERNET_WIRES)
