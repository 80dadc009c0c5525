"""Packets between kernels: one sends from soft0, another sees on soft1 what a flow rule leads to it.

    python examples/see_packets.py

Needs no extra. If there is a GPU, it runs there with `pip install -e '.[cuda]'`.
"""

import struct
import sys

import numpy as np

import gpunetio as gn
from gpunetio import device as dev
from gpunetio import eth, flow
from gpunetio.flow import match
from gpunetio.formats.eth_device import PACKET_ATTR

PACKETS, SLOT = 5, 128  # bytes of a packet that the kernel shows
TURNS, TURN_NS = 10_000, 1_000_000  # of waiting
HEADERS = 42


def udp(payload: bytes, port: int) -> bytes:
    """Return a frame from 192.0.2.1 to 192.0.2.2. The NIC fills in the checksums."""
    ethernet = bytes.fromhex("020000000002 020000000001 0800")
    length = 28 + len(payload)
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, length, 0, 0, 64, 17, 0, bytes([192, 0, 2, 1]), bytes([192, 0, 2, 2]))
    return ethernet + ip + struct.pack("!HHHH", 40000, port, length - 20, 0) + payload


@gn.kernel
def send(txq, address, lkey, nbytes, count, out):
    ticket = 0
    for i in range(count):
        ticket = dev.txq_send(txq, address + i * nbytes, lkey, nbytes, i == count - 1)
    dev.st64(out, dev.txq_wait(txq, ticket))


@gn.kernel
def see(rxq, wanted, attrs, copies, out):
    seen = 0
    for _ in range(TURNS):
        count = dev.rxq_recv(rxq, wanted - seen, TURN_NS, attrs + seen * dev.ATTR_BYTES)
        if count < 0:
            seen = count
            break
        first = dev.rxq_first(rxq)
        for i in range(count):
            dev.copy(copies + seen * SLOT, dev.rxq_packet(rxq, first + i), SLOT)
            seen += 1
        if seen == wanted:
            break
    dev.st64(out, seen)


def main() -> None:
    with gn.open("soft0") as near, gn.open("soft1") as far, gn.Gpu() as gpu, flow.FlowPort(far) as port:
        rxq = eth.CyclicRxq(gpu, far.create_pd(), max_burst=1024, max_packet=2048)
        port.steer(match.udp(dst=53), to=rxq)

        pd = near.create_pd()
        txq = eth.EthTxq(gpu, pd, 1024, checksum=True)
        frames = [udp(f"question {i}".encode(), 53) for i in range(PACKETS)]
        memory = gpu.alloc(len(frames[0]) * PACKETS)
        memory.write(np.frombuffer(b"".join(frames), np.uint8))
        region = pd.register(memory)

        attrs, copies = (gpu.alloc(PACKETS * size, gn.MemType.CPU_GPU) for size in (dev.ATTR_BYTES, SLOT))
        sent, seen = gpu.alloc(8, gn.MemType.CPU_GPU), gpu.alloc(8, gn.MemType.CPU_GPU)
        sender = send[1, 1, gpu](txq, memory, region.lkey, len(frames[0]), PACKETS, sent)
        receiver = see[1, 1, gpu](rxq, PACKETS, attrs, copies, seen)  # the packets wait for it in the queue
        if not (sender.wait(timeout=60) and receiver.wait(timeout=60)):
            sys.exit("a kernel did not end")

        count = int(seen.array.view(np.int64)[0])
        for attr, packet in zip(attrs.array.view(PACKET_ATTR.dtype)[: max(count, 0)], copies.array.reshape(-1, SLOT)):
            payload = packet[HEADERS : attr["bytes"]].tobytes()
            print(f"{attr['bytes']} bytes from {'.'.join(map(str, packet[26:30]))}: {payload.decode()}")
        print(f"{count} of {PACKETS} packets seen on {gpu.name}")
        region.close()


if __name__ == "__main__":
    main()
