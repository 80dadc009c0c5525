"""Records of the compiled code of wires that carry Ethernet frames, and structures for the kernel's calls."""

from __future__ import annotations


from ..jit.struct_view import View, struct_view
from ..jit.ops.calls import External, external
from ..formats.layout import Entry

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

# `tx` is the PIPE_END of queue pairs' packets that `transmit` consumes, `replies` the PIPE_END of whole frames of
# another thread. That thread gets frames through the socket `thread`. `mac` is a native load of the own MAC, 48 bits.
# `gids` are OWN_GIDs, `egresses` rows of EGRESS, `sending` rows of SEND_SLOT, and `messages` their MMSGHDRs.
#
# `position` counts frames. When the descriptor is found empty after a `mark`, it also advances by MOST_WAITING. So once
# it has advanced by that, everything that arrived before the mark is read. The engine sets `gone` when the other end of
# the descriptor is gone, and does not use the descriptor while it is set. `EthernetWire.plug` clears it.
#
# For a stream, `buffer` has the bytes that were read, from `begin` to `end`. `rest` has the part of a frame that could
# not be sent at once, from `rest_at` to `rest_end`.
#
# `virtio` is the length of the VIRTIO_NET before each frame: 10, or 0. `read_at` to `read_end` are the indices of
# ARRIVED records that were read but not handed out; `first` is the address of those handed out last. `cutting` is the
# LARGE_FRAME whose segments are handed out, in the ARRIVED records at `segments`. `rx` is the PIPE_END of the pipe that
# frames come from, and `credit` how many of them may be taken. These frames wait for room in `queue_count` receive
# queues, whose rows' addresses are at `queues`. The longest of them has `longest` bytes.
#
# `bth`, `nbytes`, `peer`, `own` (the index of the own GID) and `ip`, `ip_bytes`, `version` are those of the packet at
# hand.
ETHERNET_WIRE = Entry("ethernet_wire", 384, """
    tx               0  i64
    replies          8  i64
    thread          16  i64
    fd              24  i64
    reading         32  i64
    mac             40  i64
    gids            48  i64
    gid_count       56  i64
    egresses        64  i64
    messages        72  i64
    scratch         80  i64
    vector          88  i64
    arrived         96  i64
    gone           104  i64
    more           112  i64
    position       120  i64
    marked         128  i64
    tx_dropped     136  i64
    tx_frames      144  i64
    tx_error       152  i64
    bth            160  i64
    nbytes         168  i64
    peer_high      176  i64
    peer_low       184  i64
    own            192  i64
    ip             200  i64
    ip_bytes       208  i64
    version        216  i64
    sending        224  i64
    buffer         232  i64
    begin          240  i64
    end            248  i64
    rest           256  i64
    rest_at        264  i64
    rest_end       272  i64
    promiscuous    280  i64
    virtio         288  i64
    read_at        296  i64
    read_end       304  i64
    first          312  i64
    segments       320  i64
    cutting        328  i64
    rx             336  i64
    queues         344  i64
    queue_count    352  i64
    longest        360  i64
    credit         368  i64
""")

OWN_GID = Entry("own_gid", 16, """
    high             0  i64
    low              8  i64
""")

# How a packet leaves: the MAC that it goes to, and the GID and UDP port that it comes from. `version` is that of IP, 0
# in a free row.
EGRESS = Entry("egress", 64, """
    version          0  i64
    mac              8  i64
    gid_high        16  i64
    gid_low         24  i64
    port            32  i64
""")

# A frame that has arrived. `cut`: it did not fit into its buffer. `offload` is the work that remains to be done on it
# (offloads.py); 0 means none.
ARRIVED = Entry("arrived", 32, """
    frame            0  i64
    nbytes           8  i64
    cut             16  i64
    offload         24  i64
""")

# An outgoing frame: where it is in its pipe, up to three pieces for writev(2), of which only a stream uses the first,
# and the headers of a packet.
SEND_SLOT = Entry("send_slot", 256, """
    position         0  i64
    iov              8  i64[6]
    headers        112  raw[128]
""")
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

# linux/virtio_net.h: the work that a frame's sender leaves to the next stage, in the machine's byte order.
VIRTIO_NET = Entry("virtio_net_hdr", 10, """
    flags            0  u8
    gso_type         1  u8
    header_bytes     2  u16
    gso_bytes        4  u16
    checksum_start   6  u16
    checksum_offset  8  u16
""")
NEEDS_CHECKSUM = 1  # flags: sum what is from `checksum_start` on, and store the sum at `checksum_offset`
GSO_TCPV4, GSO_TCPV6, GSO_UDP, GSO_ECN = 1, 4, 5, 0x80  # gso_type: segments with `gso_bytes` of payload

ethernet_wire_at: View = struct_view(ETHERNET_WIRE)
own_gid_at: View = struct_view(OWN_GID)
egress_at: View = struct_view(EGRESS)
arrived_at: View = struct_view(ARRIVED)
send_slot_at: View = struct_view(SEND_SLOT)
virtio_net_at: View = struct_view(VIRTIO_NET)

read: External = external("read", 32, 64, 64, ret=64)
write: External = external("write", 32, 64, 64, ret=64)
writev: External = external("writev", 32, 64, 32, ret=64)
recv: External = external("recv", 32, 64, 64, 32, ret=64)
sendmsg: External = external("sendmsg", 32, 64, 32, ret=64)
send: External = external("send", 32, 64, 64, 32, ret=64)
