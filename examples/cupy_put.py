"""Launch a CUDA C++ kernel in a RawModule of CuPy. It puts through a queue pair of gpunetio.

    python examples/cupy_put.py

Needs a GPU and `pip install -e '.[cuda]' cupy-cuda13x`. CuPy does not link, so cuda.core makes the cubin for it.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

try:
    import cupy
    from cuda.core import Linker, LinkerOptions, ObjectCode, Program, ProgramOptions
except ModuleNotFoundError as missing:
    sys.exit(f"no module {missing.name}: pip install -e '.[cuda]' cupy-cuda13x")

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


def link(arch: str) -> bytes:
    """Return the kernel with the device functions inlined, as a cubin. This needs no GPU."""
    options = ProgramOptions(arch=arch, relocatable_device_code=True, link_time_optimization=True)
    kernel = Program(library.header() + KERNEL, "c++", options).compile("ltoir")
    functions = ObjectCode.from_ltoir(library.build(arch)["ltoir"])
    linked = Linker(kernel, functions, options=LinkerOptions(arch=arch, link_time_optimization=True)).link("cubin")
    return bytes(linked.code)


def main() -> None:
    with gn.Gpu(0) as gpu, gn.open("soft0") as nic, tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "put_pieces.cubin")  # CuPy takes cubins from files
        cubin.write_bytes(link(f"sm_{cupy.cuda.Device(0).compute_capability}"))
        put_pieces = cupy.RawModule(path=str(cubin)).get_function("put_pieces")
        pd = nic.create_pd()
        near, far = gpu.create_qp(pd), gpu.create_qp(pd)
        near.connect(far)
        source = gpu.alloc(BLOCKS * THREADS * NBYTES, gn.MemType.CPU_GPU)
        target = gpu.alloc(BLOCKS * THREADS * NBYTES, gn.MemType.CPU_GPU)
        source.array[:] = np.arange(source.nbytes) % 251
        from_mr, to_mr = pd.register(source), pd.register(target)
        status = cupy.full(BLOCKS * THREADS, -1, cupy.int64)
        where = (near.device_address, to_mr.address, to_mr.rkey, from_mr.address, from_mr.lkey, NBYTES)
        with library.foreign_kernels():
            put_pieces((BLOCKS,), (THREADS,), (*map(np.int64, where), status))
            cupy.cuda.get_current_stream().synchronize()
        failed = int(cupy.count_nonzero(status))
        right = np.count_nonzero(target.array == source.array)
        said = f"{failed} failed puts, {right} of {target.nbytes} bytes arrived"
        if failed or right != target.nbytes:
            sys.exit(said)
        print(said)


if __name__ == "__main__":
    main()
