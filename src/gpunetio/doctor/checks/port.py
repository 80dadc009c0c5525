"""Check a network card's port: link, GIDs, MTU and error counters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv6Address

from ..finding import Evidence, Finding, Status, Use, check, evidence, fail, ok, skip, warn
from ..machine.devices import Machine, Nic
from ..machine.host import Reading
from ..machine.nics import each_nic, port_of
from ..machine.topology import active, is_active

AREA = "Ports"
_SYSFS = "Linux Documentation/ABI/stable/sysfs-class-infiniband"
_NETWORK = frozenset({Use.ETHERNET, Use.VERBS})  # DMA stays inside the machine
_VERBS = frozenset({Use.VERBS})
_IFF_UP = 1  # linux/if.h
# The headers of a RoCE packet at most: GRH 40, UDP 8, BTH 12, XRCETH 4, AtomicETH 28, ICRC 4 (include/rdma/ib_addr.h).
_ROCE_HEADERS = 96
_PATH_MTUS = (4096, 2048, 1024, 512, 256)
_ENOUGH_MTU = 4200  # the usual one for RoCE: 4096 and headers


@check(
    "port-state", "Link of the port",
    why="Only a port in the state ACTIVE sends and receives packets.",
    cure="sudo ip link set <interface> up; check cable, transceiver and switch: sudo ethtool <interface>",
    source=_SYSFS, uses=_NETWORK, essential=True,
)
@each_nic
def port_state(machine: Machine, nic: Nic) -> Iterator[Finding]:
    """Check that one of the NIC's ports is active."""
    port, told = port_of(machine, nic)
    state = told.get("state")
    if state is None or not state.text:
        yield skip("cannot read its port's state" if nic.rdma else "no RDMA device", *([state] if state else []))
        return
    name = state.text.partition(":")[2].strip() or state.text
    layer, rate = told["link_layer"].text, told["rate"].text
    number = port.rpartition("/")[2]
    if is_active(state):
        yield ok(f"port {number} is {name}, {layer}, {rate}", state, told["link_layer"], told["rate"])
    else:
        read = (state, told["phys_state"], told["link_layer"])
        cure = _bring_up(machine, nic, told["phys_state"], layer)
        # Second ports of cards are often not used.
        others = any(active(machine, other) for other in machine.nics if other.rdma and other != nic)
        yield fail(f"port {number} is {name}", *read, cure=cure, brief=others)


def _bring_up(machine: Machine, nic: Nic, physical: Reading, layer: str) -> str:
    """Return the likely cure: the interface, the subnet manager, or the cable."""
    interface = nic.interfaces[0] if nic.interfaces else ""
    if layer == "InfiniBand" and physical.text.startswith("5:"):  # LinkUp
        return "no subnet manager has configured it: start one in this network: sudo systemctl start opensm"
    flags = machine.host.read(f"/sys/class/net/{interface}/flags").number if interface else None
    if layer == "Ethernet" and flags is not None and not flags & _IFF_UP:
        return f"sudo ip link set {interface} up"
    look = f": sudo ethtool {interface}" if interface else f": ibstat {nic.name}"
    return f"no signal: check cable, transceiver, and the port at the other end{look}"


_SHARE = "docker run --network=host …; in Kubernetes: hostNetwork: true"


def _not_ethernet(told: dict[str, Reading]) -> Finding | None:
    """Return the finding of a check that is only for Ethernet, on another port."""
    layer = told.get("link_layer")
    if layer is not None and layer.text == "Ethernet":
        return None
    return skip("only for Ethernet ports", *([layer] if layer else []))


@check(
    "gid", "RoCE v2 address",
    why="RoCE takes the addresses of its packets from a GID. Routers forward only addresses that are not link-local.",
    cure="sudo ip addr add <address>/<prefix> dev <interface>; in a container without the card's interface: "
         "docker run --network=host …",
    source="Linux Documentation/ABI/testing/sysfs-class-infiniband: gid_attrs", uses=_VERBS,
)
@each_nic
def gid(machine: Machine, nic: Nic) -> Iterator[Finding]:
    """Find the best GID for RoCE v2."""
    port, told = port_of(machine, nic)
    if (other := _not_ethernet(told)) is not None:
        yield other
        return
    folder = machine.host.names(f"{port}/gids")
    if not folder.ok:
        yield skip("cannot read its GIDs", folder)
        return
    entries = _gids(machine, port, folder)
    roce = _for_roce(entries)
    best = _best_here(machine, nic, port, roce)
    owner, interface = _owner(machine, nic, port, best or next(iter(roce), None))
    if best is None and (there := _elsewhere(machine, interface)) is not None:
        yield fail(f"its interface {interface} is in another network namespace", owner, there, cure=_SHARE)
        return
    cure = f"sudo ip addr add <address>/<prefix> dev {interface or '<interface>'}"
    if best is None:
        read = evidence(folder, f"{len(entries)} of {len(folder.names)} in use, none for RoCE v2")
        yield fail("no GID for RoCE v2", read, cure=f"sudo ip link set {interface or '<interface>'} up; {cure}")
        return
    read = [Evidence(f"{port}/gids/{best.index}", str(best.address)), evidence(best.version)]
    if _link_local(best.address):
        yield warn("only link-local GIDs, which reach no other subnet", *read, cure=cure)
    else:
        yield ok(f"GID {best.index} is {best.address.ipv4_mapped or best.address}", *read)


@dataclass(frozen=True)
class _Gid:
    """An entry of a port's GID table that is in use."""

    index: int
    address: IPv6Address
    version: Reading  # such as "RoCE v2"


def _gids(machine: Machine, port: str, folder: Reading) -> list[_Gid]:
    """Return the entries in use, the best first: no link-local address, IPv4, the lowest index."""
    indices = (int(name) for name in folder.names if re.fullmatch("[0-9]{1,5}", name))
    addresses = {index: _address(machine.host.read(f"{port}/gids/{index}")) for index in indices}
    entries = [
        _Gid(index, address, machine.host.read(f"{port}/gid_attrs/types/{index}"))
        for index, address in addresses.items() if address
    ]
    return sorted(entries, key=lambda one: (_link_local(one.address), one.address.ipv4_mapped is None, one.index))


def _for_roce(gids: list[_Gid]) -> list[_Gid]:
    return [one for one in gids if one.version.text == "RoCE v2"]


def _best_here(machine: Machine, nic: Nic, port: str, gids: list[_Gid]) -> _Gid | None:
    """Return the first GID whose interface is not in another network namespace: packets leave by that interface."""
    return next((one for one in gids if _elsewhere(machine, _owner(machine, nic, port, one)[1]) is None), None)


def _owner(machine: Machine, nic: Nic, port: str, gid: _Gid | None) -> tuple[Reading, str]:
    """Return the network interface of a GID, or else of the port, with its evidence; "" if there is none.

    A port has several where macvlan, ipvlan or VLAN interfaces have addresses: each GID belongs to one of them.
    """
    first = machine.host.read(f"{port}/gid_attrs/ndevs/0")
    own = machine.host.read(f"{port}/gid_attrs/ndevs/{gid.index}") if gid else first
    told = own if own.text else first
    return told, told.text or (nic.interfaces[0] if nic.interfaces else "")


def _address(reading: Reading) -> IPv6Address | None:
    """Parse a GID; return None for an unused one."""
    try:
        address = IPv6Address(reading.text)
    except ValueError:
        return None
    return address if int(address) else None


def _link_local(address: IPv6Address) -> bool:
    """Return whether an address is in fe80::/10, or IPv4-mapped in 169.254.0.0/16 (RFC 3927): routers drop both."""
    return (address.ipv4_mapped or address).is_link_local


def _elsewhere(machine: Machine, interface: str) -> Reading | None:
    """Return the evidence that this process cannot see the interface; None if it can, or if this is unknown.

    RDMA devices are visible in all network namespaces if `rdma system` says "netns shared". Interfaces are visible
    only in their own (rdma-system(8), network_namespaces(7)).
    """
    there = machine.host.names("/sys/class/net")
    return there if there.ok and interface and interface not in there.names else None


@check(
    "mtu", "MTU",
    why="RoCE cuts a message into packets of the path MTU: the largest of 256 … 4096 that fits the interface's MTU.",
    cure="sudo ip link set <interface> mtu 4200, at both ends and on the switches between",
    source="Linux include/rdma/ib_addr.h: iboe_get_mtu", uses=_VERBS,
)
@each_nic
def mtu(machine: Machine, nic: Nic) -> Iterator[Finding]:
    """Compute the path MTU from the interface's MTU."""
    port, told = port_of(machine, nic)
    if (other := _not_ethernet(told)) is not None:
        yield other
        return
    roce = _for_roce(_gids(machine, port, machine.host.names(f"{port}/gids")))
    _, interface = _owner(machine, nic, port, _best_here(machine, nic, port, roce))
    if (there := _elsewhere(machine, interface)) is not None:
        yield skip(f"{interface} is in another network namespace: docker run --network=host", there)
        return
    reading = machine.host.read(f"/sys/class/net/{interface}/mtu") if interface else None
    if reading is None or reading.number is None:
        yield skip("cannot read the MTU of its network interface", *([reading] if reading else []))
        return
    path = next((size for size in _PATH_MTUS if reading.number >= size + _ROCE_HEADERS), 0)
    cure = f"sudo ip link set {interface} mtu {_ENOUGH_MTU}, at both ends and on the switches between"
    if path == _PATH_MTUS[0]:
        yield ok(f"{reading.number}: path MTU {path}", reading)
    elif path:
        yield warn(f"{reading.number}: path MTU {path}, not {_PATH_MTUS[0]}", reading, cure=cure)
    else:
        yield fail(f"{reading.number} is too small for any path MTU", reading, cure=cure)


# Counters start when the driver is loaded or the card is reset, so they also show old errors. Damage, losses and
# refusals cost time or data and deserve a look (WARN). Normal starts, stops and flow control of links and queues are
# events (OK).
_LOSS, _EVENT = Status.WARN, Status.OK

# Below a port's folder: NVIDIA's "Understanding mlx5 Linux counters", and the InfiniBand specification's PortCounters.
HINTS = {
    # The sender had to retransmit, and lost time.
    "hw_counters/local_ack_timeout_err":          (_LOSS, "no acknowledgement in time: lost, or the peer has ended"),
    "hw_counters/packet_seq_err":                 (_LOSS, "NAKs of lost packets: congestion without PFC/ECN, bad link"),
    "hw_counters/out_of_sequence":                (_LOSS, "packets reordered or lost: congestion, several paths"),
    "hw_counters/out_of_buffer":                  (_LOSS, "no receive was posted when a packet arrived"),
    "hw_counters/rnr_nak_retry_err":              (_LOSS, "the peer had posted no receive (receiver not ready)"),
    # The queue pair went into the error state.
    "hw_counters/req_remote_access_errors":       (_LOSS, "the peer refused an address: wrong rkey, range, or rights"),
    "hw_counters/req_transport_retries_exceeded": (_LOSS, "a peer never answered: wrong GID, MTU, route, or it ended"),
    # All completions with an error, including requests flushed when a program closed its queue pairs.
    "hw_counters/req_cqe_error":                  (_EVENT, "sends failed; closing a QP flushes sends, too"),
    "hw_counters/resp_cqe_error":                 (_EVENT, "receives failed; closing a QP flushes receives, too"),
    # Damaged or dropped packets.
    "counters/symbol_error":                      (_LOSS, "bit errors: cable or transceiver"),
    "counters/port_rcv_errors":                   (_LOSS, "damaged packets: cable or transceiver"),
    "counters/local_link_integrity_errors":       (_LOSS, "the link had too many errors: cable or transceiver"),
    "counters/excessive_buffer_overrun_errors":   (_LOSS, "more data than credits: a setting of the switch"),
    "counters/port_xmit_discards":                (_LOSS, "dropped before sending: the link is down or congested"),
    # A restart of either end counts, and so does plugging in a cable.
    "counters/link_error_recovery":               (_EVENT, "the link was retrained; if often: cable or transceiver"),
    "counters/link_downed":                       (_EVENT, "the link went down: cable, or the other end restarted"),
}


def _told(shown: list[tuple[Status, str, Evidence]], known: int, zero: Evidence, cure: str) -> Finding:
    """Judge the nonzero ones (`shown`: grade, name and evidence) of `known` counters; losses come first."""
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
    "counters", "Error counters",
    why="A healthy port has no losses or refusals. Its counters hint at the cause of missing packets or rights.",
    cure="watch -d 'grep . /sys/class/infiniband/<device>/ports/1/*counters/*' while it runs: old errors stay counted",
    source="NVIDIA: Understanding mlx5 Linux Counters and Status Parameters", uses=_NETWORK,
)
@each_nic
def counters(machine: Machine, nic: Nic) -> Iterator[Finding]:
    """Report the counters that are not 0, with the likely cause of each."""
    port, _ = port_of(machine, nic)
    readings = {name: machine.host.read(f"{port}/{name}") for name in HINTS} if port else {}
    values = {name: reading.number for name, reading in readings.items() if reading.number is not None}
    if not values:
        yield skip("it has no counters" if port else "no RDMA device", *list(readings.values())[:1])
        return
    shown = [
        (HINTS[name][0], name.rpartition("/")[2], Evidence(f"{port}/{name}", f"{value}: {HINTS[name][1]}"))
        for name, value in values.items() if value
    ]
    cure = f"watch -d 'grep . {port}/*counters/*' while it runs: old errors stay counted"
    yield _told(shown, len(values), evidence(next(iter(readings.values())), 0), cure)


# Of `ethtool -S`: kernel Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst.
INTERFACE_HINTS = {
    r"rx_discards_phy":         (_LOSS, "the card's buffer was full: PCIe or memory is too slow, or no flow control"),
    r"tx_discards_phy":         (_LOSS, "packets dropped before sending: the link is down or paused"),
    r"rx_out_of_buffer":        (_LOSS, "a receive queue had no buffer left"),
    r"rx_crc_errors_phy":       (_LOSS, "damaged packets: cable or transceiver"),
    # Packets that a switch floods to all its ports count here if no rule takes them.
    r"rx_steer_missed_packets": (_EVENT, "no steering rule matched the packets"),
    r"link_down_events_phy":    (_EVENT, "the link went down: cable, or the other end restarted"),
    # Flow control at work: it delays packets to avoid losses.
    r"rx_prio\d_pause":         (_EVENT, "the switch told the card to pause: congestion behind it"),
    r"tx_prio\d_pause":         (_EVENT, "the card told the switch to pause: PCIe or memory is too slow"),
}
_COUNTER = re.compile(r"^\s*(\w{1,60}): (\d{1,20})$", re.MULTILINE)


@check(
    "interface-counters", "Counters of the network interface",
    why="Packets that the card drops or delays never reach a queue. Only these counters show them.",
    cure="watch -d 'ethtool -S <interface>' while it runs: old events stay counted",
    source="Linux Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst", uses=_NETWORK,
)
@each_nic
def interface_counters(machine: Machine, nic: Nic) -> Iterator[Finding]:
    """Report the counters of `ethtool -S` that are not 0, with the likely cause of each."""
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
        yield skip(f"ethtool shows no known counters of {nic.interfaces[0]}", told)
        return
    shown = [
        (grade, name, evidence(told, f"{name}: {value} ({hint})")) for name, (value, grade, hint) in known.items()
        if value
    ]
    cure = f"watch -d 'ethtool -S {nic.interfaces[0]}' while it runs: old events stay counted"
    yield _told(shown, len(known), evidence(told, "0"), cure)


CHECKS = (port_state, gid, mtu, counters, interface_counters)
