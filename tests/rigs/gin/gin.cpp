// What kernels of NCCL do with a GIN context, on threads of the host: put, put a value, signal, count, flush. Written from
// a description of the interface, over the functions of c_abi. QP_BYTES is the layout of queues.
#include "../c_abi/doca_peer.hpp"

struct Table {  // signals or counters
    u64 *buffer;
    const u32 *rkeys;
    u32 lkey, offset;
};

struct Context {  // ncclGinGdakiGPUContext, up to where all forms agree
    Qp *gdqp, *companion_gdqp;
    Table counters, signals;
    u32 sink_lkey;
};
static_assert(sizeof(Table) == 24 && offsetof(Context, signals) == 40 && offsetof(Context, sink_lkey) == 64, "Context");

struct Window {  // ncclGinGdakiMemHandle
    const u32 *rkeys;
    u32 lkey;
};

using Api = OneSided<GPU, OWNER_ONLY, ATOMIC_CAS>;  // as from sm_90 on
constexpr How AUTO{DB, 0};

static const Context &context_at(u64 contexts, u64 stride, u64 index) { return *(const Context *)(contexts + index * stride); }

static Addr signal_of(const Context &ctx, u64 peer, u64 id)
{
    return {8 * (id + ctx.signals.offset), ctx.signals.rkeys[peer]};
}

// Waits until all that was posted on each queue is complete.
static int flush(const Context &ctx, u64 ranks)
{
    for (u64 peer = 0; peer < ranks; peer++) {
        const u64 end = atomic_read<GPU>(&ctx.gdqp[peer].sq_rsvd_index);
        if (end == 0) continue;
        if (int status = Api().wait(&ctx.gdqp[peer], end - 1)) return status;
    }
    return 0;
}

// For each peer: a put with a signal; a value of 8 bytes with one; a put that counts here. Then a flush. Each kind has its
// own piece of `piece` bytes for each rank, in windows that begin with what is sent.
extern "C" int gin_work(
    u64 contexts, u64 stride, u64 index, const Window *window, u64 rank, u64 ranks, u64 piece, u64 value, u64 counted)
{
    const Context &ctx = context_at(contexts, stride, index);
    const Addr sink{0, ctx.sink_lkey};
    try {
        for (u64 peer = 0; peer < ranks; peer++) {
            Qp *qp = &ctx.gdqp[peer];
            const auto at = [&](u64 kind) { return Addr{(1 + kind * ranks + rank) * piece, window->rkeys[peer]}; };
            const Addr source{0, window->lkey};
            Api().put_signal(qp, {at(0), source, piece}, signal_of(ctx, peer, 0), sink, 1, AUTO);
            Api().p(qp, at(1), value, AUTO);
            Api().put_signal(qp, {at(1), source, 0}, signal_of(ctx, peer, 1), sink, value, AUTO);
            if (!counted) continue;
            const Addr counter{8 * (1 + ctx.counters.offset), ctx.counters.rkeys[rank]};
            Api().put_counter(qp, {at(2), source, piece}, &ctx.companion_gdqp[peer], counter, sink, 1);
        }
        return flush(ctx, ranks);
    } catch (GaveUp) {
        return -110;
    }
}

// Waits for a signal. Returns 0, or -110 after some seconds.
extern "C" int gin_wait(u64 contexts, u64 stride, u64 index, u64 id, u64 value)
{
    const u64 *word = &context_at(contexts, stride, index).signals.buffer[id];
    try {
        Patience wait;
        while (__atomic_load_n(word, __ATOMIC_ACQUIRE) < value) wait();
    } catch (GaveUp) {
        return -110;
    }
    return 0;
}

extern "C" u64 gin_counter(u64 contexts, u64 stride, u64 index, u64 id)
{
    return __atomic_load_n(&context_at(contexts, stride, index).counters.buffer[id], __ATOMIC_ACQUIRE);
}
