"""Random programs of WQEs that send Ethernet packets, and the packets that they put on the wire."""

from typing import Any

from hypothesis import strategies as st
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1Q

from eth_send_rig import CHECKSUMS, Port, error_of, eth, headers, opcode_of, segments
from gpunetio.formats.cqe import CqeOpcode
from gpunetio.formats.wqe import WqeOpcode

V4, V6 = IP(src="192.0.2.1", dst="192.0.2.2", id=0xFFFE), IPv6(src="2001:db8::1", dst="2001:db8::2")
MOST_SEGMENTS, MOST_MSS = 20, 1400
PIECES = 6  # of a TSO's payload; all pieces have the same bytes


def steps(most_payload: int) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """Up to three WQEs. A TSO has up to PIECES times `most_payload` bytes."""
    l3 = st.sampled_from([V4, V6])
    l4 = st.sampled_from([UDP(sport=5, dport=6), TCP(sport=7, dport=8, flags="PA")])
    packets = st.tuples(l3, l4, st.binary(max_size=300))
    tags = st.none() | st.just(77)
    return st.lists(
        st.tuples(st.just("send"), packets, st.integers(0, 60), st.integers(1, 4), st.booleans(), tags)
        | st.tuples(st.just("many"), st.lists(packets, min_size=1, max_size=5), st.booleans())
        | st.tuples(
            st.just("tso"), l3, st.integers(0, most_payload) | st.just(most_payload), st.sampled_from([1, 2, PIECES]),
            st.integers(1, MOST_MSS),
            st.sampled_from(["A", "PA", "FPA", "PAC", "FPAEC"]), tags,
        )
        | st.tuples(st.just("nop")),
        min_size=1, max_size=3,
    )


class Program:
    """Writes WQEs, and what they send, as a plain model in Python has it. Packets begin with `l2`."""

    def __init__(self, port: Port, l2: Any):
        self.port, self.l2, self.expected, self.at = port, l2, list[bytes](), 0

    def run(self, steps: list[tuple[Any, ...]]) -> None:
        """Write all WQEs, and let the NIC execute them."""
        for name, *arguments in steps:
            getattr(self, name)(*arguments)
        self.port.sq.post(opcode=WqeOpcode.NOP)
        (cqe,) = self.port.sq.done()
        assert opcode_of(cqe) == CqeOpcode.REQ, error_of(cqe)

    def place(self, data: bytes, pieces: int = 1) -> list[bytes]:
        size = max(-(-len(data) // pieces), 1)
        made = []
        for start in range(0, len(data), size):
            made.append(self.port.put(self.at, data[start : start + size]))
            self.at += size
        return made

    def frame(self, packet: tuple[Any, Any, bytes], checksum: bool) -> tuple[bytes, bytes]:
        """A frame as it is given, with a wrong checksum, and as it is sent."""
        l3, l4, payload = packet
        right = self.l2 / l3 / l4 / payload
        wrong = right.copy()
        wrong[type(l4)].chksum = 0xABCD
        return bytes(wrong), bytes(right if checksum else wrong)

    def nop(self) -> None:
        self.port.sq.write(opcode=WqeOpcode.NOP, ask=0)

    def send(self, packet: Any, inline: int, pieces: int, checksum: bool, vlan: int | None) -> None:
        given, sent = self.frame(packet, checksum)
        inline = 0 if vlan is not None else min(inline, len(given))
        if vlan is not None:
            sent = sent[:12] + b"\x81\0" + vlan.to_bytes(2, "big") + sent[12:]
        segment = eth(given[:inline], CHECKSUMS if checksum else 0, vlan=vlan)
        self.port.sq.write(segment, *self.place(given[inline:], pieces), ask=0)
        self.expected.append(sent)

    def many(self, several: list[Any], checksum: bool) -> None:
        frames = [self.frame(packet, checksum) for packet in several]
        data = [segment for given, _ in frames for segment in self.place(given)]
        self.port.sq.write(eth(flags=CHECKSUMS if checksum else 0), *data, opcode=WqeOpcode.ENHANCED_MPSW, ask=0)
        self.expected += [sent for _, sent in frames]

    def tso(self, l3: Any, nbytes: int, pieces: int, mss: int, flags: str, vlan: int | None) -> None:
        l2, tcp = self.l2 if vlan is None else self.l2 / Dot1Q(vlan=vlan), TCP(seq=0xFFFF_FFF0, flags=flags)
        piece = bytes(i * 7 + self.at & 0xFF for i in range(nbytes))
        payload = piece * pieces
        mss = min(max(mss, len(payload) // MOST_SEGMENTS + 1), MOST_MSS)
        self.port.sq.write(
            eth(headers(l2, l3, tcp), mss=mss), *self.place(piece) * pieces, opcode=WqeOpcode.TSO, ask=0
        )
        self.expected += segments(l2, l3, tcp, payload, mss)
