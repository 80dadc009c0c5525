"""Receiving Ethernet packets in a kernel: which ones, where, and what is said of them, beside a plain-Python device."""

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eth_kernels import give_back
from eth_rxq_rig import ATTRS, PROTECTION, Crew, RxDevice
from gpunetio import device
from gpunetio.formats.eth_device import PACKET_ATTR

SCOPES = {"thread": device.THREAD, "warp": device.WARP, "block": device.BLOCK}


@pytest.fixture(scope="module", params=["host", pytest.param("auto", marks=pytest.mark.gpu, id="cuda")])
def crew(request) -> Iterator[Crew]:
    with Crew.opened(request.param) as opened:
        yield opened


@pytest.fixture
def rx(crew) -> Iterator[RxDevice]:
    opened = RxDevice(crew)
    yield opened
    opened.close()


every_scope = pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)


@every_scope
def test_packets_in_the_order_of_arrival(rx, scope):
    """As many as asked for, and no more than have come; the rest is for the next call."""
    for n in range(7):
        rx.arrive(60 + n, tag=n * 1111)
    assert rx.recv(5, scope) == (5, 0)
    rx.check(5, 0)
    assert rx.recv(5, scope) == (2, 5)
    rx.check(2, 5)
    assert rx.recv(5, scope) == (0, 5)


@every_scope
def test_no_limit_is_the_ring(rx, scope):
    for _ in range(20):
        rx.arrive(64)
    assert rx.lost == 4
    assert rx.recv(0, scope) == (16, 0)
    rx.check(16, 0)


def test_without_attributes_none_are_written(rx):
    rx.arrive(64)
    assert rx.recv(1, attrs=False) == (1, 0)
    rx.check(1, 0, described=False)


def test_the_ring_goes_back_in_whole_wqes(rx):
    """The doorbell record counts the WQEs whose strides were all received."""
    for received, record in ((7, 2), (1, 3), (8, 4), (9, 5), (6, 5), (1, 6)):
        for _ in range(received):
            rx.arrive(64)
        count, first = rx.recv(received)
        assert count == received
        rx.check(count, first)
        assert rx.record == record
    assert rx.lost == 0


def test_places_are_kept_until_they_are_given_back(rx):
    for _ in range(16):
        rx.arrive(64)
    assert rx.recv(16, keep=1) == (16, 0)
    assert rx.record == 2
    rx.arrive(64)
    assert rx.lost == 1
    for index, record in ((7, 2), (12, 3), (3, 3), (16, 4)):
        assert give_back[1, 1, rx.gpu](rx.at, index).wait(60)
        assert rx.record == record


@every_scope
def test_a_wait_ends_at_its_time_out(rx, scope):
    rx.recv(1, scope)  # compiled
    rx.arrive(64)
    begin = time.monotonic()
    assert rx.recv(4, scope, timeout_ns=50_000_000) == (1, 0)
    assert time.monotonic() - begin >= 0.05
    rx.check(1, 0)


def test_packets_that_come_later_end_the_wait(rx):
    def later():
        time.sleep(0.05)
        for n in range(3):
            rx.arrive(64, n)

    helper = threading.Thread(target=later)
    helper.start()
    assert rx.recv(3, device.BLOCK, timeout_ns=60_000_000_000) == (3, 0)
    helper.join()
    rx.check(3, 0)


def test_a_failed_queue(rx):
    """What arrived before is received; then every call fails."""
    rx.arrive(64)
    rx.fail()
    assert rx.recv(4) == (1, 0)
    rx.check(1, 0)
    for scope in SCOPES.values():
        assert rx.recv(4, scope)[0] == device.EIO
    q = rx.structure
    assert (q["err_index"], q["err_syndrome"], q["err_vendor"]) == (1, PROTECTION, 0x99)


def test_bad_arguments(rx):
    rx.arrive(64)
    assert rx.recv(-1)[0] == rx.recv(1, timeout_ns=-1)[0] == device.EINVAL
    assert rx.recv(1) == (1, 0)


def test_the_record_of_a_cq_that_must_not_overrun(rx):
    rx.structure["tells_cq"] = 1
    for _ in range(3):
        rx.arrive(64)
    assert rx.recv(0) == (3, 0)
    assert rx.array[256 + 64 : 256 + 68].tolist() == [0, 0, 0, 3]


def test_time_stamps_in_real_time(rx):
    rx.structure["real_time"] = 1
    rx.arrive(64)
    stamp = rx.expected[0].stamp
    rx.recv(1)
    assert PACKET_ATTR.at(rx.array, ATTRS)["timestamp_ns"] == (stamp >> 32) * 10**9 + stamp % 2**32


def test_a_queue_that_is_not_striding(crew):
    """One packet for each WQE, of any length up to its own, behind indices of 16 bits."""
    rx = RxDevice(crew, wqes=8, strides=1, stride=1 << 14, striding=False)
    for lap in range(4):
        for n in range(8):
            rx.arrive(16384 if n == 3 else 60 + n + lap)
        rx.arrive(64)
        count, first = rx.recv(0, device.BLOCK)
        assert (count, first, rx.lost) == (8, 8 * lap, lap + 1)
        rx.check(count, first)
        assert rx.record == 8 * (lap + 2)
    rx.arrive(20000)
    rx.arrive(64)
    assert rx.recv(0) == (1, 33)
    assert rx.structure["too_long"] == 1
    rx.close()


@every_scope
def test_a_packet_of_several_strides_comes_alone(rx, scope):
    """Those before it, and the gap that it leaves, do not mix with it."""
    for nbytes in (64, 64, 64, 1000, 64, 200):
        rx.arrive(nbytes)
    for expected in ((3, 0), (1, 8)):
        assert rx.recv(0, scope) == expected
        rx.check(*expected)
    assert rx.lost == 2
    rx.arrive(200)
    rx.arrive(64)
    for expected in ((1, 16), (1, 18)):
        assert rx.recv(0, scope) == expected
        rx.check(*expected)


ACTIONS = st.one_of(
    st.tuples(
        st.just("arrive"), st.sampled_from([14, 60, 127, 128, 128, 128, 129, 300, 1024, 1025]),
        st.integers(0, 2**24 - 1),
    ),
    st.tuples(st.just("burst"), st.integers(1, 20), st.integers(0, 2**24 - 1)),
    st.tuples(st.just("recv"), st.integers(0, 20), st.sampled_from(sorted(SCOPES))),
)


@settings(max_examples=12)
@given(st.lists(ACTIONS, min_size=10, max_size=40))
def test_random_programs(crew, actions):
    """Packets of any length, with gaps where they do not fit: the kernel finds each that the device has placed."""
    rx = RxDevice(crew)
    try:
        for what, one, other in [*actions, *[("recv", 0, "block")] * 40]:
            if what == "arrive":
                rx.arrive(one, other)
            elif what == "burst":
                for n in range(one):
                    rx.arrive(64, other ^ n)
            else:
                count, first = rx.recv(one, SCOPES[other])
                assert 0 <= count <= (one or rx.packets)
                rx.check(count, first)
        assert not rx.expected
        assert rx.posted >= rx.wqes - 1
    finally:
        rx.close()
