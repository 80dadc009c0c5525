"""A kernel answers UDP packets from where they lie, without the CPU; another one asks and counts the answers.

    python examples/answer_packets.py

Needs no extra. If there is a GPU, it runs there with `pip install -e '.[cuda]'`.
"""

import sys

import numpy as np
from see_packets import udp

import gpunetio as gn
from gpunetio import device as dev
from gpunetio import eth, flow
from gpunetio.eth import headers
from gpunetio.flow import match

PORT, QUESTIONS, BURST = 7, 1000, 64  # UDP's echo service (RFC 862)
TURN_NS, PATIENCE_NS = 1_000_000, 20_000_000_000


@dev.device_function
def turn_round(packet):
    headers.swap_macs(packet)
    headers.swap_addresses(packet + 14)
    headers.swap_ports(packet + 34)


@gn.kernel
def answer(rxq, txq, attrs, stop, out):
    lkey = dev.rxq_lkey(rxq)
    answered = 0
    status = dev.OK
    while status >= 0 and dev.ld_relaxed64(stop) == 0:
        count = dev.rxq_recv(rxq, BURST, TURN_NS, attrs, dev.THREAD, 1)
        status = min(count, 0)
        if count <= 0:
            continue
        first = dev.rxq_first(rxq)
        ticket = 0
        for i in range(count):
            packet = dev.rxq_packet(rxq, first + i)
            turn_round(packet)
            nbytes = dev.attr_at(attrs + i * dev.ATTR_BYTES).bytes
            ticket = dev.txq_send(txq, packet, lkey, nbytes, i == count - 1)
        status = dev.txq_wait(txq, ticket)
        dev.rxq_give_back(rxq, first + count)
        answered += count
    dev.st64(out, answered if status >= 0 else status)


@gn.kernel
def ask(rxq, txq, address, lkey, nbytes, questions, out):
    answers = 0
    for _ in range(questions):
        status = dev.txq_wait(txq, dev.txq_send(txq, address, lkey, nbytes, 1))
        if status >= 0:
            status = dev.rxq_recv(rxq, 1, PATIENCE_NS)
        if status <= 0:
            break
        answers += status
    dev.st64(out, answers)


def main() -> None:
    with (
        gn.open("soft0") as near, gn.open("soft1") as far, gn.Gpu() as gpu,
        flow.FlowPort(near) as here, flow.FlowPort(far) as there,
    ):
        pds = near.create_pd(), far.create_pd()
        rxqs = [eth.CyclicRxq(gpu, pd, max_burst=1024, max_packet=2048) for pd in pds]
        txqs = [eth.EthTxq(gpu, pd, 1024, checksum=True) for pd in pds]
        here.steer(match.udp(src=PORT), to=rxqs[0])
        there.steer(match.udp(dst=PORT), to=rxqs[1])

        question = udp(b"are you there?", PORT)
        memory = gpu.alloc(len(question))
        memory.write(np.frombuffer(question, np.uint8))
        region = pds[0].register(memory)

        attrs = gpu.alloc(BURST * dev.ATTR_BYTES)
        stop, answered, answers = (gpu.alloc(8, gn.MemType.CPU_GPU) for _ in range(3))
        # A GPU may load a kernel only when none runs, and `answer` runs on: `ask` is loaded before, by asking nothing.
        asked = rxqs[0], txqs[0], memory, region.lkey, len(question)
        loaded = ask[1, 1, gpu](*asked, 0, answers).wait(timeout=60)
        server = answer[1, 1, gpu](rxqs[1], txqs[1], attrs, stop, answered)
        client = ask[1, 1, gpu](*asked, QUESTIONS, answers)
        ended = client.wait(timeout=60)
        stop.array[:] = 1
        if not (loaded and server.wait(timeout=60) and ended):
            sys.exit("a kernel did not end")
        print(f"{int(answers.array.view(np.int64)[0])} answers to {QUESTIONS} questions on {gpu.name}")
        region.close()


if __name__ == "__main__":
    main()
