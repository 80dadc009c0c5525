"""Another engine is a subclass of `Engine`: here one without threads, of which a call takes the turns."""

import time
from collections.abc import Sequence

import numpy as np
import pytest

from gpunetio import verbs
from gpunetio.enums import WcStatus, WrOpcode
from gpunetio.fabric.notifier import Notifier
from gpunetio.memory import HostMemory
from gpunetio.nic import nic as nic_module
from gpunetio.nic.engine.hardware import Engine
from gpunetio.nic.engine.port import PortConfig
from gpunetio.nic.host.engine import compile_engine, post_command
from gpunetio.nic.state.qp import QP_ROW
from gpunetio.nic.state.tables import Table
from gpunetio.nic.turn.step import step
from gpunetio.verbs import RecvWr, SendWr, Sge


class TurnEngine(Engine):
    """It works while a command or a doorbell is being dealt with, in the thread that has brought it."""

    def __init__(self, name: str, records: np.ndarray, address: int, memory: tuple[Table, Table], twin: None):
        compile_engine()
        self._record, self._address, self._running = records[0], address, False
        self._staging, self._notifier = HostMemory(QP_ROW.size), Notifier()

    def start(self) -> None:
        self._running = True

    def stop(self) -> None:
        self._running = False
        self._notifier.close()
        self._staging.close()

    @property
    def running(self) -> bool:
        return self._running

    def post(
        self, op: int, row: int, prepared: np.ndarray | None = None, state: int = 0, timeout: float = 10.0,
        worker: int = 0,
    ) -> None:
        data = b"" if prepared is None else prepared.tobytes()
        self._staging.array[: len(data)] = np.frombuffer(data, np.uint8)
        post_command(self._address, op, row, self._staging.address, len(data), state)
        end = time.monotonic() + timeout
        while int(self._record["command_done"]) != int(self._record["command_seq"]):
            assert time.monotonic() < end
            step(self._address)

    def post_alone(self, *commands: tuple[int, int, np.ndarray], timeout: float = 10.0) -> None:
        for command in commands:
            self.post(*command, timeout=timeout)

    @property
    def workers(self) -> list[int]:
        return [self._address]

    def synchronize(self) -> None:
        self.kick()

    @property
    def kick_fd(self) -> int:
        return self._notifier.notify_fd

    def watch(self, events: Sequence[int], sockets: Sequence[int]) -> None:
        assert not sockets

    def kick(self) -> None:
        while self._running and step(self._address):
            pass

    def doorbell_rung(self) -> None:
        self.kick()

    def count_kernels(self, change: int) -> None:
        pass


@pytest.mark.host_memory
def test_a_nic_with_an_engine_of_another_kind(monkeypatch):
    monkeypatch.setattr(nic_module, "ThreadEngine", TurnEngine)
    source, target = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)
    with verbs.open(port=PortConfig(workers=1)) as ctx:
        assert isinstance(ctx.provider.nic.engine, TurnEngine)
        pd, cq = ctx.create_pd(), ctx.create_cq(16)
        here, there = (pd.create_qp(sq_wr=4, rq_wr=4, send_cq=cq, receive_cq=cq) for _ in range(2))
        here.connect(there)
        out, into = pd.register(source), pd.register(target)
        to = {"remote_addr": into.address, "rkey": into.rkey}
        there.post_recv(RecvWr(sges=[Sge(into.address + 128, 128, into.lkey)], wr_id=1))
        here.post_send(
            SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[Sge(out.address, 128, out.lkey)], wr_id=2, **to),
            SendWr(opcode=WrOpcode.SEND, sges=[Sge(out.address + 128, 128, out.lkey)], wr_id=3),
        )
        done = cq.poll(16)  # nobody works for the NIC now: the calls above have done it all
        assert sorted((wc.wr_id, wc.status) for wc in done) == [(n, WcStatus.SUCCESS) for n in (1, 2, 3)]
        assert np.array_equal(target, source)
