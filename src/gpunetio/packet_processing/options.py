"""The options of the application."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..arguments import within
from ..nic.engine.port import PortConfig
from .queues import MAX_QUEUES


@dataclass(frozen=True, kw_only=True)
class Options:
    """`gpu` and `device` name the GPU and the NIC. There are `queues` receive queues of UDP, and as many of TCP.

    `http` serves HTTP from the GPU: the files of the folder `pages`, or built-in pages. `seconds` is how long the
    application runs; None means until Ctrl+C. With `replay`, its packets are those of a capture file, and it ends when
    it has processed them.
    """

    gpu: str
    device: str
    queues: int
    http: bool = False
    pages: Path | None = None
    nic_port: PortConfig | None = None
    seconds: float | None = None
    replay: Path | None = None

    def __post_init__(self) -> None:
        within("queues", self.queues, 1, MAX_QUEUES)
