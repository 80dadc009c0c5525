"""What the connection manager tells a program."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from ..errors import DocaError


class EventType(Enum):
    """Kinds of `Event`; those of librdmacm have the same names."""

    REQUEST       = auto()  # a peer asks for a connection, or where a service of datagrams is (CONNECT_REQUEST)
    RESPONSE      = auto()  # the peer has accepted, and waits for the queue pair here (CONNECT_RESPONSE)
    ESTABLISHED   = auto()  # both queue pairs are connected
    REJECTED      = auto()  # the peer has refused, or given up
    UNREACHABLE   = auto()  # no answer, although the message was sent many times
    DISCONNECTED  = auto()  # the peer has disconnected, or we have, and it has answered or never will
    TIMEWAIT_EXIT = auto()  # no packet of the connection can be under way any more


@dataclass(frozen=True)
class Event:
    """One event of a connection or request.

    `reason` is that of REJECTED: a `RejectReason`, or a `SidrStatus` for datagrams. A peer may give numbers that
    neither has. `private_data` is padded with zeros to what the message has room for. `why` is the error of UNREACHABLE
    if no message has left for the peer.
    """

    type: EventType
    private_data: bytes = field(default=b"", repr=False)
    reason: int = 0
    why: DocaError | None = field(default=None, repr=False)
