"""The attributes of a path to a peer."""

from __future__ import annotations

from dataclasses import dataclass

from ..arguments import instance, member, whole, within
from ..enums import AddrType, LinkLayer
from ..errors import InvalidValueError
from ..formats.packet import FLOW_LABEL_MASK, IPV4_MAPPED
from .device_attr import DeviceAttributes

GID_BYTES = 16
_LIMITS = {
    "dlid": 0xFFFF, "sl": 15, "static_rate": 15, "hop_limit": 255, "traffic_class": 255, "flow_label": FLOW_LABEL_MASK,
}


@dataclass
class AhAttr:
    """The path to a peer (`doca_verbs_ah_attr`). RoCE uses `gid`, InfiniBand `dlid` and `sl`.

    `sgid_index` selects the source GID in this port's table. `gid` is 16 raw bytes; an IPv4 address is written
    ::ffff:a.b.c.d. By default, `addr_type` follows from the GID and the port.

    `flow_label` is that of IPv6 and of global routes on InfiniBand (`ibv_global_route.flow_label`). DOCA has no
    counterpart.
    """

    gid: bytes = bytes(GID_BYTES)
    addr_type: AddrType | None = None
    dlid: int = 0
    sl: int = 0
    sgid_index: int = 0
    static_rate: int = 0
    hop_limit: int = 255
    traffic_class: int = 0
    flow_label: int = 0

    def check(self, device: DeviceAttributes) -> None:
        """Raise InvalidValueError for values that the device cannot use."""
        instance("ah_attr.gid", self.gid, bytes, bytearray)
        if len(self.gid) != GID_BYTES:
            raise InvalidValueError(f"ah_attr.gid has {len(self.gid)} bytes: a GID has {GID_BYTES}")
        if self.addr_type is not None:
            kind = member("ah_attr.addr_type", self.addr_type, AddrType)
            if (device.link_layer == LinkLayer.ETHERNET) != (kind in (AddrType.IPv4, AddrType.IPv6)):
                need = "IPv4 or IPv6" if device.link_layer == LinkLayer.ETHERNET else "IB_GRH or IB_NO_GRH"
                raise InvalidValueError(
                    f"ah_attr.addr_type = {kind.name} on a port of {device.link_layer.name}: use {need}, or leave it "
                    "out, and it follows from the GID"
                )
        if not 0 <= whole("ah_attr.sgid_index", self.sgid_index) < device.gid_table_size:
            raise InvalidValueError(
                f"ah_attr.sgid_index = {self.sgid_index}: the device has the GIDs 0 to {device.gid_table_size - 1}"
            )
        for name, most in _LIMITS.items():
            within(f"ah_attr.{name}", getattr(self, name), 0, most)


def ip_type(gid: bytes) -> AddrType:
    """Return whether a RoCE GID is an IPv4 or an IPv6 address."""
    return AddrType.IPv4 if gid.startswith(IPV4_MAPPED) else AddrType.IPv6
