"""Programs under valgrind: another process compiles the NIC's code, because compiling there is a hundred times faster.

valgrind(1) emulates a processor with fewer features than the machine's, so code compiled for this machine does not run
there.
"""

from __future__ import annotations

import logging
import os
import subprocess

from ..jit import prebuilt, processor
from .environment import INTERPRETER

logger: logging.Logger = logging.getLogger("gpunetio.uverbs")

_PRELOADED = "vgpreload_"  # prefix of the names of valgrind's own libraries
_PATIENCE = 900.0  # seconds
_COMPILE = """
from gpunetio.fabric.ring import next_full
from gpunetio.nic.host import engine, helping
from gpunetio.uverbs.pump_loop import compile_pump
engine.compile_engine(), compile_pump(), helping.address(), next_full.compile()
"""


def compile_elsewhere() -> None:
    """Under valgrind, have the NIC compiled natively for the processor that valgrind emulates, if that is not done yet.

    If that fails, log a message; the NIC is then compiled under valgrind.
    """
    if _PRELOADED not in os.environ.get("LD_PRELOAD", ""):
        return
    target = prebuilt.here()
    # A child runs outside valgrind, unless valgrind follows it (--trace-children).
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | {
        processor.CPU_NAME: target.cpu, processor.CPU_FEATURES: target.features,
        "PYTHONPATH": os.environ.get("GPUNETIO_PATH", ""),
    }
    try:
        subprocess.run([os.environ.get(INTERPRETER, ""), "-c", _COMPILE], env=env, check=True, timeout=_PATIENCE)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("compiling the NIC under valgrind, which takes an hour: outside, it failed (%s)", error)
