"""The kernel of send_wait_time, on a queue that waits for no time."""

import numpy as np

from gpunetio import Gpu, MemType, device, eth, open
from gpunetio.samples.send_wait_time import PACKETS, send_bursts


def test_a_queue_that_cannot_wait_sends_nothing():
    with open("soft0") as ctx, Gpu("host", warp=PACKETS) as gpu:
        pd = ctx.create_pd()
        txq = eth.EthTxq(gpu, pd, 1024, timeout=10)
        packets, times = gpu.alloc(PACKETS * 64), gpu.alloc(8, MemType.CPU_GPU)
        stop, out = gpu.alloc(8, MemType.CPU_GPU), gpu.alloc(16, MemType.CPU_GPU)
        with pd.register(packets) as region:
            for bursts, status in ((0, device.OK), (1, device.EINVAL)):
                launch = send_bursts[1, PACKETS, gpu](txq, packets, region.lkey, 64, times, bursts, stop, out)
                assert launch.wait(60)
                assert out.array.view(np.int64).tolist() == [0, status]
