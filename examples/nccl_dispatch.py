"""Dispatch and combine of tokens, as in a mixture of experts, by NCCL's device API on software NICs.

    python examples/nccl_dispatch.py                starts a process for each GPU
    python examples/nccl_dispatch.py --contexts 129

Needs a GPU for each rank, nvcc, and `pip install -e '.[cuda]' 'nvidia-nccl-cu13>=2.30.7'`.

nccl_dispatch.cu is the program. It knows nothing of gpunetio: NCCL loads the plugin (docs/nccl.md).
"""

from pathlib import Path

from nccl_all_to_all import main

if __name__ == "__main__":
    main(Path(__file__).with_suffix(".cu"), __doc__, {
        "tokens": (1024, "tokens of a rank"), "hidden": (7168, "bytes of a token"),
        "contexts": (17, "contexts"), "rounds": (10, "rounds"),
    })
