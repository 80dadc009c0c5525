"""The data path accelerator (DPA) of a device: a place on the NIC where kernels drive its queues (`doca_dpa`).

The software NIC's DPA consists of host threads that run `@kernel` functions in host memory:

    with Dpa(ctx) as dpa:
        completion = dpa.create_completion(64)
        qp = pd.create_qp(dpa=dpa, sq_wr=64, send_dpa_completion=completion)
        ...
        work[1, threads, dpa](qp.get_dpa_handle(dpa), ...).wait(timeout=10)
"""

from __future__ import annotations

from contextlib import ExitStack

from .arguments import device_deadline, instance
from .enums import CqOverrun, MemType
from .errors import InUseError, InvalidValueError, NotSupportedError
from .gpu import ExportedQp, Gpu, GpuMemory, QpError
from .gpu.gpu import DEFAULT_TIMEOUT
from .gpu.memory import LAUNCH_TIMEOUT, RunningLaunches
from .jit.code import Launch
from .verbs import CQ, QP, Context, Handle
from .verbs.dpa import AnyDpa, AnyDpaCompletion


class Dpa(AnyDpa):
    """The DPA of a device (`doca_dpa_create`). Closing it also closes the completions and queue pairs made for it.

    `kernel[grid, block, dpa](…)` launches grid × block DPA threads (`doca_dpa_kernel_launch_update_set`). Closing an
    object that they may use waits for them. After `timeout` seconds, any wait of a device function on a queue ends with
    ETIMEDOUT.

    NotSupportedError if the device has no DPA.
    """

    _rank = 3
    _closes_users = True
    warp: int = 1  # with `ordinal` and `target`, everything that `@kernel` needs to know about a place
    ordinal: int = 0

    def __init__(self, ctx: Context, *, timeout: float = DEFAULT_TIMEOUT):
        super().__init__(instance("ctx", ctx, Context))
        self._use(ctx)
        if not ctx.provider.has_dpa:
            raise NotSupportedError(f"{ctx.name} has no DPA: export its queue pairs to a Gpu, or open a software NIC")
        self.timeout: float = device_deadline(timeout)
        self._launches = RunningLaunches()
        self._queues: dict[Handle, ExportedQp] = {}
        with ExitStack() as undo:
            self._threads = Gpu("host")
            undo.callback(self._threads.close)
            self._opened(f"DPA of {ctx.name}", undo)

    @property
    def target(self) -> str:
        """Return the target that kernels are compiled for."""
        self.check_open()
        return self._threads.target

    def create_completion(self, cqe: int) -> DpaCompletion:
        """Create a completion context of `cqe` entries, a power of two (`doca_dpa_completion_create`)."""
        return DpaCompletion(self, cqe)

    def alloc(self, nbytes: int) -> GpuMemory:
        """Allocate zeroed, page-aligned memory of the DPA (`doca_dpa_mem_alloc`); `array` is the CPU's view of it.

        Register it for payload or, with `Context.register_umem`, to hold a queue.
        """
        self.check_open()
        return self._threads.alloc(nbytes, MemType.CPU_GPU)

    def last_error(self, qp: QP) -> QpError | None:
        """Return the first error completion of a queue pair that a kernel has seen, or None."""
        self.check_open()
        return self._queue(qp).last_error()

    def wait_idle(self) -> None:
        self.wait_for_kernels(str(self))
        super().wait_idle()

    # --- for launches and queue pairs --------------------------------------------------------------------------------

    def used_by(self, launch: Launch) -> None:
        """Keep the DPA open while `launch` runs: closing waits for the kernel."""
        self._launches.add(launch)

    def wait_for_kernels(self, what: str) -> None:
        """Wait until no kernel runs here: any kernel may have the handle, which is a plain number."""
        self._launches.wait(self.timeout + LAUNCH_TIMEOUT, what)

    def attach(self, qp: Handle) -> None:
        self._queues[qp] = self._threads.export_qp(instance("qp", qp, QP), timeout=self.timeout)

    def detach(self, qp: Handle) -> None:
        """Forget a queue pair that is being closed. Its export is already closed."""
        self._queues.pop(qp, None)

    def restart(self, qp: Handle) -> None:
        self._queues[qp].reset()

    def handle(self, qp: Handle) -> int:
        return self._queue(qp).device_address

    def _queue(self, qp: Handle) -> ExportedQp:
        if qp not in self._queues:
            raise InvalidValueError(f"{qp} is not a queue pair of {self}")
        return self._queues[qp]


class DpaCompletion(AnyDpaCompletion):
    """The completions of a queue of a DPA's queue pair (`doca_dpa_completion`). Kernels poll the ring of the CQ `cq`.

    This object serves one queue at a time, because the device library finds a CQE by the index of its WQE.
    """

    _rank = 1
    dpa: Dpa
    cq: CQ

    def __init__(self, dpa: Dpa, cqe: int):
        super().__init__(dpa.ctx)
        self._use(dpa.ctx, dpa)
        self.dpa = dpa
        with ExitStack() as undo:
            self.cq = dpa.ctx.create_cq(cqe, overrun=CqOverrun.ENABLE)
            undo.callback(self.cq.close)
            self._use(self.cq)
            self._opened(f"DPA completion {self.cq.cqn:#x} of {dpa.ctx.name}", undo)

    @property
    def entries(self) -> int:
        """Return the number of CQEs in the ring."""
        return self.cq.entries

    def check_free(self) -> None:
        if users := self.users:
            raise InUseError(f"{self} is used by {', '.join(map(str, users))}: create another completion")
