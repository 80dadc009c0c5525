"""The software NIC and the Linux kernel's Soft-RoCE over RoCEv2: both roles, IPv4 and IPv6, two path MTUs."""

from collections.abc import Iterator
from typing import Any

import pytest

from conformance import LARGEST, RXE, STANDARD, Conformance, Link, Streams, Transfers, filled
from guest import Guest
from protocol import listening

LOSS, TCP_PORT = 0.02, 18600

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]


# Losses cost time, and are the same whatever the packets' size.
SMALL = pytest.mark.parametrize("guest", [1024], indirect=True, ids=["mtu1024"])


@pytest.fixture(scope="class")
def lossy(guest: Guest) -> Iterator[None]:
    """The guest's packets get lost now and then."""
    with guest.losing(LOSS):
        yield


class TestRequester(Conformance):
    """Our requester, the kernel's responder."""

    many = (10_000, 1_000, 200)

    @pytest.fixture
    def link(self, guest: Guest, ip: str) -> Link:
        return Link(guest.ours(), guest.session("a"), STANDARD, RXE, ip, guest.path_mtu)

    def test_masked_atomic(self, link: Link) -> None:
        """The kernel drops the packet, which is none of IBTA's. Nothing changes there, and the retries end."""
        with filled(link, ack_timeout=12, retry_cnt=2) as (a, b):
            for number in range(3):
                a.post("MASKED_FA", [[64, 8]], remote=b.address + 512, rkey=b.rkey, swap_add=1, wr_id=number)
            self.failed(a, "RETRY_EXC_ERR")
            b.verify()
            assert b.state == "RTS"


class TestResponder(Conformance):
    """The kernel's requester, our responder. In a ping-pong both ends are both: the other class runs the long one."""

    @pytest.fixture
    def link(self, guest: Guest, ip: str) -> Link:
        return Link(guest.session("a"), guest.ours(), RXE, STANDARD, ip, guest.path_mtu)


class TestEthernetRequester(Transfers):
    """Our requester, which makes the frames itself, and has found the guest by ARP or neighbour discovery."""

    @pytest.fixture
    def link(self, guest: Guest, ip: str) -> Link:
        return Link(guest.ours_on_ethernet(), guest.session("a"), STANDARD, RXE, ip, guest.path_mtu)


class TestEthernetResponder(Transfers):
    """The kernel's requester, which has found our responder in the same way."""

    @pytest.fixture
    def link(self, guest: Guest, ip: str) -> Link:
        return Link(guest.session("a"), guest.ours_on_ethernet(), RXE, STANDARD, ip, guest.path_mtu)


@SMALL
class TestLossyRequester(Streams, Transfers):
    """Our requester, the kernel's responder, and what each sends gets lost now and then."""

    @pytest.fixture
    def link(self, guest: Guest, ip: str, lossy: None) -> Link:
        return Link(guest.ours(LOSS), guest.session("a"), STANDARD, RXE, ip, guest.path_mtu)


@SMALL
class TestLossyResponder(Streams, Transfers):
    """The kernel's requester, our responder."""

    @pytest.fixture
    def link(self, guest: Guest, ip: str, lossy: None) -> Link:
        return Link(guest.session("a"), guest.ours(LOSS), RXE, STANDARD, ip, guest.path_mtu)


# Each pair of IP, size and way of waiting; both roles of all.
@pytest.mark.parametrize(
    "ip, nbytes, events",
    [("ipv4", 4096, True), ("ipv6", 4096, False), ("ipv6", LARGEST, True), ("ipv4", LARGEST, False)],
    ids=["ipv4-4096-events", "ipv6-4096-polled", f"ipv6-{LARGEST}-events", f"ipv4-{LARGEST}-polled"],
)
@pytest.mark.parametrize("guest_serves", [True, False], ids=["guest_serves", "guest_asks"])
def test_pingpong_command(guest: Guest, ip: str, guest_serves: bool, nbytes: int, events: bool) -> None:
    """`gpunetio pingpong` and rdma-core's `ibv_rc_pingpong`, either as the server of the other; both check contents."""
    # The emulated CPU that polls is missing elsewhere, most of all where there are many packets.
    count = 1000 if events or nbytes < LARGEST else 200
    _play(guest, ip, guest_serves, nbytes, count, ["-c"], 90, events=events)


@pytest.mark.parametrize("guest_serves", [True, False], ids=["guest_serves", "guest_asks"])
@pytest.mark.parametrize("service", ["uc", "ud"])
def test_pingpong_of_other_services(guest: Guest, ip: str, service: str, guest_serves: bool) -> None:
    """`gpunetio pingpong --qp-type` and rdma-core's `ibv_uc_pingpong` and `ibv_ud_pingpong`, in either role."""
    _play(guest, ip, guest_serves, min(1000, guest.path_mtu), 200, ["--qp-type", service, "-c"], 60, service=service)


def _play(
    guest: Guest, ip: str, guest_serves: bool, nbytes: int, count: int, options: list[str], timeout: int, **theirs: Any
) -> None:
    """Play ping-pong with rdma-core's program in the guest, in either role. Both check contents.

    `options` are those of our command, `theirs` of the other program.
    """
    program, ours = guest.session("a"), guest.ours_alone()
    here, there = Guest.HOST if ip == "ipv4" else Guest.HOST6, Guest.ADDRESS  # rdma-core's listens on IPv4
    theirs |= {"ip": ip, "nbytes": nbytes, "count": count, "mtu": guest.path_mtu, "port": TCP_PORT, "timeout": timeout}
    theirs["check"] = True
    arguments = [*options, *f"-s {nbytes} -n {count} -m {guest.path_mtu} -p {TCP_PORT}".split()]
    if guest_serves:
        program.begin("rc_pingpong", **theirs)
        assert guest.session("b").call("listening", port=TCP_PORT, timeout=20)
        ours.begin("pingpong_command", ip=ip, arguments=[*arguments, there], timeout=timeout)
    else:
        ours.begin("pingpong_command", ip=ip, arguments=arguments, timeout=timeout)
        assert ours.process
        assert listening(TCP_PORT, 20, ours.process.pid)
        program.begin("rc_pingpong", host=here, **theirs)
    done = ours.finish()
    assert done["status"] == 0, done["output"]
    printed = program.finish()
    for output in (done["output"], printed):
        assert f"{2 * nbytes * count} bytes in " in output
        assert f"{count} iters in " in output
    assert "invalid data" not in printed
