"""Descriptions of memory for a peer, whose bytes nobody trusts."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio import Access
from gpunetio.core import MemoryMap, RemoteMemory
from gpunetio.errors import BadStateError, InvalidValueError, NotPermittedError, NotSupportedError
from gpunetio.memory import HostMemory

LAYOUT = ">4sIQQII"  # as a peer of any byte order reads it


def description(magic=b"GNmm", version=1, address=0x7000, nbytes=64, rkey=0x1234, access=6):
    return struct.pack(LAYOUT, magic, version, address, nbytes, rkey, access)


def test_a_map_describes_itself(pd):
    with MemoryMap(pd, bytearray(100), Access.LOCAL_WRITE | Access.REMOTE_READ) as memory:
        told = memory.export_rdma()
        assert told == description(address=memory.address, nbytes=100, rkey=memory.rkey, access=4)
        assert RemoteMemory.from_export(told) == RemoteMemory(memory.address, 100, memory.rkey, Access.REMOTE_READ)


def test_keys_address_memory_from_iova_on(pd):
    with MemoryMap(pd, HostMemory(4096), iova=0) as memory:  # a card maps whole pages
        assert RemoteMemory.from_export(memory.export_rdma()).address == 0


def test_what_is_not_exported(pd):
    with MemoryMap(pd, bytearray(8), Access.LOCAL_WRITE) as memory:
        with pytest.raises(NotPermittedError, match="no permission for a peer"):
            memory.export_rdma()
        with pytest.raises(NotSupportedError, match="no DPU"):
            memory.export_pci()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"magic": b"HTTP"}, "begin with 48545450"),
        ({"version": 2}, "version 2"),
        ({"nbytes": 0}, "0 bytes"),
        ({"address": (1 << 64) - 63}, "no range"),
        ({"access": 0}, "rights 0x0"),
        ({"access": 1}, "rights 0x1"),
        ({"access": 1 << 20 | 2}, "rights 0x100002"),
    ],
)
def test_what_is_refused(wrong, words):
    with pytest.raises(InvalidValueError, match=words):
        RemoteMemory.from_export(description(**wrong))


@given(st.one_of(
    st.binary(max_size=64),
    st.builds(description, address=st.integers(0, (1 << 64) - 1), nbytes=st.integers(0, (1 << 64) - 1),
              rkey=st.integers(0, (1 << 32) - 1), access=st.integers(0, (1 << 32) - 1)),
    st.builds(lambda at, bit: bytes(b ^ (1 << bit if i == at else 0) for i, b in enumerate(description())),
              st.integers(0, 31), st.integers(0, 7)),
))
def test_any_bytes_are_memory_or_refused(raw):
    try:
        found = RemoteMemory.from_export(raw)
    except InvalidValueError:
        return
    magic, version, address, nbytes, rkey, access = struct.unpack(LAYOUT, raw)
    assert (magic, version) == (b"GNmm", 1)
    assert (found.address, found.nbytes, found.rkey, found.access) == (address, nbytes, rkey, access)
    assert 0 < nbytes <= (1 << 64) - address
    assert access & 0b1110 == access != 0
    assert found.export() == raw


@pytest.mark.soft_nic
def test_memory_of_a_dmabuf(pd):
    memory = HostMemory(8192, shared=True, sealed=False)  # the software NIC takes it in place of a dmabuf
    assert memory.fd is not None
    with MemoryMap.from_dmabuf(pd, memory.fd, 4096, offset=4096) as made:
        assert (made.iova, made.nbytes) == (4096, 4096)
        assert RemoteMemory.from_export(made.export_rdma()).address == 4096
        with pytest.raises(BadStateError, match="does not address"):
            made.array()
    with MemoryMap.from_dmabuf(pd, memory.fd, 4096, offset=4096, iova=1 << 30) as moved:
        assert RemoteMemory.from_export(moved.export_rdma()).address == 1 << 30
    memory.close()
