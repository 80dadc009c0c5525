"""A kernel that builds WQEs from a table, in a separate file to be compiled seldom."""

from gpunetio import device, kernel
from gpunetio.formats.layout import Entry
from gpunetio.jit.struct_view import struct_view

BUILD = Entry("build", 128, """
    what        0  i64
    index       8  i64
    at         16  i64
    flags      24  i64
    opcode     32  i64
    imm        40  i64
    raddr      48  i64
    rkey       56  i64
    laddr      64  i64
    lkey       72  i64
    nbytes     80  i64
    laddr1     88  i64
    lkey1      96  i64
    nbytes1   104  i64
    first     112  i64
    second    120  i64
""")
build_at = struct_view(BUILD)

NAMES = (
    "nop", "write", "write2", "write_value", "write_inline", "read", "read2", "send", "atomic", "masked_add",
    "masked_swap32", "masked_swap64", "wait", "dump",
)
(
    NOP, WRITE, WRITE2, WRITE_VALUE, WRITE_INLINE, READ, READ2, SEND, ATOMIC, MASKED_ADD,
    MASKED_SWAP32, MASKED_SWAP64, WAIT, DUMP,
) = range(len(NAMES))


@kernel
def build(qp, table, count, execute, out):
    """Build `count` WQEs, at the indices that the table says or, to `execute` them one by one, at the next ones.

    The results are what the builders return, or how the WQEs have ended.
    """
    for i in range(count):
        b = build_at(table + i * BUILD.size)
        index, slots = b.index, 2 if b.what == MASKED_SWAP64 else 1
        if execute:
            index = device.reserve(qp, slots)
        result = 0
        if b.what == NOP:
            device.prepare_nop(qp, index, b.flags, b.at)
        elif b.what == WRITE:
            device.prepare_write(
                qp, index, b.raddr, b.rkey, b.laddr, b.lkey, b.nbytes, b.flags, b.opcode, b.imm, b.at
            )
        elif b.what == WRITE2:
            device.prepare_write2(
                qp, index, b.raddr, b.rkey, b.laddr, b.lkey, b.nbytes, b.laddr1, b.lkey1, b.nbytes1, b.flags, b.opcode,
                b.imm, b.at,
            )
        elif b.what == WRITE_VALUE:
            device.prepare_write_value(qp, index, b.raddr, b.rkey, b.first, b.nbytes, b.flags, b.at)
        elif b.what == WRITE_INLINE:
            result = device.prepare_write_inline(qp, index, b.raddr, b.rkey, b.laddr, b.nbytes, b.flags, b.at)
        elif b.what == READ:
            device.prepare_read(qp, index, b.raddr, b.rkey, b.laddr, b.lkey, b.nbytes, b.flags, b.at)
        elif b.what == READ2:
            device.prepare_read2(
                qp, index, b.raddr, b.rkey, b.laddr, b.lkey, b.nbytes, b.laddr1, b.lkey1, b.nbytes1, b.flags, b.at
            )
        elif b.what == SEND:
            device.prepare_send(qp, index, b.laddr, b.lkey, b.nbytes, b.flags, b.opcode, b.imm, b.at)
        elif b.what == ATOMIC:
            device.prepare_atomic(
                qp, index, b.opcode, b.raddr, b.rkey, b.laddr, b.lkey, b.first, b.second, b.flags, b.at
            )
        elif b.what == MASKED_ADD:
            result = device.prepare_masked_add(
                qp, index, b.nbytes, b.raddr, b.rkey, b.laddr, b.lkey, b.first, b.second, b.flags, b.at
            )
        elif b.what == MASKED_SWAP32:
            device.prepare_masked_swap32(
                qp, index, b.raddr, b.rkey, b.laddr, b.lkey, b.first, b.second, b.laddr1, b.lkey1, b.flags, b.at
            )
        elif b.what == MASKED_SWAP64:
            device.prepare_masked_swap64(
                qp, index, b.raddr, b.rkey, b.laddr, b.lkey, b.first, b.second, b.laddr1, b.lkey1, b.flags
            )
        elif b.what == WAIT:
            device.prepare_wait(qp, index, b.first, b.second, b.flags, b.at)
        else:
            device.prepare_dump(qp, index, b.laddr, b.lkey, b.nbytes, b.flags, b.at)
        if execute:
            device.post(qp, index, index + slots - 1)
            result = device.wait(qp, index)
        device.st64(out + 8 * i, result)
