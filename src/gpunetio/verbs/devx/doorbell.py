"""Doorbells and completions of the CPU data path, with loads and stores in the order that the device needs.

This module is compiled: Python has neither ordered stores nor single 64-bit stores.
"""

from __future__ import annotations

from ...formats.cqe import CQE64, OPCODE_SHIFT, OWNER_MASK, CqeOpcode
from ...formats.doorbell import WQE_IDX_SHIFT
from ...jit.compile import engine_function
from ...jit.ops import (
    be32,
    be64,
    drain_stores,
    fence_acquire_sys,
    ld_relaxed8,
    st_mmio64,
    st_release32,
    yield_thread,
)


@engine_function
def ring_register(register, producer, qpn):
    """Ring only the register. The producer index and QPN are encoded as in the first words of a control segment."""
    drain_stores()
    st_mmio64(register, be64(producer << 32 + WQE_IDX_SHIFT | qpn << 8))
    drain_stores()


@engine_function
def ring_send(record, producer, register, qpn):
    """Write the doorbell record, then ring the register."""
    st_release32(record, be32(producer))
    ring_register(register, producer, qpn)


@engine_function
def ring_receive(record, producer):
    """Write the doorbell record. A receive queue has no register."""
    st_release32(record, be32(producer))


@engine_function
def ring_arm(record, word, register, cqn):
    """Request an event: write the arm word of the doorbell record, then the register (see formats/doorbell.py)."""
    st_release32(record, be32(word))
    drain_stores()
    st_mmio64(register, be64(word << 32 | cqn))
    drain_stores()


@engine_function
def arrived(first, shift, log_entries, consumer, most):
    """Return how many CQEs have arrived from index `consumer` on, at most `most`. `first` is the address of CQE 0.

    If none has arrived, the thread yields: an engine thread that was just woken may be waiting for this core.
    """
    count = 0
    while count < most:
        index = consumer + count
        op_own = ld_relaxed8(first + ((index & ((1 << log_entries) - 1)) << shift) + CQE64.op_own)
        if op_own >> OPCODE_SHIFT == CqeOpcode.INVALID or op_own & OWNER_MASK != (index >> log_entries) & 1:
            break
        count += 1
    if count == 0:
        yield_thread()
    fence_acquire_sys()
    return count
