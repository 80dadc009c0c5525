"""verbs_wait_cq_wr: a WAIT in one queue pair holds its SEND back until another queue pair has done its work.

    QP 1 ── buffer 1 ──▶ buffer 2 ── QP 2      complete in CQ 1
    QP 3 ── buffer 2 ──▶ buffer 3 ── QP 4      complete in CQ 2

    1. resources    device, protection domain, three buffers, two completion queues, four queue pairs
    2. connection   QP 1 with QP 2, and QP 3 with QP 4, over the loopback of the device
    3. data path    receives on QP 2 and QP 4; on QP 3 a WAIT for CQ 1, and then the SEND; finally the SEND on QP 1
    4. end          two completions in CQ 1, three in CQ 2; buffer 3 has what buffer 1 had

The SEND of QP 3 is posted before buffer 2 holds anything. Without the WAIT, buffer 3 would get its old contents.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from ipaddress import IPv6Address

from ..enums import Access, AddrType, LinkLayer, WcOpcode, WcStatus, WrOpcode
from ..errors import DriverError, InvalidValueError, TimedOutError, UnexpectedError
from ..nic.engine.port import PortConfig
from ..verbs import CQ, MR, PD, QP, Context, QpEndpoint, RecvWr, SendWr, Sge, wait_cq_pi
from ..verbs import open as open_device
from ..verbs.ah_attr import ip_type
from .connection import connect

DEPTH = 64  # of each queue
SIZE = 64  # of the message, in bytes
BYTE = 0x11  # every byte of the message
ACCESS = Access.LOCAL_WRITE  # to the buffers: receives fill them, and no peer writes or reads them
WAIT_SECONDS = 10.0  # for a completion
POLL_SECONDS = 50e-6  # between two polls: the NIC may be a thread that needs this core

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """The sample's options. `ipv6` names the address family of the GID at `gid_index`."""

    device: str | None = None
    nic_port: PortConfig | None = None
    gid_index: int = 0
    ipv6: bool = False


def run(options: SampleOptions) -> None:
    """Run the sample."""
    _log.info("Starting the sample")
    with open_device(options.device, port=options.nic_port) as ctx:
        sample = Sample(ctx, options)
        sample.connect()
        sample.post()
        sample.complete()
        sample.validate()
    _log.info("Sample finished successfully")


class Sample:
    """The resources of the sample, and its steps."""

    ctx: Context
    options: SampleOptions
    pd: PD
    buffer1: bytearray
    buffer2: bytearray
    buffer3: bytearray
    mr1: MR
    mr2: MR
    mr3: MR
    cq1: CQ
    cq2: CQ
    qp1: QP
    qp2: QP
    qp3: QP
    qp4: QP

    def __init__(self, ctx: Context, options: SampleOptions):
        self.ctx, self.options = ctx, options
        self.pd = ctx.create_pd()
        self.buffer1, self.buffer2, self.buffer3 = bytearray([BYTE] * SIZE), bytearray(SIZE), bytearray(SIZE)
        self.mr1, self.mr2, self.mr3 = (
            self.pd.register(buffer, ACCESS) for buffer in (self.buffer1, self.buffer2, self.buffer3)
        )
        self.cq1, self.cq2 = ctx.create_cq(DEPTH), ctx.create_cq(DEPTH)
        self.qp1, self.qp2 = self._queue_pair(self.cq1), self._queue_pair(self.cq1)
        # A queue for WAITs must be created as core-direct.
        self.qp3, self.qp4 = self._queue_pair(self.cq2, core_direct_master=True), self._queue_pair(self.cq2)

    def _queue_pair(self, cq: CQ, core_direct_master: bool = False) -> QP:
        return self.pd.create_qp(
            sq_wr=DEPTH, rq_wr=DEPTH, send_cq=cq, receive_cq=cq, core_direct_master=core_direct_master
        )

    def connect(self) -> None:
        """Move all four queue pairs to RTS."""
        for qp, peer in ((self.qp1, self.qp2), (self.qp2, self.qp1), (self.qp3, self.qp4), (self.qp4, self.qp3)):
            here, there = (each.endpoint(sgid_index=self.options.gid_index) for each in (qp, peer))
            self._check_address(here)
            connect(qp, here, there, ACCESS, self.options.gid_index)

    def _check_address(self, here: QpEndpoint) -> None:
        """Raise InvalidValueError unless the GID is of the requested address family."""
        index, ipv6 = self.options.gid_index, self.options.ipv6
        if self.ctx.query_port(1).link_layer == LinkLayer.INFINIBAND:
            if ipv6:
                raise InvalidValueError(f"--ipv6 on {self.ctx.name}, an InfiniBand device: leave it out")
        elif (ip_type(here.gid) == AddrType.IPv6) != ipv6:
            address = IPv6Address(here.gid)
            cure = "choose another --gid-index, or give a software NIC an --address" if ipv6 else "give --ipv6"
            raise InvalidValueError(
                f"the GID at index {index} of {self.ctx.name} is that of {address.ipv4_mapped or address}, not an "
                f"{'IPv6' if ipv6 else 'IPv4'} address: {cure}"
            )

    def post(self) -> None:
        """Post everything. The SEND on QP 1, which starts the chain, comes last."""
        self.qp2.post_recv(RecvWr(sges=[_whole(self.mr2)]))
        self.qp4.post_recv(RecvWr(sges=[_whole(self.mr3)]))
        # Nothing is in flight to CQ 1, so its next completions are number `consumer_index` and the one after it: the
        # SEND of QP 1 and the receive of QP 2, in either order.
        self.qp3.post_send(wait_cq_pi(self.cq1, self.cq1.consumer_index + 1))
        self.qp3.post_send(SendWr(opcode=WrOpcode.SEND, sges=[_whole(self.mr2)]))
        self.qp1.post_send(SendWr(opcode=WrOpcode.SEND, sges=[_whole(self.mr1)]))

    def complete(self) -> None:
        """Wait for the completions of all requests."""
        _expect(self.cq1, WcOpcode.SEND, WcOpcode.RECV)
        _expect(self.cq2, WcOpcode.WAIT_CQ_PI, WcOpcode.SEND, WcOpcode.RECV)

    def validate(self) -> None:
        """Raise UnexpectedError unless the message has arrived in buffer 3."""
        if self.buffer3 != self.buffer1:
            raise UnexpectedError(
                f"Data in buffer3 differs from the data in buffer1: {self.buffer3.hex()}, not {self.buffer1.hex()}"
            )
        _log.info("Data in buffer3 is identical to the data in buffer1")


def _whole(mr: MR) -> Sge:
    """Return a scatter/gather entry for a whole buffer."""
    return Sge(mr.address, mr.nbytes, mr.lkey)


def _expect(cq: CQ, *opcodes: WcOpcode) -> None:
    """Wait for completions of these opcodes, in any order. DriverError for a request that has failed."""
    missing = list(opcodes)
    end = time.monotonic() + WAIT_SECONDS
    while True:
        for completion in cq.poll():
            if completion.status != WcStatus.SUCCESS:
                raise DriverError(
                    f"a request of QP {completion.qp_num:#x} failed: {completion.status.name} (vendor "
                    f"{completion.vendor_err:#04x}); the NIC's log says why"
                )
            if completion.opcode not in missing:
                raise UnexpectedError(f"{cq} has a completion of {completion.opcode.name}, which was not posted")
            missing.remove(completion.opcode)
            _log.debug("%s: %s of QP %#x", cq, completion.opcode.name, completion.qp_num)
        if not missing:
            return
        if time.monotonic() > end:
            names = ", ".join(opcode.name for opcode in missing)
            raise TimedOutError(f"{cq} has no completion of {names} after {WAIT_SECONDS:g} s")
        time.sleep(POLL_SECONDS)
