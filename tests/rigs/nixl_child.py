"""An agent of NIXL in a separate process: `nixl_child.py initiator PORT` or `nixl_child.py target PORT`.

They meet over TCP. The initiator reads and writes the target's memory in transfers of growing sizes.
"""

import os
import sys
import time
from multiprocessing.connection import Client, Connection, Listener

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config  # pyright: ignore[reportMissingImports]

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20]
LIMIT = 60  # seconds
_KEY = b"nixl"


def contents(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, sum(SIZES), np.uint8)


THEIRS, OURS = contents(1), contents(2)  # what is read, and what is written


def meet(role: str, port: int) -> Connection:
    if role == "target":
        with Listener(("127.0.0.1", port), authkey=_KEY) as listener:
            return listener.accept()
    end = time.monotonic() + LIMIT
    while True:
        try:
            return Client(("127.0.0.1", port), authkey=_KEY)
        except ConnectionRefusedError:
            assert time.monotonic() < end, "the target does not listen"
            time.sleep(0.05)


class Agent:
    """An agent with one region of host memory, which knows its peer."""

    def __init__(self, role: str, peer: Connection):
        self.nixl = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
        self.memory = THEIRS.copy() if role == "target" else np.zeros_like(THEIRS)
        self.address = self.memory.ctypes.data
        self.registered = self.nixl.get_reg_descs([(self.address, self.memory.nbytes, 0, "")], "DRAM")
        self.nixl.register_memory(self.registered)
        self.notified: list[bytes] = []
        peer.send((self.nixl.get_agent_metadata(), self.address))
        metadata, self.peer_address = peer.recv()
        self.peer = self.nixl.add_remote_agent(metadata)

    def transfer(self, operation: str, at: int, nbytes: int) -> None:
        """Transfer bytes at the same place of both regions, and notify the peer."""
        here, there = (
            self.nixl.get_xfer_descs([(address + at, nbytes, 0)], "DRAM")
            for address in (self.address, self.peer_address)
        )
        handle = self.nixl.initialize_xfer(operation, here, there, self.peer, f"{operation} {nbytes}".encode())
        state, end = self.nixl.transfer(handle), time.monotonic() + LIMIT
        while state == "PROC" and time.monotonic() < end:
            state = self.nixl.check_xfer_state(handle)
        assert state == "DONE", state
        self.nixl.release_xfer_handle(handle)

    def expect(self, message: str) -> None:
        """Wait for the notification of a transfer."""
        end = time.monotonic() + LIMIT
        while message.encode() not in self.notified:
            self.notified += [each for found in self.nixl.get_new_notifs().values() for each in found]
            assert time.monotonic() < end, f"no notification of {message}"
            time.sleep(0.001)

    def close(self) -> None:
        self.nixl.deregister_memory(self.registered)
        self.nixl.remove_remote_agent(self.peer)


def main(role: str, port: int) -> None:
    with meet(role, port) as peer:
        agent = Agent(role, peer)
        at = 0
        for nbytes in SIZES:
            place = slice(at, at + nbytes)
            if role == "target":
                agent.expect(f"READ {nbytes}")
                agent.expect(f"WRITE {nbytes}")
                assert np.array_equal(agent.memory[place], OURS[place]), f"written: {nbytes} bytes"
                peer.send("checked")
            else:
                agent.transfer("READ", at, nbytes)
                assert np.array_equal(agent.memory[place], THEIRS[place]), f"read: {nbytes} bytes"
                agent.memory[place] = OURS[place]
                agent.transfer("WRITE", at, nbytes)
                assert peer.recv() == "checked"
            at += nbytes
        assert np.array_equal(agent.memory, OURS)
        agent.close()
    print(role, "done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    os._exit(0)  # a destructor of the wheel's copy of libnl crashes, even over TCP and without software NICs
