"""The port as Ethernet queues use it: QUERY_NIC_VPORT_CONTEXT."""

from __future__ import annotations

from collections.abc import Iterable

from ...fabric.pcap_reader import LARGEST_RECORD
from ...formats import ethernet_queues as eth
from ...formats.commands import Opcode, Status
from ...formats.ethernet_queues import InlineMode
from ...formats.packet import ETHERNET
from ..engine.hardware import Hardware
from ..engine.port import Port
from .command import Call, Command, Handlers
from .guids import node_guid_of, port_guid_of
from .syndromes import CommandError, CommandSyndrome

# The largest value of the 16 bits of nic_vport_context.mtu, which includes the framing. A wire has room for one more.
_LARGEST_MTU = (1 << 16) - 1 - eth.VPORT_FRAMING


def mtu_of(port: Port) -> int:
    """Return the maximum size of a frame's payload in bytes, after the MAC header and VLAN tags."""
    return min(port.link_mtu, _LARGEST_MTU)


def longest_frame(port: Port) -> int:
    """Return the maximum length in bytes of a frame that the port accepts, without VLAN tags.

    A capture file has frames of any length, even with an MTU that no command can report.
    """
    kind = port.config.wire_kind
    return LARGEST_RECORD if kind.ethernet and kind.file and not port.config.mtu else ETHERNET.size + mtu_of(port)


class NicVport(Handlers):
    """The only vport of a NIC."""

    def __init__(self, hardware: Hardware):
        self._port = hardware.port

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.GENERAL, Opcode.QUERY_NIC_VPORT_CONTEXT, eth.QUERY_NIC_VPORT_CONTEXT_IN,
                    self._query, eth.QUERY_NIC_VPORT_CONTEXT_OUT.size),
        )

    def _query(self, mailbox: bytes) -> bytes:
        get = eth.QUERY_NIC_VPORT_CONTEXT_IN.get
        other, number = get(mailbox, "other_vport"), get(mailbox, "vport_number")
        if other or number:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.PORT_NUMBER,
                f"other_vport {other}, vport {number}: there is one vport, 0",
            )
        port = self._port
        every = int(port.config.promiscuous)
        return bytes(eth.QUERY_NIC_VPORT_CONTEXT_OUT.pack(nic_vport_context={
            "min_wqe_inline_mode": InlineMode.NONE, "roce_en": int(not port.infiniband),
            "mtu": mtu_of(port) + eth.VPORT_FRAMING, "port_guid": port_guid_of(port), "node_guid": node_guid_of(port),
            "promisc_uc": every, "promisc_mc": every, "promisc_all": every,
            "permanent_address": int.from_bytes(port.mac, "big"),
        }))
