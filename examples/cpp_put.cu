// A CUDA C++ kernel that puts through a queue pair of gpunetio. cpp_put.py loads and runs it; to build it:
//
//     gpunetio device-lib --arch sm_90 -o .
//     nvcc -arch=sm_90 -dlto -dc -Xcompiler -fPIC cpp_put.cu -o cpp_put.o
//     nvcc -arch=sm_90 -dlto -dlink -Xcompiler -fPIC cpp_put.o gpunetio_device.ltoir -o cpp_put.link.o
//     nvcc -shared -nodlink cpp_put.o cpp_put.link.o -o cpp_put.so

#include "gpunetio_device.cuh"

// Each thread puts a piece of its own and waits for it: GPUNETIO_OK, or an error.
__global__ void put_pieces(long long qp, long long raddr, long long rkey, long long laddr, long long lkey,
                           long long nbytes, long long *status)
{
    const long long me = gpunetio_global_id(), at = me * nbytes;
    const long long ticket = gpunetio_put(qp, raddr + at, rkey, laddr + at, lkey, nbytes);
    status[me] = gpunetio_wait(qp, ticket);
}

// For Python: launch it, wait for its end, and return the CUDA error.
extern "C" int run_put_pieces(int blocks, int threads, long long qp, long long raddr, long long rkey, long long laddr,
                              long long lkey, long long nbytes, long long *status)
{
    put_pieces<<<blocks, threads>>>(qp, raddr, rkey, laddr, lkey, nbytes, status);
    const cudaError_t launched = cudaGetLastError();
    return launched != cudaSuccess ? launched : cudaDeviceSynchronize();
}
