"""Fixtures of the interop tests: one guest a path MTU, kept while its tests run."""

import os
from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("conformance")

import guest as harness  # noqa: E402

PATH_MTUS = (1024, 4096)


@pytest.fixture(scope="session", params=PATH_MTUS, ids="mtu{}".format)
def guest(request: pytest.FixtureRequest) -> Iterator[harness.Guest]:
    """A guest; a test may choose its path MTU by parametrizing this fixture indirectly."""
    if os.geteuid() != 0:
        pytest.skip("a guest needs a network namespace and a tap: root only")
    harness.build()
    booted = harness.Guest(request.param)
    yield booted
    booted.stop()


@pytest.fixture(params=["ipv4", "ipv6"])
def ip(request: pytest.FixtureRequest) -> str:
    """The kind of GIDs that connect the ends."""
    return request.param
