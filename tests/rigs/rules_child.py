"""A NIC with a flow port in a separate process, which sends frames to itself; `Child` is the test's end of it."""

import json
import subprocess
import sys
from typing import Any

from gpunetio import PortConfig, eth, verbs
from gpunetio.flow import DROP, KERNEL, FlowPort, Rss, match
from gpunetio.memory import HostMemory
from gpunetio.nic.host.engine import compile_engine
from nic_child import obey
from repository import environment

MAX_PACKET, BURST = 1024, 16


class Child:
    """Starts it with a device's name."""

    def __init__(self, name: str):
        compile_engine()  # once, for all processes
        self._process = subprocess.Popen(
            [sys.executable, __file__, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment(),
        )
        try:
            self.name, self.pid, self.has = name, self._process.pid, self.answer()
        except BaseException:
            self.kill()
            raise

    def tell(self, what: str, *args: Any, **named: Any) -> None:
        """Have it do something, whose `answer` comes later."""
        assert self._process.stdin is not None
        print(json.dumps(["do", what, args, named]), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the other process has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def ask(self, what: str, *args: Any, **named: Any) -> Any:
        """Have it do something: the answer."""
        self.tell(what, *args, **named)
        return self.answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class _Nic:
    def __init__(self, name: str):
        self.ctx = verbs.open(name, port=PortConfig(workers=1))
        pd = self.ctx.create_pd()
        self.port = FlowPort(self.ctx)
        self.queues = [eth.ManagedRxq(pd, max_burst=BURST, max_packet=MAX_PACKET) for _ in range(2)]
        self.txq = eth.CpuTxq(pd, 64)
        self.memory = HostMemory(1 << 16)
        self.region = pd.register(self.memory)
        self.rules: dict[int, Any] = {}

    def hello(self) -> dict[str, Any]:
        mac = self.ctx.provider.nic.mac  # type: ignore[attr-defined]
        return {"mac": mac.hex(":"), "rqns": [rxq.rqn for rxq in self.queues], "sqn": self.txq.sqn}

    def do(self, what: str, args: list[Any], named: dict[str, Any]) -> Any:
        return getattr(self, what)(*args, **named)

    def steer(self, kind: str, fields: dict[str, Any], to: str, **how: Any) -> int:
        """Add a rule: its key. Fields that are lists are a value and a mask."""
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        where = {"drop": DROP, "kernel": KERNEL, "rq": self.queues[0], "rss": Rss(self.queues)}[to]
        key = len(self.rules)
        self.rules[key] = self.port.steer(getattr(match, kind)(**given), to=where, **how)
        return key

    def fill(self, count: int) -> None:
        """Add rules for UDP ports from 1 on."""
        for number in range(1, count + 1):
            self.steer("udp", {"dst": number}, "drop")

    def churn(self, rounds: int) -> None:
        """Add and remove rules for UDP ports from 1000 on, each of which is there alone."""
        for number in range(rounds):
            self.port.steer(match.udp(dst=1000 + number % 1000), to=self.queues[0], tag=number % 1000 + 1).close()

    def send(self, frame: str, count: int) -> None:
        """Send a frame to itself so many times."""
        raw = bytes.fromhex(frame)
        self.memory.array[: len(raw)] = list(raw)
        for _ in range(count):
            self.txq.send(self.region, 0, len(raw))
            (sent,) = self.txq.completions(timeout=10)
            assert sent.error is None, sent.error

    def receive(self) -> int:
        """Take what has arrived and give the buffers back: how many packets."""
        packets = [packet for rxq in self.queues for packet in rxq.receive(1000, timeout=0)]
        for packet in packets:
            packet.release()
        return len(packets)

    def clear(self) -> None:
        """Remove all rules, and take what has arrived."""
        for rule in self.rules.values():
            rule.close()
        self.rules.clear()
        while self.receive():
            pass

    def close(self) -> None:
        self.port.close()
        for queue in (*self.queues, self.txq):
            queue.close()
        self.ctx.close()


def main() -> None:
    nic = _Nic(sys.argv[1])
    print(json.dumps({"value": nic.hello()}), flush=True)
    obey(nic)


if __name__ == "__main__":
    main()
