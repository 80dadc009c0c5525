"""Arrays of buffers in kernels, on host threads and on a GPU."""

import numpy as np
import pytest

from gpunetio import MemType, device, kernel
from gpunetio.core import BufArray, MemoryMap, RemoteMemory
from gpunetio.errors import BadStateError, InvalidValueError
from pair import run_on


@kernel
def put_reversed(qp, remote, local, num, out):
    """Put element i of a local array to the last element but i of a peer's."""
    ticket = 0
    for i in range(num):
        source, target = device.buf_get(local, i), device.buf_get(remote, num - 1 - i)
        ticket = device.put(
            qp, device.buf_addr(target), device.buf_mkey(target), device.buf_addr(source), device.buf_mkey(source),
            device.buf_nbytes(source),
        )
    device.st64(out, device.wait(qp, ticket))


@kernel
def edges(array, num, out):
    """What is no element of an array."""
    device.st64(out, device.buf_get(array, -1))
    device.st64(out + 8, device.buf_get(array, num))
    device.st64(out + 16, device.buf_get(array, 1 << 62))
    nothing = device.buf_get(array, num)
    device.st64(out + 24, device.buf_addr(nothing))
    device.st64(out + 32, device.buf_nbytes(nothing))
    device.st64(out + 40, device.buf_mkey(nothing))
    device.st64(out + 48, device.buf_get(array, num - 1) - device.buf_get(array, 0))


def test_elements_are_what_requests_take(pair):
    num, size, offset = 7, 100, 33
    with (
        MemoryMap(pair.pd, pair.here) as memory,
        MemoryMap(pair.pd, pair.there) as theirs,
        BufArray(pair.gpu, memory, num, size, offset=offset) as local,
        BufArray(pair.gpu, RemoteMemory.from_export(theirs.export_rdma()), num, size) as far,
    ):
        assert run_on(pair.gpu, put_reversed, pair.a, far, local, num, count=1) == [0]
    sent = pair.here.array[offset : offset + num * size].reshape(num, size)
    assert np.array_equal(pair.there.array[: num * size].reshape(num, size), sent[::-1])
    assert not pair.there.array[num * size :].any()


def test_other_indices_are_refused(gpu, pd):
    with MemoryMap(pd, np.zeros(64, np.uint8)) as memory, BufArray(gpu, memory, 4, 16) as array:
        assert len(array) == 4
        *refused, distance = run_on(gpu, edges, array, 4, count=7)
        assert refused == [device.EINVAL] * 6
        assert distance == 3 * 32


@pytest.mark.parametrize("wrong", [(5, 16, 0), (4, 16, 1), (1, 0, 0), (1, 1, -1), (0, 1, 0)])
def test_elements_lie_inside_the_memory(gpu, pd, wrong):
    num, size, offset = wrong
    with MemoryMap(pd, np.zeros(64, np.uint8)) as memory, pytest.raises(InvalidValueError):
        BufArray(gpu, memory, num, size, offset=offset)


def test_kernels_are_not_given_what_is_gone(gpu, pd):
    with gpu.alloc(64, MemType.CPU_GPU) as out:
        memory = MemoryMap(pd, np.zeros(64, np.uint8))
        array = BufArray(gpu, memory, 4, 16)
        memory.close()
        with pytest.raises(BadStateError, match="closed"):
            edges[1, 1, gpu](array, 4, out)
        array.close()
        with pytest.raises(BadStateError, match="closed"):
            edges[1, 1, gpu](array, 4, out)
    with pytest.raises(InvalidValueError, match="addresses below"):
        BufArray(gpu, RemoteMemory(1 << 63, 64, 1), 1, 64)
