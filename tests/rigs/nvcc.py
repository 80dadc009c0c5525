"""An nvcc that links LTO-IR, from a toolkit or from pip's wheels."""

import os
import shutil
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest


def _wheels() -> Path | None:
    """Where pip has put CUDA's compiler."""
    try:
        found = [f for f in files("nvidia-cuda-nvcc") or [] if f.name == "nvcc"]
    except PackageNotFoundError:
        return None
    return Path(str(found[0].locate())).parents[1] if found else None


def path_with_nvcc(folder: Path) -> str:
    """A PATH with a toolkit's nvcc, or with that of the wheels, laid out in `folder` as in a toolkit.

    Skips the test where there is neither, or no g++.
    """
    if shutil.which("g++") is None:
        pytest.skip("nvcc needs g++")
    installed = shutil.which("nvcc")
    if installed and (Path(installed).resolve().parents[1] / "nvvm/lib64/libnvvm.so").exists():
        return os.environ["PATH"]
    wheels = _wheels()
    if wheels is None:
        pytest.skip("no CUDA toolkit, and no wheel nvidia-cuda-nvcc")
    for name in ("bin", "nvvm/lib64"):
        (folder / name).mkdir(parents=True)
    for tool in (wheels / "bin").iterdir():
        (folder / "bin" / tool.name).symlink_to(tool)
    for part in (wheels / "nvvm").iterdir():
        (folder / "nvvm" / part.name).symlink_to(part)
    # nvlink searches there; the wheel has it elsewhere.
    (folder / "nvvm/lib64/libnvvm.so").symlink_to(next((wheels / "lib").glob("libnvvm.so.*")))
    for name, target in (("lib", "lib"), ("lib64", "lib"), ("include", "include")):
        (folder / name).symlink_to(wheels / target)
    return f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
