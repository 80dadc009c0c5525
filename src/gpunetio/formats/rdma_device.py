"""The structures of the RDMA library: those that kernels have pointers to, and one that a process sends to its peer.

GPUNetIO's own are not public, so these are ours. The first two are in the byte order of the host: "host" writes a
field, and kernels only read it; "kernels" write the others, which start at 0. The third one travels, and is big-endian.
"""

from .layout import I64, U32, Entry, Record


class DevRdmaQueue(Record, size=128):
    """A queue that threads fill in batches: the sends of a connection, or the receives of all connections.

        turn      kernels   which slot is next, and the strong batch that is being filled: TURN_…
        posted    kernels   sends: what was committed. The index of the next slot << COMMITS_BITS, and in these bits,
                            how many batches
        taken     kernels   sends: the newest `posted` for which `rdma_wait_all` has waited. Receives: messages that
                            `rdma_recv_wait_all` has returned, of all connections
        received  kernels   messages of the connection that `rdma_recv_wait_all` has returned
        looking   kernels   receives: not 0 while a thread takes messages
        qp        host      address of a VerbsQp: the connection's, or any that receives there; 0: there is none
        marks     host      address of a word for each slot: how often the slot was filled
        rdma      host      receives: address of the DevRdma
        slots     host      slots of the ring, a power of two
        shift     host      log2 of that
    """

    turn: I64 = 0
    posted: I64 = 8
    taken: I64 = 16
    received: I64 = 24
    looking: I64 = 32
    qp: I64 = 64
    marks: I64 = 72
    rdma: I64 = 80
    slots: U32 = 88
    shift: U32 = 92


DEV_RDMA_QUEUE = DevRdmaQueue.entry

# Parts of `turn`, from the lowest bit: the index of the next slot; how many slots of the strong batch are reserved but
# not filled; 1 + the number of the block that fills it, or 0; and in the highest bit, whether a thread commits.
TURN_INDEX_BITS = 24
TURN_OPEN_BITS = 16
TURN_BLOCK_BITS = 22  # the number is taken modulo this

COMMITS_BITS = 24  # of `posted`


class DevRdma(Record, size=64):
    """All connections of an `Rdma`.

    `connections` DevRdmaQueues follow it, one for the sends of each connection, and then the one of receives. Kernels
    compute the address of a queue, and need not wait to load it. Kernels write `uncounted`: commits that an
    `rdma_wait_all` had waited for before it found a connection in error.
    """

    connections: U32 = 0
    uncounted: I64 = 8


DEV_RDMA = DevRdma.entry

# A connection as its owner describes it to the peer. `checksum` is the CRC-32 of the other bytes.
CONNECTION_EXPORT = Entry("connection_export", 64, """
    magic                   0  be32
    version                 4  be32
    transport               8  be32
    qpn                    12  be32
    gid                    16  raw[16]
    lid                    32  be32
    mtu                    36  be32
    psn                    40  be32
    checksum               60  be32
""")
CONNECTION_EXPORT_MAGIC = int.from_bytes(b"GNrd", "big")
CONNECTION_EXPORT_VERSION = 1
