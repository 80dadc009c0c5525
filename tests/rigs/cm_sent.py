"""Wait until the messages of a connection manager have been sent."""

from typing import Any

from gpunetio.cm.agent import Agent
from gpunetio.verbs import Context


def wait_until_sent(ctx: Context, timeout: float) -> None:
    """Wait until none waits for the way to its peer, and none is on its way to the wire."""
    agent = Agent.of(ctx)
    side: Any = agent._side

    def sent() -> bool:
        return not side._ways._searches and not side._services.in_flight()

    agent.wait(lambda: sent() or None, timeout, "the end of sending")
