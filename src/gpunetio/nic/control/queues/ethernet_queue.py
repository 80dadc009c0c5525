"""The base of SQs and RQs: a ring in a UMEM, and the states RST, RDY and ERR."""

from __future__ import annotations

import numpy as np

from ....formats.commands import Status
from ....formats.ethernet_queues import QueueState, TimestampFormat
from ....formats.layout import BitStruct, Entry, Fields
from ....interrupts import allowed
from ...engine.hardware import Hardware
from ...state.extensions import ETHERNET_QUEUES
from ...state.tables import Row
from ..links.links import Links
from ..objects import ChosenEvents, CountedObjects, Uses
from ..regions.umem import Umems
from ..syndromes import CommandError, CommandSyndrome
from .ethernet_objects import EthernetObjects, refuse_fields
from .qp import MAX_LOG_QUEUE

# The states to which MODIFY can move a queue from each state (PRM, MODIFY_SQ and MODIFY_RQ).
_NEXT = {
    QueueState.RST: (QueueState.RST, QueueState.RDY),
    QueueState.RDY: (QueueState.RDY, QueueState.RST, QueueState.ERR),
    QueueState.ERR: (QueueState.ERR, QueueState.RST),
}
_UNSUPPORTED = {  # of the WQ
    "wq_signature": "signatures of WQEs", "cd_slave": "queues that another queue releases",
    "hds_skip_first_sge": "header-data split", "log2_hds_buf_size": "header-data split",
    "page_offset": "rings at an offset in a page: use wq_umem_offset", "lwm": "limit events of these queues",
    "log_hairpin_num_packets": "hairpin queues", "log_hairpin_data_sz": "hairpin queues",
    "headers_mkey": "header-data split", "shampo_enable": "header-data split",
}
HAIRPIN = {"hairpin": "hairpin queues", "hairpin_peer_vhca": "hairpin queues"}  # of the queue's context


class EthernetQueues(ChosenEvents, EthernetObjects):
    """The SQs or the RQs of a NIC. `struct` is their context. While any exist, the NIC is on the LAN of `links`."""

    struct: BitStruct
    formats: tuple[TimestampFormat, ...]  # supported formats of timestamps

    def __init__(
        self, hardware: Hardware, name: str, entry: Entry, rows: int, no_such: CommandSyndrome, links: Links
    ):
        super().__init__(hardware, name, entry, rows, no_such, shared=True)
        self._links = links

    def add(self, number: int, row: Row, uses: Uses, mailbox: bytes) -> bytes:
        answer = super().add(number, row, uses, mailbox)
        self._links.enter_lan()
        return answer

    def destroy(self, mailbox: bytes) -> bytes:
        answer = super().destroy(mailbox)
        self._links.leave_lan()
        return answer

    def load(self) -> None:
        """Load the part of the engine that serves Ethernet queues. Compiling it may take many seconds."""
        if not self._port.no_ethernet:
            with allowed():
                ETHERNET_QUEUES.load()

    def check_new(self, context: Fields) -> None:
        """Refuse a new queue with a state other than RST, or with an unsupported format of timestamps."""
        if context["state"] != QueueState.RST:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.QUEUE_STATE,
                f"{self.struct.name}.state = {context['state']}: a queue is created in RST (0), and MODIFY readies it",
            )
        if (ts_format := context["ts_format"]) not in self.formats:
            known = ", ".join(f"{one.name} ({int(one)})" for one in self.formats)
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.TIMESTAMP_FORMAT,
                f"{self.struct.name}.ts_format = {ts_format}: it must be one of {known}",
            )

    def set_ring(
        self, row: np.ndarray, wq: Fields, umems: Umems, ring_fields: tuple[str, str]
    ) -> list[tuple[CountedObjects, int]]:
        """Set the address and size of a WQ's ring, and its doorbell record, in a queue's row. Return their UMEMs."""
        refuse_fields("wq", wq, _UNSUPPORTED)
        log, stride_log = wq["log_wq_sz"], wq["log_wq_stride"]
        if log > MAX_LOG_QUEUE:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.WQ_SIZE, f"log_wq_sz {log} is above {MAX_LOG_QUEUE}"
            )
        umems.need_valid(wq["wq_umem_valid"] and wq["dbr_umem_valid"], "wq_umem_valid")
        ring, record = wq["wq_umem_id"], wq["dbr_umem_id"]
        what = f"the ring of the {self.table.name}"
        address, size = ring_fields
        row[address] = umems.ring(ring, wq["wq_umem_offset"], 1 << log + stride_log, what)
        row["dbrec"] = umems.record(record, wq["dbr_addr"], "its doorbell record")
        row[size] = log
        return [(umems, ring), (umems, record)]

    def next_state(self, number: int, now: int, wanted: int) -> QueueState:
        """Check the transition of a MODIFY. Return the state `wanted`.

        CommandError if the queue is not in the state `now`, or if no transition leads from `now` to `wanted`.
        """
        state = self.state_of(number)
        if now != state:
            raise CommandError(
                Status.BAD_RES_STATE, CommandSyndrome.QUEUE_STATE,
                f"{self.name_of(number)} is in state {state.name} ({int(state)}), not in {now} as the mailbox says",
            )
        if wanted not in _NEXT[state]:
            raise CommandError(
                Status.BAD_RES_STATE, CommandSyndrome.QUEUE_STATE,
                f"{self.name_of(number)}: from {state.name} to state {wanted}; "
                f"{state.name} leads to {', '.join(f'{to.name} ({int(to)})' for to in _NEXT[state])}",
            )
        return QueueState(wanted)

    def state_of(self, number: int) -> QueueState:
        """Return the state of a queue."""
        return QueueState(int(self.table[number]["state"]))

    def context_of(self, number: int) -> bytearray:
        context = super().context_of(number)
        self.struct.update(context, state=self.state_of(number))
        return context
