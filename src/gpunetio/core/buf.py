"""Buffers of the CPU data path: ranges of memory maps, alone or in chains."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..arguments import instance, whole, within
from ..closing import end_block
from ..errors import BadStateError, FullError, InvalidValueError
from ..verbs import MR, Sge
from .memory_map import MemoryMap
from .remote_memory import RemoteMemory

_MOST = 1 << 24


class Buf:
    """`nbytes` at `address` of a memory, part of which is data (`doca_buf`). Created by a `BufInventory`.

    A task reads the data of its source, which is initially the whole buffer. It fills its destination from the start of
    the buffer; the bytes written become the destination's data.

    `chain` appends other buffers: the whole list is then one source or destination, and its head stands for it.
    """

    memory: MemoryMap | RemoteMemory
    address: int
    nbytes: int

    def __init__(self, inventory: BufInventory, memory: MemoryMap | RemoteMemory, offset: int, nbytes: int):
        base = memory.iova if isinstance(memory, MR) else memory.address
        self.memory, self.address, self.nbytes = memory, base + offset, nbytes
        self._inventory, self._offset = inventory, offset
        self._refcount = 1
        self._data_offset, self._data_nbytes = 0, nbytes
        self._head: Buf = self
        self._list: list[Buf] = [self]

    # --- data --------------------------------------------------------------------------------------------------------

    @property
    def data_address(self) -> int:
        """Return the address of the data (`doca_buf_get_data`), in the address space of the memory's keys."""
        return self.address + self._data_offset

    @property
    def data_nbytes(self) -> int:
        """Return the number of bytes of data in this buffer (`doca_buf_get_data_len`)."""
        return self._data_nbytes

    @property
    def data(self) -> NDArray[np.uint8]:
        """Return this buffer's data as a NumPy view. BadStateError for memory that the CPU cannot address."""
        self._check()
        if isinstance(self.memory, RemoteMemory):
            raise BadStateError(f"{self} is memory of a peer: read it by a task")
        return self.memory.array(self._offset + self._data_offset, self._data_nbytes)

    def set_data(self, offset: int, nbytes: int) -> None:
        """Set which part of this buffer is data (`doca_buf_set_data`). InvalidValueError if it exceeds the buffer."""
        self._check()
        offset, nbytes = whole("offset", offset), whole("nbytes", nbytes)
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise InvalidValueError(f"data at [{offset}, +{nbytes}): {self} has {self.nbytes} bytes")
        self._data_offset, self._data_nbytes = offset, nbytes

    def fill(self, nbytes: int) -> None:
        """Record that a task has written `nbytes` to the list. Each buffer's data then begins at the buffer's start."""
        nbytes = whole("nbytes", nbytes)
        for buf in self._list:
            buf._data_offset, buf._data_nbytes = 0, min(nbytes, buf.nbytes)
            nbytes -= buf._data_nbytes

    # --- chains ------------------------------------------------------------------------------------------------------

    def chain(self, other: Buf) -> None:
        """Append another list to this list (`doca_buf_chain_list`). Both buffers must be heads of their lists."""
        for buf in (self, instance("other", other, Buf)):
            buf._check()
            if buf._head is not buf:
                raise InvalidValueError(f"{buf} is inside a list: chain heads of lists")
        if other is self:
            raise InvalidValueError(f"{self} cannot be chained to itself")
        if isinstance(self.memory, RemoteMemory) or isinstance(other.memory, RemoteMemory):
            raise InvalidValueError("a request takes one range of a peer's memory: chain buffers of this process")
        for buf in other._list:
            buf._head = self
        self._list += other._list
        other._list = [other]

    def unchain(self, other: Buf) -> None:
        """Split the list: `other` and the buffers after it become a list of their own (`doca_buf_unchain_list`)."""
        self._check()
        if other is self or other not in self._list:
            raise InvalidValueError(f"{other} is not behind {self} in a list whose head is {self}")
        at = self._list.index(other)
        self._list, other._list = self._list[:at], self._list[at:]
        for buf in other._list:
            buf._head = other

    def __iter__(self) -> Iterator[Buf]:
        """Iterate over the buffers of the list, from this head on."""
        return iter(tuple(self._list))

    def sources(self) -> tuple[Sge, ...]:
        """Return the data of the list as scatter/gather entries."""
        return tuple(Sge(buf.data_address, buf.data_nbytes, buf.lkey) for buf in self._checked())

    def destinations(self) -> tuple[Sge, ...]:
        """Return the buffers of the list as scatter/gather entries."""
        return tuple(Sge(buf.address, buf.nbytes, buf.lkey) for buf in self._checked())

    @property
    def lkey(self) -> int:
        """Return the lkey of the memory. InvalidValueError for a peer's memory, which has no lkey."""
        if isinstance(self.memory, RemoteMemory):
            raise InvalidValueError(f"{self} is memory of a peer: give a buffer of this process")
        return self.memory.lkey

    def _checked(self) -> list[Buf]:
        """Return the list. Raise an error unless this buffer is its head and all its memory is open."""
        self._check()
        if self._head is not self:
            raise InvalidValueError(f"{self} is inside a list: give the list's head")
        for buf in self._list:
            if isinstance(buf.memory, MR):
                buf.memory.check_open()
        return self._list

    # --- references --------------------------------------------------------------------------------------------------

    @property
    def refcount(self) -> int:
        """Return the number of references (`doca_buf_get_refcount`). With 0, the buffer is back in its inventory."""
        return self._refcount

    def retain(self) -> None:
        """Add a reference (`doca_buf_inc_refcount`)."""
        self._check()
        self._refcount += 1

    def release(self) -> None:
        """Drop a reference (`doca_buf_dec_refcount`). Dropping the last one returns the whole list to its inventories.

        BadStateError without a reference, InvalidValueError for a buffer inside a list.
        """
        self._check()
        if self._head is not self:
            raise InvalidValueError(f"{self} is inside a list: release the list's head, or unchain it")
        self._refcount -= 1
        if not self._refcount:
            for buf in self._list:
                buf._refcount = 0
                buf._inventory.take_back(buf)

    def _check(self) -> None:
        if not self._refcount:
            raise BadStateError(f"{self} was released: it is back in its inventory")

    def __enter__(self) -> Buf:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._refcount:
            end_block(error, self.release)

    def __str__(self) -> str:
        return f"buffer of {self.nbytes} bytes at {self.address:#x}"

    def __repr__(self) -> str:
        state = f"{self._data_nbytes} of data" if self._refcount else "released"
        return f"<{self}, {state}>"


class BufInventory:
    """Creates buffers, at most `num` at a time (`doca_buf_inventory`)."""

    num: int

    def __init__(self, num: int):
        self.num = within("num", num, 1, _MOST)
        self._bufs: dict[Buf, None] = {}

    @property
    def num_free(self) -> int:
        """Return how many more buffers the inventory can create (`doca_buf_inventory_get_num_free_elements`)."""
        return self.num - len(self._bufs)

    def buf(self, memory: MemoryMap | RemoteMemory, offset: int = 0, nbytes: int | None = None) -> Buf:
        """Create a buffer of `nbytes` at `offset` of a memory, by default up to its end.

        `doca_buf_inventory_buf_get_by_addr`. FullError if the inventory has no buffer left, InvalidValueError for bytes
        outside the memory.
        """
        instance("memory", memory, MemoryMap, RemoteMemory)
        if isinstance(memory, MR):
            memory.check_open()
        offset = whole("offset", offset)
        count = memory.nbytes - offset if nbytes is None else whole("nbytes", nbytes)
        if offset < 0 or count < 0 or offset + count > memory.nbytes:
            raise InvalidValueError(f"[{offset}, +{count}) is outside the memory's {memory.nbytes} bytes")
        if not self.num_free:
            raise FullError(f"all {self.num} buffers of the inventory are in use: release one, or make a larger one")
        made = Buf(self, memory, offset, count)
        self._bufs[made] = None
        return made

    def take_back(self, buf: Buf) -> None:
        """Take a released buffer back; the buffer calls this."""
        del self._bufs[buf]

    def __repr__(self) -> str:
        return f"<inventory of {self.num} buffers, {self.num_free} free>"
