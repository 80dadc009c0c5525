"""Declarations from rdma-core's header rdma/rdma_cma.h, as far as used here, with the header's names."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_int, c_uint8, c_uint16, c_uint32
from ctypes import c_void_p as void_p

from .structs import ibv_context, ibv_gid

RDMA_PS_TCP = 0x0106
_SOCKADDR_STORAGE = 128

(
    RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_ADDR_ERROR, RDMA_CM_EVENT_ROUTE_RESOLVED, RDMA_CM_EVENT_ROUTE_ERROR,
    RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_CONNECT_RESPONSE, RDMA_CM_EVENT_CONNECT_ERROR,
    RDMA_CM_EVENT_UNREACHABLE, RDMA_CM_EVENT_REJECTED, RDMA_CM_EVENT_ESTABLISHED, RDMA_CM_EVENT_DISCONNECTED,
    RDMA_CM_EVENT_DEVICE_REMOVAL, RDMA_CM_EVENT_MULTICAST_JOIN, RDMA_CM_EVENT_MULTICAST_ERROR,
    RDMA_CM_EVENT_ADDR_CHANGE, RDMA_CM_EVENT_TIMEWAIT_EXIT,
) = range(16)


class rdma_event_channel(Structure):
    _fields_ = [("fd", c_int)]


class rdma_ib_addr(Structure):
    _fields_ = [("sgid", ibv_gid), ("dgid", ibv_gid), ("pkey", c_uint16)]


class rdma_addr(Structure):
    _fields_ = [
        ("src_storage", c_uint8 * _SOCKADDR_STORAGE),
        ("dst_storage", c_uint8 * _SOCKADDR_STORAGE),
        ("ibaddr", rdma_ib_addr),
    ]


class rdma_route(Structure):
    _fields_ = [("addr", rdma_addr), ("path_rec", void_p), ("num_paths", c_int)]


class rdma_cm_id(Structure):
    """The first members of the structure. librdmacm allocates it."""

    _fields_ = [
        ("verbs", POINTER(ibv_context)),
        ("channel", POINTER(rdma_event_channel)),
        ("context", void_p),
        ("qp", void_p),
        ("route", rdma_route),
        ("ps", c_int),
        ("port_num", c_uint8),
    ]


class rdma_conn_param(Structure):
    _fields_ = [
        ("private_data", void_p),
        ("private_data_len", c_uint8),
        ("responder_resources", c_uint8),
        ("initiator_depth", c_uint8),
        ("flow_control", c_uint8),
        ("retry_count", c_uint8),
        ("rnr_retry_count", c_uint8),
        ("srq", c_uint8),
        ("qp_num", c_uint32),
    ]


class rdma_cm_event(Structure):
    """The first members of the structure. Its data for datagrams is longer."""

    _fields_ = [
        ("id", POINTER(rdma_cm_id)),
        ("listen_id", POINTER(rdma_cm_id)),
        ("event", c_int),
        ("status", c_int),
        ("conn", rdma_conn_param),
    ]
