"""A device for the tests of verbs: it assigns numbers, keeps every mailbox, and refuses what the test wants.

It reads mailboxes by literal byte offsets, so that it agrees with the specification and not with our tables.
"""

from collections import defaultdict
from collections.abc import Iterable

from gpunetio.enums import Access, GidType, LinkLayer, PortState, UarAllocationType
from gpunetio.errors import DriverError, NotFoundError, NotSupportedError
from gpunetio.formats.events import EventType
from gpunetio.memory import HostMemory
from gpunetio.providers.plain_verbs import Route
from gpunetio.providers.provider import ClockInfo, DeviceAttr, Event, MrKeys, NewAh, PortAttr, UarPage

QPC_AT, QPC_BYTES = 0x18, 232  # in CREATE_QP, in every transition and in QUERY_QP's output
RST, INIT, RTR, RTS, ERR = 0, 1, 2, 3, 6  # qpc.state
MOVES = {0x502: (RST, INIT), 0x50E: (INIT, INIT), 0x503: (INIT, RTR), 0x504: (RTR, RTS), 0x505: (RTS, RTS)}
CREATE_CQ, CREATE_QP, CREATE_RMP, TO_ERR, TO_RST, QUERY_QP = 0x400, 0x500, 0x90C, 0x507, 0x50A, 0x50B
QUERY_HCA_CAP, QUERY_ROCE_ADDRESS = 0x100, 0x760
GID = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1])
MAC = bytes.fromhex("0a1b2c3d4e5f")


def be(data: bytes, at: int, count: int) -> int:
    return int.from_bytes(data[at : at + count], "big")


class FakeProvider:
    """Settings are attributes. `mailboxes` has what was sent, `live` what exists, by kind.

    Doorbell pages are memory that kernels can ring: `pages`, by number.
    """

    name = "fake0"
    software = has_dpa = reaches_gpu_memory = False
    carries_mailboxes = True
    plain = None

    def __init__(self, ethernet: bool = True):
        self.ethernet = ethernet
        self.roce_version = 2
        self.no_dbr_ext = self.cqe_inline = self.uc = self.memcpy = False
        self.rts2rts_dscp = True
        self.active_mtu = 4096
        self.udp_sports = (0xC000, 0xFFFF)
        self.refused: set[str | int] = set()  # call names, and opcodes
        self.mailboxes: list[bytes] = []
        self.live: dict[str, list] = defaultdict(list)
        self.gone: list[str] = []  # in the order of their end
        self.qpcs: dict[int, bytearray] = {}
        self.blank: dict[int, bytes] = {}
        self.mac_queries: list[tuple[int, int, bytes]] = []
        self.mrs: list[tuple] = []
        self.events: list[Event] = []
        self.pages: dict[int, HostMemory] = {}
        self._next = 0x10

    def sent(self, opcode: int) -> list[bytes]:
        return [mailbox for mailbox in self.mailboxes if be(mailbox, 0, 2) == opcode]

    def left(self) -> list[str]:
        """What exists, but for the event channel that an open context has."""
        spared = {"channel": "device" not in self.gone}
        return [kind for kind, numbers in self.live.items() if len(numbers) > spared.get(kind, 0)]

    def set_state(self, handle: int, state: int) -> None:
        self.qpcs[handle][0] = state << 4 | self.qpcs[handle][0] & 0xF

    def _check(self, what: str | int) -> None:
        if what in self.refused:
            raise DriverError(f"refused {what}", 3, 0xABCD)

    def _new(self, kind: str) -> int:
        self._next += 1
        self.live[kind].append(self._next)
        return self._next

    def _end(self, kind: str, number: int) -> None:
        self.live[kind].remove(number)
        self.gone.append(kind)

    def query_device(self) -> DeviceAttr:
        return DeviceAttr(
            fw_ver="1.0", node_guid=1, sys_image_guid=1, vendor_id=0x2C9, vendor_part_id=4129, hw_ver=0,
            board_id="FAKE", phys_port_cnt=1, max_mr_size=1 << 40, max_qp=1024, max_qp_wr=32768, max_sge=30,
            max_cq=1024, max_cqe=1 << 22, max_mr=1024, max_pd=1024, max_ah=1024, max_srq=1024, max_srq_wr=32767,
            max_srq_sge=31, max_pkeys=128, max_qp_rd_atom=16, max_qp_init_rd_atom=16,
        )

    def query_port(self, port: int) -> PortAttr:
        layer = LinkLayer.ETHERNET if self.ethernet else LinkLayer.INFINIBAND
        return PortAttr(PortState.ACTIVE, 4096, self.active_mtu, 0, 0 if self.ethernet else 7, 0, layer, 255)

    def query_gid(self, port: int, index: int) -> bytes:
        return GID if index == 0 else bytes(16)

    def gid_type(self, port: int, index: int) -> GidType:
        return GidType.ROCE_V2

    def alloc_pd(self) -> int:
        self._check("alloc_pd")
        return self._new("pd")

    def dealloc_pd(self, pdn: int) -> None:
        self._end("pd", pdn)

    def reg_mr(self, pdn: int, address: int, nbytes: int, iova: int, access: Access, cuda: bool) -> MrKeys:
        self._check("reg_mr")
        self.mrs.append((pdn, address, nbytes, iova, access, cuda))
        handle = self._new("mr")
        return MrKeys(handle, handle << 8, handle << 8 | 1)

    def reg_dmabuf_mr(self, pdn: int, fd: int, offset: int, nbytes: int, iova: int, access: Access) -> MrKeys:
        raise NotSupportedError("no dmabuf here")

    def reg_dmabuf_umem(self, fd: int, offset: int, nbytes: int, access: Access) -> int:
        raise NotSupportedError("no dmabuf here")

    def rereg_mr(
        self, handle: int, pdn: int | None, place: tuple[int, int, bool] | None, access: Access | None
    ) -> MrKeys:
        self._check("rereg_mr")
        self.mrs.append((handle, pdn, place, access))
        return MrKeys(handle, handle << 8 | 2, handle << 8 | 3)

    def query_clock(self) -> ClockInfo:
        return ClockInfo(1_000, 0, 0, 1, 0, (1 << 64) - 1)

    def raw_clock(self) -> int:
        return 0

    def dereg_mr(self, handle: int) -> None:
        self._end("mr", handle)

    def reg_umem(self, address: int, nbytes: int, access: Access) -> int:
        self._check("reg_umem")
        return self._new("umem")

    def dereg_umem(self, umem_id: int) -> None:
        self._end("umem", umem_id)

    def alloc_uar(self, kind: UarAllocationType) -> UarPage:
        self._check(f"alloc_uar {kind.name}")
        page = self._new("uar")
        memory = self.pages[page] = HostMemory(4096)
        return UarPage(page, memory.address, memory.address + 0x800)

    def free_uar(self, page: UarPage) -> None:
        self._end("uar", page.page_id)
        self.pages.pop(page.page_id).close()

    def query_eqn(self, vector: int) -> int:
        assert vector == 0
        return 5

    def resolve_mac(self, port: int, sgid_index: int, dgid: bytes) -> bytes:
        if "resolve_mac" in self.refused:
            raise NotFoundError("nobody answers")
        self.mac_queries.append((port, sgid_index, dgid))
        return MAC

    def seek_mac(self, port: int, dgid: bytes) -> bool:
        return True

    def create_ah(self, pdn: int, port: int, route: Route) -> NewAh:
        raise NotSupportedError("this device has no datagrams")

    def destroy_ah(self, handle: int) -> None: ...

    def devx_obj_create(self, mailbox: bytes, out_size: int) -> tuple[int, bytes]:
        opcode = be(mailbox, 0, 2)
        self._check(opcode)
        self.mailboxes.append(mailbox)
        handle = self._new({CREATE_CQ: "cq", CREATE_QP: "qp", CREATE_RMP: "srq"}[opcode])
        if opcode == CREATE_QP:
            self.blank[handle] = mailbox[QPC_AT : QPC_AT + QPC_BYTES]
            self.qpcs[handle] = bytearray(self.blank[handle])
        out = bytearray(out_size)
        out[9:12] = handle.to_bytes(3, "big")
        return handle, bytes(out)

    def devx_obj_modify(self, handle: int, mailbox: bytes, out_size: int) -> bytes:
        opcode = be(mailbox, 0, 2)
        self._check(opcode)
        assert be(mailbox, 9, 3) == handle
        if opcode == TO_RST:
            self.qpcs[handle] = bytearray(self.blank[handle])
        elif opcode == TO_ERR:
            self.set_state(handle, ERR)
        else:
            before, after = MOVES[opcode]
            if self.qpcs[handle][0] >> 4 != before:
                raise DriverError("bad state", 0x10, 0)
            for at, byte in enumerate(mailbox[QPC_AT : QPC_AT + QPC_BYTES]):
                old = self.qpcs[handle][at]
                self.qpcs[handle][at] = old | byte if at == 0x91 else byte or old  # 0x91: log_rra_max, atomic_mode
            self.set_state(handle, after)
        self.mailboxes.append(mailbox)
        return bytes(out_size)

    def devx_obj_query(self, handle: int, mailbox: bytes, out_size: int) -> bytes:
        assert be(mailbox, 0, 2) == QUERY_QP
        assert be(mailbox, 9, 3) == handle
        self._check(QUERY_QP)
        return (bytes(QPC_AT) + self.qpcs[handle]).ljust(out_size, b"\0")

    def devx_objects(self) -> list[int]:
        return [*self.live["cq"], *self.live["srq"], *self.live["qp"]]

    def devx_obj_destroy(self, handle: int) -> None:
        self._end(next(kind for kind in ("qp", "cq", "srq") if handle in self.live[kind]), handle)

    def general_cmd(self, mailbox: bytes, out_size: int) -> bytes:
        opcode, op_mod = be(mailbox, 0, 2), be(mailbox, 6, 2)
        self._check(opcode)
        self.mailboxes.append(mailbox)
        out = bytearray(out_size)
        if opcode == QUERY_ROCE_ADDRESS:
            out[0x10 + 0x1B] = self.roce_version
        elif op_mod == 0x01:
            out[0x10 + 0x04] = 0x80  # hca_cap_2
            out[0x10 + 0x0D] = 21  # log_dma_mmo_max_size
            out[0x10 + 0x11] = 15  # log_max_qp_sz
            out[0x10 + 0x19] = 22  # log_max_cq_sz
            out[0x10 + 0x24] = self.memcpy << 5  # qpc_extension
            out[0x10 + 0xE9] = self.memcpy << 7  # dma_mmo_qp
            out[0x10 + 0x2A] = 1 << 6  # rts2rts_qp_udp_sport
            out[0x10 + 0x2D] = self.rts2rts_dscp << 5
            out[0x10 + 0x2E : 0x10 + 0x30] = (2).to_bytes(2, "big")  # gid_table_size, as code
            out[0x10 + 0x36] = self.ethernet  # port_type
            out[0x10 + 0x42] = self.cqe_inline << 2  # sctr_data_cqe
            out[0x10 + 0x47] = self.uc << 1 | 1  # uc, rc
            out[0x10 + 0x52 : 0x10 + 0x54] = (1024).to_bytes(2, "big")  # max_wqe_sz_sq
            out[0x10 + 0x56 : 0x10 + 0x58] = (512).to_bytes(2, "big")  # max_wqe_sz_rq
        elif op_mod == 0x09:
            out[0x10 + 0x13] = 5  # roce_version
            out[0x10 + 0x18 : 0x10 + 0x1A] = self.udp_sports[1].to_bytes(2, "big")
            out[0x10 + 0x1A : 0x10 + 0x1C] = self.udp_sports[0].to_bytes(2, "big")
            out[0x10 + 0x1E : 0x10 + 0x20] = (255).to_bytes(2, "big")  # roce_address_table_size
        else:
            assert op_mod == 0x41
            out[0x10 + 0x5C] = self.no_dbr_ext << 6
        return bytes(out)

    def attach_flow_table(self, table: int) -> int:
        self._check("attach_flow_table")
        return self._new("flow rule")

    def detach_flow_table(self, handle: int) -> None:
        self._end("flow rule", handle)

    def open_kernel_path(self) -> tuple[int, int]:
        self._check("open_kernel_path")
        return self._new("kernel path"), 1

    def close_kernel_path(self, handle: int) -> None:
        self._end("kernel path", handle)

    def create_event_channel(self) -> int:
        self._check("create_event_channel")
        return self._new("channel")

    def event_fd(self, channel: int) -> int:
        assert channel in self.live["channel"]
        return 0

    def subscribe(self, channel: int, handle: int | None, types: Iterable[EventType], cookie: int) -> None:
        self._check("subscribe")
        assert channel in self.live["channel"]

    def get_event(self, channel: int) -> Event | None:
        return self.events.pop(0) if self.events else None

    def destroy_event_channel(self, channel: int) -> None:
        self._end("channel", channel)

    def near_register(self, register: int, engine: str) -> int | None:
        return None

    def doorbell_register(self, uar: UarPage, qpn: int) -> int:
        self._check("doorbell_register")
        return uar.reg_addr

    def doorbell_rung(self) -> None:
        self._check("doorbell_rung")

    def wake_at(self, cqn: int, word: int) -> bool:
        return False

    def explain(self, qpn: int, vendor_syndrome: int | None) -> str | None:
        return None

    def close(self) -> None:
        self.gone.append("device")
