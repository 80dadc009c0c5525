"""Print libcuda's version and the attributes of its devices as JSON. This program imports nothing from gpunetio.

The numbers are those of `CUdevice_attribute` in cuda.h.
"""

import ctypes
import json
import sys
from collections.abc import Iterable

ATTRIBUTES = {
    "kernel_exec_timeout": 17,
    "integrated": 18,
    "pci_bus_id": 33,
    "pci_device_id": 34,
    "pci_domain_id": 50,
    "compute_capability_major": 75,
    "compute_capability_minor": 76,
    "host_register_supported": 99,
    "gpu_direct_rdma_supported": 116,
    "gpu_direct_rdma_flush_writes_options": 117,
    "gpu_direct_rdma_writes_ordering": 118,
    "dma_buf_supported": 124,
}
_NAME_BYTES = 128


def describe() -> dict[str, object]:
    """Return libcuda's file, its version (13000 for 13.0), and the name and attributes of each device."""
    driver = ctypes.CDLL("libcuda.so.1")
    with open("/proc/self/maps") as maps:
        answer: dict[str, object] = {"file": file_of("libcuda", maps)}
    if status := driver.cuInit(0):
        return answer | {"error": status}
    number = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(number))
    answer["driver_version"] = number.value
    driver.cuDeviceGetCount(ctypes.byref(number))
    answer["devices"] = [_device(driver, ordinal) for ordinal in range(number.value)]
    return answer


def file_of(library: str, maps: Iterable[str]) -> str:
    """Return the path of a loaded library; "" if it is not mapped (man proc_pid_maps)."""
    fields = (line.split(maxsplit=5) for line in maps)
    return next((line[5].strip() for line in fields if len(line) == 6 and f"/{library}.so" in line[5]), "")


def _device(driver: ctypes.CDLL, ordinal: int) -> dict[str, object]:
    device, value, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    driver.cuDeviceGetName(name, _NAME_BYTES, device)
    found: dict[str, object] = {"name": name.value.decode(errors="replace")}
    for attribute, number in ATTRIBUTES.items():
        if driver.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0:
            found[attribute] = value.value
    return found


if __name__ == "__main__":
    try:
        print(json.dumps(describe()))
    except OSError as missing:
        sys.exit(str(missing))
