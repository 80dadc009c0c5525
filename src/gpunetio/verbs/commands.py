"""Commands of a device: errors that name the command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import DriverError, NoMemoryError
from ..formats.commands import Status

if TYPE_CHECKING:
    from ..providers.provider import Provider


@contextmanager
def command(name: str) -> Iterator[None]:
    """Put the command's name before the device's error. NoMemoryError if the device has no more such objects."""
    try:
        yield
    except DriverError as error:
        if error.status == Status.NO_RESOURCES:
            raise NoMemoryError(f"{name}: {error}; close one first") from error
        raise DriverError(f"{name}: {error}", error.status, error.syndrome) from error


def destroy(provider: Provider, name: str, handle: int) -> None:
    """Destroy a device object. `name` is the command."""
    with command(name):
        provider.devx_obj_destroy(handle)
