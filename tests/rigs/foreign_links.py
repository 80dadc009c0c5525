"""Feed messages and frames of other NICs to the code that reads them, without an engine.

Other processes ask for links, and send messages about memory and queue pairs over them. Frames ask for neighbours.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from ipaddress import ip_address
from types import SimpleNamespace

from gpunetio.errors import InvalidValueError
from gpunetio.fabric import neighbours
from gpunetio.fabric.control_message import Body, PartialMessage
from gpunetio.fabric.frames import PIPE
from gpunetio.fabric.links import Callbacks, Links, Refusal
from gpunetio.formats.commands import QpState
from gpunetio.formats.packet import ETHER_TYPE_ARP, ETHER_TYPE_IPV6, IPV4_MAPPED, NEIGHBOUR_SOLICITATION
from gpunetio.memory import PAGE, HostMemory, sealed_memory
from gpunetio.nic.control.regions.grants import Grants
from gpunetio.nic.control.regions.reach import Reach
from gpunetio.nic.engine.hardware import Hardware
from gpunetio.nic.state.objects import MKEY_ROW
from gpunetio.nic.state.qp import QP_ROW
from gpunetio.nic.state.tables import MkeyTable, Table

_GID4, _GID6 = IPV4_MAPPED + bytes([10, 9, 0, 1]), ip_address("fd09::1").packed
_PEER4, _PEER6 = IPV4_MAPPED + bytes([10, 9, 0, 2]), ip_address("fd09::2").packed
_MAC, _PEER_MAC = bytes.fromhex("020000000001"), bytes.fromhex("020000000002")


def _message(**body: object) -> bytes:
    text = json.dumps(body).encode()
    return len(text).to_bytes(4, "big") + text


def body_of(data: bytes) -> Body:
    """Return the message that a process of this host sends."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there:
        there.sendall(data[: 1 << 16])
        there.shutdown(socket.SHUT_WR)
        message = PartialMessage()
        while (body := message.read(here)) is None:
            pass
        return body


# --- links -----------------------------------------------------------------------------------------------------------

CONNECT = _message(**{
    "version": 2, "op": "connect", "name": "soft0", "from": "127.0.0.2", "to": "127.0.0.1", "capacity": 1 << 13,
    "medium": "ETHERNET", "letters": True,
})


def _nothing(*arguments: object) -> None: ...


def connect(data: bytes) -> None:
    """Take a link, up to the look whether the caller has the address that it says."""
    callbacks = Callbacks(_nothing, _nothing, _nothing, _nothing)
    links = Links("soft0", {ip_address("127.0.0.1"): True}, 1 << 13, "ETHERNET", callbacks, _nothing)
    with suppress(Refusal):
        links.take(None, 1, body_of(data), list)  # type: ignore[arg-type]


# --- messages over links ---------------------------------------------------------------------------------------------

_SHARING = "here"
_WORDS = {"withdrawn": 1, "failed": 0}
LETTERS = [
    _message(op="lend", number=1, nbytes=PAGE), _message(op="lend", number=2, nbytes=64, sharing=_SHARING, handle="00"),
    _message(op="lent", number=1), _message(op="end", number=7), _message(op="reach", sharing=_SHARING),
    _message(op="key", key=0x105, pdn=1, access=7, iova=4096, nbytes=64, number=7, offset=0),
    _message(op="queue", qpn=9, remote_qpn=5, pdn=1, rights=7, msg_max=1 << 30, **_WORDS),
    _message(op="forget", keys=[0x105], queues=[9], **_WORDS),
]


class _Engine:
    """An engine that shares memory of GPUs, and does nothing."""

    sharing, running = _SHARING, False

    def post(self, *arguments: object, **more: object) -> None: ...

    def write_back(self) -> None: ...

    def open_shared(self, nbytes: int, handle: object, fds: list[int]) -> SimpleNamespace:
        if not isinstance(handle, str):
            raise InvalidValueError("this is not the handle of a GPU's memory")
        return SimpleNamespace(address=PAGE, nbytes=nbytes, close=_nothing)


class _Link:
    """A link whose peer reads nothing."""

    talks, gone, peer_notify_fd = True, True, -1

    def __init__(self) -> None:
        self._pipe = HostMemory(PIPE.size)
        self.tx = self._pipe.address

    def send(self, *arguments: object) -> None: ...


class Peer:
    """A NIC at one end of a link. Each message finds a queue pair, and memory that was granted as number 7."""

    def __init__(self) -> None:
        hardware = Hardware("soft0", None, None, 0, _Engine())  # type: ignore[arg-type]
        self._link, self._fd = _Link(), sealed_memory(PAGE, "a link")
        self._reach = Reach(hardware, SimpleNamespace(worker_of=lambda row: 0), True)  # type: ignore[arg-type]
        self._reach.qps, self._reach.mkeys = Table("QP", QP_ROW, 16), MkeyTable("key", MKEY_ROW, 16)
        row = self._reach.qps.rows[self._reach.qps.free_slot()]
        row["qpn"], row["remote_qpn"], row["state"], row["wire"] = 1, 9, QpState.RTS, PAGE
        self._grants = Grants(hardware, True, self._reach)

    def hear(self, data: bytes) -> None:
        """Read a message over the link."""
        link = self._link
        self._grants.add_peer(link, PAGE)  # type: ignore[arg-type]
        try:
            for body in (json.loads(LETTERS[4][4:]), {"op": "lend", "number": 7, "nbytes": PAGE}, body_of(data)):
                self._grants.handle_message(link, body, [self._fd])  # type: ignore[arg-type]
        finally:
            self._grants.remove_peer(link)  # type: ignore[arg-type]


# --- frames ----------------------------------------------------------------------------------------------------------


def frames() -> list[bytes]:
    """Questions for a MAC, and answers."""
    made: list[bytes] = []
    here, there = (_MAC, _GID4[12:]), (_PEER_MAC, _PEER4[12:])
    for tags in (b"", b"\x81\0\0\5", b"\x88\xa8\0\5\x81\0\0\6"):
        for operation in (1, 2):
            made.append(_frame(ETHER_TYPE_ARP, tags, neighbours.arp(operation, there, here)))
        for kind, flags, option in ((NEIGHBOUR_SOLICITATION, 0, 1), (NEIGHBOUR_SOLICITATION + 1, 0x60000000, 2)):
            packet = neighbours.discovery((_PEER6, _GID6), kind, flags, _GID6, option, _PEER_MAC)
            made.append(_frame(ETHER_TYPE_IPV6, tags, packet))
    return made


def _frame(ether_type: int, tags: bytes, packet: bytes) -> bytes:
    header = neighbours.ethernet(_MAC, _PEER_MAC, ether_type)
    return header[:12] + tags + header[12:] + packet


def checksummed(frame: bytes) -> bytes:
    """Return a frame with the right checksum of ICMPv6, if it has one."""
    at = 12
    while frame[at : at + 2] in (b"\x81\0", b"\x88\xa8"):
        at += 4
    packet = frame[at + 2 :]
    message = packet[40 : 40 + int.from_bytes(packet[4:6], "big")]
    if frame[at : at + 2] != b"\x86\xdd" or len(message) < 4:
        return frame
    bare = message[:2] + bytes(2) + message[4:]
    total = neighbours.icmpv6_sum(packet[8:24], packet[24:40], bare)
    start = at + 2 + 40
    return frame[: start + 2] + total.to_bytes(2, "big") + frame[start + 4 :]


def neighbour(frame: bytes) -> None:
    """Hear a frame, and answer it."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here:
        try:
            found = neighbours.Neighbours("soft0", _MAC, [_GID4, _GID6], here, _nothing, _nothing)
            found.seek(_PEER4)
            found.seek(_PEER6)
            found._hear(frame)
        finally:
            there.close()
            found.join()
