"""Fixtures of the NIC's tests."""

from collections.abc import Iterator

import pytest

from nic_rig import Ends


@pytest.fixture
def one() -> Iterator[Ends]:
    """Two QPs of one NIC, connected by hand."""
    opened = Ends.open("soft0")
    yield opened
    opened.close()
