"""Numbers that a device announces: each is tried at its limit, where it must work, and beyond, where it is refused."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from gpunetio import verbs
from gpunetio.enums import QpType, WcStatus, WrOpcode
from gpunetio.errors import InvalidValueError, NotSupportedError
from gpunetio.verbs import PD, AhAttr, RecvWr, SendWr, Sge
from nic_rig import Buffer, until

pytestmark = pytest.mark.usefixtures("kept_by_contexts")
TYPES = [QpType.RC, QpType.UC, QpType.UD]


@pytest.fixture(scope="module")
def pd() -> Iterator[PD]:
    with verbs.open("soft0") as ctx:
        yield ctx.create_pd()


def ends(pd: PD, kind: QpType, **init: int) -> tuple[verbs.QP, verbs.QP]:
    """Two connected queue pairs of a type."""
    cq = pd.ctx.create_cq(64)
    a, b = (
        pd.create_qp(**{"sq_wr": 4, "rq_wr": 4, **init}, send_cq=cq, receive_cq=cq, qp_type=kind) for _ in range(2)
    )
    if kind.datagrams:
        a.to_rts(qkey=5)
        b.to_rts(qkey=5)
    else:
        a.connect(b)
    return a, b


def send(a: verbs.QP, b: verbs.QP, request: SendWr, buffer: Buffer) -> None:
    """Send to the other end, and wait for both completions."""
    if a.type.datagrams:
        ah = a.pd.create_ah(AhAttr(gid=a.ctx.query_gid()))
        request = replace(request, ah=ah, remote_qpn=b.qpn, remote_qkey=5)
    b.post_recv(RecvWr(sges=[Sge(buffer.address, buffer.nbytes, buffer.key)]))
    a.post_send(request)
    found: list[verbs.Completion] = []
    assert a.send_cq
    cq = a.send_cq
    until(lambda: found.extend(cq.poll()) or len(found) == 2, "both completions")
    assert [one.status for one in found] == [WcStatus.SUCCESS] * 2
    for qp in (a, b):
        qp.close()


# A WQE has 63 segments of 16 bytes at most: `ds` has 6 bits (PRM, control segment; DPDK's MLX5_DSEG_MAX). Before the
# bytes are the control segment, a remote address or the 48 bytes of an address vector, and a length of 4 bytes.
MOST_INLINE = {QpType.RC: 1008 - 16 - 16 - 4, QpType.UC: 1008 - 16 - 16 - 4, QpType.UD: 1008 - 16 - 48 - 4}


@pytest.mark.parametrize("kind", TYPES)
def test_inline_data(pd, kind):
    """What is granted arrives, from one block of 64 bytes before the most on, and more is refused."""
    buffer, most = Buffer(pd, 2048), MOST_INLINE[kind]
    granted = set()
    for asked in range(most - 64, most + 1, 3):
        a, b = ends(pd, kind, max_inline_data=asked)
        nbytes = a.init_attr.max_inline_data
        assert asked <= nbytes <= most
        if nbytes in granted:
            continue
        granted.add(nbytes)
        payload = (np.arange(nbytes) % 251).astype(np.uint8).tobytes()
        buffer.bytes[:] = 0
        send(a, b, SendWr(opcode=WrOpcode.SEND, inline=payload), buffer)
        header = 40 if kind.datagrams else 0
        assert buffer.bytes[header : header + nbytes].tobytes() == payload
    assert most in granted
    with pytest.raises(InvalidValueError, match="at most 1008"):
        pd.create_qp(sq_wr=4, send_cq=pd.ctx.create_cq(4), qp_type=kind, max_inline_data=most + 1)


@pytest.mark.parametrize("kind", TYPES)
def test_scatter_and_gather(pd, kind):
    device, buffer = pd.ctx.query_device(), Buffer(pd, 4096)
    most = device.max_sge
    a, b = ends(pd, kind, send_max_sges=most, receive_max_sges=device.max_wqe_sz_rq // 16)
    send(a, b, SendWr(opcode=WrOpcode.SEND, sges=[Sge(buffer.address + i, 1, buffer.key) for i in range(most)]), buffer)
    for sizes in ({"receive_max_sges": device.max_wqe_sz_rq // 16 + 1}, {"send_max_sges": 62}):
        with pytest.raises(InvalidValueError, match="at most"):
            ends(pd, kind, **sizes)


def test_rings(pd):
    """Queues of all entries that are announced are created, and one more is refused."""
    ctx, device = pd.ctx, pd.ctx.query_device()
    ctx.create_cq(device.max_cqe).close()
    cq = ctx.create_cq(8)
    pd.create_qp(sq_wr=device.max_qp_wr, rq_wr=device.max_qp_wr, send_cq=cq, receive_cq=cq).close()
    pd.create_srq(device.max_srq_wr).close()
    pd.create_srq(4, receive_max_sges=device.max_srq_sge).close()
    for beyond in (
        lambda: ctx.create_cq(device.max_cqe + 1),
        lambda: pd.create_qp(sq_wr=device.max_qp_wr + 1, send_cq=cq),
        lambda: pd.create_qp(rq_wr=device.max_qp_wr + 1, receive_cq=cq),
        lambda: pd.create_srq(device.max_srq_wr + 1),
        lambda: pd.create_srq(4, receive_max_sges=device.max_srq_sge + 1),
    ):
        with pytest.raises((InvalidValueError, NotSupportedError)):
            beyond()
