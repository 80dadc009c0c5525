"""Common steps of tests of the transport with a `Peer`: post, and expect packets, completions and bytes."""

from dataclasses import replace

from gpunetio.enums import QpState
from gpunetio.nic.state.reasons import Reason
from nic_rig import ALWAYS, FLUSHED, REQ, SEND, SEND_IMM, control, error_of, raddr, reports_of
from transport_rig import Packet, Peer

MTUS = (256, 512, 1024, 2048, 4096)
VA, RKEY = 0x1122334455667788, 0x99AABBCC  # at the peer; the NIC cannot check them
TIMEOUT = 4096 << 14  # nanoseconds; ack_timeout 14


def lengths(mtu: int) -> list[int]:
    """Messages around the boundaries of packets."""
    return [0, 1, 2, 3, 4, 5, *(n * mtu + d for n in (1, 2, 3) for d in (-1, 0, 1))]


def post(
    peer: Peer, opcode: int, *parts: bytes, flags: int = 0, imm: int = 0, opmod: int = 0, ring: bool = True
) -> int:
    """Post a WQE with a completion and the given flags."""
    queue, body = peer.queue, b"".join(parts)
    head = bytearray(control(opcode, queue.index, peer.qpn, 1 + len(body) // 16, ALWAYS, imm))
    head[0], head[11] = opmod, head[11] | flags
    index = queue.write_wqe(bytes(head) + body)
    if ring:
        queue.ring()
    return index


def request(peer: Peer, opcode: int, nbytes: int, offset: int = 0, **fields: int) -> int:
    """Post a request for bytes of `here` and for VA + offset."""
    address = () if opcode in (SEND, SEND_IMM) else (raddr(VA + offset, RKEY),)
    local = (peer.lab.here.at(offset, nbytes),) if nbytes else ()
    return post(peer, opcode, *address, *local, **fields)


def completed(peer: Peer, *indices: int) -> None:
    """Exactly these WQEs have succeeded."""
    cqes = peer.queue.done.take(len(indices))
    assert [(cqe.opcode, cqe.counter) for cqe in cqes] == [(REQ, index) for index in indices]
    peer.lab.settle()
    assert peer.queue.done.poll() is None


def failed(peer: Peer, syndrome: int, reason: Reason, flushed: int = 0) -> None:
    """The next WQE has failed, the rest is flushed, the QP is in ERR and the log says why."""
    assert error_of(peer.queue.done.next()) == (syndrome, reason)
    assert [error_of(cqe) for cqe in peer.queue.done.take(flushed)] == [(FLUSHED, Reason.FLUSH)] * flushed
    assert peer.queue.qp.state == QpState.ERR
    *_, report = reports_of(peer.lab.nic, peer.qpn)  # an earlier report may be of an earlier QP with this number
    assert (report.reason, report.responder) == (reason, False)


def plain(packet: Packet) -> Packet:
    """A packet without what is checked apart: AckReq, padding, MSN, QPN."""
    aeth = (packet.aeth[0], 0) if packet.aeth else None
    return replace(packet, ack=0, pad=None, aeth=aeth, qpn=0)


def same(packets: list[Packet], expected: list[Packet]) -> None:
    """Packets are these, and padded to a multiple of four (9.2.4)."""
    assert [plain(packet) for packet in packets] == [plain(packet) for packet in expected]
    assert [packet.pad for packet in packets] == [-len(packet.payload) % 4 for packet in packets]


def received(peer: Peer, opcode: int, nbytes: int, imm: int = 0) -> None:
    """The next receive has been completed with this."""
    cqe = peer.queue.arrived.next()
    assert (cqe.opcode, cqe.byte_cnt, cqe.imm, cqe.qpn) == (opcode, nbytes, imm, peer.qpn)


def target(peer: Peer, offset: int = 0) -> tuple[int, int]:
    """(va, rkey) of memory that the peer may write and read."""
    return peer.lab.there.address + offset, peer.lab.there.key


def arrived(peer: Peer, expected: dict[int, bytes]) -> None:
    """The memory holds these bytes at these offsets, and nothing else."""
    memory = bytearray(len(peer.lab.there.whole))
    for offset, payload in expected.items():
        start = peer.lab.there.start + offset
        memory[start : start + len(payload)] = payload
    assert peer.lab.there.whole.tobytes() == bytes(memory)
