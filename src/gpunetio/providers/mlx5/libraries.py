"""libibverbs and libmlx5, loaded on first use: the functions called here, with their symbol versions.

GPUNETIO_LIBIBVERBS and GPUNETIO_LIBMLX5 name files to load instead of the system's. A missing library or function
raises NotSupportedError, which says what to install. Optional functions are looked up on their first call.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ssize_t, c_uint8, c_uint16, c_uint32, c_uint64
from ctypes import c_void_p as void_p
from dataclasses import dataclass
from typing import Any

from ...errors import NotPermittedError, NotSupportedError
from ...trusted import load_library
from . import structs as s

_context, _device, _pd, _mr, _ah = map(POINTER, (s.ibv_context, s.ibv_device, s.ibv_pd, s.ibv_mr, s.ibv_ah))
_cq, _qp, _srq, _channel = map(POINTER, (s.ibv_cq, s.ibv_qp, s.ibv_srq, s.ibv_comp_channel))
_umem, _uar = POINTER(s.mlx5dv_devx_umem), POINTER(s.mlx5dv_devx_uar)
_events = POINTER(s.mlx5dv_devx_event_channel)
_flow, _anchor = POINTER(s.ibv_flow), POINTER(s.mlx5dv_steering_anchor)


@dataclass(frozen=True)
class Function:
    """An exported function: its symbol version, result type and argument types."""

    version: str
    result: Any
    arguments: tuple[Any, ...]
    optional: bool = False


_V = "IBVERBS_1."
_M = "MLX5_1."
IBVERBS = {
    "ibv_get_device_list":      Function(f"{_V}1",  POINTER(_device), (POINTER(c_int),)),
    "ibv_free_device_list":     Function(f"{_V}1",  None,   (POINTER(_device),)),
    "ibv_get_device_name":      Function(f"{_V}1",  c_char_p, (_device,)),
    "ibv_open_device":          Function(f"{_V}1",  _context, (_device,)),
    "ibv_close_device":         Function(f"{_V}1",  c_int,  (_context,)),
    "ibv_query_device":         Function(f"{_V}1",  c_int,  (_context, POINTER(s.ibv_device_attr))),
    "ibv_query_port":           Function(f"{_V}1",  c_int,  (_context, c_uint8, POINTER(s.ibv_port_attr))),
    "ibv_query_gid":            Function(f"{_V}1",  c_int,  (_context, c_uint8, c_int, POINTER(s.ibv_gid))),
    "_ibv_query_gid_ex":        Function(f"{_V}11", c_int,  (_context, c_uint32, c_uint32, POINTER(s.ibv_gid_entry),
                                                             c_uint32, c_size_t), optional=True),
    "ibv_alloc_pd":             Function(f"{_V}1",  _pd,    (_context,)),
    "ibv_dealloc_pd":           Function(f"{_V}1",  c_int,  (_pd,)),
    "ibv_reg_mr":               Function(f"{_V}1",  _mr,    (_pd, void_p, c_size_t, c_int)),
    "ibv_reg_mr_iova2":         Function(f"{_V}8",  _mr,    (_pd, void_p, c_size_t, c_uint64, c_uint32), optional=True),
    "ibv_reg_dmabuf_mr":        Function(f"{_V}12", _mr,    (_pd, c_uint64, c_size_t, c_uint64, c_int, c_int),
                                         optional=True),
    "ibv_rereg_mr":             Function(f"{_V}1",  c_int,  (_mr, c_int, _pd, void_p, c_size_t, c_int), optional=True),
    "ibv_dereg_mr":             Function(f"{_V}1",  c_int,  (_mr,)),
    "ibv_create_ah":            Function(f"{_V}1",  _ah,    (_pd, POINTER(s.ibv_ah_attr))),
    "ibv_destroy_ah":           Function(f"{_V}1",  c_int,  (_ah,)),
    "ibv_create_comp_channel":  Function(f"{_V}0",  _channel, (_context,)),
    "ibv_destroy_comp_channel": Function(f"{_V}0",  c_int,  (_channel,)),
    "ibv_create_cq":            Function(f"{_V}1",  _cq,    (_context, c_int, void_p, _channel, c_int)),
    "ibv_resize_cq":            Function(f"{_V}1",  c_int,  (_cq, c_int), optional=True),
    "ibv_destroy_cq":           Function(f"{_V}1",  c_int,  (_cq,)),
    "ibv_get_cq_event":         Function(f"{_V}1",  c_int,  (_channel, POINTER(_cq), POINTER(void_p))),
    "ibv_ack_cq_events":        Function(f"{_V}1",  None,   (_cq, c_uint32)),
    "ibv_create_srq":           Function(f"{_V}1",  _srq,   (_pd, POINTER(s.ibv_srq_init_attr))),
    "ibv_modify_srq":           Function(f"{_V}1",  c_int,  (_srq, POINTER(s.ibv_srq_attr), c_int)),
    "ibv_query_srq":            Function(f"{_V}1",  c_int,  (_srq, POINTER(s.ibv_srq_attr))),
    "ibv_destroy_srq":          Function(f"{_V}1",  c_int,  (_srq,)),
    "ibv_create_qp":            Function(f"{_V}1",  _qp,    (_pd, POINTER(s.ibv_qp_init_attr))),
    "ibv_modify_qp":            Function(f"{_V}1",  c_int,  (_qp, POINTER(s.ibv_qp_attr), c_int)),
    "ibv_query_qp":             Function(f"{_V}1",  c_int,  (_qp, POINTER(s.ibv_qp_attr), c_int,
                                                             POINTER(s.ibv_qp_init_attr))),
    "ibv_destroy_qp":           Function(f"{_V}1",  c_int,  (_qp,)),
    "ibv_get_async_event":      Function(f"{_V}1",  c_int,  (_context, POINTER(s.ibv_async_event))),
    "ibv_ack_async_event":      Function(f"{_V}1",  None,   (POINTER(s.ibv_async_event),)),
}
MLX5 = {
    "mlx5dv_is_supported":      Function(f"{_M}8",  ctypes.c_bool, (_device,)),
    "mlx5dv_query_device":      Function(f"{_M}0",  c_int,  (_context, POINTER(s.mlx5dv_context))),
    "mlx5dv_get_clock_info":    Function(f"{_M}4",  c_int,  (_context, POINTER(s.mlx5dv_clock_info)), optional=True),
    "mlx5dv_init_obj":          Function(f"{_M}2",  c_int,  (POINTER(s.mlx5dv_obj), c_uint64)),
    "mlx5dv_devx_obj_create":   Function(f"{_M}7",  void_p, (_context, void_p, c_size_t, void_p, c_size_t)),
    "mlx5dv_devx_obj_query":    Function(f"{_M}7",  c_int,  (void_p, void_p, c_size_t, void_p, c_size_t)),
    "mlx5dv_devx_obj_modify":   Function(f"{_M}7",  c_int,  (void_p, void_p, c_size_t, void_p, c_size_t)),
    "mlx5dv_devx_obj_destroy":  Function(f"{_M}7",  c_int,  (void_p,)),
    "mlx5dv_devx_general_cmd":  Function(f"{_M}7",  c_int,  (_context, void_p, c_size_t, void_p, c_size_t)),
    "mlx5dv_devx_query_eqn":    Function(f"{_M}7",  c_int,  (_context, c_uint32, POINTER(c_uint32))),
    "mlx5dv_devx_umem_reg":     Function(f"{_M}7",  _umem,  (_context, void_p, c_size_t, c_uint32)),
    "mlx5dv_devx_umem_reg_ex":  Function(f"{_M}19", _umem,  (_context, POINTER(s.mlx5dv_devx_umem_in)), optional=True),
    "mlx5dv_devx_umem_dereg":   Function(f"{_M}7",  c_int,  (_umem,)),
    "mlx5dv_devx_alloc_uar":    Function(f"{_M}7",  _uar,   (_context, c_uint32)),
    "mlx5dv_devx_free_uar":     Function(f"{_M}7",  None,   (_uar,)),
    "mlx5dv_create_flow_matcher":  Function(f"{_M}6", void_p, (_context, POINTER(s.mlx5dv_flow_matcher_attr)),
                                            optional=True),
    "mlx5dv_destroy_flow_matcher": Function(f"{_M}6", c_int, (void_p,), optional=True),
    "mlx5dv_create_flow":          Function(f"{_M}6", _flow, (void_p, POINTER(s.mlx5dv_flow_match_parameters), c_size_t,
                                                              POINTER(s.mlx5dv_flow_action_attr)), optional=True),
    "mlx5dv_create_steering_anchor":  Function(f"{_M}24", _anchor, (_context, POINTER(s.mlx5dv_steering_anchor_attr)),
                                               optional=True),
    "mlx5dv_destroy_steering_anchor": Function(f"{_M}24", c_int, (_anchor,), optional=True),
    "mlx5dv_devx_create_event_channel":  Function(f"{_M}11", _events, (_context, c_int), optional=True),
    "mlx5dv_devx_destroy_event_channel": Function(f"{_M}11", None,  (_events,), optional=True),
    "mlx5dv_devx_subscribe_devx_event":  Function(f"{_M}11", c_int, (_events, void_p, c_uint16, POINTER(c_uint16),
                                                                     c_uint64), optional=True),
    "mlx5dv_devx_get_event":             Function(f"{_M}11", c_ssize_t, (_events, void_p, c_size_t), optional=True),
}
# Symbol version → the first release of rdma-core that has it.
_SINCE = {
    f"{_V}0": 12, f"{_V}1": 12, f"{_V}8": 28, f"{_V}11": 32, f"{_V}12": 34,
    f"{_M}0": 13, f"{_M}2": 15, f"{_M}4": 18, f"{_M}6": 20, f"{_M}7": 21, f"{_M}8": 22, f"{_M}11": 25, f"{_M}19": 35,
    f"{_M}24": 44, "RDMACM_1.0": 12, "RDMACM_1.2": 23,
}


class Library:
    """A loaded library, with its functions as attributes. They leave the thread's errno in `ctypes.get_errno()`."""

    path: str

    def __init__(self, soname: str, variable: str, package: str, functions: dict[str, Function]):
        self.path = os.environ.get(variable) or soname
        self.functions = functions
        self._cure = f"install {package} of rdma-core, or name another file with {variable}"
        try:
            self._library = load_library(self.path)
        except NotPermittedError:
            raise
        except OSError as error:
            raise NotSupportedError(f"{self.path} cannot be loaded ({error}): {self._cure}") from None
        for name, function in functions.items():
            if not function.optional:
                setattr(self, name, self._function(name))

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("functions", ()):
            raise AttributeError(name)
        function = self._function(name)
        setattr(self, name, function)
        return function

    def has(self, name: str) -> bool:
        """Return whether the library has this function."""
        return bool(self._address(name))

    def _address(self, name: str) -> int | None:
        return _dlvsym(self._library._handle, name.encode(), self.functions[name].version.encode())

    def _function(self, name: str) -> Any:
        function, address = self.functions[name], self._address(name)
        if not address:
            raise NotSupportedError(
                f"{self.path} has no {name}@{function.version}, which rdma-core has since release "
                f"{_SINCE[function.version]}: {self._cure}"
            )
        return ctypes.CFUNCTYPE(function.result, *function.arguments, use_errno=True)(address)


def _symbol_lookup() -> Any:
    """Return `dlvsym` of the C library, or a function that finds nothing if the C library lacks it."""
    try:
        dlvsym = ctypes.CDLL(None).dlvsym
    except (AttributeError, OSError, TypeError):
        return lambda handle, name, version: None
    dlvsym.restype, dlvsym.argtypes = void_p, (void_p, c_char_p, c_char_p)
    return dlvsym


_dlvsym = _symbol_lookup()


@functools.cache
def libibverbs() -> Library:
    """Return libibverbs, the library for all verbs devices."""
    return Library("libibverbs.so.1", "GPUNETIO_LIBIBVERBS", "libibverbs1", IBVERBS)


@functools.cache
def libmlx5() -> Library:
    """Return libmlx5, the library for NVIDIA devices."""
    return Library("libmlx5.so.1", "GPUNETIO_LIBMLX5", "ibverbs-providers", MLX5)
