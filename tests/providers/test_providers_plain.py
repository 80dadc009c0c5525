"""Posting through libibverbs where a device has no DEVX: which request was refused, and what the errno means."""

import ctypes
import errno
from types import SimpleNamespace

import pytest

from gpunetio.errors import DriverError, FullError, InvalidValueError
from gpunetio.providers.mlx5 import structs as s
from gpunetio.providers.plain import PlainProvider

RXE = SimpleNamespace(name="rxe0")
RXE._post_refused = lambda code: PlainProvider._post_refused(RXE, code)  # type: ignore[arg-type]


def posted(code, at=None, chained=3):
    """What comes of a list of receives when the driver returns `code` and names the request at `at`."""
    chain = (s.ibv_recv_wr * chained)()
    seen = []

    def post(queue, first, bad):
        wr = ctypes.pointer(first[0])
        while wr:
            seen.append(ctypes.addressof(wr.contents))
            wr = wr.contents.next
        if at is not None:
            bad._obj.contents = chain[at]
        return code

    refused = PlainProvider._post(RXE, post, None, chain)  # type: ignore[arg-type]
    assert seen == [ctypes.addressof(chain) + i * ctypes.sizeof(s.ibv_recv_wr) for i in range(chained)]
    return refused


def test_all_were_taken():
    assert posted(0) is None


@pytest.mark.parametrize("code, kind, words", [
    (errno.EINVAL, InvalidValueError, r"rxe0 refuses the request: Invalid argument \(EINVAL\)"),
    (errno.ENOMEM, FullError, "rxe0 has no room for the request: poll the CQ first"),
    (errno.EIO, DriverError, r"rxe0 refuses the request: Input/output error \(EIO\)"),
    (4095, DriverError, r"\(4095\)"),
])
@pytest.mark.parametrize("at", [0, 2, None])
def test_what_was_refused(code, kind, words, at):
    refused = posted(code, at)
    assert refused is not None
    assert refused.index == (at or 0)
    assert type(refused.error) is kind
    with pytest.raises(kind, match=words):
        raise refused.error
