"""`gpunetio eth`: DOCA's samples of Ethernet on the CPU, between two NICs of this process."""

import logging
import threading

import pytest
from click.testing import CliRunner

from gpunetio import eth, verbs
from gpunetio.cli import app
from gpunetio.cli.eth import Mac
from gpunetio.errors import NotSupportedError, TimedOutError
from gpunetio.nic.host.engine import compile_engine, compile_extensions
from gpunetio.samples import eth_rxq, eth_txq
from gpunetio.samples.eth_rxq import Kind
from nic_rig import until

COMMANDS = (
    "txq_send_ethernet_frames", "txq_batch_send_ethernet_frames", "txq_lso_send_ethernet_frames",
    "txq_batch_lso_send_ethernet_frames", "rxq_regular_receive", "rxq_managed_mempool_receive",
    "rxq_batch_managed_mempool_receive",
)
RECEIVED = "Received a packet of size 1500 successfully"


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """The engine, which may take longer to compile than a sample waits."""
    compile_engine()
    compile_extensions()


@pytest.fixture(autouse=True)
def heard(caplog) -> None:
    """Hear what the samples say."""
    caplog.set_level(logging.DEBUG, "gpunetio.samples")


class Receiver(threading.Thread):
    """A sample that receives."""

    def __init__(self, **options):
        super().__init__()
        self.options, self.count, self.error = eth_rxq.SampleOptions(device="soft1", **options), None, None

    def run(self):
        try:
            self.count = eth_rxq.run(self.options)
        except Exception as error:
            self.error = error


def receive(caplog, **options) -> Receiver:
    thread = Receiver(**options)
    thread.start()
    until(lambda: any(text.startswith("Receiving") for text in caplog.messages) or thread.error, "a receiver")
    return thread


def test_one_frame_into_a_buffer(caplog):
    there = receive(caplog, kind=Kind.REGULAR)
    eth_txq.run(eth_txq.SampleOptions(device="soft0"))
    there.join(40)
    assert (there.count, there.error) == (1, None)
    assert "Sent a regular packet of size 1500 successfully" in caplog.messages
    assert caplog.messages.count(RECEIVED) == 1


@pytest.mark.parametrize("kind, options", [
    (Kind.BATCH, {}),
    pytest.param(Kind.MANAGED, {"headroom": 64, "tailroom": 64, "timestamp": True}, marks=pytest.mark.slow),
])
def test_a_batch_from_a_pool(caplog, kind, options):
    there = receive(caplog, kind=kind, seconds=5.0, **options)
    eth_txq.run(eth_txq.SampleOptions(device="soft0", batch=True))
    there.join(40)
    assert (there.count, there.error) == (32, None)
    assert caplog.messages.count(RECEIVED) == 32
    assert "Total packets received: 32" in caplog.messages
    assert any("call-backs" in text for text in caplog.messages) is (kind is Kind.BATCH)
    assert sum(text.startswith("Timestamp") for text in caplog.messages) == 32 * options.get("timestamp", False)


def test_nothing_arrives():
    with pytest.raises(TimedOutError, match=r"no packet arrived within 0\.1 s"):
        eth_rxq.run(eth_rxq.SampleOptions(kind=Kind.REGULAR, device="soft1", seconds=0.1))


def test_segmentation_needs_a_device_with_lso(caplog):
    with verbs.open("soft0") as ctx:
        able = eth.query_caps(ctx).max_lso
    options = eth_txq.SampleOptions(device="soft0", lso=True)
    if able:
        eth_txq.run(options)
        assert "Sent an LSO packet of size 4000 successfully" in caplog.messages
    else:
        with pytest.raises(NotSupportedError, match="has no LSO"):
            eth_txq.run(options)


@pytest.mark.soft_nic
def test_the_source_is_the_ports_mac():
    with verbs.open("soft0") as ctx:
        assert eth.query_caps(ctx).mac == ctx.provider.nic.mac  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_has_help(name):
    done = CliRunner().invoke(app, ["eth", name, "--help"])
    assert done.exit_code == 0
    assert ("--mac" if name.startswith("txq") else "--timestamp") in done.output
    assert ("--headroom" in done.output) is ("mempool" in name)


@pytest.mark.parametrize("text, address", [
    ("ff:FF:ff:FF:ff:FF", b"\xff" * 6), ("02-00-00-00-00-0a", b"\x02\0\0\0\0\x0a"),
    ("1:2:3:4:5:6", None), ("02:00:00:00:00", None), ("zz:00:00:00:00:00", None), ("", None),
])
def test_mac_addresses(text, address):
    if address is not None:
        assert Mac().convert(text, None, None) == address
    done = CliRunner().invoke(app, ["eth", "txq_send_ethernet_frames", "-m", text, "-d", "no_such_nic"])
    assert done.exit_code == (1 if address else 2)
    assert ("is no MAC address" in done.output) is (address is None)
