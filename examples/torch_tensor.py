"""Send a PyTorch tensor from a kernel into a tensor of another process, without a copy in between.

    python examples/torch_tensor.py

The NIC reads and writes the memory of the tensors: CUDA tensors if there is a GPU, otherwise CPU tensors.
Needs `pip install -e '.[torch]'`, and `'.[torch,cuda]'` for kernels on a GPU.
"""

import multiprocessing as mp
import sys
from multiprocessing.connection import Connection

try:
    import torch
except ModuleNotFoundError as missing:
    sys.exit(f"no module {missing.name}: pip install -e '.[torch]'")

import gpunetio as gn
from gpunetio import device as dev
from gpunetio.device.status import NAMES

THREADS, NUMBERS = 4, 1 << 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SECONDS = 120.0  # for the other process, which may have to compile first


@gn.kernel
def send(qp, raddr, rkey, laddr, lkey, nbytes, flag_raddr, flag_rkey, words, words_lkey):
    """Put one piece per thread and add 1 to the flag. `words` gets the old flag and the status of each thread."""
    me = dev.thread_idx()
    at = me * nbytes
    mine = words + 16 * me
    ticket = dev.put_signal(qp, raddr + at, rkey, laddr + at, lkey, nbytes, flag_raddr, flag_rkey, mine, words_lkey, 1)
    dev.st64(mine + 8, dev.wait(qp, ticket))


@gn.kernel
def receive(flag, pieces, status, timeout_ns):
    """Wait until all pieces have arrived."""
    deadline = dev.clock_ns() + timeout_ns
    while dev.ld_acquire64(flag) < pieces and dev.clock_ns() < deadline:
        dev.yield_thread()
    dev.st64(status, dev.OK if dev.ld_acquire64(flag) == pieces else dev.ETIMEDOUT)


def roots() -> torch.Tensor:
    """Return the numbers to send."""
    return torch.arange(NUMBERS, dtype=torch.float64, device=DEVICE).sqrt()


def hear(pipe: Connection):
    """Return the next message of the other process, or exit."""
    try:
        if pipe.poll(SECONDS):
            return pipe.recv()
        sys.exit(f"no message from the other process for {SECONDS:g} s")
    except EOFError:
        sys.exit("the other process has ended")


def check(launch, words) -> None:
    """Exit unless the kernel ends and every second of its words, a status, is OK."""
    if not launch.wait(timeout=2 * SECONDS):
        sys.exit("the kernel did not end")
    for status in words.array.view("i8")[1::2]:
        if status != dev.OK:
            sys.exit(f"the kernel ended with {NAMES[int(status)]}")


def receiver(pipe: Connection) -> None:
    """Make an empty tensor, and send its address to the sender."""
    with gn.open() as nic, gn.Gpu() as gpu:
        pd, words = nic.create_pd(), gpu.alloc(16, gn.MemType.CPU_GPU)  # the flag, and the kernel's status
        qp = gpu.create_qp(pd)
        tensor = torch.zeros(NUMBERS, dtype=torch.float64, device=DEVICE)
        room, flag = pd.register(tensor), pd.register(words)
        pipe.send((qp.qp.endpoint(), (room.address, room.rkey), (flag.address, flag.rkey)))
        qp.connect(hear(pipe))
        pipe.send("ready")
        check(receive[1, 1, gpu](words, THREADS, words.device_address + 8, int(SECONDS * 1e9)), words)
        if not torch.equal(tensor, roots()):
            sys.exit("the received tensor differs from the one that was sent")
        print(f"{NUMBERS} numbers have arrived in a {tensor.device.type} tensor")
        hear(pipe)  # before the queue is closed: the sender may wait for it


def sender(pipe: Connection) -> None:
    """Send a tensor."""
    with gn.open() as nic, gn.Gpu() as gpu:
        pd, words = nic.create_pd(), gpu.alloc(16 * THREADS, gn.MemType.CPU_GPU)
        qp = gpu.create_qp(pd)
        endpoint, (raddr, rkey), flag = hear(pipe)
        qp.connect(endpoint)
        pipe.send(qp.qp.endpoint())
        hear(pipe)
        tensor = roots()
        if tensor.is_cuda:
            torch.cuda.synchronize()  # what PyTorch has queued must be done before the NIC reads
        mr, old = pd.register(tensor), pd.register(words)
        where = (raddr, rkey, mr.address, mr.lkey, tensor.nbytes // THREADS)
        check(send[1, THREADS, gpu](qp, *where, *flag, words, old.lkey), words)
        pipe.send("done")


def main() -> None:
    here, there = mp.Pipe()
    other = mp.get_context("spawn").Process(target=receiver, args=(there,), daemon=True)
    other.start()
    there.close()  # so that its end is noticed
    sender(here)
    other.join(SECONDS)
    sys.exit(other.exitcode != 0)


if __name__ == "__main__":
    main()
