"""The player at one end of a ping-pong: a kernel or the CPU."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from ..enums import Access, QpType
from ..nic.engine.port import PortConfig
from ..rendezvous.link import PORT
from ..verbs import QP, Context, QpEndpoint

FILL = 0x7B
SEND_SLOTS = 16
_MIN_RNR_TIMER = 12


@dataclass(frozen=True, kw_only=True)
class PingPongOptions:
    """ibv_rc_pingpong's options and defaults. `gid_index` None: 0 on Ethernet, and no GID on InfiniBand.

    `qp_type` UC and UD are ibv_uc_pingpong and ibv_ud_pingpong. A datagram has one packet, so `size` is at most the
    port's MTU, and `mtu` does not matter.

    With `cpu`, the CPU posts and polls, not a kernel. This is implied where a device has no queues for kernels, by UD,
    and by `events`, which sleeps until completion events.
    """

    server: str | None = None
    tcp_port: int = PORT
    device: str | None = None
    nic_port: PortConfig | None = None
    port: int = 1
    size: int = 4096
    mtu: int = 1024
    rx_depth: int = 500
    iterations: int = 1000
    sl: int = 0
    gid_index: int | None = None
    validate: bool = False
    events: bool = False
    cpu: bool = False
    qp_type: QpType = QpType.RC


@dataclass(frozen=True)
class Played:
    """The result. `problem` is what validation found."""

    size: int
    iterations: int
    seconds: float
    problem: str | None = None

    def lines(self) -> list[str]:
        """Return ibv_rc_pingpong's two lines."""
        nbytes, usec = 2 * self.size * self.iterations, self.seconds * 1e6
        return [
            f"{nbytes} bytes in {self.seconds:.2f} seconds = {nbytes * 8 / usec:.2f} Mbit/sec",
            f"{self.iterations} iters in {self.seconds:.2f} seconds = {usec / self.iterations:.2f} usec/iter",
        ]


class Player(ABC):
    """A queue pair and its memory. It also closes `ctx`."""

    qp: QP
    ctx: Context
    options: PingPongOptions

    def __init__(self, ctx: Context, options: PingPongOptions):
        self.ctx, self.options = ctx, options

    def _fill(self, memory: np.ndarray) -> int:
        """Write the outgoing message to the start of memory. Return the offset of received messages.

        With validation, that is another place, and each page of the message is marked as in ibv_rc_pingpong.
        """
        options = self.options
        memory[:] = FILL ^ 0xFF
        sent = memory[: options.size]
        sent[:] = FILL
        if not options.validate:
            return 0
        sent[:: mmap.PAGESIZE] = 0
        return options.size

    @property
    def _nbytes(self) -> int:
        """Return the size of that memory in bytes."""
        return self.options.size * (2 if self.options.validate else 1)

    def connect(self, far: QpEndpoint) -> None:
        """Connect the queue pair to the other end's."""
        options = self.options
        self.qp.connect(
            far, port=options.port, sgid_index=options.gid_index or 0, sl=options.sl, min_rnr_timer=_MIN_RNR_TIMER,
            max_rd_atomic=1, remote_access=Access.LOCAL_READ,
        )

    @abstractmethod
    def compile(self) -> None:
        """Compile the code that plays, unless it is compiled."""

    @abstractmethod
    def post(self) -> None:
        """Post the receives for the first messages."""

    @abstractmethod
    def play(self) -> Played:
        """Run all exchanges."""

    @abstractmethod
    def close(self) -> None:
        """End any running code, and close the device."""


def problem_at(message: int, offset: int) -> str:
    """Describe a message with a wrong byte."""
    return f"the byte at offset {offset} of message {message} is wrong: both ends need --chk and the same --size"
