"""Read the imports of gpunetio's modules from their source.

An import inside a function counts like any other. One under `if TYPE_CHECKING:` never runs: it counts only for types.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

Module = tuple[str, ...]  # a dotted name in parts


def module_of(path: Path, package: str) -> Module:
    """Return the module in a file. `path` is relative to the package."""
    return (package, *(path.parent if is_package(path) else path.with_suffix("")).parts)


def is_package(path: Path) -> bool:
    return path.name == "__init__.py"


def imports(source: str, module: Module, package: bool, types: bool) -> Iterator[tuple[int, Module, str | None]]:
    """Yield (line, module, name) for each name that a module imports from another, or None for `import` of a module.

    `package` is whether the importing module is a package, `types` whether imports for types only count.
    """
    for node in _statements(ast.parse(source), types):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, tuple(alias.name.split(".")), None
        else:
            base = module[: len(module) - (node.level - package)] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                yield node.lineno, base, alias.name


def _statements(node: ast.AST, types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield all imports under a node, at any depth; without `types`, those that can run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not types and isinstance(child, ast.If) and _is_type_checking(child.test):
            for other in child.orelse:
                yield from _statements(ast.Module([other], []), types)
        else:
            yield from _statements(child, types)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )
