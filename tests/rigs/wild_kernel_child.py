"""Launch kernels that access wild addresses on the host, and print what each wait says. Then a kernel puts.

`wild_kernel_child.py HANDLER`: faulthandler is enabled `before` the first launch, `after` it, or never (`none`).
"""

import ctypes
import faulthandler
import mmap
import os
import sys

import gpunetio as gn
from gpunetio import device as dev
from gpunetio.jit.launch import Kernel
from pair import make_pair


@gn.kernel
def store(address, lane, words):
    """A thread stores at the address. Each of the others leaves its number plus 1."""
    if dev.thread_idx() == lane:
        dev.st64(address, 5)
    dev.st64(words + 8 * dev.thread_idx(), dev.thread_idx() + 1)


@gn.kernel
def load(address, lane, words):
    if dev.thread_idx() == lane:
        dev.st64(words, dev.ld64(address))


@gn.kernel
def meet(address, lane, words):
    """The others wait for the thread that faults."""
    if dev.thread_idx() == lane:
        dev.st64(address, 5)
    dev.block_sync()
    dev.st64(words, 9)


@gn.kernel
def put_one(qp, raddr, rkey, laddr, lkey, out):
    dev.st64(out, dev.wait(qp, dev.put(qp, raddr, rkey, laddr, lkey, 64)))


def protected_page() -> int:
    """The address of memory that may be read only. It stays mapped."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_size_t
    libc.mmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    return libc.mmap(0, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)


def main(handler: str) -> None:
    if handler == "before":
        faulthandler.enable()
    page = protected_page()
    print(f"{page:#x}", flush=True)
    gpu, ctx = gn.Gpu("host"), gn.open("soft0")
    words = gpu.alloc(64, gn.MemType.CPU_GPU)

    def tell(kernel: Kernel, address: int, threads: int = 1, lane: int = 0, timeout: float = 30) -> None:
        try:
            print(kernel.name, kernel[1, threads, gpu](address, lane, words).wait(timeout), flush=True)
        except gn.DocaError as error:
            print(f"{type(error).__name__}: {error}", flush=True)

    tell(store, words.device_address)
    if handler == "after":
        # With all threads, it may read one that ends meanwhile, and fault itself. The error would name that address.
        faulthandler.enable(all_threads=False)
    tell(store, 0, threads=4, lane=2)
    print(words.array.view("i8")[:4].tolist(), flush=True)
    tell(load, 0x123456)
    tell(load, 1 << 62)  # not canonical on x86-64 (Intel SDM, volume 1, 3.3.7.1)
    tell(store, page)
    tell(load, page)
    tell(meet, 0, threads=2, lane=1, timeout=3)
    pair = make_pair(ctx, gpu)
    print(pair.run(put_one).tolist(), bool((pair.there.array[:64] == pair.here.array[:64]).all()), flush=True)
    os._exit(0)  # the other thread of `meet` has not ended, and closing the memory would wait for it


main(sys.argv[1])
