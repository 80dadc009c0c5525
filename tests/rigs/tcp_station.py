"""A hand-made station at the end of a wire: ARP, pings, and TCP connections whose segments it makes itself.

It checks everything that it receives: scapy recomputes checksums and lengths, and each segment must be where RFC 9293
allows it.
"""

import itertools
import select
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from scapy.layers.inet import ICMP, IP, TCP
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Packet

from stream_end import frames_of, joined

PATIENCE = 20.0  # seconds
MODULUS = 1 << 32
WORD = MODULUS - 1


def distance(a: int, b: int) -> int:
    """How far sequence number `a` is behind `b`; negative before it (RFC 9293 3.4)."""
    return (a - b + (MODULUS >> 1)) % MODULUS - (MODULUS >> 1)


def checked(data: bytes) -> Packet:
    """The frame, if scapy makes the same of what it says."""
    frame = Ether(data)
    if IP in frame:
        again = frame.copy()
        fragment = frame[IP].flags.MF or frame[IP].frag  # its checksums are those of the whole
        for layer, *names in ((IP, "chksum", "len"), (TCP, "chksum", "dataofs"), (ICMP, "chksum")):
            if layer in again and not (fragment and layer is not IP):
                for name in names:
                    delattr(again[layer], name)
        assert bytes(again) == data, f"scapy makes {bytes(again).hex()} of {frame!r}"
    return frame


def payload_of(frame: Packet) -> bytes:
    """What is behind the TCP header, without padding of Ethernet."""
    ip, tcp = frame[IP], frame[TCP]
    return bytes(tcp)[tcp.dataofs * 4 :][: ip.len - ip.ihl * 4 - tcp.dataofs * 4]


class Station:
    """A host `here` whose wire is a stream socket of frames, and that speaks with the host `there`."""

    MAC = "02:00:00:00:00:05"

    def __init__(self, sock: socket.socket, here: str = "10.77.9.2", there: str = "10.77.9.1"):
        self.sock, self.here, self.there, self.their_mac = sock, here, there, ""
        self.clients: dict[int, Client] = {}
        self.others: list[Packet] = []  # frames that belong to no client
        self.tags: Packet | None = None  # VLAN tags of what it sends
        self._rest = b""
        self._ports = itertools.count(20_000)
        self._ask()

    def _ask(self) -> None:
        """Find their MAC: again and again, as frames may get lost."""
        asked = Ether(src=self.MAC, dst="ff:ff:ff:ff:ff:ff") / ARP(hwsrc=self.MAC, psrc=self.here, pdst=self.there)
        end = time.monotonic() + PATIENCE
        while not self.their_mac:
            assert time.monotonic() < end, f"nobody answers ARP for {self.there}"
            self.send(asked)
            self.listen(lambda: bool(self.their_mac), 0.5)

    def frame(self, l4: Packet, **ip: Any) -> Packet:
        """A frame from here to there."""
        l2 = Ether(src=self.MAC, dst=self.their_mac)
        l2 = l2 / self.tags if self.tags else l2
        return l2 / IP(**({"src": self.here, "dst": self.there} | ip)) / l4

    def send(self, *frames: Any) -> None:
        self.sock.sendall(joined(*frames))

    def listen(self, done: Callable[[], bool], timeout: float = PATIENCE) -> bool:
        """Take frames until `done()`: whether it is. Each goes to its client, or to `others`."""
        end = time.monotonic() + timeout
        while not done():
            ready, _, _ = select.select([self.sock], [], [], max(0, end - time.monotonic()))
            if not ready:
                return done()
            new = self.sock.recv(1 << 16)
            assert new, "the other end has closed the wire"
            found, self._rest = frames_of(self._rest + new)
            for data in found:
                self._take(checked(data))
        return True

    def _take(self, frame: Packet) -> None:
        if ARP in frame:
            arp = frame[ARP]
            if arp.op == 1 and arp.pdst == self.here:
                answer = ARP(op=2, hwsrc=self.MAC, psrc=self.here, hwdst=arp.hwsrc, pdst=arp.psrc)
                self.send(Ether(src=self.MAC, dst=arp.hwsrc) / answer)
            elif arp.op == 2 and not self.their_mac:
                assert arp.psrc == self.there
                self.their_mac = frame.src
            else:
                self.others.append(frame)
            return
        if IP not in frame or frame[IP].dst != self.here:
            return
        assert (frame.src, frame.dst, frame[IP].src) == (self.their_mac, self.MAC, self.there)
        client = self.clients.get(frame[TCP].dport) if TCP in frame and frame[TCP].sport == 80 else None
        if client:
            client.take(frame)
        else:
            self.others.append(frame)

    def hear(self, wanted: Callable[[Packet], bool] = lambda frame: True) -> Packet:
        """The next frame of `others` that is wanted. What came before it is forgotten."""

        def found() -> bool:
            while self.others and not wanted(self.others[0]):
                del self.others[0]
            return bool(self.others)

        assert self.listen(found), "no such frame has come"
        return self.others.pop(0)

    def client(self, **options: Any) -> "Client":
        """A connection, not open yet, from a port that nobody has used."""
        client = Client(self, options.pop("port", 0) or next(self._ports), **options)
        self.clients[client.port] = client
        return client


class Client:
    """One end of a connection to port 80, as an obedient client unless it is told otherwise.

    `mss`     the most bytes that it takes in a segment; None: it does not say, which means 536 (RFC 9293 3.7.1)
    `window`  what it offers
    `iss`     its first sequence number
    `ignore`  says which segments with payload it does as if they were lost
    """

    def __init__(
        self, station: Station, port: int, *, mss: int | None = 1460, window: int = 65535, iss: int = 1000,
        options: Iterable[tuple[str, Any]] = (), ignore: Callable[[Packet], bool] = lambda frame: False,
    ):
        self.station, self.port, self.mss, self.window, self.iss, self.ignore = station, port, mss, window, iss, ignore
        self.options = [*([] if mss is None else [("MSS", mss)]), *options]
        self.next = (iss + 1) & WORD  # of what it sends
        self.acked = iss
        self.theirs: int | None = None  # their first sequence number
        self.edge = 0  # the largest sequence number that it has offered to take, and 1
        self.got = bytearray()
        self.early: dict[int, bytes] = {}
        self.heard: list[Packet] = []
        self.acks = True  # it acknowledges
        self.finished = self.reset = False  # by the other end
        self.fin_at: int | None = None
        self._read = 0

    # --- what it sends

    def make(self, flags: str, payload: bytes = b"", *, seq: int | None = None, **fields: Any) -> Packet:
        """A segment; `ip` are fields of its IP header, the others are of TCP."""
        ip = fields.pop("ip", {})
        tcp = TCP(
            sport=self.port, dport=80, seq=self.next if seq is None else seq & WORD, flags=flags,
            **({"ack": self.expected if "A" in flags else 0, "window": self.window} | fields),
        )
        return self.station.frame(tcp / payload, **ip)

    @property
    def expected(self) -> int:
        """The next sequence number of theirs that it lacks."""
        ends = self.fin_at is not None and len(self.got) == self.fin_at
        return 0 if self.theirs is None else (self.theirs + 1 + len(self.got) + ends) & WORD

    def post(self, flags: str, payload: bytes = b"", **fields: Any) -> None:
        """Send the next segment."""
        self.station.send(self.make(flags, payload, **fields))
        self.next = (self.next + len(payload) + ("F" in flags)) & WORD

    def send(self, payload: bytes) -> None:
        self.post("PA", payload)

    def ack(self) -> None:
        """Acknowledge, and offer the window."""
        edge = (self.expected + self.window) & WORD
        if distance(edge, self.edge) > 0:
            self.edge = edge
        self.station.send(self.make("A"))

    def syn(self) -> None:
        self.station.send(self.make("S", seq=self.iss, options=self.options))

    def open(self) -> "Client":
        """Connect. A SYN that gets no answer in a second is sent again, as those of everybody."""
        for _ in range(10):
            self.syn()
            if self.station.listen(lambda: self.theirs is not None or self.reset, 1.0):
                break
        assert self.theirs is not None, "no SYN-ACK has come"
        assert not self.reset
        self.edge = (self.expected + self.window) & WORD
        self.ack()
        return self

    def get(self, path: str, *lines: str, version: str = "1.1") -> None:
        """Send a request."""
        self.send(request(path, *lines, version=version))

    def close(self) -> None:
        """Send a FIN, and wait for its acknowledgement and the other end's. Each is sent again if it got lost."""
        at = self.next
        self.post("FA")
        for _ in range(20):
            if self.station.listen(lambda: self.reset or (self.finished and self.acked == self.next), 1.0):
                break
            self.station.send(self.make("FA", seq=at))
        assert self.reset or (self.finished and self.acked == self.next), "the other end does not close"

    # --- what it hears

    def take(self, frame: Packet) -> None:
        self.heard.append(frame)
        tcp = frame[TCP]
        flags = str(tcp.flags)
        if "R" in flags:
            self.reset = True
            return
        assert "A" in flags
        assert distance(tcp.ack, self.acked) >= 0 or "S" in flags, "it acknowledges less than before"
        assert distance(tcp.ack, self.next) <= 0, "it acknowledges what was not sent"
        self.acked = max(self.acked, tcp.ack, key=lambda one: distance(one, self.iss))
        if "S" in flags:
            self._take_syn(frame)
            return
        if self.theirs is None:
            return
        payload = payload_of(frame)
        at = distance(tcp.seq, (self.theirs + 1) & WORD)
        assert len(payload) <= (536 if self.mss is None else self.mss), "a segment is longer than the MSS"
        assert at >= 0 or (at, payload) == (-1, b""), "it sends what it did not send before"  # Linux probes a window so
        over = distance((tcp.seq + len(payload)) & WORD, self.edge)
        assert over <= 0 or len(payload) == 1, f"{over} bytes are beyond the window"  # 1: a probe (RFC 9293 3.8.6.1)
        if over > 0 or at < 0 or (payload and self.ignore(frame)):
            return
        self._keep(at, payload)
        if "F" in flags:
            end = at + len(payload)
            assert self.fin_at in (None, end), "FIN has moved"
            self.fin_at = end
        if payload or "F" in flags:
            self.finished = self.fin_at == len(self.got)
            if self.acks:
                self.ack()

    def _take_syn(self, frame: Packet) -> None:
        tcp = frame[TCP]
        assert str(tcp.flags) == "SA"
        assert tcp.ack == (self.iss + 1) & WORD
        assert self.theirs in (None, tcp.seq), "the second SYN-ACK has another sequence number"
        assert not payload_of(frame)
        self.theirs = tcp.seq

    def _keep(self, at: int, payload: bytes) -> None:
        """Put payload to its place. What is there already must be the same."""
        have = self.got[at : at + len(payload)]
        assert bytes(have) == payload[: len(have)], "bytes have changed in a retransmission"
        if at <= len(self.got):
            self.got += payload[len(have) :]
        else:
            self.early[at] = payload
        ready = [start for start in self.early if start <= len(self.got)]
        for start in ready:
            if start in self.early:
                self._keep(start, self.early.pop(start))

    # --- answers

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next answer: status, headers, body. It is read up to its Content-Length."""
        assert self.station.listen(lambda: self.reset or self._next() is not None), f"{len(self.got)} bytes came"
        found = self._next()
        assert found is not None, "the connection was reset before the answer"
        status, headers, body, self._read = found
        return status, headers, body

    def _next(self) -> tuple[int, dict[str, str], bytes, int] | None:
        data = bytes(self.got[self._read :])
        head, found, rest = data.partition(b"\r\n\r\n")
        if not found:
            return None
        first, *lines = head.decode("ascii").split("\r\n")
        version, status, _ = first.split(" ", 2)
        assert version == "HTTP/1.1"
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = int(headers["content-length"])
        if len(rest) < length:
            return None
        return int(status), headers, rest[:length], self._read + len(head) + 4 + length


def request(path: str, *lines: str, version: str = "1.1") -> bytes:
    """The bytes of a GET."""
    return "\r\n".join([f"GET {path} HTTP/{version}", "Host: gpu", *lines, "", ""]).encode()
