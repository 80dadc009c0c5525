"""PeerMappingOverride, the driver option that lets kernels of all users ring a NIC: its state and its cure."""

from __future__ import annotations

import re

from ..finding import Evidence, evidence
from .host import Host, Reading

PARAMS = "/proc/driver/nvidia/params"
_NAME = "PeerMappingOverride"
_ALSO_SHOWN = ("EnableStreamMemOPs", "GrdmaPciTopoCheckOverride")  # parameters shown as evidence
_FOLDERS = ("/etc/modprobe.d", "/run/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d")  # man modprobe.d
_CMDLINE = "/proc/cmdline"
_FILE = "/etc/modprobe.d/zz-nvidia-peer-mapping.conf"  # the last file by name wins: sorts after nvidia.conf
_OPTIONS = re.compile(r"^[ \t]*options[ \t]+nvidia\S*[ \t].*", re.MULTILINE)
_WORDS = re.compile(r'NVreg_RegistryDwords=(?:"([^"]*)"|([^\s"]*))')
# The initramfs has a copy of the files, and the driver may be loaded from there.
LOAD = "sudo update-initramfs -u (Debian, Ubuntu) or sudo dracut -f (others), and a cold reboot"


def beside(words: str) -> str:
    """Return RegistryDwords with the option added. Words that are unsafe in shell quotes are left out."""
    kept = [word for word in words.replace(" ", "").split(";") if re.fullmatch(r"\w+=\w+", word)]
    others = [word for word in kept if word.partition("=")[0].casefold() != _NAME.casefold()]
    return "".join(f"{word};" for word in (*others, f"{_NAME}=1"))


def cure(words: str = "") -> str:
    """Return the command that adds the option to other RegistryDwords. It appends a line to the file."""
    return f"echo 'options nvidia NVreg_RegistryDwords=\"{beside(words)}\"' | sudo tee -a {_FILE}; then {LOAD}"


CURE = f"{cure()}; keep other RegistryDwords of {PARAMS} in the same line, because only the last line counts"


def parameters(text: str) -> dict[str, str]:
    """Parse /proc/driver/nvidia/params: lines of "Name: value"."""
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def overrides(words: str) -> bool:
    """Return whether "Name=value;Name=value" sets PeerMappingOverride. The case of names does not matter."""
    pairs = [word.replace(" ", "").casefold().partition("=") for word in words.split(";")]
    values = [value for name, _, value in pairs if name == _NAME.casefold()]
    return any(re.fullmatch(r"(0x)?0*[1-9a-f][0-9a-f]*", value) for value in values)


def driver_has(host: Host) -> tuple[str | None, list[Evidence]]:
    """Return RegistryDwords of the loaded driver; None if it shows no parameters."""
    reading = host.read(PARAMS)
    now = parameters(reading.text)
    if not now:
        return None, [evidence(reading)]
    read = [evidence(reading, f"RegistryDwords: {now.get('RegistryDwords', '(none)')}")]
    read += [Evidence(PARAMS, f"{name}: {now[name]}") for name in _ALSO_SHOWN if name in now]
    return now.get("RegistryDwords", "").strip('"'), read


def next_load_has(host: Host) -> tuple[str | None, Evidence | None]:
    """Return RegistryDwords for the driver's next load, and their source; None if nothing sets them.

    modprobe joins the files in the order of their names, and then the kernel command line. The kernel takes the last
    value. A file hides files of the same name in later folders (man modprobe.d).
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
    """Return the cure for this machine: a reboot if a file sets the option, else a line that keeps other words."""
    words, where = next_load_has(host)
    if words is None or where is None:
        return cure(driver_has(host)[0] or "")
    if overrides(words):
        return LOAD
    if where.source == _CMDLINE:
        return f"in /etc/default/grub: nvidia.NVreg_RegistryDwords={beside(words)}, sudo update-grub, and a cold reboot"
    return cure(words)
