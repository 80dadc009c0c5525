"""An all-to-all by kernels of NCCL's device API, on software NICs. A rank is a process.

    python examples/nccl_all_to_all.py                     starts a process for each GPU
    python examples/nccl_all_to_all.py --ranks 1           one rank, which puts to itself
    python examples/nccl_all_to_all.py --build all_to_all  builds the program and does not start it

Needs a GPU for each rank, nvcc, and `pip install -e '.[cuda]' nvidia-nccl-cu13` (or PyTorch, which brings NCCL).

nccl_all_to_all.cu is the program. It knows nothing of gpunetio: NCCL loads the plugin (docs/nccl.md).
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 300.0


def nccl() -> Path:
    """Return the folder of NCCL's headers and library, as its package for pip has them."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        found = None
    if found is None or not found.submodule_search_locations:
        sys.exit("NCCL is not installed: pip install nvidia-nccl-cu13")
    return Path(next(iter(found.submodule_search_locations)))


def build(folder: Path, source: Path, program: Path, architecture: str) -> None:
    """Compile a program."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        sys.exit("there is no nvcc: install the CUDA toolkit, or put its folder `bin` into PATH")
    options = ["-std=c++17", "-O2", f"-arch={architecture}", f"-I{folder / 'include'}", f"-L{folder / 'lib'}"]
    libraries = ["-l:libnccl.so.2", f"-Xlinker=-rpath={folder / 'lib'}"]
    subprocess.run([nvcc, *options, source, "-o", program, *libraries], check=True, timeout=SECONDS)


def run(program: Path, ranks: int, *numbers: int) -> bool:
    """Run a process for each rank, with these arguments. Return whether all end well."""
    from gpunetio.nccl import plugin

    path = str(plugin())
    environment = os.environ | {
        "CUDA_MODULE_LOADING": "EAGER",  # nothing is loaded while a kernel waits for the NIC
        "NCCL_GIN_PLUGIN": path, "NCCL_NET_PLUGIN": path,  # the latter for NCCL 2.28
        "NCCL_GIN_TYPE": "3", "NCCL_LSA_TEAM_SIZE": "1", "NCCL_SYM_GIN_KERNELS_ENABLE": "0",
        "NCCL_GIN_NCONTEXTS": "1",  # 2.28: its contexts are connections
    }
    with tempfile.TemporaryDirectory() as folder:
        words = [(program, rank, ranks, f"{folder}/id", *numbers) for rank in range(ranks)]
        processes = [subprocess.Popen([str(word) for word in each], env=environment) for each in words]
        try:
            return not any(process.wait(SECONDS) for process in processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def main(source: Path, doc: str | None, numbers: dict[str, tuple[int, str]]) -> None:
    """Build a program and run it. `numbers` has its arguments: names, defaults and what they are."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="processes (default: one for each GPU)")
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default %(default)s)")
    parser.add_argument("--arch", default="native", help="of the GPU, for nvcc (default %(default)s)")
    parser.add_argument("--build", type=Path, metavar="FILE", help="build the program here, and end")
    given = parser.parse_args()
    if given.build:
        build(nccl(), source, given.build, given.arch)
        return
    from gpunetio.gpu import cuda_backend

    ranks = given.ranks or cuda_backend.device_count()
    if not ranks:
        sys.exit("there is no GPU: NCCL needs one")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / source.stem
        build(nccl(), source, program, given.arch)
        if not run(program, ranks, *(getattr(given, name) for name in numbers)):
            sys.exit("a rank has failed")


if __name__ == "__main__":
    main(Path(__file__).with_suffix(".cu"), __doc__, {
        "bytes": (65536, "what a rank sends to each rank"), "rounds": (100, "exchanges in a launch"),
    })
