"""One kernel for all calls of the RDMA library: each thread makes the calls in a table."""

from gpunetio import device, kernel
from gpunetio.formats.layout import Entry
from gpunetio.jit.struct_view import struct_view

CALL = Entry("rdma_call", 88, """
    what             0  i64
    conn             8  i64
    rbuf            16  i64
    roff            24  i64
    lbuf            32  i64
    loff            40  i64
    nbytes          48  i64
    value           56  i64
    imm             64  i64
    flags           72  i64
    position        80  i64
""")
call_at = struct_view(CALL)

NAMES = (
    "write_strong", "write_weak", "inline_strong", "inline_weak", "value_strong", "value_weak", "read_strong",
    "read_weak", "send_strong", "send_weak", "commit_strong", "commit_weak", "wait_all", "position", "mask",
    "recv_strong", "recv_weak", "recv_commit_strong", "recv_commit_weak", "recv_wait_all", "recv_position",
    "store", "await", "barrier", "skip", "value_strong_until",
)
(
    WRITE_STRONG, WRITE_WEAK, INLINE_STRONG, INLINE_WEAK, VALUE_STRONG, VALUE_WEAK, READ_STRONG,
    READ_WEAK, SEND_STRONG, SEND_WEAK, COMMIT_STRONG, COMMIT_WEAK, WAIT_ALL, POSITION, MASK,
    RECV_STRONG, RECV_WEAK, RECV_COMMIT_STRONG, RECV_COMMIT_WEAK, RECV_WAIT_ALL, RECV_POSITION,
    STORE, AWAIT, BARRIER, SKIP, VALUE_STRONG_UNTIL,
) = range(len(NAMES))


@kernel
def run_rdma_calls(rdma, calls, count, out):
    """Each thread makes `count` calls, one after another. Call i of thread t is in row i · threads + t of both."""
    me, threads = device.global_id(), device.grid_dim() * device.block_dim()
    for i in range(count):
        row = i * threads + me
        c = call_at(calls + row * CALL.size)
        what, conn, rbuf, roff, lbuf, loff = c.what, c.conn, c.rbuf, c.roff, c.lbuf, c.loff
        nbytes, value, imm, flags, position = c.nbytes, c.value, c.imm, c.flags, c.position
        result = 0
        if what == WRITE_STRONG:
            result = device.rdma_write_strong(rdma, conn, rbuf, roff, lbuf, loff, nbytes, imm, flags)
        elif what == WRITE_WEAK:
            result = device.rdma_write_weak(rdma, conn, rbuf, roff, lbuf, loff, nbytes, imm, flags, position)
        elif what == INLINE_STRONG:
            result = device.rdma_write_inline_strong(rdma, conn, rbuf, roff, value, nbytes, imm, flags)
        elif what == INLINE_WEAK:
            result = device.rdma_write_inline_weak(rdma, conn, rbuf, roff, value, nbytes, imm, flags, position)
        elif what == VALUE_STRONG:
            result = device.rdma_write_value_strong(rdma, conn, rbuf, roff, value, nbytes, imm, flags)
        elif what == VALUE_STRONG_UNTIL:
            result = device.EBUSY
            while result in (device.EBUSY, device.ENOBUFS):
                result = device.rdma_write_value_strong(rdma, conn, rbuf, roff, value, nbytes, imm, flags)
                if result != device.OK:
                    device.nap(100)
        elif what == VALUE_WEAK:
            result = device.rdma_write_value_weak(rdma, conn, rbuf, roff, value, nbytes, imm, flags, position)
        elif what == READ_STRONG:
            result = device.rdma_read_strong(rdma, conn, rbuf, roff, lbuf, loff, nbytes)
        elif what == READ_WEAK:
            result = device.rdma_read_weak(rdma, conn, rbuf, roff, lbuf, loff, nbytes, position)
        elif what == SEND_STRONG:
            result = device.rdma_send_strong(rdma, conn, lbuf, loff, nbytes, imm, flags)
        elif what == SEND_WEAK:
            result = device.rdma_send_weak(rdma, conn, lbuf, loff, nbytes, imm, flags, position)
        elif what == COMMIT_STRONG:
            result = device.rdma_commit_strong(rdma, conn)
        elif what == COMMIT_WEAK:
            result = device.rdma_commit_weak(rdma, conn, nbytes)
        elif what == WAIT_ALL:
            result = device.rdma_wait_all(rdma)
        elif what == POSITION:
            result, _ = device.rdma_get_info(rdma, conn)
        elif what == MASK:
            _, result = device.rdma_get_info(rdma, conn)
        elif what == RECV_STRONG:
            result = device.rdma_recv_strong(device.rdma_get_recv(rdma), lbuf, nbytes, loff)
        elif what == RECV_WEAK:
            result = device.rdma_recv_weak(device.rdma_get_recv(rdma), lbuf, nbytes, loff, position)
        elif what == RECV_COMMIT_STRONG:
            result = device.rdma_recv_commit_strong(device.rdma_get_recv(rdma))
        elif what == RECV_COMMIT_WEAK:
            result = device.rdma_recv_commit_weak(device.rdma_get_recv(rdma), nbytes)
        elif what == RECV_WAIT_ALL:
            result = device.rdma_recv_wait_all(device.rdma_get_recv(rdma), value, imm, flags)
        elif what == RECV_POSITION:
            result, _ = device.rdma_recv_get_info(device.rdma_get_recv(rdma))
        elif what == STORE:
            device.st_release64(position, value)
        elif what == AWAIT:
            while device.ld_acquire64(position) < value:
                device.nap(100)
        elif what == BARRIER:
            device.block_sync()
        device.st64(out + 8 * row, result)
