"""DOCA Flow: rules that direct a port's packets to queues.

    with verbs.open() as ctx, FlowPort(ctx) as port:
        rule = port.steer(match.udp(dst=53), to=rxq)

A `match` selects a rule's packets. A rule leads to a queue, to several (`Rss`), to a pipe, or to `DROP` or `KERNEL`.
"""

from . import match
from .counters import FlowCount
from .match import TcpFlag
from .matching import Match
from .pipe import FlowPipe, FlowRule, PipeType
from .port import FlowPort
from .targets import DROP, KERNEL, Hash, ReceiveQueue, Rss, Verdict
from .values import PER_ENTRY

__all__ = [
    "DROP",
    "KERNEL",
    "PER_ENTRY",
    "FlowCount",
    "FlowPipe",
    "FlowPort",
    "FlowRule",
    "Hash",
    "Match",
    "PipeType",
    "ReceiveQueue",
    "Rss",
    "TcpFlag",
    "Verdict",
    "match",
]
