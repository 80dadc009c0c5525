"""Libraries in C are compiled once, and what is missing is told."""

import ctypes
import shutil
import sys
from pathlib import Path

import pytest

from gpunetio.embed import building, python
from gpunetio.errors import InitializationError, NotSupportedError
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
    with (
        pytest.raises(NotSupportedError, match="has no shared library, by which a program gets its NICs: on Debian"),
        environment.environment([]),
    ):
        pass
