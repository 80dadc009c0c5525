"""Kernels as cubins: compiled once, and read from disk from then on."""

import ctypes
import json
import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("cuda.bindings", reason="needs cuda-bindings (extra 'cuda')")

from cuda.bindings import driver, nvjitlink

import cuda_kernels
from compiled import warn_again
from gpunetio.errors import DriverError, InvalidValueError
from gpunetio.jit import cache as kept
from gpunetio.jit import cubin, prebuilt
from gpunetio.jit.kinds import INT
from gpunetio.kept import read_kept, write_kept
from gpunetio.nic.gpu.slice_kernel import OPTIONS, gpunetio_slice

SM_90 = (9, 0)
ELF = b"\x7fELF"


def header(assembler=None):
    return json.dumps({"assembler": assembler or cubin._assembler(), "failures": []}).encode() + b"\n"


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty folder for compiled code."""
    monkeypatch.setenv(kept.FOLDER, str(tmp_path / "code"))
    warn_again()
    yield tmp_path / "code"
    warn_again()


@pytest.fixture
def compiler(monkeypatch):
    """What compiles, in place of the compiler: it counts."""
    compiled = []

    def compile_one(function, kinds, capability, options, threads, by):
        compiled.append((function.__name__, capability))
        return header() + ELF + bytes(len(compiled))

    monkeypatch.setattr(cubin, "_compile", compile_one)
    return compiled


def files(folder):
    """Those of kernels, and not the locks beside them."""
    return sorted(path for path in folder.iterdir() if path.suffix == ".cubin")


def change_kernel(patch):
    """As an edit does, or another value that the kernel freezes."""
    changed = SimpleNamespace(now=lambda: SimpleNamespace(digest="changed"))
    patch.setattr(cubin, "_watch", lambda function: changed)


def pack_for_a_wheel(monkeypatch, tmp_path, file):
    """Move a file of the cache into what a wheel brings, made by another assembler."""
    file.unlink()
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "wheel")
    (tmp_path / "wheel").mkdir(exist_ok=True)
    write_kept(tmp_path / "wheel" / file.name, header("nvJitLink 99.0") + ELF + b"of the wheel")


def test_a_kernel_is_compiled_once(cache, compiler, monkeypatch):
    first = cubin.cubin(gpunetio_slice, SM_90, OPTIONS)
    assert cubin.cubin(gpunetio_slice, SM_90, OPTIONS) == first
    assert compiler == [("gpunetio_slice", SM_90)]
    # another GPU, and another version of what is compiled: each has a file
    cubin.cubin(gpunetio_slice, (10, 0), OPTIONS)
    change_kernel(monkeypatch)
    assert cubin.cubin(gpunetio_slice, SM_90, OPTIONS) != first
    assert len(compiler) == 3
    assert sorted(file.name.split(".")[1] for file in files(cache)) == ["sm_100", "sm_90", "sm_90"]
    assert {file.name.partition("-")[0] for file in files(cache)} == {"gpunetio_slice"}


KEY = {  # what decides what is in a file: how each changes
    "kernel": change_kernel,
    "types": lambda patch: {"kinds": (INT, INT, INT, INT)},
    "capability": lambda patch: {"capability": (10, 0)},
    "options": lambda patch: {"options": (*OPTIONS, "-lineinfo")},
    "order of options": lambda patch: {"options": ("-a", "-b")},
    "threads of a block": lambda patch: {"threads": 256},
    "bounds checks": lambda patch: patch.setenv("GPUNETIO_BOUNDS", "1"),
}


@pytest.mark.parametrize("change", KEY)
def test_each_input_is_in_the_key(cache, compiler, monkeypatch, change):
    options = ("-b", "-a") if "order" in change else OPTIONS
    asked = {"kinds": (INT,) * 3, "capability": SM_90, "options": options, "threads": 1024}
    cubin.image_of(gpunetio_slice, **asked)
    (before,) = files(cache)
    cubin.image_of(gpunetio_slice, **asked | (KEY[change](monkeypatch) or {}))
    assert len(compiler) == 2
    assert len(files(cache)) == 2
    assert before in files(cache)


@pytest.mark.parametrize("damage", [lambda it: it[:-1], lambda it: b"", lambda it: b"?" + it[1:]])
def test_a_damaged_file_is_compiled_again(cache, compiler, caplog, damage):
    cubin.cubin(gpunetio_slice, SM_90, OPTIONS)
    (file,) = files(cache)
    file.write_bytes(damage(file.read_bytes()))
    again = cubin.cubin(gpunetio_slice, SM_90, OPTIONS)
    assert "cannot be read (it is damaged: its checksum is wrong): it is compiled again and replaced" in caplog.text
    assert cubin.cubin(gpunetio_slice, SM_90, OPTIONS) == again
    assert len(compiler) == 2


def test_code_that_others_may_replace_is_not_loaded(cache, compiler, caplog):
    cubin.cubin(gpunetio_slice, SM_90, OPTIONS)
    cache.chmod(0o777)
    cubin.cubin(gpunetio_slice, SM_90, OPTIONS)
    assert "can be written by others (mode 777)" in caplog.text
    assert len(compiler) == 2


def test_a_folder_that_cannot_be_written_to(cache, compiler, monkeypatch, caplog):
    monkeypatch.setattr(kept, "write_kept", lambda *_: (_ for _ in ()).throw(PermissionError(13, "not allowed")))
    assert cubin.cubin(gpunetio_slice, SM_90, OPTIONS).startswith(ELF)
    assert "compiled code cannot be kept in" in caplog.text
    assert "(not allowed): every process compiles again" in caplog.text
    assert not files(cache)


def test_a_wheel_may_bring_it(cache, compiler, monkeypatch, tmp_path):
    cubin.cubin(gpunetio_slice, SM_90, OPTIONS)
    pack_for_a_wheel(monkeypatch, tmp_path, *files(cache))
    assert cubin.cubin(gpunetio_slice, SM_90, OPTIONS) == ELF + b"of the wheel"
    assert len(compiler) == 1


def returns_something(number):
    return number


def test_what_does_not_compile_is_said(cache):
    with pytest.raises(InvalidValueError, match=r"returns_something\(\): a kernel returns nothing, and this one an "):
        cubin.cubin(returns_something, SM_90)
    with pytest.raises(DriverError, match=r"(?s)the kernel's PTX does not assemble for sm_90: .*nonsense"):
        cubin.assemble(".version 8.0\n.target sm_90\n.address_size 64\nnonsense", SM_90)
    with pytest.raises(DriverError, match=r"nvJitLink .* refuses -arch=sm_90 -nonsense: .*OPTION"):
        cubin.cubin(cuda_kernels.buffers, SM_90, ("-nonsense",))
    assert not files(cache)


def test_the_preferred_back_end_where_it_is(cache, monkeypatch):
    """The environment decides; else a kernel's preference, if it is installed and can do what is asked for."""
    used = []

    def compile_one(function, kinds, capability, options, threads, by):
        used.append(by)
        return header() + ELF

    monkeypatch.setattr(cubin, "_compile", compile_one)
    for installed, named, lines in (
        (True, "", ""), (False, "", ""), (True, "llvm", ""), (True, "", "1"), (False, "nvvm", ""),
    ):
        monkeypatch.setattr(cubin, "has_nvvm", lambda installed=installed: installed)
        monkeypatch.setenv(cubin.BACKEND, named)
        monkeypatch.setenv(cubin.LINES, lines)
        cubin.cubin(gpunetio_slice, SM_90, OPTIONS, "nvvm")
        for file in files(cache):
            file.unlink()
    assert used == ["nvvm", "llvm", "llvm", "llvm", "nvvm"]


def test_a_wheel_brings_the_preferred_code_to_those_without_its_compiler(cache, compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(cubin, "has_nvvm", lambda: True)
    cubin.cubin(gpunetio_slice, SM_90, OPTIONS, "nvvm")
    pack_for_a_wheel(monkeypatch, tmp_path, *files(cache))
    monkeypatch.setattr(cubin, "has_nvvm", lambda: False)
    assert cubin.cubin(gpunetio_slice, SM_90, OPTIONS, "nvvm") == ELF + b"of the wheel"
    monkeypatch.setenv(cubin.BACKEND, "llvm")
    assert cubin.cubin(gpunetio_slice, SM_90, OPTIONS, "nvvm") != ELF + b"of the wheel"
    assert len(compiler) == 2


def test_it_is_compiled_and_kept(cache, caplog):
    with caplog.at_level(logging.WARNING):
        image = cubin.cubin(cuda_kernels.buffers, SM_90)
    assert image.startswith(ELF)
    assert b".text.buffers" in image
    assert [read_kept(file).partition(b"\n")[2] for file in files(cache)] == [image]
    assert not caplog.text


def test_another_assembler_assembles_again(cache, compiler, monkeypatch):
    """A newer one makes better code, and an older driver may not load what a newer one has made."""
    for version, count in (("13.0", 1), ("13.0", 1), ("13.1", 2), ("13.1", 2)):
        monkeypatch.setattr(cubin, "linker_version", lambda version=version: version)
        cubin.cubin(gpunetio_slice, SM_90, OPTIONS)
        assert len(compiler) == count
        assert len(files(cache)) == 1


@pytest.mark.parametrize("fails", ["", "cuLinkCreate", "cuLinkAddData", "cuLinkComplete"])
@pytest.mark.parametrize("lines", ["", "1"])
def test_without_the_linker_the_driver_assembles(cache, monkeypatch, fails, lines):
    """It takes the PTX, as text that ends with 0, how many registers a thread may have, and whether lines are kept."""
    monkeypatch.setenv(cubin.LINES, lines)
    seen, made = [], ctypes.create_string_buffer(ELF)

    def add(link, kind, text, size, name, count, options, values):
        seen.append(bytes(text[:size]))
        return (driver.CUresult(fails == "cuLinkAddData"),)

    def create(count, options, values):
        seen.append(dict(zip(options, values, strict=True)))
        return driver.CUresult(fails == "cuLinkCreate"), "link"

    monkeypatch.setattr(cubin, "linker_version", lambda: "")
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, 13000))
    monkeypatch.setattr(driver, "cuLinkCreate", create)
    monkeypatch.setattr(driver, "cuLinkAddData", add)
    complete = driver.CUresult(fails == "cuLinkComplete"), ctypes.addressof(made), len(ELF)
    monkeypatch.setattr(driver, "cuLinkComplete", lambda link: complete)
    monkeypatch.setattr(driver, "cuLinkDestroy", lambda link: seen.append(link))
    if fails:
        with pytest.raises(DriverError, match=rf"the kernel's PTX does not assemble: {fails} returns 1"):
            cubin.image_of(cuda_kernels.buffers, (INT,) * 3, SM_90, threads=512)
        return
    image = cubin.image_of(cuda_kernels.buffers, (INT,) * 3, SM_90, threads=512)
    limit, text, destroyed = seen
    kept = {driver.CUjit_option.CU_JIT_GENERATE_LINE_INFO: 1} if lines else {}
    assert limit == {driver.CUjit_option.CU_JIT_MAX_REGISTERS: 128, **kept}
    assert (b"\t.loc\t" in text) == bool(lines)
    assert b".visible .entry buffers(" in text
    assert text.endswith(b"\0")
    assert destroyed == "link"
    assert image.code == ELF


def fails(out):
    if out == 7:
        raise ValueError("seven")
    cuda_kernels.device.st64(out, 1)


def test_what_a_kernel_may_raise_is_kept_with_it(cache, monkeypatch):
    first = cubin.image_of(fails, (INT,), SM_90)
    ((kind, message, place),) = first.failures
    assert (kind, message) == ("ValueError", "seven")
    assert f"{__file__}:" in place
    monkeypatch.setattr(cubin, "_compile", lambda *_: pytest.fail("it is kept"))
    assert cubin.image_of(fails, (INT,), SM_90) == first


def test_the_linkers_version_is_that_of_the_library():
    assert cubin.linker_version() == ".".join(map(str, nvjitlink.version()))
