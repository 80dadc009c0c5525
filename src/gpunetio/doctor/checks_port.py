"""Checks of a network card's port: link, GIDs, MTU, and counters of errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import IPv6Address

from .finding import Evidence, Finding, Status, Use, check, evidence, fail, ok, skip, warn
from .host import Reading
from .machine import Machine, Nic
from .nics import each_nic, port_of
from .topology import is_active

AREA = "Ports"
_SYSFS = "Linux Documentation/ABI/stable/sysfs-class-infiniband"
_NETWORK = frozenset({Use.ETHERNET, Use.VERBS})  # DMA stays inside the machine
_VERBS = frozenset({Use.VERBS})
_IFF_UP = 1  # linux/if.h
# What RoCE may put around a payload: GRH 40, UDP 8, BTH 12, XRCETH 4, AtomicETH 28, ICRC 4 (include/rdma/ib_addr.h).
_ROCE_HEADERS = 96
_PATH_MTUS = (4096, 2048, 1024, 512, 256)
_ENOUGH_MTU = 4200  # the usual one for RoCE: 4096 and headers


@check(
    "port-state", "Link of the port",
    why="Packets leave only through a port that is ACTIVE.",
    cure="sudo ip link set <interface> up; look at cable, transceiver and switch: sudo ethtool <interface>",
    source=_SYSFS, uses=_NETWORK, essential=True,
)  # fmt: skip
@each_nic
def port_state(machine: Machine, nic: Nic) -> Iterator[Finding]:
    """One of a NIC's ports is enough."""
    port, told = port_of(machine, nic)
    state = told.get("state")
    if state is None or not state.text:
        yield skip("its port's state cannot be read" if nic.rdma else "no RDMA device", *([state] if state else []))
        return
    name = state.text.partition(":")[2].strip() or state.text
    layer, rate = told["link_layer"].text, told["rate"].text
    number = port.rpartition("/")[2]
    if is_active(state):
        yield ok(f"port {number} is {name}, {layer}, {rate}", state, told["link_layer"], told["rate"])
    else:
        read = (state, told["phys_state"], told["link_layer"])
        yield fail(f"port {number} is {name}", *read, cure=_bring_up(machine, nic, told["phys_state"], layer))


def _bring_up(machine: Machine, nic: Nic, physical: Reading, layer: str) -> str:
    """What to do, by what is known: the interface, the subnet manager, or the cable."""
    interface = nic.interfaces[0] if nic.interfaces else ""
    if layer == "InfiniBand" and physical.text.startswith("5:"):  # LinkUp
        return "no subnet manager has set it up: start one in this network: sudo systemctl start opensm"
    flags = machine.host.read(f"/sys/class/net/{interface}/flags").number if interface else None
    if layer == "Ethernet" and flags is not None and not flags & _IFF_UP:
        return f"sudo ip link set {interface} up"
    look = f": sudo ethtool {interface}" if interface else f": ibstat {nic.name}"
    return f"no signal: look at cable, transceiver, and the port at the other end{look}"


_SHARE = "docker run --network=host …; in Kubernetes: hostNetwork: true"


@check(
    "gid", "RoCE v2 address",
    why="RoCE takes the addresses of its packets from a GID, and that of an IPv4 address is the one that routes.",
    cure="sudo ip addr add <address>/<prefix> dev <interface>; in a container without the card's interface: "
         "docker run --network=host …",
    source="Linux Documentation/ABI/testing/sysfs-class-infiniband: gid_attrs", uses=_VERBS,
)  # fmt: skip
@each_nic
def gid(machine: Machine, nic: Nic) -> Iterator[Finding]:
    """Which index to use."""
    port, told = port_of(machine, nic)
    if not port or told["link_layer"].text != "Ethernet":
        yield skip("only Ethernet ports need one", *list(told.values())[2:3])
        return
    interface = _interface(machine, nic, port)
    if (there := _elsewhere(machine, interface)) is not None:
        first = machine.host.read(f"{port}/gid_attrs/ndevs/0")
        yield fail(f"its interface {interface} is in another network namespace", first, there, cure=_SHARE)
        return
    folder = machine.host.names(f"{port}/gids")
    if not folder.ok:
        yield skip("its GIDs cannot be read", folder)
        return
    indices = (int(name) for name in folder.names if re.fullmatch("[0-9]{1,5}", name))
    entries = {index: _address(machine.host.read(f"{port}/gids/{index}")) for index in indices}
    roce = [(i, a) for i, a in entries.items() if a and _type(machine, port, i).text == "RoCE v2"]
    best = sorted(roce, key=lambda entry: (_link_local(entry[1]), entry[1].ipv4_mapped is None, entry[0]))
    cure = f"sudo ip addr add <address>/<prefix> dev {interface or '<interface>'}"
    if not best:
        used = sum(address is not None for address in entries.values())
        read = evidence(folder, f"{used} of {len(entries)} in use, none of RoCE v2")
        yield fail("no GID of RoCE v2", read, cure=f"sudo ip link set {interface or '<interface>'} up; {cure}")
        return
    index, address = best[0]
    read = [Evidence(f"{port}/gids/{index}", str(address)), evidence(_type(machine, port, index))]
    if _link_local(address):
        yield warn("link-local GIDs only: they reach no other subnet", *read, cure=cure)
    else:
        yield ok(f"GID {index} is {address.ipv4_mapped or address}", *read)


def _type(machine: Machine, port: str, index: int) -> Reading:
    return machine.host.read(f"{port}/gid_attrs/types/{index}")


def _address(reading: Reading) -> IPv6Address | None:
    """A GID; None for one that is not in use."""
    try:
        address = IPv6Address(reading.text)
    except ValueError:
        return None
    return address if int(address) else None


def _link_local(address: IPv6Address) -> bool:
    """Of fe80::/10, or of 169.254.0.0/16 in an IPv4-mapped one, which routers do not pass on either (RFC 3927)."""
    return (address.ipv4_mapped or address).is_link_local


def _interface(machine: Machine, nic: Nic, port: str) -> str:
    """The network interface of the port, "" for none."""
    first = machine.host.read(f"{port}/gid_attrs/ndevs/0").text
    return first or (nic.interfaces[0] if nic.interfaces else "")


def _elsewhere(machine: Machine, interface: str) -> Reading | None:
    """What shows that this process cannot see the interface; None when it can, or when nobody knows.

    RDMA devices are seen from all network namespaces, as long as `rdma system` says "netns shared", and interfaces are
    seen from their own only (rdma-system(8), network_namespaces(7)).
    """
    there = machine.host.names("/sys/class/net")
    return there if there.ok and interface and interface not in there.names else None


@check(
    "mtu", "MTU",
    why="A RoCE message is cut into packets of the path MTU, the largest of 256 … 4096 that fits the interface's.",
    cure="sudo ip link set <interface> mtu 4200, on both ends and on the switches between",
    source="Linux include/rdma/ib_addr.h: iboe_get_mtu", uses=_VERBS,
)  # fmt: skip
@each_nic
def mtu(machine: Machine, nic: Nic) -> Iterator[Finding]:
    """What path MTU the interface's MTU allows."""
    port, told = port_of(machine, nic)
    if not port or told["link_layer"].text != "Ethernet":
        yield skip("only Ethernet ports have one to set", *list(told.values())[2:3])
        return
    interface = _interface(machine, nic, port)
    if (there := _elsewhere(machine, interface)) is not None:
        yield skip(f"{interface} is in another network namespace: docker run --network=host", there)
        return
    reading = machine.host.read(f"/sys/class/net/{interface}/mtu") if interface else None
    if reading is None or reading.number is None:
        yield skip("its network interface's MTU cannot be read", *([reading] if reading else []))
        return
    path = next((size for size in _PATH_MTUS if reading.number >= size + _ROCE_HEADERS), 0)
    cure = f"sudo ip link set {interface} mtu {_ENOUGH_MTU}, on both ends and on the switches between"
    if path == _PATH_MTUS[0]:
        yield ok(f"{reading.number}: path MTU {path}", reading)
    elif path:
        yield warn(f"{reading.number}: path MTU {path} only, not {_PATH_MTUS[0]}", reading, cure=cure)
    else:
        yield fail(f"{reading.number} is too small for any path MTU", reading, cure=cure)


# Counters count since the driver was loaded or the card was reset, so that what is long past shows. Damage, losses
# and refusals cost time or data, so they are worth a look (WARN). What links and queues also do when they come, go, or
# hold back as they should is an event (OK).
_LOSS, _EVENT = Status.WARN, Status.OK

# Below a port's folder: NVIDIA's "Understanding mlx5 Linux counters", and the InfiniBand specification's PortCounters.
HINTS = {
    # What a sender waited for: it sent again, and lost time.
    "hw_counters/local_ack_timeout_err":          (_LOSS, "no acknowledgement in time: lost, or the peer ended"),
    "hw_counters/packet_seq_err":                 (_LOSS, "NAKs of lost packets: congestion without PFC/ECN, bad link"),
    "hw_counters/out_of_sequence":                (_LOSS, "packets came out of order or never: congestion, many paths"),
    "hw_counters/out_of_buffer":                  (_LOSS, "no receive was posted when a packet came"),
    "hw_counters/rnr_nak_retry_err":              (_LOSS, "the peer had no receive posted (receiver not ready)"),
    # What ended a queue pair.
    "hw_counters/req_remote_access_errors":       (_LOSS, "the peer refused an address: wrong rkey, range, or rights"),
    "hw_counters/req_transport_retries_exceeded": (_LOSS, "a peer never answered: wrong GID, MTU, route, or it ended"),
    # All completions with an error: also those of what was still posted when a program closed its queue pairs.
    "hw_counters/req_cqe_error":                  (_EVENT, "sends ended with an error; closing a QP flushes, too"),
    "hw_counters/resp_cqe_error":                 (_EVENT, "receives ended with an error; closing a QP flushes, too"),
    # Bits and packets that were damaged or thrown away.
    "counters/symbol_error":                      (_LOSS, "bits were wrong: cable or transceiver"),
    "counters/port_rcv_errors":                   (_LOSS, "packets came damaged: cable or transceiver"),
    "counters/local_link_integrity_errors":       (_LOSS, "the link had too many errors: cable or transceiver"),
    "counters/excessive_buffer_overrun_errors":   (_LOSS, "more came than there were credits for: a switch's setting"),
    "counters/port_xmit_discards":                (_LOSS, "thrown away unsent: the link is down or congested"),
    # Each restart of either end counts, and a cable that is plugged in.
    "counters/link_error_recovery":               (_EVENT, "the link was retrained: often, it is cable or transceiver"),
    "counters/link_downed":                       (_EVENT, "the link went down: cable, or the other end restarted"),
}  # fmt: skip


def _told(shown: list[tuple[Status, str, Evidence]], known: int, zero: Evidence, cure: str) -> Finding:
    """What is said of those of the `known` counters that are not 0, each with its grade and name: losses first."""
    some = sorted(shown, key=lambda one: one[0] is not _LOSS)
    losses = [name for grade, name, _ in some if grade is _LOSS]
    names = losses or [name for _, name, _ in some]
    more = f", +{len(names) - 2}" if len(names) > 2 else ""
    if losses:
        return warn(f"not 0: {', '.join(names[:2])}{more}", *(told for _, _, told in some), cure=cure)
    if names:
        return ok(f"nothing lost; events: {', '.join(names[:2])}{more}", *(told for _, _, told in some))
    return ok(f"all {known} are 0", zero)


@check(
    "counters", "Counters of errors",
    why="Losses and refusals that a healthy port does not have tell where packets or rights are missing.",
    cure="watch -d 'grep . /sys/class/infiniband/<device>/ports/1/*counters/*' while it runs: old errors stay counted",
    source="NVIDIA: Understanding mlx5 Linux Counters and Status Parameters", uses=_NETWORK,
)  # fmt: skip
@each_nic
def counters(machine: Machine, nic: Nic) -> Iterator[Finding]:
    """Those that are not 0, and what each hints at."""
    port, _ = port_of(machine, nic)
    readings = {name: machine.host.read(f"{port}/{name}") for name in HINTS} if port else {}
    values = {name: reading.number for name, reading in readings.items() if reading.number is not None}
    if not values:
        yield skip("it has no counters" if port else "no RDMA device", *list(readings.values())[:1])
        return
    shown = [
        (HINTS[name][0], name.rpartition("/")[2], Evidence(f"{port}/{name}", f"{value}: {HINTS[name][1]}"))
        for name, value in values.items() if value
    ]  # fmt: skip
    cure = f"watch -d 'grep . {port}/*counters/*' while it runs: old errors stay counted"
    yield _told(shown, len(values), evidence(next(iter(readings.values())), 0), cure)


# Of `ethtool -S`: kernel Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst.
INTERFACE_HINTS = {
    r"rx_discards_phy":         (_LOSS, "the card had no room: PCIe or memory is too slow, or no flow control"),
    r"tx_discards_phy":         (_LOSS, "packets were thrown away unsent: the link is down or paused"),
    r"rx_out_of_buffer":        (_LOSS, "a receive queue had no buffer left"),
    r"rx_crc_errors_phy":       (_LOSS, "packets came damaged: cable or transceiver"),
    # Whatever a switch floods to all its ports counts here where nobody wants it.
    r"rx_steer_missed_packets": (_EVENT, "packets came for which there was no steering rule"),
    r"link_down_events_phy":    (_EVENT, "the link went down: cable, or the other end restarted"),
    # Flow control at work: it holds packets back lest they be lost.
    r"rx_prio\d_pause":         (_EVENT, "the switch told the card to pause: congestion behind it"),
    r"tx_prio\d_pause":         (_EVENT, "the card told the switch to pause: PCIe or memory is too slow"),
}  # fmt: skip
_COUNTER = re.compile(r"^\s*(\w{1,60}): (\d{1,20})$", re.MULTILINE)


@check(
    "interface-counters", "Counters of the network interface",
    why="What the card drops or is told to hold back never reaches a queue, so that only these counters tell of it.",
    cure="watch -d 'ethtool -S <interface>' while it runs: what was counted stays counted",
    source="Linux Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst", uses=_NETWORK,
)  # fmt: skip
@each_nic
def interface_counters(machine: Machine, nic: Nic) -> Iterator[Finding]:
    """Those of `ethtool -S` that are not 0, and what each hints at."""
    if not nic.interfaces:
        yield skip("it has no network interface")
        return
    told = machine.host.run("ethtool", "-S", nic.interfaces[0])
    known = {
        name: (int(value), *graded)
        for name, value in _COUNTER.findall(told.text)
        for pattern, graded in INTERFACE_HINTS.items()
        if re.fullmatch(pattern, name)
    }
    if not known:
        yield skip(f"ethtool tells none of {nic.interfaces[0]}", told)
        return
    shown = [
        (grade, name, evidence(told, f"{name}: {value} ({hint})")) for name, (value, grade, hint) in known.items()
        if value
    ]  # fmt: skip
    cure = f"watch -d 'ethtool -S {nic.interfaces[0]}' while it runs: what was counted stays counted"
    yield _told(shown, len(known), evidence(told, "0"), cure)


CHECKS = (port_state, gid, mtu, counters, interface_counters)
