"""Whether this is a container, and of which kind."""

from __future__ import annotations

from .finding import Evidence, evidence
from .host import Host, Trouble

_MARKS = {"docker": "Docker", "libpod": "Podman", "kubepods": "Kubernetes", "containerd": "containerd", "lxc": "LXC"}


def kind_of(host: Host) -> tuple[str, Evidence]:
    """Its kind, "" for none, and what tells."""
    for path, kind in (("/.dockerenv", "Docker"), ("/run/.containerenv", "Podman")):
        mark = host.read(path)
        if mark.ok or mark.trouble is Trouble.DENIED:
            return kind, evidence(mark, "there")
    told = host.ask("container")
    if told.text:
        return told.text[:16], evidence(told)
    groups = host.read("/proc/1/cgroup")
    if kind := next((kind for mark, kind in _MARKS.items() if mark in groups.text), ""):
        return kind, evidence(groups)
    return "", evidence(groups)
