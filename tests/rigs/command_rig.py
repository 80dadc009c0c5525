"""A device that gets its commands as mailboxes, without verbs."""

from collections.abc import Callable
from typing import Any

import pytest

from gpunetio.enums import Access, UarAllocationType
from gpunetio.errors import DriverError
from gpunetio.formats import commands as cmd
from gpunetio.formats.commands import Opcode, QpState, Status
from gpunetio.formats.mailboxes import mailboxes
from gpunetio.memory import HostMemory
from gpunetio.nic.control import uar
from gpunetio.nic.control.queues import cq, qp, rmp
from gpunetio.nic.control.regions import mkey, pd, umem
from gpunetio.nic.control.syndromes import CommandSyndrome
from gpunetio.providers import open_device
from gpunetio.providers.soft import SoftProvider

GID = bytes(10) + b"\xff\xff" + bytes([127, 0, 0, 1])  # soft0's
PATH = "primary_address_path"
RST, INIT, RTR, RTS, ERR = QpState.RST, QpState.INIT, QpState.RTR, QpState.RTS, QpState.ERR
INPUTS = {
    Opcode.QUERY_HCA_CAP: cmd.QUERY_HCA_CAP_IN, Opcode.QUERY_ROCE_ADDRESS: cmd.QUERY_ROCE_ADDRESS_IN,
    Opcode.CREATE_CQ: cmd.CREATE_CQ_IN, Opcode.DESTROY_CQ: cmd.DESTROY_CQ_IN,
    Opcode.CREATE_QP: cmd.CREATE_QP_IN, Opcode.DESTROY_QP: cmd.DESTROY_QP_IN, Opcode.QUERY_QP: cmd.QUERY_QP_IN,
    Opcode.RST2INIT_QP: cmd.RST2INIT_QP_IN, Opcode.INIT2INIT_QP: cmd.INIT2INIT_QP_IN,
    Opcode.INIT2RTR_QP: cmd.INIT2RTR_QP_IN, Opcode.RTR2RTS_QP: cmd.RTR2RTS_QP_IN,
    Opcode.RTS2RTS_QP: cmd.RTS2RTS_QP_IN, Opcode.QP_2ERR: cmd.QP_2ERR_IN, Opcode.QP_2RST: cmd.QP_2RST_IN,
    Opcode.CREATE_RMP: cmd.CREATE_RMP_IN, Opcode.MODIFY_RMP: cmd.MODIFY_RMP_IN,
    Opcode.DESTROY_RMP: cmd.DESTROY_RMP_IN, Opcode.QUERY_RMP: cmd.QUERY_RMP_IN,
    **{opcode: mailboxes(opcode).request for opcode in Opcode if 0x92F <= opcode <= 0x93C},  # flow tables
}


LIMITED = {"QP": qp, "CQ": cq, "PD": pd, "UMEM": umem, "UAR": uar, "MR": mkey, "SRQ": rmp}


def limit_tables(monkeypatch: pytest.MonkeyPatch, rows: dict[str, int]) -> None:
    """Give the tables of NICs that open from now on so many rows."""
    for name, count in rows.items():
        monkeypatch.setattr(LIMITED[name], f"MAX_{name}", count)


class Device:
    """An open software NIC with one PD, UAR page and UMEM, and calls that complete what is given to a good mailbox."""

    def __init__(self, name: str = "soft0"):
        provider = open_device(name)
        assert isinstance(provider, SoftProvider)
        self.provider, self.nic = provider, provider.nic
        self.memory = HostMemory(1 << 16)
        self.pd, self.page = provider.alloc_pd(), provider.alloc_uar(UarAllocationType.NONCACHE)
        self.umem = provider.reg_umem(self.memory.address, self.memory.nbytes, Access.LOCAL_WRITE)

    def close(self) -> None:
        self.provider.close()
        self.memory.close()

    def execute(self, opcode: int, out_size: int = 16, **fields: Any) -> tuple[bytes, str]:
        """Past the provider, which refuses what DEVX would."""
        return self.nic.execute(bytes(INPUTS[Opcode(opcode)].pack(opcode=opcode, **fields)), out_size)

    def cq(self, cqc: dict[str, Any] | None = None, **fields: Any) -> tuple[int, int]:
        """(handle, CQN)."""
        context = {
            "log_cq_size": 4, "uar_page": self.page.page_id, "c_eqn": 1, "dbr_umem_valid": 1, "dbr_umem_id": self.umem,
            "dbr_addr": 0x8000, **(cqc or {}),
        }
        fields = {"cq_umem_id": self.umem, "cq_umem_offset": 0x400, "cq_umem_valid": 1, **fields}
        mailbox = cmd.CREATE_CQ_IN.pack(opcode=Opcode.CREATE_CQ, cq_context=context, **fields)
        handle, out = self.provider.devx_obj_create(bytes(mailbox), 16)
        return handle, cmd.CREATE_CQ_OUT.get(out, "cqn")

    def qp(self, qpc: dict[str, Any] | None = None, **fields: Any) -> tuple[int, int]:
        """(handle, QPN)."""
        context = {
            "st": 0, "pd": self.pd, "uar_page": self.page.page_id, "rq_type": 3, "no_sq": 1, "dbr_umem_valid": 1,
            "dbr_umem_id": self.umem, "dbr_addr": 0x8008, **(qpc or {}),
        }
        fields = {"wq_umem_id": self.umem, "wq_umem_offset": 0x1000, "wq_umem_valid": 1, **fields}
        mailbox = cmd.CREATE_QP_IN.pack(opcode=Opcode.CREATE_QP, qpc=context, **fields)
        handle, out = self.provider.devx_obj_create(bytes(mailbox), 16)
        return handle, cmd.CREATE_QP_OUT.get(out, "qpn")

    def query(self, qpn: int) -> dict[str, Any]:
        out, refusal = self.execute(Opcode.QUERY_QP, 272, qpn=qpn)
        assert not refusal
        return cmd.QUERY_QP_OUT.get(out, "qpc")

    def modify(self, opcode: Opcode, qp: tuple[int, int], opt: int = 0, qpc: dict | None = None, **fields: Any) -> None:
        handle, qpn = qp
        struct = INPUTS[opcode]
        if "qpc" in struct.fields:
            fields |= {"qpc": qpc or {}, "opt_param_mask": opt}
        mailbox = struct.pack(opcode=opcode, qpn=qpn, **fields)
        assert self.provider.devx_obj_modify(handle, bytes(mailbox), 16) == bytes(16)

    def init(self, qp: tuple[int, int], path: dict | None = None, **qpc: Any) -> None:
        path = {"vhca_port_num": 1, **(path or {})}
        self.modify(Opcode.RST2INIT_QP, qp, qpc={"pm_state": 3, PATH: path, **qpc})

    def rtr(self, qp: tuple[int, int], path: dict | None = None, **qpc: Any) -> None:
        path = {"rgid_rip": GID, "hop_limit": 64, **(path or {})}
        self.modify(Opcode.INIT2RTR_QP, qp, qpc={"mtu": 3, "remote_qpn": qp[1], "log_msg_max": 30, PATH: path, **qpc})

    def rts(self, qp: tuple[int, int], path: dict | None = None, **qpc: Any) -> None:
        self.modify(Opcode.RTR2RTS_QP, qp, qpc={PATH: {"ack_timeout": 14, **(path or {})}, **qpc})

    def bring(self, qp: tuple[int, int], state: QpState) -> None:
        """From RST to `state`."""
        if state in (INIT, RTR, RTS):
            self.init(qp)
        if state in (RTR, RTS):
            self.rtr(qp)
        if state is RTS:
            self.rts(qp)
        if state is ERR:
            self.modify(Opcode.QP_2ERR, qp)

    def state(self, qp: tuple[int, int]) -> int:
        return self.query(qp[1])["state"]

    def tables(self) -> list[bytes]:
        nic = self.nic
        parts = (nic.qps, nic.cqs, nic.srqs, nic.mkeys, nic.pds, nic.umems, nic.uar_pages)
        return [part.rows.tobytes() for part in parts] + [bytes(qp.context) for qp in nic.control.qps.known.values()]

    def refuses(self, call: Callable[[], Any], status: Status, syndrome: CommandSyndrome, *words: str) -> None:
        """The call is refused with this status and syndrome, the message has the words, and nothing has changed."""
        before = self.tables()
        with pytest.raises(DriverError) as caught:
            call()
        text = str(caught.value)
        assert (Status(caught.value.status), CommandSyndrome(caught.value.syndrome)) == (status, syndrome), text
        for word in (status.name, f"syndrome {int(syndrome):#x}", *words):
            assert word in text
        assert self.tables() == before



def refusal(answer: tuple[bytes, str]) -> tuple[Status, CommandSyndrome, str]:
    out, text = answer
    assert len(out) >= 16
    return Status(out[0]), CommandSyndrome(int.from_bytes(out[4:8], "big")), text
