"""What tests of the RDMA library begin with: a software NIC, and kernels on threads of the host or on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from gpunetio import Gpu, verbs
from rdma_rig import Ends


@pytest.fixture(scope="module")
def pd() -> Iterator[verbs.PD]:
    with verbs.open("soft0") as ctx:
        yield ctx.create_pd()


@pytest.fixture(scope="module", params=["host", pytest.param("auto", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    with Gpu(request.param) as gpu:
        yield gpu


@pytest.fixture
def ends(gpu: Gpu, pd: verbs.PD) -> Iterator[Callable[..., Ends]]:
    """Make two ends with as many connections; keywords are those of `Rdma`."""
    with ExitStack() as undo:

        def make(**options: object) -> Ends:
            return undo.enter_context(Ends(gpu, pd, **options))  # type: ignore[arg-type]

        yield make
