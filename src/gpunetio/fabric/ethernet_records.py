"""Records of the compiled code of wires that carry Ethernet frames, and structures for the kernel's calls."""

from __future__ import annotations

from typing import Annotated

from ..formats.layout import I64, U16, U8, Entry, Record
from ..jit.ops.calls import External, external

BATCH = 32  # frames per read
FRAME_ROOM = 1 << 16  # bytes of a frame; no interface has a larger MTU
READ_ROOM = FRAME_ROOM + 64  # bytes per read: a frame of many segments has 65535 after its Ethernet header
# Buffers are placed so that what follows the BTH of an IPv4 packet is aligned, and not at multiples of 64 KiB, where
# they would all compete for the same cache lines. A VIRTIO_NET, or a VLAN tag that is put back, fits in before a frame.
FRAME_STRIDE, FRAME_START = FRAME_ROOM + 128, 10
SCRATCH = 128  # bytes for the headers of a frame, and for what its ICRC covers
EGRESSES = 4096  # rows of EGRESS: pairs of a peer and a UDP source port
# Frames that can wait in the kernel: a TAP device holds 1000 (txqueuelen), a socket as many as fit in its buffer.
MOST_WAITING = 1 << 16

# How frames are read and written. FILE: one per read or write. SOCKET: many per recvmmsg or sendmmsg. STREAM: each
# frame follows its length (be32), as in QEMU's `-netdev stream`. DATAGRAM_SOCKET: as SOCKET, but sent to an address, as
# in QEMU's `-netdev dgram`. PIPE: frames come from a pipe that somebody else fills, and are written as to a FILE.
FILE, SOCKET, STREAM, DATAGRAM_SOCKET, PIPE = 0, 1, 2, 3, 4
LENGTH = 4  # bytes before a frame of a stream
LONGEST = 4096 + 65536  # longest frame of a stream, in bytes: QEMU ends the connection for more (NET_BUFSIZE)
STREAM_ROOM = BATCH * FRAME_STRIDE  # bytes per read of a stream, which uses the others' frame buffers as one


class EthernetEnd(Record, size=384):
    """A wire that carries Ethernet frames through a descriptor, as compiled code serves it.

    `tx` is the PIPE_END of queue pairs' packets that `transmit` consumes, `replies` the PIPE_END of whole frames of
    another thread. That thread gets frames through the socket `thread`. `mac` is a native load of the own MAC, 48
    bits. `gids` are OWN_GIDs, `egresses` rows of EGRESS, `sending` rows of SEND_SLOT, and `messages` their MMSGHDRs.

    `position` counts frames. When the descriptor is found empty after a `mark`, it also advances by MOST_WAITING. So
    once it has advanced by that, everything that arrived before the mark is read. The engine sets `gone` when the
    other end of the descriptor is gone, and does not use the descriptor while it is set. `EthernetWire.plug` clears
    it.

    For a stream, `buffer` has the bytes that were read, from `begin` to `end`. `rest` has the part of a frame that
    could not be sent at once, from `rest_at` to `rest_end`.

    `virtio` is the length of the VIRTIO_NET before each frame: 10, or 0. `read_at` to `read_end` are the indices of
    ARRIVED records that were read but not handed out; `first` is the address of those handed out last. `cutting` is
    the LARGE_FRAME whose segments are handed out, in the ARRIVED records at `segments`. `rx` is the PIPE_END of the
    pipe that frames come from, and `credit` how many of them may be taken. These frames wait for room in `queue_count`
    receive queues, whose rows' addresses are at `queues`. The longest of them has `longest` bytes.

    `bth`, `nbytes`, `peer`, `own` (the index of the own GID) and `ip`, `ip_bytes`, `version` are those of the packet
    at hand.
    """

    tx: I64 = 0
    replies: I64 = 8
    thread: I64 = 16
    fd: I64 = 24
    reading: I64 = 32
    mac: I64 = 40
    gids: I64 = 48
    gid_count: I64 = 56
    egresses: I64 = 64
    messages: I64 = 72
    scratch: I64 = 80
    vector: I64 = 88
    arrived: I64 = 96
    gone: I64 = 104
    more: I64 = 112
    position: I64 = 120
    marked: I64 = 128
    tx_dropped: I64 = 136
    tx_frames: I64 = 144
    tx_error: I64 = 152
    bth: I64 = 160
    nbytes: I64 = 168
    peer_high: I64 = 176
    peer_low: I64 = 184
    own: I64 = 192
    ip: I64 = 200
    ip_bytes: I64 = 208
    version: I64 = 216
    sending: I64 = 224
    buffer: I64 = 232
    begin: I64 = 240
    end: I64 = 248
    rest: I64 = 256
    rest_at: I64 = 264
    rest_end: I64 = 272
    promiscuous: I64 = 280
    virtio: I64 = 288
    read_at: I64 = 296
    read_end: I64 = 304
    first: I64 = 312
    segments: I64 = 320
    cutting: I64 = 328
    rx: I64 = 336
    queues: I64 = 344
    queue_count: I64 = 352
    longest: I64 = 360
    credit: I64 = 368


ETHERNET_WIRE = EthernetEnd.entry


class OwnGid(Record, size=16):
    """A GID of the port."""

    high: I64 = 0
    low: I64 = 8


OWN_GID = OwnGid.entry


class Egress(Record, size=64):
    """How packets leave: addresses, and the MAC of the next hop.

    How a packet leaves: the MAC that it goes to, and the GID and UDP port that it comes from. `version` is that of IP,
    0 in a free row.
    """

    version: I64 = 0
    mac: I64 = 8
    gid_high: I64 = 16
    gid_low: I64 = 24
    port: I64 = 32


EGRESS = Egress.entry


class Arrived(Record, size=32):
    """A frame that has arrived, and where it lies.

    A frame that has arrived. `cut`: it did not fit into its buffer. `offload` is the work that remains to be done on
    it (offloads.py); 0 means none.
    """

    frame: I64 = 0
    nbytes: I64 = 8
    cut: I64 = 16
    offload: I64 = 24


ARRIVED = Arrived.entry


class SendSlot(Record, size=256):
    """A frame that is sent: its headers and its pieces.

    An outgoing frame: where it is in its pipe, up to three pieces for writev(2), of which only a stream uses the
    first, and the headers of a packet.
    """

    position: I64 = 0
    iov: Annotated[int, "i64[6]"] = 8
    headers: Annotated[int, "raw[128]"] = 112


SEND_SLOT = SendSlot.entry
SENDING = 32  # frames per call of the kernel

# What the MMSGHDR of a buffer points to.
FRAME_SLOT = Entry("frame_slot", 128, """
    control          0  raw[64]
    iov             64  i64[2]
""")
CONTROL_ROOM = 64

# --- the kernel's: linux/if_packet.h, packet(7) -----------------------------------------------------------------------

AUXDATA = Entry("tpacket_auxdata", 20, """
    status           0  u32
    nbytes           4  u32
    snap_length      8  u32
    mac             12  u16
    net             14  u16
    vlan_tci        16  u16
    vlan_tpid       18  u16
""")
SOL_PACKET, PACKET_AUXDATA, STATUS_VLAN_VALID, STATUS_VLAN_TPID_VALID = 263, 8, 0x10, 0x40


class VirtioNet(Record, size=10):
    """`struct virtio_net_hdr` (linux/virtio_net.h): checksums and segments that are left to the kernel or to the wire.

    linux/virtio_net.h: the work that a frame's sender leaves to the next stage, in the machine's byte order.
    """

    flags: U8 = 0
    gso_type: U8 = 1
    header_bytes: U16 = 2
    gso_bytes: U16 = 4
    checksum_start: U16 = 6
    checksum_offset: U16 = 8


VIRTIO_NET = VirtioNet.entry
NEEDS_CHECKSUM = 1  # flags: sum what is from `checksum_start` on, and store the sum at `checksum_offset`
GSO_TCPV4, GSO_TCPV6, GSO_UDP, GSO_ECN = 1, 4, 5, 0x80  # gso_type: segments with `gso_bytes` of payload


read: External = external("read", 32, 64, 64, ret=64)
write: External = external("write", 32, 64, 64, ret=64)
writev: External = external("writev", 32, 64, 32, ret=64)
recv: External = external("recv", 32, 64, 64, 32, ret=64)
sendmsg: External = external("sendmsg", 32, 64, 32, ret=64)
send: External = external("send", 32, 64, 64, 32, ret=64)
