"""What `gpunetio packet_processing` does for real clients, beside others that do the same: pings, packets, pages.

It runs itself again in a network namespace of its own. Without root, that is one of a user namespace, where testpmd and
TAP devices may be out of reach.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

PEER = Path(__file__).with_name("packet_processing_peer.c")
INSIDE, ALONE = "--inside", "--icmp-alone"
TAP, NIC, HERE, THERE = "bench0", "soft0", "10.77.9.2", "10.77.9.1"
TESTPMD = "dpdk-testpmd"
PATIENCE = 120  # seconds that a program has to start, or to end
STARTING = 3.0  # seconds that testpmd has to start
LARGE = 64 << 10  # bytes of the large page
SMALL = b"<html><body>A page of a GPU</body></html>\n"
CONNECTIONS = 50
NGINX = """
daemon off; pid {folder}/pid; error_log /dev/null; worker_processes 1;
events {{ worker_connections 1024; }}
http {{ access_log off; sendfile on; keepalive_requests 1000000;
  server {{ listen 127.0.0.1:80; root {folder}/pages; }} }}
"""

Program = Callable[[Path], AbstractContextManager[None]]  # runs in a context; the path is the folder of files


# --- what is measured ------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """What all runs share: how much a run does, and the files in `folder`."""

    folder: Path
    pings: int
    packets: int
    seconds: float
    requests: int

    def ping(self, *options: str) -> list[float]:
        """Return round trips in µs."""
        done = subprocess.run(
            ["ping", "-n", "-c", str(self.pings), *options, THERE], capture_output=True, text=True, timeout=PATIENCE
        )
        return [1e3 * float(found) for found in re.findall(r"time=([\d.]+) ms", done.stdout)]

    def flood(self) -> float:
        """Return µs of a ping of `ping -f`."""
        command = ["ping", "-f", "-q", "-c", str(self.packets // 100), THERE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        found = re.search(r" (\d+) received, .*time (\d+)ms", done.stdout)
        assert found, done.stdout
        return 1e3 * int(found[2]) / int(found[1])

    def pinged(self, answering: Program) -> dict[str, float]:
        """Return what pings take that a program answers, in µs."""
        with answering(self.folder):
            trips = sorted(self.ping("-i", "0.002"))
            if len(trips) < self.pings:
                raise SystemExit(f"{self.pings - len(trips)} of {self.pings} pings were not answered")
            return {"median": statistics.median(trips), "p99": trips[len(trips) * 99 // 100], "flood": self.flood()}

    def counted(self, queues: int) -> dict[str, float]:
        """Return the Mpps of UDP that kernels count from a capture file."""
        return {"Mpps": _rate(_run("-q", str(queues), "--replay", str(self.folder / "udp.pcap"), "--json"))}

    def testpmd(self) -> dict[str, float]:
        """Return the Mpps that testpmd drops from the capture file, which its driver keeps in memory."""
        command = [
            TESTPMD, "-l", "0,1", "--main-lcore=0", "--no-huge", "-m", "512", "--no-pci", "--no-telemetry",
            f"--file-prefix=gpunetio{os.getpid()}", f"--vdev=net_pcap0,rx_pcap={self.folder}/short.pcap,infinite_rx=1",
            "--", "--total-num-mbufs=65536", "--auto-start", "--no-mlockall", "--forward-mode=rxonly",
        ]
        run = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            time.sleep(STARTING + self.seconds)
            out, _ = run.communicate("\n", timeout=PATIENCE)
        finally:
            run.kill()
        counts = [int(found) for found in re.findall(r"RX-packets:\s*(\d+)", out)]
        if not counts:
            raise SystemExit(f"{TESTPMD} has not run:\n{out}")
        return {"Mpps": counts[0] / (STARTING + self.seconds) / 1e6}

    def served(self, serving: Program, at: str, page: str, *options: str) -> dict[str, float]:
        """Return the requests per second of `ab`. None may fail."""
        with serving(self.folder):
            count = self.requests // (4 if page == "large.html" else 1)
            done = subprocess.run(
                ["ab", "-q", "-n", str(count), "-c", str(CONNECTIONS), *options, f"http://{at}/{page}"],
                capture_output=True, text=True, timeout=PATIENCE,
            )
        rate = re.search(r"Requests per second:\s*([\d.]+)", done.stdout)
        if not rate or "Failed requests:        0" not in done.stdout or "Non-2xx" in done.stdout:
            raise SystemExit(f"ab has failed:\n{done.stdout}{done.stderr}")
        return {"requests/s": float(rate[1])}


# --- programs --------------------------------------------------------------------------------------------------------


def _gpunetio(*words: str) -> list[str]:
    return [sys.executable, "-m", "gpunetio", *words]


def _run(*words: str) -> dict[str, object]:
    """Run the application to its end. Return what it has counted."""
    command = _gpunetio("packet_processing", "-g", "host", "-n", NIC, *words)
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout)


def _rate(report: dict[str, object]) -> float:
    queues: list[dict[str, dict[str, int]]] = report["queues"]  # type: ignore[assignment]
    total = sum(queue["counts"]["total"] for queue in queues if queue["protocol"] == "UDP")
    return total / float(report["seconds"]) / 1e6  # type: ignore[arg-type]


@contextmanager
def _process(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    try:
        yield run
    finally:
        run.send_signal(signal.SIGINT)
        try:
            run.wait(PATIENCE)
        finally:
            run.kill()


@contextmanager
def _on_tap(command: Sequence[str]) -> Iterator[None]:
    """Run a program that makes the TAP device, and wait until it answers pings."""
    with _process(command):
        end = time.monotonic() + PATIENCE
        for words in (f"address add {HERE}/24 dev {TAP}", f"link set {TAP} up"):
            while subprocess.run(["ip", *words.split()], stderr=subprocess.DEVNULL).returncode:
                _wait(end)
        while subprocess.run(["ping", "-q", "-c", "1", "-W", "1", THERE], stdout=subprocess.DEVNULL).returncode:
            _wait(end)
        yield


def _wait(end: float) -> None:
    if time.monotonic() > end:
        raise SystemExit(f"the program at {TAP} has not begun to answer")
    time.sleep(0.05)


def c_peer(folder: Path) -> AbstractContextManager[None]:
    """The program in C."""
    return _on_tap([str(folder / "peer"), TAP, THERE])


def icmp_alone(folder: Path) -> AbstractContextManager[None]:
    """The application's kernel for ICMP, and no other."""
    return _on_tap([sys.executable, __file__, ALONE])


def application(folder: Path) -> AbstractContextManager[None]:
    """The application with all kernels: UDP, TCP, ICMP, HTTP."""
    pages = str(folder / "pages")
    words = ("-q", "1", "-s", "--pages", pages, "--wire", f"tap:{TAP}", "--address", THERE, "--json")
    return _on_tap(_gpunetio("packet_processing", "-g", "host", "-n", NIC, *words))


@contextmanager
def nginx(folder: Path) -> Iterator[None]:
    """nginx in the same namespace: clients reach it over the loopback interface."""
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder))
    with _process(["nginx", "-c", str(folder / "nginx.conf")]):
        time.sleep(1)
        yield


def answer_alone() -> None:
    """Answer pings by one kernel, until SIGINT."""
    from gpunetio import Gpu, PortConfig, open
    from gpunetio.eth import EthTxq, query_caps
    from gpunetio.flow import FlowPort, match
    from gpunetio.packet_processing.app import address_of
    from gpunetio.packet_processing.queues import TXQ_DEPTH, Protocol, ReceiveQueue
    from gpunetio.packet_processing.receive_icmp import receive_icmp
    from gpunetio.samples.until_stopped import StopWord

    with ExitStack() as undo:
        ctx = undo.enter_context(open(NIC, port=PortConfig(wire=f"tap:{TAP}", addresses=(THERE,))))
        gpu, pd = undo.enter_context(Gpu("host")), ctx.create_pd()
        queue, txq = ReceiveQueue(gpu, pd, Protocol.ICMP, 0, undo), undo.enter_context(EthTxq(gpu, pd, TXQ_DEPTH))
        station = int.from_bytes(query_caps(ctx).mac, "big"), int(address_of(ctx))
        stop = StopWord(gpu)
        launch = receive_icmp[1, 1, gpu](stop.memory, *queue.arguments, txq, *station)
        port = undo.enter_context(FlowPort(ctx))
        undo.enter_context(port.steer(match.ipv4() & match.icmp(), to=queue.rxq))
        stop.follow(launch)


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A job and its peer, which take turns. `goal` is a bound of the ratio, or of the figure if it has a unit."""

    job: str
    run: Callable[[], dict[str, float]]
    peer: str
    run_peer: Callable[[], dict[str, float]] | None
    goals: dict[str, str]
    ours: dict[str, list[float]] = field(default_factory=dict)
    theirs: dict[str, list[float]] = field(default_factory=dict)

    def measure(self) -> None:
        for run, into in ((self.run, self.ours), (self.run_peer, self.theirs)):
            for name, value in (run() if run else {}).items():
                into.setdefault(name, []).append(value)


def rows(bench: Bench) -> list[Row]:
    """The jobs."""
    ping_goals = [{"median": f"≤ {most}", "p99": "", "flood": f"≤ {most}"} for most in (1.3, 3)]
    c: Callable[[], dict[str, float]] = lambda: bench.pinged(c_peer)  # noqa: E731
    with_testpmd = bench.testpmd if shutil.which(TESTPMD) else None
    made = [
        Row("ping, the kernel of ICMP alone", lambda: bench.pinged(icmp_alone), "C", c, ping_goals[0]),
        Row("ping, all kernels", lambda: bench.pinged(application), "C", c, ping_goals[1]),
        Row("UDP of 64 B, capture file, 1 queue", lambda: bench.counted(1), "testpmd rxonly", with_testpmd,
            {"Mpps": "≥ 3 Mpps"}),
        Row("UDP of 64 B, capture file, 2 queues", lambda: bench.counted(2), "", None, {"Mpps": "≥ 3 Mpps"}),
    ]
    for what, page, options in (
        ("keep-alive, small page", "index.html", ("-k",)), ("keep-alive, 64 KiB", "large.html", ("-k",)),
        ("a connection each, small page", "index.html", ()),
    ):
        made.append(Row(
            f"HTTP, {what}", lambda page=page, options=options: bench.served(application, THERE, page, *options),
            "nginx", lambda page=page, options=options: bench.served(nginx, "127.0.0.1", page, *options),
            {"requests/s": "≥ 0.5"},
        ))
    return made


def show(results: Sequence[Row]) -> None:
    """Print a table of medians."""
    table = Table("job", "figure", "ours", "theirs", "peer", "ratio", "goal", box=box.SIMPLE_HEAD)
    for column in (table.columns[2], table.columns[3], table.columns[5]):
        column.justify = "right"
    for row in results:
        for name, samples in row.ours.items():
            ours = statistics.median(samples)
            theirs = statistics.median(row.theirs[name]) if name in row.theirs else None
            unit = "µs" if name in ("median", "p99", "flood") else ""
            table.add_row(
                row.job, f"{name}, {unit}" if unit else name, f"{ours:,.2f}", f"{theirs:,.2f}" if theirs else "",
                row.peer if theirs else "", f"{ours / theirs:.2f}" if theirs else "", row.goals[name],
            )
    Console(width=120).print(table)


def prepare(bench: Bench) -> None:
    """Compile the peer; write pages and captures."""
    from scapy.layers.inet import IP, UDP
    from scapy.layers.l2 import Ether
    from scapy.utils import RawPcapWriter

    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["gcc", "-O2", str(PEER), "-o", str(bench.folder / "peer")], check=True)
    pages = bench.folder / "pages"
    pages.mkdir(mode=0o755)
    bench.folder.chmod(0o755)  # nginx reads as another user
    (pages / "index.html").write_bytes(SMALL)
    (pages / "large.html").write_bytes(b"0123456789abcdef" * (LARGE // 16))
    frames = [  # 64 B with the check sequence, of many flows
        bytes(Ether(dst="02:00:00:00:00:01", src="02:00:00:00:00:02") / IP(src=f"10.0.{n >> 8}.{n & 255}", dst=THERE)
              / UDP(sport=1024 + n, dport=5000) / bytes(18))
        for n in range(1024)
    ]
    for name, count in (("udp.pcap", bench.packets), ("short.pcap", len(frames))):
        with RawPcapWriter(str(bench.folder / name), linktype=1) as writer:
            writer.write_header(None)
            whole = b"".join(struct.pack("<IIII", 0, 0, len(each), len(each)) + each for each in frames)
            for _ in range(count // len(frames)):
                writer.f.write(whole)


def inside(arguments: argparse.Namespace) -> None:
    """Measure. This namespace is ours alone."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), arguments.pings, arguments.packets, arguments.seconds, arguments.requests)
        prepare(bench)
        results = [row for row in rows(bench) if arguments.only in row.job]
        for number in range(arguments.rounds):
            for row in results:
                load = os.getloadavg()[0]
                print(f"round {number + 1}: {row.job}, load {load:.1f}", file=sys.stderr, flush=True)
                row.measure()
    if arguments.json:
        print(json.dumps({row.job: {"ours": row.ours, row.peer: row.theirs} for row in results}))
    else:
        show(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pings", type=int, default=2000, help="of a run, 2 ms apart")
    parser.add_argument("--packets", type=int, default=4_000_000, help="of the capture file; a flood has a hundredth")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a run of testpmd")
    parser.add_argument("--requests", type=int, default=20_000, help="of a run of ab; a quarter of the large page")
    parser.add_argument("--only", default="", metavar="TEXT", help="only jobs with this text in their names")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(ALONE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.icmp_alone:
        answer_alone()
    elif arguments.inside:
        inside(arguments)
    else:
        namespace: list[str] = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-Urn"]
        raise SystemExit(subprocess.run([*namespace, sys.executable, *sys.argv, INSIDE]).returncode)


if __name__ == "__main__":
    main()
