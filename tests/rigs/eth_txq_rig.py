"""Send queues of kernels without a NIC: a plain-Python device, `TxDevice`, executes the WQEs that it finds in the ring.
"""

import struct
import time
from dataclasses import dataclass, field

import numpy as np

from eth_rxq_rig import Crew
from gpunetio import MemType, device
from gpunetio.enums import NicHandler
from gpunetio.formats.device_structs import DEV_CQ, DEV_QP, DEV_SIDE
from gpunetio.formats.eth_device import DEV_ETH_TXQ
from gpunetio.jit.launch import Kernel

SQN = 0xABC
SIDE, RECORD, REGISTER, RING = 512, 1024, 1088, 4096  # offsets in the memory; the CQ follows the ring
CS_FLAGS = 0xC0
WAIT_MASK = (8 << 32) - 1


@dataclass(frozen=True)
class Wqe:
    """A WQE as the device reads it. `packets` are (address, key, bytes); with `headers`, those of the payload."""

    index: int
    opcode: int
    signalled: bool
    packets: tuple[tuple[int, int, int], ...] = ()
    until: int = 0
    headers: bytes = b""
    mss: int = 0


@dataclass
class TxDevice:
    """An SQ of `depth` basic blocks in RDY. `handler` is how kernels tell of new WQEs."""

    crew: Crew
    depth: int = 64
    handler: NicHandler = NicHandler.GPU_SM_DB
    timeout: float = 20.0
    seen: list[Wqe] = field(default_factory=list)
    executed: int = 0
    completions: int = 0
    fail_at: int | None = None  # index of a WQE that fails
    max_lso: int = 1 << 18

    def __post_init__(self) -> None:
        self.memory = self.crew.gpu.alloc(RING + 128 * self.depth + 4096, MemType.CPU_GPU)
        self.array, self.at = self.memory.array, self.memory.device_address
        self.array[:] = 0
        self.cq_at = RING + 64 * self.depth
        self.array[self.cq_at : self.cq_at + 64 * self.depth].reshape(-1, 64)[:, 63] = 0xF1
        q = DEV_QP.at(self.array)
        q["sq_num"], q["sq_num_shift8"] = SQN, SQN << 8
        for ds in range(6):
            name = f"sq_num_shift8_be_{ds}ds" if ds else "sq_num_shift8_be"
            q[name] = int.from_bytes((SQN << 8 | ds).to_bytes(4, "big"), "little")
        q["sq_wqe_num"], q["sq_wqe_mask"], q["sq_wqe_daddr"] = self.depth, self.depth - 1, self.at + RING
        q["sq_dbrec"], q["sq_db"], q["side"] = self.at + RECORD, self.at + REGISTER, self.at + SIDE
        q["nic_handler"] = self.handler
        c = DEV_CQ.at(self.array, DEV_QP.cq_sq)
        c["cqe_daddr"], c["cqe_num"], c["cqe_mask"] = self.at + self.cq_at, self.depth, self.depth - 1
        c["cqe_size"] = 64
        DEV_SIDE.at(self.array, SIDE)["timeout_ns"] = int(self.timeout * 1e9)
        t = DEV_ETH_TXQ.at(self.array)
        t["wait_mask"], t["cs_flags"], t["signal_mask"] = WAIT_MASK, CS_FLAGS, self.depth // 4 - 1
        t["max_lso"] = self.max_lso

    def close(self) -> None:
        self.memory.close()

    @property
    def structure(self) -> np.ndarray:
        return DEV_ETH_TXQ.at(self.array)

    def index(self, name: str) -> int:
        return int(DEV_QP.at(self.array)[name])

    @property
    def announced(self) -> int:
        """How far kernels have told the device to go: 64 bits, rebuilt from what it is told."""
        if self.handler is NicHandler.CPU_PROXY:
            return int(struct.unpack_from("<Q", self.array, REGISTER)[0])
        if self.handler is NicHandler.GPU_SM_NO_DBR:
            word, number = struct.unpack_from(">II", self.array, REGISTER)
            assert number in (0, SQN << 8)
            low = word >> 8
        else:
            low = struct.unpack_from(">I", self.array, RECORD)[0]
        return self.executed + (low - self.executed & 0xFFFF)

    def block(self, index: int) -> bytes:
        start = RING + 64 * (index % self.depth)
        return self.array[start : start + 64].tobytes()

    def read(self, index: int) -> tuple[Wqe, int]:
        """The WQE at an index, and how many basic blocks it takes."""
        word, number, flags = struct.unpack_from(">IIxxxB", self.block(index))
        ds, opcode = number & 0x3F, word & 0xFF
        assert number >> 8 == SQN
        assert word >> 8 & 0xFFFF == index & 0xFFFF
        assert flags in (0, 8)
        blocks = -(-ds // 4)
        data = b"".join(self.block(index + i) for i in range(blocks))
        packets: list[tuple[int, int, int]] = []
        until = mss = 0
        headers = b""
        if opcode in (0x0A, 0x0E, 0x29):
            mss, inline = struct.unpack_from(">H4xH", data, 22)
            assert data[16:22] + data[24:28] == bytes([0, 0, 0, 0, CS_FLAGS, 0, 0, 0, 0, 0])
            assert (mss != 0) == (opcode == 0x0E)
            headers = data[30 : 30 + inline]
            first = 32 + -(-max(inline - 2, 0) // 16) * 16
            assert not any(data[30 + inline : first])  # nothing of older WQEs is sent
            for at in range(first, 16 * ds, 16):
                nbytes, key, address = struct.unpack_from(">IIQ", data, at)
                packets.append((address, key, nbytes))
            assert opcode == 0x29 or len(packets) <= 1
            assert inline or packets
        elif opcode == 0x0F:
            assert (word >> 24, ds) == (2, 3)
            operation, lkey, high, low, until, mask = struct.unpack_from(">IIIIQQ", data, 16)
            assert (operation, lkey, high, low, mask) == (5, 0, 0, 0, WAIT_MASK)
        else:
            assert (opcode, ds) == (0, 1)
        return Wqe(index, opcode, bool(flags), tuple(packets), until, headers, mss), blocks

    def step(self) -> bool:
        """Execute the next WQE, if there is one."""
        if self.executed == self.announced:
            return False
        wqe, blocks = self.read(self.executed)
        assert self.executed + blocks <= self.announced
        self.seen.append(wqe)
        failed = self.fail_at is not None and wqe.index >= self.fail_at
        if wqe.signalled or failed:
            self.complete(wqe, failed)
        self.executed += blocks
        return True

    def complete(self, wqe: Wqe, failed: bool) -> None:
        slot = self.cq_at + 64 * (self.completions % self.depth)
        cqe = bytearray(64)
        if failed:
            cqe[54], cqe[55] = 0x77, 4 if wqe.index == self.fail_at else 5
        struct.pack_into(">H", cqe, 60, wqe.index & 0xFFFF)
        self.array[slot : slot + 63] = np.frombuffer(cqe[:63], np.uint8)
        self.array[slot + 63] = (0xD0 if failed else 0x00) | (self.completions // self.depth & 1)
        self.completions += 1

    def run(
        self, kernel: Kernel, *args: int, count: int, scope: int = device.THREAD, grid: int = 1, block: int = 0,
        most: int = 1 << 60,
    ) -> list[int]:
        """Run `kernel(txq, *args, out)` while the device executes up to `most` WQEs: the int64s at `out`."""
        gpu, threads = self.crew.by(scope)
        with gpu.alloc(max(4096, 8 * count), MemType.CPU_GPU) as out:
            launch = kernel[grid, block or threads, gpu](self.at, *args, out)
            end = time.monotonic() + 110
            left = most
            while not launch.done and time.monotonic() < end:
                if left and self.step():
                    left -= 1
                else:
                    time.sleep(0)
            assert launch.wait(1)
            while left and self.step():
                left -= 1
            return out.array.view(np.int64)[:count].tolist()
