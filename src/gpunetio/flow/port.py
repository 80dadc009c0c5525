"""Flow steering on a device's port (`doca_flow_port`)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from ..arguments import instance
from ..errors import InUseError, InvalidValueError, NotSupportedError
from ..formats.commands import CapClass, Opcode
from ..formats.contexts import CMD_HCA_CAP
from ..formats.flow import FLOW_TABLE_NIC_CAP, DestinationType
from ..formats.layout import Fields
from ..verbs import Context, DevxObject
from ..verbs.device_attr import query_cap
from .counters import Counters
from .entry import Forward
from .matching import Match
from .pipe import FlowPipe, FlowRule, PipeType, Port
from .targets import DROP, KERNEL, Rss, Spreads, Stage, Target, To

RULES = "rules"  # the pipe that `FlowPort.steer` fills
_TOP_LEVEL, _LOG_SIZE = 63, 16  # upper limits; a card may have more levels and larger tables


class FlowPort(Port):
    """Steers the packets of a device's port with rules (`doca_flow_port_start`). A device has one such port.

    With `isolated`, packets that no rule takes are handled as if there were no rules, by RoCE and the machine's kernel;
    otherwise they are dropped. Closing the port closes its rules and pipes, and the kernel gets all packets again.

    NotSupportedError on a device without DEVX or flow tables, InUseError if the device already has an open port.
    """

    _rank = -1  # a context closes rules before the queues that they use
    _closes_users = True
    rules: FlowPipe
    isolated: bool

    def __init__(self, ctx: Context, *, isolated: bool = True):
        super().__init__(instance("ctx", ctx, Context))
        self.lock = threading.RLock()  # a program's threads may add and remove rules concurrently
        self.isolated = bool(isolated)
        has = _properties(ctx)
        self.top_level: int = min(_TOP_LEVEL, has["max_ft_level"])
        self.log_size: int = min(_LOG_SIZE, has["log_max_ft_size"])
        self._root: FlowPipe | None = None
        self._attached = ExitStack()
        with ExitStack() as undo:
            self._use(ctx)
            provider = ctx.provider
            path, self._kernel = provider.open_kernel_path()
            undo.callback(provider.close_kernel_path, path)
            in_bulks = query_cap(provider, CapClass.GENERAL, CMD_HCA_CAP)["flow_counter_bulk_alloc"]
            self.counters = Counters(ctx, bool(in_bulks & 1), undo)
            self._spreads = Spreads(ctx, self.top_level)
            self._opened(f"flow port of {ctx.name}", undo)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """Start sending packets to the port's own rules first."""
        self.rules = FlowPipe(self, RULES, PipeType.CONTROL, None, None, None)
        attached = self.ctx.provider.attach_flow_table(self.rules.entrance)
        self._attached.callback(self.ctx.provider.detach_flow_table, attached)

    def _details(self) -> Iterable[str]:
        if self.isolated:
            yield "isolated"

    @property
    def default_miss(self) -> To:
        return KERNEL if self.isolated else DROP

    # --- rules -------------------------------------------------------------------------------------------------------

    def steer(self, match: Match, to: To, *, priority: int = 0, tag: int = 0, count: bool = True) -> FlowRule:
        """Send matching packets to a queue, to several, to a pipe, or to DROP or KERNEL. Return the rule.

            with port.steer(match.udp(dst=53), to=rxq) as rule:
                ...
                print(rule.counter.packets)

        Of the rules that match a packet, the one with the lowest `priority` decides. Two rules of the same priority may
        match the same packet only if they have the same destination and tag. Packets that no rule takes go to the root
        pipe, if there is one. `tag`, 24 bits, is the flow tag in completions. InvalidValueError for a match that
        contradicts another rule, FullError if there is no room. On failure, nothing is left behind.
        """
        self.check_open()
        return self.rules.add(match, to, priority=priority, tag=tag, count=count)

    def create_pipe(
        self, name: str, kind: PipeType = PipeType.BASIC, *, match: Match | None = None, to: To | None = None,
        miss: To | None = None, root: bool = False,
    ) -> FlowPipe:
        """Create a pipe (`doca_flow_pipe_create`).

        `match` is what a BASIC pipe compares, with PER_ENTRY where its rules give values. `to` is the default
        destination of its rules. `miss` is the destination of packets that match no rule: by default KERNEL if the port
        is isolated, else DROP. With `root`, packets that the port's own rules do not take enter this pipe.
        """
        with self.lock:
            self.check_open()
            if root and self._root is not None:
                raise InUseError(f"{self} has a root pipe already, {self._root}: close it first")
            pipe = FlowPipe(self, name, kind, match, to, miss)
            if root:
                try:
                    self.rules.update_miss(pipe)
                except BaseException:
                    pipe.close()
                    raise
                self._root = pipe
            return pipe

    def leave_root(self, pipe: FlowPipe) -> None:
        self.rules.update_miss(self.default_miss)
        self._root = None

    def target(self, to: To) -> Target:
        if to is DROP:
            return Target("DROP", None)
        if to is KERNEL:
            return Target("KERNEL", Forward(DestinationType.FLOW_TABLE, self._kernel))
        if isinstance(to, Stage):
            if to.port is not self:
                raise InvalidValueError(f"to = {to}: it belongs to {to.port}, not to {self}")
            to.check_open()
            return Target(str(to), Forward(DestinationType.FLOW_TABLE, to.number), (to,))
        if isinstance(to, DevxObject) and to.name == Opcode.CREATE_TIR.name:
            to.check_open()
            return Target(str(to), Forward(DestinationType.TIR, to.number), (to,))
        if isinstance(to, Rss):
            return self._spreads.to(to)
        return self._spreads.to(Rss(to if isinstance(to, Sequence) else (to,)))

    # --- closing -----------------------------------------------------------------------------------------------------

    def close_with_owner(self) -> None:
        """Close rules and pipes. All packets go to the kernel before the first rule is removed."""
        with self.lock, ExitStack() as steps:
            steps.callback(super().close_with_owner)
            for pipe in self.users:
                if isinstance(pipe, FlowPipe) and pipe.leads_on:
                    steps.callback(pipe.update_miss, DROP)  # so that pipes can close in any order
            steps.callback(self._attached.close)


def _properties(ctx: Context) -> Fields:
    """Return the properties of the device's flow tables for received packets. NotSupportedError without them."""
    _ = ctx.devx  # raises an error that says why there is no DEVX
    if not query_cap(ctx.provider, CapClass.GENERAL, CMD_HCA_CAP)["nic_flow_table"]:
        raise NotSupportedError(
            f"{ctx} has no flow tables: it does not announce them (they need an Ethernet port; a software NIC has them "
            "on wires that carry Ethernet frames)"
        )
    has = query_cap(ctx.provider, CapClass.FLOW_TABLE, FLOW_TABLE_NIC_CAP)["flow_table_properties_nic_receive"]
    if not has["ft_support"] or not has["ignore_flow_level"]:
        raise NotSupportedError(
            f"{ctx} has no flow tables for users: ft_support {has['ft_support']}, ignore_flow_level "
            f"{has['ignore_flow_level']}; both must be 1"
        )
    return has
