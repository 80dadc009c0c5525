"""One communication of the connection manager: what is known of it here."""

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

_SHARE = 4  # a source that has more than this part of a full backlog makes room for another source


class State(Enum):
    """Where a communication is (IBTA 12.9.5, 12.9.6), with the specification's names."""

    IDLE           = auto()  # over, and known to the program only
    REQ_SENT       = auto()
    REQ_RECEIVED   = auto()
    MRA_REQ_SENT   = auto()  # the peer asked again, and was told that the program takes its time
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
    """What one end says of its queue pair, in a REQ or REP.

    `psn` is the number of the first packet that it expects: with that the other end begins, as Linux reads the
    specification. It executes `responder_resources` READs and atomics of the peer at a time, and wants to have
    `initiator_depth` in flight itself. It asks the peer to repeat `rnr_retry` times when it is not ready and, in a REQ,
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
    """Where datagrams go: what a SIDR_REP says."""

    qpn: int
    q_key: int


# Takes what a program must know of a communication.
Notify: TypeAlias = "Callable[[Communication, Event], None]"


@dataclass(eq=False)
class Communication:
    """One connection, or one request of datagrams.

    `path` is where its messages go. `local_id` is this end's name of it, `remote_id` the peer's; the peer's names are
    unique with `remote_guid`. `own` and `peer` are the terms of both ends, as far as they are known, `data_path` is
    where the queue pair's packets go, and `ack_timeout` its encoded timeout. `notify` tells the program of events.
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
    psn: int | None = None  # of the first packet that this end expects, if that is not for `own` to say
    service_id: int = 0
    service: Service | None = None
    listener: Listening | None = None
    mad: bytes = b""  # the last message that may have to be sent again
    attempts: int = 0  # how often that may still happen
    timeout: float = 0  # seconds between two of them

    def __str__(self) -> str:
        return f"communication {self.local_id:#010x} ({self.state.name})"


class Waiting:
    """The requests of a listener that it has neither accepted nor rejected, at most `backlog`."""

    def __init__(self, backlog: int):
        self._backlog, self._count = backlog, 0
        self._of: dict[bytes, dict[Communication, None]] = {}  # by GID, each in order

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Communication]:
        return iter([communication for those in self._of.values() for communication in those])

    def add(self, communication: Communication) -> None:
        """Add a request."""
        self._of.setdefault(communication.path.gid, {})[communication] = None
        self._count += 1

    def discard(self, communication: Communication) -> None:
        """Take out a request, if it is there."""
        those = self._of.get(communication.path.gid, {})
        if communication in those:
            del those[communication]
            self._count -= 1
            if not those:
                del self._of[communication.path.gid]

    @property
    def full(self) -> bool:
        """Return whether there is no room for another request."""
        return self._count >= self._backlog

    def giving_way(self, gid: bytes) -> Communication | None:
        """Return the request that makes room, in a full backlog, for one from `gid`; None if none does.

        It is the newest of the source with most, and only for a source that has none: so no source keeps others out.
        """
        if gid in self._of:
            return None
        most = max(self._of.values(), key=len)
        return next(reversed(most)) if len(most) > max(1, self._backlog // _SHARE) else None


@dataclass(eq=False)
class Listening:
    """A listener, which takes requests for one service ID: at the address `gid` or, without one, at any of this port.

    `ipv4`: without an address, at those of IPv4 only, or (False) at those of IPv6 only. `notify` tells the program of
    requests. `waiting` are those that it has neither accepted nor rejected, at most `backlog`.
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
        """Return whether it takes requests for an address."""
        return gid == self.gid if self.gid is not None else self.ipv4 in (None, gid.startswith(IPV4_MAPPED))

    def overlaps(self, other: Listening) -> bool:
        """Return whether both take the same requests."""
        if other.gid is not None:
            return self.takes(other.gid)
        return other.takes(self.gid) if self.gid is not None else len({self.ipv4, other.ipv4} - {None}) < 2
