"""Two ends of one NIC that do not fit: everything works here, and a warning says what fails on a card."""

import logging
from collections.abc import Iterator

import pytest

from gpunetio import verbs
from gpunetio.enums import QpAttrMask, QpState
from gpunetio.verbs import PD, QP, AhAttr, QpAttr
from nic_rig import Queue

M = QpAttrMask
TO_INIT = M.NEXT_STATE | M.PKEY_INDEX | M.PORT_NUM | M.ALLOW_REMOTE_WRITE | M.ALLOW_REMOTE_READ
TO_RTR = (
    M.NEXT_STATE | M.RQ_PSN | M.DEST_QP_NUM | M.PATH_MTU | M.AH_ATTR | M.MIN_RNR_TIMER | M.MAX_DEST_RD_ATOMIC
)
TO_RTS = M.NEXT_STATE | M.SQ_PSN | M.ACK_TIMEOUT | M.RETRY_CNT | M.RNR_RETRY | M.MAX_QP_RD_ATOMIC


@pytest.fixture
def pd() -> Iterator[PD]:
    with verbs.open("soft0") as ctx:
        yield ctx.create_pd()


def to_rtr(qp: QP, peer: QP, **attributes: int) -> None:
    qp.modify(QpAttr(next_state=QpState.INIT), TO_INIT)
    path = AhAttr(gid=qp.ctx.query_gid())
    qp.modify(QpAttr(next_state=QpState.RTR, dest_qp_num=peer.qpn, ah_attr=path, **attributes), TO_RTR)


def to_rts(qp: QP, max_rd_atomic: int = 4) -> None:
    qp.modify(QpAttr(next_state=QpState.RTS, max_rd_atomic=max_rd_atomic), TO_RTS)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_ends_that_fit(pd, caplog):
    a, b = Queue(pd).qp, Queue(pd).qp
    for qp, peer in ((a, b), (b, a)):
        to_rtr(qp, peer, max_dest_rd_atomic=4)
        to_rts(qp)
    a.reset()
    a.connect(a)
    assert warnings(caplog) == []


def test_another_path_mtu(pd, caplog):
    a, b = Queue(pd).qp, Queue(pd).qp
    to_rtr(a, b, path_mtu=1024)
    assert warnings(caplog) == []
    to_rtr(b, a, path_mtu=4096)
    (text,) = warnings(caplog)
    for part in (f"QP {b.qpn:#x} has a path MTU of 4096", f"QP {a.qpn:#x} one of 1024", "path_mtu"):
        assert part in text


@pytest.mark.parametrize("reader_first", [False, True])
def test_more_reads_than_the_peer_accepts(pd, caplog, reader_first):
    """Whichever end comes last, it is told once."""
    a, b = Queue(pd).qp, Queue(pd).qp
    to_rtr(a, b, max_dest_rd_atomic=4)
    if reader_first:
        to_rts(a, max_rd_atomic=8)
    to_rtr(b, a, max_dest_rd_atomic=4)
    if not reader_first:
        to_rts(a, max_rd_atomic=8)
    to_rts(b)
    (text,) = warnings(caplog)
    for part in (f"QP {a.qpn:#x} may have 8", f"QP {b.qpn:#x} accepts 4", "NAK", "max_dest_rd_atomic"):
        assert part in text
