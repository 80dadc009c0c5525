"""The end of a connection that the samples of the connection manager use."""

import pytest

from gpunetio import verbs
from gpunetio.enums import WcOpcode, WrOpcode
from gpunetio.errors import DriverError
from gpunetio.samples.cm_end import End
from gpunetio.verbs import SendWr

pytestmark = pytest.mark.soft_nic


def test_what_has_completed_before_the_peer_left_counts():
    """An answer that is there is taken, although the request has failed because its acknowledgement was lost."""
    with verbs.open() as ctx, End(ctx.create_pd(), 64) as here, End(ctx.create_pd(), 64) as there:
        here.qp.connect(there.qp)
        here.receive(0, 16)
        here.receive(16, 16)
        there.qp.post_send(SendWr(opcode=WrOpcode.SEND, inline=bytes(range(16))))
        there.wait(WcOpcode.SEND)
        here.qp.to_error()
        here.wait(WcOpcode.RECV)
        assert here.memory.array[:16].tolist() == list(range(16))
        assert here.peer_left
        for opcode in (WcOpcode.RECV, WcOpcode.SEND):
            with pytest.raises(DriverError, match="the other end has disconnected"):
                here.wait(opcode)


def test_a_request_that_failed_is_explained():
    with verbs.open() as ctx, End(ctx.create_pd(), 64) as here, End(ctx.create_pd(), 64) as there:
        here.qp.connect(there.qp)
        here.post(WrOpcode.RDMA_WRITE, 0, 16, remote_addr=there.region.address, rkey=0x1234)
        with pytest.raises(DriverError, match=r"REM_ACCESS_ERR.*0x1234"):
            here.wait(WcOpcode.RDMA_WRITE)
        assert not here.peer_left
