"""What the application prints: the original's lines, a table, JSON, and Prometheus' text format."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from shutil import rmtree

import pytest
from click.testing import CliRunner
from scapy.layers import inet

from gpunetio.cli import app
from gpunetio.cli.prometheus import application_exposition, exporter
from gpunetio.packet_processing.dashboard import COLUMNS, rows
from gpunetio.packet_processing.queues import Protocol
from gpunetio.packet_processing.statistics import REPLAY, RULES, KernelReport, QueueReport, Report, lines
from json_schema import mistakes, schema
from packet_processing_rig import ip as over
from packet_processing_rig import l2 as under
from packet_processing_rig import options_for

UDP = {"dns": 2, "dns_bytes": 125_000_000, "others": 3, "others_bytes": 250_000_000, "total": 5,
       "total_bytes": 375_000_000}
TCP = {"http": 1, "http_head": 2, "http_get": 3, "http_post": 4, "tcp_syn": 5, "tcp_fin": 6, "tcp_ack": 7, "others": 8,
       "total": 36}
HTTP = {
    "requests": 5, "ok": 4, "bad_request": 0, "not_found": 1, "not_allowed": 0, "too_large": 0, "opened": 2, "ended": 1,
    "retransmitted": 0, "dropped": 3, "syns": 2, "refused": 0, "expired": 0, "resets": 0, "open": 1, "half_open": 0,
}
ICMP = {"answered": 9, "refused": 0, "others": 0, "total": 9}
KERNELS = (KernelReport("HTTP server", 40, 3, 0.5), KernelReport("TCP handshakes 0", 8, 2, 1.0))


def report(seconds: float = 2.0, times: int = 1, http: Mapping[str, int] | None = None, **failures: str) -> Report:
    """Two queues, of UDP and TCP, and that of ICMP, which a card does not tell about."""
    queues = tuple(
        QueueReport(protocol, number, 7, {name: times * n for name, n in counts.items()}, dropped, seconds / 4)
        for protocol, number, counts, dropped in (
            (Protocol.UDP, 0, UDP, 0), (Protocol.UDP, 1, dict.fromkeys(UDP, 0), 6), (Protocol.TCP, 0, TCP, 0),
            (Protocol.ICMP, 0, ICMP, None),
        )
    )
    return Report(seconds, queues, failures, http, KERNELS if http else (), "soft0")


def test_the_lines_of_the_original():
    assert [*lines(report())] == [
        "",
        "Seconds 2",
        "[UDP] QUEUE: 0 DNS: 2 DNS_BW: 0.500 Gbps OTHER: 3 OTHER_BW: 1.000 Gbps TOTAL: 5 TOTAL_BW: 1.500 Gbps",
        "[UDP] QUEUE: 1 DNS: 0 DNS_BW: 0.000 Gbps OTHER: 0 OTHER_BW: 0.000 Gbps TOTAL: 0 TOTAL_BW: 0.000 Gbps",
        "[TCP] QUEUE: 0 HTTP: 1 HTTP HEAD: 2 HTTP GET: 3 HTTP POST: 4 TCP [SYN: 5 FIN: 6 ACK: 7] OTHER: 8 TOTAL: 36",
    ]


def test_the_rows_of_the_dashboard():
    """Rates are those since the report before."""
    found = [*rows(report(4.0, 3, HTTP, **{"TCP queue 0": "why"}), report())]
    assert {len(row) for row in found} == {len(COLUMNS)}
    assert found == [
        ("UDP 0", "15", "5", "3.000", "0", "25%", "dns 6, others 9"),
        ("UDP 1", "0", "0", "0.000", "6", "25%", ""),
        ("TCP 0", "108", "36", "", "0", "25%",
         "http 3, http_head 6, http_get 9, http_post 12, tcp_syn 15, tcp_fin 18, tcp_ack 21, others 24"),
        ("ICMP 0", "27", "9", "", "", "25%", "answered 27"),
        ("HTTP server", "40", "20", "", "3", "25%", ""),
        ("TCP handshakes 0", "8", "4", "", "2", "50%", ""),
        ("HTTP requests", "5", "2", "", "", "", "ok 4, not_found 1, opened 2, ended 1, syns 2, open 1"),
        ("TCP queue 0 has failed", "", "", "", "", "", "why"),
    ]
    assert next(rows(report(), None))[:4] == ("UDP 0", "5", "2", "1.500")


def test_the_text_for_prometheus():
    text = application_exposition(report(http=HTTP, **{"TCP queue 0": "why", RULES: "why"}))
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    own = 'device="soft0"'
    assert samples[f'gpunetio_processed_packets_total{{{own},protocol="UDP",queue="0"}}'] == "5"
    assert samples[f'gpunetio_processed_bytes_total{{{own},protocol="UDP",queue="0"}}'] == "375000000"
    assert samples[f'gpunetio_processed_http_get_total{{{own},protocol="TCP",queue="0"}}'] == "3"
    assert samples[f'gpunetio_processed_dropped_total{{{own},protocol="UDP",queue="1"}}'] == "6"
    assert samples[f'gpunetio_processed_answered_total{{{own},protocol="ICMP",queue="0"}}'] == "9"
    assert samples[f"gpunetio_http_requests_total{{{own}}}"] == "5"
    assert samples[f"gpunetio_http_open_connections{{{own}}}"] == "1"
    assert samples[f'gpunetio_http_kernel_packets_total{{{own},kernel="HTTP server"}}'] == "40"
    assert samples[f'gpunetio_http_kernel_dropped_total{{{own},kernel="TCP handshakes 0"}}'] == "2"
    assert samples[f'gpunetio_http_kernel_busy_seconds_total{{{own},kernel="TCP handshakes 0"}}'] == "1.0"
    failed = {name: value for name, value in samples.items() if name.startswith("gpunetio_kernel_failed{")}
    assert failed == {
        f'gpunetio_kernel_failed{{{own},kernel="{kernel}"}}': str(int(kernel == "TCP queue 0"))
        for kernel in ("UDP queue 0", "UDP queue 1", "TCP queue 0", "ICMP queue 0", "HTTP server", "TCP handshakes 0")
    }
    assert samples[f"gpunetio_http_rules_failed{{{own}}}"] == "1"
    assert not any("dropped" in name and "ICMP" in name for name in samples)  # a card does not tell
    helped = re.findall(r"^# HELP (\S+) \S", text, re.MULTILINE)
    typed = dict(re.findall(r"^# TYPE (\S+) (counter|gauge)$", text, re.MULTILINE))
    assert helped == [*typed] == list(dict.fromkeys(name.partition("{")[0] for name in samples))
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in typed.items())


def test_no_sample_of_two_applications_is_the_same():
    """The textfile collector of node exporter reads the files of all, and refuses samples that are twice there."""
    texts = [application_exposition(replace(report(http=HTTP), device=device)) for device in ("soft0", "soft1")]
    samples = [line.rsplit(" ", 1)[0] for text in texts for line in text.splitlines() if not line.startswith("#")]
    assert len(set(samples)) == len(samples) > 0


def test_a_file_that_cannot_be_written_later_is_reported_once(tmp_path, capsys):
    """The application goes on, and writes the file again when that is possible."""
    path = tmp_path / "folder" / "counts"
    path.parent.mkdir()
    export = exporter(path)
    assert path.read_text() == ""
    for _ in range(2):
        export(report())
        assert path.read_text() == application_exposition(report())
        rmtree(path.parent)
        export(report())
        export(report())
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"gpunetio: error: cannot write the counts {path}.new: No such file or directory; ")
        path.parent.mkdir()


@pytest.mark.parametrize("http", [None, HTTP])
def test_the_document(http):
    document = json.loads(json.dumps(report(http=http, udp="why").document()))
    assert mistakes(document, schema("packet_processing")) == []
    assert (document["failures"], document["http"]) == ({"udp": "why"}, http)
    server = {"name": "HTTP server", "packets": 40, "dropped": 3, "busy_seconds": 0.5}
    assert document["kernels"][:1] == ([server] if http else [])


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def argv(tmp_path_factory) -> list[str]:
    """A run over a capture of three packets."""
    frames = [under() / over() / rest for rest in (inet.UDP(dport=53), inet.TCP(flags="S"), inet.ICMP())]
    path = options_for(frames, tmp_path_factory.mktemp("capture")).replay
    return ["packet_processing", "-g", "host", "-n", "soft0", "-q", "1", "--replay", str(path),
            "--address", "192.0.2.1"]


@pytest.mark.soft_nic
def test_what_it_says(argv, tmp_path):
    done = CliRunner().invoke(app, [*argv, "--prometheus", str(tmp_path / "counts")], catch_exceptions=False)
    assert done.exit_code == 0
    said = done.stdout.splitlines()
    assert said[0].startswith("gpunetio version: ")
    assert said[1:7] == [
        "Options enabled:", "\tGPU host", "\tNIC soft0", "\tGPU Rx queues 1", "\tGPU HTTP server enabled No",
        "Address 192.0.2.1. Ctrl+C ends the application",
    ]
    assert said[-2:] == ["GPU work ended", "Application finished successfully"]
    assert "[UDP] QUEUE: 0 DNS: 1 DNS_BW" in said[-5]
    assert said[-4].endswith("TCP [SYN: 1 FIN: 0 ACK: 0] OTHER: 0 TOTAL: 1")
    assert said[-3].startswith("[REPLAY] RECORDS: ")
    text = (tmp_path / "counts").read_text()
    assert 'answered_total{device="soft0",protocol="ICMP",queue="0"} 1\n' in text
    assert [path.name for path in tmp_path.iterdir()] == ["counts"]


@pytest.mark.soft_nic
def test_json(argv):
    done = CliRunner().invoke(app, [*argv, "--json"], catch_exceptions=False)
    document = json.loads(done.stdout)
    assert mistakes(document, schema("packet_processing")) == []
    assert [queue["counts"]["total"] for queue in document["queues"]] == [1, 1, 1]
    assert (document["failures"], document["http"], document["kernels"]) == ({}, None, [])


@pytest.mark.soft_nic
def test_a_dashboard_without_a_terminal(argv):
    done = CliRunner().invoke(app, [*argv, "--dashboard"], catch_exceptions=False)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["UDP", "0", "1"] in [line[:3] for line in lines]
    assert ["ICMP", "0", "1"] in [line[:3] for line in lines]


@pytest.mark.parametrize("more, words", [
    (["--json", "--dashboard"], "exclude each other"), (["-q", "5"], "1<=x<=4"), (["-q", "0"], "1<=x<=4"),
    (["--pages", "."], "--pages needs -s"), (["--prometheus", "/nowhere/counts"], "cannot write the counts /nowhere/"),
])
def test_what_it_refuses_before_it_starts(argv, more, words):
    done = CliRunner().invoke(app, [*argv, *more])
    assert (done.exit_code != 0, done.stdout) == (True, "")
    assert words in done.stderr


@pytest.mark.soft_nic
def test_a_replay_refuses_another_wire(argv):
    done = CliRunner().invoke(app, [*argv, "--wire", "tap:x"])
    assert done.exit_code == 1
    assert "needs no wire" in done.stderr


@pytest.mark.soft_nic
def test_a_port_without_ethernet(argv):
    """That is what is wrong, and not that its address is none of Ethernet."""
    done = CliRunner().invoke(app, [*argv[:7], "--link-layer", "infiniband", "--address", "192.0.2.1"])
    assert done.exit_code == 1
    assert "has an InfiniBand port" in done.stderr


@pytest.mark.soft_nic
def test_addresses_at_which_nobody_is_answered(argv):
    done = CliRunner().invoke(app, [*argv, "--address", "192.0.2.3", "--address", "2001:db8::1"])
    assert done.exit_code == 0
    assert "The application answers only at 192.0.2.1, not at 192.0.2.3, 2001:db8::1" in done.stdout.splitlines()


@pytest.mark.soft_nic
def test_a_folder_without_pages(argv, tmp_path):
    (tmp_path / ".hidden").touch()
    done = CliRunner().invoke(app, [*argv, "-s", "--pages", str(tmp_path)])
    assert done.exit_code == 0
    assert f"{tmp_path} has no files to serve, so every request gets the status 404" in done.stdout.splitlines()


CUT = "ends in the middle of the record at byte "


@pytest.mark.soft_nic
@pytest.mark.parametrize("times", [0, 1, 5000], ids=["first", "second", "later"])
def test_a_capture_that_was_cut(tmp_path, times):
    """What comes before the cut counts, and is reported before the error: also more than fits into a queue at once."""
    options = options_for([under() / over() / inet.UDP(dport=53)], tmp_path, times=times + 1)
    assert options.replay
    os.truncate(options.replay, options.replay.stat().st_size - 1)
    argv = ["packet_processing", "-g", "host", "-n", "soft0", "-q", "1", "--replay", str(options.replay)]
    done = CliRunner().invoke(app, argv)
    assert done.exit_code == 1
    assert f"[UDP] QUEUE: 0 DNS: {times} DNS_BW" in done.stdout
    assert "successfully" not in done.stdout
    assert "gpunetio: error: Replay has failed: " in done.stderr
    assert CUT in done.stderr
    done = CliRunner().invoke(app, [*argv, "--json"])
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert mistakes(document, schema("packet_processing")) == []
    assert [queue["counts"]["total"] for queue in document["queues"]] == [times, 0, 0]
    assert CUT in document["failures"][REPLAY]


@pytest.mark.soft_nic
def test_a_missing_file(argv, tmp_path):
    argv = [*argv[:8], str(tmp_path / "none")]
    done = CliRunner().invoke(app, argv)
    assert done.exit_code == 1
    assert "none" in done.stderr
