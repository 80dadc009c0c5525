"""Tools of probes: the device, the GPU, a loopback path to the device, and memory with a pattern."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv6Address
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from ... import compiler
from ...enums import GidType, LinkLayer, UarAllocationType
from ...errors import BadStateError, DocaError, DriverError, NotFoundError
from ...memory import BytesLike
from ...verbs import PD, QP, Context
from ...verbs import open as open_context
from ..finding import Evidence, Finding, fail, ok, skip

if TYPE_CHECKING:
    from ...gpu import ExportedQp, Gpu

SIZE = 16 << 10  # bytes of a message: several packets at any MTU
PATIENCE = 5.0  # seconds to wait for a completion, longer than all retries take
_RETRIES = 3  # of at least 67 ms each; cards wait longer
_PAGES = UarAllocationType.NONCACHE_DEDICATED, UarAllocationType.NONCACHE  # the second as a fall-back
_SUMMARY = 78  # characters
_T = TypeVar("_T")


class Way(NamedTuple):
    """The port and the GID that a device uses to reach itself."""

    port: int
    sgid_index: int
    text: str

    def connect(self, queue: QP | ExportedQp) -> None:
        """Connect a queue pair to itself."""
        queue.connect(queue, port=self.port, sgid_index=self.sgid_index, retry_cnt=_RETRIES)  # type: ignore[arg-type]


@dataclass
class Bench:
    """A device and a GPU. `open_device` and `open_gpu` open them; `opened` closes them."""

    name: str
    which_gpu: str  # as `Gpu` takes it
    opened: ExitStack
    patience: float = PATIENCE
    _ctx: Context | None = None
    _gpu: Gpu | None = None

    def _open(self, what: _T | None, name: str) -> _T:
        if what is None:
            raise BadStateError(f"{name} is not open")
        return what

    @property
    def is_open(self) -> bool:
        """Whether the device is open."""
        return self._ctx is not None

    @property
    def ctx(self) -> Context:
        """The device. Raises BadStateError if it did not open."""
        return self._open(self._ctx, self.name)

    @ctx.setter
    def ctx(self, ctx: Context) -> None:
        self._ctx = self.opened.enter_context(ctx)

    @property
    def gpu(self) -> Gpu:
        """The GPU or the host's threads, where kernels run. Raises BadStateError if neither opened."""
        return self._open(self._gpu, f"GPU {self.which_gpu}")

    @gpu.setter
    def gpu(self, gpu: Gpu) -> None:
        self._gpu = self.opened.enter_context(gpu)

    @cached_property
    def pd(self) -> PD:
        """A protection domain for all probes."""
        return self.ctx.create_pd()

    @property
    def software(self) -> bool:
        """Whether it is a software NIC."""
        return bool(self.ctx.provider.software)

    @property
    def on_gpu(self) -> bool:
        """Whether kernels run on a GPU rather than on CPU threads."""
        return self._gpu is not None and self._gpu.target == "cuda"

    def without_devx(self) -> str:
        """Return why kernels cannot drive this device; "" if they can."""
        return "" if self.ctx.has_devx else f"{self.name} has no DEVX: only the CPU can drive its queues"

    def without_gpu_memory(self) -> str:
        """Return why there is no GPU memory to probe; "" if there is."""
        if not self.on_gpu:
            return "no GPU"
        if self.gpu.backend.integrated:
            return f"GPU {self.gpu.name} is integrated: queues and data are in CPU_GPU memory, and the CPU proxy rings"
        return ""

    def register_error(self) -> DriverError | None:
        """Return why kernels cannot ring doorbells, None if they can. It tries the page that their queues share."""
        page = self.ctx.shared_uar(*_PAGES)
        try:
            self.gpu.unexport_uar(self.gpu.export_uar(page.reg_addr))
        except DriverError as error:
            return error
        return None

    def way(self) -> Way:
        """Return the first active port, and its GID that works in most networks.

        Raises BadStateError if no port is active, and NotFoundError if the port has no GID.
        """
        ctx = self.ctx
        states = {port: ctx.query_port(port).state for port in range(1, ctx.query_device().phys_port_cnt + 1)}
        port = next((port for port, state in states.items() if state.is_active), None)
        if port is None:
            told = ", ".join(f"port {number} is {state.name}" for number, state in states.items())
            raise BadStateError(f"no port of {self.name} is active: {told}")
        about = ctx.query_port(port)
        size = min(about.gid_tbl_len, ctx.query_device().gid_table_size)
        gids = [(index, gid) for index in range(size) if any(gid := bytes(ctx.query_gid(port, index)))]
        if not gids:
            raise NotFoundError(f"port {port} of {self.name} has no GID: give its network interface an address")
        if about.link_layer == LinkLayer.INFINIBAND:
            index, gid = gids[0]
        else:
            index, gid = min(gids, key=lambda each: _rank(ctx.gid_type(port, each[0]), each[1]))
        return Way(port, index, f"port {port}, GID {index} ({_written(gid)}), MTU {about.active_mtu}")


def _rank(kind: GidType, gid: bytes) -> tuple[bool, bool, bool]:
    """Rank RoCE v2 before v1, routable addresses before link-local ones, IPv4 before IPv6."""
    address = IPv6Address(gid)
    return kind != GidType.ROCE_V2, (address.ipv4_mapped or address).is_link_local, address.ipv4_mapped is None


def _written(gid: bytes) -> str:
    address = IPv6Address(gid)
    return str(address.ipv4_mapped or address)


def pattern() -> bytes:
    """Return random bytes, which no memory has by chance."""
    return os.urandom(SIZE)


def differences(wanted: bytes, found: BytesLike) -> str:
    """Return how written bytes differ from the wanted ones; "" if they do not."""
    wrong = np.flatnonzero(np.frombuffer(wanted, np.uint8) != np.frombuffer(found, np.uint8))
    return f"{len(wrong)} of {len(wanted)} bytes are wrong, the first at {wrong[0]}" if len(wrong) else ""


# --- the first two probes --------------------------------------------------------------------------------------------


def open_device(bench: Bench) -> Iterator[Finding]:
    """Open the device. The first use of a software NIC compiles it."""
    bench.ctx = open_context(bench.name)
    device = bench.ctx.query_device()
    what = "software NIC" if bench.software else f"firmware {device.fw_ver}"
    yield ok(f"{bench.name} opens: {what}", Evidence("ibv_open_device", f"{bench.name}, {what}"))


def open_gpu(bench: Bench) -> Iterator[Finding]:
    """Open the GPU, or else the host's threads."""
    with compiler.needed_for("no kernel can run"):
        from ...gpu import Gpu
    try:
        bench.gpu = Gpu(bench.which_gpu)
    except DocaError as error:
        yield failed(error)
        bench.gpu = Gpu("host")
        return
    if bench.on_gpu:
        yield ok(f"GPU {bench.gpu.name} opens", Evidence("cudaSetDevice", bench.gpu.name))
    else:
        yield skip("no GPU: kernels run on CPU threads")


# --- errors ----------------------------------------------------------------------------------------------------------


def failed(error: Exception) -> Finding:
    """Turn an error of gpunetio or of the system into a finding. Its text has the cause, the value and a cure."""
    text = " ".join(str(error).split()) or type(error).__name__
    return fail(text if len(text) <= _SUMMARY else f"{text[: _SUMMARY - 1]}…", Evidence(type(error).__name__, text))


def tried(trial: Callable[[Bench], Iterator[Finding]], bench: Bench) -> Iterator[Finding]:
    """Run a probe, and turn its errors into findings."""
    try:
        yield from trial(bench)
    except (DocaError, OSError) as error:
        yield failed(error)
    except Exception as error:
        yield skip(f"a bug in this probe: {error!r}")
