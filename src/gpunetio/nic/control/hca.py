"""The device's capabilities and its only port: QUERY_HCA_CAP, QUERY_HCA_VPORT_CONTEXT, QUERY_LAG."""

from __future__ import annotations

from collections.abc import Iterable

from ...enums import PortState
from ...formats import commands as cmd
from ...formats.commands import (
    PORT_TYPE_ETH, PORT_TYPE_IB, CapClass, Opcode, PhysicalState, Status,
)
from ...formats.contexts import ATOMIC_CAPS, CMD_HCA_CAP, CMD_HCA_CAP_2, ETHERNET_OFFLOAD_CAPS, ROCE_CAP
from ...formats.flow import FLOW_TABLE_NIC_CAP
from ..engine.hardware import Hardware
from .command import DONE, OUT_BYTES, Call, Capabilities, Command, Handlers
from .guids import node_guid_of, port_guid_of
from .syndromes import CommandError, CommandSyndrome

CLOCK_KHZ = 1_000_000  # frequency of timestamps: the engine's clock counts nanoseconds
_CLASSES = {
    CapClass.GENERAL:   CMD_HCA_CAP,
    CapClass.ETHERNET_OFFLOADS: ETHERNET_OFFLOAD_CAPS,
    CapClass.ATOMIC:    ATOMIC_CAPS,
    CapClass.ROCE:      ROCE_CAP,
    CapClass.FLOW_TABLE: FLOW_TABLE_NIC_CAP,
    CapClass.GENERAL_2: CMD_HCA_CAP_2,
}
_CLASS_BYTES = 4096


def pack_capabilities(parts: Iterable[Capabilities]) -> dict[CapClass, bytes]:
    """Combine the capability fields of all parts of the NIC. Return each class as QUERY_HCA_CAP returns it."""
    packed = {kind: struct.pack() for kind, struct in _CLASSES.items()}
    for part in parts:
        for kind, fields in part.items():
            _CLASSES[kind].update(packed[kind], **fields)
    return {kind: bytes(capability).ljust(_CLASS_BYTES, b"\0") for kind, capability in packed.items()}


class Hca(Handlers):
    """The device as a whole. `packed` contains the answers of QUERY_HCA_CAP by class, from `pack_capabilities`."""

    packed: dict[CapClass, bytes]

    def __init__(self, hardware: Hardware):
        self._port, self._record = hardware.port, hardware.record
        self.packed = {}

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.GENERAL, Opcode.QUERY_HCA_CAP, cmd.QUERY_HCA_CAP_IN,
                    self._query_cap, OUT_BYTES + CMD_HCA_CAP.size),
            Command(Call.GENERAL, Opcode.QUERY_HCA_VPORT_CONTEXT, cmd.QUERY_HCA_VPORT_CONTEXT_IN,
                    self._query_vport, cmd.QUERY_HCA_VPORT_CONTEXT_OUT.size),
            Command(Call.GENERAL, Opcode.QUERY_LAG, cmd.QUERY_LAG_IN, self._query_lag, cmd.QUERY_LAG_OUT.size),
        )

    def capabilities(self) -> Capabilities:
        infiniband = self._port.infiniband
        return {
            CapClass.GENERAL: {
                "port_type": PORT_TYPE_IB if infiniband else PORT_TYPE_ETH, "num_ports": 1, "roce": int(not infiniband),
                "hca_cap_2": 1, "device_frequency_khz": CLOCK_KHZ, "device_frequency_mhz": CLOCK_KHZ // 1000,
            },
        }

    @property
    def link_up(self) -> bool:
        """Return whether the link is up."""
        return int(self._record["link_down"]) == 0

    def _query_cap(self, mailbox: bytes) -> bytes:
        op_mod = cmd.QUERY_HCA_CAP_IN.get(mailbox, "op_mod")
        capability = self.packed.get(op_mod >> 1)
        if capability is None:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.UNKNOWN_OP_MOD, f"capability class {op_mod >> 1:#x} does not exist"
            )
        return DONE + capability

    def _query_lag(self, mailbox: bytes) -> bytes:
        """Report that ports are not aggregated. UCX 1.23 queries every device, and logs an error if this fails."""
        return bytes(cmd.QUERY_LAG_OUT.pack(ctx={"lag_state": 0}))

    def _query_vport(self, mailbox: bytes) -> bytes:
        get = cmd.QUERY_HCA_VPORT_CONTEXT_IN.get
        other, port = get(mailbox, "other_vport"), get(mailbox, "port_num")
        if other or port > 1:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.PORT_NUMBER,
                f"other_vport {other}, port {port}: there is one port, 1, and no other vport",
            )
        state = PortState.ACTIVE if self.link_up else PortState.DOWN
        guid = node_guid_of(self._port)
        return bytes(cmd.QUERY_HCA_VPORT_CONTEXT_OUT.pack(hca_vport_context={
            "port_physical_state": PhysicalState.LINK_UP if self.link_up else PhysicalState.POLLING,
            "port_state": state, "vport_state": state, "lid": self._port.lid,
            "system_image_guid": guid, "port_guid": port_guid_of(self._port), "node_guid": guid,
        }))
