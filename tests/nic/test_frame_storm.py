"""Frames that nobody should send, into a NIC with rules, queues and queue pairs.

Each goes where a model in plain Python says, counts once, and changes nothing else.
"""

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ethernet_rig import nic_of
from frame_fuzz import ROCE, V4, V6, fate, more_templates, mutated, templates
from gpunetio import Gpu, MemType, PortConfig, eth, verbs
from gpunetio.flow import DROP, FlowPort, Match, Rss, match
from gpunetio.memory import HostMemory
from gpunetio.nic.engine.port import gid_of
from gpunetio.nic.state.counters import FRAME_FATES, PACKET_FATES, STEERED_FATES
from lan import End, exchange, join
from nic_rig import until
from steering_model import fields_of, toeplitz
from stream_end import StreamEnd

BURST = 256  # frames at a time: no queue runs out of receives
LONGEST, ROOM, GUARD, FILL = 200, 1 << 18, 4096, 0xA5
PLACES, PLACE = 1024, 512  # of a ring
HEADROOM = 64
TOO_LONG, NO_BUFFER, DELIVERED, DROPPED = (
    f"rx_frame_{fate}" for fate in ("too_long", "no_buffer", "delivered", "rule_dropped")
)
STILL = ("qps", "mkeys", "umems", "pds", "sqs", "srqs", "rqts", "tirs", "tiss", "uar_pages")  # nobody has changed them


class Pool:
    """A queue of the CPU whose buffers lie between guards, and what it is to receive."""

    def __init__(self, pd: verbs.PD):
        self.memory = HostMemory(ROOM + 2 * GUARD)
        self.memory.array[:] = FILL
        self.rxq = eth.ManagedRxq(
            pd, BURST, LONGEST, headroom=HEADROOM, buffer=pd.register(self.memory), offset=GUARD
        )
        self.expected: list[bytes] = []
        self.packets = 0

    def take(self, frame: bytes) -> str:
        """Expect a frame. Return the counter of its fate."""
        if len(frame) > LONGEST:
            return TOO_LONG
        self.expected.append(frame)
        return DELIVERED

    def check(self) -> None:
        """All that were to come have, in order; what lies before them is as it was."""
        packets = self.rxq.receive(BURST, timeout=0)
        assert [packet.data.tobytes() for packet in packets] == self.expected
        for packet in packets:
            assert (packet.buffer[:HEADROOM] == FILL).all()
            packet.release()
        self.packets += len(packets)
        self.expected.clear()

    def guards_stand(self) -> bool:
        array = self.memory.array
        return bool((array[:GUARD] == FILL).all() and (array[GUARD + ROOM :] == FILL).all())


class Ring:
    """A cyclic queue of kernels, which none empties: it takes frames until it is full."""

    def __init__(self, pd: verbs.PD, gpu: Gpu):
        self.memory = gpu.alloc(PLACES * PLACE + 2 * GUARD, MemType.CPU_GPU)
        self.memory.array[:] = FILL
        self.rxq = eth.CyclicRxq(gpu, pd, PLACES, PLACE, buffer=pd.register(self.memory), offset=GUARD)
        self.expected: list[bytes] = []

    def take(self, frame: bytes) -> str:
        if len(self.expected) == PLACES:
            return NO_BUFFER
        self.expected.append(frame)
        return DELIVERED

    def check(self) -> None:
        image = np.full_like(self.memory.array, FILL)
        for i, frame in enumerate(self.expected):
            start = GUARD + PLACE * i
            image[start : start + len(frame)] = np.frombuffer(frame, np.uint8)
        assert np.array_equal(self.memory.array, image)


class Spread:
    """Two queues, and the Toeplitz hash between them: of addresses and ports, or of the addresses of fragments."""

    def __init__(self, *pools: Pool):
        self.pools, self.rss = pools, Rss([pool.rxq for pool in pools])

    def take(self, frame: bytes) -> str:
        outer, _ = fields_of(frame)  # type: ignore[misc]
        skip = 12 if outer["ip_version"] == 4 else 0
        data = outer["src_ipv4_src_ipv6"][skip:] + outer["dst_ipv4_dst_ipv6"][skip:]
        if "tcp_sport" in outer:
            data += outer["tcp_sport"].to_bytes(2, "big") + outer["tcp_dport"].to_bytes(2, "big")
        elif "frag" not in outer:  # a TCP header that is none
            return self.pools[0].take(frame)
        return self.pools[toeplitz(self.rss.key, data) % 2].take(frame)


class Storm:
    """A NIC on a socket, with rules in the library's form and as plain functions of the fields of a frame."""

    def __init__(self, ctx: verbs.Context, gpu: Gpu, path: Path, undo: contextlib.ExitStack):
        self.ctx, self.nic = ctx, nic_of(ctx)
        self.gids = [gid_of(ip_address(address)) for address in (V4[0], V6[0])]
        self.ends = End(ctx, fill=0), End(ctx, fill=1)
        join(*self.ends)
        exchange(*self.ends)
        pd = ctx.create_pd()
        self.pools = [Pool(pd) for _ in range(5)]
        self.aside = Pool(pd)  # no rule leads to it, nor to the next one
        self.rings = Ring(pd, gpu), Ring(pd, gpu)
        port = undo.enter_context(FlowPort(ctx))
        self.rules: list[tuple[Callable[[dict], Any], Callable[[bytes], str]]] = []

        def rule(made: Match, fits: Callable[[dict], Any], to: Any, take: Callable[[bytes], str]) -> None:
            port.steer(made, to, priority=len(self.rules))
            self.rules.append((fits, take))

        tagged, dns, roce, *spread = self.pools
        both = Spread(*spread)
        rule(
            match.vlan(5), lambda f: f.get("cvlan_tag") and f["first_vid"] == 5 and not f.get("svlan_tag"),
            tagged.rxq, tagged.take,
        )
        rule(match.udp(dst=53), lambda f: f.get("udp_dport") == 53, dns.rxq, dns.take)
        rule(
            match.ipv4(src="10.9.0.9") & match.udp(dst=4791),
            lambda f: f.get("udp_dport") == 4791 and f["src_ipv4_src_ipv6"] == bytes(12) + bytes((10, 9, 0, 9)),
            roce.rxq, roce.take,
        )
        rule(match.ipv6(hop_limit=1), lambda f: f.get("ip_version") == 6 and f["ttl_hoplimit"] == 1,
             self.rings[0].rxq, self.rings[0].take)
        rule(match.tcp(), lambda f: f.get("ip_protocol") == 6, both.rss, both.take)
        rule(match.icmp(), lambda f: f.get("ip_version") == 4 and f.get("ip_protocol") == 1, DROP, lambda _: DROPPED)
        self.peer = undo.enter_context(contextlib.closing(StreamEnd(path)))
        self.counted = Counter[str]()
        self.begin = dict(self.nic.counters)
        self.still = self._still()

    def _still(self) -> list[bytes]:
        images = [getattr(self.nic, name).given.tobytes() for name in STILL]
        images += [buffer.whole.tobytes() for end in self.ends for buffer in (end.here, end.there)]
        aside = [self.nic.rqs[rxq.rqn].tobytes() for rxq in (self.aside.rxq, self.rings[1].rxq)]
        return images + aside + [self.aside.memory.array.tobytes(), self.rings[1].memory.array.tobytes()]

    def _expect(self, frame: bytes) -> str:
        found = fields_of(frame)
        if found is not None:
            for fits, take in self.rules:
                if fits(found[0]):
                    return take(frame)
        return fate(frame, self.nic.mac, self.gids)

    def frames(self, source: random.Random) -> Iterator[bytes]:
        own = self.nic.mac
        right = templates(own) + more_templates(own)
        right += [bytes(f).replace(b"\0\0\x05", self.ends[0].queue.qp.qpn.to_bytes(3, "big")) for f in templates(own)]
        while True:
            frame = mutated(source, source.choice(right))
            yield source.randbytes(source.randrange(80)) if source.random() < 0.02 else frame

    def send(self, frames: list[bytes]) -> None:
        """Send a burst, and compare what it does with the model."""
        self.counted.update(self._expect(frame) for frame in frames)
        self.peer.send(*frames)
        wanted = self.begin["rx_frames"] + self.counted.total()
        until(lambda: self.nic.counters["rx_frames"] == wanted, "the frames have arrived")
        self.nic.engine.synchronize()
        self.peer.drop()
        for pool in (*self.pools, self.aside):
            pool.check()

    def check(self) -> None:
        """Each frame counts once, and nothing has changed that no frame may change."""
        grown = {name: count - self.begin[name] for name, count in self.nic.counters.items()}
        assert {name: grown[name] for name in (*FRAME_FATES, *STEERED_FATES) if grown[name]} == {
            name: count for name, count in self.counted.items() if name != ROCE
        }
        packets = sum(grown[name] for name in PACKET_FATES)
        assert packets + grown["rx_icrc_encapsulated"] == self.counted[ROCE]
        assert grown["rdma_rx_packets"] == packets
        assert grown["rx_accepted"] == 0 < grown["rx_wrong_peer"]
        assert self._still() == self.still
        assert all(pool.guards_stand() for pool in (*self.pools, self.aside))
        for ring in self.rings:
            ring.check()
        for end in self.ends:
            exchange(end, *(other for other in self.ends if other is not end))


def storm_of(tmp_path: Path, frames: int, seed: int) -> Counter[str]:
    config = PortConfig(addresses=(V4[0], V6[0]), wire=f"unix:{tmp_path / 's'}")
    with contextlib.ExitStack() as undo:
        gpu, ctx = undo.enter_context(Gpu("host")), undo.enter_context(verbs.open("soft0", port=config))
        storm = Storm(ctx, gpu, tmp_path / "s", undo)
        given = storm.frames(random.Random(seed))
        for start in range(0, frames, BURST):
            storm.send([next(given) for _ in range(min(BURST, frames - start))])
        storm.check()
        assert all(pool.packets for pool in storm.pools)
        return storm.counted


def test_a_storm(tmp_path):
    counted = storm_of(tmp_path, 10_000, seed=1)
    assert {ROCE, TOO_LONG, DELIVERED, DROPPED} < set(counted)
    assert len(counted) > 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_long_storm(tmp_path):
    counted = storm_of(tmp_path, 250_000, seed=2)
    assert NO_BUFFER in counted
