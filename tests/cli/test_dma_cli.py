"""`gpunetio dma_memcpy` and `gpunetio dma_local_copy`, with the lines of DOCA's samples."""

import pytest
from click.testing import CliRunner

from gpunetio.cli import app


def run(*arguments: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, (result.output if result.exit_code else result.stdout).splitlines()


def test_dma_memcpy():
    code, lines = run("dma_memcpy", "-g", "host", "-n", "soft0")
    assert code == 0
    assert lines == [
        "Starting the sample",
        "Success, DMA memcpy job done successfully",
        "CUDA KERNEL INFO: The GPU destination buffer value after the memcpy: This is a sample piece of text from CPU",
        "CPU received message from GPU: This is a sample piece of text from GPU",
        "Sample finished successfully",
    ]


@pytest.mark.parametrize("text", [None, "x", "é" * 2048])
def test_dma_local_copy(text):
    code, lines = run("dma_local_copy", "-p", "soft0", *(["-t", text] if text else []))
    assert code == 0
    assert lines == [
        "Starting the sample", "Success, memory copied and verified as correct", "Sample finished successfully"
    ]


@pytest.mark.parametrize("text", ["", "é" * 2049])
def test_texts_of_wrong_lengths(text):
    code, lines = run("dma_local_copy", "-p", "soft0", "-t", text)
    assert code == 2
    assert f"--text has {len(text.encode())} bytes: 1 to 4096 are possible" in "\n".join(lines)
