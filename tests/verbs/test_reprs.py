"""What `repr()` tells: which object it is, what matters of it, and whether it is closed."""

import enum
import inspect
import re
from collections.abc import Iterator

import pytest

import gpunetio as gn
from gpunetio import device as dev
from gpunetio import verbs
from gpunetio.jit.cuda_launch import CudaLaunch
from gpunetio.jit.host_threads import HostLaunch
from gpunetio.memory import HostMemory

pytestmark = pytest.mark.usefixtures("kept_by_contexts")


@gn.kernel
def posting(qp, value):
    dev.lane_id()


@pytest.fixture(scope="module")
def ctx() -> Iterator[gn.Context]:
    with gn.open("soft0") as ctx:
        yield ctx


@pytest.fixture(scope="module")
def pd(ctx) -> verbs.PD:
    return ctx.create_pd()


def public_classes() -> list[type]:
    """The classes that users meet, without exceptions and enumerations."""
    found = {getattr(module, name) for module in (gn, verbs) for name in module.__all__}
    found |= {HostMemory, type(posting), HostLaunch, CudaLaunch}
    classes = [one for one in found if inspect.isclass(one) and not issubclass(one, (enum.Enum, BaseException))]
    return sorted(classes, key=lambda one: one.__name__)


@pytest.mark.parametrize("kind", public_classes(), ids=lambda kind: kind.__name__)
def test_no_public_object_is_an_object_at_some_address(kind):
    assert kind.__repr__ is not object.__repr__


def test_contexts(ctx):
    assert repr(ctx) == "<context soft0, software NIC>"
    assert repr(ctx.provider) == "<software NIC soft0>"
    assert repr(ctx.provider.nic).startswith("<software NIC soft0, 127.0.0.")  # type: ignore[attr-defined]
    assert repr(ctx.async_events) == "<asynchronous events of soft0>"
    assert repr(ctx.devx) == "<DEVX of context soft0>"


def test_memory(ctx, pd):
    memory = HostMemory(4096)
    assert repr(memory) == f"<4096 bytes of host memory, at {memory.address:#x}>"
    mr = pd.register(memory, gn.Access.LOCAL_WRITE | gn.Access.REMOTE_READ)
    where = f"4096 bytes at {memory.address:#x}"
    assert repr(mr) == f"<MR {mr.lkey:#x} of soft0, {where}, LOCAL_WRITE and REMOTE_READ>"
    umem = ctx.register_umem(memory)
    assert repr(umem) == f"<UMEM {umem.umem_id:#x} of soft0, {where}, host memory>"
    mr.close()
    assert repr(mr) == f"<MR {mr.lkey:#x} of soft0, closed>"
    assert "LOCAL_READ>" in repr(pd.register(bytes(8), gn.Access.LOCAL_READ))


def test_queues(ctx, pd):
    uar = ctx.create_uar(gn.enums.UarAllocationType.NONCACHE)
    assert repr(uar) == f"<UAR {uar.page_id:#x} of soft0, NONCACHE, register at {uar.reg_addr:#x}>"
    cq, srq = ctx.create_cq(16), pd.create_srq(4)
    assert repr(cq) == f"<CQ {cq.cqn:#x} of soft0, 16 entries>"
    assert repr(srq) == f"<SRQ {srq.srqn:#x} of soft0, 8 entries, LINKED_LIST>"
    qp = pd.create_qp(sq_wr=4, rq_wr=2, send_cq=cq, receive_cq=cq)
    assert repr(qp) == f"<QP {qp.qpn:#x} of soft0, RC, 4 sends, 2 receives>"
    assert str(qp) == f"QP {qp.qpn:#x} of soft0"  # in messages
    shared = pd.create_qp(receive_cq=cq, srq=srq, qp_type=gn.QpType.UC)
    assert repr(shared) == f"<QP {shared.qpn:#x} of soft0, UC, receives from {srq}>"


@pytest.mark.host_memory
def test_a_gpu_and_what_it_has(pd):
    with gn.Gpu("host") as gpu:
        assert repr(gpu) == "Gpu('host', target='cpu')"
        memory, service = gpu.alloc(128), gpu.create_service()
        assert re.fullmatch(r"<128 bytes of GPU memory of GPU host, at 0x[0-9a-f]+>", repr(memory))
        assert repr(service) == "<proxy service of 0 queues>"
        queues = gpu.export_qps([gpu.create_qp(pd), gpu.create_qp(pd)])
        assert repr(queues) == "<array of 2 exported QPs on GPU host>"
        assert "its rings in host memory" in repr(queues[0])
    assert repr(gpu) == "Gpu('host', target='cpu', closed)"
    assert repr(memory) == "<128 bytes of GPU memory of GPU host, closed>"
    assert repr(service) == "<proxy service of 0 queues, closed>"
    assert repr(queues) == "<array of 2 exported QPs on GPU host, closed>"


def test_kernels_and_their_launches():
    assert repr(posting) == "<kernel posting(qp, value)>"
    with gn.Gpu("host") as gpu:
        launch = posting[1, 2, gpu](0, 0)
        assert launch.wait(timeout=60)
    assert repr(launch) == "<launch of posting on 2 host threads, ended>"
