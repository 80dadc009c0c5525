"""Mutated and random MADs in the middle of honest connections: nothing raises, and nothing is left behind."""

import random

import pytest

from cm_machines import Flying, Host, World, gid, watch
from gpunetio.cm.path import Path
from gpunetio.formats.cm import MAD_BYTES, MAD_HEADER, Attribute, PortSpace

_BATCH = 200  # MADs between two looks at what is left
_REMEMBERED = 50


def mutate(chance: random.Random, mad: bytes) -> bytes:
    """A MAD with another message, other bytes or another length. Names in it stay right most of the time."""
    changed = bytearray(mad)
    kind = chance.randrange(10)
    if kind == 0:
        return chance.randbytes(chance.choice([0, 1, 23, 24, 255, MAD_BYTES, MAD_BYTES, 300]))
    if kind == 1:
        return bytes(changed[: chance.randrange(MAD_BYTES)])
    if kind < 6:
        changed[17] = chance.choice(list(Attribute))
    for _ in range(chance.randrange(4)):
        changed[chance.randrange(MAD_HEADER.size, MAD_BYTES)] = chance.choice([0, 1, 0x7F, 0x80, 0xFF])
    return bytes(changed)


def strike(mads: int, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(mads // _BATCH):
        world = World()
        hosts = [world.host(number) for number in (1, 2)]
        for host in hosts:
            host.listen(backlog=8)
            host.listen(space=PortSpace.UDP, backlog=8)
        overheard: list[Flying] = []
        for _ in range(_BATCH):
            while len(overheard) < 8 or not chance.randrange(4):
                live(chance, world, hosts, overheard)
            heard = chance.choice(overheard)
            source = heard.source if chance.randrange(8) else gid(9)
            to = heard.destination if chance.randrange(3) else heard.source
            world.deliver(Flying(source, to, mutate(chance, heard.mad)))
        world.settle()
        for host in hosts:
            for communication in host.machine.communications():
                host.machine.give_up(communication)
        world.settle()
        for host in hosts:
            assert host.holds_nothing()


def live(chance: random.Random, world: World, hosts: list[Host], overheard: list[Flying]) -> None:
    """Let the honest programs do something, and remember what they say."""
    host, peer = chance.sample(hosts, 2)
    known = host.machine.communications()
    if known and not chance.randrange(3):
        host.machine.give_up(chance.choice(known))
    elif not chance.randrange(5):
        host.machine.resolve(Path(peer.gid), 7174, host.notify)
    elif not chance.randrange(5):
        world.advance()
    else:
        host.connect(peer)
    overheard.extend(world.flying)
    del overheard[:-_REMEMBERED]
    if chance.randrange(3):
        world.run(lambda flying: bool(overheard.append(flying)))


@pytest.mark.parametrize("seed", range(4))
def test_wrong_mads_do_no_harm(seed):
    strike(500, seed)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_wrong_mads_do_no_harm():
    strike(100_000, 4)


def test_a_flood_of_requests_is_bounded():
    world = World()
    host = world.host(1, watch)
    host.listen(backlog=8)
    flood = world.host(2)
    for _ in range(100):
        flood.connect(host)
    world.run()
    assert len(host.machine) == 8
