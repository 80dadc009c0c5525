"""The reasons why the command interpreter refuses a mailbox.

The status byte is the PRM's. A card's 32-bit syndrome is an undocumented firmware constant; the software NIC's is one
of these numbers, and the error's detail explains it in words.
"""

from __future__ import annotations

from enum import IntEnum

from ...formats.commands import Status


class CommandSyndrome(IntEnum):
    """Syndromes of the software NIC."""

    NONE                = 0
    UNKNOWN_OPCODE      = 0x5F0001
    SHORT_INPUT         = 0x5F0002
    SHORT_OUTPUT        = 0x5F0003
    UNKNOWN_OP_MOD      = 0x5F0004
    NO_SUCH_CQ          = 0x5F0010
    NO_SUCH_QP          = 0x5F0011
    NO_SUCH_PD          = 0x5F0012
    NO_SUCH_UMEM        = 0x5F0013
    NO_SUCH_UAR         = 0x5F0014
    NO_SUCH_EQ          = 0x5F0015
    NO_SUCH_GID         = 0x5F0016
    NO_SUCH_SRQ         = 0x5F0017
    NO_SUCH_MKEY        = 0x5F0018
    CQ_SIZE             = 0x5F0020
    QP_SIZE             = 0x5F0021
    UMEM_RANGE          = 0x5F0022
    UMEM_REQUIRED       = 0x5F0023
    SERVICE_TYPE        = 0x5F0024
    RQ_TYPE             = 0x5F0025
    UMEM_ALIGNMENT      = 0x5F0026
    UMEM_RIGHTS         = 0x5F0027
    RMP_STATE           = 0x5F0028
    SCATTER_TO_CQE      = 0x5F0029
    MKEY_RANGE          = 0x5F002A
    PKEY_INDEX          = 0x5F0030
    PORT_NUMBER         = 0x5F0031
    MTU                 = 0x5F0032
    OPT_PARAM           = 0x5F0033
    MSG_MAX             = 0x5F0034
    UDP_SPORT           = 0x5F0035
    QP_STATE            = 0x5F0040
    IN_USE              = 0x5F0041
    TABLE_FULL          = 0x5F0042
    ENGINE_TIMEOUT      = 0x5F0050
    DEVICE_FAILED       = 0x5F0051
    NO_SUCH_TRANSPORT_DOMAIN = 0x5F0060
    NO_SUCH_Q_COUNTER   = 0x5F0061
    NO_SUCH_TIS         = 0x5F0062
    NO_SUCH_TIR         = 0x5F0063
    NO_SUCH_RQT         = 0x5F0064
    NO_SUCH_SQ          = 0x5F0065
    NO_SUCH_RQ          = 0x5F0066
    NO_ETHERNET         = 0x5F0068  # a port without Ethernet has no Ethernet queues
    UNSUPPORTED_FIELD   = 0x5F0069  # a context field that requests a feature that the software NIC lacks
    QUEUE_STATE         = 0x5F006A
    MODIFY_MASK         = 0x5F006B
    WQ_TYPE             = 0x5F006C
    WQ_SIZE             = 0x5F006D
    STRIDES             = 0x5F006E
    TIMESTAMP_FORMAT    = 0x5F006F
    INLINE_MODE         = 0x5F0070
    TIS_LIST            = 0x5F0071
    DISP_TYPE           = 0x5F0072
    RX_HASH             = 0x5F0073
    RQT_SIZE            = 0x5F0074
    NO_SUCH_FLOW_TABLE  = 0x5F0080
    NO_SUCH_FLOW_GROUP  = 0x5F0081
    NO_SUCH_FLOW_ENTRY  = 0x5F0082
    NO_SUCH_FLOW_COUNTER = 0x5F0083
    FLOW_TABLE          = 0x5F0084
    FLOW_LEVEL          = 0x5F0085
    FLOW_GROUP          = 0x5F0086
    FLOW_MATCH          = 0x5F0087
    FLOW_INDEX          = 0x5F0088
    FLOW_ACTION         = 0x5F0089
    FLOW_DESTINATION    = 0x5F008A
    FLOW_COUNTER        = 0x5F008B


class CommandError(Exception):
    """A mailbox was refused with this status and syndrome. The log and the raised error show `detail`."""

    status: Status
    syndrome: CommandSyndrome
    detail: str

    def __init__(self, status: Status, syndrome: CommandSyndrome, detail: str):
        super().__init__(detail)
        self.status, self.syndrome, self.detail = status, syndrome, detail
