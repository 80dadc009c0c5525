"""Connections by address and port: callbacks, waits, coroutines; what kernels see of them."""

import asyncio
import itertools
import logging

import pytest

from gpunetio import Access, Gpu, device, verbs
from gpunetio.cm.address import text_of
from gpunetio.core import ProgressEngine
from gpunetio.errors import (
    BadStateError,
    ConnectionEndedError,
    ConnectionRejectedError,
    DocaError,
    FullError,
    InvalidValueError,
    TimedOutError,
)
from gpunetio.rdma import ConnectionState, Rdma, RdmaConnection
from nic_rig import until
from rdma_rig import Ends

PORT = 13579
EIO = device.EIO


@pytest.fixture
def address(pd: verbs.PD) -> str:
    return text_of(pd.ctx.query_gid(1, 0))


def test_callbacks(pd, address):
    """Each end is told of what becomes of its connection, in its own progress."""
    told: list[tuple[str, object]] = []

    def asked(connection):
        assert connection.state is ConnectionState.REQUESTED
        assert connection.private_data.rstrip(b"\0") == b"hello"
        connection.accept(b"welcome")

    server, client, engine = Rdma(pd, max_connections=2), Rdma(pd), ProgressEngine()
    for name, rdma, request in (("server", server, asked), ("client", client, None)):
        engine.connect(rdma)
        rdma.set_connection_callbacks(
            request=request,
            established=lambda connection, name=name: told.append((f"{name} established", connection.id)),
            disconnect=lambda connection, name=name: told.append((f"{name} disconnect", connection.id)),
            failure=lambda connection, error, name=name: told.append((f"{name} failure", type(error))),
        )
    with server, client:
        server.listen(PORT)
        connection = client.connect_to(address, PORT, b"hello")
        engine.progress_until(lambda: len(told) == 2, 10, "both callbacks")
        assert sorted(told) == [("client established", 0), ("server established", 0)]
        assert connection.private_data.rstrip(b"\0") == b"welcome"
        with pytest.raises(BadStateError, match="RUNNING"):
            server.set_connection_callbacks()
        told.clear()
        connection.disconnect()
        engine.progress_until(lambda: len(told) == 2, 10, "both callbacks")
        assert sorted(told) == [("client disconnect", 0), ("server disconnect", 0)]
        connection.close()
        server.stop_listening(PORT)
        client.connect_to(address, PORT)
        told.clear()
        engine.progress_until(lambda: bool(told), 10, "a callback")
        assert told == [("client failure", ConnectionRejectedError)]


def test_waits(pd, address):
    """Without callbacks: the next request is waited for, and what is refused says so."""
    engine, server, client = ProgressEngine(), Rdma(pd), Rdma(pd, max_connections=3)
    engine.connect(server)
    engine.connect(client)
    with server, client:
        server.listen(PORT)
        with pytest.raises(InvalidValueError, match="already"):
            server.listen(PORT)
        first = client.connect_to(address, PORT, b"first")
        request = server.next_request(10)
        with pytest.raises(FullError):
            server.export()
        second = client.connect_to(address, PORT)  # there is room for one
        with pytest.raises(ConnectionRejectedError):
            second.established(10)
        request.reject(b"no")
        assert request.state is ConnectionState.CLOSED
        with pytest.raises(ConnectionRejectedError):
            first.established(10)
        third = client.connect_to(address, PORT)
        request = server.next_request(10)
        request.accept()
        third.established(10)
        request.established(10)
        assert request.peer == third.peer == address
        request.close()
        third.disconnected(10)
        assert third.state is ConnectionState.DISCONNECTED


def test_requests_that_wait_no_more(pd, address):
    """They leave their room to others. Only a program that has heard of one is told."""
    failed: list[tuple[RdmaConnection, DocaError]] = []
    engine, server, client = ProgressEngine(), Rdma(pd), Rdma(pd)
    server.set_connection_callbacks(failure=lambda connection, error: failed.append((connection, error)))
    engine.connect(server)
    engine.connect(client)

    def failure(of: RdmaConnection) -> str:
        engine.progress_until(lambda: bool(failed), 10, "the failure")
        ((connection, error),) = failed
        failed.clear()
        assert connection is of
        assert connection.state is ConnectionState.CLOSED
        assert isinstance(error, ConnectionEndedError)
        assert not server.connections
        return str(error)

    with server, client:
        server.listen(PORT)
        asking = client.connect_to(address, PORT)  # the server knows it, and nobody has asked for it
        engine.progress_until(lambda: bool(server.connections), 10, "the request")
        (unseen,) = server.connections
        asking.close()
        until(lambda: unseen.abandoned, "the peer gives up", 10)
        with pytest.raises(TimedOutError, match=f"^a request at {address} port {PORT} did not come within 0.01 s$"):
            server.next_request(0.01)
        assert unseen.state is ConnectionState.CLOSED
        assert not failed

        asking = client.connect_to(address, PORT)
        request = server.next_request(10)
        asking.close()
        assert failure(request).endswith(f"{address} has given up its request for port {PORT}")

        asking = client.connect_to(address, PORT)
        request = server.next_request(10)
        server.stop_listening(PORT)
        assert f"nobody listens at port {PORT}" in failure(request)
        with pytest.raises(ConnectionRejectedError):
            asking.established(10)
        asking.close()

        server.listen(PORT)
        asking = client.connect_to(address, PORT)
        request = server.next_request(10)
        request.accept()
        asking.established(10)
        request.established(10)


def test_waits_say_what_did_not_come(pd, address):
    with Rdma(pd) as server, Rdma(pd) as client:
        with pytest.raises(TimedOutError, match=r"^a request \(RDMA on soft0 listens at no port\) did not come"):
            server.next_request(0.01)
        server.listen(PORT)
        connection = client.connect_to(address, PORT)
        with pytest.raises(TimedOutError, match=f"^an answer of {address} port {PORT} did not come within 0.01 s"):
            connection.established(0.01)
        there = server.next_request(10)
        there.accept()
        connection.established(10)
        there.established(10)
        with pytest.raises(TimedOutError, match=f"^the end of connection 0 of .* with {address} port {PORT} did"):
            connection.disconnected(0.01)
    with Rdma(pd) as alone:
        _, connection = alone.export()
        with pytest.raises(TimedOutError, match=r"^connect\(\) of connection 0 of RDMA on soft0 did not come"):
            connection.established(0.01)


def test_coroutines(pd, address):
    async def serve(server: Rdma) -> None:
        connection = await server.next_request_async()
        connection.accept()
        await connection.established_async()
        await connection.disconnected_async()

    async def ask(client: Rdma) -> None:
        connection = client.connect_to(address, PORT)
        await connection.established_async()
        connection.disconnect()
        await connection.disconnected_async()

    async def both() -> None:
        async with asyncio.timeout(20):
            await asyncio.gather(serve(server), ask(client))

    with Rdma(pd) as server, Rdma(pd) as client:
        server.listen(PORT)
        asyncio.run(both())


def test_kernels_use_such_connections(gpu, pd, address, caplog):
    """A connection counts for kernels when it is established; when the peer disconnects, their waits end."""
    caplog.set_level(logging.CRITICAL, "gpunetio")
    write = [{"what": "value_strong", "value": 5}, {"what": "commit_strong"}, {"what": "wait_all"}]
    with Ends(gpu, pd, 0, max_connections=1, permissions=Access.all()) as made:
        made.b.rdma.listen(PORT)
        connection = made.a.rdma.connect_to(address, PORT)
        assert made.alone(*write)[0] == device.EINVAL
        there = made.b.rdma.next_request(10)
        there.accept()
        connection.established(10)
        there.established(10)
        assert made.alone(*write) == [device.OK, device.OK, 1]
        assert made.b.bytes[0] == 5
        there.disconnect()
        connection.disconnected(10)
        assert made.alone(*write)[2] == EIO
        assert connection.last_error().cause == "the peer has disconnected"


def test_a_closed_end_leaves_nothing(pd, address):
    """Ends that close at any step of a handshake, and an end that listens again."""
    for step in range(4):
        server, client = Rdma(pd), Rdma(pd)
        with client:
            with server:
                server.listen(PORT)
                connection = client.connect_to(address, PORT)
                if step > 0:
                    request = server.next_request(10)
                if step > 1:
                    request.accept()
                if step > 2:
                    request.established(10)
            if step < 2:
                with pytest.raises(ConnectionRejectedError):
                    connection.established(10)
            else:
                connection.disconnected(10)
        assert connection.state is ConnectionState.CLOSED


@pytest.mark.parametrize("first", range(4))
def test_closing_in_any_order(first):
    """The context, the Gpu and both ends, with connections by description and by address."""
    for order in itertools.permutations(range(4)):
        if order[0] != first:
            continue
        ctx, gpu = verbs.open("soft1"), Gpu("host")
        pd = ctx.create_pd()
        here, there = (Rdma(pd, gpu=gpu, max_connections=2) for _ in range(2))
        here.start()
        there.start()
        (mine, near), (yours, far) = here.export(), there.export()
        near.connect(yours)
        far.connect(mine)
        there.listen(PORT)
        by_address = here.connect_to(text_of(ctx.query_gid(1, 0)), PORT)
        there.next_request(10).accept()
        by_address.established(10)
        everything = ctx, gpu, here, there
        for i in order:
            everything[i].close()
        assert all(connection.state is ConnectionState.CLOSED for connection in (near, far, by_address))
