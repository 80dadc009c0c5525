"""Tasks that receive messages from peers."""

from __future__ import annotations

from contextlib import ExitStack
from enum import IntEnum

from ..core import Buf
from ..core.operand import destinations
from ..enums import WcOpcode
from ..verbs import Completion
from .connection import RdmaConnection
from .cpu_datapath import RdmaTask
from .rdma import Rdma
from .tasks import path_of


class ReceiveOpcode(IntEnum):
    """enum doca_rdma_opcode: the peer's operation that completed a receive. The numbers are gpunetio's."""

    SEND           = 0
    SEND_WITH_IMM  = 1
    WRITE_WITH_IMM = 2


class Receive(RdmaTask):
    """Receive a message on any connection into `destination` (`doca_rdma_task_receive`).

    `destination` is a `core.Buf`, a memory map, or plain memory. With None, the task accepts messages without bytes and
    writes with an immediate. When the task has ended:

    `nbytes`       bytes received into `destination`; for a write with an immediate, bytes written to its target memory
    `opcode`       the peer's operation (`doca_rdma_task_receive_get_result_opcode`)
    `immediate`    the peer's number, or None (`…_get_result_immediate_data`)
    `connection`   the connection it came from, or None if that is closed (`…_get_result_rdma_connection`)
    """

    destination: object
    nbytes: int | None
    opcode: ReceiveOpcode | None
    immediate: int | None
    connection: RdmaConnection | None

    def __init__(self, rdma: Rdma, destination: object = None, *, user_data: object = None):
        super().__init__(rdma, user_data)
        self._rdma, self.destination = rdma, destination
        self.nbytes = self.opcode = self.immediate = self.connection = None

    def _post(self, held: ExitStack) -> None:
        self.nbytes = self.opcode = self.immediate = self.connection = None
        into = () if self.destination is None else destinations(self._rdma.pd, self.destination, held)
        path_of(self._rdma).receive(self, into)

    def note(self, done: Completion) -> None:
        self.nbytes, self.immediate = done.byte_len, done.imm
        if done.opcode is WcOpcode.RECV_RDMA_WITH_IMM:
            self.opcode = ReceiveOpcode.WRITE_WITH_IMM
        else:
            self.opcode = ReceiveOpcode.SEND if done.imm is None else ReceiveOpcode.SEND_WITH_IMM
            if isinstance(self.destination, Buf):
                self.destination.fill(done.byte_len)
        self.connection = next((each for each in self._rdma.connections if each.qp.qpn == done.qp_num), None)
