"""Events of completion channels, and asynchronous events of objects."""

from __future__ import annotations

import select
from dataclasses import dataclass

from ..enums import Access, AsyncEventType, QpState, SendFlags, WcStatus, WrOpcode
from ..errors import InUseError, InvalidValueError
from ..verbs import CompChannel
from .kit import check
from .rig import Rig, Side, refused, same


@dataclass
class _Told:
    """A sender, and a receiver whose completions are reported on a channel."""

    rig: Rig
    a: Side
    b: Side
    channel: CompChannel

    @classmethod
    def open(cls, rig: Rig) -> _Told:
        channel = rig.far.create_comp_channel()
        a, b = rig.pair(far={"receive_cq": rig.far.create_cq(64, channel=channel)})
        for number in range(8):
            b.receive(b.memory.sge(), wr_id=number)
        return cls(rig, a, b, channel)

    def send(self, solicited: bool = False) -> None:
        """Send a message that has arrived when this returns, so that its completion is in the CQ."""
        self.a.post(WrOpcode.SEND, self.a.memory.sge(), flags=SendFlags.SOLICITED if solicited else SendFlags(0))
        self.a.succeed(0)

    def event(self) -> None:
        """Take the event that must come."""
        self.rig.told(self.channel, self.b.received)

    def none(self) -> None:
        """Check that no event comes."""
        self.rig.not_told(self.channel)


@check
def one_event_for_a_request(rig: Rig) -> None:
    """An armed CQ reports the next completion, once; a CQ that is not armed reports nothing.

    Source: IBTA 11.4.2.2; ibv_req_notify_cq(3), ibv_get_cq_event(3).
    """
    told = _Told.open(rig)
    told.send()
    told.none()
    told.b.arrive(0)
    for _ in range(2):
        told.b.received.req_notify()
    told.none()
    told.send()
    told.event()
    told.send()
    told.none()
    told.b.arrive(1, 2)


@check
def event_for_what_is_there_already(rig: Rig) -> None:
    """Arming a CQ with an unpolled completion causes an event at once; a polled completion causes none.

    Source: PRM, CQ arming by consumer index; gpunetio.verbs.CQ.req_notify.
    """
    told = _Told.open(rig)
    told.send()
    told.none()
    told.b.received.req_notify()
    told.event()
    told.b.arrive(0)
    told.b.received.req_notify()
    told.none()
    told.send()
    told.event()


@check
def solicited_events(rig: Rig) -> None:
    """A CQ armed for solicited completions reports only messages whose sender set SOLICITED.

    Source: IBTA 9.2.3 (solicited event), 11.4.2.2; ibv_req_notify_cq(3).
    """
    told = _Told.open(rig)
    told.b.received.req_notify(solicited_only=True)
    told.send()
    told.none()
    told.send(solicited=True)
    told.event()
    told.b.arrive(0, 1)
    for first in (True, False):  # with both requests, any completion will do, in either order
        told.b.received.req_notify(solicited_only=first)
        told.b.received.req_notify(solicited_only=not first)
        told.send()
        told.event()
        rig.take(told.b.received, 1)


@check
def errors_are_solicited(rig: Rig) -> None:
    """A completion with an error is also reported by a CQ armed for solicited completions.

    Source: IBTA 11.4.2.2; ibv_req_notify_cq(3).
    """
    told = _Told.open(rig)
    told.b.received.req_notify(solicited_only=True)
    told.b.qp.to_error()
    told.event()
    told.b.fail_receiving(WcStatus.WR_FLUSH_ERR, *range(8))


@check
def many_cqs_on_a_channel(rig: Rig) -> None:
    """Each of many CQs that share a channel is reported once.

    Source: ibv_create_comp_channel(3), ibv_get_cq_event(3).
    """
    channel = rig.near.create_comp_channel()
    pd = rig.near.create_pd()
    cqs = [rig.near.create_cq(4, channel=channel) for _ in range(12)]
    sides = [rig.side(rig.near, pd=pd, send_cq=cq, receive_cq=cq, size=64) for cq in cqs]
    for side in sides:
        rig.connect(side, side)
        side.sent.req_notify()
    for side in sides:
        side.post(WrOpcode.RDMA_WRITE, **side.memory.remote())
    found = []
    while len(found) < len(cqs) and (cq := channel.get_event(rig.patience)):
        cq.ack_events()
        found.append(str(cq))
    same("the CQs that were told of", sorted(found), sorted(map(str, cqs)))
    rig.not_told(channel)


@check
def events_are_acknowledged(rig: Rig) -> None:
    """A CQ does not close before all its events were acknowledged, each once.

    Source: ibv_ack_cq_events(3); doca_verbs_ack_cq_events.
    """
    told = _Told.open(rig)
    cq = told.b.received
    cq.req_notify()
    told.send()
    same("the CQ that was told of", str(told.channel.get_event(rig.patience)), str(cq))
    told.b.qp.close()
    refused("closing a CQ with an event that was not acknowledged", InUseError, cq.close)
    refused("acknowledging two events of one", InvalidValueError, lambda: cq.ack_events(2))
    cq.ack_events()
    refused("acknowledging once more", InvalidValueError, cq.ack_events)
    cq.close()


@check
def channel_can_be_polled(rig: Rig) -> None:
    """The channel's descriptor is readable while an event waits, and only then.

    Source: ibv_get_cq_event(3) (poll on the channel's fd).
    """
    told = _Told.open(rig)
    poll = select.poll()
    poll.register(told.channel.fileno(), select.POLLIN)
    told.b.received.req_notify()
    same("readable before the event", poll.poll(0), [])
    told.send()
    same("readable descriptors", [fd for fd, _ in poll.poll(1000 * rig.patience)], [told.channel.fileno()])
    told.event()
    same("readable after the event", poll.poll(0), [])


@check
def refused_key_is_told(rig: Rig) -> None:
    """A responder that refuses a key or a right of a region reports QP_ACCESS_ERR; the requester gets no event.

    Source: IBTA 11.6.3 (local access violation work queue error); ibv_get_async_event(3).
    """
    for wrong in (0xFF, 0):
        a, b = rig.pair(far={"access": Access.all() if wrong else Access.LOCAL_WRITE})
        a.post(WrOpcode.RDMA_WRITE, a.memory.sge(), remote_addr=b.memory.mr.iova, rkey=b.memory.mr.rkey ^ wrong)
        rig.event(rig.far, AsyncEventType.QP_ACCESS_ERR, b.qp)
        rig.state(b.qp, QpState.ERR)
        a.fail(WcStatus.REM_ACCESS_ERR, 0)
    for ctx in (rig.near, rig.far):
        rig.no_event(ctx)


@check
def refused_request_is_told(rig: Rig) -> None:
    """A responder whose queue pair does not allow a request reports QP_REQ_ERR.

    Source: IBTA 11.6.3 (invalid request local work queue error); ibv_get_async_event(3).
    """
    a, b = rig.pair(remote_access=Access.REMOTE_READ)
    a.post(WrOpcode.RDMA_WRITE, a.memory.sge(), **b.memory.remote())
    rig.event(rig.far, AsyncEventType.QP_REQ_ERR, b.qp)
    rig.no_event(rig.far)


@check
def async_events_are_acknowledged(rig: Rig) -> None:
    """An object does not close before its asynchronous events were acknowledged, each once.

    Source: ibv_ack_async_event(3); doca_verbs_ack_async_event.
    """
    a, b = rig.pair(remote_access=Access.REMOTE_READ)
    a.post(WrOpcode.RDMA_WRITE, a.memory.sge(), **b.memory.remote())
    event = rig.until("an asynchronous event", lambda: rig.far.get_async_event(rig.patience))
    refused("closing a queue pair with an event that was not acknowledged", InUseError, b.qp.close)
    event.ack()
    refused("acknowledging once more", InvalidValueError, event.ack)
    b.qp.close()


@check
def events_of_closed_objects(rig: Rig) -> None:
    """Events of an object that was closed in the meantime are not reported.

    Source: ibv_destroy_qp(3), ibv_ack_async_event(3).
    """
    a, b = rig.pair(remote_access=Access.REMOTE_READ)
    a.post(WrOpcode.RDMA_WRITE, a.memory.sge(), **b.memory.remote())
    a.fail(WcStatus.REM_INV_REQ_ERR, 0)
    rig.state(b.qp, QpState.ERR)
    b.qp.close()
    rig.no_event(rig.far)
