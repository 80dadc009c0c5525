"""Detect containers."""

from __future__ import annotations

from ..finding import Evidence, evidence
from .host import Host, Trouble

_FILES = {"/.dockerenv": "Docker", "/run/.containerenv": "Podman"}
_GROUPS = {"docker": "Docker", "libpod": "Podman", "kubepods": "Kubernetes", "containerd": "containerd", "lxc": "LXC"}
_APPTAINER = "/.singularity.d"  # the image's scripts; Apptainer was called Singularity
_KUBERNETES = "KUBERNETES_SERVICE_HOST"  # Kubernetes sets this variable in every container


def container_kind(host: Host) -> tuple[str, Evidence]:
    """Return the kind of container, or "" outside of containers, and the evidence. The surest signs come first.

    With cgroups version 2, a process in a container sees its group as "/" (cgroup_namespaces(7)). A container's root
    is an overlay of layers, but so is the root of live systems and of some cluster nodes. An overlay is only a hint.
    """
    for path, kind in _FILES.items():
        mark = host.read(path)
        if mark.ok or mark.trouble is Trouble.DENIED:
            return kind, evidence(mark, "there")
    if (scripts := host.names(_APPTAINER)).ok:
        return "Apptainer", evidence(scripts, "there")
    told = host.ask("container")
    if told.text:
        return told.text[:16], evidence(told)
    groups = host.read("/proc/1/cgroup")
    if kind := next((kind for mark, kind in _GROUPS.items() if mark in groups.text), ""):
        return kind, evidence(groups)
    if (service := host.ask("environment", _KUBERNETES)).text:
        return "Kubernetes", evidence(service, "set")
    if (root := host.ask("root_filesystem")).text == "overlay":
        return "its root is an overlay", evidence(root)
    return "", evidence(groups)
