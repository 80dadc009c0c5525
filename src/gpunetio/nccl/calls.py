"""The functions that plugin.c calls: those of NCCL's GIN interface, whose arguments are numbers and addresses.

NCCL knows objects by numbers, which it takes for pointers. A function returns an ncclResult_t. Before it returns an
error, it writes the error to NCCL's log.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import struct
from collections.abc import Callable
from typing import TypeVar

from .. import log
from ..errors import (
    BadStateError,
    DocaError,
    InvalidValueError,
    NotSupportedError,
    TimedOutError,
    TooBigError,
)
from ..rendezvous import PeerError
from .abi import (
    DEVICE_HANDLE,
    GIN_PROPERTIES,
    HANDLE_BYTES,
    NET,
    PROPERTIES_V11,
    VERSIONS,
    LogLevel,
    NetDevice,
    Pointer,
    Result,
)
from .connection import Collective, Listener, Part
from .context import Contexts, Sizes
from .settings import Settings
from .window import Window

logger: logging.Logger = logging.getLogger("gpunetio.nccl")

_RESULTS: tuple[tuple[type[Exception], Result], ...] = (
    (PeerError, Result.REMOTE_ERROR), (TimedOutError, Result.REMOTE_ERROR),
    (InvalidValueError, Result.INVALID_ARGUMENT), (TooBigError, Result.INVALID_ARGUMENT),
    (NotSupportedError, Result.INVALID_USAGE),
    (BadStateError, Result.INVALID_USAGE), (DocaError, Result.SYSTEM_ERROR), (OSError, Result.SYSTEM_ERROR),
)

DEVICES = 1  # one NIC serves all GPUs of a process, so a communicator has one connection
# Not the name of a NET device: NCCL would take both for the same device (`ncclTopoFillNet`).
NAME = b"gpunetio0"
_GUID = int.from_bytes(b"gpunetio", "big")
_MBITS, _MOST_COMMS, _MOST_BYTES = 10_000, 1 << 20, 1 << 40  # for NCCL's model of the machine
_MOST_RANKS = 1 << 16

_name = ctypes.create_string_buffer(NAME)  # NCCL keeps its address
_Kind = TypeVar("_Kind")


class Session:
    """The result of `init` for a communicator. NCCL 2.28 does not pass it to later calls, so it holds nothing."""


class Opened:
    """A group of contexts, and the structure that describes them to NCCL."""

    def __init__(self, ranks: Collective, contexts: Contexts, description: bytes):
        self.ranks, self.contexts, self.told = ranks, contexts, False
        self.description = ctypes.create_string_buffer(description, len(description))


class Calls:
    """The functions, and NCCL's objects by number. `say` writes a line to NCCL's log."""

    def __init__(self, say: Callable[[LogLevel, str], None]):
        self._say = say
        self._objects: dict[int, object] = {}
        self._windows: dict[int, Collective] = {}
        self._numbers = itertools.count(1)

    # --- objects by number

    def _add(self, made: object) -> int:
        number = next(self._numbers)
        self._objects[number] = made
        return number

    def _get(self, kind: type[_Kind], name: str, number: int) -> _Kind:
        found = self._objects.get(number)
        if not isinstance(found, kind):
            raise _not_open(name, number)
        return found

    def _take(self, kind: type[_Kind], name: str, number: int) -> _Kind:
        found = self._get(kind, name, number)
        del self._objects[number]
        return found

    # --- the process

    def init(self, ctx: int) -> None:
        _store(ctx, "ctx", self._add(Session()))

    def finalize(self, ctx: int) -> None:
        if ctx:  # NCCL 2.28 passes none for communicators after the first
            self._take(Session, "ctx", ctx)

    def devices(self, count: int) -> None:
        _need(count, "ndev")
        ctypes.c_int.from_address(count).value = DEVICES

    def gin_properties(self, properties: int) -> None:
        _need(properties, "properties")
        filled = GIN_PROPERTIES.pack(supportsStrongSignals=1, supportsVASignals=1)
        ctypes.memmove(properties, filled, GIN_PROPERTIES.size)

    def properties(self, version: int, dev: int, properties: int) -> None:
        """Fill all members, because NCCL's memory is uninitialised. `version` is NET for the NET plugin of NCCL 2.28.
        """
        _need(properties, "props")
        self._check_device(dev)
        layout = PROPERTIES_V11 if version == NET else VERSIONS[version].properties
        kind = NetDevice.HOST if version == NET else NetDevice.GIN_GDAKI
        memory = Pointer.HOST if version == NET else Pointer.HOST | Pointer.CUDA | Pointer.DMABUF
        nowhere = {"railId": 0xFFFF, "planeId": 0xFFFF} if "railId" in layout.offsets else {}
        filled = bytearray(layout.pack(
            name=ctypes.addressof(_name), guid=_GUID, ptrSupport=memory, speed=_MBITS, port=1,
            latency=struct.pack("<f", 0.0), maxComms=_MOST_COMMS, maxRecvs=1, netDeviceType=kind, ndevs=1,
            maxP2pBytes=_MOST_BYTES, maxCollBytes=_MOST_BYTES, maxMultiRequestSize=1, **nowhere,
        ))
        layout.at(filled)["devs"][0] = dev
        ctypes.memmove(properties, bytes(filled), layout.size)

    def _check_device(self, dev: int) -> None:
        if not 0 <= dev < DEVICES:
            raise InvalidValueError(f"dev = {dev}: the devices are 0 to {DEVICES - 1}")

    # --- connections

    def listen(self, ctx: int, dev: int, handle: int, listen_comm: int) -> None:
        self._check_device(dev)
        _need(handle, "handle")
        _need(listen_comm, "listenComm")
        listener = Listener(Settings.of_environment())
        ctypes.memmove(handle, listener.handle, HANDLE_BYTES)
        _store(listen_comm, "listenComm", self._add(listener))

    def connect(self, ctx: int, handles: int, nranks: int, rank: int, listen_comm: int, coll_comm: int) -> None:
        _need(handles, "handles")
        _need(coll_comm, "collComm")
        listener = self._get(Listener, "listenComm", listen_comm)
        if not 0 < nranks <= _MOST_RANKS:
            raise InvalidValueError(f"nranks = {nranks}: it must be from 1 to {_MOST_RANKS}")
        places = (ctypes.c_uint64 * nranks).from_address(handles)
        for place in places:
            _need(place, "a handle")
        given = [ctypes.string_at(place, HANDLE_BYTES) for place in places]
        _store(coll_comm, "collComm", self._add(Collective(listener, given, rank)))

    def close_listen(self, listen_comm: int) -> None:
        self._take(Listener, "listenComm", listen_comm).close()

    def close_coll(self, coll_comm: int) -> None:
        ranks = self._take(Collective, "collComm", coll_comm)
        for number, made in list(self._objects.items()):  # contexts that NCCL never destroyed
            if self._windows.get(number) is ranks or (isinstance(made, Opened) and made.ranks is ranks):
                del self._objects[number]
                self._windows.pop(number, None)
        ranks.close()

    # --- contexts

    def create_context(self, version: int, coll_comm: int, config: int, gin_ctx: int, dev_handle: int) -> None:
        for address, name in ((config, "config"), (gin_ctx, "ginCtx"), (dev_handle, "devHandle")):
            _need(address, name)
        ranks, of = self._get(Collective, "collComm", coll_comm), VERSIONS[version]
        sizes = Sizes.of(of, ctypes.string_at(config, of.config.size))
        contexts = Contexts(ranks, of, sizes)
        ranks.parts.append(contexts)
        opened = Opened(ranks, contexts, DEVICE_HANDLE.pack(
            netDeviceType=NetDevice.GIN_GDAKI, netDeviceVersion=of.device_version, handle=contexts.device_address,
        ))
        _store(dev_handle, "devHandle", ctypes.addressof(opened.description))
        _store(gin_ctx, "ginCtx", self._add(opened))

    def destroy_context(self, gin_ctx: int) -> None:
        opened = self._take(Opened, "ginCtx", gin_ctx)
        _close_part(opened.ranks, opened.contexts)

    def progress(self, number: int) -> None:
        """Do nothing, since gpunetio has its own threads. NCCL 2.28 and 2.29 pass the collComm, others the ginCtx."""
        if not isinstance(self._objects.get(number), Opened | Collective):
            raise _not_open("the object", number)

    def last_error(self, gin_ctx: int, has_error: int) -> None:
        _need(has_error, "hasError")
        opened = self._get(Opened, "ginCtx", gin_ctx)
        error = opened.contexts.error()
        if error and not opened.told:
            opened.told = True
            self._say(LogLevel.WARN, error)
        ctypes.c_bool.from_address(has_error).value = bool(error)

    # --- memory

    def reg_mr(
        self, coll_comm: int, data: int, size: int, kind: int, flags: int, mhandle: int, gin_handle: int
    ) -> None:
        _need(mhandle, "mhandle")
        _need(gin_handle, "ginHandle")
        ranks = self._get(Collective, "collComm", coll_comm)
        window = Window(ranks, data, size, kind, flags)
        ranks.parts.append(window)
        number = self._add(window)
        self._windows[number] = ranks
        _store(gin_handle, "ginHandle", window.device_address)
        _store(mhandle, "mhandle", number)

    def dereg_mr(self, coll_comm: int, mhandle: int) -> None:
        ranks = self._get(Collective, "collComm", coll_comm)
        window = self._get(Window, "mhandle", mhandle)
        if self._windows[mhandle] is not ranks:
            raise InvalidValueError(f"mhandle = {mhandle:#x} belongs to another collComm than {coll_comm:#x}")
        del self._objects[mhandle], self._windows[mhandle]
        _close_part(ranks, window)

    # --- results

    def guarded(self, name: str) -> Callable[..., int]:
        """Return the function of this name, changed to return a result instead of raising an exception."""
        function: Callable[..., None] = getattr(self, name)

        def call(*arguments: int) -> int:
            try:
                function(*arguments)
            except KeyboardInterrupt:  # in a program's main thread; C would lose it
                self._say(LogLevel.WARN, f"{name}: interrupted (Ctrl+C)")
                return Result.SYSTEM_ERROR
            except Exception as error:
                result = next((result for kind, result in _RESULTS if isinstance(error, kind)), Result.INTERNAL_ERROR)
                if result is Result.INTERNAL_ERROR:
                    logger.exception("%s has failed", name)
                self._say(LogLevel.WARN, f"{name}: {error or type(error).__name__}")
                return result
            return Result.SUCCESS

        return call


def _close_part(ranks: Collective, part: Part) -> None:
    ranks.parts.remove(part)
    part.close()


def _not_open(name: str, number: int) -> InvalidValueError:
    return InvalidValueError(f"{name} = {number:#x} is not open: it was closed, or is another object")


def _need(address: int, name: str) -> None:
    if not address:
        raise InvalidValueError(f"{name} is NULL")


def _store(address: int, name: str, value: int) -> None:
    _need(address, name)
    ctypes.c_uint64.from_address(address).value = value


_int, _address = ctypes.c_int, ctypes.c_uint64
# In the order of plugin.c.
TYPES: dict[str, tuple[type, ...]] = {
    "init":            (_address,),
    "devices":         (_address,),
    "gin_properties":  (_address,),
    "properties":      (_int, _int, _address),
    "listen":          (_address, _int, _address, _address),
    "connect":         (_address, _address, _int, _int, _address, _address),
    "create_context":  (_int, _address, _address, _address, _address),
    "reg_mr":          (_address, _address, ctypes.c_size_t, _int, ctypes.c_uint64, _address, _address),
    "dereg_mr":        (_address, _address),
    "destroy_context": (_address,),
    "close_coll":      (_address,),
    "close_listen":    (_address,),
    "progress":        (_address,),
    "last_error":      (_address, _address),
    "finalize":        (_address,),
}
_kept: list[object] = []


def install(table: int, started: int, say: int) -> None:
    """Fill the table of functions in plugin.c, and set `started` when it is filled."""
    if not logger.parent or not logger.parent.handlers:
        log.configure()
    to_nccl = ctypes.CFUNCTYPE(None, _int, ctypes.c_char_p)(say)
    calls = Calls(lambda level, text: to_nccl(level, text.encode()))
    functions = [ctypes.CFUNCTYPE(_int, *types)(calls.guarded(name)) for name, types in TYPES.items()]
    _kept.extend(functions)
    places = (ctypes.c_void_p * len(functions)).from_address(table)
    for i, function in enumerate(functions):
        places[i] = ctypes.cast(function, ctypes.c_void_p).value
    ctypes.c_int.from_address(started).value = 1
