"""Calls of DEVX: command mailboxes, UMEMs, and their events (mlx5_user_ioctl_cmds.h)."""

from __future__ import annotations

import errno
import logging
import struct
from collections.abc import Callable
from contextlib import ExitStack, suppress

from ..errors import DriverError
from ..formats import commands as cmd
from ..formats import ethernet_queues as eth
from ..formats.commands import OUT, Opcode
from ..formats.events import EventType
from ..nic.control.command import opcode_of
from ..nic.control.syndromes import CommandError
from ..providers.soft import SoftProvider
from ..verbs import Handle
from . import abi
from .abi import Devx, DevxObject, EventFd, Object, Subscribe, Umem
from .call import Call, Refused
from .events import mark_unarmed
from .files import OpenFile
from .memory import access_of, pinned
from .methods import method

logger: logging.Logger = logging.getLogger("gpunetio.uverbs")

# Rings and records of a program are always in UMEMs. The kernel sets these bits for the program: UCX does not.
_TYPE_BYTES = 2  # of an event type, in a list
_RING_AND_RECORD = {"wq": {"wq_umem_valid": 1, "dbr_umem_valid": 1}}
_IN_UMEMS = {
    Opcode.CREATE_CQ:  (cmd.CREATE_CQ_IN,  {"cq_umem_valid": 1, "cq_context": {"dbr_umem_valid": 1}}),
    Opcode.MODIFY_CQ:  (cmd.MODIFY_CQ_IN,  {"cq_umem_valid": 1}),
    Opcode.CREATE_QP:  (cmd.CREATE_QP_IN,  {"wq_umem_valid": 1, "qpc": {"dbr_umem_valid": 1}}),
    Opcode.CREATE_RMP: (cmd.CREATE_RMP_IN, {"ctx": _RING_AND_RECORD}),
    Opcode.CREATE_SQ:  (eth.CREATE_SQ_IN,  {"ctx": _RING_AND_RECORD}),
    Opcode.CREATE_RQ:  (eth.CREATE_RQ_IN,  {"ctx": _RING_AND_RECORD}),
}


def _in_umems(call: Call) -> bytes:
    """Return the mailbox of a call. If it names rings, mark them as being in UMEMs."""
    mailbox = bytearray(call.data(DevxObject.IN))
    opcode = int.from_bytes(mailbox[:2], "big")
    if opcode in _IN_UMEMS:
        layout, said = _IN_UMEMS[Opcode(opcode)]
        if len(mailbox) >= layout.size:  # otherwise the NIC refuses it
            layout.update(mailbox, **said)
    return bytes(mailbox)


def _mark_unarmed(provider: SoftProvider, mailbox: bytes) -> None:
    """Mark the doorbell record of the completion queue that a mailbox creates as unarmed, unless it is in GPU memory.
    """
    if len(mailbox) < cmd.CREATE_CQ_IN.size:
        return
    context = cmd.CREATE_CQ_IN.get(mailbox, "cq_context")
    with suppress(CommandError, Refused):  # the NIC refuses invalid ones
        umems = provider.nic.control.umems
        mark_unarmed(umems.record(context["dbr_umem_id"], context["dbr_addr"], "the CQ doorbell record"))


def _carry_out(call: Call, out: int, execute: Callable[[int], bytes]) -> None:
    """Execute a mailbox, and answer with the device's output. If the device refuses it, answer with its status."""
    try:
        call.put(out, execute(call.room(out)))
    except DriverError as error:
        call.put(out, bytes(OUT.pack(status=error.status, syndrome=error.syndrome)))
        raise Refused(errno.EREMOTEIO, str(error)) from error  # as Linux does since 5.18


@method(Object.DEVX, abi.DEVX_OTHER, Devx)
def general_command(file: OpenFile, call: Call) -> None:
    mailbox = call.data(Devx.IN)
    _carry_out(call, Devx.OUT, lambda room: file.provider.general_cmd(mailbox, room))


@method(Object.DEVX, abi.DEVX_QUERY_EQN, (abi.EQN_VECTOR, abi.EQN_OUT))
def query_eqn(file: OpenFile, call: Call) -> None:
    call.put_number(abi.EQN_OUT, file.provider.query_eqn(call.number(abi.EQN_VECTOR)))


@method(Object.DEVX, abi.DEVX_QUERY_UAR, (abi.UAR_INDEX, abi.UAR_PAGE))
def query_uar(file: OpenFile, call: Call) -> None:
    """Answer with the device's number of a doorbell page, which is the number that the program knows."""
    call.put_number(abi.UAR_PAGE, file.uar(call.number(abi.UAR_INDEX)).page_id)


@method(Object.DEVX_OBJ, abi.DEVX_OBJ_CREATE, DevxObject)
def create_object(file: OpenFile, call: Call) -> None:
    provider: SoftProvider = file.provider
    mailbox = _in_umems(call)
    created: list[int] = []

    if opcode_of(mailbox) == Opcode.CREATE_CQ:
        _mark_unarmed(provider, mailbox)

    def execute(room: int) -> bytes:
        handle, answer = provider.devx_obj_create(mailbox, room)
        created.append(handle)
        return answer

    try:
        _carry_out(call, DevxObject.OUT, execute)
    except Refused as refused:
        if opcode_of(mailbox) == Opcode.CREATE_MKEY:
            logger.warning(
                "the NIC refuses a memory key: %s. UCX continues without such a key, and its puts may then write to a "
                "wrong address", refused,
            )
        raise
    undo = ExitStack()
    undo.callback(provider.devx_obj_destroy, created[0])
    call.name(DevxObject.HANDLE, file.add(Object.DEVX_OBJ, created[0], undo=undo))


@method(Object.DEVX_OBJ, abi.DEVX_OBJ_DESTROY, (DevxObject.HANDLE,))
def destroy_object(file: OpenFile, call: Call) -> None:
    file.remove(Object.DEVX_OBJ, call.number(DevxObject.HANDLE))


def _made(file: OpenFile, call: Call) -> int:
    """Return the NIC's handle of an object that DEVX or verbs has created."""
    what = file.anything(call.number(DevxObject.HANDLE))
    return what.devx_handle if isinstance(what, Handle) else int(what)


@method(Object.DEVX_OBJ, abi.DEVX_OBJ_MODIFY, DevxObject)
def modify_object(file: OpenFile, call: Call) -> None:
    handle, mailbox = _made(file, call), _in_umems(call)
    _carry_out(call, DevxObject.OUT, lambda room: file.provider.devx_obj_modify(handle, mailbox, room))


@method(Object.DEVX_OBJ, abi.DEVX_OBJ_QUERY, DevxObject)
def query_object(file: OpenFile, call: Call) -> None:
    handle, mailbox = _made(file, call), call.data(DevxObject.IN)
    _carry_out(call, DevxObject.OUT, lambda room: file.provider.devx_obj_query(handle, mailbox, room))


@method(Object.DEVX_UMEM, abi.DEVX_UMEM_REG, Umem)
def register_umem(file: OpenFile, call: Call) -> None:
    provider = file.provider
    access = access_of(call.number(Umem.ACCESS))
    start, nbytes = call.number(Umem.ADDR), call.number(Umem.LEN)
    if Umem.DMABUF_FD in call:
        umem = provider.reg_dmabuf_umem(call.descriptor(Umem.DMABUF_FD), start, nbytes, access)
    else:
        with pinned(start, nbytes, access):
            umem = provider.reg_umem(start, nbytes, access)
    undo = ExitStack()
    undo.callback(provider.dereg_umem, umem)
    call.put_number(Umem.OUT_ID, umem)
    call.name(Umem.HANDLE, file.add(Object.DEVX_UMEM, umem, undo=undo))


@method(Object.DEVX_UMEM, abi.DEVX_UMEM_DEREG, (Umem.HANDLE,))
def deregister_umem(file: OpenFile, call: Call) -> None:
    file.remove(Object.DEVX_UMEM, call.number(Umem.HANDLE))


@method(Object.DEVX_ASYNC_EVENT_FD, abi.DEVX_EVENT_FD_ALLOC, EventFd)
def create_event_channel(file: OpenFile, call: Call) -> None:
    """Create an event channel. The program reads the cookie of a subscription and, without OMIT_DATA, the EQE."""
    channel = file.provider.create_event_channel()
    devx = 1 if call.number(EventFd.FLAGS) & abi.OMIT_DATA else 2
    fd = file.pump.open_pipe(file.provider.event_channel(channel), devx)
    file.event_channels[fd] = channel
    call.name(EventFd.HANDLE, fd)


@method(Object.DEVX, abi.DEVX_SUBSCRIBE_EVENT, Subscribe)
def subscribe_events(file: OpenFile, call: Call) -> None:
    fd, numbers = call.number(Subscribe.FD_HANDLE), call.data(Subscribe.TYPE_NUM_LIST)
    if fd not in file.event_channels:
        raise Refused(errno.EBADF, f"descriptor {fd} is no event channel of this device")
    if Subscribe.FD_NUM in call:
        raise Refused(errno.EOPNOTSUPP, "events by eventfd are not supported")
    if len(numbers) % _TYPE_BYTES:
        raise Refused(errno.EINVAL, f"{len(numbers)} bytes are no list of types of events")
    types = struct.unpack(f"={len(numbers) // _TYPE_BYTES}H", numbers)
    if unknown := [number for number in types if number not in list(EventType)]:
        raise Refused(errno.EINVAL, f"there are no events of type {unknown[0]:#x}")
    wanted = [EventType(number) for number in types]
    handle = file.get(Object.DEVX_OBJ, call.number(Subscribe.OBJ_HANDLE)) if Subscribe.OBJ_HANDLE in call else None
    place = file.event_channels[fd], handle
    if place not in file.subscribers:
        file.subscribers[place] = file.pump.devx_subscriber()
    cookie = call.number(Subscribe.COOKIE, 0)
    file.pump.set_cookies(file.subscribers[place], wanted, cookie)
    file.provider.subscribe(file.event_channels[fd], handle, wanted, file.subscribers[place])
