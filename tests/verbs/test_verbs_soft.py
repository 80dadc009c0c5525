"""Verbs on the software NIC: opening, connecting and moving bytes, closing, threads, forks and memory of all kinds."""

import contextlib
import copy
import ctypes
import gc
import itertools
import mmap
import os
import pickle
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from gpunetio import memory, providers, verbs
from gpunetio.enums import Access, CqOverrun, LinkLayer, MtuSize, PortState, QpAtomicType, QpAttrMask, QpState
from gpunetio.errors import (
    BadStateError,
    DocaErrorCode,
    DriverError,
    InUseError,
    InvalidValueError,
    NotFoundError,
    NotSupportedError,
)
from gpunetio.formats.commands import Status
from gpunetio.formats.cqe import INIT_OP_OWN, Syndrome
from gpunetio.memory import HostMemory
from gpunetio.nic.control.syndromes import CommandSyndrome
from gpunetio.nic.engine.port import PortConfig
from gpunetio.nic.nic import SoftNic
from gpunetio.nic.state.reasons import Reason
from gpunetio.providers import soft
from gpunetio.verbs import QpAttr, QpEndpoint
from nic_rig import READ, REQ, REQ_ERR, SEND, WRITE, Completions, Queue, connect, data, raddr, until
from repository import environment
from tensors import OnlyDlpack

M = QpAttrMask
RST, INIT, RTR, RTS, ERR, SQD = QpState


@pytest.fixture
def ctx() -> Iterator[verbs.Context]:
    with verbs.open() as opened:
        yield opened


@pytest.fixture
def pd(ctx: verbs.Context) -> verbs.PD:
    return ctx.create_pd()


@pytest.fixture
def ends(pd: verbs.PD) -> tuple[Queue, Queue]:
    a, b = Queue(pd), Queue(pd)
    connect(a, b)
    return a, b


def nic_of(ctx: verbs.Context) -> Any:
    return ctx.provider.nic  # type: ignore[attr-defined]


def threads() -> list[str]:
    """Those of NICs. The one that watches kernels on GPUs stays for ever."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("gpunetio soft"))


# --- devices and contexts


def test_device_list():
    devices = providers.device_list()
    assert [device.name for device in devices if device.provider == "soft"] == [f"soft{n}" for n in range(8)]
    assert all(device.description for device in devices)


@pytest.mark.parametrize("name", ["soft8", "soft", "", "soft01", "SOFT0", "nosuch0"])
def test_no_such_device(name):
    with pytest.raises(NotFoundError, match=f"^no device {name!r}; there are: soft0, soft1, ") as caught:
        verbs.open(name)
    assert caught.value.code == DocaErrorCode.NOT_FOUND


def test_other_systems(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NotSupportedError, match="runs on Linux, not on darwin"):
        verbs.open()


def test_attributes(ctx):
    device = ctx.query_device()
    assert (device.link_layer, device.gid_table_size, device.phys_port_cnt) == (LinkLayer.ETHERNET, 16, 1)
    assert (device.log_max_qp_sz, device.log_max_cq_sz, device.max_pkeys) == (15, 22, 1)
    assert (device.min_udp_sport, device.max_udp_sport, device.roce_version) == (0xC000, 0xFFFF, 4)
    assert (device.rc, device.rts2rts_qp_dscp, device.send_dbr_mode_no_dbr_ext) == (True, True, True)
    number = int(ctx.name.removeprefix("soft")) + 1  # another process may have the first NICs
    assert device.node_guid == 0x02007FFFFE000000 + number
    port = ctx.query_port()
    assert (port.state, port.active_mtu, port.link_layer) == (PortState.ACTIVE, 4096, LinkLayer.ETHERNET)
    assert ctx.query_gid() == bytes(10) + bytes([0xFF, 0xFF, 127, 0, 0, number])
    assert ctx.query_gid(1, 1)[:2] == b"\xfe\x80"
    assert not any(ctx.query_gid(1, 2))


def test_open_and_close_leave_nothing():
    def cycle() -> None:
        port = PortConfig(workers=1)
        with verbs.open("soft4", port=port) as a, verbs.open("soft5", port=port) as b:
            kinds = ("control", "engine", "reports")
            assert threads() == [f"gpunetio soft{n} {what}" for n in (4, 5) for what in kinds]
            domains = [ctx.create_pd() for ctx in (a, b)]
            made = [(pd.register(bytearray(100)), Queue(pd)) for pd in domains]
            assert not any(mr.closed or queue.qp.closed for mr, queue in made)

    cycle()
    gc.collect()
    fds, regions = len(os.listdir("/proc/self/fd")), len(memory.live())
    for _ in range(3):
        cycle()
        assert threads() == []
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == fds
    assert len(memory.live()) == regions


def test_two_contexts_share_a_nic():
    with verbs.open("soft2", port=PortConfig(workers=1)) as first, verbs.open("soft2") as second:
        nic = nic_of(first)
        assert nic_of(second) is nic
        assert threads() == ["gpunetio soft2 control", "gpunetio soft2 engine", "gpunetio soft2 reports"]
        a, b = Queue(first.create_pd()), Queue(second.create_pd())
        domain = second.create_pd()
        with pytest.raises(InvalidValueError, match="belongs to another context"):
            domain.create_qp(sq_wr=1, send_cq=a.send_cq)
        connect(a, b)
        target = np.zeros(8, np.uint8)
        mr = b.qp.pd.register(target)
        own = a.qp.pd.register(b"together")
        a.post(WRITE, raddr(mr.address, mr.rkey), data(own.address, own.lkey, 8))
        assert a.done.next().opcode == REQ
        assert target.tobytes() == b"together"
        first.close()
        assert (len(nic.qps), len(nic.pds), len(nic.mkeys)) == (1, 2, 1)
        assert b.qp.state == RTS
        second.close()
        assert threads() == []
        with pytest.raises(BadStateError, match=r"^context soft2 is closed$"):
            second.create_pd()
    with verbs.open("soft2") as third:
        assert nic_of(third) is not nic
        assert len(nic_of(third).pds) == 0


def test_reports_can_be_read_after_close(ends):
    a, _ = ends
    a.post(WRITE, raddr(0, 0), data(0, 0x1234, 8))
    assert a.done.next().syndrome == Syndrome.LOCAL_PROT
    nic = a.nic
    a.qp.ctx.close()
    assert [report.reason for report in nic.reports] == [Reason.LKEY_UNKNOWN]
    for call in (nic.pause, nic.resume):
        with pytest.raises(BadStateError, match=f"{nic.name} is closed"):
            call()


def test_closing_a_context_closes_what_was_made_from_it(ctx, pd):
    a, b = Queue(pd), Queue(pd, external_uar=ctx.create_uar())
    connect(a, b)
    mr = pd.register(bytearray(64))
    nic = nic_of(ctx)
    with verbs.open() as other:  # keeps the NIC, to look at it
        ctx.close()
        for handle in (a.qp, a.send_cq, b.qp, b.qp.uar, mr, pd, ctx):
            assert handle.closed
            with pytest.raises(BadStateError, match=rf"^{handle} is closed$"):
                handle.check_open()
        tables = (nic.qps, nic.cqs, nic.srqs, nic.mkeys, nic.pds, nic.umems, nic.uar_pages)
        assert [len(table) for table in tables] == [0] * 7
        assert other.query_port()


def test_order_of_closing(pd, ends):
    a, b = ends
    with pytest.raises(InUseError, match=f"^{a.send_cq} is still used by {a.qp}: close that first$"):
        a.send_cq.close()
    assert not a.send_cq.closed
    a.qp.close()
    a.send_cq.close()
    a.recv_cq.close()
    pd.close()
    assert b.qp.closed


def test_handles_are_not_copied(ctx, pd, ends):
    a, _ = ends
    for handle in (ctx, pd, a.qp, a.send_cq, pd.register(bytearray(8)), ctx.create_uar()):
        for call in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(BadStateError, match=f"^{handle} cannot be pickled"):
                call(handle)
    endpoint = a.qp.endpoint()
    assert pickle.loads(pickle.dumps(endpoint)) == endpoint


# --- forks

FORK = """
    import os
    from gpunetio import verbs
    from gpunetio.jit.launch import observers, running, tell_observers
    from gpunetio.errors import BadStateError
    from nic_rig import REQ, WRITE, Queue, connect, data, raddr

    ctx = verbs.open()
    pd, target = ctx.create_pd(), bytearray(8)
    a, b, mr, uar = Queue(pd), Queue(pd), pd.register(target), ctx.create_uar()
    umem = ctx.register_umem(bytearray(64))

    def write(a, b, mr, text):
        own = a.qp.pd.register(text)
        a.post(WRITE, raddr(mr.address, mr.rkey), data(own.address, own.lkey, len(text)))
        assert a.done.next().opcode == REQ

    tell_observers(+1)
    child = os.fork()
    if child == 0:
        calls = [
            ctx.create_pd, lambda: ctx.create_cq(4), ctx.create_uar, ctx.query_port, ctx.query_gid, ctx.query_device,
            lambda: ctx.register_umem(bytearray(64)), lambda: ctx.provider, lambda: pd.register(bytearray(8)),
            lambda: pd.create_qp(sq_wr=1, send_cq=a.send_cq), lambda: a.qp.state, lambda: a.qp.connect(b.qp),
            a.qp.query, a.qp.reset, a.qp.to_error, a.qp.endpoint,
            *(handle.check_open for handle in (ctx, pd, mr, uar, umem, a.send_cq)),
            lambda: ctx._provider.alloc_pd(), lambda: ctx._provider.general_cmd(bytes(16), 16),
            lambda: ctx._provider.nic.pause(),
        ]
        for call in calls:
            try:
                call()
            except BadStateError as error:
                assert f"in process {os.getppid()}" in str(error), error
            else:
                raise SystemExit(f"{call} works in a forked child")
        assert not observers  # the parent's engine would spin for our kernels
        assert running() == 0  # the kernel is the parent's
        with verbs.open() as mine:  # open anew
            fresh, place = mine.create_pd(), bytearray(8)
            c, d = Queue(fresh), Queue(fresh)
            connect(c, d)
            write(c, d, fresh.register(place), b"children")
            assert place == b"children"
        for handle in (a.qp, mr, pd, ctx):
            handle.close()
            assert not handle.closed  # it is the parent's
        print("child", flush=True)
        raise SystemExit
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    connect(a, b)
    write(a, b, mr, b"parental")
    assert target == b"parental"
    ctx.close()
    print("parent")
"""


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=60, env=environment(), check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_fork():
    assert run(FORK) == "child\nparent\n"


def test_a_program_may_end_without_closing():
    script = """
        from gpunetio import verbs
        from nic_rig import Queue, connect

        one, two = verbs.open("soft0"), verbs.open("soft1")
        a, b = Queue(one.create_pd()), Queue(two.create_pd())
        connect(a, b)
        print("done")
    """
    assert run(script) == "done\n"


# --- states


def test_connect(ends):
    a, b = ends
    for qp, peer in ((a.qp, b.qp), (b.qp, a.qp)):
        attr, _ = qp.query()
        assert (attr.current_state, attr.path_mtu, attr.dest_qp_num) == (RTS, 4096, peer.qpn)
        assert (attr.allow_remote_write, attr.allow_remote_read, attr.allow_remote_atomic) == (True, True, 1)
        assert (attr.max_rd_atomic, attr.max_dest_rd_atomic, attr.ack_timeout, attr.retry_cnt) == (16, 16, 16, 1)
        assert attr.ah_attr is not None
        assert attr.ah_attr.gid == qp.ctx.query_gid()
    assert a.qp.endpoint() == QpEndpoint(a.qp.qpn, a.qp.ctx.query_gid(), 0, 4096, a.qp.psn)
    assert a.qp.endpoint(psn=5).psn == 5


def test_connect_between_nics():
    with verbs.open("soft0") as one, verbs.open("soft1") as two:
        a, b = Queue(one.create_pd()), Queue(two.create_pd())
        a.qp.connect(b.qp.endpoint(psn=7), psn=9)
        b.qp.connect(a.qp.endpoint(psn=9), psn=7)
        assert (a.qp.query()[0].rq_psn, a.qp.query()[0].sq_psn) == (7, 9)
        target = bytearray(5)
        mr = b.qp.pd.register(target)
        own = a.qp.pd.register(b"hello")
        a.post(WRITE, raddr(mr.address, mr.rkey), data(own.address, own.lkey, 5))
        assert a.done.next().opcode == REQ
        assert target == b"hello"


@pytest.mark.host_memory
def test_failed_connect_goes_back_to_reset(ctx, pd):
    a, b = Queue(pd).qp, Queue(pd).qp
    own = re.escape(str(nic_of(ctx).port.addresses[0]))
    with pytest.raises(NotFoundError, match=rf"{ctx.name} has no route to 255\.255\.255\.255"):
        a.connect(QpEndpoint(5, bytes(10) + b"\xff" * 6, 0, 4096))
    assert a.state == RST
    with pytest.raises(InvalidValueError, match=rf"GID ::1 cannot be reached from GID index 0 \({own}\)"):
        a.connect(QpEndpoint(5, bytes(15) + b"\x01", 0, 4096))
    assert a.state == RST
    b.to_error()
    with pytest.raises(BadStateError, match=f"{b} is in state ERR, but connect"):
        a.connect(b)
    assert a.state == RST
    b.reset()
    with pytest.raises(NotFoundError, match=f"port 1 of {ctx.name} has no GID at index 2"):
        a.connect(b, sgid_index=2)
    b.reset()
    a.connect(b, sgid_index=1)
    assert a.query()[0].ah_attr.sgid_index == 1  # type: ignore[union-attr]


def test_states(pd):
    qp = Queue(pd).qp
    ah = verbs.AhAttr(gid=qp.ctx.query_gid(), traffic_class=0x84)
    attr = QpAttr(dest_qp_num=qp.qpn, ah_attr=ah, path_mtu=MtuSize.MTU_512, allow_remote_atomic=QpAtomicType.IB_SPEC)

    def to(state: QpState, mask: int) -> None:
        attr.next_state = state
        qp.modify(attr, M.NEXT_STATE | mask)
        assert qp.state == state

    init = M.PKEY_INDEX | M.PORT_NUM | M.ALLOW_REMOTE_WRITE | M.ALLOW_REMOTE_READ
    rtr = M.RQ_PSN | M.DEST_QP_NUM | M.PATH_MTU | M.AH_ATTR | M.MIN_RNR_TIMER
    rts = M.SQ_PSN | M.ACK_TIMEOUT | M.RETRY_CNT | M.RNR_RETRY
    for _ in range(2):
        to(INIT, init)
        to(INIT, M.ATOMIC_MODE)
        assert qp.query()[0].allow_remote_atomic == QpAtomicType.IB_SPEC
        to(RTR, rtr)
        to(RTS, rts)
        attr.allow_remote_read = True
        to(RTS, M.ALLOW_REMOTE_READ | M.MIN_RNR_TIMER)
        found = qp.query()[0]
        assert (found.allow_remote_read, found.allow_remote_write, found.path_mtu) == (True, False, 512)
        assert found.ah_attr is not None
        assert found.ah_attr.traffic_class == 0x84
        ah.traffic_class = 0x20
        to(RTS, M.AH_ATTR)
        assert qp.query()[0].ah_attr.traffic_class == 0x20  # type: ignore[union-attr]
        ah.traffic_class = 0x84
        to(ERR, 0)
        to(ERR, 0)
        to(RST, 0)
        attr.allow_remote_read = False
        zeros = {"port_num": 0, "ack_timeout": 0, "retry_cnt": 0, "rnr_retry": 0, "min_rnr_timer": 0}
        assert qp.query()[0] == QpAttr(path_mtu=256, **zeros)
    for state in (RTR, RTS):
        with pytest.raises(InvalidValueError, match=f"no transition from RST to {state.name}"):
            qp.modify(QpAttr(next_state=state), M.NEXT_STATE)
    to(ERR, 0)  # from RST
    with pytest.raises(InvalidValueError, match="no transition from ERR to INIT"):
        qp.modify(QpAttr(next_state=INIT), M.NEXT_STATE)


def test_current_state_that_is_not_so(pd):
    qp = Queue(pd).qp
    with pytest.raises(DriverError, match=f"RTR2RTS_QP: QP {qp.qpn:#x} is in RST, not in RTR") as caught:
        qp.modify(
            QpAttr(current_state=RTR, next_state=RTS),
            M.CURRENT_STATE | M.NEXT_STATE | M.SQ_PSN | M.ACK_TIMEOUT | M.RETRY_CNT | M.RNR_RETRY,
        )
    assert (caught.value.status, caught.value.syndrome) == (Status.BAD_QP_STATE, CommandSyndrome.QP_STATE)
    assert caught.value.code == DocaErrorCode.DRIVER


def test_an_error_moves_the_qp_and_reset_brings_it_back(pd, ends):
    a, b = ends
    target = bytearray(8)
    mr, own = pd.register(target), pd.register(b"12345678")
    for _ in range(3):
        a.post(WRITE, raddr(mr.address, mr.rkey ^ 0x55_00), data(own.address, own.lkey, 8))
        cqe = a.done.next()
        assert (cqe.opcode, cqe.syndrome, cqe.vendor) == (REQ_ERR, Syndrome.REMOTE_ACCESS, Reason.RKEY_UNKNOWN)
        assert a.qp.state == ERR
        for end in (a, b):
            end.reset()
            assert not end.record.any()
        connect(a, b)
        target[:] = bytes(8)
        a.post(WRITE, raddr(mr.address, mr.rkey), data(own.address, own.lkey, 8))
        assert a.done.next().opcode == REQ
        assert target == b"12345678"


# --- memory regions


class Mapped:
    """Two pages of which one can go."""

    def __init__(self):
        self.libc = ctypes.CDLL(None)
        self.libc.mmap.restype, self.libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + [
            ctypes.c_int
        ] * 3 + [ctypes.c_long]
        self.libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.nbytes = 2 * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.address = self.libc.mmap(None, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)

    def unmap_second(self) -> None:
        assert self.libc.munmap(self.address + mmap.PAGESIZE, mmap.PAGESIZE) == 0


PAYLOAD = bytes(range(1, 41))
SOURCES = {
    "bytes": lambda: PAYLOAD,
    "bytearray": lambda: bytearray(PAYLOAD),
    "memoryview": lambda: memoryview(b"...." + PAYLOAD + b"....")[4:44],
    "numpy": lambda: np.frombuffer(bytearray(PAYLOAD), np.uint16).reshape(4, 5),
    "ctypes": lambda: (ctypes.c_char * 40).from_buffer_copy(PAYLOAD),
    "DLPack": lambda: OnlyDlpack(np.frombuffer(bytearray(PAYLOAD), np.float64)),
    "HostMemory": lambda: filled(HostMemory(40)),
}


def filled(memory: HostMemory) -> HostMemory:
    memory.array[:40] = np.frombuffer(PAYLOAD, np.uint8)
    return memory


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("iova", [None, 0, 0x7FFF_FFFF_FFFF_FFF0, (1 << 64) - 4096])
def test_bytes_move_from_and_to_memory_of_all_kinds(pd, ends, kind, iova):
    a, _ = ends
    thing = SOURCES[kind]()
    mr = pd.register(thing, iova=iova)
    target = np.zeros(40, np.uint8)
    other = pd.register(target)
    a.post(WRITE, raddr(other.address, other.rkey), data(mr.iova, mr.lkey, 40))
    assert a.done.next().opcode == REQ
    assert target.tobytes() == PAYLOAD
    assert mr.access == (Access.REMOTE_READ if kind in ("bytes", "memoryview") else Access.all())
    target[:] = 0x77
    a.post(WRITE, raddr(mr.iova, mr.rkey), data(other.address, other.lkey, 40))
    cqe = a.done.next()
    if mr.access & Access.REMOTE_WRITE:
        assert cqe.opcode == REQ
        assert ctypes.string_at(mr.address, 40) == b"\x77" * 40
        tensor = thing.tensor if kind == "DLPack" else thing.array if kind == "HostMemory" else thing
        assert memoryview(tensor).tobytes()[:40] == b"\x77" * 40
    else:
        assert (cqe.opcode, cqe.vendor) == (REQ_ERR, Reason.RKEY_RIGHTS)
        assert ctypes.string_at(mr.address, 40) == PAYLOAD


def test_region_outlives_its_owners_names(pd, ends):
    a, _ = ends
    memory = filled(HostMemory(40))
    mr = pd.register(memory)
    memory.close()  # what is registered stays mapped
    del memory
    gc.collect()
    target = np.zeros(40, np.uint8)
    other = pd.register(target)
    a.post(WRITE, raddr(other.address, other.rkey), data(mr.address, mr.lkey, 40))
    assert a.done.next().opcode == REQ
    assert target.tobytes() == PAYLOAD


def test_memory_that_is_not_there(ctx, pd):
    class Nowhere:
        address, nbytes = 0x1000, 64

    mapped = Mapped()
    pd.register(mapped).close()
    mapped.unmap_second()
    for thing in (Nowhere(), mapped):
        with pytest.raises(InvalidValueError, match=rf"^\[{thing.address:#x}, \+{thing.nbytes}\) is not readable"):
            pd.register(thing)
        with pytest.raises(InvalidValueError, match="is not readable and writable"):
            ctx.register_umem(thing)
    assert (len(nic_of(ctx).mkeys), nic_of(ctx).pds[pd.pdn]["users"]) == (0, 0)


def test_gpu_memory_that_the_cpu_cannot_reach(pd):
    class OnGpu:
        __cuda_array_interface__ = {"shape": (64,), "typestr": "|u1", "data": (0x1000, False), "version": 3}  # noqa: RUF012

    with pytest.raises(NotSupportedError, match=r"^\[0x1000, \+64\) is neither memory of this process's CPU nor"):
        pd.register(OnGpu())


def test_not_contiguous(pd):
    for strided in (np.zeros(16)[::2], OnlyDlpack(np.zeros((4, 4))[:, 1]), memoryview(bytes(9))[::3]):
        with pytest.raises(InvalidValueError, match="contiguous"):
            pd.register(strided)


def test_keys_are_random(ctx, pd):
    block = bytearray(64)
    regions = [pd.register(block) for _ in range(200)]
    keys = [mr.lkey for mr in regions]
    assert len({key >> 8 for key in keys}) == 200
    steps = {right - left for left, right in itertools.pairwise(keys)}
    assert len(steps) > 150  # neither counted up nor in a pattern
    assert len({key & 0xFF for key in keys}) > 50
    assert all(mr.rkey == mr.lkey and 0x100 < mr.lkey < 1 << 32 for mr in regions)
    assert len(nic_of(ctx).mkeys) == 200


def test_a_key_ends_with_its_region(pd, ends):
    a, b = ends
    mr, own = pd.register(bytearray(8)), pd.register(bytearray(8))
    key = mr.lkey
    assert key in a.nic.mkeys
    a.post(READ, raddr(mr.address, key), data(own.address, own.lkey, 8))
    assert a.done.next().opcode == REQ
    mr.close()
    assert key not in a.nic.mkeys
    with pytest.raises(NotFoundError, match=f"no key {key:#x}"):
        a.nic.mkeys[key]
    a.post(READ, raddr(mr.address, key), data(own.address, own.lkey, 8))
    assert a.done.next().vendor == Reason.RKEY_UNKNOWN
    for end in (a, b):
        end.reset()
    connect(a, b)
    a.post(WRITE, raddr(own.address, own.rkey), data(mr.address, key, 8))
    assert a.done.next().vendor == Reason.LKEY_UNKNOWN


def test_a_key_is_for_its_domain(ctx, pd, ends):
    a, _ = ends
    foreign, own = ctx.create_pd().register(bytearray(8)), pd.register(bytearray(8))
    a.post(WRITE, raddr(own.address, own.rkey), data(foreign.address, foreign.lkey, 8))
    cqe = a.done.next()
    assert (cqe.syndrome, cqe.vendor) == (Syndrome.LOCAL_PROT, Reason.LKEY_PD)


# --- queues in memory of the user


def test_queues_in_memory_of_the_user(ctx, pd):
    rings, records = HostMemory(1 << 14), HostMemory(mmap.PAGESIZE)
    ring, record = ctx.register_umem(rings), ctx.register_umem(records)
    rings.array[64 : 64 + 64 * 64] = INIT_OP_OWN
    cq = ctx.create_cq(64, external_umem=(ring, 64), external_dbr_umem=(record, 8), overrun=CqOverrun.ENABLE)
    places = {"external_umem": (ring, 0x1400), "external_dbr_umem": (record, 64)}
    a = Queue(pd, 16, 8, 1, cq, cq, **places)
    b = Queue(pd)
    assert (a.qp.rq_address, a.qp.sq_address) == (rings.address + 0x1400, rings.address + 0x1400 + 8 * 16)
    connect(a, b)
    mr, own = pd.register(bytearray(8)), pd.register(bytearray(b"external"))
    for _ in range(40):  # around the rings
        a.post(WRITE, raddr(mr.address, mr.rkey), data(own.address, own.lkey, 8), how="record")
        assert a.done.next().opcode == REQ
    assert ctypes.string_at(mr.address, 8) == b"external"
    assert records.array[64:72].tobytes() == bytes(6) + b"\x00\x28"  # 40 sends
    b.receive(mr_segment := data(mr.address, mr.lkey, 8))
    a.receive(mr_segment)
    a.post(SEND, data(own.address, own.lkey, 8))
    assert b.arrived.next().byte_cnt == 8
    assert a.done.next().opcode == REQ
    b.post(SEND, data(own.address, own.lkey, 8))
    cqe = Completions(cq)
    cqe.ci = a.done.ci
    assert until(cqe.poll, "the receive's CQE").byte_cnt == 8
    with pytest.raises(InUseError, match="is still used by"):
        ring.close()
    odd = ctx.register_umem(memoryview(rings.array)[8:])
    with pytest.raises(DriverError, match=r"^CREATE_QP: CREATE_QP failed .* not a multiple of 64") as caught:
        pd.create_qp(sq_wr=16, send_cq=cq, external_umem=(odd, 0x1400), external_dbr_umem=(record, 128))
    assert caught.value.syndrome == CommandSyndrome.UMEM_ALIGNMENT


def test_a_nic_whose_address_is_taken_opens_twice(monkeypatch):
    """It has another address than the port that both opens ask for."""
    monkeypatch.setattr(soft, "claimant", lambda address: 1 if address == "127.0.0.6" else None)
    first, second = (soft.open_beside_others("soft5", PortConfig()) for _ in range(2))
    assert first.nic is second.nic
    assert str(first.nic.port.addresses[0]) != "127.0.0.6"
    first.close()
    second.close()


@pytest.mark.parametrize("other", [lambda: soft.open_beside_others("soft0", PortConfig()), soft.open_first])
def test_a_nic_that_another_thread_is_opening_is_not_another_processs(other, monkeypatch):
    """Its address is claimed before it is listed."""
    claimed, looked = threading.Event(), threading.Event()
    claimant, join = soft.claimant, SoftNic.join

    def look(address):
        try:
            return claimant(address)
        finally:
            looked.set()

    def join_late(nic, peer):
        claimed.set()
        looked.wait(0.5)  # in vain if the other thread waits, as it should
        join(nic, peer)

    with contextlib.ExitStack() as undo:
        peer = soft.open_device("soft4")
        undo.callback(peer.close)
        monkeypatch.setattr(soft, "claimant", look)
        monkeypatch.setattr(SoftNic, "join", join_late)
        pool = undo.enter_context(ThreadPoolExecutor(1))
        first = pool.submit(soft.open_device, "soft0")
        undo.callback(lambda: first.result().close())
        assert claimed.wait(20)
        second = other()
        undo.callback(second.close)
        assert first.result().nic is second.nic
