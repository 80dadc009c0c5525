"""Types that click lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

# The argument of click's decorators: a command, or the function that becomes one.
Decorated = TypeVar("Decorated", bound=Callable[..., object] | click.Command)
Values = dict[str, Any]  # parsed values, by the name of the parameter


class Number(click.ParamType):
    """A number of an object, in decimal or as 0x…"""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        try:
            return int(value, 0) if isinstance(value, str) else int(value)
        except ValueError:
            self.fail(f"{value!r} is not a number: give it in decimal or as 0x…", param, ctx)
