"""Management datagrams (MADs) of the connection manager: IBTA volume 1, chapters 12 and 13, and annex A11 (RDMA IP CM).

A MAD has 256 bytes: `MAD_HEADER`, then one message. Offsets are in bits from the start of the message; names are those
of the specification.
"""

from enum import IntEnum

from .layout import BitStruct

MAD_BYTES = 256
BASE_VERSION = 1
CM_CLASS, CM_CLASS_VERSION = 0x07, 2
METHOD_SEND = 0x03

# IBTA 13.4.3
MAD_HEADER = BitStruct("mad_header", 24, """
    base_version                0x000      8
    mgmt_class                  0x008      8
    class_version               0x010      8
    method                      0x018      8
    status                      0x020     16
    class_specific              0x030     16
    transaction_id              0x040     64
    attribute_id                0x080     16
    attribute_modifier          0x0a0     32
""")
MESSAGE_BYTES = MAD_BYTES - MAD_HEADER.size


class Attribute(IntEnum):
    """attribute_id of a MAD: which message it is (IBTA table 106). LAP and APR, for alternate paths, are not here."""

    REQ      = 0x10
    MRA      = 0x11
    REJ      = 0x12
    REP      = 0x13
    RTU      = 0x14
    DREQ     = 0x15
    DREP     = 0x16
    SIDR_REQ = 0x17
    SIDR_REP = 0x18


class Transport(IntEnum):
    """transport_service_type of a REQ."""

    RC       = 0
    UC       = 1
    RD       = 2
    EXTENDED = 3


# IBTA 12.6.5. The alternate path of 44 bytes at 0x300 is 0.
REQ = BitStruct("req", MESSAGE_BYTES, """
    local_comm_id               0x000     32
    vendor_id                   0x028     24
    service_id                  0x040     64
    local_ca_guid               0x080     64
    local_q_key                 0x0e0     32
    local_qpn                   0x100     24
    responder_resources         0x118      8
    local_eecn                  0x120     24
    initiator_depth             0x138      8
    remote_eecn                 0x140     24
    remote_cm_response_timeout  0x158      5
    transport_service_type      0x15d      2
    end_to_end_flow_control     0x15f      1
    starting_psn                0x160     24
    local_cm_response_timeout   0x178      5
    retry_count                 0x17d      3
    partition_key               0x180     16
    path_packet_payload_mtu     0x190      4
    rdc_exists                  0x194      1
    rnr_retry_count             0x195      3
    max_cm_retries              0x198      4
    srq                         0x19c      1
    extended_transport_type     0x19d      3
    primary_local_lid           0x1a0     16
    primary_remote_lid          0x1b0     16
    primary_local_gid           0x1c0    128
    primary_remote_gid          0x240    128
    primary_flow_label          0x2c0     20
    primary_packet_rate         0x2da      6
    primary_traffic_class       0x2e0      8
    primary_hop_limit           0x2e8      8
    primary_sl                  0x2f0      4
    primary_subnet_local        0x2f4      1
    primary_local_ack_timeout   0x2f8      5
    private_data                0x460    736
""")

# IBTA 12.6.6
MRA = BitStruct("mra", MESSAGE_BYTES, """
    local_comm_id               0x000     32
    remote_comm_id              0x020     32
    message_mraed               0x040      2
    service_timeout             0x048      5
    private_data                0x050   1776
""")


class Answered(IntEnum):
    """message_mraed of an MRA, message_rejected of a REJ: which message it answers."""

    REQ   = 0
    REP   = 1
    OTHER = 2


# IBTA 12.6.7
REJ = BitStruct("rej", MESSAGE_BYTES, """
    local_comm_id               0x000     32
    remote_comm_id              0x020     32
    message_rejected            0x040      2
    reject_info_length          0x048      7
    reason                      0x050     16
    additional_reject_info      0x060    576
    private_data                0x2a0   1184
""")


class RejectReason(IntEnum):
    """reason of a REJ (IBTA 12.6.7.2)."""

    NO_QP                              = 1
    NO_EEC                             = 2
    NO_RESOURCES                       = 3
    TIMEOUT                            = 4
    UNSUPPORTED_REQUEST                = 5
    INVALID_COMM_ID                    = 6
    INVALID_COMM_INSTANCE              = 7
    INVALID_SERVICE_ID                 = 8
    INVALID_TRANSPORT_TYPE             = 9
    STALE_CONNECTION                   = 10
    RDC_NOT_EXIST                      = 11
    INVALID_GID                        = 12
    INVALID_LID                        = 13
    INVALID_SL                         = 14
    INVALID_TRAFFIC_CLASS              = 15
    INVALID_HOP_LIMIT                  = 16
    INVALID_PACKET_RATE                = 17
    INVALID_ALTERNATE_GID              = 18
    INVALID_ALTERNATE_LID              = 19
    INVALID_ALTERNATE_SL               = 20
    INVALID_ALTERNATE_TRAFFIC_CLASS    = 21
    INVALID_ALTERNATE_HOP_LIMIT        = 22
    INVALID_ALTERNATE_PACKET_RATE      = 23
    PORT_CM_REDIRECT                   = 24
    PORT_REDIRECT                      = 25
    INVALID_MTU                        = 26
    INSUFFICIENT_RESPONDER_RESOURCES   = 27
    CONSUMER                           = 28
    INVALID_RNR_RETRY                  = 29
    DUPLICATE_LOCAL_COMM_ID            = 30
    INVALID_CLASS_VERSION              = 31
    INVALID_FLOW_LABEL                 = 32
    INVALID_ALTERNATE_FLOW_LABEL       = 33
    VENDOR                             = 35


# IBTA 12.6.8
REP = BitStruct("rep", MESSAGE_BYTES, """
    local_comm_id               0x000     32
    remote_comm_id              0x020     32
    local_q_key                 0x040     32
    local_qpn                   0x060     24
    local_eecn                  0x080     24
    starting_psn                0x0a0     24
    responder_resources         0x0c0      8
    initiator_depth             0x0c8      8
    target_ack_delay            0x0d0      5
    failover_accepted           0x0d5      2
    end_to_end_flow_control     0x0d7      1
    rnr_retry_count             0x0d8      3
    srq                         0x0db      1
    local_ca_guid               0x0e0     64
    private_data                0x120   1568
""")

# IBTA 12.6.9
RTU = BitStruct("rtu", MESSAGE_BYTES, """
    local_comm_id               0x000     32
    remote_comm_id              0x020     32
    private_data                0x040   1792
""")

# IBTA 12.6.10
DREQ = BitStruct("dreq", MESSAGE_BYTES, """
    local_comm_id               0x000     32
    remote_comm_id              0x020     32
    remote_qpn                  0x040     24
    private_data                0x060   1760
""")

# IBTA 12.6.11
DREP = BitStruct("drep", MESSAGE_BYTES, """
    local_comm_id               0x000     32
    remote_comm_id              0x020     32
    private_data                0x040   1792
""")

# IBTA 12.11.1
SIDR_REQ = BitStruct("sidr_req", MESSAGE_BYTES, """
    request_id                  0x000     32
    partition_key               0x020     16
    service_id                  0x040     64
    private_data                0x080   1728
""")

# IBTA 12.11.2
SIDR_REP = BitStruct("sidr_rep", MESSAGE_BYTES, """
    request_id                  0x000     32
    status                      0x020      8
    additional_info_length      0x028      8
    qpn                         0x040     24
    service_id                  0x060     64
    q_key                       0x0a0     32
    additional_info             0x0c0    576
    private_data                0x300   1088
""")


class SidrStatus(IntEnum):
    """status of a SIDR_REP (IBTA 12.11.2.1)."""

    VALID                  = 0
    SERVICE_NOT_SUPPORTED  = 1
    REJECTED               = 2
    NO_QP                  = 3
    REDIRECT               = 4
    UNSUPPORTED_VERSION    = 5


MESSAGES: dict[Attribute, BitStruct] = {
    Attribute.REQ: REQ, Attribute.MRA: MRA, Attribute.REJ: REJ, Attribute.REP: REP, Attribute.RTU: RTU,
    Attribute.DREQ: DREQ, Attribute.DREP: DREP, Attribute.SIDR_REQ: SIDR_REQ, Attribute.SIDR_REP: SIDR_REP,
}


class PortSpace(IntEnum):
    """The upper half of a service ID (annex A11): which ports it means. The lower 16 bits are the port."""

    TCP = 0x0106  # of connections
    UDP = 0x0111  # of datagrams
    IB  = 0x013F  # of any queue pairs, by service ID


PORT_SPACE_SHIFT = 16

# RDMA IP CM service (annex A11): the beginning of the private data of a REQ or SIDR_REQ. An IPv4 address is in the last
# four bytes of its field.
IP_CM = BitStruct("ip_cm", 36, """
    version                     0x000      8
    ip_version                  0x008      4
    source_port                 0x010     16
    source_address              0x020    128
    destination_address         0x0a0    128
""")


def private_bytes(message: BitStruct) -> int:
    """Return how many bytes of private data a message has, including those of `IP_CM`."""
    return message.fields["private_data"].width // 8


# Bytes of private data that are left to programs.
REQ_PRIVATE, SIDR_REQ_PRIVATE = private_bytes(REQ) - IP_CM.size, private_bytes(SIDR_REQ) - IP_CM.size
REJ_PRIVATE, REP_PRIVATE, RTU_PRIVATE = private_bytes(REJ), private_bytes(REP), private_bytes(RTU)
DREQ_PRIVATE, DREP_PRIVATE, SIDR_REP_PRIVATE = private_bytes(DREQ), private_bytes(DREP), private_bytes(SIDR_REP)
