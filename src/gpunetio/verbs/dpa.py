"""The DPA interface that a queue pair needs when a DPA's kernels drive it. `gpunetio.Dpa`, built on `verbs`, has it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .cq import CQ
from .handle import Handle


class AnyDpa(Handle, ABC):
    """A DPA (`doca_dpa`). It only handles queue pairs of its own context."""

    @abstractmethod
    def attach(self, qp: Handle) -> None:
        """Let kernels drive a queue pair that was created for this DPA."""

    @abstractmethod
    def detach(self, qp: Handle) -> None:
        """Forget a queue pair that is being closed."""

    @abstractmethod
    def restart(self, qp: Handle) -> None:
        """Restart a queue pair's counters from 0, as the device does in RST."""

    @abstractmethod
    def handle(self, qp: Handle) -> int:
        """Return the pointer that kernels pass to device functions."""

    @abstractmethod
    def wait_for_kernels(self, what: str) -> None:
        """Wait until no kernel that may hold the handle of `what` is running. TimedOutError if one does not end."""


class AnyDpaCompletion(Handle, ABC):
    """The completion object of a DPA's queue pair (`doca_dpa_completion`), whose CQ is `cq`."""

    dpa: AnyDpa
    cq: CQ

    @abstractmethod
    def check_free(self) -> None:
        """Raise InUseError if a queue already completes here."""
