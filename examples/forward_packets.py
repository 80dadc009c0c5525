"""Kernels join two networks: what arrives at one NIC leaves through the other, from where it lies, until Ctrl+C.

    python examples/forward_packets.py unix:/tmp/cable tap:net

Needs no extra. If there is a GPU, it runs there with `pip install -e '.[cuda]'`.
"""

import argparse
import sys

import numpy as np

import gpunetio as gn
from gpunetio import device as dev
from gpunetio import eth, flow
from gpunetio.flow import match

BURST, TURN_NS = 64, 1_000_000
PACKETS, LONGEST = 4096, 2048


@gn.kernel
def forward(rxq, txq, lkey, attrs, stop, out):
    packets = 0
    status = dev.OK
    while status >= 0 and dev.ld_relaxed64(stop) == 0:
        count = dev.rxq_recv(rxq, BURST, TURN_NS, attrs, dev.THREAD, 1)
        status = min(count, 0)
        if count <= 0:
            continue
        first = dev.rxq_first(rxq)
        ticket = 0
        for i in range(count):
            nbytes = dev.attr_at(attrs + i * dev.ATTR_BYTES).bytes
            ticket = dev.txq_send(txq, dev.rxq_packet(rxq, first + i), lkey, nbytes, i == count - 1)
        status = dev.txq_wait(txq, ticket)
        dev.rxq_give_back(rxq, first + count)
        packets += count
    dev.st64(out, packets)
    dev.st64(out + 8, status)


def main() -> None:
    parser = argparse.ArgumentParser(description="Join two networks.")
    parser.add_argument("wires", nargs=2, metavar="wire", help="for example unix:/tmp/cable")
    wires = parser.parse_args().wires
    # The NICs have addresses of their own only because each port needs one: all packets are forwarded.
    ports = [gn.PortConfig(addresses=f"169.254.77.{i + 1}", wire=wire) for i, wire in enumerate(wires)]
    with (
        gn.open("soft0", port=ports[0]) as near, gn.open("soft1", port=ports[1]) as far, gn.Gpu() as gpu,
        flow.FlowPort(near) as here, flow.FlowPort(far) as there,
    ):
        pds = near.create_pd(), far.create_pd()
        rxqs, regions = [], []
        for pd, other in (pds, pds[::-1]):
            packets = gpu.alloc(eth.CyclicRxq.estimate_buffer(pd.ctx, PACKETS, LONGEST), gn.MemType.CPU_GPU)
            rxqs.append(eth.CyclicRxq(gpu, pd, PACKETS, LONGEST, buffer=packets))
            regions.append(other.register(packets))  # by whose key the other NIC sends them
        txqs = [eth.EthTxq(gpu, pd, 1024) for pd in pds]

        stop, outs = gpu.alloc(8, gn.MemType.CPU_GPU), [gpu.alloc(16, gn.MemType.CPU_GPU) for _ in pds]
        attrs = [gpu.alloc(BURST * dev.ATTR_BYTES) for _ in pds]
        kernels = [
            forward[1, 1, gpu](rxqs[i], txqs[1 - i], regions[i].lkey, attrs[i], stop, outs[i]) for i in range(2)
        ]
        for port, rxq in zip((here, there), rxqs, strict=True):
            port.steer(match.everything(), to=rxq)
        print(f"{wires[0]} and {wires[1]} are joined. Ctrl+C ends it", flush=True)
        try:
            while not any(kernel.wait(timeout=1) for kernel in kernels):
                pass
        except KeyboardInterrupt:
            pass
        stop.array[:] = 1
        for kernel, out, rxq, txq in zip(kernels, outs, rxqs, reversed(txqs), strict=True):
            if not kernel.wait(timeout=30):
                sys.exit("a kernel did not end")
            if out.array.view(np.int64)[1] < 0:
                sys.exit(f"a kernel has failed: {rxq.last_error() or txq.last_error()}")
        forth, back = (int(out.array.view(np.int64)[0]) for out in outs)
        print(f"{forth} packets forth and {back} back on {gpu.name}")
        for region in regions:
            region.close()


if __name__ == "__main__":
    try:
        main()
    except gn.DocaError as error:
        sys.exit(f"error: {error}")
