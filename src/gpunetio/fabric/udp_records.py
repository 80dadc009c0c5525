"""Records of the UDP wire's compiled code, and the kernel's structures for sendmmsg and recvmmsg.

The kernel's structures are those of 64-bit little-endian Linux: socket(7), recvmmsg(2), udp(7), ip(7), ipv6(7).
"""

from __future__ import annotations



from ..jit.ops import ld32
from ..jit.ops.calls import External, external
from ..jit.compile import device_function
from ..jit.struct_view import View, struct_view
from ..formats.layout import Entry

# --- limits --------------------------------------------------------------------------------------------------------

MAX_SOCKETS = 8
GID_TABLE = 256
MAX_SENDERS = 64  # sockets that only send, from a port other than RoCE's
EGRESSES = GID_TABLE + MAX_SENDERS
TX_MESSAGES = 8  # in one sendmmsg: half a megabyte, which is still cached from computing the ICRCs
RX_MESSAGES = 16  # buffers for a batch; each socket's batch has its share of them
MAX_SEGMENTS = 64  # datagrams of an outgoing message: what all kernels with UDP_SEGMENT take
MAX_MESSAGE = 65000  # bytes of an outgoing message; IPv4's limit is 65507
RX_SEGMENTS = 128  # datagrams of an arriving message: newer kernels send that many over loopback
RX_BUFFER = 1 << 16
SOURCES = 64  # rows of the table of IPv4 ids

# --- records -------------------------------------------------------------------------------------------------------

# `socket_of` has the address of a UDP_SOCKET, or 0, for each GID index, and then for each sender. `tx` is the PIPE_END
# that `transmit` consumes. Counters have the names of the kernel's, where the kernel has them (rx_icrc_encapsulated).
# `tx_error` is the errno of the last drop. `rx_more`: the last batch was full, so more may wait. `rx_crc` is the CRC of
# the headers of packets of `rx_nbytes` in the message `rx_message`.
#
# `position` counts received bytes. When all sockets are found empty after a `mark`, it also advances by `capacity`, the
# bytes that the sockets hold. So once it has advanced by `capacity`, everything that arrived before the mark is read.
UDP_WIRE = Entry("udp_wire", 384, """
    tx                      0  i64
    sockets                 8  i64
    socket_count           16  i64
    socket_of              24  i64
    tx_vector              32  i64
    tx_slots               40  i64
    tx_scratch             48  i64
    rx_vector              64  i64
    rx_share               72  i64
    rx_scratch             80  i64
    datagrams              88  i64
    sources                96  i64
    rx_message            104  i64
    rx_nbytes             112  i64
    rx_crc                120  i64
    tx_frames             128  i64
    tx_messages           136  i64
    tx_blocked            144  i64
    tx_dropped            152  i64
    tx_error              160  i64
    rx_more               168  i64
    rx_datagrams          192  i64
    rx_icrc_encapsulated  200  i64
    rx_malformed          208  i64
    weak_icrc             216  i64
    position              224  i64
    capacity              232  i64
    marked                240  i64
""")

# `segments` is how many datagrams a message may have: 1 without UDP_SEGMENT, and then `gso` says why. `port` is the
# socket's.
UDP_SOCKET = Entry("udp_socket", 128, """
    fd              0  i64
    version         8  i64
    source         16  i64
    gid_high       24  i64
    gid_low        32  i64
    scope          40  i64
    segments       48  i64
    gso            56  i64
    port           64  i64
""")
GSO_ON, GSO_TRYING_WITHOUT, GSO_REFUSED, GSO_OFF = 0, 1, 2, 3

# A packet that arrived, from its BTH to its padding. `peer` is the sender's GID, `source` the index of our GID. It was
# segment number `segment` of the MMSGHDR `message`, which the UDP_SOCKET `socket` received.
DATAGRAM = Entry("datagram", 64, """
    packet          0  i64
    nbytes          8  i64
    peer_high      16  i64
    peer_low       24  i64
    source         32  i64
    segment        40  i64
    message        48  i64
    socket         56  i64
""")
# All 32 bits of the ICRC were checked; only 16, because IPv4's id was not an expected one; or the ICRC is wrong.
ICRC_FULL, ICRC_WEAK, ICRC_WRONG = 0, 1, -1
DATAGRAMS = RX_MESSAGES * RX_SEGMENTS

# The ids that an IPv4 sender uses. `address` is the second word of its GID, `last` its last id, `start` the id of the
# last message's first segment, and `step` the step within a message.
SOURCE = Entry("source", 32, """
    address         0  i64
    last            8  i64
    start          16  i64
    step           24  i64
""")

# What one outgoing message points to. `position` is that of its first frame in the pipe.
TX_SLOT = Entry("tx_slot", 128 + 16 * MAX_SEGMENTS, """
    position        0  i64
    frames          8  i64
    name           16  raw[28]
    control        48  raw[72]
    iov           128  i64
""")

RX_SLOT = Entry("rx_slot", 128, """
    name            0  raw[28]
    control        32  raw[64]
    iov            96  i64[2]
""")

# --- the kernel's --------------------------------------------------------------------------------------------------

MMSGHDR = Entry("mmsghdr", 64, """
    name            0  i64
    name_length     8  i32
    iov            16  i64
    iov_length     24  i64
    control        32  i64
    control_length 40  i64
    flags          48  i32
    nbytes         56  i32
""")

IOVEC = Entry("iovec", 16, """
    base            0  i64
    nbytes          8  i64
""")

SOCKADDR_IN = Entry("sockaddr_in", 16, """
    family          0  u16
    port            2  u16
    address         4  u32
""")

SOCKADDR_IN6 = Entry("sockaddr_in6", 28, """
    family          0  u16
    port            2  u16
    flowinfo        4  u32
    high            8  i64
    low            16  i64
    scope          24  u32
""")

CMSGHDR = Entry("cmsghdr", 16, """
    nbytes          0  i64
    level           8  i32
    type           12  i32
""")
CONTROL = 24  # CMSG_SPACE of a value of up to 8 bytes
GRO_CONTROL = 64  # room for UDP_GRO's int

AF_INET, AF_INET6 = 2, 10
SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104
IPPROTO_IP, IP_TOS, IP_TTL = 0, 1, 2
IPPROTO_IPV6, IPV6_HOPLIMIT, IPV6_TCLASS = 41, 52, 67
MSG_TRUNC, MSG_DONTWAIT, MSG_NOSIGNAL = 0x20, 0x40, 0x4000
EINTR, EIO, EAGAIN, EINVAL, EMSGSIZE = 4, 5, 11, 22, 90

udp_wire_at: View = struct_view(UDP_WIRE)
udp_socket_at: View = struct_view(UDP_SOCKET)
datagram_at: View = struct_view(DATAGRAM)
source_at: View = struct_view(SOURCE)
tx_slot_at: View = struct_view(TX_SLOT)
mmsghdr_at: View = struct_view(MMSGHDR)
iovec_at: View = struct_view(IOVEC)

sendmmsg: External = external("sendmmsg", 32, 64, 32, 32, ret=32)
recvmmsg: External = external("recvmmsg", 32, 64, 32, 32, 64, ret=32)
_errno_location = external("__errno_location", ret=64)


@device_function
def errno() -> int:
    """Return the error of this thread's last failed call."""
    return ld32(_errno_location())


@device_function
def mark(wire: int) -> int:
    """Return a `position`: datagrams at or after it arrived after this call. Some later ones get a lower position."""
    w = udp_wire_at(wire)
    w.marked = 1
    return w.position + w.capacity


MAPPED = 0xFFFF_0000  # the lower half of the second word of ::ffff:a.b.c.d


@device_function
def is_mapped(high: int, low: int) -> bool:
    """Return whether a GID stands for an IPv4 address (RFC 4291, 2.5.5.2)."""
    return high == 0 and low & 0xFFFF_FFFF == MAPPED
