"""A stand-in for libibverbs.so.1 and libmlx5.so.1: mlx5_0 … mlx5_7 are the software NICs soft0 … soft7 of this process.

    path = build(folder)                 # stand_in.c against rdma-core's headers, by the C compiler
    stand_in = StandIn(path)             # its calls go to software NICs from now on
    with installed(path) as stand_in:    # and gpunetio finds its libraries there
        verbs.open("mlx5_0")

`python -m stand_in [gpunetio's command and arguments, or a script and its own]`, with tests/rigs in PYTHONPATH, is that
command or script with the stand-in installed. GPUNETIO_STAND_IN names a file that is already built.

stand_in.c and strict.py describe where it is stricter than the software NIC. Differences from a card that remain:

- A doorbell register in memory holds one doorbell: queues that ring the same one overwrite each other. With a doorbell
  record nothing is lost, because the engine reads records when it is idle. Queues without one (NO_DBR_EXT) do not share
  a UAR while the stand-in is installed (`own_registers`); on a card they may.
- The engine is not notified of a doorbell. While kernels run it spins; otherwise it looks every millisecond, so the
  first request of a CPU after a pause takes that long.
- The engine does not check through which UAR a queue was rung.
"""

from .building import build, built
from .installing import installed, nics_of_cards, own_registers
from .nics import StandIn

__all__ = ["StandIn", "build", "built", "installed", "nics_of_cards", "own_registers"]
