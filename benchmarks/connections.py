"""Connections per second that the connection manager makes and ends between two processes.

    python benchmarks/connections.py [CONNECTIONS [AT_A_TIME]]

Each connection has its REQ, REP, RTU, DREQ and DREP, and both queue pairs go through INIT, RTR and RTS to ERR, and back
to RST. The client keeps AT_A_TIME of them under way.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection as Pipe

from gpunetio import cm, verbs

PORT = 7174
ROUNDS = 3
PATIENCE = 120.0


def queue_pairs(ctx: verbs.Context, count: int) -> list[verbs.QP]:
    cq, pd = ctx.create_cq(16), ctx.create_pd()
    return [pd.create_qp(sq_wr=1, rq_wr=1, send_cq=cq, receive_cq=cq) for _ in range(count)]


async def serve(listener: cm.Listener, qp: verbs.QP) -> None:
    """Accept connections, one after the other, until there is none for a while."""
    while True:
        with (await listener.accept_async(PATIENCE)).accept(qp) as connection:
            await connection.disconnected_async(PATIENCE)
        qp.reset()


async def serve_all(ctx: verbs.Context, at_a_time: int, ready: Pipe) -> None:
    with cm.listen(ctx, PORT) as listener:
        workers = [asyncio.create_task(serve(listener, qp)) for qp in queue_pairs(ctx, at_a_time)]
        ready.send(listener.address)
        await asyncio.to_thread(ready.recv)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def server(at_a_time: int, ready: Pipe) -> None:
    with verbs.open("soft1") as ctx:
        asyncio.run(serve_all(ctx, at_a_time, ready))


async def ask(qp: verbs.QP, address: str, count: int) -> None:
    for _ in range(count):
        with await cm.connect_async(qp, address, PORT, timeout=PATIENCE) as connection:
            await connection.disconnect_async(timeout=PATIENCE)
        qp.reset()


async def ask_all(qps: list[verbs.QP], address: str, count: int) -> None:
    await asyncio.gather(*(ask(qp, address, count // len(qps)) for qp in qps))


def main(connections: int = 1000, at_a_time: int = 8) -> None:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=server, args=(at_a_time, there))
    process.start()
    with verbs.open("soft0") as ctx:
        address, qps, rates = here.recv(), queue_pairs(ctx, at_a_time), []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            asyncio.run(ask_all(qps, address, connections))
            rates.append(connections / (time.perf_counter() - began))
            print(f"{rates[-1]:.0f} connections/s up and down")
        here.send("enough")
        process.join()
    print(f"best of {ROUNDS}: {max(rates):.0f} connections/s, {at_a_time} at a time")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
