"""The settings of NCCL's plugin, from the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import InvalidValueError
from ..gpu import cuda_backend
from ..gpu.device import engine_of
from ..providers import PortConfig
from ..rendezvous.group import TIMEOUT
from ..verbs import Context, open

DEVICE, GPU, SECONDS = "GPUNETIO_NCCL_DEVICE", "GPUNETIO_NCCL_GPU", "GPUNETIO_NCCL_TIMEOUT"
ON_GPU = "gpu"


@dataclass(frozen=True)
class Settings:
    """The settings of a process.

    `device`    name of the NIC; empty: the first software NIC that no other process has open; ON_GPU: the same, with
                its engine on the GPU where kernels run
    `gpu`       where kernels run (`Gpu`); empty: the calling thread's CUDA device, or the host without CUDA
    `timeout`   seconds that a rank waits for the others
    """

    device: str = ""
    gpu: str = ""
    timeout: float = TIMEOUT

    @classmethod
    def of_environment(cls) -> Settings:
        """Return the settings of this process. InvalidValueError if the timeout is not a positive number."""
        text = os.environ.get(SECONDS, "") or str(TIMEOUT)
        try:
            timeout = float(text)
        except ValueError:
            timeout = 0.0
        if not 0 < timeout < float("inf"):
            raise InvalidValueError(f"{SECONDS}={text}: give a positive number of seconds")
        return cls(os.environ.get(DEVICE, ""), os.environ.get(GPU, ""), timeout)

    def open_device(self) -> Context:
        """Open the NIC."""
        if self.device == ON_GPU:
            return open(port=PortConfig(engine=engine_of(self.which_gpu(), "auto")))
        return open(self.device) if self.device else open(port=PortConfig())

    def which_gpu(self) -> str:
        """Return which `Gpu` the calling thread's kernels run on."""
        if self.gpu:
            return self.gpu
        return str(cuda_backend.current_device()) if cuda_backend.device_count() else "host"
