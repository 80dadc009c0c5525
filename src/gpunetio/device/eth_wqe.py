"""Builders of Ethernet WQEs: one packet, a packet with headers in the WQE, several packets, and waits for a time.

Each builder fills basic blocks in the ring of an Ethernet send queue, starting at an index. The queue's checksum
offloads apply to each packet. `notify`: the WQE completes with a CQE that `txq_poll` counts. Some other WQEs complete
as well, so that `txq_reserve` learns which slots are free (`EthTxq.signal_mask`). Addresses and keys are in host byte
order.
"""

from __future__ import annotations

from ..formats.device_structs import VerbsQp
from ..formats.doorbell import PI_MASK, WQE_IDX_SHIFT
from ..formats.eth_device import EthTxq
from ..formats.packet import ETHERNET
from ..formats.wqe import (
    ETH_SEG, OPMOD_SHIFT, SEGMENT, WQEBB_SHIFT, EthChecksum, WaitMode, WaitOperation, WqeOpcode,
)
from ..jit.compile import device_function
from ..jit.ops import be16, be32, be64, copy, ld8, ld_fixed32, ld_fixed64, pack64, st128
from .status import EINVAL, OK
from .wqe import CQ_UPDATE, data_segment, wqe_address

MAX_MULTI = 61  # packets in one WQE: 63 segments, less control and Ethernet segment
MAX_BLOCKS = 16  # basic blocks of a WQE
_HEAD = 2  # segments before the data segments
MAX_HEADERS = 210  # bytes of headers in a WQE: four basic blocks hold these and a data segment
LONGEST = 0xFFFF  # bytes of a packet
LARGEST_MSS = (1 << 14) - 1
_IN_SEGMENT = SEGMENT - ETH_SEG.inline_hdr_start  # bytes of headers
_ALL_CHECKSUMS = int(EthChecksum.L3 | EthChecksum.L4)
_BLOCK_SHIFT = WQEBB_SHIFT - 4  # of segments to basic blocks
_IN_BLOCK = (1 << _BLOCK_SHIFT) - 1
_TIME = int(WaitMode.TIME) << OPMOD_SHIFT | int(WqeOpcode.WAIT)


@device_function
def _start(txq: EthTxq, index: int, opcode: int, ds: int, notify: int) -> int:
    """Write the control segment, and return the WQE's address. Its immediate says whether `notify` was set."""
    wqe = wqe_address(txq, index)
    blocks = (ds + _IN_BLOCK) >> _BLOCK_SHIFT
    mask = ld_fixed32(txq + EthTxq.signal_mask)
    signalled = notify != 0 or (index & mask) + blocks > mask
    first = be32((index & PI_MASK) << WQE_IDX_SHIFT | opcode)
    number = be32(ld_fixed32(txq + VerbsQp.sq_num_shift8) | ds)
    flags = (CQ_UPDATE if signalled else 0) << 24
    st128(wqe, pack64(first, number), pack64(flags, 1 if notify != 0 else 0))
    return wqe


@device_function
def _ethernet(txq: EthTxq, segment: int) -> None:
    st128(segment, ld_fixed32(txq + EthTxq.cs_flags) << 32, 0)


@device_function
def fill_nop(txq: EthTxq, index: int) -> None:
    """Fill a reserved slot that has no valid packet."""
    _start(txq, index, WqeOpcode.NOP, 1, 0)


@device_function
def txq_prepare_send(txq: EthTxq, index: int, laddr: int, lkey: int, nbytes: int, notify: int = 0) -> None:
    """Build a SEND of one packet: 1 basic block (`doca_gpu_dev_eth_txq_wqe_prepare_send`)."""
    wqe = _start(txq, index, WqeOpcode.SEND, _HEAD + 1, notify)
    _ethernet(txq, wqe + SEGMENT)
    data_segment(wqe + _HEAD * SEGMENT, laddr, lkey, nbytes)


@device_function
def _segment(txq: EthTxq, index: int, number: int) -> int:
    """Return the address of segment `number` of the WQE at `index`. A WQE wraps around at the end of the ring."""
    return wqe_address(txq, index + (number >> _BLOCK_SHIFT)) + (number & _IN_BLOCK) * SEGMENT


@device_function
def _inline_segments(header_bytes: int) -> int:
    """Return how many segments the headers take after the Ethernet segment."""
    return (header_bytes - _IN_SEGMENT + SEGMENT - 1) // SEGMENT


@device_function
def is_valid(txq: EthTxq, header_bytes: int, nbytes: int, mss: int) -> bool:
    """Return whether a WQE can hold `header_bytes` of headers and the queue can send `nbytes` of payload after them."""
    if header_bytes < ETHERNET.size or header_bytes > MAX_HEADERS or nbytes < 0:
        return False
    if mss == 0:
        return header_bytes + nbytes <= LONGEST
    return 0 < mss <= LARGEST_MSS and 0 < nbytes <= ld_fixed32(txq + EthTxq.max_lso)


@device_function
def txq_headers_blocks(header_bytes: int, nbytes: int) -> int:
    """Return how many basic blocks a WQE with `header_bytes` of headers and `nbytes` of payload takes: 1 to 4."""
    return (_HEAD + _inline_segments(header_bytes) + (nbytes > 0) + _IN_BLOCK) >> _BLOCK_SHIFT


@device_function
def txq_prepare_headers(
    txq: EthTxq, index: int, headers: int, header_bytes: int, laddr: int, lkey: int, nbytes: int, mss: int = 0,
    notify: int = 0,
) -> int:
    """Build a packet whose first `header_bytes` are copied into the WQE, and whose other `nbytes` are at `laddr`.

    `headers` is an address that the kernel can read. With `mss`, this is a TSO: the device cuts the payload into TCP
    segments of up to `mss` bytes, sends each with these headers, and adapts the headers and all checksums. Return OK,
    or EINVAL for lengths that `txq_send_headers` refuses; then nothing is written.
    """
    if not is_valid(txq, header_bytes, nbytes, mss):
        return EINVAL
    more = _inline_segments(header_bytes)
    data = _HEAD + more
    opcode = WqeOpcode.SEND if mss == 0 else WqeOpcode.TSO
    wqe = _start(txq, index, opcode, data + (nbytes > 0), notify)
    flags = ld_fixed32(txq + EthTxq.cs_flags) if mss == 0 else _ALL_CHECKSUMS
    first = ld8(headers) | ld8(headers + 1) << 8
    st128(wqe + SEGMENT, pack64(0, flags | be16(mss) << 16), pack64(0, be16(header_bytes) | first << 16))
    left = header_bytes - _IN_SEGMENT
    for i in range(more):
        segment = _segment(txq, index, _HEAD + i)
        st128(segment, 0, 0)
        copy(segment, headers + _IN_SEGMENT + i * SEGMENT, min(left, SEGMENT))
        left -= SEGMENT
    if nbytes > 0:  # 0 in a data segment would be 2 GB
        data_segment(_segment(txq, index, data), laddr, lkey, nbytes)
    return OK


@device_function
def txq_multi_blocks(packets: int) -> int:
    """Return how many basic blocks a WQE of `packets` packets takes: 1 for up to 2, and 1 for each 4 more."""
    return (_HEAD + packets + _IN_BLOCK) >> _BLOCK_SHIFT


@device_function
def txq_prepare_multi(
    txq: EthTxq, index: int, packets: int, rank: int, laddr: int, lkey: int, nbytes: int, notify: int = 0
) -> int:
    """Build packet number `rank` of `packets` in one WQE (`doca_gpu_dev_eth_txq_wqe_prepare_send_empw`).

    `index` is that of the WQE's first block. Only the `notify` of packet 0 counts. Different threads may build the
    packets. Return OK, or EINVAL unless there are 1 to 61 packets and `rank` is one of them; then nothing is written.
    """
    if packets < 1 or packets > MAX_MULTI or rank < 0 or rank >= packets:
        return EINVAL
    if rank == 0:
        wqe = _start(txq, index, WqeOpcode.ENHANCED_MPSW, _HEAD + packets, notify)
        _ethernet(txq, wqe + SEGMENT)
    data_segment(_segment(txq, index, _HEAD + rank), laddr, lkey, nbytes)
    return OK


@device_function
def txq_prepare_wait(txq: EthTxq, index: int, timestamp: int, notify: int = 0) -> None:
    """Build a WAIT until a time: 1 basic block (`doca_gpu_dev_eth_txq_wqe_prepare_wait_time`).

    `timestamp` is in the format of the device. A time that has passed, or that is more than half of the range of
    `wait_mask` ahead, causes no wait.
    """
    wqe = _start(txq, index, _TIME, 1 + 2, notify)
    st128(wqe + SEGMENT, be32(WaitOperation.CYCLIC_SMALLER), 0)
    st128(wqe + 2 * SEGMENT, be64(timestamp), be64(ld_fixed64(txq + EthTxq.wait_mask)))
