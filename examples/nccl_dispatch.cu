// Dispatch and combine, as a mixture of experts does it, by NCCL's device API. nccl_dispatch.py builds and runs this.
//
//     nccl_dispatch RANK RANKS ID_FILE TOKENS HIDDEN CONTEXTS ROUNDS
//
// A round: each rank puts its tokens of HIDDEN bytes to the ranks that `goes` names for them, and these put an answer back.
// Blocks share CONTEXTS contexts, each with a queue to every peer. There are at most as many blocks as leave some SMs to
// NICs that are on the GPU. Arrivals and answers are counted by VA signals: words in the window, to which the sender's NIC
// adds. A barrier ends the round.
//
// Needs NCCL 2.30.7 or later.

#include "nccl_rank.h"

constexpr int THREADS = 64;
constexpr int DEPTH = 1024;  // slots of a queue
constexpr int FOR_NICS = 8;  // SMs

// Whether token `token` of rank `from` goes to rank `to`: to about every second one.
__host__ __device__ static bool goes(int from, int token, int to)
{
    uint32_t mixed = (uint32_t(from) * 73856093u) ^ (uint32_t(token) * 19349663u) ^ (uint32_t(to) * 83492791u);
    mixed = (mixed ^ mixed >> 13) * 0x5BD1E995u;
    return (mixed >> 15 & 1) != 0;
}

__host__ __device__ static uint8_t byte_of(int rank, int token, size_t at)
{
    return uint8_t(rank * 31 + token * 7 + at % 251);
}

// What the expert on `rank` makes of a byte, and of the 16 bytes of a line.
static uint8_t answer(int rank, uint8_t byte) { return uint8_t(byte + rank + 1); }

__device__ static uint4 answer(int rank, uint4 line)
{
    const unsigned more = 0x01010101u * uint8_t(rank + 1);
    return {__vadd4(line.x, more), __vadd4(line.y, more), __vadd4(line.z, more), __vadd4(line.w, more)};
}

// Where things lie in the window, which all ranks have alike.
struct Layout {
    int ranks, tokens;
    size_t hidden;

    __host__ __device__ size_t token(int n) const { return n * hidden; }
    __host__ __device__ size_t arrival(int from, int n) const { return token(tokens) + (size_t(from) * tokens + n) * hidden; }
    __host__ __device__ size_t back(int from, int n) const { return arrival(ranks, 0) + (size_t(from) * tokens + n) * hidden; }
    __host__ __device__ size_t arrived(int from) const { return back(ranks, 0) + 8 * from; }
    __host__ __device__ size_t answered(int from) const { return arrived(ranks) + 8 * from; }
    __host__ __device__ size_t bytes() const { return answered(ranks); }
};

// --- kernels -----------------------------------------------------------------------------------------------------------

__global__ void dispatch(ncclDevComm comm, ncclWindow_t window, Layout at, int contexts)
{
    const ncclTeam world = ncclTeamWorld(comm);
    for (int context = blockIdx.x; context < contexts; context += gridDim.x) {
        ncclGin gin{comm, context};
        for (int peer = threadIdx.x; peer < world.nRanks; peer += blockDim.x) {
            uint64_t sent = 0;
            for (int token = context; token < at.tokens; token += contexts) {
                if (!goes(world.rank, token, peer)) continue;
                gin.put(world, peer, window, at.arrival(world.rank, token), window, at.token(token), at.hidden);
                sent++;
            }
            // The word counts what has arrived: the NIC adds behind the puts of this context.
            gin.signal(world, peer, ncclGin_StrongVASignalAdd{window, at.arrived(world.rank), sent});
        }
    }
}

// `expected` has how many tokens come from each rank, and goes on with how many answers.
__global__ void combine(ncclDevComm comm, ncclWindow_t window, uint8_t *memory, Layout at, int contexts,
                        const uint64_t *expected, int round)
{
    const ncclTeam world = ncclTeamWorld(comm);
    for (int context = blockIdx.x; context < contexts; context += gridDim.x) {
        ncclGin gin{comm, context};
        for (int from = 0; from < world.nRanks; from++) {
            if (threadIdx.x == 0)
                gin.waitSignal(ncclCoopThread(), window, at.arrived(from), expected[from] * (round + 1));
            __syncthreads();
            for (int token = context; token < at.tokens; token += contexts) {
                if (!goes(from, token, world.rank)) continue;
                uint4 *lines = reinterpret_cast<uint4 *>(memory + at.arrival(from, token));
                for (size_t i = threadIdx.x; i < at.hidden / sizeof *lines; i += blockDim.x)
                    lines[i] = answer(world.rank, lines[i]);
                gin.put(world, from, window, at.back(world.rank, token), window, at.arrival(from, token), at.hidden,
                        ncclGin_StrongVASignalInc{window, at.answered(world.rank)}, ncclGin_None{}, ncclCoopCta());
            }
        }
    }
    ncclGin gin{comm, 0};
    for (int from = threadIdx.x; from < world.nRanks; from += blockDim.x)
        gin.waitSignal(ncclCoopThread(), window, at.answered(from), expected[world.nRanks + from] * (round + 1));
}

// Waits for the contexts' own requests by their queues: what a library does that knows NCCL's structures.
__global__ void drain(ncclDevComm comm, int contexts)
{
#ifdef __CUDA_ARCH__  // only then do NCCL's headers have the structures
    for (int context = blockIdx.x; context < contexts; context += gridDim.x) {
        ncclGin gin{comm, context};
        const auto *structures = static_cast<const ncclGinGdakiGPUContext *>(gin._ginHandle);
        for (int peer = threadIdx.x; peer < ncclTeamWorld(comm).nRanks; peer += blockDim.x) {
            doca_gpu_dev_verbs_qp *queue = structures[gin.contextId].gdqp + peer;
            const uint64_t posted = queue->sq_rsvd_index;
            if (posted != 0) doca_gpu_dev_verbs_wait(queue, posted - 1);
        }
    }
#endif
}

__global__ void barrier(ncclDevComm comm)
{
    ncclGinBarrier(ncclCoopCta(), ncclGin{comm, 0}, ncclTeamTagWorld(), 0);
}

// --- host --------------------------------------------------------------------------------------------------------------

int main(int argc, char **argv)
{
    if (argc != 8) fail("usage", "nccl_dispatch RANK RANKS ID_FILE TOKENS HIDDEN CONTEXTS ROUNDS");
    const int rank = atoi(argv[1]), ranks = atoi(argv[2]), contexts = atoi(argv[6]), rounds = atoi(argv[7]);
    const Layout at{ranks, atoi(argv[4]), strtoull(argv[5], nullptr, 0)};
    if (at.hidden % 16 != 0) fail(argv[5], "HIDDEN is not a multiple of 16");
    int devices = 0;
    CHECK(cudaGetDeviceCount(&devices));
    CHECK(cudaSetDevice(rank % devices));

    ncclComm_t comm;
    CHECK(ncclCommInitRank(&comm, ranks, meet(rank, argv[3]), rank));
    uint8_t *memory;
    CHECK(ncclMemAlloc(reinterpret_cast<void **>(&memory), at.bytes()));
    std::vector<uint8_t> image(at.bytes(), 0);
    std::vector<uint64_t> expected(2 * ranks, 0);
    for (int token = 0; token < at.tokens; token++) {
        for (size_t i = 0; i < at.hidden; i++) image[at.token(token) + i] = byte_of(rank, token, i);
        for (int other = 0; other < ranks; other++) {
            expected[other] += goes(other, token, rank);
            expected[ranks + other] += goes(rank, token, other);
        }
    }
    CHECK(cudaMemcpy(memory, image.data(), image.size(), cudaMemcpyHostToDevice));
    uint64_t *counts;
    CHECK(cudaMalloc(&counts, 8 * expected.size()));
    CHECK(cudaMemcpy(counts, expected.data(), 8 * expected.size(), cudaMemcpyHostToDevice));

    ncclWindow_t window;
    CHECK(ncclCommWindowRegister(comm, memory, at.bytes(), &window, NCCL_WIN_COLL_SYMMETRIC));
    ncclDevCommRequirements needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    needs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
    needs.ginContextCount = contexts;
    needs.ginQueueDepth = DEPTH;
    needs.worldGinBarrierCount = 1;
    ncclDevComm device;
    CHECK(ncclDevCommCreate(comm, &needs, &device));
    if (device.ginContextCount < contexts) fail("contexts", "NCCL has made fewer than asked for");

    int sms;
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, rank % devices));
    const int blocks = std::min(contexts, sms - FOR_NICS);
    cudaStream_t stream;
    cudaEvent_t begin, end;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (int round = 0; round < rounds; round++) {
        if (round == 1 || rounds == 1) CHECK(cudaEventRecord(begin, stream));
        dispatch<<<blocks, THREADS, 0, stream>>>(device, window, at, contexts);
        combine<<<blocks, THREADS, 0, stream>>>(device, window, memory, at, contexts, counts, round);
        drain<<<blocks, THREADS, 0, stream>>>(device, contexts);
        barrier<<<1, THREADS, 0, stream>>>(device);
    }
    CHECK(cudaEventRecord(end, stream));
    wait(comm, stream, "dispatch and combine");
    float milliseconds;
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end));

    CHECK(cudaMemcpy(image.data(), memory, image.size(), cudaMemcpyDeviceToHost));
    size_t wrong = 0;
    for (int token = 0; token < at.tokens; token++)
        for (int other = 0; other < ranks; other++)
            for (size_t i = 0; goes(rank, token, other) && i < at.hidden; i++)
                wrong += image[at.back(other, token) + i] != answer(other, byte_of(rank, token, i));
    printf("rank %d of %d: %d tokens of %zu bytes by %d contexts, %.0f us a round, %zu wrong\n", rank, ranks, at.tokens,
           at.hidden, contexts, 1000.0 * milliseconds / (rounds > 1 ? rounds - 1 : 1), wrong);
    fflush(stdout);

    CHECK(ncclDevCommDestroy(comm, &device));
    CHECK(ncclCommWindowDeregister(comm, window));
    CHECK(ncclMemFree(memory));
    CHECK(ncclCommDestroy(comm));
    return wrong ? 1 : 0;
}
