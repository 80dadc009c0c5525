"""What NVIDIA's firmware tools print, and what the doctor reads of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doctor_rig import DATA, READY
from gpunetio.doctor.machine.mlxconfig import Setting, number_of, parse, parse_mst

SEED = DATA / "seed"
CONNECTX = {"0000:b5:00.1": "/dev/mst/mt4125_pciconf0.1", "0000:b5:00.0": "/dev/mst/mt4125_pciconf0"}
BLUEFIELD = {"0000:9f:00.1": "/dev/mst/mt41692_pciconf0.1", "0000:9f:00.0": "/dev/mst/mt41692_pciconf0"}
NIC_MODE = {
    "LINK_TYPE_P1": "ETH(2)", "LINK_TYPE_P2": "ETH(2)", "INTERNAL_CPU_MODEL": "EMBEDDED_CPU(1)",
    "INTERNAL_CPU_PAGE_SUPPLIER": "EXT_HOST_PF(1)", "INTERNAL_CPU_ESWITCH_MANAGER": "EXT_HOST_PF(1)",
    "INTERNAL_CPU_IB_VPORT0": "EXT_HOST_PF(1)", "INTERNAL_CPU_OFFLOAD_ENGINE": "DISABLED(1)",
    "ACCURATE_TX_SCHEDULER": "True(1)", "REAL_TIME_CLOCK_ENABLE": "True(1)",
}
NAMES = st.from_regex(r"[A-Z][A-Z0-9_]{0,30}", fullmatch=True)
VALUES = st.one_of(
    st.integers(0, 2**40).map(str), st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}\([0-9]{1,3}\)", fullmatch=True)
)


@pytest.mark.parametrize(
    ("file", "devices"),
    [
        ("mst_status_connectx.txt", CONNECTX), ("mst_status_connectx_one_line.txt", CONNECTX),
        ("mst_status_bluefield.txt", BLUEFIELD),
    ],
)
def test_mst_status(file, devices):
    assert parse_mst((SEED / file).read_text()) == devices


def test_mst_status_with_domains_and_without_interfaces():
    text = "ConnectX7(rev:0)  /dev/mst/mt4129_pciconf0  0001:c1:00.0  mlx5_0   -1\nConnectX7(rev:0) /dev/mst/x  zz:00.0"
    assert parse_mst(text) == {"0001:c1:00.0": "/dev/mst/mt4129_pciconf0"}


def test_settings_by_name():
    settings = parse((SEED / "mlxconfig_bluefield.txt").read_text())
    assert settings == {name: Setting(value) for name, value in NIC_MODE.items()}


def test_table_with_three_columns():
    text = READY.run("mlxconfig", "-d", "0000:b5:00.0", "-e", "q").text
    settings = parse(text)
    assert settings["ACCURATE_TX_SCHEDULER"] == Setting(next="True(1)", current="True(1)")
    assert settings["NUM_OF_VFS"] == Setting(next="16", current="16")
    assert settings["HOST_CHAINING_DESCRIPTORS"].next == "Array[0..7]"
    assert settings["PCI_ATOMIC_MODE"].next == "PCI_ATOMIC_DISABLED_EXT_ATOMIC_ENABLED(0)"
    assert all(line.split()[0].strip("*") in settings for line in text.splitlines() if line.startswith("        "))
    assert not {"Device", "Name", "Description", "Configurations"} & set(settings)


def test_table_with_one_column():
    text = (
        "\nDevice #1:\n----------\n\nDevice type:    BlueField3      \n\n"
        "Configurations:                              Next Boot\n"
        "         INTERNAL_CPU_MODEL                  EMBEDDED_CPU(1)\n"
        "*        INTERNAL_CPU_OFFLOAD_ENGINE         ENABLED(0)     \n"
    )
    assert parse(text) == {
        "INTERNAL_CPU_MODEL": Setting("EMBEDDED_CPU(1)"), "INTERNAL_CPU_OFFLOAD_ENGINE": Setting("ENABLED(0)"),
    }


@pytest.mark.parametrize(
    ("value", "number"),
    [("ETH(2)", 2), ("True(1)", 1), ("16", 16), ("", None), ("N/A", None), ("Array[0..7]", None), ("²", None)],
)
def test_numbers(value, number):
    assert number_of(value) == number


def test_now_and_next():
    pending = Setting(next="True(1)", current="False(0)")
    assert (pending.is_now(1), pending.will_be(1)) == (False, True)
    assert Setting(next="True(1)").is_now(1), "without a column for it, the next value is taken to hold"
    assert Setting(next="True(1)", current="N/A").is_now(1)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(NAMES, st.tuples(VALUES, VALUES, VALUES), max_size=4))
def test_printed_tables_are_read_back(table):
    lines = (f"{'*' if a != c else ' ':<8}{name:<44}{a:<20} {b:<20} {c:<20}" for name, (a, b, c) in table.items())
    text = "\n".join(["Configurations:      Default      Current       Next Boot", *lines])
    assert parse(text) == {name: Setting(next=c, current=b) for name, (_, b, c) in table.items()}


@given(st.text() | st.binary().map(lambda some: some.decode(errors="replace")))
def test_any_text(text):
    assert all(isinstance(setting, Setting) for setting in parse(text).values())
    assert all(device.startswith("/dev/mst/") for device in parse_mst(text).values())
