"""Spread heat over a plate. Two processes have one half each, and their kernels exchange the edges.

    python examples/halo_exchange.py                      the upper half, which waits for the lower one
    python examples/halo_exchange.py --peer 127.0.0.1     the lower half

With `--gpu 0` and `--gpu 1`, each half has a GPU, with all memory and the NIC's engine on it: no CPU takes part.

Each half has one row more than it computes, its halo: the edge of the other half. In each step a kernel puts its edge
into the other half's halo and adds 1 to its flag. It computes the rows that need no halo, waits for its own flag, and
computes its edge. Only the kernels communicate meanwhile. Each half compares its result with NumPy's.

Needs no extra. If there is a GPU, it runs there with `pip install -e '.[cuda]'`.
"""

import argparse
import sys

import numpy as np

import gpunetio as gn
from gpunetio import device as dev
from gpunetio.device.status import NAMES
from gpunetio.rendezvous import TcpRendezvous, own_address

RATE = 0.2  # of diffusion, at most 0.25
DEADLINE = 10.0  # seconds that a kernel waits for a completion, or for the other half
SECONDS = 120.0  # for a launch, and for the other half between launches, which may have to compile first
PLACES = {"auto": "auto", "cpu": "host", "cuda": 0}


@gn.device_function
def spread(old, new, row):
    """Compute one step of one row."""
    for x in range(1, old.shape[1] - 1):
        around = old[row - 1, x] + old[row + 1, x] + old[row, x - 1] + old[row, x + 1]
        new[row, x] = old[row, x] + RATE * (around - 4.0 * old[row, x])


@gn.kernel
def diffuse(heat, edge, steps, qp, raddr, rkey, laddr, lkey, flag_raddr, words):
    """`heat` has two planes, which take turns. `words` are the flag, the old value of the peer's, and the status."""
    me, threads, rows = dev.thread_idx(), dev.block_dim(), heat.shape[1] - 2
    row_bytes = 8 * heat.shape[2]
    plane_bytes = row_bytes * heat.shape[1]
    status = dev.OK
    ticket = dev.OK
    for step in range(steps):
        old, new = heat[step % 2], heat[(step + 1) % 2]
        if me == 0:
            at = step % 2 * plane_bytes
            ticket = dev.put_signal(
                qp, raddr + at, rkey, laddr + at, lkey, row_bytes, flag_raddr, rkey, words + 8, lkey, 1, dev.EXCLUSIVE
            )
        for row in range(1 + me, rows + 1, threads):
            if row != edge:
                spread(old, new, row)
        if me == 0:
            status = dev.wait(qp, ticket, dev.EXCLUSIVE)  # the NIC has read the edge: it may change
            if status == dev.OK:
                status = dev.wait_word(qp, words, step + 1)
        status = dev.block_broadcast(status, 0)
        if status != dev.OK:
            break
        if me == 0:
            spread(old, new, edge)
        dev.block_sync()
    if me == 0:
        dev.st64(words + 16, status)


def whole_plate(rows: int, columns: int) -> np.ndarray:
    """Return the initial heat. The outermost cells keep it."""
    return np.random.default_rng(7).random((2 * rows + 2, columns))


def by_numpy(heat: np.ndarray, steps: int) -> np.ndarray:
    """Return the heat of the whole plate after `steps` steps."""
    heat = heat.copy()
    for _ in range(steps):
        around = heat[:-2, 1:-1] + heat[2:, 1:-1] + heat[1:-1, :-2] + heat[1:-1, 2:]
        heat[1:-1, 1:-1] += RATE * (around - 4.0 * heat[1:-1, 1:-1])
    return heat


def run(options: argparse.Namespace) -> None:
    upper = options.peer is None
    place, port = PLACES[options.target], None
    if options.gpu is not None:
        place, port = options.gpu, gn.PortConfig(engine=options.gpu if options.gpu == "twin" else f"gpu{options.gpu}")
    with gn.open(port=port) as nic, gn.Gpu(place) as gpu:
        address = options.peer or own_address(nic)
        if upper:
            print(f"waiting for the lower half on {address} port {options.port}", flush=True)
        with TcpRendezvous(0 if upper else 1, 2, address, options.port, timeout=SECONDS) as halves:
            compute(options, halves, nic, gpu)


def compute(options: argparse.Namespace, halves: TcpRendezvous, nic: gn.Context, gpu: gn.Gpu) -> None:
    upper, rows, columns = halves.rank == 0, options.rows, options.columns
    terms = halves.allgather({"rows": rows, "columns": columns, "steps": options.steps})
    if terms[0] != terms[1]:
        sys.exit(f"error: the upper half has {terms[0]}, the lower one {terms[1]}: give both the same")
    plate = whole_plate(rows, columns)
    mine = slice(0, rows + 2) if upper else slice(rows, None)
    edge, peer_halo = (rows, 0) if upper else (1, rows + 1)  # the row to put, and its row at the peer
    shape = (2, rows + 2, columns)
    plane_bytes, row_bytes = 8 * shape[1] * shape[2], 8 * shape[2]
    kind = gn.MemType.CPU_GPU if options.gpu is None else gn.MemType.GPU
    memory = gpu.alloc(2 * plane_bytes + 24, kind)  # two planes and three words
    memory.write(np.stack([plate[mine]] * 2))
    mr = nic.create_pd().register(memory)

    with gn.mesh(pd=mr.pd, gpu=gpu, memory=mr, via=halves, timeout=DEADLINE) as mesh:
        far = mesh.peers[1 - halves.rank]
        qp = far.qp

        # An edge goes from its row here to the peer's halo, `peer_halo` rows into the peer's plane.
        heat = memory.as_array(shape, np.float64)
        words, flag_raddr = mr.address + 2 * plane_bytes, far.address + 2 * plane_bytes
        raddr, laddr = far.address + peer_halo * row_bytes, mr.address + edge * row_bytes

        def launch(steps: int) -> None:
            where = (qp, raddr, far.rkey, laddr, mr.lkey, flag_raddr, words)
            done = diffuse[1, options.threads, gpu](heat, edge, steps, *where)
            if not done.wait(timeout=SECONDS):
                sys.exit("the kernel did not end")

        launch(0)  # compiles, so that neither half waits for the other's compiler
        halves.barrier()
        print("both halves begin")
        launch(options.steps)
        status = int(memory.read(2 * plane_bytes + 16).view(np.int64)[0])
        if status != dev.OK:
            sys.exit(f"the kernel ended with {NAMES[status]}: {qp.last_error() or 'the other half is silent'}")

    found = memory.read(0, 2 * plane_bytes).view(np.float64).reshape(shape)[options.steps % 2]
    inner = slice(1, -1)
    error = np.abs(found - by_numpy(plate, options.steps)[mine])[inner, inner].max()
    if error > 1e-12:
        sys.exit(f"the result is wrong: it differs from NumPy's by {error:g}")
    half = "upper" if upper else "lower"
    print(f"{half} half: {options.steps} steps of {rows} × {columns} cells on {gpu.name}, equal to NumPy's")


def main() -> None:
    parser = argparse.ArgumentParser(description="Spread heat over a plate. Two processes have one half each.")
    parser.add_argument("--peer", help="address that the upper half prints; without it, this is the upper half")
    parser.add_argument("--port", type=int, default=18520, help="TCP port where the halves meet (default %(default)s)")
    parser.add_argument("--target", choices=PLACES, default="auto", help="where kernels run")
    parser.add_argument("--gpu", help="run kernel and NIC on this GPU, with all memory there: a number, or twin")
    parser.add_argument("--threads", type=int, default=2, help="threads of the kernel's block (default %(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="rows that each half computes (default %(default)s)")
    parser.add_argument("--columns", type=int, default=64, help="columns of the plate (default %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="number of steps (default %(default)s)")
    try:
        run(parser.parse_args())
    except gn.DocaError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
