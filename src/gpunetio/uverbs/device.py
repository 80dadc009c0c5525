"""Calls about the device and its port: the user's context, attributes, GIDs and doorbell pages."""

from __future__ import annotations

import errno
from contextlib import ExitStack

from ..enums import LinkLayer, PortState, UarAllocationType
from ..formats.commands import MTU_CODES
from ..formats.doorbell import UAR_PAGE
from ..memory import PAGE
from . import abi
from .abi import Method, Object, UarType, Write
from .call import Call, Refused
from .files import OpenFile
from .methods import command, method

_QP_TABLE = 1 << 18  # queue pairs in libmlx5's table
_ATOMIC_HCA = 1  # enum ibv_atomic_cap: atomic among the device's own atomics
_LONGEST_MESSAGE = 1 << 30
# Capabilities of a ConnectX-7 that software NICs also have (mlx5_ib_query_device in Linux).
_CAPABILITIES = sum(abi.DeviceCap)
_GRH_REQUIRED = 1  # IB_UVERBS_QPF_GRH_REQUIRED


@method(Object.DEVICE, Method.GET_CONTEXT, abi.GetContext)
def get_context(file: OpenFile, call: Call) -> None:
    """Answer with what libmlx5 must know to drive queues.

    No doorbell page is allocated for it now (`tot_bfregs`): it asks for pages as it needs them. There is no BlueFlame,
    so `bf_reg_size` is 0.
    """
    device = file.ctx.query_device()
    request = call.take(abi.UHW_IN, abi.CONTEXT)
    call.put_number(abi.GetContext.NUM_COMP_VECTORS, device.num_comp_vectors)
    call.put_number(abi.GetContext.CORE_SUPPORT, abi.OPTIONAL_MR_ACCESS)
    answer = abi.CONTEXT_RESP.pack(
        qp_tab_size=_QP_TABLE, cache_line_size=64, max_sq_desc_sz=device.max_wqe_sz_sq,
        max_rq_desc_sz=device.max_wqe_sz_rq, max_send_wqebb=1 << device.log_max_qp_sz, max_recv_wr=device.max_qp_wr,
        max_srq_recv_wr=device.max_srq_wr, num_ports=device.phys_port_cnt, response_length=abi.CONTEXT_RESP.size,
        cqe_version=min(1, int(request["max_cqe_version"])),
        cmds_supp_uhw=abi.UHW_QUERY_DEVICE | abi.UHW_CREATE_AH, eth_min_inline=abi.INLINE_NONE,
        log_uar_size=UAR_PAGE.bit_length() - 1, num_uars_per_page=PAGE // UAR_PAGE,
    )
    call.put(abi.UHW_OUT, answer)


@command(Write.QUERY_DEVICE)
@command(Write.QUERY_DEVICE | abi.EXTENDED)
def query_device(file: OpenFile, call: Call) -> None:
    """Answer with the attributes. A call without room for them is libibverbs' probe for such calls."""
    if not call.room(abi.Invoke.OUT):
        raise Refused(errno.ENOSPC, f"{call} has no room for an answer")
    d = file.ctx.query_device()
    known = {name: getattr(d, name) for name in abi.DEVICE.offsets if hasattr(d, name)}
    answer = abi.DEVICE.pack(
        **{name: value for name, value in known.items() if isinstance(value, int) and name != "max_cqe"},
        max_cqe=d.max_cqe - 1,  # libmlx5 asks for one more
        page_size_cap=-PAGE & (1 << 64) - 1, max_sge_rd=d.max_sge, max_res_rd_atom=d.max_qp * d.max_qp_rd_atom,
        device_cap_flags=_CAPABILITIES, device_cap_flags_ex=_CAPABILITIES, atomic_cap=_ATOMIC_HCA,
        response_length=abi.DEVICE.size,
    )
    call.put(abi.Invoke.OUT, answer)


@method(Object.DEVICE, Method.QUERY_PORT, abi.QueryPort)
def query_port(file: OpenFile, call: Call) -> None:
    port = file.ctx.query_port(call.number(abi.QueryPort.PORT_NUM))
    ethernet = port.link_layer == LinkLayer.ETHERNET
    up = port.state == PortState.ACTIVE
    answer = abi.PORT.pack(
        port_cap_flags=abi.IP_BASED_GIDS if ethernet else 0, max_msg_sz=_LONGEST_MESSAGE, gid_tbl_len=port.gid_tbl_len,
        pkey_tbl_len=1, lid=port.lid, sm_lid=port.sm_lid, state=port.state, max_mtu=MTU_CODES[port.max_mtu],
        active_mtu=MTU_CODES[port.active_mtu], lmc=port.lmc, max_vl_num=1, active_width=port.active_width,
        active_speed=port.active_speed, phys_state=abi.PHYSICALLY_UP if up else abi.PHYSICALLY_DOWN,
        link_layer=port.link_layer, flags=_GRH_REQUIRED if ethernet else 0,
    )
    call.put(abi.QueryPort.RESP, answer)


def _gid_entry(file: OpenFile, port: int, index: int) -> bytes | None:
    """Return an entry of the GID table, or None if it is empty."""
    gid = file.ctx.query_gid(port, index)
    if not any(gid):
        return None
    return abi.GID_ENTRY.pack(gid=gid, gid_index=index, port_num=port, gid_type=file.ctx.gid_type(port, index))


@method(Object.DEVICE, Method.QUERY_GID_ENTRY, abi.Gid)
def query_gid_entry(file: OpenFile, call: Call) -> None:
    entry = _gid_entry(file, call.number(abi.Gid.PORT), call.number(abi.Gid.GID_INDEX))
    if entry is None:
        raise Refused(errno.ENODATA, "the GID table has nothing at this index")
    call.put(abi.Gid.RESP_ENTRY, entry)


@method(Object.DEVICE, Method.QUERY_GID_TABLE, abi.GidTable)
def query_gid_table(file: OpenFile, call: Call) -> None:
    size = call.number(abi.GidTable.ENTRY_SIZE)
    most = call.room(abi.GidTable.RESP_ENTRIES) // size if size else 0
    found = [_gid_entry(file, 1, index) for index in range(file.ctx.query_port(1).gid_tbl_len)]
    filled = [entry for entry in found if entry]
    if len(filled) > most:
        raise Refused(errno.EINVAL, f"the GID table has {len(filled)} entries, and there is room for {most}")
    entries = [entry[:size].ljust(size, b"\0") for entry in filled]
    call.put(abi.GidTable.RESP_ENTRIES, b"".join(entries))
    call.put_number(abi.GidTable.RESP_NUM_ENTRIES, len(entries))


# --- doorbell pages ------------------------------------------------------------------------------------------------

_KINDS = {UarType.BLUEFLAME: UarAllocationType.BLUEFLAME, UarType.NONCACHE: UarAllocationType.NONCACHE}


@method(Object.UAR, abi.UAR_ALLOC, abi.Uar)
def alloc_uar(file: OpenFile, call: Call) -> None:
    """Allocate a page, and return the offset at which the program maps it."""
    kind = call.number(abi.Uar.TYPE)
    if kind not in list(UarType):
        raise Refused(errno.EOPNOTSUPP, f"doorbell pages of type {kind} are not supported")
    uar = file.ctx.create_uar(_KINDS[UarType(kind)])
    file.uars[uar.page_id] = uar
    undo = ExitStack()
    undo.callback(file.uars.pop, uar.page_id)
    call.put_number(abi.Uar.MMAP_OFFSET, uar.page_id * PAGE)
    call.put_number(abi.Uar.MMAP_LENGTH, PAGE)
    call.put_number(abi.Uar.PAGE_ID, uar.page_id)
    call.name(abi.Uar.HANDLE, file.add(Object.UAR, uar, undo=undo))


@method(Object.UAR, abi.UAR_DESTROY, (abi.Uar.HANDLE,))
def free_uar(file: OpenFile, call: Call) -> None:
    file.remove(Object.UAR, call.number(abi.Uar.HANDLE))


def map_page(file: OpenFile, offset: int, nbytes: int) -> int:
    """Return the address of a doorbell page. Refused with EINVAL if there is none at this offset."""
    uar = file.uars.get(offset // PAGE)
    if uar is None or offset % PAGE or nbytes != PAGE:
        raise Refused(errno.EINVAL, f"there is nothing to map at offset {offset:#x}: only doorbell pages are")
    return uar.page.base_addr
