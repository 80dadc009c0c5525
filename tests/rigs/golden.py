"""Tables of golden bytes in tests/data: which bits of a mailbox or a page are set, in a column for each configuration.

    [CREATE_CQ: 272 bytes, answer 16]
                                        plain  collapsed
    opcode              000      16       400          =
    cqc.cc              080+00b   1         .          1

A field has its bit offset as the PRM counts them, the most significant bit of the first byte being 0; "+" goes into a
nested structure. The values follow its width. Sizes and widths are decimal, the rest is hexadecimal; "." is 0, "=" the
value to the left. Bits that no row names are 0. "answer" is the size of the output mailbox.

These tables are worked out by hand, independently of gpunetio's own tables. Tests compare them with what is sent.
"""

import re
from dataclasses import dataclass

from repository import DATA

HEADING = re.compile(r"\[(.+): (\d+) bytes(?:, answer (\d+))?\]")


@dataclass
class Golden:
    """One table: what each configuration, by name, must give."""

    answer: int
    bytes_of: dict[str, bytes]


def tables(file: str) -> dict[str, Golden]:
    """The tables of a file, by heading."""
    lines = [line for line in (DATA / file).read_text().splitlines() if not line.startswith("#")]
    found = {}
    for block in "\n".join(lines).split("\n\n"):
        heading, columns, *rows = block.strip("\n").splitlines()
        name, nbytes, answer = HEADING.fullmatch(heading).groups()
        places, values = zip(*(split(row) for row in rows), strict=True)
        packed = (pack(int(nbytes), places, column) for column in zip(*values, strict=True))
        found[name] = Golden(int(answer or 0), dict(zip(columns.split(), packed, strict=True)))
    return found


def split(row: str) -> tuple[tuple[int, int], list[int]]:
    """A row's bit offset and width, and its values."""
    _, bit, width, *words = row.split()
    values: list[int] = []
    for word in words:
        values.append(values[-1] if word == "=" else 0 if word == "." else int(word, 16))
    assert any(values), f"a row for nothing: {row}"
    return (sum(int(part, 16) for part in bit.split("+")), int(width)), values


def pack(nbytes: int, places: tuple[tuple[int, int], ...], values: tuple[int, ...]) -> bytes:
    """Fields in `nbytes` of zeros, the first bit being the most significant one of the first byte."""
    number = taken = 0
    for (bit, width), value in zip(places, values, strict=True):
        shift, mask = nbytes * 8 - bit - width, (1 << width) - 1
        assert shift >= 0 <= value <= mask, f"{value:#x} is not {width} bits at {bit:#x}"
        assert not taken & mask << shift, f"two rows have bits at {bit:#x}"
        taken |= mask << shift
        number |= value << shift
    return number.to_bytes(nbytes, "big")


def dwords(data: bytes) -> dict[str, str]:
    """The size, and what is not 0, by byte offset: easier to compare by eye."""
    words = {f"{at:#05x}": data[at : at + 4].hex() for at in range(0, len(data), 4) if any(data[at : at + 4])}
    return {"size": str(len(data)), **words}
