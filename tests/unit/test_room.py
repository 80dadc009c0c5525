"""Kernels leave SMs to NICs that make their turns on the same GPU."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from gpunetio import Gpu, device, kernel, verbs
from gpunetio.errors import InvalidValueError
from gpunetio.jit import room
from gpunetio.providers import PortConfig
from pair import make_pair

SMS = 132


@kernel
def put_and_wait(qp, raddr, rkey, laddr, lkey):
    """Each block writes a word of its own, and waits."""
    if device.thread_idx() == 0:
        mine = 8 * device.block_idx()
        ticket = device.put(qp, raddr + mine, rkey, laddr + mine, lkey, 8)
        status = device.wait(qp, ticket)
        if status != device.OK:
            device.st64(laddr, -1)


class Queue:
    """An argument that is a queue."""

    device_address = 0x1000

    def check_launch(self) -> None:
        """It can be used."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The grids that went to a GPU."""
    grids: list[int] = []

    def launch(args: object, grid: int, block: int, place: object, ended: Callable[[], None]) -> SimpleNamespace:
        grids.append(grid)
        ended()  # else it would be counted for ever
        return SimpleNamespace(ended=True)

    monkeypatch.setattr(put_and_wait.code["cuda"], "launch", launch)
    monkeypatch.setattr(room, "_rooms", {})
    return grids


def on(ordinal: int) -> SimpleNamespace:
    return SimpleNamespace(target="cuda", warp=1, ordinal=ordinal)


def test_a_grid_that_leaves_no_sm_to_the_nic_is_refused(launched):
    room.need(0, SMS, 1)
    room.need(0, SMS, 2)
    put_and_wait[SMS - 3, 32, on(0)](Queue(), 0, 0, 0, 0)
    with pytest.raises(InvalidValueError) as error:
        put_and_wait[SMS - 2, 32, on(0)](Queue(), 0, 0, 0, 0)
    assert str(error.value) == (
        "put_and_wait: 130 blocks can take all 132 SMs of GPU 0, where NICs make their turns on 3, so their requests "
        "would never be executed: launch at most 129 blocks"
    )
    room.need(0, SMS, -2)
    put_and_wait[SMS - 1, 32, on(0)](Queue(), 0, 0, 0, 0)
    assert launched == [SMS - 3, SMS - 1]


def test_other_grids_are_not(launched):
    """Those of kernels without queues, of other GPUs, and of GPUs whose NICs are closed."""
    room.need(0, SMS, 1)
    put_and_wait[10 * SMS, 32, on(0)](0, 0, 0, 0, 0)
    put_and_wait[10 * SMS, 32, on(1)](Queue(), 0, 0, 0, 0)
    room.need(0, SMS, -1)
    put_and_wait[10 * SMS, 32, on(0)](Queue(), 0, 0, 0, 0)
    assert launched == [10 * SMS] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [32, 1024])
def test_the_largest_grid_gets_its_answers(threads):
    port = PortConfig(engine="gpu0", workers=1)
    with verbs.open("soft0", port=port) as ctx, Gpu("0") as gpu, gpu.alloc(1 << 14) as memory:
        pair = make_pair(ctx, gpu, depth=1024)
        sms = room._rooms[0].sms
        with pytest.raises(InvalidValueError, match=f"launch at most {sms - 1} blocks"):
            put_and_wait[sms, threads, gpu](pair.a, 0, 0, 0, 0)
        mr = pair.pd.register(memory)
        half = memory.nbytes // 2
        memory.write(bytes(range(1, 129)) * (memory.nbytes // 128))
        for _ in range(20):
            memory.write(bytes(half), half)
            launch = put_and_wait[sms - 1, threads, gpu](pair.a, mr.address + half, mr.rkey, mr.address, mr.lkey)
            assert launch.wait(30)
            assert memory.read(half, 8 * (sms - 1)).tobytes() == memory.read(0, 8 * (sms - 1)).tobytes()
        pair.a.close()
        pair.b.close()
