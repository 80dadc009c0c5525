"""Values of wrong types for every argument of every public class, function and method: only errors of the package.

A call may succeed, as some arguments take anything. Whatever fails must say so as a DocaError, at once.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import is_dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import gpunetio as gn
from gpunetio import Gpu, cm, core, dma, eth, flow, rdma, verbs
from gpunetio.core import BufInventory, MemoryMap
from gpunetio.enums import UarAllocationType, WrOpcode
from gpunetio.errors import DocaError
from gpunetio.flow import match
from gpunetio.memory import HostMemory

WRONG = (None, "no", "\ud800", "a\0b", b"x", -1, 5, 1 << 70, 1.5, math.nan, [None], {"a": 1}, object(), len)
SHORT = 0.01  # seconds
ENDLESS = (5, 1 << 70, 1.5)  # a right value of `timeout`
INTERNAL = {  # what the package calls on its own objects
    "acknowledge", "attach", "attach_engine", "check_idle", "check_open", "close", "close_with_owner", "complete",
    "connect", "count_kernel", "destroy_if_unused", "detach", "disconnect", "drop", "export", "export_srq", "forget",
    "forget_export", "forget_memory", "forget_task", "hold_for_event", "lead", "leave_root", "note_task", "post_recv",
    "post_send",
    "progress_until", "ring_again", "ring_receives", "ring_sends", "segments",
    "submitted", "take_back", "unexport_uar", "used_by",
    "wait_idle", "writable_at",
}

Values = dict[str, Any]


def try_wrong_values(call: Callable[..., object], name: str, good: Values, kept: list[object]) -> list[str]:
    """Call with each wrong value in turn. Return what failed otherwise than by an error of the package."""
    failed = []
    for value in WRONG:
        if name == "timeout" and value in ENDLESS:
            continue
        try:
            made = call(**good | {name: value})
            if isinstance(made, verbs.Context | Gpu):
                made.close()
            kept.append(made)
        except DocaError:
            pass
        except Exception as error:
            failed.append(f"{call.__qualname__}({name}={value!r}): {type(error).__name__}: {error}")
    return failed


def fuzz(call: Callable[..., object], values: Values, kept: list[object]) -> list[str]:
    """Try every argument of a function whose other arguments are those of `values`. What it makes is `kept`."""
    parameters = inspect.signature(call).parameters.values()
    named = {one.name: one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    needed = {name for name, one in named.items() if one.default is one.empty or name == "timeout"}
    if not needed <= values.keys():
        return []  # it takes an object that only the package makes
    good = {name: values[name] for name in needed}
    return [line for name in named for line in try_wrong_values(call, name, good, kept)]


def methods(*handles: object) -> Iterator[Callable[..., object]]:
    """Yield the public methods of objects."""
    for handle in handles:
        for name in dir(type(handle)):
            is_property = isinstance(inspect.getattr_static(type(handle), name), property)
            if not name.startswith("_") and name not in INTERNAL and not is_property:
                if callable(method := getattr(handle, name)) and not inspect.iscoroutinefunction(method):
                    yield method


def classes(module: ModuleType) -> Iterator[type]:
    """Yield the classes of a module that programs make objects of."""
    for name in module.__all__:
        found = getattr(module, name)
        if inspect.isclass(found) and not issubclass(found, Exception | int):
            yield found


class World:
    """A NIC, some objects on it, and good values of arguments by name."""

    def __init__(self, undo: ExitStack):
        self.ctx = undo.enter_context(verbs.open("soft0"))
        self.gpu = undo.enter_context(Gpu("host"))
        self.kept: list[object] = []
        self.pd, self.cq = self.ctx.create_pd(), self.ctx.create_cq(16)
        memory = HostMemory(1 << 16)
        undo.callback(memory.close)
        self.region = self.pd.register(memory)
        self.qp, other = (
            self.pd.create_qp(sq_wr=4, rq_wr=4, send_cq=self.cq, receive_cq=self.cq) for _ in range(2)
        )
        self.map = MemoryMap(self.pd, np.zeros(4096, np.uint8))
        self.inventory = BufInventory(1000)
        self.buf, more = self.inventory.buf(self.map), self.inventory.buf(self.map)
        self.values: Values = {
            "address": "127.0.0.1", "ah": verbs.AhAttr(gid=self.ctx.query_gid()), "attr": verbs.QpAttr(), "cq": self.cq,
            "cqe": 16, "ctx": self.ctx, "data": b"x", "depth": 64, "description": self.map.export_rdma(),
            "destination": self.buf, "elem_size": 64, "fd": 0, "gpu": self.gpu, "index": 0,
            "instead": UarAllocationType.NONCACHE, "items": 4, "kind": UarAllocationType.NONCACHE, "lkey": 1,
            "length": 4, "mailbox": bytes(16), "match": match.udp(), "max_burst": 8, "max_packet": 1600,
            "memory": self.map, "name": "name", "nbytes": 64, "num": 4, "obj": memory, "offset": 0,
            "opcode": WrOpcode.SEND, "other": more, "out_size": 16, "packets": [], "pd": self.pd, "pdn": 1,
            "peer": other, "port": 7174, "qp": self.qp, "qps": [self.qp], "region": self.region, "source": self.buf,
            "srq_wr": 4, "status": 0, "timeout": SHORT, "where": self.ctx,
        }

    def check(self, calls: Iterable[Callable[..., object]]) -> None:
        failed = [line for call in calls for line in fuzz(call, self.values, self.kept)]
        assert not failed, "\n".join(failed)


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as undo:
        yield World(undo)


@pytest.mark.parametrize("module", [gn, verbs, cm, eth, flow, rdma, dma], ids=lambda module: module.__name__)
def test_data_classes(world, module):
    world.values["address"] = 0
    world.check(found for found in classes(module) if is_dataclass(found))


def test_matches(world):
    world.check([match.eth, match.vlan, match.second_vlan, match.ipv4, match.ipv6, match.udp, match.tcp])


def test_verbs(world):
    pd, ctx = world.pd, world.ctx
    channel = ctx.create_comp_channel()
    made = (ctx.create_uar(), pd.create_srq(4), channel, ctx.devx)
    world.check([*methods(ctx, pd, world.cq, world.qp, world.region, *made), verbs.open])


def test_connection_manager(world):
    listener = cm.listen(world.ctx, 7175)
    world.check([cm.listen, cm.listen_datagrams, cm.start_connecting, cm.resolve, *methods(listener)])


def test_gpu(world):
    gpu = world.gpu
    world.check([*methods(gpu, gpu.alloc(4096), gpu.create_semaphore(4)), Gpu, gn.Dpa])


def test_ethernet_and_flow(world):
    gpu, pd = world.gpu, world.pd
    world.check([eth.query_caps, flow.Rss, *(found for found in classes(eth) if not is_dataclass(found))])
    with flow.FlowPort(world.ctx) as port:
        queue = eth.RegularRxq(pd, 8, 1600)
        pipe = port.create_pipe("pipe", match=match.udp(dst=flow.PER_ENTRY), to=queue)
        world.values["to"] = queue
        receiving = queue, eth.ManagedRxq(pd, 8, 1600), eth.CyclicRxq(gpu, pd, 64, 1600)
        world.check(methods(port, pipe, *receiving, eth.CpuTxq(pd, 8), eth.EthTxq(gpu, pd, 64)))


def test_core_dma_and_rdma(world):
    pd, made = world.pd, [found for module in (core, dma, rdma) for found in classes(module)]
    world.check(found for found in made if not inspect.isabstract(found))
    world.check([*methods(world.map, world.inventory, world.buf), core.RemoteMemory.from_export])
    one = rdma.Rdma(pd)
    one.start()
    world.check(methods(dma.Dma(pd), one, rdma.SyncEvent(pd)))
