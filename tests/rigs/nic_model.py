"""A model in plain Python of what an mlx5 NIC must do with RC work queues.

It shares nothing with the software NIC except the table of operations, which test_operations.py checks.

It reads WQEs from the bytes of a send ring, moves bytes between `bytearray`s, and predicts completions and states.
Rules are from the InfiniBand specification, volume 1, chapters 9.7 (RC), 9.9 (errors) and 10.3 (QP states), and from
the PRM's description of WQEs and CQEs. `vendor` numbers, which no specification defines, are the software NIC's own.
For a requester whose peer is across a wire, they stand for the code of a NAK, because the requester learns no more.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import NamedTuple

from gpunetio.formats.operations import OPERATIONS

# WQE opcodes
NOP, RDMA_WRITE, WRITE_IMM, SEND, SEND_IMM, READ, CMP_SWAP, FETCH_ADD = 0x00, 0x08, 0x09, 0x0A, 0x0B, 0x10, 0x11, 0x12
MASKED_CS, MASKED_FA, DUMP, MMO = 0x14, 0x15, 0x23, 0x2F
# CQE opcodes
REQ, RESP_WRITE_IMM, RESP_SEND, RESP_SEND_IMM, REQ_ERR, RESP_ERR = 0, 1, 2, 3, 13, 14
# rights of regions (ibv_access_flags); the remote ones are also rights of QPs
LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC = 1, 2, 4, 8
# syndromes of error CQEs
LOCAL_LENGTH, LOCAL_QP_OP, LOCAL_PROT, WR_FLUSH = 0x01, 0x02, 0x04, 0x05
REMOTE_INVALID, REMOTE_ACCESS, REMOTE_OP, RETRY_EXCEEDED, RNR_EXCEEDED = 0x12, 0x13, 0x14, 0x15, 0x16
# vendor syndromes
STALE, WRONG_QPN, MALFORMED, UNSUPPORTED, LENGTH, LKEY, RKEY, QP_RIGHTS = 1, 2, 3, 4, 5, 6, 10, 14
MISALIGNED, ATOMIC_LENGTH, RECV_TOO_SMALL, RECV_LKEY, RNR, NO_RESPONSE, FLUSH = 15, 16, 17, 18, 19, 20, 22
OPMOD = 31
NAK_VENDORS = {REMOTE_INVALID: 26, REMOTE_ACCESS: 27, REMOTE_OP: 28}  # by syndrome
NO_KEY, OTHER_PD, NO_RIGHT, OUT_OF_BOUNDS = 0, 1, 2, 3  # to be added to LKEY or RKEY

# Checked by test_operations.py against the specifications. Other operations have rules of their own below.
ROWS = {int(row.opcode): row for row in OPERATIONS.values() if not row.local}
ATOMICS = tuple(opcode for opcode, row in ROWS.items() if row.atomic)
MASKED = tuple(opcode for opcode, row in ROWS.items() if row.masked)
RECEIVES = {opcode: int(row.receives) for opcode, row in ROWS.items() if row.receives is not None}
NEEDS = {opcode: int(row.right) for opcode, row in ROWS.items()}
RETURNS = tuple(opcode for opcode, row in ROWS.items() if row.returns)
MASKED_BYTES = {0x08: 4, 0x09: 8}  # by the opmod of a masked atomic
ON_FIRST_ERROR, ALWAYS = 1, 2
GIB = 1 << 30
LIST_END = 0x100
BLOCK, SEGMENT = 64, 16
INLINE = 32  # bytes that a CQE carries


class Refused(Exception):
    """A request cannot be carried out; `receive` is the syndrome and vendor of the receive that fails with it."""

    def __init__(self, syndrome: int, vendor: int, receive: tuple[int, int] | None = None):
        self.syndrome, self.vendor, self.receive = syndrome, vendor, receive


class Cqe(NamedTuple):
    """What a CQE must say; `None` where the specification leaves the field open."""

    opcode: int
    owner: int
    counter: int
    qpn: int
    wqe_opcode: int | None
    user_index: int
    byte_cnt: int | None
    imm: int | None
    syndrome: int
    vendor: int
    payload: bytes


@dataclass
class Cq:
    """A completion queue of 2**log entries."""

    log: int
    cqes: list[Cqe] = field(default_factory=list)

    def add(self, qp: Qp, opcode: int, counter: int, **fields: int | bytes | None) -> None:
        owner = len(self.cqes) >> self.log & 1
        values = {"wqe_opcode": None, "byte_cnt": None, "imm": None, "syndrome": 0, "vendor": 0, "payload": b""}
        values.update(fields)
        self.cqes.append(Cqe(opcode, owner, counter & 0xFFFF, qp.qpn, user_index=qp.user_index, **values))  # type: ignore[arg-type]


@dataclass
class Region:
    """Registered memory: `nbytes` at `start` of `memory`, which its key sees from address `iova`."""

    key: int
    pd: int
    access: int
    iova: int
    memory: bytearray
    start: int
    nbytes: int


class Span(NamedTuple):
    """Bytes of a region's memory."""

    memory: bytearray
    start: int
    nbytes: int

    def get(self) -> bytes:
        return bytes(self.memory[self.start : self.start + self.nbytes])

    def put(self, payload: bytes) -> None:
        self.memory[self.start : self.start + len(payload)] = payload


@dataclass
class Nic:
    """Registered regions by key."""

    regions: dict[int, Region] = field(default_factory=dict)

    def register(self, region: Region) -> None:
        self.regions[region.key] = region

    def span(self, key: int, pd: int, address: int, nbytes: int, right: int, syndrome: int, vendor: int) -> Span:
        """The memory behind a key, or Refused (10.6.3.3)."""
        region = self.regions.get(key)
        if region is None:
            raise Refused(syndrome, vendor + NO_KEY)
        if region.pd != pd:
            raise Refused(syndrome, vendor + OTHER_PD)
        if region.access & right != right:
            raise Refused(syndrome, vendor + NO_RIGHT)
        if address < region.iova or address + nbytes > region.iova + region.nbytes:
            raise Refused(syndrome, vendor + OUT_OF_BOUNDS)
        return Span(region.memory, region.start + address - region.iova, nbytes)


@dataclass
class Request:
    """A message on its way: what the responder gets to see."""

    opcode: int
    payload: bytes
    nbytes: int
    address: int
    rkey: int
    imm: int
    operands: tuple[int, ...] = ()


def header_segments(opcode: int, opmod: int) -> int:
    """Segments before the data."""
    return 1 + len(ROWS[opcode].forms[opcode in MASKED and opmod == 0x09])


def operands_of(opcode: int, nbytes: int, segments: bytes) -> tuple[int, ...]:
    """What an atomic's segments say: two words, or of a masked compare and swap four."""
    count = 4 if opcode == MASKED_CS else 2
    return tuple(int.from_bytes(segments[i * nbytes : (i + 1) * nbytes], "big") for i in range(count))


def combined(opcode: int, word: int, operands: tuple[int, ...], nbytes: int) -> int:
    """The word that an atomic leaves."""
    bits = 8 * nbytes
    if opcode == FETCH_ADD:
        return (word + operands[0]) % (1 << bits)
    if opcode == CMP_SWAP:
        swap, compare = operands
        return swap if word == compare else word
    if opcode == MASKED_CS:
        swap, compare, swap_mask, compare_mask = operands
        return word & ~swap_mask | swap & swap_mask if word & compare_mask == compare & compare_mask else word
    add, boundary = operands  # each field from the lowest bit on, each modulo its size
    result = start = 0
    for bit in range(bits):
        if boundary >> bit & 1 or bit == bits - 1:
            size = 1 << bit + 1 - start
            result |= ((word >> start) + (add >> start)) % size << start
            start = bit + 1
    return result


@dataclass
class Qp:
    """One end of a connection; `post` takes the bytes of its send ring and the new producer index."""

    nic: Nic
    qpn: int
    pd: int
    sq_entries: int
    rq_entries: int
    rq_stride: int
    send_cq: Cq
    recv_cq: Cq
    user_index: int = 0
    wired: bool = False  # whether the peer is on another NIC
    inline: bool = False  # whether short SENDs come in CQEs
    state: str = "RST"
    rights: int = 0
    extended: bool = False  # whether its atomic mode allows masked atomics
    peer: Qp | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.refusals: list[tuple[int, int]] = []  # (syndrome, vendor) of all requests of the peer that were refused
        self.reset()

    def reset(self) -> None:
        """RST: the queues are empty, and both count from 0."""
        self.state, self.peer, self.rights, self.extended = "RST", None, 0, False
        self.consumer = self.producer = 0
        self.receives: list[list[tuple[int, int, int]]] = []  # (bytes, lkey, address) of the segments
        self.receive_index = 0
        self.told = False  # whether an error CQE was due
        self.blamed = 0  # the vendor number of the peer's request that took this QP to ERR

    def connect(self, peer: Qp, rights: int, extended: bool) -> None:
        """RTS, with finite retries everywhere."""
        self.reset()
        self.peer, self.rights, self.extended, self.state = peer, rights, extended, "RTS"

    # --- posting

    def post_receive(self, wqe: bytes) -> None:
        """A receive WQE: segments up to one with lkey 0x100."""
        segments = []
        for nbytes, key, address in struct.iter_unpack(">IIQ", wqe):
            if key == LIST_END:
                break
            segments.append((nbytes, key, address))
        self.receives.append(segments)
        if self.state == "ERR":
            self._flush_receives()

    def post(self, ring: bytes, producer: int) -> None:
        """A doorbell: all WQEs before `producer` (16 bits) are there."""
        self.producer += producer - self.producer & 0xFFFF
        while self.consumer != self.producer:
            self._one(ring)

    # --- requester

    def _one(self, ring: bytes) -> None:
        index = self.consumer
        at = index % self.sq_entries * BLOCK
        around = ring[at:] + ring[:at]  # as it looks from this WQE
        dword0, qpn_ds, flags, imm = struct.unpack_from(">II3xBI", around)
        opcode, ds, ce = dword0 & 0xFF, qpn_ds & 0x3F or qpn_ds & 0x40, flags >> 2 & 3
        blocks = -(-ds // 4)
        if self.state == "ERR":  # 10.3.1.5: everything is flushed
            # The length of a WQE that was refused cannot be trusted, but there is nothing else than its ds.
            self.consumer = min(index + max(1, blocks), self.producer)
            self._complete_error(index, opcode, ce, Refused(WR_FLUSH, FLUSH))
            return
        self.consumer = index + 1
        try:
            if dword0 >> 8 & 0xFFFF != index & 0xFFFF:
                raise Refused(LOCAL_QP_OP, STALE)
            if qpn_ds >> 8 != self.qpn:
                raise Refused(LOCAL_QP_OP, WRONG_QPN)
            if ds == 0 or index + blocks > self.producer:
                raise Refused(LOCAL_QP_OP, MALFORMED)
            self.consumer = index + blocks
            nbytes = self._execute(around[: ds * SEGMENT], opcode, dword0 >> 24, imm)
        except Refused as refused:
            self._complete_error(index, opcode, ce, refused)
            self._to_error()
            return
        if ce >= ALWAYS:
            self.send_cq.add(self, REQ, index, wqe_opcode=opcode, byte_cnt=nbytes)

    def _complete_error(self, index: int, opcode: int, ce: int, refused: Refused) -> None:
        if ce != ON_FIRST_ERROR or not self.told:
            self.send_cq.add(
                self, REQ_ERR, index, wqe_opcode=opcode, syndrome=refused.syndrome, vendor=refused.vendor
            )
        self.told = True

    def _execute(self, wqe: bytes, opcode: int, opmod: int, imm: int) -> int | None:
        """Carry out a WQE: the bytes that its CQE counts, where it counts any."""
        if opcode == NOP:
            return None
        if opcode == DUMP:  # one data segment, which is only read
            if len(wqe) != 2 * SEGMENT or wqe[SEGMENT] >> 7:
                raise Refused(LOCAL_QP_OP, MALFORMED)
            self._local(wqe[SEGMENT:], 0)
            return None
        if opcode == MMO and opmod == 1:  # a copy: control, metadata, source, destination
            if len(wqe) != 4 * SEGMENT or wqe[2 * SEGMENT] >> 7 or wqe[32:36] != wqe[48:52]:
                raise Refused(LOCAL_QP_OP, MALFORMED)
            (source,), (target,) = self._local(wqe[32:48], 0, 2 * GIB), self._local(wqe[48:], LOCAL_WRITE, 2 * GIB)
            assert isinstance(source, Span)
            assert isinstance(target, Span)
            target.put(source.get())
            return None
        if opcode not in ROWS:
            raise Refused(LOCAL_QP_OP, UNSUPPORTED)
        word = 8
        if opcode in MASKED:
            if opmod not in MASKED_BYTES:
                raise Refused(LOCAL_QP_OP, OPMOD)
            word = MASKED_BYTES[opmod]
        headers = header_segments(opcode, opmod) * SEGMENT
        if len(wqe) < headers:
            raise Refused(LOCAL_QP_OP, MALFORMED)
        address, rkey = struct.unpack_from(">QI", wqe, 16) if headers > 16 else (0, 0)
        returns = opcode in RETURNS
        local = self._local(wqe[headers:], LOCAL_WRITE if returns else 0)
        nbytes = sum(part.nbytes if isinstance(part, Span) else len(part) for part in local)
        if opcode in ATOMICS and nbytes != word:
            raise Refused(LOCAL_LENGTH, ATOMIC_LENGTH)
        payload = b"" if returns else b"".join(part.get() if isinstance(part, Span) else part for part in local)
        operands = operands_of(opcode, word, wqe[32:headers]) if opcode in ATOMICS else ()
        answer = self._ask(Request(opcode, payload, nbytes, address, rkey, imm, operands))
        if word == 4:
            answer = answer[::-1]  # big-endian, other than words of 8 bytes
        if not returns:
            return None
        for part in local:
            assert isinstance(part, Span)
            part.put(answer[: part.nbytes])
            answer = answer[part.nbytes :]
        return nbytes

    def _local(self, segments: bytes, right: int, most: int = GIB) -> list[Span | bytes]:
        """The memory and the inline bytes that data segments name, `most` bytes altogether."""
        parts: list[Span | bytes] = []
        at = total = 0
        while at < len(segments):
            nbytes, key, address = struct.unpack_from(">IIQ", segments, at)
            if nbytes >> 31:  # inline data, padded to a whole segment
                nbytes &= (1 << 31) - 1
                end = at + -(-(4 + nbytes) // SEGMENT) * SEGMENT
                if right or end > len(segments):
                    raise Refused(LOCAL_QP_OP, MALFORMED)
                parts.append(segments[at + 4 : at + 4 + nbytes])
                at = end
            else:
                nbytes = nbytes or 1 << 31  # byte_count 0 stands for 2 GiB
                if total + nbytes > most:
                    raise Refused(LOCAL_LENGTH, LENGTH)
                parts.append(self.nic.span(key, self.pd, address, nbytes, right, LOCAL_PROT, LKEY))
                at += SEGMENT
            total += nbytes
        return parts

    def _ask(self, request: Request) -> bytes:
        """Have the peer carry out a request: what it returns."""
        peer = self.peer
        if peer is None or peer.peer is not self or peer.state not in ("RTR", "RTS"):
            raise Refused(RETRY_EXCEEDED, NO_RESPONSE)
        try:
            return peer._respond(request)
        except Refused as refused:
            if refused.vendor != RNR:  # 9.9.3: all others are fatal for the responder as well
                if refused.receive is not None:
                    syndrome, vendor = refused.receive
                    peer.recv_cq.add(peer, RESP_ERR, peer.receive_index, syndrome=syndrome, vendor=vendor)
                    peer.receives.pop(0)
                    peer.receive_index += 1
                peer.blamed = refused.vendor
                peer.refusals.append((refused.syndrome, refused.vendor))
                peer._to_error()
                if self.wired:
                    raise Refused(refused.syndrome, NAK_VENDORS[refused.syndrome]) from None
            raise

    # --- responder

    def _respond(self, request: Request) -> bytes:
        """Carry out a request (9.7.4): first the QP, then the receive, then the key, then the data."""
        need = NEEDS[request.opcode]
        masked = request.opcode in MASKED
        if masked and not (self.extended and self.rights & REMOTE_ATOMIC):
            raise Refused(REMOTE_INVALID, QP_RIGHTS)
        if request.opcode in ATOMICS and request.address % request.nbytes:
            raise Refused(REMOTE_INVALID, MISALIGNED)
        if self.rights & need != need:
            raise Refused(REMOTE_INVALID, QP_RIGHTS)
        if request.opcode in RECEIVES and not self.receives:
            raise Refused(RNR_EXCEEDED, RNR)
        answer = carried = b""
        if request.opcode in (SEND, SEND_IMM) and self.inline and 0 < request.nbytes <= INLINE:
            carried = request.payload  # and nobody reads the receive
        elif request.opcode in (SEND, SEND_IMM):
            self._deliver(request.payload)
        elif request.nbytes:  # 9.7.4.1.6: the key of an empty request is not checked
            span = self.nic.span(
                request.rkey, self.pd, request.address, request.nbytes, need, REMOTE_ACCESS, RKEY
            )
            answer = span.get()
            if request.opcode in (RDMA_WRITE, WRITE_IMM):
                span.put(request.payload)
            if request.opcode in ATOMICS:
                word = int.from_bytes(answer, "little")
                word = combined(request.opcode, word, request.operands, request.nbytes)
                span.put(word.to_bytes(request.nbytes, "little"))
        if request.opcode in RECEIVES:
            self.recv_cq.add(
                self, RECEIVES[request.opcode], self.receive_index, byte_cnt=request.nbytes,
                imm=request.imm if ROWS[request.opcode].imm else 0, payload=carried,
            )
            self.receives.pop(0)
            self.receive_index += 1
        return answer

    def _deliver(self, payload: bytes) -> None:
        """Scatter a message into the oldest receive: segments in order, each checked when it is reached."""
        segments = self.receives[0]
        if len(payload) > sum(nbytes or 1 << 31 for nbytes, _, _ in segments):
            raise Refused(REMOTE_INVALID, RECV_TOO_SMALL, (LOCAL_LENGTH, RECV_TOO_SMALL))
        for nbytes, key, address in segments:
            part = payload[: nbytes or 1 << 31]
            payload = payload[len(part) :]
            if part:
                try:
                    self.nic.span(key, self.pd, address, len(part), LOCAL_WRITE, LOCAL_PROT, LKEY).put(part)
                except Refused:
                    raise Refused(REMOTE_OP, RECV_LKEY, (LOCAL_PROT, RECV_LKEY)) from None

    # --- errors

    def _to_error(self) -> None:
        """10.3.1.5: what is posted is flushed; sends by whoever rings their doorbell."""
        self.state = "ERR"
        self._flush_receives()

    def _flush_receives(self) -> None:
        for _ in self.receives:
            self.recv_cq.add(self, RESP_ERR, self.receive_index, syndrome=WR_FLUSH, vendor=FLUSH)
            self.receive_index += 1
        self.receives = []
