"""The counts of the application are exact: of captures with known packets, at every number of queues."""

from contextlib import ExitStack
from dataclasses import replace

import pytest

from gpunetio.formats.eth_device import SemaphoreStatus
from gpunetio.packet_processing.app import Application, run
from gpunetio.packet_processing.queues import Protocol
from packet_mix import mixed
from packet_processing_rig import expected, options_for, replayed, totals

pytestmark = pytest.mark.soft_nic


@pytest.mark.parametrize("queues", [1, 2, 3, 4])
def test_each_packet_counts_as_what_it_is(tmp_path, queues):
    frames = mixed(20)
    report = replayed([frame for frame, _ in frames], tmp_path, queues)
    wanted = expected(frames)
    for protocol in Protocol:
        assert totals(report, protocol) == wanted[protocol.name]
        assert len(report.of_protocol(protocol)) == (1 if protocol is Protocol.ICMP else queues)
    for protocol in (Protocol.UDP, Protocol.TCP):
        assert all(queue.counts["total"] > 0 for queue in report.of_protocol(protocol)), "RSS spreads flows"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("queues", [1, 2, 3, 4])
def test_a_million_packets(tmp_path, queues):
    frames = mixed(30)
    times = 1_000_000 // len(frames) + 1
    report = replayed([frame for frame, _ in frames], tmp_path, queues, times)
    wanted = expected(frames)
    for protocol in Protocol:
        assert totals(report, protocol) == {name: times * count for name, count in wanted[protocol.name].items()}


def test_a_semaphore_item_that_the_cpu_does_not_free_delays_counts_and_loses_none(tmp_path):
    """Kernels reach the third item early, and keep what they count until the end."""
    frames = mixed(20)
    with ExitStack() as undo:
        application = Application(options_for([frame for frame, _ in frames], tmp_path, times=20), undo)
        for queue in application.queues:
            queue.semaphore.set_status(2, SemaphoreStatus.HOLD)
        report = application.run([])
        for queue in application.queues:
            assert queue.semaphore.status(2) is SemaphoreStatus.HOLD
    wanted = expected(frames)
    for protocol in Protocol:
        assert totals(report, protocol) == {name: 20 * count for name, count in wanted[protocol.name].items()}


@pytest.mark.slow
def test_a_capture_ends_with_http_too(tmp_path):
    """Then TCP of no connection goes to the CPU, which kernels do not wait for."""
    frames = mixed(20)
    options = replace(options_for([frame for frame, _ in frames], tmp_path, queues=2), http=True)
    report = run(options)
    wanted = expected(frames)
    assert not report.failures
    assert totals(report, Protocol.UDP) == wanted["UDP"]
    assert totals(report, Protocol.ICMP) == wanted["ICMP"]
    assert report.http is not None
    assert report.http["syns"] > 0
