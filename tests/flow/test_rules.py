"""Rules of a flow port on the software NIC: frames of scapy's that meet them, and what is refused or goes away."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import ARP, Dot1Q, Ether

from ethernet_rig import nic_of
from flow_port_rig import Setup, left_over, steered
from gpunetio import PortConfig, verbs
from gpunetio.enums import LinkLayer
from gpunetio.errors import BadStateError, DriverError, FullError, InUseError, InvalidValueError, NotSupportedError
from gpunetio.flow import DROP, KERNEL, FlowPipe, FlowPort, PipeType, Rss, TcpFlag, match
from gpunetio.flow import port as port_module
from gpunetio.formats.commands import Opcode
from gpunetio.nic.state.flow import Fate
from steering_kernels import Frames, steer_and_serve
from steering_model import toeplitz
from virtual_nics import stop_engine

L2 = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
MISS, DROPPED = (Fate.MISS, 0, 0), (Fate.DROP, 0, 0)


@pytest.fixture
def flows():
    with steered() as flows:
        yield flows


@pytest.fixture
def flows_of_one_worker():
    with steered(workers=1) as flows:
        yield flows


def udp(dst: int, **ip: object) -> bytes:
    return bytes(L2 / IP(**ip) / UDP(dport=dst) / b"payload")


def taken(rq: verbs.DevxObject, tag: int = 0) -> tuple[Fate, int, int]:
    return Fate.TIR, rq.number, tag


def test_rules_lead_packets_and_count_them(flows):
    first, second = flows.rq(), flows.rq()
    port = flows.port
    frames = [udp(53), udp(53, src="10.1.1.1"), udp(54), bytes(L2 / ARP()), bytes(L2 / IP() / TCP(dport=53))]
    assert flows.met(frames) == [MISS] * 5
    with port.steer(match.udp(dst=53), to=first) as dns:
        ten = port.steer(match.ipv4(src="10.0.0.0/8"), to=second, priority=1, tag=9)
        assert flows.met(frames) == [taken(first), taken(first), MISS, MISS, MISS]
        port.steer(match.everything(), to=DROP, priority=60)
        assert flows.met([*frames, udp(7, src="10.9.9.9")]) == [
            taken(first), taken(first), DROPPED, DROPPED, DROPPED, taken(second, 9)
        ]
        kernel = port.steer(match.eth(ether_type=0x0806), to=KERNEL)
        assert flows.met([frames[3]]) == [MISS]
        assert dns.counter == (4, 2 * (len(frames[0]) + len(frames[1])))
        assert (ten.counter.packets, kernel.counter.packets) == (1, 1)
    assert flows.met(frames) == [DROPPED, taken(second, 9), DROPPED, MISS, DROPPED]


def test_names(flows):
    rule = flows.port.steer(match.udp(dst=53), DROP, priority=3)
    assert repr(rule) == "<rule udp(dst=53) → DROP, priority 3, of pipe rules>"
    assert repr(flows.port) == "<flow port of soft0, isolated>"


def test_a_port_that_is_not_isolated_drops_what_no_rule_takes():
    with steered(isolated=False) as flows:
        queue = flows.rq()
        flows.port.steer(match.udp(dst=53), to=queue)
        assert flows.met([udp(53), udp(4791), bytes(L2 / ARP())]) == [taken(queue), DROPPED, DROPPED]
        assert flows.port.rules.missed.packets == 2
        flows.port.steer(match.udp(dst=4791), to=KERNEL)
        assert flows.met([udp(4791)]) == [MISS]


def test_fragments_have_no_ports(flows):
    queue = flows.rq()
    flows.port.steer(match.udp(dst=0), to=queue)
    later = bytes(L2 / IP(frag=100, proto=17) / b"data of a later fragment")
    assert flows.met([udp(0), later]) == [taken(queue), MISS]
    flows.port.steer(match.udp(), to=queue, priority=1)
    assert flows.met([later]) == [taken(queue)]


def test_vlan_tags_and_addresses(flows):
    tagged, station = flows.rq(), flows.rq()
    flows.port.steer(match.vlan(5) & match.udp(dst=53), to=tagged)
    flows.port.steer(match.eth(src="02:00:00:00:00:01") & match.tcp(flags=TcpFlag.SYN), to=station)
    frames = [
        bytes(L2 / Dot1Q(vlan=5) / IP() / UDP(dport=53)), bytes(L2 / Dot1Q(vlan=6) / IP() / UDP(dport=53)), udp(53),
        bytes(L2 / IP() / TCP(flags="S")), bytes(L2 / IPv6() / TCP(flags="SA")), bytes(L2 / IP() / TCP(flags="A")),
    ]
    assert flows.met(frames) == [taken(tagged), MISS, MISS, taken(station), taken(station), MISS]


# --- several queues


def hash_input(packet: IP) -> bytes:
    l4 = packet.payload
    fields = [*map(int, packet.src.split(".")), *map(int, packet.dst.split("."))]
    return bytes(fields) + l4.sport.to_bytes(2, "big") + l4.dport.to_bytes(2, "big")


@pytest.mark.parametrize("count", [2, 3])
def test_rss_spreads_by_the_toeplitz_hash(flows, count):
    queues = [flows.rq() for _ in range(count)]
    rss = Rss(queues)
    rule = flows.port.steer(match.everything(), to=rss)
    packets = [IP(src=f"10.0.{i}.7", dst="10.9.9.9") / UDP(sport=1000 + i, dport=i) for i in range(64)]
    packets += [IP(src=f"10.0.{i}.7", dst="10.9.9.9") / TCP(sport=1000 + i, dport=i) for i in range(64)]
    places = count if count == 2 else 64
    expected = [queues[toeplitz(rss.key, hash_input(p)) % places % count].number for p in packets]
    found = flows.met([bytes(L2 / packet) for packet in packets])
    assert [rqn for _, rqn, _ in found] == expected
    assert set(expected) == {queue.number for queue in queues}
    assert flows.met([bytes(L2 / ARP())]) == [taken(queues[0])]
    six = flows.met([bytes(L2 / IPv6(src=f"fe80::{i:x}") / ICMP()) for i in range(1, 40)])
    assert {rqn for _, rqn, _ in six} == {queue.number for queue in queues}
    rule.close()


def test_rules_share_the_way_to_their_queues(flows):
    queues = [flows.rq(), flows.rq()]
    bare = left_over(flows.ctx)
    one = flows.port.steer(match.udp(dst=1), to=queues)
    made = left_over(flows.ctx)
    assert made[2:] == (bare[2] + 7, bare[3] + 1)
    two = flows.port.steer(match.udp(dst=2), to=list(queues))
    assert left_over(flows.ctx) == made
    one.close()
    assert left_over(flows.ctx) == made
    two.close()
    assert left_over(flows.ctx)[2:] == bare[2:]


def test_refused_queues(flows):
    queue = flows.rq()
    for to, words in (
        ([], "Rss of 0 queues"), ([queue, queue], "Rss names a queue twice"), (5, "to = 5: a rule leads to a receive"),
        ("rxq", "to = 'r': a rule leads to a receive queue"), (flows.ctx, "a rule leads to a receive queue"),
    ):
        with pytest.raises(InvalidValueError, match=words):
            flows.port.steer(match.udp(), to=to)
    for key in (b"short", bytes(40)):
        with pytest.raises(InvalidValueError, match="the Toeplitz key has 40, not all 0"):
            Rss([queue], key=key)


# --- what is refused


def test_rules_that_contradict_each_other(flows):
    queue, port = flows.rq(), flows.port
    dns = port.steer(match.udp(dst=53), to=queue)
    with pytest.raises(InvalidValueError, match=r"udp\(dst=53\): rule udp\(dst=53\) → .* matches just that already"):
        port.steer(match.udp(dst=53), to=DROP)
    with pytest.raises(InvalidValueError, match=r"overlaps with rule udp\(dst=53\) → .*: give one of them another pri"):
        port.steer(match.ipv4(), to=DROP)
    same = port.steer(match.ipv4(src="10.0.0.0/8"), to=queue)  # both do the same
    with pytest.raises(InvalidValueError, match=r"10.1.0.0/16.* overlaps with rule"):
        port.steer(match.ipv4(src="10.1.0.0/16"), to=DROP)
    with pytest.raises(InvalidValueError, match=r"overlaps with rule ipv4"):  # from 10.0.0.0/8 to port 54
        port.steer(match.udp(dst=54), to=DROP)
    same.close()
    port.steer(match.udp(dst=54), to=DROP)
    port.steer(match.udp(dst=54) & match.ipv4(), to=DROP)
    port.steer(match.tcp(), to=queue)
    port.steer(match.eth(ether_type=0x0806), to=KERNEL)  # is neither IPv4 nor UDP
    dns.close()
    port.steer(match.ipv6(protocol=6), to=queue)


def test_arguments(flows):
    queue = flows.rq()
    for arguments, words in (
        ({"priority": 62}, "priority = 62: it must be 0 to 61"), ({"priority": -1}, "priority = -1"),
        ({"tag": 1 << 24}, "tag = 16777216: it must be 0 to 16777215"),
    ):
        with pytest.raises(InvalidValueError, match=words):
            flows.port.steer(match.udp(), to=queue, **arguments)
    with pytest.raises(InvalidValueError, match="a packet that is dropped gets no tag"):
        flows.port.steer(match.udp(), to=DROP, tag=1)
    with pytest.raises(InvalidValueError, match="match = 53 is of type int"):
        flows.port.steer(53, to=DROP)
    rule = flows.port.steer(match.udp(), to=queue, count=False)
    with pytest.raises(BadStateError, match="was made with count=False"):
        _ = rule.counter
    rule.close()
    with pytest.raises(BadStateError, match=r"rule udp\(\) .* is closed"):
        _ = rule.counter


def test_what_a_rule_uses_cannot_go(flows):
    queues = [flows.rq(), flows.rq()]
    single = flows.port.steer(match.udp(dst=53), to=queues[0])
    spread = flows.port.steer(match.udp(dst=54), to=queues)
    with pytest.raises(InUseError, match=r"still used by rule udp\(dst=53\) → .*, rule udp\(dst=54\) → Rss.*: close"):
        queues[0].close()
    assert flows.met([udp(53)]) == [taken(queues[0])]
    single.close()
    with pytest.raises(InUseError, match=r"is still used by rule udp\(dst=54\)"):
        queues[0].close()
    spread.close()
    for queue in queues:
        queue.close()
    with pytest.raises(BadStateError, match="is closed"):
        flows.port.steer(match.udp(dst=53), to=queues[0])


def test_many_users_are_not_all_listed(flows):
    queue = flows.rq()
    for port in range(8):
        flows.port.steer(match.udp(dst=port), to=queue)
    with pytest.raises(InUseError, match=r"rule udp\(dst=4\) → .* and 3 more: close that first"):
        queue.close()


@pytest.mark.parametrize("opcode", [
    Opcode.SET_FLOW_TABLE_ENTRY, Opcode.CREATE_FLOW_GROUP, Opcode.CREATE_FLOW_TABLE, Opcode.CREATE_TIR,
    Opcode.CREATE_RQT, Opcode.ALLOC_FLOW_COUNTER,
])
def test_nothing_is_half_made_after_a_refusal(flows, opcode, monkeypatch):
    queues, port, provider = [flows.rq(), flows.rq()], flows.port, flows.ctx.provider
    port.counters._free.clear()
    before, create = left_over(flows.ctx), provider.devx_obj_create
    for good in range(20):  # the refusal comes ever later
        left = good

        def refuse(mailbox: bytes, out_size: int) -> tuple[int, bytes]:
            nonlocal left
            if int.from_bytes(mailbox[:2], "big") == opcode:
                left -= 1
                if left < 0:
                    raise DriverError("refused because a test wants it", 3, 0)
            return create(mailbox, out_size)

        monkeypatch.setattr(provider, "devx_obj_create", refuse)
        try:
            rule = port.steer(match.udp(dst=53), to=queues, priority=7)
        except DriverError:
            monkeypatch.setattr(provider, "devx_obj_create", create)
            after = left_over(flows.ctx)
            assert after[2:] == before[2:]
            assert not port.rules.rules
            assert flows.met([udp(53)]) == [MISS]
            continue
        monkeypatch.setattr(provider, "devx_obj_create", create)
        rule.close()
        break
    assert good > 0
    rule = port.steer(match.udp(dst=53), to=queues, priority=7)
    assert flows.met([udp(53)])[0][0] == Fate.TIR
    for queue in queues:
        with pytest.raises(InUseError):
            queue.close()


def test_a_table_that_is_full(monkeypatch):
    monkeypatch.setattr("gpunetio.flow.port._LOG_SIZE", 7)
    with steered() as flows:
        rules = [flows.port.steer(match.udp(dst=i), DROP, count=False) for i in range(127)]
        flows.port.steer(match.udp(dst=127), DROP, count=False)
        for more in (match.udp(dst=128), match.tcp()):
            with pytest.raises(FullError, match=r"priority 0 of pipe rules is full: it has 128 entries"):
                flows.port.steer(more, DROP)
        for rule in rules[:127]:
            rule.close()
        for i in range(64):  # one rule is left, in the last of two groups of 64
            flows.port.steer(match.tcp(dst=i), DROP)
        with pytest.raises(FullError):
            flows.port.steer(match.tcp(dst=64), DROP)
        flows.port.steer(match.tcp(dst=500), DROP, priority=1)


def test_masks_that_no_rule_has_any_more_make_room(flows):
    for prefix in range(1, 33):
        flows.port.steer(match.ipv4(dst=f"0.0.0.0/{prefix}"), DROP).close()
        flows.port.steer(match.ipv4(src=f"0.0.0.0/{prefix}"), DROP).close()
    for bits in range(40):
        flows.port.steer(match.udp(dst=(0, bits + 1)), DROP)


# --- ports


def test_a_device_has_one_flow_port(flows):
    with pytest.raises(InUseError, match=r"soft0 steers by flow table 0x\w+ already"):
        FlowPort(flows.ctx)
    with verbs.open("soft0") as other, pytest.raises(InUseError, match="soft0 steers by flow table"):
        FlowPort(other)
    assert flows.met([udp(1)]) == [MISS]


def test_closing_a_port_closes_its_rules():
    with verbs.open("soft0") as ctx:
        with FlowPort(ctx) as port:
            flows = Setup(ctx, port)
            queue = flows.rq()
            bare = left_over(ctx)
            rules = [port.steer(match.udp(dst=i), to=queue, priority=i % 3) for i in range(10)]
            assert left_over(ctx) != bare
        assert all(rule.closed for rule in rules)
        assert left_over(ctx) == ([], 0, 0, 0)
        assert flows.met([udp(1)]) == [MISS]
        queue.close()
        with pytest.raises(BadStateError, match="flow port of soft0 is closed"):
            port.steer(match.udp(), to=DROP)
        FlowPort(ctx).close()


def test_closing_a_context_closes_everything():
    with verbs.open("soft0") as ctx:
        port = FlowPort(ctx)
        flows = Setup(ctx, port)
        rule = port.steer(match.udp(dst=5), to=[flows.rq(), flows.rq()])
    assert (rule.closed, port.closed) == (True, True)
    with verbs.open("soft0") as ctx:
        assert left_over(ctx) == ([], 0, 0, 0)


@pytest.mark.parametrize("port", [PortConfig(link_layer=LinkLayer.INFINIBAND), PortConfig(wire="udp")])
def test_ports_without_ethernet(port):
    none = pytest.raises(NotSupportedError, match="has no flow tables: it does not announce them")
    with verbs.open("soft0", port=port) as ctx, none:
        FlowPort(ctx)


# --- at the same time


def test_threads_add_and_remove_rules_at_the_same_time(flows):
    queue, port = flows.rq(), flows.port
    failed: list[BaseException] = []

    def work(which: int) -> None:
        try:
            for i in range(30):
                with port.steer(match.ipv4(src=f"10.{which}.{i}.0/24"), to=queue):
                    port.steer(match.udp(dst=1000 * which + i), to=queue, priority=1 + which)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert len(port.rules.rules) == 4 * 30
    assert flows.met([udp(2007), udp(29)]) == [taken(queue)] * 2


def test_a_rule_that_waits_while_its_pipe_closes(flows):
    port, failed = flows.port, []
    pipe = port.create_pipe("closing", PipeType.CONTROL)

    def add() -> None:
        try:
            pipe.add(match.everything(), to=DROP)
        except Exception as error:
            failed.append(error)

    with port.lock:
        adding = threading.Thread(target=add)
        adding.start()
        adding.join(0.3)  # it waits for the lock by then
        pipe.close()
    adding.join(30)
    (error,) = failed
    assert isinstance(error, BadStateError)
    assert "is closed" in str(error)


def test_one_of_two_threads_makes_the_root(flows, monkeypatch):
    make, port = FlowPipe.__init__, flows.port

    def slowly(*arguments: object) -> None:
        make(*arguments)
        time.sleep(0.1)

    monkeypatch.setattr(FlowPipe, "__init__", slowly)
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(port.create_pipe, name, PipeType.CONTROL, root=True) for name in ("one", "other")]
        assert {type(each.exception(30)) for each in made} == {InUseError, type(None)}


def test_rules_come_and_go_under_traffic(flows_of_one_worker):
    """Each packet takes one rule as a whole, or none; and none that is gone, whose TIR has gone, too."""
    flows = flows_of_one_worker
    nic, port, rng = nic_of(flows.ctx), flows.port, random.Random(3)
    tirs = {dst: flows.tir() for dst in range(1, 17)}
    frames = Frames([udp(dst) for dst in tirs])
    frames.rows["expected"] = [tir.number for tir in tirs.values()]
    stop, wrong = np.ones(1, np.int64), []
    steer_and_serve(nic.control_address, frames.address, 0, stop.ctypes.data)  # compiles it
    stop[0] = 0
    stop_engine(nic)
    execute: Callable[..., object] = nic.control.interpreter.execute
    usual, nic.execute = nic.execute, execute  # type: ignore[method-assign]
    arguments = nic.control_address, frames.address, len(frames), stop.ctypes.data
    loop = threading.Thread(target=lambda: wrong.append(steer_and_serve(*arguments)))
    loop.start()
    try:
        rules = {}
        for _ in range(400):
            dst = rng.choice(list(tirs))
            if rule := rules.pop(dst, None):
                rule.close()
            else:
                made = match.udp(dst=dst) & (match.ipv4() if rng.random() < 0.5 else match.everything())
                rules[dst] = port.steer(made, tirs[dst], tag=tirs[dst].number, priority=rng.randrange(3))
        for dst in list(tirs)[:8]:
            if rule := rules.pop(dst, None):
                rule.close()
            tirs[dst].close()
    finally:
        stop[0] = 1
        loop.join(10)
        nic.execute = usual  # type: ignore[method-assign]
        nic.engine.start()
    assert wrong == [0]
    assert sum(rule.counter.packets > 0 for rule in rules.values()) == len(rules) > 0


def test_counters_begin_at_0_when_they_are_used_again(flows):
    frame = udp(53)
    for i in range(200):
        with flows.port.steer(match.udp(dst=53), DROP) as rule:
            assert rule.counter == (0, 0)
            flows.met([frame] * (i % 3))
            assert rule.counter.packets == i % 3
    assert len(flows.port.counters._bulks) <= 2


def test_counters_come_128_at_a_time(flows):
    """If the device says so (PRM: flow_counter_bulk_alloc, bit 0), or one command would be needed for each rule."""
    rules = [flows.port.steer(match.udp(dst=port), DROP) for port in range(1, 130)]
    assert [bulk.size for bulk in flows.port.counters._bulks] == [128, 128]
    for rule in rules:
        rule.close()


@pytest.mark.parametrize(("bulks", "size"), [(0, 1), (1, 128), (2, 1), (3, 128), (0xFE, 1)])
def test_only_bit_0_says_that_128_may_be_asked_for(monkeypatch, bulks, size):
    """PRM: each bit of flow_counter_bulk_alloc is a size, 128 << bit."""
    known = port_module.query_cap

    def told(provider, group, layout):
        found = dict(known(provider, group, layout))
        return found | {"flow_counter_bulk_alloc": bulks} if "flow_counter_bulk_alloc" in found else found

    monkeypatch.setattr(port_module, "query_cap", told)
    with steered() as setup:
        setup.port.steer(match.udp(dst=53), DROP)
        assert {bulk.size for bulk in setup.port.counters._bulks} == {size}


def test_a_rule_counts_on_while_others_come_and_go(flows):
    """Their counters are of the same bulk, and are read together."""
    with flows.port.steer(match.udp(dst=53), DROP) as rule:
        flows.met([udp(53)] * 3)
        for _ in range(300):
            flows.port.steer(match.udp(dst=54), DROP).close()
        assert rule.counter.packets == 3
