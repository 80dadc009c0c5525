"""A NIC of the LAN in a separate process, controlled by lines of JSON; `Child` is its other end, in the test."""

import functools
import json
import subprocess
import sys
import time
from typing import Any

from eth_receive_rig import Cq, remove_rules
from eth_send_rig import Sq, eth, inlined
from ethernet_rig import Maker, nic_of
from gpunetio import PortConfig, verbs
from gpunetio.formats.packet import ETHERNET
from gpunetio.nic.host.engine import compile_engine, compile_extensions
from nic_child import obey
from repository import environment
from stations import Station


class Child:
    """Starts it with a device's name and the fields of its PortConfig. `enter`: it makes its queues at once."""

    def __init__(self, name: str, enter: bool = True, **config: Any):
        compile_engine()  # once, for all processes
        compile_extensions()
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps([name, config])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
        )
        try:
            self.mac, self.pid = bytes.fromhex(self._answer()["value"]), self._process.pid
            if enter:
                self.ask("enter")
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, *args: Any) -> Any:
        """Have it do something: the answer."""
        assert self._process.stdin is not None
        print(json.dumps([what, *args]), file=self._process.stdin, flush=True)
        answer = self._answer()
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def send(self, *frames: bytes) -> None:
        self.ask("send", [frame.hex() for frame in frames])

    def got(self, count: int = 0) -> list[bytes]:
        """The frames that have arrived, of which there must be so many within 10 s; with 0, those that are there."""
        return [bytes.fromhex(frame) for frame in self.ask("got", count)]

    def count(self, name: str) -> int:
        return int(self.ask("count", name))

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the other process has ended"
        return json.loads(line)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Nic:
    def __init__(self, name: str, config: dict[str, Any]):
        self.ctx = verbs.open(name, port=PortConfig(workers=1, **config))
        self.station: Station | None = None

    def enter(self) -> None:
        self.station = Station(self.ctx)

    @property
    def on_lan(self) -> Station:
        assert self.station is not None
        return self.station

    def send(self, frames: list[str]) -> None:
        self.on_lan.stop()
        self.on_lan.send(*(bytes.fromhex(frame) for frame in frames))
        self.on_lan.go_on()

    def post(self, frames: list[str]) -> None:
        """Send frames by a send queue."""
        for frame in map(bytes.fromhex, frames):
            self._sq.post(eth(frame[: ETHERNET.size]), inlined(frame[ETHERNET.size :]))
            self._sq.done()

    @functools.cached_property
    def _sq(self) -> Sq:
        make = Maker(self.ctx)
        return Sq(make, Cq(make))

    def link(self, up: bool) -> None:
        """Plug the cable in, or pull it."""
        nic_of(self.ctx).set_link(up)

    def got(self, count: int) -> list[str]:
        frames: list[bytes] = []
        end = time.monotonic() + 10
        while True:
            frames += self.on_lan.got()
            if len(frames) >= count:
                return [frame.hex() for frame in frames]
            assert time.monotonic() < end, f"{len(frames)} frames instead of {count}: {frames}"
            time.sleep(1e-3)

    def count(self, name: str) -> int:
        nic_of(self.ctx).engine.synchronize()  # a frame is counted in the turn in which it arrives
        return nic_of(self.ctx).counters[name]

    def neighbours(self) -> int:
        """How many NICs of the LAN this one has wires to."""
        lan = nic_of(self.ctx).links.lan
        assert lan is not None
        return len(lan._wires)

    def close(self) -> None:
        remove_rules(self.ctx)
        self.ctx.close()


def main() -> None:
    nic = _Nic(*json.loads(sys.argv[1]))
    print(json.dumps({"value": nic_of(nic.ctx).mac.hex()}), flush=True)
    obey(nic)


if __name__ == "__main__":
    main()
