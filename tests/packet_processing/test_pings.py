"""gpunetio packet_processing and a station made by hand: pings, UDP, and kernels that fail.

The wire is a Unix socket, so nothing here needs rights.
"""

import os
import queue
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from scapy.layers.inet import ICMP, IP, UDP, IPOption_NOP, defragment, fragment
from scapy.layers.l2 import ARP, Dot1AD, Dot1Q, Ether

from gpunetio import PortConfig
from gpunetio.formats.commands import Opcode
from gpunetio.formats.ethernet_queues import QueueState
from gpunetio.packet_processing.app import Application
from gpunetio.packet_processing.options import Options
from gpunetio.packet_processing.queues import Protocol
from gpunetio.packet_processing.statistics import Report
from packet_server import READY, SERVER, PacketServer
from stream_end import StreamEnd
from tcp_station import Station
from tools import running

pytestmark = [pytest.mark.slow, pytest.mark.soft_nic]

PING = ICMP(id=3, seq=7)


@pytest.fixture(scope="module")
def station(tmp_path_factory) -> Iterator[Station]:
    cable = tmp_path_factory.mktemp("pings") / "cable"
    server = PacketServer(f"unix:{cable}", http=False)
    with running(server):
        server.until(READY)
        end = StreamEnd(cable)
        yield Station(end.sock)
        end.close()
        server.stop()


# --- ARP and ICMP ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 17, 56, 1471, 1472])
def test_pings_are_answered(station, nbytes):
    """With the same bytes, also of odd length, which Ethernet pads."""
    data = bytes(n * 3 & 0xFF for n in range(nbytes))
    asked = bytes(station.frame(PING / data))
    station.send(asked.ljust(60, b"\xaa"))
    answer = station.hear(lambda frame: ICMP in frame)
    assert (answer[ICMP].type, answer[ICMP].code, answer[ICMP].id, answer[ICMP].seq) == (0, 0, 3, 7)
    assert bytes(answer[ICMP].payload)[:nbytes] == data
    assert answer[IP].len == 28 + nbytes


def test_a_ping_with_options(station):
    """It is answered with them or without (RFC 1122 3.2.2.6 allows both), or not at all; never wrongly."""
    station.send(station.frame(PING / b"with options", options=[IPOption_NOP()] * 4), station.frame(PING / b"without"))
    answer = station.hear(lambda frame: ICMP in frame)
    if bytes(answer[ICMP].payload).startswith(b"with options"):
        answer = station.hear(lambda frame: ICMP in frame)
    assert bytes(answer[ICMP].payload).startswith(b"without")


def bad_pings(station: Station) -> list[bytes]:
    """Frames that nobody may answer."""
    right = station.frame(PING / b"wrong")
    frames = []
    for layer, fields in (
        (IP, {"chksum": 0x1234}), (ICMP, {"chksum": 0x1234}), (IP, {"dst": "10.77.9.77"}), (IP, {"flags": "MF"}),
        (IP, {"frag": 3}), (IP, {"len": 1000}), (IP, {"len": 10}), (IP, {"version": 5}), (IP, {"ihl": 4}),
        (IP, {"ihl": 15}), (ICMP, {"type": 0}), (ICMP, {"type": 255}),
        (IP, {"src": "255.255.255.255"}), (IP, {"src": "224.0.0.1"}), (IP, {"src": "0.0.0.0"}),
    ):
        frame = right.copy()
        for name, value in fields.items():
            setattr(frame[layer], name, value)
        frames.append(bytes(frame))
    other = right.copy()
    other.dst = "02:00:00:00:00:77"
    return [*frames, bytes(other), *(bytes(right)[:n] for n in (14, 15, 33, 34, 35, 41, 42))]


def test_what_is_wrong_gets_no_answer(station):
    """One that is right comes after it, and its answer is the only one."""
    frames = bad_pings(station)
    station.send(*frames, station.frame(PING / b"right"))
    heard = []
    while not heard or not bytes(heard[-1][ICMP].payload).startswith(b"right"):
        heard.append(station.hear(lambda frame: ICMP in frame))
    assert [bytes(frame[ICMP].payload)[:5] for frame in heard] == [b"right"]


@pytest.mark.parametrize(("nbytes", "size"), [(1473, 1480), (4000, 1480), (60_000, 1480), (100, 8)])
@pytest.mark.parametrize("order", [1, -1], ids=["in order", "reversed"])
def test_pings_in_fragments(station, nbytes, size, order):
    """The answer comes in fragments that the MTU allows, and scapy puts it together."""
    data = bytes(n * 3 & 0xFF for n in range(nbytes))
    asked = fragment(IP(src=station.here, dst=station.there, id=nbytes) / PING / data, size)
    station.send(*(Ether(src=station.MAC, dst=station.their_mac) / part for part in asked[::order]))
    heard = [station.hear(lambda frame: ICMP in frame or frame[IP].proto == 1)]
    while heard[-1][IP].flags.MF:
        heard.append(station.hear())
    assert all(len(frame) <= 1514 for frame in heard)
    if len(heard) > 1:
        (put_together,) = defragment([frame[IP] for frame in heard])
        whole = IP(bytes(put_together))
    else:
        whole = heard[0][IP]
    assert (whole[ICMP].type, whole[ICMP].id, whole[ICMP].seq, whole.src) == (0, 3, 7, station.there)
    assert bytes(whole[ICMP].payload)[:nbytes] == data


def test_fragments_of_what_is_no_ping_get_no_answer(station):
    """Wrong checksum, another type, not all of it: the ping after them is the only one that is answered."""
    for number, message in enumerate((ICMP(chksum=1), ICMP(type=8, code=3), ICMP(type=13))):
        packet = IP(src=station.here, dst=station.there, id=900 + number) / message / bytes(3000)
        station.send(*(Ether(src=station.MAC, dst=station.their_mac) / part for part in fragment(packet, 1480)))
    missing = fragment(IP(src=station.here, dst=station.there, id=910) / PING / bytes(4000), 1480)
    del missing[1]
    station.send(*(Ether(src=station.MAC, dst=station.their_mac) / part for part in missing))
    station.send(station.frame(PING / b"right"))
    answer = station.hear()
    assert bytes(answer[ICMP].payload).startswith(b"right")


@pytest.mark.parametrize("tags", [Dot1Q(vlan=5, prio=3), Dot1AD(vlan=7) / Dot1Q(vlan=5)], ids=["one", "two"])
def test_arp_and_pings_in_a_vlan(station, tags):
    """They are answered there, pings in fragments, too."""
    asked = ARP(hwsrc=station.MAC, psrc=station.here, pdst=station.there)
    wanted = bytes(Ether() / tags)[12:-2]
    station.send(Ether(src=station.MAC, dst="ff:ff:ff:ff:ff:ff") / tags / asked)
    answer = station.hear(lambda frame: ARP in frame)
    assert (answer[ARP].op, answer[ARP].psrc, answer[ARP].hwsrc) == (2, station.there, station.their_mac)
    assert bytes(answer)[12:].startswith(wanted + b"\x08\x06")
    ping = IP(src=station.here, dst=station.there, id=77) / PING / bytes(2000)
    station.send(*(Ether(src=station.MAC, dst=station.their_mac) / tags / part for part in fragment(ping, 1480)))
    for _ in range(2):
        assert bytes(station.hear(lambda frame: IP in frame))[12:].startswith(wanted + b"\x08\0")


@pytest.mark.parametrize("nbytes", [1473, 9000])
def test_a_ping_longer_than_the_mtu_is_lost(station, nbytes):
    """As on any link, and the kernel lives on."""
    station.send(station.frame(PING / bytes(nbytes)), station.frame(PING / b"short"))
    assert bytes(station.hear(lambda frame: ICMP in frame)[ICMP].payload).startswith(b"short")


def test_arp_for_others_is_not_answered(station):
    """It is asked for itself afterwards, and answers that."""
    for address in ("10.77.9.77", station.there):
        asked = ARP(hwsrc=station.MAC, psrc=station.here, pdst=address)
        station.send(Ether(src=station.MAC, dst="ff:ff:ff:ff:ff:ff") / asked)
    answer = station.hear(lambda frame: ARP in frame)
    assert (answer[ARP].op, answer[ARP].psrc, answer[ARP].hwsrc) == (2, station.there, station.their_mac)


# --- UDP -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queues", [1, 4])
def test_packets_of_udp_are_counted(tmp_path, queues):
    """Those to port 53 as DNS. What is no whole packet counts as another."""
    server = PacketServer(f"unix:{tmp_path / 'cable'}", http=False, queues=queues)
    with running(server):
        server.until(READY)
        end = StreamEnd(tmp_path / "cable")
        station = Station(end.sock)
        for n in range(3000):
            station.send(station.frame(UDP(sport=n + 1, dport=53 if n % 3 == 0 else 5353) / bytes(n % 1400)))
        station.send(station.frame(PING))
        station.hear(lambda frame: ICMP in frame)
        said = server.stop()
        end.close()
    last = said[said.rindex("Seconds ") :]
    counts = re.findall(r"\[UDP\] QUEUE: (\d) DNS: (\d+) .* OTHER: (\d+) .* TOTAL: (\d+) ", last)
    assert [int(queue) for queue, *_ in counts] == list(range(queues))
    assert [sum(int(one[i]) for one in counts) for i in (1, 2, 3)] == [1000, 2000, 3000]


# --- kernels that fail -----------------------------------------------------------------------------------------------


class Failing:
    """An application of which one queue fails while a station speaks with the others."""

    def __init__(self, application: Application, name: str):
        self.application, self.name = application, name
        self.reports: queue.Queue[Report] = queue.Queue()
        self.report: Report | None = None

    def run(self, end: StreamEnd) -> None:
        """Run the application until the station has done its part, in another thread: signals come to this one."""
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(self._speak, end)
            self.report = self.application.run([(0.05, self.reports.put)])
            done.result()

    def _speak(self, end: StreamEnd) -> None:
        self.reports.get(timeout=60)
        try:
            station = Station(end.sock)
            self._fail(station)
            assert any(self.reports.get(timeout=60).failures for _ in range(600)), "nobody has noticed"
            for n in range(600):
                station.send(station.frame(UDP(sport=n + 1, dport=53)))
            station.send(station.frame(PING / b"still here"))
            assert bytes(station.hear(lambda frame: ICMP in frame)[ICMP].payload).startswith(b"still here")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)


    def _fail(self, station: Station) -> None:
        """Move a queue to ERR. That of the server is noticed when it sends."""
        if self.name == "HTTP server":
            assert self.application.http is not None
            sq = self.application.http.txq.sq
            sq.modify(Opcode.MODIFY_SQ, sq_state=QueueState.RDY, ctx={"state": QueueState.ERR})
            station.client().open().get("/index.html")
        else:
            (failing,) = (each.queue for each in self.application.counts if str(each.queue) == self.name)
            failing.rxq.rq.modify(Opcode.MODIFY_RQ, rq_state=QueueState.RDY, ctx={"state": QueueState.ERR})


@pytest.mark.parametrize("name", ["UDP queue 1", "TCP queue 1", "HTTP server"])
def test_a_queue_that_fails_ends_its_kernel_only(tmp_path, name, caplog):
    """The report says why, and the other kernels go on."""
    wire = f"unix:{tmp_path / 'cable'}"
    port = PortConfig(addresses=SERVER, wire=wire)
    options = Options(gpu="host", device="soft0", queues=2, http=name == "HTTP server", nic_port=port)
    with ExitStack() as undo:
        failing = Failing(Application(options, undo), name)
        end = StreamEnd(tmp_path / "cable")
        undo.callback(end.close)
        failing.run(end)
    assert failing.report is not None
    ((who, why),) = failing.report.failures.items()
    assert who == name
    assert "WR_FLUSH" in why
    assert f"{name} kernel error" in caplog.text
    counted = [each.counts["dns"] for each in failing.report.of_protocol(Protocol.UDP)]
    assert sum(counted) == 600 if name != "UDP queue 1" else 0 < counted[0] < 600
