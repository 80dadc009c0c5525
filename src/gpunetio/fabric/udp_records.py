"""Records of the UDP wire's compiled code, and the kernel's structures for sendmmsg and recvmmsg.

The kernel's structures are those of 64-bit little-endian Linux: socket(7), recvmmsg(2), udp(7), ip(7), ipv6(7).
"""

from __future__ import annotations

from typing import Annotated

from ..formats.layout import I32, I64, Entry, Record
from ..jit.compile import device_function
from ..jit.ops import ld32
from ..jit.ops.calls import External, external

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


class UdpEnd(Record, size=384):
    """A UDP wire, as compiled code serves it.

    `socket_of` has the address of a UDP_SOCKET, or 0, for each GID index, and then for each sender. `tx` is the
    PIPE_END that `transmit` consumes. Counters have the names of the kernel's, where the kernel has them
    (rx_icrc_encapsulated). `tx_error` is the errno of the last drop. `rx_more`: the last batch was full, so more may
    wait. `rx_crc` is the CRC of the headers of packets of `rx_nbytes` in the message `rx_message`.

    `position` counts received bytes. When all sockets are found empty after a `mark`, it also advances by `capacity`,
    the bytes that the sockets hold. So once it has advanced by `capacity`, everything that arrived before the mark is
    read.
    """

    tx: I64 = 0
    sockets: I64 = 8
    socket_count: I64 = 16
    socket_of: I64 = 24
    tx_vector: I64 = 32
    tx_slots: I64 = 40
    tx_scratch: I64 = 48
    rx_vector: I64 = 64
    rx_share: I64 = 72
    rx_scratch: I64 = 80
    datagrams: I64 = 88
    sources: I64 = 96
    rx_message: I64 = 104
    rx_nbytes: I64 = 112
    rx_crc: I64 = 120
    tx_frames: I64 = 128
    tx_messages: I64 = 136
    tx_blocked: I64 = 144
    tx_dropped: I64 = 152
    tx_error: I64 = 160
    rx_more: I64 = 168
    rx_datagrams: I64 = 192
    rx_icrc_encapsulated: I64 = 200
    rx_malformed: I64 = 208
    weak_icrc: I64 = 216
    position: I64 = 224
    capacity: I64 = 232
    marked: I64 = 240


UDP_WIRE = UdpEnd.entry


class UdpSocket(Record, size=128):
    """A socket of a UDP wire.

    `segments` is how many datagrams a message may have: 1 without UDP_SEGMENT, and then `gso` says why. `port` is the
    socket's.
    """

    fd: I64 = 0
    version: I64 = 8
    source: I64 = 16
    gid_high: I64 = 24
    gid_low: I64 = 32
    scope: I64 = 40
    segments: I64 = 48
    gso: I64 = 56
    port: I64 = 64


UDP_SOCKET = UdpSocket.entry
GSO_ON, GSO_TRYING_WITHOUT, GSO_REFUSED, GSO_OFF = 0, 1, 2, 3


class Datagram(Record, size=64):
    """A datagram that has arrived.

    A packet that arrived, from its BTH to its padding. `peer` is the sender's GID, `source` the index of our GID. It
    was segment number `segment` of the MMSGHDR `message`, which the UDP_SOCKET `socket` received.
    """

    packet: I64 = 0
    nbytes: I64 = 8
    peer_high: I64 = 16
    peer_low: I64 = 24
    source: I64 = 32
    segment: I64 = 40
    message: I64 = 48
    socket: I64 = 56


DATAGRAM = Datagram.entry
# All 32 bits of the ICRC were checked; only 16, because IPv4's id was not an expected one; or the ICRC is wrong.
ICRC_FULL, ICRC_WEAK, ICRC_WRONG = 0, 1, -1
DATAGRAMS = RX_MESSAGES * RX_SEGMENTS


class Source(Record, size=32):
    """A row of the table of IPv4 ids: the last id of a source.

    The ids that an IPv4 sender uses. `address` is the second word of its GID, `last` its last id, `start` the id of
    the last message's first segment, and `step` the step within a message.
    """

    address: I64 = 0
    last: I64 = 8
    start: I64 = 16
    step: I64 = 24


SOURCE = Source.entry


class TxSlot(Record, size=128 + 16 * MAX_SEGMENTS):
    """A message that is sent: its headers, and the datagrams in it.

    What one outgoing message points to. `position` is that of its first frame in the pipe.
    """

    position: I64 = 0
    frames: I64 = 8
    name: Annotated[int, "raw[28]"] = 16
    control: Annotated[int, "raw[72]"] = 48
    iov: I64 = 128


TX_SLOT = TxSlot.entry

RX_SLOT = Entry("rx_slot", 128, """
    name            0  raw[28]
    control        32  raw[64]
    iov            96  i64[2]
""")

# --- the kernel's --------------------------------------------------------------------------------------------------


class MmsgHdr(Record, size=64):
    """`struct mmsghdr` (recvmmsg(2))."""

    name: I64 = 0
    name_length: I32 = 8
    iov: I64 = 16
    iov_length: I64 = 24
    control: I64 = 32
    control_length: I64 = 40
    flags: I32 = 48
    nbytes: I32 = 56


MMSGHDR = MmsgHdr.entry


class IoVec(Record, size=16):
    """`struct iovec` (readv(2))."""

    base: I64 = 0
    nbytes: I64 = 8


IOVEC = IoVec.entry

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


sendmmsg: External = external("sendmmsg", 32, 64, 32, 32, ret=32)
recvmmsg: External = external("recvmmsg", 32, 64, 32, 32, 64, ret=32)
_errno_location = external("__errno_location", ret=64)


@device_function
def errno() -> int:
    """Return the error of this thread's last failed call."""
    return ld32(_errno_location())


@device_function
def mark(udp: UdpEnd) -> int:
    """Return a `position`: datagrams at or after it arrived after this call. Some later ones get a lower position."""
    udp.marked = 1
    return udp.position + udp.capacity


MAPPED = 0xFFFF_0000  # the lower half of the second word of ::ffff:a.b.c.d


@device_function
def is_mapped(high: int, low: int) -> bool:
    """Return whether a GID stands for an IPv4 address (RFC 4291, 2.5.5.2)."""
    return high == 0 and low & 0xFFFF_FFFF == MAPPED
