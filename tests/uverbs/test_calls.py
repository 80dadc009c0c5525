"""Calls as the kernel takes them: whatever a program passes, it gets an errno, and nothing is left half-made."""

import contextlib
import ctypes
import errno
import logging
import mmap
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import foreign_calls
from gpunetio.enums import Access, QpState
from gpunetio.errors import DocaError
from gpunetio.formats.commands import CREATE_CQ_IN
from gpunetio.formats.layout import Entry
from gpunetio.memory import HostMemory
from gpunetio.nic.engine.port import PortConfig
from gpunetio.uverbs import abi, devx
from gpunetio.uverbs.abi import DevxObject, Object, QpKind, QpMask, Rereg, Umem
from gpunetio.uverbs.call import Refused
from gpunetio.uverbs.calls import _TYPES, Calls, _guarded
from gpunetio.uverbs.files import OpenFile

ROOM = 4096
NOWHERE = (1 << 47) - 4096  # no program has this page
METHODS = [0, 1, 2, 3, 4, 5, 6, *(0x1000 + i for i in range(5))]


class Program:
    """An open device file, and the program's memory."""

    def __init__(self) -> None:
        self.calls = Calls([("soft5", PortConfig())], lambda descriptor: True)
        self.number = self.calls.open(b"uverbs0", 0)
        self.memory = ctypes.create_string_buffer(2 * ROOM)
        self.address = ctypes.addressof(self.memory) + 4095 & -4096
        uar = (abi.Uar.HANDLE, 0, 0), (abi.Uar.TYPE, 4, 0)
        answers = ((number, 8, self.address) for number in (abi.Uar.MMAP_OFFSET, abi.Uar.MMAP_LENGTH))
        assert self.control(Object.UAR, abi.UAR_ALLOC, *uar, *answers, (abi.Uar.PAGE_ID, 4, self.address)) == 0
        self.page = self.read()

    def read(self) -> int:
        """The number of 32 bits at the beginning of the program's memory."""
        return int.from_bytes(ctypes.string_at(self.address, 4), "little")

    @property
    def file(self) -> OpenFile:
        return self.calls.files[self.number]

    def control(self, obj: int, method: int, *attributes: tuple[int, int, int], driver: int = abi.DRIVER_MLX5) -> int:
        """The ioctl: what preload.c gets."""
        return _guarded(self.calls.control)(self.number, self.prepare(obj, method, *attributes, driver=driver))

    def prepare(self, obj: int, method: int, *attributes: tuple[int, int, int], driver: int = abi.DRIVER_MLX5) -> int:
        """The address of a call's header. Attributes are (id, bytes, data)."""
        whole = struct.pack("<HHHHQII", 24 + 16 * len(attributes), obj, method, len(attributes), 0, driver, 0)
        whole += b"".join(struct.pack("<HHHHQ", number, size, 1, 0, data) for number, size, data in attributes)
        self.header = ctypes.create_string_buffer(whole, len(whole))
        return ctypes.addressof(self.header)


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    opened = Program()
    yield opened
    assert opened.calls.close(opened.number) == 0


def alloc_pd(program: Program, room: int = 4) -> int:
    request = (abi.Invoke.CMD, 8, abi.Write.ALLOC_PD), (abi.Invoke.OUT, room, program.address)
    return program.control(Object.DEVICE, abi.Method.INVOKE_WRITE, *request)


def test_a_domain_is_allocated_and_freed(program):
    assert alloc_pd(program) == 0
    handle = program.read()
    assert program.file.get(Object.PD, handle).pdn > 0
    assert program.control(Object.PD, abi.DESTROY_ONLY, (abi.DESTROYED, 0, handle)) == 0
    assert program.control(Object.PD, abi.DESTROY_ONLY, (abi.DESTROYED, 0, handle)) == -errno.EINVAL


def make(program: Program, obj: Object, given: Entry, values: dict[str, int], *attributes: tuple[int, int, int]) -> int:
    """Create an object, with what libmlx5 passes about it: its handle."""
    structure = ctypes.create_string_buffer(given.pack(**values), given.size)
    room = ctypes.create_string_buffer(64)
    driver = (abi.UHW_IN, given.size, ctypes.addressof(structure)), (abi.UHW_OUT, 4, ctypes.addressof(room))
    assert program.control(obj, abi.CREATE, (0, 0, 0), *attributes, *driver) == 0
    return int.from_bytes(program.header.raw[32:40], "little")


@pytest.mark.parametrize("kind, flags, all_signalled, send, receive, cs_req, cs_res", [
    (QpKind.RC, abi.QP_SCATTER_CQE, False, 64, 128, 0, 2),
    (QpKind.RC, abi.QP_SCATTER_CQE, True, 64, 128, 0x11, 2),
    (QpKind.RC, abi.QP_SCATTER_CQE | abi.QP_ALLOW_SCATTER_CQE, False, 128, 64, 0x22, 1),
    (QpKind.RC, abi.QP_ALLOW_SCATTER_CQE, True, 128, 128, 0, 0),
    (QpKind.UC, abi.QP_SCATTER_CQE | abi.QP_ALLOW_SCATTER_CQE, True, 128, 64, 0, 1),
    (QpKind.UD, abi.QP_SCATTER_CQE | abi.QP_ALLOW_SCATTER_CQE, True, 128, 128, 0, 0),
])
def test_payload_in_completions(program, kind, flags, all_signalled, send, receive, cs_req, cs_res):
    """As mlx5_ib asks for it. Responses need all sends to have completions, or a program that says that it knows."""
    with queue_pair(program, kind, flags, all_signalled, (send, receive)) as handle:
        row = program.file.provider.nic.qps[program.file.get(Object.QP, handle).qpn]
        assert (row["cs_req"], row["cs_res"]) == (cs_req, cs_res)


@contextlib.contextmanager
def queue_pair(
    program: Program, kind: QpKind, flags: int = 0, all_signalled: bool = False, cqe_sizes: tuple[int, int] = (64, 64)
) -> Iterator[int]:
    """Create a queue pair, as libmlx5 asks for it: its handle."""
    memory, room = HostMemory(4 * ROOM), ctypes.create_string_buffer(64)
    out = ctypes.addressof(room)
    alloc_pd(program)
    pd = program.read()
    cqs = [
        make(
            program, Object.CQ, abi.MLX5_CREATE_CQ,
            {"buf_addr": memory.address + ROOM * i, "db_addr": memory.address + 3 * ROOM + 64 * i, "cqe_size": size,
             "flags": abi.CQ_UAR_PAGE_INDEX, "uar_page_index": program.page},
            (abi.CreateCq.CQE, 4, 15), (abi.CreateCq.USER_HANDLE, 8, 7), (abi.CreateCq.COMP_VECTOR, 4, 0),
            (abi.CreateCq.RESP_CQE, 4, out),
        )
        for i, size in enumerate(cqe_sizes)
    ]
    cap = ctypes.create_string_buffer(abi.QP_CAP.pack(max_send_wr=4, max_recv_wr=4), abi.QP_CAP.size)
    qp = make(
        program, Object.QP, abi.MLX5_CREATE_QP,
        {"buf_addr": memory.address + 2 * ROOM, "db_addr": memory.address + 3 * ROOM + 128, "sq_wqe_count": 16,
         "rq_wqe_count": 4, "rq_wqe_shift": 4, "flags": flags | abi.QP_UAR_PAGE_INDEX, "bfreg_index": program.page},
        (abi.CreateQp.PD_HANDLE, 0, pd), (abi.CreateQp.SEND_CQ_HANDLE, 0, cqs[0]),
        (abi.CreateQp.RECV_CQ_HANDLE, 0, cqs[1]), (abi.CreateQp.USER_HANDLE, 8, 9),
        (abi.CreateQp.CAP, abi.QP_CAP.size, ctypes.addressof(cap)), (abi.CreateQp.TYPE, 8, kind),
        (abi.CreateQp.FLAGS, 4, all_signalled << 12), (abi.CreateQp.RESP_CAP, abi.QP_CAP.size, out),
        (abi.CreateQp.RESP_QP_NUM, 4, out),
    )
    yield qp
    for obj, method, handle in (
        (Object.QP, abi.DESTROY, qp), *((Object.CQ, abi.DESTROY, cq) for cq in cqs), (Object.PD, abi.DESTROY_ONLY, pd),
    ):
        answer = ((abi.DESTROY_RESP, 8 if obj == Object.CQ else 4, out),) if method == abi.DESTROY else ()
        assert program.control(obj, method, (abi.DESTROYED, 0, handle), *answer) == 0
    memory.close()


M = QpMask
INIT = M.STATE | M.PKEY_INDEX | M.PORT | M.ACCESS_FLAGS
RTR = M.STATE | M.AV | M.PATH_MTU | M.DEST_QPN | M.RQ_PSN | M.MAX_DEST_RD_ATOMIC | M.MIN_RNR_TIMER
RTS = M.STATE | M.SQ_PSN | M.TIMEOUT | M.RETRY_CNT | M.RNR_RETRY | M.MAX_QP_RD_ATOMIC


def test_what_linux_refuses_of_modify_qp(program):
    """Each mistake that a program makes: EINVAL, as on a card, and the queue pair stays where it is."""
    gid = bytes(program.file.ctx.query_gid())
    path = {"dgid": gid, "is_global": 1, "port_num": 1, "hop_limit": 64}

    def modify(state: int, mask: int, dest: dict[str, object] | None = None, **values: int) -> int:
        values = {"port_num": 1, "path_mtu": 3, "max_rd_atomic": 1, "max_dest_rd_atomic": 1, **values}
        packed = abi.MODIFY_QP.pack(
            qp_handle=handle, attr_mask=mask, qp_state=state, dest=abi.QP_DEST.pack(**(dest or path)), **values
        )
        given = ctypes.create_string_buffer(packed, len(packed))
        return program.control(
            Object.DEVICE, abi.Method.INVOKE_WRITE, (abi.Invoke.CMD, 8, abi.Write.MODIFY_QP),
            (abi.Invoke.IN, len(packed), ctypes.addressof(given)),
        )

    with queue_pair(program, QpKind.RC) as handle:
        qp = program.file.get(Object.QP, handle)
        assert modify(1, INIT, port_num=2) == -errno.EINVAL
        assert modify(1, INIT & ~M.PORT) == -errno.EINVAL
        assert modify(6, M.STATE) == -errno.EINVAL  # from RESET to ERR
        assert modify(1, INIT) == 0
        assert modify(2, RTR & ~M.MAX_DEST_RD_ATOMIC, dest_qp_num=qp.qpn) == -errno.EINVAL
        assert modify(2, RTR | M.SQ_PSN, dest_qp_num=qp.qpn) == -errno.EINVAL
        assert modify(2, RTR, path | {"is_global": 0}, dest_qp_num=qp.qpn) == -errno.EINVAL
        assert modify(2, RTR, path | {"port_num": 2}, dest_qp_num=qp.qpn) == -errno.EINVAL
        assert qp.state == QpState.INIT
        assert modify(2, RTR, dest_qp_num=qp.qpn) == 0
        assert modify(3, RTS & ~M.MAX_QP_RD_ATOMIC) == -errno.EINVAL
        assert modify(3, RTS | M.PATH_MIG_STATE, path_mig_state=1) == -errno.EOPNOTSUPP
        rights = int(Access.REMOTE_READ)
        assert modify(3, RTS | M.ACCESS_FLAGS | M.CUR_STATE, cur_qp_state=2, qp_access_flags=rights) == 0
        assert qp.query()[0].allow_remote_read
        assert modify(3, M.STATE | M.AV) == -errno.EINVAL
        assert modify(6, M.STATE | M.CUR_STATE, cur_qp_state=3) == -errno.EINVAL
        assert modify(9, M.STATE) == -errno.EINVAL
    with queue_pair(program, QpKind.UC) as handle:
        assert modify(1, INIT) == 0
        assert modify(2, RTR) == -errno.EINVAL
        assert modify(2, RTR & ~M.MAX_DEST_RD_ATOMIC & ~M.MIN_RNR_TIMER) == 0
        assert modify(3, RTS) == -errno.EINVAL
        assert modify(3, M.STATE | M.SQ_PSN) == 0


def test_an_object_of_another_kind(program):
    alloc_pd(program)
    handle = program.read()
    assert program.control(Object.MR, abi.DESTROY_MR, (abi.DESTROYED, 0, handle)) == -errno.EINVAL
    assert program.control(Object.PD, abi.DESTROY_ONLY, (abi.DESTROYED, 0, handle)) == 0


@pytest.mark.parametrize("address", [0, NOWHERE, (1 << 64) - 4096])
def test_memory_that_the_program_does_not_have(program, address):
    port = (abi.QueryPort.PORT_NUM, 8, 1), (abi.QueryPort.RESP, 48, address)
    assert program.control(Object.DEVICE, abi.Method.QUERY_PORT, *port) == -errno.EFAULT
    assert _guarded(program.calls.control)(program.number, address) == -errno.EFAULT


def test_addresses_that_preload_passes_on(program):
    """By the types of the functions that it calls: an address of 0 is one like others."""
    calls = {name: ctypes.CFUNCTYPE(ctypes.c_long, *_TYPES[name])(_guarded(getattr(program.calls, name)))
             for name in ("control", "map", "write")}
    assert calls["control"](program.number, 0) == -errno.EFAULT
    assert calls["control"](program.number, (1 << 64) - 1) == -errno.EFAULT
    assert calls["map"](program.number, (1 << 64) - 1, (1 << 64) - 1) == -errno.EINVAL


def no_errors_of_ours(program: Program, *call: object) -> int:
    """The errno of a call that raises an error of the package."""
    with pytest.raises((Refused, DocaError)) as raised:
        program.calls.control(program.number, program.prepare(*call))  # type: ignore[arg-type]
    return getattr(raised.value, "code", 0) if isinstance(raised.value, Refused) else errno.EINVAL


@pytest.mark.parametrize("giant", [1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) + 1, (1 << 64) - 1])
def test_giant_counts(program, giant):
    """Linux refuses them before it allocates anything for them."""
    table = (abi.GidTable.ENTRY_SIZE, 8, giant), (abi.GidTable.RESP_ENTRIES, 0xFFFF, program.address)
    assert no_errors_of_ours(program, Object.DEVICE, abi.Method.QUERY_GID_TABLE, *table) == errno.EINVAL
    ring = abi.MLX5_CREATE_CQ.pack(cqe_size=64, flags=abi.CQ_UAR_PAGE_INDEX, uar_page_index=program.page)
    structure = ctypes.create_string_buffer(bytes(ring), len(bytes(ring)))
    cq = (abi.UHW_IN, len(ring), ctypes.addressof(structure)), (abi.CreateCq.CQE, 4, giant)
    assert no_errors_of_ours(program, Object.CQ, abi.CREATE, *cq) == errno.EINVAL
    dmabuf = (abi.Umem.DMABUF_FD, 0, giant), (abi.Umem.ADDR, 8, 0), (abi.Umem.LEN, 8, 4096), (abi.Umem.ACCESS, 4, 1)
    assert no_errors_of_ours(program, Object.DEVX_UMEM, abi.DEVX_UMEM_REG, *dmabuf) in (errno.EBADF, errno.EINVAL)


def test_a_list_of_event_types_of_odd_length(program):
    program.file.event_channels[77] = 0
    subscription = (abi.Subscribe.FD_HANDLE, 4, 77), (abi.Subscribe.TYPE_NUM_LIST, 3, 1)
    try:
        assert no_errors_of_ours(program, Object.DEVX, abi.DEVX_SUBSCRIBE_EVENT, *subscription) == errno.EINVAL
    finally:
        del program.file.event_channels[77]


@pytest.mark.slow
def test_calls_with_anything_in_them():
    assert [*foreign_calls.mistakes(5000, 1)] == []


def test_an_answer_that_cannot_be_stored(program):
    """The object is not made, as nobody could name it."""
    before = set(program.file.handles())
    request = (abi.Invoke.CMD, 8, abi.Write.ALLOC_PD), (abi.Invoke.OUT, 4, NOWHERE)
    assert program.control(Object.DEVICE, abi.Method.INVOKE_WRITE, *request) == -errno.EFAULT
    uar = (abi.Uar.TYPE, 4, 0), (abi.Uar.PAGE_ID, 4, program.address)
    assert program.control(Object.UAR, abi.UAR_ALLOC, *uar) == -errno.EINVAL
    assert set(program.file.handles()) == before
    assert set(program.file.uars) == {program.page}


READ, LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ = 0, 1, 2, 4  # enum ibv_access_flags
MW_BIND, ZERO_BASED, ON_DEMAND, HUGETLB, FLUSH, RELAXED = 1 << 4, 1 << 5, 1 << 6, 1 << 7, 1 << 8, 1 << 20


@pytest.fixture(scope="module")
def pages() -> Iterator[int]:
    """The address of four pages: ordinary, read-only, without any permission, not mapped."""
    memory = mmap.mmap(-1, 4 * ROOM)
    there = ctypes.c_char.from_buffer(memory)
    start = ctypes.addressof(there)
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(start + ROOM), ROOM, mmap.PROT_READ) == 0
    assert libc.mprotect(ctypes.c_void_p(start + 2 * ROOM), ROOM, 0) == 0
    assert libc.munmap(ctypes.c_void_p(start + 3 * ROOM), ROOM) == 0
    yield start
    del there


def reg_mr(program: Program, start: int, nbytes: int, access: int, iova: int | None = None) -> int:
    """Register memory in a domain of its own: the kernel's answer, 0 or a negative errno."""
    alloc_pd(program)
    pd = program.read()
    request = ctypes.create_string_buffer(
        abi.REG_MR.pack(start=start, length=nbytes, hca_va=start if iova is None else iova, pd_handle=pd,
                        access_flags=access),
        abi.REG_MR.size,
    )
    write = (abi.Invoke.CMD, 8, abi.Write.REG_MR), (abi.Invoke.IN, abi.REG_MR.size, ctypes.addressof(request))
    code = program.control(
        Object.DEVICE, abi.Method.INVOKE_WRITE, *write, (abi.Invoke.OUT, 12, program.address)
    )
    if code == 0:
        mr = program.read()
        assert program.control(Object.MR, abi.DESTROY_MR, (abi.DESTROYED, 0, mr)) == 0
    assert program.control(Object.PD, abi.DESTROY_ONLY, (abi.DESTROYED, 0, pd)) == 0
    return code


# Page of `pages`, how many, rights, and what Linux answers (ib_check_mr_access, ib_umem_get, ib_uverbs_reg_mr).
REGISTERED = [
    (0, 1, LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ, 0), (0, 2, REMOTE_READ, 0), (1, 1, READ, 0),
    (1, 1, LOCAL_WRITE, errno.EFAULT), (0, 2, LOCAL_WRITE, errno.EFAULT), (2, 1, READ, errno.EFAULT),
    (2, 1, LOCAL_WRITE, errno.EFAULT), (1, 2, READ, errno.EFAULT), (3, 1, READ, errno.EFAULT),
    (3, 1, LOCAL_WRITE, errno.EFAULT), (0, 4, REMOTE_READ, errno.EFAULT),
    (3, 1, REMOTE_WRITE, errno.EINVAL),  # the rights are looked at first
    (0, 1, REMOTE_WRITE, errno.EINVAL), (0, 0, READ, errno.EINVAL),
    (0, 1, LOCAL_WRITE | HUGETLB, 0), (0, 1, LOCAL_WRITE | MW_BIND, 0), (0, 1, LOCAL_WRITE | RELAXED, 0),
    (0, 1, LOCAL_WRITE | 1 << 29, 0),  # one of those that a device need not know
    (0, 1, ON_DEMAND, errno.EOPNOTSUPP), (0, 1, FLUSH, errno.EOPNOTSUPP), (0, 1, ZERO_BASED, errno.EOPNOTSUPP),
]


@pytest.mark.parametrize("page, count, access, code", REGISTERED)
def test_memory_that_a_device_can_use(program, pages, page, count, access, code):
    assert reg_mr(program, pages + page * ROOM, count * ROOM, access) == -code


def test_addresses_that_nobody_has(program):
    assert reg_mr(program, 0, 4096, READ) == -errno.EFAULT
    assert reg_mr(program, NOWHERE, 64, LOCAL_WRITE) == -errno.EFAULT
    assert reg_mr(program, (1 << 64) - 4096, 8192, READ) == -errno.EINVAL
    assert reg_mr(program, program.address, 64, READ, iova=64) == -errno.EINVAL  # another offset in the page
    assert reg_mr(program, program.address, 64, READ, iova=1 << 20) == 0


def test_a_region_that_moves_to_unusable_memory(program, pages):
    """It keeps its memory and its rights."""
    alloc_pd(program)
    with program.file.get(Object.PD, program.read()).register(pages, Access.LOCAL_READ, nbytes=ROOM) as mr:
        handle = program.file.add(Object.MR, mr)
        for flags, start, access, code in (
            (Rereg.TRANSLATION, pages + 2 * ROOM, 0, errno.EFAULT), (Rereg.TRANSLATION, 0, 0, errno.EFAULT),
            (Rereg.TRANSLATION | Rereg.ACCESS, pages + ROOM, LOCAL_WRITE, errno.EFAULT),
            (Rereg.TRANSLATION, pages + ROOM, 0, 0), (Rereg.ACCESS, 0, LOCAL_WRITE, errno.EFAULT),
        ):
            request = ctypes.create_string_buffer(
                abi.REREG_MR.pack(mr_handle=handle, flags=flags, start=start, length=ROOM, hca_va=start,
                                  access_flags=access),
                abi.REREG_MR.size,
            )
            before = mr.address, mr.access
            assert program.control(
                Object.DEVICE, abi.Method.INVOKE_WRITE, (abi.Invoke.CMD, 8, abi.Write.REREG_MR),
                (abi.Invoke.IN, abi.REREG_MR.size, ctypes.addressof(request)), (abi.Invoke.OUT, 8, program.address),
            ) == -code
            assert (mr.address, mr.access) == (before if code else (start, Access.LOCAL_READ))
        program.file.remove(Object.MR, handle)


def test_queues_in_memory_that_a_device_cannot_use(program, pages):
    umem = (
        (Umem.HANDLE, 0, 0), (Umem.ADDR, 8, pages + 2 * ROOM), (Umem.LEN, 8, ROOM), (Umem.ACCESS, 4, LOCAL_WRITE),
        (Umem.OUT_ID, 4, program.address),
    )
    assert program.control(Object.DEVX_UMEM, abi.DEVX_UMEM_REG, *umem) == -errno.EFAULT
    given = ctypes.create_string_buffer(
        abi.MLX5_CREATE_CQ.pack(buf_addr=pages + ROOM, db_addr=pages, cqe_size=64, flags=abi.CQ_UAR_PAGE_INDEX,
                                uar_page_index=program.page),
        abi.MLX5_CREATE_CQ.size,
    )
    assert program.control(
        Object.CQ, abi.CREATE, (0, 0, 0), (abi.CreateCq.CQE, 4, 15), (abi.CreateCq.USER_HANDLE, 8, 7),
        (abi.CreateCq.COMP_VECTOR, 4, 0), (abi.CreateCq.RESP_CQE, 4, program.address),
        (abi.UHW_IN, given._length_, ctypes.addressof(given)), (abi.UHW_OUT, 4, program.address),
    ) == -errno.EFAULT


def test_a_memory_key_that_is_refused_is_told(program, caplog):
    """UCX continues without it, and then writes to another address."""
    mailbox = ctypes.create_string_buffer(b"\x02\x00", 272)  # CREATE_MKEY
    assert program.control(
        Object.DEVX_OBJ, abi.DEVX_OBJ_CREATE, (DevxObject.HANDLE, 0, 0),
        (DevxObject.IN, 272, ctypes.addressof(mailbox)), (DevxObject.OUT, 16, program.address),
    ) == -errno.EREMOTEIO
    (told,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "refuses a memory key: CREATE_MKEY" in told.getMessage()
    assert "wrong address" in told.getMessage()


def test_the_record_of_a_new_queue_contains_no_request(program):
    """A first request of 0 can then be told from none, where another queue is armed in the same register at once."""
    memory = HostMemory(ROOM)
    with program.file.ctx.register_umem(memory.array) as umem:
        mailbox = CREATE_CQ_IN.pack(opcode=0x400, cq_context={"dbr_umem_id": umem.umem_id, "dbr_addr": 64})
        devx._mark_unarmed(program.file.provider, bytes(mailbox))
    assert bytes(memory.array[64:72]) == bytes(4) + b"\xff" * 4
    memory.close()


def test_calls_that_are_not_there(program):
    """Linux: ib_uverbs_cmd_verbs refuses methods with EPROTONOSUPPORT, uapi_get_method commands with EOPNOTSUPP."""
    assert program.control(Object.DEVICE, 77) == -errno.EPROTONOSUPPORT
    assert program.control(99, 0) == -errno.EPROTONOSUPPORT
    create_flow = abi.Invoke.CMD, 8, 50
    assert program.control(Object.DEVICE, abi.Method.INVOKE_WRITE, create_flow) == -errno.EOPNOTSUPP
    unknown = (abi.QueryPort.PORT_NUM, 8, 1), (abi.QueryPort.RESP, 48, program.address), (9, 8, 1)
    assert program.control(Object.DEVICE, abi.Method.QUERY_PORT, *unknown) == -errno.EPROTONOSUPPORT
    assert program.control(Object.DEVICE, abi.Method.QUERY_PORT, *unknown[:2], driver=2) == -errno.EINVAL
    assert program.control(Object.DEVICE, abi.Method.QUERY_PORT, unknown[1]) == -errno.EINVAL
    assert program.calls.open(b"uverbs1", 0) == -errno.ENODEV


def test_pages_that_are_not_there(program):
    assert _guarded(program.calls.map)(program.number, 0x5000_0000, 4096) == -errno.EINVAL


@given(
    st.sampled_from([*Object, 99]), st.sampled_from(METHODS),
    st.lists(
        st.tuples(
            st.sampled_from([*range(15), *(0x1000 + i for i in range(7))]), st.sampled_from([0, 4, 8, 16, 48, 4000]),
            st.one_of(st.sampled_from([0, 1, 2, NOWHERE]), st.integers(0, (1 << 64) - 1)),
        ),
        max_size=8,
    ),
    st.binary(max_size=200),
)
def test_anything(program, obj, method, attributes, memory):
    """Also where bytes are the program's own, with anything in them."""
    ctypes.memmove(program.address, memory, len(memory))
    mine = [(number, size, program.address if data == 2 else data) for number, size, data in attributes]
    with contextlib.suppress(Refused, DocaError):  # anything else is a mistake of ours
        program.calls.control(program.number, program.prepare(obj, method, *mine))
    assert alloc_pd(program) == 0
    handle = program.read()
    assert program.control(Object.PD, abi.DESTROY_ONLY, (abi.DESTROYED, 0, handle)) == 0


word = st.one_of(st.integers(0, 5), st.sampled_from([64, 128, 4096, 1 << 20, 1 << 31]), st.integers(0, (1 << 32) - 1))


@given(st.data())
def test_structures_with_anything_in_them(program, data):
    """Of calls that are as they should be otherwise: an object is made whole, or not at all."""
    alloc_pd(program)
    pd = program.read()
    before = set(program.file.handles())
    layout, call = data.draw(st.sampled_from([
        (abi.MLX5_CREATE_CQ, (
            Object.CQ, abi.CREATE, (0, 0, 0), (1, 4, 15), (2, 8, 7), (4, 4, 0), (6, 4, program.address),
        )),
        (abi.MLX5_CREATE_SRQ, (
            Object.SRQ, abi.CREATE, (0, 0, 0), (1, 0, pd), (4, 8, 7), (5, 4, 15), (6, 4, 1), (7, 4, 0), (9, 8, 0),
            (11, 4, program.address), (12, 4, program.address), (13, 4, program.address),
        )),
        (abi.REG_MR, (Object.DEVICE, abi.Method.INVOKE_WRITE, (abi.Invoke.CMD, 8, abi.Write.REG_MR))),
        (abi.MODIFY_QP, (Object.DEVICE, abi.Method.INVOKE_WRITE, (abi.Invoke.CMD, 8, abi.Write.MODIFY_QP))),
        (abi.CREATE_AH, (Object.DEVICE, abi.Method.INVOKE_WRITE, (abi.Invoke.CMD, 8, abi.Write.CREATE_AH))),
    ]))
    values = {name: data.draw(word) for name in layout.offsets if layout.dtype[name].kind == "u"}
    row = np.zeros((), layout.dtype)
    for name, value in values.items():
        row[name] = value & (1 << 8 * layout.dtype[name].itemsize) - 1
    for name in ("buf_addr", "db_addr", "start"):
        if name in values and data.draw(st.booleans()):
            row[name] = program.address
    if "flags" in values:
        row["flags"] = data.draw(st.sampled_from([0, abi.CQ_UAR_PAGE_INDEX, int(row["flags"])]))
    if "uar_page_index" in values and data.draw(st.booleans()):
        row["uar_page_index"], row["cqe_size"], row["cqe_comp_en"] = program.page, 64, 0
    if "pd_handle" in values and data.draw(st.booleans()):
        row["pd_handle"] = pd
    structure = ctypes.create_string_buffer(row.tobytes(), layout.size)
    write = call[0] == Object.DEVICE
    place = (abi.Invoke.IN if write else abi.UHW_IN, layout.size, ctypes.addressof(structure))
    answers = ((abi.Invoke.OUT, 12, program.address),) if write else ()
    try:
        program.calls.control(program.number, program.prepare(*call, place, *answers))
    except (Refused, DocaError):
        assert set(program.file.handles()) == before
    for handle in sorted(set(program.file.handles()) - before, reverse=True):
        program.file.remove(program.file._held[handle].kind, handle)
    assert program.control(Object.PD, abi.DESTROY_ONLY, (abi.DESTROYED, 0, pd)) == 0


@pytest.mark.parametrize(
    ("kind", "name"), [(8, "raw packets"), (9, "XRC (sending)"), (255, "DC"), (77, "an unknown kind")]
)
def test_what_is_lacking_is_said_once(program, caplog, kind, name):
    """At the default level, so that it reaches stderr. The numbers are those of ib_user_verbs.h."""
    request, cap = (ctypes.create_string_buffer(layout.size) for layout in (abi.MLX5_CREATE_QP, abi.QP_CAP))
    for _ in range(2):
        assert program.control(
            Object.QP, abi.CREATE, (abi.UHW_IN, abi.MLX5_CREATE_QP.size, ctypes.addressof(request)),
            (abi.CreateQp.CAP, abi.QP_CAP.size, ctypes.addressof(cap)), (abi.CreateQp.TYPE, 8, kind),
        ) == -errno.EOPNOTSUPP
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1
    assert f"software NICs do not have: queue pairs for {name} (type {kind}) are not supported" in said[0]


@pytest.mark.parametrize(("fd", "warnings"), [(-1, 0), (7, 1)])
def test_dmabufs_are_not_registered(program, caplog, fd, warnings):
    """NCCL and UCX ask with the descriptor -1 whether they could be. Linux's answer for a driver that cannot."""
    assert program.control(
        Object.MR, abi.REG_DMABUF_MR, (abi.RegDmabufMr.FD, 0, fd & (1 << 64) - 1)
    ) == -errno.EOPNOTSUPP
    assert sum(record.levelname == "WARNING" for record in caplog.records) == warnings
