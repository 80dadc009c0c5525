"""Find the queue pair of a peer's datagram service."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from ..arguments import instance, octets
from ..errors import ConnectionRejectedError, DocaError, TimedOutError, again
from ..formats.cm import SidrStatus
from ..verbs.ah_attr import AhAttr
from ..verbs.context import Context
from ..verbs.handle import Handle
from ..verbs.pd import PD
from .address import check_port, context_of, gid_of, own_gid, text_of
from .agent import Agent
from .communication import Communication
from .connection import DEADLINE
from .event import Event, EventType
from .path import Path
from .queue_pair import ah_of
from .times import LINUX, Times


@dataclass(frozen=True)
class Destination:
    """A destination of datagrams: `PD.create_ah(ah_attr)` and a `SendWr` with `remote_qpn=qpn`, `remote_qkey=qkey`.

    `private_data` is what the peer sent with its answer, padded with zeros to 136 bytes.
    """

    qpn: int
    qkey: int
    ah_attr: AhAttr
    private_data: bytes


class _Question(Handle):
    """A SIDR_REQ that is waiting for its answer."""

    _rank = -2

    def __init__(self, agent: Agent, path: Path, port: int, private_data: bytes, times: Times):
        super().__init__(agent.ctx)
        self._use(agent)
        self._agent, self._path, self.port = agent, path, port
        self.peer = text_of(path.gid)
        self._answer: Destination | DocaError | None = None
        with ExitStack() as undo:
            with agent.machine() as machine:
                made = machine.resolve(path, port, self._notify, private_data=private_data, times=times)
                agent.find(path, partial(machine.no_way, made))
            self._communication = made
            undo.callback(self._end)
            self._opened(f"question for {self.peer} port {port}", undo)

    def _end(self) -> None:
        with suppress(DocaError), self._agent.machine() as machine:
            machine.give_up(self._communication)

    def _notify(self, communication: Communication, event: Event) -> None:
        where = f"{self.peer} port {self.port}"
        if event.type is EventType.RESPONSE and communication.service is not None:
            service = communication.service
            self._answer = Destination(service.qpn, service.q_key, ah_of(self._path), event.private_data)
        elif event.type is EventType.REJECTED:
            name = SidrStatus(event.reason).name if event.reason in list(SidrStatus) else "unknown"
            self._answer = ConnectionRejectedError(
                f"{where} takes no datagrams: {name} ({event.reason})", event.reason, event.private_data
            )
        else:
            self._answer = event.why or TimedOutError(f"{where} does not answer")

    def _answered(self) -> Destination | None:
        if isinstance(self._answer, DocaError):
            raise again(self._answer)
        return self._answer

    def wait(self, timeout: float) -> Destination:
        """Wait for the answer, and return it."""
        return self._agent.wait(self._answered, timeout, f"an answer of {self.peer} port {self.port}")

    async def wait_async(self, timeout: float) -> Destination:
        """Wait as `wait` does, in asyncio's event loop."""
        return await self._agent.wait_async(self._answered, timeout, f"an answer of {self.peer} port {self.port}")


def _ask(
    where: Context | PD, address: str, port: int, private_data: bytes, gid_index: int, times: Times, port_num: int
) -> _Question:
    path = Path(gid_of(address), gid_index)
    ctx = context_of(where)
    instance("times", times, Times)
    own_gid(ctx, port_num, gid_index)
    check_port(port)
    return _Question(Agent.of(ctx, port_num), path, port, octets("private_data", private_data), times)


def resolve(
    where: Context | PD, address: str, port: int, private_data: bytes = b"", *, gid_index: int = 0,
    timeout: float = DEADLINE, times: Times = LINUX, port_num: int = 1,
) -> Destination:
    """Ask a peer for the destination of datagrams for its port (SIDR; `rdma_connect` of a UD `rdma_cm_id`).

    `private_data` is at most 180 bytes. ConnectionRejectedError if the port has no listener; other errors are as in
    `connect`.
    """
    with _ask(where, address, port, private_data, gid_index, times, port_num) as question:
        return question.wait(timeout)


async def resolve_async(
    where: Context | PD, address: str, port: int, private_data: bytes = b"", *, gid_index: int = 0,
    timeout: float = DEADLINE, times: Times = LINUX, port_num: int = 1,
) -> Destination:
    """Ask as `resolve` does, in asyncio's event loop."""
    with _ask(where, address, port, private_data, gid_index, times, port_num) as question:
        return await question.wait_async(timeout)
