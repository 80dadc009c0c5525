"""What a queue pair needs of a DPA, whose kernels drive it. `gpunetio.Dpa` has it, and is built on top of `verbs`."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .cq import CQ
from .handle import Handle


class AnyDpa(Handle, ABC):
    """A DPA (`doca_dpa`). The queue pairs that it is told of are of its own context."""

    @abstractmethod
    def attach(self, qp: Handle) -> None:
        """Let kernels drive a queue pair that was made for this DPA."""

    @abstractmethod
    def detach(self, qp: Handle) -> None:
        """Forget a queue pair that is being closed."""

    @abstractmethod
    def restart(self, qp: Handle) -> None:
        """Count a queue pair from 0 again, as the device does in RST."""

    @abstractmethod
    def handle(self, qp: Handle) -> int:
        """Return the pointer that kernels pass to device functions."""

    @abstractmethod
    def wait_for_kernels(self, what: str) -> None:
        """Wait until no kernel runs that may have the handle of `what`. TimedOutError if one does not end."""


class AnyDpaCompletion(Handle, ABC):
    """Where a queue of a DPA's queue pair completes (`doca_dpa_completion`): the CQ `cq`."""

    dpa: AnyDpa
    cq: CQ

    @abstractmethod
    def check_free(self) -> None:
        """Raise InUseError when a queue completes here."""
