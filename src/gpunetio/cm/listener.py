"""Listeners."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from contextlib import ExitStack, suppress
from typing import Generic, TypeVar
from weakref import ref

from ..arguments import within
from ..errors import BadStateError, DocaError
from ..formats.cm import PortSpace, RejectReason
from ..verbs.context import Context
from ..verbs.handle import Handle
from ..verbs.pd import PD
from .address import check_port, context_of, own_gid, text_of
from .agent import Agent
from .communication import Communication
from .connection import DEADLINE
from .event import Event, EventType
from .parameters import port_mtu
from .request import DatagramRequest, Request
from .times import LINUX, Times

_MOST_BACKLOG = 1 << 20

Asked = TypeVar("Asked", Request, DatagramRequest)


class _Listener(Handle, Generic[Asked]):
    """What listeners have in common: a queue of requests."""

    _rank = -2
    _space: PortSpace
    address: str
    port: int

    def __init__(self, agent: Agent, port: int, gid_index: int, backlog: int, times: Times):
        super().__init__(agent.ctx)
        self._use(agent)
        self._agent = agent
        gid = own_gid(agent.ctx, agent.port, gid_index)
        self.address, self.port = text_of(gid), port
        self._requests: deque[Asked] = deque()
        known = ref(self)  # the machine does not keep a listener that nobody holds

        def notify(communication: Communication, event: Event) -> None:
            if (listener := known()) is not None:
                listener._notify(communication, event)

        with ExitStack() as undo:
            with agent.machine() as machine:
                self._listening = machine.listen(self._space, port, gid, backlog, notify, times=times)
            undo.callback(self._step(_Listener._stop))
            self._opened(f"listener at {self.address} port {port}", undo)

    def accept(self, timeout: float = DEADLINE) -> Asked:
        """Return the next request, which then is to be accepted or rejected. TimedOutError if none comes."""
        return self._agent.wait(self._next, timeout, f"a request at {self.address} port {self.port}")

    async def accept_async(self, timeout: float = DEADLINE) -> Asked:
        """Do what `accept` does, in asyncio's event loop."""
        return await self._agent.wait_async(self._next, timeout, f"a request at {self.address} port {self.port}")

    def take(self) -> Asked | None:
        """Return the next request if there is one. Peers that have given up are left out."""
        with suppress(IndexError):  # another thread has taken the last one
            while True:
                request = self._requests.popleft()
                if request.waits:
                    return request
        return None

    def _leave_out(self) -> None:
        """Leave out peers that have given up, while the program may take requests."""
        with suppress(IndexError):
            for _ in range(len(self._requests)):
                request = self._requests.popleft()
                if request.waits:
                    self._requests.append(request)

    def _next(self) -> Asked | None:
        if self.closed:
            raise BadStateError(f"{self} is closed")
        return self.take()

    def _stop(self) -> None:
        with suppress(DocaError), self._agent.machine() as machine:
            machine.stop_listening(self._listening)

    def _notify(self, communication: Communication, event: Event) -> None:
        if event.type is EventType.REQUEST:
            self._take_in(communication, event)
            if len(self._requests) > 2 * self._listening.backlog:  # peers have given up most of them
                self._leave_out()

    @abstractmethod
    def _take_in(self, communication: Communication, event: Event) -> None:
        """Make a request of what the machine tells."""


def too_large(ctx: Context, port_num: int, communication: Communication) -> bool:
    """Return whether a peer's packets are larger than a port's: ours would fit the peer, and not the peer's us."""
    return communication.peer is not None and communication.peer.mtu > port_mtu(ctx, port_num)


class Listener(_Listener[Request]):
    """A port that peers can connect to (`rdma_listen`). `listen` makes it.

    When it is closed, requests that wait are refused, and connections stay.
    """

    _space = PortSpace.TCP

    def _take_in(self, communication: Communication, event: Event) -> None:
        agent = self._agent
        if too_large(self.ctx, agent.port, communication):
            with agent.machine() as machine:
                machine.reject(communication, reason=RejectReason.INVALID_MTU)
            return
        self._requests.append(Request(agent, communication, agent.port, self.port, event.private_data))


class DatagramListener(_Listener[DatagramRequest]):
    """A port whose UD queue pair peers can ask for. `listen_datagrams` makes it."""

    _space = PortSpace.UDP

    def _take_in(self, communication: Communication, event: Event) -> None:
        self._requests.append(
            DatagramRequest(self._agent, communication, self._agent.port, self.port, event.private_data)
        )


def listen(
    where: Context | PD, port: int, *, gid_index: int = 0, backlog: int = 128, times: Times = LINUX, port_num: int = 1
) -> Listener:
    """Take requests for connections to a port, at one address of this end (`rdma_bind_addr`, `rdma_listen`).

    `gid_index` chooses the address, and `port_num` the port of the device. While `backlog` requests wait for
    `Request.accept` or `reject`, others are not heard, and ask again. InUseError if the port has a listener here.
    """
    check_port(port)
    within("backlog", backlog, 1, _MOST_BACKLOG)
    return Listener(Agent.of(context_of(where), port_num), port, gid_index, backlog, times)


def listen_datagrams(
    where: Context | PD, port: int, *, gid_index: int = 0, backlog: int = 128, times: Times = LINUX, port_num: int = 1
) -> DatagramListener:
    """Take requests of peers that want to send datagrams to a port (SIDR). The arguments are those of `listen`."""
    check_port(port)
    within("backlog", backlog, 1, _MOST_BACKLOG)
    return DatagramListener(Agent.of(context_of(where), port_num), port, gid_index, backlog, times)

