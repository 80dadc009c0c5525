"""Times of the connection manager: how messages carry them, and how often a message is sent again."""

from dataclasses import dataclass

from ..arguments import within

_LOG_MILLISECOND = 8  # 4.096 us x 2^8 is taken for 1 ms, as Linux does
_MOST_CODE, _MOST_RETRIES = 31, 15


def seconds(code: int) -> float:
    """Return the seconds that an encoded time means: 4.096 us x 2^code, in whole milliseconds, at least 1."""
    return (1 << max(code - _LOG_MILLISECOND, 0)) / 1000


def ack_timeout(ack_delay: int, packet_life: int) -> int:
    """Return the acknowledge timeout of a queue pair: a little more than both codes (IBTA 12.7.34).

    A packet needs its lifetime to get there and again to be answered, and the peer takes `ack_delay` to answer.
    """
    there_and_back = packet_life + 1
    if there_and_back >= ack_delay:
        code = there_and_back + (ack_delay >= there_and_back - 1)
    else:
        code = ack_delay + (there_and_back >= ack_delay - 1)
    return min(code, _MOST_CODE)


@dataclass(frozen=True, kw_only=True)
class Times:
    """How long this end waits for answers. Linux has the same defaults.

    A message is sent again if no answer comes within `response_timeout` and twice `packet_life`, at most `retries`
    times. The peer learns all three with a REQ, and waits as long for this end. The first two are encoded: 4.096 us x
    2^n. `ack_delay` is what this end takes to acknowledge a packet of the connection.
    """

    response_timeout: int = 20
    packet_life: int = 18
    retries: int = 15
    ack_delay: int = 15

    def __post_init__(self) -> None:
        for name, most in (("response_timeout", _MOST_CODE), ("packet_life", _MOST_CODE - 1),
                           ("retries", _MOST_RETRIES), ("ack_delay", _MOST_CODE)):  # fmt: skip
            within(name, getattr(self, name), 0, most)

    @property
    def resend(self) -> float:
        """Return the seconds after which a REQ without an answer is sent again."""
        return seconds(self.response_timeout) + 2 * seconds(self.packet_life)


LINUX = Times()
