"""What the host does around CUDA, with stand-ins for CUDA."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gpunetio import Gpu
from gpunetio.device.launch import CudaLaunch, observers
from gpunetio.errors import DriverError
from gpunetio.gpu.host_backend import HostBackend
from nic_rig import until

numba_cuda = pytest.importorskip("numba.cuda", reason="needs numba-cuda (extra 'cuda')")


class Event:
    """Of a kernel that runs until `answer` is something else than False."""

    def __init__(self):
        self.answer: Any = False

    def query(self) -> bool:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def record(self, stream: Any) -> None:
        pass


class Kernel:
    """What Numba compiles: launched as `kernel[grid, block, stream](…)`."""

    def __getitem__(self, config: Any) -> Any:
        return lambda *args: None


@pytest.fixture
def event(monkeypatch) -> Event:
    event = Event()
    monkeypatch.setattr(numba_cuda, "event", lambda timing: event)
    return event


def launch() -> CudaLaunch:
    return CudaLaunch(Kernel(), (), 1, 1, 0)


# --- a kernel that fails ---------------------------------------------------------------------------------------------


def test_a_kernel_that_fails_has_ended(event: Event):
    changes: list[int] = []
    observers.append(changes.append)
    try:
        with Gpu("host") as gpu:
            memory, running = gpu.alloc(64), launch()
            memory.used_by(running)
            assert not running.done
            assert not running.wait(0.01)
            event.answer = RuntimeError("[700] CUDA_ERROR_ILLEGAL_ADDRESS")
            until(lambda: changes == [-1], "the watching thread")
            assert running.done
            with pytest.raises(DriverError, match=r"a kernel has failed, .* \[700\] CUDA_ERROR_ILLEGAL_ADDRESS; look"):
                running.wait(1)
            memory.close()
            assert memory.closed
    finally:
        observers.remove(changes.append)


def test_closing_goes_on_when_a_part_fails(monkeypatch):
    """As each call of CUDA does after a kernel has failed."""
    def fails(*args: object) -> None:
        raise DriverError("illegal address")

    closed: list[int] = []
    gpu = Gpu("host")
    memory = [gpu.alloc(64) for _ in range(2)]
    service = gpu.create_service()
    monkeypatch.setattr(memory[1], "close", fails)
    monkeypatch.setattr(HostBackend, "close", lambda self: closed.append(1))
    with pytest.raises(DriverError, match="illegal address"):
        gpu.close()
    assert memory[0].closed
    assert service.closed
    assert closed == [1]
    gpu.close()


def test_the_watchdog_goes_on_when_a_queue_cannot_be_looked_at(caplog):
    class Broken:
        def indices(self) -> dict[str, int]:
            raise RuntimeError("no such address")

        def __str__(self) -> str:
            return "the export of QP 0x5"

    looked = threading.Event()
    whole = SimpleNamespace(indices=lambda: looked.set() or {"completed": 0})
    with Gpu("host") as gpu:
        gpu.watchdog._exports = lambda: [Broken(), whole]  # type: ignore[list-item]
        gpu.watchdog.look()
    assert looked.is_set()
    assert "the export of QP 0x5 cannot be looked at" in caplog.text
    assert "no such address" in caplog.text
