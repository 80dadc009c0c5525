"""`nvidia-smi -q` as a table, from real outputs and from outputs that are printed here."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doctor_rig import data
from gpunetio.doctor.machine import nvidia_smi

WORDS = st.text("ABCdef 123()", min_size=1, max_size=20).map(str.strip).filter(bool)
VALUES = st.text("ABCdef 123:.%", min_size=1, max_size=20).map(str.strip).filter(bool)
TABLES = st.dictionaries(WORDS, VALUES, max_size=6)
ADDRESSES = st.from_regex(r"0000[0-9a-f]{4}:[0-9a-f]{2}:[0-1][0-9a-f]\.[0-7]", fullmatch=True)


def test_the_guides_gpu():
    (address, values), *others = nvidia_smi.parse(data("seed/nvidia-smi-q.txt")).items()
    assert address == "0000:ca:00.0"
    assert not others
    assert values["Product Name"] == "NVIDIA A100 80GB PCIe"
    assert values["Product Architecture"] == "Ampere"
    assert values["Persistence Mode"] == "Enabled"
    assert [values[f"BAR1 Memory Usage/{name}"] for name in ("Total", "Used", "Free")] == [
        "131072 MiB", "1 MiB", "131071 MiB",
    ]


def test_the_guides_small_bar1_has_no_gpu_of_its_own():
    lines = data("seed/nvidia-smi-q-bar1.txt")
    assert nvidia_smi.parse(lines) == {}
    values = nvidia_smi.parse(f"GPU 00000000:CA:00.0\n{lines}")["0000:ca:00.0"]
    assert values["BAR1 Memory Usage/Total"] == "256 MiB"
    assert values["BAR1 Memory Usage/Free"] == "250 MiB"


def test_several_gpus():
    found = nvidia_smi.parse(data("nvidia-smi-q-two.txt"))
    assert list(found) == ["0000:18:00.0", "000f:2a:00.0"]
    rows = [
        (gpu["Product Name"], gpu["Persistence Mode"], gpu["MIG Mode/Current"], gpu["BAR1 Memory Usage/Total"])
        for gpu in found.values()
    ]
    assert rows == [
        ("NVIDIA H100 80GB HBM3", "Enabled", "Enabled", "131072 MiB"),
        ("NVIDIA RTX A4000", "Disabled", "N/A", "256 MiB"),
    ]
    first, second = found.values()
    assert first["Serial Number"] == ""
    assert first["MIG Mode/Pending"] == "Disabled"
    assert first["FB Memory Usage/Total"] == "81559 MiB"
    assert first["Link Width/Current"] == "8x"
    assert "FB Memory Usage/Total" not in second


@pytest.mark.parametrize("text", ["", "No devices were found", "GPU\n", "Total : 1 MiB", "GPU 00000000:GG:00.0\na : b"])
def test_no_gpu(text):
    assert nvidia_smi.parse(text) == {}


@given(st.dictionaries(ADDRESSES, st.dictionaries(WORDS, TABLES, max_size=4), max_size=3), st.integers(0, 8))
def test_what_is_printed_is_found(gpus, indent):
    lines = []
    for address, headings in gpus.items():
        lines.append(f"GPU {address.upper()}")
        for heading, table in headings.items():
            lines.append(f"{'':{indent}}{heading}")
            lines += [f"{'':{2 * indent}}{name:38}: {value}" for name, value in table.items()]
    found = nvidia_smi.parse("\n".join(lines))
    assert set(found) == {address[4:] for address in gpus}
    for address, headings in gpus.items():
        values = found[address[4:]]
        for heading, table in headings.items():
            assert {name: values[f"{heading}/{name}"] for name in table} == table


@given(st.text() | st.binary().map(lambda b: b.decode(errors="replace")))
def test_any_text(text):
    for address, values in nvidia_smi.parse(text).items():
        assert address
        assert all(isinstance(value, str) for value in values.values())


@given(st.lists(st.sampled_from(data("nvidia-smi-q-two.txt").splitlines()), max_size=40))
def test_lines_in_any_order(lines):
    assert set(nvidia_smi.parse("\n".join(lines))) <= {"0000:18:00.0", "000f:2a:00.0"}


def test_bar1_of_mig_devices_is_not_the_gpus():
    text = (
        "GPU 00000000:CA:00.0\n    Product Name : NVIDIA A100\n    MIG Devices\n        MIG Device\n"
        "            Index : 0\n            BAR1 Memory Usage\n                Total : 32767 MiB\n"
        "    BAR1 Memory Usage\n        Total : 131072 MiB\n"
    )
    assert nvidia_smi.parse(text)["0000:ca:00.0"]["BAR1 Memory Usage/Total"] == "131072 MiB"
