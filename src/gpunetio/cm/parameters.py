"""What a program asks of a connection."""

from __future__ import annotations

from dataclasses import dataclass

from ..enums import Access
from ..verbs.context import Context
from ..verbs.qp import QP
from .communication import Terms


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """What a program asks of a connection (`rdma_conn_param`), and of its queue pair.

    `responder_resources`  READs and atomics of the peer that are executed here at a time; 0 refuses them. At most what
                           the device has, which is the default, and what the peer wants
    `initiator_depth`      READs and atomics from here that are in flight at a time, likewise
    `retry_count`          how often both ends repeat what is not acknowledged, 0 to 7; the side that connects decides
    `rnr_retry`            how often the peer repeats what found no receive here; 7 is forever
    `flow_control`         what the peer is told of end-to-end flow control
    `ack_timeout`          how long this end waits for an acknowledgement: 4.096 us x 2^n. By default it follows from
                           `Times`, as in Linux, which makes it 2 s
    `min_rnr_timer`        how long the peer waits after it found no receive here, as in `QpAttr`
    `remote_access`        what the peer may do here. By default WRITEs and, with `responder_resources`, READs and
                           atomics. A queue pair that is in INIT already keeps its rights
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
        """Return what is said of a queue pair.

        The peer has `most_there` READs and atomics in flight, and executes `most_here` of ours.
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
        """Return what the peer may do here."""
        if self.remote_access is not None:
            return self.remote_access
        reads = Access.REMOTE_READ | Access.REMOTE_ATOMIC
        return Access.REMOTE_WRITE | reads if terms.responder_resources else Access.REMOTE_WRITE


ALL = 255  # of a resource: as much as a message can say
DEFAULT = Parameters()


def port_mtu(ctx: Context, port_num: int) -> int:
    """Return the largest packet of a port, in bytes."""
    return ctx.query_port(port_num).active_mtu
