"""A kernel answers ARP and ping for an address of its own, until Ctrl+C: with no network stack, from where packets lie.

    python examples/answer_pings.py unix:/tmp/cable 10.9.0.1     # and qemu … -netdev stream,addr.type=unix,…
    python examples/answer_pings.py tap:pings 10.9.0.1           # and ip addr add 10.9.0.2/24 dev pings; ping 10.9.0.1

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

BURST, TURN_NS = 64, 1_000_000
NOTHING, WHO_HAS, PING = 0, 1, 2


@dev.device_function
def answer_arp(packet, nbytes, mac, ip):
    """Answer who asks for the MAC of `ip` (RFC 826)."""
    arp = headers.arp_at(packet + headers.ETHERNET.size)
    if nbytes < headers.ETHERNET.size + headers.ARP.size:
        return NOTHING
    if arp.operation != headers.ARP_REQUEST or arp.target_ip != ip:
        return NOTHING
    arp.operation = headers.ARP_REPLY
    arp.target_mac, arp.target_ip = arp.sender_mac, arp.sender_ip
    arp.sender_mac, arp.sender_ip = mac, ip
    return WHO_HAS


@dev.device_function
def answer_ping(packet, nbytes, ip):
    """Make an echo request to `ip` the reply to it (RFC 792)."""
    protocol, l3, l4, length = headers.l4_of(packet, nbytes)
    if protocol != headers.IP_PROTOCOL_ICMP or length < headers.ICMP.size:
        return NOTHING
    icmp = headers.icmp_at(l4)
    if icmp.type != headers.ICMP_ECHO or headers.ipv4_at(l3).destination != ip:
        return NOTHING
    headers.swap_addresses(l3)
    icmp.type = headers.ICMP_ECHO_REPLY  # the upper byte of a word
    icmp.checksum = headers.update_checksum(icmp.checksum, headers.ICMP_ECHO << 8, headers.ICMP_ECHO_REPLY << 8)
    return PING


@dev.device_function
def turn_round(packet, nbytes, mac, ip):
    """Make a question its answer. Return what it was."""
    ethernet = headers.ethernet_at(packet)
    if ethernet.ether_type == headers.ETHER_TYPE_ARP:
        found = answer_arp(packet, nbytes, mac, ip)
    else:
        found = answer_ping(packet, nbytes, ip)
    if found != NOTHING:
        ethernet.destination, ethernet.source = ethernet.source, mac
    return found


@gn.kernel
def answer(rxq, txq, mac, ip, attrs, stop, out):
    lkey = dev.rxq_lkey(rxq)
    arps = 0
    pings = 0
    status = dev.OK
    while status >= 0 and dev.ld_relaxed64(stop) == 0:
        count = dev.rxq_recv(rxq, BURST, TURN_NS, attrs, dev.THREAD, 1)
        status = min(count, 0)
        if count <= 0:
            continue
        first = dev.rxq_first(rxq)
        for i in range(count):
            packet = dev.rxq_packet(rxq, first + i)
            nbytes = dev.attr_at(attrs + i * dev.ATTR_BYTES).bytes
            found = turn_round(packet, nbytes, mac, ip)
            if found != NOTHING and status >= 0:
                status = dev.txq_wait(txq, dev.txq_send(txq, packet, lkey, nbytes, 1))
                arps += found == WHO_HAS
                pings += found == PING
        dev.rxq_give_back(rxq, first + count)
    dev.st64(out, arps)
    dev.st64(out + 8, pings)


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer ARP and pings.")
    parser.add_argument("wire", help="for example tap:pings")
    parser.add_argument("address", type=ipaddress.IPv4Address, help="for example 10.9.0.1")
    given = parser.parse_args()
    port = gn.PortConfig(addresses=str(given.address), wire=given.wire)
    with gn.open("soft0", port=port) as ctx, gn.Gpu() as gpu, flow.FlowPort(ctx) as rules:
        pd = ctx.create_pd()
        rxq = eth.CyclicRxq(gpu, pd, max_burst=1024, max_packet=2048)
        txq = eth.EthTxq(gpu, pd, 1024)
        mac, ip = int.from_bytes(eth.query_caps(ctx).mac), int(given.address)
        rules.steer(match.eth(ether_type=headers.ETHER_TYPE_ARP), to=rxq)
        rules.steer(match.icmp() & match.whole(), to=rxq)

        attrs = gpu.alloc(BURST * dev.ATTR_BYTES)
        stop, out = gpu.alloc(8, gn.MemType.CPU_GPU), gpu.alloc(16, gn.MemType.CPU_GPU)
        kernel = answer[1, 1, gpu](rxq, txq, mac, ip, attrs, stop, out)
        print(f"{given.address} answers on {given.wire}. Ctrl+C ends it", flush=True)
        try:
            kernel.wait(timeout=float("inf"))
            sys.exit(f"error: the kernel has failed: {rxq.last_error() or txq.last_error()}")
        except KeyboardInterrupt:
            stop.array[:] = 1
        kernel.wait(timeout=30)
        arps, pings = out.array.view(np.int64).tolist()
        print(f"{arps} ARP requests and {pings} pings answered on {gpu.name}")


if __name__ == "__main__":
    try:
        main()
    except gn.DocaError as error:
        sys.exit(f"error: {error}")
