"""Fixtures of the transport's tests."""

from transport_rig import lab, peer

__all__ = ["lab", "peer"]
