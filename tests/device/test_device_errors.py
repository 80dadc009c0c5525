"""What goes wrong reaches the caller: EIO with index and cause for every kind of WQE, ETIMEDOUT for every wait."""

import logging
from collections.abc import Callable, Iterator

import pytest

from device_programs import BLOCK, EXCLUSIVE, GPU, THREAD, Call, run
from gpunetio import ExportedQp, Gpu, device, verbs
from gpunetio.enums import Access, QpState
from gpunetio.formats.cqe import Syndrome
from gpunetio.formats.device_structs import DEV_QP
from nic_rig import until
from pair import NBYTES, Pair, make_pair
from structures import changed

OK, EIO, ETIMEDOUT = device.OK, device.EIO, device.ETIMEDOUT
LW, RW, RR, RA = Access.LOCAL_WRITE, Access.REMOTE_WRITE, Access.REMOTE_READ, Access.REMOTE_ATOMIC
LOCAL, REMOTE, INVALID = Syndrome.LOCAL_PROT, Syndrome.REMOTE_ACCESS, Syndrome.REMOTE_INVAL_REQ


@pytest.fixture(scope="module", params=["host", pytest.param("auto", marks=pytest.mark.gpu, id="cuda")])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A `Pair` for all tests here, with regions of fewer rights."""
    logger = logging.getLogger("gpunetio")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # of what fails on purpose
    with Gpu(request.param) as gpu, verbs.open("soft0") as ctx:
        opened = make_pair(ctx, gpu, 16, timeout=20.0)
        yield opened
        opened.a.close()
        opened.b.close()
    logger.setLevel(level)


def begin_anew(pair: Pair, *queues: ExportedQp) -> None:
    for queue in queues or (pair.a, pair.b):
        queue.qp.reset()
        queue.reset()
    if not queues:
        pair.a.connect(pair.b, ack_timeout=8, retry_cnt=1, rnr_retry=1, min_rnr_timer=1)


def call(pair: Pair, what: str, **more: object) -> Call:
    """A call in which all is well, but for `more`."""
    return {
        "what": what, "qp": pair.a, "raddr": pair.there.address, "rkey": pair.there_mr.rkey,
        "laddr": pair.here.address, "lkey": pair.here_mr.lkey, "nbytes": 8,
        "sig_raddr": pair.there.address + 64, "sig_rkey": pair.there_mr.rkey, "sig_laddr": pair.here.address + 64,
        "sig_lkey": pair.here_mr.lkey, "value": 1, "daddr": pair.here.address, "dlkey": pair.here_mr.lkey, **more,
    }


# What is wrong with an argument: the value, given the pair, a region with all rights but the one that is needed, and a
# key that was valid once.
def wrong(pair: Pair, mr: verbs.MR, kind: str, local: bool, nbytes: int = 8) -> dict[str, object]:
    memory = pair.here if local else pair.there
    key, at = ("lkey", "laddr") if local else ("rkey", "raddr")
    return {
        "unknown": {key: 0x1234_5600}, "closed": {key: mr.rkey}, "behind": {at: memory.address + NBYTES - nbytes + 8},
        "before": {at: memory.address - 8}, "rights": {key: mr.rkey},
    }[kind]


# function → (WQEs of it, and for its remote and its local argument: which of these WQEs fails, the rights that are
# missing, a prefix of the arguments' names, bytes)
Argument = tuple[int, Access, str, int]
FUNCTIONS: dict[str, tuple[int, Argument | None, Argument | None]] = {
    "put": (1, (0, RW, "", 8), (0, LW, "", 8)),
    "get": (2, (0, RR, "", 8), (0, LW, "", 8)),
    "p": (1, (0, RW, "", 8), None),
    "signal": (1, (0, RA, "sig_", 8), (0, LW, "sig_", 8)),
    "put_signal": (2, (1, RA, "sig_", 8), (0, LW, "", 8)),
    "p_signal": (2, (0, RW, "", 8), (1, LW, "sig_", 8)),
    "mcst": (1, None, (0, LW, "d", 1)),
    "send": (1, None, (0, LW, "", 8)),
}
NEEDS_NO_WRITE = ("put", "put_signal", "mcst", "send")  # at this end: they only read here
KINDS = ("unknown", "closed", "behind", "before", "rights")


@pytest.mark.parametrize(
    ("what", "local"),
    [(what, bool(i)) for what, (_, *arguments) in FUNCTIONS.items() for i, one in enumerate(arguments) if one],
    ids=lambda part: {True: "local", False: "remote"}.get(part, part),
)
def test_keys_ranges_and_rights(pair: Pair, what, local):
    """The WQE that fails, its syndrome and a cause are in `last_error`; what was before it is complete."""
    wqes, remote_argument, local_argument = FUNCTIONS[what]
    argument = local_argument if local else remote_argument
    assert argument is not None
    failing, needed, prefix, nbytes = argument
    memory = pair.here if local else pair.there
    for kind in KINDS:
        if kind == "rights" and local and what in NEEDS_NO_WRITE:
            continue
        begin_anew(pair)
        rights = Access.all() if kind == "closed" else Access.all() & ~needed
        if not rights & LW:
            rights = Access(0)
        mr = pair.pd.register(memory, access=rights)
        if kind == "closed":
            mr.close()
        changes = {prefix + name: value for name, value in wrong(pair, mr, kind, local, nbytes).items()}
        changes = {{"dladdr": "daddr"}.get(name, name): value for name, value in changes.items()}
        first = call(pair, "put", nbytes=4)
        program: list[list[Call]] = [
            [first], [call(pair, what, **changes)], [{"what": "wait", "ref": 0, "qp": pair.a}],
            [{"what": "wait", "ref": 1, "qp": pair.a}], [{"what": "wait_all", "qp": pair.a}],
            [{"what": "wait", "ref": 0, "qp": pair.a}],
        ]
        results = run(pair.gpu, program, sharing=EXCLUSIVE).ravel().tolist()
        assert results == [0, wqes, OK, EIO, EIO, OK], (what, kind)
        error = pair.a.last_error()
        assert error is not None
        assert (error.index, error.syndrome, error.state) == (
            1 + failing, LOCAL if local else REMOTE, QpState.ERR
        ), (what, kind, str(error))
        assert error.cause
        if not mr.closed:
            mr.close()


@pytest.mark.parametrize("what", ["signal", "put_signal", "p_signal"])
def test_unaligned_words(pair: Pair, what):
    begin_anew(pair)
    bad = call(pair, what, sig_raddr=pair.there.address + 68)
    program: list[list[Call]] = [[bad], [{"what": "wait", "ref": 0, "qp": pair.a}]]
    wqes = 1 if what == "signal" else 2
    assert run(pair.gpu, program, sharing=GPU).ravel().tolist() == [wqes - 1, EIO]
    error = pair.a.last_error()
    assert error is not None
    assert (error.index, error.syndrome) == (wqes - 1, INVALID)


@pytest.mark.parametrize(("what", "right"), [("put", RW), ("p", RW), ("get", RR), ("signal", RA)])
def test_rights_of_the_peer(pair: Pair, what, right):
    """What the peer's queue pair does not allow."""
    begin_anew(pair, pair.a, pair.b)
    pair.a.connect(pair.b, remote_access=Access.all() & ~right)
    program: list[list[Call]] = [[call(pair, what, daddr=0)], [{"what": "wait", "ref": 0, "qp": pair.a}]]
    assert run(pair.gpu, program, sharing=GPU).ravel().tolist() == [0, EIO]
    error = pair.a.last_error()
    assert error is not None
    assert (error.index, error.syndrome) == (0, INVALID)


def test_a_peer_that_is_gone(pair: Pair):
    """No answer, after all retries; a message without a receive, after all of those."""
    for gone, what, syndrome in ((True, "put", Syndrome.TRANSPORT_RETRY_EXC), (False, "send", Syndrome.RNR_RETRY_EXC)):
        begin_anew(pair)
        if gone:
            pair.b.qp.reset()
        program: list[list[Call]] = [[call(pair, what)], [{"what": "wait", "ref": 0, "qp": pair.a}]]
        assert run(pair.gpu, program, sharing=GPU).ravel().tolist() == [0, EIO]
        error = pair.a.last_error()
        assert error is not None
        assert (error.index, error.syndrome) == (0, syndrome)


def test_a_counter_of_a_queue_that_does_not_exist(pair: Pair):
    """The WAIT names the CQ of the main queue; without that, and on a queue that is not core-direct, it fails."""
    begin_anew(pair)
    other = pair.gpu.create_qp(pair.pd, 16)
    other.connect(other)
    bad = call(pair, "put_counter", companion=other, counter_raddr=pair.there.address, counter_rkey=pair.there_mr.rkey,
               counter_laddr=pair.here.address, counter_lkey=pair.here_mr.lkey)
    waits: list[list[Call]] = [[{"what": "wait", "ref": 0, "qp": pair.a}], [{"what": "wait_all", "qp": other}]]
    assert run(pair.gpu, [[bad], *waits], sharing=GPU).ravel().tolist() == [0, OK, EIO]
    error = other.last_error()
    assert error is not None
    assert (error.index, error.syndrome) == (0, Syndrome.LOCAL_QP_OP)
    assert pair.a.last_error() is None
    other.close()


@pytest.mark.parametrize("collapsed", [False, True], ids=["ring", "collapsed"])
@pytest.mark.parametrize("sharing", [EXCLUSIVE, GPU])
def test_a_queue_pair_that_is_moved_to_err(pair: Pair, sharing, collapsed):
    """All that is posted then is flushed; a ring's worth of it can be, and after that nothing more."""
    depth = 16
    queue = pair.gpu.create_qp(pair.pd, depth, cq_collapsed=collapsed)
    queue.connect(queue)
    queue.qp.to_error()
    put = call(pair, "put", qp=queue)
    posts = [[put]] * (depth + 2)
    waits: list[list[Call]] = [[{"what": "wait", "ticket": 0, "qp": queue}], [{"what": "wait_all", "qp": queue}]]
    results = run(pair.gpu, posts + waits, sharing=sharing).ravel().tolist()
    assert results == [*range(depth), EIO, EIO, EIO, EIO]
    error = queue.last_error()
    assert error is not None
    assert (error.syndrome, error.state) == (Syndrome.WR_FLUSH, QpState.ERR)
    assert error.index is not None
    assert collapsed or error.index == 0
    queue.close()


def test_the_first_error_is_kept(pair: Pair):
    """Whoever looks first, and at whatever: the cause is the WQE that failed, not one that was flushed."""
    for looks in ([{"what": "wait_all"}], [{"what": "wait", "ticket": 7}, {"what": "wait", "ticket": 3}],
                  [{"what": "poll", "ticket": 5}], [{"what": "get_wait", "ticket": 9, "daddr": 0}]):
        begin_anew(pair)
        calls = [call(pair, "put") for _ in range(10)]
        calls[2] |= {"rkey": 1}
        program: list[list[Call]] = [[one] for one in [*calls, *looks]]
        results = run(pair.gpu, program, sharing=GPU, qp=pair.a).ravel().tolist()
        assert results == [*range(10), *[EIO] * len(looks)]
        error = pair.a.last_error()
        assert error is not None
        assert (error.index, error.syndrome) == (2, REMOTE)


def test_the_first_error_of_a_collapsed_queue_is_kept(pair: Pair):
    """Its only CQE has become that of a flush, so that the cause is in no CQE any more."""
    queue = pair.gpu.create_qp(pair.pd, 16, cq_collapsed=True)
    queue.connect(queue)
    bad, put = call(pair, "put", qp=queue, rkey=1), call(pair, "put", qp=queue)
    program: list[list[Call]] = [[bad], [{"what": "wait", "ref": 0, "qp": queue}], [put]]
    assert run(pair.gpu, program, sharing=GPU).ravel().tolist() == [0, EIO, 1]
    look: list[list[Call]] = [[{"what": "poll_one", "ticket": 1, "qp": queue}]]  # EIO by a CQE only
    until(lambda: run(pair.gpu, look, sharing=GPU)[0, 0] == EIO, "the flush")
    error = queue.last_error()
    assert error is not None
    assert (error.index, error.syndrome) == (0, REMOTE)
    queue.close()


# --- deadlines -------------------------------------------------------------------------------------------------------


@pytest.fixture
def stalled(pair: Pair) -> Iterator[Callable[..., ExportedQp]]:
    """Makes queues of a NIC that stands still, whose waits end soon."""
    made: list[ExportedQp] = []

    def make(timeout: float = 0.05, **options: object) -> ExportedQp:
        made.append(pair.gpu.create_qp(pair.pd, 8, timeout=timeout, **options))  # type: ignore[arg-type]
        made[-1].connect(made[-1])
        pair.nic.pause()
        until(lambda: pair.nic.record["paused"], "the NIC to stand still")
        return made[-1]

    yield make
    pair.nic.resume()
    for queue in made:
        queue.close()


WAITS: dict[str, Call] = {
    "wait": {"what": "wait", "ref": 0}, "wait in a block": {"what": "wait", "ref": 0, "scope": BLOCK},
    "wait_all": {"what": "wait_all"}, "get_wait": {"what": "get_wait", "ref": 0, "daddr": 0},
    "get_wait with a mcst": {"what": "get_wait", "ref": 0}, "poll": {"what": "poll", "ticket": 1},
    "blocking get": {"what": "get", "blocking": 1},
}


@pytest.mark.parametrize("collapsed", [False, True], ids=["ring", "collapsed"])
@pytest.mark.parametrize("sharing", [EXCLUSIVE, GPU])
@pytest.mark.parametrize("wait", WAITS)
def test_every_wait_ends(pair: Pair, stalled, wait, sharing, collapsed):
    queue = stalled(cq_collapsed=collapsed)
    put = call(pair, "put", qp=queue)
    assert run(pair.gpu, [[put], [put | WAITS[wait]]], sharing=sharing).ravel().tolist() == [0, ETIMEDOUT]
    pair.nic.resume()
    until(lambda: queue.indices()["submitted"] == int(pair.nic.qps[queue.qpn]["sq_ci"]), "the NIC")
    assert run(pair.gpu, [[{"what": "wait_all", "qp": queue}]])[0, 0] == OK


@pytest.mark.parametrize("sharing", [EXCLUSIVE, GPU])
def test_a_post_waits_for_room_until_its_deadline(pair: Pair, stalled, sharing):
    """It gives its slots back, so that the queue goes on when the NIC does."""
    queue = stalled(timeout=1.0)
    posts = [[call(pair, "put", qp=queue)]] * 10
    assert run(pair.gpu, posts, sharing=sharing).ravel().tolist() == [*range(8), ETIMEDOUT, ETIMEDOUT]
    assert queue.indices()["reserved"] == 8
    pair.nic.resume()
    results = run(pair.gpu, [*posts, [{"what": "wait_all", "qp": queue}]], sharing=sharing).ravel().tolist()
    assert results == [*range(8, 18), OK]


def test_a_reservation_that_was_not_filled_ends_the_posts_behind_it(pair: Pair):
    """Who has reserved and never posts: those behind it wait for their turn until the deadline, later ones not."""
    queue = pair.gpu.create_qp(pair.pd, 8, timeout=0.1)
    queue.connect(queue)
    with changed(queue) as (image, _):
        DEV_QP.at(image)["sq_rsvd_index"] = 1  # slot 0 is somebody's
    program: list[list[Call]] = [[call(pair, "put", qp=queue)]] * 2
    results = run(pair.gpu, program, sharing=GPU, scope=THREAD).ravel().tolist()
    assert results == [ETIMEDOUT, device.ENOTRECOVERABLE]
    queue.qp.reset()
    queue.reset()
    queue.connect(queue)
    program = [[call(pair, "put", qp=queue)], [{"what": "wait", "ref": 0, "qp": queue}]]
    assert run(pair.gpu, program, sharing=GPU).ravel().tolist() == [0, OK]
    queue.close()
