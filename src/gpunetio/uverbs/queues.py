"""Calls about completion queues, queue pairs, shared receive queues and address handles.

libmlx5 allocates rings and doorbell records, and passes their addresses.
"""

from __future__ import annotations

import errno
import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce
from operator import or_

import numpy as np

from ..enums import Access, AddrType, CqOverrun, LinkLayer, QpAtomicType, QpAttrMask, QpState, QpType
from ..errors import NotFoundError
from ..fabric.frames import HOP_LIMIT
from ..formats.commands import CQ_RESIZE, MODIFY_CQ_IN, MTU_CODES, MTU_OF_CODE, OUT, CqResize, Opcode
from ..formats.cqe import CQE_SIZES
from ..formats.packet import FLOW_LABEL_MASK
from ..formats.wqe import ATOMIC_SEG, AV_SEG, CTRL_SEG, DATA_SEG, SEGMENT, WQEBB
from ..memory import PAGE, round_up
from ..providers.plain_verbs import Route
from ..verbs import CQ, PD, QP, SRQ, AhAttr, QpAttr
from ..verbs.events import OF_CQ, OF_QP, OF_SRQ
from ..verbs.qp_state import Transition, transition
from ..verbs.umem import UMEM
from . import abi
from .abi import Object, QpKind, QpMask, SrqMask, Write
from .call import Call, Refused, bytes_at
from .events import mark_unarmed, tell_completions, tell_errors
from .files import OpenFile
from .memory import pinned
from .methods import command, method
from .qp_rules import Rule, check, rule_of

logger: logging.Logger = logging.getLogger("gpunetio.uverbs")

_RECORD = 8  # bytes of a doorbell record
_IGNORE_OVERRUN = 2  # IB_UVERBS_CQ_FLAGS_IGNORE_OVERRUN
_SIG_ALL = 1 << 12  # IB_UVERBS_QP_CREATE_SQ_SIG_ALL
_BLOCK_MULTICAST_LOOPBACK = 1 << 1  # IB_UVERBS_QP_CREATE_BLOCK_MULTICAST_LOOPBACK: there is no multicast
# Scatter to CQE, and flags that mean nothing to the device.
_QP_FLAGS = abi.QP_SCATTER_CQE | abi.QP_ALLOW_SCATTER_CQE | abi.QP_PACKET_BASED_CREDIT | abi.QP_UAR_PAGE_INDEX
_TYPES = {QpKind.RC: QpType.RC, QpKind.UC: QpType.UC, QpKind.UD: QpType.UD}
_MOST_SHIFT = 32  # log2 of the bytes of a receive WQE, as mlx5_ib limits it (set_rq_size)
# enum ib_uverbs_qp_type (rdma/ib_user_verbs.h); mlx5 has DC as the driver's own kind
_OTHER_KINDS = {8: "raw packets", 9: "XRC (sending)", 10: "XRC (receiving)", 255: "DC"}
_MIGRATED = 0  # IBV_MIG_MIGRATED


def _umem(file: OpenFile, address: int, nbytes: int, undo: ExitStack) -> tuple[UMEM, int]:
    """Register the pages of a range that libmlx5 has allocated. Return the UMEM, and the offset of the range in it."""
    start = address & -PAGE
    nbytes = round_up(address - start + nbytes, PAGE)
    with pinned(start, nbytes, Access.LOCAL_WRITE):
        umem = file.ctx.register_umem(start, nbytes=nbytes)
    undo.callback(umem.close)
    return umem, address - start


# --- completion queues -----------------------------------------------------------------------------------------------


def _ring_entries(file: OpenFile, asked: int) -> int:
    """Return the entries of a ring for this many completions and one more. Refused with EINVAL if it is too large."""
    most = file.ctx.query_device().max_cqe
    if (entries := 1 << asked.bit_length()) > most:
        raise Refused(errno.EINVAL, f"{asked} completions: a queue has {most - 1} at most")
    return entries


@method(Object.CQ, abi.CREATE, abi.CreateCq)
def create_cq(file: OpenFile, call: Call) -> None:
    request = call.take(abi.UHW_IN, abi.MLX5_CREATE_CQ)
    entries = _ring_entries(file, call.number(abi.CreateCq.CQE))
    size, flags = int(request["cqe_size"]), call.number(abi.CreateCq.FLAGS, 0)
    if request["cqe_comp_en"] or int(request["flags"]) & ~abi.CQ_UAR_PAGE_INDEX or flags & ~_IGNORE_OVERRUN:
        raise Refused(errno.EOPNOTSUPP, "completions that are compressed or have timestamps are not supported")
    if not int(request["flags"]) & abi.CQ_UAR_PAGE_INDEX:
        raise Refused(errno.EOPNOTSUPP, "this libmlx5 does not name the doorbell page of a completion queue")
    with ExitStack() as undo:
        mark_unarmed(int(request["db_addr"]))
        cq = file.ctx.create_cq(
            entries, cqe_size=size,
            external_umem=_umem(file, int(request["buf_addr"]), entries * size, undo),
            external_dbr_umem=_umem(file, int(request["db_addr"]), _RECORD, undo),
            external_uar=file.uar(int(request["uar_page_index"])),
            comp_vector=call.number(abi.CreateCq.COMP_VECTOR),
            overrun=CqOverrun.ENABLE if flags & _IGNORE_OVERRUN else CqOverrun.DISABLE,
        )
        undo.callback(cq.close)
        subscriber = file.pump.subscriber(call.number(abi.CreateCq.USER_HANDLE))
        tell_errors(file, cq, OF_CQ, subscriber)
        if abi.CreateCq.COMP_CHANNEL in call:
            tell_completions(file, call.number(abi.CreateCq.COMP_CHANNEL), cq, subscriber)
        call.put_number(abi.CreateCq.RESP_CQE, entries - 1)
        call.put_number(abi.UHW_OUT, cq.cqn)
        call.name(abi.CreateCq.HANDLE, file.add(Object.CQ, cq, subscriber, undo.pop_all()))


@method(Object.CQ, abi.DESTROY, (abi.DESTROYED, abi.DESTROY_RESP))
def destroy_cq(file: OpenFile, call: Call) -> None:
    handle = call.number(abi.DESTROYED)
    cq: CQ = file.get(Object.CQ, handle)
    _check_free(cq)
    call.put(abi.DESTROY_RESP, file.reported(file.remove(Object.CQ, handle)))


@command(Write.RESIZE_CQ)
def resize_cq(file: OpenFile, call: Call) -> None:
    """Move a CQ to another ring. libmlx5 then copies the CQEs in the old one, up to the entry that marks its end."""
    request, ring = call.take(abi.Invoke.IN, abi.RESIZE_CQ), call.take(abi.UHW_IN, abi.MLX5_RESIZE_CQ)
    held = file.held(Object.CQ, int(request["cq_handle"]))
    cq: CQ = held.what
    entries, size = _ring_entries(file, int(request["cqe"])), int(ring["cqe_size"])
    if size not in CQE_SIZES:
        raise Refused(errno.EINVAL, f"completions have {' or '.join(map(str, CQE_SIZES))} bytes, not {size}")
    with ExitStack() as undo:
        umem, offset = _umem(file, int(ring["buf_addr"]), entries * size, undo)
        mailbox = MODIFY_CQ_IN.pack(
            opcode=Opcode.MODIFY_CQ, op_mod=CQ_RESIZE, cqn=cq.cqn, resize_field_select=sum(CqResize),
            cq_context={"log_cq_size": entries.bit_length() - 1, "cqe_sz": CQE_SIZES.index(size)},
            cq_umem_id=umem.umem_id, cq_umem_offset=offset, cq_umem_valid=1,
        )
        file.provider.devx_obj_modify(cq.devx_handle, bytes(mailbox), OUT.size)
        undo.callback(held.undo.close)  # closed before the new ring
        held.undo = undo.pop_all()
    call.put_number(abi.Invoke.OUT, entries - 1)


def _check_free(what: CQ | SRQ) -> None:
    if what.users:
        raise Refused(errno.EBUSY, f"{what} is still used")


# --- queue pairs -----------------------------------------------------------------------------------------------------


@method(Object.QP, abi.CREATE, abi.CreateQp)
def create_qp(file: OpenFile, call: Call) -> None:
    request, cap = call.take(abi.UHW_IN, abi.MLX5_CREATE_QP), call.take(abi.CreateQp.CAP, abi.QP_CAP)
    kind, flags = call.number(abi.CreateQp.TYPE), call.number(abi.CreateQp.FLAGS, 0)
    if kind not in list(QpKind):
        what = _OTHER_KINDS.get(kind, "an unknown kind")
        raise Refused(errno.EOPNOTSUPP, f"queue pairs for {what} (type {kind}) are not supported: RC, UC and UD are")
    for given, known in ((flags, _SIG_ALL | _BLOCK_MULTICAST_LOOPBACK), (int(request["flags"]), _QP_FLAGS)):
        if unknown := given & ~known:
            raise Refused(errno.EOPNOTSUPP, f"flags {unknown:#x} of queue pairs are not supported")
    if abi.CreateQp.SOURCE_QPN in call:
        raise Refused(errno.EOPNOTSUPP, "queue pairs with the number of another one are not supported")
    if not int(request["flags"]) & abi.QP_UAR_PAGE_INDEX:
        raise Refused(errno.EOPNOTSUPP, "this libmlx5 does not name the doorbell page of a queue pair")
    qp_type = _TYPES[QpKind(kind)]
    # Whether payload goes into completions, decided as in mlx5_ib.
    scatters = bool(int(request["flags"]) & abi.QP_SCATTER_CQE) and not qp_type.datagrams
    all_complete = bool(int(request["flags"]) & abi.QP_ALLOW_SCATTER_CQE or flags & _SIG_ALL)
    sends, receives, shift = (int(request[name]) for name in ("sq_wqe_count", "rq_wqe_count", "rq_wqe_shift"))
    if shift > _MOST_SHIFT:
        raise Refused(errno.EINVAL, f"receives of 1 << {shift} bytes: there are none beyond 1 << {_MOST_SHIFT}")
    stride = 1 << shift if receives else 0
    nbytes = receives * stride + sends * WQEBB
    srq = file.get(Object.SRQ, call.number(abi.CreateQp.SRQ_HANDLE)) if abi.CreateQp.SRQ_HANDLE in call else None
    with ExitStack() as undo:
        qp = file.get(Object.PD, call.number(abi.CreateQp.PD_HANDLE)).create_qp(
            qp_type=qp_type,
            sq_wr=sends * WQEBB // _smallest_wqe(qp_type), rq_wr=receives, receive_max_sges=max(1, stride // SEGMENT),
            send_cq=file.get(Object.CQ, call.number(abi.CreateQp.SEND_CQ_HANDLE)),
            receive_cq=file.get(Object.CQ, call.number(abi.CreateQp.RECV_CQ_HANDLE)),
            srq=srq, user_index=int(request["uidx"]),
            external_umem=_umem(file, int(request["buf_addr"]), nbytes, undo),
            external_dbr_umem=_umem(file, int(request["db_addr"]), _RECORD, undo),
            external_uar=file.uar(int(request["bfreg_index"])),
            external_datapath=True, cqe_inline=scatters,
            cqe_inline_responses=scatters and all_complete and qp_type == QpType.RC,
        )
        qp.rules = _linux_transition
        undo.callback(qp.close)
        subscriber = file.pump.subscriber(call.number(abi.CreateQp.USER_HANDLE))
        tell_errors(file, qp, OF_QP, subscriber)
        cap["max_recv_wr"] = receives
        call.put(abi.CreateQp.RESP_CAP, cap.tobytes())
        call.put_number(abi.CreateQp.RESP_QP_NUM, qp.qpn)
        call.put_number(abi.UHW_OUT, int(request["bfreg_index"]))
        file.caps[qp] = cap
        undo.callback(file.caps.pop, qp)
        call.name(abi.CreateQp.HANDLE, file.add(Object.QP, qp, subscriber, undo.pop_all()))


def _smallest_wqe(qp_type: QpType) -> int:
    """Return the bytes of a send WQE with one data segment, the unit in which `create_qp` counts a ring."""
    header = AV_SEG.size if qp_type.datagrams else SEGMENT + ATOMIC_SEG.size
    return round_up(CTRL_SEG.size + header + DATA_SEG.size, WQEBB)


@method(Object.QP, abi.DESTROY, (abi.DESTROYED, abi.DESTROY_RESP))
def destroy_qp(file: OpenFile, call: Call) -> None:
    call.put(abi.DESTROY_RESP, file.reported(file.remove(Object.QP, call.number(abi.DESTROYED))))


# The attributes of `ibv_modify_qp`, with their names in the structure and in `QpAttr`.
_MASKS = {
    QpMask.STATE:              (QpAttrMask.NEXT_STATE,         "qp_state",           "next_state"),
    QpMask.CUR_STATE:          (QpAttrMask.CURRENT_STATE,      "cur_qp_state",       "current_state"),
    QpMask.PKEY_INDEX:         (QpAttrMask.PKEY_INDEX,         "pkey_index",         "pkey_index"),
    QpMask.PORT:               (QpAttrMask.PORT_NUM,           "port_num",           "port_num"),
    QpMask.QKEY:               (QpAttrMask.QKEY,               "qkey",               "qkey"),
    QpMask.TIMEOUT:            (QpAttrMask.ACK_TIMEOUT,        "timeout",            "ack_timeout"),
    QpMask.RETRY_CNT:          (QpAttrMask.RETRY_CNT,          "retry_cnt",          "retry_cnt"),
    QpMask.RNR_RETRY:          (QpAttrMask.RNR_RETRY,          "rnr_retry",          "rnr_retry"),
    QpMask.RQ_PSN:             (QpAttrMask.RQ_PSN,             "rq_psn",             "rq_psn"),
    QpMask.SQ_PSN:             (QpAttrMask.SQ_PSN,             "sq_psn",             "sq_psn"),
    QpMask.MAX_QP_RD_ATOMIC:   (QpAttrMask.MAX_QP_RD_ATOMIC,   "max_rd_atomic",      "max_rd_atomic"),
    QpMask.MAX_DEST_RD_ATOMIC: (QpAttrMask.MAX_DEST_RD_ATOMIC, "max_dest_rd_atomic", "max_dest_rd_atomic"),
    QpMask.MIN_RNR_TIMER:      (QpAttrMask.MIN_RNR_TIMER,      "min_rnr_timer",      "min_rnr_timer"),
    QpMask.DEST_QPN:           (QpAttrMask.DEST_QP_NUM,        "dest_qp_num",        "dest_qp_num"),
}
STATES = {
    0: QpState.RST, 1: QpState.INIT, 2: QpState.RTR, 3: QpState.RTS, 4: QpState.SQD, 6: QpState.ERR,
}
_STATE_CODE = {state: code for code, state in STATES.items()}
_OF_STATE = QpMask.STATE, QpMask.CUR_STATE
_RIGHTS = QpAttrMask.ALLOW_REMOTE_WRITE | QpAttrMask.ALLOW_REMOTE_READ | QpAttrMask.ATOMIC_MODE
_OURS = {
    **{bit: ours for bit, (ours, _, _) in _MASKS.items()},
    QpMask.PATH_MTU: QpAttrMask.PATH_MTU, QpMask.ACCESS_FLAGS: _RIGHTS, QpMask.AV: QpAttrMask.AH_ATTR,
}
_KNOWN = sum(_OURS) | QpMask.PATH_MIG_STATE


def _linux_transition(current: QpState, following: QpState, qp_type: QpType) -> Transition:
    """Return the command that moves a queue pair, with the attributes that Linux takes."""
    rule = rule_of(current, following, qp_type) or Rule()
    required, optional = (
        reduce(or_, (_OURS[bit] for bit in mask if bit in _OURS), QpAttrMask(0)) for mask in rule
    )
    return replace(transition(current, following, qp_type), required=required, optional=optional)


@command(Write.MODIFY_QP)
@command(Write.MODIFY_QP | abi.EXTENDED)
def modify_qp(file: OpenFile, call: Call) -> None:
    request = call.take(abi.Invoke.IN, abi.MODIFY_QP)
    qp: QP = file.get(Object.QP, int(request["qp_handle"]))
    asked = QpMask(int(request["attr_mask"]))
    current = _state(int(request["cur_qp_state"])) if QpMask.CUR_STATE in asked else qp.state
    check(current, _state(int(request["qp_state"])) if QpMask.STATE in asked else current, qp.type, asked)
    if unknown := int(asked) & ~_KNOWN:
        raise Refused(errno.EOPNOTSUPP, f"attributes {unknown:#x} of queue pairs are not supported")
    if QpMask.PATH_MIG_STATE in asked and int(request["path_mig_state"]) != _MIGRATED:
        raise Refused(errno.EOPNOTSUPP, "alternate paths of queue pairs are not supported")
    attr, mask = QpAttr(), QpAttrMask(0)
    for bit, (ours, theirs, name) in _MASKS.items():
        if bit in asked:
            value = int(request[theirs])
            if bit is QpMask.MAX_QP_RD_ATOMIC and value:
                value = 1 << (value - 1).bit_length()  # a power of two, rounded up (mlx5_ib: log_sra_max)
            setattr(attr, name, STATES[value] if bit in _OF_STATE else value)
            mask |= ours
    if QpMask.PATH_MTU in asked:
        if int(request["path_mtu"]) not in MTU_OF_CODE:
            raise Refused(errno.EINVAL, f"there is no MTU {int(request['path_mtu'])}")
        attr.path_mtu, mask = MTU_OF_CODE[int(request["path_mtu"])], mask | QpAttrMask.PATH_MTU
    if QpMask.ACCESS_FLAGS in asked:
        rights = int(request["qp_access_flags"])
        attr.allow_remote_write = bool(rights & Access.REMOTE_WRITE)
        attr.allow_remote_read = bool(rights & Access.REMOTE_READ)
        attr.allow_remote_atomic = QpAtomicType.IB_SPEC if rights & Access.REMOTE_ATOMIC else QpAtomicType.NONE
        mask |= _RIGHTS
    if QpMask.AV in asked:
        attr.ah_attr, mask = _path_of(file, abi.QP_DEST.at(request["dest"].tobytes())), mask | QpAttrMask.AH_ATTR
    qp.modify(attr, mask)


def _state(code: int) -> QpState:
    if code not in STATES:
        raise Refused(errno.EINVAL, f"there is no state {code} of queue pairs")
    return STATES[code]


def _path_of(file: OpenFile, dest: np.ndarray) -> AhAttr:
    """Return the path named by an address handle, or by the address of a connected queue pair.

    As in Linux (`rdma_check_ah_attr`), the port must exist, and on Ethernet a path must have a GID. The hop limit is
    that of the route (`ib_resolve_eth_dmac`), whatever the program asks for. mlx5_ib takes the lower 20 bits of the
    flow label.
    """
    device = file.ctx.query_device()
    ethernet = device.link_layer == LinkLayer.ETHERNET
    if not 1 <= dest["port_num"] <= device.phys_port_cnt:
        raise Refused(errno.EINVAL, f"ah_attr.port_num {dest['port_num']}: the last port is {device.phys_port_cnt}")
    if ethernet and not dest["is_global"]:
        raise Refused(errno.EINVAL, "ah_attr.is_global is 0: on Ethernet, a path has a GID; set is_global and grh")
    kind = None if ethernet else AddrType.IB_GRH if dest["is_global"] else AddrType.IB_NO_GRH
    return AhAttr(
        gid=dest["dgid"].tobytes(), addr_type=kind, dlid=int(dest["dlid"]), sl=int(dest["sl"]),
        sgid_index=int(dest["sgid_index"]), hop_limit=HOP_LIMIT if ethernet else int(dest["hop_limit"]),
        traffic_class=int(dest["traffic_class"]), flow_label=int(dest["flow_label"]) & FLOW_LABEL_MASK,
    )


def values_of(attr: QpAttr) -> dict[str, int | bytes]:
    """Return attributes by their names in the kernel's structures, except states, rights and the path."""
    values: dict[str, int | bytes] = {
        theirs: int(getattr(attr, name)) for bit, (_, theirs, name) in _MASKS.items() if bit not in _OF_STATE
    }
    return values | {"path_mtu": MTU_CODES[int(attr.path_mtu)]}


@command(Write.QUERY_QP)
def query_qp(file: OpenFile, call: Call) -> None:
    request = call.take(abi.Invoke.IN, abi.QUERY_QP)
    qp: QP = file.get(Object.QP, int(request["qp_handle"]))
    attr, _ = qp.query()
    values = values_of(attr)
    rights = (
        Access.REMOTE_WRITE * attr.allow_remote_write | Access.REMOTE_READ * attr.allow_remote_read
        | Access.REMOTE_ATOMIC * (attr.allow_remote_atomic != QpAtomicType.NONE)
    )
    values |= {
        "qp_state": _STATE_CODE[attr.current_state], "cur_qp_state": _STATE_CODE[attr.current_state],
        "qp_access_flags": rights, "path_mig_state": _MIGRATED,
        "sq_draining": int(attr.sq_draining), "sq_sig_all": int(qp.init_attr.sq_sig_all),
    }
    if (path := attr.ah_attr) is not None:
        values["dest"] = abi.QP_DEST.pack(
            dgid=bytes(path.gid), dlid=path.dlid, sgid_index=path.sgid_index, hop_limit=path.hop_limit,
            traffic_class=path.traffic_class, flow_label=path.flow_label, sl=path.sl,
            is_global=int(any(path.gid)), port_num=attr.port_num,
        )
    cap = file.caps[qp]
    values |= {name: int(cap[name]) for name in abi.QP_CAP.offsets}
    call.put(abi.Invoke.OUT, abi.QUERY_QP_RESP.pack(**values))


# --- shared receive queues -------------------------------------------------------------------------------------------


@method(Object.SRQ, abi.CREATE, abi.CreateSrq)
def create_srq(file: OpenFile, call: Call) -> None:
    request = call.take(abi.UHW_IN, abi.MLX5_CREATE_SRQ)
    if call.number(abi.CreateSrq.TYPE) or int(request["flags"]):
        raise Refused(errno.EOPNOTSUPP, "shared receive queues of XRC, tag matching and signatures are not supported")
    asked, sges = call.number(abi.CreateSrq.MAX_WR), call.number(abi.CreateSrq.MAX_SGE)
    # Round up as mlx5_create_srq does: one more than asked for. If that is 1, libmlx5 posts nothing, but the NIC still
    # needs a ring of 2.
    entries = 1 << asked.bit_length()
    in_ring = max(2, entries)
    stride = 1 << (SEGMENT + sges * SEGMENT - 1).bit_length()
    with ExitStack() as undo:
        srq = file.get(Object.PD, call.number(abi.CreateSrq.PD_HANDLE)).create_srq(
            in_ring - 1, receive_max_sges=stride // SEGMENT - 1, external_datapath=True,
            external_umem=_umem(file, int(request["buf_addr"]), in_ring * stride, undo),
            external_dbr_umem=_umem(file, int(request["db_addr"]), _RECORD, undo),
        )
        undo.callback(srq.close)
        subscriber = file.pump.subscriber(call.number(abi.CreateSrq.USER_HANDLE))
        tell_errors(file, srq, OF_SRQ, subscriber)
        if limit := call.number(abi.CreateSrq.LIMIT):
            srq.modify(srq_limit=limit)
        call.put_number(abi.CreateSrq.RESP_MAX_WR, entries - 1)
        call.put_number(abi.CreateSrq.RESP_MAX_SGE, sges)
        call.put_number(abi.UHW_OUT, srq.srqn)
        call.name(abi.CreateSrq.HANDLE, file.add(Object.SRQ, srq, subscriber, undo.pop_all()))


@method(Object.SRQ, abi.DESTROY, (abi.DESTROYED, abi.DESTROY_RESP))
def destroy_srq(file: OpenFile, call: Call) -> None:
    handle = call.number(abi.DESTROYED)
    srq: SRQ = file.get(Object.SRQ, handle)
    _check_free(srq)
    call.put(abi.DESTROY_RESP, file.reported(file.remove(Object.SRQ, handle)))


@command(Write.MODIFY_SRQ)
def modify_srq(file: OpenFile, call: Call) -> None:
    request = call.take(abi.Invoke.IN, abi.MODIFY_SRQ)
    mask = SrqMask(int(request["attr_mask"]))
    if SrqMask.MAX_WR in mask:
        raise Refused(errno.EINVAL, "mlx5 does not resize shared receive queues")  # as mlx5_ib_modify_srq
    if SrqMask.LIMIT in mask:
        file.get(Object.SRQ, int(request["srq_handle"])).modify(srq_limit=int(request["srq_limit"]))


@command(Write.QUERY_SRQ)
def query_srq(file: OpenFile, call: Call) -> None:
    request = call.take(abi.Invoke.IN, abi.QUERY_SRQ)
    found = file.get(Object.SRQ, int(request["srq_handle"])).query()
    answer = abi.QUERY_SRQ_RESP.pack(max_wr=found.max_wr, max_sge=found.max_sge, srq_limit=found.srq_limit)
    call.put(abi.Invoke.OUT, answer)


# --- address handles -------------------------------------------------------------------------------------------------


@command(Write.CREATE_AH)
def create_ah(file: OpenFile, call: Call) -> None:
    """Create an address handle. libmlx5 needs only the peer's MAC from it."""
    request = call.take(abi.Invoke.IN, abi.CREATE_AH)
    dest = abi.AH_ATTR.at(request["attr"].tobytes())
    pd: PD = file.get(Object.PD, int(request["pd_handle"]))
    ah = pd.create_ah(_path_of(file, dest), port=int(dest["port_num"]))
    mac = ah.av[AV_SEG.rmac : AV_SEG.rmac + 6] if ah.av else bytes(6)
    answer = abi.CREATE_AH_RESP.pack(response_length=abi.CREATE_AH_RESP.size, dmac=mac)
    call.put_number(abi.Invoke.OUT, file.add(Object.AH, ah))
    call.put(abi.UHW_OUT, answer)


def reach(file: OpenFile, attributes: int) -> None:
    """Lay the path of an address handle that libmlx5 makes by itself, as it does on InfiniBand.

    The path stays until the file is closed. Refused with EHOSTUNREACH if no NIC has the LID.
    """
    if file.ctx.query_device().link_layer == LinkLayer.ETHERNET:
        return  # CREATE_AH follows
    dest = abi.AH_ATTR.at(bytes_at(attributes, abi.AH_ATTR.size))
    lid, port = int(dest["dlid"]), int(dest["port_num"])
    route = Route(
        dest["dgid"].tobytes(), lid, int(dest["sl"]), int(dest["sgid_index"]), int(dest["static_rate"]),
        int(dest["hop_limit"]), int(dest["traffic_class"]), bool(dest["is_global"]),
        int(dest["flow_label"]) & FLOW_LABEL_MASK,
    )
    try:
        laid = file.provider.create_ah(0, port, route).handle
    except NotFoundError as error:
        logger.warning("the program cannot send datagrams to LID %#x: %s", lid, error)
        raise
    if (before := file.ways.pop(lid, None)) is not None:  # it may have led to a NIC that is now gone
        file.provider.destroy_ah(before)
    file.ways[lid] = laid


@method(Object.AH, abi.DESTROY_ONLY, (abi.DESTROYED,))
def destroy_ah(file: OpenFile, call: Call) -> None:
    file.remove(Object.AH, call.number(abi.DESTROYED))
