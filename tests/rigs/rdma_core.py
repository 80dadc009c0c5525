"""Skips tests where rdma-core, which pip does not install, lacks what they need."""

import ctypes
import shutil

import pytest

from stand_in.building import why_no_headers


def skip_without_headers() -> None:
    """What compiles against rdma-core."""
    if reason := why_no_headers():
        pytest.skip(reason)


def skip_without_libraries() -> None:
    """What loads libibverbs and libmlx5."""
    for name in ("libibverbs.so.1", "libmlx5.so.1"):
        try:
            ctypes.CDLL(name)
        except OSError as error:
            pytest.skip(f"the libraries of rdma-core are not installed (ibverbs-providers): {error}")


def skip_without_readelf() -> None:
    """What looks into shared objects."""
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed (binutils)")
