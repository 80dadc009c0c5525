"""A communication of the connection manager, its terms and its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from ..formats.packet import DEFAULT_PKEY, IPV4_MAPPED
from .event import Event
from .ip_service import IpHeader
from .path import Path
from .times import Times

_SHARE = 4  # a source with more than 1/4 of a full backlog must make room for another source


class State(Enum):
    """The state of a communication, with the specification's names (IBTA 12.9.5, 12.9.6)."""

    IDLE           = auto()  # over; only the program still refers to it
    REQ_SENT       = auto()
    REQ_RECEIVED   = auto()
    MRA_REQ_SENT   = auto()  # the peer repeated its REQ, and was told that the program needs more time
    MRA_REQ_RECEIVED = auto()
    REP_SENT       = auto()
    REP_RECEIVED   = auto()
    MRA_REP_RECEIVED = auto()
    ESTABLISHED    = auto()
    DREQ_SENT      = auto()
    TIMEWAIT       = auto()
    SIDR_REQ_SENT  = auto()
    SIDR_REQ_RECEIVED = auto()


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms that one end states for its queue pair, in a REQ or REP.

    `psn` is the number of the first packet that it expects; Linux reads the specification so that the other end starts
    with it. The end executes up to `responder_resources` READs and atomics of the peer at a time, and wants to have
    `initiator_depth` in flight itself. It asks the peer to retry `rnr_retry` times when it is not ready and, in a REQ,
    `retry_count` times when it does not answer. Only a REQ has `mtu`, in bytes.
    """

    qpn: int
    psn: int
    responder_resources: int = 1
    initiator_depth: int = 1
    rnr_retry: int = 7
    retry_count: int = 7
    mtu: int = 1024
    srq: bool = False
    flow_control: bool = False
    p_key: int = DEFAULT_PKEY


@dataclass(frozen=True)
class Service:
    """The queue pair to which datagrams go, as a SIDR_REP gives it."""

    qpn: int
    q_key: int


# Called with each event of a communication that its program must know.
Notify: TypeAlias = "Callable[[Communication, Event], None]"


@dataclass(eq=False)
class Communication:
    """A connection, or a request for a datagram service.

    Its messages go to `path`. `local_id` is this end's ID, `remote_id` the peer's, which is unique together with
    `remote_guid`. `own` and `peer` are the terms of both ends, as far as known. The queue pair's packets go to
    `data_path`, and `ack_timeout` is their encoded timeout. `notify` reports events to the program.
    """

    local_id: int
    state: State
    path: Path
    times: Times
    notify: Notify
    transaction_id: int
    remote_id: int = 0
    remote_guid: int = 0
    own: Terms | None = None
    peer: Terms | None = None
    address: IpHeader | None = None
    data_path: Path | None = None
    ack_timeout: int = 0
    psn: int | None = None  # of the first packet that this end expects, unless it is that of `own`
    service_id: int = 0
    service: Service | None = None
    listener: Listening | None = None
    mad: bytes = b""  # the last message that may have to be sent again
    attempts: int = 0  # how often it may still be resent
    timeout: float = 0  # seconds before each resend

    def __str__(self) -> str:
        return f"communication {self.local_id:#010x} ({self.state.name})"


class Waiting:
    """A listener's requests that were neither accepted nor rejected yet, at most `backlog`."""

    def __init__(self, backlog: int):
        self._backlog, self._count = backlog, 0
        self._of: dict[bytes, dict[Communication, None]] = {}  # by GID, each oldest first

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Communication]:
        return iter([communication for those in self._of.values() for communication in those])

    def add(self, communication: Communication) -> None:
        """Add a request."""
        self._of.setdefault(communication.path.gid, {})[communication] = None
        self._count += 1

    def discard(self, communication: Communication) -> None:
        """Remove a request, if present."""
        those = self._of.get(communication.path.gid, {})
        if communication in those:
            del those[communication]
            self._count -= 1
            if not those:
                del self._of[communication.path.gid]

    @property
    def full(self) -> bool:
        """Return whether the backlog is full."""
        return self._count >= self._backlog

    def giving_way(self, gid: bytes) -> Communication | None:
        """Return the request that must give way, in a full backlog, to one from `gid`, or None.

        It is the newest request of the source with the most requests. It gives way only to a source that has none, so
        that no source can keep others out.
        """
        if gid in self._of:
            return None
        most = max(self._of.values(), key=len)
        return next(reversed(most)) if len(most) > max(1, self._backlog // _SHARE) else None


@dataclass(eq=False)
class Listening:
    """A listener for one service ID, at the address `gid`, or at any address of this port if that is None.

    Without a `gid`, `ipv4` restricts it to IPv4 addresses (True) or IPv6 addresses (False). `notify` reports requests
    to the program. `waiting` holds those neither accepted nor rejected yet, at most `backlog`.
    """

    service_id: int
    gid: bytes | None
    backlog: int
    times: Times
    notify: Notify
    ipv4: bool | None = None
    waiting: Waiting = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = Waiting(self.backlog)

    def takes(self, gid: bytes) -> bool:
        """Return whether the listener accepts requests for an address."""
        return gid == self.gid if self.gid is not None else self.ipv4 in (None, gid.startswith(IPV4_MAPPED))

    def overlaps(self, other: Listening) -> bool:
        """Return whether some request would match both listeners."""
        if other.gid is not None:
            return self.takes(other.gid)
        return other.takes(self.gid) if self.gid is not None else len({self.ipv4, other.ipv4} - {None}) < 2
