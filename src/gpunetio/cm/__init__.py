"""RDMA CM: connections by address and port, with the InfiniBand connection manager protocol of Linux and librdmacm.

    with cm.listen(ctx, 7174) as listener:
        connection = listener.accept().accept(qp)

    connection = cm.connect(qp, "10.77.9.1", 7174, b"hello")
"""

from ..errors import ConnectionRejectedError
from ..formats.cm import RejectReason, SidrStatus
from .connecting import connect, connect_async, start_connecting
from .connection import Connection, ConnectionState
from .event import Event, EventType
from .listener import DatagramListener, Listener, listen, listen_datagrams
from .parameters import Parameters
from .request import DatagramRequest, Request
from .resolving import Destination, resolve, resolve_async
from .times import Times

__all__ = [
    "Connection", "ConnectionRejectedError", "ConnectionState", "DatagramListener", "DatagramRequest", "Destination",
    "Event", "EventType", "Listener", "Parameters", "RejectReason", "Request", "SidrStatus", "Times", "connect",
    "connect_async", "listen", "listen_datagrams", "resolve", "resolve_async", "start_connecting",
]
