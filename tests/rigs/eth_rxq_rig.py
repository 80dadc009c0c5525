"""Receive queues of kernels without a NIC: a plain-Python device, `RxDevice`, places packets and writes completions."""

import contextlib
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eth_kernels import receive
from gpunetio import Gpu, MemType, device
from gpunetio.formats.device_structs import DEV_CQ
from gpunetio.formats.eth_device import DEV_ETH_RXQ, PACKET_ATTR

RECORD, CQ, ATTRS = 256, 4096, 1 << 16  # offsets in the memory; the buffer follows them
LENGTH, PROTECTION = 1, 4  # syndromes


@dataclass(frozen=True)
class Crew:
    """Where kernels run: `gpu`, and `warps`, which is the same on a GPU, and has warps of four threads on the host."""

    gpu: Gpu
    warps: Gpu

    @classmethod
    @contextlib.contextmanager
    def opened(cls, name: str) -> Iterator["Crew"]:
        with Gpu(name) as gpu:
            if gpu.target == "cuda":
                yield cls(gpu, gpu)
            else:
                with Gpu(name, warp=4) as warps:
                    yield cls(gpu, warps)

    def by(self, scope: int) -> tuple[Gpu, int]:
        """Which of them runs a group of this scope, and of how many threads."""
        if scope == device.WARP:
            return self.warps, 32 if self.gpu.target == "cuda" else 4
        return self.gpu, 1 if scope == device.THREAD else 4


@dataclass(frozen=True)
class Packet:
    """A packet as a kernel is to find it: its index, its bytes, and what its completion says."""

    index: int
    data: bytes
    tag: int
    stamp: int


class RxDevice:
    """A striding receive queue (or with `strides` 1 an ordinary one) and the device that fills it."""

    def __init__(self, crew: Crew, wqes: int = 2, strides: int = 8, stride: int = 128, striding: bool = True):
        self.crew, self.gpu = crew, crew.gpu
        self.wqes, self.strides, self.stride, self.striding = wqes, strides, stride, striding
        self.packets = wqes * strides
        self.memory = crew.gpu.alloc(2 * ATTRS + self.packets * stride, MemType.CPU_GPU)
        self.array, self.at = self.memory.array, self.memory.device_address
        self.array[:] = 0
        self.array[CQ : CQ + 64 * self.packets].reshape(-1, 64)[:, 63] = 0xF1
        q = DEV_ETH_RXQ.at(self.array)
        q["packet_address"], q["dbrec"] = self.at + 2 * ATTRS, self.at + RECORD
        q["packet_mask"], q["stride_shift"] = self.packets - 1, stride.bit_length() - 1
        q["strides_shift"], q["wqe_num"] = strides.bit_length() - 1, wqes
        q["striding"], q["lkey"] = striding, 0x1234
        c = DEV_CQ.at(self.array, DEV_ETH_RXQ.cq)
        c["cqe_daddr"], c["cqe_num"], c["cqe_mask"] = self.at + CQ, self.packets, self.packets - 1
        c["dbrec"], c["cqe_size"] = self.at + RECORD + 64, 64
        self.record = wqes
        self.completions = 0  # CQEs written
        self.stride_index = 0  # the next stride that the device uses
        self.expected: deque[Packet] = deque()
        self.lost = 0

    def close(self) -> None:
        self.memory.close()

    @property
    def structure(self) -> np.ndarray:
        return DEV_ETH_RXQ.at(self.array)

    @property
    def record(self) -> int:
        return struct.unpack_from(">I", self.array, RECORD)[0]

    @record.setter
    def record(self, value: int) -> None:
        struct.pack_into(">I", self.array, RECORD, value)

    @property
    def posted(self) -> int:
        """WQEs that the device may still use, the one in use included."""
        return (self.record - self.stride_index // self.strides) & 0xFFFF

    def complete(self, opcode: int, byte_count: int, tag: int = 0, stamp: int = 0, syndrome: int = 0) -> None:
        slot = CQ + self.completions % self.packets * 64
        owner = self.completions // self.packets & 1
        cqe = bytearray(64)
        wqe, stride = divmod(self.stride_index, self.strides)
        struct.pack_into(">H", cqe, 2, wqe & 0xFFFF if self.striding else 0)
        struct.pack_into(">I", cqe, 12, tag * 3 & 0xFFFF_FFFF)  # RSS hash
        cqe[16], cqe[28], cqe[29] = 0x44, tag & 7, tag >> 3 & 0xFF
        struct.pack_into(">HH", cqe, 20, tag & 0xFFFF, 0)
        struct.pack_into(">H", cqe, 30, tag >> 2 & 0xFFFF)
        struct.pack_into(">I", cqe, 36, tag * 5 & 0xFFFF_FFFF)  # metadata
        struct.pack_into(">IQI", cqe, 44, byte_count, stamp, 0xA500_0000 | tag)
        if syndrome:
            cqe[54], cqe[55] = 0x99, syndrome
        struct.pack_into(">H", cqe, 60, stride if self.striding else self.stride_index & 0xFFFF)
        self.array[slot : slot + 63] = np.frombuffer(cqe[:63], np.uint8)
        self.array[slot + 63] = opcode << 4 | owner
        self.completions += 1

    def arrive(self, nbytes: int, tag: int = 0) -> None:
        """A packet arrives: it is placed, or too long, or there is no room."""
        need = -(-nbytes // self.stride) if self.striding else 1
        used = self.stride_index % self.strides
        if self.posted == 0:
            self.lost += 1
            return
        if used and used + need > self.strides:
            rest = self.strides - used
            self.complete(2, 1 << 31 | rest << 16)
            self.stride_index += rest
            if self.posted == 0:
                self.lost += 1
                return
        if need > self.strides or (not self.striding and nbytes > self.stride):
            self.complete(14, self.strides << 16, syndrome=LENGTH)
            self.stride_index += self.strides
            self.lost += 1
            return
        data = np.random.default_rng(self.completions).integers(0, 256, nbytes, np.uint8)
        start = 2 * ATTRS + self.stride_index % self.packets * self.stride
        self.array[start : start + nbytes] = data
        stamp = 10**18 + self.completions
        self.expected.append(Packet(self.stride_index, data.tobytes(), tag, stamp))
        self.complete(2, need << 16 | nbytes if self.striding else nbytes, tag, stamp)
        self.stride_index += need

    def fail(self) -> None:
        """The queue fails."""
        self.complete(14, 0, syndrome=PROTECTION)

    def recv(
        self, most: int, scope: int = device.THREAD, timeout_ns: int = 0, attrs: bool = True, keep: int = 0
    ) -> tuple[int, int]:
        """Receive by a kernel. Return its result and the index of the first packet, which all threads agree on."""
        self.array[ATTRS : 2 * ATTRS] = 0xEE
        gpu, threads = self.crew.by(scope)
        with self.gpu.alloc(4096, MemType.CPU_GPU) as out:
            launch = receive[1, threads, gpu](
                self.at, most, timeout_ns, self.at + ATTRS if attrs else 0, scope, keep, out
            )
            assert launch.wait(110)
            results = out.array.view(np.int64)[: 2 * threads].reshape(-1, 2).copy()
        assert (results == results[0]).all()
        return int(results[0, 0]), int(results[0, 1])

    def check(self, count: int, first: int, described: bool = True) -> None:
        """`count` packets from index `first` on are the next that were to come, in the buffer and in the attributes."""
        for i in range(count):
            packet = self.expected.popleft()
            assert packet.index == first + i
            start = 2 * ATTRS + packet.index % self.packets * self.stride
            assert self.array[start : start + len(packet.data)].tobytes() == packet.data
            if described:
                attr = PACKET_ATTR.at(self.array, ATTRS + PACKET_ATTR.size * i)
                tag = packet.tag
                assert {name: int(attr[name]) for name in PACKET_ATTR.offsets} == {
                    "timestamp_ns": packet.stamp, "bytes": len(packet.data), "flow_tag": tag,
                    "hash": tag * 3 & 0xFFFF_FFFF, "metadata": tag * 5 & 0xFFFF_FFFF, "checks": tag & 7,
                    "headers": tag >> 3 & 0xFF, "vlan": tag >> 2 & 0xFFFF, "hash_type": 0x44, "check_sum": tag & 0xFFFF,
                }
        left = self.array[ATTRS + PACKET_ATTR.size * (count if described else 0) : 2 * ATTRS]
        assert (left == 0xEE).all()
