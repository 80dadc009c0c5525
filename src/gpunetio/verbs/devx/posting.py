"""The CPU data path of a queue pair: the queues that this process fills, and the requests waiting for completion."""

from __future__ import annotations

import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import proxy

from ...enums import QpState, WcOpcode
from ...errors import BadStateError, DocaError, FullError, InvalidValueError
from ...interrupts import deferred
from ...providers.plain_verbs import Refused
from ..work import BadWrError, RecvWr, SendWr

if TYPE_CHECKING:
    from ..qp import QP


Request = TypeVar("Request", bound=SendWr | RecvWr)
Form = TypeVar("Form")  # a request in the form that the device takes
Note = TypeVar("Note")  # what `complete` needs to know about a slot
Packed = tuple[object, Form, tuple[Note, ...]]  # a request: the token of its queue, its form, and a note for each slot
Sent = tuple[int, WcOpcode, bool]  # a completed send: its wr_id, its opcode, and whether it returned data

_Taken = TypeVar("_Taken", contravariant=True)
_Done = TypeVar("_Done", covariant=True)


class Queue(Protocol[_Taken, _Done]):
    """The interface of a work queue, for its owner and for the reader of its completions."""

    size: int
    producer: int

    def post(self, requests: Sequence[_Taken]) -> None:
        """Pass requests to the device, up to the first one that is refused."""
        ...

    def complete(self, number: int, /) -> _Done:
        """Return the request that a completion names, and free its slots."""
        ...


class WorkQueue(ABC, Generic[Request, Form, Note]):
    """A queue of `size` slots. Indices count slots and never wrap.

    A request is packed once, without its index. The result is stored in the request's `packed`, with a token of this
    queue. The poster moves `producer` and the poller moves `consumer`, so the two need no lock between them.
    """

    producer: int
    consumer: int

    def __init__(self, size: int):
        self.size = size
        self._token = object()
        self.producer = self.consumer = 0

    def post(self, requests: Sequence[Request]) -> None:
        """Pass requests to the device, up to the first one that is refused."""
        token, room = self._token, self.size - (self.producer - self.consumer)
        taken: list[Form] = []
        firsts: list[int] = []  # the first slot of each request
        posted: list[Note] = []
        try:
            for request in requests:
                packed: Packed[Form, Note] | None = getattr(request, "packed", None)
                if packed is None or packed[0] is not token:
                    packed = self._pack(request)
                _, form, slots = packed
                if len(posted) + len(slots) > room:
                    raise FullError(self._no_room())
                firsts.append(len(posted))
                posted += slots
                taken.append(form)
        except DocaError as error:
            raise BadWrError(len(taken), requests[len(taken)], error) from error
        except (AttributeError, TypeError, ValueError, struct.error) as error:  # a value of the wrong type or range
            request = requests[len(taken)]
            cause = InvalidValueError(f"a value is of the wrong type in {request}: {error}")
            raise BadWrError(len(taken), request, cause) from error
        finally:
            if taken and (refused := self._carry_out(taken, firsts, posted)):
                raise BadWrError(refused.index, requests[refused.index], refused.error) from refused.error

    def _keep(self, request: Request, form: Form, slots: tuple[Note, ...]) -> Packed[Form, Note]:
        packed = self._token, form, slots
        object.__setattr__(request, "packed", packed)
        return packed

    @abstractmethod
    def _pack(self, request: Request) -> Packed[Form, Note]:
        """Return the token, the packed request, and a note for each of its slots."""

    @abstractmethod
    def _carry_out(self, taken: list[Form], firsts: list[int], posted: list[Note]) -> Refused | None:
        """Pass packed requests to the device, and store for each slot the note that `complete` needs.

        Return the request that the device refuses, if any, with the reason.
        """

    @abstractmethod
    def _no_room(self) -> str:
        """Return a message that says why there is no room, and what to do."""


class Posting(ABC):
    """Both queues of a QP that this process fills. `state` is the last state requested here.

    A completion names a request by a number: `send.complete(number)` returns the request and frees its slots;
    `complete_receive(number)` returns the wr_id of a receive, which may come from a shared receive queue.
    """

    send: Queue[SendWr, Sent]
    receive: Queue[RecvWr, int]
    complete_receive: Callable[[int], int]
    lock: threading.Lock
    datagrams: bool

    def __init__(self, qp: QP):
        self._qp, self.lock = proxy(qp), threading.Lock()  # a CQ holds this object, which must not hold the QP
        self.datagrams = qp.type.datagrams
        self.state = QpState.RST
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """Forget all posted requests, because the QP is in RST."""

    @property
    def used(self) -> bool:
        """Return whether requests were posted since the last reset; always true with a shared receive queue."""
        return self._qp.init_attr.srq is not None or self.send.producer + self.receive.producer != 0

    def post(self, queue: Queue[Request, object], requests: Sequence[Request]) -> None:
        """Post requests with one doorbell."""
        if queue.size == 0:
            raise InvalidValueError(f"{self._qp} has no such queue: create it with sq_wr or rq_wr above 0")
        with deferred(), self.lock:
            queue.post(requests)

    def check(self, what: str, least: QpState) -> None:
        """Raise BadStateError if the queue pair's state does not accept such a request."""
        if self.state < least:
            raise BadStateError(f"{self._qp} is in {self.state.name}: it takes {what} from {least.name} on")
