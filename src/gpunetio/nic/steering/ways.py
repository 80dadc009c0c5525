"""The ways of packets through several flow tables, remembered for the packets behind them in their flow.

A way is true of all packets with the same words. What it has counted, it counts again. A flow makes room for others
with the same place when they are seen more often. Where there are so many flows that few packets find their way, none
looks for a while.
"""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import ld64, st64
from ..state.flow import (
    FLOW_WAY, LOG_WAYS, WAY_COUNTERS, WORDS, flow_counter_at, flow_way_at, packet_at,
)  # fmt: skip
from ..state.nic import nic_at
from ..state.worker import worker_at
from .parse import DESTINATION, PROTOCOL, SOURCE, UDP_PORTS

# A way that is known saves three times what it costs to look in vain. If _LUCK packets too many have looked in vain,
# _REST packets do not look.
_GAIN, _LUCK, _REST = 3, 256, 4096
_PATIENCE = 8  # packets of other flows, after which one that has a place makes room
# Odd numbers of arbitrary bits. The upper bits of the products depend on all bits of the words.
_FACTORS = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D, 0x6A5D39EAE116586D, 0x369DEA0F31A53F85


@device_function
def way_of(nic, packet):
    """Return the address of the FLOW_WAY in which the way of a packet is remembered, if at all.

    Its place is chosen by addresses, protocol and ports: flows that differ in nothing else have one place.
    """
    mixed = (
        ld64(packet + SOURCE + 8) * _FACTORS[0] ^ ld64(packet + DESTINATION + 8) * _FACTORS[1]
        ^ ld64(packet + PROTOCOL) * _FACTORS[2] ^ ld64(packet + (UDP_PORTS & -8)) * _FACTORS[3]
    )  # fmt: skip
    return nic_at(nic).ways + (mixed >> 64 - LOG_WAYS & (1 << LOG_WAYS) - 1) * FLOW_WAY.size


@device_function
def _stamp(nic):
    return worker_at(nic).command_done + 1


@device_function
def is_worth_a_look(nic):
    """Return whether packets have found their ways lately, or did not try."""
    n = worker_at(nic)
    if n.luck >= 0:
        return True
    n.luck = n.luck + 1 if n.luck < -1 else _LUCK
    return False


@device_function
def is_known(nic, way, packet):
    """Return whether a FLOW_WAY is the way of a packet."""
    w = flow_way_at(way)
    differs = w.stamp - _stamp(nic) | w.l4 - packet_at(packet).l4
    for i in range(0, 8 * WORDS, 8):
        differs |= ld64(way + FLOW_WAY.words + i) ^ ld64(packet + i)
    return differs == 0


@engine_function
def go(nic, way, packet, nbytes):
    """Take a packet of `nbytes` along a way that is known. Return its Fate."""
    n, w, p = worker_at(nic), flow_way_at(way), packet_at(packet)
    for i in range(w.counted):
        c = flow_counter_at(ld64(way + FLOW_WAY.counters + 8 * i))
        c.packets += 1
        c.octets += nbytes
    p.tir, p.hash, p.tag = w.tir, w.hash, w.tag
    w.missed = 0
    n.luck = min(n.luck + _GAIN, _LUCK)
    return w.fate


@device_function
def begin(nic, way):
    """Begin a way in this place, and return whether another one does not need it any more."""
    n, w = worker_at(nic), flow_way_at(way)
    w.missed += 1
    if w.stamp == _stamp(nic):
        n.luck = n.luck - 1 if n.luck > 0 else -_REST
        if w.missed < _PATIENCE:
            return False
    w.stamp, w.counted, w.missed = 0, 0, 0
    return True


@device_function
def note(way, counter):
    """Note a FLOW_COUNTER that is on the way."""
    w = flow_way_at(way)
    if w.counted < WAY_COUNTERS:
        st64(way + FLOW_WAY.counters + 8 * w.counted, counter)
    w.counted += 1


@engine_function
def end(nic, way, packet, fate):
    """Remember the way of a packet, unless it has too many counters."""
    w, p = flow_way_at(way), packet_at(packet)
    if w.counted > WAY_COUNTERS:
        return
    for i in range(0, 8 * WORDS, 8):
        st64(way + FLOW_WAY.words + i, ld64(packet + i))
    w.l4, w.fate, w.tir, w.hash, w.tag, w.stamp = p.l4, fate, p.tir, p.hash, p.tag, _stamp(nic)
