"""The threads of a kernel count packets by flow, in a hash table in the GPU's memory. Ctrl+C prints the largest flows.

    python examples/count_flows.py unix:/tmp/cable     # and qemu … -netdev stream,addr.type=unix,…
    python examples/count_flows.py packet:eth0         # all IPv4 that this interface receives, but no fragments

Flows that find no free row in the table are counted together, as 0.0.0.0:0 to 0.0.0.0:0.
Needs no extra. If there is a GPU, it runs there with `pip install -e '.[cuda]'`.
"""

import argparse
import ipaddress
import sys

import numpy as np

import gpunetio as gn
from gpunetio import device as dev
from gpunetio import eth, flow
from gpunetio.eth import headers
from gpunetio.flow import match

BURST, TURN_NS, FLOWS, WINDOW, SHOWN = 1024, 1_000_000, 1 << 16, 32, 10
ADDRESSES, PORTS, PACKETS, BYTES, ROW = 0, 8, 16, 24, 32  # a row of the table: offsets of its words, and its size


@dev.device_function
def row_of(table, source, destination, ports):
    """Return the row of a flow, or the last row if there is no room. Threads need no lock: each word is set once."""
    addresses = source << 32 | destination
    start = (source * 0x2545_F491 ^ destination * 0x1B87_3593 ^ (ports & 0xFFFF_FFFF) * 0x27D4_EB2F) >> 16
    for i in range(WINDOW):
        row = table + ROW * (start + i & FLOWS - 1)
        if dev.ops.cas_gpu64(row + ADDRESSES, 0, addresses) in (0, addresses):
            if dev.ops.cas_gpu64(row + PORTS, 0, ports) in (0, ports):  # else it is another flow of these addresses
                return row
    return table + ROW * FLOWS


@dev.device_function
def count_packet(table, packet, nbytes):
    protocol, ip, l4, length = headers.l4_of(packet, nbytes)
    if protocol != headers.NONE:
        v4, ports = headers.ipv4_at(ip), protocol << 32 | 1 << 40  # not 0, as in a free row
        if length >= headers.UDP.size and (protocol == headers.IP_PROTOCOL_UDP or protocol == headers.IP_PROTOCOL_TCP):
            ports |= headers.udp_at(l4).source_port << 16 | headers.udp_at(l4).destination_port
        row = row_of(table, v4.source, v4.destination, ports)
        dev.fetch_add_gpu64(row + PACKETS, 1)
        dev.fetch_add_gpu64(row + BYTES, nbytes)


@gn.kernel
def count(rxq, table, attrs, stop):
    received = 0
    while received >= 0 and dev.block_broadcast(dev.ld_relaxed64(stop), 0) == 0:
        received = dev.rxq_recv(rxq, BURST, TURN_NS, attrs, dev.BLOCK, 1)
        first = dev.rxq_first(rxq)
        for i in range(dev.thread_idx(), received, dev.block_dim()):
            nbytes = dev.attr_at(attrs + i * dev.ATTR_BYTES).bytes
            count_packet(table, dev.rxq_packet(rxq, first + i), nbytes)
        dev.block_sync()  # all threads are done with the burst
        if dev.thread_idx() == 0:
            dev.rxq_give_back(rxq, first + received)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count packets by flow.")
    parser.add_argument("wire", help="for example packet:eth0")
    wire = parser.parse_args().wire
    port = gn.PortConfig(addresses="169.254.77.1", wire=wire)  # each port needs an address
    with gn.open("soft0", port=port) as ctx, gn.Gpu() as gpu, flow.FlowPort(ctx) as rules:
        rxq = eth.CyclicRxq(gpu, ctx.create_pd(), max_burst=16384, max_packet=2048)
        rules.steer(match.ipv4() & match.whole(), to=rxq)
        table, attrs = gpu.alloc((FLOWS + 1) * ROW), gpu.alloc(BURST * dev.ATTR_BYTES)
        stop = gpu.alloc(8, gn.MemType.CPU_GPU)
        kernel = count[1, 4 * gpu.warp, gpu](rxq, table, attrs, stop)
        print(f"flows of {wire} are counted. Ctrl+C shows them", flush=True)
        try:
            while not kernel.wait(timeout=1):
                print(f"{table.read().view(np.int64)[2::4].sum()} packets", flush=True)
            sys.exit(f"error: the kernel has failed: {rxq.last_error()}")
        except KeyboardInterrupt:
            stop.array[:] = 1
        kernel.wait(timeout=30)
        rows = table.read().view(np.int64).reshape(FLOWS + 1, 4)
        for addresses, ports, packets, nbytes in rows[np.argsort(-rows[:, 3])][:SHOWN].tolist():
            source, destination = (ipaddress.IPv4Address(addresses >> shift & 0xFFFF_FFFF) for shift in (32, 0))
            ends = f"{source}:{ports >> 16 & 0xFFFF} to {destination}:{ports & 0xFFFF}"
            print(f"{ends}, protocol {ports >> 32 & 0xFF}: {packets} packets, {nbytes} bytes")
        print(f"{rows[:, 2].sum()} packets of {np.count_nonzero(rows[:, 2])} flows on {gpu.name}")


if __name__ == "__main__":
    try:
        main()
    except gn.DocaError as error:
        sys.exit(f"error: {error}")
