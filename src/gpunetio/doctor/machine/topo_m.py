"""Run and parse `nvidia-smi topo -m`."""

from __future__ import annotations

import re
from itertools import takewhile

from .host import Host, Reading
from .nvidia_smi import STYLE, said

_GPU = re.compile(r"GPU\d+")
_LEGEND = re.compile(r"\s*(NIC\d+):\s*(\S+)\s*")
_CELL = re.compile(r"X|PIX|PXB|PHB|NODE|SYS|NV\d+")


def query(host: Host) -> Reading:
    """Run `nvidia-smi topo -m`."""
    return said(host, "topo", "-m")


def parse(text: str) -> dict[tuple[str, str], str]:
    """Parse `nvidia-smi topo -m` into {("GPU0", "mlx5_0"): "PIX", …}.

    The legend translates NIC0 and so on. Columns may be separated by tabs, or by blanks in pasted text, because no cell
    contains blanks. Unknown cells are left out.
    """
    lines = STYLE.sub("", text).splitlines()
    legend = {found[1]: found[2] for line in lines if (found := _LEGEND.fullmatch(line))}
    columns: list[str] = []
    cells = {}
    for name, *row in filter(None, map(str.split, lines)):
        if not columns and _GPU.fullmatch(name):
            columns = list(takewhile(lambda word: word != "CPU", (name, *row)))  # up to "CPU Affinity"
        elif name in columns:
            cells |= {(name, column): cell for column, cell in zip(columns, row) if _CELL.fullmatch(cell)}
    return {(legend.get(a, a), legend.get(b, b)): cell for (a, b), cell in cells.items()}
