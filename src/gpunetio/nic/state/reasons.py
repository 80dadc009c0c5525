"""Reasons for refusals: the vendor syndromes of error CQEs, and the sentences that explain them.

A real card's `vendor_err_synd` is undocumented; ours is one of these numbers. Each has the PRM syndrome that a ConnectX
reports for the same mistake.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from ...formats.cqe import Syndrome


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
    COPY_FAILED          = 40
    ATOMIC_FAR           = 41
    MESSAGE_TOO_LONG     = 42
    FRAME_LENGTH         = 43
    INLINE_HEADERS       = 44
    CHECKSUM_FLAGS       = 45
    WAIT_MODE            = 46
    WAIT_TOO_FAR         = 47
    TSO_HEADERS          = 48
    WAIT_FAILED          = 49


class Explanation(NamedTuple):
    """How a reason is reported. `requester` is the syndrome in the requester's error CQE."""

    requester: Syndrome
    what: str
    cause: str


EXPLAIN: dict[Reason, Explanation] = {
    Reason.WQE_STALE: Explanation(
        Syndrome.LOCAL_QP_OP,
        "the slot of WQE {index} holds index {extra0} of QP {extra1:#x} instead",
        "the doorbell was rung before the WQE was written (a missing fence), or its producer index is too large"),
    Reason.WQE_QPN: Explanation(
        Syndrome.LOCAL_QP_OP,
        "the WQE names QP {extra0:#x}",
        "the control segment was built for another queue"),
    Reason.WQE_MALFORMED: Explanation(
        Syndrome.LOCAL_QP_OP,
        "ds = {extra0} does not fit the segments of opcode {opcode:#04x}, or runs past the producer index",
        "ds must count 16-byte segments, including the control segment"),
    Reason.WQE_OPCODE: Explanation(
        Syndrome.LOCAL_QP_OP,
        "the software NIC does not support opcode {opcode:#04x} on this QP",
        "the NIC does not model it (docs/soft-nic.md lists what it models); a WAIT needs a core-direct queue and an "
        "existing CQ, and an MMO a queue created with mmo"),
    Reason.LENGTH: Explanation(
        Syndrome.LOCAL_LENGTH,
        "the message has {nbytes} bytes, but this QP sends {extra0} at most",
        "the message is too long: split it, or raise log_msg_max of INIT2RTR_QP, which is 30 (1 GiB) at most; "
        "a datagram has one packet, of the port's MTU; "
        "or a data segment has byte_count 0, which means 2 GiB to an mlx5 device: leave the segment out"),
    Reason.LKEY_UNKNOWN: Explanation(
        Syndrome.LOCAL_PROT,
        "no memory region has lkey {key:#x}",
        "the region was deregistered, or the key was byte-swapped: device functions take keys in host order"),
    Reason.LKEY_PD: Explanation(
        Syndrome.LOCAL_PROT,
        "lkey {key:#x} belongs to PD {extra0:#x}, but the QP belongs to PD {extra1:#x}",
        "the memory was registered in another protection domain: use the QP's"),
    Reason.LKEY_RIGHTS: Explanation(
        Syndrome.LOCAL_PROT,
        "the region of lkey {key:#x} grants {extra0:#x}, but the operation needs {extra1:#x} (1 = local write)",
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
        "rkey {key:#x} belongs to PD {extra0:#x}, but the peer's QP belongs to PD {extra1:#x}",
        "the memory was registered in another protection domain: use that of the peer's QP"),
    Reason.RKEY_RIGHTS: Explanation(
        Syndrome.REMOTE_ACCESS,
        "the region of rkey {key:#x} grants {extra0:#x}, but the operation needs {extra1:#x} "
        "(2 = remote write, 4 = remote read, 8 = remote atomic)",
        "the region was registered without this remote right: register it with the right"),
    Reason.RKEY_BOUNDS: Explanation(
        Syndrome.REMOTE_ACCESS,
        "[{addr:#x}, +{nbytes}) is outside the region of rkey {key:#x}, [{extra0:#x}, +{extra1})",
        "a wrong remote address or length; a zero-based region starts at address 0"),
    Reason.QP_RIGHTS: Explanation(
        Syndrome.REMOTE_INVAL_REQ,
        "the peer's QP allows {extra0:#x}, but the operation needs {extra1:#x}",
        "the peer's QP was connected without this right: connect it with ALLOW_REMOTE_WRITE, ALLOW_REMOTE_READ or "
        "ATOMIC_MODE (masked atomics, 0x100, need QpAtomicType.UP_TO_8BYTES)"),
    Reason.ATOMIC_ALIGNMENT: Explanation(
        Syndrome.REMOTE_INVAL_REQ,
        "the atomic's remote address {addr:#x} is not a multiple of {nbytes}",
        "the word is misaligned: align it to its own size"),
    Reason.ATOMIC_LENGTH: Explanation(
        Syndrome.LOCAL_LENGTH,
        "the atomic returns {extra0} bytes into {nbytes} bytes of local memory",
        "the data segments are not as long as the word: use one data segment of the word's size"),
    Reason.RECV_TOO_SMALL: Explanation(
        Syndrome.REMOTE_INVAL_REQ,
        "a message of {nbytes} bytes arrived for a receive of {extra0} bytes",
        "the receives are too small: post larger ones; a datagram comes behind 40 bytes, which are for the GRH"),
    Reason.RECV_LKEY: Explanation(
        Syndrome.REMOTE_OP,
        "the receive's segment [{addr:#x}, +{nbytes}) with lkey {key:#x} was refused",
        "a receive buffer must lie inside its region, which must belong to the QP's PD and grant LOCAL_WRITE"),
    Reason.RNR: Explanation(
        Syndrome.RNR_RETRY_EXC,
        "the peer had no receive posted through all {extra0} retries",
        "the peer posts its receives too late: post them before the sends, or raise rnr_retry (7 = forever)"),
    Reason.NO_RESPONSE: Explanation(
        Syndrome.TRANSPORT_RETRY_EXC,
        "no answer from QP {extra0:#x} through all {extra1} retries",
        "the peer's process has ended or is stopped; its QP is closed, not yet in RTR, or connected elsewhere; or the "
        "destination is this NIC's own address, because both ends use the same NIC"),
    Reason.CQ_OVERRUN: Explanation(
        Syndrome.LOCAL_QP_OP,
        "CQ {extra0:#x} is full: {extra1} completions have not been consumed",
        "the program polls too rarely or does not update the consumer record: do both, make the CQ larger, or create "
        "it with overrun enabled"),
    Reason.FLUSH: Explanation(
        Syndrome.WR_FLUSH, "the QP is in ERR", "an earlier error; its record says which"),
    Reason.DOORBELL_RANGE: Explanation(
        Syndrome.LOCAL_QP_OP,
        "the doorbell announces producer index {extra0}, but the NIC is at {extra1} of a ring of {nbytes} slots",
        "the producer overran the ring, or the indices were not reset together with the QP"),
    Reason.QP_STATE: Explanation(
        Syndrome.LOCAL_QP_OP,
        "work was posted to a QP in state {extra0}, which does not send",
        "the doorbell was rung too early: bring the QP to RTS first"),
    Reason.REMOTE_ABORT: Explanation(
        Syndrome.REMOTE_OP,
        "the peer's QP went to ERR while it executed the request",
        "an error at the peer; the peer's log says which"),
    Reason.NAK_INVALID_REQUEST: Explanation(
        Syndrome.REMOTE_INVAL_REQ,
        "QP {extra0:#x} of the peer refused it as an invalid request",
        "a missing right, a misaligned atomic or a receive that is too short; the peer's log says which"),
    Reason.NAK_REMOTE_ACCESS: Explanation(
        Syndrome.REMOTE_ACCESS,
        "QP {extra0:#x} of the peer refused the remote key or its range",
        "a wrong rkey, address or length, or a region without the right; the peer's log says which"),
    Reason.NAK_REMOTE_OPERATION: Explanation(
        Syndrome.REMOTE_OP,
        "QP {extra0:#x} of the peer failed while it executed the request",
        "an error at the peer; the peer's log says which"),
    Reason.BAD_RESPONSE: Explanation(
        Syndrome.BAD_RESP,
        "QP {extra0:#x} of the peer answered with {extra1} bytes, which is not what the request asked for",
        "the peer uses another path MTU, or the WQE was changed while the NIC executed it"),
    Reason.BAD_REQUEST: Explanation(
        Syndrome.REMOTE_INVAL_REQ,
        "a request of {nbytes} bytes does not fit its message ({extra1} bytes taken so far), or is too long",
        "the peer uses another path MTU or max_rd_atomic, or breaks the protocol (a message has 1 GiB at most)"),
    Reason.WQE_OPMOD: Explanation(
        Syndrome.LOCAL_QP_OP,
        "opmod {extra0:#04x} of opcode {opcode:#04x} is neither 0x08 (4 bytes) nor 0x09 (8 bytes)",
        "the upper 8 bits of the control segment's first dword must give the word size of a masked atomic"),
    Reason.COPY_FAILED: Explanation(
        Syndrome.LOCAL_QP_OP,
        "bytes could not be copied to or from GPU memory: {cuda}",
        "the GPU memory was freed while it was registered, or a kernel has failed on that GPU"),
    Reason.ATOMIC_FAR: Explanation(
        Syndrome.REMOTE_INVAL_REQ,
        "the atomic's word at {addr:#x} is in GPU memory, which a NIC on a CPU cannot change atomically",
        "the word was allocated as GPU memory: place it in CPU_GPU memory; only the old value may go to GPU memory"),
    Reason.MESSAGE_TOO_LONG: Explanation(
        Syndrome.REMOTE_INVAL_REQ,
        "the message has {nbytes} bytes or more, but the peer's QP takes {extra0} at most",
        "split the message, or raise log_msg_max of the peer's INIT2RTR_QP, which is 30 (1 GiB) at most"),
    Reason.FRAME_LENGTH: Explanation(
        Syndrome.LOCAL_LENGTH,
        "the packet has {nbytes} bytes, but the port sends {extra0} to {extra1}",
        "the packet lacks a MAC header, or is longer than the link's MTU: split it, or give the port a larger mtu"),
    Reason.INLINE_HEADERS: Explanation(
        Syndrome.LOCAL_QP_OP,
        "the WQE contains {extra0} bytes of headers, but min_wqe_inline_mode asks for the first {extra1}",
        "put the headers into the WQE (inline_hdr_sz), or create the SQ with min_wqe_inline_mode 0"),
    Reason.CHECKSUM_FLAGS: Explanation(
        Syndrome.LOCAL_QP_OP,
        "cs_flags {extra0:#04x} ask for checksums of inner headers, which the software NIC does not compute",
        "it computes those of the outer headers only: L3 (0x40) and L4 (0x80)"),
    Reason.WAIT_MODE: Explanation(
        Syndrome.LOCAL_QP_OP,
        "a WAIT with opmod {extra0} and operation {extra1} is not possible here",
        "opmod 0 waits for a CQ; opmod 2 for a time, with operation 5 and the mask of 8 s, unless send scheduling is "
        "off (PortConfig.send_scheduling)"),
    Reason.WAIT_TOO_FAR: Explanation(
        Syndrome.LOCAL_QP_OP,
        "the WAIT is for a time that is {extra0} ns ahead, but 4 s is the most",
        "a device would take it for a time that has passed; post the WAIT later, and check the format of the time "
        "(ts_format of the SQ)"),
    Reason.WAIT_FAILED: Explanation(
        Syndrome.WR_FLUSH,
        "the WAIT is for CQ {extra0:#x}, where completion {extra1} is an error or did not fit",
        "an operation that the queue should wait for has failed; its own record says why. Reset its queue, then this "
        "one"),
    Reason.TSO_HEADERS: Explanation(
        Syndrome.LOCAL_QP_OP,
        "a TSO with mss {extra0} and {extra1} bytes of inline headers cannot be cut into packets",
        "mss must not be 0, and the inline headers must be those of Ethernet, IP and TCP, with no byte behind them"),
}
