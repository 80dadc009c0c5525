"""The NIC's engine as a kernel: its functions are called, many deep, with the ABI that CUDA gives them."""

import numpy as np
import pytest

from gpunetio.device import kernel
from gpunetio.enums import MemType
from gpunetio.jit.ops import st64
from gpunetio.nic.state.worker import WORKER, WorkerState
from gpunetio.nic.turn.commands import EngineCommand
from gpunetio.nic.turn.step import step


@kernel
def two_turns(worker, row, prepared, nbytes, out):
    """A command is posted, and the worker executes it in the first of two turns."""
    n = WorkerState(worker)
    n.pause_at = -1
    n.command_op, n.command_row, n.command_src, n.command_bytes = EngineCommand.WRITE_ROW, row, prepared, nbytes
    n.command_seq = 7
    st64(out, step(worker))
    st64(out + 8, step(worker))
    st64(out + 16, n.command_done)
    st64(out + 24, n.now)


@pytest.mark.slow  # on the host, the whole engine is linked into the kernel
@pytest.mark.timeout(300)
def test_a_worker_executes_a_command(gpu):
    nbytes = 204
    with (
        gpu.alloc(WORKER.size) as worker, gpu.alloc(4096, MemType.CPU_GPU) as row,
        gpu.alloc(4096, MemType.CPU_GPU) as prepared, gpu.alloc(4096, MemType.CPU_GPU) as out,
    ):
        prepared.array[:] = np.random.default_rng(11).integers(1, 256, 4096, np.uint8)
        assert two_turns[1, 1, gpu](worker, row, prepared, nbytes, out).wait(60)
        done, idle, executed, now = out.array.view(np.int64)[:4].tolist()
        assert (done, idle, executed) == (1, 0, 7)
        assert now > 0
        assert (row.array[:nbytes] == prepared.array[:nbytes]).all()
        assert not row.array[nbytes:].any()
