"""The life of objects: creation, use, refusal to close while in use, closing with their parents, use afterwards."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..enums import Access, QpState, SrqType, UarAllocationType, WcStatus, WrOpcode
from ..errors import BadStateError, InUseError, InvalidValueError, NotSupportedError
from ..memory import is_accessible
from ..verbs import Handle, RecvWr, import_context
from .kit import check
from .rig import Rig, refused, same, true


def _dead(handle: Handle, *uses: Callable[[], object]) -> None:
    """Check that an object is closed: a second close does nothing, and every use is refused."""
    true(f"{handle} is closed", handle.closed)
    handle.close()
    for use in uses:
        refused(f"a use of {handle}, which is closed,", BadStateError, use)


def _in_use(handle: Handle) -> None:
    refused(f"closing {handle}, which is in use,", InUseError, handle.close)
    true(f"{handle}, whose closing was refused, is open", not handle.closed)


@check
def context_closes_what_was_made_from_it(rig: Rig) -> None:
    """Closing a context closes every object that was made from it, whatever depends on what.

    Source: ibv_close_device(3) leaves them to their owner; gpunetio.verbs closes them.
    """
    a = rig.side(rig.near)
    made = [a.qp, a.sent, a.received, a.memory.mr, a.pd, rig.near.create_comp_channel()]
    rig.near.close()
    for handle in made:
        _dead(handle)
    _dead(rig.near, rig.near.create_pd, rig.near.query_device, lambda: a.qp.state, lambda: a.sent.poll())


@check
def contexts_are_independent(rig: Rig) -> None:
    """Objects of two contexts of a device cannot be mixed, and closing a context leaves the other's objects alone.

    Source: ibv_open_device(3); errors of doca_verbs_qp_create.
    """
    a, b = rig.pair()
    other = rig.another()
    foreign = other.create_cq(4)
    refused("a CQ of another context", InvalidValueError, lambda: a.pd.create_qp(sq_wr=1, send_cq=foreign))
    other.create_pd().register(bytearray(64))
    other.close()
    a.post(WrOpcode.RDMA_WRITE, a.memory.sge(), **b.memory.remote())
    a.succeed(0)


@check
def context_import(rig: Rig) -> None:
    """An imported context works on the opener's device; closing it leaves the device and the opener's objects alone.

    Source: doca_verbs_bridge_verbs_context_import.
    """
    a, b = rig.pair()
    with import_context(rig.near.provider) as imported:
        same("the device, asked by the imported context,", imported.query_device(), rig.near.query_device())
        c, d = rig.side(imported), rig.side(rig.far)
        rig.connect(c, d)
        c.post(WrOpcode.RDMA_WRITE, c.memory.sge(), **d.memory.remote())
        c.succeed(0)
    _dead(c.qp)
    a.post(WrOpcode.RDMA_WRITE, a.memory.sge(), **b.memory.remote())
    a.succeed(0)


@check
def pd_life(rig: Rig) -> None:
    """A PD closes its MRs and queue pairs, but not the CQs, and makes nothing after its end.

    Source: ibv_alloc_pd(3); doca_verbs_pd_create.
    """
    a = rig.side(rig.near)
    other = rig.near.create_pd()
    true("PDs have numbers of their own", other.pdn != a.pd.pdn)
    a.pd.close()
    for handle in (a.qp, a.memory.mr):
        _dead(handle)
    true("the CQs are open", not a.sent.closed)
    _dead(a.pd, lambda: a.pd.register(bytearray(64)), lambda: a.pd.create_qp(rq_wr=1, receive_cq=a.received))
    a.sent.close()
    other.close()


@check
def pd_import(rig: Rig) -> None:
    """Keys made in an imported PD work with queue pairs of the PD itself, which survives the end of the import.

    Source: doca_verbs_bridge_verbs_pd_import.
    """
    a, b = rig.pair()
    with rig.near.import_pd(a.pd.pdn) as imported:
        memory = rig.memory(imported, 64)
        a.post(WrOpcode.RDMA_WRITE, memory.sge(0, 64), **b.memory.remote())
        a.succeed(0)
        b.memory.image[:64] = memory.bytes
    _dead(memory.mr)
    b.memory.verify("a WRITE from memory of an imported PD")
    a.post(WrOpcode.RDMA_WRITE, a.memory.sge(), **b.memory.remote())
    a.succeed(0)


@check
def mr_life(rig: Rig) -> None:
    """A region has keys, and the address and size that were registered; 0 bytes are refused; it closes once.

    Source: IBTA 10.6; ibv_reg_mr(3).
    """
    pd = rig.near.create_pd()
    one, two = (np.zeros(nbytes, np.uint8) for nbytes in (1, 100_000))
    mrs = [pd.register(array) for array in (one, two, two)]
    same("what is registered", [(mr.address, mr.nbytes) for mr in mrs],
         [(int(array.ctypes.data), len(array)) for array in (one, two, two)])
    same("different remote keys of three regions", len({mr.rkey for mr in mrs}), 3)
    refused("a region of 0 bytes", InvalidValueError, lambda: pd.register(bytearray()))
    refused("remote writing without local writing", InvalidValueError,
            lambda: pd.register(bytearray(64), Access.REMOTE_WRITE))
    refused("writing to read-only memory", InvalidValueError, lambda: pd.register(bytes(64), Access.LOCAL_WRITE))
    pd.register(bytes(64)).close()
    for mr in mrs:
        mr.close()
        _dead(mr)


@check
def umem_life(rig: Rig) -> None:
    """Queues can be placed in a UMEM, at an offset. It does not close before them, and closes with its context.

    Source: doca_verbs_umem_create; mlx5dv_devx_umem_reg(3).
    """
    space = np.zeros(3 * 4096, np.uint8)
    start = -int(space.ctypes.data) % 4096
    umem = rig.near.register_umem(space[start : start + 8192])
    same("the UMEM's size", umem.nbytes, 8192)
    cq = rig.near.create_cq(16, external_umem=(umem, 1024), external_dbr_umem=(umem, 4096 + 64))
    same("where the CQ lies", (cq.ring_address, cq.dbr_address), (umem.address + 1024, umem.address + 4096 + 64))
    _in_use(umem)
    refused("a ring that leaves its UMEM", InvalidValueError,
            lambda: rig.near.create_cq(256, external_umem=(umem, 0), external_dbr_umem=(umem, 4096)))
    refused("a ring without a place for its record", InvalidValueError,
            lambda: rig.near.create_cq(16, external_umem=(umem, 0)))
    cq.close()
    umem.close()
    _dead(umem, lambda: rig.near.create_cq(16, external_umem=(umem, 0), external_dbr_umem=(umem, 4096)))
    umem = rig.near.register_umem(space)
    rig.near.close()
    _dead(umem)


@check
def uar_life(rig: Rig) -> None:
    """Doorbell pages of both ordinary kinds exist; a queue pair works with a page of yours, and keeps it from closing.

    Source: doca_verbs_uar_create; mlx5dv_alloc_uar(3).
    """
    uars = [rig.near.create_uar(kind) for kind in (UarAllocationType.BLUEFLAME, UarAllocationType.NONCACHE)]
    for uar in uars:
        true(f"{uar} has a register", uar.reg_addr != 0)
        a, b = rig.pair(near={"external_uar": uar})
        a.post(WrOpcode.RDMA_WRITE, a.memory.sge(), **b.memory.remote())
        a.succeed(0)
        _in_use(uar)
        a.qp.close()
        uar.close()
        _dead(uar)


@check
def cq_life(rig: Rig) -> None:
    """The size of a CQ is a power of two, up to the device's limit; it does not close before its queue pairs.

    Source: ibv_create_cq(3); doca_verbs_cq_create.
    """
    most = rig.near.query_device().max_cqe
    for cqe in (0, -1, most + 1):
        refused(f"a CQ of {cqe} entries", InvalidValueError, lambda cqe=cqe: rig.near.create_cq(cqe))
    asked = (1, 3, 1024)
    cqs = [rig.near.create_cq(cqe) for cqe in asked]
    true("room for what was asked for", all(cq.entries >= cqe for cq, cqe in zip(cqs, asked, strict=True)))
    same("what a query tells", [cq.query().cqe for cq in cqs], [cq.entries for cq in cqs])
    same("different numbers of three CQs", len({cq.cqn for cq in cqs}), 3)
    same("completions of a new CQ", cqs[2].poll(), [])
    refused("polling for 0 completions", InvalidValueError, lambda: cqs[2].poll(0))
    qp = rig.near.create_pd().create_qp(sq_wr=1, send_cq=cqs[2])
    _in_use(cqs[2])
    qp.close()
    for cq in cqs:
        cq.close()
        _dead(cq, cq.poll)


@check
def qp_life(rig: Rig) -> None:
    """A new queue pair is in RST, holds at least what was requested, and is refused what the device cannot hold.

    Source: IBTA 10.2.4; ibv_create_qp(3); rules of doca_verbs_qp_create.
    """
    device, pd, cq = rig.near.query_device(), rig.near.create_pd(), rig.near.create_cq(16)
    qp = pd.create_qp(sq_wr=5, rq_wr=5, send_cq=cq, receive_cq=cq, receive_max_sges=3, max_inline_data=50)
    same("state of a new queue pair", qp.state, QpState.RST)
    true("the send queue holds 5 requests", qp.sq_entries >= 5)
    true("the receive queue holds 5 requests", qp.rq_entries >= 5)
    true("50 bytes go inline", qp.init_attr.max_inline_data >= 50)
    for what, create in (
        ("a send queue without a CQ", lambda: pd.create_qp(sq_wr=1)),
        ("a receive queue without a CQ", lambda: pd.create_qp(rq_wr=1)),
        ("more receives than the device holds", lambda: pd.create_qp(rq_wr=device.max_qp_wr + 1, receive_cq=cq)),
        ("more sends than the device holds", lambda: pd.create_qp(sq_wr=2 << device.log_max_qp_sz, send_cq=cq)),
        ("requests without entries", lambda: pd.create_qp(sq_wr=1, send_cq=cq, send_max_sges=0)),
        ("a user index of 25 bits", lambda: pd.create_qp(user_index=1 << 24)),
    ):
        refused(what, InvalidValueError, create)
    qp.close()
    _dead(qp, lambda: qp.state, qp.reset, qp.endpoint, lambda: qp.connect(qp), lambda: qp.post_recv(RecvWr()))
    cq.close()


@check
def rings_of_a_queue_pair(rig: Rig) -> None:
    """A queue pair reports its rings, doorbell record and register; a receive has room for its entries.

    Source: doca_verbs_qp_get_wq, doca_verbs_qp_get_dbr_addr, doca_verbs_qp_get_uar_addr.
    """
    cq = rig.near.create_cq(16)
    qp = rig.near.create_pd().create_qp(sq_wr=5, rq_wr=5, send_cq=cq, receive_cq=cq, receive_max_sges=3)
    true("a receive holds 3 entries", qp.rq_stride >= 3 * 16)
    places = [(qp.rq_address, qp.rq_entries * qp.rq_stride), (qp.sq_address, qp.sq_entries * 64), (qp.dbr_address, 8)]
    for address, nbytes in places:
        true(f"{nbytes} bytes at {address:#x} can be read", is_accessible(address, nbytes, writable=True))
    ends = [address + nbytes for address, nbytes in sorted(places)]
    true("they do not overlap", all(end <= start for end, (start, _) in zip(ends, sorted(places)[1:], strict=False)))
    true("the doorbell has an address", qp.doorbell_register != 0)


@check
def srq_life(rig: Rig) -> None:
    """An SRQ holds at least what was requested, within the device's limits, and stays while a queue pair uses it.

    Source: IBTA 10.2.9; ibv_create_srq(3); rules of doca_verbs_srq_create.
    """
    device, pd, cq = rig.near.query_device(), rig.near.create_pd(), rig.near.create_cq(16)
    srq = pd.create_srq(5, receive_max_sges=2)
    held = srq.query()
    true(f"it holds 5 receives of 2 entries, not {held}", held.max_wr >= 5 and held.max_sge >= 2)
    same("the limit of a new SRQ", held.srq_limit, 0)
    refused("an SRQ of 0 receives", InvalidValueError, lambda: pd.create_srq(0))
    refused("a CONTIGUOUS SRQ for the CPU", InvalidValueError, lambda: pd.create_srq(4, srq_type=SrqType.CONTIGUOUS))
    refused("an SRQ larger than the device's limit", NotSupportedError, lambda: pd.create_srq(device.max_srq_wr + 1))
    refused("receives larger than the device's limit", NotSupportedError,
            lambda: pd.create_srq(4, receive_max_sges=device.max_srq_sge + 1))
    qp = pd.create_qp(receive_cq=cq, srq=srq)
    refused("a receive of a queue pair that has an SRQ", InvalidValueError, lambda: qp.post_recv(RecvWr()))
    _in_use(srq)
    qp.close()
    srq.close()
    _dead(srq, srq.query, lambda: srq.post_recv(RecvWr()), lambda: pd.create_qp(receive_cq=cq, srq=srq))


@check
def channel_life(rig: Rig) -> None:
    """A completion channel has a descriptor, and stays while a CQ uses it.

    Source: ibv_create_comp_channel(3); doca_verbs_comp_channel_create.
    """
    channel = rig.near.create_comp_channel()
    true("it has a descriptor", channel.fileno() >= 0)
    cq = rig.near.create_cq(4, channel=channel)
    _in_use(channel)
    cq.close()
    channel.close()
    _dead(channel, channel.fileno, lambda: channel.get_event(0), lambda: rig.near.create_cq(4, channel=channel))
    alone = rig.near.create_cq(4)
    refused("asking a CQ without a channel for events", BadStateError, alone.req_notify)


@check
def many_queue_pairs(rig: Rig) -> None:
    """Dozens of queue pairs can be made and closed; those that exist at the same time have different numbers.

    Source: IBTA 10.2.4; ibv_create_qp(3).
    """
    pd, cq = rig.near.create_pd(), rig.near.create_cq(256)
    for _ in range(3):
        qps = [pd.create_qp(sq_wr=4, send_cq=cq) for _ in range(32)]
        same("different numbers of 32 queue pairs", len({qp.qpn for qp in qps}), 32)
        for qp in qps:
            qp.close()
    cq.close()


@check
def queue_pair_takes_its_completions_along(rig: Rig) -> None:
    """Completions of a closed queue pair are no longer reported; those of other queue pairs stay in the CQ.

    Source: ibv_destroy_qp(3): its work completions may be lost.
    """
    cq = rig.near.create_cq(64)
    (a, b), (c, d) = (rig.pair(near={"send_cq": cq}) for _ in range(2))
    for one, other in ((a, b), (c, d), (a, b)):
        before = other.memory.word(0)
        one.post(WrOpcode.ATOMIC_FETCH_AND_ADD, one.memory.sge(0, 8), add=1, wr_id=7, **other.memory.remote(0))
        rig.until("an atomic", lambda other=other, before=before: other.memory.word(0) != before)
    a.qp.close()
    (done,) = rig.take(cq, 1)
    same("the completion", (done.qp_num, done.wr_id, done.status), (c.qp.qpn, 7, WcStatus.SUCCESS))
