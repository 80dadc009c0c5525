"""A kernel answers ARP and ping for an address of its own, until Ctrl+C: with no network stack, from where packets lie.

    python examples/answer_pings.py unix:/tmp/cable 10.9.0.1     # and qemu … -netdev stream,addr.type=unix,…
    python examples/answer_pings.py tap:pings 10.9.0.1           # and ip addr add 10.9.0.2/24 dev pings; ping 10.9.0.1

Needs no extra. If there is a GPU, it runs there with `pip install -e '.[cuda]'`.
"""

import ipaddress
import sys

import numpy as np

import gpunetio as gn
from gpunetio import device as dev
from gpunetio import eth, flow
from gpunetio.flow import match

BURST, TURN_NS = 64, 1_000_000
ETHER_TYPE_ARP = 0x0806
# What loads from a frame return: bytes of the network, in the order of the machine.
ARP, IPV4 = int.from_bytes(b"\x08\x06", "little"), int.from_bytes(b"\x08\x00", "little")
REQUEST, REPLY = int.from_bytes(b"\0\1", "little"), int.from_bytes(b"\0\2", "little")
ECHO_REQUEST, ECHO_REPLY = 8, 0
NOTHING, WHO_HAS, PING = 0, 1, 2


@dev.device_function
def word(address):
    return dev.ld16(address) | dev.ld16(address + 2) << 16


@dev.device_function
def move(to, source, nbytes):
    for i in range(0, nbytes, 2):
        dev.st16(to + i, dev.ld16(source + i))


@dev.device_function
def put(to, value, nbytes):
    for i in range(0, nbytes, 2):
        dev.st16(to + i, value >> 8 * i & 0xFFFF)


@dev.device_function
def answer_arp(packet, mac, ip):
    """RFC 826: operation at 20, sender's addresses at 22 and 28, those asked for at 32 and 38."""
    if dev.ld16(packet + 20) != REQUEST or word(packet + 38) != ip:
        return NOTHING
    dev.st16(packet + 20, REPLY)
    move(packet + 32, packet + 22, 10)
    put(packet + 22, mac, 6)
    put(packet + 28, ip, 4)
    return WHO_HAS


@dev.device_function
def answer_ping(packet, ip):
    """RFC 792. The type becomes 0 from 8, so the checksum, of ones' complement, grows by that (RFC 1624)."""
    if dev.ld8(packet + 14) != 0x45 or word(packet + 30) != ip or dev.ld8(packet + 34) != ECHO_REQUEST:
        return NOTHING
    move(packet + 30, packet + 26, 4)
    put(packet + 26, ip, 4)
    dev.st8(packet + 34, ECHO_REPLY)
    checksum = dev.ld16(packet + 36) + ECHO_REQUEST
    dev.st16(packet + 36, checksum + (checksum >> 16) & 0xFFFF)
    return PING


@dev.device_function
def turn_round(packet, mac, ip):
    """Make a question its answer. Return what it was."""
    kind = dev.ld16(packet + 12)
    found = NOTHING
    if kind == ARP:
        found = answer_arp(packet, mac, ip)
    elif kind == IPV4:
        found = answer_ping(packet, ip)
    if found != NOTHING:
        move(packet, packet + 6, 6)
        put(packet + 6, mac, 6)
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
            found = turn_round(packet, mac, ip)
            if found != NOTHING and status >= 0:
                nbytes = dev.attr_at(attrs + i * dev.ATTR_BYTES).bytes
                status = dev.txq_wait(txq, dev.txq_send(txq, packet, lkey, nbytes, 1))
                arps += found == WHO_HAS
                pings += found == PING
        dev.rxq_give_back(rxq, first + count)
    dev.st64(out, arps)
    dev.st64(out + 8, pings)
    dev.st64(out + 16, status)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: answer_pings.py WIRE ADDRESS, such as tap:pings 10.9.0.1")
    wire, address = sys.argv[1:]
    port = gn.PortConfig(addresses=address, wire=wire)
    with gn.open("soft0", port=port) as ctx, gn.Gpu() as gpu, flow.FlowPort(ctx) as rules:
        pd = ctx.create_pd()
        rxq = eth.CyclicRxq(gpu, pd, max_burst=1024, max_packet=2048)
        txq = eth.EthTxq(gpu, pd, 1024)
        mac = int.from_bytes(eth.query_caps(ctx).mac, "little")
        ip = int.from_bytes(ipaddress.IPv4Address(address).packed, "little")

        attrs = gpu.alloc(BURST * dev.ATTR_BYTES)
        stop, out = gpu.alloc(8, gn.MemType.CPU_GPU), gpu.alloc(24, gn.MemType.CPU_GPU)
        kernel = answer[1, 1, gpu](rxq, txq, mac, ip, attrs, stop, out)
        rules.steer(match.eth(ether_type=ETHER_TYPE_ARP), to=rxq)
        rules.steer(match.icmp() & match.whole(), to=rxq)
        print(f"{address} answers on {wire}. Ctrl+C ends it", flush=True)
        try:
            while not kernel.wait(timeout=1):
                pass
        except KeyboardInterrupt:
            stop.array[:] = 1
            kernel.wait(timeout=30)
        arps, pings, status = out.array.view(np.int64).tolist()
        if status < 0:
            sys.exit(f"the kernel has failed: {rxq.last_error() or txq.last_error()}")
        print(f"{arps} ARP requests and {pings} pings answered on {gpu.name}")


if __name__ == "__main__":
    main()
