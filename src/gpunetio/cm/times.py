"""Timeouts of the connection manager: their encoding in messages, and the intervals of resending."""

from dataclasses import dataclass

from ..arguments import within

_LOG_MILLISECOND = 8  # 4.096 us x 2^8 counts as 1 ms, as in Linux
_MOST_CODE, _MOST_RETRIES = 31, 15


def seconds(code: int) -> float:
    """Decode a time, 4.096 µs x 2^code, to seconds: whole milliseconds, at least 1."""
    return (1 << max(code - _LOG_MILLISECOND, 0)) / 1000


def ack_timeout(ack_delay: int, packet_life: int) -> int:
    """Return the encoded acknowledge timeout of a queue pair: a little more than both times together (IBTA 12.7.34).

    A packet and its acknowledgement each need `packet_life` on the way, and the peer takes `ack_delay` to answer.
    """
    there_and_back = packet_life + 1
    if there_and_back >= ack_delay:
        code = there_and_back + (ack_delay >= there_and_back - 1)
    else:
        code = ack_delay + (there_and_back >= ack_delay - 1)
    return min(code, _MOST_CODE)


@dataclass(frozen=True, kw_only=True)
class Times:
    """How long this end waits for answers. The defaults are those of Linux.

    Without an answer within `response_timeout` plus twice `packet_life`, a message is resent, at most `retries` times.
    A REQ tells the peer `response_timeout` and `retries`, which the peer then uses for this end. Times are encoded as
    4.096 µs x 2^n. `ack_delay` is how long this end takes to acknowledge a packet of the connection.
    """

    response_timeout: int = 20
    packet_life: int = 18
    retries: int = 15
    ack_delay: int = 15

    def __post_init__(self) -> None:
        for name, most in (("response_timeout", _MOST_CODE), ("packet_life", _MOST_CODE - 1),
                           ("retries", _MOST_RETRIES), ("ack_delay", _MOST_CODE)):
            within(name, getattr(self, name), 0, most)

    @property
    def resend(self) -> float:
        """Return the seconds after which an unanswered REQ is resent."""
        return seconds(self.response_timeout) + 2 * seconds(self.packet_life)


LINUX = Times()
