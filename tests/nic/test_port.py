"""The port of a software NIC: what follows from its configuration, and who has which address."""

import os
from ipaddress import IPv6Address, ip_address
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpunetio import Faults, LinkLayer, PortConfig, verbs
from gpunetio.errors import InUseError, InvalidValueError, NotFoundError, NotSupportedError
from gpunetio.fabric.claims import owner_of
from gpunetio.gpu import cuda_backend
from gpunetio.gpu.device import engine_of
from gpunetio.nic.engine.port import MAX_HEADERS, Port, address_of, can_reach, gid_of, link_mtu_of, mac_of
from gpunetio.nic.memory.cuda_driver import cuda_driver
from gpunetio.providers import soft
from nic_child import Child
from nic_rig import READ, REQ, SEND, SIZE, WRITE, Buffer, Queue, connect, raddr
from udp_rig import Namespace, own_address

IB = LinkLayer.INFINIBAND


def make(*addresses: str, **config: Any) -> Port:
    return Port(PortConfig(addresses=addresses, **config), "127.0.0.1")


# --- what follows from addresses -----------------------------------------------------------------------------------


def test_gid_table():
    """The first address, the link-local GID with the MAC as EUI-64 (RFC 4291 2.5.1, annex A17.4.5), the others."""
    port = make("10.1.2.3", "fd00::7", "10.1.2.4")
    assert port.mac == bytes.fromhex("02000a010203")
    assert [str(IPv6Address(gid)) for gid in port.gids] == [
        "::ffff:a01:203", "fe80::aff:fe01:203", "fd00::7", "::ffff:a01:204",
    ]
    assert [str(port.source_address(i)) for i in range(4)] == ["10.1.2.3", "10.1.2.3", "fd00::7", "10.1.2.4"]
    assert make().gids[0] == bytes(10) + b"\xff\xff\x7f\0\0\1"
    with verbs.open("soft5", port=PortConfig(addresses=("10.1.2.3", "fd00::7"))) as ctx:
        assert [ctx.query_gid(1, i) for i in range(16)] == [*port.gids[:3], *[bytes(16)] * 13]
        assert ctx.query_port(1).lid == 0


@pytest.mark.parametrize("text", ["10.1.2.3", "127.0.0.1", "255.255.255.254", "fd00::1", "2001:db8::ffff:1"])
def test_gids_and_addresses(text):
    address = ip_address(text)
    assert address_of(gid_of(address)) == address
    assert mac_of(address) == b"\x02\x00" + address.packed[-4:]
    assert mac_of(address)[0] & 3 == 2  # locally administered, of one station


def test_the_link_local_gid_leads_to_the_address():
    port = make("10.1.2.3")
    assert str(address_of(port.gids[1])) == "10.1.2.3"
    assert str(address_of(bytes.fromhex("fe80000000000000") + bytes(7) + b"\1")) == "fe80::1"


@pytest.mark.parametrize(
    ("link", "active"),
    [(336, 256), (591, 256), (592, 512), (1103, 512), (1104, 1024), (1500, 1024), (2128, 2048), (4175, 2048),
     (4176, 4096), (4200, 4096), (9000, 4096), (65536, 4096)],
)
def test_active_mtu(link, active):
    """The largest path MTU whose packets fit the link with all headers."""
    assert make("10.1.2.3", mtu=link).active_mtu == active
    assert active + MAX_HEADERS <= link


def test_link_mtu():
    assert link_mtu_of(ip_address("127.3.2.1")) == 65536
    assert link_mtu_of(ip_address("192.0.2.1")) == 1500  # nobody's
    assert link_mtu_of(ip_address("2001:db8::1")) == 1500
    assert make("127.3.2.1", "192.0.2.1").active_mtu == 1024  # the smallest of them


@pytest.mark.root
@pytest.mark.parametrize(("link", "active"), [(1500, 1024), (4200, 4096), (2200, 2048)])
def test_mtu_of_an_interface(link, active):
    """Of the calling thread's network namespace."""
    namespace, other = Namespace(), Namespace()
    try:
        namespace.connect(other)
        namespace.ip(f"link set here mtu {link}")
        namespace.ip("address add 10.9.0.1/24 dev here")
        namespace.ip("address add fd00:9::1/64 dev here nodad")
        for text in ("10.9.0.1", "fd00:9::1"):
            assert namespace.run(link_mtu_of, ip_address(text)) == link
            assert namespace.run(make, text).active_mtu == active
            assert link_mtu_of(ip_address(text)) == 1500  # nobody has it here
    finally:
        other.close()
        namespace.close()


@pytest.mark.parametrize(("mtus", "path"), [((1500, 4200), 1024), ((9000, 700), 512), ((4200, 4200), 4096)])
def test_path_mtu_is_the_smaller_one(mtus, path):
    contexts = [
        verbs.open(f"soft{i}", port=PortConfig(addresses=(own_address(),), mtu=mtu)) for i, mtu in enumerate(mtus)
    ]
    try:
        pds = [ctx.create_pd() for ctx in contexts]
        a, b = (Queue(pd) for pd in pds)
        here, there = Buffer(pds[0], SIZE, fill=1), Buffer(pds[1], SIZE)
        connect(a, b)
        assert [q.qp.query()[0].path_mtu for q in (a, b)] == [path, path]
        before = int(b.nic.counters["rdma_rx_packets"])
        a.post(WRITE, there.remote(), here.at())
        assert a.done.next().opcode == REQ
        assert b.nic.counters["rdma_rx_packets"] - before == SIZE // path
        assert np.array_equal(here.bytes, there.bytes)
    finally:
        for ctx in contexts:
            ctx.close()


# --- LIDs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "lid", "expected"),
    [("127.0.0.1", 0, 1), ("10.0.18.52", 0, 0x1234), ("fd00::5", 0, 5), ("127.0.0.1", 0xBFFF, 0xBFFF)],
)
def test_lid(address, lid, expected):
    port = make(address, link_layer=IB, lid=lid)
    assert port.lid == expected
    (own,) = port.control_addresses
    assert own == port.address_of_lid(expected)
    assert int(own) & 0xFFFF == expected
    assert own.packed[:-2] == ip_address(address).packed[:-2]
    assert port.source_address(0) == own
    assert make(address, lid=lid).lid == 0


@pytest.mark.parametrize("address", ["10.0.0.0", "10.0.192.0", "10.0.255.254"])
def test_addresses_without_a_unicast_lid(address):
    with pytest.raises(InvalidValueError, match=rf"{address} gives the port LID 0x.*another address, or a lid"):
        make(address, link_layer=IB)
    assert make(address, link_layer=IB, lid=3).lid == 3
    assert make(address).lid == 0


# --- configurations ------------------------------------------------------------------------------------------------


@pytest.mark.host_memory
@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"addresses": ("10.0.0",)}, "'10.0.0' is not an IPv4 or IPv6 address"),
        ({"addresses": "host"}, "'host' is not an IPv4"),
        ({"addresses": ("10.0.0.1", "host")}, "'host' is not an IPv4"),
        ({"addresses": ("10.0.0.1/24",)}, "is not an IPv4"),
        ({"wire": "tcp"}, "wire = 'tcp': it must be one of auto, udp, replay, packet:INTERFACE, tap:NAME, unix:PATH"),
        ({"wire": "udp:x"}, "wire = 'udp:x': it must be one of"), ({"wire": "tap"}, "lacks what it leads to: tap:NAME"),
        ({"wire": "tap:"}, "lacks what it leads to: tap:NAME"),
        ({"wire": "tap:sixteen-letters-"}, "'sixteen-letters-' cannot be the name of a network interface"),
        ({"wire": "packet:a/b"}, "'a/b' cannot be the name"),
        ({"wire": "tap:t0", "link_layer": LinkLayer.INFINIBAND}, "an InfiniBand port has no TAP wire"),
        ({"mtu": 335}, "mtu = 335 bytes: a link has 336 to 65536"), ({"mtu": 65537}, "mtu = 65537"),
        ({"mtu": -1}, "mtu = -1"), ({"lid": 0xC000}, "lid = 0xc000: unicast LIDs are 1 to 0xbfff"),
        ({"lid": -1}, "lid = -0x1"),
    ],
)
def test_configurations_that_are_refused(config, text):
    with pytest.raises(InvalidValueError, match=text):
        PortConfig(**config)


def test_addresses_in_any_form():
    """A lone string is an address, and not a sequence of letters."""
    wanted = PortConfig(addresses=("10.0.0.1",))
    for addresses in ("10.0.0.1", ["10.0.0.1"], ("10.0.0.1",)):
        assert PortConfig(addresses=addresses) == wanted
        assert hash(PortConfig(addresses=addresses)) == hash(wanted)
    assert Port(PortConfig(addresses="::1"), "127.0.0.1").gids == make("::1").gids


def test_a_second_open_may_not_differ():
    config = PortConfig(mtu=1500, faults=Faults(loss=0.5))
    with verbs.open("soft5", port=config) as one, verbs.open("soft5") as two, verbs.open("soft5", port=config):
        assert one.provider.nic is two.provider.nic
        for other in (PortConfig(), PortConfig(mtu=1500), PortConfig(link_layer=IB)):
            with pytest.raises(InvalidValueError, match=r"soft5 is open already, with PortConfig\(.*mtu=1500"):
                verbs.open("soft5", port=other)
    with verbs.open("soft5", port=PortConfig(link_layer=IB)) as ctx:
        assert ctx.query_port(1).link_layer == IB


# --- who is where --------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_can_reach():
    """A route is what counts: in a network without any, only the own addresses are there."""
    namespace = Namespace()
    try:
        for text, expected in (("127.0.0.1", True), ("127.9.9.9", True), ("192.0.2.1", False), ("2001:db8::1", False)):
            assert namespace.run(can_reach, ip_address(text)) is expected, text
        namespace.ip("route add 192.0.2.0/24 dev lo")
        assert namespace.run(can_reach, ip_address("192.0.2.1"))
    finally:
        namespace.close()


def test_a_gid_without_a_route(monkeypatch):
    monkeypatch.setattr("gpunetio.nic.control.links.links.can_reach", lambda address: False)
    with verbs.open("soft5", port=PortConfig(addresses=(own_address(),))) as ctx:
        provider = ctx.provider
        for text in ("192.0.2.1", "2001:db8::1"):
            with pytest.raises(NotFoundError, match=f"soft5 has no route to {text}: see `ip route get {text}`"):
                provider.resolve_mac(1, 0, gid_of(ip_address(text)))
        other = own_address()
        with verbs.open("soft6", port=PortConfig(addresses=("fd00:5::1", other))) as peer:  # it needs none
            nic = peer.provider.nic
            for gid in nic.port.gids:
                assert provider.resolve_mac(1, 0, gid) == nic.mac


def two_ends(a: Queue, here: Buffer, child: Child, sgid_index: int = 0) -> None:
    """Connect to a child, and move bytes both ways."""
    child.connect(a.qp.endpoint(sgid_index=sgid_index), ack_timeout=14)
    a.qp.connect(child.endpoint, sgid_index=sgid_index, ack_timeout=14)
    child.ask("receive")
    a.post(SEND, here.at(0, 5000))
    assert a.done.next().opcode == REQ
    assert bytes.fromhex(child.ask("bytes", 5000)) == here.bytes[:5000].tobytes()
    expected = here.bytes[:5000].copy()
    here.bytes[:] = 0
    a.post(READ, raddr(child.address, child.key), here.at(0, 5000))
    assert a.done.next().opcode == REQ
    assert np.array_equal(here.bytes[:5000], expected)


GOOD, BAD = {}, {"corruption": 0.02, "seed": 2}
IN_QUICK_SUITE = [((2, 3), GOOD), ((1, 1), BAD)]  # each starts a process


@pytest.mark.parametrize(
    ("indices", "faults"),
    [
        pytest.param(
            indices, faults, id=f"{indices}-{'bad' if faults else 'good'}",
            marks=() if (indices, faults) in IN_QUICK_SUITE else pytest.mark.slow,
        )
        for indices in [(0, 0), (2, 0), (0, 2), (2, 3), (1, 1)]
        for faults in (GOOD, BAD)
    ],
)
def test_each_address_of_two_processes(indices, faults):
    """Whichever addresses two QPs have chosen, they share a link, and agree on what an ICRC covers."""
    mine, yours = ([own_address(), own_address(), f"fd00:{os.getpid():x}::{n}"] for n in (1, 2))
    child = Child("soft1", addresses=yours, sgid_index=indices[1], **({"faults": faults} if faults else {}))
    try:
        config = PortConfig(addresses=tuple(mine), faults=Faults(**faults) if faults else None)
        with verbs.open("soft0", port=config) as ctx:
            pd = ctx.create_pd()
            two_ends(Queue(pd), Buffer(pd, SIZE, fill=1), child, indices[0])
            counters = ctx.provider.nic.counters
            assert counters["rx_wrong_peer"] == counters["rx_malformed"] == 0
    finally:
        child.close()


def test_ipv6_neighbours():
    pid = os.getpid()
    child = Child("soft1", addresses=[f"fd00:{pid:x}::2"])
    try:
        with verbs.open("soft0", port=PortConfig(addresses=(f"fd00:{pid:x}::1",))) as ctx:
            pd = ctx.create_pd()
            two_ends(Queue(pd), Buffer(pd, SIZE, fill=1), child)
    finally:
        child.close()


@pytest.mark.slow
def test_a_claimed_address():
    """The second NIC with an address works inside itself; outside it would answer for the first one."""
    address, third = own_address(), own_address()
    first, peer = Child("soft2", addresses=[address]), Child("soft1", addresses=[third])
    try:
        assert owner_of(address) == first.pid
        with verbs.open("soft2", port=PortConfig(addresses=(address,))) as ctx:
            pd = ctx.create_pd()
            a, b = Queue(pd), Queue(pd)
            here, there = Buffer(pd, SIZE, fill=1), Buffer(pd, SIZE)
            connect(a, b)
            a.post(WRITE, there.remote(), here.at())
            assert a.done.next().opcode == REQ
            assert np.array_equal(here.bytes, there.bytes)
            with pytest.raises(InUseError, match=f"process {first.pid} has claimed that address"):
                Queue(pd).qp.connect(peer.endpoint)
        assert first.ask("works_inside")
    finally:
        first.close()
        peer.close()


@pytest.mark.slow
def test_open_without_a_name(monkeypatch):
    """The first that no other process has; of this one's it may be any."""
    base = own_address().rpartition(".")[0]
    monkeypatch.setattr(soft, "_address", lambda n: f"{base}.{200 + n}")
    children = [Child(f"soft{n}", addresses=[f"{base}.{200 + n}"]) for n in (0, 2)]
    try:
        with verbs.open() as one:
            assert one.name == "soft1"
            assert str(one.provider.nic.port.addresses[0]) == f"{base}.201"
            with verbs.open() as two:
                assert two.provider.nic is one.provider.nic
        with verbs.open("soft3"), verbs.open() as one:
            assert one.name == "soft1"
        monkeypatch.setattr(soft, "DEVICES", 1)
        monkeypatch.setattr(soft, "ADDRESSES", 1)
        with pytest.raises(InUseError, match=r"belong to NICs in other processes: give the NIC another address"):
            verbs.open()
    finally:
        for child in children:
            child.close()


# --- where turns are made ------------------------------------------------------------------------------------------


@pytest.mark.host_memory
@pytest.mark.parametrize(
    ("engine", "name", "gpu", "away"),
    [("cpu", "cpu", 0, False), ("twin", "twin", 0, True), ("gpu", "gpu0", 0, True), ("gpu3", "gpu3", 3, True)],
)
def test_engines(engine: str, name: str, gpu: int, away: bool) -> None:
    config = PortConfig(engine=engine)
    assert (config.engine_name, config.gpu, config.on_gpu) == (name, gpu, away)
    assert config.on_cuda == name.startswith("gpu")


@pytest.mark.host_memory
@pytest.mark.soft_nic
def test_devices_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are GPUs, each with an engine and an address of its own. A driver stands in for CUDA's."""
    assert "gpu0" not in [device.name for device in soft.device_list()] or soft.has("gpu0")
    monkeypatch.setattr(soft, "cuda_driver", lambda: SimpleNamespace(count=lambda: 2))
    described = {device.name: device.description for device in soft.device_list()}
    assert described["gpu1"] == "software NIC (engine on GPU 1)"
    assert [soft.has(name) for name in ("soft7", "gpu1", "gpu2", "gpux", "mlx5_0")] == [True, True, False, False, False]
    asked: list[PortConfig] = []

    class Opened(Exception):
        """Instead of a NIC."""

    def open_nic(name: str, port: Port) -> None:
        asked.append(port.config)
        raise Opened(str(port.addresses[0]))

    monkeypatch.setattr(soft, "SoftNic", open_nic)
    with pytest.raises(Opened, match=r"127\.0\.0\.10"):
        soft.open_device("gpu1", PortConfig(workers=2))
    assert asked == [PortConfig(workers=2, engine="gpu1")]
    with pytest.raises(InvalidValueError, match="engine = 'twin': gpu0 makes its turns on that GPU"):
        soft.open_device("gpu0", PortConfig(engine="twin"))


@pytest.mark.host_memory
def test_the_engine_where_queues_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "device_count", lambda: 0)
    assert [engine_of(which, "auto") for which in ("auto", "host", "twin")] == ["cpu", "cpu", "twin"]
    monkeypatch.setattr(cuda_backend, "device_count", lambda: 2)
    monkeypatch.setattr(cuda_backend, "ordinal_of", lambda bus_id: {"8a:00.0": 1}[bus_id])
    assert [engine_of(which, "gpu") for which in ("auto", "1", "8a:00.0")] == ["gpu0", "gpu1", "gpu1"]
    assert engine_of("auto", "cpu_gpu") == "cpu"


@pytest.mark.host_memory
@pytest.mark.soft_nic
@pytest.mark.skipif(cuda_driver() is not None, reason="there is a GPU")
def test_no_gpu_is_said() -> None:
    with pytest.raises(NotSupportedError, match="engine = 'gpu': this machine has no CUDA driver, or no GPU"):
        verbs.open("soft0", port=PortConfig(engine="gpu"))
    with pytest.raises(NotFoundError, match="no device 'gpu0'"):
        verbs.open("gpu0")


# --- what programs may write -----------------------------------------------------------------------------------------

ADDRESSES = [f"10.1.0.{number}" for number in range(1, 301)]


@pytest.mark.parametrize("config, words", [
    ({"addresses": ADDRESSES}, "300 addresses: a port has at most 15"),
    ({"addresses": ADDRESSES[:16]}, "16 addresses: a port has at most 15"),
    ({"addresses": 5}, "addresses = 5 is of type int: give IPv4 or IPv6 addresses, as text"),
    ({"addresses": b"\x0a\1\2\3"}, "is of type bytes: give IPv4 or IPv6 addresses, as text"),
    ({"addresses": [None]}, "addresses = None is of type NoneType"),
    ({"addresses": ["10.1.2.3", "10.1.2.3"]}, "addresses: 10.1.2.3 is there twice"),
    ({"addresses": ["fd00::1", "fd00:0::1"]}, "addresses: fd00::1 is there twice"),
    ({"wire": None}, "wire = None is of type NoneType"),
    ({"wire": "unix:a\0b"}, "must not contain a NUL"),
    ({"link_layer": "x"}, r"link_layer = 'x' .*: one of INFINIBAND \(1\), ETHERNET \(2\)"),
    ({"link_layer": 3}, r"link_layer = 3: it is one of INFINIBAND \(1\), ETHERNET \(2\)"),
    ({"mtu": "9000"}, "mtu = '9000' is of type str: it must be a whole number"),
    ({"promiscuous": "no"}, "promiscuous = 'no': it must be True or False"),
    ({"send_scheduling": None}, "send_scheduling = None: it must be True or False"),
    ({"faults": "loss"}, "'loss' is not a fault: give NAME=VALUE"),
    ({"faults": 0.1}, "faults = 0.1 is of type float"),
    ({"capture": 5}, "capture = 5 is of type int"),
    ({"workers": "2"}, "workers = '2' is of type str"),
    ({"engine": None}, "engine = None is of type NoneType"),
])
def test_wrong_values_are_refused_at_once(config, words):
    with pytest.raises(InvalidValueError, match=words) as caught:
        PortConfig(**config)
    assert "\n" not in str(caught.value)


def test_values_in_other_forms(tmp_path):
    """What means the same is the same: the port of a NIC that is open is compared with that of the next open."""
    assert PortConfig(faults="loss=0.01,seed=7") == PortConfig(faults=Faults(loss=0.01, seed=7))
    assert PortConfig(addresses=ip_address("10.1.2.3")) == PortConfig(addresses=["10.1.2.3"])
    assert PortConfig(link_layer=1) == PortConfig(link_layer=IB)  # type: ignore[arg-type]
    assert PortConfig(workers=np.int64(2), promiscuous=np.bool_(False)) == PortConfig(workers=2, promiscuous=False)
    assert PortConfig(capture=tmp_path) == PortConfig(capture=str(tmp_path))


def test_as_many_addresses_as_the_gid_table_has_room_for():
    with verbs.open("soft5", port=PortConfig(addresses=[f"127.0.9.{number}" for number in range(1, 16)])) as ctx:
        assert all(any(ctx.query_gid(1, index)) for index in range(16))
