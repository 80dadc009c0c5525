"""Counters of a NIC, which count from its opening on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ...jit.struct_view import View, struct_view
from .record import record

# The first have the names of the kernel's mlx5 driver (hw_counters). Each packet that arrives counts in
# `rdma_rx_packets` and in exactly one of PACKET_FATES. On wires that carry Ethernet, each frame counts in `rx_frames`,
# and in one of FRAME_FATES or STEERED_FATES, unless it is a packet of RoCE v2 for the port. observe/running.py derives
# `port_*_data`, in words of 4 bytes, from `rdma_*_bytes`.
COUNTERS = record("counters", """
    rx_write_requests              i64 responder  RDMA WRITEs
    rx_read_requests               i64 responder  RDMA READs
    rx_atomic_requests             i64 responder  atomics
    out_of_buffer                  i64 responder  messages that found no receive posted
    out_of_sequence                i64 responder  requests behind a gap
    duplicate_request              i64 responder  requests that were taken before
    rnr_nak_retry_err              i64 requester  RNR NAKs
    packet_seq_err                 i64 requester  NAKs for a gap
    implied_nak_seq_err            i64 requester  responses that imply the loss of an earlier one
    local_ack_timeout_err          i64 requester  timeouts without an acknowledgement
    resp_local_length_error        i64 responder  messages longer than their receive
    resp_cqe_error                 i64 responder  CQEs of receives with an error
    req_cqe_error                  i64 requester  CQEs of requests with an error
    req_remote_invalid_request     i64 requester  requests that the peer found invalid
    req_remote_access_errors       i64 requester  requests that the peer refused for their memory
    resp_remote_access_errors      i64 responder  requests that were refused for their memory
    resp_cqe_flush_error           i64 responder  receives that were flushed
    req_cqe_flush_error            i64 requester  requests that were flushed
    req_transport_retries_exceeded i64 requester  requests without an answer through all retries
    req_rnr_retries_exceeded       i64 requester  requests for which the peer had no receive through all retries
    rx_icrc_encapsulated           i64 engine     packets dropped: wrong ICRC
    rdma_tx_packets                i64 engine     packets sent
    rdma_tx_bytes                  i64 engine     bytes of payload sent
    rdma_rx_packets                i64 engine     packets that arrived
    rdma_rx_bytes                  i64 engine     bytes of payload that arrived
    rx_malformed                   i64 engine     packets dropped: wrong length or header
    rx_no_qp                       i64 engine     packets dropped: no such QP
    rx_wrong_peer                  i64 engine     packets dropped: from another address than the QP's peer
    rx_wrong_pkey                  i64 engine     packets dropped: another partition
    rx_wrong_qkey                  i64 engine     packets dropped: UD, another Q_Key
    rx_wrong_state                 i64 engine     packets dropped: the QP takes none in its state
    rx_uc_dropped                  i64 responder  packets dropped: UC, behind a gap
    rx_weak_icrc                   i64 engine     packets taken though only a part of their ICRC could be checked
    tx_dropped                     i64 engine     packets that the kernel did not take
    tx_unreachable                 i64 requester  datagrams that were not sent: no path leads there, or the port is down
    sq_wqes                        i64 requester  WQEs that were executed
    cqes                           i64 engine     CQEs that were written
    lost_error_records             i64 engine     reports that were lost because too many waited
    rx_accepted                    i64 engine     packets that were executed
    rx_refused                     i64 engine     packets that were refused, by a NAK if the peer has to know
    rx_unexpected                  i64 requester  responses dropped: nobody waits for them
    rx_link_down                   i64 engine     packets dropped: the port is down
    rx_stale                       i64 engine     packets dropped: from before the QP's last reset
    rx_frames                      i64 engine     Ethernet frames that arrived
    rx_frame_bytes                 i64 engine     bytes of Ethernet frames that arrived
    rx_frame_neighbour             i64 engine     frames of ARP and neighbour discovery, which a thread answers
    rx_frame_malformed             i64 engine     frames dropped: cut off, or wrong lengths
    rx_frame_oversize              i64 engine     frames dropped: longer than the port's MTU
    rx_frame_checksum              i64 engine     frames dropped: wrong checksum in the IPv4 header
    rx_frame_other_mac             i64 engine     frames without a rule dropped: to another MAC
    rx_frame_vlan                  i64 engine     frames without a rule dropped: with a VLAN tag
    rx_frame_other_protocol        i64 engine     frames without a rule dropped: not RoCE v2
    rx_frame_other_address         i64 engine     frames without a rule dropped: to another IP address
    rx_frame_fragment              i64 engine     frames without a rule dropped: fragments of IP packets
    rx_frame_link_down             i64 engine     frames dropped: the port is down
    rx_frame_delivered             i64 engine     frames that were placed in an Ethernet queue
    rx_frame_delivered_bytes       i64 engine     bytes of frames that were placed, without the VLAN tags taken out
    rx_frame_rule_dropped          i64 engine     frames dropped: a flow rule says so
    rx_frame_rule_loop             i64 engine     frames dropped: flow tables lead them round in circles
    rx_frame_no_buffer             i64 engine     frames dropped: their Ethernet queue has no receive posted
    rx_frame_too_long              i64 engine     frames dropped: longer than the receive of their Ethernet queue
    rx_frame_queue_state           i64 engine     frames dropped: their Ethernet queue is not in RDY, or this failed it
    rx_frame_own                   i64 engine     the NIC's own frames dropped: no rule takes them, or a TIR blocks them
    tx_frames                      i64 requester  Ethernet frames that SQs have sent
    tx_frame_bytes                 i64 requester  bytes of Ethernet frames that SQs have sent
    tx_frame_no_room               i64 requester  frames dropped: a NIC of the LAN takes them too slowly
    tx_frame_link_down             i64 requester  frames dropped: the port is down
""")
PACKET_FATES = (
    "rx_accepted", "rx_malformed", "rx_no_qp", "rx_wrong_peer", "rx_wrong_pkey", "rx_wrong_qkey", "rx_wrong_state",
    "out_of_sequence", "duplicate_request", "out_of_buffer", "rx_refused", "rx_uc_dropped", "rx_unexpected",
    "implied_nak_seq_err", "rx_link_down", "rx_stale",
)  # fmt: skip
FRAME_FATES = (
    "rx_frame_neighbour", "rx_frame_malformed", "rx_frame_oversize", "rx_frame_checksum", "rx_frame_other_mac",
    "rx_frame_vlan", "rx_frame_other_protocol", "rx_frame_other_address", "rx_frame_fragment", "rx_frame_link_down",
)  # fmt: skip
STEERED_FATES = (
    "rx_frame_delivered", "rx_frame_rule_dropped", "rx_frame_rule_loop", "rx_frame_no_buffer", "rx_frame_too_long",
    "rx_frame_queue_state", "rx_frame_own",
)  # fmt: skip
counters_at: View = struct_view(COUNTERS)


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
