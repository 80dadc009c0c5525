"""Frames that nobody should send: a model says what each is, no byte behind a frame is read, and nothing is changed."""

import contextlib
import ctypes
import mmap
import os
import random
from ipaddress import ip_address

import numpy as np
import pytest
from scapy.contrib.roce import BTH
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether
from scapy.packet import Raw

from frame_fuzz import PEER, ROCE, V4, V6, fate, mutated, templates
from gpunetio.fabric.ethernet_records import FILE
from gpunetio.fabric.ethernet_wire import EthernetWire
from gpunetio.fabric.ip_headers import internet_checksum
from gpunetio.nic.engine.port import gid_of
from gpunetio.nic.state.counters import COUNTERS, FRAME_FATES, PACKET_FATES
from gpunetio.nic.transport.frame_sorting import sort_frame
from lan import Station, cabled, exchange, join, mac_text, nics
from nic_rig import REQ, WRITE, until

OWN = bytes.fromhex("020000000001")
FRAMES = 30_000


@pytest.fixture
def wire():
    gids = [gid_of(ip_address(address)) for address in (V4[0], V6[0])]
    fd = os.eventfd(0)
    opened = EthernetWire("test", fd, FILE, OWN, gids)
    yield opened, gids
    opened.close()
    os.close(fd)


@pytest.fixture
def edge():
    """The end of a page, behind which there is nothing: a read of the byte there ends the process."""
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    first = ctypes.c_char.from_buffer(memory)
    start = ctypes.addressof(first)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    yield start + mmap.PAGESIZE
    del first
    memory.close()


def test_frames_are_what_a_model_says(wire, edge):
    opened, gids = wire
    source, names = random.Random(7), {getattr(COUNTERS, name): name for name in FRAME_FATES}
    right, seen = templates(OWN), dict.fromkeys((ROCE, *FRAME_FATES), 0)
    for i in range(FRAMES):
        frame = source.randbytes(source.randrange(80)) if i % 50 == 0 else mutated(source, source.choice(right))
        ctypes.memmove(edge - len(frame), frame, len(frame))
        found = names.get(sort_frame(opened.address, edge - len(frame), len(frame)), ROCE)
        assert found == fate(frame, OWN, gids), frame.hex()
        seen[found] += 1
        if found == ROCE:
            r = opened.record
            start, nbytes = int(r["bth"]), int(r["nbytes"])
            assert nbytes >= 0
            assert edge - len(frame) <= start <= start + nbytes + 4 <= edge
            assert gids[int(r["own"])] in (gid_of(ip_address(V4[0])), gid_of(ip_address(V6[0])))
    assert seen.pop("rx_frame_link_down") == seen.pop("rx_frame_oversize") == 0  # `decide` counts these
    assert min(seen.values()) > 20, seen


@pytest.mark.root
def test_a_nic_in_a_storm_of_frames():
    """Nothing moves, everything is counted once, and afterwards the queue pairs go on."""
    with cabled() as where:
        ports = [{"wire": f"packet:{name}", "addresses": (V4[i], V6[i])} for i, name in enumerate(("here", "there"))]
        with nics(where, *ports) as (a, b), contextlib.closing(Station(where, "there")) as station:
            join(a, b)
            exchange(a, b)
            source = random.Random(11)
            own = a.nic.mac
            right = [frame[:6] + PEER + frame[12:] for frame in templates(own)]
            qpn = a.queue.qp.qpn.to_bytes(3, "big")
            aimed = [frame.replace(b"\0\0\x05", qpn) for frame in right]
            images = [end.whole.copy() for end in (a.here, a.there)]
            before = {name: a.count(name) for name in COUNTERS.offsets}
            storm = (mutated(source, source.choice((*right, *aimed))) for _ in range(3000))
            # The kernel takes tags out of frames, and drops those that are cut off in a tag.
            frames = [f for f in storm if len(f) >= 14 and (len(f) >= 18 or f[12:14] not in (b"\x81\0", b"\x88\xa8"))]
            for start in range(0, len(frames), 200):
                for frame in frames[start : start + 200]:
                    station.send(frame)
                wanted = before["rx_frames"] + min(start + 200, len(frames))
                until(lambda wanted=wanted: a.count("rx_frames") >= wanted, "the frames have arrived")
            a.nic.engine.synchronize()
            grown = {name: a.count(name) - before[name] for name in before}
            fates = sum(grown[name] for name in (*FRAME_FATES, *PACKET_FATES))
            assert grown["rx_frames"] == fates + grown["rx_icrc_encapsulated"]
            assert grown["rdma_rx_packets"] == sum(grown[name] for name in PACKET_FATES)
            assert grown["rx_wrong_peer"] > 0
            assert grown["rx_accepted"] == 0
            for end, image in zip((a.here, a.there), images, strict=True):
                assert np.array_equal(end.whole, image)
            exchange(a, b)
            exchange(b, a)


@pytest.mark.root
def test_forged_packets_of_the_peer_need_its_icrc():
    """With the peer's addresses, a wrong ICRC is what stops them; the headers below count, too."""
    with cabled() as where:
        ports = [{"wire": f"packet:{name}", "addresses": V4[i]} for i, name in enumerate(("here", "there"))]
        with nics(where, *ports) as (a, b), contextlib.closing(Station(where, "there")) as station:
            join(a, b)
            b.queue.post(WRITE, a.there.remote(), b.here.at(0, 64))
            assert b.queue.done.next().opcode == REQ
            b.nic.pause()
            bth = BTH(opcode=0x0A, dqpn=a.queue.qp.qpn, psn=int(a.queue.row["expect_psn"]) & 0xFFFFFF)
            packet = Ether(src=mac_text(b.nic.mac), dst=mac_text(a.nic.mac)) / IP(src=V4[1], dst=V4[0], flags="DF")
            packet = bytearray(bytes(packet / UDP(sport=0xC000, dport=4791) / bth / Raw(bytes(32))))
            before = a.there.bytes.copy()
            for at in (14 + 4, 14 + 20 + 1, len(packet) - 1):  # IPv4 id, UDP source port, ICRC
                forged = bytearray(packet)
                forged[at] ^= 1
                forged[24:26] = bytes(2)
                forged[24:26] = internet_checksum(bytes(forged[14:34])).to_bytes(2, "big")
                station.send(forged)
            until(lambda: a.count("rx_icrc_encapsulated") == 3, "three wrong ICRCs")
            taken = a.count("rdma_rx_packets")
            station.send(packet)
            until(lambda: a.count("rdma_rx_packets") == taken + 1, "the packet itself is intact")
            assert a.count("rx_icrc_encapsulated") == 3
            assert (a.there.bytes == before).all()
            b.nic.resume()
