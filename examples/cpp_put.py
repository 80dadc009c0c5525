"""Load a shared object that nvcc has built from cpp_put.cu. Its kernel puts through a queue pair of gpunetio.

    python examples/cpp_put.py cpp_put.so

Needs a GPU, `pip install -e '.[cuda]'`, and the shared object: cpp_put.cu has the command lines that build it.
"""

import argparse
import ctypes
import sys
from pathlib import Path

import numpy as np

import gpunetio as gn
from gpunetio.device.library import foreign_kernels

BLOCKS, THREADS, NBYTES = 2, 64, 256


def main(path: str) -> None:
    try:
        run_put_pieces = ctypes.CDLL(str(Path(path).resolve())).run_put_pieces
    except OSError as error:
        sys.exit(f"{error}; cpp_put.cu has the command lines that build it")
    run_put_pieces.argtypes = [ctypes.c_int] * 2 + [ctypes.c_longlong] * 7
    with gn.Gpu(0) as gpu, gn.open("soft0") as nic:
        pd = nic.create_pd()
        near, far = gpu.create_qp(pd), gpu.create_qp(pd)
        near.connect(far)
        source = gpu.alloc(BLOCKS * THREADS * NBYTES, gn.MemType.CPU_GPU)
        target = gpu.alloc(BLOCKS * THREADS * NBYTES, gn.MemType.CPU_GPU)
        status = gpu.alloc(BLOCKS * THREADS * 8, gn.MemType.CPU_GPU)
        source.array[:] = np.arange(source.nbytes) % 251
        status.array[:] = 0xFF
        from_mr, to_mr = pd.register(source), pd.register(target)
        with foreign_kernels():
            error = run_put_pieces(
                BLOCKS, THREADS, near.device_address, to_mr.address, to_mr.rkey, from_mr.address, from_mr.lkey, NBYTES,
                status.device_address,
            )
        failed = np.count_nonzero(status.array.view(np.int64))
        right = np.count_nonzero(target.array == source.array)
        said = f"CUDA error {error}, {failed} failed puts, {right} of {target.nbytes} bytes arrived"
        if error or failed or right != target.nbytes:
            sys.exit(said)
        print(said)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", help="the shared object")
    main(parser.parse_args().library)
