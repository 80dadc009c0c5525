"""Flow ports of a software NIC: queues that take nothing, and frames that meet rules as those of a wire do."""

import contextlib
from collections.abc import Iterable, Iterator

from ethernet_rig import Maker, nic_of
from gpunetio import PortConfig, verbs
from gpunetio.flow import FlowPort
from gpunetio.formats.ethernet_queues import RQTC, TIRC, DispType, rqns_of
from gpunetio.nic.state.flow import Fate
from gpunetio.verbs import DevxObject
from steering_kernels import Frames


class Setup:
    """A NIC with a flow port, and receive queues that take nothing."""

    def __init__(self, ctx: verbs.Context, port: FlowPort):
        self.ctx, self.port = ctx, port
        self._make = Maker(ctx)
        self._cq = self._make.cq()

    def rq(self) -> DevxObject:
        """A receive queue."""
        return self._make.rq(self._cq.number)

    def tir(self) -> DevxObject:
        """A TIR before a receive queue of its own."""
        return self._make.direct(self._make.domain().number, self.rq().number)

    def met(self, frames: Iterable[bytes]) -> list[tuple[Fate, int, int]]:
        """Give frames to a NIC whose wires are quiet. Return fate, RQ and flow tag of each; RQ 0 is none."""
        given, nic = Frames([bytes(frame) for frame in frames]), nic_of(self.ctx)
        verdicts = given.steer(nic)
        hashes = given.rows["hash"].tolist()
        return [
            (fate, self._rqn(tirn, hash_) if fate == Fate.TIR else 0, tag)
            for (fate, tirn, tag), hash_ in zip(verdicts, hashes, strict=True)
        ]

    def _rqn(self, tirn: int, hash_: int) -> int:
        """The RQ that a TIR chooses, as the PRM has it: an RQT of a power of two is indexed by low bits of the hash."""
        control = nic_of(self.ctx).control
        tir = TIRC.unpack(control.tirs.contexts[tirn])
        if tir["disp_type"] == DispType.DIRECT:
            return tir["inline_rqn"]
        rqns = rqns_of(control.rqts.context_of(tir["indirect_table"])[RQTC.size :])
        return rqns[hash_ % len(rqns)]


@contextlib.contextmanager
def steered(isolated: bool = True, workers: int = 0) -> Iterator[Setup]:
    """A software NIC whose packets are steered."""
    with verbs.open("soft0", port=PortConfig(workers=workers)) as ctx, FlowPort(ctx, isolated=isolated) as port:
        yield Setup(ctx, port)


def left_over(ctx: verbs.Context) -> tuple[list[int], int, int, int]:
    """What is there of flow tables (numbers), bulks of flow counters, TIRs and RQTs."""
    control = nic_of(ctx).control
    return (
        sorted(control.flow_tables.known), len(control.flow_counters._bulks), len(control.tirs.contexts),
        len(control.rqts.contexts),
    )
