"""Programs with types check against the package's: the stub of the device library, and two type checkers."""

import ast
import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpunetio
from gpunetio import Gpu, device
from gpunetio.eth import headers
from gpunetio.formats.layout import Entry
from gpunetio.gpu.group import QpOptions
from gpunetio.verbs import QP
from gpunetio.verbs.qp import ConnectOptions
from repository import DATA

PACKAGE = Path(gpunetio.__file__).parent
PROGRAM = DATA / "typed_program.py"
LEAST_KNOWN = 0.98  # of the package's symbols


def run(*command: object, timeout: float = 100, **environment: str) -> subprocess.CompletedProcess[str]:
    """A tool of this Python that finds the package as a program would."""
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment},
    )


def tool(name: str) -> str:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name} (extra 'dev')")
    return name


def test_the_package_says_that_it_has_types():
    assert (PACKAGE / "py.typed").is_file()


# --- the stubs of what is compiled ------------------------------------------------------------------------------------

STUBS = {
    module: ast.parse((PACKAGE.parent / module.__name__.replace(".", "/") / "__init__.pyi").read_text())
    for module in (device, headers)
}
FUNCTIONS = [
    pytest.param(module, one, id=one.name)
    for module, stub in STUBS.items() for one in stub.body if isinstance(one, ast.FunctionDef)
]


@pytest.mark.parametrize("module", STUBS, ids=lambda module: module.__name__)
def test_the_stub_has_every_name(module):
    body = STUBS[module].body
    functions = {one.name for one in body if isinstance(one, ast.FunctionDef)}
    constants = {one.target.id: one for one in body if isinstance(one, ast.AnnAssign)}  # type: ignore[union-attr]
    imported = {name.asname for one in body if isinstance(one, ast.ImportFrom) for name in one.names}
    assert {*functions, *constants, *imported - {None}} == set(module.__all__)
    kinds = {"int": int, "Entry": Entry}
    assert all(isinstance(getattr(module, name), kinds[one.annotation.id]) for name, one in constants.items())
    (names,) = (one.value for one in body if isinstance(one, ast.Assign) and ast.unparse(one.targets) == "__all__")
    assert ast.literal_eval(names) == module.__all__


@pytest.mark.parametrize(("module", "stated"), FUNCTIONS)
def test_the_stub_has_the_signature(module, stated):
    found = getattr(module, stated.name)
    taken = [one for one in inspect.signature(found).parameters.values() if one.name != "typingctx"]
    assert [one.arg for one in stated.args.args] == [one.name for one in taken]
    defaults = [eval(ast.unparse(one), dict(vars(module))) for one in stated.args.defaults]
    assert defaults == [one.default for one in taken if one.default is not inspect.Parameter.empty]


def type_of(values: list[ast.expr | None]) -> str:
    """What a function returns that returns these, and integers in place of what it calls."""
    if all(value is None for value in values):
        return "None"
    assert None not in values
    for value in values:
        if isinstance(value, ast.Tuple):
            return f"tuple[{', '.join(['int'] * len(value.elts))}]"
    truth = all(isinstance(one, ast.Compare) or isinstance(getattr(one, "value", None), bool) for one in values)
    return "bool" if truth else "int"


@pytest.mark.parametrize(("module", "stated"), FUNCTIONS)
def test_the_stub_says_what_is_returned(module, stated):
    """Where the function is written in Python: nothing, an integer or several, or a truth, on each way out."""
    written = getattr(getattr(module, stated.name), "py_func", None)
    if written is None:
        return
    (function,) = ast.parse(inspect.getsource(written)).body
    if function.returns is not None:
        assert ast.unparse(stated.returns) == ast.unparse(function.returns)
        return
    returned = [one.value for one in ast.walk(function) if isinstance(one, ast.Return)]
    assert ast.unparse(stated.returns or ast.Constant(None)) == type_of(returned)


# --- options that are passed on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, of, required", [
    (ConnectOptions, QP.connect, ("self", "remote")), (QpOptions, Gpu.create_qp, ("self", "pd")),
])
def test_options_are_those_of_the_method(options, of, required):
    taken = inspect.signature(of).parameters.values()
    stated = {name: kind.__forward_arg__ for name, kind in options.__annotations__.items()}
    assert stated == {one.name: one.annotation for one in taken if one.name not in required}


def test_arguments_can_be_given_by_name():
    """Only a Protocol leaves their names open, and a function whose other names are those of a structure's fields."""
    nameless = set()
    for path in PACKAGE.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.args.posonlyargs:
                nameless.add(f"{path.relative_to(PACKAGE)}: {function.name}")
    assert nameless == {"formats/layout.py: update", "verbs/devx/posting.py: complete"}


# --- Any --------------------------------------------------------------------------------------------------------------

# What has no types, by the module or package that uses it. All others tell each other what their objects are.
UNTYPED = {
    "__init__.py": "modules that are loaded when they are asked for",
    "bench/remote.py": "fields of a message, by their names",
    "cli": "click's values",
    "dlpack.py": "objects with memory, of any library",
    "foreign.py": "functions of Numba",
    "formats/layout.py": "fields of a structure, by their names",
    "gpu/cuda_backend.py": "what CUDA's runtime returns",
    "gpu/memory.py": "arrays of NumPy, or what describes one",
    "interrupts.py": "handlers of signals",
    "jit": "llvmlite, and values of programs",
    "memory.py": "objects with memory, of any library",
    "nic/memory/lost_memory.py": "ctypes",
    "nic/observe/running.py": "JSON of another process",
    "nic/state/record.py": "declarations of fields, which type checkers see as integers",
    "providers/mlx5": "functions of ctypes",
    "providers/sdk": "functions of ctypes",
    "rendezvous": "JSON of another process, MPI, stores of torch",
    "uverbs": "objects of many kinds, by their handles, and functions of ctypes",
    "verbs/ibv/device.py": "attributes that a queue does not have",
}


def test_any_is_for_what_has_no_types():
    using = set()
    for path in PACKAGE.rglob("*.py"):
        names = {one.id for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.Name)}
        if "Any" in names:
            module = path.relative_to(PACKAGE)
            using.add(next((str(one) for one in (module, *module.parents) if str(one) in UNTYPED), str(module)))
    assert using == UNTYPED.keys(), "give it a type, or say in UNTYPED what has none"


# --- programs ---------------------------------------------------------------------------------------------------------


def mypy(folder: Path) -> list[str]:
    """What is wrong in the programs of a folder, one line each: `…file:line: …`."""
    options = ("--strict", "--follow-imports=silent", "--cache-dir", folder)
    done = run("-m", tool("mypy"), *options, *folder.glob("*.py"), MYPYPATH=str(PACKAGE.parent))
    assert done.returncode in (0, 1), done.stderr
    return [line for line in done.stdout.splitlines() if ": error: " in line]


def pyright(folder: Path) -> list[str]:
    settings = {"include": ["*.py"], "typeCheckingMode": "strict", "pythonVersion": "3.11"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    done = run("-m", tool("pyright"), "-p", folder, "--pythonpath", sys.executable, "--outputjson")
    told = json.loads(done.stdout)
    assert told["summary"]["filesAnalyzed"] == len(list(folder.glob("*.py")))
    return [
        f"{one['file']}:{one['range']['start']['line'] + 1}: {one['message']}" for one in told["generalDiagnostics"]
    ]


WRONG = """
import gpunetio as gn
from gpunetio import device as dev
with gn.open('soft0') as nic:
    nic.create_pd().create_qp(sq_wr='16')
dev.put('queue')
gn.Gpu().alloc(64, gn.QpType.RC)
"""


@pytest.mark.parametrize("checker", [pytest.param(mypy, marks=pytest.mark.slow), pyright])
def test_a_typed_program_is_right_and_what_is_wrong_is_found(tmp_path, checker):
    """Both at once, as a checker reads all of the package each time."""
    shutil.copy(PROGRAM, tmp_path)
    (tmp_path / "wrong.py").write_text(WRONG)
    lines = [line.split(":") for line in checker(tmp_path)]
    assert {(Path(file).name, int(number)) for file, number, *_ in lines} == {("wrong.py", n) for n in (5, 6, 7)}


@pytest.mark.slow
def test_the_types_of_the_package_are_known():
    """Without those of llvmlite and others that have no stubs."""
    options = ("--verifytypes", "gpunetio", "--ignoreexternal", "--outputjson", "--pythonpath", sys.executable)
    told = json.loads(run("-m", tool("pyright"), *options).stdout)["typeCompleteness"]
    unknown = [one["name"] for one in told["symbols"] if one["isExported"] and not one["isTypeKnown"]]
    assert told["completenessScore"] >= LEAST_KNOWN, "types that are not declared: " + ", ".join(unknown)


@pytest.mark.slow
@pytest.mark.timeout(600)  # the NIC may have to be compiled first
def test_the_typed_program_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it leaves a capture
    done = run("-W", "error", PROGRAM, timeout=590, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("all done: ['host']")
