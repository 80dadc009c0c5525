"""Events that the connection manager reports to a program."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from ..errors import DocaError


class EventType(Enum):
    """Kinds of `Event`, named as in librdmacm."""

    REQUEST       = auto()  # a peer requests a connection, or the address of a datagram service (CONNECT_REQUEST)
    RESPONSE      = auto()  # the peer has accepted, and waits for the queue pair here (CONNECT_RESPONSE)
    ESTABLISHED   = auto()  # both queue pairs are connected
    REJECTED      = auto()  # the peer has refused or given up
    UNREACHABLE   = auto()  # no answer, although the message was resent many times
    DISCONNECTED  = auto()  # the peer has disconnected; or this end has, and the peer has answered or never will
    TIMEWAIT_EXIT = auto()  # no packet of the connection can still be in flight


@dataclass(frozen=True)
class Event:
    """An event of a connection or request.

    `reason` belongs to REJECTED: a `RejectReason`, or a `SidrStatus` for datagrams. A peer may send a number that is
    neither. `private_data` is padded with zeros to the message's size. `why` is the error of UNREACHABLE if no message
    could be sent to the peer.
    """

    type: EventType
    private_data: bytes = field(default=b"", repr=False)
    reason: int = 0
    why: DocaError | None = field(default=None, repr=False)
