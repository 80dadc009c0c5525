"""Receive queues of the library `eth`: what the device is asked for, and where packets arrive. scapy makes them."""

import ctypes
import functools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether

from eth_receive_rig import lead, remove_rules, take
from gpunetio import Gpu, PortConfig, eth, verbs
from gpunetio.enums import Access, LinkLayer, MemRegType, MemType
from gpunetio.errors import BadStateError, InUseError, InvalidValueError, NotFoundError, NotSupportedError
from gpunetio.eth.layout import cyclic_layout
from gpunetio.flow import FlowPort, match
from gpunetio.formats.device_structs import DEV_CQ
from gpunetio.formats.eth_device import DEV_ETH_RXQ
from gpunetio.formats.ethernet_queues import QueueState
from gpunetio.formats.wqe import DATA_SEG, SEGMENT
from gpunetio.memory import HostMemory, is_accessible
from usage import allocations

DELIVERED, NO_BUFFER = "rx_frame_delivered", "rx_frame_no_buffer"


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with Gpu("host") as gpu:
        yield gpu


def frame(payload: bytes) -> bytes:
    return bytes(Ether(src="02:00:00:00:00:05", dst="02:00:00:00:00:06") / IP() / UDP(dport=53) / payload)


def at(address: int, nbytes: int) -> np.ndarray:
    """The bytes at an address of this process."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def structure(rxq: eth.CyclicRxq) -> np.ndarray:
    return DEV_ETH_RXQ.at(at(rxq.device_address, DEV_ETH_RXQ.size))


def give_back(rxq: eth.CyclicRxq, wqes: int) -> None:
    """Do as a kernel does that has seen the packets of so many WQEs."""
    row = structure(rxq)
    row["given_back"] += wqes
    at(int(row["dbrec"]), 4).view(">u4")[0] = (int(row["wqe_num"]) + int(row["given_back"])) & 0xFFFF


def packet(rxq: eth.CyclicRxq, number: int, nbytes: int) -> bytes:
    row = structure(rxq)
    slot = (number & int(row["packet_mask"])) << int(row["stride_shift"])
    return at(int(row["packet_address"]) + slot, nbytes).tobytes()


@pytest.mark.parametrize("max_packet, stride, striding", [(1500, 2048, 1), (64, 64, 1), (9000, 16384, 0)])
def test_packets_arrive_one_per_slot(ctx, pd, gpu, max_packet, stride, striding):
    with eth.CyclicRxq(gpu, pd, 1024, max_packet) as rxq:
        lead(ctx, rxq.tirn)
        assert (rxq.packets, rxq.packet_stride, rxq.state) == (1024, stride, QueueState.RDY)
        assert structure(rxq)["striding"] == striding
        frames = [frame(bytes([i]) * i) for i in range(20)]
        assert take(ctx, frames) == [DELIVERED] * 20
        for i, sent in enumerate(frames):
            assert packet(rxq, i, len(sent)) == sent
        remove_rules(ctx)


def test_after_a_lap_packets_overwrite_the_oldest(ctx, pd, gpu):
    with eth.CyclicRxq(gpu, pd, 1000, 64) as rxq:
        lead(ctx, rxq.tirn)
        frames = [frame(i.to_bytes(4, "big")) for i in range(2000)]
        assert take(ctx, frames[:1025]) == [DELIVERED] * 1024 + [NO_BUFFER]
        give_back(rxq, 2)
        assert take(ctx, frames[1024:]) == [DELIVERED] * 976
        for i in range(976, 2000):
            assert packet(rxq, i, len(frames[i])) == frames[i]
        remove_rules(ctx)


def test_the_structure_says_what_was_created(ctx, pd, gpu):
    with eth.CyclicRxq(gpu, pd, 3000, 1500) as rxq:
        row = structure(rxq)
        assert (row["packet_mask"], row["stride_shift"], row["strides_shift"], row["wqe_num"]) == (4095, 11, 9, 8)
        assert (row["lkey"], row["packet_address"]) == (rxq.region.lkey, rxq.region.address)
        assert not any(row[name] for name in ("next", "err_syndrome", "tells_cq", "real_time", "mcst_qp"))
        cq = DEV_CQ.at(at(rxq.device_address, DEV_ETH_RXQ.size), DEV_ETH_RXQ.cq)
        assert (cq["cq_num"], cq["cqe_num"], cq["cqe_mask"], cq["cqe_daddr"]) == (
            rxq.cq.cqn, 4096, 4095, rxq.cq.ring_address
        )
        assert rxq.indices() == {"received": 0, "too_long": 0, "given_back": 0}
        assert rxq.last_error() is None
        row["err_index"], row["err_syndrome"], row["err_vendor"] = 7, 4, 12
        assert "7 failed: LOCAL_PROT (syndrome 0x04, vendor 0x0c)" in str(rxq.last_error())


def test_a_companion_reads_memory_for_old_gpus(pd, gpu):
    with eth.CyclicRxq(gpu, pd, 1024, 64, mcst=True) as rxq:
        assert is_accessible(int(structure(rxq)["mcst_qp"]), 296, True)


# --- buffers ----------------------------------------------------------------------------------------------------------


def test_packets_lie_in_memory_of_the_user(ctx, pd, gpu):
    need = eth.CyclicRxq.estimate_buffer(ctx, 1024, 2048)
    assert need == 1024 * 2048
    memory = gpu.alloc(need + 4096, MemType.CPU_GPU)
    whole, region = pd.register(memory), pd.register(HostMemory(need), Access.LOCAL_WRITE)
    for options in ({"buffer": memory}, {"buffer": memory, "offset": 4096}, {"buffer": whole}, {"buffer": region}):
        with eth.CyclicRxq(gpu, pd, 1024, 2048, **options) as rxq:
            lead(ctx, rxq.tirn)
            assert take(ctx, [frame(b"here")]) == [DELIVERED]
            start = region if options["buffer"] is region else memory
            assert at(start.address + options.get("offset", 0), 46).tobytes() == frame(b"here")
            remove_rules(ctx)


@pytest.mark.parametrize("options, words", [
    ({"buffer": "small"}, ["needs 65536 bytes from offset 0", "estimate_buffer()"]),
    ({"buffer": "right", "offset": 64}, ["needs 65536 bytes from offset 64"]),
    ({"buffer": "right", "offset": -1}, ["offset = -1"]),
    ({"buffer": "readonly"}, ["lacks LOCAL_WRITE"]),
    ({"buffer": "other"}, ["belongs to PD", "register the memory in"]),
    ({"buffer": bytearray(1 << 16)}, ["buffer", "or a region (MR)"]),
    ({"buffer": 12345}, ["buffer", "or a region (MR)"]),
])
def test_a_buffer_that_does_not_fit_is_refused(ctx, pd, gpu, options, words):
    regions = {
        "small": pd.register(HostMemory(1 << 15)), "right": pd.register(HostMemory(1 << 16)),
        "readonly": pd.register(HostMemory(1 << 16), Access.LOCAL_READ),
        "other": ctx.create_pd().register(HostMemory(1 << 16)),
    }
    given = options["buffer"]
    options = options | {"buffer": regions[given] if isinstance(given, str) else given}
    refused(ctx, gpu, InvalidValueError, words, lambda: eth.CyclicRxq(gpu, pd, 1024, 64, **options))


def test_a_key_of_another_nic_is_refused(ctx, pd, gpu):
    with verbs.open("soft1") as other:
        region = other.create_pd().register(HostMemory(1 << 16))
        refused(ctx, gpu, InvalidValueError, ["belongs to another context"],
                lambda: eth.CyclicRxq(gpu, pd, 1024, 64, buffer=region))


def refused(ctx, gpu, error, words, call) -> None:
    """The call raises this error, and leaves nothing behind."""
    before = ctx.users, allocations(gpu)
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
    domains = [one for one in ctx.users if "TRANSPORT_DOMAIN" in str(one)]
    assert [one for one in ctx.users if one not in domains] == [one for one in before[0] if one not in domains]
    assert allocations(gpu) == before[1]


@pytest.mark.parametrize("burst, packet, error, words", [
    (0, 64, InvalidValueError, ["max_burst = 0"]),
    (1024, 63, InvalidValueError, ["max_packet = 63", "64 to 16384"]),
    (1024, 1 << 15, InvalidValueError, ["max_packet = 32768"]),
    (1 << 25, 64, NotSupportedError, ["max_burst = 33554432", "16777216 packets"]),
    (1 << 16, 9000, NotSupportedError, ["max_burst = 65536", "32768 packets"]),
    (1.5, 64, InvalidValueError, ["max_burst", "whole number"]),
])
def test_sizes_that_the_device_cannot_have(ctx, pd, gpu, burst, packet, error, words):
    refused(ctx, gpu, error, words, lambda: eth.CyclicRxq(gpu, pd, burst, packet))


def test_rings_in_gpu_memory_need_a_gpu(ctx, pd, gpu):
    refused(ctx, gpu, NotSupportedError, ["CUDA_DMABUF", "host memory only"],
            lambda: eth.CyclicRxq(gpu, pd, 1024, 64, mem_reg_type=MemRegType.CUDA_DMABUF))


@pytest.mark.parametrize("port, words", [
    ({"wire": "udp"}, ["carries", "Ethernet"]), ({"link_layer": LinkLayer.INFINIBAND}, ["InfiniBand"]),
])
def test_ports_without_ethernet(gpu, port, words):
    with verbs.open("soft0", port=PortConfig(**port)) as ctx:
        pd = ctx.create_pd()
        for make in (
            lambda: eth.CyclicRxq(gpu, pd, 1024, 64), lambda: eth.RegularRxq(pd, 4, 64), lambda: eth.CpuTxq(pd),
            lambda: eth.EthTxq(gpu, pd, 64), lambda: eth.EthTxq(gpu, pd, 64, wait_on_time=True),
        ):
            refused(ctx, gpu, NotSupportedError, words, make)
        with pytest.raises(NotSupportedError):
            eth.query_caps(ctx)


# --- life ------------------------------------------------------------------------------------------------------------


def test_a_queue_that_a_rule_uses_stays(ctx, pd, gpu):
    rxq = eth.CyclicRxq(gpu, pd, 1024, 64)
    lead(ctx, rxq.tirn)
    with pytest.raises(InUseError, match=r"a rule .* still leads to its TIR"):
        rxq.close()
    assert take(ctx, [frame(b"")]) == [DELIVERED]
    remove_rules(ctx)
    rxq.close()
    assert rxq.closed
    rxq.close()
    for use in (lambda: rxq.device_address, rxq.indices, lambda: rxq.state, rxq.check_launch):
        with pytest.raises(BadStateError, match="closed"):
            use()


def test_a_flow_rule_uses_its_queue(ctx, pd, gpu):
    with FlowPort(ctx) as port:
        rxq = eth.CyclicRxq(gpu, pd, 1024, 64)
        rule = port.steer(match.udp(dst=53), to=rxq)
        with pytest.raises(InUseError, match=r"is still used by .*: close that first"):
            rxq.close()
        assert take(ctx, [frame(b"")]) == [DELIVERED]
        assert packet(rxq, 0, 42) == frame(b"")
        rule.close()
        rxq.close()
        assert rxq.closed


def test_closing_leaves_nothing(ctx, gpu):
    pd = ctx.create_pd()
    with eth.CyclicRxq(gpu, pd, 1024, 64):
        pass
    before = len(ctx.users), len(ctx.provider.devx_objects())
    for _ in range(3):
        with eth.CyclicRxq(gpu, pd, 1024, 64, queue_id=3):
            pass
    assert (len(ctx.users), len(ctx.provider.devx_objects())) == before
    assert not allocations(gpu)
    assert not pd.users


@pytest.mark.parametrize("owner", ["gpu", "pd", "ctx"])
def test_owners_close_their_queues(owner):
    ctx, gpu = verbs.open("soft0"), Gpu("host")
    pd = ctx.create_pd()
    rxq = eth.CyclicRxq(gpu, pd, 1024, 64)
    {"gpu": gpu, "pd": pd, "ctx": ctx}[owner].close()
    assert rxq.closed
    gpu.close()
    ctx.close()


def test_queue_ids(ctx, pd, gpu):
    with eth.CyclicRxq(gpu, pd, 1024, 64, queue_id=5) as a, eth.CyclicRxq(gpu, pd, 1024, 64) as b:
        assert (a.queue_id, b.queue_id) == (5, None)
        assert eth.rxq_of(ctx, 5) is a
        assert "queue_id 5" in repr(a)
        with pytest.raises(InUseError, match="queue_id = 5 is that of cyclic"):
            b.queue_id = 5
        b.queue_id = 6
        b.queue_id = 6
        assert eth.rxq_of(ctx, 6) is b
        with pytest.raises(NotFoundError, match=r"queue_id 7; there are \[5, 6\]"):
            eth.rxq_of(ctx, 7)
        for wrong in (-1, 1 << 16):
            with pytest.raises(InvalidValueError, match="queue_id"):
                b.queue_id = wrong
    with eth.CyclicRxq(gpu, pd, 1024, 64, queue_id=5):
        pass


@functools.cache
def caps_of_a_nic() -> eth.EthCaps:
    with verbs.open("soft0") as ctx:
        return eth.query_caps(ctx)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 1 << 14), st.integers(64, 16384))
def test_every_size_is_covered_once(burst, size):
    """The WQEs name each byte of the buffer once, in order, and there is room for what was asked."""
    layout = cyclic_layout(caps_of_a_nic(), burst, size)
    assert layout.packets >= burst
    assert 1 << layout.slot_log >= size
    assert layout.packets == layout.wqes << layout.strides_log
    wqes = layout.ring(1 << 40, 77).reshape(layout.wqes, layout.wqe_bytes)
    end = 1 << 40
    for wqe in wqes:
        row = DATA_SEG.at(np.ascontiguousarray(wqe[-SEGMENT:]))
        assert row["addr"] == end
        assert row["lkey"] == 77
        end += int(row["byte_count"])
    assert end - (1 << 40) == layout.packets << layout.slot_log <= layout.nbytes


@pytest.mark.parametrize("size", [64, 16384], ids=["a stride each", "a WQE each"])
@pytest.mark.parametrize("burst", [4096, 4097, 8191, 8192])
def test_a_ring_has_no_more_room_than_the_next_power_of_two(burst, size):
    assert cyclic_layout(caps_of_a_nic(), burst, size).packets == (4096 if burst == 4096 else 8192)


def test_capabilities():
    caps = caps_of_a_nic()
    assert (caps.max_packet, caps.max_stride) == (16384, 8192)
    assert (caps.max_rx_burst, caps.max_cyclic_burst) == (1 << 15, 1 << 24)
    assert not caps.real_time_receive
    assert caps.clock_khz
