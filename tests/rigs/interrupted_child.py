"""A program that is interrupted at random moments of open, connect, post and close. Its arguments are `COUNT SEED`.

At the end it closes what interrupts have left open. It fails if anything but KeyboardInterrupt was raised, if anything
is left, or if the NIC has stopped working.
"""

import gc
import os
import random
import signal
import sys
import threading
import time
from contextlib import ExitStack

import numpy as np

import gpunetio as gn
from gpunetio.dropped import held
from gpunetio.verbs import SendWr, Sge
from usage import opens

NAMES = ("soft0", "soft1")
LONGEST = 0.02  # most seconds between interrupts, so that some rounds get through
PATIENCE = 10.0


def one_round(value: int) -> None:
    """Open two NICs, send bytes from one to the other, close everything."""
    with ExitStack() as stack:
        source, target = np.full(64, value % 251 + 1, np.uint8), np.zeros(64, np.uint8)
        ends = []
        for name, memory in zip(NAMES, (source, target)):
            ctx = stack.enter_context(gn.open(name))
            pd = ctx.create_pd()
            mr, cq = pd.register(memory), ctx.create_cq(16)
            ends.append((pd.create_qp(send_cq=cq, receive_cq=cq, sq_wr=16, rq_wr=16), cq, mr))
        (qp, cq, mine), (peer, _, theirs) = ends
        qp.connect(peer)
        for n in range(8):
            qp.post_send(SendWr(
                opcode=gn.WrOpcode.RDMA_WRITE, sges=[Sge(mine.address, 64, mine.lkey)], wr_id=n,
                flags=gn.SendFlags.SIGNALED, remote_addr=theirs.address, rkey=theirs.rkey,
            ))
        completed: list[int] = []
        end = time.monotonic() + PATIENCE
        while len(completed) < 8:
            for done in cq.poll():
                assert done.status == gn.WcStatus.SUCCESS, done
                completed.append(done.wr_id)
            assert time.monotonic() < end, f"{completed} have completed"
        assert completed == list(range(8))
        assert np.array_equal(source, target)


class Interrupts:
    """Sends the main thread SIGINT, each time once that is `ready`: where it catches KeyboardInterrupt."""

    def __init__(self, count: int, seed: int):
        self._count, self._random = count, random.Random(seed)
        self.main = threading.main_thread().ident
        self.dealt_with = 0
        self.ready = False
        self.lost = False  # in a finalizer, where Python can only print it
        self.over = False
        sys.unraisablehook = self._unraisable
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        assert self.main is not None
        for n in range(1, self._count + 1):
            while not self.ready:
                time.sleep(1e-4)
            self.ready = False
            time.sleep(self._random.uniform(0, LONGEST))
            while self.dealt_with < n:
                self.lost = False
                signal.pthread_kill(self.main, signal.SIGINT)
                until = time.monotonic() + 2 * PATIENCE
                while self.dealt_with < n and not self.lost and time.monotonic() < until:
                    time.sleep(1e-4)
        self.over = True

    def _unraisable(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            self.lost = True
        else:
            sys.__unraisablehook__(unraisable)


def main(count: int, seed: int) -> None:
    one_round(0)  # loads everything that is compiled
    assert not opens()
    descriptors = len(os.listdir("/proc/self/fd"))
    rounds = 1
    interrupts = Interrupts(count, seed)
    while not interrupts.over:
        try:
            interrupts.ready = True
            while not interrupts.over:
                one_round(rounds)
                rounds += 1
        except KeyboardInterrupt:
            interrupts.dealt_with += 1
    gc.collect()  # a thread closes what was opened and not named
    for root in held():
        root.close()
    end = time.monotonic() + PATIENCE
    while left := [*opens(), *(one.name for one in threading.enumerate() if one.name.startswith("gpunetio"))]:
        assert time.monotonic() < end, left
        time.sleep(1e-3)
    one_round(rounds)
    assert len(os.listdir("/proc/self/fd")) <= descriptors, "descriptors are left open"
    print(f"{interrupts.dealt_with} interrupts, {rounds} whole rounds")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
