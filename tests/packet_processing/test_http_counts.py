"""What the HTTP server has counted, in all that the application prints."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue

import numpy as np
import pytest
from scapy.layers.inet import TCP
from scapy.packet import Packet

import gpunetio as gn
from gpunetio import PortConfig
from gpunetio.cli.prometheus import application_exposition
from gpunetio.formats.commands import Opcode
from gpunetio.formats.ethernet_queues import QueueState
from gpunetio.packet_processing.acceptor import COUNTS as OF_ACCEPTORS
from gpunetio.packet_processing.app import Application
from gpunetio.packet_processing.connection import LANE, Tables
from gpunetio.packet_processing.dashboard import COLUMNS, rows
from gpunetio.packet_processing.options import Options
from gpunetio.packet_processing.statistics import KernelReport, Report, lines
from packet_server import SERVER
from stream_end import StreamEnd
from tcp_station import Station

NAMES = (
    "requests", "ok", "bad_request", "not_found", "not_allowed", "too_large", "opened", "ended", "retransmitted",
    "dropped", "syns", "refused", "expired", "resets", "open", "half_open",
)
COUNTS = {name: 100 + i for i, name in enumerate(NAMES)}


def test_the_statistics_have_a_line_of_the_server():
    *_, line = lines(Report(10.0, (), {}, COUNTS))
    assert line == (
        "[HTTP] REQUESTS: 100 [200: 101 400: 102 404: 103 405: 104 431: 105] CONNECTIONS [OPEN: 114 HALF-OPEN: 115 "
        "ENDED: 107 REFUSED: 111] RETRANSMITTED: 108 DROPPED: 109"
    )


def test_the_dashboard_has_a_row_of_the_server():
    before = Report(8.0, (), {}, COUNTS | {"requests": 20})
    (row,) = rows(Report(10.0, (), {}, COUNTS), before)
    assert row[:6] == ("HTTP requests", "100", "40", "", "", "")
    assert len(row) == len(COLUMNS)
    assert "half_open 115" in row[-1]


def test_json_has_all_counts():
    assert Report(1.0, (), {}, COUNTS).document()["http"] == COUNTS
    assert Report(1.0, (), {}).document()["http"] is None


def test_prometheus_has_all_counts():
    """What is open at the moment is no counter."""
    text = application_exposition(Report(1.0, (), {}, COUNTS, device="soft0"))
    samples = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
    metrics = {f"{name}_total": COUNTS[name] for name in NAMES[:-2]}
    metrics |= {f"{name}_connections": COUNTS[name] for name in NAMES[-2:]} | {"rules_failed": 0}
    assert samples == {f'gpunetio_http_{name}{{device="soft0"}}': str(value) for name, value in metrics.items()}


def test_lanes_are_summed():
    with gn.Gpu("host") as gpu, ExitStack() as undo:
        tables = Tables(gpu, 2, 3, 0, 0, undo)
        for name, factor in (("requests", 1), ("segments", 10), ("busy_ns", 500_000_000)):
            tables.lane_rows[name] = np.arange(6) * factor
        assert tables.counts()["requests"] == 15
        assert tables.work() == (150, 2.5)
        assert set(tables.counts()) | set(OF_ACCEPTORS) | {"open", "half_open"} == set(NAMES)
        assert set(LANE.offsets) - set(tables.counts()) == {"status", "nap", "segments", "busy_ns"}


# --- kernels ---------------------------------------------------------------------------------------------------------


class CountingStation(Station):
    """A station that counts the segments that it sends."""

    segments = 0

    def send(self, *frames: Packet) -> None:
        self.segments += sum(TCP in frame for frame in frames)
        super().send(*frames)


@pytest.fixture
def served(tmp_path) -> Iterator[tuple[Application, CountingStation, SimpleQueue[Report]]]:
    """An application of two queues that serves a station, and its reports."""
    port = PortConfig(addresses=SERVER, wire=f"unix:{tmp_path / 'cable'}")
    reports: SimpleQueue[Report] = SimpleQueue()
    with ExitStack() as undo:
        application = Application(Options(gpu="host", device="soft0", queues=2, http=True, nic_port=port), undo)
        done = undo.enter_context(ThreadPoolExecutor(1)).submit(application.run, [(0.05, reports.put)])
        undo.callback(application.stop.set)
        end = StreamEnd(tmp_path / "cable")
        undo.callback(end.close)
        yield application, CountingStation(end.sock), reports
        application.stop.set()
        done.result()


def when(reports: SimpleQueue[Report], true: Callable[[Report], object]) -> dict[str, KernelReport]:
    """Wait for a report of which something is true. Return its kernels by their names."""
    for _ in range(600):
        if true(report := reports.get(timeout=60)):
            return {kernel.name: kernel for kernel in report.kernels}
    raise AssertionError("no such report has come")


@pytest.mark.soft_nic
def test_what_the_kernels_have_done(served):
    """Each segment comes to the CPU, as connections are too short for a rule. All but SYNs go to the server."""
    _, station, reports = served
    clients = [station.client().open() for _ in range(20)]
    for client in clients:
        client.get("/index.html")
        assert client.answer()[0] == 200
        client.close()
    packets = 2 * station.segments - len(clients)
    kernels = when(reports, lambda report: sum(each.packets for each in report.kernels) >= packets)
    assert [*kernels] == ["HTTP server", "TCP handshakes 0", "TCP handshakes 1"]
    assert kernels["HTTP server"].packets == station.segments - len(clients)
    assert sum(each.packets for each in kernels.values()) == packets
    assert all(kernel.packets > 0 < kernel.busy_seconds for kernel in kernels.values())
    assert all(kernel.dropped == 0 for kernel in kernels.values())


@pytest.mark.soft_nic
def test_what_a_queue_of_the_cpu_has_dropped(served):
    """Its kernel has ended, so nobody gives the NIC places back."""
    application, station, reports = served
    queue = application.http.accepting[0]
    queue.rxq.rq.modify(Opcode.MODIFY_RQ, rq_state=QueueState.RDY, ctx={"state": QueueState.ERR})
    when(reports, lambda report: queue.name in report.failures)
    for _ in range(40):
        station.client().syn()
    kernels = when(reports, lambda report: sum(each.packets + (each.dropped or 0) for each in report.kernels) == 40)
    dropped, others = kernels[queue.name].dropped, kernels["TCP handshakes 1"]
    assert (dropped > 0, others.packets, others.dropped) == (True, 40 - dropped, 0)
