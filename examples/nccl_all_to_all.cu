// An all-to-all by NCCL's device API: kernels put to all ranks, and no CPU takes part. nccl_all_to_all.py builds and runs this.
//
//     nccl_all_to_all RANK RANKS ID_FILE BYTES ROUNDS
//
// Round r uses plane r % 2 of the inbox, and a rank begins round r + 2 only when all ranks have begun round r + 1. So nobody
// writes to a plane that is still read. Each rank has a signal for each other rank: one for all could count a fast rank twice
// in place of a slow one.
//
// With NCCL 2.30.7 or later, ranks then get what others have for them, and add to words in each other's windows.

#include "nccl_rank.h"

constexpr int THREADS = 64;
constexpr uint64_t ADDED = 5, ADDED_ALONE = 2;
constexpr bool HAS_GETS = NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 7);

// --- kernels -----------------------------------------------------------------------------------------------------------

__device__ static uint64_t nanoseconds()
{
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// `taken` gets the nanoseconds of all rounds. Signal `rank` at a peer counts this rank's rounds.
__global__ void exchange(ncclDevComm comm, ncclWindow_t outbox, ncclWindow_t inbox, size_t bytes, int first, int rounds,
                         uint64_t *taken)
{
    ncclGin gin{comm, 0};
    const ncclTeam world = ncclTeamWorld(comm);
    const uint64_t begin = nanoseconds();
    for (int round = first; round < first + rounds; round++) {
        const size_t plane = size_t(round % 2) * world.nRanks * bytes;
        for (int peer = threadIdx.x; peer < world.nRanks; peer += blockDim.x)
            gin.put(world, peer, inbox, plane + world.rank * bytes, outbox, peer * bytes, bytes,
                    ncclGin_SignalInc{ncclGinSignal_t(world.rank)});
        for (int peer = threadIdx.x; peer < world.nRanks; peer += blockDim.x)
            gin.waitSignal(ncclCoopThread(), ncclGinSignal_t(peer), uint64_t(round) + 1);
        __syncthreads();
    }
    gin.flush(ncclCoopCta());
    if (threadIdx.x == 0) *taken = nanoseconds() - begin;
}

// Puts a value to each rank, with signals of both kinds, and waits for a counter of its own. Values lie behind the planes.
__global__ void values(ncclDevComm comm, ncclWindow_t outbox, ncclWindow_t inbox, size_t bytes)
{
    ncclGin gin{comm, 0};
    const ncclTeam world = ncclTeamWorld(comm);
    const size_t behind = 2 * size_t(world.nRanks) * bytes;
    const ncclGinSignal_t mine = world.nRanks + world.rank;
    for (int peer = threadIdx.x; peer < world.nRanks; peer += blockDim.x) {
        gin.putValue(world, peer, inbox, behind + 8 * world.rank, uint64_t(1000 * world.rank + peer),
                     ncclGin_SignalAdd{mine, ADDED});
        gin.signal(world, peer, ncclGin_SignalAdd{mine, ADDED_ALONE});
        gin.put(world, peer, inbox, world.rank * bytes, outbox, peer * bytes, bytes, ncclGin_None{},
                ncclGin_CounterInc{ncclGinCounter_t(peer)});
        gin.waitCounter(ncclCoopThread(), ncclGinCounter_t(peer), 1);
        gin.waitSignal(ncclCoopThread(), ncclGinSignal_t(world.nRanks + peer), ADDED + ADDED_ALONE);
    }
    gin.flush(ncclCoopCta());
}

// Gets from each rank what it would put here, and adds to a word there (a VA signal). Words lie behind the values.
__global__ void gets(ncclDevComm comm, ncclWindow_t outbox, ncclWindow_t inbox, size_t bytes)
{
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 7)
    ncclGin gin{comm, 0};
    const ncclTeam world = ncclTeamWorld(comm);
    const size_t words = 2 * size_t(world.nRanks) * bytes + 8 * world.nRanks;
    for (int peer = threadIdx.x; peer < world.nRanks; peer += blockDim.x)
        gin.get(world, peer, outbox, world.rank * bytes, inbox, peer * bytes, bytes);
    gin.flush(ncclCoopCta());
    for (int peer = threadIdx.x; peer < world.nRanks; peer += blockDim.x) {
        gin.signal(world, peer, ncclGin_StrongVASignalAdd{inbox, words + 8 * world.rank, ADDED});
        gin.waitSignal(ncclCoopThread(), inbox, words + 8 * peer, ADDED);
    }
    gin.flush(ncclCoopCta());
#endif
}

// --- host --------------------------------------------------------------------------------------------------------------

static uint8_t byte_of(int from, int to, size_t at) { return uint8_t(from * 31 + to * 17 + at % 251); }

int main(int argc, char **argv)
{
    if (argc != 6) fail("usage", "nccl_all_to_all RANK RANKS ID_FILE BYTES ROUNDS");
    const int rank = atoi(argv[1]), ranks = atoi(argv[2]), rounds = atoi(argv[5]);
    const size_t bytes = strtoull(argv[4], nullptr, 0);
    int devices = 0;
    CHECK(cudaGetDeviceCount(&devices));
    CHECK(cudaSetDevice(rank % devices));

    ncclComm_t comm;
    CHECK(ncclCommInitRank(&comm, ranks, meet(rank, argv[3]), rank));
    const size_t inbox_bytes = 2 * ranks * bytes + 2 * 8 * ranks;
    void *outbox, *inbox;
    CHECK(ncclMemAlloc(&outbox, ranks * bytes));
    CHECK(ncclMemAlloc(&inbox, inbox_bytes));
    std::vector<uint8_t> out(ranks * bytes), in(inbox_bytes);
    for (int peer = 0; peer < ranks; peer++)
        for (size_t at = 0; at < bytes; at++) out[peer * bytes + at] = byte_of(rank, peer, at);
    CHECK(cudaMemcpy(outbox, out.data(), out.size(), cudaMemcpyHostToDevice));
    CHECK(cudaMemset(inbox, 0xFF, inbox_bytes));
    CHECK(cudaMemset(static_cast<uint8_t *>(inbox) + inbox_bytes - 8 * ranks, 0, 8 * ranks));
    uint64_t *taken;
    CHECK(cudaMallocHost(&taken, sizeof *taken));

    ncclWindow_t from, to;
    CHECK(ncclCommWindowRegister(comm, outbox, ranks * bytes, &from, NCCL_WIN_COLL_SYMMETRIC));
    CHECK(ncclCommWindowRegister(comm, inbox, inbox_bytes, &to, NCCL_WIN_COLL_SYMMETRIC));
#ifdef NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER  // NCCL 2.29 and later
    ncclDevCommRequirements needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    needs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
#else
    ncclDevCommRequirements needs{};
#endif
    needs.ginSignalCount = 2 * ranks;
    needs.ginCounterCount = ranks;
    ncclDevComm device;
    CHECK(ncclDevCommCreate(comm, &needs, &device));

    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    exchange<<<1, THREADS, 0, stream>>>(device, from, to, bytes, 0, 2, taken);
    wait(comm, stream, "the first two rounds");
    exchange<<<1, THREADS, 0, stream>>>(device, from, to, bytes, 2, rounds, taken);
    wait(comm, stream, "the exchange");
    values<<<1, THREADS, 0, stream>>>(device, from, to, bytes);
    wait(comm, stream, "values, signals and counters");
    if (HAS_GETS) {
        CHECK(cudaMemsetAsync(inbox, 0xFF, ranks * bytes, stream));  // the first plane, to which nobody puts any more
        gets<<<1, THREADS, 0, stream>>>(device, from, to, bytes);
        wait(comm, stream, "gets and words");
    }

    CHECK(cudaMemcpy(in.data(), inbox, in.size(), cudaMemcpyDeviceToHost));
    size_t wrong = 0;
    for (int plane = 0; plane < 2; plane++)
        for (int peer = 0; peer < ranks; peer++)
            for (size_t at = 0; at < bytes; at++)
                wrong += in[(plane * ranks + peer) * bytes + at] != byte_of(peer, rank, at);
    for (int peer = 0; peer < ranks; peer++) {
        uint64_t value;
        memcpy(&value, &in[2 * ranks * bytes + 8 * peer], sizeof value);
        wrong += value != uint64_t(1000 * peer + rank);
        memcpy(&value, &in[2 * ranks * bytes + 8 * (ranks + peer)], sizeof value);
        wrong += value != (HAS_GETS ? ADDED : 0);
    }
    int version;
    CHECK(ncclGetVersion(&version));
    printf("rank %d of %d, NCCL %d%s: %d rounds of %zu bytes, %.2f us each, %zu wrong\n", rank, ranks, version,
           HAS_GETS ? " with gets" : "", rounds, bytes, *taken / 1000.0 / rounds, wrong);
    fflush(stdout);

    CHECK(ncclDevCommDestroy(comm, &device));
    CHECK(ncclCommWindowDeregister(comm, from));
    CHECK(ncclCommWindowDeregister(comm, to));
    CHECK(ncclMemFree(outbox));
    CHECK(ncclMemFree(inbox));
    CHECK(ncclCommDestroy(comm));
    return wrong ? 1 : 0;
}
