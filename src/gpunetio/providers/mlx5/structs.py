"""Declarations from rdma-core's headers, as far as used here: infiniband/verbs.h, then infiniband/mlx5dv.h.

Structures, members and constants have the headers' names. A pointer that is only passed on is a `void_p`.
"""

from __future__ import annotations

import platform
from ctypes import POINTER, Structure, Union, c_char, c_int, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64
from ctypes import c_long as long
from ctypes import c_void_p as void_p
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctypes import _Pointer

    Pointer = _Pointer  # it has no public name

_MUTEX_BYTES = 48 if platform.machine() == "aarch64" else 40  # pthread_mutex_t of glibc
_COND_BYTES = 48
_Mutex, _Cond = c_uint64 * (_MUTEX_BYTES // 8), c_uint64 * (_COND_BYTES // 8)

# --- constants of verbs.h ---------------------------------------------------------------------------------------------

IBV_SYSFS_NAME_MAX, IBV_SYSFS_PATH_MAX = 64, 256

IBV_TRANSPORT_IB = 0

IBV_PORT_NOP, IBV_PORT_DOWN, IBV_PORT_INIT, IBV_PORT_ARMED, IBV_PORT_ACTIVE, IBV_PORT_ACTIVE_DEFER = range(6)

IBV_MTU_256, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_4096 = range(1, 6)

IBV_LINK_LAYER_UNSPECIFIED, IBV_LINK_LAYER_INFINIBAND, IBV_LINK_LAYER_ETHERNET = range(3)

IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2 = range(3)

IBV_ACCESS_LOCAL_WRITE      = 1 << 0
IBV_ACCESS_REMOTE_WRITE     = 1 << 1
IBV_ACCESS_REMOTE_READ      = 1 << 2
IBV_ACCESS_REMOTE_ATOMIC    = 1 << 3
IBV_ACCESS_RELAXED_ORDERING = 1 << 20
IBV_ACCESS_OPTIONAL_RANGE   = 0x3FF00000

(
    IBV_EVENT_CQ_ERR, IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_COMM_EST,
    IBV_EVENT_SQ_DRAINED, IBV_EVENT_PATH_MIG, IBV_EVENT_PATH_MIG_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_PORT_ACTIVE,
    IBV_EVENT_PORT_ERR, IBV_EVENT_LID_CHANGE, IBV_EVENT_PKEY_CHANGE, IBV_EVENT_SM_CHANGE, IBV_EVENT_SRQ_ERR,
    IBV_EVENT_SRQ_LIMIT_REACHED, IBV_EVENT_QP_LAST_WQE_REACHED, IBV_EVENT_CLIENT_REREGISTER, IBV_EVENT_GID_CHANGE,
    IBV_EVENT_WQ_FATAL,
) = range(20)

(
    IBV_WC_SUCCESS, IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_LOC_EEC_OP_ERR, IBV_WC_LOC_PROT_ERR,
    IBV_WC_WR_FLUSH_ERR, IBV_WC_MW_BIND_ERR, IBV_WC_BAD_RESP_ERR, IBV_WC_LOC_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR,
    IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_LOC_RDD_VIOL_ERR,
    IBV_WC_REM_INV_RD_REQ_ERR, IBV_WC_REM_ABORT_ERR, IBV_WC_INV_EECN_ERR, IBV_WC_INV_EEC_STATE_ERR, IBV_WC_FATAL_ERR,
    IBV_WC_RESP_TIMEOUT_ERR, IBV_WC_GENERAL_ERR,
) = range(22)

IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_READ, IBV_WC_COMP_SWAP, IBV_WC_FETCH_ADD = range(5)
IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM = 128, 129

IBV_WC_GRH, IBV_WC_WITH_IMM = 1 << 0, 1 << 1

IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD = 2, 3, 4

IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QPS_SQE, IBV_QPS_ERR = range(7)

IBV_QP_STATE              = 1 << 0
IBV_QP_CUR_STATE          = 1 << 1
IBV_QP_ACCESS_FLAGS       = 1 << 3
IBV_QP_PKEY_INDEX         = 1 << 4
IBV_QP_PORT               = 1 << 5
IBV_QP_QKEY               = 1 << 6
IBV_QP_AV                 = 1 << 7
IBV_QP_PATH_MTU           = 1 << 8
IBV_QP_TIMEOUT            = 1 << 9
IBV_QP_RETRY_CNT          = 1 << 10
IBV_QP_RNR_RETRY          = 1 << 11
IBV_QP_RQ_PSN             = 1 << 12
IBV_QP_MAX_QP_RD_ATOMIC   = 1 << 13
IBV_QP_MIN_RNR_TIMER      = 1 << 15
IBV_QP_SQ_PSN             = 1 << 16
IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17
IBV_QP_CAP                = 1 << 19
IBV_QP_DEST_QPN           = 1 << 20

(
    IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_READ,
    IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD,
) = range(7)

IBV_SEND_FENCE, IBV_SEND_SIGNALED, IBV_SEND_SOLICITED, IBV_SEND_INLINE = 1 << 0, 1 << 1, 1 << 2, 1 << 3

IBV_SRQ_MAX_WR, IBV_SRQ_LIMIT = 1 << 0, 1 << 1
IBV_DEVICE_SRQ_RESIZE = 1 << 13
IBV_VALUES_MASK_RAW_CLOCK = 1 << 0
IBV_REREG_MR_CHANGE_TRANSLATION, IBV_REREG_MR_CHANGE_PD, IBV_REREG_MR_CHANGE_ACCESS = 1 << 0, 1 << 1, 1 << 2
IBV_REREG_MR_ERR_CMD = -4  # at this value or below, the region is lost

# --- structures of verbs.h --------------------------------------------------------------------------------------------


class ibv_device(Structure):
    _fields_ = [
        ("_ops", void_p * 2),
        ("node_type", c_int),
        ("transport_type", c_int),
        ("name", c_char * IBV_SYSFS_NAME_MAX),
        ("dev_name", c_char * IBV_SYSFS_NAME_MAX),
        ("dev_path", c_char * IBV_SYSFS_PATH_MAX),
        ("ibdev_path", c_char * IBV_SYSFS_PATH_MAX),
    ]


class ibv_device_attr(Structure):
    _fields_ = [
        ("fw_ver", c_char * 64),
        ("node_guid", c_uint64),
        ("sys_image_guid", c_uint64),
        ("max_mr_size", c_uint64),
        ("page_size_cap", c_uint64),
        ("vendor_id", c_uint32),
        ("vendor_part_id", c_uint32),
        ("hw_ver", c_uint32),
        ("max_qp", c_int),
        ("max_qp_wr", c_int),
        ("device_cap_flags", c_uint32),
        ("max_sge", c_int),
        ("max_sge_rd", c_int),
        ("max_cq", c_int),
        ("max_cqe", c_int),
        ("max_mr", c_int),
        ("max_pd", c_int),
        ("max_qp_rd_atom", c_int),
        ("max_ee_rd_atom", c_int),
        ("max_res_rd_atom", c_int),
        ("max_qp_init_rd_atom", c_int),
        ("max_ee_init_rd_atom", c_int),
        ("atomic_cap", c_int),
        ("max_ee", c_int),
        ("max_rdd", c_int),
        ("max_mw", c_int),
        ("max_raw_ipv6_qp", c_int),
        ("max_raw_ethy_qp", c_int),
        ("max_mcast_grp", c_int),
        ("max_mcast_qp_attach", c_int),
        ("max_total_mcast_qp_attach", c_int),
        ("max_ah", c_int),
        ("max_fmr", c_int),
        ("max_map_per_fmr", c_int),
        ("max_srq", c_int),
        ("max_srq_wr", c_int),
        ("max_srq_sge", c_int),
        ("max_pkeys", c_uint16),
        ("local_ca_ack_delay", c_uint8),
        ("phys_port_cnt", c_uint8),
    ]


class ibv_port_attr(Structure):
    _fields_ = [
        ("state", c_int),
        ("max_mtu", c_int),
        ("active_mtu", c_int),
        ("gid_tbl_len", c_int),
        ("port_cap_flags", c_uint32),
        ("max_msg_sz", c_uint32),
        ("bad_pkey_cntr", c_uint32),
        ("qkey_viol_cntr", c_uint32),
        ("pkey_tbl_len", c_uint16),
        ("lid", c_uint16),
        ("sm_lid", c_uint16),
        ("lmc", c_uint8),
        ("max_vl_num", c_uint8),
        ("sm_sl", c_uint8),
        ("subnet_timeout", c_uint8),
        ("init_type_reply", c_uint8),
        ("active_width", c_uint8),
        ("active_speed", c_uint8),
        ("phys_state", c_uint8),
        ("link_layer", c_uint8),
        ("flags", c_uint8),
        ("port_cap_flags2", c_uint16),
    ]


class _global(Structure):
    _fields_ = [("subnet_prefix", c_uint64), ("interface_id", c_uint64)]


class ibv_gid(Union):
    _fields_ = [("raw", c_uint8 * 16), ("global", _global)]


class ibv_gid_entry(Structure):
    _fields_ = [
        ("gid", ibv_gid),
        ("gid_index", c_uint32),
        ("port_num", c_uint32),
        ("gid_type", c_uint32),
        ("ndev_ifindex", c_uint32),
    ]


class ibv_context_ops(Structure):
    """The table through which the header's inline functions call the device's driver."""

    _fields_ = [
        ("_compat_query_device", void_p),
        ("_compat_query_port", void_p),
        ("_compat_alloc_pd", void_p),
        ("_compat_dealloc_pd", void_p),
        ("_compat_reg_mr", void_p),
        ("_compat_rereg_mr", void_p),
        ("_compat_dereg_mr", void_p),
        ("alloc_mw", void_p),
        ("bind_mw", void_p),
        ("dealloc_mw", void_p),
        ("_compat_create_cq", void_p),
        ("poll_cq", void_p),
        ("req_notify_cq", void_p),
        ("_compat_cq_event", void_p),
        ("_compat_resize_cq", void_p),
        ("_compat_destroy_cq", void_p),
        ("_compat_create_srq", void_p),
        ("_compat_modify_srq", void_p),
        ("_compat_query_srq", void_p),
        ("_compat_destroy_srq", void_p),
        ("post_srq_recv", void_p),
        ("_compat_create_qp", void_p),
        ("_compat_query_qp", void_p),
        ("_compat_modify_qp", void_p),
        ("_compat_destroy_qp", void_p),
        ("post_send", void_p),
        ("post_recv", void_p),
        ("_compat_create_ah", void_p),
        ("_compat_destroy_ah", void_p),
        ("_compat_attach_mcast", void_p),
        ("_compat_detach_mcast", void_p),
        ("_compat_async_event", void_p),
    ]


class ibv_context(Structure):
    _fields_ = [
        ("device", POINTER(ibv_device)),
        ("ops", ibv_context_ops),
        ("cmd_fd", c_int),
        ("async_fd", c_int),
        ("num_comp_vectors", c_int),
        ("mutex", _Mutex),
        ("abi_compat", void_p),
    ]


class _timespec(Structure):
    _fields_ = [("tv_sec", long), ("tv_nsec", long)]


class ibv_values_ex(Structure):
    _fields_ = [("comp_mask", c_uint32), ("raw_clock", _timespec)]


class verbs_context(Structure):
    """The context, preceded by the drivers' extensions. `sz` says how much of the structure exists."""

    _fields_ = [
        ("query_port", void_p),
        ("advise_mr", void_p),
        ("alloc_null_mr", void_p),
        ("read_counters", void_p),
        ("attach_counters_point_flow", void_p),
        ("create_counters", void_p),
        ("destroy_counters", void_p),
        ("reg_dm_mr", void_p),
        ("alloc_dm", void_p),
        ("free_dm", void_p),
        ("modify_flow_action_esp", void_p),
        ("destroy_flow_action", void_p),
        ("create_flow_action_esp", void_p),
        ("modify_qp_rate_limit", void_p),
        ("alloc_parent_domain", void_p),
        ("dealloc_td", void_p),
        ("alloc_td", void_p),
        ("modify_cq", void_p),
        ("post_srq_ops", void_p),
        ("destroy_rwq_ind_table", void_p),
        ("create_rwq_ind_table", void_p),
        ("destroy_wq", void_p),
        ("modify_wq", void_p),
        ("create_wq", void_p),
        ("query_rt_values", void_p),
        ("create_cq_ex", void_p),
        ("priv", void_p),
        ("query_device_ex", void_p),
        ("ibv_destroy_flow", void_p),
        ("ABI_placeholder2", void_p),
        ("ibv_create_flow", void_p),
        ("ABI_placeholder1", void_p),
        ("open_qp", void_p),
        ("create_qp_ex", void_p),
        ("get_srq_num", void_p),
        ("create_srq_ex", void_p),
        ("open_xrcd", void_p),
        ("close_xrcd", void_p),
        ("_ABI_placeholder3", c_uint64),
        ("sz", c_size_t),
        ("context", ibv_context),
    ]


class ibv_pd(Structure):
    _fields_ = [("context", POINTER(ibv_context)), ("handle", c_uint32)]


class ibv_mr(Structure):
    _fields_ = [
        ("context", POINTER(ibv_context)),
        ("pd", POINTER(ibv_pd)),
        ("addr", void_p),
        ("length", c_size_t),
        ("handle", c_uint32),
        ("lkey", c_uint32),
        ("rkey", c_uint32),
    ]


class ibv_global_route(Structure):
    _fields_ = [
        ("dgid", ibv_gid),
        ("flow_label", c_uint32),
        ("sgid_index", c_uint8),
        ("hop_limit", c_uint8),
        ("traffic_class", c_uint8),
    ]


class ibv_ah_attr(Structure):
    _fields_ = [
        ("grh", ibv_global_route),
        ("dlid", c_uint16),
        ("sl", c_uint8),
        ("src_path_bits", c_uint8),
        ("static_rate", c_uint8),
        ("is_global", c_uint8),
        ("port_num", c_uint8),
    ]


class ibv_ah(Structure):
    _fields_ = [("context", POINTER(ibv_context)), ("pd", POINTER(ibv_pd)), ("handle", c_uint32)]


class ibv_comp_channel(Structure):
    _fields_ = [("context", POINTER(ibv_context)), ("fd", c_int), ("refcnt", c_int)]


class ibv_cq(Structure):
    _fields_ = [
        ("context", POINTER(ibv_context)),
        ("channel", POINTER(ibv_comp_channel)),
        ("cq_context", void_p),
        ("handle", c_uint32),
        ("cqe", c_int),
        ("mutex", _Mutex),
        ("cond", _Cond),
        ("comp_events_completed", c_uint32),
        ("async_events_completed", c_uint32),
    ]


class ibv_srq_attr(Structure):
    _fields_ = [("max_wr", c_uint32), ("max_sge", c_uint32), ("srq_limit", c_uint32)]


class ibv_srq_init_attr(Structure):
    _fields_ = [("srq_context", void_p), ("attr", ibv_srq_attr)]


class ibv_srq(Structure):
    _fields_ = [
        ("context", POINTER(ibv_context)),
        ("srq_context", void_p),
        ("pd", POINTER(ibv_pd)),
        ("handle", c_uint32),
        ("mutex", _Mutex),
        ("cond", _Cond),
        ("events_completed", c_uint32),
    ]


class ibv_qp_cap(Structure):
    _fields_ = [
        ("max_send_wr", c_uint32),
        ("max_recv_wr", c_uint32),
        ("max_send_sge", c_uint32),
        ("max_recv_sge", c_uint32),
        ("max_inline_data", c_uint32),
    ]


class ibv_qp_init_attr(Structure):
    _fields_ = [
        ("qp_context", void_p),
        ("send_cq", POINTER(ibv_cq)),
        ("recv_cq", POINTER(ibv_cq)),
        ("srq", POINTER(ibv_srq)),
        ("cap", ibv_qp_cap),
        ("qp_type", c_int),
        ("sq_sig_all", c_int),
    ]


class ibv_qp_attr(Structure):
    _fields_ = [
        ("qp_state", c_int),
        ("cur_qp_state", c_int),
        ("path_mtu", c_int),
        ("path_mig_state", c_int),
        ("qkey", c_uint32),
        ("rq_psn", c_uint32),
        ("sq_psn", c_uint32),
        ("dest_qp_num", c_uint32),
        ("qp_access_flags", c_uint32),
        ("cap", ibv_qp_cap),
        ("ah_attr", ibv_ah_attr),
        ("alt_ah_attr", ibv_ah_attr),
        ("pkey_index", c_uint16),
        ("alt_pkey_index", c_uint16),
        ("en_sqd_async_notify", c_uint8),
        ("sq_draining", c_uint8),
        ("max_rd_atomic", c_uint8),
        ("max_dest_rd_atomic", c_uint8),
        ("min_rnr_timer", c_uint8),
        ("port_num", c_uint8),
        ("timeout", c_uint8),
        ("retry_cnt", c_uint8),
        ("rnr_retry", c_uint8),
        ("alt_port_num", c_uint8),
        ("alt_timeout", c_uint8),
        ("rate_limit", c_uint32),
    ]


class ibv_qp(Structure):
    _fields_ = [
        ("context", POINTER(ibv_context)),
        ("qp_context", void_p),
        ("pd", POINTER(ibv_pd)),
        ("send_cq", POINTER(ibv_cq)),
        ("recv_cq", POINTER(ibv_cq)),
        ("srq", POINTER(ibv_srq)),
        ("handle", c_uint32),
        ("qp_num", c_uint32),
        ("state", c_int),
        ("qp_type", c_int),
        ("mutex", _Mutex),
        ("cond", _Cond),
        ("events_completed", c_uint32),
    ]


class ibv_sge(Structure):
    _fields_ = [("addr", c_uint64), ("length", c_uint32), ("lkey", c_uint32)]


class _rdma(Structure):
    _fields_ = [("remote_addr", c_uint64), ("rkey", c_uint32)]


class _atomic(Structure):
    _fields_ = [("remote_addr", c_uint64), ("compare_add", c_uint64), ("swap", c_uint64), ("rkey", c_uint32)]


class _ud(Structure):
    _fields_ = [("ah", POINTER(ibv_ah)), ("remote_qpn", c_uint32), ("remote_qkey", c_uint32)]


class _wr(Union):
    _fields_ = [("rdma", _rdma), ("atomic", _atomic), ("ud", _ud)]


class ibv_send_wr(Structure):
    """A send request. The tail, for memory windows, TSO and XRC, is only reserved space."""


ibv_send_wr._fields_ = [
    ("wr_id", c_uint64),
    ("next", POINTER(ibv_send_wr)),
    ("sg_list", POINTER(ibv_sge)),
    ("num_sge", c_int),
    ("opcode", c_int),
    ("send_flags", c_uint32),
    ("imm_data", c_uint32),
    ("wr", _wr),
    ("qp_type", c_uint32),
    ("bind_mw", void_p * 6),
]


class ibv_recv_wr(Structure):
    pass


ibv_recv_wr._fields_ = [
    ("wr_id", c_uint64),
    ("next", POINTER(ibv_recv_wr)),
    ("sg_list", POINTER(ibv_sge)),
    ("num_sge", c_int),
]


class ibv_wc(Structure):
    _fields_ = [
        ("wr_id", c_uint64),
        ("status", c_int),
        ("opcode", c_int),
        ("vendor_err", c_uint32),
        ("byte_len", c_uint32),
        ("imm_data", c_uint32),
        ("qp_num", c_uint32),
        ("src_qp", c_uint32),
        ("wc_flags", c_uint32),
        ("pkey_index", c_uint16),
        ("slid", c_uint16),
        ("sl", c_uint8),
        ("dlid_path_bits", c_uint8),
    ]


class _element(Union):
    _fields_ = [
        ("cq", POINTER(ibv_cq)),
        ("qp", POINTER(ibv_qp)),
        ("srq", POINTER(ibv_srq)),
        ("port_num", c_int),
    ]


class ibv_async_event(Structure):
    _fields_ = [("element", _element), ("event_type", c_int)]


# --- constants of mlx5dv.h --------------------------------------------------------------------------------------------

MLX5DV_OBJ_AH, MLX5DV_OBJ_PD = 1 << 5, 1 << 6

MLX5DV_UMEM_MASK_DMABUF = 1 << 0

MLX5DV_UAR_ALLOC_TYPE_BF, MLX5DV_UAR_ALLOC_TYPE_NC = 0, 1
MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED = 1 << 31  # only in newer headers; older libraries pass it on

MLX5DV_CONTEXT_FLAGS_CQE_V1 = 1 << 0

# --- structures of mlx5dv.h -------------------------------------------------------------------------------------------


class mlx5dv_context(Structure):
    """A device's capabilities. `comp_mask` requests the fields at the end."""

    _fields_ = [
        ("version", c_uint8),
        ("flags", c_uint64),
        ("comp_mask", c_uint64),
        ("cqe_comp_caps", c_uint32 * 2),
        ("sw_parsing_caps", c_uint32 * 2),
        ("striding_rq_caps", c_uint32 * 5),
        ("tunnel_offloads_caps", c_uint32),
        ("max_dynamic_bfregs", c_uint32),
        ("max_clock_info_update_nsec", c_uint64),
        ("flow_action_flags", c_uint32),
        ("dc_odp_caps", c_uint32),
        ("hca_core_clock", void_p),
        ("num_lag_ports", c_uint8),
        ("sig_caps", c_uint64 * 2),
        ("dci_streams_caps", c_uint8 * 2),
        ("max_wr_memcpy_length", c_size_t),
        ("crypto_caps", c_uint32 * 3),
    ]


class mlx5_wqe_av(Structure):
    _fields_ = [
        ("key", c_uint32 * 2),
        ("dqp_dct", c_uint32),
        ("stat_rate_sl", c_uint8),
        ("fl_mlid", c_uint8),
        ("rlid", c_uint16),
        ("reserved0", c_uint8 * 4),
        ("rmac", c_uint8 * 6),
        ("tclass", c_uint8),
        ("hop_limit", c_uint8),
        ("grh_gid_fl", c_uint32),
        ("rgid", c_uint8 * 16),
    ]


class mlx5dv_ah(Structure):
    _fields_ = [("av", POINTER(mlx5_wqe_av)), ("comp_mask", c_uint64)]


class mlx5dv_pd(Structure):
    _fields_ = [("pdn", c_uint32), ("comp_mask", c_uint64)]


def _in_out(in_type: type, out_type: type) -> type[Structure]:
    return type("_in_out", (Structure,), {"_fields_": [("in", POINTER(in_type)), ("out", POINTER(out_type))]})


_Opaque = void_p * 2


class mlx5dv_obj(Structure):
    _fields_ = [
        ("qp", _Opaque),
        ("cq", _Opaque),
        ("srq", _Opaque),
        ("rwq", _Opaque),
        ("dm", _Opaque),
        ("ah", _in_out(ibv_ah, mlx5dv_ah)),
        ("pd", _in_out(ibv_pd, mlx5dv_pd)),
    ]


class mlx5dv_devx_umem(Structure):
    _fields_ = [("umem_id", c_uint32)]


class mlx5dv_devx_umem_in(Structure):
    _fields_ = [
        ("addr", void_p),
        ("size", c_size_t),
        ("access", c_uint32),
        ("pgsz_bitmap", c_uint64),
        ("comp_mask", c_uint64),
        ("dmabuf_fd", c_int),
    ]


class mlx5dv_devx_uar(Structure):
    _fields_ = [
        ("reg_addr", void_p),
        ("base_addr", void_p),
        ("page_id", c_uint32),
        ("mmap_off", c_int64),
        ("comp_mask", c_uint64),
    ]


class mlx5dv_devx_event_channel(Structure):
    _fields_ = [("fd", c_int)]


class mlx5dv_devx_async_event_hdr(Structure):
    """The header of an event. The EQE follows, unless the channel was created without it."""

    _fields_ = [("cookie", c_uint64)]


class mlx5dv_clock_info(Structure):
    _fields_ = [
        ("nsec", c_uint64),
        ("last_cycles", c_uint64),
        ("frac", c_uint64),
        ("mult", c_uint32),
        ("shift", c_uint32),
        ("mask", c_uint64),
    ]


# --- flow rules: matchers and rules of the kernel

IBV_FLOW_ATTR_NORMAL = 0
MLX5DV_FLOW_ACTION_DEST_DEVX = 5
MLX5DV_FLOW_MATCHER_MASK_FT_TYPE = 1 << 0
MLX5DV_FLOW_TABLE_TYPE_NIC_RX = 0


class ibv_flow(Structure):
    _fields_ = [("comp_mask", c_uint32), ("context", POINTER(ibv_context)), ("handle", c_uint32)]


class mlx5dv_flow_match_parameters(Structure):
    """The header of match parameters: `match_sz` bytes of fte_match_param follow."""

    _fields_ = [("match_sz", c_size_t)]


class mlx5dv_flow_matcher_attr(Structure):
    _fields_ = [
        ("type", c_uint32),
        ("flags", c_uint32),
        ("priority", c_uint16),
        ("match_criteria_enable", c_uint8),
        ("match_mask", POINTER(mlx5dv_flow_match_parameters)),
        ("comp_mask", c_uint64),
        ("ft_type", c_uint32),
    ]


class mlx5dv_flow_action_attr(Structure):
    """One action. Its size differs between releases of rdma-core, so no array of actions is passed."""

    _fields_ = [("type", c_uint32), ("obj", void_p)]


class mlx5dv_steering_anchor_attr(Structure):
    _fields_ = [("ft_type", c_uint32), ("priority", c_uint16), ("comp_mask", c_uint64)]


class mlx5dv_steering_anchor(Structure):
    _fields_ = [("id", c_uint32)]
