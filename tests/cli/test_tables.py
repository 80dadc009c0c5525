"""Tables on narrow terminals: long texts are folded, and no number is ever cut."""

import io

import pytest
from rich.console import Console

from gpunetio.cli.running import print_table

COLUMNS = (("order", True), ("match", False), ("to", False), ("counter", True), ("packets", True), ("bytes", True))
ROW = (
    "7", "eth.dst = 02:00:00:00:00:02, ipv6.src = fe80::a00:27ff:fe4e:66a1/128, udp.dst = 4791",
    "TIR 0x200001: RQ 0x300001, 0x300002, 0x300003 by src_ip, dst_ip", "0x400001", "18446744073709551615",
    "18446744073709551614",
)


def printed(width: int, columns, row) -> str:
    out = io.StringIO()
    print_table(Console(file=out, width=width, highlight=False), columns, [row])
    return out.getvalue()


@pytest.mark.parametrize("width", [20, 80, 100, 120])
def test_numbers_are_whole(width):
    text = printed(width, COLUMNS, ROW)
    for cell in ("7", *ROW[3:]):
        assert cell in text.split()
    assert "…" not in text


@pytest.mark.parametrize("width", [80, 100, 120])
def test_texts_are_folded(width):
    """No line is longer than the terminal, and nothing of the texts is lost."""
    row = (*ROW[:4], "1234567", "1234567890")
    text = printed(width, COLUMNS, row)
    assert max(map(len, text.splitlines())) <= width
    everything = "".join([heading for heading, _ in COLUMNS] + [*row])
    assert sorted("".join(text.split())) == sorted("".join(everything.split()))


def test_a_table_that_fits_stays_on_one_line():
    assert len(printed(80, COLUMNS[:1] + COLUMNS[3:], ROW[:1] + ROW[3:]).splitlines()) == 2
