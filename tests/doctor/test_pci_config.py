"""Reading of PCI configuration space, and of what lspci prints of it."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doctor_rig import DATA, file
from gpunetio.doctor.machine import pci_config
from gpunetio.doctor.machine.pci_config import (
    ACS_BITS,
    Acs,
    DeviceControl,
    acs,
    device_control,
    has_extended,
    parse_acs,
)
from gpunetio.doctor.machine.redact import redact
from pci_rig import config

# A root port: MSI-less, Express at 0x90, ACS at 0x148 behind an error report.
_ROOT_PORT = config({0x40: (0x0D, b""), 0x90: (0x10, struct.pack("<HIH", 0x0142, 0x8000, 0x2157))}, {
    0x100: (0x0001, bytes(0x40)), 0x148: (0x000D, struct.pack("<HH", 0x005F, 0x001D)),
})


def test_capabilities_are_found():
    assert pci_config.find_capability(_ROOT_PORT, 0x10) == 0x90
    assert pci_config.find_extended(_ROOT_PORT, 0x000D) == 0x148
    assert pci_config.find_capability(_ROOT_PORT, 0x11) == pci_config.find_extended(_ROOT_PORT, 0x0010) == 0


def test_low_bits_of_pointers_are_reserved():
    marked = bytearray(_ROOT_PORT)
    marked[0x34] |= 1
    marked[0x41] |= 2
    assert pci_config.find_capability(bytes(marked), 0x10) == 0x90


def test_a_pointer_without_the_status_bit_is_none():
    other = bytearray(_ROOT_PORT)
    other[0x06] = 0xEF
    assert pci_config.find_capability(bytes(other), 0x10) == 0


def test_acs_as_lspci_prints_it():
    found = acs(_ROOT_PORT)
    assert found is not None
    assert str(found) == ("ACSCtl: SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-")
    assert found.on == ("SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd")


def test_device_control():
    assert device_control(_ROOT_PORT) == DeviceControl(max_payload=512, max_read_request=512, relaxed_ordering=True)
    reset = config({0x90: (0x10, struct.pack("<HIH", 0x0142, 0, 0x5000))}, {})
    assert device_control(reset) == DeviceControl(max_payload=128, max_read_request=4096, relaxed_ordering=False)


@pytest.mark.parametrize("size", [0, 64, 0x92, 0xA0, 0x100, 0x14A])
def test_a_part_is_no_other_answer(size):
    """What was not read is not there: never a register with some of its bits."""
    part = _ROOT_PORT[:size]
    assert acs(part) is None
    assert device_control(part) == (device_control(_ROOT_PORT) if size >= 0x9A else None)
    assert has_extended(part) is (size > 0x100)


def test_a_recording_may_be_without_serial_numbers():
    mac = bytes.fromhex("563412ffffae6d94")
    cards = {0x100: (0x0001, b""), 0x148: (0x0003, mac), 0x160: (0x000D, struct.pack("<HH", 0, 4))}
    plain = config({}, cards)
    (masked,) = redact([file("/sys/bus/pci/devices/0000:b5:00.0/config", plain)])
    assert mac not in masked.value
    assert masked.value == config({}, cards | {0x148: (0x0003, bytes(8))})
    assert pci_config.without_serial(_ROOT_PORT) == _ROOT_PORT
    assert pci_config.without_serial(plain[:0x150]) == config({}, cards)[:0x14C] + bytes(4)


def test_a_function_that_is_off():
    assert not has_extended(b"\xff" * 4096)
    assert acs(b"\xff" * 4096) is None
    assert device_control(b"\xff" * 4096) is None


@pytest.mark.parametrize(
    "chain",
    [
        {0x40: 0x40}, {0x40: 0x50, 0x50: 0x40}, {0x40: 0x20}, {0x40: 0xFC}
    ],
    ids=str,
)
def test_a_broken_list_ends(chain):
    broken = bytearray(config(dict.fromkeys(chain, (0x05, b"")), {}))
    for at, following in chain.items():
        broken[at + 1] = following
    assert pci_config.find_capability(bytes(broken), 0x10) == 0
    broken[0x100:0x104] = struct.pack("<HH", 1, 0x1001)  # the first extended capability is its own successor
    assert pci_config.find_extended(bytes(broken), 0x000D) == 0


@given(st.binary(max_size=4096))
def test_any_bytes(data):
    acs(data), device_control(data)
    assert len(pci_config.without_serial(data)) == len(data)


@given(st.sets(st.integers(0x104, 0x380).map(lambda n: n * 4), min_size=1, max_size=20), st.integers(0, 0x7F))
def test_any_list_of_extended_capabilities(places, control):
    ordered = [0x100, *sorted(places)]
    entries = dict.fromkeys(ordered[:-1], (0x0003, b"")) | {ordered[-1]: (0x000D, struct.pack("<HH", 0x7F, control))}
    assert all(b - a >= 4 for a, b in pairwise(ordered))
    assert acs(config({}, entries)) == Acs(control)


def test_the_guides_line():
    """`lspci -s b2:00.0 -vvvv | grep -i ACSCtl` as the set-up guide prints it."""
    text = (DATA / "seed" / "acsctl.txt").read_text()
    assert parse_acs(text) == [Acs(0)]
    assert str(Acs(0)) == text.strip()


def test_lspci_in_full():
    text = (DATA / "lspci-bridge.txt").read_text()
    (found,) = parse_acs(text)
    assert found.on == ("SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd")
    assert parse_acs(text.replace("ACSCtl", "ACSCap")) == []


@given(st.lists(st.integers(0, (1 << len(ACS_BITS)) - 1)))
def test_lspci_there_and_back(controls):
    assert parse_acs("\n".join(f"\t\t{Acs(control)}" for control in controls)) == [Acs(control) for control in controls]


@given(st.text())
def test_any_text(text):
    parse_acs(text)
    assert all(0 <= found.control < 1 << len(ACS_BITS) for found in parse_acs(f"ACSCtl: {text}"))
