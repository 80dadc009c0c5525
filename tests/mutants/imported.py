"""Which modules of a package a module imports, directly or not."""

import ast
from collections.abc import Iterator
from pathlib import Path


def sources_of(module: Path) -> frozenset[Path]:
    """A module, and all that it imports of its package by relative imports, wherever in the text they are."""
    seen: set[Path] = set()
    todo = [module]
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += _imported(path)
    return frozenset(seen)


def _imported(path: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for alias in node.names:  # a module, or a name in one
                places = base / f"{alias.name}.py", base.with_suffix(".py"), base / "__init__.py"
                yield from filter(Path.is_file, places[:1] if places[0].is_file() else places[1:])
