"""gpunetio packet_processing and a station made by hand: each of its answers is right, and what it must ignore it does.

The wire is a Unix socket, so nothing here needs rights.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scapy.layers.inet import IP, IPOption_NOP
from scapy.layers.inet import TCP as Tcp
from scapy.layers.l2 import Dot1AD, Dot1Q, Ether
from scapy.packet import Packet, Raw

from gpunetio.nic.observe.running import rules
from nic_rig import until
from packet_server import READY, PacketServer, make_pages
from stream_end import StreamEnd
from tcp_station import Client, Station, checked, distance, payload_of, request
from tools import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

class Site:
    """A server, a station on its wire, and its pages."""

    def __init__(self, server: PacketServer, station: Station, pages: dict[str, bytes]):
        self.server, self.station, self.pages = server, station, pages

    def check(self, client: Client, path: str) -> None:
        """The next answer on a connection is this page."""
        status, headers, body = client.answer()
        assert status == 200
        assert body == self.pages[path]
        assert headers["content-length"] == str(len(body))

    def still_serves(self) -> None:
        """A new connection gets a page."""
        client = self.station.client().open()
        client.get("/100.html")
        self.check(client, "/100.html")
        client.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("site")
    (folder / "pages").mkdir()
    pages = make_pages(folder / "pages")
    cable = folder / "cable"
    server = PacketServer(f"unix:{cable}", "--pages", folder / "pages")
    with running(server):
        server.until(READY)
        until(cable.exists, "the wire", 60)
        end = StreamEnd(cable)
        yield Site(server, Station(end.sock), pages)
        end.close()
        server.stop()


@pytest.fixture(autouse=True)
def hung_up(site) -> Iterator[None]:
    """What a test leaves open is reset after it."""
    yield
    for client in site.station.clients.values():
        site.station.send(client.make("R"))
    site.station.clients.clear()


# --- connections -----------------------------------------------------------------------------------------------------


def test_pages(site):
    """All of them on one connection; PSH is in the last segment of each."""
    client = site.station.client().open()
    for path in site.pages:
        client.get(path)
        site.check(client, path)
    client.close()
    assert client.finished
    ends = [frame for frame in client.heard if payload_of(frame)]
    assert "P" in str(ends[-1][Tcp].flags)


@pytest.mark.parametrize("tags", [Dot1Q(vlan=5, prio=3), Dot1AD(vlan=7) / Dot1Q(vlan=5)], ids=["one", "two"])
def test_a_client_in_a_vlan(site, tags):
    """Whatever it hears has its tags: from the CPU and from the server, whole segments and cut ones."""
    site.station.tags = tags
    try:
        client = site.station.client().open()
        for path in ("/10000.html", "/1.html"):
            client.get(path)
            site.check(client, path)
        client.close()
        stray = site.station.client()
        stray.post("A", ack=7)
        assert site.station.listen(lambda: stray.reset)
    finally:
        site.station.tags = None
    wanted = bytes(Ether() / tags)[12:-2]
    for frame in (*client.heard, *stray.heard):
        assert bytes(frame)[12:].startswith(wanted + b"\x08\0")


def test_an_unknown_page(site):
    client = site.station.client().open()
    client.get("/nowhere.html")
    assert client.answer()[0] == 404
    client.close()


@pytest.mark.parametrize("mss", [None, 64, 100, 536, 1000, 1460, 9000])
def test_segments_have_at_most_the_clients_mss(site, mss):
    """Without the option, 536 (RFC 9293 3.7.1). The station refuses what is longer."""
    client = site.station.client(mss=mss).open()
    client.get("/10000.html")
    site.check(client, "/10000.html")
    client.close()


@pytest.mark.parametrize("options", [
    [("WScale", 7), ("SAckOK", b""), ("Timestamp", (1, 0))], [("NOP", None)] * 3, [(200, b"unknown")], [("EOL", None)],
])
def test_options_of_a_syn(site, options):
    """What it does not know it skips. A window scale or a timestamp that it does not offer itself has no effect."""
    client = site.station.client(options=options).open()
    offered = {name for name, _ in client.heard[0][Tcp].options}
    assert offered <= {name for name, _ in options} | {"MSS", "NOP", "EOL"}
    client.get("/1461.html")
    site.check(client, "/1461.html")
    client.close()


def test_a_syn_that_comes_again(site):
    """It gets the same answer: the station would notice another sequence number."""
    client = site.station.client()
    for _ in range(3):
        client.syn()
    assert site.station.listen(lambda: len(client.heard) >= 3)
    client.open()
    client.get("/100.html")
    site.check(client, "/100.html")
    client.close()


@pytest.mark.parametrize("iss", [0xFFFF_FFFF, 0xFFFF_FFFE, 0xFFFF_FFC0, 0x7FFF_FFF0])
def test_sequence_numbers_that_wrap(site, iss):
    client = site.station.client(iss=iss).open()
    for path in ("/100.html", "/10000.html", "/1.html"):
        client.get(path)
        site.check(client, path)
    client.close()


def test_a_request_in_many_segments(site):
    """Each byte comes by itself."""
    client = site.station.client().open()
    for byte in request("/1461.html", "X-Padding: " + "x" * 30):
        client.send(bytes([byte]))
    site.check(client, "/1461.html")
    client.close()


def test_requests_in_one_segment(site):
    """They are answered in their order (RFC 9112 9.3.2)."""
    paths = ["/100.html", "/1461.html", "/1.html", "/nowhere", "/0.html"]
    client = site.station.client().open()
    client.send(b"".join(request(path) for path in paths))
    for path in paths:
        if path == "/nowhere":
            assert client.answer()[0] == 404
        else:
            site.check(client, path)
    client.close()


def test_requests_one_behind_the_other(site):
    """The next one comes before the answer to the last one is acknowledged, and one is cut between them."""
    client = site.station.client().open()
    both = request("/10000.html") + request("/1460.html")
    client.send(both[:70])
    client.send(both[70:])
    site.check(client, "/10000.html")
    site.check(client, "/1460.html")
    client.close()


def test_segments_out_of_order(site):
    """They are answered once what was missing is there, and none has to come again."""
    client = site.station.client().open()
    data, at = request("/1460.html"), client.next
    for begin, end in ((40, len(data)), (20, 40), (0, 20)):
        site.station.send(client.make("PA", data[begin:end], seq=at + begin))
    client.next += len(data)
    site.check(client, "/1460.html")
    client.close()


def test_only_connections_that_live_have_a_flow_rule(site):
    """Others are through the CPU alone, and no segment is lost when one gets its rule."""

    def with_rule() -> int:
        (nic,) = rules("soft0", site.server.process.pid)
        with nic:
            return int(np.count_nonzero(nic.tables["flow_rules"]["tag"]))

    until(lambda: with_rule() == 0, "the end of other connections", 60)
    short, long = site.station.client().open(), site.station.client().open()
    short.get("/1.html")
    site.check(short, "/1.html")

    def has_rule() -> bool:
        for path in ("/1.html", "/100.html", "/1461.html"):
            long.get(path)
            site.check(long, path)
        return with_rule() == 1

    until(has_rule, "a rule", 60)
    long.get("/10000.html")
    site.check(long, "/10000.html")
    for client in (short, long):
        client.close()
    until(lambda: with_rule() == 0, "the end of the rule", 60)


def test_segments_that_come_twice(site):
    """Also long after: the answer comes once, and duplicates are acknowledged (RFC 9293 3.10.7.4).

    Not each of those that come at once is (RFC 5961 7).
    """
    client = site.station.client().open()
    old = client.make("PA", request("/1461.html"))
    client.get("/1461.html")
    site.station.send(old, old)
    site.check(client, "/1461.html")
    heard = len(client.heard)
    for _ in range(10):
        site.station.send(old)
        if site.station.listen(lambda: len(client.heard) > heard, 0.5):
            break
    assert len(client.heard) > heard
    client.get("/1.html")
    site.check(client, "/1.html")
    client.close()
    assert client.theirs is not None
    assert client.finished


def test_overlapping_segments(site):
    """The second begins within the first."""
    client = site.station.client().open()
    data, at = request("/100.html"), client.next
    site.station.send(client.make("PA", data[:30]), client.make("PA", data[10:], seq=at + 10))
    client.next += len(data)
    if not site.station.listen(lambda: client.acked == client.next, 2.0):
        site.station.send(client.make("PA", data[30:], seq=at + 30))
    site.check(client, "/100.html")
    client.close()


# --- windows and acknowledgements ------------------------------------------------------------------------------------


def test_a_window_that_is_closed(site):
    """Nothing but probes comes before it opens, then all does. The station refuses what is beyond the window."""
    client = site.station.client(window=0).open()
    client.get("/10000.html")
    site.station.listen(lambda: len(client.got) > 0, 1.0)
    assert len(client.got) <= 1
    client.window = 60_000
    client.ack()
    site.check(client, "/10000.html")
    client.close()


def test_a_window_that_opens_by_and_by(site):
    """And closes in between."""
    client = site.station.client(window=1000).open()
    client.get("/10000.html")
    for window in (100, 0, 2000, 0, 500):
        client.window = window
        client.ack()
        site.station.listen(lambda: False, 0.1)
    client.window = 3000
    client.ack()
    site.check(client, "/10000.html")
    client.close()


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_segments_that_get_lost(site, nth):
    """They come again, with the same bytes."""
    lost: list[int] = []

    def ignore(frame: Packet) -> bool:
        """Lose the nth segment with payload, once."""
        seen.append(frame[Tcp].seq)
        if len(seen) == nth:
            lost.append(frame[Tcp].seq)
            return True
        return False

    seen: list[int] = []
    client = site.station.client(ignore=ignore).open()
    client.get("/10000.html")
    site.check(client, "/10000.html")
    assert lost
    assert seen.count(lost[0]) >= 2
    client.close()


def test_a_client_that_acknowledges_nothing(site):
    """The first segment comes again and again, and later each time (RFC 6298 5.5)."""
    client = site.station.client().open()
    client.acks = False
    client.get("/100.html")

    def first() -> int:
        return sum(bool(payload_of(frame)) for frame in client.heard if "S" not in str(frame[Tcp].flags))

    assert site.station.listen(lambda: first() >= 3)
    client.acks = True
    client.ack()
    site.check(client, "/100.html")
    client.close()


def test_an_acknowledgement_of_what_was_not_sent(site):
    """It is answered by an acknowledgement, and changes nothing (RFC 9293 3.10.7.4)."""
    client = site.station.client().open()
    site.station.send(client.make("A", ack=client.expected + 5000))
    client.get("/1461.html")
    site.check(client, "/1461.html")
    client.close()


# --- ends ------------------------------------------------------------------------------------------------------------


def test_the_client_ends_first(site):
    """Without a request, with one answered, and by FIN in the segment of the request."""
    site.station.client().open().close()
    site.still_serves()
    client = site.station.client().open()
    at = client.next
    client.post("FPA", request("/1461.html"))
    site.check(client, "/1461.html")
    assert site.station.listen(lambda: client.finished)
    assert site.station.listen(lambda: client.acked == client.next)
    assert distance(client.next, at) == len(request("/1461.html")) + 1


@pytest.mark.parametrize("how", [("1.1", "Connection: close"), ("1.0", "Accept: */*")], ids=["close", "1.0"])
def test_the_server_ends_first(site, how):
    """FIN comes behind the answer, and the client ends later."""
    version, line = how
    client = site.station.client().open()
    client.get("/10000.html", line, version=version)
    site.check(client, "/10000.html")
    assert site.station.listen(lambda: client.finished)
    client.close()
    assert client.acked == client.next


def test_both_end_at_once(site):
    client = site.station.client().open()
    client.acks = False
    client.get("/100.html", "Connection: close")
    assert site.station.listen(lambda: client.fin_at is not None)
    site.station.send(client.make("FA", ack=client.theirs + 1))  # it has not seen anything
    client.next += 1
    client.acks = True
    client.ack()
    assert site.station.listen(lambda: client.acked == client.next)


def test_a_fin_that_comes_again(site):
    """Its acknowledgement got lost."""
    client = site.station.client().open()
    at = client.next
    client.close()
    heard = len(client.heard)
    for _ in range(10):
        site.station.send(client.make("FA", seq=at))
        if site.station.listen(lambda: len(client.heard) > heard, 1.0):
            break
    assert len(client.heard) > heard
    site.still_serves()


def test_reset(site):
    """The connection is gone at once, and its port can be used again, with other sequence numbers."""
    client = site.station.client().open()
    client.acks = False
    client.get("/60000.html")
    assert site.station.listen(lambda: len(client.got) > 0)
    site.station.send(client.make("R"))
    site.station.listen(lambda: False, 2.0)  # what was on its way
    again = site.station.client(port=client.port, iss=client.next + 100_000)
    again.open()
    again.get("/1461.html")
    site.check(again, "/1461.html")
    again.close()


def test_a_reset_of_another_sequence_number_is_ignored(site):
    """Else anybody could end it (RFC 5961 3.2)."""
    client = site.station.client().open()
    for off in (-1, -100_000, 1 << 20, 1 << 31):
        site.station.send(client.make("R", seq=client.next + off))
    client.get("/1461.html")
    site.check(client, "/1461.html")
    client.close()


def test_segments_of_no_connection(site):
    """They get RST, or nothing; RST itself gets nothing (RFC 9293 3.10.7.1)."""
    client = site.station.client()
    client.theirs = 5
    for flags in ("A", "PA", "FA", "R", "RA", "SFA", ""):
        site.station.send(client.make(flags, b"GET /100.html HTTP/1.1\r\n\r\n"))
    site.still_serves()
    assert all("R" in str(frame[Tcp].flags) for frame in client.heard)
    assert not client.got


# --- what is wrong ---------------------------------------------------------------------------------------------------


def test_wrong_segments_are_ignored(site):
    """Checksums, lengths, fragments, other addresses: the request that is right is answered, and no other."""
    client = site.station.client().open()
    wrong, right = request("/10000.html"), request("/1460.html", "X: y")
    for layer, fields in (
        (Tcp, {"chksum": 0x1234}), (IP, {"chksum": 0x1234}), (IP, {"len": 1000}), (IP, {"len": 30}),
        (IP, {"flags": "MF"}), (IP, {"frag": 2}), (IP, {"dst": "10.77.9.77"}), (Tcp, {"dataofs": 4}),
        (Tcp, {"dataofs": 15}), (Tcp, {"dport": 81}),
    ):
        frame = client.make("PA", wrong)
        if layer is Tcp and "dataofs" in fields:
            frame[Raw].load = b""
            frame = frame / wrong[:20]
        for name, value in fields.items():
            setattr(frame[layer], name, value)
        site.station.send(frame)
    whole = bytes(client.make("PA", wrong))
    site.station.send(*(whole[:n] for n in (14, 20, 34, 40, 53)))
    client.send(right)
    site.check(client, "/1460.html")
    client.close()


def test_ip_options_before_a_segment(site):
    """The request is read behind them, or not taken, and then the same without them is."""
    client = site.station.client().open()
    data = request("/1460.html")
    frame = client.make("PA", data, ip={"options": [IPOption_NOP()] * 4})
    site.station.send(frame)
    client.next += len(data)
    if not site.station.listen(lambda: client.acked == client.next, 1.0):
        site.station.send(client.make("PA", data, seq=client.next - len(data)))
    site.check(client, "/1460.html")
    client.close()


def test_padding_is_not_payload(site):
    """A short acknowledgement is padded to 60 bytes by Ethernet, with anything."""
    client = site.station.client().open()
    for _ in range(3):
        site.station.send(bytes(client.make("A")).ljust(60, b"G"))
    client.get("/1460.html")
    site.check(client, "/1460.html")
    assert client.acked == client.next
    client.close()


@pytest.mark.parametrize("text", [
    b"\0" * 200, b"GET\r\n\r\n", b"BREW /pot HTTP/1.1\r\n\r\n", b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n",
    bytes.fromhex("16030100c8010000c40303"), b"SSH-2.0-OpenSSH_9.6\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", b"\r\n\r\n\r\n", b"GET /100.html HTTP/9.9\r\n\r\n",
], ids=["zeros", "short", "method", "long", "TLS", "SSH", "outside", "empty", "version"])
def test_what_is_no_request(site, text):
    """It gets an error, or the connection ends. The server goes on."""
    client = site.station.client().open()
    for at in range(0, len(text), 1000):
        client.send(text[at : at + 1000])
    if site.station.listen(lambda: client.reset or client.finished or len(client.got) > 0, 2.0) and client.got:
        assert client.answer()[0] >= 400
    site.station.send(client.make("RA"))
    site.still_serves()


# --- floods ----------------------------------------------------------------------------------------------------------


def memory_of(pid: int) -> int:
    """KiB in use."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmRSS")))


def syns(station: Station, count: int) -> list[bytes]:
    """SYNs of as many clients: one by scapy, the others like it, with checksums that are updated (RFC 1624)."""
    frame = bytearray(bytes(station.frame(Tcp(sport=1, dport=80, flags="S", seq=0), src="10.77.0.0")))
    ip_sum, source, tcp_sum, sport = 24, 28, 50, 34

    def replace(at: int, word: int, *sums: int) -> None:
        before = int.from_bytes(frame[at : at + 2], "big")
        frame[at : at + 2] = word.to_bytes(2, "big")
        for place in sums:
            changed = 0xFFFF - int.from_bytes(frame[place : place + 2], "big") + 0xFFFF - before + word
            frame[place : place + 2] = (0xFFFF - (changed - 1) % 0xFFFF - 1).to_bytes(2, "big")

    made = []
    for n in range(count):
        replace(source, (10 + n % 7) << 8 | 1 + n // 7 % 200, ip_sum, tcp_sum)
        replace(sport, 1024 + n, tcp_sum)
        made.append(bytes(frame))
    checked(made[-1])
    return made


def test_a_flood_of_syns(site):
    """Connections and memory are bounded, one that is open goes on meanwhile, and later there is room again.

    All SYNs are made first: the server waits for the next request for 5 s.
    """
    station, pid = site.station, site.server.process.pid
    flood = syns(station, 12_000)
    open_before = station.client().open()
    for n in range(0, 12_000, 1000):
        station.send(*flood[n : n + 1000])
        open_before.get("/1461.html")
        site.check(open_before, "/1461.html")
        if n == 5000:
            before = memory_of(pid)
    assert memory_of(pid) - before < 20_000
    site.still_serves()
    open_before.close()
