"""Event queue entries: what a device reports without being asked."""

from enum import IntEnum

import numpy as np

from .layout import Entry


class EventType(IntEnum):
    """eqe.type (PRM, "Event types")."""

    COMPLETION         = 0x00
    PATH_MIGRATED      = 0x01
    COMM_EST           = 0x02
    SQ_DRAINED         = 0x03
    CQ_ERROR           = 0x04
    WQ_CATAS_ERROR     = 0x05
    PATH_MIGRATE_FAILED = 0x07
    INTERNAL_ERROR     = 0x08
    PORT_CHANGE        = 0x09
    WQ_INVAL_REQ_ERROR = 0x10
    WQ_ACCESS_ERROR    = 0x11
    SRQ_CATAS_ERROR    = 0x12
    SRQ_LAST_WQE       = 0x13
    SRQ_RQ_LIMIT       = 0x14


class PortSubtype(IntEnum):
    """eqe.sub_type of PORT_CHANGE."""

    DOWN   = 1
    ACTIVE = 4


class CqErrorSyndrome(IntEnum):
    """eqe.syndrome of CQ_ERROR."""

    OVERRUN       = 0x1
    ACCESS_VIOLATION = 0x2


class EventQueueType(IntEnum):
    """eqe.queue_type of events of work queues: what `number` names."""

    QP = 0
    RQ = 1
    SQ = 2


# An event queue entry. `number` is that of the QP, SQ, RQ or SRQ, or of the CQ of a COMPLETION. CQ_ERROR has its CQ in
# `cqn`. The upper four bits of `port` are the number of a port.
EQE = Entry("eqe", 64, """
    type                1  u8
    sub_type            3  u8
    cqn                32  be32
    port               40  u8
    syndrome           43  u8
    queue_type         52  u8
    number             56  be32
    signature          62  u8
    owner              63  u8
""")
PORT_SHIFT = 8
PORT_BITS = 4  # of `port`, below the port's number


def eqe(kind: EventType, number: int, syndrome: int = 0) -> bytes:
    """Return the 64 bytes of an event. `number` is that of its object; for PORT_CHANGE, port << 8 | PortSubtype.

    `syndrome` is that of CQ_ERROR, and for events of work queues an EventQueueType.
    """
    entry = np.zeros((), EQE.dtype)
    entry["type"] = kind
    if kind is EventType.CQ_ERROR:
        entry["cqn"], entry["syndrome"] = number, syndrome
    elif kind is EventType.PORT_CHANGE:
        entry["port"], entry["sub_type"] = number >> PORT_SHIFT << PORT_BITS, number & (1 << PORT_SHIFT) - 1
    else:
        entry["number"], entry["queue_type"] = number, syndrome
    return entry.tobytes()
