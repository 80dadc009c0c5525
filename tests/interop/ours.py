"""Our side: commands of `protocol.py` carried out on the software NIC, by hand as in `nic_rig.py`.

    ours.py LOSS WIRE IPV4 IPV6

LOSS is the share of its packets that get lost, WIRE that of `PortConfig`. Runs in the guest's network namespace, with
the control connection (a socket) as its standard input.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "rigs"))

from click.testing import CliRunner

import nic_rig as rig
from gpunetio import verbs
from gpunetio.cli import app
from gpunetio.cm.agent import Agent
from gpunetio.enums import Access, QpState
from gpunetio.fabric.faults import Faults
from gpunetio.formats.cqe import Syndrome
from gpunetio.nic.engine.port import PortConfig
from gpunetio.verbs import QpEndpoint
from protocol import ACCESS, Connection, End, Session

DEVICE = "soft0"
# ack_timeout: with all its retries 7 s, as a guest beside busy processes gets no processor for 2 to 5 s now and then.
PATIENCE = 16
WITH_D = ("pingpong", "verbs_server_client")  # commands that call the NIC so
GID_INDEX = {"ipv4": 0, "link_local": 1, "ipv6": 2}
RIGHT = {name: Access[name.upper()] for name in ACCESS}
STATE = {QpState.RST: "RESET", **{state: state.name for state in QpState if state != QpState.RST}}
OPCODE = {
    "SEND": rig.SEND, "SEND_IMM": rig.SEND_IMM, "WRITE": rig.WRITE, "WRITE_IMM": rig.WRITE_IMM,
    "READ": rig.READ, "CS": rig.CS, "FA": rig.FA, "MASKED_FA": rig.MASKED_FA,
}
COMPLETED = {
    rig.SEND: "SEND", rig.SEND_IMM: "SEND", rig.WRITE: "RDMA_WRITE", rig.WRITE_IMM: "RDMA_WRITE",
    rig.READ: "RDMA_READ", rig.CS: "COMP_SWAP", rig.FA: "FETCH_ADD", rig.MASKED_FA: "MASKED_FETCH_ADD",
}
ARRIVED = {rig.RESP_SEND: "RECV", rig.RESP_SEND_IMM: "RECV", rig.RESP_WRITE_IMM: "RECV_RDMA_WITH_IMM"}
STATUS = {
    0: "SUCCESS",
    rig.LOCAL_LENGTH: "LOC_LEN_ERR",
    rig.LOCAL_QP_OP: "LOC_QP_OP_ERR",
    rig.LOCAL_PROT: "LOC_PROT_ERR",
    rig.FLUSHED: "WR_FLUSH_ERR",
    rig.REMOTE_INVALID: "REM_INV_REQ_ERR",
    rig.REMOTE_ACCESS: "REM_ACCESS_ERR",
    rig.REMOTE_OP: "REM_OP_ERR",
    rig.RETRY_EXCEEDED: "RETRY_EXC_ERR",
    rig.RNR_EXCEEDED: "RNR_RETRY_EXC_ERR",
}
# The asynchronous event that goes with what our responder reports.
EVENT = {
    Syndrome.REMOTE_ACCESS: "QP_ACCESS_ERR",
    Syndrome.REMOTE_INVAL_REQ: "QP_REQ_ERR",
    Syndrome.REMOTE_OP: "QP_FATAL",
}


def rights(names: Sequence[str]) -> Access:
    access = Access(0)
    for name in names:
        access |= RIGHT[name]
    return access


class SoftEnd(End):
    """A queue pair of the software NIC."""

    def __init__(
        self, ctx: verbs.Context, ip: str, transport: str, size: int, depth: int, psn: int, access: Sequence[str]
    ):
        if transport != "RC":
            raise ValueError(f"the software NIC has no {transport} queue pairs")
        self.sgid_index, self.psn = GID_INDEX[ip], psn
        self.pd = ctx.create_pd()
        self.buffer = rig.Buffer(self.pd, size, access=rights(access))
        self.queue = rig.Queue(self.pd, sq=depth, rq=depth)
        self.qpn = self.queue.qp.qpn
        self.memory, self.address = memoryview(self.buffer.bytes), self.buffer.address
        self.sent: dict[int, int] = {}  # wr_id by index
        self.expected: dict[int, int] = {}

    def about(self) -> dict[str, Any]:
        here = self.queue.qp.endpoint(sgid_index=self.sgid_index, psn=self.psn)
        return {
            "qp": here.qpn, "psn": here.psn, "gid": here.gid.hex(), "lid": here.lid, "mtu": here.mtu,
            "address": self.address, "rkey": self.buffer.key, "size": len(self.memory),
        }

    def connect(
        self,
        remote: dict[str, Any],
        mtu: int = 4096,
        access: Sequence[str] = ACCESS,
        ack_timeout: int = PATIENCE,
        **attributes: Any,
    ) -> None:
        there = QpEndpoint(
            remote["qp"], bytes.fromhex(remote["gid"]), remote["lid"], min(mtu, remote["mtu"]), remote["psn"]
        )
        self.queue.qp.connect(
            there, sgid_index=self.sgid_index, psn=self.psn, remote_access=rights(access), ack_timeout=ack_timeout,
            **attributes,
        )

    def _segments(self, sges: Sequence[Sequence[int]]) -> list[bytes]:
        # A count of 0 in a data segment would mean 2 GiB.
        return [
            rig.data(self.address + sge[0], sge[2] if len(sge) > 2 else self.buffer.key, sge[1])
            for sge in sges
            if sge[1]
        ]

    def post(
        self,
        op: str,
        sges: Sequence[Sequence[int]],
        wr_id: int = 0,
        signaled: bool = True,
        remote: int = 0,
        rkey: int = 0,
        imm: int = 0,
        swap_add: int = 0,
        compare: int = 0,
    ) -> None:
        segments = self._segments(sges)
        if op in ("CS", "FA"):
            segments.insert(0, rig.atomic(swap_add, compare))
        masked = op == "MASKED_FA"
        if masked:
            segments.insert(0, rig.masked_fa(swap_add, 0, 8))
        if not op.startswith("SEND"):
            segments.insert(0, rig.raddr(remote, rkey))
        ce, opmod = rig.ALWAYS if signaled else rig.ON_ERROR, rig.OPMOD[8] if masked else 0
        index = self.queue.put(OPCODE[op], *segments, ce=ce, imm=imm, opmod=opmod)
        self.sent[index & 0xFFFF] = wr_id
        self.queue.ring()
        self.queue.nic.engine.kick()  # no kernel runs, so that the engine may sleep: do not wait for its next look

    def receive(self, sges: Sequence[Sequence[int]], wr_id: int = 0) -> None:
        index = self.queue.write_receive(*self._segments(sges))
        self.expected[index & 0xFFFF] = wr_id
        self.queue.record[0] = self.queue.received & 0xFFFF

    def poll(self, queue: str) -> dict[str, Any] | None:
        sending = queue == "send"
        cqe = (self.queue.done if sending else self.queue.arrived).poll()
        if cqe is None:
            return None
        opcode = COMPLETED.get(cqe.wqe_opcode) if sending else ARRIVED.get(cqe.opcode)
        with_imm = cqe.opcode in (rig.RESP_SEND_IMM, rig.RESP_WRITE_IMM)
        return {
            "status": STATUS.get(cqe.syndrome, hex(cqe.syndrome)),
            "opcode": opcode or str(cqe.opcode),
            "byte_len": cqe.byte_cnt,
            "imm": cqe.imm if with_imm else None,
            "wr_id": (self.sent if sending else self.expected)[cqe.counter],
        }

    def events(self, timeout: float) -> list[str]:
        # The NIC raises no asynchronous events yet: its reports on a responder say what one would.
        until = time.monotonic() + timeout
        while True:
            found = [
                EVENT[Syndrome(report.syndrome)]
                for report in rig.reports_of(self.queue.nic, self.qpn)
                if report.responder and report.syndrome in list(EVENT)
            ]
            if found or time.monotonic() > until:
                return found
            time.sleep(0.001)

    def state(self) -> str:
        return STATE[self.queue.qp.state]

    def to_error(self) -> None:
        self.queue.qp.to_error()

    def destroy(self) -> None:
        self.memory = memoryview(b"")
        self.queue.qp.close()
        for cq in (self.queue.send_cq, self.queue.recv_cq):
            cq.close()
        self.buffer.mr.close()
        self.pd.close()


class OurSession(Session):
    """A session on the software NIC."""

    def __init__(self, ctx: verbs.Context, addresses: Sequence[str], loss: float):
        super().__init__()
        self.ctx, self.addresses, self.loss = ctx, addresses, loss
        self._manager: Agent | None = None

    def open(self, **arguments: Any) -> End:
        return SoftEnd(self.ctx, **arguments)

    def command_pingpong_command(self, ip: str, arguments: Sequence[str], timeout: float) -> dict[str, Any]:
        """Run `gpunetio pingpong` on this session's NIC: status and output."""
        return self._command("pingpong", "-g", str(GID_INDEX[ip]), *arguments)

    def command_server_client(self, arguments: Sequence[str], timeout: float) -> dict[str, Any]:
        """Run `gpunetio verbs_server_client` on this session's NIC, with its IPv4 address: status and output."""
        return self._command("verbs_server_client", "-gid", str(GID_INDEX["ipv4"]), *arguments)

    def command_tool(self, name: str, arguments: Sequence[str], timeout: float) -> dict[str, Any]:
        """Run a command of `gpunetio` that speaks with a tool of librdmacm: status and output.

        If packets get lost, a connection manager answers behind it, as the kernel's does when a program has ended.
        Otherwise a peer whose DREP was lost would ask for two minutes.
        """
        if self._manager:
            self._manager.close()
        try:
            return self._command(name, *arguments)
        finally:
            self._manager = Agent.of(self.ctx) if self.loss else None

    def _command(self, name: str, *arguments: str) -> dict[str, Any]:
        addresses = [word for address in self.addresses for word in ("--address", address)]
        nic = "-d" if name in WITH_D else "-n"
        faults = ["--faults", f"loss={self.loss}"] if self.loss else []
        done = CliRunner().invoke(app, [name, nic, DEVICE, "--wire", "udp", *faults, *addresses, *arguments])
        return {"status": done.exit_code, "output": done.output}


def main() -> None:
    loss, wire, *addresses = sys.argv[1:]
    faults = Faults(loss=float(loss)) if float(loss) else None
    port = PortConfig(addresses=tuple(addresses), wire=wire, faults=faults)
    with socket.socket(fileno=0) as sock, verbs.open(DEVICE, port=port) as ctx:
        OurSession(ctx, addresses, float(loss)).serve(Connection(sock))


if __name__ == "__main__":
    main()
