"""The engine's side of a wire that is two pipes of frames (fabric/frames.py), to whoever fills the pipe `rx`."""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import ld_acquire64
from ...fabric.injector import icrc_fits
from ...fabric.frames import (
    ETHERNET_FRAME, GRANTED_SHIFT, GRANT_SHIFT, MAX_GRANTED, PACKET, PIPE, consume, frame_at, next_frame, pipe_end_at,
    release,
)  # fmt: skip
from ...formats.packet import BTH
from .delivery import BATCH, capture_arrived, has_many_peers, receive
from .lan import take_lan_frames
from ..state.counters import counters_at
from ..state.worker import worker_at
from ..state.wire import GRANT, GRANTS, WIRE, grant_at, wire_at


@device_function
def _undamaged(nic, wire, frame, nbytes):
    """Return whether a frame's ICRC is right or absent. Between NICs of one host, only a fault injector adds one."""
    w = wire_at(wire)
    f = frame_at(frame)
    if f.icrc == 0 or icrc_fits(
        worker_at(nic).scratch, frame + PACKET, nbytes, w.peer_high, w.peer_low, w.here_high, w.here_low
    ):  # fmt: skip
        return True
    counters_at(worker_at(nic).counters).rx_icrc_encapsulated += 1
    return False


@device_function
def _count_malformed(nic):
    c = counters_at(worker_at(nic).counters)
    c.rdma_rx_packets += 1
    c.rx_malformed += 1


@engine_function
def _receive_granted(nic, wire, packet, nbytes, reference, life, at):
    """Take a packet whose payload is in memory that the peer has granted us. Its reference is checked, not trusted."""
    n = worker_at(nic)
    w = wire_at(wire)
    number = reference >> GRANT_SHIFT
    if w.grants == 0 or number <= 0:
        _count_malformed(nic)
        return
    grant = grant_at(w.grants + (number & (GRANTS - 1)) * GRANT.size)
    part = (reference >> GRANTED_SHIFT) & ((1 << GRANT_SHIFT - GRANTED_SHIFT) - 1)
    offset = reference & (MAX_GRANTED - 1)
    if grant.number != number or part == 0 or offset > grant.nbytes - part:
        _count_malformed(nic)
        return
    n.payload, n.payload_bytes = grant.address + offset, part
    receive(nic, wire, packet, nbytes, w.peer_high, w.peer_low, life, at)
    n.payload_bytes = 0


@engine_function
def take_frames(nic, wire):
    """Take packets, and frames of Ethernet, that the other end has put into the pipe: return how many.

    Frames that found no receive are no work done. An engine that only drops frames lets others run on its core, such as
    the kernel that is to post receives.
    """
    n = worker_at(nic)
    w = wire_at(wire)
    end = wire + WIRE.rx
    starved = counters_at(n.counters).rx_frame_no_buffer
    done = 0
    while done < BATCH and not w.broken:
        frame = next_frame(end)
        if frame == 0:
            break
        if frame < 0:  # the other end does not keep to the protocol
            w.broken = 1
            break
        nbytes = pipe_end_at(end).nbytes
        f = frame_at(frame)
        if f.reference == ETHERNET_FRAME:
            taken = take_lan_frames(nic, wire, n.arrived, BATCH - done)
            if taken == 0:  # the process has no Ethernet queues, so nobody has asked for frames
                consume(end)
            done += max(taken, 1)
            continue
        done += 1
        peer_high, peer_low = w.peer_high, w.peer_low
        if has_many_peers(wire):
            peer_high, peer_low = f.peer_high, f.peer_low
        intact = nbytes < BTH.size or _undamaged(nic, wire, frame, nbytes)
        if n.capture != 0:
            capture_arrived(nic, wire, frame + PACKET, nbytes, peer_high, peer_low, 0 if intact else 1, f.source)
        if intact:
            reference, life = f.reference, f.life
            at = pipe_end_at(end).position
            if reference == 0:
                receive(nic, wire, frame + PACKET, nbytes, peer_high, peer_low, life, at)
            else:
                _receive_granted(nic, wire, frame + PACKET, nbytes, reference, life, at)
        consume(end)
    if done:
        release(end)
    return done - (counters_at(n.counters).rx_frame_no_buffer - starved)


@engine_function
def arrivals(wire):
    """Return the position behind the frames that are in the pipe already."""
    return ld_acquire64(pipe_end_at(wire + WIRE.rx).pipe + PIPE.head)
