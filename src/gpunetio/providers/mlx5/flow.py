"""Direct packets of a card's port to DEVX flow tables, and back to the kernel's.

The kernel owns the root table, so one of its rules must lead to our table. That rule matches everything, at the first
priority available to programs. Packets that our tables do not take go back through a steering anchor.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from ctypes import POINTER, byref, sizeof
from typing import TYPE_CHECKING

from ...formats.flow import FTE_MATCH_PARAM
from . import structs as s
from .inline import ibv_destroy_flow

if TYPE_CHECKING:
    from .device import VerbsDevice
    from .libraries import Library
    from .structs import Pointer

_FIRST_PRIORITY = 0
_PERMISSION = " (rules take CAP_NET_RAW)"


def attach(device: VerbsDevice, mlx5: Library, table: object) -> ExitStack:
    """Direct all packets that the port receives to a DEVX flow table. Closing the result ends this."""
    everything = ctypes.create_string_buffer(sizeof(s.mlx5dv_flow_match_parameters) + FTE_MATCH_PARAM.size)
    match = ctypes.cast(everything, POINTER(s.mlx5dv_flow_match_parameters))
    match.contents.match_sz = FTE_MATCH_PARAM.size
    wanted = s.mlx5dv_flow_matcher_attr(
        type=s.IBV_FLOW_ATTR_NORMAL, priority=_FIRST_PRIORITY, match_mask=match,
        comp_mask=s.MLX5DV_FLOW_MATCHER_MASK_FT_TYPE, ft_type=s.MLX5DV_FLOW_TABLE_TYPE_NIC_RX,
    )
    with ExitStack() as undo:
        matcher = mlx5.mlx5dv_create_flow_matcher(device.context, byref(wanted))
        device.pointer(f"mlx5dv_create_flow_matcher{_PERMISSION}", matcher)
        undo.callback(mlx5.mlx5dv_destroy_flow_matcher, matcher)
        action = s.mlx5dv_flow_action_attr(type=s.MLX5DV_FLOW_ACTION_DEST_DEVX, obj=table)
        flow = mlx5.mlx5dv_create_flow(matcher, match, 1, byref(action))
        device.pointer(f"mlx5dv_create_flow{_PERMISSION}", flow)
        undo.callback(ibv_destroy_flow, flow)
        return undo.pop_all()


def detach(attached: ExitStack) -> int:
    """Undo `attach`. Return 0."""
    attached.close()
    return 0


def open_anchor(device: VerbsDevice, mlx5: Library) -> Pointer[s.mlx5dv_steering_anchor]:
    """Return an anchor, whose table leads to the kernel's own rules. NotSupportedError before rdma-core 44."""
    wanted = s.mlx5dv_steering_anchor_attr(ft_type=s.MLX5DV_FLOW_TABLE_TYPE_NIC_RX, priority=_FIRST_PRIORITY)
    anchor = mlx5.mlx5dv_create_steering_anchor(device.context, byref(wanted))
    return device.pointer(f"mlx5dv_create_steering_anchor{_PERMISSION}", anchor)
