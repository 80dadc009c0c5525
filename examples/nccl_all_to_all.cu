// An all-to-all by NCCL's device API: kernels put to all ranks, and no CPU takes part. nccl_all_to_all.py builds and runs this.
//
//     nccl_all_to_all RANK RANKS ID_FILE BYTES ROUNDS
//
// Round r uses plane r % 2 of the inbox, and a rank begins round r + 2 only when all ranks have begun round r + 1. So nobody
// writes to a plane that is still read. Each rank has a signal for each other rank: one for all could count a fast rank twice
// in place of a slow one.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device.h>
#include <unistd.h>

using Clock = std::chrono::steady_clock;
constexpr auto DEADLINE = std::chrono::seconds(60);  // NCCL's kernels wait for ever
constexpr int THREADS = 64;
constexpr uint64_t ADDED = 5, ADDED_ALONE = 2;

[[noreturn]] static void fail(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s\n", what, why);
    fflush(nullptr);
    _exit(1);  // kernels that wait for ever would also hold exit() up
}

static void check(cudaError_t error, const char *what)
{
    if (error != cudaSuccess) fail(what, cudaGetErrorString(error));
}

static void check(ncclResult_t result, const char *what)
{
    if (result != ncclSuccess) fail(what, ncclGetErrorString(result));
}

#define CHECK(call) check(call, #call)

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

// --- host --------------------------------------------------------------------------------------------------------------

// Rank 0 writes the file, under another name until it is complete.
static ncclUniqueId meet(int rank, const char *path)
{
    ncclUniqueId id;
    if (rank == 0) {
        const std::string fresh = std::string(path) + ".new";
        CHECK(ncclGetUniqueId(&id));
        FILE *file = fopen(fresh.c_str(), "wb");
        if (!file || fwrite(&id, sizeof id, 1, file) != 1 || fclose(file) || rename(fresh.c_str(), path))
            fail(path, "cannot be written");
        return id;
    }
    for (const auto end = Clock::now() + DEADLINE; Clock::now() < end;) {
        if (FILE *file = fopen(path, "rb")) {
            const bool complete = fread(&id, sizeof id, 1, file) == 1;
            fclose(file);
            if (complete) return id;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    fail(path, "rank 0 has not written it");
}

static void wait(ncclComm_t comm, cudaStream_t stream, const char *what)
{
    for (const auto end = Clock::now() + DEADLINE; Clock::now() < end;) {
        const cudaError_t state = cudaStreamQuery(stream);
        if (state == cudaSuccess) return;
        if (state != cudaErrorNotReady) check(state, what);
        ncclResult_t error = ncclSuccess;
        CHECK(ncclCommGetAsyncError(comm, &error));
        if (error != ncclSuccess && error != ncclInProgress) check(error, what);
        std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    fail(what, "has not ended by its deadline");
}

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
    const size_t inbox_bytes = 2 * ranks * bytes + 8 * ranks;
    void *outbox, *inbox;
    CHECK(ncclMemAlloc(&outbox, ranks * bytes));
    CHECK(ncclMemAlloc(&inbox, inbox_bytes));
    std::vector<uint8_t> out(ranks * bytes), in(inbox_bytes);
    for (int peer = 0; peer < ranks; peer++)
        for (size_t at = 0; at < bytes; at++) out[peer * bytes + at] = byte_of(rank, peer, at);
    CHECK(cudaMemcpy(outbox, out.data(), out.size(), cudaMemcpyHostToDevice));
    CHECK(cudaMemset(inbox, 0xFF, inbox_bytes));
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
    }
    printf("rank %d of %d: %d rounds of %zu bytes, %.2f us each, %zu wrong\n", rank, ranks, rounds, bytes,
           *taken / 1000.0 / rounds, wrong);
    fflush(stdout);

    CHECK(ncclDevCommDestroy(comm, &device));
    CHECK(ncclCommWindowDeregister(comm, from));
    CHECK(ncclCommWindowDeregister(comm, to));
    CHECK(ncclMemFree(outbox));
    CHECK(ncclMemFree(inbox));
    CHECK(ncclCommDestroy(comm));
    return wrong ? 1 : 0;
}
