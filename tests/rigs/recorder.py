"""The tests' device as a recorder of commands: objects have numbers that are recognisable wherever they appear."""

import ctypes
from dataclasses import replace

from fake_device import (
    CREATE_CQ,
    CREATE_QP,
    ERR,
    INIT,
    QPC_AT,
    QUERY_QP,
    RST,
    RTR,
    RTS,
    TO_ERR,
    TO_RST,
    FakeProvider,
    be,
)
from gpunetio.enums import Access
from gpunetio.providers.provider import DeviceAttr

CREATE_RMP, QUERY_RMP, MODIFY_CQ = 0x90C, 0x90F, 0x403
CREATES = {CREATE_CQ: "cq", CREATE_QP: "qp", CREATE_RMP: "rmp"}
FIRST = {  # the number of the first object of a kind; the next ones follow
    "pd": 0xA1A2A3, "umem": 0xB0B1B2B3, "uar": 0xC1C2C3, "cq": 0xD1D2D3, "qp": 0xE1E2E3, "rmp": 0xF1F2F3, "channel": 1,
}
EQN = 0x9E
UDP_SPORT = 0xC0DE
LIMIT = 0x6C77  # wq.lwm, as QUERY_RMP answers it
LEADS_TO = {0x502: INIT, 0x503: RTR, 0x504: RTS, TO_ERR: ERR, TO_RST: RST}  # qpc.state after a transition
DBR_AT = {CREATE_CQ: (0x14, 0x48), CREATE_QP: (0xFC, 0xB8), CREATE_RMP: (0x78, 0x60)}  # bytes of dbr_umem_id, dbr_addr
HANDLES = 1 << 40  # a DEVX object's handle is not its number


class Recorder(FakeProvider):
    """A device with two ports and all capabilities. `commands` has each mailbox, with the size of the answer.

    `state` is the queue pair's, as QUERY_QP answers it.
    """

    def __init__(self):
        super().__init__()
        self.no_dbr_ext = self.cqe_inline = self.uc = True
        self.udp_sports = (UDP_SPORT, UDP_SPORT)
        self.state = RST
        self.commands: list[tuple[bytes, int]] = []
        self._umems: dict[int, int] = {}  # id → address
        self._made = dict.fromkeys(FIRST, 0)
        self._objects: dict[int, tuple[str, int]] = {}  # handle → kind, number

    def answers_to(self, opcode: int) -> list[tuple[bytes, int]]:
        """The commands of one kind, and the sizes of their answers."""
        return [sent for sent in self.commands if be(sent[0], 0, 2) == opcode]

    def record(self, opcode: int) -> bytes:
        """The doorbell record of what the last command of this opcode made, where the device looks for it."""
        mailbox, _ = self.answers_to(opcode)[-1]
        umem, offset = DBR_AT[opcode]
        return ctypes.string_at(self._umems[be(mailbox, umem, 4)] + be(mailbox, offset, 8), 8)

    def _new(self, kind: str) -> int:
        number = FIRST[kind] + self._made[kind]
        self._made[kind] += 1
        self.live[kind].append(number)
        return number

    def query_device(self) -> DeviceAttr:
        return replace(super().query_device(), phys_port_cnt=2)

    def reg_umem(self, address: int, nbytes: int, access: Access) -> int:
        umem_id = super().reg_umem(address, nbytes, access)
        self._umems[umem_id] = address
        return umem_id

    def query_eqn(self, vector: int) -> int:
        assert vector == 0
        return EQN

    def devx_obj_create(self, mailbox: bytes, out_size: int) -> tuple[int, bytes]:
        kind = CREATES[self._recorded(mailbox, out_size)]
        number = self._new(kind)
        self._objects[HANDLES + number] = kind, number
        return HANDLES + number, bytes(9) + number.to_bytes(3, "big") + bytes(out_size - 12)

    def devx_obj_modify(self, handle: int, mailbox: bytes, out_size: int) -> bytes:
        opcode = self._recorded(mailbox, out_size, handle)
        if opcode == MODIFY_CQ:  # nothing has completed: the first entry of the old ring is its end
            create, _ = self.answers_to(CREATE_CQ)[-1]
            ctypes.memset(self._umems[be(create, 0x58, 4)] + (127 if create[0x11] else 63), 0x50, 1)
        self.state = LEADS_TO.get(opcode, self.state)
        return bytes(out_size)

    def devx_obj_query(self, handle: int, mailbox: bytes, out_size: int) -> bytes:
        out = bytearray(out_size)
        opcode = self._recorded(mailbox, out_size, handle)
        if opcode == QUERY_QP:
            out[QPC_AT] = self.state << 4
        elif opcode == QUERY_RMP:
            out[0x56:0x58] = LIMIT.to_bytes(2, "big")
        return bytes(out)

    def devx_objects(self) -> list[int]:
        return list(self._objects)

    def devx_obj_destroy(self, handle: int) -> None:
        self._end(*self._objects.pop(handle))

    def general_cmd(self, mailbox: bytes, out_size: int) -> bytes:
        self._recorded(mailbox, out_size)
        return super().general_cmd(mailbox, out_size)

    def _recorded(self, mailbox: bytes, out_size: int, handle: int | None = None) -> int:
        """Keep a command, which DEVX carries only to the object that it names: its opcode."""
        assert handle is None or be(mailbox, 9, 3) == self._objects[handle][1]
        self.commands.append((mailbox, out_size))
        return be(mailbox, 0, 2)
