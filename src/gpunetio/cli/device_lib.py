"""`gpunetio device-lib`: the device functions as files for CUDA C++."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import click

from .failures import guarded, writing

PATIENCE = 1.0  # seconds without output
KINDS = ("ltoir", "ptx", "cubin")


@click.command("device-lib")
@click.option("--arch", required=True, help="What to compile for: sm_80, sm_90, sm_100, …, or compute_90.")
@click.option(
    "--format", "kinds", type=click.Choice(KINDS), multiple=True, default=("ltoir",), show_default=True,
    help="May be given several times.",
)
@click.option(
    "-o", "--output", "folder", type=click.Path(path_type=Path, file_okay=False), default=".", metavar="DIR",
    help="Folder for the files.  [default: the current one]",
)
@guarded
def device_lib(arch: str, kinds: tuple[str, ...], folder: Path) -> None:
    """Write gpunetio's device functions for CUDA C++: gpunetio_device.cuh, and a file to link in each format.

    The linker inlines LTO-IR into its callers; PTX and cubins are called. No GPU is needed. docs/device-lib.md shows
    how to build with nvcc and how to link at run time.
    """
    from ..device import library

    message = f"compiling the device library for {arch} (a few seconds) …"
    timer = threading.Timer(PATIENCE, functools.partial(click.echo, message, err=True))
    timer.start()
    try:
        images = library.build(arch, tuple(dict.fromkeys(kinds)))
    finally:
        timer.cancel()
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"{library.STEM}.{kind}": image for kind, image in images.items()}
    files[f"{library.STEM}.cuh"] = library.header().encode()
    for name, content in files.items():
        with writing("file", folder / name):
            (folder / name).write_bytes(content)
        click.echo(folder / name)
