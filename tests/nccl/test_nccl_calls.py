"""The plugin's functions, called by one rank: what they fill in, what they refuse, and how calls end."""

import ctypes
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gin_kernels
import nccl_rig as rig
from gpunetio import Gpu, MemType
from gpunetio.errors import BadStateError, NoMemoryError
from gpunetio.nccl import plugin
from gpunetio.nccl.calls import Calls
from gpunetio.nccl.connection import Collective
from gpunetio.rendezvous import PeerError
from gpunetio.rendezvous.link import Message
from nccl_rig import Plugin, Rank, Refused
from stand_in.building import compiler

pytestmark = [pytest.mark.soft_nic, pytest.mark.host_memory]
every_version = pytest.mark.parametrize("version", [11, 13, 14])
CONFIG = (4, 2, 2, 0, -1, 2, 1)


@pytest.fixture(scope="module")
def path() -> str:
    if compiler() is None:
        pytest.skip("no C compiler")
    return str(plugin())


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUNETIO_NCCL_GPU", "host")
    monkeypatch.setenv("GPUNETIO_NCCL_TIMEOUT", "2")


@pytest.fixture
def nccl(path: str) -> Plugin:
    """The table of v14, after init."""
    opened = Plugin(path, 14)
    opened.init()
    return opened


@pytest.fixture
def alone(path: str) -> Iterator[Rank]:
    """The only rank of a communicator, by the table of v14."""
    with Rank(Plugin(path, 14), 0, 1).connected() as rank:
        yield rank


def refused(result: int, why: str):
    """The call fails with this result, and the log gets a line."""
    return pytest.raises(Refused, match=f"returned {result}: 2 GIN/gpunetio: {why}")


# --- what is filled in ---------------------------------------------------------------------------------------------


@every_version
def test_properties(path, version):
    loaded = Plugin(path, version)
    loaded.init()
    filled = loaded.properties()
    name, pci, _, kinds, _, _, speed, port = struct.unpack_from("<QQQiiiii", filled)
    assert ctypes.string_at(name) == b"gpunetio0"
    assert (pci, kinds, port) == (0, 1 | 2 | 4, 1)
    assert speed > 0
    assert struct.unpack_from("<ii", filled, 56)[0] == rig.GDAKI
    assert struct.unpack_from("<iiii", filled, 64) == (1, 0, 0, 0)
    assert version == 11 or struct.unpack_from("<hh", filled, 124) == (-1, -1)
    assert loaded.name == b"gpunetio"


def test_strong_signals_and_signals_in_windows(nccl):
    claims = (ctypes.c_uint8 * 4)(9, 9, 9, 9)
    nccl.call("getGinProperties", ctypes.addressof(claims))
    assert list(claims) == [1, 1, 9, 9]


def test_the_net_table_has_devices_and_connects_nothing(path):
    """NCCL 2.28 finds GIN only behind it."""
    table = ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL(path), "ncclNetPlugin_v11"))
    members = {offset: rig.u64(table + offset) for offset in range(0, 176, 8)}
    assert [offset for offset, function in members.items() if not function] == [64, 136, 144, 152, 168]
    lines = []
    logger = rig.LOGGER(lambda level, flags, file, line, text, said: lines.append(said.decode()))
    ctx, room = ctypes.c_uint64(), ctypes.create_string_buffer(112)
    p = ctypes.c_void_p
    init = ctypes.CFUNCTYPE(ctypes.c_int, p, ctypes.c_uint64, p, rig.LOGGER, p)(members[8])
    assert init(ctypes.addressof(ctx), 1, None, logger, None) == 0
    assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, p)(members[24])(0, ctypes.addressof(room)) == 0
    assert struct.unpack_from("<i", room.raw, 56)[0] == 0  # NCCL_NET_DEVICE_HOST
    for offset in (32, 40, 48, 128):
        assert ctypes.CFUNCTYPE(ctypes.c_int)(members[offset])() == rig.INVALID_USAGE
    assert len(lines) == 4
    assert "this plugin has no NET transport" in lines[0]
    assert ctypes.CFUNCTYPE(ctypes.c_int, p)(members[160])(ctx.value) == 0


@every_version
def test_contexts_in_memory(path, version):
    """Tables of a context begin where those before it end; queues are arrays; what is not used is not there."""
    loaded = Plugin(path, version)
    with Rank(loaded, 0, 1).connected() as it:
        ctx = loaded.create_context(it.coll, *CONFIG)
        count = 1 if version == 11 else 2
        for index in range(count):
            assert ctx.signals(index).buffer == ctx.signals().buffer + 8 * 4 * index
            assert (ctx.signals(index).offset, ctx.counters(index).offset) == (4 * index, 2 * index)
            assert rig.be32(ctx.signals(index).rkeys) != 0
            assert ctx.sink(index) != 0
        queues = {ctx.at(index, offset) for index in range(count) for offset in (0, 8)}
        assert len(queues) == 2 * count
        assert 0 not in queues
        tail = rig.QP_BYTES[version] - 8
        for queue in queues:
            handler, memory = struct.unpack("<ii", ctypes.string_at(queue + tail, 8))
            assert (handler, memory) == (2, 2)  # kernels ring the doorbell; GPU memory
            assert rig.u64(queue + 64) != 0
        if version == 14:
            assert ctx.at(0, 72) != ctx.at(0, 80) != ctx.at(1, 72) != 0
        bare = loaded.create_context(it.coll, 0, 0, 1, 0, -1, 2, 1)
        assert (bare.at(0, 16), bare.at(0, 24), bare.at(0, 40), bare.at(0, 48)) == (0, 0, 0, 0)
        assert bool(bare.at(0, 8)) is (version == 11)
        assert not loaded.has_error(bare)
        loaded.call("ginProgress", it.coll if version == 11 else bare.number)


def test_many_contexts(alone):
    """Each has its two counts of gets for each rank, one behind the other: of one rank, 16 bytes a context."""
    ctx = alone.plugin.create_context(alone.coll, 0, 0, 12, 16, -1, 2, 1)
    counts = [(ctx.at(index, 72), ctx.at(index, 80)) for index in range(12)]
    first = counts[0][0]
    assert counts == [(first + 16 * index, first + 16 * index + 8) for index in range(12)]


def test_no_contexts_at_all(alone):
    """Each group still has an address of its own, by which NCCL finds it."""
    groups = [alone.plugin.create_context(alone.coll, 3, 0, 0, 0, -1, 2, 1) for _ in range(2)]
    assert groups[0].handle != groups[1].handle
    for group in groups:
        alone.plugin.call("destroyContext", group.number)


@every_version
@pytest.mark.parametrize("nic", ["", "gpu"])
def test_a_gpu_whose_memory_the_cpu_does_not_reach(path, version, nic, monkeypatch):
    """All that kernels read is copied there. The twin ends the process if the CPU touches its memory."""
    monkeypatch.setenv("GPUNETIO_NCCL_GPU", "twin")
    monkeypatch.setenv("GPUNETIO_NCCL_DEVICE", nic)
    loaded, room = Plugin(path, version), ctypes.create_string_buffer(4096)
    with Rank(loaded, 0, 1).connected() as it:
        ctx = loaded.create_context(it.coll, *CONFIG)
        arguments = it.coll, ctypes.addressof(room), 4096, rig.HOST_MEMORY, 0
        number, handle = loaded.made("regMrSym", *arguments, count=2)
        assert ctx.handle != handle != 0
        assert not loaded.has_error(ctx)
        loaded.call("deregMrSym", it.coll, number)
        loaded.call("destroyContext", ctx.number)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config, result, why", [
    ((-1, 0, 1, 0, -1, 2, 1), rig.INVALID_ARGUMENT, "create_context: nSignals = -1: it must be from 0 to"),
    ((0, -5, 1, 0, -1, 2, 1), rig.INVALID_ARGUMENT, "create_context: nCounters = -5"),
    ((0, 0, 5000, 0, -1, 2, 1), rig.INVALID_ARGUMENT, "create_context: nContexts = 5000: it must be from 0 to 4096"),
    ((0, 0, 1, 32769, -1, 2, 1), rig.INVALID_ARGUMENT, "create_context: queueDepth = 32769"),
    ((0, 0, 1, 0, 256, 2, 1), rig.INVALID_ARGUMENT, "create_context: trafficClass = 256"),
    ((0, 0, 1, 0, -1, 0, 1), rig.INVALID_USAGE, "create_context: backendVersion = 0: this plugin knows 1 and 2"),
    ((0, 0, 1, 0, -1, 3, 1), rig.INVALID_USAGE, "create_context: backendVersion = 3"),
])
def test_sizes_and_versions(alone, config, result, why):
    with refused(result, why):
        alone.plugin.create_context(alone.coll, *config)
    assert alone.plugin.create_context(alone.coll, 1, 0, 1, 0, -(1 << 31), 2, 1).handle


@pytest.mark.parametrize("name, value, why", [
    ("signals", 5, "signals 5: it must be an integer from 4 to 4"),
    ("counters", 1, "counters 1: it must be an integer from 2 to 2"),
    ("contexts", 4, "contexts 4: it must be an integer from 3 to 3"),
    ("version", 13, "version 13: it must be an integer from 14 to 14"),
    ("qps", [{}] * 2, "qps .*: it must be a list of 3 queue pairs"),
    ("qps", [{}] * 4, "qps .*: it must be a list of at most 3 objects"),
])
def test_a_rank_that_calls_with_other_values(alone, monkeypatch, name, value, why):
    """The group is not made on any rank, and the next call works."""
    with monkeypatch.context() as patched:
        true = Collective.gather

        def gather(self: Collective, call: str, **values: object) -> list[Message]:
            return true(self, call, **values | {name: value})

        patched.setattr(Collective, "gather", gather)
        with refused(rig.REMOTE_ERROR, f"create_context: rank 0 sent 'createContext' with {why}"):
            alone.plugin.create_context(alone.coll, 4, 2, 3, 0, -1, 2, 1)
    assert alone.plugin.create_context(alone.coll, *CONFIG).handle


def test_objects_of_another_kind_and_closed_ones(alone):
    call, ctx = alone.plugin.call, alone.plugin.create_context(alone.coll, *CONFIG)
    found = ctypes.c_bool()
    for wrong in (0, 0xDEAD000, alone.coll, alone.ctx):
        with refused(rig.INVALID_ARGUMENT, f"destroy_context: ginCtx = {wrong:#x} is not open"):
            call("destroyContext", wrong)
    call("destroyContext", ctx.number)
    with refused(rig.INVALID_ARGUMENT, "destroy_context: ginCtx = .* is not open"):
        call("destroyContext", ctx.number)
    with refused(rig.INVALID_ARGUMENT, "last_error: ginCtx"):
        call("queryLastError", ctx.number, ctypes.addressof(found))
    with refused(rig.INVALID_ARGUMENT, "close_coll: collComm"):
        call("closeColl", ctx.number)
    with refused(rig.INVALID_ARGUMENT, "dereg_mr: mhandle"):
        call("deregMrSym", alone.coll, alone.coll)


@pytest.mark.parametrize("raised, result, line", [
    (KeyboardInterrupt(), rig.SYSTEM_ERROR, "devices: interrupted (Ctrl+C)"),
    (RuntimeError("a mistake"), rig.INTERNAL_ERROR, "devices: a mistake"),
    (OSError(24, "Too many open files"), rig.SYSTEM_ERROR, "devices: [Errno 24] Too many open files"),
    (NoMemoryError("no room"), rig.SYSTEM_ERROR, "devices: no room"),
    (BadStateError("closed"), rig.INVALID_USAGE, "devices: closed"),
    (PeerError("gone"), rig.REMOTE_ERROR, "devices: gone"),
])
def test_no_exception_gets_to_c(monkeypatch, raised, result, line):
    def fail(self: Calls, count: int) -> None:
        raise raised

    monkeypatch.setattr(Calls, "devices", fail)
    lines: list[str] = []
    assert Calls(lambda level, text: lines.append(text)).guarded("devices")(1) == result
    assert lines == [line]


def test_progress_of_nothing(nccl):
    with refused(rig.INVALID_ARGUMENT, "progress: the object = 0xbad is not open"):
        nccl.call("ginProgress", 0xBAD)


def test_finalize(nccl):
    ctx = nccl.init()
    nccl.call("finalize", None)  # as NCCL 2.28 does for communicators after the first
    nccl.call("finalize", ctx)
    with refused(rig.INVALID_ARGUMENT, f"finalize: ctx = {ctx:#x} is not open: it was closed"):
        nccl.call("finalize", ctx)


def test_closing_the_communicator_closes_all(path):
    """NCCL leaves contexts open that the program has not destroyed."""
    loaded, room = Plugin(path, 14), ctypes.create_string_buffer(4096)
    with Rank(loaded, 0, 1).connected() as it:
        ctx = loaded.create_context(it.coll, *CONFIG)
        window = loaded.register(it.coll, ctypes.addressof(room), 4096)
    for call, arguments in (("destroyContext", (ctx.number,)), ("deregMrSym", (it.coll, window.number))):
        with pytest.raises(Refused, match="is not open"):
            loaded.call(call, *arguments)


@pytest.mark.parametrize("name, arguments", [
    ("devices", (None,)), ("getProperties", (0, None)), ("getGinProperties", (None,)),
    ("listen", (None, 0, None, None)), ("connect", (None, None, 1, 0, 1, None)),
    ("createContext", (1, None, None, None)), ("regMrSym", (1, 1, 1, 1, 0, None, None)), ("queryLastError", (1, None)),
])
def test_null(nccl, name, arguments):
    with refused(rig.INVALID_ARGUMENT, r"\w+: \w+ is NULL"):
        nccl.call(name, *arguments)


@pytest.mark.parametrize("dev", [-1, 1])
def test_no_such_device(nccl, dev):
    with refused(rig.INVALID_ARGUMENT, f"properties: dev = {dev}: the devices are 0 to 0"):
        nccl.properties(dev)
    with refused(rig.INVALID_ARGUMENT, f"listen: dev = {dev}"):
        nccl.listen(dev)


def test_memory(alone):
    room = ctypes.create_string_buffer(64)
    at = ctypes.addressof(room)
    for kind in (0, 4, 9):
        with refused(rig.INVALID_USAGE, f"reg_mr: memory of type {kind}: this plugin registers"):
            alone.plugin.register(alone.coll, at, 64, kind)
    for address, nbytes in ((0, 64), (at, 0)):
        with refused(rig.INVALID_ARGUMENT, f"reg_mr: {nbytes} bytes at {address:#x}"):
            alone.plugin.register(alone.coll, address, nbytes)
    windows = [alone.plugin.register(alone.coll, at, 64, kind, 1) for kind in (rig.HOST_MEMORY, rig.CUDA_MEMORY)]
    assert len({(rig.be32(window.rkeys), window.lkey) for window in windows}) == 2


# --- how ranks meet ------------------------------------------------------------------------------------------------


@pytest.fixture
def listening(nccl) -> Iterator[tuple[bytes, int]]:
    handle, listener = nccl.listen()
    yield handle, listener
    nccl.call("closeListen", listener)


def test_handles_of_others(nccl, listening):
    handle, listener = listening
    for strange, why in (
        (bytes(128), "the handle of rank 1 is not gpunetio's: all ranks must load this plugin"),
        (handle[:11] + b"\x63" + handle[12:], "the handle of rank 1 is of protocol 99 and this rank's of 1"),
    ):
        with refused(rig.INVALID_ARGUMENT, f"connect: {why}"):
            nccl.connect([handle, strange], 0, listener)
    with refused(rig.INVALID_ARGUMENT, "connect: the handle of rank 1 is not the one that this rank has listened"):
        nccl.connect([handle, handle[:40] + bytes(88)], 1, listener)
    with refused(rig.INVALID_ARGUMENT, "connect: rank 2: the ranks of 2 handles are 0 to 1"):
        nccl.connect([handle, handle], 2, listener)
    for nranks in (0, -1, 1 << 17):
        with refused(rig.INVALID_ARGUMENT, f"connect: nranks = {nranks}"):
            places = (ctypes.c_uint64 * 1)()
            nccl.made("connect", None, ctypes.addressof(places), nranks, 0, listener)
    coll = nccl.connect([handle], 0, listener)
    with refused(rig.INVALID_ARGUMENT, "connect: this listener has connected already"):
        nccl.connect([handle], 0, listener)
    nccl.call("closeColl", coll)


@given(st.binary(min_size=128, max_size=128))
@settings(max_examples=50, deadline=None)
def test_any_bytes_as_a_handle(any_listener, handle):
    loaded, mine, listener = any_listener
    with refused(rig.INVALID_ARGUMENT, "connect: the handle of rank 1 is not gpunetio's"):
        loaded.connect([mine, handle], 0, listener)


@pytest.fixture(scope="module")
def any_listener(path: str) -> Iterator[tuple[Plugin, bytes, int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUNETIO_NCCL_GPU", "host")
        loaded = Plugin(path, 14)
        loaded.init()
        handle, listener = loaded.listen()
        yield loaded, handle, listener
        loaded.call("closeListen", listener)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come(nccl, rank):
    handles, listeners = zip(*(nccl.listen() for _ in range(2)))
    began = time.monotonic()
    who = "rank 1 of 2 did not connect to" if rank == 0 else "rank 0 .*did not send 'welcome' within"
    with refused(rig.REMOTE_ERROR, f"connect: {who}"):
        nccl.connect(handles, rank, listeners[rank])
    assert time.monotonic() - began < 10
    for listener in listeners:
        nccl.call("closeListen", listener)


def test_a_caller_with_another_key(nccl, monkeypatch):
    """It gets no rank, and the one with the right key does."""
    monkeypatch.setenv("GPUNETIO_NCCL_TIMEOUT", "20")
    handles, listeners = zip(*(nccl.listen() for _ in range(2)))
    spoilt = handles[0][:32] + bytes(16) + handles[0][48:]
    found: dict[int, object] = {}

    def connect(rank: int) -> None:
        try:
            found[rank] = nccl.connect(handles, rank, listeners[rank])
        except Refused as error:
            found[rank] = error

    first = threading.Thread(target=connect, args=(0,))
    first.start()
    with refused(rig.REMOTE_ERROR, "connect: .*gave another key: it belongs to another rendezvous"):
        nccl.connect([spoilt, handles[1]], 1, listeners[1])
    connect(1)
    first.join(30)
    assert all(isinstance(coll, int) for coll in found.values()), found
    room = ctypes.create_string_buffer(64)
    windows: list[object] = []
    threads = [
        threading.Thread(target=lambda coll=coll: windows.append(nccl.register(coll, ctypes.addressof(room), 64)))
        for coll in found.values()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(windows) == 2  # two ranks of one process do not wait for each other's locks
    for number in (*found.values(),):
        nccl.call("closeColl", number)
    for listener in listeners:
        nccl.call("closeListen", listener)


@pytest.mark.parametrize("text", ["no", "0", "-1", "inf", "nan"])
def test_a_wrong_timeout(nccl, monkeypatch, text):
    monkeypatch.setenv("GPUNETIO_NCCL_TIMEOUT", text)
    with refused(rig.INVALID_ARGUMENT, f"listen: GPUNETIO_NCCL_TIMEOUT={text}: give a positive number of seconds"):
        nccl.listen()


def test_no_such_nic(nccl, monkeypatch):
    monkeypatch.setenv("GPUNETIO_NCCL_DEVICE", "soft99")
    with refused(rig.SYSTEM_ERROR, "listen: no device 'soft99'; there are: "):
        nccl.listen()


# --- errors of kernels ---------------------------------------------------------------------------------------------


def test_a_kernel_with_a_wrong_key(alone):
    """NCCL learns from queryLastError that a queue has failed, and the log says why, once."""
    ctx = alone.plugin.create_context(alone.coll, 2, 0, 1, 0, -1, 1, 1)
    keys = ctypes.create_string_buffer(b"\xab\xcd\xef\x00", 4)
    window = ctypes.create_string_buffer(struct.pack("<Q4s4x", ctypes.addressof(keys), b"\xab\xcd\xef\x00"), 16)
    assert not alone.plugin.has_error(ctx)
    with Gpu("host") as gpu, gpu.alloc(8, MemType.CPU_GPU) as out:
        arguments = ctx.handle, ctypes.addressof(window), 0, 1, 64, 1, 0, out
        assert gin_kernels.work[1, 1, gpu](*arguments).wait(20)
        assert out.array.view("i8")[0] < 0
    end = time.monotonic() + 10
    while not alone.plugin.has_error(ctx):  # states are looked at once per second
        assert time.monotonic() < end
        time.sleep(0.1)
    assert alone.plugin.has_error(ctx)
    (line,) = alone.plugin.lines
    assert "WQE 0 failed: " in line
    assert "0xabcdef00" in line
    alone.plugin.call("destroyContext", ctx.number)


def kernel_of(ctx: rig.Context, handle: int) -> int:
    """Run a kernel that puts to the only rank's window, and return its status."""
    with Gpu("host") as gpu, gpu.alloc(8, MemType.CPU_GPU) as out:
        assert gin_kernels.work[1, 1, gpu](ctx.handle, handle, 0, 1, 64, 0x77, 0, out).wait(20)
        return int(out.array.view("i8")[0])


def test_a_window_that_was_deregistered(alone):
    """Its keys are dead from then on, however well a kernel remembers them; other windows of the same memory live."""
    room = ctypes.create_string_buffer(bytes(range(1, 65)), 4 * 64)
    kept, gone = (alone.plugin.register(alone.coll, ctypes.addressof(room), 4 * 64) for _ in range(2))
    keys = [ctypes.create_string_buffer(ctypes.string_at(window.rkeys, 4), 4) for window in (kept, gone)]
    lkeys = [ctypes.string_at(window.handle + 8, 4) for window in (kept, gone)]

    def put(remote: int, local: int) -> tuple[int, bytes]:
        """Put with the keys of these windows. Return the status, and what was written where a put goes."""
        handle = ctypes.create_string_buffer(struct.pack("<Q4s4x", ctypes.addressof(keys[remote]), lkeys[local]), 16)
        ctx = alone.plugin.create_context(alone.coll, 2, 0, 1, 0, -1, 1, 1)
        ctypes.memset(ctypes.addressof(room) + 64, 0, 3 * 64)
        status = kernel_of(ctx, ctypes.addressof(handle))
        alone.plugin.call("destroyContext", ctx.number)
        return status, room.raw[64:128]

    put_well = 0, room.raw[:64]
    assert put(0, 0) == put(1, 1) == put_well
    alone.plugin.call("deregMrSym", alone.coll, gone.number)
    for remote, local in ((1, 0), (0, 1)):
        status, written = put(remote, local)
        assert status < 0
        assert written == bytes(64)
    assert put(0, 0) == put_well
    with refused(rig.INVALID_ARGUMENT, "dereg_mr: mhandle"):
        alone.plugin.call("deregMrSym", alone.coll, gone.number)
