"""Counters in the text format that Prometheus reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .failures import Failure, complain, writing

if TYPE_CHECKING:
    from ..nic.observe.running import Observed
    from ..packet_processing.statistics import Report

# Meanings of the kernel's counter names (counters, hw_counters). Names that explain themselves are missing here.
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
# Counts of the application: their names and meanings.
_PROCESSED = {
    "total": ("packets", "Packets received."),
    "total_bytes": ("bytes", "Bytes of packets received, with their Ethernet header."),
    "dns": ("dns", "UDP packets to port 53."),
    "dns_bytes": ("dns_bytes", "Bytes of UDP packets to port 53."),
    "others": ("others", "Packets of no other kind."),
    "others_bytes": ("others_bytes", "Bytes of packets of no other kind."),
    "http": ("http", "TCP packets that begin with HTTP/1.1."),
    "http_head": ("http_head", "TCP packets that begin with a HEAD request."),
    "http_get": ("http_get", "TCP packets that begin with a GET request."),
    "http_post": ("http_post", "TCP packets that begin with a POST request."),
    "tcp_syn": ("tcp_syn", "TCP packets with SYN."),
    "tcp_fin": ("tcp_fin", "TCP packets with FIN."),
    "tcp_ack": ("tcp_ack", "TCP packets with ACK."),
    "answered": ("answered", "ICMP echo requests answered."),
    "refused": ("refused", "ICMP packets that were damaged, fragments, or for others."),
    "dropped": ("dropped", "Packets that the NIC dropped for want of room in the queue."),
    "busy_seconds": ("busy_seconds", "Seconds in which the kernel had packets to work on."),
}
# Counts of its HTTP server: their names and meanings.
_HTTP = {
    "requests": "Requests answered.",
    "ok": "Responses with status 200.",
    "bad_request": "Responses with status 400.",
    "not_found": "Responses with status 404.",
    "not_allowed": "Responses with status 405.",
    "too_large": "Responses with status 431.",
    "opened": "Connections begun.",
    "ended": "Connections ended.",
    "retransmitted": "Times that something was sent again.",
    "dropped": "Segments for which the server had no room.",
    "syns": "SYNs of new connections.",
    "refused": "SYNs that were not answered, for want of a slot or a flow rule.",
    "expired": "Connections given up because the client did not answer the SYN-ACK.",
    "resets": "RSTs sent for segments of no connection.",
}
# The current state of the server: names and meanings.
_HTTP_NOW = {
    "open": ("open_connections", "Connections that are open."),
    "half_open": ("half_open_connections", "Connections whose client has not answered the SYN-ACK."),
}
# Figures of each of its kernels.
_KERNEL = {
    "packets": "Packets that the kernel has taken.",
    "dropped": "Packets for which the kernel had no room.",
    "busy_seconds": "Seconds in which the kernel had packets to work on; of several threads, the busiest counts.",
}
_Values = dict[str, int | float]  # by labels
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
    return "".join(_counter(counter, _help(counter), values) for counter, values in samples.items())


def application_exposition(report: Report) -> str:
    """Return the counts of `gpunetio packet_processing`: `gpunetio_processed_<count>_total{device, protocol, queue}`.

    Those of its HTTP server are `gpunetio_http_<count>_total{device}`, and those of the server's kernels
    `gpunetio_http_kernel_<count>_total{device, kernel}`. Gauges are the current connections and, in
    `gpunetio_kernel_failed{device, kernel}`, which kernels have failed.
    """
    from ..packet_processing.statistics import RULES

    device = {"device": report.device}
    samples: dict[str, tuple[str, _Values]] = {}
    for queue in report.queues:
        labels = _labels(device | {"protocol": queue.protocol.name, "queue": queue.number})
        for name, value in _known({**queue.counts, "dropped": queue.dropped, "busy_seconds": queue.busy_seconds}):
            known, meaning = _PROCESSED[name]
            samples.setdefault(f"processed_{known}", (meaning, {}))[1][labels] = value
    for kernel in report.kernels:
        labels = _labels(device | {"kernel": kernel.name})
        for name, value in _known({name: getattr(kernel, name) for name in _KERNEL}):
            samples.setdefault(f"http_kernel_{name}", (_KERNEL[name], {}))[1][labels] = value
    failed = {_labels(device | {"kernel": name}): int(name in report.failures) for name in report.kernel_names()}
    gauges = [("kernel_failed", "Whether the kernel has failed.", failed)]
    if (http := report.http) is not None:
        own = _labels(device)
        samples |= {f"http_{name}": (meaning, {own: http[name]}) for name, meaning in _HTTP.items()}
        gauges += [(f"http_{known}", meaning, {own: http[name]}) for name, (known, meaning) in _HTTP_NOW.items()]
        rules = int(RULES in report.failures)
        gauges.append(("http_rules_failed", "Whether connections get no flow rules any more.", {own: rules}))
    counters = (_counter(name, meaning, values) for name, (meaning, values) in samples.items())
    return "".join((*counters, *(_metric(name, "gauge", meaning, values) for name, meaning, values in gauges)))


def exporter(path: Path) -> Callable[[Report], None]:
    """Return a function that writes a report to a file. A reader sees the old text or the new one, never a part.

    Failure if the file cannot be written now. If it cannot be written later, that is reported once, until it can be
    written again.
    """
    beside = path.with_name(f"{path.name}.new")
    complained = False

    def write(text: str) -> None:
        with writing("the counts", beside):
            beside.write_text(text)
            beside.replace(path)

    def export(report: Report) -> None:
        nonlocal complained
        try:
            write(application_exposition(report))
            complained = False
        except Failure as failure:
            if not complained:
                complain(f"{failure.message}; the application goes on, and tries again")
            complained = True

    write("")
    return export


def _known(values: Mapping[str, int | float | None]) -> Iterator[tuple[str, int | float]]:
    """Yield the values that are not None. A card does not report all of them."""
    for name, value in values.items():
        if value is not None:
            yield name, value


def _counter(counter: str, meaning: str, values: Mapping[str, int | float]) -> str:
    return _metric(f"{re.sub('[^a-zA-Z0-9_]', '_', counter)}_total", "counter", meaning, values)


def _metric(name: str, kind: str, meaning: str, values: Mapping[str, int | float]) -> str:
    """Return the text of a metric: its meaning, and its values by labels."""
    lines = [f"# HELP gpunetio_{name} {meaning}", f"# TYPE gpunetio_{name} {kind}"]
    lines += [f"gpunetio_{name}{{{labels}}} {value}" for labels, value in values.items()]
    return "".join(f"{line}\n" for line in lines)


def _labels(values: Mapping[str, object]) -> str:
    return ",".join(f'{label}="{str(value).translate(_ESCAPES)}"' for label, value in values.items())


def _help(counter: str) -> str:
    """Return the meaning of a counter."""
    from ..nic.state.counters import CounterSet
    from ..nic.state.ethernet_queues import RqRow, SqRow

    kind, _, name = counter.partition("_")
    known = {"rq": RqRow, "sq": SqRow}
    declared, field = (known[kind], name) if kind in known and name in known[kind].meanings else (CounterSet, counter)
    text = _HELP.get(counter) or f"{declared.meanings.get(field, counter.replace('_', ' '))}."
    return text[0].upper() + text[1:]
