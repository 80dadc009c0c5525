"""Event queue entries: what a device tells without being asked."""

from enum import IntEnum


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
