"""What the control path of a NIC acts on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import step
from .control.port import Port
from .engine import Engine


@dataclass(frozen=True)
class Hardware:
    """The port and the engine of the NIC `name`, and the engine's record, which lies at `address`."""

    name: str
    port: Port
    record: np.void
    address: int
    engine: Engine

    def write(self, address: int, *words: int) -> None:
        """Have the engine write words of 64 bits between two WQEs."""
        self.engine.post(step.WRITE_ROW, address, np.array(words, np.int64))
