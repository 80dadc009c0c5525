"""rdma_client_server_write: kernels at both ends write and send with the RDMA library, strong and weak.

    1. resources    device, GPU, an Rdma that kernels drive; server: buffers A, client: buffers B, C and flags F
    2. exchange     over TCP: whether the connection manager is used and where; descriptions of A and F and, without
                    it, of the connection
    3. connection   by these descriptions, or by address and port
    4. data path    four times, by a block of two threads: the server posts two receives and writes 1 into flag i; the
                    client waits for that, and sends B[i] and C[i]: even i by WRITE with immediate data into A[i], odd i
                    by SEND into the receives there
    5. end          both ends stop by themselves

Each wait also ends when the other end is gone, which the TCP connection shows.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import numpy as np

from .. import device as dev
from ..cm.address import gid_of, text_of
from ..core import BufArray, MemoryMap, RemoteMemory
from ..device import device_function, kernel
from ..device.status import NAMES
from ..enums import Access, MemType
from ..errors import BadConfigError, DocaError, DriverError, TimedOutError
from ..gpu import Gpu, GpuMemory
from ..jit.code import Launch
from ..rdma import Rdma, RdmaConnection
from ..rendezvous.link import Link
from ..verbs import PD, Context
from ..verbs import open as open_device
from .meeting import EndOptions, compare, meet, meet_in, watching

BUFFERS, THREADS = 4, 2
A_BYTES, HALF_BYTES, F_BYTES = 256, 128, 1
QUEUE_SIZE = 8192
CONNECTIONS = 2  # with the connection manager; one client is served
CM_PORT = 13579
WAIT_SECONDS = 30.0  # for the other end
PEER_SECONDS = 120.0  # for the other end to compile its kernel
KERNEL_WAIT_NS = int((WAIT_SECONDS + PEER_SECONDS) * 1e9)  # of a kernel, while the other end may still compile its own
LOOK_SECONDS = 0.05  # between two checks that the other end is still there
_EXPORT_BYTES = 64  # the longest description

_log = logging.getLogger(__name__)
_STATUS, _COMMITS, _ROUNDS, _ROUND_WORDS = 0, 8, 16, 4  # of a kernel's report


@dataclass(frozen=True, kw_only=True)
class SampleOptions(EndOptions):
    """`cm_port` and `server_addr` are those of the connection manager, for `use_cm`. The client sets `server_addr`."""

    gpu: str
    use_cm: bool = False
    cm_port: int = CM_PORT
    server_addr: str | None = None


@device_function
def take_messages(recv: dev.DevRdmaQueue, imms: int, conns: int, wait_ns: int, stop: int) -> int:
    """Wait for a message from each thread of the client, or for the word `stop`. Return their number, or a status."""
    start = dev.clock_ns()
    found = 0
    polls = 0
    while found < THREADS:
        more = dev.rdma_recv_wait_all(recv, imms + 4 * found, conns + 4 * found, 0)
        if more < 0:
            return more
        found += more
        if more == 0:
            if dev.ld_relaxed64(stop) != 0:
                return dev.EIO
            if dev.clock_ns() - start > wait_ns:
                return dev.ETIMEDOUT
            dev.nap(polls)
            polls += 1
    return found


@kernel
def serve(
    rdma: dev.DevRdma, conn: int, a: dev.DevBufArr, f: dev.DevBufArr, one: int, wait_ns: int, stop: int, out: int
) -> None:
    """Post receives, signal the client by a flag, and wait for its messages. Every second round is in weak mode."""
    thread = dev.thread_idx()
    recv = dev.rdma_get_recv(rdma)
    flags = dev.buf_get(f, 0)
    status = dev.OK
    for i in range(BUFFERS):
        odd = i & 1
        mine = dev.rdma_recv_strong(
            recv, dev.buf_get(a, i) if odd else 0, HALF_BYTES if odd else 0, HALF_BYTES * thread if odd else 0
        )
        status = -dev.block_max(-mine)
        if thread == 0 and status == dev.OK:
            status = dev.rdma_recv_commit_strong(recv)
            if status == dev.OK and odd:
                position, mask = dev.rdma_get_info(rdma, conn)
                status = dev.rdma_write_inline_weak(rdma, conn, flags, i, one, F_BYTES, 0, 0, position & mask)
                if status == dev.OK:
                    status = dev.rdma_commit_weak(rdma, conn, 1)
            elif status == dev.OK:
                status = dev.rdma_write_inline_strong(rdma, conn, flags, i, one, F_BYTES)
                if status == dev.OK:
                    status = dev.rdma_commit_strong(rdma, conn)
            if status == dev.OK:
                words = out + _ROUNDS + 8 * _ROUND_WORDS * i
                found = take_messages(recv, words + 8, words + 16, wait_ns, stop)
                dev.st64(words, found)
                status = min(found, 0)
        status = dev.block_broadcast(status, 0)
        if status != dev.OK:
            break
    if thread == 0:
        if status == dev.OK:
            status = min(dev.rdma_wait_all(rdma), 0)
        dev.st64(out + _STATUS, status)


@kernel
def send(
    rdma: dev.DevRdma, conn: int, a: dev.DevBufArr, b: dev.DevBufArr, c: dev.DevBufArr, f: dev.DevBufArr, wait_ns: int,
    stop: int, out: int,
) -> None:
    """Wait for each flag, and send half of its buffer from each of two threads. The word `stop` ends the waits."""
    thread = dev.thread_idx()
    status = dev.OK
    for i in range(BUFFERS):
        if thread == 0:
            start = dev.clock_ns()
            polls = 0
            while dev.ld_relaxed8(dev.buf_addr(dev.buf_get(f, 0)) + i) != 1 and status == dev.OK:
                dev.nap(polls)
                polls += 1
                if dev.clock_ns() - start > wait_ns:
                    status = dev.ETIMEDOUT
                elif dev.ld_relaxed64(stop) != 0:
                    status = dev.EIO
            dev.fence_acquire_sys()
        if dev.block_broadcast(status, 0) != dev.OK:
            break
        source = dev.buf_get(b if thread == 0 else c, i)
        if i & 1:
            mine = dev.rdma_send_strong(rdma, conn, source, 0, HALF_BYTES, i + thread, dev.RDMA_IMM)
        else:
            mine = dev.rdma_write_strong(
                rdma, conn, dev.buf_get(a, i), HALF_BYTES * thread, source, 0, HALF_BYTES, i + thread, dev.RDMA_IMM
            )
        status = -dev.block_max(-mine)
        if thread == 0 and status == dev.OK:
            status = dev.rdma_commit_strong(rdma, conn)
        status = dev.block_broadcast(status, 0)
        if status != dev.OK:
            break
    if thread == 0:
        commits = dev.rdma_wait_all(rdma)
        dev.st64(out + _COMMITS, commits)
        dev.st64(out + _STATUS, status if status != dev.OK else min(commits, 0))


def run(options: SampleOptions) -> None:
    """Run one end of the sample."""
    _log.info("Starting the sample")
    with ExitStack() as stack:
        end = Server(options, stack) if options.server is None else Client(options, stack)
        link = meet(end.ctx, options, _log.info)
        stack.push(lambda kind, error, trace: link.close(error))  # sends an error to the other end
        port = options.cm_port if options.use_cm else None
        compare(link, "rdma_client_server_write", {"--use-rdma-cm": options.use_cm, "--port": port})
        with watching(link, end.rdma.engine):
            connection = end.connect(link)
        meet_in(link, "ready", PEER_SECONDS)
        end.exchange(link, connection)
        meet_in(link, "done", PEER_SECONDS)
    _log.info("Sample finished successfully")


class End(ABC):
    """The common part of client and server: the device, the GPU, the `Rdma`, and memory for kernels."""

    options: SampleOptions
    ctx: Context
    gpu: Gpu
    pd: PD
    rdma: Rdma
    stop: GpuMemory
    out: GpuMemory

    def __init__(self, options: SampleOptions, stack: ExitStack):
        self.options, self._stack = options, stack
        self.ctx = stack.enter_context(open_device(options.device, port=options.nic_port))
        self.gpu = stack.enter_context(Gpu(options.gpu))
        self.pd = self.ctx.create_pd()
        self.rdma = Rdma(
            self.pd, gpu=self.gpu, permissions=Access.LOCAL_WRITE | Access.REMOTE_WRITE, gid_index=options.gid_index,
            send_queue_size=QUEUE_SIZE, recv_queue_size=QUEUE_SIZE,
            max_connections=CONNECTIONS if options.use_cm else 1, timeout=WAIT_SECONDS,
        )
        stack.enter_context(self.rdma)
        self.stop = self.gpu.alloc(8, MemType.CPU_GPU)
        self.out = self.gpu.alloc(_ROUNDS + 8 * _ROUND_WORDS * BUFFERS, MemType.CPU_GPU)

    def buffers(self, nbytes: int) -> tuple[MemoryMap, BufArray]:
        """Return zeroed memory for BUFFERS buffers of `nbytes`, and these for kernels."""
        memory = self._stack.enter_context(MemoryMap(self.pd, self.gpu.alloc(BUFFERS * nbytes, MemType.CPU_GPU)))
        return memory, self._stack.enter_context(BufArray(self.gpu, memory, BUFFERS, nbytes))

    def swap(self, link: Link, memory: MemoryMap, nbytes: int, num: int) -> BufArray:
        """Send the other end a description of this end's memory. Return its memory as `num` buffers for kernels."""
        link.send("memory", export=memory.export_rdma().hex())
        remote = RemoteMemory.from_export(link.expect("memory").raw("export", _EXPORT_BYTES))
        return self._stack.enter_context(BufArray(self.gpu, remote, num, nbytes))

    def swap_connections(self, link: Link) -> RdmaConnection:
        """Connect by descriptions."""
        description, connection = self.rdma.export()
        link.send("connection", export=description.hex())
        connection.connect(link.expect("connection").raw("export", _EXPORT_BYTES))
        return connection

    @abstractmethod
    def connect(self, link: Link) -> RdmaConnection:
        """Exchange the descriptions that both ends need, and connect."""

    @abstractmethod
    def exchange(self, link: Link, connection: RdmaConnection) -> None:
        """Run the kernel."""

    def finish(self, launch: Launch, link: Link, connection: RdmaConnection) -> np.ndarray:
        """Wait for the kernel, and return its report.

        If the other end is gone, stop the kernel and raise the error that ended the other end. DriverError if an
        operation has failed.
        """
        seconds = BUFFERS * WAIT_SECONDS + PEER_SECONDS
        end = time.monotonic() + seconds
        try:
            while not launch.wait(LOOK_SECONDS):
                if link.failure is not None:
                    raise link.failure
                if time.monotonic() > end:
                    raise TimedOutError(f"the kernel did not end within {seconds:g} s")
        finally:
            if not launch.ended:
                self._end_waits(connection)
        report = self.out.array.view(np.int64)
        status = int(report[_STATUS // 8])
        if status != 0:
            if (failure := link.failure_soon()) is not None:
                raise failure
            error = connection.last_error()
            raise DriverError(f"the kernel has failed: {NAMES.get(status, status)}{f'; {error}' if error else ''}")
        return report

    def _end_waits(self, connection: RdmaConnection) -> None:
        """End the kernel's waits: for the peer by the word `stop`, for completions by ending the connection."""
        self.stop.array.view(np.int64)[0] = 1
        with suppress(DocaError):  # the other end has disconnected
            connection.disconnect()


class Server(End):
    """The end with buffers that the client fills."""

    memory: MemoryMap
    a: BufArray
    f: BufArray

    def connect(self, link: Link) -> RdmaConnection:
        self.memory, self.a = self.buffers(A_BYTES)
        if self.options.use_cm:
            self.rdma.listen(self.options.cm_port)
            _log.info("Listening for a connection at port %d", self.options.cm_port)
            link.send("listening", address=text_of(self.ctx.query_gid(1, self.options.gid_index)))
        self.f = self.swap(link, self.memory, BUFFERS * F_BYTES, 1)
        if not self.options.use_cm:
            return self.swap_connections(link)
        connection = self.rdma.next_request(WAIT_SECONDS)
        connection.accept()
        connection.established(WAIT_SECONDS)
        return connection

    def exchange(self, link: Link, connection: RdmaConnection) -> None:
        one = self.gpu.alloc(F_BYTES, MemType.CPU_GPU)
        one.array[0] = 1
        self._show("before")
        launch = serve[1, THREADS, self.gpu](
            self.rdma, connection.id, self.a, self.f, one, KERNEL_WAIT_NS, self.stop, self.out
        )
        report = self.finish(launch, link, connection)
        for words in report[_ROUNDS // 8 :].reshape(BUFFERS, _ROUND_WORDS):
            imms, conns = words[1:2].view(np.uint32), words[2:3].view(np.uint32)
            _log.info(
                "RDMA Recv %d ops completed with immediate values %d and %d! Connections %d and %d", words[0], *imms,
                *conns,
            )
        self._show("after")

    def _show(self, when: str) -> None:
        _log.info("Buffers of the server %s the client's messages:", when)
        for i, buffer in enumerate(self.memory.array().reshape(BUFFERS, A_BYTES)):
            first, second = (buffer[at : at + 4].tolist() for at in (0, HALF_BYTES))
            _log.info("Buffer %d -> offset 0: %x%x%x%x | offset 128: %x%x%x%x", i, *first, *second)


class Client(End):
    """The end with the data to send, and the flags that it waits for."""

    a: BufArray
    b: BufArray
    c: BufArray
    f: BufArray

    def connect(self, link: Link) -> RdmaConnection:
        memory, self.b = self.buffers(HALF_BYTES)
        memory.array().reshape(BUFFERS, HALF_BYTES)[:] = 0xB0 + np.arange(BUFFERS)[:, None]
        memory, self.c = self.buffers(HALF_BYTES)
        memory.array().reshape(BUFFERS, HALF_BYTES)[:] = 0xC0 + np.arange(BUFFERS)[:, None]
        if self.options.use_cm:
            self._check_address(link)
        flags, _ = self.buffers(F_BYTES)
        self.f = self._stack.enter_context(BufArray(self.gpu, flags, 1, BUFFERS * F_BYTES))
        self.a = self.swap(link, flags, A_BYTES, BUFFERS)
        if not self.options.use_cm:
            return self.swap_connections(link)
        assert self.options.server_addr is not None
        connection = self.rdma.connect_to(self.options.server_addr, self.options.cm_port)
        connection.established(WAIT_SECONDS)
        return connection

    def _check_address(self, link: Link) -> None:
        """Raise BadConfigError unless the server listens at the address that was given."""
        given = self.options.server_addr
        assert given is not None
        address = link.expect("listening").text("address")
        if text_of(gid_of(given)) != address:
            raise BadConfigError(f"--server-addr {given}: {link.peer} listens at {address!r:.42}; give that address")

    def exchange(self, link: Link, connection: RdmaConnection) -> None:
        launch = send[1, THREADS, self.gpu](
            self.rdma, connection.id, self.a, self.b, self.c, self.f, KERNEL_WAIT_NS, self.stop, self.out
        )
        report = self.finish(launch, link, connection)
        _log.info(
            "Client posted and completed %d RDMA commits on connection %d. Waiting on the exit flag.",
            report[_COMMITS // 8], connection.id,
        )
