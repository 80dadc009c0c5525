"""Packets on the wire: RoCEv2 and InfiniBand headers, transport opcodes, acknowledge syndromes (IBTA 9, annex A17)."""

from enum import IntEnum

from .layout import Entry

ROCE_UDP_PORT = 4791  # annex A17.4.5.1
DEFAULT_PKEY = 0xFFFF
PKEY_BASE_MASK = 0x7FFF  # the upper bit distinguishes full and limited members (IBTA 10.9.3)
PSN_BITS = 24
PSN_MASK = (1 << PSN_BITS) - 1
QPN_MASK = 0xFF_FFFF
FLOW_LABEL_MASK = 0xF_FFFF  # IBTA 8.3, RFC 8200 3
ICRC_SIZE = 4
GRH_NEXT_HEADER = 0x1B  # IBTA 8.3.6: a BTH follows
LNH_LOCAL, LNH_GLOBAL = 2, 3  # IBTA 7.7.5: link next header, without and with a GRH


class PacketOpcode(IntEnum):
    """BTH opcode, IBTA table 38: the upper three bits are the service, the lower five the operation."""

    RC_SEND_FIRST          = 0x00
    RC_SEND_MIDDLE         = 0x01
    RC_SEND_LAST           = 0x02
    RC_SEND_LAST_IMM       = 0x03
    RC_SEND_ONLY           = 0x04
    RC_SEND_ONLY_IMM       = 0x05
    RC_WRITE_FIRST         = 0x06
    RC_WRITE_MIDDLE        = 0x07
    RC_WRITE_LAST          = 0x08
    RC_WRITE_LAST_IMM      = 0x09
    RC_WRITE_ONLY          = 0x0A
    RC_WRITE_ONLY_IMM      = 0x0B
    RC_READ_REQUEST        = 0x0C
    RC_READ_RESPONSE_FIRST = 0x0D
    RC_READ_RESPONSE_MIDDLE = 0x0E
    RC_READ_RESPONSE_LAST  = 0x0F
    RC_READ_RESPONSE_ONLY  = 0x10
    RC_ACKNOWLEDGE         = 0x11
    RC_ATOMIC_ACKNOWLEDGE  = 0x12
    RC_COMPARE_SWAP        = 0x13
    RC_FETCH_ADD           = 0x14
    UC_SEND_FIRST          = 0x20
    UC_SEND_MIDDLE         = 0x21
    UC_SEND_LAST           = 0x22
    UC_SEND_LAST_IMM       = 0x23
    UC_SEND_ONLY           = 0x24
    UC_SEND_ONLY_IMM       = 0x25
    UC_WRITE_FIRST         = 0x26
    UC_WRITE_MIDDLE        = 0x27
    UC_WRITE_LAST          = 0x28
    UC_WRITE_LAST_IMM      = 0x29
    UC_WRITE_ONLY          = 0x2A
    UC_WRITE_ONLY_IMM      = 0x2B
    UD_SEND_ONLY           = 0x64
    UD_SEND_ONLY_IMM       = 0x65
    MASKED_COMPARE_SWAP    = 0xDE  # ours, in the range for manufacturers; no other request has these lower five bits
    MASKED_FETCH_ADD       = 0xDF


SERVICE_SHIFT, OPERATION_MASK = 5, 0x1F
UD_SERVICE = 3  # in the upper three bits; 2 is reliable datagrams
MANUFACTURER = 6  # RC operations outside the standard
RESERVED = 0x1B  # in the lower five bits


class AckKind(IntEnum):
    """Bits 6:5 of an AETH's syndrome (IBTA table 47)."""

    ACK      = 0
    RNR_NAK  = 1
    RESERVED = 2
    NAK      = 3


ACK_KIND_SHIFT, ACK_VALUE_MASK = 5, 0x1F
NO_CREDITS = 0x1F  # an ACK with an invalid credit count: the sender ignores it (IBTA table 48)


class NakCode(IntEnum):
    """The lower five bits of a NAK's syndrome (IBTA table 49)."""

    PSN_SEQUENCE     = 0
    INVALID_REQUEST  = 1
    REMOTE_ACCESS    = 2
    REMOTE_OPERATION = 3


# Base transport header (IBTA 9.2). Congestion marks (FECN, BECN) change the byte at 4 on the way.
BTH = Entry("bth", 12, """
    opcode          0  u8
    se_m_pad_tver   1  u8
    pkey            2  be16
    resv_dest_qp    4  be32
    ack_psn         8  be32
""")
SOLICITED, MIGRATED, PAD_SHIFT, TVER_MASK = 0x80, 0x40, 4, 0x0F
ACK_REQUEST = 1 << 31  # in ack_psn

RETH = Entry("reth", 16, """
    va              0  be64
    rkey            8  be32
    dma_length     12  be32
""")

ATOMIC_ETH = Entry("atomic_eth", 28, """
    va              0  be64
    rkey            8  be32
    swap_add       12  be64
    compare        20  be64
""")

# Follows the BTH of a masked atomic. IBTA has no such request, and what a ConnectX sends is not published.
MASKED_ATOMIC_ETH = Entry("masked_atomic_eth", 48, """
    va              0  be64
    rkey            8  be32
    nbytes         12  be32
    swap_add       16  be64
    compare        24  be64
    swap_mask      32  be64
    compare_mask   40  be64
""")

AETH = Entry("aeth", 4, """
    syndrome_msn    0  be32
""")
SYNDROME_SHIFT, MSN_MASK = 24, 0xFF_FFFF

ATOMIC_ACK_ETH = Entry("atomic_ack_eth", 8, """
    original        0  be64
""")

# Datagram extended transport header (IBTA 9.3.2): the 24 low bits of the last field are the sender's QPN.
DETH = Entry("deth", 8, """
    q_key           0  be32
    resv_src_qp     4  be32
""")
OWN_Q_KEY = 1 << 31  # in the Q_Key of a request: the queue pair's own is meant (IBTA 10.2.5)
GSI_QPN, GSI_Q_KEY = 1, 0x8001_0000  # IBTA 3.9.4, 10.2.5

IMM_DT = Entry("imm_dt", 4, """
    imm             0  be32
""")

# Local route header (IBTA 7.7): vl_lver = VL << 4 | LVer, sl_lnh = SL << 4 | LNH, length in 4-byte words.
LRH = Entry("lrh", 8, """
    vl_lver         0  u8
    sl_lnh          1  u8
    dlid            2  be16
    length          4  be16
    slid            6  be16
""")

# Global route header (IBTA 8.3), laid out like IPv6.
GRH = Entry("grh", 40, """
    version_class_flow   0  be32
    payload_length       4  be16
    next_header          6  u8
    hop_limit            7  u8
    sgid                 8  raw[16]
    dgid                24  raw[16]
""")

ETHERNET = Entry("ethernet", 14, """
    destination     0  raw[6]
    source          6  raw[6]
    ether_type     12  be16
""")
ETHER_TYPE_IPV4, ETHER_TYPE_ARP, ETHER_TYPE_IPV6 = 0x0800, 0x0806, 0x86DD
ETHER_TYPE_VLAN, ETHER_TYPE_SERVICE_VLAN = 0x8100, 0x88A8  # IEEE 802.1Q: a tag follows

VLAN_TAG = Entry("vlan_tag", 4, """
    control     0  be16
    ether_type  2  be16
""")

GROUP_MAC = 1  # in the first byte of a MAC: multicast or broadcast

# RFC 826, for Ethernet and IPv4
ARP = Entry("arp", 28, """
    hardware          0  be16
    protocol          2  be16
    hardware_length   4  u8
    protocol_length   5  u8
    operation         6  be16
    sender_mac        8  raw[6]
    sender_ip        14  raw[4]
    target_mac       18  raw[6]
    target_ip        24  raw[4]
""")
ARP_ETHERNET, ARP_REQUEST, ARP_REPLY = 1, 1, 2

# RFC 791
IPV4 = Entry("ipv4", 20, """
    version_ihl     0  u8
    tos             1  u8
    total_length    2  be16
    identification  4  be16
    flags_fragment  6  be16
    ttl             8  u8
    protocol        9  u8
    checksum       10  be16
    source         12  raw[4]
    destination    16  raw[4]
""")
IPV4_DONT_FRAGMENT, IPV4_MORE_FRAGMENTS, IPV4_OFFSET_MASK = 0x4000, 0x2000, 0x1FFF  # the offset is in units of 8 bytes
IPV4_FRAGMENT_MASK = IPV4_MORE_FRAGMENTS | IPV4_OFFSET_MASK  # more fragments follow, or this is not the first
IPV4_MAPPED = bytes(10) + b"\xff\xff"  # of ::ffff:a.b.c.d, as GIDs have IPv4 addresses (RFC 4291 2.5.5.2)
LINK_LOCAL = b"\xfe\x80" + bytes(6)  # of addresses and GIDs of a link (RFC 4291 2.5.6)
MAX_IPV4 = 60  # bytes of a header with all options
IP_PROTOCOL_ICMP, IP_PROTOCOL_TCP, IP_PROTOCOL_UDP, IP_PROTOCOL_ICMPV6 = 1, 6, 17, 58
# Of extension headers of IPv6 (RFC 8200 4, RFC 4302).
IP_PROTOCOL_HOP_BY_HOP, IP_PROTOCOL_ROUTING, IP_PROTOCOL_FRAGMENT = 0, 43, 44
IP_PROTOCOL_AUTHENTICATION, IP_PROTOCOL_DESTINATION_OPTIONS = 51, 60

# RFC 8200
IPV6 = Entry("ipv6", 40, """
    version_class_flow   0  be32
    payload_length       4  be16
    next_header          6  u8
    hop_limit            7  u8
    source               8  raw[16]
    destination         24  raw[16]
""")

# RFC 8200 4: most extension headers begin so. Their length does not count the first 8 bytes.
IPV6_EXTENSION = Entry("ipv6_extension", 8, """
    next_header  0  u8
    length       1  u8
""")

IPV6_FRAGMENT = Entry("ipv6_fragment", 8, """
    next_header      0  u8
    offset_flags     2  be16
    identification   4  be32
""")
IPV6_FRAGMENT_MASK = 0xFFF9  # more fragments follow, or this is not the first

# RFC 9293 3.1
TCP = Entry("tcp", 20, """
    source_port        0  be16
    destination_port   2  be16
    sequence           4  be32
    acknowledgement    8  be32
    offset_flags      12  be16
    window            14  be16
    checksum          16  be16
    urgent            18  be16
""")
TCP_FIN, TCP_SYN, TCP_RST, TCP_PSH, TCP_ACK, TCP_CWR = 0x01, 0x02, 0x04, 0x08, 0x10, 0x80
TCP_OFFSET_SHIFT, TCP_FLAGS_MASK = 12, 0x1FF  # of offset_flags; the offset counts words of 4 bytes

# RFC 768
UDP = Entry("udp", 8, """
    source_port       0  be16
    destination_port  2  be16
    length            4  be16
    checksum          6  be16
""")

# RFC 792: echo and its reply. Data follow.
ICMP = Entry("icmp", 8, """
    type              0  u8
    code              1  u8
    checksum          2  be16
    identifier        4  be16
    sequence          6  be16
""")
ICMP_ECHO_REPLY, ICMP_ECHO = 0, 8

# Neighbour solicitation and advertisement, RFC 4861 4.3 and 4.4. Options follow: type, length in 8 bytes, value.
NEIGHBOUR = Entry("neighbour", 24, """
    type              0  u8
    code              1  u8
    checksum          2  be16
    flags             4  be32
    target            8  raw[16]
""")
NEIGHBOUR_SOLICITATION, NEIGHBOUR_ADVERTISEMENT = 135, 136
NEIGHBOUR_SOLICITED, NEIGHBOUR_OVERRIDE = 1 << 30, 1 << 29  # flags of an advertisement
NEIGHBOUR_HOP_LIMIT = 255  # shows that no router has forwarded it
SOURCE_LINK_ADDRESS, TARGET_LINK_ADDRESS = 1, 2  # options
