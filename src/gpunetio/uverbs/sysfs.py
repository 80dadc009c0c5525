"""A folder that stands in for /dev/infiniband, /sys/class/infiniband and others: what programs read about each device.

As in Linux, a device of a class is a link to its place in the tree of PCI devices. UCX asks for that place.
"""

from __future__ import annotations

from pathlib import Path

from ..enums import PortState
from ..nic.control.guids import node_guid_of
from ..nic.engine.port import Port, address_of, interface_of
from ..providers.provider import LANE_GBPS, LANES
from . import counter_files, ucma_abi
from .abi import IP_BASED_GIDS, PHYSICALLY_UP

ABI_VERSION = 6  # IB_USER_VERBS_ABI_VERSION
MLX5_ABI_VERSION = 1  # MLX5_IB_UVERBS_ABI_VERSION
CM_DEVICE = b"rdma_cm"  # the connection manager's device file
_VENDOR, _DEVICE = 0x15B3, 0x1021  # Mellanox, ConnectX-7 (PCI): libmlx5 drives devices with these numbers
_NULL = "1:3"  # /dev/null, which preload.c opens in place of device files
_CPUS = Path("/sys/devices/system/cpu/online")  # the CPUs that the device is equally near to: all
_DOMAIN = 0xFFFF  # a PCI domain that machines do not use
_SPEEDS = {  # by ibv_port_attr.active_speed
    1: "SDR", 2: "DDR", 4: "QDR", 8: "FDR10", 16: "FDR", 32: "EDR", 64: "HDR", 128: "NDR", 256: "XDR",
}


def build(root: Path, ports: dict[str, Port]) -> None:
    """Write the folder for devices of these names, which are uverbs0, uverbs1, …"""
    classes, devices = root / "sys/class", root / "dev/infiniband"
    devices.mkdir(parents=True)
    _write(classes / "infiniband_verbs", {"abi_version": ABI_VERSION})
    _write(classes / "infiniband", {})
    _write(classes / "misc" / CM_DEVICE.decode(), {"abi_version": ucma_abi.ABI_VERSION})
    # With this kernel module, cards reach GPU memory that is registered by its address. NCCL looks for it.
    _write(root / "sys/module/nvidia_peermem", {"version": "software"})
    (devices / CM_DEVICE.decode()).symlink_to("/dev/null")
    for number, (name, port) in enumerate(ports.items()):
        char = f"uverbs{number}"
        (devices / char).symlink_to("/dev/null")
        pci = root / f"sys/devices/pci{_DOMAIN:04x}:00/{_DOMAIN:04x}:{number:02x}:00.0"
        _write(pci, {
            "vendor": f"{_VENDOR:#06x}", "device": f"{_DEVICE:#06x}", "subsystem_vendor": f"{_VENDOR:#06x}",
            "subsystem_device": "0x0000", "revision": "0x00", "numa_node": -1, "class": "0x020700",
            "local_cpulist": _CPUS.read_text().strip(), "local_cpus": _mask(_CPUS.read_text()),
            "modalias": f"pci:v{_VENDOR:08X}d{_DEVICE:08X}sv{_VENDOR:08X}sd00000000bc02sc07i00",
        })
        _write(pci / "infiniband_verbs" / char, {"ibdev": name, "abi_version": MLX5_ABI_VERSION, "dev": _NULL})
        _describe(pci / "infiniband" / name, port)
        for folder in pci / "infiniband_verbs" / char, pci / "infiniband" / name:
            (folder / "device").symlink_to("../..")
            (classes / folder.parent.name / folder.name).symlink_to(Path("../../..") / folder.relative_to(root))


def _mask(cpus: str) -> str:
    """Return a list of CPUs, such as 0-3,8, as the mask that the kernel prints: words of 32 bits in hexadecimal."""
    mask = 0
    for part in cpus.strip().split(","):
        first, _, last = part.partition("-")
        mask |= (1 << int(last or first) + 1) - (1 << int(first))
    words = max(1, -(-mask.bit_length() // 32))
    return ",".join(f"{mask >> 32 * word & 0xFFFF_FFFF:08x}" for word in reversed(range(words)))


def _describe(folder: Path, port: Port) -> None:
    guid = node_guid_of(port).to_bytes(8, "big").hex(":", 2)
    _write(folder, {
        "node_type": "1: CA", "node_guid": guid, "sys_image_guid": guid, "fw_ver": "software", "hca_type": "MT4129",
        "hw_rev": 0, "board_id": "gpunetio-soft", "node_desc": "gpunetio",
    })
    one, (width, speed) = folder / "ports/1", port.rate
    _write(one, {
        "link_layer": "InfiniBand" if port.infiniband else "Ethernet", "state": f"{PortState.ACTIVE}: ACTIVE",
        "phys_state": f"{PHYSICALLY_UP}: LinkUp",
        "rate": f"{LANES[width] * LANE_GBPS[speed]:g} Gb/sec ({LANES[width]}X {_SPEEDS[speed]})",
        "cap_mask": f"{0 if port.infiniband else IP_BASED_GIDS:#010x}", "lid": f"{port.lid:#x}", "lid_mask_count": 0,
        "sm_lid": "0x0", "sm_sl": 0,
    })
    _write(one / "pkeys", {"0": "0xffff"})
    # Programs share this folder. Unless all of them ask for the same addresses, each has its own GIDs, which calls
    # return.
    gids = port.gids if port.config.addresses else [bytes(16)] * len(port.gids)
    _write(one / "gids", {str(n): gid.hex(":", 2) for n, gid in enumerate(gids)})
    kind = "IB/RoCE v1" if port.infiniband else "RoCE v2"  # the kernel's names
    _write(one / "gid_attrs/types", dict.fromkeys(map(str, range(len(gids))), kind))
    # To programs, the network device of a GID is the interface that has its address. On InfiniBand, GIDs have none.
    devices = {} if port.infiniband else {n: interface_of(address_of(gid)) for n, gid in enumerate(port.gids)}
    _write(one / "gid_attrs/ndevs", {str(n): name for n, name in devices.items() if name})
    counter_files.build(one)


def _write(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")
