"""A wire to the kernel: a TAP device, whose other end is a network interface of this machine."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import struct

from ...errors import InUseError, InvalidValueError, NotPermittedError, NotSupportedError
from ...fabric import interface
from ...fabric.ethernet_records import FILE, VIRTIO_NET
from .descriptor import Ethernet

_DEVICE = "/dev/net/tun"
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8  # linux/if_tun.h
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6, _TUN_F_TSO_ECN = 1, 2, 4, 8


class Tap(Ethernet):
    """An Ethernet to the kernel through a TAP device. A device that the wire has created vanishes with the wire."""

    reading: int = FILE
    offloads: bool = True

    def attach(self) -> io.FileIO:
        device = self._open()
        try:
            existed = interface.exists(self.interface)
            self._attach_device(device)
            if not existed:
                self._set_up()
            self.check_interface()
        except BaseException:
            device.close()
            raise
        return device

    def _open(self) -> io.FileIO:
        try:
            fd = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotSupportedError(
                f"wire {self.name}: this machine has no {_DEVICE}. `modprobe tun` loads the driver; a container gets "
                f"the device by `--device {_DEVICE}`"
            ) from None
        except PermissionError:
            raise NotPermittedError(
                f"wire {self.name}: {_DEVICE} cannot be opened. Run the program as root, or have it opened to your "
                "user (`chmod 0666`, as udev's default), and be where you have CAP_NET_ADMIN: " + interface.RECIPE
            ) from None
        except OSError as error:
            raise self.os_error(error, f"open {_DEVICE}") from None
        return io.FileIO(fd, "r+b")

    def _attach_device(self, device: io.FileIO) -> None:
        """Attach to the TAP device with this name, and create the device if it does not exist."""
        name = self.interface
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        try:
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
            fcntl.ioctl(device, _TUNSETVNETHDRSZ, struct.pack("i", VIRTIO_NET.size))
            fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6 | _TUN_F_TSO_ECN)
        except PermissionError:
            raise NotPermittedError(
                f"wire {self.name}: to make a TAP device takes CAP_NET_ADMIN. Run the program as root, have root make "
                f"it for you (`ip tuntap add {name} mode tap user $USER`), or be where you have the right: "
                f"{interface.RECIPE}"
            ) from None
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise InUseError(
                    f"wire {self.name}: another program has {name}: close that, or choose another name"
                ) from None
            if error.errno == errno.EINVAL:
                raise InvalidValueError(
                    f"wire {self.name}: {name} exists, and is no TAP device, or has several queues: choose another "
                    f'name, or "packet:{name}" to use the interface as it is'
                ) from None
            raise self.os_error(error, f"make the TAP device {name}") from None

    def _set_up(self) -> None:
        """Set the MTU of a created device's interface, and set the interface up."""
        try:
            if self._port.config.mtu:
                interface.set_mtu(self.interface, self._port.config.mtu)
            interface.set_up(self.interface)
        except OSError as error:
            raise self.os_error(error, f"set up the TAP device {self.interface}") from None


make = Tap
