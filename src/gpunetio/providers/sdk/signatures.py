"""The functions used from DOCA's libraries, by area, with their types.

The types are from NVIDIA's documents and BSD-licensed sources: the guide to DOCA Verbs, the samples, and open GPUNetIO,
where a `doca_verbs_context` replaces `ibv_context` and a `doca_verbs_pd` replaces `ibv_pd`.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64
from ctypes import c_void_p as void_p
from dataclasses import dataclass, field
from typing import Any

COMMON, VERBS, GPUNETIO = "libdoca_common.so", "libdoca_verbs.so", "libdoca_gpunetio.so"
OUT = POINTER(void_p)
_PU8, _PU32 = POINTER(c_uint8), POINTER(c_uint32)
Types = dict[str, tuple[Any, ...]]  # function → its argument types


class Gid(ctypes.Structure):
    """`struct doca_verbs_gid`."""

    _fields_ = (("raw", c_uint8 * 16),)


@dataclass(frozen=True, eq=False)
class Area:
    """Functions that are used together or not at all, and the libraries that have them.

    `makes` maps a function to the log's name for what it creates. Some releases lack the `optional` functions.
    """

    libraries: tuple[str, ...]  # in search order
    makes: dict[str, str]
    functions: Types
    optional: Types = field(default_factory=dict)


def _attributes(kind: str, *of: Any, **attributes: Any) -> Types:
    """Return the types of an attribute object's functions: create (from `of`), destroy, and a setter per attribute."""
    setters = {f"{kind}_set_{name}": (void_p, *_tuple(types)) for name, types in attributes.items()}
    return {f"{kind}_create": (*of, OUT), f"{kind}_destroy": (void_p,), **setters}


def _tuple(types: Any) -> tuple[Any, ...]:
    return types if isinstance(types, tuple) else (types,)


GPU = Area(
    (COMMON, VERBS, GPUNETIO),
    {"doca_gpu_create": "GPUNetIO"},
    {"doca_gpu_create": (c_char_p, OUT), "doca_gpu_destroy": (void_p,)},
)
_DEV = Area(
    (COMMON, VERBS),
    {"doca_rdma_bridge_open_dev_from_pd": "Verbs Dev"},
    {
        "doca_rdma_bridge_open_dev_from_pd":      (void_p, OUT),
        "doca_dev_close":                         (void_p,),
        "doca_verbs_bridge_verbs_context_import": (void_p, c_uint32, OUT),
        "doca_verbs_context_destroy":             (void_p,),
        "doca_verbs_bridge_verbs_pd_import":      (void_p, OUT),
        "doca_verbs_pd_destroy":                  (void_p,),
    },
)
_AH = Area(
    (COMMON, VERBS),
    {"doca_verbs_ah_attr_create": "Verbs AH Attr"},
    _attributes(
        "doca_verbs_ah_attr", void_p,
        gid=Gid, addr_type=c_int, dlid=c_uint32, sl=c_uint8, sgid_index=c_uint8, static_rate=c_uint8,
        hop_limit=c_uint8, traffic_class=c_uint8,
    ),
)
_CQ = Area(
    (COMMON, VERBS),
    {"doca_verbs_cq_attr_create": "Verbs CQ Attr", "doca_verbs_cq_create": "Verbs CQ"},
    {
        **_attributes(
            "doca_verbs_cq_attr",
            cq_size=c_uint32, cq_overrun=c_uint8, external_datapath_en=c_uint8, external_umem=(void_p, c_uint64),
            external_uar=void_p,
        ),
        "doca_verbs_cq_create":       (void_p, void_p, OUT),
        "doca_verbs_cq_destroy":      (void_p,),
        "doca_verbs_cq_get_cqn":      (void_p,),
        "doca_verbs_cq_get_wq":       (void_p, OUT, _PU32, _PU8),
        "doca_verbs_cq_get_dbr_addr": (void_p, OUT, OUT, OUT),
    },
    optional={"doca_verbs_cq_attr_set_cq_collapsed": (void_p, c_uint8)},
)
_UMEM = Area(
    (GPUNETIO, COMMON),
    {"doca_umem_create": "Verbs UMEM"},
    {
        "doca_umem_create":  (void_p, void_p, c_size_t, c_uint32, OUT),
        "doca_umem_destroy": (void_p,),
        "doca_umem_get_id":  (void_p, _PU32),
    },
)
_UAR = Area(
    (COMMON,),
    {"doca_uar_create": "Verbs UAR"},
    {
        "doca_uar_create":       (void_p, c_int, OUT),
        "doca_uar_destroy":      (void_p,),
        "doca_uar_id_get":       (void_p, _PU32),
        "doca_uar_reg_addr_get": (void_p, OUT),
    },
)
_QP = Area(
    (COMMON, VERBS),
    {
        "doca_verbs_qp_init_attr_create": "Verbs QP Init Attr",
        "doca_verbs_qp_create": "Verbs QP",
        "doca_verbs_qp_attr_create": "Verbs QP Attr",
    },
    {
        **_attributes(
            "doca_verbs_qp_init_attr",
            pd=void_p, send_cq=void_p, receive_cq=void_p, sq_wr=c_uint32, rq_wr=c_uint32, send_max_sges=c_uint32,
            receive_max_sges=c_uint32, user_index=c_uint32, qp_type=c_uint32, external_datapath_en=c_uint8,
            external_umem=(void_p, c_uint64), external_dbr_umem=(void_p, c_uint64), external_uar=void_p, srq=void_p,
            core_direct_master=c_uint8, send_dbr_mode=c_int,
        ),
        "doca_verbs_qp_create":       (void_p, void_p, OUT),
        "doca_verbs_qp_destroy":      (void_p,),
        "doca_verbs_qp_get_qpn":      (void_p,),
        "doca_verbs_qp_get_wq":       (void_p, OUT, _PU32, OUT, _PU32, _PU32),
        "doca_verbs_qp_get_dbr_addr": (void_p,),
        "doca_verbs_qp_get_uar_addr": (void_p,),
        **_attributes(
            "doca_verbs_qp_attr",
            next_state=c_int, path_mtu=c_int, rq_psn=c_uint32, sq_psn=c_uint32, dest_qp_num=c_uint32,
            allow_remote_write=c_int, allow_remote_read=c_int, atomic_mode=c_int, ah_attr=void_p, pkey_index=c_uint16,
            port_num=c_uint16, ack_timeout=c_uint16, retry_cnt=c_uint16, rnr_retry=c_uint16, min_rnr_timer=c_uint16,
            max_rd_atomic=c_uint8, max_dest_rd_atomic=c_uint8,
        ),
        "doca_verbs_qp_attr_get_current_state": (void_p,),
        "doca_verbs_qp_modify":       (void_p, void_p, c_int),
        "doca_verbs_qp_query":        (void_p, void_p, void_p, POINTER(c_int)),
    },
    optional={"doca_verbs_qp_init_attr_set_cqe_inline": (void_p, c_uint8)},
)
_SRQ = Area(
    (COMMON, VERBS),
    {"doca_verbs_srq_init_attr_create": "Verbs SRQ Init Attr", "doca_verbs_srq_create": "Verbs SRQ"},
    {
        **_attributes(
            "doca_verbs_srq_init_attr",
            srq_wr=c_uint32, receive_max_sges=c_uint32, type=c_int, pd=void_p, external_datapath_en=c_uint8,
            external_umem=(void_p, c_uint64),
        ),
        "doca_verbs_srq_create":       (void_p, void_p, OUT),
        "doca_verbs_srq_destroy":      (void_p,),
        "doca_verbs_srq_get_srqn":     (void_p,),
        "doca_verbs_srq_get_wq":       (void_p, OUT, _PU32, _PU32),
        "doca_verbs_srq_get_dbr_addr": (void_p,),
    },
)
DEVICE = (_DEV, _AH, _CQ, _UMEM, _UAR, _QP, _SRQ)  # names for the log

RESULTS: dict[str, Any] = {  # all other functions return a doca_error_t
    "doca_verbs_cq_get_cqn":       c_uint32,
    "doca_verbs_cq_get_wq":        None,
    "doca_verbs_cq_get_dbr_addr":  None,
    "doca_verbs_qp_get_qpn":       c_uint32,
    "doca_verbs_qp_get_wq":        None,
    "doca_verbs_qp_get_dbr_addr":  void_p,
    "doca_verbs_qp_get_uar_addr":  void_p,
    "doca_verbs_qp_attr_get_current_state": c_int,
    "doca_verbs_srq_get_srqn":     c_uint32,
    "doca_verbs_srq_get_wq":       None,
    "doca_verbs_srq_get_dbr_addr": void_p,
}
