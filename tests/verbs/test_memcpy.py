"""MEMCPY: queue pairs that copy local memory."""

import re
from collections.abc import Iterator

import numpy as np
import pytest

from gpunetio import verbs
from gpunetio.enums import WcOpcode, WcStatus, WrOpcode
from gpunetio.errors import InvalidValueError
from gpunetio.verbs import MR, QP, BadWrError, SendWr, Sge, memcpy
from nic_rig import until


@pytest.fixture
def qp() -> Iterator[QP]:
    with verbs.open("soft0") as ctx:
        pd = ctx.create_pd()
        queue = pd.create_qp(sq_wr=8, send_cq=ctx.create_cq(16), memcpy=True)
        queue.connect(queue)
        yield queue


def sge(mr: MR, offset: int, nbytes: int) -> Sge:
    return Sge(mr.address + offset, nbytes, mr.lkey)


def test_copies_in_order(qp):
    """The second one copies what the first one has brought."""
    memory = np.arange(300, dtype=np.uint16).astype(np.uint8)
    mr = qp.pd.register(memory)
    qp.post_send(
        memcpy(sge(mr, 100, 50), sge(mr, 0, 50), wr_id=1), memcpy(sge(mr, 200, 50), sge(mr, 100, 50), wr_id=2)
    )
    done = [until(lambda: qp.send_cq.poll(1), "a completion")[0] for _ in range(2)]
    assert [(one.wr_id, one.status, one.opcode) for one in done] == [
        (n, WcStatus.SUCCESS, WcOpcode.MEMCPY) for n in (1, 2)
    ]
    assert np.array_equal(memory[:50], memory[200:250])


def test_a_target_without_the_right_to_write(qp):
    locked, open_ = qp.pd.register(bytes(64)), qp.pd.register(bytearray(64))
    qp.post_send(memcpy(sge(locked, 0, 64), sge(open_, 0, 64)))
    (done,) = until(lambda: qp.send_cq.poll(1), "a completion")
    assert done.status == WcStatus.LOC_PROT_ERR


HERE = Sge(0x1000, 64, 7)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (memcpy(Sge(0x2000, 65, 7), HERE), "MEMCPY of 64 bytes to 65 bytes: the lengths must be equal"),
        (memcpy(Sge(0, 0, 7), Sge(0, 0, 7)), "MEMCPY of 0 bytes: the device copies 1 to 2147483648 at a time"),
        (memcpy(Sge(0, (1 << 31) + 1, 7), Sge(0, (1 << 31) + 1, 7)), "MEMCPY of 2147483649 bytes: the device copies"),
        (SendWr(opcode=WrOpcode.MEMCPY, sges=[HERE]), "MEMCPY takes two scatter/gather entries"),
        (SendWr(opcode=WrOpcode.MEMCPY, sges=[HERE, HERE], inline=b""), "MEMCPY takes two scatter/gather entries"),
        (memcpy(Sge(1 << 64, 64, 7), HERE), "address = 0x10000000000000000 does not fit in 64 bits"),
    ],
)
def test_bad_requests(qp, request_, words):
    with pytest.raises(BadWrError, match=re.escape(words)):
        qp.post_send(request_)


def test_queue_pairs_without_memcpy(qp):
    plain = qp.pd.create_qp(sq_wr=8, send_cq=qp.send_cq)
    plain.connect(plain)
    with pytest.raises(BadWrError, match=r"MEMCPY on QP .*: create it with memcpy") as caught:
        plain.post_send(memcpy(HERE, HERE))
    assert isinstance(caught.value.__cause__, InvalidValueError)
