"""Calls as the kernel takes them: whatever a program passes, it gets an errno, and nothing is left half-made."""

import contextlib
import ctypes
import errno
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio.errors import DocaError
from gpunetio.formats.layout import Entry
from gpunetio.memory import HostMemory
from gpunetio.nic.control.port import PortConfig
from gpunetio.uverbs import abi
from gpunetio.uverbs.abi import Object, QpKind
from gpunetio.uverbs.call import Refused
from gpunetio.uverbs.calls import Calls, _guarded
from gpunetio.uverbs.files import OpenFile

ROOM = 4096
NOWHERE = (1 << 47) - 4096  # no program has this page
METHODS = [0, 1, 2, 3, 5, 6, *(0x1000 + i for i in range(5))]


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
        return self.calls._files[self.number]

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
])  # fmt: skip
def test_payload_in_completions(program, kind, flags, all_signalled, send, receive, cs_req, cs_res):
    """As mlx5_ib asks for it. Responses need all sends to have completions, or a program that says that it knows."""
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
        for i, size in enumerate((send, receive))
    ]  # fmt: skip
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
    )  # fmt: skip
    row = program.file.provider.nic.qps[program.file.get(Object.QP, qp).qpn]
    assert (row["cs_req"], row["cs_res"]) == (cs_req, cs_res)
    for obj, method, handle in (
        (Object.QP, abi.DESTROY, qp), *((Object.CQ, abi.DESTROY, cq) for cq in cqs), (Object.PD, abi.DESTROY_ONLY, pd),
    ):  # fmt: skip
        answer = ((abi.DESTROY_RESP, 8 if obj == Object.CQ else 4, out),) if method == abi.DESTROY else ()
        assert program.control(obj, method, (abi.DESTROYED, 0, handle), *answer) == 0
    memory.close()


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


def test_an_answer_that_cannot_be_stored(program):
    """The object is not made, as nobody could name it."""
    before = set(program.file._held)
    request = (abi.Invoke.CMD, 8, abi.Write.ALLOC_PD), (abi.Invoke.OUT, 4, NOWHERE)
    assert program.control(Object.DEVICE, abi.Method.INVOKE_WRITE, *request) == -errno.EFAULT
    uar = (abi.Uar.TYPE, 4, 0), (abi.Uar.PAGE_ID, 4, program.address)
    assert program.control(Object.UAR, abi.UAR_ALLOC, *uar) == -errno.EINVAL
    assert set(program.file._held) == before
    assert set(program.file.uars) == {program.page}


def test_calls_that_are_not_there(program):
    assert program.control(Object.DEVICE, 77) == -errno.EOPNOTSUPP
    assert program.control(99, 0) == -errno.EOPNOTSUPP
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
)  # fmt: skip
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
    before = set(program.file._held)
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
    ]))  # fmt: skip
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
        assert set(program.file._held) == before
    for handle in sorted(set(program.file._held) - before, reverse=True):
        program.file.remove(program.file._held[handle].kind, handle)
    assert program.control(Object.PD, abi.DESTROY_ONLY, (abi.DESTROYED, 0, pd)) == 0
