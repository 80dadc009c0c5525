"""Types for what click has none for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

# What its decorators decorate: a command, or the function that becomes one.
Decorated = TypeVar("Decorated", bound=Callable[..., object] | click.Command)
Values = dict[str, Any]  # what it has parsed, by the name of the parameter


class Number(click.ParamType):
    """A number of an object, in decimal or as 0x…"""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        try:
            return int(value, 0) if isinstance(value, str) else int(value)
        except ValueError:
            self.fail(f"{value!r} is not a number: give it in decimal or as 0x…", param, ctx)
