"""Ethernet receive queues: wait for packets, and return their addresses and attributes.

The NIC fills a ring of packets in one buffer, in the order of arrival, and writes a CQE for each. The index of a packet
is an absolute 64-bit count of strides: a packet that is longer than a stride takes several. Only one thread, warp or
block at a time may receive from a queue.
"""

from __future__ import annotations

from ..formats.cqe import (
    CQE64, ERR_CQE64, FILLER, FLOW_TAG_MASK, INIT_OP_OWN, OPCODE_SHIFT, OWNER_MASK, STRIDES_MASK, STRIDES_SHIFT,
    STRIDING_LENGTH_MASK, CqeOpcode, Syndrome,
)
from ..formats.device_structs import VerbsCq
from ..formats.doorbell import PI_MASK
from ..formats.eth_device import EthRxq, PacketAttr
from ..jit.compile import device_function
from ..jit.ops import (
    be16, be32, be64, clock_ns, fence_acquire_sys, fence_release_sys, ld8, ld16, ld32, ld64, ld_fixed32, ld_fixed64,
    ld_relaxed32, on_host, pack64, st64, st128, st_relaxed32,
)
from .cq import cqe_address, update_cq_record
from .modes import DEFAULT, EXCLUSIVE, THREAD
from .onesided import mcst, wait
from .scope import ALONE, count_in, from_leader, rank_in, size_of
from .status import EINVAL, EIO, OK
from .waiting import LONGEST_NAP_NS, nap

_CQ = EthRxq.cq
_INVALID = INIT_OP_OWN >> OPCODE_SHIFT
_SECOND = 1_000_000_000  # ns
_SECOND_SHIFT, _NANOSECONDS = 32, (1 << 32) - 1  # of a real-time timestamp
_OTHER = -1
_LONGER, _SKIPPED = 1, 2  # a packet of several strides; strides without a packet


@device_function
def rxq_packet(rxq: EthRxq, index: int) -> int:
    """Return the address of a packet (`doca_gpu_dev_eth_rxq_get_pkt_addr`). Any index is valid in the ring."""
    slot = index & ld_fixed32(rxq + EthRxq.packet_mask)
    return ld_fixed64(rxq + EthRxq.packet_address) + (slot << ld_fixed32(rxq + EthRxq.stride_shift))


@device_function
def rxq_lkey(rxq: EthRxq) -> int:
    """Return the lkey of the buffer, which `txq_send` needs to send a packet in place
    (`doca_gpu_dev_eth_rxq_get_pkt_mkey`)."""
    return ld_fixed32(rxq + EthRxq.lkey)


@device_function
def rxq_first(rxq: EthRxq) -> int:
    """Return the index of the first packet that the last `rxq_recv` received. The others follow it."""
    return ld64(rxq + EthRxq.first)


@device_function
def rxq_give_back(rxq: EthRxq, index: int) -> None:
    """Let the NIC reuse the places of all packets before `index` (`doca_gpu_dev_eth_rxq_submit_dbr`).

    `rxq_recv` does this unless `keep` is set. The NIC takes back whole WQEs: a place that shares its WQE with packet
    `index` or a later packet is given back together with that packet.
    """
    wqes = index >> ld_fixed32(rxq + EthRxq.strides_shift)
    if wqes > ld64(rxq + EthRxq.given_back):
        st64(rxq + EthRxq.given_back, wqes)
        fence_release_sys()  # loads from these places come first
        posted = ld_fixed32(rxq + EthRxq.wqe_num) + wqes
        st_relaxed32(ld_fixed64(rxq + EthRxq.dbrec), be32(posted & PI_MASK))


@device_function
def _cqe(rxq: EthRxq, number: int) -> int:
    return cqe_address(rxq + _CQ, number + ld_fixed64(rxq + _CQ + VerbsCq.cqe_rsvd))


@device_function
def _opcode(rxq: EthRxq, number: int) -> int:
    """Return the opcode of CQE `number`, or INVALID if it has not arrived."""
    position = number + ld_fixed64(rxq + _CQ + VerbsCq.cqe_rsvd)
    word = be32(ld_relaxed32(cqe_address(rxq + _CQ, position) + CQE64.wqe_counter))
    new = (word & OWNER_MASK) == ((position & ld_fixed32(rxq + _CQ + VerbsCq.cqe_num)) != 0)
    return (word & 0xFF) >> OPCODE_SHIFT if new else _INVALID


@device_function
def _byte_count(rxq: EthRxq, number: int) -> int:
    return be32(ld32(_cqe(rxq, number) + CQE64.byte_cnt))


@device_function
def _is_plain(rxq: EthRxq, number: int, opcode: int) -> bool:
    """Return whether a CQE is plain: it reports no error, and a packet that fits into one stride."""
    if opcode == _INVALID or opcode == CqeOpcode.RESP_ERR or opcode == CqeOpcode.REQ_ERR:
        return False
    if ld_fixed32(rxq + EthRxq.striding) == 0:
        return True
    return _byte_count(rxq, number) >> STRIDES_SHIFT == 1


@device_function
def _timestamp(rxq: EthRxq, cqe: int) -> int:
    stamp = be64(ld64(cqe + CQE64.timestamp))
    if ld_fixed32(rxq + EthRxq.real_time):
        return (stamp >> _SECOND_SHIFT) * _SECOND + (stamp & _NANOSECONDS)
    return stamp


@device_function
def _describe(rxq: EthRxq, number: int, attr: PacketAttr) -> None:
    """Write the PacketAttr of a packet."""
    cqe = _cqe(rxq, number)
    nbytes = be32(ld32(cqe + CQE64.byte_cnt))
    if ld_fixed32(rxq + EthRxq.striding):
        nbytes &= STRIDING_LENGTH_MASK
    tag = be32(ld32(cqe + CQE64.sop_drop_qpn)) & FLOW_TAG_MASK
    st128(attr, _timestamp(rxq, cqe), pack64(nbytes, tag))
    seen = ld8(cqe + CQE64.hds_ip_ext) | ld8(cqe + CQE64.l4_hdr_type_etc) << 8
    seen |= be16(ld16(cqe + CQE64.vlan_info)) << 16
    sums = ld8(cqe + CQE64.rss_hash_type) | be16(ld16(cqe + CQE64.check_sum)) << 16
    words = pack64(be32(ld32(cqe + CQE64.rss_hash_result)), be32(ld32(cqe + CQE64.imm_inval_pkey)))
    st128(attr + PacketAttr.hash, words, pack64(seen, sums))


@device_function
def _note(rxq: EthRxq, number: int) -> None:
    """Record for the host the error that a CQE reports."""
    cqe = _cqe(rxq, number)
    st64(rxq + EthRxq.err_index, number)
    st64(rxq + EthRxq.err_vendor, ld8(cqe + ERR_CQE64.vendor_err_synd))
    st64(rxq + EthRxq.err_syndrome, ld8(cqe + ERR_CQE64.syndrome))


@device_function
def _run(rxq: EthRxq, number: int, count: int) -> int:
    """Return how many consecutive CQEs from `number` on are plain, up to `count`."""
    for i in range(count):
        opcode = _opcode(rxq, number + i)
        fence_acquire_sys()
        if not _is_plain(rxq, number + i, opcode):
            return i
    return count


@device_function
def _take_run(rxq: EthRxq, number: int, most: int, attrs: int, scope: int, rank: int) -> int:
    """Return how many CQEs from `number` on have arrived and are plain, up to `most`. Each thread looks at one.

    _OTHER: some have arrived, but the first is not plain.
    """
    mine = number + rank
    opcode = _opcode(rxq, mine) if rank < most else _INVALID
    arrived = count_in(1 if opcode != _INVALID else 0, scope)
    if arrived == 0:
        return 0
    fence_acquire_sys()
    plain = rank < arrived and _is_plain(rxq, mine, opcode)
    run = count_in(1 if plain else 0, scope)
    if run != arrived:
        # One of them is not plain, or a thread looked before its CQE arrived while another saw a later CQE.
        run = from_leader(_run(rxq, number, arrived) if rank == 0 else 0, scope, ALONE)
    if attrs != 0 and rank < run:
        _describe(rxq, mine, attrs + PacketAttr.size * rank)
    return run if run != 0 else _OTHER


@device_function
def _kind_of(rxq: EthRxq, number: int) -> int:
    """Return what a CQE that is not plain reports: OK if it has not arrived, _LONGER, _SKIPPED, or EIO."""
    opcode = _opcode(rxq, number)
    if opcode == _INVALID:
        return OK
    fence_acquire_sys()
    if opcode == CqeOpcode.RESP_ERR and ld8(_cqe(rxq, number) + ERR_CQE64.syndrome) == Syndrome.LOCAL_LENGTH:
        return _SKIPPED
    if opcode == CqeOpcode.RESP_ERR or opcode == CqeOpcode.REQ_ERR:
        return EIO
    return _SKIPPED if _byte_count(rxq, number) & FILLER else _LONGER


@device_function
def _behind(rxq: EthRxq, number: int, index: int) -> int:
    """Return the index that follows the strides of a CQE that is not plain."""
    if _opcode(rxq, number) != CqeOpcode.RESP_ERR:
        return index + (_byte_count(rxq, number) >> STRIDES_SHIFT & STRIDES_MASK)
    st64(rxq + EthRxq.too_long, ld64(rxq + EthRxq.too_long) + 1)
    shift = ld_fixed32(rxq + EthRxq.strides_shift)  # the packet has ended its WQE
    return ((index >> shift) + 1) << shift


@device_function
def _finish(rxq: EthRxq, index: int, following: int, number: int, keep: int) -> int:
    """Record that packets from `index` up to `following` were received. Unless `keep` is set, return their places."""
    st64(rxq + EthRxq.first, index)
    st64(rxq + EthRxq.next, following)
    st64(rxq + _CQ + VerbsCq.cqe_ci, number)
    if ld_fixed32(rxq + EthRxq.tells_cq):
        update_cq_record(rxq + _CQ, EXCLUSIVE)
    if keep == 0:
        rxq_give_back(rxq, following)
    qp = ld_fixed64(rxq + EthRxq.mcst_qp)
    if qp == 0 or index == following:
        return OK
    address, lkey = ld_fixed64(rxq + EthRxq.packet_address), ld_fixed32(rxq + EthRxq.lkey)
    return wait(qp, mcst(qp, address, lkey, EXCLUSIVE, DEFAULT, THREAD), EXCLUSIVE, THREAD)


@device_function
def _nap(rxq: EthRxq, quiet: int, left_ns: int) -> None:
    """Let a host thread spin or sleep after `quiet` polls in a row that found no packet."""
    if ld_fixed32(rxq + EthRxq.wakes):
        nap(quiet, rxq + EthRxq.wakeup, left_ns)
    else:
        nap(quiet, 0, min(left_ns, LONGEST_NAP_NS))


@device_function
def rxq_recv(rxq: EthRxq, max_packets: int, timeout_ns: int, attrs: int = 0, scope: int = THREAD, keep: int = 0) -> int:
    """Wait until `max_packets` have arrived or `timeout_ns` have passed. Return how many arrived, or a negative status
    (`doca_gpu_dev_eth_rxq_recv`).

    `rxq_first` returns the index of the first packet. One call receives at most as many packets as the ring holds;
    `max_packets` 0 means that many. In warp and block scope, all threads must pass the same arguments, and they get the
    same result. `attrs`: address of a PacketAttr for each packet up to the maximum, or 0. `keep`: the NIC does not get
    the packets' places back until `rxq_give_back`; otherwise it overwrites a packet once it has filled the rest of the
    ring. EIO: the queue has failed. EINVAL: a negative argument.
    """
    if max_packets < 0 or timeout_ns < 0:
        return EINVAL
    most = ld_fixed32(rxq + EthRxq.packet_mask) + 1
    if max_packets != 0:
        most = min(max_packets, most)
    rank, size = rank_in(scope, ALONE), size_of(scope, ALONE)
    index, begun = ld64(rxq + EthRxq.next), ld64(rxq + _CQ + VerbsCq.cqe_ci)
    number, found, longer = begun, 0, 0
    kind = OK
    polls = 0
    start = 0
    quiet = ld64(rxq + EthRxq.quiet)
    while found < most and kind == OK:
        run = _take_run(rxq, number, most - found, attrs + PacketAttr.size * found if attrs != 0 else 0, scope, rank)
        if run == _OTHER:
            run = 0
            kind = from_leader(_kind_of(rxq, number) if rank == 0 else 0, scope, ALONE)
            if kind == _SKIPPED and found == 0:
                index = from_leader(_behind(rxq, number, index) if rank == 0 else 0, scope, ALONE)
                number += 1
                kind = OK
                continue  # at most once around the ring: the NIC gets no place back meanwhile
        found += run
        number += run
        if run != 0:
            quiet = 0
        if run != size and found < most and kind == OK:
            late = 0
            if rank == 0:
                now = clock_ns()
                if polls == 0:
                    start = now
                late = 1 if now - start >= timeout_ns else 0
                if on_host() and not late:
                    _nap(rxq, quiet, timeout_ns - (now - start))
                    quiet += 1
            polls += 1
            if count_in(late, scope) != 0:
                break
    if on_host() and rank == 0:
        st64(rxq + EthRxq.quiet, quiet)
    if found == 0 and kind == _LONGER:
        longer = 1
    following = index + found
    if longer:
        following = from_leader(_behind(rxq, number, index) if rank == 0 else 0, scope, ALONE)
        if attrs != 0 and rank == 0:
            _describe(rxq, number, attrs)
        found = 1
        number += 1
    if found == 0 and kind == EIO:
        if rank == 0:
            _note(rxq, number)
        found = EIO
    if number == begun:
        return found
    status = OK
    if rank == 0:
        status = _finish(rxq, index, following, number, keep)
    status = from_leader(status, scope, ALONE)
    return found if status == OK else status
