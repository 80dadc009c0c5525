"""Packets with headers in the WQE, posted by kernels: the WQEs in the ring, read by a plain-Python device."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eth_kernels import poll_each, prepare_headers, send_headers, wait_for
from eth_rxq_rig import Crew
from eth_txq_rig import RING, TxDevice, Wqe
from gpunetio import MemType, device
from gpunetio.gpu import GpuMemory

SEND, TSO = 0x0A, 0x0E
LADDR, LKEY = 0x7000_0000, 0x0BAD_F00D
MOST = 210
SHARING = {"exclusive": device.EXCLUSIVE, "cta": device.CTA, "gpu": device.GPU}


@pytest.fixture(scope="module", params=["host", pytest.param("auto", marks=pytest.mark.gpu, id="cuda")])
def crew(request) -> Iterator[Crew]:
    with Crew.opened(request.param) as opened:
        yield opened


@pytest.fixture(scope="module")
def headers(crew) -> Iterator[GpuMemory]:
    """A byte of headers for each place, so that one that is wrong shows."""
    with crew.gpu.alloc(256, MemType.CPU_GPU) as memory:
        memory.array[:] = [(n * 37 + 1) & 0xFF for n in range(256)]
        yield memory


def blocks_of(header_bytes: int, nbytes: int) -> int:
    """Basic blocks of control and Ethernet segment, headers and data segment."""
    segments = 2 + -(-(header_bytes - 2) // 16) + (nbytes > 0)
    return -(-segments // 4)


def check(tx: TxDevice, headers: GpuMemory, tickets: list[int], threads: int, *wanted: int) -> None:
    """Every packet is in the WQE of its ticket, and the WQEs are close together."""
    header_bytes, nbytes, mss = wanted
    seen: dict[int, Wqe] = {wqe.index: wqe for wqe in tx.seen}
    assert sorted(tickets) == sorted(seen)
    end = 0
    lengths = {ticket: header_bytes + n // threads % 3 for n, ticket in enumerate(tickets)}
    for ticket in sorted(tickets):
        assert ticket == end
        end += blocks_of(lengths[ticket], nbytes)
    for n, ticket in enumerate(tickets):
        wqe = seen[ticket]
        assert (wqe.opcode, wqe.mss) == (TSO if mss else SEND, mss)
        assert wqe.headers == headers.array[n % 7 :][: lengths[ticket]].tobytes()
        assert wqe.packets == (((LADDR + 16 * n, LKEY, nbytes),) if nbytes else ())


@pytest.mark.parametrize("sharing", SHARING.values(), ids=SHARING)
@pytest.mark.parametrize(("header_bytes", "nbytes", "mss"), [
    (14, 46, 0), (18, 0, 0), (33, 1000, 0), (54, 1000, 0), (66, 5000, 1448), (128, 1, 1), (208, 0, 0),
    (208, 1 << 18, 16383),
])
def test_headers_are_in_the_wqe(crew, headers, header_bytes, nbytes, mss, sharing):
    """For several laps of a short ring, beyond whose end WQEs of several blocks go on at its beginning."""
    tx = TxDevice(crew)
    arguments = headers.device_address, header_bytes, LADDR, LKEY, nbytes, mss, 0, sharing
    tickets = tx.run(send_headers, 200, *arguments, count=200)
    check(tx, headers, tickets, 1, header_bytes, nbytes, mss)
    for wqe in tx.seen:  # those with the end of a quarter of the ring complete
        end = wqe.index + blocks_of(len(wqe.headers), nbytes)
        assert wqe.signalled == (end // 16 > wqe.index // 16)
    tx.close()


@pytest.mark.parametrize("mss", [0, 1000])
def test_threads_that_share_a_queue(crew, headers, mss):
    tx = TxDevice(crew)
    arguments = headers.device_address, 60, LADDR, LKEY, 3000, mss, 5, device.GPU
    tickets = tx.run(send_headers, 40, *arguments, count=320, grid=2, block=4)
    check(tx, headers, tickets, 8, 60, 3000, mss)
    assert tx.run(poll_each, 1000, 1, device.GPU, 0, count=1) == [8 * 8]
    tx.close()


@settings(max_examples=10)
@given(
    st.lists(st.tuples(st.integers(14, 208), st.sampled_from([0, 1, 700]), st.integers(0, 3)), min_size=5, max_size=20),
    st.sampled_from(sorted(SHARING)),
)
def test_random_lengths(crew, headers, plan, sharing):
    """Each completion with `notify` is counted once, and a wait for a ticket ends, wherever a WQE lies in the ring."""
    tx = TxDevice(crew)
    notified = 0
    for header_bytes, nbytes, every in plan:
        arguments = headers.device_address, header_bytes, LADDR, LKEY, nbytes, 0, every, SHARING[sharing]
        tickets = tx.run(send_headers, 9, *arguments, count=9)
        notified += 9 // every if every else 0
        if every in (1, 3):
            assert tx.run(wait_for, tickets[-1], SHARING[sharing], 1, count=1) == [device.OK]
    assert len(tx.seen) == 9 * len(plan)
    assert tx.run(poll_each, 1000, 1, SHARING[sharing], 0, count=1) == [notified]
    tx.close()


@pytest.mark.parametrize(("header_bytes", "nbytes", "mss"), [
    (13, 100, 0), (-1, 100, 0), (0, 100, 0), (MOST + 1, 0, 0), (1 << 40, 0, 0), (14, -1, 0), (54, 65535 - 53, 0),
    (54, 0, 1000), (54, -1, 1000), (54, 100, -1), (54, 100, 16384), (54, (1 << 18) + 1, 1000),
])
def test_packets_that_cannot_be(crew, headers, header_bytes, nbytes, mss):
    tx = TxDevice(crew)
    arguments = headers.device_address, header_bytes, LADDR, LKEY, nbytes, mss, 1, device.GPU
    assert tx.run(send_headers, 1, *arguments, count=1) == [device.EINVAL]
    assert tx.run(prepare_headers, 0, headers.device_address, header_bytes, nbytes, mss, count=1) == [device.EINVAL]
    assert tx.index("sq_rsvd_index") == 0
    assert not tx.array[RING : RING + 64 * tx.depth].any()
    tx.close()


def test_a_device_without_lso(crew, headers):
    tx = TxDevice(crew, max_lso=0)
    arguments = headers.device_address, 54, LADDR, LKEY, 100
    assert tx.run(send_headers, 1, *arguments, 100, 1, device.GPU, count=1) == [device.EINVAL]
    assert tx.run(send_headers, 1, *arguments, 0, 1, device.GPU, count=1) == [0]
    tx.close()


def test_the_most_headers(crew, headers):
    tx = TxDevice(crew)
    arguments = headers.device_address, MOST, LADDR, LKEY, 9
    assert tx.run(send_headers, 1, *arguments, 0, 1, device.GPU, count=1) == [0]
    assert len(tx.seen[0].headers) == MOST
    assert tx.index("sq_rsvd_index") == 4
    tx.close()


def test_a_full_ring(crew, headers):
    """A device that stops: what does not fit ends at the deadline, and leaves no hole."""
    tx = TxDevice(crew, timeout=0.05)
    arguments = headers.device_address, 54, LADDR, LKEY, 100, 0, 1, device.GPU
    tickets = tx.run(send_headers, 34, *arguments, count=34, most=0)
    assert tickets == [*range(0, 64, 2), device.ETIMEDOUT, device.ETIMEDOUT]
    assert (tx.index("sq_rsvd_index"), tx.index("sq_wqe_pi")) == (64, 64)
    while tx.step():
        pass
    assert tx.run(send_headers, 2, *arguments, count=2) == [64, 66]
    tx.close()
