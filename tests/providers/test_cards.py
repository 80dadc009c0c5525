"""Everything through the provider of cards, with the stand-in in place of rdma-core and a card.

The kit of checks, the samples, and the benchmark programs: each as a user starts it, with `-d mlx5_0`.
"""

import ctypes
import errno
import functools
import logging
import os
import socket
import subprocess
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gpunetio import providers, testing, verbs
from gpunetio.bench.options import BENCHMARKS
from gpunetio.enums import Access, AsyncEventType, PortState, QpState, QpType, UarAllocationType, WrOpcode
from gpunetio.errors import (
    BadStateError,
    DeviceFatalError,
    DriverError,
    InUseError,
    InvalidValueError,
    NoMemoryError,
    NotFoundError,
    NotPermittedError,
    NotSupportedError,
)
from gpunetio.formats.commands import Opcode, Status
from gpunetio.formats.wqe import AV_SEG
from gpunetio.memory import PAGE, HostMemory
from gpunetio.providers.mlx5 import device as mlx5_device
from gpunetio.providers.mlx5 import structs as s
from gpunetio.providers.mlx5.provider import adopt_context
from gpunetio.testing import Outcome
from gpunetio.verbs import AhAttr, RecvWr, SendWr, Sge
from neighbour import address as own_address
from nic_rig import until
from repository import environment
from stand_in import StandIn, build, installed
from stand_in.building import VARIABLE, why_not
from tensors import OnlyCuda
from tools import Tool, error_line, running

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


# --- the kit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer, only", [
    ("mlx5_0", ["device", "objects", "send", "write", "read"]),
    ("mlx5_1", ["send", "fetch_and_add", "wrong_remote_key", "one_event_for_a_request"]),
    pytest.param("mlx5_0", None, marks=pytest.mark.slow),
    pytest.param("mlx5_1", None, marks=pytest.mark.slow),
])
def test_conformance(stand_in: StandIn, peer, only):
    """No check fails, and none finds that something is not supported."""
    report = testing.run(lambda: verbs.open("mlx5_0"), lambda: verbs.open(peer), only)
    assert [result.line() for result in report.results if result.outcome is not Outcome.PASSED] == []
    assert len(report.results) == len(testing.checks(only))


# --- programs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def card(stand_in_file: Path, request: pytest.FixtureRequest) -> Callable[..., Tool]:
    """Starts `gpunetio` with these arguments in a process whose mlx5_0 has an address of its own."""
    if request.config.getoption("--stand-in"):
        pytest.skip("one stand-in is enough")
    start = functools.partial(
        subprocess.Popen, env=environment(**{VARIABLE: str(stand_in_file)}), stdin=subprocess.DEVNULL
    )

    def run(*args: object, address: str | None = None) -> Tool:
        program = ("-m", "stand_in", "--address", address or own_address())
        return Tool(*args, "-d", "mlx5_0", program=program, start=start)

    return run


def finish(*tools: Tool) -> list[str]:
    """What they have written, when all ended well and did nothing that would crash a real library."""
    with running(*tools):
        ends = [tool.end() for tool in tools]
    for status, _, err in ends:
        assert (status, err) == (0, "")
    return [out for _, out, _ in ends]


@pytest.mark.slow
@pytest.mark.parametrize("name, send_dbr", [*((name, 0) for name in BENCHMARKS), ("put_bw", 1), ("put_counter_bw", 2)])
def test_benchmarks(card, name, send_dbr):
    options = ("--loopback", "--target", "cpu", "-i", 64, "-s", 64, "-s", 4096, "-r", send_dbr)
    (out,) = finish(card(name, *options))
    assert " Device  : mlx5_0, GID index 0" in out
    assert out.count("Validation successful! Data received correctly.") == 1


def test_devices(card):
    (out,) = finish(card("devices", address="127.99.98.97"))
    assert "vendor_part_id:\t\t\t4129" in out
    assert "node_guid:\t\t\t0200:7fff:fe63:6261" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["put_bw", "get_bw", "twosided_bw", "put_signal_lat"])
def test_benchmarks_of_two_processes(card, name, port):
    where, options = own_address(), ("--target", "cpu", "--port", port, "-i", 64, "-s", 4096)
    server = card(name, *options, address=where)
    with running(server):
        server.until(f"Waiting for a client on {where} port {port}")
        for out in finish(server, card(name, *options, "-c", where)):
            assert "Validation successful! Data received correctly" in out


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["Send", "Write", "Read"])
def test_verbs_server_client(card, operation, port):
    where, options = own_address(), ("-ro", operation, "-n", 5, "--port", port)
    server = card("verbs_server_client", *options, address=where)
    with running(server):
        server.until("Waiting for a client")
        for out in finish(server, card("verbs_server_client", *options, "-c", where, "-b")):
            assert "Sample finished successfully" in out


@pytest.mark.slow
def test_pingpong(card, port):
    where, options = own_address(), ("-p", port, "-n", 100, "-c")
    server = card("pingpong", *options, address=where)
    with running(server):
        server.until("local address")
        for out in finish(server, card("pingpong", *options, where)):
            assert "100 iters in" in out


@pytest.mark.slow
def test_verbs_wait_cq_wr(card):
    (out,) = finish(card("verbs_wait_cq_wr"))
    assert "Data in buffer3 is identical to the data in buffer1" in out


@pytest.mark.slow
def test_the_dpa_is_the_software_nics(card):
    with running(card("verbs_dpa")) as (tool,):
        status, out, err = tool.end()
    assert (status, out) == (1, "")
    assert error_line(err).endswith("mlx5_0 has no DPA: export its queue pairs to a Gpu, or open a software NIC")


# --- what a card and its driver refuse -------------------------------------------------------------------------------


def test_devices_are_listed_before_the_software_ones(stand_in: StandIn):
    names = [device.name for device in providers.device_list()]
    assert names == [*(f"mlx5_{n}" for n in range(8)), *(f"soft{n}" for n in range(8))]
    assert providers.device_list()[0].description == "card, ConnectX-7 (MT4129), firmware 28.43.1014"
    stand_in.devices = 0
    assert providers.device_list()[0].name == "soft0"
    with pytest.raises(NotFoundError, match=r"no device 'mlx5_0'; there are: soft0, .*libibverbs finds no devices"):
        verbs.open("mlx5_0")


def test_without_a_name_the_first_card_with_an_active_port_opens(stand_in: StandIn):
    with verbs.open("mlx5_0") as first:
        stand_in.nic("mlx5_0").set_link(False)
        with verbs.open() as ctx:
            assert (first.query_port().state, ctx.name) == (PortState.DOWN, "mlx5_1")


def test_a_port_that_is_down(stand_in: StandIn):
    with verbs.open("mlx5_0") as ctx:
        pd = ctx.create_pd()
        qp = pd.create_qp(sq_wr=4, send_cq=ctx.create_cq(8))
        stand_in.nic("mlx5_0").set_link(False)
        with pytest.raises(BadStateError, match=r"port 1 of mlx5_0 is not active .DOWN.*: check its cable"):
            qp.connect(qp)
        assert qp.state is QpState.RST
        stand_in.nic("mlx5_0").set_link(True)
        qp.connect(qp)


def test_a_device_that_may_not_be_opened(stand_in: StandIn):
    stand_in.fail("ibv_open_device", errno.EACCES)
    with pytest.raises(NotPermittedError, match="no permission for /dev/infiniband/uverbs3"):
        verbs.open("mlx5_3")


def test_datagrams(stand_in: StandIn):
    """The address vector is what libmlx5 shows of an `ibv_ah`."""
    with verbs.open("mlx5_0") as one, verbs.open("mlx5_1") as other:
        cqs, mrs, qps = [], [], []
        for ctx in (one, other):
            pd, cq = ctx.create_pd(), ctx.create_cq(8)
            qp = pd.create_qp(sq_wr=4, rq_wr=4, send_cq=cq, receive_cq=cq, max_inline_data=32, qp_type=QpType.UD)
            qp.to_rts(qkey=77)
            cqs.append(cq)
            mrs.append(pd.register(bytearray(1000)))
            qps.append(qp)
        attr = AhAttr(gid=other.query_gid(), sl=3, traffic_class=0x10, hop_limit=9, flow_label=0xABCDE)
        ah = qps[0].pd.create_ah(attr)
        av = np.frombuffer(ah.av, AV_SEG.dtype)[0]
        assert bytes(av["rmac"]) == one.provider.resolve_mac(1, 0, attr.gid)
        assert (av["tclass"], av["hop_limit"], bytes(av["rgid"])) == (0x10, 9, bytes(attr.gid))
        assert av["grh_gid_fl"] == 0xABCDE
        qps[1].post_recv(RecvWr(sges=[Sge(mrs[1].address, 1000, mrs[1].lkey)]))
        qps[0].post_send(
            SendWr(opcode=WrOpcode.SEND, inline=b"from a card", ah=ah, remote_qpn=qps[1].qpn, remote_qkey=77)
        )
        (done,) = until(cqs[1].poll, "the datagram")
        assert (done.byte_len, done.src_qp) == (40 + 11, qps[0].qpn)
        ah.close()


def test_a_number_is_another_objects_as_soon_as_it_is_free(stand_in: StandIn):
    """Another thread's, while the thread that has freed it waits for Python's lock."""
    with verbs.open("mlx5_0") as ctx:
        device = ctx.provider
        pdn = device.alloc_pd()
        free, pointer = device._held["PD", pdn]
        others = object()

        def free_and_lose_the_lock(pointer: object) -> int:
            device.hold("PD", pdn, free, others)
            return free(pointer)

        device._held["PD", pdn] = free_and_lose_the_lock, pointer
        device.dealloc_pd(pdn)
        assert device._held.pop(("PD", pdn)) == (free, others)


def test_an_empty_gid_table(stand_in: StandIn):
    stand_in.has_gids = False
    with verbs.open("mlx5_0") as ctx:
        assert [ctx.query_gid(1, index) for index in range(3)] == [bytes(16)] * 3
        qp = ctx.create_pd().create_qp(sq_wr=4, send_cq=ctx.create_cq(8))
        with pytest.raises(NotFoundError, match="port 1 of mlx5_0 has no GID at index 0: choose one that"):
            qp.connect(qp)


@pytest.mark.parametrize("tells_status", [True, False], ids=["new kernel", "old kernel"])
def test_a_command_that_the_firmware_refuses(stand_in: StandIn, tells_status):
    stand_in.tells_status = tells_status
    with verbs.open("mlx5_0") as ctx:
        stand_in.refuse(Status.BAD_PARAM, 0xABCDE, Opcode.CREATE_CQ)
        with pytest.raises(DriverError) as caught:
            ctx.create_cq(4)
        told = (caught.value.status, caught.value.syndrome)
        assert told == ((Status.BAD_PARAM, 0xABCDE) if tells_status else (0, 0))
        ctx.create_cq(4)


@pytest.mark.parametrize("function", [
    "ibv_alloc_pd", "mlx5dv_init_obj", "ibv_reg_mr", "mlx5dv_devx_umem_reg_ex", "mlx5dv_devx_query_eqn",
    "mlx5dv_devx_obj_create", "mlx5dv_devx_obj_query", "mlx5dv_devx_obj_modify", "mlx5dv_devx_general_cmd",
    "ibv_create_ah", "mlx5dv_devx_create_event_channel",
])
@pytest.mark.parametrize("code, error", [(errno.EBUSY, InUseError), (errno.EOPNOTSUPP, NotSupportedError)])
def test_calls_that_fail(stand_in: StandIn, function, code, error):
    """Each failure is told, takes nothing along, and the same goes well the next time."""

    def work() -> None:
        with ExitStack() as stack:
            enter = stack.enter_context
            pd = enter(ctx.create_pd())
            enter(pd.register(memory))
            cq = enter(ctx.create_cq(8, channel=enter(ctx.create_comp_channel())))
            qp = enter(pd.create_qp(sq_wr=4, rq_wr=4, send_cq=cq, receive_cq=cq))
            qp.connect(qp)
            ctx.__dict__.pop("_device", None)  # it is asked once
            ctx.query_device()

    def counts() -> list[int]:
        nic = stand_in.nic("mlx5_0")
        tables = nic.pds, nic.mkeys, nic.cqs, nic.qps, nic.umems, nic.control.channels
        return [len(table) for table in tables]

    memory = bytearray(4096)
    with verbs.open("mlx5_0") as ctx:
        work()
        before = counts()
        stand_in.fail(function, code)
        with pytest.raises(NotFoundError if function == "ibv_create_ah" else error):
            work()
        assert counts() == before
        work()


def test_a_device_that_fails(stand_in: StandIn):
    with verbs.open("mlx5_0") as ctx:
        pd = ctx.create_pd()
        stand_in.break_down("mlx5_0")
        event = ctx.get_async_event(10)
        assert event is not None
        event.ack()
        assert event.type is AsyncEventType.DEVICE_FATAL
        for call in (ctx.create_pd, lambda: ctx.create_cq(4), lambda: pd.register(bytearray(8))):
            with pytest.raises(DeviceFatalError):
                call()
    with verbs.open("mlx5_0") as ctx:  # it is back
        ctx.create_pd()


def test_a_fork(stand_in: StandIn):
    """The child's handles say what to do, close nothing of the parent's, and the parent goes on."""
    with verbs.open("mlx5_0") as ctx:
        cq = ctx.create_cq(4)
        before = stand_in.calls.copy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, since Python 3.12
            child = os.fork()
        if child == 0:
            told = 0
            for call in (ctx.create_pd, lambda: cq.poll()):
                try:
                    call()
                except BadStateError as error:
                    told += "open anew, or use spawn" in str(error)
            ctx.close()
            os._exit(told if stand_in.calls == before else 9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        ctx.create_pd().close()


@pytest.mark.parametrize("code", [errno.ENODEV, errno.ENXIO, errno.ENOLINK])
def test_other_words_of_a_device_that_is_gone(stand_in: StandIn, code):
    with verbs.open("mlx5_0") as ctx:
        stand_in.fail("mlx5dv_devx_obj_create", code)
        with pytest.raises(DeviceFatalError):
            ctx.create_cq(4)


def test_a_refusal_that_looks_like_a_dead_device(stand_in: StandIn):
    """Before Linux 5.18 the firmware's "internal error", or a length that it does not know, is EIO and nothing else."""
    with verbs.open("mlx5_0") as ctx:
        stand_in.fail("mlx5dv_devx_obj_create", errno.EIO)
        with pytest.raises(DriverError, match=r"INTERNAL_ERR or BAD_SYS_STATE or BAD_INPUT_LEN .* does not hand on"):
            ctx.create_cq(4)
        stand_in.fail("ibv_reg_mr", errno.EIO)
        with pytest.raises(DriverError, match="the firmware or the kernel refuses it"):
            ctx.create_pd().register(bytearray(8))
        stand_in.fail("mlx5dv_devx_obj_create", errno.ENOMEM)
        with pytest.raises(DriverError, match="EXCEED_LIM"):
            ctx.create_cq(4)


def test_channels_of_a_device_that_was_taken_away(stand_in: StandIn, monkeypatch):
    """Its descriptor stays readable with nothing to read: who waits must not wait for ever."""
    with verbs.open("mlx5_0") as ctx:
        channel = ctx.create_comp_channel()
        assert channel.get_event(0) is None
        ours, theirs = socket.socketpair()
        theirs.close()
        pointer = ctx.provider._channels[-1].pointer  # type: ignore[attr-defined]
        fd, pointer.contents.fd = pointer.contents.fd, ours.fileno()
        with pytest.raises(DeviceFatalError):
            channel.get_event(10)
        pointer.contents.fd = fd
        ours.close()


def test_each_context_on_one_device_hears_of_the_port(stand_in: StandIn):
    with verbs.open("mlx5_0") as ctx, verbs.import_context(ctx.provider) as other:
        stand_in.nic("mlx5_0").set_link(False)
        for one in (ctx, other):
            event = one.get_async_event(10)
            assert event is not None
            assert event.type is AsyncEventType.PORT_ERR
            assert one.get_async_event(0) is None


def test_events_of_a_borrowed_context_are_its_owners(stand_in: StandIn):
    with verbs.open("mlx5_0") as owner:
        address = ctypes.addressof(owner.provider.context.contents)  # type: ignore[attr-defined]
        provider = adopt_context(address)
        with verbs.import_context(provider) as ctx:
            stand_in.nic("mlx5_0").set_link(False)
            assert ctx.get_async_event(0.05) is None
            event = owner.get_async_event(10)
            assert event is not None
            assert event.type is AsyncEventType.PORT_ERR
            ctx.create_cq(4).close()
        provider.close()
        owner.create_cq(4).close()


def test_events_that_the_firmware_keeps_to_itself(stand_in: StandIn):
    with verbs.open("mlx5_0") as ctx:
        channel = ctx.create_comp_channel()
        stand_in.fail("mlx5dv_devx_subscribe_devx_event", errno.EINVAL)
        cq = ctx.create_cq(4, channel=channel)  # without CQ_ERR
        cq.close()
        assert ctx.provider._channels[0].told == {}  # type: ignore[attr-defined]


def test_a_bad_card_does_not_end_the_choice(stand_in: StandIn):
    stand_in.fail("ibv_query_device", errno.EINVAL)
    with verbs.open() as ctx:
        assert ctx.name == "mlx5_1"


def test_umems_of_an_older_kernel(stand_in: StandIn):
    with verbs.open("mlx5_0") as ctx:
        stand_in.fail("mlx5dv_devx_umem_reg_ex", errno.EPROTONOSUPPORT)
        ctx.create_cq(4).close()
        assert stand_in.calls["mlx5dv_devx_umem_reg"] == 1


def test_two_registers_of_a_blueflame_page(stand_in: StandIn, monkeypatch):
    """libmlx5 gives each page twice, with other registers: each is freed, and by itself."""
    pages = [s.mlx5dv_devx_uar(reg_addr=0x10800 + 0x200 * n, base_addr=0x10000, page_id=7) for n in range(2)]
    pointers = [ctypes.pointer(page) for page in pages]
    freed: list[int] = []
    with verbs.open("mlx5_0") as ctx:
        library = SimpleNamespace(
            mlx5dv_devx_alloc_uar=lambda context, kind: pointers.pop(0),
            mlx5dv_devx_free_uar=lambda uar: freed.append(uar.contents.reg_addr),
        )
        with monkeypatch.context() as patch:
            patch.setattr(ctx.provider, "mlx5", library)
            first, second = (ctx.create_uar(UarAllocationType.BLUEFLAME) for _ in range(2))
            first.close()
            assert freed == [0x10800]
            second.close()
        assert freed == [0x10800, 0x10A00]


def test_non_cached_uars_are_one_page(stand_in: StandIn):
    with verbs.open("mlx5_0") as ctx:
        uars = [ctx.create_uar(UarAllocationType.NONCACHE) for _ in range(3)]
        assert len({uar.page_id for uar in uars}) == 1
        for uar in uars:
            uar.close()
        stand_in.dedicated_uars = False
        with pytest.raises(NotSupportedError, match="NONCACHE_DEDICATED"):
            ctx.create_uar(UarAllocationType.NONCACHE_DEDICATED)


@pytest.mark.parametrize("iova, at", [(8, 0), (0, 64), (PAGE + 8, 16)])
def test_an_iova_that_no_card_maps(stand_in: StandIn, iova, at):
    memory = HostMemory(PAGE)
    with verbs.open("mlx5_0") as ctx:
        pd = ctx.create_pd()
        with pytest.raises(InvalidValueError, match=f"iova = {iova:#x} for memory at .* same offset in a page"):
            pd.register(memoryview(memory.array)[at:], iova=iova)
        pd.register(memoryview(memory.array)[at:], iova=at).close()
    memory.close()


def test_gpu_memory_without_dmabufs(stand_in: StandIn, monkeypatch, caplog):
    """Then its address is tried, for which nvidia-peermem must be loaded; the log keeps nobody's memory alive."""
    monkeypatch.setattr(mlx5_device, "is_accessible", lambda *args: False)
    caplog.set_level(logging.INFO, "gpunetio")
    memory = HostMemory(PAGE)
    with verbs.open("mlx5_0") as ctx:
        pd, tensor = ctx.create_pd(), OnlyCuda(memory.array)
        alive, mr = weakref.ref(tensor), pd.register(tensor)
        assert "no dmabuf of a region of 4096 bytes" in caplog.text
        assert "mapping a region of 4096 bytes" in caplog.text
        del tensor
        assert alive() is not None
        mr.close()
        assert alive() is None
        stand_in.fail("ibv_reg_mr", errno.EFAULT)
        with pytest.raises(NotSupportedError, match=r"which the kernel cannot pin: load nvidia-peermem"):
            pd.register(OnlyCuda(memory.array))
    memory.close()


def test_an_older_rdma_core(stand_in: StandIn, tmp_path):
    """Without dmabufs, other iovas and UMEMs of chosen pages: what does not need those works."""
    missing = ("ibv_reg_dmabuf_mr", "ibv_reg_mr_iova2", "mlx5dv_devx_umem_reg_ex")
    with installed(build(tmp_path, missing)) as older, verbs.open("mlx5_0") as ctx:
        pd, cq = ctx.create_pd(), ctx.create_cq(8)
        qp = pd.create_qp(sq_wr=4, send_cq=cq)
        qp.connect(qp)
        pd.register(bytearray(64)).close()
        with pytest.raises(NotSupportedError, match=r"no ibv_reg_mr_iova2@IBVERBS_1\.8, which rdma-core has since"):
            pd.register(HostMemory(PAGE), iova=0)
        assert older.calls["mlx5dv_devx_umem_reg"] > 0
        assert not older.complaints


def test_a_library_that_is_no_rdma_core(stand_in: StandIn, tmp_path):
    older = build(tmp_path, ["ibv_alloc_pd"])
    with installed(older), pytest.raises(NotFoundError, match=r"no ibv_alloc_pd@IBVERBS_1\.1"):
        verbs.open("mlx5_0")


# --- what changes, and when ------------------------------------------------------------------------------------------


def writer(ctx: verbs.Context, cq: verbs.CQ) -> Callable[[int], None]:
    """A queue pair connected to itself, and a function that sends so many WRITEs of no bytes."""
    qp = ctx.create_pd().create_qp(sq_wr=64, send_cq=cq)
    qp.connect(qp)

    def send(count: int) -> None:
        qp.post_send(*(verbs.SendWr(opcode=WrOpcode.RDMA_WRITE, wr_id=number) for number in range(count)))

    return send


def polled(cq: verbs.CQ, count: int) -> list[verbs.Completion]:
    found: list[verbs.Completion] = []
    until(lambda: found.extend(cq.poll(count - len(found))) or len(found) == count, f"{count} completions")
    return found


@pytest.mark.parametrize("cqe_size", [64, 128])
def test_a_cq_is_resized_while_completions_wait(stand_in: StandIn, cqe_size):
    with verbs.open("mlx5_0") as ctx:
        cq = ctx.create_cq(8, cqe_size=cqe_size)
        send = writer(ctx, cq)
        send(5)
        assert [done.wr_id for done in polled(cq, 2)] == [0, 1]
        until(lambda: cq._arrived(8) == 3, "what is left")
        cq.resize(30)
        assert cq.query().cqe == 32
        assert [done.wr_id for done in polled(cq, 3)] == [2, 3, 4]
        send(20)
        assert [done.wr_id for done in polled(cq, 20)] == list(range(20))


def test_timestamps_of_a_card_become_the_time_of_day(stand_in: StandIn):
    with verbs.open("mlx5_0") as ctx:
        cq = ctx.create_cq(8)
        writer(ctx, cq)(1)
        (done,) = polled(cq, 1)
        assert done.timestamp is not None
        assert done.timestamp <= ctx.raw_clock()
        assert abs(ctx.query_clock().ns(done.timestamp) - time.time_ns()) < 60 * 10**9


def test_a_region_of_a_card_changes(stand_in: StandIn):
    before, after = bytearray(64), bytearray(b"after" * 20)
    with verbs.open("mlx5_0") as ctx:
        pd = ctx.create_pd()
        mr = pd.register(before)
        mr.reregister(after, pd=ctx.create_pd(), access=Access.LOCAL_WRITE)
        row = stand_in.nic("mlx5_0").mkeys[mr.lkey]
        assert (int(row["iova"]), int(row["nbytes"]), int(row["pdn"])) == (mr.address, 100, mr.pd.pdn)
        assert int(row["access"]) == Access.LOCAL_WRITE
        with pytest.raises(InvalidValueError):
            mr.reregister(0x1000, nbytes=8, access=Access.REMOTE_WRITE)
        stand_in.fail("ibv_rereg_mr", errno.ENOMEM)
        with pytest.raises(NoMemoryError):
            mr.reregister(access=Access.LOCAL_READ)


def test_gpu_memory_does_not_go_into_a_region_that_there_is(stand_in: StandIn):
    with verbs.open("mlx5_0") as ctx, pytest.raises(NotSupportedError, match="register a new region"):
        ctx.create_pd().register(bytearray(64)).reregister(
            OnlyCuda(np.zeros(64, np.uint8), data=(0x7F00_0000_0000, False))
        )


def test_a_card_tells_its_speed_and_what_its_cq_suffers(stand_in: StandIn):
    with verbs.open("mlx5_0") as ctx:
        assert ctx.query_port().gbps == 10
        cq = ctx.create_cq(4)
        writer(ctx, cq)(8)
        event = ctx.get_async_event(10)
        assert event is not None
        event.ack()
        assert (event.type, event.element, event.syndrome) == (AsyncEventType.CQ_ERR, cq, 1)


def test_srqs_of_cards_stay_as_they_are(stand_in: StandIn):
    with verbs.open("mlx5_0") as ctx, pytest.raises(NotSupportedError, match="mlx5_0 does not resize"):
        ctx.create_pd().create_srq(4).modify(max_wr=8)
