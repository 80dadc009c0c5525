"""The control path of a NIC: its objects of all types, and the interpreter of the commands on them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TypeVar

from ...formats.commands import Opcode
from ..engine.hardware import Hardware
from ..state.tables import MkeyTable, Table
from .command import Call, Handlers
from .components import Components
from .event_channels import EventChannels
from .flow.counters import FlowCounters
from .flow.entries import FlowEntries
from .flow.groups import FlowGroups
from .flow.tables import FlowTables
from .gids import Gids
from .hca import Hca, pack_capabilities
from .interpreter import CommandInterpreter
from .links.links import Connect, Links, LinkToLan
from .links.paths import Paths
from .links.routes import Routes
from .objects import EventSources
from .queues.cq import CompletionQueues
from .queues.eq import EventQueues
from .queues.q_counter import QCounters
from .queues.qp import QueuePairs
from .queues.qp_transitions import QpTransitions
from .queues.rmp import ReceivePools
from .queues.rq import ReceiveQueues
from .queues.rqt import ReceiveQueueTables
from .queues.sq import SendQueues
from .queues.tir import ReceiveInterfaces
from .queues.tis import SendInterfaces
from .queues.transport_domain import TransportDomains
from .regions.device_memory import DeviceMemory
from .regions.grants import Grants
from .regions.indirect_mkey import IndirectKeys
from .regions.mkey import MemoryKeys
from .regions.pd import ProtectionDomains
from .regions.umem import Umems
from .uar import UarPages
from .vport import NicVport

H = TypeVar("H", bound=Handlers)


class ControlPath:
    """The objects of a NIC by type, and the commands on them. Callers hold the NIC's lock.

    `handlers` are all parts that have registered commands or capabilities. `kinds` are the types of objects that
    mailboxes create, by the opcode of the CREATE command.

    `memory` contains the tables of memory keys and UMEMs, which the engine reads. `connect` and `link_to_lan` create
    links to NICs of other processes. `undo` closes everything, after the engine has stopped.
    """

    hca: Hca
    gids: Gids
    eqs: EventQueues
    uars: UarPages
    pds: ProtectionDomains
    umems: Umems
    mkeys: MemoryKeys
    cqs: CompletionQueues
    pools: ReceivePools
    qps: QueuePairs
    tds: TransportDomains
    q_counters: QCounters
    tiss: SendInterfaces
    sqs: SendQueues
    rqs: ReceiveQueues
    rqts: ReceiveQueueTables
    tirs: ReceiveInterfaces
    links: Links
    routes: Routes
    paths: Paths
    flow_tables: FlowTables
    flow_counters: FlowCounters
    channels: EventChannels
    kinds: dict[Opcode, Handlers]
    interpreter: CommandInterpreter

    def __init__(
        self, hardware: Hardware, components: Components, memory: tuple[MkeyTable, Table], grants: Grants,
        device_memory: DeviceMemory, connect: Connect, link_to_lan: LinkToLan, undo: ExitStack,
    ):
        self.handlers: list[Handlers] = []

        def add(handlers: H) -> H:
            undo.callback(handlers.close)
            self.handlers.append(handlers)
            return handlers

        keys, umems = memory
        # One row per type of object. Each type comes after the types that it refers to.
        self.hca   = add(Hca(hardware))
        self.gids  = add(Gids(hardware))
        self.eqs   = add(EventQueues(hardware))
        self.uars  = add(UarPages(hardware))
        self.pds   = add(ProtectionDomains(hardware.name))
        self.umems = add(Umems(hardware, umems))
        indirect   = add(IndirectKeys(hardware.engine, keys, self.pds))
        self.mkeys = add(MemoryKeys(hardware, keys, self.pds, indirect, grants, device_memory))
        self.cqs   = add(CompletionQueues(hardware, components, self.umems, self.uars, self.eqs))
        self.pools = add(ReceivePools(hardware, components, self.umems, self.pds))
        self.qps   = add(QueuePairs(
            hardware, components, self.pds, self.umems, self.uars, self.cqs, self.pools,
        ))
        self.links = Links(hardware, self.qps.table, grants, connect, link_to_lan)
        undo.callback(self.links.close)
        add(NicVport(hardware))
        self.tds   = add(TransportDomains(hardware))
        self.q_counters = add(QCounters(hardware))
        self.tiss  = add(SendInterfaces(hardware, self.tds, self.pds))
        self.sqs   = add(SendQueues(
            hardware, components, self.pds, self.umems, self.uars, self.cqs, self.tiss, self.links,
        ))
        self.rqs   = add(ReceiveQueues(
            hardware, components, self.pds, self.umems, self.cqs, self.pools, self.q_counters, self.links,
        ))
        self.rqts  = add(ReceiveQueueTables(hardware, self.rqs))
        self.tirs  = add(ReceiveInterfaces(hardware, self.tds, self.rqs, self.rqts))
        self.routes = Routes(hardware.port, self.gids, self.qps.table, self.links)
        self.paths = Paths(hardware, self.links, self.routes)
        undo.callback(self.paths.close)
        add(QpTransitions(hardware, components, self.qps, self.gids, self.links, self.routes))
        self.flow_counters = add(FlowCounters(hardware))
        self.flow_tables = add(FlowTables(hardware))
        add(FlowGroups(self.flow_tables))
        add(FlowEntries(self.flow_tables, self.flow_counters, self.tirs))

        self.kinds = {
            command.opcode: part
            for part in self.handlers for command in part.commands() if command.call is Call.CREATE
        }
        self.channels = EventChannels(hardware, [part for part in self.handlers if isinstance(part, EventSources)])
        undo.callback(self.channels.close)
        self.hca.packed = pack_capabilities(part.capabilities() for part in self.handlers)
        commands = [command for part in self.handlers for command in part.commands()]
        self.interpreter = CommandInterpreter(commands, hardware.engine.write_back)
