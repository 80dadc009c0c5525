"""Masked atomics, which mlx5 calls extended: what they do to a word, and the header in which a packet carries one.

The word has 4 or 8 bytes. Operands are numbers in host byte order.
"""

from __future__ import annotations

from ...formats.packet import MASKED_ATOMIC_ETH
from ...formats.wqe import WqeOpcode
from ...jit.compile import device_function, engine_function
from ...jit.ops import be32, cas_acq_rel_gpu32, cas_acq_rel_gpu64, ld32, ld_acquire32, ld_acquire64, st32
from ..state.message import Message
from .packets import get_be64, put_be64


@device_function
def _add_fields(word: int, addend: int, boundary: int) -> int:
    """Return the sum without carries between fields. `boundary` has the top bit of each field set.

    The addition leaves out the top bits, so they take the carries from below. XOR then adds them without a carry.
    """
    return (word & ~boundary) + (addend & ~boundary) ^ ((word ^ addend) & boundary)


@engine_function
def masked_atomic(
    opcode: int, address: int, nbytes: int, swap_add: int, compare: int, swap_mask: int, compare_mask: int
) -> int:
    """Execute a masked atomic: return the old word. `swap_mask` of an add says where its fields end."""
    while True:  # until no other write has changed the word in between
        old = ld_acquire32(address) if nbytes == 4 else ld_acquire64(address)
        if opcode == WqeOpcode.ATOMIC_MASKED_FA:
            new = _add_fields(old, swap_add, swap_mask)
        elif (old ^ compare) & compare_mask != 0:
            return old
        else:
            new = old & ~swap_mask | swap_add & swap_mask
        found = cas_acq_rel_gpu32(address, old, new) if nbytes == 4 else cas_acq_rel_gpu64(address, old, new)
        if found == old:
            return old


@device_function
def write_header(at: int, message: Message) -> None:
    """Write the MASKED_ATOMIC_ETH of a message."""
    put_be64(at + MASKED_ATOMIC_ETH.va, message.raddr)
    st32(at + MASKED_ATOMIC_ETH.rkey, be32(message.rkey))
    st32(at + MASKED_ATOMIC_ETH.nbytes, be32(message.nbytes))
    put_be64(at + MASKED_ATOMIC_ETH.swap_add, message.swap_add)
    put_be64(at + MASKED_ATOMIC_ETH.compare, message.compare)
    put_be64(at + MASKED_ATOMIC_ETH.swap_mask, message.swap_mask)
    put_be64(at + MASKED_ATOMIC_ETH.compare_mask, message.compare_mask)


@device_function
def word_bytes(at: int) -> int:
    """Return the bytes of the word that a MASKED_ATOMIC_ETH names."""
    return be32(ld32(at + MASKED_ATOMIC_ETH.nbytes))


@device_function
def execute_packet(opcode: int, address: int, at: int) -> int:
    """Execute the masked atomic of the MASKED_ATOMIC_ETH at `at`: return the old word."""
    return masked_atomic(
        opcode, address, word_bytes(at),
        get_be64(at + MASKED_ATOMIC_ETH.swap_add), get_be64(at + MASKED_ATOMIC_ETH.compare),
        get_be64(at + MASKED_ATOMIC_ETH.swap_mask), get_be64(at + MASKED_ATOMIC_ETH.compare_mask),
    )
