"""Puts the Ethernet frames of a capture file into a pipe: compiled, because such files have millions.

The file is read in pieces and not mapped: whoever shortens a mapped file ends the program.
"""

from __future__ import annotations


from ..formats.layout import Entry
from ..formats.packet import ETHERNET
from ..jit.compile import device_function, engine_function
from ..jit.ops import be32, copy, ld32
from ..jit.struct_view import View, struct_view
from ..memory import HostMemory
from .frames import ETHERNET_FRAME, PACKET, commit, frame_at, publish, reserve
from .pcap_reader import CUT_SHORT, LARGEST_RECORD, RECORD, PcapFile

WHENEVER = (1 << 63) - 1  # as `until_ns`: whatever the time stamps say
_PIECE = 1 << 19  # bytes; a record of LARGEST_RECORD fits in
_PUBLISH_EVERY = 32  # frames

# A piece of a file: whole records from `begin` to `end`, of numbers in this machine's byte order unless `swapped`.
# `unit` are the nanoseconds of a fraction of a second. `longest` is the longest frame up to here. `put` frames are in
# the pipe, `cut` ones were skipped. `first` is the time stamp of the first frame, and `due` how many ns later the last
# one is that was looked at.
PCAP_PIECE = Entry("pcap_piece", 72, """
    begin      0  i64
    end        8  i64
    swapped   16  i64
    unit      24  i64
    longest   32  i64
    put       40  i64
    cut       48  i64
    first     56  i64
    due       64  i64
""")
_piece_at: View = struct_view(PCAP_PIECE)


@device_function
def _field(p, address):
    return be32(ld32(address)) if p.swapped else ld32(address)


@engine_function
def _find_end(piece, end):
    """Find where the last whole record ends, before `end`, and the longest one."""
    p = _piece_at(piece)
    at = p.begin
    while end - at >= RECORD.size:
        captured = _field(p, at + RECORD.captured)
        if captured > LARGEST_RECORD or captured > end - at - RECORD.size:
            break
        p.longest = max(p.longest, captured)
        at += RECORD.size + captured
    p.end = at


@engine_function
def _put_frames(piece, pipe, until):
    """Put frames that are due `until` ns after the first into the pipe, as long as there is room. Return how many."""
    p = _piece_at(piece)
    before = p.put
    while p.begin < p.end:
        record = p.begin
        captured = _field(p, record + RECORD.captured)
        if captured < _field(p, record + RECORD.whole) or captured < ETHERNET.size:
            p.cut += 1
        else:
            time = _field(p, record + RECORD.seconds) * 1_000_000_000 + _field(p, record + RECORD.fraction) * p.unit
            if p.put == 0:
                p.first = time
            p.due = time - p.first
            if p.due > until:
                break
            frame = reserve(pipe, captured)
            if frame == 0:
                break
            f = frame_at(frame)
            f.nbytes, f.reference = captured, ETHERNET_FRAME
            copy(frame + PACKET, record + RECORD.size, captured)
            commit(pipe)
            p.put += 1
            if p.put % _PUBLISH_EVERY == 0:
                publish(pipe)
        p.begin += RECORD.size + captured
    publish(pipe)
    return p.put - before


class PcapFrames:
    """Puts the frames of a file into the pipe whose PIPE_END is at `pipe`, from the beginning of the file on.

    Records without a whole frame are skipped. The file's `records` and `skipped` count what was put and skipped.
    """

    def __init__(self, file: PcapFile, pipe: int):
        self._file, self._pipe = file, pipe
        self._memory = HostMemory(_PIECE + PCAP_PIECE.size)
        self._bytes = self._memory.array[:_PIECE]
        self._piece = self._memory.address + _PIECE
        self._record = self._memory.view(PCAP_PIECE.dtype, _PIECE)[0]
        self._record["swapped"], self._record["unit"] = file.big_endian, file.unit
        self._record["begin"] = self._record["end"] = self._filled = self._memory.address
        self._at = file.rewind()  # where in the file the bytes come from that are first in memory
        _find_end.compile()  # not while frames have to keep to their times
        _put_frames.compile()

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()

    @property
    def count(self) -> int:
        """Return how many frames were put."""
        return int(self._record["put"])

    @property
    def due_ns(self) -> int:
        """Return when the frame is due that was looked at last, in ns behind the first."""
        return int(self._record["due"])

    def longest(self) -> int:
        """Return the bytes of the longest frame up to those that come next; 0 if there are no more frames.

        InvalidValueError if what comes next is no record.
        """
        if self._record["begin"] == self._record["end"] and not self._read_on():
            return 0
        return max(1, int(self._record["longest"]))

    def put(self, until_ns: int = WHENEVER) -> int:
        """Put frames that are due `until_ns` behind the first, as far as there is room. Return how many.

        Only after `longest`, which reads the file on.
        """
        count = int(_put_frames(self._piece, self._pipe, until_ns))
        cut = int(self._record["cut"])
        self._file.records = self.count + cut
        self._file.skipped[CUT_SHORT] = cut
        return count

    def _read_on(self) -> bool:
        """Read the next piece of the file. Return whether there is any."""
        begin = int(self._record["begin"]) - self._memory.address
        rest = self._bytes[begin : self._filled - self._memory.address].copy()
        self._at += begin
        self._bytes[: len(rest)] = rest
        filled = len(rest) + self._file.read_into(self._bytes[len(rest) :])
        self._filled = self._memory.address + filled
        self._record["begin"] = self._memory.address
        _find_end(self._piece, self._filled)
        if filled and self._record["end"] == self._memory.address:
            raise self._file.damaged(self._at, bytes(self._bytes[: min(filled, RECORD.size)]))
        return filled > 0
