"""CQEs as the CPU data path reads them."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple, Self

from ..enums import WcFlags, WcOpcode, WcStatus
from ..formats.cqe import ERR_CQE64, OPCODE_SHIFT, CqeOpcode, Syndrome
from .work import Completion

if TYPE_CHECKING:
    from .qp import QP

_QPN_MASK = 0xFF_FFFF
_STATUS = {
    Syndrome.LOCAL_LENGTH: WcStatus.LOC_LEN_ERR,
    Syndrome.LOCAL_QP_OP: WcStatus.LOC_QP_OP_ERR,
    Syndrome.LOCAL_PROT: WcStatus.LOC_PROT_ERR,
    Syndrome.WR_FLUSH: WcStatus.WR_FLUSH_ERR,
    Syndrome.MW_BIND: WcStatus.MW_BIND_ERR,
    Syndrome.BAD_RESP: WcStatus.BAD_RESP_ERR,
    Syndrome.LOCAL_ACCESS: WcStatus.LOC_ACCESS_ERR,
    Syndrome.REMOTE_INVAL_REQ: WcStatus.REM_INV_REQ_ERR,
    Syndrome.REMOTE_ACCESS: WcStatus.REM_ACCESS_ERR,
    Syndrome.REMOTE_OP: WcStatus.REM_OP_ERR,
    Syndrome.TRANSPORT_RETRY_EXC: WcStatus.RETRY_EXC_ERR,
    Syndrome.RNR_RETRY_EXC: WcStatus.RNR_RETRY_EXC_ERR,
    Syndrome.REMOTE_ABORTED: WcStatus.REM_ABORT_ERR,
}
_WITH_IMM = (CqeOpcode.RESP_WR_IMM, CqeOpcode.RESP_SEND_IMM)
_BRING_BACK = (WcOpcode.RDMA_READ, WcOpcode.COMP_SWAP, WcOpcode.FETCH_ADD)


class Cqe(NamedTuple):
    """The fields of a CQE that a completion is made of; the syndromes mean something in an error CQE only."""

    opcode: int
    qpn: int
    counter: int
    byte_cnt: int
    imm: int
    syndrome: int
    vendor: int

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """From its 64 bytes."""
        imm, byte_cnt = struct.unpack_from(">I4xI", raw, 36)
        opcode_qpn, counter, op_own = struct.unpack_from(">IHxB", raw, 56)
        syndrome, vendor = raw[ERR_CQE64.syndrome], raw[ERR_CQE64.vendor_err_synd]
        return cls(op_own >> OPCODE_SHIFT, opcode_qpn & _QPN_MASK, counter, byte_cnt, imm, syndrome, vendor)


def completion_of(cqe: Cqe, qp: QP) -> Completion:
    """What a CQE says of a request of `qp`, which it completes."""
    posting = qp.posting
    failed = cqe.opcode in (CqeOpcode.REQ_ERR, CqeOpcode.RESP_ERR)
    with posting.lock:
        if cqe.opcode in (CqeOpcode.REQ, CqeOpcode.REQ_ERR):
            wr_id, opcode = posting.send.complete(cqe.counter)
            nbytes = cqe.byte_cnt if opcode in _BRING_BACK else 0
        else:
            srq = qp.init_attr.srq
            wr_id = srq.complete(cqe.counter) if srq else posting.receive.complete()
            nbytes = cqe.byte_cnt
            opcode = WcOpcode.RECV_RDMA_WITH_IMM if cqe.opcode == CqeOpcode.RESP_WR_IMM else WcOpcode.RECV
    if failed:
        status = _STATUS.get(cqe.syndrome, WcStatus.GENERAL_ERR)  # type: ignore[call-overload]
        return Completion(
            wr_id=wr_id, status=status, opcode=opcode, byte_len=0, imm=None, qp_num=cqe.qpn, vendor_err=cqe.vendor
        )
    imm = cqe.imm if cqe.opcode in _WITH_IMM else None
    return Completion(
        wr_id=wr_id, status=WcStatus.SUCCESS, opcode=opcode, byte_len=nbytes, imm=imm, qp_num=cqe.qpn,
        flags=WcFlags(0) if imm is None else WcFlags.WITH_IMM,
    )  # fmt: skip
