"""Tasks of the RDMA library on the CPU: random programs against bytes, errors, and what is in flight at the end."""

import asyncio
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio import Access, verbs
from gpunetio.cm.address import text_of
from gpunetio.core import Buf, BufInventory, MemoryMap, RemoteMemory, TaskState
from gpunetio.errors import (
    BadStateError,
    ConnectionEndedError,
    DocaErrorCode,
    FullError,
    InvalidValueError,
    NotPermittedError,
    NotSupportedError,
    TimedOutError,
)
from gpunetio.rdma import (
    CompareSwap,
    FetchAdd,
    Rdma,
    RdmaConnection,
    Read,
    Receive,
    ReceiveOpcode,
    Send,
    SyncEvent,
    SyncEventGet,
    SyncEventSet,
    Write,
)

NBYTES, PORT = 1024, 13578
WAIT = 10.0  # seconds


def connected(a: Rdma, b: Rdma) -> tuple[RdmaConnection, RdmaConnection]:
    """A new connection of two that run."""
    (here, near), (there, far) = a.export(), b.export()
    near.connect(there)
    far.connect(here)
    return near, far


class Ends:
    """Two RDMA contexts with a connection, and memory of the second one that the first may use."""

    def __init__(self, a: verbs.Context, b: verbs.Context, **options: int):
        self.a, self.b = (
            Rdma(ctx.create_pd(), permissions=Access.all(), **options)  # type: ignore[arg-type]
            for ctx in (a, b)
        )
        self.a.start()
        self.b.start()
        self.near, self.far = connected(self.a, self.b)
        self.map = MemoryMap(self.b.pd, np.zeros(NBYTES, np.uint8))
        self.remote = RemoteMemory.from_export(self.map.export_rdma())
        self.local = MemoryMap(self.a.pd, np.zeros(2 * NBYTES, np.uint8))


@pytest.fixture(scope="module")
def nics() -> Iterator[tuple[verbs.Context, verbs.Context]]:
    with verbs.open("soft0") as a, verbs.open("soft1") as b:
        yield a, b


@pytest.fixture
def pds(nics) -> Iterator[tuple[verbs.PD, verbs.PD]]:
    with nics[0].create_pd() as a, nics[1].create_pd() as b:
        yield a, b


@pytest.fixture
def ends(nics) -> Iterator[Ends]:
    made = Ends(*nics)
    yield made
    made.a.pd.close()
    made.b.pd.close()


@pytest.fixture(scope="module")
def lasting(nics) -> Ends:
    return Ends(*nics)


def chain(memory: MemoryMap, cuts: list[int], gap: int) -> Buf:
    """A chain of buffers of these lengths, with gaps between them."""
    inventory, at, head = BufInventory(len(cuts)), 0, None
    for length in cuts:
        buf = inventory.buf(memory, at, length)
        at += length + gap
        if head is None:
            head = buf
        else:
            head.chain(buf)
    assert head is not None
    return head


def fill(head: Buf, data: bytes) -> None:
    for buf in head:
        buf.data[:] = np.frombuffer(data[: buf.nbytes], np.uint8)
        data = data[buf.nbytes :]


def content(head: Buf) -> bytes:
    return b"".join(buf.data.tobytes() for buf in head)


U64 = st.integers(0, (1 << 64) - 1)
CUTS = st.lists(st.integers(1, 90), min_size=1, max_size=5)
STEP = st.one_of(
    st.tuples(st.just("write"), CUTS, st.integers(0, 500), st.none() | st.integers(0, (1 << 32) - 1)),
    st.tuples(st.just("read"), CUTS, st.integers(0, 500), st.just(0)),
    st.tuples(st.just("send"), CUTS, st.integers(0, 200), st.none() | st.integers(0, (1 << 32) - 1)),
    st.tuples(st.just("add"), st.just([8]), st.integers(0, NBYTES // 8 - 1), U64),
    st.tuples(st.just("swap"), st.just([8]), st.integers(0, NBYTES // 8 - 1), U64),
)


@given(st.lists(STEP, max_size=8), st.randoms(use_true_random=False))
def test_random_programs(lasting, steps, random):
    ends, model = lasting, bytearray(random.randbytes(NBYTES))
    ends.map.array()[:] = np.frombuffer(model, np.uint8)
    for what, cuts, at, number in steps:
        nbytes, word = sum(cuts), slice(8 * at, 8 * at + 8)
        data = random.randbytes(nbytes)
        head = chain(ends.local, cuts, gap=3)
        if what == "write":
            receive = None if number is None else Receive(ends.b).submit()
            fill(head, data)
            Write(ends.near, head, ends.remote.part(at), number).submit().wait(WAIT)
            model[at : at + nbytes] = data
            if receive:
                receive.wait(WAIT)
                assert receive.opcode is ReceiveOpcode.WRITE_WITH_IMM
                assert (receive.immediate, receive.nbytes) == (number, nbytes)
        elif what == "read":
            assert Read(ends.near, ends.remote.part(at), head).submit().wait(WAIT).nbytes == nbytes
            assert content(head) == model[at : at + nbytes]
        elif what == "send":
            into = np.zeros(nbytes + at, np.uint8)
            receive = Receive(ends.b, into).submit()
            Send(ends.near, data if at % 2 else np.frombuffer(data, np.uint8), number).submit().wait(WAIT)
            receive.wait(WAIT)
            assert into.tobytes() == data + bytes(at)
            assert (receive.nbytes, receive.immediate, receive.connection) == (nbytes, number, ends.far)
            assert receive.opcode is (ReceiveOpcode.SEND if number is None else ReceiveOpcode.SEND_WITH_IMM)
        else:
            before = int.from_bytes(model[word], "little")
            remote = ends.remote.part(8 * at, 8)
            if what == "add":
                task, after = FetchAdd(ends.near, remote, number), (before + number) % (1 << 64)
            else:
                compare = random.choice([before, number])
                task, after = CompareSwap(ends.near, remote, compare, 77), 77 if compare == before else before
            assert task.submit().wait(WAIT).value == before
            model[word] = after.to_bytes(8, "little")
        assert ends.map.array().tobytes() == model


def test_a_receive_fills_a_chain_as_far_as_it_goes(ends):
    head = chain(ends.map, [10, 20, 30], gap=0)
    receive = Receive(ends.b, head).submit()
    Send(ends.near, bytes(range(15))).submit().wait(WAIT)
    receive.wait(WAIT)
    assert [buf.data_nbytes for buf in head] == [10, 5, 0]
    assert content(head) == bytes(range(15))


@pytest.mark.parametrize("number", [0, 0xDEADBEEF])
def test_the_length_of_a_message_with_an_immediate(ends, number):
    """`doca_buf_get_data_len` of each buffer: DOCA Core sets it when a task has written to the list."""
    head = chain(ends.map, [3, 4, 10], gap=0)
    receive = Receive(ends.b, head).submit()
    Send(ends.near, b"hello", number).submit().wait(WAIT)
    receive.wait(WAIT)
    assert (receive.opcode, receive.immediate, receive.nbytes) == (ReceiveOpcode.SEND_WITH_IMM, number, 5)
    assert [buf.data_nbytes for buf in head] == [3, 2, 0]
    assert content(head) == b"hello"


def test_a_write_with_an_immediate_leaves_the_buffer_of_its_receive(ends):
    """Its bytes go where the write says (IBTA 9.4.3)."""
    buf = chain(ends.map, [8], gap=0)
    fill(buf, b"untaken!")
    buf.set_data(0, 3)
    receive = Receive(ends.b, buf).submit()
    Write(ends.near, np.full(5, 7, np.uint8), ends.remote.part(100), 1).submit().wait(WAIT)
    receive.wait(WAIT)
    assert (receive.opcode, receive.nbytes) == (ReceiveOpcode.WRITE_WITH_IMM, 5)
    assert (buf.data_nbytes, content(buf)) == (3, b"unt")


def test_an_interrupt_while_a_task_is_submitted(ends, monkeypatch):
    """It comes when the task is in flight, and what the NIC uses is kept until the task has ended."""
    task = Write(ends.near, np.full(5, 7, np.uint8), ends.remote.part(100))
    post = task._post

    def interrupted(held):
        post(held)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(task, "_post", interrupted)
    with pytest.raises(KeyboardInterrupt):
        task.submit()
    assert task.state is TaskState.IN_FLIGHT
    task.wait(WAIT)


def test_messages_of_several_connections(pds):
    with Rdma(pds[0], max_connections=3) as a, Rdma(pds[1], max_connections=3) as b:
        pairs = [connected(a, b) for _ in range(3)]
        receives = [Receive(b, np.zeros(8, np.uint8), user_data=n).submit() for n in range(3)]
        for n in (2, 0, 1):
            Send(pairs[n][0], bytes([n] * 8), n).submit().wait(WAIT)
        for n, receive in zip((2, 0, 1), receives, strict=True):
            assert receive.wait(WAIT).connection is pairs[n][1]
            assert (receive.immediate, bytes(receive.destination)) == (n, bytes([n] * 8))
        last = Receive(b).submit()  # waits for any connection, also when one is closed
        pairs[0][1].close()
        assert not b.engine.progress()
        assert last.state is TaskState.IN_FLIGHT
    assert last.status is not None
    assert last.status.code is DocaErrorCode.SHUTDOWN


def test_callbacks_tell_which_task(pds):
    done, failed = [], []
    with Rdma(pds[0], permissions=Access.all()) as a, Rdma(pds[1]) as b:
        b.stop()
        b.configure(Receive, done.append, failed.append)
        b.start()
        near, _ = connected(a, b)
        first, second = (Receive(b, bytearray(4), user_data=n).submit() for n in range(2))
        Send(near, b"ping").submit().wait(WAIT)
        b.engine.progress_until(lambda: bool(done), WAIT, "the message")
    assert (done, failed) == ([first], [second])


# --- errors ----------------------------------------------------------------------------------------------------------


def test_what_is_refused_before_it_is_posted(ends):
    only_read = RemoteMemory(ends.remote.address, 64, ends.remote.rkey, Access.REMOTE_READ)
    refused = [
        (NotPermittedError, "REMOTE_WRITE", Write(ends.near, b"x", only_read)),
        (NotPermittedError, "REMOTE_ATOMIC", FetchAdd(ends.near, only_read, 1)),
        (InvalidValueError, "has 1024", Write(ends.near, np.zeros(1025, np.uint8), ends.remote)),
        (InvalidValueError, "no memory of a peer", Read(ends.near, BufInventory(1).buf(ends.local), bytearray(8))),
        (InvalidValueError, "memory of a peer", Send(ends.near, ends.remote)),
        (InvalidValueError, "17 scatter/gather", Send(ends.near, chain(ends.local, [1] * 17, gap=1))),
        (InvalidValueError, "has 4", FetchAdd(ends.near, ends.remote.part(0, 4), 1)),
    ]
    for kind, words, task in refused:
        with pytest.raises(kind, match=words):
            task.submit()
        assert task.state is TaskState.NEW
    for number in (-1, 1 << 32):
        with pytest.raises(InvalidValueError, match="immediate"):
            Send(ends.near, b"", number)
    assert (ends.a.num_inflight, ends.b.num_inflight) == (0, 0)
    Send(ends.near, b"")  # the connection still works
    receive = Receive(ends.b).submit()
    Write(ends.near, b"", ends.remote, 9).submit().wait(WAIT)
    assert receive.wait(WAIT).immediate == 9


def test_a_refusal_of_the_peer_ends_the_connection(ends):
    wrong = RemoteMemory(ends.remote.address, 64, ends.remote.rkey ^ 0x100)
    bad, behind = Write(ends.near, b"x", wrong).submit(), Write(ends.near, b"y", ends.remote).submit()
    with pytest.raises(Exception, match="REM_ACCESS_ERR") as refusal:
        bad.wait(WAIT)
    with pytest.raises(ConnectionEndedError, match="had failed before: REM_ACCESS_ERR") as flushed:
        behind.wait(WAIT)
    codes = [each.value.code for each in (refusal, flushed)]  # type: ignore[attr-defined]
    assert codes == [DocaErrorCode.IO_FAILED, DocaErrorCode.CONNECTION_ABORTED]
    error = ends.near.last_error()
    assert error is not None
    assert "remote key" in error.cause  # not that of the flushed request


def test_an_end_that_disconnects(pds):
    """Tasks in flight say which end that was; those of a connection that this end closes were stopped."""
    with Rdma(pds[0]) as a, Rdma(pds[1]) as b:
        b.listen(PORT)
        for closes in (False, True):
            near = a.connect_to(text_of(pds[1].ctx.query_gid(1, 0)), PORT)
            far = b.next_request(WAIT)
            far.accept()
            near.established(WAIT)
            far.established(WAIT)
            here, there = Receive(a).submit(), Receive(b).submit()
            if closes:
                near.close()
                with pytest.raises(Exception, match="was stopped") as stopped:
                    here.wait(WAIT)
                assert stopped.value.code is DocaErrorCode.SHUTDOWN  # type: ignore[attr-defined]
            else:
                near.disconnect()
                with pytest.raises(ConnectionEndedError, match=f"^{here}: this end has disconnected$"):
                    here.wait(WAIT)
                assert "this end has disconnected" in str(near.last_error())
            with pytest.raises(ConnectionEndedError, match=f"^{there}: the peer has disconnected$") as ended:
                there.wait(WAIT)
            assert ended.value.code is DocaErrorCode.CONNECTION_ABORTED
            assert "the peer has disconnected" in str(far.last_error())
            near.close()
            far.close()


def test_a_message_that_is_too_long(ends):
    receive = Receive(ends.b, bytearray(4)).submit()
    send = Send(ends.near, b"hello").submit()
    with pytest.raises(Exception, match="LOC_LEN_ERR"):
        receive.wait(WAIT)
    with pytest.raises(Exception, match="REM_INV_REQ_ERR"):
        send.wait(WAIT)


def filled(ends: Ends, sends: int, receives: int) -> tuple[list[Write], list[Receive]]:
    """Submit as many tasks as the queues take, and no more."""
    received = [Receive(ends.b).submit() for _ in range(receives)]
    with pytest.raises(FullError, match="recv_queue_size"):
        Receive(ends.b).submit()
    sent = [Write(ends.near, b"x", ends.remote).submit() for _ in range(sends)]
    with pytest.raises(FullError, match="send_queue_size"):
        Send(ends.near, b"").submit()
    sent[-1].wait(WAIT)
    return sent, received


def test_a_full_queue_takes_more_after_progress(nics):
    ends = Ends(*nics, send_queue_size=4, recv_queue_size=2)
    sent, receives = filled(ends, 4, 2)
    assert all(task.done for task in sent)
    Send(ends.near, b"").submit().wait(WAIT)
    receives[0].wait(WAIT)
    ends.a.pd.close()
    ends.b.pd.close()


def test_queues_without_a_size_take_128(ends):
    """As docs/rdma.md says."""
    filled(ends, 128, 128)


def test_tasks_need_a_connection(pds):
    with Rdma(pds[0]) as rdma:
        with pytest.raises(BadStateError, match="no connection"):
            Receive(rdma).submit()
        _, connection = rdma.export()
        with pytest.raises(BadStateError, match="is NEW"):
            Send(connection, b"x").submit()
        early = Receive(rdma).submit()  # before the peer can send
        connection.close()
        with pytest.raises(Exception, match="was closed"):
            early.wait(WAIT)
    with Rdma(pds[0], recv_queue_size=0) as rdma, pytest.raises(BadStateError, match="recv_queue_size"):
        Receive(rdma).submit()


def test_kernels_leave_no_tasks(pds, gpu):
    with Rdma(pds[0], gpu=gpu) as rdma, pytest.raises(NotSupportedError, match="no tasks of the CPU"):
        Receive(rdma).submit()


def test_stopping_ends_what_is_in_flight(ends):
    tasks = [Receive(ends.b, bytearray(8)).submit() for _ in range(5)]
    ends.b.close()
    assert [task.status.code for task in tasks if task.status] == [DocaErrorCode.SHUTDOWN] * 5


# --- sync events -----------------------------------------------------------------------------------------------------


def test_sync_events(ends):
    async def far_away(event: RemoteMemory) -> list[int | None]:
        found = [(await SyncEventGet(ends.near, event)).value]
        await SyncEventSet(ends.near, event, (1 << 64) - 1)
        return [*found, (await SyncEventGet(ends.near, event)).value]

    with SyncEvent(ends.b.pd) as event:
        event.value = 0xD0CA
        with pytest.raises(TimedOutError, match="still 0xd0ca"):
            event.wait_gt(0xD0CA, 0)
        remote = RemoteMemory.from_export(event.export())
        assert asyncio.run(far_away(remote)) == [0xD0CA, (1 << 64) - 1]
        assert event.wait_gt(0xD0CA, WAIT) == event.value == (1 << 64) - 1
        with pytest.raises(InvalidValueError, match="value"):
            event.value = 1 << 64
    with pytest.raises(BadStateError, match="closed"):
        _ = event.value
