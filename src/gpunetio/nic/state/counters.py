"""Counters of a NIC, which count from its opening on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ...formats.layout import I64
from .record import State, engine, requester, responder


class CounterSet(State):
    """The counters of a worker.

    The first have the names of the kernel's mlx5 driver (hw_counters). Each packet that arrives counts in
    `rdma_rx_packets` and in exactly one of PACKET_FATES. On wires that carry Ethernet, each frame counts in
    `rx_frames`, and in one of FRAME_FATES or STEERED_FATES, unless it is a packet of RoCE v2 for the port.
    observe/running.py derives `port_*_data`, in words of 4 bytes, from `rdma_*_bytes`.
    """

    rx_write_requests: I64 = responder("RDMA WRITEs")
    rx_read_requests: I64 = responder("RDMA READs")
    rx_atomic_requests: I64 = responder("atomics")
    out_of_buffer: I64 = responder("messages that found no receive posted")
    out_of_sequence: I64 = responder("requests behind a gap")
    duplicate_request: I64 = responder("requests that were taken before")
    rnr_nak_retry_err: I64 = requester("RNR NAKs")
    packet_seq_err: I64 = requester("NAKs for a gap")
    implied_nak_seq_err: I64 = requester("responses that imply the loss of an earlier one")
    local_ack_timeout_err: I64 = requester("timeouts without an acknowledgement")
    resp_local_length_error: I64 = responder("messages longer than their receive")
    resp_cqe_error: I64 = responder("CQEs of receives with an error")
    req_cqe_error: I64 = requester("CQEs of requests with an error")
    req_remote_invalid_request: I64 = requester("requests that the peer found invalid")
    req_remote_access_errors: I64 = requester("requests that the peer refused for their memory")
    resp_remote_access_errors: I64 = responder("requests that were refused for their memory")
    resp_cqe_flush_error: I64 = responder("receives that were flushed")
    req_cqe_flush_error: I64 = requester("requests that were flushed")
    req_transport_retries_exceeded: I64 = requester("requests without an answer through all retries")
    req_rnr_retries_exceeded: I64 = requester("requests for which the peer had no receive through all retries")
    rx_icrc_encapsulated: I64 = engine("packets dropped: wrong ICRC")
    rdma_tx_packets: I64 = engine("packets sent")
    rdma_tx_bytes: I64 = engine("bytes of payload sent")
    rdma_rx_packets: I64 = engine("packets that arrived")
    rdma_rx_bytes: I64 = engine("bytes of payload that arrived")
    rx_malformed: I64 = engine("packets dropped: wrong length or header")
    rx_no_qp: I64 = engine("packets dropped: no such QP")
    rx_wrong_peer: I64 = engine("packets dropped: from another address than the QP's peer")
    rx_wrong_pkey: I64 = engine("packets dropped: another partition")
    rx_wrong_qkey: I64 = engine("packets dropped: UD, another Q_Key")
    rx_wrong_state: I64 = engine("packets dropped: the QP takes none in its state")
    rx_uc_dropped: I64 = responder("packets dropped: UC, behind a gap")
    rx_weak_icrc: I64 = engine("packets taken though only a part of their ICRC could be checked")
    tx_dropped: I64 = engine("packets that the kernel did not take")
    tx_unreachable: I64 = requester("datagrams that were not sent: no path leads there, or the port is down")
    sq_wqes: I64 = requester("WQEs that were executed")
    cqes: I64 = engine("CQEs that were written")
    lost_error_records: I64 = engine("reports that were lost because too many waited")
    rx_accepted: I64 = engine("packets that were executed")
    rx_refused: I64 = engine("packets that were refused, by a NAK if the peer has to know")
    rx_unexpected: I64 = requester("responses dropped: nobody waits for them")
    rx_link_down: I64 = engine("packets dropped: the port is down")
    rx_stale: I64 = engine("packets dropped: from before the QP's last reset")
    rx_frames: I64 = engine("Ethernet frames that arrived")
    rx_frame_bytes: I64 = engine("bytes of Ethernet frames that arrived")
    rx_frame_neighbour: I64 = engine("frames of ARP and neighbour discovery, which a thread answers")
    rx_frame_malformed: I64 = engine("frames dropped: cut off, or wrong lengths")
    rx_frame_oversize: I64 = engine("frames dropped: longer than the port's MTU")
    rx_frame_checksum: I64 = engine("frames dropped: wrong checksum in the IPv4 header")
    rx_frame_other_mac: I64 = engine("frames without a rule dropped: to another MAC")
    rx_frame_vlan: I64 = engine("frames without a rule dropped: with a VLAN tag")
    rx_frame_other_protocol: I64 = engine("frames without a rule dropped: not RoCE v2")
    rx_frame_other_address: I64 = engine("frames without a rule dropped: to another IP address")
    rx_frame_fragment: I64 = engine("frames without a rule dropped: fragments of IP packets")
    rx_frame_link_down: I64 = engine("frames dropped: the port is down")
    rx_frame_delivered: I64 = engine("frames that were placed in an Ethernet queue")
    rx_frame_delivered_bytes: I64 = engine("bytes of frames that were placed, without the VLAN tags taken out")
    rx_frame_rule_dropped: I64 = engine("frames dropped: a flow rule says so")
    rx_frame_rule_loop: I64 = engine("frames dropped: flow tables lead them round in circles")
    rx_frame_no_buffer: I64 = engine("frames dropped: their Ethernet queue has no receive posted")
    rx_frame_too_long: I64 = engine("frames dropped: longer than the receive of their Ethernet queue")
    rx_frame_queue_state: I64 = engine("frames dropped: their Ethernet queue is not in RDY, or this failed it")
    rx_frame_own: I64 = engine("the NIC's own frames dropped: no rule takes them, or a TIR blocks them")
    tx_frames: I64 = requester("Ethernet frames that SQs have sent")
    tx_frame_bytes: I64 = requester("bytes of Ethernet frames that SQs have sent")
    tx_frame_no_room: I64 = requester("frames dropped: a NIC of the LAN takes them too slowly")
    tx_frame_link_down: I64 = requester("frames dropped: the port is down")


COUNTERS = CounterSet.entry
PACKET_FATES = (
    "rx_accepted", "rx_malformed", "rx_no_qp", "rx_wrong_peer", "rx_wrong_pkey", "rx_wrong_qkey", "rx_wrong_state",
    "out_of_sequence", "duplicate_request", "out_of_buffer", "rx_refused", "rx_uc_dropped", "rx_unexpected",
    "implied_nak_seq_err", "rx_link_down", "rx_stale",
)
FRAME_FATES = (
    "rx_frame_neighbour", "rx_frame_malformed", "rx_frame_oversize", "rx_frame_checksum", "rx_frame_other_mac",
    "rx_frame_vlan", "rx_frame_other_protocol", "rx_frame_other_address", "rx_frame_fragment", "rx_frame_link_down",
)
STEERED_FATES = (
    "rx_frame_delivered", "rx_frame_rule_dropped", "rx_frame_rule_loop", "rx_frame_no_buffer", "rx_frame_too_long",
    "rx_frame_queue_state", "rx_frame_own",
)


class Counters(Mapping[str, int]):
    """The counters of a NIC by name: the sums over its workers, each of which has a row."""

    def __init__(self, rows: np.ndarray):
        self.rows = rows

    def __getitem__(self, name: str) -> int:
        return int(self.rows[name].sum())

    def __iter__(self) -> Iterator[str]:
        return iter(COUNTERS.offsets)

    def __len__(self) -> int:
        return len(COUNTERS.offsets)
