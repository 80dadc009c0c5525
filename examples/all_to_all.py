"""Every process sends a block of numbers to every other process, from kernels.

    python examples/all_to_all.py                       starts four processes
    python examples/all_to_all.py --rank 0 --size 2     one process; start rank 1 elsewhere, on this host or another
    mpirun -n 4 python examples/all_to_all.py           four processes under MPI
    torchrun --nproc-per-node 4 examples/all_to_all.py  four processes under PyTorch

Needs no extra by itself, `pip install -e '.[mpi]'` under mpirun, and `'.[torch]'` under torchrun.

`gpunetio.mesh` connects the processes. One thread per peer puts the block for that peer into the peer's memory, with a
signal behind it, and then waits for the signals of all other ranks. Each process checks the numbers that it received.
"""

import argparse
import multiprocessing as mp
import os
import sys
import time

import numpy as np

import gpunetio as gn
from gpunetio import device as dev
from gpunetio.device.status import NAMES

DEADLINE = 20.0  # seconds that a kernel waits for a completion, or for the other ranks
SECONDS = 240.0  # for a launch, which may have to compile first
ROW = gn.rendezvous.Mesh.ROW
STARTED_BY = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "TORCHELASTIC_RUN_ID")


@gn.kernel
def all_to_all(mesh, rank, size, nbytes, laddr, lkey, statuses):
    """Exchange blocks. Memory has `size` blocks to send, `size` blocks to receive, the flag, and its old values."""
    peer = dev.global_id()
    status = dev.OK
    if peer != rank:
        row = mesh + ROW * peer
        qp, raddr, rkey = dev.ld64(row), dev.ld64(row + 8), dev.ld64(row + 16)
        inbox = raddr + (size + rank) * nbytes
        flag = raddr + 2 * size * nbytes
        old = laddr + 2 * size * nbytes + 8 + 8 * peer
        ticket = dev.put_signal(qp, inbox, rkey, laddr + peer * nbytes, lkey, nbytes, flag, rkey, old, lkey, 1)
        status = dev.wait(qp, ticket)
        if status == dev.OK:
            status = dev.wait_word(qp, laddr + 2 * size * nbytes, size - 1)
    dev.st64(statuses + 8 * peer, status)


def block(sender: int, receiver: int, numbers: int) -> np.ndarray:
    """Return the block that one rank sends to another."""
    return np.random.default_rng([sender, receiver]).random(numbers)


def exchange(ranks: gn.rendezvous.Rendezvous, target: str, numbers: int) -> None:
    rank, size, nbytes = ranks.rank, ranks.size, 8 * numbers
    with gn.open() as nic, gn.Gpu({"cpu": "host"}.get(target, target)) as gpu:
        pd = nic.create_pd()
        memory = gpu.alloc(2 * size * nbytes + 8 + 8 * size, gn.MemType.CPU_GPU)
        outbox, inbox = memory.array[: 2 * size * nbytes].view(np.float64).reshape(2, size, numbers)
        outbox[:] = [block(rank, peer, numbers) for peer in range(size)]
        inbox[rank] = outbox[rank]
        statuses = gpu.alloc(8 * size, gn.MemType.CPU_GPU)

        with gn.mesh(pd=pd, gpu=gpu, memory=memory, via=ranks, timeout=DEADLINE) as mesh:
            assert mesh.memory is not None
            launch = all_to_all[1, size, gpu](
                mesh, rank, size, nbytes, mesh.memory.address, mesh.memory.lkey, statuses
            )
            if not launch.wait(timeout=SECONDS):
                sys.exit("the kernel did not end")
            for peer, status in enumerate(statuses.array.view(np.int64)):
                if status != dev.OK:
                    sys.exit(f"rank {rank}, thread of rank {peer}: {NAMES[int(status)]}")
        wrong = [peer for peer in range(size) if (inbox[peer] != block(peer, rank, numbers)).any()]
        if wrong:
            sys.exit(f"rank {rank}: wrong numbers from ranks {wrong}")
        print(f"rank {rank} of {size}: {numbers} right numbers from each rank, by kernels on {gpu.name}", flush=True)


def meet(rank: int, size: int, options: argparse.Namespace) -> None:
    with gn.rendezvous.TcpRendezvous(rank, size, options.address, options.port) as ranks:
        exchange(ranks, options.target, options.numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description="Every process sends numbers to every other process.")
    parser.add_argument("--rank", type=int, help="rank of this process, if you start each by hand")
    parser.add_argument("--size", type=int, default=4, help="number of processes (default %(default)s)")
    parser.add_argument("--address", default="127.0.0.1", help="address of rank 0 (default %(default)s)")
    parser.add_argument("--port", type=int, default=18521, help="TCP port of rank 0 (default %(default)s)")
    parser.add_argument("--target", choices=["auto", "cpu"], default="auto", help="where kernels run")
    parser.add_argument("--numbers", type=int, default=4096, help="numbers in a block (default %(default)s)")
    options = parser.parse_args()
    try:
        if any(name in os.environ for name in STARTED_BY):
            with gn.rendezvous.from_environment() as ranks:
                exchange(ranks, options.target, options.numbers)
        elif options.rank is not None:
            meet(options.rank, options.size, options)
        else:
            start = mp.get_context("spawn").Process
            children = [start(target=meet, args=(rank, options.size, options)) for rank in range(options.size)]
            for child in children:
                child.start()
            deadline = time.monotonic() + 2 * SECONDS
            for child in children:
                child.join(max(0.0, deadline - time.monotonic()))
                child.kill()  # nothing happens to one that has ended
            for child in children:
                child.join(SECONDS)
            sys.exit(max(1 if child.exitcode is None else abs(child.exitcode) for child in children))
    except gn.DocaError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
