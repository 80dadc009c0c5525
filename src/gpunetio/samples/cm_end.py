"""One end of a connection, for samples: memory, a queue pair, and a wait that sleeps until requests complete."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Self

from ..cm.address import gid_of
from ..enums import WcOpcode, WcStatus, WrOpcode
from ..errors import DriverError, NotFoundError, TimedOutError
from ..formats.packet import IPV4_MAPPED
from ..memory import HostMemory
from ..verbs import MR, PD, QP, Context, RecvWr, SendWr, Sge

WAIT_SECONDS = 60.0  # for the peer's next message
_DEPTH = 16  # requests of each queue


class End:
    """Memory of `nbytes` and a queue pair. `post` posts requests, `wait` sleeps until one of them is complete."""

    peer_left: bool = False
    memory: HostMemory
    region: MR
    qp: QP

    def __init__(self, pd: PD, nbytes: int):
        with ExitStack() as undo:
            self.memory = HostMemory(nbytes)
            undo.callback(self.memory.close)
            self.region = undo.enter_context(pd.register(self.memory.array))
            self._channel = undo.enter_context(pd.ctx.create_comp_channel())
            self._cq = undo.enter_context(pd.ctx.create_cq(2 * _DEPTH, channel=self._channel))
            self.qp = undo.enter_context(
                pd.create_qp(sq_wr=_DEPTH, rq_wr=_DEPTH, send_cq=self._cq, receive_cq=self._cq)
            )
            self._done: list[WcOpcode] = []  # completions that nobody has waited for yet
            self._failure: DriverError | None = None  # of the first request that failed
            self.qp.to_init()
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    def sge(self, offset: int, nbytes: int) -> Sge:
        """Return a part of the memory as a scatter/gather entry."""
        return Sge(self.region.address + offset, nbytes, self.region.lkey)

    def receive(self, offset: int, nbytes: int) -> None:
        """Post a receive for the next message into this part of the memory."""
        self.qp.post_recv(RecvWr(sges=(self.sge(offset, nbytes),)))

    def post(
        self, opcode: WrOpcode, offset: int, nbytes: int, remote_addr: int | None = None, rkey: int | None = None
    ) -> None:
        """Send or write a part of the memory, or read into it."""
        self.qp.post_send(
            SendWr(opcode=opcode, sges=(self.sge(offset, nbytes),), remote_addr=remote_addr, rkey=rkey)
        )

    def wait(self, opcode: WcOpcode) -> None:
        """Sleep until a request of this kind has completed. Completions before a failure count.

        DriverError for a request that has failed, also because the peer has disconnected; then `peer_left` is set.
        TimedOutError after a minute.
        """
        end = time.monotonic() + WAIT_SECONDS
        self._cq.req_notify()
        self._take()
        while opcode not in self._done:
            if self._failure is not None:
                raise self._failure
            if (cq := self._channel.get_event(max(0.0, end - time.monotonic()))) is None:
                raise TimedOutError(f"the other end sent nothing for {WAIT_SECONDS:g} s")
            cq.ack_events()
            cq.req_notify()
            self._take()
        self._done.remove(opcode)

    def _take(self) -> None:
        """Take completions until the first failure."""
        for done in self._cq.poll():
            if self._failure is not None:
                return
            if done.status == WcStatus.SUCCESS:
                self._done.append(done.opcode)
            elif done.status == WcStatus.WR_FLUSH_ERR:
                self.peer_left = True
                self._failure = DriverError("the other end has disconnected")
            else:
                why = self.qp.ctx.provider.explain(self.qp.qpn, done.vendor_err)
                self._failure = DriverError(f"{self.qp}: {done.status.name}{f': {why}' if why else ''}")


def gid_index_of(ctx: Context, address: str | None, like: str | None = None) -> int:
    """Return the index of the port's GID with this IP address or, without one, of the same IP version as `like`.

    With neither, return that of the first IP address. Link-local addresses do not count. NotFoundError if there is
    none.
    """
    gids = [ctx.query_gid(1, index) for index in range(ctx.query_device().gid_table_size)]
    if address is not None:
        wanted = gid_of(address)
        if wanted in gids:
            return gids.index(wanted)
        raise NotFoundError(f"{ctx.name} does not have the address {address}: `gpunetio devices -v` lists its GIDs")
    for index, gid in enumerate(gids):
        if any(gid) and not gid.startswith(_LINK_LOCAL) and (like is None or _is_ipv4(gid) == _is_ipv4(gid_of(like))):
            return index
    raise NotFoundError(
        f"{ctx.name} has no address{'' if like is None else f' of the IP version of {like}'}: `gpunetio devices -v` "
        "lists its GIDs"
    )


_LINK_LOCAL = b"\xfe\x80"


def _is_ipv4(gid: bytes) -> bool:
    return gid.startswith(IPV4_MAPPED)
