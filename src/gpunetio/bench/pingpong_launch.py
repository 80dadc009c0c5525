"""A ping-pong played by a kernel on a thread of the host."""

from __future__ import annotations

import numpy as np

from ..device.status import EIO, ETIMEDOUT
from ..enums import CqOverrun
from ..errors import DriverError, TimedOutError
from ..formats.cqe import Syndrome
from ..formats.doorbell import QP_DBREC
from ..gpu import Gpu
from ..verbs import QP, Context
from . import launches
from .kernels.parts import RECORD_WORDS
from .kernels.pingpong import OUT, RECEIVE_SIDE, pingpong, post_receives
from .launches import Launcher
from .pingpong_player import SEND_SLOTS, PingPongOptions, Played, Player, problem_at

SECONDS_A_MESSAGE = 0.01  # on top of the seconds of a launch


class KernelPlayer(Player, Launcher):
    """Plays in a kernel."""

    def __init__(self, ctx: Context, options: PingPongOptions):
        Player.__init__(self, ctx, options)
        Launcher.__init__(self)
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise

    def _open(self) -> None:
        options = self.options
        self._stack.enter_context(self.ctx)
        self.gpu: Gpu = self._stack.enter_context(Gpu("host"))
        pd = self.ctx.create_pd()
        self._buffer = self._alloc(self._nbytes)
        self._mr = pd.register(self._buffer)
        self._received = self._buffer.device_address + self._fill(self._buffer.array)
        sends = self.ctx.create_cq(SEND_SLOTS, overrun=CqOverrun.ENABLE)
        receives = self.ctx.create_cq(1 << options.rx_depth.bit_length())
        self.qp: QP = pd.create_qp(sq_wr=SEND_SLOTS, rq_wr=options.rx_depth, send_cq=sends, receive_cq=receives,
                                    qp_type=options.qp_type)
        self._exported = self.gpu.export_qp(self.qp, timeout=launches.WAIT_SECONDS)
        self._stack.callback(self._exported.close)
        self._qps.append(self._exported)
        self._open_records(-(-len(OUT) // RECORD_WORDS))
        self._rq = self._alloc(8 * len(RECEIVE_SIDE))
        self._rq.write(np.array([
            self.qp.rq_address, self.qp.rq_stride, self.qp.rq_entries, self.qp.dbr_address + QP_DBREC.rcv,
            receives.ring_address, receives.entries, receives.dbr_address,
        ], np.int64))

    def close(self) -> None:
        self._close()

    def compile(self) -> None:
        self.qp.to_init(port=self.options.port)  # a launch refuses a queue pair in RST
        self._launch_kernel(0)
        self._post(0)

    def post(self) -> None:
        self._post(self.options.rx_depth)

    def _post(self, depth: int) -> None:
        job = (self._rq, depth, self._received, self._mr.lkey, self.options.size)
        if not post_receives[1, 1, self.gpu](*job).wait(launches.LAUNCH_SECONDS):
            raise TimedOutError("the receives were not posted: their kernel hangs")

    def play(self) -> Played:
        options = self.options
        words = self._launch_kernel(options.iterations)
        problem = problem_at(words["bad_message"], words["bad_offset"]) if words["bad_message"] else None
        seconds = max(1, words["end"] - words["start"]) / 1e9
        return Played(options.size, options.iterations, seconds, problem)

    def _launch_kernel(self, iterations: int) -> dict[str, int]:
        options = self.options
        records = self.launch(
            pingpong, 1, 1, int(options.server is not None), self._exported, self._rq, self._buffer, self._received,
            self._mr.lkey, options.size, options.rx_depth, iterations, int(options.validate),
            seconds=launches.LAUNCH_SECONDS + SECONDS_A_MESSAGE * iterations,
        )
        return self._words(records)

    @staticmethod
    def _words(records: np.ndarray) -> dict[str, int]:
        return {name: int(word) for name, word in zip(OUT, records.ravel())}

    def _raise_for(self, statuses: np.ndarray) -> None:
        """Raise the error of the kernel's status. It has a single status, however many threads a table shows."""
        words = self._words(self._out.array.view(np.int64))
        if words["status"] == EIO and words["syndrome"]:
            syndrome = words["syndrome"]
            name = Syndrome(syndrome).name if syndrome in list(Syndrome) else "unknown"
            raise DriverError(
                f"a receive failed after {words['received']} messages: {name} (syndrome {syndrome:#04x}, vendor "
                f"{words['vendor']:#04x})"
            )
        if words["status"] == ETIMEDOUT:
            raise TimedOutError(
                f"nothing came for {launches.WAIT_SECONDS:g} s, after {words['received']} messages: the other end has "
                "died or has another --iters"
            )
        super()._raise_for(np.array([words["status"]]))
