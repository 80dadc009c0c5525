"""The extension of a queue pair's context (qpc_ext): whether the QP may copy memory with MMO WQEs."""

from __future__ import annotations

from ....formats import commands as cmd
from ....formats.commands import ServiceType, Status
from ..syndromes import CommandError, CommandSyndrome


def mmo_of(mailbox: bytes) -> int:
    """Return `mmo` of a CREATE_QP mailbox; 0 if it has no extension."""
    if not cmd.CREATE_QP_IN.get(mailbox, "qpc_ext"):
        return 0
    start = cmd.CREATE_QP_IN.offset("pas")
    if len(mailbox) < start + cmd.QPC_EXT.size:
        raise CommandError(
            Status.BAD_INPUT_LEN, CommandSyndrome.SHORT_INPUT,
            f"CREATE_QP with qpc_ext takes {start + cmd.QPC_EXT.size} bytes, the input has {len(mailbox)}",
        )
    mmo = int(cmd.QPC_EXT.get(mailbox, "mmo", start))
    check_mmo(mmo, cmd.CREATE_QP_IN.get(mailbox, "qpc.st"))
    return mmo


def check_mmo(mmo: int, service: int) -> None:
    """Refuse MMO on a QP that is not RC."""
    if mmo and service != ServiceType.RC:
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.SERVICE_TYPE,
            f"mmo on a queue pair of service type {service}: only RC (0) has DMA",
        )
