"""The flow cache: the path of a packet through several flow tables, cached for later packets of its flow.

A cached path applies to every packet whose words match, and replaying it updates the same counters. A flow is evicted
when packets of other flows with the same slot are seen more often. With so many flows that few packets hit the cache,
lookups are skipped for a while.
"""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import ld64, st64
from ..state.flow import (
    FLOW_CACHE_COUNTERS, FLOW_CACHE_ENTRY, LOG_FLOW_CACHE, WORDS, FlowCacheEntry, FlowCounter, Packet,
)
from ..state.worker import WorkerState
from .parse import DESTINATION, PROTOCOL, SOURCE, UDP_PORTS

# A hit saves three times the cost of a miss, so it adds _HIT_GAIN to the hit score. A miss in a slot that is in use
# subtracts 1. When the score falls below 0, the next _SKIPPED packets skip the lookup.
_HIT_GAIN, _MAX_SCORE, _SKIPPED = 3, 256, 4096
_EVICT_AFTER = 8  # misses in a slot since its flow's last hit
# Odd numbers of arbitrary bits. The upper bits of the products depend on all bits of the words.
_FACTORS = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D, 0x6A5D39EAE116586D, 0x369DEA0F31A53F85


@device_function
def slot_for(worker: WorkerState, packet: int) -> FlowCacheEntry:
    """Return the only FLOW_CACHE_ENTRY that may hold the path of a packet.

    Addresses, protocol and ports select it: flows that differ in other fields only share a slot.
    """
    mixed = (
        ld64(packet + SOURCE + 8) * _FACTORS[0] ^ ld64(packet + DESTINATION + 8) * _FACTORS[1]
        ^ ld64(packet + PROTOCOL) * _FACTORS[2] ^ ld64(packet + (UDP_PORTS & -8)) * _FACTORS[3]
    )
    number = mixed >> 64 - LOG_FLOW_CACHE & (1 << LOG_FLOW_CACHE) - 1
    return FlowCacheEntry(worker.flow_cache + number * FLOW_CACHE_ENTRY.size)


@device_function
def _stamp(worker: WorkerState) -> int:
    return worker.command_done + 1


@device_function
def may_look_up(worker: WorkerState) -> bool:
    """Return whether the packet at hand may use the flow cache. While the hit score is negative, skip the packet."""
    if worker.hit_score >= 0:
        return True
    worker.hit_score = worker.hit_score + 1 if worker.hit_score < -1 else _MAX_SCORE
    return False


@device_function
def hits(worker: WorkerState, cached: FlowCacheEntry, packet: Packet) -> bool:
    """Return whether a FLOW_CACHE_ENTRY holds the path of a packet."""
    differs = cached.stamp - _stamp(worker) | cached.l4 - packet.l4
    for i in range(0, 8 * WORDS, 8):
        differs |= ld64(cached + FLOW_CACHE_ENTRY.words + i) ^ ld64(packet + i)
    return differs == 0


@engine_function
def replay(worker: WorkerState, cached: FlowCacheEntry, packet: Packet, nbytes: int) -> int:
    """Replay a cached path for a packet of `nbytes`: count it and set its TIR, hash and tag. Return its Fate."""
    for i in range(cached.counter_count):
        counter = FlowCounter(ld64(cached + FLOW_CACHE_ENTRY.counters + 8 * i))
        counter.packets += 1
        counter.octets += nbytes
    packet.tir, packet.hash, packet.tag = cached.tir, cached.hash, cached.tag
    cached.misses = 0
    worker.hit_score = min(worker.hit_score + _HIT_GAIN, _MAX_SCORE)
    return cached.fate


@device_function
def claim(worker: WorkerState, cached: FlowCacheEntry) -> bool:
    """Count a miss, and claim the slot for the packet's path unless its present flow still uses it. Return whether."""
    cached.misses += 1
    if cached.stamp == _stamp(worker):
        worker.hit_score = worker.hit_score - 1 if worker.hit_score > 0 else -_SKIPPED
        if cached.misses < _EVICT_AFTER:
            return False
    cached.stamp, cached.counter_count, cached.misses = 0, 0, 0
    return True


@device_function
def add_counter(cached: FlowCacheEntry, counter: int) -> None:
    """Add a FLOW_COUNTER to the path that is being recorded."""
    if cached.counter_count < FLOW_CACHE_COUNTERS:
        st64(cached + FLOW_CACHE_ENTRY.counters + 8 * cached.counter_count, counter)
    cached.counter_count += 1


@engine_function
def insert(worker: WorkerState, cached: FlowCacheEntry, packet: Packet, fate: int) -> None:
    """Insert the path of a packet, unless it has too many counters."""
    if cached.counter_count > FLOW_CACHE_COUNTERS:
        return
    for i in range(0, 8 * WORDS, 8):
        st64(cached + FLOW_CACHE_ENTRY.words + i, ld64(packet + i))
    cached.l4, cached.fate, cached.tir, cached.hash, cached.tag = packet.l4, fate, packet.tir, packet.hash, packet.tag
    cached.stamp = _stamp(worker)
