"""Devices without DEVX: this package in the guest, on the kernel's Soft-RoCE device, which libibverbs alone drives.

The guest has Debian's Python and NumPy, and no llvmlite.
"""

import json
import re
from collections.abc import Sequence

import pytest

from guest import BOTH_ROLES, OURS, Guest, Remote
from protocol import listening

pytestmark = [
    pytest.mark.interop, pytest.mark.root, pytest.mark.timeout(600),
    pytest.mark.parametrize("guest", [1024], indirect=True, ids=["mtu1024"]),
]

PROGRAM = (*OURS, "-m", "gpunetio")
SLOW = 60.0  # seconds for a command there: the first one compiles the package to bytecode
TCP_PORT = 18600
GID_INDEX = "1"  # of rxe0: ::ffff:10.77.0.2

# Promises of the kit that Soft-RoCE (Linux 6.1) does not keep, and what it does instead. All are the specification's.
RXE = {
    # What is wrong with its own memory it calls Local QP Operation Error, and to the peer Remote Operational Error;
    # IBTA 11.6.2 has Local Protection Error, Local Length Error and Remote Invalid Request Error.
    "keys_of_closed_regions": r"LOC_QP_OP_ERR.* should be .*LOC_PROT_ERR",
    "keys_of_other_domains": r"LOC_QP_OP_ERR.* should be .*LOC_PROT_ERR",
    "wrong_local_key": r"LOC_QP_OP_ERR.* should be .*LOC_PROT_ERR",
    "wrong_key_of_a_receive": r"LOC_QP_OP_ERR.* should be .*LOC_PROT_ERR",
    "receive_that_is_too_small": r"REM_OP_ERR.* should be .*REM_INV_REQ_ERR",
    "srq_receive_that_is_too_small": r"LOC_QP_OP_ERR.* should be .*LOC_LEN_ERR",
    # A receive that is posted in ERR is not flushed (IBTA 10.3.1): librxe writes it to memory, and does not tell the
    # kernel, which has flushed what was there before.
    "right_local_write_for_receives": r"in vain for 2 completions .* there came \[\(10, .*LOC_QP_OP_ERR",
    "what_each_state_takes": r"in vain for 1 completions .* there came \[\]",
    "requests_in_error": r"in vain for 1 completions .* there came \[\]",
    # It refuses to post an atomic that is not aligned, which IBTA 9.4.5 leaves to the responder.
    "bounds_of_atomics": r"BadWrError: .*refuses the request: Invalid argument",
    # The CQ tells that it is in error, but the queue pair that overran it goes on (IBTA 10.2.6).
    "cq_overrun": r"is in RTS, and it should be in ERR",
    # It tells nothing of queue pairs that go to ERR (IBTA 11.6.3).
    "srq_last_wqe": r"in vain for QP_LAST_WQE_REACHED",
    "refused_key_is_told": r"in vain for QP_ACCESS_ERR",
    "refused_request_is_told": r"in vain for QP_REQ_ERR",
    "async_events_are_acknowledged": r"in vain for an asynchronous event",
}
# What takes DEVX: the kit's checks of it say so.
NOT_SUPPORTED = {
    "umem_life": "UMEMs", "uar_life": "UARs", "rings_of_a_queue_pair": "rq_stride",
    "wait_for_a_completion": "core_direct_master", "wait_for_a_receive": "core_direct_master",
    "cq_overrun_allowed": "overrun ENABLE", "collapsed_cq": "collapsed",
    "cq_of_an_external_data_path": "external_datapath",
    "memcpy_copies": "memcpy", "memcpy_between_regions": "memcpy", "memcpy_outside_of_a_region": "memcpy",
    "memcpy_needs_its_queue_pair": "memcpy",
}


def test_no_compiler(guest: Guest) -> None:
    """What runs here runs without it."""
    said = guest.session("a").run(*OURS, "-c", "import llvmlite", timeout=SLOW, status=1)
    assert "No module named 'llvmlite'" in said


def test_conformance(guest: Guest) -> None:
    """All that the kit asks, but for what is listed above: one that fails otherwise, or not any more, is noticed."""
    printed = guest.session("a").run(*OURS, "-m", "hold", "rxe0", timeout=400)
    found = json.loads(printed.splitlines()[-1])
    wanted = dict.fromkeys(RXE, "FAILED") | dict.fromkeys(NOT_SUPPORTED, "NOT_SUPPORTED")
    assert {name: outcome for name, (outcome, _) in found.items()} == wanted, printed
    for name, text in (RXE | NOT_SUPPORTED).items():
        assert re.search(text, found[name][1]), (name, found[name])


def test_conformance_command(guest: Guest) -> None:
    printed = guest.session("a").run(*PROGRAM, "conformance", "-d", "rxe0", "device", "send", timeout=SLOW)
    assert printed.splitlines()[-1] == "5 checks: 5 passed, 0 FAILED, 0 not supported"


def test_devices_command(guest: Guest) -> None:
    """The same as rdma-core's ibv_devinfo, but for white space."""
    session = guest.session("a")
    ours, theirs = session.run(*PROGRAM, "devices", timeout=SLOW), session.run("ibv_devinfo", timeout=SLOW)
    assert [line.split() for line in ours.splitlines()] == [line.split() for line in theirs.splitlines()]
    assert session.run(*PROGRAM, "devices", "-l", timeout=SLOW) == "rxe0\n"
    verbose = session.run(*PROGRAM, "devices", "-v", timeout=SLOW)
    theirs = session.run("ibv_devinfo", "-v", timeout=SLOW)
    for pattern in (r"GID\[ +1\]:\s+::ffff:10\.77\.0\.2, RoCE v2", r"max_sge:\s+(\d+)", r"max_srq_wr:\s+(\d+)"):
        mine, other = re.search(pattern, verbose), re.search(pattern, theirs)
        assert mine, (pattern, verbose)
        assert other, (pattern, theirs)
        assert mine.groups() == other.groups()


# --- two ends --------------------------------------------------------------------------------------------------------



def _sample(operation: str) -> list[str]:
    return ["-ro", operation, "-s", "3000", "-n", "20", "-b", "--port", str(TCP_PORT)]


def test_server_client(guest: Guest) -> None:
    """Both ends in the guest. The other operations have one end there (below)."""
    server, client = guest.session("a"), guest.session("b")
    command = (*PROGRAM, "verbs_server_client", "-d", "rxe0", "-gid", GID_INDEX, *_sample("Send"))
    server.begin_run(*command, timeout=SLOW)
    assert guest.session("c").call("listening", port=TCP_PORT, timeout=SLOW)
    printed = client.run(*command, "-c", Guest.ADDRESS, timeout=SLOW), server.finish_run()
    for end in printed:
        assert "Sample finished successfully" in end
    assert printed[1].count("Received a valid message") == 20


@pytest.mark.parametrize("operation", ["Send", "Write", "Read"])
@pytest.mark.parametrize("guest_serves", [True, False], ids=["guest_serves", "guest_asks"])
def test_server_client_with_the_software_nic(guest: Guest, operation: str, guest_serves: bool) -> None:
    """One end in the guest, the other the software NIC on the host."""
    session, ours = guest.session("a"), guest.ours()
    command = (*PROGRAM, "verbs_server_client", "-d", "rxe0", "-gid", GID_INDEX, *_sample(operation))
    if guest_serves:
        session.begin_run(*command, timeout=SLOW)
        assert guest.session("c").call("listening", port=TCP_PORT, timeout=SLOW)
        ours.begin("server_client", arguments=[*_sample(operation), "-c", Guest.ADDRESS], timeout=SLOW)
    else:
        ours.begin("server_client", arguments=_sample(operation), timeout=SLOW)
        _host_listens(ours)
        session.begin_run(*command, "-c", Guest.HOST, timeout=SLOW)
    there, here = session.finish_run(), ours.finish()
    assert here["status"] == 0, here["output"]
    for output in (there, here["output"]):
        assert "Sample finished successfully" in output


@pytest.mark.parametrize("events", [False, True], ids=["polled", "events"])
@pytest.mark.parametrize("server, client", BOTH_ROLES)
def test_pingpong(guest: Guest, server: str, client: str, events: bool) -> None:
    """`gpunetio pingpong` with rdma-core's ibv_rc_pingpong, in either role; contents are checked."""
    options = ["-s", "3000", "-m", "1024", *["-e"] * events]
    programs = {"ours": (*PROGRAM, "pingpong"), "theirs": ("ibv_rc_pingpong",)}
    _play(guest, programs[server], programs[client], options, 1200000)


def _play(guest: Guest, server: Sequence[str], client: Sequence[str], options: list[str], nbytes: int) -> None:
    """Play 200 rounds in the guest, in which `nbytes` go back and forth. Both programs check contents."""
    options = [*f"-d rxe0 -g {GID_INDEX} -n 200 -p {TCP_PORT} -c".split(), *options]
    a, b = guest.session("a"), guest.session("b")
    a.begin_run(*server, *options, timeout=SLOW)
    assert guest.session("c").call("listening", port=TCP_PORT, timeout=SLOW)
    for printed in (b.run(*client, *options, Guest.ADDRESS, timeout=SLOW), a.finish_run()):
        assert f"{nbytes} bytes in " in printed
        assert "200 iters in " in printed
        assert "invalid data" not in printed


@pytest.mark.parametrize("events", [False, True], ids=["polled", "events"])
@pytest.mark.parametrize("guest_serves", [True, False], ids=["guest_serves", "guest_asks"])
def test_pingpong_with_the_software_nic(guest: Guest, guest_serves: bool, events: bool) -> None:
    """`gpunetio pingpong` in the guest, where the CPU plays, and on the host's software NIC, where a kernel does."""
    session, ours = guest.session("a"), guest.ours()
    numbers = f"-s 3000 -n 200 -m 1024 -p {TCP_PORT} -c".split()
    command = (*PROGRAM, "pingpong", "-d", "rxe0", "-g", GID_INDEX, *numbers, *["-e"] * events)
    if guest_serves:
        session.begin_run(*command, timeout=SLOW)
        assert guest.session("c").call("listening", port=TCP_PORT, timeout=SLOW)
        ours.begin("pingpong_command", ip="ipv4", arguments=[*numbers, Guest.ADDRESS], timeout=SLOW)
    else:
        ours.begin("pingpong_command", ip="ipv4", arguments=numbers, timeout=SLOW)
        _host_listens(ours)
        session.begin_run(*command, Guest.HOST, timeout=SLOW)
    there, here = session.finish_run(), ours.finish()
    assert here["status"] == 0, here["output"]
    for output in (there, here["output"]):
        assert "1200000 bytes in " in output
        assert "200 iters in " in output


def _host_listens(ours: Remote) -> None:
    assert ours.process
    assert listening(TCP_PORT, SLOW, ours.process.pid)


@pytest.mark.parametrize("server, client", BOTH_ROLES)
def test_pingpong_of_datagrams(guest: Guest, server: str, client: str) -> None:
    """The same with `ibv_ud_pingpong`: address handles, Q_Keys and GRHs go through libibverbs' structures."""
    programs = {"ours": (*PROGRAM, "pingpong", "--qp-type", "UD"), "theirs": ("ibv_ud_pingpong",)}
    _play(guest, programs[server], programs[client], ["-s", "1000"], 400000)
