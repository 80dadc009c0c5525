"""A peer's requests to a listener."""

from __future__ import annotations

from ..closing import end_block
from ..errors import BadStateError
from ..formats.cm import RejectReason, SidrStatus
from ..interrupts import deferred
from ..verbs.qp import QP
from .address import text_of
from .agent import Agent
from .communication import Communication, Notify, Service, State
from .connection import Connection, ConnectionState
from .parameters import DEFAULT, Parameters
from .queue_pair import check, to_init, to_rts

_WAITING = State.REQ_RECEIVED, State.MRA_REQ_SENT, State.SIDR_REQ_RECEIVED


class _Request:
    """A request that waits for an answer. As a context manager, it rejects itself at the end unless answered."""

    peer: str
    port: int
    private_data: bytes

    def __init__(self, agent: Agent, communication: Communication, port_num: int, port: int, private_data: bytes):
        self._agent, self._communication, self._port_num = agent, communication, port_num
        self.port, self.private_data = port, private_data
        self.peer = text_of(communication.path.gid)

    @property
    def waits(self) -> bool:
        """Return whether the peer still waits: there was no answer yet, and the peer has not given up."""
        return self._communication.state in _WAITING

    def _check(self) -> None:
        if not self.waits:
            raise BadStateError(f"{self} waits no more: it was answered, or the peer has given up")

    def __str__(self) -> str:
        return f"request of {self.peer} to port {self.port}"

    def __repr__(self) -> str:
        return f"<{self}>" if self.waits else f"<{self}, over>"


class Request(_Request):
    """A peer's request for a connection. `accept` or `reject` it; until then it counts for the listener's `backlog`.

    `peer`, `port`          the peer's address, and the local port that it asked for
    `private_data`          what the peer sent with its request, padded with zeros to 56 bytes
    `responder_resources`   READs and atomics that the peer wants to have in flight, for this end to execute
    `initiator_depth`       READs and atomics of this end that the peer executes at a time
    """

    responder_resources: int
    initiator_depth: int

    def __init__(self, agent: Agent, communication: Communication, port_num: int, port: int, private_data: bytes):
        super().__init__(agent, communication, port_num, port, private_data)
        terms = communication.peer
        self.responder_resources = terms.initiator_depth if terms else 0
        self.initiator_depth = terms.responder_resources if terms else 0

    @deferred()
    def accept(self, qp: QP, private_data: bytes = b"", *, parameters: Parameters = DEFAULT) -> Connection:
        """Connect a queue pair in RST or INIT, reply to the peer, and return the connection (`rdma_accept`).

        Afterwards the queue pair is in RTS. `Connection.established` waits until the peer's is in RTS as well; the
        peer's first message may arrive earlier. `private_data` is at most 196 bytes. On failure, the queue pair is in
        RST, and the request is still waiting. BadStateError if the peer has given up.
        """
        self._check()
        check(qp)
        communication = self._communication

        def begin(notify: Notify) -> Communication:
            own = parameters.terms(qp, self._port_num, self.initiator_depth, self.responder_resources)
            to_init(qp, self._port_num, own, parameters)
            communication.own = own
            to_rts(qp, communication, parameters)
            with self._agent.machine() as machine:
                machine.accept(communication, own, bytes(private_data))
                communication.notify = notify
            return communication

        return Connection(
            self._agent, qp, parameters, self.peer, self.port, ConnectionState.ACCEPTED, begin, self.private_data
        )

    def reject(self, private_data: bytes = b"", reason: int = RejectReason.CONSUMER) -> None:
        """Refuse the request (`rdma_reject`). `private_data` is at most 148 bytes."""
        with self._agent.machine() as machine:
            self._check()
            machine.reject(self._communication, bytes(private_data), reason)

    def __enter__(self) -> Request:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self.waits:
            end_block(error, self.reject)


class DatagramRequest(_Request):
    """A peer's request for the destination of datagrams for a port. `accept` or `reject` it.

    `peer`, `port`   the peer's address, and the local port that it asked for
    `private_data`   what the peer sent with its request, padded with zeros to 180 bytes
    """

    def accept(self, qp: QP, private_data: bytes = b"") -> None:
        """Answer with a UD queue pair and its Q_Key. `private_data` is at most 136 bytes.

        If the answer is lost, the peer asks again, which makes another request.
        """
        if not qp.type.datagrams:
            raise BadStateError(f"{qp} is {qp.type.name}: datagrams go to UD queue pairs")
        service = Service(qp.qpn, qp.query()[0].qkey)
        with self._agent.machine() as machine:
            self._check()
            machine.answer(self._communication, service, bytes(private_data))

    def reject(self, private_data: bytes = b"", status: int = SidrStatus.REJECTED) -> None:
        """Refuse the request. `private_data` is at most 136 bytes."""
        with self._agent.machine() as machine:
            self._check()
            machine.reject(self._communication, bytes(private_data), status)

    def __enter__(self) -> DatagramRequest:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self.waits:
            end_block(error, self.reject)
