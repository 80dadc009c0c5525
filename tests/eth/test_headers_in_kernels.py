"""The same functions of headers in kernels, on the host and on a GPU: packets at any even address, checksums at any."""

import numpy as np
import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP, IPOption_NOP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrDestOpt
from scapy.layers.l2 import Dot1Q, Ether

from gpunetio import Gpu, MemType, device, kernel
from gpunetio.eth import headers

SLOT, WORDS = 256, 12
ADDRESS, PORT = 0xC0A8_0101, 4321
IP4, IP6 = IP(src="10.1.2.3", dst="10.4.5.6"), IPv6(src="fd00::1:2:3:4", dst="fd00::5")
PACKETS = [
    Ether() / IP4 / UDP(sport=5, dport=6) / bytes(range(33)),
    Ether() / IP4 / TCP(sport=5, dport=6, flags="S") / b"",
    Ether() / IP4 / ICMP(id=1, seq=2) / bytes(range(7)),
    Ether() / Dot1Q() / IP(src="10.1.2.3", options=[IPOption_NOP()] * 3) / TCP(options=[("NOP", None)] * 5) / b"abc",
    Ether() / IP6 / UDP(sport=5, dport=6) / bytes(range(20)),
    Ether() / IP6 / IPv6ExtHdrDestOpt() / TCP(sport=5, dport=6) / bytes(range(11)),
]


@kernel
def examine(packets, lengths, sums, out):
    """Each thread looks at a packet and rewrites it."""
    me = device.global_id()
    packet, nbytes = packets + SLOT * me, device.ld64(lengths + 8 * me)
    row = out + 8 * WORDS * me
    protocol, ip, l4, length = headers.l4_of(packet, nbytes)
    device.st64(row, protocol)
    device.st64(row + 8, ip - packet)
    device.st64(row + 16, l4 - packet)
    device.st64(row + 24, length)
    device.st64(row + 32, headers.is_l4_intact(ip, protocol, l4, length))
    if protocol == headers.IP_PROTOCOL_UDP:
        _, size = headers.udp_payload(l4, length)
    else:
        _, size = headers.tcp_payload(l4, length)
    device.st64(row + 40, size)
    device.st64(row + 48, headers.ethernet_at(packet).source)
    if device.ld8(ip) >> 4 == 4:
        device.st64(row + 56, headers.is_ipv4_intact(ip))
        device.st64(row + 64, headers.ipv4_at(ip).source)
        headers.set_source(ip, protocol, l4, ADDRESS, PORT)
    else:
        device.st64(row + 56, headers.ipv6_at(ip).source_high)
        device.st64(row + 64, headers.ipv6_at(ip).source_low)
        headers.swap_addresses(ip)
    headers.spend_hop(ip)
    headers.swap_macs(packet)
    device.st64(row + 72, headers.is_l4_intact(ip, protocol, l4, length))
    device.st64(row + 80, headers.internet_sum(sums + me, 100 - me))
    device.copy(packet + SLOT // 2 + 2 * me, packet, 61)


@pytest.mark.parametrize("before", [0, 2, 6])
def test_kernels_see_and_change_headers(gpu: Gpu, before: int):
    count = len(PACKETS)
    with (
        gpu.alloc(SLOT * count + 8, MemType.CPU_GPU) as memory, gpu.alloc(8 * count, MemType.CPU_GPU) as lengths,
        gpu.alloc(128, MemType.CPU_GPU) as sums, gpu.alloc(8 * WORDS * count, MemType.CPU_GPU) as out,
    ):
        frames = [bytes(packet) for packet in PACKETS]
        rows = memory.array[before : before + SLOT * count].reshape(count, SLOT)
        for row, frame in zip(rows, frames, strict=True):
            row[: len(frame)] = np.frombuffer(frame, np.uint8)
        lengths.array.view(np.int64)[:] = [len(frame) for frame in frames]
        sums.array[:] = np.arange(128)
        assert examine[1, count, gpu](memory.device_address + before, lengths, sums, out).wait(110)
        found = out.array.view(np.int64).reshape(count, WORDS)
        for i, (packet, frame) in enumerate(zip(PACKETS, frames, strict=True)):
            buffer = np.frombuffer(bytearray(frame), np.uint8)
            at = buffer.ctypes.data
            protocol, ip, l4, length = headers.l4_of(at, len(frame))
            assert found[i, :4].tolist() == [protocol, ip - at, l4 - at, length]
            find = headers.udp_payload if protocol == headers.IP_PROTOCOL_UDP else headers.tcp_payload
            size = find(l4, length)[1]
            assert found[i, 4:7].tolist() == [1, size, int(packet.src.replace(":", ""), 16)]
            if IP in packet:
                assert found[i, 7:9].tolist() == [1, 0x0A01_0203]
                headers.set_source(ip, protocol, l4, ADDRESS, PORT)
            else:
                assert found[i, 7:9].view(np.uint64).tolist() == [0xFD00 << 48, 0x0001_0002_0003_0004]
                headers.swap_addresses(ip)
            headers.spend_hop(ip)
            headers.swap_macs(at)
            assert rows[i, : len(frame)].tobytes() == buffer.tobytes()
            data = np.arange(128, dtype=np.uint8)[i:100]
            assert found[i, 9:11].tolist() == [1, headers.internet_sum(data.ctypes.data, 100 - i)]
            assert rows[i, SLOT // 2 + 2 * i :][:61].tobytes() == rows[i, :61].tobytes()
