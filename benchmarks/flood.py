"""What a flood of a stranger's datagrams leaves of the traffic between two software NICs on the UDP wire."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import time
from contextlib import ExitStack
from multiprocessing.synchronize import Event

from gpunetio import PortConfig, verbs
from gpunetio.enums import Access, WcStatus, WrOpcode
from gpunetio.memory import HostMemory
from gpunetio.verbs import SendWr, Sge

NEAR, FAR, STRANGER, ELSEWHERE = (f"127.0.99.{n}" for n in range(1, 5))
PORT = 4791
DEPTH = 16
BURST = 0.001  # seconds


def flood(rate: int, on: Event, where: str) -> None:
    """Send 16 bytes to `where`, `rate` times a second while `on` is set.

    They are a BTH for a QP that does not exist, and a wrong ICRC.
    """
    packet = bytes([4, 0, 0xFF, 0xFF]) + (0xABCDE).to_bytes(4, "big") + bytes(8)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, socket.socket(type=socket.SOCK_DGRAM) as unread:
        sock.bind((STRANGER, 0))
        unread.bind((ELSEWHERE, PORT))
        while True:
            on.wait()
            end = time.monotonic() + BURST
            for _ in range(int(rate * BURST)):
                sock.sendto(packet, (where, PORT))
            time.sleep(max(0.0, end - time.monotonic()))


class Traffic:
    """WRITEs from one NIC to the other."""

    def __init__(self, stack: ExitStack, nbytes: int):
        contexts = [
            stack.enter_context(verbs.open(f"soft{n}", port=PortConfig(addresses=(address,), wire="udp")))
            for n, address in enumerate((NEAR, FAR))
        ]
        pds = [stack.enter_context(ctx.create_pd()) for ctx in contexts]
        self._cq = stack.enter_context(contexts[0].create_cq(4 * DEPTH))
        self.far = contexts[1]
        near = stack.enter_context(pds[0].create_qp(sq_wr=2 * DEPTH, rq_wr=1, send_cq=self._cq, receive_cq=self._cq))
        other = stack.enter_context(contexts[1].create_cq(4))
        far = stack.enter_context(pds[1].create_qp(sq_wr=1, rq_wr=1, send_cq=other, receive_cq=other))
        near.connect(far.endpoint(), retry_cnt=7)
        far.connect(near.endpoint(), retry_cnt=7)
        everything = Access.LOCAL_WRITE | Access.REMOTE_WRITE
        source, target = (stack.enter_context(pd.register(HostMemory(nbytes), everything)) for pd in pds)
        self._qp = near
        self._wr = SendWr(
            opcode=WrOpcode.RDMA_WRITE, sges=[Sge(source.address, nbytes, source.lkey)],
            remote_addr=target.address, rkey=target.rkey,
        )

    def run(self, seconds: float) -> float:
        """WRITEs a second."""
        start = time.perf_counter()
        posted = done = 0
        while time.perf_counter() < start + seconds:
            while posted - done < DEPTH:
                self._qp.post_send(self._wr)
                posted += 1
            done += self._take()
        rate = done / (time.perf_counter() - start)
        while done < posted:
            done += self._take()
        return rate

    def _take(self) -> int:
        found = self._cq.poll(DEPTH)
        assert all(completion.status == WcStatus.SUCCESS for completion in found), found
        return len(found)

    def counters(self) -> dict[str, int]:
        """What the flooded NIC has counted."""
        counters = self.far.provider.nic.counters  # type: ignore[attr-defined]
        return {name: int(counters[name]) for name in ("rx_no_qp", "rx_icrc_encapsulated", "rx_accepted")}


def main() -> None:
    """Measure in turns, without and with the flood."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=240_000, help="datagrams a second  [240000]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each half of a round  [2]")
    parser.add_argument("--nbytes", type=int, default=65536, help="of each WRITE  [65536]")
    parser.add_argument("--elsewhere", action="store_true", help="flood a socket that nobody reads: the limit")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    on = context.Event()
    where = ELSEWHERE if options.elsewhere else FAR
    process = context.Process(target=flood, args=(options.rate, on, where), daemon=True)
    process.start()
    quiet, flooded, arrived = [], [], []
    try:
        with ExitStack() as stack:
            traffic = Traffic(stack, options.nbytes)
            traffic.run(0.5)
            for _ in range(options.rounds):
                quiet.append(traffic.run(options.seconds))
                before = traffic.counters()["rx_no_qp"]
                on.set()
                flooded.append(traffic.run(options.seconds))
                on.clear()
                arrived.append((traffic.counters()["rx_no_qp"] - before) / options.seconds)
            counters = traffic.counters()
    finally:
        process.terminate()
        process.join()
    shares = [with_flood / without for with_flood, without in zip(flooded, quiet, strict=True)]
    result = {
        "nbytes": options.nbytes, "quiet_per_s": statistics.median(quiet), "flooded_per_s": statistics.median(flooded),
        "share": statistics.median(shares), "least_share": min(shares), "strangers_per_s": statistics.median(arrived),
        **counters,
    }
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:<22} {value:>14,.2f}" if isinstance(value, float) else f"{name:<22} {value:>14,}")


if __name__ == "__main__":
    main()
