"""The fault injector simulates a bad network: outgoing frames get the requested faults, drawn by a seeded generator.

The injector stands between a pipe that the NIC fills and the wire's pipe. As on a real wire, corruption happens after
the ICRC is computed. So while faults are injected, packets in pipes also have an ICRC, and their reader checks it.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from ..formats.layout import I64, Record
from ..jit.compile import device_function, engine_function
from ..jit.ops import copy, ld8, st32, st8
from ..memory import HostMemory
from .faults import Faults
from .frames import (
    PACKET, RECALLED, Frame, PipeEnd, commit, consume, leads_to, next_frame, pipe_end, pipe_size, publish, recall,
    release, reserve,
)
from .icrc import icrc

CERTAIN = 1 << 32  # probabilities are in units of 2^-32
HELD_BACK = 64  # frames on hold at most; further ones go out at once
SLOT = 4608  # a frame of the largest MTU, with all headers
HOLD_LIMIT_NS = 1_000_000  # a reordered frame goes out by then, even if no frame follows it


class FaultInjector(Record, size=384):
    """The fault injector of a wire."""

    loss: I64 = 0
    duplication: I64 = 8
    reordering: I64 = 16
    corruption: I64 = 24
    delay_ns: I64 = 32
    state: I64 = 40
    lost: I64 = 48
    duplicated: I64 = 56
    reordered: I64 = 64
    corrupted: I64 = 72
    passed: I64 = 80
    held: I64 = 88
    here_high: I64 = 96
    here_low: I64 = 104
    peer_high: I64 = 112
    peer_low: I64 = 120
    slots: I64 = 128
    make_icrc: I64 = 136
    sequence: I64 = 144
    scratch: Annotated[int, "raw[64]"] = 192
    to_injector: Annotated[int, "raw[64]"] = 256
    to_wire: Annotated[int, "raw[64]"] = 320


FAULTS = FaultInjector.entry


class HeldFrame(Record, size=64):
    """A frame that the fault injector holds back.

    A frame held back: until `due`, or until `after` more frames have passed. Of frames that are due at the same time,
    the one with the lowest `sequence` goes first.
    """

    due: I64 = 0
    after: I64 = 8
    nbytes: I64 = 16
    corrupt: I64 = 24
    sequence: I64 = 32


HELD = HeldFrame.entry


class Injector:
    """The memory of an injector, which fills the wire's producer end `wire_end`.

    `record` counts the injected faults. `from_nic` is the end that the NIC fills instead of `wire_end`. With
    `make_icrc`, the injector computes the ICRC, because the wire does not.
    """

    CAPACITY = 1 << 19
    address: int
    record: np.void
    from_nic: np.ndarray

    def __init__(self, faults: Faults, wire_end: np.ndarray, here: bytes, peer: bytes, make_icrc: bool):
        slots = HELD_BACK * (HELD.size + SLOT)
        self._memory = HostMemory(FAULTS.size + slots + pipe_size(self.CAPACITY))
        self.address = self._memory.address
        self.record = self._memory.view(FAULTS.dtype)[0]
        r = self.record
        for name in ("loss", "duplication", "reordering", "corruption"):
            r[name] = int(getattr(faults, name) * CERTAIN)
        r["delay_ns"] = int(faults.delay_us * 1000)
        r["state"] = (faults.seed * 0x9E3779B97F4A7C15 + 1) % (1 << 63) | 1
        r["here_high"], r["here_low"] = np.frombuffer(here, np.int64)
        r["peer_high"], r["peer_low"] = np.frombuffer(peer, np.int64)
        r["slots"], r["make_icrc"] = self.address + FAULTS.size, make_icrc
        pipe = self.address + FAULTS.size + slots
        self.from_nic = pipe_end(pipe, self.CAPACITY)
        r["to_injector"], r["to_wire"] = np.void(self.from_nic.tobytes()), np.void(wire_end.tobytes())

    def close(self) -> None:
        """Release the memory. The NIC must not use it any more."""
        self._memory.close()


@device_function
def _draw(faults: FaultInjector) -> int:
    """Return 32 random bits (xorshift64, Marsaglia 2003)."""
    x = faults.state
    x ^= x << 13
    x ^= (x >> 7) & ((1 << 57) - 1)
    x ^= x << 17
    faults.state = x
    return (x >> 31) & (CERTAIN - 1)


@device_function
def _happens(faults: FaultInjector, probability: int) -> bool:
    return _draw(faults) < probability


@engine_function
def _pass_on(faults: FaultInjector, packet: int, nbytes: int, h: Frame, corrupt: int) -> int:
    """Put a packet on the wire. Return 1, or 0 if the wire is full. The addresses are those of the frame `h`."""
    frame = Frame(reserve(PipeEnd(faults + FAULTS.to_wire), nbytes))
    if frame == 0:
        return 0
    frame.nbytes, frame.peer_high, frame.peer_low = nbytes, h.peer_high, h.peer_low
    frame.source, frame.corrupt = h.source, corrupt
    frame.life, frame.reference = h.life, h.reference
    if corrupt:
        faults.corrupted += 1
    copy(frame + PACKET, packet, nbytes)
    if faults.make_icrc:
        frame.icrc = 1
        frame.corrupt = 0
        check = icrc(
            faults + FAULTS.scratch, packet, nbytes, 6, faults.here_high, faults.here_low,
            faults.peer_high, faults.peer_low, 0, 0,
        )
        st32(frame + PACKET + nbytes, check)
        if corrupt:
            at = frame + PACKET + ((corrupt - 1) >> 3)
            st8(at, ld8(at) ^ 1 << ((corrupt - 1) & 7))
    commit(PipeEnd(faults + FAULTS.to_wire))
    faults.passed += 1
    return 1


@device_function
def _slot(faults: FaultInjector, i: int) -> int:
    return faults.slots + i * (HELD.size + SLOT)


@engine_function
def _hold(faults: FaultInjector, frame: Frame, due: int, after: int, corrupt: int) -> int:
    """Keep a copy of the frame. Return 1, or 0 if there is no room."""
    nbytes = frame.nbytes
    if PACKET + nbytes > SLOT:
        return 0
    for i in range(HELD_BACK):
        slot = HeldFrame(_slot(faults, i))
        if slot.due == 0:
            slot.due, slot.after, slot.nbytes = due, after, nbytes
            slot.corrupt, slot.sequence = corrupt, faults.sequence
            faults.sequence += 1
            copy(slot + HELD.size, frame, PACKET + nbytes)
            faults.held += 1
            return 1
    return 0


@device_function
def _oldest(faults: FaultInjector) -> int:
    """Return the held frame that is due first, or 0."""
    best = 0
    for i in range(HELD_BACK):
        slot = _slot(faults, i)
        held = HeldFrame(slot)
        if held.due == 0:
            continue
        b = HeldFrame(best if best != 0 else slot)
        if best == 0 or held.due < b.due or (held.due == b.due and held.sequence < b.sequence):
            best = slot
    return best


@engine_function
def _let_go(faults: FaultInjector, now: int, passed: int) -> None:
    """Send the held frames that are due, the earliest first. `passed` more frames have gone by."""
    for i in range(HELD_BACK if passed else 0):
        h = HeldFrame(_slot(faults, i))
        h.after -= passed
        if h.due != 0 and h.after < 0:
            h.due = 1
    while faults.held:
        slot = HeldFrame(_oldest(faults))
        h = slot
        kept = Frame(slot + HELD.size)
        if h.due > now or _pass_on(faults, kept + PACKET, h.nbytes, kept, h.corrupt) == 0:
            break
        h.due = 0
        faults.held -= 1


@device_function
def _damage(draw: int, nbytes: int) -> int:
    """Return 1 + the bit to flip. Byte 4 of a BTH, where routers leave marks, is spared: no ICRC protects it."""
    bit = draw % (8 * nbytes)
    return 1 + (bit if bit >> 3 != 4 else bit + 8)


@engine_function
def inject(faults: FaultInjector, now: int) -> int:
    """Pass on what the NIC has sent since the last call, with faults. Return how many frames were processed."""
    end = PipeEnd(faults + FAULTS.to_injector)
    done = 0
    while True:
        frame = Frame(next_frame(end))
        if frame <= 0:
            break
        nbytes = frame.nbytes
        if nbytes == RECALLED:
            consume(end)
            done += 1
            continue
        is_full = faults.delay_ns != 0 and faults.held == HELD_BACK
        if reserve(PipeEnd(faults + FAULTS.to_wire), nbytes) == 0 or is_full:
            break
        corrupt = 0
        if _happens(faults, faults.corruption):
            corrupt = _damage(_draw(faults), nbytes)
        if _happens(faults, faults.loss):
            faults.lost += 1
        elif _happens(faults, faults.reordering) and _hold(
            faults, frame, now + faults.delay_ns + HOLD_LIMIT_NS, 1 + (_draw(faults) & 7), corrupt
        ):
            faults.reordered += 1
        elif faults.delay_ns == 0 or _hold(faults, frame, now + faults.delay_ns, CERTAIN, corrupt) == 0:
            _pass_on(faults, frame + PACKET, nbytes, frame, corrupt)
        if _happens(faults, faults.duplication) and (
            _hold(faults, frame, now + faults.delay_ns, CERTAIN, 0) if faults.delay_ns
            else _pass_on(faults, frame + PACKET, nbytes, frame, 0)
        ):
            faults.duplicated += 1
        consume(end)
        done += 1
        if faults.held:
            _let_go(faults, now, 1)
    if done:
        release(end)
    if faults.held:
        _let_go(faults, now, 0)
    publish(PipeEnd(faults + FAULTS.to_wire))
    return done


@engine_function
def recall_injected(faults: FaultInjector, headers: int, qpn: int, peer_high: int, peer_low: int) -> None:
    """Recall the frames to a QP that have not left the injector. `headers` as in `leads_to`."""
    recall(PipeEnd(faults + FAULTS.to_injector), headers, qpn, peer_high, peer_low)
    for i in range(HELD_BACK):
        slot = HeldFrame(_slot(faults, i))
        if slot.due != 0 and leads_to(Frame(slot + HELD.size), headers, qpn, peer_high, peer_low):
            slot.due = 0
            faults.held -= 1


@device_function
def icrc_fits(
    scratch: int, packet: int, nbytes: int, peer_high: int, peer_low: int, here_high: int, here_low: int
) -> bool:
    """Return whether a packet that came through an injector carries the ICRC of its bytes."""
    wanted = icrc(scratch, packet, nbytes, 6, peer_high, peer_low, here_high, here_low, 0, 0)
    return wanted == _carried(packet, nbytes)


@device_function
def _carried(packet: int, nbytes: int) -> int:
    value = 0
    for i in range(4):
        value |= ld8(packet + nbytes + i) << 8 * i
    return value
