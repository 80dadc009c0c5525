"""Fences."""

# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from .lowering import cpu_fence, drain, from_sm90, op, ptx


@op(cpu=cpu_fence("release"), cuda=from_sm90("fence.release.sys;", "fence.acq_rel.sys;"))
def fence_release_sys() -> None:
    """Order earlier accesses before later stores, for every agent of the system."""


@op(cpu=cpu_fence("release"), cuda=from_sm90("fence.release.gpu;", "fence.acq_rel.gpu;"))
def fence_release_gpu() -> None:
    """Order earlier accesses before later stores, for the threads of this GPU."""


@op(cpu=cpu_fence("release"), cuda=from_sm90("fence.release.cta;", "fence.acq_rel.cta;"))
def fence_release_cta() -> None:
    """Order earlier accesses before later stores, for the threads of this block."""


@op(cpu=cpu_fence("acq_rel"), cuda=ptx("fence.acq_rel.sys;"))
def fence_sys() -> None:
    """Order earlier accesses before later ones, for every agent of the system: release and acquire in one."""


@op(cpu=drain, cuda=ptx("fence.acq_rel.sys;"))
def drain_stores() -> None:
    """Make earlier stores arrive before later ones, also where the CPU combines writes, as on BlueFlame pages."""


@op(cpu=cpu_fence("acq_rel"), cuda=ptx("fence.acq_rel.gpu;"))
def fence_gpu() -> None:
    """Order earlier accesses before later ones, for the threads of this GPU: release and acquire in one.

    A load may still come before an earlier store, as on x86: `fence_sc_gpu` forbids that.
    """


@op(cpu=cpu_fence("seq_cst"), cuda=ptx("fence.sc.gpu;"))
def fence_sc_gpu() -> None:
    """Order earlier accesses before later ones, including stores before loads, for the threads of this GPU."""


@op(cpu=cpu_fence("acq_rel"), cuda=ptx("fence.acq_rel.cta;"))
def fence_cta() -> None:
    """Order earlier accesses before later ones, for the threads of this block."""


@op(cpu=cpu_fence("acquire"), cuda=from_sm90("fence.acquire.sys;", "fence.acq_rel.sys;"))
def fence_acquire_sys() -> None:
    """Order earlier loads before later accesses, for every agent of the system."""


@op(cpu=cpu_fence("acquire"), cuda=from_sm90("fence.acquire.gpu;", "fence.acq_rel.gpu;"))
def fence_acquire_gpu() -> None:
    """Order earlier loads before later accesses, for the threads of this GPU."""


@op(cpu=cpu_fence("acquire"), cuda=from_sm90("fence.acquire.cta;", "fence.acq_rel.cta;"))
def fence_acquire_cta() -> None:
    """Order earlier loads before later accesses, for the threads of this block."""
