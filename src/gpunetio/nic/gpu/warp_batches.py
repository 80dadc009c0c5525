"""Warp batches: WQEs of a queue pair that the lanes of a warp execute together, one per lane, on cached rows.

A batch consists of requests that always succeed once they are checked: WRITEs of one segment or of inline data, READs
of one segment, and atomics of 8 bytes, to a queue pair of this NIC or of one that it reaches without packets
(control/regions/reach.py). A batch ends before the first WQE that is anything else, that fails a check, or whose CQE
finds no room. One thread then continues with the engine's other code, which finds the reason. So only that code handles
errors, events, receives and retries. On the host, a batch is one WQE.

Requests take effect in order (IBTA 10.8.3.3), but WRITEs and atomics to regions with RELAXED_ORDERING may pass earlier
requests to other addresses, as over PCIe. Without RELAXED_ORDERING, a fence between two requests costs half a
microsecond.
"""

from __future__ import annotations

from typing import NamedTuple

from ...enums import Access
from ...formats.commands import QpState, ServiceType
from ...formats.cqe import CI_MASK, CQE64, CqeOpcode
from ...formats.doorbell import CQ_DBREC, PI_MASK, WQE_IDX_SHIFT
from ...formats.wqe import (
    CE_SHIFT, CTRL_SEG, DS_MASK, FM_SHIFT, INLINE_SEG, MAX_INLINE, SEGMENT, WQEBB_SHIFT, CompletionMode, WqeOpcode,
)
from ...jit.compile import device_function, engine_function
from ...jit.ops import (
    ALL_LANES, be32, be64, cas_gpu64, count_lanes, fence_acquire_sys, fence_gpu, fence_sys, fetch_add_gpu64,
    first_lane, from_lane, lane_or_0, lanes_here, lanes_where, lanes_with, ld64, ld_relaxed32, ld_relaxed64,
    rank_among, st64, st_relaxed32, sum_of_lanes, sync_lanes,
)
from ..memory.copies import SMALL, copy_by_lane, copy_together
from ..memory.keys import find_in, key_row
from ..memory.streams import DEVICE_SHIFT
from ..queues.completion import Completion, fill_cqe, last_word
from ..queues.doorbells import announced
from ..queues.psn import on_wire, packets_of
from ..state.objects import MKEY_ROW, MkeyRow
from ..state.slice_shared import (
    KEYS, SLICE_SHARED, has_bit, set_bits, shared_counters_at, shared_cq_at, shared_mkey_at, shared_qp_at,
    shared_queue, shared_work_queue_at, shared_worker_at,
)
from ..state.worker import WorkerState
from ..transport.peer_memory import peer_range

_WRITE, _READ, _FETCH_ADD, _COMPARE_SWAP = map(
    int, (WqeOpcode.RDMA_WRITE, WqeOpcode.RDMA_READ, WqeOpcode.ATOMIC_FA, WqeOpcode.ATOMIC_CS)
)
_LOCAL_WRITE, _REMOTE_WRITE, _REMOTE_READ, _REMOTE_ATOMIC, _RELAXED = map(
    int,
    (Access.LOCAL_WRITE, Access.REMOTE_WRITE, Access.REMOTE_READ, Access.REMOTE_ATOMIC, Access.RELAXED_ORDERING),
)


class Request(NamedTuple):
    """A request that a lane executes. `target` and `source` are those of the copy; an atomic changes `target` and
    stores its result at `source`. `strict`: it must not pass earlier requests. `near`: it only writes to memory of this
    GPU. A key is 0 if there is none.
    """

    good: int
    opcode: int
    ce: int
    nbytes: int
    target: int
    source: int
    strict: int
    near: int
    add: int
    compare: int
    remote_key: int
    local_key: int


# --- keys ------------------------------------------------------------------------------------------------------------


@device_function
def _cached_key(worker: WorkerState, key: int) -> int:
    """Return the address of a key's slot in the cache of keys in shared memory."""
    return worker + SLICE_SHARED.keys + ((key >> 8) & (KEYS - 1)) * MKEY_ROW.size


@device_function
def _key_row(worker: WorkerState, keys: int, key: int) -> MkeyRow:
    """Return the row for a key: in shared memory, or in the table `keys`. `key` includes the tag of a peer."""
    cached = _cached_key(worker, key)
    if shared_mkey_at(cached).key == key:
        return MkeyRow(cached)
    return key_row(keys, shared_worker_at(worker).mkey_mask, key)


@device_function
def _cache_key(worker: WorkerState, keys: int, key: int) -> None:
    """Cache a key's row in shared memory. One lane calls this, while no other lane reads the cache of keys."""
    cached = _cached_key(worker, key)
    if key != 0 and shared_mkey_at(cached).key != key:
        row = key_row(keys, shared_worker_at(worker).mkey_mask, key)
        for at in range(0, MKEY_ROW.size, 8):
            st64(cached + at, ld64(row + at))


# --- reading requests ------------------------------------------------------------------------------------------------


@device_function
def _is_batchable(row: int) -> bool:
    """Return whether the state of a queue pair allows its next WQEs to be a batch."""
    q = shared_qp_at(row)
    if q.peer_keys == 0 or q.send_cq == 0 or q.sq_addr == 0:
        return False
    c = shared_cq_at(q.send_cq)
    other = (q.state ^ QpState.RTS) | (q.service ^ ServiceType.RC)
    other |= q.drain | q.retry_at | q.stream | q.copied | q.cs_req | (q.sq_next ^ q.sq_ci)
    other |= c.error | c.channel
    if q.wire == 0:
        p = shared_qp_at(q.remote_row)
        other |= (p.state ^ QpState.RTS) | (p.service ^ q.service) | p.wire
        other |= (p.qpn ^ q.remote_qpn) | (p.remote_qpn ^ q.qpn) | (p.expect_psn ^ on_wire(q.tx_psn))
    return other == 0


@engine_function
def find_batchable(shared: int) -> None:
    """Mark the queue pairs whose next WQEs may be a batch. Batches do not change the marks. All lanes call this."""
    count = shared_worker_at(shared).active_count
    for base in range(0, count, lanes_here()):
        i = base + lane_or_0()
        serves = 1 if i < count and _is_batchable(shared_work_queue_at(shared_queue(shared, i)).row) else 0
        ready = lanes_where(serves)
        if lane_or_0() == 0:
            set_bits(shared + SLICE_SHARED.batchable, base, ready)
    sync_lanes(ALL_LANES)


@device_function
def _high(word: int) -> int:
    """Return the big-endian 32-bit value in the first half of a loaded word."""
    return be32(word)


@device_function
def _low(word: int) -> int:
    """Return the big-endian 32-bit value in the second half of a loaded word."""
    return be32(word >> 32)


@device_function
def _load(slot: int) -> tuple[int, int, int, int, int, int, int, int]:
    """Return the words of a slot. All are loaded at once: one load takes as long as all of them."""
    return (
        ld_relaxed64(slot), ld_relaxed64(slot + 8), ld_relaxed64(slot + 16), ld_relaxed64(slot + 24),
        ld_relaxed64(slot + 32), ld_relaxed64(slot + 40), ld_relaxed64(slot + 48), ld_relaxed64(slot + 56),
    )


@device_function
def _parse(worker: WorkerState, row: int, index: int, there: int, wqe: int, words: tuple[int, ...]) -> Request:
    """Return the request of WQE `index`. It is not `good` if it cannot be in a batch, or if it is not `there`.

    `words` are the words of its slot, at `wqe`. All checks are combined into one: an early return costs more, because
    each return sets all values.
    """
    q = shared_qp_at(row)
    control, flags, raddr, third, fourth, fifth, sixth, seventh = words
    opcode, found = _high(control) & 0xFF, (_high(control) >> WQE_IDX_SHIFT) & PI_MASK
    mode = flags >> 8 * CTRL_SEG.fm_ce_se - 64
    ds, ce, fenced = _low(control) & DS_MASK, (mode >> CE_SHIFT) & 3, (mode >> FM_SHIFT) & 7
    writes, reads = opcode == _WRITE, opcode == _READ
    counts = opcode == _FETCH_ADD or opcode == _COMPARE_SWAP
    right = (_REMOTE_WRITE if writes else 0) | (_REMOTE_READ if reads else 0) | (_REMOTE_ATOMIC if counts else 0)

    sizes, address = (sixth, seventh) if counts else (fourth, fifth)
    inline, nbytes = _high(sizes) & INLINE_SEG, _high(sizes) & INLINE_SEG - 1
    local_key = 0 if inline else _low(sizes)
    here = _key_row(worker, shared_worker_at(worker).mkeys, local_key)
    source = find_in(here, local_key, q.pdn, be64(address), nbytes, 0 if writes else _LOCAL_WRITE)
    near_here = here.near
    segments = 4 if counts else 3
    most = q.msg_max
    if inline:
        source, near_here, segments = wqe + 2 * SEGMENT + 4, 1, 2 * SEGMENT + 4 + nbytes + SEGMENT - 1 >> 4
        most = MAX_INLINE if writes else 0
    remote_key = _high(third) | q.peer_tag
    far = _key_row(worker, q.peer_keys, remote_key)
    target = peer_range(far, remote_key, q.peer_pdn, q.peer_rights, q.peer_max, be64(raddr), nbytes, right)

    bad = (found ^ index & PI_MASK) | (_low(control) >> 8) ^ q.qpn | ds ^ segments
    bad |= (nbytes - 1 | right - 1 | most - nbytes | CompletionMode.ALWAYS - ce) >> 63
    # -1 is a refusal. Other upper bits mark device memory, which DMA streams copy (memory/streams.py).
    bad |= (source | target) >> DEVICE_SHIFT | ((nbytes ^ 8 | (target | source) & 7) if counts else 0)
    may_pass = reads or far.access & _RELAXED != 0
    to, come_from = (source, target) if reads else (target, source)
    return Request(
        1 if there and bad == 0 else 0, opcode, ce, nbytes, to, come_from, 0 if may_pass and fenced == 0 else 1,
        1 if near_here != 0 and far.near != 0 else 0, be64(fourth), be64(fifth), remote_key, local_key,
    )


# --- executing -------------------------------------------------------------------------------------------------------


@device_function
def _is_copy(request: Request) -> bool:
    return request.opcode == _WRITE or request.opcode == _READ


@device_function
def _fence(of_gpu: int) -> None:
    """Order earlier stores before later ones: for threads of this GPU, or for everything that accesses the memory.

    Stores to memory of this GPU are ordered in that memory for all readers, so the scope of the GPU is sufficient.
    """
    if of_gpu:
        fence_gpu()
    else:
        fence_sys()


@device_function
def _atomic(request: Request) -> int:
    """Execute an atomic and return the old word. The caller issues the fences."""
    if request.opcode == _FETCH_ADD:
        return fetch_add_gpu64(request.target, request.add)
    return cas_gpu64(request.target, request.compare, request.add)


@device_function
def _sum_up_to(value: int) -> int:
    """Return the sum of the values of this lane and of all lower lanes."""
    lane = lane_or_0()
    step = 1
    while step < lanes_here():
        below = from_lane(value, max(lane - step, 0))
        value += below if lane >= step else 0
        step <<= 1
    return value


@device_function
def _is_one(value: int, counts: int, lanes: int) -> bool:
    """Return whether all of `lanes`, the lanes where `counts`, have the same value."""
    one = from_lane(value, first_lane(lanes))
    return lanes_where(1 if counts and value != one else 0) == 0


@device_function
def _add_combined(request: Request, up_to: int, lanes: int) -> int:
    """Execute the additions of `lanes` to one word as one addition. Return the old word for each lane.

    `up_to` is the sum of the operands up to this lane.
    """
    total, first = from_lane(up_to, lanes_here() - 1), first_lane(lanes)
    old = 0
    if lane_or_0() == first:
        old = fetch_add_gpu64(request.target, total)
    return from_lane(old, first) + up_to - request.add


@device_function
def _serialize_atomics(request: Request, counts: int, lanes: int) -> int:
    """Execute atomics, those on the same word in order. Return the old words."""
    rank = 0
    if count_lanes(lanes) != 1:
        rank = rank_among(lanes_with(ALL_LANES, request.target if counts else ~lane_or_0()))
    old = 0
    at = 0
    while lanes != 0:
        now = 1 if counts and rank == at else 0
        if now:
            old = _atomic(request)
        lanes &= ~lanes_where(now)
        at += 1
    return old


@device_function
def _execute_atomics(request: Request, counts: int, lanes: int, fences: int, of_gpu: int) -> None:
    """Execute the atomics of `lanes`, the lanes where `counts`, after a fence if `fences`.

    Sums and comparisons come before the fence, while stores are still in flight.
    """
    same = lanes
    combined = 0
    up_to = 0
    if count_lanes(lanes) != 1:
        if lanes_where(1 if counts and request.opcode != _FETCH_ADD else 0) == 0:
            combined = 1 if _is_one(request.target, counts, lanes) else 0
        if combined:
            up_to = _sum_up_to(request.add if counts else 0)
        if not _is_one(request.source, counts, lanes):
            same = lanes & lanes_with(ALL_LANES, request.source if counts else ~lane_or_0())
    if fences:
        _fence(of_gpu)
    if combined:
        old = _add_combined(request, up_to, lanes)
    else:
        old = _serialize_atomics(request, counts, lanes)
    if counts and same < 2 << lane_or_0():  # the last of several results for one address
        st64(request.source, old)


@device_function
def _execute(worker: WorkerState, request: Request, mine: int, of_gpu: int) -> None:
    """Execute the requests of the lanes where `mine`: first the copies, then the atomics."""
    copies = mine and _is_copy(request)
    if copies and request.nbytes <= SMALL:
        copy_by_lane(request.target, request.source, request.nbytes)
    large = 1 if copies and request.nbytes > SMALL else 0
    if lanes_where(large) != 0:
        copy_together(worker, large, request.target, request.source, request.nbytes)
    counts = 1 if mine and not copies else 0
    lanes = lanes_where(counts)
    if lanes != 0:
        _execute_atomics(request, counts, lanes, lanes_where(1 if copies else 0) != 0, of_gpu)


@device_function
def _most_before(value: int) -> int:
    """Return the maximum of the values of all lower lanes, which are not negative; 0 in the first lane."""
    lane = lane_or_0()
    below = from_lane(value, max(lane - 1, 0))
    most = below if lane != 0 else 0
    step = 1
    while step < lanes_here():
        other = from_lane(most, max(lane - step, 0))
        most = max(most, other) if lane >= step else most
        step <<= 1
    return most


@engine_function
def _overlaps(target: int, end: int, batch: int, copying: int) -> tuple[int, int]:
    """Return whether this lane changes bytes that an earlier lane changes, and the lanes that copy to the same range.

    Copies to exactly the same range don't count as overlaps. `copying` are the lanes that copy to [target, end); the
    other lanes execute atomics.
    """
    lane = lane_or_0()
    overlaps = 0
    same = 0
    for other in range(batch):
        begin_there, end_there = from_lane(target, other), from_lane(end, other)
        if copying >> other & 1 and begin_there == target and end_there == end:
            same |= 1 << other
        elif other < lane and begin_there < end and target < end_there:
            overlaps = 1
    return overlaps, same


@device_function
def _barriers(request: Request, batch: int) -> tuple[int, int]:
    """Return the lanes whose requests must not pass earlier ones, and the lanes that copy to this lane's range.

    The latter is 0 if no two lanes change the same bytes. In the usual case, copies to rising addresses with additions
    to one other word, lanes need not be compared one by one.
    """
    lane = lane_or_0()
    mine = lane < batch
    copies = mine and _is_copy(request)
    counts = mine and not copies
    copying, counting = lanes_where(1 if copies else 0), lanes_where(1 if counts else 0)
    reads = lanes_where(1 if mine and request.opcode == _READ else 0)
    barriers = 1 if mine and request.strict else 0
    target, end = request.target if mine else 0, request.target + request.nbytes if mine else 0
    most = _most_before(end if copies else 0)  # all lanes take part in this
    mixed = 1 if copies and target < most else 0
    if counting != 0:
        word = from_lane(target, first_lane(counting))
        if (copies and target < word + 8 and word < end) or (counts and target != word):
            mixed = 1
    same = 0
    if lanes_where(mixed) != 0:
        overlaps, same = _overlaps(target, end, batch, copying)
        if copies and overlaps:
            barriers = 1
    # READs have no effect on remote memory. They may pass each other, but no other request.
    return lanes_where(barriers) | reads ^ reads << 1, same if copies else 0


@device_function
def _execute_in_order(worker: WorkerState, request: Request, batch: int, of_gpu: int) -> None:
    """Execute a batch, with a fence before each request that must not pass earlier ones, and none at the end.

    Of several copies to one range with no fence between them, only the last is made: no one can observe the others.
    """
    lane = lane_or_0()
    barriers, same = 0, 0
    if batch > 1:
        barriers, same = _barriers(request, batch)
    at = 0
    while at < batch:
        end = min(first_lane(barriers >> at + 1) + at + 1, batch)
        if at != 0:
            _fence(of_gpu)
        last = same & (1 << end) - 1 < 2 << lane or not _is_copy(request)
        _execute(worker, request, at <= lane < end and last, of_gpu)
        at = end


@device_function
def _total_bytes(nbytes: int) -> int:
    """Return the sum of the sizes of all lanes, which have at most 32 bits each."""
    return (sum_of_lanes(nbytes >> 16) << 16) + sum_of_lanes(nbytes & 0xFFFF)


@device_function
def _room(cq: int, consumed: int) -> int:
    """Return how many CQEs of a batch a CQ has room for. `consumed` is the consumer index loaded from its record."""
    c = shared_cq_at(cq)
    used = 0 if c.overrun else (c.pi - (be32(consumed) & CI_MASK)) & CI_MASK
    return (lanes_here() if c.collapsed & c.overrun else 1 << c.log) - used


@device_function
def _complete(worker: WorkerState, row: int, request: Request, index: int, cqes: int, of_gpu: int) -> None:
    """Write the CQEs of these lanes, or only the last one to a collapsed CQ. The fence also covers the payload."""
    q = shared_qp_at(row)
    c = shared_cq_at(q.send_cq)
    lane = lane_or_0()
    mine = 1 if cqes >> lane == 1 else (cqes >> lane & 1) & (c.collapsed ^ 1)
    pi = c.pi + rank_among(cqes)
    cqe = c.addr + ((0 if c.collapsed else pi & ((1 << c.log) - 1)) << c.shift)
    if mine:
        said = Completion(CqeOpcode.REQ, q.qpn, q.user_index, index, request.opcode, request.nbytes)
        fill_cqe(worker, cqe, said, 0)
    _fence(of_gpu)
    if mine:
        st_relaxed32(cqe + CQE64.wqe_counter, last_word(index, CqeOpcode.REQ, 0, (pi >> c.log) & 1))


@device_function
def _count(worker: WorkerState, row: int, request: Request, batch: int, cqes: int) -> None:
    """Count the work of a batch. Only the first lane writes."""
    q = shared_qp_at(row)
    lane = lane_or_0()
    mine = lane < batch
    nbytes, packets = request.nbytes if mine else 0, packets_of(request.nbytes, q.mtu) if mine else 0
    reads = lanes_where(1 if mine and request.opcode == _READ else 0)
    writes = lanes_where(1 if mine and request.opcode == _WRITE else 0)
    if batch > 1:
        nbytes, packets = _total_bytes(nbytes), sum_of_lanes(packets)
    if lane == 0:
        # Everything is loaded before anything is stored: a load cannot pass stores that may be to the same word.
        n, c = shared_counters_at(worker + SLICE_SHARED.counters), shared_cq_at(q.send_cq)
        tx_bytes, sq_wqes, all_cqes, pi, ci = n.rdma_tx_bytes, n.sq_wqes, n.cqes, c.pi, q.sq_ci
        if q.wire == 0:  # across processes, the peer's NIC would count them, but it does not see them
            p = shared_qp_at(q.remote_row)
            all_reads, all_writes, atomics = n.rx_read_requests, n.rx_write_requests, n.rx_atomic_requests
            rx_bytes, ssn, msn, psn = n.rdma_rx_bytes, q.ssn, p.msn, q.tx_psn + packets
            n.rx_read_requests = all_reads + count_lanes(reads)
            n.rx_write_requests = all_writes + count_lanes(writes)
            n.rx_atomic_requests = atomics + batch - count_lanes(reads | writes)
            n.rdma_rx_bytes = rx_bytes + nbytes
            q.ssn, p.msn = ssn + batch, msn + batch
            q.tx_psn, p.expect_psn = psn, on_wire(psn)
        n.rdma_tx_bytes, n.sq_wqes, n.cqes = tx_bytes + nbytes, sq_wqes + batch, all_cqes + count_lanes(cqes)
        c.pi = pi + count_lanes(cqes)
        q.retries, q.rnr_retries = 0, 0
        q.sq_ci = q.sq_next = q.sq_sent = ci + batch


@device_function
def _announced(row: int, rung: int) -> int:
    """Return the producer index that is announced, or -1 if one thread has to examine the doorbell.

    A doorbell value that was seen before doesn't mean there is no work: a UAR's register or a record may announce WQEs.
    """
    q = shared_qp_at(row)
    if rung == q.db_seen:
        return q.sq_pi
    ahead = (announced(be64(rung)) - q.sq_ci) & PI_MASK
    known = max(q.sq_pi, q.sq_ci + ahead)
    return known if ahead <= 1 << q.sq_log else -1


@device_function
def execute_batch(worker: WorkerState, number: int, rung: int) -> int:
    """Execute a batch of the WQEs that a doorbell announces. Return how many; 0 if one thread has to continue.

    `rung` is the value loaded from the doorbell of work queue `number`.
    """
    if has_bit(worker + SLICE_SHARED.batchable, number) == 0:
        return 0
    w = shared_work_queue_at(shared_queue(worker, number))
    row = w.row
    q = shared_qp_at(row)
    fence_acquire_sys()
    end = _announced(row, rung)
    index = q.sq_ci + lane_or_0()
    there = index < end
    slot = q.sq_addr + (((index if there else q.sq_ci) & (1 << q.sq_log) - 1) << WQEBB_SHIFT)
    words = _load(slot)
    consumed = ld_relaxed32(shared_cq_at(q.send_cq).dbrec + CQ_DBREC.set_ci)
    request = _parse(worker, row, index, there, slot, words)
    batch = first_lane(~lanes_where(request.good) & ALL_LANES)
    if batch == 0:
        return 0
    cqes = lanes_where(1 if lane_or_0() < batch and request.ce == CompletionMode.ALWAYS else 0)
    if cqes != 0 and _room(q.send_cq, consumed) < count_lanes(cqes):
        return 0
    elsewhere = lanes_where(1 if lane_or_0() < batch and request.near == 0 else 0)
    of_gpu = elsewhere == 0 and shared_cq_at(q.send_cq).near != 0
    _execute_in_order(worker, request, batch, of_gpu)
    if cqes != 0:
        _complete(worker, row, request, index, cqes, of_gpu)
    else:
        _fence(of_gpu)
    sync_lanes(ALL_LANES)
    _count(worker, row, request, batch, cqes)
    if lane_or_0() == 0:
        q.db_seen, q.sq_pi = rung, end
        w.seen = rung
        w.awake = 1 if q.sq_ci != end else 0
    _cache_keys(worker, q.peer_keys, request, batch)
    sync_lanes(ALL_LANES)
    return batch


@device_function
def _cache_keys(worker: WorkerState, keys: int, request: Request, batch: int) -> None:
    """Cache the keys of the first lane with a key that is not cached yet."""
    missing = 0
    if lane_or_0() < batch:
        known = shared_mkey_at(_cached_key(worker, request.remote_key)).key == request.remote_key
        if request.local_key != 0:
            known = known and shared_mkey_at(_cached_key(worker, request.local_key)).key == request.local_key
        missing = 0 if known else 1
    lanes = lanes_where(missing)
    if lanes != 0 and lane_or_0() == first_lane(lanes):
        _cache_key(worker, keys, request.remote_key)
        _cache_key(worker, shared_worker_at(worker).mkeys, request.local_key)
