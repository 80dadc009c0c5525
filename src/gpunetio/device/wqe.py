"""WQE builders: each fills the slot of an index in the send queue, and writes the index into the WQE.

A builder writes whole 16-byte segments, past the caches, because the NIC reads them next. `flags` are those of the
control segment; `CQ_UPDATE` requests a completion, which every wait for an index needs. `at` is an address to build the
WQE at instead of the ring, for BlueFlame (`block_slot`). Addresses, keys, values and masks are in host byte order.
"""

from __future__ import annotations

from ..formats.device_structs import VerbsQp
from ..formats.doorbell import PI_MASK, WQE_IDX_SHIFT
from ..formats.operations import OPERATIONS
from ..formats.wqe import (
    CTRL_SEG, EXTENDED_ATOMIC_4, EXTENDED_ATOMIC_8, INLINE_SEG, MAX_INLINE, MMO_DMA, OPMOD_SHIFT, WQEBB_SHIFT,
    CtrlFlags, WqeOpcode,
)
from ..jit.compile import device_function
from ..jit.ops import be32, be64, copy, ld_fixed16, ld_fixed32, ld_fixed64, pack64, st8, st128
from .status import EINVAL, OK

CQ_UPDATE = int(CtrlFlags.CQ_UPDATE)
NOP, RDMA_WRITE, RDMA_WRITE_IMM = int(WqeOpcode.NOP), int(WqeOpcode.RDMA_WRITE), int(WqeOpcode.RDMA_WRITE_IMM)
RDMA_READ, SEND, SEND_IMM = int(WqeOpcode.RDMA_READ), int(WqeOpcode.SEND), int(WqeOpcode.SEND_IMM)
ATOMIC_CS, ATOMIC_FA = int(WqeOpcode.ATOMIC_CS), int(WqeOpcode.ATOMIC_FA)
WAIT, DUMP = int(WqeOpcode.WAIT), int(WqeOpcode.DUMP)


def _ds(opcode: WqeOpcode, data: int, form: int = 0) -> int:
    """Return the offset of a queue's field with the QPN and the segment count of a WQE with `data` data segments."""
    segments = 1 + len(OPERATIONS[opcode].forms[form]) + data
    return VerbsQp.entry.offsets[f"sq_num_shift8_be_{segments}ds"]


_NOP_DS, _WAIT_DS, _DUMP_DS = _ds(WqeOpcode.NOP, 0), _ds(WqeOpcode.WAIT, 0), _ds(WqeOpcode.DUMP, 1)
_SEND_DS, _READ_DS = _ds(WqeOpcode.SEND, 1), _ds(WqeOpcode.RDMA_READ, 1)
_WRITE_DS, _WRITE2_DS = _ds(WqeOpcode.RDMA_WRITE, 1), _ds(WqeOpcode.RDMA_WRITE, 2)
_READ2_DS, _MMO_DS = _ds(WqeOpcode.RDMA_READ, 2), _ds(WqeOpcode.MMO, 2)
_ATOMIC_DS, _MASKED_FA_DS = _ds(WqeOpcode.ATOMIC_FA, 1), _ds(WqeOpcode.ATOMIC_MASKED_FA, 1)
_MASKED_CS32_DS, _MASKED_CS64_DS = (_ds(WqeOpcode.ATOMIC_MASKED_CS, 1, form) for form in (0, 1))
_INLINE_IN_ONE = 12  # payload bytes that share a segment with the inline header


@device_function
def wqe_address(qp: VerbsQp, index: int) -> int:
    """Return the address of the slot of `index` (`doca_gpu_dev_verbs_get_wqe_ptr`)."""
    return ld_fixed64(qp + VerbsQp.sq_wqe_daddr) + ((index & ld_fixed16(qp + VerbsQp.sq_wqe_mask)) << WQEBB_SHIFT)


@device_function
def _start(qp: VerbsQp, index: int, at: int, opcode: int, ds: int, flags: int, imm: int) -> int:
    """Write the control segment and return the WQE's address. `ds`: the field with the QPN and the segment count."""
    wqe = at if at != 0 else wqe_address(qp, index)
    first = be32((index & PI_MASK) << WQE_IDX_SHIFT | opcode)
    st128(wqe, pack64(first, ld_fixed32(qp + ds)), pack64(flags << 24, be32(imm)))
    return wqe


@device_function
def signal_wqe(qp: VerbsQp, index: int) -> None:
    """Request a completion for a WQE that was built without CQ_UPDATE."""
    st8(wqe_address(qp, index) + CTRL_SEG.fm_ce_se, CQ_UPDATE)


@device_function
def _raddr(segment: int, raddr: int, rkey: int) -> None:
    st128(segment, be64(raddr), pack64(be32(rkey), 0))


@device_function
def data_segment(segment: int, laddr: int, lkey: int, nbytes: int) -> None:
    """Write a data segment, 16 bytes of a WQE: `nbytes` at `laddr`, under `lkey`."""
    st128(segment, pack64(be32(nbytes & (INLINE_SEG - 1)), be32(lkey)), be64(laddr))


@device_function
def prepare_nop(qp: VerbsQp, index: int, flags: int = CQ_UPDATE, at: int = 0) -> None:
    """Build a NOP (`doca_gpu_dev_verbs_wqe_prepare_nop`)."""
    _start(qp, index, at, NOP, _NOP_DS, flags, 0)


@device_function
def prepare_write(
    qp: VerbsQp, index: int, raddr: int, rkey: int, laddr: int, lkey: int, nbytes: int, flags: int = CQ_UPDATE,
    opcode: int = RDMA_WRITE, imm: int = 0, at: int = 0,
) -> None:
    """Build an RDMA WRITE of one local segment (`doca_gpu_dev_verbs_wqe_prepare_write`)."""
    wqe = _start(qp, index, at, opcode, _WRITE_DS, flags, imm)
    _raddr(wqe + 16, raddr, rkey)
    data_segment(wqe + 32, laddr, lkey, nbytes)


@device_function
def prepare_write2(
    qp: VerbsQp, index: int, raddr: int, rkey: int, laddr0: int, lkey0: int, nbytes0: int, laddr1: int, lkey1: int,
    nbytes1: int, flags: int = CQ_UPDATE, opcode: int = RDMA_WRITE, imm: int = 0, at: int = 0,
) -> None:
    """Build an RDMA WRITE gathered from two local segments (`doca_gpu_dev_verbs_wqe_prepare_write`, second form)."""
    wqe = _start(qp, index, at, opcode, _WRITE2_DS, flags, imm)
    _raddr(wqe + 16, raddr, rkey)
    data_segment(wqe + 32, laddr0, lkey0, nbytes0)
    data_segment(wqe + 48, laddr1, lkey1, nbytes1)


@device_function
def prepare_write_value(
    qp: VerbsQp, index: int, raddr: int, rkey: int, value: int, nbytes: int, flags: int = CQ_UPDATE, at: int = 0,
    opcode: int = RDMA_WRITE, imm: int = 0,
) -> None:
    """Build an inline RDMA WRITE of the low `nbytes` (1 to 8) of `value`
    (`…prepare_inl_rdma_write_wqe_header`, `_data`)."""
    wqe = _start(qp, index, at, opcode, _WRITE_DS, flags, imm)
    _raddr(wqe + 16, raddr, rkey)
    st128(wqe + 32, pack64(be32(nbytes | INLINE_SEG), value), value >> 32)


@device_function
def prepare_write_inline(
    qp: VerbsQp, index: int, raddr: int, rkey: int, laddr: int, nbytes: int, flags: int = CQ_UPDATE, at: int = 0,
    opcode: int = RDMA_WRITE, imm: int = 0,
) -> int:
    """Build an inline RDMA WRITE of at most 28 bytes from `laddr`, which needs no key (`…wqe_prepare_write_inl`).

    Return OK, or EINVAL for another length; then nothing is written.
    """
    if nbytes < 0 or nbytes > MAX_INLINE:
        return EINVAL
    wqe = _start(qp, index, at, opcode, _WRITE_DS if nbytes <= _INLINE_IN_ONE else _WRITE2_DS, flags, imm)
    _raddr(wqe + 16, raddr, rkey)
    st128(wqe + 32, pack64(be32(nbytes | INLINE_SEG), 0), 0)
    copy(wqe + 36, laddr, nbytes)
    return OK


@device_function
def prepare_read(
    qp: VerbsQp, index: int, raddr: int, rkey: int, laddr: int, lkey: int, nbytes: int, flags: int = CQ_UPDATE,
    at: int = 0,
) -> None:
    """Build an RDMA READ into one local segment (`doca_gpu_dev_verbs_wqe_prepare_read`)."""
    wqe = _start(qp, index, at, RDMA_READ, _READ_DS, flags, 0)
    _raddr(wqe + 16, raddr, rkey)
    data_segment(wqe + 32, laddr, lkey, nbytes)


@device_function
def prepare_read2(
    qp: VerbsQp, index: int, raddr: int, rkey: int, laddr0: int, lkey0: int, nbytes0: int, laddr1: int, lkey1: int,
    nbytes1: int, flags: int = CQ_UPDATE, at: int = 0,
) -> None:
    """Build an RDMA READ scattered to two local segments (`doca_gpu_dev_verbs_wqe_prepare_read`, second form)."""
    wqe = _start(qp, index, at, RDMA_READ, _READ2_DS, flags, 0)
    _raddr(wqe + 16, raddr, rkey)
    data_segment(wqe + 32, laddr0, lkey0, nbytes0)
    data_segment(wqe + 48, laddr1, lkey1, nbytes1)


@device_function
def prepare_send(
    qp: VerbsQp, index: int, laddr: int, lkey: int, nbytes: int, flags: int = CQ_UPDATE, opcode: int = SEND,
    imm: int = 0, at: int = 0,
) -> None:
    """Build a SEND of one local segment, with immediate data if `opcode` is SEND_IMM."""
    wqe = _start(qp, index, at, opcode, _SEND_DS, flags, imm)
    data_segment(wqe + 16, laddr, lkey, nbytes)


@device_function
def prepare_atomic(
    qp: VerbsQp, index: int, opcode: int, raddr: int, rkey: int, laddr: int, lkey: int, compare: int, swap_add: int,
    flags: int = CQ_UPDATE, at: int = 0,
) -> None:
    """Build an 8-byte ATOMIC_FA, which adds `swap_add`, or ATOMIC_CS (`…wqe_prepare_atomic`).

    The old value is written to `laddr`.
    """
    wqe = _start(qp, index, at, opcode, _ATOMIC_DS, flags, 0)
    _raddr(wqe + 16, raddr, rkey)
    st128(wqe + 32, be64(swap_add), be64(compare))
    data_segment(wqe + 48, laddr, lkey, 8)


@device_function
def prepare_masked_add(
    qp: VerbsQp, index: int, nbytes: int, raddr: int, rkey: int, laddr: int, lkey: int, add: int, boundary: int = 0,
    flags: int = CQ_UPDATE, at: int = 0,
) -> int:
    """Build a masked fetch-and-add of 4 or 8 bytes (`doca_gpu_dev_verbs_wqe_prepare_atomic_ext`, MASKED_FA).

    The word may have several fields: no carry crosses a bit that is set in `boundary`. Return OK, or EINVAL for another
    size.
    """
    if nbytes != 4 and nbytes != 8:
        return EINVAL
    opmod = (EXTENDED_ATOMIC_4 if nbytes == 4 else EXTENDED_ATOMIC_8) << OPMOD_SHIFT
    wqe = _start(qp, index, at, opmod | WqeOpcode.ATOMIC_MASKED_FA, _MASKED_FA_DS, flags, 0)
    _raddr(wqe + 16, raddr, rkey)
    if nbytes == 4:
        st128(wqe + 32, pack64(be32(add), be32(boundary)), 0)
    else:
        st128(wqe + 32, be64(add), be64(boundary))
    data_segment(wqe + 48, laddr, lkey, nbytes)
    return OK


@device_function
def prepare_masked_swap32(
    qp: VerbsQp, index: int, raddr: int, rkey: int, laddr: int, lkey: int, compare: int, swap: int,
    compare_mask: int = 0xFFFF_FFFF, swap_mask: int = 0xFFFF_FFFF, flags: int = CQ_UPDATE, at: int = 0,
) -> None:
    """Build a masked compare-and-swap of 4 bytes (`doca_gpu_dev_verbs_wqe_prepare_atomic_ext<4>`, MASKED_CS).

    If the word equals `compare` in the bits of `compare_mask`, its bits of `swap_mask` are replaced by those of `swap`.
    """
    opcode = EXTENDED_ATOMIC_4 << OPMOD_SHIFT | WqeOpcode.ATOMIC_MASKED_CS
    wqe = _start(qp, index, at, opcode, _MASKED_CS32_DS, flags, 0)
    _raddr(wqe + 16, raddr, rkey)
    st128(wqe + 32, pack64(be32(swap), be32(compare)), pack64(be32(swap_mask), be32(compare_mask)))
    data_segment(wqe + 48, laddr, lkey, 4)


@device_function
def prepare_masked_swap64(
    qp: VerbsQp, index: int, raddr: int, rkey: int, laddr: int, lkey: int, compare: int, swap: int,
    compare_mask: int = -1, swap_mask: int = -1, flags: int = CQ_UPDATE,
) -> None:
    """Build a masked compare-and-swap of 8 bytes (`doca_gpu_dev_verbs_wqe_prepare_atomic_ext<8>`, MASKED_CS).

    It takes two slots, `index` and the next, but generates one completion, for `index`. So waits by index need a
    collapsed completion queue, where the last completion counts. Wait for `index`. The ticket of `post`, and
    `wait_all`, refer to the second slot, which is complete only when a later WQE is, for example a NOP after the swap.
    """
    wqe = _start(qp, index, 0, EXTENDED_ATOMIC_8 << OPMOD_SHIFT | WqeOpcode.ATOMIC_MASKED_CS, _MASKED_CS64_DS, flags, 0)
    _raddr(wqe + 16, raddr, rkey)
    st128(wqe + 32, be64(swap), be64(compare))
    st128(wqe + 48, be64(swap_mask), be64(compare_mask))
    data_segment(wqe_address(qp, index + 1), laddr, lkey, 8)


@device_function
def prepare_wait(qp: VerbsQp, index: int, max_index: int, cqn: int, flags: int = CQ_UPDATE, at: int = 0) -> None:
    """Build a WAIT until completion `max_index` (low 32 bits, from 0) of CQ `cqn` exists (`…wqe_prepare_wait`).

    Only on a queue created with `core_direct_master`.
    """
    wqe = _start(qp, index, at, WAIT, _WAIT_DS, flags, 0)
    st128(wqe + 16, 0, pack64(be32(max_index), be32(cqn)))


@device_function
def prepare_dump(
    qp: VerbsQp, index: int, laddr: int, lkey: int, nbytes: int = 1, flags: int = CQ_UPDATE, at: int = 0
) -> None:
    """Build a DUMP: the NIC reads `nbytes` at `laddr`, after all WQEs before it (`…wqe_prepare_dump`)."""
    wqe = _start(qp, index, at, DUMP, _DUMP_DS, flags, 0)
    data_segment(wqe + 16, laddr, lkey, nbytes)


@device_function
def prepare_memcpy(
    qp: VerbsQp, index: int, daddr: int, dlkey: int, saddr: int, slkey: int, nbytes: int, opaque_addr: int,
    opaque_lkey: int, flags: int = CQ_UPDATE, at: int = 0,
) -> None:
    """Build an MMO that copies 1 byte to 2 GiB of local memory, from `saddr` to `daddr`.

    Only on a queue created with `memcpy`, which also has the opaque buffer (`verbs.QP.opaque`).
    """
    wqe = _start(qp, index, at, MMO_DMA << OPMOD_SHIFT | WqeOpcode.MMO, _MMO_DS, flags, 0)
    st128(wqe + 16, pack64(0, be32(opaque_lkey)), be64(opaque_addr))
    data_segment(wqe + 32, saddr, slkey, nbytes)
    data_segment(wqe + 48, daddr, dlkey, nbytes)
