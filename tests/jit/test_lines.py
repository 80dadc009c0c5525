"""Debuggers and profilers show lines and names of Python: readelf(1) reads what they read."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpunetio.device import device_function
from gpunetio.errors import NotSupportedError
from gpunetio.jit import machine, perf
from gpunetio.jit.cubin import LINES, image_of, ptx_of
from gpunetio.jit.kinds import INT
from gpunetio.jit.lines import Lines
from gpunetio.jit.ops import ld64, st64
from gpunetio.jit.unit import Unit
from repository import environment


@device_function
def inner(address):
    value = ld64(address)  # inner: load
    return value * 3


@device_function
def outer(address, other):
    first = inner(address)  # outer: call
    st64(other, first)  # outer: store


def image_of_outer() -> bytes:
    unit = Unit(machine.host(), lines=Lines(whole=True))
    unit.entry(outer, "outer_entry", (INT, INT))
    return machine.object_of(unit)


def line_with(comment: str) -> int:
    return next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith(comment))


def test_lines_of_all_functions_are_in_the_object(tmp_path: Path) -> None:
    """Also of one that is inlined."""
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf (binutils)")
    (tmp_path / "outer.o").write_bytes(image_of_outer())
    said = subprocess.run(
        ["readelf", "--debug-dump=decodedline", tmp_path / "outer.o"], capture_output=True, text=True, check=True
    ).stdout
    found = {int(line) for line in re.findall(rf"^{Path(__file__).name[:10]}\S*\s+(\d+)\s", said, re.MULTILINE)}
    assert {line_with("# inner: load"), line_with("# outer: store")} <= found
    assert all(inner.py_func.__code__.co_firstlineno <= line <= line_with("# outer: store") for line in found)


def decoded_lines(file: Path, source: str = Path(__file__).name) -> list[tuple[int, int]]:
    """Return address and line of what readelf finds of a source."""
    said = subprocess.run(
        ["readelf", "--debug-dump=decodedline", file], capture_output=True, text=True, check=True
    ).stdout
    shown = re.findall(rf"^(?:\S*/)?{re.escape(source)}\s+(\d+)\s+(?:0x)?([0-9a-f]+)\s", said, re.MULTILINE)
    return sorted((int(address, 16), int(line)) for line, address in shown)


def test_functions_are_those_that_readelf_finds(tmp_path: Path) -> None:
    """With their lines."""
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf (binutils)")
    image = image_of_outer()
    (tmp_path / "outer.o").write_bytes(image)
    said = subprocess.run(["readelf", "-sW", tmp_path / "outer.o"], capture_output=True, text=True, check=True).stdout
    shown = re.findall(r"^ *\d+: (\w+) +(\d+) FUNC +\w+ +\w+ +(\d+) (\S+)$", said, re.MULTILINE)
    assert shown
    found = list(perf.functions(image))
    assert sorted((one.symbol, one.section, one.offset, one.size) for one in found) == sorted(
        (name, int(section), int(value, 16), int(size)) for value, size, section, name in shown
    )
    (entry,) = (one for one in found if one.symbol == "outer_entry")
    inside = [
        (address, line) for address, line in decoded_lines(tmp_path / "outer.o")
        if entry.offset <= address < entry.offset + entry.size
    ]
    assert sorted({(address, line) for address, file, line in entry.lines if file == __file__}) == sorted(set(inside))


PROGRAM = """
import os
from gpunetio.nic.host import engine

engine.post_command.compile()
root = engine.run.compile()
print(os.getpid(), format(root.address, "x"))
"""


def test_names_for_perf() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment(**{perf.SWITCH: "1"}), capture_output=True, text=True,
        timeout=100, check=False,
    )
    assert ran.returncode == 0, ran.stderr
    process, address = ran.stdout.split()
    file = Path(f"/tmp/perf-{process}.map")
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    finally:
        file.unlink()
        Path(f"/tmp/jit-{process}.dump").unlink()
    places = {name: (int(start, 16), int(size, 16)) for start, size, name in lines}
    assert format(places["gpunetio.nic.host.loop.run"][0], "x") == address
    assert "gpunetio.nic.host.engine.post_command" in places
    assert len(places) > 20  # the functions that are not inlined
    assert not any(name.startswith("root_") for name in places)


BUSY = """
import os

import numpy as np

from gpunetio import device_function
from gpunetio.jit.ops import ld64, st64


@device_function
def inner(address):
    total = 0
    for i in range(1000):
        total = total * 3 + ld64(address + (i & 7) * 8)  # where the time goes
    return total


@device_function
def outer(address, rounds):
    for _ in range(rounds):
        st64(address, inner(address))


words = np.ones(8, np.int64)
outer(int(words.ctypes.data), 300_000)
print(os.getpid())
"""


@pytest.mark.slow
def test_perf_shows_lines(tmp_path: Path) -> None:
    """Also those of a function that is inlined: `perf inject` writes an ELF file for each function."""
    program, samples, injected = (tmp_path / name for name in ("busy.py", "perf.data", "perf.jit.data"))
    program.write_text(BUSY)

    def run(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, command)), env=environment(**{perf.SWITCH: "1"}), capture_output=True, text=True,
            timeout=100, check=False, cwd=tmp_path,
        )

    if shutil.which("perf") is None or run("perf", "record", "-e", "cpu-clock", "-o", samples, "true").returncode:
        pytest.skip("needs perf (linux-perf), and the right to sample")
    ran = run("perf", "record", "-k", "mono", "-e", "cpu-clock", "-o", samples, sys.executable, program)
    assert ran.returncode == 0, ran.stderr
    process = ran.stdout.strip()
    try:
        made = run("perf", "inject", "--jit", "-i", samples, "-o", injected)
        assert made.returncode == 0, made.stderr
        names = run("perf", "report", "-i", injected, "--stdio", "--sort", "symbol").stdout
        images = list(Path("/tmp").glob(f"jitted-{process}-*.so"))
        lines = {line for image in images for _, line in decoded_lines(image, "busy.py")}
    finally:
        for pattern in ("perf-{}.map", "jit-{}.dump", "jitted-{}-*.so"):
            for file in Path("/tmp").glob(pattern.format(process)):
                file.unlink()
    assert re.search(r"^ +[0-9.]+% +\[\.\] __main__\.outer\b", names, re.MULTILINE), names
    assert next(n for n, text in enumerate(BUSY.splitlines(), 1) if "where the time goes" in text) in lines


def test_perf_needs_a_library(monkeypatch) -> None:
    """Without which it says so."""
    monkeypatch.setitem(sys.modules, "elftools.elf.elffile", None)
    with pytest.raises(NotSupportedError, match=r"GPUNETIO_PERF needs pyelftools: install gpunetio\[perf\]"):
        list(perf.functions(b""))


def test_no_lines_where_none_are_wanted() -> None:
    assert ".loc" not in ptx_of(outer.py_func, (INT, INT), (9, 0))[0]


def test_lines_in_ptx() -> None:
    """Also those of a function that is inlined (PTX ISA, `.loc`)."""
    text = ptx_of(outer.py_func, (INT, INT), (9, 0), lines=True)[0]
    (file,) = re.findall(rf'^\s*\.file\s+(\d+) "{re.escape(__file__)}"', text, re.MULTILINE)
    found = {int(line) for line in re.findall(rf"^\s*\.loc\s+{file} (\d+) ", text, re.MULTILINE)}
    assert {line_with("# inner: load"), line_with("# outer: store")} <= found


def kernel(address, other):
    outer(address, other)


def test_lines_in_a_cubin(tmp_path: Path, monkeypatch) -> None:
    """For cuda-gdb, compute-sanitizer and profilers, where they are wanted."""
    pytest.importorskip("cuda.bindings", reason="needs cuda-bindings (extra 'cuda')")
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf (binutils)")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = {}
    for wanted in ("", "1"):
        monkeypatch.setenv(LINES, wanted)
        (tmp_path / "outer.cubin").write_bytes(image_of(kernel, (INT, INT), (9, 0)).code)
        found[wanted] = {line for _, line in decoded_lines(tmp_path / "outer.cubin")}
    assert found[""] == set()
    assert {line_with("# inner: load"), line_with("# outer: store")} <= found["1"]
