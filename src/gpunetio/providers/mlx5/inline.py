"""The inline functions and macros of infiniband/verbs.h, which call through function tables in a context."""

from __future__ import annotations

import ctypes
import errno
from ctypes import CFUNCTYPE, POINTER, byref, c_int, c_size_t, c_uint8, sizeof
from typing import TYPE_CHECKING

from . import structs as s
from .libraries import libibverbs

if TYPE_CHECKING:
    from .structs import Pointer

_EXTENDED = ctypes.c_size_t(-1).value  # __VERBS_ABI_IS_EXTENDED
_HEAD = s.verbs_context.context.offset

_context, _cq, _qp, _srq = map(POINTER, (s.ibv_context, s.ibv_cq, s.ibv_qp, s.ibv_srq))
_send_wr, _recv_wr = POINTER(s.ibv_send_wr), POINTER(s.ibv_recv_wr)
_QUERY_PORT = CFUNCTYPE(c_int, _context, c_uint8, POINTER(s.ibv_port_attr), c_size_t, use_errno=True)
_QUERY_RT_VALUES = CFUNCTYPE(c_int, _context, POINTER(s.ibv_values_ex), use_errno=True)
_DESTROY_FLOW = CFUNCTYPE(c_int, POINTER(s.ibv_flow), use_errno=True)
_POLL_CQ = CFUNCTYPE(c_int, _cq, c_int, POINTER(s.ibv_wc), use_errno=True)
_REQ_NOTIFY_CQ = CFUNCTYPE(c_int, _cq, c_int, use_errno=True)
_POST_SEND = CFUNCTYPE(c_int, _qp, _send_wr, POINTER(_send_wr), use_errno=True)
_POST_RECV = CFUNCTYPE(c_int, _qp, _recv_wr, POINTER(_recv_wr), use_errno=True)
_POST_SRQ_RECV = CFUNCTYPE(c_int, _srq, _recv_wr, POINTER(_recv_wr), use_errno=True)


def extended_operation(context: Pointer[s.ibv_context], name: str) -> int | None:
    """Return the address of an extended operation, or None if the driver lacks it (`verbs_get_ctx_op`)."""
    if context.contents.abi_compat != _EXTENDED:
        return None
    extended = s.verbs_context.from_address(ctypes.addressof(context.contents) - _HEAD)
    if extended.sz < sizeof(s.verbs_context) - getattr(s.verbs_context, name).offset:
        return None
    return getattr(extended, name)


def ibv_query_port(context: Pointer[s.ibv_context], port: int, attr: s.ibv_port_attr) -> int:
    """Query a port. Return 0 or an errno. The library's exported function fills only the old, shorter structure."""
    if operation := extended_operation(context, "query_port"):
        return _QUERY_PORT(operation)(context, port, byref(attr), sizeof(attr))
    return libibverbs().ibv_query_port(context, port, byref(attr))


def ibv_query_rt_values_ex(context: Pointer[s.ibv_context], values: s.ibv_values_ex) -> int:
    """Query the device's clock. Return 0 or an errno: EOPNOTSUPP if the driver has no clock."""
    if operation := extended_operation(context, "query_rt_values"):
        return _QUERY_RT_VALUES(operation)(context, byref(values))
    return errno.EOPNOTSUPP


def ibv_destroy_flow(flow: Pointer[s.ibv_flow]) -> int:
    """Destroy a rule of the kernel. Return 0 or an errno."""
    operation = extended_operation(flow.contents.context, "ibv_destroy_flow")
    return _DESTROY_FLOW(operation)(flow) if operation else errno.EOPNOTSUPP


def ibv_reg_mr(pd: Pointer[s.ibv_pd], address: int, nbytes: int, iova: int, access: int) -> Pointer[s.ibv_mr]:
    """Register memory as the macro does: optional rights, or an iova other than the address, need a newer function."""
    if iova == address and not access & s.IBV_ACCESS_OPTIONAL_RANGE:
        return libibverbs().ibv_reg_mr(pd, address, nbytes, access)
    return libibverbs().ibv_reg_mr_iova2(pd, address, nbytes, iova, access)


def ibv_poll_cq(cq: Pointer[s.ibv_cq], most: int, wc: ctypes.Array[s.ibv_wc]) -> int:
    """Poll completions into `wc`. Return their number, or a negative value for an error."""
    return _POLL_CQ(cq.contents.context.contents.ops.poll_cq)(cq, most, wc)


def ibv_req_notify_cq(cq: Pointer[s.ibv_cq], solicited_only: bool) -> int:
    """Request a completion event. Return 0 or an errno."""
    return _REQ_NOTIFY_CQ(cq.contents.context.contents.ops.req_notify_cq)(cq, int(solicited_only))


def ibv_post_send(qp: Pointer[s.ibv_qp], wr: ctypes.Array[s.ibv_send_wr], bad_wr: object) -> int:
    """Post sends. Return 0, or an errno with `bad_wr` set to the first request that was not posted."""
    return _POST_SEND(qp.contents.context.contents.ops.post_send)(qp, wr, bad_wr)


def ibv_post_recv(qp: Pointer[s.ibv_qp], wr: ctypes.Array[s.ibv_recv_wr], bad_wr: object) -> int:
    """Post receives. Return 0, or an errno with `bad_wr` set to the first request that was not posted."""
    return _POST_RECV(qp.contents.context.contents.ops.post_recv)(qp, wr, bad_wr)


def ibv_post_srq_recv(srq: Pointer[s.ibv_srq], wr: ctypes.Array[s.ibv_recv_wr], bad_wr: object) -> int:
    """Post shared receives. Return 0, or an errno with `bad_wr` set to the first request that was not posted."""
    return _POST_SRQ_RECV(srq.contents.context.contents.ops.post_srq_recv)(srq, wr, bad_wr)
