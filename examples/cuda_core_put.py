"""Compile and link a CUDA C++ kernel with cuda.core at run time. It puts through a queue pair of gpunetio.

    python examples/cuda_core_put.py

Needs a GPU and `pip install -e '.[cuda]'`.
"""

import sys

import numpy as np

try:
    from cuda.core import Device, LaunchConfig, Linker, LinkerOptions, ObjectCode, Program, ProgramOptions, launch
except ModuleNotFoundError as missing:
    sys.exit(f"no module {missing.name}: pip install -e '.[cuda]'")

import gpunetio as gn
from gpunetio.device import library

BLOCKS, THREADS, NBYTES = 2, 64, 256

KERNEL = """
extern "C" __global__ void put_pieces(long long qp, long long raddr, long long rkey, long long laddr, long long lkey,
                                      long long nbytes, long long *status)
{
    const long long me = gpunetio_global_id(), at = me * nbytes;
    const long long ticket = gpunetio_put(qp, raddr + at, rkey, laddr + at, lkey, nbytes);
    status[me] = gpunetio_wait(qp, ticket);
}
"""


def link(arch: str) -> ObjectCode:
    """Return the kernel with the device functions inlined, as a cubin. This needs no GPU."""
    options = ProgramOptions(arch=arch, relocatable_device_code=True, link_time_optimization=True)
    kernel = Program(library.header() + KERNEL, "c++", options).compile("ltoir")
    functions = ObjectCode.from_ltoir(library.build(arch)["ltoir"])
    return Linker(kernel, functions, options=LinkerOptions(arch=arch, link_time_optimization=True)).link("cubin")


def main() -> None:
    with gn.Gpu(0) as gpu, gn.open("soft0") as nic:
        device = Device(0)
        device.set_current()
        kernel, stream = link(f"sm_{device.arch}").get_kernel("put_pieces"), device.create_stream()
        pd = nic.create_pd()
        near, far = gpu.create_qp(pd), gpu.create_qp(pd)
        near.connect(far)
        source = gpu.alloc(BLOCKS * THREADS * NBYTES, gn.MemType.CPU_GPU)
        target = gpu.alloc(BLOCKS * THREADS * NBYTES, gn.MemType.CPU_GPU)
        status = gpu.alloc(BLOCKS * THREADS * 8, gn.MemType.CPU_GPU)
        source.array[:] = np.arange(source.nbytes) % 251
        status.array[:] = 0xFF
        from_mr, to_mr = pd.register(source), pd.register(target)
        with library.foreign_kernels():
            launch(
                stream, LaunchConfig(grid=BLOCKS, block=THREADS), kernel,
                near.device_address, to_mr.address, to_mr.rkey, from_mr.address, from_mr.lkey, NBYTES,
                status.device_address,
            )
            stream.sync()
        failed = np.count_nonzero(status.array.view(np.int64))
        right = np.count_nonzero(target.array == source.array)
        said = f"{failed} failed puts, {right} of {target.nbytes} bytes arrived"
        if failed or right != target.nbytes:
            sys.exit(said)
        print(said)


if __name__ == "__main__":
    main()
