"""The request buffer: segments in any order, doubled and cut, against the bytes that the client has sent."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpunetio.packet_processing.connection import REQUEST_BYTES, SERVED
from gpunetio.packet_processing.request_buffer import consume, keep_ahead, take_payload

SEQUENCE = (1 << 32) - 700  # numbers wrap on the way


class Buffer:
    """A buffer, and what is done to it as the server would."""

    def __init__(self):
        self._row, self.memory = np.zeros(SERVED.size, np.uint8), np.zeros(REQUEST_BYTES + 8, np.uint8)
        self.memory[REQUEST_BYTES:] = 0xEE
        self.row = SERVED.at(self._row)
        self.row["rcv_nxt"] = SEQUENCE
        self.consumed = 0

    @property
    def received(self):
        """Return the bytes of the stream that were taken."""
        return self.consumed + int(self.row["filled"])

    def take(self, stream, begin, end):
        """Take a segment, if it is in the window."""
        data = np.frombuffer(stream[begin:end] + b"?", np.uint8)
        gap, row, buffer = begin - self.received, self._row.ctypes.data, self.memory.ctypes.data
        if gap > REQUEST_BYTES - int(self.row["filled"]) or end <= self.received:
            return
        if gap > 0:
            keep_ahead(row, buffer, data.ctypes.data, end - begin, gap)
        else:
            take_payload(row, buffer, data.ctypes.data - gap, end - begin + gap, False)

    def consume(self, nbytes):
        consume(self._row.ctypes.data, self.memory.ctypes.data, nbytes)
        self.consumed += nbytes

    def check(self, stream):
        filled = int(self.row["filled"])
        assert self.memory[:filled].tobytes() == stream[self.consumed : self.received]
        assert int(self.row["rcv_nxt"]) == (SEQUENCE + self.received) % (1 << 32)
        assert (self.memory[REQUEST_BYTES:] == 0xEE).all()


STREAM = np.random.default_rng(1).integers(0, 256, 6000, np.uint8).tobytes()
PLACES = st.integers(0, 5500)


@given(st.lists(st.one_of(
    st.tuples(st.just("segment"), PLACES, st.integers(1, 1460)),
    st.tuples(st.just("next"), st.integers(-50, 300), st.integers(1, 500)),
    st.tuples(st.just("consume"), st.integers(0, 2048), st.just(0)),
), max_size=40))
def test_segments_in_any_order(steps):
    buffer = Buffer()
    for what, at, nbytes in steps:
        if what == "consume":
            buffer.consume(min(at, int(buffer.row["filled"])))
        else:
            begin = min(max(0, buffer.received + at if what == "next" else at), 5500)
            buffer.take(STREAM, begin, min(begin + nbytes, 6000))
        buffer.check(STREAM)


def test_what_came_too_early_is_taken_with_what_was_missing():
    """One stretch, to which more may come at both ends, also after a request before it was answered."""
    buffer = Buffer()
    for begin, end in ((0, 100), (300, 400), (400, 500), (250, 310), (600, 700)):
        buffer.take(STREAM, begin, end)
    assert buffer.received == 100
    buffer.consume(80)
    buffer.take(STREAM, 100, 250)
    assert buffer.received == 500  # what was behind the second gap is lost
    buffer.check(STREAM)
