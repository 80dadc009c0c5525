"""A NIC in a separate process, controlled by lines of JSON; `Child` is its other end, in the test."""

import json
import subprocess
import sys
from typing import Any

from gpunetio import Faults, LinkLayer, PortConfig, verbs
from gpunetio.errors import DocaError
from gpunetio.verbs import QpEndpoint
from nic_rig import REQ, SIZE, WRITE, Buffer, Queue, connect


class Child:
    """Starts it with a device's name (None: the first that is free) and the fields of its PortConfig."""

    def __init__(self, name: str | None, **config: Any):
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps([name, config])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        try:
            hello = self._answer()
        except BaseException:
            self.close()
            raise
        self.name, self.pid = hello["name"], self._process.pid
        self.address, self.key = hello["address"], hello["key"]
        gid = bytes.fromhex(hello["gid"])
        self.endpoint = QpEndpoint(hello["qpn"], gid, hello["lid"], hello["mtu"], hello["psn"])

    def ask(self, what: str, *args: Any) -> Any:
        """Have it do something: the answer. What it raised is raised here, as the text of an AssertionError."""
        assert self._process.stdin is not None
        print(json.dumps([what, *args]), file=self._process.stdin, flush=True)
        answer = self._answer()
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def connect(self, end: QpEndpoint, **attributes: Any) -> None:
        self.ask("connect", [end.qpn, end.gid.hex(), end.lid, end.mtu, end.psn], attributes)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the other process has ended"
        return json.loads(line)

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


class _Nic:
    def __init__(self, name: str | None, config: dict[str, Any]):
        if "link_layer" in config:
            config["link_layer"] = LinkLayer[config["link_layer"]]
        if "faults" in config:
            config["faults"] = Faults(**config["faults"])
        if "addresses" in config:
            config["addresses"] = tuple(config["addresses"])
        self.sgid_index = config.pop("sgid_index", 0)
        self.ctx = verbs.open(name, port=PortConfig(**config))
        self.pd = self.ctx.create_pd()
        self.queue, self.buffer = Queue(self.pd), Buffer(self.pd, SIZE)
        self.end = self.queue.qp.endpoint(sgid_index=self.sgid_index)

    def hello(self) -> dict[str, Any]:
        end = self.end
        return {
            "name": self.ctx.name, "qpn": end.qpn, "gid": end.gid.hex(), "lid": end.lid, "mtu": end.mtu,
            "psn": end.psn, "address": self.buffer.address, "key": self.buffer.key,
        }

    def connect(self, end: list, attributes: dict[str, Any]) -> None:
        qpn, gid, lid, mtu, psn = end
        self.queue.qp.connect(
            QpEndpoint(qpn, bytes.fromhex(gid), lid, mtu, psn), sgid_index=self.sgid_index, **attributes
        )

    def receive(self) -> None:
        self.queue.receive(self.buffer.at())

    def arrived(self) -> list[int]:
        return list(self.queue.arrived.next()[:-1])  # the payload cannot be JSON

    def bytes(self, nbytes: int) -> str:
        return self.buffer.bytes[:nbytes].tobytes().hex()

    def counter(self, name: str) -> int:
        return int(self.queue.nic.counters[name])

    def works_inside(self) -> bool:
        """Whether two QPs of this NIC can talk."""
        other = Queue(self.pd)
        mine = Queue(self.pd)
        connect(mine, other)
        source = Buffer(self.pd, 100, fill=3)
        mine.post(WRITE, self.buffer.remote(), source.at())
        ok = mine.done.next().opcode == REQ
        return ok and self.buffer.bytes[:100].tobytes() == source.bytes.tobytes()

    def close(self) -> None:
        self.ctx.close()


def obey(nic: Any) -> None:
    """Call the methods that lines of standard input name, and print what they return. Then close it."""
    for line in sys.stdin:
        what, *args = json.loads(line)
        try:
            answer = {"value": getattr(nic, what)(*args)}
        except (DocaError, AssertionError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    nic.close()


def main() -> None:
    nic = _Nic(*json.loads(sys.argv[1]))
    print(json.dumps(nic.hello()), flush=True)
    obey(nic)


if __name__ == "__main__":
    main()
