"""Contexts: queues to all ranks, signals and counters, and the structures through which NCCL's kernels find them."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from ..device.library import foreign_kernels
from ..enums import QpState
from ..errors import InvalidValueError, NotSupportedError
from ..formats.device_structs import DEV_CQ, DEV_QP
from ..gpu import ExportedQp
from ..gpu.export import MAX_SLOTS
from ..rendezvous import Message, endpoint_of, endpoint_values
from .abi import UNDEFINED, Version
from .connection import Collective
from .settings import DEVICE, ON_GPU
from .window import packed_keys

DEPTH = 128  # slots of a send queue, if NCCL leaves the number to the plugin
_WORD = 8  # bytes of a signal or a counter
_MOST_WORDS = 1 << 28
_MOST_CONTEXTS = 1 << 12
_LOOK_SECONDS = 1.0  # seconds between two checks of the states of all queues, each of which takes a command
_MIN_RNR_TIMER = 12  # 0.64 ms (IBTA 9.7.5.2.8), which NCCL sets for its own queues


@dataclass(frozen=True)
class Sizes:
    """The sizes that NCCL asks for: signals and counters per context, contexts, slots of a queue, its traffic class.

    `backend` is the layout of `ncclGinGdakiGPUContext` that the program's kernels were compiled for.
    """

    signals: int
    counters: int
    contexts: int
    depth: int
    traffic_class: int
    backend: int

    @classmethod
    def of(cls, version: Version, config: bytes) -> Sizes:
        """Return the sizes in NCCL's structure. InvalidValueError and NotSupportedError say what is wrong with them."""
        found = version.config.at(config)
        limits = {
            "nSignals": _MOST_WORDS, "nCounters": _MOST_WORDS, "nContexts": _MOST_CONTEXTS, "queueDepth": MAX_SLOTS,
        }
        for name, most in limits.items():
            if not 0 <= int(found[name]) <= most:
                raise InvalidValueError(f"{name} = {int(found[name])}: it must be from 0 to {most}")
        traffic_class = int(found["trafficClass"])
        if traffic_class in UNDEFINED:
            traffic_class = 0
        elif not 0 <= traffic_class <= 255:
            raise InvalidValueError(f"trafficClass = {traffic_class}: it must be from 0 to 255, or undefined")
        backend = int(found["backendVersion"]) if "backendVersion" in version.config.offsets else 1
        if backend not in version.gpu_contexts:
            known = " and ".join(map(str, version.gpu_contexts))
            raise NotSupportedError(
                f"backendVersion = {backend}: this plugin knows {known}; compile the program with headers of NCCL "
                "2.30.3 to 2.30.7"
            )
        return cls(
            int(found["nSignals"]), int(found["nCounters"]), int(found["nContexts"]), int(found["queueDepth"]) or DEPTH,
            traffic_class, backend,
        )


class _Words:
    """`count` words to which the NICs of all ranks add: signals or counters. Keys address them from 0 on."""

    def __init__(self, ranks: Collective, count: int, undo: ExitStack):
        self.address = self.lkey = self.rkey = 0
        if count:
            device = ranks.device
            memory = device.gpu.alloc(count * _WORD, device.word_memory)
            undo.callback(memory.close)
            region = device.pd.register(memory, iova=0)
            undo.callback(region.close)
            self.address, self.lkey, self.rkey = memory.device_address, region.lkey, region.rkey

    def fields(self, name: str, context: int, each: int, rkeys: int) -> dict[str, int]:
        """Return the members of a context's table; `rkeys` is the address of all ranks' keys."""
        if not self.address:
            return {}
        first = context * each
        return {
            f"{name}_buffer": self.address + first * _WORD, f"{name}_rkeys": rkeys, f"{name}_lkey": self.lkey,
            f"{name}_offset": first,
        }


class Contexts:
    """The result of `createContext`. `device_address` is the array of `ncclGinGdakiGPUContext`."""

    device_address: int

    def __init__(self, ranks: Collective, version: Version, sizes: Sizes):
        self._ranks, self._version, self._sizes = ranks, version, sizes
        self._looked, self._error = 0.0, ""
        with ExitStack() as undo:
            with ranks.telling("createContext"):
                self._signals = _Words(ranks, sizes.signals * sizes.contexts, undo)
                self._counters = _Words(ranks, sizes.counters * sizes.contexts, undo)
                self._sink = _Words(ranks, 1, undo)
                self._mains, self._companions = self._create_queues(undo)
            told = ranks.gather(
                "createContext", version=version.number, signals=sizes.signals, counters=sizes.counters,
                contexts=sizes.contexts, process=os.getpid(), gid=ranks.device.ctx.query_gid().hex(),
                signals_key=self._signals.rkey, counters_key=self._counters.rkey,
                qps=[endpoint_values(queue.qp.endpoint()) for queue in self._mains],
            )
            if ranks.device.ctx.provider.software:
                _check_nics(told)
            self._connect(told)
            ranks.barrier()  # a peer that is not connected yet drops packets
            self.device_address = self._describe(told, undo)
            if ranks.device.gpu.backend.has_memory:  # NCCL launches kernels, and a GPU cannot wake a NIC that sleeps
                undo.enter_context(foreign_kernels())
            self._undo = undo.pop_all()

    def _create_queues(self, undo: ExitStack) -> tuple[list[ExportedQp], list[ExportedQp]]:
        """Return the queues, and their companions if there are counters. The index is context · ranks + rank."""
        device, depth = self._ranks.device, self._sizes.depth
        mains, companions = [], []
        for _ in range(self._sizes.contexts * self._ranks.size):
            if self._sizes.counters or self._version.always_companions:
                group = device.gpu.create_qp_group(device.pd, depth)
                undo.callback(group.close)
                mains.append(group.main)
                companions.append(group.companion)
            else:
                mains.append(device.gpu.create_qp(device.pd, depth))
                undo.callback(mains[-1].close)
        return mains, companions

    def _connect(self, told: list[Message]) -> None:
        """Connect each queue to the peer's. Connect companions, which add to this rank's counters, to themselves."""
        size, own, sizes = self._ranks.size, self._ranks.rank, self._sizes
        endpoints = []
        for message in told:
            for name in ("signals", "counters", "contexts"):
                message.integer(name, getattr(sizes, name), getattr(sizes, name))
            message.integer("version", self._version.number, self._version.number)
            parts = message.parts("qps", sizes.contexts * size)
            if len(parts) != sizes.contexts * size:
                raise message.wrong("qps", f"a list of {sizes.contexts * size} queue pairs")
            endpoints.append(parts)
        for i, queue in enumerate(self._mains):
            context, peer = divmod(i, size)
            remote = queue if peer == own else endpoint_of(endpoints[peer][context * size + own])
            queue.connect(remote, traffic_class=sizes.traffic_class, min_rnr_timer=_MIN_RNR_TIMER)
        for companion in self._companions:
            companion.connect(companion, traffic_class=sizes.traffic_class, min_rnr_timer=_MIN_RNR_TIMER)

    # --- what kernels read -------------------------------------------------------------------------------------------

    def _describe(self, told: list[Message], undo: ExitStack) -> int:
        """Return the address of the array of contexts."""
        ranks, sizes = self._ranks, self._sizes
        device, size = ranks.device, ranks.size
        layout = self._version.gpu_contexts[sizes.backend]
        keys = [
            device.constant(packed_keys([message.integer(name, 0, 0xFFFF_FFFF) for message in told]), undo)
            for name in ("signals_key", "counters_key")
        ]
        gets = device.gpu.alloc(max(1, 2 * sizes.contexts * size * _WORD))
        undo.callback(gets.close)
        entries = []
        for context in range(sizes.contexts):
            of_context = slice(context * size, (context + 1) * size)
            fields = {
                "gdqp": self._array(self._mains[of_context], undo),
                "companion_gdqp": self._array(self._companions[of_context], undo),
                "sink_buffer_lkey": self._sink.lkey,
                **self._signals.fields("signals", context, sizes.signals, keys[0].device_address),
                **self._counters.fields("counters", context, sizes.counters, keys[1].device_address),
            }
            if "last_issued_get" in layout.offsets:
                fields["last_issued_get"] = gets.device_address + 2 * context * size * _WORD
                fields["last_visible_get"] = fields["last_issued_get"] + size * _WORD
            entries.append(layout.pack(**fields))
        # NCCL wants an address of its own even without contexts.
        return device.constant(b"".join(entries) or bytes(layout.size), undo).device_address

    def _array(self, queues: list[ExportedQp], undo: ExitStack) -> int:
        """Return the address of an array of the queues' structures, or 0 without queues."""
        if not queues:
            return 0
        array = self._ranks.device.gpu.export_qps(queues)
        undo.callback(array.close)
        if self._version.qp is DEV_QP:
            return array.device_address
        # Kernels work with the copies. Rings, records and doorbells stay those of the exported queues.
        images = [_in_layout(queue.place.read(), self._version) for queue in queues]
        return self._ranks.device.constant(b"".join(images), undo).device_address

    # --- errors, end -------------------------------------------------------------------------------------------------

    def error(self) -> str:
        """Return why kernels cannot continue, or an empty string. The states of queues are checked once per second."""
        if not self._error and (failure := self._ranks.failure) is not None:
            self._error = str(failure)
        now = time.monotonic()
        if self._error or now - self._looked < _LOOK_SECONDS:
            return self._error
        self._looked = now
        for queue in (*self._mains, *self._companions):
            if queue.qp.state is QpState.ERR:
                self._error = f"{queue.qp}: {queue.last_error()}"
                break
        return self._error

    def close(self) -> None:
        """Close queues, signals and counters on this rank. Idempotent."""
        self._undo.close()


def _check_nics(told: list[Message]) -> None:
    """Raise InvalidValueError if two processes have opened the same software NIC: both would have one address."""
    first: dict[str, tuple[int, int]] = {}
    for rank, message in enumerate(told):
        process = message.integer("process", 1, 1 << 32)
        other, its_process = first.setdefault(message.text("gid"), (rank, process))
        if process != its_process:
            raise InvalidValueError(
                f"ranks {other} and {rank} have opened the same NIC in two processes: set {DEVICE} to {ON_GPU}, or "
                "leave it empty, and each process opens a NIC of its own"
            )


def _in_layout(image: np.ndarray, version: Version) -> bytes:
    """Return a queue's structure in the layout of this version."""
    older = bytearray(version.qp.size)
    for source, target in (
        (DEV_QP.at(image), version.qp.at(older)),
        (DEV_CQ.at(image, DEV_QP.cq_sq), version.cq.at(older, version.qp.cq_sq)),
    ):
        for name in target.dtype.names or ():
            if name != "cq_sq":
                target[name] = source[name]
    return bytes(older)
