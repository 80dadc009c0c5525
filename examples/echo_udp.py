"""A kernel sends each UDP packet to port 7 back to where it came from (RFC 862), until Ctrl+C.

    python examples/echo_udp.py unix:/tmp/cable 10.9.0.1     # and qemu … -netdev stream,addr.type=unix,…
    python examples/echo_udp.py tap:echo 10.9.0.1            # and ip addr add 10.9.0.2/24 dev echo; nc -u 10.9.0.1 7

Needs no extra. If there is a GPU, it runs there with `pip install -e '.[cuda]'`.
"""

import argparse
import ipaddress
import sys

import gpunetio as gn
from gpunetio import device as dev
from gpunetio import eth, flow
from gpunetio.eth import headers
from gpunetio.flow import match

PORT, BURST, TURN_NS = 7, 64, 1_000_000


@gn.kernel
def echo(rxq, txq, attrs, stop):
    status = dev.OK
    while status >= 0 and dev.ld_relaxed64(stop) == 0:
        count = dev.rxq_recv(rxq, BURST, TURN_NS, attrs, dev.THREAD, 1)
        first, sent = dev.rxq_first(rxq), 0
        for i in range(count):
            packet = dev.rxq_packet(rxq, first + i)
            nbytes = dev.attr_at(attrs + i * dev.ATTR_BYTES).bytes
            _, ip, udp, length = headers.l4_of(packet, nbytes)
            _, payload = headers.udp_payload(udp, length)
            if payload >= 0:  # otherwise the packet is damaged
                headers.swap_macs(packet)
                headers.swap_addresses(ip)
                headers.swap_ports(udp)  # checksums stay right
                status = min(status, dev.txq_send(txq, packet, dev.rxq_lkey(rxq), nbytes, 1))
                sent += status >= 0
        status = min(status, count, dev.txq_poll(txq, sent))  # waits until all of them have left
        dev.rxq_give_back(rxq, first + count)


def main() -> None:
    parser = argparse.ArgumentParser(description="Echo UDP packets.")
    parser.add_argument("wire", help="for example tap:echo")
    parser.add_argument("address", type=ipaddress.IPv4Address, help="for example 10.9.0.1")
    given = parser.parse_args()
    port = gn.PortConfig(addresses=str(given.address), wire=given.wire)  # the NIC answers ARP for its address
    with gn.open("soft0", port=port) as ctx, gn.Gpu() as gpu, flow.FlowPort(ctx) as rules:
        pd = ctx.create_pd()
        rxq, txq = eth.CyclicRxq(gpu, pd, max_burst=1024, max_packet=2048), eth.EthTxq(gpu, pd, 1024)
        rules.steer(match.ipv4(dst=given.address) & match.udp(dst=PORT), to=rxq)
        attrs, stop = gpu.alloc(BURST * dev.ATTR_BYTES), gpu.alloc(8, gn.MemType.CPU_GPU)
        kernel = echo[1, 1, gpu](rxq, txq, attrs, stop)
        print(f"{given.address} echoes UDP to port {PORT}, on {gpu.name}. Ctrl+C ends it", flush=True)
        try:
            kernel.wait(timeout=float("inf"))
            sys.exit(f"error: the kernel has failed: {rxq.last_error() or txq.last_error()}")
        except KeyboardInterrupt:
            stop.array[:] = 1  # the queues close when the kernel has ended


if __name__ == "__main__":
    try:
        main()
    except gn.DocaError as error:
        sys.exit(f"error: {error}")
