"""Queue pair 1 of a port, which sends and receives management datagrams (IBTA 13.5)."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..enums import Access, QpType, WcOpcode, WcStatus, WrOpcode
from ..errors import DocaError, DriverError, InUseError, NotFoundError
from ..formats.cm import MAD_BYTES
from ..formats.packet import GRH, GSI_Q_KEY, GSI_QPN
from ..memory import HostMemory, round_up
from ..verbs.ah import AddressHandle, sender_of
from ..verbs.work import Completion, RecvWr, SendWr, Sge
from .messages import is_message
from .path import Path
from .queue_pair import ah_of

if TYPE_CHECKING:
    from ..verbs.context import Context

logger: logging.Logger = logging.getLogger("gpunetio.cm")

_RECEIVES = 1024  # datagrams that may come between two looks: a peer sends others again after seconds only
_SENDS = 2048
_AT_ONCE = 64  # completions of one look
_STRIDE = round_up(GRH.size + MAD_BYTES, 64)
_SENDERS = 1024  # whose paths are remembered


class GeneralServices:
    """Queue pair 1 of a port. `undo` closes it.

    One thread takes datagrams. Whoever else calls has the agent's lock. `reaped` counts the datagrams that have left.
    """

    reaped: int

    def __init__(self, ctx: Context, port: int, undo: ExitStack):
        self._ctx, self._port = ctx, port
        self._pd = ctx.create_pd()
        undo.callback(self._pd.close_with_owner)
        self._channel = ctx.create_comp_channel()
        undo.callback(self._channel.close_with_owner)
        self._arrived = ctx.create_cq(_RECEIVES, channel=self._channel)
        undo.callback(self._arrived.close_with_owner)
        self._sent = ctx.create_cq(_SENDS, channel=self._channel)
        undo.callback(self._sent.close_with_owner)
        self._memory = HostMemory(_RECEIVES * _STRIDE)
        undo.callback(self._memory.close)
        self._region = self._pd.register(self._memory.array, Access.LOCAL_WRITE)
        undo.callback(self._region.close_with_owner)
        try:
            self._qp = self._pd.create_qp(
                qp_type=QpType.GSI, sq_wr=_SENDS, rq_wr=_RECEIVES, send_cq=self._sent, receive_cq=self._arrived,
                max_inline_data=MAD_BYTES,
            )  # fmt: skip
        except DriverError as error:
            raise InUseError(
                f"{ctx.name} gives out its queue pair 1 once, and a connection manager or another program has it: use "
                f"the context of that ({error})"
            ) from error
        undo.callback(self._qp.close_with_owner)
        self._in_flight: dict[int, AddressHandle] = {}  # by wr_id
        self._next = self.reaped = 0
        self._receives = [self._receive(slot) for slot in range(_RECEIVES)]
        self._senders: dict[bytes, Path | None] = {}  # by GRH
        self._start()

    def _start(self) -> None:
        self._qp.to_init(port=self._port)
        self._qp.post_recv(*self._receives)
        self._qp.to_rts()
        self._arrived.req_notify()
        self._sent.req_notify()

    def restart(self) -> None:
        """Bring the queue pair back after it has failed. What was under way is lost. An error if it cannot be."""
        self._qp.reset()
        for _ in range(_RECEIVES // _AT_ONCE):  # flushed receives, which `poll` passes over
            self._arrived.poll(_AT_ONCE)
        self._in_flight.clear()
        self._start()

    def fileno(self) -> int:
        """Return the descriptor that is readable when `take` has work."""
        return self._channel.fileno()

    # --- ways --------------------------------------------------------------------------------------------------------

    def seek(self, path: Path) -> bool:
        """Return whether `handle` would not wait for the neighbour, and have the neighbour asked if it would."""
        return self._ctx.provider.seek_mac(self._port, path.gid)

    def handle(self, path: Path) -> AddressHandle:
        """Return an address handle for a path. It may take a while: nobody holds a lock."""
        return self._pd.create_ah(ah_of(path), port=self._port)

    def in_flight(self) -> set[AddressHandle]:
        """Return the address handles that datagrams still need."""
        return set(self._in_flight.values())

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, handle: AddressHandle, mad: bytes) -> None:
        """Send a datagram of 256 bytes to queue pair 1 at the end of a path. It is lost if the send queue is full."""
        self._next += 1
        try:
            self._qp.post_send(
                SendWr(
                    opcode=WrOpcode.SEND, inline=mad, wr_id=self._next, ah=handle, remote_qpn=GSI_QPN,
                    remote_qkey=GSI_Q_KEY,
                )
            )  # fmt: skip
        except DocaError as error:
            logger.info("%s: a datagram is lost: %s", self._qp, error)
        else:
            self._in_flight[self._next] = handle

    def reap(self) -> None:
        """Note which datagrams have left."""
        while done := self._sent.poll(_AT_ONCE):
            for sent in done:
                self._in_flight.pop(sent.wr_id, None)
                self.reaped += 1

    # --- receiving ---------------------------------------------------------------------------------------------------

    def take(self) -> list[tuple[Path, bytes]]:
        """Take at most as many datagrams as there are receives: who has sent each one, and its 256 bytes.

        What is no message of the connection manager is left out. DriverError if the queue pair has failed.
        """
        while (cq := self._channel.get_event(0)) is not None:
            cq.ack_events()
        self._arrived.req_notify()
        self._sent.req_notify()
        taken: list[tuple[Path, bytes]] = []
        for _ in range(_RECEIVES // _AT_ONCE):
            found = self._arrived.poll(_AT_ONCE)
            if not found:
                break
            for done in found:
                if done.status != WcStatus.SUCCESS:
                    why = self._ctx.provider.explain(self._qp.qpn, done.vendor_err)
                    raise DriverError(f"{self._qp} failed with {WcStatus(done.status).name}: {why}")
                if done.opcode == WcOpcode.RECV and (datagram := self._read(done)) is not None:
                    taken.append(datagram)
            self._qp.post_recv(*(self._receives[done.wr_id] for done in found))
        return taken

    def _read(self, done: Completion) -> tuple[Path, bytes] | None:
        """Return the sender and the bytes of a received datagram; None if it is none of ours."""
        if done.src_qp != GSI_QPN or done.byte_len != GRH.size + MAD_BYTES:
            return None
        start = done.wr_id * _STRIDE
        data = self._memory.array[start : start + GRH.size + MAD_BYTES].tobytes()
        header, mad = data[: GRH.size], data[GRH.size :]
        if not is_message(mad):
            return None
        if header not in self._senders:
            if len(self._senders) >= _SENDERS:
                self._senders.clear()
            self._senders[header] = self._sender(done, header)
        path = self._senders[header]
        return (path, mad) if path is not None else None

    def _sender(self, done: Completion, header: bytes) -> Path | None:
        try:
            sender = sender_of(self._ctx, self._port, done, header)
        except NotFoundError:
            return None  # to an address that the port has no more
        return Path(gid=bytes(sender.gid), sgid_index=sender.sgid_index)

    def _receive(self, slot: int) -> RecvWr:
        """Return the receive of a slot of the memory, which takes one datagram."""
        place = Sge(self._memory.address + slot * _STRIDE, GRH.size + MAD_BYTES, self._region.lkey)
        return RecvWr(sges=(place,), wr_id=slot)
