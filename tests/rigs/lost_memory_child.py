"""A program whose memory disappears while a NIC uses it. It is killed, and says why on stderr."""

import ctypes
import faulthandler
import mmap
import os
import signal
import sys
import tempfile
import time

import numpy as np

import gpunetio as gn
from gpunetio.nic import nic
from gpunetio.nic.host import helping
from gpunetio.verbs import SendWr, Sge
from nic_rig import until

NBYTES = 3 * mmap.PAGESIZE


def lose_by(what: str, name: str = "soft0") -> None:
    """Write from memory that has gone: by `munmap`, or by `truncate` of its file."""
    with tempfile.TemporaryFile() as file:
        file.truncate(NBYTES)
        memory = mmap.mmap(file.fileno(), NBYTES)
        source, target = np.frombuffer(memory, np.uint8), np.zeros(NBYTES, np.uint8)
        ctx = gn.open(name)
        pd, cq = ctx.create_pd(), ctx.create_cq(16)
        mine, theirs = pd.register(source), pd.register(target)
        qp = pd.create_qp(send_cq=cq, receive_cq=cq, sq_wr=16, rq_wr=16)
        qp.connect(qp)
        write = SendWr(
            opcode=gn.WrOpcode.RDMA_WRITE, sges=[Sge(mine.address, NBYTES, mine.lkey)],
            remote_addr=theirs.address, rkey=theirs.rkey,
        )
        qp.post_send(write)  # loads all code: what is mapped later might take the place of the lost memory
        until(cq.poll, "the write")
        print(f"{mine.lkey:#010x} {mine.address:#018x}", flush=True)
        if what == "helped":
            hold_back_the_engine(ctx)
        if what in ("munmap", "helped"):
            ctypes.CDLL(None).munmap(ctypes.c_void_p(mine.address), ctypes.c_size_t(NBYTES))
        else:
            os.ftruncate(file.fileno(), 0)
        qp.post_send(write)
        if what == "helped":
            help_out = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(helping.address())
            help_out(ctx.provider.nic.to_help(), 1)
        time.sleep(30)
        print("it lives", flush=True)


def hold_back_the_engine(ctx: gn.Context) -> None:
    """Have the engine's thread leave its turns to threads of the program."""
    helping.address()  # map it now: later, it might take the place of the lost memory
    nic.few_cores = lambda: True
    ctx.provider.nic.expect_polling()
    ctx.provider.nic.record["helped_at"] = 1 << 62
    time.sleep(0.1)


def main(what: str, handler: str) -> None:
    if handler == "before":
        faulthandler.enable()
    if what == "elsewhere":  # a fault outside of any engine
        with gn.open("soft0") as ctx:
            ctx.create_pd().register(bytearray(64))
            if handler == "after":
                faulthandler.enable()
            ctypes.string_at(8)
    if what == "sent":
        with gn.open("soft0") as ctx:
            ctx.create_pd().register(bytearray(64))
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(30)
    if what == "closed":
        gn.open("soft0").close()
        ctypes.string_at(8)
    if handler == "after":
        with gn.open("soft1") as ctx:
            ctx.create_pd().register(bytearray(64))  # a command for the engine, which shows that it runs
            faulthandler.enable()
            lose_by(what)
    lose_by(what)


if __name__ == "__main__":
    main(*sys.argv[1:])
