"""Devices whose memory a NIC's engine cannot access. Each gets a DMA stream with the first region registered there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from ....errors import NoMemoryError
from ....memory import HostMemory
from ...engine.hardware import Hardware
from ...memory.cuda_driver import CopyDevice, DeviceDriver, cuda_driver
from ...memory.staging import SLOT_BYTES, SLOTS
from ...memory.streams import (
    DEVICE_SHIFT, LANDINGS, MARKS, MAX_STREAMS, MEMORY_TYPE, RANGE_SIZE, RANGE_START, STAGING, TIMED_OUT,
)
from ...state.dma_stream import LANDING, MARK, DMA_STREAM, SLOT
from ...state.worker import WORKER

TIMEOUT_NS = 5_000_000_000  # for a batch of copies; less than the timeout of a command, which waits for them


class DeviceMemory:
    """The DMA streams of a NIC. Callers hold the NIC's lock. A test may replace `driver`, the machine's CUDA driver."""

    rows: np.ndarray

    def __init__(self, hardware: Hardware, gather: Callable[[], None]):
        self._hardware, self._gather = hardware, gather
        self.driver: DeviceDriver | None = None
        self.timeout_ns = TIMEOUT_NS
        self._devices: dict[int, CopyDevice] = {}  # by ordinal, in the order of their DMA streams, which count from 1
        self._memory: list[HostMemory] = []
        self.rows = np.zeros(0, DMA_STREAM.dtype)

    def device_address(self, address: int, nbytes: int) -> int | None:
        """Return the device address of a range in a device's memory, which includes the number of its DMA stream.

        None if no device contains the range, or if the engine is on a GPU, which has no DMA streams. NoMemoryError if
        there are too many devices, InitializationError if a device cannot be used.
        """
        if self._hardware.port.config.on_cuda:
            return None
        if self.driver is None:
            self.driver = cuda_driver()
        ordinal = self.driver.locate(address, nbytes) if self.driver else None
        if ordinal is None:
            return None
        if ordinal not in self._devices:
            self._open(ordinal)
        return address + (1 + list(self._devices).index(ordinal) << DEVICE_SHIFT)

    def explain(self, code: int, timeout_ns: int) -> str:
        """Describe the failure of a DMA stream."""
        if code == TIMED_OUT:
            return f"the GPU has not finished the copy within {timeout_ns / 1e9:g} s"
        name = self.driver.error_name(code) if self.driver else "unknown error"
        return f"{name} (CUDA error {code})"

    def _open(self, ordinal: int) -> None:
        assert self.driver is not None
        number = 1 + len(self._devices)
        if number > MAX_STREAMS:
            raise NoMemoryError(f"{self._hardware.name} already copies for {MAX_STREAMS} GPUs, which is the maximum")
        if number == 1:
            self._memory.append(HostMemory((1 + MAX_STREAMS) * DMA_STREAM.size))
            self.rows = self._memory[0].view(DMA_STREAM.dtype, 0, 1 + MAX_STREAMS)
        device = self.driver.open(ordinal)
        try:
            self._init_row(self.rows[number], self._memory[0].address + number * DMA_STREAM.size, device)
            slots = self._make_slots(device) if number == 1 else 0
        except BaseException:
            device.close()
            raise
        if slots:
            self._gather()
            self._write(WORKER.slots, slots)
            self._write(WORKER.streams, self._memory[0].address)
        self._write(WORKER.stream_count, number)
        self._devices[ordinal] = device

    def _init_row(self, row: np.void, address: int, device: CopyDevice) -> None:
        tables = HostMemory(MARKS * MARK.size + LANDINGS * LANDING.size)
        self._memory.append(tables)
        for name, function in asdict(device.calls).items():
            row[name] = function
        row["context"], row["cu_stream"], row["timeout_ns"] = device.context, device.stream, self.timeout_ns
        row["marks"], row["landings"] = tables.address, tables.address + MARKS * MARK.size
        for mark in tables.view(MARK.dtype, 0, MARKS):
            mark["event"] = device.create_event()
        row["staging"] = device.alloc_pinned(STAGING)
        row["names"], row["answers"] = address + DMA_STREAM.asked, address + DMA_STREAM.where
        names = np.array([MEMORY_TYPE, RANGE_START, RANGE_SIZE, 0], np.int32)
        places = (DMA_STREAM.memory_type, DMA_STREAM.range_start, DMA_STREAM.range_size, 0)
        row["asked"] = np.void(names.tobytes())
        row["where"] = np.void(np.array([address + place for place in places], np.int64).tobytes())

    def _make_slots(self, device: CopyDevice) -> int:
        memory = HostMemory(SLOTS * SLOT.size)
        self._memory.append(memory)
        pinned = device.alloc_pinned(SLOTS * SLOT_BYTES)
        for i, slot in enumerate(memory.view(SLOT.dtype, 0, SLOTS)):
            slot["address"] = pinned + i * SLOT_BYTES
        return memory.address

    def _write(self, field: int, value: int) -> None:
        self._hardware.write(self._hardware.address + field, value)

    def close(self) -> None:
        """Close the devices. The engine must have stopped."""
        for device in self._devices.values():
            device.close()
        for memory in self._memory:
            memory.close()
        self._devices.clear()
        self._memory.clear()
