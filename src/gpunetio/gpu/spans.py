"""Rings and records of queues, as a GPU handle accesses them: mapped for kernels, read and written by the host."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..enums import RingMemory
from ..formats.cqe import CQE_SIZE
from ..formats.doorbell import CQ_DBREC, QP_DBREC
from ..formats.wqe import WQEBB
from ..verbs import CQ, QP, SRQ, Context
from ..verbs.devx.ring import Ring
from .backend import Backend

_WORD = 4  # bytes of a receive counter


class Sender(Protocol):
    """A queue that sends: a queue pair, or a send queue of Ethernet packets. `qpn` is its number in doorbells."""

    ctx: Context
    qpn: int
    sq_address: int
    sq_entries: int
    dbr_address: int
    doorbell_register: int
    ring: Ring


@dataclass(frozen=True)
class Span:
    """`nbytes` of a queue's memory at `address`.

    In host memory, the host loads and stores; kernels do so after the range is mapped. In GPU memory, kernels load and
    store; the host copies while they run.
    """

    backend: Backend
    address: int
    nbytes: int
    lies_in: RingMemory

    def map(self, undo: ExitStack) -> int:
        """Return the address for kernels. `undo` removes the mapping."""
        if self.lies_in.in_gpu:
            return self.address
        device_address = self.backend.map(self.address, self.nbytes)
        undo.callback(self.backend.unmap, self.address, self.nbytes)
        return device_address

    def read(self, offset: int = 0, nbytes: int | None = None) -> np.ndarray:
        """Return the bytes from `offset` on: host memory itself, or a copy of GPU memory."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        if not self.lies_in.in_gpu:
            return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.address + offset))
        target = np.empty(nbytes, np.uint8)
        self.backend.copy(int(target.ctypes.data), self.address + offset, nbytes)
        return target

    def write(self, data: np.ndarray, offset: int = 0) -> None:
        """Replace the bytes from `offset` on."""
        if self.lies_in.in_gpu:
            self.backend.copy(self.address + offset, int(data.ctypes.data), data.nbytes)
        else:
            self.read(offset, data.nbytes)[:] = data

    def clear(self) -> None:
        """Set all bytes to 0."""
        self.write(np.zeros(self.nbytes, np.uint8))


def send_ring(backend: Backend, qp: Sender) -> Span:
    """Return the ring of a queue's sends."""
    return Span(backend, qp.sq_address, qp.sq_entries * WQEBB, qp.ring.lies_in)


def receive_ring(backend: Backend, queue: QP | SRQ) -> Span:
    """Return the ring of a QP's own receives, or of an SRQ."""
    if isinstance(queue, SRQ):
        return Span(backend, queue.ring_address, queue.entries * queue.stride, queue.ring.lies_in)
    return Span(backend, queue.rq_address, queue.rq_entries * queue.rq_stride, queue.ring.lies_in)


def qp_record(backend: Backend, qp: Sender) -> Span:
    """Return the doorbell record of a QP or of a queue that sends, both words."""
    return Span(backend, qp.dbr_address, QP_DBREC.size, qp.ring.dbr_lies_in)


def receive_record(backend: Backend, queue: QP | SRQ) -> Span:
    """Return the word of the doorbell record that counts receives."""
    at = queue.dbr_address if isinstance(queue, SRQ) else queue.dbr_address + QP_DBREC.rcv
    return Span(backend, at, _WORD, queue.ring.dbr_lies_in)


def cq_ring(backend: Backend, cq: CQ) -> Span:
    """Return the ring of a CQ."""
    return Span(backend, cq.ring_address, cq.entries * CQE_SIZE, cq.ring.lies_in)


def cq_record(backend: Backend, cq: CQ) -> Span:
    """Return the doorbell record of a CQ."""
    return Span(backend, cq.dbr_address, CQ_DBREC.size, cq.ring.dbr_lies_in)
