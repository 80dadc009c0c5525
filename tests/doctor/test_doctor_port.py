"""The doctor's checks of a network card's port."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doctor_rig import READY, changed, command, file, folder, found, report, statuses, without
from gpunetio.doctor import Machine, Status, Trouble, Use, Wanted
from gpunetio.doctor.checks.port import HINTS
from gpunetio.doctor.finding import Readiness, Verdict
from gpunetio.doctor.machine.host import Kind

OK, WARN, FAIL, SKIP = Status
PORT = "/sys/class/infiniband/mlx5_0/ports/1"
NET = "/sys/class/net/ens6f0"
DOWN = [file(f"{PORT}/state", "1: DOWN"), file(f"{PORT}/phys_state", "3: Disabled")]
INFINIBAND = file(f"{PORT}/link_layer", "InfiniBand")
NONE = ":".join(["0000"] * 8)
V4 = ["2", "3"]  # indices of IPv4-mapped GIDs of the ready machine
CONTAINER = folder("/sys/class/net", "eth0", "lo")
LOSSES = [name for name, (grade, _) in HINTS.items() if grade is WARN]
ETHTOOL = READY.recorded[Kind.COMMAND, ("ethtool", "-S", "ens6f0")].text


def ethtool(old: str, new: str):
    """A counter of ens6f0 has another value."""
    assert old in ETHTOOL
    return command("ethtool -S ens6f0", ETHTOOL.replace(old, new))


# cause: what is changed, which check tells, how, and words of its summary and cure
CAUSES = {
    "packets were dropped": (
        [ethtool("rx_discards_phy: 0", "rx_discards_phy: 12")],
        "interface-counters", WARN, "not 0: rx_discards_phy", "watch -d 'ethtool -S ens6f0'",
    ),
    "the switch pauses": (
        [ethtool("rx_prio3_pause: 0", "rx_prio3_pause: 900")],
        "interface-counters", OK, "nothing lost; events: rx_prio3_pause", "",
    ),
    "the cable was plugged in again": (
        [file(f"{PORT}/counters/link_downed", "3")], "counters", OK, "nothing lost; events: link_downed", "",
    ),
    "losses come before events": (
        [file(f"{PORT}/hw_counters/req_cqe_error", "3"), file(f"{PORT}/counters/symbol_error", "1")],
        "counters", WARN, "not 0: symbol_error", "watch -d 'grep . ",
    ),
    "container with a network of its own": (
        [CONTAINER], "gid", FAIL, "ens6f0 is in another network namespace", "docker run --network=host",
    ),
    "MTU in a container with a network of its own": ([CONTAINER], "mtu", SKIP, "docker run --network=host", ""),
    "interfaces are hidden": ([without(Kind.FOLDER, "/sys/class/net", trouble=Trouble.DENIED)], "gid", OK, "GID 3", ""),
    "IPv4 that nobody gave": (
        [file(f"{PORT}/gids/{i}", "0000:0000:0000:0000:0000:ffff:a9fe:0102") for i in V4],
        "gid", WARN, "link-local", "sudo ip addr add <address>/<prefix> dev ens6f0",
    ),
    "IPv6 of a network beside an IPv4 that nobody gave": (
        [file(f"{PORT}/gids/3", "0000:0000:0000:0000:0000:ffff:a9fe:0102"),
         file(f"{PORT}/gids/1", "2001:0db8:0000:0000:0000:0000:0000:0001")],
        "gid", OK, "GID 1 is 2001:db8::1", "",
    ),
    "no ethtool": (
        [without(Kind.COMMAND, "ethtool", "-S", "ens6f0")],
        "interface-counters", SKIP, "ethtool shows no known counters of ens6f0", "",
    ),
    "another driver's counters": (
        [command("ethtool -S ens6f0", "NIC statistics:\n     rx_queue_0_packets: 12\n")],
        "interface-counters", SKIP, "ethtool shows no known counters", "",
    ),
    "interface is down": (
        [*DOWN, file(f"{NET}/flags", "0x1002")], "port-state", FAIL, "port 1 is DOWN", "sudo ip link set ens6f0 up",
    ),
    "no cable": ([*DOWN, file(f"{NET}/flags", "0x1003")], "port-state", FAIL, "is DOWN", "cable, transceiver"),
    "no cable, flags unknown": (
        [*DOWN, without(Kind.FILE, f"{NET}/flags")], "port-state", FAIL, "is DOWN", "sudo ethtool ens6f0",
    ),
    "no subnet manager": (
        [file(f"{PORT}/state", "2: INIT"), INFINIBAND], "port-state", FAIL, "port 1 is INIT", "start opensm",
    ),
    "InfiniBand without signal": (
        [file(f"{PORT}/state", "1: DOWN"), file(f"{PORT}/phys_state", "2: Polling"), INFINIBAND],
        "port-state", FAIL, "is DOWN", "cable, transceiver",
    ),
    "state is hidden": ([without(Kind.FILE, f"{PORT}/state")], "port-state", SKIP, "cannot read", ""),
    "card without a driver": ([folder("/sys/class/infiniband")], "port-state", SKIP, "no RDMA device", ""),
    "link-local only": (
        [file(f"{PORT}/gids/{i}", NONE) for i in V4],
        "gid", WARN, "link-local", "sudo ip addr add <address>/<prefix> dev ens6f0",
    ),
    "IPv6 of a network": (
        [file(f"{PORT}/gids/2", NONE), file(f"{PORT}/gids/3", "2001:0db8:0000:0000:0000:0000:0000:0001")],
        "gid", OK, "GID 3 is 2001:db8::1", "",
    ),
    "IPv4 after IPv6": (
        [file(f"{PORT}/gids/1", "2001:0db8:0000:0000:0000:0000:0000:0001")], "gid", OK, "GID 3 is 192.168.0.1", "",
    ),
    "no address": (
        [file(f"{PORT}/gids/{i}", NONE) for i in range(4)], "gid", FAIL, "no GID for RoCE", "sudo ip link set ens6f0",
    ),
    "RoCE v1 only": (
        [file(f"{PORT}/gid_attrs/types/{i}", "IB/RoCE v1") for i in range(4)],
        "gid", FAIL, "no GID for RoCE v2", "sudo ip link set ens6f0 up; sudo ip addr add",
    ),
    "InfiniBand has its own GIDs": ([INFINIBAND], "gid", SKIP, "only for Ethernet", ""),
    "GIDs are hidden": (
        [without(Kind.FOLDER, f"{PORT}/gids", trouble=Trouble.DENIED)], "gid", SKIP, "cannot read", "",
    ),
    "MTU of a fresh machine": (
        [file(f"{NET}/mtu", "1500")], "mtu", WARN, "1500: path MTU 1024, not 4096", "sudo ip link set ens6f0 mtu 4200",
    ),
    "MTU that is too small": ([file(f"{NET}/mtu", "300")], "mtu", FAIL, "300 is too small", "mtu 4200"),
    "MTU is hidden": ([without(Kind.FILE, f"{NET}/mtu")], "mtu", SKIP, "cannot read", ""),
    "MTU of InfiniBand": ([INFINIBAND], "mtu", SKIP, "only for Ethernet", ""),
    "packets are lost": (
        [file(f"{PORT}/hw_counters/packet_seq_err", "12")],
        "counters", WARN, "not 0: packet_seq_err", f"watch -d 'grep . {PORT}/",
    ),
    "much is wrong": (
        [file(f"{PORT}/{name}", "7") for name in HINTS], "counters", WARN, f", +{len(LOSSES) - 2}", "watch -d",
    ),
    "no counters": ([without(Kind.FILE, f"{PORT}/{name}") for name in HINTS], "counters", SKIP, "no counters", ""),
}


def test_ready_machine():
    for check in ("port-state", "gid", "mtu", "counters"):
        assert statuses(check) == [OK, OK], check
    assert found("gid")[0].summary == "GID 3 is 192.168.0.1"
    assert found("port-state")[0].summary == "port 1 is ACTIVE, Ethernet, 100 Gb/sec (2X HDR)"


@pytest.mark.parametrize("cause", CAUSES)
def test_causes(cause):
    changes, check, status, summary, cure = CAUSES[cause]
    first = found(check, *changes)[0]
    assert first.status is status, first
    assert summary in first.summary
    assert cure in first.cure
    assert bool(first.cure) == (status in (WARN, FAIL))
    assert len(first.summary) < 80
    assert not first.reboot


@pytest.mark.parametrize("check", ["gid", "mtu"])
def test_what_is_only_for_ethernet_tells_the_link_layer(check):
    """Without an RDMA device, nothing was read that could be told."""
    infiniband, no_device = found(check, INFINIBAND)[0], found(check, folder("/sys/class/infiniband"))[0]
    assert infiniband.summary == no_device.summary == "only for Ethernet ports"
    assert [(one.source, one.value) for one in infiniband.read] == [(f"{PORT}/link_layer", "InfiniBand")]
    assert (no_device.status, no_device.read) == (SKIP, ())


def test_one_active_port_of_a_nic_is_enough():
    second = "/sys/class/infiniband/mlx5_0/ports/2"
    changes = [
        *DOWN, folder("/sys/class/infiniband/mlx5_0/ports", "1", "2"), file(f"{second}/state", "4: ACTIVE"),
        file(f"{second}/link_layer", "Ethernet"), file(f"{second}/rate", "25 Gb/sec (1X EDR)"),
    ]
    first = found("port-state", *changes)[0]
    assert (first.status, first.summary) == (OK, "port 2 is ACTIVE, Ethernet, 25 Gb/sec (1X EDR)")


def test_the_other_nic_serves_when_one_is_down():
    assert report(*DOWN).ready(Use.VERBS) == Verdict(Readiness.READY, "GPU0 with mlx5_1")
    both = [file(change.key[0].replace("mlx5_0", "mlx5_1"), change.value) for change in DOWN]
    verdict = report(*DOWN, *both).ready(Use.VERBS)
    assert verdict.readiness is Readiness.NOT_READY
    assert "port-state (mlx5_0)" in verdict.why


def test_a_link_does_not_matter_to_dma():
    assert all(f.uses is not None and Use.DMA not in f.uses for f in found("port-state", *DOWN))


@pytest.mark.parametrize(
    ("mtu", "path"),
    [
        (9000, 4096), (4192, 4096), (4191, 2048), (2144, 2048), (1500, 1024), (1120, 1024), (608, 512), (352, 256),
        (351, 0),
    ],
)
def test_path_mtu(mtu, path):
    """The kernel takes 96 bytes off: include/rdma/ib_addr.h."""
    summary = found("mtu", file(f"{NET}/mtu", f"{mtu}\n"))[0].summary
    assert summary.startswith(f"{mtu}: path MTU {path}" if path else f"{mtu} is too small")


def test_interface_of_the_best_gid_counts():
    """A device may have interfaces for virtual switches, too."""
    changes = [
        file(f"{PORT}/gid_attrs/ndevs/3", "bond0"), file("/sys/class/net/bond0/mtu", "1500"),
        folder("/sys/class/net", "bond0", "ens6f0", "ens6f1"),
    ]
    assert found("mtu", *changes)[0].cure.startswith("sudo ip link set bond0 mtu 4200")
    assert statuses("mtu", *changes) == [WARN, OK]


@pytest.mark.parametrize(("here", "index", "mtu"), [("net1", 1, 9000), ("ens6f0", 3, 4200)])
def test_a_pod_has_its_own_gid(here, index, mtu):
    """The host's and the pod's interfaces share the port: a macvlan's GID is as good, a foreign GID is not."""
    there = {"net1": "ens6f0", "ens6f0": "net1"}[here]
    changes = [
        folder("/sys/class/net", "lo", "eth0", here), file(f"/sys/class/net/{here}/mtu", f"{mtu}"),
        file(f"{PORT}/gids/{index}", "0000:0000:0000:0000:0000:ffff:c000:0206"),
        *(file(f"{PORT}/gid_attrs/ndevs/{i}", here if i == index else there) for i in range(4)),
    ]
    assert found("gid", *changes)[0].summary == f"GID {index} is 192.0.2.6"
    assert found("mtu", *changes)[0].read[0].source == f"/sys/class/net/{here}/mtu"
    none = [file(f"{PORT}/gid_attrs/ndevs/{index}", there)]
    assert [found(check, *changes, *none)[0].status for check in ("gid", "mtu")] == [FAIL, SKIP]


@pytest.mark.parametrize("name", HINTS)
def test_each_counter_is_explained(name):
    finding, other = found("counters", file(f"{PORT}/{name}", "5\n"))
    grade, hint = HINTS[name]
    assert (finding.status, other.status) == (grade, OK)
    (shown,) = finding.read
    assert (shown.source, shown.value) == (f"{PORT}/{name}", f"5: {hint}")
    assert name.rpartition("/")[2] in finding.summary


@pytest.mark.parametrize("name", ["rx_discards_phy", "tx_discards_phy", "rx_out_of_buffer", "rx_crc_errors_phy"])
def test_what_an_interface_loses(name):
    assert statuses("interface-counters", ethtool(f" {name}: 0", f" {name}: 1")) == [WARN, OK]


def test_a_network_of_ones_own_is_no_matter_to_others_than_verbs():
    second = "/sys/class/infiniband/mlx5_1/ports/1/gid_attrs/ndevs"
    first, other = found("gid", CONTAINER, *(file(f"{second}/{index}", "eth0") for index in range(4)))
    assert (first.status, first.uses, other.status) == (FAIL, {Use.VERBS}, OK)
    assert [one.source for one in first.read] == [f"{PORT}/gid_attrs/ndevs/3", "/sys/class/net"]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 3), st.text(max_size=40) | st.ip_addresses(v=6).map(lambda ip: ip.exploded))
def test_any_gid(index, text):
    (first, _) = found("gid", file(f"{PORT}/gids/{index}", text.encode(errors="replace")))
    assert first.status in (OK, WARN)


def test_indices_are_in_numerical_order():
    names = [str(i) for i in range(16)]
    values = [file(f"{PORT}/gids/{i}", NONE) for i in range(16)]
    values += [file(f"{PORT}/gids/{i}", f"::ffff:10.0.0.{i}") for i in (9, 10)]
    types = [file(f"{PORT}/gid_attrs/types/{i}", "RoCE v2") for i in (9, 10)]
    assert found("gid", folder(f"{PORT}/gids", *names), *values, *types)[0].summary == "GID 9 is 10.0.0.9"


def test_port_of_a_card_without_driver():
    machine = Machine(changed(READY, folder("/sys/class/infiniband")), Wanted())
    assert [nic.rdma for nic in machine.nics] == [False, False]
    assert statuses("gid", folder("/sys/class/infiniband")) == [SKIP, SKIP]
