"""A process that connects, or accepts a connection, and may be killed at a step on the way: `cm_child.py ROLE STEP`.

It prints each step that it has reached. At STEP, it kills itself when its messages have been sent. With "never", it
continues to the end.
"""

import os
import signal
import sys

from cm_sent import wait_until_sent
from gpunetio import cm, verbs
from gpunetio.enums import QpType

PORT = 7174
PATIENCE = 60.0
TIMES = cm.Times(response_timeout=17, packet_life=8, retries=2)  # a dead peer is given up after 1.5 s


def main(role: str, last: str) -> None:
    with verbs.open("soft1") as ctx:

        def reached(step: str) -> None:
            print(step, flush=True)
            if step == last:
                wait_until_sent(ctx, PATIENCE)
                os.kill(os.getpid(), signal.SIGKILL)

        cq = ctx.create_cq(16)
        qp = ctx.create_pd().create_qp(qp_type=QpType.RC, sq_wr=4, rq_wr=4, send_cq=cq, receive_cq=cq)
        if role == "server":
            with cm.listen(ctx, PORT, times=TIMES) as listener:
                reached("listening")
                request = listener.accept(PATIENCE)
                reached("asked")
                connection = request.accept(qp)
                reached("accepted")
        else:
            connection = cm.start_connecting(qp, "127.0.0.1", PORT, times=TIMES)
            reached("asking")
        connection.established(PATIENCE)
        reached("established")
        if role == "server":
            connection.disconnected(PATIENCE)
        else:
            connection.start_disconnecting()
            reached("disconnecting")
            connection.disconnected(PATIENCE)
        connection.close()
        reached("closed")


if __name__ == "__main__":
    main(*sys.argv[1:])
