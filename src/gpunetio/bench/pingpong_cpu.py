"""A ping-pong played by the CPU: the data path of verbs, with polling or with completion events."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from ..enums import WcStatus, WrOpcode
from ..errors import DriverError, TimedOutError
from ..formats.packet import GRH
from ..memory import HostMemory
from ..verbs import QP, AhAttr, Completion, Context, QpEndpoint, RecvWr, SendWr, Sge
from .pingpong_player import SEND_SLOTS, PingPongOptions, Played, Player, problem_at

WAIT_SECONDS = 10.0  # for the next completion

QKEY = 0x1111_1111  # of ibv_ud_pingpong
_POLLED = 16
_RECEIVE, _SEND = 1, 2  # wr_ids


class CpuPlayer(Player):
    """Plays on the CPU. Both queues complete in one CQ, as in ibv_rc_pingpong."""

    def __init__(self, ctx: Context, options: PingPongOptions):
        super().__init__(ctx, options)
        self._sent = self._received = self._posted = 0  # completions of each kind, and posted receives
        self._problem: str | None = None
        with ExitStack() as undo:
            undo.enter_context(ctx)
            grh = GRH.size if options.qp_type.datagrams else 0  # comes before the message in a receive's buffer
            memory = HostMemory(2 * grh + self._nbytes)
            undo.callback(memory.close)
            there = grh + self._fill(memory.array[grh : grh + self._nbytes])
            if there > grh:
                there += grh
            self._message = memory.array[grh : grh + options.size]
            self._arrived = memory.array[there : there + options.size]
            self._channel = ctx.create_comp_channel() if options.events else None
            self._pd = pd = ctx.create_pd()
            self._mr = mr = pd.register(memory)
            self._cq = ctx.create_cq(1 << (SEND_SLOTS + options.rx_depth).bit_length(), channel=self._channel)
            self.qp: QP = pd.create_qp(
                sq_wr=SEND_SLOTS, rq_wr=options.rx_depth, send_cq=self._cq, receive_cq=self._cq, qp_type=options.qp_type
            )
            self._send = SendWr(opcode=WrOpcode.SEND, sges=[Sge(mr.address + grh, options.size, mr.lkey)], wr_id=_SEND)
            room = Sge(mr.address + there - grh, grh + options.size, mr.lkey)
            self._receive = RecvWr(sges=[room], wr_id=_RECEIVE)
            self._stack = undo.pop_all()

    def close(self) -> None:
        self._stack.close()

    def connect(self, far: QpEndpoint) -> None:
        options = self.options
        if not options.qp_type.datagrams:
            super().connect(far)
            return
        self.qp.to_rts(qkey=QKEY, port=options.port)
        path = AhAttr(gid=far.gid, dlid=far.lid, sl=options.sl, sgid_index=options.gid_index or 0)
        ah = self._pd.create_ah(path, port=options.port)
        self._send = replace(self._send, ah=ah, remote_qpn=far.qpn, remote_qkey=QKEY)

    def compile(self) -> None:
        """Do nothing: there is nothing to compile."""

    def post(self) -> None:
        if self._channel:
            self._cq.req_notify()
        self._fill_up()

    def _fill_up(self) -> None:
        missing = self.options.rx_depth - (self._posted - self._received)
        self.qp.post_recv(*[self._receive] * missing)
        self._posted += missing

    def play(self) -> Played:
        options, client = self.options, self.options.server is not None
        start = time.perf_counter()
        for number in range(1, options.iterations + 1):
            if client:
                self.qp.post_send(self._send)
            self._wait(lambda number=number: self._received >= number)
            if options.validate:
                self._validate(number)
            if self._posted - self._received <= 1:
                self._fill_up()
            if not client:
                self.qp.post_send(self._send)
            # The next message comes only when this one has arrived.
            self._wait(lambda number=number: self._sent >= number)
        return Played(options.size, options.iterations, time.perf_counter() - start, self._problem)

    def _validate(self, number: int) -> None:
        """Compare a message with the expected one, record the first difference, and overwrite the message."""
        wrong = np.flatnonzero(self._arrived != self._message)
        if len(wrong) and self._problem is None:
            self._problem = problem_at(number, int(wrong[0]))
        self._arrived ^= 0xFF

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Take completions until `ready()` is true."""
        end = time.monotonic() + WAIT_SECONDS
        while not ready():
            done = self._cq.poll(_POLLED)
            for one in done:
                self._count(one)
            if done:
                continue
            if time.monotonic() > end:
                raise TimedOutError(
                    f"nothing came for {WAIT_SECONDS:g} s, after {self._received} messages: the other end died or has "
                    "another --iters"
                )
            self._sleep(end)

    def _sleep(self, end: float) -> None:
        """Wait for the requested event, or without one, just briefly: the other end may need this core."""
        if self._channel is None:
            os.sched_yield()
        elif cq := self._channel.get_event(max(0.0, end - time.monotonic())):
            cq.ack_events()
            cq.req_notify()

    def _count(self, done: Completion) -> None:
        if done.status != WcStatus.SUCCESS:
            what = "send" if done.wr_id == _SEND else "receive"
            raise DriverError(
                f"a {what} failed after {self._received} messages: {done.status.name} (vendor {done.vendor_err:#04x})"
            )
        if done.wr_id == _RECEIVE:
            self._received += 1
        else:
            self._sent += 1
