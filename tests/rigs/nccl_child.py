"""A rank of a communicator in a separate process, for test_nccl_processes: it does what NCCL and its kernels do.

    python nccl_child.py PLUGIN VERSION BACKEND RANK RANKS KERNELS

Handles are exchanged over stdin and stdout, one line of hexadecimal digits each, as over NCCL's bootstrap. KERNELS is
the library of gin.cpp, or "python" for gin_kernels.py, or "die": rank 1 then ends silently after the first window, and
rank 0 prints the errors that it gets.
"""

import ctypes
import os
import sys
import time

from nccl_rig import Context, Plugin, Rank, Refused, Window

PIECE, VALUE = 512, 0x1122_3344_5566
KINDS, GOT = 4, 3
CONTEXTS, SIGNALS, COUNTERS, DEPTH = 2, 3, 2, 16
LIMIT = 20.0


def exchange(mine: bytes) -> list[bytes]:
    """Hand out this rank's bytes, and return those of all."""
    print(mine.hex(), flush=True)
    return [bytes.fromhex(part) for part in sys.stdin.readline().split()]


class Memory:
    """A window: what is sent, then a piece for each kind and rank, and a word for each rank."""

    def __init__(self, rank: int, ranks: int):
        self.words, self.ranks = (1 + KINDS * ranks) * PIECE, ranks
        self.nbytes = self.words + 8 * ranks
        self.room = ctypes.create_string_buffer(self.sent(rank) + bytes(self.nbytes - PIECE), self.nbytes)
        self.address = ctypes.addressof(self.room)

    @staticmethod
    def sent(rank: int) -> bytes:
        return bytes((rank + 1) * i % 251 for i in range(PIECE))

    def place(self, kind: int, rank: int) -> int:
        return (1 + kind * self.ranks + rank) * PIECE

    def piece(self, kind: int, rank: int) -> bytes:
        start = self.place(kind, rank)
        return self.room.raw[start : start + PIECE]


class InPython:
    """Kernels of gin_kernels.py, on the host target."""

    def work(self, ctx: Context, index: int, window: Window, rank: int, ranks: int, counted: bool) -> int:
        from gin_kernels import work
        from gpunetio import Gpu, MemType

        with Gpu("host") as gpu, gpu.alloc(8, MemType.CPU_GPU) as out:
            at = ctx.handle + index * ctx.stride
            assert work[1, 1, gpu](at, window.handle, rank, ranks, PIECE, VALUE, counted, out).wait(LIMIT)
            return int.from_bytes(bytes(out.array), "little", signed=True)

    def gets(self, ctx: Context, index: int, window: Window, rank: int, memory: Memory) -> int:
        from gin_kernels import gets
        from gpunetio import Gpu, MemType

        with Gpu("host") as gpu, gpu.alloc(8, MemType.CPU_GPU) as out:
            at = ctx.handle + index * ctx.stride
            where = PIECE, memory.place(GOT, 0), memory.words
            assert gets[1, 1, gpu](at, window.handle, rank, memory.ranks, *where, out).wait(LIMIT)
            return int.from_bytes(bytes(out.array), "little", signed=True)


class InC:
    """Functions of gin.cpp."""

    def __init__(self, path: str):
        self.library = ctypes.CDLL(path)
        self.library.gin_work.argtypes = [ctypes.c_uint64] * 9

    def work(self, ctx: Context, index: int, window: Window, rank: int, ranks: int, counted: bool) -> int:
        where = ctx.handle, ctx.stride, index
        return self.library.gin_work(*where, window.handle, rank, ranks, PIECE, VALUE, counted)


def until(address: int, value: int) -> int:
    """Wait until a word has a value, for a while, and return what it has."""
    end = time.monotonic() + LIMIT
    while (found := ctypes.c_uint64.from_address(address).value) != value and time.monotonic() < end:
        time.sleep(1e-3)
    return found


def check(ctx: Context, index: int, memory: Memory, ranks: int, counted: bool) -> None:
    """What all ranks have sent is here, by way of one context."""
    signals = ctx.signals(index).buffer
    assert until(signals, ranks) == ranks
    assert until(signals + 8, ranks * VALUE) == ranks * VALUE
    assert until(signals + 16, 0) == 0
    for rank in range(ranks):
        assert memory.piece(0, rank) == memory.sent(rank)
        assert memory.piece(1, rank)[:9] == VALUE.to_bytes(8, "little") + b"\0"
    if counted:
        assert until(ctx.counters(index).buffer + 8, ranks) == ranks


def talk(plugin: Plugin, backend: int, rank: int, ranks: int, kernels: InC | InPython) -> None:
    with Rank(plugin, rank, ranks, exchange).connected() as it:
        for counters in (COUNTERS, 0) if plugin.version != 11 else (COUNTERS,):
            contexts = 1 if plugin.version == 11 else CONTEXTS
            ctx = plugin.create_context(it.coll, SIGNALS, counters, contexts, DEPTH, -1, backend, 1)
            assert (ctx.at(0, 8) == 0) is (counters == 0)
            for index in range(contexts):
                memory = Memory(rank, ranks)
                window = plugin.register(it.coll, memory.address, memory.nbytes)
                exchange(b"ready")
                assert kernels.work(ctx, index, window, rank, ranks, counters > 0) == 0
                check(ctx, index, memory, ranks, counters > 0)
                if isinstance(kernels, InPython) and backend == 2:
                    assert kernels.gets(ctx, index, window, rank, memory) == 0
                    for other in range(ranks):
                        assert memory.piece(GOT, other) == memory.sent(other)
                        assert until(memory.address + memory.words + 8 * other, 1 + other) == 1 + other
                exchange(b"done")
                assert all(memory.piece(2, other) == memory.sent(other) for other in range(ranks) if counters)
                assert not plugin.has_error(ctx)
                plugin.call("deregMrSym", it.coll, window.number)
            plugin.call("destroyContext", ctx.number)
    assert plugin.lines == []


def die(plugin: Plugin, backend: int, rank: int, ranks: int) -> None:
    """Rank 1 dies. Rank 0 learns it from each call that needs the other, and from the context."""
    it = Rank(plugin, rank, ranks, exchange)
    with it.connected():
        ctx = plugin.create_context(it.coll, SIGNALS, 0, 1, DEPTH, -1, backend, 1)
        memory = Memory(rank, ranks)
        plugin.register(it.coll, memory.address, memory.nbytes)
        if rank == 1:
            os._exit(9)
        end = time.monotonic() + LIMIT
        while not plugin.has_error(ctx):
            assert time.monotonic() < end
            time.sleep(0.05)
        for call in (
            lambda: plugin.register(it.coll, memory.address, memory.nbytes),
            lambda: plugin.create_context(it.coll, SIGNALS, 0, 1, DEPTH, -1, backend, 1),
        ):
            try:
                call()
            except Refused as refused:
                print(refused.result, flush=True)
    print(" / ".join(plugin.lines), flush=True)


def main() -> None:
    path, version, backend, rank, ranks, kernels = sys.argv[1:]
    plugin, where = Plugin(path, int(version)), (int(backend), int(rank), int(ranks))
    if kernels == "die":
        die(plugin, *where)
    else:
        talk(plugin, *where, InPython() if kernels == "python" else InC(kernels))


if __name__ == "__main__":
    main()
