"""gpunetio rdma_client_server_write: two processes, connected by what they exchange or by address and port."""

import re
import signal
import time
from collections.abc import Iterator

import pytest

from gpunetio.nic.host.engine import compile_engine
from gpunetio.samples.rdma_client_server_write import send, serve
from tools import Tool, error_line, running

SLOW = pytest.mark.slow
SOON = 15.0  # seconds, on two busy cores; the shortest wait of the sample takes 30


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile once, for all processes."""
    compile_engine()
    for kernel in (send, serve):
        kernel.compile_for_the_host()


def ends(
    tcp: int, *options: str, server: tuple[str, ...] = (), client: tuple[str, ...] = (), nic: str = "soft1"
) -> tuple[Tool, Tool]:
    common = ("rdma_client_server_write", "-gpu", "host", "--tcp-port", tcp, *options)
    first = Tool(*common, "-d", "soft0", *server)
    first.until("Waiting for a client")
    return first, Tool(*common, "-d", nic, "-c", "127.0.0.1", *client)


WAYS = {
    "exchange": ((), ()),
    "cm": (("-cm", "-p", "13600"), ("-sa", "127.0.0.1")),
    "udp": (("-cm", "-p", "13601", "--wire", "udp"), ("-sa", "127.0.0.1")),
}


@pytest.fixture
def way(request: pytest.FixtureRequest) -> Iterator[tuple[Tool, Tool]]:
    common, client = WAYS[request.param]
    with running(*ends(18600 + list(WAYS).index(request.param), *common, client=client)) as tools:
        yield tools


@pytest.mark.parametrize("way", ["cm", *(pytest.param(way, marks=SLOW) for way in ("exchange", "udp"))], indirect=True)
def test_every_buffer_has_both_halves(way):
    """The lines of the original, and the bytes that each of the client's threads has sent."""
    server, client = way
    status, out, err = client.end()
    assert (status, err) == (0, "")
    assert "Client posted and completed 4 RDMA commits on connection 0. Waiting on the exit flag." in out
    status, out, err = server.end()
    assert (status, err) == (0, "")
    received = re.findall(r"RDMA Recv 2 ops completed with immediate values (\d) and (\d)! Connections 0 and 0", out)
    assert [sorted(map(int, pair)) for pair in received] == [[i, i + 1] for i in range(4)]
    before, after = out.split("Buffers of the server after")
    lines = r"Buffer (\d) -> offset 0: (\w+) \| offset 128: (\w+)"
    assert re.findall(lines, before) == [(str(i), "0000", "0000") for i in range(4)]
    found = re.findall(lines, after)
    for i, (number, *halves) in enumerate(found):
        wanted = [f"b{i}" * 4, f"c{i}" * 4]
        assert int(number) == i
        assert (halves if i % 2 == 0 else sorted(halves)) == wanted  # a SEND takes the receive that is next
    assert len(found) == 4
    assert out.splitlines()[-1] == "Sample finished successfully"


# --- what goes wrong -------------------------------------------------------------------------------------------------

SERVER, CLIENT = "the server 127.0.0.1", "the client 127.0.0.1"
BOTH = "give both the same"
DISAGREEMENTS = {  # options of the server and of the client, and what each of them says
    "-cm of the server": (
        ("-cm",), (), f"{CLIENT} has --use-rdma-cm False, this end True: {BOTH}",
        f"{SERVER} has --use-rdma-cm True, this end False: {BOTH}",
    ),
    "-cm of the client": (
        (), ("-cm", "-sa", "127.0.0.1"), f"{CLIENT} has --use-rdma-cm True, this end False: {BOTH}",
        f"{SERVER} has --use-rdma-cm False, this end True: {BOTH}",
    ),
    "-p": (
        ("-cm", "-p", "13602"), ("-cm", "-sa", "127.0.0.1"), f"{CLIENT} has --port 13579, this end 13602: {BOTH}",
        f"{SERVER} has --port 13602, this end 13579: {BOTH}",
    ),
    "-sa": (
        ("-cm",), ("-cm", "-sa", "127.0.0.9"), f"{CLIENT} ended with an error: --server-addr 127.0.0.9: {SERVER} ",
        f"--server-addr 127.0.0.9: {SERVER} listens at '127.0.0.1'; give that address",
    ),
}


@pytest.mark.parametrize("case", [name if name == "-sa" else pytest.param(name, marks=SLOW) for name in DISAGREEMENTS])
def test_options_that_disagree(case):
    """Both ends say so at once."""
    for_server, for_client, *said = DISAGREEMENTS[case]
    with running(*ends(18604, server=for_server, client=for_client)) as tools:
        for tool, text in zip(tools, said, strict=True):
            status, _, err = tool.end()
            assert status == 1
            assert text in error_line(err)


ENDINGS = {signal.SIGKILL: (1, "died or was killed|was lost"), signal.SIGINT: (130, "interrupted")}


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=SLOW)])
@pytest.mark.parametrize("victim", ["server", pytest.param("client", marks=SLOW)])
@pytest.mark.parametrize("way", ["cm", pytest.param("exchange", marks=SLOW)])
def test_an_end_that_leaves(way, victim, how):
    """The kernel of the other end is ended, whatever it waits for."""
    common, for_client = WAYS[way]
    with running(*ends(18605, *common, client=for_client)) as (server, client):
        server.until("Buffers of the server before")
        leaves, stays = (server, client) if victim == "server" else (client, server)
        leaves.signal(how)
        since = time.monotonic()
        status, _, err = stays.end()
        assert time.monotonic() - since < SOON
    wanted, text = ENDINGS[how]
    assert status == wanted
    assert re.search(f"the {victim} 127.0.0.1 .*({text})", error_line(err))


@SLOW
def test_both_ends_on_one_nic():
    """Two processes with the same address: the end that waits hears from the end whose request fails."""
    with running(*ends(18606, nic="soft0")) as (server, client):
        for tool, text in ((server, "both ends use the same NIC"), (client, f"{SERVER} ended with an error: ")):
            status, _, err = tool.end()
            assert status == 1
            assert text in error_line(err)


@pytest.mark.parametrize(
    "options, text",
    [
        (("-c", "127.0.0.1", "-cm"), "--server-addr"),
        (("-cm", "-sa", "127.0.0.1"), "--server-addr"),
        (("-c", "127.0.0.1", "-sa", "127.0.0.1"), "--use-rdma-cm"),
        (("-c", "127.0.0.1", "-cm", "-sa", "here"), "IPv4"),
        (("-c", "127.0.0.1", "-cm", "-sa", "127.0.0.1", "-sat", "GID"), "GID"),
    ],
)
def test_options_that_do_not_fit(options, text):
    from click.testing import CliRunner

    from gpunetio.cli import app

    result = CliRunner().invoke(app, ["rdma_client_server_write", "-d", "soft0", "-gpu", "host", *options])
    assert result.exit_code == 2
    assert text in result.output
