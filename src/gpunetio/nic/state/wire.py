"""Wires of a NIC, and the memory that NICs grant each other across them."""

from __future__ import annotations

from typing import Annotated

from ...formats.layout import I64
from .record import State, command, engine


class WireState(State):
    """An end of a wire: where its packets go, how they are framed, and who its peer is."""

    kind: I64 = command("a number of transport/wire_kinds.py; 0 in a free row")
    broken: I64 = engine("not 0: the peer is gone or broke the rules, and packets are lost. Commands set it")
    window: I64 = command("packets that a QP may have in flight")
    infiniband: I64 = command("not 0: packets begin with an LRH")
    faults: I64 = command("address of the FAULTS that change what is sent (fabric/injector.py); 0 is none")
    medium: I64 = command("address of the kind's own record: UDP_WIRE, ETHERNET_WIRE; 0 for pipes")
    wake_fd: I64 = command("wakes the peer's engine (fabric/notifier.py); 0 if none sleeps there")
    woken: I64 = engine("position in `tx` up to which the peer was woken")
    # ends
    here_high: I64 = command("first half of this end's GID, as on the wire", line=True)
    here_low: I64 = command("second half")
    peer_high: I64 = command("first half of the peer's GID; all 0 if the wire leads to any number of peers")
    peer_low: I64 = command("second half")
    grants: I64 = command("address of GRANTS rows of GRANT; 0 if the peer does not take part in grants")
    whole_frames: I64 = command("not 0: captures show what is on the wire, not what QPs send")
    segments: I64 = command("not 0: takes a TSO as one frame, with a VIRTIO_NET before it (fabric/frames.py)")
    takes_frames: I64 = command("address of the peer's PIPE.takes_frames; 0 if the wire is not of the LAN")
    withdrawn: I64 = command("PIPE.withdrawn of `rx` at the peer's last message (control/regions/reach.py)")
    failed: I64 = command("PIPE.failed of `rx` then")
    answered: I64 = engine("PIPE.answered of `rx`")
    # pipes
    tx: Annotated[int, "raw[64]"] = engine("PIPE_END of what the NIC sends (fabric/frames.py)", line=True)
    rx: Annotated[int, "raw[64]"] = engine("PIPE_END of what arrives; zeros if frames do not arrive in a pipe")


WIRE = WireState.entry


class Grant(State, align=32):
    """Memory that the peer of a wire has granted.

    The low bits of a grant's number select its row. Commands write `number`, `address` and `nbytes` together.
    """

    number: I64 = command("number of the grant of the peer's memory; 0 in a free row")
    address: I64 = command("where that memory is mapped here")
    nbytes: I64 = command("its size, in bytes")
    mapped: I64 = command("number of the grant of this NIC's memory that the peer has mapped; 0 is none")


GRANT = Grant.entry
GRANTS = 256
