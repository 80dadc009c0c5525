"""One of two processes whose NICs access each other's GPU memory without packets. It prints what it saw as JSON.

    python reaching.py RANK PORT PLACE ENGINE [mapped]

"mapped": the memory comes from cuMemCreate, like that of ncclMemAlloc, and not from cudaMalloc. Rank 0 posts requests,
and rank 1 changes their target, in the order of `main`. In the end rank 1 kills itself.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from typing import Any

import numpy as np

from gpunetio import Gpu, GpuMemory, MemType, PortConfig, device, kernel, verbs
from gpunetio.rendezvous import TcpRendezvous
from gpunetio.verbs import MR, QpEndpoint

HALF = 1 << 15
NBYTES = 2 * HALF + 64  # what is written, what is read, and words
COUNT, ROUNDS = 16, 3


@kernel
def requests(qp, raddr, rkey, laddr, lkey, nbytes, count, out):
    """Puts, gets, an inline write and additions: from and to consecutive places. The last status goes to `out`."""
    status = device.OK
    for i in range(count):
        at = i * nbytes
        device.put(qp, raddr + at, rkey, laddr + at, lkey, nbytes, device.EXCLUSIVE)
        device.get(qp, raddr + HALF + at, rkey, laddr + HALF + at, lkey, nbytes, device.EXCLUSIVE)
        device.p(qp, raddr + 2 * HALF, rkey, i + 1, 8, device.EXCLUSIVE)
        ticket = device.signal(qp, raddr + 2 * HALF + 8, rkey, laddr + 2 * HALF + 16, lkey, 2, device.EXCLUSIVE)
        status = min(status, device.wait(qp, ticket, device.EXCLUSIVE))
    device.st64(out, status)


class End:
    """A queue, and a region of GPU memory."""

    def __init__(self, rank: int, place: str, engine: str, kind: str):
        self.rank, self.gpu = rank, Gpu(place)
        port = PortConfig(engine=engine, addresses=(f"127.0.7.{rank + 1}",))
        self.ctx = verbs.open("soft0", port=port)
        self.pd = self.ctx.create_pd()
        self.memory = mapped(self.gpu) if kind else self.gpu.alloc(NBYTES)
        self.memory.write(pattern(rank))
        self.region: MR = self.pd.register(self.memory)
        self.queue = self.gpu.create_qp(self.pd, 64, timeout=20.0)

    @property
    def packets(self) -> int:
        counters = self.ctx.provider.nic.counters  # type: ignore[attr-defined]
        return int(counters["rdma_tx_packets"] + counters["rdma_rx_packets"])

    def connect(self, via: TcpRendezvous) -> dict[str, Any]:
        """Connect to the other end, and return what it has told."""
        here = self.queue.qp.endpoint()
        own = {"qpn": here.qpn, "gid": here.gid.hex(), "psn": here.psn}
        far = via.allgather({**own, "address": self.memory.address, "rkey": self.region.rkey})[1 - self.rank]
        endpoint = QpEndpoint(far["qpn"], bytes.fromhex(far["gid"]), 0, 4096, far["psn"])
        self.queue.connect(endpoint, ack_timeout=14, retry_cnt=4)
        via.allgather({})
        time.sleep(0.2)  # messages between the ends pass through a thread
        return far

    def post(self, far: dict[str, Any]) -> int:
        """Have a kernel post requests: its status."""
        with self.gpu.alloc(8, MemType.CPU_GPU) as out:
            keys = far["address"], far["rkey"], self.memory.address, self.region.lkey
            assert requests[1, 1, self.gpu](self.queue, *keys, HALF // COUNT, COUNT, out).wait(60)
            return int(out.array.view(np.int64)[0])


def mapped(gpu: Gpu) -> GpuMemory:
    """Memory of cuMemCreate, for as long as the process lives."""
    from cuda.bindings import driver as cu

    def done(answer: tuple[Any, ...]) -> Any:
        assert answer[0] == cu.CUresult.CUDA_SUCCESS, answer
        return answer[1] if len(answer) > 1 else None

    wanted, access = cu.CUmemAllocationProp(), cu.CUmemAccessDesc()
    wanted.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = access.location.id = gpu.ordinal
    wanted.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    least = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    nbytes = max(NBYTES, done(cu.cuMemGetAllocationGranularity(wanted, least)))
    address = done(cu.cuMemAddressReserve(nbytes, 0, 0, 0))
    done(cu.cuMemMap(address, nbytes, 0, done(cu.cuMemCreate(nbytes, wanted, 0)), 0))
    done(cu.cuMemSetAccess(address, nbytes, [access], 1))
    return GpuMemory(gpu, int(address), NBYTES, MemType.GPU, None, None)


def pattern(rank: int) -> np.ndarray:
    """What is in the memory of a rank at first."""
    data = np.random.default_rng(rank).integers(0, 256, NBYTES, np.uint8)
    data[2 * HALF :] = 0
    return data


def tell(**facts: object) -> None:
    """Print what the test looks at."""
    print(json.dumps(facts), flush=True)


def main(rank: int, port: int, place: str, engine: str, kind: str = "") -> None:
    """Be one of the processes."""
    logging.getLogger("gpunetio.nic").setLevel(logging.CRITICAL)  # of requests that fail on purpose
    end = End(rank, place, engine, kind)
    with TcpRendezvous(rank, 2, "127.0.7.1", port, timeout=60) as via:
        far = end.connect(via)
        if rank == 0:
            tell(what="posted", statuses=[end.post(far) for _ in range(ROUNDS)], packets=end.packets)
            got = end.memory.read()
            tell(what="read", same=bool(np.array_equal(got[HALF : 2 * HALF], pattern(1)[HALF : 2 * HALF])))
        via.allgather({})
        if rank == 1:
            got = end.memory.read()
            words = got[2 * HALF : 2 * HALF + 16].view(np.int64).tolist()
            tell(what="arrived", same=bool(np.array_equal(got[:HALF], pattern(0)[:HALF])), words=words)
            end.region.close()
        via.allgather({})
        if rank == 0:
            tell(what="closed", status=end.post(far), error=str(end.queue.last_error()), packets=end.packets)
        via.allgather({})
        if rank == 1:
            end.region = end.pd.register(end.memory)
        end.queue.qp.reset()
        end.queue.reset()
        far = end.connect(via)
        if rank == 0:
            before = end.packets
            tell(what="again", status=end.post(far), packets=end.packets - before)
        via.allgather({})
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    start = time.monotonic()
    tell(what="killed", status=end.post(far), seconds=time.monotonic() - start)
    end.queue.close()
    end.ctx.close()
    end.gpu.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
