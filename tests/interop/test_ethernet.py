"""A virtual machine and the software NIC, joined by QEMU's socket for Ethernet frames, with no kernel between them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import guest as harness

pytestmark = [pytest.mark.interop, pytest.mark.root, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
COUNT, NBYTES = 200, 4096
BOOT = 120.0  # seconds
ADDRESSES = {1: "10.78.0.1", 2: "fd78::1"}  # of the software NIC, by the guest's GID index of the same IP version
OURS = {1: 0, 2: 2}  # our GID index
# The kernel gives a neighbour one second to answer (rdma_addr_find_l2_eth_by_grh); a loaded machine may take longer.
IN_THE_GUEST = f"""
ip link set eth1 up
ip addr add 10.78.0.2/24 dev eth1
ip -6 addr add fd78::2/64 dev eth1 nodad
rdma link add rxe1 type rxe netdev eth1
for gid in 1 2; do
    for attempt in 1 2 3 4 5; do
        ibv_rc_pingpong -d rxe1 -g $gid -c -m 1024 -n {COUNT} -s {NBYTES} && break
        [ $attempt != 5 ] || exit 1
    done
done
ip neigh show dev eth1
"""


def play(namespace: str, cable: Path, gid: int) -> subprocess.CompletedProcess[str]:
    """Ping-pong with the program in the guest, which listens on TCP over its other NIC."""
    addresses = [word for address in ADDRESSES.values() for word in ("--address", address)]
    return subprocess.run(
        ["ip", "netns", "exec", namespace, sys.executable, "-m", "gpunetio", "pingpong", "--wire", f"unix:{cable}",
         *addresses, "-g", str(OURS[gid]), "-c", "-m", "1024", "-n", str(COUNT), "-s", str(NBYTES),
         harness.Guest.ADDRESS],
        capture_output=True, text=True, timeout=200, check=False,
    )


def test_pingpong_over_qemus_socket(tmp_path: Path) -> None:
    """Both check contents. The guest finds the NIC by ARP and neighbour discovery, and so does the NIC the guest."""
    if os.geteuid() != 0:
        pytest.skip("a guest needs a network namespace and a tap: root only")
    harness.build()
    namespace, cable = f"gn-{os.getpid()}-ethernet", tmp_path / "cable"
    argv = [str(HERE / "run_guest.sh"), "-N", namespace, "-u", str(cable), "-t", "400", "-P", str(os.getpid()), "--"]
    with subprocess.Popen(
        [*argv, IN_THE_GUEST], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            for gid in ADDRESSES:
                end = time.monotonic() + BOOT
                while (done := play(namespace, cable, gid)).returncode != 0:
                    assert process.poll() is None, process.communicate()
                    assert time.monotonic() < end, done.stderr
                    time.sleep(0.5)
                assert f"{COUNT} iters in " in done.stdout
            console, _ = process.communicate(timeout=60)
        finally:
            harness.end(process)
    assert process.returncode == 0, console
    assert console.count(f"{COUNT} iters in ") == 2, console
    assert "invalid data" not in console
    for address in ADDRESSES.values():
        assert f"{address} lladdr 02:00:0a:4e:00:01" in console, console
