"""What checks of dmabuf and PCI Express say that they have read, word for word: `doctor -v` shows it to people."""

from pathlib import Path

import pytest

from doctor_rig import DATA, answer, report, without
from gpunetio.doctor.machine.host import Kind
from gpunetio.doctor.report.tree import table

NO_SYMBOLS = [
    answer("symbols", "libibverbs.so.1", "ibv_reg_dmabuf_mr", value=["ibv_open_device"]),
    answer("symbols", "libmlx5.so.1", "mlx5dv_devx_umem_reg_ex", value=[]),
]
NO_CONFIG = [without(Kind.FILE, "/boot/config-6.8.0-60-generic")]
MACHINES = {"ready": [], "old libraries": NO_SYMBOLS, "no configuration": NO_CONFIG}


def evidence(name: str) -> str:
    """A line for each thing that was read."""
    return "".join(
        f"{name}: {finding.check.id} {finding.gpu or '-'} {finding.nic or '-'}: {read.source} = {read.value}\n"
        for finding in report(*MACHINES[name]).findings
        if finding.check.id == "dmabuf" or (finding.check.area == "PCI Express" and name == "ready")
        for read in finding.read
    )


@pytest.mark.parametrize("name", MACHINES)
def test_what_was_read_is_told(name):
    lines = (DATA / "evidence.txt").read_text().splitlines(keepends=True)
    assert evidence(name) == "".join(line for line in lines if line.startswith(f"{name}: "))


MATRIX = {"GPU0": {"mlx5_0": "PIX", "mlx5_1": "NODE"}, "GPU1": {"mlx5_0": "SYS", "mlx5_1": "PXB"}}
EXACT = len("GPU0") + 2 * (2 + len("mlx5_0"))


def test_a_matrix_that_is_exactly_as_wide_as_the_terminal_is_one_part():
    assert table(MATRIX, EXACT) == ["      mlx5_0  mlx5_1", "GPU0  PIX     NODE", "GPU1  SYS     PXB"]
    assert table(MATRIX, EXACT - 1) == [
        "      mlx5_0", "GPU0  PIX", "GPU1  SYS", "", "      mlx5_1", "GPU0  NODE", "GPU1  PXB",
    ]


if __name__ == "__main__":  # writes the file anew, to be looked through
    Path(DATA / "evidence.txt").write_text("".join(map(evidence, MACHINES)))
