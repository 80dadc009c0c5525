"""The stand-in for libibverbs and libmlx5 refuses what they and the kernel refuse.

It is called here as C programs call it: through its symbols, with the structures of the headers (which test_rdma_core
compares with ours), and once by a program of C, for what the headers have inline.
"""

import ctypes
import errno
import fcntl
import os
import re
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_uint16, c_uint32
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpunetio.enums import AsyncEventType, LinkLayer
from gpunetio.formats import commands as cmd
from gpunetio.formats.commands import CapClass, Opcode, Status
from gpunetio.formats.events import EventType
from gpunetio.formats.layout import VARIABLE
from gpunetio.formats.mailboxes import mailboxes
from gpunetio.memory import PAGE, HostMemory
from gpunetio.nic.engine.port import PortConfig
from gpunetio.nic.state.cq import EVENT
from gpunetio.nic.turn.commands import EngineCommand
from gpunetio.providers.mlx5 import structs as s
from gpunetio.providers.mlx5.inline import ibv_query_port
from gpunetio.providers.mlx5.libraries import libibverbs, libmlx5
from rdma_core import skip_without_headers
from stand_in import StandIn, build
from stand_in.building import FOLDER, compiler, why_not
from stand_in.strict import reserved_bits

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ = 1, 2, 4
OUT = 16
OMIT_EV_DATA = 1  # MLX5DV_DEVX_CREATE_EVENT_CHANNEL_FLAGS_OMIT_EV_DATA
QUERY_CAP = bytes(cmd.QUERY_HCA_CAP_IN.pack(opcode=Opcode.QUERY_HCA_CAP, op_mod=CapClass.GENERAL << 1 | 1))


class Device:
    """An open device, its memory, and objects made by hand: `v` is libibverbs, `m` libmlx5."""

    def __init__(self, name: str = "mlx5_0"):
        self.v, self.m = libibverbs(), libmlx5()
        count = c_int()
        devices = self.v.ibv_get_device_list(byref(count))
        names = [self.v.ibv_get_device_name(devices[i]).decode() for i in range(count.value)]
        self.context = self.v.ibv_open_device(devices[names.index(name)])
        self.v.ibv_free_device_list(devices)
        self.memory = HostMemory(8 * PAGE)

    def close(self) -> None:
        assert self.v.ibv_close_device(self.context) == 0
        self.memory.close()

    def pd(self) -> Any:
        return self.v.ibv_alloc_pd(self.context)

    def pdn(self, pd: Any) -> int:
        found, obj = s.mlx5dv_pd(), s.mlx5dv_obj()
        setattr(obj.pd, "in", pd)
        obj.pd.out = ctypes.pointer(found)
        assert self.m.mlx5dv_init_obj(byref(obj), s.MLX5DV_OBJ_PD) == 0
        return found.pdn

    def mr(self, pd: Any, address: int | None = None, nbytes: int = 64, iova: int | None = None, access: int = 1):
        address = self.memory.address if address is None else address
        return self.v.ibv_reg_mr_iova2(pd, address, nbytes, address if iova is None else iova, access)

    def umem(self, **fields: int) -> Any:
        wanted = {"addr": self.memory.address, "size": PAGE, "access": LOCAL_WRITE, "pgsz_bitmap": PAGE, **fields}
        return self.m.mlx5dv_devx_umem_reg_ex(self.context, byref(s.mlx5dv_devx_umem_in(**wanted)))

    def uar(self, flags: int = 0) -> Any:
        return self.m.mlx5dv_devx_alloc_uar(self.context, flags)

    def eqn(self) -> int:
        eqn = c_uint32()
        assert self.m.mlx5dv_devx_query_eqn(self.context, 0, byref(eqn)) == 0
        return eqn.value

    def create(self, mailbox: bytes, room: int = OUT) -> tuple[Any, bytes]:
        out = ctypes.create_string_buffer(max(room, 1))
        obj = self.m.mlx5dv_devx_obj_create(self.context, mailbox, len(mailbox), out, room)
        return obj, out.raw

    def create_cq(self, umem: Any, uar: Any, **fields: int) -> bytes:
        ids = {"uar_page": uar.contents.page_id, "dbr_umem_id": umem.contents.umem_id, "dbr_umem_valid": 1}
        return bytes(cmd.CREATE_CQ_IN.pack(
            opcode=Opcode.CREATE_CQ, cq_umem_id=umem.contents.umem_id, cq_umem_valid=1,
            cq_context={**ids, "dbr_addr": PAGE - 64, "log_cq_size": 3, "c_eqn": self.eqn(), **fields},
        ))

    def create_qp(self, pd: Any, umem: Any, uar: Any, cqn: int) -> bytes:
        ids = {"uar_page": uar.contents.page_id, "dbr_umem_id": umem.contents.umem_id, "dbr_umem_valid": 1}
        return bytes(cmd.CREATE_QP_IN.pack(
            opcode=Opcode.CREATE_QP, wq_umem_id=umem.contents.umem_id, wq_umem_valid=1,
            qpc={**ids, "dbr_addr": PAGE - 128, "log_sq_size": 2, "rq_type": 3, "cqn_snd": cqn, "pd": self.pdn(pd)},
        ))

    def general(self, mailbox: bytes | None, size: int | None = None, room: int = 4112) -> tuple[int, bytes]:
        out = ctypes.create_string_buffer(max(room, 1))
        size = len(mailbox or b"") if size is None else size
        return self.m.mlx5dv_devx_general_cmd(self.context, mailbox, size, out, room), out.raw


@pytest.fixture
def device(stand_in: StandIn) -> Iterator[Device]:
    """Whatever a test leaves open in it goes with it, as with a process."""
    opened = Device()
    yield opened
    opened.close()


@pytest.fixture
def queues(device: Device) -> dict[str, Any]:
    """A CQ and a QP, and what they need."""
    pd, umem, uar = device.pd(), device.umem(), device.uar()
    cq, out = device.create(device.create_cq(umem, uar))
    cqn = cmd.CREATE_CQ_OUT.get(out, "cqn")
    qp, out = device.create(device.create_qp(pd, umem, uar, cqn))
    qpn = cmd.CREATE_QP_OUT.get(out, "qpn")
    return {"pd": pd, "umem": umem, "uar": uar, "cq": cq, "cqn": cqn, "qp": qp, "qpn": qpn}


def null(pointer: Any, code: int) -> None:
    """The call has returned NULL and left this errno."""
    assert (bool(pointer), ctypes.get_errno()) == (False, code)


@contextmanager
def complains(stand_in: StandIn, what: str) -> Iterator[None]:
    """One complaint, which is then forgotten."""
    yield
    (complaint,) = stand_in.complaints
    assert re.search(what, complaint), complaint
    stand_in.complaints.clear()


# --- the file --------------------------------------------------------------------------------------------------------


def exported() -> list[tuple[str, str]]:
    """Function and version."""
    found, version = [], ""
    for line in (FOLDER / "exports.map").read_text().splitlines():
        if start := re.match(r"(\w+\.\d+) \{", line):
            version = start[1]
        elif name := re.match(r"\s+(\w+);", line):
            if name[1].removeprefix("_").startswith(("ibv_", "mlx5dv_")):
                found.append((name[1], version))
    return found


def test_versions_are_those_of_the_real_libraries(stand_in_file: Path):
    lookup = ctypes.CDLL(None).dlvsym
    lookup.restype, lookup.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
    stand_in = ctypes.CDLL(str(stand_in_file))
    real = {"ibv": ctypes.CDLL("libibverbs.so.1"), "mlx5dv": ctypes.CDLL("libmlx5.so.1")}
    assert len(exported()) == 65
    for name, version in exported():
        library = real[name.lstrip("_").partition("_")[0]]
        for where in (stand_in, library):
            assert lookup(where._handle, name.encode(), version.encode()), f"{name}@{version}"
        # What a program gets that names no version, as ctypes and dlsym do, is this one.
        assert ctypes.cast(getattr(library, name), ctypes.c_void_p).value == lookup(
            library._handle, name.encode(), version.encode()
        )


def test_a_library_without_some_functions(tmp_path):
    made = ctypes.CDLL(str(build(tmp_path, ["ibv_reg_dmabuf_mr", "ibv_alloc_pd"])))
    assert not hasattr(made, "ibv_reg_dmabuf_mr")
    assert not hasattr(made, "ibv_alloc_pd")
    assert hasattr(made, "ibv_dealloc_pd")
    with pytest.raises(ValueError, match="ibv_nonsense"):
        build(tmp_path, ["ibv_nonsense"])


INLINE = r"""
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#define CHECK(what) do { if (!(what)) return __LINE__; } while (0)
int program(void *memory)
{
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    CHECK(list && count == 8 && !strcmp(ibv_get_device_name(list[1]), "mlx5_1") && mlx5dv_is_supported(list[1]));
    struct ibv_context *context = ibv_open_device(list[1]);
    CHECK(context && ibv_get_device_guid(list[1]) != 0);
    ibv_free_device_list(list);
    CHECK(verbs_get_ctx_op(context, query_port) && !verbs_get_ctx_op(context, create_cq_ex));
    struct ibv_port_attr port;
    memset(&port, 0xFF, sizeof port);
    CHECK(!ibv_query_port(context, 1, &port) && port.state == IBV_PORT_ACTIVE && port.active_mtu == IBV_MTU_4096);
    CHECK(port.link_layer == IBV_LINK_LAYER_ETHERNET && port.port_cap_flags2 == 0);
    CHECK(ibv_query_port(context, 2, &port) == EINVAL);
    struct ibv_gid_entry entry;
    CHECK(!ibv_query_gid_ex(context, 1, 0, &entry, 0) && entry.gid_type == IBV_GID_TYPE_ROCE_V2 && entry.port_num == 1);
    struct ibv_pd *pd = ibv_alloc_pd(context);
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING);
    CHECK(mr && mr->addr == memory && mr->length == 64 && mr->lkey && mr->pd == pd && mr->context == context);
    CHECK(!ibv_dereg_mr(mr) && (mr = ibv_reg_mr(pd, memory, 64, 0)) && !ibv_dereg_mr(mr));
    CHECK(ibv_query_device_ex(context, NULL, &(struct ibv_device_attr_ex){0}) == 0);
    errno = 0;
    CHECK(!ibv_alloc_mw(pd, IBV_MW_TYPE_1) && errno == EOPNOTSUPP);
    CHECK(!ibv_create_cq(context, 1, NULL, NULL, 0) && !ibv_create_qp(pd, NULL) && ibv_query_srq(NULL, NULL));
    struct ibv_cq cq = {.context = context};
    CHECK(ibv_req_notify_cq(&cq, 0) == EOPNOTSUPP);
    __be16 pkey;
    CHECK(!ibv_query_pkey(context, 1, 0, &pkey) && pkey == 0xFFFF && ibv_query_pkey(context, 1, 1, &pkey) == -1);
    CHECK(!ibv_fork_init() && strstr(ibv_event_type_str(IBV_EVENT_DEVICE_FATAL), "DEVICE_FATAL"));
    struct mlx5dv_context attrs = {.comp_mask = ~0ull};
    CHECK(!mlx5dv_query_device(context, &attrs) && attrs.flags == MLX5DV_CONTEXT_FLAGS_CQE_V1 && !attrs.comp_mask);
    CHECK(!ibv_dealloc_pd(pd) && !ibv_close_device(context));
    return 0;
}
"""


def test_a_program_of_c_with_the_headers_inline_functions(stand_in: StandIn, tmp_path):
    skip_without_headers()
    source, made = tmp_path / "program.c", tmp_path / "program.so"
    source.write_text(INLINE)
    subprocess.run(
        [compiler() or "cc", "-std=gnu11", "-Wall", "-Werror", "-fPIC", "-shared", source, "-o", made, stand_in.path,
         f"-Wl,-rpath,{stand_in.path.parent}"],
        check=True, timeout=60,
    )
    program = ctypes.CDLL(str(made)).program
    program.argtypes = [ctypes.c_void_p]
    memory = HostMemory(PAGE)
    line = program(memory.address)
    assert line == 0, INLINE.splitlines()[line - 1]
    memory.close()


# --- devices ---------------------------------------------------------------------------------------------------------


def test_no_devices(stand_in: StandIn):
    stand_in.devices = 0
    count = c_int(5)
    devices = libibverbs().ibv_get_device_list(byref(count))
    assert count.value == 0
    assert not devices[0]
    libibverbs().ibv_free_device_list(devices)
    stand_in.fail("ibv_get_device_list", errno.ENOSYS)
    null(libibverbs().ibv_get_device_list(byref(count)), errno.ENOSYS)


def test_opening_fails(stand_in: StandIn):
    devices = libibverbs().ibv_get_device_list(None)
    stand_in.fail("ibv_open_device", errno.EACCES)
    null(libibverbs().ibv_open_device(devices[0]), errno.EACCES)
    one = devices[3]
    libibverbs().ibv_free_device_list(devices)
    with complains(stand_in, "ibv_open_device: the device is in no list any more"):
        null(libibverbs().ibv_open_device(one), errno.ENODEV)


def test_what_the_kernel_tells_in_files(device: Device):
    sysfs = Path(device.context.contents.device.contents.ibdev_path.decode())
    assert (sysfs / "hca_type").read_text() == "MT4129\n"
    assert (sysfs / "node_guid").read_text() == "0200:7fff:fe00:0001\n"


def test_device_attributes(device: Device):
    attr = s.ibv_device_attr()
    assert device.v.ibv_query_device(device.context, byref(attr)) == 0
    assert (attr.vendor_id, attr.vendor_part_id, attr.phys_port_cnt) == (0x02C9, 4129, 1)
    assert attr.fw_ver.startswith(b"28.")
    assert bytes(ctypes.c_uint64(attr.node_guid)).hex() == "02007ffffe000001"


def test_ports(device: Device, stand_in: StandIn):
    attr = s.ibv_port_attr()
    stand_in.nic("mlx5_0").set_link(False)
    for ask in (ibv_query_port, lambda *arguments: device.v.ibv_query_port(*arguments[:2], byref(arguments[2]))):
        ctypes.memset(byref(attr), 0xFF, ctypes.sizeof(attr))
        assert ask(device.context, 1, attr) == 0
        assert (attr.state, attr.gid_tbl_len, attr.flags) == (s.IBV_PORT_DOWN, 16, 0)
    assert attr.port_cap_flags2 == 0xFFFF  # not a member for callers of the old function
    for port in (0, 2):
        assert ibv_query_port(device.context, port, attr) == errno.EINVAL


def test_gids(device: Device, stand_in: StandIn):
    gid, entry = s.ibv_gid(), s.ibv_gid_entry()
    v, context, size = device.v, device.context, ctypes.sizeof(entry)
    assert v.ibv_query_gid(context, 1, 0, byref(gid)) == 0
    assert bytes(gid.raw)[10:] == b"\xff\xff\x7f\0\0\1"
    assert v._ibv_query_gid_ex(context, 1, 1, byref(entry), 0, size) == 0
    assert (entry.gid_index, entry.port_num, entry.gid_type) == (1, 1, s.IBV_GID_TYPE_ROCE_V2)
    for empty, index in ((False, 15), (True, 0)):
        stand_in.has_gids = not empty
        assert v.ibv_query_gid(context, 1, index, byref(gid)) == 0
        assert not any(gid.raw)
        assert v._ibv_query_gid_ex(context, 1, index, byref(entry), 0, size) == errno.ENODATA
    for port, index in ((1, 16), (1, -1), (0, 0), (2, 0)):
        assert v.ibv_query_gid(context, port, index, byref(gid)) == -1
        assert ctypes.get_errno() == errno.EINVAL
    assert v._ibv_query_gid_ex(context, 1, 16, byref(entry), 0, size) == errno.EINVAL
    assert v._ibv_query_gid_ex(context, 1, 0, byref(entry), 1, size) == errno.EINVAL


def test_injected_failures_come_once(device: Device, stand_in: StandIn):
    stand_in.fail("ibv_alloc_pd", errno.ENOMEM, times=2)
    for _ in range(2):
        null(device.pd(), errno.ENOMEM)
    assert device.v.ibv_dealloc_pd(device.pd()) == 0
    assert stand_in.calls["ibv_alloc_pd"] == 3


# --- objects that are gone, or in use ---------------------------------------------------------------------------------


def test_use_after_free(device: Device, stand_in: StandIn):
    pd = device.pd()
    mr = device.mr(pd)
    for free, used in ((device.v.ibv_dereg_mr, mr), (device.v.ibv_dealloc_pd, pd)):
        assert free(used) == 0
        with complains(stand_in, "the object is freed"):
            assert free(used) == errno.EINVAL
    with complains(stand_in, "ibv_alloc_pd: the context is NULL"):
        null(device.v.ibv_alloc_pd(None), errno.EINVAL)


def test_children_may_be_open_when_a_context_closes(device: Device, stand_in: StandIn):
    other = Device()
    pd = other.pd()
    assert other.mr(pd)
    assert len(stand_in.nic("mlx5_0").pds) == 1
    other.close()
    assert len(stand_in.nic("mlx5_0").pds) == 0  # the kernel cleans up
    with complains(stand_in, "ibv_dealloc_pd: the object's context is closed"):
        assert other.v.ibv_dealloc_pd(pd) == errno.EINVAL
    with complains(stand_in, "ibv_alloc_pd: the context is closed"):
        null(other.pd(), errno.EINVAL)


def test_what_is_in_use_stays(device: Device, queues: dict[str, Any], stand_in: StandIn):
    pd = device.pd()
    mr, ah = device.mr(pd), handle_to(device, pd)
    for user, free in ((mr, device.v.ibv_dereg_mr), (ah, device.v.ibv_destroy_ah)):
        assert device.v.ibv_dealloc_pd(pd) == errno.EBUSY
        assert free(user) == 0
    assert device.v.ibv_dealloc_pd(pd) == 0
    assert device.v.ibv_dealloc_pd(queues["pd"]) == errno.EBUSY
    assert device.m.mlx5dv_devx_umem_dereg(queues["umem"]) == errno.EBUSY
    assert device.m.mlx5dv_devx_obj_destroy(queues["cq"]) == errno.EBUSY
    with complains(stand_in, "mlx5dv_devx_free_uar: a queue still rings there"):
        device.m.mlx5dv_devx_free_uar(queues["uar"])
    for name in ("qp", "cq"):
        assert device.m.mlx5dv_devx_obj_destroy(queues[name]) == 0
    assert device.m.mlx5dv_devx_umem_dereg(queues["umem"]) == 0
    assert device.v.ibv_dealloc_pd(queues["pd"]) == 0


# --- memory ----------------------------------------------------------------------------------------------------------

ODP, RELAXED = 1 << 6, 1 << 20


@pytest.mark.parametrize("fields, code", [
    ({"nbytes": 0}, errno.EINVAL),
    ({"nbytes": 2**64 - 1}, errno.EINVAL),
    ({"access": REMOTE_WRITE}, errno.EINVAL),
    ({"access": 8}, errno.EINVAL),  # REMOTE_ATOMIC
    ({"access": 1 << 9}, errno.EINVAL),
    ({"access": ODP}, errno.EOPNOTSUPP),
    ({"iova": 8}, errno.EINVAL),
    ({"address": PAGE, "nbytes": 8}, errno.EFAULT),
])
def test_regions_that_are_refused(device: Device, fields, code):
    null(device.mr(device.pd(), **fields), code)


def test_regions(device: Device):
    pd = device.pd()
    for fields in ({"access": 0}, {"access": RELAXED | 1 << 29}, {"iova": 5 * PAGE}, {"iova": 0, "access": 15}):
        mr = device.mr(pd, **fields)
        assert (mr.contents.addr, mr.contents.length) == (device.memory.address, 64)
        assert mr.contents.lkey == mr.contents.rkey != 0
        assert device.v.ibv_dereg_mr(mr) == 0
    null(device.v.ibv_reg_mr(pd, device.memory.address, 64, REMOTE_WRITE), errno.EINVAL)


def test_regions_of_dmabufs(device: Device):
    shared = HostMemory(4 * PAGE, shared=True, sealed=False)
    pd, fd = device.pd(), shared.fd
    mr = device.v.ibv_reg_dmabuf_mr(pd, PAGE, PAGE, 7 * PAGE, fd, LOCAL_WRITE)
    assert device.v.ibv_dereg_mr(mr) == 0
    null(device.v.ibv_reg_dmabuf_mr(pd, 0, PAGE, 8, fd, LOCAL_WRITE), errno.EINVAL)
    null(device.v.ibv_reg_dmabuf_mr(pd, 0, PAGE, 0, fd, 1 << 21), errno.EINVAL)
    null(device.v.ibv_reg_dmabuf_mr(pd, 0, 5 * PAGE, 0, fd, LOCAL_WRITE), errno.EINVAL)
    null(device.v.ibv_reg_dmabuf_mr(pd, 0, PAGE, 0, 12345, LOCAL_WRITE), errno.EBADF)
    shared.close()


@pytest.mark.parametrize("fields, code", [
    ({"size": 0}, errno.EINVAL),
    ({"access": REMOTE_WRITE}, errno.EINVAL),
    ({"access": 15}, errno.EINVAL),
    ({"pgsz_bitmap": 0}, errno.EINVAL),
    ({"pgsz_bitmap": 1 << 16}, errno.EINVAL),
    ({"comp_mask": 2}, errno.EOPNOTSUPP),
    ({"addr": PAGE, "size": 8}, errno.EFAULT),
    ({"addr": 0, "comp_mask": 1, "dmabuf_fd": -1}, errno.EBADF),
])
def test_umems_that_are_refused(device: Device, fields, code):
    null(device.umem(**fields), code)


def test_umems(device: Device):
    shared = HostMemory(4 * PAGE, shared=True, sealed=False)
    assert shared.fd is not None
    plain = device.m.mlx5dv_devx_umem_reg(device.context, device.memory.address, 100, REMOTE_READ)
    dmabuf = device.umem(addr=PAGE, comp_mask=1, dmabuf_fd=shared.fd)
    assert plain.contents.umem_id != dmabuf.contents.umem_id
    for umem in (plain, dmabuf):
        assert device.m.mlx5dv_devx_umem_dereg(umem) == 0
    shared.close()


def test_uars(device: Device, stand_in: StandIn):
    nc, dedicated = s.MLX5DV_UAR_ALLOC_TYPE_NC, s.MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED
    pages = [device.uar(flags) for flags in (0, 0, nc, nc, dedicated, dedicated)]
    ids = [page.contents.page_id for page in pages]
    assert ids[2] == ids[3]
    assert len(set(ids)) == 5
    for page in pages:
        assert page.contents.reg_addr == page.contents.base_addr + 0x800
    for page in pages:
        device.m.mlx5dv_devx_free_uar(page)  # the one of all stays
    assert device.uar(nc).contents.page_id == ids[2]
    stand_in.dedicated_uars = False
    null(device.uar(dedicated), errno.EOPNOTSUPP)
    null(device.uar(2), errno.EOPNOTSUPP)


# --- address handles -------------------------------------------------------------------------------------------------


def attributes(gid: str = "00000000000000000000ffff7f000002", **fields: int) -> s.ibv_ah_attr:
    attr = s.ibv_ah_attr(**{"is_global": 1, "port_num": 1, "sl": 3, "static_rate": 2, **fields})
    attr.grh.dgid.raw[:] = bytes.fromhex(gid)
    attr.grh.hop_limit, attr.grh.traffic_class, attr.grh.sgid_index = 64, 0x68, 1
    return attr


def handle_to(device: Device, pd: Any, **fields: Any) -> Any:
    return device.v.ibv_create_ah(pd, byref(attributes(**fields)))


def vector(device: Device, ah: Any) -> Any:
    found, obj = s.mlx5dv_ah(), s.mlx5dv_obj()
    setattr(obj.ah, "in", ah)
    obj.ah.out = ctypes.pointer(found)
    assert device.m.mlx5dv_init_obj(byref(obj), s.MLX5DV_OBJ_AH) == 0
    return found.av.contents


def test_address_vectors(device: Device):
    other = Device("mlx5_1")
    pd = device.pd()
    ah = handle_to(device, pd)
    av = vector(device, ah)
    assert bytes(av.rmac).hex() == "02007f000002"
    assert bytes(av.rgid).hex().endswith("ffff7f000002")
    assert (av.hop_limit, av.tclass, av.stat_rate_sl) == (64, 0x68, 2 << 4 | 3 << 1)
    assert int.from_bytes(bytes(c_uint32(av.grh_gid_fl)), "big") == 1 << 20
    assert int.from_bytes(bytes(c_uint16(av.rlid)), "big") >= 0xC000
    assert device.v.ibv_destroy_ah(ah) == 0
    other.close()


def test_address_handles_that_are_refused(device: Device, stand_in: StandIn):
    pd = device.pd()
    null(handle_to(device, pd, is_global=0), errno.EINVAL)
    null(handle_to(device, pd, gid="00000000000000000000ffffffffffff"), errno.EHOSTUNREACH)
    ctypes.set_errno(errno.ENOTTY)
    null(handle_to(device, pd, port_num=2), errno.ENOTTY)  # that one leaves errno as it was
    for kind in (0, s.MLX5DV_OBJ_PD | 1):
        assert device.m.mlx5dv_init_obj(byref(s.mlx5dv_obj()), kind) == errno.EOPNOTSUPP
    with complains(stand_in, "mlx5dv_init_obj: the object is NULL"):
        assert device.m.mlx5dv_init_obj(byref(s.mlx5dv_obj()), s.MLX5DV_OBJ_AH) == errno.EINVAL


def test_infiniband(stand_in: StandIn):
    stand_in.ports[0] = PortConfig(link_layer=LinkLayer.INFINIBAND)
    device, attr = Device(), s.ibv_port_attr()
    assert ibv_query_port(device.context, 1, attr) == 0
    assert (attr.link_layer, attr.lid) == (s.IBV_LINK_LAYER_INFINIBAND, 1)
    pd = device.pd()
    av = vector(device, handle_to(device, pd, is_global=0, dlid=0x1234))
    assert int.from_bytes(bytes(c_uint16(av.rlid)), "big") == 0x1234
    assert av.stat_rate_sl == 2 << 4 | 3
    assert device.v.ibv_dealloc_pd(pd) == 0  # the kernel knows nothing of such handles
    device.close()


# --- DEVX ------------------------------------------------------------------------------------------------------------


GENERAL = {
    "short output": (QUERY_CAP, 15, None, errno.EINVAL),
    "short input": (QUERY_CAP[:15], 4112, None, errno.EINVAL),
    "NULL": (None, 4112, 16, errno.EFAULT),
    "CREATE": (bytes(cmd.CREATE_CQ_IN.pack(opcode=Opcode.CREATE_CQ)), 16, None, errno.EINVAL),
    "DESTROY": (bytes(cmd.DESTROY_QP_IN.pack(opcode=Opcode.DESTROY_QP)), 16, None, errno.EINVAL),
    "QUERY": (bytes(cmd.QUERY_QP_IN.pack(opcode=Opcode.QUERY_QP)), 272, None, errno.EINVAL),
    "unknown": (b"\x0a\xaa" + bytes(14), 16, None, errno.EINVAL),
}


@pytest.mark.parametrize("mailbox, room, size, code", GENERAL.values(), ids=GENERAL)
def test_general_commands_that_the_kernel_refuses(device: Device, mailbox, room, size, code):
    returned, out = device.general(mailbox, size, room)
    assert returned == code
    assert not any(out)


CREATED = {
    "GENERAL": (QUERY_CAP, OUT),
    "DESTROY": (bytes(cmd.DESTROY_CQ_IN.pack(opcode=Opcode.DESTROY_CQ)), OUT),
    "MODIFY": (bytes(cmd.RST2INIT_QP_IN.pack(opcode=Opcode.RST2INIT_QP)), OUT),
    "short output": (bytes(cmd.CREATE_QP_IN.pack(opcode=Opcode.CREATE_QP)), 8),
    "tunnel": (bytes(cmd.CREATE_QP_IN.pack(opcode=Opcode.CREATE_QP))[:4] + b"\0\1" + bytes(266), OUT),
}


@pytest.mark.parametrize("mailbox, room", CREATED.values(), ids=CREATED)
def test_objects_that_the_kernel_does_not_create(device: Device, mailbox, room):
    null(device.create(mailbox, room)[0], errno.EINVAL)


def test_commands_must_suit_the_object(device: Device, queues: dict[str, Any]):
    out = ctypes.create_string_buffer(272)

    def call(function: str, name: str, layout: Any, **fields: int) -> int:
        mailbox = bytes(layout.pack(**fields))
        return getattr(device.m, f"mlx5dv_devx_obj_{function}")(queues[name], mailbox, len(mailbox), out, 272)

    query = {"opcode": Opcode.QUERY_QP, "qpn": queues["qpn"]}
    to_error = {"opcode": Opcode.QP_2ERR, "qpn": queues["qpn"]}
    assert call("query", "qp", cmd.QUERY_QP_IN, **query) == 0
    assert call("query", "qp", cmd.QUERY_QP_IN, **{**query, "qpn": queues["qpn"] ^ 1}) == errno.EINVAL
    assert call("query", "cq", cmd.QUERY_QP_IN, **{**query, "qpn": queues["cqn"]}) == errno.EINVAL
    assert call("modify", "qp", cmd.QUERY_QP_IN, **query) == errno.EINVAL
    assert call("query", "qp", cmd.QP_2ERR_IN, **to_error) == errno.EINVAL
    destroy = {"opcode": Opcode.DESTROY_QP, "qpn": queues["qpn"]}
    assert call("modify", "qp", cmd.DESTROY_QP_IN, **destroy) == errno.EINVAL
    assert call("modify", "qp", cmd.QP_2ERR_IN, **to_error) == 0


@pytest.mark.parametrize("tells_status", [True, False], ids=["new kernel", "old kernel"])
def test_what_the_device_refuses(device: Device, stand_in: StandIn, tells_status):
    stand_in.tells_status = tells_status
    umem, uar = device.umem(), device.uar()
    codes = (errno.EREMOTEIO, errno.EREMOTEIO) if tells_status else (errno.EINVAL, errno.EAGAIN)
    stand_in.refuse(Status.NO_RESOURCES, 0x1234, Opcode.CREATE_CQ)
    for mailbox, code, status in (
        (device.create_cq(umem, uar, log_cq_size=31), codes[1], Status.NO_RESOURCES),
        (device.create_cq(umem, uar, log_cq_size=31), codes[0], Status.BAD_PARAM),
    ):
        obj, out = device.create(mailbox)
        null(obj, code)
        assert cmd.OUT.get(out, "status") == (status if tells_status else Status.OK)
    assert "log_cq_size 31 is above" in stand_in.refused[-1]
    stand_in.refuse(Status.INTERNAL_ERR, 7)
    returned, out = device.general(QUERY_CAP)
    assert returned == (errno.EREMOTEIO if tells_status else errno.EIO)
    assert cmd.OUT.get(out, "syndrome") == (7 if tells_status else 0)
    assert device.general(QUERY_CAP)[0] == 0


def test_reserved_bits_are_refused(device: Device, stand_in: StandIn):
    mailbox = bytearray(device.create_cq(device.umem(), device.uar()))
    mailbox[0x45] |= 1  # behind cq_context
    obj, out = device.create(bytes(mailbox))
    null(obj, errno.EREMOTEIO)
    assert cmd.OUT.get(out, "status") == Status.BAD_PARAM
    assert stand_in.refused == [stand_in.refused[0]]
    assert "CREATE_CQ has reserved bits set, the first at 0x22f" in stand_in.refused[0]


@pytest.mark.parametrize("opcode", list(Opcode), ids=lambda opcode: opcode.name)
def test_reserved_bits_are_those_of_no_field(opcode: Opcode):
    layout = mailboxes(opcode).request

    def fields(of: Any, base: int = 0) -> Iterator[int]:
        for field in of.fields.values():
            if field.struct:
                yield from fields(field.struct, base + field.offset)
            else:
                yield from range(base + field.offset, base + field.offset + field.width)

    used = set(fields(layout))
    for bit in range(48, 8 * layout.size):
        mailbox = bytearray(layout.pack(opcode=opcode))
        mailbox[bit // 8] |= 0x80 >> bit % 8
        assert (reserved_bits(bytes(mailbox)) is None) == (bit in used), hex(bit)
    behind = bytes(layout.pack(opcode=opcode)) + b"\1"
    assert (reserved_bits(behind) is None) == (any(field.width == VARIABLE for field in layout.fields.values()))


# --- events ----------------------------------------------------------------------------------------------------------


class Channel:
    """A DEVX event channel whose descriptor does not block."""

    def __init__(self, device: Device, flags: int = 0):
        self.m = device.m
        self.pointer = device.m.mlx5dv_devx_create_event_channel(device.context, flags)
        self.fd = self.pointer.contents.fd
        assert not fcntl.fcntl(self.fd, fcntl.F_GETFL) & os.O_NONBLOCK  # the kernel's do block
        os.set_blocking(self.fd, False)

    def subscribe(self, obj: Any, *types: int, cookie: int = 7, size: int | None = None) -> int:
        numbers = (c_uint16 * max(1, len(types)))(*types)
        return self.m.mlx5dv_devx_subscribe_devx_event(
            self.pointer, obj, 2 * len(types) if size is None else size, numbers, cookie
        )

    def get(self, room: int = 72) -> bytes | int:
        """The event, or an errno."""
        buffer = ctypes.create_string_buffer(max(room, 1))
        count = self.m.mlx5dv_devx_get_event(self.pointer, buffer, room)
        return buffer.raw[:count] if count >= 0 else ctypes.get_errno()

    def close(self) -> None:
        self.m.mlx5dv_devx_destroy_event_channel(self.pointer)


def tell(stand_in: StandIn, row: np.void, kind: EventType, number: int, prefix: str = "") -> None:
    """Have the NIC tell of an object's row what it would when that happens."""
    event = np.zeros((), EVENT.dtype)
    event["cookie"], event["type"], event["number"] = row[f"{prefix}cookie"], int(kind), number
    engine = stand_in.nic("mlx5_0").engine
    engine.post(EngineCommand.RAISE_EVENT, int(row[f"{prefix}channel"]), event)
    engine.synchronize()  # the channel's descriptor is written after the turn


def test_events_of_objects(device: Device, queues: dict[str, Any], stand_in: StandIn):
    """Each kind has a cookie of its own; the entry says which object it is about."""
    nic, channel = stand_in.nic("mlx5_0"), Channel(device)
    qpn, cqn = queues["qpn"], queues["cqn"]
    invalid, access = EventType.WQ_INVAL_REQ_ERROR, EventType.WQ_ACCESS_ERROR
    assert channel.subscribe(queues["qp"], invalid, cookie=11) == 0
    assert channel.subscribe(queues["qp"], access, EventType.COMM_EST, cookie=12) == 0
    assert channel.subscribe(queues["cq"], EventType.COMPLETION, cookie=13) == 0
    assert channel.subscribe(queues["cq"], EventType.CQ_ERROR, cookie=14) == 0
    assert channel.get() == errno.EAGAIN
    poll = select.poll()
    poll.register(channel.fd, select.POLLIN)
    assert not poll.poll(0)
    row, cq = nic.qps[qpn], nic.cqs[cqn]
    for told in ((row, access, qpn), (row, invalid, qpn), (cq, EventType.COMPLETION, cqn)):
        tell(stand_in, *told)
    tell(stand_in, cq, EventType.CQ_ERROR, cqn, "error_")
    assert poll.poll(10_000)
    assert channel.get(71) == errno.EINVAL  # which takes nothing
    found = [channel.get() for _ in range(4)]
    assert channel.get() == errno.EAGAIN
    assert not poll.poll(0)
    at = {access: 56, invalid: 56, EventType.COMPLETION: 56, EventType.CQ_ERROR: 32}
    for entry, cookie, kind, number in zip(found, (12, 11, 13, 14), at, (qpn, qpn, cqn, cqn)):
        assert isinstance(entry, bytes)
        assert (int.from_bytes(entry[:8], "little"), entry[8 + 1]) == (cookie, kind)
        place = 8 + at[kind]
        assert int.from_bytes(entry[place : place + 4], "big") == number
    channel.close()


def test_what_has_happened_is_told_of_closed_objects_too(device: Device, queues: dict[str, Any], stand_in: StandIn):
    channel = Channel(device, OMIT_EV_DATA)
    assert channel.subscribe(queues["qp"], EventType.WQ_ACCESS_ERROR, cookie=5) == 0
    tell(stand_in, stand_in.nic("mlx5_0").qps[queues["qpn"]], EventType.WQ_ACCESS_ERROR, queues["qpn"])
    assert device.m.mlx5dv_devx_obj_destroy(queues["qp"]) == 0
    assert channel.get(7) == errno.EINVAL
    assert channel.get(8) == (5).to_bytes(8, "little")
    channel.close()


def test_subscriptions_that_are_refused(device: Device, queues: dict[str, Any], stand_in: StandIn):
    channel, other = Channel(device), Device()
    comm, port = EventType.COMM_EST, EventType.PORT_CHANGE
    assert channel.subscribe(queues["qp"], comm, size=0) == errno.EINVAL
    assert channel.subscribe(queues["qp"], comm, comm, size=3) == errno.EINVAL
    assert channel.subscribe(queues["qp"], *[comm] * 17) == errno.EINVAL
    assert channel.subscribe(queues["qp"], 0xFF) == errno.EINVAL
    assert channel.subscribe(queues["qp"], port) == errno.EINVAL
    assert channel.subscribe(None, comm) == errno.EINVAL
    elsewhere = Channel(other)
    assert elsewhere.subscribe(queues["qp"], comm) == errno.EINVAL
    assert elsewhere.subscribe(None, port) == 0
    elsewhere.close()
    other.close()
    null(device.m.mlx5dv_devx_create_event_channel(device.context, 2), errno.EINVAL)
    channel.close()
    with complains(stand_in, "mlx5dv_devx_get_event: the object is freed"):
        assert channel.get() == errno.EINVAL


def test_the_port_is_told_by_devx_as_well(device: Device, stand_in: StandIn):
    channel = Channel(device)
    assert channel.subscribe(None, EventType.PORT_CHANGE, cookie=3) == 0
    stand_in.nic("mlx5_0").set_link(False)
    until_readable(channel.fd)
    entry = channel.get()
    assert isinstance(entry, bytes)
    assert (entry[:9], entry[9], entry[11], entry[48] >> 4) == (b"\3" + bytes(8), EventType.PORT_CHANGE, 1, 1)
    channel.close()


def until_readable(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(10_000), "nothing came"


def async_event(device: Device) -> tuple[int, int] | int:
    """Type and port, or an errno."""
    event = s.ibv_async_event()
    if device.v.ibv_get_async_event(device.context, byref(event)):
        return ctypes.get_errno()
    device.v.ibv_ack_async_event(byref(event))
    return event.event_type, event.element.port_num


def test_asynchronous_events(device: Device, stand_in: StandIn):
    fd = device.context.contents.async_fd
    os.set_blocking(fd, False)
    assert async_event(device) == errno.EAGAIN
    for up, kind in ((False, AsyncEventType.PORT_ERR), (True, AsyncEventType.PORT_ACTIVE)):
        stand_in.nic("mlx5_0").set_link(up)
        until_readable(fd)
        assert async_event(device) == (kind, 1)


def test_a_device_that_fails(device: Device, queues: dict[str, Any], stand_in: StandIn):
    other = Device("mlx5_1")
    stand_in.break_down("mlx5_0")
    until_readable(device.context.contents.async_fd)
    assert async_event(device) == (AsyncEventType.DEVICE_FATAL, 0)
    null(device.pd(), errno.EIO)
    assert device.general(QUERY_CAP)[0] == errno.EIO
    assert device.m.mlx5dv_devx_obj_destroy(queues["qp"]) == errno.EIO
    assert device.v.ibv_dealloc_pd(queues["pd"]) == errno.EIO
    assert other.pd()
    other.close()
