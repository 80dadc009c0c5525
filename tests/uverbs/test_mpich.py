"""MPICH, by its UCX: two ranks of a program in C, started by the `mpiexec` of PyPI's wheel and by that of Debian."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from programs import LIMIT, RUN
from rdma_core import skip_without_run
from repository import RIGS, environment
from stand_in.building import compiler

pytestmark = [pytest.mark.interop, pytest.mark.soft_nic, pytest.mark.host_memory]

WHEEL, SOURCE = Path(sys.prefix), RIGS / "c_programs" / "mpi_exchange.c"
SENT = 8 + 4096 + 65536 + 2 * (1 << 20)  # bytes of payload from each rank to the other
# The ranks are on one host, where MPICH and UCX would use shared memory.
BY_NIC = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "rc_x", "UCX_NET_DEVICES": "soft0:1", "UCX_WARN_UNUSED_ENV_VARS": "n"}


@pytest.fixture(params=["wheel", "Debian"])
def mpich(request, tmp_path: Path) -> tuple[str, Path]:
    """An `mpiexec`, and the program for its library. MPICHs from 3.1 on have one ABI, that of the wheel's header."""
    skip_without_run()
    if not (WHEEL / "include" / "mpi.h").exists():
        pytest.skip("the wheel mpich is not installed (extra 'dev')")
    mpiexec = str(WHEEL / "bin" / "mpiexec")
    library = [WHEEL / "lib" / "libmpi.so.12", f"-Wl,-rpath,{WHEEL / 'lib'}"]
    if request.param == "Debian":
        if (found := shutil.which("mpiexec.mpich")) is None:
            pytest.skip("Debian's MPICH is not installed (mpich)")
        mpiexec, library = found, ["-l:libmpich.so.12"]
    command = [compiler() or "cc", "-Wall", "-Wextra", "-Werror", SOURCE, f"-I{WHEEL / 'include'}", *library]
    subprocess.run([*command, "-o", tmp_path / "exchange"], check=True, timeout=60)
    return mpiexec, tmp_path / "exchange"


@pytest.mark.parametrize("outside", ["mpiexec", "gpunetio run"])
def test_two_ranks(mpich, outside):
    """A NIC for each rank, whether `gpunetio run` starts in each rank or runs `mpiexec`."""
    mpiexec, program = mpich
    under = [*RUN, "--nics", "1", "--"]
    ranks = [mpiexec, "-n", "2"]
    done = subprocess.run(
        [*ranks, *under, program] if outside == "mpiexec" else [*under, *ranks, program],
        capture_output=True, text=True, timeout=LIMIT, env=environment(**BY_NIC), check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    received = dict(re.findall(r"rank (\d) of 2: done, the NIC has received (\d+) bytes", done.stdout))
    assert sorted(received) == ["0", "1"], done.stdout
    assert all(int(nbytes) >= SENT for nbytes in received.values()), done.stdout
