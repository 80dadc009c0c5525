"""gpunetio rping, rdma_client and rdma_server: two processes, and command lines that are refused."""

import signal

import pytest
from click.testing import CliRunner

from gpunetio.cli import app
from gpunetio.samples.rping import data_of
from tools import Tool, running
from udp_rig import own_address

pytestmark = pytest.mark.soft_nic


@pytest.mark.parametrize("arguments, text", [
    (["rping"], "choose one end"),
    (["rping", "-s", "-c", "-a", "127.0.0.1"], "choose one end"),
    (["rping", "-c"], "-a IP"),
    (["rping", "-c", "-a", "127.0.0.1", "-S", "22"], "23<=x<=65536"),
    (["rdma_client", "-p", "0"], "1<=x<=65535"),
    (["rdma_client", "-s", ""], "-s needs the server's address"),
])
def test_usage(arguments, text):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert text in done.output


@pytest.mark.parametrize("arguments, text", [
    (["rping", "-c", "-n", "soft0", "-a", "somewhere"], "'somewhere' is not an IPv4 or IPv6 address"),
    (["rping", "-s", "-n", "soft0", "-a", "10.1.2.3"], "soft0 does not have the address 10.1.2.3"),
    (["rping", "-c", "-n", "soft0", "-a", "fd77::1"], "soft0 has no address of the IP version of fd77::1"),
])
def test_errors(arguments, text):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert text in done.output


def test_the_data_of_pings():
    """As rdma-core's rping has them."""
    assert data_of(0, 64) == b"rdma-ping-0: ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqr\0"
    assert data_of(49, 64) == b"rdma-ping-49: rstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefgh\0"
    assert data_of(58, 23) == b"rdma-ping-58: ABCDEFGH\0"


@pytest.mark.slow
def test_a_persistent_server():
    """Two clients, of which the second has larger pings than the server; Ctrl+C ends the server."""
    address, port = own_address(), "7600"
    server = Tool("rping", "-s", "-P", "-v", "-n", "soft0", "--address", address, "-p", port)
    asks = ["rping", "-c", "-v", "-V", "-n", "soft1", "--address", own_address(), "-a", address, "-p", port, "-C", "3"]
    while (done := CliRunner().invoke(app, asks)).exit_code:  # until it listens
        assert "INVALID_SERVICE_ID" in done.output or "did not come" in done.output
        assert server.process.poll() is None
    assert done.output.splitlines() == [f"ping data: {data_of(n, 64)[:-1].decode()}" for n in range(3)]
    done = CliRunner().invoke(app, [*asks, "-S", "100"])
    assert done.exit_code == 1
    server.process.send_signal(signal.SIGINT)
    status, out, err = server.end()
    assert status == 130
    assert [line for line in out.splitlines() if "ping-" in line] == [
        f"server ping data: {data_of(n, 64)[:-1].decode()}" for n in range(3)
    ]
    assert "the client has pings of 100 bytes: give the server the same -S" in err


@pytest.mark.slow
def test_a_server_of_one_client():
    """While it serves one, another is refused. Pings may be shorter than the server's."""
    address, port = own_address(), "7601"
    with running(Tool("rping", "-s", "-v", "-S", "100", "-n", "soft0", "--address", address, "-p", port)) as (server,):
        asks = ["rping", "-c", "-v", "-S", "23", "-a", address, "-p", port]
        client = Tool(*asks, "-n", "soft1", "--address", own_address())
        while not client.process.stdout.readline():  # the server does not listen yet
            client.end()
            assert server.process.poll() is None
            client = Tool(*asks, "-n", "soft1", "--address", own_address())
        with running(client):
            done = CliRunner().invoke(app, [*asks, "-n", "soft2", "--address", own_address()])
        assert server.until("ping data") == "server ping data: rdma-ping-0: ABCDEFGHI\n"
    assert done.exit_code == 1
    assert "INVALID_SERVICE_ID" in done.output
