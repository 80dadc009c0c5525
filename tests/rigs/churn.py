"""Start the kernels of churn_kernels.py on a `Post`."""

from typing import Any

import numpy as np

from churn_kernels import send_many
from gpunetio import ExportedQp, device
from gpunetio.jit.launch import Kernel
from posts import Post

WARP_LANES = 32
LONG = 280  # seconds


def launch(post: Post, body: Kernel, threads: int, *args: Any) -> tuple[Any, Any]:
    """Start a kernel on blocks of at most 32 threads; its launch and its words."""
    words = post.gpu.alloc(max(64, 8 * threads))
    block = min(threads, WARP_LANES) if post.gpu.target == "cuda" else 1
    return body[threads // block, block, post.gpu](*args, words), words


def end(started: tuple[Any, Any], threads: int) -> list[int]:
    running, words = started
    assert running.wait(LONG)
    found = words.read().view(np.int64)[:threads].tolist()
    words.close()
    return found


def compile_sends(post: Post, queue: ExportedQp) -> None:
    """By a launch that sends nothing: receivers that are waiting already would not wait for the compiler, too."""
    assert end(launch(post, send_many, 1, queue, post.here.address, post.here_mr.lkey, 0, device.GPU), 1) == [device.OK]
