"""Skip tests if rdma-core, which pip does not install, lacks what they need."""

import ctypes
import shutil
import sysconfig

import pytest

from stand_in.building import compiler, why_no_headers

# The packages of programs, by the beginning of their names.
PACKAGES = {
    "ib": "perftest", "ibv": "ibverbs-utils", "ucx": "ucx-utils", "rping": "rdmacm-utils", "ucmatose": "rdmacm-utils",
    "rdma": "rdmacm-utils", "udaddy": "rdmacm-utils", "rstream": "rdmacm-utils", "riostream": "rdmacm-utils",
    "rcopy": "rdmacm-utils", "fio": "fio", "ibstat": "infiniband-diags", "qemu-system-x86": "qemu-system-x86",
}


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


def skip_without_run() -> None:
    """What runs programs by `gpunetio run`."""
    skip_without_libraries()
    if compiler() is None:
        pytest.skip("no C compiler")
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        pytest.skip("this Python has no shared library")


def skip_without(program: str) -> None:
    """What runs a program of such a package."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed ({PACKAGES[program.partition('_')[0]]})")
