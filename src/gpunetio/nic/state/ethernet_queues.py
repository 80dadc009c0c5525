"""Ethernet queues, and the objects that select the packets which they send and receive.

The control path keeps these rows up to date.
"""

from __future__ import annotations

from typing import Annotated

from ...formats.layout import I64
from .qp import QpRow
from .record import State, command, engine, host, requester, responder


class TransportDomainRow(State):
    """A transport domain."""

    transport_domain: I64 = command("number of the transport domain; 0 in a free row")


TRANSPORT_DOMAIN_ROW = TransportDomainRow.entry


class QCounterRow(State):
    """A Q counter."""

    # set-up
    counter_set_id: I64 = command("number of the Q counter; 0 in a free row")
    # state
    out_of_buffer: I64 = engine("packets that found no receive WQE. Commands set it to 0", line=True)


Q_COUNTER_ROW = QCounterRow.entry


class TisRow(State):
    """A transport interface send (TIS)."""

    tisn: I64 = command("number of the TIS; 0 in a free row")
    transport_domain: I64 = command("number of its transport domain")
    prio: I64 = command("priority of its packets")


TIS_ROW = TisRow.entry


class SqRow(QpRow):
    """A send queue for Ethernet.

    The engine serves it as the send queue of a QP without transport, so a row begins with the fields of a QP. It uses
    the set-up fields of send queues, `wire` (0: the NICs of this host), `mtu` (of the link, in bytes), and of the
    requester the queue positions, `failed`, `told` and `missing`. Its `state` is RST, RTS (which is RDY), or ERR.
    """

    # set-up of an SQ
    tis: I64 = command("address of its TIS_ROW", line=True)
    inline_mode: I64 = command("formats.ethernet_queues.InlineMode: the headers that its WQEs must contain")
    multi_packet: I64 = command("not 0: a WQE may hold several packets (ENHANCED_MPSW)")
    flush: I64 = command("not 0: in ERR, its WQEs complete with flush errors")
    real_time: I64 = command("not 0: its times are of day: in CQEs, and to wait for")
    # state of an SQ, which RST clears
    packets: I64 = requester("packets of the WQE at hand that were sent", line=True)
    wait_until: I64 = requester("when the WAIT at hand ends, in ns of the engine's clock; 0: it is for no time")
    # counts of an SQ since it was created
    frames: I64 = requester("frames that it has sent", line=True)
    frame_bytes: I64 = requester("bytes of frames that it has sent")


SQ_ROW = SqRow.entry
SQ_STATE, SQ_COUNTS = SQ_ROW.packets, SQ_ROW.frames  # where the state and the counts of an SQ begin


class RqRow(State):
    """A receive queue for Ethernet."""

    # set-up
    rqn: I64 = command("number of the RQ; 0 in a free row")
    state: I64 = engine("formats.ethernet_queues.QueueState; commands ask for it, and a failure sets ERR")
    user_index: I64 = command("what CQEs carry to identify the RQ")
    pdn: I64 = command("number of its protection domain")
    cq: I64 = command("address of its CQ_ROW")
    srq: I64 = command("address of the SRQ_ROW with its WQEs; 0 if it has a ring of its own")
    wq_type: I64 = command("formats.commands.WqType")
    addr: I64 = command("address of the ring")
    log: I64 = command("binary logarithm of its WQEs")
    stride: I64 = command("bytes of a WQE")
    dbrec: I64 = command("address of the doorbell record")
    strides: I64 = command("of a striding queue: strides in the buffer of a WQE, else 0")
    stride_bytes: I64 = command("of a striding queue: bytes of a stride")
    padding: I64 = command("bytes that stay free before each packet: 0 or 2")
    keep_vlan: I64 = command("not 0: a VLAN tag stays in the packet")
    flush: I64 = command("not 0: in ERR, its WQEs complete with flush errors")
    counter: I64 = command("address of the Q_COUNTER_ROW that counts its drops; 0 is none")
    channel: I64 = host("address of the CHANNEL for its events; 0 without a subscriber")
    cookie: I64 = host("what events carry to identify the subscriber")
    events: I64 = host("a bit for each formats.events.EventType that `channel` receives")
    # state, which RST clears, and from `frames` on counts since the RQ was created
    consumed: I64 = responder("WQEs of its own ring that were consumed", line=True)
    next: I64 = responder("of linked WQEs: index of the next one")
    used: I64 = responder("strides of the next WQE that were used")
    frames: I64 = responder("frames that were placed")
    frame_bytes: I64 = responder("bytes of frames that were placed, without VLAN tags that were taken out")
    no_buffer: I64 = responder("frames dropped: no receive was posted")
    too_long: I64 = responder("frames dropped: longer than their receive")
    not_ready: I64 = responder("frames dropped: the RQ was not in RDY, or they failed it")


RQ_ROW = RqRow.entry
RQ_SETUP_BYTES = RQ_ROW.consumed  # what commands prepare, and the engine copies
RQ_COUNTS = RQ_ROW.frames  # where the counts begin


class RqtRow(State):
    """A receive queue table: the queues that a TIR spreads packets over."""

    rqtn: I64 = command("number of the RQT; 0 in a free row")
    count: I64 = command("entries in use, a power of two")
    rqs: I64 = command("address of the entries: addresses of RQ_ROWs")


RQT_ROW = RqtRow.entry


class TirRow(State):
    """A transport interface receive (TIR).

    The hash covers the source and destination address, then the source and destination port, as far as they are
    selected.
    """

    tirn: I64 = command("number of the TIR; 0 in a free row")
    transport_domain: I64 = command("number of its transport domain")
    rq: I64 = command("address of the RQ_ROW that gets the packets; 0 if a hash selects it")
    rqt: I64 = command("address of the RQT_ROW in which the hash selects; 0 if it has one RQ")
    hash_fn: I64 = command("formats.ethernet_queues.RxHashFn; NONE is a hash of 0")
    symmetric: I64 = command("not 0: both directions of a connection have the same hash")
    l3_prot: I64 = command("formats.ethernet_queues.L3Prot of the packets that it hashes")
    l4_prot: I64 = command("formats.ethernet_queues.L4Prot of the packets whose ports it hashes")
    fields: I64 = command("formats.ethernet_queues.HashField: what is hashed")
    self_lb_block: I64 = command("formats.ethernet_queues.SelfLbBlock: packets of its own transport domain to drop")
    toeplitz: I64 = command("address of the table of the key (steering/rss.py); 0 if there is no hash")
    key: Annotated[int, "raw[40]"] = command("of TOEPLITZ: the key")


TIR_ROW = TirRow.entry
