"""A stand-in for NCCL: it loads the plugin, takes a table of functions by its symbol, and calls them as NCCL does.

It is written from the facts of the interface: offsets here are numbers, and nothing is imported from `gpunetio.nccl`.
"""

import contextlib
import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_p, _i, _u64, _size = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t
LOGGER = ctypes.CFUNCTYPE(None, _i, ctypes.c_ulong, ctypes.c_char_p, _i, ctypes.c_char_p, ctypes.c_char_p)
SUCCESS, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = 0, 2, 3, 4, 5, 6
GDAKI, HOST_MEMORY, CUDA_MEMORY = 3, 1, 2

# Member → offset in the table of v14, v13, v11, and the types of the parameters.
MEMBERS = {
    "init":             (8,   8,    8,   (_p, _u64, LOGGER)),
    "devices":          (16,  16,   16,  (_p,)),
    "getGinProperties": (24,  None, None, (_p,)),
    "getProperties":    (32,  24,   24,  (_i, _p)),
    "listen":           (40,  32,   32,  (_p, _i, _p, _p)),
    "connect":          (48,  40,   40,  (_p, _p, _i, _i, _p, _p)),
    "createContext":    (56,  48,   48,  (_p, _p, _p, _p)),
    "regMrSym":         (64,  56,   56,  (_p, _p, _size, _i, _u64, _p, _p)),
    "deregMrSym":       (80,  72,   72,  (_p, _p)),
    "destroyContext":   (88,  80,   80,  (_p,)),
    "closeColl":        (96,  88,   88,  (_p,)),
    "closeListen":      (104, 96,   96,  (_p,)),
    "ginProgress":      (112, 144,  128, (_p,)),
    "queryLastError":   (120, 152,  136, (_p, _p)),
    "finalize":         (128, 160,  144, (_p,)),
}
COLUMN = {14: 0, 13: 1, 11: 2}
CREATE_V11 = (_p, _i, _i, _p, _p)
PROPERTIES_BYTES = {14: 128, 13: 128, 11: 112}
CONTEXT_BYTES = {(11, 1): 72, (13, 1): 72, (14, 1): 72, (14, 2): 88}
QP_BYTES = {11: 280, 13: 296, 14: 296}


class Refused(Exception):
    """The plugin has returned an error."""

    def __init__(self, name: str, result: int, lines: list[str]):
        super().__init__(f"{name} returned {result}: {' / '.join(lines[-1:])}")
        self.result = result


def u64(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def be32(address: int) -> int:
    return int.from_bytes(ctypes.string_at(address, 4), "big")


class Plugin:
    """A table of the plugin. `lines` are what it has written to NCCL's log."""

    def __init__(self, path: Path | str, version: int):
        self.version, self.lines = version, []
        library = ctypes.CDLL(str(path), ctypes.RTLD_LOCAL)
        self.table = ctypes.addressof(ctypes.c_char.in_dll(library, f"ncclGinPlugin_v{version}"))
        self.name = ctypes.string_at(u64(self.table))
        self._logger = LOGGER(lambda level, flags, file, line, text, said: self._note(level, text, said))
        for name, row in MEMBERS.items():
            offset, types = row[COLUMN[version]], row[3]
            if offset is not None:
                types = CREATE_V11 if (name, version) == ("createContext", 11) else types
                setattr(self, f"_{name}", ctypes.CFUNCTYPE(_i, *types)(u64(self.table + offset)))

    def _note(self, level: int, text: bytes, said: bytes) -> None:
        self.lines.append(f"{level} {text.decode().replace('%s', said.decode())}")

    def call(self, name: str, *arguments: object) -> None:
        if result := getattr(self, f"_{name}")(*arguments):
            raise Refused(name, result, self.lines)

    def made(self, name: str, *arguments: object, count: int = 1) -> list[int]:
        """Call a function whose last parameters are places for `count` pointers."""
        places = (_u64 * count)()
        at = ctypes.addressof(places)
        self.call(name, *arguments, *(at + 8 * i for i in range(count)))
        return list(places)

    def init(self) -> int:
        (ctx,) = self.made_init()
        return ctx

    def made_init(self) -> list[int]:
        place = _u64()
        self.call("init", ctypes.addressof(place), 7, self._logger)
        return [place.value]

    def devices(self) -> int:
        count = _i(-1)
        self.call("devices", ctypes.addressof(count))
        return count.value

    def properties(self, dev: int = 0) -> bytes:
        """The structure, in memory that was not zero before."""
        room = ctypes.create_string_buffer(b"\xee" * 256, 256)
        self.call("getProperties", dev, ctypes.addressof(room))
        assert room.raw[PROPERTIES_BYTES[self.version] :] == b"\xee" * (256 - PROPERTIES_BYTES[self.version])
        return room.raw[: PROPERTIES_BYTES[self.version]]

    def listen(self, dev: int = 0) -> tuple[bytes, int]:
        room = ctypes.create_string_buffer(b"\xee" * 160, 160)
        (listener,) = self.made("listen", None, dev, ctypes.addressof(room))
        assert room.raw[128:] == b"\xee" * 32
        return room.raw[:128], listener

    def connect(self, handles: Sequence[bytes], rank: int, listener: int) -> int:
        rooms = [ctypes.create_string_buffer(handle, 128) for handle in handles]
        places = (_u64 * len(rooms))(*map(ctypes.addressof, rooms))
        return self.made("connect", None, ctypes.addressof(places), len(rooms), rank, listener)[0]

    def create_context(self, coll: int, *config: int) -> "Context":
        """`config`: signals, counters, contexts, depth, traffic class, backend version, rank stride."""
        if self.version == 11:
            ctx, told = self.made("createContext", coll, *config[:2], count=2)
        else:
            words = struct.pack(f"<{7 if self.version == 14 else 5}i", *config[: 7 if self.version == 14 else 5])
            room = ctypes.create_string_buffer(words, len(words))
            ctx, told = self.made("createContext", coll, ctypes.addressof(room), count=2)
        kind, _, handle, size, progress = struct.unpack("<iiQQi", ctypes.string_at(told, 28))
        assert (kind, size, progress) == (GDAKI, 0, 0)
        backend = config[5] if self.version == 14 else 1
        return Context(ctx, handle, CONTEXT_BYTES[self.version, backend], self.version)

    def register(self, coll: int, address: int, nbytes: int, kind: int = HOST_MEMORY, flags: int = 0) -> "Window":
        """As `regMrSym` is called."""
        number, handle = self.made("regMrSym", coll, address, nbytes, kind, flags, count=2)
        return Window(number, u64(handle), be32(handle + 8), handle)

    def has_error(self, context: "Context") -> bool:
        found = ctypes.c_bool(True)
        self.call("queryLastError", context.number, ctypes.addressof(found))
        return found.value


@dataclass
class Window:
    """Memory of all ranks: its number, the address of the keys, the local key."""

    number: int
    rkeys: int
    lkey: int
    handle: int


@dataclass
class Table:
    """Signals or counters of a context."""

    buffer: int
    rkeys: int
    lkey: int
    offset: int


@dataclass
class Context:
    """What createContext has made. Members of element i of its array are read from memory."""

    number: int
    handle: int
    stride: int
    version: int

    def at(self, context: int, offset: int) -> int:
        return u64(self.handle + context * self.stride + offset)

    def main(self, peer: int, context: int = 0) -> int:
        return self.at(context, 0) + peer * QP_BYTES[self.version]

    def companion(self, peer: int, context: int = 0) -> int:
        return self.at(context, 8) + peer * QP_BYTES[self.version]

    def table(self, offset: int, context: int) -> Table:
        base = self.handle + context * self.stride + offset
        return Table(u64(base), u64(base + 8), be32(base + 16), ctypes.c_uint32.from_address(base + 20).value)

    def counters(self, context: int = 0) -> Table:
        return self.table(16, context)

    def signals(self, context: int = 0) -> Table:
        return self.table(40, context)

    def sink(self, context: int = 0) -> int:
        return be32(self.handle + context * self.stride + 64)


@dataclass
class Rank:
    """A rank of a communicator: the calls up to `connect`, and to the end."""

    plugin: Plugin
    rank: int
    size: int
    exchange: Callable[[bytes], list[bytes]] = field(default=lambda mine: [mine])
    ctx: int = 0
    coll: int = 0

    @contextlib.contextmanager
    def connected(self) -> Iterator["Rank"]:
        self.ctx = self.plugin.init()
        assert self.plugin.devices() == 1
        handle, listener = self.plugin.listen()
        self.coll = self.plugin.connect(self.exchange(handle), self.rank, listener)
        self.plugin.call("closeListen", listener)
        yield self
        self.plugin.call("closeColl", self.coll)
        self.plugin.call("finalize", self.ctx)
