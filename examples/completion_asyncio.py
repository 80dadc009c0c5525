"""Run an echo server and its clients in asyncio: `async for` over completion channels and asynchronous events.

    python examples/completion_asyncio.py

Needs no extra and no GPU.

The server on soft1 receives the messages of all clients in one shared receive queue. When an asynchronous event reports
that few receives are left, it posts new ones. Each client on soft0 has a channel of its own and waits for its replies.
"""

import asyncio

import gpunetio as gn
from gpunetio.verbs import RecvWr, SendWr, Sge

CLIENTS, MESSAGES, SIZE, SECONDS = 3, 10, 64, 20.0
SLOTS, FEW = 16, 8  # receives of the server; when fewer than FEW are left, it posts more


def send(qp: gn.verbs.QP, mr: gn.verbs.MR, slot: int, nbytes: int) -> None:
    sge = Sge(mr.address + slot * SIZE, nbytes, mr.lkey)
    qp.post_send(SendWr(opcode=gn.WrOpcode.SEND, sges=[sge], wr_id=slot))


def receive(queue: gn.verbs.QP | gn.verbs.SRQ, mr: gn.verbs.MR, slot: int) -> None:
    queue.post_recv(RecvWr(sges=[Sge(mr.address + slot * SIZE, SIZE, mr.lkey)], wr_id=slot))


async def completions(channel: gn.verbs.CompChannel):
    """Yield the completions of the channel's CQs as they arrive."""
    async for cq in channel:
        cq.ack_events()
        cq.req_notify()  # before polling, so that later completions cause another event
        while found := cq.poll():
            for completion in found:
                if completion.status != gn.WcStatus.SUCCESS:
                    raise RuntimeError(completion)
                yield completion


class Server:
    """Sends each message back in upper case."""

    def __init__(self, nic: gn.Context):
        self.nic, self.pd, self.channel = nic, nic.create_pd(), nic.create_comp_channel()
        self.buffer = bytearray(SLOTS * SIZE)
        self.mr = self.pd.register(self.buffer)
        self.cq, self.srq = nic.create_cq(64, channel=self.channel), self.pd.create_srq(SLOTS)
        self.cq.req_notify()
        self.queues, self.free = {}, list(range(SLOTS))
        self.refill()

    def accept(self) -> gn.verbs.QP:
        qp = self.pd.create_qp(sq_wr=SLOTS, send_cq=self.cq, receive_cq=self.cq, srq=self.srq)
        self.queues[qp.qpn] = qp
        return qp

    def refill(self) -> None:
        while self.free:
            receive(self.srq, self.mr, self.free.pop())
        self.srq.modify(srq_limit=FEW)  # arms one event

    async def echo(self) -> None:
        async for completion in completions(self.channel):
            if completion.opcode == gn.WcOpcode.SEND:
                self.free.append(completion.wr_id)  # the reply was sent
                continue
            at = completion.wr_id * SIZE
            text = self.buffer[at : at + completion.byte_len]
            self.buffer[at : at + completion.byte_len] = text.upper()
            send(self.queues[completion.qp_num], self.mr, completion.wr_id, completion.byte_len)

    async def watch(self) -> None:
        async for event in self.nic.async_events:
            print(f"server: {event.type.name}, {len(self.free)} receives can be posted")
            event.ack()
            self.refill()


class Client:
    """Sends one message after another. Slot 0 of its buffer holds the request, slot 1 the reply."""

    def __init__(self, number: int, pd: gn.verbs.PD, server: Server):
        self.number, self.buffer, self.channel = number, bytearray(2 * SIZE), pd.ctx.create_comp_channel()
        self.mr, self.cq = pd.register(self.buffer), pd.ctx.create_cq(16, channel=self.channel)
        self.qp = pd.create_qp(sq_wr=4, rq_wr=4, send_cq=self.cq, receive_cq=self.cq)
        self.qp.connect(server.accept())
        self.cq.req_notify()

    async def run(self) -> int:
        """Send all messages, and return how many replies were right."""
        right, arriving = 0, (one async for one in completions(self.channel) if one.opcode == gn.WcOpcode.RECV)
        for i in range(MESSAGES):
            text = f"message {i} of client {self.number}".encode()
            self.buffer[: len(text)] = text
            receive(self.qp, self.mr, 1)
            send(self.qp, self.mr, 0, len(text))
            reply = await anext(arriving)
            right += self.buffer[SIZE : SIZE + reply.byte_len] == text.upper()
        print(f"client {self.number}: {right} replies")
        return right


async def main() -> None:
    with gn.open("soft0") as near, gn.open("soft1") as far:
        server, pd = Server(far), near.create_pd()
        clients = [Client(number, pd, server) for number in range(CLIENTS)]
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
            serving = [group.create_task(server.echo()), group.create_task(server.watch())]
            right = await asyncio.gather(*(client.run() for client in clients))
            for task in serving:
                task.cancel()
    print(f"{sum(right)} right replies of {CLIENTS * MESSAGES}")


if __name__ == "__main__":
    asyncio.run(main())
