"""DOCA RDMA: connections to peers, driven by kernels or by CPU tasks.

    with Rdma(pd, gpu=gpu) as rdma:
        description, connection = rdma.export()
        connection.connect(what_the_peer_has_sent)
        kernel[1, 32, gpu](rdma, connection.id, …)

Without a Gpu, tasks transfer the data:

        await Write(connection, array, remote)
"""

from .connection import ConnectionState, RdmaConnection
from .rdma import Rdma
from .receive import Receive, ReceiveOpcode
from .sync_event import SyncEvent, SyncEventGet, SyncEventSet
from .tasks import CompareSwap, FetchAdd, Read, Send, Write

__all__ = [
    "CompareSwap", "ConnectionState", "FetchAdd", "Rdma", "RdmaConnection", "Read", "Receive", "ReceiveOpcode", "Send",
    "SyncEvent", "SyncEventGet", "SyncEventSet", "Write",
]
