"""Listeners for connections and for datagram services."""

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
    """The base class of listeners, with a queue of requests."""

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
        known = ref(self)  # the machine must not keep the listener alive

        def notify(communication: Communication, event: Event) -> None:
            if (listener := known()) is not None:
                listener._notify(communication, event)

        with ExitStack() as undo:
            with agent.machine() as machine:
                self._listening = machine.listen(self._space, port, gid, backlog, notify, times=times)
            undo.callback(self._step(_Listener._stop))
            self._opened(f"listener at {self.address} port {port}", undo)

    def accept(self, timeout: float = DEADLINE) -> Asked:
        """Wait for the next request, and return it, to be accepted or rejected. TimedOutError if none arrives."""
        return self._agent.wait(self._next, timeout, f"a request at {self.address} port {self.port}")

    async def accept_async(self, timeout: float = DEADLINE) -> Asked:
        """Wait as `accept` does, in asyncio's event loop."""
        return await self._agent.wait_async(self._next, timeout, f"a request at {self.address} port {self.port}")

    def take(self) -> Asked | None:
        """Return the next request, or None. Skip requests whose peers have given up."""
        with suppress(IndexError):  # the queue is empty, perhaps because another thread took the last request
            while True:
                request = self._requests.popleft()
                if request.waits:
                    return request
        return None

    def _leave_out(self) -> None:
        """Remove requests whose peers have given up. The program may take requests at the same time."""
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
            if len(self._requests) > 2 * self._listening.backlog:  # peers have given up on most of them
                self._leave_out()

    @abstractmethod
    def _take_in(self, communication: Communication, event: Event) -> None:
        """Create a request from the machine's event, and add it to the queue."""


def too_large(ctx: Context, port_num: int, communication: Communication) -> bool:
    """Return whether the peer's MTU is larger than the port's: then the peer's packets would be too large here."""
    return communication.peer is not None and communication.peer.mtu > port_mtu(ctx, port_num)


class Listener(_Listener[Request]):
    """A port to which peers can connect (`rdma_listen`), created by `listen`.

    Closing it refuses the waiting requests. Its connections stay open.
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
    """A port where peers can ask for a UD queue pair, created by `listen_datagrams`."""

    _space = PortSpace.UDP

    def _take_in(self, communication: Communication, event: Event) -> None:
        self._requests.append(
            DatagramRequest(self._agent, communication, self._agent.port, self.port, event.private_data)
        )


def listen(
    where: Context | PD, port: int, *, gid_index: int = 0, backlog: int = 128, times: Times = LINUX, port_num: int = 1
) -> Listener:
    """Listen for connection requests at a port of one of this end's addresses (`rdma_bind_addr`, `rdma_listen`).

    `gid_index` selects the address, and `port_num` the device's port. While `backlog` requests wait for
    `Request.accept` or `reject`, further ones are dropped, and their peers repeat them. InUseError if the port already
    has a listener here.
    """
    check_port(port)
    within("backlog", backlog, 1, _MOST_BACKLOG)
    return Listener(Agent.of(context_of(where), port_num), port, gid_index, backlog, times)


def listen_datagrams(
    where: Context | PD, port: int, *, gid_index: int = 0, backlog: int = 128, times: Times = LINUX, port_num: int = 1
) -> DatagramListener:
    """Listen for peers that want to send datagrams to a port (SIDR). The arguments are those of `listen`."""
    check_port(port)
    within("backlog", backlog, 1, _MOST_BACKLOG)
    return DatagramListener(Agent.of(context_of(where), port_num), port, gid_index, backlog, times)

