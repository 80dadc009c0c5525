"""The ways of packets through several flow tables, remembered for the packets behind them in their flow.

A way is true of all packets with the same words. What it has counted, it counts again. A flow makes room for others
with the same place when they are seen more often. Where there are so many flows that few packets find their way, none
looks for a while.
"""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import ld64, st64
from ..state.flow import FLOW_WAY, LOG_WAYS, WAY_COUNTERS, WORDS, FlowCounter, FlowWay, Packet
from ..state.worker import WorkerState
from .parse import DESTINATION, PROTOCOL, SOURCE, UDP_PORTS

# A way that is known saves three times what it costs to look in vain. If _LUCK packets too many have looked in vain,
# _REST packets do not look.
_GAIN, _LUCK, _REST = 3, 256, 4096
_PATIENCE = 8  # packets of other flows, after which one that has a place makes room
# Odd numbers of arbitrary bits. The upper bits of the products depend on all bits of the words.
_FACTORS = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D, 0x6A5D39EAE116586D, 0x369DEA0F31A53F85


@device_function
def way_of(worker: WorkerState, packet: int) -> int:
    """Return the address of the FLOW_WAY in which the way of a packet is remembered, if at all.

    Its place is chosen by addresses, protocol and ports: flows that differ in nothing else have one place.
    """
    mixed = (
        ld64(packet + SOURCE + 8) * _FACTORS[0] ^ ld64(packet + DESTINATION + 8) * _FACTORS[1]
        ^ ld64(packet + PROTOCOL) * _FACTORS[2] ^ ld64(packet + (UDP_PORTS & -8)) * _FACTORS[3]
    )
    return worker.ways + (mixed >> 64 - LOG_WAYS & (1 << LOG_WAYS) - 1) * FLOW_WAY.size


@device_function
def _stamp(worker: WorkerState) -> int:
    return worker.command_done + 1


@device_function
def is_worth_a_look(worker: WorkerState) -> bool:
    """Return whether packets have found their ways lately, or did not try."""
    if worker.luck >= 0:
        return True
    worker.luck = worker.luck + 1 if worker.luck < -1 else _LUCK
    return False


@device_function
def is_known(worker: WorkerState, way: FlowWay, packet: Packet) -> bool:
    """Return whether a FLOW_WAY is the way of a packet."""
    differs = way.stamp - _stamp(worker) | way.l4 - packet.l4
    for i in range(0, 8 * WORDS, 8):
        differs |= ld64(way + FLOW_WAY.words + i) ^ ld64(packet + i)
    return differs == 0


@engine_function
def go(worker: WorkerState, way: FlowWay, packet: Packet, nbytes: int) -> int:
    """Take a packet of `nbytes` along a way that is known. Return its Fate."""
    for i in range(way.counted):
        counter = FlowCounter(ld64(way + FLOW_WAY.counters + 8 * i))
        counter.packets += 1
        counter.octets += nbytes
    packet.tir, packet.hash, packet.tag = way.tir, way.hash, way.tag
    way.missed = 0
    worker.luck = min(worker.luck + _GAIN, _LUCK)
    return way.fate


@device_function
def begin(worker: WorkerState, way: FlowWay) -> bool:
    """Begin a way in this place, and return whether another one does not need it any more."""
    way.missed += 1
    if way.stamp == _stamp(worker):
        worker.luck = worker.luck - 1 if worker.luck > 0 else -_REST
        if way.missed < _PATIENCE:
            return False
    way.stamp, way.counted, way.missed = 0, 0, 0
    return True


@device_function
def note(way: FlowWay, counter: int) -> None:
    """Note a FLOW_COUNTER that is on the way."""
    if way.counted < WAY_COUNTERS:
        st64(way + FLOW_WAY.counters + 8 * way.counted, counter)
    way.counted += 1


@engine_function
def end(worker: WorkerState, way: FlowWay, packet: Packet, fate: int) -> None:
    """Remember the way of a packet, unless it has too many counters."""
    if way.counted > WAY_COUNTERS:
        return
    for i in range(0, 8 * WORDS, 8):
        st64(way + FLOW_WAY.words + i, ld64(packet + i))
    way.l4, way.fate, way.tir, way.hash, way.tag = packet.l4, fate, packet.tir, packet.hash, packet.tag
    way.stamp = _stamp(worker)
