"""A program's parameters for a connection."""

from __future__ import annotations

from dataclasses import dataclass

from ..enums import Access
from ..verbs.context import Context
from ..verbs.qp import QP
from .communication import Terms


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """A program's parameters for a connection (`rdma_conn_param`), and for its queue pair.

    `responder_resources`  the peer's READs and atomics that are executed here at a time; 0 refuses them. Limited by the
                           device, which is the default, and by what the peer wants
    `initiator_depth`      READs and atomics in flight from here at a time, with the same limits
    `retry_count`          how often both ends retry what is not acknowledged, 0 to 7; the active side decides
    `rnr_retry`            how often the peer retries what found no receive here; 7 means forever
    `flow_control`         what the peer is told about end-to-end flow control
    `ack_timeout`          how long this end waits for an acknowledgement: 4.096 µs x 2^n. By default it follows from
                           `Times`, as in Linux, which makes it 2 s
    `min_rnr_timer`        how long the peer waits after it found no receive here, as in `QpAttr`
    `remote_access`        the peer's rights here. By default WRITEs and, with `responder_resources`, READs and
                           atomics. A queue pair already in INIT keeps its rights
    """

    responder_resources: int | None = None
    initiator_depth: int | None = None
    retry_count: int = 7
    rnr_retry: int = 7
    flow_control: bool = False
    ack_timeout: int | None = None
    min_rnr_timer: int = 1
    remote_access: Access | None = None

    def terms(self, qp: QP, port_num: int, most_here: int, most_there: int) -> Terms:
        """Return the terms for a queue pair.

        The peer wants `most_there` READs and atomics in flight, and executes up to `most_here` from this end.
        """
        device = qp.ctx.query_device()
        here, there = device.max_qp_rd_atom, device.max_qp_init_rd_atom
        wanted = here if self.responder_resources is None else self.responder_resources
        depth = there if self.initiator_depth is None else self.initiator_depth
        return Terms(
            qpn=qp.qpn,
            psn=qp.psn,
            responder_resources=min(wanted, here, most_there),
            initiator_depth=min(depth, there, most_here),
            rnr_retry=self.rnr_retry,
            retry_count=self.retry_count,
            mtu=port_mtu(qp.ctx, port_num),
            srq=qp.init_attr.srq is not None,
            flow_control=self.flow_control,
        )

    def rights(self, terms: Terms) -> Access:
        """Return the peer's rights here."""
        if self.remote_access is not None:
            return self.remote_access
        reads = Access.REMOTE_READ | Access.REMOTE_ATOMIC
        return Access.REMOTE_WRITE | reads if terms.responder_resources else Access.REMOTE_WRITE


ALL = 255  # of a resource: the largest number that a message can hold
DEFAULT = Parameters()


def port_mtu(ctx: Context, port_num: int) -> int:
    """Return the active MTU of a port, in bytes."""
    return ctx.query_port(port_num).active_mtu
