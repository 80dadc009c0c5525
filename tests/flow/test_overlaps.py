"""Rules of one priority that contradict each other are refused, and no others, whatever came and went before."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flow_port_rig import steered
from gpunetio.errors import InvalidValueError
from gpunetio.flow import match


@pytest.fixture(scope="module")
def flows():
    with steered() as flows:
        yield flows


def test_a_wide_rule_after_one_of_two_narrow_ones_is_gone(flows):
    """The two have one mask and other destinations, so the wide one agrees with one of them at most."""
    one, two = flows.rq(), flows.rq()
    first = flows.port.steer(match.udp(dst=53), to=one)
    second = flows.port.steer(match.udp(dst=54), to=two)
    for queue, name in ((one, "dst=54"), (two, "dst=53")):
        with pytest.raises(InvalidValueError, match=name):
            flows.port.steer(match.udp(), to=queue)
    first.close()
    with pytest.raises(InvalidValueError, match="dst=54"):
        flows.port.steer(match.udp(), to=one)
    with flows.port.steer(match.udp(), to=two) as wide:
        second.close()
        with pytest.raises(InvalidValueError, match=r"overlaps with rule udp\(\)"):
            flows.port.steer(match.udp(dst=53), to=one)
        with flows.port.steer(match.udp(dst=53), to=two):
            assert wide.match
    flows.port.steer(match.udp(), to=one).close()


FIELDS = [
    lambda n: match.udp(dst=n), lambda n: match.udp(src=n), lambda n: match.udp(dst=n, src=3 - n),
    lambda n: match.udp(), lambda n: match.udp(dst=(n & 1, 1)), lambda n: match.udp(dst=(n & 2, 2)),
    lambda n: match.everything(), lambda n: match.ipv4(ttl=n) & match.udp(),
    lambda n: match.ipv6(hop_limit=n) & match.udp(dst=n),
]


@given(st.integers(0, 1 << 32))
def test_random_rules(flows, seed):
    """Two masked values have a packet in common if they agree where both compare."""
    rng, queues, held = random.Random(seed), [flows.rq(), flows.rq()], {}
    try:
        for _ in range(40):
            if held and rng.random() < 0.4:
                held.pop(rng.choice(list(held))).close()
                continue
            found, to = rng.choice(FIELDS)(rng.randrange(4)), rng.randrange(2)
            same = [(other, at) for other, at in held if not (other.value ^ found.value) & other.mask & found.mask]
            refused = any(at != to or (other.mask, other.value) == (found.mask, found.value) for other, at in same)
            try:
                rule = flows.port.steer(found, to=queues[to])
            except InvalidValueError:
                assert refused, f"{found} was refused"
            else:
                held[found, to] = rule
                assert not refused, f"{found} contradicts another rule"
    finally:
        for rule in held.values():
            rule.close()
        for queue in queues:
            queue.close()
