"""The fault injector simulates a bad network: outgoing frames get the requested faults, drawn by a seeded generator.

The injector stands between a pipe that the NIC fills and the wire's pipe. As on a real wire, corruption happens after
the ICRC is computed. So while faults are injected, packets in pipes also have an ICRC, and their reader checks it.
"""

from __future__ import annotations


import numpy as np

from ..jit.compile import device_function, engine_function
from ..jit.ops import copy, ld8, st8, st32
from ..jit.struct_view import View, struct_view
from ..formats.layout import Entry
from ..memory import HostMemory
from .faults import Faults
from .frames import (
    PACKET, RECALLED, commit, consume, frame_at, leads_to, next_frame, pipe_end, pipe_size, publish, recall, release,
    reserve,
)
from .icrc import icrc
from ..jit.struct_view import Struct

CERTAIN = 1 << 32  # probabilities are in units of 2^-32
HELD_BACK = 64  # frames on hold at most; further ones go out at once
SLOT = 4608  # a frame of the largest MTU, with all headers
HOLD_LIMIT_NS = 1_000_000  # a reordered frame goes out by then, even if no frame follows it

FAULTS = Entry("faults", 384, """
    loss           0  i64
    duplication    8  i64
    reordering    16  i64
    corruption    24  i64
    delay_ns      32  i64
    state         40  i64
    lost          48  i64
    duplicated    56  i64
    reordered     64  i64
    corrupted     72  i64
    passed        80  i64
    held          88  i64
    here_high     96  i64
    here_low     104  i64
    peer_high    112  i64
    peer_low     120  i64
    slots        128  i64
    make_icrc    136  i64
    sequence     144  i64
    scratch      192  raw[64]
    to_injector  256  raw[64]
    to_wire      320  raw[64]
""")

# A frame held back: until `due`, or until `after` more frames have passed. Of frames that are due at the same time, the
# one with the lowest `sequence` goes first.
HELD = Entry("held", 64, """
    due            0  i64
    after          8  i64
    nbytes        16  i64
    corrupt       24  i64
    sequence      32  i64
""")

faults_at: View = struct_view(FAULTS)
held_at: View = struct_view(HELD)


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
def _draw(f: Struct) -> int:
    """Return 32 random bits (xorshift64, Marsaglia 2003)."""
    x = f.state
    x ^= x << 13
    x ^= (x >> 7) & ((1 << 57) - 1)
    x ^= x << 17
    f.state = x
    return (x >> 31) & (CERTAIN - 1)


@device_function
def _happens(f: Struct, probability: int) -> bool:
    return _draw(f) < probability


@engine_function
def _pass_on(faults: int, packet: int, nbytes: int, header: int, corrupt: int) -> int:
    """Put a packet on the wire. Return 1, or 0 if the wire is full. The addresses are those of the frame `header`."""
    f = faults_at(faults)
    frame = reserve(faults + FAULTS.to_wire, nbytes)
    if frame == 0:
        return 0
    g = frame_at(frame)
    h = frame_at(header)
    g.nbytes, g.peer_high, g.peer_low, g.source, g.corrupt = nbytes, h.peer_high, h.peer_low, h.source, corrupt
    g.life, g.reference = h.life, h.reference
    if corrupt:
        f.corrupted += 1
    copy(frame + PACKET, packet, nbytes)
    if f.make_icrc:
        g.icrc = 1
        g.corrupt = 0
        check = icrc(
            faults + FAULTS.scratch, packet, nbytes, 6, f.here_high, f.here_low, f.peer_high, f.peer_low, 0, 0
        )
        st32(frame + PACKET + nbytes, check)
        if corrupt:
            at = frame + PACKET + ((corrupt - 1) >> 3)
            st8(at, ld8(at) ^ 1 << ((corrupt - 1) & 7))
    commit(faults + FAULTS.to_wire)
    f.passed += 1
    return 1


@device_function
def _slot(f: Struct, i: int) -> int:
    return f.slots + i * (HELD.size + SLOT)


@engine_function
def _hold(faults: int, frame: int, due: int, after: int, corrupt: int) -> int:
    """Keep a copy of the frame. Return 1, or 0 if there is no room."""
    f = faults_at(faults)
    nbytes = frame_at(frame).nbytes
    if PACKET + nbytes > SLOT:
        return 0
    for i in range(HELD_BACK):
        slot = _slot(f, i)
        h = held_at(slot)
        if h.due == 0:
            h.due, h.after, h.nbytes, h.corrupt, h.sequence = due, after, nbytes, corrupt, f.sequence
            f.sequence += 1
            copy(slot + HELD.size, frame, PACKET + nbytes)
            f.held += 1
            return 1
    return 0


@device_function
def _oldest(f: Struct) -> int:
    """Return the held frame that is due first, or 0."""
    best = 0
    for i in range(HELD_BACK):
        slot = _slot(f, i)
        h = held_at(slot)
        if h.due == 0:
            continue
        b = held_at(best if best != 0 else slot)
        if best == 0 or h.due < b.due or (h.due == b.due and h.sequence < b.sequence):
            best = slot
    return best


@engine_function
def _let_go(faults: int, now: int, passed: int) -> None:
    """Send the held frames that are due, the earliest first. `passed` more frames have gone by."""
    f = faults_at(faults)
    for i in range(HELD_BACK if passed else 0):
        h = held_at(_slot(f, i))
        h.after -= passed
        if h.due != 0 and h.after < 0:
            h.due = 1
    while f.held:
        slot = _oldest(f)
        h = held_at(slot)
        kept = slot + HELD.size
        if h.due > now or _pass_on(faults, kept + PACKET, h.nbytes, kept, h.corrupt) == 0:
            break
        h.due = 0
        f.held -= 1


@device_function
def _damage(draw: int, nbytes: int) -> int:
    """Return 1 + the bit to flip. Byte 4 of a BTH, where routers leave marks, is spared: no ICRC protects it."""
    bit = draw % (8 * nbytes)
    return 1 + (bit if bit >> 3 != 4 else bit + 8)


@engine_function
def inject(faults: int, now: int) -> int:
    """Pass on what the NIC has sent since the last call, with faults. Return how many frames were processed."""
    f = faults_at(faults)
    end = faults + FAULTS.to_injector
    done = 0
    while True:
        frame = next_frame(end)
        if frame <= 0:
            break
        nbytes = frame_at(frame).nbytes
        if nbytes == RECALLED:
            consume(end)
            done += 1
            continue
        if reserve(faults + FAULTS.to_wire, nbytes) == 0 or (f.delay_ns != 0 and f.held == HELD_BACK):
            break
        corrupt = 0
        if _happens(f, f.corruption):
            corrupt = _damage(_draw(f), nbytes)
        if _happens(f, f.loss):
            f.lost += 1
        elif _happens(f, f.reordering) and _hold(
            faults, frame, now + f.delay_ns + HOLD_LIMIT_NS, 1 + (_draw(f) & 7), corrupt
        ):
            f.reordered += 1
        elif f.delay_ns == 0 or _hold(faults, frame, now + f.delay_ns, CERTAIN, corrupt) == 0:
            _pass_on(faults, frame + PACKET, nbytes, frame, corrupt)
        if _happens(f, f.duplication) and (
            _hold(faults, frame, now + f.delay_ns, CERTAIN, 0) if f.delay_ns
            else _pass_on(faults, frame + PACKET, nbytes, frame, 0)
        ):
            f.duplicated += 1
        consume(end)
        done += 1
        if f.held:
            _let_go(faults, now, 1)
    if done:
        release(end)
    if f.held:
        _let_go(faults, now, 0)
    publish(faults + FAULTS.to_wire)
    return done


@engine_function
def recall_injected(faults: int, headers: int, qpn: int, peer_high: int, peer_low: int) -> None:
    """Recall the frames to a QP that have not left the injector. `headers` as in `leads_to`."""
    f = faults_at(faults)
    recall(faults + FAULTS.to_injector, headers, qpn, peer_high, peer_low)
    for i in range(HELD_BACK):
        slot = _slot(f, i)
        h = held_at(slot)
        if h.due != 0 and leads_to(slot + HELD.size, headers, qpn, peer_high, peer_low):
            h.due = 0
            f.held -= 1


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
