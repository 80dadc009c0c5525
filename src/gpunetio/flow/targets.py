"""The destinations of rules: a queue, several queues, a pipe, the kernel, or nowhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum, IntFlag
from typing import Final, Protocol, TypeAlias, runtime_checkable

from ..arguments import flags, instance, octets, truth
from ..errors import InvalidValueError
from ..formats.commands import Opcode
from ..formats.ethernet_queues import DispType, HashField, L3Prot, L4Prot, RxHashFn, rq_list
from ..formats.flow import DestinationType
from ..formats.packet import IP_PROTOCOL_TCP, IP_PROTOCOL_UDP
from ..verbs import Context, DevxObject, Handle
from ..verbs.devx.tir import create_tir
from . import match
from .entry import Forward, set_entry
from .matching import Match
from .table import FlowTable

KEY_BYTES = 40  # tirc.rx_hash_toeplitz_key
# The key from Microsoft's "Verifying the RSS Hash Calculation", which many drivers use.
DEFAULT_KEY = bytes.fromhex(
    "6d5a56da255b0ec24167253d43a38fb0d0ca2bcbae7b30b477cb2da38030f20c6a42b73bbeac01fa"
)
_MOST_QUEUES = 2048  # of an RQT
_EVENLY = 16  # RQT places per queue if the number of queues is no power of two
_LOG_SPREAD = 3  # the table has an entry for each kind of packet, and one for all others


class Verdict(Enum):
    """What happens to a packet that goes to no queue: `DROP` or `KERNEL`."""

    DROP   = "drop"
    KERNEL = "kernel"

    def __repr__(self) -> str:
        return self.name


DROP: Final = Verdict.DROP
KERNEL: Final = Verdict.KERNEL  # as if there were no rules: to RoCE and the machine's kernel


@runtime_checkable
class ReceiveQueue(Protocol):
    """A queue that rules can lead to, such as `eth.EthRxq`: a `Handle` with the number of an RQ."""

    rqn: int


class Hash(IntFlag):
    """The kinds of packets that RSS spreads (the flags of `doca_flow_fwd.rss.outer_flags`).

    All other packets go to the first queue. For kinds with a transport, addresses and ports are hashed; for the others,
    only addresses.
    """

    IPV4     = 1 << 0
    IPV6     = 1 << 1
    IPV4_TCP = 1 << 2
    IPV4_UDP = 1 << 3
    IPV6_TCP = 1 << 4
    IPV6_UDP = 1 << 5


_KINDS: tuple[tuple[Hash, Match, L3Prot, L4Prot | None], ...] = (
    (Hash.IPV4_TCP, match.ipv4(protocol=IP_PROTOCOL_TCP) & match.whole(), L3Prot.IPV4, L4Prot.TCP),
    (Hash.IPV4_UDP, match.ipv4(protocol=IP_PROTOCOL_UDP) & match.whole(), L3Prot.IPV4, L4Prot.UDP),
    (Hash.IPV6_TCP, match.ipv6(protocol=IP_PROTOCOL_TCP) & match.whole(), L3Prot.IPV6, L4Prot.TCP),
    (Hash.IPV6_UDP, match.ipv6(protocol=IP_PROTOCOL_UDP) & match.whole(), L3Prot.IPV6, L4Prot.UDP),
    (Hash.IPV4,     match.ipv4(),                                         L3Prot.IPV4, None),
    (Hash.IPV6,     match.ipv6(),                                         L3Prot.IPV6, None),
)
_ALL = Hash(sum(Hash))
_ADDRESSES = HashField.SRC_IP | HashField.DST_IP
_PORTS = HashField.L4_SPORT | HashField.L4_DPORT


class Rss:
    """Several queues over which packets are spread by the Toeplitz hash (`doca_flow_fwd` of type RSS).

    A list of queues is the same with the defaults. With `symmetric`, both directions of a connection have the same
    hash. InvalidValueError without queues, with a queue given twice, or unless the key has 40 bytes, not all 0.
    """

    queues: tuple[ReceiveQueue | DevxObject, ...]
    on: Hash
    symmetric: bool
    key: bytes

    def __init__(
        self, queues: Iterable[ReceiveQueue | DevxObject], *, on: Hash = _ALL, symmetric: bool = False,
        key: bytes = DEFAULT_KEY,
    ):
        self.queues = tuple(instance("queues", queues, Iterable))
        self.on, self.symmetric = flags("on", on, Hash), truth("symmetric", symmetric)
        self.key = octets("key", key)
        if not 0 < len(self.queues) <= _MOST_QUEUES:
            raise InvalidValueError(f"Rss of {len(self.queues)} queues: it takes 1 to {_MOST_QUEUES}")
        if len(self.key) != KEY_BYTES or not any(self.key):
            raise InvalidValueError(f"key of {len(self.key)} bytes: the Toeplitz key has {KEY_BYTES}, not all 0")
        numbers = [rqn_of(queue) for queue in self.queues]
        if len(set(numbers)) < len(numbers):
            raise InvalidValueError(f"Rss names a queue twice: {', '.join(map(str, self.queues))}")

    def __str__(self) -> str:
        return f"Rss({', '.join(map(str, self.queues))})"


class Stage(Handle, ABC):
    """A pipe, as the rules that lead to it use it."""

    port: Handle

    @property
    @abstractmethod
    def number(self) -> int:
        """Return the table_id of the table where packets enter the pipe."""


To: TypeAlias = ReceiveQueue | DevxObject | Sequence[ReceiveQueue | DevxObject] | Rss | Stage | Verdict


@dataclass(frozen=True)
class Target:
    """A rule's destination: what its entry contains, the objects that it uses, and what releases it.

    `forward` is None for DROP.
    """

    text: str
    forward: Forward | None
    uses: tuple[Handle, ...] = ()
    release: Callable[[], None] = lambda: None

    @property
    def decision(self) -> Hashable:
        return self.forward


def rqn_of(queue: object) -> int:
    """Return the number of a queue's RQ. InvalidValueError if the object is not a queue."""
    if isinstance(queue, DevxObject):
        queue.check_open()
        if queue.name == Opcode.CREATE_RQ.name:
            return queue.number
    elif isinstance(queue, Handle) and isinstance(queue, ReceiveQueue):
        queue.check_open()
        return queue.rqn
    raise InvalidValueError(
        f"to = {queue!r}: a rule leads to a receive queue, a list of queues, an Rss, a FlowPipe, DROP or KERNEL"
    )


@dataclass
class _Spread:
    """The path to one or several queues, shared by all rules that lead there: TIRs, and a table that chooses one."""

    forward: Forward
    undo: ExitStack
    users: int = 0


class Spreads:
    """The paths from rules to queues. A path closes when no rule uses it any more."""

    def __init__(self, ctx: Context, level: int):
        self._ctx, self._level = ctx, level
        self._made: dict[Hashable, _Spread] = {}

    def to(self, rss: Rss) -> Target:
        """Return the target for one or several queues."""
        numbers = tuple(map(rqn_of, rss.queues))
        one = len(numbers) == 1
        key = numbers if one else (numbers, rss.on, rss.symmetric, rss.key)
        spread = self._made.get(key)
        if spread is None:
            with ExitStack() as undo:
                forward = self._direct(numbers[0], undo) if one else self._spread(rss, numbers, undo)
                spread = self._made[key] = _Spread(forward, undo.pop_all())
        spread.users += 1
        text = str(rss.queues[0]) if one else str(rss)
        uses = tuple(queue for queue in rss.queues if isinstance(queue, Handle))
        return Target(text, spread.forward, uses, lambda: self._release(key))

    def _release(self, key: Hashable) -> None:
        spread = self._made[key]
        spread.users -= 1
        if not spread.users:
            del self._made[key]
            spread.undo.close()

    def _direct(self, rqn: int, undo: ExitStack) -> Forward:
        return self._tir(undo, inline_rqn=rqn)

    def _tir(self, undo: ExitStack, **context: object) -> Forward:
        made = create_tir(self._ctx, (), **context)
        undo.callback(made.close)
        return Forward(DestinationType.TIR, made.number)

    def _spread(self, rss: Rss, numbers: Sequence[int], undo: ExitStack) -> Forward:
        count = len(numbers)
        power = 1 << (count - 1).bit_length()
        places = power if power == count else min(_MOST_QUEUES, power * _EVENLY)
        rqt = self._ctx.devx.create(
            Opcode.CREATE_RQT, ctx={"rqt_max_size": places, "rqt_actual_size": places},
            rq_num=rq_list(numbers[i % count] for i in range(places)),
        )
        undo.callback(rqt.close)
        ways = [
            (matched, self._hashed(rss, rqt, l3, l4, undo)) for kind, matched, l3, l4 in _KINDS if rss.on & kind
        ]
        ways.append((match.everything(), self._direct(numbers[0], undo)))
        return self._table(ways, undo)

    def _hashed(self, rss: Rss, rqt: DevxObject, l3: L3Prot, l4: L4Prot | None, undo: ExitStack) -> Forward:
        return self._tir(
            undo, disp_type=DispType.INDIRECT, indirect_table=rqt.number, rx_hash_fn=RxHashFn.TOEPLITZ,
            rx_hash_toeplitz_key=rss.key, rx_hash_symmetric=int(rss.symmetric),
            rx_hash_field_selector_outer={
                "l3_prot_type": l3, "l4_prot_type": l4 or 0,
                "selected_fields": _ADDRESSES if l4 is None else _ADDRESSES | _PORTS,
            },
        )

    def _table(self, ways: Sequence[tuple[Match, Forward]], undo: ExitStack) -> Forward:
        """Create a table that separates kinds of packets. The lowest index decides, so kinds with ports come first."""
        table = FlowTable(self._ctx, "the table of an Rss", self._level, _LOG_SPREAD, undo, first_range=1)
        for matched, forward in ways:
            made = set_entry(self._ctx, table.number, table.reserve(matched), matched, forward)
            undo.callback(made.close)
        return Forward(DestinationType.FLOW_TABLE, table.number)
