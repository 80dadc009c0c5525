"""Memory regions and UMEMs: what can be registered, with which rights, under which addresses, and for how long."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_device import FakeProvider
from gpunetio.enums import Access
from gpunetio.errors import BadStateError, DriverError, InvalidValueError
from gpunetio.memory import HostMemory
from gpunetio.verbs import Context

L, RW, RR, RA = Access.LOCAL_WRITE, Access.REMOTE_WRITE, Access.REMOTE_READ, Access.REMOTE_ATOMIC


@pytest.fixture
def fake() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
def ctx(fake: FakeProvider) -> Context:
    return Context(fake)


class CudaArray:
    """Says that it is 64 bytes of GPU memory."""

    def __init__(self, readonly: bool = False):
        self.__cuda_array_interface__ = {
            "shape": (16,), "typestr": "<u4", "data": (0x7F00_0000_0000, readonly), "version": 3,
        }


def test_array(fake, ctx):
    array = np.zeros((3, 5), np.uint32)
    mr = ctx.create_pd().register(array)
    assert (mr.address, mr.nbytes, mr.access) == (array.ctypes.data, 60, Access.all())
    assert mr.iova == mr.address
    assert mr.rkey == mr.lkey | 1
    assert fake.mrs == [(mr.pd.pdn, mr.address, 60, mr.address, Access.all(), False)]


def test_cuda_memory_is_named_so(fake, ctx):
    mr = ctx.create_pd().register(CudaArray())
    assert fake.mrs == [(mr.pd.pdn, 0x7F00_0000_0000, 64, 0x7F00_0000_0000, Access.all(), True)]


@pytest.mark.parametrize("of", [int, np.uint64])
def test_an_address_and_a_length(fake, ctx, of):
    array = np.zeros(8192, np.uint8)
    pd, at = ctx.create_pd(), of(array.ctypes.data + 96)
    mr, umem = pd.register(at, nbytes=100), ctx.register_umem(at, nbytes=100)
    assert (mr.address, mr.nbytes, mr.access, mr.iova) == (array.ctypes.data + 96, 100, Access.all(), mr.address)
    assert (umem.address, umem.nbytes) == (mr.address, 100)
    assert fake.mrs == [(pd.pdn, mr.address, 100, mr.address, Access.all(), False)]


def test_an_address_that_the_cpu_cannot_read_may_be_a_gpus(fake, ctx):
    address = (1 << 47) - 4096  # no program has this page
    mr = ctx.create_pd().register(address, nbytes=64)
    assert fake.mrs == [(mr.pd.pdn, address, 64, address, Access.all(), True)]


@pytest.mark.parametrize("address, nbytes, message", [
    (4096, None, r"0x1000 is an address: give the length of the memory too, nbytes = "),
    (4096, 0, "0 bytes"), (4096, -1, "no range of memory"), (-1, 8, "no range of memory"),
    ((1 << 64) - 4, 8, "no range of memory"), (4096, "8", "nbytes = '8' is of type str"),
    (bytearray(8), 4, "nbytes = 4 beside a bytearray: only an address needs a length"),
    (True, None, "bool is not memory"),
])
def test_addresses_that_are_refused(ctx, address, nbytes, message):
    for register in (ctx.create_pd().register, ctx.register_umem):
        with pytest.raises(InvalidValueError, match=message):
            register(address, nbytes=nbytes)


@pytest.mark.parametrize("iova", [0, 0x1000, (1 << 64) - 8])
def test_iova(fake, ctx, iova):
    mr = ctx.create_pd().register(bytearray(8), iova=iova)
    assert mr.iova == iova
    assert fake.mrs[0][3] == iova


@pytest.mark.parametrize("iova", [-1, (1 << 64) - 7])
def test_iova_out_of_range(ctx, iova):
    with pytest.raises(InvalidValueError, match="64 bits"):
        ctx.create_pd().register(bytearray(8), iova=iova)


@pytest.mark.parametrize("readonly", [b"abcd", memoryview(bytes(4)), CudaArray(readonly=True)])
def test_read_only_memory_is_for_reading(ctx, readonly):
    pd = ctx.create_pd()
    with pd.register(readonly) as mr, pd.register(readonly, Access.LOCAL_READ) as local:
        assert mr.access == RR
        assert local.access == Access.LOCAL_READ
    with pytest.raises(InvalidValueError, match=r"read-only.*LOCAL_WRITE and REMOTE_WRITE"):
        pd.register(readonly, L | RW)
    with pytest.raises(InvalidValueError, match=r"read-only.*LOCAL_WRITE"):
        ctx.register_umem(readonly)


@pytest.mark.parametrize("empty", [b"", bytearray(), np.zeros(0)])
def test_nothing_to_register(ctx, empty):
    with ctx.create_pd() as pd, pytest.raises(InvalidValueError, match="0 bytes"):
        pd.register(empty)
    with pytest.raises(InvalidValueError, match="0 bytes"):
        ctx.register_umem(empty)


@given(st.integers(0, 15), st.booleans())
def test_rights(rights, readonly):
    access = Access(rights)
    memory = bytes(4) if readonly else bytearray(4)
    allowed = not readonly or not rights & (1 | 2 | 8)
    if rights & (2 | 8):
        allowed = allowed and bool(rights & 1)
    provider = FakeProvider()
    pd = Context(provider).create_pd()
    if allowed:
        assert pd.register(memory, access).access == access
    else:
        with pytest.raises(InvalidValueError):
            pd.register(memory, access)
        assert not provider.mrs


@pytest.mark.parametrize("access", [RW, RA, RW | RA | RR])
def test_remote_writes_need_local_write(ctx, access):
    with pytest.raises(InvalidValueError, match=r"without LOCAL_WRITE: add LOCAL_WRITE"):
        ctx.create_pd().register(bytearray(4), access)


def test_no_memory(ctx):
    with pytest.raises(InvalidValueError, match="0x5 is an address: give the length"):
        ctx.create_pd().register(5)


def test_keeps_the_memory_alive_until_closed(ctx):
    array = np.zeros(64, np.uint8)
    alive = weakref.ref(array)
    mr = ctx.create_pd().register(array)
    del array
    gc.collect()
    assert alive() is not None
    mr.close()
    gc.collect()
    assert alive() is None


def test_bytearray_cannot_move_while_registered(ctx):
    memory = bytearray(8)
    mr = ctx.create_pd().register(memory)
    with pytest.raises(BufferError):
        memory.extend(bytes(1 << 20))
    mr.close()
    memory.extend(bytes(1 << 20))


def test_close(fake, ctx):
    pd = ctx.create_pd()
    mr = pd.register(bytearray(8))
    mr.close()
    mr.close()
    assert mr.closed
    assert fake.gone == ["mr"]
    with pytest.raises(BadStateError, match=r"^MR 0x1300 of fake0 is closed$"):
        mr.check_open()
    pd.register(bytearray(8))
    pd.close()
    assert fake.gone == ["mr", "mr", "pd"]
    with pytest.raises(BadStateError, match=r"^PD 0x12 of fake0 is closed$"):
        pd.register(bytearray(8))


def test_refused_registration_holds_nothing(fake, ctx):
    array = np.zeros(8)
    alive = weakref.ref(array)
    fake.refused = {"reg_mr", "reg_umem"}
    pd = ctx.create_pd()
    for register in (pd.register, ctx.register_umem):
        with pytest.raises(DriverError, match=r"^register a (memory region|UMEM): refused") as caught:
            register(array)
        assert (caught.value.status, caught.value.syndrome) == (3, 0xABCD)
        del caught
    del array
    gc.collect()
    assert alive() is None
    pd.close()
    assert fake.left() == []


def test_umem(fake, ctx):
    memory = HostMemory(100)
    umem = ctx.register_umem(memory)
    assert (umem.address, umem.nbytes) == (memory.address, memory.nbytes)
    assert fake.live["umem"] == [umem.umem_id]
    umem.close()
    assert fake.left() == []
    memory.close()
