"""Libraries in C are compiled once, and what is missing is told."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpunetio.embed import building, python
from gpunetio.errors import InitializationError, NotPermittedError, NotSupportedError
from gpunetio.uverbs import environment
from stand_in.building import compiler


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/gpunetio"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("const char *answer(void) { return ANSWER; }\n")
    return path


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def need_a_compiler() -> None:
    if compiler() is None:
        pytest.skip("no C compiler")


def test_it_is_compiled_once(cache, source, monkeypatch):
    need_a_compiler()
    made = building.library("answer.so", source, "the test", ANSWER="42")
    assert files(cache) == [made]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert building.library("answer.so", source, "the test", ANSWER="42") == made


@pytest.mark.parametrize("text", ["", "plain", 'a "quoted" \\ path', "Ä/é"])
def test_texts_arrive(source, text):
    need_a_compiler()
    answer = ctypes.CDLL(str(building.library("answer.so", source, "the test", ANSWER=text))).answer
    answer.restype = ctypes.c_char_p
    assert answer().decode() == text


def test_another_text_is_another_library(cache, source):
    need_a_compiler()
    both = [building.library("answer.so", source, "the test", ANSWER=text) for text in ("yes", "no")]
    assert sorted(files(cache)) == sorted(both)


def test_no_compiler(cache, source, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NotSupportedError, match="`the test` compiles a small library once, and there is no C"):
        building.library("answer.so", source, "the test")
    assert not cache.exists()


def test_a_compiler_that_fails(cache, source, monkeypatch):
    monkeypatch.setenv("CC", "false")
    with pytest.raises(InitializationError, match=r"false cannot compile answer\.c: "):
        building.library("answer.so", source, "the test")
    assert files(cache) == []


def test_a_cache_that_is_no_folder(cache, source):
    need_a_compiler()
    cache.parent.mkdir()
    cache.write_text("a file")
    with pytest.raises(InitializationError, match=r"answer\.so cannot be written: (Not a directory|File exists)"):
        building.library("answer.so", source, "the test")


def test_a_damaged_library_is_compiled_again(source):
    """Whatever bytes of it are wrong: a program that loads it would crash."""
    need_a_compiler()
    made = building.library("answer.so", source, "the test", ANSWER="42")
    whole = made.read_bytes()
    for damaged in (b"", whole[:-1], whole[:1000] + b"?" + whole[1001:], b"\0" * len(whole)):
        made.write_bytes(damaged)
        assert building.library("answer.so", source, "the test", ANSWER="42") == made
        assert made.read_bytes() == whole


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("which", [".", "..", "../.."])
def test_a_library_that_another_user_may_replace(cache, source, which):
    """A folder on the way to it, as ~/.cache with HOME=/tmp, belongs to somebody else: nothing of theirs is loaded."""
    need_a_compiler()
    made = building.library("answer.so", source, "the test", ANSWER="42")
    os.chown(made.parent / which, 65534, 65534)
    with pytest.raises(NotPermittedError, match="belongs to nobody; set XDG_CACHE_HOME to a folder of yours"):
        building.library("answer.so", source, "the test", ANSWER="42")
    if which != ".":
        with pytest.raises(NotPermittedError, match="belongs to nobody"):
            building.library("answer.so", source, "the test", ANSWER="another, which is not there yet")


@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_a_library_in_a_folder_that_others_write(source, mode):
    need_a_compiler()
    made = building.library("answer.so", source, "the test", ANSWER="42")
    made.parent.chmod(mode)
    with pytest.raises(NotPermittedError, match=r"can be written by others"):
        building.library("answer.so", source, "the test", ANSWER="42")


def test_a_link_in_place_of_the_library(source):
    need_a_compiler()
    made = building.library("answer.so", source, "the test", ANSWER="42")
    made.symlink_to(made.rename(made.with_name("other.so")))
    with pytest.raises(NotPermittedError, match="is a symbolic link"):
        building.library("answer.so", source, "the test", ANSWER="42")


KEY = {  # what decides what is in a library: how each changes
    "source": lambda patch, here: (here / "answer.c").write_text("const char *answer(void) { return ANSWER; }\n\n"),
    "python.h": lambda patch, here: (here / "embed/python.h").write_text("// changed\n"),
    "another header": lambda patch, here: (here / "embed/another.h").write_text(""),
    "header beside the source": lambda patch, here: (here / "beside.h").write_text(""),
    "options": lambda patch, here: patch.setattr(building, "_OPTIONS", (*building._OPTIONS, "-g")),
    "machine": lambda patch, here: patch.setattr(building.platform, "machine", lambda: "riscv64"),
    "C library": lambda patch, here: patch.setattr(building.os, "confstr", lambda name: "glibc 2.99"),
}


@pytest.mark.parametrize("change", KEY)
def test_each_input_is_in_the_key(source, monkeypatch, change):
    need_a_compiler()
    header = source.parent / "embed/python.h"
    header.parent.mkdir()
    header.write_text("")
    monkeypatch.setattr(building, "HEADER", header)
    before = building.library("answer.so", source, "the test", ANSWER="42")
    KEY[change](monkeypatch, source.parent)
    assert building.library("answer.so", source, "the test", ANSWER="42") != before


TOGETHER = """
import sys
from pathlib import Path
from gpunetio.embed import building

print("ready", flush=True)
sys.stdin.readline()
print(building.library("answer.so", Path(sys.argv[1]), "the test", ANSWER="42"))
"""


def test_processes_that_start_together_compile_once(source, tmp_path, monkeypatch):
    need_a_compiler()
    counting = tmp_path / "counting-cc"
    counting.write_text(f'#!/bin/sh\necho >> {tmp_path}/runs\nsleep 0.3\nexec {compiler()} "$@"\n')
    counting.chmod(0o755)
    monkeypatch.setenv("CC", str(counting))
    command, pipe = [sys.executable, "-c", TOGETHER, str(source)], subprocess.PIPE
    started = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for child in started:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    said = []
    for child in started:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    for child in started:
        said.append(child.communicate(timeout=60)[0])
    assert len(set(said)) == 1
    assert (tmp_path / "runs").read_text() == "\n"


def test_a_cache_by_a_relative_path_is_ignored(source, tmp_path, monkeypatch):
    """As the XDG Base Directory Specification says."""
    need_a_compiler()
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    made = building.library("answer.so", source, "the test", ANSWER="42")
    assert made.is_relative_to(tmp_path / "home/.cache/gpunetio")


def test_no_home(source, monkeypatch):
    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(building.Path, "home", none)
    with pytest.raises(InitializationError, match="no home folder: set XDG_CACHE_HOME"):
        building.library("answer.so", source, "the test")


def test_the_description_of_this_python():
    found = python.description()
    assert found["version"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    first, *others = found["path"].split(":")
    assert (Path(first) / "gpunetio").is_dir()
    assert all(Path(part).name.endswith("-packages") for part in others)
    assert python.description("/a:/b")["path"] == "/a:/b"


def test_a_python_without_a_shared_library(monkeypatch):
    monkeypatch.setattr(python.sysconfig, "get_config_var", lambda name: None)
    assert python.shared_library() is None
    with pytest.raises(NotSupportedError, match="has no shared library, by which a program gets its NICs: on Debian"):
        environment.lasting_environment([])
