"""Flow ports of cards: DEVX tables that a rule of the kernel leads to, by the stand-in for rdma-core's libraries."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import ARP, Ether

from flow_port_rig import Setup, left_over
from gpunetio import verbs
from gpunetio.errors import DocaError, NotPermittedError
from gpunetio.flow import DROP, KERNEL, PER_ENTRY, FlowPort, PipeType, match
from gpunetio.nic.state.flow import Fate
from stand_in import StandIn, nics_of_cards

UDP_FRAME, ARP_FRAME = bytes(Ether() / IP(dst="1.2.3.4") / UDP(dport=53)), bytes(Ether() / ARP())
CREATED = (
    "mlx5dv_create_flow_matcher", "mlx5dv_create_flow", "mlx5dv_create_steering_anchor", "mlx5dv_devx_obj_create",
)


@pytest.fixture
def card(stand_in: StandIn) -> Iterator[StandIn]:
    with nics_of_cards(stand_in):
        yield stand_in


@contextmanager
def steered(isolated: bool = True) -> Iterator[Setup]:
    with verbs.open("mlx5_0") as ctx, FlowPort(ctx, isolated=isolated) as port:
        yield Setup(ctx, port)


def test_rules_on_a_card(card):
    with steered() as flows:
        queues = [flows.rq(), flows.rq()]
        rule = flows.port.steer(match.udp(dst=53), to=queues[0], tag=3)
        assert flows.met([UDP_FRAME, ARP_FRAME]) == [(Fate.TIR, queues[0].number, 3), (Fate.MISS, 0, 0)]
        assert rule.counter == (1, len(UDP_FRAME))
        rule.close()
        flows.port.steer(match.udp(dst=53), to=queues)
        assert flows.met([UDP_FRAME])[0][0] == Fate.TIR
        flows.port.steer(match.eth(ether_type=0x0806), to=KERNEL)
        leaf = flows.port.create_pipe("leaf", match=match.ipv4(dst=PER_ENTRY), to=DROP, miss=KERNEL)
        leaf.add(match.ipv4(dst="1.2.3.4"))
        root = flows.port.create_pipe("root", PipeType.CONTROL, root=True)
        root.add(match.ipv4(), leaf, priority=4)
        root.update_miss(DROP)
        assert flows.met([bytes(Ether() / IP(dst="1.2.3.4")), bytes(Ether() / IP(dst="1.2.3.5")), ARP_FRAME]) == [
            (Fate.DROP, 0, 0), (Fate.MISS, 0, 0), (Fate.MISS, 0, 0)
        ]
        nic = card.nic("mlx5_0")
        assert nic.control.flow_tables.root
    assert {name: card.calls[name] for name in CREATED[:3]} == dict.fromkeys(CREATED[:3], 1)
    destroyed = "ibv_destroy_flow", "mlx5dv_destroy_flow_matcher", "mlx5dv_destroy_steering_anchor"
    assert [card.calls[name] for name in destroyed] == [1, 1, 1]


def test_closing_the_context_of_a_card(card):
    with verbs.open("mlx5_0") as ctx:
        port = FlowPort(ctx, isolated=False)
        flows = Setup(ctx, port)
        port.steer(match.udp(), to=[flows.rq(), flows.rq()])
        assert flows.met([ARP_FRAME]) == [(Fate.DROP, 0, 0)]
    assert port.closed


@pytest.mark.parametrize("function", CREATED)
def test_nothing_stays_when_a_card_refuses(card, function):
    words = "ALLOC_FLOW_COUNTER" if function == "mlx5dv_devx_obj_create" else function
    with verbs.open("mlx5_0") as ctx:
        card.fail(function, errno.EPERM)
        with pytest.raises(DocaError, match=words) as refused:
            FlowPort(ctx)
        if function != "mlx5dv_devx_obj_create":
            assert isinstance(refused.value, NotPermittedError)
            assert "CAP_NET_RAW" in str(refused.value)
        assert left_over(ctx) == ([], 0, 0, 0)
        FlowPort(ctx).close()
        assert left_over(ctx) == ([], 0, 0, 0)
