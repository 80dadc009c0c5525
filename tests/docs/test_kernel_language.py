"""docs/kernel-language.md is true: its programs run, and the compiler refuses what the page says, in these words."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from gpunetio import device
from gpunetio.errors import InvalidValueError
from gpunetio.jit.calls import BUILTINS
from repository import ROOT

PAGE = ROOT / "docs" / "kernel-language.md"
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ARGUMENTS = {"a": 3, "x": 2.5, "t": (1, 2, 3), "p": np.zeros(4, np.int64)}

pytestmark = pytest.mark.host_memory


def blocks(language: str) -> list[str]:
    return [code for name, code in FENCED.findall(PAGE.read_text()) if name == language]


def refused() -> Iterator[tuple[str, str]]:
    for block in blocks("py"):
        for part in block.split("\n\n"):
            code, _, words = part.strip().rpartition("\n# ")
            yield code, words


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """A function that imports a program from a file: the compiler reads the source."""

    def run(code: str, **names: object) -> ModuleType:
        file = tmp_path / f"program_of_the_page_{tmp_path.name}.py"
        file.write_text(code)
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, file.stem, module)
        vars(module).update(names)
        spec.loader.exec_module(module)
        return module

    return run


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: re.findall(r"def (\w+)", code)[-1])
def test_a_program_runs(code, imported):
    imported(code)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("code, words", list(refused()), ids=lambda text: text[:40])
def test_the_compiler_refuses(code, words, imported):
    function = imported(code, dev=device).f
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    with pytest.raises(InvalidValueError) as raised:
        device.device_function(function)(*[ARGUMENTS[name] for name in names])
    assert words == str(raised.value).splitlines()[0].split(": in f(): ")[1]


def test_every_function_of_math_is_there():
    text = PAGE.read_text()
    listed = re.search(r"Functions of `math`: (.*?), and constants", text, re.DOTALL)
    assert listed is not None
    have = {function.__name__ for function in BUILTINS if function.__module__ == "math"}
    assert re.findall(r"`(\w+)`", listed[1]) == sorted(have)


def test_every_built_in_function_is_there():
    (listed,) = re.findall(r"Built-in functions: (.*)", PAGE.read_text())
    have = {function.__name__ for function in BUILTINS if function.__module__ == "builtins"}
    assert set(re.findall(r"`(\w+)`", listed)) - {"for"} == have
