"""The flow pipes of the application: which packets reach which queue."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from ..eth import CyclicRxq, EthRxq
from ..flow import DROP, PER_ENTRY, FlowPipe, FlowPort, PipeType, Rss, TcpFlag, match
from ..verbs import Context

_UDP, _TCP_TO_CPU, _TO_GPU = 0, 1, 3  # priorities in the root pipe, the lowest first


class Steering:
    """The pipes of a port. `undo` closes them.

    The root pipe leads UDP, TCP and ICMP over IPv4 to pipes of their own. Everything else, such as ARP, stays with the
    port. With queues of the CPU, which serve HTTP, `connections` is the pipe for the rules of connections; TCP packets
    that begin or end a connection, and those without a rule, go to the CPU.
    """

    connections: FlowPipe | None
    port: FlowPort

    def __init__(
        self, ctx: Context, udp: Sequence[CyclicRxq], tcp: Sequence[CyclicRxq], icmp: CyclicRxq,
        cpu: Sequence[EthRxq], undo: ExitStack,
    ):
        port = undo.enter_context(FlowPort(ctx))
        self.port, self.connections = port, None
        all_udp, all_tcp, all_icmp = (match.ipv4() & what for what in (match.udp(), match.tcp(), match.icmp()))
        udp_pipe = port.create_pipe("GPU_RXQ_UDP_PIPE", match=all_udp, to=Rss(udp), miss=DROP)
        udp_pipe.add()
        icmp_pipe = port.create_pipe("GPU_RXQ_ICMP_PIPE", match=all_icmp, to=icmp, miss=DROP)
        icmp_pipe.add()
        cpu_pipe = None
        if cpu:
            cpu_pipe = port.create_pipe("CPU_RXQ_TCP_PIPE", match=all_tcp, to=Rss(cpu), miss=DROP)
            cpu_pipe.add()
            connection = match.ipv4(src=PER_ENTRY, dst=PER_ENTRY) & match.tcp(src=PER_ENTRY, dst=PER_ENTRY)
            tcp_pipe = port.create_pipe("GPU_RXQ_TCP_PIPE", match=connection, to=Rss(tcp), miss=cpu_pipe)
            self.connections = tcp_pipe
        else:
            tcp_pipe = port.create_pipe("GPU_RXQ_TCP_PIPE", match=all_tcp, to=Rss(tcp), miss=DROP)
            tcp_pipe.add()
        root = port.create_pipe("ROOT_PIPE", PipeType.CONTROL, root=True)
        root.add(all_udp, udp_pipe, priority=_UDP)
        if cpu_pipe is not None:
            for flag in (TcpFlag.SYN, TcpFlag.RST, TcpFlag.FIN):
                root.add(match.ipv4() & match.tcp(flags=flag), cpu_pipe, priority=_TCP_TO_CPU)
        root.add(all_icmp, icmp_pipe, priority=_TO_GPU)
        root.add(all_tcp, tcp_pipe, priority=_TO_GPU)
