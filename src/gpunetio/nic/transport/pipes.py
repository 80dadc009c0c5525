"""The engine's side of a wire that is two pipes of frames (fabric/frames.py), to whoever fills the pipe `rx`."""

from __future__ import annotations

from ...fabric.frames import (
    ETHERNET_FRAME, GRANTED_SHIFT, GRANT_SHIFT, MAX_GRANTED, PACKET, PIPE, Frame, PipeEnd, consume, next_frame,
    release,
)
from ...fabric.injector import icrc_fits
from ...formats.packet import BTH
from ...jit.compile import device_function, engine_function
from ...jit.ops import ld_acquire64
from ..state.counters import CounterSet
from ..state.wire import GRANT, GRANTS, WIRE, Grant, WireState
from ..state.worker import WorkerState
from .delivery import BATCH, capture_arrived, has_many_peers, receive
from .lan import take_lan_frames


@device_function
def _undamaged(worker: WorkerState, wire: WireState, frame: Frame, nbytes: int) -> bool:
    """Return whether a frame's ICRC is right or absent. Between NICs of one host, only a fault injector adds one."""
    if frame.icrc == 0 or icrc_fits(
        worker.scratch, frame + PACKET, nbytes, wire.peer_high, wire.peer_low, wire.here_high, wire.here_low
    ):
        return True
    CounterSet(worker.counters).rx_icrc_encapsulated += 1
    return False


@device_function
def _count_malformed(worker: WorkerState) -> None:
    counters = CounterSet(worker.counters)
    counters.rdma_rx_packets += 1
    counters.rx_malformed += 1


@engine_function
def _receive_granted(
    worker: WorkerState, wire: WireState, packet: int, nbytes: int, reference: int, life: int, at: int
) -> None:
    """Take a packet whose payload is in memory that the peer has granted us. Its reference is checked, not trusted."""
    number = reference >> GRANT_SHIFT
    if wire.grants == 0 or number <= 0:
        _count_malformed(worker)
        return
    grant = Grant(wire.grants + (number & (GRANTS - 1)) * GRANT.size)
    part = (reference >> GRANTED_SHIFT) & ((1 << GRANT_SHIFT - GRANTED_SHIFT) - 1)
    offset = reference & (MAX_GRANTED - 1)
    if grant.number != number or part == 0 or offset > grant.nbytes - part:
        _count_malformed(worker)
        return
    worker.payload, worker.payload_bytes = grant.address + offset, part
    receive(worker, wire, packet, nbytes, wire.peer_high, wire.peer_low, life, at)
    worker.payload_bytes = 0


@engine_function
def take_frames(worker: WorkerState, wire: WireState) -> int:
    """Take packets, and frames of Ethernet, that the other end has put into the pipe: return how many.

    Frames that found no receive are no work done. An engine that only drops frames lets others run on its core, such as
    the kernel that is to post receives.
    """
    end = PipeEnd(wire + WIRE.rx)
    starved = CounterSet(worker.counters).rx_frame_no_buffer
    done = 0
    while done < BATCH and not wire.broken:
        frame = Frame(next_frame(end))
        if frame == 0:
            break
        if frame < 0:  # the other end does not keep to the protocol
            wire.broken = 1
            break
        nbytes = end.nbytes
        if frame.reference == ETHERNET_FRAME:
            taken = take_lan_frames(worker, wire, worker.arrived, BATCH - done)
            if taken == 0:  # the process has no Ethernet queues, so nobody has asked for frames
                consume(end)
            done += max(taken, 1)
            continue
        done += 1
        peer_high, peer_low = wire.peer_high, wire.peer_low
        if has_many_peers(wire):
            peer_high, peer_low = frame.peer_high, frame.peer_low
        intact = nbytes < BTH.size or _undamaged(worker, wire, frame, nbytes)
        if worker.capture != 0:
            capture_arrived(worker, wire, frame + PACKET, nbytes, peer_high, peer_low, 0 if intact else 1, frame.source)
        if intact:
            reference, life = frame.reference, frame.life
            at = end.position
            if reference == 0:
                receive(worker, wire, frame + PACKET, nbytes, peer_high, peer_low, life, at)
            else:
                _receive_granted(worker, wire, frame + PACKET, nbytes, reference, life, at)
        consume(end)
    if done:
        release(end)
    return done - (CounterSet(worker.counters).rx_frame_no_buffer - starved)


@engine_function
def arrivals(wire: WireState) -> int:
    """Return the position behind the frames that are in the pipe already."""
    return ld_acquire64(PipeEnd(wire + WIRE.rx).pipe + PIPE.head)
