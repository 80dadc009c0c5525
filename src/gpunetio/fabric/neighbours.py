"""The neighbours of a NIC on an Ethernet: address resolution by ARP (RFC 826) and neighbour discovery (RFC 4861).

A thread answers requests for the NIC's own addresses, and learns the MACs that the NIC has asked for. The engine passes
it the frames. The thread takes no lock of the NIC, so it also answers while the NIC is connecting a queue pair.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import TypeVar

from ..errors import InvalidValueError, NotFoundError
from ..formats.packet import (
    ARP, ARP_ETHERNET, ARP_REPLY, ARP_REQUEST, ETHER_TYPE_ARP, ETHER_TYPE_IPV4, ETHER_TYPE_IPV6,
    ETHER_TYPE_SERVICE_VLAN, ETHER_TYPE_VLAN, ETHERNET, GROUP_MAC, IP_PROTOCOL_ICMPV6, IPV4_MAPPED, IPV6, NEIGHBOUR,
    NEIGHBOUR_ADVERTISEMENT, NEIGHBOUR_HOP_LIMIT, NEIGHBOUR_OVERRIDE, NEIGHBOUR_SOLICITATION, NEIGHBOUR_SOLICITED,
    SOURCE_LINK_ADDRESS, TARGET_LINK_ADDRESS, VLAN_TAG,
)
from ..service import ServiceThread
from .ip_headers import internet_checksum

logger: logging.Logger = logging.getLogger("gpunetio.fabric")

Gid = bytes
Entry = TypeVar("Entry")
PATIENCE = 3.0  # seconds that a neighbour has to answer
RETRY = 0.25  # seconds between questions
LIFETIME = 30.0  # seconds after which a neighbour is asked again, as in Linux (base_reachable_time_ms)
MOST = 1024  # neighbours to remember, or to ask for: strangers can make a NIC ask for any address
GONE = 1  # length of the message that the engine sends instead of a frame when the other end is gone, if there is room
_BROADCAST = b"\xff" * 6
_ALL_NODES = IPv6Address("ff02::1").packed
_SOLICITED_NODE = IPv6Address("ff02::1:ff00:0").packed[:13]
_LINK_LOCAL = b"\xfe\x80"
_LARGEST = 1 << 16
_TAGS = tuple(kind.to_bytes(2, "big") for kind in (ETHER_TYPE_VLAN, ETHER_TYPE_SERVICE_VLAN))
_INTACT = 0xFFFF  # the checksum of data that include their own, correct checksum


def ethernet(destination: bytes, source: bytes, ether_type: int) -> bytes:
    """Return an Ethernet header."""
    return ETHERNET.pack(destination=destination, source=source, ether_type=ether_type)


def arp(operation: int, sender: tuple[bytes, bytes], target: tuple[bytes, bytes]) -> bytes:
    """Return an ARP packet. `sender` and `target` are a MAC and an IPv4 address each."""
    return ARP.pack(
        hardware=ARP_ETHERNET, protocol=ETHER_TYPE_IPV4, hardware_length=6, protocol_length=4,
        operation=operation, sender_mac=sender[0], sender_ip=sender[1], target_mac=target[0], target_ip=target[1],
    )


def icmpv6_sum(source: Gid, destination: Gid, message: bytes) -> int:
    """Return the checksum of an ICMPv6 message (RFC 8200 8.1), which is _INTACT if the message contains the right one.
    """
    pseudo = source + destination + len(message).to_bytes(4, "big") + IP_PROTOCOL_ICMPV6.to_bytes(4, "big")
    return internet_checksum(pseudo + message + bytes(len(message) & 1))


def discovery(ends: tuple[Gid, Gid], kind: int, flags: int, target: Gid, option: int, mac: bytes) -> bytes:
    """Return the IPv6 packet of a solicitation or an advertisement, from and to `ends`, with a MAC as an option."""
    tail = bytes([option, 1]) + mac
    plain = NEIGHBOUR.pack(type=kind, flags=flags, target=target) + tail
    checksum = icmpv6_sum(*ends, plain)
    message = NEIGHBOUR.pack(type=kind, checksum=checksum, flags=flags, target=target) + tail
    return IPV6.pack(
        version_class_flow=6 << 28, payload_length=len(message), next_header=IP_PROTOCOL_ICMPV6,
        hop_limit=NEIGHBOUR_HOP_LIMIT, source=ends[0], destination=ends[1],
    ) + message


def _link_address(options: bytes, wanted: int) -> bytes | None:
    """Return the MAC in the options of a solicitation or an advertisement, or None.

    ValueError if the options are malformed.
    """
    found = None
    while options:
        if len(options) < 8 or options[1] == 0 or 8 * options[1] > len(options):
            raise ValueError
        if options[0] == wanted:
            found = options[2:8]
        options = options[8 * options[1] :]
    return found


class Neighbours:
    """The neighbours on the wire `name` of a NIC with `mac` and `gids`.

    `frames` is the socket on which the engine sends received frames. `send` puts a frame on the wire. `look` is called
    after each received frame, to see whether the device is gone. The thread ends when the owner closes the other end of
    `frames`, which nobody else may do.
    """

    def __init__(
        self, name: str, mac: bytes, gids: Sequence[Gid], frames: socket.socket, send: Callable[[bytes], None],
        look: Callable[[], None],
    ):
        self._name, self._mac, self._gids = name, mac, tuple(gids)
        self._frames, self._send, self._look = frames, send, look
        self._changed = threading.Condition(threading.RLock())
        self._known: dict[Gid, tuple[bytes, float]] = {}  # MAC and time, in the order in which they were learned
        self._asked: dict[Gid, float] = {}  # time of the last request, oldest first
        self._thread = ServiceThread(f"gpunetio {name}", self._serve)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread, after the other end of `frames` has been closed."""
        self._thread.join()

    def _serve(self) -> None:
        while frame := self._frames.recv(_LARGEST):
            if len(frame) != GONE:
                self._hear(frame)
            self._look()

    # --- asking ----------------------------------------------------------------------------------------------------

    def resolve(self, gid: Gid, timeout: float = PATIENCE) -> bytes:
        """Return the MAC of a neighbour. NotFoundError if nobody answers within `timeout` seconds."""
        end = time.monotonic() + timeout
        with self._changed:
            while (mac := self.seek(gid)) is None:
                left = end - time.monotonic()
                if left <= 0:
                    raise NotFoundError(
                        f"nobody on {self._name} answers for {_text(gid)} within {timeout:g} s: open the peer first, "
                        "with this address, on the same network. There is no router: peers must be on the link"
                    )
                self._changed.wait(min(left, RETRY))
            return mac

    def seek(self, gid: Gid) -> bytes | None:
        """Return the MAC of a neighbour, or ask for it and return None. Never wait.

        At most one request is sent in RETRY seconds. The caller calls again until the MAC is known. InvalidValueError
        if the NIC has no address of the same kind.
        """
        now = time.monotonic()
        with self._changed:
            mac, when = self._known.get(gid, (b"", 0.0))
            if mac and now - when < LIFETIME:
                return mac
            if now - self._asked.get(gid, -RETRY) < RETRY:
                return None
            question = self._question(gid)
            _keep(self._asked, gid, now)
        self._send(question)
        return None

    def last(self, gid: Gid) -> bytes:
        """Return the last known MAC of a neighbour. NotFoundError if it was never learned: call `seek` first."""
        with self._changed:
            if gid not in self._known:
                raise NotFoundError(
                    f"nobody on {self._name} has answered for {_text(gid)} yet: create an address handle first"
                )
            return self._known[gid][0]

    def _question(self, gid: Gid) -> bytes:
        here = self._own_for(gid)
        if gid.startswith(IPV4_MAPPED):
            question = arp(ARP_REQUEST, (self._mac, here[12:]), (bytes(6), gid[12:]))
            return ethernet(_BROADCAST, self._mac, ETHER_TYPE_ARP) + question
        group = _SOLICITED_NODE + gid[13:]
        packet = discovery((here, group), NEIGHBOUR_SOLICITATION, 0, gid, SOURCE_LINK_ADDRESS, self._mac)
        return ethernet(_multicast_mac(group), self._mac, ETHER_TYPE_IPV6) + packet

    def _own_for(self, gid: Gid) -> Gid:
        """Return the NIC's own address from which to ask for a neighbour."""

        def same(own: Gid, prefix: bytes) -> bool:
            return own.startswith(prefix) == gid.startswith(prefix)

        for own in self._gids:
            if same(own, IPV4_MAPPED) and same(own, _LINK_LOCAL):
                return own
        raise InvalidValueError(
            f"{_text(gid)} cannot be reached from {', '.join(map(_text, self._gids))}: give the port an address of "
            "the same kind"
        )

    # --- hearing ---------------------------------------------------------------------------------------------------

    def _hear(self, frame: bytes) -> None:
        """Handle a received frame. The engine has checked only its EtherType; malformed frames are ignored.

        A request in a VLAN is answered in that VLAN. The NIC itself has no neighbours in VLANs.
        """
        end = ETHERNET.ether_type
        while frame[end : end + 2] in _TAGS:
            end += VLAN_TAG.size
        tags, rest = frame[ETHERNET.ether_type : end], frame[end + 2 :]
        if int.from_bytes(frame[end : end + 2], "big") == ETHER_TYPE_ARP:
            self._hear_arp(rest, tags)
        else:
            self._hear_discovery(rest, tags)

    def _answer(self, destination: bytes, tags: bytes, ether_type: int, packet: bytes) -> None:
        """Send an answer, with the VLAN tags of the request."""
        header = ethernet(destination, self._mac, ether_type)
        self._send(header[: ETHERNET.ether_type] + tags + header[ETHERNET.ether_type :] + packet)

    def _hear_arp(self, packet: bytes, tags: bytes) -> None:
        if len(packet) < ARP.size:
            return
        a = ARP.at(packet)
        kind = tuple(int(a[name]) for name in ("hardware", "protocol", "hardware_length", "protocol_length"))
        mac, sender = a["sender_mac"].tobytes(), a["sender_ip"].tobytes()
        if kind != (ARP_ETHERNET, ETHER_TYPE_IPV4, 6, 4) or not _is_station(mac):
            return
        self._learn(IPV4_MAPPED + sender, mac, tags)
        target = a["target_ip"].tobytes()
        if a["operation"] == ARP_REQUEST and IPV4_MAPPED + target in self._gids:
            answer = arp(ARP_REPLY, (self._mac, target), (mac, sender))
            self._answer(mac, tags, ETHER_TYPE_ARP, answer)

    def _hear_discovery(self, packet: bytes, tags: bytes) -> None:
        """Handle an IPv6 packet with a solicitation or an advertisement. RFC 4861 7.1 defines which ones are valid."""
        if len(packet) < IPV6.size:
            return
        ip = IPV6.at(packet)
        source, destination = ip["source"].tobytes(), ip["destination"].tobytes()
        message = packet[IPV6.size : IPV6.size + int(ip["payload_length"])]
        if len(message) < NEIGHBOUR.size or ip["hop_limit"] != NEIGHBOUR_HOP_LIMIT:
            return
        if icmpv6_sum(source, destination, message) != _INTACT:
            return
        n, options = NEIGHBOUR.at(message), message[NEIGHBOUR.size :]
        asks, target = n["type"] == NEIGHBOUR_SOLICITATION, n["target"].tobytes()
        try:
            mac = _link_address(options, SOURCE_LINK_ADDRESS if asks else TARGET_LINK_ADDRESS)
        except ValueError:
            return
        if n["code"] != 0 or target[0] == 0xFF or (mac is not None and not _is_station(mac)):
            return
        if not asks:
            if mac is not None:
                self._learn(target, mac, tags)
            return
        somebody = any(source)  # otherwise it is duplicate address detection (RFC 4862 5.4)
        if somebody and mac is not None:
            self._learn(source, mac, tags)
        if target in self._gids and (mac is not None or not somebody):
            to = source if somebody else _ALL_NODES
            flags = NEIGHBOUR_OVERRIDE | (NEIGHBOUR_SOLICITED if somebody else 0)
            answer = discovery((target, to), NEIGHBOUR_ADVERTISEMENT, flags, target, TARGET_LINK_ADDRESS, self._mac)
            self._answer(mac if somebody and mac else _multicast_mac(to), tags, ETHER_TYPE_IPV6, answer)

    def _learn(self, gid: Gid, mac: bytes, tags: bytes) -> None:
        """Store the MAC of an address if the NIC has asked for it, so that strangers cannot fill the table."""
        if tags:
            return
        with self._changed:
            if gid in self._known or gid in self._asked:
                self._asked.pop(gid, None)
                _keep(self._known, gid, (mac, time.monotonic()))
                self._changed.notify_all()


def _keep(table: dict[Gid, Entry], gid: Gid, entry: Entry) -> None:
    """Append an entry to a table, and drop the oldest one if the table is full."""
    table.pop(gid, None)
    if len(table) >= MOST:
        del table[next(iter(table))]
    table[gid] = entry


def _multicast_mac(group: Gid) -> bytes:
    """Return the MAC of an IPv6 multicast group (RFC 2464 7)."""
    return b"\x33\x33" + group[12:]


def _is_station(mac: bytes) -> bool:
    return any(mac) and not mac[0] & GROUP_MAC


def _text(gid: Gid) -> str:
    return str(IPv4Address(gid[12:]) if gid.startswith(IPV4_MAPPED) else IPv6Address(gid))
