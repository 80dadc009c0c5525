"""Make calls of libibverbs and librdmacm with random contents: ioctl(2) and write(2) of device files.

    python tests/rigs/foreign_calls.py N [SEED]      makes N calls, and prints each exception that is our mistake

Each call is one that is supported, and mostly names things that exist: objects of the right kind, memory of the
program. Numbers are small, or at the limits of 32 and 64 bits.
"""

from __future__ import annotations

import ctypes
import os
import random
import struct
import sys
from collections.abc import Iterator

from gpunetio.errors import DocaError
from gpunetio.nic.engine.port import PortConfig
from gpunetio.uverbs import abi, methods, ucma, ucma_abi
from gpunetio.uverbs.call import Refused
from gpunetio.uverbs.calls import Calls
from gpunetio.uverbs.sysfs import CM_DEVICE
from mistake_kinds import print_kinds

PAGE = 4096
NUMBERS = [
    0, 1, 2, 3, 4, 7, 8, 15, 31, 32, 33, 63, 64, 100, 128, 4095, 4096, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31,
    (1 << 32) - 1, 1 << 32, 1 << 47, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
]
SIZES = [0, 1, 3, 4, 8, 9, 16, 17, 48, 64, 96, 200, 4000, 0xFFFF]
_OBJECTS = 30  # after which the file is opened again


class Program:
    """An open device file, an open file of the connection manager, and memory of the program."""

    def __init__(self, seed: int):
        self.chance = random.Random(seed)
        self._room = ctypes.create_string_buffer(64 * PAGE)
        self.memory = (ctypes.addressof(self._room) + PAGE - 1) & -PAGE
        self._open()

    def _open(self) -> None:
        self.calls = Calls([("soft5", PortConfig())], lambda descriptor: True)
        self.device = self.calls.open(b"uverbs0", 0)
        self._descriptor = os.open(os.devnull, os.O_RDWR)  # events go there
        self.manager = self.calls.open(CM_DEVICE, self._descriptor)

    def close(self) -> None:
        for number in (self.manager, self.device):
            self.calls.close(number)
        os.close(self._descriptor)

    def call(self) -> None:
        """Make one call, and have what it has made removed now and then."""
        if self.chance.random() < 0.2:
            self._write()
        else:
            self._ioctl()

    # --- ioctl -------------------------------------------------------------------------------------------------------

    def _ioctl(self) -> None:
        chance = self.chance
        if chance.random() < 0.5:
            (obj, method), (_, known) = chance.choice(list(methods._methods.items()))
            attributes = [self._attribute(number) for number in known if chance.random() < 0.9]
        else:
            obj, method = abi.Object.DEVICE, abi.Method.INVOKE_WRITE
            asked = (abi.Invoke.CMD, 8, chance.choice(list(methods._commands)))
            others = (abi.Invoke.IN, abi.Invoke.OUT, abi.UHW_IN, abi.UHW_OUT)
            attributes = [asked, *(self._attribute(number) for number in others if chance.random() < 0.9)]
        self._fill()
        count = len(attributes) if chance.random() < 0.98 else chance.choice([0, 1, 0xFFFF])
        header = struct.pack("<HHHHQII", (24 + 16 * count) & 0xFFFF, obj, method, count, 0, abi.DRIVER_MLX5, 0)
        whole = header + b"".join(
            struct.pack("<HHHHQ", number, size & 0xFFFF, chance.choice([0, 1]), 0, data & (1 << 64) - 1)
            for number, size, data in attributes
        )
        room = ctypes.create_string_buffer(whole, len(whole))
        address = ctypes.addressof(room) if chance.random() < 0.99 else chance.choice(NUMBERS)
        self.calls.control(self.device, address)

    def _attribute(self, number: int) -> tuple[int, int, int]:
        """Return an attribute: a number, a handle, or a place in the program's memory."""
        chance = self.chance
        match chance.randrange(4):
            case 0:
                return number, chance.choice(SIZES), chance.choice(NUMBERS)
            case 1:
                return number, chance.choice([0, 4, 8]), self._handle()
            case 2:
                return number, 4, chance.randrange(20)
        return number, chance.choice(SIZES), self._place()

    def _handle(self) -> int:
        held = self.calls.files[self.device].handles()
        return self.chance.choice(held) if held and self.chance.random() < 0.9 else self.chance.randrange(40)

    def _place(self) -> int:
        return self.memory + self.chance.choice([0, 0, 64, PAGE, PAGE - 4])

    def _fill(self) -> None:
        """Fill the beginning of the program's memory, where structures are, with numbers and places."""
        chance = self.chance
        words = bytearray(chance.randbytes(256) if chance.random() < 0.2 else bytes(256))
        for _ in range(chance.randrange(12)):
            at = 4 * chance.randrange(60)
            value = chance.choice([
                chance.choice(NUMBERS), self._handle(), self._place(), chance.choice(NUMBERS), chance.randrange(200),
            ])
            words[at : at + 8] = (value & (1 << 64) - 1).to_bytes(8, "little")
        ctypes.memmove(self.memory, bytes(words), 256)

    # --- write -------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Write a command for the connection manager. Those that wait for a peer are left out."""
        chance = self.chance
        number = chance.choice(list(ucma._commands))
        layout = ucma._commands[number].layout
        size = layout.size if chance.random() < 0.9 else chance.choice(SIZES)
        self._fill()
        header = ucma_abi.HEADER.pack(**{"cmd": number, "in": size, "out": chance.choice([0, 4, 8, 200, 400, 0xFFFF])})
        ctypes.memmove(self.memory + PAGE, bytes(header) + ctypes.string_at(self.memory, 256), 256)
        if chance.random() < 0.5:  # most commands begin with the address of the answer
            ctypes.memmove(self.memory + PAGE + len(bytes(header)), self.memory.to_bytes(8, "little"), 8)
        nbytes = len(bytes(header)) + size if chance.random() < 0.95 else chance.choice(NUMBERS)
        address = self.memory + PAGE if chance.random() < 0.98 else chance.choice(NUMBERS)
        self.calls.write(self.manager, address, nbytes)

    def tidy(self) -> None:
        """Remove what there is too much of."""
        file = self.calls.files[self.device]
        if len(file.handles()) > _OBJECTS or len(file.channels) + len(file.event_channels) > _OBJECTS:
            self.close()
            self._open()


def mistakes(times: int, seed: int) -> Iterator[BaseException]:
    """Make so many calls. Yield what is raised that is no error of the package."""
    program = Program(seed)
    try:
        for _ in range(times):
            try:
                program.call()
            except (DocaError, Refused):
                pass
            except Exception as error:
                yield error
            program.tidy()
    finally:
        program.close()


def main(times: int, seed: int = 0) -> None:
    """Make calls, and print each kind of mistake once."""
    print_kinds(mistakes(times, seed), f"{times} calls")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
