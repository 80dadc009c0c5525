"""Types for what click has none for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

# What its decorators decorate: a command, or the function that becomes one.
Decorated = TypeVar("Decorated", bound=Callable[..., object] | click.Command)
Values = dict[str, Any]  # what it has parsed, by the name of the parameter
