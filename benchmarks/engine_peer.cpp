// The software NIC's fast path and the device library's `put` in C++: the peers of benchmarks/engine.py.
//
// The engine does what ours does for an RDMA WRITE between two QPs of one NIC: the same checks, the same stores, on
// the same structures. Whatever else may turn up (another opcode, a refused key) ends the run with -1, and the
// benchmark says so. "layout.h" is generated from the NumPy dtypes.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <sched.h>
#include <time.h>

#include "layout.h"

namespace {

template <class T> T *at(int64_t address) { return reinterpret_cast<T *>(address); }

uint32_t be(uint32_t v) { return __builtin_bswap32(v); }
uint64_t be(uint64_t v) { return __builtin_bswap64(v); }

uint32_t acquire(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

inline void store16(int64_t address, uint64_t low, uint64_t high) {
    typedef uint64_t pair __attribute__((vector_size(16)));
    *at<pair>(address) = pair{low, high};
}

inline uint64_t pack(uint32_t low, uint32_t high) { return low | uint64_t(high) << 32; }

struct Piece {
    int64_t address, nbytes;
};

struct Request {
    int64_t raddr, rkey, nbytes, count;
    Piece pieces[MAX_SEGMENTS];
};

// The host address of a range, or -1.
inline int64_t translate(const WorkerState *n, int64_t key, int64_t pdn, int64_t addr, int64_t nbytes, int64_t right) {
    const MkeyRow *m = at<MkeyRow>(n->mkeys) + ((key >> 8) & n->mkey_mask);
    int64_t offset = addr - m->iova;
    if (m->key == key && m->pdn == pdn && (m->access & right) == right && offset >= 0 && offset <= m->nbytes - nbytes)
        return addr + m->delta;
    return -1;
}

// The data segments from `segment` to `end`, checked and listed.
inline bool gather(const WorkerState *n, const QpRow *q, Request &r, int64_t segment, int64_t end) {
    r.nbytes = r.count = 0;
    while (segment < end) {
        const data_seg *d = at<data_seg>(segment);
        uint32_t word = be(d->byte_count);
        int64_t nbytes = word & (INLINE_SEG - 1), address, size = SEGMENT;
        if (word & INLINE_SEG) {
            address = segment + 4;
            size = (nbytes + 4 + SEGMENT - 1) & -SEGMENT;
            if (segment + size > end)
                return false;
        } else {
            if (nbytes == 0)
                nbytes = INLINE_SEG;
            if (r.nbytes + nbytes > MAX_TRANSFER)
                return false;
            address = translate(n, be(d->lkey), q->pdn, be(d->addr), nbytes, 0);
            if (address < 0)
                return false;
        }
        if (nbytes > 0)
            r.pieces[r.count++] = {address, nbytes};
        r.nbytes += nbytes;
        segment += size;
    }
    return true;
}

inline bool write_cqe(WorkerState *n, CqRow *c, CounterSet *count, const QpRow *q, int64_t opcode, int64_t index,
                      int64_t nbytes) {
    if (!c->overrun) {
        int64_t consumed = be(acquire(at<uint32_t>(c->dbrec))) & CI_MASK;
        if (c->error || ((c->pi - consumed) & CI_MASK) >= 1ll << c->log)
            return false;
    }
    int64_t slot = c->collapsed ? 0 : c->pi & ((1ll << c->log) - 1);
    int64_t e = c->addr + (slot << CQE_SHIFT);
    uint32_t owner = (c->pi >> c->log) & 1;
    store16(e, 0, 0);
    store16(e + 16, 0, 0);
    store16(e + offsetof(cqe64, srqn_uidx), be(uint32_t(q->user_index)), pack(0, be(uint32_t(nbytes))));
    *at<uint64_t>(e + offsetof(cqe64, timestamp)) = be(uint64_t(n->now));
    *at<uint32_t>(e + offsetof(cqe64, sop_drop_qpn)) = be(uint32_t(opcode << 24 | q->qpn));
    uint32_t last = be(uint32_t((index & 0xFFFF) << 16 | owner));
    __atomic_store_n(at<uint32_t>(e + offsetof(cqe64, wqe_counter)), last, __ATOMIC_RELEASE);
    c->pi++;
    count->cqes++;
    return true;
}

// 1, or -1 for what this peer does not do.
inline int execute_next(WorkerState *n, QpRow *q) {
    CounterSet *count = at<CounterSet>(n->counters);
    int64_t index = q->sq_next, mask = (1ll << q->sq_log) - 1;
    int64_t wqe = q->sq_addr + ((index & mask) << WQEBB_SHIFT);
    const ctrl_seg *ctrl = at<ctrl_seg>(wqe);
    uint32_t word = be(ctrl->opmod_idx_opcode), qpn_ds = be(ctrl->qpn_ds);
    int64_t opcode = word & 0xFF, ds = qpn_ds & DS_MASK, blocks = (ds + 3) >> 2, ce = (ctrl->fm_ce_se >> CE_SHIFT) & 3;
    if (((word >> WQE_IDX_SHIFT) & PI_MASK) != (index & PI_MASK) || qpn_ds >> 8 != q->qpn)
        return -1;
    if (ds == 0 || index + blocks > q->sq_pi || opcode != RDMA_WRITE || q->wire != 0)
        return -1;
    if ((index & mask) + blocks > mask + 1 || ds < 2 || ds - 2 > MAX_SEGMENTS)
        return -1;
    Request r;
    const raddr_seg *remote = at<raddr_seg>(wqe + SEGMENT);
    r.raddr = be(remote->raddr);
    r.rkey = be(remote->rkey);
    if (!gather(n, q, r, wqe + 2 * SEGMENT, wqe + ds * SEGMENT) || q->remote_row == 0)
        return -1;
    QpRow *p = at<QpRow>(q->remote_row);
    if (p->qpn != q->remote_qpn || p->remote_qpn != q->qpn || p->wire != 0 || (p->state != RTR && p->state != RTS) ||
        p->service != q->service || p->expect_psn != (q->tx_psn & PSN_MASK) ||
        r.nbytes > q->msg_max || r.nbytes > p->msg_max)
        return -1;
    count->rdma_rx_bytes += r.nbytes;
    count->rx_write_requests++;
    if (r.nbytes != 0) {
        if ((p->rights & REMOTE_WRITE) != REMOTE_WRITE)
            return -1;
        int64_t target = translate(n, r.rkey, p->pdn, r.raddr, r.nbytes, REMOTE_WRITE);
        if (target < 0)
            return -1;
        for (int64_t i = 0; i < r.count; i++) {
            memcpy(at<void>(target), at<void>(r.pieces[i].address), r.pieces[i].nbytes);
            target += r.pieces[i].nbytes;
        }
    }
    q->retries = 0;
    q->ssn++;
    q->tx_psn += r.nbytes <= q->mtu ? 1 : (r.nbytes + q->mtu - 1) / q->mtu;
    p->expect_psn = q->tx_psn & PSN_MASK;
    p->msn++;
    count->rdma_tx_bytes += r.nbytes;
    if (ce >= CE_ALWAYS) {
        if (ce != CE_ALWAYS || !write_cqe(n, at<CqRow>(q->send_cq), count, q, opcode, index, r.nbytes))
            return -1;
    }
    q->sq_ci = q->sq_next = index + blocks;
    return 1;
}

inline void poll_doorbell(QpRow *q) {
    uint64_t raw = __atomic_load_n(at<uint64_t>(q->doorbell), __ATOMIC_RELAXED);
    if (int64_t(raw) == q->db_seen)
        return;
    q->db_seen = raw;
    std::atomic_thread_fence(std::memory_order_acquire);
    uint64_t value = be(raw), blocks = ((value & DS_MASK) + 3) >> 2;  // of BlueFlame; a doorbell has none
    int64_t ahead = (int64_t((value >> (32 + WQE_IDX_SHIFT)) + blocks) - q->sq_ci) & PI_MASK;
    if (ahead <= 1ll << q->sq_log && q->sq_ci + ahead > q->sq_pi)
        q->sq_pi = q->sq_ci + ahead;
}

// What the doorbell announced, up to the engine's budget: the number of WQEs, or -1.
inline int64_t serve_qp(WorkerState *n, QpRow *q) {
    poll_doorbell(q);
    if (q->sq_next == q->sq_pi || q->state != RTS)
        return 0;
    n->now = now_ns();
    if (q->retry_at != 0)
        return -1;
    int64_t done = 0;
    while (q->sq_next != q->sq_pi && done < n->budget && q->state == RTS) {
        if (execute_next(n, q) < 0)
            return -1;
        done++;
    }
    at<CounterSet>(n->counters)->sq_wqes += done;
    return done;
}

// One turn over the active QPs.
int64_t step(WorkerState *n) {
    int64_t done = 0;
    for (int64_t i = 0; i < n->active_count; i++) {
        WorkQueue *w = at<WorkQueue>(n->active) + i;
        if (!w->awake && int64_t(__atomic_load_n(at<uint64_t>(w->doorbell), __ATOMIC_RELAXED)) == w->seen)
            continue;
        QpRow *q = at<QpRow>(w->row);
        int64_t served = serve_qp(n, q);
        if (served < 0)
            return -1;
        done += served;
        w->seen = q->db_seen;
        w->awake = q->sq_ci != q->sq_pi;
    }
    return done;
}

// --- the poster: `put` of an EXCLUSIVE queue ---

inline bool complete(VerbsCq *c, int64_t index) {
    if (index < c->cqe_ci)
        return true;
    if (index >= c->cqe_ci + c->cqe_num)
        return false;
    int64_t position = index + c->cqe_rsvd, slot = c->cqe_daddr + ((position & c->cqe_mask) << CQE_SHIFT);
    uint32_t word = be(__atomic_load_n(at<uint32_t>(slot + offsetof(cqe64, wqe_counter)), __ATOMIC_RELAXED));
    bool fresh = (word & 1) == ((position & c->cqe_num) != 0) && word >> 16 == (index & 0xFFFF);
    uint32_t opcode = (word & 0xFF) >> 4;
    if (!fresh || opcode == 0xF)
        return false;
    std::atomic_thread_fence(std::memory_order_acquire);
    if (opcode != 0)
        return false;
    c->cqe_ci = index + 1;
    return true;
}

inline bool wait(VerbsCq *c, int64_t index) {
    int64_t start = 0;
    for (int64_t polls = 0; !complete(c, index); polls++) {
        if (polls < HOST_SPINS)
            __builtin_ia32_pause();
        else
            sched_yield();
        if ((polls & 255) == 255) {
            int64_t now = now_ns();
            if (start == 0)
                start = now;
            if (now - start > 30'000'000'000)
                return false;
        }
    }
    return true;
}

inline void fill(const VerbsQp *q, int64_t index, int64_t raddr, int64_t rkey, int64_t laddr,
                 int64_t lkey, int64_t nbytes) {
    int64_t wqe = q->sq_wqe_daddr + ((index & q->sq_wqe_mask) << WQEBB_SHIFT);
    uint32_t first = be(uint32_t((index & PI_MASK) << WQE_IDX_SHIFT | RDMA_WRITE));
    store16(wqe, pack(first, q->sq_num_shift8_be_3ds), pack(uint32_t(CQ_UPDATE) << 24, 0));
    store16(wqe + 16, be(uint64_t(raddr)), pack(be(uint32_t(rkey)), 0));
    store16(wqe + 32, pack(be(uint32_t(nbytes)), be(uint32_t(lkey))), be(uint64_t(laddr)));
}

inline void ring(const VerbsQp *q, int64_t producer) {
    std::atomic_thread_fence(std::memory_order_release);
    uint64_t word = pack(be(uint32_t((producer & PI_MASK) << WQE_IDX_SHIFT)), q->sq_num_shift8_be);
    __atomic_store_n(at<uint64_t>(q->sq_db), word, __ATOMIC_RELAXED);
}

inline void submit(VerbsQp *q, int64_t producer) {
    if (q->sq_wqe_pi >= producer)
        return;
    q->sq_wqe_pi = producer;
    ring(q, producer);
    __atomic_store_n(at<uint32_t>(q->sq_dbrec), be(uint32_t(producer & PI_MASK)), __ATOMIC_RELAXED);
    ring(q, producer);
}

} // namespace

extern "C" {

// Post `count` writes of `nbytes`, `batch` with each doorbell, and wait for the last: nanoseconds, or -1.
int64_t post_writes(int64_t qp, int64_t raddr, int64_t rkey, int64_t laddr, int64_t lkey, int64_t nbytes,
                    int64_t places, int64_t count, int64_t batch) {
    auto *q = at<VerbsQp>(qp);
    auto *c = at<VerbsCq>(qp + offsetof(VerbsQp, cq_sq));
    int64_t start = now_ns(), last = 0;
    for (int64_t done = 0; done < count; done += batch) {
        int64_t first = q->sq_rsvd_index;
        q->sq_rsvd_index = first + batch;
        last = first + batch - 1;
        int64_t previous = last - q->sq_wqe_num;
        if (previous >= 0 && !wait(c, previous))
            return -1;
        for (int64_t i = 0; i < batch; i++) {
            int64_t where = ((first + i) & (places - 1)) * nbytes;
            fill(q, first + i, raddr + where, rkey, laddr + where, lkey, nbytes);
        }
        q->sq_ready_index = last + 1;
        submit(q, last + 1);
    }
    if (!wait(c, last))
        return -1;
    return now_ns() - start;
}

// Serve the NIC until told to stop: 0, or -1.
int64_t engine(int64_t nic_address) {
    WorkerState *n = at<WorkerState>(nic_address);
    int64_t idle = 0;
    while (__atomic_load_n(&n->stop, __ATOMIC_RELAXED) == 0) {
        int64_t done = step(n);
        if (done < 0)
            return -1;
        if (done > 0) {
            idle = 0;
            continue;
        }
        if (++idle % YIELD_EVERY)
            __builtin_ia32_pause();
        else
            sched_yield();
    }
    return 0;
}

// Copy `count` pieces of `nbytes`, going around `places` of them: nanoseconds.
int64_t copy_pieces(int64_t target, int64_t source, int64_t nbytes, int64_t places, int64_t count) {
    int64_t start = now_ns();
    for (int64_t i = 0; i < count; i++) {
        int64_t where = (i & (places - 1)) * nbytes;
        memcpy(at<void>(target + where), at<void>(source + where), nbytes);
    }
    return now_ns() - start;
}

// Ring the doorbell and be the engine until WQE `target` - 1 is complete: nanoseconds, or -1.
int64_t drain(int64_t nic_address, int64_t row, int64_t target) {
    WorkerState *n = at<WorkerState>(nic_address);
    QpRow *q = at<QpRow>(row);
    int64_t start = now_ns();
    __atomic_store_n(at<uint32_t>(q->doorbell), be(uint32_t((target & PI_MASK) << WQE_IDX_SHIFT)), __ATOMIC_RELEASE);
    while (q->sq_ci != target)
        if (step(n) < 0)
            return -1;
    return now_ns() - start;
}
}
