"""Functions with which programs connect a queue pair."""

from __future__ import annotations

from functools import partial

from ..arguments import instance, octets
from ..interrupts import allowed, deferred
from ..verbs.qp import QP
from .address import check_port, gid_of, own_gid, text_of
from .agent import Agent
from .communication import Communication, Notify
from .connection import DEADLINE, Connection, ConnectionState
from .parameters import ALL, DEFAULT, Parameters
from .path import Path
from .queue_pair import check, to_init
from .times import LINUX, Times


def start_connecting(
    qp: QP, address: str, port: int, private_data: bytes = b"", *, gid_index: int = 0,
    parameters: Parameters = DEFAULT, times: Times = LINUX, port_num: int = 1,
) -> Connection:
    """Connect as `connect` does, without waiting. The event ESTABLISHED, REJECTED or UNREACHABLE follows.

    The queue pair is in INIT until then. If the connection fails, `Connection.close` resets it.
    """
    check(qp)
    instance("parameters", parameters, Parameters)
    instance("times", times, Times)
    private_data = octets("private_data", private_data)
    path = Path(gid_of(address), gid_index)
    own_gid(qp.ctx, port_num, gid_index)
    check_port(port)

    agent = Agent.of(qp.ctx, port_num)

    def begin(notify: Notify) -> Communication:
        own = parameters.terms(qp, port_num, ALL, ALL)
        to_init(qp, port_num, own, parameters)
        with agent.machine() as machine:
            made = machine.connect(path, port, own, notify, private_data=private_data, times=times)
            agent.find(path, partial(machine.no_way, made))
            return made

    return Connection(agent, qp, parameters, text_of(path.gid), port, ConnectionState.CONNECTING, begin)


@deferred()
def connect(
    qp: QP, address: str, port: int, private_data: bytes = b"", *, gid_index: int = 0, timeout: float = DEADLINE,
    parameters: Parameters = DEFAULT, times: Times = LINUX, port_num: int = 1,
) -> Connection:
    """Connect a queue pair in RST or INIT to a port of a peer, and return the connection (`rdma_connect`).

    `address` is an IPv4 or IPv6 address, or a GID; `private_data` is at most 56 bytes for the peer. `gid_index` selects
    this end's address, and `port_num` the device's port.

    Afterwards the queue pair is in RTS. In INIT, receives can be posted before this call. On failure, the queue pair is
    in RST. ConnectionRejectedError if the peer refuses, NotFoundError if its address does not answer, TimedOutError
    without an answer within `timeout` seconds.
    """
    connection = start_connecting(
        qp, address, port, private_data, gid_index=gid_index, parameters=parameters, times=times, port_num=port_num
    )
    try:
        with allowed():
            connection.established(timeout)
    except BaseException:
        connection.close()
        raise
    return connection


async def connect_async(
    qp: QP, address: str, port: int, private_data: bytes = b"", *, gid_index: int = 0, timeout: float = DEADLINE,
    parameters: Parameters = DEFAULT, times: Times = LINUX, port_num: int = 1,
) -> Connection:
    """Connect as `connect` does, in asyncio's event loop. If the task is cancelled, the queue pair is in RST."""
    connection = start_connecting(
        qp, address, port, private_data, gid_index=gid_index, parameters=parameters, times=times, port_num=port_num
    )
    try:
        await connection.established_async(timeout)
    except BaseException:
        connection.close()
        raise
    return connection
