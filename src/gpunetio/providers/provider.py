"""The interface between gpunetio and a device: what libibverbs and libmlx5 offer, and nothing else.

A provider has typed calls for device, port, PD, MR, UMEM, UAR, EQN, address resolution and events. For CQs, QPs,
queries and transitions it passes mailboxes on, as DEVX does. `verbs` accesses a device only through this interface.

Numbers are ints, and errors are `DocaError`s: a refused command is a `DriverError` with `status` and `syndrome`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ..enums import Access, GidType, LinkLayer, PortState, UarAllocationType
from ..formats.events import EventType
from .plain_verbs import PlainVerbs, Route


@dataclass(frozen=True)
class DeviceInfo:
    """A device that can be opened (`ibv_get_device_list`)."""

    name: str
    provider: str
    description: str


@dataclass(frozen=True)
class DeviceAttr:
    """Identity and limits of a device (`ibv_query_device`)."""

    fw_ver: str
    node_guid: int
    sys_image_guid: int
    vendor_id: int
    vendor_part_id: int
    hw_ver: int
    board_id: str
    phys_port_cnt: int
    max_mr_size: int
    max_qp: int
    max_qp_wr: int
    max_sge: int
    max_cq: int
    max_cqe: int
    max_mr: int
    max_pd: int
    max_ah: int
    max_srq: int
    max_srq_wr: int
    max_srq_sge: int
    max_pkeys: int
    max_qp_rd_atom: int
    max_qp_init_rd_atom: int
    num_comp_vectors: int = 1
    can_resize_srq: bool = False  # IBV_DEVICE_SRQ_RESIZE


@dataclass(frozen=True)
class NewAh:
    """The result of `ibv_create_ah`: the handle for `destroy_ah`, and the address vector for WQEs (formats.wqe.AV_SEG).

    The vector is empty if only libibverbs builds WQEs. The poster fills in the Q_Key and the destination's QPN.
    """

    handle: int
    av: bytes


LANES = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}  # by ibv_port_attr.active_width
LANE_GBPS = {1: 2.5, 2: 5, 4: 10, 8: 10, 16: 14, 32: 25, 64: 50, 128: 100, 256: 200}  # by active_speed


@dataclass(frozen=True)
class PortAttr:
    """`ibv_query_port`. MTUs are in bytes; `active_width` and `active_speed` are libibverbs' codes, 0 if unknown."""

    state: PortState
    max_mtu: int
    active_mtu: int
    sm_lid: int
    lid: int
    lmc: int
    link_layer: LinkLayer
    gid_tbl_len: int
    active_width: int = 0
    active_speed: int = 0

    @property
    def gbps(self) -> float:
        """The link's speed in Gbit/s, from width and speed; 0 if unknown."""
        return LANES.get(self.active_width, 0) * LANE_GBPS.get(self.active_speed, 0)


@dataclass(frozen=True)
class ClockInfo:
    """The relation between the device's clock, which timestamps use, and the time of day (`mlx5dv_clock_info`).

    The clock had the value `last_cycles` at `nsec` ns after 1970. A cycle takes `mult` / 2^`shift` ns, and `frac` is
    the fraction rounded off. `mask` has the valid bits of the clock.
    """

    nsec: int
    last_cycles: int
    frac: int
    mult: int
    shift: int
    mask: int

    def ns(self, timestamp: int) -> int:
        """Convert a timestamp to nanoseconds since 1970 (`mlx5dv_ts_to_ns`).

        The timestamp may be older or newer than this ClockInfo, by less than half the clock's range.
        """
        later = (timestamp - self.last_cycles) & self.mask
        if later <= self.mask >> 1:
            return self.nsec + (later * self.mult + self.frac >> self.shift)
        earlier = (self.last_cycles - timestamp) & self.mask
        return self.nsec - (earlier * self.mult - self.frac >> self.shift)


@dataclass(frozen=True)
class MrKeys:
    """The result of `ibv_reg_mr`: the handle for `dereg_mr`, and the keys."""

    handle: int
    lkey: int
    rkey: int


@dataclass(frozen=True)
class UarPage:
    """The result of `mlx5dv_devx_alloc_uar`: page id, and addresses of the mapped page and its doorbell register."""

    page_id: int
    base_addr: int
    reg_addr: int


@dataclass(frozen=True)
class Event:
    """An event (`mlx5dv_devx_get_event`): the `cookie` of the subscription, and the event's type.

    `number` is the object's number, or for PORT_CHANGE, port << 8 | PortSubtype. `eqe` is the 64-byte event queue entry
    (formats/events.py), if the device has one.
    """

    cookie: int
    type: EventType
    number: int
    eqe: bytes = b""


class Provider(Protocol):
    """One opened device.

    `software`            it is a thread of this process, and can reach only InfiniBand ports of this host
    `has_dpa`             its data path accelerator runs kernels (`doca_dpa_cap_is_supported`)
    `carries_mailboxes`   mailboxes of programs reach it unchanged
    `reaches_gpu_memory`  it can access GPU memory itself, so queues may lie there
    """

    name: str
    software: bool
    has_dpa: bool
    carries_mailboxes: bool
    reaches_gpu_memory: bool

    @property
    def plain(self) -> PlainVerbs | None:
        """Return libibverbs' own objects, for a device without mailboxes, UMEMs and UARs; otherwise None."""
        ...

    def query_device(self) -> DeviceAttr: ...

    def query_port(self, port: int) -> PortAttr: ...

    def query_gid(self, port: int, index: int) -> bytes:
        """Return a GID as 16 raw bytes, all zero for an empty entry (`ibv_query_gid`)."""
        ...

    def gid_type(self, port: int, index: int) -> GidType:
        """Return the type of packets sent from this GID (`ibv_query_gid_ex`)."""
        ...

    def alloc_pd(self) -> int:
        """Allocate a protection domain and return its number (`ibv_alloc_pd`)."""
        ...

    def dealloc_pd(self, pdn: int) -> None: ...

    def reg_mr(self, pdn: int, address: int, nbytes: int, iova: int, access: Access, cuda: bool) -> MrKeys:
        """Register [address, address + nbytes) at the addresses [iova, iova + nbytes) (`ibv_reg_mr_iova2`).

        `cuda` says that CUDA reported the range, so it may be GPU memory. NotSupportedError if the device cannot reach
        it.
        """
        ...

    def rereg_mr(
        self, handle: int, pdn: int | None, place: tuple[int, int, bool] | None, access: Access | None
    ) -> MrKeys:
        """Change a region's PD, memory (address, length and whether CUDA reported it) or rights (`ibv_rereg_mr`).

        None keeps a value. The region's iova must equal its address.
        """
        ...

    def dereg_mr(self, handle: int) -> None: ...

    def reg_dmabuf_mr(self, pdn: int, fd: int, offset: int, nbytes: int, iova: int, access: Access) -> MrKeys:
        """Register a range of a dmabuf (`ibv_reg_dmabuf_mr`). The caller keeps the descriptor."""
        ...

    def reg_umem(self, address: int, nbytes: int, access: Access) -> int:
        """Register a UMEM and return its id (`mlx5dv_devx_umem_reg_ex`)."""
        ...

    def reg_dmabuf_umem(self, fd: int, offset: int, nbytes: int, access: Access) -> int:
        """Register a range of a dmabuf as a UMEM (`mlx5dv_devx_umem_reg_ex` with MLX5DV_UMEM_MASK_DMABUF)."""
        ...

    def dereg_umem(self, umem_id: int) -> None: ...

    def alloc_uar(self, kind: UarAllocationType) -> UarPage: ...

    def free_uar(self, page: UarPage) -> None: ...

    def query_eqn(self, vector: int) -> int: ...

    def resolve_mac(self, port: int, sgid_index: int, dgid: bytes) -> bytes:
        """Return the 6-byte MAC of a RoCE GID (`ibv_create_ah` and mlx5dv's AH). NotFoundError without an answer."""
        ...

    def seek_mac(self, port: int, dgid: bytes) -> bool:
        """Return whether the MAC of a RoCE GID is known. If not, ask the neighbour, without waiting for the answer.

        If the kernel resolves addresses, always return True.
        """
        ...

    def create_ah(self, pdn: int, port: int, route: Route) -> NewAh:
        """Create an address handle (`ibv_create_ah`). NotFoundError if the address does not answer."""
        ...

    def destroy_ah(self, handle: int) -> None: ...

    def query_clock(self) -> ClockInfo:
        """Return the data that converts timestamps to the time of day (`mlx5dv_get_clock_info`)."""
        ...

    def raw_clock(self) -> int:
        """Return the current value of the device's clock, in the cycles of timestamps (`ibv_query_rt_values_ex`)."""
        ...

    def devx_obj_create(self, mailbox: bytes, out_size: int) -> tuple[int, bytes]:
        """Create an object. Return its handle and the output mailbox."""
        ...

    def devx_objects(self) -> list[int]:
        """Return the handles of all existing objects created with mailboxes, oldest first."""
        ...

    def devx_obj_modify(self, handle: int, mailbox: bytes, out_size: int) -> bytes: ...

    def devx_obj_query(self, handle: int, mailbox: bytes, out_size: int) -> bytes: ...

    def devx_obj_destroy(self, handle: int) -> None: ...

    def general_cmd(self, mailbox: bytes, out_size: int) -> bytes: ...

    def attach_flow_table(self, table: int) -> int:
        """Send all packets that the port receives through this flow table, a DEVX object, first. Return a handle.

        On a card, a rule of the kernel (`mlx5dv_create_flow`) leads to the table. InUseError if the device has only one
        root table and it is taken.
        """
        ...

    def detach_flow_table(self, handle: int) -> None: ...

    def open_kernel_path(self) -> tuple[int, int]:
        """Return a handle, and the number of a flow table whose packets go where they would go without flow tables.

        On a card, this is a steering anchor (`mlx5dv_create_steering_anchor`).
        """
        ...

    def close_kernel_path(self, handle: int) -> None: ...

    def create_event_channel(self) -> int:
        """Create an event channel and return its handle (`mlx5dv_devx_create_event_channel`)."""
        ...

    def event_fd(self, channel: int) -> int:
        """Return a descriptor that is readable while events wait. The channel owns it."""
        ...

    def subscribe(self, channel: int, handle: int | None, types: Iterable[EventType], cookie: int) -> None:
        """Subscribe the channel to events of a DEVX object (`mlx5dv_devx_subscribe_devx_event`).

        Without an object, subscribe to events of the port and the device. A subscription ends with its object or
        channel.
        """
        ...

    def get_event(self, channel: int) -> Event | None:
        """Return the oldest waiting event, or None (`mlx5dv_devx_get_event`). FullError once events were lost."""
        ...

    def destroy_event_channel(self, channel: int) -> None:
        """Destroy a channel and its subscriptions (`mlx5dv_devx_destroy_event_channel`)."""
        ...

    def doorbell_register(self, uar: UarPage, qpn: int) -> int:
        """Return the address of the doorbell register for `qpn`; on a card, it is the UAR's.

        A kernel rings it with 8 bytes, or writes a WQE to it (BlueFlame). The register has 64 bytes, a cache line.
        """
        ...

    def near_register(self, register: int, engine: str) -> int | None:
        """Return where GPU kernels ring a register that is in the GPU's own memory, or None if it must be mapped.

        `engine` is the engine name of software NICs that run on that GPU (gpu/backend.py).
        """
        ...

    def doorbell_rung(self) -> None:
        """Tell the device that a CPU has rung a doorbell. A card notices this itself."""
        ...

    def wake_at(self, cqn: int, word: int) -> bool:
        """Wake the thread that sleeps at `word` (device/waiting.py) when CQEs of a CQ are written. 0 ends this.

        Return whether the device can do this. A card cannot.
        """
        ...

    def explain(self, qpn: int, vendor_syndrome: int | None) -> str | None:
        """Describe the last refusal on a queue pair, other than a flush, or the cause of this vendor syndrome.

        Return None if it is unknown.
        """
        ...

    def close(self) -> None:
        """Release the device. Idempotent."""
        ...
