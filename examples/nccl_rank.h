// What ranks of a program need beside NCCL's device API: errors, the way to the first rank, and waits with a deadline.

#pragma once

#include <algorithm>
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
