"""Write from kernel threads into the memory of another queue pair, inside one process.

    python examples/first_put.py

Needs no extra. If there is a GPU, it runs there with `pip install -e '.[cuda]'`.
"""

import sys

import numpy as np

import gpunetio as gn
from gpunetio import device as dev

THREADS, NBYTES = 4, 64


@gn.kernel
def put_pieces(qp, raddr, rkey, laddr, lkey, nbytes, statuses):
    me = dev.global_id()
    at = me * nbytes
    ticket = dev.put(qp, raddr + at, rkey, laddr + at, lkey, nbytes)
    dev.st64(statuses + 8 * me, dev.wait(qp, ticket))


def main() -> None:
    with gn.open("soft0") as nic, gn.Gpu() as gpu:
        pd = nic.create_pd()
        near, far = gpu.create_qp(pd, timeout=10), gpu.create_qp(pd)
        near.connect(far)

        source, target = (gpu.alloc(THREADS * NBYTES, gn.MemType.CPU_GPU) for _ in range(2))
        source.array[:] = np.arange(source.nbytes)
        here, there = pd.register(source), pd.register(target)

        statuses = gpu.alloc(8 * THREADS, gn.MemType.CPU_GPU)
        launch = put_pieces[1, THREADS, gpu](near, there.address, there.rkey, here.address, here.lkey, NBYTES, statuses)
        if not launch.wait(timeout=60):
            sys.exit("the kernel did not end")
        if statuses.array.any():
            sys.exit(f"statuses {statuses.array.view(np.int64)}: {near.last_error()}")
        right = np.count_nonzero(target.array == source.array)
        print(f"{THREADS} threads put {right} of {target.nbytes} bytes on {gpu.name}")


if __name__ == "__main__":
    main()
