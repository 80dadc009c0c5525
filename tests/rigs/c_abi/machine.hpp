// What the peer's functions stand on: atomics, fences and byte order, for CUDA and for host threads.
#pragma once

#include <cstddef>

#ifdef __CUDACC__
#define PEER __device__ static inline
#define CALLED __device__ static __noinline__  // or the compiler would inline all of it everywhere, for minutes
#else
#define PEER static inline
#define CALLED static
#include <sched.h>
#include <time.h>
#endif

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

enum Scope { SYS = 0, GPU_SCOPE = 1, CTA_SCOPE = 2, THREAD_SCOPE = 3 };   // enum doca_gpu_dev_verbs_sync_scope
enum Sharing { EXCLUSIVE = 0, CTA = 1, GPU = 2 };                         // ..._resource_sharing_mode

constexpr u64 PATIENCE_NS = 30'000'000'000;  // no loop of a test turns for ever

PEER constexpr u16 be16(u16 x) { return u16(x << 8 | x >> 8); }
PEER constexpr u32 be32(u32 x) { return x << 24 | (x & 0xff00) << 8 | (x >> 8 & 0xff00) | x >> 24; }
PEER constexpr u64 be64(u64 x) { return u64(be32(u32(x))) << 32 | be32(u32(x >> 32)); }

#ifdef __CUDACC__

struct Patience {
    u64 began = 0;
    __device__ void operator()()
    {
        u64 now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (began == 0)
            began = now;
        else if (now - began > PATIENCE_NS)
            __trap();
    }
};

template <Scope scope> PEER void fence_release()
{
#if __CUDA_ARCH__ >= 900
    if (scope == SYS) asm volatile("fence.release.sys;" ::: "memory");
    if (scope == GPU_SCOPE) asm volatile("fence.release.gpu;" ::: "memory");
    if (scope == CTA_SCOPE) asm volatile("fence.release.cta;" ::: "memory");
#else
    if (scope == SYS) __threadfence_system();
    if (scope == GPU_SCOPE) __threadfence();
    if (scope == CTA_SCOPE) __threadfence_block();
#endif
}

template <Scope scope> PEER void fence_acquire()
{
#if __CUDA_ARCH__ >= 900
    if (scope == SYS) asm volatile("fence.acquire.sys;" ::: "memory");
    if (scope == GPU_SCOPE) asm volatile("fence.acquire.gpu;" ::: "memory");
    if (scope == CTA_SCOPE) asm volatile("fence.acquire.cta;" ::: "memory");
#else
    fence_release<scope>();
#endif
}

PEER u8 load_relaxed_sys(const u8 *p)
{
    u32 v;
    asm volatile("ld.relaxed.sys.global.L1::no_allocate.u8 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return u8(v);
}

PEER u32 load_relaxed_sys(const u32 *p)
{
    u32 v;
    asm volatile("ld.relaxed.sys.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

PEER void store_relaxed_sys(u32 *p, u32 v) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
PEER void store_relaxed_sys(u64 *p, u64 v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
PEER void store_mmio(u64 *p, u64 v) { asm volatile("st.mmio.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
PEER void store_release_gpu(int *p, int v) { asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }

PEER void store_segment(void *to, u64 low, u64 high)
{
    asm volatile("st.global.cs.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(low), "l"(high) : "memory");
}

template <class T> PEER T load_volatile(const T *p) { return *(const volatile T *)p; }
PEER u64 fetch_add(u64 *p, u64 v) { return atomicAdd(p, v); }
PEER u64 fetch_max(u64 *p, u64 v) { return atomicMax(p, v); }
PEER u64 fetch_max_sys(u64 *p, u64 v) { return atomicMax_system(p, v); }
PEER bool cas(u64 *p, u64 from, u64 to) { return atomicCAS(p, from, to) == from; }
PEER bool cas(int *p, int from, int to) { return atomicCAS(p, from, to) == from; }

#else

struct GaveUp {};

struct Patience {
    u64 began = 0;
    void operator()()
    {
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        const u64 now = u64(t.tv_sec) * 1'000'000'000 + u64(t.tv_nsec);
        if (began == 0)
            began = now;
        else if (now - began > PATIENCE_NS)
            throw GaveUp();
        sched_yield();  // there are more threads than cores
    }
};

template <Scope scope> PEER void fence_release()
{
    if (scope != THREAD_SCOPE) __atomic_thread_fence(__ATOMIC_RELEASE);
}

template <Scope scope> PEER void fence_acquire()
{
    if (scope != THREAD_SCOPE) __atomic_thread_fence(__ATOMIC_ACQUIRE);
}

template <class T> PEER T load_relaxed_sys(const T *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
template <class T> PEER void store_relaxed_sys(T *p, T v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
PEER void store_mmio(u64 *p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
PEER void store_release_gpu(int *p, int v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

PEER void store_segment(void *to, u64 low, u64 high)
{
    static_cast<u64 *>(to)[0] = low;
    static_cast<u64 *>(to)[1] = high;
}

template <class T> PEER T load_volatile(const T *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
PEER u64 fetch_add(u64 *p, u64 v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }

PEER u64 fetch_max(u64 *p, u64 v)
{
    u64 old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}

PEER u64 fetch_max_sys(u64 *p, u64 v) { return fetch_max(p, v); }
template <class T> PEER bool cas(T *p, T from, T to)
{
    return __atomic_compare_exchange_n(p, &from, to, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

#endif

// The four of common.cuh that know how a queue is shared.

template <Sharing sharing, bool acquire = false> PEER u64 atomic_max(u64 *p, u64 v)
{
    if (sharing == EXCLUSIVE) {
        const u64 old = *p;
        *p = old > v ? old : v;
        return old;
    }
    const u64 old = fetch_max(p, v);
    if (acquire) fence_acquire<sharing == CTA ? CTA_SCOPE : GPU_SCOPE>();
    return old;
}

template <Sharing sharing> PEER u64 atomic_add(u64 *p, u64 v)
{
    if (sharing != EXCLUSIVE) return fetch_add(p, v);
    const u64 old = *p;
    *p = old + v;
    return old;
}

template <Sharing sharing> PEER u64 atomic_read(const u64 *p) { return sharing == EXCLUSIVE ? *p : load_volatile(p); }

template <Sharing sharing> PEER void lock(int *p)
{
    if (sharing == EXCLUSIVE) {
        *p = 1;
        return;
    }
    Patience wait;
    while (!cas(p, 0, 1)) wait();
    fence_acquire<sharing == CTA ? CTA_SCOPE : GPU_SCOPE>();
}

template <Sharing sharing> PEER void unlock(int *p)
{
    if (sharing == EXCLUSIVE)
        *p = 0;
    else
        store_release_gpu(p, 0);
}
