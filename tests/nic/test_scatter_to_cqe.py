"""Payload in CQEs (qpc.cs_res and cs_req): what READs and atomics return, and both in entries of 128 bytes.

Received SENDs in entries of 64 bytes are in tests/verbs/test_cqe_inline.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from gpunetio import PortConfig, verbs
from gpunetio.enums import QpAtomicType, QpState
from nic_rig import (
    CS,
    FA,
    MASKED_FA,
    NOP,
    ON_ERROR,
    OPMOD,
    READ,
    REMOTE_ACCESS,
    REQ,
    REQ_ERR,
    RESP_SEND,
    RESP_SEND_IMM,
    SEND,
    SEND_IMM,
    WITH_EVENT,
    WRITE,
    Buffer,
    Ends,
    Queue,
    atomic,
    connect,
    error_of,
    inline,
    masked_fa,
    raddr,
)

BYTES = bytes(range(1, 251))
SIZES = [1, 8, 31, 32, 33, 63, 64, 65]
FORMAT_32, FORMAT_64 = 0x04, 0x08  # bits 3:2 of op_own
_SIZE = 4096


@contextmanager
def opened(
    names: tuple[str, ...], cqe_size: int, near: dict[str, Any], far: dict[str, Any], **port: Any
) -> Iterator[Ends]:
    """Two queue pairs whose CQs have entries of this size; a has the attributes `near`, and b `far`."""
    pds = [verbs.open(name, **port).create_pd() for name in names]
    a, b = (
        Queue(pd, sq=16, send_cq=pd.ctx.create_cq(16, cqe_size=cqe_size),
              recv_cq=pd.ctx.create_cq(16, cqe_size=cqe_size), external_datapath=True, **attributes)
        for pd, attributes in ((pds[0], near), (pds[-1], far))
    )
    ends = Ends(a, b, Buffer(pds[0], _SIZE), Buffer(pds[-1], _SIZE, fill=1))
    connect(a, b)
    try:
        yield ends
    finally:
        ends.close()


@pytest.fixture(params=[("soft0",), ("soft0", "soft1")], ids=["loopback", "wire"])
def names(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param


@pytest.fixture(params=[64, 128])
def cqe_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def ends(names: tuple[str, ...], cqe_size: int) -> Iterator[Ends]:
    """Queue pairs with `cqe_inline_responses` at `a`; `there` holds a pattern, and `here` is empty."""
    with opened(names, cqe_size, {"cqe_inline_responses": True}, {}) as ends:
        yield ends


def carried(cqe_size: int, payload: bytes) -> bytes:
    """What of `payload` a CQE carries: all of it, or nothing."""
    return payload if len(payload) <= cqe_size // 2 else b""


def entry(ends: Ends) -> bytes:
    """The CQE of a's latest send, with the bytes before it."""
    done = ends.a.done
    return done.ring[(done.ci - 1) % done.cq.entries].tobytes()


# --- what READs return -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", SIZES)
def test_reads(ends, cqe_size, nbytes):
    """The bytes stand at the head of an entry of either size, with zeros behind them."""
    index = ends.a.post(READ, ends.there.remote(40), ends.here.at(8, nbytes))
    cqe, expected = ends.a.done.next(), ends.there.bytes[40 : 40 + nbytes].tobytes()
    assert (cqe.opcode, cqe.wqe_opcode, cqe.counter, cqe.byte_cnt) == (REQ, READ, index, nbytes)
    assert cqe.payload == carried(cqe_size, expected)
    raw = entry(ends)
    if cqe.payload:
        assert raw[-1] & 0x0C == (FORMAT_32 if cqe_size == 64 else FORMAT_64)
        assert raw[: cqe_size // 2] == expected.ljust(cqe_size // 2, b"\0")
    else:
        assert raw[-1] & 0x0C == 0
    if cqe_size == 128:
        assert not any(raw[64:96])
    assert ends.here.bytes[8 : 8 + nbytes].tobytes() == expected


def test_empty_reads(ends):
    ends.a.post(READ, ends.there.remote())
    cqe = ends.a.done.next()
    assert (cqe.byte_cnt, cqe.payload, entry(ends)[-1] & 0x0C) == (0, b"", 0)


def test_pieces_are_put_together(ends):
    parts = [ends.here.at(0, 3), ends.here.at(500, 20), ends.here.at(100, 9)]
    ends.a.post(READ, ends.there.remote(7), *parts)
    assert ends.a.done.next().payload == ends.there.bytes[7:39].tobytes()
    assert ends.here.bytes[500:520].tobytes() == ends.there.bytes[10:30].tobytes()


def test_laps_of_both_rings(ends, cqe_size):
    """WQEs of two blocks wrap around the end of their ring, and owner bits stand beside the format."""
    ends.a.post(NOP)
    assert ends.a.done.next().payload == b""
    for n in range(40):
        nbytes = 4 + n % 3 * 24
        step = nbytes // 4
        ends.a.post(READ, ends.there.remote(n), *(ends.here.at(64 * i, step) for i in range(4)))
        cqe = ends.a.done.next()
        assert cqe.payload == carried(cqe_size, ends.there.bytes[n : n + nbytes].tobytes())
        assert cqe.owner == (n + 1) // 16 & 1


def test_only_completions_carry_it(ends):
    """READs without a CQE go to memory alone; those behind them are not mistaken for them."""
    for n in range(3):
        ends.a.put(READ, ends.there.remote(100 * n), ends.here.at(100 * n, 16), ce=ON_ERROR)
    ends.a.put(READ, ends.there.remote(300), ends.here.at(300, 16))
    ends.a.put(READ, ends.there.remote(400), ends.here.at(400, 16), ce=WITH_EVENT)
    ends.a.ring()
    found = ends.a.done.take(2)
    assert [cqe.payload for cqe in found] == [ends.there.bytes[at : at + 16].tobytes() for at in (300, 400)]
    for at in range(0, 500, 100):
        assert np.array_equal(ends.here.bytes[at : at + 16], ends.there.bytes[at : at + 16])
    assert ends.a.done.none_for()


def test_nothing_else_does(ends):
    ends.b.receive(ends.there.at(0, 64))
    ends.a.put(WRITE, ends.there.remote(), ends.here.at(0, 8))
    ends.a.put(SEND, inline(b"eight by"))
    ends.a.put(NOP)
    ends.a.ring()
    assert [cqe.payload for cqe in ends.a.done.take(3)] == [b""] * 3
    assert ends.b.arrived.next().payload == b""


def test_errors_carry_nothing(ends):
    ends.a.put(READ, ends.there.remote(), ends.here.at(0, 8))
    ends.a.put(READ, raddr(ends.there.address, 0xBAD00), ends.here.at(8, 8))
    ends.a.put(READ, ends.there.remote(), ends.here.at(16, 8))
    ends.a.ring()
    first, second, third = ends.a.done.take(3)
    assert first.payload == ends.there.bytes[:8].tobytes()
    assert [cqe.opcode for cqe in (second, third)] == [REQ_ERR, REQ_ERR]
    assert error_of(second)[0] == REMOTE_ACCESS
    assert (second.payload, third.payload) == (b"", b"")
    assert not ends.here.bytes[8:].any()
    assert ends.a.qp.state == QpState.ERR


def test_it_outlives_a_reset(ends):
    ends.again()
    ends.a.post(READ, ends.there.remote(), ends.here.at(0, 8))
    assert ends.a.done.next().payload == ends.there.bytes[:8].tobytes()


def test_other_queue_pairs_have_none(names, cqe_size):
    with opened(names, cqe_size, {}, {}) as ends:
        ends.a.post(READ, ends.there.remote(), ends.here.at(0, 8))
        assert ends.a.done.next().payload == b""


# --- what atomics return ---------------------------------------------------------------------------------------------


def test_atomics(ends):
    """The old word, as it is in memory."""
    old = 0x0123_4567_89AB_CDEF
    ends.there.set_word(0, old)
    ends.a.put(FA, ends.there.remote(), atomic(1), ends.here.at(0, 8))
    ends.a.put(CS, ends.there.remote(), atomic(7, old + 1), ends.here.at(8, 8))
    ends.a.put(CS, ends.there.remote(), atomic(9, old), ends.here.at(16, 8))
    ends.a.ring()
    words = [int.from_bytes(cqe.payload, "little") for cqe in ends.a.done.take(3)]
    assert words == [old, old + 1, 7]
    assert words == [ends.here.word(at) for at in (0, 8, 16)]


@pytest.mark.parametrize("nbytes", [4, 8])
def test_masked_atomics(cqe_size, nbytes):
    """Their operands take more segments; a word of 4 bytes is big-endian."""
    with opened(("soft0",), cqe_size, {"cqe_inline_responses": True}, {}) as ends:
        ends.again(atomic_type=QpAtomicType.UP_TO_8BYTES)
        ends.there.set_word(0, 0x1122_3344)
        operands, result = masked_fa(1, 0, nbytes), ends.here.at(0, nbytes)
        ends.a.post(MASKED_FA, ends.there.remote(), operands, result, opmod=OPMOD[nbytes])
        cqe = ends.a.done.next()
        assert cqe.payload == 0x1122_3344.to_bytes(nbytes, "big" if nbytes == 4 else "little")
        assert cqe.payload == ends.here.bytes[:nbytes].tobytes()


# --- received SENDs in entries of 128 bytes --------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, *SIZES])
def test_sends(names, nbytes):
    """Up to 64 bytes are before the CQE, and the receive's buffer is left alone."""
    with opened(names, 128, {}, {"cqe_inline": True}) as ends:
        ends.b.receive(ends.there.at(256, 100))
        before = ends.there.bytes.copy()
        ends.a.post(SEND_IMM if nbytes & 1 else SEND, inline(BYTES[:nbytes]), imm=5)
        cqe = ends.b.arrived.next()
        assert (cqe.opcode, cqe.byte_cnt) == (RESP_SEND_IMM if nbytes & 1 else RESP_SEND, nbytes)
        assert cqe.payload == carried(128, BYTES[:nbytes])
        raw = ends.b.arrived.ring[0].tobytes()
        if cqe.payload:
            assert raw[-1] & 0x0C == FORMAT_64
            assert raw[:96] == BYTES[:nbytes].ljust(96, b"\0")
            assert np.array_equal(ends.there.bytes, before)
        else:
            assert raw[-1] & 0x0C == 0
            assert ends.there.bytes[256 : 256 + nbytes].tobytes() == BYTES[:nbytes]


# --- on a GPU --------------------------------------------------------------------------------------------------------


def test_turns_of_a_gpu():
    """There WQEs are executed by warps, several at a time; those whose CQEs carry payload are not."""
    with opened(("soft0",), 64, {"cqe_inline_responses": True}, {}, port=PortConfig(engine="twin")) as ends:
        for n in range(8):
            ends.a.put(READ, ends.there.remote(16 * n), ends.here.at(16 * n, 16))
        ends.a.ring()
        assert [cqe.payload for cqe in ends.a.done.take(8)] == [
            ends.there.bytes[16 * n : 16 * n + 16].tobytes() for n in range(8)
        ]
