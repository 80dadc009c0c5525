"""The ICRC against zlib and scapy, and IPv4 ids found from it."""

import ctypes
import ipaddress
import os
import platform
import random
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scapy.contrib.roce import BTH
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.packet import Raw

from gpunetio import device
from gpunetio.fabric import icrc
from gpunetio.formats.packet import ROCE_UDP_PORT, PacketOpcode
from gpunetio.jit import ops
from gpunetio.jit.processor import CPU_FEATURES, CPU_NAME

ipv4 = st.integers(0, 2**32 - 1).map(ipaddress.IPv4Address)
ipv6 = st.integers(0, 2**128 - 1).map(ipaddress.IPv6Address)
ids = st.integers(0, 0xFFFF)


def gid(address) -> tuple[int, int]:
    """The two words of an address's GID, as plain loads give them."""
    raw = address.packed if address.version == 6 else bytes(10) + b"\xff\xff" + address.packed
    return tuple(int.from_bytes(raw[i : i + 8], sys.byteorder, signed=True) for i in (0, 8))  # type: ignore[return-value]


def address_of(data: bytes) -> tuple[int, object]:
    """Where a copy of `data` lies, and what keeps it there. It ends where the copy ends."""
    room = ctypes.create_string_buffer(data, max(len(data), 1))
    return ctypes.addressof(room), room


def crc_of(data: bytes, crc: int = 0) -> int:
    at, _keep = address_of(data)
    return icrc.crc32(crc, at, len(data))


def icrc_of(packet: bytes, source, destination, port: int, ip_id: int = 0) -> int:
    at, _keep = address_of(packet)
    scratch, _keep_too = address_of(bytes(icrc.HEADER_ROOM))
    return icrc.icrc(
        scratch, at, len(packet), source.version, *gid(source), *gid(destination), port, ip_id
    )


@given(data=st.binary(max_size=600), crc=st.integers(0, 2**32 - 1))
def test_crc32_is_that_of_zlib(data, crc):
    assert crc_of(data, crc) == zlib.crc32(data, crc)


@pytest.mark.parametrize("size", [15, 16, 17, 63, 64, 127, 128, 143, 255, 256, 319, 320, 511, 512, 4096, 4111, 9000])
def test_crc32_of_every_way_through_the_loops(size):
    data = os.urandom(size)
    assert crc_of(data) == zlib.crc32(data)
    assert crc_of(data[5:], zlib.crc32(data[:5])) == zlib.crc32(data)


PLAIN = ""
SSE = "+sse2,+ssse3,+sse4.1,+pclmul"
AVX2 = SSE + ",+sse4.2,+avx,+avx2,+vpclmulqdq"
OTHER_CPU = """
import zlib, numpy as np
from gpunetio.jit import ops
from gpunetio.fabric import icrc
from gpunetio.jit.ops import crc
assert crc._clmul_lanes() == {lanes}
data = np.random.default_rng(1).integers(0, 256, 700, np.uint8)
for n in [*range(150), 255, 256, 511, 512, 513, 699]:
    assert icrc.crc32(7, data.ctypes.data, n) == zlib.crc32(data[:n], 7), n
assert icrc.solve_ip_id(icrc._multiply(ops.x_to_the(8 * 126), 0x34120000), 100) == 0x1234
"""


@pytest.mark.parametrize(("features", "lanes"), [
    pytest.param(PLAIN, 0, id="plain"),
    pytest.param(SSE, 1, id="sse", marks=pytest.mark.slow),
    pytest.param(AVX2, 2, id="avx2", marks=pytest.mark.slow),
])
def test_crc32_on_other_cpus(features, lanes):
    """In a process that compiles for a simpler x86-64 than this one."""
    flags = {0: set(), 1: {"pclmulqdq"}, 2: {"vpclmulqdq", "avx2"}}[lanes]
    if platform.machine() != "x86_64" or not flags <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip("this CPU has no such instructions")
    environment = {**os.environ, CPU_NAME: "generic", CPU_FEATURES: features}
    code = OTHER_CPU.format(lanes=lanes)
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("n", [0, 1, 31, 32, 64, 480, 544])
def test_powers_of_x(n):
    """By n steps of the register; 0x154442bd4 and 0x1c6e41596 are the published constants of 544 and 480."""
    register = 1 << 31
    for _ in range(n):
        register = register >> 1 ^ (ops.CRC32_POLYNOMIAL if register & 1 else 0)
    assert ops.x_to_the(n) == register
    published = {544: 0x154442BD4, 480: 0x1C6E41596, 64: 0x163CD6124}
    assert register << 1 == published.get(n, register << 1)


def scapy_icrc(ip, port: int, opcode: int, payload: bytes, **bth) -> tuple[bytes, int]:
    """(BTH and payload, ICRC) as scapy makes them."""
    raw = bytes(ip / UDP(sport=port, dport=ROCE_UDP_PORT, chksum=0) / BTH(opcode=opcode, **bth) / Raw(payload))
    roce = raw[len(bytes(ip)) + 8 :]
    return roce[:-4], int.from_bytes(roce[-4:], "little")


packets = st.fixed_dictionaries({
    "opcode": st.sampled_from(sorted(PacketOpcode)),
    "payload": st.integers(0, 40).map(lambda words: bytes(range(4 * words))) | st.binary(max_size=300),
    "port": st.integers(0, 0xFFFF),
    "dqpn": st.integers(0, 0xFF_FFFF), "psn": st.integers(0, 0xFF_FFFF),
    "fecn": st.integers(0, 1), "becn": st.integers(0, 1), "ackreq": st.integers(0, 1),
})


@given(source=ipv4, destination=ipv4, ip_id=ids, packet=packets)
def test_icrc_over_ipv4_is_that_of_scapy(source, destination, ip_id, packet):
    ip = IP(src=str(source), dst=str(destination), id=ip_id, flags="DF", tos=5, ttl=9)
    data, expected = scapy_icrc(ip, **packet)
    assert icrc_of(data, source, destination, packet["port"], ip_id) == expected


@given(source=ipv6, destination=ipv6, packet=packets)
def test_icrc_over_ipv6_is_that_of_scapy(source, destination, packet):
    ip = IPv6(src=str(source), dst=str(destination), tc=3, fl=77, hlim=2)
    data, expected = scapy_icrc(ip, **packet)
    assert icrc_of(data, source, destination, packet["port"]) == expected


@pytest.mark.parametrize("size", [12, 13, 16, 28, 4096 + 28])
def test_the_packet_stays_as_it_is(size):
    data = os.urandom(size)
    at, room = address_of(data)
    source = ipaddress.IPv6Address("fd00::1")
    scratch, _keep = address_of(bytes(icrc.HEADER_ROOM))
    icrc.icrc(scratch, at, size, 6, *gid(source), *gid(source), 4791, 0)
    assert room.raw == data  # type: ignore[attr-defined]


@given(packet=st.integers(12, 4200).map(os.urandom), ip_id=ids)
def test_the_id_is_found_again(packet, ip_id):
    source, destination = ipaddress.IPv4Address("10.0.0.1"), ipaddress.IPv4Address("10.0.0.2")
    carried = icrc_of(packet, source, destination, 4791, ip_id)
    computed = icrc_of(packet, source, destination, 4791)
    assert icrc.solve_ip_id(computed ^ carried, len(packet)) == ip_id
    other = icrc_of(packet, source, destination, 4791, 0x1234)
    assert icrc.solve_ip_id(other ^ carried, len(packet)) == ip_id ^ 0x1234


def test_a_damaged_packet_fits_an_id_once_in_65536():
    """All single bits are seen, and of random differences as many pass as 16 bits let through: 65,536 · 8 / 65,536."""
    assert {icrc.solve_ip_id(1 << bit, 100) for bit in range(32)} == {-1}
    draw = random.Random(1)
    passed = sum(icrc.solve_ip_id(draw.getrandbits(32), 4096) >= 0 for _ in range(1 << 19))
    assert 0 < passed < 30


def kernel(scratch, packet, nbytes, version, high, low, port, ip_id, out):
    crc = icrc.icrc(scratch, packet, nbytes, version, high, low, high, low, port, ip_id)
    device.st64(out, icrc.solve_ip_id(crc, nbytes) + icrc.crc32(crc, packet, nbytes))


def test_compiles_for_cuda():
    """With integers alone, nothing left to link, and no spills."""
    pytest.importorskip("cuda.bindings", reason="needs cuda-bindings (extra 'cuda')")
    from cuda_kernels import SM_90, assemble, ptx_of

    ptx = ptx_of(kernel, 9)
    assert not re.search(r"\.f(64|32)\b", ptx)
    assert ".extern .func" not in ptx
    assert set(re.findall(r"(\d+) bytes spill", assemble(ptx, SM_90))) == {"0"}
