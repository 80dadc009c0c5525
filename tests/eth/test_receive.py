"""Receive queues of CPU programs: buffers of their own, and managed pools. scapy makes the packets."""

import random
import time
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether

from eth_receive_rig import lead, opened, remove_rules, take
from gpunetio import eth
from gpunetio.enums import Access
from gpunetio.errors import BadStateError, FullError, InvalidValueError, NotSupportedError
from gpunetio.formats.cqe import RxChecksum
from gpunetio.formats.ethernet_queues import QueueState
from gpunetio.memory import HostMemory

DELIVERED, NO_BUFFER, TOO_LONG = (f"rx_frame_{fate}" for fate in ("delivered", "no_buffer", "too_long"))
SOON = 10.0  # seconds: nothing waits that long
ALL_RIGHT = RxChecksum.L2_OK | RxChecksum.L3_OK | RxChecksum.L4_OK


def frame(payload: bytes) -> bytes:
    return bytes(Ether(src="02:00:00:00:00:05", dst="02:00:00:00:00:06") / IP() / UDP(dport=53) / payload)


# --- buffers of the program -------------------------------------------------------------------------------------------


def test_packets_arrive_in_the_buffers_that_were_posted(ctx, pd):
    memory = HostMemory(1 << 16)
    region = pd.register(memory)
    with eth.RegularRxq(pd, 10, 1600) as rxq:
        lead(ctx, rxq.tirn, tag=1234)
        assert (rxq.max_burst, rxq.receive(timeout=0)) == (16, [])
        before = time.monotonic()
        for lap in range(5):
            places = random.sample(range(30), 7)
            for place in places:
                rxq.post(region, 2048 * place, context=place)
            frames = [frame(bytes([lap, i]) * i) for i in range(8)]
            assert take(ctx, frames) == [DELIVERED] * 7 + [NO_BUFFER]
            done = rxq.receive(3, timeout=SOON) + rxq.receive(least=4, timeout=SOON)
            assert [one.context for one in done] == places
            for one, sent, place in zip(done, frames, places, strict=False):
                assert memory.array[2048 * place : 2048 * place + one.nbytes].tobytes() == sent
                assert (one.error, one.info.flow_tag, one.info.checks) == (None, 1234, ALL_RIGHT)
                assert one.info.timestamp
        assert time.monotonic() - before < SOON
        remove_rules(ctx)


def test_a_packet_that_is_too_long_fails_its_receive_only(ctx, pd):
    region = pd.register(HostMemory(4096))
    with eth.RegularRxq(pd, 4, 64) as rxq:
        lead(ctx, rxq.tirn)
        for place in range(3):
            rxq.post(region, 64 * place, context=place)
        assert take(ctx, [frame(b""), frame(b"x" * 100), frame(b"")]) == [DELIVERED, TOO_LONG, DELIVERED]
        first, second, third = rxq.receive(least=3, timeout=SOON)
        assert (first.error, third.error, second.nbytes, second.info) == (None, None, 0, None)
        assert "LOCAL_LENGTH" in str(second.error)
        assert (rxq.last_error(), rxq.state) == (None, QueueState.RDY)
        remove_rules(ctx)


def test_memory_that_is_gone_moves_the_queue_to_err_and_reset_brings_it_back(ctx, pd):
    gone, region = pd.register(HostMemory(4096)), pd.register(HostMemory(4096))
    with eth.RegularRxq(pd, 4, 64) as rxq:
        lead(ctx, rxq.tirn)
        rxq.post(gone, context="gone")
        rxq.post(region, context="flushed")
        gone.close()
        take(ctx, [frame(b"")])
        done = rxq.receive(least=2, timeout=SOON)
        assert [one.context for one in done] == ["gone", "flushed"]
        assert "LOCAL_PROT" in str(done[0].error)
        assert "WR_FLUSH" in str(done[1].error)
        assert rxq.last_error() == done[0].error
        assert rxq.state is QueueState.ERR
        with pytest.raises(BadStateError, match=r"is in ERR: .* reset\(\) it"):
            rxq.post(region)
        rxq.reset()
        assert (rxq.state, rxq.last_error(), rxq.posted) == (QueueState.RDY, None, 0)
        rxq.post(region, context="again")
        assert take(ctx, [frame(b"")]) == [DELIVERED]
        assert [one.context for one in rxq.receive(timeout=SOON)] == ["again"]
        remove_rules(ctx)


@pytest.mark.parametrize("post, words", [
    ({"nbytes": 63}, "nbytes = 63: a packet of .* may have 64"), ({"offset": 4033}, "needs 64 bytes from offset 4033"),
    ({"offset": -1}, "offset = -1"), ({"region": "readonly"}, "lacks LOCAL_WRITE"),
    ({"region": "other"}, "belongs to PD"), ({"region": b"bytes"}, "must be of type MR"), ({"nbytes": 1.5}, "nbytes"),
])
def test_buffers_that_are_refused(ctx, pd, post, words):
    regions = {
        "right": pd.register(HostMemory(4096)), "readonly": pd.register(HostMemory(4096), Access.LOCAL_READ),
        "other": ctx.create_pd().register(HostMemory(4096)),
    }
    with eth.RegularRxq(pd, 1, 64) as rxq:
        given = post.pop("region", "right")
        with pytest.raises(InvalidValueError, match=words):
            rxq.post(regions[given] if isinstance(given, str) else given, **post)
        assert rxq.posted == 0
        rxq.post(regions["right"])
        with pytest.raises(FullError, match="1 receives are posted"):
            rxq.post(regions["right"])


def test_events_of_a_channel(ctx, pd):
    channel, region = ctx.create_comp_channel(), pd.register(HostMemory(4096))
    with eth.RegularRxq(pd, 4, 64, channel=channel) as rxq:
        lead(ctx, rxq.tirn)
        for _ in range(4):
            rxq.post(region)
        rxq.req_notify()
        assert channel.get_event(0.01) is None
        for _ in range(2):
            assert take(ctx, [frame(b"")]) == [DELIVERED]
            assert channel.get_event(SOON) is rxq.cq
            rxq.cq.ack_events()
            assert len(rxq.receive(timeout=SOON)) == 1
            rxq.req_notify()
        remove_rules(ctx)
    with eth.RegularRxq(pd, 4, 64) as rxq, pytest.raises(BadStateError, match="channel="):
        rxq.req_notify()


# --- managed pools ----------------------------------------------------------------------------------------------------


def test_packets_of_a_pool_have_their_rooms(ctx, pd):
    with eth.ManagedRxq(pd, 8, 1600, headroom=100, tailroom=28) as rxq:
        lead(ctx, rxq.tirn, tag=7)
        frames = [frame(bytes([i]) * i) for i in range(9)]
        assert take(ctx, frames) == [DELIVERED] * 8 + [NO_BUFFER]
        packets = rxq.receive(least=8, timeout=SOON)
        for packet, sent in zip(packets, frames, strict=False):
            assert (packet.data.tobytes(), packet.nbytes, packet.info.flow_tag) == (sent, len(sent), 7)
            assert packet.buffer[100 : 100 + len(sent)].tobytes() == sent
            assert packet.buffer.nbytes >= 100 + 1600 + 28
            assert packet.address == packet.data.ctypes.data
        assert take(ctx, frames[:1]) == [NO_BUFFER]
        with packets[3] as packet:
            packet.release()
        packets[3].release()
        with pytest.raises(BadStateError, match="was released"):
            packets[3].data  # noqa: B018
        assert take(ctx, frames[:2]) == [DELIVERED, NO_BUFFER]
        assert packets[4].data.tobytes() == frames[4]
        remove_rules(ctx)


def test_the_pool_has_room_for_what_arrives_while_packets_are_held(ctx, pd):
    # 10 Gbit/s for 100 us are 125,000 bytes: 79 packets of 1600 bytes, besides a burst of 16.
    with eth.ManagedRxq(pd, 16, 1600, rate=10_000, max_time=100) as rxq:
        assert rxq.slots == 16 + 79
        assert rxq.region.nbytes >= eth.ManagedRxq.estimate_buffer(16, 1600, rate=10_000, max_time=100)
        lead(ctx, rxq.tirn)
        held = []
        for i in range(95):
            assert take(ctx, [frame(bytes([i]))]) == [DELIVERED]
            held += rxq.receive(timeout=SOON)
        assert take(ctx, [frame(b"")]) == [NO_BUFFER]
        assert [packet.data[42] for packet in held] == list(range(95))
        for packet in held:
            packet.release()
        assert take(ctx, [frame(b"")] * 17) == [DELIVERED] * 16 + [NO_BUFFER]
        remove_rules(ctx)


def test_packets_that_are_too_long_are_dropped(ctx, pd):
    with eth.ManagedRxq(pd, 2, 64) as rxq:
        lead(ctx, rxq.tirn)
        for _ in range(5):
            assert take(ctx, [frame(b"x" * 100), frame(b"")]) == [TOO_LONG, DELIVERED]
            with rxq.receive(timeout=SOON)[0] as packet:
                assert packet.nbytes == 42
        remove_rules(ctx)


def test_a_buffer_of_the_program(ctx, pd):
    need = eth.ManagedRxq.estimate_buffer(4, 64)
    region = pd.register(HostMemory(need + 4096))
    with eth.ManagedRxq(pd, 4, 64, buffer=region, offset=4096) as rxq:
        lead(ctx, rxq.tirn)
        assert take(ctx, [frame(b"")]) == [DELIVERED]
        (packet,) = rxq.receive(timeout=SOON)
        assert packet.address == region.address + 4096
        remove_rules(ctx)
    packet.release()
    with pytest.raises(InvalidValueError, match=f"needs {need} bytes from offset 4097"):
        eth.ManagedRxq(pd, 4, 64, buffer=region, offset=4097)


def test_reset_leaves_packets_that_are_held(ctx, pd):
    with eth.ManagedRxq(pd, 4, 64) as rxq:
        lead(ctx, rxq.tirn)
        take(ctx, [frame(b"held"), frame(b"lost")])
        (held,) = rxq.receive(1, timeout=SOON)
        rxq.reset()
        assert rxq.posted == 3
        assert take(ctx, [frame(b"")] * 4) == [DELIVERED] * 3 + [NO_BUFFER]
        assert held.data.tobytes() == frame(b"held")
        held.release()
        assert rxq.posted == 4
        remove_rules(ctx)


@pytest.mark.parametrize("kind", [eth.RegularRxq, eth.ManagedRxq])
@pytest.mark.parametrize("burst, packet, error, words", [
    (0, 64, InvalidValueError, "max_burst = 0"), (1, 63, InvalidValueError, "max_packet = 63"),
    (1 << 16, 64, NotSupportedError, "32768 receives at most"), (1, 1 << 15, InvalidValueError, "max_packet = 32768"),
])
def test_sizes_that_are_refused(ctx, pd, kind, burst, packet, error, words):
    with pytest.raises(error, match=words):
        kind(pd, burst, packet)
    assert not pd.users


@pytest.mark.parametrize("option", ["headroom", "tailroom"])
def test_rooms_that_are_refused(pd, option):
    for wrong in (-1, 4097):
        with pytest.raises(InvalidValueError, match=f"{option} = {wrong}"):
            eth.ManagedRxq(pd, 1, 64, **{option: wrong})


@pytest.mark.parametrize("kind", [eth.RegularRxq, eth.ManagedRxq])
def test_closing_leaves_nothing(ctx, kind):
    pd = ctx.create_pd()
    kind(pd, 4, 64).close()
    before = len(ctx.users), len(ctx.provider.devx_objects())
    with kind(pd, 4, 64, queue_id=1) as rxq:
        assert eth.rxq_of(ctx, 1) is rxq
    with pytest.raises(BadStateError, match="closed"):
        rxq.receive(timeout=0)
    assert (len(ctx.users), len(ctx.provider.devx_objects())) == before
    assert not pd.users


@settings(max_examples=8, deadline=None)
@given(st.randoms(use_true_random=False))
def test_packets_are_those_that_a_model_expects(chance):
    """Arrivals, receives and releases in any order: each packet comes once, in order, and stays until released."""
    with opened() as ctx, eth.ManagedRxq(ctx.create_pd(), 8, 64, rate=1, max_time=64 * 8 * 5) as rxq:
        lead(ctx, rxq.tirn)
        free, queued, held, count = rxq.slots, deque(), [], 0
        assert free == 13
        posted = 8
        for _ in range(60):
            what = chance.randrange(3)
            if what == 0:
                sent = frame(count.to_bytes(4, "big"))
                count += 1
                assert take(ctx, [sent]) == [DELIVERED if posted else NO_BUFFER]
                if posted:
                    queued.append(sent)
                    posted, free = posted - 1, free - 1
            elif what == 1:
                most = chance.randrange(1, 5)
                for packet in rxq.receive(most, timeout=0):
                    held.append((packet, queued.popleft()))
                posted = min(8 - len(queued), free)
            elif held:
                packet, sent = held.pop(chance.randrange(len(held)))
                assert packet.data.tobytes() == sent
                packet.release()
                free += 1
                posted = min(8 - len(queued), free)
            assert all(packet.data.tobytes() == sent for packet, sent in held)
        remove_rules(ctx)
