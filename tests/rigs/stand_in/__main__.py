"""`python -m stand_in`: run a command or script of gpunetio with the stand-in installed.

`--address ADDRESS` before the command is the address of mlx5_0, whose default another process on this machine may have.
"""

import runpy
import sys
import tempfile
from pathlib import Path

from gpunetio.cli import main
from gpunetio.nic.engine.port import PortConfig

from . import built, installed

with tempfile.TemporaryDirectory() as folder, installed(built(Path(folder))) as stand_in:
    sys.argv.pop(0)
    if sys.argv[:1] == ["--address"]:
        stand_in.attach("mlx5_0", PortConfig(addresses=(sys.argv[1],)))
        del sys.argv[:2]
    try:
        if sys.argv and sys.argv[0].endswith(".py"):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            sys.argv.insert(0, "gpunetio")
            main()
    finally:
        for complaint in stand_in.complaints:
            print(f"stand_in: {complaint}", file=sys.stderr)
