"""Put the Ethernet frames of a capture file into a pipe, in compiled code, because such files have millions.

The file is read in pieces and not mapped: shortening a mapped file would kill the program.
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
from ..jit.struct_view import Struct

WHENEVER = (1 << 63) - 1  # as `until_ns`: ignore the time stamps
_PIECE = 1 << 19  # bytes; a record of LARGEST_RECORD fits in
_PUBLISH_EVERY = 32  # frames

# A piece of a file: whole records from `begin` to `end`, with numbers in this machine's byte order unless `swapped`.
# `unit` is the number of nanoseconds in one unit of a time stamp's fraction. `longest` is the longest frame so far.
# `put` counts frames that were put into the pipe, `cut` truncated ones that were skipped. `first` is the time stamp of
# the first frame. The frame that was looked at last is due `due` ns later.
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
def _field(p: Struct, address: int) -> int:
    return be32(ld32(address)) if p.swapped else ld32(address)


@engine_function
def _find_end(piece: int, end: int) -> None:
    """Find the end of the last whole record before `end`, and the longest record."""
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
def _put_frames(piece: int, pipe: int, until: int) -> int:
    """Put frames that are due `until` ns after the first into the pipe, while there is room. Return how many."""
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
    """Puts the frames of a file into the pipe whose PIPE_END is at `pipe`, starting at the beginning of the file.

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
        self._at = file.rewind()  # offset in the file of the first byte in memory
        _find_end.compile()  # compile now, not while frames must go out on time
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
        """Return when the frame that was looked at last is due, in ns after the first."""
        return int(self._record["due"])

    def longest(self) -> int:
        """Return the length of the longest frame so far, including those that come next; 0 if there are no more frames.

        InvalidValueError if what comes next is no record.
        """
        if self._record["begin"] == self._record["end"] and not self._read_on():
            return 0
        return max(1, int(self._record["longest"]))

    def put(self, until_ns: int = WHENEVER) -> int:
        """Put frames that are due `until_ns` after the first, while there is room. Return how many.

        Call `longest` before: it reads the next piece of the file.
        """
        count = int(_put_frames(self._piece, self._pipe, until_ns))
        cut = int(self._record["cut"])
        self._file.records = self.count + cut
        self._file.skipped[CUT_SHORT] = cut
        return count

    def _read_on(self) -> bool:
        """Read the next piece of the file. Return whether there was one."""
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
