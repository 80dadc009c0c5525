"""Everything that can be opened is opened and closed many times: each round leaves the process as it found it.

Counted are mappings, descriptors, threads, the memory that the process occupies, and objects of the package.
"""

import asyncio
import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpunetio as gn
import nccl_rig
from gpunetio import PortConfig, QpType, cm, eth, flow, verbs
from gpunetio.core import BufArray, BufInventory, MemoryMap, RemoteMemory
from gpunetio.dma import Dma
from gpunetio.enums import Access, LinkLayer, MemType, NicHandler
from gpunetio.flow import match
from gpunetio.memory import HostMemory
from gpunetio.nccl import plugin
from gpunetio.nic.host.engine import compile_engine, compile_extensions
from gpunetio.providers import open_device
from gpunetio.rdma import Rdma
from lan import cabled, namespace
from plain_soft import PlainSoft
from stand_in import StandIn
from stand_in.building import compiler
from usage import Usage, objects_of_the_package, resident

WARM_UP = 3  # rounds in which what is made once is made
FEW, MANY = 5, 300
GROWTH = 8 << 20  # bytes that malloc and Python may keep for themselves over many rounds
PATIENCE = 30.0

Round = Callable[[], None]


def check(play: Round, rounds: int) -> None:
    """Play rounds. They add nothing to what was there after the first few."""
    for _ in range(WARM_UP):
        play()
    usage, objects, size = Usage.now(), objects_of_the_package(), resident()
    for _ in range(rounds):
        play()
    usage.check()
    grown = {name: count for name, count in (objects_of_the_package() - objects).items() if count >= rounds}
    assert not grown
    assert resident() - size < GROWTH


# --- objects ---------------------------------------------------------------------------------------------------------


def two_queues(ctx: verbs.Context) -> verbs.QP:
    cq = ctx.create_cq(16)
    return ctx.create_pd().create_qp(sq_wr=4, rq_wr=4, send_cq=cq, receive_cq=cq)


def objects_of_verbs() -> None:
    with verbs.open("soft0") as ctx, contextlib.closing(HostMemory(1 << 13)) as host:
        pd, cq = ctx.create_pd(), ctx.create_cq(16, channel=ctx.create_comp_channel())
        made: list[verbs.Handle] = [
            pd.create_qp(qp_type=kind, sq_wr=4, rq_wr=4, send_cq=cq, receive_cq=cq)
            for kind in (QpType.RC, QpType.UC, QpType.UD)
        ]
        made += [
            pd.create_qp(sq_wr=4, send_cq=cq, receive_cq=cq, srq=pd.create_srq(4)),
            pd.create_ah(verbs.AhAttr(gid=ctx.query_gid())), pd.register(bytearray(4096)), ctx.register_umem(host),
            ctx.create_uar(),
        ]
        ctx.devx.transport_domain()
        assert ctx.get_async_event(0) is None
    assert all(each.closed for each in made)


def connected_queue_pairs(wire: str = "auto") -> Round:
    def play() -> None:
        with (
            verbs.open("soft0", port=PortConfig(wire=wire)) as a, verbs.open("soft1", port=PortConfig(wire=wire)) as b,
        ):
            two_queues(a).connect(two_queues(b))

    return play


def exported_queue_pairs(engine: str, where: str) -> Round:
    def play() -> None:
        with verbs.open("soft0", port=PortConfig(engine=engine)) as ctx, gn.Gpu(where) as gpu:
            pd = ctx.create_pd()
            a, b = (gpu.create_qp(pd, 16) for _ in range(2))
            a.connect(b)
            made: list[object] = [gpu.create_qp_group(pd, 16), pd.register(gpu.alloc(4096, MemType.CPU_GPU))]
            made.append(gpu.create_semaphore(4))

    return play


def queues_with_a_proxy() -> None:
    with verbs.open("soft0") as ctx, gn.Gpu("host") as gpu:
        gpu.create_qp(ctx.create_pd(), 16, nic_handler=NicHandler.CPU_PROXY)


def ethernet_queues_of_the_cpu(name: str = "soft0") -> Round:
    def play() -> None:
        with verbs.open(name) as ctx:
            pd = ctx.create_pd()
            made: list[verbs.Handle] = [eth.RegularRxq(pd, 8, 1600), eth.ManagedRxq(pd, 8, 1600)]
            made.append(eth.CpuTxq(pd, 8))

    return play


def ethernet_queues_of_kernels() -> None:
    with verbs.open("soft0") as ctx, gn.Gpu("host") as gpu:
        pd = ctx.create_pd()
        made: list[verbs.Handle] = [eth.CyclicRxq(gpu, pd, 64, 1600)]
        made.append(eth.EthTxq(gpu, pd, 64))


def flow_rules(name: str = "soft0") -> Round:
    def play() -> None:
        with verbs.open(name) as ctx, flow.FlowPort(ctx) as port:
            queue = eth.RegularRxq(ctx.create_pd(), 8, 1600)
            port.steer(match.udp(dst=7), to=queue)
            pipe = port.create_pipe("udp", match=match.udp(dst=flow.PER_ENTRY), to=queue, root=True)
            pipe.add(match.udp(dst=53))

    return play


def connections_by_address() -> None:
    with verbs.open("soft0") as a, verbs.open("soft1") as b, cm.listen(b, 7174) as listener:
        there = cm.start_connecting(two_queues(a), listener.address, 7174)
        here = listener.accept(PATIENCE).accept(two_queues(b))
        for connection in there, here:
            connection.established(PATIENCE)


def core_and_dma() -> None:
    with verbs.open("soft0") as ctx, gn.Gpu("host") as gpu:
        pd = ctx.create_pd()
        memory = MemoryMap(pd, np.zeros(4096, np.uint8))
        RemoteMemory.from_export(memory.export_rdma())
        BufArray(gpu, memory, 4, 1024)
        BufInventory(4)
        Dma(pd).start()


def rdma() -> None:
    with verbs.open("soft0") as ctx:
        a, b = (Rdma(ctx.create_pd(), permissions=Access.all()) for _ in range(2))
        a.start()
        b.start()
        (here, near), (there, far) = a.export(), b.export()
        near.connect(there)
        far.connect(here)


def a_dpa() -> None:
    with verbs.open("soft0") as ctx:
        gn.Dpa(ctx).close()


def opened_by_asyncio() -> None:
    async def play() -> None:
        (await verbs.open_async("soft0")).close()

    asyncio.run(play())


def an_imported_context() -> None:
    device = open_device("soft0")
    with verbs.import_context(device) as ctx:
        two_queues(ctx)
    device.close()


def without_devx() -> None:
    with verbs.Context(PlainSoft("soft0")) as ctx:  # type: ignore[arg-type]
        two_queues(ctx)


OBJECTS: dict[str, Round] = {
    "objects of verbs": objects_of_verbs,
    "connected queue pairs": connected_queue_pairs(),
    "exported queue pairs": exported_queue_pairs("cpu", "host"),
    "queues with a proxy": queues_with_a_proxy,
    "Ethernet queues of the CPU": ethernet_queues_of_the_cpu(),
    "Ethernet queues of kernels": ethernet_queues_of_kernels,
    "flow rules": flow_rules(),
    "connections by address": connections_by_address,
    "core and DMA": core_and_dma,
    "RDMA": rdma,
    "a DPA": a_dpa,
    "opened by asyncio": opened_by_asyncio,
    "an imported context": an_imported_context,
    "without DEVX": without_devx,
}
few_and_many = pytest.mark.parametrize("rounds", [
    FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(400)]),
])
soft_nic = pytest.mark.soft_nic


@soft_nic
@few_and_many
@pytest.mark.parametrize("kind", OBJECTS)
def test_objects(kind, rounds):
    check(OBJECTS[kind], rounds)


@pytest.mark.slow
@pytest.mark.timeout(400)
@soft_nic
def test_queue_pairs_on_the_twin_of_a_gpu():
    check(exported_queue_pairs("twin", "twin"), 20)


@few_and_many
@pytest.mark.parametrize("kind", [ethernet_queues_of_the_cpu, flow_rules])
def test_cards(stand_in: StandIn, kind, rounds):
    check(kind("mlx5_0"), rounds)


@soft_nic
@pytest.mark.host_memory
@few_and_many
def test_contexts_of_nccl(monkeypatch, rounds):
    if compiler() is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("GPUNETIO_NCCL_GPU", "host")
    library = nccl_rig.Plugin(str(plugin()), 14)

    def play() -> None:
        with nccl_rig.Rank(library, 0, 1).connected():
            pass

    check(play, rounds)


# --- wires -----------------------------------------------------------------------------------------------------------


def empty_capture(folder: Path) -> str:
    path = folder / "empty.pcap"
    path.write_bytes(struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 1 << 16, 1))
    return str(path)


PORTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "auto": lambda folder: {},
    "udp": lambda folder: {"wire": "udp"},
    "InfiniBand": lambda folder: {"link_layer": LinkLayer.INFINIBAND},
    "replay": lambda folder: {"wire": "replay"},
    "pcap": lambda folder: {"wire": f"pcap:{empty_capture(folder)}", "addresses": "10.9.0.1"},
    "unix": lambda folder: {"wire": f"unix:{folder}/cable", "addresses": "10.9.0.1"},
    "dgram": lambda folder: {"wire": f"dgram:{folder}/here,{folder}/there", "addresses": "10.9.0.1"},
    "capture and faults": lambda folder: {"capture": str(folder), "faults": gn.Faults(loss=0.5)},
    "workers": lambda folder: {"workers": 4},
}


def opened(**port: Any) -> Round:
    def play() -> None:
        with verbs.open("soft0", port=PortConfig(**port)) as ctx:
            two_queues(ctx)

    return play


@soft_nic
@few_and_many
@pytest.mark.parametrize("wire", PORTS)
def test_wires(tmp_path, wire, rounds):
    check(opened(**PORTS[wire](tmp_path)), rounds)


@soft_nic
@few_and_many
@pytest.mark.root
@pytest.mark.parametrize("wire", ["tap:tap0", "packet:here"])
def test_wires_of_the_kernel(wire, rounds):
    compile_engine()  # which may take longer than `Namespace.run` waits
    compile_extensions()
    play = opened(wire=wire, addresses="10.9.0.1")
    with (namespace if wire.startswith("tap") else cabled)() as where:
        check(lambda: where.run(play), rounds)
