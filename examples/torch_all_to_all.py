"""Every GPU sends a slice of a PyTorch tensor to every other GPU, from a kernel. Then NCCL does the same.

    python examples/torch_all_to_all.py                          starts a process for each GPU
    python examples/torch_all_to_all.py --gpu twin --ranks 2     the same without a GPU and without PyTorch

Needs `pip install -e '.[torch,cuda]'`, and no extra with `--gpu twin`.

Each process, a rank, has a tensor to send, a tensor to receive into, and a NIC whose engine is on its GPU. One launch
makes many exchanges. No CPU takes part in them. The NIC writes to the other GPUs without packets if the tensors are in
memory of `cudaMalloc`, as PyTorch's are by default. Tensors in expandable segments are not.

The slices of step s arrive in plane s % 2. Two planes are enough:

- A rank begins step s + 2 only when it has the signals of step s + 1 from all ranks.
- A rank sends its signals of step s + 1 only when it has used what it received in step s.

So nobody writes to a plane that is still in use. The process reads the last plane between two launches. That is safe,
too: the next launch of another rank does not get beyond its first step, which writes to the other plane.
"""

import argparse
import datetime
import multiprocessing as mp
import statistics
import sys
import time
from multiprocessing.connection import wait as wait_for_any
from typing import Any

import numpy as np

try:
    import torch
except ModuleNotFoundError:
    torch = None

import gpunetio as gn
from gpunetio import device as dev
from gpunetio.device.status import NAMES
from gpunetio.rendezvous import Mesh, Rendezvous, TcpRendezvous

DEADLINE = 10.0  # seconds that a kernel waits for a completion, or for the other ranks
SECONDS = 120.0  # for a launch, and for the other ranks between launches, which may have to compile first
CHECKED = 5  # exchanges in a launch whose results all depend on each other
ADDRESS = "127.0.0.1"  # where the ranks meet
MOST_RANKS = 32  # the warps of a block
ROW = Mesh.ROW


@gn.kernel
def all_to_all(mesh, own_qp, rank, nbytes, plane_bytes, send, send_lkey, inbox, inbox_lkey, first, steps, add, out):
    """Exchange slices in steps `first`, `first` + 1, …, with a warp for each rank.

    `inbox` has two planes, a flag for each rank, and the old values of the flags at the other ranks. With `add`, a step
    sends what the step before it has received, plus `add`. `out` gets the status, and the nanoseconds of all steps
    but the first.
    """
    me, threads, warp = dev.thread_idx(), dev.block_dim(), dev.warp_size()
    peer, size, flags = me // warp, threads // warp, 2 * plane_bytes
    row = mesh + ROW * peer
    raddr, rkey = dev.ld64(row + 8), dev.ld64(row + 16)
    qp = own_qp if peer == rank else dev.ld64(row)
    status, begin = dev.OK, dev.clock_ns()
    for step in range(first, first + steps):
        plane = step % 2 * plane_bytes
        if dev.lane_id() == 0:
            ticket = dev.put_signal(
                qp, raddr + plane + rank * nbytes, rkey, send + peer * nbytes, send_lkey, nbytes,
                raddr + flags + 8 * rank, rkey, inbox + flags + 8 * (size + peer), inbox_lkey, 1, dev.EXCLUSIVE
            )
            status = dev.wait(qp, ticket, dev.EXCLUSIVE)  # the NIC has read the slice: it may change
            if status == dev.OK:
                status = dev.wait_word(qp, inbox + flags + 8 * peer, step + 1)
        status = dev.block_min(status)  # an error of any rank; all slices are there
        if status != dev.OK:
            break
        if step == first:
            begin = dev.clock_ns()  # now all ranks have begun
        if add:
            for i in range(me, size * nbytes // 8, threads):
                dev.st64(send + 8 * i, dev.ld64(inbox + plane + 8 * i) + add)
            dev.block_sync()
    if me == 0:
        dev.st64(out + 8, dev.clock_ns() - begin)
        dev.st64(out, status)


class Tensors:
    """Numbers of 64 bits on a CUDA device, as tensors of PyTorch."""

    def __init__(self, gpu: gn.Gpu, rank: int):
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        self.name = torch.cuda.get_device_name(self.device)

    def zeros(self, count: int) -> Any:
        tensor = torch.zeros(count, dtype=torch.int64, device=self.device)
        self.finish()
        return tensor

    def arange(self, count: int) -> Any:
        return torch.arange(count, device=self.device)

    def write(self, tensor: Any, numbers: Any) -> None:
        tensor[: numbers.numel()] = numbers.reshape(-1)
        self.finish()

    def read(self, tensor: Any, first: int, count: int) -> Any:
        return tensor[first : first + count]

    def equal(self, one: Any, other: Any) -> bool:
        return torch.equal(one, other)

    def finish(self) -> None:
        """Wait until PyTorch's work is done: the NIC does not know of its streams."""
        torch.cuda.current_stream().synchronize()


class TwinMemory:
    """The same in memory of the twin of a GPU, which NumPy reads and writes by copies."""

    def __init__(self, gpu: gn.Gpu, rank: int):
        self.gpu, self.name = gpu, gpu.name

    def zeros(self, count: int) -> Any:
        return self.gpu.alloc(8 * count)

    def arange(self, count: int) -> Any:
        return np.arange(count)

    def write(self, memory: Any, numbers: Any) -> None:
        memory.write(np.ascontiguousarray(numbers).reshape(-1))

    def read(self, memory: Any, first: int, count: int) -> Any:
        return memory.read(8 * first, 8 * count).view(np.int64)

    def equal(self, one: Any, other: Any) -> bool:
        return np.array_equal(one, other)


class Exchange:
    """What a rank sends and receives: for each size, slices of that many bytes."""

    def __init__(self, ranks: Rendezvous, place: Any, largest: int):
        self.ranks, self.place, self.plane = ranks, place, ranks.size * largest // 8
        self.send = place.zeros(self.plane)
        self.inbox = place.zeros(2 * self.plane + 2 * ranks.size)
        self.mine = self.expected = None

    def choose(self, nbytes: int) -> None:
        """Make the numbers for this size: slice p of the tensor of rank r becomes slice r of the tensor of rank p."""
        size, rank = self.ranks.size, self.ranks.rank
        numbers = self.place.arange(size * size * nbytes // 8).reshape(size, size, nbytes // 8)
        self.mine, self.expected = numbers[rank].reshape(-1), numbers[:, rank].reshape(-1)

    def fill(self, more: int) -> None:
        """Set what this rank sends. `more` is added: with a new one, nothing left over passes for received."""
        self.place.write(self.send, self.mine + more)

    def check(self, plane: int, more: int, how: str, exchanges: int = 1) -> None:
        """Exit unless a plane has what was expected. An even number of exchanges brings every slice back."""
        expected = (self.expected if exchanges % 2 else self.mine) + more
        found = self.place.read(self.inbox, plane * self.plane, len(expected))
        if not self.place.equal(found, expected):
            nbytes = 8 * len(expected) // self.ranks.size
            sys.exit(f"rank {self.ranks.rank}: wrong numbers in slices of {nbytes} B {how}")


# --- by kernels -------------------------------------------------------------------------------------------------------


def by_kernels(exchange: Exchange, gpu: gn.Gpu, sizes: list[int], options: argparse.Namespace) -> list[Any]:
    """Return the microseconds of an exchange for each size: one of many in a launch, and one in a launch of its own."""
    ranks, rank, size = exchange.ranks, exchange.ranks.rank, exchange.ranks.size
    twin = options.gpu == "twin"
    # The first worker of a NIC serves all queue pairs to other NICs. The second one then serves the rank's own slice.
    port = gn.PortConfig(engine="twin" if twin else f"gpu{rank}", workers=2, copiers=0 if twin else options.copiers)
    with gn.open(f"soft{rank}", port=port) as nic:
        pd = nic.create_pd()
        source, target = pd.register(exchange.send), pd.register(exchange.inbox)
        with (
            gn.mesh(pd=pd, gpu=gpu, memory=target, via=ranks, timeout=DEADLINE) as mesh,
            gpu.create_qp(pd, timeout=DEADLINE) as own,
            gpu.alloc(16, gn.MemType.CPU_GPU) as out,
        ):
            own.connect(own)
            where = (8 * exchange.plane, source.address, source.lkey, target.address, target.lkey)
            done = 0

            def launch(nbytes: int, steps: int, add: int = 0) -> tuple[float, float]:
                """Return the seconds of a launch, and those of all steps but the first."""
                nonlocal done
                start = time.perf_counter()
                kernel = all_to_all[1, size * gpu.warp, gpu](mesh, own, rank, nbytes, *where, done, steps, add, out)
                if not kernel.wait(timeout=SECONDS):
                    sys.exit(f"rank {rank}: the kernel did not end")
                seconds = time.perf_counter() - start
                status, ns = out.array.view(np.int64).tolist()
                if status != dev.OK:
                    errors = [str(each.qp.last_error()) for each in mesh.peers if each.qp and each.qp.last_error()]
                    sys.exit(
                        f"rank {rank}: the kernel ended with {NAMES[status]}: {'; '.join(errors) or 'a rank is silent'}"
                    )
                done += steps
                return seconds, ns / 1e9

            launch(8, 0)  # compiles, so that no rank waits for another's compiler
            ranks.barrier()
            if rank == 0:
                print("all ranks begin", flush=True)
            rows = []
            for nbytes in sizes:
                exchange.choose(nbytes)
                exchange.fill(1)
                ranks.barrier()
                launch(nbytes, CHECKED, add=1)
                exchange.check((done - 1) % 2, CHECKED, "that were sent on", CHECKED)

                exchange.fill(2)
                _, seconds = launch(nbytes, 1 + options.steps)
                exchange.check((done - 1) % 2, 2, "of one launch")

                exchange.fill(3)
                alone = statistics.median(launch(nbytes, 1)[0] for _ in range(options.launches))
                exchange.check((done - 1) % 2, 3, "of many launches")
                rows.append(slowest(ranks, 1e6 * seconds / options.steps, 1e6 * alone))
    return rows


def slowest(ranks: Rendezvous, *numbers: float) -> list[float]:
    """Return each number's maximum over all ranks."""
    return [max(each) for each in zip(*ranks.allgather(numbers), strict=True)]


# --- by NCCL ----------------------------------------------------------------------------------------------------------


def why_no_nccl(size: int, options: argparse.Namespace) -> str:
    """Return why NCCL cannot exchange the tensors, or nothing if it can."""
    if options.gpu == "twin":
        return "the twin of a GPU is no CUDA device"
    if size == 1:
        return "a single rank has nobody to exchange with"
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return "this build of PyTorch lacks it"
    return ""


def by_nccl(exchange: Exchange, sizes: list[int], options: argparse.Namespace) -> list[Any]:
    """Return the same for NCCL: one call of many in a stream, and a call that the CPU waits for.

    The NIC is closed by now, so its engine is not on the GPU.
    """
    ranks, rank, size = exchange.ranks, exchange.ranks.rank, exchange.ranks.size
    patience = datetime.timedelta(seconds=SECONDS)
    store = torch.distributed.TCPStore(ADDRESS, 0, size, True, patience, False) if rank == 0 else None
    port = ranks.broadcast(store.port if store else None)
    store = store or torch.distributed.TCPStore(ADDRESS, port, size, False, patience, False)
    torch.distributed.init_process_group(
        "nccl", store=store, rank=rank, world_size=size, timeout=patience, device_id=exchange.place.device
    )
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rows = []
    for nbytes in sizes:
        exchange.choose(nbytes)
        exchange.fill(4)
        received, sent = (tensor[: len(exchange.mine)] for tensor in (exchange.inbox, exchange.send))
        for _ in range(CHECKED):
            torch.distributed.all_to_all_single(received, sent)  # NCCL connects, and loads its kernels
        exchange.check(0, 4, "by NCCL")

        ranks.barrier()
        torch.distributed.all_to_all_single(received, sent)
        begin.record()  # after this first call, in which the ranks wait for each other
        for _ in range(options.steps):
            torch.distributed.all_to_all_single(received, sent)
        end.record()
        end.synchronize()

        seconds = []
        for _ in range(options.launches):
            start = time.perf_counter()
            torch.distributed.all_to_all_single(received, sent)
            exchange.place.finish()
            seconds.append(time.perf_counter() - start)
        exchange.check(0, 4, "by NCCL")
        rows.append(slowest(ranks, 1e3 * begin.elapsed_time(end) / options.steps, 1e6 * statistics.median(seconds)))
    torch.distributed.destroy_process_group()
    return rows


# --- the ranks --------------------------------------------------------------------------------------------------------


def be_rank(rank: int, options: argparse.Namespace) -> None:
    """Be one of the processes."""
    sizes = [8**i for i in range(1, 22) if 8**i <= options.largest]
    try:
        with (
            TcpRendezvous(rank, options.ranks, ADDRESS, options.port, timeout=SECONDS) as ranks,
            gn.Gpu("twin" if options.gpu == "twin" else rank) as gpu,  # before PyTorch, as it prepares CUDA
        ):
            place = TwinMemory(gpu, rank) if options.gpu == "twin" else Tensors(gpu, rank)
            exchange = Exchange(ranks, place, sizes[-1])
            ours, theirs = by_kernels(exchange, gpu, sizes, options), []
            why = why_no_nccl(ranks.size, options)
            if not why:
                try:
                    theirs = by_nccl(exchange, sizes, options)
                except RuntimeError as error:  # of torch.distributed
                    why = str(error).splitlines()[0]
                why = next(filter(None, ranks.allgather(why)), "")
            if rank == 0:
                print(f"all slices are right, of {ranks.size} {'rank' if ranks.size == 1 else 'ranks'} on {place.name}")
                print_table(ranks.size, sizes, ours, theirs, why)
            ranks.barrier()  # rank 0 leaves last
    except gn.DocaError as error:
        sys.exit(f"rank {rank}: error: {error}")


def print_table(size: int, sizes: list[int], ours: list[Any], theirs: list[Any], why: str) -> None:
    """Print what an exchange takes. GB/s are of the bytes that a rank sends to other ranks."""
    others = max(1, size - 1)
    theirs_too = [] if why else ["NCCL: µs", "GB/s", "µs alone", "ratio", "alone"]
    print_row("bytes", "µs", "GB/s", "µs alone", *theirs_too)
    for i, nbytes in enumerate(sizes):
        cells = []
        for many, alone in (ours[i],) if why else (ours[i], theirs[i]):
            cells += [f"{many:.2f}", f"{others * nbytes / many / 1e3:.3f}", f"{alone:.2f}"]
        if not why:
            cells += [f"{their / our:.2f}" for our, their in zip(ours[i], theirs[i], strict=True)]
        print_row(nbytes, *cells)
    print("bytes: what a rank sends to each rank. alone: one exchange, which the CPU starts and waits for")
    print(f"NCCL: not available: {why}" if why else "ratio: NCCL's time divided by that of the kernel", flush=True)


def print_row(*cells: object) -> None:
    print(*(f"{cell:>10}" for cell in cells))


def start(options: argparse.Namespace) -> None:
    """Start all ranks. If one ends with an error, the others notice that, or are killed."""
    context = mp.get_context("spawn")
    running = [
        context.Process(target=be_rank, args=(i, options), name=f"rank {i}", daemon=True) for i in range(options.ranks)
    ]
    for child in running:
        child.start()
    end, failed = float("inf"), False
    while running:
        wait_for_any([child.sentinel for child in running], min(1.0, end - time.monotonic()))
        statuses = [(child, child.exitcode) for child in running]  # each is looked at once, as it may change
        for child, status in statuses:
            if status:
                print(f"error: {child.name} has ended with status {status}", file=sys.stderr, flush=True)
                end, failed = min(end, time.monotonic() + 2 * DEADLINE), True
            elif time.monotonic() > end:
                child.kill()
        running = [child for child, status in statuses if status is None]
    sys.exit(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description="Every GPU sends a slice of a tensor to every other GPU.")
    parser.add_argument("--gpu", choices=["cuda", "twin"], default="cuda", help="a GPU for each rank, or its twin")
    parser.add_argument("--ranks", type=int, help="number of processes; by default, as many as there are GPUs")
    parser.add_argument("--largest", type=int, default=16 << 20, help="largest slice in bytes (default %(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="timed exchanges of a launch (default %(default)s)")
    parser.add_argument("--launches", type=int, default=50, help="of one exchange each (default %(default)s)")
    parser.add_argument("--copiers", type=int, default=7, help="SMs that only copy, for each worker of a NIC")
    parser.add_argument("--port", type=int, default=18522, help="TCP port where the ranks meet (default %(default)s)")
    options = parser.parse_args()
    most = MOST_RANKS
    if options.gpu == "cuda":
        if torch is None:
            sys.exit("no module torch: pip install -e '.[torch,cuda]'")
        most = min(most, torch.cuda.device_count())
        if most == 0:
            sys.exit("there is no GPU: --gpu twin needs none")
    if options.ranks is None:
        options.ranks = most if options.gpu == "cuda" else 2
    if not 1 <= options.ranks <= most:
        parser.error(f"--ranks {options.ranks}: give 1 to {most}{', a GPU for each' * (options.gpu == 'cuda')}")
    if options.largest < 8 or options.steps < 1 or options.launches < 1:
        parser.error("--largest is at least 8, and --steps and --launches are at least 1")
    start(options)


if __name__ == "__main__":
    main()
