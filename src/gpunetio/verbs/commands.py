"""Run device commands so that their errors name the command."""

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
    """Prefix a device's error with the command's name. NoMemoryError if the device has no room for another object."""
    try:
        yield
    except DriverError as error:
        if error.status == Status.NO_RESOURCES:
            raise NoMemoryError(f"{name}: {error}; close one first") from error
        raise DriverError(f"{name}: {error}", error.status, error.syndrome) from error


def destroy(provider: Provider, name: str, handle: int) -> None:
    """Destroy a device object with the command `name`."""
    with command(name):
        provider.devx_obj_destroy(handle)
