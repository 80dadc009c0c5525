"""A kernel is a load balancer: it spreads clients of a UDP or TCP service over back ends, by NAT, until Ctrl+C.

    python examples/balance_load.py tap:balance 10.9.0.1 8080 10.9.0.2=02:00:00:00:00:02 10.9.0.3=02:00:00:00:00:03

Clients talk to port 8080 of 10.9.0.1. The balancer gives each client a port of its own, under which a back end sees it.
There are 32768 such ports. A new client that finds none free takes the port of a client that has been silent for long.
If that client sends again, it gets another port, and perhaps another back end, which resets its TCP connection.
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

BURST, TURN_NS, FIRST_PORT, CLIENTS, WINDOW = 64, 1_000_000, 1 << 15, 1 << 15, 8
ADDRESS, MAC, USED, ROW = 0, 8, 16, 24  # a row of the table: offsets of its words, and its size; of back ends, too


@dev.device_function
def row_of(table, client):
    """Return the number of a client's row. A new client gets the row of a small window that was unused for longest."""
    start = ((client >> 16) * 0x2545_F491 ^ client * 0x1B87) >> 8
    number = start & CLIENTS - 1
    for i in range(WINDOW):
        other = start + i & CLIENTS - 1
        if dev.ld64(table + ROW * other + ADDRESS) == client:
            return other
        if dev.ld64(table + ROW * other + USED) < dev.ld64(table + ROW * number + USED):
            number = other
    dev.st64(table + ROW * number + ADDRESS, client)
    return number


@dev.device_function
def translate(packet, nbytes, address, service, table, ends, backends):
    """Rewrite a packet of a client or a back end. Return the MAC that it goes to, or 0 to drop it."""
    protocol, l3, l4, length = headers.l4_of(packet, nbytes)
    if length < headers.UDP.size or headers.spend_hop(l3) <= 0:
        return 0
    ip, ports = headers.ipv4_at(l3), headers.udp_at(l4)  # the ports of TCP are in the same place
    number = ports.destination_port - FIRST_PORT
    if number >= 0 and ip.source == dev.ld64(ends + ROW * (number % backends) + ADDRESS):  # from a back end
        row = table + ROW * number
        client = dev.ld64(row + ADDRESS)
        headers.set_source(l3, protocol, l4, address, service)
        headers.set_destination(l3, protocol, l4, client >> 16, client & 0xFFFF)
        to = dev.ld64(row + MAC)
    elif ports.destination_port == service:  # from a client
        number = row_of(table, ip.source << 16 | ports.source_port)
        row, end = table + ROW * number, ends + ROW * (number % backends)
        dev.st64(row + MAC, headers.ethernet_at(packet).source)
        headers.set_source(l3, protocol, l4, address, FIRST_PORT + number)
        headers.set_destination(l3, protocol, l4, dev.ld64(end + ADDRESS), service)
        to = dev.ld64(end + MAC)
    else:
        return 0
    dev.st64(row + USED, dev.clock_ns())
    return to


@gn.kernel
def balance(rxq, txq, address, service, table, ends, backends, attrs, stop):
    status = dev.OK
    while status >= 0 and dev.ld_relaxed64(stop) == 0:
        count = dev.rxq_recv(rxq, BURST, TURN_NS, attrs, dev.THREAD, 1)
        first, sent = dev.rxq_first(rxq), 0
        for i in range(count):
            packet = dev.rxq_packet(rxq, first + i)
            nbytes = dev.attr_at(attrs + i * dev.ATTR_BYTES).bytes
            to = translate(packet, nbytes, address, service, table, ends, backends)
            if to != 0:
                ethernet = headers.ethernet_at(packet)
                ethernet.source, ethernet.destination = ethernet.destination, to
                status = min(status, dev.txq_send(txq, packet, dev.rxq_lkey(rxq), nbytes, 1))
                sent += status >= 0
        status = min(status, count, dev.txq_poll(txq, sent))  # waits until all of them have left
        dev.rxq_give_back(rxq, first + count)


def back_end(text: str) -> tuple[int, int, int]:
    """Return a row of the table of back ends."""
    address, mac = text.split("=")
    if len(mac) != len("02:00:00:00:00:02"):
        raise ValueError(mac)
    return int(ipaddress.IPv4Address(address)), int(mac.replace(":", ""), 16), 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Spread clients over back ends.")
    parser.add_argument("wire", help="for example tap:balance")
    parser.add_argument("address", type=ipaddress.IPv4Address, help="where clients find the service")
    parser.add_argument("port", type=int, help="its UDP or TCP port")
    parser.add_argument("backends", type=back_end, nargs="+", metavar="backend", help="ADDRESS=MAC")
    given = parser.parse_args()
    port = gn.PortConfig(addresses=str(given.address), wire=given.wire)  # the NIC answers ARP for its address
    with gn.open("soft0", port=port) as ctx, gn.Gpu() as gpu, flow.FlowPort(ctx) as rules:
        pd = ctx.create_pd()
        rxq, txq = eth.CyclicRxq(gpu, pd, max_burst=4096, max_packet=2048), eth.EthTxq(gpu, pd, 1024)
        for protocol in match.udp, match.tcp:
            for end in protocol(dst=given.port), protocol(src=given.port):
                rules.steer(match.ipv4(dst=given.address) & end, to=rxq)
        table, ends = gpu.alloc(CLIENTS * ROW), gpu.alloc(len(given.backends) * ROW)
        ends.write(np.array(given.backends))
        attrs, stop = gpu.alloc(BURST * dev.ATTR_BYTES), gpu.alloc(8, gn.MemType.CPU_GPU)
        where = int(given.address), given.port, table, ends, len(given.backends)
        kernel = balance[1, 1, gpu](rxq, txq, *where, attrs, stop)
        print(f"{given.address} leads to {len(given.backends)} back ends, on {gpu.name}. Ctrl+C ends it", flush=True)
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
