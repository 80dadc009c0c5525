"""The application with kernels on a GPU: counts of captures, pings, and pages for a station made by hand."""

import pytest

from gpunetio.packet_processing.queues import Protocol
from nic_rig import until
from packet_mix import mixed
from packet_processing_rig import expected, replayed, totals
from packet_server import READY, PacketServer, make_pages
from stream_end import StreamEnd
from tcp_station import Station
from tools import running

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("queues", [1, 4])
def test_counts(tmp_path, queues, request):
    if request.config.getoption("--gpu-engine"):
        pytest.skip("frames of a capture need an engine on the CPU")
    frames, times = mixed(20), 20
    report = replayed([frame for frame, _ in frames], tmp_path, queues, times, gpu="0")
    wanted = expected(frames)
    for protocol in Protocol:
        assert totals(report, protocol) == {name: times * count for name, count in wanted[protocol.name].items()}


@pytest.mark.parametrize("queues", [1, 4])
def test_http(tmp_path, queues):
    """All pages on each of several connections at once, and their ends."""
    (tmp_path / "pages").mkdir()
    pages = make_pages(tmp_path / "pages")
    cable = tmp_path / "cable"
    server = PacketServer(f"unix:{cable}", "--pages", tmp_path / "pages", gpu="0", queues=queues)
    with running(server):
        server.until(READY)
        until(cable.exists, "the wire", 60)
        end = StreamEnd(cable)
        station = Station(end.sock)
        clients = [station.client().open() for _ in range(40)]
        for path, data in pages.items():
            for client in clients:
                client.get(path)
            for client in clients:
                status, _, body = client.answer()
                assert (status, body) == (200, data), path
        for client in clients:
            client.close()
            assert client.finished
        end.close()
        server.stop()
