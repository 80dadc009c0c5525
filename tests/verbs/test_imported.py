"""What others have made and verbs uses: an opened device, a protection domain, a dmabuf."""

import fcntl
import mmap
import os
from collections.abc import Iterator

import pytest

from gpunetio import verbs
from gpunetio.enums import Access, PortState, WcStatus, WrOpcode
from gpunetio.errors import BadStateError, DocaError, InvalidValueError, NotSupportedError
from gpunetio.providers import open_device
from gpunetio.verbs import SendWr, Sge
from nic_rig import Buffer, until

BYTES = 1 << 16
F_ADD_SEALS, SHRINK, GROW = 1033, 2, 4


@pytest.fixture
def ctx() -> Iterator[verbs.Context]:
    with verbs.open("soft0") as opened:
        yield opened


@pytest.fixture
def memory() -> Iterator[int]:
    """Memory with a descriptor, whose size is final as that of a dmabuf."""
    fd = os.memfd_create("dmabuf", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, BYTES)
    fcntl.fcntl(fd, F_ADD_SEALS, SHRINK | GROW)
    yield fd
    os.close(fd)


def write(pd: verbs.PD, source: Buffer, nbytes: int, **remote: int) -> WcStatus:
    """A write from a queue pair to itself."""
    cq = pd.ctx.create_cq(2)
    with pd.create_qp(sq_wr=1, send_cq=cq) as qp:
        qp.connect(qp)
        sge = Sge(source.address, nbytes, source.key)
        qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[sge], **remote))
        (done,) = until(cq.poll, "the write")
    cq.close()
    return done.status


def test_import_context():
    """Closing it closes what was made from it, and leaves the device to who opened it."""
    provider = open_device("soft3")
    with verbs.import_context(provider) as ctx:
        pd, cq = ctx.create_pd(), ctx.create_cq(4)
        assert ctx.name == "soft3"
    assert pd.closed
    assert cq.closed
    assert provider.query_port(1).state == PortState.ACTIVE
    with verbs.import_context(provider) as again:
        assert again.query_device().max_qp > 0
    provider.close()
    with pytest.raises(DocaError):
        verbs.import_context(provider)


def test_import_pd(ctx):
    """Two handles of one domain: keys of one are good in the other, and each closes its own."""
    owner = ctx.create_pd()
    imported = ctx.import_pd(owner.pdn)
    target, source = Buffer(owner, 64), Buffer(imported, 64, fill=3)
    assert write(imported, source, 64, remote_addr=target.address, rkey=target.key) == WcStatus.SUCCESS
    assert (target.bytes == source.bytes).all()
    imported.close()
    assert source.mr.closed
    assert not target.mr.closed
    assert ctx.provider.nic.pds[owner.pdn]["users"] == 1  # type: ignore[attr-defined]
    owner.close()


@pytest.mark.parametrize("offset", [0, 4096, 100])
def test_dmabuf(ctx, memory, offset):
    pd = ctx.create_pd()
    source = Buffer(pd, 4096, fill=5)
    before = len(os.listdir("/proc/self/fd"))
    mr = pd.register_dmabuf(memory, 4096, offset=offset)
    assert (mr.iova, mr.nbytes) == (offset, 4096)
    assert write(pd, source, 4096, remote_addr=offset, rkey=mr.rkey) == WcStatus.SUCCESS
    with mmap.mmap(memory, BYTES) as whole:
        assert whole[offset : offset + 4096] == bytes(source.bytes)
        assert not any(whole[offset + 4096 : offset + 5000])
    for outside in (offset - 1, offset + 1):
        assert write(pd, source, 4096, remote_addr=outside % 2**64, rkey=mr.rkey) == WcStatus.REM_ACCESS_ERR
    mr.close()
    assert len(os.listdir("/proc/self/fd")) == before
    zero_based = pd.register_dmabuf(memory, 64, Access.LOCAL_WRITE | Access.REMOTE_WRITE, offset=offset, iova=0)
    assert write(pd, source, 64, remote_addr=0, rkey=zero_based.rkey) == WcStatus.SUCCESS


def test_queues_in_a_dmabuf(ctx, memory):
    umem = ctx.register_dmabuf_umem(memory, BYTES)
    place = {"external_umem": (umem, 0), "external_dbr_umem": (umem, 8192)}
    cq = ctx.create_cq(4, **place)
    with mmap.mmap(memory, BYTES) as whole:
        whole[:256] = b"\xf1" * 256  # entries that nobody has written, as the owner of a ring presets them
        sends = ctx.create_cq(4)
        qp = ctx.create_pd().create_qp(sq_wr=1, send_cq=sends)
        qp.connect(qp)
        receiver = qp.pd.create_qp(rq_wr=1, receive_cq=cq)
        receiver.connect(receiver)
        receiver.post_recv(verbs.RecvWr())
        receiver.to_error()
        until(lambda: whole[63] >> 4 != 15, "a flushed receive in the ring")


def test_dmabuf_refused(ctx, memory, tmp_path):
    pd = ctx.create_pd()
    for arguments, words in (
        ({"nbytes": BYTES + 1}, f"do not lie in the {BYTES} bytes"),
        ({"nbytes": 1, "offset": BYTES}, "do not lie"),
        ({"nbytes": 1, "offset": -1}, "offset = -1: it must be 0 to"),
        ({"nbytes": 0}, "0 bytes"),
    ):
        with pytest.raises(InvalidValueError, match=words):
            pd.register_dmabuf(memory, **arguments)
    reading, writing = os.pipe()
    with pytest.raises(NotSupportedError, match="cannot map dmabuf"):
        pd.register_dmabuf(reading, 1)
    os.close(reading)
    os.close(writing)
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(4096))
    with plain.open("r+b") as file, pytest.raises(InvalidValueError, match="not sealed memory"):
        pd.register_dmabuf(file.fileno(), 4096)  # it could be truncated under the NIC
    pd.close()
    with pytest.raises(BadStateError, match="is closed"):
        pd.register_dmabuf(memory, 1)


def test_relaxed_ordering_is_a_right_that_changes_nothing_here(ctx):
    pd = ctx.create_pd()
    source = Buffer(pd, 64, fill=1)
    target = Buffer(pd, 64, access=Access.all() | Access.RELAXED_ORDERING)
    assert write(pd, source, 64, remote_addr=target.address, rkey=target.key) == WcStatus.SUCCESS
