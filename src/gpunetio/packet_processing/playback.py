"""Packets from a capture file: a software NIC gets them as if from a network, no faster than the kernels take them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DocaError, InvalidValueError
from ..fabric.pcap_reader import CUT_SHORT, PcapFile
from ..nic.engine.port import PortConfig
from ..nic.state.counters import FRAME_FATES, STEERED_FATES
from ..nic.wires.pcap import Pcap, replay_frames
from ..samples.until_stopped import StopWord

if TYPE_CHECKING:
    from ..nic.nic import SoftNic

_ADDRESS = "192.0.2.1"  # from RFC 5737, for documentation: the port needs an address
_PAUSE = 0.0005  # seconds
_DRAIN_SECONDS = 10.0  # for the kernels to take the last packets
_TIMEOUT = 86400.0
_END_SECONDS = 30.0
_DELIVERED, _TOO_LONG = "rx_frame_delivered", ("rx_frame_oversize", "rx_frame_too_long")


class _StoppedError(Exception):
    """The application ends before the file is finished."""


def port_of(path: Path, given: PortConfig | None) -> PortConfig:
    """Return the port whose wire is a file. `given` are its other settings."""
    given = given or PortConfig()
    if given.wire != "auto":
        raise InvalidValueError(f"wire = {given.wire!r}: a replay needs no wire, since packets come from {path}")
    return replace(given, wire=f"pcap:{path}", addresses=given.addresses or (_ADDRESS,))


@contextmanager
def playing(nic: SoftNic, rqns: Sequence[int], received: Callable[[], int], stop: StopWord) -> Iterator[Player]:
    """Put the frames of the file on the NIC's wire, in a thread. It sets `stop` when the kernels have taken them.

    No frame is put before the receive queues `rqns` have room for it. `received` returns how many packets kernels have
    received from them. The thread ends early when `stop` is set, and before a damaged place in the file.
    """
    player = Player(nic, rqns, received, stop)
    player.start()
    try:
        yield player
    finally:
        stop.set()
        player.join(_END_SECONDS)
    if player.defect is not None:
        raise player.defect


class Player(threading.Thread):
    """The thread of `playing`. `error` is an error in the file, and `defect` one of the program."""

    error: DocaError | OSError | None
    defect: Exception | None

    def __init__(self, nic: SoftNic, rqns: Sequence[int], received: Callable[[], int], stop: StopWord):
        super().__init__(daemon=True)
        self._nic, self._rqns, self._received, self._stop_word = nic, rqns, received, stop
        self.error = None
        self.defect = None

    def run(self) -> None:
        try:
            try:
                replay_frames(self._nic, fast=True, timeout=_TIMEOUT, rqns=self._rqns, meanwhile=self._check)
            except (DocaError, OSError) as error:
                self.error = error
                self._pass_on()
            self._drain()
        except _StoppedError:
            pass
        except Exception as error:
            self.defect = error
        finally:
            self._stop_word.set()

    @property
    def _file(self) -> PcapFile:
        wire = self._nic.wire_to_others()
        assert isinstance(wire, Pcap)
        return wire.file

    def counts(self) -> dict[str, int]:
        """Return how many records the file has, how many are cut short, and how many frames no queue took.

        Records that are cut short are not replayed. The frames are by the NIC's counter that says why.
        """
        file, counters = self._file, dict(self._nic.counters)
        fates = (name for name in (*FRAME_FATES, *STEERED_FATES) if name != _DELIVERED)
        refused = {name: counters[name] for name in fates if counters[name]}
        return {"records": file.records, "cut_short": file.skipped[CUT_SHORT], **refused}

    def failure(self) -> str | None:
        """Return why the kernels' counts do not include all packets of the file, or None if they do."""
        found, path = self.counts(), self._file.path
        long = sum(found.get(name, 0) for name in _TOO_LONG)
        lacks = [] if self.error is None else [str(self.error)]
        if cut := found["cut_short"]:
            lacks.append(
                f"{cut} of {found['records']} frames in {path} are cut short, so no kernel counts them. `tcpdump -s 0` "
                "captures whole frames"
            )
        if long:
            lacks.append(
                f"{long} of {found['records']} frames in {path} are longer than a receive queue takes, so no kernel "
                "counts them. `ethtool -K INTERFACE gro off tso off` before the capture avoids such frames"
            )
        return "; ".join(lacks) or None

    def _check(self) -> None:
        if self._stop_word.is_set:
            raise _StoppedError

    def _pass_on(self) -> None:
        """Wait until the NIC has taken all frames that are on its wire."""
        file, end = self._file, time.monotonic() + _DRAIN_SECONDS
        put = file.records - file.skipped[CUT_SHORT]
        while int(self._nic.counters["rx_frames"]) < put and time.monotonic() < end:
            self._check()
            self._nic.engine.doorbell_rung()
            time.sleep(_PAUSE)
        self._nic.engine.synchronize()

    def _drain(self) -> None:
        """Wait until the kernels have taken everything. Packets for a failed kernel stay in its ring."""
        end = time.monotonic() + _DRAIN_SECONDS
        placed = sum(int(self._nic.rqs[rqn]["frames"]) for rqn in self._rqns)
        while self._received() < placed and time.monotonic() < end:
            self._check()
            time.sleep(_PAUSE)
