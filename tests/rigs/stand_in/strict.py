"""Refuse mailboxes that a device refuses and the software NIC accepts: those with bits set that belong to no field.

The PRM reserves these bits, and a device answers BAD_PARAM when one is set. The tables of the formats define the
fields, so a field that is written without being declared cannot pass.
"""

from gpunetio.formats.commands import Opcode
from gpunetio.formats.layout import VARIABLE, BitStruct
from gpunetio.formats.mailboxes import mailboxes

SYNDROME = 0x5F00FF  # not among those of gpunetio.nic.control.syndromes


def _mask(layout: BitStruct) -> int:
    """The bits of a structure that belong to fields, its first bit being the highest."""
    bits, total = 0, 8 * layout.size
    for field in layout.fields.values():
        if field.width == VARIABLE:
            continue  # after the end of the structure
        inner = _mask(field.struct) if field.struct else (1 << field.width) - 1
        width = 8 * field.struct.size if field.struct else field.width
        bits |= inner << total - field.offset - width
    return bits


_LAYOUTS = {opcode: mailboxes(opcode).request for opcode in Opcode}
_MASKS = {opcode: _mask(layout) for opcode, layout in _LAYOUTS.items()}


def reserved_bits(mailbox: bytes) -> str | None:
    """Which bits are set that must not be, in words; None when there are none, or the opcode is unknown."""
    number = int.from_bytes(mailbox[:2], "big")
    if number not in list(Opcode):
        return None
    opcode = Opcode(number)
    layout = _LAYOUTS[opcode]
    head, tail = mailbox[: layout.size].ljust(layout.size, b"\0"), mailbox[layout.size :]
    wrong = int.from_bytes(head, "big") & ~_MASKS[opcode]
    if wrong:
        return f"{opcode.name} has reserved bits set, the first at {8 * layout.size - wrong.bit_length():#x}"
    has_tail = any(field.width == VARIABLE for field in layout.fields.values())
    if any(tail) and not has_tail:
        return f"{opcode.name} has bytes behind its {layout.size} that are not 0"
    return None
