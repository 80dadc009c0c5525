"""Draw the PCIe tree and the matrix of distances as a self-contained SVG.

The picture has no background. Text is in filled boxes; everything outside of boxes is grey, which is visible on white
and on black.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from xml.etree import ElementTree

from .tree import Node, plain

_LETTER, _FONT = 7.3, 12  # width and size of a letter, in pixels
_PAD, _ROW, _BOX, _GAP = 8, 44, 36, 28  # padding in a box, row pitch, height of a box, gap between columns
_CELL_HEIGHT, _MARGIN = 24, 12
_GREY = "#808080"
_INK = "#1b1b1b"
FILLS = {
    "host bridge": "#d9d9d9", "root port": "#e6e6e6", "switch": "#cfd8ef", "port": "#e3e8f5", "bridge": "#e6e6e6",
    "GPU": "#bfe3a4", "NIC": "#a9d9e8", "device": "#efefef",
}
_CELLS = {"PIX": "#bfe3a4", "PXB": "#d9ecb4", "PHB": "#f6e8a6", "NODE": "#f7cf9c", "SYS": "#f2b0a5", "NV": "#b9d7ff"}
_PLAIN_CELL = "#e6e6e6"


@dataclass
class _Box:
    """A node and its place in the picture."""

    node: Node
    column: int
    row: float
    below: list[_Box] = field(default_factory=list)

    @property
    def words(self) -> tuple[str, str]:
        """The two lines of a box: name and address, then details."""
        node = self.node
        return f"{node.name}  {node.address}".strip(), ", ".join(node.details)


def draw(nodes: Iterable[Node], matrix: dict[str, dict[str, str]]) -> bytes:
    """Return the SVG file as UTF-8 bytes."""
    boxes, leaves = _place(nodes)
    every = list(_all(boxes))
    widths: dict[int, float] = {}
    for box in every:
        widths[box.column] = max(widths.get(box.column, 0), *(len(words) * _LETTER + 2 * _PAD for words in box.words))
    lefts, x = {}, float(_MARGIN)
    for column in sorted(widths):
        lefts[column], x = x, x + widths[column] + _GAP
    picture = ElementTree.Element(
        "svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "font-size": str(_FONT)},
    )
    picture.set("font-family", "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace")
    ElementTree.SubElement(picture, "title").text = "PCIe topology of GPUs and NICs"
    for box in every:
        _lines(picture, box, lefts, widths)
    for box in every:
        _box(picture, box, lefts[box.column], widths[box.column])
    right, bottom = _matrix(picture, matrix, _MARGIN + leaves * _ROW + 20)
    width, height = max(x - _GAP, right) + _MARGIN, bottom + _MARGIN
    picture.set("viewBox", f"0 0 {width:.0f} {height:.0f}")
    picture.set("width", f"{width:.0f}")
    picture.set("height", f"{height:.0f}")
    ElementTree.indent(picture)
    return ElementTree.tostring(picture, encoding="utf-8", xml_declaration=True) + b"\n"


def _place(nodes: Iterable[Node]) -> tuple[list[_Box], int]:
    """Place boxes for all nodes. Each leaf has its own row; other nodes are centred on the nodes below them."""
    leaves = 0

    def place(node: Node, column: int) -> _Box:
        nonlocal leaves
        below = [place(one, column + 1) for one in node.below]
        if below:
            return _Box(node, column, (below[0].row + below[-1].row) / 2, below)
        leaves += 1
        return _Box(node, column, leaves - 1)

    return [place(node, 0) for node in nodes], leaves


def _all(boxes: Iterable[_Box]) -> Iterable[_Box]:
    for box in boxes:
        yield box
        yield from _all(box.below)


def _middle(box: _Box) -> float:
    return _MARGIN + box.row * _ROW + _BOX / 2


def _lines(picture: ElementTree.Element, box: _Box, lefts: dict[int, float], widths: dict[int, float]) -> None:
    """Draw lines from a box to the boxes below it."""
    start = lefts[box.column] + widths[box.column]
    for one in box.below:
        end = lefts[one.column]
        turn = end - _GAP / 2
        ElementTree.SubElement(
            picture, "path", fill="none", stroke=_GREY,
            d=f"M{start:.1f} {_middle(box):.1f}H{turn:.1f}V{_middle(one):.1f}H{end:.1f}",
        )


def _box(picture: ElementTree.Element, box: _Box, x: float, width: float) -> None:
    top = _middle(box) - _BOX / 2
    _rectangle(picture, x, top, width, _BOX, FILLS[box.node.kind])
    first, second = box.words
    bold = {"font-weight": "bold"} if box.node.kind in ("GPU", "NIC") else {}
    _text(picture, x + _PAD, top + (15 if second else 22), first, **bold)
    if second:
        _text(picture, x + _PAD, top + 29, second)


def _matrix(picture: ElementTree.Element, matrix: dict[str, dict[str, str]], top: float) -> tuple[float, float]:
    """Draw a coloured cell for each distance. Return the right and bottom edges."""
    columns = list(next(iter(matrix.values()), {}))
    first = max(map(_wide, matrix), default=0)
    y = top
    for index, (gpu, row) in enumerate([("", {name: name for name in columns}), *matrix.items()]):
        x, y = _MARGIN + first, top + index * _CELL_HEIGHT
        _text(picture, _MARGIN, y + 16, gpu, fill=_GREY)
        for name in columns:
            if index:
                fill = _CELLS.get("NV" if row[name].startswith("NV") else row[name], _PLAIN_CELL)
                _rectangle(picture, x + 1, y + 1, _wide(name) - 2, _CELL_HEIGHT - 2, fill)
            middle = x + _wide(name) / 2
            _text(picture, middle, y + 16, row[name], **{"text-anchor": "middle"}, fill=_INK if index else _GREY)
            x += _wide(name)
    return _MARGIN + first + sum(map(_wide, columns)), y + _CELL_HEIGHT if matrix else top


def _wide(name: str) -> float:
    return max(len(name), 4) * _LETTER + 2 * _PAD


def _rectangle(picture: ElementTree.Element, x: float, y: float, width: float, height: float, fill: str) -> None:
    where = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": f"{height:.1f}"}
    ElementTree.SubElement(picture, "rect", where, rx="4", fill=fill)


def _text(picture: ElementTree.Element, x: float, y: float, words: str, fill: str = _INK, **more: str) -> None:
    where = {"x": f"{x:.1f}", "y": f"{y:.1f}", "fill": fill} | more
    ElementTree.SubElement(picture, "text", where).text = plain(words)
