"""The folder that stands for /sys/class/infiniband, without a NIC."""

import fcntl
import os
from pathlib import Path

import pytest

from gpunetio.enums import LinkLayer
from gpunetio.nic.engine.port import Port, PortConfig
from gpunetio.nic.state.counters import COUNTERS
from gpunetio.uverbs import counter_files, sysfs


@pytest.mark.parametrize("cpus, mask", [("0", "00000001"), ("0-3,8", "0000010f"), ("0-1,32", "00000001,00000003")])
def test_masks_of_cpus(cpus, mask):
    """As the kernel prints a cpumask with "%*pb": Documentation/core-api/printk-formats.rst."""
    assert sysfs._mask(cpus + "\n") == mask


def built(folder: Path, config: PortConfig) -> Path:
    sysfs.build(folder, {"soft0": Port(config, "127.0.0.1")})
    return folder / "sys/class/infiniband/soft0"


def test_a_folder_that_another_process_has_locked(tmp_path, monkeypatch):
    """It may be stopped. What was counted meanwhile is written when the folder is free."""
    monkeypatch.setattr(counter_files, "_PATIENCE", 0.05)
    port = built(tmp_path, PortConfig()) / "ports/1"
    counted, counters = counter_files._Counted(port), dict.fromkeys(COUNTERS.offsets, 0)
    counters["rdma_tx_packets"] = 7
    folder = os.open(port, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    counted.tell(counters)
    assert int((port / "counters/port_xmit_packets").read_text()) == 0
    os.close(folder)
    counted.tell(counters)
    assert int((port / "counters/port_xmit_packets").read_text()) == 7


def test_network_devices_of_gids(tmp_path):
    """The interface that has the address of a GID. No interface has an address for documentation (RFC 5737)."""
    device = built(tmp_path, PortConfig(addresses=("127.0.0.1", "192.0.2.1")))
    names = [path.read_text() for path in sorted((device / "ports/1/gid_attrs/ndevs").iterdir())]
    assert names == ["lo\n", "lo\n"]  # of the address, and of the link-local GID that comes from it
    assert len([*(device / "ports/1/gid_attrs/types").iterdir()]) == 3


def test_gids_on_infiniband_have_no_network_device(tmp_path):
    device = built(tmp_path, PortConfig(link_layer=LinkLayer.INFINIBAND))
    assert not [*(device / "ports/1/gid_attrs/ndevs").iterdir()]


def test_cpus_near_a_device(tmp_path):
    device = built(tmp_path, PortConfig())
    assert (device / "device/local_cpulist").read_text() == Path("/sys/devices/system/cpu/online").read_text()
    assert (device / "device/local_cpus").read_text().count("\n") == 1
