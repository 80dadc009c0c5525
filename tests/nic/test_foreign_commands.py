"""Whatever a command of DEVX contains, the NIC answers or refuses it, keeps nothing half-made, and works on."""

from contextlib import closing

import pytest

from foreign_commands import PORTS, Commands, mistakes
from gpunetio.formats.commands import Opcode

pytestmark = [pytest.mark.soft_nic, pytest.mark.host_memory]

WAYS = pytest.mark.parametrize("by_ioctl", [False, True], ids=["provider", "ioctl"])


def test_the_program_sends_every_command():
    with closing(Commands(0)) as commands:
        assert commands.samples.keys() == set(Opcode)
        commands.check()


@WAYS
def test_commands_with_something_changed(by_ioctl):
    assert [*mistakes(500, 1, by_ioctl)] == []


@pytest.mark.parametrize("port", ["udp", "infiniband"])
def test_commands_to_a_nic_without_ethernet_queues(port):
    assert [*mistakes(500, 1, port=PORTS[port])] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("port", PORTS)
@WAYS
def test_many_commands_with_something_changed(by_ioctl, port):
    assert [*mistakes(30_000, 2, by_ioctl, PORTS[port])] == []
