"""Kernels as cubins: compiled once, by another process, and read from disk from then on."""

import logging
import os
import sys

import pytest

pytest.importorskip("numba_cuda", reason="needs numba-cuda (extra 'cuda')")

import cuda_kernels
from gpunetio.errors import DriverError
from gpunetio.jit import cubin
from gpunetio.kept import unsealed, write_kept
from gpunetio.nic.slice_kernel import OPTIONS, gpunetio_slice

SM_90 = (9, 0)
ELF = b"\x7fELF"


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty folder for compiled code."""

    class Kept:
        cache_path = str(tmp_path)

    monkeypatch.setattr(cubin, "cache_of", lambda *_: Kept())
    return tmp_path


@pytest.fixture
def compiler(monkeypatch):
    """What compiles, in place of the compiler: it counts."""
    compiled = []

    def compile_to(file, kernel, capability, options=()):
        compiled.append((kernel.__name__, capability))
        file.write_bytes(ELF + bytes(len(compiled)))

    monkeypatch.setattr(cubin, "compile_to", compile_to)
    return compiled


def test_a_kernel_is_compiled_once(cache, compiler, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "gpunetio.compile"):
        first = cubin.cubin(gpunetio_slice, SM_90, OPTIONS)
    assert "compiling gpunetio_slice for sm_90" in caplog.text
    assert cubin.cubin(gpunetio_slice, SM_90, OPTIONS) == first
    assert compiler == [("gpunetio_slice", SM_90)]
    # another GPU, other options, another version of what is compiled: each has a file, and the last one replaces
    cubin.cubin(gpunetio_slice, (10, 0), OPTIONS)
    monkeypatch.setattr(cubin, "stamp", lambda _: "changed")
    assert cubin.cubin(gpunetio_slice, SM_90, OPTIONS) != first
    assert len(compiler) == 3
    assert sorted(file.name.split(".")[1] for file in cache.iterdir()) == ["sm_100", "sm_90"]


KEY = {  # what decides what is in a file: how each changes
    "kernel": lambda patch: patch.setattr(cubin, "stamp", lambda _: "changed"),
    "capability": lambda patch: {"capability": (10, 0)},
    "options": lambda patch: {"options": (*OPTIONS, "-lineinfo")},
    "order of options": lambda patch: {"options": ("-a", "-b")},
}


@pytest.mark.parametrize("change", KEY)
def test_each_input_is_in_the_key(cache, compiler, monkeypatch, change):
    asked = {"capability": SM_90, "options": ("-b", "-a") if "order" in change else OPTIONS}
    cubin.cubin(gpunetio_slice, **asked)
    (before,) = (file.name for file in cache.iterdir())
    cubin.cubin(gpunetio_slice, **asked | (KEY[change](monkeypatch) or {}))
    assert len(compiler) == 2
    assert {file.name for file in cache.iterdir()} != {before}


@pytest.mark.parametrize("damage", [lambda it: it[:-1], lambda it: b"", lambda it: b"?" + it[1:]])
def test_a_damaged_file_is_compiled_again(cache, compiler, caplog, damage):
    cubin.cubin(gpunetio_slice, SM_90, OPTIONS)
    (file,) = cache.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    again = cubin.cubin(gpunetio_slice, SM_90, OPTIONS)
    assert "is not used (it is damaged: its checksum is wrong): it is compiled again" in caplog.text
    assert cubin.cubin(gpunetio_slice, SM_90, OPTIONS) == again
    assert len(compiler) == 2


def test_code_that_others_may_replace_is_not_loaded(cache, compiler, caplog):
    cubin.cubin(gpunetio_slice, SM_90, OPTIONS)
    cache.chmod(0o777)
    cubin.cubin(gpunetio_slice, SM_90, OPTIONS)
    assert "can be written by others (mode 777)" in caplog.text
    assert len(compiler) == 2


def test_a_folder_that_cannot_be_written_to(cache, compiler, monkeypatch, caplog):
    monkeypatch.setattr(cubin, "write_kept", lambda *_: (_ for _ in ()).throw(PermissionError(13, "not allowed")))
    monkeypatch.setattr(cubin, "compile_to", lambda file, *_: file.touch())
    assert cubin.cubin(gpunetio_slice, SM_90, OPTIONS) == b""
    assert "cannot be written (not allowed): every process compiles it again" in caplog.text


def test_a_wheel_may_bring_it(compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(cubin, "cache_of", lambda *_: None)
    monkeypatch.setattr(cubin.prebuilt, "folder_of", lambda source: tmp_path)
    write_kept(tmp_path / cubin._name(gpunetio_slice, SM_90, OPTIONS), ELF)
    assert cubin.cubin(gpunetio_slice, SM_90, OPTIONS) == ELF
    assert not compiler


def test_what_does_not_compile_is_said(tmp_path):
    def nothing(_): ...

    with pytest.raises(DriverError, match=r"nothing does not compile for CUDA: .+"):
        cubin.compile_to(tmp_path / "nothing.cubin", nothing, SM_90)


def test_a_process_compiles_it(cache, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # the kernel is not the package's
    image = cubin.cubin(cuda_kernels.buffers, SM_90)
    assert image.startswith(ELF)
    assert b".text.buffers" in image
    assert [unsealed(file.read_bytes()) for file in cache.iterdir()] == [image]
