"""Why the NIC refused something: the vendor syndrome of an error CQE, and the sentences that explain it.

`vendor_err_synd` of a real card is undocumented; ours is one of these numbers. The PRM syndrome that goes with each is
what a ConnectX reports for the same mistake.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from ..formats.cqe import Syndrome


class Reason(IntEnum):
    """Why a WQE, a message or a doorbell was refused."""

    OK                   = 0
    WQE_STALE            = 1
    WQE_QPN              = 2
    WQE_MALFORMED        = 3
    WQE_OPCODE           = 4
    LENGTH               = 5
    LKEY_UNKNOWN         = 6
    LKEY_PD              = 7
    LKEY_RIGHTS          = 8
    LKEY_BOUNDS          = 9
    RKEY_UNKNOWN         = 10
    RKEY_PD              = 11
    RKEY_RIGHTS          = 12
    RKEY_BOUNDS          = 13
    QP_RIGHTS            = 14
    ATOMIC_ALIGNMENT     = 15
    ATOMIC_LENGTH        = 16
    RECV_TOO_SMALL       = 17
    RECV_LKEY            = 18
    RNR                  = 19
    NO_RESPONSE          = 20
    CQ_OVERRUN           = 21
    FLUSH                = 22
    DOORBELL_RANGE       = 23
    QP_STATE             = 24
    REMOTE_ABORT         = 25
    NAK_INVALID_REQUEST  = 26
    NAK_REMOTE_ACCESS    = 27
    NAK_REMOTE_OPERATION = 28
    BAD_RESPONSE         = 29
    BAD_REQUEST          = 30
    WQE_OPMOD            = 31
    ATOMIC_WIRE          = 32
    COPY_FAILED          = 40
    ATOMIC_FAR           = 41
    MESSAGE_TOO_LONG     = 42


class Explanation(NamedTuple):
    """How a reason reads. `requester` is the syndrome of the requester's error CQE."""

    requester: Syndrome
    what: str
    cause: str


EXPLAIN: dict[Reason, Explanation] = {
    Reason.WQE_STALE: Explanation(
        Syndrome.LOCAL_QP_OP,
        "the slot of WQE {index} does not hold it, but index {extra0} of QP {extra1:#x}",
        "the doorbell was rung before the WQE was written (a missing fence), or with a too large producer index"),
    Reason.WQE_QPN: Explanation(
        Syndrome.LOCAL_QP_OP,
        "the WQE names QP {extra0:#x}",
        "the control segment was built for another queue"),
    Reason.WQE_MALFORMED: Explanation(
        Syndrome.LOCAL_QP_OP,
        "ds = {extra0} does not fit the segments of opcode {opcode:#04x}, or runs past the producer index",
        "ds counts 16-byte segments, the control segment included"),
    Reason.WQE_OPCODE: Explanation(
        Syndrome.LOCAL_QP_OP,
        "opcode {opcode:#04x} is not supported by the software NIC for this QP",
        "docs/soft-nic.md lists what it models; WAIT needs a core-direct queue and a CQ that exists"),
    Reason.LENGTH: Explanation(
        Syndrome.LOCAL_LENGTH,
        "the message has {nbytes} bytes, and this QP sends {extra0} at most",
        "split it, or raise log_msg_max of INIT2RTR_QP, which is 30 (1 GiB) at most; "
        "and a data segment with byte_count 0 means 2 GiB to an mlx5 device: leave the segment out"),
    Reason.LKEY_UNKNOWN: Explanation(
        Syndrome.LOCAL_PROT,
        "no memory region has lkey {key:#x}",
        "the region was deregistered, or the key was byte-swapped: device functions take keys in host order"),
    Reason.LKEY_PD: Explanation(
        Syndrome.LOCAL_PROT,
        "lkey {key:#x} belongs to PD {extra0:#x}, the QP to PD {extra1:#x}",
        "register the memory in the QP's protection domain"),
    Reason.LKEY_RIGHTS: Explanation(
        Syndrome.LOCAL_PROT,
        "the region of lkey {key:#x} grants {extra0:#x} and the operation needs {extra1:#x} (1 = local write)",
        "a READ, an atomic or a receive writes local memory: register it with LOCAL_WRITE"),
    Reason.LKEY_BOUNDS: Explanation(
        Syndrome.LOCAL_PROT,
        "[{addr:#x}, +{nbytes}) is outside the region of lkey {key:#x}, [{extra0:#x}, +{extra1})",
        "a wrong address or length; a zero-based region starts at address 0"),
    Reason.RKEY_UNKNOWN: Explanation(
        Syndrome.REMOTE_ACCESS,
        "no memory region of the peer has rkey {key:#x}",
        "the peer deregistered it, or the key was byte-swapped: device functions take keys in host order"),
    Reason.RKEY_PD: Explanation(
        Syndrome.REMOTE_ACCESS,
        "rkey {key:#x} belongs to PD {extra0:#x}, the peer's QP to PD {extra1:#x}",
        "register the memory in the protection domain of the peer's QP"),
    Reason.RKEY_RIGHTS: Explanation(
        Syndrome.REMOTE_ACCESS,
        "the region of rkey {key:#x} grants {extra0:#x} and the operation needs {extra1:#x} "
        "(2 = remote write, 4 = remote read, 8 = remote atomic)",
        "register it with the remote right"),
    Reason.RKEY_BOUNDS: Explanation(
        Syndrome.REMOTE_ACCESS,
        "[{addr:#x}, +{nbytes}) is outside the region of rkey {key:#x}, [{extra0:#x}, +{extra1})",
        "a wrong remote address or length; a zero-based region starts at address 0"),
    Reason.QP_RIGHTS: Explanation(
        Syndrome.REMOTE_INVAL_REQ,
        "the peer's QP does not allow this operation (it allows {extra0:#x}, needed {extra1:#x})",
        "connect the peer with ALLOW_REMOTE_WRITE, ALLOW_REMOTE_READ or ATOMIC_MODE (masked atomics, 0x100, need "
        "QpAtomicType.UP_TO_8BYTES)"),
    Reason.ATOMIC_ALIGNMENT: Explanation(
        Syndrome.REMOTE_INVAL_REQ,
        "the atomic's remote address {addr:#x} is not a multiple of {nbytes}",
        "place the word on a boundary of its own size"),
    Reason.ATOMIC_LENGTH: Explanation(
        Syndrome.LOCAL_LENGTH,
        "the atomic returns {extra0} bytes into {nbytes} bytes of local memory",
        "give it one data segment of the word's size"),
    Reason.RECV_TOO_SMALL: Explanation(
        Syndrome.REMOTE_INVAL_REQ,
        "a message of {nbytes} bytes arrived for a receive of {extra0} bytes",
        "post larger receives"),
    Reason.RECV_LKEY: Explanation(
        Syndrome.REMOTE_OP,
        "the receive's segment [{addr:#x}, +{nbytes}) with lkey {key:#x} was refused",
        "a receive buffer needs a key of the QP's PD with LOCAL_WRITE, and must lie inside its region"),
    Reason.RNR: Explanation(
        Syndrome.RNR_RETRY_EXC,
        "the peer had no receive posted through all {extra0} retries",
        "post receives before the peer sends, or raise rnr_retry (7 = for ever)"),
    Reason.NO_RESPONSE: Explanation(
        Syndrome.TRANSPORT_RETRY_EXC,
        "no answer from QP {extra0:#x} through all {extra1} retries",
        "the peer's process has ended or stands still, or its QP is closed, not yet in RTR, or connected elsewhere"),
    Reason.CQ_OVERRUN: Explanation(
        Syndrome.LOCAL_QP_OP,
        "CQ {extra0:#x} is full: {extra1} completions are not consumed",
        "poll and update the consumer record, make the CQ larger, or create it with overrun enabled"),
    Reason.FLUSH: Explanation(
        Syndrome.WR_FLUSH, "the QP is in ERR", "an earlier error; its record says which"),
    Reason.DOORBELL_RANGE: Explanation(
        Syndrome.LOCAL_QP_OP,
        "the doorbell announces producer index {extra0}, but the NIC is at {extra1} of a ring of {nbytes} slots",
        "the producer ran over the ring, or the indices were not reset together with the QP"),
    Reason.QP_STATE: Explanation(
        Syndrome.LOCAL_QP_OP,
        "work was posted to a QP in state {extra0}, which does not send",
        "bring the QP to RTS before ringing its doorbell"),
    Reason.REMOTE_ABORT: Explanation(
        Syndrome.REMOTE_OP,
        "the peer's QP went to ERR while it executed the request",
        "the peer's log says why"),
    Reason.NAK_INVALID_REQUEST: Explanation(
        Syndrome.REMOTE_INVAL_REQ,
        "QP {extra0:#x} of the peer refused it as an invalid request",
        "its rights, the alignment of an atomic or the length of a receive; the peer's log says which"),
    Reason.NAK_REMOTE_ACCESS: Explanation(
        Syndrome.REMOTE_ACCESS,
        "QP {extra0:#x} of the peer refused the remote key or its range",
        "a wrong rkey, address or length, or a region without the right; the peer's log says which"),
    Reason.NAK_REMOTE_OPERATION: Explanation(
        Syndrome.REMOTE_OP,
        "QP {extra0:#x} of the peer failed while it executed the request",
        "the peer's log says why"),
    Reason.BAD_RESPONSE: Explanation(
        Syndrome.BAD_RESP,
        "QP {extra0:#x} of the peer answered with {extra1} bytes, which is not what was asked",
        "another path MTU at the peer, or the WQE was changed while the NIC worked on it"),
    Reason.BAD_REQUEST: Explanation(
        Syndrome.REMOTE_INVAL_REQ,
        "a request of {nbytes} bytes does not fit the message it belongs to ({extra1} bytes taken), or is too long",
        "another path MTU or max_rd_atomic at the peer, or a peer that breaks the protocol (1 GiB is the most)"),
    Reason.WQE_OPMOD: Explanation(
        Syndrome.LOCAL_QP_OP,
        "opmod {extra0:#04x} of opcode {opcode:#04x} is neither 0x08 (4 bytes) nor 0x09 (8 bytes)",
        "the upper 8 bits of the control segment's first dword say how large the word of a masked atomic is"),
    Reason.ATOMIC_WIRE: Explanation(
        Syndrome.LOCAL_QP_OP,
        "opcode {opcode:#04x} goes to QP {extra0:#x} of another NIC, and no packet can carry it",
        "masked atomics work between queue pairs of one software NIC: RoCE has packets for the plain ones only"),
    Reason.COPY_FAILED: Explanation(
        Syndrome.LOCAL_QP_OP,
        "bytes could not be moved to or from GPU memory: {cuda}",
        "the GPU memory was freed while it was registered, or a kernel has failed on that GPU"),
    Reason.ATOMIC_FAR: Explanation(
        Syndrome.REMOTE_INVAL_REQ,
        "the atomic's word at {addr:#x} is in GPU memory, which a NIC on a CPU cannot change atomically",
        "place the word in CPU_GPU memory; only the old value may come to lie in GPU memory"),
    Reason.MESSAGE_TOO_LONG: Explanation(
        Syndrome.REMOTE_INVAL_REQ,
        "the message has {nbytes} bytes or more, and the peer's QP takes {extra0} at most",
        "raise log_msg_max of the peer's INIT2RTR_QP up to 30, which is 1 GiB, or split the message"),
}  # fmt: skip
