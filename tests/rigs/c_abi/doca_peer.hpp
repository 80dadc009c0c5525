// A peer that works as GPUNetIO's device functions (2.0.1) do: the same structures, counters, fences and stores, written
// anew from their description. Nothing here knows gpunetio.
#pragma once

#include "structs.hpp"

enum { OP_NOP = 0x00, OP_WRITE = 0x08, OP_WAIT = 0x0f, OP_READ = 0x10, OP_FA = 0x12 };
enum { CQ_UPDATE = 8, INLINE_SEG = int(0x80000000), CQE_REQ_ERR = 13, CQE_INVALID = 15 };
enum { SKIP_AVAILABILITY_CHECK = 2, SKIP_DB_RINGING = 4, CPU_PROXY_UPDATE_PI = 8 };
enum { PEER_OK = 0, PEER_EBUSY = 16, PEER_EIO = -5 };
enum Rule { COUNTER_TOO, OWNER_ONLY };           // when a CQE is new: below sm_90, and from there on
enum Ready { ATOMIC_CAS = 1, LD_ST = 2 };        // enum doca_gpu_dev_verbs_qp_ready_mode
enum Submit { DB, NO_DBR, PROXY };
constexpr u64 MAX_TRANSFER = 1 << 30;

// --- completion queue ----------------------------------------------------------------------------------------------

PEER u8 *cqe_at(const Cq *cq, u64 position) { return cq->cqe_daddr + (position & cq->cqe_mask) * 64; }

// The last byte of a CQE, or 0 in *is_new while it is not the one of `index`.
template <Rule rule> PEER u8 look(const Cq *cq, u64 index, bool *is_new)
{
    const u64 position = index + cq->cqe_rsvd;
    const u8 *cqe = cqe_at(cq, position);
    const bool phase = (position & cq->cqe_num) != 0;
    if (rule == OWNER_ONLY) {
        const u8 op_own = load_relaxed_sys(cqe + 63);
        *is_new = (op_own & 1) == phase;
        return op_own;
    }
    const u32 word = load_relaxed_sys((const u32 *)(cqe + 60));
    const u8 op_own = u8(word >> 24);
    *is_new = (op_own & 1) == phase && be16(u16(word)) == u16(index);
    return op_own;
}

template <Sharing sharing> PEER int completed(Cq *cq, u64 index, u8 op_own)
{
    if (op_own >> 4 == CQE_REQ_ERR) return PEER_EIO;
    fence_acquire<SYS>();
    atomic_max<sharing>(&cq->cqe_ci, index + 1);
    return PEER_OK;
}

template <Sharing sharing, Rule rule> PEER int poll_one_cq_at(Cq *cq, u64 index)
{
    const u64 ci = atomic_read<sharing>(&cq->cqe_ci);
    if (index < ci) return PEER_OK;
    if (index >= ci + cq->cqe_num) return PEER_EBUSY;
    bool is_new;
    const u8 op_own = look<rule>(cq, index, &is_new);
    return is_new ? completed<sharing>(cq, index, op_own) : PEER_EBUSY;
}

template <Sharing sharing, Rule rule> CALLED int poll_cq_at(Cq *cq, u64 index)
{
    Patience wait;
    for (;; wait()) {
        const u64 ci = atomic_read<sharing>(&cq->cqe_ci);
        if (index < ci) return PEER_OK;
        bool is_new;
        const u8 op_own = look<rule>(cq, index, &is_new);
        if (index < ci + cq->cqe_num && is_new) return completed<sharing>(cq, index, op_own);
    }
}

// `index` is that behind the WQE which is waited for.
template <Sharing sharing> CALLED int poll_cq_collapsed_at(Qp *qp, u64 index)
{
    Cq *cq = &qp->cq_sq;
    Patience wait;
    while (load_volatile(&qp->sq_wqe_pi) < index) wait();  // before, 16 bits would be ambiguous
    fence_acquire<GPU_SCOPE>();
    u16 counter;
    u8 opcode;
    for (;; wait()) {
        if (index < atomic_read<sharing>(&cq->cqe_ci)) return PEER_OK;
        const u32 word = load_relaxed_sys((const u32 *)(cq->cqe_daddr + 60));
        counter = be16(u16(word));
        opcode = u8(word >> 28);
        if (opcode != CQE_INVALID && u16(u16(index) - counter - 2) >= cq->cqe_num) break;
    }
    if (opcode == CQE_REQ_ERR) return PEER_EIO;
    const u16 next = u16(counter + 1);
    u64 ci = (index & ~u64(0xffff)) | next;
    if (u16(index) > next) ci += 0x10000;
    fence_acquire<SYS>();
    atomic_max<sharing>(&cq->cqe_ci, ci);
    return PEER_OK;
}

// --- reserve, ready ------------------------------------------------------------------------------------------------

template <Sharing sharing, Rule rule> CALLED u64 reserve_wq_slots(Qp *qp, u32 count, u32 code_opt = 0)
{
    const u64 first = atomic_add<sharing>(&qp->sq_rsvd_index, count);
    const u64 last = first + count - 1;
    if (!(code_opt & SKIP_AVAILABILITY_CHECK) && last >= qp->sq_wqe_num)
        poll_cq_at<sharing, rule>(&qp->cq_sq, last - qp->sq_wqe_num);  // its status is ignored
    return first;
}

template <Sharing sharing, Ready mode> CALLED void mark_wqes_ready(Qp *qp, u64 from, u64 to)
{
    constexpr Scope scope = sharing == CTA ? CTA_SCOPE : GPU_SCOPE;
    if (sharing == EXCLUSIVE) {
        qp->sq_ready_index = to + 1;
        return;
    }
    fence_release<scope>();
    Patience wait;
    if (mode == ATOMIC_CAS) {
        while (!cas(&qp->sq_ready_index, from, to + 1)) wait();
        fence_acquire<scope>();
    } else {
        while (load_volatile(&qp->sq_ready_index) != from) wait();
        fence_acquire<scope>();
        *(volatile u64 *)&qp->sq_ready_index = to + 1;
    }
}

// --- doorbells -----------------------------------------------------------------------------------------------------

template <Scope scope> PEER void ring_db(Qp *qp, u64 producer)
{
    fence_release<scope>();
    store_mmio(qp->sq_db, u64(qp->sq_num_shift8_be) << 32 | be32(u32(producer << 8)));
}

PEER void update_dbr(Qp *qp, u64 producer) { store_relaxed_sys(qp->sq_dbrec, be32(u32(producer & 0xffff))); }

PEER constexpr Scope at_least_gpu(Scope scope) { return scope < GPU_SCOPE ? scope : GPU_SCOPE; }

template <Sharing sharing, Scope scope> PEER void submit_db(Qp *qp, u64 producer, u32 code_opt)
{
    if (code_opt & SKIP_DB_RINGING) return;
    lock<sharing>(&qp->sq_lock);
    if (atomic_max<sharing, true>(&qp->sq_wqe_pi, producer) < producer) {
        ring_db<scope>(qp, producer);
        update_dbr(qp, producer);
        ring_db<at_least_gpu(scope)>(qp, producer);
    }
    unlock<sharing>(&qp->sq_lock);
}

template <Sharing sharing, Scope scope> PEER void submit_db_no_dbr(Qp *qp, u64 producer, u32 code_opt)
{
    if (code_opt & SKIP_DB_RINGING) return;
    if (atomic_max<sharing, true>(&qp->sq_wqe_pi, producer) < producer) ring_db<scope>(qp, producer);
}

template <Sharing sharing, Scope scope> PEER void submit_proxy(Qp *qp, u64 producer, u32 code_opt)
{
    fence_release<scope>();
    if (sharing == EXCLUSIVE) {
        store_relaxed_sys(qp->sq_db, producer);
        store_relaxed_sys(qp->sq_db, producer);
    } else
        fetch_max_sys(qp->sq_db, producer);
    if (code_opt & CPU_PROXY_UPDATE_PI) atomic_max<sharing>(&qp->sq_wqe_pi, producer);
}

template <Sharing sharing> CALLED void submit(Qp *qp, u64 producer, Submit how, u32 code_opt)
{
    constexpr Scope scope = sharing == GPU ? THREAD_SCOPE : GPU_SCOPE;  // marking as ready has fenced already
    if (how == DB)
        submit_db<sharing, scope>(qp, producer, code_opt);
    else if (how == NO_DBR)
        submit_db_no_dbr<sharing, scope>(qp, producer, code_opt);
    else
        submit_proxy<sharing, scope>(qp, producer, code_opt);
}

template <Sharing sharing, int count> CALLED void submit_db_multi_qps(Qp **qps, const u64 *producers)
{
    bool newer[count];
    for (int i = 0; i < count; i++) {
        lock<sharing>(&qps[i]->sq_lock);
        newer[i] = atomic_max<sharing, true>(&qps[i]->sq_wqe_pi, producers[i]) < producers[i];
        if (newer[i]) ring_db<GPU_SCOPE>(qps[i], producers[i]);
    }
    for (int i = 0; i < count; i++) {
        if (newer[i]) {
            update_dbr(qps[i], producers[i]);
            ring_db<GPU_SCOPE>(qps[i], producers[i]);
        }
        unlock<sharing>(&qps[i]->sq_lock);
    }
}

// --- WQEs ----------------------------------------------------------------------------------------------------------

PEER Wqe *get_wqe_ptr(Qp *qp, u16 index) { return (Wqe *)(qp->sq_wqe_daddr + (u64(index & qp->sq_wqe_mask) << 6)); }

template <class T> PEER T garbage()
{
    T t;
    for (unsigned i = 0; i < sizeof t; i++) ((u8 *)&t)[i] = 0xaa;
    return t;
}

template <class T> PEER void store(void *to, const T &segment)
{
    static_assert(sizeof(T) == 16, "a segment");
    u64 words[2];
    for (unsigned i = 0; i < 16; i++) ((u8 *)words)[i] = ((const u8 *)&segment)[i];
    store_segment(to, words[0], words[1]);
}

PEER void store_ctrl(Wqe *wqe, u16 index, u32 opcode, u32 qpn_ds)
{
    Ctrl ctrl = garbage<Ctrl>();
    ctrl.opmod_idx_opcode = be32(u32(index) << 8 | opcode);
    ctrl.qpn_ds = qpn_ds;
    ctrl.fm_ce_se = CQ_UPDATE;
    store(&wqe->segments[0], ctrl);
}

PEER void store_raddr(Wqe *wqe, const Addr &remote)
{
    Raddr raddr = garbage<Raddr>();
    raddr.raddr = be64(remote.addr);
    raddr.rkey = remote.key;
    store(&wqe->segments[1], raddr);
}

PEER void store_data(Segment *to, const Addr &local, u32 nbytes)
{
    Data data = garbage<Data>();
    data.byte_count = be32(nbytes & 0x7fffffff);
    data.lkey = local.key;
    data.addr = be64(local.addr);
    store(to, data);
}

CALLED void prepare_nop(Qp *qp, u64 index) { store_ctrl(get_wqe_ptr(qp, u16(index)), u16(index), OP_NOP, qp->sq_num_shift8_be_1ds); }

CALLED void prepare_rdma(Qp *qp, u64 index, u32 opcode, const Addr &remote, const Addr &local, u32 nbytes)
{
    Wqe *wqe = get_wqe_ptr(qp, u16(index));
    store_ctrl(wqe, u16(index), opcode, qp->sq_num_shift8_be_3ds);
    store_raddr(wqe, remote);
    store_data(&wqe->segments[2], local, nbytes);
}

CALLED void prepare_inline(Qp *qp, u64 index, const Addr &remote, u64 value)
{
    Wqe *wqe = get_wqe_ptr(qp, u16(index));
    store_ctrl(wqe, u16(index), OP_WRITE, qp->sq_num_shift8_be_3ds);
    store_raddr(wqe, remote);
    InlineHeader header = garbage<InlineHeader>();
    header.byte_count = be32(u32(sizeof value) | u32(INLINE_SEG));
    for (unsigned i = 0; i < sizeof value; i++) header.payload[i] = ((const u8 *)&value)[i];
    store(&wqe->segments[2], header);
}

CALLED void prepare_add(Qp *qp, u64 index, const Addr &remote, const Addr &local, u64 value)
{
    Wqe *wqe = get_wqe_ptr(qp, u16(index));
    store_ctrl(wqe, u16(index), OP_FA, qp->sq_num_shift8_be_4ds);
    store_raddr(wqe, remote);
    Atomic atomic = garbage<Atomic>();
    atomic.swap_add = be64(value);
    atomic.compare = be64(value);
    store(&wqe->segments[2], atomic);
    store_data(&wqe->segments[3], local, 8);
}

CALLED void prepare_wait(Qp *qp, u64 index, u64 max_index, u32 cqn)
{
    Wqe *wqe = get_wqe_ptr(qp, u16(index));
    store_ctrl(wqe, u16(index), OP_WAIT, qp->sq_num_shift8_be_2ds);
    Wait wait = garbage<Wait>();
    wait.max_index = be32(u32(max_index));
    wait.qpn_cqn = be32(cqn);
    store(&wqe->segments[1], wait);
}

// --- one-sided operations and counters -----------------------------------------------------------------------------

struct Target {
    Addr remote, local;
    u64 nbytes;
};

PEER u32 chunks_of(u64 nbytes)
{
    const u64 count = (nbytes + MAX_TRANSFER - 1) / MAX_TRANSFER;
    return count ? u32(count) : 1;
}

CALLED void prepare_put(Qp *qp, u64 first, const Target &to)
{
    if (to.nbytes == 0) prepare_nop(qp, first);
    for (u64 done = 0; done < to.nbytes; done += MAX_TRANSFER) {
        const Addr remote{to.remote.addr + done, to.remote.key}, local{to.local.addr + done, to.local.key};
        const u64 left = to.nbytes - done;
        prepare_rdma(qp, first++, OP_WRITE, remote, local, u32(left < MAX_TRANSFER ? left : MAX_TRANSFER));
    }
}

// How a queue is used: what is a template parameter there, and may be chosen at run time here.
struct How {
    Submit submit;
    u32 code_opt;
};

template <Sharing sharing, Rule rule, Ready ready> struct OneSided {
    PEER u64 put(Qp *qp, const Target &to, How how)
    {
        const u32 count = chunks_of(to.nbytes);
        const u64 first = reserve_wq_slots<sharing, rule>(qp, count, how.code_opt), last = first + count - 1;
        prepare_put(qp, first, to);
        mark_wqes_ready<sharing, ready>(qp, first, last);
        submit<sharing>(qp, last + 1, how.submit, how.code_opt);
        return last;
    }

    PEER u64 get(Qp *qp, const Target &from, How how)
    {
        const u64 index = reserve_wq_slots<sharing, rule>(qp, 1, how.code_opt);
        prepare_rdma(qp, index, OP_READ, from.remote, from.local, u32(from.nbytes));
        mark_wqes_ready<sharing, ready>(qp, index, index);
        submit<sharing>(qp, index + 1, how.submit, how.code_opt);
        return index;
    }

    PEER u64 p(Qp *qp, const Addr &remote, u64 value, How how)
    {
        const u64 index = reserve_wq_slots<sharing, rule>(qp, 1, how.code_opt);
        prepare_inline(qp, index, remote, value);
        mark_wqes_ready<sharing, ready>(qp, index, index);
        submit<sharing>(qp, index + 1, how.submit, how.code_opt);
        return index;
    }

    PEER u64 put_signal(Qp *qp, const Target &to, const Addr &signal, const Addr &old, u64 value, How how)
    {
        const u32 count = chunks_of(to.nbytes) + 1;
        const u64 first = reserve_wq_slots<sharing, rule>(qp, count, how.code_opt), last = first + count - 1;
        prepare_put(qp, first, to);
        prepare_add(qp, last, signal, old, value);
        mark_wqes_ready<sharing, ready>(qp, first, last);
        submit<sharing>(qp, last + 1, how.submit, how.code_opt);
        return last;
    }

    // The companion adds to the counter once the main queue's completion queue has what it waits for.
    PEER u64 put_counter(Qp *qp, const Target &to, Qp *companion, const Addr &counter, const Addr &old, u64 value)
    {
        const u32 count = chunks_of(to.nbytes);
        const u64 first = reserve_wq_slots<sharing, rule>(qp, count), last = first + count - 1;
        prepare_put(qp, first, to);
        mark_wqes_ready<sharing, ready>(qp, first, last);
        const u64 pair = reserve_wq_slots<sharing, rule>(companion, 2);
        prepare_wait(companion, pair, last, qp->cq_sq.cq_num);
        prepare_add(companion, pair + 1, counter, old, value);
        mark_wqes_ready<sharing, ready>(companion, pair, pair + 1);
        Qp *qps[] = {qp, companion};
        const u64 producers[] = {last + 1, pair + 2};
        submit_db_multi_qps<sharing, 2>(qps, producers);
        return last;
    }

    PEER int wait(Qp *qp, u64 ticket) { return poll_cq_at<sharing, rule>(&qp->cq_sq, ticket); }
};
