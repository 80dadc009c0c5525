// The peer at work: threads of a test that drive queues by the functions of doca_peer.hpp. Compiled by g++ as a shared
// object, and by nvcc as a kernel.
#include "doca_peer.hpp"

enum Op { PUT, GET, P, PUT_SIGNAL, PUT_COUNTER, PUT_COLLAPSED };

struct Job {  // all of it 64-bit words, as the test writes them
    Qp *qp, *companion;
    u64 raddr, rkey, laddr, lkey, nbytes, rounds, batch;
    u64 sig_raddr, sig_laddr;  // a word to count in, and a place for its old values, 8 bytes a thread
    u64 op, sharing, rule, ready, submit, code_opt;
};

template <class Api, Sharing sharing> PEER long long work(const Job &job, u64 me, u64 threads)
{
    const How how{Submit(job.submit), u32(job.code_opt)};
    const u32 rkey = be32(u32(job.rkey)), lkey = be32(u32(job.lkey));
    const Addr signal{job.sig_raddr, rkey}, old{job.sig_laddr + 8 * me, lkey};
    for (u64 i = 0; i < job.rounds; i++) {
        const u64 at = (i * threads + me) * job.nbytes;
        const Target target{{job.raddr + at, rkey}, {job.laddr + at, lkey}, job.nbytes};
        u64 ticket = 0;
        if (job.op == PUT || job.op == PUT_COLLAPSED) ticket = Api::put(job.qp, target, how);
        if (job.op == GET) ticket = Api::get(job.qp, target, how);
        if (job.op == P) ticket = Api::p(job.qp, target.remote, *(const u64 *)target.local.addr, how);
        if (job.op == PUT_SIGNAL) ticket = Api::put_signal(job.qp, target, signal, old, 1, how);
        if (job.op == PUT_COUNTER) ticket = Api::put_counter(job.qp, target, job.companion, signal, old, 1);
        if ((i + 1) % job.batch != 0 && i + 1 != job.rounds) continue;
        int status;
        if (job.op == PUT_COLLAPSED)
            status = poll_cq_collapsed_at<sharing>(job.qp, ticket + 1);
        else
            status = Api::wait(job.qp, ticket);
        if (status != PEER_OK) return status;
    }
    return 0;
}

template <Sharing sharing, Rule rule> PEER long long with_ready(const Job &job, u64 me, u64 threads)
{
    if (job.ready == LD_ST) return work<OneSided<sharing, rule, LD_ST>, sharing>(job, me, threads);
    return work<OneSided<sharing, rule, ATOMIC_CAS>, sharing>(job, me, threads);
}

template <Sharing sharing> PEER long long with_rule(const Job &job, u64 me, u64 threads)
{
    if (job.rule == OWNER_ONLY) return with_ready<sharing, OWNER_ONLY>(job, me, threads);
    return with_ready<sharing, COUNTER_TOO>(job, me, threads);
}

PEER long long run(const Job &job, u64 me, u64 threads)
{
    if (job.sharing == EXCLUSIVE) return with_rule<EXCLUSIVE>(job, me, threads);
    if (job.sharing == CTA) return with_rule<CTA>(job, me, threads);
    return with_rule<GPU>(job, me, threads);
}

#ifdef __CUDACC__

extern "C" __global__ void peer(const Job *job, long long *status)
{
    const u64 me = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    status[me] = run(*job, me, u64(gridDim.x) * blockDim.x);
}

#else

#include <thread>
#include <vector>

extern "C" void peer(const Job *job, long long *status, u64 threads)
{
    std::vector<std::thread> running;
    for (u64 me = 0; me < threads; me++)
        running.emplace_back([=] {
            try {
                status[me] = run(*job, me, threads);
            } catch (GaveUp) {
                status[me] = -110;
            }
        });
    for (auto &thread : running) thread.join();
}

// The thread beside a queue whose kernels cannot ring: it carries the producer index to record and register, until told
// to stop. Returns how often.
extern "C" u64 proxy(const u64 *word, u32 *dbrec, u64 *db, u32 sq_num_shift8_be, const u32 *stop)
{
    u64 carried = 0;
    u32 last = 0;
    while (!load_volatile(stop)) {
        const u32 producer = u32(load_volatile(word));
        if (producer == last) {
            sched_yield();
            continue;
        }
        const u64 value = u64(sq_num_shift8_be) << 32 | be32(producer << 8);
        fence_release<SYS>();
        store_mmio(db, value);
        store_relaxed_sys(dbrec, be32(producer & 0xffff));
        fence_release<SYS>();
        store_mmio(db, value);
        last = producer;
        carried++;
    }
    return carried;
}

#endif
