"""Counters in the text format that Prometheus reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..nic.observe.running import Observed

# Meanings of the kernel's counter names (counters, hw_counters). A name that is missing here explains itself.
_HELP = {
    "rx_write_requests": "RDMA writes received.",
    "rx_read_requests": "RDMA reads received.",
    "rx_atomic_requests": "Atomic requests received.",
    "out_of_buffer": "Messages that arrived when no receive was posted.",
    "out_of_sequence": "Packets that arrived out of sequence.",
    "duplicate_request": "Duplicate requests received.",
    "rnr_nak_retry_err": "RNR NAKs received.",
    "packet_seq_err": "NAKs for a sequence error received.",
    "implied_nak_seq_err": "Replies that implied the loss of an earlier one.",
    "local_ack_timeout_err": "Acknowledgement timeouts.",
    "req_cqe_error": "Completions of requests with an error.",
    "req_cqe_flush_error": "Requests flushed.",
    "resp_cqe_error": "Completions of receives with an error.",
    "resp_cqe_flush_error": "Receives flushed.",
    "resp_local_length_error": "Messages longer than the receive posted for them.",
    "resp_remote_access_errors": "Requests refused for missing access rights to their memory.",
    "req_remote_access_errors": "Requests that the peer refused for missing access rights to their memory.",
    "req_remote_invalid_request": "Requests that the peer found invalid.",
    "req_transport_retries_exceeded": "Requests given up after the last retry.",
    "req_rnr_retries_exceeded": "Requests given up because the peer had no receive posted.",
    "rx_icrc_encapsulated": "RoCE packets with a wrong ICRC.",
    "port_xmit_data": "Data sent by the port, in words of four bytes.",
    "port_rcv_data": "Data received by the port, in words of four bytes.",
    "port_xmit_packets": "Packets sent by the port.",
    "port_rcv_packets": "Packets received by the port.",
    "rdma_tx_packets": "RDMA packets sent.",
    "rdma_tx_bytes": "Bytes of payload sent in RDMA packets.",
    "rdma_rx_packets": "RDMA packets received.",
    "rdma_rx_bytes": "Bytes of payload received in RDMA packets.",
    "sq_wqes": "Work requests executed from send queues.",
    "cqes": "Completions written.",
    "lost_error_records": "Error records dropped because the error log was full.",
}
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def exposition(nics: Iterable[Observed]) -> str:
    """Return `gpunetio_<counter>_total{device, port, pid}` of each NIC.

    Those of its Ethernet queues are `gpunetio_rq_<counter>_total` and `gpunetio_sq_…`, with the label `queue`.
    """
    samples: dict[str, dict[str, int]] = {}  # counter → labels → value
    for nic in nics:
        own = {"device": nic.name, "port": 1, "pid": nic.pid}
        for counter, value in nic.counters.items():
            samples.setdefault(counter, {})[_labels(own)] = value
        for (kind, number), counts in nic.queues.items():
            for counter, value in counts.items():
                samples.setdefault(f"{kind}_{counter}", {})[_labels(own | {"queue": hex(number)})] = value
    lines = []
    for counter, values in samples.items():
        name = f"gpunetio_{re.sub('[^a-zA-Z0-9_]', '_', counter)}_total"
        help_text = _help(counter)
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} counter"]
        lines += [f"{name}{{{labels}}} {value}" for labels, value in values.items()]
    return "".join(f"{line}\n" for line in lines)


def _labels(values: Mapping[str, object]) -> str:
    return ",".join(f'{label}="{str(value).translate(_ESCAPES)}"' for label, value in values.items())


def _help(counter: str) -> str:
    """Return what a counter means."""
    from ..nic.state.counters import COUNTERS
    from ..nic.state.ethernet import RQ_ROW, SQ_ROW
    from ..nic.state.record import meanings

    kind, _, name = counter.partition("_")
    known = {"rq": RQ_ROW, "sq": SQ_ROW}
    declared, field = (known[kind], name) if kind in known and name in known[kind].offsets else (COUNTERS, counter)
    text = _HELP.get(counter) or f"{meanings(declared).get(field, counter.replace('_', ' '))}."
    return text[0].upper() + text[1:]
