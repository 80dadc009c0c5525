"""What tests of Ethernet queues begin with: a software NIC and a protection domain."""

from collections.abc import Iterator

import pytest

from eth_receive_rig import opened
from gpunetio import verbs


@pytest.fixture
def ctx() -> Iterator[verbs.Context]:
    with opened() as ctx:
        yield ctx


@pytest.fixture
def pd(ctx) -> verbs.PD:
    return ctx.create_pd()
