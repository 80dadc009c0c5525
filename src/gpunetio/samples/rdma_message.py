"""rdma_client, rdma_server: each end sends the other one message of 16 bytes, over a connection by address and port.

Both ends speak the protocol of rdma-core's `rdma_client` and `rdma_server`, so either of them can be that program: the
client connects and sends, the server answers, the client disconnects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from .. import cm
from ..enums import WcOpcode, WrOpcode
from ..errors import DriverError, TimedOutError
from ..providers import PortConfig
from ..verbs import SendWr
from ..verbs import open as open_device
from .cm_end import End, gid_index_of

PORT = 7471
_NBYTES = 16
_INBOX = 0
# A peer whose last packets were lost takes part in disconnecting only after it has given them up. Until then, the
# connection manager asks again, for a minute and a half.
_END_SECONDS = 100.0
_CLIENT_SECONDS = 30.0  # until the client disconnects: a lost packet takes 2 to 6 s


@dataclass(frozen=True, kw_only=True)
class MessageOptions:
    """`address` is the server's: to connect to or, at the server, to listen at; None means the NIC's first."""

    address: str | None = None
    port: int = PORT
    device: str | None = None
    nic_port: PortConfig | None = None
    say: Callable[[str], None] = print


def client(options: MessageOptions) -> None:
    """Connect, send a message, and wait for the answer."""
    address = options.address or "127.0.0.1"
    options.say("rdma_client: start")
    with ExitStack() as stack:
        ctx = stack.enter_context(open_device(options.device, port=options.nic_port))
        end = stack.enter_context(End(ctx.create_pd(), _NBYTES))
        end.receive(_INBOX, _NBYTES)
        gid_index = gid_index_of(ctx, None, address)
        connection = stack.enter_context(cm.connect(end.qp, address, options.port, gid_index=gid_index))
        _send(end)
        end.wait(WcOpcode.RECV)  # so the message has arrived as well
        connection.disconnect(timeout=_END_SECONDS)
    options.say("rdma_client: end 0")


def server(options: MessageOptions) -> None:
    """Wait for one client and its message, and answer it."""
    options.say("rdma_server: start")
    with ExitStack() as stack:
        ctx = stack.enter_context(open_device(options.device, port=options.nic_port))
        gid_index = gid_index_of(ctx, options.address)
        listener = stack.enter_context(cm.listen(ctx, options.port, gid_index=gid_index))
        end = stack.enter_context(End(ctx.create_pd(), _NBYTES))
        end.receive(_INBOX, _NBYTES)
        connection = stack.enter_context(listener.accept(timeout=math.inf).accept(end.qp))
        listener.close()  # refuses other clients from now on
        end.wait(WcOpcode.RECV)
        _send(end)
        # The client disconnects when it has everything it waits for. If this end disconnected first, its queue pair
        # could not acknowledge the client's message again if the acknowledgement was lost, and Soft-RoCE would send the
        # message for ever.
        with suppress(TimedOutError):
            connection.disconnected(_CLIENT_SECONDS)
        connection.disconnect(timeout=_END_SECONDS)
        try:
            end.wait(WcOpcode.SEND)
        except DriverError:
            if not end.peer_left:  # a client that leaves has the answer, even if its acknowledgement was lost
                raise
    options.say("rdma_server: end 0")


def _send(end: End) -> None:
    end.qp.post_send(SendWr(opcode=WrOpcode.SEND, inline=bytes(_NBYTES)))
