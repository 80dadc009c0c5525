"""The CPU proxy: kernels leave the producer index in memory, and a host thread rings the doorbell."""

from __future__ import annotations

import atexit
import functools
import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import NoReturn, Protocol
from weakref import WeakValueDictionary, ref

from ..closing import Closing
from ..dropped import Droppable, drop_root, living
from ..enums import MemType, SendDbrModeExt
from ..errors import BadStateError, FullError, InvalidValueError, TimedOutError
from ..formats.doorbell import QP_DBREC
from ..interrupts import Whole, deferred
from ..jit.launch import observers
from ..limits import within_limits
from ..memory import HostMemory
from ..nic.host.engine import POLLFD, yield_every
from ..service import STOP_TIMEOUT, ServiceThread
from .device import GpuDevice
from .proxy_loop import PROXY, PROXY_ROW, ask, forward, serve
from .spans import Sender

CAPACITY = 1 << 14  # queues per service
SPIN_NS = 1_000_000  # how long the thread spins after the last doorbell while no known kernel runs
SLEEP_MS = 1
_ANSWER_TIMEOUT = 10.0
_WORD_BYTES = 64  # kernels write a word that has its own cache line


class Forwarding:
    """The CPU's work for one queue: read the producer index, keep the doorbell record, and ring.

    `word` is the host address of an index that kernels maintain anyway. Without `word`, kernels announce at
    `device_address`, a word that this object allocates.
    """

    device_address: int
    row_address: int

    def __init__(self, gpu: GpuDevice, qp: Sender, mode: SendDbrModeExt, word: int | None = None):
        self._memory = gpu.alloc(_WORD_BYTES + PROXY_ROW.size, MemType.CPU_GPU, _WORD_BYTES)
        self.device_address = self._memory.device_address
        self._row = PROXY_ROW.at(self._memory.array, _WORD_BYTES)
        self._word = self._memory.array[:8].view("<i8")
        self.row_address = int(self._row.ctypes.data)
        self._row["word"] = int(self._word.ctypes.data) if word is None else word
        self._row["early"] = word is None  # otherwise kernels ring, and the CPU writes the record later
        self._row["register"], self._row["qpn"] = qp.doorbell_register, qp.qpn
        if mode is not SendDbrModeExt.NO_DBR_HW:
            self._row["record"] = qp.dbr_address + QP_DBREC.snd
        self.service: ProxyService | None = None

    @property
    def announced(self) -> int:
        """Return the producer index that kernels left in this object's own word; 0 if it has none."""
        return int(self._word[0])

    @property
    def forwarded(self) -> int:
        """Return the last index that was forwarded."""
        return int(self._row["last"])

    def progress(self) -> bool:
        """Forward a new producer index. Return whether there was one."""
        return bool(forward(self.row_address))

    def watch(self, word: int) -> None:
        """Read the index at its new address `word`. No service may be forwarding the queue."""
        self._row["word"] = word

    def reset(self) -> None:
        """Count the queue from 0 again. No service may be forwarding the queue."""
        self._word[0] = self._row["last"] = 0

    def close(self) -> None:
        """Free the memory."""
        if self.service:
            self.service.drop(self)
        self._memory.close()


class Forwarded(Protocol):
    """A queue whose doorbells the CPU rings: an `ExportedQp`."""

    @property
    def qp(self) -> Sender:
        """Return the queue."""
        ...

    @property
    def forwarding(self) -> Forwarding:
        """Return the CPU's work for the queue."""
        ...


_services: WeakValueDictionary[int, ProxyService] = WeakValueDictionary()  # by id()


@atexit.register
def _stop_all() -> None:
    """Stop the threads before Python ends and frees the memory that they poll."""
    for service in living(_services):
        service.close()


def _observer(service: ProxyService) -> Callable[[int], None]:
    """Return a function that reports kernels to a service without keeping the service alive."""
    known = ref(service)

    def tell(change: int) -> None:
        if (service := known()) is not None:
            service.launched(change)

    return tell


class ProxyService(Closing, Droppable, metaclass=Whole):
    """A thread that forwards the doorbells of many queues (`doca_gpu_verbs_create_service`).

    While kernels launched by `@kernel` run, the thread spins, yielding its core. Otherwise, if no kernel has announced
    anything for a millisecond, the thread sleeps and looks once per millisecond.
    """

    _kick_fd: int | None = None

    def __init__(self) -> None:
        self._memory = HostMemory(PROXY.size + POLLFD.itemsize + 8 * CAPACITY)
        self._proxy = self._memory.view(PROXY.dtype)[0]
        self._rows = self._memory.view("<i8", PROXY.size + POLLFD.itemsize, CAPACITY)
        self._lock, self._kick_lock, self._ending = threading.Lock(), threading.Lock(), threading.Lock()
        self._served: list[Forwarding] = []
        self._pid = os.getpid()
        self._observer = _observer(self)
        with ExitStack() as undo:
            undo.callback(self._memory.close)
            with within_limits("a proxy service", 1):
                kick_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, kick_fd)
            self._memory.view(POLLFD, PROXY.size)[0] = (kick_fd, select.POLLIN, 0)
            proxy = self._proxy
            proxy["rows"], proxy["pollfd"] = int(self._rows.ctypes.data), self._memory.address + PROXY.size
            proxy["kick_fd"], proxy["spin_ns"], proxy["sleep_ms"] = kick_fd, SPIN_NS, SLEEP_MS
            proxy["yield_every"] = yield_every()
            proxy["stop"] = 1
            serve(self._memory.address)  # compiles, or loads from the cache, and returns immediately
            proxy["stop"] = 0
            self._thread = ServiceThread("gpunetio proxy", functools.partial(serve, self._memory.address))
            self._thread.start()
            undo.pop_all()
        self._kick_fd = kick_fd
        observers.append(self._observer)
        _services[id(self)] = self

    @property
    def open_here(self) -> bool:
        """Return whether the service is open, and was created by this process."""
        return not self.closed and self._pid == os.getpid()

    def when_dropped(self) -> None:
        drop_root(self)

    def monitor(self, queue: Forwarded) -> None:
        """Forward this queue's doorbells from now on, in place of any other service
        (`doca_gpu_verbs_service_monitor_qp`)."""
        self._check()
        forwarding = queue.forwarding
        if forwarding.service is self:
            return
        if forwarding.service:
            forwarding.service.drop(forwarding)
        self.add(forwarding)

    def forget(self, queue: Forwarded) -> None:
        """Stop forwarding this queue's doorbells. When this returns, the thread no longer touches the queue."""
        self._check()
        if queue.forwarding.service is not self:
            raise InvalidValueError(f"{queue.qp} is not monitored by this service")
        self.drop(queue.forwarding)

    def add(self, forwarding: Forwarding) -> None:
        """Add a queue that no service forwards."""
        with self._lock:
            count = len(self._served)
            if count == CAPACITY:
                raise FullError(f"a proxy service takes {CAPACITY} queues: create another one")
            self._served.append(forwarding)
            self._rows[count] = forwarding.row_address
            self._proxy["count"] = count + 1
            forwarding.service = self
        self._kick()

    def drop(self, forwarding: Forwarding) -> None:
        """Remove a queue. When this returns, the thread no longer touches the queue."""
        with self._lock:
            at, last = self._served.index(forwarding), len(self._served) - 1
            self._served[at] = self._served[last]
            self._rows[at] = self._rows[last]
            self._served.pop()
            self._proxy["count"] = last
            forwarding.service = None
            self._settle()

    def _settle(self) -> None:
        """Wait until the thread has seen the present table."""
        if not self.running:
            return
        ask(self._memory.address)
        self._kick()
        end = time.monotonic() + _ANSWER_TIMEOUT
        while int(self._proxy["answered"]) != int(self._proxy["asked"]):
            if time.monotonic() > end:
                raise TimedOutError(f"the proxy service did not answer within {_ANSWER_TIMEOUT:g} s")
            os.sched_yield()

    def launched(self, change: int) -> None:
        """Count a kernel that was launched (+1) or has ended (-1)."""
        with self._kick_lock:  # kernels launched before the service started were not counted, but their ends are told
            self._proxy["busy"] = max(0, int(self._proxy["busy"]) + change)
        if change > 0:
            self._kick()

    def _kick(self) -> None:
        with self._kick_lock:
            if self._kick_fd is not None:
                os.eventfd_write(self._kick_fd, 1)

    def __repr__(self) -> str:
        return f"<proxy service of {len(self._served)} queues{', closed' if self.closed else ''}>"

    @property
    def running(self) -> bool:
        """Return whether the thread is running."""
        return self._thread.running

    @property
    def closed(self) -> bool:
        """Return whether `close()` was called."""
        return self._kick_fd is None

    @deferred()
    def close(self) -> None:
        """Stop the thread (`doca_gpu_verbs_destroy_service`). The doorbells of its queues are no longer forwarded."""
        with self._ending:  # a thread that closes dropped objects may be doing this already
            if self.open_here:
                self._end()

    def _end(self) -> None:
        if self._observer in observers:  # a fork empties the list
            observers.remove(self._observer)
        self._proxy["stop"] = 1
        self._kick()
        if not self._thread.join():
            raise TimedOutError(f"the proxy service did not stop within {STOP_TIMEOUT:g} s: close it again")
        with self._lock:
            for forwarding in self._served:
                forwarding.service = None
            self._served.clear()
        with self._kick_lock:
            os.close(int(self._proxy["kick_fd"]))
            self._kick_fd = None
        self._memory.close()

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise BadStateError(f"the proxy service was created in process {self._pid}: create one here")
        if self.closed:
            raise BadStateError("the proxy service is closed")

    def __reduce__(self) -> NoReturn:
        raise BadStateError("a proxy service cannot be pickled: it is a thread of this process")
