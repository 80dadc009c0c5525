"""Queue pair 1 of a port, which sends and receives management datagrams (IBTA 13.5)."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..enums import Access, QpType, WcOpcode, WcStatus, WrOpcode
from ..errors import DocaError, DriverError, InUseError, NotFoundError
from ..formats.cm import MAD_BYTES
from ..formats.packet import GRH, GSI_Q_KEY, GSI_QPN
from ..memory import HostMemory, round_up
from ..verbs.ah import AddressHandle, sender_of
from ..verbs.ah_attr import AhAttr
from ..verbs.work import Completion, RecvWr, SendWr, Sge
from .path import Path

if TYPE_CHECKING:
    from ..verbs.context import Context

logger: logging.Logger = logging.getLogger("gpunetio.cm")

_RECEIVES = 1024  # datagrams that may come between two looks: a peer sends others again after seconds only
_SENDS = 2048
_AT_ONCE = 64  # completions of one look
_STRIDE = round_up(GRH.size + MAD_BYTES, 64)
_PATHS = 32  # address handles that are kept: a NIC has not many
_FRESH = 1.0  # seconds that one is used


class GeneralServices:
    """Queue pair 1 of a port. `undo` closes it.

    Datagrams may get lost, here as on the wire: if the send queue is full, or if the destination does not answer.
    """

    def __init__(self, ctx: Context, port: int, undo: ExitStack):
        self._ctx, self._port = ctx, port
        self._pd = ctx.create_pd()
        undo.callback(self._pd.close_with_owner)
        self._channel = ctx.create_comp_channel()
        undo.callback(self._channel.close_with_owner)
        self._cq = ctx.create_cq(_RECEIVES + _SENDS, channel=self._channel)
        undo.callback(self._cq.close_with_owner)
        self._memory = HostMemory(_RECEIVES * _STRIDE)
        undo.callback(self._memory.close)
        self._region = self._pd.register(self._memory.array, Access.LOCAL_WRITE)
        undo.callback(self._region.close_with_owner)
        try:
            self._qp = self._pd.create_qp(
                qp_type=QpType.GSI, sq_wr=_SENDS, rq_wr=_RECEIVES, send_cq=self._cq, receive_cq=self._cq,
                max_inline_data=MAD_BYTES,
            )  # fmt: skip
        except DriverError as error:
            raise InUseError(
                f"{ctx.name} gives out its queue pair 1 once, and a connection manager or another program has it: use "
                f"the context of that ({error})"
            ) from error
        undo.callback(self._qp.close_with_owner)
        self._handles: OrderedDict[Path, tuple[float, AddressHandle]] = OrderedDict()  # until when; the newest is last
        self._left: set[AddressHandle] = set()
        self._in_flight: dict[int, AddressHandle] = {}  # by wr_id
        self._next = 0
        self._qp.to_init(port=port)
        self._qp.post_recv(*(self._receive(slot) for slot in range(_RECEIVES)))
        self._qp.to_rts()
        self._cq.req_notify()

    def fileno(self) -> int:
        """Return the descriptor that is readable when `take` has work."""
        return self._channel.fileno()

    def reach(self, path: Path) -> AddressHandle:
        """Return the address handle of a path. NotFoundError if its address does not answer, which may take a while.

        A handle leads to the program that had the address when it was made, and so is made again now and then.
        """
        now = time.monotonic()
        found = self._handles.get(path)
        if found is not None and now < found[0]:
            return found[1]
        handle = self._pd.create_ah(
            AhAttr(
                gid=path.gid, sgid_index=path.sgid_index, hop_limit=path.hop_limit, traffic_class=path.traffic_class,
                sl=path.sl,
            ),
            port=self._port,
        )  # fmt: skip
        if found is not None:
            self._left.add(found[1])
        self._handles[path] = now + _FRESH, handle
        self._handles.move_to_end(path)
        if len(self._handles) > _PATHS:
            _, (_, oldest) = self._handles.popitem(last=False)
            self._left.add(oldest)
        self._close_left()
        return handle

    def _close_left(self) -> None:
        """Close address handles that were replaced, unless a datagram still needs them."""
        for handle in self._left.difference(self._in_flight.values()):
            self._left.remove(handle)
            handle.close()

    def send(self, path: Path, mad: bytes) -> None:
        """Send a datagram of 256 bytes to queue pair 1 at the end of a path."""
        try:
            handle = self.reach(path)
            self._next += 1
            self._qp.post_send(
                SendWr(
                    opcode=WrOpcode.SEND, inline=mad, wr_id=self._next, ah=handle, remote_qpn=GSI_QPN,
                    remote_qkey=GSI_Q_KEY,
                )
            )  # fmt: skip
        except DocaError as error:
            self._qp.check_open()
            logger.info("%s: a datagram to %s is lost: %s", self._qp, path.gid.hex(":", 2), error)
        else:
            self._in_flight[self._next] = handle

    def take(self) -> Iterator[tuple[Path, bytes]]:
        """Take what has arrived since the last call: who has sent each datagram, and its 256 bytes.

        DriverError if the queue pair has failed.
        """
        while (cq := self._channel.get_event(0)) is not None:
            cq.ack_events()
        self._cq.req_notify()
        while found := self._cq.poll(_AT_ONCE):
            again: list[RecvWr] = []
            for done in found:
                if done.status != WcStatus.SUCCESS:
                    why = self._ctx.provider.explain(self._qp.qpn, done.vendor_err)
                    raise DriverError(f"{self._qp} failed with {WcStatus(done.status).name}: {why}")
                if done.opcode != WcOpcode.RECV:
                    del self._in_flight[done.wr_id]
                    continue
                again.append(self._receive(done.wr_id))
                if (datagram := self._read(done)) is not None:
                    yield datagram
            if again:
                self._qp.post_recv(*again)
            self._close_left()

    def _read(self, done: Completion) -> tuple[Path, bytes] | None:
        """Return the sender and the bytes of a received datagram; None if it is none of ours."""
        start = done.wr_id * _STRIDE
        data = self._memory.array[start : start + done.byte_len].tobytes()
        if done.src_qp != GSI_QPN or len(data) != GRH.size + MAD_BYTES:
            return None
        try:
            sender = sender_of(self._ctx, self._port, done, data[: GRH.size])
        except NotFoundError:
            return None  # to an address that the port has no more
        return Path(gid=bytes(sender.gid), sgid_index=sender.sgid_index), data[GRH.size :]

    def _receive(self, slot: int) -> RecvWr:
        """Return the receive of a slot of the memory, which takes one datagram."""
        place = Sge(self._memory.address + slot * _STRIDE, GRH.size + MAD_BYTES, self._region.lkey)
        return RecvWr(sges=(place,), wr_id=slot)
