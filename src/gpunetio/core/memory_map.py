"""Memory maps: memory of this process that a device may access, with a description for peers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..arguments import instance, whole
from ..enums import Access
from ..errors import BadStateError, InvalidValueError, NotPermittedError, NotSupportedError
from ..memory import Region
from ..verbs import MR, PD
from ..verbs.mr import Dmabuf
from .remote_memory import REMOTE, RemoteMemory


class _Bytes:
    """Memory in NumPy's array interface. The NumPy view keeps it alive."""

    def __init__(self, address: int, nbytes: int, region: Region):
        self._region = region
        self.__array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, region.readonly), "version": 3
        }


class MemoryMap(MR):
    """Memory with permissions for a device (`doca_mmap`): a memory region that can be exported to a peer.

    `obj` is a buffer, or has `__cuda_array_interface__` or DLPack; it stays alive as long as the map. With `nbytes`,
    `obj` is the address of that much memory. By default the map has all permissions, or only read permissions if `obj`
    is read-only.
    """

    def __init__(
        self,
        pd: PD,
        obj: object,
        permissions: Access | None = None,
        *,
        nbytes: int | None = None,
        iova: int | None = None,
    ):
        super().__init__(instance("pd", pd, PD), obj, permissions, iova, nbytes)

    @classmethod
    def from_dmabuf(
        cls,
        pd: PD,
        fd: int,
        nbytes: int,
        permissions: Access | None = None,
        *,
        offset: int = 0,
        iova: int | None = None,
    ) -> MemoryMap:
        """Map `nbytes` at `offset` of a dmabuf (`doca_mmap_set_dmabuf_memrange`).

        Requests and kernels address the memory from `iova` on, by default from `offset`. For kernels, set `iova` to the
        memory's address. NotSupportedError if the device cannot register dmabufs.
        """
        return cls(pd, Dmabuf(fd, offset, nbytes), permissions, iova=offset if iova is None else iova)

    def export_rdma(self) -> bytes:
        """Return a description for a peer's `RemoteMemory.from_export` (`doca_mmap_export_rdma`).

        It holds the address, the length, the key and the remote permissions. NotPermittedError if there are none.
        """
        self.check_open()
        if not self.access & REMOTE:
            raise NotPermittedError(f"{self} has no permission for a peer: add Access.REMOTE_READ or REMOTE_WRITE")
        return RemoteMemory(self.iova, self.nbytes, self.rkey, self.access & REMOTE).export()

    def export_pci(self) -> bytes:
        """Raise NotSupportedError: memory cannot be exported to another host of the device, such as a DPU.

        The C counterpart is `doca_mmap_export_pci`.
        """
        raise NotSupportedError(f"{self}: there is no DPU that could import memory; export_rdma() is for peers")

    def array(self, offset: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        """Return `nbytes` from `offset` on as a NumPy view, by default up to the end.

        BadStateError for memory that the CPU cannot address, InvalidValueError for bytes outside the memory.
        """
        self.check_open()
        offset = whole("offset", offset)
        count = self.nbytes - offset if nbytes is None else whole("nbytes", nbytes)
        if offset < 0 or count < 0 or offset + count > self.nbytes:
            raise InvalidValueError(f"[{offset}, +{count}) is outside the {self.nbytes} bytes of {self}")
        region = self._region
        if region is None or not self._of_the_cpu:
            raise BadStateError(f"the CPU does not address the memory of {self}: copy it, or use MemType.CPU_GPU")
        return np.asarray(_Bytes(self.address + offset, count, region))
