"""Handle completions, orders from a socket and asynchronous events in one epoll loop, without a polling thread.

    python examples/completion_epoll.py

Needs no extra and no GPU.

Three queue pairs of soft0 SEND to three of soft1 when an order arrives on a socket. One completion channel serves all
receiving CQs. The last order makes a mistake on purpose, and soft1 reports it as an asynchronous event.
"""

import select
import socket
import sys
import threading
import time

import gpunetio as gn
from gpunetio.verbs import RecvWr, SendWr, Sge

QUEUES, ROUNDS, SIZE, SECONDS = 3, 4, 64, 20.0
MISTAKE = QUEUES  # the order after those of the queues


class Pair:
    """A sender on soft0, and a receiver on soft1. The `context` of the receiver's CQ is this object."""

    def __init__(self, number: int, near: gn.verbs.PD, far: gn.verbs.PD, channel: gn.verbs.CompChannel):
        self.number, self.inbox = number, bytearray(SIZE)
        self.target = far.register(self.inbox)
        self.cq = far.ctx.create_cq(16, channel=channel, context=self)
        self.sender = near.create_qp(sq_wr=16, send_cq=near.ctx.create_cq(16), max_inline_data=SIZE)
        self.receiver = far.create_qp(rq_wr=16, receive_cq=self.cq)
        self.sender.connect(self.receiver)
        self.receive()
        self.cq.req_notify()

    def receive(self) -> None:
        self.receiver.post_recv(RecvWr(sges=[Sge(self.target.address, SIZE, self.target.lkey)]))

    def send(self, text: str) -> None:
        self.sender.send_cq.poll()  # frees the slots of completed sends
        self.sender.post_send(SendWr(opcode=gn.WrOpcode.SEND, inline=text.encode()))

    def mistake(self) -> None:
        """Write to memory that the peer has not registered."""
        self.sender.post_send(SendWr(opcode=gn.WrOpcode.RDMA_WRITE, inline=b"x", remote_addr=0, rkey=0xBAD00))


def give_orders(sock: socket.socket) -> None:
    """Send one byte for each order, the number of the queue that is to send, and then the mistake."""
    for order in [*range(QUEUES)] * ROUNDS + [MISTAKE]:
        sock.send(bytes([order]))
        time.sleep(0.01)


def on_completion(channel: gn.verbs.CompChannel) -> int:
    """Take an event from the channel, poll its CQ until it is empty, and return the number of messages."""
    cq = channel.get_event(timeout=0)
    if cq is None:
        return 0
    cq.ack_events()
    cq.req_notify()  # before polling, so that later completions cause another event
    arrived = 0
    while completions := cq.poll():
        for completion in completions:
            if completion.status == gn.WcStatus.SUCCESS:  # not flushed after the mistake
                pair = cq.context
                print(f"queue {pair.number}: {pair.inbox[: completion.byte_len].decode()}")
                pair.receive()
                arrived += 1
    return arrived


def main() -> None:
    with gn.open("soft0") as near_nic, gn.open("soft1") as far_nic:
        near, far, channel = near_nic.create_pd(), far_nic.create_pd(), far_nic.create_comp_channel()
        pairs = [Pair(number, near, far, channel) for number in range(QUEUES)]
        orders, somebody = socket.socketpair()
        threading.Thread(target=give_orders, args=(somebody,), daemon=True).start()
        poller = select.epoll()
        for fd in (channel.fileno(), orders.fileno(), far_nic.async_events.fd):
            poller.register(fd, select.EPOLLIN)
        sent, arrived, failure, end = 0, 0, None, time.monotonic() + SECONDS
        while arrived < QUEUES * ROUNDS or failure is None:
            if time.monotonic() > end:
                sys.exit(f"gave up after {SECONDS:g} s: {arrived} messages, asynchronous event {failure}")
            for fd, _ in poller.poll(timeout=1.0):
                if fd == channel.fileno():
                    arrived += on_completion(channel)
                elif fd == orders.fileno():
                    (order,) = orders.recv(1)
                    if order == MISTAKE:
                        pairs[0].mistake()
                    else:
                        pairs[order].send(f"message {sent}")
                        sent += 1
                elif event := far_nic.async_events.get(timeout=0):
                    failure = event.type.name
                    print(f"{event.element}: {failure}")
                    event.ack()
        for each in (poller, orders, somebody):
            each.close()
    print(f"{arrived} messages on {QUEUES} queues, then {failure}")


if __name__ == "__main__":
    main()
