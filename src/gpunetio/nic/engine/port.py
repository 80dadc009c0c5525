"""The port of a software NIC: its addresses, and the GIDs, MAC, MTU and LID that follow from them."""

from __future__ import annotations

import array
import contextlib
import fcntl
import re
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from ...arguments import instance, member, path, text, truth, whole
from ...enums import LinkLayer
from ...errors import InvalidValueError
from ...fabric import interface
from ...fabric.faults import Faults
from ...formats.packet import IPV4_MAPPED, LINK_LOCAL, ROCE_UDP_PORT

IPAddress = IPv4Address | IPv6Address
CONNECTX_7 = 0x1021  # PCI device id

MTUS = (4096, 2048, 1024, 512, 256)
# Bytes of a link's MTU beyond the payload, as the kernel counts them: IPv6, UDP, BTH, largest extended headers, ICRC.
MAX_HEADERS = 80
_SIOCGIFCONF = 0x8912
_IFREQ_SIZE, _MAX_INTERFACES = 40, 1024
_LAST_UNICAST_LID = 0xBFFF  # IBTA 4.1.3
_LAST_PART_ID = 0xFFFF
MAX_GID = 16  # entries of the GID table
MOST_ADDRESSES = MAX_GID - 1  # in addition to the link-local GID
MOST_WORKERS = 16
MOST_COPIERS = 31
CPU, TWIN = "cpu", "twin"
ENGINES = (CPU, TWIN, "gpu", "gpuN")  # the values in help texts and messages
_GPU = re.compile(r"gpu(\d*)")
_DEFAULT_LINK_MTU = 1500
_NOMINAL_SPEED = 10_000  # Mbit/s
_RATES = (  # largest Mbit/s: ibv_port_attr.active_width, active_speed
    (1_000, (1, 1)), (10_000, (1, 8)), (20_000, (2, 2)), (25_000, (1, 32)), (40_000, (2, 8)), (50_000, (16, 32)),
    (100_000, (2, 32)), (200_000, (2, 64)), (400_000, (2, 128)), (800_000, (2, 256)),
)
_SMALLEST_LINK_MTU, _LARGEST_LINK_MTU = MAX_HEADERS + MTUS[-1], 65536


@dataclass(frozen=True)
class WireKind:
    """A type of wire: how a port reaches its peers.

    `module` is the module in nic/wires that implements the wire. With `neighbours`, the port reaches NICs of this host
    through shared memory, and uses the wire for all others. `infiniband`: InfiniBand ports can use the wire. `routed`:
    the peers are in the IP networks of this machine, and the port has addresses of this machine. `ethernet`: the wire
    carries Ethernet frames, and the port has its own MAC and addresses there. `argument` describes the text after the
    name and a colon; with `interface`, that text names a network interface. `file`: a capture file is replayed there.
    """

    module: str
    neighbours: bool = False
    infiniband: bool = False
    routed: bool = True
    ethernet: bool = False
    argument: str = ""
    interface: bool = False
    file: bool = False


WIRES = {
    "auto":   WireKind("udp", neighbours=True),
    "udp":    WireKind("udp"),
    "replay": WireKind("replay", infiniband=True, routed=False, file=True),
    "packet": WireKind("packet", routed=False, ethernet=True, argument="INTERFACE", interface=True),
    "tap":    WireKind("tap",    routed=False, ethernet=True, argument="NAME",      interface=True),
    "unix":   WireKind("unix",   routed=False, ethernet=True, argument="PATH"),
    "dgram":  WireKind("dgram",  routed=False, ethernet=True, argument="LOCAL,REMOTE"),
    "pcap":   WireKind("pcap",   routed=False, ethernet=True, argument="FILE", file=True),
}
_INTERFACE = re.compile(r"[^\s/:%]{1,15}")  # what the kernel takes for a name (dev_valid_name); % is for patterns


def wire_syntax(name: str) -> str:
    """Return the syntax of a type of wire: its name, and the argument after a colon if it has one."""
    argument = WIRES[name].argument
    return f"{name}:{argument}" if argument else name


def check_wire(wire: str) -> None:
    """Raise InvalidValueError unless `wire` can be a PortConfig's."""
    name, colon, argument = wire.partition(":")
    if name not in WIRES or (colon and not WIRES[name].argument):
        raise InvalidValueError(f"wire = {wire!r}: it must be one of {', '.join(map(wire_syntax, WIRES))}")
    if WIRES[name].argument and not argument:
        raise InvalidValueError(f"wire = {wire!r}: it lacks what it leads to: {wire_syntax(name)}")
    if WIRES[name].interface and (not _INTERFACE.fullmatch(argument) or argument in (".", "..")):
        raise InvalidValueError(
            f"wire = {wire!r}: {argument!r} cannot be the name of a network interface, which has 1 to 15 characters "
            "and neither spaces nor any of / : %"
        )


def check_engine(engine: str) -> None:
    """Raise InvalidValueError unless `engine` can be a PortConfig's."""
    if engine not in (CPU, TWIN) and not _GPU.fullmatch(engine):
        raise InvalidValueError(f"engine = {engine!r}: it must be one of {', '.join(ENGINES)}; N counts GPUs from 0")


@dataclass(frozen=True)
class PortConfig:
    """How a software NIC is connected.

    `addresses`    IPv4 and IPv6 addresses of this machine to bind to, or a single one; stored as a tuple. By default,
                   soft n has 127.0.0.(n+1). On a wire that carries Ethernet, the NIC's own addresses, which no other
                   host may have
    `wire`         "auto": shared memory to NICs of this host, UDP to others; "udp": UDP to every NIC but itself;
                   "replay": only to the packets of a capture file (nic/wires/replay.py);
                   "packet:INTERFACE": Ethernet, through a network interface of this machine; "tap:NAME": Ethernet,
                   through a TAP device, which is created if it does not exist; "unix:PATH": Ethernet, to one other NIC
                   or to a virtual machine, through a stream socket; "dgram:LOCAL,REMOTE": the same, with datagrams
                   between two paths; "pcap:FILE": Ethernet, with frames from a capture file (nic/wires/pcap.py)
    `mtu`          MTU of the link in bytes (the path MTU is smaller); 0 means the MTU of the addresses' interface
    `link_layer`   ETHERNET (RoCE v2), or INFINIBAND, which reaches only software NICs of this host
    `lid`          LID of an InfiniBand port; 0 means the last 16 bits of its first address
    `faults`       faults to inject into outgoing frames, or None; stored as Faults. A string as for `--faults` is
                   accepted: "loss=0.01,seed=7"
    `capture`      a pcap file, for Wireshark, to which every packet sent or received is written, or None; for a folder,
                   a new file there, NIC-PID.pcap, each time the NIC is opened
    `workers`      number of threads that serve the NIC's queues; 0 means one per four cores, at most four
    `promiscuous`  whether flow rules apply to Ethernet frames to any MAC, or only to frames to the port's MAC and to
                   group addresses
    `send_scheduling`  whether Ethernet send queues may wait for a time (a card's ACCURATE_TX_SCHEDULER)
    `engine`       where the NIC's turns are made: "cpu"; "gpu" or "gpuN", the first GPU or the GPU with ordinal N; or
                   "twin", the twin of a GPU (jit/twin.py). Except with "cpu", queues and payload may lie in memory that
                   the CPU cannot access
    `copiers`      with a GPU engine, number of SMs per worker that only copy payload: together they copy a queue pair's
                   large writes (about a megabyte)
    `part_id`      the vendor_part_id that the device reports: a ConnectX-7's, or 0 for a device of its own kind
    """

    addresses: Sequence[str] = ()
    wire: str = "auto"
    mtu: int = 0
    link_layer: LinkLayer = LinkLayer.ETHERNET
    lid: int = 0
    faults: Faults | str | None = None
    capture: str | Path | None = None
    part_id: int = CONNECTX_7
    workers: int = 0
    promiscuous: bool = True
    send_scheduling: bool = True
    engine: str = "cpu"
    copiers: int = 0

    def __post_init__(self) -> None:
        self._set("addresses", _addresses(self.addresses))
        self._set("wire", text("wire", self.wire))
        check_wire(self.wire)
        self._set("mtu", whole("mtu", self.mtu))
        if self.mtu and not _SMALLEST_LINK_MTU <= self.mtu <= _LARGEST_LINK_MTU:
            raise InvalidValueError(
                f"mtu = {self.mtu} bytes: a link has {_SMALLEST_LINK_MTU} to {_LARGEST_LINK_MTU} bytes; 0 means the "
                "MTU of the interface"
            )
        self._set("link_layer", member("link_layer", self.link_layer, LinkLayer))
        self._set("lid", whole("lid", self.lid))
        if not 0 <= self.lid <= _LAST_UNICAST_LID:
            raise InvalidValueError(
                f"lid = {self.lid:#x}: unicast LIDs are 1 to {_LAST_UNICAST_LID:#x}; 0 takes it from the address"
            )
        if isinstance(self.faults, str):
            self._set("faults", Faults.parse(self.faults))
        elif self.faults is not None:
            instance("faults", self.faults, Faults, str)
        if self.capture is not None:
            self._set("capture", path("capture", self.capture))
        self._set("part_id", whole("part_id", self.part_id))
        if not 0 <= self.part_id <= _LAST_PART_ID:
            raise InvalidValueError(f"part_id = {self.part_id:#x}: PCI device ids have 16 bits")
        self._set("workers", whole("workers", self.workers))
        if not 0 <= self.workers <= MOST_WORKERS:
            raise InvalidValueError(
                f"workers = {self.workers}: a NIC has 1 to {MOST_WORKERS} threads; 0 takes as many as suit the machine"
            )
        for name in ("promiscuous", "send_scheduling"):
            self._set(name, truth(name, getattr(self, name)))
        self._set("engine", text("engine", self.engine))
        check_engine(self.engine)
        self._set("copiers", whole("copiers", self.copiers))
        self._check_copiers()
        self._check_wire_kind()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # a frozen dataclass allows no other assignment

    def _check_copiers(self) -> None:
        if not 0 <= self.copiers <= MOST_COPIERS:
            raise InvalidValueError(f"copiers = {self.copiers}: a worker has 0 to {MOST_COPIERS} SMs that only copy")
        if self.copiers and not self.on_gpu:
            raise InvalidValueError(f"copiers = {self.copiers} with engine 'cpu': only with 'gpu', SMs copy")

    def _check_wire_kind(self) -> None:
        kind = self.wire_kind
        if self.on_gpu and not kind.neighbours:
            raise InvalidValueError(
                f"wire = {self.wire!r} with engine {self.engine!r}: packets of descriptors go through the CPU, which "
                "does not reach the memory of queues on a GPU; such a NIC has the wire 'auto', to NICs of this host"
            )
        if self.link_layer is LinkLayer.INFINIBAND and not (kind.neighbours or kind.infiniband):
            raise InvalidValueError(
                f"an InfiniBand port has no {self.wire.partition(':')[0].upper()} wire: RoCE v2 is for link_layer "
                "ETHERNET"
            )

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU or its twin makes the NIC's turns, so that memory may be inaccessible to the CPU."""
        return self.engine != CPU

    @property
    def gpu(self) -> int:
        """The ordinal of the GPU that makes the NIC's turns."""
        found = _GPU.fullmatch(self.engine)
        return int(found[1] or 0) if found else 0

    @property
    def on_cuda(self) -> bool:
        """Whether a CUDA device makes the NIC's turns. The CPU cannot read its clock."""
        return self.engine not in (CPU, TWIN)

    @property
    def engine_name(self) -> str:
        """The engine, with the ordinal if it is on a GPU."""
        return f"gpu{self.gpu}" if _GPU.fullmatch(self.engine) else self.engine

    @property
    def wire_kind(self) -> WireKind:
        """The type of the port's wire."""
        return WIRES[self.wire.partition(":")[0]]

    @property
    def wire_argument(self) -> str:
        """The text after the colon in `wire`, such as the name of an interface; "" without one."""
        return self.wire.partition(":")[2]


class Port:
    """The port that `config` describes. `default` is its address if the configuration names none."""

    addresses: tuple[IPAddress, ...]
    link_layer: LinkLayer
    infiniband: bool
    lid: int
    link_mtu: int
    active_mtu: int

    def __init__(self, config: PortConfig, default: str):
        self.config = config
        self.addresses = tuple(_parse(text) for text in config.addresses or (default,))
        self.link_layer = config.link_layer
        self.infiniband = config.link_layer is LinkLayer.INFINIBAND
        self.lid = self._lid() if self.infiniband else 0
        if config.wire_kind.ethernet:
            self._check_addresses()
        self.link_mtu = config.mtu or self._link_mtu()
        self.active_mtu = next((mtu for mtu in MTUS if mtu + MAX_HEADERS <= self.link_mtu), MTUS[-1])

    def _check_addresses(self) -> None:
        """Refuse addresses that cannot be used on an Ethernet: loopback, unspecified and multicast."""
        for address in self.addresses:
            if address.is_loopback or address.is_unspecified or address.is_multicast:
                raise InvalidValueError(
                    f"wire {self.config.wire} carries Ethernet, where {address} is nobody's address: give the port "
                    'addresses of its own there, as in addresses=("192.168.77.1",) or --address 192.168.77.1'
                )

    def _link_mtu(self) -> int:
        """Return the MTU of the interface that the port uses, or Ethernet's for a TAP device that does not exist yet.

        A capture file has frames of any length, so its MTU is the largest.
        """
        if not self.config.wire_kind.ethernet:
            return min(map(link_mtu_of, self.addresses))
        if self.config.wire_kind.file:
            return _LARGEST_LINK_MTU
        name = self.config.wire_argument
        named = self.config.wire_kind.interface and interface.exists(name)
        return interface.mtu_of(name) if named else _DEFAULT_LINK_MTU

    def _lid(self) -> int:
        first = self.addresses[0]
        lid = self.config.lid or int.from_bytes(first.packed[-2:], "big")
        if not 1 <= lid <= _LAST_UNICAST_LID:
            raise InvalidValueError(
                f"{first} gives the port LID {lid:#x}, but unicast LIDs are 1 to {_LAST_UNICAST_LID:#x}: give it "
                "another address, or a lid"
            )
        return lid

    @property
    def mac(self) -> bytes:
        """Return a locally administered MAC. It contains the first address's last four bytes, unique on the link."""
        return mac_of(self.addresses[0])

    @property
    def gids(self) -> list[bytes]:
        """Return the GID table: on Ethernet the first address, the link-local GID, then the other addresses.

        On InfiniBand, it has the link-local GID only.
        """
        mac = self.mac
        link_local = LINK_LOCAL + bytes([mac[0] ^ 2]) + mac[1:3] + b"\xff\xfe" + mac[3:]
        if self.infiniband:
            return [link_local]
        first, *others = (gid_of(address) for address in self.addresses)
        return [first, link_local, *others]

    @cached_property
    def rate(self) -> tuple[int, int]:
        """Return libibverbs' codes for the width and speed of the slowest interface that has an address of the port.

        Like the MTU, they are read only once.
        """
        return _rate(min(map(speed_of, self.addresses)))

    @property
    def no_ethernet(self) -> str:
        """Return why the port can have no Ethernet queues; "" if it can."""
        if self.infiniband:
            return "the port's link layer is InfiniBand"
        kind = self.config.wire_kind
        if not kind.ethernet and not kind.neighbours:  # shared memory carries frames between NICs of this host
            return f"the port's wire is {self.config.wire!r}, which carries no Ethernet frames"
        return ""

    def source_address(self, index: int) -> IPAddress:
        """Return the IP address of entry `index` of the GID table; for the link-local GID, the first address."""
        return self.control_addresses[max(0, index - 1)]

    def is_link_local(self, index: int) -> bool:
        """Return whether entry `index` of the GID table is the link-local GID, which is derived from the MAC."""
        return index == 1

    @property
    def control_addresses(self) -> tuple[IPAddress, ...]:
        """Return the addresses at which NICs of this host find this NIC. On InfiniBand they know only its LID."""
        return (self.address_of_lid(self.lid),) if self.infiniband else self.addresses

    def address_of_lid(self, lid: int) -> IPAddress:
        """Return the address of the NIC with this LID.

        There is no subnet manager: a LID is the last 16 bits of an address.
        """
        first = self.addresses[0].packed
        return ip_address(first[:-2] + lid.to_bytes(2, "big"))


def _addresses(given: object) -> tuple[str, ...]:
    """Return the addresses of a port as text, in canonical form and without duplicates."""
    if isinstance(given, str | IPAddress):
        given = (given,)
    if not isinstance(given, Iterable) or isinstance(given, bytes | bytearray):
        raise InvalidValueError(
            f"addresses = {given!r} is of type {type(given).__name__}: give IPv4 or IPv6 addresses, as text"
        )
    texts = tuple(map(_text_of, given))
    if len(texts) > MOST_ADDRESSES:
        raise InvalidValueError(
            f"{len(texts)} addresses: a port has at most {MOST_ADDRESSES}, because its GID table has {MAX_GID} entries "
            "and one of them is the link-local GID"
        )
    for number, found in enumerate(map(_parse, texts)):
        if found in map(_parse, texts[:number]):
            raise InvalidValueError(f"addresses: {found} is there twice")
    return texts


def _text_of(address: object) -> str:
    return str(address) if isinstance(address, IPAddress) else instance("addresses", address, str)


def _parse(text: str) -> IPAddress:
    try:
        return ip_address(text)
    except ValueError:
        raise InvalidValueError(f"{text!r} is not an IPv4 or IPv6 address") from None


def gid_of(address: IPAddress) -> bytes:
    """Return the GID of an address. An IPv4 address becomes ::ffff:a.b.c.d (annex A17.4.5)."""
    return IPV4_MAPPED + address.packed if address.version == 4 else address.packed


def address_of(gid: bytes) -> IPAddress:
    """Return the IP address of a GID. A link-local GID derived from a MAC of `mac_of` yields the IPv4 address."""
    if gid.startswith(IPV4_MAPPED):
        return IPv4Address(gid[12:])
    if gid.startswith(LINK_LOCAL + b"\0\0") and gid[11:13] == b"\xff\xfe":
        return IPv4Address(gid[10:11] + gid[13:])
    return IPv6Address(gid)


def can_reach(address: IPAddress) -> bool:
    """Return whether this machine has a route to the address. No packet is sent."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((str(address), ROCE_UDP_PORT))
        except OSError:
            return False
        return True


def mac_of(address: IPAddress) -> bytes:
    """Return the MAC of a software NIC whose first address is `address`."""
    return b"\x02\x00" + address.packed[-4:]


def link_mtu_of(address: IPAddress) -> int:
    """Return the MTU of the interface that has the address, or Ethernet's MTU if no interface has it."""
    name = interface_of(address)
    return _DEFAULT_LINK_MTU if name is None else interface.mtu_of(name)


def speed_of(address: IPAddress) -> int:
    """Return the speed in Mbit/s that the driver of the address's interface reports, or the speed of a veth."""
    with contextlib.suppress(OSError, ValueError):
        if (name := interface_of(address)) and (speed := int(Path(f"/sys/class/net/{name}/speed").read_text())) > 0:
            return speed
    return _NOMINAL_SPEED


def _rate(speed: int) -> tuple[int, int]:
    """Return the narrowest width and speed that carry `speed` Mbit/s, as Linux does (ib_get_eth_speed)."""
    return next((codes for most, codes in _RATES if speed <= most), _RATES[-1][1])


def interface_of(address: IPAddress) -> str | None:
    """Return the name of the interface that has the address, or None."""
    if isinstance(address, IPv6Address):
        return _interface6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return _interface4(sock, address)


def _interface4(sock: socket.socket, address: IPv4Address) -> str | None:
    if address.is_loopback:  # lo has all of 127.0.0.0/8, but lists only one address
        return "lo"
    # struct ifconf {int; char *}, filled with struct ifreq {char name[16]; struct sockaddr_in; pad to 40 bytes}
    entries = array.array("B", bytes(_IFREQ_SIZE * _MAX_INTERFACES))
    where, room = entries.buffer_info()
    answer = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("ixxxxP", room, where))
    for at in range(0, struct.unpack_from("i", answer)[0], _IFREQ_SIZE):
        entry = entries[at : at + _IFREQ_SIZE].tobytes()
        if entry[20:24] == address.packed:
            return entry[:16].rstrip(b"\0").decode()
    return None


def _interface6(address: IPv6Address) -> str | None:
    table = Path("/proc/thread-self/net/if_inet6")  # /proc/net shows the main thread's network namespace
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, *_, name = line.split()
        if bytes.fromhex(digits) == address.packed:
            return name
    return None
