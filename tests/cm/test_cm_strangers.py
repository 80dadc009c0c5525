"""Strangers who ask much of a connection manager, or do not answer it: everybody else gets through, in time."""

import contextlib
import itertools
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from scapy.contrib.roce import BTH
from scapy.layers.l2 import ARP, Ether

from cm_peer import short_lived_qp
from cm_strangers import frame, req
from gpunetio import PortConfig, cm, verbs
from gpunetio.cm import ways
from gpunetio.cm.address import gid_of
from gpunetio.cm.agent import Agent
from gpunetio.cm.messages import parse
from gpunetio.cm.path import Path as Way
from gpunetio.enums import QpState, QpType, SendFlags, WrOpcode
from gpunetio.errors import FullError, NotFoundError, TimedOutError
from gpunetio.formats.cm import MAD_BYTES, Attribute
from gpunetio.verbs import Context
from lan import mac_text
from nic_rig import until
from udp_rig import own_address

pytestmark = pytest.mark.soft_nic

PORT = 7400
HERE, HONEST, SILENT = "10.9.0.1", "10.9.0.2", "10.9.1.{}"
MAC = "02:00:00:00:00:05"


class Cable:
    """The other end of a NIC's cable, by hand: it answers ARP for HONEST only. `heard` are the messages that came."""

    def __init__(self, here: Path, there: Path, nic_mac: str):
        self._there, self._macs = str(here), (MAC, nic_mac)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(str(there))
        self._sock.settimeout(30)  # a NIC takes frames when it gets to it
        self.heard: list[tuple[str, Attribute]] = []
        self.asked: set[str] = set()  # by ARP
        self._stopping = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def send(self, mad: bytes, source: str) -> None:
        self._sock.sendto(frame(mad, source, HERE, self._macs), self._there)

    def _serve(self) -> None:
        while not self._stopping:
            if select.select([self._sock], [], [], 0.1)[0]:
                self._take(Ether(self._sock.recv(9000)))

    def _take(self, arrived: Ether) -> None:
        if ARP in arrived and arrived[ARP].op == 1:
            self.asked.add(arrived[ARP].pdst)
            if arrived[ARP].pdst == HONEST:
                answer = ARP(op=2, hwsrc=MAC, psrc=HONEST, hwdst=arrived.src, pdst=HERE)
                self._sock.sendto(bytes(Ether(src=MAC, dst=arrived.src) / answer), self._there)
        elif BTH in arrived:
            message = parse(bytes(arrived[BTH].payload)[8:][:MAD_BYTES])  # behind the DETH
            assert message is not None
            self.heard.append((arrived["IP"].dst, message.attribute))

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        self._sock.close()


@pytest.fixture
def cable(tmp_path) -> Iterator[tuple[Context, Cable]]:
    here, there = tmp_path / "here", tmp_path / "there"
    port = PortConfig(addresses=(HERE,), wire=f"dgram:{here},{there}")
    with (
        verbs.open("soft0", port=port) as ctx,
        contextlib.closing(Cable(here, there, mac_text(ctx.provider.nic.mac))) as end,
    ):
        yield ctx, end


def took(start: float) -> float:
    return time.monotonic() - start


def test_strangers_who_answer_no_arp(cable):
    """Nobody waits for them: neither calls with a deadline, nor others who ask."""
    ctx, end = cable
    with cm.listen(ctx, PORT) as listener:
        for number in range(40):  # half of them for the listener, which is told of no request that it cannot accept
            end.send(req(SILENT.format(number), HERE, PORT + number % 2), SILENT.format(number))
        until(lambda: len(end.asked) == 40, "a question for each")
        start = time.monotonic()
        with pytest.raises(TimedOutError):
            listener.accept(timeout=0.2)
        with cm.listen(ctx, PORT + 2):
            pass
        end.send(req(HONEST, HERE, PORT + 1), HONEST)
        until(lambda: end.heard, "an answer")
        end.send(req(HONEST, HERE, PORT), HONEST)
        with listener.accept(timeout=20) as request:
            assert request.peer == HONEST
        until(lambda: len(end.heard) == 2, "a refusal")
        assert took(start) < 30, "it would be 3 s for each stranger"
    assert end.heard == 2 * [(HONEST, Attribute.REJ)]


def test_requests_of_peers_that_answer_no_arp_are_forgotten(cable, monkeypatch):
    monkeypatch.setattr(ways, "PATIENCE", 2.0)
    ctx, end = cable
    with cm.listen(ctx, PORT, backlog=8) as listener:
        with Agent.of(ctx).machine() as machine:
            for number in range(20):
                end.send(req(SILENT.format(number), HERE, PORT), SILENT.format(number))
            Agent.of(ctx).wait(lambda: len(machine) == 8 or None, 20, "a full backlog")
            Agent.of(ctx).wait(lambda: len(machine) == 0 or None, 20, "an empty one")
        end.send(req(HONEST, HERE, PORT), HONEST)
        with listener.accept(timeout=20) as request:
            assert request.peer == HONEST


def test_everyone_who_asks_for_a_way_is_told(cable):
    """Also of those for whom there is no room."""
    ctx, _ = cable
    silent, told = Way(gid_of(SILENT.format(1)), 0), []
    for _ in range(100):
        Agent.of(ctx).find(silent, told.append, patience=2.0)
    until(lambda: len(told) == 100, "an answer for each")
    assert Counter(map(type, told)) == {NotFoundError: 64, FullError: 36}


def test_a_peer_that_answers_no_arp(cable, monkeypatch):
    """Each deadline is kept, and the error says what is wrong."""
    monkeypatch.setattr(Agent.find, "__defaults__", (*Agent.find.__defaults__[:-1], 3.0))
    ctx, _ = cable
    silent = SILENT.format(1)
    with short_lived_qp(ctx) as qp:
        start = time.monotonic()
        with pytest.raises(TimedOutError, match=r"did not come within 0\.1 s"):
            cm.connect(qp, silent, PORT, timeout=0.1)
        with pytest.raises(TimedOutError, match=r"did not come within 0\.1 s"):
            cm.resolve(ctx, silent, PORT, timeout=0.1)
        connecting = cm.start_connecting(qp, silent, PORT)
        assert took(start) < 2.5, "it would be 3 s for each call"
        for _ in range(2):
            with pytest.raises(NotFoundError, match=f"nobody answers for {silent}"):
                connecting.established(timeout=30)
        assert connecting.get_event(timeout=0).type is cm.EventType.UNREACHABLE
        connecting.close()
        assert qp.state == QpState.RST
        with pytest.raises(NotFoundError, match=f"nobody answers for {silent}"):
            cm.resolve(ctx, silent, PORT)


def test_a_flood_of_requests():
    """Honest clients connect meanwhile, and one stranger does not fill the backlog."""
    contexts = [verbs.open(f"soft{i}", port=PortConfig(addresses=(own_address(),))) for i in range(3)]
    server, client, stranger = contexts
    stop = threading.Event()
    flood = threading.Thread(target=strike, args=(stranger, server, stop))
    try:
        with cm.listen(server, PORT) as listener:
            flood.start()
            until(lambda: server.provider.nic.counters["rx_accepted"] > 500, "the flood")
            peers: list[str] = []
            for _ in range(5):
                with short_lived_qp(client) as qp, short_lived_qp(server) as theirs:
                    connecting = cm.start_connecting(qp, listener.address, PORT)
                    while (request := listener.accept(timeout=20)).peer != address(client):
                        peers.append(request.peer)
                        if len(peers) % 2:
                            request.reject()  # the others wait for ever
                    accepted = request.accept(theirs)
                    connecting.established(timeout=20)
                    connecting.disconnect(timeout=20)
                    connecting.close()
                    accepted.close()
            assert set(peers) == {address(stranger)}
    finally:
        stop.set()
        flood.join()
        for ctx in contexts:
            ctx.close()


def address(ctx: Context) -> str:
    return str(ctx.provider.nic.port.addresses[0])


def strike(stranger: Context, server: Context, stop: threading.Event) -> None:
    """Send 2,000 REQs a second, each of another connection, and as many for a port where nobody listens."""
    pd, cq = stranger.create_pd(), stranger.create_cq(64)
    qp = pd.create_qp(
        qp_type=QpType.GSI, sq_wr=32, send_cq=cq, receive_cq=cq, max_inline_data=MAD_BYTES
    )
    qp.to_rts()
    ah = pd.create_ah(verbs.AhAttr(gid=server.query_gid()))
    for number in itertools.count():
        if stop.is_set():
            break
        qp.post_send(verbs.SendWr(
            opcode=WrOpcode.SEND, inline=req(address(stranger), address(server), PORT + number % 2), ah=ah,
            remote_qpn=1, remote_qkey=0x8001_0000, flags=SendFlags.SIGNALED,
        ))
        while not cq.poll():
            pass
        time.sleep(0.0005)
