"""PeerMappingOverride, by which NVIDIA's driver lets kernels of all users ring a NIC: now, next, and its cure."""

from __future__ import annotations

import re

from .finding import Evidence, evidence
from .host import Host, Reading

PARAMS = "/proc/driver/nvidia/params"
_NAME = "PeerMappingOverride"
_ALSO_SHOWN = ("EnableStreamMemOPs", "GrdmaPciTopoCheckOverride")  # of the driver's parameters
_FOLDERS = ("/etc/modprobe.d", "/run/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d")  # man modprobe.d
_CMDLINE = "/proc/cmdline"
_FILE = "/etc/modprobe.d/zz-nvidia-peer-mapping.conf"  # files count in the order of names: behind nvidia.conf
_OPTIONS = re.compile(r"^[ \t]*options[ \t]+nvidia\S*[ \t].*", re.MULTILINE)
_WORDS = re.compile(r'NVreg_RegistryDwords=(?:"([^"]*)"|([^\s"]*))')
# The initramfs has a copy of the files, and the driver may be loaded from there.
LOAD = "sudo update-initramfs -u (Debian, Ubuntu) or sudo dracut -f (others), and a cold reboot"


def beside(words: str) -> str:
    """RegistryDwords with the option, and with the others of these that can be typed into a shell's quotes."""
    kept = [word for word in words.replace(" ", "").split(";") if re.fullmatch(r"\w+=\w+", word)]
    others = [word for word in kept if word.partition("=")[0].casefold() != _NAME.casefold()]
    return "".join(f"{word};" for word in (*others, f"{_NAME}=1"))


def cure(words: str = "") -> str:
    """What sets it beside other RegistryDwords. It adds a line to the file, which may be there."""
    return f"echo 'options nvidia NVreg_RegistryDwords=\"{beside(words)}\"' | sudo tee -a {_FILE}; then {LOAD}"


CURE = f"{cure()}; what else {PARAMS} has as RegistryDwords goes into the same line, as the last one counts"


def parameters(text: str) -> dict[str, str]:
    """/proc/driver/nvidia/params: lines of "Name: value"."""
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def overrides(words: str) -> bool:
    """Whether "Name=value;Name=value" has PeerMappingOverride other than 0; names are compared without case."""
    pairs = [word.replace(" ", "").casefold().partition("=") for word in words.split(";")]
    values = [value for name, _, value in pairs if name == _NAME.casefold()]
    return any(re.fullmatch(r"(0x)?0*[1-9a-f][0-9a-f]*", value) for value in values)


def driver_has(host: Host) -> tuple[str | None, list[Evidence]]:
    """RegistryDwords of the loaded driver; None when it shows no parameters."""
    reading = host.read(PARAMS)
    now = parameters(reading.text)
    if not now:
        return None, [evidence(reading)]
    read = [evidence(reading, f"RegistryDwords: {now.get('RegistryDwords', '(none)')}")]
    read += [Evidence(PARAMS, f"{name}: {now[name]}") for name in _ALSO_SHOWN if name in now]
    return now.get("RegistryDwords", "").strip('"'), read


def next_load_has(host: Host) -> tuple[str | None, Evidence | None]:
    """RegistryDwords that the driver will be loaded with, and where they stand; None when they stand nowhere.

    modprobe joins the files in the order of their names, then the kernel command line, and the kernel takes the last
    value. A file hides those of its name in later folders (man modprobe.d).
    """
    files: dict[str, str] = {}
    for folder in _FOLDERS:
        for name in host.names(folder).names:
            files.setdefault(name, f"{folder}/{name}")
    readings = [host.read(path) for name, path in sorted(files.items()) if name.endswith(".conf")]
    found = [(words, reading) for reading in readings for line in _options(reading) for words in _WORDS.finditer(line)]
    line = host.read(_CMDLINE)
    found += [(words, line) for words in re.finditer(rf"(?<=nvidia\.){_WORDS.pattern}", line.text)]
    if not found:
        return None, None
    words, reading = found[-1]
    return words[1] or words[2] or "", evidence(reading, words[0])


def _options(reading: Reading) -> list[str]:
    return _OPTIONS.findall(reading.text.replace("\\\n", " "))


def remedy(host: Host) -> str:
    """What sets it on this machine: a boot if a file has it already, else a file with all that there is to keep."""
    words, where = next_load_has(host)
    if words is None or where is None:
        return cure(driver_has(host)[0] or "")
    if overrides(words):
        return LOAD
    if where.source == _CMDLINE:
        return f"in /etc/default/grub: nvidia.NVreg_RegistryDwords={beside(words)}, sudo update-grub, and a cold reboot"
    return cure(words)
