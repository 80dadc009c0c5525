"""Put the Ethernet frames of a capture file into a pipe, in compiled code, because such files have millions.

The file is read in pieces and not mapped: shortening a mapped file would kill the program.
"""

from __future__ import annotations

from ..formats.layout import I64, Record
from ..formats.packet import ETHERNET
from ..jit.compile import device_function, engine_function
from ..jit.ops import be32, copy, ld32
from ..memory import HostMemory
from .frames import ETHERNET_FRAME, PACKET, Frame, PipeEnd, commit, publish, reserve
from .pcap_reader import CUT_SHORT, LARGEST_RECORD, RECORD, PcapFile

WHENEVER = (1 << 63) - 1  # as `until_ns`: ignore the time stamps
_PIECE = 1 << 19  # bytes; a record of LARGEST_RECORD fits in
_PUBLISH_EVERY = 32  # frames


class PcapPiece(Record, size=72):
    """A piece of a capture file that is played.

    A piece of a file: whole records from `begin` to `end`, with numbers in this machine's byte order unless `swapped`.
    `unit` is the number of nanoseconds in one unit of a time stamp's fraction. `longest` is the longest frame so far.
    `put` counts frames that were put into the pipe, `cut` truncated ones that were skipped. `first` is the time stamp
    of the first frame. The frame that was looked at last is due `due` ns later.
    """

    begin: I64 = 0
    end: I64 = 8
    swapped: I64 = 16
    unit: I64 = 24
    longest: I64 = 32
    put: I64 = 40
    cut: I64 = 48
    first: I64 = 56
    due: I64 = 64


PCAP_PIECE = PcapPiece.entry


@device_function
def _field(piece: PcapPiece, address: int) -> int:
    return be32(ld32(address)) if piece.swapped else ld32(address)


@engine_function
def _find_end(piece: PcapPiece, end: int) -> None:
    """Find the end of the last whole record before `end`, and the longest record."""
    at = piece.begin
    while end - at >= RECORD.size:
        captured = _field(piece, at + RECORD.captured)
        if captured > LARGEST_RECORD or captured > end - at - RECORD.size:
            break
        piece.longest = max(piece.longest, captured)
        at += RECORD.size + captured
    piece.end = at


@engine_function
def _put_frames(piece: PcapPiece, end: PipeEnd, until: int) -> int:
    """Put frames that are due `until` ns after the first into the pipe, while there is room. Return how many."""
    before = piece.put
    while piece.begin < piece.end:
        record = piece.begin
        captured = _field(piece, record + RECORD.captured)
        if captured < _field(piece, record + RECORD.whole) or captured < ETHERNET.size:
            piece.cut += 1
        else:
            time = _field(piece, record + RECORD.seconds) * 1_000_000_000
            time += _field(piece, record + RECORD.fraction) * piece.unit
            if piece.put == 0:
                piece.first = time
            piece.due = time - piece.first
            if piece.due > until:
                break
            frame = Frame(reserve(end, captured))
            if frame == 0:
                break
            frame.nbytes, frame.reference = captured, ETHERNET_FRAME
            copy(frame + PACKET, record + RECORD.size, captured)
            commit(end)
            piece.put += 1
            if piece.put % _PUBLISH_EVERY == 0:
                publish(end)
        piece.begin += RECORD.size + captured
    publish(end)
    return piece.put - before


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
