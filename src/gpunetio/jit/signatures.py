"""The parameters of functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the parameters of a function.

    Since Python 3.14, annotations are evaluated on request, and may contain names that only type checkers know.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.STRING)
    return inspect.signature(function)
