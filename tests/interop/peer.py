"""The peer in the guest: commands of `protocol.py` carried out with pyverbs on the kernel's Soft-RoCE device.

Listens on TCP; each connection is a process of its own, whose queue pairs end with it.
"""

import ctypes
import mmap
import os
import select
import signal
import socket
import traceback
from collections.abc import Sequence
from typing import Any

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from protocol import ACCESS, PORT, STATES, Connection, End, Session, listening

DEVICE = "rxe0"
GIDS = ("link_local", "ipv4", "ipv6")  # by index
MTU = {256: e.IBV_MTU_256, 512: e.IBV_MTU_512, 1024: e.IBV_MTU_1024, 2048: e.IBV_MTU_2048, 4096: e.IBV_MTU_4096}
RIGHT = {name: getattr(e, f"IBV_ACCESS_{name.upper()}") for name in ACCESS}
WR = {
    "SEND": e.IBV_WR_SEND,
    "SEND_IMM": e.IBV_WR_SEND_WITH_IMM,
    "WRITE": e.IBV_WR_RDMA_WRITE,
    "WRITE_IMM": e.IBV_WR_RDMA_WRITE_WITH_IMM,
    "READ": e.IBV_WR_RDMA_READ,
    "CS": e.IBV_WR_ATOMIC_CMP_AND_SWP,
    "FA": e.IBV_WR_ATOMIC_FETCH_AND_ADD,
}
OPCODE = {
    getattr(e, "IBV_WC_" + name): name
    for name in ("SEND", "RDMA_WRITE", "RDMA_READ", "COMP_SWAP", "FETCH_ADD", "RECV", "RECV_RDMA_WITH_IMM")
}
STATUS = {
    getattr(e, "IBV_WC_" + name): name
    for name in (
        "SUCCESS", "LOC_LEN_ERR", "LOC_QP_OP_ERR", "LOC_PROT_ERR", "WR_FLUSH_ERR", "BAD_RESP_ERR", "LOC_ACCESS_ERR",
        "REM_INV_REQ_ERR", "REM_ACCESS_ERR", "REM_OP_ERR", "RETRY_EXC_ERR", "RNR_RETRY_EXC_ERR", "REM_ABORT_ERR",
        "FATAL_ERR", "GENERAL_ERR",
    )
}
EVENT = {getattr(e, name): name.removeprefix("IBV_EVENT_") for name in dir(e) if name.startswith("IBV_EVENT_")}


class RxeEnd(End):
    """A queue pair of rxe. It has a context of its own, so that the context's events are this queue pair's."""

    def __init__(self, ip: str, transport: str, size: int, depth: int, psn: int, access: Sequence[str]):
        before = set(os.listdir("/proc/self/fd"))
        self.ctx = Context(name=DEVICE)
        self.event_fd = next(
            int(fd)
            for fd in set(os.listdir("/proc/self/fd")) - before
            if os.path.lexists(path := f"/proc/self/fd/{fd}") and "infinibandevent" in os.readlink(path)
        )
        self.sgid_index, self.psn, self.rc = GIDS.index(ip), psn, transport == "RC"
        self.gid = bytes.fromhex(str(self.ctx.query_gid(1, self.sgid_index)).replace(":", ""))
        self.port_mtu = self.ctx.query_port(1).active_mtu
        self.pd = PD(self.ctx)
        self.pages = mmap.mmap(-1, size)
        self.memory = memoryview(self.pages)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        self.mr = MR(self.pd, size, sum(RIGHT[name] for name in access), address=self.address)
        self.cqs = {"send": CQ(self.ctx, depth), "receive": CQ(self.ctx, depth)}
        cap = QPCap(max_send_wr=depth, max_recv_wr=depth, max_send_sge=4, max_recv_sge=4)
        kind = e.IBV_QPT_RC if self.rc else e.IBV_QPT_UC
        self.qp = QP(self.pd, QPInitAttr(kind, scq=self.cqs["send"], rcq=self.cqs["receive"], cap=cap, sq_sig_all=0))
        self.qpn = self.qp.qp_num

    def about(self) -> dict[str, Any]:
        mtu = next(size for size, code in MTU.items() if code == self.port_mtu)
        return {
            "qp": self.qpn, "psn": self.psn, "gid": self.gid.hex(), "lid": 0, "mtu": mtu,
            "address": self.address, "rkey": self.mr.rkey, "size": len(self.memory),
        }

    def connect(
        self,
        remote: dict[str, Any],
        mtu: int = 4096,
        ack_timeout: int = 14,
        retry_cnt: int = 7,
        rnr_retry: int = 7,
        min_rnr_timer: int = 1,
        max_rd_atomic: int = 16,
        access: Sequence[str] = ACCESS,
    ) -> None:
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = sum(RIGHT[name] for name in access)
        attr.dest_qp_num, attr.rq_psn, attr.sq_psn = remote["qp"], remote["psn"], self.psn
        attr.path_mtu = min(MTU[mtu], MTU[remote["mtu"]], self.port_mtu)
        gid = GID(":".join(remote["gid"][at : at + 4] for at in range(0, 32, 4)))
        route = GlobalRoute(dgid=gid, sgid_index=self.sgid_index, hop_limit=64)
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        attr.max_rd_atomic = attr.max_dest_rd_atomic = max_rd_atomic
        attr.min_rnr_timer, attr.timeout = min_rnr_timer, ack_timeout
        attr.retry_cnt, attr.rnr_retry = retry_cnt, rnr_retry
        to_init = e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS
        to_rtr = e.IBV_QP_AV | e.IBV_QP_PATH_MTU | e.IBV_QP_DEST_QPN | e.IBV_QP_RQ_PSN
        to_rts = e.IBV_QP_SQ_PSN
        if self.rc:
            to_rtr |= e.IBV_QP_MAX_DEST_RD_ATOMIC | e.IBV_QP_MIN_RNR_TIMER
            to_rts |= e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT | e.IBV_QP_RNR_RETRY | e.IBV_QP_MAX_QP_RD_ATOMIC
        for state, mask in ((e.IBV_QPS_INIT, to_init), (e.IBV_QPS_RTR, to_rtr), (e.IBV_QPS_RTS, to_rts)):
            attr.qp_state = state
            self.qp.modify(attr, e.IBV_QP_STATE | mask)

    def _sges(self, sges: Sequence[Sequence[int]]) -> list[SGE]:
        return [SGE(self.address + sge[0], sge[1], sge[2] if len(sge) > 2 else self.mr.lkey) for sge in sges]

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
        segments = self._sges(sges)
        flags = e.IBV_SEND_SIGNALED if signaled else 0
        wr = SendWR(wr_id, WR[op], len(segments), socket.htonl(imm), segments, flags)
        if op in ("CS", "FA"):
            wr.set_wr_atomic(rkey, remote, swap_add if op == "FA" else compare, swap_add)
        elif op in ("WRITE", "WRITE_IMM", "READ"):
            wr.set_wr_rdma(rkey, remote)
        self.qp.post_send(wr)

    def receive(self, sges: Sequence[Sequence[int]], wr_id: int = 0) -> None:
        segments = self._sges(sges)
        self.qp.post_recv(RecvWR(wr_id, len(segments), segments))

    def poll(self, queue: str) -> dict[str, Any] | None:
        count, completions = self.cqs[queue].poll(1)
        if not count:
            return None
        wc = completions[0]
        return {
            "status": STATUS.get(wc.status, str(wc.status)),
            "opcode": OPCODE.get(wc.opcode, str(wc.opcode)),
            "byte_len": wc.byte_len,
            "imm": socket.ntohl(wc.imm_data) if wc.wc_flags & e.IBV_WC_WITH_IMM else None,
            "wr_id": wc.wr_id,
        }

    def events(self, timeout: float) -> list[str]:
        found = []
        while select.select([self.event_fd], [], [], 0 if found else timeout)[0]:
            event = self.ctx.get_async_event()
            found.append(EVENT[event.event_type])
            event.ack()  # without it the queue pair could not be destroyed
        return found

    def state(self) -> str:
        attr, _ = self.qp.query(e.IBV_QP_STATE)
        return STATES[attr.qp_state]

    def to_error(self) -> None:
        self.qp.modify(QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE)

    def destroy(self) -> None:
        self.ctx.close()  # and all that was made from it


class PeerSession(Session):
    """A session on rxe."""

    def open(self, **arguments: Any) -> End:
        return RxeEnd(**arguments)

    def command_listening(self, port: int, timeout: float) -> bool:
        """Wait until a TCP port of the guest listens."""
        return listening(port, timeout)

    def command_rc_pingpong(
        self,
        ip: str,
        nbytes: int,
        count: int,
        mtu: int,
        port: int,
        timeout: float,
        host: str | None = None,
        events: bool = False,
        check: bool = False,
        service: str = "rc",
    ) -> str:
        """Run `ibv_rc_pingpong`, or that of another service, as the client when a host is given: what it prints.

        With `check` the server looks at one byte of each page of the last message.
        """
        numbers = {"-g": GIDS.index(ip), "-s": nbytes, "-n": count, "-m": mtu, "-p": port}
        if service == "ud":  # which has no path MTU
            del numbers["-m"]
        argv = [f"ibv_{service}_pingpong", "-d", DEVICE, *(str(part) for option in numbers.items() for part in option)]
        done = self.command_run([*argv, *["-e"] * events, *["-c"] * check, *[host] * (host is not None)], timeout)
        if done["status"]:
            raise ValueError(f"{' '.join(argv)}: status {done['status']}: {done['output']}")
        return done["output"]


def main() -> None:
    with socket.create_server(("", PORT), backlog=16) as server:
        while True:
            sock, _ = server.accept()
            if os.fork():
                sock.close()
                continue
            status = 1
            try:
                server.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                PeerSession().serve(Connection(sock))
                status = 0
            except Exception:
                traceback.print_exc()
            os._exit(status)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended sessions leave no zombies
    main()
