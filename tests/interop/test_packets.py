"""Kernels that answer and forward packets of a virtual machine, over QEMU's socket for Ethernet frames."""

import contextlib
import subprocess
from collections.abc import Iterator

import pytest

from machines import END, FIRST_ANSWER, FLOOD, HERE, OURS, PINGS, Machines

pytestmark = [pytest.mark.interop, pytest.mark.root, pytest.mark.timeout(600)]

EXAMPLES = HERE.parents[1] / "examples"
MIB = 64
INTERFACE = "net"


@pytest.fixture
def undo() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_a_kernel_answers_a_guest(undo, tmp_path):
    """ARP and ping: what the NIC itself answers of it is taken by a rule first."""
    machines = Machines(undo, tmp_path, "answers", FIRST_ANSWER + FLOOD)
    kernel = machines.start(str(EXAMPLES / "answer_pings.py"), f"unix:{machines.cable}", OURS, log="kernel")
    last = machines.finish(kernel, "kernel").splitlines()[-1].split()
    console = machines.said("guest")
    assert f"{PINGS} packets transmitted, {PINGS} received, 0% packet loss" in console
    assert "5 packets transmitted, 5 received, 0% packet loss" in console
    assert f"{OURS} lladdr 02:00:0a:4e:00:01" in console
    arps, pings = int(last[0]), int(last[4])
    assert arps > 0
    assert PINGS + 6 <= pings < PINGS + 206  # the first of them may be answered too late, and are repeated


def test_kernels_forward_between_a_guest_and_this_machine(undo, tmp_path):
    """A TAP device is at the other end. The guest pings this machine, and TCP carries the same bytes there and back."""
    stream = f"python3 stream.py connect {OURS} {MIB} || exit 6\n"
    machines = Machines(undo, tmp_path, "forward", FIRST_ANSWER + FLOOD + stream, "stream.py")
    wires = f"unix:{machines.cable}", f"tap:{INTERFACE}"
    kernels = machines.start(str(EXAMPLES / "forward_packets.py"), *wires, log="kernels")
    machines.until(lambda: "are joined" in machines.said("kernels"), "the kernels")
    for words in (f"addr add {OURS}/24 dev {INTERFACE}", f"link set {INTERFACE} up"):
        subprocess.run(["ip", "-n", machines.namespace, *words.split()], check=True, timeout=20)
    here = machines.start(str(HERE / "stream.py"), "listen", OURS, str(MIB), log="here")
    last = machines.finish(kernels, "kernels").splitlines()[-1].split()
    console = machines.said("guest")
    assert f"{PINGS} packets transmitted, {PINGS} received, 0% packet loss" in console
    assert f"{MIB} MiB are right" in console
    assert here.wait(END) == 0, machines.said("here")
    assert min(int(last[0]), int(last[4])) > MIB * (1 << 20) // 1460
