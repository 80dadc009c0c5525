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

_RECEIVES = 1024  # datagrams that can arrive between two polls; a peer resends a lost one only after seconds
_SENDS = 2048
_AT_ONCE = 64  # completions per poll
_STRIDE = round_up(GRH.size + MAD_BYTES, 64)
_SENDERS = 1024  # senders whose paths are cached


class GeneralServices:
    """Queue pair 1 of a port. `undo` closes it.

    Only one thread takes datagrams. All other calls need the agent's lock. `reaped` counts datagrams that were sent.
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
            )
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
        """Restart the queue pair after it has failed, or raise an error. Messages in flight are lost."""
        self._qp.reset()
        for _ in range(_RECEIVES // _AT_ONCE):  # discard the flushed receives, which `poll` skips
            self._arrived.poll(_AT_ONCE)
        self._in_flight.clear()
        self._start()

    def fileno(self) -> int:
        """Return the descriptor that is readable when `take` has work."""
        return self._channel.fileno()

    # --- paths -------------------------------------------------------------------------------------------------------

    def seek(self, path: Path) -> bool:
        """Return whether the neighbour is known, so that `handle` will not block. If not, start asking for it."""
        return self._ctx.provider.seek_mac(self._port, path.gid)

    def handle(self, path: Path) -> AddressHandle:
        """Create an address handle for a path. This may take a while, so call it without a lock."""
        return self._pd.create_ah(ah_of(path), port=self._port)

    def in_flight(self) -> set[AddressHandle]:
        """Return the address handles that are used by datagrams in flight."""
        return set(self._in_flight.values())

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, handle: AddressHandle, mad: bytes) -> None:
        """Send a 256-byte datagram to queue pair 1 at the end of a path. If the send queue is full, it is lost."""
        self._next += 1
        try:
            self._qp.post_send(
                SendWr(
                    opcode=WrOpcode.SEND, inline=mad, wr_id=self._next, ah=handle, remote_qpn=GSI_QPN,
                    remote_qkey=GSI_Q_KEY,
                )
            )
        except DocaError as error:
            logger.info("%s: a datagram is lost: %s", self._qp, error)
        else:
            self._in_flight[self._next] = handle

    def reap(self) -> None:
        """Process the completions of sent datagrams."""
        while done := self._sent.poll(_AT_ONCE):
            for sent in done:
                self._in_flight.pop(sent.wr_id, None)
                self.reaped += 1

    # --- receiving ---------------------------------------------------------------------------------------------------

    def take(self) -> list[tuple[Path, bytes]]:
        """Take datagrams, at most as many as there are receives. Return the sender's path and the 256 bytes of each.

        Datagrams that are not messages of the connection manager are skipped. DriverError if the queue pair has failed.
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
        """Return the sender and the bytes of a received datagram, or None if it is not a CM message from a QP 1."""
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
            return None  # sent to an address that the port no longer has
        return Path(gid=bytes(sender.gid), sgid_index=sender.sgid_index)

    def _receive(self, slot: int) -> RecvWr:
        """Return the receive for one datagram into a slot of the memory."""
        place = Sge(self._memory.address + slot * _STRIDE, GRH.size + MAD_BYTES, self._region.lkey)
        return RecvWr(sges=(place,), wr_id=slot)
