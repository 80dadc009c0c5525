"""The context of the RDMA library (`doca_rdma`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from ..arguments import flags, number, within
from ..core import ContextState, CoreContext
from ..enums import Access, LinkLayer
from ..errors import BadStateError, DocaError, FullError, InvalidValueError, NotSupportedError
from ..gpu import Gpu
from ..interrupts import deferred
from ..verbs import PD
from .by_address import ByAddress, Callbacks
from .connection import RdmaConnection
from .cpu_datapath import CpuDataPath
from .datapath import DataPath, Sizes
from .gpu_datapath import GpuDataPath

_MOST_CONNECTIONS = 1 << 16
_MOST_SENDS = 1 << 15  # kernels find a slot with a 16-bit index
_LONGEST_TIMEOUT = 1e9  # seconds


class Rdma(CoreContext):
    """Connections to peers (`doca_rdma_create`), driven by kernels if there is a Gpu, and otherwise by tasks.

    `permissions`       what peers may do with memory whose key they have (`doca_rdma_set_permissions`)
    `port`, `gid_index` the port and GID of this end (`…_set_gid_index`)
    `send_queue_size`   requests in flight per connection; for kernels, rounded up to a power of two, at most 32768
    `recv_queue_size`   receives of all connections together, posted for any of them; 0 for none
    `max_connections`   how many connections may exist at a time (`…_set_max_num_connections`)
    `grh`               packets have a global route; always so on Ethernet (`…_set_grh_enabled`)
    `transport`         "RC" (`…_set_transport_type`); DC is not supported
    `gpu`               a Gpu whose kernels drive the connections (`doca_ctx_set_datapath_on_gpu`)
    `timeout`           seconds after which a wait in a kernel ends with ETIMEDOUT

    Pass the `Rdma` or its `device_address` to a kernel. It creates connections while it is running, and closes them
    when it stops.
    """

    _has_gpu_datapath = True
    permissions: Access
    port: int
    gid_index: int
    grh: bool

    def __init__(
        self,
        pd: PD,
        *,
        permissions: Access = Access.LOCAL_WRITE,
        port: int = 1,
        gid_index: int = 0,
        send_queue_size: int = 128,
        recv_queue_size: int = 128,
        max_connections: int = 1,
        grh: bool = True,
        transport: str = "RC",
        gpu: Gpu | None = None,
        timeout: float = 30.0,
    ):
        super().__init__(pd, gpu)
        device = self.ctx.query_device()
        if transport != "RC":
            what = "connections of the type DC need a card's firmware" if transport == "DC" else "there is RC"
            raise NotSupportedError(f"transport {transport!r}: {what}; use transport='RC'")
        if not grh and device.link_layer == LinkLayer.ETHERNET:
            raise InvalidValueError("grh=False: packets on Ethernet always have a global route; leave it out")
        if not 0 < number("timeout", timeout) < _LONGEST_TIMEOUT:
            raise InvalidValueError(f"timeout = {timeout} s: a wait lasts more than 0 s and ends one day")
        self.permissions = flags("permissions", permissions, Access)
        self.port = within("port", port, 1, device.phys_port_cnt)
        self.gid_index = within("gid_index", gid_index, 0, device.gid_table_size - 1)
        self.grh = bool(grh)
        most = min(device.max_qp_wr, _MOST_SENDS)
        self._sizes = Sizes(
            within("send_queue_size", send_queue_size, 1, most),
            within("recv_queue_size", recv_queue_size, 0, most),
            within("max_connections", max_connections, 1, _MOST_CONNECTIONS),
        )
        self._timeout = timeout
        self._path: DataPath | None = None
        self._callbacks = Callbacks()
        self._by_address = ByAddress(self, self._callbacks, self._call)
        self._connections: dict[int, RdmaConnection] = {}
        self._created(f"RDMA on {self.ctx.name}")

    def _start(self, undo: ExitStack) -> None:
        if self.gpu is not None:
            self._path = GpuDataPath(self.gpu, self.pd, self._sizes, self._timeout, undo)
        else:
            self._path = CpuDataPath(self.pd, self._sizes, self._finish, self._who_left, undo)
        undo.callback(self._close_connections)
        self._by_address = ByAddress(self, self._callbacks, self._call)
        undo.callback(self._by_address.close)

    def _poll(self) -> None:
        if self._path is not None:
            self._path.poll()
        self._by_address.poll()

    def _flush(self) -> None:
        if self._path is not None:
            self._path.flush()

    def _who_left(self, qpn: int) -> str | None:
        """Return which end has disconnected the connection with this QPN, as text, or None."""
        return next((each.who_left for each in self.connections if each.qp.qpn == qpn), None)

    def _close_connections(self) -> None:
        with ExitStack() as steps:
            for connection in self.connections:
                steps.callback(connection.close_with_owner)
        self._path = None

    # --- connections -------------------------------------------------------------------------------------------------

    @property
    def datapath(self) -> DataPath:
        """Return the data path, which creates queue pairs. BadStateError unless the context is running."""
        self.check_open()
        if self._path is None or self.state is not ContextState.RUNNING:
            raise BadStateError(f"{self} is {self.state.name}: start() it first")
        return self._path

    @property
    def connections(self) -> tuple[RdmaConnection, ...]:
        """Return the connections that are not closed."""
        return tuple(self._connections.values())

    @deferred()
    def export(self) -> tuple[bytes, RdmaConnection]:
        """Create a connection, and return its description for a peer and the connection (`doca_rdma_export`).

        Send the bytes to the peer by any means, and pass the peer's bytes to `RdmaConnection.connect`. FullError if
        `max_connections` connections exist already.
        """
        connection = self.new_connection()
        with ExitStack() as undo:
            undo.callback(connection.close_with_owner)
            description = connection.describe()
            undo.pop_all()
        return description, connection

    def new_connection(self) -> RdmaConnection:
        """Create a connection that is not connected yet."""
        path, most = self.datapath, self._sizes.connections
        number = next((number for number in range(most) if number not in self._connections), None)
        if number is None:
            raise FullError(f"{self} has {most} connections: close() one, or create it with a larger max_connections")
        channel = path.channel(number)
        with ExitStack() as undo:
            undo.callback(channel.close)
            channel.qp.to_init(port=self.port, remote_access=self.permissions)
            connection = self._connections[number] = RdmaConnection(self, number, channel)
            undo.pop_all()
        return connection

    def forget(self, connection: RdmaConnection) -> None:
        """Forget a connection that is closed."""
        self._connections.pop(connection.id, None)

    # --- by address --------------------------------------------------------------------------------------------------

    def set_connection_callbacks(
        self,
        *,
        request: Callable[[RdmaConnection], object] | None = None,
        established: Callable[[RdmaConnection], object] | None = None,
        failure: Callable[[RdmaConnection, DocaError], object] | None = None,
        disconnect: Callable[[RdmaConnection], object] | None = None,
    ) -> None:
        """Set the callbacks for connections by address (`…_set_connection_state_callbacks`). Progress calls them.

        `request` is called with a connection to accept or reject; without it, use `next_request`. `failure` is also
        given the error: ConnectionRejectedError, TimedOutError if the peer does not answer, or ConnectionEndedError for
        a request that is no longer waiting; its connection is then closed.
        """
        self.check_idle("callbacks of connections")
        self._callbacks = Callbacks(request, established, failure, disconnect)

    def listen(self, port: int) -> None:
        """Listen for connection requests at a port of this end's address (`doca_rdma_start_listen_to_port`).

        InUseError if another listener of this NIC has the port. Requests beyond `max_connections` are refused.
        """
        _ = self.datapath
        self._by_address.listen(port)

    def stop_listening(self, port: int) -> None:
        """Refuse the waiting requests, and stop listening (`doca_rdma_stop_listen_to_port`). Connections stay open."""
        self._by_address.stop_listening(port)

    def connect_to(self, address: str, port: int, private_data: bytes = b"") -> RdmaConnection:
        """Start connecting to a peer, and return without waiting (`doca_rdma_connect_to_addr`).

        `address` is an IPv4 or IPv6 address, or a GID. `private_data` is at most 56 bytes. Afterwards the callback
        `established` or `failure` is called; or wait with `RdmaConnection.established`. NotFoundError if there is no
        route to the address.
        """
        return self._by_address.connect(address, port, private_data)

    def next_request(self, timeout: float = 30.0) -> RdmaConnection:
        """Make progress until a peer requests a connection, and return that connection, to accept or reject it.

        Requests of peers that have given up are skipped. TimedOutError if there is no request within `timeout` seconds.
        """
        found: list[RdmaConnection] = []
        self.engine.progress_until(lambda: self._has_request(found), timeout, f"a request {self._by_address.where}")
        return found[0]

    async def next_request_async(self) -> RdmaConnection:
        """Wait as `next_request` does, in asyncio's event loop. Set a deadline with `asyncio.timeout`."""
        found: list[RdmaConnection] = []
        await self.engine.progress_until_async(lambda: self._has_request(found))
        return found[0]

    def _has_request(self, found: list[RdmaConnection]) -> bool:
        _ = self.datapath
        request = self._by_address.take_request()
        if request is not None:
            found.append(request)
        return request is not None

    # --- kernels -----------------------------------------------------------------------------------------------------

    @property
    def device_address(self) -> int:
        """Return the `struct doca_gpu_dev_rdma *` that kernels take (`doca_rdma_get_gpu_handle`).

        BadStateError if CPU tasks drive the `Rdma`, or unless it is running.
        """
        path = self.datapath
        if not isinstance(path, GpuDataPath):
            raise BadStateError(f"tasks of the CPU drive {self}: create it with gpu=, for kernels")
        return path.device_address

    def check_no_kernel(self, what: str) -> None:
        """Raise BadStateError while a kernel uses the connections."""
        self._launches.check_none(what)
