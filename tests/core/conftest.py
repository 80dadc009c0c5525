"""What tests of DOCA Core's objects begin with: a protection domain of a software NIC."""

from collections.abc import Iterator

import pytest

from gpunetio import verbs


@pytest.fixture(scope="module")
def pd() -> Iterator[verbs.PD]:
    with verbs.open("soft0") as ctx:
        yield ctx.create_pd()
