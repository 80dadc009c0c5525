"""Convert refusals of rdma-core and the firmware to errors that say what to do."""

from __future__ import annotations

import ctypes
import errno
import os

from ...errors import (
    DeviceFatalError,
    DocaError,
    DriverError,
    InUseError,
    NoMemoryError,
    NotPermittedError,
    NotSupportedError,
)
from ...formats import commands as cmd
from ...formats.commands import Opcode, Status

# errno → the error class, and what to do.
_BY_ERRNO: dict[int, tuple[type[DocaError], str]] = {
    errno.EPERM:      (NotPermittedError, "the process lacks a privilege (see docs/hardware.md)"),
    errno.EACCES:     (NotPermittedError, "the process may not use the device's node under /dev/infiniband"),
    errno.ENOMEM:     (NoMemoryError, "it cannot pin so much memory: raise the limit (ulimit -l)"),
    errno.EBUSY:      (InUseError, "something still uses it: close that first"),
    errno.ENODEV:     (DeviceFatalError, "the device is gone: close it, and open it again when it is back"),
    errno.EIO:        (DeviceFatalError, "the device is gone or has failed, dmesg says why: open it again"),
    errno.ENXIO:      (DeviceFatalError, "the device does not answer, dmesg says why: open it again when it does"),
    errno.ENOLINK:    (DeviceFatalError, "the device does not answer, dmesg says why: open it again when it does"),
    errno.EOPNOTSUPP: (NotSupportedError, "this device, its driver or this kernel does not have it"),
    errno.ENOSYS:     (NotSupportedError, "this kernel or library does not have it"),
    errno.EPROTONOSUPPORT: (NotSupportedError, "this kernel or driver does not have it"),
}
GONE = (errno.ENODEV, errno.ENXIO, errno.ENOLINK, errno.EIO)
# Before Linux 5.18 the kernel does not report a command's status: these are the statuses behind each errno.
_UNTOLD = {
    errno.EIO:    (Status.INTERNAL_ERR, Status.BAD_SYS_STATE, Status.BAD_INPUT_LEN, Status.BAD_OUTPUT_LEN),
    errno.EINVAL: (Status.BAD_OP, Status.BAD_PARAM, Status.BAD_RESOURCE, Status.BAD_RES_STATE, Status.BAD_INDEX,
                   Status.BAD_QP_STATE, Status.BAD_PKT),
    errno.ENOMEM: (Status.EXCEED_LIM,),
    errno.EAGAIN: (Status.NO_RESOURCES,),
}

# PRM, "Command status".
_MEANING = {
    Status.INTERNAL_ERR:   "the firmware has an internal error",
    Status.BAD_OP:         "the firmware does not know the command, or the device is not configured for it",
    Status.BAD_PARAM:      "a parameter is out of range or not supported by this firmware",
    Status.BAD_SYS_STATE:  "the device is not in a state for it",
    Status.BAD_RESOURCE:   "an object that the command names does not exist",
    Status.RESOURCE_BUSY:  "an object that the command names is in use",
    Status.EXCEED_LIM:     "it exceeds a limit of the device",
    Status.BAD_RES_STATE:  "an object that the command names is in the wrong state",
    Status.BAD_INDEX:      "an index is out of range",
    Status.NO_RESOURCES:   "the device has no more of these",
    Status.BAD_QP_STATE:   "the queue pair is in another state than the transition starts from",
    Status.BAD_PKT:        "the packet is malformed",
    Status.BAD_OUTS_CQES:  "the queue still has outstanding completions",
    Status.BAD_INPUT_LEN:  "the input mailbox has a length that this firmware does not know",
    Status.BAD_OUTPUT_LEN: "the output mailbox is too short for this firmware",
}


def errno_of(result: int) -> int:
    """Return the errno of a failed function. Some return it, with either sign; others return -1 and set it."""
    if result == -1:
        return ctypes.get_errno()
    return abs(result)


def refused(what: str, code: int) -> DocaError:
    """Return the error for an errno."""
    kind, cure = _BY_ERRNO.get(code, (DriverError, "dmesg may say more"))
    name = errno.errorcode.get(code, f"errno {code}")
    return kind(f"{what}: {os.strerror(code)} ({name}): {cure}")


def command_name(mailbox: bytes) -> str:
    """Return the name of a mailbox's command."""
    opcode = int.from_bytes(mailbox[:2], "big")
    return Opcode(opcode).name if opcode in list(Opcode) else f"command {opcode:#05x}"


def command_refused(device: str, mailbox: bytes, out: bytes, code: int) -> DocaError:
    """Return the error for a refused command: by the firmware's status, or else by the kernel's errno."""
    name = command_name(mailbox)
    status, syndrome = cmd.OUT.get(out, "status"), cmd.OUT.get(out, "syndrome")
    if status == Status.OK and code in _UNTOLD:
        may_be = " or ".join(status.name for status in _UNTOLD[code])
        return DriverError(
            f"{name} on {device}: {os.strerror(code)} ({errno.errorcode[code]}): refused by the kernel, or by firmware "
            f"with status {may_be}, which this kernel does not hand on; dmesg says which"
        )
    if status == Status.OK:  # the command did not reach the firmware
        return refused(f"{name} on {device}", code)
    known = status in list(Status)
    return DriverError(
        f"{name} failed with status {Status(status).name if known else 'unknown'} ({status:#04x}), "
        f"syndrome {syndrome:#x}: {_MEANING.get(Status(status), '') if known else 'not one that the PRM names'}; "
        "the syndrome is the firmware's own number, which dmesg shows, too",
        status, syndrome,
    )
