"""One kernel for all calls of the device library: each thread makes the calls in a table.

Modes are arguments at run time here; test_cuda_compile.py tests that constants are folded. It is one function, so that
all calls are compiled together.
"""

from gpunetio import device, kernel
from gpunetio.formats.layout import Entry
from gpunetio.jit.struct_view import struct_view

# `ref` is the number of an earlier call of the same thread, whose result is the ticket. If it is -1, the ticket is in
# `ticket`.
CALL = Entry("call", 256, """
    what             0  i64
    qp               8  i64
    raddr           16  i64
    rkey            24  i64
    laddr           32  i64
    lkey            40  i64
    nbytes          48  i64
    value           56  i64
    sig_raddr       64  i64
    sig_rkey        72  i64
    sig_laddr       80  i64
    sig_lkey        88  i64
    companion       96  i64
    counter_raddr  104  i64
    counter_rkey   112  i64
    counter_laddr  120  i64
    counter_lkey   128  i64
    counter_value  136  i64
    daddr          144  i64
    dlkey          152  i64
    blocking       160  i64
    sharing        168  i64
    code_opt       176  i64
    scope          184  i64
    ref            192  i64
    ticket         200  i64
""")
call_at = struct_view(CALL)

NAMES = (
    "put", "get", "p", "signal", "put_signal", "p_signal", "mcst", "fence", "wait", "wait_all", "get_wait",
    "put_counter", "get_counter", "p_counter", "signal_counter", "put_signal_counter",
    "send", "send_imm", "recv", "recv_wait", "recv_wait_all", "recv_next", "recv_slot", "recv_bytes", "recv_imm",
    "recv_inline", "recv_poll", "poll_one", "poll", "copy", "sleep", "barrier", "skip",
)
(
    PUT, GET, P, SIGNAL, PUT_SIGNAL, P_SIGNAL, MCST, FENCE, WAIT, WAIT_ALL, GET_WAIT,
    PUT_COUNTER, GET_COUNTER, P_COUNTER, SIGNAL_COUNTER, PUT_SIGNAL_COUNTER,
    SEND, SEND_IMM, RECV, RECV_WAIT, RECV_WAIT_ALL, RECV_NEXT, RECV_SLOT, RECV_BYTES, RECV_IMM,
    RECV_INLINE, RECV_POLL, POLL_ONE, POLL, COPY, SLEEP, BARRIER, SKIP,
) = range(len(NAMES))


@kernel
def run_calls(calls, count, out):
    """Each thread makes `count` calls, one after another. Call i of thread t is in row i · threads + t of both."""
    me, threads = device.global_id(), device.grid_dim() * device.block_dim()
    for i in range(count):
        row = i * threads + me
        c = call_at(calls + row * CALL.size)
        what, qp, sharing, code_opt, scope = c.what, c.qp, c.sharing, c.code_opt, c.scope
        raddr, rkey, laddr, lkey, nbytes, value = c.raddr, c.rkey, c.laddr, c.lkey, c.nbytes, c.value
        s_raddr, s_rkey, s_laddr, s_lkey = c.sig_raddr, c.sig_rkey, c.sig_laddr, c.sig_lkey
        beside, add = c.companion, c.counter_value
        c_raddr, c_rkey, c_laddr, c_lkey = c.counter_raddr, c.counter_rkey, c.counter_laddr, c.counter_lkey
        daddr, dlkey = c.daddr, c.dlkey
        ticket = c.ticket if c.ref < 0 else device.ld64(out + 8 * (c.ref * threads + me))
        result = 0
        if what == PUT:
            result = device.put(qp, raddr, rkey, laddr, lkey, nbytes, sharing, code_opt, scope)
        elif what == GET:
            result = device.get(
                qp, raddr, rkey, laddr, lkey, nbytes, sharing, code_opt, scope, daddr, dlkey, c.blocking
            )
        elif what == P:
            result = device.p(qp, raddr, rkey, value, nbytes, sharing, code_opt, scope)
        elif what == SIGNAL:
            result = device.signal(qp, s_raddr, s_rkey, s_laddr, s_lkey, value, sharing, code_opt, scope)
        elif what == PUT_SIGNAL:
            result = device.put_signal(
                qp, raddr, rkey, laddr, lkey, nbytes, s_raddr, s_rkey, s_laddr, s_lkey, value, sharing, code_opt, scope
            )
        elif what == P_SIGNAL:  # the number is in `laddr`
            result = device.p_signal(
                qp, raddr, rkey, laddr, nbytes, s_raddr, s_rkey, s_laddr, s_lkey, value, sharing, code_opt, scope
            )
        elif what == MCST:
            result = device.mcst(qp, daddr, dlkey, sharing, code_opt, scope)
        elif what == FENCE:
            result = device.fence(qp, sharing, code_opt, scope)
        elif what == WAIT:
            result = device.wait(qp, ticket, sharing, scope)
        elif what == WAIT_ALL:
            result = device.wait_all(qp, sharing)
        elif what == GET_WAIT:
            result = device.get_wait(qp, ticket, sharing, scope, daddr, dlkey)
        elif what == PUT_COUNTER:
            result = device.put_counter(
                qp, raddr, rkey, laddr, lkey, nbytes, beside, c_raddr, c_rkey, c_laddr, c_lkey, add, sharing, code_opt,
                scope,
            )
        elif what == GET_COUNTER:
            result = device.get_counter(
                qp, raddr, rkey, laddr, lkey, nbytes, beside, c_raddr, c_rkey, c_laddr, c_lkey, add, sharing, code_opt,
                scope,
            )
        elif what == P_COUNTER:
            result = device.p_counter(
                qp, raddr, rkey, value, nbytes, beside, c_raddr, c_rkey, c_laddr, c_lkey, add, sharing, code_opt, scope
            )
        elif what == SIGNAL_COUNTER:
            result = device.signal_counter(
                qp, s_raddr, s_rkey, s_laddr, s_lkey, value, beside, c_raddr, c_rkey, c_laddr, c_lkey, add, sharing,
                code_opt, scope,
            )
        elif what == PUT_SIGNAL_COUNTER:
            result = device.put_signal_counter(
                qp, raddr, rkey, laddr, lkey, nbytes, s_raddr, s_rkey, s_laddr, s_lkey, value, beside, c_raddr, c_rkey,
                c_laddr, c_lkey, add, sharing, code_opt, scope,
            )
        elif what == SEND:
            result = device.send(qp, laddr, lkey, nbytes, sharing, code_opt, scope)
        elif what == SEND_IMM:
            result = device.send_imm(qp, laddr, lkey, nbytes, value, sharing, code_opt, scope)
        elif what == RECV:
            result = device.recv(qp, laddr, lkey, nbytes, sharing, scope)
        elif what == RECV_WAIT:
            result = device.recv_wait(qp, ticket, sharing, scope, daddr, dlkey)
        elif what == RECV_WAIT_ALL:
            result = device.recv_wait_all(qp, sharing)
        elif what == RECV_NEXT:
            result = device.recv_next(qp, sharing)
        elif what == RECV_SLOT:
            result = device.recv_slot(qp, ticket)
        elif what == RECV_BYTES:
            result = device.recv_bytes(qp, ticket)
        elif what == RECV_IMM:
            result = device.recv_imm(qp, ticket)
        elif what == RECV_INLINE:
            result = device.recv_inline(qp, ticket)
        elif what == RECV_POLL:
            result = device.recv_poll(qp, ticket, sharing)
        elif what == POLL_ONE:
            result = device.poll_one(qp, ticket, sharing)
        elif what == POLL:
            result = device.poll(qp, ticket, sharing)
        elif what == COPY:  # from the address `ticket`, if it is one, to `raddr`
            if ticket > 0:
                device.copy(raddr, ticket, nbytes)
        elif what == SLEEP:  # `value` ns
            start = device.clock_ns()
            while device.clock_ns() - start < value:
                device.yield_thread()
        elif what == BARRIER:
            device.block_sync()
        else:
            continue
        device.st64(out + 8 * row, result)
